"""The programs in the documentation: Python blocks that a comment in front of them marks as complete.

    <!-- run: orders payments -->
    ```python
    ...
    ```

The names are topics that must exist. A program that needs none says `<!-- run -->`. What runs is what stands there, but
for the address of the cluster. A module of tests says `<!-- pytest -->`, or `<!-- pytest: pytest_asyncio.plugin -->`
with the plugins that it needs beside ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ADDRESS = "localhost:9092"
"""What programs in the documentation connect to."""

_PROGRAM = re.compile(
    r"^<!-- (?P<how>run|pytest)(?:: (?P<words>[^>]+?))? -->\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Program(NamedTuple):
    page: Path
    line: int
    is_for_pytest: bool
    words: tuple[str, ...]
    """What the comment says more: topics, or plugins."""
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.stem}-{self.line}"


def programs_of(page: Path) -> list[Program]:
    text = page.read_text()
    return [
        Program(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["how"] == "pytest",
            tuple((found["words"] or "").split()),
            found["text"],
        )
        for found in _PROGRAM.finditer(text)
    ]


def all_programs() -> list[Program]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [program for page in pages for program in programs_of(page)]

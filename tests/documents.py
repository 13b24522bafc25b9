"""The programs in the documentation: its Python blocks. A comment in front of each says how it is run.

    <!-- run: orders payments -->
    ```python
    ...
    ```

The names are topics that must exist. A program that needs none says `<!-- run -->`. A command that must run first
follows a semicolon: `<!-- run: orders; minibroker consume orders > file -->`. The test runs the program as it stands,
with the address of its own cluster. `loud` is as `run`, for libraries that print warnings of their own.
A module of tests says `<!-- pytest -->`, or `<!-- pytest: pytest_asyncio.plugin -->` with the plugins that it needs
beside ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ADDRESS = "localhost:9092"
"""What programs in the documentation connect to."""

_PROGRAM = re.compile(
    r"^<!-- (?P<how>run|loud|pytest)(?:: (?P<words>[^\n;]+)(?:; (?P<command>[^\n]+))?)? -->\n"
    r"```python\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Program(NamedTuple):
    page: Path
    line: int
    how: str
    """run, loud or pytest."""
    words: tuple[str, ...]
    """What the comment says more: topics, or plugins."""
    command: str | None
    """To be run first."""
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
            found["how"],
            tuple((found["words"] or "").split()),
            found["command"],
            found["text"],
        )
        for found in _PROGRAM.finditer(text)
    ]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def all_programs() -> list[Program]:
    return [program for page in PAGES for program in programs_of(page)]

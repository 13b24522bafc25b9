"""The programs in the documentation: its Python blocks. The comment before a block determines how it is run.

    <!-- run: orders payments -->
    ```python
    ...
    ```

The names are topics that must exist; a program without topics has `<!-- run -->`. A command that must run first follows
a semicolon: `<!-- run: orders; minibroker consume orders > file -->`. The test runs the program unchanged except for
the address of the cluster. `loud` is like `run`, for libraries that print warnings. A module of tests has
`<!-- pytest -->`, or `<!-- pytest: pytest_asyncio.plugin -->` with the plugins that it needs in addition to ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ADDRESS = "localhost:9092"
"""The bootstrap address in the documentation."""

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
    """Topics, or plugins of pytest."""
    command: str | None
    """A command to run first."""
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

"""Output that changes in place on a terminal: a text, a progress bar.

Importing rich takes a tenth of a command's time, so it is imported only when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def text_in_place() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text on stdout."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, console=Console(highlight=False)) as live:
        yield lambda text: live.update(Text(text), refresh=True)


@contextmanager
def progress_bar(description: str, total: int | None, *, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal. Yields a function that takes the completed part of `total`."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    numbers = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *numbers)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)

"""The display on a terminal, and its cost without one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

BAR = """
from minibroker.client.cli.terminal.live import progress_bar
with progress_bar("orders", 2_000_000, of_bytes=True) as show:
    show(1_000_000)
"""
TEXT = """
from minibroker.client.cli.terminal.live import text_in_place
with text_in_place() as show:
    show("first")
    show("[then]")
"""


def seen_on_a_terminal(program: str) -> str:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # Linux reports the end of a terminal like this
            while piece := os.read(ours, 4_096):
                seen += piece
    os.close(ours)
    assert process.returncode == 0, seen
    return seen.decode()


@pytest.mark.parametrize(("program", "texts"), [(BAR, ["orders", "1.0/2.0 MB"]), (TEXT, ["first", "[then]"])])
def test_what_changes_is_shown_in_place(program: str, texts: list[str]) -> None:
    seen = seen_on_a_terminal(program)
    assert all(text in seen for text in texts)
    assert "\x1b[2K" in seen, "nothing was erased"


def test_rich_is_not_imported_without_a_terminal() -> None:
    code = f"import sys, minibroker; minibroker.application()\n{BAR}\nprint('rich' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("False\n", "")

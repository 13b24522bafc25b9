"""Log lines that a command writes to stderr."""

from __future__ import annotations

import signal
import subprocess
import sys


def test_an_interruption_while_modules_are_imported_is_silent() -> None:
    command = [sys.executable, "-v", "-P", "-m", "minibroker", "topics", "list", "--bootstrap", "127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            while b"import 'minibroker.client.errors'" not in (line := process.stderr.readline()):
                assert line
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
        finally:
            process.kill()
    # A shell shows 130 for both. Python ends by the signal if it came within the `exec` of a string (a dataclass's).
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in rest
    assert b"KeyboardInterrupt" not in rest


def test_a_command_that_waits_says_for_what_and_where_to_look_and_when_it_goes_on() -> None:
    program = """
import logging, sys
from pathlib import Path

import typer

from minibroker.client.cli.terminal.log import show_waits
from minibroker.client.cli.terminal.output import DEFAULT_DATA, DataOption, run_app
from minibroker.client.stalls import Stalls

show_waits()
app = typer.Typer(add_completion=False)

@app.command()
def wait(data: DataOption = DEFAULT_DATA) -> None:
    stalls = Stalls("minibroker-cli")
    stalls.look(0.0, ["orders-0"], lambda _: "it has no leader")
    stalls.look(6.0, ["orders-0"], lambda _: "it has no leader")
    stalls.look(7.0, [], str)
    logging.getLogger("minibroker.client").info("connected")
    logging.getLogger("minibroker.client").warning("of its own end a command speaks itself")

@app.command()
def status(data: DataOption = DEFAULT_DATA) -> None: ...

sys.exit(run_app(app, ["wait", "--data", "here"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [
        "warning: minibroker-cli: no progress for 6.0 s of orders-0: it has no leader. "
        "See `minibroker status --data here`",
        "info: minibroker-cli: the stall of orders-0 is over after 7.0 s",
    ]

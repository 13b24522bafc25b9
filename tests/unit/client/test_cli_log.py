"""What a process of the command line writes on stderr beside errors."""

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
    assert process.returncode == 130
    assert b"Traceback" not in rest
    assert b"KeyboardInterrupt" not in rest


def test_what_the_client_warns_of_is_one_line_on_stderr() -> None:
    program = """
import logging
from minibroker.client.cli.log import show_warnings

show_warnings()
logging.getLogger("minibroker.client").info("connected")
logging.getLogger("minibroker.client").warning("%s has no leader", "orders-0")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("", "warning: orders-0 has no leader\n")

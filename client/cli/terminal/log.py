"""Shows on stderr, in the form of errors, what the client logs while it waits for brokers, and when it goes on.

A command reports itself how it ends, so what the client logs about its own end is left out.
"""

from __future__ import annotations

import logging
import sys

from minibroker.client.cli.terminal.hints import pastable


def show_stalls() -> None:
    """To be called once, for the whole process."""
    log = logging.getLogger("minibroker.client.stalls")
    log.setLevel(logging.INFO)
    log.addHandler(_Lines())
    logging.getLogger("minibroker").addHandler(logging.NullHandler())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(pastable(f"{record.levelname.lower()}: {record.getMessage()}\n"))

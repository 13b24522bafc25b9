"""What the client has to say while it waits for brokers, and when it goes on: on stderr, in the way of errors.

How a command ends is told by the command, so what the client says of its own end is left out.
"""

from __future__ import annotations

import logging
import sys

from minibroker.client.cli.hints import pastable


def show_stalls() -> None:
    """For the whole process: once."""
    log = logging.getLogger("minibroker.client.stalls")
    log.setLevel(logging.INFO)
    log.addHandler(_Lines())
    logging.getLogger("minibroker").addHandler(logging.NullHandler())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(pastable(f"{record.levelname.lower()}: {record.getMessage()}\n"))

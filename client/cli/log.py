"""What the client has to say while it waits for brokers: its log's warnings, on stderr, in the way of errors."""

from __future__ import annotations

import logging
import sys


def show_warnings() -> None:
    """For the whole process: once."""
    logging.getLogger("minibroker").addHandler(_Lines(logging.WARNING))


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.levelname.lower()}: {record.getMessage()}\n")

"""Shows on stderr, in the form of errors, what is logged while a command waits: for brokers, or for a download.

A command reports itself how it ends, so what the client logs about its own end is left out.
"""

from __future__ import annotations

import logging
import sys

from minibroker.client.cli.terminal.hints import pastable


def show_waits() -> None:
    """To be called once, for the whole process."""
    for name in ("minibroker.client.stalls", "minibroker.deploy.local.zookeeper_jars"):
        log = logging.getLogger(name)
        log.setLevel(logging.INFO)
        log.addHandler(_Lines())
    logging.getLogger("minibroker").addHandler(logging.NullHandler())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(pastable(f"{record.levelname.lower()}: {record.getMessage()}\n"))

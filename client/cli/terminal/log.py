"""Shows on stderr, in the form of errors, what is logged while a command waits: for brokers, or for a download.

Messages about the client's own end are left out, because the command reports its end itself.
"""

from __future__ import annotations

import logging
import sys

from minibroker.client.cli.terminal.hints import pastable


def show_waits() -> None:
    """Call this once per process."""
    for name in ("minibroker.client.stalls", "minibroker.deploy.local.zookeeper_jars"):
        log = logging.getLogger(name)
        log.setLevel(logging.INFO)
        log.addHandler(_Lines())
    logging.getLogger("minibroker").addHandler(logging.NullHandler())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(pastable(f"{record.levelname.lower()}: {record.getMessage()}\n"))

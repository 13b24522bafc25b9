"""The broker's log: one line for each message, whatever clients have put into it, and a bounded number of lines.

The problem: client ids, group ids, protocol names, reasons and transactional ids are any text that a client likes. A
line break in one of them would forge lines of other kinds, which `minibroker status` and operators believe; escape
sequences would reach their terminals; and a client that makes the broker log with each request fills the disk.

The choice: the handler of the root logger cares for all of that, so that no call has to. Each line of a message begins
with the time and the level, and the lines of a traceback are indented. Therefore a line that begins differently was
printed by the process itself (`broker/__main__.py`). Messages of one kind, which is one logger and format string, are
limited; the number of those left out is logged.
"""

from __future__ import annotations

import logging
from typing import TextIO

from minibroker.protocol.words import printable

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
LINE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"

MAX_ARGUMENT_CHARACTERS = 1_000
"""A longer value in a message is cut, so that the words after it are still seen."""
MAX_MESSAGE_CHARACTERS = 4_000
MAX_TRACEBACK_CHARACTERS = 16_000
"""The beginning of a longer traceback is left out: its end names the error."""

BURST = 500
"""Messages of one kind that may come at once. A controller that moves many partitions logs some for each."""
PER_SECOND = 10
"""Messages of one kind per second after that."""
REPORT_INTERVAL_S = 5.0
"""Seconds between two reports of the number of messages left out, for each kind."""
MAX_KINDS = 2_000
"""More kinds than the broker's code has. All begin anew when there are more."""


class LineFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(LINE_FORMAT, TIME_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(_cut(_message(record), MAX_MESSAGE_CHARACTERS))
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if record.exc_info:
            traceback = self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARACTERS:]
            line += "".join(f"\n  {printable(each)}" for each in traceback.splitlines())
        return line


def _message(record: logging.LogRecord) -> str:
    if isinstance(record.args, tuple) and record.args:
        return str(record.msg) % tuple(map(_bounded, record.args))
    return record.getMessage()


def _bounded(argument: object) -> object:
    if isinstance(argument, str | BaseException):
        return _cut(str(argument), MAX_ARGUMENT_CHARACTERS)
    return argument


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


class _Kind:
    """A token bucket for the messages of one kind, by the times of the messages."""

    __slots__ = ("left_out", "refilled_at_s", "reported_at_s", "tokens")

    def __init__(self, now_s: float) -> None:
        self.tokens = float(BURST)
        self.refilled_at_s = now_s
        self.left_out = 0
        self.reported_at_s = 0.0

    def take(self, now_s: float) -> bool:
        passed_s = max(now_s - self.refilled_at_s, 0.0)  # the wall clock may jump
        self.refilled_at_s = now_s
        self.tokens = min(self.tokens + passed_s * PER_SECOND, float(BURST))
        if self.tokens < 1.0:
            self.left_out += 1
            return False
        self.tokens -= 1.0
        return True


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines. Messages of level DEBUG, which are off by default, are not limited."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter())
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._silenced: dict[tuple[str, str], _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        if record.levelno <= logging.DEBUG:
            super().emit(record)
            return
        key = record.name, str(record.msg)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(record.created)
        if kind.take(record.created):
            super().emit(record)
        else:
            self._silenced[key] = kind
        if self._silenced:
            self._report(record.created)

    def _report(self, now_s: float) -> None:
        for key, kind in list(self._silenced.items()):
            if abs(now_s - kind.reported_at_s) >= REPORT_INTERVAL_S:
                kind.reported_at_s = now_s
                del self._silenced[key]
                self._say_left_out(key, kind, now_s)

    def _say_left_out(self, key: tuple[str, str], kind: _Kind, now_s: float) -> None:
        name, template = key
        text = "%d messages like the following were left out, as there may be %d per second: %s"
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (kind.left_out, PER_SECOND, template), None)
        record.created, record.msecs = now_s, now_s % 1 * 1_000
        kind.left_out = 0
        super().emit(record)


def configure(level: str, stream: TextIO) -> None:
    """Write the log of this process to `stream`."""
    logging.basicConfig(level=level, handlers=[LimitedHandler(stream)])

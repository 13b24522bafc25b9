"""The broker's log keeps its form and its size, whatever clients send."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.broker.log_format import BURST, MAX_KINDS, PER_SECOND, LimitedHandler
from minibroker.deploy.local import broker_process
from minibroker.deploy.local.broker_process import StartingBroker
from minibroker.deploy.local.processes import Process

FORGERIES = [
    "x\nerror: the disk is full",
    "x\n2026-11-28T03:00:00.123 ready broker.id=1 port=9092",
    'x\r2026-11-28T03:00:00.123 handed over: {"moved":1,"remaining":0,"among_them":[],"problem":""}',
    "x\x0berror: a\x0cerror: b\x1cerror: c\x85error: d\u2028error: e\u2029error: f",
    "\x1b[2J\x1b]0;title\x07\u202eerror: g",
    "\nerror: long" * 100_000,
]


class Log:
    def __init__(self, name: str) -> None:
        self.written = io.StringIO()
        self.handler = LimitedHandler(self.written)
        self.logger = logging.getLogger(name)
        self.logger.propagate = False
        self.logger.addHandler(self.handler)
        self.logger.setLevel(logging.DEBUG)

    def log(self, at_s: float, template: str, *arguments: object, level: int = logging.WARNING) -> None:
        record = self.logger.makeRecord(self.logger.name, level, "", 0, template, arguments, None)
        record.created = at_s
        self.logger.handle(record)

    @property
    def text(self) -> str:
        return self.written.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log(f"minibroker.test.{request.node.name}")
    yield log
    log.logger.removeHandler(log.handler)


@pytest.mark.parametrize("forgery", FORGERIES, ids=range(len(FORGERIES)))
def test_text_of_clients_forges_no_line_that_the_launcher_believes(forgery: str, log: Log, tmp_path: Path) -> None:
    log.logger.info("group %s rebalances: %s", "billing", forgery)
    log.logger.info("%s", ValueError(forgery))
    try:
        raise ValueError(forgery)
    except ValueError:
        log.logger.exception("a handler has failed for %r", forgery)
    assert sum(not line.startswith("  ") for line in log.lines) == 3
    assert all(len(line) < 10_000 for line in log.lines)
    assert log.text.replace("\n", "").isprintable()
    path = tmp_path / "broker-1.log"
    path.write_text(log.text)
    assert broker_process.last_error(path) is None
    assert broker_process.handed_over(path) is None
    broker = StartingBroker(1, Process(1, "b"), path, 0)
    assert not broker_process._is_ready(broker)
    assert broker_process._progress(broker) == ""


def test_a_line_that_begins_before_the_part_that_is_read_is_not_taken_for_an_error(tmp_path: Path) -> None:
    log = tmp_path / "broker-1.log"
    line = "error: the disk is full" + "x" * broker_process._LAST_LINE_BYTES
    log.write_text("2026 INFO minibroker.broker: " + line[: broker_process._LAST_LINE_BYTES - 1] + "\n")
    assert broker_process.last_error(log) is None


def test_a_flood_of_one_kind_is_limited_and_counted(log: Log) -> None:
    for number in range(100_000):
        log.log(1_000.0 + number / 10_000, "client %s sent bad input", f"client-{number}")
    bad = [line for line in log.lines if "client-" in line]
    assert BURST <= len(bad) <= BURST + 10 * PER_SECOND + 1
    counted = [int(line.split(": ")[1].split()[0]) for line in log.lines if "were left out" in line]
    assert len(counted) in (2, 3)
    before = len(log.lines)
    log.log(1_100.0, "something else")
    (other, left_out) = log.lines[before:]
    assert other.endswith("something else")
    assert left_out.endswith("client %s sent bad input")
    assert len(bad) + sum(counted) + int(left_out.split(": ")[1].split()[0]) == 100_000


def test_other_kinds_and_debug_are_not_limited_by_a_flood(log: Log) -> None:
    for _ in range(BURST + 10):
        log.log(1_000.0, "a flood")
        log.log(1_000.0, "asked for", level=logging.DEBUG)
    log.log(1_000.0, "one line")
    assert sum(line.endswith(": a flood") and "left out" not in line for line in log.lines) == BURST
    assert sum(line.endswith("asked for") for line in log.lines) == BURST + 10
    assert sum(line.endswith("one line") for line in log.lines) == 1


def test_the_kinds_that_are_remembered_are_limited(log: Log) -> None:
    for number in range(3 * MAX_KINDS):
        log.log(1_000.0, f"kind {number}")
    assert len(log.handler._kinds) <= MAX_KINDS


def test_the_words_after_a_long_value_are_kept(log: Log) -> None:
    log.logger.warning("%s is refused: %s", "x" * 1_000_000, "it has no secret")
    assert log.lines[0].endswith("it has no secret")
    assert sys.getsizeof(log.text) < 5_000

"""A connection to ZooKeeper that is cut, and answers that come late."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minibroker.controller.zookeeper_cut import Cut
from minibroker.controller.zookeeper_threads import Hearing, WakeUps


class Connection:
    """Both ends of a connection, the wake-ups of its thread, and whether it is cut."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.wake_ups = WakeUps()
        self.is_cut = True
        self._cut = Cut(lambda: self.is_cut)

    def select(self, readers: list[Any], writers: list[Any], timeout_s: float | None) -> list[list[Any]]:
        def really(readers: list[Any], writers: list[Any], timeout_s: float | None) -> Any:
            return select.select(readers, writers, [], timeout_s)

        return list(self._cut.select(really, readers, writers, timeout_s))[:2]

    def check(self) -> None:
        self._cut.check()


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    yield made
    made.ours.close()
    made.theirs.close()
    made.wake_ups.close()


def test_nothing_can_be_read_or_written_while_it_is_cut(connection: Connection) -> None:
    connection.theirs.send(b"pong")
    assert connection.select([connection.ours], [], 0.05) == [[], []]
    assert connection.select([], [connection.ours], 0.05) == [[], []]
    connection.is_cut = False
    assert connection.select([connection.ours], [], 0.05) == [[connection.ours], []]
    assert connection.select([], [connection.ours], None) == [[], [connection.ours]]


def test_requests_still_wake_the_thread(connection: Connection) -> None:
    connection.theirs.send(b"pong")
    connection.wake_ups.send(b"\0")
    assert connection.select([connection.ours, connection.wake_ups], [], None) == [[connection.wake_ups], []]


def test_a_wait_that_has_begun_notices_the_cut_and_the_healing(connection: Connection) -> None:
    connection.is_cut = False
    found: list[list[list[Any]]] = []
    waiting = threading.Thread(target=lambda: found.append(connection.select([connection.ours], [], None)))
    waiting.start()
    connection.is_cut = True
    connection.theirs.send(b"event")
    waiting.join(0.2)
    assert found == []
    connection.is_cut = False
    waiting.join(60)
    assert found == [[[connection.ours], []]]


def test_no_connection_is_opened_while_it_is_cut(connection: Connection) -> None:
    with pytest.raises(TimeoutError, match="cuts this broker from ZooKeeper"):
        connection.check()
    connection.is_cut = False
    connection.check()


def test_an_answer_that_is_late_is_reported_with_the_time_since_the_first_question() -> None:
    now_s = 100.0
    told: list[tuple[float, float]] = []
    hearing = Hearing(6_000, lambda function, *seconds: function(*seconds), lambda: now_s)
    hearing.on_heard_again = lambda *seconds: told.append(seconds)

    def after(seconds: float, call: Callable[[], None]) -> None:
        nonlocal now_s
        now_s += seconds
        call()

    after(1.9, hearing.asked)  # a ping, when nothing else was sent
    after(0.9, hearing.heard)
    assert told == []
    after(1.5, hearing.asked)
    after(1.0, hearing.asked)
    after(0.25, hearing.heard)
    assert told == [(2.75, 1.25)]
    after(3.5, hearing.heard)  # the process was stopped
    assert told[1:] == [(3.5, 0.0)]
    assert hearing.silent_s == 0.0

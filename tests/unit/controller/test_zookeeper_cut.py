"""A connection to ZooKeeper that is cut."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minibroker.controller.zookeeper_cut import Cut
from minibroker.controller.zookeeper_threads import WakeUps


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

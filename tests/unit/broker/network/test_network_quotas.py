from __future__ import annotations

from collections.abc import Iterable

import pytest

from minibroker.broker.network.quotas import RESERVED, ConnectionQuotas, why_too_few_descriptors
from minibroker.broker.network.settings import NetworkSettings


def quotas(
    total: int = 100, per_address: int = 100, protected: str | None = None, **of_listeners: int
) -> ConnectionQuotas:
    return ConnectionQuotas(
        NetworkSettings(
            max_connections=total,
            max_connections_per_ip=per_address,
            protected_listener=protected,
            max_connections_of_listeners=of_listeners,
        )
    )


OPEN, BROKERS = "OPEN", "BROKERS"
"""Listeners."""


class Fake:
    def __init__(self, limited: ConnectionQuotas, address: str, listener: str, idle_since: float | None = 0.0) -> None:
        self.address = address
        self.listener = listener
        self.idle_since = idle_since
        self.closed_because: str | None = None
        limited.joined(self)

    def give_way(self, reason: str) -> None:
        self.closed_because = reason


def opened(
    limited: ConnectionQuotas, address: str, now: float = 0.0, idle_since: float | None = 0.0, listener: str = OPEN
) -> Fake:
    assert limited.try_open(address, listener, now) is None
    return Fake(limited, address, listener, idle_since)


def client(limited: ConnectionQuotas, address: str, idle_since: float | None = None, listener: str = OPEN) -> Fake:
    connection = opened(limited, address, idle_since=idle_since, listener=listener)
    assert limited.admit(connection, 0.0) is None
    return connection


def test_a_connection_above_the_limit_takes_the_place_of_the_one_that_has_waited_longest() -> None:
    limited = quotas(total=3)
    waiting = [opened(limited, f"10.0.0.{number}") for number in range(4)]
    assert [each.closed_because for each in waiting] == ["max.connections=3 is reached", None, None, None]
    limited.left(waiting[0])
    assert limited.total == 3
    assert [limited.admit(each, 0.0) for each in waiting[1:]] == [None] * 3


def test_an_address_above_its_own_limit_loses_its_own_connections() -> None:
    limited = quotas(per_address=2)
    others, first, second = opened(limited, "b"), opened(limited, "a"), opened(limited, "a")
    opened(limited, "a")
    assert first.closed_because == "max.connections.per.ip=2 is reached"
    assert others.closed_because is second.closed_because is None
    assert (limited.of_address("a"), limited.of_address("b")) == (2, 1)


def test_an_idle_client_gives_way_the_longest_idle_first_and_none_that_was_active_within_a_second() -> None:
    limited = quotas(total=4)
    clients = [client(limited, "a", idle_since) for idle_since in (3.0, 1.0, None, 9.9)]
    for _ in range(2):
        assert limited.try_open("b", OPEN, 10.0) is None
    assert [each.closed_because is not None for each in clients] == [True, True, False, False]
    clients[3].idle_since = None
    assert [each.closed_because is not None for each in clients] == [True, True, False, False]


def test_if_all_clients_are_busy_only_brokers_get_in() -> None:
    limited = quotas(total=2)
    busy = [client(limited, "a"), client(limited, "b")]
    stranger, broker = opened(limited, "c"), opened(limited, "d")
    assert limited.admit(stranger, 0.0) == "max.connections=2 is reached"
    limited.left(stranger)
    limited.proved(broker)
    assert limited.total == 3
    for number in range(10 * RESERVED):
        opened(limited, "e", float(number))
    assert all(each.closed_because is None for each in (*busy, broker))
    limited.left(broker)
    assert limited.of_address("d") == 0


def test_strangers_that_wait_never_keep_out_a_broker_that_comes_later() -> None:
    limited = quotas(total=50, per_address=40)
    brokers = []
    for number in range(1_000):
        opened(limited, f"10.0.0.{number % 3}")
        if number % 100 == 0:
            brokers.append(opened(limited, "10.0.0.1"))
            limited.proved(brokers[-1])
    assert all(broker.closed_because is None for broker in brokers)


def test_a_flood_at_full_and_busy_listeners_is_refused_without_a_look_at_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = quotas(total=10, per_address=1_000)
    for _ in range(10):
        client(limited, "a")
    for _ in range(RESERVED):
        connection = opened(limited, "b")
        limited.admit(connection, 0.0)
    looks: list[int] = []

    def nsmallest(count: int, found: Iterable[object]) -> list[object]:
        looks.append(len(list(found)))
        return []

    monkeypatch.setattr("heapq.nsmallest", nsmallest)
    for number in range(1_000):
        limited.try_open("c", OPEN, 5.0 + number / 1_000)
    assert len(looks) <= 2


def test_addresses_without_connections_are_forgotten() -> None:
    limited = quotas()
    for number in range(50):
        assert limited.try_open(f"10.0.0.{number}", OPEN, float(number)) is None
        limited.close(f"10.0.0.{number}", OPEN)
    assert limited.counts == {}
    assert limited.total == 0


def test_a_connection_gives_way_where_descriptors_run_out() -> None:
    limited = quotas()
    silent = opened(limited, "a")
    assert limited.try_open("b", OPEN, 0.0, "no descriptors are left") is None
    assert silent.closed_because == "no descriptors are left"


def test_connections_leave_descriptors_to_files_and_say_what_to_do_about_it() -> None:
    assert why_too_few_descriptors(768, 1024, 256) is None
    why = why_too_few_descriptors(769, 1024, 256)
    assert why is not None
    assert why.startswith("769 of the 1024 files and connections that this process may have open are taken")
    assert "raise the hard limit" in why


def test_a_listener_above_its_own_limit_loses_its_own_connections() -> None:
    limited = quotas(OPEN=2)
    others = [client(limited, "a", 0.0, BROKERS) for _ in range(3)]
    first, second = client(limited, "a", 1.0), client(limited, "b", None)
    late = [opened(limited, "c", 10.0) for _ in range(2)]
    assert first.closed_because == "listener.name.open.max.connections=2 is reached"
    assert limited.admit(late[0], 10.0) == "listener.name.open.max.connections=2 is reached"
    assert not any(each.closed_because for each in (*others, second, *late))


def test_an_address_may_have_a_limit_of_its_own_or_no_place_at_all() -> None:
    limited = quotas(per_address=2)
    limited.override({"a": 3, "b": 0})
    for _ in range(3):
        client(limited, "a")
    assert limited.try_open("b", OPEN, 0.0) == "max.connections.per.ip.overrides=b:0 is reached"
    late = opened(limited, "a")
    assert limited.admit(late, 0.0) == "max.connections.per.ip.overrides=a:3 is reached"
    limited.override({})
    assert limited.admit(late, 0.0) == "max.connections.per.ip=2 is reached"


def test_a_broker_takes_the_place_of_an_idle_client_of_another_listener_else_of_a_busy_one() -> None:
    limited = quotas(total=4, protected=BROKERS)
    brokers = [client(limited, "b", 0.0, BROKERS)]
    busy, idle, silent = client(limited, "a"), client(limited, "a", 1.0), opened(limited, "c")
    for expected in (idle, silent, busy):
        brokers.append(opened(limited, "b", 10.0, 10.0, BROKERS))
        assert limited.admit(brokers[-1], 10.0) is None
        assert expected.closed_because == "max.connections=4 is reached"
    brokers.append(client(limited, "b", 10.0, BROKERS))
    assert limited.clients == 5
    assert not any(each.closed_because for each in brokers)


def test_no_client_takes_the_place_of_a_broker() -> None:
    limited = quotas(total=2, protected=BROKERS)
    brokers = [client(limited, "b", 0.0, BROKERS) for _ in range(2)]
    late = opened(limited, "a", 10.0)
    assert limited.admit(late, 10.0) == "max.connections=2 is reached"
    assert not any(each.closed_because for each in brokers)


def test_silent_strangers_on_the_listener_of_the_brokers_close_no_client() -> None:
    limited = quotas(total=500, protected=BROKERS)
    clients = [client(limited, "a", idle_since=0.0) for _ in range(50)]
    for number in range(5_000):
        opened(limited, f"10.0.0.{number % 100}", float(number), listener=BROKERS)
    assert not any(each.closed_because for each in clients)
    assert limited.clients <= 500 + RESERVED


def test_the_listener_of_the_brokers_has_its_own_limit_nevertheless() -> None:
    limited = quotas(total=100, protected=BROKERS, BROKERS=1)
    client(limited, "b", None, BROKERS)
    late = opened(limited, "b", listener=BROKERS)
    assert limited.admit(late, 0.0) == "listener.name.brokers.max.connections=1 is reached"

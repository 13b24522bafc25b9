from __future__ import annotations

import pytest

from minibroker.broker.network.quotas import ConnectionQuotas, why_too_few_descriptors


def quotas(total: int = 100, per_address: int = 100, rate: int = 100) -> ConnectionQuotas:
    return ConnectionQuotas(total, per_address, rate)


def test_a_connection_above_the_limit_is_refused_with_the_settings_name() -> None:
    limited = quotas(total=3)
    assert [limited.try_open(f"10.0.0.{n}", 0.0) for n in range(3)] == [None, None, None]
    assert limited.try_open("10.0.0.9", 0.0) == "max.connections=3 is reached"
    assert limited.total == 3
    limited.close("10.0.0.1")
    assert limited.try_open("10.0.0.9", 0.0) is None


def test_each_address_has_a_limit_of_its_own() -> None:
    limited = quotas(per_address=2)
    assert limited.try_open("10.0.0.1", 0.0) is None
    assert limited.try_open("10.0.0.1", 0.0) is None
    assert limited.try_open("10.0.0.1", 0.0) == "max.connections.per.ip=2 is reached"
    assert limited.try_open("10.0.0.2", 0.0) is None
    limited.close("10.0.0.1")
    assert limited.try_open("10.0.0.1", 0.0) is None


def test_addresses_without_connections_are_forgotten() -> None:
    limited = quotas()
    for number in range(50):
        assert limited.try_open(f"10.0.0.{number}", float(number)) is None
        limited.close(f"10.0.0.{number}")
    assert limited.per_address == {}
    assert limited.total == 0


def test_a_seconds_worth_of_connections_may_come_at_once_and_then_the_rate_applies() -> None:
    limited = quotas(rate=10)
    assert [limited.try_open("a", 5.0) for _ in range(10)] == [None] * 10
    assert limited.try_open("a", 5.0) == "max.connection.creation.rate=10 per second is exceeded"
    opened = sum(limited.try_open("a", 5.0 + n / 100) is None for n in range(1, 301))
    assert opened == pytest.approx(30, abs=1)


def test_a_long_silence_allows_no_more_than_a_seconds_worth() -> None:
    limited = quotas(rate=4)
    assert limited.try_open("a", 0.0) is None
    assert [limited.try_open("a", 1_000.0) is None for _ in range(6)] == [True] * 4 + [False] * 2


def test_a_connection_that_is_refused_for_another_reason_does_not_use_up_the_rate() -> None:
    limited = quotas(per_address=1, rate=3)
    assert limited.try_open("a", 0.0) is None
    for _ in range(10):
        assert limited.try_open("a", 0.0) is not None
    assert limited.try_open("b", 0.0) is None
    assert limited.try_open("c", 0.0) is None


def test_connections_leave_descriptors_to_files_and_say_what_to_do_about_it() -> None:
    assert why_too_few_descriptors(768, 1024, 256) is None
    why = why_too_few_descriptors(769, 1024, 256)
    assert why is not None
    assert why.startswith("769 of the 1024 files and connections that this process may have open are taken")
    assert "raise the hard limit" in why

"""Client quotas without I/O: entities, rates, and whose requests count together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.quotas.entities import (
    DEFAULT,
    Limit,
    Part,
    QuotaEntity,
    QuotaKey,
    entity_at,
    from_texts,
    limit_of,
    path_of,
)
from minibroker.broker.quotas.rates import Rate
from minibroker.broker.quotas.stored import with_changes

KEY = QuotaKey.PRODUCER_BYTE_RATE
BY_PRECEDENCE = [
    (QuotaEntity("alice", "app"), ("alice", "app")),
    (QuotaEntity("alice", DEFAULT), ("alice", "app")),
    (QuotaEntity("alice"), ("alice", "")),
    (QuotaEntity(DEFAULT, "app"), ("alice", "app")),
    (QuotaEntity(DEFAULT, DEFAULT), ("alice", "app")),
    (QuotaEntity(DEFAULT), ("alice", "")),
    (QuotaEntity(None, "app"), ("", "app")),
    (QuotaEntity(None, DEFAULT), ("", "app")),
]


@pytest.mark.parametrize("first", range(len(BY_PRECEDENCE) + 1))
def test_the_most_specific_entity_decides(first: int) -> None:
    """The order in the documentation of Kafka's quotas."""
    quotas = {entity: {KEY: float(place)} for place, (entity, _) in enumerate(BY_PRECEDENCE) if place >= first}
    others = {QuotaEntity("bob"): {KEY: 99.0}, QuotaEntity(None, "other"): {KEY: 99.0}}
    found = limit_of({**quotas, **others}, KEY, "alice", "app")
    expected = Limit(float(first), BY_PRECEDENCE[first][1]) if first < len(BY_PRECEDENCE) else None
    assert found == expected
    assert limit_of(quotas, QuotaKey.REQUEST_PERCENTAGE, "alice", "app") is None


PARTS: st.SearchStrategy[Part] = st.none() | st.just(DEFAULT) | st.text(min_size=1, max_size=5)


@given(PARTS, PARTS)
def test_an_entity_is_found_again_by_its_path(user: Part, client_id: Part) -> None:
    entity = QuotaEntity(user, client_id)
    if entity != QuotaEntity():
        assert entity_at(path_of(entity)) == entity


def test_paths_are_those_of_kafka() -> None:
    assert path_of(QuotaEntity("CN=a b,O=*", DEFAULT)) == "/config/users/CN%3Da%20b%2CO%3D%2A/clients/<default>"
    assert path_of(QuotaEntity(ip="10.0.0.1")) == "/config/ips/10.0.0.1"
    assert path_of(QuotaEntity(ip=DEFAULT)) == "/config/ips/<default>"
    for entity in (QuotaEntity(ip="::1"), QuotaEntity(ip="10.0.0.1"), QuotaEntity(ip=DEFAULT)):
        assert entity_at(path_of(entity)) == entity
    assert entity_at("/config/ips/localhost") is None
    assert path_of(QuotaEntity(None, "<default>")) == "/config/clients/%3Cdefault%3E"
    for path in ("/config/users/a/b/c", "/config/clients/a/b", "/config/topics/a", "/config/users/a/clients"):
        assert entity_at(path) is None


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 3)), min_size=1, max_size=200))
def test_a_client_that_waits_as_told_stays_within_its_rate(requests: list[tuple[int, float]]) -> None:
    """Of requests that are small beside the quota. The burst is that of ten windows."""
    limit, rate = 100, Rate(11, 1.0)
    now = total = 0.0
    for amount, pause in requests:
        now += pause
        rate.record(amount, now)
        total += amount
        assert total <= limit * (now + 10) * 1.1 + amount
        now += rate.overdraft_s(limit, now)


def test_a_quiet_client_owes_nothing() -> None:
    rate = Rate(11, 1.0)
    rate.record(1_000, 0.0)
    assert rate.overdraft_s(50, 0.0) == 10.0
    assert rate.overdraft_s(50, 4.0) == 10.0
    assert rate.overdraft_s(50, 11.0) == 0.0
    assert rate.is_quiet(11.0)


def test_changes_keep_settings_that_are_not_quotas() -> None:
    before = {"SCRAM-SHA-256": "secret", "producer_byte_rate": "5", "request_percentage": "12.5"}
    after = with_changes(before, {KEY: 7.0, QuotaKey.REQUEST_PERCENTAGE: None})
    assert after == {"SCRAM-SHA-256": "secret", "producer_byte_rate": "7"}
    assert from_texts(after) == {KEY: 7.0}
    for invalid in ("0", "-1", "nan", "x", "1.5"):
        with pytest.raises(ValueError, match="producer_byte_rate"):
            from_texts({"producer_byte_rate": invalid})

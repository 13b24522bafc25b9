"""The served part of Kafka's protocol, compared with Apache Kafka 3.9.1 in ZooKeeper mode."""

from __future__ import annotations

from minibroker.protocol.kafka.apis import API_KEYS

KAFKAS_NEWEST = {
    key: newest
    for first, versions in (
        (0, (11, 17, 9, 12, 7, 4, 8, 3, 9, 9, 6, 9, 4, 5, 5, 5, 5, 1, 4, 7, 6, 2, 5, 4, 5, 4, 4, 1, 4, 3, 3, 3, 4, 2)),
        (34, (2, 4, 2, 3, 3, 2, 2, 3, 2, 2, 1, 0, 0, 0, 1, 1, 0, 0)),
        (56, (3, 1, 0)),
        (60, (1, 0)),
        (65, (0, 1, 0, 0, 0)),
    )
    for key, newest in enumerate(versions, first)
}
"""The newest version of each API key in ApiVersions of a broker of 3.9.1. Its oldest versions are 0."""

NOT_SERVED = {
    **dict.fromkeys((4, 5, 6, 7, 56, 58, 67), "brokers ask it of each other, here in our own protocol"),
    **dict.fromkeys((38, 39, 40, 41), "there are no delegation tokens"),
    **dict.fromkeys((68, 69), "there are no groups of KIP-848; nor are there in Kafka's ZooKeeper mode"),
    57: "there are no features; nor are there in Kafka's ZooKeeper mode",
}

OLDEST = {1: 4, 2: 1, 8: 2, 9: 1, 19: 2, 20: 1, 23: 2, 27: 1, 29: 1, 30: 1, 31: 1, 32: 1, 34: 1, 35: 1}
"""The oldest versions that Kafka 4 serves (KIP-896)."""

NEWER = {0: 12, 26: 5, 28: 5}
"""Versions of Kafka 4.0 by which each end of a transaction raises the producer's epoch (KIP-890)."""


def test_what_is_served_is_what_kafka_serves_apart_from_what_there_is_a_reason_for() -> None:
    ours = {api.api_key: (api.min_version, api.max_version) for api in API_KEYS}
    expected = {
        key: (OLDEST.get(key, 0), NEWER.get(key, newest))
        for key, newest in KAFKAS_NEWEST.items()
        if key not in NOT_SERVED
    }
    assert ours == expected

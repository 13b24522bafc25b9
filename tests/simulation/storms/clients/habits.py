"""The habits of a producer that a storm draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from minibroker.client.producing.partitioners import Partitioner, WithoutKey, crc32, murmur2

TOPIC = "users-0"
SMALL_BATCHES = "users-1"
"""A topic that accepts batches of at most MAX_MESSAGE_BYTES, while its producers build larger ones."""
MAX_MESSAGE_BYTES = 500

GRACE_S = 3.0
"""Seconds by which a client may exceed its time limit."""


@dataclass(frozen=True)
class Habits:
    """The way in which a producer is used."""

    kind: str
    topic: str
    partitions: int
    style: str
    """"awaited" one by one, "tasks" that await one record each, "drained", "flushed"."""
    records: int
    """Records that one producer sends before it closes."""
    burst: int
    """Records sent without a pause."""
    pause_s: float
    """Mean pause between bursts."""
    keys: int
    """Number of different keys; 0 for records without a key."""
    max_value_bytes: int
    partitioner: Partitioner
    settings: Mapping[str, Any]

    @property
    def limit_s(self) -> float:
        return float(self.settings["delivery_timeout_ms"]) / 1_000 + GRACE_S


def draw_kinds(random: Random) -> list[str]:
    kinds = ["by key", "without key", "short-lived", "splitting"]
    return sorted(random.sample(kinds, random.choice([1, 2, 2, 3])))


def draw_habits(random: Random, kind: str, topics: Mapping[str, int]) -> Habits:
    is_splitting, is_short = kind == "splitting", kind == "short-lived"
    burst = random.choice([10, 20]) if is_splitting else random.choice([1, 3, 10])
    settings = {
        "delivery_timeout_ms": random.choice([3_000, 10_000, 60_000]),
        "request_timeout_ms": random.choice([1_000, 5_000, 30_000]),
        "batch_size": 16_384 if is_splitting else random.choice([1, 200, 16_384]),
        "linger_ms": random.choice([0, 20]) if is_splitting else random.choice([0, 0, 5, 200]),
        "max_in_flight_requests_per_connection": random.randint(1, 5),
        "compression": "none" if is_splitting else random.choice(["none", "none", "gzip", "snappy", "lz4", "zstd"]),
        "max_request_size": 32_768,
        "buffer_memory": random.choice([32_768, 1_048_576]),
    }
    return Habits(
        kind=kind,
        topic=SMALL_BATCHES if is_splitting else TOPIC,
        partitions=1 if is_splitting else topics[TOPIC],
        style="awaited" if is_short else random.choice(["awaited", "tasks", "drained", "drained", "flushed"]),
        records=1 if is_short else random.choice([10, 40, 100]),
        burst=burst,
        pause_s=4.0 if is_short else burst / random.choice([1, 2]),
        keys=random.choice([2, 20]) if kind == "by key" or (kind != "without key" and random.random() < 0.5) else 0,
        max_value_bytes=100,
        partitioner=Partitioner(random.choice([crc32, murmur2]), random.choice(list(WithoutKey))),
        settings=settings,
    )

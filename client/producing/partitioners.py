"""Partitioners. Pure: randomness is passed in.

A record with an explicit partition goes there. A record with a key goes to the partition that the hash of the key
gives, so that equal keys stay in order. `crc32` is the default because it runs in C (librdkafka's `consistent`); Java
producers use `murmur2`. The two disagree, so all producers of a topic must use the same one.

A record without a key may go anywhere, so the goal is large batches: all such records go to one partition until a batch
is full ("sticky", KIP-480). That alone sends more to slow brokers than to fast ones, since a batch that waits for a
slow broker stays open and attracts records. So the default switches after a fixed number of *bytes*, however fast
brokers acknowledge, and prefers partitions with short queues (KIP-794, "uniform" and adaptive).

An application can choose the partition of every record by its own function (`RecordPartitioner`, Kafka's Partitioner).
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, repeat
from operator import mod
from random import Random
from typing import NamedTuple, Protocol

KeyHash = Callable[[bytes, int], int]
"""(key, number of partitions) -> partition, counted from 0."""


def crc32(key: bytes, partition_count: int) -> int:
    """Return the partition of a key, as librdkafka's `consistent` and `consistent_random` partitioners choose it."""
    return zlib.crc32(key) % partition_count


def murmur2(key: bytes, partition_count: int) -> int:
    """Return the partition of a key, as Kafka's Java producer chooses it (BuiltInPartitioner.partitionForKey)."""
    return (murmur2_hash(key) & 0x7FFFFFFF) % partition_count


def murmur2_hash(data: bytes) -> int:
    """Return the 32-bit MurmurHash2 of `data` with Kafka's seed, unsigned."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    length = len(data)
    value = 0x9747B28C ^ length
    whole = length & ~3
    for position in range(0, whole, 4):
        block = int.from_bytes(data[position : position + 4], "little") * multiplier & mask
        block = (block ^ block >> 24) * multiplier & mask
        value = value * multiplier & mask ^ block
    if whole < length:
        value = (value ^ int.from_bytes(data[whole:], "little")) * multiplier & mask
    value = (value ^ value >> 13) * multiplier & mask
    return value ^ value >> 15


def partitions_of(keys: Sequence[bytes], by_key: KeyHash, partition_count: int) -> list[int]:
    """Return `by_key` of each key. CRC-32 needs no step of Python for each key."""
    if by_key is crc32:
        return list(map(mod, map(zlib.crc32, keys), repeat(partition_count)))
    return list(map(by_key, keys, repeat(partition_count)))


class WithoutKey(Enum):
    """The rule that chooses the partition of a record without partition and key."""

    ADAPTIVE = "adaptive"
    """One partition for `batch_size` bytes, then another one, preferably with a short queue (KIP-794)."""
    STICKY = "sticky"
    """One partition for each batch (KIP-480)."""
    ROUND_ROBIN = "round_robin"
    """Another partition for each record: the most even load, and the smallest batches."""


class Partitioner(NamedTuple):
    """The rules of a producer: `Producer(..., partitioner=Partitioner(by_key=murmur2))`."""

    by_key: KeyHash = crc32
    without_key: WithoutKey = WithoutKey.ADAPTIVE


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions that a RecordPartitioner may choose."""

    count: int
    """The topic has partitions 0 to `count` - 1."""
    available: Sequence[int]
    """Partitions whose leader accepts records, ascending; all partitions if no leader does."""


class RecordPartitioner(Protocol):
    """A function that chooses the partition of each record that is sent without a partition, with a key or without:
    `Producer(..., partitioner=function)`. Key and value are serialized. (Kafka's Partitioner.)

    It is called again for a record that waits while its topic is created anew with another number of partitions.
    """

    def __call__(self, topic: str, key: bytes | None, value: bytes | None, partitions: Partitions, /) -> int: ...


class RoundRobin:
    """Sends every record, with a key or without, to the next available partition (Kafka's RoundRobinPartitioner). The
    records of a key are not in order then. To spread only records without a key, use
    `Partitioner(without_key=WithoutKey.ROUND_ROBIN)`."""

    def __init__(self) -> None:
        self._previous: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes | None, value: bytes | None, partitions: Partitions, /) -> int:
        chosen = self._previous[topic] = choose_round_robin(partitions.available, self._previous.get(topic))
        return chosen


def frequency_table(queue_lengths: Sequence[int]) -> list[int]:
    """Return cumulative frequencies: the shorter a partition's queue, the more often it is chosen.

    Lengths 0, 3, 1 have frequencies 4, 1, 3 (the longest plus one, minus each) and the table 4, 5, 8: a random
    number below 8 chooses the first entry that is greater (Kafka's PartitionLoadStats).
    """
    highest = max(queue_lengths) + 1
    return list(accumulate(highest - length for length in queue_lengths))


def choose_adaptive(partitions: Sequence[int], queue_lengths: Sequence[int], random: Random) -> int:
    """Return one of `partitions` at random, weighted by `frequency_table`."""
    table = frequency_table(queue_lengths)
    return partitions[bisect_right(table, random.randrange(table[-1]))]


def choose_sticky(partitions: Sequence[int], previous: int | None, random: Random) -> int:
    """Return one of `partitions` at random, not `previous` if there is another."""
    others = [partition for partition in partitions if partition != previous]
    return random.choice(others or partitions)


def choose_round_robin(partitions: Sequence[int], previous: int | None) -> int:
    """Return the first of `partitions` (ascending) above `previous`; after the last one, the first."""
    if previous is None:
        return partitions[0]
    return next((partition for partition in partitions if partition > previous), partitions[0])

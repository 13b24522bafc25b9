"""Which partition a record goes to. Pure: randomness is handed in.

A record with an explicit partition goes there. One with a key goes where the hash of the key says, so that equal
keys stay in order; `crc32` is the default because it runs in C (librdkafka's `consistent`), `murmur2` is what
Java producers do. They disagree, so one topic must be written with one of them.

A record without a key may go anywhere, and what matters is that batches get large: all such records go to one
partition until a batch is full ("sticky", KIP-480). That alone feeds slow brokers more than fast ones, since a
batch that waits for a slow broker stays open and attracts records. So the default switches after a fixed number of
*bytes*, however fast brokers acknowledge, and prefers partitions with short queues (KIP-794, "uniform" and adaptive).

Whoever wants something else gives a function that chooses for every record (`RecordPartitioner`, Kafka's Partitioner).
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
    """The partition of a key, as chosen by librdkafka's `consistent` and `consistent_random` partitioners."""
    return zlib.crc32(key) % partition_count


def murmur2(key: bytes, partition_count: int) -> int:
    """The partition of a key, as chosen by Kafka's Java producer (BuiltInPartitioner.partitionForKey)."""
    return (murmur2_hash(key) & 0x7FFFFFFF) % partition_count


def murmur2_hash(data: bytes) -> int:
    """32-bit MurmurHash2 of `data` with Kafka's seed, unsigned."""
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
    """`by_key` of each key. CRC-32 is computed without a step of Python for each of them."""
    if by_key is crc32:
        return list(map(mod, map(zlib.crc32, keys), repeat(partition_count)))
    return list(map(by_key, keys, repeat(partition_count)))


class WithoutKey(Enum):
    """How the partition of a record without partition and key is chosen."""

    ADAPTIVE = "adaptive"
    """One partition for `batch_size` bytes, then another, preferably with a short queue (KIP-794)."""
    STICKY = "sticky"
    """One partition for each batch (KIP-480)."""
    ROUND_ROBIN = "round_robin"
    """Another partition for each record: the most even, and the smallest batches."""


class Partitioner(NamedTuple):
    """How a producer chooses partitions: `Producer(..., partitioner=Partitioner(by_key=murmur2))`."""

    by_key: KeyHash = crc32
    without_key: WithoutKey = WithoutKey.ADAPTIVE


@dataclass(frozen=True, slots=True)
class Partitions:
    """What a RecordPartitioner may choose from."""

    count: int
    """The topic has partitions 0 to `count` - 1."""
    available: Sequence[int]
    """Those whose leader takes records, ascending; all of them where none does."""


class RecordPartitioner(Protocol):
    """A function that chooses the partition of every record for which `send` names none, with a key or without:
    `Producer(..., partitioner=function)`. Key and value are as serialized. (Kafka's Partitioner.)

    It is called again for a record that waits while its topic is created with another number of partitions.
    """

    def __call__(self, topic: str, key: bytes | None, value: bytes | None, partitions: Partitions, /) -> int: ...


class RoundRobin:
    """Every record, with a key or without, to the available partition after that of the topic's last record (Kafka's
    RoundRobinPartitioner). Keys are not in order then: to spread only records without a key, use
    `Partitioner(without_key=WithoutKey.ROUND_ROBIN)`."""

    def __init__(self) -> None:
        self._previous: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes | None, value: bytes | None, partitions: Partitions, /) -> int:
        chosen = self._previous[topic] = choose_round_robin(partitions.available, self._previous.get(topic))
        return chosen


def frequency_table(queue_lengths: Sequence[int]) -> list[int]:
    """Cumulative frequencies: the shorter a partition's queue, the more often it is chosen.

    Lengths 0, 3, 1 have frequencies 4, 1, 3 (the longest plus one, minus each) and the table 4, 5, 8: a random
    number below 8 chooses the first entry that is greater (Kafka's PartitionLoadStats).
    """
    highest = max(queue_lengths) + 1
    return list(accumulate(highest - length for length in queue_lengths))


def choose_adaptive(partitions: Sequence[int], queue_lengths: Sequence[int], random: Random) -> int:
    """One of `partitions` at random, weighted by `frequency_table`."""
    table = frequency_table(queue_lengths)
    return partitions[bisect_right(table, random.randrange(table[-1]))]


def choose_sticky(partitions: Sequence[int], previous: int | None, random: Random) -> int:
    """One of `partitions` at random, not `previous` if there is another."""
    others = [partition for partition in partitions if partition != previous]
    return random.choice(others or partitions)


def choose_round_robin(partitions: Sequence[int], previous: int | None) -> int:
    """The first of `partitions` (ascending) above `previous`, and the first of all after the last."""
    if previous is None:
        return partitions[0]
    return next((partition for partition in partitions if partition > previous), partitions[0])

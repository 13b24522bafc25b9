"""The progress of reassignments in bytes: the sizes of the new replicas' logs against those of their leaders. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted, in_bytes

Sizes = Mapping[int, Mapping[TopicPartition, int]]
"""The bytes of each replica's log, by the brokers that answered."""


class Copy(NamedTuple):
    """A replica that a reassignment adds."""

    broker: int
    moved: int | None
    """Bytes that it has. None: its broker does not answer."""


class Movement(NamedTuple):
    """A reassignment in progress."""

    name: TopicPartition
    copies: tuple[Copy, ...]
    removing: tuple[int, ...]
    size: int | None
    """Bytes of the leader's replica. None: there is no leader, or it does not answer."""

    @property
    def moved(self) -> int | None:
        """Bytes that all copies have together. None: unknown."""
        if self.size is None or any(copy.moved is None for copy in self.copies):
            return None
        return sum(min(self.size, copy.moved or 0) for copy in self.copies)

    @property
    def total(self) -> int | None:
        """Bytes that all copies will have together. None: unknown."""
        return None if self.moved is None or self.size is None else self.size * len(self.copies)

    @property
    def left(self) -> int | None:
        return None if self.moved is None or self.total is None else self.total - self.moved


def movement(name: TopicPartition, reassigned: PartitionReassignment, leader: int | None, sizes: Sizes) -> Movement:
    """Return the progress of one reassignment. A broker that answers and has no log of the partition has not begun."""
    size = None if leader is None else sizes.get(leader, {}).get(name)
    copies = tuple(Copy(b, sizes[b].get(name, 0) if b in sizes else None) for b in reassigned.adding_replicas)
    return Movement(name, copies, reassigned.removing_replicas, size)


def sizes_of(described: Mapping[int, Iterable[LogDirDescription]]) -> dict[int, dict[TopicPartition, int]]:
    """Return the sizes of current replicas. Those that move to another directory of their broker count once."""
    return {
        broker: {
            name: replica.size for one in directories for name, replica in one.replicas.items() if not replica.is_future
        }
        for broker, directories in described.items()
    }


class Progress(msgspec.Struct, frozen=True):
    """The progress of several reassignments together."""

    moved_bytes: int = 0
    """Bytes that the new replicas have."""
    total_bytes: int = 0
    """Bytes that they will have."""
    unknown: int = 0
    """Reassignments whose sizes are not known."""

    @property
    def percent(self) -> int:
        return 100 * self.moved_bytes // self.total_bytes if self.total_bytes else 100

    def __str__(self) -> str:
        """`40 % of 1.2 GB`."""
        if self.unknown and not self.total_bytes:
            return "progress unknown, as brokers do not answer"
        unknown = f" and {counted(self.unknown, 'partition')} of unknown size" if self.unknown else ""
        return f"{self.percent} % of {in_bytes(self.total_bytes)}{unknown}"


def progress(movements: Iterable[Movement]) -> Progress:
    moved = total = unknown = 0
    for one in movements:
        if one.moved is None or one.total is None:
            unknown += 1
        else:
            moved, total = moved + one.moved, total + one.total
    return Progress(moved, total, unknown)

"""What clients saw, and what is wrong with it (after Jepsen's Kafka workload). Pure: a history in, anomalies out.

Every value is unique and was sent once, so each place where it turns up can be told apart. A history is complete when
all clients have ended and `final` holds what fresh consumers read from each partition's beginning to its end, after
everything was healed.

What counts as an anomaly depends on what was promised. With acks=all: nothing acknowledged is lost, nothing is there
twice, each producer's records are in order. With acks=1 a crash may lose what was acknowledged, and a retry may repeat
or reorder: such losses are only counted, so that a run shows that they would be seen. For both: an offset has one value
for ever, nothing that a consumer has seen vanishes, and a consumer neither skips nor goes back.

Records may be deleted from the old end of a log, where whoever lets it shrink says so (`deleted`): then they may be
gone, and a consumer that had not come so far goes on behind them.

Where the power of all hosts that had everything was cut at once, what they had not synced is gone. So such a moment
divides a partition's history: what was acknowledged or read before it may be lost, and is counted, if it was the end of
the log; its offsets then go to other records. What comes after it is judged as ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from minibroker.protocol.model import TopicPartition


class TopicIdPartition(NamedTuple):
    """A partition of a topic that may be deleted and created again under its name: the id says of which one."""

    topic_id: str
    topic_partition: TopicPartition

    def __str__(self) -> str:
        return str(self.topic_partition)


class Anomaly(NamedTuple):
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Sent(NamedTuple):
    producer: str
    """Unique to one start of one producer."""
    number: int
    """Grows with every send of the producer."""
    partition: TopicPartition


class Acknowledged(NamedTuple):
    value: bytes
    offset: int
    at_s: float


class Polled(NamedTuple):
    consumer: str
    """Unique to one start of one consumer."""
    partition: TopicPartition
    offset: int
    value: bytes
    at_s: float
    deleted: int = 0
    """What of the partition may have been deleted by then lies below this offset."""


@dataclass
class History:
    durable_topics: frozenset[str]
    """Those that are written with acks=all by idempotent producers."""
    sent: dict[bytes, Sent] = field(default_factory=dict)
    acknowledged: dict[TopicPartition, list[Acknowledged]] = field(default_factory=lambda: defaultdict(list))
    failed: int = 0
    """Records that were reported as not delivered: each may be there or not."""
    polled: list[Polled] = field(default_factory=list)
    truncations: list[str] = field(default_factory=list)
    """What consumers were told of records that were gone: LogTruncated."""
    out_of_range: list[tuple[str, TopicPartition, int]] = field(default_factory=list)
    """Where consumers stood that were told OFFSET_OUT_OF_RANGE: what they were told, partition, position.

    A leader that does not know yet that it was deposed may say so to a consumer that was just started, and knows no
    epochs to fence it by. It is an anomaly if the position is beyond the end for good."""
    final: dict[TopicPartition, dict[int, bytes]] = field(default_factory=dict)
    """By offset."""
    begins: dict[TopicPartition, int] = field(default_factory=dict)
    """Where the logs began in the end, if not at 0."""
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    """Where the logs ended in the end."""
    deleted: Counter[TopicPartition] = field(default_factory=Counter)
    """Up to where records have been deleted, as far as that was legal."""
    power_losses: dict[TopicPartition, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When the power of all brokers that had all of a partition was cut."""
    starts: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    """Where consumers were told to begin. Others may begin anywhere."""

    def power_lost(self, partitions: Collection[TopicPartition], at_s: float) -> None:
        """The ends of these partitions may be gone. (All consumers are to begin anew.)"""
        for partition in partitions:
            self.power_losses[partition].append(at_s)
        self.out_of_range = [told for told in self.out_of_range if told[1] not in partitions]
        self.truncations.clear()

    def era(self, partition: TopicPartition, at_s: float) -> int:
        """How often the partition's end may have been lost before that."""
        return bisect_left(self.power_losses.get(partition, ()), at_s)

    def may_be_lost(self, partition: TopicPartition, at_s: float) -> bool:
        """The power was cut after that moment, so a record that was seen there may be gone."""
        return self.era(partition, at_s) < len(self.power_losses.get(partition, ()))

    def was_deleted(self, partition: TopicPartition, offset: int) -> bool:
        """It is gone since the log begins later now. (An offset that was not told, -1, may be anywhere.)"""
        return offset < self.begins.get(partition, 0)

    def _is_gone(self, partition: TopicPartition, record: Acknowledged) -> bool:
        there = self.final.get(partition, {}).get(record.offset) == record.value
        return not there and not self.was_deleted(partition, record.offset)

    def lost_with_power(self) -> int:
        """Legal losses of acks=all."""
        return sum(
            self._is_gone(partition, record)
            for partition, records in self.acknowledged.items()
            if partition.topic in self.durable_topics
            for record in records
            if self.may_be_lost(partition, record.at_s)
        )

    def lost_with_acks_1(self) -> int:
        """Legal losses."""
        return sum(
            self._is_gone(partition, record)
            for partition, records in self.acknowledged.items()
            if partition.topic not in self.durable_topics
            for record in records
        )


def check(history: History) -> list[Anomaly]:
    """Every anomaly of a complete history, kind by kind."""
    return [
        *_inconsistent_offsets(history),
        *_lost_writes(history),
        *_holes(history),
        *_duplicates(history),
        *_reorderings(history),
        *_phantoms(history),
        *_poll_jumps(history),
        *(Anomaly("truncated under a consumer", text) for text in history.truncations),
        *_gone_for_good(history),
    ]


def _inconsistent_offsets(history: History) -> Iterator[Anomaly]:
    """One offset, two values, whoever saw them. Not for acknowledgements of acks=1, whose offsets may be reused."""
    seen: dict[tuple[TopicPartition, int, int], tuple[bytes, str]] = {}

    def see(partition: TopicPartition, offset: int, value: bytes, who: str, at_s: float) -> Iterator[Anomaly]:
        before = seen.setdefault((partition, offset, history.era(partition, at_s)), (value, who))
        if before[0] != value:
            yield Anomaly(
                "inconsistent offset",
                f"{partition} offset {offset} is {_show(before[0])} to {before[1]} and {_show(value)} to {who}",
            )

    for poll in history.polled:
        yield from see(poll.partition, poll.offset, poll.value, f"{poll.consumer} at {poll.at_s:.3f} s", poll.at_s)
    for partition, records in history.acknowledged.items():
        if partition.topic in history.durable_topics:
            for record in records:
                if record.offset >= 0:
                    who = f"its producer at {record.at_s:.3f} s"
                    yield from see(partition, record.offset, record.value, who, record.at_s)
    for partition, values in history.final.items():
        for offset, value in values.items():
            yield from see(partition, offset, value, "the final read", math.inf)


def _lost_writes(history: History) -> Iterator[Anomaly]:
    """Acknowledged with acks=all, or seen by a consumer, and not there in the end."""
    there = {partition: set(values.values()) for partition, values in history.final.items()}
    for partition, records in history.acknowledged.items():
        if partition.topic in history.durable_topics:
            for record in records:
                if (
                    record.value not in there.get(partition, ())
                    and not history.may_be_lost(partition, record.at_s)
                    and not history.was_deleted(partition, record.offset)
                ):
                    yield Anomaly(
                        "lost write",
                        f"{_show(record.value)}, acknowledged at {record.at_s:.3f} s at offset {record.offset} "
                        f"of {partition}",
                    )
    for poll in history.polled:
        if (
            poll.value not in there.get(poll.partition, ())
            and not history.may_be_lost(poll.partition, poll.at_s)
            and not history.was_deleted(poll.partition, poll.offset)
        ):
            yield Anomaly(
                "lost write",
                f"{_show(poll.value)}, which {poll.consumer} read at {poll.at_s:.3f} s at offset {poll.offset} "
                f"of {poll.partition}",
            )


def _holes(history: History) -> Iterator[Anomaly]:
    """What was lost with the power was the end of the log, so nothing that was acknowledged behind it then is there.

    Of what was acknowledged since the last such loss, that is. What an earlier one took may come back in the place of
    what followed: a cut of the log that was only in memory when the power failed is undone by it, as is all else."""
    for partition, losses in history.power_losses.items():
        if partition.topic not in history.durable_topics:
            continue
        final = history.final.get(partition, {})
        begin = history.begins.get(partition, 0)
        records = [(history.era(partition, r.at_s), r) for r in history.acknowledged[partition] if r.offset >= begin]
        for era in range(len(losses)):
            of_era = [record for number, record in records if number == era]
            gone = min((r.offset for r in of_era if final.get(r.offset) != r.value), default=math.inf)
            for record in of_era:
                if record.offset > gone and final.get(record.offset) == record.value:
                    yield Anomaly(
                        "hole",
                        f"{_show(record.value)} is at {record.offset} of {partition}, what was at {gone} is gone",
                    )


def _known_values(history: History) -> Iterator[tuple[TopicPartition, dict[int, bytes]]]:
    """Of each durable partition: what is there, and what was read before it was deleted."""
    deleted: dict[TopicPartition, dict[int, bytes]] = defaultdict(dict)
    for poll in history.polled:
        if history.was_deleted(poll.partition, poll.offset) and not history.may_be_lost(poll.partition, poll.at_s):
            deleted[poll.partition][poll.offset] = poll.value
    for partition, values in history.final.items():
        if partition.topic in history.durable_topics:
            yield partition, deleted[partition] | values


def _duplicates(history: History) -> Iterator[Anomaly]:
    for partition, values in _known_values(history):
        first: dict[bytes, int] = {}
        for offset, value in sorted(values.items()):
            if value in first:
                yield Anomaly("duplicate", f"{_show(value)} at offsets {first[value]} and {offset} of {partition}")
            first.setdefault(value, offset)


def _reorderings(history: History) -> Iterator[Anomaly]:
    """Within a partition, each producer's records stand in the order in which it sent them."""
    for partition, values in _known_values(history):
        last: dict[str, Sent] = {}
        for offset, value in sorted(values.items()):
            sent = history.sent.get(value)
            if sent is None:
                continue
            before = last.get(sent.producer)
            if before is not None and sent.number < before.number:
                yield Anomaly(
                    "reordering",
                    f"{sent.producer}, {partition}: number {sent.number} at offset {offset}, after {before.number}",
                )
            last[sent.producer] = sent


def _phantoms(history: History) -> Iterator[Anomaly]:
    """Values that were never sent, or not to that partition."""
    for partition, values in history.final.items():
        for offset, value in values.items():
            sent = history.sent.get(value)
            if sent is None or sent.partition != partition:
                yield Anomaly("phantom", f"{_show(value)} at offset {offset} of {partition} was never sent there")


def _poll_jumps(history: History) -> Iterator[Anomaly]:
    """Without compaction and transactions a consumer sees every offset that is not deleted, each one after the one
    before."""
    next_offsets = dict(history.starts)
    for poll in history.polled:
        expected = next_offsets.get((poll.consumer, poll.partition), poll.offset)
        if poll.offset != expected and not expected < poll.offset <= poll.deleted:
            yield Anomaly(
                "poll skip" if poll.offset > expected else "poll step back",
                f"{poll.consumer} read offset {poll.offset} of {poll.partition} at {poll.at_s:.3f} s, "
                f"where {expected} was next",
            )
        next_offsets[poll.consumer, poll.partition] = poll.offset + 1


def _gone_for_good(history: History) -> Iterator[Anomaly]:
    for text, partition, position in history.out_of_range:
        end = history.ends.get(partition, max(history.final.get(partition, {}), default=-1) + 1)
        if position > end:
            yield Anomaly("truncated under a consumer", f"{text}; {partition} ends at {end}, it stood at {position}")


def _show(value: bytes) -> str:
    return value.partition(b"|")[0].decode("ascii", "replace")

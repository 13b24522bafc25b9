"""The verdict on the history of clients (after Jepsen's Kafka workload). Pure: a history in, anomalies out.

Every value is unique and was sent once, so that all its occurrences can be compared. A history is complete when all
clients have ended and `final` holds the records that fresh consumers read from each partition, after healing.

The promises depend on acks:

- acks=all: no acknowledged record is lost, no record is there twice, and each producer's records are in order.
- acks=1: a crash may lose acknowledged records, and a retry may repeat or reorder them. Such losses are counted, to
  show that the check would see them.
- Both: an offset keeps its value, no record that a consumer has read vanishes, and a consumer neither skips nor goes
  back.

Records below `deleted` may be gone. A consumer that had not reached them continues behind them.

If all complete replicas of a partition lose their power, unsynced records are gone. Such a moment divides the history:
records acknowledged or read before it may be lost if they were the end of the log, and are counted; their offsets go to
other records. Later records are judged as usual.
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
    """A partition of a topic that may be re-created under its name; the id identifies the incarnation."""

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
    """Increases with every send of the producer."""
    partition: TopicPartition
    at_s: float = 0.0


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
    """Records below this offset may have been deleted by then."""


@dataclass
class History:
    durable_topics: frozenset[str]
    """Topics that idempotent producers write with acks=all."""
    sent: dict[bytes, Sent] = field(default_factory=dict)
    acknowledged: dict[TopicPartition, list[Acknowledged]] = field(default_factory=lambda: defaultdict(list))
    failed: int = 0
    """Number of records reported as not delivered, which may still be in the log."""
    polled: list[Polled] = field(default_factory=list)
    truncations: list[str] = field(default_factory=list)
    """LogTruncated errors of consumers."""
    out_of_range: list[tuple[str, TopicPartition, int]] = field(default_factory=list)
    """OFFSET_OUT_OF_RANGE errors of consumers: text, partition, position.

    A deposed leader that does not know it yet may answer so to a consumer that has just started and has no epoch to
    fence the leader. It is an anomaly if the position is beyond the final log end."""
    final: dict[TopicPartition, dict[int, bytes]] = field(default_factory=dict)
    """The final records, by offset."""
    begins: dict[TopicPartition, int] = field(default_factory=dict)
    """Final log starts, if not 0."""
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    """Final log ends."""
    deleted: Counter[TopicPartition] = field(default_factory=Counter)
    """The offset below which records were legally deleted."""
    power_losses: dict[TopicPartition, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Times at which the last complete replica of a partition lost its power."""
    starts: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    """Prescribed first positions of consumers. Others may begin anywhere."""

    def power_lost(self, partitions: Collection[TopicPartition], at_s: float) -> None:
        """Record that the ends of these partitions may be gone. The caller restarts all consumers."""
        for partition in partitions:
            self.power_losses[partition].append(at_s)
        self.out_of_range = [told for told in self.out_of_range if told[1] not in partitions]
        self.truncations.clear()

    def era(self, partition: TopicPartition, at_s: float) -> int:
        """Return how often the partition's end may have been lost before that time."""
        return bisect_left(self.power_losses.get(partition, ()), at_s)

    def may_be_lost(self, partition: TopicPartition, at_s: float) -> bool:
        """Return whether a record seen at that time may have been lost with the power since."""
        return self.era(partition, at_s) < len(self.power_losses.get(partition, ()))

    def was_deleted(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the offset is below the final log start. An unknown offset, -1, may be."""
        return offset < self.begins.get(partition, 0)

    def _is_gone(self, partition: TopicPartition, record: Acknowledged) -> bool:
        there = self.final.get(partition, {}).get(record.offset) == record.value
        return not there and not self.was_deleted(partition, record.offset)

    def lost_with_power(self) -> int:
        """Return the number of legal losses with acks=all."""
        return sum(
            self._is_gone(partition, record)
            for partition, records in self.acknowledged.items()
            if partition.topic in self.durable_topics
            for record in records
            if self.may_be_lost(partition, record.at_s)
        )

    def lost_with_acks_1(self) -> int:
        """Return the number of legal losses with acks=1."""
        return sum(
            self._is_gone(partition, record)
            for partition, records in self.acknowledged.items()
            if partition.topic not in self.durable_topics
            for record in records
        )


def check(history: History) -> list[Anomaly]:
    """Return every anomaly of a complete history, kind by kind."""
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
    """Yield offsets with two values. Acknowledgements with acks=1 do not count, since their offsets may be reused."""
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
    """Yield records that were acknowledged with acks=all or read by a consumer, and are not in the final log."""
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
    """Yield records lost with the power although a record acknowledged behind them is still there: a power cut may only
    remove the end of a log.

    Only records acknowledged since the last such loss count. Records that an earlier loss removed may come back in the
    place of later ones: a truncation that was not synced is undone by the next power cut."""
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
    """Yield the known records of each durable partition: the final ones, and deleted ones that were read before."""
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
    """Yield records of a partition that are not in the order in which their producer sent them."""
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
    """Yield values that were never sent, or were sent to another partition."""
    for partition, values in history.final.items():
        for offset, value in values.items():
            sent = history.sent.get(value)
            if sent is None or sent.partition != partition:
                yield Anomaly("phantom", f"{_show(value)} at offset {offset} of {partition} was never sent there")


def _poll_jumps(history: History) -> Iterator[Anomaly]:
    """Yield skips and steps back: without compaction a consumer reads every offset that is not deleted, in order."""
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

"""The verdict on the history of topics that were deleted and re-created under one name. Pure.

Each time the topic is another *incarnation*, identified by its topic id. Clients do not report the incarnation of a
record, so it is inferred where only one is possible. A record that was sent while an incarnation existed, and
acknowledged before the next one, is in that one: earlier incarnations are gone from every broker before the next is
created.

The records that a consumer returned are compared to the committed records of all incarnations. There must be a path
through them, from each incarnation only to later ones, that reads every incarnation from its beginning and without a
gap. Values are unique, but a record that was retried after a re-creation may be in two incarnations, so all paths are
followed at once.

Each incarnation has the promises of any topic, unless it may lose records: with unclean elections, or if one replica
was enough for an acknowledgement and a host lost its power or a disk failed. Such losses are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition


@dataclass(eq=False)
class Incarnation:
    topic: str
    topic_id: str
    assignment: Mapping[int, tuple[int, ...]]
    min_insync_replicas: int
    has_unclean_elections: bool
    created_at_s: float
    queued_at_s: float = inf
    """When its deletion was queued in ZooKeeper."""
    gone_at_s: float = inf
    has_own_min_insync_replicas: bool = True
    """Whether the topic sets it. If not, the brokers' setting applies, which storms raise."""
    was_harmed: bool = False
    """Whether a host lost its power, or had a bad disk, while one replica was enough."""

    @property
    def partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, partition) for partition in sorted(self.assignment)]

    @property
    def replication_factor(self) -> int:
        return len(self.assignment[0])

    @property
    def is_weak(self) -> bool:
        """Whether one replica is enough for an acknowledgement."""
        return min(self.min_insync_replicas, self.replication_factor) == 1

    @property
    def may_lose(self) -> bool:
        return self.has_unclean_elections or self.was_harmed

    def __str__(self) -> str:
        return f"{self.topic} ({self.topic_id}, of {self.created_at_s:.3f} s)"


class Sent(NamedTuple):
    producer: str
    """Unique to one start of one producer."""
    number: int
    """Increases with every send of the producer."""
    topic: str
    partition: int | None
    """None if the producer chose it."""
    at_s: float
    key: bytes | None = None


class Acknowledged(NamedTuple):
    value: bytes
    partition: TopicPartition
    offset: int
    at_s: float


class Polled(NamedTuple):
    offset: int
    value: bytes
    at_s: float


class AdminCall(NamedTuple):
    """A call of create_topic or delete_topic."""

    kind: Literal["create", "delete"]
    topic: str
    began_s: float
    ended_s: float
    """`inf` if it did not return; it may be carried out at any later time."""
    is_acknowledged: bool
    partitions: int = 0
    """Number of partitions requested."""


@dataclass
class Lives:
    """The history of the re-created topics."""

    incarnations: dict[str, list[Incarnation]] = field(default_factory=lambda: defaultdict(list))
    """Incarnations by topic name, in the order of their creation."""
    sent: dict[bytes, Sent] = field(default_factory=dict)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    committed: dict[TopicIdPartition, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """Records seen below a high watermark, by offset: all of the last incarnation, and all but possibly the last ones
    of earlier incarnations. Of an incarnation that may lose records, only the final ones."""
    polled: dict[tuple[str, TopicPartition], list[Polled]] = field(default_factory=lambda: defaultdict(list))
    """Records by start of a consumer. Each start begins at "earliest"."""
    readers: dict[str, list[TopicPartition]] = field(default_factory=dict)
    """The starts of consumers that lived to the end, and their partitions."""
    calls: list[AdminCall] = field(default_factory=list)

    def current(self, topic: str) -> Incarnation | None:
        """Return the incarnation that exists and is not being deleted."""
        incarnations = self.incarnations[topic]
        return incarnations[-1] if incarnations and incarnations[-1].queued_at_s == inf else None

    def surely_in(self, value: bytes, partition: TopicPartition, at_s: float) -> Incarnation | None:
        """Return the incarnation that certainly has a record acknowledged at that time; None if the record was sent
        before the newest incarnation of that time was created."""
        newest = None
        for incarnation in self.incarnations[partition.topic]:
            if incarnation.created_at_s <= at_s:
                newest = incarnation
        if newest is None or self.sent[value].at_s < newest.created_at_s:
            return None
        return newest

    def legal_losses(self) -> int:
        """Return the number of acknowledged records missing in a last incarnation that may lose records."""
        return sum(incarnation.may_lose for _, incarnation in self._lost())

    def lost(self) -> Iterator[Anomaly]:
        for record, incarnation in self._lost():
            if not incarnation.may_lose:
                yield Anomaly(
                    "lost write",
                    f"{_show(record.value)}, acknowledged at {record.at_s:.3f} s at offset {record.offset} of "
                    f"{record.partition} in {incarnation}",
                )

    def _lost(self) -> Iterator[tuple[Acknowledged, Incarnation]]:
        for record in self.acknowledged:
            last = self.current(record.partition.topic)
            if last is None or self.surely_in(record.value, record.partition, record.at_s) is not last:
                continue
            there = self.committed.get(TopicIdPartition(last.topic_id, record.partition), {})
            if record.offset >= 0:
                is_there = there.get(record.offset) == record.value
            else:
                is_there = record.value in there.values()
            if not is_there:
                yield record, last


def check(lives: Lives) -> list[Anomaly]:
    """Return every anomaly, once all clients have ended and `committed` has all records of the last incarnations."""
    return [
        *lives.lost(),
        *_inconsistent_offsets(lives),
        *_within_a_log(lives),
        *_polls(lives),
        *_calls(lives),
    ]


def _inconsistent_offsets(lives: Lives) -> Iterator[Anomaly]:
    """Yield offsets of an incarnation with two values."""
    for record in lives.acknowledged:
        incarnation = lives.surely_in(record.value, record.partition, record.at_s)
        if incarnation is None or incarnation.may_lose or record.offset < 0:
            continue
        there = lives.committed.get(TopicIdPartition(incarnation.topic_id, record.partition), {})
        value = there.get(record.offset, record.value)
        if value != record.value:
            yield Anomaly(
                "inconsistent offset",
                f"{record.partition} offset {record.offset} in {incarnation} is {_show(value)}, and to its producer at "
                f"{record.at_s:.3f} s {_show(record.value)}",
            )


def _within_a_log(lives: Lives) -> Iterator[Anomaly]:
    """Yield duplicates, reorderings and phantoms within one incarnation's partition."""
    for (topic_id, partition), values in lives.committed.items():
        where = f"{partition} ({topic_id})"
        first: dict[bytes, int] = {}
        last: dict[tuple[str, bytes | None], Sent] = {}
        # Records that waited for a topic with another number of partitions move from several queues to one. Of those
        # that the partitioner placed, only records of the same key are in order then.
        is_one_count = len({len(life.assignment) for life in lives.incarnations[partition.topic]}) == 1
        for offset, value in sorted(values.items()):
            if value in first:
                yield Anomaly("duplicate", f"{_show(value)} at offsets {first[value]} and {offset} of {where}")
                continue
            first[value] = offset
            sent = lives.sent.get(value)
            if sent is None or sent.topic != partition.topic or sent.partition not in (None, partition.partition):
                yield Anomaly("phantom", f"{_show(value)} at offset {offset} of {where} was never sent there")
                continue
            if sent.partition is None and sent.key is None and not is_one_count:
                continue
            group = sent.producer, None if is_one_count else sent.key
            before = last.get(group)
            if before is not None and sent.number < before.number:
                yield Anomaly(
                    "reordering",
                    f"{sent.producer}, {where}: number {sent.number} at offset {offset}, after {before.number}",
                )
            last[group] = sent


# --- Consumers ---------------------------------------------------------------------------------------------------

_ANYWHERE = -1
_NOWHERE_YET = -1

_Place = tuple[int, int]
"""A possible position of a consumer: the number of the incarnation, and the next offset in it."""


class _Path:
    """All possible positions of a consumer in one partition after the records that it has returned."""

    def __init__(self, lives: Lives, partition: TopicPartition) -> None:
        self._sent = lives.sent
        self._incarnations = lives.incarnations[partition.topic]
        self._logs = [lives.committed.get(TopicIdPartition(i.topic_id, partition), {}) for i in self._incarnations]
        self._holding: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for number, log in enumerate(self._logs):
            for offset, value in log.items():
                self._holding[offset, value].append(number)
        self._is_last_complete = bool(self._incarnations) and self._incarnations[-1].queued_at_s == inf
        self.places: set[_Place] = {(_NOWHERE_YET, 0)}

    def _may_be_in(self, poll: Polled) -> list[int]:
        """Return the incarnations from which this may have been read, according to their logs and times."""
        known = self._holding.get((poll.offset, poll.value), [])
        sent = self._sent.get(poll.value)
        unknown = [
            number
            for number, incarnation in enumerate(self._incarnations)
            if incarnation.created_at_s <= poll.at_s
            and (sent is None or sent.at_s <= incarnation.gone_at_s)
            and (incarnation.may_lose or poll.offset not in self._logs[number])
            and not (self._is_last_complete and number == len(self._incarnations) - 1 and not incarnation.may_lose)
        ]
        return sorted({*known, *unknown})

    def follow(self, poll: Polled) -> str | None:
        """Follow one record. Return the kind of anomaly if no path is left."""
        numbers = self._may_be_in(poll)
        places: set[_Place] = set()
        for number, expected in self.places:
            for candidate in numbers:
                if self._incarnations[candidate].may_lose:
                    if candidate >= number:
                        places.add((candidate, _ANYWHERE))
                elif candidate == number:
                    if poll.offset == expected:
                        places.add((candidate, poll.offset + 1))
                elif candidate > number and poll.offset == 0:
                    places.add((candidate, 1))
        if places:
            self.places = places
            return None
        kind = self._problem(poll, numbers)
        self.places = {(candidate, poll.offset + 1) for candidate in numbers} or {(_NOWHERE_YET, 0)}
        return kind

    def _problem(self, poll: Polled, numbers: list[int]) -> str:
        if not numbers:
            return "a record that no log holds"
        if max(numbers) < min(number for number, _ in self.places):
            return "a record of an older incarnation"
        goes_back = any(number in numbers and poll.offset < expected for number, expected in self.places)
        return "poll step back" if goes_back else "poll skip"

    def has_read_all(self) -> bool:
        """Return whether the last incarnation, which is complete, was read to its end."""
        last = len(self._incarnations) - 1
        if self._incarnations[last].may_lose or not self._logs[last]:
            return True
        return (last, max(self._logs[last]) + 1) in self.places

    def __str__(self) -> str:
        return " or ".join(
            "at the beginning" if number < 0 else f"at offset {expected} of {self._incarnations[number]}"
            for number, expected in sorted(self.places)
        )


def has_read_all(lives: Lives, consumer: str, partition: TopicPartition) -> bool:
    """Return whether a start of a consumer has returned all records of the last incarnation. Its last record alone
    proves nothing: an earlier incarnation may have it as well, if the producer had to retry it."""
    polls = lives.polled.get((consumer, partition), [])
    current = lives.current(partition.topic)
    values = {} if current is None else lives.committed[TopicIdPartition(current.topic_id, partition)]
    if values and (not polls or polls[-1].value != values[max(values)]):
        return False  # the cheaper check
    path = _Path(lives, partition)
    for poll in polls:
        path.follow(poll)
    return path.has_read_all()


def _polls(lives: Lives) -> Iterator[Anomaly]:
    """Yield skips, steps back, returns to an earlier incarnation, and records that were never returned."""
    paths: dict[tuple[str, TopicPartition], _Path] = {}
    for (consumer, partition), polls in lives.polled.items():
        path = paths[consumer, partition] = _Path(lives, partition)
        for poll in polls:
            was = str(path)
            kind = path.follow(poll)
            if kind is not None:
                yield Anomaly(
                    kind,
                    f"{consumer} read {_show(poll.value)} at offset {poll.offset} of {partition} at {poll.at_s:.3f} s, "
                    f"and was {was}",
                )
    for consumer, partitions in lives.readers.items():
        for partition in partitions:
            last = lives.current(partition.topic)
            if last is None or partition.partition not in last.assignment:
                continue
            path = paths.get((consumer, partition)) or _Path(lives, partition)
            if not path.has_read_all():
                yield Anomaly("poll skip", f"{consumer} never read all of {partition} in {last}: it was {path}")


# --- Administrators ----------------------------------------------------------------------------------------------


def _calls(lives: Lives) -> Iterator[Anomaly]:
    """Yield acknowledged calls without an effect, and effects without a call."""
    for call in lives.calls:
        if not call.is_acknowledged:
            continue
        there = [
            incarnation
            for incarnation in lives.incarnations[call.topic]
            if incarnation.created_at_s <= call.ended_s and incarnation.queued_at_s >= call.began_s
        ]
        span = f"{call.topic}, {call.began_s:.3f} to {call.ended_s:.3f} s"
        if call.kind == "create" and not there:
            yield Anomaly("a creation that did not happen", f"{span}: acknowledged, and there was no topic")
        if call.kind == "delete":
            for incarnation in there:
                if incarnation.created_at_s < call.began_s and incarnation.queued_at_s > call.ended_s:
                    yield Anomaly("a deletion that did not happen", f"{span}: acknowledged, and {incarnation} lived on")
    for incarnations in lives.incarnations.values():
        for incarnation in incarnations:
            if incarnation.queued_at_s < inf and not _is_asked_for(
                lives, "delete", incarnation.topic, incarnation.queued_at_s
            ):
                yield Anomaly("deleted unasked", f"{incarnation} at {incarnation.queued_at_s:.3f} s")
            if not _is_asked_for(
                lives, "create", incarnation.topic, incarnation.created_at_s, len(incarnation.assignment)
            ):
                yield Anomaly("created unasked", f"{incarnation} with {len(incarnation.assignment)} partitions")


def _is_asked_for(lives: Lives, kind: str, topic: str, at_s: float, partitions: int = 0) -> bool:
    return any(
        (call.kind, call.topic, call.partitions) == (kind, topic, partitions) and call.began_s <= at_s <= call.ended_s
        for call in lives.calls
    )


def _show(value: bytes) -> str:
    return value.partition(b"|")[0].decode("ascii", "replace")

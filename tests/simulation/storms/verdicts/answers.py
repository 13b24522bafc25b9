"""The verdict on the answers that users got beside their records: offsets, ranges and topics. Pure.

A record has a unique *label*: its value, or for a tombstone a header or the key. By labels `history.check` judges these
records like all others. This module judges the rest: a record must come back with its key, headers and time, and each
answer must be true.

A broker that is cut off may not know that it was deposed. Its log end may be outdated, and so may its answer that no
record is as young as requested. Every record that it considers committed, however, is committed. Therefore:

- A log end is never beyond the real one, and every record sent after the answer has a higher offset.
- The first record at or after a time remains the first.
- After healing, answers must be up to date as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Anomaly, History, check

LABEL = "label"
"""The header that identifies a tombstone."""

ANY = -1
"""The partition of a record that leaves the choice to its producer."""

Headers = tuple[tuple[str, bytes | None], ...]


class Written(NamedTuple):
    """A record as it was passed to `send`."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None
    """The explicit timestamp; None for the producer's clock."""
    at_s: float


class Stored(NamedTuple):
    """A record of the final read."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class OffsetTold(NamedTuple):
    """An answer about the offsets of a partition."""

    who: str
    partition: TopicPartition
    question: str
    """"beginning", "end", or "time" for the first record at or after `asked_ms`."""
    asked_ms: int
    offset: int | None
    """The answer; None if no such record exists."""
    timestamp_ms: int
    at_s: float
    """The time of the answer."""
    is_healed: bool = False
    """Whether it was asked after healing and after all sending."""


class PositionTold(NamedTuple):
    """A reported position of a consumer, and the offset that had to come next."""

    who: str
    partition: TopicPartition
    position: int
    due: int
    at_s: float


class RangeRead(NamedTuple):
    """A range of acknowledged offsets, as Spark read it."""

    who: str
    partition: TopicPartition
    start: int
    end: int
    labels: dict[int, bytes]
    loss: str | None
    """The reported data loss, if the range was not complete."""
    at_s: float


class Refused(NamedTuple):
    """An answer to a consumer that its position is not in the log."""

    who: str
    partition: TopicPartition
    position: int
    text: str
    at_s: float


@dataclass
class Answers:
    written: dict[bytes, Written] = field(default_factory=dict)
    """Records by label."""
    stored: dict[TopicPartition, dict[int, Stored]] = field(default_factory=dict)
    offsets: list[OffsetTold] = field(default_factory=list)
    positions: list[PositionTold] = field(default_factory=list)
    ranges: list[RangeRead] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def label_of(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    """Return the label of a record."""
    if value is not None:
        return value
    return next((content for name, content in headers if name == LABEL), None) or key or b""


def check_users(history: History, answers: Answers) -> list[Anomaly]:
    """Return every anomaly of a complete history of users."""
    _settle_partitions(history)
    return [
        *check(history),
        *_altered(answers),
        *_in_two_partitions(history),
        *_wrong_offsets(history, answers),
        *_wrong_positions(answers),
        *_wrong_ranges(history, answers),
        *_wrongly_refused(history, answers),
    ]


def forget(history: History, answers: Answers, partitions: Collection[TopicPartition]) -> None:
    """Forget everything about these partitions."""
    for partition in partitions:
        for by_partition in (history.final, history.acknowledged, answers.stored):
            by_partition.pop(partition, None)
    history.polled = [poll for poll in history.polled if poll.partition not in partitions]
    history.truncations.clear()  # they name no partition
    answers.offsets = [told for told in answers.offsets if told.partition not in partitions]
    answers.positions = [told for told in answers.positions if told.partition not in partitions]
    answers.ranges = [read for read in answers.ranges if read.partition not in partitions]
    answers.refused = [refused for refused in answers.refused if refused.partition not in partitions]


def _settle_partitions(history: History) -> None:
    """Set the partition that a producer chose for a record to the first one in which it is. `_in_two_partitions`
    reports any other."""
    for partition, labels in sorted(history.final.items()):
        for label in labels.values():
            sent = history.sent.get(label)
            if sent is not None and sent.partition == (partition.topic, ANY):
                history.sent[label] = sent._replace(partition=partition)


def _altered(answers: Answers) -> Iterator[Anomaly]:
    """Yield records that came back with another key, headers or time."""
    for partition, records in answers.stored.items():
        for offset, stored in records.items():
            label = label_of(stored.key, stored.value, stored.headers)
            written = answers.written.get(label)
            if written is None:
                continue  # a phantom
            timestamp_ms = stored.timestamp_ms if written.timestamp_ms is None else written.timestamp_ms
            due = Stored(written.key, written.value, written.headers, timestamp_ms)
            if stored != due:
                wrong = [name for name in Stored._fields if getattr(stored, name) != getattr(due, name)]
                yield Anomaly("altered record", f"{_show(label)} at offset {offset} of {partition}: {', '.join(wrong)}")


def _in_two_partitions(history: History) -> Iterator[Anomaly]:
    """Yield records that are in two partitions; `history.check` finds duplicates within one."""
    first: dict[bytes, TopicPartition] = {}
    for partition, labels in history.final.items():
        for label in labels.values():
            if first.setdefault(label, partition) != partition:
                yield Anomaly("duplicate", f"{_show(label)} is in {first[label]} and in {partition}")


# --- Offsets ---------------------------------------------------------------------------------------------------


def _wrong_offsets(history: History, answers: Answers) -> Iterator[Anomaly]:
    later = {partition: _LowestSentSince(history, answers, partition) for partition in history.final}
    for told in answers.offsets:
        problem = _problem(told, history, answers, later[told.partition])
        if problem is not None:
            offset = "none" if told.offset is None else str(told.offset)
            asked = f" for {told.asked_ms} ms" if told.question == "time" else ""
            yield Anomaly(
                "wrong answer",
                f"{told.who} at {told.at_s:.3f} s, {told.question} of {told.partition}{asked}: {offset}, {problem}",
            )


def _problem(told: OffsetTold, history: History, answers: Answers, later: _LowestSentSince) -> str | None:
    """Return the error in an answer, or None."""
    end = max(history.final[told.partition], default=-1) + 1
    if told.question == "beginning":
        return None if told.offset == 0 else "but the log begins at 0"
    if told.question == "end":
        assert told.offset is not None
        if told.offset > end:
            return f"but the log ends at {end}"
        if told.is_healed and told.offset < end:
            return f"though all is healed, and the log ends at {end}"
        lowest = later(told.at_s)
        return f"and {lowest} was sent only then" if lowest is not None and lowest < told.offset else None
    records = answers.stored[told.partition]
    first = next((o for o, record in sorted(records.items()) if record.timestamp_ms >= told.asked_ms), None)
    if told.offset is None:
        return f"though all is healed, and it is {first}" if told.is_healed and first is not None else None
    if told.offset != first:
        return f"but the first is {first}"
    if told.timestamp_ms != records[told.offset].timestamp_ms:
        return f"with the time {told.timestamp_ms}, but it is {records[told.offset].timestamp_ms}"
    return None


class _LowestSentSince:
    """The lowest offset of a partition among records sent after a time."""

    def __init__(self, history: History, answers: Answers, partition: TopicPartition) -> None:
        sent = sorted(
            (answers.written[label].at_s, offset)
            for offset, label in history.final[partition].items()
            if label in answers.written
        )
        self._times = [at_s for at_s, _ in sent]
        self._lowest: list[int] = []
        for _, offset in reversed(sent):
            self._lowest.append(min(offset, self._lowest[-1] if self._lowest else offset))
        self._lowest.reverse()

    def __call__(self, at_s: float) -> int | None:
        index = bisect_right(self._times, at_s)
        return self._lowest[index] if index < len(self._lowest) else None


def _wrong_positions(answers: Answers) -> Iterator[Anomaly]:
    for told in answers.positions:
        if told.position != told.due:
            yield Anomaly(
                "wrong answer",
                f"{told.who} at {told.at_s:.3f} s, position of {told.partition}: {told.position}, not {told.due}",
            )


def _wrong_ranges(history: History, answers: Answers) -> Iterator[Anomaly]:
    """Yield ranges that Spark read as complete but that lack a record, and losses that it reported without one."""
    for read in answers.ranges:
        who = f"{read.who} at {read.at_s:.3f} s, offsets {read.start} to {read.end} of {read.partition}"
        final = history.final[read.partition]
        due = {offset: final[offset] for offset in range(read.start, read.end) if offset in final}
        if read.loss is not None:
            if len(due) == read.end - read.start:
                yield Anomaly("a loss that was none", f"{who}: {read.loss}")
        elif read.labels != due:
            missing = sorted(set(due) - set(read.labels))
            yield Anomaly("incomplete range", f"{who}: {len(read.labels)} records, without {missing[:5]}")


def _wrongly_refused(history: History, answers: Answers) -> Iterator[Anomaly]:
    for refused in answers.refused:
        end = max(history.final[refused.partition], default=-1) + 1
        if refused.position <= end:
            yield Anomaly(
                "out of range, and was not",
                f"{refused.who} at {refused.at_s:.3f} s stood at {refused.position} of {refused.partition}, "
                f"which ends at {end}: {refused.text}",
            )


# --- Topics ----------------------------------------------------------------------------------------------------


class TopicSeen(NamedTuple):
    """The state of a topic in ZooKeeper."""

    exists: bool
    is_being_deleted: bool
    partitions: int


DONE, EXISTS, UNKNOWN, IN_DOUBT = "done", "it exists", "unknown", "in doubt"


class TopicOperation(NamedTuple):
    """A creation or deletion of a topic, and its outcome for the caller."""

    what: str
    """"create" or "delete"."""
    who: str
    partitions: int
    """The number of partitions requested."""
    began_s: float
    ended_s: float
    outcome: str
    """DONE, EXISTS or UNKNOWN; IN_DOUBT after any other error or the caller's death."""
    seen: TopicSeen
    """The topic at the time of the answer."""

    def __str__(self) -> str:
        return f"{self.what} by {self.who} from {self.began_s:.3f} to {self.ended_s:.3f} s: {self.outcome}, {self.seen}"


def check_topic(name: str, operations: Sequence[TopicOperation], at_end: TopicSeen) -> list[Anomaly]:
    """Return the errors in the answers about one topic, given all operations on its name.

    An operation in doubt may be carried out at any later time. Concurrent operations have no order.
    """
    found = []
    story = "; ".join(map(str, operations))
    for operation in operations:
        others = [other for other in operations if other is not operation]
        undone_by = "delete" if operation.what == "create" else "create"
        if operation.outcome == DONE and not any(_may_follow(other, operation, undone_by) for other in others):
            there = operation.seen.exists and not operation.seen.is_being_deleted
            if there != (operation.what == "create"):
                found.append(Anomaly(f"an acknowledged {operation.what} is not true", f"{name}: {story}"))
        if operation.outcome == EXISTS and not any(other.what == "create" for other in others):
            found.append(Anomaly("a create found itself", f"{name}: {story}"))
        if operation.outcome == UNKNOWN and _was_there_all_along(operation, others):
            found.append(Anomaly("a delete did not find its topic", f"{name}: {story}"))
    creates = [operation for operation in operations if operation.what == "create"]
    together = [one for one in creates if any(_overlap(one, other) for other in creates if other is not one)]
    done = [one for one in together if one.outcome == DONE]
    if len(done) > 1:
        found.append(Anomaly("two creates of one topic succeeded", f"{name}: {story}"))
    if together and together == creates and all(one.outcome == EXISTS for one in together):
        found.append(Anomaly("neither of two creates succeeded", f"{name}: {story}"))
    if (
        len(creates) == 1
        and creates[0].outcome == DONE
        and creates[0].seen.partitions not in (0, creates[0].partitions)
    ):
        found.append(Anomaly("an acknowledged create is not true", f"{name}: {story}"))
    found += _wrong_end(name, operations, at_end)
    return found


def _wrong_end(name: str, operations: Sequence[TopicOperation], at_end: TopicSeen) -> Iterator[Anomaly]:
    """Yield an anomaly if the final state contradicts the last operation, and no other can have followed it."""
    if not operations or any(operation.outcome == IN_DOUBT for operation in operations):
        return
    last = max(operations, key=lambda operation: operation.ended_s)
    if any(_overlap(last, other) and other.what != last.what for other in operations if other is not last):
        return
    if last.outcome == EXISTS and any(operation.what == "delete" for operation in operations):
        return  # the topic was still being deleted
    if at_end.is_being_deleted or at_end.exists != (last.what == "create"):
        yield Anomaly(
            "an acknowledged operation was undone", f"{name}, in the end {at_end}: {'; '.join(map(str, operations))}"
        )


def _overlap(one: TopicOperation, other: TopicOperation) -> bool:
    return one.began_s < other.ended_s and other.began_s < one.ended_s


def _may_follow(other: TopicOperation, operation: TopicOperation, what: str) -> bool:
    """Return whether `other` is a `what` that may have been carried out between `operation` and its answer."""
    if other.what != what or other.began_s >= operation.ended_s:
        return False
    return other.outcome == IN_DOUBT or other.ended_s > operation.began_s


def _was_there_all_along(deletion: TopicOperation, others: Sequence[TopicOperation]) -> bool:
    """Return whether a creation was acknowledged before, and no other deletion can have removed the topic."""
    created = any(o.what == "create" and o.outcome == DONE and o.ended_s <= deletion.began_s for o in others)
    return created and not any(other.what == "delete" for other in others)


def _show(label: bytes) -> str:
    return label.partition(b"|")[0].decode("ascii", "replace")

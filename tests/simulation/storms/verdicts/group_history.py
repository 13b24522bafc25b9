"""The verdict on the history of a consumer group. Pure.

The promise is at-least-once delivery, in order, to one member at a time:

- A committed offset never moves behind an acknowledged commit, nor behind an offset that was read before.
- A commit covers only records that were delivered before, so that the next owner skips none.
- While a member has a partition (its *session*, from `on_partitions_assigned` until revocation, loss or death), it gets
  each record once, in order and without gaps, from the committed offset on. After a hand-over only uncommitted records
  are repeated.
- In one generation a partition has one owner.
- A member of an earlier generation commits nothing.

All events happen on one loop and are ordered by a counter (`_now`), since several may happen at the same time. The
caller leaves out partitions that may legally have lost records (see `tests.simulation.storms.storm`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import inf

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Anomaly

Records = Mapping[TopicPartition, Mapping[int, bytes]]
"""The final content of the log, by offset."""


@dataclass
class Delivered:
    member: str
    offset: int
    value: bytes
    at: float


@dataclass
class Session:
    """The time for which a member has a partition."""

    member: str
    partition: TopicPartition
    began: float
    delivered: list[Delivered] = field(default_factory=list)


@dataclass
class Commit:
    member: str
    partition: TopicPartition
    offset: int
    began: float
    ended: float = inf
    is_acknowledged: bool = False
    """False if it was rejected or its outcome is unknown."""
    generation: int = -1
    """The latest generation of the member in which it can have been made."""
    newest_before: int = -1
    """The highest generation in which any member was seen before the commit began."""

    def acknowledged(self, at: float, generation: int) -> None:
        self.ended, self.is_acknowledged = at, True
        self.generation = max(self.generation, generation)


@dataclass
class Read:
    """A lookup of the committed offset."""

    who: str
    partition: TopicPartition
    offset: int | None
    """None if no offset is committed."""
    began: float
    ended: float


class GroupHistory:
    """The record of a group's events, filled while they happen. `member` is unique to one start of a consumer. `owner`
    is the same, or the name of a static member, which survives a restart."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.deliveries: dict[TopicPartition, list[Delivered]] = defaultdict(list)
        self.sessions: list[Session] = []
        self.commits: list[Commit] = []
        self.reads: list[Read] = []
        self.owners: dict[tuple[int, TopicPartition], set[str]] = defaultdict(set)
        """Owners by generation and partition."""
        self.not_owned: list[tuple[str, TopicPartition, int]] = []
        """Records delivered to a member without the partition."""
        self.newest_generation = -1
        self.may_begin_anew = False
        """Whether the empty group may have been deleted, after which its generations begin at 1 again."""
        self._open: dict[tuple[str, TopicPartition], Session] = {}
        self._clock = count()

    @property
    def _now(self) -> float:
        return float(next(self._clock))

    def assigned(self, member: str, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            session = Session(member, partition, self._now)
            self.sessions.append(session)
            self._open[member, partition] = session

    def taken(self, member: str, partitions: Collection[TopicPartition]) -> None:
        """Record the end of sessions by revocation or loss."""
        for partition in partitions:
            self._open.pop((member, partition), None)

    def ended(self, member: str) -> None:
        """Record that a member was closed or killed."""
        for key in [key for key in self._open if key[0] == member]:
            del self._open[key]

    def holds(self, owner: str, generation: int, partitions: Collection[TopicPartition]) -> None:
        """Record that a member of that generation has these partitions."""
        self.newest_generation = max(self.newest_generation, generation)
        for partition in partitions:
            self.owners[generation, partition].add(owner)

    def delivered(self, member: str, partition: TopicPartition, offset: int, value: bytes) -> None:
        delivered = Delivered(member, offset, value, self._now)
        self.deliveries[partition].append(delivered)
        session = self._open.get((member, partition))
        if session is None:
            self.not_owned.append((member, partition, offset))
        else:
            session.delivered.append(delivered)

    def commit_begins(self, member: str, offsets: Mapping[TopicPartition, int], generation: int) -> list[Commit]:
        """Record a commit. `generation` is the member's current one; at the acknowledgement it may be later, or
        none."""
        commits = [
            Commit(member, partition, offset, self._now, generation=generation, newest_before=self.newest_generation)
            for partition, offset in offsets.items()
        ]
        self.commits += commits
        return commits

    def commit_acknowledged(self, commits: Collection[Commit], generation: int) -> None:
        for commit in commits:
            commit.acknowledged(self._now, generation)

    def read_begins(self) -> float:
        return self._now

    def read(self, who: str, committed: Mapping[TopicPartition, int | None], began: float) -> None:
        for partition, offset in committed.items():
            self.reads.append(Read(who, partition, offset, began, self._now))


def check_group(history: GroupHistory, records: Records) -> Iterator[Anomaly]:
    """Yield the anomalies in the partitions of `records`."""
    for member, partition, offset in history.not_owned:
        if partition in records:
            yield _anomaly(
                history, "a record of a revoked partition", f"{member} got {offset} of {partition}, which it lacks"
            )
    if not history.may_begin_anew:
        yield from _check_generations(history, records)
    for partition, log in records.items():
        yield from _Check(history, partition, log).anomalies()


def _check_generations(history: GroupHistory, records: Records) -> Iterator[Anomaly]:
    for (generation, partition), owners in history.owners.items():
        if partition in records and len(owners) > 1:
            text = f"{partition} in generation {generation}: {', '.join(sorted(owners))}"
            yield _anomaly(history, "two owners in a generation", text)
    for commit in history.commits:
        if commit.is_acknowledged and commit.generation < commit.newest_before:
            yield _anomaly(
                history,
                "a deposed member committed",
                f"{commit.member} in generation {commit.generation}, after {commit.newest_before} was there: "
                f"{commit.partition} at {commit.offset}",
            )


def check_reborn(history: GroupHistory, partition: TopicPartition, log: Mapping[int, bytes]) -> Iterator[Anomaly]:
    """Yield the anomalies of the last incarnation of a re-created topic's partition. Unique values tell apart the
    records of earlier incarnations. Only the last committed offset counts, since others cannot be attributed to one."""
    got: set[int] = set()
    for session in history.sessions:
        if session.partition != partition:
            continue
        before = -1
        for delivered in session.delivered:
            if log.get(delivered.offset) == delivered.value:
                if delivered.offset <= before:
                    text = f"{partition}: {session.member} got {delivered.offset} after {before}"
                    yield _anomaly(history, "a session went back", text)
                before = delivered.offset
                got.add(delivered.offset)
    committed = next((read.offset for read in reversed(history.reads) if read.partition == partition), None)
    skipped = sorted(offset for offset in log if offset < (committed or 0) and offset not in got)
    if skipped:
        text = f"{partition}: {committed} is committed, but no member got {skipped[:5]} ({len(skipped)} in all)"
        yield _anomaly(history, "records were skipped", text)


def _anomaly(history: GroupHistory, kind: str, text: str) -> Anomaly:
    return Anomaly(kind, f"group {history.group}: {text}")


class _Check:
    """The check of one partition."""

    def __init__(self, history: GroupHistory, partition: TopicPartition, log: Mapping[int, bytes]) -> None:
        self._history = history
        self._partition = partition
        self._log = log
        self._offsets = sorted(log)
        self._commits = [commit for commit in history.commits if commit.partition == partition]
        self._reads = [read for read in history.reads if read.partition == partition]
        self._floors = self._floors_over_time()

    def anomalies(self) -> Iterator[Anomaly]:
        yield from self._committed_goes_back()
        yield from self._skipped()
        for session in self._history.sessions:
            if session.partition == self._partition:
                yield from self._session(session)

    def _floors_over_time(self) -> list[tuple[float, int, str]]:
        """Return (time, lowest committed offset from then on, evidence), ascending in time and offset."""
        known = [
            (commit.ended, commit.offset, f"{commit.member} was acknowledged {commit.offset}")
            for commit in self._commits
            if commit.is_acknowledged
        ]
        known += [
            (read.ended, read.offset, f"{read.who} had read {read.offset}")
            for read in self._reads
            if read.offset is not None
        ]
        floors: list[tuple[float, int, str]] = []
        for floor in sorted(known):
            if not floors or floor[1] > floors[-1][1]:
                floors.append(floor)
        return floors

    def _floor(self, at: float) -> tuple[int, str]:
        place = bisect_right(self._floors, at, key=lambda floor: floor[0]) - 1
        return (-1, "") if place < 0 else self._floors[place][1:]

    def _committed_goes_back(self) -> Iterator[Anomaly]:
        for read in self._reads:
            floor, why = self._floor(read.began)
            if (-1 if read.offset is None else read.offset) < floor:
                yield self._anomaly("a committed offset went back", f"{read.who} read {read.offset}, after {why}")

    def _skipped(self) -> Iterator[Anomaly]:
        """Yield commits of records that were not delivered before."""
        first: dict[int, float] = {}
        for delivered in self._history.deliveries[self._partition]:
            first.setdefault(delivered.offset, delivered.at)
        latest = list(accumulate((first.get(offset, inf) for offset in self._offsets), max))
        claims = [(commit.offset, commit.ended, f"{commit.member} committed") for commit in self._commits]
        claims += [
            (read.offset, read.ended, f"{read.who} read that committed is")
            for read in self._reads
            if read.offset is not None
        ]
        for offset, at, what in claims:
            below = bisect_left(self._offsets, offset)
            if below and latest[below - 1] > at:
                skipped = [each for each in self._offsets[:below] if first.get(each, inf) > at]
                text = f"{what} {offset}, before any member got {skipped[:5]} ({len(skipped)} in all)"
                yield self._anomaly("records were skipped", text)
                return

    def _session(self, session: Session) -> Iterator[Anomaly]:
        if not session.delivered:
            return
        floor, why = self._floor(session.began)
        who = session.member
        if session.delivered[0].offset < floor:
            text = f"{who} began at {session.delivered[0].offset}, after {why}"
            yield self._anomaly("a committed record came again", text)
        before = -1
        for delivered in session.delivered:
            known = self._log.get(delivered.offset)
            if known != delivered.value:
                text = f"{who} got {delivered.value[:40]!r} at {delivered.offset}, which holds {_shown(known)}"
                yield self._anomaly("another record was delivered", text)
                return
            if before >= delivered.offset:
                yield self._anomaly("a session went back", f"{who} got {delivered.offset} after {before}")
                return
            start, end = bisect_right(self._offsets, before), bisect_left(self._offsets, delivered.offset)
            if before >= 0 and start < end:
                text = f"{who} got {delivered.offset} after {before}, without {self._offsets[start:end][:5]}"
                yield self._anomaly("a session left records out", text)
                return
            before = delivered.offset

    def _anomaly(self, kind: str, text: str) -> Anomaly:
        return _anomaly(self._history, kind, f"{self._partition}: {text}")


def _shown(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value[:40])

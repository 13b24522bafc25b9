"""Consumer groups in a storm, whose members come and go.

Most storms draw one or two groups, on topics that may lose nothing, on the growing topic, and on topics that are
deleted and re-created. Members join late, leave in good order after a while, are killed and paused by faults, exceed
`max_poll_interval_ms`, and read records one by one, by polls or by batches; some are static. They commit their
positions, with or without awaiting the response, or leave that to the consumer. Meanwhile a client outside the group
reads the committed offsets.

The history of a group is judged at the end (`group_history`). After healing, the members must share all partitions in
one generation, and commit all records, in time.

The random decisions of groups are independent, so that the rest of a storm does not depend on them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from minibroker.broker.groups.group import Group
from minibroker.broker.groups.removal import GroupRemoval
from minibroker.broker.groups.terms import GroupTerm
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, CommitFailed, MaxPollIntervalExceeded
from minibroker.client.group.auto_commit import positions
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.group.states import MemberState
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from tests.simulation.mutants.planting import Patches
from tests.simulation.storms.clients.growing import METADATA_MAX_AGE_MS, Growing
from tests.simulation.storms.clients.growing import TOPIC as GROWING
from tests.simulation.storms.clients.rebirth import Rebirth
from tests.simulation.storms.clients.workload import DURABLE, SHRINKING, Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.security import Right, may_join, may_read
from tests.simulation.storms.verdicts.group_history import Commit, GroupHistory, check_group, check_reborn
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition

READER = "group-reader"
LIVENESS_S = 60.0

_PATIENCE_MS = 600_000
"""Longer than a storm, so that a call which only its time limit would end is seen as hanging."""
_RETRY_S = 0.3
_LONGEST_ABSENCE_S = 40.0
"""Longest absence of members after which offsets kept for a minute have not expired. It is shorter, since the last sign
of a member is older than its end."""
_STATIC_PROBABILITY = 0.3
_EAGER = ("range", "roundrobin", "sticky")
_COOPERATIVE = "cooperative-sticky"


@dataclass
class _Group:
    name: str
    topics: list[str]
    is_by_pattern: bool
    """Whether the group subscribes by a pattern, so that its topics need not exist."""
    strategy: str
    commits: str
    """"awaited", "not awaited" or "automatic"."""
    session_timeout_ms: int
    max_poll_interval_ms: int
    settings: Mapping[str, Any]
    history: GroupHistory
    is_forgiven: bool = False
    stable_s: float | None = None
    """When a member was last seen in a generation."""
    may_have_expired: bool = False
    """Whether committed offsets may have expired while the group had no member."""
    behind: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Committed offset and log end of each partition where the two differed at the last final check."""


@dataclass
class _Member:
    """A member of a group over all its starts."""

    name: str
    group: _Group
    instance_id: str | None
    style: str
    """"poll", "glance", "records" or "batches"."""
    pause_s: float
    """Longest pause between reads."""
    life_s: float
    """Mean time until it leaves, to come back later."""
    records_per_commit: int
    identity: str = ""
    view: tuple[int, frozenset[TopicPartition]] = (-1, frozenset())
    """Its last known generation and partitions."""


@dataclass
class _Life:
    """One consumer of a member."""

    member: _Member
    identity: str
    consumer: Consumer = field(init=False)
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    """The next offset of each partition, after the records that it has processed."""
    uncommitted: int = 0

    @property
    def group(self) -> _Group:
        return self.member.group

    @property
    def history(self) -> GroupHistory:
        return self.member.group.history

    @property
    def generation(self) -> int:
        return self.consumer.status().generation_id


class _Listener(RebalanceListener):
    def __init__(self, groups: Groups, life: _Life) -> None:
        self._groups = groups
        self._life = life

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._life.history.assigned(self._life.identity, partitions)
        self._groups.look_at(self._life)

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        try:
            await self._groups.commit_last(self._life)
        finally:
            self._taken(partitions)

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._taken(partitions)

    def _taken(self, partitions: list[TopicPartition]) -> None:
        self._life.history.taken(self._life.identity, partitions)
        for partition in partitions:
            self._life.positions.pop(partition, None)


class Groups(Guests):
    """The groups of a storm, `Guests` of the workload."""

    def __init__(self, storm: Ground, dice: Random, growing: Growing, rebirth: Rebirth, at_least: int = 0) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self._growing = growing
        self._rebirth = rebirth
        self._dice = dice
        self._is_over = False
        self._lost_offsets = False
        """Whether committed offsets may be lost."""
        self._is_last_life = False
        self.partitions: list[TopicPartition] = []
        """The partitions of `__consumer_offsets`, once they exist."""
        lasting = list(dict.fromkeys(p.topic for p in storm.partitions if p.topic.startswith(DURABLE)))
        lasting = [topic for topic in lasting if topic != SHRINKING]
        self._members = {
            member.name: member
            for number in range(max(at_least, dice.choice([0, 1, 1, 2])))
            for member in self._draw(f"group-{number}", lasting)
        }

    def _draw(self, name: str, lasting: list[str]) -> Iterator[_Member]:
        dice = self._dice
        topics = dice.sample(lasting, dice.randint(1, len(lasting)))
        is_by_pattern = dice.random() < 0.5
        if is_by_pattern and dice.random() < 0.7:
            topics.append(GROWING)
        if self._rebirth.topics and dice.random() < 0.4:
            topics.append(dice.choice(self._rebirth.topics))
        session_timeout_ms = dice.choice([1_500, 3_000, 8_000])
        group = _Group(
            name,
            topics,
            is_by_pattern,
            strategy=_COOPERATIVE if dice.random() < 0.5 else dice.choice(_EAGER),
            commits=dice.choice(["awaited", "awaited", "not awaited", "automatic"]),
            session_timeout_ms=session_timeout_ms,
            max_poll_interval_ms=dice.choice([4_000, 10_000]),
            settings={
                "heartbeat_interval_ms": session_timeout_ms / 5,
                "auto_commit_interval_ms": dice.choice([300, 2_000]),
                "request_timeout_ms": dice.choice([1_000, 5_000]),
                "metadata_max_age_ms": METADATA_MAX_AGE_MS,
                "default_api_timeout_ms": _PATIENCE_MS,
            },
            history=GroupHistory(name),
        )
        are_static = dice.random() < _STATIC_PROBABILITY
        for number in range(dice.randint(1, 4)):
            yield _Member(
                f"{name}-member-{number}",
                group,
                instance_id=f"static-{number}" if are_static else None,
                style=dice.choice(["poll", "glance", "records", "batches"]),
                pause_s=dice.choice([0.02, 0.1, 0.5]),
                life_s=dice.choice([5.0, 20.0, 60.0, 1_000.0]),
                records_per_commit=dice.choice([1, 10, 50]),
            )

    @property
    def _groups(self) -> list[_Group]:
        return list({member.group.name: member.group for member in self._members.values()}.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observe the beginning of each deletion of a group."""
        patches = Patches()

        @patches.instead_of(GroupRemoval, "_delete")
        async def delete(original: Any, removal: GroupRemoval, term: GroupTerm, group: Group) -> Any:
            for ours in self._groups:
                ours.history.may_begin_anew |= ours.name == group.group_id
            return await original(removal, term, group)

        try:
            yield
        finally:
            patches.undo()

    def stay_away(self) -> None:
        self._members.clear()

    # -- their lives --

    @property
    def names(self) -> list[str]:
        return [*self._members, *[READER] * bool(self._members)]

    def rights(self, name: str) -> list[Right]:
        if name == READER:
            return []
        group = self._members[name].group
        return [*may_read(*group.topics), *may_join(group.name)]

    @property
    def members(self) -> list[str]:
        return list(self._members)

    def session_timeout_s(self, name: str) -> float:
        """Return the session timeout of a member."""
        return self._members[name].group.session_timeout_ms / 1_000

    async def create_offsets_topic(self) -> None:
        """Create `__consumer_offsets` through the first request to a coordinator."""
        world = self._cluster.client(READER)
        await world.process.run(self._ask_for_offsets(world))
        world.process.kill()
        partitions = sorted(self._storm.topic(OFFSETS_TOPIC).partitions)
        self.partitions = [TopicPartition(OFFSETS_TOPIC, number) for number in partitions]

    async def _ask_for_offsets(self, world: VirtualWorld) -> None:
        async with Admin(self._cluster.bootstrap, world=world) as admin:
            await admin.list_group_offsets(READER)

    def _run(self, name: str, world: VirtualWorld) -> None:
        if name == READER:
            world.process.start(self._look_again_and_again(world), name)
            return
        member = self._members[name]
        if self._starts[name] > 1:
            member.group.history.ended(member.identity)
        world.process.start(self._live(member, world), name)

    async def _live(self, member: _Member, world: VirtualWorld) -> None:
        """Use one consumer after the other."""
        group, random = member.group, world.random
        for attempt in itertools.count(1):
            if not self._is_last_life:
                await asyncio.sleep(random.choice([0.0, 0.2, 5.0]) * random.random())
            if self._is_over:
                return
            member.identity = f"{member.name}#{self._starts[member.name]}.{attempt}"
            life = _Life(member, member.identity)
            life.consumer = Consumer(
                self._cluster.bootstrap,
                topics=None if group.is_by_pattern else group.topics,
                pattern="|".join(map(re.escape, group.topics)) if group.is_by_pattern else None,
                group=group.name,
                group_instance_id=member.instance_id,
                listener=_Listener(self, life),
                partition_assignment_strategy=group.strategy,
                enable_auto_commit=group.commits == "automatic",
                session_timeout_ms=group.session_timeout_ms,
                max_poll_interval_ms=group.max_poll_interval_ms,
                world=world,
                **dict(group.settings),
            )
            try:
                with self._storm.client_errors(life.identity):
                    async with life.consumer:
                        if random.random() < 0.15 and not self._is_last_life:
                            closing = self._close_later(life.consumer, random.expovariate(1 / member.life_s))
                            world.process.start(closing, f"{life.identity}, closing")
                        await self._consume(life, random, self._storm.now_s + random.expovariate(1 / member.life_s))
                        await self._commit(life, random)
            finally:
                group.history.ended(life.identity)
                member.view = (-1, frozenset())
            await asyncio.sleep(_RETRY_S)

    async def _close_later(self, consumer: Consumer, after_s: float) -> None:
        """Close the consumer while the member uses it, as a signal handler does."""
        await asyncio.sleep(after_s)
        self._storm.event("a member is closed by another task")
        await consumer.close()

    async def _consume(self, life: _Life, random: Random, until_s: float) -> None:
        member, consumer = life.member, life.consumer
        records, batches = aiter(consumer), consumer.batches()
        while not self._is_over and (self._storm.now_s < until_s or self._is_last_life):
            before = life.uncommitted
            try:
                async with asyncio.timeout(1):
                    if member.style == "poll":
                        for record in await consumer.poll(timeout_ms=500, max_records=random.choice([None, 1, 20])):
                            self._delivered(life, record.topic, record.partition, record.offset, record.value)
                    elif member.style == "glance":  # polls without waiting, and again a little later in virtual time
                        for record in await consumer.poll(timeout_ms=0):
                            self._delivered(life, record.topic, record.partition, record.offset, record.value)
                        await asyncio.sleep(0.1)
                    elif member.style == "records":
                        record = await anext(records)
                        self._delivered(life, record.topic, record.partition, record.offset, record.value)
                    else:
                        batch = await anext(batches)
                        for offset, value in zip(batch.offsets, batch.values, strict=True):
                            self._delivered(life, batch.topic, batch.partition, offset, value)
            except TimeoutError:
                records, batches = aiter(consumer), consumer.batches()
            except MaxPollIntervalExceeded:
                self._storm.event("a member sat on its records for too long")
            self.look_at(life)
            # At the end no further record may come to trigger a retry of a failed commit. A commit for each record,
            # however, would take too long.
            is_idle = self._is_last_life and life.uncommitted == before
            if life.uncommitted >= member.records_per_commit or random.random() < 0.05 or is_idle:
                await self._commit(life, random)
            if member.style != "records" and not self._is_last_life:
                await asyncio.sleep(member.pause_s * random.random())
            if random.random() < 0.003 and not self._is_last_life:
                await asyncio.sleep(life.group.max_poll_interval_ms / 1_000 * random.uniform(0.5, 1.7))

    def _delivered(self, life: _Life, topic: str, number: int, offset: int, value: bytes | None) -> None:
        partition = TopicPartition(topic, number)
        life.history.delivered(life.identity, partition, offset, value or b"")
        life.positions[partition] = offset + 1
        life.uncommitted += 1

    def look_at(self, life: _Life) -> None:
        """Record the generation and the partitions of a member. A member without an assignment is ignored: the
        coordinator may fail before it has stored that generation."""
        status, held = life.consumer.status(), frozenset(life.consumer.assignment())
        generation = status.generation_id
        if status.member_state != MemberState.STABLE.phase:
            return
        group = life.group
        now_s = self._storm.now_s
        if self._storm.offsets_expire and now_s - (group.stable_s or now_s) > _LONGEST_ABSENCE_S:
            group.may_have_expired = True
        group.stable_s = now_s
        if life.member.view != (generation, held):
            life.member.view = (generation, held)
            life.history.holds(life.member.instance_id or life.identity, generation, held)

    # -- commits --

    async def _commit(self, life: _Life, random: Random) -> None:
        """Commit the member's positions, unless its consumer commits automatically."""
        life.uncommitted = 0
        if life.group.commits == "automatic" or not life.positions:
            return
        offsets = dict(life.positions) if random.random() < 0.5 else None
        commits = self._commit_begins(life, offsets)
        if life.group.commits == "not awaited":
            self._answered_later(life, life.consumer.commit_nowait(offsets), commits)
        else:
            await self._answered(life, life.consumer.commit(offsets), commits)

    async def commit_last(self, life: _Life) -> None:
        """Commit before partitions are revoked."""
        if life.group.commits != "automatic" and life.positions:
            commits = self._commit_begins(life, None)
            await self._answered(life, life.consumer.commit(), commits)

    def _commit_begins(self, life: _Life, offsets: Mapping[TopicPartition, int] | None) -> list[Commit]:
        """Record a commit of these offsets, or with None of the consumer's positions, at the moment of the call.

        The consumer may have no position in a re-created topic although the member had records of the earlier one. It
        then commits nothing for that partition, and no error names it. A consumer that another task closes has moved
        its positions back to records that the member is still processing.
        """
        done = life.positions
        if offsets is None:
            sent, reborn = positions(life.consumer._partitions), self._rebirth.topics
            done = {p: offset for p, offset in done.items() if p in sent or p.topic not in reborn}
            done = {p: min(offset, sent[p].offset) if p in sent else offset for p, offset in done.items()}
        return life.history.commit_begins(life.identity, done, life.generation)

    def _answered_later(self, life: _Life, answer: asyncio.Future[None], commits: list[Commit]) -> None:
        def answered(answer: asyncio.Future[None]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                life.history.commit_acknowledged(commits, life.generation)

        answer.add_done_callback(answered)

    async def _answered(self, life: _Life, answer: Awaitable[None], commits: list[Commit]) -> None:
        try:
            await answer
        except CommitFailed as error:
            commits = [commit for commit in commits if commit.partition not in error.errors]
        except MinibrokerError:
            return  # it may have been carried out all the same
        life.history.commit_acknowledged(commits, life.generation)

    async def _committed(
        self, world: VirtualWorld, group: _Group, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        """Read the committed offsets with a client outside the group. Retry until there is an answer."""
        while True:
            try:
                async with Consumer(
                    self._cluster.bootstrap, group=group.name, partitions=partitions, world=world
                ) as consumer:
                    began = group.history.read_begins()
                    found = await consumer.committed(*partitions)
                    offsets = {p: None if (known := found[p]) is None else known.offset for p in partitions}
                    group.history.read(world.process.name, offsets, began)
                    return offsets
            except ClientCrashed as error:
                self._storm.accuse(Anomaly("a client crashed", f"{READER}: {error!r} {error.__cause__!r}"))
            except MinibrokerError:
                pass
            await asyncio.sleep(_RETRY_S)

    async def _look_again_and_again(self, world: VirtualWorld) -> None:
        while True:
            for group in self._groups:
                await self._committed(world, group, self._partitions_of(group))
                await asyncio.sleep(world.random.uniform(0.5, 4))

    def _partitions_of(self, group: _Group) -> list[TopicPartition]:
        """Return the existing partitions of the group's topics."""
        partitions = [partition for partition in self._storm.partitions if partition.topic in group.topics]
        if GROWING in group.topics:
            partitions += self._growing.partitions()
        return partitions + [p for p in self._rebirth.partitions() if p.topic in group.topics]

    # -- what the storm asks --

    def forgive(self, exposed: Collection[TopicPartition]) -> None:
        """Allow these partitions to lose records."""
        for group in self._groups:
            group.is_forgiven |= not set(exposed).isdisjoint([*self._partitions_of(group), *self.partitions])
        self._lost_offsets |= not set(exposed).isdisjoint(self.partitions)

    async def finish(self) -> None:
        """After healing and all sending, accuse each group whose members do not share all partitions and commit all
        records in time."""
        self._is_last_life = True
        world = self._cluster.client("group-auditor")
        for group in self._groups:
            try:
                async with asyncio.timeout(LIVENESS_S):
                    await world.process.run(self._all_done(world, group))
            except TimeoutError:
                self._storm.accuse(Anomaly("not live", f"group {group.name}: {self._condition(group)}"))
        self._is_over = True
        await asyncio.sleep(0)
        for process in self._processes.values():
            process.kill()
        world.process.kill()

    async def _all_done(self, world: VirtualWorld, group: _Group) -> None:
        while True:
            partitions = self._partitions_of(group)
            async with Consumer(self._cluster.bootstrap, partitions=partitions, world=world) as consumer:
                ends = await consumer.end_offsets(partitions)
            found = await self._committed(world, group, partitions)
            group.behind = {str(p): (found[p] or 0, ends[p]) for p in partitions if (found[p] or 0) != ends[p]}
            if self._is_shared(group, partitions) and (group.may_have_expired or not group.behind):
                return
            await asyncio.sleep(0.5)

    def _is_shared(self, group: _Group, partitions: list[TopicPartition]) -> bool:
        views = [member.view for member in self._members.values() if member.group is group]
        held = Counter(partition for _, of_member in views for partition in of_member)
        return len({generation for generation, _ in views}) == 1 and held == Counter(partitions)

    def _condition(self, group: _Group) -> str:
        views = {name: member.view for name, member in self._members.items() if member.group is group}
        return f"{group.strategy}, commits {group.commits}; members {views}; committed and end {group.behind}"

    def judge(self) -> Iterator[Anomaly]:
        """Yield anomalies, once all topics were read back."""
        for group in self._groups:
            if not group.is_forgiven and not group.may_have_expired:
                final = self._storm.workload.history.final | self._growing.final
                lasting = [partition for partition in self._partitions_of(group) if partition in final]
                yield from check_group(group.history, {partition: final[partition] for partition in lasting})
            lives = self._rebirth.lives
            for topic in self._rebirth.topics:
                current = lives.current(topic)
                if topic in group.topics and current is not None and not current.may_lose and not self._lost_offsets:
                    for partition in current.partitions:
                        log = lives.committed[TopicIdPartition(current.topic_id, partition)]
                        yield from check_reborn(group.history, partition, log)

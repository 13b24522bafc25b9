"""A consumer's membership in its group: one task that joins, takes over what it is assigned, and gives it up again
(Kafka's AbstractCoordinator and ConsumerCoordinator).

The problem: a rebalance takes partitions from a member whose user may be in the middle of a record. If it went on
beside the user, two members would work on one partition at the same time, and the user's commit would come too late.

The choice: partitions are taken away only while the user holds no records (see `activity`): it waits for the next
ones, or has not asked for any yet. The loop over the consumer is where a rebalance happens, as it is in Kafka's `poll`,
but nobody has to call anything: the member waits for that moment by itself, and while records are being worked on, its
heartbeats go on (see `heart`). Others wait for it meanwhile, for `max_poll_interval_ms` at most. What takes nothing
away needs no such moment: the first join, and, with the cooperative protocol, all of a rebalance but the giving up.

The walk of a rebalance, M1 to M9, is in ARCHITECTURE.md; the labels are in the code.

Rejected: rebalances in a task that asks nobody (aiokafka); callbacks that the user must keep short (Kafka's, which run
in `poll`, so that is what they do, too, but nothing bounds them).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from minibroker.client.cluster.connections import exponential_backoff_s
from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.metadata import TopicInfo
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import ListenerTimedOut, MaxPollIntervalExceeded
from minibroker.client.fetching.activity import Activity
from minibroker.client.fetching.fetch_state import PartitionState
from minibroker.client.fetching.fetcher import Fetcher
from minibroker.client.group.assignors import Assignor, RebalanceProtocol, Subscription
from minibroker.client.group.commits import Commits, OffsetAndMetadata
from minibroker.client.group.heart import Heard, Heart, Membership, News, Overslept, Refused, Unreachable, leave
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.group.states import MOVES, MemberState, Reaction, reaction
from minibroker.client.group.waits import watch
from minibroker.client.log import Logger
from minibroker.client.tasks import Pulse, Waker
from minibroker.protocol import messages as m
from minibroker.protocol.apis import JOIN_GROUP, SYNC_GROUP, Api
from minibroker.protocol.consumer_protocol import (
    PROTOCOL_TYPE,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.words import counted

logger = Logger("minibroker.client")

T = TypeVar("T")
Request = TypeVar("Request", bound=m.Message)
Answer = TypeVar("Answer", g.JoinGroupResponse, g.SyncGroupResponse)

NO_GENERATION = -1
JOIN_EXTRA_S = 5.0
"""How much longer than the rebalance timeout an answer to JoinGroup or SyncGroup may take, as in Kafka."""
REQUEST_PATIENCE_S = 10.0
"""After so long without success, a step of a rebalance begins anew, and `status` knows why."""


class Subscribed(NamedTuple):
    """What the user has subscribed to."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None

    def names(self, topics: Mapping[str, TopicInfo]) -> list[str]:
        """The topics that are meant, as far as they are known."""
        if self.pattern is None:
            return list(self.topics)
        return sorted(
            name for name, info in topics.items() if not info.is_internal and self.pattern.fullmatch(name) is not None
        )

    def includes(self, topic: str) -> bool:
        """Whether this topic is meant, known or not."""
        return topic in self.topics if self.pattern is None else self.pattern.fullmatch(topic) is not None


class _ListenerCall:
    def __init__(self, member: GroupMember, method: str, began: float) -> None:
        self.member = member
        self.method = method
        self.began = began
        self.is_over = False
        self.task = asyncio.current_task()


class _Setback(NamedTuple):
    at: float
    error: MinibrokerError


_listener_call: ContextVar[_ListenerCall | None] = ContextVar("minibroker_listener_call", default=None)
"""The call of a listener from which the present code was called, or its task was started."""


class _Interrupted(Exception):
    """The step of the rebalance that was under way makes no sense any more."""


class GroupMember:
    """See the module. The consumer owns it; it knows nothing of the consumer, which could not be dropped otherwise."""

    def __init__(
        self,
        runtime: ClientRuntime,
        fetcher: Fetcher,
        activity: Activity,
        coordinators: Coordinators,
        commits: Commits,
        errors: list[BaseException],
        *,
        group: str,
        group_instance_id: str | None,
        assignors: Sequence[Assignor],
        session_timeout_s: float,
        heartbeat_interval_s: float,
        max_poll_interval_s: float,
        api_timeout_s: float,
        auto_commit: Callable[[float], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._metadata = runtime.metadata
        self._fetcher = fetcher
        self._activity = activity
        self._coordinators = coordinators
        self._commits = commits
        self._group = group
        self._instance_id = group_instance_id
        self._assignors = {assignor.name: assignor for assignor in assignors}
        self._is_cooperative = all(assignor.protocol is RebalanceProtocol.COOPERATIVE for assignor in assignors)
        """Members keep to what all of their assignors can do, as in Kafka."""
        self._session_timeout_s = session_timeout_s
        self._rebalance_timeout_s = max_poll_interval_s
        self._patience_s = min(REQUEST_PATIENCE_S, api_timeout_s / 3)
        """For each of the steps of leaving: `unsubscribe` waits for three of them."""
        self._auto_commit = auto_commit
        self._heart = Heart(
            runtime.bootstrap,
            activity,
            self._hear,
            client_id=runtime.connections.client_id,
            session_timeout_s=session_timeout_s,
            heartbeat_interval_s=heartbeat_interval_s,
            max_poll_interval_s=max_poll_interval_s,
            request_timeout_s=runtime.request_timeout_s,
            retry_backoff_s=runtime.retry_backoff_s,
            metadata_max_age_s=runtime.metadata_max_age_s,
        )
        self._waker = Waker()
        self._settled = Pulse()
        """Beats when commits may be possible again, or never will be."""
        self._subscribed: Subscribed | None = None
        self._listener = RebalanceListener()
        self._why_rejoin: str | None = None
        """Why to join (again); None: there is no reason to."""
        self._loss: tuple[Reaction, MinibrokerError | None] | None = None
        """The group goes on without this member: what to do, and what to tell the user."""
        self._is_taking_over = False
        """It has its assignment, so the coordinator takes commits in this generation, though it is not stable yet."""
        self._is_giving_up = False
        """Partitions are about to be taken away: commits are possible, and the last chance."""
        self._joined_topics: list[str] = []
        """Those that were subscribed to when it joined."""
        self._watched: dict[str, tuple[str, int]] | None = None
        """At the leader: id and number of partitions of all topics of the group, as they were assigned."""
        self._first: dict[str, tuple[str, int]] = {}
        """Id and number of partitions of the topics when they were first joined for: what came later is read from its
        beginning."""
        self._failures = 0
        self.state = MemberState.UNJOINED
        self.unsettled_since = self._clock.monotonic()
        """Since when it has not been stable."""
        self.stirred = Pulse()
        """Beats when it may have something to wait for."""
        self.is_joining = False
        """It has asked to be in the next generation, and waits for the answer."""
        self.listener_call: _ListenerCall | None = None
        """That has not returned yet."""
        self.setback: _Setback | None = None
        """The latest error that a request of this rebalance was repeated after."""
        self.member_id = ""
        self.generation_id = NO_GENERATION
        self.is_leader = False
        self.trouble: str | None = None
        """Why the step under way does not succeed."""
        self._errors = errors
        """To be raised by the iteration, one at a time."""
        self.raised_by_listener: Exception | None = None
        """The last of them that the listener has raised."""
        self._told_of: MinibrokerError | None = None
        self.lost: list[TopicPartition] = []
        """The partitions that it has lost last, with an error for the user."""
        self._uncommitted: dict[TopicPartition, MinibrokerError] = {}
        """Why the partitions were lost of which something was to be committed, until there is another assignment: a
        commit of all positions is not to pass then for one that has nothing to do."""
        self.fenced: MinibrokerError | None = None
        """Another has taken its group_instance_id: it does not join again, or each would fence the other for ever."""
        self._is_parked = False
        """It was refused, and waits until the user asks again."""
        self._metadata.listeners.append(self._waker.wake)

    # -- what the consumer calls --

    def listen(self, listener: RebalanceListener | None) -> None:
        """Who is told of rebalances; None: the one before, if there was one."""
        if listener is not None:
            self._listener = listener

    def subscribe(self, subscribed: Subscribed | None) -> None:
        """Join for these topics; None: leave."""
        self._subscribed = subscribed
        if subscribed is not None:
            for partition, state in self._fetcher.states.items():
                if not subscribed.includes(partition.topic):  # until it is given up, or subscribed to again (M8)
                    state.is_held = True
            self._fetcher.cut()
        else:
            self._uncommitted.clear()  # the user lets go of its positions, lost or not
        self._why_rejoin = "the subscription has changed"
        self.fenced, self._is_parked = None, False
        self._waker.wake()

    @property
    def subscribed(self) -> Subscribed | None:
        return self._subscribed

    @property
    def group(self) -> str:
        return self._group

    @property
    def coordinator(self) -> str | None:
        """As far as is known."""
        known = self._coordinators.known(self._group)
        return None if known is None else f"broker {known.node_id} at {known.address}"

    @property
    def obstacle(self) -> str | None:
        """Why the step under way does not get on, as far as this member can tell."""
        found = self._coordinators.obstacle(self._group)
        return self.trouble if found is None else str(found)

    @property
    def untold(self) -> MinibrokerError | None:
        """Why it has lost `lost`, as long as the next call for records is still to raise that."""
        return self._told_of if self._told_of in self._errors else None

    def lost_positions(self) -> dict[TopicPartition, MinibrokerError]:
        """What cannot be committed any more, and why: as long as the user is still to be told of the loss, all that
        was lost."""
        untold = self.untold
        return self._uncommitted | ({} if untold is None else dict.fromkeys(self.lost, untold))

    @property
    def is_refused(self) -> bool:
        """It joins again only when the user asks for records again."""
        return self._is_parked

    async def run(self) -> None:
        """The task, until it is cancelled."""
        while True:
            if self._loss is not None:
                await self._lose(*self._loss)
            elif self._subscribed is None and self.state is not MemberState.UNJOINED:
                await self._leave()
            elif self._is_parked:
                await self._waker.sleep(None)
            elif self._subscribed is not None and (why := self._why_rejoin or self._news_of_topics()) is not None:
                self._why_rejoin = why
                try:
                    await self._rebalance(why)
                except _Interrupted:
                    continue
                except InvalidMessage as error:  # another member, or the leader, does not speak this protocol
                    self._lost(Reaction.RAISE, error)
            else:
                await self._waker.sleep(None)

    async def beat(self) -> None:
        """The other task: the heart's."""
        await self._heart.run(self._runtime.world)

    async def watch(self) -> None:
        """The third task: see `group_waits`."""
        await watch(self, self._runtime, self._activity)

    async def left(self) -> None:
        """Until the member is in no group, after `subscribe(None)`."""
        while not self.has_left:
            await self._settled.wait()

    def go_on(self) -> None:
        """`run` was cancelled, and runs again."""
        if self.state in (MemberState.PREPARING_REBALANCE, MemberState.COMPLETING_REBALANCE):
            self._rejoin("its task was cancelled during a rebalance")

    def not_left(self) -> str:
        """What it means for the group that this member has not left."""
        waits = f"it waits for session_timeout_ms={round(self._session_timeout_s * 1_000)} before it goes on"
        return f"group {self._group} was not left: {waits}"

    @property
    def has_left(self) -> bool:
        return self.state is MemberState.UNJOINED and self._loss is None

    async def _leave(self) -> None:
        await self._give_up(list(self._fetcher.states), is_lost=False)
        if self._loss is not None:
            return
        membership = Membership(self._group, self.generation_id, self.member_id, self._instance_id)
        stays = "leaves" if self._instance_id is None else "ends; its place is kept for it until the session is over"
        logger.info("%s: %s", self._who, stays)
        self._heart.beat(None)
        self._activity.is_quiet = False
        await leave(self._coordinators, membership, "it has unsubscribed, or is being closed", self._patience_s)
        self._unjoined(keeps_id=False)

    @property
    def is_within_listener(self) -> bool:
        """Whether who asks is this member's listener, which has not returned yet."""
        call = _listener_call.get()
        return call is not None and call.member is self and not call.is_over

    @property
    def is_listener(self) -> bool:
        """Whether who asks is the very task in which this member's listener is called. One that the listener has
        started may go its own way."""
        call = self.listener_call
        return call is not None and call.task is asyncio.current_task()

    # -- what Commits asks --

    def membership(self) -> Membership | None:
        if self.generation_id == NO_GENERATION or self._loss is not None:
            return None
        return Membership(self._group, self.generation_id, self.member_id, self._instance_id)

    def claim(self, partition: TopicPartition) -> object:
        return self._fetcher.states.get(partition)

    def why_not(self, partition: TopicPartition, claim: object) -> str | None:
        if claim is not None and self._fetcher.states.get(partition) is claim and self.membership() is not None:
            return None
        error = self.untold or self._uncommitted.get(partition) if self._loss is None else self._loss[1]
        if error is not None:
            return f"the member has lost its partitions: {error}"
        if self.generation_id == NO_GENERATION:
            return "the member is in no generation of the group now, so it may not commit"
        return f"{partition} is not assigned to this member, or no longer: another member may have it"

    def committed(self, partition: TopicPartition, claim: object, offset: int) -> None:
        if isinstance(claim, PartitionState):
            claim.saved = offset

    def refused(self, membership: Membership, code: ErrorCode) -> None:
        """By the coordinator: a heartbeat or a commit."""
        if membership != self.membership():
            return  # of an earlier generation
        if self.state is MemberState.PREPARING_REBALANCE and not self._is_giving_up and self._is_cooperative:
            return  # it has asked to join, so there may be a later generation, which it will hear of
        if (
            self.state is MemberState.COMPLETING_REBALANCE
            and not self._is_taking_over
            and code is ErrorCode.REBALANCE_IN_PROGRESS
        ):
            return  # the rebalance that it is in the middle of; were it another one, a heartbeat would say so
        why = f"the coordinator says {code.name}"
        match reaction(code):
            case Reaction.REJOIN:
                self._rejoin(why)
            case Reaction.LOSE | Reaction.BEGIN_ANEW as what:
                self._lost(what, None)
                logger.info("%s: %s, so it has lost its partitions and joins again", self._who, why)
            case Reaction.FENCED | Reaction.RAISE as what:
                self._lost(what, BrokerError(code, f"group {self._group}"))

    def why_refused(self, code: ErrorCode) -> MinibrokerError:
        if self._loss is not None and self._loss[1] is not None:
            return self._loss[1]
        return BrokerError(code, f"committing offsets of group {self._group}")

    async def can_retry(self, membership: Membership, code: ErrorCode) -> bool:
        """Not before it has its assignment, but then at once: the partitions that it is to give up wait for a user who
        may be waiting for this commit."""
        if self._is_giving_up:
            return False
        # The generation that the commit named was without an assignment yet. It may be through by the time at which
        # this wakes: where nothing changes hands, taking over takes no time.
        was_completing = self.state is MemberState.COMPLETING_REBALANCE and code is ErrorCode.REBALANCE_IN_PROGRESS
        while self._loss is None and self.generation_id != NO_GENERATION:
            is_through = self.state is MemberState.STABLE or self._is_taking_over
            if is_through and (was_completing or self.membership() != membership):
                return True
            await self._settled.wait()
        return False

    # -- news --

    def _hear(self, news: News) -> None:
        """Of the heart."""
        match news:
            case Heard():
                self.trouble = None if self.state is MemberState.STABLE else self.trouble
            case Unreachable(reason):
                self.trouble = reason
                self.stirred.notify()
            case Refused(membership, code):
                self.refused(membership, code)
            case Overslept(membership, silent_s) if membership == self.membership():
                # Not before the user is back: it would be put out again and again, and the group never rest.
                self._lost(Reaction.RAISE, MaxPollIntervalExceeded(silent_s, self._rebalance_timeout_s))

    def _lost(self, what: Reaction, error: MinibrokerError | None) -> None:
        if self._loss is None:
            self._loss = what, error
            self._activity.is_quiet = True
            self._fetcher.cut()
            self._settled.notify()
            self._activity.freed.notify()
            self._waker.wake()

    def _rejoin(self, why: str) -> None:
        if self._why_rejoin is None:
            self._why_rejoin = why
            self._waker.wake()

    @property
    def _who(self) -> str:
        return f"{self._runtime.connections.client_id} in group {self._group}"

    def _move(self, state: MemberState) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        logger.debug("%s: %s -> %s", self._who, self.state.value, state.value)
        if self.state is MemberState.STABLE:
            self.unsettled_since = self._clock.monotonic()
        self.state = state
        if state is MemberState.STABLE:
            self.setback = None
        self.stirred.notify()

    def _unjoined(self, keeps_id: bool) -> None:
        self._move(MemberState.UNJOINED)
        self.generation_id = NO_GENERATION
        self._watched = None
        self.is_leader = False
        if not keeps_id:
            self.member_id = ""
        self._settled.notify()

    def _news_of_topics(self) -> str | None:
        """Why what metadata says now takes another rebalance."""
        if self.state is not MemberState.STABLE or self._subscribed is None:
            return None
        topics = self._metadata.cluster.topics
        if self._subscribed.names(topics) != self._joined_topics:
            pattern = self._subscribed.pattern
            return "the subscription has changed" if pattern is None else f"other topics match {pattern.pattern!r}"
        if self._watched is not None and self._watched != (now := self._counted(self._watched)):
            changed = [name for name in now if now[name] != self._watched[name]]
            return f"topics or partitions have come or gone: {', '.join(changed)}"
        return None

    def _counted(self, topics: Iterable[str]) -> dict[str, tuple[str, int]]:
        infos = self._metadata.cluster.topics
        errors = self._metadata.cluster.errors
        return {
            name: ("", 0)
            if name not in infos or errors.get(name) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else (infos[name].topic_id, len(infos[name].partitions))
            for name in topics
        }

    # -- the walk of a rebalance --

    async def _rebalance(self, why: str) -> None:
        """M1: somebody has asked for it (a heartbeat's answer, the subscription, metadata, a loss)."""
        assert self._subscribed is not None
        logger.info("%s: joins: %s", self._who, why)
        self._move(MemberState.PREPARING_REBALANCE)
        # M2: the eager protocol gives up all; the cooperative one, what is not subscribed to any more.
        owned = sorted(self._fetcher.states)
        generation_id = self.generation_id
        self._check()
        topics: list[str] | None = None
        while topics != (now := self._subscribed.names(self._metadata.cluster.topics)):  # it may change meanwhile
            topics = self._joined_topics = now
            for topic, at in self._counted(topics).items():
                if at[1]:
                    self._first.setdefault(topic, at)
            gone = [p for p in sorted(self._fetcher.states) if not self._is_cooperative or p.topic not in topics]
            await self._give_up(gone, is_lost=False)
            self._check()
        joined = await self._join(topics, owned, generation_id)
        self._move(MemberState.COMPLETING_REBALANCE)
        self.member_id, self.generation_id = joined.member_id, joined.generation_id
        membership = self.membership()
        assert membership is not None or self._loss is not None
        self._check()
        # M4: heartbeats name the new generation from here on, whatever time the other steps take.
        self._heart.beat(membership)
        assigned = await self._sync(joined)
        try:
            await self._take_over(assigned)
        finally:
            self._is_taking_over = False

    async def _join(
        self, topics: Sequence[str], owned: Sequence[TopicPartition], generation_id: int
    ) -> g.JoinGroupResponse:
        """M3: ask to be in the next generation. The answer comes when all members have asked, or were given up."""
        self._heart.beat(None)
        self._why_rejoin = None  # what comes up from here on, such as another subscription, takes another rebalance
        while True:
            kept = [partition for partition in owned if partition in self._fetcher.states]
            request = g.JoinGroupRequest(
                self._group,
                round(self._session_timeout_s * 1_000),
                round(self._rebalance_timeout_s * 1_000),
                self.member_id,
                self._instance_id,
                PROTOCOL_TYPE,
                [
                    g.JoinGroupProtocol(
                        name,
                        encode_subscription(
                            ConsumerProtocolSubscription(
                                sorted(topics), assignor.user_data(owned, generation_id), kept, generation_id
                            )
                        ),
                    )
                    for name, assignor in self._assignors.items()
                ],
            )
            self.is_joining = True
            try:
                response = await self._asked(JOIN_GROUP, request, self._rebalance_timeout_s + JOIN_EXTRA_S)
            finally:
                self.is_joining = False
            code = error_of(response.error_code)
            if code is ErrorCode.NONE:
                return response
            if code is ErrorCode.MEMBER_ID_REQUIRED:  # KIP-394: whoever vanishes now leaves no member behind
                self.member_id = response.member_id
                continue
            await self._failed(code, "joining", response.error_message)

    async def _sync(self, joined: g.JoinGroupResponse) -> list[TopicPartition]:
        """M5: the leader decides who reads what. Then all get their part, with SyncGroup."""
        assignments: list[g.SyncGroupAssignment] = []
        self.is_leader = joined.leader == joined.member_id
        self._watched = None
        if self.is_leader:
            assignments = await self._assign(joined)
        request = g.SyncGroupRequest(
            self._group,
            joined.generation_id,
            joined.member_id,
            self._instance_id,
            joined.protocol_type,
            joined.protocol_name,
            assignments,
        )
        response = await self._asked(SYNC_GROUP, request, self._rebalance_timeout_s + JOIN_EXTRA_S)
        code = error_of(response.error_code)
        if code is not ErrorCode.NONE:
            await self._failed(code, "waiting for an assignment")
        self._failures = 0
        self.trouble = None
        return sorted(decode_assignment(response.assignment).assigned_partitions)

    async def _assign(self, joined: g.JoinGroupResponse) -> list[g.SyncGroupAssignment]:
        members = {}
        for member in joined.members:
            said = decode_subscription(member.metadata)
            members[member.member_id] = Subscription(
                said.topics,
                said.owned_partitions,
                said.generation_id,
                said.user_data,
                said.rack_id,
                member.group_instance_id,
            )
        topics = sorted({topic for member in members.values() for topic in member.topics})
        for topic in topics:
            self._metadata.want(topic)
        if any(topic not in self._metadata.cluster.topics for topic in topics):
            await self._metadata.refreshed()
        self._watched = self._counted(topics)
        counts = {topic: count for topic, (_, count) in self._watched.items() if count}
        assignor = self._assignors[joined.protocol_name or ""]
        if joined.skip_assignment:
            return []
        try:
            decided = assignor.assign(members, counts)
        except Exception as error:
            self._lost(Reaction.RAISE, None)
            self._errors.append(error)
            raise _Interrupted from error
        logger.info(
            "%s: assigns generation %d by %s: %s",
            self._who,
            joined.generation_id,
            assignor.name,
            ", ".join(f"{member_id} {len(mine)}" for member_id, mine in decided.items()),
        )
        return [
            g.SyncGroupAssignment(member_id, encode_assignment(ConsumerProtocolAssignment(mine)))
            for member_id, mine in decided.items()
        ]

    async def _take_over(self, assigned: list[TopicPartition]) -> None:
        """M6 to M9: what was assigned becomes what is read."""
        self._is_taking_over = True
        self._settled.notify()
        owned = list(self._fetcher.states)
        # M6: cooperative: what goes to others is given up, and they get it in another rebalance, which that asks for.
        gone = sorted(set(owned) - set(assigned))
        if gone:
            await self._give_up(gone, is_lost=False)
            self._check()
            self._why_rejoin = f"{counted(len(gone), 'partition')} given up, for others"
        # M7: where the group has got to in what is new.
        added = [partition for partition in assigned if partition not in self._fetcher.states]
        if added:
            await self._begin_at_committed(added)
        self._uncommitted.clear()  # a commit is about this assignment from here on
        # M8: the user is told; then it gets records.
        await self._tell("on_partitions_assigned", added)
        self._check()
        assert self._subscribed is not None
        subscribed = self._subscribed  # to something else, perhaps, than when it joined
        self._fetcher.release(state for p, state in self._fetcher.states.items() if subscribed.includes(p.topic))
        # M9: records of all partitions are handed out again.
        self._move(MemberState.STABLE)
        self._activity.is_quiet = False
        self._fetcher.pulse.notify()
        self._settled.notify()
        logger.info(
            "%s: generation %d as %s, with %d partitions, %d of them new",
            self._who,
            self.generation_id,
            self.member_id,
            len(assigned),
            len(added),
        )

    async def _begin_at_committed(self, added: list[TopicPartition]) -> None:
        while True:
            try:
                committed = await self._interruptible(self._commits.fetch(added, REQUEST_PATIENCE_S))
                break
            except (NetworkError, InvalidMessage, BrokerError) as error:
                self.trouble = str(error)
                logger.info("%s: reading committed offsets: %s", self._who, error)
                if isinstance(error, BrokerError) and not error.retriable:
                    self._lost(Reaction.RAISE, error)
                    raise _Interrupted from error
        self.trouble = None
        states = self._fetcher.add_held(added)
        begin_at_committed(
            self._fetcher, states, {p: c.offset for p, c in committed.items() if not c.is_of_older_topic}
        )
        if self._fetcher.reset is None:
            return
        for state in states:
            is_of_older_topic = state.partition in committed and committed[state.partition].is_of_older_topic
            if state.position is None and (is_of_older_topic or self._is_new(state.partition)):
                self._fetcher.move(state, None, m.EARLIEST_TIMESTAMP)  # it came later, so all of it is news

    def _is_new(self, partition: TopicPartition) -> bool:
        info = self._metadata.cluster.topics.get(partition.topic)
        if info is None:
            return False
        topic_id, count = self._first.setdefault(partition.topic, (info.topic_id, len(info.partitions)))
        return topic_id != info.topic_id or partition.partition >= count or self._metadata.is_new(partition.topic)

    # -- steps of it --

    def _check(self) -> None:
        if self._loss is not None or self._subscribed is None:
            raise _Interrupted

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Ends with _Interrupted if the member is lost meanwhile, or is to leave."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._check()
                waking = asyncio.ensure_future(self._waker.sleep(None))
                try:
                    await asyncio.wait([task, waking], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
            return task.result()
        finally:
            if task.done() and not task.cancelled():
                task.exception()  # told by `result`, or of no interest to who was cancelled
            task.cancel()

    async def _asked(self, api: Api[Request, Answer], request: Request, timeout_s: float) -> Answer:
        """The coordinator's answer, whichever broker that is, for as long as it takes."""
        while True:
            try:
                answered = await self._interruptible(
                    self._coordinators.request(
                        self._group, api, request, code_of=lambda response: response.error_code, timeout_s=timeout_s
                    )
                )
            except (NetworkError, InvalidMessage) as error:
                self.trouble = str(error)
            except BrokerError as error:
                if not error.retriable:
                    self._lost(Reaction.RAISE, error)
                    raise _Interrupted from error
                self.trouble = str(error)
            else:
                self.trouble = None
                if answered.last_error is not None:
                    self.setback = _Setback(self._clock.monotonic(), answered.last_error)
                return answered.response

    async def _failed(self, code: ErrorCode, doing: str, why: str | None = None) -> None:
        """The coordinator refuses a step. Raises _Interrupted, and the walk begins anew."""
        logger.info("%s: %s: %s", self._who, doing, code.name)
        what = reaction(code)
        if what in (Reaction.RAISE, Reaction.FENCED):
            said = f"{doing} group {self._group}"
            self._lost(what, BrokerError(code, f"{said}: {why}" if why else said, is_complete=bool(why)))
            raise _Interrupted
        if what is Reaction.REJOIN:
            self._rejoin(f"the coordinator says {code.name}")
        else:
            self._lost(what, None)
        self._failures += 1
        await asyncio.sleep(
            exponential_backoff_s(self._failures, self._runtime.retry_backoff_s, self._runtime.world.random)
        )
        raise _Interrupted

    async def _lose(self, what: Reaction, error: MinibrokerError | None) -> None:
        """The group goes on without this member."""
        self._heart.beat(None)
        if self.state is not MemberState.UNJOINED:
            self._unjoined(keeps_id=what is Reaction.LOSE)
        lost = sorted(self._fetcher.states)
        await self._give_up(lost, is_lost=True)
        self._loss = None
        self._rejoin("it has lost its membership")
        if error is not None:
            self._errors.append(error)
            self._told_of, self.lost = error, lost
        self._fetcher.pulse.notify()
        self._settled.notify()
        if what is Reaction.FENCED:
            self._is_parked = True
            self.fenced = error
        elif what is Reaction.RAISE:  # again only if the user, who is told, goes on
            self._is_parked = True
            self._activity.on_ask = self._go_on

    def _go_on(self) -> None:
        """The user asks for records again."""
        if not self._errors:
            self._is_parked = False
            self._activity.on_ask = None
            self._waker.wake()

    async def _give_up(self, partitions: Sequence[TopicPartition], is_lost: bool) -> None:
        """When the user holds no records: commit, tell the listener, and let go of these partitions."""
        if not partitions:
            return
        self._activity.is_quiet = True
        self._fetcher.cut()
        while self._activity.holds:
            if not is_lost:
                self._check()
            await self._activity.freed.wait()
        self.stirred.notify()
        if not is_lost:
            self._is_giving_up = True
            self._settled.notify()
            patience_s = min(self._patience_s, self._rebalance_timeout_s / 4)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self._commits.drained()
                if self._auto_commit is not None:
                    await self._auto_commit(patience_s)
                await self._tell("on_partitions_revoked", sorted(partitions))
            finally:
                self._is_giving_up = False
        else:
            await self._tell("on_partitions_lost", sorted(partitions))
            self._note_uncommitted(partitions)
        for topic in sorted({partition.topic for partition in partitions} - self._metadata.cluster.existing().keys()):
            self._fetcher.tell_of_gone(f"topic {topic}")
        self._fetcher.remove(partitions)
        if not is_lost and self._fetcher.states:
            self._activity.is_quiet = False
            self._fetcher.pulse.notify()

    def _note_uncommitted(self, lost: Iterable[TopicPartition]) -> None:
        error = None if self._loss is None else self._loss[1]
        if self._subscribed is not None:
            why = error or MinibrokerError("the group went on without this member")
            states = self._fetcher.states
            self._uncommitted |= {p: why for p in lost if p in states and states[p].has_uncommitted}

    def _raised(self, error: Exception) -> None:
        self._errors.append(error)
        self.raised_by_listener = error

    async def _tell(self, method: str, partitions: list[TopicPartition]) -> None:
        """What the listener raises is for the user."""
        call = self.listener_call = _ListenerCall(self, method, self._clock.monotonic())
        self.stirred.notify()
        token = _listener_call.set(call)  # what it starts by `create_task` or `wait_for` inherits that
        try:
            async with asyncio.timeout(self._rebalance_timeout_s) as limit:
                await getattr(self._listener, method)(partitions)
        except TimeoutError as error:
            if limit.expired():  # else it is the listener's own
                timed_out = ListenerTimedOut(method, round(self._rebalance_timeout_s * 1_000))
                timed_out.__cause__ = error.__cause__  # where it was
                logger.warning("%s: %s", self._who, timed_out)
                self._raised(timed_out)
            else:
                self._raised(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the user's
            self._raised(error)
        finally:
            call.is_over = True
            self.listener_call = None
            _listener_call.reset(token)


def begin_at_committed(
    fetcher: Fetcher, states: Iterable[PartitionState], committed: Mapping[TopicPartition, OffsetAndMetadata]
) -> None:
    """Set positions, where nobody has set them yet."""
    for state in states:
        offset = committed.get(state.partition)
        if offset is not None and state.position is None and state.generation == 0:
            epoch = NO_EPOCH if offset.leader_epoch is None else offset.leader_epoch
            fetcher.move(state, offset.offset, epoch=epoch)
        state.awaits_committed = False
    fetcher.wake()

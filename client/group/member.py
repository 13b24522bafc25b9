"""A consumer's membership in its group: the task that joins, takes over its assignment, and gives it up again (Kafka's
AbstractCoordinator and ConsumerCoordinator).

The problem: a rebalance takes partitions from a member while its user may be processing a record. If the rebalance ran
beside the user, two members would work on one partition at the same time, and the user's commit would come too late.

The choice: partitions are taken away only while the user holds no records (see `in_hand`): it waits for the next
ones, or has not asked for any yet. A rebalance happens in the loop over the consumer, as in Kafka's `poll`. The member
waits for that moment by itself, so the user need not call anything, and its heartbeats continue while records are
processed (see `heart`). Other members wait for it, at most `max_poll_interval_ms`. Steps that take nothing away do not
wait for the user: the first join, and all steps of the cooperative protocol but the revocation.

The walk of a rebalance, M1 to M9, is in ARCHITECTURE.md; the labels are in the code. `states` has the states and legal
moves, `standing` applies them.

Rejected: rebalances in a task that does not wait for the user (aiokafka); callbacks that the user must keep short
(Kafka's, which run in `poll` as here, but without a limit).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.retries import exponential_backoff_s
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import MaxPollIntervalExceeded
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.group.assignors import RebalanceProtocol, Subscription
from minibroker.client.group.commits import Commits
from minibroker.client.group.group_settings import GroupSettings
from minibroker.client.group.heart import Heard, Heart, Membership, News, Overslept, Refused, Unreachable, leave
from minibroker.client.group.listener import ListenerCalls, RebalanceListener
from minibroker.client.group.standing import Setback, Standing
from minibroker.client.group.starting_points import begin_at_committed
from minibroker.client.group.states import MemberState, Reaction, reaction
from minibroker.client.group.subscription import Subscribed, TopicWatch
from minibroker.client.log import Logger
from minibroker.client.tasks import Waker
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
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

logger = Logger("minibroker.client")

T = TypeVar("T")
Request = TypeVar("Request", bound=m.Message)
Answer = TypeVar("Answer", g.JoinGroupResponse, g.SyncGroupResponse)

JOIN_EXTRA_S = 5.0
"""Seconds beyond the rebalance timeout that an answer to JoinGroup or SyncGroup may take, as in Kafka."""
REQUEST_PATIENCE_S = 10.0
"""Seconds without success after which a step of a rebalance begins again, and `status` reports why."""

S = MemberState


class _Interrupted(Exception):
    """The member is lost or has unsubscribed, so the step under way is abandoned."""


class GroupMember:
    """See the module. The consumer owns the member. The member must not refer to the consumer: a consumer that is
    dropped without `close` could not be garbage-collected."""

    def __init__(
        self,
        runtime: ClientRuntime,
        partitions: FetchedPartitions,
        in_hand: InHand,
        coordinators: Coordinators,
        commits: Commits,
        settings: GroupSettings,
        auto_commit: Callable[[float], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self.group = settings.group
        self._runtime = runtime
        self._clock = runtime.clock
        self._metadata = runtime.metadata
        self._partitions = partitions
        self._in_hand = in_hand
        self._coordinators = coordinators
        self._commits = commits
        self._instance_id = settings.group_instance_id
        self._assignors = {assignor.name: assignor for assignor in settings.assignors}
        self._is_cooperative = all(a.protocol is RebalanceProtocol.COOPERATIVE for a in settings.assignors)
        """A member uses a protocol only if all its assignors support it, as in Kafka."""
        self._session_timeout_ms = round(settings.session_timeout_s * 1_000)
        self._rebalance_timeout_s = settings.max_poll_interval_s
        self._patience_s = min(REQUEST_PATIENCE_S, settings.api_timeout_s / 3)
        """Limit for each step of leaving: `unsubscribe` waits for three of them."""
        self._auto_commit = auto_commit
        self._heart = Heart(
            runtime,
            in_hand,
            self._hear,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            max_poll_interval_s=settings.max_poll_interval_s,
        )
        self._waker = Waker()
        self._errors = partitions.errors
        self.standing = Standing(
            runtime, partitions, in_hand, self._waker, settings, is_cooperative=self._is_cooperative
        )
        self.listener_calls = ListenerCalls(
            runtime.clock, self.standing.who, self._rebalance_timeout_s, partitions.errors, self.standing.stirred
        )
        self.subscribed: Subscribed | None = None
        self._topics = TopicWatch(runtime.metadata)
        self._failures = 0
        """Steps that the coordinator has refused since the last assignment."""
        self._metadata.listeners.append(self._waker.wake)

    # -- the consumer's calls --

    def listen(self, listener: RebalanceListener | None) -> None:
        """Call this listener from now on; None keeps the present one."""
        if listener is not None:
            self.listener_calls.listener = listener

    def subscribe(self, subscribed: Subscribed | None) -> None:
        """Join for these topics; None: leave."""
        standing = self.standing
        self.subscribed = subscribed
        if subscribed is not None:
            for partition, state in self._partitions.states.items():
                if not subscribed.includes(partition.topic):  # held until it is revoked, or subscribed to again (M8)
                    state.is_held = True
            self._partitions.cut()
        else:
            standing.forget_uncommitted()  # the user gives up its positions, lost or not
        standing.why_rejoin = "the subscription has changed"
        if standing.state in (S.REFUSED, S.FENCED):
            standing.move(S.UNJOINED)
        self._waker.wake()

    @property
    def coordinator(self) -> str | None:
        """The group's coordinator, if it is known."""
        known = self._coordinators.known(self.group)
        return None if known is None else f"broker {known.node_id} at {known.address}"

    @property
    def obstacle(self) -> str | None:
        """Why the step under way makes no progress, as far as this member can tell."""
        found = self._coordinators.obstacle(self.group)
        return self.standing.trouble if found is None else str(found)

    async def run(self) -> None:
        """The member's task. Runs until it is cancelled."""
        standing = self.standing
        while True:
            if standing.state is S.LOST:
                await self._drop_what_is_lost()
            elif self.subscribed is None and standing.state.is_in_group:
                await self._leave()
            elif standing.state not in (S.REFUSED, S.FENCED) and (why := self._why_rebalance()) is not None:
                standing.why_rejoin = why
                try:
                    await self._rebalance(why)
                except _Interrupted:
                    continue
                except InvalidMessage as error:  # the coordinator, or the group's leader, violates the protocol
                    standing.lose(Reaction.RAISE, error)
            else:
                await self._waker.sleep(None)

    async def beat(self) -> None:
        """The heart's task."""
        await self._heart.run(self._runtime.world)

    async def left(self) -> None:
        """Return once the member is in no group, after `subscribe(None)`."""
        while self.standing.state.is_in_group:
            await self.standing.settled.wait()

    def go_on(self) -> None:
        """Begin an interrupted rebalance again: the event loop has cancelled `run`, which is started anew."""
        if self.standing.state.phase in ("preparing rebalance", "completing rebalance"):
            self.standing.rejoin("its task was cancelled during a rebalance")

    def not_left(self) -> str:
        """The consequence for the group if this member does not leave."""
        waits = f"it waits for session_timeout_ms={self._session_timeout_ms} before it goes on"
        return f"group {self.group} was not left: {waits}"

    async def _leave(self) -> None:
        standing = self.standing
        standing.move(S.LEAVING)
        await self._give_up(list(self._partitions.states))
        if standing.state is S.LOST:
            return
        membership = Membership(self.group, standing.generation_id, standing.member_id, self._instance_id)
        stays = "leaves" if self._instance_id is None else "ends; its place is kept for it until the session is over"
        logger.info("%s: %s", standing.who, stays)
        self._heart.beat(None)
        self._in_hand.is_quiet = False
        await leave(self._coordinators, membership, "it has unsubscribed, or is being closed", self._patience_s)
        standing.left_generation(keeps_id=False)
        self._topics.leads_no_more()
        if standing.state is S.LEAVING:
            standing.move(S.UNJOINED)

    def _hear(self, news: News) -> None:
        """Process the heart's news."""
        standing = self.standing
        match news:
            case Heard():
                standing.trouble = None if standing.state is S.STABLE else standing.trouble
            case Unreachable(reason):
                standing.trouble = reason
                standing.stirred.notify()
            case Refused(membership, code):
                standing.refused(membership, code)
            case Overslept(membership, silent_s) if membership == standing.membership():
                # Join again only when the user is back. Otherwise the group would remove the member again and again.
                standing.lose(Reaction.RAISE, MaxPollIntervalExceeded(silent_s, self._rebalance_timeout_s))

    def _why_rebalance(self) -> str | None:
        if self.subscribed is None:
            return None
        if self.standing.why_rejoin is not None or self.standing.state is not S.STABLE:
            return self.standing.why_rejoin
        return self._topics.why_rebalance(self.subscribed)

    # -- the walk of a rebalance --

    async def _rebalance(self, why: str) -> None:
        """M1: a rebalance begins: a heartbeat's answer, the subscription, metadata or a loss requires it."""
        standing = self.standing
        assert self.subscribed is not None
        logger.info("%s: joins: %s", standing.who, why)
        standing.move(S.PREPARING)
        # M2: revoke all partitions (eager), or those of topics that are no longer subscribed to (cooperative).
        owned = sorted(self._partitions.states)
        generation_id = standing.generation_id
        self._check()
        topics: list[str] | None = None
        while topics != (now := self.subscribed.names(self._metadata.cluster.topics)):  # it may change during the wait
            topics = now
            self._topics.joins_for(topics)
            gone = [p for p in sorted(self._partitions.states) if not self._is_cooperative or p.topic not in topics]
            await self._give_up(gone)
            self._check()
        joined = await self._join(topics, owned, generation_id)
        standing.joined(joined.member_id, joined.generation_id)
        self._check()
        # M4: heartbeats name the new generation from here on, however long the other steps take.
        self._heart.beat(standing.membership())
        assigned = await self._sync(joined)
        self._check()
        await self._take_over(assigned)

    async def _join(
        self, topics: Sequence[str], owned: Sequence[TopicPartition], generation_id: int
    ) -> g.JoinGroupResponse:
        """M3: ask to be in the next generation. The answer arrives when all members have asked, or were removed."""
        standing = self.standing
        self._heart.beat(None)
        standing.why_rejoin = None  # news from here on, such as another subscription, requires another rebalance
        standing.move(S.JOINING)
        while True:
            kept = [partition for partition in owned if partition in self._partitions.states]
            request = g.JoinGroupRequest(
                self.group,
                self._session_timeout_ms,
                round(self._rebalance_timeout_s * 1_000),
                standing.member_id,
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
            response = await self._asked(JOIN_GROUP, request)
            code = error_of(response.error_code)
            if code is ErrorCode.NONE:
                return response
            if code is ErrorCode.MEMBER_ID_REQUIRED:  # KIP-394: a client that vanishes now leaves no member behind
                standing.member_id = response.member_id
                continue
            await self._failed(code, "joining", response.error_message)

    async def _sync(self, joined: g.JoinGroupResponse) -> list[TopicPartition]:
        """M5: the leader assigns the partitions. All members get their part with SyncGroup."""
        assignments: list[g.SyncGroupAssignment] = []
        self._topics.leads_no_more()
        if joined.leader == joined.member_id:
            assignments = await self._assign(joined)
        request = g.SyncGroupRequest(
            self.group,
            joined.generation_id,
            joined.member_id,
            self._instance_id,
            joined.protocol_type,
            joined.protocol_name,
            assignments,
        )
        response = await self._asked(SYNC_GROUP, request)
        code = error_of(response.error_code)
        if code is not ErrorCode.NONE:
            await self._failed(code, "waiting for an assignment")
        self._failures = 0
        self.standing.trouble = None
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
        counts = self._topics.leads(topics)
        assignor = self._assignors[joined.protocol_name or ""]
        if joined.skip_assignment:
            return []
        try:
            decided = assignor.assign(members, counts)
        except Exception as error:
            self.standing.lose(Reaction.RAISE)
            self._errors.append(error)
            raise _Interrupted from error
        logger.info(
            "%s: assigns generation %d by %s: %s",
            self.standing.who,
            joined.generation_id,
            assignor.name,
            ", ".join(f"{member_id} {len(mine)}" for member_id, mine in decided.items()),
        )
        return [
            g.SyncGroupAssignment(member_id, encode_assignment(ConsumerProtocolAssignment(mine)))
            for member_id, mine in decided.items()
        ]

    async def _take_over(self, assigned: list[TopicPartition]) -> None:
        """M6 to M9: read what was assigned."""
        standing = self.standing
        standing.move(S.RECONCILING)
        # M6: cooperative: revoke the partitions that move to other members, which get them in another rebalance.
        gone = sorted(set(self._partitions.states) - set(assigned))
        if gone:
            await self._give_up(gone)
            self._check()
            standing.why_rejoin = f"{counted(len(gone), 'partition')} given up, for others"
        # M7: new partitions begin at the group's committed offsets.
        added = [partition for partition in assigned if partition not in self._partitions.states]
        if added:
            await self._begin_at_committed(added)
        standing.forget_uncommitted()  # from here on, a commit is about this assignment
        # M8: the listener is called; then the user gets records.
        await self.listener_calls.call("on_partitions_assigned", added)
        self._check()
        subscribed = self.subscribed  # it may have changed since the member joined
        assert subscribed is not None
        self._partitions.release(state for p, state in self._partitions.states.items() if subscribed.includes(p.topic))
        # M9: records of all partitions are handed out again.
        standing.move(S.STABLE)
        self._in_hand.is_quiet = False
        self._partitions.pulse.notify()
        logger.info(
            "%s: generation %d as %s, with %d partitions, %d of them new",
            standing.who,
            standing.generation_id,
            standing.member_id,
            len(assigned),
            len(added),
        )

    async def _begin_at_committed(self, added: list[TopicPartition]) -> None:
        standing = self.standing
        while True:
            try:
                committed = await self._interruptible(self._commits.fetch(added, REQUEST_PATIENCE_S))
                break
            except (NetworkError, InvalidMessage, BrokerError) as error:
                standing.trouble = str(error)
                logger.info("%s: reading committed offsets: %s", standing.who, error)
                if isinstance(error, BrokerError) and not error.retriable:
                    standing.lose(Reaction.RAISE, error)
                    raise _Interrupted from error
        standing.trouble = None
        states = self._partitions.add_held(added)
        begin_at_committed(self._partitions, states, committed)
        if self._partitions.reset is None:
            return
        for state in states:
            is_of_older_topic = state.partition in committed and committed[state.partition].is_of_older_topic
            if state.position is None and (is_of_older_topic or self._topics.is_new(state.partition)):
                self._partitions.move(state, None, m.EARLIEST_TIMESTAMP)  # none of its records was there before

    # -- requests to the coordinator --

    def _check(self) -> None:
        state = self.standing.state
        if state is S.LOST or (self.subscribed is None and state is not S.LEAVING):
            raise _Interrupted

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises _Interrupted if the member is lost or unsubscribes before `work` is done."""
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
                task.exception()  # mark it as retrieved, also if this coroutine was cancelled
            task.cancel()

    async def _asked(self, api: Api[Request, Answer], request: Request) -> Answer:
        """Return the coordinator's answer. Retries until there is one, whichever broker coordinates the group."""
        standing = self.standing
        while True:
            try:
                answered = await self._interruptible(
                    self._coordinators.request(
                        self.group,
                        api,
                        request,
                        code_of=lambda response: response.error_code,
                        timeout_s=self._rebalance_timeout_s + JOIN_EXTRA_S,
                    )
                )
            except (NetworkError, InvalidMessage) as error:
                standing.trouble = str(error)
            except BrokerError as error:
                if not error.retriable:
                    standing.lose(Reaction.RAISE, error)
                    raise _Interrupted from error
                standing.trouble = str(error)
            else:
                standing.trouble = None
                if answered.last_error is not None:
                    standing.setback = Setback(self._clock.monotonic(), answered.last_error)
                return answered.response

    async def _failed(self, code: ErrorCode, doing: str, why: str | None = None) -> None:
        """React to a refused step. Raises _Interrupted, so that the walk begins again."""
        standing = self.standing
        logger.info("%s: %s: %s", standing.who, doing, code.name)
        what = reaction(code)
        if what in (Reaction.RAISE, Reaction.FENCED):
            said = f"{doing} group {self.group}"
            standing.lose(what, BrokerError(code, f"{said}: {why}" if why else said, is_complete=bool(why)))
            raise _Interrupted
        if what is Reaction.REJOIN:
            standing.rejoin(f"the coordinator says {code.name}")
        else:
            standing.lose(what)
        self._failures += 1
        await asyncio.sleep(
            exponential_backoff_s(self._failures, self._runtime.retry_backoff_s, self._runtime.world.random)
        )
        raise _Interrupted

    # -- giving up partitions --

    async def _drop_what_is_lost(self) -> None:
        """The group goes on without this member."""
        standing = self.standing
        self._heart.beat(None)
        standing.begin_loss()
        self._topics.leads_no_more()
        lost = sorted(self._partitions.states)
        if lost:
            while self._in_hand.holds:
                await self._in_hand.freed.wait()
            standing.stirred.notify()
            await self.listener_calls.call("on_partitions_lost", lost)
            if self.subscribed is not None:
                standing.note_uncommitted(lost)
            self._remove(lost)
        if standing.end_loss(lost) is S.REFUSED:
            self._in_hand.on_ask = self._go_on
        self._partitions.pulse.notify()

    def _go_on(self) -> None:
        """The user asks for records again."""
        if not self._errors:
            self._in_hand.on_ask = None
            if self.standing.state is S.REFUSED:
                self.standing.move(S.UNJOINED)
                self._waker.wake()

    async def _give_up(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait until the user holds no records; then commit, call the listener, and drop these partitions. Raises
        _Interrupted if the member is lost, or unsubscribes, during the wait."""
        if not partitions:
            return
        standing, before = self.standing, self.standing.state
        self._in_hand.is_quiet = True
        self._partitions.cut()
        while self._in_hand.holds:
            self._check()
            await self._in_hand.freed.wait()
            self._check()  # a member may be lost in the moment in which its user asks for more
        if before in _REVOKING:
            standing.move(_REVOKING[before])
        standing.stirred.notify()
        patience_s = min(self._patience_s, self._rebalance_timeout_s / 4)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._commits.drained()
            if self._auto_commit is not None:
                await self._auto_commit(patience_s)
            await self.listener_calls.call("on_partitions_revoked", sorted(partitions))
        finally:
            if standing.state is _REVOKING.get(before):
                standing.move(before)
        self._remove(partitions)
        if self._partitions.states:
            self._in_hand.is_quiet = False
            self._partitions.pulse.notify()

    def _remove(self, partitions: Sequence[TopicPartition]) -> None:
        for topic in sorted({partition.topic for partition in partitions} - self._metadata.cluster.existing().keys()):
            self._partitions.warn_of_gone(f"topic {topic}")
        self._partitions.remove(partitions)


_REVOKING = {S.PREPARING: S.REVOKING, S.RECONCILING: S.REVOKING_ASSIGNED}

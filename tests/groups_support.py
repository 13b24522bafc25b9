"""Groups on one broker's replica manager, on virtual time. Tests call the coordinator as handlers do.

The broker leads the only partition of `__consumer_offsets`; it has no followers unless a test adds some.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.groups.group import Group
from minibroker.broker.network.request_channel import Session
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    UpdateMetadataBroker,
    UpdateMetadataEndpoint,
    UpdateMetadataPartition,
    UpdateMetadataRequest,
    UpdateMetadataTopic,
)
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.messages.transactions import (
    TransactionMarker,
    TransactionTopic,
    TxnOffsetCommitPartition,
    TxnOffsetCommitRequest,
    TxnOffsetCommitTopic,
)
from minibroker.protocol.model import DEFAULT_LISTENER, OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.topic_ids import make
from tests.replication_support import ME, ORDERS, OneBroker, state, with_one_broker
from tests.waiting import until

OFFSETS = TopicPartition(OFFSETS_TOPIC, 0)
OFFSETS_ID = make(1, 1, b"offset")
ORDERS_ID = make(1, 2, b"orders")
GROUP = "billing"
RANGE: tuple[tuple[str, bytes], ...] = (("range", b"subscription"),)

Scenario = Callable[["CoordinatedGroups"], Awaitable[None]]


class CoordinatedGroups:
    def __init__(self, broker: OneBroker) -> None:
        self.broker = broker
        self.questions: list[tuple[TopicPartition, str, bool]] = []
        """The questions to coordinators of transactions: about which partition, id, and whether it should be added."""
        self.answer: Callable[[], Awaitable[ErrorCode]] = _yes
        """The answer to them."""
        self.groups = GroupCoordination(
            broker.world, broker.config, broker.metadata, broker.replicas, broker.supervisor.start, self._verify
        )

    async def _verify(
        self,
        topic_partition: TopicPartition,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        adds: bool,
    ) -> ErrorCode:
        self.questions.append((topic_partition, transactional_id, adds))
        return await self.answer()

    # -- the controller --

    def announce(
        self,
        topics: Mapping[str, str],
        *,
        deleted: Mapping[str, str] | None = None,
        epoch: int = 1,
        last: bool = True,
        partitions: int = 1,
    ) -> None:
        """Announce topics, as ids by name, like the handler of UpdateMetadata."""
        parts = [UpdateMetadataPartition(index, epoch, ME, 0, [ME], 0, [ME], []) for index in range(partitions)]
        states = [
            UpdateMetadataTopic(name, topic_id, parts, False, partitions) for name, topic_id in topics.items()
        ] + [UpdateMetadataTopic(name, topic_id, [], True, 0) for name, topic_id in (deleted or {}).items()]
        metadata = self.broker.metadata
        before = {one.topic_name: metadata.topic_id(one.topic_name) for one in states}
        brokers = [
            UpdateMetadataBroker(b, [UpdateMetadataEndpoint(9092, f"broker-{b}", DEFAULT_LISTENER)], None, 1)
            for b in (1, 2, 3)
        ]
        metadata.update(UpdateMetadataRequest(1, epoch, self.broker.broker_epoch, states, brokers, names_the_last=last))
        gone = frozenset(i for name, i in before.items() if i is not None and i != metadata.topic_id(name))
        gone |= frozenset((deleted or {}).values())
        self.groups.removal.topics_gone(gone)

    async def lead(self, epoch: int = 0, isr: tuple[int, ...] = (ME,), *, wait: bool = True) -> None:
        replicas = (1, 2, 3) if len(isr) > 1 else isr
        told = state(epoch=epoch, isr=isr, replicas=replicas)
        assert await self.broker.told(told, topic=OFFSETS_TOPIC, topic_id=OFFSETS_ID) == []
        if wait:
            await until(lambda: self.groups.terms.loaded())

    async def follow(self, epoch: int) -> None:
        told = state(leader=2, epoch=epoch, isr=(ME, 2), replicas=(ME, 2))
        assert await self.broker.told(told, topic=OFFSETS_TOPIC, topic_id=OFFSETS_ID) == []

    def replicate(self, *followers: int) -> None:
        """Let followers fetch from the end of the log, which confirms all records."""
        partition = self.broker.partition(OFFSETS)
        end = partition.log.log_end_offset
        for follower in followers:
            fetched = self.broker.fetch_from(OFFSETS, OFFSETS_ID, end, follower)
            assert fetched.error_code == ErrorCode.NONE, fetched

    # -- members --

    def group(self, group_id: str = GROUP) -> Group:
        (term,) = self.groups.terms.loaded()
        return term.groups[group_id]

    def join(
        self,
        member_id: str = "",
        *,
        group_id: str = GROUP,
        instance: str | None = None,
        protocols: Sequence[tuple[str, bytes]] = RANGE,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 20_000,
        protocol_type: str = "consumer",
        is_gone: Callable[[], bool] = lambda: False,
        connection: Session | None = None,
        requires_known_member_id: bool = True,
    ) -> asyncio.Future[g.JoinGroupResponse]:
        answer: asyncio.Future[g.JoinGroupResponse] = asyncio.get_running_loop().create_future()
        body = g.JoinGroupRequest(
            group_id,
            session_timeout_ms,
            rebalance_timeout_ms,
            member_id,
            instance,
            protocol_type,
            [g.JoinGroupProtocol(name, metadata) for name, metadata in protocols],
            requires_known_member_id=requires_known_member_id,
        )
        self.groups.members.join(body, "client", "host", answer.set_result, is_gone, connection)
        assert not body.protocols or answer.done()  # a request that waits does not keep them
        return answer

    def join_new(
        self,
        *,
        group_id: str = GROUP,
        protocols: Sequence[tuple[str, bytes]] = RANGE,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 20_000,
    ) -> tuple[str, asyncio.Future[g.JoinGroupResponse]]:
        """Join as a new member: request a member id, then join with it."""
        join = functools.partial(
            self.join,
            group_id=group_id,
            protocols=protocols,
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=rebalance_timeout_ms,
        )
        first = join().result()
        assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
        return first.member_id, join(first.member_id)

    def sync(
        self,
        member_id: str,
        generation_id: int,
        assignments: Mapping[str, bytes] | None = None,
        *,
        group_id: str = GROUP,
        instance: str | None = None,
        protocol_name: str | None = None,
        protocol_type: str | None = None,
    ) -> asyncio.Future[g.SyncGroupResponse]:
        answer: asyncio.Future[g.SyncGroupResponse] = asyncio.get_running_loop().create_future()
        given = [g.SyncGroupAssignment(one, assignment) for one, assignment in (assignments or {}).items()]
        body = g.SyncGroupRequest(group_id, generation_id, member_id, instance, protocol_type, protocol_name, given)
        self.groups.members.sync(body, answer.set_result)
        return answer

    def heartbeat(
        self, member_id: str, generation_id: int, *, group_id: str = GROUP, instance: str | None = None
    ) -> ErrorCode:
        return self.groups.members.heartbeat(g.HeartbeatRequest(group_id, generation_id, member_id, instance))

    def leave(self, *member_ids: str, group_id: str = GROUP, instances: Sequence[str] = ()) -> list[int]:
        members = [g.LeavingMember(member_id, None) for member_id in member_ids]
        members += [g.LeavingMember("", name) for name in instances]
        answer = self.groups.members.leave(g.LeaveGroupRequest(group_id, members))
        return [answer.error_code] if answer.error_code else [member.error_code for member in answer.members]

    async def stable(self, count: int = 1, *, group_id: str = GROUP, session_timeout_ms: int = 10_000) -> list[str]:
        """Form a stable group in which each member is assigned its own id. Returns the member ids, the leader first."""
        joins = [self.join_new(group_id=group_id, session_timeout_ms=session_timeout_ms) for _ in range(count)]
        answers = [await answer for _, answer in joins]
        members = [answer.member_id for answer in answers]
        leader = next(a for a in answers if a.leader == a.member_id)
        given = {member.member_id: member.member_id.encode() for member in leader.members}
        syncs = [
            self.sync(member, leader.generation_id, given if member == leader.member_id else None, group_id=group_id)
            for member in members
        ]
        for member, sync in zip(members, syncs, strict=True):
            assert bytes((await sync).assignment) == member.encode()
        return sorted(members, key=lambda member: member != leader.member_id)

    def commit(
        self,
        offset: int,
        *,
        group_id: str = GROUP,
        member_id: str = "",
        generation_id: int = -1,
        instance: str | None = None,
        partition: TopicPartition = ORDERS,
        topic_id: str = "",
        metadata: str | None = None,
        attempt: Attempt | None = None,
    ) -> asyncio.Future[int]:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        topic = g.OffsetCommitTopic(
            partition.topic, [g.OffsetCommitPartition(partition.partition, offset, -1, metadata)], topic_id
        )
        body = g.OffsetCommitRequest(group_id, generation_id, member_id, instance, [topic], attempt)
        self.groups.commits.commit(body, lambda topics: answer.set_result(topics[0].partitions[0].error_code))
        return answer

    def commit_in_transaction(
        self,
        offset: int,
        *,
        producer_id: int = 7,
        producer_epoch: int = 0,
        group_id: str = GROUP,
        member_id: str = "",
        generation_id: int = -1,
        instance: str | None = None,
        partition: TopicPartition = ORDERS,
        topic_id: str = "",
        metadata: str | None = None,
        attempt: Attempt | None = None,
    ) -> asyncio.Task[int]:
        asked = TxnOffsetCommitPartition(partition.partition, offset, -1, metadata)
        body = TxnOffsetCommitRequest(
            "transfers",
            group_id,
            producer_id,
            producer_epoch,
            [TxnOffsetCommitTopic(partition.topic, [asked], topic_id)],
            generation_id,
            member_id,
            instance,
            attempt=attempt,
        )

        async def commit() -> int:
            topics = await self.groups.transactional_commits.commit(body)
            return topics[0].partitions[0].error_code

        return asyncio.ensure_future(commit())

    def end_transaction(self, *, committed: bool, producer_id: int = 7, epoch: int = 1) -> None:
        """Append the marker, as the transaction's coordinator asks the leader to."""
        topics = [TransactionTopic(OFFSETS_TOPIC, [OFFSETS.partition])]
        marker = TransactionMarker(producer_id, epoch, committed, 1, topics)
        self.broker.replicas.appender.write_markers(marker, timeout_ms=1_000, respond=lambda _: None)

    def fetch(
        self, partition: TopicPartition | None = ORDERS, *, group_id: str = GROUP, require_stable: bool = False
    ) -> asyncio.Future[g.OffsetFetchGroupResponse]:
        """Fetch the offset of a partition; None: all offsets."""
        answer: asyncio.Future[g.OffsetFetchGroupResponse] = asyncio.get_running_loop().create_future()
        wanted = None if partition is None else [g.OffsetFetchTopic(partition.topic, [partition.partition])]
        body = g.OffsetFetchRequest([g.OffsetFetchGroup(group_id, wanted)], require_stable)
        self.groups.commits.fetch(body, lambda _, steps: answer.set_result(finish_at_once(steps).groups[0]))
        return answer

    async def stable_offset(self, partition: TopicPartition = ORDERS, *, group_id: str = GROUP) -> int | ErrorCode:
        """Return the offset or the error of a fetch that requires a stable offset."""
        fetched = await self.fetch(partition, group_id=group_id, require_stable=True)
        assert fetched.error_code == ErrorCode.NONE, ErrorCode(fetched.error_code).name
        found = fetched.topics[0].partitions[0]
        return ErrorCode(found.error_code) if found.error_code else found.committed_offset

    async def committed(self, partition: TopicPartition = ORDERS, *, group_id: str = GROUP) -> int:
        fetched = await self.fetch(partition, group_id=group_id)
        assert fetched.error_code == ErrorCode.NONE, ErrorCode(fetched.error_code).name
        return fetched.topics[0].partitions[0].committed_offset


async def _yes() -> ErrorCode:
    return ErrorCode.NONE


def with_groups(
    tmp_path: Path, scenario: Scenario, settings: Mapping[str, str] | None = None, *, lead: bool = True
) -> None:
    """Run the scenario with a coordinator that knows the topic `orders`; with `lead`, it has loaded its groups."""

    async def program(broker: OneBroker) -> None:
        coordinated = CoordinatedGroups(broker)
        coordinated.groups.start()
        coordinated.announce({OFFSETS_TOPIC: OFFSETS_ID, "orders": ORDERS_ID})
        if lead:
            await coordinated.lead()
        try:
            await scenario(coordinated)
        finally:
            coordinated.groups.close()

    with_one_broker(tmp_path, program, {"group.initial.rebalance.delay.ms": "50"} | dict(settings or {}))

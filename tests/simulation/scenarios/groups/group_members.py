"""Group members that send the protocol's requests over their own connections, without minibroker's client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import Message
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)

RETRY_S = 0.05
NOT_NOW = frozenset(
    {ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR}
)


class GroupClient:
    """Sends requests about one group from one host: to `broker_id` if the method has that parameter, otherwise to the
    coordinator."""

    def __init__(self, cluster: VirtualCluster, world: VirtualWorld, group_id: str) -> None:
        self.cluster = cluster
        self.world = world
        self.group_id = group_id
        self._connections: dict[int, Connection] = {}

    async def ask(self, broker_id: int, api: apis.Api[Asked, Answered], body: Asked, timeout_s: float = 10) -> Answered:
        """Raises NetworkError, BrokerError."""
        connection = self._connections.get(broker_id)
        if connection is None or connection.closed:
            connection = self._connections[broker_id] = await open_connection(
                self.world.network, host_name(broker_id), PORT, client_id="client", timeout_s=5
            )
        return await connection.request(api, body, timeout_s=timeout_s)

    async def look_for_coordinator(self, broker_id: int) -> g.Coordinator:
        request = g.FindCoordinatorRequest(0, [self.group_id])
        return (await self.ask(broker_id, apis.FIND_COORDINATOR, request)).coordinators[0]

    async def find_coordinator(self, within_s: float = 30) -> int:
        """Ask all brokers in turn until one names the coordinator; return its broker id. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                for broker_id in self.cluster.broker_ids:
                    try:
                        found = await self.look_for_coordinator(broker_id)
                    except (NetworkError, BrokerError):
                        continue
                    if not found.error_code:
                        return found.node_id
                await asyncio.sleep(RETRY_S)

    async def of_coordinator(self, api: apis.Api[Asked, Answered], body: Asked, within_s: float = 30) -> Answered:
        """Return the coordinator's answer; retry after NOT_NOW errors and lost connections."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    answer = await self.ask(await self.find_coordinator(within_s), api, body)
                except NetworkError:
                    await asyncio.sleep(RETRY_S)
                    continue
                if not NOT_NOW.intersection(codes_of(answer)):
                    return answer
                await asyncio.sleep(RETRY_S)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, int],
        *,
        member_id: str = "",
        generation_id: int = -1,
        group_instance_id: str | None = None,
        topic_id: str = "",
        metadata: str | None = None,
        broker_id: int | None = None,
        within_s: float = 30,
    ) -> list[int]:
        """Commit the offsets; return the error codes in their order."""
        topics: dict[str, list[g.OffsetCommitPartition]] = {}
        for (topic, index), offset in offsets.items():
            topics.setdefault(topic, []).append(g.OffsetCommitPartition(index, offset, -1, metadata))
        body = g.OffsetCommitRequest(
            self.group_id,
            generation_id,
            member_id,
            group_instance_id,
            [g.OffsetCommitTopic(name, parts, topic_id) for name, parts in topics.items()],
        )
        if broker_id is None:
            answer = await self.of_coordinator(apis.OFFSET_COMMIT, body, within_s)
        else:
            answer = await self.ask(broker_id, apis.OFFSET_COMMIT, body)
        return [part.error_code for topic in answer.topics for part in topic.partitions]

    async def fetch_group(
        self, partitions: Sequence[TopicPartition] | None = None, *, broker_id: int | None = None
    ) -> g.OffsetFetchGroupResponse:
        topics: dict[str, list[int]] = {}
        for topic, index in partitions or ():
            topics.setdefault(topic, []).append(index)
        wanted = None if partitions is None else [g.OffsetFetchTopic(name, parts) for name, parts in topics.items()]
        body = g.OffsetFetchRequest([g.OffsetFetchGroup(self.group_id, wanted)])
        if broker_id is None:
            answer = await self.of_coordinator(apis.OFFSET_FETCH, body)
        else:
            answer = await self.ask(broker_id, apis.OFFSET_FETCH, body, timeout_s=30)
        return answer.groups[0]

    async def committed(self, partition: TopicPartition) -> int:
        """Return the committed offset, or -1 without one. Raises AssertionError if the coordinator returns an error."""
        group = await self.fetch_group([partition])
        assert group.error_code == ErrorCode.NONE, ErrorCode(group.error_code).name
        return group.topics[0].partitions[0].committed_offset

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def codes_of(answer: object) -> set[int]:
    """Return all error codes of a response."""
    codes = {code} if isinstance(code := getattr(answer, "error_code", None), int) else set()
    for name in ("topics", "partitions", "groups", "members", "results", "coordinators"):
        for part in getattr(answer, name, ()) or ():
            codes |= codes_of(part)
    return codes


class GroupMember(GroupClient):
    """One member of a group: it joins, gets an assignment and sends heartbeats. As the leader it assigns what `assign`
    returns."""

    def __init__(
        self,
        cluster: VirtualCluster,
        world: VirtualWorld,
        group_id: str,
        *,
        group_instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 20_000,
        protocols: Sequence[tuple[str, bytes]] = (("range", b"topics"),),
    ) -> None:
        super().__init__(cluster, world, group_id)
        self.group_instance_id = group_instance_id
        self.session_timeout_ms = session_timeout_ms
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.protocols = list(protocols)
        self.member_id = ""
        self.generation_id = -1
        self.assignment: bytes | None = None
        self.joined: g.JoinGroupResponse | None = None

    def join_request(self, member_id: str | None = None) -> g.JoinGroupRequest:
        return g.JoinGroupRequest(
            self.group_id,
            self.session_timeout_ms,
            self.rebalance_timeout_ms,
            self.member_id if member_id is None else member_id,
            self.group_instance_id,
            "consumer",
            [g.JoinGroupProtocol(name, metadata) for name, metadata in self.protocols],
        )

    async def join_once(self) -> g.JoinGroupResponse:
        """Send one JoinGroup, use the member id in the answer, and return the answer."""
        answer = await self.ask(await self.find_coordinator(), apis.JOIN_GROUP, self.join_request(), timeout_s=120)
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        elif not answer.error_code:
            self.member_id, self.generation_id, self.joined = answer.member_id, answer.generation_id, answer
        return answer

    async def join(self) -> g.JoinGroupResponse:
        """Send JoinGroup until the member is in a generation or is refused."""
        while True:
            try:
                answer = await self.join_once()
            except NetworkError:
                await asyncio.sleep(RETRY_S)
                continue
            if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                continue
            if answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            elif answer.error_code not in NOT_NOW:
                return answer
            await asyncio.sleep(RETRY_S)

    @property
    def is_leader(self) -> bool:
        return self.joined is not None and self.joined.leader == self.member_id

    def assign(self) -> dict[str, bytes]:
        """Return the leader's assignment: each member gets its own id."""
        assert self.joined is not None
        return {member.member_id: member.member_id.encode() for member in self.joined.members}

    def sync_request(self) -> g.SyncGroupRequest:
        given = self.assign() if self.is_leader else {}
        return g.SyncGroupRequest(
            self.group_id,
            self.generation_id,
            self.member_id,
            self.group_instance_id,
            None,
            None,
            [g.SyncGroupAssignment(member_id, assignment) for member_id, assignment in given.items()],
        )

    async def sync_once(self) -> g.SyncGroupResponse:
        answer = await self.ask(await self.find_coordinator(), apis.SYNC_GROUP, self.sync_request(), timeout_s=120)
        if not answer.error_code:
            self.assignment = bytes(answer.assignment)
        return answer

    async def join_and_sync(self, within_s: float = 60) -> bytes:
        """Join the group and return the assignment. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                joined = await self.join()
                assert joined.error_code == ErrorCode.NONE, ErrorCode(joined.error_code).name
                try:
                    synced = await self.sync_once()
                except NetworkError:
                    continue
                if synced.error_code == ErrorCode.NONE:
                    assert self.assignment is not None
                    return self.assignment
                if synced.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
                    self.member_id = ""

    async def heartbeat(self) -> int:
        body = g.HeartbeatRequest(self.group_id, self.generation_id, self.member_id, self.group_instance_id)
        return (await self.of_coordinator(apis.HEARTBEAT, body)).error_code

    async def leave(self) -> int:
        body = g.LeaveGroupRequest(self.group_id, [g.LeavingMember(self.member_id, self.group_instance_id)])
        answer = await self.of_coordinator(apis.LEAVE_GROUP, body)
        return answer.error_code or answer.members[0].error_code

    async def commit_as_member(self, offsets: Mapping[TopicPartition, int]) -> list[int]:
        return await self.commit(
            offsets,
            member_id=self.member_id,
            generation_id=self.generation_id,
            group_instance_id=self.group_instance_id,
        )

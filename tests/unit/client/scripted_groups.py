"""The group coordinator of a ScriptedCluster: it rebalances groups, and a test can fail any request.

Scenarios on the virtual World test real coordinators, with their logs, timers and moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g

_REQUESTS = (
    g.FindCoordinatorRequest,
    g.JoinGroupRequest,
    g.SyncGroupRequest,
    g.HeartbeatRequest,
    g.LeaveGroupRequest,
    g.OffsetCommitRequest,
    g.OffsetFetchRequest,
)
JOIN_PATIENCE_S = 5.0


def received_by_groups(request: Any) -> bool:
    return isinstance(request, _REQUESTS)


class Stored(NamedTuple):
    offset: int
    leader_epoch: int
    metadata: str | None
    topic_id: str


class Member:
    def __init__(self, request: g.JoinGroupRequest) -> None:
        self.request = request
        self.has_joined = True
        self.assignment = b""


class Group:
    def __init__(self) -> None:
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.leader = ""
        self.is_rebalancing = False
        self.is_assigned = False
        self.changed = asyncio.Event()
        self.offsets: dict[tuple[str, int], Stored] = {}

    def notify(self) -> None:
        self.changed.set()
        self.changed.clear()

    def rebalance(self) -> None:
        if not self.is_rebalancing:
            self.is_rebalancing = True
            self.is_assigned = False
            for member in self.members.values():
                member.has_joined = False
        self.notify()

    def remove(self, member_id: str) -> None:
        if self.members.pop(member_id, None) is not None:
            self.rebalance()


class ScriptedGroups:
    def __init__(self, port: Callable[[int], int]) -> None:
        self._port = port
        """Returns a broker's port, which is known once the broker listens."""
        self.coordinator = 0
        """The broker that coordinates all groups."""
        self.groups: dict[str, Group] = {}
        self._next_member = 0

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group())

    async def answer(self, node_id: int, request: Any, scripted: ErrorCode, is_carried_out: bool) -> m.Message:
        code = scripted
        if not code and node_id != self.coordinator:
            code = ErrorCode.NOT_COORDINATOR
        match request:
            case g.FindCoordinatorRequest():
                at, port = self.coordinator, self._port(self.coordinator)
                coordinators = [g.Coordinator(k, at, "127.0.0.1", port, scripted) for k in request.coordinator_keys]
                return g.FindCoordinatorResponse(0, coordinators)
            case g.JoinGroupRequest():
                return await self._join(request, code)
            case g.SyncGroupRequest():
                return await self._sync(request, code)
            case g.HeartbeatRequest():
                return g.HeartbeatResponse(0, code or self.problem(request, is_heartbeat=True))
            case g.LeaveGroupRequest():
                for leaving in request.members:
                    if not code:
                        self.group(request.group_id).remove(leaving.member_id)
                return g.LeaveGroupResponse(0, code, [])
            case g.OffsetCommitRequest():
                return self._commit(request, code, bool(scripted) and is_carried_out)
            case g.OffsetFetchRequest():
                return self._fetch(request, code)
        raise AssertionError(f"no script for {request}")

    def problem(self, request: Any, is_heartbeat: bool = False) -> ErrorCode:
        group = self.group(request.group_id)
        if request.member_id not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if request.generation_id != group.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return ErrorCode.REBALANCE_IN_PROGRESS if is_heartbeat and group.is_rebalancing else ErrorCode.NONE

    async def _join(self, request: g.JoinGroupRequest, code: ErrorCode) -> g.JoinGroupResponse:
        group = self.group(request.group_id)
        if code:
            return g.JoinGroupResponse(0, code)
        if not request.member_id and request.group_instance_id is None:
            self._next_member += 1
            return g.JoinGroupResponse(0, ErrorCode.MEMBER_ID_REQUIRED, member_id=f"member-{self._next_member}")
        member_id = request.member_id or f"static-{request.group_instance_id}"
        group.rebalance()
        group.members[member_id] = Member(request)
        group.notify()
        await asyncio.sleep(0.02)  # the initial delay
        try:
            async with asyncio.timeout(JOIN_PATIENCE_S):
                while group.is_rebalancing and not all(member.has_joined for member in group.members.values()):
                    await group.changed.wait()
        except TimeoutError:
            for late in [key for key, member in group.members.items() if not member.has_joined]:
                del group.members[late]
        if group.is_rebalancing:
            group.is_rebalancing = False
            group.generation += 1
            group.leader = min(group.members)
            group.notify()
        names = [{protocol.name for protocol in member.request.protocols} for member in group.members.values()]
        protocol = next(
            p.name for p in group.members[group.leader].request.protocols if all(p.name in n for n in names)
        )
        members = []
        if member_id == group.leader:
            members = [
                g.JoinGroupMember(
                    key,
                    member.request.group_instance_id,
                    next(p.metadata for p in member.request.protocols if p.name == protocol),
                )
                for key, member in group.members.items()
            ]
        return g.JoinGroupResponse(
            0, ErrorCode.NONE, group.generation, "consumer", protocol, group.leader, False, member_id, members
        )

    async def _sync(self, request: g.SyncGroupRequest, code: ErrorCode) -> g.SyncGroupResponse:
        code = code or self.problem(request)
        group = self.group(request.group_id)
        if not code and request.assignments:
            for assignment in request.assignments:
                group.members[assignment.member_id].assignment = assignment.assignment
            group.is_assigned = True
            group.notify()
        while not code and not group.is_assigned and not group.is_rebalancing:
            await group.changed.wait()
        if not code and group.is_rebalancing:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        if code:
            return g.SyncGroupResponse(0, code)
        return g.SyncGroupResponse(0, ErrorCode.NONE, "consumer", None, group.members[request.member_id].assignment)

    def _commit(self, request: g.OffsetCommitRequest, code: ErrorCode, despite_error: bool) -> g.OffsetCommitResponse:
        if not code and request.generation_id >= 0:
            code = self.problem(request)
        group = self.group(request.group_id)
        for topic in request.topics:
            for partition in topic.partitions:
                if not code or despite_error:
                    group.offsets[topic.name, partition.partition_index] = Stored(
                        partition.committed_offset,
                        partition.committed_leader_epoch,
                        partition.committed_metadata,
                        topic.topic_id,
                    )
        topics = [
            g.OffsetCommitTopicResponse(
                topic.name, [g.OffsetCommitPartitionResponse(p.partition_index, code) for p in topic.partitions]
            )
            for topic in request.topics
        ]
        return g.OffsetCommitResponse(0, topics)

    def _fetch(self, request: g.OffsetFetchRequest, code: ErrorCode) -> g.OffsetFetchResponse:
        of_group = ErrorCode.NONE if code is ErrorCode.UNSTABLE_OFFSET_COMMIT else code
        answers = []
        for asked in request.groups:
            group = self.group(asked.group_id)
            topics = []
            for topic in asked.topics or []:
                stored = {index: group.offsets.get((topic.name, index)) for index in topic.partition_indexes}
                partitions = [
                    g.OffsetFetchPartition(index, -1, -1, None, code)
                    if at is None
                    else g.OffsetFetchPartition(index, at.offset, at.leader_epoch, at.metadata, code)
                    for index, at in stored.items()
                ]
                topic_id = next((at.topic_id for at in stored.values() if at is not None), "")
                topics.append(g.OffsetFetchTopicResponse(topic.name, partitions, topic_id))
            answers.append(g.OffsetFetchGroupResponse(asked.group_id, topics, of_group))
        return g.OffsetFetchResponse(0, answers)

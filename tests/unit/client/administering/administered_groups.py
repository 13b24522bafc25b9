"""A ScriptedCluster with groups that all have one coordinator."""

from __future__ import annotations

from typing import Any

from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition
from tests.unit.client.scripted_broker import Action, ScriptedCluster


class GroupCluster(ScriptedCluster):
    def __init__(self, brokers: int = 1) -> None:
        super().__init__(brokers)
        self.coordinator = 0
        self.epoch, self.offsets_topic_id = 0, ""
        """Epoch and topic id of the coordinator's `__consumer_offsets`, as the brokers know it."""
        self.committed: dict[str, dict[TopicPartition, int]] = {}
        """The committed offsets of each group."""
        self.members: dict[str, list[g.DescribedGroupMember]] = {}
        self.rebalances: dict[str, list[g.DescribedRebalance]] = {}

    async def answer(self, node_id: int, request: Any, action: Action) -> m.Message:
        code = action.code or (ErrorCode.NONE if node_id == self.coordinator else ErrorCode.NOT_COORDINATOR)
        group = getattr(request, "group_id", "")
        match request:
            case g.FindCoordinatorRequest(coordinator_keys=[key]):
                port = self.nodes[self.coordinator].port
                return g.FindCoordinatorResponse(
                    0,
                    [
                        g.Coordinator(
                            *(key, self.coordinator, "127.0.0.1", port, action.code),
                            leader_epoch=self.epoch,
                            topic_id=self.offsets_topic_id,
                        )
                    ],
                )
            case g.ListGroupsRequest(states_filter=states):
                listed = [
                    g.ListedGroup(group, "consumer", self.state(group))
                    for group in self.committed
                    if node_id == self.coordinator and (not states or self.state(group) in states)
                ]
                return g.ListGroupsResponse(0, action.code, listed)
            case g.DescribeGroupsRequest(groups=[group]):
                members = self.members.get(group, [])
                state = self.state(group) if group in self.committed else "Dead"
                described = g.DescribedGroup(code, group, state, "consumer", "range" if members else "", members)
                described.rebalances = self.rebalances.get(group, [])
                return g.DescribeGroupsResponse(0, [described])
            case g.DeleteGroupsRequest(groups_names=[group]):
                if not code and self.members.get(group):
                    code = ErrorCode.NON_EMPTY_GROUP
                elif not code and group not in self.committed:
                    code = ErrorCode.GROUP_ID_NOT_FOUND
                if action.is_carried_out and code in (ErrorCode.NONE, action.code):
                    self.committed.pop(group, None)
                return g.DeleteGroupsResponse(0, [g.DeletableGroupResult(group, code)])
            case g.OffsetFetchRequest(groups=[g.OffsetFetchGroup(group_id=group, topics=topics)]):
                known = self.committed.get(group, {})
                wanted = (
                    known
                    if topics is None
                    else [TopicPartition(t.name, number) for t in topics for number in t.partition_indexes]
                )
                found = [
                    g.OffsetFetchTopicResponse(
                        p.topic, [g.OffsetFetchPartition(p.partition, known.get(p, -1), -1, "", code)]
                    )
                    for p in wanted
                ]
                return g.OffsetFetchResponse(0, [g.OffsetFetchGroupResponse(group, found, code)])
            case g.OffsetCommitRequest(topics=topics):
                if not code and self.members.get(group):
                    code = ErrorCode.UNKNOWN_MEMBER_ID
                results = []
                for topic in topics:
                    assert topic.topic_id == self.topics[topic.name].topic_id
                    each = [g.OffsetCommitPartitionResponse(p.partition_index, code) for p in topic.partitions]
                    results.append(g.OffsetCommitTopicResponse(topic.name, each))
                    for p in topic.partitions:
                        if action.is_carried_out and code in (ErrorCode.NONE, action.code):
                            offsets = self.committed.setdefault(group, {})
                            offsets[TopicPartition(topic.name, p.partition_index)] = p.committed_offset
                return g.OffsetCommitResponse(0, results)
            case g.OffsetDeleteRequest(topics=topics):
                results = []
                for deleted in topics:
                    each = []
                    for number in deleted.partitions:
                        self.committed[group].pop(TopicPartition(deleted.name, number), None)
                        each.append(g.OffsetCommitPartitionResponse(number, ErrorCode.NONE))
                    results.append(g.OffsetCommitTopicResponse(deleted.name, each))
                return g.OffsetDeleteResponse(code, 0, results)
        return await super().answer(node_id, request, action)

    def state(self, group: str) -> str:
        return "Stable" if self.members.get(group) else "Empty"


MEMBER = g.DescribedGroupMember("app-1-x", None, "app", "10.0.0.7", b"\xff", b"\xff")

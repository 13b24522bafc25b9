"""The ends of partitions if some are not known: for callers of the admin client, tables of groups and the console."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.cli import group_details
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.protocol import messages as m
from minibroker.protocol.apis import LIST_OFFSETS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.unit.client.scripted_broker import Received, ScriptedCluster


class ClusterBelowMinIsr(ScriptedCluster):
    """Its only broker leads `orders`, and `strict`, whose end it cannot tell yet."""

    def __init__(self) -> None:
        super().__init__(1)
        self.guard = self._answer
        self.add_topic("orders")
        self.add_topic("strict")

    def _answer(self, _: Any, received: Received) -> m.Message | None:
        if received.api is not LIST_OFFSETS:
            return None
        topics = [
            m.ListOffsetsTopicResponse(
                topic.name,
                [
                    m.ListOffsetsPartitionResponse(partition.partition_index, ErrorCode.OFFSET_NOT_AVAILABLE)
                    if topic.name == "strict"
                    else m.ListOffsetsPartitionResponse(partition.partition_index, ErrorCode.NONE, -1, 7)
                    for partition in topic.partitions
                ],
            )
            for topic in received.body.topics
        ]
        return m.ListOffsetsResponse(0, topics)


async def test_a_partition_whose_end_is_not_known_hides_no_other() -> None:
    partitions = [TopicPartition("orders", 0), TopicPartition("strict", 0)]
    async with asyncio.timeout(30), ClusterBelowMinIsr() as scripted, Admin(scripted.bootstrap) as admin:
        topics, _ = await group_details.topics_of(admin, ["orders", "strict"])
        assert await group_details.end_offsets(admin, topics, partitions) == {partitions[0]: 7}


async def test_the_error_for_some_partitions_has_the_offsets_of_the_others() -> None:
    known, strict, unknown = TopicPartition("orders", 0), TopicPartition("strict", 0), TopicPartition("orders", 7)
    async with asyncio.timeout(30), ClusterBelowMinIsr() as scripted, Admin(scripted.bootstrap) as admin:
        with pytest.raises(OffsetErrors) as failed:
            await admin.list_offsets(dict.fromkeys([strict, unknown, known], "latest"), timeout_ms=3_000)
    assert failed.value.results == {known: OffsetAndTimestamp(7, -1)}
    codes = {partition: error.code for partition, error in failed.value.errors.items() if type(error) is BrokerError}
    assert codes == {
        unknown: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        strict: ErrorCode.OFFSET_NOT_AVAILABLE,
    }
    assert "its partitions are 0 to 0" in str(failed.value.errors[unknown])

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from minibroker.client.consumer import Consumer
from minibroker.protocol.model import TopicPartition
from tests.unit.client.scripted_broker import ScriptedCluster
from tests.unit.client.test_consumer import fill, numbers, take

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 2
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


def test_a_member_goes_on_where_the_group_has_committed() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 10)
        async with Consumer(cluster.bootstrap, group="billing", topics=["orders"]) as consumer:
            assert numbers(await take(consumer, 4)) == [0, 1, 2, 3]
            assert consumer.assignment() == [P0, P1]
            await consumer.commit()
            assert numbers(await take(consumer, 2)) == [4, 5]
        async with Consumer(cluster.bootstrap, group="billing", topics=["orders"]) as consumer:
            assert numbers(await take(consumer, 2)) == [4, 5]

    run(scenario)

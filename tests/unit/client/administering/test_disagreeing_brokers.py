"""An admin client believes the controller if brokers describe the cluster differently."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from minibroker.client.admin import Admin
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA
from tests.unit.client.scripted_broker import Received, ScriptedCluster


class DisagreeingCluster(ScriptedCluster):
    """The controller's tenure by node, as each knows it; nodes of the same epoch that are cut off from the controller
    have an outdated ISR."""

    def __init__(self) -> None:
        super().__init__(3)
        self.known = dict.fromkeys(self.nodes, (2, 5))
        """The controller and its epoch, as each node knows them."""
        self.outdated = {0, 1}
        self.guard = self._answer
        self.add_topic("orders")

    def _answer(self, _: Any, received: Received) -> m.Message | None:
        if received.api is not METADATA:
            return None
        answer = self.metadata(received.body)
        controller, epoch = self.known[received.node_id]
        isr = [0, 1, 2] if received.node_id in self.outdated else [0, 2]
        topics = [replace(t, partitions=[replace(p, isr_nodes=isr) for p in t.partitions]) for t in answer.topics]
        return replace(answer, controller_id=controller, controller_epoch=epoch, topics=topics)


async def _isr(admin: Admin) -> tuple[int, ...]:
    return (await admin.describe_topics(["orders"]))["orders"].partitions[0].isr


async def test_a_broker_that_is_cut_off_from_the_controller_does_not_describe_topics() -> None:
    async with asyncio.timeout(30), DisagreeingCluster() as scripted, Admin(scripted.bootstrap) as admin:
        assert {await _isr(admin) for _ in range(50)} == {(0, 2)}


async def test_another_broker_answers_if_the_controller_cannot_be_reached() -> None:
    async with asyncio.timeout(30), DisagreeingCluster() as scripted, Admin(scripted.bootstrap) as admin:
        assert await _isr(admin) == (0, 2)
        await scripted.nodes[2].stop()
        assert {await _isr(admin) for _ in range(5)} == {(0, 1, 2)}


async def test_a_deposed_controller_that_does_not_know_its_successor_is_not_asked_for_ever() -> None:
    async with asyncio.timeout(60), DisagreeingCluster() as scripted, Admin(scripted.bootstrap) as admin:
        assert await _isr(admin) == (0, 2)
        scripted.known |= {0: (0, 6), 1: (0, 6)}
        scripted.outdated = {2}
        while await _isr(admin) != (0, 2):
            await asyncio.sleep(0.1)
        assert {await _isr(admin) for _ in range(50)} == {(0, 2)}
        assert (await admin.describe_cluster()).controller_id == 0

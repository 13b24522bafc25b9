"""The verdict of a storm on who was served: planted bugs that it must see, and nothing without them."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import pytest

from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.kafka_clients import VERSIONS, KafkaConsumer
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.acls import AclResourceType, ResourcePattern
from minibroker.protocol.model import TopicPartition
from tests.simulation.mutants import planted
from tests.simulation.storms.report import Report
from tests.simulation.storms.security import HEARS_WITHIN_S, Holding, may_read
from tests.simulation.storms.storm import Storm

SEED = 3
"""A storm with security."""
TOPIC = "fast"
READER = "reader"


async def _read(storm: Storm, world: VirtualWorld) -> None:
    partitions = [TopicPartition(TOPIC, 0)]
    oldest = VERSIONS[0]
    async with KafkaConsumer(storm.cluster.bootstrap, partitions=partitions, versions=oldest, world=world) as consumer:
        while True:
            await consumer.poll()


async def _expire_all_sessions(storm: Storm) -> None:
    zookeeper = storm.simulation.zookeeper
    for broker_id in storm.cluster.broker_ids:
        path = znodes.broker_path(broker_id)
        zookeeper.expire(host_name(broker_id))
        await storm.cluster.until(partial(zookeeper.has, path))


async def _look(storm: Storm) -> None:
    while True:
        storm.security.look()
        await asyncio.sleep(0.1)


async def _scenario(storm: Storm) -> None:
    """A client of Kafka's protocol reads, loses its rights and gets them back, and then loses its credential."""
    security = storm.security
    await storm.cluster.start()
    await storm._create_topics()
    storm.simulation.zookeeper.after = lambda _session, operations: security.written(operations)
    looking = asyncio.create_task(_look(storm))
    security.allow(READER, may_read(TOPIC))
    security.start()
    await storm.cluster.until(security.is_whole)
    world = storm.cluster.client(READER)
    reading = world.process.start(_read(storm, world))
    await _expire_all_sessions(storm)
    holding = Holding(READER, ResourcePattern(AclResourceType.TOPIC, TOPIC))
    assert security.holdings == [holding]
    assert security.changeable == [READER]
    with security.without_rights(holding):
        await asyncio.sleep(HEARS_WITHIN_S + 5)
    await storm.cluster.until(security.is_whole)
    await asyncio.sleep(5)
    with security.with_password(READER, None):
        await asyncio.sleep(security.session_s + HEARS_WITHIN_S + 5)
    assert not reading.done()
    reading.cancel()
    looking.cancel()


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (None, None),
        ("session-never-ends", "served without a credential"),
        ("acls-are-not-watched-again", "allowed without a right"),
    ],
)
def test_what_is_served_without_a_right_or_a_credential_is_seen(mutant: str | None, kind: str | None) -> None:
    report = Report(seed=SEED)

    async def main() -> None:
        storm = Storm(report, Random(SEED))
        with storm.security.watched():
            await _scenario(storm)

    with planted(mutant):
        run(main(), seed=SEED)
    assert {anomaly.kind for anomaly in report.anomalies} == ({kind} if kind else set())

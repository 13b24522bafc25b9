"""Settings that are changed in the middle of a storm, and whether every broker has heard of it in the end.

Only what breaks no promise that the storm checks: nothing acknowledged may expire, with power cuts two replicas must
have what is acknowledged where there are three, and a throttle lets replicas catch up in time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from minibroker.client.admin import Admin
from minibroker.client.configs import ConfigChange, ConfigResource
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import min_insync_replicas
from tests.simulation.workload import DURABLE, SHRINKING

if TYPE_CHECKING:
    from tests.simulation.storm import Storm

_TOPIC: dict[str, list[str]] = {
    "segment.bytes": ["4000", "30000", "1000000"],
    "segment.ms": ["1000", "604800000"],
    "index.interval.bytes": ["1", "500", "4096"],
    "retention.ms": ["-1", "3000000000"],
    "retention.bytes": ["-1", "1000000000000"],
    "leader.replication.throttled.replicas": ["*", ""],
    "follower.replication.throttled.replicas": ["*", ""],
}
_BROKER: dict[str, list[str]] = {
    "log.roll.ms": ["1000", "604800000"],
    "log.cleaner.backoff.ms": ["100", "5000"],
    "leader.replication.throttled.rate": ["200000", "5000000"],
    "follower.replication.throttled.rate": ["200000", "5000000"],
}
MIN_INSYNC_REPLICAS = "min.insync.replicas"


async def alter_configs(storm: Storm) -> None:
    """Some settings of a topic, of a broker or of all, whatever else goes on."""
    dice = storm.dice
    if dice.random() < 0.7:
        topic = dice.choice(_topics(storm))
        resource, table = ConfigResource.of_topic(topic), dict(_TOPIC)
        most = len(storm.cluster.broker_ids)
        least = 2 if topic.startswith(DURABLE) and most > 2 else 1
        table[MIN_INSYNC_REPLICAS] = [str(dice.choice([least, least, dice.randint(least, most)]))]
    else:
        broker_id = dice.choice([None, *storm.cluster.broker_ids])
        resource = ConfigResource.of_all_brokers() if broker_id is None else ConfigResource.of_broker(broker_id)
        table = _BROKER
    names = dice.sample(sorted(table), dice.randint(1, 3))
    changes = [
        ConfigChange.delete(name) if dice.random() < 0.2 else ConfigChange.set(name, dice.choice(table[name]))
        for name in names
    ]
    storm.count("alter configs", f"{resource}: {', '.join(f'{c.name}={c.value}' for c in changes)}")
    world = storm.cluster.client("alterer")

    async def alter() -> None:
        with suppress(MinibrokerError):
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                await admin.incremental_alter_configs({resource: changes})

    try:
        await asyncio.wait([world.process.start(alter())], timeout=30)
    finally:
        world.process.kill()


def _topics(storm: Storm) -> list[str]:
    return sorted({partition.topic for partition in storm.partitions} - {SHRINKING})


def settings_not_heard_of(storm: Storm) -> list[str]:
    """What a topic has in ZooKeeper, and a replica does not; empty where all brokers have heard of everything."""
    found = []
    for topic in _topics(storm):
        path = znodes.topic_config_path(topic)
        due = {
            MIN_INSYNC_REPLICAS: str(min_insync_replicas(None, len(storm.cluster.broker_ids))),
            "segment.bytes": storm.settings["log.segment.bytes"],
        } | znodes.decode_config(path, storm.simulation.zookeeper.data(path))
        for broker_id in storm.cluster.broker_ids:
            broker = storm.cluster.living_broker(broker_id)
            if broker is None or broker._replicas is None:
                continue
            for partition in broker._replicas.partitions():
                if partition.topic_partition.topic != topic:
                    continue
                has = {
                    MIN_INSYNC_REPLICAS: str(partition.min_insync_replicas),
                    "segment.bytes": str(partition.log.config.segment_bytes),
                }
                found += [
                    f"{partition.topic_partition} on broker {broker_id}: {name}={value}, and not {due[name]}"
                    for name, value in has.items()
                    if due[name] != value
                ]
    return found

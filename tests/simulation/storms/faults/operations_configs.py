"""Changes of settings during a storm, and the check that every broker applies them in the end.

No change may break a promise that the storm checks: acknowledged records must not expire, with three replicas two must
have each acknowledged record, and a throttle must let replicas catch up in time.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.protocol import znodes
from minibroker.protocol.apis import INCREMENTAL_ALTER_CONFIGS
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import min_insync_replicas
from tests.simulation.storms.clients.compacting import TOPIC as COMPACTED
from tests.simulation.storms.clients.shrinking import RETENTION
from tests.simulation.storms.clients.workload import DURABLE, SHRINKING
from tests.simulation.storms.scene import Scene
from tests.simulation.storms.verdicts.history import Anomaly

_TOPIC: dict[str, list[str]] = {
    "segment.bytes": ["4000", "30000", "1000000"],
    "segment.ms": ["1000", "604800000"],
    "index.interval.bytes": ["1", "500", "4096"],
    "retention.ms": ["-1", "3000000000"],
    "retention.bytes": ["-1", "1000000000000"],
    "compression.type": ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"],
    "message.timestamp.type": ["CreateTime", "LogAppendTime"],
    "flush.ms": ["100", "1000"],
    "flush.messages": ["10", "50"],
    "leader.replication.throttled.replicas": ["*", ""],
    "follower.replication.throttled.replicas": ["*", ""],
}
_BROKER: dict[str, list[str]] = {
    "log.roll.ms": ["1000", "604800000"],
    "log.cleaner.backoff.ms": ["0", "100", "5000"],
    "log.cleaner.io.max.bytes.per.second": ["20000", "1000000000"],
    "log.retention.check.interval.ms": ["500", "300000"],
    "leader.replication.throttled.rate": ["200000", "5000000"],
    "follower.replication.throttled.rate": ["200000", "5000000"],
}
_UNUSED = "delete.retention.ms"
"""A setting that only compacted topics use and only `late_change` changes."""
MIN_INSYNC_REPLICAS = "min.insync.replicas"


async def alter_configs(storm: Scene) -> None:
    """Change some settings of a topic, of a broker or of all brokers."""
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
        most = len(storm.cluster.broker_ids)
        # At least the default: a smaller value would break the promise to topics that do not set it.
        table = _BROKER | {MIN_INSYNC_REPLICAS: [str(n) for n in range(min_insync_replicas(None, most), most + 1)]}
    names = dice.sample(sorted(table), dice.randint(1, 3))
    changes = [
        ConfigChange.delete(name) if dice.random() < 0.2 else ConfigChange.set(name, dice.choice(table[name]))
        for name in names
    ]
    storm.count("alter configs", f"{resource}: {', '.join(f'{c.name}={c.value}' for c in changes)}")
    if any(change.name == MIN_INSYNC_REPLICAS and change.value == "1" for change in changes) and most > 2:
        storm.content_with_one.add(resource.name)
    world = storm.cluster.client("alterer")

    async def alter() -> None:
        with suppress(MinibrokerError):
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                await admin.incremental_alter_configs({resource: changes})

    await storm.run_client(world, alter(), within_s=30)


async def alter_rules(storm: Scene) -> None:
    """Change the retention of a topic, or whether one is compacted, often while a broker cannot learn of it."""
    dice, world = storm.dice, storm.cluster.client("ruler")
    topics = [SHRINKING] * bool(storm.shrinking.partitions) + [COMPACTED] * bool(storm.compacting.partitions)
    if not topics:
        return
    topic = dice.choice(topics)

    async def alter() -> None:
        with suppress(MinibrokerError):
            if topic == COMPACTED:
                policy = await storm.compacting.change_policy(world)
                storm.event(f"the policy became {policy}")
                return
            changes = [ConfigChange.set(name, dice.choice(values)) for name, values in sorted(RETENTION.items())]
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                await admin.incremental_alter_configs({ConfigResource.of_topic(topic): changes})

    storm.count("alter rules", topic)
    victim = host_name(dice.choice(storm.cluster.broker_ids))
    how = dice.choice(["heard by all", "slow ZooKeeper", "stale ZooKeeper", "ZooKeeper cut"])
    zookeeper = storm.simulation.zookeeper
    with ExitStack() as unheard:
        if how == "slow ZooKeeper":
            unheard.enter_context(storm.slow_zookeeper([victim], dice.choice([0.05, 0.2]) * storm.session_timeout_s))
        elif how == "stale ZooKeeper" and not zookeeper.is_lagging(victim):
            zookeeper.lag(victim, dice.choice([0.3, 0.8]) * storm.session_timeout_s)
            unheard.callback(zookeeper.unlag, victim)
            zookeeper.lose_connections(victim)
        elif how == "ZooKeeper cut":
            zookeeper.cut(victim)
            unheard.callback(zookeeper.uncut, victim)
        unheard.callback(world.process.kill)
        storm.note(f"{how}: {victim}")
        await asyncio.wait([world.process.start(alter())], timeout=30)
        await asyncio.sleep(0.5 * storm.session_timeout_s * dice.random())


async def late_change(storm: Scene) -> None:
    """Delay a change of a setting on its connection. The client retries on another connection, and then sets another
    value, which must stand even after the delayed request has arrived."""
    if storm.is_changing_late:
        return
    storm.is_changing_late = True
    dice, network = storm.dice, storm.simulation.network
    topic = dice.choice(sorted({partition.topic for partition in storm.partitions}))
    resource = ConfigResource.of_topic(topic)
    late_s = dice.choice([2.0, 5.0, 8.0])
    turns_slow_after = dice.choice([0, 1, 1])
    world = storm.cluster.client("tardy")

    def slow_down(arrival: Arrival | None = None) -> None:
        if arrival is None or (
            arrival.source == "tardy" and request_key(arrival.data) == INCREMENTAL_ALTER_CONFIGS.key
        ):
            for broker_id in storm.cluster.broker_ids:
                network.delay_standing("tardy", host_name(broker_id), late_s)
            with suppress(ValueError):
                network.taps.remove(slow_down)

    async def change() -> str | None:
        """Return the value that was acknowledged last."""
        older, newer = dice.sample(["100000000", "200000000", "300000000", "400000000"], 2)
        storm.count("late change", f"{_UNUSED} of {topic} to {older}, {late_s} s late, and then to {newer}")
        try:
            async with Admin(storm.cluster.bootstrap, world=world, request_timeout_ms=1_000) as admin:
                with suppress(MinibrokerError):
                    await admin.describe_log_dirs()  # connects to all brokers
                if turns_slow_after:
                    network.taps.append(slow_down)
                else:
                    slow_down()
                with suppress(MinibrokerError):
                    await admin.incremental_alter_configs({resource: [ConfigChange.set(_UNUSED, older)]})
                await admin.incremental_alter_configs({resource: [ConfigChange.set(_UNUSED, newer)]})
        except MinibrokerError:  # rejected, or no broker was reached
            return None
        storm.event("late change: a newer one was granted")
        await asyncio.sleep(late_s + 1)
        return newer

    changing = world.process.start(change())
    try:
        await asyncio.wait([changing], timeout=60)
        granted = changing.result() if changing.done() and not changing.cancelled() else None
        if granted is None:
            return
        path = znodes.topic_config_path(topic)
        holds = znodes.decode_config(path, storm.simulation.zookeeper.data(path)).get(_UNUSED)
        if holds != granted:
            storm.accuse(
                Anomaly("a late change", f"{_UNUSED} of {topic} is {holds}, and {granted} was granted after that")
            )
    finally:
        if slow_down in network.taps:
            network.taps.remove(slow_down)
        world.process.kill()
        storm.is_changing_late = False


def _topics(storm: Scene) -> list[str]:
    return sorted({partition.topic for partition in storm.partitions} - {SHRINKING})


def unapplied_settings(storm: Scene) -> list[str]:
    """Return the topic settings in ZooKeeper that some replica has not applied."""
    found = []
    for topic in _topics(storm):
        for broker_id in storm.cluster.broker_ids:
            broker = storm.cluster.living_broker(broker_id)
            if broker is None or broker._replicas is None:
                continue
            due = {
                MIN_INSYNC_REPLICAS: str(min_insync_replicas(None, len(storm.cluster.broker_ids))),
                "segment.bytes": storm.settings["log.segment.bytes"],
            }
            for path in (
                znodes.broker_config_path(None),
                znodes.broker_config_path(broker_id),
                znodes.topic_config_path(topic),
            ):
                if storm.simulation.zookeeper.has(path):
                    due |= znodes.decode_config(path, storm.simulation.zookeeper.data(path))
            for partition in broker._replicas.partitions.values():
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

"""Reassignments as a fault: replicas move, change their order and number, and are cancelled half-way, while the
controller is killed. At the end of a bout all reassignments must be over and no broker may keep a replica that is not
assigned to it. Then all partitions return to all brokers, as the rest of the storm expects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from minibroker.client.admin import Admin
from minibroker.deploy.simulator.cluster import ZOOKEEPER
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.world import NodeExists, ZooKeeperError
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly

OVER_WITHIN_S = 60.0


async def reassignment(storm: Ground) -> None:
    """Reassign some partitions, possibly again or cancelled half-way, and possibly kill the controller meanwhile."""
    dice = storm.dice
    storm.reassigned = True
    partitions = dice.sample(storm.partitions, dice.randint(1, len(storm.partitions)))
    steps: list[Mapping[TopicPartition, Sequence[int] | None]] = [_drawn(storm, partitions)]
    if dice.random() < 0.5:
        steps.append(dict.fromkeys(partitions) if dice.random() < 0.5 else _drawn(storm, partitions))
    pauses_s = [dice.choice([0.0, 0.01, 0.1, 1.0, 5.0]) * dice.random() for _ in steps]
    by_file = dice.random() < 0.25
    kill_after_s = dice.choice([0.002, 0.01, 0.05, 0.5]) * dice.random() if dice.random() < 0.4 else None
    storm.count("reassignment", f"{steps}{' by file' if by_file else ''}")
    world = storm.cluster.client("reassigner")

    async def ask() -> None:
        with suppress(MinibrokerError, ZooKeeperError, TimeoutError):
            if by_file:
                await _write_file(storm, steps.pop(0))
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                for step, pause_s in zip(steps, pauses_s, strict=False):
                    with suppress(MinibrokerError):
                        await admin.alter_partition_reassignments(step)
                    await asyncio.sleep(pause_s)

    async def _write_file(storm: Ground, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        session = await world.zookeeper.connect(ZOOKEEPER, 10_000, 10_000)
        entries = [znodes.Reassignment(p, tuple(replicas or ())) for p, replicas in wanted.items()]
        try:
            with suppress(NodeExists):
                await session.create(znodes.REASSIGN_PARTITIONS, znodes.encode_reassignments(entries))
        finally:
            await session.close()

    asking = world.process.start(ask())
    try:
        if kill_after_s is not None:
            await asyncio.sleep(kill_after_s)
            for broker_id in storm.cluster.active_controllers():
                if broker_id in storm.idle_brokers():
                    storm.event("controller killed during a reassignment")
                    storm.take_down(broker_id, storm.cluster.kill_broker)
        await asyncio.wait([asking], timeout=30)
    finally:
        world.process.kill()


def _drawn(storm: Ground, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Sequence[int] | None]:
    brokers = storm.cluster.broker_ids
    least = 1 if storm.reassigns_to_one else min(2, len(brokers))
    return {p: storm.dice.sample(brokers, storm.dice.randint(least, len(brokers))) for p in partitions}


# --- What a storm must know of them --------------------------------------------------------------------------------


def is_promised_by_one(storm: Ground, partition: TopicPartition, state: LeaderAndIsr) -> bool:
    """Return whether the partition has one replica, or will have as soon as its ISR allows dropping the others."""
    target = storm.assignment(partition).target
    return len(target) == 1 and {*state.isr, *state.eligible} <= {*target}


def members_without_a_replica(storm: Ground, partition: TopicPartition, state: LeaderAndIsr) -> Iterable[Anomaly]:
    """Yield an anomaly if the leader, the ISR or the eligible replicas include a broker that is not assigned."""
    replicas = storm.assignment(partition).replicas
    strangers = {state.leader, *state.isr, *state.eligible} - {*replicas, -1}
    if strangers:
        yield Anomaly(
            "a replica is counted on that is not assigned",
            f"{partition}: {sorted(strangers)}; leader {state.leader}, ISR {list(state.isr)}, eligible "
            f"{list(state.eligible)}, replicas {list(replicas)}",
        )


async def restore(storm: Ground) -> None:
    """After healing, wait for all reassignments and deletions of replicas, and return each partition to all brokers.
    Raise TimeoutError with the step that did not end in time."""
    if not storm.reassigned:
        return
    storm.note("reassignments must be over")
    await _within(storm, lambda: not _under_way(storm), lambda: f"the end of {_under_way(storm)}")
    await _within(storm, lambda: not _strays(storm), lambda: f"the deletion of {_strays(storm)}")
    world = storm.cluster.client("restorer")
    brokers = storm.cluster.broker_ids

    async def back() -> None:
        async with Admin(storm.cluster.bootstrap, world=world) as admin:
            while True:
                with suppress(MinibrokerError):
                    await admin.alter_partition_reassignments(dict.fromkeys(storm.partitions, brokers))
                    return
                await asyncio.sleep(0.5)

    async with asyncio.timeout(OVER_WITHIN_S):
        await world.process.run(back())
    await _within(storm, lambda: not _under_way(storm), lambda: f"the end of {_under_way(storm)}")
    storm.reassigned = False


async def _within(storm: Ground, condition: Callable[[], bool], awaited: Callable[[], str]) -> None:
    try:
        await storm.cluster.until(condition, within_s=OVER_WITHIN_S)
    except TimeoutError:
        raise TimeoutError(awaited()) from None


def _under_way(storm: Ground) -> list[str]:
    found = [f"{p} {a}" for p in storm.partitions if (a := storm.assignment(p)).is_being_reassigned]
    if storm.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS):
        found.append(f"{znodes.REASSIGN_PARTITIONS} {storm.simulation.zookeeper.data(znodes.REASSIGN_PARTITIONS)!r}")
    return found


def _strays(storm: Ground) -> list[str]:
    found = []
    for broker_id in storm.cluster.broker_ids:
        broker = storm.cluster.living_broker(broker_id)
        replicas = None if broker is None else broker._replicas
        if replicas is None:
            found.append(f"unknown replicas of broker {broker_id}, which is down")
            continue
        found += [
            f"{partition} on {broker_id}"
            for partition in storm.partitions
            if replicas.log_dirs.get(partition) is not None and broker_id not in storm.assignment(partition).replicas
        ]
    return found

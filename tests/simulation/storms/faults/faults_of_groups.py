"""Faults of consumer groups: of their members and of the brokers that coordinate them.

A group's coordinator is the leader of its partition of `__consumer_offsets`. The next coordinator must have everything
that the last one acknowledged. It has to read all of it before it answers for the group, and may be deposed meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupErrors
from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import PORT, host_name
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.protocol.apis import OFFSET_COMMIT
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import internal_partition
from tests.simulation.storms.clients.workload import DURABLE
from tests.simulation.storms.faults.faults_of_starts import broker_of, next_of
from tests.simulation.storms.ground import elects_another
from tests.simulation.storms.scene import Scene
from tests.simulation.storms.verdicts.history import Anomaly


def _coordinators(storm: Scene) -> list[int]:
    """Return the coordinators that no fault holds."""
    leaders = {storm.cluster.state(partition).leader for partition in storm.groups.partitions}
    return sorted(leaders & set(storm.idle_brokers()))


async def kill_coordinator(storm: Scene) -> None:
    if coordinators := _coordinators(storm):
        broker_id = storm.dice.choice(coordinators)
        storm.count("kill coordinator", f"broker {broker_id}")
        storm.take_down(broker_id, storm.cluster.kill_broker)


async def pause_member(storm: Scene) -> None:
    """Pause a member (SIGSTOP), for less than its session or until the group goes on without it."""
    if not storm.groups.members:
        return
    name = storm.dice.choice(storm.groups.members)
    process = storm.groups.process(name)
    seconds = storm.groups.session_timeout_s(name) * storm.dice.choice([0.3, 1.1, 2.0, 4.0])
    storm.count("pause member", f"{process.name}, {seconds:.1f} s")
    process.pause()
    try:
        await asyncio.sleep(seconds)
    finally:
        process.resume()
    storm.note(f"{process.name} goes on")


async def ambush_of_a_commit(storm: Scene) -> None:
    """When a commit arrives, kill or pause the coordinator, lose the reply, or cut the followers off."""
    if not storm.groups.members:
        return
    network, dice = storm.simulation.network, storm.dice
    storm.event("ambush of a commit: laid")
    strike = dice.choice(["killed", "killed later", "answer lost", "alone", "alone", "paused"])

    def is_commit(arrival: Arrival) -> tuple[str, str] | None:
        if arrival.target_port != PORT or request_key(arrival.data) != OFFSET_COMMIT.key:
            return None
        return arrival.source, arrival.target

    commit = await next_of(network.taps, is_commit)
    if commit is None:
        return
    member, host = commit
    broker_id = broker_of(storm, host)
    if broker_id is None or broker_id not in storm.idle_brokers():
        return
    storm.event("ambush of a commit: struck")
    storm.count("ambush of a commit", f"of {member} at {host}: {strike}")
    if strike == "answer lost":
        await asyncio.sleep(dice.uniform(0, 0.003))
        network.reset(member, host)
    elif strike.startswith("killed"):
        await asyncio.sleep(dice.uniform(0, 0.003) if strike == "killed" else dice.uniform(0, 0.1))
        if broker_id in storm.idle_brokers():
            storm.take_down(broker_id, storm.cluster.kill_broker)
    elif strike == "paused":
        with storm.paused(broker_id):
            await asyncio.sleep(storm.session_timeout_s * dice.choice([0.5, 2.0]))
    else:
        await _alone(storm, broker_id)


async def _alone(storm: Scene, broker_id: int) -> None:
    """Keep all followers from reaching the broker, and kill it some time later."""
    host = host_name(broker_id)
    with storm.blocked([(host_name(other), host) for other in storm.cluster.broker_ids if other != broker_id]):
        await asyncio.sleep(storm.dice.choice([0.05, 0.5, 2.0]))
        if broker_id in storm.idle_brokers():
            storm.take_down(broker_id, storm.cluster.kill_broker)


async def ambush_of_a_coordinator(storm: Scene) -> None:
    """Kill a coordinator; while the next one loads its groups, kill it, pause it or expire its session."""
    if not storm.groups.members:
        return
    storm.event("ambush of a coordinator: laid")
    if storm.dice.random() < 0.7 and (coordinators := _coordinators(storm)):
        storm.take_down(storm.dice.choice(coordinators), storm.cluster.kill_broker)
    change = await storm.next_change(elects_another)
    if change is None:
        return
    leader = change.after.leader
    storm.event("ambush of a coordinator: struck")
    strike = storm.dice.choice(["killed", "paused", "session expired"])
    storm.count("ambush of a coordinator", f"{strike}; leader {leader}")
    await asyncio.sleep(storm.dice.choice([0.0, 0.002, 0.01, 0.05]))
    if strike == "session expired":
        storm.simulation.zookeeper.expire(host_name(leader))
    elif leader not in storm.idle_brokers():
        return
    elif strike == "killed":
        storm.take_down(leader, storm.cluster.kill_broker)
    else:
        with storm.paused(leader):
            await asyncio.sleep(storm.session_timeout_s * storm.dice.choice([0.3, 1.5]))


async def coordinator_there_and_back(storm: Scene) -> None:
    """Move groups to another coordinator and, after a while, back to the same process."""
    if not (coordinators := _coordinators(storm)):
        return
    first = storm.dice.choice(coordinators)
    storm.event("coordinator there and back: laid")
    storm.simulation.zookeeper.expire(host_name(first))
    change = await storm.next_change(lambda before, after: before.leader == first and elects_another(before, after))
    if change is None:
        return
    storm.count("coordinator there and back", f"from broker {first} to {change.after.leader}")
    await asyncio.sleep(storm.dice.uniform(1, 4))
    for broker_id in _coordinators(storm):
        if broker_id != first:
            storm.simulation.zookeeper.expire(host_name(broker_id))


async def late_commit(storm: Scene) -> None:
    """Delay a commit on its connection, and break the client's end. The client retries on another connection, and then
    commits another offset, which must stand even after the delayed request has arrived."""
    if storm.is_changing_late or not storm.partitions:
        return
    storm.is_changing_late = True
    dice, network = storm.dice, storm.simulation.network
    partition = dice.choice(sorted(storm.partitions))
    group = f"tardy-{dice.randrange(4)}"
    older, newer = dice.sample(range(1, 1_000), 2)
    late_s = dice.choice([2.0, 5.0, 8.0])
    world = storm.cluster.client("tardy")
    storm.count("late commit", f"{older} of {partition} in {group}, {late_s} s late, and then {newer}")
    losses_before = storm.losses_of_power

    def broken() -> None:
        for broker_id in storm.cluster.broker_ids:
            network.reset_at("tardy", host_name(broker_id))

    async def commit() -> int | None:
        """Return the offset that is committed at the end, or None if it is unknown."""
        consumer = Consumer(
            storm.cluster.bootstrap,
            group=group,
            partitions=[partition],
            default_api_timeout_ms=8_000,
            world=world,
        )
        try:
            async with consumer:
                await consumer.commit({partition: 0})  # connects to the coordinator
                for broker_id in storm.cluster.broker_ids:
                    network.delay_standing("tardy", host_name(broker_id), late_s)
                asyncio.get_running_loop().call_later(dice.choice([0.1, 1.0]), broken)
                with suppress(MinibrokerError):
                    await consumer.commit({partition: older})
                await consumer.commit({partition: newer})
                storm.event("late commit: a newer one was granted")
                await asyncio.sleep(late_s + 1)
                committed = (await consumer.committed(partition))[partition]
                return None if committed is None else committed.offset
        except MinibrokerError:
            return None

    committing = world.process.start(commit())
    try:
        await asyncio.wait([committing], timeout=60)
        is_told = committing.done() and not committing.cancelled() and storm.losses_of_power == losses_before
        if is_told and committing.result() in (older, 0):
            said = f"group {group} is at {committing.result()} of {partition}, and {newer} was granted after that"
            storm.accuse(Anomaly("a late commit", said))
    finally:
        world.process.kill()
        storm.is_changing_late = False


async def deletion_at_a_deposed_coordinator(storm: Scene) -> None:
    """Pause a coordinator while another one takes over and acknowledges a commit. Then a client that still knows the
    first one asks it to delete the offset. It may answer neither that this is done nor that the group does not exist.
    """
    if not (coordinators := _coordinators(storm)):
        return
    dice, cluster = storm.dice, storm.cluster
    old = dice.choice(coordinators)
    offsets = dice.choice([p.partition for p in storm.groups.partitions if cluster.state(p).leader == old])
    names = (f"unheard-of-{number}" for number in itertools.count(dice.randrange(1_000_000)))
    group = next(name for name in names if internal_partition(name, len(storm.groups.partitions)) == offsets)
    partition = dice.choice(sorted(p for p in storm.partitions if p.topic.startswith(DURABLE)))
    of_group = dice.random() < 0.5
    losses_before = storm.losses_of_power
    world = cluster.client("doubtful")
    stale, fresh = (Admin(cluster.bootstrap, default_api_timeout_ms=20_000, world=world) for _ in range(2))

    run = world.process.run

    async def delete() -> str:
        try:
            await (stale.delete_groups([group]) if of_group else stale.delete_group_offsets(group, [partition]))
        except (BrokerError, GroupErrors) as error:
            if ErrorCode.GROUP_ID_NOT_FOUND.name not in str(error):
                raise
            return "there is no such group"
        return "that is deleted"

    storm.event("deletion at a deposed coordinator: laid")
    try:
        await run(_enter(stale, fresh))
        await run(stale.list_group_offsets(group))  # finds the coordinator
        if old not in _coordinators(storm):
            return
        with storm.paused(old):
            is_deposed = await storm.next_change(lambda b, after: b.leader == old and elects_another(b, after))
            if is_deposed is None:
                return
            await run(fresh.alter_group_offsets(group, {partition: 1}))
            storm.event("deletion at a deposed coordinator: struck")
            storm.count("deletion at a deposed coordinator", f"of {group}, at broker {old}")
            deleting = world.process.start(delete())
            await asyncio.sleep(dice.choice([0.01, 0.2, 1.0]))
        said = await deleting
        found = (await run(fresh.list_group_offsets(group))).get(partition)
        if found is not None and storm.losses_of_power == losses_before:
            storm.accuse(
                Anomaly("a deletion that was none", f"{said}, but {group} is at {found.offset} of {partition}")
            )
    except MinibrokerError as error:
        storm.note(f"deletion of {group}: {error!r}")
    finally:
        world.process.kill()


async def _enter(*admins: Admin) -> None:
    for admin in admins:
        await admin.__aenter__()

"""Faults in the few milliseconds between a write to ZooKeeper or to a log and the reactions to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from minibroker.deploy.simulator.cluster import PORT, host_name
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER
from tests.simulation.storms.ground import elects_another
from tests.simulation.storms.scene import Scene


async def ambush_of_an_election(storm: Scene) -> None:
    """Strike when a new leader is in ZooKeeper, before even the controller that wrote it knows."""
    storm.event("ambush of an election: laid")
    change = await storm.next_change(elects_another)
    if change is None:
        return
    leader = change.after.leader
    controllers = storm.cluster.active_controllers()
    follower = storm.dice.choice([broker_id for broker_id in storm.cluster.broker_ids if broker_id != leader])
    strike = storm.dice.choice(
        [
            *("leader bounced", "leader without power", "follower bounced", "controller killed", "controller paused"),
            "controller slow",
        ]
    )
    storm.event("ambush of an election: struck")
    storm.count("ambush of an election", f"{strike}; leader {leader}, follower {follower}, controllers {controllers}")
    if strike == "leader bounced":
        await asyncio.sleep(storm.dice.choice([0.0, 0.001, 0.01]))  # the leader may know by then
        _bounce(storm, leader)
    elif strike == "follower bounced":
        await asyncio.sleep(storm.dice.choice([0.0, 0.001, 0.01]))
        _bounce(storm, follower)
    elif strike == "leader without power":
        _bounce(storm, leader, without_power=True)
    for controller in controllers:
        if strike == "controller paused" and controller in storm.idle_brokers():
            await _pause_for(storm, controller, storm.dice.choice([2.0, 8.0]))
        elif strike == "controller killed" and controller in storm.idle_brokers():
            storm.take_down(controller, storm.cluster.kill_broker)
        elif strike == "controller slow":
            # Its orders arrive late, at a broker that has been restarted since.
            with _unanswered(storm, controller):
                _bounce(storm, leader, without_power=True)
                await asyncio.sleep(3)


async def stale_orders(storm: Scene) -> None:
    """Depose a controller while its orders are under way, so that they arrive after newer ones."""
    cluster, dice = storm.cluster, storm.dice
    leaders = {cluster.state(partition).leader for partition in storm.partitions}
    for controller in cluster.active_controllers():
        others = [broker_id for broker_id in cluster.broker_ids if broker_id != controller]
        dice.shuffle(others)
        leader = next((broker_id for broker_id in others if broker_id in leaders), None)
        if leader is None or len(others) < 2:
            return
        others.remove(leader)
        link = host_name(controller), host_name(others[0])
        storm.count("stale orders", f"{link[0]} to {link[1]}, when leader {leader} is bounced")
        with storm.blocked([link]):
            _bounce(storm, leader)
            change = await storm.next_change(elects_another)
            await asyncio.sleep(dice.uniform(0.005, 0.05))
            if storm.simulation.zookeeper.has(znodes.CONTROLLER):
                storm.simulation.zookeeper.remove(znodes.CONTROLLER)
            await asyncio.sleep(dice.uniform(0, 0.3))
            if change is not None and change.after.leader != others[0]:
                _bounce(storm, change.after.leader)
            await asyncio.sleep(dice.choice([0.5, 3.0]))


async def contested_election(storm: Scene) -> None:
    """Kill a leader, and depose the controller while its decision is on the way to a slow ZooKeeper."""
    leader, dice = storm.leader(), storm.dice
    if leader is None:
        return
    high_s = dice.choice([0.02, 0.3, 1.0])
    storm.count("contested election", f"leader {leader}, ZooKeeper takes up to {high_s} s")
    with storm.slow_zookeeper([host_name(broker_id) for broker_id in storm.cluster.broker_ids], high_s):
        storm.take_down(leader, storm.cluster.kill_broker)
        await asyncio.sleep(dice.uniform(0, 4 * high_s))
        if storm.simulation.zookeeper.has(znodes.CONTROLLER):
            storm.simulation.zookeeper.remove(znodes.CONTROLLER)
        await asyncio.sleep(10 * high_s)


async def ambush_of_an_isr(storm: Scene) -> None:
    """Strike when a leader's new ISR is in ZooKeeper, before the leader knows."""
    storm.event("ambush of an ISR: laid")
    change = await storm.next_change(
        lambda before, after: after.leader_epoch == before.leader_epoch and after.isr != before.isr
    )
    if change is None:
        return
    leader = change.after.leader
    joined = [broker_id for broker_id in change.after.isr if broker_id not in change.before.isr]
    strike = storm.dice.choice(
        ["leader unaware", "leader bounced", "leader paused", *["joined paused", "joined bounced"] * bool(joined)]
    )
    storm.event("ambush of an ISR: struck")
    storm.count("ambush of an ISR", f"{strike}; leader {leader}, joined {joined}")
    if strike == "leader bounced":
        _bounce(storm, leader)
    elif strike == "leader paused" and leader in storm.idle_brokers():
        await _pause_for(storm, leader, storm.dice.choice([0.5, 8.0]))
    elif strike == "joined bounced":
        _bounce(storm, joined[0])
    elif strike == "leader unaware":
        with _unanswered(storm, leader):
            await asyncio.sleep(3)
    elif strike == "joined paused" and joined[0] in storm.idle_brokers():
        with _unanswered(storm, leader):
            await _pause_for(storm, joined[0], 3.0)


async def ambush_of_a_deletion(storm: Scene) -> None:
    """Strike when a leader has raised its log start, before it checkpoints it, tells followers and removes segments.
    Storms that cut the power of several hosts may do so to all then: each disk has lost another part of the records.
    """
    if not storm.shrinking.partitions:
        return
    storm.event("ambush of a deletion: laid")
    move = await storm.shrinking.moves.next(20)
    if move is None:
        return
    await asyncio.sleep(storm.dice.choice([0.0, 0.001, 0.01, 0.1, 1.0]) * storm.dice.random())
    if move.leader not in storm.idle_brokers():
        return
    strike = storm.dice.choice(["killed", "killed", "without power", "without power", "paused", "stopped"])
    storm.event("ambush of a deletion: struck")
    storm.count("ambush of a deletion", f"{move}; {strike}")
    if strike == "paused":
        await _pause_for(storm, move.leader, storm.dice.choice([0.5, 8.0]))
    elif strike == "stopped":
        with storm.hold(move.leader):
            await storm.stop(move.leader)
    elif strike == "without power" and storm.cuts_power_of_several and not storm.damaged:
        storm.cut_power(storm.idle_brokers())
    else:
        _bounce(storm, move.leader, without_power=strike == "without power")


async def ambush_of_a_compaction(storm: Scene) -> None:
    """Strike when a broker is about to rename a compacted segment to the names of the old ones."""
    if not storm.compacting.partitions:
        return
    storm.event("ambush of a compaction: laid")
    broker_id = await storm.compacting.swaps.next(20)
    if broker_id is None:
        return
    await asyncio.sleep(storm.dice.choice([0.0, 0.001, 0.01, 0.1]) * storm.dice.random())
    if broker_id not in storm.idle_brokers():
        return
    without_power = storm.dice.random() < 0.5
    storm.event("ambush of a compaction: struck")
    storm.count("ambush of a compaction", f"broker {broker_id}{', without power' if without_power else ''}")
    _bounce(storm, broker_id, without_power=without_power)


@contextmanager
def _unanswered(storm: Scene, broker_id: int) -> Iterator[None]:
    """Lose the next reply of ZooKeeper to this broker, and slow down its further requests."""
    host = host_name(broker_id)
    with storm.slow_zookeeper([host], 1.0):
        storm.simulation.zookeeper.lose_connections(host)
        yield


def _bounce(storm: Scene, broker_id: int, *, without_power: bool = False) -> None:
    """Kill a broker, or cut its power if a power cut is due, and restart it at once."""
    if broker_id in storm.idle_brokers():
        if without_power and not storm.damaged:
            storm.cut_power([broker_id], restart_after_s=0.0)
        else:
            storm.take_down(broker_id, storm.cluster.kill_broker, restart_after_s=0.0)


async def _pause_for(storm: Scene, broker_id: int, seconds: float) -> None:
    with storm.paused(broker_id):
        await asyncio.sleep(seconds)
    storm.note(f"broker {broker_id} goes on")


async def fresh_client_at_a_deposed_leader(storm: Scene) -> None:
    """Cut a leader off from the other brokers and from ZooKeeper until its successor has acknowledged more records.
    Then start clients that reach the deposed leader first, or only it."""
    network, zookeeper, dice = storm.simulation.network, storm.simulation.zookeeper, storm.dice
    cluster, users = storm.cluster, storm.users
    partition = dice.choice(users.partitions)
    victim = cluster.state(partition).leader
    if victim not in storm.idle_brokers():
        return
    storm.count("fresh client at a deposed leader", f"broker {victim}, of {partition}")
    others = [host_name(broker_id) for broker_id in cluster.broker_ids if broker_id != victim]
    hidden: list[tuple[str, str]] = []
    links = [link for other in others for link in ((host_name(victim), other), (other, host_name(victim)))]

    def is_deposed() -> bool:
        return cluster.state(partition).leader not in (NO_LEADER, victim)

    def its_end() -> int:
        replica = storm.replica(victim, partition)
        return -1 if replica is None else replica.log.log_end_offset

    def is_overtaken() -> bool:
        return 0 <= its_end() < storm.workload.acknowledged_end[partition] - 1

    for link in links:
        network.block(*link)
    zookeeper.cut(host_name(victim))
    try:
        await cluster.until(is_deposed, within_s=15)
        users.send_on(partition, dice.randint(4, 8))
        await cluster.until(is_overtaken, within_s=15)
        for _ in range(dice.randint(1, 2)):
            end, known = its_end(), storm.workload.acknowledged_end[partition]
            if not 0 <= end < known:
                break
            host = users.visit(partition, f"{host_name(victim)}:{PORT}", dice.randint(end + 1, known), dice)
            if dice.random() < 0.3:
                for other in others:
                    network.block(host, other)
                    hidden.append((host, other))
        await asyncio.sleep(dice.choice([1.0, 4.0]))
    except TimeoutError:
        storm.note("no leader was elected, or no record acknowledged")
    finally:
        zookeeper.uncut(host_name(victim))
        for link in [*links, *hidden]:
            network.unblock(*link)

"""Faults at the moments of a re-creation: ZooKeeper has queued the deletion, has removed the topic, or has the new one.

Each is laid before the deletion is requested and strikes when its moment comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from operator import ne

from minibroker.broker.replication.partition import Partition
from minibroker.deploy.simulator.cluster import host_name
from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.clients.rebirth import (
    LATE_ISR_WRITE,
    SLOW_CONSUMERS,
    Ambush,
    Moment,
    Rebirth,
)
from tests.simulation.storms.clients.rebirth_clients import POLL_S
from tests.simulation.storms.verdicts.history import TopicIdPartition
from tests.simulation.storms.verdicts.incarnations import Incarnation


async def _late_isr_write(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Delay a leader's write of a smaller ISR until the topic has been re-created."""
    storm, dice = rebirth.storm, rebirth.dice
    found = _leader(rebirth, topic)
    settings = storm.settings
    lag_s = int(settings["replica.lag.time.max.ms"]) / 1_000
    session_s = int(settings["zookeeper.session.timeout.ms"]) / 1_000
    current = rebirth.lives.current(topic)
    if found is None or current is None:
        is_laid.set()
        return
    partition, leader = found
    followers = [b for b in storm.cluster.state(partition).isr if b != leader]
    replica = rebirth.replica(leader, current, partition)
    if not followers or replica is None or storm.cluster.active_controllers() == [leader]:
        is_laid.set()
        return
    follower = dice.choice(followers)
    storm.note(f"{partition}: follower {follower} cannot fetch from {leader}, whose shrink is waited for")
    host, network = host_name(leader), storm.simulation.network
    links = [(host_name(follower), host), (host, host_name(follower))]
    is_slow = dice.random() < 0.5
    try:
        for link in links:
            network.block(*link)
        await asyncio.sleep(lag_s * 0.95)
        if is_slow:
            with storm.slow_zookeeper([host], 0.8 * session_s):
                struck = await _held_up(rebirth, partition, replica, lag_s, is_laid, topic, leader)
                for link in links:
                    network.unblock(*link)
                created = await rebirth.moment(topic, "created") if struck else None
        else:
            storm.simulation.zookeeper.cut(host)
            try:
                async with asyncio.timeout(0.9 * session_s):
                    struck = await _held_up(rebirth, partition, replica, lag_s, is_laid, topic, leader)
                    for link in links:
                        network.unblock(*link)
                    created = await rebirth.moment(topic, "created") if struck else None
                    await asyncio.sleep(dice.choice([0.0, 0.01, 0.1]))
            except TimeoutError:
                created = None
            finally:
                storm.simulation.zookeeper.uncut(host)
        if created is not None:
            _struck(rebirth, "an ISR write held up", f"{partition}, of leader {leader}")
    finally:
        is_laid.set()
        for link in links:
            network.unblock(*link)


async def _held_up(
    rebirth: Rebirth,
    partition: TopicPartition,
    replica: Partition,
    lag_s: float,
    is_laid: asyncio.Event,
    topic: str,
    leader: int,
) -> bool:
    """Wait for the leader's proposal, and return whether it is on its way. The topic may be deleted then."""
    deadline_s = rebirth.storm.now_s + lag_s
    while replica.proposed_isr is None and rebirth.storm.now_s < deadline_s:
        await asyncio.sleep(0.01)
    others = [broker_id for broker_id in rebirth.storm.cluster.broker_ids if broker_id != leader]
    rebirth.wished_leader[topic] = rebirth.dice.choice(others)
    is_laid.set()
    return replica.proposed_isr is not None


async def _reply_lost(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Carry out the next write of a leader or of the controller, and lose the reply."""
    moment = _some_moment(rebirth)
    is_laid.set()
    if await rebirth.moment(topic, moment) is not None:
        victim = _leader_or_controller(rebirth, topic)
        if victim is not None:
            rebirth.storm.lose_next_reply_of.add(host_name(victim))
            _struck(rebirth, "a reply of ZooKeeper lost", f"to {victim}, when {moment}")


async def _session_suspended(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Cut a leader or the controller off from ZooKeeper for about a second."""
    moment, zookeeper = _some_moment(rebirth), rebirth.storm.simulation.zookeeper
    victim = _leader_or_controller(rebirth, topic)
    is_laid.set()
    if victim is None or await rebirth.moment(topic, moment) is None:
        return
    zookeeper.cut(host_name(victim))
    _struck(rebirth, "a session suspended", f"of {victim}, when {moment}")
    try:
        await asyncio.sleep(rebirth.dice.uniform(0.2, 1.4))
    finally:
        zookeeper.uncut(host_name(victim))


async def _all_killed(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Kill all brokers when the new topic has its first record, possibly at its leader only; one stays away for long.
    Kill the leader again after it has come back and acknowledged the record."""
    storm, dice = rebirth.storm, rebirth.dice
    is_laid.set()
    born = await rebirth.moment(topic, "created")
    if born is None:
        return
    found = await _first_record(rebirth, born, is_alone=dice.random() < 0.7) if dice.random() < 0.8 else None
    if found is None:
        await asyncio.sleep(dice.choice([0.0, 0.1, 1.0]) * dice.random())
    idle = storm.idle_brokers()
    away = dice.choice([b for b in idle if found is None or b != found[1]] or [None])
    for broker_id in idle:
        late_s = dice.uniform(4, 8) if broker_id == away else dice.uniform(0, 0.3)
        storm.take_down(broker_id, storm.cluster.kill_broker, restart_after_s=late_s)
    _struck(rebirth, "all brokers killed", f"{idle}, {away} stays away")
    if found is None:
        return
    partition, leader = found
    known_s = rebirth.storm.now_s + 4
    while rebirth.storm.now_s < known_s:
        replica = rebirth.replica(leader, born, partition)
        if replica is not None and replica.is_leader:
            break
        await asyncio.sleep(POLL_S)
    others = [broker_id for broker_id in storm.idle_brokers() if broker_id != leader]
    if leader in storm.idle_brokers() and others and dice.random() < 0.7:
        with storm.paused(others[0]):
            await _kill_once_acknowledged(rebirth, born, partition, leader)
    else:
        await _kill_once_acknowledged(rebirth, born, partition, leader)


async def _kill_once_acknowledged(rebirth: Rebirth, born: Incarnation, partition: TopicPartition, leader: int) -> None:
    storm = rebirth.storm
    identified = TopicIdPartition(born.topic_id, partition)
    known_s = rebirth.storm.now_s + 2
    while rebirth.storm.now_s < known_s and identified not in rebirth.clients.acknowledged_ends:
        await asyncio.sleep(POLL_S)
    if identified in rebirth.clients.acknowledged_ends and leader in storm.idle_brokers():
        storm.take_down(leader, storm.cluster.kill_broker, restart_after_s=rebirth.dice.uniform(1, 8))
        _struck(rebirth, "all brokers killed, and then the leader", f"{leader}")


async def _first_record(rebirth: Rebirth, born: Incarnation, *, is_alone: bool) -> tuple[TopicPartition, int] | None:
    """Return the partition and the leader of the first record, as soon as it arrives. With `is_alone`, no follower can
    fetch it."""
    hosts = [host_name(b) for b in rebirth.storm.cluster.broker_ids]
    links = [(source, target) for source in hosts for target in hosts if source != target] if is_alone else []
    followed_s = rebirth.storm.now_s + 2
    while rebirth.storm.now_s < followed_s and not _is_led(rebirth, born):
        await asyncio.sleep(POLL_S)
    with rebirth.storm.blocked(links):
        return await _arrival(rebirth, born)


async def _arrival(rebirth: Rebirth, born: Incarnation) -> tuple[TopicPartition, int] | None:
    """Wait for the first record of an incarnation. Return its partition and leader."""
    for _ in range(2_000):
        if rebirth.lives.current(born.topic) is not born:
            return None
        for partition in born.partitions:
            for broker_id in born.assignment[partition.partition]:
                replica = rebirth.replica(broker_id, born, partition)
                if replica is not None and replica.is_leader and replica.log.log_end_offset > 0:
                    return partition, broker_id
        await asyncio.sleep(POLL_S)
    return None


def _is_led(rebirth: Rebirth, born: Incarnation) -> bool:
    """Return whether every partition's leader knows that it leads."""
    leads = [
        replica is not None and replica.is_leader
        for partition in born.partitions
        for replica in [rebirth.replica(born.assignment[partition.partition][0], born, partition)]
    ]
    return all(leads)


async def _producer_cut_off(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Reset a producer's connection after one of its first batches has reached the new topic. A producer that was quiet
    meanwhile, and whose partitions kept their leaders, does not know of the re-creation."""
    dice = rebirth.dice
    current = rebirth.lives.current(topic)
    if current is not None and dice.random() < 0.7:
        rebirth.clients.quiet.add(topic)
        rebirth.wished_assignment[topic] = _present_assignment(rebirth, topic)
    try:
        await asyncio.sleep(dice.uniform(0.2, 0.6))
        is_laid.set()
        born = await rebirth.moment(topic, "created")
        if born is None:
            return
        while topic in rebirth.clients.quiet and not _is_led(rebirth, born) and rebirth.lives.current(topic) is born:
            await asyncio.sleep(POLL_S)
    finally:
        is_laid.set()
        rebirth.clients.quiet.discard(topic)
    found = await _arrival(rebirth, born)
    if found is None:
        return
    await _appends(rebirth, born, *found, dice.randint(0, 4))
    await asyncio.sleep(dice.choice([0.0, 0.0, 0.002, 0.05]))
    producers = [name for name, settings in rebirth.clients.producers.items() if settings.topic == topic]
    broken = sum(rebirth.storm.simulation.network.reset(name, host_name(found[1])) for name in producers)
    if broken:
        _struck(rebirth, "a producer's connection broken", f"{producers} to {found[1]}")


def _present_assignment(rebirth: Rebirth, topic: str) -> list[list[int]]:
    """Return an assignment under which the current leaders lead again."""
    assignment = []
    for partition, _, assigned in rebirth.replicas():
        if partition.topic == topic:
            leader = rebirth.storm.cluster.state(partition).leader
            assignment.append(sorted(assigned, key=partial(ne, leader)))
    return assignment


async def _appends(rebirth: Rebirth, born: Incarnation, partition: TopicPartition, leader: int, count: int) -> None:
    """Wait until `count` more batches are appended, or none is for two seconds."""
    for _ in range(count):
        replica = rebirth.replica(leader, born, partition)
        if replica is None:
            return
        end, patience_s = replica.log.log_end_offset, rebirth.storm.now_s + 2
        while replica.log.log_end_offset == end:
            if rebirth.storm.now_s > patience_s:
                return
            await asyncio.sleep(POLL_S)


async def _slow_consumers(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Re-create the topic while consumers that read record by record are in the middle of a batch."""
    dice = rebirth.dice
    rebirth.clients.slow.add(topic)
    try:
        await asyncio.sleep(dice.uniform(0.3, 1))
        is_laid.set()
        if await rebirth.moment(topic, "created") is not None:
            await asyncio.sleep(dice.uniform(0.2, 3))  # long enough to fetch from the new topic
            _struck(rebirth, SLOW_CONSUMERS)
    finally:
        is_laid.set()
        rebirth.clients.slow.discard(topic)


async def _admin_cut_off(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Reset the administrator's connections when its request is in ZooKeeper, or while it waits for the effect."""
    moment, dice = _some_moment(rebirth), rebirth.dice
    is_laid.set()
    if await rebirth.moment(topic, moment) is None:
        return
    await asyncio.sleep(dice.choice([0.0, 0.05, 1.0]) * dice.random())
    for _ in range(dice.choice([1, 1, 5])):
        broken = sum(
            rebirth.storm.simulation.network.reset(f"admin-{topic}", host_name(broker_id))
            for broker_id in rebirth.storm.cluster.broker_ids
        )
        if broken:
            _struck(rebirth, "the administrator's connection broken", f"when {moment}")
        await asyncio.sleep(dice.uniform(0.0, 0.3))


async def _deletion_held_up(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Pause or kill a broker with a replica before the deletion, so that the name stays taken."""
    storm, dice = rebirth.storm, rebirth.dice
    current, controllers = rebirth.lives.current(topic), storm.cluster.active_controllers()
    victims = [
        broker_id
        for broker_id in storm.idle_brokers()
        if current is not None and broker_id in current.assignment[0] and broker_id not in controllers
    ]
    if not victims:
        is_laid.set()
        return
    victim, seconds = dice.choice(victims), dice.uniform(0.5, 4)
    if dice.random() < 0.5:
        storm.take_down(victim, storm.cluster.kill_broker, restart_after_s=seconds)
    is_laid.set()
    if await rebirth.moment(topic, "deletion queued") is None:
        return
    _struck(rebirth, "a deletion held up", f"by broker {victim}, for {seconds:.1f} s")
    if victim in storm.idle_brokers():
        with storm.paused(victim):
            await asyncio.sleep(seconds)


async def _controller_killed(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    moment = _some_moment(rebirth)
    is_laid.set()
    if await rebirth.moment(topic, moment) is None:
        return
    storm = rebirth.storm
    await asyncio.sleep(rebirth.dice.choice([0.0, 0.002, 0.02]))
    for controller in storm.cluster.active_controllers():
        if controller in storm.idle_brokers():
            storm.take_down(controller, storm.cluster.kill_broker)
            _struck(rebirth, "the controller killed", f"{controller}, when {moment}")


async def _power_cut(rebirth: Rebirth, topic: str, is_laid: asyncio.Event) -> None:
    """Cut the power of a host that knows of the deletion or of the new topic, but has not written it to disk."""
    moment, storm, dice = _some_moment(rebirth), rebirth.storm, rebirth.dice
    is_laid.set()
    if await rebirth.moment(topic, moment) is None:
        return
    await asyncio.sleep(dice.choice([0.0, 0.02, 0.5]) * dice.random())
    victim = storm.some_broker()
    if victim is not None and not storm.damaged:
        storm.cut_power([victim], restart_after_s=dice.choice([0.0, 1.0]))
        _struck(rebirth, "a power cut", f"of {victim}, when {moment}")


def _struck(rebirth: Rebirth, kind: str, text: str = "") -> None:
    rebirth.storm.event(f"ambush of a re-creation: {kind}")
    rebirth.storm.note(f"ambush of a re-creation: {kind} {text}")


def _leader(rebirth: Rebirth, topic: str) -> tuple[TopicPartition, int] | None:
    """Return some partition of the topic with a living leader, and that leader."""
    cluster = rebirth.storm.cluster
    leaders = [(p, cluster.state(p).leader) for p in rebirth.partitions() if p.topic == topic]
    living = [entry for entry in leaders if entry[1] in cluster.living()]
    return rebirth.dice.choice(living) if living else None


def _leader_or_controller(rebirth: Rebirth, topic: str) -> int | None:
    controllers = rebirth.storm.cluster.active_controllers()
    found = _leader(rebirth, topic)
    if found is None or (controllers and rebirth.dice.random() < 0.4):
        return controllers[0] if controllers else None
    return found[1]


def _some_moment(rebirth: Rebirth) -> Moment:
    return rebirth.dice.choice(["deletion queued", "gone", "created"])


AMBUSHES: Mapping[str, Ambush] = {
    LATE_ISR_WRITE: _late_isr_write,
    "a reply of ZooKeeper lost": _reply_lost,
    "a session suspended": _session_suspended,
    "all brokers killed": _all_killed,
    "a producer's connection broken": _producer_cut_off,
    SLOW_CONSUMERS: _slow_consumers,
    "the administrator's connection broken": _admin_cut_off,
    "a deletion held up": _deletion_held_up,
    "the controller killed": _controller_killed,
    "a power cut": _power_cut,
}

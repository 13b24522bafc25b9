"""Faults of transactions: of their coordinators, their producers, and the requests between them.

A decision must survive its coordinator, and reach each partition whatever fails meanwhile. A producer that was paused
or cut off for so long that another one has its transactional id must not change anything any more, and neither must a
request that arrives when its transaction has ended.
"""

from __future__ import annotations

import asyncio

from minibroker.deploy.simulator.cluster import PORT, host_name
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.protocol.apis import END_TXN
from tests.simulation.storms.faults.faults_of_starts import broker_of, next_of
from tests.simulation.storms.ground import elects_another
from tests.simulation.storms.scene import Scene


def _coordinators(storm: Scene) -> list[int]:
    """Return the coordinators of transactions that no fault holds."""
    leaders = {storm.cluster.state(partition).leader for partition in storm.transactors.state_partitions}
    return sorted(leaders & set(storm.idle_brokers()))


def _transactional(storm: Scene) -> list[str]:
    """Return the clients with a transactional id."""
    return [*storm.transactors.transactors, *storm.processors.names]


async def kill_transaction_coordinator(storm: Scene) -> None:
    if coordinators := _coordinators(storm):
        broker_id = storm.dice.choice(coordinators)
        storm.count("kill transaction coordinator", f"broker {broker_id}")
        storm.take_down(broker_id, storm.cluster.kill_broker)


async def transaction_coordinator_there_and_back(storm: Scene) -> None:
    """Move transactional ids to another coordinator and, after a while, back to the same process."""
    if not (coordinators := _coordinators(storm)):
        return
    first = storm.dice.choice(coordinators)
    storm.event("transaction coordinator there and back: laid")
    storm.simulation.zookeeper.expire(host_name(first))
    change = await storm.next_change(lambda before, after: before.leader == first and elects_another(before, after))
    if change is None:
        return
    storm.count("transaction coordinator there and back", f"from broker {first} to {change.after.leader}")
    await asyncio.sleep(storm.dice.uniform(1, 4))
    for broker_id in _coordinators(storm):
        if broker_id != first:
            storm.simulation.zookeeper.expire(host_name(broker_id))


async def zombie_twin(storm: Scene) -> None:
    """Pause a transactor or cut it off, start another instance of its transactional id, and wake the first one late."""
    if not (names := _transactional(storm)):
        return
    dice = storm.dice
    name = dice.choice(names)
    guests = storm.processors if name in storm.processors.names else storm.transactors
    process = guests.process(name)
    seconds = dice.choice([0.5, 3.0, 8.0, 25.0]) * dice.uniform(0.5, 1.5)
    is_paused = dice.random() < 0.7
    storm.count("zombie twin", f"of {process.name}, {'paused' if is_paused else 'cut off'} for {seconds:.1f} s")
    twin = None
    try:
        if is_paused:
            process.pause()
            twin = guests.start_twin(name)
            await asyncio.sleep(seconds)
        else:
            hosts = [host_name(broker_id) for broker_id in storm.cluster.broker_ids]
            with storm.blocked([link for host in hosts for link in ((name, host), (host, name))]):
                twin = guests.start_twin(name)
                await asyncio.sleep(seconds)
        process.resume()
        storm.note(f"{process.name} goes on")
        await asyncio.sleep(dice.choice([0.5, 5.0]))
    finally:
        process.resume()
        if twin is not None:
            twin.process.kill()


async def late_transaction(storm: Scene) -> None:
    """Delay what a transactor sends on its connections, and break them at its end. It retries on other connections and
    goes on, and the delayed requests arrive when their transaction has ended."""
    if not (names := _transactional(storm)):
        return
    dice, network = storm.dice, storm.simulation.network
    name = dice.choice(names)
    brokers = dice.sample(storm.cluster.broker_ids, dice.randint(1, len(storm.cluster.broker_ids)))
    late_s = dice.choice([0.3, 1.0, 3.0, 8.0]) * dice.uniform(0.5, 1.5)
    storm.count("late transaction", f"of {name} at {brokers}, {late_s:.1f} s late")
    for broker_id in brokers:
        network.delay_standing(name, host_name(broker_id), late_s)
    await asyncio.sleep(dice.choice([0.02, 0.2, 1.0]) * dice.random())
    for broker_id in brokers:
        network.reset_at(name, host_name(broker_id))


def _is_end(arrival: Arrival) -> tuple[str, str] | None:
    if arrival.target_port != PORT:
        return None
    of_kafka = len(arrival.data) > 5 and arrival.data[4] == 0 and arrival.data[5] == END_TXN.key
    return (arrival.source, arrival.target) if of_kafka or request_key(arrival.data) == END_TXN.key else None


async def ambush_of_an_end(storm: Scene) -> None:
    """When an EndTxn arrives, kill or pause the coordinator, lose the reply, or cut it off from its followers or from
    the partitions of the transaction."""
    if not storm.transactors.transactors:
        return
    network, dice = storm.simulation.network, storm.dice
    storm.event("ambush of an end: laid")
    strike = dice.choice(["killed", "killed later", "answer lost", "alone", "mute", "paused"])
    end = await next_of(network.taps, _is_end)
    if end is None:
        return
    producer, host = end
    broker_id = broker_of(storm, host)
    if broker_id is None or broker_id not in storm.idle_brokers():
        return
    storm.event("ambush of an end: struck")
    storm.count("ambush of an end", f"of {producer} at {host}: {strike}")
    others = [host_name(other) for other in storm.cluster.broker_ids if other != broker_id]
    if strike == "answer lost":
        await asyncio.sleep(dice.uniform(0, 0.003))
        network.reset(producer, host)
    elif strike.startswith("killed"):
        await asyncio.sleep(dice.uniform(0, 0.003) if strike == "killed" else dice.uniform(0, 0.1))
        if broker_id in storm.idle_brokers():
            storm.take_down(broker_id, storm.cluster.kill_broker)
    elif strike == "paused":
        with storm.paused(broker_id):
            await asyncio.sleep(storm.session_timeout_s * dice.choice([0.5, 2.0]))
    else:
        links = [(other, host) if strike == "alone" else (host, other) for other in others]
        with storm.blocked(links):
            await asyncio.sleep(dice.choice([0.05, 0.5, 2.0]))
            if broker_id in storm.idle_brokers():
                storm.take_down(broker_id, storm.cluster.kill_broker)


async def delayed_markers(storm: Scene) -> None:
    """Delay what a coordinator sends to the other brokers on its connections. Now and then it is deposed meanwhile, or
    gives the connections up and sends everything again on others."""
    if not (coordinators := _coordinators(storm)):
        return
    dice, network = storm.dice, storm.simulation.network
    broker_id = dice.choice(coordinators)
    late_s = dice.choice([0.1, 1.0, 5.0]) * dice.uniform(0.5, 1.5)
    course = dice.choice(["late", "deposed", "sent again"])
    storm.count("delayed markers", f"of broker {broker_id}, {late_s:.1f} s: {course}")
    host, others = host_name(broker_id), [host_name(other) for other in storm.cluster.broker_ids if other != broker_id]
    for other in others:
        network.delay_standing(host, other, late_s)
    try:
        if course == "sent again":
            await asyncio.sleep(dice.uniform(0, 0.1))
            for other in others:
                network.reset_at(host, other)
        elif course == "deposed":
            await asyncio.sleep(dice.uniform(0, 0.1))
            storm.simulation.zookeeper.expire(host)
        await asyncio.sleep(late_s * dice.uniform(1, 2))
    finally:
        for other in others:
            network.delay_standing(host, other, 0.0)

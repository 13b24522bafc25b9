"""Faults of the assumptions of every process: clocks are steady, bytes arrive in order, and a read returns the last
write."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from minibroker.deploy.simulator.cluster import PORT, host_name
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.protocol import znodes
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.records import HEADER_SIZE, iterate_batches
from tests.simulation.storms.faults.faults_of_starts import broker_of, next_of
from tests.simulation.storms.ground import Ground

_DAY_MS = 86_400_000
_RESPONSE = 0x92
"""First byte of a response after its length: a MessagePack array of two, which begins with the correlation id."""
_CORRELATION_ID = 7
"""Its position in a request: after the length, the array's size, the API key and its version."""


# --- Clocks ----------------------------------------------------------------------------------------------------


async def clock_jump_at_a_retry(storm: Ground) -> None:
    """Lose the reply to a produce request, and let a wall clock jump before the retry. Mostly it is the first request
    of a producer and the clock of the broker that has appended its batch."""
    dice, network = storm.dice, storm.simulation.network
    storm.event("clock jump at a retry: laid")
    producer = dice.choice(storm.workload.durable_producers)
    if dice.random() < 0.7:
        storm.workload.restart(producer)

    def is_produce(arrival: Arrival) -> tuple[str, bytes] | None:
        if arrival.source != producer or arrival.target_port != PORT or request_key(arrival.data) != PRODUCE.key:
            return None
        return arrival.target, _packed_integer(arrival.data, _CORRELATION_ID)

    request = await next_of(network.taps, is_produce)
    if request is None:
        return
    broker, correlation_id = request

    def is_answer(arrival: Arrival) -> bool | None:
        if (arrival.source, arrival.target) != (broker, producer) or not _answers(arrival.data, correlation_id):
            return None
        network.reset(broker, producer)
        return True

    if not await next_of(network.taps, is_answer):
        return
    storm.event("clock jump at a retry: struck")
    host = storm.simulation.host(dice.choice([broker, broker, broker, producer]))
    jump_ms = dice.choice([_DAY_MS, _DAY_MS, _DAY_MS + 3_600_000, -_DAY_MS])
    blocked_s = dice.choice([0.0, 0.3, 1.0, 2.5])
    storm.count(
        "clock jump at a retry",
        f"{producer} gets no answer from {broker}; the clock of {host.name} jumps by {jump_ms} ms, "
        f"they do not reach each other for {blocked_s} s",
    )
    before_ms = host.clock_offset_ms
    host.clock_offset_ms += jump_ms
    network.block(producer, broker)
    try:
        await asyncio.sleep(blocked_s)
        network.unblock(producer, broker)
        await asyncio.sleep(dice.uniform(1, 5))
    finally:
        network.unblock(producer, broker)
        host.clock_offset_ms = before_ms


def _packed_integer(data: memoryview, position: int) -> bytes:
    """Return the bytes of the non-negative MessagePack integer at this position."""
    sizes = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
    return bytes(data[position : position + sizes.get(data[position], 1)]) if len(data) > position else b""


def _answers(data: memoryview, correlation_id: bytes) -> bool:
    return len(data) > 5 and data[4] == _RESPONSE and bytes(data[5 : 5 + len(correlation_id)]) == correlation_id


async def suspend(storm: Ground) -> None:
    """Suspend the machine of one broker or client: its clock jumps by seconds, minutes or a day. Its ZooKeeper client
    notices the silence first, or gets its reply first."""
    dice = storm.dice
    name = dice.choice([*map(host_name, storm.cluster.broker_ids), *storm.workload.names])
    seconds = dice.choice([5.0, 30.0, 150.0, 86_400.0])
    broker_id = broker_of(storm, name)
    process = storm.workload.process(name) if broker_id is None else storm.cluster.process(broker_id)
    if not process.running:
        return
    storm.count("suspend", f"the clock of {process.name} jumps by {seconds:g} s")
    storm.simulation.loop.jump(process, seconds)
    if broker_id is not None and dice.random() < 0.5:
        storm.simulation.zookeeper.lose_connections(name)


# --- The network -----------------------------------------------------------------------------------------------


async def late_bytes(storm: Ground) -> None:
    """Slow down the connections of a client until it opens new ones, which are fast. Bytes on the old connections reach
    the server later."""
    dice, network = storm.dice, storm.simulation.network
    brokers = [host_name(broker_id) for broker_id in storm.cluster.broker_ids]
    server = dice.choice(brokers)
    client = dice.choice([name for name in (*brokers, *brokers, *storm.workload.names) if name != server])
    storm.event("late bytes: laid")
    late_s = dice.choice([0.3, 2.0, 8.0])
    slow = network.delay_standing(client, server, late_s)
    if not slow:
        return
    try:
        await asyncio.sleep(late_s * dice.random())
    finally:
        broken = network.reset_at(client, server)  # otherwise they would stay slow
    late = 0

    def count(arrival: Arrival) -> None:
        nonlocal late
        late += arrival.is_late and arrival.source == client and arrival.target == server

    storm.count("late bytes", f"{slow} connections of {client} to {server} by {late_s} s, {broken} given up")
    network.taps.append(count)
    try:
        await asyncio.sleep(late_s)
    finally:
        network.taps.remove(count)
        if broken and late:
            storm.event("late bytes: struck")


# --- Disks -----------------------------------------------------------------------------------------------------


async def rotten_page(storm: Ground) -> None:
    """Flip a bit of a committed batch in one replica, which readers must notice. The other replicas have the original.
    Only records are hit, since their checksum covers them: brokers trust headers unchecked when they heal a replica."""
    dice = storm.dice
    broker_id = storm.some_broker()
    if broker_id is None or storm.damaged or len(storm.cluster.broker_ids) < 3:
        return
    place = _committed_record(storm, broker_id)
    if place is None:
        return
    path, position = place
    disk = storm.simulation.host(host_name(broker_id)).disk
    storm.count("rotten page", f"broker {broker_id}, {path} at {position}")
    storm.damaged.add(broker_id)
    storm.rotten.add(broker_id)
    storm.workload.pages_have_rotten = True
    reads, given_up = storm.workload.corrupt_reads, _given_up(storm, broker_id)
    disk.rot(path, position, dice.randrange(8))
    try:
        if dice.random() < 0.7:  # let a client read it
            storm.workload.reread()
        await asyncio.sleep(dice.choice([1.0, 5.0, 15.0]))
    finally:
        disk.mend()
        storm.rotten.discard(broker_id)
        if storm.workload.corrupt_reads > reads:
            storm.event("rotten page: read by a consumer")
        if _given_up(storm, broker_id) > given_up:
            storm.event("rotten page: replica given up")


def _given_up(storm: Ground, broker_id: int) -> int:
    """Return how many damaged replicas the broker has found since its start, including healed ones."""
    broker = storm.cluster.living_broker(broker_id)
    replicas = broker._replicas if broker is not None else None
    return replicas.healer.healed + len(replicas.log_dirs.healable) if replicas is not None else 0


def _committed_record(storm: Ground, broker_id: int) -> tuple[str, int] | None:
    """Return the file and the position of a byte of some batch's records below the high watermark."""
    partition = storm.replica(broker_id, storm.dice.choice(storm.partitions))
    if partition is None:
        return None
    disk = storm.simulation.host(host_name(broker_id)).disk
    places: list[tuple[str, int, int]] = []
    for segment in partition.log._segments:
        for header, start, end in iterate_batches(bytes(disk.file(segment.path).data)):
            if header.next_offset <= partition.high_watermark:
                places.append((segment.path, start + HEADER_SIZE, end))
    if not places:
        return None
    path, start, end = storm.dice.choice(places)
    return path, storm.dice.randrange(start, end)


# --- ZooKeeper -------------------------------------------------------------------------------------------------


async def stale_zookeeper(storm: Ground) -> None:
    """Serve a broker's session from a ZooKeeper server that lags: reads are stale, and watches fire late."""
    dice, zookeeper = storm.dice, storm.simulation.zookeeper
    host = host_name(dice.choice(storm.cluster.broker_ids))
    if zookeeper.is_lagging(host):
        return
    lag_s = dice.choice([0.1, 0.5, 2.0, 0.8 * storm.session_timeout_s])
    storm.count("stale ZooKeeper", f"{host} is served by a server that is {lag_s:.1f} s behind")
    zookeeper.lag(host, lag_s)
    try:
        for _ in range(dice.choice([1, 1, 3])):
            await asyncio.sleep(lag_s * dice.random())  # so that the server lags when the session arrives
            zookeeper.lose_connections(host)
            await asyncio.sleep(dice.choice([1.0, 3.0, 8.0]) * dice.uniform(0.5, 1.5))
    finally:
        if zookeeper.stale_sessions(host):
            storm.event("stale ZooKeeper: struck")
        zookeeper.unlag(host)


async def deposed_unawares(storm: Ground) -> None:
    """Remove `/controller` while its owner reads from a server that lags, so that it learns late of its deposition."""
    dice, zookeeper = storm.dice, storm.simulation.zookeeper
    in_office = storm.cluster.active_controllers()
    if not in_office:
        return
    host = host_name(dice.choice(in_office))
    if zookeeper.is_lagging(host):
        return
    lag_s = dice.choice([0.5, 2.0, 0.8 * storm.session_timeout_s])
    storm.count("deposed unawares", f"{host} hears of it {lag_s:.1f} s late")
    zookeeper.lag(host, lag_s)
    try:
        zookeeper.lose_connections(host)
        with suppress(TimeoutError):
            await storm.cluster.until(lambda: zookeeper.stale_sessions(host), within_s=1)
        if zookeeper.has(znodes.CONTROLLER):
            zookeeper.remove(znodes.CONTROLLER)
        await asyncio.sleep(lag_s / 2)
        if len(storm.cluster.active_controllers()) > 1:
            storm.event("deposed unawares: two controllers")
        await asyncio.sleep(lag_s)
    finally:
        zookeeper.unlag(host)

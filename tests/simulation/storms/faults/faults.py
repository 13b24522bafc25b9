"""The catalogue of faults. Each lasts for a while and undoes its effect at its end.

A fault is a coroutine. It picks a victim, strikes, counts itself, waits, and undoes its effect; when it is cancelled,
it does so at once. Without a victim it does nothing and is not counted. The storm's keepers restart processes that die.
A fault of a whole process holds its broker (`storm.hold`), since a second one would undo the first. Faults of networks,
disks, clocks and ZooKeeper overlap with all others.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from minibroker.broker.network.handler_pool import Continuation, RequestHandler
from minibroker.broker.network.request_channel import Request
from minibroker.broker.storage.directory import HUNG_AFTER_S
from minibroker.client.admin import Admin
from minibroker.client.cluster.offsets import CONSUMER
from minibroker.deploy.simulator.cluster import PORT, host_name, log_dir
from minibroker.deploy.simulator.network import MAX_LATENCY_S, MIN_LATENCY_S
from minibroker.protocol import znodes
from minibroker.protocol.apis import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
    Api,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from tests.simulation.storms.faults import (
    faults_of_groups,
    faults_of_moments,
    faults_of_security,
    faults_of_starts,
    faults_of_transactions,
    faults_of_worlds,
    operations_configs,
    operations_reassign,
    operations_shutdown,
)
from tests.simulation.storms.faults.operations_elect import preferred_election
from tests.simulation.storms.forgeries import forgery
from tests.simulation.storms.scene import Scene

POWER_OF_SEVERAL = "power of several"
CLIENT_APIS: list[Api[Any, Any]] = [
    PRODUCE,
    FETCH,
    LIST_OFFSETS,
    METADATA,
    CREATE_TOPICS,
    DELETE_TOPICS,
    CREATE_PARTITIONS,
    INIT_PRODUCER_ID,
    FIND_COORDINATOR,
    JOIN_GROUP,
    SYNC_GROUP,
    HEARTBEAT,
    LEAVE_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
]

Fault = Callable[[Scene], Awaitable[None]]


# --- Processes and machines ------------------------------------------------------------------------------------


async def _kill(storm: Scene) -> None:
    """Kill some broker (SIGKILL)."""
    broker_id = storm.some_broker()
    if broker_id is not None:
        storm.count("kill", f"broker {broker_id}")
        storm.take_down(broker_id, storm.cluster.kill_broker)


async def _kill_leader(storm: Scene) -> None:
    broker_id = storm.leader()
    if broker_id is not None:
        storm.count("kill leader", f"broker {broker_id}")
        storm.take_down(broker_id, storm.cluster.kill_broker)


async def _kill_controller(storm: Scene) -> None:
    for broker_id in storm.cluster.active_controllers():
        if broker_id in storm.idle_brokers():
            storm.count("kill controller", f"broker {broker_id}")
            storm.take_down(broker_id, storm.cluster.kill_broker)


async def _kill_several(storm: Scene) -> None:
    """Kill two or more brokers at the same moment."""
    victims = storm.idle_brokers()
    if len(victims) > 1:
        victims = storm.dice.sample(victims, storm.dice.randint(2, len(victims)))
        storm.count("kill several", f"brokers {victims}")
        for broker_id in victims:
            storm.take_down(broker_id, storm.cluster.kill_broker)


async def _collapse(storm: Scene) -> None:
    """Take all brokers down one after the other, one by a power cut, so that the last ones are alone for a while."""
    victims = storm.idle_brokers()
    if len(victims) < len(storm.cluster.broker_ids):
        return
    victims = storm.dice.sample(victims, len(victims))
    powerless = storm.dice.choice(victims) if not storm.damaged else None
    storm.count("collapse", f"brokers {victims}" + ("" if powerless is None else f", {powerless} by a power cut"))
    pause_s = storm.dice.choice([0.0, 0.3, 2.0])
    for broker_id in victims:
        if broker_id not in storm.idle_brokers() or (broker_id == powerless and storm.damaged):
            continue
        if broker_id == powerless:
            storm.cut_power([broker_id])
        else:
            storm.take_down(broker_id, storm.cluster.kill_broker)
        await asyncio.sleep(pause_s * storm.dice.random())


async def _power_cut(storm: Scene) -> None:
    """Cut the power of one broker, which loses what was not synced, once the last victim has caught up."""
    broker_id = storm.leader() if storm.dice.random() < 0.7 else storm.some_broker()
    if broker_id is not None and not storm.damaged:
        storm.count("power cut", f"broker {broker_id}")
        storm.cut_power([broker_id])


async def _power_of_several(storm: Scene) -> None:
    """Cut the power of two or more hosts at once. Only some storms do this: see the essay in `storm`."""
    victims = storm.idle_brokers()
    if len(victims) > 1 and not storm.damaged:
        victims = storm.dice.sample(victims, storm.dice.choice([2, len(victims)]))
        storm.count(POWER_OF_SEVERAL, f"brokers {victims}")
        storm.cut_power(victims)


async def _stop(storm: Scene) -> None:
    """Stop a broker in good order, and restart it."""
    broker_id = storm.some_broker()
    if broker_id is not None:
        with storm.hold(broker_id):
            storm.count("clean stop", f"broker {broker_id}")
            await storm.stop(broker_id)


async def _pause(storm: Scene) -> None:
    """Pause a broker (SIGSTOP), for a moment or beyond every timeout. It may be killed meanwhile."""
    broker_id = storm.leader() if storm.dice.random() < 0.5 else storm.some_broker()
    if broker_id is None:
        return
    storm.count("pause", f"broker {broker_id}")
    with storm.paused(broker_id):
        await asyncio.sleep(storm.dice.choice([0.3, 2.0, 5.0, 12.0]) * storm.dice.uniform(0.5, 1.5))
        if storm.dice.random() < 0.2:
            storm.note(f"broker {broker_id} is killed while it is paused")
            storm.take_down(broker_id, storm.cluster.kill_broker)
            return
    storm.note(f"broker {broker_id} goes on")


async def _kill_client(storm: Scene) -> None:
    name = storm.dice.choice(storm.workload.names)
    storm.count("kill client", name)
    storm.workload.restart(name)


# --- The network -----------------------------------------------------------------------------------------------


async def _partition(storm: Scene) -> None:
    """Cut one broker off from some or all of the others, in both directions or one."""
    dice = storm.dice
    victim = dice.choice(storm.cluster.broker_ids)
    others = [broker_id for broker_id in storm.cluster.broker_ids if broker_id != victim]
    if dice.random() < 0.3:
        others = [dice.choice(others)]
    ways = dice.choice(["both", "both", "to it", "from it"])
    links = [(host_name(victim), host_name(other)) for other in others if ways != "to it"]
    links += [(host_name(other), host_name(victim)) for other in others if ways != "from it"]
    storm.count("partition", f"broker {victim} from {others}, {ways}")
    try:
        with storm.blocked(links):
            await asyncio.sleep(_span_s(storm))
    finally:
        storm.note(f"broker {victim} and {others} reach each other")


async def _isolation(storm: Scene) -> None:
    """Cut one broker off from brokers, clients and ZooKeeper."""
    simulation = storm.simulation
    victim = host_name(storm.dice.choice(storm.cluster.broker_ids))
    storm.count("isolation", victim)
    simulation.network.unreachable(victim, True)
    simulation.zookeeper.cut(victim)
    try:
        await asyncio.sleep(_span_s(storm))
    finally:
        simulation.network.unreachable(victim, False)
        simulation.zookeeper.uncut(victim)
        storm.note(f"{victim} is back in the network")


async def _client_partition(storm: Scene) -> None:
    """Block the link from a client to a broker, or the one back."""
    client = storm.dice.choice(storm.workload.names)
    broker = host_name(storm.dice.choice(storm.cluster.broker_ids))
    source, target = storm.dice.choice([(client, broker), (broker, client)])
    storm.count("client partition", f"{source} to {target}")
    with storm.blocked([(source, target)]):
        await asyncio.sleep(_span_s(storm))


async def _reset(storm: Scene) -> None:
    hosts = [host_name(broker_id) for broker_id in storm.cluster.broker_ids]
    first = storm.dice.choice(hosts)
    second = storm.dice.choice([host for host in hosts + storm.workload.names if host != first])
    is_silent = storm.dice.random() < 0.3
    network = storm.simulation.network
    connections = network.silence(first, second) if is_silent else network.reset(first, second)
    if connections:
        storm.count("reset", f"{connections} connections of {first} and {second}{', silently' if is_silent else ''}")


async def _slow_network(storm: Scene) -> None:
    network, dice = storm.simulation.network, storm.dice
    high_s = dice.choice([0.01, 0.1, 0.5])
    bandwidth = dice.choice([None, 50_000.0, 1_000_000.0])
    storm.count("slow network", f"up to {high_s} s, {bandwidth or 'any number of'} bytes/s")
    network.set_latency(high_s / 10, high_s)
    network.set_bandwidth(bandwidth)
    try:
        await asyncio.sleep(_span_s(storm))
    finally:
        network.set_latency(MIN_LATENCY_S, MAX_LATENCY_S)
        network.set_bandwidth(None)


async def _refusals(storm: Scene) -> None:
    """Reject whole requests of clients before they have any effect, as overloaded brokers do."""
    dice, idle = storm.dice, storm.idle_brokers()
    if not idle:
        return
    brokers = idle if dice.random() < 0.5 else dice.sample(idle, 1)
    left = dict.fromkeys(CLIENT_APIS, dice.choice([1, 3, 10]))
    """Requests of each kind that are still to be rejected. Counting by kind covers the rare ones."""
    span_s = dice.choice([1.0, 5.0, 20.0]) * dice.uniform(0.5, 1.5)
    storm.count("refusals", f"brokers {brokers}: {left[LIST_OFFSETS]} requests of each kind within {span_s:.1f} s")
    for broker_id in brokers:
        broker = storm.cluster.broker(broker_id)

        async def handle(request: Request, handler: RequestHandler = broker._handle) -> Continuation | None:
            if left.get(request.api) and getattr(request.body, "replica_id", CONSUMER) == CONSUMER:
                left[request.api] -= 1
                storm.event(f"refusals: {request.api.name}")
                raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, "refused as a whole")
            return await handler(request)

        broker._handle = handle  # never reset, since a second fault may have wrapped it
    try:
        await asyncio.sleep(span_s)
    finally:
        left.clear()


async def _connection_storm(storm: Scene) -> None:
    """Open many connections at once, send nothing, and drop them after a while."""
    world = storm.cluster.client("stranger")
    broker = host_name(storm.dice.choice(storm.cluster.broker_ids))
    count = storm.dice.choice([20, 100])
    storm.count("connection storm", f"{count} connections to {broker}")

    async def connect() -> None:
        with suppress(OSError):
            await world.network.connect(broker, PORT, asyncio.Protocol)

    try:
        tasks = [world.process.start(connect()) for _ in range(count)]
        await asyncio.wait(tasks, timeout=storm.dice.uniform(1, 10))
    finally:
        world.process.kill()


# --- Disks and clocks ------------------------------------------------------------------------------------------


async def _failing_disk(storm: Scene) -> None:
    """Fail an I/O operation. The broker must take its log directory offline and acknowledge nothing more."""
    broker_id = storm.some_broker()
    if broker_id is None:
        return
    operation = storm.dice.choice(
        ["pwrite", "pwrite", "fdatasync", "open", "rename", "sync_directory", "pread", "pread"]
    )
    storm.count("failing disk", f"broker {broker_id}, {operation}")
    with storm.bad_disk(broker_id) as faults:
        # Several failures of reads also hit the next start.
        for _ in range(storm.dice.choice([1, 5]) if operation == "pread" else 1):
            faults.fail(operation, errno.EIO, after=storm.dice.randrange(20))
        await asyncio.sleep(_span_s(storm))


async def _full_disk(storm: Scene) -> None:
    broker_id = storm.some_broker()
    if broker_id is None:
        return
    storm.count("full disk", f"broker {broker_id}")
    with storm.bad_disk(broker_id) as faults:
        faults.free_bytes = storm.dice.randrange(3_000)
        await asyncio.sleep(_span_s(storm))


async def _broken_log_dir(storm: Scene) -> None:
    """Let one of two log directories fail or hang. The broker goes on with the other."""
    broker_id = storm.some_broker()
    if broker_id is None or storm.log_dirs < 2:
        return
    number, error = storm.dice.randrange(storm.log_dirs), storm.dice.choice([errno.EIO, errno.ENOSPC, None])
    if error is None:
        storm.count("hung log directory", f"number {number} of broker {broker_id}")
        with storm.bad_disk(broker_id):
            storm.cluster.hang_log_dir(broker_id, number)
            await asyncio.sleep(storm.dice.choice([3.0, 20.0, HUNG_AFTER_S + 15.0]))
        return
    storm.count("broken log directory", f"number {number} of broker {broker_id}: {errno.errorcode[error]}")
    with storm.bad_disk(broker_id):
        storm.cluster.break_log_dir(broker_id, number, error)
        await asyncio.sleep(_span_s(storm))


async def _moves_between_log_dirs(storm: Scene) -> None:
    """Move replicas of a broker between its two log directories, possibly back before they arrive. The broker may die
    meanwhile."""
    broker_id = storm.some_broker()
    if broker_id is None or storm.log_dirs < 2:
        return
    replicas = storm.cluster.broker(broker_id)._replicas
    partitions = list(replicas.partitions.values()) if replicas is not None else []
    if replicas is None or not partitions:
        return
    dice = storm.dice
    chosen = dice.sample(partitions, dice.randint(1, len(partitions)))
    storm.count("moves between log directories", f"{[str(p.topic_partition) for p in chosen]} of broker {broker_id}")
    for partition in chosen:
        with suppress(BrokerError):
            replicas.mover.move(partition.topic_partition, log_dir(dice.randrange(2)))
    await asyncio.sleep(dice.choice([0.0, 0.002, 0.02, 0.2, 3.0]) * dice.random())
    if dice.random() < 0.4 and broker_id in storm.idle_brokers():
        storm.event("broker died during moves between log directories")
        if storm.damaged or dice.random() < 0.5:
            storm.take_down(broker_id, storm.cluster.kill_broker)
        else:
            storm.cut_power([broker_id])


async def _slow_disk(storm: Scene) -> None:
    broker_id = storm.dice.choice(storm.cluster.broker_ids)
    delay_s = storm.dice.choice([0.05, 0.5, 3.0])
    storm.count("slow disk", f"broker {broker_id}, {delay_s} s a sync")
    with storm.bad_disk(broker_id) as faults:
        faults.sync_delay_s = delay_s
        await asyncio.sleep(_span_s(storm))


async def _out_of_descriptors(storm: Scene) -> None:
    """Leave a broker few file descriptors, or none. Most operations wait for one; one that fails half-way costs the log
    directory."""
    broker_id = storm.some_broker()
    if broker_id is None:
        return
    spare = storm.dice.choice([0, 0, 1, 2, 4])
    storm.count("out of descriptors", f"broker {broker_id}, but for {spare}")
    with storm.bad_disk(broker_id) as faults:
        faults.descriptor_limit = storm.cluster.broker(broker_id)._world.disk.descriptors().files + spare
        await asyncio.sleep(_span_s(storm))


async def _clock_jump(storm: Scene) -> None:
    """Set the wall clock of a broker or client wrong from now on."""
    name = storm.dice.choice([*map(host_name, storm.cluster.broker_ids), *storm.workload.names])
    # Less than log.retention.ms: a leader deletes records that are older by its own clock or the producer's.
    offset_ms = storm.dice.choice([-86_400_000, -5_000, -100, 0, 100, 5_000, 86_400_000])
    storm.count("clock jump", f"{name} by {offset_ms} ms")
    storm.simulation.host(name).clock_offset_ms = offset_ms


# --- ZooKeeper -------------------------------------------------------------------------------------------------


async def _zookeeper_down(storm: Scene) -> None:
    storm.count("ZooKeeper down", "for all")
    storm.simulation.zookeeper.stop()
    try:
        await asyncio.sleep(_span_s(storm))
    finally:
        storm.simulation.zookeeper.start()
        storm.note("ZooKeeper is back")


async def _zookeeper_cut(storm: Scene) -> None:
    """Cut one broker off from ZooKeeper."""
    victim = host_name(storm.dice.choice(storm.cluster.broker_ids))
    storm.count("ZooKeeper cut", victim)
    with storm.cut_from_zookeeper(victim):
        await asyncio.sleep(_span_s(storm))


async def _zookeeper_connection_loss(storm: Scene) -> None:
    """Break a broker's connections to ZooKeeper. Requests under way may be carried out or not."""
    victim = host_name(storm.dice.choice(storm.cluster.broker_ids))
    storm.count("ZooKeeper connection loss", victim)
    storm.simulation.zookeeper.lose_connections(victim)


async def _zookeeper_reply_lost(storm: Scene) -> None:
    """Carry out a broker's next write to ZooKeeper, and break the connection before the reply."""
    victim = host_name(storm.dice.choice(storm.cluster.broker_ids))
    storm.count("ZooKeeper reply lost", victim)
    storm.lose_next_reply_of.add(victim)


async def _slow_zookeeper(storm: Scene) -> None:
    """Slow ZooKeeper down for one broker or all. Much can happen between a decision and its write; sessions survive."""
    dice = storm.dice
    high_s = dice.choice([0.02, 0.1, 0.5])
    hosts = [host_name(broker_id) for broker_id in storm.cluster.broker_ids]
    if dice.random() < 0.5:
        hosts = [dice.choice(hosts)]
    storm.count("slow ZooKeeper", f"up to {high_s} s for {hosts}")
    with storm.slow_zookeeper(hosts, high_s):
        await asyncio.sleep(_span_s(storm))


async def _controller_deleted(storm: Scene) -> None:
    """Delete /controller by hand, which elects a new controller while the old one lives. The candidates may get no
    reply."""
    zookeeper = storm.simulation.zookeeper
    if zookeeper.has(znodes.CONTROLLER):
        replies_lost = storm.dice.random() < 0.3
        storm.count("controller deleted", "by hand" + ", and the next replies get lost" * replies_lost)
        if replies_lost:
            storm.lose_next_reply_of.update(map(host_name, storm.cluster.broker_ids))
        zookeeper.remove(znodes.CONTROLLER)


async def _zookeeper_expiry(storm: Scene) -> None:
    victim = host_name(storm.dice.choice(storm.cluster.broker_ids))
    storm.count("ZooKeeper expiry", victim)
    storm.simulation.zookeeper.expire(victim)


# --- What users do meanwhile -----------------------------------------------------------------------------------


async def _topic_churn(storm: Scene) -> None:
    """Create a topic and delete it some time later."""
    world = storm.cluster.client("churn")
    name = f"side-{storm.dice.randrange(1 << 30)}"
    storm.count("topic churn", name)

    async def churn() -> None:
        with suppress(MinibrokerError):
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                await admin.create_topic(name, partitions=3, replication_factor=2)
                await asyncio.sleep(world.random.uniform(0, 5))
                await admin.delete_topic(name)

    await storm.run_client(world, churn(), within_s=30)


async def _add_partitions(storm: Scene) -> None:
    await storm.growing.add_partitions()


# --- Pieces ----------------------------------------------------------------------------------------------------


def _span_s(storm: Scene) -> float:
    """Draw how long a fault lasts: mostly short, now and then beyond every timeout."""
    return storm.dice.choice([0.2, 1.0, 3.0, 8.0, 20.0]) * storm.dice.uniform(0.5, 1.5)


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "kill leader": _kill_leader,
    "kill controller": _kill_controller,
    "kill several": _kill_several,
    "collapse": _collapse,
    "power cut": _power_cut,
    POWER_OF_SEVERAL: _power_of_several,
    "clean stop": _stop,
    "controlled shutdown": operations_shutdown.controlled_shutdown,
    "pause": _pause,
    "kill client": _kill_client,
    "partition": _partition,
    "isolation": _isolation,
    "client partition": _client_partition,
    "reset": _reset,
    "slow network": _slow_network,
    "refusals": _refusals,
    "connection storm": _connection_storm,
    "failing disk": _failing_disk,
    "full disk": _full_disk,
    "broken log directory": _broken_log_dir,
    "moves between log directories": _moves_between_log_dirs,
    "slow disk": _slow_disk,
    "out of descriptors": _out_of_descriptors,
    "clock jump": _clock_jump,
    "ZooKeeper down": _zookeeper_down,
    "ZooKeeper cut": _zookeeper_cut,
    "ZooKeeper connection loss": _zookeeper_connection_loss,
    "ZooKeeper reply lost": _zookeeper_reply_lost,
    "slow ZooKeeper": _slow_zookeeper,
    "ZooKeeper expiry": _zookeeper_expiry,
    "controller deleted": _controller_deleted,
    "contested election": faults_of_moments.contested_election,
    "stale orders": faults_of_moments.stale_orders,
    "ambush of an election": faults_of_moments.ambush_of_an_election,
    "ambush of an ISR": faults_of_moments.ambush_of_an_isr,
    "ambush of a deletion": faults_of_moments.ambush_of_a_deletion,
    "ambush of a compaction": faults_of_moments.ambush_of_a_compaction,
    "topic churn": _topic_churn,
    "add partitions": _add_partitions,
    "preferred election": preferred_election,
    "reassignment": operations_reassign.reassignment,
    "forgery": forgery,
    "ambush of a start": faults_of_starts.ambush_of_a_start,
    "registration unanswered": faults_of_starts.registration_unanswered,
    "ISR write unanswered": faults_of_starts.isr_write_unanswered,
    "clock jump at a retry": faults_of_worlds.clock_jump_at_a_retry,
    "suspend": faults_of_worlds.suspend,
    "late bytes": faults_of_worlds.late_bytes,
    "rotten page": faults_of_worlds.rotten_page,
    "stale ZooKeeper": faults_of_worlds.stale_zookeeper,
    "deposed unawares": faults_of_worlds.deposed_unawares,
    "fresh client at a deposed leader": faults_of_moments.fresh_client_at_a_deposed_leader,
    "alter configs": operations_configs.alter_configs,
    "alter rules": operations_configs.alter_rules,
    "late change": operations_configs.late_change,
    "kill coordinator": faults_of_groups.kill_coordinator,
    "pause member": faults_of_groups.pause_member,
    "coordinator there and back": faults_of_groups.coordinator_there_and_back,
    "ambush of a commit": faults_of_groups.ambush_of_a_commit,
    "ambush of a coordinator": faults_of_groups.ambush_of_a_coordinator,
    "late commit": faults_of_groups.late_commit,
    "deletion at a deposed coordinator": faults_of_groups.deletion_at_a_deposed_coordinator,
    "kill transaction coordinator": faults_of_transactions.kill_transaction_coordinator,
    "transaction coordinator there and back": faults_of_transactions.transaction_coordinator_there_and_back,
    "zombie twin": faults_of_transactions.zombie_twin,
    "late transaction": faults_of_transactions.late_transaction,
    "ambush of an end": faults_of_transactions.ambush_of_an_end,
    "delayed markers": faults_of_transactions.delayed_markers,
    "rights taken": faults_of_security.rights_taken,
    "credential changed": faults_of_security.credential_changed,
}

FAULTS_OF_DISKS = ("failing disk", "full disk", "broken log directory", "out of descriptors", "rotten page")
"""Faults that may destroy a replica."""

FAULTS_OF_TRANSACTIONS = (
    *("kill transaction coordinator", "transaction coordinator there and back", "zombie twin"),
    *("late transaction", "ambush of an end", "delayed markers"),
)

FAULTS_OF_SECURITY = ("rights taken", "credential changed")

KEPT_IN_EVERY_STORM = ("kill leader", "power cut")
"""Faults without which a storm could not reach its floors."""

WORSE_ALONE = ("ambush of a start", "registration unanswered", "registration unanswered", "ISR write unanswered")
"""Faults that leave an order or an answer missing, which the next fault would replace."""

"""Requests that only brokers may send, forged by a stranger with correct epochs and other public values."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

from minibroker.deploy.simulator.cluster import CONTROL_PORT, PORT, VirtualCluster, host_name
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import (
    BROKER_AUTHENTICATE,
    BROKER_HANDSHAKE,
    FETCH,
    LEADER_AND_ISR,
    STOP_REPLICA,
    UPDATE_METADATA,
    Api,
    Plane,
)
from minibroker.protocol.connections.broker_proof import Handshake
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly

AHEAD = 1_000
"""Distance of a forged epoch from the real one."""
TIMEOUT_S = 5.0


def forged_orders(
    cluster: VirtualCluster, broker_id: int, partition: TopicPartition, controller_id: int
) -> list[tuple[Api[Any, Any], m.Message]]:
    """Return orders to a broker, as from the newest controller: to lead, to learn other leaders, to delete its
    replica."""
    zookeeper = cluster.simulation.zookeeper
    topic, index = partition.topic, partition.partition
    topic_id = znodes.decode_topic(topic, zookeeper.data(znodes.topic_path(topic))).topic_id
    broker_epoch = zookeeper.stat(znodes.broker_path(broker_id)).czxid
    controller_epoch = znodes.decode_controller_epoch(zookeeper.data(znodes.CONTROLLER_EPOCH)) + AHEAD
    controller = controller_id, controller_epoch, broker_epoch
    epoch = cluster.state(partition).leader_epoch + AHEAD
    leads = m.LeaderAndIsrPartition(index, controller_epoch, broker_id, epoch, [broker_id], 0, [broker_id], False)
    heard = m.UpdateMetadataPartition(index, controller_epoch, AHEAD, epoch, [AHEAD], 0, [AHEAD], [])
    return [
        (LEADER_AND_ISR, m.LeaderAndIsrRequest(*controller, [m.LeaderAndIsrTopic(topic, topic_id, [leads])], [])),
        (UPDATE_METADATA, m.UpdateMetadataRequest(*controller, [m.UpdateMetadataTopic(topic, topic_id, [heard])], [])),
        (
            STOP_REPLICA,
            m.StopReplicaRequest(
                *controller, [m.StopReplicaTopic(topic, topic_id, [m.StopReplicaPartition(index, epoch, True)])]
            ),
        ),
    ]


def forged_fetch(
    cluster: VirtualCluster, broker_id: int, partition: TopicPartition, replica_id: int
) -> m.FetchRequest | None:
    """Return a fetch as of a follower with all of the broker's records; None if the broker has no such partition."""
    broker = cluster.living_broker(broker_id)
    replica = None if broker is None or broker._replicas is None else broker._replicas.partitions.get(partition)
    path = znodes.broker_path(replica_id)
    if replica is None or not cluster.simulation.zookeeper.has(path):
        return None
    end = replica.log.log_end_offset
    last_epoch = replica.log.epoch_at(end - 1) if end else NO_EPOCH
    fetch = m.FetchPartition(partition.partition, replica.leader_epoch, end, last_epoch, 0, 1_000)
    topic = m.FetchTopic(partition.topic, replica.log.topic_id, [fetch])
    return m.FetchRequest(replica_id, 0, 0, 1_000, 0, [topic], cluster.simulation.zookeeper.stat(path).czxid)


async def shake_hands(connection: Connection, random: Random, broker_id: int, peer_id: int) -> Handshake:
    """Begin a handshake as broker `broker_id`. Raise BrokerError if it is rejected."""
    nonce = random.randbytes(m.PROOF_BYTES)
    answer = await connection.request(
        BROKER_HANDSHAKE, m.BrokerHandshakeRequest(broker_id, peer_id, nonce), timeout_s=TIMEOUT_S
    )
    return Handshake(broker_id, peer_id, nonce, answer.nonce)


async def authenticate(connection: Connection, proof: bytes) -> None:
    """Send a proof. Raise BrokerError if it is rejected."""
    await connection.request(BROKER_AUTHENTICATE, m.BrokerAuthenticateRequest(proof), timeout_s=TIMEOUT_S)


async def forgery(storm: Ground) -> None:
    """Send a broker forged orders or a forged follower's fetch, possibly after a proof with a wrong secret. The broker
    must reject them all."""
    cluster, dice = storm.cluster, storm.dice
    partition = dice.choice(storm.partitions)
    leader = cluster.state(partition).leader
    victim = leader if dice.random() < 0.7 and leader in cluster.broker_ids else dice.choice(cluster.broker_ids)
    pretended = dice.choice([broker_id for broker_id in cluster.broker_ids if broker_id != victim])
    if not storm.simulation.zookeeper.has(znodes.broker_path(victim)):
        return
    plane, with_proof = dice.choice(list(Plane)), dice.random() < 0.5
    storm.count(
        "forgery",
        f"to the {plane.value} plane of broker {victim} about {partition}, as broker {pretended}"
        + ", with a proof" * with_proof,
    )
    world = cluster.client("forger")

    async def forge() -> None:
        port = CONTROL_PORT if plane is Plane.CONTROL else PORT
        connection = await open_connection(
            world.network, host_name(victim), port, client_id="forger", timeout_s=TIMEOUT_S
        )
        if with_proof:
            handshake = await shake_hands(connection, world.random, pretended, victim)
            with suppress(BrokerError):
                await authenticate(connection, handshake.connecting_proof(b"not the secret of this cluster"))
        forged: list[tuple[Api[Any, Any], m.Message | None]] = (
            [*forged_orders(cluster, victim, partition, pretended)]
            if plane is Plane.CONTROL
            else [(FETCH, forged_fetch(cluster, victim, partition, pretended))]
        )
        for api, request in forged:
            if request is not None and not await is_refused(connection, api, request):
                storm.accuse(Anomaly("a forger was believed", f"{api.name} to broker {victim} about {partition}"))

    async def run() -> None:
        try:
            await forge()
        except NetworkError as error:
            storm.note(f"the forger does not reach broker {victim}: {error}")

    try:
        await asyncio.wait([world.process.start(run())], timeout=30)
    finally:
        world.process.kill()


async def is_refused(connection: Connection, api: Api[Any, Any], request: m.Message) -> bool:
    """Send a request, and return whether it is rejected because of its sender."""
    try:
        await connection.request(api, request, timeout_s=TIMEOUT_S)
    except BrokerError as error:
        return error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return False

"""Clients that authenticate themselves, on a whole cluster whose brokers use the same listener among themselves."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from minibroker.broker.security.scram_credentials import as_text
from minibroker.client.admin import Admin
from minibroker.client.administering.scram import UserErrors, UserScramCredentialUpsertion
from minibroker.client.consumer import Consumer
from minibroker.client.errors import AuthenticationFailed
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import apis, znodes
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.sasl.scram import ScramMechanism, credential_of, salted_password
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, replica_of

TOPIC = "orders"
SALT = b"sixteen bytes..."
SETTINGS = {
    "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
    "plain.sasl.jaas.config": 'PlainLoginModule required user_admin="secret" ;',
    "connections.max.reauth.ms": "5000",
}
ALICE = f"{znodes.USER_CONFIGS}/alice"


def security(mechanism: str, user: str, password: str) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


def play(program: Any) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), 3, SETTINGS)
        await cluster.start()
        admin = security("PLAIN", "admin", "secret")
        await as_admin(cluster, lambda a: a.create_topic(TOPIC, partitions=1, replication_factor=3), **admin)
        world = cluster.client("client")
        await world.process.run(program(cluster, world))

    run(main())


async def change_alice(world: VirtualWorld, password: str | None) -> None:
    """Give alice this password, or delete her credential, as another broker would."""
    session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
    texts = {}
    if password is not None:
        salted = salted_password(ScramMechanism.SCRAM_SHA_256, password, SALT, 4096)
        made = credential_of(ScramMechanism.SCRAM_SHA_256, salted, SALT, 4096)
        texts = {"SCRAM-SHA-256": as_text(made)}
    data = znodes.encode_config(texts)
    if await session.exists(ALICE) is None:
        await session.create(ALICE, data)
    else:
        await session.set(ALICE, data, -1)
    await session.create(znodes.CONFIG_CHANGE_PREFIX, znodes.encode_config_change(ALICE), sequence=True)
    await session.close()
    await asyncio.sleep(1)


async def challenge(address: str, world: VirtualWorld, user: str) -> bytes:
    """Return the salt and the iterations that this broker gives a user."""
    host, _, port = address.partition(":")
    connection = await open_connection(world.network, host, int(port), client_id="guesser", timeout_s=10)
    await connection.request(apis.SASL_HANDSHAKE, m.SaslHandshakeRequest("SCRAM-SHA-256"), timeout_s=10)
    first = m.SaslAuthenticateRequest(f"n,,n={user},r=abc".encode())
    answer = await connection.request(apis.SASL_AUTHENTICATE, first, timeout_s=10)
    connection.close()
    return answer.auth_bytes.partition(b",")[2]


@run_by(play)
async def test_an_unknown_user_gets_the_same_salt_at_every_broker_and_after_a_restart(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    addresses = cluster.bootstrap.split(",")
    salts = {await challenge(each, world, "nobody") for each in addresses}
    first = cluster.broker_ids[0]
    cluster.kill_broker(first)
    await cluster.start_broker(first)
    await asyncio.sleep(10)
    salts |= {await challenge(each, world, "nobody") for each in addresses}
    assert len(salts) == 1


@run_by(play)
async def test_names_of_users_that_cannot_be_stored_or_log_in_are_refused_alone(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    wrong = (".", "..", "ca\N{SOFT HYPHEN}rol", "\N{ROMAN NUMERAL NINE}")
    password = partial(UserScramCredentialUpsertion, mechanism="SCRAM-SHA-256", password="secret")
    async with Admin(cluster.bootstrap, world=world, **security("PLAIN", "admin", "secret")) as admin:
        with pytest.raises(UserErrors) as caught:
            await admin.alter_user_scram_credentials([password(name) for name in ("before", *wrong, "after")])
        errors = [error for error in caught.value.errors.values() if isinstance(error, BrokerError)]
        assert caught.value.errors.keys() == set(wrong)
        assert [error.code for error in errors] == [ErrorCode.UNACCEPTABLE_CREDENTIAL] * len(wrong)
        assert set(await admin.describe_user_scram_credentials()) == {"before", "after"}


@run_by(play)
async def test_a_client_outlives_a_broker_and_many_sessions_and_not_its_credential(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await change_alice(world, "wonderland")
    alice = security("SCRAM-SHA-256", "alice", "wonderland")
    sent: list[int] = []

    async def produce() -> None:
        partition = TopicPartition(TOPIC, 0)
        async with Producer(cluster.bootstrap, world=world, **alice) as producer:
            for number in range(40):
                await producer.send(TOPIC, b"%d" % number, partition=0)
                sent.append(number)
                await asyncio.sleep(1)
                if number == 5:
                    leaders = (i for i in cluster.broker_ids if replica_of(cluster, i, partition).is_leader)
                    cluster.kill_broker(next(leaders))
                elif number == 20:
                    await change_alice(world, None)

    with pytest.raises(AuthenticationFailed):
        await produce()
    assert 20 < len(sent) < 30


@run_by(play)
async def test_a_member_of_a_group_stays_in_it_by_its_heartbeats(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await change_alice(world, "wonderland")
    alice = security("SCRAM-SHA-256", "alice", "wonderland")
    settings: dict[str, Any] = {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 1_000}
    async with Consumer(cluster.bootstrap, topics=[TOPIC], group="readers", world=world, **settings, **alice) as member:
        while not member.assignment():
            await member.poll(100)
        for _ in range(30):
            await member.poll(1_000)
        await member.commit({TopicPartition(TOPIC, 0): 0})


def test_a_listener_without_sasl_is_named_once_with_the_remedy() -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), 1)
        await cluster.start()
        with pytest.raises(AuthenticationFailed) as caught:
            await as_admin(cluster, lambda a: a.describe_cluster(), **security("PLAIN", "admin", "secret"))
        assert 'use security_protocol="SSL" or "PLAINTEXT", or the port of a listener with SASL' in str(caught.value)
        assert str(caught.value).count("SASL") <= 2

    run(main())

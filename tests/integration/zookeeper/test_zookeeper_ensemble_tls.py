"""Three ZooKeeper servers that speak TLS alone: their leader dies, one of them hangs, a majority is missing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from minibroker.client.admin import Admin
from minibroker.controller.zookeeper import KazooSession
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.zookeeper import check_servers, tls_of
from minibroker.deploy.trials.trial import Trial
from minibroker.protocol.world import ConnectionLoss, SessionState
from tests.integration.zookeeper.test_zookeeper_tls import REFUSED_TIMEOUT_MS, connect
from tests.integration.zookeeper.tls_zookeeper import TlsEnsemble, tls_ensemble
from tests.integration.zookeeper.zookeeper_sessions import record_states

DEADLINE_S = 60.0
ACKNOWLEDGED = 300


@pytest.fixture
def ensemble() -> Iterator[TlsEnsemble]:
    with tls_ensemble() as servers:
        yield servers


def server_of(session: KazooSession, ensemble: TlsEnsemble) -> int:
    port = session._client._connection._socket.getpeername()[1]
    return next(server for server in range(3) if ensemble.client_port(server) == port)


@pytest.mark.slow
async def test_a_session_outlives_a_server_that_hangs_and_the_leader_and_ends_without_a_majority(
    ensemble: TlsEnsemble, caplog: pytest.LogCaptureFixture
) -> None:
    session = await connect(ensemble.addresses, ensemble.settings, session_timeout_ms=10_000)
    states = record_states(session)
    await session.create("/mine", b"x" * 900_000, ephemeral=True)
    hanging = server_of(session, ensemble)
    ensemble.pause(hanging)
    await states.until(lambda seen: seen[-1:] == [SessionState.CONNECTED])
    assert states.seen == [SessionState.SUSPENDED, SessionState.CONNECTED]
    await asyncio.to_thread(ensemble.resume, hanging)

    leader = await asyncio.to_thread(ensemble.leader)
    await asyncio.to_thread(ensemble.kill, leader)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                data, stat = await session.get("/mine")
                break
            except ConnectionLoss:
                await asyncio.sleep(0.05)
    assert (data, stat.ephemeral_owner) == (b"x" * 900_000, session.session_id)
    assert SessionState.EXPIRED not in states.seen

    caplog.clear()
    await asyncio.to_thread(ensemble.kill, (leader + 1) % 3)
    with pytest.raises(ConnectionLoss, match="if a majority of its ensemble is missing, start the other servers"):
        await connect(ensemble.addresses, ensemble.settings, REFUSED_TIMEOUT_MS)
    await states.until(lambda seen: seen[-1] is not SessionState.CONNECTED)
    # The certificate is not to blame: it was accepted before.
    said = [record.getMessage() for record in caplog.records if "has no leader at the moment" in record.getMessage()]
    assert said
    await session.close()
    with pytest.raises(
        LaunchError, match="no ZooKeeper answers at .*: if a majority of its ensemble is missing, start"
    ):
        await asyncio.to_thread(check_servers, ensemble.addresses, tls_of(ensemble.settings))


@pytest.mark.slow
def test_no_record_is_lost_when_a_server_hangs_and_the_ensembles_leader_dies_under_load(
    local_cluster: Callable[..., LocalCluster], ensemble: TlsEnsemble
) -> None:
    cluster = local_cluster(brokers=3, settings=ensemble.settings, zookeeper=f"{ensemble.addresses}/clusters/orders")
    assert cluster.status().problems() == []

    async def scenario() -> None:
        async with Admin(cluster.bootstrap()) as admin:
            await admin.create_topic("orders", partitions=3, replication_factor=3)
            values = (b"line %d" % number for number in itertools.count())
            trial = Trial(cluster.bootstrap(), "orders", 3, values, records_per_second=1_000)
            async with trial.sending():
                await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                leader = await asyncio.to_thread(ensemble.leader)
                ensemble.pause((leader + 1) % 3)
                await admin.create_topic("meanwhile", partitions=3, replication_factor=3)
                await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                await asyncio.to_thread(ensemble.resume, (leader + 1) % 3)
                await asyncio.to_thread(lambda: ensemble.kill(ensemble.leader()))
                await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                await admin.create_topic("later", partitions=3, replication_factor=3)
                await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
            verdict = await trial.verdict()
        assert not trial.failures
        assert verdict.flawless, verdict

    asyncio.run(scenario())
    logs = "".join(cluster.log_of(broker).read_text() for broker in (1, 2, 3))
    assert "Traceback" not in logs


@pytest.mark.parametrize("servers", [1, 2])
async def test_the_server_of_the_last_connection_is_asked_after_the_others(servers: int) -> None:
    listening = [await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0) for _ in range(servers)]
    addresses = [each.sockets[0].getsockname() for each in listening]
    session = KazooSession(
        ",".join(f"{host}:{port}" for host, port in addresses), 6_000, logging.getLogger("tests.zookeeper")
    )

    def ask(number: int) -> bool:
        try:
            session._handler.create_connection(addresses[number], addresses[number][0], 5).close()
        except ConnectionAbortedError:
            return False
        return True

    if servers == 1:
        assert [ask(0), ask(0)] == [True, True]
    else:
        assert [ask(0), ask(0), ask(0), ask(1), ask(0), ask(0)] == [True, False, True, True, True, False]
    for each in listening:
        each.close()
    await session.close()

"""Sessions by TLS with a real ZooKeeper that demands certificates, and what is said if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minibroker.broker.settings.credentials import zookeeper_tls
from minibroker.broker.settings.parsing import broker_config
from minibroker.broker.settings.types import InvalidConfig
from minibroker.client.admin import Admin
from minibroker.controller.zookeeper import KazooSession, KazooZooKeeper
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.who import AllBrokers, LeaderOf
from minibroker.deploy.local.zookeeper import check_servers, tls_of
from minibroker.deploy.trials.trial import Trial
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import ConnectionLoss, SessionState
from tests.integration.zookeeper.tls_zookeeper import PASSWORD, TlsZooKeeper, in_pkcs8, tls_zookeeper
from tests.integration.zookeeper.zookeeper_sessions import CONNECT_TIMEOUT_MS, SESSION_TIMEOUT_MS, record_states

DEADLINE_S = 60.0
ACKNOWLEDGED = 200
REFUSED_TIMEOUT_MS = 4_000
"""For sessions that are never opened. A handshake of a busy JVM takes a second."""


@pytest.fixture(scope="module")
def secured() -> Iterator[TlsZooKeeper]:
    with tls_zookeeper() as server:
        yield server


@pytest.fixture
def strange(tmp_path: Path) -> Certificates:
    """An authority that the server neither knows nor uses."""
    return Certificates(tmp_path / "strange")


async def connect(
    servers: str,
    settings: dict[str, str],
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
) -> KazooSession:
    config = broker_config({"broker.id": "1", "log.dirs": "/unused", "zookeeper.connect": servers, **settings})
    zookeeper = KazooZooKeeper()
    contexts = zookeeper_tls(config)
    if contexts is not None:
        zookeeper.encrypt(contexts)
    return await zookeeper.connect(servers, session_timeout_ms, connect_timeout_ms)


async def test_a_session_by_tls_goes_on_after_a_kill_of_zookeeper_with_certificates_of_another_authority() -> None:
    """Without a restart of the client, which reads its files for each connection."""
    with tls_zookeeper() as server:
        session = await connect(server.address, server.settings)
        states = record_states(session)
        await session.create("/mine", b"x" * 900_000, ephemeral=True)
        await asyncio.to_thread(server.kill)
        server.replace_authority()
        await asyncio.to_thread(server.start)
        await states.until(lambda seen: SessionState.CONNECTED in seen)
        assert states.seen == [SessionState.SUSPENDED, SessionState.CONNECTED]
        data, stat = await session.get("/mine")
        assert data == b"x" * 900_000
        assert stat.ephemeral_owner == session.session_id
        await asyncio.gather(*(session.exists("/mine") for _ in range(2_000)))
        await session.close()


@pytest.mark.slow
async def test_a_file_that_cannot_be_used_later_leaves_the_previous_certificate_in_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tls_zookeeper() as server:
        session = await connect(server.address, server.settings)
        states = record_states(session)
        keystore = server.settings["zookeeper.ssl.keystore.location"]
        await asyncio.to_thread(Path(keystore).write_text, "half of a file")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await states.until(lambda seen: SessionState.CONNECTED in seen)
        await session.close()
    complaints = [record.getMessage() for record in caplog.records if "previous certificates" in record.getMessage()]
    assert len(complaints) == 1
    assert complaints[0].startswith(f"zookeeper.ssl.keystore.location={keystore} cannot be used: ")


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["authority", "certificate", "no certificate", "no truststore", "plaintext"])
async def test_a_session_that_tls_prevents_names_the_reason_and_the_remedy(
    refused: str, secured: TlsZooKeeper, strange: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dict(secured.settings)
    said = r"its log says why \(with ssl.clientAuth=need, it needs a certificate in zookeeper.ssl.keystore.location"
    match refused:
        case "authority":
            settings["zookeeper.ssl.truststore.location"] = str(strange.authority)
            said = "certificate is not signed by a trusted authority .*: give .* as zookeeper.ssl.truststore.location"
        case "certificate":
            settings["zookeeper.ssl.keystore.location"] = str(strange.client("stranger"))
        case "no certificate":
            del settings["zookeeper.ssl.keystore.location"]
        case "no truststore":
            del settings["zookeeper.ssl.truststore.location"]
            said = "give the authority's certificate as zookeeper.ssl.truststore.location"
        case _:
            settings = {}
            said = "if it is a secureClientPort, set zookeeper.ssl.client.enable=true"
    with pytest.raises(ConnectionLoss, match=said):
        await connect(secured.address, settings, REFUSED_TIMEOUT_MS)
    warnings = [record.getMessage() for record in caplog.records if record.name == "minibroker.zookeeper"]
    if settings:  # each reason once, and at once
        assert len(warnings) == len(set(warnings)) >= 1
        assert re.search(said, warnings[0])


@pytest.mark.slow
async def test_a_port_without_tls_is_named(zookeeper: str, secured: TlsZooKeeper) -> None:
    with pytest.raises(ConnectionLoss, match="if that port is ZooKeeper's clientPort, give its secureClientPort"):
        await connect(zookeeper, secured.settings, REFUSED_TIMEOUT_MS)


@pytest.mark.slow
async def test_the_host_name_is_checked_unless_the_algorithm_is_empty(tmp_path: Path) -> None:
    with tls_zookeeper() as server:
        _, _, port = server.address.partition(":")
        by_another_name = f"127.1:{port}"  # an address, but no name that the certificate has
        with pytest.raises(ConnectionLoss, match="certificate is not for '127.1'.*add the name to it"):
            await connect(by_another_name, server.settings, REFUSED_TIMEOUT_MS)
        unchecked = {**server.settings, "zookeeper.ssl.endpoint.identification.algorithm": ""}
        session = await connect(by_another_name, unchecked)
        await session.close()


@pytest.mark.slow
async def test_a_server_that_accepts_connections_and_answers_nothing_does_not_take_the_whole_session_timeout(
    secured: TlsZooKeeper,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionLoss, match="the TLS handshake was not complete after 1 s"),
    ):
        await connect(f"127.0.0.1:{silent.getsockname()[1]}", secured.settings, 4_000, session_timeout_ms=2_000)


@pytest.mark.slow
async def test_a_server_that_tls_refuses_is_asked_once_per_second(secured: TlsZooKeeper, strange: Certificates) -> None:
    """ZooKeeper logs kilobytes for each of these handshakes."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(strange.broker)
    handshakes = 0

    def accept(below: socket.socket) -> None:
        nonlocal handshakes
        with contextlib.suppress(OSError):  # closed at the end of the test
            while True:
                connection, _ = below.accept()
                handshakes += 1
                with contextlib.suppress(OSError):
                    serving.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, args=(server,))
        thread.start()
        with pytest.raises(ConnectionLoss, match="not signed by a trusted authority"):
            await connect(f"127.0.0.1:{server.getsockname()[1]}", secured.settings, 2_500)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert 1 <= handshakes <= 3


@pytest.mark.slow
async def test_a_paused_zookeeper_suspends_the_session_which_then_goes_on_or_ends() -> None:
    with tls_zookeeper() as server:
        session = await connect(server.address, server.settings, session_timeout_ms=2_000)
        states = record_states(session)
        server.pause()
        await states.until(lambda seen: SessionState.SUSPENDED in seen)
        server.resume()
        await states.until(lambda seen: seen[-1] in (SessionState.CONNECTED, SessionState.EXPIRED))
        await session.close()


async def test_answers_that_share_a_tls_record_are_all_read(strange: Certificates) -> None:
    """Poll sees nothing of those that are decrypted already."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(strange.broker)
    connecting = ssl.create_default_context(cafile=str(strange.authority))
    one, other = socket.socketpair()

    def answer() -> None:
        with serving.wrap_socket(one, server_side=True) as server:
            server.sendall(b"12")
            server.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    session = KazooSession("127.0.0.1:1", SESSION_TIMEOUT_MS, logging.getLogger(), contexts=lambda: connecting)
    with connecting.wrap_socket(other, server_hostname="localhost") as client, socket.socket() as unused:
        assert client.recv(1) == b"1"
        unused.bind(("127.0.0.1", 0))
        unused.listen()
        assert session._handler.select([client, unused], [], [], 0.0) == ([client], [], [])
    thread.join()
    await session.close()


@pytest.mark.parametrize("unusable", ["missing", "not PEM", "encrypted", "wrong password", "truststore"])
def test_files_that_cannot_be_used_are_named_at_the_start(unusable: str, tmp_path: Path, strange: Certificates) -> None:
    keystore, truststore, password = tmp_path / "client.pem", strange.authority, PASSWORD
    keystore.write_bytes(in_pkcs8(strange.client("broker"), PASSWORD))
    said = f"zookeeper.ssl.keystore.location={keystore} cannot be used: "
    match unusable:
        case "missing":
            keystore.unlink()
            said += "there is no file"
        case "not PEM":
            keystore.write_text("nothing")
        case "encrypted":
            password = ""
            said += "the private key is encrypted: set zookeeper.ssl.keystore.password to its password"
        case "wrong password":
            password = "another"
            said += "the private key cannot be decrypted, or is not PEM: set zookeeper.ssl.keystore.password"
        case _:
            truststore = tmp_path / "missing.pem"
            said = f"zookeeper.ssl.truststore.location={truststore} cannot be used: there is no file"
    settings = {
        "zookeeper.ssl.client.enable": "true",
        "zookeeper.ssl.keystore.location": str(keystore),
        "zookeeper.ssl.truststore.location": str(truststore),
        **({"zookeeper.ssl.keystore.password": password} if password else {}),
    }
    config = broker_config({"broker.id": "1", "log.dirs": "/unused", "zookeeper.connect": "unused:1", **settings})
    with pytest.raises(InvalidConfig) as refused:
        zookeeper_tls(config)
    assert str(refused.value).startswith(said)
    with pytest.raises(LaunchError) as of_launcher:
        tls_of(settings)
    assert str(of_launcher.value) == str(refused.value)


def test_files_without_the_setting_that_enables_tls_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"broker.id": "1", "log.dirs": "/unused", "zookeeper.connect": "unused:1"}
    assert zookeeper_tls(broker_config({**settings, "zookeeper.ssl.truststore.location": "/ca.pem"})) is None
    assert "zookeeper.ssl.truststore.location=/ca.pem has no effect" in caplog.text


def test_the_launcher_names_the_reason_as_well(secured: TlsZooKeeper, strange: Certificates) -> None:
    check_servers(secured.address, tls_of(secured.settings))
    strangers = {**secured.settings, "zookeeper.ssl.truststore.location": str(strange.authority)}
    with pytest.raises(LaunchError, match=f"no ZooKeeper answers at {secured.address}: .*not signed by a trusted"):
        check_servers(secured.address, tls_of(strangers))
    del strangers["zookeeper.ssl.keystore.location"]
    strangers["zookeeper.ssl.truststore.location"] = secured.settings["zookeeper.ssl.truststore.location"]
    with pytest.raises(LaunchError, match="ZooKeeper refuses the TLS handshake"):
        check_servers(secured.address, tls_of(strangers))
    with pytest.raises(LaunchError, match="if it is a secureClientPort, give --override zookeeper.ssl.client.enable"):
        check_servers(secured.address)


def test_the_launcher_refuses_tls_for_its_own_zookeeper(local_cluster: Callable[..., LocalCluster]) -> None:
    with pytest.raises(LaunchError, match="zookeeper.ssl.client.enable=true, but .* speaks no TLS: give --zookeeper"):
        local_cluster(brokers=1, settings={"zookeeper.ssl.client.enable": "true"})


@pytest.mark.slow
def test_a_broker_that_does_not_trust_zookeeper_ends_with_one_line(
    secured: TlsZooKeeper, strange: Certificates, tmp_path: Path
) -> None:
    overrides = {
        "broker.id": "9",
        "log.dirs": str(tmp_path / "broker-9"),
        "listeners": f"PLAINTEXT://127.0.0.1:{free_ports(1)[0]},CONTROLLER://127.0.0.1:0",
        "zookeeper.connect": secured.address,
        "zookeeper.connection.timeout.ms": str(REFUSED_TIMEOUT_MS),
        **secured.settings,
        "zookeeper.ssl.truststore.location": str(strange.authority),
    }
    arguments = [text for pair in overrides.items() for text in ("--override", "=".join(pair))]
    refused = subprocess.run(
        [sys.executable, "-m", "minibroker.broker", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    *_, last = refused.stderr.splitlines()
    assert last.startswith(f"error: no ZooKeeper session at zookeeper.connect={secured.address}: ")
    assert last.endswith("give the authority's certificate as zookeeper.ssl.truststore.location")
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_no_record_is_lost_by_kills_of_a_leader_and_of_zookeeper_and_new_certificates(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    with tls_zookeeper() as server:
        cluster = local_cluster(brokers=3, settings=server.settings, zookeeper=server.address)
        assert cluster.status().problems() == []

        async def scenario() -> None:
            async with Admin(cluster.bootstrap()) as admin:
                await admin.create_topic("orders", partitions=3, replication_factor=3)
                values = (b"line %d" % number for number in itertools.count())
                trial = Trial(cluster.bootstrap(), "orders", 3, values, records_per_second=1_000)
                async with trial.sending():
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                    await asyncio.to_thread(cluster.kill, LeaderOf(TopicPartition("orders", 0)))
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                    await asyncio.to_thread(cluster.start, AllBrokers())
                    await asyncio.to_thread(server.kill)
                    server.replace_authority()
                    await asyncio.to_thread(server.start)
                    await admin.create_topic("later", partitions=3, replication_factor=3)
                    await asyncio.to_thread(cluster.kill, LeaderOf(TopicPartition("later", 0)))
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                verdict = await trial.verdict()
            assert not trial.failures
            assert verdict.flawless, verdict

        asyncio.run(scenario())
        logs = "".join(cluster.log_of(broker).read_text() for broker in (1, 2, 3))
        assert "Traceback" not in logs
        assert PASSWORD not in logs

"""TLS under the network layer, on real sockets: what comes before the first request."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from minibroker.broker.network import acceptor
from minibroker.broker.network.server import Request, SocketServer
from minibroker.broker.network.settings import NetworkSettings
from minibroker.broker.settings.certificates import Certificates as BrokerCertificates
from minibroker.broker.settings.parsing import broker_config
from minibroker.broker.settings.types import InvalidConfig
from minibroker.controller.governing.crash_detection import CrashDetector
from minibroker.deploy.local.certificates import Certificates
from minibroker.protocol.apis import METADATA, Plane
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.connections.tls import TlsNetwork
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import MetadataRequest
from minibroker.protocol.model import CONTROL_LISTENER, Endpoint, RegisteredBroker
from minibroker.protocol.world import real
from minibroker.protocol.world.real import RealWorld
from tests.waiting import until

SETTINGS = {"broker.id": "1", "log.dirs": "/tmp/unused", "zookeeper.connect": "nowhere:1"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "HANDSHAKE_TIMEOUT_S", 0.3)


async def who_am_i(request: Request) -> None:
    raise BrokerError(ErrorCode.INVALID_REQUEST, str(request.principal))


class Serving:
    def __init__(self, server: SocketServer, ports: dict[str, int], world: RealWorld) -> None:
        self.server = server
        self.port = ports["SSL"]
        self.control_port = ports[CONTROL_LISTENER]
        self.world = world

    async def connect(self, context: ssl.SSLContext) -> Connection:
        network = TlsNetwork(self.world.network, connecting=lambda: context)
        return await open_connection(network, "127.0.0.1", self.port, client_id="test", timeout_s=5)

    async def principal(self, context: ssl.SSLContext) -> str:
        connection = await self.connect(context)
        try:
            with pytest.raises(BrokerError) as error:
                await connection.request(METADATA, MetadataRequest([]), timeout_s=5)
            return error.value.detail.removeprefix("Metadata: ")
        finally:
            connection.close()


@asynccontextmanager
async def serving(settings: dict[str, str]) -> AsyncIterator[Serving]:
    world = RealWorld()
    config = broker_config({**SETTINGS, "listeners": "SSL://127.0.0.1:0", **settings})
    server = SocketServer(world, NetworkSettings(), who_am_i, BrokerCertificates(config, world))
    ports = await server.bind([("SSL", "127.0.0.1", 0, Plane.DATA), (CONTROL_LISTENER, "127.0.0.1", 0, Plane.CONTROL)])
    server.start()
    try:
        yield Serving(server, ports, world)
    finally:
        async with asyncio.timeout(60):
            await server.close(grace_s=0.05)
        world.close()


def client(certificates: Certificates, name: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates.authority))
    if name is not None:
        context.load_cert_chain(certificates.client(name))
    return context


@pytest.mark.parametrize(
    ("rules", "name", "principal"),
    [
        ("DEFAULT", "alice", r"^User:OU=.*,O=.*,CN=alice$|^User:CN=alice,OU=.*,O=.*$"),
        ("DEFAULT", None, "^User:ANONYMOUS$"),
        ("RULE:^CN=(.*?),.*$/$1/U", "alice", "^User:ALICE$"),
        ("RULE:^CN=bob,.*$/b/,RULE:^CN=(.*?),.*$/x-$1/L, DEFAULT", "Alice", "^User:x-alice$"),
    ],
)
def test_the_certificate_of_a_client_is_its_principal(
    certificates: Certificates, rules: str, name: str | None, principal: str
) -> None:
    async def run() -> str:
        async with serving({**certificates.settings(), "ssl.principal.mapping.rules": rules}) as up:
            return await up.principal(client(certificates, name))

    found = uvloop.run(run())
    assert re.search(principal, found), found


def test_a_client_is_refused_whose_name_no_rule_matches(certificates: Certificates) -> None:
    async def run() -> None:
        settings = {**certificates.settings(), "ssl.principal.mapping.rules": "RULE:^CN=bob,.*$/b/"}
        async with serving(settings) as up:
            connection = await up.connect(client(certificates, "alice"))
            with pytest.raises(NetworkError):
                await connection.request(METADATA, MetadataRequest([]), timeout_s=5)
            await until(lambda: not up.server.planes[Plane.DATA].quotas.total)

    uvloop.run(run())


def test_a_required_certificate_that_is_missing_is_told_to_both_sides(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving({**certificates.settings(), "ssl.client.auth": "required"}) as up:
            connection = await up.connect(client(certificates))
            with pytest.raises(NetworkError, match="asks for one"):
                await connection.request(METADATA, MetadataRequest([]), timeout_s=5)
            await until(lambda: up.server.metrics.handshakes_failed == 1)

    uvloop.run(run())
    assert "it sent no certificate, but ssl.client.auth=required" in caplog.text


def test_silent_connections_are_closed_at_the_deadline_and_hold_up_nobody(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(certificates.settings()) as up:
            silent = [await asyncio.open_connection("127.0.0.1", up.port) for _ in range(20)]
            assert await up.principal(client(certificates)) == "User:ANONYMOUS"
            assert up.server.open_connections()["SSL"] <= 1
            for reader, writer in silent:
                assert await reader.read(10) == b""
                writer.close()
            await until(lambda: up.server.metrics.handshakes_failed == 20)
            await until(lambda: not up.server.planes[Plane.DATA].quotas.total)

    uvloop.run(run())
    assert "its TLS handshake was not complete in time" in caplog.text


def test_handshakes_that_hang_fill_no_queue_of_new_connections_and_a_server_closes_in_the_middle_of_them(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "HANDSHAKE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(acceptor, "NEW_CONNECTIONS", 1)

    async def run() -> None:
        async with serving(certificates.settings()) as up:
            hanging = [await asyncio.open_connection("127.0.0.1", up.port) for _ in range(10)]
            assert await up.principal(client(certificates)) == "User:ANONYMOUS"
        assert up.server.planes[Plane.DATA].quotas.total == 0
        for reader, writer in hanging:
            assert await reader.read(10) == b""
            writer.close()

    uvloop.run(run())


@pytest.mark.parametrize(
    ("beginning", "text"),
    [
        (b"\0\0\0\x20\0\x12\0\0\0\0\0\1\0\x07rdkafka", "it sent plaintext"),
        (b"\0\0\0\x20\x95\x12\0\0\0\0\0\1\0\x07native.", "it sent plaintext"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", "it sent HTTP in plaintext"),
    ],
)
def test_plaintext_at_a_listener_with_tls_is_named_in_the_log(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, beginning: bytes, text: str
) -> None:
    async def run() -> None:
        async with serving(certificates.settings()) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(beginning)
            assert await reader.read(10) == b""
            writer.close()
            await until(lambda: up.server.metrics.handshakes_failed == 1)

    uvloop.run(run())
    assert text in caplog.text


@pytest.mark.parametrize("trusts", ["the same authority", "another authority", "none of them is TLS"])
def test_the_outcome_of_a_handshake_is_no_evidence_of_a_crash(
    certificates: Certificates, tmp_path: Path, trusts: str
) -> None:
    """A broker is watched for six times the time of detection and then dies, which is detected at once."""
    ours = certificates if trusts == "the same authority" else Certificates(tmp_path)
    context = client(ours)

    async def in_touch() -> None:
        pass

    async def run() -> None:
        settings = dict(certificates.settings())
        if trusts == "none of them is TLS":
            settings["listener.security.protocol.map"] = f"SSL:SSL,{CONTROL_LISTENER}:PLAINTEXT"
        suspected: list[float] = []
        world = RealWorld()
        detector = CrashDetector(
            world.network,
            world.clock,
            200,
            in_touch,
            lambda endpoint: TlsNetwork(world.network, connecting=lambda: context),
        )
        detector.on_suspicion(lambda *_: suspected.append(world.clock.monotonic()))
        async with serving(settings) as up:
            endpoint = Endpoint(CONTROL_LISTENER, "127.0.0.1", up.control_port)
            detector.follow([RegisteredBroker(1, 1, (endpoint,))])
            await asyncio.sleep(1.2)
            assert not suspected
        await until(lambda: bool(suspected))
        await detector.close()
        world.close()

    uvloop.run(run())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "but has no certificate: set ssl.keystore.location"),
        ({"ssl.keystore.location": "/nowhere.pem"}, "cannot be read"),
        ({"ssl.keystore.location": "{ca}"}, "must have a certificate chain and its private key"),
        ({"ssl.keystore.location": "{broker}", "ssl.client.auth": "required"}, "set ssl.truststore.location"),
        (
            {"ssl.keystore.location": "{broker}", "ssl.truststore.location": "/dev/null"},
            "no certificate of an authority",
        ),
        ({"ssl.keystore.location": "{broker}", "ssl.principal.mapping.rules": "RULE:(/x/"}, "no regular expression"),
    ],
)
def test_unusable_settings_are_reported_with_their_remedy(
    certificates: Certificates, settings: dict[str, str], text: str
) -> None:
    files = {"ca": certificates.authority, "broker": certificates.broker}
    filled = {name: value.format(**files) if value.startswith("{") else value for name, value in settings.items()}
    world = RealWorld()
    with pytest.raises(InvalidConfig, match=text):
        BrokerCertificates(broker_config({**SETTINGS, "listeners": "SSL://127.0.0.1:0", **filled}), world)
    world.close()


def test_certificates_as_texts_and_settings_of_one_listener(certificates: Certificates) -> None:
    pem = certificates.broker.read_text()
    key_end = pem.index("-----BEGIN CERTIFICATE")

    async def run() -> str:
        settings = {
            "listener.name.ssl.ssl.keystore.key": pem[:key_end].replace("\n", "\\n"),
            "listener.name.ssl.ssl.keystore.certificate.chain": pem[key_end:],
            "ssl.truststore.certificates": certificates.authority.read_text(),
            "ssl.client.auth": "required",
            "listener.name.ssl.ssl.client.auth": "requested",
            "listener.security.protocol.map": f"{CONTROL_LISTENER}:PLAINTEXT",
        }
        async with serving(settings) as up:
            return await up.principal(client(certificates))

    assert uvloop.run(run()) == "User:ANONYMOUS"

"""Clients that authenticate themselves to a live broker by SASL, in Kafka's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.server
import importlib
import json
import re
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.abc
import aiokafka.errors
import confluent_kafka
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from minibroker import sync
from minibroker.client.errors import AuthenticationFailed
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from tests.waiting import until_true

admins: Any = importlib.import_module("confluent_kafka.admin")  # its type stubs are incomplete
with warnings.catch_warnings():  # it reads its schemas in a way that Python 3.11 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    kafka: Any = importlib.import_module("kafka")

JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_admin="secret" user_alice="wonderland" ;'
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


@contextlib.contextmanager
def aiokafka_leaves_sockets() -> Iterator[None]:
    """It does not close connections whose authentication has failed: let the warnings of that end here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


class Up:
    def __init__(self, cluster: LocalCluster, port: int, metrics_port: int) -> None:
        self.cluster = cluster
        self.bootstrap = f"127.0.0.1:{port}"
        self.metrics_port = metrics_port

    def librdkafka(self, mechanism: str = "PLAIN", user: str = "admin", password: str = "secret") -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
            "error_cb": lambda error: None,
        }

    def python(self, mechanism: str, user: str, password: str) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": mechanism,
            "sasl_plain_username": user,
            "sasl_plain_password": password,
        }

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as response:
            text = response.read().decode()
        found = re.search(rf"^kafka_server_socket_server_metrics_{name}_total ([0-9.]+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def log(self) -> str:
        return self.cluster.log_of(1).read_text()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory: Path = tmp_path_factory.mktemp("sasl")
    plain, secured, metrics = free_ports(3)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},CLIENTS://127.0.0.1:{secured},CONTROLLER://127.0.0.1:0",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "listener.name.clients.plain.sasl.jaas.config": JAAS,
        "metrics.listener": f"127.0.0.1:{metrics}",
        "connections.max.reauth.ms": "2000",
    }
    cluster = LocalCluster(directory / "cluster")
    try:
        cluster.up(1, plain, None, settings)
        until_true(lambda: len(cluster.view().brokers) == 1)
        up = Up(cluster, secured, metrics)
        admin = admins.AdminClient(up.librdkafka())
        admin.create_topics([admins.NewTopic("orders", 1, 1)])["orders"].result(60)
        set_password(up, admin, "alice", "wonderland")
        yield up
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)


def set_password(up: Up, admin: Any, user: str, password: str) -> None:
    """Return once the broker has read it."""
    changes = [
        admins.UserScramCredentialUpsertion(user, admins.ScramCredentialInfo(mechanism, 4096), password.encode())
        for mechanism in (admins.ScramMechanism.SCRAM_SHA_256, admins.ScramMechanism.SCRAM_SHA_512)
    ]
    for change in changes:
        admin.alter_user_scram_credentials([change])[user].result(60)
    until_true(lambda: all(accepts(up, mechanism, user, password) for mechanism in MECHANISMS[1:]))


def accepts(up: Up, mechanism: Any, user: str, password: str) -> bool:
    login: Any = {"sasl_mechanism": mechanism, "sasl_plain_username": user, "sasl_plain_password": password}
    try:
        with sync.Admin(up.bootstrap, security_protocol="SASL_PLAINTEXT", **login):
            return True
    except AuthenticationFailed:
        return False


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_produces(up: Up, mechanism: str) -> None:
    producer = confluent_kafka.Producer(up.librdkafka(mechanism, "alice", "wonderland"))
    outcomes: list[Any] = []
    producer.produce("orders", b"rd", on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(60) == 0
    assert outcomes == [None]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_produces(up: Up, mechanism: str) -> None:
    producer = kafka.KafkaProducer(**up.python(mechanism, "alice", "wonderland"))
    assert producer.send("orders", b"kp").get(60).offset >= 0
    producer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_aiokafka_produces(up: Up, mechanism: str) -> None:
    async def run() -> int:
        async with aiokafka.AIOKafkaProducer(**up.python(mechanism, "alice", "wonderland")) as producer:
            return int((await producer.send_and_wait("orders", b"ak")).offset)

    assert asyncio.run(run()) >= 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("user", "password"), [("alice", "looking glass"), ("nobody", "wonderland")])
def test_a_wrong_password_and_an_unknown_user_get_the_same_answer(
    up: Up, caplog: pytest.LogCaptureFixture, mechanism: str, user: str, password: str
) -> None:
    failed = up.metric("failed_authentication")

    async def run() -> str:
        producer = aiokafka.AIOKafkaProducer(**up.python(mechanism, user, password))
        try:
            await producer.start()
        except aiokafka.errors.KafkaConnectionError as error:
            return str(error)
        finally:
            await producer.stop()
        return "authenticated"

    with aiokafka_leaves_sockets():
        assert "Unable to bootstrap" in asyncio.run(run())
    assert f"invalid credentials with SASL mechanism {mechanism}" in caplog.text
    assert up.metric("failed_authentication") > failed
    assert "did not authenticate" in up.log()
    assert password not in up.log()


def test_a_client_authenticates_itself_again_on_its_connection(up: Up) -> None:
    producer = confluent_kafka.Producer(up.librdkafka("SCRAM-SHA-512", "alice", "wonderland"))
    outcomes: list[Any] = []

    def authenticates_in_time() -> bool:
        """A client that does not run for a moment is late, and is then disconnected."""
        again, killed = up.metric("successful_reauthentication"), up.metric("expired_connections_killed")
        ends_at = time.monotonic() + 5
        while time.monotonic() < ends_at:
            producer.produce("orders", b"again", on_delivery=lambda error, _: outcomes.append(error))
            producer.flush(60)
            time.sleep(0.05)
        return up.metric("successful_reauthentication") > again and up.metric("expired_connections_killed") == killed

    until_true(authenticates_in_time)
    assert set(outcomes) == {None}


def test_a_deleted_credential_is_refused_and_the_others_of_the_user_stay(up: Up) -> None:
    admin = admins.AdminClient(up.librdkafka())
    set_password(up, admin, "bob", "builder")
    described = admin.describe_user_scram_credentials(["bob"])["bob"].result(60)
    assert [(each.mechanism, each.iterations) for each in described.scram_credential_infos] == [
        (admins.ScramMechanism.SCRAM_SHA_256, 4096),
        (admins.ScramMechanism.SCRAM_SHA_512, 4096),
    ]
    producer = kafka.KafkaProducer(**up.python("SCRAM-SHA-256", "bob", "builder"))
    producer.close()
    deletion = admins.UserScramCredentialDeletion("bob", admins.ScramMechanism.SCRAM_SHA_256)
    admin.alter_user_scram_credentials([deletion])["bob"].result(60)

    def is_refused() -> bool:
        try:
            kafka.KafkaProducer(**up.python("SCRAM-SHA-256", "bob", "builder"), bootstrap_timeout_ms=2_000).close()
        except kafka.errors.KafkaError:
            return True
        return False

    until_true(is_refused)
    kafka.KafkaProducer(**up.python("SCRAM-SHA-512", "bob", "builder")).close()
    refused = admin.alter_user_scram_credentials([deletion])["bob"]
    with pytest.raises(confluent_kafka.KafkaException, match="no credential"):
        refused.result(60)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


def signed(key: Any, **claims: Any) -> str:
    made = {"sub": "alice", "aud": "brokers", "exp": int(time.time()) + 60, **claims}
    return jwt.encode(made, key, algorithm="RS256", headers={"kid": "one"})


def public_keys(key: Any, key_id: str = "one") -> str:
    made = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return json.dumps({"keys": [{**made, "kid": key_id, "use": "sig"}]})


class Provider(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_tokens_are_accepted_if_they_are_signed_and_valid(tmp_path: Path, scheme: str) -> None:
    key, other = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
    (tmp_path / "keys.json").write_text(public_keys(other, "two"))
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = (
            (tmp_path / "keys.json").as_uri()
            if scheme == "file"
            else f"http://127.0.0.1:{server.server_port}/keys.json"
        )
        plain, secured = free_ports(2)
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{secured},CONTROLLER://127.0.0.1:0",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": url,
            "sasl.oauthbearer.expected.audience": "brokers",
            "sasl.oauthbearer.clock.skew.seconds": "0",
        }

        def produce(token: str) -> None:
            async def run() -> None:
                producer = aiokafka.AIOKafkaProducer(
                    bootstrap_servers=f"127.0.0.1:{secured}",
                    security_protocol="SASL_PLAINTEXT",
                    sasl_mechanism="OAUTHBEARER",
                    sasl_oauth_token_provider=Provider(token),
                )
                try:
                    await producer.start()
                    await producer.send_and_wait("tokens", b"one")
                finally:
                    await producer.stop()

            asyncio.run(run())

        def refused(token: str) -> bool:
            try:
                produce(token)
            except aiokafka.errors.KafkaConnectionError:
                return True
            return False

        cluster = LocalCluster(tmp_path / "cluster")
        try:
            cluster.up(1, plain, None, settings)
            with sync.Admin(f"127.0.0.1:{plain}") as admin:
                admin.create_topic("tokens", partitions=1)
            time.sleep(1.1)  # the keys have just been read
            (tmp_path / "keys.json").write_text(public_keys(key))
            produce(signed(key))
            for token in (
                signed(other),
                signed(key, aud="others"),
                signed(key, exp=int(time.time()) - 1),
                signed(key, nbf=int(time.time()) + 60),
                signed(key, sub=""),
                jwt.encode({"sub": "alice", "aud": "brokers", "exp": int(time.time()) + 60}, "", algorithm="none"),
            ):
                with aiokafka_leaves_sockets():
                    assert refused(token)
                client = sync.Admin(
                    f"127.0.0.1:{secured}",
                    security_protocol="SASL_PLAINTEXT",
                    sasl_mechanism="OAUTHBEARER",
                    sasl_oauth_token_provider=lambda token=token: token,  # type: ignore[misc]
                )
                with pytest.raises(AuthenticationFailed, match="invalid_token.*; the token has sub .* exp 20"), client:
                    pass
        finally:
            server.shutdown()
            if cluster.file_or_none() is not None:
                cluster.down(kill=True)

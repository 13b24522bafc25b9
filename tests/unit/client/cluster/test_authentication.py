"""Clients authenticate themselves on each connection, and again before their session ends."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.tokens import token_of
from minibroker.client.consumer import Consumer
from minibroker.client.errors import AuthenticationFailed, DeliveryFailed
from minibroker.client.producer import Producer
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from minibroker.protocol.errors import ErrorCode, NetworkError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.sasl.mechanisms import Authenticated, SaslError, ServerMechanism
from minibroker.protocol.sasl.oauthbearer import OAuthBearerServer
from minibroker.protocol.sasl.plain import PlainServer
from minibroker.protocol.sasl.scram import BY_NAME, ScramServer, credential_of, salted_password
from tests.unit.client.scripted_broker import Received, ScriptedCluster, ServerConnection
from tests.waiting import until

REASON = "Authentication failed: Invalid username or password"
SALT = b"0123456789abcdef"
TOKEN = "header.claims.signature"


class Guard:
    """A listener that is SASL_PLAINTEXT, for the user alice."""

    def __init__(self, session_ms: int = 0) -> None:
        self.password = "hunter22"
        self.session_ms = session_ms
        self.enabled = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
        self.proofs = 0
        self.violations: list[str] = []
        self._under_way: dict[ServerConnection, ServerMechanism] = {}
        self._users: dict[ServerConnection, str] = {}

    def __call__(self, connection: ServerConnection, received: Received) -> m.Message | None:
        match received.body:
            case m.SaslHandshakeRequest(mechanism=name):
                if name not in self.enabled:
                    return m.SaslHandshakeResponse(ErrorCode.UNSUPPORTED_SASL_MECHANISM, self.enabled)
                self._under_way[connection] = self._server_of(name)
                return m.SaslHandshakeResponse(ErrorCode.NONE, self.enabled)
            case m.SaslAuthenticateRequest(auth_bytes=message):
                try:
                    answer = self._under_way[connection].respond(message)
                except SaslError:
                    return m.SaslAuthenticateResponse(ErrorCode.SASL_AUTHENTICATION_FAILED, REASON)
                if not isinstance(answer, Authenticated):
                    return m.SaslAuthenticateResponse(ErrorCode.NONE, auth_bytes=answer)
                del self._under_way[connection]
                self._users[connection] = answer.user
                self.proofs += 1
                return m.SaslAuthenticateResponse(ErrorCode.NONE, "", answer.message, self.session_ms)
        if connection in self._under_way or connection not in self._users:
            self.violations.append(received.api.name)
        return None

    def _server_of(self, name: str) -> ServerMechanism:
        if name == "PLAIN":
            return PlainServer({"alice": self.password}.get)
        if name == "OAUTHBEARER":
            return OAuthBearerServer(lambda token: Authenticated("alice") if token == TOKEN else _refused())
        mechanism = BY_NAME[name]
        salted = salted_password(mechanism, self.password, SALT, 4096)
        known = {"alice": credential_of(mechanism, salted, SALT, 4096)}
        return ScramServer(mechanism, known.get, "servernonce", b"decoy")


def _refused() -> Authenticated:
    raise SaslError("refused")


def alice(mechanism: str = "PLAIN", password: str = "hunter22") -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "sasl_plain_password": password,
    }


def with_token(provider: Callable[[], str | Awaitable[str]]) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": provider,
    }


def guarded(cluster: ScriptedCluster, session_ms: int = 0) -> Guard:
    cluster.guard = guard = Guard(session_ms)
    cluster.add_topic("orders")
    return guard


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_each_connection_is_authenticated_before_its_first_request(mechanism: str) -> None:
    async with ScriptedCluster() as cluster:
        guard = guarded(cluster)
        async with Producer(cluster.bootstrap, **alice(mechanism)) as producer:
            await producer.send("orders", b"a")
        assert cluster.log("orders").values() == [b"a"]
        assert guard.proofs == 2  # for metadata, and for the records
        assert guard.violations == []


async def test_a_token_comes_from_a_function_of_either_kind() -> None:
    threads: list[threading.Thread] = []

    def blocking() -> str:
        threads.append(threading.current_thread())
        return TOKEN

    async def asynchronous() -> str:
        return TOKEN

    async with ScriptedCluster() as cluster:
        guard = guarded(cluster)
        for provider in (blocking, asynchronous):
            async with Admin(cluster.bootstrap, **with_token(provider)) as admin:
                assert await admin.list_topics() == ["orders"]
        assert guard.proofs == 2
    assert threads != [threading.main_thread()]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_a_wrong_password_fails_at_once_with_the_brokers_reason(
    mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ScriptedCluster() as cluster:
        guarded(cluster)
        admin = Admin(cluster.bootstrap, **alice(mechanism, "wrong-secret"))
        with pytest.raises(AuthenticationFailed, match=REASON) as failed:
            await admin.start()
        assert failed.value.reason.startswith(f"{REASON}: the password is wrong, or there is no such user: ")
        assert failed.value.user == "alice"
        assert "as user 'alice' to the broker" in str(failed.value)
        remedy = f"alter --user alice --set '{mechanism}=[password-file=FILE]'`"
        if mechanism == "PLAIN":
            remedy = "users of PLAIN are in"
        assert remedy in failed.value.reason
        assert len(cluster.requests(SASL_HANDSHAKE)) == 1
        assert cluster.requests(METADATA) == []
    assert "wrong-secret" not in caplog.text + str(failed.value)


async def test_a_mechanism_that_is_not_enabled_is_named_beside_those_that_are() -> None:
    async with ScriptedCluster() as cluster:
        guarded(cluster).enabled = ["SCRAM-SHA-512"]
        with pytest.raises(AuthenticationFailed, match="not enabled at this listener, which has 'SCRAM-SHA-512'"):
            await Admin(cluster.bootstrap, **alice()).start()
        assert cluster.requests(SASL_AUTHENTICATE) == []


async def test_a_refused_token_fails_at_once_and_a_provider_that_raises_is_tried_again() -> None:
    calls: list[str] = []

    def flaky() -> str:
        calls.append("called")
        if len(calls) == 1:
            raise OSError("the identity provider restarts")
        return TOKEN

    async with ScriptedCluster() as cluster:
        guarded(cluster)
        with pytest.raises(AuthenticationFailed):
            await Admin(cluster.bootstrap, **with_token(lambda: "other.token.x")).start()
        async with Admin(cluster.bootstrap, **with_token(flaky)) as admin:
            assert await admin.list_topics() == ["orders"]
        assert len(calls) == 2

        def broken() -> str:
            raise OSError("no such realm")

        wanted = "sasl_oauth_token_provider raised OSError: 'no such realm'; .* only for failures that pass"
        with pytest.raises(NetworkError, match=wanted) as failed:
            await Admin(cluster.bootstrap, **with_token(broken)).start()
        assert isinstance(_first_cause(failed.value), OSError)


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def unsigned(**claims: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{payload}.signature"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (unsigned(sub="bob", aud="others", exp=1_700_000_000), "sub 'bob', aud 'others', exp 2023-11-14T22:13:20Z"),
        (
            unsigned(aud=["a", "b"], iss="https://id.example.org"),
            "iss 'https://id.example.org', aud .* no sub and no exp",
        ),
        (unsigned(sub="bob", exp=1e300), "sub 'bob', exp 1e"),
        (unsigned(sub="bob", exp="soon"), "exp 'soon'"),
        (unsigned(), "none of the usual claims"),
        ("one.two", "no JWT with claims"),
        ("one.!.three".replace("!", "YQ"), "no JWT with claims"),
        (f"one.{base64.urlsafe_b64encode(b'[1]').decode().rstrip('=')}.three", "no JWT with claims"),
    ],
)
async def test_a_refused_token_is_described_by_its_claims_and_never_shown(
    token: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ScriptedCluster() as cluster:
        guarded(cluster)
        with pytest.raises(AuthenticationFailed, match=f"{REASON}; the token .*{told}") as failed:
            await Admin(cluster.bootstrap, **with_token(lambda: token)).start()
    assert token not in caplog.text + str(failed.value)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("", "an empty token: return a JWT"),
        ("Bearer a.b.c", "a token with ' ' at position 6, .* without 'Bearer', quotes or the end of a line"),
        ("a.b.c\n", r"a token with '\\n' at position 5"),
        (b"a.b.c", "a bytes, not a token: return the JWT as str"),
        (None, "a NoneType, not a token"),
        (7, "an int, not a token"),
    ],
)
async def test_a_provider_that_returns_no_token_is_named_and_nothing_is_sent(returned: Any, told: str) -> None:
    async with ScriptedCluster() as cluster:
        guarded(cluster)
        with pytest.raises(AuthenticationFailed, match=f"sasl_oauth_token_provider returned {told}"):
            await Admin(cluster.bootstrap, **with_token(lambda: returned)).start()
        assert cluster.requests(SASL_HANDSHAKE) == []


async def test_a_provider_whose_tokens_are_at_an_end_fails_and_does_not_hang() -> None:
    tokens = iter([TOKEN])
    async with ScriptedCluster() as cluster:
        guarded(cluster)
        async with Admin(cluster.bootstrap, **with_token(lambda: next(tokens))):
            pass
        with pytest.raises(NetworkError, match="sasl_oauth_token_provider raised StopIteration"):
            await Admin(cluster.bootstrap, **with_token(lambda: next(tokens))).start()


async def test_a_provider_that_hangs_is_named_at_the_deadline() -> None:
    async def hanging() -> str:
        await asyncio.Event().wait()
        raise AssertionError("cancelled")

    wanted = "sasl_oauth_token_provider has not returned a token within 0.05 s: .* give up earlier and raise"
    with pytest.raises(NetworkError, match=wanted):
        await token_of(hanging, 0.05)


async def test_requests_go_on_while_a_token_for_the_next_session_is_awaited() -> None:
    calls: list[str] = []
    released = asyncio.Event()

    async def slow() -> str:
        calls.append("called")
        if len(calls) > 1:
            await released.wait()
        return TOKEN

    async with ScriptedCluster() as cluster:
        guard = guarded(cluster, session_ms=200)
        async with Admin(cluster.bootstrap, **with_token(slow)) as admin:
            await admin.list_topics()
            async with asyncio.timeout(30):
                while len(calls) < 2:
                    await asyncio.sleep(0.01)
                    await admin.list_topics()
                assert await admin.list_topics() == ["orders"]
                released.set()
                await until(lambda: guard.proofs >= 2)


async def test_a_session_is_renewed_between_requests_and_nothing_is_lost() -> None:
    async with ScriptedCluster() as cluster:
        guard = guarded(cluster, session_ms=150)
        async with (
            Producer(cluster.bootstrap, linger_ms=0, **alice("SCRAM-SHA-256")) as producer,
            Consumer(cluster.bootstrap, partitions=[TopicPartition("orders", 0)], **alice()) as consumer,
        ):
            found: list[bytes | None] = []
            for number in range(60):
                await producer.send("orders", b"%d" % number)
                found += [record.value for record in await consumer.poll(timeout_ms=0)]
                await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                while len(found) < 60:
                    found += [record.value for record in await consumer.poll(timeout_ms=100)]
        assert found == [b"%d" % number for number in range(60)]
        assert guard.proofs >= 4 * 3
        assert guard.violations == []
        assert len(cluster.nodes[0].connections) <= 4


async def test_a_user_that_is_deleted_ends_its_clients_when_the_session_is_to_be_renewed() -> None:
    async with ScriptedCluster() as cluster:
        guard = guarded(cluster, session_ms=200)
        producer = Producer(cluster.bootstrap, **alice())
        await producer.start()
        await producer.send("orders", b"a")
        guard.password = "changed"
        with pytest.raises(AuthenticationFailed, match=REASON):  # noqa: PT012
            async with asyncio.timeout(10):
                for _ in range(1_000):
                    await producer.send("orders", b"b")
                    await asyncio.sleep(0.01)
        with pytest.raises(AuthenticationFailed):
            producer.send("orders", b"c")
        with pytest.raises((AuthenticationFailed, DeliveryFailed)):
            await producer.close()
        before = len(cluster.requests(SASL_HANDSHAKE))
        await asyncio.sleep(0.3)
        assert len(cluster.requests(SASL_HANDSHAKE)) == before
        assert guard.violations == []


async def test_a_listener_without_sasl_is_named_as_such() -> None:
    async with ScriptedCluster() as cluster:
        answer = m.SaslHandshakeResponse(ErrorCode.ILLEGAL_SASL_STATE, [])
        cluster.guard = lambda _, received: answer if received.api is SASL_HANDSHAKE else None
        with pytest.raises(AuthenticationFailed, match='no SASL: use security_protocol="SSL" or "PLAINTEXT"'):
            await Admin(cluster.bootstrap, **alice()).start()


async def test_requests_wait_while_a_connection_is_held_and_keep_their_order() -> None:
    async with ScriptedCluster() as cluster:
        guard = guarded(cluster)
        async with Producer(cluster.bootstrap, acks=0, linger_ms=0, **alice()) as producer:
            producer.send("orders", b"0")
            await until(lambda: cluster.log("orders").values() == [b"0"])
            address = Address("127.0.0.1", cluster.nodes[0].port)
            connection = producer._runtime.connections.get(address, Purpose.PRODUCE)
            assert connection is not None
            await connection.hold()
            producer.send("orders", b"1")
            producer.send("orders", b"2")
            await asyncio.sleep(0.1)
            assert cluster.log("orders").values() == [b"0"]
            assert connection.unsent_bytes > 0
            connection.release()
            await until(lambda: cluster.log("orders").values() == [b"0", b"1", b"2"])
        assert guard.violations == []


async def test_requests_that_wait_for_an_authentication_that_fails_are_not_sent() -> None:
    async with ScriptedCluster() as cluster:
        guard = guarded(cluster, session_ms=200)
        admin = Admin(cluster.bootstrap, **alice())
        await admin.start()
        guard.password = "changed"
        address = Address("127.0.0.1", cluster.nodes[0].port)
        connection = admin._runtime.connections.get(address, Purpose.REQUESTS)
        assert connection is not None
        await cluster.until(lambda: len(cluster.requests(SASL_HANDSHAKE)) == 2)
        waiting = connection.send(METADATA, m.MetadataRequest(None))
        assert connection.unsent_bytes > 0
        with pytest.raises(NetworkError, match="not authenticated any more"):
            await waiting
        with suppress(AuthenticationFailed):
            await admin.close()
        assert guard.violations == []

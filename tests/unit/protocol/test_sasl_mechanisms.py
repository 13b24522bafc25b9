"""The two halves of each mechanism, against each other, the RFCs' examples, and arbitrary bytes."""

from __future__ import annotations

import base64
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.sasl.mechanisms import Authenticated, ClientMechanism, SaslError, ServerMechanism
from minibroker.protocol.sasl.oauthbearer import OAuthBearerClient, OAuthBearerServer, TokenRefused, parse_initial
from minibroker.protocol.sasl.plain import PlainClient, PlainServer
from minibroker.protocol.sasl.scram import (
    MAX_MESSAGE_BYTES,
    ScramClient,
    ScramCredential,
    ScramMechanism,
    ScramServer,
    credential_of,
    name_problem,
    salted_password,
)

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
RFC7677 = credential_of(
    ScramMechanism.SCRAM_SHA_256, salted_password(ScramMechanism.SCRAM_SHA_256, "pencil", SALT, 4096), SALT, 4096
)
DECOY = b"decoy"


def talk(client: ClientMechanism, server: ServerMechanism) -> tuple[Authenticated, list[bytes]]:
    sent: list[bytes] = []
    message = client.respond(None)
    while True:
        assert message is not None
        answer = server.respond(message)
        sent.append(message)
        challenge = answer if isinstance(answer, bytes) else answer.message
        sent.append(challenge)
        message = client.respond(challenge)
        if isinstance(answer, Authenticated):
            assert message is None
            return answer, sent


def passwords(user: str) -> str | None:
    return {"alice": "wonderland", "böb": "päss"}.get(user)


@pytest.mark.parametrize("user", ["alice", "böb"])
def test_plain_accepts_the_password(user: str) -> None:
    password = passwords(user)
    assert password is not None
    assert talk(PlainClient(user, password), PlainServer(passwords))[0] == Authenticated(user)


@pytest.mark.parametrize("user", ["alice", "nobody"])
def test_plain_says_nothing_about_which_part_is_wrong(user: str) -> None:
    with pytest.raises(SaslError, match=f"^an unknown user or a wrong password: {user}; .*jaas"):
        PlainServer(passwords).respond(f"\0{user}\0wrong".encode())


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\0alice", "2 parts"),
        (b"a\0b\0c\0d", "4 parts"),
        (b"\0\0wonderland", "no user"),
        (b"\0alice\0", "no password"),
        (b"admin\0alice\0wonderland", "another identity"),
        (b"\0\xff\0wonderland", "not UTF-8"),
    ],
)
def test_plain_refuses_other_messages(message: bytes, why: str) -> None:
    with pytest.raises(SaslError, match=why) as caught:
        PlainServer(passwords).respond(message)
    assert "wonderland" not in str(caught.value)


def test_scram_is_the_example_of_rfc_7677() -> None:
    client = ScramClient(ScramMechanism.SCRAM_SHA_256, "user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    server = ScramServer(ScramMechanism.SCRAM_SHA_256, {"user": RFC7677}.get, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", DECOY)
    answer, sent = talk(client, server)
    assert answer.user == "user"
    assert sent == [
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ]


@pytest.mark.parametrize("mechanism", ScramMechanism)
@pytest.mark.parametrize("user", ["alice", "a,b=c"])
def test_scram_authenticates_both_sides(mechanism: ScramMechanism, user: str) -> None:
    credential = credential_of(mechanism, salted_password(mechanism, "pässword", SALT, 4096), SALT, 4096)
    server = ScramServer(mechanism, {user: credential}.get, "server", DECOY)
    assert talk(ScramClient(mechanism, user, "pässword", "client"), server)[0].user == user


@pytest.mark.parametrize("mechanism", ScramMechanism)
def test_scram_accepts_the_repeated_nonce_of_old_librdkafka_but_no_other(mechanism: ScramMechanism) -> None:
    salted = salted_password(mechanism, "pencil", SALT, 4096)
    credential = credential_of(mechanism, salted, SALT, 4096)

    def answer_to(nonce: str) -> bytes | Authenticated:
        server = ScramServer(mechanism, {"user": credential}.get, "server", DECOY)
        challenge = server.respond(b"n,,n=user,r=client")
        assert isinstance(challenge, bytes)
        final = b"c=biws,r=" + nonce.encode()
        client_key = hmac.digest(salted, b"Client Key", mechanism.digest)
        signed = b",".join((b"n=user,r=client", challenge, final))
        signature = hmac.digest(credential.stored_key, signed, mechanism.digest)
        proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
        return server.respond(final + b",p=" + base64.b64encode(proof))

    for nonce in ("clientserver", "clientclientserver"):
        answer = answer_to(nonce)
        assert isinstance(answer, Authenticated)
        assert answer.user == "user"
    for nonce in ("clientclientclientserver", "otherclientserver", "server", "client", "clientclient"):
        with pytest.raises(SaslError, match="nonce"):
            answer_to(nonce)


def test_scram_refuses_a_wrong_password_and_an_unknown_user_in_the_same_step() -> None:
    for user, password, why in (
        ("user", "pen", "wrong password of user user for SCRAM-SHA-256; `minibroker configs alter --user user "),
        (
            "nobody",
            "pencil",
            "no user nobody has a password for SCRAM-SHA-256; `minibroker configs alter --user nobody ",
        ),
    ):
        server = ScramServer(ScramMechanism.SCRAM_SHA_256, {"user": RFC7677}.get, "server", DECOY)
        client = ScramClient(ScramMechanism.SCRAM_SHA_256, user, password, "client")
        first = client.respond(None)
        assert first is not None
        challenge = server.respond(first)
        assert isinstance(challenge, bytes)
        final = client.respond(challenge)
        assert final is not None
        with pytest.raises(SaslError, match=f"^{why}"):
            server.respond(final)


def test_an_unknown_user_of_scram_always_gets_the_same_salt_and_another_for_each_mechanism() -> None:
    def challenge(nonce: str, mechanism: ScramMechanism = ScramMechanism.SCRAM_SHA_512) -> bytes:
        server = ScramServer(mechanism, lambda user: None, nonce, DECOY)
        answer = server.respond(b"n,,n=nobody,r=client")
        assert isinstance(answer, bytes)
        return answer.partition(b",")[2]

    assert challenge("one") == challenge("two")
    assert challenge("one") != challenge("one", ScramMechanism.SCRAM_SHA_256)


def test_scram_does_not_look_at_a_name_that_nobody_can_have() -> None:
    asked: list[str] = []
    for escaped, is_read in (("=2C" * 300, True), ("é" * 300, True), ("=3D" * 301, False), ("a" * 301, False)):
        server = ScramServer(ScramMechanism.SCRAM_SHA_256, lambda user: asked.append(user), "server", DECOY)
        if is_read:
            server.respond(f"n,,n={escaped},r=client".encode())
        else:
            with pytest.raises(SaslError, match="more than 300 characters"):
                server.respond(f"n,,n={escaped},r=client".encode())
    assert asked == ["," * 300, "é" * 300]


@pytest.mark.parametrize("name", ["", "a" * 301, "\N{ROMAN NUMERAL NINE}", "ca\N{SOFT HYPHEN}rol", "tab\there", "a\0"])
def test_names_that_cannot_log_in_have_a_problem(name: str) -> None:
    assert name_problem(name) is not None


@pytest.mark.parametrize("name", ["alice", "a" * 300, "a/b", "böb", "<default>", "a,b=c", " sp "])
def test_other_names_have_none(name: str) -> None:
    assert name_problem(name) is None


def test_a_client_notices_a_broker_that_does_not_know_the_password() -> None:
    client = ScramClient(ScramMechanism.SCRAM_SHA_256, "user", "pencil", "client")
    client.respond(None)
    client.respond(b"r=clientserver,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
    with pytest.raises(SaslError, match="does not prove"):
        client.respond(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize("iterations", [1, 4_095, 1_000_001, 10_000_000])
def test_a_client_refuses_iterations_that_would_weaken_its_password_or_stall_it(iterations: int) -> None:
    client = ScramClient(ScramMechanism.SCRAM_SHA_256, "user", "pencil", "client")
    client.respond(None)
    with pytest.raises(SaslError, match="4096"):
        client.respond(b"r=clientserver,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=%d" % iterations)


def test_passwords_that_clients_hash_differently_are_refused() -> None:
    for password, rule in (("", "at least one"), ("\N{LATIN SMALL LIGATURE FI}", "use .*ASCII"), ("\0", "use .*ASCII")):
        with pytest.raises(ValueError, match=rule):
            salted_password(ScramMechanism.SCRAM_SHA_256, password, SALT, 4096)


def test_a_credential_is_not_shown() -> None:
    assert repr(RFC7677) == "ScramCredential(..., iterations=4096)"
    assert RFC7677._replace(iterations=5000) == ScramCredential(*RFC7677[:3], 5000)


def tokens(token: str) -> Authenticated:
    if token != "good.token":
        raise TokenRefused("the token is expired")
    return Authenticated("alice", expires_at_s=17.0)


def test_oauthbearer_accepts_a_token() -> None:
    answer, _ = talk(OAuthBearerClient("good.token"), OAuthBearerServer(tokens))
    assert answer == Authenticated("alice", expires_at_s=17.0)


def test_oauthbearer_refuses_a_token_with_a_challenge_and_then_with_an_error() -> None:
    client, server = OAuthBearerClient("bad.token"), OAuthBearerServer(tokens)
    first = client.respond(None)
    assert first is not None
    challenge = server.respond(first)
    assert challenge == b'{"status":"invalid_token"}'
    last = client.respond(challenge)
    assert last == b"\x01"
    with pytest.raises(SaslError, match="expired"):
        server.respond(last)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"n,,\x01auth=Bearer abc\x01\x01", ("", "abc")),
        (b"n,a=a=2Cb,\x01auth=bearer  abc\x01traceId=7\x01\x01", ("a,b", "abc")),
    ],
)
def test_the_first_message_of_oauthbearer(message: bytes, expected: tuple[str, str]) -> None:
    assert parse_initial(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n,,\x01\x01",
        b"n,,\x01auth=Basic abc\x01\x01",
        b"n,,\x01auth=Bearer a b\x01\x01",
        b"n,,\x01auth=Bearer a\x01auth=Bearer b\x01\x01",
        b"y,,\x01auth=Bearer abc\x01\x01",
        b"n,,\x01auth=Bearer abc\x01",
        b"\xff",
    ],
)
def test_other_first_messages_of_oauthbearer_are_refused(message: bytes) -> None:
    with pytest.raises(SaslError):
        OAuthBearerServer(tokens).respond(message)


_LIKE_SCRAM = st.lists(
    st.sampled_from(
        [
            "n",
            "y",
            "p=x",
            "n=user",
            "r=client",
            "c=biws",
            "p=AAAA",
            "a=1",
            "m=1",
            "s=",
            "=",
            "",
            "r=x\0",
            "n==2",
            "\ud7a4",
        ]
    ),
    max_size=8,
).map(lambda parts: ",".join(parts).encode())
_MESSAGES = st.lists(
    st.one_of(st.binary(max_size=200), _LIKE_SCRAM, st.text().map(lambda t: f"n,,n={t},r=x".encode())), max_size=4
)


@given(messages=_MESSAGES)
def test_no_message_gets_anything_but_a_refusal_from_a_server(messages: list[bytes]) -> None:
    servers: list[ServerMechanism] = [
        PlainServer(passwords),
        OAuthBearerServer(tokens),
        *(ScramServer(each, {"user": RFC7677}.get, "server", DECOY) for each in ScramMechanism),
    ]
    for server in servers:
        try:
            for message in messages:
                assert isinstance(server.respond(message), bytes)
        except SaslError:
            pass


@given(challenges=st.lists(st.one_of(st.binary(max_size=200), _LIKE_SCRAM), min_size=1, max_size=4))
def test_no_broker_authenticates_itself_to_a_client_of_scram_by_chance(challenges: list[bytes]) -> None:
    client = ScramClient(ScramMechanism.SCRAM_SHA_256, "user", "pencil", "client")
    client.respond(None)
    with pytest.raises(SaslError):  # noqa: PT012 - any of them may be refused
        for challenge in challenges:
            assert client.respond(challenge) is not None
        raise SaslError("no proof")


def test_long_messages_of_scram_are_refused_before_they_take_time() -> None:
    server = ScramServer(ScramMechanism.SCRAM_SHA_256, lambda user: None, "server", DECOY)
    with pytest.raises(SaslError, match="bytes"):
        server.respond(b"n,,n=" + b"a" * MAX_MESSAGE_BYTES + b",r=client")

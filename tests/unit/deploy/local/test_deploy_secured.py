"""The files of a secured cluster, the lines for its clients, and how the launcher reaches its brokers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minibroker.client.security import protection
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import plan, secured
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.protocol import messages as m
from minibroker.protocol.sasl.scram import ScramMechanism, salted_password


def cluster(secure: bool = False, **settings: str) -> ClusterFile:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return ClusterFile(ZooKeeperEntry("z:1"), (BrokerEntry(1, 9092),), named, secure=secure)


def test_the_files_are_made_once_and_belong_to_their_owner_alone(tmp_path: Path) -> None:
    secured.make(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"ca.pem", "ca.key", "broker.pem", "client.properties"}
    assert not [path for path in (*files, tmp_path / "certificates") if path.stat().st_mode & 0o077]
    before = {path: path.read_bytes() for path in files}
    secured.make(tmp_path)
    assert {path: path.read_bytes() for path in files} == before


def test_a_new_certificate_of_the_brokers_has_the_same_authority(tmp_path: Path) -> None:
    secured.make(tmp_path)
    authority = secured.authority(tmp_path).read_bytes()
    (tmp_path / "certificates" / "broker.pem").unlink()
    secured.make(tmp_path)
    assert (tmp_path / "certificates" / "broker.pem").exists()
    assert secured.authority(tmp_path).read_bytes() == authority


def test_the_lines_of_all_clients_have_the_user_and_the_authority(tmp_path: Path) -> None:
    secured.make(tmp_path)
    arguments = secured.credentials(tmp_path)
    tls, credentials = protection("Producer", arguments)
    assert tls is not None
    assert credentials is not None
    assert credentials.username == secured.USER
    found = secured.lines_for(tmp_path, "h:9092", arguments)
    assert tuple(lines.client for lines in found) == secured.CLIENTS
    for _, text in found:
        assert all(
            part in text for part in ("h:9092", "SASL_SSL", credentials.password, str(secured.authority(tmp_path)))
        )


def test_a_file_without_a_user_says_what_to_do(tmp_path: Path) -> None:
    secured.make(tmp_path)
    with pytest.raises(LaunchError, match="remove it"):
        secured.lines_for(tmp_path, "h:9092", {"security_protocol": "SSL"})


@pytest.mark.parametrize(
    ("planned", "protocol"),
    [
        (cluster(), "PLAINTEXT"),
        (cluster(secure=True), "SASL_SSL"),
        (cluster(listeners="SSL://127.0.0.1:9092,CONTROLLER://127.0.0.1:0"), "SSL"),
        (cluster(listeners="SSL://127.0.0.1:9093, PLAINTEXT://127.0.0.1:9092"), "PLAINTEXT"),
        (
            cluster(listeners="OUT://127.0.0.1:9092", listener_security_protocol_map="IN:SSL,OUT:SASL_PLAINTEXT"),
            "SASL_PLAINTEXT",
        ),
    ],
)
def test_the_launcher_knows_the_protocol_of_the_brokers_port(planned: ClusterFile, protocol: str) -> None:
    assert plan.protocol_of(planned, planned.brokers[0]) == protocol


def test_a_cluster_stays_secured_until_it_is_asked_not_to_be(tmp_path: Path) -> None:
    def again(before: ClusterFile | None, secure: bool | None) -> ClusterFile:
        return plan.planned(tmp_path, before, plan.Options(secure=secure), [], lambda wished, taken: wished or 1)

    first = again(None, True)
    assert first.secure
    assert again(first, None).secure
    assert not again(first, False).secure
    assert not again(None, None).secure
    assert plan.differences(first, plan.Options(secure=False)) == ["--no-secure"]
    assert plan.differences(first, plan.Options(secure=True)) == []
    assert "secured" in plan.summary(first)


def test_settings_of_the_user_win_over_those_of_a_secured_cluster(tmp_path: Path) -> None:
    planned = cluster(secure=True, super_users="User:root")
    found = plan.settings_of(planned, planned.brokers[0], None, None, secured.settings(tmp_path))
    assert found["super.users"] == "User:root"
    assert found["allow.everyone.if.no.acl.found"] == "false"
    assert "password" not in json.dumps(found)


class Broker:
    """A broker that knows the user admin, and keeps the passwords that it is asked to set."""

    def __init__(self) -> None:
        self.upsertions: list[m.ScramCredentialUpsertion] = []

    async def open(self, *_: object) -> Any:
        return self

    async def request(self, api: object, request: Any, **_: object) -> SimpleNamespace:
        self.upsertions += getattr(request, "upsertions", [])
        return SimpleNamespace(error_code=0, results=[SimpleNamespace(error_code=0)])

    def close(self) -> None:
        pass


async def test_an_existing_user_gets_the_password_of_the_file(tmp_path: Path) -> None:
    secured.make(tmp_path)
    old = secured.credentials(tmp_path)["sasl_plain_password"]
    (tmp_path / "client.properties").unlink()
    secured.make(tmp_path)
    password = secured.credentials(tmp_path)["sasl_plain_password"]
    assert password is not None
    assert password != old
    broker = Broker()
    await secured.make_user(tmp_path, [("h", 1), ("h", 2)], broker)
    [one] = broker.upsertions
    assert one.name == "admin"
    assert one.salted_password == salted_password(ScramMechanism.SCRAM_SHA_256, password, one.salt, one.iterations)


async def test_a_password_that_clients_hash_differently_is_named(tmp_path: Path) -> None:
    secured.make(tmp_path)
    path = tmp_path / "client.properties"
    password = secured.credentials(tmp_path)["sasl_plain_password"]
    assert password is not None
    path.write_text(path.read_text().replace(password, "\N{LATIN SMALL LIGATURE FI}"))
    with pytest.raises(LaunchError, match=r"client.properties: the password cannot be used"):
        await secured.make_user(tmp_path, [("h", 1)], Broker())

"""A secured cluster inside a test: users, commands, the health check, the launcher, and brokers with TLS alone."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from minibroker import AuthenticationFailed, BrokerError, ErrorCode, UserErrors, UserScramCredentialDeletion, sync
from minibroker.client.cli.terminal import security
from minibroker.deploy.console.reading import Reader
from minibroker.deploy.console.views import Query
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.testing import LaunchError, SyncLocalCluster
from tests.waiting import until_true

T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncLocalCluster]:
    with SyncLocalCluster(1, topics=["orders"], secure=True) as cluster:
        yield cluster


def _file_of_new_user(name: str, cluster: SyncLocalCluster) -> Path:
    """Return the file for `--command-config` of a user without rights."""
    user, admin = cluster.add_user(name), cluster.security()
    text = (cluster.directory / "client.properties").read_text()
    for setting in ("sasl_plain_username", "sasl_plain_password"):
        text = text.replace(str(admin[setting]), str(user[setting]))
    file = cluster.directory / f"{name}.properties"
    file.write_text(text)
    return file


def test_the_super_user_may_do_everything_and_a_new_user_nothing(cluster: SyncLocalCluster) -> None:
    with sync.Producer(cluster.bootstrap_servers, **cluster.security()) as producer:
        producer.send("orders", b"a").result()
    bob = cluster.add_user("bob")
    with sync.Producer(cluster.bootstrap_servers, **bob) as producer, pytest.raises(BrokerError) as refused:
        producer.send("orders", b"b").result()
    assert refused.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert cluster.security("bob") == bob
    with pytest.raises(LaunchError, match="add_user"):
        cluster.security("nobody")


def test_a_refused_user_learns_its_name_the_operation_and_the_remedy(cluster: SyncLocalCluster) -> None:
    file = _file_of_new_user("dan", cluster)
    command = [sys.executable, "-m", "minibroker", "--command-config", str(file)]
    for words, needed in (
        (["produce", "orders"], "--operation Write --topic orders"),
        (["consume", "orders", "--exit-at-end"], "--operation Read --topic orders"),
        (["consume", "orders", "--group", "g"], "--consumer --topic orders --group g"),
        (["topics", "describe", "orders"], "--operation Describe --topic orders"),
    ):
        arguments = [*command, *words, "--bootstrap", cluster.bootstrap_servers]
        ended = subprocess.run(arguments, input="a\n", capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 1, ended
        assert ended.stderr == (
            "error: TOPIC_AUTHORIZATION_FAILED: User:dan may not Describe Topic 'orders': an administrator can allow "
            f"it with `minibroker --command-config ADMIN_FILE acls add --allow-principal User:dan {needed} "
            f"--bootstrap {cluster.bootstrap_servers}`\n"
        )


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "create", "fresh"],
        ["elect", "--preferred", "--topic", "orders"],
        ["configs", "describe", "--user", "z"],
        ["groups", "reset-offsets", "g", "--topic", "orders", "--to", "earliest", "--yes"],
        ["topics", "delete-records", "orders", "--before", "0", "--yes"],
    ],
    ids=lambda words: f"{words[0]} {words[1]}",
)
def test_the_rights_that_one_refusal_names_are_enough(words: list[str], cluster: SyncLocalCluster) -> None:
    file = _file_of_new_user(f"eve-{words[0]}-{words[1].strip('-')}", cluster)

    def run(config: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", "--command-config", str(config), *words]
        command += ["--bootstrap", cluster.bootstrap_servers]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    refused = run(file, words)
    assert refused.returncode == 1, refused
    advised = re.findall("`minibroker --command-config ADMIN_FILE (acls add [^`]*) --bootstrap [^`]*`", refused.stderr)
    for advice in advised:
        assert run(cluster.directory / "client.properties", shlex.split(advice)).returncode == 0
    allowed = run(file, words)
    assert allowed.returncode == 0, (refused.stderr, allowed)


def test_the_rights_for_all_offsets_of_a_group_are_named_at_once(cluster: SyncLocalCluster) -> None:
    file = _file_of_new_user("eve-all", cluster)
    with sync.Admin(cluster.bootstrap_servers, **cluster.security()) as admin:
        admin.alter_group_offsets("all", {TopicPartition("orders", 0): 0})

    def run(config: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", "--command-config", str(config), *words]
        command += ["--bootstrap", cluster.bootstrap_servers]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    words = ["groups", "reset-offsets", "all", "--all", "--to", "earliest", "--yes"]
    refused = run(file, words)
    (advice,) = re.findall("`minibroker --command-config ADMIN_FILE (acls add [^`]*) --bootstrap", refused.stderr)
    assert "for each topic of the group instead of TOPIC" in refused.stderr
    assert "`groups describe all` shows to an administrator" in refused.stderr, "this user's file is of no use for it"
    run(cluster.directory / "client.properties", shlex.split(advice.replace("TOPIC", "orders")))
    until_true(lambda: run(file, words).returncode == 0)


def test_who_may_describe_a_group_and_none_of_its_topics_learns_the_right_that_is_missing(
    cluster: SyncLocalCluster,
) -> None:
    file = _file_of_new_user("gil", cluster)

    def run(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", "--command-config", str(config), *words]
        command += ["--bootstrap", cluster.bootstrap_servers]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    administrator = cluster.directory / "client.properties"
    allow = ("acls", "add", "--allow-principal", "User:gil")
    with sync.Consumer(
        cluster.bootstrap_servers, topics=["orders"], group="seen", auto_offset_reset="latest", **cluster.security()
    ) as consumer:
        consumer.poll(timeout_ms=1)
        run(administrator, *allow, "--operation", "Read", "--operation", "Describe", "--group", "seen")
        until_true(lambda: "group seen: Stable" in run(file, "groups", "describe", "seen").stdout)
        described = run(file, "groups", "describe", "seen")
        assert "without a commit" not in described.stdout
        assert described.stderr.startswith("User:gil may not Describe topic orders, so the offsets of group seen there")
        assert "acls add --allow-principal User:gil --operation Describe --topic orders --bootstrap" in described.stderr
        consumer.commit({TopicPartition("orders", 0): 0})
    described = run(file, "groups", "describe", "seen")
    assert described.stderr.startswith("User:gil may not Describe all topics, so group seen may have offsets that are")
    refused = run(file, "groups", "reset-offsets", "seen", "--all", "--to", "earliest", "--yes")
    assert "or only in topics that User:gil may not Describe: an administrator can allow the command" in refused.stderr
    assert _groups_of_the_console(file, cluster.bootstrap_servers)[0].startswith("User:gil may not Describe all topics")
    run(administrator, *allow, "--operation", "Describe", "--topic", "orders")
    until_true(lambda: run(file, "groups", "describe", "seen").stderr == "")


def _groups_of_the_console(config: Path, bootstrap: str) -> tuple[str, ...]:
    async def missing_rights(reader: Reader) -> tuple[str, ...]:
        return (await reader.groups(Query())).missing_rights

    return _of_the_console(config, bootstrap, missing_rights)


def test_rights_for_a_name_that_does_not_exist_are_added_with_a_warning(cluster: SyncLocalCluster) -> None:
    cluster.add_user("shop")

    def add(*words: str) -> str:
        command = [sys.executable, "-m", "minibroker", "acls", "add", *words, "--data", str(cluster.directory)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended
        assert ended.stdout.startswith("added: ")
        return ended.stderr

    reads, prefixed = ("--operation", "Read"), ("--resource-pattern-type", "prefixed")
    assert add("--allow-principal", "User:shop", "--topic", "orders", *reads) == ""
    assert add("--allow-principal", "User:shop", "--topic", "*", *reads) == ""
    assert add("--deny-principal", "User:*", "--topic", "secret", *prefixed, *reads) == ""
    assert add("--allow-principal", "User:CN=shop", "--topic", "ord", *prefixed, *reads) == ""
    assert add("--allow-principal", "User:shop", "--topic", "fresh", "--operation", "Create") == ""
    assert add("--allow-principal", "User:shop", "--topic", "oders", *reads) == (
        "warning: there is no topic 'oders': what was added applies once it is created. Did you mean 'orders'?\n"
    )
    assert add("--deny-principal", "User:shpo", "--topic", "orders", *reads) == (
        f"warning: 'shpo' is none of the users with a password (`minibroker users list --data {cluster.directory}`): "
        "what was added applies if a client proves that name in another way, or once the user exists. "
        "Did you mean 'shop'?\n"
    )


def test_a_wrong_password_and_no_password_are_named(cluster: SyncLocalCluster) -> None:
    user = cluster.security()
    user["sasl_plain_password"] = "wrong"
    wrong = sync.Admin(cluster.bootstrap_servers, **user)
    with pytest.raises(AuthenticationFailed, match="Authentication failed"), wrong:
        pass
    tls = sync.Admin(cluster.bootstrap_servers, security_protocol="SSL", ssl_cafile=str(cluster.certificates.authority))
    with pytest.raises(MinibrokerError, match="or is SASL_SSL"), tls:
        pass


def test_the_advice_of_a_refusal_can_be_pasted_and_one_round_is_enough(cluster: SyncLocalCluster) -> None:
    erin = cluster.add_user("erin")
    file = cluster.directory / "erin.properties"
    text = (cluster.directory / "client.properties").read_text()
    login = f'username="erin" password="{erin["sasl_plain_password"]}"'
    file.write_text(re.sub('username=".*" password="[^"]*"', login, text))
    bootstrap = "localhost:" + cluster.bootstrap_servers.rpartition(":")[2]
    at = ["--bootstrap", bootstrap, "--data", str(cluster.directory)]

    def minibroker(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    consume = ["--command-config", str(file), "consume", "orders", "--group", "erins", "--exit-at-end", *at]
    refused = minibroker(*consume)
    advice = re.search("`minibroker (acls add [^`]*)`", refused.stderr)
    assert advice is not None, refused
    assert " --consumer --topic orders --group erins " in advice[1]
    assert minibroker(*shlex.split(advice[1])).returncode == 0
    until_true(lambda: minibroker(*consume).returncode == 0)


def test_a_quota_of_an_unknown_user_is_set_with_a_remark_and_a_wrong_value_is_refused(
    cluster: SyncLocalCluster,
) -> None:
    def alter(user: str, value: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", "configs", "alter", "--data", str(cluster.directory)]
        command += ["--user", user, "--set", f"producer_byte_rate={value}"]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    unknown = alter("frank", "1000000000")
    assert unknown.stdout == "changed producer_byte_rate of user frank\n"
    assert unknown.stderr.startswith("warning: 'frank' is none of the users with a password (`minibroker users list ")
    assert alter("admin", "1000000000").stderr == ""
    assert alter("admin", "-5").stderr == "error: INVALID_REQUEST: producer_byte_rate=-5 must be greater than 0\n"


def test_a_deleted_user_is_refused_and_not_described(cluster: SyncLocalCluster) -> None:
    carol = cluster.add_user("carol")
    with sync.Admin(cluster.bootstrap_servers, **cluster.security()) as admin:
        assert "carol" in admin.describe_user_scram_credentials()
        admin.alter_user_scram_credentials([UserScramCredentialDeletion("carol", "SCRAM-SHA-256")])

        def is_refused() -> bool:
            try:
                with sync.Admin(cluster.bootstrap_servers, **carol):
                    return False
            except AuthenticationFailed:
                return True

        until_true(is_refused)
        with pytest.raises(UserErrors, match="RESOURCE_NOT_FOUND"):
            admin.describe_user_scram_credentials(["carol"])


def test_commands_use_the_file_of_the_data_directory_and_the_health_check_takes_it(cluster: SyncLocalCluster) -> None:
    minibroker = [sys.executable, "-m", "minibroker"]

    def run(*arguments: str) -> str:
        command = [*minibroker, *arguments, "--data", str(cluster.directory)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    assert "orders" in run("topics", "list")
    assert "running" in run("status")
    assert re.search("^admin +SCRAM-SHA-256 +4096$", run("users", "list"), re.MULTILINE)
    assert "sasl.username=admin" in run("client-config", "librdkafka")
    file = str(cluster.directory / "client.properties")
    command = [*minibroker, "--command-config", file, "status", "--bootstrap", cluster.bootstrap_servers]
    assert "broker" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    port = cluster.bootstrap_servers.rpartition(":")[2]
    for words in (["topics", "list"], ["status"]):
        command = [*minibroker, *words, "--bootstrap", f"localhost:{port}", "--data", str(cluster.directory)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 1, ended
        remedy = f"the cluster in {cluster.directory} is secured, so give `--command-config {file}` before the command"
        assert ended.stderr.startswith(f"error: {remedy}: without it, no broker answer"), ended
    health = [sys.executable, "-m", "minibroker.deploy.observing.healthcheck", port]
    assert subprocess.run([*health, "config", file], check=False, timeout=120).returncode == 0
    assert subprocess.run([*health, "ssl"], check=False, timeout=120).returncode == 1
    cluster.kill(1)
    cluster.restore()
    assert "orders" in run("topics", "list")


def test_status_and_timeline_tell_a_client_without_rights_that_it_does_not_see_everything(
    cluster: SyncLocalCluster,
) -> None:
    file = _file_of_new_user("frank", cluster)
    at = ["--bootstrap", cluster.bootstrap_servers]

    def run(config: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minibroker", "--command-config", config, *words, *at]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    status = run(str(file), "status")
    assert status.returncode == 4, status
    assert "offline partitions: unknown" in status.stdout
    assert "User:frank may not see everything" in status.stdout
    refused = run(str(file), "timeline")
    assert (refused.returncode, refused.stdout) == (1, ""), refused
    assert "User:frank" in refused.stderr
    advised = re.findall("`minibroker --command-config ADMIN_FILE (acls add [^`]*) --bootstrap [^`]*`", status.stdout)
    assert len(advised) == 2, status
    for words in advised:
        allowed = run(str(cluster.directory / "client.properties"), *shlex.split(words))
        assert allowed.returncode == 0, allowed
    until_true(lambda: run(str(file), "status").returncode == 0)
    assert run(str(file), "timeline").returncode == 0

    deny = ["acls", "add", "--deny-principal", "User:*", "--operation", "Describe", "--topic"]
    administrator = str(cluster.directory / "client.properties")
    assert run(administrator, *deny, "pay", "--resource-pattern-type", "prefixed").returncode == 0
    until_true(lambda: run(str(file), "status").returncode == 4)
    status = run(str(file), "status")
    assert "User:frank may not Describe topic pay*, so it is unknown if there are any" in status.stdout
    assert "offline partitions: unknown" in status.stdout
    assert run(administrator, "status").returncode == 0, "no entry applies to a super user"
    for config, hides in ((file, True), (cluster.directory / "client.properties", False)):
        assert _sees_only_some_topics(config, cluster.bootstrap_servers) == hides


def _sees_only_some_topics(config: Path, bootstrap: str) -> bool:
    """Whether the console knows that this user may not see all topics."""

    async def hides_topics(reader: Reader) -> bool:
        return (await reader.cluster(Query())).hides_topics

    return _of_the_console(config, bootstrap, hides_topics)


def _of_the_console(config: Path, bootstrap: str, ask: Callable[[Reader], Awaitable[T]]) -> T:
    async def look() -> T:
        reader = Reader(lambda: bootstrap, None)
        try:
            return await ask(reader)
        finally:
            await reader.close()

    security.choose(config)
    try:
        return asyncio.run(look())
    finally:
        security.choose(None)


def test_the_launcher_reaches_brokers_that_speak_tls_alone(tmp_path: Path) -> None:
    [port] = free_ports(1)
    settings = {
        "listeners": f"SSL://127.0.0.1:{port},CONTROLLER://127.0.0.1:0",
        **Certificates(tmp_path / "certificates").settings(),
    }
    cluster = LocalCluster(tmp_path / "cluster")
    try:
        cluster.up(1, port, None, settings)
        assert cluster.view().brokers == {1: ("127.0.0.1", port)}
        assert cluster.status().problems() == []
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)

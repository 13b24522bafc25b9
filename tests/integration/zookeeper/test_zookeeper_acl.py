"""Only brokers with the cluster's credential may change its znodes, on a real ZooKeeper."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.controller.zookeeper import KazooSession, KazooZooKeeper
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.protocol import znodes
from minibroker.protocol.world import Check, MultiFailed, NodeExists, SessionState, SetData, ZooKeeperError
from tests.integration.zookeeper.zookeeper_process import zookeeper_process
from tests.integration.zookeeper.zookeeper_sessions import CONNECT_TIMEOUT_MS, SESSION_TIMEOUT_MS, record_states

DIGEST = "minibroker:a-secret-that-is-long"
GUARDED = [("digest", 31), ("world", 1)]
"""ZooKeeper replaces "auth" with the digest of the session that creates the node."""


@asynccontextmanager
async def session_with(servers: str, digest: str | None, *, sets_acl: bool = False) -> AsyncIterator[KazooSession]:
    zookeeper = KazooZooKeeper()
    if digest is not None:
        zookeeper.authenticate(digest, sets_acl=sets_acl)
    session = await zookeeper.connect(servers, SESSION_TIMEOUT_MS, CONNECT_TIMEOUT_MS)
    try:
        yield session
    finally:
        await session.close()


async def test_all_can_read_nodes_created_with_a_credential_and_only_its_holders_can_change_them(
    zookeeper: str,
) -> None:
    async with session_with(zookeeper, DIGEST, sets_acl=True) as broker:
        await broker.create("/guarded", b"one")
        for digest in (None, "minibroker:another"):
            async with session_with(zookeeper, digest) as stranger:
                assert (await stranger.get("/guarded"))[0] == b"one"
                for attempt in (
                    stranger.set("/guarded", b"two", 0),
                    stranger.create("/guarded/child", b""),
                    stranger.create("/beside-it", b""),  # the broker also created the chroot
                    stranger.delete("/guarded", 0),
                ):
                    with pytest.raises(ZooKeeperError, match="refuses it.*set zookeeper.digest.file"):
                        await attempt
                with pytest.raises(MultiFailed, match="refuses it"):
                    await stranger.multi([Check("/guarded", 0), SetData("/guarded", b"two", 0)])
        async with session_with(zookeeper, DIGEST) as other_broker:
            await other_broker.set("/guarded", b"two", 0)
            await other_broker.delete("/guarded", 1)


async def test_only_brokers_read_what_may_have_the_credentials_of_users(zookeeper: str) -> None:
    async with session_with(zookeeper, DIGEST, sets_acl=True) as broker, session_with(zookeeper, None) as stranger:
        for path in ("/config", "/config/users", "/config/users/alice"):
            with suppress(NodeExists):
                await broker.create(path, b"secret")
        assert await stranger.children("/config/users") == ["alice"]
        with pytest.raises(ZooKeeperError, match="refuses it"):
            await stranger.get("/config/users/alice")
        assert (await broker.get("/config/users/alice"))[0] == b"secret"


async def test_a_credential_without_acls_leaves_nodes_open(zookeeper: str) -> None:
    async with session_with(zookeeper, DIGEST) as broker, session_with(zookeeper, None) as stranger:
        await broker.create("/open", b"")
        await stranger.set("/open", b"changed", 0)


async def test_the_credential_is_shown_again_on_the_next_connection() -> None:
    with zookeeper_process() as server:
        async with session_with(server.address, DIGEST, sets_acl=True) as session:
            await session.create("/guarded", b"")
            states = record_states(session)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await states.until(lambda seen: SessionState.CONNECTED in seen)
            await session.set("/guarded", b"changed", 0)


def _acls(servers: str) -> dict[str, list[tuple[str, int]]]:
    """The ACL of every node of the cluster."""
    client = KazooClient(hosts=servers)
    client.start()
    try:
        found, paths = {}, [""]
        while paths:
            path = paths.pop()
            paths += [f"{path}/{name}" for name in client.get_children(path or "/")]
            acls, _ = client.get_acls(path or "/")
            found[path or "/"] = sorted((acl.id.scheme, acl.perms) for acl in acls)
        return found
    finally:
        client.stop()
        client.close()


@pytest.mark.slow
def test_a_cluster_with_a_credential_protects_all_its_znodes_and_refuses_brokers_without_it(
    local_cluster: Callable[..., LocalCluster], zookeeper: str, tmp_path: Path
) -> None:
    digest_file = tmp_path / "zookeeper.digest"
    digest_file.write_text(DIGEST + "\n")
    settings = {"zookeeper.digest.file": str(digest_file), "zookeeper.set.acl": "true"}
    cluster = local_cluster(brokers=3, settings=settings, zookeeper=zookeeper)

    async def use() -> None:
        async with Admin(cluster.bootstrap()) as admin, Producer(cluster.bootstrap()) as producer:
            await admin.create_topic("guarded", partitions=3, replication_factor=3)
            await producer.send("guarded", b"record")
            await admin.create_topic("gone", partitions=1, replication_factor=3)
            await admin.delete_topic("gone")

    asyncio.run(use())
    acls = _acls(zookeeper)
    assert {znodes.CONTROLLER, znodes.broker_path(1), znodes.topic_path("guarded")} <= acls.keys()
    assert {path: acl for path, acl in acls.items() if acl != GUARDED} == {}

    overrides = {
        "broker.id": "9",
        "log.dirs": str(tmp_path / "broker-9"),
        "listeners": f"PLAINTEXT://127.0.0.1:{free_ports(1)[0]},CONTROLLER://127.0.0.1:0",
        "zookeeper.connect": zookeeper,
    }
    arguments = [text for pair in overrides.items() for text in ("--override", "=".join(pair))]
    refused = subprocess.run(
        [sys.executable, "-m", "minibroker.broker", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert "error: " in refused.stderr
    assert "set zookeeper.digest.file to the file that the other brokers have" in refused.stderr


@pytest.mark.slow
def test_nobody_else_changes_a_zookeeper_that_the_launcher_starts(local_cluster: Callable[..., LocalCluster]) -> None:
    """Also after the first start over the data of a cluster without a credential."""
    cluster = local_cluster(brokers=3, settings={"zookeeper.set.acl": "false"})

    async def produce(topic: str) -> None:
        async with Admin(cluster.bootstrap()) as admin, Producer(cluster.bootstrap()) as producer:
            await admin.create_topic(topic, partitions=3, replication_factor=3)
            await producer.send(topic, b"record")

    asyncio.run(produce("early"))
    before = _acls(cluster.file().zookeeper.connect)
    assert before["/"] == before[znodes.topic_path("early")] == [("world", 31)]
    cluster.down()
    cluster.up(settings={})
    asyncio.run(produce("late"))

    connect = cluster.file().zookeeper.connect
    acls = _acls(connect)
    assert {"/", znodes.CONTROLLER, znodes.broker_path(1), *map(znodes.topic_path, ("early", "late"))} <= acls.keys()
    assert {path for path, acl in acls.items() if acl != GUARDED} == {"/zookeeper/config"}  # which is ("world", 1)
    client = KazooClient(hosts=connect)
    client.start()
    try:
        for change, *arguments in (
            (client.set, znodes.broker_path(1), b"{}"),
            (client.delete, znodes.CONTROLLER),
            (client.create, "/mine"),
            (client.create, "/zookeeper/quota/mine"),
            (client.set_acls, "/", OPEN_ACL_UNSAFE),
        ):
            with pytest.raises(NoAuthError):
                change(*arguments)
    finally:
        client.stop()
        client.close()
    readable = [path for path in cluster.directory.rglob("*") if path.lstat().st_mode & 0o077]
    # Java makes its files as the user's umask says, in a directory that only the user can enter.
    assert {path.relative_to(cluster.directory).parts[0] for path in readable} <= {"zookeeper"}
    assert stat.S_IMODE((cluster.directory / "zookeeper").stat().st_mode) == 0o700
    for file in (cluster.directory / "zookeeper.digest", cluster.directory / "broker.secret"):
        secret = file.read_text().strip().rpartition(":")[2]
        for process in cluster.file().processes():
            assert secret not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert not any(secret in log.read_text() for log in cluster.directory.glob("logs/*"))

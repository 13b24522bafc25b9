"""`minibroker.testing`: a cluster inside a test, without pytest's fixtures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import minibroker
from minibroker import sync
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster as Launcher
from minibroker.deploy.local.who import BrokerId
from minibroker.testing import LaunchTimedOut, LocalCluster, SyncLocalCluster
from tests.testing_support import OWNER, left_behind, owner
from tests.waiting import until_true

LONG_S = 60.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for this test's clusters. At the end neither files nor processes remain."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert left_behind(tmp_path) == []


@pytest.mark.slow
async def test_a_cluster_has_its_topics_and_the_settings_of_each_broker() -> None:
    async with LocalCluster(
        brokers=2,
        topics=["orders", minibroker.NewTopic("payments", partitions=3)],
        settings={"log.segment.bytes": "1048576"},
        broker_settings={2: {"num.network.threads": "1", "log.segment.bytes": "2097152"}},
    ) as cluster:
        assert len(cluster.bootstrap_servers.split(",")) == 2
        async with minibroker.Admin(cluster.bootstrap_servers) as admin:
            assert await admin.list_topics() == ["orders", "payments"]
            brokers = [minibroker.ConfigResource(minibroker.ResourceType.BROKER, str(number)) for number in (1, 2)]
            found = await admin.describe_configs(brokers)
            values = [found[broker]["log.segment.bytes"].value for broker in brokers]
            assert values == ["1048576", "2097152"]
        async with minibroker.Producer(cluster.bootstrap_servers) as producer:
            assert (await producer.send("orders", b"first")).offset == 0
        directory = cluster.directory
        assert "ready broker.id=1" in cluster.log_of(1).read_text()
        with pytest.raises(LaunchError, match="no broker 8 in this cluster: its ids are 1, 2"):
            cluster.log_of(8)
    assert not directory.exists()
    with pytest.raises(LaunchError, match="does not run: use it within `with`"):
        await cluster.kill(1)


@pytest.mark.slow
def test_the_first_group_finds_its_coordinator_after_a_broker_was_killed() -> None:
    with SyncLocalCluster(topics=["orders"]) as cluster:
        with sync.Producer(cluster.bootstrap_servers) as producer:
            producer.send("orders", b"0").result()
        cluster.kill("leader:orders-0")
        with sync.Consumer(
            cluster.bootstrap_servers, topics=["orders"], group="billing", auto_offset_reset="earliest"
        ) as consumer:
            assert next(iter(consumer)).value == b"0"
            consumer.commit()


@pytest.mark.slow
def test_each_new_leader_can_be_killed_at_once() -> None:
    with SyncLocalCluster(topics=[minibroker.NewTopic("orders", configs={"min.insync.replicas": "1"})]) as cluster:
        killed = [*cluster.kill("leader:orders-0"), *cluster.kill("leader:orders-0")]
        assert len(set(killed)) == 2
        cluster.restore()


@pytest.mark.slow
def test_a_new_coordinator_is_found_after_a_kill() -> None:
    with SyncLocalCluster(topics=["orders"]) as cluster, sync.Admin(cluster.bootstrap_servers) as admin:
        partition = minibroker.TopicPartition("orders", 0)
        admin.alter_group_offsets("billing", {partition: 0})
        with sync.Producer(cluster.bootstrap_servers, transactional_id="shop-1"):
            pass
        for who, told in [
            ("coordinator:nope", "there is no group 'nope', so nothing was done: give one of 'billing'"),
            ("transactions:nope", "there is no transactional id 'nope', so nothing was done: give one of 'shop-1'"),
        ]:
            with pytest.raises(LaunchError, match=told):
                cluster.kill(who)
        assert cluster.find("transactions:shop-1")
        former = cluster.find("coordinator:billing")
        assert former == [admin.describe_groups(["billing"])["billing"].coordinator.node_id]
        assert cluster.kill("coordinator:billing") == former
        assert partition in admin.list_group_offsets("billing")
        assert cluster.find("coordinator:billing") != former
        assert cluster.find("coordinator:billing") == [
            admin.describe_groups(["billing"])["billing"].coordinator.node_id
        ]


@pytest.mark.slow
def test_faults_since_the_last_healthy_state_are_known_without_asking_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_restored() -> bool:
        class Asked(Exception):
            pass

        def status(_: Launcher) -> NoReturn:
            raise Asked

        with monkeypatch.context() as patched:
            patched.setattr(Launcher, "status", status)
            try:
                cluster._restore_if_touched()
            except Asked:
                return True
            return False

    def pause_and_resume() -> None:
        cluster.pause(1)
        cluster.resume(1)

    def kill_and_start() -> None:
        cluster.kill(1)
        cluster.start(1)

    def kill_by_the_command_line() -> None:
        Launcher(cluster.directory).kill(BrokerId(1))

    with SyncLocalCluster(1) as cluster:
        assert not is_restored()
        touches: list[Callable[[], object]] = [
            pause_and_resume,
            kill_and_start,
            kill_by_the_command_line,
            lambda: cluster.pause("zookeeper"),
            lambda: cluster.kill("all"),
        ]
        for touch in touches:
            touch()
            assert is_restored()
            cluster.restore()
            assert not is_restored()


@pytest.mark.slow
def test_every_fault_takes_effect_and_restore_repairs_all_of_them() -> None:
    with SyncLocalCluster(topics=["orders"]) as cluster, sync.Producer(cluster.bootstrap_servers) as producer:
        producer.send("orders", b"0")
        leader = cluster.find("leader:orders-0")
        assert cluster.kill("leader:orders-0") == leader
        producer.send("orders", b"1").result()
        assert cluster.find("leader:orders-0") != leader
        with pytest.raises(LaunchTimedOut, match=f"not healthy after 0.1 s: broker {leader[0]} is not running"):
            cluster.wait_healthy(0.1)
        assert cluster.start("all") == leader
        cluster.wait_healthy()

        controller = cluster.find("controller")
        assert cluster.stop("controller") == controller
        until_true(lambda: cluster.find("controller") != controller)
        cluster.restore()

        leader = cluster.find("leader:orders-0")
        assert cluster.pause("leader:orders-0") == leader
        with pytest.raises(LaunchError, match=r"is paused: `cluster.resume\(\d\)`"):
            cluster.stop(leader[0])
        assert cluster.resume(leader[0]) == leader

        cluster.pause(1)
        cluster.kill(2)
        cluster.kill("zookeeper")
        cluster.restore()
        assert producer.send("orders", b"2").result().offset == 2
        cluster.wait_healthy()


@pytest.mark.slow
def test_a_refused_setting_is_reported_in_the_brokers_words_and_nothing_remains(temporary: Path) -> None:
    with pytest.raises(LaunchError, match=r"broker 2 did not start: .*num\.partitions") as caught:  # noqa: SIM117
        with SyncLocalCluster(2, broker_settings={2: {"num.partitions": "many"}}):
            pass
    assert "the last lines of broker-2.log:" in "".join(caught.value.__notes__)
    assert left_behind(temporary) == []


def test_invalid_arguments_are_refused_before_any_process_starts() -> None:
    for number in (0, "3", 2.0, True):
        with pytest.raises(LaunchError, match=f"brokers={number!r}: give a whole number from 1 to 100"):
            LocalCluster(number)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"there is no broker 4: their ids are 1 to 3"):
        LocalCluster(broker_settings={4: {}})
    with pytest.raises(LaunchError, match=r"settings=\['a=b'\]: give a dict"):
        SyncLocalCluster(settings=["a=b"])  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"broker\.id=1: LocalCluster sets it itself"):
        SyncLocalCluster(settings={"broker.id": "1"})
    with pytest.raises(LaunchError, match=r"advertised\.listeners=PLAINTEXT://here:1: LocalCluster sets it itself"):
        SyncLocalCluster(settings={"advertised.listeners": "PLAINTEXT://here:1"})
    with pytest.raises(LaunchError, match=r"topics: .*'my topic'.*a-z A-Z 0-9"):
        LocalCluster(topics=["orders", "my topic"])
    with pytest.raises(LaunchError, match=r"topics='orders': give a list of names, as in topics=\['orders'\]"):
        SyncLocalCluster(topics="orders")


async def test_the_blocking_cluster_names_the_alternative_in_an_event_loop() -> None:
    with pytest.raises(LaunchError, match="would hold up the event loop"), SyncLocalCluster(1):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_start_leaves_nothing_behind(temporary: Path, times: int) -> None:
    async def begin() -> None:
        async with LocalCluster(1):
            await asyncio.sleep(LONG_S)

    beginning = asyncio.create_task(begin())
    async with asyncio.timeout(LONG_S):
        while "minibroker.broker" not in "".join(left_behind(temporary)):
            await asyncio.sleep(0.01)
    for _ in range(times):
        beginning.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert left_behind(temporary) == []


@pytest.mark.slow
def test_two_clusters_at_a_time_share_no_port() -> None:
    with SyncLocalCluster(1) as first, SyncLocalCluster(1) as second:
        first.kill("all")
        first.kill("zookeeper")
        ports = [
            {line for line in cluster.directory.joinpath("cluster.json").read_text().split('"') if "127.0.0.1:" in line}
            for cluster in (first, second)
        ]
        assert not ports[0] & ports[1]
        first.restore()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_outlives_a_process_that_is_ended_while_its_cluster_runs(
    temporary: Path, number: signal.Signals
) -> None:
    with owner(temporary) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(left_behind(temporary)) >= 3
        process.send_signal(number)
        process.wait()
        until_true(lambda: not left_behind(temporary), LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", [0, 5, 10, 20, 40, 80, 160, 320, 640])
def test_nothing_outlives_a_process_that_is_killed_while_its_cluster_starts(temporary: Path, delay_ms: int) -> None:
    with owner(temporary) as process:
        until_true(lambda: list(temporary.glob("minibroker-test-*")), LONG_S, 0.001)
        time.sleep(delay_ms / 1_000)  # the kill may hit any step of the start
        process.kill()
        process.wait()
        until_true(lambda: not left_behind(temporary), LONG_S)


@pytest.mark.slow
def test_a_child_that_was_forked_does_not_end_the_cluster_of_its_parent(temporary: Path) -> None:
    fork = (
        "import os\n    if os.fork() == 0:\n        sys.exit()\n    os.wait(); cluster.wait_healthy(); print('whole')"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER.replace("input()", fork), str(temporary)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.communicate(timeout=LONG_S)[0] == "up\nwhole\n"


@pytest.mark.slow
def test_a_child_that_was_forked_does_not_keep_the_cluster_alive(temporary: Path) -> None:
    program = OWNER.replace(
        "input()", "import os, signal\n    os.fork() or (print('forked', flush=True), signal.pause())\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(temporary)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "forked\n"]
            process.kill()
            process.wait()
            until_true(lambda: not left_behind(temporary), LONG_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)

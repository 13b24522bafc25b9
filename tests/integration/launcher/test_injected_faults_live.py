"""Faults that brokers inject into themselves, on real processes and as an ordinary user."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import minibroker
from minibroker import sync
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import AllBrokers, BrokerId
from minibroker.deploy.observing.status import SlowDisk
from minibroker.testing import LaunchError, SyncLocalCluster
from tests.integration.cli import shell
from tests.testing_support import left_behind
from tests.waiting import until_true

pytestmark = pytest.mark.slow

SAFE = {"min.insync.replicas": "2"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncLocalCluster]:
    """A cluster that each test leaves as `restore` does."""
    directory = tmp_path_factory.mktemp("clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        with SyncLocalCluster(
            3,
            topics=[
                minibroker.NewTopic("orders", configs=SAFE),
                minibroker.NewTopic("synced", configs={**SAFE, "durability": "synced"}),
            ],
        ) as made:
            yield made
    assert left_behind(directory) == []


@pytest.fixture(autouse=True)
def restored(cluster: SyncLocalCluster) -> Iterator[None]:
    yield
    cluster.restore(120)


def launcher(cluster: SyncLocalCluster) -> FaultyCluster:
    return FaultyCluster(cluster.directory)


def is_gone(cluster: SyncLocalCluster, broker_id: object) -> bool:
    assert isinstance(broker_id, int)
    return launcher(cluster).state_of(broker_id) is ProcessState.GONE


def test_a_coordinator_moves_while_all_brokers_run(cluster: SyncLocalCluster, tmp_path: Path) -> None:
    with sync.Producer(cluster.bootstrap_servers, transactional_id="mover") as producer:
        with producer.transaction():
            producer.send("orders", b"before")
        with sync.Consumer(cluster.bootstrap_servers, topics=["orders"], group="moved") as consumer:
            until_true(lambda: any(r.value == b"before" for r in consumer.poll(timeout_ms=200)), 30)
            consumer.commit()
            for who in ("coordinator:moved", "transactions:mover"):
                former, now = cluster.move_coordinator(who)
                assert former != now
                assert cluster.find(who) == [now]
            with producer.transaction():
                producer.send("orders", b"after")
            until_true(lambda: any(r.value == b"after" for r in consumer.poll(timeout_ms=200)), 30)
            consumer.commit()
    assert not FaultyCluster(cluster.directory).faults()
    command = ["fault", "move-coordinator", "coordinator:moved", "--data", str(cluster.directory)]
    assert shell.run(command, tmp_path).out.startswith("move-coordinator: broker ")
    with pytest.raises(LaunchError, match="only coordinators move: give coordinator:GROUP or transactions:ID"):
        cluster.move_coordinator("leader:orders-0")


@pytest.mark.parametrize(("fault", "error"), [("fill_disk", "No space left on device"), ("break_disk", "Input/output")])
def test_a_leader_whose_disk_fails_ends_and_others_go_on(cluster: SyncLocalCluster, fault: str, error: str) -> None:
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        [broker] = getattr(cluster, fault)("leader:orders-0")
        # A broken disk need not notice by itself; the next record does.
        after = producer.send("orders", b"after").result()
        until_true(lambda: is_gone(cluster, broker))
        assert error in cluster.log_of(broker).read_text()
        assert cluster.find("leader:orders-0") != [broker]
        with pytest.raises(LaunchError, match=f"broker {broker} has faults .*`cluster.heal\\(\\)` ends them"):
            cluster.start(broker)
        assert cluster.mend_disk(broker) == [broker]
        assert not is_gone(cluster, broker)
        cluster.wait_healthy(120)
        assert producer.send("orders", b"last").result().offset > after.offset
    assert f"{fault} leader:orders-0 (broker {broker})" in cluster.evidence()


def test_a_full_disk_is_no_trouble_for_a_broker_that_did_not_write(cluster: SyncLocalCluster) -> None:
    before = [entry.process for entry in launcher(cluster).file().brokers]
    for broker in (1, 2, 3):
        cluster.slow_disk(broker, 0.001)
        assert cluster.mend_disk(broker) == [broker]
    assert [entry.process for entry in launcher(cluster).file().brokers] == before


def test_acknowledgements_of_a_synced_topic_wait_for_a_slow_disk_until_it_is_healed(cluster: SyncLocalCluster) -> None:
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("synced", b"before").result()
        [broker] = cluster.slow_disk("leader:synced-0", 1.5)
        began_s = time.monotonic()
        producer.send("synced", b"slow").result()
        assert time.monotonic() - began_s >= 1.5
        [line] = [line for lines in launcher(cluster).status().faults.values() for line in lines]
        assert line == f"each fsync in {cluster.directory}/broker-{broker} takes 1500 ms longer"
        cluster.heal()
        assert launcher(cluster).status().faults == {}

        def is_fast() -> bool:
            again_s = time.monotonic()
            producer.send("synced", b"fast").result()
            return time.monotonic() - again_s < 1.5

        until_true(is_fast)


def slow_disks(cluster: SyncLocalCluster) -> dict[int, list[SlowDisk]]:
    return {broker.id: broker.slow_disks for broker in launcher(cluster).status().brokers if broker.slow_disks}


def test_a_process_that_was_stopped_has_no_slow_disk(cluster: SyncLocalCluster) -> None:
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("synced", b"before").result()
        [leader] = cluster.slow_disk("leader:synced-0", 0.6)
        stopped_s = 1.2
        for _ in range(3):
            flushed = [producer.send("synced", b"waits for a flush") for _ in range(3)]
            cluster.pause(leader)
            time.sleep(stopped_s)
            cluster.resume(leader)
            for each in flushed:
                each.result()
            assert slow_disks(cluster) == {}


def test_writes_can_be_slow_too(cluster: SyncLocalCluster) -> None:
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        [leader] = cluster.slow_disk("leader:orders-0", 0.0, write_delay_s=1.2)
        began_s = time.monotonic()
        producer.send("orders", b"slow").result()
        assert time.monotonic() - began_s >= 1.2
        until_true(lambda: slow_disks(cluster))
        [(broker, [slow])] = slow_disks(cluster).items()
        assert (broker, slow.log_dir.startswith(f"{cluster.directory}/broker-{leader}")) == (leader, True)
        assert (slow.longest_s >= 1.2, slow.longest_call) == (True, "write")
        cluster.heal()
        assert slow_disks(cluster) == {}


def test_a_clock_that_is_moved_stamps_records_and_is_set_right(cluster: SyncLocalCluster) -> None:
    cluster.create_topics([minibroker.NewTopic("stamped", configs={"message.timestamp.type": "LogAppendTime"})])
    hour_ms = 3_600_000

    def stamped() -> int:
        return producer.send("stamped", b"now").result().timestamp_ms - time.time_ns() // 1_000_000

    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        assert abs(stamped()) < hour_ms // 2
        cluster.move_clock("leader:stamped-0", 3_600)
        assert abs(stamped() - hour_ms) < hour_ms // 2
        cluster.move_clock("leader:stamped-0", -7_200)
        assert abs(stamped() + hour_ms) < hour_ms // 2
        cluster.heal()
        assert abs(stamped()) < hour_ms // 2


def test_the_failover_of_a_moved_clock_is_told_at_its_time(cluster: SyncLocalCluster, tmp_path: Path) -> None:
    def last_began_ms() -> int:
        asked = ["timeline", "--failovers", "--format", "json", "--bootstrap", cluster.bootstrap_servers]
        told = shell.run(asked, tmp_path).out.splitlines()
        return int(json.loads(told[-1])["began_ms"]) if told else 0

    before_ms = last_began_ms()
    moved_s = 600
    cluster.move_clock("all", moved_s)
    cluster.kill("controller")
    until_true(lambda: last_began_ms() > before_ms, 30)
    # It may begin earlier than the kill: the slow disk of the test before may just have silenced the broker.
    assert 0 <= time.time() - last_began_ms() / 1_000 < moved_s / 2


def test_one_of_two_disks_breaks_by_the_command_line(tmp_path: Path) -> None:
    """Only where the cluster was started for it; its other disk goes on, and a restart repairs it."""
    cluster = FaultyCluster(tmp_path / "data")

    def run(*words: str) -> shell.Ended:
        return shell.run([*words, "--data", str(cluster.directory)], tmp_path)

    cluster.up(1, free_ports(1)[0], log_dirs=2)
    try:
        refused = run("fault", "break-disk", "1")
        assert refused.code == 1
        assert "`minibroker up --allow-faults --data" in refused.err
        assert "--faults" not in Path(f"/proc/{pid_of(cluster)}/cmdline").read_text()
        cluster.down()
        cluster.up(allow_faults=True)
        assert run("fault", "break-disk", "1", "--log-dir", "3").code == 1
        assert run("fault", "slow-disk", "1", "soon").code == 2
        assert run("fault", "slow-disk", "1", "5ms").out == "slow-disk: broker 1\n"
        assert run("fault", "break-disk", "1", "--log-dir", "2").out == "break-disk: broker 1\n"
        shown = run("status").out
        assert f"the disk of {cluster.directory}/broker-1-disk-2 is broken" in shown
        assert f"each fsync in {cluster.directory}/broker-1 takes 5 ms longer" in shown
        assert "`minibroker heal 1`" in shown or "`minibroker heal 1 --data" in shown
        with sync.Admin(cluster.bootstrap()) as admin:
            admin.create_topics([minibroker.NewTopic("orders", partitions=6)])
        until_true(lambda: cluster.status().brokers[0].offline_log_dirs)
        assert list(cluster.status().brokers[0].offline_log_dirs) == [f"{cluster.directory}/broker-1-disk-2"]
        assert run("heal").out == "heal: broker 1\n"
        assert run("heal").out == "heal: nothing to do\n"
        assert cluster.faults() == {}
        cluster.restart_after_a_lost_disk([1])
        assert cluster.state_of(1) is ProcessState.RUNNING
        until_true(lambda: not cluster.status().problems())
        cluster.fill_disk(BrokerId(1))
        cluster.kill(AllBrokers())
        assert run("heal").out == "heal: broker 1\n"
        assert cluster.state_of(1) is ProcessState.GONE
    finally:
        cluster.down(kill=True)


def pid_of(cluster: FaultyCluster) -> int:
    process = cluster.file().broker(1).process
    assert process is not None
    return process.pid

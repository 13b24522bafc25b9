"""The progress of a recovery: of one log, of a directory, and on a broker's page of metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.recovery import recovery
from minibroker.broker.storage.recovery.recovery import recover, to_be_read
from minibroker.broker.storage.recovery.recovery_progress import LogProgress
from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.recovery_progress import RecoveryProgress, of_metrics
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import BATCHES, CONFIG, NOW, GatedExecutor, StorageWorld, batch, segments, write_log
from tests.unit.broker.test_metrics import GET, PORT, ask

LOGS = 12


class Recorded(LogProgress):
    """Records how much remained at each report."""

    def __init__(self, told: LogProgress) -> None:
        super().__init__()
        self.bytes, self.remaining_bytes, self.remaining_segments = told.bytes, told.bytes, told.remaining_segments
        self.seen: list[tuple[int, int]] = []

    def left(self, size: int) -> None:
        super().left(size)
        self.seen.append((self.remaining_segments, self.remaining_bytes))

    def end(self) -> None:
        super().end()
        self.seen.append((self.remaining_segments, self.remaining_bytes))


def recovered(path: Path, progress: LogProgress, recovery_point: int) -> None:
    for segment in recover(
        RealDisk(),
        str(path),
        recovery_point=recovery_point,
        clean=False,
        log_start_offset=0,
        index_interval_bytes=CONFIG.index_interval_bytes,
        now_ms=NOW,
        progress=progress,
    ).segments:
        segment.close()


def test_what_is_left_of_a_log_shrinks_with_every_piece_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_SCAN_BYTES", 500)
    path = tmp_path / "orders-0"
    write_log(path, checkpoint_at=0)
    sizes = [file.stat().st_size for file in segments(path)]
    progress = Recorded(to_be_read(RealDisk(), str(path), 0))
    assert (progress.remaining_segments, progress.bytes) == (len(sizes), sum(sizes))
    recovered(path, progress, 0)
    assert progress.seen == sorted(progress.seen, reverse=True)
    assert len(set(progress.seen)) > 2 * len(sizes)
    assert progress.seen[0] == (len(sizes), sum(sizes))
    assert progress.seen[-1] == (0, 0)


def test_only_what_reaches_past_the_recovery_point_is_to_be_read(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    write_log(path)
    last = segments(path)[-2:]
    flushed_to = int(last[0].stem) + 1
    progress = to_be_read(RealDisk(), str(path), flushed_to)
    assert (progress.remaining_segments, progress.bytes) == (2, sum(file.stat().st_size for file in last))
    recovered(path, progress, flushed_to)
    assert (progress.remaining_segments, progress.remaining_bytes) == (0, 0)


def test_a_segment_that_is_read_because_its_index_is_lost_counts_when_that_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    write_log(path)
    first, *_, last = segments(path)
    first.with_suffix(".index").unlink()
    progress = Recorded(to_be_read(RealDisk(), str(path), 2 * BATCHES))
    assert progress.bytes == last.stat().st_size
    recovered(path, progress, 2 * BATCHES)
    assert progress.bytes == first.stat().st_size + last.stat().st_size
    assert (2, progress.bytes) in progress.seen
    assert progress.seen[-1] == (0, 0)


def test_of_a_directory_without_segments_nothing_is_to_be_read(tmp_path: Path) -> None:
    progress = to_be_read(RealDisk(), str(tmp_path), 0)
    assert (progress.remaining_segments, progress.bytes) == (0, 0)


# --- Of a directory ------------------------------------------------------------------------------------------------


async def logs_left_by_a_crash(data: Path, *, clean: bool = False) -> list[int]:
    """Sizes of the logs' segments, in the order in which the logs are opened."""
    manager = LogManager(StorageWorld(), str(data), 1)
    await manager.open("cluster")
    manager.registered(1)
    for number in range(LOGS):
        log = await manager.get_or_create(TopicPartition("orders", number), "id", CONFIG)
        log.append_as_leader(batch(number + 1), 0, NOW)
    sizes = {str(log.partition): log.size for log in manager.logs()}
    await manager.close(clean=clean)
    return [size for _, size in sorted(sizes.items())]


async def opened(data: Path, look: Callable[[LogManager], object]) -> LogManager:
    """Call `look` before each task of a worker thread."""
    world = StorageWorld()
    executor = world.executor = GatedExecutor()
    manager = LogManager(world, str(data), 1)
    for work in (manager.open("cluster"), manager.close()):
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        while not task.done():
            look(manager)
            await executor.release()
        await task
    return manager


def test_logs_and_bytes_of_a_directory_are_done_one_log_after_the_other(tmp_path: Path) -> None:
    sizes = asyncio.run(logs_left_by_a_crash(tmp_path))
    seen: list[RecoveryProgress] = []
    manager = asyncio.run(opened(tmp_path, lambda manager: seen.append(manager.recovery)))
    assert seen[0] == RecoveryProgress(LOGS, LOGS)
    for done in range(LOGS):
        remaining = LOGS - done
        assert RecoveryProgress(LOGS, remaining, remaining, sum(sizes), sum(sizes[done:])) in seen
    assert manager.recovery == RecoveryProgress(LOGS, 0, 0, sum(sizes), 0)


@pytest.mark.slow
def test_after_a_clean_stop_there_are_logs_to_open_and_nothing_to_read(tmp_path: Path) -> None:
    asyncio.run(logs_left_by_a_crash(tmp_path, clean=True))
    seen: list[RecoveryProgress] = []
    asyncio.run(opened(tmp_path, lambda manager: seen.append(manager.recovery)))
    assert {progress.remaining_logs for progress in seen} == {*range(LOGS + 1)}
    assert not any(progress.bytes or progress.remaining_segments for progress in seen)


def test_a_log_that_cannot_be_opened_is_not_left_to_do(tmp_path: Path) -> None:
    asyncio.run(logs_left_by_a_crash(tmp_path))
    (tmp_path / "orders-3" / "partition.metadata").write_bytes(b"damaged")
    manager = asyncio.run(opened(tmp_path, lambda _: None))
    assert [str(partition) for partition in manager.damaged] == ["orders-3"]
    assert (manager.recovery.logs, manager.recovery.remaining_logs) == (LOGS, 0)


# --- Of a broker ---------------------------------------------------------------------------------------------------

SLOW_S = 3.0
"""Seconds that each log takes; the worker threads open a few logs at a time."""


def test_a_broker_tells_of_its_recovery_while_it_lasts_in_metrics_and_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = VirtualCluster(Simulation(), 1, {"metrics.listener": f"0.0.0.0:{PORT}"})
        await cluster.start()
        world = cluster.client("client")
        disk = cluster.simulation.host("broker-0").disk

        async def fill() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic("orders", partitions=LOGS, replication_factor=1)
            async with Producer(cluster.bootstrap, world=world) as producer:
                for number in range(LOGS):
                    await producer.send("orders", b"%d" % number, partition=number)

        await world.process.run(fill())
        cluster.kill_broker(0)
        disk.faults.sync_delay_s = SLOW_S
        seen: list[RecoveryProgress] = []

        async def watch() -> None:
            while not seen or seen[-1].remaining_logs or not seen[-1].logs:
                await asyncio.sleep(SLOW_S / 10)
                with suppress(ConnectionRefusedError):  # it does not listen yet
                    seen.append(of_metrics((await ask(world.network, "broker-0", GET)).body.decode()))

        starting = asyncio.create_task(cluster.start_broker(0))
        await world.process.run(watch())
        assert not starting.done()
        measured = [progress for progress in seen if progress.bytes == seen[-1].bytes > 0]
        left = [
            (progress.remaining_logs, progress.remaining_segments, progress.remaining_bytes) for progress in measured
        ]
        assert left == sorted(left, reverse=True)
        assert left[0] == (LOGS, LOGS, seen[-1].bytes)
        assert left[-1] == (0, 0, 0)
        assert len(set(left)) > 2
        disk.faults.sync_delay_s = 0.0
        await starting

        async def look() -> None:
            page = (await ask(world.network, "broker-0", GET)).body.decode()
            assert of_metrics(page) == seen[-1]
            assert f'kafka_log_logmanager_remaininglogstorecover{{dir="{LOG_DIR}"}} 0.0' in page
            assert "kafka_server_replicamanager_leadercount" in page

        await world.process.run(look())

    with caplog.at_level(logging.INFO, "minibroker.storage"):
        run(scenario())
    news = [record.getMessage() for record in caplog.records if record.getMessage().startswith("recovering")]
    assert len(news) > 1
    assert all(text.startswith(f"recovering {LOG_DIR}: ") and f" of {LOGS} logs, " in text for text in news)


def test_how_far_a_recovery_is_can_be_read_at_a_glance() -> None:
    assert str(RecoveryProgress(12, 9, 20, 4_000_000_000, 2_800_000_000)) == "3 of 12 logs, 1.2 of 4.0 GB"
    assert str(RecoveryProgress(1_200, 0, 0, 4_200_000, 0)) == "1,200 of 1,200 logs, 4.2 of 4.2 MB"
    assert str(RecoveryProgress(2, 1, 0, 0, 0)) == "1 of 2 logs, 0 of 0 bytes"
    assert str(RecoveryProgress(1, 1, 1, 900, 300)) == "0 of 1 logs, 600 of 900 bytes"

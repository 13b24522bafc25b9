from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from minibroker.broker.storage.checkpoints import sealed
from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Disk
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.running import run_by
from tests.storage_support import NOW, PARTITION, FailingDisk, StorageWorld, batch, everything, flip, stamped

OTHER = TopicPartition("other.topic-x", 12)
CONFIG = LogConfig()
CLEAN_MARKER = ".kafka_cleanshutdown"
HIGH_WATERMARKS = "replication-offset-checkpoint"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "data"


class Broker:
    """One life of a broker, as far as its data directory is concerned."""

    def __init__(self, data: Path, *, broker_id: int = 1, disk: Disk | None = None, interval_ms: int = 10**9) -> None:
        self.world = StorageWorld(disk)
        self.logs = LogManager(self.world, str(data), broker_id, checkpoint_interval_ms=interval_ms)

    async def log(self, partition: TopicPartition = PARTITION, topic_id: str = "id", records: int = 0) -> Log:
        log = await self.logs.get_or_create(partition, topic_id, CONFIG)
        for _ in range(records):
            log.append_as_leader(batch(), 0, NOW)
        return log


def live(
    data: Path,
    action: Callable[[Broker], Awaitable[None]] | None = None,
    *,
    clean: bool = True,
    disk: Disk | None = None,
) -> Broker:
    """Open the directory, do something, and stop."""

    async def run() -> Broker:
        broker = Broker(data, disk=disk)
        await broker.logs.open("cluster")
        if action is not None:
            await action(broker)
        await broker.logs.close(clean=clean)
        return broker

    return asyncio.run(run())


def refusal(awaitable: Awaitable[object]) -> Awaitable[ErrorCode]:
    async def run() -> ErrorCode:
        with pytest.raises(BrokerError) as raised:
            await awaitable
        return raised.value.code

    return run()


def test_logs_are_there_again_after_a_restart(data: Path) -> None:
    async def fill(broker: Broker) -> None:
        await broker.log(records=3)
        await broker.log(OTHER, records=2)

    live(data, fill)
    assert sorted(os.listdir(data)) == [
        CLEAN_MARKER,
        ".lock",
        "data-continuity",
        "log-start-offset-checkpoint",
        "meta.properties",
        "orders-0",
        "other.topic-x-12",
        "recovery-point-offset-checkpoint",
    ]
    assert (data / "recovery-point-offset-checkpoint").read_bytes() == sealed(b"0\n2\norders 0 3\nother.topic-x 12 2\n")
    assert (data / "orders-0" / "partition.metadata").read_bytes() == sealed(b"version: 0\ntopic_id: id\n")

    async def look(broker: Broker) -> None:
        assert broker.logs.was_clean
        assert {log.partition: log.log_end_offset for log in broker.logs.logs()} == {PARTITION: 3, OTHER: 2}
        log = broker.logs.get(PARTITION)
        assert log is not None
        assert (log.topic_id, log.recovery_point) == ("id", 3)
        assert everything(log) == b"".join(stamped(batch(), offset, 0) for offset in range(3))
        assert broker.logs.get(TopicPartition("orders", 1)) is None
        assert not any(report.problem for report in broker.logs.reports.values())

    live(data, look)


async def test_the_clean_marker_carries_the_broker_epoch_and_is_gone_while_the_broker_runs(data: Path) -> None:
    first = Broker(data)
    await first.logs.open("cluster")
    assert not first.logs.was_clean
    await first.logs.close(broker_epoch=77)
    assert (data / CLEAN_MARKER).read_bytes() == sealed(b'{"version":0,"brokerEpoch":77}')
    second = Broker(data)
    await second.logs.open("cluster")
    assert (second.logs.was_clean, second.logs.previous_broker_epoch) == (True, 77)
    assert not (data / CLEAN_MARKER).exists()
    await second.logs.close(clean=False)
    third = Broker(data)
    await third.logs.open("cluster")
    assert (third.logs.was_clean, third.logs.previous_broker_epoch) == (False, -1)
    await third.logs.close()


async def test_two_brokers_cannot_have_the_same_directory(data: Path) -> None:
    first, second = Broker(data), Broker(data)
    await first.logs.open("cluster")
    with pytest.raises(DataDirectoryUnusable, match=f"{data} is in use by another broker process: stop it"):
        await second.logs.open("cluster")
    await second.logs.close()
    assert not (data / CLEAN_MARKER).exists()
    await first.logs.close()
    second = Broker(data)
    await second.logs.open("cluster")
    await second.logs.close()


@pytest.mark.parametrize(
    ("broker_id", "cluster_id", "message"),
    [
        (2, "cluster", r"belongs to broker 1, but this is broker 2: start it with broker.id=1, or choose another"),
        (1, "elsewhere", r"belongs to cluster cluster, but this ZooKeeper holds cluster elsewhere: connect"),
    ],
)
def test_the_directory_of_another_broker_or_cluster_is_refused(
    data: Path, broker_id: int, cluster_id: str, message: str
) -> None:
    live(data)

    async def run() -> None:
        with pytest.raises(DataDirectoryUnusable, match=message) as raised:
            await Broker(data, broker_id=broker_id).logs.open(cluster_id)
        assert str(data) in str(raised.value)

    asyncio.run(run())
    live(data)


def test_a_damaged_meta_properties_and_an_unusable_path_say_what_to_do(data: Path, tmp_path: Path) -> None:
    live(data)
    (data / "meta.properties").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")

    async def run() -> None:
        with pytest.raises(DataDirectoryUnusable, match=r"meta\.properties is damaged.*remove that file"):
            await Broker(data).logs.open("cluster")
        with pytest.raises(
            DataDirectoryUnusable, match=r"file/data cannot be used: .*choose another with log.dirs or --data"
        ):
            await Broker(tmp_path / "file" / "data").logs.open("cluster")

    asyncio.run(run())


@run_by(live)
async def test_a_log_of_another_topic_with_the_same_name_is_not_handed_out(broker: Broker, /, data: Path) -> None:
    log = await broker.log(topic_id="first")
    assert await broker.log(topic_id="first") is log
    assert await broker.log(topic_id="") is log
    assert await refusal(broker.log(topic_id="second")) is ErrorCode.INCONSISTENT_TOPIC_ID


def test_a_topic_id_that_becomes_known_later_is_written_down(data: Path) -> None:
    async def without(broker: Broker) -> None:
        await broker.log(topic_id="", records=1)

    async def with_id(broker: Broker) -> None:
        assert (await broker.log(topic_id="late")).log_end_offset == 1

    live(data, without)
    live(data, with_id)
    assert (data / "orders-0" / "partition.metadata").read_bytes() == sealed(b"version: 0\ntopic_id: late\n")


@pytest.mark.parametrize("topic", ["..", "", "a/b", "x" * 250, "\0"])
@run_by(live)
async def test_no_path_leaves_the_directory(broker: Broker, /, data: Path, topic: str) -> None:
    assert await refusal(broker.log(TopicPartition(topic, 0))) is ErrorCode.INVALID_TOPIC_EXCEPTION


def test_the_longest_topic_name_can_be_created_and_deleted(data: Path) -> None:
    partition = TopicPartition("x" * 249, 99_999)

    async def run(broker: Broker) -> None:
        await broker.log(partition, records=1)
        await broker.logs.delete(partition)

    live(data, run)
    assert not [name for name in os.listdir(data) if name.startswith("x")]


@run_by(live)
async def test_creating_the_same_log_twice_at_once_makes_one(broker: Broker, /, data: Path) -> None:
    first, second = await asyncio.gather(broker.log(), broker.log())
    assert first is second


def test_a_deleted_log_is_gone_and_a_new_one_of_that_name_is_empty(data: Path) -> None:
    async def run(broker: Broker) -> None:
        log = await broker.log(records=5)
        log.move_log_start_offset(4)
        await broker.logs.checkpoints.checkpoint_recovery_points()
        await broker.logs.checkpoints.checkpoint_log_start_offsets()
        await broker.logs.delete(PARTITION)
        assert broker.logs.get(PARTITION) is None
        assert not (data / "orders-0").exists()
        await broker.logs.delete(PARTITION)
        log = await broker.log(topic_id="another", records=1)
        # After a crash now, the checkpoints must not name the old log.
        assert b"orders 0 0\n" in (data / "recovery-point-offset-checkpoint").read_bytes()
        assert b"orders 0 0\n" in (data / "log-start-offset-checkpoint").read_bytes()
        assert (log.log_start_offset, log.log_end_offset) == (0, 1)

    live(data, run)
    assert not [name for name in os.listdir(data) if name.endswith("-delete")]


@run_by(live)
async def test_deleting_waits_for_a_creation_under_way(broker: Broker, /, data: Path) -> None:
    creation = asyncio.create_task(broker.log())
    await asyncio.sleep(0)
    await broker.logs.delete(PARTITION)
    await creation
    assert broker.logs.get(PARTITION) is None
    assert not (data / "orders-0").exists()


def test_what_an_interrupted_deletion_left_is_removed_and_what_is_not_ours_is_left_alone(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = data / ("orders-0." + "0123456789abcdef" * 2 + "-delete")
    for name in (leftover.name, "my-delete", "no partition", "orders-01", "orders-x", "..-0", "lost+found"):
        (data / name).mkdir(parents=True)
        (data / name / "00000000000000000000.log").write_bytes(b"keep")
    with caplog.at_level(logging.INFO, "minibroker.storage"):

        async def look(broker: Broker) -> None:
            assert broker.logs.logs() == []

        live(data, look)
    assert not leftover.exists()
    for name in ("my-delete", "no partition", "orders-01", "orders-x", "..-0", "lost+found"):
        assert (data / name / "00000000000000000000.log").read_bytes() == b"keep"
        assert f"ignoring {data}/{name}" in caplog.text


def test_a_damaged_replica_costs_nothing_but_itself_and_is_never_overwritten(data: Path) -> None:
    async def fill(broker: Broker) -> None:
        await broker.log(records=3)
        await broker.log(OTHER, records=2)

    live(data, fill)
    (data / "orders-0" / "partition.metadata").write_bytes(b"\0\0\0")

    async def look(broker: Broker) -> None:
        assert list(broker.logs.damaged) == [PARTITION]
        assert "partition.metadata is damaged" in broker.logs.damaged[PARTITION]
        assert "nothing of it is deleted" in broker.logs.damaged[PARTITION]
        assert [log.partition for log in broker.logs.logs()] == [OTHER]
        assert await refusal(broker.log()) is ErrorCode.KAFKA_STORAGE_ERROR

    live(data, look)

    async def move_away(broker: Broker) -> None:
        assert list(broker.logs.damaged) == [PARTITION]
        (data / "orders-0").rename(data / "elsewhere")
        assert (await broker.log(records=1)).log_end_offset == 1
        assert broker.logs.damaged == {}

    live(data, move_away)


def test_a_log_that_was_set_aside_is_asked_for_in_vain_until_the_next_start(data: Path) -> None:
    async def set_aside(broker: Broker) -> None:
        log, other = await broker.log(records=3), await broker.log(OTHER, records=1)
        await broker.logs.set_aside(PARTITION, "its leader does not fit")
        assert "its leader does not fit" in broker.logs.damaged[PARTITION]
        assert await refusal(broker.log()) is ErrorCode.KAFKA_STORAGE_ERROR
        assert await broker.logs.topic_id(PARTITION) == "id"
        assert log.recovery_point == 3
        with pytest.raises(BrokerError):
            log.append_as_leader(batch(), 0, NOW)
        other.append_as_leader(batch(), 0, NOW)

    async def look(broker: Broker) -> None:
        assert broker.logs.damaged == {}
        assert (await broker.log()).log_end_offset == 3

    live(data, set_aside)
    live(data, look)


def test_the_topic_id_of_a_replica_is_known_where_it_cannot_be_opened(data: Path) -> None:
    live(data, lambda broker: broker.log(records=3))  # type: ignore[arg-type,return-value]
    segment = data / "orders-0" / "00000000000000000000.log"
    segment.rename(data / "orders-0" / "00000000000000000002.log")
    (data / "orders-0" / "00000000000000000000.log").mkdir()

    async def look(broker: Broker) -> None:
        assert list(broker.logs.damaged) == [PARTITION]
        assert await broker.logs.topic_id(PARTITION) == "id"
        (data / "orders-0" / "partition.metadata").write_bytes(b"")
        assert await broker.logs.topic_id(PARTITION) == ""
        assert await broker.logs.topic_id(OTHER) == ""

    live(data, look)


def test_a_damaged_replica_can_be_deleted(data: Path) -> None:
    live(data, lambda broker: broker.log(records=3))  # type: ignore[arg-type,return-value]
    (data / "orders-0" / "partition.metadata").write_bytes(b"\0\0\0")

    async def delete(broker: Broker) -> None:
        await broker.logs.delete(PARTITION)
        assert (await broker.log()).log_end_offset == 0

    live(data, delete)


def test_a_replica_that_missed_a_clean_stop_is_checked_as_after_a_crash(data: Path) -> None:
    async def fill(broker: Broker) -> None:
        broker.logs.registered(1)
        await broker.log(records=3)

    live(data, fill, clean=False)
    metadata = data / "orders-0" / "partition.metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(b"\0")
    live(data)  # it cannot be opened, and the broker stops in order
    metadata.write_bytes(good)
    log_file = data / "orders-0" / "00000000000000000000.log"
    content = bytearray(log_file.read_bytes())
    content[100] ^= 1
    log_file.write_bytes(content)

    async def look(broker: Broker) -> None:
        assert broker.logs.was_clean
        assert (await broker.log()).log_end_offset == 1
        assert broker.logs.reports[PARTITION].lost_more_than_an_incomplete_batch

    live(data, look)


SEGMENTS = LogConfig(segment_bytes=3 * len(batch()))


async def several_segments(broker: Broker) -> None:
    """Return a log of three segments of three batches: it begins at offset 1, is committed up to 8, and flushed except
    for the last."""
    log = await broker.logs.get_or_create(PARTITION, "id", SEGMENTS)
    for number in range(9):
        if number == 8:
            await broker.logs.checkpoints.checkpoint_recovery_points()
        log.append_as_leader(batch(), 0, NOW)
    log.move_log_start_offset(1)
    await broker.logs.checkpoints.checkpoint_log_start_offsets()
    broker.logs.checkpoints.write_high_watermarks(broker.logs.checkpoints.stage_high_watermarks({PARTITION: 8}))


def damage(data: Path) -> Callable[[], None]:
    """Damage the second segment where a start reads it. Returns a function that repairs it."""
    file = data / "orders-0" / "00000000000000000003.log"
    good = file.read_bytes()
    flip(file, 100)
    file.with_suffix(".index").unlink(missing_ok=True)

    def mend() -> None:
        file.write_bytes(good)

    return mend


def records_of(data: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (data / "orders-0").glob("*.log")}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_no_later_start_cuts_a_replica_that_could_not_be_opened(data: Path, before: bool, after: bool) -> None:
    live(data, several_segments, clean=before)
    mend = damage(data)
    damaged = records_of(data)

    async def cannot_be_opened(broker: Broker) -> None:
        assert list(broker.logs.damaged) == [PARTITION]
        assert "move this segment and those after it elsewhere" in broker.logs.damaged[PARTITION]
        await broker.log(OTHER, records=1)
        broker.logs.checkpoints.write_high_watermarks(broker.logs.checkpoints.stage_high_watermarks({OTHER: 1}))
        await broker.logs.checkpoints.checkpoint_recovery_points()
        await broker.logs.checkpoints.checkpoint_log_start_offsets()

    for _ in range(3):
        live(data, cannot_be_opened, clean=after)
        assert records_of(data) == damaged
    mend()

    async def is_as_before(broker: Broker) -> None:
        log = await broker.log()
        assert (log.log_start_offset, log.log_end_offset) == (1, 9)
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 8

    live(data, is_as_before)


def test_who_does_without_what_follows_the_damage_moves_it_away(data: Path) -> None:
    live(data, several_segments)
    damage(data)
    live(data)
    for name in ("00000000000000000003", "00000000000000000006"):
        (data / "orders-0" / f"{name}.log").rename(data / f"{name}.log")

    async def look(broker: Broker) -> None:
        log = await broker.log()
        assert (log.log_start_offset, log.log_end_offset) == (1, 3)
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 3
        assert broker.logs.continuity.trusted_since == SINCE_THIS_REGISTRATION

    live(data, look)


def test_what_was_set_aside_is_not_cut_where_it_had_been_safe(data: Path) -> None:
    async def set_aside(broker: Broker) -> None:
        await several_segments(broker)
        await broker.logs.set_aside(PARTITION, "a batch is damaged", is_damaged=True)
        await broker.logs.checkpoints.checkpoint_recovery_points()

    live(data, set_aside, clean=False)
    damage(data)
    damaged = records_of(data)
    live(data)
    assert records_of(data) == damaged


@pytest.mark.parametrize("clean", [True, False])
def test_what_began_anew_and_was_set_aside_at_once_is_opened_by_the_next_start(data: Path, clean: bool) -> None:
    """When it was emptied, its file began to say that it begins at 0; no record is missing."""

    async def begin_anew(broker: Broker) -> None:
        log = await broker.log(records=3)
        await broker.logs.checkpoints.checkpoint_recovery_points()
        log.truncate_fully_and_start_at(100, 0)
        log.append_as_follower(stamped(batch(), 100, 0))
        await log.flush()
        await broker.logs.set_aside(PARTITION, "its leader does not fit")
        await broker.logs.checkpoints.checkpoint_recovery_points()

    async def look(broker: Broker) -> None:
        assert broker.logs.damaged == {}
        log = await broker.log()
        assert (log.log_start_offset, log.log_end_offset) == (100, 101)

    live(data, begin_anew, clean=clean)
    live(data, look)


def test_damaged_checkpoints_are_done_without(data: Path) -> None:
    live(data, lambda broker: broker.log(records=3))  # type: ignore[arg-type,return-value]
    for name in ("recovery-point-offset-checkpoint", "log-start-offset-checkpoint", "replication-offset-checkpoint"):
        (data / name).write_bytes(b"\0" * 100)
    (data / CLEAN_MARKER).write_bytes(b"\0")

    async def look(broker: Broker) -> None:
        assert (await broker.log()).log_end_offset == 3
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0
        assert not broker.logs.was_clean

    live(data, look)


def test_high_watermarks_come_back_as_they_were_written(data: Path) -> None:
    async def write(broker: Broker) -> None:
        await broker.log(records=7)
        await broker.log(OTHER, records=3)
        broker.logs.checkpoints.write_high_watermarks(
            broker.logs.checkpoints.stage_high_watermarks({PARTITION: 7, OTHER: 2})
        )

    async def read(broker: Broker) -> None:
        assert [broker.logs.checkpoints.high_watermark(partition) for partition in (PARTITION, OTHER)] == [7, 2]
        broker.logs.checkpoints.write_high_watermarks(broker.logs.checkpoints.stage_high_watermarks({OTHER: 3}))

    live(data, write, clean=False)
    live(data, read)
    assert (data / HIGH_WATERMARKS).read_bytes() == sealed(b"0\n2\norders 0 7\nother.topic-x 12 3\n")


async def _committed(broker: Broker, mark: int) -> Log:
    """Return a log of so many records, all committed, with the high watermark on file."""
    log = await broker.log(records=mark)
    broker.logs.checkpoints.write_high_watermarks(broker.logs.checkpoints.stage_high_watermarks({PARTITION: mark}))
    return log


def test_the_high_watermark_of_a_deleted_topic_is_not_believed_of_the_next_one_of_its_name(data: Path) -> None:
    async def recreate(broker: Broker) -> None:
        await _committed(broker, 7)
        await broker.logs.delete(PARTITION)
        await broker.log(topic_id="another", records=9)
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0

    async def look(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0
        assert (await broker.log(topic_id="another")).log_end_offset == 9

    live(data, recreate, clean=False)
    live(data, look)


def test_a_picture_of_high_watermarks_that_is_written_late_does_not_bring_back_a_deleted_topic(data: Path) -> None:
    async def recreate(broker: Broker) -> None:
        await _committed(broker, 6)
        late = broker.logs.checkpoints.stage_high_watermarks({PARTITION: 7})
        await broker.logs.delete(PARTITION)
        without = broker.logs.checkpoints.stage_high_watermarks(
            {}
        )  # nor may the file lag behind a picture that leaves it out
        await broker.log(topic_id="another", records=9)
        assert b"orders 0 6" not in (data / HIGH_WATERMARKS).read_bytes()
        broker.logs.checkpoints.write_high_watermarks(late)
        broker.logs.checkpoints.write_high_watermarks(without)

    async def look(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0

    live(data, recreate, clean=False)
    live(data, look)


def test_a_high_watermark_is_not_believed_of_what_comes_after_a_truncation(data: Path) -> None:
    async def cut(broker: Broker) -> None:
        log = await _committed(broker, 7)
        log.truncate_to(4)
        for _ in range(5):
            log.append_as_leader(batch(), 1, NOW)

    async def look(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 4

    live(data, cut, clean=False)
    live(data, look)


def test_a_high_watermark_past_the_recovered_end_is_lowered_before_any_append(data: Path) -> None:
    async def fill(broker: Broker) -> None:
        await _committed(broker, 7)

    async def append(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 6
        log = await broker.log()
        for _ in range(5):
            log.append_as_leader(batch(), 1, NOW)

    async def look(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 6

    live(data, fill, clean=False)
    segment = data / "orders-0" / "00000000000000000000.log"
    os.truncate(segment, segment.stat().st_size - 1)  # a power cut
    live(data, append, clean=False)
    live(data, look)


def test_the_high_watermark_of_a_log_that_is_not_there_is_ignored(data: Path) -> None:
    async def fill(broker: Broker) -> None:
        await _committed(broker, 7)

    async def recreate(broker: Broker) -> None:
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0
        await broker.log(records=9)
        assert broker.logs.checkpoints.high_watermark(PARTITION) == 0

    live(data, fill, clean=False)
    (data / "orders-0").rename(data.parent / "moved away")
    live(data, recreate, clean=False)


def test_a_moved_start_is_not_believed_past_a_truncation(data: Path) -> None:
    async def cut(broker: Broker) -> None:
        log = await broker.logs.get_or_create(PARTITION, "id", CONFIG)
        log.append_as_leader(batch(10), 0, NOW)
        log.move_log_start_offset(5)
        await broker.logs.checkpoints.checkpoint_log_start_offsets()
        log.truncate_to(6)  # the whole batch goes
        log.append_as_leader(batch(10), 0, NOW)
        assert log.log_start_offset == 0

    async def look(broker: Broker) -> None:
        assert (await broker.log()).log_start_offset == 0

    live(data, cut, clean=False)
    live(data, look)


@run_by(live)
async def test_the_lock_of_a_partition_lasts_no_longer_than_it_is_needed(broker: Broker, /, data: Path) -> None:
    await asyncio.gather(*(broker.log() for _ in range(3)), broker.logs.delete(PARTITION))
    await broker.logs.delete(PARTITION)
    assert len(broker.logs._partition_locks) == 0


def test_a_moved_start_survives_a_restart(data: Path) -> None:
    async def move(broker: Broker) -> None:
        (await broker.log(records=5)).move_log_start_offset(3)

    async def look(broker: Broker) -> None:
        assert (await broker.log()).log_start_offset == 3

    live(data, move)
    live(data, look)


async def test_logs_are_flushed_and_the_recovery_points_written_at_every_interval(data: Path) -> None:
    broker = Broker(data, interval_ms=1)
    await broker.logs.open("cluster")
    log = await broker.log(records=3)
    checkpoint = data / "recovery-point-offset-checkpoint"
    async with asyncio.timeout(60):
        while b"orders 0 3\n" not in checkpoint.read_bytes():
            await asyncio.sleep(0.001)
    assert log.recovery_point == 3
    await broker.logs.close(clean=False)


@run_by(live)
async def test_a_truncation_below_a_recovery_point_on_disk_lowers_that_first(broker: Broker, /, data: Path) -> None:
    log = await broker.log(records=5)
    await broker.log(OTHER, records=4)
    await broker.logs.checkpoints.checkpoint_recovery_points()
    log.truncate_to(2)
    assert (data / "recovery-point-offset-checkpoint").read_bytes() == sealed(b"0\n2\norders 0 2\nother.topic-x 12 4\n")


@pytest.mark.parametrize("failure", ["write", "sync"])
def test_a_failed_disk_is_announced_once_and_leaves_no_clean_marker(data: Path, failure: str) -> None:
    disk = FailingDisk()
    told: list[str] = []

    async def run(broker: Broker) -> None:
        broker.logs.directory.on_offline(lambda: told.append("offline"))
        log = await broker.log(records=2)
        other = await broker.log(OTHER, records=2)
        disk.fail = failure
        if failure == "write":
            with pytest.raises(BrokerError):
                log.append_as_leader(batch(), 0, NOW)
        else:
            assert await refusal(broker.logs.checkpoints.checkpoint_recovery_points()) is ErrorCode.KAFKA_STORAGE_ERROR
        disk.fail = None
        with pytest.raises(BrokerError) as raised:
            other.append_as_leader(batch(), 0, NOW)
        assert raised.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert isinstance(broker.logs.directory.failure, OSError)
        for refused in (
            broker.log(TopicPartition("new", 0)),
            broker.logs.delete(PARTITION),
            broker.logs.checkpoints.checkpoint_recovery_points(),
        ):
            assert await refusal(refused) is ErrorCode.KAFKA_STORAGE_ERROR
        with pytest.raises(BrokerError):
            broker.logs.checkpoints.write_high_watermarks(broker.logs.checkpoints.stage_high_watermarks({}))

    live(data, run, disk=disk)
    assert told == ["offline"]
    assert not (data / CLEAN_MARKER).exists()

    async def look(broker: Broker) -> None:
        assert not broker.logs.was_clean
        assert {log.log_end_offset for log in broker.logs.logs()} == {2}

    live(data, look)

"""Since when a data directory has lost nothing: the effect of each stop; interruptions only ever reduce trust."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from minibroker.broker.storage.checkpoints import LOG_START_OFFSET_FILE, RECOVERY_POINT_FILE, MalformedFile
from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.recovery.continuity import (
    CONTINUITY_FILE,
    Continuity,
    DataContinuity,
    decode_continuity,
    encode_continuity,
)
from minibroker.deploy.simulator.disk import ProcessDisk
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.simulation.mutants import planted
from tests.storage_support import NOW, PARTITION, StorageHost, StorageWorld, batch, stamped

FILE = f"/data/{CONTINUITY_FILE}"
CONFIG = LogConfig()


class Host(StorageHost):
    """A data directory and its starts. Epochs are 1, 2, ... in the order of the registrations."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.epochs = 0
        self.said_of_the_flushed = SINCE_THIS_REGISTRATION

    def live(
        self,
        *,
        clean: bool = False,
        register: bool = True,
        records: int = 1,
        action: Callable[[LogManager], None] = lambda logs: None,
    ) -> int:
        """Run one life of the broker. Returns the trust that it reported when it registered."""

        async def run() -> int:
            logs = LogManager(StorageWorld(self.start_process()), "/data", 1, checkpoint_interval_ms=10**9)
            await logs.open("cluster")
            said = logs.continuity.trusted_since
            self.said_of_the_flushed = logs.continuity.synced_since
            if register:
                self.epochs += 1
                logs.registered(self.epochs)
            if PARTITION not in logs.damaged:
                log = await logs.get_or_create(PARTITION, "id", CONFIG)
                for _ in range(records):
                    log.append_as_leader(batch(), 0, NOW)
            action(logs)
            await logs.close(clean=clean)
            return said

        return asyncio.run(run())

    def crash_while_starting(self, after_changes: int) -> bool:
        """Let the process and its disk die after so many changes. Returns False if it had started by then."""
        disk, faults = self.start_process(), self.medium.faults

        async def run() -> bool:
            faults.die_after(after_changes)
            logs = LogManager(StorageWorld(disk), "/data", 1, checkpoint_interval_ms=10**9)
            try:
                await logs.open("cluster")
            except DataDirectoryUnusable:
                return True
            died = faults.is_dead
            faults.clear()
            await logs.close(clean=False)
            return died

        return asyncio.run(run())

    def cut_power(self, seed: int = 0) -> None:
        self.power_cut(Random(seed))

    def damage_the_middle(self) -> None:
        """Append at least three batches; the next start cuts what follows."""
        path = f"/data/{PARTITION}/00000000000000000000.log"
        file = self.disk.open(path)
        position = file.size() // 2
        file.pwrite([bytes([file.pread(1, position)[0] ^ 0xFF])], position)
        file.close()

    def sync_the_log(self) -> None:
        file = self.disk.open(f"/data/{PARTITION}/00000000000000000000.log")
        file.fdatasync()
        file.close()
        self.disk.sync_directory(f"/data/{PARTITION}")

    def cut_the_whole_log(self) -> None:
        file = self.disk.open(f"/data/{PARTITION}/00000000000000000000.log")
        file.truncate(0)
        file.fdatasync()
        file.close()

    def remove_the_directory(self) -> None:
        self.disk.remove_tree(f"/data/{PARTITION}")
        self.disk.sync_directory("/data")


def test_a_new_directory_is_trusted_from_its_first_registration_on() -> None:
    host = Host()
    assert host.live() == SINCE_THIS_REGISTRATION
    written = decode_continuity(FILE, host.disk.read_file(FILE))
    assert (written.boot_id, written.trusted_since, written.synced_since) == ("boot-1", 1, 1)


def test_a_killed_process_comes_back_with_everything() -> None:
    host = Host()
    host.live()
    assert [host.live(), host.live()] == [1, 1]


def test_after_a_power_cut_nothing_is_believed_before_the_next_registration() -> None:
    host = Host()
    host.live()
    host.cut_power()
    assert host.live() == SINCE_THIS_REGISTRATION
    assert host.live() == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_power_cut_takes_nothing_that_was_flushed(seed: int) -> None:
    host = Host()
    host.live(records=20)
    host.cut_power(seed)
    assert (host.live(records=20), host.said_of_the_flushed) == (SINCE_THIS_REGISTRATION, 1)
    assert (host.live(), host.said_of_the_flushed) == (2, 1)


def test_what_a_power_cut_tore_above_the_recovery_point_is_the_unflushed_tail() -> None:
    host = Host()
    host.live(records=5)
    host.damage_the_middle()
    host.sync_the_log()
    host.cut_power()
    assert (host.live(), host.said_of_the_flushed) == (SINCE_THIS_REGISTRATION, 1)


def test_a_death_while_cutting_the_torn_tail_keeps_the_trust_in_flushed_records() -> None:
    def with_a_torn_tail(host: Host) -> None:
        host.live(records=5)
        host.damage_the_middle()
        host.sync_the_log()
        host.cut_power()

    for host in starts_that_die(with_a_torn_tail):
        assert (host.live(), host.said_of_the_flushed) == (SINCE_THIS_REGISTRATION, 1)


@pytest.mark.parametrize("loss", [Host.damage_the_middle, Host.cut_the_whole_log, Host.remove_the_directory])
def test_what_no_power_cut_explains_costs_the_trust_in_what_was_flushed(loss: Callable[[Host], None]) -> None:
    host = Host()
    host.live(records=5, clean=loss is not Host.damage_the_middle)
    loss(host)
    assert host.live() == SINCE_THIS_REGISTRATION == host.said_of_the_flushed
    assert (host.live(), host.said_of_the_flushed) == (2, 2)


@pytest.mark.parametrize("loss", [Host.cut_the_whole_log, Host.remove_the_directory])
def test_a_loss_of_what_had_been_flushed_is_not_put_down_to_a_power_cut(loss: Callable[[Host], None]) -> None:
    host = Host()
    host.live(records=5, clean=True)
    host.live(records=5)
    loss(host)
    host.cut_power()
    assert host.live() == SINCE_THIS_REGISTRATION == host.said_of_the_flushed


def test_missing_flushed_records_after_a_power_cut_are_noticed_as_far_as_recorded() -> None:
    host = Host()

    async def append_and_write_down() -> None:
        logs = LogManager(StorageWorld(host.start_process()), "/data", 1, checkpoint_interval_ms=10**9)
        await logs.open("cluster")
        logs.registered(1)
        log = await logs.get_or_create(PARTITION, "id", LogConfig(synced=True))
        for _ in range(3):
            log.append_as_leader(batch(), 0, NOW)
        await log.flush()
        await logs.checkpoints.checkpoint_synced()
        await logs.close(clean=False)

    asyncio.run(append_and_write_down())
    host.cut_the_whole_log()
    host.cut_power()
    assert host.live() == SINCE_THIS_REGISTRATION == host.said_of_the_flushed


SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_topic_id_that_a_power_cut_has_torn_costs_nothing_that_was_flushed(seed: int) -> None:
    """It is written when the log is created, and is on disk after the first flush."""
    _tear_the_topic_id(seed)


@pytest.mark.parametrize("bug", ["topic-id-not-flushed", "unflushed-topic-id-believed"])
def test_a_torn_topic_id_costs_records_without_its_first_flush_or_without_the_check(
    bug: str,
) -> None:
    def tear_all() -> None:
        for seed in SEEDS:
            _tear_the_topic_id(seed)

    with planted(bug), pytest.raises(AssertionError):
        tear_all()


def _tear_the_topic_id(seed: int) -> None:
    newborn, flushed = Host(), Host()
    newborn.live(records=3)
    newborn.cut_power(seed)
    newborn.live(records=2, action=has_a_log)
    flushed.live(records=3, clean=True)
    flushed.cut_power(seed)
    flushed.live(records=0, action=partial(has_a_log, at_least=3))


def test_a_topic_id_that_is_damaged_without_a_power_cut_is_no_matter_of_memory() -> None:
    host = Host()
    host.live(records=3)
    file = host.disk.open(f"/data/{PARTITION}/partition.metadata")
    file.truncate(0)
    file.pwrite([b"nonsense"], 0)
    file.close()
    host.live(action=is_damaged)


def has_a_log(logs: LogManager, *, at_least: int = 0) -> None:
    log = logs.get(PARTITION)
    assert log is not None
    assert log.topic_id == "id"
    assert log.log_end_offset >= at_least


def is_damaged(logs: LogManager) -> None:
    assert PARTITION in logs.damaged


def test_a_file_that_does_not_say_it_of_what_was_flushed_means_the_same() -> None:
    assert decode_continuity("f", b'{"boot_id":"b","trusted_since":3}').synced_since == 3


def test_a_clean_stop_outlasts_the_start_of_the_host() -> None:
    host = Host()
    host.live(clean=True)
    host.cut_power()
    assert host.live() == 1
    assert host.live() == 1, "the file has the new boot id"
    host.cut_power()
    assert host.live() == SINCE_THIS_REGISTRATION


def test_the_same_process_registers_again_with_the_epoch_that_it_got_first() -> None:
    host = Host()

    def lose_the_session(logs: LogManager) -> None:
        logs.registered(7)
        assert logs.continuity.trusted_since == 1

    host.live(action=lose_the_session)
    assert host.live() == 1


def test_a_broker_that_was_never_registered_has_nothing_to_be_believed() -> None:
    host = Host()
    host.live(register=False)
    assert host.live(clean=True, register=False) == SINCE_THIS_REGISTRATION
    assert host.live() == SINCE_THIS_REGISTRATION


def test_a_lower_epoch_is_of_another_zookeeper() -> None:
    host = Host()
    host.epochs = 1_000
    host.live()
    host.epochs = 5
    host.live()
    assert host.live() == 6


def test_a_log_that_had_to_be_cut_is_distrusted_though_the_host_was_up_all_the_time() -> None:
    host = Host()
    host.live(records=5)
    host.damage_the_middle()
    assert host.live() == SINCE_THIS_REGISTRATION
    assert host.live() == 2


def test_an_incomplete_last_batch_is_what_a_killed_process_leaves_and_costs_no_trust() -> None:
    host = Host()
    host.live(records=3)
    file = host.disk.open(f"/data/{PARTITION}/00000000000000000000.log")
    torn = stamped(batch(1, size=5_000), 3, 0)[: 4_096 - file.size()]
    file.pwrite([torn], file.size())
    assert host.live() == 1


def test_a_log_that_is_cut_short_in_the_middle_of_a_page_is_distrusted() -> None:
    host = Host()
    host.live(records=3)
    file = host.disk.open(f"/data/{PARTITION}/00000000000000000000.log")
    file.truncate(file.size() - 5)
    assert host.live() == SINCE_THIS_REGISTRATION


def test_a_log_shorter_than_its_recovery_point_is_distrusted() -> None:
    host = Host()
    host.live(records=3, clean=True)
    host.cut_the_whole_log()
    assert host.live() == SINCE_THIS_REGISTRATION


def test_a_replica_that_cannot_be_opened_or_whose_directory_was_removed_is_distrusted() -> None:
    host = Host()
    host.live(records=3, clean=True)
    host.disk.remove(f"/data/{PARTITION}/partition.metadata")
    file = host.disk.open(f"/data/{PARTITION}/partition.metadata", create=True)
    file.pwrite([b"nonsense"], 0)
    assert host.live(clean=True) == SINCE_THIS_REGISTRATION
    host.remove_the_directory()
    assert host.live(records=2, clean=True) == SINCE_THIS_REGISTRATION
    host.remove_the_directory()
    assert host.live() == SINCE_THIS_REGISTRATION


@pytest.mark.parametrize("file", [RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE])
def test_without_the_files_that_would_show_a_loss_nothing_is_believed(file: str) -> None:
    host = Host()
    host.live(records=3, clean=True)
    host.disk.write_atomically(f"/data/{file}", b"nonsense")
    assert host.live(clean=True) == SINCE_THIS_REGISTRATION
    assert host.live() == 2


def test_a_log_that_ends_before_what_was_committed_is_distrusted() -> None:
    host = Host()
    host.live(
        records=3,
        action=lambda logs: logs.checkpoints.write_high_watermarks(
            logs.checkpoints.stage_high_watermarks({PARTITION: 3})
        ),
    )
    file = host.disk.open(f"/data/{PARTITION}/00000000000000000000.log")
    file.truncate(len(batch()))
    assert host.live() == SINCE_THIS_REGISTRATION


def test_a_deleted_topic_costs_no_trust() -> None:
    host = Host()

    async def delete() -> None:
        logs = LogManager(StorageWorld(host.start_process()), "/data", 1)
        await logs.open("cluster")
        await logs.delete(PARTITION)
        await logs.close(clean=False)

    host.live(records=3, clean=True)
    asyncio.run(delete())
    assert host.live() == 1


def test_a_disk_that_has_failed_is_distrusted_though_it_works_again() -> None:
    host = Host()

    def fail(logs: LogManager) -> None:
        logs.directory.fail(OSError("no more"), "writing")

    host.live(action=fail, clean=True)
    assert host.live() == SINCE_THIS_REGISTRATION


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"{}",
        b'{"version":1,"boot_id":"boot-1","trusted_since":1}',
        b'{"boot_id":"","trusted_since":-2}',
    ],
)
def test_a_damaged_file_is_as_good_as_none(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.live(clean=True)
    host.disk.write_atomically(FILE, content)
    with pytest.raises(MalformedFile, match=CONTINUITY_FILE):
        decode_continuity(FILE, content)
    with caplog.at_level(logging.WARNING):
        assert host.live() == SINCE_THIS_REGISTRATION
    assert CONTINUITY_FILE in caplog.text


def test_where_the_host_has_no_boot_id_only_a_clean_stop_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()

    def none(disk: ProcessDisk) -> str:
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(ProcessDisk, "boot_id", none)
    host.live(clean=True)
    assert host.live() == 1
    assert host.live() == SINCE_THIS_REGISTRATION


def test_what_cannot_be_written_down_is_not_taken_for_written() -> None:
    host = Host()
    disk, faults = host.disk, host.medium.faults
    disk.make_directories("/data")
    disk.write_atomically(FILE, encode_continuity(Continuity(boot_id="boot-1", trusted_since=3)))
    continuity = DataContinuity(disk, "/data", Random(1))
    continuity.begin(was_clean=False)
    faults.die_after(0)
    for _ in range(2):
        with pytest.raises(OSError):
            continuity.distrust("the test says so")
    faults.clear()
    assert decode_continuity(FILE, disk.read_file(FILE)).trusted_since == 3
    continuity.distrust("the test says so")
    assert decode_continuity(FILE, disk.read_file(FILE)).trusted_since == SINCE_THIS_REGISTRATION


# --- Crashes in the middle of a start --------------------------------------------------------------------------


def starts_that_die(prepare: Callable[[Host], None]) -> list[Host]:
    """Yield hosts whose broker died after the first, second, ... change of a start, until one start succeeds."""
    hosts = []
    for changes in range(1_000):
        host = Host()
        prepare(host)
        died = host.crash_while_starting(changes)
        hosts.append(host)
        if not died:
            return hosts
    raise AssertionError("a start takes a thousand changes")


def with_a_damaged_log(host: Host) -> None:
    host.live(records=5)
    host.damage_the_middle()


def with_a_shortened_log(host: Host) -> None:
    host.live(records=3, clean=True)
    host.cut_the_whole_log()


def with_a_removed_directory(host: Host) -> None:
    host.live(records=3, clean=True)
    host.remove_the_directory()


def set_aside_and_stopped(host: Host, how: str) -> None:
    """Return a host where a log is set aside shortly before its broker stops in order."""

    async def run() -> None:
        world = StorageWorld(host.start_process())
        logs = LogManager(world, "/data", 1, checkpoint_interval_ms=10**9)
        await logs.open("cluster")
        logs.registered(1)
        log = await logs.get_or_create(PARTITION, "id", CONFIG)
        for _ in range(3):
            log.append_as_leader(batch(), 0, NOW)
        log.move_log_start_offset(2)
        if how == "short of descriptors":
            host.medium.faults.descriptor_limit = 0
        ending = asyncio.ensure_future(logs.set_aside(PARTITION, "its leader's does not fit"))

        def interrupt() -> None:
            ending.cancel()

        if how == "interrupted":
            world.executor.before = interrupt  # as its flush begins
        await asyncio.wait([ending])
        assert ending.cancelled() == (how == "interrupted")
        host.medium.faults.clear()
        await logs.close(broker_epoch=1)

    asyncio.run(run())


def next_start(host: Host) -> tuple[int, int, int]:
    """Return the trust that the next start reports, with the log's start and end."""
    found: list[tuple[int, int]] = []

    def look(logs: LogManager) -> None:
        log = logs.get(PARTITION)
        assert log is not None
        found.append((log.log_start_offset, log.log_end_offset))

    said = host.live(records=0, action=look)
    return said, *found[0]


@pytest.mark.parametrize("how", ["in peace", "interrupted"])
def test_a_clean_stop_vouches_for_a_log_that_was_set_aside(how: str) -> None:
    for seed in range(10):
        host = Host()
        set_aside_and_stopped(host, how)
        host.cut_power(seed)
        assert next_start(host) == (1, 2, 3)


def test_a_stop_that_leaves_a_log_unflushed_which_was_set_aside_is_not_clean() -> None:
    lost = 0
    for seed in range(10):
        host = Host()
        set_aside_and_stopped(host, "short of descriptors")
        host.cut_power(seed)
        # None of it was flushed, so its start is not on disk either: a new log would not know its producers.
        said, start, end = next_start(host)
        assert (said, start) == (SINCE_THIS_REGISTRATION, 0)
        lost += end < 3
    assert lost


def after_a_power_cut(host: Host) -> None:
    host.live(records=5)
    host.cut_power()


@pytest.mark.parametrize(
    "loss", [with_a_damaged_log, with_a_shortened_log, with_a_removed_directory, after_a_power_cut]
)
@pytest.mark.parametrize("power_fails", [False, True], ids=["killed", "power cut"])
def test_wherever_a_start_after_a_loss_is_interrupted_the_next_one_knows_of_it(
    loss: Callable[[Host], None], power_fails: bool
) -> None:
    hosts = starts_that_die(loss)
    assert len(hosts) > 3, "there is something to interrupt"
    for number, host in enumerate(hosts):
        if power_fails:
            host.cut_power(seed=number)
        assert host.live() == SINCE_THIS_REGISTRATION, f"after {number} changes"


def test_a_start_after_a_clean_stop_may_be_killed_at_any_point_and_nothing_is_distrusted() -> None:
    def stopped_and_moved_to_a_new_start_of_the_host(host: Host) -> None:
        host.live(records=3, clean=True)
        host.cut_power()

    for number, host in enumerate(starts_that_die(stopped_and_moved_to_a_new_start_of_the_host)):
        assert host.live() == 1, f"after {number} changes"


def test_what_was_written_after_a_start_of_the_host_is_never_believed_after_the_next_one() -> None:
    for seed in range(20):
        host = Host()
        host.live(clean=True)
        host.cut_power(seed)
        host.live(records=2)  # by another start of the host than the one that was stopped cleanly
        host.cut_power(seed)
        assert host.live() == SINCE_THIS_REGISTRATION

"""Errors that cost a log directory, and errors that fail only one call."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.flushing import SHORTAGE_PAUSE_S
from minibroker.broker.storage.io_errors import Shortage, Trouble, trouble_of
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.storage_support import NOW, Opened, StorageHost, StorageWorld, batch, everything, open_log
from tests.waiting import until

NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
SHORTAGES = NO_DESCRIPTORS | {errno.ENOMEM, errno.EAGAIN}
BUGS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ESPIPE}
FAILURES = {errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENOENT, errno.EACCES, errno.ENODEV, errno.ESTALE}
ALL = sorted(SHORTAGES | BUGS | FAILURES)

Call = Callable[[Log], object]


def test_every_error_is_a_shortage_a_bug_or_a_failed_disk() -> None:
    for number in errno.errorcode:
        error = OSError(number, "")
        reading, changing = trouble_of(error, is_read=True), trouble_of(error)
        assert (reading is Trouble.SHORTAGE) is (number in SHORTAGES), error
        assert (reading is Trouble.BUG) is (number in BUGS), error
        assert changing is (Trouble.SHORTAGE if number in NO_DESCRIPTORS else Trouble.FAILURE), error
    assert trouble_of(ValueError("no number")) is Trouble.FAILURE


def opened_on(host: StorageHost) -> Opened:
    """Return a log of three sealed segments, all flushed, and one active segment."""
    opened = open_log("/data/orders-0", LogConfig(segment_bytes=250), world=StorageWorld(host.disk))

    async def fill() -> None:
        for _ in range(4):
            for _ in range(2):
                opened.log.append_as_leader(batch(), 0, NOW)
            await opened.log.checkpoint()

    asyncio.run(fill())
    return opened


async def carry_out(call: Call, log: Log) -> None:
    outcome = call(log)
    if isinstance(outcome, Awaitable):
        await outcome


async def met(call: Call, log: Log) -> BrokerError:
    with pytest.raises(BrokerError) as raised:
        await carry_out(call, log)
    return raised.value


READS: dict[str, Call] = {
    "read": lambda log: log.read(3, 10, 8),
    "offset_for_timestamp": lambda log: finish_at_once(search.offset_for_timestamp(log, NOW, 8)),
    "newest_record": lambda log: finish_at_once(search.newest_record(log, 7)),
    "bytes_between": lambda log: log.bytes_between(1, 5),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("operation", ["pread", "open"])
@pytest.mark.parametrize("number", ALL, ids=errno.errorcode.get)
def test_a_read_that_fails_costs_the_directory_only_where_the_disk_has_failed(
    name: str, operation: str, number: int
) -> None:
    host = StorageHost(Random(1))
    opened = opened_on(host)
    for segment in opened.log._segments:
        segment._known.clear()  # the shortage found before makes no difference
    host.medium.faults.fail(operation, number)
    error = asyncio.run(met(READS[name], opened.log))
    if number in FAILURES:
        assert error.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert opened.directory.failure is not None
        return
    assert opened.directory.failure is None
    assert isinstance(error, Shortage) is (number in SHORTAGES)
    assert error.code is (ErrorCode.KAFKA_STORAGE_ERROR if number in SHORTAGES else ErrorCode.UNKNOWN_SERVER_ERROR)
    READS[name](opened.log)


def _is_possible(operation: str, number: int) -> bool:
    """The calls that write to an open file and need no descriptor."""
    return operation not in ("pwrite", "fdatasync") or number not in NO_DESCRIPTORS


WRITES: dict[str, tuple[str, Call]] = {
    "append": ("pwrite", lambda log: log.append_as_leader(batch(), 0, NOW)),
    "append, in a new segment": ("open", lambda log: log.append_as_leader(batch(size=100), 0, NOW)),
    "flush": ("fdatasync", Log.checkpoint),
    "flush of indexes": ("open", Log.checkpoint),
    "flush of names": ("sync_directory", Log.checkpoint),
    "first step of a cut": ("open", lambda log: log.truncate_to(1)),
    "first step of a fresh start": ("open", lambda log: log.truncate_fully_and_start_at(100)),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [(n, number) for n, (operation, _) in WRITES.items() for number in ALL if _is_possible(operation, number)],
)
async def test_a_half_done_write_costs_the_directory_and_a_failed_open_does_not(name: str, number: int) -> None:
    operation, call = WRITES[name]

    host = StorageHost(Random(1))
    opened = await asyncio.to_thread(opened_on, host)
    log = opened.log
    if call is Log.checkpoint:
        log.append_as_leader(batch(size=100), 0, NOW)  # in a new segment
    else:
        opened.directory.recovery_points.write(opened.directory.recovery_points.stage({log.partition: 8}))
    end = log.log_end_offset
    host.medium.faults.fail(operation, number)
    error = await met(call, log)
    assert error.code is ErrorCode.KAFKA_STORAGE_ERROR
    if number not in NO_DESCRIPTORS:
        assert opened.directory.failure is not None
        return
    assert opened.directory.failure is None
    assert isinstance(error, Shortage)
    assert log.log_end_offset == end
    everything(log)
    await carry_out(call, log)
    await log.checkpoint()
    assert log.recovery_point == log.log_end_offset
    await log.close()
    again = open_log(
        "/data/orders-0",
        world=StorageWorld(host.start_process()),
        recovery_point=log.recovery_point,
        log_start_offset=log.log_start_offset,
    )
    assert again.log.log_end_offset == log.log_end_offset


@pytest.mark.slow
async def test_a_flush_for_which_no_file_could_be_opened_is_tried_again_by_itself() -> None:
    host = StorageHost(Random(1))
    log = open_log("/data/orders-0", LogConfig(synced=True, segment_bytes=250), world=StorageWorld(host.disk)).log
    flushed: list[int] = []
    log.on_flushed = lambda: flushed.append(log.recovery_point)
    log.append_as_leader(batch(), 0, NOW)
    await until(lambda: flushed == [1])
    log.roll()
    host.medium.faults.fail("open", errno.EMFILE)
    log.append_as_leader(batch(), 0, NOW)
    await until(lambda: flushed[-1] == 2, SHORTAGE_PAUSE_S + 5)
    await log.close()

"""Several log directories: a failure in one stays there, and how they vouch for each other."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.recovery.continuity import Witness, combined
from minibroker.protocol import topic_ids
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.running import run_by
from tests.storage_support import NOW, StorageHost, StorageWorld, batch

PATHS = ("/disks/a", "/disks/b")
PARTITION = TopicPartition("orders", 0)
CONFIG = LogConfig()


def opened(host: StorageHost, paths: tuple[str, ...] = PATHS, broker_id: int = 1) -> LogDirs:
    return LogDirs(StorageWorld(host.start_process()), paths, broker_id, checkpoint_interval_ms=10**9)


def run(scenario: Callable[[StorageHost], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(StorageHost(Random(0)))

    asyncio.run(main())


async def refusal(call: Awaitable[object]) -> ErrorCode:
    with pytest.raises(BrokerError) as raised:
        await call
    return raised.value.code


async def changes(fails: Callable[[StorageHost, int], Awaitable[bool]]) -> int:
    """Try the operation on a disk that fails at the first change, the second, ... until it does not fail; return the
    number."""
    number = 0
    while await fails(StorageHost(Random(0)), number):
        number += 1
    return number


@run_by(run)
async def test_a_creation_that_fails_at_any_point_is_not_tried_in_another_directory(host: StorageHost, /) -> None:
    async def create(host: StorageHost, number: int) -> bool:
        logs = opened(host)
        await logs.open("cluster")
        home = logs.online[0].log_dir
        host.medium.faults.die_after(number)
        try:
            await logs.get_or_create(PARTITION, "id", CONFIG, is_new=True)
            return False
        except BrokerError:
            host.medium.faults.clear()
        assert list(logs.offline) == [home]
        for is_new in (True, False):
            again = logs.get_or_create(PARTITION, "id", CONFIG, is_new=is_new)
            assert await refusal(again) is ErrorCode.KAFKA_STORAGE_ERROR
        assert await refusal(logs.delete(PARTITION)) is ErrorCode.KAFKA_STORAGE_ERROR
        other = await logs.get_or_create(TopicPartition("others", 0), "id", CONFIG, is_new=True)
        assert not other.path.startswith(home)
        await logs.close()
        return True

    assert await changes(create) > 3


@run_by(run)
async def test_a_deletion_that_fails_at_any_point_has_not_succeeded_when_it_is_tried_again(
    host: StorageHost, /
) -> None:
    async def delete(host: StorageHost, number: int) -> bool:
        logs = opened(host)
        await logs.open("cluster")
        await logs.get_or_create(PARTITION, "id", CONFIG, is_new=True)
        host.medium.faults.die_after(number)
        try:
            await logs.delete(PARTITION)
            return False
        except BrokerError:
            host.medium.faults.clear()
        assert await refusal(logs.delete(PARTITION)) is ErrorCode.KAFKA_STORAGE_ERROR
        assert logs.is_offline(PARTITION)
        await logs.close()
        return True

    assert await changes(delete) >= 2


# --- Strays: replicas of topics that were deleted while their directory was not there ---------------------------


OLDER, NEWER = (topic_ids.make(7, number, b"nonces") for number in (1, 2))


async def fill(logs: LogDirs, topic_id: str, records: int) -> None:
    log = await logs.get_or_create(PARTITION, topic_id, CONFIG, is_new=True)
    log.append_as_leader(batch(records), 0, NOW)


async def filled(host: StorageHost, path: str, topic_id: str, records: int) -> None:
    """Return a directory that holds a replica of the topic alone."""
    logs = opened(host, (path,))
    await logs.open("cluster")
    await fill(logs, topic_id, records)
    await logs.close()


def strays(host: StorageHost) -> dict[str, int]:
    """Return the directories of the topic's replicas, with the bytes of records in each."""
    disk = host.start_process()
    found: dict[str, int] = {}
    for path in PATHS:
        for name in disk.list(path) if disk.exists(path) else ():
            if name.endswith("-stray"):
                found[path] = len(disk.read_file(f"{path}/{name}/{0:020}.log"))
    return found


@pytest.mark.parametrize("damaged", [False, True])
@run_by(run)
async def test_a_replica_of_an_older_topic_gives_way_and_is_kept(host: StorageHost, /, damaged: bool) -> None:
    await filled(host, PATHS[1], OLDER, 5)
    if damaged:
        host.start_process().make_directories(f"{PATHS[1]}/{PARTITION}/{5:020}.log")
    logs = opened(host)
    await logs.open("cluster")
    assert bool(logs.damaged) is damaged
    await fill(logs, NEWER, 1)
    assert [log.log_end_offset for log in logs.logs()] == [1]
    assert not logs.damaged
    logs.registered(7)
    await logs.close()
    assert list(strays(host)) == [PATHS[1]]
    assert strays(host)[PATHS[1]] > 0
    again = opened(host)
    await again.open("cluster")
    assert [(log.topic_id, log.log_end_offset) for log in again.logs()] == [(NEWER, 1)]
    assert again.trusted_since == 7
    await again.close()


@pytest.mark.parametrize("topic_id", [OLDER, "an id that does not tell its age"])
@run_by(run)
async def test_an_order_that_comes_late_moves_no_replica_of_a_newer_topic(host: StorageHost, /, topic_id: str) -> None:
    logs = opened(host)
    await logs.open("cluster")
    await fill(logs, NEWER, 3)
    for is_new in (False, True):
        late = logs.get_or_create(PARTITION, topic_id, CONFIG, is_new=is_new)
        assert await refusal(late) is ErrorCode.INCONSISTENT_TOPIC_ID
    assert [(log.topic_id, log.log_end_offset) for log in logs.logs()] == [(NEWER, 3)]
    await logs.close()
    assert not strays(host)


@pytest.mark.parametrize("older", PATHS)
@run_by(run)
async def test_of_replicas_in_two_directories_that_of_the_newer_topic_is_served(
    host: StorageHost, /, older: str
) -> None:
    for path in PATHS:
        await filled(host, path, *((OLDER, 5) if path == older else (NEWER, 3)))
    logs = opened(host)
    await logs.open("cluster")
    assert [(log.topic_id, log.log_end_offset) for log in logs.logs()] == [(NEWER, 3)]
    assert (await logs.get_or_create(PARTITION, NEWER, CONFIG)).log_end_offset == 3
    await logs.close()
    assert list(strays(host)) == [older]


@run_by(run)
async def test_while_a_stray_is_set_aside_its_disk_may_fail_at_any_point(host: StorageHost, /) -> None:
    async def replace(host: StorageHost, number: int) -> bool:
        await filled(host, PATHS[1], OLDER, 5)
        logs = opened(host)
        await logs.open("cluster")
        host.medium.faults.die_after(number)
        failed = False
        try:
            await logs.get_or_create(PARTITION, NEWER, CONFIG, is_new=True)
        except BrokerError:
            failed = True
        host.medium.faults.clear()
        await logs.close()
        logs = opened(host)
        await logs.open("cluster")
        await fill(logs, NEWER, 1)
        assert [(log.topic_id, log.log_end_offset) for log in logs.logs()] == [(NEWER, 1)]
        await logs.close()
        assert list(strays(host)) == [PATHS[1]]
        assert strays(host)[PATHS[1]] > 0
        return failed

    assert await changes(replace) > 3


# --- Which directories can be used ------------------------------------------------------------------------------


@run_by(run)
async def test_a_directory_of_another_broker_is_no_broken_disk(host: StorageHost, /) -> None:
    other = opened(host, PATHS[1:], broker_id=2)
    await other.open("cluster")
    await other.close()
    with pytest.raises(DataDirectoryUnusable, match="/disks/b belongs to broker 2, but this is broker 1"):
        await opened(host).open("cluster")


@run_by(run)
async def test_a_broker_without_any_directory_that_works_does_not_start(host: StorageHost, /) -> None:
    logs = opened(host)
    for path in PATHS:
        host.medium.faults.break_directory(path, errno.EROFS)
    with pytest.raises(DataDirectoryUnusable, match="/disks/a cannot be used: .*Read-only file system"):
        await logs.open("cluster")


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOTDIR])
@pytest.mark.parametrize("path", PATHS)
@run_by(run)
async def test_a_directory_that_could_not_be_opened_is_not_believed_when_it_is_back(
    host: StorageHost, /, path: str, error: int
) -> None:
    logs = opened(host)
    await logs.open("cluster")
    for number in range(2):
        await logs.get_or_create(TopicPartition("t", number), "id", CONFIG, is_new=True)
    logs.registered(5)

    logs = opened(host)  # the process was killed
    host.medium.faults.break_directory(path, error)
    await logs.open("cluster")
    assert list(logs.offline) == [path]
    assert [log.path.startswith(path) for log in logs.logs()] == [False]
    assert logs.trusted_since == 5
    logs.registered(6)

    logs = opened(host)
    await logs.open("cluster")
    assert not logs.offline
    assert logs.trusted_since == SINCE_THIS_REGISTRATION
    assert logs.synced_since == SINCE_THIS_REGISTRATION
    logs.registered(7)

    logs = opened(host)
    await logs.open("cluster")
    assert logs.trusted_since == 7
    await logs.close()


@run_by(run)
async def test_a_new_replica_goes_to_the_directory_with_the_fewest_that_is_online(host: StorageHost, /) -> None:
    logs = opened(host)
    await logs.open("cluster")
    for number in range(6):
        await logs.get_or_create(TopicPartition("t", number), "id", CONFIG, is_new=True)
    assert [manager.replica_count for manager in logs.online] == [3, 3]
    for _ in range(3):
        await logs.delete(next(iter(logs.online[0].logs())).partition)
    for number in range(6, 8):
        await logs.get_or_create(TopicPartition("t", number), "id", CONFIG, is_new=True)
    assert [manager.replica_count for manager in logs.online] == [2, 3]
    logs.online[0].directory.fail(OSError("no more"), "a test")
    await logs.get_or_create(TopicPartition("t", 9), "id", CONFIG, is_new=True)
    assert [manager.replica_count for manager in logs.online] == [4]
    await logs.close()


# --- How directories vouch for each other -----------------------------------------------------------------------

NEVER = SINCE_THIS_REGISTRATION


def old(name: str, others: str, since: int = 5, failed: str = "") -> Witness:
    return Witness(False, name, tuple(others), tuple(failed), since, since)


def new(name: str) -> Witness:
    return Witness(True, name, (), (), NEVER, NEVER)


@pytest.mark.parametrize(
    ("witnesses", "unopened", "trusted_since", "doubt", "directories", "failed"),
    [
        ([new("a")], 0, NEVER, "", "a", ""),
        ([new("a"), new("b")], 0, NEVER, "", "ab", ""),
        ([old("a", "")], 0, 5, "", "a", ""),  # written by a broker with a single directory
        ([old("a", "ab"), old("b", "ab", since=7)], 0, 7, "", "ab", ""),
        ([old("a", "ab"), old("b", "ab", since=NEVER)], 0, NEVER, "", "ab", ""),
        ([old("a", "a"), new("b")], 0, 5, "", "ab", ""),
        ([old("a", "ab")], 0, NEVER, "gone", "a", ""),
        ([old("a", "ab")], 1, 5, "", "ab", "b"),
        ([old("a", "ab"), new("c")], 0, NEVER, "gone", "ac", ""),
        ([old("a", "ab"), new("c")], 1, 5, "", "abc", "b"),
        ([old("a", "abc")], 1, NEVER, "gone", "abc", "bc"),
        ([old("a", "a"), old("b", "ab")], 0, NEVER, "gone on", "ab", ""),
        ([old("a", "ab", failed="b"), old("b", "ab")], 0, NEVER, "failed", "ab", ""),
        ([old("a", "ab", failed="b")], 1, 5, "", "ab", "b"),
        ([old("a", "ab", failed="b")], 0, NEVER, "gone", "a", ""),
    ],
)
def test_directories_vouch_for_each_other(
    witnesses: list[Witness], unopened: int, trusted_since: int, doubt: str, directories: str, failed: str
) -> None:
    verdict = combined(witnesses, unopened)
    assert (verdict.trusted_since, "".join(verdict.directories), "".join(verdict.failed)) == (
        trusted_since,
        directories,
        failed,
    )
    assert doubt in verdict.doubt
    assert bool(doubt) == bool(verdict.doubt)

"""The virtual disk. Behaviour that it shares with the real disk is tested on both."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minibroker.deploy.simulator.disk import SECTOR_BYTES, ProcessDisk
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import Host, Simulation
from minibroker.protocol.world import Disk
from minibroker.protocol.world.real import RealDisk
from tests.running import run_by

Scenario = Callable[[Disk, str], None]
"""A test, given a disk and an empty directory on it."""


def _on_the_virtual_disk(scenario: Scenario, _: Path) -> None:
    async def main() -> None:
        disk = Simulation().host("server").start_process().disk
        disk.make_directories("/data")
        scenario(disk, "/data")

    run(main())


def _on_the_real_disk(scenario: Scenario, directory: Path) -> None:
    scenario(RealDisk(), str(directory))


everywhere = pytest.mark.parametrize("play", [_on_the_virtual_disk, _on_the_real_disk])
Play = Callable[[Scenario, Path], None]


def _fails(error: type[OSError], number: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(error) as caught:
        call(*arguments)
    assert caught.value.errno == number


@everywhere
def test_a_file_holds_written_bytes_at_their_positions(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        file = disk.open(f"{directory}/file", create=True)
        assert file.size() == 0
        assert file.pwrite([b"abc", bytearray(b"def"), memoryview(b"ghi")], 0) == 9
        assert file.pwrite([b"XY"], 4) == 2
        assert file.pwrite([b"end"], 12) == 3
        assert file.size() == 15
        assert file.pread(100, 0) == b"abcdXYghi\0\0\0end"
        assert file.pread(2, 4) == b"XY"
        assert file.pread(2, 15) == file.pread(2, 100) == b""
        file.truncate(5)
        assert file.pread(100, 0) == b"abcdX"
        file.truncate(7)
        assert file.pread(100, 0) == b"abcdX\0\0"
        file.fdatasync()
        file.close()
        file.close()
        assert disk.read_file(f"{directory}/file") == b"abcdX\0\0"
        _fails(OSError, errno.EBADF, file.pread, 1, 0)

    play(scenario, tmp_path)


@everywhere
def test_negative_sizes_and_positions_are_invalid(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        file = disk.open(f"{directory}/file", create=True)
        file.pwrite([b"kept"], 0)
        _fails(OSError, errno.EINVAL, file.pread, -1, 0)
        _fails(OSError, errno.EINVAL, file.pread, 1, -1)
        _fails(OSError, errno.EINVAL, file.pwrite, [b"lost"], -2)  # at -1, pwritev2 writes at the cursor
        _fails(OSError, errno.EINVAL, file.truncate, -1)
        assert file.pread(100, 0) == b"kept"
        file.close()

    play(scenario, tmp_path)


@everywhere
def test_open_files_are_counted_against_the_limit(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        before = disk.descriptors()
        files = [disk.open(f"{directory}/{number}", create=True) for number in range(10)]
        now = disk.descriptors()
        assert (now.files, now.limit) == (before.files + 10, before.limit)
        assert now.used >= before.used + 10, "a real process may reuse closed descriptors, which count as used"
        for file in files:
            file.close()
            file.close()
        disk.write_atomically(f"{directory}/0", b"whole")
        disk.read_file(f"{directory}/0")
        assert disk.descriptors() == before

    play(scenario, tmp_path)


def test_the_used_descriptors_include_all_open_files_after_a_low_one_is_closed(tmp_path: Path) -> None:
    disk = RealDisk()
    low = os.open("/", os.O_RDONLY)
    files = [disk.open(f"{tmp_path}/{number}", create=True) for number in range(low + 1)]
    os.close(low)
    now = disk.descriptors()
    for file in files:
        file.close()
    assert now.used >= now.files >= low + 1


@everywhere
def test_calls_that_need_a_descriptor_fail_without_effect_at_the_limit(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        path = f"{directory}/file"
        disk.write_atomically(path, b"old")
        with _no_descriptors_left(disk):
            assert disk.descriptors().used == disk.descriptors().limit
            _fails(OSError, errno.EMFILE, disk.open, path)
            _fails(OSError, errno.EMFILE, lambda: disk.open(f"{directory}/new", create=True))
            _fails(OSError, errno.EMFILE, disk.read_file, path)
            _fails(OSError, errno.EMFILE, disk.write_atomically, path, b"new")
            _fails(OSError, errno.EMFILE, disk.list, directory)
            _fails(OSError, errno.EMFILE, disk.sync_directory, directory)
            _fails(OSError, errno.EMFILE, disk.remove_tree, directory)
        assert disk.list(directory) == ["file"]
        assert disk.read_file(path) == b"old"

    play(scenario, tmp_path)


@contextmanager
def _no_descriptors_left(disk: Disk) -> Iterator[None]:
    _, used, limit = disk.descriptors()
    if isinstance(disk, ProcessDisk):
        disk.faults.descriptor_limit = used
        yield
        disk.faults.descriptor_limit = limit
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@everywhere
def test_open_creates_a_file_only_with_create_and_never_truncates(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        _fails(FileNotFoundError, errno.ENOENT, disk.open, f"{directory}/file")
        _fails(FileNotFoundError, errno.ENOENT, lambda: disk.open(f"{directory}/none/file", create=True))
        first = disk.open(f"{directory}/file", create=True)
        first.pwrite([b"kept"], 0)
        second = disk.open(f"{directory}/file", create=True)
        assert second.pread(10, 0) == b"kept"
        second.pwrite([b"seen by both"], 0)
        assert first.pread(100, 0) == b"seen by both"
        first.close()
        second.close()
        _fails(IsADirectoryError, errno.EISDIR, disk.open, directory)
        _fails(NotADirectoryError, errno.ENOTDIR, disk.open, f"{directory}/file/below")

    play(scenario, tmp_path)


@everywhere
def test_an_open_file_outlives_its_name(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        file = disk.open(f"{directory}/file", create=True)
        file.pwrite([b"old"], 0)
        disk.remove(f"{directory}/file")
        assert not disk.exists(f"{directory}/file")
        disk.write_atomically(f"{directory}/file", b"new")
        file.pwrite([b"er"], 3)
        assert file.pread(10, 0) == b"older"
        assert disk.read_file(f"{directory}/file") == b"new"
        file.close()

    play(scenario, tmp_path)


@everywhere
def test_write_atomically_replaces_the_whole_file_and_leaves_no_temporary_file(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        disk.write_atomically(f"{directory}/file", b"a long first text")
        disk.write_atomically(f"{directory}/file", b"short")
        assert disk.read_file(f"{directory}/file") == b"short"
        assert disk.list(directory) == ["file"]
        _fails(FileNotFoundError, errno.ENOENT, disk.write_atomically, f"{directory}/none/file", b"")

    play(scenario, tmp_path)


@everywhere
def test_directories_list_their_names_sorted(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        disk.make_directories(f"{directory}/b/c/d")
        disk.make_directories(f"{directory}/b/c")
        disk.make_directories(f"{directory}/x")
        disk.write_atomically(f"{directory}/a", b"")
        assert disk.list(directory) == ["a", "b", "x"]
        assert disk.list(f"{directory}/b/c/d") == []
        assert disk.exists(f"{directory}/b/c")
        assert not disk.exists(f"{directory}/b/d")
        assert not disk.exists(f"{directory}/a/b")
        _fails(FileNotFoundError, errno.ENOENT, disk.list, f"{directory}/none")
        _fails(NotADirectoryError, errno.ENOTDIR, disk.list, f"{directory}/a")
        _fails(FileExistsError, errno.EEXIST, disk.make_directories, f"{directory}/a")
        _fails(NotADirectoryError, errno.ENOTDIR, disk.make_directories, f"{directory}/a/b")
        disk.sync_directory(directory)
        _fails(FileNotFoundError, errno.ENOENT, disk.sync_directory, f"{directory}/none")

    play(scenario, tmp_path)


@everywhere
def test_renaming_moves_files_and_whole_directories(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        disk.make_directories(f"{directory}/from/inner")
        disk.write_atomically(f"{directory}/from/inner/file", b"1")
        disk.write_atomically(f"{directory}/other", b"2")
        disk.rename(f"{directory}/from", f"{directory}/to")
        assert disk.list(directory) == ["other", "to"]
        assert disk.read_file(f"{directory}/to/inner/file") == b"1"
        disk.rename(f"{directory}/other", f"{directory}/to/inner/file")
        assert disk.read_file(f"{directory}/to/inner/file") == b"2"
        disk.rename(f"{directory}/to", f"{directory}/to")
        disk.make_directories(f"{directory}/empty")
        disk.rename(f"{directory}/to/inner", f"{directory}/empty")
        assert disk.list(f"{directory}/empty") == ["file"]

    play(scenario, tmp_path)


@everywhere
def test_impossible_renames_are_rejected(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        disk.make_directories(f"{directory}/full/inner")
        disk.make_directories(f"{directory}/empty")
        disk.write_atomically(f"{directory}/file", b"")
        for error, number, old, new in (
            (FileNotFoundError, errno.ENOENT, "none", "new"),
            (FileNotFoundError, errno.ENOENT, "file", "none/new"),
            (OSError, errno.ENOTEMPTY, "empty", "full"),
            (IsADirectoryError, errno.EISDIR, "file", "empty"),
            (NotADirectoryError, errno.ENOTDIR, "empty", "file"),
            (OSError, errno.EINVAL, "full", "full/inner/new"),
        ):
            _fails(error, number, disk.rename, f"{directory}/{old}", f"{directory}/{new}")
        assert disk.list(directory) == ["empty", "file", "full"]

    play(scenario, tmp_path)


@everywhere
def test_remove_and_remove_tree_distinguish_files_from_directories(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        disk.make_directories(f"{directory}/tree/inner")
        disk.write_atomically(f"{directory}/tree/inner/file", b"")
        disk.write_atomically(f"{directory}/file", b"")
        _fails(IsADirectoryError, errno.EISDIR, disk.remove, f"{directory}/tree")
        _fails(NotADirectoryError, errno.ENOTDIR, disk.remove_tree, f"{directory}/file")
        disk.remove_tree(f"{directory}/tree")
        disk.remove(f"{directory}/file")
        assert disk.list(directory) == []
        _fails(FileNotFoundError, errno.ENOENT, disk.remove, f"{directory}/file")
        _fails(FileNotFoundError, errno.ENOENT, disk.remove_tree, f"{directory}/tree")

    play(scenario, tmp_path)


@everywhere
def test_a_lock_is_held_until_it_is_released(play: Play, tmp_path: Path) -> None:
    def scenario(disk: Disk, directory: str) -> None:
        lock = disk.lock(f"{directory}/.lock")
        assert disk.exists(f"{directory}/.lock")
        with pytest.raises(BlockingIOError):
            disk.lock(f"{directory}/.lock")
        lock.release()
        disk.lock(f"{directory}/.lock").release()
        _fails(FileNotFoundError, errno.ENOENT, disk.lock, f"{directory}/none/.lock")

    play(scenario, tmp_path)


# --- Only in the simulation: kills -------------------------------------------------------------------------------


@run_by(on_virtual_loop)
async def test_the_next_process_reads_the_written_bytes_and_acquires_the_lock() -> None:
    host = Simulation().host("server")
    first = host.start_process()
    first.disk.make_directories("/data")
    first.disk.open("/data/log", create=True).pwrite([b"kept"], 0)
    first.disk.lock("/data/.lock")
    second = host.start_process()
    with pytest.raises(BlockingIOError):
        second.disk.lock("/data/.lock")
    first.process.kill()
    assert second.disk.read_file("/data/log") == b"kept"
    second.disk.lock("/data/.lock")
    assert first.disk._disk.boot_id == second.disk.boot_id()


@run_by(on_virtual_loop)
async def test_hosts_do_not_share_a_disk() -> None:
    simulation = Simulation()
    one, other = (simulation.host(name).start_process().disk for name in ("one", "other"))
    one.write_atomically("/file", b"")
    assert not other.exists("/file")
    assert one.boot_id() != other.boot_id()


def test_a_killed_process_cannot_use_its_disk_even_in_finally_blocks() -> None:
    async def main() -> None:
        host = Simulation().host("server")
        world = host.start_process()
        disk = world.disk
        file = disk.open("/log", create=True)
        lock = disk.lock("/.lock")
        refused: list[str] = []

        async def program() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                try:
                    disk.write_atomically("/clean-shutdown", b"")
                except ProcessKilled:
                    refused.append("clean shutdown")
                    raise

        world.process.start(program())
        await asyncio.sleep(1)
        world.process.kill()
        for call in (
            lambda: disk.open("/log"),
            lambda: disk.write_atomically("/log", b""),
            lambda: disk.rename("/log", "/other"),
            lambda: disk.remove("/log"),
            lambda: disk.make_directories("/new"),
            lambda: disk.lock("/.lock"),
            lambda: disk.exists("/log"),
            lambda: file.pwrite([b"x"], 0),
            lambda: file.truncate(0),
            lambda: file.fdatasync(),
            lambda: file.pread(1, 0),
        ):
            with pytest.raises(ProcessKilled):
                call()
        file.close()
        lock.release()
        ends.append((refused, host))

    ends: list[tuple[list[str], object]] = []
    run(main())
    [(refused, host)] = ends
    assert refused == ["clean shutdown"]  # after the run: the World is severed even then
    assert sorted(host.disk._root.entries) == [".lock", "log"]  # type: ignore[attr-defined]


# --- Power cuts ---------------------------------------------------------------------------------------------------


def _outcomes(
    before: Callable[[ProcessDisk], None], after: Callable[[ProcessDisk], object], seeds: int = 60
) -> set[object]:
    """Return the results of `after`, which runs after a power cut, for many seeds."""

    async def main() -> object:
        host = Simulation().host("server")
        before(host.start_process().disk)
        host.power_cut()
        return after(host.start_process().disk)

    return {run(main(), seed=seed) for seed in range(seeds)}


def _synced_file(disk: ProcessDisk, data: bytes) -> None:
    disk.write_atomically("/log", data)


def test_a_kill_loses_no_data_and_a_power_cut_loses_unsynced_data() -> None:
    def write(disk: ProcessDisk) -> None:
        _synced_file(disk, b"synced ")
        disk.open("/log").pwrite([b"written"], 7)

    async def main() -> None:
        host = Simulation().host("server")
        world = host.start_process()
        write(world.disk)
        world.process.kill()
        assert host.start_process().disk.read_file("/log") == b"synced written"

    run(main())
    found = _outcomes(write, lambda disk: disk.read_file("/log"))
    assert {b"synced ", b"synced written", b"synced " + bytes(7)} <= found
    assert all(len(data) >= 7 and data.startswith(b"synced ") for data in found if isinstance(data, bytes))


def test_synced_data_survives_every_power_cut() -> None:
    def write(disk: ProcessDisk) -> None:
        file = disk.open("/log", create=True)
        disk.sync_directory("/")
        for number in range(100):
            file.pwrite([b"%04d" % number], 4 * number)
            if number % 7 == 0:
                file.fdatasync()
        file.pwrite([b"****"], 4)
        file.truncate(300)
        file.pwrite([b"end"], 300)
        file.fdatasync()

    expected = b"".join(b"%04d" % number for number in range(75))
    assert _outcomes(write, lambda disk: disk.read_file("/log")) == {expected[:4] + b"****" + expected[8:] + b"end"}


def test_each_sector_of_an_unsynced_write_is_the_old_or_the_new_one() -> None:
    sectors = 8

    def write(disk: ProcessDisk) -> None:
        _synced_file(disk, b"o" * SECTOR_BYTES * sectors)
        file = disk.open("/log")
        file.pwrite([b"n" * (SECTOR_BYTES * 4 + 10)], SECTOR_BYTES + 10)

    def look(disk: ProcessDisk) -> object:
        data = disk.read_file("/log")
        assert len(data) == SECTOR_BYTES * sectors
        parts = [data[start : start + SECTOR_BYTES] for start in range(0, len(data), SECTOR_BYTES)]
        old, new = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES
        first, last = b"o" * 10 + new[10:], b"n" * 20 + old[20:]
        allowed = [[old], [old, first], *[[old, new]] * 3, [old, last], [old], [old]]
        assert all(part in choices for part, choices in zip(parts, allowed, strict=True))
        return tuple(part == old for part in parts)

    found = _outcomes(write, look)
    assert (True,) * 8 in found
    assert (True, *[False] * 5, True, True) in found
    assert any(lost[1:6] not in ((True,) * 5, (False,) * 5) for lost in found if isinstance(lost, tuple))


def test_an_unsynced_truncation_may_be_lost_independently_of_later_writes() -> None:
    def write(disk: ProcessDisk) -> None:
        _synced_file(disk, b"0123456789")
        file = disk.open("/log")
        file.truncate(4)
        file.pwrite([b"abc"], 4)

    found = _outcomes(write, lambda disk: disk.read_file("/log"), seeds=100)
    assert {b"0123456789", b"0123", b"0123abc", b"0123abc789", b"01234567", b"0123" + bytes(3)} <= found
    for data in found:
        assert isinstance(data, bytes)
        assert 4 <= len(data) <= 10
        choices = zip(b"0123456789", b"0123abc789", b"0123" + bytes(3) + b"789", strict=True)
        assert all(byte in choice for byte, choice in zip(data, choices, strict=False))


def test_unsynced_names_of_a_directory_are_lost_independently() -> None:
    def write(disk: ProcessDisk) -> None:
        disk.make_directories("/data")
        disk.sync_directory("/")
        for name in ("a", "b", "c"):
            file = disk.open(f"/data/{name}", create=True)
            file.pwrite([b"x"], 0)
            file.fdatasync()
            if name == "a":
                disk.sync_directory("/data")
        disk.remove("/data/a")

    found = _outcomes(write, lambda disk: "".join(disk.list("/data")), seeds=100)
    assert found == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_prefix_of_the_changes_of_a_name_survives() -> None:
    def write(disk: ProcessDisk) -> None:
        for content in (b"1", b"2", b"3"):
            file = disk.open("/new", create=True)
            file.pwrite([content], 0)
            file.fdatasync()
            disk.rename("/new", "/name")

    found = _outcomes(write, lambda disk: disk.read_file("/name") if disk.exists("/name") else None)
    assert found == {None, b"1", b"2", b"3"}


def test_a_directory_is_renamed_entirely_or_not_at_all() -> None:
    def write(disk: ProcessDisk) -> None:
        disk.make_directories("/log")
        disk.write_atomically("/log/file", b"")
        disk.sync_directory("/")
        disk.rename("/log", "/log-delete")
        disk.open("/other", create=True)

    found = _outcomes(write, lambda disk: tuple(disk.list("/")))
    assert found == {("log",), ("log", "other"), ("log-delete",), ("log-delete", "other")}


def test_a_directory_without_a_durable_name_is_lost_with_its_contents() -> None:
    def write(disk: ProcessDisk) -> None:
        disk.make_directories("/data/log")
        disk.write_atomically("/data/log/file", b"")
        disk.sync_directory("/data")

    assert _outcomes(write, lambda disk: disk.exists("/data/log/file")) == {True, False}


def test_a_file_that_is_replaced_atomically_is_the_old_or_the_new_one() -> None:
    def write(disk: ProcessDisk) -> None:
        _synced_file(disk, b"old")
        file = disk.open("/log.tmp", create=True)
        file.pwrite([b"new one"], 0)
        file.fdatasync()
        disk.rename("/log.tmp", "/log")

    assert _outcomes(write, lambda disk: (disk.read_file("/log"), disk.exists("/log.tmp"))) == {
        (b"old", False),
        (b"old", True),
        (b"new one", False),
        (b"new one", True),
    }


def test_an_unsynced_removal_of_a_tree_may_survive_in_part() -> None:
    def write(disk: ProcessDisk) -> None:
        disk.make_directories("/tree")
        for name in ("a", "b"):
            disk.write_atomically(f"/tree/{name}", b"")
        disk.sync_directory("/")
        disk.remove_tree("/tree")

    found = _outcomes(write, lambda disk: tuple(disk.list("/tree")) if disk.exists("/tree") else None)
    assert found == {("a", "b"), ("a",), ("b",), (), None}


@run_by(on_virtual_loop)
async def test_a_power_cut_frees_locks_and_changes_the_boot_id() -> None:
    host = Simulation().host("server")
    world = host.start_process()
    lock = world.disk.lock("/.lock")
    world.disk.sync_directory("/")
    before = world.disk.boot_id()
    host.power_cut()
    after = host.start_process().disk
    after.lock("/.lock")
    assert after.boot_id() != before
    lock.release()
    with pytest.raises(BlockingIOError):
        after.lock("/.lock")
    with pytest.raises(ProcessKilled):
        world.disk.list("/")


def test_the_same_seed_loses_the_same_data() -> None:
    async def main() -> list[bytes]:
        host = Simulation().host("server")
        found = []
        for _ in range(10):
            disk = host.start_process().disk
            file = disk.open("/log", create=True)
            disk.sync_directory("/")
            file.pwrite([b"x" * 5_000], file.size())
            host.power_cut()
            found.append(host.start_process().disk.read_file("/log"))
        return found

    assert run(main(), seed=1) == run(main(), seed=1) != run(main(), seed=2)


# --- Failing calls ------------------------------------------------------------------------------------------------


def _on_a_host(scenario: Callable[[Host, ProcessDisk], None]) -> None:
    async def main() -> None:
        host = Simulation().host("server")
        scenario(host, host.start_process().disk)

    run(main())


def test_an_operation_fails_once_after_the_given_number_of_calls() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("open", lambda: disk.open("/file", create=True)),
            ("pread", lambda: disk.read_file("/file")),
            ("pwrite", lambda: disk.open("/file").pwrite([b"x"], 0)),
            ("truncate", lambda: disk.open("/file").truncate(1)),
            ("fdatasync", lambda: disk.open("/file").fdatasync()),
            ("rename", lambda: disk.write_atomically("/other", b"")),
            ("sync_directory", lambda: disk.write_atomically("/other", b"")),
            ("list", lambda: disk.list("/")),
            ("make_directories", lambda: disk.make_directories("/new/inner")),
        ]
        for operation, call in calls:
            host.disk.faults.fail(operation, errno.EIO, after=1)
            call()
            _fails(OSError, errno.EIO, call)
            call()
        for operation, remove in (("remove", disk.remove), ("remove_tree", disk.remove_tree)):
            host.disk.faults.fail(operation, errno.EIO)
            path = "/file" if operation == "remove" else "/new"
            _fails(OSError, errno.EIO, remove, path)
            remove(path)
        with pytest.raises(ValueError, match="fsnyc"):
            host.disk.faults.fail("fsnyc", errno.EIO)

    _on_a_host(scenario)


def test_a_disk_dies_after_the_given_number_of_changes_of_any_kind() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        faults = host.disk.faults
        changes: list[Callable[[], object]] = [
            lambda: disk.make_directories("/data"),
            lambda: disk.open("/data/file", create=True),
            lambda: disk.open("/data/file").pwrite([b"content"], 0),
            lambda: disk.open("/data/file").truncate(3),
            lambda: disk.open("/data/file").fdatasync(),
            lambda: disk.rename("/data/file", "/data/other"),
            lambda: disk.sync_directory("/data"),
            lambda: disk.remove("/data/other"),
            lambda: disk.remove_tree("/data"),
        ]
        for change in changes:
            faults.die_after(0)
            _fails(OSError, errno.EIO, change)
            faults.die_after(1)
            assert disk.list("/") in ([], ["data"]), "to look is no change"
            was_dead = faults.is_dead
            change()
            assert (was_dead, faults.is_dead) == (False, True)
            _fails(OSError, errno.EIO, disk.list, "/")
            faults.clear()
        assert disk.list("/") == []

    _on_a_host(scenario)


def test_unsynced_data_of_a_dead_disk_may_survive_the_power_cut() -> None:
    def write(disk: ProcessDisk) -> None:
        _synced_file(disk, b"old")
        file = disk.open("/log")
        file.pwrite([b"new"], 0)
        disk._disk.faults.die_after(0)
        _fails(OSError, errno.EIO, file.fdatasync)
        disk._disk.faults.clear()

    assert _outcomes(write, lambda disk: disk.read_file("/log")) == {b"old", b"new"}


def test_faults_can_be_cleared() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        faults = host.disk.faults
        faults.fail("open", errno.EIO)
        faults.free_bytes = 0
        faults.sync_delay_s = 1.0
        faults.die_after(0)
        faults.clear()
        disk.write_atomically("/file", b"data")
        assert not faults.active
        assert faults.sync_delay_s == 0.0

    _on_a_host(scenario)


def test_a_failed_write_writes_a_prefix() -> None:
    async def main() -> bytes:
        host = Simulation().host("server")
        file = host.start_process().disk.open("/file", create=True)
        host.disk.faults.fail("pwrite", errno.EIO)
        _fails(OSError, errno.EIO, file.pwrite, [b"abc", b"def"], 0)
        return file.pread(10, 0)

    found = {run(main(), seed=seed) for seed in range(40)}
    assert found == {b"abcdef"[:size] for size in range(7)}


def test_data_of_a_failed_fdatasync_is_lost_although_the_next_one_succeeds() -> None:
    def write(disk: ProcessDisk) -> None:
        file = disk.open("/log", create=True)
        disk.sync_directory("/")
        file.pwrite([b"safe "], 0)
        file.fdatasync()
        file.pwrite([b"lost "], 5)
        disk._disk.faults.fail("fdatasync", errno.EIO)
        _fails(OSError, errno.EIO, file.fdatasync)
        file.fdatasync()
        assert file.pread(20, 0) == b"safe lost "  # it is still in memory
        file.pwrite([b"later"], 10)
        file.fdatasync()

    assert _outcomes(write, lambda disk: disk.read_file("/log"), seeds=5) == {b"safe " + bytes(5) + b"later"}


def test_a_full_disk_writes_as_much_as_fits_and_more_after_a_removal() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        disk.write_atomically("/old", b"12345")
        host.disk.faults.free_bytes = 10
        file = disk.open("/log", create=True)
        assert file.pwrite([b"12345678"], 0) == 8
        _fails(OSError, errno.ENOSPC, file.pwrite, [b"abc", b"def"], 8)
        assert file.pread(20, 0) == b"12345678ab"
        assert file.pwrite([b"overwriting takes no room"[:10]], 0) == 10
        _fails(OSError, errno.ENOSPC, file.pwrite, [b"x"], 10)
        disk.remove("/old")
        assert file.pwrite([b"12345"], 10) == 5
        _fails(OSError, errno.ENOSPC, file.pwrite, [b"x"], 15)
        file.truncate(14)
        file.pwrite([b"x"], 14)
        _fails(OSError, errno.ENOSPC, file.pwrite, [b"x"], 15)
        disk.open("/new", create=True)
        disk.rename("/new", "/log")
        disk.open("/new", create=True).pwrite([bytes(15)], 0)

    _on_a_host(scenario)


# --- Rot -------------------------------------------------------------------------------------------------------


def _with_a_rotten_byte(scenario: Callable[[Host, ProcessDisk], None]) -> None:
    """/data/file holds a synced "good news", and its first byte has rotted."""

    async def main() -> None:
        host = Simulation().host("server")
        disk = host.start_process().disk
        disk.make_directories("/data")
        file = disk.open("/data/file", create=True)
        file.pwrite([b"good news"], 0)
        file.fdatasync()
        for directory in ("/data", "/"):
            disk.sync_directory(directory)
        host.disk.rot("/data/file", 0, 0)
        assert disk.read_file("/data/file") == b"food news"
        scenario(host, disk)

    run(main())


def test_a_rotten_page_is_read_without_an_error_and_can_be_mended() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        disk.open("/data/file").pwrite([b"mews"], 5)
        host.disk.mend()
        assert disk.read_file("/data/file") == b"good mews"

    _with_a_rotten_byte(scenario)


def test_a_write_over_a_rotten_byte_is_correct_and_stays() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        disk.open("/data/file").pwrite([b"wood"], 0)
        host.disk.mend()
        assert disk.read_file("/data/file") == b"wood news"
        host.disk.rot("/data/file", 8, 1)
        disk.open("/data/file").truncate(4)
        host.disk.mend()
        assert disk.read_file("/data/file") == b"wood"

    _with_a_rotten_byte(scenario)


def test_a_power_cut_restores_a_page_that_rots_after_its_sync() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        host.power_cut()
        assert host.start_process().disk.read_file("/data/file") == b"good news"

    _with_a_rotten_byte(scenario)


def test_rot_that_reached_the_medium_with_a_nearby_write_can_be_mended() -> None:
    def scenario(host: Host, disk: ProcessDisk) -> None:
        file = disk.open("/data/file")
        file.pwrite([b"g"], 0)
        host.disk.rot("/data/file", 0, 0)
        file.fdatasync()
        host.power_cut()
        disk = host.start_process().disk
        assert disk.read_file("/data/file") == b"food news"
        host.disk.mend()
        assert disk.read_file("/data/file") == b"good news"
        host.power_cut()
        assert host.start_process().disk.read_file("/data/file") == b"good news"

    _with_a_rotten_byte(scenario)


@run_by(on_virtual_loop)
async def test_an_inspection_neither_suffers_faults_nor_consumes_them() -> None:
    host = Simulation().host("server")
    disk = host.start_process().disk
    disk.make_directories("/data")
    file = disk.open("/data/file", create=True)
    host.disk.faults.fail("pread", errno.EIO)
    with host.disk.faults.set_aside():
        assert file.pread(1, 0) == b""
    _fails(OSError, errno.EIO, file.pread, 1, 0)


@run_by(on_virtual_loop)
async def test_a_directory_fails_from_the_chosen_call_on_and_its_calls_are_counted() -> None:
    host = Simulation().host("server")
    disk = host.start_process().disk
    disk.make_directories("/data")
    disk.make_directories("/database")
    counts = host.disk.faults.count_calls("/data")
    broken: list[int] = []
    host.disk.faults.break_directory_at("/data", "pwrite", errno.ENOSPC, 2, lambda: broken.append(counts["pwrite"]))
    file, elsewhere = disk.open("/data/file", create=True), disk.open("/database/file", create=True)
    for number in range(2):
        assert file.pwrite([b"a"], number) == elsewhere.pwrite([b"a"], number) == 1
    assert broken == []
    _fails(OSError, errno.ENOSPC, file.pwrite, [b"a"], 2)
    _fails(OSError, errno.ENOSPC, file.pread, 1, 0)
    assert broken == [3]
    assert elsewhere.pread(3, 0) == b"aa"
    assert counts == {"open": 1, "create": 1, "pwrite": 3, "pread": 1}
    host.disk.faults.mend_directory("/data")
    assert file.pread(2, 0) == b"aa"

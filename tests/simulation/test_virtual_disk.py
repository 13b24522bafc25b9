"""The virtual disk. What it shares with the real one is tested on both."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.real_world import RealDisk
from protocol.world import Disk
from tests.simulation.loop import run
from tests.simulation.process import ProcessKilled
from tests.simulation.world import Simulation

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
def test_a_file_holds_what_was_written_where_it_was_written(play: Play, tmp_path: Path) -> None:
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
def test_opening_creates_only_where_that_is_wanted_and_never_empties(play: Play, tmp_path: Path) -> None:
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
def test_write_atomically_replaces_the_whole_file_and_leaves_nothing_else(play: Play, tmp_path: Path) -> None:
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
def test_impossible_renames_are_refused(play: Play, tmp_path: Path) -> None:
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
def test_removing_tells_files_from_directories(play: Play, tmp_path: Path) -> None:
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


# --- What only the simulation has: kills --------------------------------------------------------------------------


def test_the_next_process_reads_what_was_written_and_takes_the_lock() -> None:
    async def main() -> None:
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

    run(main())


def test_hosts_do_not_share_a_disk() -> None:
    async def main() -> None:
        simulation = Simulation()
        one, other = (simulation.host(name).start_process().disk for name in ("one", "other"))
        one.write_atomically("/file", b"")
        assert not other.exists("/file")
        assert one.boot_id() != other.boot_id()

    run(main())


def test_a_killed_process_cannot_touch_its_disk_not_even_in_its_finally_blocks() -> None:
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
    assert refused == ["clean shutdown"]  # when the run was over: the world is severed even then
    assert sorted(host.disk._root.entries) == [".lock", "log"]  # type: ignore[attr-defined]

"""A segment against a plain list of its batches: it finds the same batches as a scan, whatever its indexes know."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX, Layout
from minibroker.broker.storage.segment import Appended, Segment, file_name
from minibroker.protocol.messages import Buffer
from minibroker.protocol.records import CorruptRecord, parse_header
from minibroker.protocol.world import File
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import NOW, FailingDisk, batch, stamped

LAYOUTS = (OFFSET_INDEX, TIME_INDEX)
BASE = 100
INTERVAL = 250
TIMES = [5, 3, 9, 9, 1, 12, 12, 11, 30, 2, 31, 31, 8, 40, 40, 7, 41, 3, 3, 50]
"""The largest timestamp of each batch, after NOW: some are older than the one before."""
GAP_AFTER = 6
"""Behind the batch of this number offsets are missing, as compaction leaves it."""


class Batch(NamedTuple):
    data: bytes
    first: int
    last: int
    max_timestamp: int
    position: int

    @property
    def end(self) -> int:
        return self.position + len(self.data)

    @property
    def appended(self) -> Appended:
        return Appended(self.last, self.max_timestamp, len(self.data))


def make_batches() -> list[Batch]:
    batches: list[Batch] = []
    offset, position = BASE, 0
    for number, time in enumerate(TIMES):
        count = 1 + number % 3
        data = stamped(batch(count, timestamp=NOW + time - (count - 1)), offset, 0)
        batches.append(Batch(data, offset, offset + count - 1, NOW + time, position))
        offset += count + (3 if number == GAP_AFTER else 0)
        position += len(data)
    return batches


BATCHES = make_batches()
END = BATCHES[-1].last + 1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def filled(
    directory: Path, batches: Sequence[Batch] = BATCHES, interval: int = INTERVAL, disk: RealDisk | None = None
) -> Segment:
    segment = Segment.create(disk or RealDisk(), str(directory), BASE, interval)
    for one in batches:
        segment.append([one.data], [one.appended])
    return segment


def write_indexes(segment: Segment, disk: RealDisk) -> None:
    for write in segment.index_writes():
        write.carry_out(disk)
        write.carried_out()


def stored(directory: Path, batches: Sequence[Batch] = BATCHES, interval: int = INTERVAL) -> Segment:
    """A sealed segment, with its indexes in files only."""
    segment = filled(directory, batches, interval)
    segment.seal()
    write_indexes(segment, RealDisk())
    segment.indexes_stored()
    assert segment.stored
    return segment


def index_files(directory: Path) -> dict[str, bytes]:
    names = [file_name(BASE, layout.suffix) for layout in LAYOUTS]
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}


def in_memory(directory: Path) -> Segment:
    return filled(directory)


def with_few_entries(directory: Path) -> Segment:
    return filled(directory, interval=10**6)


def with_many_entries(directory: Path) -> Segment:
    return filled(directory, interval=0)


def opened_again(directory: Path) -> Segment:
    segment = Segment(RealDisk(), str(directory), BASE, INTERVAL)
    assert segment.load_sealed() is not None
    return segment


def opened_after_a_stop(directory: Path) -> Segment:
    stored(directory).close()
    return opened_again(directory)


def opened_after_a_crash(directory: Path) -> Segment:
    """A segment whose index files know its first half."""
    half = BATCHES[: len(BATCHES) // 2]
    segment = filled(directory, half)
    write_indexes(segment, RealDisk())
    for one in BATCHES[len(half) :]:
        segment.append([one.data], [one.appended])
    segment.close()
    segment = Segment(RealDisk(), str(directory), BASE, INTERVAL)
    segment.load_active()
    begin = segment.resume(half[-1].last + 1, segment.size)
    assert 0 < begin < BATCHES[len(half)].position
    for at, header in segment.walk(begin, segment.size):
        segment.note(Appended(header.last_offset, header.max_timestamp, header.size), at)
    return segment


Make = Callable[[Path], Segment]
every_kind = pytest.mark.parametrize(
    "make", [in_memory, with_few_entries, with_many_entries, stored, opened_after_a_stop, opened_after_a_crash]
)


# -- finding --


@every_kind
def test_each_offset_is_located_at_the_batch_that_holds_it_or_comes_next(directory: Path, make: Make) -> None:
    segment = make(directory)
    # From the end on, so that an earlier search does not help.
    for offset in range(END + 2, BASE - 2, -1):
        expected = next((one.position for one in BATCHES if one.last >= offset), segment.size)
        assert segment.locate(offset) == expected, offset


@every_kind
def test_a_read_is_the_whole_batches_that_fit_from_the_one_that_holds_the_offset(directory: Path, make: Make) -> None:
    segment = make(directory)
    limits = sorted({n for one in BATCHES for n in (one.end - 1, one.end, one.end + 1)} | {1, 60, 10**9})
    for offset in range(BASE, END, 2):
        begin = next(one for one in BATCHES if one.last >= offset)
        for stop in [one.position for one in BATCHES[::4]] + [segment.size]:
            inside = [one for one in BATCHES if begin.position <= one.position < stop]
            for limit in limits[::3]:
                fitting = [one for one in inside if one.end - begin.position <= limit]
                for min_one in (True, False):
                    wanted = fitting or (inside[:1] if min_one else [])
                    expected = b"".join(one.data for one in wanted) if inside else None
                    assert segment.read(offset, limit, stop, min_one=min_one) == expected, (offset, stop, limit)


@every_kind
def test_all_batches_from_an_offset_on_that_are_as_young_as_a_time_are_found(directory: Path, make: Make) -> None:
    segment = make(directory)
    for time in range(NOW - 1, NOW + 53):
        for offset in range(BASE, END + 1, 3):
            batches = segment.batches_since(time, offset)
            found = [header.base_offset for _, header in batches if header.max_timestamp >= time]
            first = next((n for n, one in enumerate(BATCHES) if one.last >= offset), len(BATCHES))
            expected = [one.first for one in BATCHES[first:] if one.max_timestamp >= time]
            assert found == expected, (time, offset)


class CountingDisk(RealDisk):
    """The real disk. Counts reads of the files that it opened."""

    def __init__(self) -> None:
        self.reads = 0

    def open(self, path: str, *, create: bool = False) -> CountingFile:  # type: ignore[override]
        return CountingFile(self, RealDisk.open(self, path, create=create))


class CountingFile:
    def __init__(self, disk: CountingDisk, file: File) -> None:
        self._disk = disk
        self._file = file
        self.pwrite, self.size, self.truncate = file.pwrite, file.size, file.truncate
        self.modified_ms, self.set_modified_ms = file.modified_ms, file.set_modified_ms
        self.fdatasync, self.close = file.fdatasync, file.close

    def pread(self, size: int, position: int) -> bytes:
        self._disk.reads += 1
        return self._file.pread(size, position)


def test_what_was_just_appended_is_read_in_one_go_without_a_walk_over_headers(directory: Path) -> None:
    disk = CountingDisk()
    segment = Segment.create(disk, str(directory), BASE, INTERVAL)
    for one in BATCHES[: GAP_AFTER + 1]:
        segment.append([one.data], [one.appended])
        disk.reads = 0
        assert segment.read(one.first, 10**6, segment.size, min_one=True) == one.data
        assert disk.reads == 1


def test_batches_are_read_one_by_one_where_each_is_too_large(directory: Path) -> None:
    segment = opened_after_a_stop(directory)
    for one in BATCHES:
        assert segment.read(one.first, 1, segment.size, min_one=True) == one.data
        assert segment.read(one.first, 1, segment.size, min_one=False) == b""


@every_kind
@pytest.mark.parametrize("limit", [0, -1, -(2**31)])
def test_a_limit_that_leaves_no_room_is_as_one_that_is_too_small(directory: Path, make: Make, limit: int) -> None:
    segment = make(directory)
    for one in BATCHES[1::3]:
        assert segment.read(one.first, limit, segment.size, min_one=True) == one.data
        assert segment.read(one.first, limit, segment.size, min_one=False) == b""


def test_a_read_that_goes_on_where_the_last_one_ended_needs_no_search(directory: Path) -> None:
    disk = CountingDisk()
    segment = filled(directory, interval=10**6, disk=disk)
    first = segment.read(BASE, BATCHES[3].end, segment.size, min_one=True)
    assert first == b"".join(one.data for one in BATCHES[:4])
    disk.reads = 0
    assert segment.locate(BATCHES[4].first) == BATCHES[4].position
    assert disk.reads == 0


# -- appending --


@pytest.mark.parametrize("many", [1, 3, 20])
def test_batches_that_come_together_are_indexed_as_if_one_by_one(directory: Path, many: int) -> None:
    one_by_one, together = directory / "a", directory / "b"
    one_by_one.mkdir()
    together.mkdir()
    first = filled(one_by_one)
    second = Segment.create(RealDisk(), str(together), BASE, INTERVAL)
    for start in range(0, len(BATCHES), many):
        part = BATCHES[start : start + many]
        second.append([one.data for one in part], [one.appended for one in part])
    for segment in (first, second):
        segment.seal()
        write_indexes(segment, RealDisk())
    assert index_files(one_by_one) == index_files(together)
    assert first.max_timestamp == second.max_timestamp == max(one.max_timestamp for one in BATCHES)


def test_a_write_that_fails_halfway_leaves_the_segment_as_it_was(directory: Path) -> None:
    disk = FailingDisk()
    segment = Segment.create(disk, str(directory), BASE, INTERVAL)
    for one in BATCHES[:5]:
        segment.append([one.data], [one.appended])
    disk.fail = "write"
    with pytest.raises(OSError):
        segment.append([BATCHES[5].data], [BATCHES[5].appended])
    assert Path(segment.path).stat().st_size > segment.size == BATCHES[5].position
    assert segment.locate(BATCHES[5].first) == segment.size
    disk.fail = None
    for one in BATCHES[5:]:
        segment.append([one.data], [one.appended])
    assert Path(segment.path).read_bytes() == b"".join(one.data for one in BATCHES)


@pytest.mark.parametrize("undisturbed", [True, False])
def test_a_new_segment_is_empty_whatever_was_there_under_its_name(directory: Path, undisturbed: bool) -> None:
    stored(directory).close()
    disk = RealDisk()
    segment = Segment.create(disk, str(directory), BASE, INTERVAL, undisturbed=undisturbed)
    assert (segment.size, Path(segment.path).stat().st_size) == (0, 0)
    assert segment.locate(BASE + 5) == 0
    # The old content of the index files must be gone before a flush, even without new entries.
    for write in segment.index_writes(all_entries=False):
        write.carry_out(disk)
    assert index_files(directory) == dict.fromkeys(index_files(directory), b"")


def test_a_new_segment_makes_no_index_files_before_it_has_entries(directory: Path) -> None:
    segment = filled(directory, BATCHES[:2])
    assert segment.index_writes() == []
    assert index_files(directory) == {}


def test_index_files_that_a_worker_thread_may_still_write_are_emptied_before_they_exist(
    directory: Path,
) -> None:
    segment = Segment.create(RealDisk(), str(directory), BASE, INTERVAL, undisturbed=False)
    emptied = {write.path: write.data for write in segment.index_writes(all_entries=False)}
    assert list(emptied.values()) == [b"", b""]


# -- index files --


@pytest.mark.parametrize("known", range(len(BATCHES)))
def test_index_entries_are_not_believed_past_the_offset_or_the_position_they_are_believed_to(
    directory: Path, known: int
) -> None:
    (directory / "whole").mkdir()
    whole = filled(directory / "whole")
    write_indexes(whole, RealDisk())
    last = filled(directory, BATCHES[:known])._offset_index
    expected = last.floor(2**31 - 1)
    for offset, position in [(BATCHES[known].first, whole.size), (1 << 62, BATCHES[known].position)]:
        segment = Segment(RealDisk(), str(directory / "whole"), BASE, INTERVAL)
        segment.load_active()
        assert segment.resume(offset, position) == (0 if expected is None else expected[1])
        assert segment._offset_index.floor(2**31 - 1) == expected


def test_only_new_entries_are_added_to_the_index_files(directory: Path) -> None:
    disk = RealDisk()
    segment = filled(directory, BATCHES[:10])
    write_indexes(segment, disk)
    assert segment.index_writes() == []
    before = index_files(directory)
    for one in BATCHES[10:]:
        segment.append([one.data], [one.appended])
    writes = segment.index_writes()
    assert [write.path for write in writes] == [f"{directory}/{file_name(BASE, s)}" for s in (".timeindex", ".index")]
    assert all(write.first > 0 for write in writes)
    for write in writes:
        write.carry_out(disk)
        write.carried_out()
    after = index_files(directory)
    assert all(after[name].startswith(before[name]) and len(after[name]) > len(before[name]) for name in before)
    (directory / "anew").mkdir()
    whole = filled(directory / "anew")
    write_indexes(whole, disk)
    assert after == index_files(directory / "anew")


def test_the_time_index_of_a_sealed_segment_ends_with_its_largest_timestamp(directory: Path) -> None:
    stored(directory, interval=10**6)
    times = (directory / file_name(BASE, ".timeindex")).read_bytes()
    youngest = max(BATCHES, key=lambda one: one.max_timestamp)
    assert [TIME_INDEX.entry.unpack(times)] == [(youngest.max_timestamp, youngest.last - BASE)]


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        *((layout, damage) for layout in LAYOUTS for damage in ("missing", "torn", "does not increase", "another key")),
        (OFFSET_INDEX, "another value"),
        (OFFSET_INDEX, "cut short"),
        (TIME_INDEX, "cut short"),
    ],
)
def test_damaged_index_files_of_a_sealed_segment_are_not_believed(directory: Path, layout: Layout, damage: str) -> None:
    stored(directory).close()
    size = layout.entry.size
    file = directory / file_name(BASE, layout.suffix)
    data = file.read_bytes()
    assert len(data) >= 3 * size
    if damage == "missing":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(data[:-1])
    elif damage == "does not increase":
        file.write_bytes(data[size:] + data[:size])
    elif damage == "another key":
        file.write_bytes(data[:-5] + bytes([data[-5] ^ 1 if layout is OFFSET_INDEX else data[-5] - 1]) + data[-4:])
    elif damage == "another value":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        file.write_bytes(data[:-size])
    segment = Segment(RealDisk(), str(directory), BASE, INTERVAL)
    is_harmless = (layout, damage) == (OFFSET_INDEX, "cut short")  # slower, not wrong
    assert (segment.load_sealed() is not None) is is_harmless
    if is_harmless:
        assert [segment.locate(one.first) for one in BATCHES] == [one.position for one in BATCHES]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("lost", LAYOUTS)
def test_index_files_that_are_written_anew_may_be_left_half_written_at_any_byte(
    directory: Path, lost: Layout, sealed: bool
) -> None:
    whole = directory / "whole"
    whole.mkdir()
    batches = BATCHES[:-1]
    stored(whole, batches).close()
    (whole / file_name(BASE, lost.suffix)).unlink()  # a power cut keeps any of the names
    largest = max(one.max_timestamp for one in batches)
    with closing(recovered(whole, sealed=sealed)) as segment:
        anew = segment.index_writes()
    for number, failing in enumerate(anew):
        for reached in range(0, len(failing.data) + 1, 4):
            torn = directory / f"{number}-{reached}"
            shutil.copytree(whole, torn)
            for write in anew[:number]:
                write._replace(path=moved_to(torn, write.path)).carry_out(RealDisk())
            with closing(RealDisk().open(moved_to(torn, failing.path), create=True)) as file:
                file.pwrite([failing.data[:reached]], failing.first * failing.source.entry_size)
            with closing(recovered(torn, sealed=sealed)) as segment:
                assert segment.max_timestamp == largest, (number, reached)


def recovered(directory: Path, *, sealed: bool) -> Segment:
    """Open the segment as a start does: it walks over the batches for which no index file vouches."""
    segment = Segment(RealDisk(), str(directory), BASE, INTERVAL)
    if sealed and segment.load_sealed() is not None:
        return segment
    if sealed:
        segment.clear_indexes()
    else:
        segment.load_active()
    for at, header in segment.walk(segment.resume(1 << 62, segment.size), segment.size):
        segment.note(Appended(header.last_offset, header.max_timestamp, header.size), at)
    if sealed:
        segment.seal()
    return segment


def moved_to(directory: Path, path: str) -> str:
    return str(directory / Path(path).name)


def _damages(layout: Layout, data: bytes) -> Iterator[tuple[str, bytes]]:
    size = layout.entry.size
    for length in (0, 1, size, len(data) // 2, len(data) - size, len(data) - 1):
        yield f"{length} bytes of {len(data)} are left", data[:length]
    for number in range(len(data) // size):
        key, value = layout.entry.unpack_from(data, number * size)
        for damaged in ((-key - 1, value), (key, -value - 1), (key, 2**31 - 1), (key + 1, value)):
            changed = bytearray(data)
            layout.entry.pack_into(changed, number * size, *damaged)
            yield f"entry {number} is {damaged}", bytes(changed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_files_that_are_damaged_while_the_segment_is_in_use_cost_time_and_nothing_else(
    directory: Path, layout: Layout
) -> None:
    stored(directory).close()
    file = directory / file_name(BASE, layout.suffix)
    good = file.read_bytes()
    for what, data in _damages(layout, good):
        file.write_bytes(good)
        segment = opened_again(directory)
        file.write_bytes(data)
        for offset in range(END + 2, BASE - 2, -1):
            expected = next((one.position for one in BATCHES if one.last >= offset), segment.size)
            assert segment.locate(offset) == expected, (what, offset)
        assert segment.read(BASE, BATCHES[9].position - 1, segment.size, min_one=True) == b"".join(
            one.data for one in BATCHES[:8]
        ), what
        for number, one in enumerate(BATCHES[1:]):
            assert segment.end_before(one.position) == BATCHES[number].last + 1, (what, one)
        for time in range(NOW - 1, NOW + 53, 3):
            headers = [header for _, header in segment.batches_since(time, BASE)]
            found = [header.base_offset for header in headers if header.max_timestamp >= time]
            assert found == [one.first for one in BATCHES if one.max_timestamp >= time], (what, time)
        newest = max(header.max_timestamp for _, header in segment.newest_batches(BASE, END))
        assert newest == NOW + max(TIMES), what
        segment.close()


# -- cutting --


def stored_in_files_that_were_damaged(directory: Path) -> Segment:
    segment = stored(directory)
    for name in index_files(directory):
        (directory / name).write_bytes(b"x")
    return segment


@pytest.mark.parametrize(
    "make",
    [
        in_memory,
        with_many_entries,
        stored,
        opened_after_a_stop,
        opened_after_a_crash,
        stored_in_files_that_were_damaged,
    ],
)
def test_a_segment_that_was_cut_goes_on_as_if_what_was_cut_had_never_been(directory: Path, make: Make) -> None:
    interval = 0 if make is with_many_entries else INTERVAL
    other = batch(8, size=70, timestamp=NOW + 45)
    for kept in range(len(BATCHES)):
        cut, anew = directory / f"{kept}", directory / f"{kept}-anew"
        cut.mkdir()
        anew.mkdir()
        segment = make(cut)
        at = BATCHES[kept]
        data = stamped(other, at.first, 1)
        more = Batch(data, at.first, at.first + 7, NOW + 52, at.position)
        segment.truncate(at.first, at.position)
        assert segment.size == Path(segment.path).stat().st_size == at.position
        fresh = filled(anew, BATCHES[:kept], interval)
        assert segment.max_timestamp == fresh.max_timestamp
        for one in (segment, fresh):
            one.append([more.data], [more.appended])
            assert {one.locate(offset) for offset in range(more.first, more.last + 1)} == {at.position}
            one.seal()
            write_indexes(one, RealDisk())
            one.close()
        assert index_files(cut) == index_files(anew)
        assert Path(segment.path).read_bytes() == Path(fresh.path).read_bytes()


@pytest.mark.parametrize("missing", ["", ".index", ".timeindex"])
def test_a_segment_whose_files_are_removed_leaves_nothing(directory: Path, missing: str) -> None:
    segment = stored(directory)
    assert len(os.listdir(directory)) == 3
    if missing:
        (directory / file_name(BASE, missing)).unlink()
    segment.remove_files()
    segment.close()
    assert os.listdir(directory) == []


# -- damage --


def test_a_header_that_makes_no_sense_is_named_by_file_and_position(directory: Path) -> None:
    segment = filled(directory, interval=10**6)
    at = BATCHES[7].position
    segment.file.pwrite([b"\x7f"], at + 16)  # the magic
    message = f"{segment.path}, position {at}: unknown magic 127"
    with pytest.raises(CorruptRecord, match=message):
        list(segment.walk(0, segment.size))
    with pytest.raises(CorruptRecord, match=message):
        segment.locate(BATCHES[8].last)


def test_a_file_that_became_shorter_is_not_read_as_if_it_ended_there(directory: Path) -> None:
    segment = filled(directory)
    os.truncate(segment.path, segment.size - 1)
    with pytest.raises(CorruptRecord, match=f"ends at position {segment.size - 1}, but had {segment.size} bytes"):
        segment.read(BASE, 10**6, segment.size, min_one=True)


def test_walking_reads_headers_alone(directory: Path) -> None:
    segment = Segment.create(RealDisk(), str(directory), BASE, INTERVAL)
    large = stamped(batch(1, size=50_000), BASE, 0)
    header = parse_header(large)
    for number in range(3):
        data: list[Buffer] = [stamped(large, BASE + number, 0)]
        segment.append(data, [Appended(BASE + number, header.max_timestamp, header.size)])
    read: list[int] = []
    file = segment.file

    class Watched:
        def pread(self, size: int, position: int) -> bytes:
            read.append(size)
            return file.pread(size, position)

    segment.file = Watched()  # type: ignore[assignment]
    assert [found.base_offset for _, found in segment.walk(0, segment.size)] == [BASE, BASE + 1, BASE + 2]
    assert sum(read) < header.size

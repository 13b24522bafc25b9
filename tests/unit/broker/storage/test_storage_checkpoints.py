from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minibroker.broker.storage.checkpoints import (
    EpochEntry,
    MalformedFile,
    MetaProperties,
    OffsetCheckpoint,
    decode_clean_shutdown,
    decode_epochs,
    decode_meta_properties,
    decode_offsets,
    decode_topic_id,
    encode_clean_shutdown,
    encode_epochs,
    encode_meta_properties,
    encode_offsets,
    encode_topic_id,
    sealed,
    unsealed,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world.real import RealDisk

A, B = TopicPartition("a", 0), TopicPartition("b.c-d", 12)


def test_offset_checkpoints_are_kafkas_lines_sorted_by_partition() -> None:
    data = encode_offsets({B: 7, A: 2**40})
    assert unsealed("f", data) == b"0\n2\na 0 1099511627776\nb.c-d 12 7\n"
    assert decode_offsets("f", data) == {A: 2**40, B: 7}
    assert decode_offsets("f", encode_offsets({})) == {}


def test_the_event_loop_and_a_worker_thread_may_write_the_same_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first flush of a log writes its topic's id, and so does the event loop if it empties the log during the
    flush."""
    disk, path = RealDisk(), str(tmp_path / "partition.metadata")
    synced, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def fsync_slowly(descriptor: int) -> None:
        fsync(descriptor)
        if threading.current_thread() is not threading.main_thread() and not synced.is_set():
            synced.set()
            assert go_on.wait(60)

    monkeypatch.setattr(os, "fsync", fsync_slowly)
    with ThreadPoolExecutor(1) as workers:
        by_worker = workers.submit(disk.write_atomically, path, b"same")
        assert synced.wait(60)
        disk.write_atomically(path, b"same")
        go_on.set()
        by_worker.result()
    assert [file.name for file in tmp_path.iterdir()] == ["partition.metadata"]
    assert disk.read_file(path) == b"same"


def test_epoch_checkpoints_are_kafkas_lines() -> None:
    entries = [EpochEntry(0, 0), EpochEntry(3, 10)]
    assert unsealed("f", encode_epochs(entries)) == b"0\n2\n0 0\n3 10\n"
    assert decode_epochs("f", encode_epochs(entries)) == entries


def test_no_bit_of_a_small_file_flips_unseen() -> None:
    data = bytearray(encode_offsets({A: 7, B: 19}))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedFile):
            decode_offsets("f", bytes(data))
        data[bit // 8] ^= 1 << bit % 8


def test_a_small_file_without_a_checksum_is_one_from_before_there_was_any() -> None:
    assert unsealed("f", b"0\n1\na 0 7\n") == b"0\n1\na 0 7\n"
    assert decode_offsets("f", b"0\n1\na 0 7\n") == {A: 7}
    with pytest.raises(MalformedFile, match="its checksum is not that of what stands before it"):
        unsealed("f", sealed(b"0\n1\na 0 7\n").replace(b"7", b"8"))


@pytest.mark.parametrize(
    "data", [b"", b"0\n", b"1\n0\n", b"0\n2\na 0 1\n", b"0\n1\na 0\n", b"0\n1\na x 1\n", b"\xff\xfe", b"0\n1\n\0\0\0"]
)
def test_a_damaged_offset_checkpoint_is_named(data: bytes) -> None:
    with pytest.raises(MalformedFile, match="the-file is damaged"):
        decode_offsets("the-file", data)


@pytest.mark.parametrize("data", [b"0\n1\n1\n", b"0\n2\n3 10\n3 11\n", b"0\n2\n3 10\n4 10\n", b"0\n1\na b\n"])
def test_epochs_that_do_not_increase_are_a_damaged_file(data: bytes) -> None:
    with pytest.raises(MalformedFile, match="the-file is damaged"):
        decode_epochs("the-file", data)


def test_partition_metadata_is_kafkas() -> None:
    data = encode_topic_id("ZWV2ZW4gbW9yZSBkYXRh")
    assert unsealed("f", data) == b"version: 0\ntopic_id: ZWV2ZW4gbW9yZSBkYXRh\n"
    assert decode_topic_id("f", data) == "ZWV2ZW4gbW9yZSBkYXRh"
    for damaged in (b"", b"version: 1\ntopic_id: x\n", b"version: 0\n", b"\xff"):
        with pytest.raises(MalformedFile, match="f is damaged"):
            decode_topic_id("f", damaged)


def test_meta_properties_are_a_properties_file_that_may_have_comments() -> None:
    meta = MetaProperties(3, "cluster-x")
    assert decode_meta_properties("f", encode_meta_properties(meta)) == meta
    assert decode_meta_properties("f", b"#\n#Mon\nversion=0\ncluster.id=c\nbroker.id = 4\n") == MetaProperties(4, "c")
    for damaged in (b"", b"broker.id=x\ncluster.id=c\n", b"broker.id=1\n"):
        with pytest.raises(MalformedFile, match="f is damaged"):
            decode_meta_properties("f", damaged)


def test_the_clean_shutdown_marker_is_kafkas_json() -> None:
    assert unsealed("f", encode_clean_shutdown(42)) == b'{"version":0,"brokerEpoch":42}'
    assert decode_clean_shutdown("f", encode_clean_shutdown(42)) == 42
    assert decode_clean_shutdown("f", b'{"version":0}') == -1
    with pytest.raises(MalformedFile, match="f is damaged"):
        decode_clean_shutdown("f", b"")


def test_an_older_picture_written_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    checkpoint = OffsetCheckpoint(RealDisk(), str(tmp_path / "points"))
    older = checkpoint.stage({A: 100})
    checkpoint.lower(A, 40)
    checkpoint.write(older)
    assert OffsetCheckpoint(RealDisk(), checkpoint.path).read() == {A: 40}


def test_lowering_waits_for_nothing_where_the_file_says_less(tmp_path: Path) -> None:
    checkpoint = OffsetCheckpoint(RealDisk(), str(tmp_path / "points"))
    checkpoint.lower(A, 10)
    assert not (tmp_path / "points").exists()
    checkpoint.write(checkpoint.stage({A: 5, B: 50}))
    before = (tmp_path / "points").stat().st_ino
    checkpoint.lower(A, 5)
    assert (tmp_path / "points").stat().st_ino == before
    checkpoint.lower(B, 49)
    assert OffsetCheckpoint(RealDisk(), checkpoint.path).read() == {A: 5, B: 49}


def test_lowering_waits_for_a_picture_that_says_less_than_the_file(tmp_path: Path) -> None:
    checkpoint = OffsetCheckpoint(RealDisk(), str(tmp_path / "points"))
    checkpoint.write(checkpoint.stage({A: 100}))
    checkpoint.stage({})  # on its way, and overtaken
    checkpoint.lower(A, 0)
    assert OffsetCheckpoint(RealDisk(), checkpoint.path).read() == {}


def test_stored_is_what_the_file_holds_while_pictures_wait(tmp_path: Path) -> None:
    checkpoint = OffsetCheckpoint(RealDisk(), str(tmp_path / "starts"))
    first, second = checkpoint.stage({A: 5}), checkpoint.stage({A: 7, B: 9})
    assert checkpoint.stored == {}
    checkpoint.write(second)
    checkpoint.write(first)
    assert checkpoint.stored == {A: 7, B: 9}
    checkpoint.stage({A: 8, B: 9})
    assert checkpoint.stored == {A: 7, B: 9}
    checkpoint.lower(A, 3)
    assert checkpoint.stored == {A: 3, B: 9}
    again = OffsetCheckpoint(RealDisk(), checkpoint.path)
    assert again.read() == again.stored == {A: 3, B: 9}


def test_pictures_from_several_threads_end_with_the_newest(tmp_path: Path) -> None:
    checkpoint = OffsetCheckpoint(RealDisk(), str(tmp_path / "points"))
    staged = [checkpoint.stage({A: number}) for number in range(20)]
    threads = [threading.Thread(target=checkpoint.write, args=(s,)) for s in reversed(staged)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert OffsetCheckpoint(RealDisk(), checkpoint.path).read() == {A: 19}

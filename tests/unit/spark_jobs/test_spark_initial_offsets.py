"""The start of a stream stays at the offset first recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minibroker.client.errors import InvalidSetting
from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.source.initial_offsets import FILE_NAME, keep_initial_offsets, load_or_store
from minibroker.spark_jobs.source.offsets import TopicOffsets
from tests.unit.spark_jobs.scripted_log import scripted_log

FIRST = {"t": TopicOffsets("id", {0: 5})}
LATER = {"t": TopicOffsets("id", {0: 9})}


def test_the_first_answer_is_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE_NAME
    assert load_or_store(path, lambda: FIRST) == FIRST
    assert load_or_store(path, lambda: LATER) == FIRST
    assert [file.name for file in path.parent.iterdir()] == [FILE_NAME]


def test_a_damaged_file_is_reported_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    for damaged, expected in (('{"t', "is not JSON"), ('{"t":5}', "not an offset of this source")):
        path.write_text(damaged)
        with pytest.raises(MinibrokerError, match=expected):
            load_or_store(path, lambda: LATER)
        assert path.read_text() == damaged


def test_latest_is_resolved_once_whatever_is_written_later(tmp_path: Path) -> None:
    with scripted_log() as log:
        topic_id = log.topic("t")
        log.append([b"x"] * 5)
        options = {"bootstrap.servers": log.bootstrap, "subscribe": "t"}
        kept = keep_initial_offsets(options, f"file://{tmp_path}")
        log.append([b"x"] * 4)
        assert keep_initial_offsets(options, tmp_path) == kept == {"initialOffsetsFile": str(tmp_path / FILE_NAME)}
    content = json.loads((tmp_path / FILE_NAME).read_text())
    assert content == {"t": {"id": topic_id, "offsets": {"0": 5}}}


def test_a_checkpoint_elsewhere_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="give a local path for initialOffsetsFile"):
        keep_initial_offsets({"bootstrap.servers": "a:1", "subscribe": "t"}, "s3://bucket/checkpoint")

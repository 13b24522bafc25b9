"""Which version of a view is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.source.offsets import TopicOffsets
from minibroker.spark_jobs.views.serving import Replaced, Serving, reached


def at(*offsets: int, topic_id: str = "id") -> dict[str, TopicOffsets]:
    return {"t": TopicOffsets(topic_id, dict(enumerate(offsets)))}


def test_a_version_has_caught_up_when_no_partition_is_behind() -> None:
    assert reached(at(3, 4), at(3, 4))
    assert reached(at(3, 4, 1), at(3, 4))
    assert not reached(at(9, 3), at(3, 4))
    assert not reached(at(9), at(3, 4))
    assert reached(at(9), at(3, 0))
    assert not reached({}, at(0))
    assert reached(at(0, topic_id="new"), at(3, 4))


def test_a_version_that_was_replaced_never_serves_again(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    assert serving.current() is None
    assert serving.may_take_over(at(0))
    serving.switch("v1", "a", "token-a", None, at(1))
    with serving.publishing("token-a"):
        pass
    current = serving.switch("v2", "b", "token-b", "batch", at(2))
    assert serving.current() == current
    assert (current.generation, current.stream, current.batch) == (2, "b", "batch")
    assert (serving.serves("token-a"), serving.serves("token-b")) == (False, True)
    with pytest.raises(Replaced, match="was replaced by b"), serving.publishing("token-a"):
        raise AssertionError("not reached")
    assert serving.retired_before(0) == ["a"]
    assert serving.retired_before(3_600_000) == []


def test_a_damaged_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_text("?")
    with pytest.raises(MinibrokerError, match="CURRENT is damaged"):
        Serving(tmp_path).current()

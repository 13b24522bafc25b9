from __future__ import annotations

import pytest

from minibroker.broker.storage.checkpoints import EpochEntry
from minibroker.broker.storage.leader_epochs import UNKNOWN, LeaderEpochCache


def cache(*entries: tuple[int, int]) -> LeaderEpochCache:
    return LeaderEpochCache(EpochEntry(*entry) for entry in entries)


@pytest.mark.parametrize(
    ("requested", "answer"),
    [
        (-1, UNKNOWN),  # not given
        (7, (7, 100)),  # the newest ends where the log ends
        (8, UNKNOWN),  # newer than all
        (5, (5, 30)),  # ends where the next begins
        (6, (5, 30)),  # never wrote here: the one before
        (2, (2, 20)),
        (0, (0, 10)),  # older than all: nothing of it is here
        (1, (1, 10)),
    ],
)
def test_an_epochs_end_is_the_start_of_the_next_one(requested: int, answer: tuple[int, int]) -> None:
    assert cache((2, 10), (5, 20), (7, 30)).end_offset_for(requested, 100) == answer


def test_without_epochs_nothing_is_known() -> None:
    assert cache().end_offset_for(3, 10) == UNKNOWN
    assert cache().latest == -1
    assert cache().epoch_at(0) == -1


def test_assigning_drops_what_contradicts_the_new_epoch() -> None:
    epochs = cache((1, 0), (2, 10), (5, 20))
    epochs.assign(6, 20)  # 5 wrote nothing
    assert epochs.entries == [(1, 0), (2, 10), (6, 20)]
    epochs.assign(7, 5)  # the log was truncated
    assert epochs.entries == [(1, 0), (7, 5)]
    epochs.assign(3, 8)  # a former leader's mistake about the future
    assert epochs.entries == [(1, 0), (3, 8)]


def test_assigning_the_same_epoch_again_changes_nothing() -> None:
    epochs = cache((1, 0), (2, 10))
    version = epochs.version
    epochs.assign(2, 15)
    assert epochs.entries == [(1, 0), (2, 10)]
    assert epochs.version == version


def test_truncating_the_end_forgets_epochs_that_begin_there_or_later() -> None:
    epochs = cache((1, 0), (2, 10), (5, 20))
    version = epochs.version
    epochs.truncate_from_end(21)
    assert (len(epochs.entries), epochs.version) == (3, version)
    epochs.truncate_from_end(20)
    assert epochs.entries == [(1, 0), (2, 10)]
    assert epochs.version > version
    epochs.truncate_from_end(0)
    assert epochs.entries == []


def test_truncating_the_start_keeps_the_epoch_of_the_record_before_it() -> None:
    for start, kept in (
        (0, [(1, 0), (2, 10), (5, 20)]),
        (1, [(1, 0), (2, 10), (5, 20)]),
        (5, [(1, 4), (2, 10), (5, 20)]),
        (10, [(1, 9), (2, 10), (5, 20)]),
        (11, [(2, 10), (5, 20)]),
        (15, [(2, 14), (5, 20)]),
        (99, [(5, 98)]),
    ):
        epochs = cache((1, 0), (2, 10), (5, 20))
        epochs.truncate_from_start(start)
        assert epochs.entries == kept


def test_every_offset_has_the_epoch_that_wrote_it() -> None:
    epochs = cache((1, 3), (2, 10))
    assert [epochs.epoch_at(offset) for offset in (0, 2, 3, 9, 10, 99)] == [-1, -1, 1, 1, 2, 2]

"""The driver's decision about a batch that is written with `exactlyOnce`."""

from __future__ import annotations

import pytest

from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.spark_jobs.source.decisions import (
    CHUNK,
    BatchRecord,
    Plan,
    Prepared,
    after_commits,
    from_chunks,
    must_write,
    plan_commit,
    to_chunks,
    undecided,
)

A, B, C = Prepared(0, 0, 7, 1), Prepared(1, 0, 8, 4), Prepared(2, 1, 9, 0)
RECORD = BatchRecord(5, 3, (A, B, C))
ATTEMPTS = {0: 0, 1: 0, 2: 1}


def plan(known: BatchRecord | None, batch: int, *reported: Prepared, attempts: dict[int, int] = ATTEMPTS) -> Plan:
    return plan_commit(known, "q", batch, attempts, reported)


def test_a_record_comes_back_from_its_text_whatever_followed_it_before() -> None:
    long = BatchRecord(
        6, 900, tuple(Prepared(task, 0, 10_000_000 + task, 30_000) for task in range(900)), frozenset({3})
    )
    chunks = to_chunks(long)
    assert len(chunks) > 2
    assert all(len(chunk) <= CHUNK + 4 for chunk in chunks)
    assert from_chunks(6, chunks) == long
    assert from_chunks(5, [*to_chunks(RECORD), *chunks[1:]]) == RECORD


def test_a_batch_with_too_many_tasks_is_refused_before_it_is_decided() -> None:
    tasks = tuple(Prepared(task, 0, 10_000_000, 30_000) for task in range(5_000))
    with pytest.raises(MinibrokerError, match=r"a batch of 5000 tasks is too large for exactlyOnce.*coalesce"):
        to_chunks(BatchRecord(1, 5_000, tasks))


def test_a_task_writes_unless_its_batch_is_decided() -> None:
    assert must_write(None, "q", 0, 1)
    assert must_write(RECORD, "q", 6, 1)
    assert not must_write(RECORD, "q", 5, 1)
    timed_out = RECORD._replace(again=frozenset({1}))
    assert [must_write(timed_out, "q", 5, task) for task in range(3)] == [False, True, False]


def test_a_batch_older_than_the_record_is_refused_by_tasks_and_driver() -> None:
    for refused in (lambda: must_write(RECORD, "q", 4, 0), lambda: plan(RECORD, 4, A)):
        with pytest.raises(MinibrokerError, match="batch 4 of q is older than batch 5, which is committed"):
            refused()


@pytest.mark.parametrize("known", [None, RECORD._replace(batch=4)])
def test_a_new_batch_gets_a_record_of_all_its_transactions(known: BatchRecord | None) -> None:
    found = plan(known, 5, C, A, B)
    assert (found.record, found.fresh, found.needless) == (RECORD, (C, A, B), ())
    assert found.failed == ((2, 0),)


def test_a_batch_without_rows_needs_no_record() -> None:
    assert plan(None, 5, attempts={0: 0, 1: 2}) == Plan(None, failed=((1, 0), (1, 1)))


def test_a_decided_batch_is_finished_and_what_its_replay_has_written_is_aborted() -> None:
    late = Prepared(0, 1, 7, 9)
    assert plan(RECORD, 5, attempts={0: 0}) == Plan(RECORD)
    assert plan(RECORD, 5, late, attempts={0: 1}) == Plan(RECORD, needless=(late,))


def test_attempts_whose_rows_are_committed_are_never_fenced() -> None:
    assert plan(RECORD, 5, attempts={0: 2, 1: 0, 2: 2}).failed == ((0, 1), (2, 0))


def test_transactions_that_time_out_after_the_decision_are_written_again_and_only_they() -> None:
    codes = {0: ErrorCode.NONE, 1: ErrorCode.TRANSACTION_ABORTABLE, 2: ErrorCode.NONE}
    incomplete = after_commits(RECORD, "q", codes)
    assert incomplete == RECORD._replace(again=frozenset({1}))
    again = Prepared(1, 0, 8, 6)
    assert plan(incomplete, 5, again) == Plan(BatchRecord(5, 3, (A, again, C)), fresh=(again,), failed=((2, 0),))
    assert after_commits(RECORD, "q", dict.fromkeys(range(3), ErrorCode.NONE)) is None


@pytest.mark.parametrize(("attempts", "reported"), [({0: 0, 1: 0}, [Prepared(1, 0, 8, 6)]), (ATTEMPTS, [])])
def test_rows_that_timed_out_are_not_taken_from_a_batch_that_is_divided_otherwise(
    attempts: dict[int, int], reported: list[Prepared]
) -> None:
    incomplete = RECORD._replace(again=frozenset({1}))
    with pytest.raises(MinibrokerError, match="except for the rows of the tasks 1, whose transactions timed out"):
        plan(incomplete, 5, *reported, attempts=attempts)


@pytest.mark.parametrize("code", [ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_TXN_STATE])
def test_a_commit_whose_outcome_cannot_be_known_is_an_error(code: ErrorCode) -> None:
    codes = {0: ErrorCode.NONE, 1: code, 2: ErrorCode.TRANSACTION_ABORTABLE}
    with pytest.raises(MinibrokerError, match=f"tasks 1 \\({code.name}\\), so it is not known whether"):
        after_commits(RECORD, "q", codes)


def test_abort_leaves_decided_transactions_alone() -> None:
    other = Prepared(1, 1, 8, 5)
    assert undecided(RECORD, 5, [A, other]) == (other,)
    assert undecided(RECORD, 6, [other]) == (other,)
    assert undecided(None, 0, [A]) == (A,)

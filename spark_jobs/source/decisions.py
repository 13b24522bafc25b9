"""Which transactions of a batch are committed: the driver's decision, its record, and what follows from it. Pure.

Every task of a batch leaves its rows in a transaction of its own. The driver decides about all of them by one record:
the batch's number and the identities of the transactions. Before the record, the batch is aborted; after it, the batch
is committed, and any driver that finds the record finishes the commits. So a task writes nothing if the record has its
batch. docs/internals/spark.md has the argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.protocol.errors import ErrorCode, MinibrokerError

CHUNK = 4_000
"""Characters of a record in the metadata of one offset (`offset.metadata.max.bytes` is 4,096 by default)."""
MAX_CHUNKS = 16


class Prepared(NamedTuple):
    """The transaction of a task that has written all of its rows."""

    task: int
    """Spark's partition id."""
    attempt: int
    producer_id: int
    producer_epoch: int


class BatchRecord(NamedTuple):
    """The latest batch that is committed."""

    batch: int
    tasks: int
    """The number of tasks of the batch."""
    prepared: tuple[Prepared, ...]
    """The transactions to commit. Tasks without rows have none."""
    again: frozenset[int] = frozenset()
    """Tasks whose transactions timed out after the decision: they write their rows again."""


def transactional_id(name: str, task: int, attempt: int) -> str:
    """Attempts have different ids, since a late attempt would fence the one whose rows are committed."""
    return f"{name}-{task}-{attempt}"


# --- the record's text ---------------------------------------------------------------------------------------------


def to_chunks(record: BatchRecord) -> list[str]:
    """Raises MinibrokerError if the batch has too many tasks for a record."""
    body = json.dumps([record.tasks, record.prepared, sorted(record.again)], separators=(",", ":"))
    chunks = [body[first : first + CHUNK] for first in range(0, len(body), CHUNK)]
    if len(chunks) > MAX_CHUNKS:
        raise MinibrokerError(
            f"a batch of {record.tasks} tasks is too large for exactlyOnce: its record has {len(body)} characters of "
            f"at most {MAX_CHUNKS * CHUNK}; write with fewer tasks, for instance after coalesce(1000)"
        )
    return [f"{len(chunks)}:{chunks[0]}", *chunks[1:]]


def from_chunks(batch: int, chunks: Sequence[str]) -> BatchRecord:
    """`chunks` may be followed by those of an earlier, longer record."""
    number, first = chunks[0].split(":", 1)
    tasks, prepared, again = json.loads(first + "".join(chunks[1 : int(number)]))
    return BatchRecord(batch, tasks, tuple(Prepared(*each) for each in prepared), frozenset(again))


# --- decisions -----------------------------------------------------------------------------------------------------


def must_write(known: BatchRecord | None, name: str, batch: int, task: int) -> bool:
    """Return whether a task has rows to write, or the batch is committed already. Raises MinibrokerError if the batch
    is too old."""
    if known is None or known.batch < batch:
        return True
    _check_age(known, name, batch)
    return task in known.again


class Plan(NamedTuple):
    record: BatchRecord | None
    """The transactions to commit; None: no task has written any row."""
    fresh: tuple[Prepared, ...] = ()
    """Transactions that no record has yet, so that the record must be written before they are committed."""
    needless: tuple[Prepared, ...] = ()
    """Transactions to abort."""
    failed: tuple[tuple[int, int], ...] = ()
    """Tasks and attempts that have failed, perhaps with an open transaction: they are fenced."""


def plan_commit(
    known: BatchRecord | None,
    name: str,
    batch: int,
    attempts: Mapping[int, int],
    reported: Sequence[Prepared],
) -> Plan:
    """Decide about a batch whose tasks have all ended. `attempts`: the successful attempt of each task. `reported`: the
    transactions of those that wrote. Raises MinibrokerError."""
    tasks = len(attempts)
    if known is None or known.batch < batch:
        record = BatchRecord(batch, tasks, tuple(sorted(reported))) if reported else None
        return Plan(record, fresh=tuple(reported), failed=_failed(attempts, reported))
    _check_age(known, name, batch)
    if not known.again:
        needless = undecided(known, batch, reported)
        return Plan(known, needless=needless, failed=_failed(attempts, known.prepared))
    fresh = [each for each in reported if each.task in known.again]
    if tasks != known.tasks or {each.task for each in fresh} != known.again:
        raise MinibrokerError(
            f"batch {batch} of {name} is committed, except for the rows of the tasks {_listed(known.again)}, whose "
            f"transactions timed out. It has {tasks} tasks now, and had {known.tasks}, so these rows cannot be found "
            "again: start it with the options and the number of cores that it had"
        )
    kept = [each for each in known.prepared if each.task not in known.again]
    record = BatchRecord(batch, tasks, tuple(sorted([*kept, *fresh])))
    needless = undecided(record, batch, reported)
    return Plan(record, tuple(fresh), needless=needless, failed=_failed(attempts, record.prepared))


def _failed(attempts: Mapping[int, int], kept: Iterable[Prepared]) -> tuple[tuple[int, int], ...]:
    ours = {(each.task, each.attempt) for each in kept}
    earlier = ((task, attempt) for task, latest in sorted(attempts.items()) for attempt in range(latest))
    return tuple(each for each in earlier if each not in ours)


def undecided(known: BatchRecord | None, batch: int, reported: Iterable[Prepared]) -> tuple[Prepared, ...]:
    """Return the transactions that no record commits, so that they are aborted."""
    kept = known.prepared if known is not None and known.batch == batch else ()
    return tuple(each for each in reported if each not in kept)


def unreported(known: BatchRecord | None, batch: int, name: str, ids: Iterable[str]) -> list[tuple[int, int]]:
    """Return the tasks and attempts of this write among transactional ids, without those that the record commits."""
    kept = {(each.task, each.attempt) for each in known.prepared} if known is not None and known.batch == batch else ()
    found = (re.fullmatch(re.escape(name) + r"-(\d+)-(\d+)", each) for each in ids)
    attempts = [(int(match[1]), int(match[2])) for match in found if match]
    return [each for each in attempts if each not in kept]


def after_commits(record: BatchRecord, name: str, codes: Mapping[int, ErrorCode]) -> BatchRecord | None:
    """Return the record to write if transactions timed out after the decision; None: all are committed. `codes`: the
    answers to their commits, by task. Raises MinibrokerError if it is not known whether one is committed."""
    taken = {
        task: code for task, code in codes.items() if code not in (ErrorCode.NONE, ErrorCode.TRANSACTION_ABORTABLE)
    }
    if taken:
        raise MinibrokerError(
            f"batch {record.batch} of {name} is committed, but another producer has taken the transactional ids of the "
            f"tasks {_listed(taken)} ({next(iter(taken.values())).name}), so it is not known whether their rows were "
            "written. Two drivers may have run the query: end one, compare the topic with the input, and start again "
            "with a new checkpoint"
        )
    timed_out = frozenset(task for task, code in codes.items() if code is ErrorCode.TRANSACTION_ABORTABLE)
    return record._replace(again=timed_out) if timed_out else None


def _check_age(known: BatchRecord, name: str, batch: int) -> None:
    if batch < known.batch:
        raise MinibrokerError(
            f"batch {batch} of {name} is older than batch {known.batch}, which is committed: the checkpoint is not the "
            "latest one, or a second driver writes with it. Use the latest checkpoint with one driver"
        )


def _listed(tasks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(tasks)))

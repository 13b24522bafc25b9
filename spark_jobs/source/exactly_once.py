"""The requests of exactly-once writes: tasks prepare transactions, and the driver decides about them (`decisions`).

The driver's own transactional id is the name of the write. To begin a decision, it fences an earlier driver with that
id. The record is an offset that its transaction commits in a group of the same name: the offset is the batch's number,
and the metadata has the rest. The offset is one of `__transaction_state`, which every cluster with transactions has,
and which is never deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pyarrow

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.administering.transactions import list_transactions
from minibroker.client.errors import BrokersFailed, InvalidSetting
from minibroker.client.group.commits import Commits, GroupMetadata, OffsetAndMetadata
from minibroker.client.producer import Producer
from minibroker.client.transactions.prepared import (
    EMPTY,
    ONGOING,
    PreparedTransaction,
    end_prepared,
    fence,
    is_known,
    is_open,
    prepare,
    wait_for_markers,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.world import World
from minibroker.spark_jobs.source.connecting import FIRST_CONTACT_PATIENCE_S, PATIENCE_S, connect, new_cluster
from minibroker.spark_jobs.source.decisions import (
    MAX_CHUNKS,
    BatchRecord,
    Prepared,
    after_commits,
    from_chunks,
    must_write,
    plan_commit,
    to_chunks,
    transactional_id,
    undecided,
    unreported,
)
from minibroker.spark_jobs.source.options import WriteOptions
from minibroker.spark_jobs.source.writing import WRITER_CLIENT_ID, Written, send_all

logger = logging.getLogger(__name__)

NAME_PREFIX = "minibroker-spark-"
_RECORD = [TopicPartition(TRANSACTIONS_TOPIC, index) for index in range(MAX_CHUNKS)]


@dataclass(frozen=True)
class Place:
    """The place of a task in a write."""

    name: str
    """The name of the write: its driver's transactional id, and the group that has the record."""
    batch: int
    task: int
    attempt: int
    guard: str = ""
    """A transactional id that the driver takes when this run of the write has failed; empty: the next run takes the ids
    of the tasks anyway."""


@dataclass(frozen=True)
class WrittenInTransaction(Written):
    """A task's message to the driver."""

    place: Place
    prepared: Prepared | None
    """None: the task had no rows, or its batch was committed before."""


# --- tasks ---------------------------------------------------------------------------------------------------------


async def prepare_rows(
    options: WriteOptions, place: Place, batches: Iterable[pyarrow.RecordBatch], world: World | None = None
) -> WrittenInTransaction:
    """Write all rows, and leave their transaction to the driver, unless the batch is committed already. Raises as
    `write_batches`; then the transaction is aborted."""
    async with _driver(options, place.name, world) as driver:
        known = await driver.record()
        if not must_write(known, place.name, place.batch, place.task):
            logger.warning("batch %d of %s is committed already: its rows are not written", place.batch, place.name)
            for _ in batches:  # Spark gives up its worker if rows are left
                pass
            return WrittenInTransaction(0, place, None)
        producer = Producer(
            options.bootstrap,
            client_id=WRITER_CLIENT_ID,
            linger_ms=5,
            transactional_id=transactional_id(place.name, place.task, place.attempt),
            transaction_timeout_ms=options.transaction_timeout_ms,
            world=world,
            **options.security,
        )
        await _start(producer, options)
        try:
            await driver.check_guard(place)
            async with producer.transaction() as transaction:
                rows = await send_all(producer, options, batches)
                open_one = await prepare(transaction)
        finally:
            await producer.close()
    prepared = None if open_one is None else Prepared(place.task, place.attempt, *open_one[1:])
    return WrittenInTransaction(rows, place, prepared)


async def _start(producer: Producer, options: WriteOptions) -> None:
    try:
        await producer.start()
    except BrokerError as error:
        if error.code is not ErrorCode.INVALID_TRANSACTION_TIMEOUT:
            raise
        rule = "the brokers allow less (transaction.max.timeout.ms): lower the option, or raise their setting"
        raise InvalidSetting("transactionTimeout", f"{options.transaction_timeout_ms}ms", rule) from error


# --- the driver ----------------------------------------------------------------------------------------------------


async def commit_batch(
    options: WriteOptions, name: str, batch: int, messages: Sequence[WrittenInTransaction], world: World | None = None
) -> None:
    """Commit the rows of a batch whose tasks have all ended, or finish the commit of an earlier driver. Afterwards
    `read_committed` readers see them; if a partition stays without leader, they do later, and a warning is logged.
    Raises MinibrokerError if the batch is not committed, or only in part; Spark then repeats it."""
    reported = [message.prepared for message in messages if message.prepared is not None]
    async with _driver(options, name, world) as driver, _deciding(options, name, world) as producer:
        known = await driver.record()
        attempts = {message.place.task: message.place.attempt for message in messages}
        plan = plan_commit(known, name, batch, attempts, reported)
        codes: dict[int, ErrorCode] = {}
        if plan.record is not None:
            if plan.fresh:
                await driver.check_open(batch, plan.fresh)
                await _write_record(producer, name, plan.record)
            codes = await driver.end(plan.record.prepared, committed=True)
        await driver.end(plan.needless, committed=False)
        await driver.fence(plan.failed)
        await driver.wait_for_markers([*(plan.record.prepared if plan.record else ()), *plan.needless])
        if plan.record is None:
            return
        incomplete = after_commits(plan.record, name, codes)
        if incomplete is not None:
            await _write_record(producer, name, incomplete)
            raise MinibrokerError(
                f"batch {batch} of {name} is committed, except for the rows of "
                f"{counted(len(incomplete.again), 'task')}: their transactions were open for longer than "
                f"transactionTimeout={options.transaction_timeout_ms}ms. Start the query again to write them"
            )


async def abort_batch(
    options: WriteOptions,
    name: str,
    batch: int,
    messages: Sequence[WrittenInTransaction],
    guard: str = "",
    world: World | None = None,
) -> None:
    """Abort the transactions of a batch that has failed, unless they are committed. `guard`: see `Place`. What cannot
    be aborted now is aborted by its time-out."""
    reported = [message.prepared for message in messages if message.prepared is not None]
    try:
        async with _driver(options, name, world, FIRST_CONTACT_PATIENCE_S) as driver:
            async with _deciding(options, name, world):
                known = await driver.record()
                await driver.end(undecided(known, batch, reported), committed=False)
            if guard:  # before the tasks are listed: the later ones find it
                await fence(driver.coordinators, guard, PATIENCE_S)
                await driver.fence(unreported(known, batch, name, await driver.open_ids()))
    except NetworkError as error:
        logger.warning("transactions of %s stay open until they time out: %s", name, error)


@asynccontextmanager
async def _deciding(options: WriteOptions, name: str, world: World | None) -> AsyncIterator[Producer]:
    """The driver's producer. Every earlier driver is fenced, and its record is there or will never be."""
    async with Producer(
        options.bootstrap, client_id=WRITER_CLIENT_ID, transactional_id=name, world=world, **options.security
    ) as producer:
        yield producer


async def _write_record(producer: Producer, name: str, record: BatchRecord) -> None:
    offsets = {
        partition: OffsetAndMetadata(record.batch, metadata=chunk)
        for partition, chunk in zip(_RECORD, to_chunks(record), strict=False)
    }
    async with producer.transaction() as transaction:
        await transaction.send_offsets(offsets, GroupMetadata(name))


@asynccontextmanager
async def _driver(
    options: WriteOptions, name: str, world: World | None, patience_s: float = PATIENCE_S
) -> AsyncIterator[_Driver]:
    runtime = new_cluster(options.bootstrap, WRITER_CLIENT_ID, world, options.security)
    await connect(runtime, patience_s)
    try:
        yield _Driver(options, name, AdminRequests(runtime, patience_s))
    finally:
        await runtime.close()


class _Driver:
    def __init__(self, options: WriteOptions, name: str, requests: AdminRequests) -> None:
        self._options = options
        self._name = name
        self._requests = requests
        self._commits = Commits(requests.runtime, requests.coordinators, name)
        self.coordinators = requests.transaction_coordinators

    async def record(self) -> BatchRecord | None:
        """Return the latest record, after the end of a transaction that may write another one."""
        found = await self._commits.fetch(_RECORD, PATIENCE_S)
        if _RECORD[0] not in found:
            return None
        chunks = [found[partition].offset.metadata for partition in _RECORD if partition in found]
        return from_chunks(found[_RECORD[0]].offset.offset, chunks)

    async def check_guard(self, place: Place) -> None:
        """Check that this run of the write has not failed. A task does so when it has its transactional id: either it
        finds the guard, or `open_ids` finds the task."""
        if place.guard and await is_known(self.coordinators, place.guard, PATIENCE_S):
            raise MinibrokerError(f"task {place.task} of {self._name} began after the write had failed")

    async def open_ids(self) -> list[str]:
        """Return all transactional ids whose producers can write."""
        try:
            found = await list_transactions(self._requests, (ONGOING, EMPTY), None, None)
        except BrokersFailed as error:
            logger.warning("transactions of %s may stay open until they time out: %s", self._name, error)
            found = [each for part in error.results.values() for each in part]
        return [each.transactional_id for each in found]

    async def check_open(self, batch: int, fresh: Sequence[Prepared]) -> None:
        """Check that the transactions can be committed, since a record cannot be taken back."""
        answers = [is_open(self.coordinators, self._of(each), PATIENCE_S) for each in fresh]
        for prepared, is_there in zip(fresh, await asyncio.gather(*answers), strict=True):
            if not is_there:
                raise MinibrokerError(
                    f"batch {batch} of {self._name} is not committed: the transaction of task {prepared.task} "
                    f"was aborted, probably since the batch took longer than "
                    f"transactionTimeout={self._options.transaction_timeout_ms}ms. Raise that option, or make batches "
                    "smaller (maxOffsetsPerTrigger)"
                )

    async def end(self, prepared: Sequence[Prepared], *, committed: bool) -> dict[int, ErrorCode]:
        """End transactions, and return the answers by task. Every one is tried before an error is raised."""
        ends = [
            end_prepared(self.coordinators, self._of(each), committed=committed, timeout_s=PATIENCE_S)
            for each in prepared
        ]
        answers = await asyncio.gather(*ends, return_exceptions=True)
        codes = {}
        for each, answer in zip(prepared, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            codes[each.task] = answer
        return codes

    async def wait_for_markers(self, ended: Iterable[Prepared]) -> None:
        """An outcome that is decided is not an error if it is visible later."""
        waits = [wait_for_markers(self.coordinators, self._of(each).transactional_id, PATIENCE_S) for each in ended]
        for answer in await asyncio.gather(*waits, return_exceptions=True):
            if isinstance(answer, MinibrokerError):
                logger.warning("%s has ended, but readers do not see all of it yet: %s", self._name, answer)
            elif answer is not None:
                raise answer

    async def fence(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Abort the transactions of attempts that died, since readers would wait for their time-out."""
        for task, attempt in attempts:
            await fence(self.coordinators, transactional_id(self._name, task, attempt), PATIENCE_S)

    def _of(self, prepared: Prepared) -> PreparedTransaction:
        name = transactional_id(self._name, prepared.task, prepared.attempt)
        return PreparedTransaction(name, prepared.producer_id, prepared.producer_epoch)

"""The records of a range of offsets, fetched from the leader by a task, as Arrow batches.

A reader has an event loop of its own, which runs during calls to the reader and sleeps while Spark processes their
results. It needs no thread: the next fetch is sent before a batch is returned, the broker answers it in the meantime,
and the operating system keeps the answer. A thread would compete for the interpreter with the decoding that it should
overlap with.

Rejected: `minibroker.client.Consumer`, which restarts at the beginning when a topic is created again, and returns
neither topic ids nor types of timestamps. Its parts are used.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.metadata import Leader, is_denied
from minibroker.client.cluster.offsets import CONSUMER
from minibroker.client.errors import CorruptBatch
from minibroker.client.fetching.fetcher import DOUBTS_OF_BROKERS, UNKNOWN_TOPIC_PATIENCE_S
from minibroker.client.security import Security
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FETCH
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.model import NO_EPOCH
from minibroker.protocol.records import (
    LIMIT,
    NO_LEADER_EPOCH,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    BatchFilter,
    BatchSlice,
    CorruptRecord,
    DecodedBatch,
    decode_batch,
    placed_batches,
    validate_batch,
)
from minibroker.protocol.world import World
from minibroker.spark_jobs.source.arrow import BatchBuilder
from minibroker.spark_jobs.source.connecting import PATIENCE_S, connect, new_cluster
from minibroker.spark_jobs.source.offsets import OffsetRange, loss_error

logger = logging.getLogger(__name__)

FETCH_BYTES = 4 * 1024 * 1024


class ReadSettings(NamedTuple):
    """The settings of a task, beside its range."""

    bootstrap: str
    client_id: str
    include_headers: bool
    fail_on_data_loss: bool
    fail_on_timestamp: bool = True
    isolation_level: int = READ_UNCOMMITTED
    security: Security | None = None


def read_range(
    settings: ReadSettings,
    wanted: OffsetRange,
    schema: pyarrow.Schema,
    *,
    patience_s: float = PATIENCE_S,
    world: World | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield all records of a range in order, as batches of at least MIN_ROWS rows except for the last. With
    READ_COMMITTED, the range ends at or below the last stable offset, and records of aborted transactions are left out.

    Waits for leaders that move or are missing, each time up to `patience_s`. Raises DataLost if records are gone
    (without `fail_on_data_loss` the remaining ones are read), CorruptBatch, BrokerError, NetworkError, and
    MinibrokerError for a timestamp beyond Spark's range (without `fail_on_timestamp` it becomes null).
    """
    builder = BatchBuilder(wanted, schema, settings.include_headers, settings.fail_on_timestamp)
    with asyncio.Runner() as runner:
        fetcher = RangeFetcher(settings, wanted, patience_s, world)
        try:
            runner.run(fetcher.start())
            while (fetched := runner.run(fetcher.next())) is not None:
                first_offset, batches = fetched
                for decoded in batches:
                    for part in decoded.parts(bisect_left(decoded.offsets, first_offset)):
                        builder.add(part, first_offset)
                        if builder.is_full:
                            yield builder.build()
            if builder.rows:
                yield builder.build()
        finally:
            runner.run(fetcher.close())


class RangeFetcher:
    """Fetches one range, one response ahead of its consumer."""

    def __init__(self, settings: ReadSettings, wanted: OffsetRange, patience_s: float, world: World | None) -> None:
        self._range = wanted
        self._partition = wanted.topic_partition
        self._fails_on_loss = settings.fail_on_data_loss
        self._isolation_level = settings.isolation_level
        self._patience_s = patience_s
        self._cluster = new_cluster(settings.bootstrap, settings.client_id, world, settings.security)
        self._position = wanted.start
        self._last_epoch = NO_EPOCH
        self._leader: Leader | None = None
        """The leader that was asked last."""
        self._suspicion: CorruptBatch | None = None
        """The error of the last fetched bytes, until the leader has checked its log."""
        self._next: asyncio.Task[m.FetchPartitionResponse | None] | None = None

    async def start(self) -> None:
        self._cluster.metadata.want(self._range.topic)
        await connect(self._cluster, self._patience_s)

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._cluster.close()

    async def next(self) -> tuple[int, Iterator[DecodedBatch]] | None:
        """Return an offset and the next batches, decoded during iteration; None at the end of the range. Brokers return
        whole batches: records before the offset do not belong to the range."""
        while True:
            task, self._next = self._next, None
            answer = await (self._fetched() if task is None else task)
            if answer is None:
                return None
            latest = NO_LEADER_EPOCH if self._leader is None else self._leader.epoch
            batches, trouble = placed_batches(answer.records, self._position, LIMIT, latest, self._last_epoch)
            if batches:  # those before the trouble are intact, and the next request begins at the trouble
                self._suspicion = None
                break
            if self._suspicion is not None:
                raise self._suspicion
            # First the leader checks its log, and another broker may lead afterwards.
            self._suspicion = self._corrupt(self._position, trouble)
        first_offset = self._position
        # If compaction has removed a batch's last records, the next batch begins later than one after its last record:
        # a range ends when that offset is reached, not at a record.
        self._position = batches[-1].header.next_offset
        self._last_epoch = batches[-1].header.partition_leader_epoch
        if self._position < self._range.end:
            self._next = asyncio.create_task(self._fetched())
            await asyncio.sleep(0)  # the task sends its request before this batch is decoded
        return first_offset, self._decoded(answer, batches)

    def _decoded(self, answer: m.FetchPartitionResponse, batches: list[BatchSlice]) -> Iterator[DecodedBatch]:
        hidden = BatchFilter(answer.aborted_transactions)
        for header, start, _ in batches:
            if header.base_offset >= self._range.end:
                return
            try:
                if hidden.hides(header):
                    validate_batch(answer.records, header, start)
                else:
                    yield decode_batch(answer.records, header, start)
            except CorruptRecord as error:
                raise self._corrupt(header.base_offset, error, header.next_offset) from error

    def _corrupt(self, offset: int, error: CorruptRecord | None, next_offset: int | None = None) -> CorruptBatch:
        topic, partition = self._partition
        after = (
            "" if next_offset is None else f' (offset {next_offset}: {{"{topic}": {{"{partition}": {next_offset}}}}})'
        )
        return CorruptBatch(
            self._partition,
            f"at or after offset {offset}: {error}",
            f"Begin after it with startingOffsets{after}, or end before it with endingOffsets",
            next_offset,
        )

    async def _fetched(self) -> m.FetchPartitionResponse | None:
        """Return an answer with batches at the position; None if there will be none before the end of the range."""
        began = self._cluster.clock.monotonic()
        while self._position < self._range.end:
            code, answer, problem = await self._attempt()
            now = self._cluster.clock.monotonic()
            patience_s = self._patience_s
            asks_everyone = False
            if code is ErrorCode.NONE and answer is not None:
                if answer.records:
                    return answer
                if answer.diverging_epoch is not None and await self._leads():
                    end = answer.diverging_epoch.end_offset
                    self._lose(f"the log was cut at offset {end} in an unclean election")
                    return None
                end_name, end = "high watermark", answer.high_watermark
                if self._isolation_level == READ_COMMITTED:
                    end_name, end = "last stable offset", answer.last_stable_offset
                problem = MinibrokerError(
                    f"{self._partition}: records {self._position} to {self._range.end} were readable but no longer "
                    f"are: the {end_name} is {end}. A new leader may still be catching up: see "
                    "`minibroker status`"
                )
                asks_everyone = True
            elif code is ErrorCode.CORRUPT_MESSAGE and self._suspicion is not None:
                raise self._suspicion  # no other broker can lead
            elif code is ErrorCode.OFFSET_OUT_OF_RANGE and answer is not None:
                if await self._leads():
                    self._skip(answer)
                    continue
            elif code in (
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                ErrorCode.UNKNOWN_TOPIC_ID,
                ErrorCode.INCONSISTENT_TOPIC_ID,
            ):
                info = self._cluster.metadata.cluster.topics.get(self._range.topic)
                is_another = info is not None and info.topic_id != self._range.topic_id
                if (is_another or now >= began + min(patience_s, UNKNOWN_TOPIC_PATIENCE_S)) and await self._is_gone():
                    self._lose(
                        f"topic {self._range.topic} was deleted and created again: its id was "
                        f"{self._range.topic_id}, and is {info.topic_id}"
                        if info is not None and is_another
                        else f"topic {self._range.topic} is gone"
                    )
                    return None
            elif code in DOUBTS_OF_BROKERS:
                asks_everyone = True
            elif code is not ErrorCode.NETWORK_EXCEPTION and not ERRORS[code].retriable:
                raise problem
            if now >= began + patience_s:
                raise problem
            if asks_everyone:
                await self._cluster.metadata.ask_everyone([self._range.topic])
            await self._pause(refreshing=code is not ErrorCode.NONE)
        return None

    async def _leads(self) -> bool:
        """Return whether another broker confirms the leader asked last, so that records are really gone (see
        `minibroker.client.cluster.metadata.is_confirmed`)."""
        leader = self._leader
        return leader is not None and bool(await self._cluster.metadata.confirmed({self._partition: leader}))

    async def _is_gone(self) -> bool:
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone([self._range.topic])
        return is_denied(metadata.cluster, self._range.topic, self._range.topic_id, answers)

    async def _pause(self, *, refreshing: bool) -> None:
        if refreshing:
            try:
                async with asyncio.timeout(self._cluster.retry_backoff_s):
                    await self._cluster.metadata.refreshed()
            except TimeoutError:
                return
        await asyncio.sleep(self._cluster.retry_backoff_s / 4)

    async def _attempt(self) -> tuple[ErrorCode, m.FetchPartitionResponse | None, MinibrokerError]:
        """Send one fetch and return its error code, its answer and its error."""
        what = f"reading {self._partition} at offset {self._position}"
        topic, index = self._partition
        leader = self._cluster.metadata.cluster.leader(topic, index)
        address = None if leader is None else self._cluster.metadata.address(leader.node_id)
        if leader is None or address is None:
            code = self._cluster.metadata.cluster.errors.get(topic, ErrorCode.LEADER_NOT_AVAILABLE)
            return code, None, BrokerError(code, what)
        least = max(self._range.leader_epoch, self._last_epoch)
        info = self._cluster.metadata.cluster.topics[topic]
        if leader.epoch < least and info.topic_id == self._range.topic_id:
            code = ErrorCode.UNKNOWN_LEADER_EPOCH  # this leader was deposed
            return code, None, BrokerError(code, f"{what}: brokers know leader epoch {leader.epoch}, but not {least}")
        self._leader = leader
        request = m.FetchRequest(
            CONSUMER,
            500,
            1,
            FETCH_BYTES,
            self._isolation_level,
            [
                m.FetchTopic(
                    topic,
                    self._range.topic_id,
                    [
                        m.FetchPartition(
                            index,
                            leader.epoch,
                            self._position,
                            self._last_epoch,
                            -1,
                            FETCH_BYTES,
                            suspect=self._suspicion is not None,
                        )
                    ],
                )
            ],
        )
        try:
            connection = await self._cluster.connections.open(address, Purpose.FETCH)
            response = await self._cluster.ask(
                connection,
                FETCH,
                request,
                timeout_s=self._cluster.request_timeout_s,
                is_in_charge=lambda: self._cluster.metadata.cluster.leader(topic, index) == leader,
            )
        except (NetworkError, InvalidMessage) as error:
            self._cluster.metadata.suspect(address)
            return ErrorCode.NETWORK_EXCEPTION, None, error
        except BrokerError as error:
            return error.code, None, error
        answer = next((p for t in response.responses for p in t.partitions if p.partition_index == index), None)
        code = error_of(response.error_code if answer is None else answer.error_code)
        if answer is None and code is ErrorCode.NONE:
            code = ErrorCode.NETWORK_EXCEPTION
        return code, answer, BrokerError(code, what)

    def _skip(self, answer: m.FetchPartitionResponse) -> None:
        """Move past offsets that are not in the log any more."""
        start, end = answer.log_start_offset, answer.high_watermark
        if self._position < start:
            upto = min(start, self._range.end)
            self._lose(f"offsets {self._position} to {upto} are gone: the log begins at {start}")
            self._position = upto
        else:
            self._lose(f"offsets {self._position} to {self._range.end} are gone: the log ends at {end}")
            self._position = self._range.end

    def _lose(self, problem: str) -> None:
        problem = f"{self._partition}: {problem}"
        if self._fails_on_loss:
            raise loss_error([problem])
        logger.warning("%s (failOnDataLoss=false: going on without)", problem)

"""The log as blocking calls, for Spark's Python workers: which partitions there are, offsets, and records as Arrow.

Spark calls a data source from threads that know nothing of asyncio, so each reader has an event loop of its own, which
runs while it is called and sleeps while Spark is busy with what it got. It needs no thread: the next fetch leaves
before a batch is handed out, the broker answers it in the meantime, and the operating system keeps the answer. A
thread would fight for the interpreter with the decoding that it is meant to overlap with.

Not `minibroker.client.Consumer`: it knows where to go on when a topic is created again (at the beginning), which is
wrong here; and it hands out neither topic ids nor kinds of timestamps. What it is made of (`Cluster`, `find_offsets`)
is used.

What is read becomes columns in three steps, none of which looks at a single record: a batch is decoded into lists
(`minibroker.protocol.records`), lists are joined until there are MIN_ROWS rows, each joined list becomes one Arrow
array. Small batches are joined because an array costs some 20 us however short it is: with ten records each that was 40
times as much as the rest.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute

from minibroker.client.cluster import Cluster
from minibroker.client.connections import Purpose
from minibroker.client.errors import CorruptBatch
from minibroker.client.fetcher import DOUBTS_OF_BROKERS
from minibroker.client.metadata import Leader, is_confirmed, is_denied
from minibroker.client.offsets import CONSUMER, READ_UNCOMMITTED, Found, Known, OffsetAndTimestamp, find_offsets
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FETCH, METADATA
from minibroker.protocol.compression import Compression
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import BatchSlice, CorruptRecord, DecodedBatch, decode_batch, iterate_batches
from minibroker.protocol.world import World
from minibroker.spark_jobs.offsets import (
    OffsetRange,
    Offsets,
    TopicOffsets,
    by_partition,
    epochs_of,
    grouped,
    loss_error,
)
from minibroker.spark_jobs.options import EARLIEST, LATEST, Bound, ReadOptions, Subscription

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""How long a leader may be missing: an exception in a task costs an attempt, one on the driver the query."""
FIRST_CONTACT_PATIENCE_S = 15.0
"""How long the driver tries to reach any broker at the start of a query: a mistyped address takes that long."""
UNKNOWN_TOPIC_PATIENCE_S = 10.0
"""How long brokers may say that a topic does not exist."""

MIN_ROWS = 10_000
ENOUGH_BYTES = 32 * 1024 * 1024
"""Rows are joined up to the first of the two. (Arrow's offsets into a column of bytes have 32 bits.)"""
FETCH_BYTES = 4 * 1024 * 1024

_MICROSECONDS = pyarrow.scalar(1_000, pyarrow.int64())
"""Of a millisecond. (Arrow takes longer to see what kind of number a Python int is than to multiply 10,000 by it.)"""

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class Topics(NamedTuple):
    """The partitions that a subscription means now."""

    ids: Mapping[str, str]
    partitions: tuple[TopicPartition, ...]


class LookUps:
    """What there is, and how far it goes. Waits for brokers and leaders up to `patience_s`, and then raises
    NetworkError or BrokerError.

    What is known from before (a topic, an offset) is not given up because one broker says so: it may have been cut off
    from the others for long, and who can reach it alone would lose records that all others have. Another broker must
    say so too, and is waited for (`minibroker.client.metadata.is_denied`, `is_confirmed`).
    """

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._missing: frozenset[str] = frozenset()
        """What was waited for in vain."""
        self._wanted: set[str] = set()

    def _now(self) -> float:
        return self._cluster.clock.monotonic()

    async def topics(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> Topics:
        """What there is of what is subscribed to, which has all topics of `since` unless they are known to be gone.

        Raises BrokerError where a topic or partition that is named does not exist, unless `is_lenient`: then it is left
        out with a warning. A pattern may match nothing.
        """
        names = sorted({*subscription.topics, *(partition.topic for partition in subscription.partitions)}) or None
        metadata = self._cluster.metadata
        began = self._now()
        while True:
            response = await metadata.request_any(METADATA, m.MetadataRequest(names), timeout_s=self._patience_s)
            problems = _problems(subscription, response)
            missing = frozenset(problems) if all(map(_is_unknown, problems.values())) else frozenset()
            if is_lenient and missing and missing <= self._missing:
                break
            problem = next(iter(problems.values()), None) or await self._hidden(subscription, response, since)
            if problem is None:
                break
            if not problem.retriable or self._now() >= began + self._patience_s:
                raise problem
            if missing and self._now() >= began + UNKNOWN_TOPIC_PATIENCE_S and await self._are_denied(response):
                if not is_lenient:
                    raise problem
                logger.warning("%s (failOnDataLoss=false: going on without)", "; ".join(map(str, problems.values())))
                break
            await asyncio.sleep(self._cluster.retry_backoff_s)
        self._missing = missing
        wanted = [topic for topic in response.topics if topic.partitions and _is_wanted(subscription, topic)]
        for topic in self._wanted - {topic.name for topic in wanted}:
            metadata.unwant(topic)
        return Topics(
            {topic.name: topic.topic_id for topic in wanted},
            tuple(
                sorted(
                    partition
                    for topic in wanted
                    for entry in topic.partitions
                    if subscription.wants(partition := TopicPartition(topic.name, entry.partition_index))
                )
            ),
        )

    async def _are_denied(self, response: m.MetadataResponse) -> bool:
        """Other brokers know no more of the topics that `response` does not know."""
        unknown = [topic.name for topic in response.topics if not topic.partitions]
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone(unknown)
        return all(is_denied(metadata.picture, topic, None, answers) for topic in unknown)

    async def _hidden(
        self, subscription: Subscription, response: m.MetadataResponse, since: Offsets | None
    ) -> BrokerError | None:
        """A topic of `since` that `response` lacks, or has under another id, and that may be there all the same."""
        there = {topic.name: topic.topic_id for topic in response.topics if topic.partitions}
        lacking = {
            topic: entry.topic_id
            for topic, entry in (since or {}).items()
            if subscription.wants_topic(topic) and there.get(topic) != entry.topic_id and topic not in self._missing
        }
        if not lacking:
            return None
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone(lacking)
        for topic, topic_id in lacking.items():
            if not is_denied(metadata.picture, topic, topic_id, answers):
                return BrokerError(ErrorCode.UNKNOWN_TOPIC_ID, f"topic {topic} with id {topic_id}")
        return None

    async def offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, Found]:
        """By time, EARLIEST or LATEST (the high watermark), from leaders that are not older than `known`."""
        found: dict[TopicPartition, Found] = {}
        for partition in timestamps:
            self._wanted.add(partition.topic)
            self._cluster.metadata.want(partition.topic)
        deadline = self._now() + self._patience_s
        was_unknown = False
        while True:
            missing = {partition: what for partition, what in timestamps.items() if partition not in found}
            try:
                await find_offsets(
                    self._cluster, missing, min(UNKNOWN_TOPIC_PATIENCE_S, self._patience_s), found, known
                )
                return found
            except (NetworkError, BrokerError) as error:
                # The last one of many: a broker that has just started may say so of any topic. Twice is no accident.
                is_unknown = isinstance(error, BrokerError) and _is_unknown(error)
                is_final = isinstance(error, BrokerError) and not error.retriable
                if is_final or (is_unknown and was_unknown) or self._now() >= deadline:
                    raise
                was_unknown = is_unknown

    async def ends(
        self, known: Mapping[TopicPartition, Known], at_least: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Found]:
        """The ends of the logs (the high watermarks), from leaders that are not older than `known`. One that is below
        `at_least`, where that was known before, can be believed."""
        deadline = self._now() + self._patience_s
        while True:
            found = await self.offsets(dict.fromkeys(known, LATEST), known)
            low = [partition for partition, least in at_least.items() if _offset(found[partition]) < least]
            doubtful = await self._doubtful({partition: found[partition].leader_epoch for partition in low})
            if not doubtful:
                return found
            if self._now() >= deadline:
                first = doubtful[0]
                raise NetworkError(
                    f"{first} ends at offset {_offset(found[first])}, says its leader of epoch "
                    f"{found[first].leader_epoch}, and was known to reach to {at_least[first]}; no other broker that "
                    "could tell whether it leads still was reached. See `minibroker status`, and whether this machine "
                    "reaches all brokers"
                )
            await asyncio.sleep(self._cluster.retry_backoff_s)

    async def _doubtful(self, epochs: Mapping[TopicPartition, int]) -> list[TopicPartition]:
        """Of partitions whose leaders of these epochs deny what was known: those whose leaders are not believed."""
        if not epochs:
            return []
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone({partition.topic for partition in epochs})
        doubtful = []
        for partition, epoch in epochs.items():
            leader = metadata.picture.leader(*partition)
            is_same = leader is not None and leader.epoch == epoch
            if leader is None or not is_same or not is_confirmed(metadata.picture, partition, leader, answers):
                doubtful.append(partition)
        return doubtful

    async def latest(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> dict[str, TopicOffsets]:
        """As `latest_offsets`."""
        deadline = self._now() + self._patience_s
        while True:
            topics = await self.topics(subscription, is_lenient=is_lenient, since=since)
            same = {topic: entry for topic, entry in (since or {}).items() if topics.ids.get(topic) == entry.topic_id}
            epochs, offsets = epochs_of(same), by_partition(same)
            known = {
                partition: Known(topics.ids[partition.topic], epochs.get(partition, NO_EPOCH))
                for partition in topics.partitions
            }
            try:
                found = await self.ends(
                    known, {partition: offsets[partition] for partition in known if partition in offsets}
                )
            except BrokerError as error:
                # Deleted between the two questions, or created again.
                is_gone = is_lenient and _is_unknown(error)
                is_another = error.code is ErrorCode.UNKNOWN_TOPIC_ID and self._now() < deadline
                if not is_gone and not is_another:
                    raise
                continue
            return grouped(
                topics.ids,
                {partition: _offset(end) for partition, end in found.items()},
                {partition: end.leader_epoch for partition, end in found.items()},
            )


class LogClient:
    """`LookUps` as blocking calls, which raise as they do. `close` it, or use it in `with`."""

    def __init__(
        self, bootstrap: str, client_id: str, *, patience_s: float = PATIENCE_S, world: World | None = None
    ) -> None:
        self._runner = asyncio.Runner()
        try:
            self._cluster = _cluster(bootstrap, client_id, world)
            self._look_ups = LookUps(self._cluster, patience_s)
            self._runner.run(_started(self._cluster, min(patience_s, FIRST_CONTACT_PATIENCE_S)))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> LogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._runner.run(self._cluster.close())
        finally:
            self._runner.close()

    def monotonic(self) -> float:
        return self._cluster.clock.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep, with the event loop running."""
        self._runner.run(asyncio.sleep(seconds))

    def topics(self, subscription: Subscription, *, is_lenient: bool = False) -> Topics:
        """See `LookUps.topics`."""
        return self._runner.run(self._look_ups.topics(subscription, is_lenient=is_lenient))

    def offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """By time, EARLIEST or LATEST (the high watermark); None: no record is as young."""
        found = self._runner.run(self._look_ups.offsets(timestamps, known)) if timestamps else {}
        return {partition: answer.result for partition, answer in found.items()}

    def known_offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, int]:
        """As `offsets`, for EARLIEST and LATEST, which every partition has."""
        return {
            partition: 0 if found is None else found.offset
            for partition, found in self.offsets(timestamps, known).items()
        }

    def ends(
        self, known: Mapping[TopicPartition, Known], at_least: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """See `LookUps.ends`."""
        found = self._runner.run(self._look_ups.ends(known, at_least)) if known else {}
        return {partition: _offset(end) for partition, end in found.items()}

    def latest(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> dict[str, TopicOffsets]:
        """See `latest_offsets`."""
        return self._runner.run(self._look_ups.latest(subscription, is_lenient=is_lenient, since=since))

    def leader_epochs(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Of the leaders that are known by now: they lead, or have led."""
        leaders = {partition: self._cluster.metadata.picture.leader(*partition) for partition in partitions}
        return {partition: NO_EPOCH if leader is None else leader.epoch for partition, leader in leaders.items()}


def _offset(found: Found) -> int:
    return 0 if found.result is None else found.result.offset


def _problems(subscription: Subscription, response: m.MetadataResponse) -> dict[str, BrokerError]:
    """By what was asked for and is not there."""
    if not response.brokers:
        # It has just started, and nobody has told it yet what there is.
        return {"": BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, "a broker that knows of no broker")}
    there = {topic.name: topic for topic in response.topics}
    problems: dict[str, BrokerError] = {}
    for name in subscription.topics:
        topic = there.get(name)
        if topic is None or not topic.partitions:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else error_of(topic.error_code)
            problems[name] = BrokerError(code or ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name}")
    for partition in subscription.partitions:
        topic = there.get(partition.topic)
        indexes = [] if topic is None else sorted(entry.partition_index for entry in topic.partitions)
        if partition.partition not in indexes:
            has = f"the topic has {len(indexes)} partitions" if indexes else "there is no such topic"
            problems[str(partition)] = BrokerError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {partition}; {has}"
            )
    return problems


def _is_unknown(error: BrokerError) -> bool:
    return error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _is_wanted(subscription: Subscription, topic: m.MetadataTopic) -> bool:
    return subscription.wants_topic(topic.name) and (subscription.pattern is None or not topic.is_internal)


def _cluster(bootstrap: str, client_id: str, world: World | None) -> Cluster:
    def crashed(error: BaseException) -> None:
        logger.error("a background task of %s ended: %r", client_id, error)

    return Cluster(
        bootstrap,
        client_id=client_id,
        request_timeout_ms=30_000,
        retry_backoff_ms=100,
        metadata_max_age_ms=300_000,
        world=world,
        on_crash=crashed,
    )


async def _started(cluster: Cluster, patience_s: float) -> None:
    """`cluster.start()`, which gives up after 2 s: who is started while brokers change places needs more patience."""
    deadline = cluster.clock.monotonic() + patience_s
    while True:
        try:
            await cluster.start()
            return
        except NetworkError:
            if cluster.clock.monotonic() >= deadline:
                await cluster.close()
                raise


# --- where to begin and to end --------------------------------------------------------------------------------


def resolve(client: LogClient, topics: Topics, bound: Bound, *, name: str) -> dict[TopicPartition, int]:
    """What a bound means for each partition now. `name`: "starting" or "ending", for errors.

    Raises MinibrokerError: a partition named that is not read, an offset that the log does not hold, a topic that was
    created again, no record as young as a timestamp.
    """
    for topic, topic_id in bound.topic_ids.items():
        if topic in topics.ids and topics.ids[topic] != topic_id:
            raise MinibrokerError(
                f"{name}Offsets are of topic {topic} with id {topic_id}, and the topic of that name has id "
                f"{topics.ids[topic]} now: it was deleted and created again. Take new offsets"
            )
    for partition in bound.named():
        if partition not in topics.partitions:
            raise BrokerError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{name}Offsets name {partition}, which is not among what is read: "
                f"{', '.join(str(partition) for partition in topics.partitions) or 'nothing'}. "
                "Name partitions that exist and are subscribed to",
                is_complete=True,
            )
    asked: dict[TopicPartition, int] = {}
    for partition in topics.partitions:
        timestamp = bound.timestamp_of(partition)
        asked[partition] = bound.offset_of(partition) if timestamp is None else timestamp
    known = {partition: Known(topics.ids[partition.topic]) for partition in topics.partitions}
    explicit = [partition for partition in topics.partitions if _is_explicit(bound, partition)]
    found = client.offsets({partition: what for partition, what in asked.items() if partition not in explicit}, known)
    unmatched = [partition for partition, result in found.items() if result is None]
    if unmatched and not bound.unmatched_is_latest:
        first = unmatched[0]
        raise MinibrokerError(
            f"{first} has no record at or after the {name} timestamp {asked[first]}: give an earlier one, or set "
            f"{name}OffsetsByTimestampStrategy=latest to begin at the end"
        )
    ends = client.ends(
        {partition: known[partition] for partition in [*unmatched, *explicit]},
        {partition: asked[partition] for partition in explicit},
    )
    starts = client.known_offsets(dict.fromkeys(explicit, EARLIEST), known)
    offsets: dict[TopicPartition, int] = {}
    for partition in topics.partitions:
        result = found.get(partition)
        if partition in explicit:
            offsets[partition] = asked[partition]
            if not starts[partition] <= asked[partition] <= ends[partition]:
                raise BrokerError(
                    ErrorCode.OFFSET_OUT_OF_RANGE,
                    f"{name}Offsets say {asked[partition]} for {partition}, whose log holds {starts[partition]} to "
                    f"{ends[partition]}: name an offset in between, or -2 for the earliest and -1 for the latest",
                    is_complete=True,
                )
        else:
            offsets[partition] = ends[partition] if result is None else result.offset
    return offsets


def _is_explicit(bound: Bound, partition: TopicPartition) -> bool:
    return bound.timestamp_of(partition) is None and bound.offset_of(partition) >= 0


def starting_offsets(client: LogClient, options: ReadOptions) -> dict[str, TopicOffsets]:
    """Where a query with these options begins if it begins now. Raises as `resolve`."""
    topics = client.topics(options.subscription)
    return grouped(topics.ids, resolve(client, topics, options.starting, name="starting"))


def latest_offsets(
    client: LogClient, options: ReadOptions, *, is_lenient: bool = False, since: Offsets | None = None
) -> dict[str, TopicOffsets]:
    """The ends of the logs (the high watermarks) of all that is subscribed to; `is_lenient`: of what there is of it.

    `since`: where the caller is. A topic that is there then is left out, or has another id, or ends before it, only
    where that is certain. As long as it is not, this waits; then it raises NetworkError or BrokerError.
    """
    return client.latest(options.subscription, is_lenient=is_lenient, since=since)


def earliest_offsets(
    client: LogClient, options: ReadOptions, partitions: Collection[TopicPartition], *, is_lenient: bool
) -> dict[TopicPartition, int]:
    """The beginnings of logs; `is_lenient`: of those that there are."""
    asked = list(partitions)
    while True:
        try:
            return client.known_offsets(dict.fromkeys(asked, EARLIEST))
        except BrokerError as error:
            if not is_lenient or not _is_unknown(error):
                raise
        there = client.topics(options.subscription, is_lenient=True).partitions
        asked = [partition for partition in asked if partition in there]


# --- records ---------------------------------------------------------------------------------------------------


class ReadSettings(NamedTuple):
    """What a task needs beside its range."""

    bootstrap: str
    client_id: str
    include_headers: bool
    fail_on_data_loss: bool

    @classmethod
    def of(cls, options: ReadOptions) -> ReadSettings:
        return cls(options.bootstrap, options.client_id, options.include_headers, options.fail_on_data_loss)


def read_range(
    settings: ReadSettings,
    wanted: OffsetRange,
    schema: pyarrow.Schema,
    *,
    patience_s: float = PATIENCE_S,
    world: World | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """All records of a range in order, as batches of at least MIN_ROWS rows (but the last).

    Leaders that move or are missing are waited for, each time up to `patience_s`. Raises DataLost where records are
    gone (unless `fail_on_data_loss` is off, which reads what is left), CorruptBatch, BrokerError, NetworkError.
    """
    builder = BatchBuilder(wanted, schema, settings.include_headers)
    with asyncio.Runner() as runner:
        fetcher = RangeFetcher(settings, wanted, patience_s, world)
        try:
            runner.run(fetcher.start())
            while (fetched := runner.run(fetcher.next())) is not None:
                first_offset, batches = fetched
                for decoded in batches:
                    builder.add(decoded, first_offset)
                    if builder.is_full:
                        yield builder.build()
            if builder.rows:
                yield builder.build()
        finally:
            runner.run(fetcher.close())


class RangeFetcher:
    """Fetches one range, one response ahead of who consumes it."""

    def __init__(self, settings: ReadSettings, wanted: OffsetRange, patience_s: float, world: World | None) -> None:
        self._range = wanted
        self._partition = wanted.topic_partition
        self._fails_on_loss = settings.fail_on_data_loss
        self._patience_s = patience_s
        self._cluster = _cluster(settings.bootstrap, settings.client_id, world)
        self._position = wanted.start
        self._last_epoch = NO_EPOCH
        self._leader: Leader | None = None
        """Who was asked last."""
        self._next: asyncio.Task[memoryview | None] | None = None

    async def start(self) -> None:
        self._cluster.metadata.want(self._range.topic)
        await _started(self._cluster, self._patience_s)

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._cluster.close()

    async def next(self) -> tuple[int, Iterator[DecodedBatch]] | None:
        """The next batches, decoded as they are iterated over; None at the end of the range. Their records before the
        offset that comes with them are not wanted: brokers give whole batches."""
        task, self._next = self._next, None
        records = await (self._fetched() if task is None else task)
        if records is None:
            return None
        try:
            batches = [batch for batch in iterate_batches(records) if batch.header.next_offset > self._position]
        except CorruptRecord as error:
            raise self._corrupt(self._position, error) from error
        if not batches:
            raise MinibrokerError(
                f"{self._partition}: {len(records)} bytes fetched at offset {self._position} hold no whole batch"
            )
        first_offset = self._position
        # A batch says where the next one begins, which is more than its last record's offset plus one where compaction
        # has taken its last records: a range ends when that is reached, not when a record is seen.
        self._position = batches[-1].header.next_offset
        self._last_epoch = batches[-1].header.partition_leader_epoch
        if self._position < self._range.end:
            self._next = asyncio.create_task(self._fetched())
            await asyncio.sleep(0)  # it sends its request before we go to work
        return first_offset, self._decoded(records, batches)

    def _decoded(self, records: memoryview, batches: list[BatchSlice]) -> Iterator[DecodedBatch]:
        for header, start, _ in batches:
            if header.is_control or header.base_offset >= self._range.end:
                continue
            try:
                yield decode_batch(records, header, start)
            except CorruptRecord as error:
                raise self._corrupt(header.base_offset, error) from error

    def _corrupt(self, offset: int, error: CorruptRecord) -> CorruptBatch:
        return CorruptBatch(
            f"{self._partition} at or after offset {offset}: {error}. "
            "Begin after it with startingOffsets, or end before it with endingOffsets"
        )

    async def _fetched(self) -> memoryview | None:
        """Batches at the position; None: there are none before the end of the range, and never will be."""
        began = self._cluster.clock.monotonic()
        while self._position < self._range.end:
            code, answer, problem = await self._attempt()
            now = self._cluster.clock.monotonic()
            patience_s = self._patience_s
            asks_everyone = False
            if code is ErrorCode.NONE and answer is not None:
                if answer.records:
                    return answer.records
                if answer.diverging_epoch is not None and await self._leads():
                    end = answer.diverging_epoch.end_offset
                    self._lose(f"the log was cut at offset {end} in an unclean election")
                    return None
                problem = MinibrokerError(
                    f"{self._partition}: records {self._position} to {self._range.end} were readable and are not: the "
                    f"high watermark is {answer.high_watermark}. A new leader may still be catching up: see "
                    "`minibroker status`"
                )
                asks_everyone = True
            elif code is ErrorCode.OFFSET_OUT_OF_RANGE and answer is not None:
                # Where a log begins a deposed leader knows as well as its successor.
                if self._position < answer.log_start_offset or await self._leads():
                    self._skip(answer)
                    continue
            elif code in (
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                ErrorCode.UNKNOWN_TOPIC_ID,
                ErrorCode.INCONSISTENT_TOPIC_ID,
            ):
                info = self._cluster.metadata.picture.topics.get(self._range.topic)
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
        """Who was asked last can be believed that records are gone (see `minibroker.client.metadata.is_confirmed`)."""
        leader = self._leader
        return leader is not None and bool(await self._cluster.metadata.confirmed({self._partition: leader}))

    async def _is_gone(self) -> bool:
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone([self._range.topic])
        return is_denied(metadata.picture, self._range.topic, self._range.topic_id, answers)

    async def _pause(self, *, refreshing: bool) -> None:
        if refreshing:
            try:
                async with asyncio.timeout(self._cluster.retry_backoff_s):
                    await self._cluster.metadata.refreshed()
            except TimeoutError:
                return
        await asyncio.sleep(self._cluster.retry_backoff_s / 4)

    async def _attempt(self) -> tuple[ErrorCode, m.FetchPartitionResponse | None, MinibrokerError]:
        """One fetch, whatever becomes of it."""
        what = f"reading {self._partition} at offset {self._position}"
        topic, index = self._partition
        leader = self._cluster.metadata.picture.leader(topic, index)
        address = None if leader is None else self._cluster.metadata.address(leader.node_id)
        if leader is None or address is None:
            code = self._cluster.metadata.picture.errors.get(topic, ErrorCode.LEADER_NOT_AVAILABLE)
            return code, None, BrokerError(code, what)
        least = max(self._range.leader_epoch, self._last_epoch)
        info = self._cluster.metadata.picture.topics[topic]
        if leader.epoch < least and info.topic_id == self._range.topic_id:
            code = ErrorCode.UNKNOWN_LEADER_EPOCH  # deposed, as another has led since
            return code, None, BrokerError(code, f"{what}: brokers know of leader epoch {leader.epoch}, not of {least}")
        self._leader = leader
        request = m.FetchRequest(
            CONSUMER,
            500,
            1,
            FETCH_BYTES,
            READ_UNCOMMITTED,
            [
                m.FetchTopic(
                    topic,
                    self._range.topic_id,
                    [m.FetchPartition(index, leader.epoch, self._position, self._last_epoch, -1, FETCH_BYTES)],
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
                is_in_charge=lambda: self._cluster.metadata.picture.leader(topic, index) == leader,
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
        """The position is not in the log (any more)."""
        start, end = answer.log_start_offset, answer.high_watermark
        if self._position < start:
            upto = min(start, self._range.end)
            self._lose(f"offsets {self._position} to {upto} are gone, the log begins at {start}")
            self._position = upto
        else:
            self._lose(f"offsets {self._position} to {self._range.end} are gone, the log ends at {end}")
            self._position = self._range.end

    def _lose(self, problem: str) -> None:
        problem = f"{self._partition}: {problem}"
        if self._fails_on_loss:
            raise loss_error([problem])
        logger.warning("%s (failOnDataLoss=false: going on without)", problem)


class BatchBuilder:
    """Joins decoded batches, and makes Arrow batches of them."""

    def __init__(self, wanted: OffsetRange, schema: pyarrow.Schema, include_headers: bool) -> None:
        self._range = wanted
        self._schema = schema
        self._include_headers = include_headers
        self._constants: list[pyarrow.Array] = []
        """topic and partition, of as many rows as were ever needed."""
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._bytes = 0
        self._keys: list[bytes | None] = []
        """Shorter than the values where the last ones are null."""
        self._values: list[bytes | None] = []
        self._offsets: list[pyarrow.Array] = []
        self._base_timestamps: list[tuple[int, int]] = []
        """(timestamp, rows)"""
        self._timestamp_deltas: list[int] = []
        self._timestamp_types: list[tuple[int, int]] = []
        """(type, rows)"""
        self._headers: list[Any] = []

    @property
    def is_full(self) -> bool:
        return self.rows >= MIN_ROWS or self._bytes >= ENOUGH_BYTES

    def add(self, batch: DecodedBatch, first_offset: int) -> None:
        """The records of a batch from that offset to the end of the range."""
        offsets = batch.offsets
        count = len(offsets)
        first = bisect_left(offsets, first_offset)
        last = bisect_left(offsets, self._range.end)
        if first >= last:
            return
        is_whole = (first, last) == (0, count)
        if batch.keys is not None:
            self._keys += [None] * (self.rows - len(self._keys))
            self._keys += batch.keys if is_whole else batch.keys[first:last]
        self._values += batch.values if is_whole else batch.values[first:last]
        _add_run(self._base_timestamps, batch.base_timestamp, last - first)
        self._timestamp_deltas += batch.timestamp_deltas if is_whole else batch.timestamp_deltas[first:last]
        if isinstance(offsets, range):
            self._offsets.append(pyarrow.arange(offsets[first], offsets[last - 1] + 1))
        else:
            self._offsets.append(pyarrow.array(offsets[first:last], pyarrow.int64()))
        kind = LOG_APPEND_TIME if batch.header.is_log_append_time else CREATE_TIME
        _add_run(self._timestamp_types, kind, last - first)
        if self._include_headers and batch.headers is not None:
            self._headers += [None] * (self.rows - len(self._headers))
            self._headers += [headers or None for headers in batch.headers[first:last]]
        self.rows += last - first
        self._bytes += batch.header.size if batch.header.compression is Compression.NONE else _size(batch)

    def build(self) -> pyarrow.RecordBatch:
        """What was added, in the order of the schema. Raises MinibrokerError for a timestamp beyond Spark's."""
        rows = self.rows
        bases = _repeated(self._base_timestamps, pyarrow.int64())
        try:
            milliseconds = pyarrow.compute.add_checked(bases, _integers(self._timestamp_deltas))
            microseconds = pyarrow.compute.multiply_checked(milliseconds, _MICROSECONDS)
        except pyarrow.ArrowInvalid as error:
            latest = max(map(sum, zip(bases.to_pylist(), self._timestamp_deltas, strict=True)), key=abs)
            raise MinibrokerError(
                f"{self._range.topic_partition}: a timestamp of {latest} ms is more than "
                "Spark's 64 bits of microseconds hold. Begin after that record with startingOffsets"
            ) from error
        topics, partitions = self._constant_columns(rows)
        columns = [
            self._bytes_column(self._keys, rows),
            pyarrow.array(self._values, pyarrow.binary()),
            topics,
            partitions,
            _joined(self._offsets),
            microseconds.view(self._schema.field("timestamp").type),
            _repeated(self._timestamp_types, pyarrow.int32()),
        ]
        if self._include_headers:
            kind = self._schema.field("headers").type
            self._headers += [None] * (rows - len(self._headers) if self._headers else 0)
            columns.append(pyarrow.array(self._headers, kind) if self._headers else pyarrow.nulls(rows, kind))
        self._clear()
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    @staticmethod
    def _bytes_column(values: list[bytes | None], rows: int) -> pyarrow.Array:
        if not values:
            return pyarrow.nulls(rows, pyarrow.binary())
        return pyarrow.array(values + [None] * (rows - len(values)), pyarrow.binary())

    def _constant_columns(self, rows: int) -> list[pyarrow.Array]:
        if not self._constants or len(self._constants[0]) < rows:
            self._constants = [
                pyarrow.repeat(pyarrow.scalar(self._range.topic, pyarrow.string()), rows),
                pyarrow.repeat(pyarrow.scalar(self._range.partition, pyarrow.int32()), rows),
            ]
        return [column.slice(0, rows) for column in self._constants]


def _joined(arrays: list[pyarrow.Array]) -> pyarrow.Array:
    return arrays[0] if len(arrays) == 1 else pyarrow.concat_arrays(arrays)


def _add_run(runs: list[tuple[int, int]], value: int, rows: int) -> None:
    """So many more rows have the value."""
    if runs and runs[-1][0] == value:
        rows += runs.pop()[1]
    runs.append((value, rows))


def _repeated(runs: list[tuple[int, int]], kind: pyarrow.DataType) -> pyarrow.Array:
    """A column from pairs of a value and how many rows have it."""
    return _joined([pyarrow.repeat(pyarrow.scalar(value, kind), rows) for value, rows in runs])


def _integers(numbers: list[int]) -> pyarrow.Array:
    """A column of 64 bits. Where each fits into a byte, as deltas mostly do, that costs a quarter."""
    try:
        small = bytes(numbers)
    except ValueError:
        return pyarrow.array(numbers, pyarrow.int64())
    return pyarrow.Array.from_buffers(pyarrow.uint8(), len(numbers), [None, pyarrow.py_buffer(small)]).cast(
        pyarrow.int64()
    )


def _size(batch: DecodedBatch) -> int:
    """Bytes of keys and values."""
    return sum(map(len, filter(None, batch.values))) + sum(map(len, filter(None, batch.keys or ())))

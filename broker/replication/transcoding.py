"""Transcoding between columns and Kafka's records (magic 2), for Kafka's clients and for topics that store records.

The problem: native producers send batches of columns. Turning them into records takes 0.1 to 1 us a record, during
which the event loop does nothing else; and a fetch reads megabytes.

The choice: the log and the followers keep the batches as produced. Only batches that leave for such a client are
transcoded, one by one, in slices of the loop. A thread does the work that does not fit into a slice: compression and
decompression, which let the loop run, and batches larger than producers make them by default. The limits of the fetch
apply to the transcoded bytes: batches that do not fit are left out, but the first of an answer is included at any size,
or a consumer would never get past it.

Several groups read the same batches, mostly the newest. So the last CACHE_BYTES of output are kept while this broker
leads the partition. The key of a batch distinguishes it from any other that was ever at its offset: the topic's id; the
leader epoch, which changes with a truncation; and the CRC, as compaction writes a batch anew under the same epoch.

Clients older than zstd (their Fetch is below version 10) get gzip in its place in transcoded batches. Batches of
Kafka's own clients are sent as they are, as Kafka does if the topic's `compression.type` is the producer's: some
clients know more codecs than versions of Fetch.

Rejected as the rule: transcoding each batch when it is appended. Every write would be dearer for the sake of readers
that may never come, and native readers would lose the benefit of columns. Topics ask for it by `record.format=kafka`.
Even then the leader transcodes and not the producer: a producer would have to learn the setting of each topic before
its first batch, also with acks=0, and of each change; and nothing would force it to comply.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import suppress
from struct import Struct
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.reading import FetchAnswer
from minibroker.broker.scheduling.budget import Turns
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.validator import has_doubtful_times, is_to_be_rewritten
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import FetchPartitionResponse, FetchRequest
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    BatchHeader,
    Buffer,
    CorruptRecord,
    RecordsTooLarge,
    iterate_batches,
    parse_header,
    validate_batch,
    with_true_times,
)
from minibroker.protocol.records.body import MAX_STORED_BODY_BYTES
from minibroker.protocol.records.compression import Compression, DecompressionTooLarge, most_output
from minibroker.protocol.records.header import COMPRESSION_MASK, LENGTH_END
from minibroker.protocol.records.transcoding import (
    LARGEST_BODY_BYTES,
    Records,
    as_records,
    decompressed,
    finished,
    recompressed,
)
from minibroker.protocol.records.varint import BodyTooLarge
from minibroker.protocol.world import Executor

T = TypeVar("T")

CACHE_BYTES = 32 << 20

_CODEC_ON_LOOP_BYTES = 32 << 10
"""Bytes that are compressed or decompressed faster than a thread is called."""
_ON_LOOP_BYTES = 512 << 10
_ON_LOOP_RECORDS = 4_096
"""Bytes of a batch that take half a slice: the batch that ends a slice begins within it."""

_LENGTH_AND_MAGIC = Struct(">8xi4xb").unpack_from
"""The length and magic of a batch (`records.header`)."""


MOST_CONVERTED_BYTES = 96 << 20
"""Memory of all conversions in threads that run at the same time, of produced and of fetched batches."""
_RECORD_BYTES = 120
"""Memory of a record in a conversion, beside the bodies."""
_LONG_CONVERSION_S = 0.05
_REST = 3
"""After a conversion that takes longer, its memory rests for three times as long, so that three quarters of the time
are for others: Python runs one thread at a time."""

_SEARCH_STEP = 4_096
"""Batches, at 0.15 us each."""


class _Key(NamedTuple):
    topic_partition: TopicPartition
    topic_id: str
    base_offset: int
    leader_epoch: int
    crc: int
    codec: Compression


class TranscodingStats(msgspec.Struct):
    """Counts of transcoded batches for one kind of request, without those from the cache."""

    records: int = 0
    bytes: int = 0
    """The bytes of the transcoded batches."""
    seconds: float = 0.0
    """From the beginning of a batch to its end, waits for a thread included."""


class _Run(Protocol):
    async def __call__(self, call: Callable[..., T], *args: Any) -> T: ...


class _Moot(Exception):
    """The result of a conversion is there meanwhile, or nobody wants it any more."""


class _Turn:
    """A batch's turn to be converted in a thread: taken at most once, when it is needed, and kept to the end."""

    def __init__(self, turns: Turns, batch: Buffer, header: BatchHeader, is_moot: Callable[[], bool]) -> None:
        self._turns = turns
        self._batch = batch
        self._header = header
        self._is_moot = is_moot
        self._taken = 0
        self._since_s = 0.0

    async def take(self) -> None:
        """Raises _Moot."""
        if self._taken:
            return
        header = self._header
        body = memoryview(self._batch)[HEADER_SIZE:]
        expanded = most_output(header.compression, body, MAX_STORED_BODY_BYTES)
        self._taken = await self._turns.take(header.size + 2 * expanded + _RECORD_BYTES * header.records_count)
        if self._is_moot():
            raise _Moot
        self._since_s = asyncio.get_running_loop().time()

    def end(self) -> None:
        if not self._taken:
            return
        loop = asyncio.get_running_loop()
        took_s = loop.time() - self._since_s if self._since_s else 0.0
        if took_s < _LONG_CONVERSION_S:
            self._turns.give_back(self._taken)
        else:
            loop.call_later(_REST * took_s, self._turns.give_back, self._taken)


class Transcoder:
    """A LeadershipListener."""

    def __init__(self, replicas: ReplicaManager, executor: Executor) -> None:
        self._replicas = replicas
        self._executor = executor
        self._turns = Turns(MOST_CONVERTED_BYTES)
        self._cache: OrderedDict[_Key, bytearray] = OrderedDict()
        """The least recently used first."""
        self.cached_bytes = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.produced = TranscodingStats()
        """For `record.format=kafka`."""
        self.fetched = TranscodingStats()

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        """Keep the cached batches: they stay as they are in the log."""

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        """Drop the partition's cached batches: its log may be gone, or soon be another topic's, and no client fetches
        from here."""
        for key in [key for key in self._cache if key.topic_partition == topic_partition]:
            self.cached_bytes -= len(self._cache.pop(key))

    async def as_appended(self, records: Buffer, config: LogConfig) -> Buffer:
        """Return a producer's batches as a log with that config keeps them (`is_to_be_rewritten`). Damaged batches are
        left for the log to report. Raises BrokerError: INVALID_RECORD for a body that cannot be read; MESSAGE_TOO_LARGE
        if fields that all records share take too much once each record has its own."""
        batches: list[Buffer] = []
        slices = Slices()
        position = 0
        try:
            for header, start, end in iterate_batches(records):
                batch: Buffer = memoryview(records)[start:end]
                if is_to_be_rewritten(batch, config):
                    validate_batch(batch, header, as_produced=True)
                    if header.size > config.max_message_bytes:
                        return records
                    await slices.breathe()
                    batch = await self._appendable(batch, header, config)
                batches.append(batch)
                position = end
        except CorruptRecord:
            return records
        return b"".join([*batches, memoryview(records)[position:]])

    async def _appendable(self, batch: Buffer, header: BatchHeader, config: LogConfig) -> Buffer:
        turn = _Turn(self._turns, batch, header, lambda: False)
        try:
            if not config.log_append_time and has_doubtful_times(header.base_timestamp, header.max_timestamp):
                await turn.take()
                batch = await self._executor.run(with_true_times, batch, header)
                header = parse_header(batch)
            codec = header.compression if config.compression is None else config.compression
            if header.magic == MAGIC_COLUMNS and not config.columns:
                batch = await self._appendable_records(batch, header, codec, config, turn)
            elif codec is not header.compression:
                batch = await self._recompressed(batch, header, codec, config.compression_level, turn)
        except RecordsTooLarge as error:
            raise BrokerError(ErrorCode.MESSAGE_TOO_LARGE, f"{error}: send fewer records in a batch") from error
        except CorruptRecord as error:
            raise BrokerError(ErrorCode.INVALID_RECORD, str(error)) from error
        finally:
            turn.end()
        return batch

    async def _recompressed(
        self, batch: Buffer, header: BatchHeader, codec: Compression, level: int | None, turn: "_Turn"
    ) -> bytearray:
        body = await self._body(batch, header, self._runner(turn))
        if codec is Compression.NONE or len(body) <= _CODEC_ON_LOOP_BYTES:
            return recompressed(header, body, codec, level)
        return await self._runner(turn)(recompressed, header, body, codec, level)

    async def _appendable_records(
        self, batch: Buffer, header: BatchHeader, codec: Compression, config: LogConfig, turn: "_Turn"
    ) -> Buffer:
        began_s = asyncio.get_running_loop().time()
        made = await self._records(batch, header, header.base_offset, turn)
        if not made.is_whole:
            text = f"{header.records_count} records take more than {LARGEST_BODY_BYTES} bytes as Kafka's: send fewer"
            raise BrokerError(ErrorCode.MESSAGE_TOO_LARGE, text)
        made.header = _with_codec(made.header, codec)
        is_fixed = config.compression is not None
        finished = await self._finished(made, config.compression_level if is_fixed else None, is_fixed=is_fixed)
        _count(self.produced, made, finished, began_s)
        return finished

    async def transcode(
        self,
        answer: FetchAnswer,
        request: FetchRequest,
        is_gone: Callable[[], bool] = lambda: False,
        *,
        knows_zstd: bool = True,
    ) -> FetchAnswer:
        """Return the answer with records of magic 2 only, within the limits of the request. If a batch is damaged and
        none comes before it, the answer is an error code. `is_gone`: the client has gone, so no further batch is read.
        Without `knows_zstd` transcoded batches get another codec."""
        fetches = {
            TopicPartition(topic.topic, fetch.partition): fetch
            for topic in request.topics
            for fetch in topic.partitions
        }
        left = request.max_bytes
        slices = Slices()
        transcoded: FetchAnswer = []
        at_least_one = True
        for topic_partition, response in answer:
            if response.records:
                partition = self._replicas.partitions.get(topic_partition)
                if partition is None:  # deleted since
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    transcoded.append((topic_partition, FetchPartitionResponse(topic_partition.partition, code)))
                    continue
                fetch = fetches[topic_partition]
                limit = min(left, fetch.partition_max_bytes)
                part = _Part(partition, fetch.fetch_offset, limit, at_least_one, is_gone, knows_zstd)
                try:
                    records = b"".join(await self._batches(part, response.records, slices))
                except BrokerError as error:
                    response = partition.refusal(error.code)
                else:
                    response.records = memoryview(records)
                    left = max(0, left - len(records))
                    at_least_one = at_least_one and not records
            transcoded.append((topic_partition, response))
        return transcoded

    async def _batches(self, part: "_Part", records: memoryview, slices: Slices) -> list[Buffer]:
        """Those that fit. Raises BrokerError CORRUPT_MESSAGE, and what `Partition.considered` makes of it."""
        batches: list[Buffer] = []
        size = 0
        try:
            for header, start, end in iterate_batches(records):
                await slices.breathe()
                if part.is_gone():
                    break
                batch: Buffer = records[start:end]
                if header.magic == MAGIC_COLUMNS:
                    batch, is_whole = await self._transcoded(part, batch, header)
                else:
                    is_whole = True
                if size + len(batch) > part.limit and (batches or not part.at_least_one):
                    break
                batches.append(batch)
                size += len(batch)
                if not is_whole:
                    break  # the next fetch goes on within this batch
        except CorruptRecord as error:
            if not batches:
                try:
                    part.partition.log.check(records, part.offset)
                except BrokerError as damage:
                    raise part.partition.considered(damage) from error
                # The batch is as it was produced, and as every replica has it.
                raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{part.partition.topic_partition}: {error}") from error
        return batches

    async def _transcoded(self, part: "_Part", batch: Buffer, header: BatchHeader) -> tuple[Buffer, bool]:
        """And whether it is all of the batch. Raises CorruptRecord."""
        partition = part.partition
        codec = header.compression
        if codec is Compression.ZSTD and not part.knows_zstd:
            codec = Compression.GZIP
        key = _Key(
            partition.topic_partition,
            partition.log.topic_id,
            header.base_offset,
            header.partition_leader_epoch,
            header.crc,
            codec,
        )
        known = self._known(key)
        if known is not None:
            return known, True
        began_s = asyncio.get_running_loop().time()
        turn = _Turn(self._turns, batch, header, lambda: key in self._cache or part.is_gone())
        try:
            records = await self._records(batch, header, part.offset, turn)
            if codec is not header.compression:
                records.header = _with_codec(records.header, codec)
            made = await self._finished(records)
        except _Moot:
            return self._known(key) or b"", key in self._cache
        finally:
            turn.end()
        self.cache_misses += 1
        _count(self.fetched, records, made, began_s)
        if records.is_whole:
            self._keep(key, made)
        return made, records.is_whole

    def _known(self, key: _Key) -> bytearray | None:
        known = self._cache.get(key)
        if known is not None:
            self.cache_hits += 1
            self._cache.move_to_end(key)
        return known

    async def _records(self, batch: Buffer, header: BatchHeader, offset: int, turn: "_Turn") -> Records:
        run = self._runner(turn)
        body = await self._body(batch, header, run)
        if len(body) <= _ON_LOOP_BYTES and header.records_count <= _ON_LOOP_RECORDS:
            try:
                return as_records(header, body, offset, 2 * _ON_LOOP_BYTES)
            except BodyTooLarge:
                pass  # what all records have is written out in each
        return await run(as_records, header, body, offset)

    def _runner(self, turn: "_Turn") -> "_Run":
        """Call a function in a thread. Such calls may also take much memory, so they wait for their turn."""

        async def run(call: Callable[..., T], *args: Any) -> T:
            await turn.take()
            return await self._executor.run(call, *args)

        return run

    async def _body(self, batch: Buffer, header: BatchHeader, run: "_Run") -> Buffer:
        """Decompressed."""
        is_compressed = header.compression is not Compression.NONE
        if header.size <= (_CODEC_ON_LOOP_BYTES if is_compressed else _ON_LOOP_BYTES):
            with suppress(DecompressionTooLarge):
                return decompressed(batch, header, 4 * _CODEC_ON_LOOP_BYTES if is_compressed else _ON_LOOP_BYTES)
        return await run(decompressed, batch, header)

    async def _finished(self, records: Records, level: int | None = None, *, is_fixed: bool = False) -> bytearray:
        if records.header.compression is Compression.NONE or len(records.batch) <= _CODEC_ON_LOOP_BYTES:
            return finished(records, level, is_fixed)
        return await self._executor.run(finished, records, level, is_fixed)

    def _keep(self, key: _Key, batch: bytearray) -> None:
        if len(batch) > CACHE_BYTES // 4 or key in self._cache:
            return
        self._cache[key] = batch
        self.cached_bytes += len(batch)
        while self.cached_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self.cached_bytes -= len(oldest)


class _Part(NamedTuple):
    """One partition of a request."""

    partition: Partition
    offset: int
    limit: int
    """In bytes."""
    at_least_one: bool
    """However large the first batch is."""
    is_gone: Callable[[], bool]
    knows_zstd: bool


def _with_codec(header: BatchHeader, codec: Compression) -> BatchHeader:
    return msgspec.structs.replace(header, attributes=header.attributes & ~COMPRESSION_MASK | codec)


def _count(stats: TranscodingStats, records: Records, made: bytearray, began_s: float) -> None:
    stats.records += records.header.records_count
    stats.bytes += len(made)
    stats.seconds += asyncio.get_running_loop().time() - began_s


def has_columns(answer: FetchAnswer) -> Generator[None, None, bool]:
    """Some of its records are columns, or cannot be read. Nothing else is looked at: a fetch may read tens of thousands
    of batches. In steps of _SEARCH_STEP batches."""
    looked_at = 0
    for _, answered in answer:
        records = answered.records
        position, last = 0, len(records) - HEADER_SIZE
        while position <= last:
            length, magic = _LENGTH_AND_MAGIC(records, position)
            if magic != MAGIC_RECORDS or length < HEADER_SIZE - LENGTH_END:
                return True
            position += LENGTH_END + length
            looked_at += 1
            if looked_at == _SEARCH_STEP:
                looked_at = 0
                yield
    return False

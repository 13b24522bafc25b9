"""Reads a few records of a topic, for a page. Bounded: partitions, records, bytes and time have limits.

A consumer fetches ahead while it is open, which a viewer who reads slowly does not need. So each reading has a consumer
of its own, and there is none unless the end of a partition has moved since the last reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.cli.terminal.start_position import AtOffset, AtTime, Edge, Last, parse_start_position
from minibroker.client.consumer import Consumer
from minibroker.client.errors import no_such_partition
from minibroker.client.fetching.records import Record
from minibroker.deploy.console.views import Query
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import TopicPartition

SHOWN = 50
MAX_PARTITIONS = 20
READ_WITHIN_S = 1.5
MAX_PARTITION_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_BUFFER_BYTES = 8 * 1024 * 1024
MAX_DECODED_BYTES = 64 * 1024
"""A larger value is shown as its beginning, in hex or as text."""
MAX_CHARACTERS = 1_000
_BYTES_FOR_CHARACTERS = 4 * MAX_CHARACTERS

AUTO, TEXT, JSON, MSGPACK, HEX = "auto", "text", "json", "msgpack", "hex"
FORMATS = (AUTO, TEXT, JSON, MSGPACK, HEX)


class Extent(NamedTuple):
    """What of a partition can be read."""

    first: int
    end: int


class Records(NamedTuple):
    topics: tuple[str, ...]
    """All, without internal ones."""
    extents: Mapping[TopicPartition, Extent]
    """Of the partitions that were read."""
    partitions: int
    """Of the topic."""
    records: tuple[Record, ...]
    problem: str | None
    """Why the query selects nothing, or not all could be read."""


OpenConsumer = Callable[[Sequence[TopicPartition]], Consumer]


class RecordReading:
    """The reading of one query."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._last: Records | None = None

    async def read(self, admin: Admin, open_consumer: OpenConsumer) -> Records:
        """Raises NetworkError if no broker answers."""
        topics = await admin.describe_topics()
        names = tuple(topic.name for topic in topics.values() if not topic.is_internal)
        if not self._query.topic:
            return Records(names, {}, 0, (), None)
        if self._query.topic not in topics:
            return Records(names, {}, 0, (), f"There is no topic {self._query.topic!r}.")
        topic = topics[self._query.topic]
        try:
            chosen = _chosen(topic, self._query.partition)
            starts, extents = await _starts(admin, chosen, self._query.start)
        except (BrokerError, UsageError) as error:
            return Records(names, {}, len(topic.partitions), (), str(error))
        last = self._last
        if last is None or last.problem or (last.extents, last.topics) != (extents, names):
            is_tail = isinstance(_position(self._query.start), Last)
            found, problem = await _read(open_consumer, starts, extents)
            merged = sorted(found, key=lambda record: (record.timestamp_ms, record.partition, record.offset))
            shown = merged[-SHOWN:] if is_tail else merged[:SHOWN]
            last = self._last = Records(names, extents, len(topic.partitions), tuple(shown), problem)
        return last


def _chosen(topic: TopicDescription, partition: str) -> list[TopicPartition]:
    if not partition:
        return [TopicPartition(topic.name, each.partition) for each in topic.partitions[:MAX_PARTITIONS]]
    if not partition.isdecimal() or not partition.isascii() or len(partition) > 10:
        raise UsageError(
            f"partition {partition!r} is no number: give 0 to {len(topic.partitions) - 1}, or none for all"
        )
    chosen = TopicPartition(topic.name, int(partition))
    if int(partition) >= len(topic.partitions):
        raise no_such_partition(chosen, len(topic.partitions))
    return [chosen]


def _position(start: str) -> AtOffset | AtTime | Last | Edge:
    """Raises UsageError."""
    position = parse_start_position(start, "from") if start else Last(SHOWN)
    return Last(SHOWN) if position is Edge.END else position


async def _starts(
    admin: Admin, partitions: Sequence[TopicPartition], start: str
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, Extent]]:
    position = _position(start)
    firsts = await admin.list_offsets(dict.fromkeys(partitions, "earliest"))
    ends = await admin.list_offsets(dict.fromkeys(partitions, "latest"))
    extents = {}
    for partition in partitions:
        first, end = firsts[partition], ends[partition]
        extents[partition] = Extent(0 if first is None else first.offset, 0 if end is None else end.offset)
    match position:
        case AtOffset(offset):
            starts = {each: max(offset, extent.first) for each, extent in extents.items()}
        case Last(count):
            starts = {each: max(extent.first, extent.end - min(count, SHOWN)) for each, extent in extents.items()}
        case AtTime(timestamp_ms):
            found = await admin.list_offsets(dict.fromkeys(partitions, timestamp_ms))
            starts = {each: extents[each].end if at is None else at.offset for each, at in found.items()}
        case _:
            starts = {each: extent.first for each, extent in extents.items()}
    return starts, extents


async def _read(
    open_consumer: OpenConsumer, starts: Mapping[TopicPartition, int], extents: Mapping[TopicPartition, Extent]
) -> tuple[list[Record], str | None]:
    """Return up to SHOWN records of each partition, and what went wrong."""
    pending = {partition: SHOWN for partition, start in starts.items() if start < extents[partition].end}
    found: list[Record] = []
    if not pending:
        return found, None
    try:
        async with asyncio.timeout(READ_WITHIN_S), open_consumer(list(pending)) as consumer:
            for partition in pending:
                consumer.seek(partition, starts[partition])
            while pending:
                for record in await consumer.poll(max_records=SHOWN):
                    partition = TopicPartition(record.topic, record.partition)
                    if partition in pending and record.offset < extents[partition].end:
                        pending[partition] -= 1
                        found.append(record)
                for partition in list(pending):
                    if pending[partition] <= 0 or await consumer.position(partition) >= extents[partition].end:
                        del pending[partition]
                        consumer.pause(partition)
    except TimeoutError:
        return found, "Some partitions could not be read in time."
    except MinibrokerError as error:
        return found, str(error)
    return found, None


def shown(data: bytes | None, kind: str) -> str:
    """Return a key or a value in a format of FORMATS, of bounded length. Pure."""
    if data is None:
        return "null"
    if kind == HEX:
        return _cut(data[:MAX_CHARACTERS].hex(" "), len(data) > MAX_CHARACTERS)
    beginning = data[:_BYTES_FOR_CHARACTERS]
    if kind in (JSON, MSGPACK) or (kind == AUTO and data[:1] in (b"{", b"[")):
        decoded = _as_json(data, kind)
        if decoded is not None:
            return _cut(decoded)
        if kind != AUTO:
            return f"not {kind}: {_cut(beginning.decode(errors='backslashreplace'), len(data) > len(beginning))}"
    if kind == TEXT or _is_text(beginning):
        return _cut(beginning.decode(errors="backslashreplace"), len(data) > len(beginning))
    return _cut(data[:MAX_CHARACTERS].hex(" "), len(data) > MAX_CHARACTERS)


def _as_json(data: bytes, kind: str) -> str | None:
    if len(data) > MAX_DECODED_BYTES:
        return None
    try:
        if kind != MSGPACK:
            return msgspec.json.format(data, indent=0).decode()
        return msgspec.json.encode(msgspec.msgpack.decode(data), enc_hook=str, order=None).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None


def _is_text(data: bytes) -> bool:
    """Whether it is UTF-8 without control characters. If it is a beginning, its last character may be cut off."""
    if data.translate(None, _CONTROLS) != data:
        return False
    for cut in range(4 if len(data) == _BYTES_FOR_CHARACTERS else 1):
        try:
            data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        return True
    return False


_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r"))


def _cut(text: str, is_cut: bool = False) -> str:
    return f"{text[:MAX_CHARACTERS]} …" if is_cut or len(text) > MAX_CHARACTERS else text

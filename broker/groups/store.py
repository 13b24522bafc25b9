"""What a coordinator writes to its partition of `__consumer_offsets`, and how it reads it when it begins.

The problem. Group and offsets live in memory and are what the log says; the log has several replicas, and who leads
changes. What is read must not be taken back later by a leader that lacks it, and what is written must be written by
whoever has read all that was there before.

The choice. A *term* is the unbroken leadership of one partition by this broker, whatever leader epochs it spans. It is
loaded once: up to the end that the log had when the term began (nothing is appended meanwhile, since requests are
refused), and it counts as loaded only when the high watermark has come that far: until then another leader could take
back the last records. What the term writes is appended in this very term or not at all.

Rejected: loading again for each leader epoch (Kafka does, and keeps what it has): within one leadership nothing can
have changed. Reading up to the high watermark: what comes after it may be committed a moment later, without a trace
here.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from minibroker.broker.config import BrokerConfig
from minibroker.broker.groups.group import Group, group_from
from minibroker.broker.groups.records import (
    GroupKey,
    GroupValue,
    MalformedRecord,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
)
from minibroker.broker.replication.delayed import ProduceStatus
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import DecodedBatch, decode_batch, encode_batch, iterate_batches
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.groups")

OFFSETS_TOPIC = "__consumer_offsets"

LOAD_BYTES = 256 * 1024
"""Read at a time."""
SLICE_S = 0.002
BREATH_S = 0.001
LEAST_LOOK_S = 0.005
MOST_LOOK_S = 0.25
"""How often the high watermark is looked at that a load waits for; more seldom the longer that lasts."""
RETRY_S = 1.0

_AS_COORDINATOR: dict[int, ErrorCode] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.INVALID_COMMIT_OFFSET_SIZE,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.INVALID_COMMIT_OFFSET_SIZE,
}
"""What a failed append means to a member (GroupMetadataManager.storeGroup). INVALID_COMMIT_OFFSET_SIZE: too much."""

Record = tuple[bytes, bytes | None]
"""Key and value; without a value it deletes the key."""
Written = Callable[[ErrorCode, int], None]
"""Told NONE and the offset of the first record once all are replicated, or the error and -1."""


class Term:
    """One unbroken leadership of a partition, and the groups whose coordinator this broker is through it."""

    def __init__(self, index: int, epoch: int, leading_since_epoch: int, end_offset: int) -> None:
        self.topic_partition = TopicPartition(OFFSETS_TOPIC, index)
        self.epoch = epoch
        """The latest of its leader epochs."""
        self.leading_since_epoch = leading_since_epoch
        self.end_offset = end_offset
        """Of the log, when the term began."""
        self.groups: dict[str, Group] = {}
        self.is_loaded = False
        self.is_over = False

    @property
    def is_active(self) -> bool:
        return self.is_loaded and not self.is_over


class GroupStore:
    def __init__(self, replicas: ReplicaManager, clock: Clock, config: BrokerConfig) -> None:
        self._replicas = replicas
        self._clock = clock
        self._config = config

    def append(self, term: Term, records: Sequence[Record], written: Written) -> None:
        """Write records of this term, in one batch. `written` may be called at once, and is called in any case, also
        after the term is over."""
        batch = encode_batch(
            [value for _, value in records],
            keys=[key for key, _ in records],
            base_timestamp=self._clock.wall_ms(),
        )

        def respond(status: ProduceStatus) -> None:
            code = ErrorCode(status.response.error_code)
            if code is ErrorCode.NONE:
                written(ErrorCode.NONE, status.response.base_offset)
                return
            logger.warning("%s: %d records could not be written: %s", term.topic_partition, len(records), code.name)
            written(_AS_COORDINATOR.get(code, code), -1)

        self._replicas.write(
            term.topic_partition,
            batch,
            leading_since_epoch=term.leading_since_epoch,
            timeout_ms=self._config.offsets_commit_timeout_ms,
            respond=respond,
        )

    async def load(self, term: Term) -> dict[str, Group]:
        """The groups as the log has them, once all that they come from is replicated. Where the log cannot be read it
        is tried again, for the term ends with the replica. Of a term that is over the result means nothing."""
        while not term.is_over:
            try:
                groups = await self._read(term)
            except BrokerError as error:
                logger.error("%s cannot be read, and its groups wait: %s", term.topic_partition, error)
                await asyncio.sleep(RETRY_S)
                continue
            await self._until_replicated(term)
            return groups
        return {}

    async def _read(self, term: Term) -> dict[str, Group]:
        """Raises BrokerError."""
        loading = _Loading()
        time = asyncio.get_running_loop().time
        slice_end_s = time() + SLICE_S
        partition = self._replicas.leader(term.topic_partition)
        offset = partition.log.log_start_offset
        while offset < term.end_offset and not term.is_over:
            data = partition.log.read(offset, LOAD_BYTES, term.end_offset)
            if not data:
                # Compaction may have left nothing up to the end: there is no next batch to wait for (KAFKA-9065).
                break
            for piece in iterate_batches(data):
                header = piece.header
                if not header.is_control:
                    loading.add(decode_batch(data, header, piece.start), offset)
                offset = header.next_offset
                if time() >= slice_end_s:
                    await asyncio.sleep(BREATH_S)
                    slice_end_s = time() + SLICE_S
        return loading.groups()

    async def _until_replicated(self, term: Term) -> None:
        look_s = LEAST_LOOK_S
        while not term.is_over:
            partition = self._replicas.partition(term.topic_partition)
            if partition is not None and partition.high_watermark >= term.end_offset:
                return
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, MOST_LOOK_S)


class _Loading:
    """The log's records, in order: of each key the last one counts (KAFKA-5600)."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupValue] = {}
        self._offsets: dict[str, dict[TopicPartition, tuple[bytes, int]]] = {}

    def add(self, batch: DecodedBatch, from_offset: int) -> None:
        """Its records from that offset on."""
        if batch.keys is None:
            return
        for offset, key_bytes, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
            if offset < from_offset or key_bytes is None:
                continue
            try:
                self._add(key_bytes, value, offset)
            except MalformedRecord as error:
                # The others must not suffer for it; but nothing of ours writes such a record.
                logger.error("the record at offset %d of %s is skipped: %s", offset, OFFSETS_TOPIC, error)

    def _add(self, key_bytes: bytes, value: bytes | None, offset: int) -> None:
        key = decode_key(key_bytes)
        if isinstance(key, OffsetKey):
            offsets = self._offsets.setdefault(key.group_id, {})
            topic_partition = TopicPartition(key.topic, key.partition)
            if value is None:
                offsets.pop(topic_partition, None)
            else:
                offsets[topic_partition] = (value, offset)
        elif isinstance(key, GroupKey):
            if value is None:
                self._groups.pop(key.group_id, None)
            else:
                self._groups[key.group_id] = decode_group_value(value)

    def groups(self) -> dict[str, Group]:
        groups = {group_id: group_from(group_id, value) for group_id, value in self._groups.items()}
        for group_id, offsets in self._offsets.items():
            if not offsets:
                continue
            group = groups.get(group_id)
            if group is None:
                group = groups[group_id] = Group(group_id)
            for topic_partition, (value, log_offset) in offsets.items():
                try:
                    group.offsets.load(topic_partition, decode_offset_value(value), log_offset)
                except MalformedRecord as error:
                    logger.error("the record at offset %d of %s is skipped: %s", log_offset, OFFSETS_TOPIC, error)
        return groups

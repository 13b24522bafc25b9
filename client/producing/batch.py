"""A batch: records of one partition that travel together, and the meaning of a broker's answer for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from minibroker.client.errors import FailedRecord
from minibroker.protocol.errors import ERRORS, ErrorCode, MinibrokerError
from minibroker.protocol.records import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, Header, encode_batch
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.words import counted

RECORD_OVERHEAD = 20
"""At most this many bytes are added to key and value: two lengths (5 bytes each) and a timestamp (9)."""

BATCH_OVERHEAD = 128
"""At most this many bytes are added to the records: the header (61), five column lengths."""

HEADER_OVERHEAD = 12

UNASSIGNED = -1
"""The partition of a batch whose topic's partitions are not known yet."""

SEQUENCE_MASK = 0x7FFFFFFF


class Identity(NamedTuple):
    """A producer id and epoch, as InitProducerId grants them."""

    producer_id: int
    epoch: int


class BatchVerdict(Enum):
    """The consequence of an answer for a batch."""

    DELIVERED = "delivered"
    RETRY = "retry"
    RENUMBER = "renumber"
    """It is certainly not in the log, and its number is invalid: retry under a new number, in a new epoch."""
    SPLIT = "split"
    """It is too large as a whole: retry in two halves."""
    FAIL = "fail"


NOT_APPENDED = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.RECORD_LIST_TOO_LARGE,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    }
)
"""Errors that a broker returns before it appends. After any other error the batch may have been appended; even after
NOT_LEADER_OR_FOLLOWER, since the leadership may have moved after the append."""


def judge_batch(
    code: ErrorCode, *, record_count: int, is_first: bool, maybe_appended: bool, is_idempotent: bool
) -> BatchVerdict:
    """Return what to do with a batch whose answer is `code`.

    `is_first`: every earlier batch of the partition has ended. `maybe_appended`: an attempt, perhaps this one, may have
    appended it.
    """
    if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        return BatchVerdict.DELIVERED
    if code in (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE) and record_count > 1:
        return BatchVerdict.SPLIT
    if code in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID) and is_idempotent:
        if not is_first:
            return BatchVerdict.RETRY
        return BatchVerdict.FAIL if maybe_appended else BatchVerdict.RENUMBER
    return BatchVerdict.RETRY if ERRORS[code].retriable else BatchVerdict.FAIL


def is_void(sent_under: str, topic_id: str) -> bool:
    """Return whether an attempt under the first id was for another topic than the one that has the name now."""
    return sent_under not in ("", topic_id)


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Records of one partition that travel together, as columns; or held records of a topic that is not known yet.

    It ends once: `is_done` with or without an `error`, or with `forwarded` set, and then its records end in other
    batches.
    """

    topic: str
    partition: int
    order: tuple[int, ...]
    """Its place in the partition. The halves of a split batch extend the order of the whole."""
    created_at: float
    generation: int
    """The number of flushes that had begun when the first record was added."""
    is_placed: bool = False
    """The partitioner chose the partition of each record; otherwise the caller did."""
    check_caller: Callable[[], None] | None = None
    """Called before a wait for the end. Raises if the caller would wait for ever."""

    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    timestamps: list[int] = field(default_factory=list)
    headers: list[Sequence[Header] | None] | None = None
    partitions: list[int | None] | None = None
    """The partition that `send` was given for each record, in a held batch."""
    is_bulk: bool = False
    """A held batch with the records of one `send_batch`, which have the same partition and no headers."""

    granted: int = 0
    room: int = 0
    """Bytes granted and not used. The fast path of `Producer.send` counts it down."""
    is_closed: bool = False
    count: int = 0
    """The number of records, once closed."""

    attempts: int = 0
    identity: Identity | None = None
    sequence: int = NO_SEQUENCE
    encoded: bytearray | None = None
    maybe_appended: bool = False
    topic_id: str = ""
    """The topic id of the last attempt; empty: there was no attempt, or the topic has no id."""

    is_done: bool = False
    base_offset: int = -1
    log_append_time_ms: int = -1
    error: MinibrokerError | None = None
    forwarded: list[tuple[Batch, int]] | None = None
    awaited: set[int] | None = None
    """Records whose Delivery is or was awaited, which raises their failure; `flush` does not."""
    is_wholly_awaited: bool = False
    """All records are awaited."""
    told: set[int] | None = None
    """Records whose failure was reported to a caller."""
    told_changed: Callable[[Batch], None] | None = None
    """Called, once the batch has failed, when the failure was reported or a caller that awaited it is gone."""
    listeners: list[Callable[[], None]] | None = None
    """Called once, when the batch has ended or was forwarded."""

    def __post_init__(self) -> None:
        if self.partition == UNASSIGNED:
            self.partitions = []

    def __repr__(self) -> str:
        return f"Batch({self.topic}-{self.partition} {self.order}, {counted(self.count or len(self.values), 'record')})"

    @property
    def size(self) -> int:
        """An upper bound of its bytes before compression."""
        return self.granted - self.room

    def encode(self, compression: Compression, *, is_transactional: bool = False) -> bytearray:
        """Return the record batch, encoded once for all attempts under the same number. Raises as `encode_batch`."""
        if self.encoded is None:
            producer_id, epoch = self.identity or (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
            self.encoded = encode_batch(
                self.values,
                timestamps=self.timestamps,
                keys=self.keys,
                headers=self.headers,
                compression=compression,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=self.sequence,
                transactional=is_transactional,
                is_checked=True,  # by `send` and `send_batch`
            )
        return self.encoded

    def take_failures(self) -> list[FailedRecord]:
        """Return the failed records that are not awaited, and mark them as reported."""
        if self.is_wholly_awaited:
            return []
        awaited = self.awaited or ()
        untold = [index for index in range(self.count) if index not in awaited]
        failures = self.failed(untold)
        self.told = (self.told or set()).union(untold)
        self.is_wholly_awaited = True
        if self.told_changed is not None:
            self.told_changed(self)
        return failures

    def failed(self, indexes: Iterable[int]) -> list[FailedRecord]:
        """Return these records of a failed batch."""
        assert self.error is not None
        return [
            FailedRecord(
                self.topic,
                (None if self.partitions is None else self.partitions[index])
                if self.partition == UNASSIGNED
                else self.partition,
                None if self.keys is None else self.keys[index],
                self.values[index],
                self.timestamps[index],
                (None if self.headers is None else self.headers[index]) or (),
                self.error,
            )
            for index in indexes
        ]

    def part(self, start: int, end: int) -> Batch:
        """Return a batch with the records from `start` to before `end`, under the numbers that they have."""
        return Batch(
            self.topic,
            self.partition,
            (*self.order, 0 if start == 0 else 1),
            self.created_at,
            self.generation,
            is_placed=self.is_placed,
            check_caller=self.check_caller,
            values=self.values[start:end],
            keys=None if self.keys is None else self.keys[start:end],
            timestamps=self.timestamps[start:end],
            headers=None if self.headers is None else self.headers[start:end],
            is_closed=True,
            count=end - start,
            attempts=self.attempts,
            identity=self.identity,
            sequence=NO_SEQUENCE if self.identity is None else (self.sequence + start) & SEQUENCE_MASK,
            maybe_appended=self.maybe_appended,
            topic_id=self.topic_id,
        )

    def number_anew(self) -> None:
        """Forget the number. The batch gets another one when it is taken again."""
        self.identity = None
        self.sequence = NO_SEQUENCE
        self.encoded = None

    def forget_attempts(self) -> None:
        """Forget the attempts, which were for another topic."""
        self.maybe_appended = False
        self.topic_id = ""
        self.number_anew()

    def _tell(self) -> None:
        listeners, self.listeners = self.listeners, None
        for listener in listeners or ():
            listener()

    def finish(self, error: MinibrokerError | None) -> None:
        assert not self.is_done
        self.error = error
        self.encoded = None
        if error is None:
            # A Delivery keeps the batch alive, and needs only the timestamps of its columns.
            self.values = []
            self.keys = self.headers = None
        self.is_done = True  # last: other threads look at it, for a blocking producer
        self._tell()

    def forward(self, targets: list[tuple[Batch, int]]) -> None:
        for index in range(len(targets)) if self.is_wholly_awaited else sorted(self.awaited or ()):
            target, target_index = targets[index]
            target.mark_awaited(target_index)
        self.forwarded = targets
        self.values, self.timestamps = [], []
        self.keys = self.headers = self.encoded = self.partitions = None
        self._tell()

    def mark_awaited(self, index: int) -> None:
        if self.awaited is None:
            self.awaited = set()
        self.awaited.add(index)

    def mark_run_awaited(self, first: int, count: int) -> None:
        """Mark `count` records from `first` on as awaited."""
        if self.is_closed and count == self.count:
            self.is_wholly_awaited = True
        elif not self.is_wholly_awaited:
            self.awaited = (self.awaited or set()).union(range(first, first + count))

    def mark_told(self, first: int, count: int = 1) -> None:
        """Mark the failure of `count` records from `first` on as reported."""
        self.told = self.told or set()
        self.told.update(range(first, first + count))
        if self.told_changed is not None:
            self.told_changed(self)

    def wait_given_up(self, first: int, count: int = 1) -> None:
        """Note that a caller no longer waits for `count` records from `first` on. If another caller still waits, it
        marks them again at their end. If they have ended already, their failure may not have been reported."""
        if self.is_wholly_awaited:
            self.is_wholly_awaited = False
            self.awaited = set(range(self.count))
        if self.awaited is not None:
            told = self.told or ()
            self.awaited.difference_update(index for index in range(first, first + count) if index not in told)
        if self.told_changed is not None:
            self.told_changed(self)

    @property
    def unreported(self) -> int:
        """The number of records that are not awaited."""
        return 0 if self.is_wholly_awaited else self.count - len(self.awaited or ())

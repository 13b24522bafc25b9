"""The last writes of idempotent producers: their epochs and last five batches (Kafka's ProducerStateManager).

The problem: a producer without an answer sends again, with up to five requests in flight, to the broker that leads by
then. The log must append each batch once and in order.

The choice: every batch carries the producer's id, its epoch and the sequence of its first record. A leader appends a
batch that follows the producer's last one, answers a repetition of one of the last five with its old offsets, and
rejects everything else. The state is a function of the log, so followers and recovery build the same from batch
headers; snapshots spare them reading from the beginning.

Two departures from Kafka. First, a native producer (its batches are columns) that the log does not know must begin with
sequence 0, and gets UNKNOWN_PRODUCER_ID otherwise: any other sequence would hide the gap that lost batches left, and
our producers renumber their batches if that is safe. Kafka accepts any sequence of an unknown producer, and so does
this log for Kafka's batches: Kafka's clients rely on that when their topic is created again or their state has expired,
and aiokafka's producer would be rejected for ever. No record is written twice by that, since the log never had an
unknown batch, or had it a day ago. (The order of requests that are under way together:
`replication/refused_batches.py`.)

This requires that a replica knows producers whose batches it never had: its log begins where its leader's does, perhaps
after a batch that is deleted already and repeated later. So a replica that begins there gets the leader's earlier
producers (`below`), and has them on disk before it copies the first record. Kafka's replicas begin without, and the
next leader appends the batch a second time.

Second, a snapshot holds all five batches. Kafka writes only the last one, so after a crash a repetition of an earlier
one in flight counts as out of order. The format has room: one entry per batch, oldest first; a reader that expects one
per producer keeps the newest.

A producer that wrote nothing for a day is forgotten. That must not happen between a batch and its repetition, which
would be appended a second time. So the day is the time through which this log was looked after, counted in the small
steps between two looks (`time_passed`). Neither the records' timestamps (Kafka's choice: importing last year's records
would make the log forget their importer) nor a clock will do: a wall clock is set, and the monotonic one may jump over
the sleep of a suspended host while the producer, elsewhere, waits for its answer. The count begins anew with each start
of the broker and each rebuilding of the state. Forgetting a producer too late does no harm.

Anyone may make up producer ids, a batch each, and every replica remembers them. So a log knows at most MOST_PRODUCERS;
then those that wrote longest ago are forgotten, as if their day had passed (Kafka has no limit). Which they are depends
on the log alone, so replicas agree. When it writes again, such a producer is as unknown as after its day: one of
Kafka's goes on with any sequence, and ours begins again with sequence 0 if none of its batches is in doubt. Many
producers must write between a batch and its repetition before that is written twice.

Transactions: the first transactional batch of a producer opens its transaction in this log, and a marker ends it. The
last stable offset is the first offset of the oldest transaction that is open, or whose marker is not replicated yet.
A producer with an open transaction is never forgotten. A marker names the transaction that it ends by the number of its
coordinator's decision, if the producer keeps its epoch from one to the next; so a marker that arrives late does not end
the next one. Every replica remembers the last number, since the late marker may reach a leader that did not append the
first one. (Kafka has no such number.) A group coordinator commits offsets for a producer in batches
without sequence. Nothing but their epoch is checked, since a repetition of such a batch changes nothing.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from crc32c import crc32c

from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    NO_DECISION,
    NO_SEQUENCE,
    BatchHeader,
    ControlType,
    EndTransactionMarker,
)

RETAINED_BATCHES = 5
"""The batches that a producer may have in flight (Kafka's NUM_BATCHES_TO_RETAIN)."""

LONGEST_STEP_S = 60.0
"""Seconds between two looks after a log by default. Time beyond that between two looks does not count."""

MOST_TOLD = 2_000
"""Producers that are sent to another replica: half a megabyte, 15 ms. Each run of a program is one, and counts for a
day."""

MOST_PRODUCERS = 20_000
"""Producers that a log knows, except for those with open transactions: about 7 MB. More than write to a partition
within the time in which a batch is repeated."""

_SEQUENCES = 1 << 31  # after 2^31 - 1 comes 0

_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEADER = struct.Struct(">hIi")  # version, CRC-32C of all that follows it, number of entries
_CRC_END = 6
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, first offset of the
# open transaction
_SNAPSHOT_ENTRY = struct.Struct(">qhiqiqiq")
# After the entries: producer id, decision. Kafka ignores what follows the entries.
_SNAPSHOT_DECISION = struct.Struct(">qq")


NO_COORDINATOR = -1
NO_OFFSET = -1


class InvalidSnapshot(ValueError):
    """The bytes are not a snapshot; an older one will do."""


class ProducerBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int


class Producer(NamedTuple):
    epoch: int
    batches: tuple[ProducerBatch, ...]
    """The last batches of this epoch, oldest first."""
    last_seen_ms: int
    """The wall time, for readers of snapshots only: it decides nothing."""
    last_seen_s: float = 0.0
    """The state's own count of time, which no snapshot has."""
    coordinator_epoch: int = NO_COORDINATOR
    """The transaction coordinator's epoch in the last marker; NO_COORDINATOR: there was none."""
    open_since: int = NO_OFFSET
    """The offset of the open transaction's first record; NO_OFFSET: no transaction is open."""
    decision: int = NO_DECISION
    """The highest one that a marker of this `coordinator_epoch` has named."""


class EndedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    """The offset of the marker."""
    is_aborted: bool
    last_stable_offset: int
    """As in `AbortedTransaction`."""


class ProducerState:
    def __init__(self) -> None:
        self._producers: dict[int, Producer] = {}
        """By id, in the order of their last batches."""
        self._full_at = MOST_PRODUCERS + 1
        """The number of producers at which some are forgotten."""
        self._time_s = 0.0
        self._open: dict[int, int] = {}
        """The first offsets of open transactions by producer, in ascending order."""
        self._unreplicated: deque[tuple[int, int]] = deque()
        """The offsets of markers that may not be replicated yet, each with the smallest first offset of a transaction
        that it or a later one has ended. Both ascend."""

    def __len__(self) -> int:
        return len(self._producers)

    def get(self, producer_id: int) -> Producer | None:
        return self._producers.get(producer_id)

    def repeated(self, header: BatchHeader) -> ProducerBatch | None:
        """The batch that this one repeats, if it does."""
        producer = self._producers.get(header.producer_id)
        if producer is None or header.producer_epoch != producer.epoch:
            return None
        sequences = header.base_sequence, header.last_sequence
        return next((b for b in reversed(producer.batches) if (b.first_sequence, b.last_sequence) == sequences), None)

    def check(self, header: BatchHeader) -> ProducerBatch | None:
        """Whether a leader may append the batch: the batch that it repeats, or None to go on and append.

        Raises BrokerError: INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, UNKNOWN_PRODUCER_ID,
        OUT_OF_ORDER_SEQUENCE_NUMBER.
        """
        known = self.repeated(header)
        if known is not None:
            return known
        producer = self._producers.get(header.producer_id)
        first_sequence = header.base_sequence
        if producer is None:
            if header.magic == MAGIC_COLUMNS and first_sequence != NO_SEQUENCE:
                self.check_begins(header)
            return None
        if header.producer_epoch < producer.epoch:
            raise BrokerError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} is in epoch {producer.epoch}, but the batch in {header.producer_epoch}",
            )
        if producer.open_since != NO_OFFSET and not header.is_transactional:
            raise BrokerError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {header.producer_id} has a transaction open here and sends records outside of it: end the "
                f"transaction first",
            )
        if first_sequence == NO_SEQUENCE:
            return None
        expected = 0
        if header.producer_epoch == producer.epoch and producer.batches:
            expected = (producer.batches[-1].last_sequence + 1) % _SEQUENCES
        if first_sequence != expected:
            raise BrokerError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} in epoch {header.producer_epoch} sends sequence {first_sequence}, "
                f"but {expected} is expected",
            )
        return None

    def check_begins(self, header: BatchHeader) -> None:
        """Check a native producer, whose batch may have become records. Raises BrokerError UNKNOWN_PRODUCER_ID."""
        if header.has_producer_id and header.base_sequence != 0 and header.producer_id not in self._producers:
            raise BrokerError(
                ErrorCode.UNKNOWN_PRODUCER_ID,
                f"producer {header.producer_id} is not known here and begins with sequence {header.base_sequence}",
            )

    def check_marker(
        self, producer_id: int, producer_epoch: int, marker: EndTransactionMarker, *, raises_epoch: bool = False
    ) -> None:
        """Whether a leader may append the marker. Raises BrokerError: INVALID_PRODUCER_EPOCH,
        TRANSACTION_COORDINATOR_FENCED (Kafka's `ProducerAppendInfo.appendEndTxnMarker`).

        `raises_epoch`: the marker's epoch is above that of the transaction that it ends (KIP-1228). An open transaction
        of the marker's own epoch is then a later one, and the marker is a late repetition."""
        producer = self._producers.get(producer_id)
        if producer is None:
            return
        if producer_epoch < producer.epoch:
            raise BrokerError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {producer_id} is in epoch {producer.epoch}, but the marker in {producer_epoch}",
            )
        if raises_epoch and producer_epoch == producer.epoch and producer.open_since != NO_OFFSET:
            raise BrokerError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {producer_id} has begun its next transaction in epoch {producer.epoch}, but the marker ends "
                f"the one before it",
            )
        if marker.coordinator_epoch < producer.coordinator_epoch:
            raise BrokerError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"a coordinator of epoch {producer.coordinator_epoch} has ended a transaction of producer {producer_id}"
                f", but this marker is of epoch {marker.coordinator_epoch}",
            )

    def has_marker(self, producer_id: int, marker: EndTransactionMarker) -> bool:
        """Whether this marker is in the log, or one of a later decision of its coordinator."""
        producer = self._producers.get(producer_id)
        return (
            producer is not None
            and marker.decision != NO_DECISION
            and producer.coordinator_epoch == marker.coordinator_epoch
            and producer.decision >= marker.decision
        )

    def check_epochs_of_open_transaction(self, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> None:
        """Check a marker that does not come from a coordinator: if the producer has a transaction open, the marker must
        have the epochs that are known here. Raises BrokerError: INVALID_PRODUCER_EPOCH,
        TRANSACTION_COORDINATOR_FENCED."""
        producer = self._producers.get(producer_id)
        if producer is None or producer.open_since == NO_OFFSET:
            return
        if producer_epoch != producer.epoch:
            raise BrokerError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {producer_id} is in epoch {producer.epoch}, but the marker in {producer_epoch}",
            )
        if coordinator_epoch > max(producer.coordinator_epoch, 0):
            raise BrokerError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"no coordinator of epoch {coordinator_epoch} has ended a transaction of producer {producer_id} here: "
                f"give {max(producer.coordinator_epoch, 0)}",
            )

    def update(
        self, header: BatchHeader, first_offset: int, now_ms: int, marker: EndTransactionMarker | None = None
    ) -> EndedTransaction | None:
        """The batch is in the log, at `first_offset`. Nothing is checked: the leader did. `marker`: its content, of a
        control batch. Return the transaction that it has ended, if one was open."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        producer = self._producers.pop(producer_id, None)
        batches: tuple[ProducerBatch, ...] = ()
        coordinator_epoch, open_since, decision = NO_COORDINATOR, NO_OFFSET, NO_DECISION
        if producer is not None:
            coordinator_epoch, open_since, decision = producer.coordinator_epoch, producer.open_since, producer.decision
            if producer.epoch == epoch:
                batches = producer.batches
        last_offset = first_offset + header.last_offset_delta
        ended = None
        if marker is not None:
            is_same_coordinator = marker.coordinator_epoch == coordinator_epoch
            decision = max(marker.decision, decision) if is_same_coordinator else marker.decision
            coordinator_epoch = marker.coordinator_epoch
            if open_since != NO_OFFSET:
                ended = self._end(producer_id, open_since, last_offset, marker.type is ControlType.ABORT)
                open_since = NO_OFFSET
        else:
            if header.base_sequence != NO_SEQUENCE:
                batch = ProducerBatch(header.base_sequence, header.last_sequence, first_offset, last_offset)
                batches = (*batches[-RETAINED_BATCHES + 1 :], batch)
            if header.is_transactional and not header.is_control and open_since == NO_OFFSET:
                self._open[producer_id] = open_since = first_offset
        self._producers[producer_id] = Producer(
            epoch, batches, now_ms, self._time_s, coordinator_epoch, open_since, decision
        )
        if producer is None and len(self._producers) >= self._full_at:
            self.forget_oldest(MOST_PRODUCERS)
        return ended

    def forget_oldest(self, most: int) -> None:
        """Leave at most `most` producers, and a tenth less, so that this is rare: those that wrote last, and those with
        open transactions."""
        surplus = len(self._producers) - (most - most // 10)
        idle = (i for i, producer in self._producers.items() if producer.open_since == NO_OFFSET)
        for producer_id in list(islice(idle, max(surplus, 0))):
            del self._producers[producer_id]
        self._full_at = max(MOST_PRODUCERS + 1, len(self._producers) + MOST_PRODUCERS // 10)

    def _end(self, producer_id: int, first_offset: int, last_offset: int, is_aborted: bool) -> EndedTransaction:
        del self._open[producer_id]
        while self._unreplicated and self._unreplicated[-1][1] >= first_offset:
            self._unreplicated.pop()
        self._unreplicated.append((last_offset, first_offset))
        stable = next(iter(self._open.values()), last_offset + 1)
        return EndedTransaction(producer_id, first_offset, last_offset, is_aborted, stable)

    def last_stable_offset(self, high_watermark: int) -> int:
        """The offset below which every transaction is decided, its marker replicated; at most `high_watermark`."""
        stable = min(next(iter(self._open.values()), high_watermark), high_watermark)
        for marker, oldest in self._unreplicated:
            if marker >= high_watermark:
                return min(stable, oldest)
        return stable

    def forget_replicated(self, high_watermark: int) -> None:
        """The markers below `high_watermark` are replicated."""
        while self._unreplicated and self._unreplicated[0][0] < high_watermark:
            self._unreplicated.popleft()

    def has_late_transaction(self, since_ms: int) -> bool:
        """Whether a transaction is open whose producer has written nothing since this wall time. For metrics: wall
        times decide nothing."""
        return any(self._producers[producer_id].last_seen_ms < since_ms for producer_id in self._open)

    @property
    def has_transactions(self) -> bool:
        """Whether a transaction is open or has ended here, as far as its producer is known."""
        return bool(self._open) or any(p.coordinator_epoch != NO_COORDINATOR for p in self._producers.values())

    def keep_unreplicated(self, before: ProducerState, offset: int) -> None:
        """Take over the markers below `offset` of the state before a truncation to `offset`."""
        self._unreplicated = deque(entry for entry in before._unreplicated if entry[0] < offset)

    def reaches(self, offset: int) -> bool:
        """Whether some of this comes, or may come, from `offset` or later."""
        return any(
            not p.batches or p.batches[-1].last_offset >= offset or p.coordinator_epoch != NO_COORDINATOR
            for p in self._producers.values()
        )

    def below(self, offset: int) -> list[tuple[int, Producer]]:
        """Return the state that batches before `offset` have left, for a replica whose log begins there. Of more than
        MOST_TOLD producers, return those that wrote last. Decisions are left out: their markers may come later."""
        found = [
            (producer_id, producer._replace(batches=batches, open_since=NO_OFFSET, decision=NO_DECISION))
            for producer_id, producer in self._producers.items()
            if (batches := tuple(b for b in producer.batches if b.last_offset < offset)) or not producer.batches
        ]
        if len(found) > MOST_TOLD:
            found = heapq.nlargest(MOST_TOLD, found, key=_last_offset)
        return found

    def time_passed(self, seconds: float) -> None:
        """Since the last call, or since the log was opened."""
        self._time_s += min(seconds, LONGEST_STEP_S)

    def forget_unseen_for(self, seconds: float) -> None:
        since_s = self._time_s - seconds - LONGEST_STEP_S  # since it may have been seen at the end of the step
        self._producers = {
            i: p for i, p in self._producers.items() if p.last_seen_s >= since_s or p.open_since != NO_OFFSET
        }

    def capture(self) -> list[tuple[int, Producer]]:
        """A picture of now, for `encode_snapshot` in another thread."""
        return list(self._producers.items())

    @classmethod
    def restore(cls, captured: Iterable[tuple[int, Producer]]) -> ProducerState:
        state = cls()
        state._producers.update((i, producer._replace(last_seen_s=0.0)) for i, producer in captured)
        opened = sorted((p.open_since, i) for i, p in state._producers.items() if p.open_since != NO_OFFSET)
        state._open.update((i, first_offset) for first_offset, i in opened)
        return state


def _last_offset(known: tuple[int, Producer]) -> int:
    batches = known[1].batches
    return batches[-1].last_offset if batches else -1


def encode_snapshot(captured: Iterable[tuple[int, Producer]]) -> bytes:
    entries: list[bytes] = []
    decisions: list[bytes] = []
    for producer_id, (epoch, batches, last_seen_ms, _, coordinator_epoch, open_since, decision) in captured:
        if decision != NO_DECISION:
            decisions.append(_SNAPSHOT_DECISION.pack(producer_id, decision))
        for first_sequence, last_sequence, first_offset, last_offset in batches or (_NO_BATCH,):
            delta = last_offset - first_offset
            assert first_sequence == NO_SEQUENCE or (first_sequence + delta) % _SEQUENCES == last_sequence
            transaction = coordinator_epoch, open_since
            entries.append(
                _SNAPSHOT_ENTRY.pack(producer_id, epoch, last_sequence, last_offset, delta, last_seen_ms, *transaction)
            )
    body = b"".join(entries + decisions)
    count = struct.pack(">i", len(entries))
    return _SNAPSHOT_HEADER.pack(_SNAPSHOT_VERSION, crc32c(body, crc32c(count)), len(entries)) + body


_NO_BATCH = ProducerBatch(NO_SEQUENCE, NO_SEQUENCE, -1, -1)


def decode_snapshot(data: bytes) -> list[tuple[int, Producer]]:
    """Raises InvalidSnapshot."""
    if len(data) < _SNAPSHOT_HEADER.size:
        raise InvalidSnapshot(f"{len(data)} bytes")
    version, crc, count = _SNAPSHOT_HEADER.unpack_from(data)
    if version != _SNAPSHOT_VERSION or crc != crc32c(memoryview(data)[_CRC_END:]):
        raise InvalidSnapshot(f"version {version}, or the CRC does not match")
    entries_end = _SNAPSHOT_HEADER.size + count * _SNAPSHOT_ENTRY.size
    if count < 0 or len(data) < entries_end or (len(data) - entries_end) % _SNAPSHOT_DECISION.size:
        raise InvalidSnapshot(f"{count} entries in {len(data)} bytes")
    producers: dict[int, Producer] = {}
    for fields in _SNAPSHOT_ENTRY.iter_unpack(memoryview(data)[_SNAPSHOT_HEADER.size : entries_end]):
        producer_id, epoch, last_sequence, last_offset, delta, last_seen_ms, coordinator_epoch, open_since = fields
        known = producers.get(producer_id)
        batches = known.batches if known is not None and known.epoch == epoch else ()
        if last_sequence != NO_SEQUENCE:
            first_sequence = (last_sequence - delta) % _SEQUENCES
            batches = (*batches, ProducerBatch(first_sequence, last_sequence, last_offset - delta, last_offset))
        kept = batches[-RETAINED_BATCHES:]
        producers[producer_id] = Producer(epoch, kept, last_seen_ms, 0.0, coordinator_epoch, open_since)
    for producer_id, decision in _SNAPSHOT_DECISION.iter_unpack(memoryview(data)[entries_end:]):
        if producer_id not in producers:
            raise InvalidSnapshot(f"a decision of producer {producer_id}, which has no entry")
        producers[producer_id] = producers[producer_id]._replace(decision=decision)
    return list(producers.items())

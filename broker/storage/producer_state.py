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
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable
from typing import NamedTuple

from crc32c import crc32c

from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import MAGIC_COLUMNS, NO_SEQUENCE, BatchHeader

RETAINED_BATCHES = 5
"""The batches that a producer may have in flight (Kafka's NUM_BATCHES_TO_RETAIN)."""

LONGEST_STEP_S = 60.0
"""Seconds between two looks after a log by default. Time beyond that between two looks does not count."""

MOST_TOLD = 2_000
"""Producers that are sent to another replica: half a megabyte, 15 ms. Each run of a program is one, and counts for a
day."""

_SEQUENCES = 1 << 31  # after 2^31 - 1 comes 0

_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEADER = struct.Struct(">hIi")  # version, CRC-32C of all that follows it, number of entries
_CRC_END = 6
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, first offset of the
# open transaction
_SNAPSHOT_ENTRY = struct.Struct(">qhiqiqiq")


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


class ProducerState:
    def __init__(self) -> None:
        self._producers: dict[int, Producer] = {}
        self._time_s = 0.0

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

        Raises BrokerError: INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID, OUT_OF_ORDER_SEQUENCE_NUMBER.
        """
        known = self.repeated(header)
        if known is not None:
            return known
        producer = self._producers.get(header.producer_id)
        first_sequence = header.base_sequence
        if producer is None:
            if header.magic == MAGIC_COLUMNS:
                self.check_begins(header)
            return None
        if header.producer_epoch < producer.epoch:
            raise BrokerError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} is in epoch {producer.epoch}, but the batch in {header.producer_epoch}",
            )
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

    def update(self, header: BatchHeader, first_offset: int, now_ms: int) -> None:
        """The batch is in the log, at `first_offset`. Nothing is checked: the leader did."""
        producer = self._producers.get(header.producer_id)
        batches: tuple[ProducerBatch, ...] = ()
        if producer is not None and producer.epoch == header.producer_epoch:
            batches = producer.batches
        if header.base_sequence != NO_SEQUENCE:  # a transaction's marker has none: it only moves the epoch
            last_offset = first_offset + header.last_offset_delta
            batch = ProducerBatch(header.base_sequence, header.last_sequence, first_offset, last_offset)
            batches = (*batches[-RETAINED_BATCHES + 1 :], batch)
        self._producers[header.producer_id] = Producer(header.producer_epoch, batches, now_ms, self._time_s)

    def reaches(self, offset: int) -> bool:
        """Whether some of this comes, or may come, from `offset` or later."""
        return any(not p.batches or p.batches[-1].last_offset >= offset for p in self._producers.values())

    def below(self, offset: int) -> list[tuple[int, Producer]]:
        """Return the state that batches before `offset` have left, for a replica whose log begins there. Of more than
        MOST_TOLD producers, return those that wrote last."""
        found = [
            (producer_id, producer._replace(batches=batches))
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
        self._producers = {i: p for i, p in self._producers.items() if p.last_seen_s >= since_s}

    def capture(self) -> list[tuple[int, Producer]]:
        """A picture of now, for `encode_snapshot` in another thread."""
        return list(self._producers.items())

    @classmethod
    def restore(cls, captured: Iterable[tuple[int, Producer]]) -> ProducerState:
        state = cls()
        state._producers.update((i, producer._replace(last_seen_s=0.0)) for i, producer in captured)
        return state


def _last_offset(known: tuple[int, Producer]) -> int:
    batches = known[1].batches
    return batches[-1].last_offset if batches else -1


def encode_snapshot(captured: Iterable[tuple[int, Producer]]) -> bytes:
    entries: list[bytes] = []
    for producer_id, (epoch, batches, last_seen_ms, _) in captured:
        for first_sequence, last_sequence, first_offset, last_offset in batches or (_NO_BATCH,):
            delta = last_offset - first_offset
            assert first_sequence == NO_SEQUENCE or (first_sequence + delta) % _SEQUENCES == last_sequence
            entries.append(
                _SNAPSHOT_ENTRY.pack(producer_id, epoch, last_sequence, last_offset, delta, last_seen_ms, -1, -1)
            )
    body = b"".join(entries)
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
    if len(data) != _SNAPSHOT_HEADER.size + count * _SNAPSHOT_ENTRY.size:
        raise InvalidSnapshot(f"{count} entries in {len(data)} bytes")
    producers: dict[int, Producer] = {}
    for fields in _SNAPSHOT_ENTRY.iter_unpack(memoryview(data)[_SNAPSHOT_HEADER.size :]):
        producer_id, epoch, last_sequence, last_offset, delta, last_seen_ms, _, _ = fields
        known = producers.get(producer_id)
        batches = known.batches if known is not None and known.epoch == epoch else ()
        if last_sequence != NO_SEQUENCE:
            first_sequence = (last_sequence - delta) % _SEQUENCES
            batches = (*batches, ProducerBatch(first_sequence, last_sequence, last_offset - delta, last_offset))
        producers[producer_id] = Producer(epoch, batches[-RETAINED_BATCHES:], last_seen_ms)
    return list(producers.items())

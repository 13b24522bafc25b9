"""The batches of one partition, in order and numbered; the state of a topic; and which batches may be sent now. Pure.

**Order without duplicates** (idempotence, KIP-98 and KIP-360). A batch is numbered when it is first taken, and keeps
producer id, epoch and sequence through all retries, so that brokers recognise a duplicate. While a batch waits for its
retry, no later batch of the partition overtakes it: a retry is sent only if nothing of the partition is in flight.

A batch is numbered anew only if the broker reported in every attempt that it did *not* append it. An attempt without a
clear answer (a lost connection, a timeout, "not leader" from a broker that led when the batch arrived) makes the batch
`maybe_appended`; if its number is then lost, it fails rather than risk a duplicate. A failed batch leaves a gap in the
numbers, so the batches that follow are numbered from 0 in the next epoch of the same producer id. Rejected: another
producer id. It would repair the numbers, but not the order: a request that a slow network has delayed is appended
whenever it arrives, unless a newer epoch of its producer has fenced it.

**Readiness.** The first batch of a partition may be sent if it is full, if the buffer is exhausted, if a flush or
`close` waits for it, or if it has lingered. By Nagle's rule, a batch that is not full waits while the partition has
another one in flight. Without that rule, `linger_ms=0` would send one or two records per request, as many as one pass
of the event loop finds. With it, an idle partition sends at once, and a busy one fills batches for as long as a request
takes. Rejected: a default linger of 5 ms (Kafka 4), which would delay every awaited `send`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from minibroker.client.producing.batch import SEQUENCE_MASK, UNASSIGNED, Batch, Identity

LAST_PRODUCER_EPOCH = 0x7FFF
"""After this one a new producer id is needed."""


@dataclass(slots=True, eq=False, repr=False)
class PartitionQueue:
    """The batches of one partition that have not ended yet."""

    topic: str
    partition: int
    waiting: deque[Batch] = field(default_factory=deque)
    """In order. Batches that wait for a retry (with `attempts`) come first; the last one may be open."""
    open: Batch | None = None
    in_flight: list[Batch] = field(default_factory=list)
    next_order: int = 0
    identity: Identity | None = None
    """New batches are numbered under it; None: there is none yet, or the numbers were lost."""
    next_sequence: int = 0
    retry_at: float = 0.0
    """Nothing is sent before this time."""
    tried: tuple[int, int] | None = None
    """Node and epoch of the leader of the last attempt. `retry_at` applies to that leader only."""

    def is_first(self, batch: Batch) -> bool:
        """Return whether every batch before `batch` has ended. `batch` itself must be in neither list."""
        return all(other.order > batch.order for other in self.in_flight) and (
            not self.waiting or self.waiting[0].order > batch.order
        )

    def append(self, batch: Batch) -> None:
        """Add a batch behind all others."""
        batch.order = (self.next_order,)
        self.next_order += 1
        self.waiting.append(batch)

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Insert batches into `waiting` according to their order."""
        for batch in batches:
            index = 0
            for other in self.waiting:
                if other.order > batch.order:
                    break
                index += 1
            self.waiting.insert(index, batch)

    def number(self, batch: Batch, identity: Identity | None) -> None:
        """Give the batch the next number. `identity` is for a queue that has none."""
        if self.identity is None:
            assert identity is not None, "a batch was taken without a producer id"
            self.identity = identity
            self.next_sequence = 0
        batch.identity = self.identity
        batch.sequence = self.next_sequence
        self.next_sequence = (self.next_sequence + batch.count) & SEQUENCE_MASK

    def begin_again(self, identity: Identity | None) -> None:
        """Number the batches from 0 under the same identity: the log knows nothing of it, or the transaction aborts."""
        if identity is not None and self.identity == identity:
            self.next_sequence = 0
            self._number_anew()

    def forget_numbers(self) -> None:
        """Number the next batch from 0 under another identity, which the producer has got."""
        self.identity = None
        self.next_sequence = 0

    def begins_anew(self, batch: Batch) -> bool:
        """Return whether the batch would be the first of its producer id or epoch."""
        return batch.identity is None and (self.identity is None or self.next_sequence == 0)

    def lose_numbers(self, identity: Identity | None) -> bool:
        """Continue in the next epoch: the log does not expect the next number under `identity` (KIP-360). Return
        whether the producer id has no epoch left.

        Each partition has its own epochs, as each log has its own producer state. Batches that wait under an old number
        and are certainly not in the log are numbered anew. A batch that may be in the log keeps its number: if it is
        there, the broker reports that.
        """
        if identity is None or self.identity != identity:
            return False  # never numbered, or the partition is in another epoch already
        is_used_up = identity.epoch >= LAST_PRODUCER_EPOCH
        if is_used_up:
            self.identity = None
        else:
            self.identity = identity._replace(epoch=identity.epoch + 1)
            self.next_sequence = 0
        self._number_anew()
        return is_used_up

    def _number_anew(self) -> None:
        for batch in self.waiting:
            if not batch.maybe_appended:
                batch.number_anew()


@dataclass(slots=True, eq=False, repr=False)
class TopicState:
    """The accumulator's knowledge of a topic."""

    name: str
    batch_size: int
    """The producer's `batch_size`, or less once a broker has rejected a batch as too large."""
    topic_id: str = ""
    partition_count: int | None = None
    """None: not known yet, or the topic is changing."""
    available: list[int] = field(default_factory=list)
    """Partitions that have a leader, ascending; all partitions if none has."""
    queues: dict[int, PartitionQueue] = field(default_factory=dict)
    held: PartitionQueue = field(init=False)
    sticky: int | None = None
    """The current partition of records without a key."""
    sticky_bytes: int = 0
    previous: int | None = None
    """The partition of the last record without a key (round robin)."""

    def __post_init__(self) -> None:
        self.held = PartitionQueue(self.name, UNASSIGNED)

    def queue(self, partition: int) -> PartitionQueue:
        """Return the queue of a partition, or a new one."""
        queue = self.queues.get(partition)
        if queue is None:
            queue = self.queues[partition] = PartitionQueue(self.name, partition)
        return queue

    def queue_length(self, partition: int) -> int:
        queue = self.queues.get(partition)
        return 0 if queue is None else len(queue.waiting) + len(queue.in_flight)


class Generations:
    """Which batches a flush waits for: those of the generations before it. Each flush begins a new generation."""

    def __init__(self) -> None:
        self.current = 0
        self.flushing_up_to = -1
        """A flush waits for batches of generations up to this one."""
        self._unfinished: dict[int, int] = {}
        """The number of batches that have not ended, by generation."""

    @property
    def are_unfinished(self) -> bool:
        """Whether there is a batch that has not ended."""
        return bool(self._unfinished)

    def count(self, batch: Batch, difference: int) -> None:
        """Count a batch that has begun (1) or ended (-1)."""
        count = self._unfinished.get(batch.generation, 0) + difference
        if count:
            self._unfinished[batch.generation] = count
        else:
            del self._unfinished[batch.generation]

    def begin_flush(self) -> int:
        """Begin a generation. Return the number of the one before, for `is_flushed`."""
        self.flushing_up_to = self.current
        self.current += 1
        return self.flushing_up_to

    def is_flushed(self, flush: int) -> bool:
        return all(generation > flush for generation in self._unfinished)

    @contextmanager
    def at(self, generation: int) -> Iterator[None]:
        """Let batches that begin within this block belong to an earlier generation."""
        current, self.current = self.current, generation
        try:
            yield
        finally:
            self.current = current


class Ready(NamedTuple):
    queues: list[PartitionQueue]
    """Queues whose first batch may be sent now."""
    next_check_at: float | None
    """When another queue may become ready through time alone."""


def ready(
    active: Iterable[PartitionQueue],
    now: float,
    *,
    is_exhausted: bool,
    flushing_up_to: int,
    linger_s: float,
    is_idempotent: bool,
) -> Ready:
    """Return the queues whose first batch may be sent, out of those with batches waiting.

    `is_exhausted`: the buffer is full. `flushing_up_to`: a flush waits for batches of generations up to this one.
    """
    queues: list[PartitionQueue] = []
    next_check_at: float | None = None
    for queue in active:
        first = queue.waiting[0]
        if queue.in_flight and (first.attempts > 0 or (is_idempotent and queue.begins_anew(first))):
            continue  # a retry, or the first of a new epoch, must overtake nothing: an answer wakes the sender
        if now < queue.retry_at:
            ready_at = queue.retry_at
        elif first.is_closed or first.attempts > 0 or is_exhausted or first.generation <= flushing_up_to:
            queues.append(queue)
            continue
        elif queue.in_flight:
            continue  # Nagle's rule
        else:
            ready_at = first.created_at + linger_s
            if ready_at <= now:
                queues.append(queue)
                continue
        if next_check_at is None or ready_at < next_check_at:
            next_check_at = ready_at
    return Ready(queues, next_check_at)

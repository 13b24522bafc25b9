"""The transactional ids that this broker coordinates, as `__transaction_state` has them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.ageing import Ageing, steps_between_checks
from minibroker.broker.coordinating.attempts import LatestAttempts
from minibroker.broker.coordinating.record_fields import MalformedRecord
from minibroker.broker.coordinating.terms import Loading, Term, Terms
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.transactions.records import decode_key, decode_value, encode_key
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import Transaction
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition
from minibroker.protocol.records import BatchHeader, DecodedBatch, EndTransactionMarker
from minibroker.protocol.world import Clock

MAX_IDS = 100_000
"""Transactional ids of one partition of `__transaction_state` (Kafka: unlimited)."""
ID_BYTES, PARTITION_BYTES = 1_000, 100
"""The memory of a transactional id, and of a partition of its transaction."""
WRITE_TIMEOUT_MS = 5_000
"""The time for a record of a transaction to be replicated, before its client is told to ask again."""


class Coordinated:
    """One transactional id: what the log has of it, and what is being written."""

    __slots__ = ("current", "is_changing", "offset", "open_since_s", "unused_since_s", "waiting")

    def __init__(self, current: Transaction | None, now_s: float, open_since_s: float, offset: int = -1) -> None:
        self.current = current
        """None: its first record is being written."""
        self.offset = offset
        """The offset of the record of `current`; -1: there is none."""
        self.is_changing = False
        """Whether a record is being written, or may be in the log without being replicated. Requests wait."""
        self.open_since_s = open_since_s
        """The monotonic time at which the ongoing transaction began, or at which this coordinator learned of it: the
        wall clocks of brokers differ."""
        self.unused_since_s = now_s
        """The time of the last change, by `TransactionTerms.now_s`."""
        self.waiting: list[asyncio.Future[None]] = []

    @property
    def is_settled(self) -> bool:
        """Whether requests can be decided now: nothing is being written, and no outcome is being told."""
        return not self.is_changing and not (self.current is not None and self.current.is_ending)

    def wake(self) -> None:
        """Let waiting requests look again."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def _kept_bytes(transactional_id: str, coordinated: Coordinated) -> int:
    partitions = () if coordinated.current is None else coordinated.current.partitions
    return ID_BYTES + len(transactional_id) + PARTITION_BYTES * len(partitions)


class TransactionTerm(Term):
    """One unbroken leadership of a partition of `__transaction_state`. Its leader epoch is the coordinator epoch of
    its markers."""

    def __init__(self, topic_partition: TopicPartition, epoch: int, leading_since_epoch: int, end_offset: int) -> None:
        super().__init__(topic_partition, epoch, leading_since_epoch, end_offset)
        self.ids: dict[str, Coordinated] = {}
        self.attempts = LatestAttempts(leading_since_epoch)

    @property
    def size(self) -> int:
        return len(self.ids)


class TransactionTerms(Terms[TransactionTerm]):
    topic = TRANSACTIONS_TOPIC
    content = "transactional id"
    state = "transactions"
    meaningless_key = encode_key("")
    logger = logging.getLogger("minibroker.transactions")

    def __init__(
        self,
        clock: Clock,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        super().__init__(clock, metadata, replicas, start_task, WRITE_TIMEOUT_MS)
        check_s = config.transaction_remove_expired_transaction_cleanup_interval_ms / 1_000
        expiration_s = config.transactional_id_expiration_ms / 1_000
        self.ageing = Ageing(clock, check_s / steps_between_checks(check_s, expiration_s))

    @property
    def now_s(self) -> float:
        """The clock by which unused transactional ids age."""
        return self.ageing.now_s

    def sizes(self) -> Iterator[int]:
        for term in self.loaded():
            for transactional_id, coordinated in list(term.ids.items()):
                yield _kept_bytes(transactional_id, coordinated)

    def may_add(self, term: TransactionTerm, transactional_id: str) -> bool:
        return len(term.ids) < MAX_IDS and self.kept.add(ID_BYTES + len(transactional_id))

    def may_add_partitions(self, count: int) -> bool:
        return self.kept.add(PARTITION_BYTES * count)

    def new_term(self, index: int, epoch: int, leading_since_epoch: int, end_offset: int) -> TransactionTerm:
        return TransactionTerm(TopicPartition(self.topic, index), epoch, leading_since_epoch, end_offset)

    def new_loading(self, term: TransactionTerm) -> Loading:
        return _Loading(self, term, self._clock)


class _Loading(Loading):
    """Only the last record of each id counts, and only that one is decoded."""

    def __init__(self, terms: TransactionTerms, term: TransactionTerm, clock: Clock) -> None:
        self._terms = terms
        self._term = term
        self._clock = clock
        self._values: dict[str, tuple[bytes, int]] = {}

    def add(self, batch: DecodedBatch) -> None:
        if batch.keys is None:
            return
        for offset, key, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
            if key is None:
                continue
            try:
                transactional_id = decode_key(key)
            except MalformedRecord as error:
                self._terms.skip(offset, error)
                continue
            if not isinstance(transactional_id, str) or not transactional_id:
                continue
            if value is None:
                self._values.pop(transactional_id, None)
            else:
                self._values[transactional_id] = value, offset

    def add_control(self, header: BatchHeader, marker: EndTransactionMarker) -> None:
        """There are no transactions in this topic."""

    async def finish(self, slices: Slices) -> None:
        now_s, open_since_s = self._terms.now_s, self._clock.monotonic()
        for transactional_id, (value, offset) in self._values.items():
            try:
                transaction = decode_value(transactional_id, value)
            except MalformedRecord as error:
                self._terms.skip(offset, error)
                continue
            if transaction.state is not TransactionState.DEAD:
                self._term.ids[transactional_id] = Coordinated(transaction, now_s, open_since_s, offset)
            await slices.breathe()

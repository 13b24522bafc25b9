"""Coordinates transactions (Kafka's TransactionCoordinator): decides each request, writes the decision, and answers.

The problem. A broker that has been deposed without knowing it may have an old state of a transactional id in memory. An
answer from it, such as "committed" for a transaction that it knows nothing of, would lose records. And two decisions
about one transaction must not be made beside each other.

The choice. A decision is made from what the log has, by the rules in `transaction`. It is written within the term and
answered once it is replicated. A decision that needs no record is confirmed by an empty one (see `coordinating.terms`).
While a record is being written, or the markers of an ended transaction are, requests for that transactional id wait for
a moment; then they get CONCURRENT_TRANSACTIONS and come again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from minibroker.broker.coordinating.terms import Outcome, TermListener
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.transactions.markers import MarkerSender
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.broker.transactions.records import encode_key, encode_value
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.terms import Coordinated, TransactionTerm, TransactionTerms
from minibroker.broker.transactions.transaction import (
    Decision,
    ProducerIdAndEpoch,
    Transaction,
    add_partitions,
    complete,
    end,
    initialize,
    needs_fresh_id,
    verify,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.transactions")

WAIT_S = 0.5
"""The longest wait of a request for the end of the previous one."""
RETRY_S = 0.1
"""The pause before the end of a transaction is written again."""
MAX_ID_BYTES = 32_767
"""The limit of a record's key."""

_E = ErrorCode
_RETRIABLE = frozenset(
    {
        _E.COORDINATOR_NOT_AVAILABLE,
        _E.NOT_COORDINATOR,
        _E.COORDINATOR_LOAD_IN_PROGRESS,
        _E.CONCURRENT_TRANSACTIONS,
    }
)

Decide = Callable[[Transaction | None, int | None], Decision]
"""Takes what the log has, and a fresh producer id where `needs_fresh_id`."""


class TransactionCoordinator(TermListener[TransactionTerm]):
    def __init__(
        self,
        clock: Clock,
        config: BrokerConfig,
        terms: TransactionTerms,
        producer_ids: ProducerIds,
        markers: MarkerSender,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._clock = clock
        self._config = config
        self._terms = terms
        self._producer_ids = producer_ids
        self._markers = markers
        self._start_task = start_task
        self.committed = 0
        """Transactions committed so far."""
        self.aborted = 0
        """Transactions aborted so far."""
        terms.add_listener(self)

    # -- terms --

    def loaded(self, term: TransactionTerm) -> None:
        """Tell the partitions the outcomes that were decided before this term, again."""
        for coordinated in term.ids.values():
            self._settle_outcome(term, coordinated)

    def over(self, term: TransactionTerm) -> None:
        for coordinated in term.ids.values():
            coordinated.wake()

    # -- requests --

    async def initialize(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: ProducerIdAndEpoch | None,
        attempt: Attempt | None = None,
    ) -> ProducerIdAndEpoch | ErrorCode:
        """T2. Handle InitProducerId. Returns what the producer goes on with. Its answer waits until an open transaction
        of the id is aborted, or is CONCURRENT_TRANSACTIONS."""
        if not transactional_id or len(transactional_id.encode()) > MAX_ID_BYTES:
            return _E.INVALID_REQUEST
        if not 0 < timeout_ms <= self._config.transaction_max_timeout_ms:
            return _E.INVALID_TRANSACTION_TIMEOUT

        term = self._terms.of_key(transactional_id)
        if isinstance(term, ErrorCode):
            return term
        late = term.attempts.take(attempt, term.epoch)
        if late is not _E.NONE:
            return late

        def decide(known: Transaction | None, fresh_id: int | None) -> Decision:
            return initialize(known, transactional_id, timeout_ms, expected, fresh_id, self._clock.wall_ms())

        by_s = self._clock.monotonic() + WAIT_S
        while True:
            decided = await self._decide(transactional_id, decide, by_s, may_begin=True)
            if isinstance(decided, ErrorCode):
                return decided
            if not decided.is_ending:
                return decided.granted

    async def add_partitions(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Sequence[TopicPartition]
    ) -> ErrorCode:
        """T4. Handle AddPartitionsToTxn and AddOffsetsToTxn."""
        decided = await self._decide(
            transactional_id,
            lambda known, _: add_partitions(known, producer, partitions, self._clock.wall_ms()),
        )
        return decided if isinstance(decided, ErrorCode) else _E.NONE

    async def verify(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Return for each partition whether it belongs to the ongoing transaction."""
        codes: dict[TopicPartition, ErrorCode] = {}

        def decide(known: Transaction | None, _: int | None) -> Decision:
            nonlocal codes
            if known is not None and known.is_ending:
                return _E.CONCURRENT_TRANSACTIONS
            codes = verify(known, producer, partitions)
            return known if known is not None else _E.INVALID_PRODUCER_ID_MAPPING

        decided = await self._decide(transactional_id, decide)
        return codes if isinstance(decided, Transaction) else dict.fromkeys(partitions, decided)

    async def end(
        self, transactional_id: str, producer: ProducerIdAndEpoch, *, committed: bool, raises_epoch: bool
    ) -> ProducerIdAndEpoch | ErrorCode:
        """T8. Handle EndTxn. Returns once the outcome is decided for good, with what the producer goes on with."""

        def decide(known: Transaction | None, fresh_id: int | None) -> Decision:
            return end(
                known,
                producer,
                committed=committed,
                raises_epoch=raises_epoch,
                fresh_id=fresh_id,
                now_ms=self._clock.wall_ms(),
            )

        decided = await self._decide(transactional_id, decide)
        return decided if isinstance(decided, ErrorCode) else decided.granted

    async def change(self, transactional_id: str, decide: Decide) -> ErrorCode:
        """Carry out a decision of this broker's own, such as a time-out."""
        decided = await self._decide(transactional_id, decide, self._clock.monotonic())
        return decided if isinstance(decided, ErrorCode) else _E.NONE

    # -- decisions --

    async def _decide(
        self, transactional_id: str, decide: Decide, by_s: float | None = None, *, may_begin: bool = False
    ) -> Decision:
        """Decide, and return the transaction once the log has it, or the error. `by_s`: the monotonic time until which
        this may wait for an earlier decision. `may_begin`: an unknown id may get its first record."""
        if by_s is None:
            by_s = self._clock.monotonic() + WAIT_S
        fresh_id = None
        while True:
            term = self._terms.of_key(transactional_id)
            if isinstance(term, ErrorCode):
                return term
            coordinated = term.ids.get(transactional_id)
            if coordinated is not None and not coordinated.is_settled:
                # An EndTxn that was repeated is answered although the markers are still being written.
                told = None if coordinated.is_changing else decide(coordinated.current, fresh_id)
                if told is None or told is _E.CONCURRENT_TRANSACTIONS:
                    if not await self._until_settled(coordinated, by_s):
                        return _E.CONCURRENT_TRANSACTIONS
                    continue
            known = None if coordinated is None else coordinated.current
            if fresh_id is None and needs_fresh_id(known) and (known is not None or may_begin):
                fresh_id = await self._producer_ids.next()
                continue  # the log may have changed meanwhile
            if known is None and may_begin and not self._terms.may_add(term, transactional_id):
                return _E.POLICY_VIOLATION
            decision = decide(known, fresh_id)
            if isinstance(decision, Transaction) and decision is not known:
                more = len(decision.partitions) - (0 if known is None else len(known.partitions))
                if more > 0 and not self._terms.may_add_partitions(more):
                    return _E.POLICY_VIOLATION
                return await self._write(term, decision)
            if isinstance(decision, ErrorCode) and decision in _RETRIABLE:
                return decision
            confirmed = await self._confirm(term)
            return decision if confirmed is _E.NONE else confirmed

    async def _until_settled(self, coordinated: Coordinated, by_s: float) -> bool:
        """Return whether the requests that waited may be decided again, instead of too late."""
        left_s = by_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        coordinated.waiting.append(future)
        done, _ = await asyncio.wait([future], timeout=left_s)
        return bool(done)

    async def _confirm(self, term: TransactionTerm) -> ErrorCode:
        future: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()

        def confirmed(code: ErrorCode) -> None:
            if not future.done():
                future.set_result(code)

        self._terms.confirm(term, confirmed)
        return await future

    async def _write(self, term: TransactionTerm, new: Transaction) -> Decision:
        """Write the decision, and return it once it is replicated, or the error."""
        coordinated = term.ids.get(new.transactional_id)
        if coordinated is None:
            coordinated = term.ids[new.transactional_id] = Coordinated(None, self._terms.now_s, self._clock.monotonic())
        coordinated.is_changing = True
        future: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()

        def written(outcome: Outcome) -> None:
            self._written(term, coordinated, new, outcome)
            if not future.done():
                future.set_result(_E.NOT_COORDINATOR if term.is_over else outcome.code)

        value = None if new.state is TransactionState.DEAD else encode_value(new)
        self._terms.write(term, [(encode_key(new.transactional_id), value)], written)
        code = await future
        return new if code is _E.NONE else code

    def _written(self, term: TransactionTerm, coordinated: Coordinated, new: Transaction, outcome: Outcome) -> None:
        """Apply the outcome of a write. A record that may be replicated later keeps the id changing: whatever was
        decided beside it could contradict it."""
        if term.is_over:
            return
        if outcome.code is _E.NONE:
            self._apply(term, coordinated, new, outcome.base_offset)
        elif (offset := outcome.base_offset) >= 0:
            term.await_replicas(offset + 1, lambda: self._apply(term, coordinated, new, offset))
        elif not outcome.is_in_doubt:
            coordinated.is_changing = False
            if coordinated.current is None:
                del term.ids[new.transactional_id]
            coordinated.wake()

    def _apply(self, term: TransactionTerm, coordinated: Coordinated, new: Transaction, offset: int) -> None:
        """The log has the decision for good, at this offset."""
        known = coordinated.current
        coordinated.is_changing = False
        coordinated.unused_since_s = self._terms.now_s
        if new.state is TransactionState.DEAD:
            del term.ids[new.transactional_id]
            coordinated.wake()
            return
        coordinated.current, coordinated.offset = new, offset
        if new.state is TransactionState.ONGOING and (known is None or known.state is not TransactionState.ONGOING):
            coordinated.open_since_s = self._clock.monotonic()
        if new.state is TransactionState.PREPARE_COMMIT:
            self.committed += 1
        elif new.state is TransactionState.PREPARE_ABORT:
            self.aborted += 1
        self._settle_outcome(term, coordinated)
        coordinated.wake()

    # -- outcomes --

    def _settle_outcome(self, term: TransactionTerm, coordinated: Coordinated) -> None:
        """Tell the partitions the outcome, if one is decided and not told, and write that it is told."""
        transaction = coordinated.current
        if transaction is not None and transaction.is_ending:
            self._markers.send(
                term,
                transaction,
                coordinated.offset,
                lambda: self._start_completion(term, transaction),
            )

    def _start_completion(self, term: TransactionTerm, transaction: Transaction) -> None:
        self._start_task(self._complete(term, transaction), f"end of a transaction of {transaction.transactional_id!r}")

    async def _complete(self, term: TransactionTerm, transaction: Transaction) -> None:
        """T11. Write that all markers are written. What fails is written again, until the term is over."""
        while not term.is_over:
            coordinated = term.ids[transaction.transactional_id]
            if coordinated.current is not transaction:
                return
            if not coordinated.is_changing:
                await self._write(term, complete(transaction, self._clock.wall_ms()))
                if coordinated.current is not transaction:
                    return
            await asyncio.sleep(RETRY_S)
            self._terms.of_key(transaction.transactional_id)  # looks whether the record is replicated meanwhile

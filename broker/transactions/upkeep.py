"""Aborts transactions that are open for too long, and forgets transactional ids that are not used.

Time during which the process was suspended counts for a transaction, as its producer could not know of it, and hardly
for an id (see `coordinating.ageing`). Each decision is made again from what the log has then, as a producer may end its
transaction meanwhile.
"""

import asyncio
import logging

from minibroker.broker.coordinating.ageing import steps_between_checks
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.transactions.coordinator import TransactionCoordinator
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.terms import Coordinated, TransactionTerm, TransactionTerms
from minibroker.broker.transactions.transaction import Decision, Transaction, forget, may_be_forgotten, time_out
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.transactions")


class TransactionUpkeep:
    def __init__(
        self, clock: Clock, config: BrokerConfig, terms: TransactionTerms, coordinator: TransactionCoordinator
    ) -> None:
        self._clock = clock
        self._terms = terms
        self._coordinator = coordinator
        self._timeouts_s = config.transaction_abort_timed_out_transaction_cleanup_interval_ms / 1_000
        self._expiration_s = config.transactional_id_expiration_ms / 1_000
        self._expirations_s = config.transaction_remove_expired_transaction_cleanup_interval_ms / 1_000
        self.timed_out = 0
        """Transactions aborted so far because they were open for too long."""
        self.expired = 0
        """Transactional ids forgotten so far."""

    # -- transactions that are open for too long --

    async def abort_late_transactions(self) -> None:
        """Check for them regularly, until cancelled."""
        while True:
            await asyncio.sleep(self._timeouts_s)
            for term, coordinated in await self._all():
                transaction = coordinated.current
                if transaction is not None and not term.is_over and self._is_late(coordinated):
                    await self._abort(transaction, coordinated)

    def _is_late(self, coordinated: Coordinated) -> bool:
        transaction = coordinated.current
        if transaction is None or transaction.state is not TransactionState.ONGOING:
            return False
        return self._clock.monotonic() - coordinated.open_since_s > transaction.timeout_ms / 1_000

    async def _abort(self, transaction: Transaction, coordinated: Coordinated) -> None:
        def decide(known: Transaction | None, fresh_id: int | None) -> Decision:
            if known is None or known is not coordinated.current or not self._is_late(coordinated):
                return ErrorCode.INVALID_TXN_STATE
            return time_out(known, fresh_id, self._clock.wall_ms())

        if await self._coordinator.change(transaction.transactional_id, decide) is ErrorCode.NONE:
            self.timed_out += 1
            logger.info(
                "transaction of %r is aborted: it was open for longer than its time-out of %d ms",
                transaction.transactional_id,
                transaction.timeout_ms,
            )

    # -- ids that are not used --

    async def forget_unused_ids(self) -> None:
        """Check for them regularly, until cancelled."""
        ageing = self._terms.ageing
        while True:
            for _ in range(steps_between_checks(self._expirations_s, self._expiration_s)):
                await asyncio.sleep(ageing.step_s)
                ageing.look()
            for term, coordinated in await self._all():
                transaction = coordinated.current
                if transaction is not None and not term.is_over and self._is_unused(coordinated):
                    await self._forget(transaction, coordinated)

    def _is_unused(self, coordinated: Coordinated) -> bool:
        known = coordinated.current
        is_old = self._terms.now_s - coordinated.unused_since_s >= self._expiration_s
        return is_old and known is not None and may_be_forgotten(known)

    async def _forget(self, transaction: Transaction, coordinated: Coordinated) -> None:
        def decide(known: Transaction | None, _: int | None) -> Decision:
            if known is None or known is not coordinated.current or not self._is_unused(coordinated):
                return ErrorCode.INVALID_TXN_STATE
            return forget(known, self._clock.wall_ms())

        if await self._coordinator.change(transaction.transactional_id, decide) is ErrorCode.NONE:
            self.expired += 1
            logger.info("transactional id %r was not used for long and is forgotten", transaction.transactional_id)

    async def _all(self) -> list[tuple[TransactionTerm, Coordinated]]:
        """Return all ids of this broker, collected in slices."""
        slices, found = Slices(), []
        for term in self._terms.loaded():
            found += [(term, coordinated) for coordinated in term.ids.values()]
            await slices.breathe()
        return found

"""The user's view of one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, ClassVar

from minibroker.client.cluster.calls import Calls, ends_with_its_client
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.context_managers import Asynchronous
from minibroker.client.errors import InvalidTransactionState
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata
from minibroker.client.other_names import NamesOfKafkasTransaction
from minibroker.client.transactions.states import Result
from minibroker.client.transactions.transactions import Transactions
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition


class Transaction(NamesOfKafkasTransaction, Asynchronous):
    """A transaction of a producer: `async with producer.transaction() as transaction`.

    All records that the producer sends within the block, by any task, belong to it. If the block ends, its records are
    flushed and the transaction is committed. If the block raises or is cancelled before its end, the transaction is
    aborted, and the exception propagates. A record is acknowledged before it is committed: a Delivery does not say that
    consumers with `isolation_level="read_committed"` will see the record.

    Leaving the block raises

    - TransactionAborted if `send`, `send_batch` or `send_offsets` has raised an error or a record has failed, even if
      the error was handled within the block, or if the coordinator has aborted the transaction because it took longer
      than `transaction_timeout_ms`. Nothing of the transaction is visible, and it may be repeated. Any error of
      minibroker that leaves the block becomes the cause of TransactionAborted, except errors of the program, which
      propagate unchanged: InvalidSetting, SerializationFailed, DeserializationFailed, Closed and other RuntimeErrors;
    - CommitOutcomeUnknown if the coordinator did not answer in time: see `was_committed`;
    - ProducerFenced if another producer has taken the transactional id, or an operator has aborted the transaction;
    - InvalidTransactionState, after an abort, if `send_offsets` was called without `await`.

    If the end of the block is cancelled while records are flushed, the transaction is aborted. While the commit is
    under way it cannot be recalled: CancelledError gets a note (`__notes__`) that the transaction may be committed, the
    log gets the same as a WARNING, and `was_committed` returns the outcome. A Transaction is used once.
    """

    _blocking: ClassVar[str] = "Producer.transaction of minibroker.sync"

    def __init__(
        self,
        runtime: ClientRuntime,
        transactions: Transactions,
        check_running: Callable[[], None],
        calls: Calls,
        not_running: Callable[[], MinibrokerError],
    ) -> None:
        self._runtime = runtime
        self._transactions = transactions
        self._check_running = check_running
        self._calls = calls
        self._not_running = not_running
        self._result: Result | None = None

    @property
    def has_begun(self) -> bool:
        return self._result is not None

    async def __aenter__(self) -> Transaction:
        await self._begin()
        return self

    @ends_with_its_client
    async def _begin(self) -> None:
        self._check_running()
        if self._result is not None:
            raise InvalidTransactionState("a transaction is used once: call producer.transaction() for the next one")
        self._result = await self._transactions.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                await self._transactions.commit()
            except asyncio.CancelledError as cancelled:
                self._add_note_to(cancelled)
                raise
        elif not self._runtime.is_gone(error):
            await self._transactions.abort(error)

    def _check_not_aborted(self) -> None:
        """Raises TransactionAborted if the transaction is known to be aborted, after the producer was closed."""
        if self._result is not None:
            self._transactions.check_not_aborted(self._result)

    def _add_note_to(self, interruption: BaseException) -> None:
        """Add a note to the exception that interrupts the end of the block, if the transaction may be committed."""
        note = None if self._result is None else self._result.note()
        if note is not None:
            interruption.add_note(note)

    def send_offsets(
        self, positions: Mapping[TopicPartition, int | OffsetAndMetadata], group: GroupMetadata
    ) -> Coroutine[Any, Any, None]:
        """Commit offsets of a consumer's group with the transaction: they become the group's committed offsets if it is
        committed, and are dropped if it is aborted. `positions` are as for `Consumer.commit`: each is the offset of the
        next record to read. `group` is `consumer.group_metadata()`.

        Raises CommitFailed if the group's coordinator refuses an offset, for instance because the consumer has lost its
        partitions; InvalidTransactionState outside of the block, TransactionAborted after a failure, ProducerFenced,
        InvalidSetting and Closed. After any error the transaction can only be aborted, also if the call was cancelled.
        """
        # No coroutine function: the transaction must know of a call that is not awaited.
        call = self._send_offsets(positions, group)
        self._transactions.offsets_called(call, self._result)
        return call

    @ends_with_its_client
    async def _send_offsets(
        self, positions: Mapping[TopicPartition, int | OffsetAndMetadata], group: GroupMetadata
    ) -> None:
        self._check_running()
        if self._result is None:
            raise InvalidTransactionState("the transaction has not begun: call this within its block")
        await self._transactions.send_offsets(positions, group, self._result)

    @ends_with_its_client
    async def was_committed(self) -> bool:
        """Return whether the transaction was committed (True) or aborted (False). If that is not known, ask the
        coordinator to commit, as before: it answers how the transaction has ended, or commits it now.

        Raises CommitOutcomeUnknown if there is no answer in time, ProducerFenced if the outcome can no longer be
        learned, InvalidTransactionState within the block, and Closed."""
        self._check_running()
        if self._result is None:
            raise InvalidTransactionState("the transaction has not begun")
        return await self._transactions.was_committed(self._result)

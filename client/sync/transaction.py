"""The blocking transaction. Its records are queued, so it ends in two steps: the loop takes them, then it commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import ClassVar, Protocol

from minibroker.client.context_managers import Blocking
from minibroker.client.errors import Closed, TransactionError
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata
from minibroker.client.other_names import NamesOfKafkasTransaction
from minibroker.client.sync.facade import Coroutines, T
from minibroker.client.sync.handover import Handover
from minibroker.client.transactions.transaction import Transaction as AsyncTransaction
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition


class _Call(Protocol):
    """`Facade._call`."""

    def __call__(self, make: Coroutines[T], serve: Callable[[], None] | None = None) -> T: ...


class Transaction(NamesOfKafkasTransaction, Blocking):
    """A transaction of a blocking producer: `with producer.transaction() as transaction`.

    As the asynchronous Transaction: all records that are sent within the block, by any thread, belong to it. The end of
    the block commits. An exception, KeyboardInterrupt included, aborts and propagates. Leaving the block raises
    TransactionAborted, CommitOutcomeUnknown and ProducerFenced. If KeyboardInterrupt comes while the commit is under
    way, it gets a note (`__notes__`) that the transaction may be committed, and `was_committed` returns the outcome.
    """

    _asynchronous: ClassVar[str] = "Producer.transaction of minibroker"

    def __init__(
        self, handover: Handover, call: _Call, serve: Callable[[], None], transaction: AsyncTransaction
    ) -> None:
        self._handover = handover
        self._call = call
        self._serve = serve
        self._transaction = transaction

    def __enter__(self) -> Transaction:
        try:
            self._call(partial(self._handover.begin, self._transaction))
        except BaseException as error:
            if self._transaction.has_begun:  # interrupted; `with` would not end it
                with suppress(MinibrokerError):
                    self._call(partial(self._handover.end, self._transaction, error))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._call(partial(self._handover.end, self._transaction, error), self._serve)
        except MinibrokerError as failure:
            if error is None and isinstance(failure, Closed):
                self._transaction._check_not_aborted()  # the producer was closed within the block
            if error is None or isinstance(failure, TransactionError):
                raise
            error.add_note(f"While the transaction was aborted: {failure}")
        except BaseException as interruption:
            if error is None:
                self._transaction._add_note_to(interruption)
            raise

    def send_offsets(self, positions: Mapping[TopicPartition, int | OffsetAndMetadata], group: GroupMetadata) -> None:
        self._call(partial(self._transaction.send_offsets, positions, group))

    def was_committed(self) -> bool:
        return self._call(self._transaction.was_committed)

    send_offsets.__doc__ = AsyncTransaction.send_offsets.__doc__
    was_committed.__doc__ = AsyncTransaction.was_committed.__doc__

"""The transactions of one producer: requests to the coordinators of its transactional id and of groups.

Partitions join a transaction by being written to: their leaders name them to the coordinator (KIP-890). So the
producer sends InitProducerId once, its batches, TxnOffsetCommit, and one EndTxn, whose answer grants the id and epoch
of the next transaction. A transaction in which nothing was sent ends without any request.

The end of a transaction runs in a task of its own. A caller that is cancelled stops waiting, but the end goes on, and
the next transaction waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from inspect import CORO_CLOSED, CORO_CREATED, getcoroutinestate
from typing import Any

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.coordinators import RETRIED, Coordinators, KeyType
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import (
    Closed,
    CommitFailed,
    CommitOutcomeUnknown,
    Interrupted,
    InvalidSetting,
    InvalidTransactionState,
    TransactionAborted,
    TransactionError,
)
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata, check_offsets
from minibroker.client.log import Logger
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import UNASSIGNED, Batch, Identity
from minibroker.client.producing.delivery import own_copy
from minibroker.client.settings import check_text
from minibroker.client.shown import shown
from minibroker.client.tasks import Pulse
from minibroker.client.transactions.states import (
    Outcome,
    Result,
    Step,
    TransactionState,
    TransactionStates,
    is_repeatable,
    may_have_timed_out,
)
from minibroker.protocol import messages as m
from minibroker.protocol.apis import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import NO_EPOCH, TopicPartition

logger = Logger("minibroker.client")

ABORT_WAIT_S = 2.0
"""The end of a block waits this long for the coordinator's answer to an abort, which then goes on in the background."""

Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]
S = TransactionState


def check_transactional_id(transactional_id: str, acks: object, is_idempotent: bool) -> None:
    """Raises InvalidSetting."""
    if not check_text("transactional_id", transactional_id):
        raise InvalidSetting("transactional_id", transactional_id, "give a name, or None for no transactions")
    if acks not in ("all", -1):
        rule = f'it needs acks="all", not {acks!r}: drop one of the two'
        raise InvalidSetting("transactional_id", transactional_id, rule)
    if not is_idempotent:
        rule = "it needs idempotence: drop enable_idempotence=False"
        raise InvalidSetting("transactional_id", transactional_id, rule)


class Transactions:
    """See the module. `flush` waits until all records have ended; `wake` lets the sender look for work."""

    def __init__(
        self,
        runtime: ClientRuntime,
        accumulator: Accumulator,
        transactional_id: str,
        *,
        timeout_s: float,
        max_block_s: float,
        flush: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self.transactional_id = transactional_id
        self._runtime = runtime
        self._accumulator = accumulator
        self._timeout_s = timeout_s
        self._max_block_s = max_block_s
        self._patience_s = max(timeout_s, max_block_s)
        self._flush = flush
        self._wake = wake
        self._coordinators = Coordinators(runtime, Purpose.COORDINATOR, KeyType.TRANSACTION)
        self._group_coordinators = Coordinators(runtime, Purpose.COORDINATOR)
        self._states = TransactionStates(transactional_id)
        self._current: Result | None = None
        """The result of the transaction whose block is running."""
        self._is_beginning = False
        self._left = Pulse()
        """Beats when a block was left."""
        self._is_closed = False
        self._ending: asyncio.Task[None] | None = None
        self._trouble: MinibrokerError | None = None
        """Why the latest request had no answer in time."""
        self._must_abandon = False
        self._has_sent_offsets = False
        self._offset_calls: list[Coroutine[Any, Any, None]] = []
        """Calls of `send_offsets` in the present block. Those that have ended are dropped at the next one."""
        self._sending_offsets = 0
        """The number of these calls that are under way."""
        self._offsets_sent = Pulse()
        """Beats when one of them has ended."""
        self._begun_at = self._failed_at = 0.0
        accumulator.on_failed = self._record_failed

    # -- beginning --

    async def initialize(self) -> None:
        """T1. Get a producer id and epoch, which fences every earlier producer with the transactional id and aborts its
        transaction. Raises BrokerError, NetworkError."""
        response = await self._init(None)
        code = error_of(response.error_code)
        if code is not ErrorCode.NONE:
            starting = f"starting the producer with transactional id {shown(self.transactional_id)}"
            if code is ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                starting += f" and transaction_timeout_ms={self._timeout_s * 1_000:.0f}"
            raise BrokerError(code, starting)
        identity = Identity(response.producer_id, response.producer_epoch)
        self._states.initialized(identity)
        self._accumulator.begin_epoch(identity)

    async def begin(self) -> Result:
        """Begin a transaction, after the end of the previous one. Raises InvalidTransactionState, ProducerFenced,
        CommitOutcomeUnknown, and the last error if the previous abort was not answered."""
        if self._current is not None or self._is_beginning:
            raise InvalidTransactionState(
                f"a transaction of {shown(self.transactional_id)} is open already, perhaps in another task or thread: "
                "leave its block before the next one begins, or use one producer for each"
            )
        self._is_beginning = True
        try:
            await self._finish()
        finally:
            self._is_beginning = False
        self._states.begins()
        self._has_sent_offsets = self._accumulator.has_sent = self._must_abandon = False
        self._offset_calls.clear()
        self._begun_at = self._failed_at = self._runtime.clock.monotonic()
        self._current = self._states.result
        return self._current

    # -- within --

    def check_open(self, transaction: Result | None = None) -> None:
        """Check that records may be added, or offsets to this transaction. Raises
        InvalidTransactionState, TransactionAborted, ProducerFenced."""
        states = self._states
        if states.state is S.IN_TRANSACTION and (transaction is None or transaction is self._current):
            return
        if states.fatal is not None:
            raise own_copy(states.fatal)
        if states.state is S.ABORTABLE_ERROR:
            raise self._error()
        raise InvalidTransactionState(
            f"no transaction of {shown(self.transactional_id)} is open: send within `async with "
            "producer.transaction():`"
            if transaction is None
            else f"this transaction of {shown(self.transactional_id)} is not open: use it within its block"
        )

    def _record_failed(self, batch: Batch, error: MinibrokerError) -> None:
        where = batch.topic if batch.partition == UNASSIGNED else f"{batch.topic}-{batch.partition}"
        self.failed(error, f"a record of {where}")

    def failed(self, error: BaseException, where: str) -> None:
        """A part of the transaction has failed, so it cannot be committed any more, if the error counts."""
        if not isinstance(error, Exception):  # a cancellation, or KeyboardInterrupt
            error = Interrupted(f"it was interrupted by {type(error).__name__}")
        if self._states.failed(error, where):
            self._failed_at = self._runtime.clock.monotonic()
            self._must_abandon = True
            self._wake()

    def not_sent(self, error: BaseException, topic: object, transaction: Result | None = None) -> None:
        """`send` or `send_batch` raises this error, in the block of this transaction (None: the present one)."""
        if self._states.state is S.IN_TRANSACTION and transaction in (None, self._current):
            self.failed(error, f"a record for {topic}")

    @property
    def current(self) -> Result | None:
        """The result of the transaction whose block is running."""
        return self._current

    def before_sending(self) -> None:
        """Give up the records of a transaction that has failed."""
        if self._must_abandon:
            self._must_abandon = False
            self._accumulator.abandon(self._error())

    def offsets_called(self, call: Coroutine[Any, Any, None], transaction: Result | None) -> None:
        """`send_offsets` was called. The end of the block looks whether it was awaited."""
        if transaction is not None and transaction is self._current:
            self._offset_calls = [each for each in self._offset_calls if getcoroutinestate(each) != CORO_CLOSED]
            self._offset_calls.append(call)

    async def send_offsets(self, positions: Offsets, group: GroupMetadata, transaction: Result) -> None:
        """See `Transaction.send_offsets`."""
        self.check_open(transaction)
        self._sending_offsets += 1
        try:
            await self._send_offsets(positions, group)
        except BaseException as error:
            if transaction is self._current:
                self.failed(error, "send_offsets")
            raise
        finally:
            self._sending_offsets -= 1
            self._offsets_sent.notify()

    async def _send_offsets(self, positions: Offsets, group: GroupMetadata) -> None:
        offsets = check_offsets(positions)
        if not isinstance(group, GroupMetadata):
            raise InvalidSetting("group", group, "give consumer.group_metadata()")
        if not offsets:
            return
        self._has_sent_offsets = True
        errors = await self._commit_offsets(offsets, group)
        if errors:
            partition, error = next(iter(sorted(errors.items())))
            self.failed(error, f"the offset of {partition}")
            raise CommitFailed(group.group, errors)

    async def _commit_offsets(
        self, offsets: dict[TopicPartition, OffsetAndMetadata], group: GroupMetadata
    ) -> dict[TopicPartition, MinibrokerError]:
        """Return the partitions whose offsets were refused, and why."""
        identity = self._states.identity
        assert identity is not None
        topics: dict[str, list[t.TxnOffsetCommitPartition]] = {}
        for (topic, index), (offset, epoch, metadata) in offsets.items():
            committed = t.TxnOffsetCommitPartition(
                index, offset, NO_EPOCH if epoch is None else epoch, metadata or None
            )
            topics.setdefault(topic, []).append(committed)

        def numbered(attempt: Attempt) -> t.TxnOffsetCommitRequest:
            return t.TxnOffsetCommitRequest(
                self.transactional_id,
                group.group,
                *identity,
                [t.TxnOffsetCommitTopic(name, partitions) for name, partitions in topics.items()],
                group.generation_id,
                group.member_id,
                group.group_instance_id,
                attempt=attempt,
            )

        retries = self._runtime.retries(self._patience_s, f"send_offsets of group {group.group}")
        last_look_s = self._patience_s - self._max_block_s  # for topics that do not exist, as for records
        while True:
            try:
                answered = await self._group_coordinators.change(
                    group.group, TXN_OFFSET_COMMIT, numbered, code_of=_code_to_retry, timeout_s=retries.remaining_s
                )
            except (BrokerError, NetworkError, InvalidMessage) as error:
                return dict.fromkeys(offsets, error)
            codes = {
                TopicPartition(topic.name, partition.partition_index): error_of(partition.error_code)
                for topic in answered.response.topics
                for partition in topic.partitions
            }
            found = {partition: codes.get(partition, ErrorCode.UNKNOWN_SERVER_ERROR) for partition in offsets}
            refused = {partition: code for partition, code in found.items() if code is not ErrorCode.NONE}
            errors = _offset_errors(refused, offsets)
            if not errors or any(not ERRORS[code].retriable for code in refused.values()):
                return errors
            has_looked = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION in refused.values() and retries.remaining_s <= last_look_s
            if has_looked or not await retries.pause(next(iter(errors.values()))):
                limit = "transaction_timeout_ms" if self._timeout_s > self._max_block_s else "max_block_ms"
                limit = "max_block_ms" if has_looked else limit
                waited_s = self._patience_s - retries.remaining_s
                return _offset_errors(refused, offsets, f", after {waited_s:.1f} s ({limit})")

    # -- ending --

    async def commit(self) -> None:
        """T7. Wait for all records, and commit. Does nothing after `prepare`. Raises TransactionAborted,
        CommitOutcomeUnknown, ProducerFenced."""
        states = self._states
        try:
            await self._end_records()
            if states.state is S.PREPARED:
                return
            if states.state is S.COMMITTING:
                await self._ask_to_commit()
            elif states.state is S.ABORTABLE_ERROR:
                await self._abort()
            self._accumulator.take_failures()  # the error below reports them
            if states.result.outcome is not Outcome.COMMITTED:
                raise self._error()
        finally:
            self._leave()

    async def _ask_to_commit(self) -> None:
        try:
            await self._end()
        except asyncio.CancelledError:  # it cannot be recalled
            result = self._states.result
            result.outcome = Outcome.UNKNOWN if result.outcome is Outcome.OPEN else result.outcome
            if (note := result.note()) is not None:
                logger.warning("%s: %s", self._runtime.connections.client_id, note)
            raise

    async def prepare(self) -> Identity | None:
        """Wait for all records, and leave the transaction open, so that another process may end it under the identity
        that is returned (`prepared`). None: nothing was sent, so there is nothing to end. The producer can only be
        closed after that. Raises TransactionAborted, ProducerFenced."""
        self.check_open()
        await self._end_records()
        if self._states.state is not S.COMMITTING:
            raise self._error()
        return self._states.prepares() if self._accumulator.has_sent or self._has_sent_offsets else None

    async def _end_records(self) -> None:
        """Take no more records for the transaction, and wait until all have ended."""
        if self._states.state is not S.IN_TRANSACTION:
            return
        self._states.commits()
        self._accumulator.close_batches()
        try:
            self._check_offsets_awaited()
            while self._sending_offsets:
                await self._offsets_sent.wait()
            await self._flush()
        except InvalidTransactionState:
            await self._abort("send_offsets was called without `await`")
            raise
        except BaseException:  # cancelled
            await self._abort("its end was cancelled before the commit")
            raise

    def _check_offsets_awaited(self) -> None:
        if any(getcoroutinestate(call) == CORO_CREATED for call in self._offset_calls):
            raise InvalidTransactionState(
                f"send_offsets was called without `await`: a transaction of {shown(self.transactional_id)} was "
                "aborted, since its records would be committed without the offsets. Write `await "
                "transaction.send_offsets(...)`"
            )

    async def abort(self, error: BaseException) -> None:
        """Give up all records, and abort, as the block was left by this error. Raises TransactionAborted or
        ProducerFenced from it if it `is_repeatable`."""
        try:
            if is_repeatable(error) and self._states.state is not S.PREPARED:
                await self._abort("a call within its block", error)
                raise self._error() from error
            await self._abort(f"its block was left by {type(error).__name__}")
        finally:
            self._leave()

    def _leave(self) -> None:
        for call in self._offset_calls:
            if getcoroutinestate(call) == CORO_CREATED:
                call.close()  # Python need not warn
        self._offset_calls.clear()
        self._current = None
        self._left.notify()

    async def _abort(self, why: str = "", cause: Exception | None = None) -> None:
        states = self._states
        if states.state in (S.IN_TRANSACTION, S.COMMITTING, S.ABORTABLE_ERROR):
            states.aborts(why, cause)
            self._must_abandon = False
            self._accumulator.abandon(self._error())
            self._wake()
            await self._end(ABORT_WAIT_S)
        self._accumulator.take_failures()
        await asyncio.sleep(0)  # `on_delivery` is called now

    async def _end(self, wait_s: float | None = None) -> None:
        """Ask the coordinator to end the transaction, and wait for its answer."""
        states = self._states
        if not self._accumulator.has_sent and not self._has_sent_offsets:
            states.ended(Outcome.COMMITTED if states.state is S.COMMITTING else Outcome.ABORTED, None)
            return
        if self._ending is None or self._ending.done():
            if self._is_closed:
                return
            self._ending = self._runtime.tasks.start(self._ask_to_end(), "end of a transaction")
        await asyncio.wait([self._ending], timeout=wait_s)

    async def _ask_to_end(self) -> None:
        states = self._states
        identity = states.identity
        assert identity is not None
        try:
            while states.has_to_end:
                step = states.next_step()
                response: m.InitProducerIdResponse | t.EndTxnResponse
                if step is Step.RECOVER:
                    response, in_doubt = await self._init(identity), False
                else:
                    request = t.EndTxnRequest(self.transactional_id, *identity, step is Step.COMMIT)
                    answered = await self._coordinators.request(
                        self.transactional_id, END_TXN, request, code_of=_code_of, timeout_s=self._patience_s
                    )
                    # A coordinator that loses its leadership during a write answers NOT_COORDINATOR, but the write may
                    # survive. So any earlier attempt is in doubt.
                    response, in_doubt = answered.response, answered.last_error is not None
                code = error_of(response.error_code)
                logger.debug("%s: %s: %s", self._runtime.connections.client_id, step.value, code.name)
                states.answered(step, code, Identity(response.producer_id, response.producer_epoch), in_doubt)
                if states.state is S.ABORTABLE_ERROR:
                    self._failed_at = self._runtime.clock.monotonic()
        except (NetworkError, BrokerError, InvalidMessage) as error:
            self._trouble = error
            states.unanswered()
        except asyncio.CancelledError:
            states.unanswered()
            raise
        if states.state is S.READY and states.identity is not None:
            self._accumulator.begin_epoch(states.identity)

    async def _init(self, identity: Identity | None) -> m.InitProducerIdResponse:
        """InitProducerId, as a new producer, or as the one that has this identity."""
        own = identity or (t.NO_PRODUCER_ID, t.NO_PRODUCER_EPOCH)
        timeout_ms = round(self._timeout_s * 1_000)
        answered = await self._coordinators.change(
            self.transactional_id,
            INIT_PRODUCER_ID,
            lambda attempt: m.InitProducerIdRequest(self.transactional_id, timeout_ms, *own, attempt),
            code_of=_code_of,
            timeout_s=self._patience_s,
        )
        return answered.response

    async def _finish(self) -> None:
        """Wait until the latest transaction has ended. Raises as `begin`."""
        states = self._states
        if states.state.is_ending:
            was_unknown = states.state is S.COMMIT_UNKNOWN
            await self._end()
            if was_unknown and states.result.outcome is Outcome.ABORTED:
                logger.warning(
                    "%s: a transaction whose commit was not answered in time was aborted: %s",
                    self._runtime.connections.client_id,
                    states.cause,
                )
        if states.fatal is not None:
            raise own_copy(states.fatal)
        if states.state is S.COMMIT_UNKNOWN:
            raise self._error()
        if states.state.is_ending:
            raise own_copy(self._trouble or Closed("the producer is closed"))

    async def was_committed(self, result: Result) -> bool:
        """See `Transaction.was_committed`."""
        if result.outcome is Outcome.UNKNOWN:
            await self._finish()
        if result.outcome is Outcome.OPEN:
            raise InvalidTransactionState("the transaction is open: ask after the end of its block")
        return result.outcome is Outcome.COMMITTED

    async def close(self) -> None:
        """Abort an open transaction, and wait for one that is being committed, or for ABORT_WAIT_S."""
        while self._states.state is S.COMMITTING and self._current is not None:
            await self._left.wait()
        if self._states.state in (S.IN_TRANSACTION, S.ABORTABLE_ERROR):
            await self._abort("the producer was closed")
        elif self._ending is not None and not self._ending.done():
            await asyncio.wait([self._ending], timeout=ABORT_WAIT_S)
        self._is_closed = True

    def check_not_aborted(self, result: Result) -> None:
        """Raises TransactionAborted or ProducerFenced if this is the last transaction, and was aborted."""
        if result is self._states.result and result.outcome is Outcome.ABORTED:
            raise self._error()

    def _error(self) -> TransactionError:
        """Return the error for a transaction that is not, or may not be, committed."""
        states = self._states
        if states.fatal is not None:
            fenced = own_copy(states.fatal)
            assert isinstance(fenced, TransactionError)
            return fenced
        if states.result.outcome is Outcome.UNKNOWN:
            trouble = "the producer was closed" if self._trouble is None else str(self._trouble)
            return CommitOutcomeUnknown(self.transactional_id, self._patience_s, trouble)
        what, cause = states.cause_at, states.cause
        limit = f"transaction_timeout_ms={self._timeout_s * 1_000:g}"
        if cause is not None and may_have_timed_out(cause) and self._failed_at - self._begun_at >= self._timeout_s:
            # Not the broker's text, which names other causes.
            code = f" ({cause.code.name})" if isinstance(cause, BrokerError) else ""
            aborted = f"it was open for longer than {limit}, so its coordinator aborted it"
            remedy = "Keep transactions shorter, or raise transaction_timeout_ms"
            what = f"{aborted}, and then {what} has failed{code}. {remedy}"
            if isinstance(cause, BrokerError):
                cause = BrokerError(cause.code, f"{aborted}. {remedy}", is_complete=True)
        elif cause is not None:
            what = f"{what} has failed: {cause}"
            if may_have_timed_out(cause):
                what += f" (perhaps its coordinator has aborted it: {limit})"
        return TransactionAborted(self.transactional_id, what, cause)


def _offset_errors(
    refused: Mapping[TopicPartition, ErrorCode], offsets: Mapping[TopicPartition, OffsetAndMetadata], after: str = ""
) -> dict[TopicPartition, MinibrokerError]:
    return {
        partition: BrokerError(code, f"offset {offsets[partition].offset} of {partition}{after}")
        for partition, code in refused.items()
    }


def _code_of(response: m.InitProducerIdResponse | t.EndTxnResponse) -> int:
    return response.error_code


def _code_to_retry(response: t.TxnOffsetCommitResponse) -> int:
    """Return an error that concerns the whole request, although TxnOffsetCommit reports it for each partition."""
    codes = [partition.error_code for topic in response.topics for partition in topic.partitions]
    return next((code for code in codes if code in RETRIED), ErrorCode.NONE)

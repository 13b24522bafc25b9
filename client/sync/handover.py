"""How a blocking producer hands its records over to the event loop.

The problem: `send` runs for every record, in any thread, and the asynchronous `send` belongs to the loop. A call into
the loop for each record would cost twenty times as much as sending the record.

The choice: `send` appends to a deque, which all threads can do without a lock, and wakes the loop only if it sleeps. A
task there passes the queued records in order to the asynchronous producer. The deque is bounded: beyond QUEUE_RECORDS,
or after a record of LARGE_BYTES, `send` waits until the task has caught up, and the task waits in `drain` while the
producer's buffer is full. So a caller is slowed down as by `await producer.drain()`.

`send` raises errors of its arguments itself (types, malformed headers). Errors that depend on the cluster or on a limit
are known only in the loop: such a record fails like one that a broker rejects, in its Delivery or in `flush`.

Rejected: a lock around the accumulator (see `background`). A buffer of columns for each thread: the records of a `send`
would not follow those of another thread that it knows to be sent. Counting the queued bytes: without a lock the count
would be wrong, and records that are not large cannot be many bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from minibroker.client.errors import (
    ApiTimedOut,
    AuthenticationFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    DeliveryFailed,
    FailedRecord,
    ForkedClient,
    TransactionAborted,
)
from minibroker.client.log import Logger
from minibroker.client.producer import CANCELLED_FLUSH_S, not_acknowledged
from minibroker.client.producer import Producer as AsyncProducer
from minibroker.client.producing import delivery as asynchronous
from minibroker.client.producing.arguments import Headers, check_partition, check_timestamp_ms, checked_headers
from minibroker.client.producing.columns import Column
from minibroker.client.producing.delivery import BatchMetadata, OnDelivery, RecordMetadata, check_on_delivery, own_copy
from minibroker.client.settings import check_ms
from minibroker.client.sync.background import Background
from minibroker.client.sync.facade import Ending, T
from minibroker.client.tasks import Pulse
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import Header

logger = Logger("minibroker.client", defers=True)

QUEUE_RECORDS = 4_096
LARGE_BYTES = 16 * 1024
CHUNK_RECORDS = 1_024
"""Records that are taken at a time. The loop has other work in between."""
LOOK_AGAIN_S = 0.01
"""Look for room in the buffer at least this often."""

_Columns = tuple[Column, Column | None, list[int] | None, int | None]
"""The arguments of `send_batch`: values, keys, timestamps, partition."""
_Ended = tuple[OnDelivery, RecordMetadata | None, MinibrokerError | None]


class Unusual(NamedTuple):
    """The arguments of `send` that few records have."""

    partition: int | None
    timestamp_ms: int | None
    headers: Sequence[Header] | None
    on_delivery: OnDelivery | None


class Delivery(msgspec.Struct, gc=False, eq=False):
    """The outcome of a record, for any thread. If no thread has called `result` when the record fails, `flush`, `drain`
    or `close` reports the failure."""

    # The garbage collector need not track it (gc=False): objects that it refers to refer back only while it is queued.

    _handover: Handover
    _topic: str
    _value: bytes | None
    _key: bytes | None
    _unusual: Unusual | None
    _sent: asynchronous.Delivery | None = None
    """None: the loop has not taken the record yet, or could not take it."""
    _error: MinibrokerError | None = None
    """Why the loop could not take it."""
    _is_told: bool = False
    """The error was reported to a caller."""

    def done(self) -> bool:
        """Return whether the record is acknowledged or has failed, so that `result` does not wait."""
        return self._error is not None or (self._sent is not None and self._sent.done())

    def result(self, timeout_ms: float | None = None) -> RecordMetadata:
        """Wait until the record is acknowledged, and return its place.

        Raises BrokerError, DeliveryTimedOut or Closed if it failed; ApiTimedOut after `timeout_ms`, and then it may be
        called again; ForkedClient. May be called any number of times, by several threads.
        """
        if not self.done():
            self._handover.wait_for(self, timeout_ms)
        if self._error is not None:
            self._is_told = True
            self._handover.forget(self)
            raise own_copy(self._error)
        assert self._sent is not None
        return _outcome(self._sent)

    def _put(self, producer: AsyncProducer) -> None:
        """Put the record into a batch, in the loop."""
        assert self._unusual is not None
        partition, timestamp_ms, headers, on_delivery = self._unusual
        self._sent = producer.send(
            self._topic,
            self._value,
            key=self._key,
            partition=partition,
            timestamp_ms=timestamp_ms,
            headers=headers,
            on_delivery=None if on_delivery is None else partial(self._handover.note_ended, on_delivery),
        )

    def __repr__(self) -> str:
        if self._sent is not None:
            return repr(self._sent)
        return f"<Delivery {self._topic} {'waiting' if self._error is None else f'failed: {self._error}'}>"


class BatchDelivery:
    """The outcome of a `send_batch`, for any thread. If no thread has called `result` when records fail, `flush`,
    `drain` or `close` reports the failures."""

    __slots__ = ("_columns", "_error", "_handover", "_is_given_up", "_sent", "_topic")

    def __init__(self, handover: Handover, topic: str, columns: _Columns) -> None:
        self._handover = handover
        self._topic = topic
        self._columns: _Columns | None = columns
        self._sent: asynchronous.BatchDelivery | None = None
        self._error: Exception | None = None
        """Why the loop could not take the records; `send_batch` raises it."""
        self._is_given_up = False
        """The caller was interrupted, so the loop must not take the records."""

    def done(self) -> bool:
        """Return whether every record is acknowledged or has failed, so that `result` does not wait."""
        return self._error is not None or (self._sent is not None and self._sent.done())

    def result(self, timeout_ms: float | None = None) -> BatchMetadata:
        """Wait until all records are acknowledged, and return their places.

        Raises BatchDeliveryFailed if any failed, which has the failed records and the places of the others; ApiTimedOut
        after `timeout_ms`, and then it may be called again; ForkedClient.
        """
        if not self.done():
            self._handover.wait_for(self, timeout_ms)
        assert self._sent is not None
        return _outcome(self._sent)

    def _put(self, producer: AsyncProducer) -> None:
        """Put the records into batches, in the loop."""
        if not self._is_given_up:
            assert self._columns is not None
            self._sent = producer.send_batch(self._topic, *self._columns)
            self._columns = None

    def __repr__(self) -> str:
        return f"<BatchDelivery {self._topic} waiting>" if self._sent is None else repr(self._sent)


def _outcome(sent: Coroutine[Any, Any, T]) -> T:
    """Return or raise the result of an asynchronous delivery that has ended."""
    try:
        sent.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it had ended")


class _Waiting(NamedTuple):
    """A thread that waits for room."""

    most: int
    """The thread continues when no more records than this are queued."""
    turn: SimpleQueue[None]


class Handover(Ending):
    """Passes records from threads to the loop. See the module."""

    def __init__(self, producer: AsyncProducer, max_block_s: float) -> None:
        super().__init__(producer)
        self._producer = producer
        producer._repeats_when_full = True
        self._transactions = producer._transactions
        self._max_block_s = max_block_s
        self.background: Background
        self._is_open = False
        self.takes_records = False
        """False: `send` must find out why."""
        self.queue: deque[Delivery | BatchDelivery] = deque()
        self.is_awake = False
        """The task will look at the queue once more, and need not be woken."""
        self._news = asyncio.Event()
        self._progress = Pulse()
        """Notifies coroutines that wait until records are taken."""
        self._task: asyncio.Task[None] | None = None
        self._taken = 0
        self._waiting: deque[_Waiting] = deque()
        """In the order of their arrival."""
        self._refused: dict[int, Delivery] = {}
        """Records that could not be taken and whose error was not reported, by `id`."""
        self._failures: list[FailedRecord] = []
        """The failures that `drain` raised. No more records are taken until they are reported, unless a thread waits
        for a result, which does not report them."""
        self._waiting_for_results = 0
        """The number of threads that wait for a result."""
        self.ended: deque[_Ended] = deque()
        """Arguments of callbacks, in the order in which the records ended."""
        self._serving = RLock()
        """Held by the thread that runs callbacks, which may use the producer."""
        self._untold = 0
        """The number of records whose failure cannot be reported, since the body of `with` was interrupted."""

    @property
    def is_open(self) -> bool:
        """Whether the producer is open. A producer with a `transactional_id` takes records only in transactions."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self.takes_records = is_open and self._transactions is None

    # -- in the threads of callers --

    def check_transaction(self) -> None:
        """Raises InvalidTransactionState outside of a transaction, and ProducerFenced."""
        if self._transactions is not None:
            self._transactions.check_open()

    def not_sent(self, error: BaseException, topic: object) -> None:
        """`send` or `send_batch` raises this error. The loop learns of it before the end of the block."""
        if self._transactions is not None:
            transaction = self._transactions.current
            with suppress(Closed, ForkedClient):  # it is aborted then
                self.background.soon(partial(self._transactions.not_sent, error, topic, transaction))

    def wake(self) -> None:
        """Wake the task after something was added to the queue. Raises Closed."""
        self.is_awake = True
        self.background.soon(self._news.set)

    @property
    def must_report(self) -> bool:
        return bool(self._failures)

    def wait_for_room(self, most: int) -> None:
        """Wait until at most `most` records are queued. Raises BufferFull after `max_block_ms`, DeliveryFailed, Closed,
        ForkedClient."""
        clock = self._producer._runtime.clock
        deadline = clock.monotonic() + self._max_block_s
        while self.is_open and not self._failures and len(self.queue) > most:
            waiting = _Waiting(most, SimpleQueue())
            self._waiting.append(waiting)
            # The records that are queued now are taken after this, and that wakes the threads that wait.
            if self.is_open and not self._failures and len(self.queue) > most:
                try:
                    waiting.turn.get(timeout=max(0.0, deadline - clock.monotonic()))
                except Empty:
                    raise self._no_room() from None
        if self._failures:
            self.background.call(self._report)

    def wait_until_taken(self, batch: BatchDelivery) -> None:
        """Wait until the loop has taken the batch. Raises as the asynchronous `send_batch`, BufferFull after
        `max_block_ms`, DeliveryFailed, Closed, ForkedClient: then the records are not sent. Only an interruption may
        come after they were taken."""

        async def wait() -> None:
            async with asyncio.timeout(self._max_block_s):
                while batch._sent is None and batch._error is None:
                    await self._report()
                    await self._progress.wait()

        try:
            self.background.call(wait)
        except BaseException as error:
            batch._is_given_up = True
            if batch._sent is None:
                if isinstance(error, TimeoutError):
                    raise self._no_room() from None
                raise
            if not isinstance(error, Exception):
                raise
            if isinstance(error, DeliveryFailed):  # failures of other records, which the next call reports
                self.background.soon(partial(self._put_back, error.failures))
        if batch._error is not None:
            raise batch._error

    def _no_room(self) -> BufferFull:
        return BufferFull(
            f"no room in the buffer for {self._max_block_s:g} s (max_block_ms): {self._producer._accumulator.used} "
            "bytes of records are not acknowledged. They are still being sent: try again, or raise max_block_ms"
        )

    def serve(self, *, is_waiting: bool) -> None:
        """Call the callbacks of records that have ended. If another thread is doing that, wait for it, or leave it to
        that thread."""
        if not self._serving.acquire(blocking=is_waiting):
            return
        try:
            while self.ended:
                on_delivery, metadata, error = self.ended.popleft()
                try:
                    on_delivery(metadata, error)
                except Exception:
                    # The caller cannot handle it, and may have sent other records.
                    logger.exception("on_delivery=%r raised", on_delivery)
        finally:
            self._serving.release()

    def wait_for(self, delivery: Delivery | BatchDelivery, timeout_ms: float | None) -> None:
        """Wait for the outcome. Raises ApiTimedOut, Closed, ForkedClient."""
        timeout_s = None if timeout_ms is None else check_ms("timeout_ms", timeout_ms)
        so_far = delivery._topic

        async def wait() -> None:
            nonlocal so_far
            self._waiting_for_results += 1
            self._progress.notify()
            try:
                async with asyncio.timeout(timeout_s):
                    while not delivery.done():
                        if delivery._sent is None:
                            await self._progress.wait()
                        else:
                            with suppress(MinibrokerError):  # it is raised in the caller's thread
                                await delivery._sent
            except TimeoutError:
                if delivery._sent is not None:
                    so_far = self._producer._failed_so_far(delivery._sent) or so_far
                raise
            finally:
                self._waiting_for_results -= 1

        try:
            self.background.call(wait)
        except TimeoutError as error:
            what = f"not acknowledged within {timeout_ms:g} ms, and still being sent"
            raise ApiTimedOut(f"{what}: {so_far}") from error
        except Closed:
            if not delivery.done():
                raise

    def forget(self, told: Delivery) -> None:
        """Forget a record that could not be taken, since its error was reported."""
        self._refused.pop(id(told), None)

    def unacknowledged(self) -> int:
        """Return the number of records. In another thread than the loop's, one that the loop takes at this moment may
        count twice, and a batch that is just being sent not at all."""
        untold = sum(not delivery._is_told for delivery in list(self._refused.values()))
        return len(self.queue) + len(self._failures) + untold + self._producer._accumulator.unacknowledged()

    # -- in the loop --

    async def start(self) -> None:
        await self._producer.start()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="hand-over")
        self.is_open = True

    async def _run(self) -> None:
        queue, drain = self.queue, self._producer.drain
        while True:
            while queue:
                has_room = self._take(min(len(queue), CHUNK_RECORDS))
                try:
                    await drain()
                except DeliveryFailed as error:
                    self._failures += error.failures
                    self._tell()
                    while self._failures and not self._waiting_for_results:
                        await self._progress.wait()
                except (BufferFull, Closed, ClientCrashed, AuthenticationFailed):
                    pass  # callers have their own time limits, and the next `send` raises
                if not has_room:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await self._producer._progress.wait()
            self.is_awake = False
            if queue:  # filled since the last look
                self.is_awake = True
            else:
                await self._news.wait()
                self._news.clear()

    def _take(self, count: int) -> bool:
        """Take the first `count` records of the queue. Return False if the buffer is full before that."""
        send, queue = self._producer.send, self.queue
        has_room = True
        for number in range(count):
            record = queue[0]  # until the producer has it: `unacknowledged` counts it in another thread
            try:
                if isinstance(record, Delivery) and record._unusual is None:
                    record._sent = send(record._topic, record._value, key=record._key)
                    record._value = record._key = None  # the batch has them
                else:
                    record._put(self._producer)
            except BufferFull as error:
                if self._producer._accumulator.used:
                    count, has_room = number, False
                    break
                if self._transactions is not None:
                    self._transactions.not_sent(error, record._topic)
                self._refuse(record, error)
            except (MinibrokerError, TypeError, ValueError) as error:
                self._refuse(record, error)
            queue.popleft()
        self._taken += count
        self._tell()
        return has_room

    def note_ended(
        self, on_delivery: OnDelivery, metadata: RecordMetadata | None, error: MinibrokerError | None
    ) -> None:
        self.ended.append((on_delivery, metadata, error))
        self.background.poke()

    def _refuse(self, record: Delivery | BatchDelivery, error: MinibrokerError | TypeError | ValueError) -> None:
        if isinstance(error, ClientCrashed | AuthenticationFailed):
            self.is_open = False
        if isinstance(record, BatchDelivery):
            record._error = error
            return
        assert isinstance(error, MinibrokerError), f"{record!r} was not checked in its caller's thread: {error!r}"
        record._error = own_copy(error)
        if record._unusual is not None and record._unusual.on_delivery is not None:
            record._is_told = True
            self.note_ended(record._unusual.on_delivery, None, error)
        else:
            self._refused[id(record)] = record

    def _refuse_all(self, error: MinibrokerError) -> None:
        self.is_open = self.is_awake = False
        self._refuse_queued(error)

    def _refuse_queued(self, error: MinibrokerError) -> None:
        while self.queue:
            self._refuse(self.queue.popleft(), error)
            self._taken += 1
        self._tell()

    def _tell(self) -> None:
        """Wake the threads and coroutines that wait: records were taken, or must be reported."""
        self._progress.notify()
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if len(self.queue) <= waiting.most or self._failures or not self.is_open:
                waiting.turn.put(None)
            else:
                self._waiting.append(waiting)

    def _take_failures(self) -> list[FailedRecord]:
        """Return the failures that were not reported."""
        failures = self._failures
        self._failures = []
        failures += [_failure(record) for record in list(self._refused.values()) if not record._is_told]
        self._refused.clear()
        if failures:
            self._progress.notify()
        return failures

    def _put_back(self, failures: Sequence[FailedRecord]) -> None:
        """Keep failures whose caller was interrupted before it got them."""
        self._failures[:0] = failures

    async def _report(self) -> None:
        if failures := self._take_failures():
            raise DeliveryFailed(failures)

    async def begin(self, transaction: Transaction) -> None:
        """Begin a transaction, and take records for it."""
        await transaction.__aenter__()
        self.takes_records = self.is_open

    async def end(self, transaction: Transaction, error: BaseException | None) -> None:
        """End a transaction, after its queued records were taken. `error` has ended its block."""
        self.takes_records = False
        try:
            if error is None:
                await self._take_queued()
        except BaseException as cancelled:
            error = cancelled
            raise
        finally:
            if error is not None and self._transactions is not None:
                why = f"its block was left by {type(error).__name__}"
                self._refuse_queued(TransactionAborted(self._transactions.transactional_id, why))
            try:
                await transaction.__aexit__(None if error is None else type(error), error, None)
            finally:
                self._take_failures()  # the outcome of the transaction is what counts

    async def _take_queued(self) -> list[FailedRecord]:
        """Wait until all records that are queued now were taken. Return failures that were not reported."""
        failures: list[FailedRecord] = []
        target = self._taken + len(self.queue)
        try:
            while self._taken < target:
                failures += self._take_failures()
                await self._progress.wait()
        except BaseException:  # interrupted
            self._put_back(failures)
            raise
        return failures

    async def flush(self) -> None:
        failures = await self._take_queued()
        try:
            try:
                await self._producer.flush()
            except DeliveryFailed as error:
                failures += error.failures
            failures += self._take_failures()
        except BaseException:  # interrupted
            self._put_back(failures)
            raise
        if failures:
            raise DeliveryFailed(failures)

    async def close(self) -> None:
        failures: list[FailedRecord] = []
        self.is_open = False
        try:
            while self.queue:
                failures += self._take_failures()
                await self._progress.wait()
        except BaseException:  # timed out or interrupted
            await self._give_up(self._producer._give_up)
            raise
        await self._end_task()
        try:
            await self._producer.close()
        except DeliveryFailed as error:
            failures += error.failures
        failures += self._take_failures()
        if failures:
            raise DeliveryFailed(failures)

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        elif isinstance(error, Exception):
            try:
                await self.close()
            except MinibrokerError as failure:
                error.add_note(f"While the producer was closed: {failure}")
        else:  # interrupted
            self.is_open = False
            try:
                async with asyncio.timeout(CANCELLED_FLUSH_S):
                    while self.queue:
                        self._untold += len(self._take_failures())
                        await self._progress.wait()
            except TimeoutError:
                pass
            finally:
                await self._give_up(self._producer._close_soon)

    async def _give_up(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the producer by `end`, and log the number of records that it did not get."""
        await self._end_task()
        self._refuse_all(Closed("the producer was closed before the record was sent"))
        left = self._untold + len(self._take_failures())
        try:
            await end()
        finally:
            if left:
                text = f"{self._producer!r} was interrupted: {not_acknowledged(left)}"
                logger.warning("%s", text)
                logger.resource_warning(text)

    async def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def finish(self) -> None:
        self._refuse_all(Closed("the producer was closed before the record was sent"))
        self._refused.clear()
        self.serve(is_waiting=True)


def _failure(record: Delivery) -> FailedRecord:
    partition, timestamp_ms, headers, _ = record._unusual or (None, None, None, None)
    assert record._error is not None
    return FailedRecord(
        record._topic,
        partition,
        record._key,
        record._value,
        -1 if timestamp_ms is None else timestamp_ms,
        headers or (),
        record._error,
    )


def checked(
    partition: int | None, timestamp_ms: int | None, headers: Headers | None, on_delivery: OnDelivery | None
) -> Unusual:
    if partition is not None:
        check_partition(partition)
    if timestamp_ms is not None:
        check_timestamp_ms(timestamp_ms)
    if on_delivery is not None:
        check_on_delivery(on_delivery)
    return Unusual(partition, timestamp_ms, None if headers is None else checked_headers(headers), on_delivery)

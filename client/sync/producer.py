"""The blocking producer.

The problem: `send` runs for every record, from any thread, and the asynchronous `send` belongs to the loop. To hand
each record over with a call of its own would cost twenty times what sending it costs.

The choice: `send` appends to a deque, which is safe in all threads without a lock, and wakes the loop only if it
sleeps. A task there takes what has gathered, in order, into the asynchronous producer. The deque is bounded: beyond
QUEUE_RECORDS, or after a record of LARGE_BYTES, `send` waits until the task has caught up, and that waits in `drain`
while the producer's buffer is full. So a caller is held back as by `await producer.drain()`.

What a caller did wrong by itself (types, a header that is none) raises in `send`. What the cluster or a limit has
against a record is known only in the loop: such a record fails as one does that a broker refuses, in its Delivery or in
`flush`.

Rejected: a lock around the accumulator (see `background`). A buffer of columns for each thread: the records of a
`send` are not in order with those that another thread was told of. Counting the queued bytes: without a lock it would
be wrong, and records that are not large cannot be many bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock
from types import TracebackType
from typing import Any, Literal, NamedTuple

import msgspec

from minibroker.client.errors import ApiTimedOut, BufferFull, ClientCrashed, Closed, DeliveryFailed, FailedRecord
from minibroker.client.log import Logger
from minibroker.client.producer import (
    CANCELLED_FLUSH_S,
    DEFAULT_PARTITIONER,
    check_partition,
    check_timestamp_ms,
    checked_headers,
    column_of,
    not_acknowledged,
)
from minibroker.client.producer import Producer as AsyncProducer
from minibroker.client.producing import delivery as asynchronous
from minibroker.client.producing.columns import ArrowArray, Column, as_bytes, checked_timestamps
from minibroker.client.producing.delivery import BatchMetadata, OnDelivery, RecordMetadata, check_on_delivery, own_copy
from minibroker.client.producing.partitioners import Partitioner, RecordPartitioner
from minibroker.client.serializers import SerializerChoice, choose_serializer, serialize
from minibroker.client.settings import check_ms, check_topic_name, knows_other_names
from minibroker.client.sync.background import Background
from minibroker.client.sync.facade import Ending, Facade, T, within
from minibroker.client.tasks import Pulse
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import Header

logger = Logger("minibroker.client", defers=True)

QUEUE_RECORDS = 4_096
LARGE_BYTES = 16 * 1024
CHUNK_RECORDS = 1_024
"""As many are taken at a time: the loop has other things to do every now and then."""
LOOK_AGAIN_S = 0.01
"""After so long the buffer may have room, whatever is heard."""

_Headers = Sequence[tuple[str, bytes | None]]
_Columns = tuple[Column, Column | None, list[int] | None, int | None]
"""What `send_batch` takes: values, keys, timestamps, partition."""
_Ended = tuple[OnDelivery, RecordMetadata | None, MinibrokerError | None]


class _Unusual(NamedTuple):
    """What few records have."""

    partition: int | None
    timestamp_ms: int | None
    headers: Sequence[Header] | None
    on_delivery: OnDelivery | None


class Delivery(msgspec.Struct, gc=False, eq=False):
    """What becomes of a record; any thread may ask. Not asking is no error: a record that fails while nobody has called
    `result` is reported by `flush`, `drain` or `close`."""

    # The garbage collector need not look at it (gc=False): what it refers to refers to it only while it is queued.

    _handover: Handover
    _topic: str
    _value: bytes | None
    _key: bytes | None
    _unusual: _Unusual | None
    _sent: asynchronous.Delivery | None = None
    """None: the loop has not taken the record yet, or could not."""
    _error: MinibrokerError | None = None
    """Why it could not."""
    _is_told: bool = False
    """Somebody has been told of that."""

    def done(self) -> bool:
        """Whether the record is acknowledged or has failed: then `result` returns, or raises, at once."""
        return self._error is not None or (self._sent is not None and self._sent.done())

    def result(self, timeout_ms: float | None = None) -> RecordMetadata:
        """Wait until the record is acknowledged: where it is.

        Raises BrokerError, DeliveryTimedOut or Closed if it failed; ApiTimedOut if neither happens within
        `timeout_ms`, and then it may be asked again; ForkedClient. May be called any number of times, by several
        threads.
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
        """In the loop: take it into a batch."""
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
    """What becomes of the records of a `send_batch`; any thread may ask. Not asking is no error: what fails while
    nobody has called `result` is reported by `flush`, `drain` or `close`."""

    __slots__ = ("_columns", "_error", "_handover", "_is_given_up", "_sent", "_topic")

    def __init__(self, handover: Handover, topic: str, columns: _Columns) -> None:
        self._handover = handover
        self._topic = topic
        self._columns: _Columns | None = columns
        self._sent: asynchronous.BatchDelivery | None = None
        self._error: Exception | None = None
        """Why they could not be taken: `send_batch` raises it."""
        self._is_given_up = False
        """Its caller was interrupted: they are not to be taken."""

    def done(self) -> bool:
        """Whether every record is acknowledged or has failed: then `result` returns, or raises, at once."""
        return self._error is not None or (self._sent is not None and self._sent.done())

    def result(self, timeout_ms: float | None = None) -> BatchMetadata:
        """Wait until all records are acknowledged: where they are.

        Raises BatchDeliveryFailed if any of them failed, which says which ones, and where the others are; ApiTimedOut
        if it takes longer than `timeout_ms`, and then it may be asked again; ForkedClient.
        """
        if not self.done():
            self._handover.wait_for(self, timeout_ms)
        assert self._sent is not None
        return _outcome(self._sent)

    def _put(self, producer: AsyncProducer) -> None:
        """In the loop: take them into batches."""
        if not self._is_given_up:
            assert self._columns is not None
            self._sent = producer.send_batch(self._topic, *self._columns)
            self._columns = None

    def __repr__(self) -> str:
        return f"<BatchDelivery {self._topic} waiting>" if self._sent is None else repr(self._sent)


def _outcome(sent: Coroutine[Any, Any, T]) -> T:
    """Of an asynchronous delivery that has ended."""
    try:
        sent.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it had ended")


class _Waiting(NamedTuple):
    """A thread that waits for room."""

    most: int
    """It goes on when no more records than that are queued."""
    turn: SimpleQueue[None]


class Handover(Ending):
    """Takes records from threads into the loop. See the module."""

    def __init__(self, producer: AsyncProducer, max_block_s: float) -> None:
        super().__init__(producer)
        self._producer = producer
        self._max_block_s = max_block_s
        self.background: Background
        self.is_open = False
        """False: `send` must look why."""
        self.queue: deque[Delivery | BatchDelivery] = deque()
        self.is_awake = False
        """The task will look at the queue once more, so nobody need wake it."""
        self._news = asyncio.Event()
        self._progress = Pulse()
        """For coroutines that wait until something is taken."""
        self._task: asyncio.Task[None] | None = None
        self._taken = 0
        self._waiting: deque[_Waiting] = deque()
        """In the order in which they came."""
        self._refused: dict[int, Delivery] = {}
        """Records that could not be taken, and nobody has been told, by `id`."""
        self._failures: list[FailedRecord] = []
        """What `drain` has said. Nothing more is taken until it is reported, but for those who wait for results, which
        do not report it."""
        self._waiting_for_results = 0
        """Threads that do."""
        self.ended: deque[_Ended] = deque()
        """What callbacks are to be told, in the order in which the records have ended."""
        self._serving = RLock()
        """Of the thread that calls them. It may use the producer meanwhile."""
        self._untold = 0
        """How many records have failed without anybody to tell, as the body of `with` was interrupted."""

    # -- in the threads of callers --

    def wake(self) -> None:
        """After something was added to the queue. Raises Closed."""
        self.is_awake = True
        self.background.soon(self._news.set)

    @property
    def must_report(self) -> bool:
        return bool(self._failures)

    def wait_for_room(self, most: int) -> None:
        """Until no more than `most` records are queued. Raises BufferFull after `max_block_ms`, DeliveryFailed, Closed,
        ForkedClient."""
        clock = self._producer._runtime.clock
        deadline = clock.monotonic() + self._max_block_s
        while self.is_open and not self._failures and len(self.queue) > most:
            waiting = _Waiting(most, SimpleQueue())
            self._waiting.append(waiting)
            # What is queued now will be taken after this, and then those that wait are told.
            if self.is_open and not self._failures and len(self.queue) > most:
                try:
                    waiting.turn.get(timeout=max(0.0, deadline - clock.monotonic()))
                except Empty:
                    raise self._no_room() from None
        if self._failures:
            self.background.call(self._report)

    def wait_until_taken(self, batch: BatchDelivery) -> None:
        """Raises what the asynchronous `send_batch` does, BufferFull after `max_block_ms`, DeliveryFailed, Closed,
        ForkedClient: then the records are not sent. Only an interruption may come when they have just been taken."""

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
            if isinstance(error, DeliveryFailed):  # of others, for the next call to tell
                self.background.soon(partial(self._put_back, error.failures))
        if batch._error is not None:
            raise batch._error

    def _no_room(self) -> BufferFull:
        return BufferFull(
            f"no room in the buffer for {self._max_block_s:g} s (max_block_ms): {self._producer._accumulator.used} "
            "bytes of records are not acknowledged. They are still being sent: try again, or raise max_block_ms"
        )

    def serve(self, *, is_waiting: bool) -> None:
        """Call the callbacks of records that have ended. If another thread does so just now, leave it to that one, or
        wait for it."""
        if not self._serving.acquire(blocking=is_waiting):
            return
        try:
            while self.ended:
                on_delivery, metadata, error = self.ended.popleft()
                try:
                    on_delivery(metadata, error)
                except Exception:
                    # The caller of this very call can do nothing about it, and may have sent other records.
                    logger.exception("on_delivery=%r raised", on_delivery)
        finally:
            self._serving.release()

    def wait_for(self, delivery: Delivery | BatchDelivery, timeout_ms: float | None) -> None:
        """Until it is done. Raises ApiTimedOut, Closed, ForkedClient."""
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
        """Of a record that could not be taken."""
        self._refused.pop(id(told), None)

    def unacknowledged(self) -> int:
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
                except (BufferFull, Closed, ClientCrashed):
                    pass  # callers wait for so long as they want; the next `send` says the rest
                if not has_room:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await self._producer._progress.wait()
            self.is_awake = False
            if queue:  # since the last look
                self.is_awake = True
            else:
                await self._news.wait()
                self._news.clear()

    def _take(self, count: int) -> bool:
        """The first `count` of the queue, or fewer where the buffer is full: then False."""
        send, queue = self._producer.send, self.queue
        has_room = True
        for number in range(count):
            record = queue.popleft()
            try:
                if isinstance(record, Delivery) and record._unusual is None:
                    record._sent = send(record._topic, record._value, key=record._key)
                    record._value = record._key = None  # the batch has them
                else:
                    record._put(self._producer)
            except BufferFull as error:
                if self._producer._accumulator.used:
                    queue.appendleft(record)
                    count, has_room = number, False
                    break
                self._refuse(record, error)
            except (MinibrokerError, TypeError, ValueError) as error:
                self._refuse(record, error)
        self._taken += count
        self._tell()
        return has_room

    def note_ended(
        self, on_delivery: OnDelivery, metadata: RecordMetadata | None, error: MinibrokerError | None
    ) -> None:
        self.ended.append((on_delivery, metadata, error))
        self.background.poke()

    def _refuse(self, record: Delivery | BatchDelivery, error: MinibrokerError | TypeError | ValueError) -> None:
        if isinstance(error, ClientCrashed):
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
        while self.queue:
            self._refuse(self.queue.popleft(), error)
        self._tell()

    def _tell(self) -> None:
        """Something is taken, or must be reported."""
        self._progress.notify()
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if len(self.queue) <= waiting.most or self._failures or not self.is_open:
                waiting.turn.put(None)
            else:
                self._waiting.append(waiting)

    def _take_failures(self) -> list[FailedRecord]:
        """Those that nobody has been told of."""
        failures = self._failures
        self._failures = []
        failures += [_failure(record) for record in list(self._refused.values()) if not record._is_told]
        self._refused.clear()
        if failures:
            self._progress.notify()
        return failures

    def _put_back(self, failures: Sequence[FailedRecord]) -> None:
        """Whoever was to be told of them is not."""
        self._failures[:0] = failures

    async def _report(self) -> None:
        if failures := self._take_failures():
            raise DeliveryFailed(failures)

    async def flush(self) -> None:
        failures: list[FailedRecord] = []
        target = self._taken + len(self.queue)
        try:
            while self._taken < target:
                failures += self._take_failures()
                await self._progress.wait()
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
        except BaseException:  # its time is over, or somebody is tired of waiting
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
        """End the producer so, and say how many records were not even given to it."""
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


class Producer(Facade[AsyncProducer]):
    """Sends records, from any thread. Use it as `with Producer("host:9092") as producer`, or call `start` and `close`.

    Guarantees and settings are those of `minibroker.Producer`. Records of one thread are delivered to their partition
    in the order of its `send` calls.

    `send` waits while the buffer is full, for `max_block_ms` at most. At the end of `with` all records are sent, which
    takes `delivery_timeout_ms` at most; after KeyboardInterrupt, and when the interpreter ends, 2 s at most: the rest
    fails, and a ResourceWarning and the log say how many records that is.

    A call that waits and is interrupted (Ctrl-C) leaves the producer as it was. After a fork the child gets
    ForkedClient from every call but `close`, which does nothing there. The constructor raises InvalidSetting.
    """

    _noun = "producer"
    _ending: Handover

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str = "minibroker-producer",
        acks: Literal["all", -1, 0, 1] = "all",
        enable_idempotence: bool | None = None,
        compression: str = "none",
        linger_ms: float = 0,
        batch_size: int = 256 * 1024,
        max_request_size: int = 1024 * 1024,
        buffer_memory: int = 64 * 1024 * 1024,
        max_in_flight_requests_per_connection: int = 5,
        delivery_timeout_ms: float = 120_000,
        request_timeout_ms: float = 30_000,
        retry_backoff_ms: float = 100,
        max_block_ms: float = 10_000,
        metadata_max_age_ms: float = 300_000,
        partitioner: Partitioner | RecordPartitioner = DEFAULT_PARTITIONER,
        partitioner_availability_timeout_ms: float = 0,
        key_serializer: SerializerChoice = "bytes",
        value_serializer: SerializerChoice = "bytes",
    ) -> None:
        client = AsyncProducer(
            bootstrap,
            client_id=client_id,
            acks=acks,
            enable_idempotence=enable_idempotence,
            compression=compression,
            linger_ms=linger_ms,
            batch_size=batch_size,
            max_request_size=max_request_size,
            buffer_memory=buffer_memory,
            max_in_flight_requests_per_connection=max_in_flight_requests_per_connection,
            delivery_timeout_ms=delivery_timeout_ms,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            max_block_ms=max_block_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            partitioner=partitioner,
            partitioner_availability_timeout_ms=partitioner_availability_timeout_ms,
        )
        self._serialize_key = choose_serializer("key_serializer", key_serializer)
        self._serialize_value = choose_serializer("value_serializer", value_serializer)
        self._handover = Handover(client, check_ms("max_block_ms", max_block_ms))
        super().__init__(client, self._handover)
        self._handover.background = self._background
        self._queue = self._handover.queue
        self._topics: set[str] = set()
        """Those whose names are legal."""

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: _Headers | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Queue a record to be sent, and return; only where the buffer is full, wait for room. `value` None is a
        tombstone. Key and value are what the serializers take: bytes, bytearray or memoryview if there are none.

        Raises TypeError for what is not bytes, SerializationFailed, BrokerError for an illegal topic name
        (INVALID_TOPIC_EXCEPTION) or an impossible partition or timestamp, BufferFull after `max_block_ms`,
        DeliveryFailed if the buffer is full and holds failed records of which nobody has been told, Closed,
        ForkedClient and ClientCrashed. In these cases the record is not sent. That a record is too large
        (MESSAGE_TOO_LARGE), that the topic has no such partition (UNKNOWN_TOPIC_OR_PARTITION) and PartitionerFailed are
        raised by `Delivery.result` or `flush`.

        `on_delivery` is called with (RecordMetadata, None) or (None, error) once the record has ended, by a thread that
        calls this producer then (`send`, `send_batch`, `drain`, `flush`, `close`), in the order in which records
        end, and before `flush` or `close` return. A failure that it was told is not raised by `flush`. What it raises
        itself is logged with its traceback.
        """
        handover = self._handover
        if not handover.is_open:
            raise self._not_running()
        if self._serialize_value is not None:
            value = serialize(self._serialize_value, value, topic, "value")
        if self._serialize_key is not None:
            key = serialize(self._serialize_key, key, topic, "key")
        if type(value) is not bytes and value is not None:
            value = as_bytes("value", value)
        if type(key) is not bytes and key is not None:
            key = as_bytes("key", key)
        if topic not in self._topics:
            self._check_topic(topic)
        unusual = None
        if partition is not None or timestamp_ms is not None or headers is not None or on_delivery is not None:
            unusual = _checked(partition, timestamp_ms, headers, on_delivery)
        queue = self._queue
        if value is not None and len(value) > LARGE_BYTES:
            self._wait_for_room(0)
        elif len(queue) >= QUEUE_RECORDS or handover.must_report:
            self._wait_for_room(QUEUE_RECORDS // 2)
        delivery = Delivery(handover, topic, value, key, unusual)
        queue.append(delivery)
        if not handover.is_awake:
            handover.wake()
        if handover.ended:
            handover.serve(is_waiting=False)
        return delivery

    def send_batch(
        self,
        topic: str,
        values: Iterable[Any] | ArrowArray,
        keys: Iterable[Any] | ArrowArray | None = None,
        timestamps_ms: Iterable[int] | ArrowArray | None = None,
        partition: int | None = None,
    ) -> BatchDelivery:
        """Send many records at once: `send` for each of them, in their order, at a fraction of its price. Waits until
        there is room for all of them.

        `values`, and `keys` where records have any: a list of bytes and None (or of what the serializers take), or a
        pyarrow array of binary or string. `timestamps_ms`: one for each record, or an array of integers or timestamps;
        by default, now. Records go to `partition`, or where the partitioner says. The lists must not be changed
        afterwards.

        Either all of the records are taken, or none: raises as the asynchronous `send_batch` and as `send`.
        """
        handover = self._handover
        if not handover.is_open:
            raise self._not_running()
        value_column = column_of("values", "value", topic, values, self._serialize_value)
        key_column = None if keys is None else column_of("keys", "key", topic, keys, self._serialize_key)
        timestamps = None if timestamps_ms is None else checked_timestamps(timestamps_ms)
        batch = BatchDelivery(handover, topic, (value_column, key_column, timestamps, partition))
        self._queue.append(batch)
        if not handover.is_awake:
            handover.wake()
        handover.wait_until_taken(batch)
        if handover.ended:
            handover.serve(is_waiting=False)
        return batch

    def _wait_for_room(self, most: int) -> None:
        self._handover.wait_for_room(most)
        if not self._handover.is_open:
            raise self._not_running()

    def _check_topic(self, topic: str) -> None:
        check_topic_name(topic)
        self._topics.add(topic)

    def drain(self) -> None:
        """Wait while the buffer is full; otherwise return, nearly for free. `send` does so by itself. Raises BufferFull
        after `max_block_ms`, DeliveryFailed if the buffer is full and holds failed records of which nobody has been
        told, Closed, ForkedClient and ClientCrashed."""
        if not self._handover.is_open:
            raise self._not_running()
        if len(self._queue) >= QUEUE_RECORDS or self._handover.must_report:
            self._wait_for_room(QUEUE_RECORDS // 2)
        if self._handover.ended:
            self._handover.serve(is_waiting=False)

    def flush(self, timeout_ms: float | None = None) -> None:
        """Send at once everything that was given to `send` before, by any thread, and wait until all of it is
        acknowledged or failed.

        Raises DeliveryFailed with every record that failed and of which nobody was told before; ApiTimedOut if it takes
        longer than `timeout_ms` (what waits is still being sent); Closed, ForkedClient and ClientCrashed. Interrupting
        it stops the waiting, not the sending.
        """
        otherwise = "not everything was acknowledged, and is still being sent"
        try:
            self._call(within(self._handover.flush, timeout_ms, otherwise, self._is_idle), self._serve)
        finally:
            self._handover.serve(is_waiting=True)

    def close(self, timeout_ms: float | None = None) -> None:
        """`flush`, then end everything in the background, whatever happens. Raises as `flush`. A second `close` does
        nothing; nor does one in a forked child.

        After `timeout_ms` what is not acknowledged fails with Closed, ApiTimedOut is raised, and a ResourceWarning and
        the log say how many records that is. Without, it takes `delivery_timeout_ms` at most.
        """
        otherwise = "not everything was acknowledged when the producer was closed"
        self._end(within(self._handover.close, timeout_ms, otherwise, self._is_idle), self._serve)

    def _serve(self) -> None:
        self._handover.serve(is_waiting=False)

    def _begin(self) -> Coroutine[Any, Any, None]:
        return self._handover.start()

    def _unacknowledged(self) -> int:
        return self._handover.unacknowledged()

    def _is_idle(self) -> bool:
        return not self._handover.unacknowledged()

    def _was_forked(self) -> object:
        self._handover.is_open = False
        return super()._was_forked()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, unacknowledged={self._unacknowledged()}>"


def _checked(
    partition: int | None, timestamp_ms: int | None, headers: _Headers | None, on_delivery: OnDelivery | None
) -> _Unusual:
    if partition is not None:
        check_partition(partition)
    if timestamp_ms is not None:
        check_timestamp_ms(timestamp_ms)
    if on_delivery is not None:
        check_on_delivery(on_delivery)
    return _Unusual(partition, timestamp_ms, None if headers is None else checked_headers(headers), on_delivery)

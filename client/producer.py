"""The producer: `send` puts a record into a batch and returns at once; a task does the rest.

`send` is the only code of the client that runs for every record. So its common case (a record without key for a topic
whose partitions are known, while its batch has room) is written out in it: one look-up, two appends, no call into the
accumulator. A record with a key costs one such call. All other records take the long way, `_send_slowly`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, Unpack

from minibroker.client.cluster.lifecycle import Client
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import BufferFull, Closed, DeliveryFailed, InvalidSetting, records_were
from minibroker.client.log import Logger
from minibroker.client.other_names import NamesOfKafkasProducer, knows_other_names
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.arguments import (
    Headers,
    check_partition,
    check_partitioner,
    check_timestamp_ms,
    checked_headers,
    column_of,
)
from minibroker.client.producing.batch import RECORD_OVERHEAD
from minibroker.client.producing.columns import (
    ArrowArray,
    Columns,
    as_bytes,
    checked_timestamps,
)
from minibroker.client.producing.delivery import (
    BatchDelivery,
    Delivery,
    OnDelivery,
    check_on_delivery,
    tell_on_delivery,
)
from minibroker.client.producing.partitioners import Partitioner, RecordPartitioner
from minibroker.client.producing.sender import Sender
from minibroker.client.security import Security
from minibroker.client.serializers import SerializerChoice, choose_serializer, serialize
from minibroker.client.settings import (
    check_boolean,
    check_choice,
    check_integer,
    check_ms,
    check_whole_ms,
)
from minibroker.client.tasks import Pulse, Turns
from minibroker.client.transactions.transaction import Transaction
from minibroker.client.transactions.transactions import Transactions, check_transactional_id
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.words import counted
from minibroker.protocol.world import World

logger = Logger("minibroker.client")

CANCELLED_FLUSH_S = 2.0
"""A cancelled producer sends its records for this long, which is more than a failover takes."""

PAUSE_EVERY_MS = 2
"""`drain` lets the event loop run this often, so that a loop around `send` does not hold up its own sending."""

TRANSACTION_TIMEOUT_MS = 60_000

DEFAULT_PARTITIONER = Partitioner()

_ACKS: dict[object, int] = {"all": -1, -1: -1, 0: 0, 1: 1}


class Producer(NamesOfKafkasProducer, Client):
    """Sends records. Use it as `async with Producer("host:9092") as producer`, or call `start` and `close`.

    Guarantees: with the default `acks="all"` a record whose Delivery returned is in the log of every in-sync replica,
    once, after all records that were sent to its partition before. A record whose Delivery raised may be in the log or
    not, but never twice. Failures that are not awaited are raised by `flush`, `drain` or `close`.

    Settings have Kafka's names and meaning; times are in milliseconds, sizes in bytes:

    - `acks`: "all" (every in-sync replica), 1 (the leader), 0 (none: a record counts as delivered once written to the
      socket).
    - `enable_idempotence`: no duplicates, no reordering by retries; on with acks="all", and impossible without.
    - `linger_ms`: how long a batch that is not full waits for more records. With any value, such a batch also waits
      while another batch of its partition is in flight.
    - `batch_size`: the most bytes of a batch before compression. `max_request_size`: the most bytes of a record, and of
      all batches in a request. Brokers reject a batch above the topic's `max.message.bytes`.
    - `buffer_memory`: bytes of records that wait or are in flight. Above it `drain` waits; at twice as much `send`
      raises.
    - `delivery_timeout_ms`: from `send` to the acknowledgement, all retries included.
    - `max_block_ms`: how long `drain` waits for room in the buffer, and records for a topic that brokers say does not
      exist. (10 s, not Kafka's 60 s: our brokers learn of a new topic within milliseconds, and a leader has a successor
      within one second.) If the producer has known the topic, it may come back, so records wait for
      `delivery_timeout_ms`.
    - `compression`: "none", "gzip", "snappy", "lz4" or "zstd".
    - `partitioner`: a Partitioner, or a function that chooses for each record (`client/producing/partitioners.py`).
    - `partitioner_availability_timeout_ms`: after a leader could take no request for this long, records without a key
      and partitioner functions are no longer offered its partitions (KIP-794). 0: they always are, as in Kafka.
    - `key_serializer`, `value_serializer`: "bytes", "str", "json", "msgpack", or a function
      (`minibroker.client.serializers`).
    - `transactional_id`: the producer sends records only within `async with producer.transaction()`. `start` fences
      every earlier producer with the same id and aborts its transaction. Each running producer needs an id of its own
      that stays the same when it is started again. Needs acks="all" and idempotence.
    - `transaction_timeout_ms`: the coordinator aborts a transaction that is open for longer. The producer also waits
      for its coordinator this long, or for `max_block_ms` if that is more.

    If the body of `async with` is cancelled or interrupted, the producer continues to send for at most 2 s. The
    remaining records fail with Closed, and a ResourceWarning and the log report their number. The same applies to a
    producer that is dropped without `close`, if its event loop still exists. (`close` does not wait 2 s when it is
    cancelled.)

    The constructor raises InvalidSetting. Not thread-safe. It belongs to the event loop in which it is started: a call
    from another loop, `close` included, raises WrongEventLoop. (`send` checks that at most once a millisecond; awaiting
    its Delivery, `drain` or `flush` always raises it.)
    """

    _noun = "producer"

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
        transactional_id: str | None = None,
        transaction_timeout_ms: float = TRANSACTION_TIMEOUT_MS,
        world: World | None = None,
        **security: Unpack[Security],
    ) -> None:
        if isinstance(acks, bool) or acks not in _ACKS:
            raise InvalidSetting("acks", acks, 'use "all", 1 or 0')
        acks_number = _ACKS[acks]
        if enable_idempotence is not None:
            check_boolean("enable_idempotence", enable_idempotence)
        is_idempotent = acks_number == -1 if enable_idempotence is None else enable_idempotence
        if is_idempotent and acks_number != -1:
            raise InvalidSetting(
                "enable_idempotence", enable_idempotence, f'it needs acks="all", not {acks!r}: drop one of the two'
            )
        transaction_timeout_s = check_whole_ms("transaction_timeout_ms", transaction_timeout_ms, lowest=1)
        if transactional_id is not None:
            check_transactional_id(transactional_id, acks, is_idempotent)
        elif transaction_timeout_ms != TRANSACTION_TIMEOUT_MS:
            rule = 'it needs a transactional_id, as in transactional_id="shop-1"; without one there is no transaction'
            raise InvalidSetting("transaction_timeout_ms", transaction_timeout_ms, rule)
        most_in_flight = 5 if is_idempotent else 1_000  # brokers remember five batches of a producer
        check_integer("max_in_flight_requests_per_connection", max_in_flight_requests_per_connection, 1, most_in_flight)
        check_integer("max_request_size", max_request_size, 1_024, 64 * 1024 * 1024)
        check_integer("batch_size", batch_size, 1, 16 * 1024 * 1024)
        check_integer("buffer_memory", buffer_memory, max_request_size, 1 << 40)
        check_choice("compression", compression, [codec.name.lower() for codec in Compression])
        check_partitioner(partitioner)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
            security=security,
        )
        linger_s = check_ms("linger_ms", linger_ms)
        delivery_timeout_s = check_ms("delivery_timeout_ms", delivery_timeout_ms, lowest=1)
        if linger_s >= delivery_timeout_s:
            raise InvalidSetting(
                "linger_ms", linger_ms, f"keep it below delivery_timeout_ms, which is {delivery_timeout_ms:g}"
            )
        self._accumulator = Accumulator(
            batch_size=min(batch_size, max_request_size),
            buffer_memory=buffer_memory,
            max_request_size=max_request_size,
            linger_s=linger_s,
            delivery_timeout_s=delivery_timeout_s,
            is_idempotent=is_idempotent,
            partitioner=partitioner,
            random=self._runtime.world.random,
            check_caller=self._check_loop,
            is_transactional=transactional_id is not None,
        )
        self._serialize_key = choose_serializer("key_serializer", key_serializer)
        self._serialize_value = choose_serializer("value_serializer", value_serializer)
        self._progress = progress = Pulse()
        self._turns = turns = Turns(self._accumulator.lets_pass)
        """The queue of `drain` calls that wait for room in the buffer."""
        self._accumulator.on_room = turns.look

        def on_progress() -> None:  # not a method: the sender must not keep alive a producer that was dropped
            progress.notify()
            turns.look()

        self._sender = Sender(
            self._runtime,
            self._accumulator,
            acks=acks_number,
            compression=Compression.from_name(compression),
            max_request_size=max_request_size,
            max_in_flight=max_in_flight_requests_per_connection,
            max_block_s=check_ms("max_block_ms", max_block_ms),
            availability_timeout_s=check_ms("partitioner_availability_timeout_ms", partitioner_availability_timeout_ms),
            on_progress=on_progress,
            transactional_id=transactional_id,
        )
        self._max_block_s = max_block_ms / 1_000
        self._repeats_when_full = False
        """Whether the caller repeats a `send` that raises BufferFull."""
        self._transactions: Transactions | None = None
        """None without a `transactional_id`."""
        if transactional_id is not None:
            self._transactions = Transactions(
                self._runtime,
                self._accumulator,
                transactional_id,
                timeout_s=transaction_timeout_s,
                max_block_s=self._max_block_s,
                flush=partial(_flush, self._accumulator, self._sender, progress),
                wake=self._sender.wake,
            )
            self._sender.before_sending = self._transactions.before_sending
        self._wall_ms = self._runtime.clock.wall_ms
        self._open_batches = self._accumulator.open_batches
        self._add_with_key = self._accumulator.add_with_key
        if self._serialize_key is not None or self._serialize_value is not None:
            # The fast paths of `send` call no serializer. Without any fast path they need not check for one.
            self._open_batches, self._add_with_key = {}, _no_fast_path
        elif not isinstance(partitioner, Partitioner):
            self._add_with_key = _no_fast_path
        self._now_ms = 0
        """The time at which `send` last checked the event loop."""
        self._paused_ms = -PAUSE_EVERY_MS
        """When `drain` last let the loop run."""

    async def _reach(self) -> None:
        await super()._reach()
        if self._transactions is not None:
            await self._transactions.initialize()

    def _go(self) -> None:
        self._runtime.tasks.start(self._sender.run(), "sender")

    def _tell(self) -> None:
        self._progress.notify()
        self._turns.let_all_through()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        elif isinstance(error, Exception):
            try:
                await self.close()
            except MinibrokerError as failure:
                error.add_note(f"While the producer was closed: {failure}")
        elif not self._runtime.is_gone(error):  # cancelled, interrupted
            await self._close_soon()

    # -- sending --

    def transaction(self) -> Transaction:
        """Return a transaction, for `async with producer.transaction() as transaction`. Raises InvalidSetting if the
        producer has no `transactional_id`. A transaction that begins while another one is open raises
        InvalidTransactionState."""
        if self._transactions is None:
            raise InvalidSetting(
                "transactional_id", None, 'transactions need one: make the producer with transactional_id="name"'
            )
        return Transaction(self._runtime, self._transactions, self._check_running, self._calls, self._not_running)

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,  # no `*` before it: CPython takes 10 ns to find each default that is for a keyword alone
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Put a record into a batch, and return at once. `value` None is a tombstone. The serializers determine the
        types of key and value; without serializers these are bytes, bytearray or memoryview.

        Records of a partition are delivered in the order of their `send`. Call `await producer.drain()` after it, or
        await the Delivery: otherwise nothing slows the caller down, and `send` raises BufferFull at twice
        `buffer_memory`. Also raises TypeError for other types, SerializationFailed, PartitionerFailed, BrokerError for
        an illegal topic name (INVALID_TOPIC_EXCEPTION), a record that is too large (MESSAGE_TOO_LARGE), a partition
        that the topic does not have (UNKNOWN_TOPIC_OR_PARTITION) or an illegal timestamp (INVALID_TIMESTAMP), Closed,
        WrongEventLoop, and ClientCrashed; with a `transactional_id` InvalidTransactionState outside of a transaction,
        TransactionAborted after a part of it has failed, and ProducerFenced. After any error the transaction can only
        be aborted.

        The event loop calls `on_delivery` with (RecordMetadata, None) or (None, error) once the record has ended, in
        the order in which records end, and before `flush` or `close` return. `flush` does not raise a failure that
        `on_delivery` received. If `on_delivery` raises, the error is logged with its traceback.
        """
        try:  # costs nothing while nothing is raised
            if partition is None and timestamp_ms is None and headers is None and type(value) is bytes:
                if key is None:
                    batch = self._open_batches.get(topic)
                    if batch is not None and on_delivery is None:
                        room = batch.room - len(value) - RECORD_OVERHEAD
                        if room >= 0:
                            now_ms = self._wall_ms()
                            if now_ms != self._now_ms:
                                self._tick(now_ms)
                            batch.room = room
                            values = batch.values
                            index = len(values)
                            values.append(value)
                            batch.timestamps.append(now_ms)
                            return Delivery(batch, index)
                elif type(key) is bytes and self._state == "running" and on_delivery is None:
                    now_ms = self._wall_ms()
                    if now_ms != self._now_ms:
                        self._tick(now_ms)
                    added = self._add_with_key(topic, value, key, now_ms)
                    if added is not None:
                        return Delivery(*added)
            return self._send_slowly(topic, value, key, partition, timestamp_ms, headers, on_delivery)
        except BaseException as error:
            self._not_sent(error, topic)
            raise

    def _not_sent(self, error: BaseException, topic: object) -> None:
        """`send` or `send_batch` raises this error. The transaction, if there is one, lacks the records."""
        is_repeated = self._repeats_when_full and isinstance(error, BufferFull)
        if self._transactions is not None and not is_repeated:
            self._transactions.not_sent(error, topic)

    def _tick(self, now_ms: int) -> None:
        """Another millisecond has begun: asking for the running loop at every `send` would cost it a quarter more."""
        self._check_loop()
        self._now_ms = now_ms

    def _send_slowly(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        timestamp_ms: int | None,
        headers: Headers | None,
        on_delivery: OnDelivery | None,
    ) -> Delivery:
        if self._state != "running":
            raise self._not_running()
        if self._transactions is not None:
            self._transactions.check_open()
        if self._serialize_value is not None:
            value = serialize(self._serialize_value, value, topic, "value")
        if self._serialize_key is not None:
            key = serialize(self._serialize_key, key, topic, "key")
        if type(value) is not bytes and value is not None:
            value = as_bytes("value", value)
        if type(key) is not bytes and key is not None:
            key = as_bytes("key", key)
        if partition is not None:
            check_partition(partition)
        if headers is not None:
            headers = checked_headers(headers)
        if on_delivery is not None:
            check_on_delivery(on_delivery)
        now_ms = self._wall_ms()
        self._tick(now_ms)
        if timestamp_ms is None:
            timestamp_ms = now_ms
        else:
            check_timestamp_ms(timestamp_ms)
        now = self._runtime.clock.monotonic()
        try:
            batch, index = self._accumulator.add(now, topic, value, key, partition, timestamp_ms, headers)
        except BrokerError as error:
            self._refused(error)
            raise
        if on_delivery is not None:
            tell_on_delivery(batch, index, on_delivery, asyncio.get_running_loop().call_soon)
        if index == 0 or batch.room < RECORD_OVERHEAD:
            self._sender.wake()
        if self._accumulator.is_over_limit:
            self._paused_ms = -PAUSE_EVERY_MS  # the next drain must look
        return Delivery(batch, index)

    def _failed_so_far(self, delivery: Delivery | BatchDelivery) -> str | None:
        """Return, for messages, the partition of waiting records and their last error; None if they have ended."""
        batch = delivery._waiting_for()
        return None if batch is None else self._sender.failed_so_far(batch)

    def _refused(self, error: BrokerError) -> None:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            self._runtime.metadata.request_refresh()  # the partition may be newer than the metadata

    def send_batch(
        self,
        topic: str,
        values: Iterable[Any] | ArrowArray,
        keys: Iterable[Any] | ArrowArray | None = None,
        timestamps_ms: Iterable[int] | ArrowArray | None = None,
        partition: int | None = None,
    ) -> BatchDelivery:
        """Send many records at once: as `send` for each of them, in their order, at a fraction of the cost.

        `values` and `keys` are lists of bytes and None (or of the types that the serializers accept), or pyarrow arrays
        of binary or string, which are sent unchanged (strings in UTF-8). `timestamps_ms` has one element for each
        record, as a list or as an array of integers or timestamps; the default is now. Records go to `partition`, or to
        the partition that the partitioner chooses: by the hash of each key, or, without keys, to one partition until
        its batch is full. Batches are as large as those of `send`, and may hold records of both.

        Returns at once. Either all records are accepted, or none: raises as `send`, naming the first record that cannot
        be sent; ValueError for columns of different lengths; and BufferFull if the records exceed twice
        `buffer_memory`. So pass some thousand at a time, and call `await producer.drain()` after it, or await the
        BatchDelivery. The lists must not change afterwards.
        """
        try:
            return self._send_batch(topic, values, keys, timestamps_ms, partition)
        except BaseException as error:
            self._not_sent(error, topic)
            raise

    def _send_batch(
        self,
        topic: str,
        values: Iterable[Any] | ArrowArray,
        keys: Iterable[Any] | ArrowArray | None,
        timestamps_ms: Iterable[int] | ArrowArray | None,
        partition: int | None,
    ) -> BatchDelivery:
        if self._state != "running":
            raise self._not_running()
        if self._transactions is not None:
            self._transactions.check_open()
        value_column = column_of("values", "value", topic, values, self._serialize_value)
        key_column = None if keys is None else column_of("keys", "key", topic, keys, self._serialize_key)
        timestamps = None if timestamps_ms is None else checked_timestamps(timestamps_ms)
        count = len(value_column)
        for name, column in (("key", key_column), ("timestamp", timestamps)):
            if column is not None and len(column) != count:
                raise ValueError(f"{counted(len(column), name)} for {counted(count, 'value')}: give one for each")
        if partition is not None:
            check_partition(partition)
        now_ms = self._wall_ms()
        self._tick(now_ms)
        if not count:
            return BatchDelivery(topic, [])
        columns = Columns(value_column, key_column, [now_ms] * count if timestamps is None else timestamps)
        try:
            parts = self._accumulator.add_many(self._runtime.clock.monotonic(), topic, columns, partition)
        except BrokerError as error:
            self._refused(error)
            raise
        self._sender.wake()
        if self._accumulator.is_over_limit:
            self._paused_ms = -PAUSE_EVERY_MS
        return BatchDelivery(topic, parts)

    async def drain(self) -> None:
        """Wait while more than `buffer_memory` bytes of records wait or are in flight; otherwise return, at almost no
        cost. Calls that wait continue in the order in which they began.

        Also lets the event loop run every 2 ms. Raises BufferFull after `max_block_ms`, DeliveryFailed if the buffer is
        full and holds failed records that were not awaited, Closed, WrongEventLoop, and ClientCrashed.
        """
        if 0 <= self._now_ms - self._paused_ms < PAUSE_EVERY_MS and self._state == "running":
            return
        self._check_running()
        await asyncio.sleep(0)
        if not self._turns.is_clear or self._accumulator.is_over_limit:
            await self._wait_for_room()
        self._paused_ms = self._now_ms

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._max_block_s):
                while True:
                    if self._state != "running":
                        raise self._not_running()
                    await self._turns.wait()
                    if self._state == "running" and self._accumulator.is_over_limit:
                        await asyncio.sleep(0)  # `on_delivery` is called first
                        self._report_failures()
                    elif self._state == "running":
                        return
        except TimeoutError:
            raise BufferFull(
                f"no room in the buffer for {self._max_block_s:g} s (max_block_ms): {self._accumulator.used} bytes of "
                f"records are not acknowledged, and buffer_memory is {self._accumulator.buffer_memory}. They are still "
                "being sent: call drain() again (in asyncio: await it), or raise max_block_ms"
            ) from None

    async def flush(self) -> None:
        """Send all records of earlier `send` calls without delay, and wait until each is acknowledged or has failed.

        Raises DeliveryFailed with every record that failed and was neither awaited nor reported before; Closed,
        WrongEventLoop, and ClientCrashed. Cancelling it stops the wait, not the sending.
        """
        self._check_running()
        await _flush(self._accumulator, self._sender, self._progress)
        self._report_failures()
        if self._crash is not None:
            raise self._not_running()

    async def close(self) -> None:
        """`flush`, then end all tasks and connections in any case. An open transaction is aborted. Raises as `flush`;
        leaving `async with` by an exception waits for the same, and adds what failed to that exception as a note. A
        second `close` waits for the first one, and does not raise its errors."""
        state = self._state
        if state == "closed":
            return
        self._check_loop()
        if state == "closing":
            await self._has_ended.wait()
            return
        if self._runtime.loop_is_ending:
            await self._close_soon()
            return
        try:
            if state == "running":
                self._state = "closing"
                self._turns.let_all_through()
                if self._transactions is not None:
                    await self._transactions.close()
                self._accumulator.close()
                await _flush(self._accumulator, self._sender, self._progress)
        except BaseException:  # cancelled
            await self._give_up()
            raise
        await self._shut_down()
        self._report_failures()
        if self._crash is not None:
            raise self._not_running()

    async def _close_soon(self) -> None:
        """`close` after the body was cancelled, in at most CANCELLED_FLUSH_S."""
        if self._state in ("closing", "closed"):
            return
        self._check_loop()
        try:
            if self._state == "running":
                self._state = "closing"
                await _flush_briefly(self._accumulator, self._sender, self._progress, self._transactions)
        finally:
            await self._give_up()

    async def _give_up(self) -> None:
        """End everything, and log the number of unacknowledged records: no caller is waiting for an error."""
        unacknowledged, was = self._accumulator.unacknowledged(), repr(self)
        await self._shut_down()
        if unacknowledged:
            text = f"{was} was cancelled: {not_acknowledged(unacknowledged)}"
            logger.warning("%s", text)
            logger.resource_warning(text, source=self)

    def _was_dropped(self) -> None:
        parts = self._runtime, self._accumulator, self._sender, self._progress, self._transactions
        self._runtime.dropped(self, partial(_see_off, *parts), self._accumulator.unacknowledged())

    def __repr__(self) -> str:
        records = self._accumulator.unacknowledged()
        return f"<Producer {self._state}, bootstrap={self._runtime.bootstrap}, unacknowledged={records}>"

    async def _shut_down(self) -> None:
        """End everything. Records that are not acknowledged fail with Closed."""
        self._state = "closed"
        self._calls.end()
        try:
            await self._runtime.close()
        finally:
            self._accumulator.fail_all(Closed("the producer was closed before the record was acknowledged"))
            self._tell()
            try:
                await asyncio.sleep(0)  # `on_delivery` is called now
            finally:
                self._has_ended.set()

    def _report_failures(self) -> None:
        failures = self._accumulator.take_failures()
        self._turns.look()
        if failures:
            raise DeliveryFailed(failures) from self._crash

    def _crashed(self, error: BaseException) -> None:
        """Fail every waiting record, since nothing more is sent."""
        super()._crashed(error)
        self._accumulator.fail_all(self._not_running())


async def drain_patiently(producer: Producer) -> None:
    """`producer.drain()` for a caller that can only wait for brokers, such as a command that reads a file. Waits beyond
    `max_block_ms`: until the records that fill the buffer are acknowledged, or have failed (after `delivery_timeout_ms`
    at the latest). Raises as `drain`, except BufferFull."""
    while True:
        try:
            await producer.drain()
            return
        except BufferFull:
            continue


async def _flush(accumulator: Accumulator, sender: Sender, progress: Pulse) -> None:
    flush = accumulator.begin_flush()
    sender.wake()
    while not accumulator.is_flushed(flush):
        await progress.wait()
    await asyncio.sleep(0)  # `on_delivery` is called now


async def _flush_briefly(
    accumulator: Accumulator, sender: Sender, progress: Pulse, transactions: Transactions | None
) -> None:
    accumulator.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCELLED_FLUSH_S):
            if transactions is not None:
                await transactions.close()
            await _flush(accumulator, sender, progress)


async def _see_off(
    runtime: ClientRuntime,
    accumulator: Accumulator,
    sender: Sender,
    progress: Pulse,
    transactions: Transactions | None,
) -> None:
    """Flush and close for a producer that was dropped."""
    try:
        await _flush_briefly(accumulator, sender, progress, transactions)
    finally:
        unacknowledged = accumulator.unacknowledged()
        await runtime.close()
        accumulator.fail_all(Closed("the producer was dropped without `close` before the record was acknowledged"))
        if unacknowledged:
            logger.warning("a producer was dropped without `close`: %s", not_acknowledged(unacknowledged))


def not_acknowledged(records: int) -> str:
    return f"{records_were(records)} not acknowledged, and may or may not be in the log"


def _no_fast_path(topic: str, value: bytes, key: bytes, timestamp_ms: int) -> None:
    """In place of `Accumulator.add_with_key`."""

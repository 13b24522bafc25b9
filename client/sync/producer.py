"""The blocking producer. `handover.py` says how its records get into the event loop."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Literal, Unpack

from minibroker.client.errors import InvalidTransactionState
from minibroker.client.other_names import NamesOfKafkasProducer, knows_other_names
from minibroker.client.producer import DEFAULT_PARTITIONER
from minibroker.client.producer import Producer as AsyncProducer
from minibroker.client.producing.arguments import Headers, column_of
from minibroker.client.producing.columns import ArrowArray, as_bytes, checked_timestamps
from minibroker.client.producing.delivery import OnDelivery
from minibroker.client.producing.partitioners import Partitioner, RecordPartitioner
from minibroker.client.security import Security
from minibroker.client.serializers import SerializerChoice, choose_serializer, serialize
from minibroker.client.settings import check_ms, check_topic_name
from minibroker.client.sync.facade import Facade, within
from minibroker.client.sync.handover import LARGE_BYTES, QUEUE_RECORDS, BatchDelivery, Delivery, Handover, checked
from minibroker.client.sync.transaction import Transaction
from minibroker.protocol.errors import MinibrokerError


class Producer(NamesOfKafkasProducer, Facade[AsyncProducer]):
    """Sends records, from any thread. Use it as `with Producer("host:9092") as producer`, or call `start` and `close`.

    Guarantees and settings are those of `minibroker.Producer`. Records of one thread are delivered to their partition
    in the order of its `send` calls.

    `send` waits while the buffer is full, for at most `max_block_ms`. At the end of `with` all records are sent, which
    takes at most `delivery_timeout_ms`; after KeyboardInterrupt, and when the interpreter ends, at most 2 s. The
    remaining records fail, and a ResourceWarning and the log report their number.

    A waiting call that is interrupted (Ctrl-C) leaves the producer usable. After a fork every call in the child except
    `close` raises ForkedClient; `close` does nothing there. The constructor raises InvalidSetting.
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
        transactional_id: str | None = None,
        transaction_timeout_ms: float = 60_000,
        **security: Unpack[Security],
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
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
            **security,
        )
        self._serialize_key = choose_serializer("key_serializer", key_serializer)
        self._serialize_value = choose_serializer("value_serializer", value_serializer)
        self._handover = Handover(client, check_ms("max_block_ms", max_block_ms))
        super().__init__(client, self._handover)
        self._handover.background = self._background
        self._queue = self._handover.queue
        self._topics: set[str] = set()
        """Topics whose names are known to be legal."""

    def transaction(self) -> Transaction:
        """Return a transaction, for `with producer.transaction() as transaction`. Raises InvalidSetting if the producer
        has no `transactional_id`. A transaction that begins while another one is open raises
        InvalidTransactionState."""
        return Transaction(self._handover, self._call, self._serve, self._client.transaction())

    def _refusal(self) -> MinibrokerError:
        """Return why no records are taken."""
        if not self._handover.is_open:
            return self._not_running()
        return InvalidTransactionState(
            "no transaction of this producer is open: send within `with producer.transaction():`"
        )

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Queue a record, and return without waiting unless the buffer is full. `value` None is a tombstone. The
        serializers determine the types of key and value; without serializers these are bytes, bytearray or memoryview.

        Raises TypeError for other types, SerializationFailed, BrokerError for an illegal topic name
        (INVALID_TOPIC_EXCEPTION), partition or timestamp, BufferFull after `max_block_ms`, DeliveryFailed if the buffer
        is full and holds failed records that were not reported, Closed, ForkedClient and ClientCrashed; with a
        `transactional_id` InvalidTransactionState outside of a transaction. The record is then not sent.
        `Delivery.result` or `flush` raise the other errors: the record is too large (MESSAGE_TOO_LARGE), the topic has
        no such partition (UNKNOWN_TOPIC_OR_PARTITION), PartitionerFailed.

        `on_delivery` is called with (RecordMetadata, None) or (None, error) once the record has ended, in the order in
        which records end, and before `flush` or `close` return. It runs in a thread that calls this producer (`send`,
        `send_batch`, `drain`, `flush`, `close`). `flush` does not raise a failure that `on_delivery` received. If
        `on_delivery` raises, the error is logged with its traceback.
        """
        handover = self._handover
        if not handover.takes_records:
            raise self._refusal()
        try:  # costs nothing while nothing is raised
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
                unusual = checked(partition, timestamp_ms, headers, on_delivery)
            queue = self._queue
            if value is not None and len(value) > LARGE_BYTES:
                self._wait_for_room(0)
            elif len(queue) >= QUEUE_RECORDS or handover.must_report:
                self._wait_for_room(QUEUE_RECORDS // 2)
            delivery = Delivery(handover, topic, value, key, unusual)
            queue.append(delivery)
            if not handover.is_awake:
                handover.wake()
        except BaseException as error:
            handover.not_sent(error, topic)
            raise
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
        """Send many records at once: as `send` for each of them, in their order, at a fraction of the cost. Waits until
        there is room for all of them.

        `values` and `keys` are lists of bytes and None (or of the types that the serializers accept), or pyarrow arrays
        of binary or string. `timestamps_ms` has one element for each record, as a list or as an array of integers or
        timestamps; the default is now. Records go to `partition`, or to the partition that the partitioner chooses. The
        lists must not change afterwards.

        Either all records are accepted, or none: raises as the asynchronous `send_batch` and as `send`.
        """
        handover = self._handover
        if not handover.takes_records:
            raise self._refusal()
        try:
            value_column = column_of("values", "value", topic, values, self._serialize_value)
            key_column = None if keys is None else column_of("keys", "key", topic, keys, self._serialize_key)
            timestamps = None if timestamps_ms is None else checked_timestamps(timestamps_ms)
            batch = BatchDelivery(handover, topic, (value_column, key_column, timestamps, partition))
            self._queue.append(batch)
            if not handover.is_awake:
                handover.wake()
            handover.wait_until_taken(batch)
        except BaseException as error:
            handover.not_sent(error, topic)
            raise
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
        """Wait while the buffer is full; otherwise return, at almost no cost. `send` also does that. Raises BufferFull
        after `max_block_ms`, DeliveryFailed if the buffer is full and holds failed records that were not reported,
        Closed, ForkedClient and ClientCrashed."""
        if not self._handover.is_open:
            raise self._not_running()
        if len(self._queue) >= QUEUE_RECORDS or self._handover.must_report:
            self._wait_for_room(QUEUE_RECORDS // 2)
        if self._handover.ended:
            self._handover.serve(is_waiting=False)

    def flush(self, timeout_ms: float | None = None) -> None:
        """Send all records of earlier `send` calls of all threads without delay, and wait until each is acknowledged or
        has failed.

        Raises DeliveryFailed with every record that failed and was not reported before; ApiTimedOut after `timeout_ms`
        (the records are still being sent); Closed, ForkedClient and ClientCrashed. Interrupting it stops the wait, not
        the sending.
        """
        otherwise = "not everything was acknowledged, and is still being sent"
        try:
            self._call(within(self._handover.flush, timeout_ms, otherwise, self._is_idle), self._serve)
        finally:
            self._handover.serve(is_waiting=True)

    def close(self, timeout_ms: float | None = None) -> None:
        """`flush`, then end everything in the background in any case. Raises as `flush`. A second `close` does nothing,
        nor does a `close` in a forked child.

        After `timeout_ms` unacknowledged records fail with Closed, ApiTimedOut is raised, and a ResourceWarning and the
        log report their number. Without `timeout_ms`, it takes at most `delivery_timeout_ms`.
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

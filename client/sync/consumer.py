"""The blocking consumer.

The problem: a call into the loop costs some fifty microseconds, and a record a fraction of one. And where a consumer is
in its partitions must be what the caller has really been given, even if Ctrl-C comes at the worst moment.

The choice: a call hands over a whole batch, as the iterator from which the asynchronous consumer itself hands out
records. The caller's thread takes records from it without any call, and how far it has come is how much is left of the
iterator: position, commit and the heartbeats' view of the user see each record that was taken, and none that was not. A
batch that arrived while its caller was interrupted is handed out by the next call.

Rejected: a queue of records between loop and caller, as it would hold records of partitions that were sought, paused
or revoked since, and positions would be guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from minibroker.client.consumer import Consumer as AsyncConsumer
from minibroker.client.errors import Closed
from minibroker.client.offsets import OffsetAndTimestamp
from minibroker.client.records import ConsumerBatch, Record
from minibroker.client.sync.background import Call
from minibroker.client.sync.facade import Coroutines, Facade, T
from minibroker.protocol.model import TopicPartition


class Consumer(Facade[AsyncConsumer]):
    """Reads records. Use it as `with Consumer("host:9092", topics=["orders"]) as consumer`, or call `start` and
    `close`; then `for record in consumer`, or, several times as fast, `for batch in consumer.batches()`. Neither ever
    ends: leave the loop, or use `poll`. After an iteration that was interrupted or left, the next one goes on where it
    was.

    Guarantees, settings and errors are those of `minibroker.Consumer`. Several threads may iterate: each record goes to
    one of them. (A record counts as consumed when the next batch is asked for by any thread.)

    A call that waits and is interrupted (Ctrl-C) leaves the consumer as it was, and skips nothing. After a fork the
    child gets ForkedClient from every call but `close`, which does nothing there. The constructor raises
    InvalidSetting.
    """

    _noun = "consumer"

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        topics: Sequence[str] | None = None,
        partitions: Sequence[TopicPartition] | None = None,
        auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest",
        client_id: str = "minibroker-consumer",
        fetch_min_bytes: int = 1,
        fetch_max_wait_ms: float = 500,
        fetch_max_bytes: int = 50 * 1024 * 1024,
        max_partition_fetch_bytes: int = 1024 * 1024,
        request_timeout_ms: float = 30_000,
        default_api_timeout_ms: float = 60_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 300_000,
    ) -> None:
        super().__init__(
            AsyncConsumer(
                bootstrap,
                topics=topics,
                partitions=partitions,
                auto_offset_reset=auto_offset_reset,
                client_id=client_id,
                fetch_min_bytes=fetch_min_bytes,
                fetch_max_wait_ms=fetch_max_wait_ms,
                fetch_max_bytes=fetch_max_bytes,
                max_partition_fetch_bytes=max_partition_fetch_bytes,
                request_timeout_ms=request_timeout_ms,
                default_api_timeout_ms=default_api_timeout_ms,
                retry_backoff_ms=retry_backoff_ms,
                metadata_max_age_ms=metadata_max_age_ms,
            )
        )

    # -- reading --

    def __iter__(self) -> Iterator[Record]:
        """The records, one by one. Raises Closed, ForkedClient, ClientCrashed, CorruptBatch, LogTruncated, and
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION if the topic is gone, OFFSET_OUT_OF_RANGE with auto_offset_reset="none",
        or any error that is not retriable. Iterating anew after an error tries again."""
        while True:
            yield from self._call(self._client._hand_out)

    def __next__(self) -> Record:
        """The next record. Raises as iterating."""
        while True:
            for record in self._call(self._client._hand_out):
                return record

    def batches(self) -> Iterator[ConsumerBatch]:
        """Iterate by batches, as they were produced. May be mixed with iterating by records, and raises as that
        does."""
        return _Batches(self)

    def _next_batch(self) -> ConsumerBatch:
        return self._taken(self._client._whole_batch, self._give_back_batch)

    def _taken(self, make: Coroutines[T], give_back: Callable[[T], None]) -> T:
        """The result of a call by which records are consumed. If the caller is interrupted before it has the result,
        the records are given back."""
        if self._state != "running":
            raise self._not_running()
        call = Call(make)
        try:
            self._background.run(call)
        except BaseException:
            if call.is_over and call.error is None:
                with suppress(Closed):
                    self._background.soon(partial(give_back, call.result))
            raise
        return call.result

    def _give_back_batch(self, batch: ConsumerBatch) -> None:
        self._client._give_back({TopicPartition(batch.topic, batch.partition): batch.offsets[0]})

    # -- positions --

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read, sorted."""
        return self._do(self._client.assignment)

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of a partition. Raises ApiTimedOut if it is not found in time, and BrokerError
        if there is none."""
        return self._call(lambda: self._client.position(partition))

    def position_epoch(self, partition: TopicPartition) -> int | None:
        """The leader epoch of the last record before the position; None if it is not known. Keep it with the position,
        and pass both to `seek`."""
        return self._do(lambda: self._client.position_epoch(partition))

    def seek(self, partition: TopicPartition, offset: int, leader_epoch: int | None = None) -> None:
        """Go on at `offset`. If it is not in the log, `auto_offset_reset` decides when it is read. With a
        `leader_epoch` (see `position_epoch`) the loss of the record in front of it is noticed."""
        self._do(lambda: self._client.seek(partition, offset, leader_epoch))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first record in the log; without arguments, in all partitions."""
        self._do(lambda: self._client.seek_to_beginning(*partitions))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on after the last record that is readable when the end is looked up, soon after this returns: call
        `position` to know it. Without arguments, in all partitions."""
        self._do(lambda: self._client.seek_to_end(*partitions))

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`."""
        self._do(lambda: self._client.pause(*partitions))

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo `pause`."""
        self._do(lambda: self._client.resume(*partitions))

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused, sorted."""
        return self._do(self._client.paused)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset in the log of each partition, assigned or not. Raises BrokerError, NetworkError."""
        return self._call(lambda: self._client.beginning_offsets(partitions))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The high watermark of each partition: the offset after the last that can be read. Raises BrokerError,
        NetworkError."""
        return self._call(lambda: self._client.end_offsets(partitions))

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after the given time; None if there is none. Raises BrokerError,
        NetworkError."""
        return self._call(lambda: self._client.offsets_for_times(timestamps_ms))


class _Batches:
    """A class, not a generator, which would be over after an error."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> Iterator[ConsumerBatch]:
        return self

    def __next__(self) -> ConsumerBatch:
        return self._consumer._next_batch()

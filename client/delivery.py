"""What `Producer.send` returns. One exists for each record, so it is two words: a batch, and an index in it."""

import asyncio
from collections.abc import Generator
from typing import Any, NamedTuple

import msgspec

from minibroker.client.accumulator import Batch


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is (Kafka's RecordMetadata)."""

    topic: str
    partition: int
    offset: int
    """-1 where the broker did not say: with acks=0, and for a retry that it recognised from long ago."""
    timestamp_ms: int
    """The record's, or the broker's where the topic has `message.timestamp.type=LogAppendTime`."""


class Delivery(msgspec.Struct, gc=False, eq=False):
    """An awaitable that ends when the record is acknowledged, or has failed for good.

    `await` returns RecordMetadata and raises BrokerError, DeliveryTimedOut or Closed; and WrongEventLoop, before the
    end, where the producer was started in another event loop. It may be awaited any number of times, by several tasks,
    before and after the end; cancelling one that waits cancels nothing else. A record that fails and whose Delivery
    nobody has awaited is reported by `flush`, `drain` or `close`.
    """

    # Rejected: a future for each record (three times as slow), and one for each batch that all share: cancelling
    # one task that waits for it would cancel it for all. The garbage collector need not look at these (gc=False):
    # a batch never refers to its deliveries.

    _batch: Batch
    _index: int

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        batch, index = self._batch, self._index
        while True:
            while batch.forwarded is not None:
                batch, index = batch.forwarded[index]
            if not batch.is_done and batch.check_caller is not None:
                batch.check_caller()
            batch.mark_awaited(index)
            if batch.is_done:
                break
            yield from _ending(batch).__await__()
        if batch.error is not None:
            raise batch.error.with_traceback(None)
        timestamp_ms = batch.timestamps[index] if batch.log_append_time_ms < 0 else batch.log_append_time_ms
        offset = -1 if batch.base_offset < 0 else batch.base_offset + index
        return RecordMetadata(batch.topic, batch.partition, offset, timestamp_ms)


def _ending(batch: Batch) -> asyncio.Future[None]:
    """A future of the caller's own that ends when the batch has ended or is forwarded."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not future.done():
            future.set_result(None)

    if batch.listeners is None:
        batch.listeners = []
    batch.listeners.append(end)
    return future

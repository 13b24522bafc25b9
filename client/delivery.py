"""What `Producer.send` returns. There is one for each record, so it is two words: a batch, and an index in it."""

import asyncio
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from minibroker.client.batch import Batch


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is (Kafka's RecordMetadata)."""

    topic: str
    partition: int
    offset: int
    """-1 if the broker did not say: with acks=0, and for a retry of a batch that it appended long ago."""
    timestamp_ms: int
    """The record's, or the broker's if the topic has `message.timestamp.type=LogAppendTime`."""


if TYPE_CHECKING:

    class _Coroutine(Coroutine[Any, Any, RecordMetadata]):
        """What a Delivery is to asyncio, by its methods; a Struct cannot derive from it."""

        def __init__(self, batch: Batch, index: int) -> None: ...

        def __init_subclass__(cls, *, gc: bool, eq: bool) -> None: ...

else:
    _Coroutine = msgspec.Struct


class Delivery(_Coroutine, gc=False, eq=False):
    """An awaitable that ends when the record is acknowledged, or has failed for good.

    `await` returns RecordMetadata, or raises BrokerError, DeliveryTimedOut or Closed; and WrongEventLoop, before the
    end, if the producer was started in another event loop. It may be awaited any number of times, by several tasks,
    before and after the end; cancelling one of them does not affect the others. A record that fails while nobody has
    awaited its Delivery is reported by `flush`, `drain` or `close`.

    `asyncio.create_task`, `TaskGroup.create_task`, `gather`, `wait_for` and `shield` take it as they take a coroutine.
    Not awaiting it is no error.
    """

    # Rejected: a future for each record (three times as slow), and a shared one for each batch: cancelling one task
    # that waits for it would cancel it for all. The garbage collector need not look at deliveries (gc=False), since a
    # batch never refers to them. As a coroutine (`send`, `throw`, `close`) a Delivery has no state of its own: each
    # step looks at the batch anew.

    _batch: Batch
    _index: int

    def done(self) -> bool:
        """Whether the record is acknowledged or has failed: then `await` returns, or raises, at once."""
        return self._place()[0].is_done

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

    def send(self, value: None) -> asyncio.Future[None]:
        """For tasks: a step. It returns a future to wait for, or raises StopIteration with the result, or an error."""
        step: asyncio.Future[None] = next(self.__await__())
        return step

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        """For tasks: how they are cancelled."""
        if isinstance(kind, BaseException):
            raise kind
        raise value if isinstance(value, BaseException) else kind()

    def close(self) -> None:
        """For tasks: there is nothing to undo."""

    def __repr__(self) -> str:
        batch, index = self._place()
        where = batch.topic if batch.partition < 0 else f"{batch.topic}-{batch.partition}"
        if not batch.is_done:
            return f"<Delivery {where} waiting>"
        if batch.error is not None:
            return f"<Delivery {where} failed: {batch.error}>"
        offset = f", offset={batch.base_offset + index}" if batch.base_offset >= 0 else ""
        return f"<Delivery {where} acknowledged{offset}>"

    def _place(self) -> tuple[Batch, int]:
        """Where the record is now."""
        batch, index = self._batch, self._index
        while batch.forwarded is not None:
            batch, index = batch.forwarded[index]
        return batch, index


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

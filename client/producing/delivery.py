"""The results of `Producer.send` and `Producer.send_batch`, as awaitables.

Each record has a Delivery, so a Delivery is only two words: a batch, and an index in it. A BatchDelivery serves
thousands of records.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from minibroker.client.errors import DeliveryFailed, FailedRecord, InvalidSetting
from minibroker.client.log import Logger
from minibroker.client.producing.batch import Batch
from minibroker.client.producing.filling import Part
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.words import counted

logger = Logger("minibroker.client")


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is (Kafka's RecordMetadata)."""

    topic: str
    partition: int
    offset: int
    """-1 if the broker did not report it: with acks=0, and for a retry of a batch that it appended long ago."""
    timestamp_ms: int
    """The record's, or the broker's if the topic has `message.timestamp.type=LogAppendTime`."""


@dataclass(frozen=True, slots=True)
class PartMetadata:
    """The place of some records of a `send_batch`, which are in one partition, one after the other."""

    partition: int
    base_offset: int
    """The offset of the first record; -1 if the broker did not report it, as in RecordMetadata."""
    count: int
    indexes: Sequence[int]
    """The indexes of the records in the call, ascending: record `indexes[i]` is at `base_offset + i`."""


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The places of the acknowledged records of a `send_batch`."""

    topic: str
    parts: tuple[PartMetadata, ...]
    """Parts of one partition are in the order of their offsets. A partition has several parts if records of other calls
    are in between."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        return sum(part.count for part in self.parts)

    def offsets(self) -> list[tuple[int, int]]:
        """Return partition and offset of each record, in the order of the call, without those that failed."""
        places = [
            (index, part.partition, -1 if part.base_offset < 0 else part.base_offset + place)
            for part in self.parts
            for place, index in enumerate(part.indexes)
        ]
        return [(partition, offset) for _, partition, offset in sorted(places)]


class BatchDeliveryFailed(DeliveryFailed):
    """Records of a `send_batch` failed.

    `failures` holds them, and `indexes` has the index in the call of each, in the same order. `metadata` has the places
    of the other records.
    """

    def __init__(self, failures: Sequence[FailedRecord], indexes: Sequence[int], metadata: BatchMetadata) -> None:
        super().__init__(failures)
        self.indexes = tuple(indexes)
        self.metadata = metadata

    def __reduce__(self) -> tuple[type[DeliveryFailed], tuple[Any, ...]]:
        return type(self), (self.failures, self.indexes, self.metadata)


OnDelivery = Callable[[RecordMetadata | None, MinibrokerError | None], None]
"""(metadata, None) once a record is acknowledged; (None, error) if it failed."""


class _Steps:
    """The methods by which a task drives an awaitable as a coroutine."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __await__(self) -> Generator[Any, None, Any]: ...

        def _wait_given_up(self) -> None: ...

    def send(self, value: None) -> asyncio.Future[None]:
        """Take a step, for a task: return a future to wait for, or raise StopIteration with the result, or an error."""
        step: asyncio.Future[None] = next(self.__await__())
        return step

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        """Cancel, for a task."""
        self._wait_given_up()
        _throw(kind, value)

    def close(self) -> None:
        """Do nothing, for a task: there is nothing to undo."""


if TYPE_CHECKING:

    class _Coroutine(Coroutine[Any, Any, RecordMetadata]):
        """The type of a Delivery for asyncio. A Struct cannot derive from Coroutine, but has its methods."""

        def __init__(self, batch: Batch, index: int) -> None: ...

        def __init_subclass__(cls, *, gc: bool, eq: bool) -> None: ...

else:
    _Coroutine = msgspec.Struct


class Delivery(_Steps, _Coroutine, gc=False, eq=False):
    """An awaitable that ends when the record is acknowledged, or has failed permanently.

    `await` returns RecordMetadata, or raises BrokerError, DeliveryTimedOut or Closed; and WrongEventLoop, before the
    end, if the producer was started in another event loop. It may be awaited any number of times, by several tasks,
    before and after the end. Cancelling one of them does not affect the others. If no task awaits it when the record
    fails, for instance after a wait that was cancelled or timed out, `flush`, `drain` or `close` reports the failure.

    `asyncio.create_task`, `TaskGroup.create_task`, `gather`, `wait_for` and `shield` accept it as a coroutine. It need
    not be awaited.
    """

    # Rejected: a future for each record, which takes three times as long; a future for each batch, since cancelling one
    # task that waits for it cancels it for all. The garbage collector need not track deliveries (gc=False), since no
    # batch refers to them. As a coroutine (`send`, `throw`, `close`) a Delivery has no state of its own: each step
    # looks at the batch anew.

    _batch: Batch
    _index: int

    def done(self) -> bool:
        """Return whether the record is acknowledged or has failed, so that `await` does not wait."""
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
            try:
                yield from _ending(batch).__await__()
            except (Exception, asyncio.CancelledError):
                self._wait_given_up()
                raise
        if batch.error is not None:
            batch.mark_told(index)
            raise own_copy(batch.error)
        return _metadata(batch, index)

    def _wait_given_up(self) -> None:
        """Note that a wait ended, for instance by a timeout, before the outcome was reported."""
        batch, index = self._place()
        batch.wait_given_up(index)

    def __repr__(self) -> str:
        batch, index = self._place()
        where = batch.topic if batch.partition < 0 else f"{batch.topic}-{batch.partition}"
        if not batch.is_done:
            return f"<Delivery {where} waiting>"
        if batch.error is not None:
            return f"<Delivery {where} failed: {batch.error}>"
        offset = f", offset={batch.base_offset + index}" if batch.base_offset >= 0 else ""
        return f"<Delivery {where} acknowledged{offset}>"

    def _waiting_for(self) -> Batch | None:
        """Return the record's batch, if it has not ended."""
        batch = self._place()[0]
        return None if batch.is_done else batch

    def _place(self) -> tuple[Batch, int]:
        """Return the batch that has the record now, and the index in it."""
        batch, index = self._batch, self._index
        while batch.forwarded is not None:
            batch, index = batch.forwarded[index]
        return batch, index


class BatchDelivery(_Steps, Coroutine[Any, Any, BatchMetadata]):
    """An awaitable that ends when all records of a `send_batch` are acknowledged, or have failed permanently.

    `await` returns BatchMetadata, or raises BatchDeliveryFailed, which has the failed records and the places of the
    others; and WrongEventLoop as a Delivery. It may be awaited repeatedly and by several tasks, as a Delivery. If no
    task awaits it when records fail, `flush`, `drain` or `close` reports the failures.
    """

    __slots__ = ("_parts", "_topic")

    def __init__(self, topic: str, parts: list[Part]) -> None:
        self._topic = topic
        self._parts = parts

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(len(part.indexes) for part in self._parts)

    def __bool__(self) -> bool:
        return True

    def _waiting_for(self) -> Batch | None:
        """Return the first batch that has not ended."""
        self._follow()
        return next((part.batch for part in self._parts if not part.batch.is_done), None)

    def done(self) -> bool:
        """Return whether every record is acknowledged or has failed, so that `await` does not wait."""
        self._follow()
        return all(part.batch.is_done for part in self._parts)

    def __await__(self) -> Generator[Any, None, BatchMetadata]:
        while True:
            self._follow()
            waiting: Batch | None = None
            for batch, first, indexes in self._parts:
                if not batch.is_done:
                    if batch.check_caller is not None:
                        batch.check_caller()
                    waiting = waiting or batch
                if not batch.is_done or batch.error is not None:
                    batch.mark_run_awaited(first, len(indexes))
            if waiting is None:
                break
            try:
                while not waiting.is_done and waiting.forwarded is None:
                    yield from _ending(waiting).__await__()
            except (Exception, asyncio.CancelledError):
                self._wait_given_up()
                raise
        return self._result()

    def _wait_given_up(self) -> None:
        self._follow()
        for batch, first, indexes in self._parts:
            batch.wait_given_up(first, len(indexes))

    def __repr__(self) -> str:
        self._follow()
        waiting = sum(len(part.indexes) for part in self._parts if not part.batch.is_done)
        failed = sum(len(part.indexes) for part in self._parts if part.batch.error is not None)
        return f"<BatchDelivery {self._topic}, {counted(len(self), 'record')}: {waiting} waiting, {failed} failed>"

    def _follow(self) -> None:
        """Replace forwarded batches by those to which they were forwarded."""
        while any(part.batch.forwarded is not None for part in self._parts):
            parts: list[Part] = []
            for part in self._parts:
                parts += [part] if part.batch.forwarded is None else _runs(part)
            self._parts = parts

    def _result(self) -> BatchMetadata:
        parts: list[PartMetadata] = []
        failures: list[FailedRecord] = []
        failed: list[int] = []
        for batch, first, indexes in self._parts:
            if batch.error is not None:
                batch.mark_told(first, len(indexes))
                failures += batch.failed(range(first, first + len(indexes)))
                failed += indexes
                continue
            base_offset = -1 if batch.base_offset < 0 else batch.base_offset + first
            part = PartMetadata(batch.partition, base_offset, len(indexes), indexes)
            if parts and (joined := _joined(parts[-1], part)) is not None:
                parts[-1] = joined
            else:
                parts.append(part)
        metadata = BatchMetadata(self._topic, tuple(parts))
        if failed:
            raise BatchDeliveryFailed(failures, failed, metadata)
        return metadata


def _runs(part: Part) -> list[Part]:
    """Return the parts that a part of a forwarded batch has become."""
    targets = part.batch.forwarded
    assert targets is not None
    runs: list[tuple[Batch, int, list[int]]] = []
    last_in: dict[Batch, tuple[Batch, int, list[int]]] = {}
    for place, index in enumerate(part.indexes, part.first):
        batch, first = targets[place]
        run = last_in.get(batch)
        if run is not None and run[1] + len(run[2]) == first:
            run[2].append(index)
        else:
            run = last_in[batch] = batch, first, [index]
            runs.append(run)
    return [Part(batch, first, _as_range(indexes)) for batch, first, indexes in runs]


def _as_range(ascending: list[int]) -> Sequence[int]:
    is_run = ascending[-1] - ascending[0] + 1 == len(ascending)
    return range(ascending[0], ascending[-1] + 1) if is_run else ascending


def _joined(before: PartMetadata, after: PartMetadata) -> PartMetadata | None:
    """Return both as one part, if the second follows the first in the log."""
    if before.partition != after.partition or before.base_offset < 0:
        return None
    if before.base_offset + before.count != after.base_offset:
        return None
    indexes: Sequence[int]
    if (
        isinstance(before.indexes, range)
        and isinstance(after.indexes, range)
        and before.indexes.stop == after.indexes.start
    ):
        indexes = range(before.indexes.start, after.indexes.stop)
    else:
        indexes = [*before.indexes, *after.indexes]
    return PartMetadata(before.partition, before.base_offset, before.count + after.count, indexes)


def own_copy(error: MinibrokerError) -> MinibrokerError:
    """Return a copy of a batch's error to raise. The original would get a traceback that refers to the Delivery, and so
    to itself, and the garbage collector does not track a Delivery."""
    own = copy(error)
    own.__cause__ = error.__cause__
    return own


def _metadata(batch: Batch, index: int) -> RecordMetadata:
    timestamp_ms = batch.timestamps[index] if batch.log_append_time_ms < 0 else batch.log_append_time_ms
    offset = -1 if batch.base_offset < 0 else batch.base_offset + index
    return RecordMetadata(batch.topic, batch.partition, offset, timestamp_ms)


def _throw(kind: type[BaseException] | BaseException, value: BaseException | object) -> None:
    if isinstance(kind, BaseException):
        raise kind
    raise value if isinstance(value, BaseException) else kind()


def check_on_delivery(on_delivery: object) -> None:
    """Raises InvalidSetting."""
    if not callable(on_delivery):
        raise InvalidSetting("on_delivery", on_delivery, "give a function of metadata and error")
    if inspect.iscoroutinefunction(on_delivery) or inspect.iscoroutinefunction(type(on_delivery).__call__):
        rule = "it is called, not awaited: define it by `def`, or wait for what `send` returns"
        raise InvalidSetting("on_delivery", on_delivery, rule)


def tell_on_delivery(
    batch: Batch, index: int, on_delivery: OnDelivery, call_soon: Callable[[Callable[[], None]], object]
) -> None:
    """Arrange that `on_delivery` is called once the record has ended. The event loop calls it: batches end in the
    middle of the sender's work, and a callback may send more."""

    def ended() -> None:
        if batch.forwarded is not None:
            tell_on_delivery(*batch.forwarded[index], on_delivery, call_soon)
        else:
            call_soon(partial(_tell, batch, index, on_delivery))

    if batch.is_done or batch.forwarded is not None:
        ended()
        return
    if batch.listeners is None:
        batch.listeners = []
    batch.listeners.append(ended)


def _tell(batch: Batch, index: int, on_delivery: OnDelivery) -> None:
    try:
        if batch.error is None:
            on_delivery(_metadata(batch, index), None)
        else:
            on_delivery(None, own_copy(batch.error))
            batch.mark_awaited(index)
            batch.mark_told(index)
    except Exception:
        # The caller of `send` cannot catch it any more. A failed record stays unreported, and `flush` reports it.
        logger.exception("on_delivery=%r raised for a record of %s", on_delivery, batch.topic)


def _ending(batch: Batch) -> asyncio.Future[None]:
    """Return a new future that ends when the batch has ended or was forwarded."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not future.done():
            future.set_result(None)

    if batch.listeners is None:
        batch.listeners = []
    batch.listeners.append(end)
    return future

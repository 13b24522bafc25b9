"""The blocking consumer.

The problem: a call into the loop costs some fifty microseconds, and a record a fraction of one. Yet the position of a
partition must be exactly behind the records that the caller has received, even if Ctrl-C comes at the worst moment.

The choice: a call returns a whole batch, as the iterator from which the asynchronous consumer itself hands out records.
The caller's thread takes records from it without any call, and the position follows from the number of records that are
left in it. So position, commit and the heartbeats count each record that was taken, and no other. A batch that arrived
while its caller was interrupted is returned by the next call.

Rejected: a queue of records between loop and caller. It would hold records of partitions that were sought, paused or
revoked since, and positions would be guesses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Literal, Unpack

from minibroker.client.consumer import Consumer as AsyncConsumer
from minibroker.client.errors import Closed, InvalidSetting
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.group.assignors import Strategy
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.group.listener import RebalanceListener as AsyncRebalanceListener
from minibroker.client.other_names import knows_other_names
from minibroker.client.security import Security
from minibroker.client.serializers import DeserializerChoice
from minibroker.client.settings import IsolationLevel, check_ms
from minibroker.client.sync.background import Background, Call
from minibroker.client.sync.errands import Errands
from minibroker.client.sync.facade import Coroutines, Ending, Facade, T, blocking, in_loop
from minibroker.protocol.model import TopicPartition

CLOSE_S = 30.0
"""The limit for the end of `with`, as for `close`."""
LEAVE_AT_EXIT_S = 3.0
"""The limit for leaving the group at the end of the interpreter, if the consumer was not closed."""


class RebalanceListener:
    """Derive from this class, override the methods that you need, and pass an instance to Consumer or `subscribe`.

    The methods run in the thread that asks the consumer for records (`poll`, an iteration) or closes it, within that
    call, while the thread holds no records. If no thread asks, they wait until one does. They may call the consumer:
    `commit`, `position`, `seek`, `pause`. All of them together have `max_poll_interval_ms`; after that the group goes
    on without this member. The call raises their exceptions when the rebalance is over.
    """

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """These partitions are about to go to other members, which get no records of them until this returns. Commit
        finished work here."""

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """These partitions were added. Their positions are the group's committed offsets. The list is empty if the
        rebalance added none."""

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """These partitions are lost: the group went on without this member, and other members may read them already. A
        commit would be refused. By default this calls `on_partitions_revoked`, as in Kafka."""
        self.on_partitions_revoked(partitions)


class _Listener(AsyncRebalanceListener):
    def __init__(self, listener: RebalanceListener, errands: Errands) -> None:
        self._listener = listener
        self._errands = errands

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self._errands.run(partial(self._listener.on_partitions_revoked, partitions))

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        await self._errands.run(partial(self._listener.on_partitions_assigned, partitions))

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        await self._errands.run(partial(self._listener.on_partitions_lost, partitions))


class _Ending(Ending):
    def __init__(self, consumer: AsyncConsumer, errands: Errands) -> None:
        super().__init__(consumer)
        self._consumer = consumer
        self._errands = errands
        self.is_done = True
        """The records that were handed out last are processed, as far as the leaving thread knows."""

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._consumer._close(CLOSE_S, is_done=error is None and self.is_done, cause=error)

    async def see_off(self, background: Background) -> None:
        self._errands.end()
        try:
            await self._consumer._close(LEAVE_AT_EXIT_S, is_done=False)
        finally:
            background.stop_soon()


class Consumer(Facade[AsyncConsumer]):
    """Reads records. Use it as `with Consumer("host:9092", topics=["orders"]) as consumer`, or call `start` and
    `close`. Then iterate with `for record in consumer`, or with `for batch in consumer.batches()`, which is several
    times as fast. Neither ever ends: leave the loop, or use `poll`. If an iteration is interrupted or left, the next
    one continues there.

    Guarantees, settings and errors are those of `minibroker.Consumer`. Functions that assign partitions or deserialize
    run in the background; the methods of a `listener` run in the thread that asks for records. Heartbeats continue in
    the background, whatever the caller's threads do. But if no thread asks for records or takes one for
    `max_poll_interval_ms`, the member leaves its group.

    Several threads may iterate: each record goes to one of them. A record counts as consumed when any of them asks for
    the next batch, so with a group, pass the offsets of finished work to `commit`.

    A waiting call that is interrupted (Ctrl-C) leaves the consumer unchanged, and skips nothing. A consumer that is
    still open when the interpreter ends leaves its group without another commit. In a forked child all calls raise
    ForkedClient, except `close`, which does nothing there. The constructor raises InvalidSetting.
    """

    _noun = "consumer"

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        topics: Sequence[str] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        partitions: Sequence[TopicPartition] | None = None,
        group: str | None = None,
        group_instance_id: str | None = None,
        listener: RebalanceListener | None = None,
        partition_assignment_strategy: Strategy | list[Strategy] | tuple[Strategy, ...] = "cooperative-sticky",
        auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest",
        isolation_level: IsolationLevel = "read_uncommitted",
        enable_auto_commit: bool = False,
        auto_commit_interval_ms: float = 5_000,
        session_timeout_ms: float = 45_000,
        heartbeat_interval_ms: float = 3_000,
        max_poll_interval_ms: float = 300_000,
        max_poll_records: int = 500,
        key_deserializer: DeserializerChoice = "bytes",
        value_deserializer: DeserializerChoice = "bytes",
        client_id: str = "minibroker-consumer",
        fetch_min_bytes: int = 1,
        fetch_max_wait_ms: float = 500,
        fetch_max_bytes: int = 50 * 1024 * 1024,
        max_partition_fetch_bytes: int = 1024 * 1024,
        fetch_max_buffer_bytes: int = 128 * 1024 * 1024,
        request_timeout_ms: float = 30_000,
        default_api_timeout_ms: float = 60_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 30_000,
        **security: Unpack[Security],
    ) -> None:
        self._errands = Errands()
        client = AsyncConsumer(
            bootstrap,
            topics=topics,
            pattern=pattern,
            partitions=partitions,
            group=group,
            group_instance_id=group_instance_id,
            listener=self._in_callers_thread(listener),
            partition_assignment_strategy=partition_assignment_strategy,
            auto_offset_reset=auto_offset_reset,
            isolation_level=isolation_level,
            enable_auto_commit=enable_auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            session_timeout_ms=session_timeout_ms,
            heartbeat_interval_ms=heartbeat_interval_ms,
            max_poll_interval_ms=max_poll_interval_ms,
            max_poll_records=max_poll_records,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            client_id=client_id,
            fetch_min_bytes=fetch_min_bytes,
            fetch_max_wait_ms=fetch_max_wait_ms,
            fetch_max_bytes=fetch_max_bytes,
            max_partition_fetch_bytes=max_partition_fetch_bytes,
            fetch_max_buffer_bytes=fetch_max_buffer_bytes,
            request_timeout_ms=request_timeout_ms,
            default_api_timeout_ms=default_api_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            **security,
        )
        self._goodbye = _Ending(client, self._errands)
        super().__init__(client, self._goodbye)
        self._errands.background = self._background
        self._reader: threading.Thread | None = None
        """The thread that last asked for records."""

    def _in_callers_thread(self, listener: RebalanceListener | None) -> _Listener | None:
        if listener is None:
            return None
        if not isinstance(listener, RebalanceListener):
            raise InvalidSetting("listener", listener, "derive it from minibroker.sync.RebalanceListener")
        for name in ("on_partitions_revoked", "on_partitions_assigned", "on_partitions_lost"):
            if inspect.iscoroutinefunction(getattr(listener, name)):
                rule = f"{name} is called, not awaited: define it by `def`, or use minibroker.Consumer"
                raise InvalidSetting("listener", listener, rule)
        return _Listener(listener, self._errands)

    def _serve(self) -> None:
        self._errands.serve()

    def close(self, timeout_ms: float = 30_000) -> None:
        """Make the automatic commit, give up the partitions, leave the group, and end all work in the background. Takes
        at most `timeout_ms`; steps that are not done by then are logged as a WARNING. Waiting calls in other threads
        raise Closed. A second `close`, or one in a forked child, does nothing. Raises WithinListener.

        The automatic commit includes the records that were handed out last, unless the user may not have processed
        them: `close` runs because of an exception (in `finally`, or by leaving `with`), or another thread is processing
        them. Those records are then returned again.
        """
        self._errands.check_not_within("close")
        timeout_s, cause = check_ms("timeout_ms", timeout_ms), sys.exc_info()[1]
        is_done = cause is None and self._is_done_with()
        self._errands.give_up_what_was_interrupted()
        self._end(lambda: self._client._close(timeout_s, is_done=is_done, cause=cause), self._serve)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._goodbye.is_done = self._is_done_with()
        self._errands.give_up_what_was_interrupted()
        super().__exit__(kind, error, traceback)

    def _is_done_with(self) -> bool:
        """Whether the records that were handed out last are processed, as far as that can be known."""
        reader = self._reader
        return reader is None or reader is threading.current_thread() or not reader.is_alive()

    # -- what is read --

    def subscribe(
        self,
        topics: Sequence[str] | None = None,
        *,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Replace the subscription by these topics, or by all topics whose whole name matches `pattern`. Takes effect
        in the background. Topics in both subscriptions are read on. If a topic does not exist for 10 s, the iteration
        raises that. Raises InvalidSetting."""
        told = self._in_callers_thread(listener)
        self._do(lambda: self._client.subscribe(topics, pattern=pattern, listener=told))

    assign = in_loop(AsyncConsumer.assign)

    def unsubscribe(self) -> None:
        """Stop reading, and leave the group after the automatic commit and the listener. Raises WithinListener."""
        self._errands.check_not_within("unsubscribe")
        is_done = sys.exc_info()[1] is None and self._is_done_with()
        self._call(lambda: self._client._unsubscribe(is_done=is_done), self._serve)

    subscription = in_loop(AsyncConsumer.subscription)

    # -- reading --

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records.

        Raises Closed, ForkedClient, ClientCrashed, CorruptBatch, LogTruncated, MaxPollIntervalExceeded, WithinListener,
        exceptions of the rebalance listener, and BrokerError: UNKNOWN_TOPIC_OR_PARTITION if the topic is gone,
        OFFSET_OUT_OF_RANGE with auto_offset_reset="none", the errors by which a group refuses a member, or any error
        that is not retriable. Iterating anew after an error tries again.
        """
        while True:
            self._reads("next")
            records = self._call(self._client._hand_out, self._serve)
            yield from records

    def __next__(self) -> Record:
        """Return the next record. Raises as iterating."""
        while True:
            self._reads("next")
            records = self._call(self._client._hand_out, self._serve)
            for record in records:
                return record

    def batches(self) -> Iterator[ConsumerBatch]:
        """Iterate by batches, as they were produced. May be mixed with iterating by records, and raises as that
        does."""
        return _Batches(self)

    def poll(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[Record]:
        """Return the available records of all partitions, at most `max_records` (by default `max_poll_records`). Waits
        for the first one; the list is empty if none arrives within `timeout_ms`. Raises as iterating."""
        self._reads("poll")
        return self._taken(lambda: self._client.poll(timeout_ms, max_records), self._give_back)

    def _next_batch(self) -> ConsumerBatch:
        self._reads("next")
        return self._taken(self._client._whole_batch, self._give_back_batch)

    def _reads(self, call: str) -> None:
        """This thread asks for records, which arrive only after the listener has returned."""
        self._errands.check_not_within(call)
        self._reader = threading.current_thread()

    def _taken(self, make: Coroutines[T], give_back: Callable[[T], None]) -> T:
        """Return the result of a call that consumes records. If the caller is interrupted before it has the result, the
        records are given back."""
        if self._state != "running":
            raise self._not_running()
        call = Call(make, self._serve)
        try:
            self._background.run(call)
        except BaseException:
            if call.has_result:
                with suppress(Closed):
                    self._background.soon(partial(give_back, call.result))
            raise
        return call.result

    def _give_back(self, records: list[Record]) -> None:
        first: dict[TopicPartition, int] = {}
        for record in records:
            first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        self._client._in_hand.give_back(first)

    def _give_back_batch(self, batch: ConsumerBatch) -> None:
        self._client._in_hand.give_back({TopicPartition(batch.topic, batch.partition): batch.offsets[0]})

    # -- positions --

    assignment = in_loop(AsyncConsumer.assignment)
    position = blocking(AsyncConsumer.position)
    position_epoch = in_loop(AsyncConsumer.position_epoch)
    seek = in_loop(AsyncConsumer.seek)
    seek_to_beginning = in_loop(AsyncConsumer.seek_to_beginning)
    seek_to_end = in_loop(AsyncConsumer.seek_to_end)
    pause = in_loop(AsyncConsumer.pause)
    resume = in_loop(AsyncConsumer.resume)
    paused = in_loop(AsyncConsumer.paused)
    seek_to_time = in_loop(AsyncConsumer.seek_to_time)
    lag = blocking(AsyncConsumer.lag)

    # -- commits --

    commit = blocking(AsyncConsumer.commit)

    def commit_nowait(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None
    ) -> concurrent.futures.Future[None]:
        """As `commit`, but in the background. The returned future may be waited for; a failure is logged as a WARNING
        in any case. Commits are carried out in the order of the calls."""
        outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        outcome.set_running_or_notify_cancel()

        def ended(commit: asyncio.Future[None]) -> None:
            if commit.cancelled():
                outcome.set_exception(Closed("the consumer was closed before the commit was acknowledged"))
            elif (error := commit.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        self._do(lambda: self._client.commit_nowait(offsets).add_done_callback(ended))
        return outcome

    committed = blocking(AsyncConsumer.committed)
    group_metadata = in_loop(AsyncConsumer.group_metadata)
    status = in_loop(AsyncConsumer.status)
    beginning_offsets = blocking(AsyncConsumer.beginning_offsets)
    end_offsets = blocking(AsyncConsumer.end_offsets)
    offsets_for_times = blocking(AsyncConsumer.offsets_for_times)


class _Batches:
    """A class, because a generator would end after an error."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> Iterator[ConsumerBatch]:
        return self

    def __next__(self) -> ConsumerBatch:
        return self._consumer._next_batch()

"""The consumer: the user's calls. Fetching, reading and the group have rooms of their own."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Unpack

from minibroker.client.cluster.calls import ends_with_its_client
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.cluster.offsets import OffsetAndTimestamp, list_offsets
from minibroker.client.errors import ApiTimedOut, InvalidSetting
from minibroker.client.fetching.fetch_settings import checked_fetch_settings
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.fetcher import UNKNOWN_TOPIC_PATIENCE_S, Fetcher
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.fetching.reader import Batches, Reader
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.group.assignors import Strategy
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata
from minibroker.client.group.consumer_status import ConsumerStatus, describe
from minibroker.client.group.group_settings import checked_group_settings
from minibroker.client.group.listener import RebalanceListener, checked_listener
from minibroker.client.group.session import GroupSession
from minibroker.client.group.subscription import Selection, checked_subscription
from minibroker.client.log import Logger
from minibroker.client.other_names import knows_other_names
from minibroker.client.security import Security
from minibroker.client.serializers import DeserializerChoice, choose_deserializer
from minibroker.client.settings import (
    IsolationLevel,
    check_boolean,
    check_by_partition,
    check_choice,
    check_integer,
    check_ms,
    check_partition,
    check_partitions,
)
from minibroker.client.tasks import weakly
from minibroker.protocol import messages as m
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.world import World

logger = Logger("minibroker.client")

ENDING_LOOP_S = 0.5
"""Limit for committing and leaving the group in `close` while the event loop ends."""


class Consumer(Client):
    """Reads records. Use it as `async with Consumer("host:9092", topics=["orders"]) as consumer`, or call `start` and
    `close`. Then iterate with `async for record in consumer`, with `async for batch in consumer.batches()`, which is
    several times as fast, or call `poll`. The iterations never end: leave the loop, or bound it with `asyncio.timeout`.
    If an iteration is cancelled or left, the next one continues there, with the same iterator or with another.

    Guarantees: each record of a partition is returned once and in order, beginning at the first position. Nothing above
    the high watermark is read. The checksum of each batch is verified. Markers, which end transactions, are not
    returned; the position steps over them.

    The consumer reads one of these: `topics`, or all topics whose whole name matches `pattern`, including partitions
    and topics that are added later; only the given `partitions`; or nothing until `subscribe` or `assign` is called.

    With a `group`, its members share the partitions of the topics, and `commit` saves the group's progress: the next
    owner of a partition continues there. (With `partitions`, the consumer commits but does not share.) A rebalance
    takes partitions away only while this consumer's user asks for the next records, so no other member gets a partition
    whose record is being processed, unless that takes longer than `max_poll_interval_ms`. A record counts as processed
    when the next one is asked for. `commit()` states that all records that were handed out are processed, including
    the last one.

    Settings have Kafka's names and meaning; times are in milliseconds, sizes in bytes:

    - If a topic is deleted, a WARNING is logged and its partitions leave the assignment, unless they were named in
      `partitions`. If it is created again, it is read from its beginning. While nothing else is left to read, a call
      for records raises UNKNOWN_TOPIC_OR_PARTITION every 10 s.
    - `auto_offset_reset`: where to begin if the group has committed nothing, and where to continue if the position is
      no longer in the log: "earliest" (the default here, so that nothing is missed; Kafka's is "latest"), "latest", or
      "none", which raises. If an unclean election loses records that were read, the consumer continues where the log
      diverges from the records that it has read; with "none" it raises LogTruncated (KIP-320). Missed or lost records
      are logged as a WARNING with their offsets. A leader may have been deposed without knowing it, so the consumer
      first waits until another broker confirms that it leads.
    - `isolation_level`: "read_uncommitted" also returns the records of open and aborted transactions. "read_committed"
      skips aborted ones and ends at the last stable offset, where the oldest open transaction begins; so do
      `end_offsets`, `lag`, `seek_to_end` and `offsets_for_times` then.
    - `enable_auto_commit`: commit processed records every `auto_commit_interval_ms`, before partitions are taken away,
      and in `close`. Off by default (on in Kafka).
    - `group_instance_id`: the name of a static member (KIP-345). A static member does not leave at `close`. If it is
      back within `session_timeout_ms`, it gets its previous partitions without a rebalance.
    - `partition_assignment_strategy`: "cooperative-sticky", "range", "roundrobin", "sticky", a function or an Assignor,
      or several of them; all members must have one in common.
    - `session_timeout_ms`, `heartbeat_interval_ms`: the group removes a member whose heartbeats stop for the session
      timeout. Heartbeats continue while the event loop is blocked.
    - `max_poll_interval_ms`: a consumer that is not asked for records for this long leaves the group, and its next call
      raises MaxPollIntervalExceeded. Other members wait at most this long for it during a rebalance.
    - `max_poll_records`: the most records that `poll` returns.
    - `key_deserializer`, `value_deserializer`: "bytes", "str", "json", "msgpack", or a function
      (`minibroker.client.serializers`). A record that cannot be deserialized raises DeserializationFailed, again and
      again: `seek` past it to continue.
    - `fetch_min_bytes`, `fetch_max_wait_ms`: a broker answers when it has this many bytes, or after this wait.
      `fetch_max_bytes`, `max_partition_fetch_bytes`: limits of one answer, which has at least one batch in any case.
      `fetch_max_buffer_bytes`: limit of the bytes that are fetched ahead, over all partitions.
    - `metadata_max_age_ms`: new partitions and topics are found within this time (30 s; in Kafka 5 minutes).
    - `default_api_timeout_ms`: limit for `start`, `position`, `commit`, `committed` and the offset look-ups.

    A consumer that is dropped without `close` emits a ResourceWarning.

    The constructor raises InvalidSetting. A consumer is not thread-safe, and belongs to the event loop in which it is
    started: all calls from another loop, including `close`, raise WrongEventLoop. (Iterations check that once for each
    batch.)
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
        world: World | None = None,
        **security: Unpack[Security],
    ) -> None:
        self._reads = Selection(topics, pattern, partitions)
        check_boolean("enable_auto_commit", enable_auto_commit)
        check_choice("auto_offset_reset", auto_offset_reset, ["earliest", "latest", "none"])
        fetch_settings = checked_fetch_settings(
            fetch_min_bytes,
            fetch_max_wait_ms,
            fetch_max_bytes,
            max_partition_fetch_bytes,
            fetch_max_buffer_bytes,
            isolation_level,
        )
        deserialize_key = choose_deserializer("key_deserializer", key_deserializer)
        deserialize_value = choose_deserializer("value_deserializer", value_deserializer)
        self._max_poll_records = check_integer("max_poll_records", max_poll_records, 1, 1 << 30)
        self._api_timeout_s = check_ms("default_api_timeout_ms", default_api_timeout_ms, lowest=1)
        # Validate these even without a group, so that mistakes surface now.
        auto_commit_interval_s = check_ms("auto_commit_interval_ms", auto_commit_interval_ms, lowest=1)
        settings = checked_group_settings(
            group,
            group_instance_id,
            partition_assignment_strategy,
            session_timeout_ms,
            heartbeat_interval_ms,
            max_poll_interval_ms,
            self._api_timeout_s,
        )
        checked_listener(listener)
        for name, of_member in (("group_instance_id", group_instance_id), ("listener", listener)):
            if of_member is not None and group is None:
                raise InvalidSetting(name, of_member, 'it is for members of a group: also give group="name"')
            if of_member is not None and partitions is not None:
                rule = "it is for members of a group, which share topics: give topics instead of partitions"
                raise InvalidSetting(name, of_member, rule)
        if enable_auto_commit and group is None:
            rule = 'offsets are committed for a group: also give group="name"'
            raise InvalidSetting("enable_auto_commit", enable_auto_commit, rule)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
            security=security,
        )
        self._partitions = FetchedPartitions(
            self._runtime, auto_offset_reset=auto_offset_reset, max_partition_bytes=max_partition_fetch_bytes
        )
        self._fetcher = Fetcher(self._runtime, self._partitions, fetch_settings)
        self._isolation_level = fetch_settings.isolation_level
        self._in_hand = InHand(self._runtime.clock, self._partitions, client_id)
        self._group = group
        self._session: GroupSession | None = None
        if group is not None:
            self._session = GroupSession(
                self._runtime,
                self._partitions,
                self._in_hand,
                settings,
                has_member=partitions is None,
                auto_commit_interval_s=auto_commit_interval_s if enable_auto_commit else None,
            )
        self._member = None if self._session is None else self._session.member
        if self._member is not None:
            self._member.listen(listener)
        self._reader = Reader(
            self._runtime,
            self._partitions,
            self._in_hand,
            deserialize_key,
            deserialize_value,
            check_running=weakly(self._check_running),
            check_readable=weakly(self._check_readable),
            yields=group is not None,
        )
        self._records: Iterator[Record] = iter(())
        """The records of `_in_hand`, or an exhausted iterator."""

    async def start(self) -> None:
        """Reach a broker and find the topics' partitions. A member joins its group in the background.

        Raises NetworkError if no broker answers within 5 s, and BrokerError for a topic or partition that does not
        exist, after 10 s (it might be about to be created) or `default_api_timeout_ms`, whichever is less.
        """
        await super().start()

    async def _reach(self) -> None:
        self._want()
        await super()._reach()
        patience_s = min(UNKNOWN_TOPIC_PATIENCE_S, self._api_timeout_s)
        await self._reads.found(self._runtime, patience_s, self._group)

    def _want(self) -> None:
        self._reads.want(self._runtime.metadata)
        self._partitions.named = self._reads.topics

    def _go(self) -> None:
        if self._session is not None:
            self._session.go()
        if not self._runtime.loop_is_ending:
            self._apply()
        elif self._session is not None:
            self._session.go_on()
        self._runtime.tasks.start(self._fetcher.run(), "fetcher")

    def _apply(self) -> None:
        """Begin to read the selection."""
        self._want()
        subscribed, assigned = self._reads.subscribed, self._reads.assigned
        if assigned is not None:
            kept = set(assigned)
            self._partitions.remove([partition for partition in self._partitions.states if partition not in kept])
            if self._session is None:
                new = [partition for partition in assigned if partition not in self._partitions.states]
                self._partitions.assign_partitions(new)
            else:
                self._session.begin_by_hand(self._partitions.add_held(assigned))
        elif self._member is not None:
            self._member.subscribe(subscribed)
        elif subscribed is not None:
            self._partitions.assign_topics(subscribed.topics, subscribed.pattern)
        else:
            self._partitions.assign_topics(())
        self._partitions.adopt_topics()
        self._partitions.wake()
        self._tell()

    def _tell(self) -> None:
        self._partitions.pulse.notify()

    async def close(self, timeout_ms: float = 30_000) -> None:
        """Make the automatic commit, give up the partitions, leave the group, and end all tasks and connections. Takes
        at most `timeout_ms`; steps that are not done by then are logged as a WARNING. Waiting calls raise Closed. A
        second `close` waits for the first, for `timeout_ms` at most. If the event loop ends (`asyncio.run` cancels all
        tasks), `close` takes at most a second. Raises WithinListener, and finally the listener's exception; if `close`
        runs because of another exception, that one gets it as a note.

        The automatic commit includes the records that were handed out last, unless the user may not have processed
        them: `close` runs because of an exception (in `finally`, or by leaving `async with`), or another task is
        processing them or was cancelled during that. Those records are then returned again.
        """
        cause = sys.exc_info()[1]
        timeout_s, is_done = check_ms("timeout_ms", timeout_ms), cause is None and self._in_hand.is_done_with()
        await self._close(timeout_s, is_done=is_done, cause=cause)

    async def _close(self, timeout_s: float, *, is_done: bool, cause: BaseException | None = None) -> None:
        """`is_done`: the records that were handed out last are processed. `cause`: the exception that closes the
        consumer."""
        if self._state == "closed":
            return
        self._check_loop()
        if self._runtime.loop_is_ending:
            timeout_s = min(timeout_s, ENDING_LOOP_S)
        self._check_not_within_listener("close")
        if self._state == "closing":  # a signal handler closes it, say, and the body of `async with` ends
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_ended.wait()
            return
        was_running, self._state = self._state == "running", "closing"
        self._tell()
        deadline = self._runtime.clock.monotonic() + timeout_s
        before = self._raised_by_listener()
        try:
            if was_running and self._session is not None:
                self._in_hand.put_down(is_done)
                goodbye = self._session.say_goodbye()
                await self._within(goodbye, timeout_s, "leaving the group", self._session.undone)
        finally:
            self._state = "closed"
            self._calls.end()
            if self._session is not None:
                self._session.cancel_commits()
            self._tell()
            least_s = ENDING_LOOP_S if self._runtime.loop_is_ending else 1.0
            left_s = max(least_s, deadline - self._runtime.clock.monotonic())
            try:
                await self._within(self._runtime.close(), left_s, "ending its tasks")
            finally:
                self._has_ended.set()
        self._raise_from_listener(before, cause)

    def _raise_from_listener(self, before: Exception | None, cause: BaseException | None = None) -> None:
        """Raise the listener's exception if it is not `before`, or add it to `cause` as a note."""
        raised = self._raised_by_listener()
        if raised is None or raised is before:
            return
        errors = self._partitions.errors
        errors[:] = [error for error in errors if error is not raised]
        if cause is None:
            raise raised
        cause.add_note(f"While the consumer was closed its listener raised {raised!r}")

    def _raised_by_listener(self) -> Exception | None:
        return None if self._member is None else self._member.listener_calls.last_raised

    async def _within(
        self, work: Coroutine[Any, Any, None], timeout_s: float, doing: str, undone: Callable[[], str] = str
    ) -> None:
        """`undone` returns the steps that are not done yet, in words."""
        task = asyncio.ensure_future(work)
        began = self._runtime.clock.monotonic()
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            if task.done() and not task.cancelled():
                task.result()
            else:
                task.cancel()
                who, took_s = self._runtime.connections.client_id, self._runtime.clock.monotonic() - began
                why = ", as the event loop ends (asyncio.run has cancelled its tasks)"
                why = why if self._runtime.loop_is_ending else ""
                what = f": {text}" if (text := undone()) else ""
                logger.warning("%s: close: gave up %s after %.1f s%s%s", who, doing, took_s, why, what)

    def __repr__(self) -> str:
        states = self._partitions.states.values()
        return (
            f"<Consumer {self._state}, bootstrap={self._runtime.bootstrap}, partitions={len(states)}, "
            f"batches_waiting={sum(len(state.fetched) for state in states)}>"
        )

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
        self._check_running()
        if (topics is None) == (pattern is None):
            raise InvalidSetting("topics", topics, "give either topics or pattern")
        if self._reads.assigned is not None:
            raise InvalidSetting(
                "topics", topics, "this consumer's partitions are assigned by hand: unsubscribe() first"
            )
        subscribed = checked_subscription(topics, pattern)
        checked = checked_listener(listener)
        if self._member is not None:
            self._member.listen(checked)
        elif checked is not None:
            raise InvalidSetting("listener", listener, 'is for members of a group: also give group="name"')
        self._reads.subscribed = subscribed
        self._apply()

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Replace the assignment by these partitions, without regard to other consumers. Partitions in both assignments
        are read on. With a group, they begin at its committed offsets. Raises InvalidSetting."""
        self._check_running()
        if self._reads.subscribed is not None:
            raise InvalidSetting(
                "partitions", partitions, "this consumer has subscribed to topics: unsubscribe() first"
            )
        checked = check_partitions("partitions", partitions)
        if not checked:
            raise InvalidSetting("partitions", partitions, "give at least one; unsubscribe() reads nothing")
        if self._session is not None:
            self._session.assigns_by_hand(checked)
        self._reads.assigned = checked
        self._apply()

    async def unsubscribe(self) -> None:
        """Stop reading, and leave the group after the automatic commit (as in `close`) and the listener. Waits for
        brokers for at most `default_api_timeout_ms`. If this call is cancelled, the consumer leaves the group in the
        background. A static member stays in the group until its session ends, as in Kafka. Raises WithinListener, and
        the listener's exception."""
        await self._unsubscribe(is_done=sys.exc_info()[1] is None and self._in_hand.is_done_with())

    @ends_with_its_client
    async def _unsubscribe(self, *, is_done: bool) -> None:
        """`is_done` as for `_close`."""
        self._check_running()
        self._check_not_within_listener("unsubscribe")
        self._in_hand.put_down(is_done)
        before = self._raised_by_listener()
        if self._session is not None:
            if self._session.is_member:
                self._reads.subscribed = None
            await self._session.leave()
            self._session.assigns_no_more()
        self._reads.clear()
        self._partitions.assign_none()
        self._raise_from_listener(before)

    def _check_not_within_listener(self, call: str) -> None:
        if self._member is not None:
            self._member.listener_calls.check_caller_is_outside(call)

    def _check_not_listener(self, call: str) -> None:
        if self._member is not None:
            self._member.listener_calls.check_caller_is_another(call)

    def _check_readable(self) -> None:
        if self._member is not None and (fenced := self._member.standing.fenced) is not None:
            raise fenced.with_traceback(None)
        if self._reads.is_empty:
            raise InvalidSetting("topics", None, "there is nothing to read: call subscribe() or assign() first")

    def subscription(self) -> list[str]:
        """Return the topics subscribed to, sorted; for a pattern, the topics that match it now."""
        if self._reads.subscribed is None:
            return []
        return sorted(self._reads.subscribed.names(self._runtime.metadata.cluster.existing()))

    # -- reading --

    def __aiter__(self) -> AsyncIterator[Record]:
        return self

    async def __anext__(self) -> Record:
        """Return the next record.

        Raises Closed, ClientCrashed, CorruptBatch, LogTruncated, MaxPollIntervalExceeded, WithinListener, exceptions of
        the rebalance listener, and BrokerError: UNKNOWN_TOPIC_OR_PARTITION if all named topics are gone,
        OFFSET_OUT_OF_RANGE with auto_offset_reset="none", the errors by which a group refuses a member
        (FENCED_INSTANCE_ID, INCONSISTENT_GROUP_PROTOCOL), or any error that is not retriable. Iterating on after an
        error tries again.
        """
        while True:
            for record in self._records:
                return record
            self._records = await self._hand_out()

    async def _hand_out(self) -> Iterator[Record]:
        """Return the records of the open batch, or of the next one. Raises as `__anext__`."""
        self._check_not_listener("anext")
        return await self._reader.records()

    async def _whole_batch(self) -> ConsumerBatch:
        self._check_not_listener("anext")
        return await self._reader.batch()

    def batches(self) -> AsyncIterator[ConsumerBatch]:
        """Iterate by batches, as they were produced. May be mixed with iterating by records. Raises as `__anext__`."""
        return Batches(self._whole_batch)

    async def poll(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[Record]:
        """Return the available records of all partitions, at most `max_records` (by default `max_poll_records`). Waits
        for the first one; the list is empty if none arrives within `timeout_ms`. Raises as `__anext__`."""
        timeout_s = check_ms("timeout_ms", timeout_ms)
        limit = self._max_poll_records if max_records is None else check_integer("max_records", max_records, 1, 1 << 30)
        self._check_running()
        self._check_not_listener("poll")
        return await self._reader.poll(timeout_s, limit)

    # -- positions --

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, sorted."""
        return sorted(self._partitions.states)

    @ends_with_its_client
    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record of a partition. Raises ApiTimedOut if it is not found in time, and
        BrokerError if there is none."""
        state = self._state_of(partition)
        try:
            async with asyncio.timeout(self._api_timeout_s):
                while state.position is None:
                    if state.error is not None:
                        raise state.error.with_traceback(None)
                    await self._partitions.pulse.wait()
                    state = self._state_of(partition)  # the partition may be gone by now
        except TimeoutError as error:
            raise ApiTimedOut(
                f"the position in {partition} was not found within {self._api_timeout_s:g} s: "
                "see `minibroker status` for whether it has a leader"
            ) from error
        return state.position

    def position_epoch(self, partition: TopicPartition) -> int | None:
        """Return the leader epoch of the last record before the position (Kafka's `OffsetAndMetadata.leaderEpoch`);
        None if it is not known, as after a `seek` without it. Keep it with the position, and pass both to `seek`."""
        epoch = self._state_of(partition).position_epoch
        return None if epoch == NO_EPOCH else epoch

    def seek(self, partition: TopicPartition, offset: int, leader_epoch: int | None = None) -> None:
        """Continue at `offset`. If it is not in the log, `auto_offset_reset` applies when the offset is fetched.

        `leader_epoch`: see `position_epoch` and `OffsetAndTimestamp`. With it, the consumer asks no leader that was
        deposed before the record in front of `offset` was written, and detects the loss of that record in an unclean
        election (KIP-320).
        """
        epoch = NO_EPOCH if leader_epoch is None else check_integer("leader_epoch", leader_epoch, 0, (1 << 31) - 1)
        self._move([partition], check_integer("offset", offset, 0, (1 << 62)), epoch=epoch)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Continue at the first record in the log; without arguments, in all partitions."""
        self._move(partitions, None, m.EARLIEST_TIMESTAMP)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Continue after the last readable record; without arguments, in all partitions. The end is looked up soon
        after this returns; `position` returns it."""
        self._move(partitions, None, m.LATEST_TIMESTAMP)

    def _move(
        self,
        partitions: Iterable[TopicPartition],
        position: int | None,
        reset: int | None = None,
        epoch: int = NO_EPOCH,
    ) -> None:
        self._check_usable()
        states = [self._state_of(partition) for partition in partitions] or list(self._partitions.states.values())
        for state in states:
            if state is self._in_hand.state:
                self._in_hand.drop()
            self._partitions.move(state, position, reset, epoch)
            state.handed_out_of = ""
            state.saved = None  # the group does not have the position that the user has chosen

    def seek_to_time(self, timestamp_ms: int, *partitions: TopicPartition) -> None:
        """Continue at the first record at or after that time, in milliseconds since 1970; at the end if there is none.
        Without partitions, in all of them."""
        self._move(partitions, None, check_integer("timestamp_ms", timestamp_ms, 0, 1 << 62))

    @ends_with_its_client
    async def lag(self, *partitions: TopicPartition) -> dict[TopicPartition, int]:
        """Return the number of offsets from the position to the end of each partition, by default of all assigned ones.
        Negative if the position is beyond the end, because of a `seek` or a commit. Raises ApiTimedOut, BrokerError,
        NetworkError."""
        asked = check_partitions("partitions", partitions) or self.assignment()
        at = {partition: await self.position(partition) for partition in asked}
        ends = await self.end_offsets(asked)
        return {partition: ends[partition] - at[partition] for partition in asked}

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`."""
        for state in [self._state_of(partition) for partition in partitions]:
            state.is_paused = True
            if self._in_hand.is_open(state):
                self._in_hand.drop()
                assert state.position is not None
                self._partitions.go_back(state, state.position)

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo `pause`."""
        for state in [self._state_of(partition) for partition in partitions]:
            state.is_paused = False
        self._partitions.wake()
        self._partitions.pulse.notify()

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions, sorted."""
        return sorted(partition for partition, state in self._partitions.states.items() if state.is_paused)

    # -- commits --

    @ends_with_its_client
    async def commit(self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None) -> None:
        """Save the group's progress: the positions of all assigned partitions, which are behind the last records that
        were handed out, or `offsets` (each is the offset of the next record to read). When this returns, the group
        continues there, whatever happens.

        Retries through failovers and rebalances for `default_api_timeout_ms`, and then raises CommitFailed, which names
        the partitions. A member cannot commit partitions that it has lost. If the group removed it, each commit raises
        CommitFailed for records that were handed out and not committed, until the member has an assignment again.
        Raises InvalidSetting without a group.
        """
        await self._session_of_group().commit(offsets)

    def commit_nowait(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None
    ) -> asyncio.Future[None]:
        """As `commit`, but in the background. The returned future may be awaited; a failure is logged as a WARNING in
        any case. Commits are carried out in the order of the calls."""
        return self._session_of_group().commit_nowait(offsets)

    @ends_with_its_client
    async def committed(self, *partitions: TopicPartition) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset for each partition, assigned or not; None if there is none, or only one
        of an earlier topic of that name. Without arguments, for all assigned partitions. Raises BrokerError,
        NetworkError, and InvalidSetting without a group."""
        session = self._session_of_group()
        return await session.committed(check_partitions("partitions", partitions) or self.assignment())

    def group_metadata(self) -> GroupMetadata:
        """Return this consumer's place in its group, for `Transaction.send_offsets`. Call it after the records were
        handed out whose offsets are sent. Raises BrokerError (ILLEGAL_GENERATION) if the consumer has lost their
        partitions, Closed, and InvalidSetting without a group."""
        return self._session_of_group().metadata()

    def _session_of_group(self) -> GroupSession:
        self._check_usable()
        if self._session is None:
            raise InvalidSetting("group", None, 'offsets are committed for a group: Consumer(..., group="name")')
        return self._session

    def status(self) -> ConsumerStatus:
        """Explain in words why no records arrive, if none do. Sends no requests: the answer is this consumer's view."""
        return describe(
            state=self._state,
            fetcher=self._fetcher,
            states=self._partitions.states,
            member=self._member if self._reads.assigned is None else None,
            reads=self._reads,
            runtime=self._runtime,
            in_hand=self._in_hand,
        )

    @ends_with_its_client
    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset in the log of each partition, assigned or not. Raises BrokerError, NetworkError."""
        return await self._offsets(partitions, m.EARLIEST_TIMESTAMP)

    @ends_with_its_client
    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last readable record of each partition: the high watermark, or for read_committed
        the last stable offset. Raises BrokerError, NetworkError."""
        return await self._offsets(partitions, m.LATEST_TIMESTAMP)

    async def _offsets(self, partitions: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        self._check_running()
        asked = dict.fromkeys(check_partitions("partitions", partitions), timestamp)
        found = await list_offsets(self._runtime, asked, self._api_timeout_s, self._isolation_level)
        return {partition: 0 if result is None else result.offset for partition, result in found.items()}

    @ends_with_its_client
    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record of each partition at or after the given time; None if there is none. Raises
        BrokerError, NetworkError."""
        self._check_running()
        asked = check_by_partition(
            "timestamps_ms", timestamps_ms, 1_700_000_000_000, lambda at: check_integer("timestamp_ms", at, 0, 1 << 62)
        )
        return await list_offsets(self._runtime, asked, self._api_timeout_s, self._isolation_level)

    def _check_usable(self) -> None:
        """As `_check_running`, but the listener may call the consumer during `close`."""
        if self._state != "closing":
            self._check_running()

    def _state_of(self, partition: TopicPartition) -> TopicPartitionState:
        self._check_usable()
        state = self._partitions.states.get(check_partition("partition", partition))
        if state is None:
            raise InvalidSetting(
                "partition", partition, f"it is not assigned to this consumer; {self.status().summary}"
            )
        return state

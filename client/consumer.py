"""The consumer: records and batches as async iterators over what the fetcher brings."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Literal

from minibroker.client.errors import ApiTimedOut, CorruptBatch, InvalidSetting
from minibroker.client.fetch_state import FetchedBatch, PartitionState
from minibroker.client.fetcher import UNKNOWN_TOPIC_PATIENCE_S, Fetcher
from minibroker.client.lifecycle import Client
from minibroker.client.offsets import OffsetAndTimestamp, list_offsets
from minibroker.client.records import ConsumerBatch, Record
from minibroker.client.settings import check_choice, check_integer, check_ms, check_names, check_partitions
from minibroker.client.stalls import STALL_S, Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import CorruptRecord, decode_batch
from minibroker.protocol.world import World


class Consumer(Client):
    """Reads records. Use it as `async with Consumer("host:9092", topics=["orders"]) as consumer`, or call `start`
    and `close`; then `async for record in consumer`, or, several times as fast, `async for batch in
    consumer.batches()`. Neither ever ends: leave the loop, or bound it with `asyncio.timeout`. After an iteration that
    was cancelled or left, the next one goes on where it was, with the same iterator or with another.

    Guarantees: each record of a partition once and in order, from its first position on. Nothing above the high
    watermark is read. Every batch's checksum is checked.

    Settings have Kafka's names and meaning; times are in milliseconds, sizes in bytes:

    - `topics`: all of their partitions, those that are added later included; or `partitions`: just those. A topic that
      is deleted and created again is read from its beginning. Partitions that it then lacks leave the assignment;
      those that were named in `partitions` raise UNKNOWN_TOPIC_OR_PARTITION.
    - `auto_offset_reset`: where to begin, and where to go on if the position is no longer in the log: "earliest" (the
      default here, so that nothing is missed; Kafka's is "latest"), "latest", or "none", which raises. If records that
      were read are lost in an unclean election, it goes on where the log is another one than was read; with "none" it
      raises LogTruncated (KIP-320). Whatever was missed or lost is a WARNING with the offsets. A leader alone is not
      believed about such things, as it may have been deposed without knowing: the consumer waits until another broker
      knows it as the leader, too.
    - `fetch_min_bytes`, `fetch_max_wait_ms`: a broker waits until it has so many bytes, or for so long.
      `fetch_max_bytes`, `max_partition_fetch_bytes`: limits of one answer (which has at least one batch all the same).
    - `default_api_timeout_ms`: for `start`, `position` and the offset look-ups.

    A consumer that is dropped without `close` warns (ResourceWarning).

    The constructor raises InvalidSetting. Not thread-safe, and for one event loop, the one in which it is started: a
    call from another, to `close` as well, raises WrongEventLoop. (An iteration checks that once for each batch.)
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
        world: World | None = None,
    ) -> None:
        if (topics is None) == (partitions is None) or not (topics or partitions):
            raise InvalidSetting("topics", topics, 'give either topics=["name"] or partitions=[TopicPartition(...)]')
        self._topics = check_names("topics", topics or ())
        self._partitions = check_partitions("partitions", partitions or ())
        check_choice("auto_offset_reset", auto_offset_reset, ["earliest", "latest", "none"])
        check_integer("fetch_min_bytes", fetch_min_bytes, 0, 1 << 30)
        check_integer("fetch_max_bytes", fetch_max_bytes, 1, 128 * 1024 * 1024)
        check_integer("max_partition_fetch_bytes", max_partition_fetch_bytes, 1, 128 * 1024 * 1024)
        self._api_timeout_s = check_ms("default_api_timeout_ms", default_api_timeout_ms, lowest=1)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
        )
        self._fetcher = Fetcher(
            self._runtime,
            auto_offset_reset=auto_offset_reset,
            fetch_min_bytes=fetch_min_bytes,
            fetch_max_wait_s=check_ms("fetch_max_wait_ms", fetch_max_wait_ms),
            fetch_max_bytes=fetch_max_bytes,
            max_partition_fetch_bytes=max_partition_fetch_bytes,
        )
        self._batch: ConsumerBatch | None = None
        """The batch that is being handed out by records, in partition `_current`."""
        self._records: Iterator[Record] = iter(())
        self._current: PartitionState | None = None
        self._generation = 0
        """That of `_current` when the batch was taken. Once `_current` has another, the fetcher has moved the partition
        (another topic of that name, a truncation): the positions of the batch no longer count. The move has exhausted
        the rest of its records (`PartitionState.move`), so there is no check for each record."""

    async def start(self) -> None:
        """Reach a broker and find the topics' partitions.

        Raises NetworkError if no broker answers within 2 s, and BrokerError for a topic or partition that does not
        exist, after 10 s (it might be about to be created) or `default_api_timeout_ms`, whichever is less.
        """
        await super().start()

    async def _reach(self) -> None:
        for topic in (*self._topics, *(partition.topic for partition in self._partitions)):
            self._runtime.metadata.want(topic)
        await super()._reach()
        await self._find_topics()

    def _go(self) -> None:
        self._fetcher.assign_topics(self._topics)
        self._fetcher.assign_partitions(self._partitions)
        self._fetcher.adopt_topics()
        self._runtime.tasks.start(self._fetcher.run(), "fetcher")

    def _tell(self) -> None:
        self._fetcher.pulse.notify()

    async def _find_topics(self) -> None:
        patience_s = min(UNKNOWN_TOPIC_PATIENCE_S, self._api_timeout_s)
        clock, metadata = self._runtime.clock, self._runtime.metadata
        deadline = clock.monotonic() + patience_s
        stalls: Stalls[str] = Stalls(self._runtime.connections.client_id)
        while (problem := self._missing()) is not None:
            if not ERRORS[problem.code].retriable or clock.monotonic() >= deadline:
                raise problem
            waiting = {"start": str(problem)}
            stalls.look(clock.monotonic(), waiting, waiting.__getitem__)
            try:
                async with asyncio.timeout(max(0.0, min(deadline - clock.monotonic(), STALL_S))):
                    await metadata.refreshed()
            except TimeoutError:
                continue
        stalls.look(clock.monotonic(), (), str)

    def _missing(self) -> BrokerError | None:
        cluster = self._runtime.metadata.cluster
        for topic in self._topics:
            if topic not in cluster.topics:
                return BrokerError(cluster.errors.get(topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), topic)
        for partition in self._partitions:
            info = cluster.topics.get(partition.topic)
            if info is None or partition.partition not in info.partitions:
                return BrokerError(
                    cluster.errors.get(partition.topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), str(partition)
                )
        return None

    def __repr__(self) -> str:
        states = self._fetcher.states.values()
        return (
            f"<Consumer {self._state}, bootstrap={self._runtime.bootstrap}, partitions={len(states)}, "
            f"batches_waiting={sum(len(state.fetched) for state in states)}>"
        )

    # -- reading --

    def __aiter__(self) -> AsyncIterator[Record]:
        return self

    async def __anext__(self) -> Record:
        """The next record.

        Raises Closed, ClientCrashed, CorruptBatch, LogTruncated, and BrokerError: UNKNOWN_TOPIC_OR_PARTITION if the
        topic is gone, OFFSET_OUT_OF_RANGE with auto_offset_reset="none", or any error that is not retriable. Iterating
        on after an error tries again.
        """
        while True:
            for record in self._records:
                return record
            await self._hand_out()

    async def _hand_out(self) -> Iterator[Record]:
        """What is left of the batch whose records are being taken, or else the next one's: taking them moves the
        position, in whatever thread. Raises as `__anext__`."""
        while not length_hint(self._records):
            self._end_batch()
            found = await self._next_batch()
            if found is not None:
                state, batch = found
                self._current, self._batch, self._generation = state, batch, state.generation
                self._records = state.hand_out(batch)
        return self._records

    def batches(self) -> AsyncIterator[ConsumerBatch]:
        """Iterate by batches, as they were produced. May be mixed with iterating by records. Raises as `__anext__`."""
        return _Batches(self)

    async def _whole_batch(self) -> ConsumerBatch:
        while True:
            state, batch = self._current, self._batch
            rest = length_hint(self._records) if self._is_handing_out(state) else 0
            self._end_batch()
            if state is not None and batch is not None and rest:
                found: tuple[PartitionState, ConsumerBatch] | None = (state, batch.since(len(batch) - rest))
            else:
                found = await self._next_batch()
            if found is not None:
                state, batch = found
                state.position = batch.next_offset
                return batch

    def _end_batch(self) -> None:
        """The records handed out last are consumed, and with them the rest of the batch, which holds no records."""
        if self._current is not None and self._batch is not None and self._is_handing_out(self._current):
            self._current.position = self._batch.next_offset
        self._drop_batch()

    def _is_handing_out(self, state: PartitionState | None) -> bool:
        """Whether a batch of that partition is being handed out, and the partition was not moved since."""
        return state is not None and state is self._current and state.generation == self._generation

    def _drop_batch(self) -> None:
        if self._current is not None:
            self._current.hand_out_no_more()
        self._current = self._batch = None

    async def _next_batch(self) -> tuple[PartitionState, ConsumerBatch] | None:
        """The next batch with records. The caller sets the position of its partition. None: another task iterates over
        this consumer, too, and a batch is being handed out since."""
        self._check_running()
        while True:
            if self._state != "running":
                raise self._not_running()
            if self._current is not None:
                return None
            fetched = self._fetcher.take()
            if fetched is None:
                await self._fetcher.pulse.wait()
                continue
            batch = self._decoded(fetched)
            if batch is None:
                continue
            if len(batch):
                return fetched.state, batch
            fetched.state.position = batch.next_offset

    def _decoded(self, fetched: FetchedBatch) -> ConsumerBatch | None:
        """The records of a batch that are at or after the position. None: it is corrupt, and fetched once more."""
        state, header = fetched.state, fetched.header
        topic, partition = state.partition
        if header.is_control:
            return ConsumerBatch(topic, partition, (), (), None, (), None, header.next_offset)
        try:
            decoded = decode_batch(fetched.buffer, header, fetched.start)
        except CorruptRecord as error:
            assert state.position is not None
            self._fetcher.go_back(state, state.position)
            problem = f"at offsets {header.base_offset} to {header.last_offset}: {error}"
            remedy = f"Try again, or skip it with seek({state.partition!r}, {header.next_offset})"
            told = CorruptBatch(state.partition, problem, remedy, header.next_offset)
            if self._fetcher.is_first_suspicion(state, told):
                return None
            raise told from error
        state.suspicion = None
        batch = ConsumerBatch(
            topic,
            partition,
            decoded.offsets,
            decoded.timestamps,
            decoded.keys,
            decoded.values,
            decoded.headers,
            header.next_offset,
        )
        position = state.position
        assert position is not None
        if header.base_offset < position:  # brokers return whole batches
            return batch.since(bisect_left(decoded.offsets, position))
        return batch

    def _give_back(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Go on at these offsets: what was returned from there on has not reached the user."""
        for partition, offset in offsets.items():
            state = self._fetcher.states.get(partition)
            if state is not None and state.position is not None and state.position > offset:
                self._fetcher.go_back(state, offset)

    # -- positions --

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read, sorted."""
        return sorted(self._fetcher.states)

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of a partition. Raises ApiTimedOut if it is not found in time, and BrokerError
        if there is none."""
        state = self._state_of(partition)
        try:
            async with asyncio.timeout(self._api_timeout_s):
                while state.position is None:
                    if state.error is not None:
                        raise state.error.with_traceback(None)
                    await self._fetcher.pulse.wait()
                    state = self._state_of(partition)  # it may be gone by now
        except TimeoutError as error:
            raise ApiTimedOut(
                f"the position in {partition} was not found within {self._api_timeout_s:g} s: "
                "see `minibroker status` for whether it has a leader"
            ) from error
        return state.position

    def position_epoch(self, partition: TopicPartition) -> int | None:
        """The leader epoch of the last record before the position (Kafka's `OffsetAndMetadata.leaderEpoch`); None if
        it is not known, as after a `seek` without it. Keep it with the position, and pass both to `seek`."""
        epoch = self._state_of(partition).position_epoch
        return None if epoch == NO_EPOCH else epoch

    def seek(self, partition: TopicPartition, offset: int, leader_epoch: int | None = None) -> None:
        """Go on at `offset`. If it is not in the log, `auto_offset_reset` decides when it is read.

        `leader_epoch`: see `position_epoch` and `OffsetAndTimestamp`. With it no leader is asked that was deposed
        before the record in front of `offset` was written, and the loss of that record in an unclean election is
        noticed (KIP-320).
        """
        epoch = NO_EPOCH if leader_epoch is None else check_integer("leader_epoch", leader_epoch, 0, (1 << 31) - 1)
        self._move([partition], check_integer("offset", offset, 0, (1 << 62)), epoch=epoch)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first record in the log; without arguments, in all partitions."""
        self._move(partitions, None, m.EARLIEST_TIMESTAMP)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on after the last record that is readable when the end is looked up, soon after this returns: await
        `position` to know it. Without arguments, in all partitions."""
        self._move(partitions, None, m.LATEST_TIMESTAMP)

    def _move(
        self,
        partitions: Iterable[TopicPartition],
        position: int | None,
        reset: int | None = None,
        epoch: int = NO_EPOCH,
    ) -> None:
        self._check_running()
        states = [self._state_of(partition) for partition in partitions] or list(self._fetcher.states.values())
        for state in states:
            if state is self._current:
                self._drop_batch()
            self._fetcher.move(state, position, reset, epoch)

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`."""
        for state in [self._state_of(partition) for partition in partitions]:
            state.is_paused = True
            if self._is_handing_out(state):
                self._drop_batch()
                assert state.position is not None
                self._fetcher.go_back(state, state.position)

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo `pause`."""
        for state in [self._state_of(partition) for partition in partitions]:
            state.is_paused = False
        self._fetcher.wake()
        self._fetcher.pulse.notify()

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused, sorted."""
        return sorted(partition for partition, state in self._fetcher.states.items() if state.is_paused)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset in the log of each partition, assigned or not. Raises BrokerError, NetworkError."""
        return await self._offsets(partitions, m.EARLIEST_TIMESTAMP)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The high watermark of each partition: the offset after the last that can be read. Raises BrokerError,
        NetworkError."""
        return await self._offsets(partitions, m.LATEST_TIMESTAMP)

    async def _offsets(self, partitions: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        self._check_running()
        asked = dict.fromkeys(check_partitions("partitions", partitions), timestamp)
        found = await list_offsets(self._runtime, asked, self._api_timeout_s)
        return {partition: 0 if result is None else result.offset for partition, result in found.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after the given time; None if there is none. Raises BrokerError,
        NetworkError."""
        self._check_running()
        asked = dict(zip(check_partitions("timestamps_ms", timestamps_ms), timestamps_ms.values(), strict=True))
        for timestamp_ms in asked.values():
            check_integer("timestamp_ms", timestamp_ms, 0, 1 << 62)
        return await list_offsets(self._runtime, asked, self._api_timeout_s)

    def _state_of(self, partition: TopicPartition) -> PartitionState:
        self._check_running()
        state = self._fetcher.states.get(partition)
        if state is None:
            raise InvalidSetting(
                "partition", partition, "it is not assigned to this consumer; see topics= and partitions="
            )
        return state


class _Batches:
    """A class, not an async generator, which would be over once an `anext` of it was cancelled."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> ConsumerBatch:
        return await self._consumer._whole_batch()

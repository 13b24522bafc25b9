"""The task that fetches ahead of the consumer: Kafka's Fetcher. It works in steps (`LeaderRequests`).

Each leader has a few outstanding fetches, as `minibroker.protocol.fetch_schedule` decides. The other partitions of a
leader are fetched as soon as each of its partitions has at most half of `max_partition_fetch_bytes` left, so the next
records arrive while the previous ones are consumed. Partitions whose last answer had records go into one request,
however many they are, and share the `fetch_max_bytes` of one answer. If `fetch_min_bytes` is above 1, all partitions
that are due go into one request, because the broker waits until they have that many bytes together.

Batches are cut by their headers when they arrive, which determines the next offset to fetch. They are decoded when the
user takes them, so batches that a seek drops are never decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf
from typing import NamedTuple

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.leader_requests import LeaderRequest, LeaderRequests
from minibroker.client.cluster.metadata import UNKNOWN_FOR_S, Leader
from minibroker.client.cluster.offsets import CONSUMER, Found, OffsetAndTimestamp, ask_leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import CorruptBatch, LogTruncated, no_such_partition, topic_error
from minibroker.client.fetching.fetch_settings import FetchSettings
from minibroker.client.fetching.fetch_state import FetchedBatch, TopicPartitionState, due_fetches
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.log import Logger
from minibroker.client.stalls import LOOK_EVERY_S, Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.apis import FETCH
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    error_of,
)
from minibroker.protocol.fetch_schedule import (
    MAX_REQUESTS,
    Piece,
    Planned,
    cut_by_size,
    most_in_a_request,
    schedule,
    size_after,
)
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import BatchFilter, BatchHeader, CorruptRecord, placed_batches, validate_batch

logger = Logger("minibroker.client")

UNKNOWN_TOPIC_PATIENCE_S = 10.0
"""How long brokers may say that a topic does not exist before a reader raises (and a producer: its `max_block_ms`)."""

DOUBTS_OF_BROKERS = (ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.UNKNOWN_LEADER_EPOCH)
"""Errors of a broker that may have been deposed, or does not know a leader epoch yet that the client knows."""


class _Doubt(NamedTuple):
    """An answer that would invalidate a position, kept until another broker confirms the leader (KIP-320)."""

    generation: int
    fetch_offset: int
    leader: Leader
    consequence: Callable[[], None]


class _Asked(NamedTuple):
    """One partition of a fetch, or of a look-up of positions."""

    state: TopicPartitionState
    generation: int
    offset: int
    """For a look-up, the timestamp of the offset to find."""
    leader: Leader
    quiet: Planned[tuple[TopicPartitionState, Leader]] | None = None
    """The fetch, if its partitions were quiet."""


class Fetcher:
    """See the module."""

    def __init__(
        self,
        runtime: ClientRuntime,
        partitions: FetchedPartitions,
        settings: FetchSettings,
    ) -> None:
        self._runtime = runtime
        self._metadata = runtime.metadata
        self._clock = runtime.clock
        self._partitions = partitions
        self._settings = settings
        self._began = self._clock.monotonic()
        self._requests: LeaderRequests[_Asked, m.FetchResponse] = LeaderRequests(
            runtime,
            FETCH,
            Purpose.FETCH,
            partition_of=lambda asked: asked.state.partition,
            overdue_s=settings.max_wait_s + OVERDUE_S,
        )
        partitions.wake = self._requests.wake
        self._confirmation: asyncio.Task[None] | None = None
        self._doubts: dict[TopicPartitionState, _Doubt] = {}
        """The doubts to resolve next."""
        self._search: asyncio.Task[None] | None = None
        self._search_again_at = inf
        """The earliest time of the next search; infinity if a search may begin now."""
        self._missing_since: dict[str, float] = {}
        """Named topics that do not exist, and the time since which they are missing."""
        self._stalls: Stalls[TopicPartition] = Stalls(runtime.connections.client_id, is_regular=True)
        self._next_look = 0.0

    # -- the task --

    async def run(self) -> None:
        """The task: steps until it is cancelled."""
        await self._requests.run(self._step)

    def _step(self, now: float) -> float:
        for request, answer in self._requests.ended():
            self._settle(request, answer, now)
        is_due = now >= self._search_again_at
        if self._requests.take_news() or is_due:
            self._search_again_at = inf if is_due else self._search_again_at
            self._partitions.adopt_topics()
            self._look_for_unknown(now)
        times = [self._look_up(now), self._send(now), self._requests.look_for_overdue(now), self._search_again_at]
        if self._doubts and (self._confirmation is None or self._confirmation.done()):
            doubts, self._doubts = self._doubts, {}
            self._confirmation = self._runtime.tasks.start(self._confirm(doubts), "confirm leaders")
        self._partitions.pulse.notify()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look_for_stalls(now)
        if self._stalls.is_any:
            times.append(self._next_look)
        return min(times)

    def _look_for_stalls(self, now: float) -> None:
        mute = {asked.state for request in self._requests.overdue(now) for asked in request.parts}
        waiting = {
            partition: why
            for partition, state in self._partitions.states.items()
            if (why := self.why_waiting(state, is_mute=state in mute or state.position is None)) is not None
        }
        self._stalls.look(now, waiting, waiting.__getitem__)

    def why_waiting(self, state: TopicPartitionState, is_mute: bool = False) -> str | None:
        """Why a partition cannot be fetched now; None if it can. `is_mute`: an answer is overdue."""
        if state.is_paused or state.is_held or state.is_gone or state.error is not None:
            return None  # the user must act, or has its error
        if self._metadata.cluster.errors.get(state.partition.topic) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return str(BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, state.partition.topic))
        leader = self._metadata.cluster.leader(*state.partition)
        if leader is None:
            code = self._metadata.cluster.errors.get(state.partition.topic)
            if code is not None:
                return str(self._topic_error(code, state.partition.topic, state.partition.topic))
            return str(self._metadata.last_error or "it has no leader that can be reached")
        if (error := self._requests.connection_error(leader.node_id)) is not None:
            return str(error)
        if state.trouble is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:  # which the metadata knows
            doing = f"broker {leader.node_id}, which leads it, does not know it yet"
            return str(BrokerError(state.trouble, doing, is_complete=True))
        if isinstance(state.trouble, ErrorCode):
            return str(BrokerError(state.trouble, f"fetching from broker {leader.node_id}"))
        if state.trouble is not None:
            return state.trouble
        if is_mute or (state.position is None and self._stalls.is_told(state.partition)):
            return f"broker {leader.node_id}, which leads it, does not answer"
        if state.position is None:
            return f"its position is being looked up, at broker {leader.node_id}"
        return None

    def _look_for_unknown(self, now: float) -> None:
        """Report topics and partitions that have been missing for long. An error is raised only if nothing else is left
        to read. (Kafka's client raises none, and waits forever.)"""
        cluster, wrong_since = self._metadata.cluster, self._metadata.wrong_since
        there = {state.partition.topic for state in self._partitions.states.values()}
        problems = {
            state: problem
            for state in self._partitions.states.values()
            if (problem := self._problem(state)) is not None
        }
        absent = [state for state in problems if self._is_absent(state)]
        is_all_gone = len(absent) == len(self._partitions.states)
        missing = [
            topic
            for topic in self._partitions.named
            if topic not in there and (is_all_gone if topic in self._partitions.gone else topic not in cluster.topics)
        ]
        self._missing_since = {topic: self._missing_since.get(topic, wrong_since.get(topic, now)) for topic in missing}
        for topic, missing_since in self._missing_since.items():
            if now >= missing_since + UNKNOWN_TOPIC_PATIENCE_S:
                code = cluster.errors.get(topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                self._partitions.errors.append(
                    self._topic_error(code, f"for {now - missing_since:.0f} s: {topic}", topic)
                )
                self._missing_since[topic] = now  # report it again after the same time
        for state in self._partitions.states.values():
            if state not in problems:
                state.absent_since, state.is_gone = None, False
        for state, problem in problems.items():
            began = wrong_since.get(state.partition.topic)
            if state.absent_since is None:
                state.absent_since = now if began is None else began
            if now >= state.absent_since + UNKNOWN_TOPIC_PATIENCE_S and (is_all_gone or state not in absent):
                self._partitions.stop(state, problem(f"for {now - (began or state.absent_since):.0f} s: "))
                state.absent_since = now  # report it again after the same time
        if missing or (absent and is_all_gone):
            self._metadata.request_refresh()
        seem_gone = {
            state.partition: self._partitions.topic_id(state.partition)
            for state in absent
            if not state.is_gone and not state.has_records and now >= (state.absent_since or now) + UNKNOWN_FOR_S
        }
        if seem_gone and self._search_again_at == inf and (self._search is None or self._search.done()):
            self._search = self._runtime.tasks.start(self._search_for(seem_gone), "search for deleted topics")

    def _is_absent(self, state: TopicPartitionState) -> bool:
        """Whether metadata lacks the topic or the partition."""
        info = self._metadata.cluster.existing().get(state.partition.topic)
        return info is None or state.partition.partition not in info.partitions

    async def _search_for(self, seem_gone: dict[TopicPartition, str]) -> None:
        """Ask all brokers for these partitions, and stop reading those that none has."""
        missing = await self._metadata.missing(seem_gone)
        if len(missing) < len(seem_gone):  # without a pause, brokers would answer nothing else
            self._search_again_at = self._clock.monotonic() + UNKNOWN_FOR_S
        gone: dict[str, list[TopicPartitionState]] = {}
        for partition in missing:
            state = self._partitions.states.get(partition)
            if state is not None and self._is_absent(state) and not state.has_records:
                gone.setdefault(partition.topic, []).append(state)
        for topic, states in gone.items():
            self._partitions.are_gone(topic, states)
        self._requests.wake()

    def _topic_error(self, code: ErrorCode, detail: str, topic: str) -> BrokerError:
        return topic_error(code, detail, topic, self._runtime.protection.principal, AclOperation.READ)

    def _problem(self, state: TopicPartitionState) -> Callable[[str], BrokerError] | None:
        """Return the error in a partition's metadata that time alone will not cure, as a function of the beginning of
        its text; None if there is none."""
        topic, index = state.partition
        code = self._metadata.cluster.errors.get(topic)
        if code is not None:
            return lambda when: self._topic_error(code, f"{when}{topic}", topic)
        info = self._metadata.cluster.topics.get(topic)
        if info is None:
            return None
        if index not in info.partitions:
            count = len(info.partitions)
            return lambda when: no_such_partition(state.partition, count, when)
        epoch = info.partitions[index].leader.epoch
        if epoch < state.last_epoch:
            return lambda when: BrokerError(
                ErrorCode.UNKNOWN_LEADER_EPOCH,
                f"{when}{state.partition}: the position has leader epoch {state.last_epoch}, but brokers know "
                f"only {epoch}. They are cut off from the others, or the topic was created again: then seek() without "
                "an epoch",
            )
        return None

    def _look_up(self, now: float) -> float:
        """Look up missing positions, at each leader separately, so that none waits for one that does not answer.
        Returns when to look again if nothing happens before."""
        next_at = inf
        by_leader: dict[Leader, list[_Asked]] = {}
        for state in self._partitions.states.values():
            if state.position is not None or state.is_gone or state.error is not None or state.awaits_committed:
                continue
            if state.reset is None:
                if not state.is_held:  # else the listener is running, and may call `seek`
                    rule = 'has no position, and auto_offset_reset="none" forbids choosing one: call seek()'
                    error = BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{state.partition} {rule}")
                    self._partitions.stop(state, error)
                continue
            leader = self._metadata.cluster.leader(*state.partition)
            if leader is None:
                code = self._metadata.cluster.errors.get(state.partition.topic)
                if code is not None and not ERRORS[code].retriable:
                    self._partitions.stop(state, BrokerError(code, f"finding offsets of {state.partition}"))
                else:
                    self._metadata.request_refresh()
            elif leader == state.tried and state.outstanding_generation == state.generation:
                continue  # its answer is awaited
            elif leader == state.tried and now < state.retry_at:
                next_at = min(next_at, state.retry_at)
            else:
                by_leader.setdefault(leader, []).append(_Asked(state, state.generation, state.reset, leader))
                state.outstanding_generation = state.generation
                state.tried = leader
        for leader, asked in by_leader.items():
            self._runtime.tasks.start(self._find_positions(leader, asked), "find positions")
        return next_at

    def _send(self, now: float) -> float:
        """Send the fetches that are due. Returns when to look again if nothing happens before."""
        max_bytes = min(self._settings.max_bytes, self._buffer_left())
        self._partitions.is_full = max_bytes <= 0
        if self._partitions.is_full:
            return inf  # `take` wakes this
        due = due_fetches(
            self._partitions.states.values(),
            self._metadata.cluster.leader,
            now,
            max_bytes=self._settings.max_bytes,
            max_partition_bytes=self._settings.max_partition_bytes,
        )
        if due.is_leader_missing:
            self._metadata.request_refresh()
        next_at = due.next_at
        for state, leader in due.deposed:
            state.retry_at = now + self._runtime.retry_backoff_s
            next_at = min(next_at, state.retry_at)
            self._doubt(state, leader, lambda: None)
        for node_id, asked in due.by_leader.items():
            outstanding = self._requests.count(node_id)
            if outstanding >= MAX_REQUESTS:
                continue
            connection, usable_at = self._requests.connection(node_id, now)
            next_at = min(next_at, usable_at)
            if connection is not None:
                for planned, is_quiet in self._scheduled(asked, outstanding, now):
                    self._fetch(node_id, connection, planned, is_quiet, max_bytes, now)
        return next_at

    def _buffer_left(self) -> int:
        """Return the number of bytes that may be fetched ahead. Drops the batches of paused partitions if they fill the
        buffer."""
        left = self._settings.max_buffer_bytes - sum(state.fetched_bytes for state in self._partitions.states.values())
        if left <= 0:
            for state in self._partitions.states.values():
                if state.is_paused and state.fetched and state.position is not None:
                    left += state.fetched_bytes
                    self._partitions.go_back(state, state.position)
        return left

    def _scheduled(
        self, asked: Sequence[tuple[TopicPartitionState, Leader]], outstanding: int, now: float
    ) -> list[tuple[Planned[tuple[TopicPartitionState, Leader]], bool]]:
        """Return the requests to send, each with whether its partitions are quiet."""
        longest_wait_ms = ceil(self._settings.max_wait_s * 1_000)
        most = most_in_a_request(len(self._partitions.states))
        if self._settings.min_bytes > 1:
            return [(Planned(Piece(asked, most), longest_wait_ms, is_longest=True), False)]
        busy = [entry for entry in asked if entry[0].is_busy]
        quiet = [entry for entry in asked if not entry[0].is_busy]
        of_busy = [Piece(busy, most)] if busy else []
        scheduled = schedule(
            of_busy + cut_by_size(quiet, lambda due: due[0].request_size),
            outstanding=outstanding,
            elapsed_ms=round((now - self._began) * 1_000),
            longest_wait_ms=longest_wait_ms,
        )
        return [(planned, number >= len(of_busy)) for number, planned in enumerate(scheduled)]

    def _fetch(
        self,
        node_id: int,
        connection: Connection,
        planned: Planned[tuple[TopicPartitionState, Leader]],
        is_quiet: bool,
        max_bytes: int,
        now: float,
    ) -> None:
        topics: dict[str, list[m.FetchPartition]] = {}
        parts: list[_Asked] = []
        quiet = planned if is_quiet else None
        for state, leader in planned.piece.partitions:
            topics.setdefault(state.partition.topic, []).append(
                m.FetchPartition(
                    state.partition.partition,
                    leader.epoch,
                    state.fetch_offset,
                    state.last_epoch,
                    -1,
                    self._settings.max_partition_bytes,
                    suspect=state.suspicion is not None,
                )
            )
            parts.append(_Asked(state, state.generation, state.fetch_offset, leader, quiet))
            state.outstanding_generation = state.generation
            state.tried = leader
        message = m.FetchRequest(
            CONSUMER,
            planned.wait_ms,
            self._settings.min_bytes,
            max_bytes,
            self._settings.isolation_level,
            [m.FetchTopic(name, self._partitions.topics[name], partitions) for name, partitions in topics.items()],
        )
        timeout_s = self._runtime.request_timeout_s + self._settings.max_wait_s
        self._requests.send(node_id, connection, message, parts, timeout_s, now)

    # -- answers --

    def _settle(self, request: LeaderRequest[_Asked], answer: asyncio.Future[m.FetchResponse], now: float) -> None:
        for state, generation, *_ in request.parts:
            if state.outstanding_generation == generation:
                state.outstanding_generation = -1
        answers: dict[tuple[str, int], m.FetchPartitionResponse] = {}
        failure = self._requests.failure(request, answer)
        if failure is not None:
            code, _ = failure
        else:
            response = answer.result()
            self._requests.mute(request.node_id, response.throttle_time_ms, now)
            code = error_of(response.error_code)
            answers = {
                (topic.topic, partition.partition_index): partition
                for topic in response.responses
                for partition in topic.partitions
            }
        for state, generation, offset, leader, _ in request.parts:
            if state.generation != generation or self._partitions.states.get(state.partition) is not state:
                continue  # the user went elsewhere
            partition = answers.get(state.partition)
            if partition is None:  # an error for all, or an incomplete answer
                self._failed(state, code or ErrorCode.NETWORK_EXCEPTION, None, leader, now)
            elif partition.error_code != ErrorCode.NONE:
                self._failed(state, error_of(partition.error_code), partition, leader, now)
            elif partition.diverging_epoch is not None:
                state.retry_at = now + self._runtime.retry_backoff_s
                self._doubt(state, leader, partial(self._diverged, state, partition.diverging_epoch))
            else:
                state.high_watermark = state.end_offset = partition.high_watermark
                if self._settings.is_read_committed and partition.last_stable_offset >= 0:
                    state.end_offset = partition.last_stable_offset
                self._arrived(state, offset, partition, leader)
        if failure is None:
            self._resize(request.parts)

    def _resize(self, parts: Sequence[_Asked]) -> None:
        """Let partitions that were quiet share fetches with fewer others, or with more, as theirs ended."""
        planned = parts[0].quiet
        if planned is None:
            return
        size = size_after(
            planned.piece.size,
            was_ended_by_records=any(part.state.is_busy for part in parts),
            waited_longest=planned.is_longest,
            partitions=len(self._partitions.states),
        )
        for part in parts:
            part.state.request_size = size

    def _arrived(
        self, state: TopicPartitionState, offset: int, answer: m.FetchPartitionResponse, leader: Leader
    ) -> None:
        records = answer.records
        state.trouble = None
        state.is_busy = len(records) > 0
        if not records:
            return
        # Put it at the end of the next request: a broker fills its answer in the order of the request.
        self._partitions.states[state.partition] = self._partitions.states.pop(state.partition)
        batches, trouble = placed_batches(records, offset, answer.high_watermark, leader.epoch, state.arrived_epoch)
        if not batches:  # otherwise the next request begins at the corrupt batch
            told = CorruptBatch(state.partition, f"at or after offset {offset}: {trouble}", "Use seek() to skip it")
            if not self._partitions.is_first_suspicion(state, told):
                self._partitions.stop(state, told)
            return
        hidden = BatchFilter(answer.aborted_transactions)
        for header, start, end in batches:
            if hidden.hides(header) and _is_intact(records, header, start):
                state.arrived(FetchedBatch.hidden(state, header))
            else:
                state.arrived(FetchedBatch(state, header, records, start, end, header.next_offset))
        if state.fetched:
            self._partitions.has_data(state)

    def _failed(
        self,
        state: TopicPartitionState,
        code: ErrorCode,
        answer: m.FetchPartitionResponse | None,
        leader: Leader,
        now: float,
    ) -> None:
        state.retry_at = now + self._runtime.retry_backoff_s
        state.trouble = code
        who = self._runtime.connections.client_id
        logger.debug("%s: fetching %s from broker %d: %s", who, state.partition, leader.node_id, code.name)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            if state.position != state.fetch_offset:
                return  # asked again once the batches fetched before are consumed
            self._doubt(state, leader, partial(self._out_of_range, state, answer))
            return
        if code is ErrorCode.CORRUPT_MESSAGE:  # and no other broker can lead
            what = f"at or after offset {state.fetch_offset}: the leader's log is damaged there"
            told = state.suspicion or CorruptBatch(state.partition, what, "Use seek() to skip it")
            if not self._partitions.is_first_suspicion(state, told):
                self._partitions.stop(state, told)
            return
        info = ERRORS[code]
        if code in DOUBTS_OF_BROKERS:
            self._doubt(state, leader, lambda: None)  # the others may know
        if not info.retriable:
            self._partitions.stop(
                state, BrokerError(code, f"fetching {state.partition} at offset {state.fetch_offset}")
            )
            return
        if info.refresh_metadata:
            self._requests.leader_moved(state.partition, answer, self._partitions.topics[state.partition.topic])

    def _doubt(self, state: TopicPartitionState, leader: Leader, consequence: Callable[[], None]) -> None:
        """The answer would invalidate the position, but the leader may be cut off and deposed without knowing it. Ask
        again until there is another leader, or until it is confirmed; then carry out `consequence`."""
        state.trouble = f"broker {leader.node_id} says that it leads, but no other broker confirms it"
        self._doubts[state] = _Doubt(state.generation, state.fetch_offset, leader, consequence)

    async def _confirm(self, doubts: dict[TopicPartitionState, _Doubt]) -> None:
        believed = await self._metadata.confirmed({state.partition: doubt.leader for state, doubt in doubts.items()})
        for state, doubt in doubts.items():
            is_same = (state.generation, state.fetch_offset) == (doubt.generation, doubt.fetch_offset)
            is_same = is_same and self._partitions.states.get(state.partition) is state
            if is_same and state.partition in believed:
                doubt.consequence()
        self._requests.wake()

    def _out_of_range(self, state: TopicPartitionState, answer: m.FetchPartitionResponse | None) -> None:
        if self._partitions.reset is None:
            log = "" if answer is None else f"; the log is {answer.log_start_offset} to {answer.high_watermark}"
            code = ErrorCode.OFFSET_OUT_OF_RANGE
            self._partitions.stop(state, BrokerError(code, f"{state.partition} at offset {state.fetch_offset}{log}"))
            return
        who, goes_on = (
            self._runtime.connections.client_id,
            "beginning" if self._partitions.reset == m.EARLIEST_TIMESTAMP else "end",
        )
        if answer is not None and state.fetch_offset < answer.log_start_offset:
            logger.warning(
                "%s: %d records of %s were deleted unread: offset %d is next, and its log begins at %d; going on at "
                "its %s, as auto_offset_reset says",
                who,
                answer.log_start_offset - state.fetch_offset,
                state.partition,
                state.fetch_offset,
                answer.log_start_offset,
                goes_on,
            )
        elif answer is not None:
            logger.warning(
                "%s: %s has no offset %d, which is next: its log ends at %d; going on at its %s, as auto_offset_reset "
                "says",
                who,
                state.partition,
                state.fetch_offset,
                answer.high_watermark,
                goes_on,
            )
        self._partitions.move(state, None, self._partitions.reset)

    def _diverged(self, state: TopicPartitionState, leader: m.EpochEndOffset) -> None:
        """The log has lost records that were fetched (KIP-320): continue where the two histories diverge. Only lost
        records that were handed out are reported to the user."""
        position, diverging_offset = state.position, state.diverging_offset(leader)
        assert position is not None
        if diverging_offset >= position:
            self._partitions.go_back(state, position)
        elif self._partitions.reset is None:
            self._partitions.go_back(state, position)
            self._partitions.stop(state, LogTruncated(state.partition, position, diverging_offset))
        else:
            logger.warning(
                "%s: records of %s that were read are no longer in the log, from offset %d on, up to %d: lost in an "
                "unclean election; going on at %d",
                self._runtime.connections.client_id,
                state.partition,
                diverging_offset,
                position,
                diverging_offset,
            )
            self._partitions.go_back(state, diverging_offset)

    async def _find_positions(self, leader: Leader, asked: Sequence[_Asked]) -> None:
        timestamps = {state.partition: timestamp for state, _, timestamp, *_ in asked}
        results = await ask_leader(
            self._runtime, leader, timestamps, self._runtime.request_timeout_s, self._settings.isolation_level
        )
        for state, generation, timestamp, *_ in asked:
            if (state.generation, state.tried) != (generation, leader):
                continue  # the user went elsewhere, or there is another leader
            state.outstanding_generation = -1
            result = results[state.partition]
            if isinstance(result, Found) and result.result is None and timestamp >= 0:
                self._partitions.move(state, None, m.LATEST_TIMESTAMP)  # there is no record as late as that
            elif isinstance(result, Found):
                at = result.result or OffsetAndTimestamp(0, -1)
                self._partitions.move(state, at.offset, epoch=NO_EPOCH if at.leader_epoch is None else at.leader_epoch)
            elif isinstance(result, BrokerError) and not result.retriable:
                self._partitions.stop(state, result)
            else:
                state.trouble = str(result)
                state.retry_at = self._clock.monotonic() + self._runtime.retry_backoff_s
                self._metadata.request_refresh()
        self._requests.wake()


def _is_intact(records: memoryview, header: BatchHeader, start: int) -> bool:
    """Whether a hidden batch matches its checksum. One that does not may be another batch, whose header was damaged: it
    is treated as any corrupt batch when its turn comes."""
    try:
        validate_batch(records, header, start)
    except CorruptRecord:
        return False
    return True

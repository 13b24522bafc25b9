"""Planted bugs of the client library: producers that write twice or not at all, consumers that skip."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from msgspec import structs

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.handlers import list_offsets
from minibroker.broker.replication.appending import Appender
from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.client.administering.topics import Creation
from minibroker.client.cluster import metadata
from minibroker.client.cluster.calls import Calls
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.consumer import Consumer
from minibroker.client.errors import Closed
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.fetcher import Fetcher
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.fetching.reader import Reader
from minibroker.client.group import auto_commit
from minibroker.client.group.commits import Commits
from minibroker.client.producing import batch as client_batch
from minibroker.client.producing import choosing
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import SEQUENCE_MASK, Batch, BatchVerdict
from minibroker.client.producing.filling import Filling
from minibroker.controller.controller import Controller
from minibroker.controller.decisions import deletion
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.plan import Plan
from minibroker.protocol import topic_ids
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode
from minibroker.protocol.messages import (
    LATEST_TIMESTAMP,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsResponse,
)
from minibroker.protocol.model import NO_EPOCH
from minibroker.protocol.records import BatchFilter, BatchHeader
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KIP-98", "a producer repeats an unanswered batch with new sequence numbers")
def retried_with_new_numbers(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "retry")
    def retry(original: Any, self: Accumulator, batch: Any, retry_at: float) -> None:
        batch.number_anew()
        original(self, batch, retry_at)


@mutant("KIP-98", "a producer does not number its batches, so a broker appends each repetition")
def producer_not_idempotent(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "__init__")
    def init(original: Any, self: Accumulator, *, is_idempotent: bool, **named: Any) -> None:
        original(self, is_idempotent=False, **named)


@mutant("errors lost", "a caller that stops waiting at the moment of a failure never receives the error")
def failures_end_with_who_waits(patches: Patches) -> None:
    @patches.instead_of(Batch, "wait_given_up")
    def wait_given_up(original: Any, self: Batch, first: int, count: int = 1) -> None:
        if not self.is_done:
            original(self, first, count)


@mutant("a close cut short", "a second call of close aborts the first one, which is still running")
def second_close_ends_the_first(patches: Patches) -> None:
    @patches.instead_of(Consumer, "_close")
    async def close(original: Any, self: Consumer, timeout_s: float, **named: Any) -> None:
        if self._state == "closing":
            self._state = "crashed"
        await original(self, timeout_s, **named)


@mutant("unprocessed records", "close commits records that another task is still processing")
def closing_counts_what_others_hold(patches: Patches) -> None:
    @patches.instead_of(InHand, "is_done_with")
    def is_done_with(original: Any, self: InHand) -> bool:
        return True


@mutant(
    "a committed offset that goes back",
    "leaving a consumer with an error takes back positions that were committed while its records were in hand",
)
def committed_in_hand_is_taken_back(patches: Patches) -> None:
    @patches.instead_of(InHand, "_take_back")
    def take_back(original: Any, self: InHand) -> None:
        self._vouched.clear()
        original(self)


@mutant("a buffer that stays full", "failed records occupy the buffer until flush, although their error was delivered")
def told_failures_keep_their_room(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "_told_changed")
    def told_changed(original: Any, self: Accumulator, batch: Batch) -> None:
        if batch.unreported:
            original(self, batch)


@mutant("a poll without records", "a member that polls without waiting returns before it has looked for records")
def glances_find_nothing(patches: Patches) -> None:
    @patches.instead_of(Reader, "_next_batch")
    async def next_batch(original: Any, self: Reader, timeout_s: float | None = None) -> Any:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await original(self)


@mutant(
    "missing commits", "positions of partitions that leave the subscription are not committed before their revocation"
)
def held_positions_are_not_committed(patches: Patches) -> None:
    @patches.instead_of(auto_commit, "positions")
    def positions(original: Any, partitions: FetchedPartitions) -> Any:
        return {p: offset for p, offset in original(partitions).items() if not partitions.states[p].is_held}


@mutant("calls that never end", "waiting calls continue after their client has closed or failed")
def calls_outlive_their_client(patches: Patches) -> None:
    @patches.instead_of(Calls, "end")
    def end(original: Any, self: Calls) -> None:
        pass


@mutant("offsets that expire", "auto-commit commits an unchanged position only once")
def unchanged_positions_are_committed_once(patches: Patches) -> None:
    @patches.instead_of(auto_commit.AutoCommit, "_repeat")
    async def repeat(original: Any, self: Any) -> None:
        pass


@mutant("commits that are undone", "auto-commit repeats the position although a later offset was committed since")
def positions_are_repeated(patches: Patches) -> None:
    @patches.instead_of(Commits, "repeat")
    async def repeat(original: Any, self: Commits, positions: Any, topic_id: Any, timeout_s: float) -> None:
        await self.commit(self.ticket(positions, topic_id), timeout_s)


@mutant("one topic stops all", "a deleted topic raises its error again and again, and the other topics are not read")
def deleted_topics_are_raised(patches: Patches) -> None:
    @patches.instead_of(Fetcher, "_is_absent")
    def is_absent(original: Any, self: Fetcher, state: TopicPartitionState) -> bool:
        return False


@mutant("calls that never end", "a client waits for its own tasks after the event loop has cancelled them")
def cancelled_tasks_are_waited_for(patches: Patches) -> None:
    @patches.instead_of(ClientRuntime, "check_loop")
    def check_loop(original: Any, self: ClientRuntime, who: str) -> None:
        self.tasks.replace_all()
        original(self, who)


@mutant("connections left open", "a client whose close is cancelled leaves its connections open")
def cancelled_closing_leaves_connections(patches: Patches) -> None:
    @patches.instead_of(ClientRuntime, "close")
    async def close(original: Any, self: ClientRuntime) -> None:
        await self.tasks.close()
        await original(self)


@mutant("a start without an error", "starting a client that is closed meanwhile raises no error")
def closed_while_starting_untold(patches: Patches) -> None:
    @patches.instead_of(Client, "start")
    async def start(original: Any, self: Client) -> None:
        with suppress(Closed):
            await original(self)


@mutant("acknowledged too early", "a producer treats a broken connection as an acknowledgement")
def no_answer_is_a_good_answer(patches: Patches) -> None:
    @patches.instead_of(client_batch, "judge_batch")
    def judge_batch(original: Any, code: ErrorCode, **named: Any) -> BatchVerdict:
        return original(ErrorCode.NONE if code is ErrorCode.NETWORK_EXCEPTION else code, **named)  # type: ignore[no-any-return]


@mutant("poll skip", "a consumer that finds a moved leader continues at the end of the log")
def position_lost_with_the_leader(patches: Patches) -> None:
    @patches.instead_of(Fetcher, "_failed")
    def failed(original: Any, self: Fetcher, state: Any, code: ErrorCode, *rest: Any) -> None:
        original(self, state, code, *rest)
        if ERRORS[code].refresh_metadata and not state.fetched:
            self._partitions.move(state, None, LATEST_TIMESTAMP)


@mutant("KIP-98", "the second and later batches of a send_batch reuse the sequence numbers of the batch before")
def send_batch_reuses_numbers(patches: Patches) -> None:
    filled: set[Any] = set()

    @patches.instead_of(Filling, "_fill")
    def fill(original: Any, self: Filling, state: Any, batch: Any, columns: Any, start: int) -> int:
        if start > 0:
            filled.add(batch)
        return original(self, state, batch, columns, start)  # type: ignore[no-any-return]

    @patches.instead_of(Accumulator, "take")
    def take(original: Any, self: Accumulator, queue: Any) -> Any:
        batch = original(self, queue)
        if batch in filled and batch.attempts == 1 and batch.sequence >= batch.count:
            batch.sequence -= batch.count
            queue.next_sequence = (queue.next_sequence - batch.count) & SEQUENCE_MASK
        return batch


@mutant("duplicate", "send_batch repeats the last record of a full batch in the next one")
def send_batch_splits_one_record_early(patches: Patches) -> None:
    @patches.instead_of(Filling, "_extend")
    def extend(original: Any, self: Filling, batch: Any, columns: Any, start: int, end: int, size: int) -> None:
        original(self, batch, columns, start, end, size)
        if start > 0:
            batch.values[-(end - start)] = columns.values[start - 1]


@mutant("lost key order", "send_batch places a record by the hash of the next record's key")
def send_batch_groups_by_another_key(patches: Patches) -> None:
    @patches.instead_of(choosing, "partitions_of")
    def partitions_of(original: Any, keys: Any, *rest: Any) -> Any:
        return original([*keys[1:], keys[0]] if keys else keys, *rest)


# --- Topics that are deleted and created again --------------------------------------------------------------------


@mutant("KIP-516", "a leader appends records that were sent to an earlier topic of the same name")
def records_for_another_topic_are_taken(patches: Patches) -> None:
    @patches.instead_of(Appender, "_append")
    def append(original: Any, self: Appender, entry: Any, *rest: Any) -> Any:
        return original(self, entry._replace(topic_id=""), *rest)


@mutant("stale metadata", "a producer ignores that a topic has fewer partitions than before")
def partition_count_never_shrinks(patches: Patches) -> None:
    highest: dict[tuple[Accumulator, str], int] = {}

    @patches.instead_of(Accumulator, "topic_is_known")
    def topic_is_known(original: Any, self: Accumulator, topic: str, topic_id: str, count: int, *rest: Any) -> None:
        highest[self, topic] = max(count, highest.get((self, topic), 0))
        original(self, topic, topic_id, highest[self, topic], *rest)


@mutant(
    "lost key order",
    "records that wait while their topic is created again stay in the partition chosen by the old count",
)
def places_outlive_their_topic(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "_place_anew")
    def place_anew(original: Any, self: Accumulator, state: Any, partition_count: int) -> None:
        for queue in state.queues.values():
            for batch in queue.waiting:
                batch.is_placed = False
        original(self, state, partition_count)


@mutant("stale metadata", "a client returns to a deleted topic because an isolated broker still describes it")
def older_topic_believed(patches: Patches) -> None:
    @patches.instead_of(topic_ids, "is_older")
    def is_older(original: Any, topic_id: str, other: str) -> bool:
        return False


@mutant("done already", "a repeated creation counts as done if any topic has the name")
def somebody_elses_topic_counts_as_created(patches: Patches) -> None:
    attempts: dict[Creation, int] = {}

    @patches.instead_of(Creation, "request")
    def request(original: Any, self: Creation, *rest: Any) -> Any:
        attempts[self] = attempts.get(self, 0) + 1
        return original(self, *rest)

    @patches.instead_of(Creation, "results")
    def results(original: Any, self: Creation, response: Any) -> dict[str, tuple[int, str]]:
        return {
            name: (0, "") if code == ErrorCode.TOPIC_ALREADY_EXISTS and attempts[self] > 1 else (code, message)
            for name, (code, message) in original(self, response).items()
        }


@mutant("done already", "a request that a broker could not forward to the controller counts as done")
def lost_in_an_envelope_counts_as_done(patches: Patches) -> None:
    @patches.instead_of(ForwardingManager, "request")
    async def request(original: Any, self: ForwardingManager, api: Any, body: Any, **rest: Any) -> Any:
        try:
            return await original(self, api, body, **rest)
        except BrokerError:
            if isinstance(body, CreateTopicsRequest):
                return CreateTopicsResponse(0, [CreatableTopicResult(t.name, "", ErrorCode.NONE) for t in body.topics])
            return DeleteTopicsResponse(0, [DeletableTopicResult(t, "", ErrorCode.NONE) for t in body.topics])


@mutant("done already", "a late creation for one controller is processed by its successor")
def creation_for_another_controller(patches: Patches) -> None:
    @patches.instead_of(Controller, "create_topics")
    async def create_topics(original: Any, self: Controller, *rest: Any, **named: Any) -> Any:
        return await original(self, *rest, **(named | {"controller_epoch": NO_EPOCH}))


@mutant("done already", "a controller that may have been deposed denies a topic that it does not know")
def denial_without_office(patches: Patches) -> None:
    @patches.instead_of(deletion, "confirm_office")
    def confirm_office(original: Any) -> Plan:
        return Plan()


@mutant("done already", "a repeated or late deletion deletes the topic that was created since")
def deletion_by_name_alone(patches: Patches) -> None:
    @patches.instead_of(deletion, "is_meant")
    def is_meant(original: Any, state: ClusterState, topic: str, topic_id: str) -> bool:
        return topic in state.topic_ids and topic_id != topic_ids.NO_TOPIC


# --- A consumer's position -------------------------------------------------------------------------------------------


@mutant(
    "poll skip",
    "a batch in delivery advances its partition, which was moved since: the first records of a recreated "
    "topic are skipped",
)
def batch_outlives_its_generation(patches: Patches) -> None:
    @patches.instead_of(InHand, "is_open")
    def is_open(original: Any, self: InHand, state: Any) -> bool:
        return state is not None and state is self.state

    @patches.instead_of(TopicPartitionState, "move")
    def move(original: Any, self: TopicPartitionState, *rest: Any, **named: Any) -> None:
        self.open = None
        original(self, *rest, **named)


@mutant(
    "KIP-320",
    "an isolated, deposed leader is believed that its log ends before the position (two fences: clients ask "
    "no other broker, and the leader does not say that it may be deposed)",
)
def deposed_leader_is_believed(patches: Patches) -> None:
    @patches.instead_of(metadata, "is_confirmed")
    def is_confirmed(original: Any, *rest: Any) -> bool:
        return True

    @patches.instead_of(ReplicaLifecycle, "_may_be_deposed")
    def may_be_deposed(original: Any, self: ReplicaLifecycle, *rest: Any) -> bool:
        return False


@mutant("KIP-320", "a consumer does not send the leader epoch of the record before its position")
def position_without_epoch(patches: Patches) -> None:
    @patches.instead_of(TopicPartitionState, "arrived")
    def arrived(original: Any, self: TopicPartitionState, batch: Any) -> None:
        original(self, batch)
        self.last_epoch = NO_EPOCH

    @patches.instead_of(TopicPartitionState, "move")
    def move(original: Any, self: TopicPartitionState, position: int | None, reset: Any = None, *epoch: Any) -> None:
        original(self, position, reset)

    @patches.instead_of(TopicPartitionState, "go_back")
    def go_back(original: Any, self: TopicPartitionState, position: int) -> None:
        self.move(position)


@mutant("KIP-320", "an isolated broker is believed that a topic was deleted or recreated")
def topic_is_gone_because_one_says_so(patches: Patches) -> None:
    @patches.instead_of(metadata, "is_denied")
    def is_denied(original: Any, *rest: Any) -> bool:
        return True


@mutant("KIP-320", "a broker that has received some topics since its registration denies all others")
def half_told_broker_denies(patches: Patches) -> None:
    @patches.instead_of(MetadataCache, "_why_unknown")
    def why_unknown(original: Any, self: MetadataCache, name: str) -> ErrorCode:
        self._has_been_told_all = True
        return original(self, name)  # type: ignore[no-any-return]


@mutant("KIP-516", "a broker returns the offsets of an earlier topic of the same name")
def offsets_of_an_earlier_topic(patches: Patches) -> None:
    @patches.instead_of(list_offsets, "_list")
    def list_(original: Any, services: Any, request: Any, topic: Any, *rest: Any) -> Any:
        return original(services, request, structs.replace(topic, topic_id=""), *rest)


@mutant("silence", "a consumer waits for ever for partitions that the recreated topic lacks")
def partitions_that_are_gone_are_waited_for(patches: Patches) -> None:
    @patches.instead_of(FetchedPartitions, "_topic_was_recreated")
    def topic_was_recreated(original: Any, self: FetchedPartitions, state: Any, is_there: bool) -> None:
        original(self, state, True)

    @patches.instead_of(Fetcher, "_problem")
    def problem(original: Any, self: Fetcher, state: Any) -> Any:
        topic = self._metadata.cluster.errors.get(state.partition.topic)
        return None if topic is None else original(self, state)


@mutant("read_committed", "a consumer skips a producer that has aborted a transaction until the end of the answer")
def aborted_producers_stay_hidden(patches: Patches) -> None:
    @patches.instead_of(BatchFilter, "hides")
    def hides(original: Any, self: BatchFilter, header: BatchHeader) -> bool:
        hidden = set(self._open)
        is_hidden = bool(original(self, header))
        self._open |= hidden
        return is_hidden


@mutant("a consumer stops", "a batch of which the user gets nothing does not move the position")
def hidden_batches_keep_the_position(patches: Patches) -> None:
    @patches.instead_of(TopicPartitionState, "pass_over")
    def pass_over(original: Any, self: TopicPartitionState, next_offset: int) -> None:
        """Do nothing."""


# --- Failover ------------------------------------------------------------------------------------------------------


@mutant("the pause of a retry", "a client that was told of no leader asks no more, until its batch is due again")
def only_dead_leaders_are_asked_about(patches: Patches) -> None:
    @patches.instead_of(metadata.Metadata, "_awaits_election")
    def awaits_election(original: Any, self: Any, now: float) -> bool:
        has_leaders = all(
            partition.leader.node_id in self.cluster.brokers
            for topic in self.cluster.topics.values()
            for partition in topic.partitions.values()
        )
        return has_leaders and bool(original(self, now))


@mutant("the pause of a retry", "an answer says that a partition has no leader while one is elected")
def elections_of_the_gone_are_not_awaited(patches: Patches) -> None:
    @patches.instead_of(MetadataCache, "awaiting_elections")
    def awaiting_elections(original: Any, self: MetadataCache, lost: Any, topics: Any) -> list[str]:
        return list(original(self, lost, topics)) if lost else []

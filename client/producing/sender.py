"""The task that sends the accumulator's batches and handles the answers: Kafka's Sender.

It works in steps (`LeaderRequests`): handle the answers that arrived, place the records of topics that became known,
fail the batches that have expired, send to every leader that can take a request, and sleep until something happens or
is due.

When a leader crashes, its connection breaks, and every batch in flight is put back. The sender asks another broker for
metadata at once. As soon as that names another leader, the batches go there, whatever their back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.coordinators import first_pause_s
from minibroker.client.cluster.leader_requests import LeaderRequest, LeaderRequests
from minibroker.client.cluster.metadata import Leader
from minibroker.client.cluster.retries import exponential_backoff_s
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import DeliveryTimedOut, topic_error
from minibroker.client.log import Logger
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import UNASSIGNED, Batch, BatchVerdict, Identity
from minibroker.client.producing.queues import PartitionQueue
from minibroker.client.stalls import LOOK_EVERY_S, Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.apis import INIT_PRODUCER_ID, PRODUCE
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records.compression import Compression

logger = Logger("minibroker.client")

ANSWER_GRACE_S = 1.0
"""A broker may answer this much later than the timeout in the request. Then the connection is closed."""

FULL_SOCKET_PAUSE_S = 0.005
"""Pause if the socket is full: with acks=0 that is the only sign that a broker is busy."""


class Sender:
    """See the module. `on_progress` is called after every step, in which batches may have ended."""

    def __init__(
        self,
        runtime: ClientRuntime,
        accumulator: Accumulator,
        *,
        acks: int,
        compression: Compression,
        max_request_size: int,
        max_in_flight: int,
        max_block_s: float,
        availability_timeout_s: float,
        on_progress: Callable[[], None],
        transactional_id: str | None = None,
    ) -> None:
        self._runtime = runtime
        self._metadata = runtime.metadata
        self._clock = runtime.clock
        self._accumulator = accumulator
        self._acks = acks
        self._compression = compression
        self._max_request_size = max_request_size
        self._max_in_flight = max_in_flight
        self._max_block_s = max_block_s
        self._availability_timeout_s = availability_timeout_s
        """0: every leader counts as available."""
        self._held_up_since: dict[int, float] = {}
        """Leaders that have not been able to take a request since this time, although a batch was ready."""
        self._unavailable: frozenset[int] = frozenset()
        """Leaders that have been held up for longer than `availability_timeout_s`."""
        self._on_progress = on_progress
        self._transactional_id = transactional_id
        self.before_sending: Callable[[], None] | None = None
        """Called in every step once answers are handled."""
        self._requests: LeaderRequests[Batch, m.ProduceResponse] = LeaderRequests(
            runtime, PRODUCE, Purpose.PRODUCE, partition_of=_partition_of
        )
        self._identity_task: asyncio.Task[None] | None = None
        self._identity_error: MinibrokerError | None = None
        self._next_expiry = 0.0
        self._send_due = 0.0
        """When to look again for batches to send, if nothing happens before."""
        self._last_errors: dict[tuple[str, int], MinibrokerError] = {}
        """The error of the last attempt for a partition: the cause of a DeliveryTimedOut."""
        self._stalls: Stalls[tuple[str, int]] = Stalls(runtime.connections.client_id, _name, is_regular=True)
        self._oldest: dict[tuple[str, int], Batch] = {}
        """The oldest batch of each partition at the last look for stalls. If it is still the oldest, the partition
        stalls."""
        self._next_look = 0.0

    def wake(self) -> None:
        """Look for batches that are ready."""
        self._requests.wake()

    async def run(self) -> None:
        """Run steps until cancelled."""
        await self._requests.run(self._step)

    def _step(self, now: float) -> float:
        """Do what can be done now. Return when to do so again if nothing happens before."""
        for request, answer in self._requests.ended():
            self._settle(request, answer, now)
        due = self._place_held(now)
        topics = self._accumulator.topics() if self._requests.take_news() else self._accumulator.changing_topics()
        for topic in topics:
            if topic in self._metadata.cluster.topics:
                self._tell_partitions(topic)
        self._end_pauses(now)
        if now >= self._next_expiry:
            for batch in self._accumulator.expired(now):
                self._accumulator.expire(batch, self._timed_out(batch, now))
            self._next_expiry = self._accumulator.next_expiry(now)
        if self.before_sending is not None:
            self.before_sending()
        while self._send_ready(now):
            pass
        due = min(due, self._note_unavailable(now))
        self._on_progress()
        if now >= self._next_look or (self._stalls.is_any and not self._accumulator.is_waiting):
            self._next_look = now + LOOK_EVERY_S
            self._look_for_stalls(now)
        if self._accumulator.is_waiting:
            due = min(due, self._next_look)
        return min(due, self._next_expiry, self._send_due, self._requests.look_for_overdue(now))

    # -- before sending --

    def _place_held(self, now: float) -> float:
        """Place the records of topics that are known by now, and fail those of topics that stay unknown. Return when to
        look again."""
        due = inf
        for topic, held_since in self._accumulator.held_topics():
            self._metadata.want(topic)
            error = self._metadata.cluster.errors.get(topic)
            if topic in self._metadata.cluster.topics:
                self._tell_partitions(topic)
            elif error is None:
                self._metadata.request_refresh()
            else:
                wrong_since = max(held_since, self._metadata.wrong_since.get(topic, now))
                if ERRORS[error].retriable and now < wrong_since + self._max_block_s:
                    self._metadata.request_refresh()
                    due = min(due, wrong_since + self._max_block_s)
                else:
                    detail = f"{topic}, after {now - held_since:.1f} s (max_block_ms)"
                    principal = self._runtime.protection.principal
                    failed = topic_error(error, detail, topic, principal, AclOperation.WRITE)
                    self._accumulator.fail_held(topic, failed)
                    self._accumulator.forget(topic)
                    self._metadata.unwant(topic)
        return due

    def _tell_partitions(self, topic: str) -> None:
        cluster = self._metadata.cluster
        info = cluster.topics[topic]
        available = [
            index
            for index in info.partitions
            if (leader := cluster.leader(topic, index)) is not None and leader.node_id not in self._unavailable
        ]
        self._accumulator.topic_is_known(topic, info.topic_id, max(info.partitions) + 1, available)

    def _end_pauses(self, now: float) -> None:
        """End the back-off of partitions that have another leader than the one that failed."""
        for queue in self._accumulator.backing_off(now):
            leader = self._metadata.cluster.leader(queue.topic, queue.partition)
            if leader is not None and leader != queue.tried:
                queue.retry_at = now

    def failed_so_far(self, batch: Batch) -> str:
        """Return the partition of a waiting batch, and the error of the last attempt, if there is one."""
        cause, reason = self._why(batch)
        where = batch.topic if batch.partition == UNASSIGNED else _name((batch.topic, batch.partition))
        return where if cause is None else f"{where}: {reason}"

    def _timed_out(self, batch: Batch, now: float) -> DeliveryTimedOut:
        cause, reason = self._why(batch)
        where = _name((batch.topic, batch.partition))
        error = DeliveryTimedOut(f"{where}: not acknowledged within {now - batch.created_at:.1f} s; {reason}")
        error.__cause__ = cause
        return error

    def _why(self, batch: Batch) -> tuple[MinibrokerError | None, str]:
        """Return why a batch is not acknowledged, as far as is known: the error, if there is one, and a text."""
        topic, partition = batch.topic, batch.partition
        error = self._metadata.cluster.errors.get(topic) if partition == UNASSIGNED else None
        cause = (
            self._unreachable(batch)
            or self._last_errors.get((topic, partition))
            or self._metadata.last_error
            or self._identity_error
            or (None if error is None else BrokerError(error, topic))
        )
        if cause is not None:
            return cause, f"the last attempt failed: {cause}"
        if topic in self._accumulator.changing_topics():
            return None, "the topic was created again, and what was sent to the old one has had no answer yet"
        if self._identity_task is not None and not self._identity_task.done():
            return None, "no broker has given a producer id yet, for which it needs ZooKeeper: see `minibroker status`"
        leader = self._metadata.cluster.leader(topic, partition)
        if leader is None:
            return None, "it has no leader that can be reached: see `minibroker status`"
        if self._requests.was_muted(leader.node_id):
            return None, f"the leader, broker {leader.node_id}, throttles this client, which is over a quota: see " + (
                "`minibroker configs describe`"
            )
        if self._requests.count(leader.node_id):
            wait = ", or still waits for its replicas" if self._acks == -1 else ""
            return None, f"the leader, broker {leader.node_id}, has not answered{wait}: see `minibroker status`"
        return None, f"nothing was sent to the leader, broker {leader.node_id}, yet: raise delivery_timeout_ms"

    def _look_for_stalls(self, now: float) -> None:
        """Report the partitions whose oldest batch is still the same, or has failed since the last look."""
        before, self._oldest = self._oldest, self._accumulator.oldest(now)
        self._stalls.give_up(
            [key for key, batch in before.items() if key not in self._oldest and batch.error is not None]
        )
        stuck = [
            key
            for key, batch in self._oldest.items()
            if (former := before.get(key, batch)) is batch or not former.is_done or former.error is not None
        ]
        self._stalls.look(now, stuck, lambda key: self._why(self._oldest[key])[1])

    def _unreachable(self, batch: Batch) -> NetworkError | None:
        """Return why there is no connection to the leader; None if there is one."""
        leader = self._metadata.cluster.leader(batch.topic, batch.partition)
        return None if leader is None else self._requests.connection_error(leader.node_id)

    # -- sending --

    def _send_ready(self, now: float) -> bool:
        """Send one request to each leader that can take one and has a batch ready. Return whether any was sent."""
        ready = self._accumulator.ready(now)
        self._send_due = inf if ready.next_check_at is None else ready.next_check_at
        nodes: dict[int, list[tuple[Leader, PartitionQueue]]] = {}
        for queue in ready.queues:
            if self._accumulator.lacks_identity(queue):
                self._obtain_identity()
                continue
            leader = self._metadata.cluster.leader(queue.topic, queue.partition)
            if leader is None:
                self._metadata.want(queue.topic)
                self._metadata.request_refresh()
            elif not queue.in_flight or queue.tried is None or queue.tried[0] == leader.node_id:
                # Batches in flight to the former leader must be answered before any goes to the new one.
                nodes.setdefault(leader.node_id, []).append((leader, queue))
        sent = False
        for node_id in [node_id for node_id in self._held_up_since if node_id not in nodes]:
            del self._held_up_since[node_id]
        for node_id, queues in nodes.items():
            connection = self._usable(node_id, now)
            if connection is not None:
                self._held_up_since.pop(node_id, None)
                self._send(node_id, connection, queues, now)
                sent = True
            else:
                self._held_up_since.setdefault(node_id, now)
        return sent

    def _note_unavailable(self, now: float) -> float:
        """Keep records that may go anywhere from unavailable leaders: those that could take no request for
        `partitioner.availability.timeout.ms` although a batch was ready (KIP-794). Return when another leader may
        become unavailable."""
        if not self._availability_timeout_s:
            return inf
        since = self._held_up_since
        unavailable = frozenset(node for node in since if since[node] + self._availability_timeout_s <= now)
        if unavailable != self._unavailable:
            self._unavailable = unavailable
            for topic in self._accumulator.topics():
                if topic in self._metadata.cluster.topics:
                    self._tell_partitions(topic)
        return min(
            (at + self._availability_timeout_s for node, at in since.items() if node not in unavailable), default=inf
        )

    def _usable(self, node_id: int, now: float) -> Connection | None:
        """Return the connection to a leader, if it can take a request now."""
        connection, usable_at = self._requests.connection(node_id, now)
        self._send_due = min(self._send_due, usable_at)
        if connection is None or connection.in_flight >= self._max_in_flight:
            return None
        if self._acks == 0 and connection.unsent_bytes > self._max_request_size:
            self._send_due = min(self._send_due, now + FULL_SOCKET_PAUSE_S)
            return None
        return connection

    def _send(
        self, node_id: int, connection: Connection, queues: Sequence[tuple[Leader, PartitionQueue]], now: float
    ) -> None:
        """Send a request with the first batch of each queue, as many as fit."""
        topics: dict[str, m.ProduceTopic] = {}
        batches: list[Batch] = []
        size = 0
        for leader, queue in queues:
            if batches and size + queue.waiting[0].size > self._max_request_size:
                continue
            if len(batches) == m.MAX_PRODUCE_PARTITIONS:
                break
            batch = self._accumulator.take(queue)
            queue.tried = leader
            try:
                records = batch.encode(self._compression, is_transactional=self._transactional_id is not None)
            except (TypeError, ValueError) as error:
                self._settle_batch(batch, ErrorCode.INVALID_RECORD, f"it cannot be encoded: {error}", None, now)
                continue
            size += len(records)
            batches.append(batch)
            topic = topics.get(queue.topic)
            if topic is None:
                topic = topics[queue.topic] = m.ProduceTopic(queue.topic, [], batch.topic_id)
            topic.partition_data.append(m.ProducePartition(queue.partition, memoryview(records)))
        if not batches:
            return
        message = m.ProduceRequest(
            self._transactional_id,
            self._acks,
            round(self._runtime.request_timeout_s * 1_000),
            list(topics.values()),
        )
        if self._acks == 0:
            connection.send_and_forget(PRODUCE, message)
            for batch in batches:
                self._settle_batch(batch, ErrorCode.NONE, "", None, now)
            return
        timeout_s = self._runtime.request_timeout_s + ANSWER_GRACE_S
        self._requests.send(node_id, connection, message, batches, timeout_s, now)

    # -- answers --

    def _settle(self, request: LeaderRequest[Batch], answer: asyncio.Future[m.ProduceResponse], now: float) -> None:
        failure = self._requests.failure(request, answer)
        if failure is None:
            self._settle_response(request, answer.result(), now)
        else:
            for batch in request.parts:
                self._settle_batch(batch, *failure, None, now)

    def _settle_response(self, request: LeaderRequest[Batch], response: m.ProduceResponse, now: float) -> None:
        self._requests.mute(request.node_id, response.throttle_time_ms, now)
        answers = {
            (topic.name, partition.index): partition
            for topic in response.responses
            for partition in topic.partition_responses
        }
        for batch in request.parts:
            partition = answers.get((batch.topic, batch.partition))
            if partition is None:
                detail = f"the answer of {request.connection.address} does not mention {batch.topic}-{batch.partition}"
                self._settle_batch(batch, ErrorCode.NETWORK_EXCEPTION, detail, None, now)
            else:
                detail = partition.error_message or f"{batch.topic}-{batch.partition} at {request.connection.address}"
                self._settle_batch(batch, error_of(partition.error_code), detail, partition, now)

    def _settle_batch(
        self, batch: Batch, code: ErrorCode, detail: str, answer: m.ProducePartitionResponse | None, now: float
    ) -> None:
        topic_id = batch.topic_id
        verdict = self._accumulator.judge(batch, code)
        key = batch.topic, batch.partition
        if verdict is BatchVerdict.DELIVERED:
            self._last_errors.pop(key, None)
            if answer is None:
                self._accumulator.delivered(batch, -1, -1)
            else:
                self._accumulator.delivered(batch, answer.base_offset, answer.log_append_time_ms)
            return
        error = self._last_errors[key] = BrokerError(code, detail)
        logger.debug("%s: %s: %s", self._runtime.connections.client_id, verdict.value, error)
        if ERRORS[code].refresh_metadata:
            self._requests.leader_moved(TopicPartition(*key), answer, topic_id)
            pause_s = self._runtime.retry_backoff_s
        else:
            first_s = first_pause_s(error) or self._runtime.retry_backoff_s
            pause_s = exponential_backoff_s(batch.attempts, first_s, self._runtime.world.random)
        match verdict:
            case BatchVerdict.RETRY:
                self._accumulator.retry(batch, now + pause_s)
            case BatchVerdict.RENUMBER:
                self._accumulator.renumber(batch, now + pause_s)
            case BatchVerdict.SPLIT:
                self._accumulator.split(batch)
            case BatchVerdict.FAIL:
                self._accumulator.fail(batch, error)

    # -- the producer id --

    def _obtain_identity(self) -> None:
        if self._identity_task is None or self._identity_task.done():
            self._identity_task = self._runtime.tasks.start(self._ask_for_identity(), "producer id")

    async def _ask_for_identity(self) -> None:
        """Ask until a broker grants a producer id. Batches that wait for it fail by their delivery timeout, with the
        reason."""
        retries = self._runtime.retries()
        while True:
            try:
                response = await self._metadata.request_any(
                    INIT_PRODUCER_ID, m.InitProducerIdRequest(None), timeout_s=self._runtime.request_timeout_s
                )
                if response.error_code == ErrorCode.NONE:
                    break
                raise BrokerError(error_of(response.error_code), "asking for a producer id")
            except (NetworkError, BrokerError) as error:
                self._identity_error = error
                logger.debug("%s: no producer id yet: %s", self._runtime.connections.client_id, error)
                await retries.pause(error)
        self._identity_error = None
        self._accumulator.identity = Identity(response.producer_id, response.producer_epoch)
        self.wake()


def _partition_of(batch: Batch) -> tuple[str, int]:
    return batch.topic, batch.partition


def _name(partition: tuple[str, int]) -> str:
    topic, index = partition
    return topic if index == UNASSIGNED else f"{topic}-{index}"

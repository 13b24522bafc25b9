"""The control requests to brokers (Kafka's ControllerChannelManager): one ordered queue and one sender per live broker.

The problem: a broker must receive every control request in the order of the decisions, however often its connection
breaks. Yet a broker that hangs must not delay the other brokers or the controller.

The choice: decisions only queue requests. For each broker, a task sends the oldest request until it is answered, then
the next; with one at a time, a retry never overtakes another request. The task ends when the broker is lost or the
tenure ends. A broker that registers again gets a new queue: requests for its former epoch are dropped, and those
already sent are rejected by their epoch. A retry of a request whose response was lost does no harm, since its epochs
mark it as a repetition. A request that arrives late, over an abandoned connection, does no harm either: requests are
numbered, and a broker never goes back to an earlier one.

Responses become events. A broker that knows a higher controller epoch ends the tenure.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minibroker.controller.background import stop_in_background
from minibroker.controller.decisions.cluster_state import LogEnd, LogEndReported
from minibroker.controller.decisions.events import (
    Deposed,
    Event,
    LeaderAndIsrAnswered,
    StopReplicaAnswered,
    TopicDeletionsHeard,
    UpdateMetadataAnswered,
)
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.protocol import messages as m
from minibroker.protocol.apis import LEADER_AND_ISR, UPDATE_METADATA, Api
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.model import Endpoint, RegisteredBroker, TopicPartition
from minibroker.protocol.world import Clock

RETRY_PAUSE_S = 0.1
"""Seconds between two attempts to reach a broker, as in Kafka's RequestSendThread."""
CONNECT_TIMEOUT_S = 3.0

FAILURE_PAUSE_S = 1.0
MAX_FAILURES = 5
"""Failures of a broker's handler after which the next request is sent; it may concern other partitions."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """A request in a queue. `partitions`: those that the response must report on. `deleted_topics`: those that an
    UpdateMetadata reports as deleted."""

    api: Api[Any, Any]
    body: m.LeaderAndIsrRequest | m.StopReplicaRequest | m.UpdateMetadataRequest
    partitions: tuple[TopicPartition, ...] = ()
    deleted_topics: tuple[str, ...] = ()


class Outbox:
    """Belongs to one tenure. `post` queues events; `on_failure` is called if a sender fails, which is a bug."""

    def __init__(
        self,
        connections: BrokerConnections,
        controller_epoch: int,
        client_id: str,
        request_timeout_s: float,
        post: Callable[[Event], None],
        on_failure: Callable[[BaseException], None],
        clock: Clock,
    ) -> None:
        self._connections = connections
        self._epoch = controller_epoch
        self._client_id = client_id
        self._request_timeout_s = request_timeout_s
        self._post = post
        self._on_failure = on_failure
        self._clock = clock
        self._channels: dict[int, _Channel] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def add_broker(self, broker: RegisteredBroker) -> None:
        self.remove_broker(broker.id)
        endpoint = broker.control_endpoint
        if endpoint is None:
            _log.error("broker %d is registered without an endpoint that takes control requests", broker.id)
            return
        channel = _Channel(broker, endpoint)
        channel.task = asyncio.create_task(self._send_all(channel), name=f"outbox of broker {broker.id}")
        channel.task.add_done_callback(self._sender_ended)
        self._channels[broker.id] = channel

    def remove_broker(self, broker_id: int) -> None:
        """Drop the broker's queue and connection."""
        channel = self._channels.pop(broker_id, None)
        if channel is not None and channel.task is not None:
            channel.progress.set()
            channel.task.cancel()
            self._leaving.add(channel.task)
            channel.task.add_done_callback(self._leaving.discard)

    def put(self, broker_id: int, request: Outgoing) -> None:
        """Queue a request. It is dropped if the broker is gone."""
        channel = self._channels.get(broker_id)
        if channel is not None:
            channel.orders += 1
            request.body.number = channel.orders
            channel.queue.append((request, self._clock.monotonic()))
            channel.filled.set()

    async def delivered(self) -> None:
        """Wait until every request queued by now has been answered, or its broker is gone."""
        for channel in list(self._channels.values()):
            due = channel.orders
            while channel.answered < due and self._channels.get(channel.broker.id) is channel:
                channel.progress.clear()
                await channel.progress.wait()

    async def close(self) -> None:
        """Drop all queues, and wait until every sender has ended."""
        for broker_id in list(self._channels):
            self.remove_broker(broker_id)
        await stop_in_background(list(self._leaving))

    def _sender_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._on_failure(failure)

    async def _send_all(self, channel: _Channel) -> None:
        try:
            while True:
                while channel.queue:
                    request, queued_at = channel.queue[0]
                    answer = await self._deliver(channel, request)
                    channel.queue.popleft()
                    self._answered(channel, request, answer, self._clock.monotonic() - queued_at)
                    channel.answered += 1
                    channel.progress.set()
                channel.filled.clear()
                await channel.filled.wait()
        finally:
            channel.disconnect("the controller has no more to say")

    async def _deliver(self, channel: _Channel, request: Outgoing) -> m.Message | ErrorCode:
        """Send the request until it need not be repeated. Returns the response, or the error of the whole request."""
        attempts = 0
        while True:
            answer = await self._ask(channel, request)
            error, _ = _errors_in(answer)
            attempts += 1
            if not _is_to_be_repeated(error, attempts):
                return answer
            if attempts == 1:
                _log.warning("%s to broker %d is sent again: %s", request.api.name, channel.broker.id, error.name)
            await asyncio.sleep(FAILURE_PAUSE_S if error is ErrorCode.UNKNOWN_SERVER_ERROR else RETRY_PAUSE_S)

    async def _ask(self, channel: _Channel, request: Outgoing) -> m.Message | ErrorCode:
        """Retry until the broker answers. Returns the response, or the error of the whole request."""
        while True:
            try:
                if channel.connection is None or channel.connection.closed:
                    channel.connection = await self._connect(channel.broker.id, channel.endpoint)
                answer = await channel.connection.request(request.api, request.body, timeout_s=self._request_timeout_s)
            except (BrokerError, NetworkError, InvalidMessage) as error:
                if isinstance(error, BrokerError) and error.code is not ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
                    _log.error("broker %d refused %s: %s", channel.broker.id, request.api.name, error)
                    return error.code
                # A broker that does not accept this one's proof has not read the request: an operator must fix that.
                if channel.reachable:
                    _log.warning("%s to broker %d is tried again: %s", request.api.name, channel.broker.id, error)
                channel.reachable = False
                channel.disconnect(str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                if not channel.reachable:
                    _log.info("broker %d answers again", channel.broker.id)
                channel.reachable = True
                assert isinstance(answer, m.Message)
                return answer

    async def _connect(self, broker_id: int, endpoint: Endpoint) -> Connection:
        return await self._connections.open(
            broker_id,
            endpoint.host,
            endpoint.port,
            client_id=self._client_id,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            request_timeout_s=self._request_timeout_s,
            listener=endpoint.listener,
        )

    def _answered(self, channel: _Channel, request: Outgoing, answer: m.Message | ErrorCode, took_s: float) -> None:
        error, partition_errors = _errors_in(answer)
        broker = channel.broker
        if error is ErrorCode.STALE_CONTROLLER_EPOCH:
            self._post(Deposed(self._epoch, broker.id))
        elif error is ErrorCode.STALE_BROKER_EPOCH:
            # The broker has registered again; BrokerChange will send it everything.
            _log.info("broker %d is no longer the one of epoch %d", broker.id, broker.epoch)
        elif request.api is UPDATE_METADATA:
            if error is not ErrorCode.NONE:
                _log.error("broker %d answered UpdateMetadata with %s", broker.id, error.name)
            self._post(UpdateMetadataAnswered(self._epoch, broker.id, error, took_s))
            if request.deleted_topics:
                self._post(TopicDeletionsHeard(self._epoch, broker.id, broker.epoch, request.deleted_topics))
        else:
            errors = {p: error or partition_errors.get(p, ErrorCode.NONE) for p in request.partitions}
            if not request.partitions:
                return  # a StopReplica without deletion
            if request.api is LEADER_AND_ISR:
                log_ends = _log_ends_in(answer, broker.id)
                self._post(LeaderAndIsrAnswered(self._epoch, broker.id, broker.epoch, errors, log_ends, took_s))
            else:
                self._post(StopReplicaAnswered(self._epoch, broker.id, broker.epoch, errors, took_s))


@dataclass(eq=False)
class _Channel:
    broker: RegisteredBroker
    endpoint: Endpoint
    queue: deque[tuple[Outgoing, float]] = field(default_factory=deque)
    """The requests, with the times at which they were queued."""
    orders: int = 0
    """The number of the last request: all requests ever queued."""
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    answered: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after a response, and when the broker is removed."""
    task: asyncio.Task[None] | None = None
    connection: Connection | None = None
    reachable: bool = True

    def disconnect(self, reason: str) -> None:
        if self.connection is not None:
            self.connection.close(reason)
            self.connection = None


def _is_to_be_repeated(error: ErrorCode, attempts: int) -> bool:
    """Return whether a request that failed as a whole with this error, after `attempts`, is sent again."""
    if error is ErrorCode.BROKER_ID_NOT_REGISTERED:
        return True
    return error is ErrorCode.UNKNOWN_SERVER_ERROR and attempts < MAX_FAILURES


def _errors_in(answer: m.Message | ErrorCode) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
    """Return the error of the whole request, and those of partitions; partitions without an entry succeeded."""
    if isinstance(answer, ErrorCode):
        return answer, {}
    assert isinstance(answer, m.LeaderAndIsrResponse | m.StopReplicaResponse | m.UpdateMetadataResponse)
    if isinstance(answer, m.UpdateMetadataResponse):
        return error_of(answer.error_code), {}
    return error_of(answer.error_code), {
        TopicPartition(e.topic_name, e.partition_index): error_of(e.error_code) for e in answer.partition_errors
    }


def _log_ends_in(answer: m.Message | ErrorCode, broker_id: int) -> tuple[LogEndReported, ...]:
    if not isinstance(answer, m.LeaderAndIsrResponse):
        return ()
    return tuple(
        LogEndReported(
            PartitionReplica(TopicPartition(e.topic_name, e.partition_index), broker_id),
            e.leader_epoch,
            LogEnd(e.last_epoch, e.log_end_offset),
        )
        for e in answer.partition_errors
        if e.error_code == ErrorCode.NONE and e.log_end_offset >= 0
    )

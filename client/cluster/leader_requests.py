"""Requests to leaders, for the sender and the fetcher: which leaders can be asked now, which answers have arrived, and
which are overdue.

Both work in steps. Every event (an answer, a connection, new metadata, a call of the application) only wakes the task.
So all decisions are taken in one place and in one order, and an unexpected error in any of them ends the task and
crashes the client.

A broker gets no request during a pause that it requested (throttle_time_ms), nor before it has a connection. A broker
that is stopped rather than dead keeps its connection open. So if an answer is overdue, other brokers are asked for
metadata, and if the leadership has moved, the connection is closed with all requests that wait on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.metadata import Leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.tasks import Waker
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.model import TopicPartition

P = TypeVar("P")
"""The part of a request for one partition."""
Response = TypeVar("Response", bound=m.Message)

LATELY_S = 10.0


class LeaderRequest(NamedTuple, Generic[P]):
    """A request that waits for its answer."""

    node_id: int
    connection: Connection
    parts: list[P]
    sent_at: float


class LeaderRequests(Generic[P, Response]):
    """See the module. `partition_of` returns the partition of a part. An answer is overdue `overdue_s` after its
    request was sent."""

    def __init__(
        self,
        runtime: ClientRuntime,
        api: Api[Any, Response],
        purpose: Purpose,
        *,
        partition_of: Callable[[P], tuple[str, int]],
        overdue_s: float = OVERDUE_S,
    ) -> None:
        self._runtime = runtime
        self._metadata = runtime.metadata
        self._api = api
        self._purpose = purpose
        self._partition_of = partition_of
        self._overdue_s = overdue_s
        self._waker = Waker()
        self._under_way: dict[int, list[LeaderRequest[P]]] = {}
        """Requests by node, in the order in which they were sent."""
        self._ended: list[tuple[LeaderRequest[P], asyncio.Future[Response]]] = []
        self._muted_until: dict[int, float] = {}
        self._metadata_is_new = True
        self._metadata.listeners.append(self._metadata_changed)
        runtime.connections.listeners.append(self.wake)

    # -- steps --

    async def run(self, step: Callable[[float], float]) -> None:
        """Run steps until cancelled. `step` gets the time, and returns when it should be called again if nothing
        happens before; infinity: not through time alone."""
        while True:
            now = self._runtime.clock.monotonic()
            due = step(now)
            await self._waker.sleep(None if due == inf else max(0.0, due - now))

    def wake(self) -> None:
        """Run the next step now: something may have become possible."""
        self._waker.wake()

    def _metadata_changed(self) -> None:
        self._metadata_is_new = True
        self._waker.wake()

    def take_news(self) -> bool:
        """Return whether metadata may have changed since the last call."""
        is_new, self._metadata_is_new = self._metadata_is_new, False
        return is_new

    # -- asking --

    def connection(self, node_id: int, now: float) -> tuple[Connection | None, float]:
        """Return the connection to a leader, if it may be asked now; otherwise None, and when to try again."""
        muted_until = self._muted_until.get(node_id, 0.0)
        if now < muted_until:
            return None, muted_until
        address = self._metadata.address(node_id)
        assert address is not None, "Cluster.leader names only brokers with an address"
        connection = self._runtime.connections.get(address, self._purpose)
        if connection is not None:
            return connection, inf
        usable_at = self._runtime.usable_at(address, self._purpose, now)
        return None, inf if usable_at is None else usable_at

    def connection_error(self, node_id: int) -> NetworkError | None:
        """Return why there is no connection to a broker, if that is known."""
        address = self._metadata.address(node_id)
        return None if address is None else self._runtime.connections.error(address, self._purpose)

    def send(
        self, node_id: int, connection: Connection, message: m.Message, parts: list[P], timeout_s: float, now: float
    ) -> None:
        """Send a request to `node_id` over its `connection`. `ended` returns the request once it has ended."""
        request = LeaderRequest(node_id, connection, parts, now)
        answer = connection.send(self._api, message, timeout_s=timeout_s)
        self._under_way.setdefault(node_id, []).append(request)
        answer.add_done_callback(partial(self._note_end, request))

    def count(self, node_id: int) -> int:
        """Return the number of requests to a broker that wait for an answer."""
        return len(self._under_way.get(node_id, ()))

    # -- answers --

    def _note_end(self, request: LeaderRequest[P], answer: asyncio.Future[Response]) -> None:
        self._ended.append((request, answer))
        self._waker.wake()

    def ended(self) -> list[tuple[LeaderRequest[P], asyncio.Future[Response]]]:
        """Return the requests that ended since the last call, in the order of their ends."""
        ended, self._ended = self._ended, []
        for request, _ in ended:
            self._under_way[request.node_id].remove(request)
        return ended

    def failure(self, request: LeaderRequest[P], answer: asyncio.Future[Response]) -> tuple[ErrorCode, str] | None:
        """Return why an ended request got no answer; None if it got one. Raises unexpected errors, which are bugs."""
        error = answer.exception()
        if error is None:
            return None
        if isinstance(error, BrokerError):
            return error.code, error.detail
        if isinstance(error, (NetworkError, InvalidMessage)):
            self._suspect(request.node_id)
            return ErrorCode.NETWORK_EXCEPTION, str(error)
        raise error

    def mute(self, node_id: int, pause_ms: int, now: float) -> None:
        """Send no request to a broker during the pause that its answer requested (`throttle_time_ms`)."""
        if pause_ms > 0:
            self._muted_until[node_id] = now + pause_ms / 1_000

    def was_muted(self, node_id: int) -> bool:
        """Whether a broker is muted, or was lately: requests that it had received before wait there."""
        return self._runtime.clock.monotonic() < self._muted_until.get(node_id, -inf) + LATELY_S

    def leader_moved(
        self,
        partition: TopicPartition,
        answer: m.ProducePartitionResponse | m.FetchPartitionResponse | None,
        topic_id: str,
    ) -> None:
        """Note that a broker does not lead the partition, in the topic of that id. It may name the leader (KIP-951)."""
        if answer is not None and answer.current_leader_id >= 0:
            leader = Leader(answer.current_leader_id, answer.current_leader_epoch)
            self._metadata.learn_leader(partition, leader, topic_id)
        self._metadata.request_refresh()

    # -- overdue --

    def overdue(self, now: float) -> Iterator[LeaderRequest[P]]:
        """Yield the requests whose answers are overdue."""
        for requests in self._under_way.values():
            for request in requests:
                if now >= request.sent_at + self._overdue_s:
                    yield request

    def look_for_overdue(self, now: float) -> float:
        """Ask for metadata if an answer is overdue, and close a connection if another broker leads by now. Return when
        to look again."""
        due = inf
        for node_id, requests in self._under_way.items():
            if not requests:
                continue
            if now < requests[0].sent_at + self._overdue_s:
                due = min(due, requests[0].sent_at + self._overdue_s)
                continue
            due = min(due, now + OVERDUE_S)
            self._suspect(node_id)
            self._metadata.request_refresh()
            for request in requests:
                self._give_up_if_led_elsewhere(request, now)
        return due

    def _give_up_if_led_elsewhere(self, request: LeaderRequest[P], now: float) -> None:
        for part in request.parts:
            topic, partition = self._partition_of(part)
            leader = self._metadata.cluster.leader(topic, partition)
            if leader is not None and leader.node_id != request.node_id and not request.connection.closed:
                request.connection.close(
                    f"no answer within {now - request.sent_at:.1f} s, and broker {leader.node_id} leads "
                    f"{topic}-{partition}",
                    RequestTimedOut,
                )

    def _suspect(self, node_id: int) -> None:
        """Prefer other brokers for metadata."""
        address = self._metadata.address(node_id)
        if address is not None:
            self._metadata.suspect(address)

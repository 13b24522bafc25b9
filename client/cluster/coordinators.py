"""Which broker coordinates a group, and requests to it until one has been answered (Kafka's CoordinatorStrategy and
AbstractCoordinator.lookupCoordinator).

The coordinator of a group leads the partition of __consumer_offsets that has the group, so it moves whenever that
leader does, and nobody tells clients. Any broker can be asked (FindCoordinator), and what it says is remembered until
it turns out wrong: the broker named says that it is not the coordinator, cannot be reached, or its connection breaks.
One that was stopped rather than killed keeps its connections open and says nothing. So when an answer is overdue, the
brokers are asked again, and if another is named by then, the connection is given up, and with it all that waits on it.
Rejected: to read the leader from the metadata of __consumer_offsets, which saves a request and makes the number of its
partitions, and the hash, part of what clients must know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FIND_COORDINATOR, Api
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_EPOCH

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)
T = TypeVar("T")

GROUP = 0
"""The key type of FindCoordinator; 1 is transactions."""

_MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
"""Ask the brokers again who it is."""
_RETRIED = (*_MOVED, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.REQUEST_TIMED_OUT)
_IN_DOUBT = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT)
"""What was asked for may have been written, and replicated too late for the coordinator to know."""


class Coordinator(NamedTuple):
    node_id: int
    address: Address
    """On the listener of the broker that was asked, which is the one that this client can reach."""


class Epoch(NamedTuple):
    """Of a leader."""

    topic_id: str
    """Epochs of another `__consumer_offsets`, as of a cluster that was set up anew, say nothing about these."""
    number: int


class Answered(NamedTuple, Generic[Response]):
    response: Response
    coordinator: Coordinator
    """That has answered."""
    in_doubt: bool
    """Whether an earlier attempt may have been carried out, so that this one found its work done."""
    last_error: MinibrokerError | None = None
    """Of the attempt before; None: this was the first."""


class Coordinators:
    """See the module. All requests go through the connections for `purpose`."""

    def __init__(self, runtime: ClientRuntime, purpose: Purpose = Purpose.REQUESTS) -> None:
        self._runtime = runtime
        self._purpose = purpose
        self._known: dict[str, Coordinator] = {}
        self._epochs: dict[str, Epoch] = {}
        """Of each group's partition: the latest in which its coordinator was named."""
        self._obstacles: dict[str, MinibrokerError] = {}
        self._instance = ""
        self._attempts = 0

    def known(self, group: str) -> Coordinator | None:
        """As far as is known, without asking anybody."""
        return self._known.get(group)

    def obstacle(self, group: str) -> MinibrokerError | None:
        """Why the latest attempt to reach the group's coordinator failed; None: a request is on its way to it, or was
        answered."""
        return self._obstacles.get(group)

    def forget(self, group: str, coordinator: Coordinator) -> None:
        """It turned out that this one is not the coordinator, or cannot be reached: look for it again. Does nothing if
        another one is known by now."""
        if self._known.get(group) == coordinator:
            del self._known[group]

    async def find(self, group: str, timeout_s: float) -> Coordinator:
        """The one that is known, else the one that brokers name. Retries for `timeout_s`, then raises the last error:
        BrokerError (COORDINATOR_NOT_AVAILABLE while nobody leads the group's partition), NetworkError. Errors that are
        not retriable (INVALID_GROUP_ID) are raised at once."""

        async def attempt(remaining_s: float) -> Coordinator:
            return self._known.get(group) or await self._find(group, remaining_s)

        return await self._retried(group, f"{FIND_COORDINATOR.name} of group {group}", timeout_s, attempt)

    async def request(
        self,
        group: str,
        api: Api[Request, Response],
        body: Request,
        *,
        code_of: Callable[[Response], int],
        timeout_s: float,
        overdue_s: float = OVERDUE_S,
    ) -> Answered[Response]:
        """What the group's coordinator answers, whichever broker that is by then. For what changes nothing, or cannot
        come too late (`change` is for the rest). `code_of` is the error in an answer that concerns the group: where the
        coordinator has moved, loads the group, or could not replicate in time, it is asked again for `timeout_s`; then
        the last error is raised: BrokerError, NetworkError. Any other error is for the caller, who gets the answer.

        `overdue_s`: after so long without an answer, whether another broker is the coordinator by now."""
        return await self._request(group, api, lambda: body, code_of, timeout_s, overdue_s)

    async def change(
        self,
        group: str,
        api: Api[Request, Response],
        body_of: Callable[[g.Attempt], Request],
        *,
        code_of: Callable[[Response], int],
        timeout_s: float,
    ) -> Answered[Response]:
        """As `request`. Each attempt says which one it is: one that arrives after a newer one of this client was taken
        changes nothing."""

        def numbered() -> Request:
            if not self._instance:
                self._instance = self._runtime.world.random.randbytes(16).hex()
            self._attempts += 1
            epoch = self._epochs.get(group)
            return body_of(g.Attempt(self._instance, self._attempts, NO_EPOCH if epoch is None else epoch.number))

        return await self._request(group, api, numbered, code_of, timeout_s, OVERDUE_S)

    async def _request(
        self,
        group: str,
        api: Api[Request, Response],
        next_body: Callable[[], Request],
        code_of: Callable[[Response], int],
        timeout_s: float,
        overdue_s: float,
    ) -> Answered[Response]:
        what = f"{api.name} of group {group}"
        in_doubt = False
        last_error: MinibrokerError | None = None

        async def attempt(remaining_s: float) -> Answered[Response]:
            nonlocal in_doubt, last_error
            coordinator = self._known.get(group) or await self._find(group, remaining_s)
            was_sent = False
            try:
                connection = await self._runtime.connection_soon(coordinator.address, self._purpose)
                was_sent = True
                self._obstacles.pop(group, None)
                body = next_body()  # numbered in the order of sending: nothing is waited for in between
                response = await self._ask(group, coordinator, connection, api, body, remaining_s, overdue_s)
            except (NetworkError, InvalidMessage) as error:
                last_error = error
                in_doubt = in_doubt or was_sent
                self.forget(group, coordinator)
                self._runtime.metadata.suspect(coordinator.address)
                raise
            code = error_of(code_of(response))
            if code in _MOVED:
                self.forget(group, coordinator)
            if code in _RETRIED:
                in_doubt = in_doubt or code in _IN_DOUBT
                last_error = BrokerError(code, f"{what} at broker {coordinator.node_id}")
                raise last_error
            return Answered(response, coordinator, in_doubt, last_error)

        return await self._retried(group, what, timeout_s, attempt)

    async def _find(self, group: str, timeout_s: float) -> Coordinator:
        """One broker's answer. Raises BrokerError, NetworkError."""
        request = g.FindCoordinatorRequest(GROUP, [group])
        response = await self._runtime.metadata.request_any(FIND_COORDINATOR, request, timeout_s=timeout_s)
        for found in response.coordinators:
            if found.key != group:
                continue
            code = error_of(found.error_code)
            if code is not ErrorCode.NONE:
                said = found.error_message or f"{FIND_COORDINATOR.name} of group {group}"
                raise BrokerError(code, said, is_complete=bool(found.error_message))
            coordinator = self._known[group] = Coordinator(found.node_id, Address(found.host, found.port))
            # A broker may know less than another one has told: never back, or what was sent to the latest coordinator
            # could come after what an earlier one has granted.
            epoch = Epoch(found.topic_id, found.leader_epoch)
            known = self._epochs.get(group)
            self._epochs[group] = max(known, epoch) if known and known.topic_id == epoch.topic_id else epoch
            return coordinator
        raise InvalidMessage(f"an answer to {FIND_COORDINATOR.name} does not mention group {group}")

    async def _ask(
        self,
        group: str,
        coordinator: Coordinator,
        connection: Connection,
        api: Api[Request, Response],
        body: Request,
        timeout_s: float,
        overdue_s: float,
    ) -> Response:
        """As `ClientRuntime.ask`, which asks for metadata where this looks for the coordinator."""
        answer = connection.send(api, body, timeout_s=timeout_s)
        while not answer.done():
            await asyncio.wait([answer], timeout=overdue_s)
            if not answer.done() and await self._has_moved(group, coordinator) and not answer.done():
                self.forget(group, coordinator)
                connection.close(
                    f"no answer to {api.name} yet, and another broker coordinates {group}", RequestTimedOut
                )
                await asyncio.wait([answer])
        return answer.result()

    async def _has_moved(self, group: str, coordinator: Coordinator) -> bool:
        """Whether a broker names another one."""
        try:
            found = await self._find(group, OVERDUE_S)
        except (NetworkError, BrokerError, InvalidMessage):
            return False
        return found != coordinator

    async def _retried(self, group: str, what: str, timeout_s: float, attempt: Callable[[float], Awaitable[T]]) -> T:
        retries = self._runtime.retries(timeout_s, what)
        while True:
            try:
                result = await attempt(retries.remaining_s)
            except (NetworkError, InvalidMessage, BrokerError) as error:
                if isinstance(error, BrokerError) and not error.retriable:
                    raise
                self._obstacles[group] = error
                if not await retries.pause(error):
                    raise
            else:
                self._obstacles.pop(group, None)
                retries.succeeded()
                return result

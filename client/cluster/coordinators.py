"""The coordinators of groups: finding them, and requests that are repeated until answered (Kafka's CoordinatorStrategy
and AbstractCoordinator.lookupCoordinator).

The coordinator of a group leads the partition of __consumer_offsets that has the group. It moves with that leader, and
clients are not notified. Any broker can be asked (FindCoordinator). The answer is remembered until it proves wrong: the
named broker reports that it is not the coordinator, cannot be reached, or its connection breaks. A broker that was
stopped rather than killed keeps its connections open and does not answer. So if an answer is overdue, the brokers are
asked again, and if they name another coordinator, the connection is closed with all requests that wait on it.
Rejected: reading the leader from the metadata of __consumer_offsets. It saves a request, but clients would have to know
the number of its partitions and the hash.
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
"""The coordinator must be looked up again."""
_RETRIED = (*_MOVED, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.REQUEST_TIMED_OUT)
_IN_DOUBT = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT)
"""The request may have been carried out, and replicated too late for the coordinator to know."""


class Coordinator(NamedTuple):
    node_id: int
    address: Address
    """The address on the listener of the broker that was asked, which this client can reach."""


class Epoch(NamedTuple):
    """The epoch of a leader of `__consumer_offsets`."""

    topic_id: str
    """Epochs of different topics, for instance after a cluster was created anew, cannot be compared."""
    number: int


class Answered(NamedTuple, Generic[Response]):
    response: Response
    coordinator: Coordinator
    """The coordinator that answered."""
    in_doubt: bool
    """Whether an earlier attempt may have been carried out, so that this one found the work done."""
    last_error: MinibrokerError | None = None
    """The error of the previous attempt; None: this was the first one."""


class Coordinators:
    """See the module. All requests use the connections for `purpose`."""

    def __init__(self, runtime: ClientRuntime, purpose: Purpose = Purpose.REQUESTS) -> None:
        self._runtime = runtime
        self._purpose = purpose
        self._known: dict[str, Coordinator] = {}
        self._epochs: dict[str, Epoch] = {}
        """The latest epoch in which the group's coordinator was named."""
        self._obstacles: dict[str, MinibrokerError] = {}
        self._instance = ""
        self._attempts = 0

    def known(self, group: str) -> Coordinator | None:
        """Return the coordinator that is known, without asking a broker."""
        return self._known.get(group)

    def obstacle(self, group: str) -> MinibrokerError | None:
        """Return why the latest attempt to reach the group's coordinator failed; None if a request was sent to it or
        answered."""
        return self._obstacles.get(group)

    def forget(self, group: str, coordinator: Coordinator) -> None:
        """Forget a coordinator that is not the coordinator any more, or cannot be reached. Does nothing if another one
        is known by now."""
        if self._known.get(group) == coordinator:
            del self._known[group]

    async def find(self, group: str, timeout_s: float) -> Coordinator:
        """Return the coordinator that is known, or ask for it. Retries for `timeout_s`, then raises the last error:
        BrokerError (COORDINATOR_NOT_AVAILABLE while the group's partition has no leader), NetworkError. Errors that are
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
        """Return the answer of the group's coordinator, also if the coordinator moves during the call. For requests
        that change nothing, or do no harm if they arrive late; `change` is for all others. `code_of` returns the error
        of the group in an answer: if the coordinator has moved, loads the group, or could not replicate in time, the
        request is repeated for `timeout_s`. Then raises the last error: BrokerError, NetworkError. The caller handles
        all other errors in the answer.

        After `overdue_s` without an answer, brokers are asked whether another one is the coordinator."""
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
        """As `request`, for requests that must not be carried out late. Attempts are numbered: one that arrives after a
        newer one of this client was accepted changes nothing."""

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
                body = next_body()  # no await before sending, so that the numbers are in the order of sending
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
        """Return the coordinator that some broker names. Raises BrokerError, NetworkError."""
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
            # A broker may know an older epoch than another one. The epoch never goes back: otherwise a request to the
            # latest coordinator could be rejected as older than one that an earlier coordinator accepted.
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
        """As `ClientRuntime.ask`, but if the answer is overdue, look for the coordinator instead of the metadata."""
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
        """Return whether a broker names another coordinator."""
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

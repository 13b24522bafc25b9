"""The coordinators of groups and of transactional ids: finding them, and requests that are repeated until answered
(Kafka's CoordinatorStrategy and AbstractCoordinator.lookupCoordinator).

The coordinator of a group leads the partition of __consumer_offsets that has the group; the coordinator of a
transactional id, its partition of __transaction_state. It moves with that leader, and clients are not notified. Any
broker can be asked (FindCoordinator). The answer is remembered until it proves wrong: the named broker reports that it
is not the coordinator, cannot be reached, or its connection breaks. A broker that was stopped rather than killed keeps
its connections open and does not answer. So if an answer is overdue, the brokers are asked again, and if they name
another coordinator, the connection is closed with all requests that wait on it. Rejected: reading the leader from the
metadata of these topics. It saves a request, but clients would have to know the number of their partitions and the
hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.metadata import FIRST_ATTEMPT_TIMEOUT_S
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FIND_COORDINATOR, Api
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import NO_EPOCH

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)
T = TypeVar("T")

CONCURRENT_BACKOFF_S = 0.005
"""The first pause after CONCURRENT_TRANSACTIONS: markers are usually written within milliseconds."""


class KeyType(Enum):
    """What a coordinator coordinates; the number is FindCoordinator's."""

    GROUP = 0
    TRANSACTION = 1

    @property
    def noun(self) -> str:
        return "group" if self is KeyType.GROUP else "transactional id"


_MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
"""The coordinator must be looked up again."""
RETRIED = (
    *_MOVED,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.CONCURRENT_TRANSACTIONS,
)
"""Errors of a coordinator after which the request is repeated."""
_IN_DOUBT = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT)
"""The request may have been carried out, and replicated too late for the coordinator to know."""


def first_pause_s(error: MinibrokerError) -> float | None:
    """Return the first pause after an error; None: the client's `retry_backoff_ms`."""
    is_concurrent = isinstance(error, BrokerError) and error.code is ErrorCode.CONCURRENT_TRANSACTIONS
    return CONCURRENT_BACKOFF_S if is_concurrent else None


class Coordinator(NamedTuple):
    node_id: int
    address: Address
    """The address on the listener of the broker that was asked, which this client can reach."""


class Epoch(NamedTuple):
    """The epoch of a leader of `__consumer_offsets` or `__transaction_state`."""

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
    """See the module. All requests use the connections for `purpose`. Keys are names of groups, or transactional
    ids."""

    def __init__(
        self, runtime: ClientRuntime, purpose: Purpose = Purpose.REQUESTS, key_type: KeyType = KeyType.GROUP
    ) -> None:
        self._runtime = runtime
        self._purpose = purpose
        self._key_type = key_type
        self._noun = key_type.noun
        self._known: dict[str, Coordinator] = {}
        self._epochs: dict[str, Epoch] = {}
        """The latest epoch in which the key's coordinator was named."""
        self._obstacles: dict[str, MinibrokerError] = {}
        self._instance = ""
        self._attempts = 0

    def known(self, key: str) -> Coordinator | None:
        """Return the coordinator that is known, without asking a broker."""
        return self._known.get(key)

    def obstacle(self, key: str) -> MinibrokerError | None:
        """Return why the latest attempt to reach the key's coordinator failed; None if a request was sent to it or
        answered."""
        return self._obstacles.get(key)

    def forget(self, key: str, coordinator: Coordinator) -> None:
        """Forget a coordinator that is not the coordinator any more, or cannot be reached. Does nothing if another one
        is known by now."""
        if self._known.get(key) == coordinator:
            del self._known[key]

    async def find(self, key: str, timeout_s: float) -> Coordinator:
        """Return the coordinator that is known, or ask for it. Retries for `timeout_s`, then raises the last error:
        BrokerError (COORDINATOR_NOT_AVAILABLE while the key's partition has no leader), NetworkError. Errors that are
        not retriable (INVALID_GROUP_ID) are raised at once."""

        async def attempt(remaining_s: float) -> Coordinator:
            return self._known.get(key) or await self._find(key, remaining_s)

        return await self._retried(key, f"{FIND_COORDINATOR.name} of {self._noun} {key}", timeout_s, attempt)

    async def request(
        self,
        key: str,
        api: Api[Request, Response],
        body: Request,
        *,
        code_of: Callable[[Response], int],
        timeout_s: float,
        overdue_s: float = OVERDUE_S,
    ) -> Answered[Response]:
        """Return the answer of the key's coordinator, also if the coordinator moves during the call. For requests
        that change nothing, or do no harm if they arrive late; `change` is for all others. `code_of` returns the error
        of the key in an answer: if the coordinator has moved, loads its log, or could not replicate in time, the
        request is repeated for `timeout_s`. Then raises the last error: BrokerError, NetworkError. The caller handles
        all other errors in the answer.

        After `overdue_s` without an answer, brokers are asked whether another one is the coordinator."""
        return await self._request(key, api, lambda: body, code_of, timeout_s, overdue_s)

    async def change(
        self,
        key: str,
        api: Api[Request, Response],
        body_of: Callable[[Attempt], Request],
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
            epoch = self._epochs.get(key)
            return body_of(Attempt(self._instance, self._attempts, NO_EPOCH if epoch is None else epoch.number))

        return await self._request(key, api, numbered, code_of, timeout_s, OVERDUE_S)

    async def _request(
        self,
        key: str,
        api: Api[Request, Response],
        next_body: Callable[[], Request],
        code_of: Callable[[Response], int],
        timeout_s: float,
        overdue_s: float,
    ) -> Answered[Response]:
        what = f"{api.name} of {self._noun} {key}"
        in_doubt = False
        last_error: MinibrokerError | None = None

        async def attempt(remaining_s: float) -> Answered[Response]:
            nonlocal in_doubt, last_error
            coordinator = self._known.get(key) or await self._find(key, remaining_s)
            was_sent = False
            try:
                connection = await self._runtime.connection_soon(coordinator.address, self._purpose)
                was_sent = True
                self._obstacles.pop(key, None)
                body = next_body()  # no await before sending, so that the numbers are in the order of sending
                response = await self._ask(key, coordinator, connection, api, body, remaining_s, overdue_s)
            except (NetworkError, InvalidMessage) as error:
                last_error = error
                in_doubt = in_doubt or was_sent
                self.forget(key, coordinator)
                self._runtime.metadata.suspect(coordinator.address)
                raise
            code = error_of(code_of(response))
            if code in _MOVED:
                self.forget(key, coordinator)
            if code in RETRIED:
                in_doubt = in_doubt or code in _IN_DOUBT
                last_error = BrokerError(code, f"{what} at broker {coordinator.node_id}")
                raise last_error
            return Answered(response, coordinator, in_doubt, last_error)

        return await self._retried(key, what, timeout_s, attempt)

    async def _find(self, key: str, timeout_s: float) -> Coordinator:
        """Return the coordinator that some broker names. Raises BrokerError, NetworkError."""
        request = g.FindCoordinatorRequest(self._key_type.value, [key])
        response = await self._runtime.metadata.request_any(FIND_COORDINATOR, request, timeout_s=timeout_s)
        for found in response.coordinators:
            if found.key != key:
                continue
            code = error_of(found.error_code)
            if code is not ErrorCode.NONE:
                said = found.error_message or f"{FIND_COORDINATOR.name} of {self._noun} {key}"
                raise BrokerError(code, said, is_complete=bool(found.error_message))
            coordinator = self._known[key] = Coordinator(found.node_id, Address(found.host, found.port))
            # A broker may know an older epoch than another one. The epoch never goes back: otherwise a request to the
            # latest coordinator could be rejected as older than one that an earlier coordinator accepted.
            epoch = Epoch(found.topic_id, found.leader_epoch)
            known = self._epochs.get(key)
            self._epochs[key] = max(known, epoch) if known and known.topic_id == epoch.topic_id else epoch
            return coordinator
        raise InvalidMessage(f"an answer to {FIND_COORDINATOR.name} does not mention {self._noun} {key}")

    async def _ask(
        self,
        key: str,
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
            if not answer.done() and await self._has_moved(key, coordinator) and not answer.done():
                self.forget(key, coordinator)
                connection.close(f"no answer to {api.name} yet, and another broker coordinates {key}", RequestTimedOut)
                await asyncio.wait([answer])
        return answer.result()

    async def _has_moved(self, key: str, coordinator: Coordinator) -> bool:
        """Return whether a broker names another coordinator."""
        try:
            found = await self._find(key, OVERDUE_S)
        except (NetworkError, BrokerError, InvalidMessage):
            return False
        return found != coordinator

    async def _retried(self, key: str, what: str, timeout_s: float, attempt: Callable[[float], Awaitable[T]]) -> T:
        retries = self._runtime.retries(timeout_s, what)
        answer: BrokerError | None = None
        """The error in the latest answer of a broker."""
        while True:
            remaining_s = retries.remaining_s
            try:
                result = await attempt(remaining_s)
            except (NetworkError, InvalidMessage, BrokerError) as error:
                if isinstance(error, BrokerError):
                    if not error.retriable:
                        raise
                    answer = error
                self._obstacles[key] = error
                if not await retries.pause(error, first_pause_s(error)):
                    # An attempt that the deadline cut short says less than the answer before it.
                    if answer and isinstance(error, NetworkError) and remaining_s < FIRST_ATTEMPT_TIMEOUT_S:
                        raise answer from error
                    raise
            else:
                self._obstacles.pop(key, None)
                retries.succeeded()
                return result

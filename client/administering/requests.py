"""How an admin client asks one broker, any broker, or the controller: again, until it has an answer or its time is up.

The loops need not look at the client's state: `close` cancels the calls that are under way (see `cluster/calls.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.coordinators import Coordinators, KeyType
from minibroker.client.cluster.retries import Retries
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import BrokersFailed
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA, Api
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import (
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    as_sentence,
    error_of,
)
from minibroker.protocol.model import NO_CONTROLLER

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)
T = TypeVar("T")

KNOWN_WITHIN_S = 3.0
"""Brokers have this long to learn of a new topic. The call that created it returns without the others."""
_FIRST_LOOK_S = 0.005

AT_A_TIME = 32
"""Groups or transactional ids of one call that are asked about at a time."""

FORWARDER_PATIENCE_S = 5.0
"""Wait this long for a broker that forwards a request to the controller, then ask another: the broker may hang or be
cut off itself. Doubled after each silence, since the controller may be what takes long."""


class BrokerDescription(NamedTuple):
    id: int
    host: str
    port: int
    rack: str | None


class ClusterDescription(NamedTuple):
    cluster_id: str | None
    controller_id: int | None
    """None if there is no controller now."""
    brokers: tuple[BrokerDescription, ...]
    """The live brokers, by ascending id."""
    controller_epoch: int | None
    """The epoch of the newest controller that the broker has heard from; None if it has heard from none."""


class ControllerRequest(Protocol[Request, Response]):
    """A request to the controller for several named things, for instance topics. It is repeated for those that have
    neither succeeded nor failed."""

    @property
    def api(self) -> Api[Request, Response]: ...

    @property
    def final(self) -> Collection[ErrorCode]:
        """Errors of one thing that are not retried here, though they are retriable in general."""

    @property
    def is_prepared(self) -> bool:
        """Whether the ids and versions that the request needs are known. The answer that brings them is a look-up; the
        request proper follows without a pause."""

    @property
    def may_yet(self) -> str:
        """A sentence for the error message: what may still happen although the call failed."""

    def names(self) -> list[str]: ...

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> Request: ...

    def results(self, response: Response) -> dict[str, tuple[int, str]]:
        """Return the error code and message for each name; NONE if any attempt succeeded."""


class AdminRequests:
    """The requests of one admin client. Each call has `timeout_s`."""

    def __init__(self, runtime: ClientRuntime, timeout_s: float) -> None:
        self.runtime = runtime
        self.timeout_s = timeout_s
        self.coordinators = Coordinators(runtime)
        self.transaction_coordinators = Coordinators(runtime, key_type=KeyType.TRANSACTION)
        self._failed_at: dict[str, float] = {}
        """When a broker last could not be reached or failed a request, by `Connection.address`."""

    def retries(self, what: str | None = None) -> Retries:
        return self.runtime.retries(self.timeout_s, what)

    # -- any broker, or a certain one --

    async def metadata(self, topics: list[str] | None) -> m.MetadataResponse:
        """Return the metadata of these topics, or of all (None), from the controller, or from another broker if the
        controller cannot be reached. Ask again if the broker does not know all topics, or all partitions of one,
        yet."""
        retries = self.retries()
        while True:
            response = await self.runtime.metadata.from_controller(
                m.MetadataRequest(topics), timeout_s=retries.remaining_s
            )
            is_partial = not response.brokers or any(
                t.error_code == ErrorCode.LEADER_NOT_AVAILABLE and not t.partitions for t in response.topics
            )
            if not is_partial or not await retries.pause("the broker does not know all topics yet"):
                return response

    async def cluster(self) -> ClusterDescription:
        response = await self.metadata([])
        brokers = (BrokerDescription(b.node_id, b.host, b.port, b.rack) for b in response.brokers)
        controller = None if response.controller_id == NO_CONTROLLER else response.controller_id
        epoch = None if response.controller_epoch < 0 else response.controller_epoch
        return ClusterDescription(response.cluster_id, controller, tuple(sorted(brokers)), epoch)

    async def ask(
        self, address: Address | None, api: Api[Request, Response], body: Request, retries: Retries | None = None
    ) -> Response:
        """Return the answer of the broker at this address, or of any broker (None). The request must be repeatable.
        Raises NetworkError, BrokerError."""
        retries = retries or self.retries()
        while True:
            timeout_s = min(self.runtime.request_timeout_s, retries.remaining_s)
            try:
                if address is None:
                    return await self.runtime.metadata.request_any(api, body, timeout_s=timeout_s)
                connection = await self.runtime.connection_soon(address)
                return await connection.request(api, body, timeout_s=timeout_s)
            except NetworkError as error:
                if not await retries.pause(error):
                    hint = "" if address is None else ": see `minibroker status`"  # `request_any` gives its own hint
                    raise type(error)(f"{error}{hint}") from error

    async def at_all_brokers(
        self, api: Api[Request, Response], body: Request, content: Callable[[Response], T]
    ) -> dict[int, T]:
        """Ask all live brokers until each has answered. Return the content of their answers, by broker. `content`
        raises BrokerError for an error in an answer.

        Raises BrokersFailed with the content of the others, NetworkError if no broker can be reached at all."""

        async def ask(broker: BrokerDescription, timeout_s: float) -> T | MinibrokerError:
            try:
                connection = await self.runtime.connection_soon(Address(broker.host, broker.port))
                return content(await connection.request(api, body, timeout_s=timeout_s))
            except (NetworkError, BrokerError, InvalidMessage) as error:
                return error

        retries = self.retries()
        while True:
            # All brokers each time, since what a broker that failed coordinated has moved to others.
            brokers = (await self.cluster()).brokers
            timeout_s = min(OVERDUE_S * 2.0**retries.failures, self.runtime.request_timeout_s)
            answers = await asyncio.gather(*(ask(each, timeout_s) for each in brokers))
            found: dict[int, T] = {}
            errors: dict[int, MinibrokerError] = {}
            for broker, answer in zip(brokers, answers, strict=True):
                if isinstance(answer, MinibrokerError):
                    errors[broker.id] = answer
                else:
                    found[broker.id] = answer
            if not errors:
                return found
            is_final = any(isinstance(error, BrokerError) and not error.retriable for error in errors.values())
            if is_final or not await retries.pause("not all brokers answered"):
                raise BrokersFailed(errors, found)

    async def is_reachable(self, address: Address) -> bool:
        try:
            await self.runtime.connection_soon(address)
        except NetworkError:
            return False
        return True

    async def until_known(self, topics: Mapping[str, int]) -> None:
        """Wait until every broker that answers knows the topics, each with at least that many partitions, since the
        next client may ask any broker."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN_S), asyncio.TaskGroup() as group:
                for address in self.runtime.metadata.cluster.brokers.values():
                    group.create_task(self._until_known_at(address, topics))

    async def _until_known_at(self, address: Address, topics: Mapping[str, int]) -> None:
        retries = Retries(self.runtime.world, self.runtime.connections.client_id, _FIRST_LOOK_S)
        with suppress(NetworkError, InvalidMessage, BrokerError):
            connection = await self.runtime.connections.open(address, Purpose.REQUESTS)
            while True:
                response = await connection.request(METADATA, m.MetadataRequest(list(topics)), timeout_s=KNOWN_WITHIN_S)
                if all(t.error_code == ErrorCode.NONE and len(t.partitions) >= topics[t.name] for t in response.topics):
                    return
                await retries.pause("the broker does not know the topics yet")

    # -- the controller --

    async def at_controller(self, asked: ControllerRequest[Request, Response]) -> dict[str, MinibrokerError]:
        """Ask the controller until each name has succeeded or failed. Return the errors by name."""
        api = asked.api
        errors: dict[str, MinibrokerError] = {}
        pending = asked.names()
        retries = self.retries(api.name)
        was_sent = False
        last_error: MinibrokerError = NetworkError(
            f"{api.name}: no broker could be reached in time (see `minibroker status`)"
        )
        silences = 0
        while pending:
            connection = None
            was_prepared = asked.is_prepared
            try:
                async with asyncio.timeout(retries.remaining_s):
                    connection = await self.to_controller(api)
                timeout_s = min(self.runtime.request_timeout_s, retries.remaining_s)
                # The broker may take that long, and has one more second to report that it failed.
                patience_s = timeout_s + 1.0
                cluster = self.runtime.metadata.cluster
                controller_id = cluster.controller_id
                if connection.address != _connection_address(cluster.brokers.get(controller_id)):
                    patience_s = min(patience_s, FORWARDER_PATIENCE_S * 2.0**silences)
                body = asked.request(pending, round(timeout_s * 1_000), cluster.controller_epoch)
                was_sent = True
                response = await self.runtime.ask(
                    connection,
                    api,
                    body,
                    timeout_s=patience_s,
                    is_in_charge=partial(self._is_controller, controller_id),
                )
            except TimeoutError:
                pass  # the error of the attempt before says more
            except (NetworkError, InvalidMessage) as error:
                last_error = error
                silences += isinstance(error, RequestTimedOut)
                self._note_failure(connection)
                self._suspect(connection)
            except BrokerError as error:
                last_error = error
                self._note_failure(connection)
                if not error.retriable:
                    raise
            else:
                last_error = BrokerError(ErrorCode.NOT_CONTROLLER, api.name)
                answers = asked.results(response)
                still_pending = []
                for name in pending:
                    code, message = answers.get(name, (ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out"))
                    problem = BrokerError(error_of(code), message or name, is_complete=bool(message))
                    if code == ErrorCode.NONE:
                        continue
                    if problem.retriable and code not in asked.final:
                        still_pending.append(name)
                        last_error = problem
                    else:
                        errors[name] = problem
                pending = still_pending
            if pending and (was_prepared or not asked.is_prepared):
                if not await retries.pause(last_error):
                    reason = or_yet(last_error, asked.may_yet) if was_sent else last_error
                    return errors | dict.fromkeys(pending, reason)
                await self._refresh(retries)
        retries.succeeded()
        return errors

    async def to_controller(self, api: Api[Request, Response]) -> Connection:
        """Return a connection to the controller. If it cannot be reached, or not soon, return one to a broker that can
        forward the request (KIP-590): the one whose last failure is oldest.

        Raises NetworkError, BrokerError(NOT_CONTROLLER)."""
        cluster = self.runtime.metadata.cluster
        if cluster.controller_id == NO_CONTROLLER or not cluster.brokers:
            raise BrokerError(
                ErrorCode.NOT_CONTROLLER, f"{api.name}: no controller can be reached (see `minibroker status`)"
            )

        def order(broker_id: int) -> tuple[bool, float]:
            address = cluster.brokers[broker_id]
            # A broker that hangs fails a look-up of metadata sooner than a request to be forwarded.
            looked_up = self.runtime.metadata.failed_at(address)
            failed_at = max(self._failed_at.get(_connection_address(address), looked_up), looked_up)
            return broker_id != cluster.controller_id, failed_at

        reasons: dict[str, None] = {}
        for broker_id in sorted(cluster.brokers, key=order):
            address = cluster.brokers[broker_id]
            try:
                return await self.runtime.connection_soon(address)
            except NetworkError as error:
                reasons[str(error)] = None
                self.runtime.metadata.suspect(address)
                self._failed_at[_connection_address(address)] = self.runtime.clock.monotonic()
        raise NetworkError("; ".join(reasons))

    def _note_failure(self, connection: Connection | None) -> None:
        if connection is not None:
            self._failed_at[connection.address] = self.runtime.clock.monotonic()

    def _suspect(self, connection: Connection | None) -> None:
        for address in self.runtime.metadata.cluster.brokers.values():
            if connection is not None and connection.address == _connection_address(address):
                self.runtime.metadata.suspect(address)

    def _is_controller(self, broker_id: int) -> bool:
        return self.runtime.metadata.cluster.controller_id in (broker_id, NO_CONTROLLER)

    async def _refresh(self, retries: Retries) -> None:
        """Find out who the controller is now. If that takes too long, the next attempt is the last one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(retries.remaining_s):
                await self.runtime.metadata.refreshed()


async def of_each(
    names: Iterable[str], ask: Callable[[str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, MinibrokerError]]:
    """Return the result of `ask` for each name, and the errors of the others, both in the order of the names."""
    asked = list(dict.fromkeys(names))
    results: dict[str, T] = {}
    errors: dict[str, MinibrokerError] = {}
    free = asyncio.Semaphore(AT_A_TIME)

    async def one(name: str) -> None:
        async with free:
            try:
                results[name] = await ask(name)
            except (NetworkError, BrokerError, InvalidMessage) as error:
                errors[name] = error

    async with asyncio.TaskGroup() as tasks:
        for name in asked:
            tasks.create_task(one(name))
    return (
        {name: results[name] for name in asked if name in results},
        {name: errors[name] for name in asked if name in errors},
    )


def _connection_address(address: Address | None) -> str:
    """Return the address as `Connection.address` has it."""
    return "" if address is None else f"{address.host}:{address.port}"


def or_yet(error: MinibrokerError, may_yet: str) -> MinibrokerError:
    """Return the error of the last attempt, with the warning that some attempt may still be carried out."""
    if isinstance(error, BrokerError):
        said = [as_sentence(error.detail)] if error.detail else []
        return BrokerError(error.code, " ".join([*said, may_yet]), is_complete=True)
    return NetworkError(f"{error}. {may_yet}")

"""One look at a whole cluster: all brokers are asked everything at the same time, within one deadline.

The problem: a broker that hangs costs each question its timeout. Asked one after the other, the questions about it and
about others took up to 12 s, while an operator waits to hear which broker hangs.

The choice: each broker has one connection and one deadline. What follows from all answers (replicas out of sync,
records that are not committed) is asked as soon as the others have answered, and not after the deadline of the one that
hangs. Its answer still counts if it comes in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from minibroker.deploy.observing.access import ANYBODY, Access, Address
from minibroker.deploy.observing.cluster_view import (
    ASK_TIMEOUT_S,
    ClusterView,
    ask_min_insync_replicas,
    ask_movements,
    offline_log_dirs,
    view_of,
)
from minibroker.deploy.observing.commits import with_stalls
from minibroker.deploy.observing.rights import with_missing_rights
from minibroker.protocol.apis import DESCRIBE_HEALTH, DESCRIBE_LOG_DIRS, METADATA
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import MinibrokerError, NetworkError
from minibroker.protocol.messages import (
    DescribeHealthRequest,
    DescribeHealthResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    MetadataRequest,
    MetadataResponse,
)

EARLY_S = 0.5
"""Brokers that have not answered by then are no longer waited for before questions that need most answers."""
QUESTION_S = 1.0
"""For each question about the cluster to a broker that has just answered."""
REST_S = 0.5
"""For the further answers of a broker whose first one came at the last moment."""


class Findings(NamedTuple):
    view: ClusterView
    offline_log_dirs: dict[int, dict[str, str]]
    """By broker, the directories and the reasons. Brokers that did not answer are left out."""


class _Broker:
    """The answers of the broker at one address."""

    def __init__(self) -> None:
        self.metadata: MetadataResponse | None = None
        self.failure: MinibrokerError | None = None
        """Why there is no `metadata`. None: it has been asked until now."""
        self.answer_s = 0.0
        """Without opening the connection: clients keep theirs."""
        self.health: DescribeHealthResponse | None = None
        self.log_dirs: DescribeLogDirsResponse | None = None


async def examine(
    addresses: Sequence[Address],
    without: Collection[Address] = (),
    access: Access = ANYBODY,
    *,
    asks_controller: bool = False,
    asks_stalls: bool = False,
    asks_rights: bool = False,
) -> Findings:
    """Look at the cluster through the brokers at these addresses and further ones that they name, except `without`.

    `asks_controller`: add `movements`; the controller writes to ZooKeeper before it answers, to be sure of its office,
    so do not ask it many times a second. `asks_stalls`: add `stalls`, which takes 2 s if there are any. `asks_rights`:
    add `missing_rights` and `hidden_topics`. Takes 3.5 s at most.
    """
    brokers: dict[Address, _Broker] = {}
    asking: dict[Address, asyncio.Task[None]] = {}
    has_news = asyncio.Event()

    def begin(more: Collection[Address]) -> None:
        for address in more:
            brokers[address] = _Broker()
            asking[address] = asyncio.create_task(_ask(address, access, brokers[address], has_news))

    async def answers_of_most() -> None:
        while True:
            has_news.clear()
            known = _view(brokers, access)
            begin(sorted({*known.brokers.values()} - brokers.keys() - {*without}))
            left = [one for one, found in brokers.items() if found.metadata is None and not asking[one].done()]
            is_late = asyncio.get_running_loop().time() >= early_s
            if not left or (is_late and not known.is_unknown):
                return
            await has_news.wait()

    early_s = asyncio.get_running_loop().time() + EARLY_S
    timer = asyncio.get_running_loop().call_at(early_s, has_news.set)
    begin(addresses)
    try:
        await answers_of_most()
        detailed = await _with_details(
            _view(brokers, access), asks_controller=asks_controller, asks_stalls=asks_stalls, asks_rights=asks_rights
        )
        if asking:
            await asyncio.wait(asking.values())
    finally:
        timer.cancel()
        for task in asking.values():
            task.cancel()
        await asyncio.gather(*asking.values(), return_exceptions=True)
    view = _view(brokers, access)
    told = {one.health.broker_id: (address, one.health) for address, one in brokers.items() if one.health is not None}
    view = view._replace(
        min_insync_replicas=detailed.min_insync_replicas,
        movements=detailed.movements,
        stalls=detailed.stalls,
        doubted_stalls=detailed.doubted_stalls,
        missing_rights=detailed.missing_rights,
        hidden_topics=detailed.hidden_topics,
        failures={address: one.failure for address, one in brokers.items() if one.failure is not None},
        health={broker: health for broker, (_, health) in told.items()},
        unregistered={broker: address for broker, (address, _) in told.items() if broker not in view.brokers},
    )
    answered = {view.id_at(address): one.log_dirs for address, one in brokers.items() if one.log_dirs is not None}
    return Findings(view, {broker: offline_log_dirs(found) for broker, found in answered.items() if broker is not None})


def _view(brokers: Mapping[Address, _Broker], access: Access) -> ClusterView:
    return view_of({a: (one.metadata, one.answer_s) for a, one in brokers.items() if one.metadata is not None}, access)


async def _ask(address: Address, access: Access, found: _Broker, has_news: asyncio.Event) -> None:
    clock = asyncio.get_running_loop().time
    where, no_answer = f"{address[0]}:{address[1]}", f"no answer within {ASK_TIMEOUT_S:g} s"
    is_open = False
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S) as limit:
            connection = await access.open(address, ASK_TIMEOUT_S)
            is_open = True
            try:
                asked_s = clock()
                metadata = await connection.request(METADATA, MetadataRequest(None), timeout_s=ASK_TIMEOUT_S)
                found.metadata, found.answer_s = metadata, clock() - asked_s
                has_news.set()
                limit.reschedule(max(limit.when() or 0.0, clock() + REST_S))
                await asyncio.gather(_ask_health(connection, found), _ask_log_dirs(connection, found))
            finally:
                connection.close()
                await connection.wait_closed()
    except TimeoutError:
        text = (
            f"{where} accepts connections, but gives {no_answer}" if is_open else f"connecting to {where}: {no_answer}"
        )
        found.failure = RequestTimedOut(text) if is_open else NetworkError(text)
    except MinibrokerError as error:
        found.failure = error
    finally:
        if found.metadata is not None:
            found.failure = None  # only a part of its answers is missing
        has_news.set()


async def _ask_health(connection: Connection, found: _Broker) -> None:
    with suppress(MinibrokerError):  # it refuses to tell, or is of an earlier version
        found.health = await connection.request(DESCRIBE_HEALTH, DescribeHealthRequest(), timeout_s=ASK_TIMEOUT_S)


async def _ask_log_dirs(connection: Connection, found: _Broker) -> None:
    request = DescribeLogDirsRequest([])
    with suppress(MinibrokerError):  # it refuses to tell
        found.log_dirs = await connection.request(DESCRIBE_LOG_DIRS, request, timeout_s=ASK_TIMEOUT_S)


async def _with_details(
    view: ClusterView, *, asks_controller: bool, asks_stalls: bool, asks_rights: bool
) -> ClusterView:
    async def rights() -> ClusterView:
        return await with_missing_rights(view, QUESTION_S) if asks_rights else view

    async def replicas() -> ClusterView:
        if not view.under_replicated_partitions():
            return await with_stalls(view) if asks_stalls else view
        known = view._replace(min_insync_replicas=await ask_min_insync_replicas(view, QUESTION_S))
        movements, found = await asyncio.gather(
            ask_movements(known, QUESTION_S) if asks_controller else _nothing(),
            with_stalls(known) if asks_stalls else _same(known),
        )
        return found._replace(movements=movements or ())

    of_rights, of_replicas = await asyncio.gather(rights(), replicas())
    return of_replicas._replace(missing_rights=of_rights.missing_rights, hidden_topics=of_rights.hidden_topics)


async def _nothing() -> None:
    return None


async def _same(view: ClusterView) -> ClusterView:
    return view

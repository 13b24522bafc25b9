"""The parts of the broker that handlers use. The composition root fills them in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.handlers.administration import Administration
from minibroker.broker.handlers.authorization import Authorizer
from minibroker.broker.handlers.auto_topic_creation import AutoTopicCreation
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.scheduling.purgatory import DelayedOperation, Purgatory
from minibroker.broker.scheduling.slices import SlicedCalls
from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import ZooKeeperSession

logger = logging.getLogger("minibroker.handlers")


class ControlEpoch(msgspec.Struct):
    """The controller epoch that this broker accepts orders from, and the last accepted order."""

    highest: int = -1
    """The highest controller epoch of an order so far; lower ones are rejected."""
    last_order: tuple[int, int, int] = (-1, -1, 0)
    """Controller epoch, broker epoch, number."""


class Services(msgspec.Struct):
    metadata: MetadataCache
    replicas: ReplicaManager
    producer_ids: ProducerIds
    administration: Administration
    forwarding: ForwardingManager
    groups: GroupCoordination
    auto_topic_creation: AutoTopicCreation
    transcoder: Transcoder
    topic_purgatory: Purgatory[DelayedOperation]
    metadata_answers: SlicedCalls
    """Answers that have waited for an election."""
    control_epoch: ControlEpoch
    authorizer: Authorizer
    configs: DynamicConfigManager
    sessions: Callable[[], Awaitable[ZooKeeperSession]]
    """Waits until there is a ZooKeeper session."""
    registered_epoch: Callable[[int], Awaitable[int]]
    """Returns this broker's epoch once it is at least the given one. Raises BrokerError(BROKER_ID_NOT_REGISTERED) if
    that takes too long."""
    background: Callable[[Coroutine[Any, Any, None], str], object]
    """Starts a task that the broker owns; the second argument is its name."""


def check_named_once(what: str, names: Sequence[object]) -> None:
    """Raise BrokerError(INVALID_REQUEST) if two names are equal: otherwise, small requests could have large answers."""
    if len(set(names)) != len(names):
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{what} is named twice in the request")


def answer_later(
    services: Services, request: Request, timeout_ms: int | None, answer: Callable[[], Awaitable[None]]
) -> None:
    """Answer the request in a task of its own, or with REQUEST_TIMED_OUT if it waits longer than `timeout_ms`.

    Use it for answers that wait for ZooKeeper or take long. There are few request handlers: if these waited themselves,
    a ZooKeeper outage would also stop produce and fetch requests, which do not need it.
    """
    services.background(_answer(request, timeout_ms, answer), f"answer to {request!r}")


async def _answer(request: Request, timeout_ms: int | None, answer: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1_000):
            await answer()
    except TimeoutError:
        request.fail(
            ErrorCode.REQUEST_TIMED_OUT, f"not done within {(timeout_ms or 0) / 1_000:.3g} s; ZooKeeper may be away"
        )
    except BrokerError as error:
        request.fail(error.code, error.detail)
    except Exception as error:
        logger.exception("%r failed in its handler", request)
        request.fail(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__} in the handler")

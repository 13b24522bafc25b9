"""The parts of the broker that handlers use. The composition root fills them in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.handlers.administration import Administration
from minibroker.broker.handlers.authorization import Authorizer
from minibroker.broker.handlers.auto_topic_creation import AutoTopicCreation
from minibroker.broker.handlers.sasl import SaslServer
from minibroker.broker.metrics.disk_times import SlowCalls
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.network.request_channel import Request, Session
from minibroker.broker.quotas.mutations import ControllerMutationQuotaManager
from minibroker.broker.quotas.throttling import ClientQuotaManager
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.scheduling.budget import FairBudget
from minibroker.broker.scheduling.purgatory import DelayedOperation, Purgatory
from minibroker.broker.scheduling.slices import SlicedCalls, Slices, finish_at_once, giving_way
from minibroker.broker.security.authorizer import AclAuthorizer
from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.broker.transactions.coordination import TransactionCoordination
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.broker.transactions.verification import TransactionVerifier
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Message
from minibroker.protocol.model import ZooKeeperContact
from minibroker.protocol.world import ZooKeeperSession

logger = logging.getLogger("minibroker.handlers")


Steps = Generator[object, None, Message]
"""They return an answer."""


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
    transactions: TransactionCoordination
    verifier: TransactionVerifier
    auto_topic_creation: AutoTopicCreation
    transcoder: Transcoder
    in_turn: Callable[[Callable[[], None]], None]
    """Calls a function that answers a consumer with records: now, or when clients have read enough earlier answers."""
    large_answers: Callable[[], LargeRequests]
    waiting_fetches: FairBudget[Session]
    """Of consumers; in bytes."""
    topic_purgatory: Purgatory[DelayedOperation]
    metadata_answers: SlicedCalls
    """Answers that have waited for an election."""
    control_epoch: ControlEpoch
    authorizer: Authorizer
    sasl: SaslServer
    configs: DynamicConfigManager
    client_quotas: ClientQuotaManager
    mutation_quotas: ControllerMutationQuotaManager
    sessions: Callable[[], Awaitable[ZooKeeperSession]]
    """Waits until there is a ZooKeeper session."""
    registered_epoch: Callable[[int], Awaitable[int]]
    """Returns this broker's epoch once it is at least the given one. Raises BrokerError(BROKER_ID_NOT_REGISTERED) if
    that takes too long."""
    zookeeper_contact: Callable[[], ZooKeeperContact]
    slow_disks: Callable[[], Iterable[SlowCalls]]
    background: Callable[[Coroutine[Any, Any, None], str], object]
    """Starts a task that the broker owns; the second argument is its name."""
    acls: AclAuthorizer | None = None
    """None: there are no ACLs, and everybody may do everything."""


MOST_WAIT_MS = 300_000
"""The longest wait for the end of an administrative request, whatever its timeout: ten times that of Kafka's clients.
The work itself goes on."""


def check_named_once(what: str, names: Sequence[object]) -> None:
    """Raise BrokerError(INVALID_REQUEST) if two names are equal: otherwise, small requests could have large answers."""
    if len(set(names)) != len(names):
        raise named_twice(what)


def named_twice(what: str) -> BrokerError:
    return BrokerError(ErrorCode.INVALID_REQUEST, f"{what} is named twice in the request")


MOST_NAMED = 10_000
"""Topics and partitions that an administrative request may name, even if the cluster has fewer."""


def check_count(services: Services, named: int) -> None:
    """Raise BrokerError(INVALID_REQUEST) if a request names far more topics and partitions than exist. An honest one
    does not, and some of the work for them is done in one piece."""
    if named > MOST_NAMED and named > (most := 2 * services.metadata.partitions_in_all()):
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"the request names {named} topics and partitions: the limit is {max(most, MOST_NAMED)}, which grows with "
            f"the cluster; use several requests",
        )


MOST_MESSAGES = 1_000


class HasMessage(Protocol):
    error_message: str


def bound_messages(results: Iterable[HasMessage]) -> None:
    """Remove the messages of all but the first results with one: a name that a small request has once may be in the
    messages of thousands of partitions. Each keeps its error code."""
    for result in islice((each for each in results if each.error_message), MOST_MESSAGES, None):
        result.error_message = ""


SMALL_ANSWER_BYTES = 64 * 1024


def respond_sized(services: Services, request: Request, size: int, answer: Message | Steps) -> None:
    """Answer with this body, of about `size` bytes, or with the one that these steps return. Use it where a small
    request may have a large answer: such answers take turns (`LargeRequests`)."""

    async def build() -> Message:
        with giving_way():
            return answer if isinstance(answer, Message) else await Slices().finish(answer)

    if size > SMALL_ANSWER_BYTES:
        large = services.large_answers()
        answer_later(services, request, None, lambda: large.answer(request, build))
    else:
        request.respond(answer if isinstance(answer, Message) else finish_at_once(answer))


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
        async with asyncio.timeout(None if timeout_ms is None else min(timeout_ms, MOST_WAIT_MS) / 1_000):
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

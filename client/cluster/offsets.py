"""Offsets from the leaders: ListOffsets requests, until each partition has an answer. `ask_leaders`, which finds the
leaders and asks again, also serves other requests to leaders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.metadata import UNKNOWN_FOR_S, Cluster, Leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import no_such_partition
from minibroker.client.stalls import Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.apis import LIST_OFFSETS, Api
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import (
    ERRORS,
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import READ_UNCOMMITTED

Answer = TypeVar("Answer")
Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)

CONSUMER = -1


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp_ms: int
    """The timestamp of the record; -1 for EARLIEST_TIMESTAMP and LATEST_TIMESTAMP."""
    leader_epoch: int | None = None
    """The leader epoch of the record before `offset`, for `Consumer.seek`; None if it is unknown."""


class Found(NamedTuple):
    result: OffsetAndTimestamp | None
    """None: there is no such record."""
    leader_epoch: int
    """The epoch of the leader that answered."""


class Known(NamedTuple):
    """Facts about a partition. A leader of an older epoch, or of another topic of that name, is not asked: the look-up
    waits until metadata names the right one."""

    topic_id: str
    leader_epoch: int = NO_EPOCH


async def list_offsets(
    runtime: ClientRuntime,
    timestamps: Mapping[TopicPartition, int],
    timeout_s: float,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """Return the first offset at or after each time (or for EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, MAX_TIMESTAMP); None
    if there is none. For READ_COMMITTED, records from the last stable offset on do not count.

    Raises as `find_offsets`, and UNKNOWN_TOPIC_OR_PARTITION as soon as it is certain that there is no such partition.
    """
    found: dict[TopicPartition, Found] = {}
    with runtime.metadata.wanted(partition.topic for partition in timestamps):
        await find_offsets(
            runtime, timestamps, timeout_s, found, isolation_level=isolation_level, waits_for_unknown=False
        )
    return {partition: answer.result for partition, answer in found.items()}


async def find_offsets(
    runtime: ClientRuntime,
    timestamps: Mapping[TopicPartition, int],
    timeout_s: float,
    found: dict[TopicPartition, Found],
    known: Mapping[TopicPartition, Known] | None = None,
    *,
    isolation_level: int = READ_UNCOMMITTED,
    waits_for_unknown: bool = True,
) -> None:
    """As `list_offsets`, but put the offsets into `found`, which keeps them even if this raises. The topics must be
    wanted.

    Retries until `timeout_s` has passed; then raises the last error: BrokerError, or NetworkError. Errors that are not
    retriable are raised at once.
    """
    await ask_leaders(
        runtime,
        timestamps,
        timeout_s,
        found,
        {},
        partial(ask_leader, isolation_level=isolation_level),
        "finding offsets",
        known,
        waits_for_unknown=waits_for_unknown,
    )


async def ask_leaders(
    runtime: ClientRuntime,
    questions: Mapping[TopicPartition, int],
    timeout_s: float,
    found: dict[TopicPartition, Answer],
    errors: dict[TopicPartition, MinibrokerError],
    ask: Callable[
        [ClientRuntime, Leader, Mapping[TopicPartition, int], float],
        Awaitable[dict[TopicPartition, Answer | MinibrokerError]],
    ],
    doing: str,
    known: Mapping[TopicPartition, Known] | None = None,
    *,
    each_by_itself: bool = False,
    waits_for_unknown: bool = True,
) -> None:
    """`ask` the leader of each partition until it answers, and put the answers into `found`. The topics must be wanted.

    Raises as `find_offsets`; `errors` then has the last error of each partition without answer. With `each_by_itself`,
    an error that is not retriable ends only its partition, and is not raised. Without `waits_for_unknown`, a partition
    that no broker knows for UNKNOWN_FOR_S is such an error.
    """
    unknown_until = runtime.clock.monotonic() + (timeout_s if waits_for_unknown else UNKNOWN_FOR_S)
    deadline = runtime.clock.monotonic() + timeout_s
    pending = dict(questions)
    known = known or {}
    asked: dict[TopicPartition, Leader] = {}
    """The leader whose answer is awaited."""
    leaderless: set[TopicPartition] = set()
    """Partitions in `errors` that had no leader to ask."""
    under_way: dict[asyncio.Future[dict[TopicPartition, Answer | MinibrokerError]], Leader] = {}
    stalls: Stalls[TopicPartition] = Stalls(runtime.connections.client_id)
    try:
        while pending:
            error: MinibrokerError | None = None
            is_outdated = False
            by_leader: dict[Leader, dict[TopicPartition, int]] = {}
            for partition, question in pending.items():
                leader = runtime.metadata.cluster.leader(*partition)
                code = _problem(runtime.metadata.cluster, partition, known.get(partition))
                if leader is not None and code is None:
                    if asked.get(partition) != leader:
                        if partition in leaderless:
                            leaderless.remove(partition)
                            errors.pop(partition, None)
                        by_leader.setdefault(leader, {})[partition] = question
                        asked[partition] = leader
                elif partition not in asked:
                    code = code or ErrorCode.LEADER_NOT_AVAILABLE
                    topic = runtime.metadata.cluster.topics.get(partition.topic)
                    has_others = topic is not None and partition.partition not in topic.partitions
                    if topic is not None and has_others and code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                        error = no_such_partition(partition, len(topic.partitions), f"{doing}: ")
                    else:
                        error = BrokerError(code, f"{doing} of {partition}")
                    errors[partition] = error
                    leaderless.add(partition)
                    is_outdated = is_outdated or code is ErrorCode.UNKNOWN_TOPIC_ID or leader is not None
            for leader, part in by_leader.items():
                remaining_s = max(0.0, deadline - runtime.clock.monotonic())
                under_way[asyncio.ensure_future(ask(runtime, leader, part, remaining_s))] = leader
            # The leaders are asked at the same time, and each answer counts. If some have not answered, look again from
            # time to time: metadata may name another leader by now.
            if under_way:
                patience_s = OVERDUE_S if error is None else 0.0
                await asyncio.wait(under_way, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            is_over = runtime.clock.monotonic() >= deadline
            for task in [task for task in under_way if task.done()]:
                leader = under_way.pop(task)
                for partition, result in task.result().items():
                    if asked.get(partition) != leader:
                        continue  # another has been asked in the meantime
                    del asked[partition]
                    if not isinstance(result, MinibrokerError):
                        found[partition] = result
                        del pending[partition]
                        errors.pop(partition, None)
                        continue
                    if each_by_itself and _is_final(result):
                        errors[partition] = result
                        del pending[partition]
                        stalls.give_up([partition])
                        continue
                    if is_over and isinstance(result, RequestTimedOut):  # the error before says more
                        result = errors.get(partition, result)
                    errors[partition] = result
                    if error is None or _is_final(result):
                        error = result
            if error is None:
                continue
            if _is_final(error) or is_over:
                raise error
            unknown = {
                partition: "" for partition, each in errors.items() if partition in pending and _is_unknown(each)
            }
            if unknown and runtime.clock.monotonic() >= unknown_until:
                missing = await runtime.metadata.missing(unknown)
                if missing and not each_by_itself:
                    raise errors[missing[0]]
                for partition in missing:
                    del pending[partition]
                    asked.pop(partition, None)
                stalls.give_up(missing)
                if missing:
                    continue
            waiting = [partition for partition in errors if partition in pending]
            stalls.look(runtime.clock.monotonic(), waiting, lambda partition: str(errors[partition]))
            if is_outdated:  # the broker that gave us metadata may be cut off, and a refresh would ask it again
                await runtime.metadata.ask_everyone({partition.topic for partition in pending})
            try:
                async with asyncio.timeout(runtime.retry_backoff_s):
                    await runtime.metadata.refreshed()
            except TimeoutError:
                continue  # no broker has sent metadata yet; the leaders may answer by now
            if isinstance(error, BrokerError) and not ERRORS[error.code].refresh_metadata:
                await asyncio.sleep(runtime.retry_backoff_s)
    finally:
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
    stalls.look(runtime.clock.monotonic(), (), str)


def _is_unknown(error: MinibrokerError) -> bool:
    return isinstance(error, BrokerError) and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _is_final(error: MinibrokerError) -> bool:
    return isinstance(error, BrokerError) and not error.retriable


def _problem(cluster: Cluster, partition: TopicPartition, known: Known | None) -> ErrorCode | None:
    """Return why no broker can be asked about the partition; None if its leader can."""
    topic = cluster.topics.get(partition.topic)
    info = None if topic is None else topic.partitions.get(partition.partition)
    if topic is None or info is None:
        absent = ErrorCode.LEADER_NOT_AVAILABLE if topic is None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return cluster.errors.get(partition.topic, absent)
    if known is not None and known.topic_id and topic.topic_id != known.topic_id:
        return ErrorCode.UNKNOWN_TOPIC_ID
    if known is not None and info.leader.epoch < known.leader_epoch:
        return ErrorCode.LEADER_NOT_AVAILABLE
    if cluster.leader(*partition) is None:
        return cluster.errors.get(partition.topic, ErrorCode.LEADER_NOT_AVAILABLE)
    return None


async def ask_leader(
    runtime: ClientRuntime,
    leader: Leader,
    timestamps: Mapping[TopicPartition, int],
    timeout_s: float,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, Found | MinibrokerError]:
    """Return the leader's answer for each partition, or an error after `timeout_s` at the latest; see
    `request_leader`."""
    topics: dict[str, list[m.ListOffsetsPartition]] = {}
    for partition, timestamp in timestamps.items():
        asked = m.ListOffsetsPartition(partition.partition, leader.epoch, timestamp)
        topics.setdefault(partition.topic, []).append(asked)
    request = m.ListOffsetsRequest(
        CONSUMER,
        isolation_level,
        [
            m.ListOffsetsTopic(name, partitions, runtime.metadata.cluster.topics[name].topic_id)
            for name, partitions in topics.items()
        ],
    )
    try:
        response = await request_leader(runtime, leader, LIST_OFFSETS, request, timestamps, timeout_s)
    except MinibrokerError as error:
        return dict.fromkeys(timestamps, error)
    answered = {
        TopicPartition(topic.name, answer.partition_index): answer
        for topic in response.topics
        for answer in topic.partitions
    }
    results: dict[TopicPartition, Found | MinibrokerError] = {}
    for partition in timestamps:
        answer = answered.get(partition)
        if answer is None:
            results[partition] = not_mentioned(LIST_OFFSETS, leader, partition)
        elif answer.error_code != ErrorCode.NONE:
            results[partition] = BrokerError(error_of(answer.error_code), f"finding offsets of {partition}")
        else:
            previous_epoch = None if answer.previous_epoch == NO_EPOCH else answer.previous_epoch
            at = OffsetAndTimestamp(answer.offset, answer.timestamp, previous_epoch)
            results[partition] = Found(None if answer.offset < 0 else at, leader.epoch)
    return results


async def request_leader(
    runtime: ClientRuntime,
    leader: Leader,
    api: Api[Request, Response],
    request: Request,
    partitions: Collection[TopicPartition],
    timeout_s: float,
) -> Response:
    """Return the leader's answer. Raises NetworkError after `timeout_s`, after OVERDUE_S without a connection, and if
    metadata shows that the leader has lost all of the partitions; BrokerError if the whole request was rejected;
    InvalidMessage."""
    address = runtime.metadata.address(leader.node_id)
    if address is None:
        raise NetworkError(f"the address of broker {leader.node_id} is not known")
    what = f"connecting to {address}"
    patience_s = min(timeout_s, OVERDUE_S)
    try:
        async with asyncio.timeout(timeout_s):
            async with asyncio.timeout(patience_s):  # the attempt goes on in the background
                connection = await runtime.connections.open(address, Purpose.REQUESTS)
            what, patience_s = f"{api.name} to {address}", timeout_s
            return await runtime.ask(
                connection,
                api,
                request,
                timeout_s=max(timeout_s, runtime.request_timeout_s),
                is_in_charge=lambda: any(
                    runtime.metadata.cluster.leader(*partition) == leader for partition in partitions
                ),
            )
    except TimeoutError:
        runtime.metadata.suspect(address)
        raise RequestTimedOut(f"{what}: no answer within {patience_s:.3g} s") from None
    except NetworkError:
        runtime.metadata.suspect(address)
        raise


def not_mentioned(api: Api[Request, Response], leader: Leader, partition: TopicPartition) -> InvalidMessage:
    return InvalidMessage(f"the answer of broker {leader.node_id} to {api.name} does not mention {partition}")

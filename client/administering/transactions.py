"""Transactions, listed, described and ended by an administrator (KIP-664).

ListTransactions goes to every broker, DescribeTransactions and InitProducerId to the coordinator of the transactional
id, DescribeProducers and WriteTxnMarkers to the leaders of partitions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from minibroker.client.administering.requests import AdminRequests, of_each, or_yet
from minibroker.client.administering.topics import existing
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.cluster.metadata import Leader
from minibroker.client.cluster.offsets import Known, ask_leaders, not_mentioned, request_leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import check_choice, check_integer, check_partition, check_partitions, check_text
from minibroker.client.shown import shown
from minibroker.protocol import messages as m
from minibroker.protocol.apis import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    INIT_PRODUCER_ID,
    LIST_TRANSACTIONS,
    WRITE_TXN_MARKERS,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import TopicPartition

T = TypeVar("T")

ONGOING = "Ongoing"
ENDING_STATES = ("PrepareCommit", "PrepareAbort")
TRANSACTION_STATES = ("Empty", ONGOING, *ENDING_STATES, "CompleteCommit", "CompleteAbort")
"""Kafka's names. In "Prepare..." the outcome is decided and being written to the partitions."""

FENCING_TIMEOUT_MS = 1
"""The time-out of a fenced transactional id whose own time-out is no longer allowed. Its next producer chooses one."""


class TransactionListing(NamedTuple):
    transactional_id: str
    producer_id: int
    state: str
    """One of TRANSACTION_STATES."""


class TransactionDescription(NamedTuple):
    transactional_id: str
    state: str
    """One of TRANSACTION_STATES."""
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    """Milliseconds after which the coordinator aborts a transaction."""
    started_ms: int | None
    """Begin of the transaction, in ms since 1970; None if none is open or ending."""
    partitions: tuple[TopicPartition, ...]
    """The partitions of the open or ending transaction, sorted."""
    coordinator: Coordinator


class ProducerState(NamedTuple):
    """A producer that has written to a partition, as the partition's leader knows it."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    """Of its last batch; -1 if it is unknown, for instance after a transaction marker."""
    last_timestamp_ms: int
    """Time of its last batch or marker, in ms since 1970."""
    coordinator_epoch: int | None
    """The epoch of the coordinator that wrote the last transaction marker; None if there is no marker."""
    current_txn_start_offset: int | None
    """The first offset of the open transaction; None if none is open."""


class TransactionalIdErrors(PartialFailure[str, TransactionDescription]):
    """Some transactional ids of a request failed; the others succeeded. `errors` and `results` are by transactional
    id."""


class ProducerErrors(PartialFailure[TopicPartition, tuple[ProducerState, ...]]):
    """The producers of some partitions could not be described. `errors` and `results` are by partition."""

    def __init__(
        self,
        errors: Mapping[TopicPartition, MinibrokerError],
        results: Mapping[TopicPartition, tuple[ProducerState, ...]] = MappingProxyType({}),
    ) -> None:
        super().__init__(dict(sorted(errors.items())), results)


# -- transactional ids ------------------------------------------------------------------------------------------------


def _checked_ids(transactional_ids: Iterable[str]) -> list[str]:
    if isinstance(transactional_ids, str):
        raise InvalidSetting("transactional_ids", transactional_ids, f"give a list: [{shown(transactional_ids)}]")
    for each in (ids := list(dict.fromkeys(transactional_ids))):
        if not check_text("transactional_ids", each):
            raise InvalidSetting("transactional_ids", each, "a transactional id is not empty")
    return ids


async def list_transactions(
    requests: AdminRequests, states: Iterable[str] | None, producer_ids: Iterable[int] | None, duration_ms: int | None
) -> list[TransactionListing]:
    """See `Admin.list_transactions`."""
    if isinstance(states, str):
        raise InvalidSetting("states", states, f"give a list: [{shown(states)}]")
    request = t.ListTransactionsRequest(
        [check_choice("states", state, TRANSACTION_STATES) for state in states or ()],
        [check_integer("producer_ids", each, 0, 2**63 - 1) for each in producer_ids or ()],
        -1 if duration_ms is None else check_integer("duration_ms", duration_ms, 0, 2**63 - 1),
    )

    def listed(response: t.ListTransactionsResponse) -> list[TransactionListing]:
        if response.error_code != ErrorCode.NONE:
            raise BrokerError(error_of(response.error_code), LIST_TRANSACTIONS.name)
        return [
            TransactionListing(each.transactional_id, each.producer_id, each.transaction_state)
            for each in response.transaction_states
        ]

    found = await requests.at_all_brokers(LIST_TRANSACTIONS, request, listed)
    return sorted({each.transactional_id: each for part in found.values() for each in part}.values())


async def describe_transactions(
    requests: AdminRequests, transactional_ids: Iterable[str]
) -> dict[str, TransactionDescription]:
    """See `Admin.describe_transactions`."""
    ids = _checked_ids(transactional_ids)
    results, errors = await of_each(ids, lambda transactional_id: _describe(requests, transactional_id))
    if errors:
        raise TransactionalIdErrors(errors, results)
    return results


async def _describe(requests: AdminRequests, transactional_id: str) -> TransactionDescription:
    """Raises BrokerError (TRANSACTIONAL_ID_NOT_FOUND), NetworkError."""
    answered = await requests.transaction_coordinators.request(
        transactional_id,
        DESCRIBE_TRANSACTIONS,
        t.DescribeTransactionsRequest([transactional_id]),
        code_of=lambda response: _of_id(transactional_id, response).error_code,
        timeout_s=requests.timeout_s,
    )
    found = _of_id(transactional_id, answered.response)
    if found.error_code != ErrorCode.NONE:
        raise BrokerError(error_of(found.error_code), f"transactional id {transactional_id}")
    return TransactionDescription(
        transactional_id,
        found.transaction_state,
        found.producer_id,
        found.producer_epoch,
        found.transaction_timeout_ms,
        None if found.transaction_start_time_ms < 0 else found.transaction_start_time_ms,
        tuple(sorted(TopicPartition(topic.name, index) for topic in found.topics for index in topic.partitions)),
        answered.coordinator,
    )


def _of_id(transactional_id: str, response: t.DescribeTransactionsResponse) -> t.DescribedTransaction:
    for each in response.transaction_states:
        if each.transactional_id == transactional_id:
            return each
    raise InvalidMessage(f"the answer does not mention transactional id {transactional_id}")


async def fence_producers(requests: AdminRequests, transactional_ids: Iterable[str]) -> None:
    """See `Admin.fence_producers`."""
    ids = _checked_ids(transactional_ids)
    _, errors = await of_each(ids, lambda transactional_id: _fence(requests, transactional_id))
    if errors:
        raise TransactionalIdErrors(errors)


async def _fence(requests: AdminRequests, transactional_id: str) -> None:
    found = await _describe(requests, transactional_id)  # InitProducerId would create an unknown id
    code = await _take_id(requests, transactional_id, found.timeout_ms)
    if code is ErrorCode.INVALID_TRANSACTION_TIMEOUT:  # the brokers' transaction.max.timeout.ms was lowered since
        code = await _take_id(requests, transactional_id, FENCING_TIMEOUT_MS)
    if code is not ErrorCode.NONE:
        raise BrokerError(code, f"transactional id {transactional_id}")


async def _take_id(requests: AdminRequests, transactional_id: str, timeout_ms: int) -> ErrorCode:
    """Raises BrokerError, NetworkError, InvalidMessage if there is no answer in time."""
    may_yet = "Its producer may yet be fenced; to ask for it again does no harm"
    try:
        answered = await requests.transaction_coordinators.request(
            transactional_id,
            INIT_PRODUCER_ID,
            m.InitProducerIdRequest(transactional_id, timeout_ms),
            code_of=lambda response: response.error_code,
            timeout_s=requests.timeout_s,
        )
    except (NetworkError, BrokerError, InvalidMessage) as error:
        raise or_yet(error, may_yet) from error
    return error_of(answered.response.error_code)


# -- partitions -------------------------------------------------------------------------------------------------------


async def describe_producers(
    requests: AdminRequests, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, tuple[ProducerState, ...]]:
    """See `Admin.describe_producers`."""
    asked = check_partitions("partitions", partitions)

    def request(part: Iterable[TopicPartition]) -> m.DescribeProducersRequest:
        topics: dict[str, list[int]] = {}
        for topic, index in part:
            topics.setdefault(topic, []).append(index)
        return m.DescribeProducersRequest([m.DescribeProducersTopic(name, indexes) for name, indexes in topics.items()])

    async def ask(
        runtime: ClientRuntime, leader: Leader, part: Mapping[TopicPartition, int], timeout_s: float
    ) -> dict[TopicPartition, tuple[ProducerState, ...] | MinibrokerError]:
        try:
            response = await request_leader(runtime, leader, DESCRIBE_PRODUCERS, request(part), part, timeout_s)
        except MinibrokerError as error:
            return dict.fromkeys(part, error)
        answers = {
            TopicPartition(topic.name, each.partition_index): each
            for topic in response.topics
            for each in topic.partitions
        }
        results: dict[TopicPartition, tuple[ProducerState, ...] | MinibrokerError] = {}
        for partition in part:
            answer = answers.get(partition)
            if answer is None:
                results[partition] = not_mentioned(DESCRIBE_PRODUCERS, leader, partition)
            elif answer.error_code != ErrorCode.NONE:
                results[partition] = BrokerError(error_of(answer.error_code), f"the producers of {partition}")
            else:
                results[partition] = tuple(sorted(map(_producer, answer.active_producers)))
        return results

    found: dict[TopicPartition, tuple[ProducerState, ...]] = {}
    errors = await _at_leaders(requests, asked, found, ask, "describing producers")
    if errors:
        raise ProducerErrors(errors, found)
    return {partition: found[partition] for partition in asked}


def _producer(active: m.ActiveProducer) -> ProducerState:
    return ProducerState(
        active.producer_id,
        active.producer_epoch,
        active.last_sequence,
        active.last_timestamp,
        None if active.coordinator_epoch < 0 else active.coordinator_epoch,
        None if active.current_txn_start_offset < 0 else active.current_txn_start_offset,
    )


async def abort_transaction(
    requests: AdminRequests,
    partition: TopicPartition,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    start_offset: int,
) -> None:
    """See `Admin.abort_transaction`."""
    topic, index = partition = check_partition("partition", partition)
    marker = t.TransactionMarker(
        check_integer("producer_id", producer_id, 0, 2**63 - 1),
        check_integer("producer_epoch", producer_epoch, 0, 2**15 - 1),
        False,
        check_integer("coordinator_epoch", coordinator_epoch, 0, 2**31 - 1),
        [t.TransactionTopic(topic, [index])],
        start_offset=check_integer("start_offset", start_offset, 0, 2**63 - 1),
    )

    async def ask(
        runtime: ClientRuntime, leader: Leader, part: Mapping[TopicPartition, int], timeout_s: float
    ) -> dict[TopicPartition, bool | MinibrokerError]:
        request = t.WriteTxnMarkersRequest([marker])
        try:
            response = await request_leader(runtime, leader, WRITE_TXN_MARKERS, request, part, timeout_s)
        except MinibrokerError as error:
            return dict.fromkeys(part, error)
        codes = [
            result.error_code
            for written in response.markers
            for each in written.topics
            for result in each.results_by_partition
        ]
        if len(codes) != 1:
            return {partition: not_mentioned(WRITE_TXN_MARKERS, leader, partition)}
        if codes[0] != ErrorCode.NONE:
            what = f"the transaction of producer {producer_id} in {partition}"
            return {partition: BrokerError(error_of(codes[0]), what)}
        return {partition: True}

    errors = await _at_leaders(requests, [partition], {}, ask, "aborting a transaction")
    for error in errors.values():
        raise error


Ask = Callable[
    [ClientRuntime, Leader, Mapping[TopicPartition, int], float], Awaitable[dict[TopicPartition, T | MinibrokerError]]
]


async def _at_leaders(
    requests: AdminRequests, partitions: list[TopicPartition], found: dict[TopicPartition, T], ask: Ask[T], doing: str
) -> dict[TopicPartition, MinibrokerError]:
    """Ask the leader of each partition until it answers, put the answers into `found`, and return the errors of the
    other partitions. A topic of the same name that is created during the call is not asked about."""
    if not partitions:
        return {}
    ids, errors = await existing(requests, partitions)
    asked = [partition for partition in partitions if partition not in errors]
    known = {partition: Known(ids[partition.topic]) for partition in asked}
    last_errors: dict[TopicPartition, MinibrokerError] = {}
    try:
        with requests.runtime.metadata.wanted({partition.topic for partition in asked}):
            await ask_leaders(
                requests.runtime,
                dict.fromkeys(asked, 0),
                requests.timeout_s,
                found,
                last_errors,
                ask,
                doing,
                known,
                each_by_itself=True,
            )
    except (BrokerError, NetworkError, InvalidMessage) as error:  # time is up
        last_errors |= {each: error for each in asked if each not in found and each not in last_errors}
    return errors | {each: error for each, error in last_errors.items() if each not in found}

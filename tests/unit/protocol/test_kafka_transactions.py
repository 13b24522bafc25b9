"""Transactions in Kafka's protocol: what depends on the version of a request."""

from __future__ import annotations

from typing import Any

import pytest

from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import data, transactions
from minibroker.protocol.kafka.primitives import MessageReader
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import transactions as t
from tests.kafka_messages import THEIRS


def sent(api: KafkaApi, version: int, **values: Any) -> Any:
    """Return what the broker makes of a request that kafka-python encodes."""
    message = THEIRS[api.key, "request"](version=version, **values)
    return api.read_request(MessageReader(bytes(message.encode(version=version))), version)


def received(api: KafkaApi, version: int, body: Any) -> Any:
    """Return what kafka-python makes of the broker's response."""
    out = bytearray()
    api.write_response(out, body, version)
    return THEIRS[api.key, "response"].decode(bytes(out), version=version)


@pytest.mark.parametrize("version", range(6))
def test_the_end_of_a_transaction_raises_the_epoch_from_version_5_on(version: int) -> None:
    ends = {"transactional_id": "etl", "producer_id": 5, "producer_epoch": 3, "committed": True}
    expected = t.EndTxnRequest("etl", 5, 3, True, raises_epoch=version >= 5)
    assert sent(transactions.END_TXN, version, **ends) == expected
    answer = received(transactions.END_TXN, version, t.EndTxnResponse(0, 0, 5, 4))
    assert (answer.producer_id, answer.producer_epoch) == ((5, 4) if version >= 5 else (-1, -1))


@pytest.mark.parametrize("version", range(3, 13))
def test_a_produced_batch_adds_its_partition_from_version_12_on(version: int) -> None:
    request = sent(data.PRODUCE, version, transactional_id="etl", acks=-1, timeout_ms=100, topic_data=[])
    assert request == m.ProduceRequest("etl", -1, 100, [], adds_partitions=version >= 12)


@pytest.mark.parametrize("version", range(6))
def test_committed_offsets_add_their_partition_from_version_5_on(version: int) -> None:
    offsets = {"transactional_id": "etl", "group_id": "billing", "producer_id": 5, "producer_epoch": 3, "topics": []}
    member = {"generation_id": 7, "member_id": "m", "group_instance_id": "i"} if version >= 3 else {}
    expected = t.TxnOffsetCommitRequest("etl", "billing", 5, 3, [], adds_partition=version >= 5)
    if member:
        expected.generation_id, expected.member_id, expected.group_instance_id = 7, "m", "i"
    assert sent(transactions.TXN_OFFSET_COMMIT, version, **offsets, **member) == expected


@pytest.mark.parametrize("version", range(6))
def test_partitions_of_one_transaction_or_of_several_join_it(version: int) -> None:
    api = transactions.ADD_PARTITIONS_TO_TXN
    ours = t.AddPartitionsToTxnRequest(
        [t.TransactionToExtend("etl", 5, 3, [t.TransactionTopic("orders", [0, 2])], verify_only=version >= 4)]
    )
    wire: Any
    if version >= 4:
        wire = transactions._AddPartitionsToTxnRequest(ours.transactions, "", -1, -1, [])
    else:
        wire = transactions._AddPartitionsToTxnRequest([], "etl", 5, 3, ours.transactions[0].topics)
    out = bytearray()
    api.request.compiled(version, api.is_flexible(version)).encode(out, wire)
    theirs = THEIRS[api.key, "request"].decode(bytes(out), version=version)
    theirs._header = None
    assert api.read_request(MessageReader(bytes(theirs.encode(version=version))), version) == ours

    results = [t.TransactionTopicResult("orders", [t.TransactionPartitionResult(2, ErrorCode.CONCURRENT_TRANSACTIONS)])]
    answer = received(api, version, t.AddPartitionsToTxnResponse(0, 0, [t.ExtendedTransaction("etl", results)]))
    topics = answer.results_by_topic_v3_and_below if version < 4 else answer.results_by_transaction[0].topic_results
    [partition] = topics[0].results_by_partition
    assert (partition.partition_index, partition.partition_error_code) == (2, ErrorCode.CONCURRENT_TRANSACTIONS)


FENCED, ABORTABLE = ErrorCode.PRODUCER_FENCED, ErrorCode.TRANSACTION_ABORTABLE
OLD_FENCED, OLD_ABORTABLE = ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE


def code_of(api: KafkaApi, version: int, code: ErrorCode) -> int:
    """Return the error code that a client reads if the broker answers with `code`."""
    topics = [t.TransactionTopicResult("orders", [t.TransactionPartitionResult(0, code)])]
    offsets = [t.TxnOffsetCommitTopicResponse("orders", [t.TxnOffsetCommitPartitionResponse(0, code)])]
    bodies: dict[KafkaApi, m.Message] = {
        transactions.ADD_PARTITIONS_TO_TXN: t.AddPartitionsToTxnResponse(0, 0, [t.ExtendedTransaction("etl", topics)]),
        transactions.ADD_OFFSETS_TO_TXN: t.AddOffsetsToTxnResponse(0, code),
        transactions.END_TXN: t.EndTxnResponse(0, code),
        transactions.TXN_OFFSET_COMMIT: t.TxnOffsetCommitResponse(0, offsets),
        data.INIT_PRODUCER_ID: m.InitProducerIdResponse(0, code),
    }
    answer = received(api, version, bodies[api])
    if api is transactions.TXN_OFFSET_COMMIT:
        return int(answer.topics[0].partitions[0].error_code)
    if api is transactions.ADD_PARTITIONS_TO_TXN:
        of_topics = (
            answer.results_by_topic_v3_and_below if version < 4 else answer.results_by_transaction[0].topic_results
        )
        return int(of_topics[0].results_by_partition[0].partition_error_code)
    return int(answer.error_code)


@pytest.mark.parametrize(
    ("api", "fenced_since", "abortable_since"),
    [
        (transactions.ADD_PARTITIONS_TO_TXN, 2, 5),
        (transactions.ADD_OFFSETS_TO_TXN, 2, 4),
        (transactions.END_TXN, 2, 4),
        (transactions.TXN_OFFSET_COMMIT, 3, 4),
        (data.INIT_PRODUCER_ID, 4, None),
    ],
)
def test_a_version_carries_only_the_errors_that_it_has(
    api: KafkaApi, fenced_since: int, abortable_since: int | None
) -> None:
    for version in range(api.max_version + 1):
        assert code_of(api, version, FENCED) == (FENCED if version >= fenced_since else OLD_FENCED)
        assert code_of(api, version, ErrorCode.NOT_COORDINATOR) == ErrorCode.NOT_COORDINATOR
        if abortable_since is not None:
            assert code_of(api, version, ABORTABLE) == (ABORTABLE if version >= abortable_since else OLD_ABORTABLE)


@pytest.mark.parametrize("version", range(6))
def test_a_refused_request_reports_its_error_for_every_partition(version: int) -> None:
    api = transactions.ADD_PARTITIONS_TO_TXN
    topics = [t.TransactionTopic("orders", [0, 2])]
    request = t.AddPartitionsToTxnRequest([t.TransactionToExtend("etl", 5, 3, topics)])
    answer = received(api, version, api.failed(request, ErrorCode.NOT_COORDINATOR, "why"))
    assert answer.error_code == (ErrorCode.NOT_COORDINATOR if version >= 4 else ErrorCode.NONE)
    results = answer.results_by_topic_v3_and_below if version < 4 else answer.results_by_transaction[0].topic_results
    codes = [(each.partition_index, each.partition_error_code) for each in results[0].results_by_partition]
    assert codes == [(0, ErrorCode.NOT_COORDINATOR), (2, ErrorCode.NOT_COORDINATOR)]


def test_a_fetch_response_lists_the_aborted_transactions() -> None:
    aborted = [m.AbortedTransaction(5, 10), m.AbortedTransaction(6, 12)]
    partition = m.FetchPartitionResponse(0, 0, 20, 15, 0, aborted_transactions=aborted)
    for version in range(data.FETCH.min_version, data.FETCH.max_version + 1):
        answer = received(data.FETCH, version, m.FetchResponse(0, 0, [m.FetchTopicResponse("orders", [partition])]))
        told = answer.responses[0].partitions[0]
        assert [(each.producer_id, each.first_offset) for each in told.aborted_transactions] == [(5, 10), (6, 12)]
        assert told.last_stable_offset == 15


def test_an_end_of_a_transaction_has_kafkas_bytes() -> None:
    """By the primitive types of Kafka's protocol guide: a compact string, int64, int16, bool, and no tagged fields."""
    frame = b"\x04etl" + (5).to_bytes(8, "big") + (3).to_bytes(2, "big") + b"\x01" + b"\x00"
    request = transactions.END_TXN.read_request(MessageReader(frame), 5)
    assert request == t.EndTxnRequest("etl", 5, 3, True)
    out = bytearray()
    transactions.END_TXN.write_response(out, t.EndTxnResponse(0, 0, 5, 4), 5)
    assert bytes(out) == bytes(4) + bytes(2) + (5).to_bytes(8, "big") + (4).to_bytes(2, "big") + b"\x00"

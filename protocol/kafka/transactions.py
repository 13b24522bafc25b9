"""Kafka's schemas of transactions.

Clients that follow KIP-890's second part send EndTxn from version 5, Produce from 12 and TxnOffsetCommit from 5 on.
Older clients send the partitions of a transaction beforehand, and keep their epoch at its end. An error code that a
version lacks is replaced by the nearest one that it has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, structs
from minibroker.protocol.kafka.types import BOOL, INT16, INT32, INT64, STRING, Array
from minibroker.protocol.messages import transactions as t

_FENCED_SINCE = 2
"""The version of AddPartitionsToTxn, AddOffsetsToTxn and EndTxn that introduced PRODUCER_FENCED (KIP-588)."""


def _known_error(code: int, version: int, abortable_since: int, fenced_since: int = _FENCED_SINCE) -> int:
    """Return the error code, or the nearest one that the version has."""
    if code == ErrorCode.PRODUCER_FENCED and version < fenced_since:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if code == ErrorCode.TRANSACTION_ABORTABLE and version < abortable_since:
        return ErrorCode.INVALID_TXN_STATE
    return code


def _results(topics: list[t.TransactionTopic], code: int) -> list[t.TransactionTopicResult]:
    return [
        t.TransactionTopicResult(topic.name, [t.TransactionPartitionResult(index, code) for index in topic.partitions])
        for topic in topics
    ]


# --- AddPartitionsToTxn (24) ---------------------------------------------------------------------------------


class _AddPartitionsToTxnRequest(m.Message):
    """One transaction up to version 3, several from 4 on (KIP-890)."""

    transactions: Annotated[list[t.TransactionToExtend], Meta(max_length=t.MAX_TRANSACTIONS)]
    v3_and_below_transactional_id: t.TransactionalId
    v3_and_below_producer_id: m.Int64
    v3_and_below_producer_epoch: m.Int16
    v3_and_below_topics: Annotated[list[t.TransactionTopic], Meta(max_length=m.MAX_TOPICS)]


class _AddPartitionsToTxnResponse(m.Message):
    throttle_time_ms: m.Int32
    error_code: m.Int16
    results_by_transaction: list[t.ExtendedTransaction]
    results_by_topic_v3_and_below: list[t.TransactionTopicResult]


def _add_partitions_request(wire: _AddPartitionsToTxnRequest, version: int) -> t.AddPartitionsToTxnRequest:
    if version >= 4:
        return t.AddPartitionsToTxnRequest(wire.transactions)
    only = t.TransactionToExtend(
        wire.v3_and_below_transactional_id,
        wire.v3_and_below_producer_id,
        wire.v3_and_below_producer_epoch,
        wire.v3_and_below_topics,
    )
    return t.AddPartitionsToTxnRequest([only])


def _add_partitions_response(ours: t.AddPartitionsToTxnResponse, version: int) -> _AddPartitionsToTxnResponse:
    transactions = ours.results_by_transaction
    if version < 5:
        transactions = [_with_known_errors(transaction, version) for transaction in transactions]
    first = transactions[0].topic_results if transactions else []
    return _AddPartitionsToTxnResponse(ours.throttle_time_ms, ours.error_code, transactions, first)


def _with_known_errors(transaction: t.ExtendedTransaction, version: int) -> t.ExtendedTransaction:
    topics = [
        t.TransactionTopicResult(
            topic.name,
            [
                t.TransactionPartitionResult(
                    part.partition_index, _known_error(part.error_code, version, abortable_since=5)
                )
                for part in topic.results_by_partition
            ],
        )
        for topic in transaction.topic_results
    ]
    return t.ExtendedTransaction(transaction.transactional_id, topics)


_TOPIC = Schema(t.TransactionTopic, Field("name", STRING), Field("partitions", Array(INT32)))
_TOPIC_RESULT = Schema(
    t.TransactionTopicResult,
    Field("name", STRING),
    Field(
        "results_by_partition",
        structs(
            t.TransactionPartitionResult,
            Field("partition_index", INT32),
            Field("error_code", INT16, kafka_name="partition_error_code"),
        ),
    ),
)

ADD_PARTITIONS_TO_TXN = KafkaApi(
    apis.ADD_PARTITIONS_TO_TXN,
    0,
    5,
    first_flexible=3,
    request=Schema(
        _AddPartitionsToTxnRequest,
        Field(
            "transactions",
            structs(
                t.TransactionToExtend,
                Field("transactional_id", STRING),
                Field("producer_id", INT64),
                Field("producer_epoch", INT16),
                Field("verify_only", BOOL),
                Field("topics", Array(_TOPIC)),
            ),
            "4+",
            default=[],
        ),
        Field("v3_and_below_transactional_id", STRING, "0-3", default=""),
        Field("v3_and_below_producer_id", INT64, "0-3", default=t.NO_PRODUCER_ID),
        Field("v3_and_below_producer_epoch", INT16, "0-3", default=t.NO_PRODUCER_EPOCH),
        Field("v3_and_below_topics", Array(_TOPIC), "0-3", default=[]),
    ),
    response=Schema(
        _AddPartitionsToTxnResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "4+", default=0),
        Field(
            "results_by_transaction",
            structs(
                t.ExtendedTransaction, Field("transactional_id", STRING), Field("topic_results", Array(_TOPIC_RESULT))
            ),
            "4+",
            default=[],
        ),
        Field("results_by_topic_v3_and_below", Array(_TOPIC_RESULT), "0-3", default=[]),
    ),
    to_ours=_add_partitions_request,
    from_ours=_add_partitions_response,
    failed=lambda request, code, message: t.AddPartitionsToTxnResponse(
        0,
        code,
        [t.ExtendedTransaction(each.transactional_id, _results(each.topics, code)) for each in request.transactions],
    ),
)

# --- AddOffsetsToTxn (25) ------------------------------------------------------------------------------------


def _add_offsets_response(ours: t.AddOffsetsToTxnResponse, version: int) -> t.AddOffsetsToTxnResponse:
    return msgspec.structs.replace(ours, error_code=_known_error(ours.error_code, version, abortable_since=4))


ADD_OFFSETS_TO_TXN = KafkaApi(
    apis.ADD_OFFSETS_TO_TXN,
    0,
    4,
    first_flexible=3,
    request=Schema(
        t.AddOffsetsToTxnRequest,
        Field("transactional_id", STRING),
        Field("producer_id", INT64),
        Field("producer_epoch", INT16),
        Field("group_id", STRING),
    ),
    response=Schema(t.AddOffsetsToTxnResponse, Field("throttle_time_ms", INT32), Field("error_code", INT16)),
    from_ours=_add_offsets_response,
    failed=lambda request, code, message: t.AddOffsetsToTxnResponse(0, code),
)

# --- EndTxn (26) ---------------------------------------------------------------------------------------------


def _end_txn_request(ours: t.EndTxnRequest, version: int) -> t.EndTxnRequest:
    ours.raises_epoch = version >= 5
    return ours


def _end_txn_response(ours: t.EndTxnResponse, version: int) -> t.EndTxnResponse:
    return msgspec.structs.replace(ours, error_code=_known_error(ours.error_code, version, abortable_since=4))


END_TXN = KafkaApi(
    apis.END_TXN,
    0,
    5,
    first_flexible=3,
    request=Schema(
        t.EndTxnRequest,
        Field("transactional_id", STRING),
        Field("producer_id", INT64),
        Field("producer_epoch", INT16),
        Field("committed", BOOL),
    ),
    response=Schema(
        t.EndTxnResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("producer_id", INT64, "5+"),
        Field("producer_epoch", INT16, "5+"),
    ),
    to_ours=_end_txn_request,
    from_ours=_end_txn_response,
    failed=lambda request, code, message: t.EndTxnResponse(0, code),
)

# --- WriteTxnMarkers (27) ------------------------------------------------------------------------------------

WRITE_TXN_MARKERS = KafkaApi(
    apis.WRITE_TXN_MARKERS,
    1,
    1,
    first_flexible=1,
    request=Schema(
        t.WriteTxnMarkersRequest,
        Field(
            "markers",
            structs(
                t.TransactionMarker,
                Field("producer_id", INT64),
                Field("producer_epoch", INT16),
                Field("committed", BOOL, kafka_name="transaction_result"),
                Field(
                    "topics",
                    structs(
                        t.TransactionTopic,
                        Field("name", STRING),
                        Field("partitions", Array(INT32), kafka_name="partition_indexes"),
                    ),
                ),
                Field("coordinator_epoch", INT32),
            ),
        ),
    ),
    response=Schema(
        t.WriteTxnMarkersResponse,
        Field(
            "markers",
            structs(
                t.WrittenTransactionMarker,
                Field("producer_id", INT64),
                Field(
                    "topics",
                    structs(
                        t.TransactionTopicResult,
                        Field("name", STRING),
                        Field(
                            "results_by_partition",
                            structs(
                                t.TransactionPartitionResult,
                                Field("partition_index", INT32),
                                Field("error_code", INT16),
                            ),
                            kafka_name="partitions",
                        ),
                    ),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: t.WriteTxnMarkersResponse(
        [t.WrittenTransactionMarker(marker.producer_id, _results(marker.topics, code)) for marker in request.markers]
    ),
)

# --- TxnOffsetCommit (28) ------------------------------------------------------------------------------------


def _txn_offset_commit_request(ours: t.TxnOffsetCommitRequest, version: int) -> t.TxnOffsetCommitRequest:
    ours.adds_partition = version >= 5
    return ours


_MEMBERS_CHECKED_SINCE = 3
"""The version of TxnOffsetCommit that introduced errors of a member (KIP-447), and PRODUCER_FENCED."""


def _txn_offset_commit_response(ours: t.TxnOffsetCommitResponse, version: int) -> t.TxnOffsetCommitResponse:
    if version >= 4:
        return ours
    topics = [
        t.TxnOffsetCommitTopicResponse(
            topic.name,
            [
                t.TxnOffsetCommitPartitionResponse(
                    part.partition_index,
                    _known_error(part.error_code, version, abortable_since=4, fenced_since=_MEMBERS_CHECKED_SINCE),
                )
                for part in topic.partitions
            ],
        )
        for topic in ours.topics
    ]
    return t.TxnOffsetCommitResponse(ours.throttle_time_ms, topics)


def _txn_offset_commit_failed(
    request: t.TxnOffsetCommitRequest, code: ErrorCode, message: str
) -> t.TxnOffsetCommitResponse:
    return t.TxnOffsetCommitResponse(
        0,
        [
            t.TxnOffsetCommitTopicResponse(
                topic.name,
                [t.TxnOffsetCommitPartitionResponse(part.partition_index, code) for part in topic.partitions],
            )
            for topic in request.topics
        ],
    )


TXN_OFFSET_COMMIT = KafkaApi(
    apis.TXN_OFFSET_COMMIT,
    0,
    5,
    first_flexible=3,
    request=Schema(
        t.TxnOffsetCommitRequest,
        Field("transactional_id", STRING),
        Field("group_id", STRING),
        Field("producer_id", INT64),
        Field("producer_epoch", INT16),
        Field("generation_id", INT32, "3+"),
        Field("member_id", STRING, "3+"),
        Field("group_instance_id", STRING, "3+", nullable="3+"),
        Field(
            "topics",
            structs(
                t.TxnOffsetCommitTopic,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        t.TxnOffsetCommitPartition,
                        Field("partition_index", INT32),
                        Field("committed_offset", INT64),
                        Field("committed_leader_epoch", INT32, "2+"),
                        Field("committed_metadata", STRING, nullable="0+"),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        t.TxnOffsetCommitResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            structs(
                t.TxnOffsetCommitTopicResponse,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        t.TxnOffsetCommitPartitionResponse,
                        Field("partition_index", INT32),
                        Field("error_code", INT16),
                    ),
                ),
            ),
        ),
    ),
    to_ours=_txn_offset_commit_request,
    from_ours=_txn_offset_commit_response,
    failed=_txn_offset_commit_failed,
)

# --- DescribeTransactions (65), ListTransactions (66) --------------------------------------------------------

DESCRIBE_TRANSACTIONS = KafkaApi(
    apis.DESCRIBE_TRANSACTIONS,
    0,
    0,
    first_flexible=0,
    request=Schema(t.DescribeTransactionsRequest, Field("transactional_ids", Array(STRING))),
    response=Schema(
        t.DescribeTransactionsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "transaction_states",
            structs(
                t.DescribedTransaction,
                Field("error_code", INT16),
                Field("transactional_id", STRING),
                Field("transaction_state", STRING),
                Field("transaction_timeout_ms", INT32),
                Field("transaction_start_time_ms", INT64),
                Field("producer_id", INT64),
                Field("producer_epoch", INT16),
                Field(
                    "topics",
                    structs(
                        t.TransactionTopic,
                        Field("name", STRING, kafka_name="topic"),
                        Field("partitions", Array(INT32)),
                    ),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: t.DescribeTransactionsResponse(
        0, [t.DescribedTransaction(code, each) for each in request.transactional_ids]
    ),
)

LIST_TRANSACTIONS = KafkaApi(
    apis.LIST_TRANSACTIONS,
    0,
    1,
    first_flexible=0,
    request=Schema(
        t.ListTransactionsRequest,
        Field("state_filters", Array(STRING)),
        Field("producer_id_filters", Array(INT64)),
        Field("duration_filter_ms", INT64, "1+", kafka_name="duration_filter"),
    ),
    response=Schema(
        t.ListTransactionsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("unknown_state_filters", Array(STRING)),
        Field(
            "transaction_states",
            structs(
                t.ListedTransaction,
                Field("transactional_id", STRING),
                Field("producer_id", INT64),
                Field("transaction_state", STRING),
            ),
        ),
    ),
    failed=lambda request, code, message: t.ListTransactionsResponse(0, code, [], []),
)

APIS = (
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    WRITE_TXN_MARKERS,
    TXN_OFFSET_COMMIT,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
)

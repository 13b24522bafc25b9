"""Requests of transactions: between producers, their coordinator, the leaders of partitions, and administrators.

A transactional id belongs to one coordinator, the leader of its partition of `__transaction_state`. In our protocol
each end of a transaction raises the producer's epoch, and partitions join a transaction by being written to: the leader
reports them to the coordinator (KIP-890). Kafka's clients of older versions name them first (AddPartitionsToTxn).
"""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_PARTITIONS,
    MAX_TOPICS,
    Attempt,
    Int16,
    Int32,
    Int64,
    Message,
    String,
    TopicId,
    TopicName,
)
from minibroker.protocol.messages.groups import GroupId, MemberId

MAX_TRANSACTIONS = 100_000
"""Transactions in one request or answer."""
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_DECISION = -1
ANY_START = -1

TransactionalId = String


class TransactionTopic(Message):
    name: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


# --- AddPartitionsToTxn (24) ---------------------------------------------------------------------------------


class TransactionToExtend(Message):
    transactional_id: TransactionalId
    producer_id: Int64
    producer_epoch: Int16
    topics: Annotated[list[TransactionTopic], Meta(max_length=MAX_TOPICS)]
    verify_only: bool = False
    """Only say whether the partitions belong to the ongoing transaction; add none."""


class AddPartitionsToTxnRequest(Message):
    """From producers, with one transaction, and from leaders of partitions."""

    transactions: Annotated[list[TransactionToExtend], Meta(max_length=MAX_TRANSACTIONS)]


class TransactionPartitionResult(Message):
    partition_index: Int32
    error_code: Int16


class TransactionTopicResult(Message):
    name: TopicName
    results_by_partition: Annotated[list[TransactionPartitionResult], Meta(max_length=MAX_PARTITIONS)]


class ExtendedTransaction(Message):
    transactional_id: TransactionalId
    topic_results: Annotated[list[TransactionTopicResult], Meta(max_length=MAX_TOPICS)]


class AddPartitionsToTxnResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    results_by_transaction: Annotated[list[ExtendedTransaction], Meta(max_length=MAX_TRANSACTIONS)]


# --- AddOffsetsToTxn (25) ------------------------------------------------------------------------------------


class AddOffsetsToTxnRequest(Message):
    """Adds the group's partition of `__consumer_offsets` to the transaction. Older Kafka clients send it."""

    transactional_id: TransactionalId
    producer_id: Int64
    producer_epoch: Int16
    group_id: GroupId


class AddOffsetsToTxnResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16


# --- EndTxn (26) ---------------------------------------------------------------------------------------------


class EndTxnRequest(Message):
    transactional_id: TransactionalId
    producer_id: Int64
    producer_epoch: Int16
    committed: bool
    """False: abort."""
    raises_epoch: bool = True
    """The producer takes over the id and epoch of the answer (KIP-890, from version 5 in Kafka's protocol)."""


class EndTxnResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64 = NO_PRODUCER_ID
    """The id and epoch of the next transaction, where the request has `raises_epoch`."""
    producer_epoch: Int16 = NO_PRODUCER_EPOCH


# --- WriteTxnMarkers (27) ------------------------------------------------------------------------------------


class TransactionMarker(Message):
    producer_id: Int64
    producer_epoch: Int16
    committed: bool
    coordinator_epoch: Int32
    topics: Annotated[list[TransactionTopic], Meta(max_length=MAX_TOPICS)]
    raises_epoch: bool = False
    """`producer_epoch` is above the epoch of the transaction that ends. A late marker then never ends the next
    transaction (KIP-1228)."""
    decision: Int64 = NO_DECISION
    """Grows with each transaction that the coordinator decides in this `coordinator_epoch`. It tells a late marker from
    that of the next transaction of a client that keeps its epoch."""
    start_offset: Int64 = ANY_START
    """From administrators: the first offset of the transaction in the partition. If another one is open, or none, the
    marker is not written, so a late request never ends the producer's next transaction."""


class WriteTxnMarkersRequest(Message):
    markers: Annotated[list[TransactionMarker], Meta(max_length=MAX_TRANSACTIONS)]


class WrittenTransactionMarker(Message):
    producer_id: Int64
    topics: Annotated[list[TransactionTopicResult], Meta(max_length=MAX_TOPICS)]


class WriteTxnMarkersResponse(Message):
    markers: Annotated[list[WrittenTransactionMarker], Meta(max_length=MAX_TRANSACTIONS)]


# --- TxnOffsetCommit (28) ------------------------------------------------------------------------------------


class TxnOffsetCommitPartition(Message):
    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Int32 = -1
    committed_metadata: String | None = None


class TxnOffsetCommitTopic(Message):
    name: TopicName
    partitions: Annotated[list[TxnOffsetCommitPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""


class TxnOffsetCommitRequest(Message):
    """Offsets that become committed with the transaction. `generation_id` and the member are checked unless they are
    left out (KIP-447)."""

    transactional_id: TransactionalId
    group_id: GroupId
    producer_id: Int64
    producer_epoch: Int16
    topics: Annotated[list[TxnOffsetCommitTopic], Meta(max_length=MAX_TOPICS)]
    generation_id: Int32 = -1
    member_id: MemberId = ""
    group_instance_id: String | None = None
    adds_partition: bool = True
    """The group's partition of `__consumer_offsets` joins the transaction by this request, without AddOffsetsToTxn
    (KIP-890, from version 5 in Kafka's protocol)."""
    attempt: Attempt | None = None
    """As in OffsetCommit: a late attempt does not replace the offsets of a later one in the same transaction."""


class TxnOffsetCommitPartitionResponse(Message):
    partition_index: Int32
    error_code: Int16


class TxnOffsetCommitTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[TxnOffsetCommitPartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class TxnOffsetCommitResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[TxnOffsetCommitTopicResponse], Meta(max_length=MAX_TOPICS)]


# --- DescribeTransactions (65) and ListTransactions (66), KIP-664 ----------------------------------------------


class DescribeTransactionsRequest(Message):
    transactional_ids: Annotated[list[TransactionalId], Meta(max_length=MAX_TRANSACTIONS)]


class DescribedTransaction(Message):
    error_code: Int16
    transactional_id: TransactionalId
    transaction_state: String = ""
    transaction_timeout_ms: Int32 = 0
    transaction_start_time_ms: Int64 = -1
    """-1: no transaction is ongoing."""
    producer_id: Int64 = NO_PRODUCER_ID
    producer_epoch: Int16 = NO_PRODUCER_EPOCH
    topics: Annotated[list[TransactionTopic], Meta(max_length=MAX_TOPICS)] = []


class DescribeTransactionsResponse(Message):
    throttle_time_ms: Int32
    transaction_states: Annotated[list[DescribedTransaction], Meta(max_length=MAX_TRANSACTIONS)]


class ListTransactionsRequest(Message):
    state_filters: Annotated[list[String], Meta(max_length=1_000)] = []
    producer_id_filters: Annotated[list[Int64], Meta(max_length=MAX_TRANSACTIONS)] = []
    duration_filter_ms: Int64 = -1
    """Only transactions that are open for longer (KIP-994); -1: all."""


class ListedTransaction(Message):
    transactional_id: TransactionalId
    producer_id: Int64
    transaction_state: String


class ListTransactionsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    unknown_state_filters: Annotated[list[String], Meta(max_length=1_000)]
    transaction_states: Annotated[list[ListedTransaction], Meta(max_length=MAX_TRANSACTIONS)]

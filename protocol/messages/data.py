"""Requests of the data path: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, InitProducerId."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_BROKERS,
    MAX_PARTITIONS,
    MAX_RECORD_ERRORS,
    MAX_TOPICS,
    Attempt,
    FetchSlot,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    String,
    TopicId,
    TopicName,
)
from minibroker.protocol.messages.metadata import MetadataBroker

# --- Produce (0) ---------------------------------------------------------------------------------------------


MAX_PRODUCE_PARTITIONS = 20_000
"""Partitions of one request. A megabyte, the default of producers, has room for 15,000 batches of one record."""


class ProducePartition(Message):
    index: Int32
    records: memoryview


class ProduceTopic(Message):
    name: TopicName
    partition_data: Annotated[list[ProducePartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id of the topic. Another topic of the same name appends nothing (INCONSISTENT_TOPIC_ID; KIP-516)."""


class ProduceRequest(Message):
    """`acks`: 0, 1, or -1 for all. With acks 0 no response is sent."""

    transactional_id: String | None
    acks: Int16
    timeout_ms: Int32
    topic_data: Annotated[list[ProduceTopic], Meta(max_length=MAX_TOPICS)]
    adds_partitions: bool = True
    """A transactional batch adds its partition to the transaction (KIP-890; in Kafka's protocol from version 12 on).
    False: the client has sent AddPartitionsToTxn before."""


class ProduceRecordError(Message):
    """Why one record, and with it its batch, is rejected (KIP-467)."""

    batch_index: Int32
    """The index of the record in its batch, from 0."""
    batch_index_error_message: String | None = None


class ProducePartitionResponse(Message):
    index: Int32
    error_code: Int16
    base_offset: Int64 = -1
    log_append_time_ms: Int64 = -1
    log_start_offset: Int64 = -1
    error_message: String = ""
    current_leader_id: Int32 = -1
    """With NOT_LEADER_OR_FOLLOWER, the current leader according to this broker (KIP-951)."""
    current_leader_epoch: Int32 = -1
    record_errors: Annotated[list[ProduceRecordError], Meta(max_length=MAX_RECORD_ERRORS)] = []


class ProduceTopicResponse(Message):
    name: TopicName
    partition_responses: Annotated[list[ProducePartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class ProduceResponse(Message):
    responses: Annotated[list[ProduceTopicResponse], Meta(max_length=MAX_TOPICS)]
    throttle_time_ms: Int32 = 0
    node_endpoints: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)] = []
    """The addresses of the leaders that the partitions name (KIP-951)."""


# --- Fetch (1) -----------------------------------------------------------------------------------------------

MAX_ABORTED_TRANSACTIONS = 1_000_000
"""Aborted transactions that overlap the records of one partition in a response."""


class FetchPartition(Message):
    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    last_fetched_epoch: Int32
    """The epoch of the record before `fetch_offset`, in the follower's log or as read by the consumer; -1: not checked
    (KIP-595)."""
    log_start_offset: Int64
    partition_max_bytes: Int32
    suspect: bool = False
    """The last response for this offset arrived corrupt: the leader checks its disk."""


class FetchTopic(Message):
    """`topic` empty: the id alone identifies the topic."""

    topic: TopicName
    topic_id: TopicId
    partitions: Annotated[list[FetchPartition], Meta(max_length=MAX_PARTITIONS)]


class FetchRequest(Message):
    """`replica_id` is -1 for consumers; `replica_epoch` is the follower's broker epoch (KIP-903)."""

    replica_id: Int32
    max_wait_ms: Int32
    min_bytes: Int32
    max_bytes: Int32
    isolation_level: Int8
    topics: Annotated[list[FetchTopic], Meta(max_length=MAX_TOPICS)]
    replica_epoch: Int64 = -1
    slot: FetchSlot = -1
    """From followers: the leader keeps the topics of this request in this slot. A request without topics asks for the
    topics kept there (see `fetch_slots`). -1: no slot."""


class EpochEndOffset(Message):
    epoch: Int32 = -1
    end_offset: Int64 = -1


class AbortedTransaction(Message):
    """The transactional records of the producer from this offset on, up to its next abort marker, are aborted."""

    producer_id: Int64
    first_offset: Int64


class FetchPartitionResponse(Message):
    partition_index: Int32
    error_code: Int16
    high_watermark: Int64 = -1
    last_stable_offset: Int64 = -1
    log_start_offset: Int64 = -1
    diverging_epoch: EpochEndOffset | None = None
    """Set if the follower's log differs: the follower truncates to the end of this epoch and fetches again (KIP-595).
    With OFFSET_OUT_OF_RANGE: the epoch of the record before `log_start_offset`, if it is known."""
    current_leader_id: Int32 = -1
    current_leader_epoch: Int32 = -1
    records: memoryview = memoryview(b"")
    producers: memoryview = memoryview(b"")
    """For a follower, with OFFSET_OUT_OF_RANGE: the producers that wrote before `log_start_offset`, as a snapshot of
    producers. Empty: there are none."""
    aborted_transactions: Annotated[list[AbortedTransaction], Meta(max_length=MAX_ABORTED_TRANSACTIONS)] = []
    """For read_committed: the aborted transactions that overlap `records`, in the order of their first offsets."""


class FetchTopicResponse(Message):
    topic: TopicName
    partitions: Annotated[list[FetchPartitionResponse], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id in the request."""


class FetchResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    responses: Annotated[list[FetchTopicResponse], Meta(max_length=MAX_TOPICS)]
    """If the request named a slot and no topics, unchanged partitions are left out."""
    slot: FetchSlot = -1
    """The slot of the request if the leader keeps it."""
    node_endpoints: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)] = []
    """See ProduceResponse."""


# --- ListOffsets (2) -----------------------------------------------------------------------------------------

LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL_TIMESTAMP = -4
"""The same as EARLIEST_TIMESTAMP, since no log has tiered storage (KIP-405)."""
LATEST_TIERED_TIMESTAMP = -5
"""The last record in tiered storage (KIP-1005): there is none."""


class ListOffsetsPartition(Message):
    partition_index: Int32
    current_leader_epoch: Int32
    timestamp: Int64
    """Milliseconds since 1970, LATEST_TIMESTAMP, EARLIEST_TIMESTAMP, or MAX_TIMESTAMP for the record with the largest
    timestamp (KIP-734)."""


class ListOffsetsTopic(Message):
    name: TopicName
    partitions: Annotated[list[ListOffsetsPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id of the topic; empty: the name alone identifies it."""


class ListOffsetsRequest(Message):
    replica_id: Int32
    isolation_level: Int8
    topics: Annotated[list[ListOffsetsTopic], Meta(max_length=MAX_TOPICS)]


class ListOffsetsPartitionResponse(Message):
    """`offset` is the offset of the first record at or after the time; -1 if there is none."""

    partition_index: Int32
    error_code: Int16
    timestamp: Int64 = -1
    offset: Int64 = -1
    leader_epoch: Int32 = -1
    """The epoch of the record at `offset`, or of the leader if `offset` is the end of the log."""
    previous_epoch: Int32 = -1
    """The epoch of the record before `offset`, if it is known. A reader that begins at `offset` sends it as
    `FetchPartition.last_fetched_epoch`. The leader's own epoch would be wrong: if the leader wrote nothing in it, the
    next leader does not know that epoch and would report a diverging log."""


class ListOffsetsTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[ListOffsetsPartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class ListOffsetsResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[ListOffsetsTopicResponse], Meta(max_length=MAX_TOPICS)]


# --- InitProducerId (22) -------------------------------------------------------------------------------------


class InitProducerIdRequest(Message):
    transactional_id: String | None
    transaction_timeout_ms: Int32 = 60_000
    producer_id: Int64 = -1
    producer_epoch: Int16 = -1
    attempt: Attempt | None = None


class InitProducerIdResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64 = -1
    producer_epoch: Int16 = -1


# --- OffsetForLeaderEpoch (23) -------------------------------------------------------------------------------


class OffsetForLeaderPartition(Message):
    partition: Int32
    current_leader_epoch: Int32
    leader_epoch: Int32


class OffsetForLeaderTopic(Message):
    topic: TopicName
    partitions: Annotated[list[OffsetForLeaderPartition], Meta(max_length=MAX_PARTITIONS)]


class OffsetForLeaderEpochRequest(Message):
    replica_id: Int32
    topics: Annotated[list[OffsetForLeaderTopic], Meta(max_length=MAX_TOPICS)]


class OffsetForLeaderPartitionResponse(Message):
    error_code: Int16
    partition: Int32
    leader_epoch: Int32 = -1
    end_offset: Int64 = -1


class OffsetForLeaderTopicResponse(Message):
    topic: TopicName
    partitions: Annotated[list[OffsetForLeaderPartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class OffsetForLeaderEpochResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[OffsetForLeaderTopicResponse], Meta(max_length=MAX_TOPICS)]

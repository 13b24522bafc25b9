"""Requests about topics and partitions: creation, deletion, reassignment, elections; deletion of records."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    ANY_VERSION,
    MAX_PARTITIONS,
    MAX_TOPICS,
    NO_VERSION,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Replicas,
    String,
    TopicId,
    TopicName,
)
from minibroker.protocol.topic_ids import NONCE_BYTES

# --- CreateTopics (19), DeleteTopics (20) ----------------------------------------------------------------------


class CreatableAssignment(Message):
    partition_index: Int32
    broker_ids: Replicas


class CreatableConfig(Message):
    name: String
    value: String | None


class CreatableTopic(Message):
    """-1 partitions or replicas: the broker's default. With `assignments` both must be -1."""

    name: String
    num_partitions: Int32 = -1
    replication_factor: Int16 = -1
    assignments: Annotated[list[CreatableAssignment], Meta(max_length=MAX_PARTITIONS)] = []
    configs: Annotated[list[CreatableConfig], Meta(max_length=1_000)] = []
    nonce: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """Drawn by the client and repeated in every attempt. If a topic exists whose id ends with the nonce, an earlier
    attempt created it and this one succeeds. Empty: the controller draws one."""


class CreateTopicsRequest(Message):
    """`controller_epoch`: the epoch of the only controller that may create the topics (NOT_CONTROLLER from others), so
    that a late request does not bring back a deleted topic. -1: any controller, as with Kafka's clients."""

    topics: Annotated[list[CreatableTopic], Meta(max_length=MAX_TOPICS)]
    timeout_ms: Int32
    validate_only: bool = False
    controller_epoch: Int32 = -1


class CreatableTopicResult(Message):
    name: String
    topic_id: TopicId
    error_code: Int16
    error_message: String = ""
    num_partitions: Int32 = -1
    replication_factor: Int16 = -1
    topic_config_error_code: Int16 = 0
    """Why the two numbers above are not shown (KIP-525)."""


class CreateTopicsResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[CreatableTopicResult], Meta(max_length=MAX_TOPICS)]


class DeleteTopicsRequest(Message):
    """`topic_ids`: the topics' ids, in the order of `topics`. Another topic of the same name is not deleted
    (UNKNOWN_TOPIC_ID). An empty or missing id is not checked. If the name is empty, the id alone identifies the
    topic."""

    topics: Annotated[list[String], Meta(max_length=MAX_TOPICS)]
    timeout_ms: Int32
    topic_ids: Annotated[list[TopicId], Meta(max_length=MAX_TOPICS)] = []


class DeletableTopicResult(Message):
    """`topic_id` is the id of the topic that has the name now, even if the request named another id."""

    name: String
    topic_id: TopicId
    error_code: Int16
    error_message: String = ""


class DeleteTopicsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[DeletableTopicResult], Meta(max_length=MAX_TOPICS)]


# --- DeleteRecords (21) --------------------------------------------------------------------------------------

UP_TO_HIGH_WATERMARK = -1
"""Delete all committed records."""


class DeleteRecordsPartition(Message):
    """`offset`: records before it are deleted; or UP_TO_HIGH_WATERMARK."""

    partition_index: Int32
    offset: Int64


class DeleteRecordsTopic(Message):
    name: TopicName
    partitions: Annotated[list[DeleteRecordsPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id of the topic. Another topic of the same name keeps its records (INCONSISTENT_TOPIC_ID)."""


class DeleteRecordsRequest(Message):
    topics: Annotated[list[DeleteRecordsTopic], Meta(max_length=MAX_TOPICS)]
    timeout_ms: Int32


class DeleteRecordsPartitionResult(Message):
    """`low_watermark`: no replica that may become leader has records below it; -1 with an error."""

    partition_index: Int32
    low_watermark: Int64
    error_code: Int16
    error_message: String = ""


class DeleteRecordsTopicResult(Message):
    name: TopicName
    partitions: Annotated[list[DeleteRecordsPartitionResult], Meta(max_length=MAX_PARTITIONS)]


class DeleteRecordsResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[DeleteRecordsTopicResult], Meta(max_length=MAX_TOPICS)]


# --- ElectLeaders (43) ---------------------------------------------------------------------------------------


class ElectLeadersTopic(Message):
    topic: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class ElectLeadersRequest(Message):
    """`topic_partitions` None: all. `election_type`: `model.ElectionType`. `controller_epoch`: the epoch of the only
    controller that may elect (NOT_CONTROLLER from others), so that a late request has no effect; -1: any controller, as
    with Kafka's clients."""

    election_type: Int8
    topic_partitions: Annotated[list[ElectLeadersTopic], Meta(max_length=MAX_TOPICS)] | None
    timeout_ms: Int32
    controller_epoch: Int32 = -1


class ElectLeadersPartitionResult(Message):
    partition_id: Int32
    error_code: Int16
    error_message: String = ""


class ElectLeadersTopicResult(Message):
    topic: TopicName
    partition_result: Annotated[list[ElectLeadersPartitionResult], Meta(max_length=MAX_PARTITIONS)]


class ElectLeadersResponse(Message):
    """If the request asked for all partitions, those that needed no election are left out."""

    throttle_time_ms: Int32
    error_code: Int16
    replica_election_results: Annotated[list[ElectLeadersTopicResult], Meta(max_length=MAX_TOPICS)]


# --- CreatePartitions (37) -----------------------------------------------------------------------------------


class CreatePartitionsAssignment(Message):
    broker_ids: Replicas


class CreatePartitionsTopic(Message):
    """`count`: the new total number of partitions. `assignments`: the replicas of each new partition, the preferred
    leader first; None: the controller chooses.

    `topic_id`: the id of the topic; another topic of the same name does not change (UNKNOWN_TOPIC_ID). Empty: not
    checked. `known_count`: the number of partitions when the caller began. If there are `count` of them by now, an
    earlier attempt has succeeded, and this one does too. -1: unknown. (Kafka has neither field.)"""

    name: String
    count: Int32
    assignments: Annotated[list[CreatePartitionsAssignment], Meta(max_length=MAX_PARTITIONS)] | None = None
    topic_id: TopicId = ""
    known_count: Int32 = -1


class CreatePartitionsRequest(Message):
    topics: Annotated[list[CreatePartitionsTopic], Meta(max_length=MAX_TOPICS)]
    timeout_ms: Int32
    validate_only: bool = False


class CreatePartitionsTopicResult(Message):
    """`topic_id` and `num_partitions` are those of the topic that has the name now (not in Kafka)."""

    name: String
    error_code: Int16
    error_message: String = ""
    topic_id: TopicId = ""
    num_partitions: Int32 = -1


class CreatePartitionsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[CreatePartitionsTopicResult], Meta(max_length=MAX_TOPICS)]


# --- AlterPartitionReassignments (45), ListPartitionReassignments (46): KIP-455 -------------------------------------


class ReassignablePartition(Message):
    partition_index: Int32
    replicas: Replicas | None = None
    """None: cancel the current reassignment."""


class ReassignableTopic(Message):
    """`topic_id`: the id of the topic; another topic of the same name does not change (UNKNOWN_TOPIC_ID). Empty: not
    checked. `known_version`: the mzxid of the topic's znode when the caller read it. If the znode has changed since,
    the request is rejected (INVALID_UPDATE_VERSION), so that a late request does not undo a newer change. (Kafka has
    neither field.)"""

    name: TopicName
    partitions: Annotated[list[ReassignablePartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    known_version: Int64 = ANY_VERSION


class AlterPartitionReassignmentsRequest(Message):
    timeout_ms: Int32
    topics: Annotated[list[ReassignableTopic], Meta(max_length=MAX_TOPICS)]


class ReassignablePartitionResponse(Message):
    partition_index: Int32
    error_code: Int16
    error_message: String = ""


class ReassignableTopicResponse(Message):
    """`topic_id` and `version`: the current ones, or those before the change."""

    name: TopicName
    partitions: Annotated[list[ReassignablePartitionResponse], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    version: Int64 = NO_VERSION


class AlterPartitionReassignmentsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String
    responses: Annotated[list[ReassignableTopicResponse], Meta(max_length=MAX_TOPICS)]


class ListPartitionReassignmentsTopic(Message):
    name: TopicName
    partition_indexes: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class ListPartitionReassignmentsRequest(Message):
    """`topics` None: all current reassignments."""

    timeout_ms: Int32
    topics: Annotated[list[ListPartitionReassignmentsTopic], Meta(max_length=MAX_TOPICS)] | None = None


class OngoingPartitionReassignment(Message):
    partition_index: Int32
    replicas: Replicas
    adding_replicas: Replicas
    removing_replicas: Replicas


class OngoingTopicReassignment(Message):
    name: TopicName
    partitions: Annotated[list[OngoingPartitionReassignment], Meta(max_length=MAX_PARTITIONS)]


class ListPartitionReassignmentsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String
    topics: Annotated[list[OngoingTopicReassignment], Meta(max_length=MAX_TOPICS)]

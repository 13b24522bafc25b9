"""Topics and partitions: creation, deletion, reassignment, elections; deletion of records."""

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
    """Drawn by the client, and the same in every attempt: a topic that exists and whose id ends with it was created by
    this request, and counts as created. Empty: the controller draws one."""


class CreateTopicsRequest(Message):
    """`controller_epoch`: of the controller that is meant. No other creates the topics (NOT_CONTROLLER), so that a
    request which comes late brings no topic back that was deleted meanwhile. -1: any, as Kafka's clients ask."""

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


class CreateTopicsResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[CreatableTopicResult], Meta(max_length=MAX_TOPICS)]


class DeleteTopicsRequest(Message):
    """`topic_ids`, in the order of `topics`: the topic that is meant. Another one of the same name is not deleted
    (UNKNOWN_TOPIC_ID). An empty id, or one left out, is not checked. With an empty name the id alone says which."""

    topics: Annotated[list[String], Meta(max_length=MAX_TOPICS)]
    timeout_ms: Int32
    topic_ids: Annotated[list[TopicId], Meta(max_length=MAX_TOPICS)] = []


class DeletableTopicResult(Message):
    """`topic_id` is that of the topic which has the name now, even if another was meant."""

    name: String
    topic_id: TopicId
    error_code: Int16
    error_message: String = ""


class DeleteTopicsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[DeletableTopicResult], Meta(max_length=MAX_TOPICS)]


# --- DeleteRecords (21) --------------------------------------------------------------------------------------

UP_TO_HIGH_WATERMARK = -1
"""Delete all that is committed."""


class DeleteRecordsPartition(Message):
    """`offset`: what comes before it is deleted; or UP_TO_HIGH_WATERMARK."""

    partition_index: Int32
    offset: Int64


class DeleteRecordsTopic(Message):
    name: TopicName
    partitions: Annotated[list[DeleteRecordsPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The topic that is meant: of another one of the same name nothing is deleted (INCONSISTENT_TOPIC_ID)."""


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
    """`topic_partitions` None: all. `election_type`: `model.ElectionType`. `controller_epoch`: of the controller that
    is meant, so that a request which comes late elects nobody (NOT_CONTROLLER); -1: any, as Kafka's clients ask."""

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
    """Where all partitions were asked for, those are left out that needed no election."""

    throttle_time_ms: Int32
    error_code: Int16
    replica_election_results: Annotated[list[ElectLeadersTopicResult], Meta(max_length=MAX_TOPICS)]


# --- CreatePartitions (37) -----------------------------------------------------------------------------------


class CreatePartitionsAssignment(Message):
    broker_ids: Replicas


class CreatePartitionsTopic(Message):
    """`count`: how many partitions there are to be, with those that exist. `assignments`: of the new ones, in their
    order, the preferred leader first; None: the controller chooses.

    `topic_id`: the topic that is meant; another one of the same name stays as it is (UNKNOWN_TOPIC_ID). Empty: not
    checked. `known_count`: how many partitions there were when the caller began; where there are `count` of them by
    now, an earlier attempt has succeeded, and that is no error. -1: it was not looked at (Kafka has neither field)."""

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
    """`topic_id` and `num_partitions` are those of the topic which has the name now (not in Kafka)."""

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
    """None: cancel the reassignment that is under way."""


class ReassignableTopic(Message):
    """`topic_id`: the topic that is meant; nothing happens to another one of that name (UNKNOWN_TOPIC_ID). Empty: it is
    not checked. `known_version`: the transaction that had changed the topic's znode last (its mzxid) when the caller
    looked; if that is another by now, nothing happens (INVALID_UPDATE_VERSION). So a request that comes late undoes
    nothing newer. (Kafka has neither field.)"""

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
    """`topic_id` and `version`: as they are now, or were before what has happened."""

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
    """`topics` None: all that are under way."""

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

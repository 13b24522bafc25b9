"""Every request and response, one typed schema per API. Data only.

Fields have Kafka 3.9's names in snake_case, in positional arrays (`array_like`): unknown trailing fields are
ignored and missing ones take their default, so a message grows at its tail. Every integer has the bounds of
its Kafka type and every list and string a maximum length: msgspec checks a list's announced length before it
takes memory for it. `records` stays a view of the received frame (no copy), so keeping it longer than the
request keeps the whole frame.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from minibroker.protocol.topic_ids import NONCE_BYTES

PROOF_BYTES = 32
"""The size of a SHA-256, and of the nonces that make each proof a different one."""

Int8 = Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)]
Int16 = Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
String = Annotated[str, Meta(max_length=32_767)]
Name = Annotated[str, Meta(max_length=249)]
TopicName = String
"""As a client names a topic. One that is too long for a topic is refused where the topic is looked for, for that entry
alone, as in Kafka: a name that cannot be decoded would cost all others in the request their answer."""
TopicId = Annotated[str, Meta(max_length=22)]
"""URL-safe base64 of 16 bytes, 22 characters (Kafka's Uuid; see `topic_ids`); empty: not known, not checked."""

Nonce = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]

Replicas = Annotated[list[Int32], Meta(max_length=1_000)]
BrokerEpochs = Annotated[list[Int64], Meta(max_length=1_000)]
"""One for each replica of another list, in its order; empty: not known."""

MAX_TOPICS = 20_000
MAX_PARTITIONS = 100_000
MAX_BROKERS = 10_000
MAX_RECORD_ERRORS = 10_000
"""Of one batch: as many records as librdkafka puts into one."""
MAX_FETCH_SLOTS = 32
"""Of one connection."""

NO_OPERATIONS = -(2**31)
"""Authorized operations (KIP-430) that were not asked for."""

FetchSlot = Annotated[int, Meta(ge=-1, lt=MAX_FETCH_SLOTS)]

Buffer = bytes | bytearray | memoryview
"""What an encoder accepts as bytes; a decoder always returns a memoryview."""


class Message(msgspec.Struct, array_like=True):
    """A positional MessagePack array."""


class RequestEnvelope(Message):
    api_key: Int16
    api_version: Int16
    correlation_id: Int32
    client_id: Name | None
    body: msgspec.Raw


class ResponseEnvelope(Message):
    """`error_code` is set, and `body` nil, if the request could not be understood at all."""

    correlation_id: Int32
    body: msgspec.Raw
    error_code: Int16 = 0
    error_message: String = ""


class MetadataBroker(Message):
    node_id: Int32
    host: String
    port: Int32
    rack: Name | None = None


# --- Produce (0) ---------------------------------------------------------------------------------------------


class ProducePartition(Message):
    index: Int32
    records: memoryview


class ProduceTopic(Message):
    name: TopicName
    partition_data: Annotated[list[ProducePartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The topic that is meant: another one of the same name appends nothing (INCONSISTENT_TOPIC_ID; KIP-516)."""


class ProduceRequest(Message):
    """`acks`: 0, 1, or -1 for all. With acks 0 no response is sent."""

    transactional_id: String | None
    acks: Int16
    timeout_ms: Int32
    topic_data: Annotated[list[ProduceTopic], Meta(max_length=MAX_TOPICS)]


class ProduceRecordError(Message):
    """Why one record is refused, and with it its batch (KIP-467)."""

    batch_index: Int32
    """Which record of the batch, from 0."""
    batch_index_error_message: String | None = None


class ProducePartitionResponse(Message):
    index: Int32
    error_code: Int16
    base_offset: Int64 = -1
    log_append_time_ms: Int64 = -1
    log_start_offset: Int64 = -1
    error_message: String = ""
    current_leader_id: Int32 = -1
    """With NOT_LEADER_OR_FOLLOWER: the leader now, as far as this broker knows (KIP-951)."""
    current_leader_epoch: Int32 = -1
    record_errors: Annotated[list[ProduceRecordError], Meta(max_length=MAX_RECORD_ERRORS)] = []


class ProduceTopicResponse(Message):
    name: TopicName
    partition_responses: Annotated[list[ProducePartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class ProduceResponse(Message):
    responses: Annotated[list[ProduceTopicResponse], Meta(max_length=MAX_TOPICS)]
    throttle_time_ms: Int32 = 0
    node_endpoints: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)] = []
    """Where the leaders are that the partitions name (KIP-951)."""


# --- Fetch (1) -----------------------------------------------------------------------------------------------


class FetchPartition(Message):
    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    last_fetched_epoch: Int32
    """The epoch of the record before `fetch_offset` in the follower's log, or as the consumer has read it; -1: not
    checked (KIP-595)."""
    log_start_offset: Int64
    partition_max_bytes: Int32
    suspect: bool = False
    """What was sent for this offset before was corrupt when it arrived: the leader is to look at its disk."""


class FetchTopic(Message):
    """`topic` empty: whichever topic has the id."""

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
    """Of followers: the leader is to keep what this asks for. With no topics: what was asked for in this slot before
    (see `fetch_slots`). -1: none."""


class EpochEndOffset(Message):
    epoch: Int32 = -1
    end_offset: Int64 = -1


class FetchPartitionResponse(Message):
    partition_index: Int32
    error_code: Int16
    high_watermark: Int64 = -1
    last_stable_offset: Int64 = -1
    log_start_offset: Int64 = -1
    diverging_epoch: EpochEndOffset | None = None
    """Set if the follower's log differs: the follower truncates to this epoch's end and asks again (KIP-595). With
    OFFSET_OUT_OF_RANGE: of which epoch the record before `log_start_offset` was, if that is known."""
    current_leader_id: Int32 = -1
    current_leader_epoch: Int32 = -1
    records: memoryview = memoryview(b"")
    producers: memoryview = memoryview(b"")
    """To a follower, with OFFSET_OUT_OF_RANGE: who had written before `log_start_offset`, as a snapshot of producers
    has it. Empty: nobody."""


class FetchTopicResponse(Message):
    topic: TopicName
    partitions: Annotated[list[FetchPartitionResponse], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """As in the request."""


class FetchResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    responses: Annotated[list[FetchTopicResponse], Meta(max_length=MAX_TOPICS)]
    """Where the request named a slot and no topics: without those of which there is nothing new to say."""
    slot: FetchSlot = -1
    """The request's, if the leader keeps it."""
    node_endpoints: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)] = []
    """As in ProduceResponse."""


# --- ListOffsets (2) -----------------------------------------------------------------------------------------

LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL_TIMESTAMP = -4
"""As EARLIEST_TIMESTAMP: no log has a part in other storage (KIP-405)."""
LATEST_TIERED_TIMESTAMP = -5
"""The last record that is in other storage (KIP-1005): there is none."""


class ListOffsetsPartition(Message):
    partition_index: Int32
    current_leader_epoch: Int32
    timestamp: Int64
    """Milliseconds since 1970, LATEST_TIMESTAMP, EARLIEST_TIMESTAMP, or MAX_TIMESTAMP: the record with the largest of
    all (KIP-734)."""


class ListOffsetsTopic(Message):
    name: TopicName
    partitions: Annotated[list[ListOffsetsPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The topic that is meant, not another one of that name; empty: whichever has the name."""


class ListOffsetsRequest(Message):
    replica_id: Int32
    isolation_level: Int8
    topics: Annotated[list[ListOffsetsTopic], Meta(max_length=MAX_TOPICS)]


class ListOffsetsPartitionResponse(Message):
    """`offset` is that of the first record at or after the time; -1 if there is none."""

    partition_index: Int32
    error_code: Int16
    timestamp: Int64 = -1
    offset: Int64 = -1
    leader_epoch: Int32 = -1
    """The epoch of the record at `offset`; of the leader, if that is the end."""
    previous_epoch: Int32 = -1
    """The epoch of the record before `offset`, where it is known: what a reader that begins there is to have read last
    (`FetchPartition.last_fetched_epoch`). The leader's would not do: if it has written nothing in its epoch, the next
    one knows of no such epoch, and would take the reader for one of another history."""


class ListOffsetsTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[ListOffsetsPartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class ListOffsetsResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[ListOffsetsTopicResponse], Meta(max_length=MAX_TOPICS)]


# --- Metadata (3) --------------------------------------------------------------------------------------------


class MetadataRequest(Message):
    """`topics` None asks for all of them, an empty list for none (only brokers and controller).
    `allow_auto_topic_creation`: a topic that does not exist may be created, if the broker's auto.create.topics.enable
    says so, too. `topic_ids`: topics that are asked for by their ids alone (KIP-516)."""

    topics: Annotated[list[String], Meta(max_length=MAX_TOPICS)] | None
    allow_auto_topic_creation: bool = False
    topic_ids: Annotated[list[TopicId], Meta(max_length=MAX_TOPICS)] = []
    include_topic_authorized_operations: bool = False
    include_cluster_authorized_operations: bool = False


class MetadataPartition(Message):
    error_code: Int16
    partition_index: Int32
    leader_id: Int32
    leader_epoch: Int32
    replica_nodes: Replicas
    isr_nodes: Replicas
    offline_replicas: Replicas


class MetadataTopic(Message):
    error_code: Int16
    name: String
    topic_id: TopicId
    is_internal: bool
    partitions: Annotated[list[MetadataPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_authorized_operations: Int32 = NO_OPERATIONS
    """What the client may do with the topic: bit N for operation N of Kafka's AclOperation (KIP-430)."""


class MetadataResponse(Message):
    throttle_time_ms: Int32
    brokers: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)]
    cluster_id: Name | None
    controller_id: Int32
    topics: Annotated[list[MetadataTopic], Meta(max_length=MAX_TOPICS)]
    controller_epoch: Int32 = -1
    """That of the last UpdateMetadata that the broker took; tells which of two brokers' metadata is newer."""
    cluster_authorized_operations: Int32 = NO_OPERATIONS


# --- LeaderAndIsr (4), StopReplica (5), UpdateMetadata (6): from the controller alone --------------------------


class LeaderAndIsrPartition(Message):
    partition_index: Int32
    controller_epoch: Int32
    leader: Int32
    leader_epoch: Int32
    isr: Replicas
    partition_epoch: Int32
    replicas: Replicas
    is_new: bool = False
    """The replica was never there before: a log may be created for it."""
    isr_epochs: BrokerEpochs = []
    eligible: Replicas = []
    eligible_epochs: BrokerEpochs = []
    """These three as in `minibroker.protocol.model.LeaderAndIsr`."""
    adding_replicas: Replicas = []
    removing_replicas: Replicas = []
    """As in `minibroker.protocol.model.ReplicaAssignment`."""
    to_commit: Int32 = 0
    """As in `minibroker.protocol.model.LeaderAndIsr`."""


class LeaderAndIsrTopic(Message):
    topic_name: Name
    topic_id: TopicId
    partition_states: Annotated[list[LeaderAndIsrPartition], Meta(max_length=MAX_PARTITIONS)]


class LiveLeader(Message):
    broker_id: Int32
    host_name: String
    port: Int32


class LeaderAndIsrRequest(Message):
    controller_id: Int32
    controller_epoch: Int32
    broker_epoch: Int64
    topic_states: Annotated[list[LeaderAndIsrTopic], Meta(max_length=MAX_TOPICS)]
    live_leaders: Annotated[list[LiveLeader], Meta(max_length=MAX_BROKERS)]
    number: Int64 = 0
    """Grows with every order to a broker within a controller's term, and stays the same in a retry; 0: not numbered."""


class PartitionError(Message):
    topic_name: Name
    partition_index: Int32
    error_code: Int16
    leader_epoch: Int32 = -1
    """This and the next two only in answers to LeaderAndIsr, for a replica that has no leader: the leader epoch that it
    was told, in which its log does not change, and how the log ends (the epoch of its last record, and the log end
    offset)."""
    last_epoch: Int32 = -1
    log_end_offset: Int64 = -1


class LeaderAndIsrResponse(Message):
    error_code: Int16
    partition_errors: Annotated[list[PartitionError], Meta(max_length=MAX_PARTITIONS)]


class StopReplicaPartition(Message):
    partition_index: Int32
    leader_epoch: Int32
    delete_partition: bool


class StopReplicaTopic(Message):
    topic_name: Name
    topic_id: TopicId
    partition_states: Annotated[list[StopReplicaPartition], Meta(max_length=MAX_PARTITIONS)]


class StopReplicaRequest(Message):
    controller_id: Int32
    controller_epoch: Int32
    broker_epoch: Int64
    topic_states: Annotated[list[StopReplicaTopic], Meta(max_length=MAX_TOPICS)]
    number: Int64 = 0
    """As in LeaderAndIsrRequest."""


class StopReplicaResponse(Message):
    error_code: Int16
    partition_errors: Annotated[list[PartitionError], Meta(max_length=MAX_PARTITIONS)]


class UpdateMetadataPartition(Message):
    partition_index: Int32
    controller_epoch: Int32
    leader: Int32
    leader_epoch: Int32
    isr: Replicas
    partition_epoch: Int32
    replicas: Replicas
    offline_replicas: Replicas


class UpdateMetadataTopic(Message):
    topic_name: Name
    topic_id: TopicId
    partition_states: Annotated[list[UpdateMetadataPartition], Meta(max_length=MAX_PARTITIONS)]
    deleted: bool = False
    """The topic is gone (Kafka says so with a leader of -2 for each partition: LeaderDuringDelete)."""
    num_partitions: Int32 = 0
    """How many partitions the topic has, in this request or in others of the same update."""


class UpdateMetadataEndpoint(Message):
    port: Int32
    host: String
    listener: Name


class UpdateMetadataBroker(Message):
    id: Int32
    endpoints: Annotated[list[UpdateMetadataEndpoint], Meta(max_length=100)]
    rack: Name | None = None
    broker_epoch: Int64 = -1
    """Tells a leader which run of a follower is alive (KIP-903)."""
    is_shutting_down: bool = False
    """It is about to stop, and must not be taken into an ISR (KIP-841 has that for KRaft)."""


class UpdateMetadataRequest(Message):
    controller_id: Int32
    controller_epoch: Int32
    broker_epoch: Int64
    topic_states: Annotated[list[UpdateMetadataTopic], Meta(max_length=MAX_TOPICS)]
    live_brokers: Annotated[list[UpdateMetadataBroker], Meta(max_length=MAX_BROKERS)]
    number: Int64 = 0
    """As in LeaderAndIsrRequest."""
    names_the_last: bool = False
    """With this request the broker has been told of every topic."""


class UpdateMetadataResponse(Message):
    error_code: Int16


# --- ApiVersions (18) ----------------------------------------------------------------------------------------


class ApiVersionsRequest(Message):
    client_software_name: Name = ""
    client_software_version: Name = ""


class ApiVersion(Message):
    api_key: Int16
    min_version: Int16
    max_version: Int16


class ApiVersionsResponse(Message):
    error_code: Int16
    api_keys: Annotated[list[ApiVersion], Meta(max_length=1_000)]


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


# --- InitProducerId (22) -------------------------------------------------------------------------------------


class InitProducerIdRequest(Message):
    transactional_id: String | None
    transaction_timeout_ms: Int32 = 60_000
    producer_id: Int64 = -1
    producer_epoch: Int16 = -1


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


# --- AlterReplicaLogDirs (34) --------------------------------------------------------------------------------------


class AlterReplicaLogDirTopic(Message):
    name: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class AlterReplicaLogDir(Message):
    path: String
    """The directory that these replicas of the broker are to be moved to."""
    topics: Annotated[list[AlterReplicaLogDirTopic], Meta(max_length=MAX_TOPICS)]


class AlterReplicaLogDirsRequest(Message):
    dirs: Annotated[list[AlterReplicaLogDir], Meta(max_length=1_000)]


class AlterReplicaLogDirPartitionResult(Message):
    partition_index: Int32
    error_code: Int16


class AlterReplicaLogDirTopicResult(Message):
    topic_name: TopicName
    partitions: Annotated[list[AlterReplicaLogDirPartitionResult], Meta(max_length=MAX_PARTITIONS)]


class AlterReplicaLogDirsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[AlterReplicaLogDirTopicResult], Meta(max_length=MAX_TOPICS)]


# --- DescribeLogDirs (35) ------------------------------------------------------------------------------------------


class DescribableLogDirTopic(Message):
    topic: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class DescribeLogDirsRequest(Message):
    """`topics` None: all."""

    topics: Annotated[list[DescribableLogDirTopic], Meta(max_length=MAX_TOPICS)] | None


class DescribeLogDirsPartition(Message):
    partition_index: Int32
    partition_size: Int64
    offset_lag: Int64
    """How far the log ends before the high watermark; -1: not known."""
    is_future_key: bool = False
    """The replica is being moved here, from another directory, and `offset_lag` is what is still to be copied."""


class DescribeLogDirsTopic(Message):
    name: TopicName
    partitions: Annotated[list[DescribeLogDirsPartition], Meta(max_length=MAX_PARTITIONS)]


class DescribeLogDirsResult(Message):
    error_code: Int16
    """KAFKA_STORAGE_ERROR: it is offline."""
    log_dir: String
    topics: Annotated[list[DescribeLogDirsTopic], Meta(max_length=MAX_TOPICS)]
    total_bytes: Int64 = -1
    usable_bytes: Int64 = -1
    """Of the file system that the directory is on; -1: not known."""
    error_message: String = ""
    """Why it is offline (not in Kafka)."""


class DescribeLogDirsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    results: Annotated[list[DescribeLogDirsResult], Meta(max_length=1_000)]


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


# --- DescribeTimeline (125) ------------------------------------------------------------------------------------------


class DescribeTimelineRequest(Message):
    """What the controller of this broker did, whenever it was in office: entries with a number above `after`, and not
    older than `since_ms`."""

    after: Int64 = 0
    since_ms: Int64 = 0
    max_entries: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class DescribeTimelineResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    entries: Annotated[list[memoryview], Meta(max_length=10_000)]
    """JSON objects, in the order of their numbers; not all that there are, unless `is_complete`."""
    is_complete: bool = True
    last_number: Int64 = 0
    """Of the last entry that this broker has. Lower than one that it gave out before: its files were lost."""


# --- BrokerHandshake (126), BrokerAuthenticate (127): see `broker_proof` -------------------------------------------


class EnvelopeRequest(Message):
    """A request for the controller, brought by broker `broker_id` (KIP-590)."""

    broker_id: Int32
    is_from_client: bool
    """A client asked; otherwise the broker asks for itself, and may do what only brokers may."""
    request_data: memoryview
    """A frame of the request, without its length."""


class EnvelopeResponse(Message):
    response_data: memoryview
    """A frame of the answer, without its length."""


class BrokerHandshakeRequest(Message):
    """Broker `broker_id` has connected to broker `peer_id`, and asks it for its proof."""

    broker_id: Int32
    peer_id: Int32
    nonce: Nonce


class BrokerHandshakeResponse(Message):
    nonce: Nonce
    proof: Proof


class BrokerAuthenticateRequest(Message):
    """The proof of the broker that has connected, in return."""

    proof: Proof


class BrokerAuthenticateResponse(Message):
    """Empty: a broker whose proof is wrong gets CLUSTER_AUTHORIZATION_FAILED."""


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


ANY_VERSION = -1
"""In a change: it is not conditional."""
NO_VERSION = -2
"""What nothing has, so that the answer says which version there is."""


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


# --- ControlledShutdown (7) ----------------------------------------------------------------------------------


class ControlledShutdownRequest(Message):
    """A broker is about to stop, and asks the controller to let others lead what it leads."""

    broker_id: Int32
    broker_epoch: Int64


class RemainingPartition(Message):
    topic_name: Name
    partition_index: Int32


class ControlledShutdownResponse(Message):
    error_code: Int16
    remaining_partitions: Annotated[list[RemainingPartition], Meta(max_length=MAX_PARTITIONS)]
    """Those that the broker still leads, or whose ISR would be too small without it."""


# --- DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44) ----------------------------------------


MAX_CONFIGS = 1_000
"""Of one resource."""
MAX_PRODUCERS = 1_000_000
"""That a log knows, in one message."""


class DescribeConfigsResource(Message):
    resource_type: Int8
    resource_name: TopicName
    configuration_keys: Annotated[list[Name], Meta(max_length=MAX_CONFIGS)] | None = None
    """None: all."""


class DescribeConfigsRequest(Message):
    resources: Annotated[list[DescribeConfigsResource], Meta(max_length=MAX_TOPICS)]
    include_synonyms: bool = False
    include_documentation: bool = False


class DescribeConfigsSynonym(Message):
    name: Name
    value: String | None
    source: Int8


class DescribeConfigsEntry(Message):
    name: Name
    value: String | None
    """None: it is not set, or a secret."""
    read_only: bool
    config_source: Int8
    is_sensitive: bool
    synonyms: Annotated[list[DescribeConfigsSynonym], Meta(max_length=MAX_CONFIGS)]
    config_type: Int8
    documentation: String | None = None
    problem: String | None = None
    """What ZooKeeper has for this resource does not hold, as it makes no sense: why (not in Kafka)."""


class DescribeConfigsResult(Message):
    error_code: Int16
    error_message: String | None
    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[DescribeConfigsEntry], Meta(max_length=MAX_CONFIGS)]


class DescribeConfigsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[DescribeConfigsResult], Meta(max_length=MAX_TOPICS)]


class AlterableConfig(Message):
    name: Name
    config_operation: Int8
    """0: set, 1: delete, 2: append to a list, 3: subtract from it."""
    value: String | None = None


class AlterConfigsResource(Message):
    """`topic_id`, `known_version`: as in ReassignableTopic, of the znode of the settings (0: where there is none);
    another topic is an UNKNOWN_TOPIC_OR_PARTITION."""

    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[AlterableConfig], Meta(max_length=MAX_CONFIGS)]
    topic_id: TopicId = ""
    known_version: Int64 = ANY_VERSION


class IncrementalAlterConfigsRequest(Message):
    resources: Annotated[list[AlterConfigsResource], Meta(max_length=MAX_TOPICS)]
    validate_only: bool = False


class AlterConfigsResourceResponse(Message):
    """`topic_id` and `version`: as they are, where others were meant."""

    error_code: Int16
    error_message: String | None
    resource_type: Int8
    resource_name: TopicName
    topic_id: TopicId = ""
    version: Int64 = NO_VERSION


class IncrementalAlterConfigsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[AlterConfigsResourceResponse], Meta(max_length=MAX_TOPICS)]


class ReplacedConfigs(Message):
    """All that is to be set for a resource: what is not named is as if it had never been set."""

    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[CreatableConfig], Meta(max_length=MAX_CONFIGS)]


class AlterConfigsRequest(Message):
    """What came before IncrementalAlterConfigs. Of two who ask, the second undoes what the first has done."""

    resources: Annotated[list[ReplacedConfigs], Meta(max_length=MAX_TOPICS)]
    validate_only: bool = False


class AlterConfigsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[AlterConfigsResourceResponse], Meta(max_length=MAX_TOPICS)]


# --- DescribeCluster (60), DescribeProducers (61) ------------------------------------------------------------------


BROKER_ENDPOINTS = 1
"""What clients come to; 2 is for controllers that are brokers no longer (KIP-919)."""


class DescribeClusterRequest(Message):
    endpoint_type: Int8 = BROKER_ENDPOINTS
    include_cluster_authorized_operations: bool = False


class DescribeClusterBroker(Message):
    broker_id: Int32
    host: String
    port: Int32
    rack: Name | None = None


class DescribeClusterResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String = ""
    cluster_id: String = ""
    controller_id: Int32 = -1
    brokers: Annotated[list[DescribeClusterBroker], Meta(max_length=MAX_BROKERS)] = []
    endpoint_type: Int8 = BROKER_ENDPOINTS
    cluster_authorized_operations: Int32 = NO_OPERATIONS


class DescribeProducersTopic(Message):
    name: TopicName
    partition_indexes: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class DescribeProducersRequest(Message):
    topics: Annotated[list[DescribeProducersTopic], Meta(max_length=MAX_TOPICS)]


class ActiveProducer(Message):
    """An idempotent producer, as far as the log of a partition knows it."""

    producer_id: Int64
    producer_epoch: Int32
    last_sequence: Int32
    last_timestamp: Int64
    """When it was heard of last, in ms since 1970."""


class DescribeProducersPartition(Message):
    partition_index: Int32
    error_code: Int16
    error_message: String = ""
    active_producers: Annotated[list[ActiveProducer], Meta(max_length=MAX_PRODUCERS)] = []


class DescribeProducersTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[DescribeProducersPartition], Meta(max_length=MAX_PARTITIONS)]


class DescribeProducersResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[DescribeProducersTopicResponse], Meta(max_length=MAX_TOPICS)]

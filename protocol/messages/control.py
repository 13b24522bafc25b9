"""Requests between brokers: the controller's orders, controlled shutdown, forwarded requests, proofs of identity."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_BROKERS,
    MAX_PARTITIONS,
    MAX_TOPICS,
    BrokerEpochs,
    Int16,
    Int32,
    Int64,
    Message,
    Name,
    Nonce,
    Proof,
    Replicas,
    String,
    TopicId,
)

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
    """The replica is a new one: the broker may create a log for it."""
    isr_epochs: BrokerEpochs = []
    eligible: Replicas = []
    eligible_epochs: BrokerEpochs = []
    """See `minibroker.protocol.model.LeaderAndIsr`, for all three."""
    adding_replicas: Replicas = []
    removing_replicas: Replicas = []
    """See `minibroker.protocol.model.ReplicaAssignment`, for both."""
    to_commit: Int32 = 0
    """See `minibroker.protocol.model.LeaderAndIsr`."""


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
    """Grows with every order to a broker within a controller's term; a retry repeats it; 0: not numbered."""


class PartitionError(Message):
    topic_name: Name
    partition_index: Int32
    error_code: Int16
    leader_epoch: Int32 = -1
    """Set only in responses to LeaderAndIsr, for a replica without a leader, like the next two: the leader epoch of the
    order, in which its log does not change. The others are the epoch of its last record and its log end offset."""
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
    """See LeaderAndIsrRequest."""


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
    """The topic is gone (Kafka sends a leader of -2 for each partition: LeaderDuringDelete)."""
    num_partitions: Int32 = 0
    """Partitions of the topic, in this request and in others of the same update."""


class UpdateMetadataEndpoint(Message):
    port: Int32
    host: String
    listener: Name


class UpdateMetadataBroker(Message):
    id: Int32
    endpoints: Annotated[list[UpdateMetadataEndpoint], Meta(max_length=100)]
    rack: Name | None = None
    broker_epoch: Int64 = -1
    """Identifies the live run of a follower for its leader (KIP-903)."""
    is_shutting_down: bool = False
    """The broker is about to stop and must not join an ISR (KIP-841 has that for KRaft)."""


class UpdateMetadataRequest(Message):
    controller_id: Int32
    controller_epoch: Int32
    broker_epoch: Int64
    topic_states: Annotated[list[UpdateMetadataTopic], Meta(max_length=MAX_TOPICS)]
    live_brokers: Annotated[list[UpdateMetadataBroker], Meta(max_length=MAX_BROKERS)]
    number: Int64 = 0
    """See LeaderAndIsrRequest."""
    names_the_last: bool = False
    """With this request the broker has received every topic."""


class UpdateMetadataResponse(Message):
    error_code: Int16


# --- BrokerHandshake (126), BrokerAuthenticate (127): see `broker_proof` -------------------------------------------


class EnvelopeRequest(Message):
    """A request for the controller, forwarded by broker `broker_id` (KIP-590)."""

    broker_id: Int32
    is_from_client: bool
    """The request came from a client; otherwise it is the broker's own and has a broker's rights."""
    request_data: memoryview
    """A frame of the request, without its length."""
    principal: String = "User:ANONYMOUS"
    """The principal of the client."""
    client_host: String = ""
    is_before_mutation_quotas: bool = False
    """The client does not know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


class EnvelopeResponse(Message):
    response_data: memoryview
    """A frame of the response, without its length."""


class BrokerHandshakeRequest(Message):
    """Broker `broker_id` has connected to broker `peer_id` and asks for its proof."""

    broker_id: Int32
    peer_id: Int32
    nonce: Nonce


class BrokerHandshakeResponse(Message):
    nonce: Nonce
    proof: Proof


class BrokerAuthenticateRequest(Message):
    """The proof of the connecting broker."""

    proof: Proof


class BrokerAuthenticateResponse(Message):
    """Empty: a broker whose proof is wrong gets CLUSTER_AUTHORIZATION_FAILED."""


# --- ControlledShutdown (7) ----------------------------------------------------------------------------------


class ControlledShutdownRequest(Message):
    """A broker is about to stop and asks the controller to move its leaderships to other brokers."""

    broker_id: Int32
    broker_epoch: Int64


class RemainingPartition(Message):
    topic_name: Name
    partition_index: Int32


class ControlledShutdownResponse(Message):
    error_code: Int16
    remaining_partitions: Annotated[list[RemainingPartition], Meta(max_length=MAX_PARTITIONS)]
    """Partitions that the broker still leads, or whose ISR would be too small without it."""

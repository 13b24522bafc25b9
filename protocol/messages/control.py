"""Between brokers: the controller's orders, controlled shutdown, forwarded requests, proofs of identity."""

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

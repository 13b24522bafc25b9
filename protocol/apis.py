"""The table of APIs: key, request, response, versions, plane, and who may call it.

Also the envelope, which encodes requests and responses as frames. Envelope and body are decoded in two steps, so that a
request with an invalid body can still be answered by its correlation id.
"""

import struct
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from minibroker.protocol import messages as m
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)


class Plane(Enum):
    DATA = "data"
    CONTROL = "control"
    """Served only through the control listener, and before any data request (KIP-291)."""


class Caller(Enum):
    ANYBODY = "anybody"
    BROKER = "broker"
    """Brokers of the cluster (Kafka's ClusterAction)."""
    READER = "reader"
    """Consumers, and for a `replica_id` of 0 or more only the broker with that id."""
    MARKER_WRITER = "marker writer"
    """Brokers of the cluster for any transaction marker; anybody for abort markers, which end hanging transactions
    (KIP-664)."""


class Api(Generic[Request, Response]):
    """One row of the table. Typed: `connection.request(FETCH, FetchRequest(...))` is a FetchResponse."""

    def __init__(
        self,
        key: int,
        name: str,
        request: type[Request],
        response: type[Response],
        *,
        plane: Plane | None = Plane.DATA,
        caller: Caller = Caller.ANYBODY,
        max_version: int = 0,
    ) -> None:
        self.key = key
        self.name = name
        self.request = request
        self.response = response
        self.plane = plane
        """None: both planes."""
        self.caller = caller
        self.min_version = 0
        self.max_version = max_version
        self.request_decoder = msgspec.msgpack.Decoder(request)
        self.response_decoder = msgspec.msgpack.Decoder(response)

    def __repr__(self) -> str:
        return f"Api({self.name})"


PRODUCE = Api(0, "Produce", m.ProduceRequest, m.ProduceResponse)
FETCH = Api(1, "Fetch", m.FetchRequest, m.FetchResponse, caller=Caller.READER)
LIST_OFFSETS = Api(2, "ListOffsets", m.ListOffsetsRequest, m.ListOffsetsResponse, caller=Caller.READER)
METADATA = Api(3, "Metadata", m.MetadataRequest, m.MetadataResponse)
LEADER_AND_ISR = Api(
    4,
    "LeaderAndIsr",
    m.LeaderAndIsrRequest,
    m.LeaderAndIsrResponse,
    plane=Plane.CONTROL,
    caller=Caller.BROKER,
)
STOP_REPLICA = Api(
    5, "StopReplica", m.StopReplicaRequest, m.StopReplicaResponse, plane=Plane.CONTROL, caller=Caller.BROKER
)
UPDATE_METADATA = Api(
    6,
    "UpdateMetadata",
    m.UpdateMetadataRequest,
    m.UpdateMetadataResponse,
    plane=Plane.CONTROL,
    caller=Caller.BROKER,
)
CONTROLLED_SHUTDOWN = Api(
    7,
    "ControlledShutdown",
    m.ControlledShutdownRequest,
    m.ControlledShutdownResponse,
    plane=Plane.CONTROL,
    caller=Caller.BROKER,
)
OFFSET_COMMIT = Api(8, "OffsetCommit", g.OffsetCommitRequest, g.OffsetCommitResponse)
OFFSET_FETCH = Api(9, "OffsetFetch", g.OffsetFetchRequest, g.OffsetFetchResponse)
FIND_COORDINATOR = Api(10, "FindCoordinator", g.FindCoordinatorRequest, g.FindCoordinatorResponse)
JOIN_GROUP = Api(11, "JoinGroup", g.JoinGroupRequest, g.JoinGroupResponse)
HEARTBEAT = Api(12, "Heartbeat", g.HeartbeatRequest, g.HeartbeatResponse)
LEAVE_GROUP = Api(13, "LeaveGroup", g.LeaveGroupRequest, g.LeaveGroupResponse)
SYNC_GROUP = Api(14, "SyncGroup", g.SyncGroupRequest, g.SyncGroupResponse)
DESCRIBE_GROUPS = Api(15, "DescribeGroups", g.DescribeGroupsRequest, g.DescribeGroupsResponse)
LIST_GROUPS = Api(16, "ListGroups", g.ListGroupsRequest, g.ListGroupsResponse)
SASL_HANDSHAKE = Api(17, "SaslHandshake", m.SaslHandshakeRequest, m.SaslHandshakeResponse)
API_VERSIONS = Api(18, "ApiVersions", m.ApiVersionsRequest, m.ApiVersionsResponse, plane=None)
CREATE_TOPICS = Api(19, "CreateTopics", m.CreateTopicsRequest, m.CreateTopicsResponse)
DELETE_TOPICS = Api(20, "DeleteTopics", m.DeleteTopicsRequest, m.DeleteTopicsResponse)
DELETE_RECORDS = Api(21, "DeleteRecords", m.DeleteRecordsRequest, m.DeleteRecordsResponse)
INIT_PRODUCER_ID = Api(22, "InitProducerId", m.InitProducerIdRequest, m.InitProducerIdResponse)
OFFSET_FOR_LEADER_EPOCH = Api(
    23,
    "OffsetForLeaderEpoch",
    m.OffsetForLeaderEpochRequest,
    m.OffsetForLeaderEpochResponse,
    caller=Caller.READER,
)
ADD_PARTITIONS_TO_TXN = Api(24, "AddPartitionsToTxn", t.AddPartitionsToTxnRequest, t.AddPartitionsToTxnResponse)
ADD_OFFSETS_TO_TXN = Api(25, "AddOffsetsToTxn", t.AddOffsetsToTxnRequest, t.AddOffsetsToTxnResponse)
END_TXN = Api(26, "EndTxn", t.EndTxnRequest, t.EndTxnResponse)
WRITE_TXN_MARKERS = Api(
    27, "WriteTxnMarkers", t.WriteTxnMarkersRequest, t.WriteTxnMarkersResponse, caller=Caller.MARKER_WRITER
)
TXN_OFFSET_COMMIT = Api(28, "TxnOffsetCommit", t.TxnOffsetCommitRequest, t.TxnOffsetCommitResponse)
DESCRIBE_ACLS = Api(29, "DescribeAcls", m.DescribeAclsRequest, m.DescribeAclsResponse)
CREATE_ACLS = Api(30, "CreateAcls", m.CreateAclsRequest, m.CreateAclsResponse)
DELETE_ACLS = Api(31, "DeleteAcls", m.DeleteAclsRequest, m.DeleteAclsResponse)
DESCRIBE_CONFIGS = Api(32, "DescribeConfigs", m.DescribeConfigsRequest, m.DescribeConfigsResponse)
ALTER_CONFIGS = Api(33, "AlterConfigs", m.AlterConfigsRequest, m.AlterConfigsResponse)
ALTER_REPLICA_LOG_DIRS = Api(34, "AlterReplicaLogDirs", m.AlterReplicaLogDirsRequest, m.AlterReplicaLogDirsResponse)
DESCRIBE_LOG_DIRS = Api(35, "DescribeLogDirs", m.DescribeLogDirsRequest, m.DescribeLogDirsResponse)
SASL_AUTHENTICATE = Api(36, "SaslAuthenticate", m.SaslAuthenticateRequest, m.SaslAuthenticateResponse)
CREATE_PARTITIONS = Api(37, "CreatePartitions", m.CreatePartitionsRequest, m.CreatePartitionsResponse)
DELETE_GROUPS = Api(42, "DeleteGroups", g.DeleteGroupsRequest, g.DeleteGroupsResponse)
ELECT_LEADERS = Api(43, "ElectLeaders", m.ElectLeadersRequest, m.ElectLeadersResponse)
ALTER_PARTITION_REASSIGNMENTS = Api(
    45,
    "AlterPartitionReassignments",
    m.AlterPartitionReassignmentsRequest,
    m.AlterPartitionReassignmentsResponse,
)
LIST_PARTITION_REASSIGNMENTS = Api(
    46, "ListPartitionReassignments", m.ListPartitionReassignmentsRequest, m.ListPartitionReassignmentsResponse
)
INCREMENTAL_ALTER_CONFIGS = Api(
    44, "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest, m.IncrementalAlterConfigsResponse
)
OFFSET_DELETE = Api(47, "OffsetDelete", g.OffsetDeleteRequest, g.OffsetDeleteResponse)
DESCRIBE_CLIENT_QUOTAS = Api(48, "DescribeClientQuotas", m.DescribeClientQuotasRequest, m.DescribeClientQuotasResponse)
ALTER_CLIENT_QUOTAS = Api(49, "AlterClientQuotas", m.AlterClientQuotasRequest, m.AlterClientQuotasResponse)
DESCRIBE_USER_SCRAM_CREDENTIALS = Api(
    50,
    "DescribeUserScramCredentials",
    m.DescribeUserScramCredentialsRequest,
    m.DescribeUserScramCredentialsResponse,
)
ALTER_USER_SCRAM_CREDENTIALS = Api(
    51, "AlterUserScramCredentials", m.AlterUserScramCredentialsRequest, m.AlterUserScramCredentialsResponse
)
ENVELOPE = Api(58, "Envelope", m.EnvelopeRequest, m.EnvelopeResponse, caller=Caller.BROKER)
DESCRIBE_CLUSTER = Api(60, "DescribeCluster", m.DescribeClusterRequest, m.DescribeClusterResponse)
DESCRIBE_PRODUCERS = Api(61, "DescribeProducers", m.DescribeProducersRequest, m.DescribeProducersResponse)
DESCRIBE_TRANSACTIONS = Api(65, "DescribeTransactions", t.DescribeTransactionsRequest, t.DescribeTransactionsResponse)
LIST_TRANSACTIONS = Api(66, "ListTransactions", t.ListTransactionsRequest, t.ListTransactionsResponse)
# Not in Kafka, which numbers its APIs upwards from 0. A key must fit into seven bits (see `framing`).
DESCRIBE_HEALTH = Api(124, "DescribeHealth", m.DescribeHealthRequest, m.DescribeHealthResponse)
DESCRIBE_TIMELINE = Api(125, "DescribeTimeline", m.DescribeTimelineRequest, m.DescribeTimelineResponse)
BROKER_HANDSHAKE = Api(126, "BrokerHandshake", m.BrokerHandshakeRequest, m.BrokerHandshakeResponse, plane=None)
BROKER_AUTHENTICATE = Api(
    127, "BrokerAuthenticate", m.BrokerAuthenticateRequest, m.BrokerAuthenticateResponse, plane=None
)

APIS: dict[int, Api[Any, Any]] = {api.key: api for api in list(globals().values()) if isinstance(api, Api)}
"""The APIs by their keys: all those above."""

READS = {
    api.key
    for api in (FETCH, LIST_OFFSETS, METADATA, OFFSET_FETCH, FIND_COORDINATOR, OFFSET_FOR_LEADER_EPOCH, API_VERSIONS)
} | {key for key, api in APIS.items() if api.name.startswith(("Describe", "List"))}
"""The keys of the APIs that only read: without a client that awaits the answer, there is nothing to do."""

API_KEYS = [m.ApiVersion(key, api.min_version, api.max_version) for key, api in sorted(APIS.items())]
"""The response to ApiVersions."""

TRANSACTION_VERSION = m.SupportedFeature("transaction.version", 0, 2)
"""KIP-890. From level 2 on, each end of a transaction raises the producer's epoch, and partitions join a transaction by
being written to. Kafka's clients do so if the level is finalized."""
SUPPORTED_FEATURES = [TRANSACTION_VERSION]
FINALIZED_FEATURES = [m.FinalizedFeature(each.name, each.max_version, each.max_version) for each in SUPPORTED_FEATURES]
"""Every feature, at its newest level: a broker serves older clients without lowering it."""
FINALIZED_FEATURES_EPOCH = 0
"""The levels are constant. Clients ignore finalized features with a negative epoch."""

_encoder = msgspec.msgpack.Encoder()
_request_envelope = msgspec.msgpack.Decoder(m.RequestEnvelope)
_response_envelope = msgspec.msgpack.Decoder(m.ResponseEnvelope)
_LENGTH = struct.Struct(">i")
# msgspec raises Python's own exceptions for invalid UTF-8 and for nesting that is too deep.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _frame(envelope: list[Any]) -> bytearray:
    frame = bytearray(4)
    _encoder.encode_into(envelope, frame, 4)
    _LENGTH.pack_into(frame, 0, len(frame) - 4)
    return frame


def encode_request(api: Api[Request, Any], correlation_id: int, client_id: str | None, body: Request) -> bytearray:
    """Return the frame (length prefix included) of a request in the API's newest version."""
    return _frame([api.key, api.max_version, correlation_id, client_id, body])


def encode_response(correlation_id: int, body: m.Message) -> bytearray:
    """Return the frame (length prefix included) of a response."""
    return _frame([correlation_id, body])


def encode_error(correlation_id: int, code: ErrorCode, message: str) -> bytearray:
    """Return the frame of the response to a request that could not be decoded: no body, an error code, a sentence."""
    return _frame([correlation_id, None, code, message[:1_000]])


def decode_request_envelope(frame: m.Buffer) -> m.RequestEnvelope:
    """Return the envelope. Raises InvalidMessage if the frame is not a request envelope."""
    try:
        return _request_envelope.decode(frame)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a request envelope: {error}") from error


def decode_request(api: Api[Request, Any], envelope: m.RequestEnvelope) -> Request:
    """Return the typed body. Raises InvalidMessage naming the invalid field."""
    try:
        return api.request_decoder.decode(envelope.body)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a {api.name} request: {error}") from error


def decode_response_envelope(frame: m.Buffer) -> m.ResponseEnvelope:
    """Return the envelope. Raises InvalidMessage if the frame is not a response envelope."""
    try:
        return _response_envelope.decode(frame)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a response envelope: {error}") from error


def decode_response(api: Api[Any, Response], envelope: m.ResponseEnvelope) -> Response:
    """Return the typed body. Raises BrokerError for an error of the broker, InvalidMessage for an invalid body."""
    if envelope.error_code:
        raise BrokerError(error_of(envelope.error_code), f"{api.name}: {envelope.error_message}")
    try:
        return api.response_decoder.decode(envelope.body)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a {api.name} response: {error}") from error

"""The client library for asyncio: Producer, Consumer and Admin.

A record passes through producer.py, producing/accumulator.py and producing/sender.py; it comes back through
fetching/fetcher.py and consumer.py. group/member.py joins a group. Under all of them are cluster/runtime.py and
cluster/metadata.py.
"""

from minibroker.client.admin import Admin
from minibroker.client.administering.acls import AclErrors
from minibroker.client.administering.client_quotas import DEFAULT_ENTITY, QuotaEntity, QuotaErrors
from minibroker.client.administering.configs import (
    ConfigChange,
    ConfigEntry,
    ConfigErrors,
    ConfigResource,
    ConfigSynonym,
)
from minibroker.client.administering.groups import (
    GroupDescription,
    GroupErrors,
    GroupListing,
    GroupRebalance,
    MemberDescription,
)
from minibroker.client.administering.log_dirs import LogDirDescription, LogDirReplica
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.requests import BrokerDescription, ClusterDescription
from minibroker.client.administering.scram import (
    ScramCredentialInfo,
    UserErrors,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from minibroker.client.administering.timeline import TimelineRead, TimelineReader
from minibroker.client.administering.topics import NewTopic, PartitionDescription, TopicDescription
from minibroker.client.administering.transactions import (
    ProducerErrors,
    ProducerState,
    TransactionalIdErrors,
    TransactionDescription,
    TransactionListing,
)
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    ApiTimedOut,
    AuthenticationFailed,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    CommitFailed,
    CommitOutcomeUnknown,
    CorruptBatch,
    DeliveryFailed,
    DeliveryTimedOut,
    DeserializationFailed,
    FailedRecord,
    ForkedClient,
    InvalidAssignment,
    InvalidSetting,
    InvalidTransactionState,
    ListenerTimedOut,
    LogTruncated,
    MaxPollIntervalExceeded,
    PartialFailure,
    PartitionerFailed,
    PartitionErrors,
    ProducerFenced,
    SerializationFailed,
    TopicErrors,
    TransactionAborted,
    TransactionError,
    WithinListener,
    WrongEventLoop,
)
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.group.assignors import Assignor, RebalanceProtocol, Subscription
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata
from minibroker.client.group.consumer_status import ConsumerStatus
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.processing.results import ProducerRecord
from minibroker.client.processor import Processor
from minibroker.client.producer import Producer
from minibroker.client.producing.columns import ArrowArray
from minibroker.client.producing.delivery import (
    BatchDelivery,
    BatchDeliveryFailed,
    BatchMetadata,
    Delivery,
    PartMetadata,
    RecordMetadata,
)
from minibroker.client.producing.partitioners import (
    Partitioner,
    Partitions,
    RecordPartitioner,
    RoundRobin,
    WithoutKey,
    crc32,
    murmur2,
)
from minibroker.client.security import Security
from minibroker.client.settings import Address
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import AlterOperation, ConfigSource, ConfigType, ResourceType, TopicPartition

__all__ = [
    "DEFAULT_ENTITY",
    "AccessControlEntry",
    "AclBinding",
    "AclErrors",
    "AclFilter",
    "AclOperation",
    "AclPermissionType",
    "AclResourceType",
    "Address",
    "Admin",
    "AlterOperation",
    "ApiTimedOut",
    "ArrowArray",
    "Assignor",
    "AuthenticationFailed",
    "BatchDelivery",
    "BatchDeliveryFailed",
    "BatchMetadata",
    "BrokerDescription",
    "BrokerError",
    "BrokersFailed",
    "BufferFull",
    "ClientCrashed",
    "Closed",
    "ClusterDescription",
    "CommitFailed",
    "CommitOutcomeUnknown",
    "ConfigChange",
    "ConfigEntry",
    "ConfigErrors",
    "ConfigResource",
    "ConfigSource",
    "ConfigSynonym",
    "ConfigType",
    "Consumer",
    "ConsumerBatch",
    "ConsumerStatus",
    "Coordinator",
    "CorruptBatch",
    "Delivery",
    "DeliveryFailed",
    "DeliveryTimedOut",
    "DeserializationFailed",
    "ErrorCode",
    "FailedRecord",
    "ForkedClient",
    "GroupDescription",
    "GroupErrors",
    "GroupListing",
    "GroupMetadata",
    "GroupRebalance",
    "InvalidAssignment",
    "InvalidSetting",
    "InvalidTransactionState",
    "ListenerTimedOut",
    "LogDirDescription",
    "LogDirReplica",
    "LogTruncated",
    "MaxPollIntervalExceeded",
    "MemberDescription",
    "MinibrokerError",
    "NetworkError",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetErrors",
    "PartMetadata",
    "PartialFailure",
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "PartitionerFailed",
    "Partitions",
    "PatternType",
    "Processor",
    "Producer",
    "ProducerErrors",
    "ProducerFenced",
    "ProducerRecord",
    "ProducerState",
    "QuotaEntity",
    "QuotaErrors",
    "RebalanceListener",
    "RebalanceProtocol",
    "Record",
    "RecordMetadata",
    "RecordPartitioner",
    "ResourcePattern",
    "ResourceType",
    "RoundRobin",
    "ScramCredentialInfo",
    "Security",
    "SerializationFailed",
    "Subscription",
    "TimelineRead",
    "TimelineReader",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "Transaction",
    "TransactionAborted",
    "TransactionDescription",
    "TransactionError",
    "TransactionListing",
    "TransactionalIdErrors",
    "UserErrors",
    "UserScramCredentialDeletion",
    "UserScramCredentialUpsertion",
    "WithinListener",
    "WithoutKey",
    "WrongEventLoop",
    "crc32",
    "murmur2",
]

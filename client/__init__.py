"""The client library for asyncio: Producer, Consumer and Admin.

A record passes through producer.py, producing/accumulator.py and producing/sender.py; it comes back through
fetching/fetcher.py and consumer.py. group/member.py joins a group. Under all of them are cluster/runtime.py and
cluster/metadata.py.
"""

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import (
    ConfigChange,
    ConfigEntry,
    ConfigErrors,
    ConfigResource,
    ConfigSynonym,
)
from minibroker.client.administering.groups import GroupDescription, GroupErrors, GroupListing, MemberDescription
from minibroker.client.administering.log_dirs import LogDirDescription, LogDirReplica
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.requests import BrokerDescription, ClusterDescription
from minibroker.client.administering.timeline import TimelineRead, TimelineReader
from minibroker.client.administering.topics import NewTopic, PartitionDescription, TopicDescription
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    ApiTimedOut,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    CommitFailed,
    CorruptBatch,
    DeliveryFailed,
    DeliveryTimedOut,
    DeserializationFailed,
    FailedRecord,
    ForkedClient,
    InvalidAssignment,
    InvalidSetting,
    ListenerTimedOut,
    LogTruncated,
    MaxPollIntervalExceeded,
    PartialFailure,
    PartitionerFailed,
    PartitionErrors,
    SerializationFailed,
    TopicErrors,
    WithinListener,
    WrongEventLoop,
)
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.group.assignors import Assignor, RebalanceProtocol, Subscription
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.group.consumer_status import ConsumerStatus
from minibroker.client.group.listener import RebalanceListener
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
from minibroker.client.settings import Address
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import AlterOperation, ConfigSource, ConfigType, ResourceType, TopicPartition

__all__ = [
    "Address",
    "Admin",
    "AlterOperation",
    "ApiTimedOut",
    "ArrowArray",
    "Assignor",
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
    "InvalidAssignment",
    "InvalidSetting",
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
    "PartMetadata",
    "PartialFailure",
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "PartitionerFailed",
    "Partitions",
    "Producer",
    "RebalanceListener",
    "RebalanceProtocol",
    "Record",
    "RecordMetadata",
    "RecordPartitioner",
    "ResourceType",
    "RoundRobin",
    "SerializationFailed",
    "Subscription",
    "TimelineRead",
    "TimelineReader",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "WithinListener",
    "WithoutKey",
    "WrongEventLoop",
    "crc32",
    "murmur2",
]

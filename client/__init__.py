"""The client library: produce, consume and administer, from asyncio. See Producer, Consumer and Admin.

File map: producer.py (send) -> accumulator.py (which batch, in what order; pure) and batch.py (pure) -> sender.py
(requests, retries); consumer.py (iteration, positions) <- fetcher.py (requests, prefetching) <- fetch_state.py (what is
due; pure) and offsets.py (look-ups); admin.py. All three derive from lifecycle.py (start, close), and under them is
runtime.py = connections.py + metadata.py + tasks.py. Sender and fetcher use leader_requests.py. Anything that waits for
long says so through stalls.py.
"""

from minibroker.client.admin import (
    Admin,
    BrokerDescription,
    ClusterDescription,
    LogDirDescription,
    LogDirReplica,
    NewTopic,
    PartitionDescription,
    TopicDescription,
)
from minibroker.client.configs import ConfigChange, ConfigEntry, ConfigResource, ConfigSynonym
from minibroker.client.consumer import Consumer
from minibroker.client.delivery import Delivery, RecordMetadata
from minibroker.client.errors import (
    ApiTimedOut,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    ConfigErrors,
    CorruptBatch,
    DeliveryFailed,
    DeliveryTimedOut,
    FailedRecord,
    ForkedClient,
    InvalidSetting,
    LogTruncated,
    PartitionErrors,
    TopicErrors,
    WrongEventLoop,
)
from minibroker.client.offsets import OffsetAndTimestamp
from minibroker.client.partitioners import Partitioner, WithoutKey, crc32, murmur2
from minibroker.client.producer import Producer
from minibroker.client.reassignment import PartitionReassignment
from minibroker.client.records import ConsumerBatch, Record
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import AlterOperation, ConfigSource, ConfigType, ResourceType, TopicPartition

__all__ = [
    "Admin",
    "AlterOperation",
    "ApiTimedOut",
    "BrokerDescription",
    "BrokerError",
    "BrokersFailed",
    "BufferFull",
    "ClientCrashed",
    "Closed",
    "ClusterDescription",
    "ConfigChange",
    "ConfigEntry",
    "ConfigErrors",
    "ConfigResource",
    "ConfigSource",
    "ConfigSynonym",
    "ConfigType",
    "Consumer",
    "ConsumerBatch",
    "CorruptBatch",
    "Delivery",
    "DeliveryFailed",
    "DeliveryTimedOut",
    "ErrorCode",
    "FailedRecord",
    "ForkedClient",
    "InvalidSetting",
    "LogDirDescription",
    "LogDirReplica",
    "LogTruncated",
    "MinibrokerError",
    "NetworkError",
    "NewTopic",
    "OffsetAndTimestamp",
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "Producer",
    "Record",
    "RecordMetadata",
    "ResourceType",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "WithoutKey",
    "WrongEventLoop",
    "crc32",
    "murmur2",
]

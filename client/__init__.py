"""The client library: produce, consume and administer, from asyncio. See Producer, Consumer and Admin.

File map: producer.py (send) -> accumulator.py (which batch, in what order; pure) and batch.py (pure) -> sender.py
(requests, retries); consumer.py (iteration, positions) <- fetcher.py (requests, prefetching) <- fetch_state.py (what is
due; pure) and offsets.py (look-ups). In a group: group_member.py (rebalances) <- group_states.py (pure), assignors.py
(pure) and activity.py (what the user is doing); heart.py (heartbeats, beside the loop), commits.py and auto_commit.py,
coordinators.py (who coordinates), consumer_status.py (why nothing arrives). admin.py. All three derive from lifecycle.py (start, close), and under them is
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
from minibroker.client.commits import OffsetAndMetadata
from minibroker.client.configs import ConfigChange, ConfigEntry, ConfigResource, ConfigSynonym
from minibroker.client.consumer import Consumer
from minibroker.client.consumer_status import ConsumerStatus
from minibroker.client.delivery import Delivery, RecordMetadata
from minibroker.client.errors import (
    ApiTimedOut,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    CommitFailed,
    ConfigErrors,
    CorruptBatch,
    DeliveryFailed,
    DeliveryTimedOut,
    FailedRecord,
    InvalidSetting,
    LogTruncated,
    MaxPollIntervalExceeded,
    PartitionErrors,
    TopicErrors,
    WrongEventLoop,
)
from minibroker.client.offsets import OffsetAndTimestamp
from minibroker.client.partitioners import Partitioner, WithoutKey, crc32, murmur2
from minibroker.client.producer import Producer
from minibroker.client.reassignment import PartitionReassignment
from minibroker.client.rebalance_listener import RebalanceListener
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
    "CorruptBatch",
    "Delivery",
    "DeliveryFailed",
    "DeliveryTimedOut",
    "ErrorCode",
    "FailedRecord",
    "InvalidSetting",
    "LogDirDescription",
    "LogDirReplica",
    "LogTruncated",
    "MaxPollIntervalExceeded",
    "MinibrokerError",
    "NetworkError",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "Producer",
    "RebalanceListener",
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

"""The client library: produce, consume and administer, from asyncio. See Producer, Consumer and Admin.

File map: producer.py (send) -> columns.py (send_batch; pure), accumulator.py (which batch, in what order; pure) and
batch.py (pure) -> sender.py (requests, retries); consumer.py (iteration, positions) <- fetcher.py (requests,
prefetching) <- fetch_state.py (what is due; pure) and offsets.py (look-ups). In a group: group_member.py (rebalances)
<- group_states.py (pure), assignors.py (pure) and activity.py (what the user is doing); heart.py (heartbeats, beside
the loop), commits.py and auto_commit.py, coordinators.py (who coordinates), consumer_status.py (why nothing arrives).
admin.py, with groups.py for what it does to groups. All three derive from lifecycle.py (start, close), and under them
is runtime.py = connections.py + metadata.py + tasks.py. Sender and fetcher use leader_requests.py. Anything that waits
for long says so through stalls.py. The blocking clients are in sync/.
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
from minibroker.client.administering.configs import ConfigChange, ConfigEntry, ConfigResource, ConfigSynonym
from minibroker.client.administering.groups import GroupDescription, GroupListing, MemberDescription
from minibroker.client.administering.offsets import OffsetAndTimestamp
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    ApiTimedOut,
    BatchDeliveryFailed,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    CommitFailed,
    ConfigErrors,
    CorruptBatch,
    DeliveryFailed,
    DeliveryTimedOut,
    DeserializationFailed,
    FailedRecord,
    ForkedClient,
    GroupErrors,
    InvalidSetting,
    ListenerTimedOut,
    LogTruncated,
    MaxPollIntervalExceeded,
    PartitionerFailed,
    PartitionErrors,
    SerializationFailed,
    TopicErrors,
    WithinListener,
    WrongEventLoop,
)
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.group.consumer_status import ConsumerStatus
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import BatchDelivery, BatchMetadata, Delivery, PartMetadata, RecordMetadata
from minibroker.client.producing.partitioners import Partitioner, Partitions, RoundRobin, WithoutKey, crc32, murmur2
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import AlterOperation, ConfigSource, ConfigType, ResourceType, TopicPartition

__all__ = [
    "Admin",
    "AlterOperation",
    "ApiTimedOut",
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
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "PartitionerFailed",
    "Partitions",
    "Producer",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "ResourceType",
    "RoundRobin",
    "SerializationFailed",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "WithinListener",
    "WithoutKey",
    "WrongEventLoop",
    "crc32",
    "murmur2",
]

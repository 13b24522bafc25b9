"""Every setting of a broker and of a topic: Kafka's name, type, bounds, default and meaning, in one place each.

A field `log_dirs` is the setting `log.dirs`. Values arrive as text (a properties file, `--override`, a topic's
znode) and leave typed; whatever is unknown, malformed or out of bounds is one `InvalidConfig` that names it.
"""

import ast
import difflib
import functools
import inspect
import os
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from minibroker.protocol.connections.broker_proof import LEAST_SECRET_BYTES
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import (
    CONTROL_LISTENER,
    DEFAULT_LISTENER,
    REPLICATED,
    WITHOUT_EFFECT,
    ConfigType,
    Endpoint,
)
from minibroker.protocol.records import MAX_BATCH_BYTES
from minibroker.protocol.world import Disk

Config = TypeVar("Config", bound=msgspec.Struct)


_LONGEST_SHOWN = 80


class InvalidConfig(MinibrokerError, ValueError):
    """A setting is unknown, malformed or out of bounds. Names the setting, the value and the rule."""


def _kafka_name(field: str) -> str:
    return field.replace("_", ".")


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BatchBytes = Annotated[int, Meta(ge=1, le=MAX_BATCH_BYTES)]
_UNBOUNDED = 2**63 - 1
"""The bound is that of the type: for a person there is none."""
Rate = Annotated[int, Meta(ge=1, le=_UNBOUNDED)]
Limit = Annotated[int, Meta(ge=-1, le=_UNBOUNDED)]
"""-1: none."""
Durability = Literal["replicated", "synced"]
RecordFormat = Literal["columns", "kafka"]
Age = Annotated[int, Meta(ge=1, le=_UNBOUNDED)]
"""In milliseconds."""
Duration = Annotated[int, Meta(ge=0, le=_UNBOUNDED)]
"""In milliseconds."""
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
CompressionType = Literal["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"]
GzipLevel = Annotated[int, Meta(ge=-1, le=9)]
LZ4_DEFAULT_LEVEL = 9
Lz4Level = Annotated[int, Meta(ge=1, le=17)]
ZstdLevel = Annotated[int, Meta(ge=-131_072, le=22)]
FormatVersion = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+){0,2}(-IV[0-9]+)?$",
        description="a version of Kafka, such as 3.0 or 3.0-IV1",
    ),
]
TimestampType = Literal["CreateTime", "LogAppendTime"]
CleanupPolicy = Annotated[
    str,
    Meta(
        pattern="^((delete|compact)( *, *(delete|compact))*)?$",
        description="delete, compact, compact,delete, or nothing",
    ),
]


ThrottledReplicas = Annotated[
    str, Meta(pattern=r"^(\*|([0-9]+:[0-9]+(,[0-9]+:[0-9]+)*)?)$", description="*, or PARTITION:BROKER,..., or nothing")
]


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=_kafka_name, forbid_unknown_fields=True):
    broker_id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """The broker's number. It is unique in the cluster and never changes for the broker's data directories."""

    log_dirs: Annotated[str, Meta(description="DIRECTORY,...")]
    """The data directories, separated by commas, ideally each on its own disk. A new replica goes to the directory with
    the fewest replicas. A directory whose disk fails or hangs goes offline with its replicas; the broker stops when
    none is left."""

    zookeeper_connect: Annotated[str, Meta(description="HOST:PORT,..., and /CHROOT after the last, if any")]
    """`host:port,host:port/chroot`."""

    zookeeper_digest_file: str | None = None
    """A file with `NAME:PASSWORD`, the same for all brokers of the cluster: the brokers' credential for ZooKeeper
    (scheme digest; not in Kafka, which uses SASL). See [ZooKeeper](zookeeper.md)."""
    zookeeper_set_acl: bool = False
    """Whether only clients with the credential in `zookeeper.digest.file` can change the nodes that this broker creates
    in ZooKeeper. Every client can read them."""
    zookeeper_session_timeout_ms: Annotated[int, Meta(ge=500, le=300_000)] = 6_000
    """Time after which ZooKeeper considers a silent broker dead."""
    zookeeper_connection_timeout_ms: Milliseconds = 18_000
    """Time that a starting broker waits for ZooKeeper."""

    listeners: str = f"{DEFAULT_LISTENER}://127.0.0.1:9092,{CONTROL_LISTENER}://127.0.0.1:0"
    """The addresses to listen on: `NAME://HOST:PORT,...`. Port 0 chooses a free port."""

    advertised_listeners: str = ""
    """The addresses that clients and other brokers connect to, if they differ from `listeners`. As in Kafka, nothing
    checks that they are reachable. If they change while the broker runs, the broker registers again, and other brokers
    lead its partitions until it is in sync. Any broker can change this setting of another one, so a wrong address can
    be corrected."""

    control_plane_listener_name: str = CONTROL_LISTENER
    """The listener that is reserved for the controller's requests."""
    broker_rack: str | None = None
    """The broker's rack, which clients receive with the metadata. If all brokers have one, the replicas of a new
    partition are spread over as many racks as possible."""

    broker_secret_file: str | None = None
    """A file with a secret of at least 16 characters, the same for all brokers of the cluster (not in Kafka). Brokers
    use it to authenticate to each other; orders and replica fetches from other senders are rejected. If neither this
    nor `broker.secret` is set, every sender is trusted. To introduce a secret, stop all brokers first."""
    broker_secret: str | None = None
    """The secret itself, if a file cannot be used. It is visible to everyone who can read the command line or the
    properties file."""

    num_network_threads: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Network processors of the data plane; each serves a share of the connections. (They are tasks, not threads.)"""
    num_io_threads: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Request handlers of the data plane. (They are tasks, not threads.)"""
    queued_max_requests: Count = 500
    """Requests that may wait for a handler. When the queue is full, the broker stops reading from connections."""
    socket_request_max_bytes: Bytes = 100 * 1024 * 1024
    """The largest request. A client that sends a larger one is disconnected."""
    connections_max_idle_ms: Milliseconds = 600_000
    """Time after which an idle data connection is closed."""
    max_connections: Count = 4_000
    """The maximum number of connections for each plane. It is reduced if the process may not open enough files (`ulimit
    -Hn`), one in eight of which is reserved for log files."""
    max_connections_per_ip: Count = 2_000
    """The maximum number of connections from one address."""
    max_connection_creation_rate: Count = 1_000
    """The maximum number of new connections per second."""

    num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Partitions of a topic whose creator does not give a number."""
    default_replication_factor: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Replicas of a topic whose creator does not give a number."""
    min_insync_replicas: Count | None = None
    """Replicas that must be in sync for records to be committed. Unset: 2 for topics with three or more replicas,
    otherwise 1."""

    auto_create_topics_enable: bool = False
    """Whether the broker creates a missing topic when a client of Kafka's protocol requests its metadata and allows the
    creation (`allow.auto.create.topics`). The topic gets `num.partitions` and `default.replication.factor`.
    minibroker's own clients never allow it."""
    delete_topic_enable: bool = True
    """Whether topics can be deleted. Use the same value on all brokers, because the controller's applies."""

    unclean_leader_election_enable: bool = False
    """Whether a replica that may lack acknowledged records may become leader if no other can. The records that it lacks
    are lost."""

    auto_leader_rebalance_enable: bool = True
    """Whether the controller moves leaders back to their preferred brokers, the first replica of each partition."""
    leader_imbalance_per_broker_percentage: Annotated[int, Meta(ge=0, le=100)] = 10
    """The controller moves a broker's leaders back if more than this percentage of the partitions that prefer the
    broker are led by other brokers."""
    leader_imbalance_check_interval_seconds: Count = 300
    """Time between the controller's checks for such brokers. It also checks some seconds after a broker has joined, and
    again until that broker is in sync. (Kafka uses only the interval.)"""

    log_durability: Durability = REPLICATED
    """The `durability` of a topic whose creator does not choose one (not in Kafka). It is stored with the topic and
    stays the same."""

    compression_type: CompressionType = "producer"
    """The codec of all batches. The leader recompresses batches with another codec before it appends them;
    `message.max.bytes` then also applies to the result. `producer` keeps each batch as its producer compressed it."""
    compression_gzip_level: GzipLevel = -1
    """The leader's gzip level, from 1 (fast) to 9 (small). -1 is the codec's default."""
    compression_lz4_level: Lz4Level = LZ4_DEFAULT_LEVEL
    """The leader's lz4 level. The default, 9, is the fastest, as in Kafka."""
    compression_zstd_level: ZstdLevel = 3
    """The leader's zstd level."""
    log_message_timestamp_type: TimestampType = "CreateTime"
    """Whether a record has the time given by its producer (`CreateTime`) or the time at which the broker appends it
    (`LogAppendTime`)."""
    log_message_timestamp_before_max_ms: Duration = _UNBOUNDED
    """The maximum time by which a record's timestamp may lie before the broker's clock; other records are rejected.
    Records without a timestamp are accepted, as are all records with LogAppendTime."""
    log_message_timestamp_after_max_ms: Duration = _UNBOUNDED
    """The maximum time by which a record's timestamp may lie after the broker's clock."""
    log_message_timestamp_difference_max_ms: Duration = _UNBOUNDED
    """The value of both limits if they are not set (deprecated in Kafka)."""
    message_max_bytes: BatchBytes = 1_048_588
    """The largest batch as sent, that is, after compression (Kafka allows up to 2 GB). Regardless of this limit, the
    records of a batch may take at most 64 MiB decompressed, and their headers at most 8 MiB."""
    log_segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] = 1024 * 1024 * 1024
    """The maximum size of a segment. The next segment begins before it would be exceeded."""
    log_roll_ms: Age = 604_800_000
    """A new segment begins when a batch is this much younger than the first batch of the segment."""
    log_roll_jitter_ms: Annotated[int, Meta(ge=0, le=_UNBOUNDED)] = 0
    """The maximum random time by which a segment is closed earlier, so that logs do not all begin new segments at the
    same time. A larger value than `log.roll.ms` counts as `log.roll.ms`."""
    log_retention_ms: Limit = 604_800_000
    """The age, by their timestamps, at which records are deleted, a segment at a time; -1: never. The leader decides
    and the other replicas follow (in Kafka, each replica decides for itself)."""
    log_retention_bytes: Limit = -1
    """The oldest segments of a partition are deleted while at least this many bytes remain without them; -1: no
    limit."""
    log_retention_check_interval_ms: Milliseconds = 300_000
    """Time between checks for records to delete."""
    log_cleanup_policy: CleanupPolicy = "delete"
    """How old records are removed. `delete`: by age and size (`log.retention.ms`, `log.retention.bytes`). `compact`:
    the latest record of each key stays forever and earlier ones are removed; a record without a value (a tombstone)
    deletes its key. `compact,delete`: both. Empty: all records stay."""
    log_cleaner_enable: bool = True
    """Whether logs are compacted."""
    log_cleaner_backoff_ms: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 15_000
    """Time until the next check if there is no log to compact. Values below 100 count as 100."""
    log_cleaner_dedupe_buffer_size: Annotated[int, Meta(ge=1024 * 1024, le=2**63 - 1)] = 128 * 1024 * 1024
    """Memory that a compaction may use for the keys it has seen (about 200 bytes per key). A log with more new keys is
    compacted in several passes."""
    log_cleaner_io_max_bytes_per_second: Annotated[float, Meta(ge=1.0)] = sys.float_info.max
    """The maximum rate at which compaction reads and writes, both together."""
    log_cleaner_min_cleanable_ratio: Ratio = 0.5
    """A log is compacted when more than this fraction of its bytes is new since the last compaction."""
    log_cleaner_min_compaction_lag_ms: Duration = 0
    """The minimum time that a record stays before compaction may remove it."""
    log_cleaner_max_compaction_lag_ms: Age = 2**63 - 1
    """A log that has a new record older than this is compacted, however small its new part is."""
    log_cleaner_delete_retention_ms: Duration = 86_400_000
    """Time that a tombstone stays after the records that it deletes were removed. A consumer that reads a log from its
    beginning must reach the end within this time, or it may keep deleted keys. The same holds for a replica that was
    down."""
    log_index_interval_bytes: Bytes = 4_096
    """Bytes of the log per entry of its offset index."""
    log_flush_interval_messages: Annotated[int, Meta(ge=1, le=_UNBOUNDED)] = _UNBOUNDED
    """A log is flushed in the background each time it has grown by this many records."""
    log_flush_interval_ms: Duration = _UNBOUNDED
    """A log is flushed in the background when it has a record that has been unflushed for this time. (Kafka also waits
    for `log.flush.scheduler.interval.ms`, which by default never ends.)"""
    log_flush_offset_checkpoint_interval_ms: Milliseconds = 60_000
    """Time between flushes of all logs, which also record the flushed offsets. After a crash, a broker checks only the
    records behind these offsets."""

    producer_id_expiration_ms: Milliseconds = 86_400_000
    """Time after which a log forgets a silent idempotent producer."""

    background_threads: Count = 10
    """Without effect: tasks do the work of these threads in Kafka."""
    num_replica_fetchers: Count = 1
    """Without effect: a follower has several fetches in flight to each leader."""
    num_recovery_threads_per_data_dir: Count = 1
    """Without effect: each log directory has its own worker threads."""
    log_cleaner_threads: Count = 1
    """Without effect: a broker compacts one log at a time."""
    log_cleaner_io_buffer_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 524_288
    """Without effect: logs are compacted in small pieces."""
    log_cleaner_io_buffer_load_factor: Ratio = 0.9
    """Without effect: `log.cleaner.dedupe.buffer.size` limits the memory for keys."""
    log_segment_delete_delay_ms: Duration = 60_000
    """Without effect: the files of deleted records are removed when no replica needs them."""
    log_preallocate: bool = False
    """Without effect: files grow as they are written."""
    log_index_size_max_bytes: Annotated[int, Meta(ge=4, le=2**31 - 1)] = 10_485_760
    """Without effect: indexes grow as they are written."""
    log_message_downconversion_enable: bool = True
    """Without effect: the record formats of Kafka before 0.11 are not supported."""
    log_message_format_version: FormatVersion = "3.0-IV1"
    """Without effect, as in Kafka since 3.0."""

    replica_lag_time_max_ms: Milliseconds = 30_000
    """A follower leaves the ISR if it has not caught up with its leader's log end for this time."""
    replica_fetch_max_bytes: Bytes = 1024 * 1024
    """The maximum bytes per partition in an answer to a follower. At least one batch is always sent."""
    replica_fetch_response_max_bytes: Bytes = 10 * 1024 * 1024
    """The maximum bytes in a whole answer to a follower. At least one batch is always sent."""
    replica_fetch_wait_max_ms: Milliseconds = 500
    """The maximum time that a leader holds back an answer until it has `replica.fetch.min.bytes`. If a follower has
    more than 500 partitions of one leader, the time grows in proportion, up to a tenth of `replica.lag.time.max.ms`."""
    replica_fetch_min_bytes: Count = 1
    """The minimum bytes in an answer to a follower; the leader waits until it has them."""
    replica_fetch_backoff_ms: Milliseconds = 100
    """The maximum time that a follower waits after an error. It grows in proportion above 500 partitions of one
    leader."""
    replica_socket_timeout_ms: Milliseconds = 30_000
    """Time that a follower waits for an answer."""
    leader_replication_throttled_rate: Rate | None = None
    """The maximum bytes per second that this broker sends, as a leader, to the out-of-sync replicas named in a topic's
    `leader.replication.throttled.replicas`. Unset: no limit."""
    follower_replication_throttled_rate: Rate | None = None
    """The maximum bytes per second that this broker fetches for the out-of-sync replicas named in a topic's
    `follower.replication.throttled.replicas`. Unset: no limit."""
    replica_high_watermark_checkpoint_interval_ms: Milliseconds = 5_000
    """Time between checkpoints of the high watermarks."""
    fetch_max_bytes: Bytes = 55 * 1024 * 1024
    """The maximum bytes in any answer to a fetch. An answer never exceeds 4 MiB, or 2 MiB (minibroker's own consumers:
    1 MiB) if the consumer waits for at most half of that, unless it is a single larger batch."""

    offsets_topic_num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """Partitions of `__consumer_offsets`. A group's name assigns it permanently to one partition, whose leader
    coordinates the group."""
    offsets_topic_replication_factor: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Replicas of `__consumer_offsets`. The controller creates the topic as soon as this many brokers are
    registered."""
    offsets_topic_segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] = 100 * 1024 * 1024
    """The `segment.bytes` of `__consumer_offsets`. Small segments are compacted early, so that a new coordinator has
    less to read."""
    offsets_commit_timeout_ms: Milliseconds = 5_000
    """Time that a coordinator waits until its writes (commits, assignments) are replicated."""
    offsets_retention_minutes: Count = 10_080
    """Time that an unused committed offset is kept. It counts from the latest of: the commit; the group losing its last
    member (KIP-211); its members ceasing to read the topic; the group getting its current coordinator. Time during
    which the broker was stopped hardly counts. (Kafka uses wall clocks and ignores changes of the coordinator.)"""
    offsets_retention_check_interval_ms: Milliseconds = 600_000
    """Time between a coordinator's checks for expired offsets."""
    offset_metadata_max_bytes: Annotated[int, Meta(ge=0, le=32_767)] = 4_096
    """The maximum length of the text that may be committed with an offset, in UTF-16 units, as in Kafka, not in
    bytes."""
    group_min_session_timeout_ms: Milliseconds = 6_000
    """The shortest session timeout that a member may request. A short timeout detects dead members sooner, at the cost
    of more heartbeats."""
    group_max_session_timeout_ms: Milliseconds = 1_800_000
    """The longest session timeout that a member may request."""
    group_initial_rebalance_delay_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 100
    """Time that a coordinator waits for more members after the first one has joined an empty group, to avoid a
    rebalance for each of them. Kafka's default is 3000, for fleets whose members take seconds to start."""
    group_max_size: Count = 1_000
    """The maximum number of members of a group (Kafka: unlimited)."""

    broker_crash_detection_ms: Milliseconds = 500
    """Time for which a broker whose connection closed may be unreachable before it is considered dead. If its host
    refuses connections, it is considered dead at once (not in Kafka)."""

    controlled_shutdown_enable: bool = True
    """Whether a broker that is asked to stop first moves its leaders to other brokers."""
    controlled_shutdown_max_retries: Count = 3
    """How often a stopping broker asks the controller to move its leaders before it stops anyway."""
    controlled_shutdown_retry_backoff_ms: Milliseconds = 1_000
    """Time between these requests. Kafka's default is 5000, so a stop that cannot succeed takes 10 s. Here, a new
    controller is in office within tenths of a second, and a restarted broker is back within one or two seconds."""

    metrics_listener: Annotated[
        str, Meta(pattern=r"^(|(\[[0-9a-fA-F:]+\]|[^:]+):[0-9]{1,5})$", description="HOST:PORT, or nothing")
    ] = ""
    """`HOST:PORT` where metrics are served at `/metrics` (not in Kafka). Port 0 chooses a free port. Empty: no
    metrics."""

    def __post_init__(self) -> None:
        if self.broker_secret_file is not None and self.broker_secret is not None:
            raise ValueError("both broker.secret.file and broker.secret are set: keep one of them")
        if self.zookeeper_set_acl and self.zookeeper_digest_file is None:
            raise ValueError(
                "zookeeper.set.acl is true without zookeeper.digest.file: nobody could change what is made"
            )
        self.log_directories()
        problem = _lags_problem(
            "log.cleaner.min.compaction.lag.ms",
            self.log_cleaner_min_compaction_lag_ms,
            "log.cleaner.max.compaction.lag.ms",
            self.log_cleaner_max_compaction_lag_ms,
        )
        if problem is not None:
            raise ValueError(problem)
        if self.replica_fetch_wait_max_ms > self.replica_lag_time_max_ms:
            raise ValueError(
                f"replica.fetch.wait.max.ms {self.replica_fetch_wait_max_ms} exceeds replica.lag.time.max.ms "
                f"{self.replica_lag_time_max_ms}: idle followers would leave the ISR"
            )
        address = self.metrics_address()
        if address is not None and address[1] > 65_535:
            raise ValueError(f"metrics.listener {self.metrics_listener!r}: there is no port {address[1]}")

    def log_directories(self) -> list[str]:
        """The absolute paths, in the order of the setting."""
        names = [name.strip() for name in self.log_dirs.split(",")]
        if not all(names):
            raise ValueError(f"log.dirs {self.log_dirs!r} names no directory: give DIRECTORY,DIRECTORY,...")
        paths = [os.path.abspath(name) for name in names]
        for number, path in enumerate(paths):
            for other in paths[:number]:
                if path == other:
                    raise ValueError(f"log.dirs names {path} twice")
                if os.path.commonpath((path, other)) in (path, other):
                    raise ValueError(f"log.dirs names {other} and {path}, of which one is within the other")
        return paths

    def metrics_address(self) -> tuple[str, int] | None:
        """Where to serve metrics; None: nowhere."""
        host, _, port = self.metrics_listener.rpartition(":")
        return (host.strip("[]"), int(port)) if host else None

    def listener_endpoints(self) -> list[Endpoint]:
        """Where to bind. The control listener is always there; its port defaults to a free one."""
        endpoints = parse_listeners("listeners", self.listeners)
        if not any(e.listener == self.control_plane_listener_name for e in endpoints):
            endpoints.append(Endpoint(self.control_plane_listener_name, endpoints[0].host, 0))
        return endpoints

    def advertised_endpoints(self, ports: Mapping[str, int]) -> list[Endpoint]:
        """What to register, given the port that each listener was bound to."""
        advertised = {e.listener: e for e in self.listener_endpoints()}
        if self.advertised_listeners:
            advertised |= {e.listener: e for e in parse_advertised(self.advertised_listeners, advertised)}
        for endpoint in advertised.values():
            if endpoint.host in _ALL_ADDRESSES:
                raise InvalidConfig(
                    f"the listener {endpoint.listener} is on {endpoint.host!r}, which nobody can connect to: "
                    f"set advertised.listeners to the address that others should use"
                )
        return [Endpoint(e.listener, e.host, e.port or ports[e.listener]) for e in advertised.values()]


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, rename=_kafka_name, forbid_unknown_fields=True):
    """What a topic may set for itself; None: the broker's own setting of the same meaning."""

    min_insync_replicas: Count | None = None
    """The broker's `min.insync.replicas`, for this topic. With fewer replicas in sync, acks=all is rejected and
    consumers see no new records, including those written with acks=1. A replica that leaves the ISR at that point can
    therefore still be elected without loss. A topic with fewer replicas than this needs all of them in sync."""
    unclean_leader_election_enable: bool | None = None
    """The broker's `unclean.leader.election.enable`, for this topic."""
    durability: Durability | None = None
    """When a record is acknowledged (acks=all) and visible to consumers. `replicated`: when it is in the memory of
    every replica in sync, as in Kafka. `synced`: when it is on the disk of every replica in sync, so that even a power
    cut of all hosts loses nothing. It is fixed when the topic is created, because records acknowledged before a change
    might not be on any disk. Not in Kafka: see durability.md."""
    max_message_bytes: BatchBytes | None = None
    """The broker's `message.max.bytes`, for this topic."""
    segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] | None = None
    """The broker's `log.segment.bytes`, for this topic."""
    segment_ms: Age | None = None
    """The broker's `log.roll.ms`, for this topic."""
    segment_jitter_ms: Annotated[int, Meta(ge=0, le=_UNBOUNDED)] | None = None
    """The broker's `log.roll.jitter.ms`, for this topic."""
    retention_ms: Limit | None = None
    """The broker's `log.retention.ms`, for this topic."""
    retention_bytes: Limit | None = None
    """The broker's `log.retention.bytes`, for this topic."""
    cleanup_policy: CleanupPolicy | None = None
    """The broker's `log.cleanup.policy`, for this topic. With `compact`, a record without a key is rejected. If a topic
    is switched to `compact`, the first compaction removes its existing records without a key, as in Kafka."""
    min_cleanable_dirty_ratio: Ratio | None = None
    """The broker's `log.cleaner.min.cleanable.ratio`, for this topic."""
    min_compaction_lag_ms: Duration | None = None
    """The broker's `log.cleaner.min.compaction.lag.ms`, for this topic."""
    max_compaction_lag_ms: Age | None = None
    """The broker's `log.cleaner.max.compaction.lag.ms`, for this topic."""
    delete_retention_ms: Duration | None = None
    """The broker's `log.cleaner.delete.retention.ms`, for this topic."""
    index_interval_bytes: Bytes | None = None
    """The broker's `log.index.interval.bytes`, for this topic."""
    record_format: RecordFormat = "columns"
    """The format in which the log stores batches of minibroker's own producers: `columns`, as sent, or `kafka`, as
    records of Kafka's protocol. All clients can read both formats, but the other format must be converted by its reader
    or by the broker, so choose `kafka` for a topic that is read mostly by Kafka's clients. The leader converts batches
    before it appends them; existing batches stay unchanged. Not in Kafka."""
    compression_type: CompressionType | None = None
    """The broker's `compression.type`, for this topic."""
    compression_gzip_level: GzipLevel | None = None
    """The broker's `compression.gzip.level`, for this topic."""
    compression_lz4_level: Lz4Level | None = None
    """The broker's `compression.lz4.level`, for this topic."""
    compression_zstd_level: ZstdLevel | None = None
    """The broker's `compression.zstd.level`, for this topic."""
    message_timestamp_type: TimestampType | None = None
    """The broker's `log.message.timestamp.type`, for this topic. A change applies to records written from then on."""
    message_timestamp_before_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.before.max.ms`, for this topic."""
    message_timestamp_after_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.after.max.ms`, for this topic."""
    message_timestamp_difference_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.difference.max.ms`, for this topic."""
    flush_messages: Annotated[int, Meta(ge=1, le=_UNBOUNDED)] | None = None
    """The broker's `log.flush.interval.messages`, for this topic."""
    flush_ms: Duration | None = None
    """The broker's `log.flush.interval.ms`, for this topic."""
    file_delete_delay_ms: Duration | None = None
    """Without effect: see the broker's `log.segment.delete.delay.ms`."""
    preallocate: bool | None = None
    """Without effect: see the broker's `log.preallocate`."""
    segment_index_bytes: Annotated[int, Meta(ge=4, le=2**31 - 1)] | None = None
    """Without effect: see the broker's `log.index.size.max.bytes`."""
    message_downconversion_enable: bool | None = None
    """Without effect: see the broker's `log.message.downconversion.enable`."""
    message_format_version: FormatVersion | None = None
    """Without effect, as in Kafka since 3.0."""
    remote_storage_enable: Literal["false"] = "false"
    """Without effect: there is no tiered storage, so it cannot be enabled."""
    local_retention_ms: Annotated[int, Meta(ge=-2, le=_UNBOUNDED)] = -2
    """Without effect: there is no tiered storage."""
    local_retention_bytes: Annotated[int, Meta(ge=-2, le=_UNBOUNDED)] = -2
    """Without effect: there is no tiered storage."""
    leader_replication_throttled_replicas: ThrottledReplicas = ""
    """The replicas, by partition and leader, to which `leader.replication.throttled.rate` applies: `*` for all, or
    `PARTITION:BROKER,...`. Replicas in sync are never throttled."""
    follower_replication_throttled_replicas: ThrottledReplicas = ""
    """The replicas to which `follower.replication.throttled.rate` applies: `*` for all, or `PARTITION:BROKER,...`."""


SYNONYMS = {
    "min.insync.replicas": "min.insync.replicas",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
    "durability": "log.durability",
    "max.message.bytes": "message.max.bytes",
    "segment.bytes": "log.segment.bytes",
    "segment.ms": "log.roll.ms",
    "segment.jitter.ms": "log.roll.jitter.ms",
    "retention.ms": "log.retention.ms",
    "retention.bytes": "log.retention.bytes",
    "cleanup.policy": "log.cleanup.policy",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "compression.type": "compression.type",
    "compression.gzip.level": "compression.gzip.level",
    "compression.lz4.level": "compression.lz4.level",
    "compression.zstd.level": "compression.zstd.level",
    "message.timestamp.type": "log.message.timestamp.type",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.difference.max.ms": "log.message.timestamp.difference.max.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "preallocate": "log.preallocate",
    "segment.index.bytes": "log.index.size.max.bytes",
    "message.downconversion.enable": "log.message.downconversion.enable",
    "message.format.version": "log.message.format.version",
}
"""A topic's settings, and the broker's that hold where the topic has none."""

DYNAMIC = frozenset(SYNONYMS.values()) - {"log.durability", "log.message.format.version"} | {
    "advertised.listeners",
    "num.io.threads",
    "num.network.threads",
    "max.connections",
    "max.connections.per.ip",
    "max.connection.creation.rate",
    "background.threads",
    "num.replica.fetchers",
    "num.recovery.threads.per.data.dir",
    "log.cleaner.threads",
    "log.cleaner.io.buffer.size",
    "log.cleaner.io.buffer.load.factor",
    "log.cleaner.backoff.ms",
    "log.cleaner.dedupe.buffer.size",
    "log.cleaner.io.max.bytes.per.second",
    "log.retention.check.interval.ms",
    "producer.id.expiration.ms",
    "leader.replication.throttled.rate",
    "follower.replication.throttled.rate",
}
"""The settings of a broker that take effect while it runs (KIP-226), for one broker or for all (what Kafka calls
cluster-wide). All others are read when it starts."""

ADVERTISED_LISTENERS = "advertised.listeners"

PER_BROKER = frozenset({ADVERTISED_LISTENERS})
"""Those that cannot be set for all brokers."""

SENSITIVE = frozenset({"broker.secret"})
LISTS = frozenset(
    {
        "cleanup.policy",
        "log.cleanup.policy",
        "leader.replication.throttled.replicas",
        "follower.replication.throttled.replicas",
    }
)


def parse_listeners(setting: str, text: str) -> list[Endpoint]:
    """`NAME://HOST:PORT,...`, in order. Raises InvalidConfig."""
    endpoints: list[Endpoint] = []
    for part in text.split(","):
        name, separator, address = part.strip().partition("://")
        host, colon, port = address.rpartition(":")
        if not (name and separator and colon and _SHORT_NUMBER.fullmatch(port) and int(port) < 65_536):
            raise InvalidConfig(
                f"{setting} has {part.strip()!r}: NAME://HOST:PORT is expected, with a port from 0 to 65535"
            )
        if any(e.listener == name for e in endpoints):
            raise InvalidConfig(f"{setting} names the listener {name} twice")
        endpoints.append(Endpoint(name, host.removeprefix("[").removesuffix("]"), int(port)))
    return endpoints


_ALL_ADDRESSES = ("", "0.0.0.0", "::")


def parse_advertised(text: str, listeners: Collection[str]) -> list[Endpoint]:
    """An `advertised.listeners` of a broker that has these listeners. Raises InvalidConfig."""
    endpoints = parse_listeners(ADVERTISED_LISTENERS, text)
    for endpoint in endpoints:
        if endpoint.listener not in listeners:
            raise InvalidConfig(
                f"{ADVERTISED_LISTENERS} names {endpoint.listener}, which is not among listeners "
                f"({', '.join(listeners)})"
            )
        if endpoint.host in _ALL_ADDRESSES:
            raise InvalidConfig(
                f"{ADVERTISED_LISTENERS} has the host {endpoint.host!r} for {endpoint.listener}, which nobody can "
                f"connect to: give the host name or the address by which clients and other brokers reach this broker"
            )
    return endpoints


def _convert(values: Mapping[str, str], schema: type[Config], what: str) -> Config:
    trimmed = _trimmed(schema)
    values = {name: value.strip() if name in trimmed else value for name, value in values.items()}
    for name in _integers(schema):
        # msgspec would take 1e6 and 1.0 as well.
        value = values.get(name)
        if value is not None and not _INTEGER.fullmatch(value):
            raise InvalidConfig(f"{what} setting {name}={_shown(value)}: give {rule_of(schema, name)}")
    try:
        return msgspec.convert(values, schema, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        _, at, name = text.rpartition(" - at `$.")
        if at:
            name = name.rstrip("`")
            given = _shown(values.get(name, ""))
            raise InvalidConfig(f"{what} setting {name}={given}: give {rule_of(schema, name)}") from error
        if "missing required field" in text:
            missing = text.rpartition("required field `")[2].rstrip("`")
            raise InvalidConfig(f"{what} setting {missing} is missing: give {rule_of(schema, missing)}") from error
        if "unknown field" in text:
            unknown = text.rpartition("unknown field `")[2].rstrip("`")
            raise InvalidConfig(_unknown(what, unknown, schema)) from error
        raise InvalidConfig(f"{what} settings: {text}") from error


def _shown(value: str) -> str:
    """A value may be as long as any string, and the rule comes after it."""
    return repr(value) if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]!r}... ({len(value)} characters)"


def _unknown(what: str, name: str, schema: type[msgspec.Struct]) -> str:
    near = _near(name, schema)
    if near is not None:
        hint = f"did you mean {near}?"
    elif schema is TopicConfig:  # that docs/settings.md has all is in the error that a client is sent
        hint = "`minibroker configs describe --topic TOPIC --all` shows all that are"
    else:
        hint = "docs/settings.md has all that are"
    return f"{what} setting {name[:200]!r} is not known; {hint}"


def _near(name: str, schema: type[msgspec.Struct]) -> str | None:
    """What may have been meant: the setting of the same meaning of a broker or a topic, or the closest name. Never one
    without effect."""
    useful = [known for known, said in documentation(schema).items() if not said.startswith(WITHOUT_EFFECT)]
    if schema is TopicConfig:
        twins = {broker: topic for topic, broker in SYNONYMS.items()}
        twins |= {unit: twins[one.setting] for unit, one in _COARSER_UNITS.items()}
        twin = twins.get(name) or twins.get(f"log.{name}")
    else:
        twin = SYNONYMS.get(name)
        useful += _COARSER_UNITS
    if twin in useful:
        return twin
    return next(iter(difflib.get_close_matches(name, useful, n=1)), None)


class _CoarserUnit(NamedTuple):
    setting: str
    """The one in milliseconds."""
    ms: int
    least: int


_HOUR_MS = 3_600_000
_COARSER_UNITS = {
    "log.retention.minutes": _CoarserUnit("log.retention.ms", 60_000, -1),
    "log.retention.hours": _CoarserUnit("log.retention.ms", _HOUR_MS, -1),
    "log.roll.hours": _CoarserUnit("log.roll.ms", _HOUR_MS, 1),
    "log.roll.jitter.hours": _CoarserUnit("log.roll.jitter.ms", _HOUR_MS, 0),
}
"""Other names of settings of a broker, finer units first: the first that is given counts, as in Kafka."""


def _in_milliseconds(values: Mapping[str, str]) -> dict[str, str]:
    """The settings of a broker without coarser units. Raises InvalidConfig."""
    fine = {name: value for name, value in values.items() if name not in _COARSER_UNITS}
    for name, unit in _COARSER_UNITS.items():
        if name in values:
            fine.setdefault(unit.setting, str(_milliseconds(name, values[name].strip())))
    return fine


def _milliseconds(name: str, value: str) -> int:
    """Raises InvalidConfig."""
    unit = _COARSER_UNITS[name]
    number = int(value) if _INTEGER.fullmatch(value) and len(value) <= 11 else None
    if number is None or not unit.least <= number < 2**31:
        rule = f"a whole number from {unit.least} to {2**31 - 1}"
        raise InvalidConfig(f"broker setting {name}={_shown(value)}: give {rule}")
    return number * unit.ms if number > 0 else number


def coarser_unit_problem(name: str, value: str) -> str | None:
    """Why a setting cannot be changed while a broker runs, if it is one in minutes or hours. Raises InvalidConfig."""
    if name not in _COARSER_UNITS:
        return None
    setting = _COARSER_UNITS[name].setting
    return (
        f"broker setting {name} is read only when a broker starts, and only if {setting} is not given there: set "
        f"{setting}={_milliseconds(name, value.strip())} instead"
    )


_INTEGER = re.compile("-?[0-9]+")
_SHORT_NUMBER = re.compile("[0-9]{1,10}")


@functools.cache
def _fields(schema: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(schema)  # which resolves each annotation anew


@functools.cache
def known_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in _fields(schema))


@functools.cache
def _integers(schema: type[msgspec.Struct]) -> list[str]:
    """The settings that are whole numbers."""
    return [field.encode_name for field in _fields(schema) if _is_integer(field.type)]


@functools.cache
def _trimmed(schema: type[msgspec.Struct]) -> frozenset[str]:
    """The settings around whose values blanks mean nothing (Kafka's ConfigDef.parseType)."""
    names = (field.encode_name for field in _fields(schema))
    return frozenset(name for name in names if config_type(schema, name) is not ConfigType.STRING)


def _is_integer(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return any(isinstance(one, msgspec.inspect.IntType) for one in kinds)


def rule_of(schema: type[msgspec.Struct], name: str) -> str:
    """What a setting may be, as a person would say it."""
    kind = msgspec.inspect.type_info(next(f.type for f in _fields(schema) if f.encode_name == name))
    for choice in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        match choice:
            case msgspec.inspect.IntType(ge=least, le=most) if most == _UNBOUNDED:
                return f"a whole number, {least} or more"
            case msgspec.inspect.IntType(ge=least, le=most):
                return f"a whole number from {least} to {most}"
            case msgspec.inspect.LiteralType(values=values):
                return " or ".join(map(str, values))
            case msgspec.inspect.FloatType(ge=least, le=None):
                return f"a number from {least:g} on"
            case msgspec.inspect.FloatType(ge=least, le=most):
                return f"a number from {least:g} to {most:g}"
            case msgspec.inspect.BoolType():
                return "true or false"
            case msgspec.inspect.Metadata(extra_json_schema={"description": str(rule)}):
                return rule
    return "any text"


@functools.cache
def config_type(schema: type[msgspec.Struct], name: str) -> ConfigType:
    """The type of a setting, as the protocol has it."""
    if name in LISTS:
        return ConfigType.LIST
    kind = msgspec.inspect.type_info(next(f.type for f in _fields(schema) if f.encode_name == name))
    for choice in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        match choice:
            case msgspec.inspect.IntType(le=most):
                return ConfigType.INT if most is not None and most < 2**31 else ConfigType.LONG
            case msgspec.inspect.FloatType():
                return ConfigType.DOUBLE
            case msgspec.inspect.BoolType():
                return ConfigType.BOOLEAN
    return ConfigType.STRING


@functools.cache
def documentation(schema: type[msgspec.Struct]) -> dict[str, str]:
    """What stands under each setting here, by its name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    found[_kafka_name(field.target.id)] = " ".join(said.split())
    return found


def as_texts(config: msgspec.Struct) -> dict[str, str]:
    """The settings as they are given, without those that are not set."""
    values = ((field.encode_name, getattr(config, field.name)) for field in _fields(type(config)))
    return {name: _as_text(value) for name, value in values if value is not None}


def default_texts(schema: type[msgspec.Struct]) -> dict[str, str]:
    """What holds where nothing is given."""
    return {
        field.encode_name: _as_text(field.default)
        for field in _fields(schema)
        if field.default is not msgspec.NODEFAULT and field.default is not None
    }


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def dynamic_problem(values: Mapping[str, str], *, is_for_all: bool = False) -> str | None:
    """Why these cannot be settings of a running broker; None where each of them can. Their values are not checked.
    Names that are not known may be, as in Kafka, and do nothing: tools set them for what they add to brokers."""
    for name in values:
        if is_for_all and name in PER_BROKER:
            return f"broker setting {name} is that of one broker: set it for that broker, by its id"
        if name in known_names(BrokerConfig) and name not in DYNAMIC:
            return (
                f"broker setting {name} is read-only: change it on the command line or in the properties of the "
                f"broker, and start it again"
            )
    return None


def with_dynamic(static: BrokerConfig, *layers: Mapping[str, str]) -> BrokerConfig:
    """The settings with which a broker started, and over them what was set since, of which the later layers win.
    Raises InvalidConfig."""
    values = as_texts(static)
    for layer in layers:
        problem = dynamic_problem(layer)
        if problem is not None:
            raise InvalidConfig(problem)
        values |= {name: value for name, value in layer.items() if name in known_names(BrokerConfig)}
    config = broker_config(values)
    if config.advertised_listeners != static.advertised_listeners:
        config.advertised_endpoints(defaultdict(int))
    return config


def broker_config(values: Mapping[str, str]) -> BrokerConfig:
    """Raises InvalidConfig."""
    return _convert(_in_milliseconds(values), BrokerConfig, "broker")


def broker_secret(config: BrokerConfig, disk: Disk) -> bytes | None:
    """What brokers prove who they are with; None: there is none. White space around it does not count. Raises
    InvalidConfig, which does not show the secret."""
    path = config.broker_secret_file
    if path is not None:
        try:
            found = disk.read_file(os.path.abspath(path)).strip()
        except OSError as error:
            raise InvalidConfig(
                f"broker.secret.file={path} cannot be read: {error.strerror}; make it a file that this user can "
                f"read, with the same secret for every broker"
            ) from error
    elif config.broker_secret is not None:
        found = config.broker_secret.strip().encode()
    else:
        return None
    if len(found) < LEAST_SECRET_BYTES:
        name = f"in broker.secret.file={path}" if path is not None else "in broker.secret"
        raise InvalidConfig(
            f"the secret {name} has {len(found)} bytes, but at least {LEAST_SECRET_BYTES} are needed; "
            f"`openssl rand -hex 32` makes one"
        )
    return found


def zookeeper_digest(config: BrokerConfig, disk: Disk) -> str | None:
    """NAME:PASSWORD to be shown to ZooKeeper; None: none. White space around it does not count. Raises InvalidConfig,
    which does not show it."""
    path = config.zookeeper_digest_file
    if path is None:
        return None
    try:
        name, separator, password = disk.read_file(os.path.abspath(path)).decode().strip().partition(":")
    except OSError as error:
        raise InvalidConfig(
            f"zookeeper.digest.file={path} cannot be read: {error.strerror}; make it a file that this user can read, "
            f"with the same NAME:PASSWORD for every broker"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"zookeeper.digest.file={path} is not text: one line NAME:PASSWORD is expected") from error
    if not (name and separator and password) or any(character.isspace() for character in name + password):
        raise InvalidConfig(
            f"zookeeper.digest.file={path} does not hold NAME:PASSWORD, without white space in it: "
            f"`echo minibroker:$(openssl rand -hex 16) > {path}` makes one"
        )
    return f"{name}:{password}"


_LOWERED = {"message.max.bytes": MAX_BATCH_BYTES, "max.message.bytes": MAX_BATCH_BYTES}


def from_earlier_release(values: Mapping[str, str]) -> dict[str, str]:
    """Settings as ZooKeeper has them, with those lowered that are refused today and were not once: a topic would have
    no leader over them, or a broker without all that was set together with them."""
    return {
        name: str(min(int(value), _LOWERED[name])) if name in _LOWERED and _SHORT_NUMBER.fullmatch(value) else value
        for name, value in values.items()
    }


def topic_config(values: Mapping[str, str]) -> TopicConfig:
    """Raises InvalidConfig."""
    return _convert(values, TopicConfig, "topic")


def topic_config_in_zookeeper(values: Mapping[str, str]) -> TopicConfig:
    """Return the settings that a topic's znode holds. Those whose names no topic has are without effect, as in Kafka;
    they come from another version, or from an edit by hand. Raises InvalidConfig."""
    known = known_names(TopicConfig)
    return topic_config({name: value for name, value in from_earlier_release(values).items() if name in known})


def topic_config_problem(values: Mapping[str, str], broker: BrokerConfig) -> str | None:
    """Why a topic cannot be created with these settings, where brokers have those; None where it can."""
    try:
        topic = topic_config(values)
    except InvalidConfig as error:
        return str(error)
    least, most = topic.min_compaction_lag_ms, topic.max_compaction_lag_ms
    if least is None and most is None:
        return None
    return _lags_problem(
        "min.compaction.lag.ms" if least is not None else "the brokers' log.cleaner.min.compaction.lag.ms",
        broker.log_cleaner_min_compaction_lag_ms if least is None else least,
        "max.compaction.lag.ms" if most is not None else "the brokers' log.cleaner.max.compaction.lag.ms",
        broker.log_cleaner_max_compaction_lag_ms if most is None else most,
    )


def _lags_problem(min_name: str, min_ms: int, max_name: str, max_ms: int) -> str | None:
    """As Kafka's LogConfig.validateValues."""
    if min_ms <= max_ms:
        return None
    return (
        f"{min_name}={min_ms} exceeds {max_name}={max_ms}: a record cannot be kept from compaction for longer than it "
        f"may wait for it; give the first at most the second"
    )


def read_properties(path: str) -> dict[str, str]:
    """A file of `name=value` lines; `#` begins a comment line. Raises InvalidConfig."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidConfig(f"the properties file {path} cannot be read: {error.strerror}") from error
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.partition("=")
        if not separator:
            raise InvalidConfig(f"{path}, line {number}: {text[:80]!r} is not NAME=VALUE")
        values[name.strip()] = value.strip()
    return values

"""The settings of a broker: Kafka's name, type, bounds, default and meaning of each.

The field `log_dirs` is the setting `log.dirs`. docs/settings.md is generated from this table (`make settings`).
"""

import os
import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from minibroker.broker.settings.listeners import (
    ALL_ADDRESSES,
    parse_advertised,
    parse_listeners,
    parse_protocol_map,
    protocol_of,
)
from minibroker.broker.settings.types import (
    LZ4_DEFAULT_LEVEL,
    UNBOUNDED,
    Age,
    BatchBytes,
    Bytes,
    CleanupPolicy,
    ClientAuth,
    CompressionType,
    Count,
    Durability,
    Duration,
    FormatVersion,
    GzipLevel,
    HostCheck,
    HostLimits,
    InvalidConfig,
    Limit,
    Lz4Level,
    MetricsProtocol,
    Milliseconds,
    Rate,
    Ratio,
    SecurityProtocol,
    StoreType,
    TimestampType,
    TlsVersions,
    ZstdLevel,
    compaction_lags_problem,
    kafka_name,
)
from minibroker.protocol.model import (
    CONTROL_LISTENER,
    DEFAULT_LISTENER,
    PLAINTEXT,
    REPLICATED,
    SECURITY_PROTOCOLS,
    Endpoint,
    uses_sasl,
    without_sasl,
)
from minibroker.protocol.principal import parse_principal

ACL_AUTHORIZER = "kafka.security.authorizer.AclAuthorizer"


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=kafka_name, forbid_unknown_fields=True):
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
    zookeeper_set_root_acl: bool = False
    """Whether all other nodes of the ensemble are protected as well, `/` included (not in Kafka). Only for a ZooKeeper
    that serves this cluster alone: nobody else can create nodes in it afterwards."""
    zookeeper_ssl_client_enable: bool = False
    """Whether the broker connects to ZooKeeper by TLS, at its `secureClientPort`. See [ZooKeeper](zookeeper.md)."""
    zookeeper_ssl_keystore_type: StoreType = "PEM"
    """The format of the certificate and key for ZooKeeper."""
    zookeeper_ssl_keystore_location: str | None = None
    """A PEM file with the private key and the chain of certificates that the broker shows to ZooKeeper. It is read
    again for each connection."""
    zookeeper_ssl_keystore_password: str | None = None
    """The password of this private key, if it is encrypted."""
    zookeeper_ssl_truststore_type: StoreType = "PEM"
    """The format of the certificates that are trusted for ZooKeeper."""
    zookeeper_ssl_truststore_location: str | None = None
    """A PEM file with the authorities that sign ZooKeeper's certificates. Unset: those of the operating system."""
    zookeeper_ssl_endpoint_identification_algorithm: HostCheck = "https"
    """`https`: ZooKeeper's certificate must have the host name that `zookeeper.connect` has. Empty: any name."""
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
    """The listener that is reserved for the controller's requests. Unless the map has it, its protocol is that of the
    connections between brokers."""

    listener_security_protocol_map: Annotated[str, Meta(description="NAME:PROTOCOL,...")] = ""
    """The security protocol of each listener, as in `EXTERNAL:SASL_SSL,INTERNAL:PLAINTEXT`: PLAINTEXT, SSL,
    SASL_PLAINTEXT or SASL_SSL. A listener that is called like a protocol has that protocol. Without any map, listeners
    of other names are PLAINTEXT (Kafka refuses them)."""
    inter_broker_listener_name: str | None = None
    """The listener on which other brokers connect to this one. Unset: see `security.inter.broker.protocol`."""
    security_inter_broker_protocol: SecurityProtocol | None = None
    """The protocol of the connections between brokers, which selects the first listener that has it. Unset: the
    listener PLAINTEXT if there is one, otherwise the first."""

    ssl_keystore_type: StoreType = "PEM"
    """The format of the certificates and keys. See [Security](security.md)."""
    ssl_keystore_location: str | None = None
    """A PEM file with the private key of listeners that are SSL and the chain of their certificates, the broker's own
    first. A file that has changed is read again within seconds."""
    ssl_keystore_certificate_chain: str | None = None
    """The chain itself, in PEM, together with `ssl.keystore.key`, if a file cannot be used."""
    ssl_keystore_key: str | None = None
    """The private key itself, in PEM."""
    ssl_key_password: str | None = None
    """The password of an encrypted private key."""
    ssl_truststore_type: StoreType = "PEM"
    """The format of the trusted certificates."""
    ssl_truststore_location: str | None = None
    """A PEM file with the authorities that sign the certificates of clients and of other brokers. Unset: those of the
    operating system, for other brokers only."""
    ssl_truststore_certificates: str | None = None
    """These certificates themselves, in PEM."""
    ssl_client_auth: ClientAuth = "none"
    """Whether clients must have a certificate (`required`), may have one (`requested`), or are not asked (`none`)."""
    ssl_enabled_protocols: TlsVersions = "TLSv1.2,TLSv1.3"
    """The versions of TLS."""
    ssl_endpoint_identification_algorithm: HostCheck = "https"
    """`https`: the certificate of another broker must have the host name by which it was reached. Empty: any name."""
    ssl_principal_mapping_rules: str = "DEFAULT"
    """Rules that make a principal's name from the distinguished name of a client's certificate, the first that matches:
    `RULE:PATTERN/REPLACEMENT/`, with `L` or `U` behind it for lower or upper case, or `DEFAULT` for the whole name. A
    client whose name no rule matches is refused."""
    sasl_enabled_mechanisms: str = ""
    """The mechanisms of listeners that use SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER, separated by commas
    (Kafka's default is GSSAPI)."""
    plain_sasl_jaas_config: str | None = None
    """The users of PLAIN and their passwords: `PlainLoginModule required user_alice="PASSWORD" ;`. In Kafka it always
    has the prefix of a listener."""
    sasl_oauthbearer_jwks_endpoint_url: str | None = None
    """The public keys that sign the tokens of OAUTHBEARER: `https://...`, `http://...` or `file:///...` (a JWKS)."""
    sasl_oauthbearer_expected_audience: str | None = None
    """The audience (`aud`) that tokens must have. Unset: any."""
    sasl_oauthbearer_expected_issuer: str | None = None
    """The issuer (`iss`) that tokens must have. Unset: any."""
    sasl_oauthbearer_sub_claim_name: str = "sub"
    """The claim that has the user's name."""
    sasl_oauthbearer_clock_skew_seconds: Annotated[int, Meta(ge=0, le=3_600)] = 30
    """The seconds by which the clocks of the issuer and of the broker may differ."""
    connections_max_reauth_ms: Annotated[int, Meta(ge=0, le=UNBOUNDED)] = 0
    """Time after which clients of SASL must authenticate themselves again, or are disconnected. 0: never, unless a
    token expires."""
    connection_failed_authentication_delay_ms: Annotated[int, Meta(ge=0, le=60_000)] = 100
    """Time after which a failed authentication by SASL is answered."""
    listener_name: Annotated[dict[str, str], Meta(description="a setting of one listener")] = {}
    """`listener.name.NAME.ssl...` is a setting of one listener (also `...sasl...`, `...plain.sasl.jaas.config`,
    `...connections.max.reauth.ms`, and dynamically `...max.connections` and `...max.connection.creation.rate`), whose
    name is written in lower case, in place of that
    for all listeners: `listener.name.external.ssl.client.auth=required`."""
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

    authorizer_class_name: Annotated[
        str,
        Meta(pattern=r"^(|kafka\.security\.authorizer\.AclAuthorizer)$", description=f"{ACL_AUTHORIZER}, or nothing"),
    ] = ""
    """`kafka.security.authorizer.AclAuthorizer`: access control lists say who may do what (see
    [security](security.md)). Empty: everybody may do everything. Set it on all brokers."""
    super_users: str = ""
    """Principals that may do everything, separated by semicolons, for instance `User:admin;User:CN=broker-1,O=Example`.
    Brokers that prove themselves by `broker.secret.file` need not be named."""
    allow_everyone_if_no_acl_found: bool = False
    """Whether everybody may do everything with a resource to which no access control list applies."""

    num_network_threads: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Network processors of the data plane; each serves a share of the connections. (They are tasks, not threads.)"""
    num_io_threads: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Request handlers of the data plane. (They are tasks, not threads.)"""
    quota_window_num: Annotated[int, Meta(ge=2, le=1_000)] = 11
    """Windows over which the rates of client quotas are measured. A client that was quiet may use up the quota of all
    but one of them at once."""
    quota_window_size_seconds: Annotated[int, Meta(ge=1, le=3_600)] = 1
    """The length of such a window."""
    controller_quota_window_num: Annotated[int, Meta(ge=2, le=1_000)] = 11
    """Windows of the quota `controller_mutation_rate`. A client that was quiet may use up the quota of all of them at
    once."""
    controller_quota_window_size_seconds: Annotated[int, Meta(ge=1, le=3_600)] = 1
    """The length of such a window."""
    queued_max_requests: Count = 500
    """Requests that may wait for a handler. When the queue is full, the broker stops reading from connections."""
    socket_request_max_bytes: Bytes = 100 * 1024 * 1024
    """The largest request. A client that sends a larger one is disconnected."""
    connections_max_idle_ms: Milliseconds = 600_000
    """Time after which an idle data connection is closed."""
    max_connections: Count = 4_000
    """The maximum number of connections for each plane, without those of brokers. Beyond it, the connection that is
    idle longest gives way to the new one. It is reduced if the process may not open enough files (`ulimit
    -Hn`), one in eight of which is reserved for log files. `listener.name.NAME.max.connections` limits one listener, in
    addition. See [Quotas](quotas.md)."""
    max_connections_per_ip: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 2_000
    """The maximum number of connections from one address. Beyond it, its connection that is idle longest gives way. 0:
    only the addresses in `max.connections.per.ip.overrides` may connect, brokers included."""
    max_connections_per_ip_overrides: HostLimits = ""
    """The maximum number of connections from single addresses: `HOST:NUMBER,...`. A broker looks up a host name when it
    starts or the setting changes."""
    max_connection_creation_rate: Count = 1_000
    """The maximum number of new connections per second. Further ones are delayed, and refused after 10 s of delay. It
    does not apply to the control plane, nor to the brokers' listener if clients have another one.
    `listener.name.NAME.max.connection.creation.rate` is that of one listener, in addition."""

    num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Partitions of a topic whose creator does not give a number."""
    default_replication_factor: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Replicas of a topic whose creator does not give a number."""
    max_broker_partitions: Count = 20_000
    """The maximum number of replicas per live broker, on average, that requests may create (KIP-578; Kafka has no
    limit). Use the same value on all brokers, because the controller's applies."""
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
    log_message_timestamp_before_max_ms: Duration = UNBOUNDED
    """The maximum time by which a record's timestamp may lie before the broker's clock; other records are rejected.
    Records without a timestamp are accepted, as are all records with LogAppendTime."""
    log_message_timestamp_after_max_ms: Duration = UNBOUNDED
    """The maximum time by which a record's timestamp may lie after the broker's clock."""
    log_message_timestamp_difference_max_ms: Duration = UNBOUNDED
    """The value of both limits if they are not set (deprecated in Kafka)."""
    message_max_bytes: BatchBytes = 1_048_588
    """The largest batch as sent, that is, after compression (Kafka allows up to 2 GB). Regardless of this limit, the
    records of a batch may take at most 64 MiB decompressed, and their headers at most 8 MiB."""
    log_segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] = 1024 * 1024 * 1024
    """The maximum size of a segment. The next segment begins before it would be exceeded."""
    log_roll_ms: Age = 604_800_000
    """A new segment begins when a batch is this much younger than the first batch of the segment."""
    log_roll_jitter_ms: Annotated[int, Meta(ge=0, le=UNBOUNDED)] = 0
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
    log_flush_interval_messages: Annotated[int, Meta(ge=1, le=UNBOUNDED)] = UNBOUNDED
    """A log is flushed in the background each time it has grown by this many records."""
    log_flush_interval_ms: Duration = UNBOUNDED
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

    transaction_state_log_num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """Partitions of `__transaction_state`. A transactional id belongs permanently to one partition, whose leader
    coordinates its transactions."""
    transaction_state_log_replication_factor: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Replicas of `__transaction_state`. The topic is created when the first transactional producer starts."""
    transaction_state_log_min_isr: Annotated[int, Meta(ge=1, le=1_000)] = 2
    """The `min.insync.replicas` of `__transaction_state`, at most its replication factor."""
    transaction_state_log_segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] = 100 * 1024 * 1024
    """The `segment.bytes` of `__transaction_state`. Small segments are compacted early, so that a new coordinator has
    less to read."""
    transaction_max_timeout_ms: Milliseconds = 900_000
    """The longest transaction timeout that a producer may request. A transaction that is open for longer than its
    timeout is aborted."""
    transaction_partition_verification_enable: bool = True
    """Whether a leader asks the coordinator of a transaction before it appends the transaction's first batch. If not, a
    late batch of an ended transaction may open one that never ends. Producers that do not name their partitions first
    (KIP-890) are always verified."""
    transaction_abort_timed_out_transaction_cleanup_interval_ms: Milliseconds = 10_000
    """Time between a coordinator's checks for transactions that are open for too long."""
    transactional_id_expiration_ms: Milliseconds = 604_800_000
    """Time after which an unused transactional id is forgotten. It counts from the id's last change or its present
    coordinator's start, and time during which the broker was stopped hardly counts."""
    transaction_remove_expired_transaction_cleanup_interval_ms: Milliseconds = 3_600_000
    """Time between a coordinator's checks for unused transactional ids."""

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

    internal_segment_bytes_min: Annotated[int, Meta(ge=14, le=2**31 - 1)] = 1024 * 1024
    """The smallest `segment.bytes` and `log.segment.bytes` that requests may set (KIP-1030). Only for tests; in Kafka,
    tests set `internal.segment.bytes`."""

    metrics_listener: Annotated[
        str, Meta(pattern=r"^(|(\[[0-9a-fA-F:]+\]|[^:]+):[0-9]{1,5})$", description="HOST:PORT, or nothing")
    ] = ""
    """`HOST:PORT` where metrics are served at `/metrics` (not in Kafka). Port 0 chooses a free port. Empty: no
    metrics."""
    metrics_listener_security_protocol: MetricsProtocol = "PLAINTEXT"
    """SSL: metrics are served by HTTPS (not in Kafka), with `ssl...` or `listener.name.metrics.ssl...`."""

    def __post_init__(self) -> None:
        if self.broker_secret_file is not None and self.broker_secret is not None:
            raise ValueError("both broker.secret.file and broker.secret are set: keep one of them")
        if self.zookeeper_set_acl and self.zookeeper_digest_file is None:
            raise ValueError(
                "zookeeper.set.acl is true without zookeeper.digest.file: no client could change the created nodes"
            )
        if self.zookeeper_set_root_acl and not self.zookeeper_set_acl:
            raise ValueError("zookeeper.set.root.acl is true without zookeeper.set.acl: set both, or neither")
        self.super_user_names()
        self.security_protocols()
        self.log_directories()
        problem = compaction_lags_problem(
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

    def super_user_names(self) -> frozenset[str]:
        """Return the principals of `super.users`. Raises ValueError."""
        names = [name.strip() for name in self.super_users.split(";")]
        try:
            return frozenset(str(parse_principal(name)) for name in names if name)
        except ValueError as error:
            raise ValueError(f"super.users: {error}") from error

    def log_directories(self) -> list[str]:
        """Return the absolute paths in the order of the setting. Raises ValueError."""
        names = [name.strip() for name in self.log_dirs.split(",")]
        if not all(names):
            raise ValueError(f"log.dirs {self.log_dirs!r} names no directory: give DIRECTORY,DIRECTORY,...")
        paths = [os.path.abspath(name) for name in names]
        for number, path in enumerate(paths):
            for other in paths[:number]:
                if path == other:
                    raise ValueError(f"log.dirs names {path} twice")
                if os.path.commonpath((path, other)) in (path, other):
                    raise ValueError(f"log.dirs names {other} and {path}, and one is within the other")
        return paths

    def metrics_address(self) -> tuple[str, int] | None:
        """Return the host and port at which metrics are served, or None if they are not."""
        host, _, port = self.metrics_listener.rpartition(":")
        return (host.strip("[]"), int(port)) if host else None

    def listener_endpoints(self) -> list[Endpoint]:
        """Return the addresses to bind. They always include the control listener, whose port defaults to a free one."""
        endpoints = parse_listeners("listeners", self.listeners)
        if not any(e.listener == self.control_plane_listener_name for e in endpoints):
            endpoints.append(Endpoint(self.control_plane_listener_name, endpoints[0].host, 0))
        return endpoints

    def security_protocols(self) -> dict[str, str]:
        """Return the protocol of each listener. Raises InvalidConfig."""
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        names = [e.listener for e in self.listener_endpoints()]
        control = self.control_plane_listener_name
        found = {name: protocol_of(name, protocols) for name in names if name != control}
        if not found:
            raise InvalidConfig(f"listeners has {control} alone, which is not for clients: add another listener")
        of_brokers = found[self._inter_broker_listener(found)]
        found[control] = protocols.get(control, control if control in SECURITY_PROTOCOLS else without_sasl(of_brokers))
        if uses_sasl(found[control]):
            raise InvalidConfig(
                f"the control plane's listener {control} is {found[control]}, but only brokers connect to it, which "
                f"do not use SASL (they prove themselves by broker.secret.file): give it "
                f"{without_sasl(found[control])} in listener.security.protocol.map"
            )
        return found

    @property
    def inter_broker_listener(self) -> str:
        """The listener on which other brokers connect to this one."""
        found = self.security_protocols()
        del found[self.control_plane_listener_name]
        return self._inter_broker_listener(found)

    def _inter_broker_listener(self, found: Mapping[str, str]) -> str:
        name, protocol = self.inter_broker_listener_name, self.security_inter_broker_protocol
        if name is not None:
            if name not in found:
                raise InvalidConfig(
                    f"inter.broker.listener.name={name} is not among listeners ({', '.join(found)}): name one of them"
                )
            if protocol is not None:
                raise InvalidConfig(
                    "both inter.broker.listener.name and security.inter.broker.protocol are set: keep one of them"
                )
            return name
        if protocol is not None:
            name = next((name for name, of_it in found.items() if of_it == protocol), None)
            if name is None:
                raise InvalidConfig(
                    f"security.inter.broker.protocol={protocol}, but no listener has that protocol: add one to "
                    f"listeners, such as {protocol}://HOST:PORT, or to listener.security.protocol.map"
                )
            return name
        return PLAINTEXT if PLAINTEXT in found else next(iter(found))

    def of_listener(self, listener: str) -> Mapping[str, str]:
        """Return the settings of this listener alone, by their names without the prefix."""
        prefix = f"{listener.lower()}."
        return {n.removeprefix(prefix): text for n, text in self.listener_name.items() if n.startswith(prefix)}

    def advertised_endpoints(self, ports: Mapping[str, int]) -> list[Endpoint]:
        """Return the addresses to register, that for other brokers first. `ports` maps each listener to the port that
        it was bound to. Raises InvalidConfig."""
        advertised = {e.listener: e for e in self.listener_endpoints()}
        if self.advertised_listeners:
            advertised |= {e.listener: e for e in parse_advertised(self.advertised_listeners, advertised)}
        for endpoint in advertised.values():
            if endpoint.host in ALL_ADDRESSES:
                raise InvalidConfig(
                    f"the listener {endpoint.listener} is on {endpoint.host!r}, which is not an address to connect "
                    f"to: set advertised.listeners to the address that clients and other brokers should use"
                )
        protocols, first = self.security_protocols(), self.inter_broker_listener
        return [
            Endpoint(e.listener, e.host, e.port or ports[e.listener], protocols[e.listener])
            for e in sorted(advertised.values(), key=lambda e: e.listener != first)
        ]

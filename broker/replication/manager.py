"""The table of this broker's replicas, and the entry for handlers and the controller's orders (Kafka's ReplicaManager).

Handlers append, read and delete, and what cannot be answered yet waits in one of three purgatories; orders say which
broker leads. What goes on by itself has modules of its own: `IsrWriter`, `FetcherManager`, `HighWatermarkCheckpoint`,
`LogRetention`, `LogCleaner`, `LogMover`, `Healer`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.metrics.log_lines import NAMED, Gathered, named
from minibroker.broker.replication.delayed import (
    AdmittedFetch,
    DelayedDeleteRecords,
    DelayedFetch,
    DelayedProduce,
    DeletionStatus,
    ProduceStatus,
    refused_append,
)
from minibroker.broker.replication.fetcher_manager import FetcherManager
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.partition import CONSUMER, Partition, Settings, Traffic
from minibroker.broker.replication.refused_batches import RefusedBatches
from minibroker.broker.replication.throttle import Quota, is_throttled
from minibroker.broker.replication.topic_configs import TopicConfigs
from minibroker.broker.replication.upkeep.healing import Healer, tell_of_lost_replicas
from minibroker.broker.replication.upkeep.high_watermark_checkpoint import HighWatermarkCheckpoint
from minibroker.broker.replication.upkeep.log_cleaner import CleanerSettings, LogCleaner
from minibroker.broker.replication.upkeep.log_mover import LogMover
from minibroker.broker.replication.upkeep.log_retention import LogRetention
from minibroker.broker.scheduling.purgatory import Purgatory, Timer
from minibroker.broker.scheduling.sleeps import Sleeps
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.schema import as_texts, default_texts
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.broker.settings.types import LZ4_DEFAULT_LEVEL, InvalidConfig
from minibroker.broker.storage.io_errors import Shortage
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.validator import (
    Looked,
    check_acceptable,
    is_to_be_rewritten,
    look_needed,
    read_headers,
    takes_long,
)
from minibroker.protocol import znodes
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    Buffer,
    DeleteRecordsPartitionResult,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    LeaderAndIsrPartition,
    LeaderAndIsrRequest,
    LeaderAndIsrTopic,
    PartitionError,
    ProducePartitionResponse,
    StopReplicaRequest,
    UpdateMetadataPartition,
)
from minibroker.protocol.model import INTERNAL_TOPICS, NO_EPOCH, NO_LEADER, SYNCED, TopicPartition
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.topic_ids import is_older
from minibroker.protocol.world import (
    Clock,
    ConnectionLoss,
    SessionExpired,
    World,
    ZooKeeperError,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.replication")

EPOCH_DURING_DELETE = -2
"""The leader epoch of a StopReplica that deletes whatever there is (Kafka's LeaderAndIsr.EpochDuringDelete)."""

ZOOKEEPER_RETRY_S = 0.1

ASSIGNED_AT_ONCE = 25
"""Replicas that get their part in one turn of the loop."""

PARTITIONS_PER_SLICE = 100
REFUSED_TOPICS_S = 5.0
"""So often the settings are looked at that made no sense when the controller ordered replicas of their topics."""
READS_AT_ONCE = 100
"""Of topics' settings."""
BREATH_S = 0.001

DELETIONS_REMEMBERED = 10_000
"""Of replicas, for as long as the broker runs: an order that is late by this many others is no longer expected."""

LAST_EPOCH = 2**31 - 1
"""No leader epoch is higher."""

SessionSource = Callable[[], Awaitable[ZooKeeperSession]]
"""Waits until there is a session, and returns it."""

_MOST_TOLD_BYTES = 256 * 1024
"""After so much, no more partitions of an answer are told of producers: some 15 ms for the last one, at most."""

RefusedFetch = tuple[TopicPartition, FetchPartitionResponse]
"""One partition of a fetch that cannot be served, and its answer."""
FetchAnswer = list[tuple[TopicPartition, FetchPartitionResponse]]


class LeadershipListener(Protocol):
    """Told which role this broker has taken in a partition: what lives on the partitions that a broker leads, as
    coordinators do, begins and ends with it (Kafka's onElection and onResignation).

    Guaranteed: for each leader epoch in which this broker is given a role, one of the two is called, once, however
    often the order comes; for one partition in the order of its epochs, for several in the order in which the
    controller names them. By then the role has been taken, and nothing has run since: nothing was appended in the epoch
    that begins, and it begins at the end of the log. A role that could not be taken is not told.

    `on_follower` is called with the epoch of `on_leader` where the replica that led was stopped or deleted, or its log
    directory has failed. After a deletion epochs may begin at 0 again: they are those of another topic of that name.

    They are called before anything else in the broker runs, so they must neither wait nor raise: what takes long is for
    a task.
    """

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        """This broker leads in `epoch`, as it may have done in earlier ones."""

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        """This broker does not lead in `epoch`, or no longer: it follows another one, or none, or has no replica
        left."""


_MOOT_INTERVAL_S = 1.0
"""So often a batch that waits for its turn is asked whether anybody still waits for it."""


class ToAppend(NamedTuple):
    """What a producer sent for one partition."""

    topic_partition: TopicPartition
    topic_id: str
    """Of the topic that is meant; empty: whichever has the name."""
    records: Buffer
    looked: Looked = Looked.NOT
    """How closely `ReplicaManager.check` has looked at the records."""
    rewritten_for: LogConfig | None = None
    """They are as a log with that config keeps them."""
    came_as_columns: bool = False
    """From a producer of ours, for a log that takes none."""
    received_s: float | None = None
    """When, on the monotonic clock; None: now."""


async def _no_broker_configs(_session: ZooKeeperSession) -> bool:
    return True


class _Assigned(NamedTuple):
    """One partition of a LeaderAndIsr request, ready to be applied."""

    topic_partition: TopicPartition
    state: LeaderAndIsrPartition
    partition: Partition


class ReplicaManager:
    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        logs: LogDirs,
        metadata: MetadataCache,
        supervisor: Supervisor,
        sessions: SessionSource,
        broker_epoch: Callable[[], int],
        connections: BrokerConnections,
        is_in_touch: Callable[[], bool] = lambda: True,
        read_broker_configs: Callable[[ZooKeeperSession], Awaitable[bool]] = _no_broker_configs,
    ) -> None:
        """`connections` are those to leaders. `is_in_touch`: there is a connection to ZooKeeper, as far as is known.
        `read_broker_configs`: as in `DynamicConfigManager`; it calls `broker_config_changed` where they have."""
        self._world = world
        self._config = config
        self._logs = logs
        self._metadata = metadata
        self._supervisor = supervisor
        self._sessions = sessions
        self._broker_epoch = broker_epoch
        self._is_in_touch = is_in_touch
        self._read_broker_configs = read_broker_configs
        self._partitions: dict[TopicPartition, Partition] = {}
        self._refused_topics: dict[str, str] = {}
        """Of which orders were refused since their settings make no sense, and why: said once."""
        self._deleted: dict[tuple[str, TopicPartition], int] = {}
        """Replicas that were deleted here, by topic id, and in which leader epoch."""
        self._refused_batches = RefusedBatches()
        self._checks = world.new_executor("record checks")
        self._check_turns = asyncio.Lock()
        self._listeners: list[LeadershipListener] = []
        self._timer = Timer()
        self._produces: Purgatory[DelayedProduce] = Purgatory("Produce", self._timer)
        self._fetches: Purgatory[DelayedFetch] = Purgatory("Fetch", self._timer)
        self._deletions: Purgatory[DelayedDeleteRecords] = Purgatory("DeleteRecords", self._timer)
        self._up_to_date: ZooKeeperSession | None = None
        """See `_up_to_date_session`."""
        self.expired_produces = 0
        self.expired_fetches = 0
        self.expired_deletions = 0
        self.traffic: dict[str, Traffic] = {}
        """By topic, of those that have a partition here."""
        self._settings = _settings(config)
        self._topic_configs = TopicConfigs()
        self._leader_quota = _quota(config.leader_replication_throttled_rate, world.clock)
        self._follower_quota = _quota(config.follower_replication_throttled_rate, world.clock)
        self._fetchers = FetcherManager(
            world, config, supervisor, broker_epoch, connections, self._set_aside, self._leader_found
        )
        self._on_leader_found: Callable[[], None] = lambda: None
        self._deleted_replicas: Gathered[TopicPartition] = Gathered(
            lambda deleted: logger.info("deleted its replicas of %s", named(deleted))
        )
        self.isr_writer = IsrWriter(
            self._partitions,
            supervisor,
            sessions,
            config.replica_lag_time_max_ms,
            self._high_watermark_moved,
            self._isr_changed,
        )
        self._checkpoint = HighWatermarkCheckpoint(
            logs, self._partitions, config.replica_high_watermark_checkpoint_interval_ms
        )
        self._sleeps = Sleeps(world.clock)
        self._retention = LogRetention(
            world.clock,
            logs,
            self._partitions,
            config.log_retention_check_interval_ms,
            self._deletions.check_soon,
            self._sleeps,
            self._with_present_settings,
        )
        self.healer = Healer(logs, sessions, config.broker_id)
        self.cleaner = LogCleaner(
            world,
            logs,
            self._partitions,
            _cleaner_settings(config),
            self._sleeps,
            self._with_present_settings,
        )
        self.mover = LogMover(
            logs, self._partitions, lambda partition: metadata.partition(partition) is not None, self._log_moved
        )

    # -- start and stop --

    def start(self) -> None:
        """After the logs were opened, before the first control request."""
        self.isr_writer.start()
        self._supervisor.start(self.healer.run(), "healing of damaged replicas")
        self._supervisor.start(self.mover.run(), "moves of replicas between log directories")
        self._supervisor.start(self._look_at_refused_topics(), "look at settings that make no sense")
        for path in self._logs.paths:
            self._supervisor.start(self._checkpoint.run(path), f"high watermark checkpoint of {path}")
            self._supervisor.start(self._retention.run(path), f"log retention in {path}")
            self._supervisor.start(self._retention.store_starts(path), f"log start checkpoint of {path}")
        if self._config.log_cleaner_enable:
            self._supervisor.start(self.cleaner.run(), "log cleaner")

    def add_listener(self, listener: LeadershipListener) -> None:
        """Before the first control request: the listener hears of nothing that was before. Listeners are called in the
        order in which they were added."""
        self._listeners.append(listener)

    def on_leader_found(self, listener: Callable[[], None]) -> None:
        """Call it whenever one of `lost_leaders` is there again, as far as this broker sees."""
        self._on_leader_found = listener

    def _leader_found(self) -> None:
        self._on_leader_found()

    async def close(self) -> None:
        """Stop following, drop what waits, write the last checkpoint. The supervisor has ended the tasks."""
        await self._fetchers.close()
        self.isr_writer.close()
        self._deleted_replicas.close()
        self._produces.close()
        self._fetches.close()
        self._deletions.close()
        self._timer.close()
        await self._checkpoint.write()

    # -- for handlers --

    def partition(self, topic_partition: TopicPartition) -> Partition | None:
        return self._partitions.get(topic_partition)

    def partitions(self) -> list[Partition]:
        return list(self._partitions.values())

    @property
    def log_dirs(self) -> LogDirs:
        """To be looked at."""
        return self._logs

    def purgatories(self) -> list[Purgatory[Any]]:
        """To be looked at."""
        return [self._produces, self._fetches, self._deletions]

    def leader(self, topic_partition: TopicPartition) -> Partition:
        """The partition, if it is here at all. Raises BrokerError: KAFKA_STORAGE_ERROR where its log directory is
        offline, NOT_LEADER_OR_FOLLOWER where the cluster has it elsewhere, UNKNOWN_TOPIC_OR_PARTITION where this broker
        was not told of it."""
        partition = self._partitions.get(topic_partition)
        if partition is None:
            if self._logs.is_offline(topic_partition):
                text = f"the replica of {topic_partition} on broker {self._config.broker_id} is offline"
                raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, text)
            known = self._metadata.partition(topic_partition) is not None
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            raise BrokerError(code, f"{topic_partition} is not on broker {self._config.broker_id}")
        return partition

    def produce(
        self,
        entries: Sequence[ToAppend],
        *,
        acks: int,
        timeout_ms: int,
        respond: Callable[[dict[TopicPartition, ProduceStatus]], None],
    ) -> None:
        """Append each entry as leader; `respond` once all are settled (at once unless acks is -1)."""
        statuses: dict[TopicPartition, ProduceStatus] = {}
        now_ms = self._world.clock.wall_ms()
        waiting = False
        for entry in entries:
            status = statuses[entry.topic_partition] = self._append(entry, acks, now_ms)
            waiting = waiting or status.pending
        if not waiting:
            respond(statuses)
            return
        operation = DelayedProduce(timeout_ms, statuses, self._partitions.get, respond, self._produce_expired)
        self._produces.try_complete_else_watch(operation, statuses)

    def is_to_be_rewritten_for(self, entry: ToAppend) -> LogConfig | None:
        """The partition's log keeps the records in another form than the one that they have, by this config."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not partition.is_leader or partition.log.config == entry.rewritten_for:
            return None
        config = partition.log.config
        if not is_to_be_rewritten(entry.records, config) or partition.log.repeats(entry.records):
            return None
        return config

    def takes_long(self, entry: ToAppend) -> bool:
        """To look at its records, as `check` does."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not partition.is_leader:
            return False
        return takes_long(entry.records, partition.log.config, entry.looked) and not partition.log.repeats(
            entry.records
        )

    async def check(self, entry: ToAppend, is_moot: Callable[[], bool] = lambda: False) -> Looked:
        """Look at records, before they are appended, in a worker thread where that would take long. Returns how closely
        they have been looked at now. Raises BrokerError as appending them would; and REQUEST_TIMED_OUT if by its turn
        nobody waits for it any more (`is_moot`), or the queue of those that come again would never end.

        A million records take seconds, and a few hundred MB: one batch at a time."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not self.takes_long(entry):
            return entry.looked
        try:
            async with self._turn_to_check(is_moot):
                if is_moot():
                    raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, f"{entry.topic_partition}: its producer has gone")
                now_ms = self._world.clock.wall_ms()
                config = partition.log.config
                await self._checks.run(_check, entry.records, entry.topic_partition, config, now_ms)
                return look_needed(config)
        except BrokerError as error:
            # Also what is moot: its producer may have sent more by the same connection, which must not come first.
            self._refused_batches.note(entry.topic_partition, entry.records, error.code, self._world.clock.monotonic())
            raise

    @asynccontextmanager
    async def _turn_to_check(self, is_moot: Callable[[], bool]) -> AsyncIterator[None]:
        """Entered in turn, or soon after `is_moot`: what nobody waits for need not stay in memory until then."""
        turn = asyncio.ensure_future(self._check_turns.acquire())
        try:
            while not turn.done() and not is_moot():
                await asyncio.wait([turn], timeout=_MOOT_INTERVAL_S)
            yield
        finally:
            if not turn.cancel():
                self._check_turns.release()

    def _produce_expired(self) -> None:
        self.expired_produces += 1

    def write(
        self,
        topic_partition: TopicPartition,
        records: Buffer,
        *,
        leading_since_epoch: int,
        timeout_ms: int,
        respond: Callable[[ProduceStatus], None],
    ) -> None:
        """What this broker itself writes, to a partition of the brokers' own, with acks=all: appended only in the
        leadership that began with that epoch, as what lives on the partition knows nothing of a later one.
        (`appendRecords` with AppendOrigin.COORDINATOR.)"""

        def find() -> Partition:
            partition = self.leader(topic_partition)
            if partition.leading_since_epoch != leading_since_epoch:
                text = (
                    f"{topic_partition} is led since epoch {partition.leading_since_epoch}, not {leading_since_epoch}"
                )
                raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, text)
            return partition

        status = self._append_to(ToAppend(topic_partition, "", records), find, -1, self._world.clock.wall_ms())
        if not status.pending:
            respond(status)
            return
        statuses = {topic_partition: status}
        operation = DelayedProduce(
            timeout_ms, statuses, self._partitions.get, lambda _: respond(status), self._produce_expired
        )
        self._produces.try_complete_else_watch(operation, statuses)

    def _append(self, entry: ToAppend, acks: int, now_ms: int) -> ProduceStatus:
        def find() -> Partition:
            return self._leader_for_clients(entry.topic_partition, entry.topic_id)

        return self._append_to(entry, find, acks, now_ms)

    def _append_to(self, entry: ToAppend, find: Callable[[], Partition], acks: int, now_ms: int) -> ProduceStatus:
        """`find` raises BrokerError, which becomes the answer."""
        topic_partition, topic_id, records, looked, _, came_as_columns, received_s = entry
        index = topic_partition.partition
        partition = None
        now_s = self._world.clock.monotonic()
        try:
            partition = find()
            before = partition.high_watermark
            if came_as_columns:
                partition.log.check_begins(records)
            self._refused_batches.check(
                topic_partition, records, partition.log, now_s if received_s is None else received_s
            )
            info = partition.append(records, required_acks=acks, now_ms=now_ms, looked=looked)
        except BrokerError as error:
            self._refused_batches.note(topic_partition, records, error.code, now_s)
            response = refused_append(index, error)
            if partition is not None:  # Kafka's producers need it to go on after UNKNOWN_PRODUCER_ID
                response.log_start_offset = partition.log.log_start_offset
            known = self._known(topic_partition, topic_id)
            if error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER and known is not None:
                response.current_leader_id = known.leader
                response.current_leader_epoch = known.leader_epoch
            return ProduceStatus(response=response)
        self._refused_batches.note(topic_partition, records, ErrorCode.NONE, now_s)
        self._fetches.check_soon(topic_partition)
        if partition.high_watermark != before:
            self._produces.check_soon(topic_partition)
        return ProduceStatus(
            response=ProducePartitionResponse(
                index,
                ErrorCode.NONE,
                base_offset=info.first_offset,
                log_append_time_ms=info.log_append_time_ms,
                log_start_offset=partition.log.log_start_offset,
            ),
            required_offset=info.last_offset + 1,
            leading_since_epoch=partition.leading_since_epoch,
            pending=acks == -1,
        )

    def _leader_for_clients(self, topic_partition: TopicPartition, topic_id: str) -> Partition:
        """For what changes the log. Raises BrokerError."""
        if topic_partition.topic in INTERNAL_TOPICS:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, "only brokers write to a topic of their own")
        partition = self.leader(topic_partition)
        partition.check_topic_id(topic_id)
        return partition

    def delete_records(self, topic_partition: TopicPartition, topic_id: str, offset: int) -> DeletionStatus:
        """Let the partition's log begin at `offset`, as leader, in the topic of that id. To be awaited by
        `await_deletions`, unless it has failed."""
        response = DeleteRecordsPartitionResult(topic_partition.partition, -1, ErrorCode.NONE)
        try:
            partition = self._leader_for_clients(topic_partition, topic_id)
            required_offset = partition.delete_records(offset)
        except BrokerError as error:
            response.error_code, response.error_message = error.code, error.detail
            return DeletionStatus(response=response)
        return DeletionStatus(
            response=response,
            required_offset=required_offset,
            leading_since_epoch=partition.leading_since_epoch,
            pending=True,
        )

    def await_deletions(
        self,
        statuses: dict[TopicPartition, DeletionStatus],
        *,
        timeout_ms: int,
        respond: Callable[[dict[TopicPartition, DeletionStatus]], None],
    ) -> None:
        """`respond` once all are settled."""
        if not any(status.pending for status in statuses.values()):
            respond(statuses)
            return
        operation = DelayedDeleteRecords(timeout_ms, statuses, self._partitions.get, respond, self._deletion_expired)
        self._deletions.try_complete_else_watch(operation, statuses)

    def _deletion_expired(self) -> None:
        self.expired_deletions += 1

    def _known(self, topic_partition: TopicPartition, topic_id: str) -> UpdateMetadataPartition | None:
        """The leader, for a client that came to the wrong broker (KIP-951). None also where another topic has the name:
        leader epochs of two topics cannot be compared. An empty id is not checked."""
        is_meant = topic_id in ("", self._metadata.topic_id(topic_partition.topic))
        return self._metadata.partition(topic_partition) if is_meant else None

    def fetch(self, request: FetchRequest, respond: Callable[[FetchAnswer], None]) -> None:
        """Read for a consumer or a follower; `respond` at once with what there is, or once `min_bytes` can be read, or
        after `max_wait_ms`. A follower's offsets move the high watermark first.

        Each partition is admitted, its follower's progress noted, and its records read, in this order. For a fetch that
        waits they are read again when it need not wait any longer."""
        admissions = [
            self._admit(TopicPartition(topic.topic, fetch.partition), fetch, topic.topic_id, request.replica_id)
            for topic in request.topics
            for fetch in topic.partitions
        ]
        admitted = [admission for admission in admissions if isinstance(admission, AdmittedFetch)]
        if request.replica_id != CONSUMER:
            for part in admitted:
                self._note_progress(part, request.replica_id, request.replica_epoch)
        answer = self._read(admissions, request)
        min_bytes = min(request.min_bytes, self.max_bytes(request))  # as in Kafka: more can never be answered
        size = sum(len(response.records) for _, response in answer)
        settled = any(r.error_code != 0 or r.diverging_epoch is not None for _, r in answer)
        if settled or size >= min_bytes or request.max_wait_ms <= 0 or not admissions:
            self._deliver(answer, request, respond)
            return

        def read_and_deliver() -> None:
            present = [self._admit_after_waiting(part, request.replica_id) for part in admitted]
            self._deliver(self._read(present, request), request, respond)

        operation = DelayedFetch(
            request.max_wait_ms,
            min_bytes,
            request.replica_id,
            admitted,
            self._partitions.get,
            read_and_deliver,
            self._fetch_expired,
        )
        keys = [part.topic_partition for part in admitted]
        if min_bytes <= 1 and not any(part.partition.leader_quota for part in admitted):
            self._fetches.watch(operation, keys)  # they have just been read, and there was nothing
        else:
            self._fetches.try_complete_else_watch(operation, keys)

    def _fetch_expired(self) -> None:
        self.expired_fetches += 1

    def _admit(
        self, topic_partition: TopicPartition, fetch: FetchPartition, topic_id: str, replica_id: int
    ) -> AdmittedFetch | RefusedFetch:
        try:
            partition = self.leader(topic_partition)
            partition.check_topic_id(topic_id)
        except BrokerError as error:
            known = self._known(topic_partition, topic_id)
            return topic_partition, FetchPartitionResponse(
                topic_partition.partition,
                error.code,
                current_leader_id=known.leader if known else -1,
                current_leader_epoch=known.leader_epoch if known else -1,
            )
        return _admit_to(partition, fetch, replica_id)

    def _admit_after_waiting(self, admitted: AdmittedFetch, replica_id: int) -> AdmittedFetch | RefusedFetch:
        """Admitted anew only where the leadership has changed."""
        if admitted.holds(self._partitions.get):
            return admitted
        topic_partition = admitted.topic_partition
        if self._partitions.get(topic_partition) is not admitted.partition:
            offline = self._logs.is_offline(topic_partition)
            code = ErrorCode.KAFKA_STORAGE_ERROR if offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return topic_partition, FetchPartitionResponse(topic_partition.partition, code)
        return _admit_to(admitted.partition, admitted.fetch, replica_id)

    def _note_progress(self, admitted: AdmittedFetch, replica_id: int, broker_epoch: int) -> None:
        """A follower asks for what comes after all that it has."""
        partition = admitted.partition
        if partition.record_follower_fetch(replica_id, admitted.fetch, broker_epoch):
            self._high_watermark_moved(partition)
        self._deletions.check_soon(partition.topic_partition)
        if partition.eligible or replica_id not in partition.isr:
            self.isr_writer.propose(partition)

    def _high_watermark_moved(self, partition: Partition) -> None:
        # P6: checked once per turn of the loop, however many fetches moved it.
        self._produces.check_soon(partition.topic_partition)
        self._fetches.check_soon(partition.topic_partition)

    def _isr_changed(self, partition: Partition) -> None:
        self._produces.check_soon(partition.topic_partition)  # an ISR that is too small now is an answer too
        self._deletions.check_soon(partition.topic_partition)

    def _check_waits(self, topic_partition: TopicPartition) -> None:
        """The partition's role may have changed."""
        for purgatory in self.purgatories():
            purgatory.check_soon(topic_partition)

    def max_bytes(self, request: FetchRequest) -> int:
        return min(request.max_bytes, self._config.fetch_max_bytes)

    def _read(self, admissions: Sequence[AdmittedFetch | RefusedFetch], request: FetchRequest) -> FetchAnswer:
        """Whole batches, `max_bytes` in all; the first that has any is served even where it is larger."""
        left = self.max_bytes(request)
        answer: FetchAnswer = []
        nothing_yet = True
        told = 0
        for admission in admissions:
            if not isinstance(admission, AdmittedFetch):
                topic_partition, refused = admission
                if request.replica_id != CONSUMER and refused.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    refused = self._with_producers(topic_partition, refused, told)
                    told += len(refused.producers)
                answer.append((topic_partition, refused))
                continue
            topic_partition, fetch, partition, _ = admission
            response = partition.read(fetch, request.replica_id, max_bytes=left, at_least_one=nothing_yet)
            size = len(response.records)
            left = max(0, left - size)
            nothing_yet = nothing_yet and not size
            answer.append((topic_partition, response))
        return answer

    def _with_producers(
        self, topic_partition: TopicPartition, refused: FetchPartitionResponse, told: int
    ) -> FetchPartitionResponse:
        """`told`: bytes in the same answer. What goes beyond is asked for again: to gather it takes the loop's time."""
        partition = self._partitions.get(topic_partition)
        if partition is None or told > _MOST_TOLD_BYTES:
            return FetchPartitionResponse(topic_partition.partition, ErrorCode.OFFSET_NOT_AVAILABLE)
        partition.tell_producers(refused)
        return refused

    def _deliver(self, answer: FetchAnswer, request: FetchRequest, respond: Callable[[FetchAnswer], None]) -> None:
        for topic_partition, response in answer:
            partition = self._partitions.get(topic_partition) if response.records else None
            if partition is None:
                continue
            if request.replica_id == CONSUMER:
                partition.traffic.bytes_out += len(response.records)
            else:
                partition.traffic.replication_bytes_out += len(response.records)
                quota = partition.quota_for(request.replica_id)
                if quota is not None:
                    quota.record(len(response.records))
        respond(answer)

    # -- settings --

    def has_settings_of(self, topic: str) -> bool:
        return topic in self._topic_configs

    def settings_of(self, topic: str) -> dict[str, str] | None:
        """What holds here of the topic's own; None where nothing of the topic is here."""
        if topic not in self._topic_configs:
            return None
        defaults = default_texts(TopicConfig)
        return {name: v for name, v in as_texts(self._topic_configs.of(topic)).items() if defaults.get(name) != v}

    def topics_with_settings(self) -> list[str]:
        return self._topic_configs.topics()

    async def topic_config_changed(self, topic: str, session: ZooKeeperSession) -> None:
        """It may have: it is read, and holds from now on. Raises InvalidConfig and MalformedZnode, and then nothing has
        changed, ConnectionLoss, SessionExpired."""
        await self._read_settings(topic, session)
        if self._refused_topics.pop(topic, None) is not None:
            logger.info("the settings of topic %s make sense again: the controller is asked for its replicas", topic)
            self.healer.mended()

    async def _read_settings(self, topic: str, session: ZooKeeperSession) -> None:
        """Raises as `topic_config_changed`."""
        if await self._topic_configs.read(topic, session):
            await self._reconfigure([p for p in self._partitions.values() if p.topic_partition.topic == topic])

    async def _look_at_refused_topics(self) -> None:
        """Until cancelled. Nobody is told of a znode that is corrected by hand, nor is this broker of one that was
        corrected while it refused an order."""
        while True:
            await asyncio.sleep(REFUSED_TOPICS_S)
            for topic in list(self._refused_topics):
                with suppress(InvalidConfig, MalformedZnode, ZooKeeperError):
                    await self.topic_config_changed(topic, await self._sessions())

    async def broker_config_changed(self, config: BrokerConfig) -> None:
        """These hold from now on, as far as they can be changed at all (`config.DYNAMIC`)."""
        clock = self._world.clock
        self._config = config
        self._settings = _settings(config)
        self._leader_quota = _changed(self._leader_quota, config.leader_replication_throttled_rate, clock)
        self._follower_quota = _changed(self._follower_quota, config.follower_replication_throttled_rate, clock)
        self.cleaner.configure(_cleaner_settings(config))
        self._retention.interval_ms = config.log_retention_check_interval_ms
        self._sleeps.look_again()
        await self._reconfigure(self.partitions())

    async def _with_present_settings(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Those of the partitions of which the settings were read just now, as ZooKeeper had them after this was asked,
        and hold here. Asked before anything is deleted: a change may not have been heard of yet, or for long if this
        broker is cut off, far away, or served by a ZooKeeper server that is behind. In a few requests for all of them.
        """
        if not self._is_in_touch():
            return []
        topics = list(dict.fromkeys(partition.topic_partition.topic for partition in partitions))
        present: set[str] = set()
        try:
            session = await self._sessions()
            await catch_up(session)
            if not await self._read_broker_configs(session):
                return []
            for start in range(0, len(topics), READS_AT_ONCE):
                some = topics[start : start + READS_AT_ONCE]
                outcomes = await asyncio.gather(
                    *(self.topic_config_changed(topic, session) for topic in some), return_exceptions=True
                )
                for topic, outcome in zip(some, outcomes, strict=True):
                    if outcome is None:
                        present.add(topic)
                    elif not isinstance(outcome, InvalidConfig | MalformedZnode):
                        raise outcome
        except ZooKeeperError:
            return []
        found = []
        for partition in partitions:
            topic_partition = partition.topic_partition
            if topic_partition.topic in present and self._partitions.get(topic_partition) is partition:
                self._reconfigure_one(partition)  # whoever has read a change is perhaps still at work with it
                found.append(partition)
        return found

    async def _reconfigure(self, partitions: Sequence[Partition]) -> None:
        for number, partition in enumerate(partitions, 1):
            if self._partitions.get(partition.topic_partition) is partition:
                self._reconfigure_one(partition)
            if number % PARTITIONS_PER_SLICE == 0:
                await asyncio.sleep(BREATH_S)
        self._fetchers.wake_all()

    def _reconfigure_one(self, partition: Partition) -> None:
        topic_partition = partition.topic_partition
        topic = self._topic_configs.of(topic_partition.topic)
        # What was acknowledged with the one durability counts for nothing with the other.
        log_config = msgspec.structs.replace(self._log_config(topic), synced=partition.log.config.synced)
        if log_config != partition.log.config:
            partition.log.configure(log_config)
        was_throttled = partition.leader_quota is not None
        to_commit = partition.min_insync_replicas
        partition.reconfigure(self._settings, topic.min_insync_replicas, *self._quotas_of(topic_partition, topic))
        if partition.min_insync_replicas != to_commit:
            self.isr_writer.propose(partition)
            if partition.advance_high_watermark():
                self._high_watermark_moved(partition)
            self._check_waits(topic_partition)
        elif was_throttled:
            self._fetches.check_soon(topic_partition)

    # -- control requests --

    async def apply_leader_and_isr(self, request: LeaderAndIsrRequest) -> list[PartitionError]:
        """Lead or follow as told, where the leader epoch is newer than what is held. The caller has checked the
        controller's and the broker's epoch, and lets no other control request in between.

        What keeps one partition from it does not affect the others. Returns the errors and, for replicas without a
        leader, how their logs end: the controller chooses by that where no replica's data can be trusted. Raises
        BrokerError(STALE_BROKER_EPOCH), with no role changed, where this broker has registered again meanwhile: the
        controller tells it everything anew (KAFKA-9307).
        """
        errors: list[PartitionError] = []
        assigned: list[_Assigned] = []
        self._up_to_date = None
        for topic in request.topic_states:
            try:
                await self._read_topic_config(topic.topic_name, topic.topic_id, topic.partition_states)
            except BrokerError as error:
                if self._refused_topics.get(topic.topic_name) != error.detail:  # it comes with every order
                    self._refused_topics[topic.topic_name] = error.detail
                    logger.error("LeaderAndIsr for topic %s refused: %s", topic.topic_name, error)
                errors += [
                    PartitionError(topic.topic_name, s.partition_index, error.code) for s in topic.partition_states
                ]
                continue
            for outcome in await self._assign_all(topic):
                if isinstance(outcome, PartitionError):
                    errors.append(outcome)
                else:
                    assigned.append(outcome)
        addresses = {leader.broker_id: (leader.host_name, leader.port) for leader in request.live_leaders}
        if self._broker_epoch() > request.broker_epoch:
            raise BrokerError(
                ErrorCode.STALE_BROKER_EPOCH,
                f"the request is for broker epoch {request.broker_epoch}, but this is {self._broker_epoch()} by now",
            )
        taken_on: dict[int, list[_Assigned]] = {}
        for entry in assigned:
            try:
                self._apply_state(entry, addresses)
                taken_on.setdefault(entry.state.leader, []).append(entry)
            except BrokerError as error:
                topic_partition = entry.topic_partition
                logger.error("%s cannot take on its role: %s", topic_partition, error)
                errors.append(PartitionError(topic_partition.topic, topic_partition.partition, error.code))
                continue
            if entry.state.leader == NO_LEADER:
                errors.append(_log_end(entry.partition))
        self._log_roles(request, taken_on)
        self._fetchers.close_idle()
        return errors

    def _log_roles(self, request: LeaderAndIsrRequest, taken_on: dict[int, list[_Assigned]]) -> None:
        """One short line for the order: there may be ten thousand partitions, in a hundred orders."""
        roles: list[str] = []
        for leader, entries in sorted(taken_on.items()):
            is_here = leader == self._config.broker_id
            what = "leads" if is_here else "has no leader for" if leader == NO_LEADER else f"follows broker {leader} in"
            limit = NAMED if len(taken_on) == 1 else 1
            roles.append(f"{what} {named([entry.topic_partition for entry in entries], limit)}")
            for entry in entries:
                logger.debug("%s %s in epoch %d", what, entry.topic_partition, entry.state.leader_epoch)
        if roles:
            shown = "; ".join(roles)
            logger.info("order %d of controller epoch %d: %s", request.number, request.controller_epoch, shown)

    async def _assign_all(self, topic: LeaderAndIsrTopic) -> list[_Assigned | PartitionError]:
        """In the order of the request. Logs that are to be made are made together."""
        await self._create_logs(topic)
        outcomes: list[_Assigned | PartitionError] = []
        for number, state in enumerate(topic.partition_states):
            if number % ASSIGNED_AT_ONCE == 0:
                await asyncio.sleep(0)
            outcomes.append(await self._assign(topic, state))
        return outcomes

    async def _create_logs(self, topic: LeaderAndIsrTopic) -> None:
        """Of the partitions that are not here, as far as that works: `_assign` says where it does not."""
        missing: list[TopicPartition] = []
        new: set[TopicPartition] = set()
        for state in topic.partition_states:
            topic_partition = TopicPartition(topic.topic_name, state.partition_index)
            if topic_partition in self._partitions:
                continue
            with suppress(BrokerError):
                self._check_order(topic_partition, topic.topic_id, state.leader_epoch)
                missing.append(topic_partition)
                if state.is_new:
                    new.add(topic_partition)
        if missing:
            await self._logs.create(
                missing, topic.topic_id, self._log_config(self._topic_configs.of(topic.topic_name)), new
            )

    def _check_order(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        """Raises BrokerError where the order is about a replica that was deleted here since."""
        if self._was_deleted(topic_partition, topic_id, leader_epoch):
            raise BrokerError(
                ErrorCode.STALE_CONTROLLER_EPOCH,
                f"{topic_partition} of the topic with id {topic_id} was deleted here",
            )
        self.healer.check(topic_partition, topic_id, leader_epoch)

    async def _assign(self, topic: LeaderAndIsrTopic, state: LeaderAndIsrPartition) -> _Assigned | PartitionError:
        topic_partition = TopicPartition(topic.topic_name, state.partition_index)
        try:
            self._check_order(topic_partition, topic.topic_id, state.leader_epoch)
            partition = await self._ensure_partition(topic_partition, topic.topic_id, is_new=state.is_new)
            if partition.is_stale(state):
                raise BrokerError(
                    ErrorCode.STALE_CONTROLLER_EPOCH,
                    f"{topic_partition} is in epoch {partition.leader_epoch}, not {state.leader_epoch}",
                )
        except BrokerError as error:
            logger.warning("LeaderAndIsr for %s refused: %s", topic_partition, error)
            if isinstance(error, Shortage):
                self.healer.replica_refused(topic_partition)
            return PartitionError(topic.topic_name, state.partition_index, error.code)
        return _Assigned(topic_partition, state, partition)

    async def _read_topic_config(self, topic: str, topic_id: str, states: list[LeaderAndIsrPartition]) -> None:
        """The topic's own settings, read from ZooKeeper where a partition is new here: be it of another topic of that
        name than is known.

        Raises BrokerError(INVALID_CONFIG) where they make no sense: with others in their place, acks=all might promise
        less than the topic's owner set.
        """
        here = [self._partitions.get(TopicPartition(topic, s.partition_index)) for s in states]
        if all(one is not None and topic_id in ("", one.log.topic_id) for one in here):
            return
        while True:
            try:
                await self._read_settings(topic, await self._up_to_date_session())
                self._refused_topics.pop(topic, None)
                break
            except (InvalidConfig, MalformedZnode) as error:
                path = znodes.topic_config_path(topic)
                raise BrokerError(ErrorCode.INVALID_CONFIG, f"{error}; correct the znode {path}") from error
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(ZOOKEEPER_RETRY_S)

    def _was_deleted(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> bool:
        """Whether the order is from before the deletion, and comes late, over a connection that was given up: if it
        were obeyed, it would make a replica of a topic that is gone, in the way of the next one of its name."""
        return leader_epoch <= self._deleted.get((topic_id, topic_partition), NO_EPOCH)

    def _remember_deletion(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        if topic_id:
            self._deleted[topic_id, topic_partition] = leader_epoch
            if len(self._deleted) > DELETIONS_REMEMBERED:
                del self._deleted[next(iter(self._deleted))]

    async def _up_to_date_session(self) -> ZooKeeperSession:
        """A session that reads what there was when the present order came, or newer: it may be about a topic that was
        created just now. Raises ZooKeeperError."""
        session = await self._sessions()
        if session is not self._up_to_date:
            await catch_up(session)
            self._up_to_date = session
        return session

    async def _ensure_partition(self, topic_partition: TopicPartition, topic_id: str, *, is_new: bool) -> Partition:
        partition = self._partitions.get(topic_partition)
        if partition is not None and is_older(partition.log.topic_id, topic_id):
            self._end_part(partition)  # its topic is gone, though nobody has told this broker to delete it
            partition = None
        if partition is not None:
            if topic_id and partition.log.topic_id != topic_id:
                raise BrokerError(
                    ErrorCode.INCONSISTENT_TOPIC_ID,
                    f"{topic_partition} has topic id {partition.log.topic_id} here, but the controller says {topic_id}",
                )
            return partition
        asked_for = self._log_config(self._topic_configs.of(topic_partition.topic))
        log = await self._logs.get_or_create(topic_partition, topic_id, asked_for, is_new=is_new)
        config = self._topic_configs.of(topic_partition.topic)  # they may have changed meanwhile
        if self._log_config(config) != asked_for:
            log.configure(self._log_config(config))
        leader_quota, follower_quota = self._quotas_of(topic_partition, config)
        partition = self._partitions[topic_partition] = Partition(
            topic_partition,
            log,
            self._settings,
            self._world.clock,
            self._metadata.alive_epoch,
            high_watermark=self._logs.high_watermark(topic_partition),
            min_insync_replicas=config.min_insync_replicas,
            traffic=self.traffic.setdefault(topic_partition.topic, Traffic()),
            may_be_deposed=self._may_be_deposed,
            store_start_soon=self._store_start_soon,
            leader_quota=leader_quota,
            follower_quota=follower_quota,
            give_up=self._give_up_soon,
        )
        log.on_flushed = partial(self._flushed, partition)
        return partition

    def _store_start_soon(self, topic_partition: TopicPartition) -> None:
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            self._retention.store_start_soon(partition.log.log_dir, topic_partition)

    def _log_moved(self, partition: Partition) -> None:
        """Its log is in another directory from now on, and all of it is flushed."""
        partition.log.on_flushed = partial(self._flushed, partition)
        self._flushed(partition)
        self._deletions.check_soon(partition.topic_partition)  # where it begins is on disk, too

    def _quotas_of(self, topic_partition: TopicPartition, topic: TopicConfig) -> tuple[Quota | None, Quota | None]:
        """As a leader, and as a follower."""
        return (
            self._quota_of(topic_partition, self._leader_quota, topic.leader_replication_throttled_replicas),
            self._quota_of(topic_partition, self._follower_quota, topic.follower_replication_throttled_replicas),
        )

    def _quota_of(self, topic_partition: TopicPartition, quota: Quota | None, replicas: str) -> Quota | None:
        return quota if is_throttled(replicas, topic_partition.partition, self._config.broker_id) else None

    def _flushed(self, partition: Partition) -> None:
        """Of a log with durability=synced, or that was moved: this replica may have more now."""
        if partition.advance_high_watermark():
            self._high_watermark_moved(partition)
        elif not partition.is_leader:
            self._fetchers.wake(partition.leader_id)

    def lost_leaders(self) -> set[int]:
        """Brokers from which this one follows, and that have just gone, as far as it can see."""
        return self._fetchers.lost_leaders()

    def _may_be_deposed(self, told_in_broker_epoch: int) -> bool:
        """Whether a leader may have a successor that this broker has not heard of: it has lost ZooKeeper, or was away
        for so long that it had to register again, and has not been told its role since."""
        return not self._is_in_touch() or self._broker_epoch() != told_in_broker_epoch

    def _log_config(self, topic: TopicConfig) -> LogConfig:
        config = self._config
        policy = config.log_cleanup_policy if topic.cleanup_policy is None else topic.cleanup_policy
        compact, delete = "compact" in policy, "delete" in policy
        segment_ms = topic.segment_ms or config.log_roll_ms
        max_compaction_lag_ms = _either(topic.max_compaction_lag_ms, config.log_cleaner_max_compaction_lag_ms)
        if compact:
            segment_ms = min(segment_ms, max_compaction_lag_ms)  # the active segment is never compacted
        difference_ms = _either(
            topic.message_timestamp_difference_max_ms, config.log_message_timestamp_difference_max_ms
        )
        return LogConfig(
            segment_bytes=topic.segment_bytes or config.log_segment_bytes,
            index_interval_bytes=topic.index_interval_bytes or config.log_index_interval_bytes,
            max_message_bytes=topic.max_message_bytes or config.message_max_bytes,
            columns=topic.record_format == "columns",
            compression=_codec(topic.compression_type or config.compression_type),
            compression_level=_compression_level(topic, config),
            log_append_time=(topic.message_timestamp_type or config.log_message_timestamp_type) == "LogAppendTime",
            message_timestamp_before_max_ms=_first_limit(
                _either(topic.message_timestamp_before_max_ms, config.log_message_timestamp_before_max_ms),
                difference_ms,
            ),
            message_timestamp_after_max_ms=_first_limit(
                _either(topic.message_timestamp_after_max_ms, config.log_message_timestamp_after_max_ms), difference_ms
            ),
            flush_messages=_first_limit(_either(topic.flush_messages, config.log_flush_interval_messages)),
            flush_ms=_first_limit(_either(topic.flush_ms, config.log_flush_interval_ms)),
            producer_id_expiration_ms=config.producer_id_expiration_ms,
            segment_ms=segment_ms,
            segment_jitter_ms=_either(topic.segment_jitter_ms, config.log_roll_jitter_ms),
            synced=topic.durability == SYNCED,
            retention_ms=_limit(_either(topic.retention_ms, config.log_retention_ms)) if delete else None,
            retention_bytes=_limit(_either(topic.retention_bytes, config.log_retention_bytes)) if delete else None,
            delete=delete,
            compact=compact,
            min_cleanable_dirty_ratio=(
                config.log_cleaner_min_cleanable_ratio
                if topic.min_cleanable_dirty_ratio is None
                else topic.min_cleanable_dirty_ratio
            ),
            min_compaction_lag_ms=_either(topic.min_compaction_lag_ms, config.log_cleaner_min_compaction_lag_ms),
            max_compaction_lag_ms=max_compaction_lag_ms if max_compaction_lag_ms < 2**63 - 1 else None,
            delete_retention_ms=_either(topic.delete_retention_ms, config.log_cleaner_delete_retention_ms),
        )

    def _apply_state(self, entry: _Assigned, addresses: dict[int, tuple[str, int]]) -> None:
        topic_partition, state, partition = entry
        if self._partitions.get(topic_partition) is not partition:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{topic_partition} has been set aside meanwhile")
        me = self._config.broker_id
        known_role, known_epoch = partition.role, partition.leader_epoch
        partition.told_in_broker_epoch = self._broker_epoch()
        if state.leader == me:
            self._fetchers.stop_following(topic_partition)
            partition.become_leader(state)
            if partition.eligible or partition.is_to_be_recorded:
                self.isr_writer.propose(partition)
        else:
            partition.become_follower(state)
            address = addresses.get(state.leader)
            if address is None:
                self._fetchers.stop_following(topic_partition)
            elif state.leader_epoch > known_epoch or not self._fetchers.follows(topic_partition, state.leader, address):
                self._fetchers.follow(partition, state.leader, address)
        self._check_waits(topic_partition)
        if (partition.role, partition.leader_epoch) != (known_role, known_epoch):
            for listener in self._listeners:
                told = listener.on_leader if partition.is_leader else listener.on_follower
                told(topic_partition, partition.leader_epoch)

    async def stop_replicas(self, request: StopReplicaRequest) -> list[PartitionError]:
        """Stop following or leading; delete the log where told to. A partition that is not here is stopped already, and
        so is one of another topic of that name: an order may come late, over a connection that was given up."""
        errors: list[PartitionError] = []
        for topic in request.topic_states:
            for state in topic.partition_states:
                topic_partition = TopicPartition(topic.topic_name, state.partition_index)
                held = await self._logs.topic_id(topic_partition)
                if topic.topic_id and held and held != topic.topic_id:
                    logger.warning(
                        "%s: told to stop it with topic id %s; it has %s here", topic_partition, topic.topic_id, held
                    )
                    continue
                partition = self._partitions.get(topic_partition)
                fenced = state.leader_epoch not in (EPOCH_DURING_DELETE, NO_EPOCH) and (
                    partition is not None and state.leader_epoch < partition.leader_epoch
                )
                if fenced:
                    code = ErrorCode.FENCED_LEADER_EPOCH
                    errors.append(PartitionError(topic.topic_name, state.partition_index, code))
                    continue
                self._fetchers.stop_following(topic_partition)
                if partition is not None and partition.is_leader:
                    partition.stop_leading()
                    for listener in self._listeners:
                        listener.on_follower(topic_partition, partition.leader_epoch)
                if state.delete_partition:
                    try:
                        await self._delete(topic_partition, topic.topic_id, state.leader_epoch)
                    except BrokerError as error:
                        if isinstance(error, Shortage):
                            self.healer.replica_refused(topic_partition)
                        errors.append(PartitionError(topic.topic_name, state.partition_index, error.code))
                else:
                    self._check_waits(topic_partition)
            if any(state.delete_partition for state in topic.partition_states):
                self._forget_topic_without_partitions(topic.topic_name)
        self._fetchers.close_idle()
        return errors

    async def _delete(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        """Raises BrokerError where the files cannot be deleted; the replica is out of service all the same."""
        self._remember_deletion(topic_partition, topic_id, leader_epoch)
        partition = self._partitions.pop(topic_partition, None)
        if partition is not None and partition.is_leader:
            for listener in self._listeners:
                listener.on_follower(topic_partition, partition.leader_epoch)
        self._check_waits(topic_partition)  # before the disk, which may take long
        try:
            await self._logs.delete(topic_partition)
            self._deleted_replicas.add(topic_partition)
        except BrokerError as error:
            logger.error("%s cannot be deleted: %s", topic_partition, error)
            raise

    def _forget_topic_without_partitions(self, topic: str) -> None:
        if not any(partition.topic == topic for partition in self._partitions):
            self._refused_topics.pop(topic, None)
            self.traffic.pop(topic, None)
            self._topic_configs.forget(topic)

    async def delete_strays(self) -> None:
        """This broker has just been told of every topic that there is. Delete the replicas that were moved to other
        brokers while it was away, or whose order to go was lost with the controller that gave it (KAFKA-1120).

        Only what is certain. Either it is this very topic that has its replicas elsewhere, in a leader epoch in which,
        or after which, nothing was written here. Whoever tells it has the highest controller epoch that this broker
        knows of; and a newer controller that gives a replica to this broker does so in a later leader epoch.

        Or there is a newer topic of that name, which has no such replica here: no topic is made while an older one has
        its name, so the older one is gone, and all its replicas with it that the controller still counted. That a topic
        is not there proves nothing: its znode may be malformed, or have been removed by hand, and then its replicas are
        all that there is.
        """
        for log in list(self._logs.logs()):
            topic_partition = log.partition
            topic_id = self._metadata.topic_id(topic_partition.topic)
            known = self._metadata.partition(topic_partition)
            is_elsewhere = known is not None and self._config.broker_id not in known.replicas
            if topic_id is None or self._logs.get(topic_partition) is not log:
                continue
            if is_older(log.topic_id, topic_id):
                if is_elsewhere or self._metadata.has_fewer_partitions(topic_partition):
                    logger.warning(
                        "%s: its topic, %s, is gone: %s came after it", topic_partition, log.topic_id, topic_id
                    )
                    await self._delete_stray(log, LAST_EPOCH)
                continue
            if known is None or not is_elsewhere or not log.topic_id or topic_id != log.topic_id:
                continue
            last_epoch = log.latest_epoch
            if last_epoch > known.leader_epoch:
                logger.error(
                    "%s: it is on the brokers %s, and not on this one, in leader epoch %d; but this one has records of "
                    "epoch %d: they are kept",
                    topic_partition,
                    known.replicas,
                    known.leader_epoch,
                    last_epoch,
                )
                continue
            logger.warning("%s: it is on the brokers %s, and not on this one", topic_partition, known.replicas)
            await self._delete_stray(log, known.leader_epoch)

    async def _delete_stray(self, log: Log, leader_epoch: int) -> None:
        self._fetchers.stop_following(log.partition)
        with suppress(BrokerError):  # its directory has failed; logged
            await self._delete(log.partition, log.topic_id, leader_epoch)
        self._forget_topic_without_partitions(log.partition.topic)

    def reconsider_isrs(self) -> None:
        """The controller has said which brokers live: see `IsrWriter.reconsider`."""
        self.isr_writer.reconsider()

    def log_dir_failed(self) -> None:
        """A log directory is offline, just now. Its replicas neither lead nor follow from here on, and what waits for
        them is answered; the controller makes others lead."""
        for topic_partition, partition in list(self._partitions.items()):
            if self._logs.is_offline(topic_partition):
                self._end_part(partition)

    def _set_aside(self, partition: Partition, reason: str) -> None:
        """A follower's log cannot go on: that costs this replica alone. Its leader takes it out of the ISR for its lag;
        the controller hears of it with the next order about it."""
        if self._partitions.get(partition.topic_partition) is partition:
            self._end(partition, reason, is_damaged=False)

    def _give_up_soon(self, partition: Partition, reason: str) -> None:
        """Its log is damaged. Not now: whoever met that is still at work with it."""
        self._supervisor.start(self._give_up(partition, reason), f"end of {partition.topic_partition}, damaged")

    async def _give_up(self, partition: Partition, reason: str) -> None:
        """As if the log directory had failed, but for this replica alone."""
        if self._partitions.get(partition.topic_partition) is not partition:
            return
        self.healer.replica_lost(partition.topic_partition, partition.leader_epoch)
        self._end(partition, reason, is_damaged=True)
        await tell_of_lost_replicas(self._sessions, self._config.broker_id)

    def _end(self, partition: Partition, reason: str, *, is_damaged: bool) -> None:
        """Its part here ends, and its log is taken out of service."""
        topic_partition = partition.topic_partition
        closing = self._logs.set_aside(topic_partition, reason, is_damaged=is_damaged)
        self._supervisor.start(closing, f"end of the log of {topic_partition}")
        self._end_part(partition)

    def _end_part(self, partition: Partition) -> None:
        """Nothing is read, written or followed here from now on."""
        topic_partition = partition.topic_partition
        del self._partitions[topic_partition]
        self._fetchers.stop_following(topic_partition)
        if partition.is_leader:
            for listener in self._listeners:
                listener.on_follower(topic_partition, partition.leader_epoch)
        self._check_waits(topic_partition)


def _settings(config: BrokerConfig) -> Settings:
    return Settings(
        broker_id=config.broker_id,
        lag_time_max_s=config.replica_lag_time_max_ms / 1_000,
        min_insync_replicas=config.min_insync_replicas,
    )


def _cleaner_settings(config: BrokerConfig) -> CleanerSettings:
    return CleanerSettings(
        config.log_cleaner_backoff_ms,
        config.log_cleaner_dedupe_buffer_size,
        config.log_cleaner_io_max_bytes_per_second,
    )


def _changed(quota: Quota | None, bytes_per_s: int | None, clock: Clock) -> Quota | None:
    """What was used up of the quota still counts."""
    if quota is None or bytes_per_s is None:
        return _quota(bytes_per_s, clock)
    quota.change_rate(bytes_per_s)
    return quota


def _quota(bytes_per_s: int | None, clock: Clock) -> Quota | None:
    return None if bytes_per_s is None else Quota(bytes_per_s, clock)


def _either(of_topic: int | None, of_broker: int) -> int:
    return of_broker if of_topic is None else of_topic


def _codec(compression_type: str) -> Compression | None:
    """None: that of the producer."""
    if compression_type == "producer":
        return None
    return Compression.NONE if compression_type == "uncompressed" else Compression.from_name(compression_type)


def _compression_level(topic: TopicConfig, config: BrokerConfig) -> int | None:
    """Of the codec that its batches are to have."""
    match topic.compression_type or config.compression_type:
        case "gzip":
            level = _either(topic.compression_gzip_level, config.compression_gzip_level)
            return None if level in (-1, 0) else level
        case "lz4":
            level = _either(topic.compression_lz4_level, config.compression_lz4_level)
            return None if level == LZ4_DEFAULT_LEVEL else level
        case "zstd":
            return _either(topic.compression_zstd_level, config.compression_zstd_level)
        case _:
            return None


def _first_limit(*settings: int) -> int | None:
    """The first that is one."""
    return next((setting for setting in settings if setting < 2**63 - 1), None)


def _limit(setting: int) -> int | None:
    return None if setting == -1 else setting


def _admit_to(partition: Partition, fetch: FetchPartition, replica_id: int) -> AdmittedFetch | RefusedFetch:
    refusal = partition.admit(fetch, replica_id)
    if refusal is not None:
        return partition.topic_partition, refusal
    return AdmittedFetch(partition.topic_partition, fetch, partition, partition.leader_epoch)


def _log_end(partition: Partition) -> PartitionError:
    """The answer for a replica that has no leader to follow."""
    topic, index = partition.topic_partition
    end = partition.log.log_end_offset
    last_epoch = partition.log.epoch_at(end - 1)  # not the log's latest epoch, in which nothing may have been written
    return PartitionError(topic, index, ErrorCode.NONE, partition.leader_epoch, last_epoch, end)


def _check(records: Buffer, partition: TopicPartition, config: LogConfig, now_ms: int) -> None:
    """In a worker thread. Raises BrokerError."""
    check_acceptable(records, read_headers(records, partition), partition, config, now_ms)

"""The controller's orders: which replicas lead, follow or stop (Kafka's becomeLeaderOrFollower and stopReplicas)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.metrics.log_lines import NAMED, named
from minibroker.broker.replication.delayed import Waits
from minibroker.broker.replication.following.fetcher_manager import ReplicaFetcherManager
from minibroker.broker.replication.following.silences import Silence
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.leadership import LeadershipListeners
from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.upkeep.healing import Healer
from minibroker.broker.settings.types import InvalidConfig
from minibroker.broker.storage.io_errors import Shortage
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    LeaderAndIsrPartition,
    LeaderAndIsrRequest,
    LeaderAndIsrTopic,
    PartitionError,
    StopReplicaRequest,
)
from minibroker.protocol.model import NO_EPOCH, NO_LEADER, TopicPartition
from minibroker.protocol.topic_ids import is_older
from minibroker.protocol.world import ConnectionLoss, SessionExpired, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.replication")

EPOCH_DURING_DELETE = -2
"""The leader epoch of a StopReplica that deletes in any epoch (Kafka's LeaderAndIsr.EpochDuringDelete)."""
LAST_EPOCH = 2**31 - 1
"""The highest leader epoch."""
ASSIGNED_AT_ONCE = 25
"""Replicas that get their roles in one turn of the loop."""
ZOOKEEPER_RETRY_S = 0.1


class _Assigned(NamedTuple):
    """One partition of a LeaderAndIsr request, ready to be applied."""

    topic_partition: TopicPartition
    state: LeaderAndIsrPartition
    partition: Partition


@dataclass(eq=False)
class ControllerOrders:
    """Carries out one order at a time: the caller has checked the controller's and the broker's epoch, and lets no
    other control request in between."""

    _broker_id: int
    _partitions: Partitions
    _logs: LogDirs
    _metadata: MetadataCache
    _lifecycle: ReplicaLifecycle
    _settings: ReplicaSettings
    _fetchers: ReplicaFetcherManager
    _isr_writer: IsrWriter
    _waits: Waits
    _listeners: LeadershipListeners
    _healer: Healer
    _sessions: Callable[[], Awaitable[ZooKeeperSession]]
    _broker_epoch: Callable[[], int]
    on_silent: Callable[[int, int, float, float | None], None] = lambda broker_id, controller_epoch, *silence: None
    """Called if an order takes a broker out of the leaders or in-sync replicas that had been silent, with its id, the
    controller's epoch, and its longest `Silence`."""
    _up_to_date: ZooKeeperSession | None = None
    """The session that `_up_to_date_session` has brought up to date for the present order."""

    # -- lead or follow --

    async def apply_leader_and_isr(self, request: LeaderAndIsrRequest) -> list[PartitionError]:
        """Take the roles of the request, if their leader epochs are newer than those held here.

        The failure of one partition does not affect the others. Return the errors and, for each replica without a
        leader, how its log ends: the controller elects by that if no replica's data can be trusted.

        Raises BrokerError(STALE_BROKER_EPOCH), with no role changed, if this broker has registered again since the
        request was sent: the controller sends everything anew (KAFKA-9307).
        """
        errors: list[PartitionError] = []
        assigned: list[_Assigned] = []
        self._up_to_date = None
        for topic in request.topic_states:
            try:
                await self._read_topic_config(topic.topic_name, topic.topic_id, topic.partition_states)
            except BrokerError as error:
                self._settings.refuse(topic.topic_name, error)
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
        silent: dict[int, list[Silence]] = {}
        for entry in assigned:
            missed = self._replaced(entry)
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
            for broker_id, silence in missed.items():
                silent.setdefault(broker_id, []).extend([] if silence is None else [silence])
        for broker_id, silences in silent.items():
            self._fetchers.silences.replaced(broker_id)
            if silences:
                self.on_silent(broker_id, request.controller_epoch, *max(silences, key=lambda each: each.began_s))
        self._log_roles(request, taken_on)
        self._fetchers.close_idle()
        return errors

    def _replaced(self, entry: _Assigned) -> dict[int, Silence | None]:
        """Return the brokers that the order takes out of the partition's ISR, as far as this broker knows that: if it
        follows, that is the leader. Each with its silence, if it was silent."""
        _, state, partition = entry
        known: tuple[int, ...] = partition.isr if partition.is_leader else (partition.leader_id,)
        if state.leader_epoch <= partition.leader_epoch:
            return {}
        in_sync = () if state.leader == NO_LEADER else state.isr  # the last one stays there while it is away
        kept = (*in_sync, self._broker_id, NO_LEADER)
        replaced = [broker_id for broker_id in known if broker_id not in kept]
        return {b: self._fetchers.silences.present_or_recent(b, partition.role_since_s) for b in replaced}

    def _log_roles(self, request: LeaderAndIsrRequest, taken_on: dict[int, list[_Assigned]]) -> None:
        """Write one short line for the order: ten thousand partitions may come in a hundred orders."""
        roles: list[str] = []
        for leader, entries in sorted(taken_on.items()):
            is_here = leader == self._broker_id
            what = "leads" if is_here else "has no leader for" if leader == NO_LEADER else f"follows broker {leader} in"
            limit = NAMED if len(taken_on) == 1 else 1
            roles.append(f"{what} {named([entry.topic_partition for entry in entries], limit)}")
            for entry in entries:
                logger.debug("%s %s in epoch %d", what, entry.topic_partition, entry.state.leader_epoch)
        if roles:
            shown = "; ".join(roles)
            logger.info("order %d of controller epoch %d: %s", request.number, request.controller_epoch, shown)

    async def _read_topic_config(self, topic: str, topic_id: str, states: list[LeaderAndIsrPartition]) -> None:
        """Read the topic's settings from ZooKeeper if one of its partitions is new here, or belongs to another topic of
        that name.

        Raises BrokerError(INVALID_CONFIG) if they make no sense: with others in their place, acks=all might promise
        less than the topic's owner set.
        """
        here = [self._partitions.get(TopicPartition(topic, s.partition_index)) for s in states]
        if all(one is not None and topic_id in ("", one.log.topic_id) for one in here):
            return
        while True:
            try:
                await self._settings.read(topic, await self._up_to_date_session())
                self._settings.accept(topic)
                break
            except (InvalidConfig, MalformedZnode) as error:
                path = znodes.topic_config_path(topic)
                raise BrokerError(ErrorCode.INVALID_CONFIG, f"{error}; correct the znode {path}") from error
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(ZOOKEEPER_RETRY_S)

    async def _up_to_date_session(self) -> ZooKeeperSession:
        """Return a session that reads ZooKeeper's state as of the arrival of the present order, or newer: the order may
        concern a topic that has just been created. Raises ZooKeeperError."""
        session = await self._sessions()
        if session is not self._up_to_date:
            await catch_up(session)
            self._up_to_date = session
        return session

    async def _assign_all(self, topic: LeaderAndIsrTopic) -> list[_Assigned | PartitionError]:
        """Return the outcomes in the order of the request. Missing logs are created together."""
        await self._create_logs(topic)
        outcomes: list[_Assigned | PartitionError] = []
        for number, state in enumerate(topic.partition_states):
            if number % ASSIGNED_AT_ONCE == 0:
                await asyncio.sleep(0)
            outcomes.append(await self._assign(topic, state))
        return outcomes

    async def _create_logs(self, topic: LeaderAndIsrTopic) -> None:
        """Create the logs of partitions that are not here, as far as that works: `_assign` reports each failure."""
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
            await self._logs.create(missing, topic.topic_id, self._settings.log_config(topic.topic_name), new)

    def _check_order(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        """Raises BrokerError if the order is older than the deletion of the replica here."""
        if self._lifecycle.was_deleted(topic_partition, topic_id, leader_epoch):
            raise BrokerError(
                ErrorCode.STALE_CONTROLLER_EPOCH,
                f"{topic_partition} of the topic with id {topic_id} was deleted here",
            )
        self._healer.check(topic_partition, topic_id, leader_epoch)

    async def _assign(self, topic: LeaderAndIsrTopic, state: LeaderAndIsrPartition) -> _Assigned | PartitionError:
        topic_partition = TopicPartition(topic.topic_name, state.partition_index)
        try:
            self._check_order(topic_partition, topic.topic_id, state.leader_epoch)
            partition = await self._lifecycle.ensure(topic_partition, topic.topic_id, is_new=state.is_new)
            if partition.is_stale(state):
                raise BrokerError(
                    ErrorCode.STALE_CONTROLLER_EPOCH,
                    f"{topic_partition} is in epoch {partition.leader_epoch}, not {state.leader_epoch}",
                )
        except BrokerError as error:
            logger.warning("LeaderAndIsr for %s refused: %s", topic_partition, error)
            if isinstance(error, Shortage):
                self._healer.replica_refused(topic_partition)
            return PartitionError(topic.topic_name, state.partition_index, error.code)
        return _Assigned(topic_partition, state, partition)

    def _apply_state(self, entry: _Assigned, addresses: dict[int, tuple[str, int]]) -> None:
        topic_partition, state, partition = entry
        if self._partitions.get(topic_partition) is not partition:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{topic_partition} has been set aside meanwhile")
        known_role, known_epoch = partition.role, partition.leader_epoch
        partition.told_in_broker_epoch = self._broker_epoch()
        if state.leader == self._broker_id:
            self._fetchers.stop_following(topic_partition)
            partition.become_leader(state)
            if partition.eligible or partition.is_to_be_recorded:
                self._isr_writer.propose(partition)
        else:
            partition.become_follower(state)
            address = addresses.get(state.leader)
            if address is None:
                self._fetchers.stop_following(topic_partition)
            elif state.leader_epoch > known_epoch or not self._fetchers.follows(topic_partition, state.leader, address):
                self._fetchers.follow(partition, state.leader, address)
        self._waits.role_changed(topic_partition)
        if (partition.role, partition.leader_epoch) != (known_role, known_epoch):
            self._listeners.role_taken(partition)

    # -- stop --

    async def stop_replicas(self, request: StopReplicaRequest) -> list[PartitionError]:
        """Stop following or leading, and delete the log if the request says so. A partition that is not here, or that
        belongs to another topic of that name, counts as stopped: an order may come late, over a connection that was
        given up."""
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
                    self._listeners.resigned(partition)
                if state.delete_partition:
                    try:
                        await self._lifecycle.delete(topic_partition, topic.topic_id, state.leader_epoch)
                    except BrokerError as error:
                        if isinstance(error, Shortage):
                            self._healer.replica_refused(topic_partition)
                        errors.append(PartitionError(topic.topic_name, state.partition_index, error.code))
                else:
                    self._waits.role_changed(topic_partition)
            if any(state.delete_partition for state in topic.partition_states):
                self._lifecycle.forget_topic_without_partitions(topic.topic_name)
        self._fetchers.close_idle()
        return errors

    # -- strays --

    async def delete_strays(self) -> None:
        """Delete the replicas that the controller no longer counts: they were moved to other brokers while this one was
        away, or the order to delete them was lost with the controller that gave it (KAFKA-1120). Called when this
        broker has just received every topic of the cluster.

        A replica is deleted only in one of two cases, both certain:
        - This very topic has its replicas elsewhere, in a leader epoch in which, or after which, nothing was written
          here. The sender has the highest controller epoch that this broker knows, and a newer controller that gives
          a replica to this broker does so in a later leader epoch.
        - There is a newer topic of that name, which has no such replica here. No topic is created while an older one
          has its name, so the older topic is gone, with all the replicas that the controller still counted.

        That a topic is missing proves nothing: its znode may be malformed, or removed by hand, and then its replicas
        are all that is left.
        """
        for log in list(self._logs.logs()):
            topic_partition = log.partition
            topic_id = self._metadata.topic_id(topic_partition.topic)
            known = self._metadata.partition(topic_partition)
            is_elsewhere = known is not None and self._broker_id not in known.replicas
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
            await self._lifecycle.delete(log.partition, log.topic_id, leader_epoch)
        self._lifecycle.forget_topic_without_partitions(log.partition.topic)


def _log_end(partition: Partition) -> PartitionError:
    """Return the answer for a replica that has no leader to follow."""
    topic, index = partition.topic_partition
    end = partition.log.log_end_offset
    last_epoch = partition.log.epoch_at(end - 1)  # not the log's latest epoch, which may have no records
    return PartitionError(topic, index, ErrorCode.NONE, partition.leader_epoch, last_epoch, end)

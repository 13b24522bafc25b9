"""Execution of Plans: znodes first, under the controller's epoch; then memory; then the outbox.

The problem: between the decision and the write, leaders change ISRs, other sessions create nodes, the connection breaks
during the write, and another controller may be elected. A state in ZooKeeper must always be one that a controller
decided with knowledge of the state before.

The choice: writes are sent as `multi`s, all at once. Each begins with a check of `/controller_epoch` and has up to 100
more operations. If that check fails, the controller has been deposed and nothing was written. If a multi was refused
for another reason, or its outcome is unknown because the connection broke, all nodes of its writes are read at once. A
write that is there as planned is done. One whose node is as before is sent again. Anything else is a conflict: the
state is adopted into memory and reported, and the caller decides again about that partition. So one conflict costs a
read and a second multi, and a hundred conflicts cost the same.

The read decides correctly, because no two writes of a state are equal (each raises the leader epoch, and topics have
random ids), and because a request on a lost connection cannot arrive after one on the next connection: ZooKeeper
refuses requests of a session that has moved on.

Rejected: one multi per partition (Kafka's; a hundred times the round trips); omitting only the operation that ZooKeeper
named and sending the rest at once (a hundred conflicts in one multi would take a hundred rounds).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from minibroker.controller.decisions.cluster_state import BrokerAdded, BrokerRemoved, ClusterState
from minibroker.controller.decisions.plan import (
    CreateTopic,
    EnsureNode,
    MetadataUpdate,
    PartitionMove,
    Plan,
    RemoveAsRead,
    RemoveBroker,
    RemoveNode,
    ReplicaMove,
    SetReassignments,
    SetTopic,
    StopReplica,
    Write,
    WriteState,
)
from minibroker.controller.decisions.states import partition as partition_states
from minibroker.controller.decisions.states import replica as replica_states
from minibroker.controller.decisions.states.machine import IllegalMove, check
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.controller.executing import requests
from minibroker.controller.executing.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.executing.gather import decode_own_state
from minibroker.controller.executing.outbox import Outbox, Outgoing
from minibroker.controller.timeline import Timeline
from minibroker.protocol import znodes
from minibroker.protocol.apis import LEADER_AND_ISR, STOP_REPLICA, UPDATE_METADATA
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.world import (
    BadVersion,
    Check,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    SetData,
    Stat,
    ZooKeeperError,
)

MAX_OPERATIONS = 101
"""The check of the epoch and a hundred writes: one for each partition that is decided at a time."""
MAX_MULTI_BYTES = 1_000_000
_OPERATION_BYTES = 100
"""Bytes of an operation besides its path and data."""

_log = logging.getLogger(__name__)

_SHOWN = 20
"""Partitions of a request that the timeline names."""
_LOGGED_NOTES = 10
"""Notes of a plan that are logged; the timeline has all of them."""

_MOVES_AT_ONCE = 500
"""Moves after which the loop gets a turn: a plan about all partitions has many more, and the broker must serve its
clients meanwhile. Events are handled one at a time, so no decision sees a half-changed cluster state."""


class PlanOutcome(NamedTuple):
    """The parts of a plan that were not carried out as planned."""

    conflicts: tuple[TopicPartition, ...] = ()
    """Partitions that were not written because another state was found, which has been adopted."""
    existing_topics: frozenset[str] = frozenset()
    """Topics that were not created because they exist."""
    unwritten_topics: frozenset[str] = frozenset()
    """Topics whose assignment was not written because the znode has another version, or belongs to another topic. The
    caller must read and decide again."""
    obstacle: str | None = None
    """A node that could not be removed because it has children. Some nodes may have been removed; memory was not
    changed and nothing was sent. The caller must read and decide again."""


class _Moved(NamedTuple):
    """A move for the timeline, formatted only if it is shown."""

    what: str
    which: TopicPartition | replica_states.PartitionReplica
    before: PartitionState | replica_states.ReplicaState
    after: PartitionState | replica_states.ReplicaState

    def __str__(self) -> str:
        return f"{self.what} {self.which}: {self.before.value} -> {self.after.value}"


@dataclass
class _Written:
    states: dict[TopicPartition, LeaderAndIsr] = field(default_factory=dict)
    adopted: dict[TopicPartition, LeaderAndIsr] = field(default_factory=dict)
    conflicts: list[TopicPartition] = field(default_factory=list)
    existing_topics: set[str] = field(default_factory=set)
    unwritten_topics: set[str] = field(default_factory=set)
    obstacle: str | None = None


class _Batch(NamedTuple):
    writes: list[Write]
    operations: list[Operation]
    last: list[int]
    """For each write, the index of its last operation, whose result has the new version of a state."""


class PlanExecutor:
    """Belongs to one tenure. `execute` raises ControllerMoved, SessionExpired and unexpected ZooKeeperErrors."""

    def __init__(
        self,
        access: ZooKeeperAccess,
        state: ClusterState,
        epoch_version: int,
        outbox: Outbox,
        timeline: Timeline,
    ) -> None:
        self._access = access
        self._state = state
        self._epoch_version = epoch_version
        self._outbox = outbox
        self._timeline = timeline

    async def execute(self, plan: Plan) -> PlanOutcome:
        """Carry out the plan, except for conflicts, and illegal moves with everything that depends on them."""
        self._timeline.add("notes", plan.notes)
        alarms = {w.partition: w.alarm for w in plan.writes if isinstance(w, WriteState) and w.alarm}
        _log_notes(plan.notes, frozenset(alarms.values()))
        partition_moves, replica_moves, refused = await self._check_moves(plan)
        writes = [w for w in plan.writes if not (isinstance(w, WriteState) and w.partition in refused)]
        written = await self._write(writes)  # C5: znodes first, then memory, then the outbox
        if written.obstacle is not None:
            return PlanOutcome(obstacle=written.obstacle)
        unwritten = frozenset(
            w.partition for w in plan.writes if isinstance(w, WriteState) and w.partition not in written.states
        )
        self._timeline.unclean_elections += sum(1 for partition in alarms if partition in written.states)
        await self._remember(plan, partition_moves, replica_moves, written, unwritten)
        await self._send(plan, unwritten | refused)
        return PlanOutcome(
            tuple(written.conflicts), frozenset(written.existing_topics), frozenset(written.unwritten_topics)
        )

    # -- moves --

    async def _check_moves(
        self, plan: Plan
    ) -> tuple[list[PartitionMove], list[ReplicaMove], frozenset[TopicPartition]]:
        """Return the legal moves, and the partitions with an illegal one."""
        partition_moves: list[PartitionMove] = []
        replica_moves: list[ReplicaMove] = []
        illegal: list[IllegalMove] = []
        refused: set[TopicPartition] = set()
        partition_positions: dict[TopicPartition, PartitionState] = {}
        for number, partition_move in enumerate(plan.partition_moves, 1):
            await _breathe(number)
            partition, target = partition_move
            current = partition_positions.get(partition) or self._state.partition_state(partition)
            if check(partition_states.VALID_PREVIOUS_STATES, current, target):
                partition_positions[partition] = target
                partition_moves.append(partition_move)
            else:
                illegal.append(IllegalMove(f"partition {partition}", current, target))
                refused.add(partition)
        replica_positions: dict[PartitionReplica, replica_states.ReplicaState] = {}
        for number, replica_move in enumerate(plan.replica_moves, 1):
            await _breathe(number)
            replica, goal = replica_move
            position = replica_positions.get(replica) or self._state.replica_state(replica)
            if check(replica_states.VALID_PREVIOUS_STATES, position, goal):
                replica_positions[replica] = goal
                replica_moves.append(replica_move)
            else:
                illegal.append(IllegalMove(f"replica {replica}", position, goal))
        for move in illegal:
            _log.error("illegal move, nothing is changed: %s", move)
        self._timeline.add("illegal_moves", illegal)
        return partition_moves, replica_moves, frozenset(refused)

    # -- znodes --

    async def _write(self, writes: Sequence[Write]) -> _Written:
        written = _Written()
        self._timeline.add("writes", writes)
        pending: list[Write] = list(writes)
        while pending:
            batches = list(_batches(pending, self._epoch_version))
            answers = await self._access.multis([batch.operations for batch in batches])
            unsettled: list[Write] = []
            connection_lost = False
            for batch, answer in zip(batches, answers, strict=True):
                if not isinstance(answer, ZooKeeperError):
                    self._succeeded(batch, answer, written)
                    continue
                if isinstance(answer, ConnectionLoss):
                    connection_lost = True
                else:
                    cause = _refusal(answer)
                    # Only the first refusal is certainly caused by ZooKeeper's state; later ones may follow from it.
                    if isinstance(cause, NotEmpty) and not unsettled:
                        written.obstacle = str(cause)
                        return written
                unsettled += batch.writes
            if connection_lost:
                await self._access.reconnected()
            pending = await self._look_again(unsettled, written)
        return written

    def _succeeded(self, batch: _Batch, results: Sequence[str | Stat | None], written: _Written) -> None:
        for write, last in zip(batch.writes, batch.last, strict=True):
            if isinstance(write, WriteState):
                stat = results[last]
                version = stat.version if isinstance(stat, Stat) else 0
                written.states[write.partition] = _with_version(write.state, version)

    async def _look_again(self, writes: Sequence[Write], written: _Written) -> list[Write]:
        """Look up each of the writes, and return those that must be sent again."""
        if not writes:
            return []
        verdicts = await self._access.read([partial(self._look_up, write, written) for write in writes])
        return [write for write in verdicts if write is not None]

    async def _look_up(self, write: Write, written: _Written) -> Write | None:
        """Return the write if it must be sent again. May be repeated after a lost connection."""
        session = self._access.session
        match write:
            case WriteState():
                return await self._look_up_state(write, written)
            case CreateTopic(topic, znode, config):
                has_config = await session.exists(znodes.topic_config_path(topic)) is not None
                try:
                    data, _ = await session.get(znodes.topic_path(topic))
                except NoNode:
                    return CreateTopic(topic, znode, config, config_exists=has_config)
                if data != znodes.encode_topic(znode):
                    written.existing_topics.add(topic)
                    self._timeline.add("conflicts", [f"topic {topic} exists"])
                return None
            case SetTopic():
                return await self._look_up_topic(write, written)
            case SetReassignments(_, version):
                found = await self._found(znodes.REASSIGN_PARTITIONS)
                return write if found is not None and found[1].version == version else None
            case EnsureNode(path):
                missing = await session.exists(path) is None
                parent = path.rpartition("/")[0]
                return write if missing and await session.exists(parent) is not None else None
            case RemoveNode(path):
                return write if await session.exists(path) is not None else None
            case RemoveAsRead(path, czxid, version):
                stat = await session.exists(path)
                return write if stat is not None and (stat.czxid, stat.version) == (czxid, version) else None
            case RemoveBroker(broker_id, broker_epoch):
                stat = await session.exists(znodes.broker_path(broker_id))
                return write if stat is not None and stat.czxid == broker_epoch else None

    async def _found(self, path: str) -> tuple[bytes, Stat] | None:
        try:
            return await self._access.session.get(path)
        except NoNode:
            return None

    async def _look_up_state(self, write: WriteState, written: _Written) -> WriteState | None:
        session = self._access.session
        partition, plan = write.partition, write.state
        try:
            data, stat = await session.get(znodes.state_path(partition))
        except NoNode:
            if write.creates and await session.exists(znodes.topic_path(partition.topic)) is not None:
                parent_exists = await session.exists(znodes.partition_path(partition)) is not None
                return WriteState(partition, plan, parent_exists)
            self._timeline.add("conflicts", [f"the state znode of {partition} is gone: it is not written"])
            return None
        try:
            found = decode_own_state(partition, data, stat.version, plan.controller_epoch)
        except znodes.MalformedZnode as error:
            await self._access.require_term(plan.controller_epoch)
            self._timeline.add("conflicts", [f"{partition} is not written: {error}"])
            _log.error("%s is not written: %s", partition, error)
            return None
        if found == _with_version(plan, stat.version):
            written.states[partition] = found
            return None
        if not write.creates and stat.version == plan.partition_epoch and await self._is_allowed(write):
            return write
        self._timeline.add("conflicts", [f"{partition} is at version {stat.version}: {data.decode(errors='replace')}"])
        written.adopted[partition] = found
        written.conflicts.append(partition)
        return None

    async def _is_allowed(self, write: WriteState) -> bool:
        """Return whether the settings that the write depends on are unchanged since they were read."""
        if write.settings_version is None:
            return True
        stat = await self._access.session.exists(znodes.CONFIG_CHANGES)
        return stat is not None and stat.version == write.settings_version

    async def _look_up_topic(self, write: SetTopic, written: _Written) -> SetTopic | None:
        session = self._access.session
        topic, znode, version = write
        found = "it is gone"
        try:
            data, stat = await session.get(znodes.topic_path(topic))
            if stat.version > version and data == znodes.encode_topic(znode):
                return None
            found = f"it is at version {stat.version}"
            if stat.version == version:
                if not znode.topic_id or await session.exists(znodes.topic_id_path(topic, znode.topic_id)) is not None:
                    return write
                found = f"it is not, or no longer, the topic with the id {znode.topic_id}"
        except NoNode:
            pass
        self._timeline.add("conflicts", [f"topic {topic} is not written over version {version}: {found}"])
        written.unwritten_topics.add(topic)
        return None

    # -- memory --

    async def _remember(
        self,
        plan: Plan,
        partition_moves: Sequence[PartitionMove],
        replica_moves: Sequence[ReplicaMove],
        written: _Written,
        unwritten: frozenset[TopicPartition],
    ) -> None:
        state = self._state
        self._timeline.add("changes", plan.changes)
        for change in plan.changes:
            state.apply(change)
            if isinstance(change, BrokerAdded):
                self._outbox.add_broker(change.broker)
            elif isinstance(change, BrokerRemoved):
                self._outbox.remove_broker(change.broker_id)
        news = {p: found for p, found in plan.adopted.items() if state.leadership.get(p, found) != found}
        self._timeline.add_states("adopted", state.leadership, news)
        state.adopt(plan.adopted)
        state.adopt(written.adopted)
        self._timeline.add_states("states", state.leadership, written.states)
        state.adopt(written.states)
        moves: list[_Moved] = []
        for number, (partition, target) in enumerate(partition_moves, 1):
            await _breathe(number)
            if target is PartitionState.ONLINE and partition in unwritten:
                continue
            moves.append(_Moved("partition", partition, state.partition_state(partition), target))
            state.move_partition(partition, target)
        for number, (replica, goal) in enumerate(replica_moves, 1):
            await _breathe(number)
            moves.append(_Moved("replica", replica, state.replica_state(replica), goal))
            state.move_replica(replica, goal)
        self._timeline.add("moves", moves)

    # -- requests --

    async def _send(self, plan: Plan, unsettled: frozenset[TopicPartition]) -> None:
        """Queue the requests for each broker: LeaderAndIsr, UpdateMetadata, StopReplica without deletion, and
        StopReplica with deletion."""
        state = self._state
        described: requests.Described = {}
        for broker_id, partitions in plan.leader_and_isr.items():
            settled_here = [p for p in partitions if p not in unsettled]
            broker = state.live_brokers[broker_id]
            for isr_request, part in requests.leader_and_isr(
                state, broker, settled_here, plan.new_partitions, described
            ):
                self._outbox.put(broker_id, Outgoing(LEADER_AND_ISR, isr_request, part))
                self._timeline.add("requests", [f"LeaderAndIsr to {broker_id}: {_shown(part)}"])
                self._timeline.add_request(LEADER_AND_ISR.name, [broker_id], len(part))
                await asyncio.sleep(0)
        for update in plan.metadata_updates:
            settled = update._replace(partitions=tuple(p for p in update.partitions if p not in unsettled))
            for made_out in requests.update_metadata(state, settled):
                for broker_id in update.broker_ids:
                    broker = state.live_brokers[broker_id]
                    body = made_out(broker)
                    gone = tuple(topic.topic_name for topic in body.topic_states if topic.deleted)
                    self._outbox.put(broker_id, Outgoing(UPDATE_METADATA, body, deleted_topics=gone))
                await asyncio.sleep(0)
            self._timeline.add("requests", [_shown_update(settled)])
            self._timeline.add_request(UPDATE_METADATA.name, update.broker_ids, len(settled.partitions))
        stops_of: dict[tuple[bool, int], list[StopReplica]] = {}
        for stop in plan.stop_replicas:
            stops_of.setdefault((stop.delete, stop.replica.broker_id), []).append(stop)
        for (delete, broker_id), stops in stops_of.items():
            for stop_request, part in requests.stop_replica(state, state.live_brokers[broker_id], stops):
                self._outbox.put(broker_id, Outgoing(STOP_REPLICA, stop_request, _answerable(part, delete=delete)))
                what = " (delete)" if delete else ""
                self._timeline.add("requests", [f"StopReplica to {broker_id}: {_shown(part)}{what}"])
                self._timeline.add_request(STOP_REPLICA.name, [broker_id], len(part))


def _answerable(part: tuple[TopicPartition, ...], *, delete: bool) -> tuple[TopicPartition, ...]:
    """Return the partitions for which a response to StopReplica counts: only deletions change the state of a log."""
    return part if delete else ()


async def _breathe(number: int) -> None:
    if number % _MOVES_AT_ONCE == 0:
        await asyncio.sleep(0)


def _with_version(state: LeaderAndIsr, version: int) -> LeaderAndIsr:
    return msgspec.structs.replace(state, partition_epoch=version)


def _refusal(answer: ZooKeeperError) -> ZooKeeperError:
    """Return why ZooKeeper refused a multi. Raises ControllerMoved if the epoch check failed, and unexpected errors."""
    if not isinstance(answer, MultiFailed):
        raise answer
    if answer.index == 0:
        raise ControllerMoved(f"another controller was elected: {answer.cause}") from answer
    if not isinstance(answer.cause, BadVersion | NoNode | NodeExists | NotEmpty):
        raise answer.cause from answer
    return answer.cause


def _operations(write: Write) -> list[Operation]:
    match write:
        case WriteState(partition, state, parent_exists):
            path, data = znodes.state_path(partition), znodes.encode_state(state)
            if not write.creates:
                version = write.settings_version
                allowed: list[Operation] = [] if version is None else [Check(znodes.CONFIG_CHANGES, version)]
                return [*allowed, SetData(path, data, state.partition_epoch)]
            parent: list[Operation] = [] if parent_exists else [Create(znodes.partition_path(partition), b"")]
            return [*parent, Create(path, data)]
        case CreateTopic(topic, znode, config, config_exists):
            path, data = znodes.topic_config_path(topic), znodes.encode_config(config)
            return [
                SetData(path, data) if config_exists else Create(path, data),
                Create(znodes.topic_path(topic), znodes.encode_topic(znode)),
                Create(znodes.topic_id_path(topic, znode.topic_id), b""),
            ]
        case SetTopic(topic, znode, version):
            itself: list[Operation] = [Check(znodes.topic_id_path(topic, znode.topic_id), -1)] if znode.topic_id else []
            return [*itself, SetData(znodes.topic_path(topic), znodes.encode_topic(znode), version)]
        case SetReassignments(entries, version):
            if not entries:
                return [Delete(znodes.REASSIGN_PARTITIONS, version)]
            return [SetData(znodes.REASSIGN_PARTITIONS, znodes.encode_reassignments(entries), version)]
        case EnsureNode(path):
            return [Create(path, b"")]
        case RemoveNode(path):
            return [Delete(path)]
        case RemoveAsRead(path, _, version):
            return [Delete(path, version)]
        case RemoveBroker(broker_id):
            return [Delete(znodes.broker_path(broker_id))]


def _batches(writes: Sequence[Write], epoch_version: int) -> Iterator[_Batch]:
    """Yield multis, each with as many whole writes as fit, in their order."""
    epoch_check = Check(znodes.CONTROLLER_EPOCH, epoch_version)
    batch, size = _Batch([], [epoch_check], []), _size(epoch_check)
    for write in writes:
        operations = _operations(write)
        cost = sum(_size(operation) for operation in operations)
        if batch.writes and (len(batch.operations) + len(operations) > MAX_OPERATIONS or size + cost > MAX_MULTI_BYTES):
            yield batch
            batch, size = _Batch([], [epoch_check], []), _size(epoch_check)
        batch.writes.append(write)
        batch.operations.extend(operations)
        batch.last.append(len(batch.operations) - 1)
        size += cost
    if batch.writes:
        yield batch


def _size(operation: Operation) -> int:
    data = operation.data if isinstance(operation, Create | SetData) else b""
    return _OPERATION_BYTES + len(operation.path) + len(data)


def _shown(partitions: Sequence[TopicPartition]) -> str:
    shown = " ".join(str(partition) for partition in partitions[:_SHOWN])
    more = len(partitions) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _shown_update(update: MetadataUpdate) -> str:
    if len(update.partitions) <= _SHOWN:
        return str(update)
    brokers = " ".join(str(broker_id) for broker_id in update.broker_ids)
    return f"UpdateMetadata to {brokers}: {_shown(update.partitions)}"


def _log_notes(notes: Sequence[str], alarms: Container[str]) -> None:
    """Log all alarms, and the first few of the other notes: a plan may report a hundred partitions without a leader."""
    others = [note for note in notes if note not in alarms]
    for note in notes:
        if note in alarms:
            _log.error("%s", note)
    for note in others[:_LOGGED_NOTES]:
        _log.warning("%s", note)
    if len(others) > _LOGGED_NOTES:
        _log.warning("and %d more: `minibroker timeline` has them", len(others) - _LOGGED_NOTES)

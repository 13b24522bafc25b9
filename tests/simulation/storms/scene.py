"""A ground with all its clients, and the account of legal losses.

A power cut loses unsynced writes. After one, the scene decides for each partition whether a broker is left that has
every acknowledged record: an ISR member or eligible replica that kept its power. If none is left, it tells all clients
and judges that the loss is legal. It sees each write to ZooKeeper and looks at all replicas ten times a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from random import Random

from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, Member, TopicPartition
from minibroker.protocol.world import Create, Operation, SetData
from tests.simulation.storms.clients.bookkeepers import Bookkeepers
from tests.simulation.storms.clients.compacting import Compacting
from tests.simulation.storms.clients.groups import Groups
from tests.simulation.storms.clients.growing import TOPIC as GROWING
from tests.simulation.storms.clients.growing import Growing
from tests.simulation.storms.clients.rebirth import Rebirth
from tests.simulation.storms.clients.rebirth_ambushes import AMBUSHES
from tests.simulation.storms.clients.shrinking import Shrinking
from tests.simulation.storms.clients.transacting.processors import Processors
from tests.simulation.storms.clients.transacting.transactors import Transactors
from tests.simulation.storms.clients.users import Users
from tests.simulation.storms.clients.workload import SHRINKING, SYNCED
from tests.simulation.storms.faults import operations_reassign
from tests.simulation.storms.ground import Change, Ground
from tests.simulation.storms.report import Report
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition
from tests.simulation.storms.verdicts.invariants import Invariants

MAX_CHANGES_A_SECOND = 30
"""Changes of a partition's state. Faults cause a few; with more, a leader or controller repeats and reverts them."""

_LOOK_EVERY_S = 0.1
_GROWING_STATES = f"{znodes.TOPICS}/{GROWING}/partitions/"


class Scene(Ground):
    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        super().__init__(report, dice, is_enough)
        self.shrinking = Shrinking(self, Random(f"{report.seed} shrinking"))
        self.partitions += self.shrinking.partitions
        self.rebirth = Rebirth(self, Random(f"{report.seed} rebirth"), AMBUSHES)
        self.users = Users(self.cluster, self.workload.acknowledged_end, event=self.event, accuse=self.accuse)
        self.growing = Growing(self, Random(f"{report.seed} growing"))
        self.compacting = Compacting(self, Random(f"{report.seed} compacting"))
        self._add_groups()
        self._add_transactors()
        self.workload.guests += [self.users, self.compacting, self.groups, self.bookkeepers]
        self.workload.guests += [self.transactors, self.processors]
        self._all_partitions = [
            *self.partitions,
            *self.compacting.partitions,
            *self.users.partitions,
            *self.transactors.partitions,
            *self.processors.partitions,
        ]
        self._invariants = Invariants(
            self.cluster, self.rebirth.committed, self.shrinking.decided, self.shrinking.promised
        )
        self._topic_ids: dict[str, str] = {}
        """Ids of the topics that are never deleted, by name."""
        self._growing_states: dict[TopicPartition, LeaderAndIsr] = {}
        """States of the growing topic's partitions, which are not in `leadership`, since they appear one by one."""
        self._changed_at_s: dict[str, deque[float]] = {}
        """Times of the latest MAX_CHANGES_A_SECOND changes of the state znode at each path."""

    def _add_groups(self, at_least: int = 0) -> None:
        """Draw the groups and the bookkeepers, at least so many of each."""
        seed = self.report.seed
        self.groups = Groups(self, Random(f"{seed} groups"), self.growing, self.rebirth, at_least)
        self.bookkeepers = Bookkeepers(self, Random(f"{seed} bookkeepers"), at_least)

    def _add_transactors(self, at_least: int = 0) -> None:
        """Draw the transactors, at least so many, and the processors of what they write."""
        seed = self.report.seed
        self.transactors = Transactors(self, Random(f"{seed} transactions"), at_least)
        dice = Random(f"{seed} processors")
        self.processors = Processors(self, dice, dice.choice([0, 1, 2, 3]) if self.transactors.names else 0)

    # -- power --

    def cut_power(self, broker_ids: Sequence[int], *, restart_after_s: float | None = None) -> None:
        partitions = [*self._all_partitions, *self.growing.partitions()]
        exposed = [partition for partition in partitions if self._may_lose(partition, broker_ids)]
        self.damaged.update(broker_ids)
        self.powerless.update(broker_ids)
        for broker_id in broker_ids:
            self.take_down(broker_id, self.cluster.power_cut, restart_after_s=restart_after_s)
        if len(broker_ids) > 1 or len(self.cluster.broker_ids) == 2:
            self.losses_of_power += 1
            self.rebirth.power_lost()
        if exposed:
            self._expose(exposed)

    def _may_lose(self, partition: TopicPartition, victims: Sequence[int]) -> bool:
        """Return whether no complete replica of the partition is left if the victims lose their power."""
        state = self.cluster.state(partition)
        members = [*state.in_sync_members, *state.eligible_members]
        if len(victims) == 1 and not self._needs_one(partition):
            return False
        if partition.topic == SYNCED:
            return not any(self._has_lost_nothing(member, flushed=True) for member in members)
        return not any(
            member.broker_id not in victims and member.broker_id not in self.damaged and self._has_lost_nothing(member)
            for member in members
        )

    def _needs_one(self, partition: TopicPartition) -> bool:
        """Return whether a record acknowledged with acks=all may be in a single replica."""
        return (
            self.assignment(partition).replication_factor <= 2
            or partition.topic in self.content_with_one
            or operations_reassign.is_promised_by_one(self, partition, self.cluster.state(partition))
        )

    def _is_left_to_victims(self, partition: TopicPartition, before: LeaderAndIsr, after: LeaderAndIsr) -> bool:
        """Return whether this change removes the last member that kept its power, if one replica is enough for
        acks=all.
        """
        if not self._needs_one(partition) or partition.topic == SYNCED:
            return False
        kept, left = (
            [member for member in (*state.in_sync_members, *state.eligible_members) if self._has_kept_its_power(member)]
            for state in (before, after)
        )
        return bool(kept) and not left

    def _has_kept_its_power(self, member: Member) -> bool:
        is_dead_victim = member.broker_id in self.powerless and self.cluster.living_broker(member.broker_id) is None
        return not is_dead_victim and self._has_lost_nothing(member)

    def _expose(self, exposed: Sequence[TopicPartition]) -> None:
        """Record that no complete replica of these partitions is left."""
        self.event("power of all that had everything cut")
        self.note(f"no broker that had everything has kept its power: {', '.join(map(str, exposed))}")
        self.damaged.update(self.cluster.broker_ids)  # the others may have to truncate their logs
        self.workload.exposed.update(exposed)
        self._forgive(exposed)

    def _forgive(self, exposed: Collection[TopicPartition]) -> None:
        """Allow the loss of everything acknowledged in and read from these partitions up to now."""
        for broker_id in self.cluster.broker_ids:
            for client in self.workload.names:  # a reply sent before the cut must not arrive, and count, after it
                self.simulation.network.reset(client, host_name(broker_id))
        self.history.power_lost(exposed, self.now_s)
        self._invariants.power_lost(exposed)
        self.workload.power_lost(exposed)
        self.users.forgive(exposed)
        self.growing.forgive(exposed)
        self.shrinking.forgive(exposed)
        self.groups.forgive(exposed)
        if not set(exposed).isdisjoint(self.groups.partitions):
            self.bookkeepers.forgive()
        of_transactions = [*self.transactors.all_partitions, *self.processors.partitions, *self.groups.partitions]
        if not set(exposed).isdisjoint(of_transactions):
            self.transactors.forgive()
            self.processors.forgive()
        if not set(exposed).isdisjoint(self.compacting.partitions):
            self.compacting.forgive()

    # -- invariants --

    async def _watch_invariants(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        is_harmed = bool(self.damaged or self._hurt)
        self.security.look()
        reborn_ends, lossy_topic_ids = self.rebirth.look(is_harmed=is_harmed)
        ends = {
            TopicIdPartition(self._topic_ids[partition.topic], partition): end
            for partition, end in self.workload.acknowledged_end.items()
        }
        for anomaly in self._invariants.look(ends | reborn_ends, self.damaged, lossy_topic_ids):
            self.accuse(anomaly)
        self._restart_where_a_disk_was_mended()
        # Only now: this look still had to allow for what these brokers truncated since the last one.
        for broker_id in sorted(self.damaged - self.rotten):
            if self._has_caught_up(broker_id):
                self.damaged.discard(broker_id)
                self.powerless.discard(broker_id)
                self.note(f"broker {broker_id} has caught up after its power cut")
        if self.workload.exposed and not self.damaged:
            self._forgive(sorted(self.workload.exposed))
            self.workload.exposed.clear()

    def _restart_where_a_disk_was_mended(self) -> None:
        """Restart brokers as an operator does where a log directory is offline, or where logs were not opened for lack
        of descriptors: both stay so until then."""
        for broker_id in self.idle_brokers():
            broker = self.cluster.living_broker(broker_id)
            if broker is None or self._bad_disks[broker_id]:
                continue
            if broker._logs.offline:
                self.event("a broker with an offline log directory is restarted")
                self.note(f"broker {broker_id} is restarted: {broker._logs.offline}")
                self.take_down(broker_id, self.cluster.kill_broker)
            elif closed := [p for manager in broker._logs.online for p in {*manager.damaged} - manager.healable]:
                self.event("a broker with closed logs is restarted")
                self.note(f"broker {broker_id} is restarted: {len(closed)} logs are not open")
                self.take_down(broker_id, self.cluster.kill_broker)

    def _has_caught_up(self, broker_id: int) -> bool:
        """Return whether the broker is in every ISR again and has every acknowledged record."""
        broker = self.cluster.living_broker(broker_id)
        if broker is None or broker._replicas is None:
            return False
        for partition in self._all_partitions:
            if broker_id not in self.assignment(partition).replicas:
                continue
            replica = self.replica(broker_id, partition)
            if (
                replica is None
                or not self.is_in_sync(broker_id, partition)
                or replica.high_watermark < self.workload.acknowledged_end[partition]
            ):
                return False
        return self.rebirth.has_caught_up(broker_id) and self.growing.has_caught_up(broker_id)

    # -- writes to ZooKeeper --

    def _about_to_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        for hook in list(self.before_write):
            hook(session, operations)

    def _written(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        """Follow a write that the simulated ZooKeeper has just carried out."""
        host, _, _ = session.owner.partition("#")
        if host in self.lose_next_reply_of:
            self.lose_next_reply_of.discard(host)
            self.simulation.zookeeper.lose_connections(host)
        self.rebirth.written(operations)
        self.security.written(operations)
        for operation in operations:
            if isinstance(operation, SetData) and operation.path in self.leadership:
                self._state_changed(operation.path, operation.data)
            elif isinstance(operation, SetData) and operation.path == znodes.topic_config_path(SHRINKING):
                self.shrinking.settings_written(operation.data)
            elif isinstance(operation, Create | SetData) and operation.path.startswith(_GROWING_STATES):
                self._growing_changed(operation.path, operation.data)
            elif isinstance(operation, SetData) and operation.path.startswith(f"{znodes.TOPICS}/"):
                for partition, state in self.leadership.values():
                    for anomaly in operations_reassign.members_without_a_replica(self, partition, state):
                        self.accuse(anomaly)

    def _growing_changed(self, path: str, data: bytes) -> None:
        if not path.endswith("/state"):
            return
        partition = TopicPartition(GROWING, int(path.removeprefix(_GROWING_STATES).partition("/")[0]))
        state = znodes.decode_state(partition, data, 0)
        before = self._growing_states.get(partition)
        self._growing_states[partition] = state
        if before is not None and self._is_left_to_victims(partition, before, state):
            self._expose([partition])

    def _state_changed(self, path: str, data: bytes) -> None:
        partition, before = self.leadership[path]
        state = znodes.decode_state(partition, data, 0)
        self.leadership[path] = (partition, state)
        for anomaly in (
            *self._invariants.state_written(partition, before, state),
            *operations_reassign.members_without_a_replica(self, partition, state),
        ):
            self.accuse(anomaly)
        changed_at_s = self._changed_at_s.setdefault(path, deque(maxlen=MAX_CHANGES_A_SECOND))
        if len(changed_at_s) == MAX_CHANGES_A_SECOND and self.now_s - changed_at_s[0] < 1:
            self.accuse(Anomaly("a state flaps", f"{partition} changed {MAX_CHANGES_A_SECOND} times within a second"))
        changed_at_s.append(self.now_s)
        if state.leader_epoch != before.leader_epoch:
            self.led_since_s[partition] = self.now_s
        if self._is_left_to_victims(partition, before, state):
            self._expose([partition])
        self._changes.strike(Change(before, state))
        if state.leader not in (before.leader, NO_LEADER):
            self.report.leader_changes += self.workload.has_in_flight(partition)
        self.note(
            f"{partition}: leader {state.leader}, epoch {state.leader_epoch}, ISR {list(state.isr)}"
            f" (was {before.leader}, {before.leader_epoch}, {list(before.isr)})"
        )

"""Invariants that hold at every moment of a run, whatever fault has just struck. They are checked often, from outside.

- A leader epoch of a partition has at most one leading process, ever, and one leader in ZooKeeper, elected by the
  newest controller.
- A replica's high watermark never decreases while its process lives and its leader epoch stays.
- Below their high watermarks, the logs of all replicas are complete and equal in offsets, leader epochs and checksums.
  Compacted logs need only be complete. After a power cut this holds once the broker has caught up: the cut undoes a
  truncation that was not synced.
- No log start is above the one that a leader has decided (`shrinking`), nor above its replica's high watermark.
- A record whose deletion was acknowledged is in no log of a broker that may be elected.
- Each broker that may be elected has every record that was acknowledged with acks=all.
- The controller epoch never decreases, in ZooKeeper or in a broker's process. A partition's leader epoch never does,
  in ZooKeeper, in its replicas, or in the metadata for clients.

A re-created topic is another topic, whose epochs and offsets begin again, so the checks remember everything by topic
id.

`look` may be called between any two callbacks of the loop, since the invariants hold even while the cluster changes.
Each look is compared to earlier ones, so a violation that disappears between two looks may be missed. The histories of
clients cover those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping

from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.records import BatchHeader, CorruptRecord, iterate_batches, validate_batch
from tests.simulation.storms.clients.compacting import TOPIC as COMPACTED
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition

_READ_BYTES = 1024 * 1024

_BatchPrint = tuple[int, int, int]
"""Last offset, leader epoch and checksum of a batch."""


OnCommitted = Callable[[TopicIdPartition, BatchHeader, bytes, int], None]
"""Called with the header of each batch that is first found below a high watermark, and the bytes and position where it
begins."""


class Invariants:
    def __init__(
        self,
        cluster: VirtualCluster,
        on_committed: OnCommitted | None = None,
        begins: Mapping[TopicIdPartition, int] | None = None,
        deleted: Mapping[TopicIdPartition, int] | None = None,
    ) -> None:
        """`begins` holds the highest log start that leaders have decided, if not 0. `deleted` holds the offset below
        which a deletion was acknowledged. Each look reads both."""
        self._cluster = cluster
        self._on_committed = on_committed
        self._begins = {} if begins is None else begins
        self._deleted = {} if deleted is None else deleted
        self._leaders: dict[tuple[TopicIdPartition, int], str] = {}
        self._high_watermarks: dict[tuple[TopicIdPartition, str, int], int] = {}
        self._leader_epochs: dict[tuple[TopicIdPartition, str, str], int] = {}
        """Leader epochs of each replica in a process, and of its metadata for clients."""
        self._controller_epoch = 0
        self._batches: dict[TopicIdPartition, dict[int, tuple[_BatchPrint, str]]] = {}
        self._compared: dict[tuple[TopicIdPartition, str], int] = {}
        """The offset up to which a process's log was compared."""

    def look(
        self,
        acknowledged_ends: Mapping[TopicIdPartition, int],
        damaged: Container[int],
        lossy_topic_ids: Container[str] = (),
    ) -> Iterator[Anomaly]:
        """Yield the current violations that were not reported before. Disk faults do not affect the look itself.

        `acknowledged_ends` holds one past the highest offset that clients know to be acknowledged with acks=all.
        `damaged` brokers had a power cut and have not caught up since, or have rotten pages.
        Topics in `lossy_topic_ids` may lose acknowledged records, so that their logs may change.
        """
        yield from self._controller_epochs()
        for broker_id in self._cluster.broker_ids:
            replicas = self._replicas(broker_id)
            if replicas is None:
                continue
            process = self._cluster.process(broker_id).name
            faults = self._cluster.simulation.host(host_name(broker_id)).disk.faults
            metadata = self._cluster.broker(broker_id)._metadata
            for partition in replicas.partitions.values():
                topic_partition = partition.topic_partition
                yield from self._leader_epoch(_identified(partition), process, "replica", partition.leader_epoch)
                told = metadata.partition(topic_partition)
                told_id = metadata.topic_id(topic_partition.topic)
                if told is not None and told_id is not None:
                    told_partition = TopicIdPartition(told_id, topic_partition)
                    yield from self._leader_epoch(told_partition, process, "metadata", told.leader_epoch)
                yield from self._leadership(partition, process)
                # A power cut may undo a truncation, which is then repeated, even below the checkpointed high watermark.
                # An unclean election also causes such a truncation.
                may_lose = broker_id in damaged or partition.log.topic_id in lossy_topic_ids
                yield from self._high_watermark(partition, process, may_go_back=may_lose)
                yield from self._beginning(partition, process)
                if not may_lose:
                    with faults.set_aside():
                        yield from list(self._logs(partition, process))
        for identified, end in acknowledged_ends.items():
            yield from self._electable(identified, end, damaged)

    def power_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the ends of these logs, since other records may take their offsets."""
        self._batches = {key: known for key, known in self._batches.items() if key.topic_partition not in partitions}
        self._compared = {
            key: offset for key, offset in self._compared.items() if key[0].topic_partition not in partitions
        }

    def state_written(
        self, topic_partition: TopicPartition, before: LeaderAndIsr, after: LeaderAndIsr
    ) -> Iterator[Anomaly]:
        """Yield the violations in a write to a partition's state znode. It must be called at each write, since the next
        one may hide a violation."""
        if after.leader_epoch < before.leader_epoch:
            yield Anomaly(
                "leader epoch went back", f"{topic_partition} in ZooKeeper: from {_role(before)} to {_role(after)}"
            )
        elif after.leader_epoch == before.leader_epoch and NO_LEADER != after.leader != before.leader != NO_LEADER:
            yield Anomaly(
                "two leaders in an epoch", f"{topic_partition} in ZooKeeper: first {_role(before)}, then {_role(after)}"
            )
        newest = znodes.decode_controller_epoch(self._cluster.simulation.zookeeper.data(znodes.CONTROLLER_EPOCH))
        if after.leader_epoch > before.leader_epoch and after.controller_epoch < newest:
            yield Anomaly(
                "a deposed controller elected",
                f"{topic_partition}: {_role(after)}, by the controller of epoch {after.controller_epoch}; the epoch is "
                f"{newest}",
            )

    def _replicas(self, broker_id: int) -> ReplicaManager | None:
        """Return a broker's replicas; None if it is down or still starting."""
        broker = self._cluster.living_broker(broker_id)
        return None if broker is None else broker._replicas

    def _controller_epochs(self) -> Iterator[Anomaly]:
        zookeeper = self._cluster.simulation.zookeeper
        if not zookeeper.has(znodes.CONTROLLER_EPOCH):
            return
        epoch = znodes.decode_controller_epoch(zookeeper.data(znodes.CONTROLLER_EPOCH))
        if epoch < self._controller_epoch:
            yield Anomaly("controller epoch went back", f"from {self._controller_epoch} to {epoch}")
        self._controller_epoch = epoch

    def _leader_epoch(
        self, identified: TopicIdPartition, process: str, where: str, leader_epoch: int
    ) -> Iterator[Anomaly]:
        if leader_epoch < 0:
            return  # a replica re-created after its deletion has no epoch for a moment
        key = (identified, process, where)
        before = self._leader_epochs.get(key, leader_epoch)
        if leader_epoch < before:
            yield Anomaly(
                "leader epoch went back",
                f"{identified}, the {where} of {process}: from {before} to {leader_epoch}",
            )
        self._leader_epochs[key] = leader_epoch

    def _leadership(self, partition: Partition, process: str) -> Iterator[Anomaly]:
        if not partition.is_leader:
            return
        key = (_identified(partition), partition.leader_epoch)
        leader = self._leaders.setdefault(key, process)
        if leader != process:
            yield Anomaly(
                "two leaders in an epoch", f"{key[0]} epoch {key[1]} was led by {leader}, now {process} leads in it"
            )
            self._leaders[key] = process

    def _high_watermark(self, partition: Partition, process: str, *, may_go_back: bool) -> Iterator[Anomaly]:
        key = (_identified(partition), process, partition.leader_epoch)
        before = self._high_watermarks.get(key, 0)
        if partition.high_watermark < before and not may_go_back:
            yield Anomaly(
                "high watermark went back",
                f"{key[0]} on {process}, epoch {partition.leader_epoch}: from {before} to {partition.high_watermark}",
            )
        self._high_watermarks[key] = partition.high_watermark
        if partition.high_watermark > partition.log.log_end_offset:
            yield Anomaly(
                "high watermark above the log's end",
                f"{key[0]} on {process}: {partition.high_watermark}, the log ends at {partition.log.log_end_offset}",
            )

    def _beginning(self, partition: Partition, process: str) -> Iterator[Anomaly]:
        identified, start = _identified(partition), partition.log.log_start_offset
        decided = self._begins.get(identified, 0)
        if start > decided:
            yield Anomaly(
                "a log begins too late", f"{identified} on {process} begins at {start}; {decided} was decided"
            )
        if start > partition.high_watermark:
            yield Anomaly(
                "a log begins above its high watermark",
                f"{identified} on {process}: at {start}, the high watermark is {partition.high_watermark}",
            )

    def _logs(self, partition: Partition, process: str) -> Iterator[Anomaly]:
        log, end = partition.log, partition.high_watermark
        key = (_identified(partition), process)
        offset = max(self._compared.get(key, 0), log.log_start_offset)
        if offset >= end or log._directory.failure is not None:
            return
        known = self._batches.setdefault(key[0], {})
        may_have_gaps = log.config.compact or partition.topic_partition.topic == COMPACTED  # or compacted before
        while offset < end:
            records = log.read(offset, _READ_BYTES, end)
            if not records and may_have_gaps:
                break  # no batch is left below a checkpointed high watermark
            if not records:
                yield Anomaly("a log has a hole", f"{key[0]} on {process}: nothing at {offset}, below {end}")
                break
            for header, start, _ in iterate_batches(records):
                begins_within = header.base_offset <= offset == log.log_start_offset  # its start was deleted
                is_gap = may_have_gaps and header.base_offset > offset
                if header.base_offset != offset and not begins_within and not is_gap:
                    yield Anomaly("a log has a hole", f"{key[0]} on {process}: {header.base_offset} follows {offset}")
                try:
                    validate_batch(records, header, start)
                except CorruptRecord as error:
                    yield Anomaly("a log is damaged", f"{key[0]} on {process}, below its high watermark {end}: {error}")
                batch = (header.last_offset, header.partition_leader_epoch, header.crc)
                if self._on_committed is not None and header.base_offset not in known:
                    self._on_committed(key[0], header, records, start)
                other, other_process = known.setdefault(header.base_offset, (batch, process))
                if other != batch and not may_have_gaps:
                    yield Anomaly(
                        "logs differ",
                        f"{key[0]} at offset {header.base_offset}, below the high watermark {end} of {process}: "
                        f"(last offset, epoch, crc) is {batch} there and was {other} on {other_process}",
                    )
                offset = header.next_offset
        self._compared[key] = offset

    def _electable(self, identified: TopicIdPartition, end: int, damaged: Container[int]) -> Iterator[Anomaly]:
        topic_id, topic_partition = identified
        state = self._cluster.state(topic_partition)
        for broker_id, epoch in (*state.in_sync_members, *state.eligible_members):
            replicas = self._replicas(broker_id)
            partition = replicas.partitions.get(topic_partition) if replicas is not None else None
            if partition is None or partition.log.topic_id != topic_id or broker_id in damaged:
                continue
            since = self._cluster.broker(broker_id)._logs.trusted_since
            if broker_id in state.eligible and (since == znodes.SINCE_THIS_REGISTRATION or since > epoch):
                continue  # recorded only for unclean elections
            deleted = self._deleted.get(identified, 0)
            if partition.log.log_start_offset < deleted:
                yield Anomaly(
                    "an electable replica has deleted records",
                    f"{topic_partition} on broker {broker_id}, of the ISR {list(state.isr)} and the eligible "
                    f"{list(state.eligible)} in epoch {state.leader_epoch}, begins at "
                    f"{partition.log.log_start_offset}; what lies below {deleted} was deleted",
                )
            if partition.log.log_end_offset < end:
                yield Anomaly(
                    "an electable replica lacks acknowledged records",
                    f"{topic_partition} on broker {broker_id}, of the ISR {list(state.isr)} and the eligible "
                    f"{list(state.eligible)} in epoch {state.leader_epoch}, ends at {partition.log.log_end_offset}; "
                    f"{end} was acknowledged",
                )


def _identified(partition: Partition) -> TopicIdPartition:
    return TopicIdPartition(partition.log.topic_id, partition.topic_partition)


def _role(state: LeaderAndIsr) -> str:
    return f"leader {state.leader} in epoch {state.leader_epoch}"

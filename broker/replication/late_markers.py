"""Recognizes a transaction marker that was appended before, and arrives again.

The problem: a coordinator that gets no answer sends a marker again, and the first attempt may arrive when the next
transaction of the producer is open here. The epoch tells them apart if each end of a transaction raises it. Kafka's
clients before version 5 of EndTxn keep their epoch, and the late marker would end half of their next transaction.

The choice: a marker carries the number of its decision, which grows with each transaction of the producer. The leader
remembers the last one of each producer that keeps its epoch, in memory, and where it is: a late marker was sent to this
very process, and a new coordinator has a higher epoch. If another leader has cut the marker off meanwhile, it counts as
not appended. (Kafka has no such check.)
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from minibroker.broker.replication.partition import Partition
from minibroker.protocol.messages.transactions import NO_DECISION, TransactionMarker

MOST_PRODUCERS = 1_000
"""Producers of one partition, beyond which those that the log has forgotten are forgotten here, too."""


class _Appended(NamedTuple):
    offset: int
    leader_epoch: int
    """The epoch of the record at `offset`."""
    coordinator_epoch: int
    decision: int


class LateMarkers:
    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Partition, dict[int, _Appended]] = WeakKeyDictionary()

    def was_appended(self, partition: Partition, marker: TransactionMarker) -> bool:
        """Whether this leader has appended this marker already, or a later one of the producer."""
        last = self._last.get(partition, {}).get(marker.producer_id)
        return (
            last is not None
            and not marker.raises_epoch
            and marker.decision != NO_DECISION
            and last.offset < partition.log.log_end_offset
            and last.leader_epoch == partition.log.epoch_at(last.offset)
            and last.coordinator_epoch == marker.coordinator_epoch
            and last.decision >= marker.decision
        )

    def appended(self, partition: Partition, marker: TransactionMarker, offset: int) -> None:
        """The leader has appended the marker at this offset."""
        if marker.raises_epoch or marker.decision == NO_DECISION:
            return
        of_partition = self._last.setdefault(partition, {})
        of_partition[marker.producer_id] = _Appended(
            offset, partition.leader_epoch, marker.coordinator_epoch, marker.decision
        )
        if len(of_partition) > MOST_PRODUCERS:
            self._last[partition] = {i: known for i, known in of_partition.items() if partition.log.knows_producer(i)}

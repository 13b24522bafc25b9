"""Storms with little but transactions: `simulate --transactions` and `hunt --transactions`.

As in storms of groups, the events that matter are the usual ones here: a coordinator that fails between a decision and
its markers, a producer that comes back as a zombie, a request that arrives when its transaction has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.simulation.storms.faults.faults import FAULTS_OF_TRANSACTIONS
from tests.simulation.storms.group_storm import OTHER_FAULTS, GroupStorm
from tests.simulation.storms.report import Report
from tests.simulation.storms.verdicts.history import Anomaly

_OTHERS = (*OTHER_FAULTS, "power cut", "out of descriptors", "moves between log directories", "slow disk")


class TransactionStorm(GroupStorm):
    keeps_offsets = True

    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        super().__init__(report, dice, is_enough)
        self.rebirth.topics.clear()
        del self.partitions[1:]  # the other clients are there for their faults, and cost most of the time
        for former in (self.groups, self.bookkeepers, self.transactors, self.processors):
            self.workload.guests.remove(former)
        self._add_groups()
        if Random(f"{report.seed} groups beside transactions").random() < 0.7:
            self.groups.stay_away()
            self.bookkeepers.stay_away()
        self._add_transactors(at_least=3)
        self.workload.guests += [self.groups, self.bookkeepers, self.transactors, self.processors]
        self._all_partitions = [
            *self.partitions,
            *self.users.partitions,
            *self.transactors.partitions,
            *self.processors.partitions,
        ]

    def _draw_weights(self) -> dict[str, float]:
        weights = dict.fromkeys(super()._draw_weights(), 0.0)
        weights |= {kind: self.dice.choice([0.0, 1.0]) for kind in _OTHERS}
        if len(self.cluster.broker_ids) == 2:
            weights["power cut"] = 0.0  # its losses may be legal, so nothing would be judged
        return weights | {kind: self.dice.choice([1.0, 3.0]) for kind in (*FAULTS_OF_TRANSACTIONS, "kill coordinator")}

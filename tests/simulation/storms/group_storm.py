"""Storms with little but consumer groups, which cost a quarter of a whole storm and have as many rebalances.

Bugs of groups appear when a coordinator fails while its groups are active. In a whole storm that is one event among
fifty; here it is the usual one. `simulate --groups` and `hunt --groups` run these storms.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.simulation.storms.clients.workload import DURABLE, SHRINKING
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm
from tests.simulation.storms.verdicts.history import Anomaly

FAULTS_OF_GROUPS = (
    *("kill coordinator", "pause member", "coordinator there and back"),
    *("ambush of a commit", "ambush of a coordinator", "late commit"),
    "deletion at a deposed coordinator",
)
OTHER_FAULTS = (
    *(
        "kill",
        "kill leader",
        "clean stop",
        "pause",
        "kill client",
        "isolation",
        "client partition",
        "partition",
        "reset",
    ),
    *("slow network", "late bytes", "refusals", "ZooKeeper expiry", "ZooKeeper cut", "add partitions", "suspend"),
    "ambush of an election",
)


class GroupStorm(Storm):
    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        super().__init__(report, dice, is_enough)
        for guest in (self.shrinking, self.compacting):
            guest.partitions.clear()
        self.partitions[:] = [p for p in self.partitions if p.topic.startswith(DURABLE) and p.topic != SHRINKING]
        self.users.stay_away()
        self.transactors.stay_away()
        self.processors.stay_away()
        if Random(f"{report.seed} rebirth of groups").random() < 0.6:
            self.rebirth.topics.clear()
        self._all_partitions = [*self.partitions, *self.users.partitions]
        for former in (self.groups, self.bookkeepers):
            self.workload.guests.remove(former)
        self._add_groups(at_least=1)
        self.workload.guests += [self.groups, self.bookkeepers]

    def _draw_weights(self) -> dict[str, float]:
        weights = dict.fromkeys(super()._draw_weights(), 0.0)
        weights |= {kind: self.dice.choice([0.0, 1.0]) for kind in OTHER_FAULTS}
        return weights | {kind: self.dice.choice([1.0, 3.0]) for kind in FAULTS_OF_GROUPS}

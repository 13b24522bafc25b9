"""Planted bugs of controlled shutdowns. A broker that leads until its end only costs time; scenarios test it."""

from __future__ import annotations

from typing import Any

from minibroker.controller.decisions import cluster_state, elections
from minibroker.controller.decisions.cluster_state import BrokerAdded, BrokerRemoved
from tests.simulation.mutants.planting import Patches, mutant


@mutant("controlled shutdown", "a restarted broker still counts as shutting down")
def shutting_down_over_a_restart(patches: Patches) -> None:
    @patches.instead_of(cluster_state.ClusterState, "apply")
    def apply(original: Any, state: Any, change: Any) -> None:
        before = set(state.shutting_down_brokers)
        original(state, change)
        if isinstance(change, BrokerAdded | BrokerRemoved):
            state.shutting_down_brokers |= before


@mutant("controlled shutdown", "if all replicas in sync shut down, a replica out of sync is elected")
def unclean_controlled_shutdown(patches: Patches) -> None:
    @patches.instead_of(elections, "for_controlled_shutdown")
    def for_controlled_shutdown(
        original: Any, assignment: Any, leader: int, isr: Any, stopping: Any, *rest: Any
    ) -> Any:
        chosen, members = original(assignment, leader, isr, stopping, *rest)
        others = [b for b in assignment if b not in stopping]
        if chosen in stopping and others:
            return others[0], [isr[0]._replace(broker_id=others[0], epoch=-1)]
        return chosen, members

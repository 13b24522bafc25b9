"""Planted bugs of reassignments: done too early, half done, or never given up."""

from __future__ import annotations

from typing import Any

import msgspec

from minibroker.broker.replication.orders import ControllerOrders
from minibroker.controller.decisions import elections, reassignment
from minibroker.protocol.model import LeaderAndIsr, Member, ReplicaAssignment, leader_and_isr
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KIP-455", "replicas added by a reassignment count as in sync as soon as their brokers live")
def added_replicas_in_sync_at_once(patches: Patches) -> None:
    @patches.instead_of(reassignment, "candidates")
    def candidates(original: Any, state: Any, partitions: Any) -> Any:
        return tuple(p for p in partitions if p in state.reassigning and p in state.leadership)

    @patches.instead_of(elections, "complete")
    def complete(original: Any, assignment: Any, current: Any, live: Any, *rest: Any, **named: Any) -> Any:
        new = [Member(b, live[b].epoch) for b in assignment.target if b in live and b not in current.isr]
        with_new = leader_and_isr(
            current.leader,
            current.leader_epoch,
            (*current.in_sync_members, *new),
            (),
            current.controller_epoch,
            current.partition_epoch,
            current.to_commit,
        )
        return original(assignment, with_new, live, *rest, **named)


@mutant("KAFKA-1120", "replicas removed by a reassignment are not ordered to stop, and do not notice it later")
def removed_replicas_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(reassignment, "leaving")
    def leaving(original: Any, *rest: Any) -> Any:
        return ()

    @patches.instead_of(ControllerOrders, "delete_strays")
    async def delete_strays(original: Any, self: ControllerOrders) -> None:
        """Do nothing."""


@mutant("KIP-455", "replicas removed by a reassignment stay in the ISR")
def removed_replicas_stay_in_the_isr(patches: Patches) -> None:
    @patches.instead_of(elections, "complete")
    def complete(original: Any, assignment: Any, current: Any, *rest: Any, **named: Any) -> LeaderAndIsr | None:
        final: LeaderAndIsr | None = original(assignment, current, *rest, **named)
        if final is None:
            return None
        return msgspec.structs.replace(final, isr=current.isr, isr_epochs=current.isr_epochs)


@mutant("KIP-455", "while a partition moves to fewer replicas, fewer must be in sync")
def fewer_replicas_promise_less(patches: Patches) -> None:
    @patches.instead_of(ReplicaAssignment, "replication_factor")
    def replication_factor(original: Any, self: ReplicaAssignment) -> int:
        return min(len(self.origin), len(self.target))

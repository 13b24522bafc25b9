"""Planted bugs of requested elections."""

from __future__ import annotations

from typing import Any

import msgspec

from minibroker.controller.decisions import elections
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import Member, leader_and_isr
from tests.simulation.mutants.planting import Patches, mutant


@mutant("preferred election", "a preferred leader is elected although it is not in the ISR")
def preferred_leader_out_of_sync(patches: Patches) -> None:
    @patches.instead_of(elections, "elect_preferred")
    def elect_preferred(
        original: Any, assignment: Any, current: Any, live: Any, controller_epoch: int, **named: Any
    ) -> Any:
        preferred = assignment[0]
        if preferred not in live or preferred in current.isr:
            return original(assignment, current, live, controller_epoch, **named)
        isr = [*current.in_sync_members, Member(preferred, live[preferred].epoch)]
        epoch = current.leader_epoch + 1
        state = leader_and_isr(preferred, epoch, isr, (), controller_epoch, current.partition_epoch, current.to_commit)
        return elections.Decision(state, elections.Election(preferred, elections.Basis.IN_SYNC))


@mutant("preferred election", "a preferred leader is elected in the leader epoch of its predecessor")
def preferred_leader_in_the_same_epoch(patches: Patches) -> None:
    @patches.instead_of(elections, "elect_preferred")
    def elect_preferred(original: Any, assignment: Any, current: Any, *rest: Any, **named: Any) -> Any:
        decision = original(assignment, current, *rest, **named)
        if isinstance(decision, ErrorCode):
            return decision
        return decision._replace(state=msgspec.structs.replace(decision.state, leader_epoch=current.leader_epoch))

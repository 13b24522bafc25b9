"""Planted bugs of elections: the choice of the leader, its epoch, and replicas that count as complete."""

from __future__ import annotations

from typing import Any

import msgspec

from minibroker.controller.decisions import brokers, elections
from minibroker.protocol import model
from tests.simulation.mutants.planting import Patches, mutant


@mutant("unclean election", "if no member of the ISR lives, any living replica is elected, in every topic")
def unclean_election_always(patches: Patches) -> None:
    @patches.instead_of(elections, "elect")
    def elect(original: Any, *rest: Any, **named: Any) -> Any:
        return original(*rest, **named | {"unclean": True})


@mutant("leader epochs", "an election does not raise the leader epoch")
def leader_epoch_not_raised(patches: Patches) -> None:
    @patches.instead_of(elections, "decide")
    def decide(original: Any, assignment: Any, current: Any, *rest: Any, **named: Any) -> Any:
        decision = original(assignment, current, *rest, **named)
        if decision.state is current:
            return decision
        return decision._replace(state=msgspec.structs.replace(decision.state, leader_epoch=current.leader_epoch))


@mutant("leader epochs", "a restarted leader keeps leading in its epoch, although it is another process")
def leader_stays_over_a_restart(patches: Patches) -> None:
    @patches.instead_of(elections, "_leader_stays")
    def leader_stays(original: Any, leader: int, in_sync: Any, live: Any) -> bool:
        return leader in live


@mutant("KIP-903", "a replica that has lost data is elected as if it had all records from the time it joined the ISR")
def untrusted_replica_elected(patches: Patches) -> None:
    @patches.instead_of(elections, "is_trusted")
    def is_trusted(original: Any, member: Any, live: Any) -> bool:
        return member.broker_id in live


@mutant("KIP-966", "a replica that has lost data and leaves a too small ISR is not kept for the last resort")
def lossy_replicas_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(elections, "decide")
    def decide(original: Any, assignment: Any, current: Any, live: Any, *rest: Any, **named: Any) -> Any:
        decision = original(assignment, current, live, *rest, **named)
        state = decision.state
        if state is current:
            return decision
        kept = [m for m in state.eligible_members if m.broker_id not in live or elections.is_trusted(m, live)]
        changed = msgspec.structs.replace(
            state, eligible=tuple(m.broker_id for m in kept), eligible_epochs=tuple(m.epoch for m in kept)
        )
        return decision._replace(state=changed)


@mutant("KIP-966", "an election ignores the eligible replicas outside the ISR")
def eligible_replicas_ignored(patches: Patches) -> None:
    @patches.instead_of(elections, "elect")
    def elect(original: Any, assignment: Any, state: Any, *rest: Any, **named: Any) -> Any:
        known = msgspec.structs.replace(state, eligible=(), eligible_epochs=())
        return original(assignment, known, *rest, **named)


@mutant("KIP-966", "a replica that leaves a too small ISR is not recorded as eligible")
def eligible_replicas_forgotten(patches: Patches) -> None:
    @patches.instead_of(model, "eligible_after")
    def eligible_after(original: Any, *rest: Any, **named: Any) -> Any:
        return ()


@mutant("KAFKA-1120, KIP-380", "a broker that has registered again unnoticed counts as its former run")
def bounce_not_noticed(patches: Patches) -> None:
    @patches.instead_of(brokers, "difference")
    def difference(original: Any, *rest: Any) -> Any:
        return original(*rest)._replace(bounced=())

"""Explains in words why a group member waits: for `status()`, and for a WARNING if it takes long."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.group.member import GroupMember
from minibroker.client.group.states import MemberState
from minibroker.client.stalls import LOOK_EVERY_S, STALL_S, Stalls

USUAL_S = 1.0
"""Duration of a rebalance in which all members ask for records."""


class Wait(NamedTuple):
    text: str
    is_users: bool = False
    """The member waits for its own user: no reason to log."""


def waits_for(member: GroupMember, runtime: ClientRuntime, in_hand: InHand) -> Wait | None:
    """Return why a subscribed member has no assignment yet; None if it has one."""
    now = runtime.clock.monotonic()
    standing = member.standing
    group, trouble = member.group, "" if member.obstacle is None else f". {member.obstacle}"
    if standing.fenced is not None:
        return Wait(str(standing.fenced), is_users=True)
    if standing.untold is not None:
        return Wait(f"the next call for records raises: {standing.untold}", is_users=True)
    if standing.state is MemberState.REFUSED:
        said = f"group {group} has refused it: the next call for records says why, the one after it tries again"
        return Wait(said, is_users=True)
    began = standing.unsettled_since
    since = f"for {now - began:.1f} s"
    if in_hand.holds and in_hand.is_quiet:
        said = (
            f"group {group} rebalances, and waits {since} until this consumer is asked for the next records: "
            "only then are those that it has handed out done with"
        )
        return Wait(said, is_users=True)
    if (call := member.listener_calls.under_way) is not None:
        said = f"group {group} rebalances, and waits for this consumer's listener: {call.method} has not returned for"
        return Wait(f"{said} {now - call.began:.1f} s{trouble}")
    if standing.setback is not None and now < standing.setback.at + STALL_S:
        trouble = trouble or f". {standing.setback.error}"
    match standing.state.phase:
        case "unjoined":
            known = "" if member.coordinator is not None else "; its coordinator is not known yet"
            return Wait(f"it has been in no generation of group {group} {since}{known}{trouble}")
        case "preparing rebalance":
            if standing.state is not MemberState.JOINING or trouble or now <= began + USUAL_S:
                return Wait(f"no assignment: group {group} has been rebalancing {since}{trouble}")
            return Wait(
                f"no assignment: group {group} has been rebalancing {since}, and waits for other members, each of "
                "which joins when its user asks for the next records, or is put out after its session_timeout_ms "
                f"(45,000 by default) or max_poll_interval_ms: see `minibroker groups describe {group}`"
            )
        case "completing rebalance":
            return Wait(f"no assignment yet: group {group} has been dealing out partitions {since}{trouble}")
    if standing.trouble is not None:
        return Wait(f"the coordinator of group {group} cannot be reached: {standing.trouble}")
    return None


async def watch(member: GroupMember, runtime: ClientRuntime, in_hand: InHand) -> None:
    """The task that logs a WARNING if the member waits longer than STALL_S, unless it waits for its own user."""
    stalls: Stalls[str] = Stalls(runtime.connections.client_id, remedy="")
    while True:
        wait = None if member.subscribed is None else waits_for(member, runtime, in_hand)
        waiting = {} if wait is None or wait.is_users else {f"group {member.group}": wait.text}
        stalls.look(runtime.clock.monotonic(), waiting, waiting.__getitem__)
        if waiting:
            await asyncio.sleep(LOOK_EVERY_S)
        else:
            await member.standing.stirred.wait()

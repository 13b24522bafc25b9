"""What a member of a group waits for, in words: for `status()`, and for the log where it takes long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.activity import Activity
from minibroker.client.group.states import MemberState
from minibroker.client.stalls import LOOK_EVERY_S, STALL_S, Stalls

if TYPE_CHECKING:
    from minibroker.client.group.member import GroupMember


USUAL_S = 1.0
"""So long a rebalance takes where everybody asks for records."""


class Wait(NamedTuple):
    text: str
    is_users: bool = False
    """It is the user's turn, who knows what it does: nothing for the log."""


def waits_for(member: GroupMember, runtime: ClientRuntime, activity: Activity) -> Wait | None:
    """What keeps a member that is to be in the group from having what it is assigned; None: nothing does."""
    now = runtime.clock.monotonic()
    group, trouble = member.group, "" if member.obstacle is None else f". {member.obstacle}"
    if member.fenced is not None:
        return Wait(str(member.fenced), is_users=True)
    if member.untold is not None:
        return Wait(f"the next call for records raises: {member.untold}", is_users=True)
    if member.is_refused:
        said = f"group {group} has refused it: the next call for records says why, the one after it tries again"
        return Wait(said, is_users=True)
    began = member.unsettled_since
    since = f"for {now - began:.1f} s"
    if activity.holds and activity.is_quiet:
        said = (
            f"group {group} rebalances, and waits {since} until this consumer is asked for the next records: "
            "only then are those that it has handed out done with"
        )
        return Wait(said, is_users=True)
    if (call := member.listener_call) is not None:
        said = f"group {group} rebalances, and waits for this consumer's listener: {call.method} has not returned for"
        return Wait(f"{said} {now - call.began:.1f} s{trouble}")
    if member.setback is not None and now < member.setback.at + STALL_S:
        trouble = trouble or f". {member.setback.error}"
    match member.state:
        case MemberState.UNJOINED:
            known = "" if member.coordinator is not None else "; its coordinator is not known yet"
            return Wait(f"it has been in no generation of group {group} {since}{known}{trouble}")
        case MemberState.PREPARING_REBALANCE if member.is_joining and not trouble and now > began + USUAL_S:
            return Wait(
                f"no assignment: group {group} has been rebalancing {since}, and waits for other members, each of "
                "which joins when its user asks for the next records, or is put out after its session_timeout_ms or "
                f"max_poll_interval_ms: see `minibroker groups describe {group}`"
            )
        case MemberState.PREPARING_REBALANCE:
            return Wait(f"no assignment: group {group} has been rebalancing {since}{trouble}")
        case MemberState.COMPLETING_REBALANCE:
            return Wait(f"no assignment yet: group {group} has been dealing out partitions {since}{trouble}")
    if member.trouble is not None:
        return Wait(f"the coordinator of group {group} cannot be reached: {member.trouble}")
    return None


async def watch(member: GroupMember, runtime: ClientRuntime, activity: Activity) -> None:
    """The task: a WARNING where the member waits for longer than STALL_S for what its user may not know of."""
    stalls: Stalls[str] = Stalls(runtime.connections.client_id, remedy="")
    while True:
        wait = None if member.subscribed is None else waits_for(member, runtime, activity)
        waiting = {} if wait is None or wait.is_users else {f"group {member.group}": wait.text}
        stalls.look(runtime.clock.monotonic(), waiting, waiting.__getitem__)
        if waiting:
            await asyncio.sleep(LOOK_EVERY_S)
        else:
            await member.stirred.wait()

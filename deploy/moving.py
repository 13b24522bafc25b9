"""Moves the leadership of one partition to another broker, with nothing but requests of an administrator.

A coordinator is the leader of a partition of an internal topic, so that is how a coordinator moves while all brokers
run. The replicas stay where they are. Only their order changes, and the first one is elected (KIP-460). Rejected: the
controlled shutdown of the leader, which moves all that it leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from minibroker.client.admin import Admin
from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.protocol.model import TopicPartition

_WITHIN_S = 30.0
_POLL_S = 0.02


def order_after_move(partition: TopicPartition, replicas: Sequence[int], isr: Sequence[int], leader: int) -> list[int]:
    """Return the replicas with the next leader first: the first other one in sync. Raises LaunchError if there is none.
    Pure."""
    others = [broker for broker in replicas if broker != leader and broker in isr]
    if not others:
        raise LaunchError(
            f"{partition} has no other replica in sync, so its leadership cannot move: start the brokers that have "
            "one, or give the topic more replicas with `minibroker reassign`"
        )
    return [others[0], *(broker for broker in replicas if broker != others[0])]


async def lead_by_first(admin: Admin, partition: TopicPartition, replicas: Sequence[int]) -> None:
    """Put the replicas, which are those of the partition, into this order, and let the first one lead. Return once the
    brokers show it. Raises LaunchTimedOut, MinibrokerError."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            await admin.alter_partition_reassignments({partition: replicas})
            while await admin.list_partition_reassignments([partition]):  # noqa: ASYNC110 - the controller has no event
                await asyncio.sleep(_POLL_S)
            await admin.elect_leaders("preferred", [partition])
    except TimeoutError as error:
        raise LaunchTimedOut(
            f"broker {replicas[0]} does not lead {partition} after {_WITHIN_S:g} s: see `minibroker status`"
        ) from error

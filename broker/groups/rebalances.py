"""The last rebalances of a group, each with its reason, as its coordinator remembers them. Pure.

A rebalance stops all members of a group for a while, and its reason is what an operator looks for. The coordinator's
log has it, on one broker, among those of other groups. So the coordinator also keeps the last ones for DescribeGroups
(not in Kafka). They are not in the log of `__consumer_offsets`: the next coordinator begins without any.
"""

from typing import NamedTuple

MOST_REBALANCES = 10
MOST_REASON = 300
"""Characters of a reason. A client may have written most of them."""
REBALANCE_BYTES = 400
"""The memory of a rebalance beside its reason."""


class Rebalance(NamedTuple):
    time_ms: int
    """When it began, in milliseconds since 1970."""
    began_s: float
    """The same by the coordinator's clock."""
    generation_id: int
    """The generation that it ended."""
    reason: str
    took_ms: int | None = None
    """Until the members had their assignments, or were all gone. None: it is under way, or another one followed."""

    @property
    def kept_bytes(self) -> int:
        return REBALANCE_BYTES + 4 * len(self.reason)


Rebalances = tuple[Rebalance, ...]
"""The oldest first."""


def begun(before: Rebalances, time_ms: int, began_s: float, generation_id: int, reason: str) -> Rebalances:
    """Return the rebalances with another one, without those that are too many."""
    return (*before[1 - MOST_REBALANCES :], Rebalance(time_ms, began_s, generation_id, reason[:MOST_REASON]))


def ended(before: Rebalances, now_s: float) -> Rebalances:
    """Return the rebalances after the last one, if any, has ended."""
    if not before or before[-1].took_ms is not None:
        return before
    return (*before[:-1], before[-1]._replace(took_ms=round((now_s - before[-1].began_s) * 1_000)))

"""The memory that groups may take: what strangers add to them is bounded."""

from collections.abc import Callable

from minibroker.broker.groups.group import MEMBER_BYTES, Group, MemberMetadata, bytes_of
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import Clock

MOST_GROUP_METADATA_BYTES = 16 * 1024 * 1024
"""Metadata of all members of a group, in all their protocols. A generation has one protocol and must fit into one
record of at most `message.max.bytes`, so a larger group would never get an assignment."""
MOST_MEMBERS_BYTES = 48 * 1024 * 1024
"""Memory of the members of all groups of a broker."""
LOOK_INTERVAL_S = 0.1


class Room:
    """How much more the groups of this broker may take of one kind of memory.

    Adding costs nothing here: what is kept is counted anew when the additions since the last count could have filled
    the limit, and then at most every LOOK_INTERVAL_S. So nothing must be subtracted where members and groups end.
    """

    def __init__(self, limit: int, clock: Clock, count: Callable[[], int]) -> None:
        """`count` returns the bytes that are kept now."""
        self.limit = limit
        self.refused = 0
        """Number of additions refused so far."""
        self._clock = clock
        self._count = count
        self._kept = 0
        self._counted_at_s = float("-inf")

    def add(self, size: int) -> bool:
        """Return whether this fits, and count it if it does."""
        if self._kept + size > self.limit:
            now_s = self._clock.monotonic()
            if now_s >= self._counted_at_s + LOOK_INTERVAL_S:
                self._counted_at_s = now_s
                self._kept = self._count()
            if self._kept + size > self.limit:
                self.refused += 1
                return False
        self._kept += size
        return True


def why_too_large(group: Group, joining: MemberMetadata, room: Room) -> BrokerError | None:
    """Return why there is no memory for what a member adds to a group, or None."""
    known = group.members.get(joining.member_id)
    size = bytes_of(joining.protocols)
    growth = size + MEMBER_BYTES if known is None else size - bytes_of(known.protocols)
    if growth <= 0:
        return None
    total = group.metadata_bytes + growth
    if group.members and total > MOST_GROUP_METADATA_BYTES:
        return BrokerError(
            ErrorCode.GROUP_MAX_SIZE_REACHED,
            f"the members' metadata would take {total} bytes; a group may have {MOST_GROUP_METADATA_BYTES}: use fewer "
            "topics, members or protocols in a group",
        )
    if room.add(growth):
        return None
    return BrokerError(
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        f"the members of all groups of this broker would take more than {room.limit} bytes: try again later",
    )

"""How the partitions that are due at a leader are put into fetch requests, for followers and consumers alike. Pure.

A partition is in one outstanding request at most, since the offset of its next fetch depends on what the last one
brought; and a partition that is in none is asked for as soon as it is due. So an answer splits its request: partitions
for which it brought records are asked for again in one request, the others in another. The busy ones then travel
without the quiet ones. A leader looks at every partition of a request several times before it answers, at about 20
microseconds each: if all were in one request, each record of one busy partition would pay for a thousand quiet ones.
Nor does a new partition (or a new leader after a crash) wait for requests of quiet ones: it gets a request of its own.

Splitting alone would end with a request for each partition. They are joined again in two ways. Partitions that are
answered in one turn of the loop are asked for together. And the requests to a leader expire together: each waits there
until the next of a series of moments that are the longest wait apart. If there are many requests all the same, the
small ones come back earlier to be joined: the smaller, the earlier, since asking again costs by the partition. One that
names a quarter of what a request should name waits for a quarter of the longest wait, and the moments of the earlier
ones are among those of the later ones, so that whatever comes back meets all that are smaller.

A request names PARTITIONS_PER_REQUEST at most, unless there are very many partitions: each request is handled in one
go, and the leader has others to serve.

A follower's requests for quiet partitions are mostly the same as before, and are then not sent in full: see
`fetch_slots`.

Rejected: abandoning the outstanding request whenever another partition
becomes busy, since its answer is sent all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from minibroker.protocol.messages import MAX_FETCH_SLOTS

P = TypeVar("P")

PARTITIONS_PER_REQUEST = 100
MAX_PIECES = 8
"""The most requests into which the partitions are cut; if there are very many partitions, each request names more."""

MAX_REQUESTS = MAX_FETCH_SLOTS
"""Outstanding requests at a leader, whose own limit is max_in_flight_requests_per_connection, 100."""

PARTITIONS_PER_WAIT = 500
"""A follower of more partitions than these waits longer in proportion: see `follower_pace`."""
LAG_PER_WAIT = 10

MANY_REQUESTS = 16
SHORT_WAIT_MS = 20
"""A small request waits at the leader for at least this long, when there are many."""
SHORT_WAITS = 32
"""How many waits of the smallest there are at most in the longest one."""


def most_in_a_request(partitions: int) -> int:
    """How many partitions a request should name when so many are fetched."""
    return max(PARTITIONS_PER_REQUEST, -(-partitions // MAX_PIECES))


def follower_pace(partitions: int) -> int:
    """How many times longer a follower of so many partitions of one leader waits, for an answer and after a refusal: so
    quiet partitions cost the same, however many they are, and so do those whose leader does not lead yet."""
    return max(1, -(-partitions // PARTITIONS_PER_WAIT))


def follower_wait_ms(wait_max_ms: int, partitions: int, lag_time_max_ms: int) -> int:
    """How long the requests of a follower of so many partitions may wait at their leader. Records end the wait as ever.
    What comes later is what a follower of a quiet partition tells and hears without any: where logs begin, and the high
    watermark. Never so long that it counts as lag."""
    longest = max(wait_max_ms, lag_time_max_ms // LAG_PER_WAIT)
    return min(wait_max_ms * follower_pace(partitions), longest)


def cut(due: Sequence[P], most: int) -> list[Sequence[P]]:
    """What is due, cut into pieces of one request each."""
    return [due[start : start + most] for start in range(0, len(due), most)]


def schedule(
    pieces: Sequence[Sequence[P]], *, most: int, outstanding: int, elapsed_ms: int, longest_wait_ms: int
) -> list[tuple[Sequence[P], int]]:
    """The pieces to ask for now, and for how many milliseconds each may wait at the leader. The others go once an
    answer has come.

    `outstanding` requests wait there already. `elapsed_ms` is counted from any moment, the same for all requests.
    """
    scheduled = []
    for count, piece in enumerate(pieces[: max(0, MAX_REQUESTS - outstanding)], start=outstanding):
        waits = _waits(len(piece), most, longest_wait_ms) if count >= MANY_REQUESTS else 1
        scheduled.append((piece, _until_next(waits, elapsed_ms, longest_wait_ms) if longest_wait_ms > 0 else 0))
    return scheduled


def _waits(partitions: int, most: int, longest_wait_ms: int) -> int:
    """How many waits of a request that names so many partitions there are in the longest one: a power of two."""
    wanted = min(SHORT_WAITS, most // partitions, longest_wait_ms // SHORT_WAIT_MS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _until_next(waits: int, elapsed_ms: int, longest_wait_ms: int) -> int:
    """To the next moment, where there are so many in the longest wait."""
    number = elapsed_ms * waits // longest_wait_ms + 1
    return -(-number * longest_wait_ms // waits) - elapsed_ms

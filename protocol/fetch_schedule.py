"""How followers and consumers divide the partitions due at a leader into fetch requests. Pure.

A partition is in at most one outstanding request, since the offset of its next fetch depends on the last response. A
partition in none is requested as soon as it is due. So a response splits its request: partitions with records go into
one new request, the others into another, and busy partitions no longer share a request with quiet ones. That matters
because a leader looks at every partition of a request several times before it responds, at about 20 microseconds each:
in one request, each record of a busy partition would pay for a thousand quiet ones. A new partition (or a new leader
after a crash) does not wait for requests of quiet partitions either: it gets its own request.

Splitting alone would end with a request per partition, so requests are joined again in two ways. Partitions answered in
one turn of the loop are requested together. And the requests to a leader expire together: each waits until the next of
a series of moments that are the longest wait apart. If there are still many requests, small ones expire earlier, to be
joined; the smaller, the earlier, since the cost of a repeated request grows with its partitions. A request with a
quarter of the desired partitions waits for a quarter of the longest wait. The moments of long waits are also moments of
all shorter ones, so an expiring request meets all smaller ones.

A request names at most PARTITIONS_PER_REQUEST, unless there are very many partitions: the leader handles a request
without interruption, and must serve other clients in between.

A follower's requests for quiet partitions are mostly the same as before and are then not sent in full (`fetch_slots`).

Rejected: abandoning the outstanding request whenever another partition becomes busy, since the leader still sends its
response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from minibroker.protocol.messages import MAX_FETCH_SLOTS

P = TypeVar("P")

PARTITIONS_PER_REQUEST = 100
MAX_PIECES = 8
"""The maximum number of requests into which partitions are cut; with very many partitions, each names more."""

MAX_REQUESTS = MAX_FETCH_SLOTS
"""Maximum of outstanding requests at a leader, whose own limit is max_in_flight_requests_per_connection, 100."""

PARTITIONS_PER_WAIT = 500
"""With more partitions than this a follower waits longer, in proportion (`follower_pace`)."""
LAG_PER_WAIT = 10

MANY_REQUESTS = 16
SHORT_WAIT_MS = 20
"""The shortest wait of a small request if there are MANY_REQUESTS."""
SHORT_WAITS = 32
"""The maximum ratio of the longest wait to the shortest."""


def most_in_a_request(partitions: int) -> int:
    """Return the number of partitions that a request should name if this many are fetched."""
    return max(PARTITIONS_PER_REQUEST, -(-partitions // MAX_PIECES))


def follower_pace(partitions: int) -> int:
    """Return the factor by which a follower of this many partitions of one leader extends its waits, for a response and
    after an error. So the cost of quiet partitions, and of those whose leader does not lead yet, stays constant."""
    return max(1, -(-partitions // PARTITIONS_PER_WAIT))


def follower_wait_ms(wait_max_ms: int, partitions: int, lag_time_max_ms: int) -> int:
    """Return how long the requests of a follower of this many partitions may wait at their leader.

    New records still end the wait at once. Only log start offsets and high watermarks of quiet partitions are exchanged
    later. The wait is always too short to count as lag."""
    longest = max(wait_max_ms, lag_time_max_ms // LAG_PER_WAIT)
    return min(wait_max_ms * follower_pace(partitions), longest)


def cut(due: Sequence[P], most: int) -> list[Sequence[P]]:
    """Cut the due partitions into pieces of one request each."""
    return [due[start : start + most] for start in range(0, len(due), most)]


def schedule(
    pieces: Sequence[Sequence[P]], *, most: int, outstanding: int, elapsed_ms: int, longest_wait_ms: int
) -> list[tuple[Sequence[P], int]]:
    """Return the pieces to request now, each with the milliseconds that it may wait at the leader. The others follow
    after a response.

    `outstanding` requests already wait there. `elapsed_ms` is counted from any moment, the same for all requests.
    """
    scheduled = []
    for count, piece in enumerate(pieces[: max(0, MAX_REQUESTS - outstanding)], start=outstanding):
        waits = _waits(len(piece), most, longest_wait_ms) if count >= MANY_REQUESTS else 1
        scheduled.append((piece, _until_next(waits, elapsed_ms, longest_wait_ms) if longest_wait_ms > 0 else 0))
    return scheduled


def _waits(partitions: int, most: int, longest_wait_ms: int) -> int:
    """Return the ratio of the longest wait to the wait of a request for this many partitions: a power of two."""
    wanted = min(SHORT_WAITS, most // partitions, longest_wait_ms // SHORT_WAIT_MS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _until_next(waits: int, elapsed_ms: int, longest_wait_ms: int) -> int:
    """Return the time to the next moment if this many divide the longest wait."""
    number = elapsed_ms * waits // longest_wait_ms + 1
    return -(-number * longest_wait_ms // waits) - elapsed_ms

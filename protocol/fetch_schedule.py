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

If many partitions get a record now and then, each record would pay for the other partitions of its request, which have
to be requested again. So a request for quiet partitions has a size: records that end it halve the next one, and a whole
wait without records doubles it (`size_after`). A partition with a record per longest wait thereby shares its requests
with few others, and one without any with a hundred.

A follower's requests for quiet partitions are mostly the same as before and are then not sent in full (`fetch_slots`).

Rejected: abandoning the outstanding request whenever another partition becomes busy, since the leader still sends its
response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from minibroker.protocol.messages import MAX_FETCH_SLOTS

P = TypeVar("P")

PARTITIONS_PER_REQUEST = 100
MAX_PIECES = 8
"""The maximum number of requests into which partitions are cut; with very many partitions, each names more."""

MAX_QUIET_PIECES = 16
"""The maximum number of requests for quiet partitions into which records cut them. The rest is for busy ones."""

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


def size_after(size: int, *, was_ended_by_records: bool, waited_longest: bool, partitions: int) -> int:
    """Return how many quiet partitions the next requests should name after one of that size ended."""
    if was_ended_by_records:
        return max(min(size, partitions) // 2, -(-partitions // MAX_QUIET_PIECES))
    return min(2 * size if waited_longest else size, most_in_a_request(partitions))


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


class Piece(NamedTuple, Generic[P]):
    """The partitions of one request."""

    partitions: Sequence[P]
    size: int
    """How many it should name. A smaller one waits for a shorter time, to be joined."""


class Planned(NamedTuple, Generic[P]):
    """A request to send now."""

    piece: Piece[P]
    wait_ms: int
    """How long it may wait at the leader."""
    is_longest: bool
    """It waits until a moment at which all requests expire."""


def cut(due: Sequence[P], size: int) -> list[Piece[P]]:
    """Cut the due partitions into pieces of one request each."""
    return [Piece(due[start : start + size], size) for start in range(0, len(due), size)]


def cut_by_size(due: Iterable[P], size_of: Callable[[P], int]) -> list[Piece[P]]:
    """Cut quiet partitions into pieces, each of partitions that want requests of the same size."""
    by_size: dict[int, list[P]] = {}
    for partition in due:
        by_size.setdefault(size_of(partition), []).append(partition)
    return [piece for size, partitions in by_size.items() for piece in cut(partitions, size)]


def schedule(
    pieces: Sequence[Piece[P]], *, outstanding: int, elapsed_ms: int, longest_wait_ms: int
) -> list[Planned[P]]:
    """Return the pieces to request now. The others follow after a response.

    `outstanding` requests already wait there. `elapsed_ms` is counted from any moment, the same for all requests.
    """
    scheduled = []
    for count, piece in enumerate(pieces[: max(0, MAX_REQUESTS - outstanding)], start=outstanding):
        waits = _waits(len(piece.partitions), piece.size, longest_wait_ms) if count >= MANY_REQUESTS else 1
        wait_ms = _until_next(waits, elapsed_ms, longest_wait_ms) if longest_wait_ms > 0 else 0
        scheduled.append(Planned(piece, wait_ms, waits == 1))
    return scheduled


def _waits(partitions: int, size: int, longest_wait_ms: int) -> int:
    """Return the ratio of the longest wait to the wait of a request for this many partitions: a power of two."""
    wanted = min(SHORT_WAITS, size // partitions, longest_wait_ms // SHORT_WAIT_MS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _until_next(waits: int, elapsed_ms: int, longest_wait_ms: int) -> int:
    """Return the time to the next moment if this many divide the longest wait."""
    number = elapsed_ms * waits // longest_wait_ms + 1
    return -(-number * longest_wait_ms // waits) - elapsed_ms

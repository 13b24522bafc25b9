"""How the partitions that are due at a leader are put into fetch requests, for followers and consumers alike. Pure.

A partition stands in one outstanding request at most, since the offset of its next fetch is what the last one brought;
and whatever stands in none is asked for as soon as it is due. So an answer splits: partitions that it brought records
for are asked for again in one request, those that it brought nothing for in another. The busy ones then travel without
the quiet ones. A leader looks at every partition of a request several times before it answers, at some 20 microseconds
apiece: were all in one request, each record of one busy partition would pay for a thousand quiet ones. Nor does a fresh
partition (or a new leader after a crash) wait for the quiet of the others: it gets a request of its own.

Splitting alone would end with a request for each partition. They come together again in two ways. What is answered in
one turn of the loop is asked for together. And the requests to a leader run out together: each waits there until the
next of a row of moments that are the longest wait apart. Where there are many requests all the same, the small ones
wait a short time only, so that they come back to be joined.

A request names PARTITIONS_PER_REQUEST at most, unless there are very many: each is handled in one go, and the leader
has others to serve.

Rejected: fetch sessions (KIP-227), which keep quiet partitions out of the requests, but not out of the leader's
work, and are state on both sides that must agree; abandoning the outstanding request whenever another partition
becomes busy, since its answer is sent nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

P = TypeVar("P")

PARTITIONS_PER_REQUEST = 100
MAX_PIECES = 8
"""Requests that all partitions are cut into, at most; where there are very many, each names more."""

MAX_REQUESTS = 32
"""Outstanding ones at a leader, which takes no more than max_in_flight_requests_per_connection, 100."""

MANY_REQUESTS = 16
SHORT_WAIT_MS = 20
"""What a small request waits at the leader for where there are many."""


def most_in_a_request(partitions: int) -> int:
    """How many a request should name, of so many that are fetched."""
    return max(PARTITIONS_PER_REQUEST, -(-partitions // MAX_PIECES))


def cut(due: Sequence[P], most: int) -> list[Sequence[P]]:
    """What is due, in pieces for a request each."""
    return [due[start : start + most] for start in range(0, len(due), most)]


def schedule(
    pieces: Sequence[Sequence[P]], *, most: int, outstanding: int, elapsed_ms: int, longest_wait_ms: int
) -> list[tuple[Sequence[P], int]]:
    """The pieces that are to be asked for now, and for how many milliseconds each may wait at the leader. The others go
    once an answer has come.

    `outstanding` requests wait there already. `elapsed_ms` is counted from any moment, the same for all requests.
    """
    scheduled = []
    for count, piece in enumerate(pieces[: max(0, MAX_REQUESTS - outstanding)], start=outstanding):
        is_brief = count >= MANY_REQUESTS and len(piece) < most
        apart_ms = min(longest_wait_ms, SHORT_WAIT_MS) if is_brief else longest_wait_ms
        scheduled.append((piece, apart_ms - elapsed_ms % apart_ms if apart_ms > 0 else 0))
    return scheduled

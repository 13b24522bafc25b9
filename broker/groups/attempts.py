"""Which attempts to change a group's offsets come too late, since a newer one of the same client was taken. Pure.

The problem. A client gives up a connection and asks again by another; what it had sent by the first may still be on
its way, and arrive seconds later, when the client has committed something newer, or others have. Within a generation,
and in groups without members, nothing about an old commit looks old: the committed offset would go back, and a group
that was deleted and is used again would be deleted again.

The choice. Each attempt says whose it is and its number, which grows with everything that this client sends, a retry of
the same change included. The highest number of each client is remembered; one that is below it is late, and refused.
Numbers are given in the moment of sending, by one connection at a time: nobody who still waits for an answer is late.

This is kept for one term, in memory. What arrives at a deposed coordinator changes nothing, as its writes do not come
into the log; but it may coordinate the group again some time later, and knows nothing then of what was taken elsewhere.
So an attempt also names the latest leader epoch in which its client has found the coordinator, and one that is meant
for an earlier term is late, too. (A coordinator whose process ended has no old connections.) One that is meant for a
later epoch is not taken either: this coordinator is deposed and has not heard of it, or has not heard yet that it leads
again. Else a client could be sent to the next coordinator, and back by a broker that knows less; what it had sent
there, and given up, would be the first that the next one hears of it.

Rejected: to make each commit depend on what the client has read before, which costs a request more for every commit;
to write the numbers to the log, which nobody needs once the term is over.
"""

from collections import OrderedDict

from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages.groups import Attempt

MAX_CLIENTS = 10_000
"""Of one partition of `__consumer_offsets`. Who was not heard of for longest is forgotten: its late attempt is taken,
if one is still on its way after so many others have asked."""


class LatestAttempts:
    """Of all clients, in a term that began with this leader epoch."""

    def __init__(self, leading_since_epoch: int, max_clients: int = MAX_CLIENTS) -> None:
        self._leading_since_epoch = leading_since_epoch
        self._max_clients = max_clients
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, attempt: Attempt | None, leader_epoch: int) -> ErrorCode:
        """NONE, and it is the latest of its client from now on. NOT_COORDINATOR: it was meant for an earlier term, or
        for a later epoch than `leader_epoch`, the present one. REQUEST_TIMED_OUT: a newer one was taken. `attempt`:
        None where the client does not say, as Kafka's do not."""
        if attempt is None:
            return ErrorCode.NONE
        meant_for = attempt.coordinator_epoch
        if meant_for >= 0 and not self._leading_since_epoch <= meant_for <= leader_epoch:
            return ErrorCode.NOT_COORDINATOR
        if attempt.number < self._numbers.get(attempt.client_instance, -1):  # equal: the same request, next group
            return ErrorCode.REQUEST_TIMED_OUT
        self._numbers[attempt.client_instance] = attempt.number
        self._numbers.move_to_end(attempt.client_instance)
        if len(self._numbers) > self._max_clients:
            self._numbers.popitem(last=False)
        return ErrorCode.NONE

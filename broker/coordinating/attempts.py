"""Rejects late attempts: those older than an accepted attempt of the same client. Pure.

The problem. A client gives up a connection and repeats its request on another one. The first request may still be on
its way and arrive seconds later, after this client or another one has committed a newer offset. Within a generation,
and in groups without members, an old commit carries no sign of its age. The committed offset would go back, or a group
that was deleted and is used again would be deleted again. An InitProducerId without an epoch would fence the very
producer that sent it.

The choice. Each attempt names its client and a number, which grows with everything that the client sends, including
retries of the same change. The broker remembers the highest number of each client and rejects lower ones. A client
numbers requests in the moment of sending and uses one connection at a time, so no request with a waiting caller is
late.

The numbers are kept in memory, for one term. An attempt at a deposed coordinator changes nothing, because its writes do
not reach the log. But that broker may coordinate the group again later, without knowing the attempts that others
accepted. An attempt therefore also names the latest leader epoch in which its client found the coordinator, and an
attempt for an earlier term is late. (A coordinator whose process ended has no old connections.) An attempt for a later
epoch is rejected as well: this coordinator has been deposed without knowing it, or does not know yet that it leads
again. Otherwise a client could be sent to the next coordinator and back by a broker with older metadata, and an
abandoned request to the next coordinator would be the first that it receives from this client.

Rejected: making each commit depend on the offset that the client has read, which costs one more request per commit;
writing the numbers to the log, which are useless after the term.
"""

from collections import OrderedDict

from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages.fields import Attempt

MAX_CLIENTS = 10_000
"""Clients remembered per partition of an internal topic. The client that was silent longest is forgotten; a late
attempt of it would be accepted if it is still on its way after so many other clients have sent theirs."""


class LatestAttempts:
    """The latest attempts of all clients in a term that began with this leader epoch."""

    def __init__(self, leading_since_epoch: int, max_clients: int = MAX_CLIENTS) -> None:
        self._leading_since_epoch = leading_since_epoch
        self._max_clients = max_clients
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, attempt: Attempt | None, leader_epoch: int) -> ErrorCode:
        """Accept an attempt as its client's latest and return NONE. NOT_COORDINATOR: it is meant for an earlier term,
        or for a later epoch than the present `leader_epoch`. REQUEST_TIMED_OUT: a newer attempt was accepted. `attempt`
        is None if the client sends none, as Kafka's clients."""
        if attempt is None:
            return ErrorCode.NONE
        meant_for = attempt.coordinator_epoch
        if meant_for >= 0 and not self._leading_since_epoch <= meant_for <= leader_epoch:
            return ErrorCode.NOT_COORDINATOR
        if attempt.number < self._numbers.get(attempt.client_instance, -1):  # equal: the next group of the same request
            return ErrorCode.REQUEST_TIMED_OUT
        self._numbers[attempt.client_instance] = attempt.number
        self._numbers.move_to_end(attempt.client_instance)
        if len(self._numbers) > self._max_clients:
            self._numbers.popitem(last=False)
        return ErrorCode.NONE

"""The waits of groups: for members to join, for their assignments to be asked for, for heartbeats.

What they wait for is known to the coordinator, which they ask; nothing is decided here.
"""

from collections.abc import Callable

from minibroker.broker.scheduling.purgatory import DelayedOperation


class DelayedJoin(DelayedOperation):
    """Completes when all members of the group have joined, or when they have had the rebalance timeout for it (Kafka's
    DelayedJoin). With an initial delay it waits for its timeout alone (Kafka's InitialDelayedJoin)."""

    def __init__(self, timeout_ms: int, has_all_joined: Callable[[], bool], complete: Callable[[], None]) -> None:
        super().__init__(timeout_ms)
        self._has_all_joined = has_all_joined
        self._complete = complete

    def try_complete(self) -> bool:
        return self.force_complete() if self._has_all_joined() else False

    def on_complete(self) -> None:
        self._complete()

    def on_expiration(self) -> None:
        """Who has not joined is dealt with where the join completes."""


class DelayedHeartbeat(DelayedOperation):
    """Completes when a member is none any more, or when its session has ended unless it was heard of (Kafka's
    DelayedHeartbeat). A heartbeat moves the end of the session and leaves this as it is: when its time comes, the rest
    of the session is waited for with another one. So a heartbeat costs nothing here."""

    def __init__(self, timeout_ms: int, is_over: Callable[[], bool], expired: Callable[[], None]) -> None:
        super().__init__(timeout_ms)
        self._is_over = is_over
        self._expired = expired

    def try_complete(self) -> bool:
        return self.force_complete() if self._is_over() else False

    def on_complete(self) -> None:
        """Nobody waits for an answer."""

    def on_expiration(self) -> None:
        self._expired()


class DelayedSync(DelayedHeartbeat):
    """Completes when a generation is over, or when its members have had the rebalance timeout to ask for their
    assignments (Kafka's DelayedSync)."""

"""Delayed operations of groups, which wait for joins, for requests of assignments and for heartbeats.

The coordinator knows whether they are complete; nothing is decided here.
"""

from collections.abc import Callable

from minibroker.broker.scheduling.purgatory import DelayedOperation


class DelayedJoin(DelayedOperation):
    """Completes when all members of the group have joined, or after the rebalance timeout (Kafka's DelayedJoin). With
    an initial delay, it completes only by its timeout (Kafka's InitialDelayedJoin)."""

    def __init__(self, timeout_ms: int, has_all_joined: Callable[[], bool], complete: Callable[[], None]) -> None:
        super().__init__(timeout_ms)
        self._has_all_joined = has_all_joined
        self._complete = complete

    def try_complete(self) -> bool:
        return self.force_complete() if self._has_all_joined() else False

    def on_complete(self) -> None:
        self._complete()


class DelayedHeartbeat(DelayedOperation):
    """Completes when the member is gone, or when its session has ended (Kafka's DelayedHeartbeat). A heartbeat only
    moves the end of the session. When this operation expires before that end, another one waits for the rest, so a
    heartbeat costs nothing here."""

    def __init__(self, timeout_ms: int, is_over: Callable[[], bool], expired: Callable[[], None]) -> None:
        super().__init__(timeout_ms)
        self._is_over = is_over
        self._expired = expired

    def try_complete(self) -> bool:
        return self.force_complete() if self._is_over() else False

    def on_complete(self) -> None:
        """No client waits for an answer."""

    def on_expiration(self) -> None:
        self._expired()


class DelayedSync(DelayedHeartbeat):
    """Completes when a generation is over, or when its members have had the rebalance timeout to request their
    assignments (Kafka's DelayedSync)."""

"""Quotas for the partitions that clients create and delete (KIP-599, Kafka's ControllerMutationQuotaManager).

Each partition takes a token of the client's bucket, which gains `controller_mutation_rate` tokens per second and holds
those of all windows (`controller.quota.window.num` times `controller.quota.window.size.seconds`). While the tokens are
negative, the topics of clients that know the error are refused with THROTTLING_QUOTA_EXCEEDED. Topics of older clients
are accepted and paid for by their throttle time. A topic is never refused for its size alone, since one that is larger
than the bucket could otherwise never be created.
"""

from __future__ import annotations

from collections.abc import Callable

from minibroker.broker.network.token_bucket import TokenBucket, make_room
from minibroker.broker.quotas.entities import QuotaKey, Quotas, limit_of


class ControllerMutationQuota:
    """The quota that applies to one request."""

    def __init__(self, bucket: TokenBucket, clock: Callable[[], float], *, is_strict: bool) -> None:
        self._bucket = bucket
        self._clock = clock
        self._is_strict = is_strict
        self._throttled_until_s = 0.0

    def take(self, partitions: int) -> bool:
        """Count the partitions of a topic, and return whether it may be created or deleted now."""
        now_s = self._clock()
        if self._is_strict:
            over_s = self._bucket.overdraft_s(now_s)
            if over_s > 0:
                self._throttled_until_s = now_s + over_s
                return False
            self._bucket.take(partitions, now_s)
        else:
            self._bucket.take(partitions, now_s)
            over_s = self._bucket.overdraft_s(now_s)
            if over_s > 0:
                self._throttled_until_s = now_s + over_s
        return True

    def put_back(self, partitions: int) -> None:
        """Do not count the partitions of a topic that failed for another reason."""
        self._bucket.put_back(partitions, self._clock())

    def throttle_s(self) -> float:
        """Return the throttle time that is left for the client, in seconds."""
        return max(0.0, self._throttled_until_s - self._clock())


class ControllerMutationQuotaManager:
    """The buckets of all clients. Only those of the controller's broker are used."""

    def __init__(self, windows: int, window_s: float, clock: Callable[[], float]) -> None:
        self._burst_s = windows * window_s
        self._clock = clock
        self._quotas: Quotas = {}
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def apply(self, quotas: Quotas) -> None:
        """Replace all quotas. Clients keep their buckets."""
        self._quotas = quotas
        if not quotas:
            self._buckets.clear()

    def quota_of(self, user: str, client_id: str, *, is_strict: bool) -> ControllerMutationQuota | None:
        """Return the quota for a request of this client; None: unlimited. `is_strict`: the client knows
        THROTTLING_QUOTA_EXCEEDED."""
        limit = limit_of(self._quotas, QuotaKey.CONTROLLER_MUTATION_RATE, user, client_id) if self._quotas else None
        if limit is None:
            return None
        burst, now_s = limit.value * self._burst_s, self._clock()
        bucket = self._buckets.get(limit.shared_by)
        if bucket is None:
            make_room(self._buckets)
            bucket = self._buckets[limit.shared_by] = TokenBucket(limit.value, burst, now_s)
        else:
            bucket.change(limit.value, burst, now_s)
        return ControllerMutationQuota(bucket, self._clock, is_strict=is_strict)

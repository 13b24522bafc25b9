"""What a client's quota for controller mutations lets through of a request (see `broker/quotas/mutations.py`)."""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.broker.quotas.entities import QuotaKey
from minibroker.broker.quotas.throttling import MOST_THROTTLE_MS
from minibroker.protocol.errors import ErrorCode

REFUSAL = "the quota controller_mutation_rate of this client is exceeded: try again after the throttle time"


class _Result(Protocol):
    name: str
    error_code: int


class Mutations:
    """The mutations that a request asks for: `partitions` has the number for each topic."""

    def __init__(self, services: Services, request: Request, partitions: Mapping[str, int], *, is_test: bool) -> None:
        """`is_test`: nothing will be changed, so nothing counts."""
        self._request = request
        self._partitions = partitions
        self._throttled_s = services.client_quotas.throttled_s
        session, principal = request.session, request.principal
        self._quota = None
        if not is_test and principal.broker_id is None:
            self._quota = services.mutation_quotas.quota_of(
                principal.name,
                request.client_id or "",
                is_strict=not session.is_before_mutation_quotas
                and request.source.dialect.knows_mutation_quotas(request.api.key, request.api_version),
            )
        quota = self._quota
        self.refused = [] if quota is None else [name for name, count in partitions.items() if not quota.take(count)]
        """Topics that are refused with THROTTLING_QUOTA_EXCEEDED."""

    def carried_out(self, results: Iterable[_Result]) -> None:
        """Do not count the topics that failed."""
        if self._quota is not None:
            for name in {each.name for each in results if each.error_code != ErrorCode.NONE}:
                self._quota.put_back(self._partitions.get(name, 0))

    def throttle(self) -> int:
        """Throttle the connection, and return the throttle time in milliseconds, rounded up: a client that waits for it
        may go on."""
        milliseconds = 0 if self._quota is None else min(math.ceil(self._quota.throttle_s() * 1_000), MOST_THROTTLE_MS)
        if milliseconds > 0:
            self._throttled_s[QuotaKey.CONTROLLER_MUTATION_RATE] += milliseconds / 1_000
            self._request.source.throttle(milliseconds / 1_000)
        return milliseconds

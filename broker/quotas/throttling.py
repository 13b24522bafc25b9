"""Counts the requests of each client against its quotas, and throttles those over one (Kafka's ClientQuotaManager and
ClientRequestQuotaManager).

A request that exceeds a quota is answered as usual. The answer names the throttle time, and the broker handles no
further request of the connection for that time (KIP-219). A client that respects the throttle time sends none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from minibroker.broker.network.request_channel import Request
from minibroker.broker.network.token_bucket import make_room
from minibroker.broker.quotas.entities import Limit, QuotaKey, Quotas, limit_of
from minibroker.broker.quotas.rates import Rate
from minibroker.protocol.messages import FetchRequest, FetchResponse, Message, ProduceRequest

MOST_THROTTLE_MS = 2**31 - 1


class _Account(NamedTuple):
    limit: Limit
    rate: Rate


class ClientQuotaManager:
    """The rates of all clients. `throttled_s` counts the throttle times, in seconds."""

    def __init__(self, windows: int, window_s: float, clock: Callable[[], float]) -> None:
        self._windows = windows
        self._window_s = window_s
        self._clock = clock
        self._quotas: Quotas = {}
        self._accounts: dict[tuple[QuotaKey, str, str], _Account | None] = {}
        self._rates: dict[tuple[QuotaKey, tuple[str, str]], Rate] = {}
        self.throttled_s = dict.fromkeys(QuotaKey, 0.0)

    def apply(self, quotas: Quotas) -> None:
        """Replace all quotas. Clients keep their rates."""
        self._quotas = quotas
        self._accounts.clear()
        if not quotas:
            self._rates.clear()

    @property
    def is_needed(self) -> bool:
        return bool(self._quotas)

    def most_fetched_bytes(self, request: Request) -> int | None:
        """Return the bytes that a client may fetch at once, so that it is never throttled for much longer than the
        quota's windows; None: any number."""
        account = self._account(QuotaKey.CONSUMER_BYTE_RATE, request) if self._quotas else None
        if account is None or _is_exempt(request):
            return None
        return max(1, int(account.limit.value * (self._windows - 1) * self._window_s))

    def on_answer(self, request: Request, answer: Message | None) -> None:
        """Count a request that is about to be answered, and throttle its connection. `answer` is None for a request
        that gets none."""
        if _is_exempt(request):
            return
        now = self._clock()
        throttle_s = 0.0
        for key, amount in _amounts(request, answer, now):
            account = self._account(key, request)
            if account is None or not amount:
                continue
            account.rate.record(amount, now)
            over_s = account.rate.overdraft_s(account.limit.value, now)
            if key is QuotaKey.REQUEST_PERCENTAGE:  # as in Kafka, one slow request is not held against the next ones
                over_s = min(over_s, self._window_s)
            self.throttled_s[key] += over_s
            throttle_s = max(throttle_s, over_s)
        if throttle_s > 0:
            if answer is not None and hasattr(answer, "throttle_time_ms"):
                answer.throttle_time_ms = max(answer.throttle_time_ms, in_ms(throttle_s))
            request.source.throttle(throttle_s)

    def _account(self, key: QuotaKey, request: Request) -> _Account | None:
        user, client_id = request.principal.name, request.client_id or ""
        found = self._accounts.get((key, user, client_id), Ellipsis)
        if found is not Ellipsis:
            return found
        limit = limit_of(self._quotas, key, user, client_id)
        account = None
        if limit is not None:
            make_room(self._rates)
            account = _Account(limit, self._rates.setdefault((key, limit.shared_by), self._new_rate()))
        make_room(self._accounts)
        self._accounts[key, user, client_id] = account
        return account

    def _new_rate(self) -> Rate:
        return Rate(self._windows, self._window_s)


def in_ms(throttle_s: float) -> int:
    """Return a throttle time as answers name it."""
    return min(int(throttle_s * 1_000), MOST_THROTTLE_MS)


def _is_exempt(request: Request) -> bool:
    """Brokers are exempt, as in Kafka."""
    return request.principal.broker_id is not None or (
        isinstance(request.body, FetchRequest) and request.body.replica_id >= 0
    )


def _amounts(request: Request, answer: Message | None, now: float) -> Iterable[tuple[QuotaKey, float]]:
    if isinstance(request.body, ProduceRequest):
        yield QuotaKey.PRODUCER_BYTE_RATE, request.size
    elif isinstance(answer, FetchResponse):
        yield (
            QuotaKey.CONSUMER_BYTE_RATE,
            sum(len(partition.records) for topic in answer.responses for partition in topic.partitions),
        )
    handled_at = request.handled_at or now
    yield QuotaKey.REQUEST_PERCENTAGE, 100 * (handled_at - request.dequeued_at)

"""Rates of new connections: of each address (KIP-612), of each listener, and of all that a broker accepts (KIP-402).

A connection that comes too fast is delayed, not refused: nothing is read from it until its turn. The turns are those of
a token bucket that holds one second's worth. A connection first waits for its address, then for its listener, and only
then counts for the broker, so that an address or listener that is too fast delays itself alone.

A connection whose turn is too far away is refused, because its client would give up first and a delayed connection
keeps its file descriptor. (Kafka holds one that is over the rate of its address for up to a second and then closes it.)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from minibroker.broker.network.token_bucket import TokenBucket, make_room

MOST_DELAY_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms, after which clients give up."""


class RateOf(Enum):
    ADDRESS = auto()
    LISTENER = auto()
    BROKER = auto()


class Stage(NamedTuple):
    """A rate at which a connection waits for its turn."""

    of: RateOf
    name: str = ""


_BROKER = Stage(RateOf.BROKER)


class ConnectionRates:
    """Pure: receives the time, never reads it."""

    def __init__(self, rate: int, of_listeners: Mapping[str, int], protected_listener: str | None = None) -> None:
        """`rate`: connections per second of the broker, which does not apply to the protected listener."""
        self._rate = rate
        self._of_listeners = of_listeners
        self._protected = protected_listener
        self._quotas: Mapping[str | None, float] = {}
        self._buckets: dict[Stage, TokenBucket] = {}
        self._of_addresses: dict[Stage, TokenBucket] = {}

    def configure(self, rate: int, of_listeners: Mapping[str, int], now: float) -> None:
        """Change the rates of the broker and its listeners. Delayed connections keep their turns."""
        self._rate, self._of_listeners = rate, of_listeners
        self._change(self._buckets, now)

    def set_quotas(self, quotas: Mapping[str | None, float], now: float) -> None:
        """Replace the rates of addresses; None: of all others."""
        self._quotas = quotas
        self._change(self._of_addresses, now)

    def stages(self, address: str, listener: str) -> list[Stage]:
        """Return the rates at which a connection waits, one after the other."""
        stages = [Stage(RateOf.ADDRESS, address), Stage(RateOf.LISTENER, listener)]
        return stages if listener == self._protected else [*stages, _BROKER]

    def delay_s(self, stage: Stage, now: float) -> float | None:
        """Take the next turn, and return the seconds until then; None: it is too far away."""
        rate = self._rate_of(stage)
        if rate is None:
            return 0.0
        buckets = self._of_addresses if stage.of is RateOf.ADDRESS else self._buckets
        bucket = buckets.get(stage)
        if bucket is None:
            make_room(buckets)
            bucket = buckets[stage] = TokenBucket(rate, max(1.0, rate), now)
        bucket.take(1, now)
        delay_s = bucket.overdraft_s(now)
        if delay_s <= MOST_DELAY_S:
            return delay_s
        bucket.put_back(1, now)
        return None

    def give_back(self, listener: str, now: float) -> None:
        """A connection was refused for another reason, and takes nobody's turn at its listener and the broker."""
        for stage in self.stages("", listener)[1:]:
            if stage in self._buckets:
                self._buckets[stage].put_back(1, now)

    def why_refused(self, stage: Stage) -> str:
        """Return why a connection has no turn."""
        match stage.of:
            case RateOf.ADDRESS:
                what = f"connection_creation_rate={self._rate_of(stage):g} per second of {stage.name}"
            case RateOf.LISTENER:
                what = (
                    f"listener.name.{stage.name.lower()}.max.connection.creation.rate={self._rate_of(stage)} per second"
                )
            case RateOf.BROKER:
                what = f"max.connection.creation.rate={self._rate} per second"
        return f"{what} is exceeded"

    def _rate_of(self, stage: Stage) -> float | None:
        match stage.of:
            case RateOf.ADDRESS:
                return self._quotas.get(stage.name, self._quotas.get(None)) if self._quotas else None
            case RateOf.LISTENER:
                return self._of_listeners.get(stage.name)
            case RateOf.BROKER:
                return self._rate

    def _change(self, buckets: dict[Stage, TokenBucket], now: float) -> None:
        for stage in list(buckets):
            rate = self._rate_of(stage)
            if rate is None:
                del buckets[stage]
            else:
                buckets[stage].change(rate, max(1.0, rate), now)

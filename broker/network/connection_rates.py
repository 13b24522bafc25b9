"""Rates of new connections: of each address (KIP-612), and of all that a broker accepts (KIP-402).

A connection that comes too fast is delayed, not refused: nothing is read from it until its turn. The turns are those of
a token bucket that holds one second's worth. Connections of an address first wait for the address, and only then count
for the broker, so that an address that is too fast delays itself alone.

A connection whose turn is too far away is refused, because its client would give up first and a delayed connection
keeps its file descriptor. (Kafka holds it for up to a second and then closes it.)
"""

from __future__ import annotations

from collections.abc import Mapping

from minibroker.broker.network.token_bucket import TokenBucket, make_room

MOST_DELAY_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms, after which clients give up."""


class ConnectionRates:
    """Pure: receives the time, never reads it."""

    def __init__(self, rate: int) -> None:
        """`rate`: connections per second of the broker."""
        self._rate = rate
        self._of_broker = TokenBucket(rate, rate, 0.0)
        self._quotas: Mapping[str | None, float] = {}
        self._of_addresses: dict[str, TokenBucket] = {}

    def configure(self, rate: int, now: float) -> None:
        """Change the rate of the broker. Delayed connections keep their turns."""
        if rate != self._rate:
            self._rate = rate
            self._of_broker.change(rate, rate, now)

    def set_quotas(self, quotas: Mapping[str | None, float], now: float) -> None:
        """Replace the rates of addresses; None: of all others."""
        self._quotas = quotas
        for address in list(self._of_addresses):
            rate = self._of(address)
            if rate is None:
                del self._of_addresses[address]
            else:
                self._of_addresses[address].change(rate, max(1.0, rate), now)

    def address_delay_s(self, address: str, now: float) -> float | None:
        """Take the next turn of the address, and return the seconds until then; None: it is too far away."""
        rate = self._of(address) if self._quotas else None
        if rate is None:
            return 0.0
        bucket = self._of_addresses.get(address)
        if bucket is None:
            make_room(self._of_addresses)
            bucket = self._of_addresses[address] = TokenBucket(rate, max(1.0, rate), now)
        return _turn(bucket, now)

    def broker_delay_s(self, now: float) -> float | None:
        """Take the next turn of the broker, in the same way."""
        return _turn(self._of_broker, now)

    def give_back(self, now: float) -> None:
        """A connection was refused for another reason, and takes nobody's turn at the broker."""
        self._of_broker.put_back(1, now)

    def why_refused(self, address: str, *, is_of_address: bool) -> str:
        """Return why a connection has no turn."""
        if is_of_address:
            return f"connection_creation_rate={self._of(address):g} per second of {address} is exceeded"
        return f"max.connection.creation.rate={self._rate} per second is exceeded"

    def _of(self, address: str) -> float | None:
        return self._quotas.get(address, self._quotas.get(None))


def _turn(bucket: TokenBucket, now: float) -> float | None:
    bucket.take(1, now)
    delay_s = bucket.overdraft_s(now)
    if delay_s <= MOST_DELAY_S:
        return delay_s
    bucket.put_back(1, now)
    return None

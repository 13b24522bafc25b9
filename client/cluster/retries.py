"""The retries of one call: the pauses between its attempts, its deadline, and the warning in the log if it stalls."""

from __future__ import annotations

import asyncio
from math import inf
from random import Random

from minibroker.client.log import Logger
from minibroker.client.stalls import Stalls
from minibroker.protocol.world import World

logger = Logger("minibroker.client")

MAX_BACKOFF_S = 1.0


def exponential_backoff_s(failures: int, first_s: float, random: Random) -> float:
    """Return the pause after that many failures in a row: `first_s`, doubled up to MAX_BACKOFF_S, ±20 % (KIP-580)."""
    return min(MAX_BACKOFF_S, first_s * 2.0 ** min(failures - 1, 20)) * random.uniform(0.8, 1.2)


class Retries:
    """A loop around attempts awaits `pause` after each failure, and gives up if that returns False:

    while True:
        try:
            return await attempt(retries.remaining_s)
        except NetworkError as error:
            if not await retries.pause(error):
                raise
    """

    def __init__(
        self, world: World, client_id: str, backoff_s: float, timeout_s: float = inf, what: str | None = None
    ) -> None:
        """`what` names the call in the log. None: the loop's attempts or its caller report stalls themselves."""
        self._clock = world.clock
        self._random = world.random
        self._client_id = client_id
        self._backoff_s = backoff_s
        self._deadline = self._clock.monotonic() + timeout_s
        self._what = what
        self._stalls: Stalls[str] = Stalls(client_id)
        self.failures = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; at least 1 ms, so that an attempt can fail with a reason of its own."""
        return max(0.001, self._deadline - self._clock.monotonic())

    async def pause(self, reason: object, first_s: float | None = None) -> bool:
        """Wait before the next attempt. Return False, without waiting, if the deadline is not after the pause.
        `first_s`: the first pause for this reason, instead of the client's `retry_backoff_ms`."""
        self.failures += 1
        pause_s = exponential_backoff_s(self.failures, self._backoff_s if first_s is None else first_s, self._random)
        now = self._clock.monotonic()
        if now + pause_s >= self._deadline:
            return False
        if self._what is not None:
            logger.debug("%s: %s: %s", self._client_id, self._what, reason)
            waiting = {self._what: str(reason)}
            self._stalls.look(now, waiting, waiting.__getitem__)
        await asyncio.sleep(pause_s)
        return True

    def succeeded(self) -> None:
        """Log the end of a stall, if one was logged."""
        self._stalls.look(self._clock.monotonic(), (), str)

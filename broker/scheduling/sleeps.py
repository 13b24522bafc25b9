"""Sleeps whose length is a setting that may change while they last.

A task that sleeps by a setting's old value would heed the new one only afterwards: a throttle that was removed would
hold for another quarter of an hour. So nothing in a broker sleeps for a dynamic setting but here, where a change of
settings makes each sleeper look again how long. (Fetchers wait for much else, and are woken by their manager.)
"""

import asyncio
from collections.abc import Callable

from minibroker.protocol.world import Clock


class Sleeps:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sleepers: set[asyncio.Event] = set()

    def look_again(self) -> None:
        """Settings have changed."""
        for sleeper in self._sleepers:
            sleeper.set()

    async def sleep(self, seconds: Callable[[], float]) -> None:
        """For so many seconds from now on, as the settings have it at each moment."""
        began_s = self._clock.monotonic()
        await self.sleep_until(lambda: began_s + seconds())

    async def sleep_until(self, due_s: Callable[[], float], stopped: asyncio.Event | None = None) -> None:
        """Until `due_s` of the monotonic clock, as the settings have it at each moment, or until `stopped` is set."""
        changed = asyncio.Event()
        events = [changed] if stopped is None else [changed, stopped]
        self._sleepers.add(changed)
        try:
            while (left_s := due_s() - self._clock.monotonic()) > 0 and not (stopped and stopped.is_set()):
                changed.clear()
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                try:
                    await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        finally:
            self._sleepers.discard(changed)

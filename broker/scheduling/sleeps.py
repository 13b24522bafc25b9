"""Sleeps that follow changes of their setting.

A task that slept by a setting's old value would apply the new one only afterwards: a removed throttle would hold for
another quarter of an hour. All sleeps by a dynamic setting therefore go through this module, and a change of settings
makes each of them compute its length again. (Fetchers wait for many other things, and their manager wakes them.)
"""

import asyncio
from collections.abc import Callable

from minibroker.protocol.world import Clock


class Sleeps:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sleepers: set[asyncio.Event] = set()

    def look_again(self) -> None:
        """Make each sleeper compute its length again."""
        for sleeper in self._sleepers:
            sleeper.set()

    async def sleep(self, seconds: Callable[[], float]) -> None:
        """Sleep for `seconds()` from now. Changes of the settings apply at once."""
        began_s = self._clock.monotonic()
        await self.sleep_until(lambda: began_s + seconds())

    async def sleep_until(self, due_s: Callable[[], float], stopped: asyncio.Event | None = None) -> None:
        """Sleep until `due_s()` on the monotonic clock, or until `stopped` is set. Changes of the settings apply at
        once."""
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

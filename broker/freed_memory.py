"""Returns memory to the operating system that was freed after a peak.

The problem: glibc keeps freed blocks for the next request, which saves half of the cost of large requests (`__main__`).
After a peak, a broker would stay at its largest size until the end.

The choice: `malloc_trim`, in a thread, if the process is much larger than it was. It blocks threads that allocate for
about a millisecond for each MiB that it returns, so a trim that returned little is not soon repeated. Rejected: a fixed
threshold above which blocks are mapped by themselves, which costs page faults with every large request.
"""

import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

LOOK_INTERVAL_S = 20.0
MUCH_BYTES = 48 * 1024 * 1024
"""Growth that is worth a trim."""
LITTLE_BYTES = 8 * 1024 * 1024
LONGEST_REST = 64
"""The largest number of looks between two trims that return little."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


class FreedMemory:
    def __init__(self, resident: Callable[[], int], trim: Callable[[int], object]) -> None:
        self._resident = resident
        self._trim = trim
        self._least = resident()
        self._largest = 0
        """Since the last trim that returned little."""
        self._rest = 1
        self._left = 0

    async def look(self) -> None:
        """Trim if the process has grown much."""
        now = self._resident()
        if now > self._largest + MUCH_BYTES:
            self._rest, self._left = 1, 0
        if now < self._least + MUCH_BYTES:
            return
        self._left -= 1
        if self._left > 0:
            return
        await asyncio.to_thread(self._trim, 0)
        left = self._resident()
        self._least = min(self._least, left)
        if now - left < LITTLE_BYTES:
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._largest = now
        else:
            self._rest = 1
        self._left = self._rest


async def return_freed_memory() -> None:
    """Look at the process again and again. Ends at once where there is no `malloc_trim`, as in musl."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    memory = FreedMemory(resident_bytes, trim)
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        await memory.look()

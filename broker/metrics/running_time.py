"""A clock that stands still while the process does.

The problem: a disk call that lasted while the process was stopped (SIGSTOP, a frozen container, a paused virtual
machine) or got no processor took long by any clock, but the disk was not slow. Nothing in /proc says for how long a
process was stopped.

The choice: a thread that does nothing else wakes up every INTERVAL_S. A call that waits for a disk holds neither the
interpreter lock nor a processor, so this thread is late only if all threads are: that time does not count.

Rejected: the event loop as the witness (a write blocks it), and a handler of SIGCONT (a container that is thawed and a
virtual machine that goes on get none).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

INTERVAL_S = 0.1
MOST_S = 0.2
"""More time than this between two ticks does not count."""


class RunningTime:
    """Runs its thread as a context manager. Any thread may call `seconds`."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = 0.0, monotonic()
        """The reading at the last tick, and its time. One value, since threads share it."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._tick_regularly, name="running-time", daemon=True)

    def seconds(self) -> float:
        """Return the seconds for which the process has run. They never go back."""
        seconds, ticked_s = self._last
        return seconds + min(self._monotonic() - ticked_s, MOST_S)

    def tick(self) -> None:
        self._last = self.seconds(), self._monotonic()

    def _tick_regularly(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self.tick()

    def __enter__(self) -> RunningTime:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

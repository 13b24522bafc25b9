"""A connection to ZooKeeper that an injected fault cuts: kazoo waits, as if no packet came through.

kazoo asks its handler before each read and each write of a socket. While the connection is cut, the answer is that
nothing can be read or written, until kazoo's own limits end the connection and, on the server, the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minibroker.controller.zookeeper_threads import WakeUps

_LOOK_EVERY_S = 0.02
_PAUSE_S = 0.1

Select = Callable[[list[Any], list[Any], float | None], tuple[list[Any], list[Any], list[Any]]]


class Cut:
    """`is_cut` is asked on kazoo's thread."""

    def __init__(self, is_cut: Callable[[], bool]) -> None:
        self._is_cut = is_cut

    def select(
        self, select: Select, readers: list[Any], writers: list[Any], timeout_s: float | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what `select` returns, without connections to ZooKeeper while these are cut."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if self._is_cut():
                slice_s = _LOOK_EVERY_S if left_s is None else min(left_s, _LOOK_EVERY_S)
                found = select([one for one in readers if isinstance(one, WakeUps)], [], slice_s)
                if found[0] or left_s == 0.0:
                    return found
                continue
            found = select(readers, writers, left_s)
            if not self._is_cut() or not any(found):
                return found

    def check(self) -> None:
        """Raises TimeoutError if no connection can be opened."""
        if self._is_cut():
            time.sleep(_PAUSE_S)
            raise TimeoutError("an injected fault cuts this broker from ZooKeeper")

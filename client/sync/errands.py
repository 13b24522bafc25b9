"""Work of a client that must run in a thread of the user, such as the methods of a listener."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from minibroker.client.errors import Closed, WithinListener
from minibroker.client.sync.background import Background


class _Errand:
    """A call that the loop makes in a thread of the user."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_interrupted = False

    def carry_out(self, background: Background) -> None:
        error: Exception | None = None
        try:
            self._work()
        except Exception as raised:  # noqa: BLE001 - the user's code, and the user's call raises this
            error = raised
        self.settle(background, error)

    def settle(self, background: Background, error: Exception | None = None) -> None:
        with suppress(Closed):
            background.soon(partial(self._settle, error))

    def _settle(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Errands:
    """The errands of one client. The next thread that makes such a call, or one that waits in it already, carries them
    out. If an errand is interrupted (Ctrl-C), the next call carries it out again, because positions may depend on it,
    unless that call closes the client."""

    def __init__(self) -> None:
        self.background: Background
        self._waiting: deque[_Errand] = deque()
        self._is_over = False
        self._threads: set[int] = set()
        """The threads that run the user's code."""

    async def run(self, work: Callable[[], None]) -> None:
        if self._is_over:
            return
        errand = _Errand(work)
        self._waiting.append(errand)
        self.background.poke()
        try:
            await errand.done
        finally:
            with suppress(ValueError):  # it is being carried out, or was
                self._waiting.remove(errand)

    def end(self) -> None:
        """Cancel the errands: no thread will ask any more."""
        self._is_over = True
        for errand in self._waiting:
            errand.done.cancel()

    def serve(self) -> None:
        """Carry out waiting errands, in the user's thread."""
        thread = threading.get_ident()
        with suppress(IndexError):  # another thread has taken it
            while self._waiting:
                errand = self._waiting.popleft()
                self._threads.add(thread)
                try:
                    errand.carry_out(self.background)
                except BaseException:  # interrupted
                    if self._is_over:
                        errand.settle(self.background)
                    else:
                        errand.was_interrupted = True
                        self._waiting.appendleft(errand)
                    raise
                finally:
                    self._threads.discard(thread)

    def give_up_what_was_interrupted(self) -> None:
        """Drop interrupted errands, in the user's thread, which is about to close the client."""
        for errand in list(self._waiting):
            if errand.was_interrupted:
                with suppress(ValueError):  # another thread has taken it
                    self._waiting.remove(errand)
                    errand.settle(self.background)

    def check_not_within(self, call: str) -> None:
        """Raises WithinListener."""
        if threading.get_ident() in self._threads:
            raise WithinListener(call)

"""The thread in which a blocking client works, and the way of calls to it and back.

The problem: Producer, Consumer and Admin live in an event loop, with the tasks that keep them alive (sending, fetching,
heartbeats, metadata). A script has no loop that runs all the time. Its threads call and wait, and Ctrl-C must interrupt
the wait. A process may fork while a client is open, or end without closing it.

The choice: each client has a daemon thread with an event loop of its own. A call goes there by `call_soon_threadsafe`
and becomes a task. The caller waits at a mailbox (`SimpleQueue.get`, which a signal interrupts, and which costs less
than a future with its condition). The loop uses the same mailbox for work that must run in the caller's thread, such as
a rebalance listener. A caller that is interrupted cancels its task and waits for its end, so that no part of the call
continues, and the client is as usable as after a cancelled `await`.

- **Fork**: threads do not exist in the child, but copies of the descriptors do. In the child they are replaced by
  /dev/null at once. So a connection ends when its owner closes it, even if the child lives longer, and neither the
  child nor its garbage collector can affect the connection or the parent's epoll. Every call except `close` raises
  ForkedClient.
- **Exit**: a daemon thread does not delay the end of the interpreter, but stops with unsent records. So an `atexit`
  handler closes all open clients at the same time, in at most EXIT_PATIENCE_S. (Children of `multiprocessing` end
  without `atexit`, but run its finalizers.)

Rejected:

- one thread for all clients of the process: a function of the application that blocks, such as a partitioner, would
  hold up the heartbeats of every consumer, and the clients that use the thread would have to be counted;
- running the loop in the caller's thread while it waits (kafka-python): no heartbeats between two calls;
- a lock around the asynchronous client: each callback of the loop would have to take it;
- `asyncio.run_coroutine_threadsafe`: a caller that is interrupted leaves its coroutine running;
- uvloop: only entry points choose the loop, and its epoll cannot be reached in a child.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import selectors
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any, Generic, TypeVar
from weakref import WeakMethod

from minibroker.client import log
from minibroker.client.errors import Closed, ForkedClient
from minibroker.protocol.world.real import RealClock

T = TypeVar("T")

CANCELLED_CALL_S = 5.0
"""An interrupted caller waits this long for the end of its call. A producer's `close` may send for 2 s more."""

LOG_PATIENCE_S = 0.2
"""The end of a client waits this long until its log records are written."""

EXIT_PATIENCE_S = 5.0
"""The interpreter waits this long at its end for all open clients together."""


class Call(Generic[T]):
    """A coroutine that runs in the loop while a thread waits for it."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[], None] | None = None) -> None:
        """The waiting thread calls `serve` when it is poked."""
        self._make = make
        self._serve = serve
        self._mailbox: SimpleQueue[bool] = SimpleQueue()
        """True pokes the waiting thread; False ends its wait."""
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False
        self.error: BaseException | None = None
        self.is_over = False
        self.has_result = False
        self.result: T

    # -- in the loop --

    def begin(self) -> None:
        if self._is_cancelled:
            self.fail(asyncio.CancelledError())
        else:
            self._task = asyncio.get_running_loop().create_task(self._make())
            self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.fail(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.result = task.result()
            self.has_result = True
            self._end()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self._task = None
        self.is_over = True
        self._mailbox.put(False)

    def poke(self) -> None:
        """Let the waiting thread call `serve`."""
        if self._serve is not None:
            self._mailbox.put(True)

    # -- in the thread that waits --

    def wait(self) -> None:
        """Wait until the call is over."""
        serve = self._serve
        if serve is not None:  # there may be work from before the wait
            serve()
        while self._mailbox.get():
            assert serve is not None
            serve()

    def wait_briefly(self, timeout_s: float) -> None:
        """Wait until the call is over, at most for `timeout_s`, without serving."""
        with suppress(Empty):
            while not self.is_over:
                self._mailbox.get(timeout=timeout_s)


class Background:
    """A thread with an event loop.

    `on_fork` is called in a forked child, where the thread does not exist, and returns the objects that live in the
    loop. `at_exit` is called at the end of the interpreter: it begins to close the client, and returns a function to
    call if that takes too long. Both are methods of the client. They do not keep it alive, so that a dropped client is
    noticed."""

    def __init__(
        self, noun: str, on_fork: Callable[[], object], at_exit: Callable[[], Callable[[], None] | None]
    ) -> None:
        self._noun = noun
        self._left: object = None
        self._parent: int | None = None
        """In a forked child, the process that has the thread."""
        self._selector: selectors.DefaultSelector
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._calls: dict[Call[Any], None] = {}
        self._is_stopping = self._is_over = False
        self.on_fork = WeakMethod(on_fork)
        self.at_exit = WeakMethod(at_exit)
        self._thread = Thread(target=self._run, name=f"minibroker {noun}", daemon=True)

    def start(self) -> None:
        # Not before: between construction and start the process may fork.
        self._selector = selectors.DefaultSelector()
        with log.silent_asyncio():
            self._loop = asyncio.SelectorEventLoop(self._selector)
        _register(self)
        self._thread.start()

    def _run(self) -> None:
        """The thread."""
        log.defer(self._loop)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_stopped())
        finally:
            self._finish()

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        self._is_stopping = True  # calls in progress are cancelled now; no others may begin

    def _begin(self, call: Call[Any]) -> None:
        if self._is_stopping:
            call.fail(_closed())
        else:
            call.begin()

    def _finish(self) -> None:
        """End the calls that came too late, since the loop is closed."""
        self._is_over = True
        _open.pop(self, None)
        for call in list(self._calls):
            if not call.is_over:
                call.fail(_closed())

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return self._thread.ident == get_ident()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call a function in the loop soon. Raises Closed, ForkedClient."""
        if self._parent is not None:
            raise self.forked()
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise _closed() from None

    def poke(self) -> None:
        """Let waiting threads call their `serve`. Called in the loop."""
        for call in list(self._calls):
            call.poke()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[], None] | None = None) -> T:
        """Run a coroutine in the loop, and wait for its result. Raises its error, and Closed if the loop ends first."""
        call = Call(make, serve)
        self.run(call)
        return call.result

    def run(self, call: Call[Any]) -> None:
        """Wait for the end of a call. If the wait is interrupted (KeyboardInterrupt, or another error of a signal
        handler), the call is cancelled. It may nevertheless have a result."""
        if self.is_current():
            raise RuntimeError(
                "this is the client's own thread, in which a call would wait for ever: make it in a thread of your own"
            )
        self._calls[call] = None
        try:
            if self._is_over:
                raise _closed()
            self.soon(partial(self._begin, call))
            call.wait()
        except BaseException:
            if not call.is_over:
                with suppress(Closed):
                    self.soon(call.cancel)
                    call.wait_briefly(CANCELLED_CALL_S)
            raise
        finally:
            self._calls.pop(call, None)
        error, call.error = call.error, None
        if error is not None:
            try:
                raise _closed() if isinstance(error, asyncio.CancelledError) else error
            finally:
                error = None  # its traceback refers to this frame

    def begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in the loop, without waiting. Raises Closed."""
        self.soon(partial(self._begin, Call(make)))

    def stop_soon(self) -> None:
        """End the loop and the thread. The client must be closed."""
        self._stop.set()

    def stop(self, timeout_s: float) -> None:
        """End the loop and the thread, and wait for their end. The client must be closed."""
        with suppress(Closed):
            self.soon(self.stop_soon)
        self.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if not self.is_current():
            self._thread.join(timeout_s)

    def leave_to_parent(self, client: object) -> None:
        """Release the copies of the parent's descriptors in a forked child, without affecting the parent's connections.

        The frames of the thread are never freed in the child, and keep `client`. So its deletion cannot complain about
        pending tasks and open sockets.
        """
        self._left = client
        _open.pop(self, None)
        self._parent = os.getppid()
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in [key.fd for key in self._selector.get_map().values()]:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.dup2(nowhere, self._selector.fileno(), inheritable=False)
        os.close(nowhere)

    def forked(self) -> ForkedClient:
        return ForkedClient(
            f"the {self._noun} lives in process {self._parent}, and this is process {os.getpid()}, forked from it, "
            f"which has neither its thread nor its connections: make a new {self._noun} here, after the fork"
        )


def _closed() -> Closed:
    return Closed("the client was closed while the call was under way")


# --- of the process ---

_open: dict[Background, None] = {}
"""Instances whose threads run. Several threads change it, by single operations only."""

_is_hooked = False
_finalizing_process = 0
"""The id of the `multiprocessing` child in which `_close_all` is a finalizer."""


def _register(background: Background) -> None:
    global _is_hooked, _finalizing_process
    if not _is_hooked:
        _is_hooked = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_forked)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None and _finalizing_process != os.getpid():
        _finalizing_process = os.getpid()
        from multiprocessing.util import Finalize

        Finalize(None, _close_all, exitpriority=0)
    _open[background] = None


def _close_all() -> None:
    """Close all clients at the end of the interpreter."""
    reports: dict[Background, Callable[[], None]] = {}
    for background in list(_open):
        at_exit = background.at_exit()
        if at_exit is not None and (report := at_exit()) is not None:
            reports[background] = report
    clock = RealClock()
    deadline = clock.monotonic() + EXIT_PATIENCE_S
    with suppress(KeyboardInterrupt):  # the user does not want to wait
        for background in list(_open):
            background.join(max(0.0, deadline - clock.monotonic()))
    for background in list(_open):
        if background in reports:
            reports[background]()
    log.wait(max(LOG_PATIENCE_S, deadline - clock.monotonic()))


def _forked() -> None:
    """Give up all clients in a forked child."""
    for background in list(_open):
        on_fork = background.on_fork()
        background.leave_to_parent(None if on_fork is None else on_fork())

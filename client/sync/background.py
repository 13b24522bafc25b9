"""The thread in which a blocking client works, and how calls get there and back.

The problem: Producer, Consumer and Admin live in an event loop, and so do the tasks that keep them alive (sending,
fetching, heartbeats, metadata). A script has no loop that runs all the time. Its threads want to call, and to wait;
whoever waits wants Ctrl-C to work; a process may fork while a client is open, or end without closing it.

The choice: each client has a daemon thread with an event loop of its own. A call goes there by `call_soon_threadsafe`
and becomes a task; the caller waits at a mailbox (`SimpleQueue.get`, which a signal interrupts, and which costs less
than a future with its condition). What the loop wants done in the caller's thread, such as a rebalance listener, comes
by the same mailbox. A waiting caller that is interrupted cancels its task and waits for its end, so that nothing of the
call goes on, and the client is as usable as after a cancelled `await`.

- **Fork**: threads do not exist in the child, but copies of the descriptors do. The child's are replaced by /dev/null
  at once: a connection then ends when its owner closes it, though the child lives on, and nothing that the child does
  (or its garbage collector) reaches the connection or the parent's epoll. Every call but `close` raises ForkedClient.
- **Exit**: a daemon thread does not hold up the interpreter, but is frozen by it with whatever waits to be sent. So
  clients that are open when the interpreter ends are closed by an `atexit` handler, all at the same time, each in
  EXIT_PATIENCE_S at most. (Children of `multiprocessing` end without `atexit`, but run its finalizers.)

Rejected: one thread for all clients of the process, as a user's function that blocks (a partitioner, say) would then
hold up the heartbeats of every consumer, and somebody would have to count who still uses the thread. Running the loop
in the caller's thread while it waits (kafka-python): no heartbeats between two calls. A lock around the asynchronous
client, with callers working in it directly: it would have to be taken in each callback of the loop.
`asyncio.run_coroutine_threadsafe`: a caller that is interrupted leaves its coroutine running. uvloop: only entry points
choose the loop, and its epoll cannot be reached in a child.
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
"""How long an interrupted caller waits for its call to end. A producer's `close` sends for 2 s more."""

LOG_PATIENCE_S = 0.2
"""How long the end of a client waits until what it has logged is told."""

EXIT_PATIENCE_S = 5.0
"""How long the interpreter waits at its end for all open clients together."""


class Call(Generic[T]):
    """A coroutine that runs in the loop while a thread waits for it."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[], None] | None = None) -> None:
        """`serve` is what the waiting thread does when it is poked."""
        self._make = make
        self._serve = serve
        self._mailbox: SimpleQueue[bool] = SimpleQueue()
        """True: it is poked; False: the call is over."""
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
        """Have the waiting thread serve."""
        if self._serve is not None:
            self._mailbox.put(True)

    # -- in the thread that waits --

    def wait(self) -> None:
        """Until the call is over."""
        serve = self._serve
        if serve is not None:  # what came before anybody waited
            serve()
        while self._mailbox.get():
            assert serve is not None
            serve()

    def wait_briefly(self, timeout_s: float) -> None:
        """Until it is over, or for so long, without serving."""
        with suppress(Empty):
            while not self.is_over:
                self._mailbox.get(timeout=timeout_s)


class Background:
    """A thread with an event loop. `on_fork` is called in a forked child, where the thread does not exist,
    and returns all that lives in the loop; `at_exit` is called when the interpreter ends: it begins to close the
    client, and returns what is to be called if it is not closed in time. Both are methods of the client, and do not
    keep it alive, so that one that is dropped is noticed."""

    def __init__(
        self, noun: str, on_fork: Callable[[], object], at_exit: Callable[[], Callable[[], None] | None]
    ) -> None:
        self._noun = noun
        self._left: object = None
        self._parent: int | None = None
        """In a forked child, the process in which the thread is."""
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
        self._is_stopping = True  # what has begun is cancelled now; nothing else may begin

    def _begin(self, call: Call[Any]) -> None:
        if self._is_stopping:
            call.fail(_closed())
        else:
            call.begin()

    def _finish(self) -> None:
        """The loop is closed: calls that came too late get their answer."""
        self._is_over = True
        _open.pop(self, None)
        for call in list(self._calls):
            if not call.is_over:
                call.fail(_closed())

    def is_current(self) -> bool:
        """Whether the caller is in this very thread."""
        return self._thread.ident == get_ident()

    def soon(self, callback: Callable[[], None]) -> None:
        """Have it called in the loop. Raises Closed, ForkedClient."""
        if self._parent is not None:
            raise self.forked()
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise _closed() from None

    def poke(self) -> None:
        """In the loop: have those threads serve that wait and can."""
        for call in list(self._calls):
            call.poke()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[], None] | None = None) -> T:
        """Run a coroutine in the loop, and wait for it. Raises what it raises, and Closed if the loop ends before
        it."""
        call = Call(make, serve)
        self.run(call)
        return call.result

    def run(self, call: Call[Any]) -> None:
        """Wait for the end of a call. If the waiting is interrupted (KeyboardInterrupt, or what else a signal handler
        raises), so is the call: see whether it has a result nevertheless."""
        if self.is_current():
            raise RuntimeError(
                "a call that waits would wait for ever here: this is the client's own thread. Make it in a thread of "
                "your own"
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
                error = None  # its traceback leads here

    def begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in the loop, without waiting. Raises Closed."""
        self.soon(partial(self._begin, Call(make)))

    def stop_soon(self) -> None:
        """End the loop and the thread. The client must be closed."""
        self._stop.set()

    def stop(self, timeout_s: float) -> None:
        """End the loop and the thread, and wait for that. The client must be closed."""
        with suppress(Closed):
            self.soon(self.stop_soon)
        self.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if not self.is_current():
            self._thread.join(timeout_s)

    def leave_to_parent(self, client: object) -> None:
        """In a forked child: let go of the copies of the parent's descriptors, without touching what they stand for.

        The frames of a thread that does not exist are never freed, nor is what they refer to: so `client` is never
        taken apart here, with complaints of tasks that were pending and sockets that were not closed.
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
"""Those whose threads run. Changed by single operations only, as several threads do."""

_is_hooked = False
_finalizing_process = 0
"""The child of `multiprocessing`, by its id, in which `_close_all` is a finalizer."""


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
    """The interpreter ends."""
    reports: dict[Background, Callable[[], None]] = {}
    for background in list(_open):
        at_exit = background.at_exit()
        if at_exit is not None and (report := at_exit()) is not None:
            reports[background] = report
    clock = RealClock()
    deadline = clock.monotonic() + EXIT_PATIENCE_S
    with suppress(KeyboardInterrupt):  # somebody is tired of waiting
        for background in list(_open):
            background.join(max(0.0, deadline - clock.monotonic()))
    for background in list(_open):
        if background in reports:
            reports[background]()
    log.wait(max(LOG_PATIENCE_S, deadline - clock.monotonic()))


def _forked() -> None:
    """In the child."""
    for background in list(_open):
        on_fork = background.on_fork()
        background.leave_to_parent(None if on_fork is None else on_fork())

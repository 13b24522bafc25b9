"""An event loop on virtual time. It never waits, and the same program always makes the same run.

The problem: the code under test waits for seconds (sessions, lags, back-offs), and its bugs depend on the order of
events. A test must not wait in real time, and must repeat a run exactly.

The choice: asyncio's BaseEventLoop with its own `_run_once`. A real loop asks the operating system to wait until the
next timer; this one sets its clock to that timer. There is no I/O and there are no threads: `run_in_executor` calls the
function inline, as a callback of its own. Timers of the same moment fire in the order in which they were created. Code
takes no virtual time, so a program that only yields would run for ever at one moment. The loop therefore raises `Stuck`
after too many turns without progress of the clock, and if every task waits and no timer is left.

Beside the clock, two things make runs equal. Tasks hash by number, so sets of tasks (asyncio has some) iterate in an
order that does not depend on addresses. The cyclic garbage collector, which may run code, runs after a fixed number of
callbacks, not of allocations. `trace` is a hash of all callbacks and their times: equal traces mean equal runs.

Each callback belongs to a process, or to none (the test itself, the simulated hardware); see `ownership`. When a
callback of a killed process comes due, the loop drops it but keeps it referenced until the run ends. Callbacks of a
paused process are held until it resumes.

A loop may also shuffle. Real loops promise no order between tasks that wait for different things, so code that relies
on an order is wrong; shuffling exposes it. The promises of asyncio are kept: callbacks (so also those of a transport or
a pipe) run in the order in which they were scheduled, no task overtakes a callback or is overtaken by one, tasks start
in the order of their creation, and a task that yields (`sleep(0)`) lets all ready tasks run first. Only tasks that
resume next to each other in one turn are shuffled.

A process's clock may jump ahead (`jump`), as after a suspend of its machine. `time()` then returns the advanced time to
that process, and its timers come due earlier by the same amount; overdue timers fire in their original order. The
simulated hardware always uses `now_s`. Work that the hardware does for the process (attempts to connect, executor
threads, reconnects to ZooKeeper) uses the process's timers and so jumps with them.

Rejected: the unchanged SelectorEventLoop with a selector that returns at once (its heap reorders timers of the same
moment, it has a socket pair for wake-ups, and it cannot drop handles); patching `time.monotonic` (kazoo, pytest and
logging need it).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import heapq
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextvars import Context
from functools import partial
from hashlib import blake2b
from itertools import groupby
from random import Random
from types import FrameType
from typing import Any, NoReturn, TypeVar

from minibroker.deploy.simulator.ownership import Owner, ProcessKilled, current_owner

T = TypeVar("T")

VIRTUAL_LIMIT_S = 3600.0
_LEAST_ADVANCE_S = 1e-9
_MAX_TURNS_WITHOUT_TIME = 100_000
_CALLBACKS_PER_COLLECTION = 100_000
_TASKS_SHOWN = 30
_HASHED_AT_ONCE = 1_000
_ALARM_AGAIN_S = 10.0
"""Real seconds after which a second alarm interrupts a callback that does not end."""


class Stuck(Exception):
    """The program cannot end: every task waits, time stands still, or the run exceeded its time limit."""


class VirtualTask(asyncio.Task[Any]):
    """A task with an owner. Its position in a set does not depend on its address."""

    def __init__(
        self,
        coroutine: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        loop: VirtualLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        # Set before `super().__init__`, which puts the task into a set.
        self.number = loop.next_number()
        self.process = current_owner.get() if context is None else context.get(current_owner)
        self.label = f"{self.process.name if self.process else ''} task {self.number}"
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `time()` begins at 0. Tests call `run`."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int = 0, limit_s: float = VIRTUAL_LIMIT_S, shuffle: bool = False) -> None:
        super().__init__()
        self.seed = seed
        """All randomness of the run derives from it."""
        self.random = Random(f"{seed} loop")
        """Decides as the operating system's scheduler would."""
        self.before_close: list[Callable[[], object]] = []
        """`close` calls these first, in order."""
        self.unhandled: list[dict[str, Any]] = []
        """Contexts given to `call_exception_handler` for the test and for living processes. They make `run` fail."""
        self.callbacks = 0
        """Number of callbacks that have run."""
        self._limit_s = limit_s
        self._shuffles = shuffle
        self._now = 0.0
        self._clocks_differ = False
        """The clock of some process has jumped."""
        self._numbers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._turns_without_time = 0
        self._trace = blake2b(digest_size=16)
        self._untraced: list[str] = []
        """Lines that are not in the trace yet: hashing many at once is faster."""
        self._tasks: list[weakref.ref[VirtualTask]] = []
        """All tasks that are not done, and some that are."""
        self._remains: list[object] = []
        self._alarm: Callable[[], object] | None = None
        """The deferred call of SIGALRM's handler."""

    # -- time --

    @property
    def now_s(self) -> float:
        """The true time, common to all processes."""
        return self._now

    def time(self) -> float:
        """Return the time on the clock of the process that calls."""
        return self._now + self._ahead_s() if self._clocks_differ else self._now

    def _ahead_s(self) -> float:
        process = current_owner.get()
        return 0.0 if process is None else process.ahead_s

    def jump(self, process: Owner, seconds: float) -> None:
        """Advance the process's clock, and with it its timers."""
        self.record(f"the clock of {process.name} jumps by {seconds}")
        self._clocks_differ = True
        process.ahead_s += seconds
        moved = []
        for when, _, timer in sorted(self._timers, key=lambda entry: entry[:2]):
            if _owner(timer) is process:
                when = max(when - seconds, self._now)
                timer._when = when  # type: ignore[attr-defined]
                moved.append((when, self.next_number(), timer))
        others = [entry for entry in self._timers if _owner(entry[2]) is not process]
        self._timers = others + moved
        heapq.heapify(self._timers)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """`when` is a time on the clock of the process that calls."""
        return self.call_at_true(when - self._ahead_s() if self._clocks_differ else when, callback, args, context)

    def call_at_true(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        """Like `call_at`, in true time."""
        self._check_closed()  # type: ignore[attr-defined]
        # Clocks always advance: a deadline that is a rounding error away must not come due at this same moment.
        when = max(when, self._now + _LEAST_ADVANCE_S)
        timer: Any = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True
        heapq.heappush(self._timers, (when, self.next_number(), timer))
        handle: asyncio.TimerHandle = timer
        return handle

    def _timer_handle_cancelled(self, handle: Any) -> None:
        if not handle._scheduled:
            return
        self._cancelled_timers += 1
        if self._cancelled_timers > 1_000 and self._cancelled_timers > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _pop_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False  # type: ignore[attr-defined]
        if timer.cancelled():
            self._cancelled_timers -= 1
        return timer

    # -- running callbacks --

    def _run_once(self) -> None:
        ready = self._ready
        if ready or self._stopping:
            self._turns_without_time += 1
            if self._turns_without_time > _MAX_TURNS_WITHOUT_TIME:
                self._stuck(f"time has stood still at {self._now:.6f} s for {_MAX_TURNS_WITHOUT_TIME} turns")
        else:
            self._advance()
        while self._timers and self._timers[0][0] <= self._now:
            ready.append(self._pop_timer())
        if self._shuffles and len(ready) > 1:
            self._shuffle()
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(current_owner)
            if owner is not None and not owner.running:
                if owner.alive:
                    owner.held.append(handle)
                else:
                    self._remains.append(handle)
                continue
            self.callbacks += 1
            self._untraced.append(_describe(handle, owner))
            handle._run()
            if self._alarm is not None:  # `_ring` checks it again; a call for each callback would cost more
                self._ring()
            if self.callbacks % _CALLBACKS_PER_COLLECTION == 0:
                gc.collect()
                self._undone_tasks()  # drops the references to tasks that are done

    @contextlib.contextmanager
    def alarms_between_callbacks(self) -> Iterator[None]:
        """Defer SIGALRM (pytest's timeout) to the end of the current callback, so that its exception ends the run.
        Raised inside a task it would look like a bug of the code under test, and a weak reference's callback would lose
        it."""
        handler = signal.getsignal(signal.SIGALRM)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def put_off(number: int, frame: FrameType | None) -> None:
            if self._alarm is not None:
                handler(number, frame)
            self._alarm = partial(handler, number, frame)
            signal.setitimer(signal.ITIMER_REAL, _ALARM_AGAIN_S)

        signal.signal(signal.SIGALRM, put_off)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, handler)
            self._ring()

    def _ring(self) -> None:
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            alarm, self._alarm = self._alarm, None
            alarm()

    def _shuffle(self) -> None:
        """Shuffle tasks that resume next to each other."""
        handles = list(self._ready)
        self._ready.clear()
        for wakes_up, run in groupby(handles, _is_wake_up):
            adjacent = list(run)
            if wakes_up:
                self.random.shuffle(adjacent)
            self._ready.extend(adjacent)

    def _advance(self) -> None:
        """Set the clock to the next timer. Raises Stuck if there is none, or if it exceeds the limit."""
        while self._timers:
            when, _, timer = self._timers[0]
            if timer.cancelled():
                self._pop_timer()
                continue
            owner = _owner(timer)
            if owner is not None and not owner.alive:
                self._remains.append(self._pop_timer())
                continue
            if when > self._limit_s:
                self._stuck(f"it has gone on for the {self._limit_s:g} virtual seconds that it was given")
            self._now = max(self._now, when)
            self.record(repr(self._now))
            self._turns_without_time = 0
            return
        self._stuck(f"at {self._now:.6f} s everything waits, and nothing is scheduled that could end it")

    def _stuck(self, why: str) -> NoReturn:
        tasks = sorted(self._living_tasks(), key=lambda task: task.number)
        lines = [f"  {_where(task)}" for task in tasks[:_TASKS_SHOWN]]
        if len(tasks) > _TASKS_SHOWN:
            lines.append(f"  and {len(tasks) - _TASKS_SHOWN} more")
        raise Stuck("\n".join([f"{why}; {len(tasks)} tasks are not done:", *lines]))

    def _living_tasks(self) -> list[VirtualTask]:
        return [task for task in self._undone_tasks() if task.process is None or task.process.alive]

    def _undone_tasks(self) -> list[VirtualTask]:
        """Return the tasks that are not done. `asyncio.all_tasks` also visits all done tasks that are not collected."""
        tasks = [task for known in self._tasks if (task := known()) is not None and not task.done()]
        self._tasks = [weakref.ref(task) for task in tasks]
        return tasks

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("a thread called the virtual loop: threads make a run irreproducible")
        return self.call_soon(callback, *args, context=context)

    # -- tasks and functions --

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def create_task(  # type: ignore[override]
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        self._check_closed()  # type: ignore[attr-defined]
        task = VirtualTask(coro, loop=self, name=name, context=context)
        self._tasks.append(weakref.ref(task))
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call the function in the next turn, even if its caller is cancelled meanwhile."""
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_call_inline, future, func, args)
        return future

    async def getaddrinfo(self, host: object, port: object, **options: Any) -> NoReturn:
        raise RuntimeError(f"the name {host!r} would be looked up for real: connect through the World's network")

    # -- the record --

    def record(self, text: str) -> None:
        """Add a line to the trace."""
        self._untraced.append(text)
        if len(self._untraced) > _HASHED_AT_ONCE:
            self._hash()

    def _hash(self) -> None:
        self._trace.update("".join(f"{text}\n" for text in self._untraced).encode())
        self._untraced.clear()

    @property
    def trace(self) -> str:
        """A hash of all callbacks and recorded events so far, with their times."""
        self._hash()
        return self._trace.hexdigest()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.is_closed() or isinstance(context.get("exception"), ProcessKilled):
            return
        task = context.get("task") or context.get("future")
        owner = task.process if isinstance(task, VirtualTask) else current_owner.get()
        if owner is None or owner.alive:
            self.unhandled.append(context)
            super().call_exception_handler(context)

    def failures(self) -> list[Exception]:
        """Return the errors of callbacks and of tasks that were never awaited."""
        failures = []
        for context in self.unhandled:
            error = context.get("exception")
            if not isinstance(error, Exception):
                error = RuntimeError(f"{context['message']} {error!r}" if error else context["message"])
            failures.append(error)
        return failures

    # -- the end --

    def keep_remains_of(self, killed: Owner) -> None:
        """Keep the tasks and held handles of a killed process from being collected before the run ends."""
        self._remains += [task for task in self._undone_tasks() if task.process is killed]
        self._remains += killed.held
        killed.held = []

    def make_ready(self, handles: Iterable[asyncio.Handle]) -> None:
        """Run held handles, after those that are ready now."""
        self._ready.extend(handles)

    def cancel_strays(self) -> None:
        """Cancel the remaining tasks of the test itself, and wait for them. Tasks of processes stay as they are."""
        strays = sorted((t for t in self._living_tasks() if t.process is None), key=lambda task: task.number)
        for task in strays:
            task.cancel()
        if not strays:
            return
        self.run_until_complete(asyncio.wait(strays))
        for task in strays:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.call_exception_handler({"message": "a task failed at the end", "exception": error, "task": task})

    def close(self) -> None:
        """Call `before_close`, which kills the processes, and bury their tasks."""
        if self.is_closed():
            return
        for call in self.before_close:
            call()
        self._remains += self._ready
        self._remains += self._timers
        tasks = self._undone_tasks()
        super().close()
        # From here on `finally` blocks run, with a severed World and on a closed loop. Their errors mean nothing.
        report, sys.unraisablehook = sys.unraisablehook, lambda _: None
        asyncio.set_event_loop(self)  # without one, `gather` would create a loop that is never closed
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                warnings.simplefilter("ignore", ResourceWarning)
                for task in sorted(tasks, key=lambda task: task.number):
                    _bury(task)
                tasks.clear()
                self._remains.clear()
                self._timers.clear()
                gc.collect()
        finally:
            asyncio.set_event_loop(None)
            sys.unraisablehook = report


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, limit_s: float = VIRTUAL_LIMIT_S, shuffle: bool = False) -> T:
    """Run a coroutine on its own virtual loop until it ends; then kill all remaining processes.

    Raises the exception of `main`, Stuck, or an ExceptionGroup of the errors in callbacks and in tasks that were never
    awaited. Errors of killed processes do not count.
    """
    loop = VirtualLoop(seed, limit_s, shuffle)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with loop.alarms_between_callbacks(), contextlib.closing(loop):
            return _run(loop, main)
    finally:
        if collecting:
            gc.enable()


def on_virtual_loop(
    test: Callable[[], Coroutine[Any, Any, None]], *, seed: int = 0, limit_s: float = VIRTUAL_LIMIT_S
) -> None:
    """`run` for `@run_by` (tests/running.py)."""
    run(test(), seed=seed, limit_s=limit_s)


def _run(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    gc.collect()  # the previous run's garbage, which its caller held until it returned
    _freeze_imports()
    try:
        result = loop.run_until_complete(main)
        loop.cancel_strays()
    except BaseException as error:
        with contextlib.suppress(Stuck):
            loop.cancel_strays()
        for failure in loop.failures():
            error.add_note(f"before that, unhandled: {failure!r}")
        raise
    gc.collect()  # reports failed tasks that were never awaited
    if failures := loop.failures():
        raise ExceptionGroup("errors in callbacks, or in tasks that were never awaited", failures)
    return result


@functools.cache
def _freeze_imports() -> None:
    """Exclude imported objects from garbage collection; tests/conftest.py does so for later ones. Cached, because
    `gc.get_freeze_count` counts all frozen objects, which took longer than most runs."""
    gc.freeze()


def _owner(handle: asyncio.Handle) -> Owner | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(current_owner)


def _is_wake_up(handle: asyncio.Handle) -> bool:
    """Whether a task resumes because its future is done. Its first step and steps after a bare yield are no
    wake-ups."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    return getattr(callback, "__name__", None) == "task_wakeup"


def _describe(handle: Any, owner: Owner | None) -> str:
    """Return the same text in every run: no addresses, no number from asyncio's global task counter."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if type(task) is VirtualTask:
        return task.label
    return f"{owner.name if owner else ''} {getattr(callback, '__qualname__', None) or type(callback).__name__}"


def _where(task: VirtualTask) -> str:
    """Return the task's name, its process, and the innermost line at which it is suspended."""
    frame = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "its start"
    return f"{task.get_name()} of {task.process.name if task.process else 'the test'} in {place}"


def _call_inline(future: asyncio.Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - passed to the caller, as by a worker thread
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def _bury(task: VirtualTask) -> None:
    """End a suspended coroutine. Its process is dead, so its `finally` blocks have no effect on the World."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    context = task.process.new_context() if task.process is not None else Context()
    for _ in range(10):  # if a `finally` block awaits, `close` raises RuntimeError and the coroutine is suspended again
        try:
            context.run(coroutine.close)
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - ProcessKilled, or an error that code raised because of it
            return
        return

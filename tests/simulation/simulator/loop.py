"""An event loop whose time is virtual: it never waits, and the same program gives the same run.

The problem: the code under test waits for seconds (sessions, lags, back-offs), and what goes wrong depends on the order
of events. A test must not wait for real, and must be able to repeat a run exactly.

The choice: asyncio's own BaseEventLoop with another heart, `_run_once`. Where the real one asks the operating system
to wait for the next timer, this one sets its clock to it. There is no I/O, and there are no threads:
`run_in_executor` calls the function inline, in a turn of its own. Timers of the same moment fire in the order in which
they were made. Code takes no time, so a program that only ever yields would stand still for ever: too many turns
without a step of the clock are an error, and so is a program that waits for nothing that could happen.

What makes runs equal, besides the clock: tasks hash by their number, so that sets of them (asyncio has some) iterate
in an order that the program determines, not the layout of memory; the cyclic garbage collector, which may run code,
runs after a fixed number of callbacks, not of allocations. `trace` sums up what ran when: equal traces, equal runs.

Each callback belongs to a process, or to nobody (the test itself, the simulated hardware). Those of a killed process
are dropped when their turn comes, and kept until the end of the run; those of a paused one are held until it is
resumed. See `tests.simulation.simulator.process`.

A loop may also shuffle: real ones promise no order in which tasks that wait for different things go on, so code that
relies on one is wrong, and only meets another where it is made to. What asyncio does promise is kept: callbacks run in
the order in which they were asked for, so those of a transport or a pipe do, and no task gets past a callback, either
way; tasks begin in the order in which they were made; a task that yields (`sleep(0)`) lets all go first that are ready.
What is left is shuffled: tasks that have got what they waited for, where several of them are next in one turn.

A process's clock may jump ahead of the others' (`jump`), as after a suspend of its machine: `time()` says so to callers
in its name, and its timers come due as much earlier, those that are late by now in the order of their moments. The
simulated hardware goes by `now_s`, whoever calls it; but what it does in the name of the process (the tries of a
connect, the work of its threads, a new attempt to reach ZooKeeper) waits on the process's timers and so jumps with it.

Rejected: a selector that returns at once, under the unchanged SelectorEventLoop (its heap reorders timers of the same
moment, it has a socket pair for wake-ups, and there is no place to drop handles); patching `time.monotonic` (kazoo,
pytest and logging need it).
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

from tests.simulation.simulator.ownership import Owner, ProcessKilled, current_owner

T = TypeVar("T")

VIRTUAL_LIMIT_S = 3600.0
_LEAST_ADVANCE_S = 1e-9
_MAX_TURNS_WITHOUT_TIME = 100_000
_CALLBACKS_PER_COLLECTION = 100_000
_TASKS_SHOWN = 30
_HASHED_AT_ONCE = 1_000
_ALARM_AGAIN_S = 10.0
"""For a callback that does not end."""


class Stuck(Exception):
    """The program can never end: everything waits, or time stands still, or it went on for too long."""


class VirtualTask(asyncio.Task[Any]):
    """A task that knows its process, and whose place in a set does not depend on its address."""

    def __init__(
        self,
        coroutine: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        loop: VirtualLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        # Before the base's own: it puts the task into a set.
        self.number = loop.next_number()
        self.process = current_owner.get() if context is None else context.get(current_owner)
        self.label = f"{self.process.name if self.process else ''} task {self.number}"
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's essay. `time()` begins at 0. Use `run`."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int = 0, limit_s: float = VIRTUAL_LIMIT_S, shuffle: bool = False) -> None:
        super().__init__()
        self.seed = seed
        """What everything random in this run is derived from."""
        self.random = Random(f"{seed} loop")
        """For what the operating system's scheduler decides."""
        self.before_close: list[Callable[[], object]] = []
        """`close` calls these first, in order."""
        self.unhandled: list[dict[str, Any]] = []
        """What `call_exception_handler` was told by or about living processes and the test. `run` fails for them."""
        self.callbacks = 0
        """How many callbacks have run."""
        self._limit_s = limit_s
        self._shuffles = shuffle
        self._now = 0.0
        self._clocks_differ = False
        """Some process's clock has jumped."""
        self._numbers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._turns_without_time = 0
        self._trace = blake2b(digest_size=16)
        self._untraced: list[str] = []
        """What has run and is not in the trace yet: much at once is hashed faster."""
        self._tasks: list[weakref.ref[VirtualTask]] = []
        """Those that may not be done."""
        self._remains: list[object] = []
        self._alarm: Callable[[], object] | None = None
        """What SIGALRM's handler would have done."""

    # -- time --

    @property
    def now_s(self) -> float:
        """The true time, in which all processes live."""
        return self._now

    def time(self) -> float:
        """As the clock of the process that asks has it."""
        return self._now + self._ahead_s() if self._clocks_differ else self._now

    def _ahead_s(self) -> float:
        process = current_owner.get()
        return 0.0 if process is None else process.ahead_s

    def jump(self, process: Owner, seconds: float) -> None:
        """The process's clock goes ahead by so much at once, and its timers with it."""
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
        """`when` is a moment of the clock of the process that asks."""
        return self.call_at_true(when - self._ahead_s() if self._clocks_differ else when, callback, args, context)

    def call_at_true(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        """`when` is a moment of the true time."""
        self._check_closed()  # type: ignore[attr-defined]
        # Clocks go on: a wait for a deadline that is one bit of rounding away must not find this very moment again.
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

    # -- the heart --

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
            if self._alarm is not None:  # asked here, too: a call for each callback costs more
                self._ring()
            if self.callbacks % _CALLBACKS_PER_COLLECTION == 0:
                gc.collect()
                self._undone_tasks()  # the others are forgotten

    @contextlib.contextmanager
    def alarms_between_callbacks(self) -> Iterator[None]:
        """What SIGALRM raises (pytest's timeout) ends the run. A task in which it was raised would take it for an error
        of its own, and a weak reference's callback would lose it: a run that is too slow looked like a bug of what is
        tested."""
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
        """Change the order of tasks that wake up one right after the other."""
        handles = list(self._ready)
        self._ready.clear()
        for wakes_up, run in groupby(handles, _is_wake_up):
            adjacent = list(run)
            if wakes_up:
                self.random.shuffle(adjacent)
            self._ready.extend(adjacent)

    def _advance(self) -> None:
        """Nothing is left to do at this moment: go to the next one at which there is."""
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
        """As asyncio.all_tasks, which would look at all that have ever been and that nobody has collected."""
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
        """Call the function in the next turn of the loop, whether or not its caller is still there."""
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_call_inline, future, func, args)
        return future

    async def getaddrinfo(self, host: object, port: object, **options: Any) -> NoReturn:
        raise RuntimeError(f"the name {host!r} would be looked up for real: connect through the World's network")

    # -- the record --

    def record(self, text: str) -> None:
        """Add something to the trace."""
        self._untraced.append(text)
        if len(self._untraced) > _HASHED_AT_ONCE:
            self._hash()

    def _hash(self) -> None:
        self._trace.update("".join(f"{text}\n" for text in self._untraced).encode())
        self._untraced.clear()

    @property
    def trace(self) -> str:
        """A hash over everything that has run so far, and when."""
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
        """What went wrong in callbacks, and in tasks that nobody awaited."""
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
        """Run handles that were held, after what is ready now."""
        self._ready.extend(handles)

    def cancel_strays(self) -> None:
        """Cancel the test's own tasks that are left, and let them end. Those of processes are not touched."""
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
        # From here on `finally` blocks run: of processes whose World is severed, on a loop that takes no callbacks.
        # Whatever they raise on that account means nothing.
        report, sys.unraisablehook = sys.unraisablehook, lambda _: None
        asyncio.set_event_loop(self)  # `gather` makes one where there is none, which would stay, with what waits in it
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
    """Run a coroutine on a virtual loop of its own, to its end; then kill all processes that it has left.

    Raises what `main` raises; Stuck; and an ExceptionGroup of what failed in callbacks and unawaited tasks, except for
    what belonged to processes that were killed.
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
    gc.collect()  # what the run before has left: its caller had it in hand until it returned
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
    gc.collect()  # reports tasks that failed and that nobody has looked at
    if failures := loop.failures():
        raise ExceptionGroup("failed in callbacks, or in tasks that nobody awaited", failures)
    return result


@functools.cache
def _freeze_imports() -> None:
    """No collection need look at what was imported; for what comes later see tests/conftest.py. Once: asking whether
    anything is frozen counts every object that is, which took longer than most runs."""
    gc.freeze()


def _owner(handle: asyncio.Handle) -> Owner | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(current_owner)


def _is_wake_up(handle: asyncio.Handle) -> bool:
    """A task goes on because the future that it waits for is done. Its first step, and those after a bare yield, are
    made of something else."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    return getattr(callback, "__name__", None) == "task_wakeup"


def _describe(handle: Any, owner: Owner | None) -> str:
    """The same text in every run, so without addresses and asyncio's global task counter."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if type(task) is VirtualTask:
        return task.label
    return f"{owner.name if owner else ''} {getattr(callback, '__qualname__', None) or type(callback).__name__}"


def _where(task: VirtualTask) -> str:
    """The task's name, its process, and the innermost line at which it is suspended."""
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
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits, as by a worker thread
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def _bury(task: VirtualTask) -> None:
    """End a suspended coroutine. Its process is dead, so whatever its `finally` blocks try to do, they cannot."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    context = task.process.new_context() if task.process is not None else Context()
    for _ in range(10):  # a `finally` block that awaits stops `close` with a RuntimeError, and is suspended again
        try:
            context.run(coroutine.close)
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - ProcessKilled, and what was made of it
            return
        return

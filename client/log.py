"""Logging that never waits for a lock of `logging` in a thread for which a caller waits.

The problem: a logging handler that sends its records through a blocking client holds locks while it waits for that
client: its own lock, and, while `dictConfig` builds or closes it, the module's lock, which `Logger.isEnabledFor` and
`getLogger` need as well. If the client's thread logs at that moment, it waits for the caller, and the caller for it.

The choice: the client's own threads (that of a blocking client, and that of the heartbeats) pass their log records to
another thread, for which callers wait only briefly. An asynchronous client logs directly, since it runs in its user's
thread.

Rejected: `logging.handlers.QueueHandler`, which takes the lock to look up the level before it logs; logging in the
caller's thread after its call, in which a handler that sends would log about its own records without end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, RLock, Thread, local
from typing import Any


class _OfThread(local):
    defers = False
    drops_asyncio = False


_of_thread = _OfThread()


class Logger:
    """The part of `logging.Logger` that clients need. `defers`: use the other thread from all threads, also
    callers'."""

    def __init__(self, name: str, *, defers: bool = False) -> None:
        self._logger = logging.getLogger(name)
        self._defers = defers

    def debug(self, text: str, *arguments: object) -> None:
        self._log(logging.DEBUG, text, arguments)

    def info(self, text: str, *arguments: object) -> None:
        self._log(logging.INFO, text, arguments)

    def warning(self, text: str, *arguments: object) -> None:
        self._log(logging.WARNING, text, arguments)

    def error(self, text: str, *arguments: object, exc_info: BaseException | None = None) -> None:
        self._log(logging.ERROR, text, arguments, exc_info)

    def exception(self, text: str, *arguments: object) -> None:
        """Log an error with the traceback of the current `except`."""
        self._log(logging.ERROR, text, arguments, sys.exc_info()[1])

    def log(self, level: int, text: str, *arguments: object) -> None:
        self._log(level, text, arguments)

    def _log(self, level: int, text: str, arguments: tuple[object, ...], error: BaseException | None = None) -> None:
        logger = self._logger
        if not (self._defers or _of_thread.defers):
            logger.log(level, text, *arguments, exc_info=error, stacklevel=3)
            return
        path, line, function, _ = logger.findCaller(stacklevel=3)
        info = None if error is None else (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, level, path, line, text, arguments, info, function)
        _later.do(partial(_handle, logger, record))

    def resource_warning(self, text: str, source: object = None) -> None:
        """`warnings.warn`, which may itself log (`logging.captureWarnings`)."""
        warn = partial(warnings.warn, text, ResourceWarning, source=source, stacklevel=3)
        if _of_thread.defers:
            _later.do(warn)
        else:
            warn()


_asyncio = Logger("asyncio", defers=True)


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class _Later:
    """A thread that runs the functions that it is given, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._lock = RLock()  # the garbage collector may end a client, which logs that, anywhere
        self._thread: Thread | None = None

    def do(self, work: Callable[[], Any]) -> None:
        self._queue.put(work)
        with self._lock:
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        self._thread = Thread(target=self._run, name="minibroker log", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all of them have run, at most for `timeout_s`."""
        if self._thread is not None:
            done = Event()
            self.do(done.set)
            done.wait(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                with suppress(ResourceWarning):  # a warning that the user made an error
                    self._queue.get()()
        finally:  # a handler raised, and Python prints its error
            with self._lock:
                self._start()


_later = _Later()


def _forked() -> None:
    """Start again in a forked child, which has no such thread."""
    global _later
    _later = _Later()


os.register_at_fork(after_in_child=_forked)


def wait(timeout_s: float) -> None:
    """Wait until the earlier records are logged, at most for `timeout_s`: the caller may hold the lock that they
    need."""
    _later.wait(timeout_s)


def defer(loop: asyncio.AbstractEventLoop) -> None:
    """Mark this thread, in which `loop` runs, as the client's own. asyncio's debug mode is switched off, since it waits
    for locks of `logging`."""
    _of_thread.defers = True
    loop.set_debug(False)
    loop.set_exception_handler(_unhandled)


@contextmanager
def silent_asyncio() -> Iterator[None]:
    """Drop asyncio's log record about a new event loop: a handler that creates its client lazily would create another
    one."""
    _of_thread.drops_asyncio = True
    try:
        yield
    finally:
        _of_thread.drops_asyncio = False


logging.getLogger("asyncio").addFilter(lambda record: not _of_thread.drops_asyncio)


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _asyncio.error("%s", context["message"], exc_info=context.get("exception"))

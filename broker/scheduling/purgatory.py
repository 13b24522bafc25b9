"""Operations that wait for an event or a deadline.

The problem. A produce request with acks=all can be answered when the followers have fetched its records; a fetch, when
there is enough to send; a join, when every member has joined. None of them may occupy a request handler while it waits,
each must be answered exactly once, and each has a deadline.

The choice, after Kafka's DelayedOperation and DelayedOperationPurgatory. An operation can check whether it is complete,
and defines the action that follows. It is watched under keys (a partition, a group); code that changes the state behind
a key calls `check_and_complete(key)`. Its deadline is an entry in a timing wheel. Both ways end in `force_complete`,
which lets only the first caller through to `on_complete`, the only place that answers the client.

What the single-threaded loop saves. In Kafka any thread may complete an operation, and locks made this its most patched
class. An operation was checked under a try-lock, so that two threads could not deadlock. The thread that failed to take
the lock left without checking, and an operation that became complete just then was forgotten until its timeout
(KAFKA-6653: a flag asks the lock's holder to check again). But the lock may be a group's, and its holder may be busy
elsewhere without looking at the flag (KAFKA-8334: completion moved to an action queue that runs once all locks are
released, and the lock is held while watching). An operation was tried, watched, then tried again, because it might have
completed in between.

Here everything runs on one loop without awaiting. Nothing can happen between the try and the watch, so one try is
enough, and "exactly once" is a boolean. Nothing in this module may be called from another thread.

Re-entrancy remains: `on_complete` may change the state that other operations wait for.

- It may watch new operations, even under the same key. A check covers the operations that were watched when it began; a
  new one was tried with the present state when it was watched.
- It may check other keys. These checks run at once, nested.
- It may check the key that is being checked. The rest of the key's operations are still ahead of that check; those
  before are checked again on the loop's next turn. Doing it at once would recurse once per operation.

Exceptions. An exception from an operation's check or expiry concerns that operation only: it goes to the loop's
exception handler, naming the operation, and the other operations are checked as usual. It is not raised to the caller
of `check_and_complete`, which has no part in it: a follower's fetch that moved the high watermark must not fail because
a producer's answer did. An operation whose `try_complete` raised is still watched and still has its deadline, so its
client receives an answer. An operation whose `on_complete` raised is complete, because half an answer may have been
sent. Only `try_complete_else_watch` raises the exception of the first try, because its caller answers the client.

Kafka's reaper thread wakes five times a second. Here nothing runs while nothing happens: the one loop timer is set for
the next bucket, and the reaper runs once enough completed operations are still watched under keys that were not
checked. It visits only those. Rejected: removing an operation from all of its keys when it completes, which would put
the clean-up of a fetch of a thousand partitions between the event and the answer.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterable
from typing import Generic, TypeVar

from minibroker.broker.scheduling.timing_wheel import TimerEntry, TimingWheel

# After this many expiries, this many moves within the wheel, or this time, the timer sleeps for a millisecond and lets
# the loop run: ten thousand parked fetches may expire together, and one of a follower with very many partitions takes
# ten milliseconds.
EXPIRIES_PER_SLICE = 100
SLICE_S = 0.002
MOVES_PER_SLICE = 1000
PAUSE_BETWEEN_SLICES_MS = 1
PAUSE_AFTER_NOTHING_MS = 8
"""The pause after a slice of checks that completed no operation: such checks take at most a fifth of the loop's
time."""

# As in Kafka: fetch.purgatory.purge.interval.requests and its siblings.
DEFAULT_PURGE_INTERVAL = 1000
USUAL_KEYS = 20
"""Completed operations are also purged if they are still watched under so many keys on average: one that waited for
ten thousand partitions takes a megabyte."""

# A loop's time is a float in seconds, in which 1.001 s is 1000.9999999999999 ms. A microsecond is far more than that
# error and far less than a tick. Without it, a loop whose time stands still between timers (the simulator's) would wake
# the timer endlessly just before the same deadline.
ROUNDING_MS = 0.001

ExpiryCallback = Callable[[], object]
Expiry = TimerEntry[ExpiryCallback]


class Timer:
    """Runs callbacks after timeouts: a `TimingWheel` driven by one timer of the running loop (Kafka's SystemTimer).
    Create it on the loop on which it runs.

    Guaranteed: a callback runs at most once, never before its timeout by the loop's clock, never after `cancel` or
    `close`, and never inside `add`. Its exceptions go to the loop's exception handler, and the other callbacks run. The
    loop wakes only when the next used bucket expires; its timer is only set anew for an entry that would otherwise be
    late.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wheel: TimingWheel[ExpiryCallback] = TimingWheel(self._elapsed_ms())
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for_ms = 0  # meaningful while there is a handle
        self._closed = False

    def __len__(self) -> int:
        """The number of callbacks that have not run."""
        return len(self._wheel)

    def add(self, timeout_ms: int, callback: ExpiryCallback) -> Expiry:
        """Run `callback` after `timeout_ms`; with 0 or less, on one of the loop's next turns. O(1). Raises RuntimeError
        if the timer is closed."""
        if self._closed:
            raise RuntimeError("the timer is closed, so the callback would never run")
        exact_ms = self._loop.time() * 1000
        now_ms = math.floor(exact_ms + ROUNDING_MS)
        next_expiry_ms = self._wheel.next_expiry_ms()
        if next_expiry_ms is None or next_expiry_ms > now_ms:
            # No entry is due. This only moves the clock; otherwise a new entry would go to a wheel as coarse as the
            # timer's idle time, and come back from there at once.
            self._wheel.advance(now_ms)
        deadline_ms = math.ceil(exact_ms - ROUNDING_MS) + timeout_ms
        entry = self._wheel.insert(deadline_ms, callback)
        if self._handle is None or deadline_ms < self._armed_for_ms:
            self._arm(not_before_ms=now_ms)
        return entry

    def cancel(self, entry: Expiry) -> bool:
        """Cancel the entry's callback. Return False if it has run or was cancelled before. O(1); the loop's timer stays
        set, because one spurious wake-up is cheaper than setting it anew for every cancellation."""
        return not self._closed and self._wheel.cancel(entry)

    def close(self) -> None:
        """Drop every entry without running it. Idempotent."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._wheel = TimingWheel(self._elapsed_ms())

    def _elapsed_ms(self) -> int:
        return math.floor(self._loop.time() * 1000 + ROUNDING_MS)

    def _arm(self, not_before_ms: int) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        next_expiry_ms = self._wheel.next_expiry_ms()
        if next_expiry_ms is not None:
            self._armed_for_ms = max(next_expiry_ms, not_before_ms)
            self._handle = self._loop.call_at(self._armed_for_ms / 1000, self._wake)

    def _wake(self) -> None:
        # The used handle stays until the slice is over: callbacks that add entries need not arm the timer, because the
        # end of the slice does.
        self._armed_for_ms = now_ms = self._elapsed_ms()
        end_s = self._loop.time() + SLICE_S
        try:
            for _ in range(EXPIRIES_PER_SLICE):
                entry = self._wheel.advance(now_ms, MOVES_PER_SLICE)
                if entry is None:
                    break
                try:
                    entry.value()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported, see the head of this module
                    _report(self._loop, f"{entry.value!r} failed when its timeout had passed", error)
                # A callback may have moved the wheel's clock with `add`, or emptied the wheel with `close`, which ends
                # this loop as usual.
                now_ms = self._elapsed_ms()
                if self._loop.time() >= end_s:
                    break
        finally:
            # Only entries that are already due wait for the pause: the next tick is no sooner.
            self._arm(not_before_ms=now_ms + PAUSE_BETWEEN_SLICES_MS)


class DelayedOperation(ABC):
    """An operation that completes once, by an event or after `timeout_ms` (Kafka's DelayedOperation).

    A subclass checks for its event in `try_complete` and acts in `on_complete` for both outcomes; usually, it answers
    the client.
    """

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._completed = False
        # Set while a purgatory watches this operation: called on completion, before `on_complete`.
        self._completed_hook: Callable[[], None] | None = None

    @property
    def is_completed(self) -> bool:
        """Whether `force_complete` was called. True inside `on_complete` as well."""
        return self._completed

    @abstractmethod
    def try_complete(self) -> bool:
        """Return `self.force_complete()` if the awaited event has happened, otherwise False. Called whenever one of the
        keys is checked, never after completion."""

    def try_complete_after(self, checked: Collection[Hashable]) -> bool:
        """Like `try_complete`, knowing that only these keys can have changed since it returned False. Override it for
        operations with many keys, which are expensive to check in full."""
        return self.try_complete()

    @abstractmethod
    def on_complete(self) -> None:
        """Carry out the delayed action. Called exactly once, by `force_complete`; only this answers the client."""

    def on_abandoned(self) -> None:  # noqa: B027 - optional
        """Release what the action would have used. Called instead of `on_complete`, by `abandon`."""

    def on_expiration(self) -> None:  # noqa: B027 - optional
        """Record the timeout. Called after `on_complete`, and only if the deadline completed this operation. The client
        already has its answer, so this serves metrics and logs."""

    def force_complete(self) -> bool:
        """Complete now, without checking. Return True for the call that completed it, False for all later ones. Raises
        the exceptions of `on_complete`; the operation is complete even then."""
        if self._completed:
            return False
        self._completed = True
        if self._completed_hook is not None:
            self._completed_hook()
        self.on_complete()
        return True

    def abandon(self) -> bool:
        """Complete without carrying out the action, because nobody waits for it any more. Return as
        `force_complete`."""
        if self._completed:
            return False
        self._completed = True
        if self._completed_hook is not None:
            self._completed_hook()
        self.on_abandoned()
        return True

    def expire(self) -> None:
        """Complete at the deadline, and record the timeout if that completed it."""
        if self.force_complete():
            self.on_expiration()


Operation = TypeVar("Operation", bound=DelayedOperation)


class _Watch(Generic[Operation]):
    """A watched operation, with the keys under which it is still watched."""

    __slots__ = ("expiry", "keys", "operation")

    def __init__(self, operation: Operation, keys: dict[Hashable, None], expiry: Expiry) -> None:
        self.operation = operation
        self.keys = keys
        self.expiry = expiry


class Purgatory(Generic[Operation]):
    """The waiting operations of one kind, by the keys that they wait for (Kafka's DelayedOperationPurgatory). Several
    purgatories may share a timer.

    Guaranteed: an operation given to `try_complete_else_watch` is tried at once and whenever one of its keys is
    checked, in the order in which operations were watched, until it completes. After its timeout it is completed in any
    case, unless the purgatory is closed before.
    """

    def __init__(self, name: str, timer: Timer, purge_interval: int = DEFAULT_PURGE_INTERVAL) -> None:
        """`purge_interval` is the number of completed operations that may still be watched before they are purged."""
        self.name = name
        self._timer = timer
        self._purge_interval = purge_interval
        self._loop = asyncio.get_running_loop()
        # Dicts for their order: a check must try operations in the same order in every run.
        self._watches_by_key: dict[Hashable, dict[_Watch[Operation], None]] = {}
        self._completed: dict[_Watch[Operation], None] = {}  # those still watched
        self._keys_of_completed = 0
        self._watched = 0
        self._delayed = 0
        self._keys_being_checked: set[Hashable] = set()
        self._keys_to_check: dict[Hashable, None] = {}
        self._check_handle: asyncio.Handle | None = None
        self._reaper_handle: asyncio.Handle | None = None
        self._closed = False

    def try_complete_else_watch(self, operation: Operation, keys: Iterable[Hashable]) -> bool:
        """Complete the operation now if possible, and return True. Otherwise watch it under each of the keys until it
        completes or its timeout passes, and return False.

        Raises the exceptions of its `try_complete`, and then does not watch it; ValueError without any key or for an
        operation that is already watched; RuntimeError if the purgatory is closed.
        """
        unique_keys = self._unique(operation, keys)
        if not operation.is_completed:
            operation.try_complete()
        if operation.is_completed:
            return True
        self._watch(operation, unique_keys)
        return False

    def watch(self, operation: Operation, keys: Iterable[Hashable]) -> None:
        """Like `try_complete_else_watch`, for an operation that its owner has just found incomplete. Raises the same
        errors."""
        self._watch(operation, self._unique(operation, keys))

    def _unique(self, operation: Operation, keys: Iterable[Hashable]) -> dict[Hashable, None]:
        if self._closed:
            raise RuntimeError(f"purgatory {self.name} is closed, so {operation!r} would never complete")
        if operation._completed_hook is not None:
            raise ValueError(f"{operation!r} is already watched")
        unique_keys = dict.fromkeys(keys)
        if not unique_keys:
            raise ValueError(f"{operation!r} has no key, so only its timeout would complete it")
        return unique_keys

    def _watch(self, operation: Operation, keys: dict[Hashable, None]) -> None:
        watch = _Watch(operation, keys, self._timer.add(operation.timeout_ms, operation.expire))
        operation._completed_hook = lambda: self._on_completed(watch)
        for key in keys:
            self._watches_by_key.setdefault(key, {})[watch] = None
        self._watched += len(keys)
        self._delayed += 1

    def check_and_complete(self, key: Hashable) -> int:
        """Try every operation watched under the key, and return the number of those that completed.

        Never raises the exceptions of an operation: they go to the loop's exception handler. From inside a check of the
        same key it returns 0, and the key is checked again on the loop's next turn.
        """
        if key in self._keys_being_checked:
            self.check_soon(key)
            return 0
        return self._check(key, {watch: [key] for watch in self._watches_by_key.get(key, ())})

    def _check(self, key: Hashable, to_try: dict[_Watch[Operation], list[Hashable]]) -> int:
        """Check a key for operations that are still untried. Each is tried once, after all of its keys."""
        watches = self._watches_by_key.get(key)
        if watches is None:
            return 0
        completed = 0
        self._keys_being_checked.add(key)
        try:
            for watch in list(watches):
                if watch not in watches:
                    continue  # an earlier operation has purged it or closed the purgatory
                operation = watch.operation
                checked = to_try.pop(watch, None)
                if not operation.is_completed and checked is not None:
                    self._try_complete(operation, checked)
                    completed += operation.is_completed
                if operation.is_completed and watch in watches:
                    self._unwatch(watch, key)
        finally:
            self._keys_being_checked.remove(key)
        return completed

    def check_soon(self, key: Hashable) -> None:
        """Check the key once on the loop's next turn, even if this is called several times until then.

        This serves the hot path: a hundred appends to a partition in one turn are one check, and an operation that
        waits for a hundred partitions, all of which were appended to, is tried once. A key without watched operations
        costs nothing; operations watched later see the present state when they are tried.
        """
        if key not in self._watches_by_key:
            return
        self._keys_to_check[key] = None
        if self._check_handle is None:
            self._check_handle = self._loop.call_soon(self._check_keys)

    def watched(self) -> int:
        """Return the number of watched operations, counted once per key, including completed ones that are not yet
        purged."""
        return self._watched

    def delayed(self) -> int:
        """Return the number of incomplete operations, each counted once."""
        return self._delayed

    def purge_completed(self) -> int:
        """Stop watching the completed operations, without trying any, and return their number. The reaper calls this
        once there are more than `purge_interval` of them."""
        purged = list(self._completed)
        for watch in purged:
            for key in list(watch.keys):
                self._unwatch(watch, key)
        return len(purged)

    def close(self) -> None:
        """Drop every operation: none is completed and none will expire. Idempotent.

        Completing them would report events that have not happened, or timeouts that have not passed, on connections
        that are being closed. A client whose request was dropped sees its connection close and asks the next leader. An
        operation's owner may still force it to complete. The timer stays open, because other purgatories may share it.
        """
        self._closed = True
        for watches in self._watches_by_key.values():
            for watch in watches:
                self._timer.cancel(watch.expiry)
                watch.operation._completed_hook = None
            watches.clear()  # a check may be under way
        self._watches_by_key.clear()
        self._completed.clear()
        self._keys_of_completed = 0
        self._keys_to_check.clear()
        self._watched = self._delayed = 0
        for handle in (self._check_handle, self._reaper_handle):
            if handle is not None:
                handle.cancel()
        self._check_handle = self._reaper_handle = None

    def _try_complete(self, operation: Operation, checked: Collection[Hashable]) -> None:
        try:
            operation.try_complete_after(checked)
        # A CancelledError cannot be this task's, because nothing here awaits: it is the result of another task.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported, see the head of this module
            _report(self._loop, f"{operation!r} in purgatory {self.name} failed when checked", error)

    def _check_keys(self) -> None:
        keys, self._keys_to_check, self._check_handle = self._keys_to_check, {}, None
        to_try: dict[_Watch[Operation], list[Hashable]] = {}
        for key in keys:
            for watch in self._watches_by_key.get(key, ()):
                to_try.setdefault(watch, []).append(key)
        for key in keys:
            self._check(key, to_try)

    def _on_completed(self, watch: _Watch[Operation]) -> None:
        watch.operation._completed_hook = None  # breaks the reference cycle with the operation
        self._timer.cancel(watch.expiry)
        self._delayed -= 1
        self._completed[watch] = None
        self._keys_of_completed += len(watch.keys)
        is_much = len(self._completed) > self._purge_interval
        is_much = is_much or self._keys_of_completed > self._purge_interval * USUAL_KEYS
        if is_much and self._reaper_handle is None:
            # Later, because the operation has not answered its client yet.
            self._reaper_handle = self._loop.call_soon(self._reap)

    def _unwatch(self, watch: _Watch[Operation], key: Hashable) -> None:
        del watch.keys[key]
        self._keys_of_completed -= 1
        if not watch.keys:
            del self._completed[watch]
        self._watched -= 1
        watches = self._watches_by_key[key]
        del watches[watch]
        if not watches:
            del self._watches_by_key[key]

    def _reap(self) -> None:
        self._reaper_handle = None
        self.purge_completed()


class SlicedPurgatory(Purgatory[Operation]):
    """A purgatory for operations of strangers: however many wait, `check_soon` tries them in slices.

    Between slices other tasks run, longer if a slice has completed nothing: then nobody gains by the checks, whose
    number only depends on how many operations wait. Each round of checks covers the keys that were to be checked when
    it began, and the operations that were watched when it came to their key; it tries each of them once.
    """

    def __init__(self, name: str, timer: Timer, purge_interval: int = DEFAULT_PURGE_INTERVAL) -> None:
        super().__init__(name, timer, purge_interval)
        self._round: Generator[bool, None, None] | None = None

    def close(self) -> None:
        super().close()
        self._round = None

    def _check_keys(self) -> None:
        self._check_handle = None
        if self._round is None:
            keys, self._keys_to_check = self._keys_to_check, {}
            self._round = self._tries(keys)
        end_s = self._loop.time() + SLICE_S
        is_any_completed = False
        for is_completed in self._round:
            is_any_completed = is_any_completed or is_completed
            if self._loop.time() >= end_s:
                break
        else:
            self._round = None
        if self._round is not None or self._keys_to_check:
            pause_ms = PAUSE_BETWEEN_SLICES_MS if is_any_completed else PAUSE_AFTER_NOTHING_MS
            if self._round is None:
                self._check_handle = self._loop.call_soon(self._check_keys)
            else:
                self._check_handle = self._loop.call_later(pause_ms / 1_000, self._check_keys)

    def _tries(self, keys: dict[Hashable, None]) -> Generator[bool, None, None]:
        """Try the operations of these keys one by one, and yield whether each is completed now."""
        tried: set[_Watch[Operation]] = set()
        for key in keys:
            for watch in list(self._watches_by_key.get(key, ())):
                operation = watch.operation
                if watch not in tried and not operation.is_completed:
                    tried.add(watch)
                    few, many = (watch.keys, keys) if len(watch.keys) < len(keys) else (keys, watch.keys)
                    self._try_complete(operation, [one for one in few if one in many])
                    yield operation.is_completed
                if operation.is_completed and key in watch.keys:
                    self._unwatch(watch, key)


def _report(loop: asyncio.AbstractEventLoop, message: str, error: BaseException) -> None:
    loop.call_exception_handler({"message": message, "exception": error})

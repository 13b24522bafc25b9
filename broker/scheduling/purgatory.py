"""Operations that wait for something to happen, or for their time to be up.

The problem. A produce request with acks=all can be answered when the followers have fetched what it
appended; a fetch when there is enough to send; a join when every member has joined. None of them may
hold a request handler while it waits, each must be answered exactly once, and each has a deadline.

The choice, after Kafka's DelayedOperation and DelayedOperationPurgatory. An operation knows how to find
out whether it can complete, and what to do then. It is watched under keys (a partition, a group); whoever
changes what a key stands for calls `check_and_complete(key)`. Its deadline is an entry in a timing
wheel. Both ways end in `force_complete`, which lets only the first through to `on_complete`, the only
place that answers the client.

What a single-threaded loop spares us. In Kafka any thread may complete an operation, and locks made this
its most patched class. An operation was checked under a try-lock, so that two threads could not deadlock;
the thread that did not get it left without checking, and an operation that became complete just then
was forgotten until its timeout (KAFKA-6653: a flag asks the lock's holder to check again). But the lock
may be a group's, and its holder busy with something else, not looking at the flag (KAFKA-8334: completion
moved to an action queue that runs once all locks are released, and the lock is held while watching). An
operation was tried, watched, then tried again, because of what might have happened in between.

Here all of this runs on one loop and nothing in it awaits: between the try and the watch nothing can
happen, so one try is enough, and "exactly once" is a boolean. Nothing in this module may be called from
another thread.

What remains is re-entrancy: `on_complete` may change what others wait for.
- It may watch new operations, under the same key too: a check goes over those that were watched when it
  began. A new one was tried with the present state when it was watched.
- It may check other keys, which happens at once, nested.
- It may check the key that is being checked. That check still has the rest of the key's operations before
  it; those that it has passed are checked again on the loop's next turn. Doing it at once would
  recurse once per operation.

Exceptions. What an operation raises while it is checked or expires is its own failure: it goes to the
loop's exception handler, naming the operation, and the others are checked all the same. It is not raised
to the caller of `check_and_complete`, which is a bystander: a follower's fetch that moved the
high watermark must not fail because some producer's answer did. An operation whose `try_complete` raised
is still watched and still has its deadline, so its client hears from it; one whose `on_complete` raised
is completed, since half an answer may be out. Only `try_complete_else_watch` raises what the first try
raised, since there the caller is the one that answers.

Kafka's reaper thread wakes five times a second. Here nothing runs while nothing happens: the one loop
timer is set for the next bucket, and the reaper runs once enough completed operations are still watched
under keys that nobody checks. It visits those alone, never the ones that wait. Rejected: removing an
operation from all of its keys when it completes, as it would put the clean-up of a fetch of a thousand
partitions between the event and the answer.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

from minibroker.broker.scheduling.timing_wheel import TimerEntry, TimingWheel

# After this many expiries, or moves within the wheel, or this time, the loop gets a turn and sleeps for a millisecond:
# ten thousand fetches that were parked together expire together, and one of a follower of very many partitions takes
# ten milliseconds.
EXPIRIES_PER_SLICE = 100
SLICE_S = 0.002
MOVES_PER_SLICE = 1000
PAUSE_BETWEEN_SLICES_MS = 1

# As in Kafka: fetch.purgatory.purge.interval.requests and its siblings.
DEFAULT_PURGE_INTERVAL = 1000

# A loop's time is a float of seconds: 1.001 s is 1000.9999999999999 ms. A microsecond is far more than that
# error and far less than our tick. Without it, a loop whose time stands still between timers (the
# simulator's) would wake us for ever just before the same deadline.
ROUNDING_MS = 0.001

ExpiryCallback = Callable[[], object]
Expiry = TimerEntry[ExpiryCallback]


class Timer:
    """Calls back after timeouts: a `TimingWheel` driven by one timer of the running loop (Kafka's
    SystemTimer). Create it on the loop that it is to live on.

    Guaranteed: a callback runs at most once, never before its timeout by the loop's clock, never after
    `cancel` or `close`, never inside `add`. What a callback raises goes to the loop's exception handler,
    and the others run. The loop is woken when the next bucket in use expires and not otherwise; its timer
    is set anew only for an entry that would be late with it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wheel: TimingWheel[ExpiryCallback] = TimingWheel(self._elapsed_ms())
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for_ms = 0  # meaningful while there is a handle
        self._closed = False

    def __len__(self) -> int:
        """Callbacks that are still to run."""
        return len(self._wheel)

    def add(self, timeout_ms: int, callback: ExpiryCallback) -> Expiry:
        """Run `callback` once `timeout_ms` have passed; with 0 or less, as soon as the loop gets to it.
        O(1). Raises RuntimeError if the timer is closed."""
        if self._closed:
            raise RuntimeError("the timer is closed: nothing would ever expire")
        exact_ms = self._loop.time() * 1000
        now_ms = math.floor(exact_ms + ROUNDING_MS)
        next_expiry_ms = self._wheel.next_expiry_ms()
        if next_expiry_ms is None or next_expiry_ms > now_ms:
            # Nothing to hand out. It only moves the clock, without which an entry would go to a wheel as
            # coarse as the timer has been idle, and come back from there at once.
            self._wheel.advance(now_ms)
        deadline_ms = math.ceil(exact_ms - ROUNDING_MS) + timeout_ms
        entry = self._wheel.insert(deadline_ms, callback)
        if self._handle is None or deadline_ms < self._armed_for_ms:
            self._arm(not_before_ms=now_ms)
        return entry

    def cancel(self, entry: Expiry) -> bool:
        """Never run the entry's callback. False if it has run, or was cancelled before. O(1); the loop's
        timer stays set, since waking once in vain is cheaper than setting it anew for every cancel."""
        return not self._closed and self._wheel.cancel(entry)

    def close(self) -> None:
        """Drop every entry without running it. May be called again."""
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
        # The handle, spent as it is, stays until the slice is over: what callbacks add meanwhile need not
        # arm the timer, because the end of the slice does.
        self._armed_for_ms = now_ms = self._elapsed_ms()
        end_s = self._loop.time() + SLICE_S
        try:
            for _ in range(EXPIRIES_PER_SLICE):
                entry = self._wheel.advance(now_ms, MOVES_PER_SLICE)
                if entry is None:
                    break
                try:
                    entry.value()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported, see the essay
                    _report(self._loop, f"{entry.value!r} failed when its timeout had passed", error)
                # A callback may have moved the wheel's clock with `add`, or put an empty wheel in its place
                # with `close`, which ends this like any other.
                now_ms = self._elapsed_ms()
                if self._loop.time() >= end_s:
                    break
        finally:
            # Only what is due already has to wait for the pause: the next tick is no sooner.
            self._arm(not_before_ms=now_ms + PAUSE_BETWEEN_SLICES_MS)


class DelayedOperation(ABC):
    """Something that completes once, when what it waits for has happened or after `timeout_ms`
    (Kafka's DelayedOperation).

    A subclass says in `try_complete` what it waits for and does in `on_complete` what there is to do,
    whichever way it ended: as a rule, answer the client.
    """

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._completed = False
        # Set while a purgatory watches this: lets it know of the completion, before `on_complete`.
        self._completed_hook: Callable[[], None] | None = None

    @property
    def is_completed(self) -> bool:
        """True from the moment `force_complete` was first called, so inside `on_complete` too."""
        return self._completed

    @abstractmethod
    def try_complete(self) -> bool:
        """Look whether what this waits for has happened: if so, return `self.force_complete()`, else
        False. Called whenever one of its keys is checked, never once it is completed."""

    def try_complete_after(self, checked: Collection[Hashable]) -> bool:
        """`try_complete`, where these keys are all that may have changed since it returned False. For an operation
        that waits for so many that to look at each of them is dear."""
        return self.try_complete()

    @abstractmethod
    def on_complete(self) -> None:
        """Do what was delayed. Called exactly once, by `force_complete`: the only way out to the client."""

    @abstractmethod
    def on_expiration(self) -> None:
        """Take note that the time was up. Called after `on_complete`, and only if the deadline was what
        completed this. For metrics and the like: the client already has its answer."""

    def force_complete(self) -> bool:
        """Complete now, whatever this waits for. True for the one call that did, False for all later
        ones. Raises what `on_complete` raises; the operation is completed even so."""
        if self._completed:
            return False
        self._completed = True
        if self._completed_hook is not None:
            self._completed_hook()
        self.on_complete()
        return True

    def expire(self) -> None:
        """The deadline has come: complete, and take note if that was what completed it."""
        if self.force_complete():
            self.on_expiration()


Operation = TypeVar("Operation", bound=DelayedOperation)


class _Watch(Generic[Operation]):
    """One operation that a purgatory watches, and under which keys it still does."""

    __slots__ = ("expiry", "keys", "operation")

    def __init__(self, operation: Operation, keys: dict[Hashable, None], expiry: Expiry) -> None:
        self.operation = operation
        self.keys = keys
        self.expiry = expiry


class Purgatory(Generic[Operation]):
    """The operations of one kind that wait, by the keys that they wait for (Kafka's
    DelayedOperationPurgatory). Several purgatories may share a timer.

    Guaranteed: an operation given to `try_complete_else_watch` is tried at once and whenever one of its
    keys is checked, in the order in which they were watched, until it completes; after its timeout it
    is completed in any case, unless the purgatory is closed before.
    """

    def __init__(self, name: str, timer: Timer, purge_interval: int = DEFAULT_PURGE_INTERVAL) -> None:
        """`purge_interval`: how many completed operations may still be watched before they are purged."""
        self.name = name
        self._timer = timer
        self._purge_interval = purge_interval
        self._loop = asyncio.get_running_loop()
        # Dicts for their order: a check must try operations in the same order in every run.
        self._watches_by_key: dict[Hashable, dict[_Watch[Operation], None]] = {}
        self._completed: dict[_Watch[Operation], None] = {}  # those that are still watched
        self._watched = 0
        self._delayed = 0
        self._keys_being_checked: set[Hashable] = set()
        self._keys_to_check: dict[Hashable, None] = {}
        self._check_handle: asyncio.Handle | None = None
        self._reaper_handle: asyncio.Handle | None = None
        self._closed = False

    def try_complete_else_watch(self, operation: Operation, keys: Iterable[Hashable]) -> bool:
        """Complete the operation now if it can be, and return True. Else watch it under each of the keys
        until it completes or its timeout passes, and return False.

        Raises what its `try_complete` raises, and then it is not watched; ValueError without any key or
        for an operation that is being watched; RuntimeError if the purgatory is closed.
        """
        unique_keys = self._unique(operation, keys)
        if not operation.is_completed:
            operation.try_complete()
        if operation.is_completed:
            return True
        self._watch(operation, unique_keys)
        return False

    def watch(self, operation: Operation, keys: Iterable[Hashable]) -> None:
        """`try_complete_else_watch` for an operation whose owner has just seen that it cannot complete yet. Raises as
        that does."""
        self._watch(operation, self._unique(operation, keys))

    def _unique(self, operation: Operation, keys: Iterable[Hashable]) -> dict[Hashable, None]:
        if self._closed:
            raise RuntimeError(f"purgatory {self.name} is closed: nothing would complete {operation!r}")
        if operation._completed_hook is not None:
            raise ValueError(f"{operation!r} is watched already")
        unique_keys = dict.fromkeys(keys)
        if not unique_keys:
            raise ValueError(f"{operation!r} waits for no key: only its timeout would complete it")
        return unique_keys

    def _watch(self, operation: Operation, keys: dict[Hashable, None]) -> None:
        watch = _Watch(operation, keys, self._timer.add(operation.timeout_ms, operation.expire))
        operation._completed_hook = lambda: self._on_completed(watch)
        for key in keys:
            self._watches_by_key.setdefault(key, {})[watch] = None
        self._watched += len(keys)
        self._delayed += 1

    def check_and_complete(self, key: Hashable) -> int:
        """Try every operation watched under the key; return how many this completed.

        Never raises what an operation raises: that goes to the loop's exception handler. From inside a
        check of the same key it returns 0, and the key is checked again on the loop's next turn.
        """
        if key in self._keys_being_checked:
            self.check_soon(key)
            return 0
        return self._check(key, {watch: [key] for watch in self._watches_by_key.get(key, ())})

    def _check(self, key: Hashable, to_try: dict[_Watch[Operation], list[Hashable]]) -> int:
        """`check_and_complete` for those that are still to be tried, each once and after all of its keys."""
        watches = self._watches_by_key.get(key)
        if watches is None:
            return 0
        completed = 0
        self._keys_being_checked.add(key)
        try:
            for watch in list(watches):
                if watch not in watches:
                    continue  # one before it has purged it, or closed the purgatory
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
        """Check the key on the loop's next turn, once however often this is called until then.

        For the hot path: a hundred appends to a partition in one turn are one check, and an operation that waits
        for a hundred partitions, all of which were appended to, is tried once. A key that nothing is watched under
        costs nothing; what is watched later sees the present state when it is tried.
        """
        if key not in self._watches_by_key:
            return
        self._keys_to_check[key] = None
        if self._check_handle is None:
            self._check_handle = self._loop.call_soon(self._check_keys)

    def watched(self) -> int:
        """Operations watched, counted once per key, the completed ones not yet purged included."""
        return self._watched

    def delayed(self) -> int:
        """Operations that are not completed, each counted once."""
        return self._delayed

    def purge_completed(self) -> int:
        """Stop watching the completed operations, without trying any; return how many there were. The
        reaper does this once there are more than `purge_interval` of them."""
        purged = list(self._completed)
        for watch in purged:
            for key in list(watch.keys):
                self._unwatch(watch, key)
        return len(purged)

    def close(self) -> None:
        """Drop every operation: none is completed and none will expire. May be called again.

        Completing them in place of that would answer clients with what has not happened, or with a
        timeout that has not passed, on connections that are being closed. A client whose request was
        dropped sees its connection close and asks the next leader. An operation's owner may still force
        it to complete. The timer is not ours alone, so it is left open.
        """
        self._closed = True
        for watches in self._watches_by_key.values():
            for watch in watches:
                self._timer.cancel(watch.expiry)
                watch.operation._completed_hook = None
            watches.clear()  # a check may be under way
        self._watches_by_key.clear()
        self._completed.clear()
        self._keys_to_check.clear()
        self._watched = self._delayed = 0
        for handle in (self._check_handle, self._reaper_handle):
            if handle is not None:
                handle.cancel()
        self._check_handle = self._reaper_handle = None

    def _try_complete(self, operation: Operation, checked: Collection[Hashable]) -> None:
        try:
            operation.try_complete_after(checked)
        # A CancelledError cannot mean us, as nothing here awaits: it is the result of some other task.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported, see the essay
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
        watch.operation._completed_hook = None  # which refers back to the operation: no cycle stays behind
        self._timer.cancel(watch.expiry)
        self._delayed -= 1
        self._completed[watch] = None
        if len(self._completed) > self._purge_interval and self._reaper_handle is None:
            # Not at once: the operation has yet to answer its client.
            self._reaper_handle = self._loop.call_soon(self._reap)

    def _unwatch(self, watch: _Watch[Operation], key: Hashable) -> None:
        del watch.keys[key]
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


def _report(loop: asyncio.AbstractEventLoop, message: str, error: BaseException) -> None:
    loop.call_exception_handler({"message": message, "exception": error})

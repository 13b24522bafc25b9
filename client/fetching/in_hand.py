"""The records in the user's hands: which they are, whether the user has finished with them, and where their partitions
go on if it has not.

This is written once for each batch, not for each record. The iterator alone knows how far the user has come within a
batch that it takes record by record; `mark` may read that from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from typing import Any

from minibroker.client.fetching.fetch_state import OpenBatch, TopicPartitionState
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.log import Logger
from minibroker.client.tasks import Pulse
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

logger = Logger("minibroker.client")


class InHand:
    """Written in the consumer's event loop; the heart's thread also reads `mark`, `asking` and `asked_at`."""

    def __init__(self, clock: Clock, partitions: FetchedPartitions, who: str) -> None:
        self._clock = clock
        self._partitions = partitions
        self._who = who
        self.state: TopicPartitionState | None = None
        """The partition of the open batch, even if the fetcher has closed that batch (see `is_open`)."""
        self._open: OpenBatch | None = None
        self.records: Iterator[Record] = iter(())
        """The records that are left of the open batch, or of the last one."""
        self.asking = 0
        """Number of calls that wait for records."""
        self.asked_at = clock.monotonic()
        """When a call for records last began or returned."""
        self.holds = False
        """The user has been given records and has not asked for more since."""
        self.is_quiet = False
        """No records may be handed out: a rebalance revokes partitions, or the member has lost them."""
        self.freed = Pulse()
        """Beats when `holds` becomes false."""
        self.on_ask: Callable[[], None] | None = None
        """Called when the user asks for records."""
        self.was_polled = False
        """The user holds the result of `poll`."""
        self.reader: asyncio.Task[Any] | None = None
        """The task that was given the last batch."""
        self._before: dict[TopicPartition, int] = {}
        """Positions before the records that the user holds."""
        self._vouched: dict[TopicPartition, int] = {}
        """Offsets that the user has committed while it held records: it has finished with those below."""

    def mark(self) -> object:
        """Return a value that changes when the user takes a record or asks for more."""
        return self.asked_at, id(self.records), length_hint(self.records)

    # -- the user asks, and is given records --

    def ask(self) -> None:
        """The user asks for records, so it has finished with those that it holds."""
        self.asking += 1
        self.asked_at = self._clock.monotonic()
        self._before.clear()
        self._vouched.clear()
        self.was_polled = False
        self.put_away()
        if self.on_ask is not None:
            self.on_ask()

    def answer(self, is_given: bool) -> None:
        """The call returns, with records or without."""
        self.asking -= 1
        self.asked_at = self._clock.monotonic()
        self.holds = is_given or self.holds

    def put_away(self) -> None:
        """The user holds no records any more."""
        if self.holds:
            self.holds = False
            self.freed.notify()

    def open(self, state: TopicPartitionState, batch: ConsumerBatch) -> None:
        """Hand out the records of this batch one by one. Each record that is taken moves the position past itself."""
        opened = OpenBatch(batch)
        self.state, self._open, self.records = state, opened, opened.records
        state.open = opened
        self._before.setdefault(state.partition, batch.offsets[0])

    def give(self, state: TopicPartitionState, batch: ConsumerBatch) -> ConsumerBatch:
        """Hand out a batch as a whole."""
        self._before[state.partition] = batch.offsets[0]
        state.position = batch.next_offset
        return batch

    # -- the open batch --

    def is_open(self, state: TopicPartitionState | None) -> bool:
        """Whether records of this partition are being taken one by one. The fetcher ends that when it moves the
        partition (to a topic created again, after a truncation, in a rebalance), and exhausts the iterator."""
        return state is not None and state is self.state and state.open is self._open

    def rest(self) -> tuple[TopicPartitionState, ConsumerBatch] | None:
        """End the open batch. Returns the records that are left of it, if there are any."""
        state, opened = self.state, self._open
        left = opened.left if opened is not None and self.is_open(state) else 0
        self.end()
        if state is None or opened is None or not left:
            return None
        return state, opened.batch.since(len(opened.batch) - left)

    def end(self) -> None:
        """The open batch is consumed, including a gap behind its last record."""
        if self.state is not None and self._open is not None and self.is_open(self.state):
            self.state.pass_over(self._open.batch.next_offset)
        self.drop()

    def drop(self) -> None:
        """Close the open batch. The position stays behind the last record that was taken."""
        if self.state is not None:
            self.state.close()
        self.state = self._open = None

    def poll_goes_on(self) -> None:
        """`poll` returns the rest of the open batch first."""
        if self.state is not None and self.state.position is not None:
            self._before[self.state.partition] = self.state.position

    # -- finished or not --

    def vouch(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The user commits these offsets, so it has finished with the records below them."""
        self._vouched |= offsets

    def is_done_with(self) -> bool:
        """Whether the user has finished with the records, as far as that can be known: the caller is the task that was
        given them, or that task has ended without an exception (`wait_for` reads in a task of its own)."""
        reader = self.reader
        if reader is None or reader is asyncio.current_task():
            return True
        if not reader.done() or reader.cancelled():
            return False
        failure = reader.exception()
        if failure is not None:  # asyncio regards it as retrieved from here on
            logger.warning(
                "%s: the task that reads has failed, so the last records that it was given count as not processed: %r",
                self._who,
                failure,
            )
        return failure is None

    def put_down(self, is_done: bool) -> None:
        """Take all records from the user. Unless it `is_done` with them, their partitions go back to the first record
        that it has not committed."""
        if is_done:
            self.drop()
        else:
            self._take_back()
        self.put_away()

    def _take_back(self) -> None:
        if not self.holds:
            return
        if self.state is not None and self._open is not None and self.is_open(self.state) and not self.was_polled:
            last = self._open.last_taken
            if last is not None:
                self._before[self.state.partition] = last
        self.drop()
        self.give_back({p: max(before, self._vouched.get(p, before)) for p, before in self._before.items()})

    def give_back(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Go back to these offsets where the positions are beyond them. The records from there on have not reached the
        user, or it has not finished with them."""
        for partition, offset in offsets.items():
            state = self._partitions.states.get(partition)
            if state is not None and state.position is not None and state.position > offset:
                self._partitions.go_back(state, offset)

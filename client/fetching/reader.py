"""Reading: hands the batches that were fetched to the user, as records or as whole batches.

Batches are decoded here, when the user takes them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from operator import length_hint

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import CorruptBatch, DeserializationFailed
from minibroker.client.fetching.fetch_state import FetchedBatch, TopicPartitionState
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.client.serializers import Deserializer
from minibroker.client.stalls import LOOK_EVERY_S, Stalls
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import CorruptRecord, DecodedBatch, decode_batch

YIELD_S = 0.05
"""Interval at which a user that never has to wait lets the other tasks of its event loop run."""

_Found = tuple[TopicPartitionState, ConsumerBatch]


class Reader:
    """`check_running` raises if the client does not run, `check_readable` if it may not read. `yields`: let the other
    tasks run every YIELD_S."""

    def __init__(
        self,
        runtime: ClientRuntime,
        partitions: FetchedPartitions,
        in_hand: InHand,
        deserialize_key: Deserializer | None,
        deserialize_value: Deserializer | None,
        *,
        check_running: Callable[[], None],
        check_readable: Callable[[], None],
        yields: bool,
    ) -> None:
        self._clock = runtime.clock
        self._partitions = partitions
        self._in_hand = in_hand
        self._errors = partitions.errors
        self._deserialize_key = deserialize_key
        self._deserialize_value = deserialize_value
        self._check_running = check_running
        self._check_readable = check_readable
        self._yields = yields
        self._yielded_at = 0.0
        self._decoded_last: tuple[FetchedBatch, DecodedBatch] | None = None
        """A batch that is handed out in parts."""
        self._stalls: Stalls[str] = Stalls(runtime.connections.client_id, remedy="")

    async def records(self) -> Iterator[Record]:
        """Return the records that are left of the open batch, or else those of the next one. Taking one moves the
        position, in any thread."""
        while not length_hint(self._in_hand.records):
            self._in_hand.end()
            found = await self._next_batch()
            if found is not None:
                self._in_hand.open(*found)
        return self._in_hand.records

    async def batch(self) -> ConsumerBatch:
        """Return the rest of the open batch, or else the next one."""
        while True:
            found = self._in_hand.rest()
            if found is not None:
                self._in_hand.ask()
                self._in_hand.answer(is_given=True)
            else:
                found = await self._next_batch()
            if found is not None:
                return self._in_hand.give(*found)

    async def poll(self, timeout_s: float, limit: int) -> list[Record]:
        """Return at most `limit` records. Waits only for the first one; the list is empty if none arrives in time."""
        in_hand = self._in_hand
        in_hand.ask()
        in_hand.poll_goes_on()
        taken: list[Record] = []
        try:
            while len(taken) < limit:
                some = list(islice(in_hand.records, limit - len(taken)))
                if some:
                    taken += some
                    continue
                in_hand.end()
                if taken and self._errors:
                    break  # an error is raised by the next call
                found = self._take() if taken else await self._next_batch(timeout_s)
                if found is None:
                    break
                in_hand.open(*found)
            if not taken:
                await asyncio.sleep(0)  # a loop over poll(0) must let the tasks work
        except MinibrokerError:
            if not taken:
                raise
            # The next call raises it again, because it fetches from there again.
        finally:
            in_hand.answer(is_given=bool(taken))
            in_hand.was_polled = True
        return taken

    async def _next_batch(self, timeout_s: float | None = None) -> _Found | None:
        """Return the next batch with records. None: there is none in time (it looks at least once), or another task
        that iterates over this consumer has opened one."""
        self._check_running()
        in_hand = self._in_hand
        in_hand.ask()
        found = None
        try:
            if self._yields and in_hand.asked_at > self._yielded_at + YIELD_S:
                await asyncio.sleep(0)
                self._yielded_at = in_hand.asked_at
                self._check_running()
            deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
            while in_hand.state is None and (found := self._take()) is None:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._something()
                except TimeoutError:
                    break
                self._yielded_at = self._clock.monotonic()
                self._check_running()
            return found
        finally:
            in_hand.answer(is_given=found is not None)
            in_hand.reader = asyncio.current_task()

    async def _something(self) -> None:
        """Wait until there may be a batch or an error. If all partitions are paused, log that: the call may wait
        forever."""
        states = self._partitions.states.values()
        paused = ["records"] if states and all(state.is_paused for state in states) else []
        if paused or self._stalls.is_any:
            now = self._clock.monotonic()
            self._stalls.look(now, paused, lambda _: f"all {len(states)} partitions are paused: call resume()")
        if not paused:
            await self._partitions.pulse.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._partitions.pulse.wait()

    def _take(self) -> _Found | None:
        """Return the next batch with records, if there is one. Raises pending errors."""
        if self._errors:
            raise self._errors.pop(0).with_traceback(None)
        self._check_readable()
        while not self._in_hand.is_quiet:
            fetched = self._partitions.take()
            if fetched is None:
                return None
            if fetched.is_hidden:
                fetched.state.pass_over(fetched.next_offset)
                continue
            batch = self._decoded(fetched)
            if batch is None:
                continue
            if not len(batch):
                fetched.state.pass_over(batch.next_offset)
                continue
            try:
                batch = self._deserialized(batch)
            except DeserializationFailed:
                self._partitions.put_back(fetched)
                raise
            if batch.next_offset < fetched.next_offset:
                self._partitions.put_back(fetched)
            return fetched.state, batch
        return None

    def _decoded(self, fetched: FetchedBatch) -> ConsumerBatch | None:
        """Return the records of a batch from the position on, or a part of them if they take much memory
        (`DecodedBatch.parts`). None: it is corrupt, and is fetched once more."""
        state, header = fetched.state, fetched.header
        topic, partition = state.partition
        position = state.position
        assert position is not None
        last, self._decoded_last = self._decoded_last, None
        if last is not None and last[0].buffer is fetched.buffer and last[0].start == fetched.start:
            decoded = last[1]
        else:
            last = None  # so that its memory is free for this one
            try:
                decoded = decode_batch(fetched.buffer, header, fetched.start)
            except CorruptRecord as error:
                self._partitions.go_back(state, position)
                problem = f"at offsets {header.base_offset} to {header.last_offset}: {error}"
                remedy = f"Try again, or skip it with seek({state.partition!r}, {header.next_offset})"
                corrupt = CorruptBatch(state.partition, problem, remedy, header.next_offset)
                if self._partitions.is_first_suspicion(state, corrupt):
                    return None
                raise corrupt from error
        state.suspicion = None
        # Brokers return whole batches.
        first = bisect_left(decoded.offsets, position) if header.base_offset < position else 0
        end = first + decoded.records_at_once
        next_offset = fetched.next_offset
        if end < decoded.count:
            self._decoded_last = fetched, decoded
            next_offset = decoded.offsets[end]
        part = decoded.part(first, end)
        return ConsumerBatch(
            topic, partition, part.offsets, part.timestamps, part.keys, part.values, part.headers, next_offset
        )

    def _deserialized(self, batch: ConsumerBatch) -> ConsumerBatch:
        """Return the batch up to the first record that cannot be deserialized. If that is the first record of all,
        raises DeserializationFailed, again and again until the user goes elsewhere."""
        if self._deserialize_key is None and self._deserialize_value is None:
            return batch
        try:
            return batch.deserialized(self._deserialize_key, self._deserialize_value)
        except DeserializationFailed as error:
            readable = bisect_left(batch.offsets, error.offset)
            if readable == 0:
                raise
            return batch.until(readable).deserialized(self._deserialize_key, self._deserialize_value)


class Batches:
    """An iteration by batches. A class, because an async generator would end once an `anext` of it was cancelled."""

    def __init__(self, next_batch: Callable[[], Awaitable[ConsumerBatch]]) -> None:
        self._next_batch = next_batch

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> ConsumerBatch:
        return await self._next_batch()

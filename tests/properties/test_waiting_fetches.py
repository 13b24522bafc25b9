"""A waiting fetch looks only at the partitions that were checked, and is answered when a look at all of them would do
it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.model import TopicPartition
from tests.replication_support import TOPIC, OneBroker, fetch_of, state, with_one_broker
from tests.storage_support import batch

PARTITIONS = 3
RECORDS = batch(1)
FOLLOWER, CONSUMER = 2, -1


class Event(NamedTuple):
    """An event at a partition: an append, a new epoch of the same leader, or another leader."""

    what: str
    number: int


events = st.builds(
    Event, st.sampled_from(["append", "append", "epoch", "move"]), st.integers(min_value=0, max_value=PARTITIONS - 1)
)


@given(
    asked=st.lists(st.integers(min_value=0, max_value=PARTITIONS - 1), min_size=1, max_size=PARTITIONS + 1),
    reader=st.sampled_from([FOLLOWER, CONSUMER]),
    turns=st.lists(st.lists(events, max_size=3), max_size=6),
)
def test_a_waiting_fetch_is_answered_as_soon_as_a_full_look_would_allow(
    asked: list[int], reader: int, turns: list[list[Event]]
) -> None:
    async def scenario(broker: OneBroker) -> None:
        epochs, led, held = [0] * PARTITIONS, [True] * PARTITIONS, [True] * PARTITIONS
        readable = [False] * PARTITIONS

        async def told(index: int) -> None:
            leader = 1 if led[index] else 2
            await broker.told(state(leader, epochs[index], (1,), index=index, replicas=(1, 2)))

        for index in range(PARTITIONS):
            await told(index)
        reading = broker.fetch(
            *(fetch_of(0, epoch=0, index=index) for index in asked), replica=reader, max_wait_ms=1_000_000
        )

        def is_due() -> bool:
            held_of_it = [held[index] for index in asked]
            lost = not all(held_of_it) if reader == CONSUMER else not any(held_of_it)
            return lost or any(held[index] and readable[index] for index in asked)

        for turn in turns:
            was_due = False  # while an order is carried out, earlier records may be looked at
            for what, index in turn:
                if what == "append" and led[index]:
                    broker.produce(RECORDS, acks=1, partition=TopicPartition(TOPIC, index))
                    readable[index] = True
                elif what != "append":
                    epochs[index] += 1
                    led[index] = what == "epoch"
                    held[index] = False
                    await told(index)
                was_due = was_due or is_due()
            await asyncio.sleep(0.01)
            assert reading.done() if is_due() else was_due or not reading.done()
            if reading.done():
                return

    with TemporaryDirectory() as directory:
        with_one_broker(Path(directory), scenario)

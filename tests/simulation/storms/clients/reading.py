"""A consumer of a user, which checks its own positions while it reads."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

from minibroker.client.consumer import Consumer
from minibroker.client.errors import CorruptBatch, LogTruncated
from minibroker.client.fetching.records import Record
from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.world import WALL_CLOCK_START_MS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.interruptions import may_be_interrupted
from tests.simulation.storms.verdicts.answers import (
    Answers,
    OffsetTold,
    PositionTold,
    Refused,
    label_of,
)
from tests.simulation.storms.verdicts.history import Anomaly, History, Polled


def now_s() -> float:
    """Return the storm's time, which ignores clock jumps of the calling process."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.now_s


class Reading:
    """One consumer from its start to its end, and the positions that it must have."""

    def __init__(
        self,
        who: str,
        history: History,
        answers: Answers,
        acknowledged_end: Counter[TopicPartition],
        event: Callable[[str], None],
        accuse: Callable[[Anomaly], None],
    ) -> None:
        self._who = who
        self._history = history
        self._answers = answers
        self._acknowledged_end = acknowledged_end
        self._event = event
        self._accuse = accuse
        self._legs: dict[TopicPartition, str] = {}
        """The identity under which its records are judged. Each deliberate move begins a new one."""
        self._numbers = itertools.count()
        self._next: dict[TopicPartition, int] = {}
        """The next offset of a partition, if it is known."""

    def _moved(self, partition: TopicPartition, start: int | None) -> None:
        leg = self._legs[partition] = f"{self._who}/{next(self._numbers)}"
        self._next.pop(partition, None)
        if start is not None:
            self._next[partition] = start
            self._history.starts[leg, partition] = start

    def _note(self, record: Record, consumer: Consumer) -> None:
        partition = TopicPartition(record.topic, record.partition)
        if partition in consumer.paused():
            self._accuse(Anomaly("read while paused", f"{self._who}: offset {record.offset} of {partition}"))
        label = label_of(record.key, record.value, record.headers)
        self._history.polled.append(Polled(self._legs[partition], partition, record.offset, label, now_s()))
        self._next[partition] = record.offset + 1

    async def begin_at(
        self, bootstrap: str, world: World, partition: TopicPartition, start: int, reset: Any, within_s: float = 40.0
    ) -> None:
        """Read a few records from an offset that is in the log."""
        with self._telling_of_refusals([partition]):
            async with Consumer(
                bootstrap, partitions=[partition], auto_offset_reset=reset, request_timeout_ms=5_000, world=world
            ) as consumer:
                consumer.seek(partition, start)
                self._moved(partition, start)
                await self._read(consumer, 3, within_s)

    async def _read(self, consumer: Consumer, records: int, within_s: float) -> None:
        """Read this many records, or fewer if the time is over."""
        try:
            async with asyncio.timeout(within_s):
                async for record in consumer:
                    self._note(record, consumer)
                    records -= 1
                    if records <= 0:
                        return
        except MinibrokerError:
            raise
        except TimeoutError:
            return

    @contextmanager
    def _telling_of_refusals(self, partitions: list[TopicPartition]) -> Iterator[None]:
        try:
            yield
        except (LogTruncated, CorruptBatch) as error:
            self._history.truncations.append(f"{self._who}: {error}")
        except BrokerError as error:
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            for partition in partitions:
                if partition in self._next and f"{partition} at offset" in str(error):
                    self._answers.refused.append(
                        Refused(self._who, partition, self._next[partition], str(error), now_s())
                    )

    async def read_for_a_life(self, bootstrap: str, world: World, topics: Mapping[str, int]) -> None:
        random = world.random
        topic = random.choice(list(topics))
        partitions = [TopicPartition(topic, p) for p in range(topics[topic])]
        reset: Any = random.choice(["earliest", "earliest", "latest", "none"])
        subscription: dict[str, Any] = {"topics": [topic]} if random.random() < 0.7 else {"partitions": partitions}
        self._event(f"consumer of {next(iter(subscription))} from {reset}")
        with self._telling_of_refusals(partitions):
            async with Consumer(
                bootstrap,
                **subscription,
                auto_offset_reset=reset,
                request_timeout_ms=random.choice([2_000, 30_000]),
                default_api_timeout_ms=5_000,
                fetch_max_wait_ms=random.choice([100, 500, 500]),
                max_partition_fetch_bytes=random.choice([1_000, 1_048_576]),
                world=world,
            ) as consumer:
                for partition in partitions:
                    if reset == "none" or random.random() < 0.3:
                        self._seek(consumer, partition, random)
                    elif reset == "earliest":
                        self._moved(partition, 0)
                    else:
                        self._moved(partition, None)
                        await self._at_the_end(consumer, partition)
                for _ in range(random.randint(1, 8)):
                    await self._read(consumer, random.randint(1, 60), random.uniform(0.5, 5))
                    await self._do_something(consumer, partitions, random)

    def _seek(self, consumer: Consumer, partition: TopicPartition, random: Random) -> None:
        """Seek to an acknowledged offset, near the end if possible."""
        end = self._acknowledged_end[partition]
        offset = random.choice([end, max(0, end - 1), random.randint(max(0, end - 20), end), random.randint(0, end)])
        consumer.seek(partition, offset)
        self._moved(partition, offset)

    async def _at_the_end(self, consumer: Consumer, partition: TopicPartition) -> None:
        offset = await consumer.position(partition)
        self._moved(partition, offset)
        self._answers.offsets.append(OffsetTold(self._who, partition, "end", 0, offset, -1, now_s()))

    async def _do_something(self, consumer: Consumer, partitions: list[TopicPartition], random: Random) -> None:
        partition = random.choice(partitions)
        what = random.choice(["seek", "beginning", "end", "pause", "batch", "position", "ask", "ask", "nothing"])
        self._event(f"consumer: {what}")
        if what == "seek":
            self._seek(consumer, partition, random)
        elif what == "beginning":
            consumer.seek_to_beginning(partition)
            self._moved(partition, 0)
        elif what == "end":
            consumer.seek_to_end(partition)
            self._moved(partition, None)
            await self._at_the_end(consumer, partition)
        elif what == "pause":
            consumer.pause(partition)
            await self._read(consumer, 20, random.uniform(0.2, 1))
            consumer.resume(partition)
        elif what == "batch":
            await self._read_batch(consumer)
        elif what == "position" and partition in self._next:
            position = await consumer.position(partition)
            self._answers.positions.append(PositionTold(self._who, partition, position, self._next[partition], now_s()))
        elif what == "ask":
            asked = self.ask_everything(consumer, [partition], random)
            await may_be_interrupted(asked, random, self._accuse, self._event, self._who, consumer.close)

    async def _read_batch(self, consumer: Consumer) -> None:
        try:
            async with asyncio.timeout(1):
                batch = await anext(aiter(consumer.batches()))
        except MinibrokerError:
            raise
        except TimeoutError:
            return
        for record in batch:
            self._note(record, consumer)

    async def ask_everything(
        self, consumer: Consumer, partitions: list[TopicPartition], random: Random, *, is_healed: bool = False
    ) -> None:
        """Ask for log starts, log ends and the first record at or after a time."""

        def told(partition: TopicPartition, question: str, asked_ms: int, offset: int | None, time_ms: int) -> None:
            answer = OffsetTold(self._who, partition, question, asked_ms, offset, time_ms, now_s(), is_healed)
            self._answers.offsets.append(answer)

        for partition, offset in (await consumer.beginning_offsets(partitions)).items():
            told(partition, "beginning", 0, offset, -1)
        for partition, offset in (await consumer.end_offsets(partitions)).items():
            told(partition, "end", 0, offset, -1)
        for _ in range(10 if is_healed else 1):
            asked_ms = WALL_CLOCK_START_MS + random.randrange(-120_000, 450_000)
            for partition, found in (await consumer.offsets_for_times(dict.fromkeys(partitions, asked_ms))).items():
                if found is None:
                    told(partition, "time", asked_ms, None, -1)
                else:
                    told(partition, "time", asked_ms, found.offset, found.timestamp_ms)

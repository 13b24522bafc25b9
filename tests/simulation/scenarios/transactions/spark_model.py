"""A model of Spark's streaming writes, for scenarios: tasks and drivers are processes that are killed and paused.

As Spark does, a driver writes a batch's input to the checkpoint, runs the tasks, calls `commit`, and writes to the
checkpoint that the batch is done. A new driver repeats the last batch that is not done. The model is harsher than
Spark: each driver divides the rows of a batch among another number of tasks, in another order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.exactly_once import (
    Place,
    WrittenInTransaction,
    abort_batch,
    commit_batch,
    prepare_rows,
)
from minibroker.spark_jobs.source.options import WriteOptions

NAME = "minibroker-spark-query"
TOPIC = "output"
PARTITIONS = 2
ROWS = 12
"""Rows of a batch."""
MAX_ATTEMPTS = 4


@dataclass
class Query:
    """A streaming query, and its checkpoint. `timeout_ms` is its option transactionTimeout."""

    cluster: VirtualCluster
    batches: int
    timeout_ms: int = 60_000
    tasks: int | None = None
    """The number of tasks of each batch; None: at random."""
    done: int = 0
    """The batches that the checkpoint has as done."""
    errors: list[str] = field(default_factory=list)
    """The errors of drivers."""
    task_fault: Callable[[VirtualWorld, Place], None] | None = None
    """Called with the process of each attempt before it runs."""

    @property
    def options(self) -> WriteOptions:
        return WriteOptions(self.cluster.bootstrap, TOPIC, is_exactly_once=True, transaction_timeout_ms=self.timeout_ms)

    def rows(self, batch: int) -> list[int]:
        return list(range(batch * ROWS, (batch + 1) * ROWS))

    def expected(self) -> list[int]:
        return list(range(self.batches * ROWS))

    def __post_init__(self) -> None:
        self.random = self.cluster.simulation.random("spark")

    # -- drivers --

    def start_driver(self) -> tuple[VirtualWorld, asyncio.Task[None]]:
        world = self.cluster.client("driver")
        return world, world.process.start(self._drive(world), "driver")

    async def run_to_its_end(self, attempts: int = 5) -> None:
        """Start drivers until one has done all batches."""
        for _ in range(attempts):
            _, driver = self.start_driver()
            await asyncio.wait([driver])
            if self.done == self.batches and driver.exception() is None:
                return
        raise AssertionError(f"{self.done} batches are done after {attempts} drivers: {self.errors}")

    async def _drive(self, world: VirtualWorld) -> None:
        while self.done < self.batches:
            batch = self.done
            try:
                messages = await self._run_tasks(world, batch)
                try:
                    await commit_batch(self.options, NAME, batch, messages, world)
                except Exception:
                    await abort_batch(self.options, NAME, batch, messages, world=world)
                    raise
            except Exception as error:
                self.errors.append(str(error))
                raise
            self.done = max(self.done, batch + 1)

    async def _run_tasks(self, world: VirtualWorld, batch: int) -> list[WrittenInTransaction]:
        rows = self.rows(batch)
        if self.tasks is None:
            self.random.shuffle(rows)
        tasks = self.tasks or self.random.randint(1, 4)
        shares = [rows[task::tasks] for task in range(tasks)]
        return await asyncio.gather(*(self._run_task(batch, task, share) for task, share in enumerate(shares)))

    async def _run_task(self, batch: int, task: int, rows: list[int]) -> WrittenInTransaction:
        """Try until an attempt succeeds, as Spark's scheduler does."""
        for attempt in range(MAX_ATTEMPTS):
            world = self.cluster.client("executor")
            place = Place(NAME, batch, task, attempt)
            if self.task_fault is not None:
                self.task_fault(world, place)
            try:
                async with asyncio.timeout(30):
                    return await _of(world, prepare_rows(self.options, place, [batch_of(rows)], world))
            except (ProcessKilled, TimeoutError):
                continue
        raise AssertionError(f"{place} has failed {MAX_ATTEMPTS} times")


async def _of(world: VirtualWorld, coroutine: Coroutine[Any, Any, WrittenInTransaction]) -> WrittenInTransaction:
    """Run in that process. If the caller is cancelled, the process goes on: Spark gives up a lost executor alone."""
    task = world.process.start(coroutine)
    while not task.done():
        if not world.process.alive:
            raise ProcessKilled(str(world.process))
        await asyncio.wait([task], timeout=0.5)
    return task.result()


def batch_of(rows: list[int]) -> pyarrow.RecordBatch:
    return pyarrow.record_batch(
        {
            "value": pyarrow.array([b"%d" % row for row in rows]),
            "partition": pyarrow.array([row % PARTITIONS for row in rows], pyarrow.int32()),
        }
    )


async def committed(cluster: VirtualCluster) -> list[int]:
    """Return what read_committed consumers read up to the end of the logs, sorted. The last stable offset must reach
    the end, since nothing may stay open."""
    partitions = [TopicPartition(TOPIC, index) for index in range(PARTITIONS)]
    world = cluster.client("reader")

    async def read() -> list[int]:
        values: list[int] = []
        async with (
            asyncio.timeout(300),
            Consumer(
                cluster.bootstrap, world=world, partitions=partitions, isolation_level="read_uncommitted"
            ) as everything,
        ):
            ends = await everything.end_offsets(partitions)
        async with (
            asyncio.timeout(300),
            Consumer(
                cluster.bootstrap, world=world, partitions=partitions, isolation_level="read_committed"
            ) as consumer,
        ):
            for partition, end in ends.items():
                while await consumer.position(partition) < end:
                    values += [int(record.value or b"") for record in await consumer.poll(timeout_ms=500)]
        return sorted(values)

    return await world.process.run(read())

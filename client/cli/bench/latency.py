"""`minibroker bench latency`: the time until a record is acknowledged, and until it is read.

The schedule is open: the rate alone determines when a record is due, and all times count from then. A sender that
waited for answers, or counted from its late sends, would omit what a user feels while the cluster stalls (coordinated
omission). The schedule has ticks of a millisecond, at which all due records are sent; a finer one would need a loop
that never sleeps, on the machine that is measured.

One process sends and reads, so one clock times both. The lateness of its own sends is printed as well: those times are
part of the other rows, and not caused by the cluster.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections.abc import Sequence
from random import SystemRandom
from typing import Annotated

import typer

from minibroker.client.cli.bench.produce import SizeOption
from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.topic import PartitionsOption, ReplicationFactorOption, ensure_topic
from minibroker.client.cli.bench.values import Values
from minibroker.client.cli.records.produce import Acks, AcksOption, Codec, CompressionOption, open_producer
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import (
    API_TIMEOUT_MS,
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import checked_topic
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

_TICK_S = 0.001
_SENT_AT_ONCE = 1_000
"""Records between two calls of `drain` when the sender has to catch up."""
_SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


def latency(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Created if it does not exist.")] = "bench-latency",
    rate: Annotated[float, typer.Option(min=1, max=1_000_000, help="Records per second.")] = 5_000,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Duration in seconds.")] = 10,
    size: SizeOption = 100,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    partitions: PartitionsOption = None,
    replication_factor: ReplicationFactorOption = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send at a steady rate and measure the time from a record's due time until it is acknowledged and read."""
    checked_topic(topic)
    servers = bootstrap_servers(bootstrap, data)
    measurement = Measurement(rate, math.ceil(rate * seconds), size)
    run(measurement.make(servers, topic, partitions, replication_factor, acks, compression))
    rows = {
        name: {share: round(percentile(times, _SHARES[share]) * 1_000, 2) for share in _SHARES}
        for name, times in (
            ("sent", sorted(measurement.sent_after_s)),
            ("acknowledged", sorted(measurement.acknowledged_after_s)),
            ("consumed", sorted(measurement.consumed_after_s)),
        )
    }
    figures: dict[str, object] = {
        "action": "latency",
        "topic": topic,
        "records": measurement.count,
        "rate": rate,
        "records_per_second": round(measurement.count / measurement.seconds),
    }
    if format is Format.JSON:
        print_json({**figures, **{f"{name}_ms": row for name, row in rows.items()}})
        return
    print_table(
        ("ms from when it was due until", *_SHARES),
        [(name, *(row[share] for share in _SHARES)) for name, row in rows.items()],
    )
    sys.stdout.write(
        f"{counted(measurement.count, 'record')}, {figures['records_per_second']} per second, all "
        "acknowledged, read and checked\n"
    )


class Measurement:
    """Sends `count` records at `rate` per second. Times are in seconds since a record was due, by the record's
    number."""

    def __init__(self, rate: float, count: int, size: int) -> None:
        self.count = count
        self.seconds = 0.0
        """Seconds from the first due time until the last record was sent and acknowledged."""
        self.sent_after_s = array("d", bytes(8 * count))
        self.acknowledged_after_s = array("d", bytes(8 * count))
        self.consumed_after_s = array("d", bytes(8 * count))
        self._rate = rate
        self._size = size
        self._values = Values()
        self._run = SystemRandom().getrandbits(32)
        self._began = 0.0

    async def make(
        self,
        bootstrap: str,
        topic: str,
        partitions: int | None,
        replication_factor: int | None,
        acks: Acks,
        compression: Codec,
    ) -> None:
        """Raises MinibrokerError if a record fails, or is not read unchanged and exactly once."""
        description = await ensure_topic(bootstrap, topic, partitions, replication_factor)
        assigned = [TopicPartition(topic, p.partition) for p in description.partitions]
        async with (
            Consumer(
                bootstrap,
                partitions=assigned,
                auto_offset_reset="latest",
                client_id="minibroker-cli",
                **security.chosen(),
            ) as consumer,
            open_producer(bootstrap, acks, compression) as producer,
        ):
            for partition in assigned:
                await consumer.position(partition)
            await self._warm_up(producer, consumer, assigned)
            reading = asyncio.create_task(self._read(consumer))
            try:
                await self._send(producer, topic)
                async with asyncio.timeout(API_TIMEOUT_MS / 1_000):
                    await reading
            except TimeoutError:
                missing = sum(1 for after_s in self.consumed_after_s if not after_s)
                raise MinibrokerError(
                    f"{missing} of {counted(self.count, 'record')} not read within {API_TIMEOUT_MS // 1_000} "
                    "s of the last acknowledgement: see `minibroker status` (with --acks 0 or 1 records may "
                    "be lost, otherwise never)"
                ) from None
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _warm_up(self, producer: Producer, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Send a record to every partition, so that connections are open and metadata is known on both sides."""
        other_run = self._run ^ 1
        for number, (topic, partition) in enumerate(partitions):
            producer.send(topic, self._values.make(other_run, number, self._size), partition=partition)
        await producer.flush()
        missing = len(partitions)
        async with asyncio.timeout(API_TIMEOUT_MS / 1_000):
            async for batch in consumer.batches():
                missing -= sum(1 for value in batch.values if (self._values.recognise(value) or (0,))[0] == other_run)
                if missing <= 0:
                    return

    def _due_at(self, number: int) -> float:
        return self._began + math.floor(number / self._rate / _TICK_S) * _TICK_S

    async def _send(self, producer: Producer, topic: str) -> None:
        self._began = time.perf_counter() + _TICK_S
        number = 0
        collecting: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def collected(task: asyncio.Task[None]) -> None:
            collecting.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        try:
            while number < self.count and not failures:
                while (pause_s := self._due_at(number) - time.perf_counter()) > 0:  # noqa: ASYNC110 (a schedule)
                    await asyncio.sleep(pause_s)
                now = time.perf_counter()
                first = number
                deliveries: list[Delivery] = []
                while number < self.count and self._due_at(number) <= now and len(deliveries) < _SENT_AT_ONCE:
                    deliveries.append(producer.send(topic, self._values.make(self._run, number, self._size)))
                    self.sent_after_s[number] = now - self._due_at(number)
                    number += 1
                # One task for the deliveries of a tick: those of a batch complete together, so none delays another.
                task = asyncio.create_task(self._collect(first, deliveries))
                task.add_done_callback(collected)
                collecting.add(task)
                await producer.drain()
            while collecting:
                await asyncio.wait(collecting)
        finally:
            for task in collecting:
                task.cancel()
        if failures:
            raise failures[0]
        self.seconds = time.perf_counter() - self._began

    async def _collect(self, first: int, deliveries: Sequence[Delivery]) -> None:
        for number, delivery in enumerate(deliveries, first):
            await delivery
            self.acknowledged_after_s[number] = time.perf_counter() - self._due_at(number)

    async def _read(self, consumer: Consumer) -> None:
        """Read until every record of this run has arrived. Records of other runs are skipped."""
        missing = self.count
        async for batch in consumer.batches():
            now = time.perf_counter()
            for value in batch.values:
                found = self._values.recognise(value)
                if found is None and value is not None and int.from_bytes(value[:4], "big") == self._run:
                    raise MinibrokerError(f"a record of {batch!r} differs from the one that was sent: please report it")
                if found is None or found[0] != self._run:
                    continue
                number = found[1]
                if self.consumed_after_s[number]:
                    raise MinibrokerError(f"record {number} was read a second time in {batch!r}: please report it")
                self.consumed_after_s[number] = now - self._due_at(number)
                missing -= 1
            if not missing:
                return

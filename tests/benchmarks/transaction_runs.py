"""One run of transactions or of reading them, as a process of `bench_transactions`.

    python -m tests.benchmarks.transaction_runs '{"action": "produce", "client": "minibroker", ...}'

The argument is the job (`Job`); the figures are printed as JSON. Clients have their default settings, except for
acks=all. A run fails if a record or a transaction fails, or if a reader does not find every record.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import SystemRandom
from typing import Literal

import confluent_kafka
import msgspec
import uvloop

from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.values import ContentCheck, Values
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.protocol.model import TopicPartition

PATIENCE_S = 120.0
WARM_UP = 20
"""Transactions before the measured ones."""
Level = Literal["read_committed", "read_uncommitted"]
LEVELS: tuple[Level, Level] = ("read_committed", "read_uncommitted")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    client: str
    bootstrap: str
    topic: str
    partitions: int
    size: int
    """Bytes per value."""
    transactions: int
    seconds: float = PATIENCE_S
    """A slower run ends with fewer transactions."""
    each: int
    """Records of a transaction."""
    producers: int = 1
    """Producers that write so many transactions each, beside each other. The figures are those of the first one."""
    is_transactional: bool = True
    """If not, the idempotent producer waits for the acknowledgements of as many records as a transaction has."""
    reads: int = 1
    """Reads of the topic with each isolation level."""


Partitions = dict[int, list[bytes]]


Transaction = Sequence[tuple[int, bytes]]
"""The partition and the value of each record."""


def values_of(job: Job) -> Iterator[Transaction]:
    """The partitions and values of each transaction. Its records go to the partitions in turns, and each transaction
    begins with the next partition."""
    values, run, number = Values(), SystemRandom().getrandbits(32), itertools.count()
    for transaction in range(WARM_UP + job.transactions):
        yield [
            ((transaction + each) % job.partitions, values.make(run, next(number), job.size))
            for each in range(job.each)
        ]


def figures(job: Job, times_s: list[float], seconds: float) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "records_per_second": len(times_s) * job.each / seconds,
        "p50_ms": 1_000 * percentile(ordered, 0.5),
        "p99_ms": 1_000 * percentile(ordered, 0.99),
    }


def confluent_produce(job: Job, number: int) -> dict[str, float]:
    own = {"bootstrap.servers": job.bootstrap, "acks": "all", "enable.idempotence": True, "log_level": 0}
    ours = {"transactional.id": f"{job.topic}-{number}"} if job.is_transactional else {}
    producer = confluent_kafka.Producer({**own, **ours, "queue.buffering.max.messages": 1_000_000})
    problems: list[object] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            problems.append(error)

    if job.is_transactional:
        producer.init_transactions(PATIENCE_S)
    everything = list(values_of(job))
    times_s: list[float] = []
    began_s = 0.0
    for done, records in enumerate(everything):
        start_s = time.perf_counter()
        if done == WARM_UP:
            began_s = start_s
        elif done > WARM_UP and start_s > began_s + job.seconds:
            break
        if job.is_transactional:
            producer.begin_transaction()
        for partition, value in records:
            producer.produce(job.topic, value, partition=partition, on_delivery=delivered)
        if job.is_transactional:
            producer.commit_transaction(PATIENCE_S)
        elif producer.flush(PATIENCE_S):
            raise SystemExit(f"no answer within {PATIENCE_S:.0f} s")
        times_s.append(time.perf_counter() - start_s)
    seconds = time.perf_counter() - began_s
    if problems:
        raise SystemExit(f"{len(problems)} records failed: {problems[:3]}")
    return figures(job, times_s[WARM_UP:], seconds)


async def native_produce(job: Job, number: int, everything: list[Transaction]) -> dict[str, float]:
    times_s: list[float] = []
    began_s = 0.0
    async with Producer(
        job.bootstrap, acks="all", transactional_id=f"{job.topic}-{number}" if job.is_transactional else None
    ) as producer:
        for done, records in enumerate(everything):
            start_s = time.perf_counter()
            if done == WARM_UP:
                began_s = start_s
            elif done > WARM_UP and start_s > began_s + job.seconds:
                break
            if job.is_transactional:
                async with producer.transaction():
                    for partition, value in records:
                        producer.send(job.topic, value, partition=partition)
            else:
                for partition, value in records:
                    producer.send(job.topic, value, partition=partition)
                await producer.flush()
            times_s.append(time.perf_counter() - start_s)
        seconds = time.perf_counter() - began_s
    return figures(job, times_s[WARM_UP:], seconds)


def produce(job: Job) -> dict[str, float]:
    async def all_native() -> list[dict[str, float]]:
        # All values first: making them takes the event loop for longer than a start's requests may.
        of_each = [list(values_of(job)) for _ in range(job.producers)]
        return await asyncio.gather(*(native_produce(job, *each) for each in enumerate(of_each)))

    if job.client != "confluent-kafka":
        return uvloop.run(all_native())[0]
    with ThreadPoolExecutor(job.producers) as threads:
        first, *_ = threads.map(partial(confluent_produce, job), range(job.producers))
    return first


# --- reading ---


def confluent_read(job: Job, level: Level) -> tuple[float, Partitions]:
    own = {"bootstrap.servers": job.bootstrap, "group.id": "none", "enable.auto.commit": False, "log_level": 0}
    # The default pause of a second would decide the result: see bench_kafka_clients.
    consumer = confluent_kafka.Consumer({**own, "isolation.level": level, "fetch.queue.backoff.ms": 10})
    consumer.assign([confluent_kafka.TopicPartition(job.topic, partition, 0) for partition in range(job.partitions)])
    read: Partitions = defaultdict(list)

    def take(most: int) -> int:
        messages = consumer.consume(most, PATIENCE_S)
        if not messages:
            raise SystemExit(f"{level}: no more records after {PATIENCE_S:.0f} s")
        for message in messages:
            if message.error() is not None:
                raise SystemExit(str(message.error()))
            read[message.partition() or 0].append(message.value() or b"")
        return len(messages)

    left = count_of(job) - take(1)
    began_s = time.perf_counter()
    while left:
        left -= take(min(left, 10_000))
    seconds = time.perf_counter() - began_s
    consumer.close()
    return (count_of(job) - 1) / seconds, read


async def native_read(job: Job, level: Level) -> tuple[float, Partitions]:
    partitions = [TopicPartition(job.topic, partition) for partition in range(job.partitions)]
    read: Partitions = defaultdict(list)
    async with Consumer(job.bootstrap, partitions=partitions, isolation_level=level) as consumer:
        done, began_s = 0, time.perf_counter()
        async with asyncio.timeout(PATIENCE_S):
            async for batch in consumer.batches():
                read[batch.partition] += [value or b"" for value in batch.values]
                done += len(batch)
                if done == count_of(job):
                    break
        seconds = time.perf_counter() - began_s
    return done / seconds, read


def count_of(job: Job) -> int:
    return job.producers * (WARM_UP + job.transactions) * job.each


def consume(job: Job) -> dict[Level, list[float]]:
    """Return the records per second of each level. The levels take turns; the first read of each is checked and not
    measured."""

    def read(level: Level) -> tuple[float, Partitions]:
        gc.collect()
        return confluent_read(job, level) if job.client == "confluent-kafka" else uvloop.run(native_read(job, level))

    for level in LEVELS:
        check = ContentCheck()
        for partition, values in read(level)[1].items():
            check.add(partition, values)
        verdict = check.verdict()
        if verdict.problem or verdict.checked != count_of(job):
            raise SystemExit(f"{level}: {verdict.checked} of {count_of(job)} came back right: {verdict.problem}")
    rates: dict[Level, list[float]] = {level: [] for level in LEVELS}
    order = list(LEVELS)
    for _ in range(job.reads):
        for level in order:
            rates[level].append(read(level)[0])
        order.reverse()
    return rates


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=Job)
    found: object = produce(asked) if asked.action == "produce" else consume(asked)
    print(msgspec.json.encode(found).decode())

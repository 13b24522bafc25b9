"""One run of one Kafka client, as a process of `bench_kafka_clients`.

    python -m tests.benchmarks.kafka_client_runs '{"action": "produce", "client": "aiokafka", ...}'

The argument is the job (`Job`); the figures are printed as JSON. Clients have their default settings, except for
acks=all and the job's own settings. A run that loses, repeats or alters a record fails.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import SystemRandom
from typing import Any

import confluent_kafka
import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition

from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.values import ContentCheck, Values
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.protocol.model import TopicPartition

PATIENCE_S = 120.0
"""A limit longer than any measured stall."""
_TICK_S = 0.001
_AFTER_KILL_S = 1.0
"""The gap ends when a record sent this long after the kill is acknowledged."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    client: str
    bootstrap: str
    topic: str
    compared_with: tuple[str, str] | None = None
    """The bootstrap list and the topic that `consume` reads in turns with the job's own."""
    reads: int = 1
    """Measured reads of each topic."""
    partitions: int
    """Number of the topic's partitions."""
    size: int
    """Bytes per value."""
    count: int = 0
    """Number of records; `gap` sends until the gap is over."""
    rate: float = 0.0
    """Records per second, for `latency` and `gap`."""
    partition: int | None = None
    """The only partition that is written to, if any."""
    turn: int = 0
    """Records per turn of each partition; 0 uses the client's partitioner."""
    settings: dict[str, Any] = {}
    """Settings of the producer or consumer, by the client's names."""


Measured = dict[str, float]
Rates = list[float]
Partitions = dict[int, list[bytes]]


def values_of(job: Job) -> Iterator[bytes]:
    """Yield an endless sequence of distinct, incompressible values that a reader can verify."""
    values, run = Values(), SystemRandom().getrandbits(32)
    return (values.make(run, number, job.size) for number in itertools.count())


def partitions_of(job: Job, any: Any) -> Iterator[Any]:
    """Yield the partition of each record; `any` is the client's value for the choice of its partitioner."""
    if not job.turn:
        return itertools.repeat(any)
    return (number // job.turn % job.partitions for number in itertools.count())


# --- schedule and acknowledgements ---


class Course:
    """Records on an open schedule: each is due at its time, regardless of earlier records, and its latency counts from
    then. The schedule has ticks of a millisecond."""

    def __init__(self, job: Job) -> None:
        self.values = values_of(job)
        self.sent = 0
        self.killed_at_s: float | None = None
        self.problems: list[str] = []
        self.latencies_s: list[float] = []
        self.acknowledged_at_s: list[float] = []
        self._job = job
        self._began_s = 0.0
        self._is_recovered = False

    def begin(self) -> None:
        self._began_s = time.perf_counter() + _TICK_S

    def due(self) -> Iterator[int]:
        """Yield the numbers of the records that are due now."""
        now_s = time.perf_counter()
        while not self._is_sent() and self._due_at_s(self.sent) <= now_s:
            self.sent += 1
            yield self.sent - 1

    def pause_s(self) -> float:
        """Time until the next record is due."""
        return max(0.0, self._due_at_s(self.sent) - time.perf_counter())

    def note(self, number: int, error: object) -> None:
        """Record that the record was acknowledged, or failed."""
        now_s = time.perf_counter()
        if error is not None:
            self.problems.append(str(error))
            return
        due_at_s = self._due_at_s(number)
        self.latencies_s.append(now_s - due_at_s)
        self.acknowledged_at_s.append(now_s)
        if self.killed_at_s is not None and due_at_s > self.killed_at_s + _AFTER_KILL_S:
            self._is_recovered = True

    def is_over(self) -> bool:
        """Whether no more records are due. Raises TimeoutError if no record is acknowledged after the kill."""
        if self.killed_at_s is not None and time.perf_counter() > self.killed_at_s + PATIENCE_S:
            raise TimeoutError(f"no write within {PATIENCE_S:.0f} s of the kill; {self.problems[-1:]}")
        return self._is_sent()

    def _is_sent(self) -> bool:
        return self._is_recovered or 0 < self._job.count <= self.sent

    def _due_at_s(self, number: int) -> float:
        return self._began_s + number / self._job.rate // _TICK_S * _TICK_S

    def latency(self) -> Measured:
        if self.problems or len(self.latencies_s) != self._job.count:
            raise SystemExit(f"{len(self.latencies_s)} of {self._job.count} acknowledged: {self.problems[:3]}")
        ordered = sorted(self.latencies_s)
        return {"p50_ms": 1_000 * percentile(ordered, 0.5), "p99_ms": 1_000 * percentile(ordered, 0.99)}

    def gap(self) -> Measured:
        """The longest time without an acknowledgement, before the kill and in total."""
        assert self.killed_at_s is not None
        pairs = list(itertools.pairwise(sorted(self.acknowledged_at_s)))
        return {
            "gap_ms": 1_000 * max(after - before for before, after in pairs),
            "quiet_gap_ms": 1_000 * max(after - before for before, after in pairs if after < self.killed_at_s),
            "failed": len(self.problems),
        }

    def expect_kill(self) -> None:
        """Report on standard output that acknowledgements keep up with the rate, and read the time of the kill from
        standard input."""

        def listen() -> None:
            sys.stdin.readline()
            self.killed_at_s = time.perf_counter()

        print("steady", flush=True)
        threading.Thread(target=listen, daemon=True).start()


# --- confluent-kafka ---


def confluent_producer(job: Job, **settings: Any) -> confluent_kafka.Producer:
    own = {"bootstrap.servers": job.bootstrap, "acks": "all", "log_level": 0}
    return confluent_kafka.Producer({**own, **job.settings, **settings})


def confluent_warm_up(job: Job, producer: confluent_kafka.Producer, values: Iterator[bytes]) -> None:
    """Send a record to every partition, which opens the connections."""
    for partition in range(job.partitions):
        producer.produce(job.topic, next(values), partition=partition)
    if producer.flush(PATIENCE_S):
        raise SystemExit(f"{job.bootstrap}: no answer within {PATIENCE_S:.0f} s")


def confluent_produce(job: Job) -> Measured:
    values = list(itertools.islice(values_of(job), job.count))
    problems: list[Any] = []
    producer = confluent_producer(job, **{"delivery.report.only.error": True})
    confluent_warm_up(job, producer, iter(values))
    began_s = time.perf_counter()
    for value, partition in zip(values[job.partitions :], partitions_of(job, any=-1), strict=False):
        while True:
            try:
                producer.produce(
                    job.topic, value, partition=partition, on_delivery=lambda error, _: problems.append(error)
                )
            except BufferError:
                producer.poll(0.01)
            else:
                break
    left = producer.flush(PATIENCE_S)
    seconds = time.perf_counter() - began_s
    if left or problems:
        raise SystemExit(f"{left} records were not answered, {len(problems)} failed: {problems[:3]}")
    return {"records_per_second": (job.count - job.partitions) / seconds}


def confluent_consume(job: Job) -> tuple[float, Partitions]:
    own = {"bootstrap.servers": job.bootstrap, "group.id": "none", "enable.auto.commit": False, "log_level": 0}
    consumer = confluent_kafka.Consumer({**own, **job.settings})
    consumer.assign([confluent_kafka.TopicPartition(job.topic, partition, 0) for partition in range(job.partitions)])
    read: Partitions = defaultdict(list)

    def take(most: int) -> int:
        messages = consumer.consume(most, PATIENCE_S)
        for message in messages:
            if message.error() is not None:
                raise SystemExit(str(message.error()))
            read[message.partition() or 0].append(message.value() or b"")
        return len(messages)

    left = job.count - take(1)
    began_s = time.perf_counter()
    while left and (taken := take(min(left, 10_000))):
        left -= taken
    seconds = time.perf_counter() - began_s
    consumer.close()
    return (job.count - 1) / seconds, read


def confluent_pace(job: Job, course: Course, is_steady: Callable[[], None]) -> None:
    producer = confluent_producer(job)
    confluent_warm_up(job, producer, course.values)
    partition = -1 if job.partition is None else job.partition

    def noted(number: int) -> Callable[[Any, Any], None]:
        return lambda error, _: course.note(number, error)

    course.begin()
    is_steady()
    while not course.is_over():
        for number in course.due():
            producer.produce(job.topic, next(course.values), partition=partition, on_delivery=noted(number))
        producer.poll(course.pause_s())
    producer.flush(PATIENCE_S)


# --- aiokafka ---


def aiokafka_producer(job: Job) -> AIOKafkaProducer:
    return AIOKafkaProducer(bootstrap_servers=job.bootstrap, acks="all", **job.settings)


async def aiokafka_warm_up(job: Job, producer: AIOKafkaProducer, values: Iterator[bytes]) -> None:
    for partition in range(job.partitions):
        await producer.send_and_wait(job.topic, next(values), partition=partition)


async def aiokafka_produce(job: Job) -> Measured:
    values = list(itertools.islice(values_of(job), job.count))
    async with aiokafka_producer(job) as producer:
        await aiokafka_warm_up(job, producer, iter(values))
        began_s = time.perf_counter()
        futures = [await producer.send(job.topic, value) for value in values[job.partitions :]]
        await producer.flush()
        seconds = time.perf_counter() - began_s
        await asyncio.gather(*futures)  # raises the first failure
    return {"records_per_second": (job.count - job.partitions) / seconds}


async def aiokafka_consume(job: Job) -> tuple[float, Partitions]:
    read: Partitions = defaultdict(list)
    async with AIOKafkaConsumer(bootstrap_servers=job.bootstrap, group_id=None, **job.settings) as consumer:
        partitions = [AioTopicPartition(job.topic, partition) for partition in range(job.partitions)]
        consumer.assign(partitions)
        for partition in partitions:
            consumer.seek(partition, 0)

        async def take(most: int | None) -> int:
            taken = 0
            by_partition = await consumer.getmany(timeout_ms=int(PATIENCE_S * 1_000), max_records=most)
            for partition, records in by_partition.items():
                read[partition.partition] += [record.value for record in records]
                taken += len(records)
            return taken

        left = job.count - await take(1)
        began_s = time.perf_counter()
        while left > 0 and (taken := await take(None)):
            left -= taken
        seconds = time.perf_counter() - began_s
    return (job.count - 1) / seconds, read


async def aiokafka_pace(job: Job, course: Course, is_steady: Callable[[], None]) -> None:
    def noted(number: int) -> Callable[[asyncio.Future[Any]], None]:
        return lambda future: course.note(number, future.exception())

    async with aiokafka_producer(job) as producer:
        await aiokafka_warm_up(job, producer, course.values)
        course.begin()
        is_steady()
        while not course.is_over():
            for number in course.due():
                future = await producer.send(job.topic, next(course.values), partition=job.partition)
                future.add_done_callback(noted(number))
            await asyncio.sleep(course.pause_s())
        await producer.flush()


# --- minibroker's own client, which also writes topics that others read ---


async def native_produce(job: Job) -> Measured:
    values = list(itertools.islice(values_of(job), job.count))
    async with Producer(job.bootstrap, acks="all", **job.settings) as producer:
        began_s = time.perf_counter()
        for value, partition in zip(values, partitions_of(job, any=None), strict=False):
            producer.send(job.topic, value, partition=partition)
            await producer.drain()
        await producer.flush()
    return {"records_per_second": job.count / (time.perf_counter() - began_s)}


async def native_consume(job: Job) -> tuple[float, Partitions]:
    read: Partitions = defaultdict(list)
    partitions = [TopicPartition(job.topic, partition) for partition in range(job.partitions)]
    async with Consumer(job.bootstrap, partitions=partitions, **job.settings) as consumer:
        began_s, first, left = 0.0, 0, job.count
        async for batch in consumer.batches():
            read[batch.partition] += [value or b"" for value in batch.values]
            left -= len(batch.values)
            if not began_s:
                began_s, first = time.perf_counter(), len(batch.values)
            if left <= 0:
                break
        seconds = time.perf_counter() - began_s
    return (job.count - first) / seconds, read


# --- all of them ---


def produce(job: Job) -> Measured:
    if job.client == "confluent-kafka":
        return confluent_produce(job)
    return asyncio.run(aiokafka_produce(job) if job.client == "aiokafka" else native_produce(job))


def consume(job: Job) -> tuple[Rates, Rates]:
    """Return the records per second, from the first record on, of the job's own topic and of the other one. The first
    read of each is checked and not measured.

    One process reads both, because two processes with the same work differ by more than two reads of one process. The
    garbage of one read is collected before the next."""

    def read(source: Job) -> tuple[float, Partitions]:
        gc.collect()
        if source.client == "confluent-kafka":
            return confluent_consume(source)
        return asyncio.run(aiokafka_consume(source) if source.client == "aiokafka" else native_consume(source))

    sources = [job]
    if job.compared_with is not None:
        bootstrap, topic = job.compared_with
        sources.append(msgspec.structs.replace(job, bootstrap=bootstrap, topic=topic))
    for source in sources:
        check_content(source, read(source)[1])
    rates: tuple[Rates, Rates] = ([], [])
    turns = list(zip(rates, sources, strict=False))
    for _ in range(job.reads):
        for measured, source in turns:
            measured.append(read(source)[0])
        turns.reverse()
    return rates


def check_content(job: Job, read: Partitions) -> None:
    check = ContentCheck()
    for partition, values in read.items():
        check.add(partition, values)
    verdict = check.verdict()
    if verdict.problem or verdict.checked != job.count:
        raise SystemExit(f"{job.count} records were sent, {verdict.checked} came back right: {verdict.problem}")


def pace(job: Job, is_steady: Callable[[Course], None] = lambda course: None) -> Course:
    course = Course(job)
    if job.client == "confluent-kafka":
        confluent_pace(job, course, lambda: is_steady(course))
    else:
        asyncio.run(aiokafka_pace(job, course, lambda: is_steady(course)))
    return course


ACTIONS: dict[str, Callable[[Job], object]] = {
    "produce": produce,
    "consume": consume,
    "latency": lambda job: pace(job).latency(),
    "gap": lambda job: pace(job, Course.expect_kill).gap(),
}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # aiokafka logs every failed connection to a killed leader
    asked = msgspec.json.decode(sys.argv[1], type=Job)
    print(msgspec.json.encode(ACTIONS[asked.action](asked)).decode())

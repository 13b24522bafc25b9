"""Run Kafka clients against a real cluster of three brokers, and kill leaders and coordinators under them.

    python -m tests.kafka_clients.matrix [--only NAME,...] [--brief] [--cache DIR] [--keep DIR]

Each client writes records with each of its codecs and reads them back; seeks and lists offsets by time; reads batches
that minibroker's producer wrote in columns; writes (idempotently) and reads (by assignment) while a leader is killed;
reads in a group with each strategy, the last while its coordinator is killed; moves records in transactions while their
coordinator is killed, is fenced and times out; and administers topics and groups. No record may be lost, duplicated,
reordered or altered. Kafka Streams counts records, exactly once. Kafka's console tools, Connect and Spark's connector
do their usual work. With --brief each client's groups use one strategy, which differs between clients.

Prints a line for each failed check, a table, and those lines again. Exit code 1 if a check failed or a client could not
be built. SIGINT and SIGTERM also end the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import uvloop

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.who import BrokerId, LeaderOf
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from tests.kafka_clients.programs import PROGRAMS, Build, CannotBuild, Program
from tests.kafka_clients.records import (
    NULL,
    PARTITIONS,
    full_record,
    parse_read,
    problems_of_group,
    problems_of_reading,
)
from tests.waiting import until

BROKERS = 3
CHECK_TIMEOUT_S = 150.0
OF_EACH_CODEC = 300
UNDER_FIRE = 1_200
PER_SECOND = 200
FED = 150
"""Records per step of the group check."""
SETTINGS = {
    "group.initial.rebalance.delay.ms": "300",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


class Failed(Exception):
    """A check found a problem."""


class Run:
    """A running program and its output."""

    def __init__(self, process: asyncio.subprocess.Process, what: str) -> None:
        self._process = process
        self._what = what
        self.lines: list[list[str]] = []
        self._errors: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, lambda line: self.lines.append(line.split("\t")))),
            asyncio.create_task(self._read(process.stderr, self._errors.append)),
        ]

    @staticmethod
    async def _read(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
        while line := await stream.readline():
            take(line.decode().rstrip("\n"))

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def of(self, kind: str) -> list[list[str]]:
        return [line for line in self.lines if line[0] == kind]

    async def until(self, condition: Callable[[], object], what: str, within_s: float = 90) -> None:
        """Wait until the condition is true. Raises Failed if the program ends first, or after `within_s`."""
        try:
            await until(lambda: condition() or self.has_ended, within_s, every_s=0.02)
        except TimeoutError:
            raise Failed(f"{self._what}: no {what} within {within_s:.0f} s; {self.told()}") from None
        if not condition():
            await self.ended()
            if not condition():
                raise Failed(f"{self._what}: it ended without {what}; {self.told()}")

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        await self.ended()

    async def ended(self) -> None:
        """Wait for the program's end. Raises Failed unless it ended regularly."""
        await self._process.wait()
        await asyncio.gather(*self._readers)
        if self._process.returncode or self.lines[-1:] != [["end"]]:
            raise Failed(f"{self._what} ended with {self._process.returncode}; {self.told()}")

    async def kill(self) -> None:
        if not self.has_ended:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(*self._readers)

    def text(self) -> str:
        """All of its output."""
        return "\n".join([*(" ".join(line) for line in self.lines), *self._errors])

    def told(self) -> str:
        notes = [" ".join(line) for line in self.lines if line[0] in ("note", "failed")]
        kinds = {kind: len(self.of(kind)) for kind in sorted({line[0] for line in self.lines})}
        return f"it printed {kinds}; {' / '.join(notes[-3:] + self._errors[-4:])}"[:1_000]


class Bench:
    """A client with its own topics and its programs."""

    def __init__(
        self,
        cluster: LocalCluster,
        admin: Admin,
        name: str,
        program: Program,
        *,
        brokers: int = BROKERS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.admin = admin
        self.name = name
        self.program = program
        self.brokers = brokers
        self._environment = {**os.environ, **(environment or {})}
        if program.library_path:
            self._environment["LD_LIBRARY_PATH"] = program.library_path
        self.bootstrap = cluster.bootstrap()
        self.base_ms = int(time.time() * 1000) - 3_600_000

    async def topic(self, suffix: str) -> str:
        topic = f"{self.name}-{suffix}"
        await self.admin.create_topic(topic, partitions=PARTITIONS, replication_factor=BROKERS)
        return topic

    @asynccontextmanager
    async def running(self, verb: str, **arguments: object) -> AsyncIterator[Run]:
        words = [f"{name}={value}" for name, value in arguments.items()]
        process = await asyncio.create_subprocess_exec(
            *self.program.command,
            self.bootstrap,
            verb,
            *words,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        run = Run(process, f"{self.name} {verb}")
        try:
            yield run
        finally:
            await run.kill()

    async def run(self, verb: str, **arguments: object) -> Run:
        async with self.running(verb, **arguments) as run:
            await run.ended()
            return run

    def producing(self, topic: str, count: int, codecs: str, per_second: int = 0) -> dict[str, object]:
        arguments = {"topic": topic, "partitions": PARTITIONS, "first": 0, "count": count, "codecs": codecs}
        return {**arguments, "per_second": per_second, "base": self.base_ms}

    def judge(self, produced: Run, read: Run, sent: int) -> None:
        failed = [line for line in produced.lines if line[0] == "failed"]
        problems = [f"failed: {failed[0]} and {len(failed) - 1} more"] if failed else []
        acknowledged = {
            int(n): None if offset == "-1" else (int(partition), int(offset))
            for _, n, partition, offset in produced.of("ack")
        }
        if not failed and len(acknowledged) != sent:
            problems.append(f"{len(acknowledged)} of {sent} were acknowledged")
        base_ms = self.base_ms if self.program.has_timestamps else None
        found = map(parse_read, read.of("rec"))
        problems += problems_of_reading(acknowledged, list(found), self.program.expected, base_ms)
        if problems:
            raise Failed("; ".join(problems))

    @asynccontextmanager
    async def killed(self, partition: TopicPartition) -> AsyncIterator[int]:
        """Kill the partition's leader, and yield its id. At the end, restart it and wait until the cluster is whole."""
        [victim] = await asyncio.to_thread(self.cluster.kill, LeaderOf(partition))
        assert isinstance(victim, int)
        try:
            yield victim
        finally:
            await asyncio.to_thread(self.cluster.start, BrokerId(victim))
            await self.whole()

    async def whole(self) -> None:
        for _ in range(600):
            view = await asyncio.to_thread(self.cluster.view)
            if len(view.brokers) == self.brokers and view.partitions and not view.under_replicated_partitions():
                return
            await asyncio.sleep(0.1)
        raise Failed("the cluster is not whole again after 60 s")


class Feeder:
    """Writes records into the topics that groups read."""

    def __init__(self, bootstrap: str, topic: str, base_ms: int) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 2}
        )
        self._topic = topic
        self._base_ms = base_ms
        self.sent = 0

    async def feed(self, count: int, over_s: float = 0) -> None:
        for number in range(self.sent, self.sent + count):
            key, value, headers = full_record(number)
            self._producer.produce(
                self._topic,
                key=_content(key),
                value=_content(value),
                partition=number % PARTITIONS,
                timestamp=self._base_ms + number,
                headers=_headers(headers),
            )
            self._producer.poll(0)
            if over_s:
                await asyncio.sleep(over_s / count)
        self.sent += count
        left = await asyncio.to_thread(self._producer.flush, 90)
        if left:
            raise Failed(f"the test's own producer could not send {left} records")


def _content(text: str) -> bytes | None:
    return None if text == NULL else text.encode()


def _headers(text: str) -> list[tuple[str, Any]]:
    pairs = (each.split("=", 1) for each in text.split(","))
    return [(name, _content(value)) for name, value in pairs]


# -- the checks --


async def codecs(bench: Bench) -> None:
    topic = await bench.topic("codecs")
    sent = OF_EACH_CODEC * len(bench.program.codecs)
    produced = await bench.run("produce", **bench.producing(topic, OF_EACH_CODEC, ",".join(bench.program.codecs)))
    read = await bench.run("consume", topic=topic, partitions=PARTITIONS, until=sent)
    bench.judge(produced, read, sent)


async def seek(bench: Bench) -> None:
    """Seek in the topic that `codecs` wrote."""
    topic = f"{bench.name}-codecs"
    sent = OF_EACH_CODEC * len(bench.program.codecs)
    everything = [
        parse_read(line)
        for line in (await bench.run("consume", topic=topic, partitions=PARTITIONS, until=sent)).of("rec")
    ]
    places = {(read.partition, read.offset): read for read in everything}
    times = sorted(read.timestamp_ms for read in everything)
    middle_ms = times[len(times) // 2]
    run = await bench.run("seek", topic=topic, partitions=PARTITIONS, offset=77, time=middle_ms)
    [read] = map(parse_read, run.of("rec")[:1])
    problems = [] if read == places[0, 77] else [f"at offset 77 it read {read}, not {places[0, 77]}"]
    for partition in range(PARTITIONS):
        offsets = sorted(offset for of, offset in places if of == partition)
        by_time = min(
            (read.offset for read in everything if read.partition == partition and read.timestamp_ms >= middle_ms),
            default=-1,
        )
        for what, expected in (("at", by_time), ("first", offsets[0]), ("last", offsets[-1] + 1)):
            found = [int(offset) for _, of, offset in run.of(what) if int(of) == partition]
            if found != [expected]:
                problems.append(f"partition {partition}, {what}: {found}, not {expected}")
    if problems:
        raise Failed("; ".join(problems))


async def native(bench: Bench) -> None:
    """Read batches in columns, which the broker transcodes."""
    topic = await bench.topic("native")
    acknowledged: dict[int, tuple[int, int] | None] = {}
    for index, codec in enumerate(bench.program.codecs):
        async with Producer(bench.bootstrap, compression=codec) as producer:
            deliveries = {}
            for number in range(index * FED, index * FED + FED):
                key, value, headers = full_record(number)
                deliveries[number] = producer.send(
                    topic,
                    _content(value),
                    _content(key),
                    number % PARTITIONS,
                    bench.base_ms + number,
                    _headers(headers),
                )
            for number, delivery in deliveries.items():
                acknowledged[number] = (number % PARTITIONS, (await delivery).offset)
    read = await bench.run("consume", topic=topic, partitions=PARTITIONS, until=len(acknowledged))
    found = list(map(parse_read, read.of("rec")))
    if problems := problems_of_reading(acknowledged, found, full_record, bench.base_ms):
        raise Failed("; ".join(problems))


async def leader_killed(bench: Bench) -> None:
    topic = await bench.topic("leader")
    async with (
        bench.running(
            "produce", **bench.producing(topic, UNDER_FIRE, bench.program.codecs[-1], PER_SECOND)
        ) as producer,
        bench.running("consume", topic=topic, partitions=PARTITIONS, until=UNDER_FIRE) as consumer,
    ):
        await consumer.until(lambda: len(consumer.of("rec")) > UNDER_FIRE // 10, "first records")
        async with bench.killed(TopicPartition(topic, 0)):
            await producer.ended()
            if producer.of("failed"):
                raise Failed(producer.told())
            await consumer.until(lambda: len(consumer.of("rec")) >= UNDER_FIRE, f"{UNDER_FIRE} records")
        await consumer.ended()
        bench.judge(producer, consumer, UNDER_FIRE)


def group(strategy: str, coordinator_killed: bool) -> Callable[[Bench], Awaitable[None]]:
    async def check(bench: Bench) -> None:
        topic = await bench.topic(f"group-{strategy}")
        name = f"{topic}-members"
        feeder = Feeder(bench.bootstrap, topic, bench.base_ms)
        arguments = {"topic": topic, "group": name, "strategy": strategy}
        async with bench.running("group", **arguments) as first, bench.running("group", **arguments) as second:
            members = [first, second]

            def seen() -> int:
                return len({(line[1], line[2]) for member in members for line in member.of("rec")})

            await feeder.feed(FED)
            await first.until(lambda: seen() == FED, "the first records")
            for member in members:
                await member.until(partial(assigned, member), "partitions for each member")
            if coordinator_killed:
                partitions = len((await bench.admin.describe_topic(OFFSETS_TOPIC)).partitions)
                async with bench.killed(TopicPartition(OFFSETS_TOPIC, internal_partition(name, partitions))):
                    await feeder.feed(FED, over_s=2)
                    await first.until(lambda: seen() == 2 * FED, "records after the coordinator was killed")
            else:
                await feeder.feed(FED, over_s=1)
                await first.until(lambda: seen() == 2 * FED, "records for both members")
            await second.stop()
            await feeder.feed(FED)
            await first.until(lambda: seen() == 3 * FED, "records after a member left")
            await first.stop()
        problems = problems_of_group(range(3 * FED), [first.lines, second.lines], full_record)
        offsets = await bench.admin.list_group_offsets(name)
        found = {partition.partition: each.offset for partition, each in offsets.items() if each is not None}
        if found != dict.fromkeys(range(PARTITIONS), 3 * FED // PARTITIONS):
            problems.append(f"committed: {found}")
        if problems:
            raise Failed("; ".join(problems))

    return check


async def transfer(bench: Bench) -> None:
    """Move records in transactions. The coordinator of the producer, and then the leader of a partition are killed."""
    source, topic = await bench.topic("source"), await bench.topic("moved")
    name = f"{topic}-mover"
    feeder = Feeder(bench.bootstrap, source, bench.base_ms)
    places = {"topic": topic, "source": source, "partitions": PARTITIONS, "group": name, "id": name}
    async with bench.running("transfer", **places, until=4 * FED) as mover:

        def moved() -> int:
            return sum(int(line[1]) for line in mover.of("moved"))

        await feeder.feed(FED)
        await mover.until(lambda: moved() >= FED, "committed transactions")
        partitions = len((await bench.admin.describe_topic(TRANSACTIONS_TOPIC)).partitions)
        async with bench.killed(TopicPartition(TRANSACTIONS_TOPIC, internal_partition(name, partitions))):
            await feeder.feed(FED, over_s=1)
            await mover.until(lambda: moved() >= 2 * FED, "transactions after the coordinator was killed")
        async with bench.killed(TopicPartition(topic, 0)):
            await feeder.feed(FED, over_s=1)
            await mover.until(lambda: moved() >= 3 * FED, "transactions after a leader was killed")
        await feeder.feed(FED)
        await mover.ended()
        aborted = sum(int(line[1]) for line in mover.of("aborted"))
        ended = len(mover.of("moved") + mover.of("aborted"))
    epoch = (await bench.admin.describe_transactions([name]))[name].producer_epoch
    read = await bench.run("consume", topic=topic, partitions=PARTITIONS, until=4 * FED, isolation="read_committed")
    found = list(map(parse_read, read.of("rec")))
    problems = problems_of_reading(dict.fromkeys(range(4 * FED)), found, bench.program.expected, bench.base_ms)
    # Reading uncommitted records returns those of aborted transactions, too.
    await bench.run("consume", topic=topic, partitions=PARTITIONS, until=4 * FED + aborted)
    offsets = await bench.admin.list_group_offsets(name)
    committed = {partition.partition: each.offset for partition, each in offsets.items() if each is not None}
    if committed != dict.fromkeys(range(PARTITIONS), 4 * FED // PARTITIONS):
        problems.append(f"committed: {committed}")
    if (epoch >= ended) != bench.program.raises_epoch:
        problems.append(f"the producer's epoch is {epoch} after {ended} transactions")
    if problems:
        raise Failed("; ".join(problems))


async def counted(bench: Bench) -> None:
    """Count records with Kafka Streams. An instance is killed, and the leaders of the result and of the group."""
    source, topic = await bench.topic("source"), await bench.topic("counts")
    name = f"{topic}-app"
    feeder = Feeder(bench.bootstrap, source, bench.base_ms)
    counts: dict[str, list[int]] = {}

    async def read() -> None:
        async with Consumer(bench.bootstrap, topics=[topic], isolation_level="read_committed") as consumer:
            async for record in consumer:
                counts.setdefault(str(record.key), []).append(int(record.value))

    def total() -> int:
        return sum(map(len, counts.values()))

    with tempfile.TemporaryDirectory(prefix="minibroker-streams-") as directory:
        arguments = {"topic": topic, "source": source, "id": name}
        reading = asyncio.create_task(read())
        try:
            async with (
                bench.running("count", **arguments, directory=f"{directory}/1") as first,
                bench.running("count", **arguments, directory=f"{directory}/2") as second,
            ):
                await feeder.feed(FED)
                await second.until(lambda: total() >= FED, "counts")
                async with bench.killed(TopicPartition(topic, 0)):
                    await feeder.feed(FED, over_s=2)
                    await second.until(lambda: total() >= 2 * FED, "counts after a leader was killed")
                await first.kill()
                partitions = len((await bench.admin.describe_topic(OFFSETS_TOPIC)).partitions)
                async with bench.killed(TopicPartition(OFFSETS_TOPIC, internal_partition(name, partitions))):
                    await feeder.feed(FED, over_s=2)
                    await second.until(lambda: total() >= 3 * FED, "counts after an instance was killed")
                await second.stop()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    wrong = {key: each for key, each in counts.items() if each != list(range(1, len(each) + 1))}
    if wrong or total() != 3 * FED:
        raise Failed(f"{total()} counts of {3 * FED} records; not in order: {wrong}")


def assigned(member: Run) -> set[str]:
    held: set[str] = set()
    for line in member.lines:
        if line[0] == "assigned":
            held.add(line[1])
        elif line[0] == "revoked":
            held.discard(line[1])
    return held


Tell = Callable[[str, str | None], None]
"""Called with each check and its failure, or None."""


async def judge(
    bench: Bench,
    name: str,
    check: Callable[[Bench], Awaitable[None]],
    tell: Tell,
    within_s: float = CHECK_TIMEOUT_S,
) -> None:
    try:
        async with asyncio.timeout(within_s):
            await check(bench)
    except Failed as error:
        tell(name, str(error))
    except TimeoutError:
        tell(name, f"not within {within_s:.0f} s")
    except Exception as error:  # noqa: BLE001 - any exception is a failure of the check
        traceback.print_exc()
        tell(name, repr(error))
    else:
        tell(name, None)


async def try_program(bench: Bench, strategies: Sequence[str], tell: Tell) -> None:
    verbs = bench.program.verbs
    checks: dict[str, Callable[[Bench], Awaitable[None]]] = {}
    if "produce" in verbs:
        checks |= {"codecs": codecs, "seek": seek, "native batches": native, "leader killed": leader_killed}
    for strategy in strategies:
        is_last = strategy == strategies[-1]
        checks[f"group {strategy}" + (", coordinator killed" if is_last else "")] = group(strategy, is_last)
    if "transfer" in verbs:
        checks["transactions, coordinator killed"] = transfer
    if "count" in verbs:
        checks["exactly once, instance, leader and coordinator killed"] = counted
    for name, check in checks.items():
        await judge(bench, name, check, tell)
    if "fence" in verbs:
        topic = await bench.topic("fence")
        await try_steps(bench, "transactions", tell, "fence", topic=topic, id=topic)
    if "admin" in verbs:
        await try_steps(bench, "admin", tell, "admin", topic=f"{bench.name}-admin")


async def try_steps(bench: Bench, what: str, tell: Tell, verb: str, **arguments: object) -> None:
    """Run a verb that judges its steps itself."""
    try:
        async with asyncio.timeout(2 * CHECK_TIMEOUT_S), bench.running(verb, **arguments) as run:
            try:
                await run.ended()
            finally:
                for kind, step, *reason in [*run.of("ok"), *run.of("bad")]:
                    tell(f"{what}: {step}", None if kind == "ok" else " ".join(reason))
    except (Failed, TimeoutError) as error:
        tell(what, str(error) or f"not within {2 * CHECK_TIMEOUT_S:.0f} s")


@asynccontextmanager
async def running_cluster(
    directory: Path, brokers: int, settings: Mapping[str, str], *, secure: bool | None = None
) -> AsyncIterator[LocalCluster]:
    """A cluster that is always taken down. SIGTERM cancels the run."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    cluster = LocalCluster(directory)
    up = partial(cluster.up, brokers, free_ports(brokers)[0], settings=dict(settings), secure=secure)
    starting = asyncio.create_task(asyncio.to_thread(up))
    try:
        await asyncio.shield(starting)
        yield cluster
    finally:
        await asyncio.wait([starting])  # a cancelled task does not stop its thread
        if cluster.file_or_none() is not None:
            await asyncio.to_thread(cluster.down, kill=True)


async def try_each(
    builds: Mapping[str, Build],
    names: Sequence[str],
    cache: Path,
    check: Callable[[str, Program, Tell], Awaitable[None]],
) -> int:
    """Build each client and check it. Print a table and the failures; return how many checks failed."""
    rows: list[tuple[str, str, int, int, float]] = []
    failures: list[str] = []
    for name in names:
        began_s = time.monotonic()
        outcomes: dict[str, str | None] = {}

        def tell(check: str, problem: str | None, name: str = name, outcomes: dict[str, str | None] = outcomes) -> None:
            outcomes[check] = problem
            if problem is not None:
                failures.append(f"{name}: {check} failed: {problem}")
                print(failures[-1], flush=True)

        version = "-"
        try:
            program = await asyncio.to_thread(builds[name], cache)
            version = program.version
            began_s = time.monotonic()
            await check(name, program, tell)
        except CannotBuild as error:
            tell("build", str(error))
        failed = sum(problem is not None for problem in outcomes.values())
        rows.append((name, version, len(outcomes) - failed, failed, time.monotonic() - began_s))
        print("{:<16} {:<32} {:>3} passed, {:>2} failed in {:>3.0f} s".format(*rows[-1]), flush=True)
    print(f"\n{'client':<16} {'version':<32} {'passed':>6} {'failed':>6} {'seconds':>7}")
    for row in rows:
        print("{:<16} {:<32} {:>6} {:>6} {:>7.0f}".format(*row))
    # Once more, for readers of the last lines.
    for line in failures:
        print(line)
    passed, failed = sum(row[2] for row in rows), sum(row[3] for row in rows)
    print(f"kafka_clients: {passed} passed, {failed} failed")
    return failed


async def try_clients(directory: Path, cache: Path, names: list[str], *, is_brief: bool = False) -> int:
    """Return how many checks failed."""
    async with running_cluster(directory, BROKERS, SETTINGS) as cluster, Admin(cluster.bootstrap()) as admin:

        async def check(name: str, program: Program, tell: Tell) -> None:
            strategies = program.strategies
            if is_brief and strategies:
                at = list(PROGRAMS).index(name) % len(strategies)
                strategies = strategies[at : at + 1]
            await try_program(Bench(cluster, admin, name, program), strategies, tell)

        return await try_each(PROGRAMS, names, cache, check)


def run_main(
    document: str | None,
    builds: Mapping[str, Build],
    run: Callable[[Path, Path, list[str], argparse.Namespace], Coroutine[Any, Any, int]],
    **flags: str,
) -> None:
    """Parse the command line, and run the clients in a directory of their own. `flags`: further flags with their
    help."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(builds), help="the clients, separated by commas")
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    parser.add_argument(
        "--cache", type=Path, default=Path(".minibroker/kafka-clients"), help="kept downloads and builds"
    )
    parser.add_argument("--keep", type=Path, help="use this directory for the cluster and leave it, for its logs")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in builds]:
        parser.error(f"unknown client {unknown[0]!r}: choose from {', '.join(builds)}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="minibroker-clients-") as temporary:
        try:
            failed = uvloop.run(run(arguments.keep or Path(temporary), arguments.cache.absolute(), names, arguments))
        except asyncio.CancelledError:
            print("stopped: the cluster is down", flush=True)
            sys.exit(128 + signal.SIGTERM)
    sys.exit(1 if failed else 0)


def main() -> None:
    async def run(directory: Path, cache: Path, names: list[str], arguments: argparse.Namespace) -> int:
        return await try_clients(directory, cache, names, is_brief=arguments.brief)

    run_main(__doc__, PROGRAMS, run, brief="one strategy of each client's groups")


if __name__ == "__main__":
    main()

"""Break a local cluster and its clients under read-process-write, and count the result of every input.

    python -m tests.faults.exactly_once --transactions 20000 [--clients minibroker,confluent-kafka,java] [--keep DIR]

Two programs in one group (`transactors`) move records from one topic to another in transactions with the group's
offsets. Faults follow each other: the leader of an input, the leader of a result, the group's coordinator, the
transaction coordinator, the controller and a program are killed with SIGKILL and started again; a program is stopped
(SIGSTOP) until the group has removed it and a twin has taken its transactional id, and then wakes up.

A reader of committed records reads along. At the end each input must have been read exactly once, by that reader and by
one that reads everything again; each transaction must be there as a whole; the group must be at the end of its inputs;
zombies must have ended; and the last stable offset must be at the high watermark within STABLE_S of the last fault.
Exit code 1 unless all of this holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.fetching.records import Record
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import AllBrokers, BrokerId
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import patience, wait_until_whole
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from tests.faults.transactors import INPUTS, RESULTS, SESSION_TIMEOUT_MS
from tests.kafka_clients import programs

BROKERS = 3
PARTITIONS = 3
COORDINATOR_PARTITIONS = 3
WORKERS = 2
GROUP = "movers"
BACKLOG = 500
"""Inputs that wait for their results, at most."""
STABLE_S = 60.0
ZOMBIE_ENDS_S = 60.0
RESULTS_BETWEEN_FAULTS = 100
UNTAGGED_RECORDS = 20
"""The most records in a transaction of the Java program, which are not tagged."""
_LOOK_EVERY_S = 0.05

SETTINGS = {
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": str(COORDINATOR_PARTITIONS),
    "transaction.state.log.num.partitions": str(COORDINATOR_PARTITIONS),
}
RESULT_PARTITIONS = [TopicPartition(RESULTS, number) for number in range(PARTITIONS)]
INPUT_PARTITIONS = [TopicPartition(INPUTS, number) for number in range(PARTITIONS)]


class Client(StrEnum):
    MINIBROKER = "minibroker"
    CONFLUENT = "confluent-kafka"
    JAVA = "java"


class Fault(StrEnum):
    INPUT_LEADER = "input leader"
    RESULT_LEADER = "result leader"
    GROUP_COORDINATOR = "group coordinator"
    CLIENT = "client"
    TRANSACTION_COORDINATOR = "transaction coordinator"
    ZOMBIE = "zombie"
    CONTROLLER = "controller"


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Worker:
    """A transactional id, and the process that has it now."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self.process: asyncio.subprocess.Process
        self.exits: Counter[int] = Counter()
        """Exit codes of processes that ended by themselves."""
        self._changes = asyncio.Lock()

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self._command, stdout=log, stderr=log)

    async def revive(self) -> None:
        """Start the process again if it has ended by itself."""
        async with self._changes:
            if (code := self.process.returncode) is not None:
                self.exits[code] += 1
                await self.start()

    async def replace(self) -> None:
        """Kill the process, and start another one."""
        async with self._changes:
            await end(self.process)
            await self.start()

    async def stop(self) -> asyncio.subprocess.Process:
        """Return the process, which is stopped (SIGSTOP)."""
        while True:
            await self.revive()
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGSTOP)
                return self.process


async def end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class Reading:
    """What a reader of committed records has read."""

    def __init__(self) -> None:
        self.inputs: Counter[int] = Counter()
        self.transactions: dict[bytes, tuple[int, int]] = {}
        """The results of each transaction that were read, and those that it has, by its tag."""

    def add(self, record: Record) -> None:
        number, *tag = record.value.split()
        self.inputs[int(number)] += 1
        if tag:
            seen, _ = self.transactions.get(tag[0], (0, 0))
            self.transactions[tag[0]] = seen + 1, int(tag[1])

    @property
    def count(self) -> int:
        """The number of transactions; for programs that do not tag them, at least."""
        return len(self.transactions) or len(self.inputs) // UNTAGGED_RECORDS

    def problems(self, sent: int) -> list[str]:
        missing = [number for number in range(sent) if not self.inputs[number]]
        repeated = [number for number, count in self.inputs.items() if count > 1]
        torn = [tag.decode() for tag, (seen, count) in self.transactions.items() if seen != count]
        found: dict[str, Sequence[object]] = {
            "inputs without a result": missing,
            "inputs with several results": repeated,
            "torn transactions": torn,
        }
        return [f"{len(each)} {what}: {each[:5]}" for what, each in found.items() if each]


class Stage:
    """A cluster, its inputs, and two programs that move them."""

    def __init__(self, cluster: LocalCluster, client: Client, seed: int) -> None:
        self.cluster = cluster
        self.bootstrap = cluster.bootstrap()
        self.random = random.Random(seed)
        self.sent = 0
        self.live = Reading()
        self.problems: list[str] = []
        self.faults: Counter[str] = Counter()
        self.fed = asyncio.Event()
        """No more inputs are needed."""
        self.is_over = False
        self.ids = [f"{client.value}-{number}" for number in range(WORKERS)]
        logs = cluster.directory / "logs"
        self.workers = [Worker(_command(client, self.bootstrap, name), logs / f"{name}.log") for name in self.ids]

    # -- the load --

    async def _feed(self) -> None:
        async with Producer(self.bootstrap) as producer:
            while not self.fed.is_set():
                while self.sent - len(self.live.inputs) < BACKLOG:
                    for _ in range(100):
                        producer.send(INPUTS, b"%d" % self.sent, partition=self.sent % PARTITIONS)
                        self.sent += 1
                    await producer.flush()
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _read_along(self) -> None:
        async with Consumer(self.bootstrap, partitions=RESULT_PARTITIONS, isolation_level="read_committed") as consumer:
            async for record in consumer:
                self.live.add(record)

    async def _keep_alive(self) -> None:
        while not self.is_over:
            for worker in self.workers:
                await worker.revive()
            await asyncio.sleep(_LOOK_EVERY_S)

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        for worker in self.workers:
            await worker.start()
        tasks = [asyncio.create_task(work) for work in (self._feed(), self._read_along())]
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            yield
        finally:
            self.is_over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(keeping_alive, *tasks, return_exceptions=True)
            for worker in self.workers:
                await end(worker.process)

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        async with patience(otherwise):
            while not condition():
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _progress(self) -> None:
        wanted = len(self.live.inputs) + RESULTS_BETWEEN_FAULTS
        await self._until(lambda: len(self.live.inputs) >= wanted, "the programs do not go on")

    # -- the faults --

    async def _whole(self) -> ClusterView:
        for topic in (INPUTS, RESULTS, OFFSETS_TOPIC):
            await wait_until_whole(self.cluster, topic, f"{topic} did not recover")
        return await wait_until_whole(self.cluster, TRANSACTIONS_TOPIC, "the coordinators did not recover")

    async def _play(self, fault: Fault) -> None:
        self.faults[fault.value] += 1
        worker = self.random.randrange(WORKERS)
        if fault is Fault.CLIENT:
            await self.workers[worker].replace()
        elif fault is Fault.ZOMBIE:
            await self._zombie(self.workers[worker])
        else:
            view = await self._whole()
            partition = {
                Fault.INPUT_LEADER: self.random.choice(INPUT_PARTITIONS),
                Fault.RESULT_LEADER: self.random.choice(RESULT_PARTITIONS),
                Fault.GROUP_COORDINATOR: TopicPartition(
                    OFFSETS_TOPIC, internal_partition(GROUP, COORDINATOR_PARTITIONS)
                ),
                Fault.TRANSACTION_COORDINATOR: TopicPartition(
                    TRANSACTIONS_TOPIC, internal_partition(self.ids[worker], COORDINATOR_PARTITIONS)
                ),
            }.get(fault)
            victim = view.controller_id if partition is None else view.partitions[partition].leader_id
            assert victim is not None  # the cluster is whole
            await asyncio.to_thread(self.cluster.kill, BrokerId(victim))
            await asyncio.sleep(self.random.uniform(0, 2))  # the victim may be back before its death is noticed
            await asyncio.to_thread(self.cluster.start, AllBrokers())
            await self._whole()

    async def _zombie(self, worker: Worker) -> None:
        zombie = await worker.stop()
        try:
            await asyncio.sleep(self.random.choice([0, SESSION_TIMEOUT_MS / 1_000 + 1]))
            await worker.start()
            await asyncio.sleep(SESSION_TIMEOUT_MS / 1_000 + 1)
            await self._progress()
            zombie.send_signal(signal.SIGCONT)
            try:
                async with asyncio.timeout(ZOMBIE_ENDS_S):
                    await zombie.wait()
            except TimeoutError:
                self.problems.append("a zombie has gone on")
        finally:
            await end(zombie)

    async def _stable(self, since_s: float) -> float:
        """Return the time until no transaction is open in any partition."""
        internal = [
            TopicPartition(topic, number)
            for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC)
            for number in range(COORDINATOR_PARTITIONS)
        ]
        async with Admin(self.bootstrap) as admin, patience("a transaction is still open"):
            while True:
                asked: dict[TopicPartition, Literal["latest"]] = dict.fromkeys(
                    [*RESULT_PARTITIONS, *INPUT_PARTITIONS, *internal], "latest"
                )
                stable = await admin.list_offsets(asked, isolation_level="read_committed")
                if {p: at and at.offset for p, at in stable.items()} == {
                    p: at and at.offset for p, at in (await admin.list_offsets(asked)).items()
                }:
                    return time.monotonic() - since_s
                await asyncio.sleep(_LOOK_EVERY_S)

    # -- the whole --

    async def play(self, transactions: int, faults: Sequence[Fault]) -> dict[str, object]:
        """Play these faults in turn, each at least once, and until there are as many transactions."""
        async with Admin(self.bootstrap) as admin:
            for topic in (INPUTS, RESULTS):
                await admin.create_topic(
                    topic, partitions=PARTITIONS, replication_factor=BROKERS, configs={"min.insync.replicas": "2"}
                )
        began_s = time.monotonic()
        async with self._working():
            await self._progress()
            while set(self.faults) != set(faults) or self.live.count < transactions:
                fault = faults[sum(self.faults.values()) % len(faults)]
                await self._play(fault)
                last_s = time.monotonic()
                await self._progress()
                tell(f"{sum(self.faults.values())} {fault.value}: {self.live.count} transactions")
            self.fed.set()
            await asyncio.sleep(2 * _LOOK_EVERY_S)
            await self._until(lambda: len(self.live.inputs) == self.sent, "not every input has a result")
            self.is_over = True
            for worker in self.workers:
                worker.process.terminate()
            stable_s = await self._stable(last_s)
        took_s = time.monotonic() - began_s
        if stable_s > STABLE_S:
            self.problems.append(f"the last stable offset reached the end {stable_s:.1f} s after the last fault")
        await self._judge()
        return {
            "transactions": self.live.count,
            "inputs": self.sent,
            "faults": dict(self.faults),
            "exits": {name: dict(worker.exits) for name, worker in zip(self.ids, self.workers, strict=True)},
            "took_s": round(took_s, 1),
            "stable_s": round(stable_s, 1),
            "problems": self.problems,
        }

    async def _judge(self) -> None:
        again = Reading()
        async with (
            Consumer(self.bootstrap, partitions=RESULT_PARTITIONS, isolation_level="read_committed") as consumer,
            patience("the results could not be read"),
        ):
            while sum((await consumer.lag()).values()) > 0:
                for record in await consumer.poll(500, 10_000):
                    again.add(record)
        for reader, reading in (("live", self.live), ("last", again)):
            self.problems += [f"the {reader} reader: {problem}" for problem in reading.problems(self.sent)]
        async with Consumer(
            self.bootstrap, partitions=INPUT_PARTITIONS, group=GROUP, isolation_level="read_committed"
        ) as consumer:
            committed = await consumer.committed()
            ends = await consumer.end_offsets(INPUT_PARTITIONS)
            for partition, at in committed.items():
                if at is None or at.offset != ends[partition]:
                    self.problems.append(f"the group is at {at} of {ends[partition]} in {partition}")


def _command(client: Client, bootstrap: str, transactional_id: str) -> list[str]:
    if client is Client.JAVA:
        cache = Path(".minibroker/kafka-clients").absolute()
        cache.mkdir(parents=True, exist_ok=True)
        arguments = {"topic": RESULTS, "source": INPUTS, "partitions": PARTITIONS, "group": GROUP}
        more = {"id": transactional_id, "until": 1 << 40, "session": SESSION_TIMEOUT_MS}
        named = [f"{name}={value}" for name, value in (arguments | more).items()]
        return [*programs.java(programs.NEWEST_JAVA)(cache).command, bootstrap, "transfer", *named]
    return [sys.executable, "-m", "tests.faults.transactors", client.value, bootstrap, GROUP, transactional_id]


async def run(
    directory: Path, client: Client, transactions: int, *, faults: Sequence[Fault] = tuple(Fault), seed: int = 0
) -> dict[str, object]:
    cluster = LocalCluster(directory)
    await asyncio.to_thread(cluster.up, BROKERS, free_ports(BROKERS)[0], settings=SETTINGS)
    try:
        return {"client": client.value, **await Stage(cluster, client, seed).play(transactions, faults)}
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=20_000)
    parser.add_argument("--clients", default=f"{Client.MINIBROKER},{Client.CONFLUENT}")
    parser.add_argument("--faults", default=",".join(Fault), help="played in turn")
    parser.add_argument("--seed", type=int, default=0, help="chooses victims and pauses")
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    bad = 0
    for name in arguments.clients.split(","):
        with tempfile.TemporaryDirectory(prefix="minibroker-exactly-once-") as temporary:
            directory = (arguments.keep or Path(temporary)) / name
            directory.mkdir(parents=True, exist_ok=True)
            faults = [Fault(fault) for fault in arguments.faults.split(",")]
            report = uvloop.run(
                run(directory, Client(name), arguments.transactions, faults=faults, seed=arguments.seed)
            )
        print(json.dumps(report), flush=True)
        bad += bool(report["problems"])
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

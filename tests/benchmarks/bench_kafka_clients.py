"""Ratios of minibroker to Apache Kafka, measured in turns with the same clients of Kafka's protocol.

    python -m tests.benchmarks.bench_kafka_clients --kafka HOST:PORT,... [--kafka-start COMMAND] [--data DIR] [--quick]

confluent-kafka and aiokafka use their default settings, except for acks=all. They produce and consume values of
100 bytes and 1 KiB, send 5,000 records a second and wait for each, and keep sending while the leader of their partition
is killed with SIGKILL. Topics have six partitions and three replicas. The records read are compared with those sent.
At last confluent-kafka reads the batches of minibroker's own producer (columns), beside its own.

The topics for reading are written in the same batches to the same partitions of both clusters. librdkafka's partitioner
would, by chance, give one partition up to two and a half times as much as another, and reading takes as long as the
largest partition. It would also send smaller batches to the cluster that answers sooner, which aiokafka reads more
slowly.

Each run is its own process (`kafka_client_runs`), and the two clusters take turns run by run; for reading, one process
reads both in turns. The table has the median of each, and the geometric mean ratio of consecutive runs with its
standard error, because this machine's speed changes by a quarter from one minute to the next. Both clusters live all
the time, so that neither is measured while it is new; the processor time of the idle one is printed.

By default librdkafka pauses for a second (`fetch.queue.backoff.ms`) whenever it holds 100,000 unread records or 64 MiB
of all partitions together. Reading then consists mostly of these pauses. Their number depends on how far the answers in
flight exceed the limit, and so on the size of the batches. That row has no target; the row with pauses of 10 ms has.

Start and stop Kafka yourself, as brokers on this machine that this user may kill: the process that listens on the
leader's port is killed. COMMAND restarts it, with {id} for the broker's id; without COMMAND there is one kill only.
minibroker runs in DIR/cluster, which is removed at the end: give a DIR on the same disk as Kafka's. This takes half an
hour; `--quick` takes a minute and is a trial rather than a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import KafkaException, NewTopic

from minibroker.client.cli.terminal.output import print_table
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import BrokerId
from minibroker.protocol.errors import MinibrokerError
from tests.benchmarks.bench_start import cpu_s
from tests.benchmarks.kafka_client_runs import Job, Measured
from tests.benchmarks.matrix import machine, running_cluster, tell

BROKERS = 3
PARTITIONS = 6
LATENCY_RATE = 5_000
GAP_RATE = 1_000
TURN = 500
"""Records for one partition of a topic for reading, before the next partition's turn."""
IN_BATCHES = {"batch.num.messages": TURN, "linger.ms": 1_000}
"""Settings of a confluent-kafka that fills topics for reading: it sends a batch when a turn's records are complete."""
NO_REST = {"fetch.queue.backoff.ms": 10}
"""Settings of a confluent-kafka that reads with short pauses."""
NO_LINGER = {"linger.ms": 0}
FEWEST_RATIOS = 4
"""The least number of pairs of runs for a standard error."""
RUN_TIMEOUT_S = 600.0
CLUSTER_TIMEOUT_S = 120.0
POLL_S = 0.1

OURS, KAFKA = "minibroker", "Kafka"


class Effort(NamedTuple):
    repeats: int
    reads: int
    """Reads of each topic in each repeat. A read is short, and its time varies by a tenth."""
    reads_with_rests: int
    """The same for librdkafka with its defaults, which takes ten seconds for each read."""
    records: dict[tuple[str, int], int]
    """Records by client and size of values."""
    latency_s: float
    before_kill_s: float
    """Seconds of writes at a steady rate before the kill."""


FULL = Effort(
    repeats=3,
    reads=24,
    reads_with_rests=2,
    records={
        ("confluent-kafka", 100): 1_500_000,
        ("confluent-kafka", 1_024): 400_000,
        ("aiokafka", 100): 250_000,
        ("aiokafka", 1_024): 150_000,
    },
    latency_s=8,
    before_kill_s=2,
)
QUICK = Effort(
    repeats=1,
    reads=2,
    reads_with_rests=1,
    records={("confluent-kafka", 100): 20_000, ("aiokafka", 1_024): 20_000},
    latency_s=0.5,
    before_kill_s=0.5,
)


# --- the two clusters ---


class Peer:
    """A cluster as its clients see it, with its processes."""

    def __init__(self, name: str, bootstrap: str, start: Callable[[int], object] | None) -> None:
        self.name = name
        self.bootstrap = bootstrap
        self.start = start
        """Restarts a killed broker, by its id; None if there is no command for it."""
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._numbers = itertools.count(1)

    def wait_until_whole(self, topic: str | None = None) -> None:
        """Wait until all brokers are alive and in the ISR of each of the topic's partitions."""

        def is_whole() -> bool:
            found: Any = self._admin.list_topics(topic, timeout=5)
            partitions = [each for known in found.topics.values() for each in known.partitions.values()]
            return (
                len(found.brokers) == BROKERS
                and all(each.leader >= 0 and len(each.isrs) == BROKERS for each in partitions)
                and (topic is None or len(partitions) == PARTITIONS)
            )

        wait_until(is_whole, f"{self.name} at {self.bootstrap} does not have all {BROKERS} brokers in sync")

    @contextlib.contextmanager
    def topic(self) -> Iterator[str]:
        """A new topic. It is deleted afterwards, so that it does not affect the next run."""
        name = f"bench-{os.getpid()}-{next(self._numbers)}"
        self._admin.create_topics([NewTopic(name, PARTITIONS, BROKERS)])[name].result(CLUSTER_TIMEOUT_S)
        try:
            self.wait_until_whole(name)
            yield name
        finally:
            self._admin.delete_topics([name])[name].result(CLUSTER_TIMEOUT_S)

    def cpu_s(self) -> float:
        """Processor time that its brokers have used."""
        brokers: Any = self._admin.list_topics(timeout=5).brokers.values()
        return sum(cpu_s(listening_process(broker.host, broker.port)) for broker in brokers)

    def leader_to_kill(self, topic: str) -> tuple[int, int, int]:
        """A partition, its leader, and the leader's process. The controller is not chosen: its loss would lengthen
        Kafka's gap."""
        found: Any = self._admin.list_topics(topic, timeout=5)
        partition, leader = min(
            (each.id, each.leader)
            for each in found.topics[topic].partitions.values()
            if each.leader != found.controller_id
        )
        return partition, leader, listening_process(found.brokers[leader].host, found.brokers[leader].port)


def listening_process(host: str, port: int) -> int:
    """Find the process that listens on a port, in /proc. Raises SystemExit if this user may see none."""
    if not socket.gethostbyname(host).startswith("127."):
        raise SystemExit(f"{host}:{port} is not on loopback: brokers are killed, so they must run on this machine")
    listening, sockets = "0A", set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == listening and int(local.rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{inode}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            if os.readlink(descriptor) in sockets:
                return int(descriptor.parts[2])
    raise SystemExit(f"no process of this user listens on port {port}: run this on the brokers' machine, as their user")


def setting_text(settings: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + CLUSTER_TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{otherwise} after {CLUSTER_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


# --- runs ---


def process_of(job: Job) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.kafka_client_runs", msgspec.json.encode(job).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(job: Job, meanwhile: Callable[[subprocess.Popen[str]], None] = lambda process: None) -> Any:
    """Run the job; `meanwhile` runs beside it. Raises SystemExit if it fails; its stderr has the reason."""
    process = process_of(job)
    try:
        meanwhile(process)
        out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit(f"{job.action} by {job.client} at {job.bootstrap}: exit code {process.returncode}")
    return json.loads(out)


def kill_when_steady(pid: int, before_kill_s: float) -> Callable[[subprocess.Popen[str]], None]:
    """Return what kills a broker while a `gap` runs: these seconds after its acknowledgements keep up."""

    def kill(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(before_kill_s)
        os.kill(pid, signal.SIGKILL)
        process.stdin.write("killed\n")
        process.stdin.flush()

    return kill


class Case(NamedTuple):
    """A row of the table."""

    what: str
    client: str
    size: int
    target: float | None
    """The target for the ratio of minibroker's figure to the baseline's."""
    more_is_better: bool
    baseline: str = KAFKA

    def is_met(self, ratio: float) -> bool | None:
        if self.target is None:
            return None
        return ratio >= self.target if self.more_is_better else ratio <= self.target


class Results:
    def __init__(self) -> None:
        self._runs: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.idle_cores: dict[str, float] = defaultdict(float)
        """The largest share of a core that a cluster's brokers used during the other cluster's turn."""

    def add(self, case: Case, who: str, value: float) -> None:
        self._runs[case][who].append(value)
        tell(f"{case.what}, {case.client}, {case.size} bytes, {who}: {value:,.1f}")

    def rows(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for case, by_whom in self._runs.items():
            runs, baseline = by_whom.values()  # minibroker has the first turn
            ours, its = statistics.median(runs), statistics.median(baseline)
            ratio, error = ratio_of(runs, baseline)
            is_met = case.is_met(ratio)
            rows.append(
                {
                    "what": case.what,
                    "client": case.client,
                    "bytes": case.size,
                    "ours": f"{ours:,.1f}",
                    "all runs": " ".join(f"{run:,.1f}" for run in runs),
                    "baseline": case.baseline,
                    "its": f"{its:,.1f}",
                    "all its runs": " ".join(f"{run:,.1f}" for run in baseline),
                    "ratio": f"{ratio:.3f}",
                    "±": "-" if error is None else f"{error:.3f}",
                    "target": "-" if case.target is None else f"{'≥' if case.more_is_better else '≤'} {case.target:g}",
                    "met": "-" if is_met is None else "yes" if is_met else "NO",
                }
            )
        return rows


def ratio_of(runs: Sequence[float], baseline: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean ratio of the pairs of runs and its standard error, None if the pairs are too few."""
    ratios = [math.log(ours / its) for ours, its in zip(runs, baseline, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) >= FEWEST_RATIOS else None
    return math.exp(statistics.mean(ratios)), error


class Bench:
    def __init__(self, ours: Peer, kafka: Peer, effort: Effort) -> None:
        self.peers = (ours, kafka)
        self.effort = effort
        self.results = Results()

    @contextlib.contextmanager
    def turn(self, peer: Peer) -> Iterator[None]:
        """The turn of one cluster, during which the other one is idle."""
        [idle] = [each for each in self.peers if each is not peer]
        before_s, began_s = idle.cpu_s(), time.monotonic()
        yield
        share = (idle.cpu_s() - before_s) / (time.monotonic() - began_s)
        self.results.idle_cores[idle.name] = max(share, self.results.idle_cores[idle.name])

    def warm_up(self) -> None:
        """Run once without measuring, because Java compiles hot code first."""
        for peer in self.peers:
            tell(f"warming up {peer.name}")
            for (client, size), count in self.effort.records.items():
                with peer.topic() as topic:
                    job = self.job(peer, topic, "produce", client, size, count=count // 4)
                    run(job)
                    run(msgspec.structs.replace(job, action="consume"))

    def job(self, peer: Peer, topic: str, action: str, client: str, size: int, **more: Any) -> Job:
        more.setdefault("count", self.effort.records.get((client, size), 0))
        return Job(
            action=action,
            client=client,
            bootstrap=peer.bootstrap,
            topic=topic,
            partitions=PARTITIONS,
            size=size,
            **more,
        )

    def produce_and_consume(self) -> None:
        for client, size in self.effort.records:
            self._produce(client, size)
            self._consume(client, size)
            if client == "confluent-kafka":
                self._consume_columns(client, size)

    def _produce(self, client: str, size: int) -> None:
        case = Case("produce, records/s", client, size, 1.0, True)
        for _ in range(self.effort.repeats):
            for peer in self.peers:
                with peer.topic() as topic, self.turn(peer):
                    made = run(self.job(peer, topic, "produce", client, size))
                self.results.add(case, peer.name, made["records_per_second"])

    def _consume(self, client: str, size: int) -> None:
        def case(note: str, target: float | None) -> Case:
            return Case("consume, records/s", client + note, size, target, True)

        reads = self.effort.reads
        ways: list[tuple[Case, dict[str, int], int]] = [(case("", 1.0), {}, reads)]
        if client == "confluent-kafka":
            ways = [
                (case(f" ({setting_text(NO_REST)})", 1.0), NO_REST, reads),
                (case("", None), {}, self.effort.reads_with_rests),
            ]
        ours, kafka = self.peers
        for _ in range(self.effort.repeats):
            with self._filled(ours, client, size) as mine, self._filled(kafka, client, size) as theirs:
                for of_case, settings, times in ways:
                    job = self.job(ours, mine, "consume", client, size, settings=settings, reads=times)
                    self._read_in_turns(of_case, job, kafka, theirs)

    def _consume_columns(self, client: str, size: int) -> None:
        name = f"{client} ({setting_text(NO_REST)})"
        case = Case("consume columns, records/s", name, size, 0.5, True, "minibroker, magic 2")
        ours = self.peers[0]
        for _ in range(self.effort.repeats):
            with self._filled(ours, client, size, "minibroker") as columns, self._filled(ours, client, size) as magic_2:
                job = self.job(ours, columns, "consume", client, size, settings=NO_REST, reads=self.effort.reads)
                self._read_in_turns(case, job, ours, magic_2)

    def _read_in_turns(self, case: Case, job: Job, other: Peer, topic: str) -> None:
        runs = run(msgspec.structs.replace(job, compared_with=(other.bootstrap, topic)))
        for rates in zip(*runs, strict=True):
            for who, rate in zip((OURS, case.baseline), rates, strict=True):
                self.results.add(case, who, rate)

    @contextlib.contextmanager
    def _filled(self, peer: Peer, reader: str, size: int, writer: str = "confluent-kafka") -> Iterator[str]:
        """A topic with the records that a client will read, the same number in every partition."""
        with peer.topic() as topic:
            count = self.effort.records[reader, size]
            settings = IN_BATCHES if writer == "confluent-kafka" else {}
            run(self.job(peer, topic, "produce", writer, size, count=count, turn=TURN, settings=settings))
            yield topic

    def latency(self) -> None:
        for client, note, settings in (
            ("confluent-kafka", "", {}),
            ("confluent-kafka", f" ({setting_text(NO_LINGER)})", NO_LINGER),
            ("aiokafka", "", {}),
        ):
            for size in (size for name, size in self.effort.records if name == client):
                p50 = Case("p50 at 5,000/s, ms", client + note, size, None, False)
                p99 = Case("p99 at 5,000/s, ms", client + note, size, 0.5, False)
                count = int(LATENCY_RATE * self.effort.latency_s)
                for _ in range(self.effort.repeats):
                    for peer in self.peers:
                        with self.turn(peer), peer.topic() as topic:
                            found = run(
                                self.job(
                                    *(peer, topic, "latency", client, size),
                                    count=count,
                                    rate=LATENCY_RATE,
                                    settings=settings,
                                )
                            )
                        self.results.add(p50, peer.name, found["p50_ms"])
                        self.results.add(p99, peer.name, found["p99_ms"])

    def gap(self) -> None:
        can_start = all(peer.start is not None for peer in self.peers)
        if not can_start:
            tell("no --kafka-start: one kill, with confluent-kafka only")
        for client in ("confluent-kafka", "aiokafka") if can_start else ("confluent-kafka",):
            case = Case("gap after SIGKILL of the leader, ms", client, 100, 0.05, False)
            for _ in range(self.effort.repeats if can_start else 1):
                for peer in self.peers:
                    self.results.add(case, peer.name, self._one_gap(peer, client)["gap_ms"])

    def _one_gap(self, peer: Peer, client: str) -> Measured:
        with peer.topic() as topic:
            partition, leader, pid = peer.leader_to_kill(topic)

            job = self.job(peer, topic, "gap", client, 100, count=0, rate=GAP_RATE, partition=partition)
            found: Measured = run(job, kill_when_steady(pid, self.effort.before_kill_s))
            tell(
                f"{peer.name}: longest gap before the kill {found['quiet_gap_ms']:.0f} ms, {found['failed']:.0f} failed"
            )
            if peer.start is not None:
                peer.start(leader)
                peer.wait_until_whole(topic)
        return found


GROUPS: dict[str, Callable[[Bench], None]] = {
    "produce-consume": Bench.produce_and_consume,
    "latency": Bench.latency,
    "gap": Bench.gap,
}


def measure(bench: Bench, groups: Sequence[str]) -> None:
    for peer in bench.peers:
        peer.wait_until_whole()
    if bench.effort is not QUICK:
        bench.warm_up()
    for group in groups:
        GROUPS[group](bench)


def starter(command: str | None) -> Callable[[int], object] | None:
    if command is None:
        return None

    def start(broker_id: int) -> None:
        words = [word.replace("{id}", str(broker_id)) for word in shlex.split(command)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", required=True, metavar="HOST:PORT,...", help="Kafka's brokers")
    parser.add_argument("--kafka-start", metavar="COMMAND", help="restarts Kafka's broker {id}")
    parser.add_argument("--data", type=Path, metavar="DIR", default=Path(".minibroker/bench"), help="for our cluster")
    parser.add_argument("--group", action="append", choices=list(GROUPS), help="run only this group; may be repeated")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"runs of each: {FULL.repeats}")
    parser.add_argument("--quick", action="store_true", help="few records, one run of each: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to this file too")
    arguments = parser.parse_args()
    let_signals_interrupt()
    effort = QUICK if arguments.quick else FULL
    if arguments.repeats is not None:
        effort = effort._replace(repeats=arguments.repeats)
    began = time.monotonic()
    try:
        with running_cluster(arguments.data) as cluster:
            ours = Peer(OURS, cluster.bootstrap(), lambda id: cluster.start(BrokerId(id)))
            bench = Bench(ours, Peer(KAFKA, arguments.kafka, starter(arguments.kafka_start)), effort)
            measure(bench, arguments.group or list(GROUPS))
    except KafkaException as error:
        sys.exit(f"error: {error.args[0].str()}: is Kafka at {arguments.kafka}?")
    except (MinibrokerError, TimeoutError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}" if str(error) else 130)
    rows = bench.results.rows()
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    for name, share in bench.results.idle_cores.items():
        tell(f"{name}'s brokers during the other cluster's turn: at most {share:.0%} of a core")
    tell(f"{time.monotonic() - began:.0f} s in all")
    if arguments.json:
        found = {"machine": machine(), "idle_cores": bench.results.idle_cores, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

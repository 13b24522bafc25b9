"""The cost of transactions, as ratios of one run.

    python -m tests.benchmarks.bench_transactions [--kafka HOST:PORT,...] [--data DIR] [--repeats N] [--quick]

- minibroker's producer: transactions of 1, 100 and 10,000 records, next to an idempotent producer that waits for the
  acknowledgements of as many records at a time.
- With --kafka: the same transactions by confluent-kafka, on minibroker and on three Kafka brokers that you have started
  on this machine.
- Consumers, minibroker's and confluent-kafka: read_committed next to read_uncommitted, of a topic that was written in
  transactions of 100 records.

Topics have six partitions and three replicas, and a transaction writes to the partitions in turns. Each run is its own
process (`transaction_runs`), and the sides take turns. The table has the median of each side, and the geometric mean
ratio of consecutive runs with its standard error. Our cluster runs in DIR/cluster, which is removed at the end. This
takes six minutes; `--quick` takes half a minute and is a trial rather than a measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka.cimpl import KafkaException

from minibroker.client.cli.terminal.output import print_table
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol.errors import MinibrokerError
from tests.benchmarks.bench_kafka_clients import KAFKA, OURS, PARTITIONS, RUN_TIMEOUT_S, Case, Peer, Results
from tests.benchmarks.matrix import machine, running_cluster, tell
from tests.benchmarks.transaction_runs import LEVELS, Job

SIZE = 100
READ_IN = 100
"""Records of each transaction of the topics for reading."""
WRITERS = 20
"""Producers that write a topic for reading."""


class Effort(NamedTuple):
    repeats: int
    reads: int
    transactions: dict[int, int]
    """The most transactions of a run, by their number of records."""
    seconds: float
    """The longest time of a run."""
    for_reading: int
    """Transactions of each of the producers that write a topic for reading."""


FULL = Effort(repeats=4, reads=20, transactions={1: 3_000, 100: 1_000, 10_000: 40}, seconds=4, for_reading=100)
QUICK = Effort(repeats=1, reads=2, transactions={1: 30, 100: 20, 10_000: 2}, seconds=6, for_reading=5)


def run(job: Job) -> Any:
    """Raises SystemExit if the run fails; its stderr has the reason."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.transaction_runs", msgspec.json.encode(job).decode()],
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{job.action} by {job.client} at {job.bootstrap}: exit code {ended.returncode}")
    return json.loads(ended.stdout)


class Bench:
    def __init__(self, ours: Peer, kafka: Peer | None, effort: Effort) -> None:
        self.ours = ours
        self.kafka = kafka
        self.effort = effort
        self.results = Results()

    def produce(self, peer: Peer, client: str, each: int, **more: Any) -> Any:
        with peer.topic() as topic:
            return run(self.job(peer, topic, "produce", client, each, seconds=self.effort.seconds, **more))

    def job(self, peer: Peer, topic: str, action: str, client: str, each: int, **more: Any) -> Job:
        more.setdefault("transactions", self.effort.transactions[each])
        return Job(
            action=action,
            client=client,
            bootstrap=peer.bootstrap,
            topic=topic,
            partitions=PARTITIONS,
            size=SIZE,
            each=each,
            **more,
        )

    def next_to_idempotent(self) -> None:
        for each in self.effort.transactions:
            case = Case(f"transactions of {each:,}, records/s", "minibroker", SIZE, None, True, "idempotent")
            for _ in range(self.effort.repeats):
                for who, is_transactional in ((OURS, True), (case.baseline, False)):
                    made = self.produce(self.ours, "minibroker", each, is_transactional=is_transactional)
                    self.results.add(case, who, made["records_per_second"])

    def next_to_kafka(self) -> None:
        if self.kafka is None:
            tell("no --kafka: no comparison with Kafka")
            return
        if self.effort is not QUICK:  # Java compiles hot code first
            for peer in (self.ours, self.kafka):
                self.produce(peer, "confluent-kafka", 100)
        for each in self.effort.transactions:
            target = 1.5 if each == 100 else None
            rate = Case(f"transactions of {each:,}, records/s", "confluent-kafka", SIZE, target, True)
            median = Case(f"transactions of {each:,}, p50 in ms", "confluent-kafka", SIZE, None, False)
            highest = Case(f"transactions of {each:,}, p99 in ms", "confluent-kafka", SIZE, None, False)
            for _ in range(self.effort.repeats):
                for who, peer in ((OURS, self.ours), (KAFKA, self.kafka)):
                    made = self.produce(peer, "confluent-kafka", each)
                    self.results.add(rate, who, made["records_per_second"])
                    self.results.add(median, who, made["p50_ms"])
                    self.results.add(highest, who, made["p99_ms"])

    def read(self) -> None:
        for client in ("minibroker", "confluent-kafka"):
            case = Case("read_committed, records/s", client, SIZE, 0.9, True, "read_uncommitted")
            with self.ours.topic() as topic:
                of_topic = {"transactions": self.effort.for_reading, "producers": WRITERS, "seconds": RUN_TIMEOUT_S}
                run(self.job(self.ours, topic, "produce", client, READ_IN, **of_topic))
                job = self.job(self.ours, topic, "consume", client, READ_IN, reads=self.effort.reads, **of_topic)
                rates = run(job)
            for committed, uncommitted in zip(*(rates[level] for level in LEVELS), strict=True):
                self.results.add(case, OURS, committed)
                self.results.add(case, case.baseline, uncommitted)


GROUPS: dict[str, Callable[[Bench], None]] = {
    "idempotent": Bench.next_to_idempotent,
    "kafka": Bench.next_to_kafka,
    "read": Bench.read,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", metavar="HOST:PORT,...", help="Kafka's brokers")
    parser.add_argument("--data", type=Path, metavar="DIR", default=Path(".minibroker/bench"), help="for our cluster")
    parser.add_argument("--group", action="append", choices=list(GROUPS), help="run only this group; may be repeated")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"runs of each: {FULL.repeats}")
    parser.add_argument("--quick", action="store_true", help="few transactions, one run of each: half a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to this file too")
    arguments = parser.parse_args()
    let_signals_interrupt()
    effort = QUICK if arguments.quick else FULL
    if arguments.repeats is not None:
        effort = effort._replace(repeats=arguments.repeats)
    began = time.monotonic()
    try:
        with running_cluster(arguments.data) as cluster:
            kafka = Peer(KAFKA, arguments.kafka, None) if arguments.kafka else None
            bench = Bench(Peer(OURS, cluster.bootstrap(), None), kafka, effort)
            for peer in filter(None, (bench.ours, bench.kafka)):
                peer.wait_until_whole()
            for group in arguments.group or GROUPS:
                GROUPS[group](bench)
    except KafkaException as error:
        sys.exit(f"error: {error.args[0].str()}: is Kafka at {arguments.kafka}?")
    except (MinibrokerError, TimeoutError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}" if str(error) else 130)
    rows = bench.results.rows()
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    tell(f"{time.monotonic() - began:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

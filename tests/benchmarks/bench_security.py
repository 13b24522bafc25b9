r"""What TLS, the authorizer and quotas cost, beside Apache Kafka's TLS with the same client.

    python -m tests.benchmarks.bench_security [--quick] [--only PART,...] \
        [--kafka HOST:PORT,... --kafka-ssl HOST:PORT,... --kafka-ca FILE]

Each case compares two sides, run by run in turns: the same client, the same records, three brokers, three replicas,
acks=all. A run is its own process (`kafka_client_runs`), which checks the records that it reads. The table has the
median of each side and the mean ratio of neighbouring runs with its standard error: of the rates, and of the processor
time that the brokers need for a record.

- tls: confluent-kafka and minibroker's own client over TLS, beside the same listeners' PLAINTEXT
- kafka: confluent-kafka over TLS to minibroker and to three Kafka brokers that you have started on this machine, with a
  listener of each kind; FILE is the authority of their certificates (`ssl.keystore.type=PEM` takes trustme's)
- limits: clients of a cluster that checks ACLs and measures quotas (limits that nobody reaches), and of one without
  either; two clusters without either are compared in the same way, as a control
- gap: the time without an acknowledgement after SIGKILL of the leader, over TLS and PLAINTEXT

Our clusters live below the directory for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from confluent_kafka.cimpl import KafkaException

from minibroker import sync
from minibroker.client.administering.client_quotas import DEFAULT_ENTITY, QuotaEntity
from minibroker.client.cli.terminal.output import print_table
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.testing.cluster import SyncLocalCluster
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.errors import MinibrokerError
from tests.benchmarks.bench_kafka_clients import (
    BROKERS,
    GAP_RATE,
    IN_BATCHES,
    NO_REST,
    PARTITIONS,
    TURN,
    Case,
    Peer,
    Results,
    kill_when_steady,
    run,
)
from tests.benchmarks.kafka_client_runs import Job
from tests.benchmarks.matrix import tell

CONFLUENT, OWN = "confluent-kafka", "minibroker"
_S = TypeVar("_S")
PARTS = ("kafka", "tls", "gap", "limits")
RATE, COST = ", records/s", ", brokers' µs per record"
UNREACHED = 1e12
"""A quota that no client reaches."""
AUTHORIZED = {
    "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
    "super.users": "User:admin",
    "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
}


class Effort(NamedTuple):
    repeats: int
    records: int
    reads: int
    kills: int
    before_kill_s: float


FULL = Effort(repeats=6, records=200_000, reads=2, kills=5, before_kill_s=2)
QUICK = Effort(repeats=1, records=20_000, reads=1, kills=1, before_kill_s=0.5)


class Side(NamedTuple):
    """One of two that are compared."""

    name: str
    peer: Peer
    bootstrap: str
    settings: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Of clients, by their names."""

    def job(self, topic: str, action: str, client: str, size: int, **more: Any) -> Job:
        settings = {**self.settings.get(client, {}), **more.pop("settings", {})}
        return Job(
            action=action,
            client=client,
            bootstrap=self.bootstrap,
            topic=topic,
            partitions=PARTITIONS,
            size=size,
            settings=settings,
            **more,
        )


def over_tls(authority: Path) -> dict[str, dict[str, Any]]:
    return {
        CONFLUENT: {"security.protocol": "SSL", "ssl.ca.location": str(authority)},
        OWN: {"security_protocol": "SSL", "ssl_cafile": str(authority)},
    }


def in_turns(turn: int, one: _S, other: _S) -> tuple[_S, _S]:
    """Which goes first changes from turn to turn."""
    return (other, one) if turn % 2 else (one, other)


class Bench:
    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.results = Results()

    def compare(self, one: Side, other: Side, client: str, target: float | None) -> None:
        """Produce and consume on both sides, with values of 100 bytes and 1 KiB."""
        for size in (100, 1_024):
            self._produce(one, other, client, size, target)
            self._consume(one, other, client, size, target)

    def _case(self, what: str, one: Side, other: Side, client: str, size: int, target: float | None) -> Case:
        return Case(f"{one.name}: {what}{RATE}", client, size, target, True, other.name)

    @contextlib.contextmanager
    def _cost(self, case: Case, side: Side, records: int) -> Iterator[None]:
        """Note what the block costs the brokers. This varies less than a rate does."""
        before_s = side.peer.cpu_s()
        yield
        target = None if case.target is None else 1 / case.target
        cost = case._replace(what=f"{case.what[: -len(RATE)]}{COST}", target=target, more_is_better=False)
        self.results.add(cost, side.name, (side.peer.cpu_s() - before_s) / records * 1_000_000)

    def _produce(self, one: Side, other: Side, client: str, size: int, target: float | None) -> None:
        case = self._case("produce", one, other, client, size, target)
        for turn in range(self.effort.repeats):
            for side in in_turns(turn, one, other):
                with side.peer.topic() as topic, self._cost(case, side, self.effort.records):
                    made = run(side.job(topic, "produce", client, size, count=self.effort.records))
                self.results.add(case, side.name, made["records_per_second"])

    def _consume(self, one: Side, other: Side, client: str, size: int, target: float | None) -> None:
        case = self._case("consume", one, other, client, size, target)
        reading = NO_REST if client == CONFLUENT else {}
        writing = IN_BATCHES if client == CONFLUENT else {}
        with one.peer.topic() as of_one, other.peer.topic() as of_other:
            sides = ((one, of_one), (other, of_other))
            count = self.effort.records
            for side, topic in sides:
                run(side.job(topic, "produce", client, size, count=count, turn=TURN, settings=writing))
            for turn in range(self.effort.repeats):
                for side, topic in in_turns(turn, *sides):
                    job = side.job(
                        topic, "consume", client, size, count=count, settings=reading, reads=self.effort.reads
                    )
                    with self._cost(case, side, count * self.effort.reads):
                        rates = run(job)[0]
                    for rate in rates:
                        self.results.add(case, side.name, rate)

    def gap(self, one: Side, other: Side, target: float) -> None:
        case = Case("gap after SIGKILL of the leader, ms", CONFLUENT, 100, target, False, other.name)
        for _ in range(self.effort.kills):
            for side in (one, other):
                with side.peer.topic() as topic:
                    partition, leader, pid = side.peer.leader_to_kill(topic)
                    job = side.job(topic, "gap", CONFLUENT, 100, rate=GAP_RATE, partition=partition)
                    found = run(job, kill_when_steady(pid, self.effort.before_kill_s))
                    assert side.peer.start is not None
                    side.peer.start(leader)
                    side.peer.wait_until_whole(topic)
                self.results.add(case, side.name, found["gap_ms"])


@contextlib.contextmanager
def our_cluster(name: str, settings: dict[str, str] | None = None) -> Iterator[tuple[SyncLocalCluster, Peer]]:
    with SyncLocalCluster(BROKERS, tls=True, settings=settings) as cluster:
        yield cluster, Peer(name, cluster.bootstrap_servers, cluster.start)


def limit(cluster: SyncLocalCluster) -> None:
    """Allow strangers to use the benchmark's topics, and give them quotas."""
    resources = (
        ResourcePattern(AclResourceType.TOPIC, "bench", PatternType.PREFIXED),
        ResourcePattern(AclResourceType.GROUP, "*"),
        ResourcePattern(AclResourceType.CLUSTER, "kafka-cluster"),
    )
    anybody = AccessControlEntry("User:ANONYMOUS", "*", AclOperation.ALL, AclPermissionType.ALLOW)
    quotas = {"producer_byte_rate": UNREACHED, "consumer_byte_rate": UNREACHED, "request_percentage": 100_000.0}
    with sync.Admin(cluster.ssl_bootstrap_servers, **cluster.security("admin")) as admin:
        admin.create_acls([AclBinding(resource, anybody) for resource in resources])
        admin.alter_client_quotas({QuotaEntity(client_id=DEFAULT_ENTITY): quotas})


def measure(bench: Bench, parts: Collection[str], kafkas: tuple[Side, Side] | None) -> None:
    with our_cluster("minibroker") as (cluster, peer):
        plain = Side("PLAINTEXT", peer, cluster.bootstrap_servers)
        tls = Side("TLS", peer, cluster.ssl_bootstrap_servers, over_tls(cluster.certificates.authority))
        if kafkas is not None and "kafka" in parts:
            of_kafka, plain_of_kafka = kafkas
            bench.compare(tls, of_kafka, CONFLUENT, 1.0)
            bench.compare(of_kafka, plain_of_kafka, CONFLUENT, None)
        if "tls" in parts:
            for client in (CONFLUENT, OWN):
                bench.compare(tls, plain, client, None)
        if "gap" in parts:
            bench.gap(tls, plain, 1.5)
        if "limits" in parts:
            compare_limits(bench, plain._replace(name="without"))


def compare_limits(bench: Bench, without: Side) -> None:
    with our_cluster("minibroker again") as (other, peer):
        control = Side("control", peer, other.bootstrap_servers)
        for client in (CONFLUENT, OWN):
            bench.compare(control, without, client, None)
    with our_cluster("minibroker with ACLs and quotas", AUTHORIZED) as (other, peer):
        limit(other)
        checked = Side("ACLs and quotas", peer, other.bootstrap_servers)
        for client in (CONFLUENT, OWN):
            bench.compare(checked, without, client, 0.97)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", metavar="HOST:PORT,...", help="Kafka's brokers")
    parser.add_argument("--kafka-ssl", metavar="HOST:PORT,...", help="their listeners that are SSL")
    parser.add_argument("--kafka-ca", type=Path, metavar="FILE", help="PEM file of their authority")
    parser.add_argument("--quick", action="store_true", help="few records, one run of each: a trial")
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    parts = arguments.only.split(",") if arguments.only else PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown parts: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    of_kafka = (arguments.kafka, arguments.kafka_ssl, arguments.kafka_ca)
    if any(of_kafka) and not all(of_kafka):
        parser.error("--kafka, --kafka-ssl and --kafka-ca belong together")
    let_signals_interrupt()
    bench = Bench(QUICK if arguments.quick else FULL)
    began = time.monotonic()
    try:
        kafkas = None
        if all(of_kafka):
            kafka = Peer("Kafka", arguments.kafka, None)
            tls = Side("Kafka's TLS", kafka, arguments.kafka_ssl, over_tls(arguments.kafka_ca))
            kafkas = tls, Side("Kafka's PLAINTEXT", kafka, arguments.kafka)
            kafka.wait_until_whole()
        measure(bench, parts, kafkas)
    except KafkaException as error:
        sys.exit(f"error: {error.args[0].str()}: is Kafka at {arguments.kafka}?")
    except (MinibrokerError, TimeoutError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}" if str(error) else 130)
    rows = bench.results.rows()
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    tell(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()

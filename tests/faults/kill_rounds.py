"""Kill members of a local cluster, round after round, under load; judge what was acknowledged.

    python -m tests.faults.kill_rounds --rounds 20 [--kinds leader,controller,both,zookeeper,all] [--json FILE]

Each kind gets a topic of its own (3 partitions, 3 replicas, min.insync.replicas=2) and one producer with acks=all that
sends all the time. In each round the victims are killed with SIGKILL; where the cluster can still take writes, it must
take some before the victims are started again; then every replica must be back in the ISR before the next round.
Exit code 1 unless nothing was lost, duplicated or out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from client.admin import Admin
from deploy.cluster_view import ClusterView
from deploy.local_cluster import ZOOKEEPER, LocalCluster, Member
from deploy.ports import free_ports
from deploy.trial import Trial, Verdict, longest_gap
from deploy.who import AllBrokers, BrokerId, Who, ZooKeeperServer
from protocol.model import TopicPartition

KINDS = ("leader", "controller", "both", "zookeeper", "all")
BROKERS = 3
PARTITIONS = 3
ACKNOWLEDGED_BETWEEN = 50
PATIENCE_S = 60.0


def lines() -> Iterator[bytes]:
    return (b"%020d %s" % (number, b"x" * 79) for number in itertools.count())


async def view(cluster: LocalCluster) -> ClusterView:
    return await asyncio.to_thread(cluster.view)


async def wait_until_whole(cluster: LocalCluster) -> None:
    """Until every broker is known, there is a controller, and every replica is in its ISR."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = await view(cluster)
            whole = all(sorted(p.isr_nodes) == sorted(p.replica_nodes) for p in seen.partitions.values())
            if seen.controller_id is not None and len(seen.brokers) == BROKERS and whole:
                return
            await asyncio.sleep(0.05)


async def victims(cluster: LocalCluster, kind: str, topic: str, number: int) -> list[Member]:
    seen = await view(cluster)
    leader = seen.partitions[TopicPartition(topic, number % PARTITIONS)].leader_id
    controller = seen.controller_id
    assert controller is not None
    if kind == "leader":
        return [leader]
    if kind == "controller":
        return [controller]
    if kind == "both":
        # Leadership does not move back by itself, so one broker may be both: then one more dies with it.
        return [controller, leader if leader != controller else controller % BROKERS + 1]
    if kind == "zookeeper":
        return [ZOOKEEPER]
    return list(range(1, BROKERS + 1))


def who(member: Member) -> Who:
    return ZooKeeperServer() if isinstance(member, str) else BrokerId(member)


async def one_round(cluster: LocalCluster, kind: str, trial: Trial, number: int) -> float:
    """Returns the longest time without an acknowledgement on any partition, in seconds."""
    await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
    dying = await victims(cluster, kind, trial.topic, number)
    began_s = time.monotonic()
    if kind == "all":
        await asyncio.to_thread(cluster.kill, AllBrokers())
    else:
        for member in dying:
            await asyncio.to_thread(cluster.kill, who(member))
    if kind not in ("both", "all"):
        await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
    if kind == "all":
        await asyncio.to_thread(cluster.start, AllBrokers())
    else:
        for member in dying:
            await asyncio.to_thread(cluster.start, who(member))
    await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
    gap = longest_gap(trial.acknowledged, began_s, time.monotonic())
    await wait_until_whole(cluster)
    return gap.seconds


async def rounds_of(cluster: LocalCluster, kind: str, rounds: int) -> tuple[Verdict, list[float]]:
    topic = f"rounds-{kind}"
    async with Admin(cluster.bootstrap()) as admin:
        await admin.create_topic(topic, partitions=PARTITIONS, replication_factor=BROKERS)
    trial = Trial(cluster.bootstrap(), topic, PARTITIONS, lines(), records_per_second=3_000)
    gaps = []
    async with trial.sending():
        for number in range(rounds):
            gaps.append(await one_round(cluster, kind, trial, number))
            print(f"{kind} {number + 1}/{rounds}: write gap {gaps[-1] * 1_000:.0f} ms", file=sys.stderr, flush=True)
    return await trial.verdict(), gaps


def report(kind: str, verdict: Verdict, gaps: Sequence[float]) -> dict[str, object]:
    milliseconds = sorted(gap * 1_000 for gap in gaps)
    at_95 = milliseconds[min(len(milliseconds) - 1, int(len(milliseconds) * 0.95))]
    return {
        "kind": kind,
        "rounds": len(gaps),
        **verdict._asdict(),
        "gap_median_ms": round(statistics.median(milliseconds)),
        "gap_p95_ms": round(at_95),
        "gap_max_ms": round(milliseconds[-1]),
    }


async def run(directory: Path, kinds: Sequence[str], rounds: int) -> list[dict[str, object]]:
    cluster = LocalCluster(directory)
    (base_port,) = free_ports(1)
    await asyncio.to_thread(cluster.up, BROKERS, base_port)
    try:
        await wait_until_whole(cluster)
        reports = []
        for kind in kinds:
            verdict, gaps = await rounds_of(cluster, kind, rounds)
            reports.append(report(kind, verdict, gaps))
            print(json.dumps(reports[-1]), flush=True)
        return reports
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}: choose from {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="minibroker-rounds-") as temporary:
        directory = arguments.keep or Path(temporary)
        reports = uvloop.run(run(directory, kinds, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n")
    bad = sum(1 for r in reports if r["lost"] or r["duplicated"] or r["out_of_order"])
    print(f"kill_rounds: {len(reports) - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

"""Kill members of a local cluster under load, round after round; check that no acknowledged record is lost.

    python -m tests.faults.kill_rounds --rounds 20 [--kinds leader,controller,both,zookeeper,all] [--json FILE]

Each kind has its own topic (3 partitions, 3 replicas, min.insync.replicas=2); `deploy.failover` describes a round. Exit
code 1 if a record was lost, duplicated, out of order or altered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.trials.failover import Victims, play_rounds

BROKERS = 3


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def run(directory: Path, kinds: Sequence[Victims], rounds: int) -> tuple[list[dict[str, object]], int]:
    """Return the report of each kind, and how many kinds had a record lost, duplicated, out of order or altered."""
    cluster = LocalCluster(directory)
    await asyncio.to_thread(cluster.up, BROKERS, free_ports(BROKERS)[0])
    reports: list[dict[str, object]] = []
    bad = 0
    try:
        for kind in kinds:
            outcome = await play_rounds(cluster, kind, rounds, tell)
            bad += not outcome.verdict.flawless
            reports.append({"kind": kind.value, "rounds": rounds, **outcome.figures()})
            print(json.dumps(reports[-1]), flush=True)
        return reports, bad
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(Victims))
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    names = arguments.kinds.split(",")
    unknown = [name for name in names if name not in list(Victims)]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}: choose from {', '.join(Victims)}")
    with tempfile.TemporaryDirectory(prefix="minibroker-rounds-") as temporary:
        directory = arguments.keep or Path(temporary)
        reports, bad = uvloop.run(run(directory, [Victims(name) for name in names], arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n")
    print(f"kill_rounds: {len(reports) - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

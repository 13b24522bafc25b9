"""Seconds from `up` on an empty directory to the first acknowledged record, with the topic's creation between.

python -m tests.benchmarks.bench_start [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.local_cluster import LocalCluster
from minibroker.deploy.ports import free_ports


async def first_record(bootstrap: str) -> None:
    async with Admin(bootstrap) as admin:
        await admin.create_topic("first", partitions=1, replication_factor=3)
    async with Producer(bootstrap) as producer:
        await producer.send("first", b"record")


def one_round() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="minibroker-start-") as directory:
        cluster = LocalCluster(Path(directory))
        began_s = time.monotonic()
        cluster.up(3, free_ports(3)[0])
        try:
            up_s = time.monotonic() - began_s
            asyncio.run(first_record(cluster.bootstrap()))
            return up_s, time.monotonic() - began_s
        finally:
            cluster.down(kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [one_round() for _ in range(parser.parse_args().rounds)]
    for name, values in (
        ("up", [up for up, _ in rounds]),
        ("first acknowledged record", [first for _, first in rounds]),
    ):
        print(f"{name:26} median {statistics.median(values):.2f} s, worst {max(values):.2f} s")


if __name__ == "__main__":
    main()

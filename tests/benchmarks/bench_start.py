"""Seconds from the start of a `minibroker.testing` cluster in an empty directory to the first acknowledged record.

python -m tests.benchmarks.bench_start [--rounds 5]

The processor time of each process is also printed, since it depends less on other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from minibroker import sync
from minibroker.deploy.local.local_cluster import LocalCluster as Launcher
from minibroker.testing import SyncLocalCluster


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_round() -> dict[str, float]:
    began_s, own_s = time.monotonic(), time.process_time()
    found: dict[str, float] = {}
    with SyncLocalCluster(3) as cluster:
        found["until the cluster is healthy"] = time.monotonic() - began_s
        cluster.create_topics(["first"])
        found["until a topic is created"] = time.monotonic() - began_s
        with sync.Producer(cluster.bootstrap_servers) as producer:
            producer.send("first", b"record").result()
        found["until a record is acknowledged"] = time.monotonic() - began_s
        known = Launcher(cluster.directory).file()
        assert known.zookeeper.process is not None
        found["processor: ZooKeeper"] = cpu_s(known.zookeeper.process.pid)
        found["processor: the three brokers"] = sum(
            cpu_s(entry.process.pid) for entry in known.brokers if entry.process
        )
        found["processor: the test's process"] = time.process_time() - own_s
        ending_s = time.monotonic()
    found["the end"] = time.monotonic() - ending_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [one_round() for _ in range(parser.parse_args().rounds)]
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        print(f"{name:31} median {statistics.median(values):.2f} s, worst {max(values):.2f} s")


if __name__ == "__main__":
    main()

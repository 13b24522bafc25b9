"""The cost of many partitions: their creation, and the loss of the controller and of another broker.

    python -m tests.benchmarks.bench_partitions [--partitions 1000 10000] [--rounds 1]

The cluster has three brokers and ten topics of replication factor 3. For each number of partitions, measured in seconds
of the wall clock and of the processor (of each process, from /proc):

- creation: from the request until every broker reports every partition with a leader;
- failover: from SIGKILL of the controller until every survivor reports a live leader of every partition;
- broker failure: the same for another broker, after the killed controller is back in every ISR.

Beside it, the slowest answer to ApiVersions requests, which are sent throughout: the delay that clients notice.

On ext4 without a journal, which small virtual machines use, files are created more slowly the more were deleted in the
minutes before. There, set TMPDIR to a directory in memory (/dev/shm) to compare the creations of two rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.errors import TopicErrors
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import ZOOKEEPER, BrokerId
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world.real import RealNetwork

BROKERS = 3
TOPICS = [f"bench-partitions-{number}" for number in range(10)]
PATIENCE_S = 180.0
ASK_TIMEOUT_S = 30.0
_BETWEEN_LOOKS_S = 0.1
_BETWEEN_PROBES_S = 0.01

Condition = Callable[[list[m.MetadataPartition], set[int]], bool]
"""Judges a broker's metadata: the partitions, and the brokers that it considers alive."""


class Asked:
    """The brokers, each with one connection for looks and one for probes."""

    def __init__(self, ports: dict[int, int]) -> None:
        self.ports = ports
        self._looks: dict[int, Connection] = {}
        self.slowest_s: dict[int, float] = {}

    async def look(self, broker_id: int, topics: list[str]) -> m.MetadataResponse | None:
        try:
            if broker_id not in self._looks or self._looks[broker_id].closed:
                self._looks[broker_id] = await self._connect(broker_id)
            return await self._looks[broker_id].request(
                apis.METADATA, m.MetadataRequest(topics), timeout_s=ASK_TIMEOUT_S
            )
        except NetworkError:
            return None

    async def _connect(self, broker_id: int) -> Connection:
        return await open_connection(
            RealNetwork(), LOOPBACK, self.ports[broker_id], client_id="bench", timeout_s=ASK_TIMEOUT_S
        )

    async def probe(self, broker_id: int) -> None:
        """Send requests until the broker has ended."""
        with contextlib.suppress(NetworkError):
            connection = await self._connect(broker_id)
            while True:
                asked_s = time.perf_counter()
                await connection.request(apis.API_VERSIONS, m.ApiVersionsRequest("b", "1"), timeout_s=ASK_TIMEOUT_S)
                took_s = time.perf_counter() - asked_s
                self.slowest_s[broker_id] = max(self.slowest_s.get(broker_id, 0.0), took_s)
                await asyncio.sleep(_BETWEEN_PROBES_S)

    async def until(self, broker_ids: list[int], partitions: int, holds: Condition) -> None:
        """Wait until the condition holds for every topic at every broker. Look at one topic at a time, since the
        metadata of all is expensive; begin with the last, since the controller handles topics in order."""
        async with asyncio.timeout(PATIENCE_S):
            for topic in reversed(TOPICS):
                for broker_id in broker_ids:
                    while True:
                        answer = await self.look(broker_id, [topic])
                        if answer is not None:
                            told, alive = answer.topics[0].partitions, {broker.node_id for broker in answer.brokers}
                            if len(told) == partitions // len(TOPICS) and holds(told, alive):
                                break
                        await asyncio.sleep(_BETWEEN_LOOKS_S)

    def close(self) -> None:
        for connection in self._looks.values():
            connection.close()


def cpu_s(cluster: LocalCluster) -> dict[str, float]:
    """The processor time of each live process."""
    known = cluster.file()
    processes = {f"broker {entry.id}": entry.process for entry in known.brokers} | {ZOOKEEPER: known.zookeeper.process}
    spent = {}
    for name, process in processes.items():
        with contextlib.suppress(OSError):
            assert process is not None
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            spent[str(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


@contextlib.asynccontextmanager
async def measured(what: str, cluster: LocalCluster, asked: Asked, broker_ids: list[int]) -> AsyncIterator[None]:
    asked.slowest_s.clear()
    probes = [asyncio.create_task(asked.probe(broker_id)) for broker_id in broker_ids]
    before, began_s = cpu_s(cluster), time.monotonic()
    try:
        yield
        wall_s, after = time.monotonic() - began_s, cpu_s(cluster)
    finally:
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
    spent = {name: after[name] - before[name] for name in after if name in before}
    by_process = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(spent.items()))
    slowest = ", ".join(f"{broker_id}: {seconds * 1_000:.0f}" for broker_id, seconds in sorted(asked.slowest_s.items()))
    print(
        f"  {what:15} {wall_s:6.2f} s; processor {sum(spent.values()):6.2f} s ({by_process}); "
        f"slowest answer in ms {slowest}",
        flush=True,
    )


def has_leaders(told: list[m.MetadataPartition], alive: set[int]) -> bool:
    return all(partition.leader_id in alive for partition in told)


def whole(told: list[m.MetadataPartition], _: set[int]) -> bool:
    return all(len(partition.isr_nodes) == BROKERS for partition in told)


def led_most_by(told: list[m.MetadataPartition], among: list[int]) -> int:
    leaders = Counter(partition.leader_id for partition in told)
    return max(among, key=lambda broker_id: leaders[broker_id])


async def one_round(cluster: LocalCluster, partitions: int) -> None:
    brokers = [entry.id for entry in cluster.file().brokers]
    asked = Asked({entry.id: entry.port for entry in cluster.file().brokers})
    async with measured("creation", cluster, asked, brokers):
        async with Admin(cluster.bootstrap(), default_api_timeout_ms=PATIENCE_S * 1_000) as admin:
            # A creation continues after the brokers' timeout; the wait below is for its end.
            with contextlib.suppress(TopicErrors):
                await admin.create_topics(
                    [NewTopic(topic, partitions // len(TOPICS), replication_factor=BROKERS) for topic in TOPICS]
                )
        await asked.until(brokers, partitions, has_leaders)
    for what in ("failover", "broker failure"):
        await asked.until(brokers, partitions, whole)
        answer = await asked.look(brokers[0], TOPICS)
        assert answer is not None
        controller = answer.controller_id
        told = [partition for topic in answer.topics for partition in topic.partitions]
        others = [b for b in brokers if b != controller]
        victim = controller if what == "failover" else led_most_by(told, others)
        survivors = [b for b in brokers if b != victim]

        def moved(told: list[m.MetadataPartition], alive: set[int], victim: int = victim) -> bool:
            return victim not in alive and has_leaders(told, alive)

        async with measured(what, cluster, asked, survivors):
            await asyncio.to_thread(cluster.kill, BrokerId(victim))
            await asked.until(survivors, partitions, moved)
        await asyncio.to_thread(cluster.start, BrokerId(victim))
    asked.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    let_signals_interrupt()
    for _ in range(arguments.rounds):
        for partitions in arguments.partitions:
            print(f"{partitions} partitions, {BROKERS} brokers", flush=True)
            with tempfile.TemporaryDirectory(prefix="minibroker-partitions-") as directory:
                cluster = LocalCluster(Path(directory))
                cluster.up(BROKERS, free_ports(BROKERS)[0])
                try:
                    uvloop.run(one_round(cluster, partitions))
                finally:
                    cluster.down(kill=True)


if __name__ == "__main__":
    main()

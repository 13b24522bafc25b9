"""What many partitions cost: creating them, and the loss of the controller and of another broker.

    python -m tests.benchmarks.bench_partitions [--partitions 1000 10000] [--rounds 1]

Three brokers, ten topics of replication factor 3 and nothing else. For each number of partitions, in seconds of the
wall clock and of the processor (of each process, by /proc):

- creation: from the request until every broker tells a client about every partition, with a leader;
- failover: from SIGKILL of the controller until every survivor tells of a live leader of every partition;
- broker failure: the same for a broker that is not the controller, once the killed one is back in every ISR.

Beside it the longest time that a broker took to answer ApiVersions, asked all the while: what clients notice.

On ext4 without a journal, as small virtual machines have it, a file is created the slower the more were deleted in the
minutes before: there, name a TMPDIR in memory (/dev/shm) to compare one round's creation with the next one's.
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
from minibroker.deploy.local.local_cluster import ZOOKEEPER, LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.who import BrokerId
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
"""Of what a broker tells: the partitions, and the brokers that it takes to be alive."""


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
        """Until the broker is gone."""
        with contextlib.suppress(NetworkError):
            connection = await self._connect(broker_id)
            while True:
                asked_s = time.perf_counter()
                await connection.request(apis.API_VERSIONS, m.ApiVersionsRequest("b", "1"), timeout_s=ASK_TIMEOUT_S)
                took_s = time.perf_counter() - asked_s
                self.slowest_s[broker_id] = max(self.slowest_s.get(broker_id, 0.0), took_s)
                await asyncio.sleep(_BETWEEN_PROBES_S)

    async def until(self, broker_ids: list[int], partitions: int, holds: Condition) -> None:
        """Of every topic at every broker; topic by topic, the last one first, since a look at all costs a broker much
        and the controller goes through them in order."""
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
    """Of each process that lives."""
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
            # A creation that takes longer than the brokers' patience goes on, and is waited for below.
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

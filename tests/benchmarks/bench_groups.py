"""The cost of idle group members: their heartbeats, and their fetches that wait for records.

    python -m tests.benchmarks.bench_groups [--members 1000] [--groups 100] [--brokers 1] [--seconds 15]

Every member has its own connection and sends a heartbeat every 3 s. Printed: the time until all groups are stable; and,
from the processor times in /proc, the share of a core that each broker uses for heartbeats only, the cost of one
heartbeat beyond an idle broker, and the share when each member also has a fetch that waits 500 ms for records.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from minibroker.client.admin import Admin
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.world.real import RealNetwork

HEARTBEAT_INTERVAL_S = 3.0
SESSION_TIMEOUT_MS = 45_000
FETCH_WAIT_MS = 500
RETRY_S = 0.1
TOPIC = "bench-groups"


class Member:
    def __init__(self, group_id: str, number: int) -> None:
        self.group_id = group_id
        self.number = number
        self.member_id = ""
        self.generation_id = -1
        self.connection: Connection
        self.to_leader: Connection
        self.heartbeats = 0

    async def connect(self, port: int) -> None:
        """Ask any broker for the coordinator and connect to it."""
        asked = await open_connection(RealNetwork(), LOOPBACK, port, client_id="bench", timeout_s=30)
        while True:
            found = await asked.request(apis.FIND_COORDINATOR, g.FindCoordinatorRequest(0, [self.group_id]))
            coordinator = found.coordinators[0]
            if not coordinator.error_code:
                break
            await asyncio.sleep(RETRY_S)
        asked.close()
        self.connection = await open_connection(
            RealNetwork(), coordinator.host, coordinator.port, client_id="bench", timeout_s=30
        )

    async def join(self) -> None:
        while True:
            request = g.JoinGroupRequest(
                self.group_id,
                SESSION_TIMEOUT_MS,
                60_000,
                self.member_id,
                None,
                "consumer",
                [g.JoinGroupProtocol("range", b"topics")],
            )
            joined = await self.connection.request(apis.JOIN_GROUP, request, timeout_s=120)
            self.member_id = joined.member_id or self.member_id
            if joined.error_code:
                if joined.error_code != ErrorCode.MEMBER_ID_REQUIRED:
                    await asyncio.sleep(RETRY_S)
                continue
            self.generation_id = joined.generation_id
            given = [g.SyncGroupAssignment(one.member_id, b"assignment") for one in joined.members]
            sync = g.SyncGroupRequest(self.group_id, self.generation_id, self.member_id, None, None, None, given)
            synced = await self.connection.request(apis.SYNC_GROUP, sync, timeout_s=120)
            if not synced.error_code and await self.heartbeat() == ErrorCode.NONE:
                return

    async def heartbeat(self) -> int:
        body = g.HeartbeatRequest(self.group_id, self.generation_id, self.member_id, None)
        self.heartbeats += 1
        return (await self.connection.request(apis.HEARTBEAT, body, timeout_s=30)).error_code

    async def keep_up(self, first_after_s: float) -> None:
        await asyncio.sleep(first_after_s)
        while True:
            code = await self.heartbeat()
            if code == ErrorCode.REBALANCE_IN_PROGRESS:
                await self.join()
            else:
                assert code == ErrorCode.NONE, ErrorCode(code).name
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def fetch(self, port: int) -> None:
        """Send one request after the other, on a connection to the leader."""
        connection = await open_connection(RealNetwork(), LOOPBACK, port, client_id="bench", timeout_s=30)
        fetches = [m.FetchTopic(TOPIC, "", [m.FetchPartition(self.number % 10, -1, 0, -1, -1, 1 << 20)])]
        while True:
            await connection.request(
                apis.FETCH, m.FetchRequest(-1, FETCH_WAIT_MS, 1, 1 << 20, 0, fetches), timeout_s=30
            )


def cpu_s(cluster: LocalCluster) -> list[float]:
    """The processor time of each broker."""
    spent = []
    for entry in cluster.file().brokers:
        assert entry.process is not None
        fields = Path(f"/proc/{entry.process.pid}/stat").read_text().rpartition(")")[2].split()
        spent.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return spent


async def shares(cluster: LocalCluster, seconds: float) -> list[float]:
    """The share of a core that each broker uses during these seconds."""
    before, began_s = cpu_s(cluster), time.monotonic()
    await asyncio.sleep(seconds)
    wall_s = time.monotonic() - began_s
    return [(after - first) / wall_s for first, after in zip(before, cpu_s(cluster), strict=True)]


def percent(parts: list[float]) -> str:
    return ", ".join(f"{100 * part:.1f} %" for part in parts)


async def run(cluster: LocalCluster, members: int, groups: int, seconds: float) -> None:
    port_of: dict[int | None, int] = {entry.id: entry.port for entry in cluster.file().brokers}
    ports = list(port_of.values())
    async with Admin(cluster.bootstrap()) as admin:
        await admin.create_topic(TOPIC, partitions=10, replication_factor=len(ports))
        leaders = [part.leader for part in (await admin.describe_topic(TOPIC)).partitions]
    all_members = [Member(f"group-{number % groups}", number) for number in range(members)]
    await all_members[0].connect(ports[0])
    all_members[0].connection.close()
    idle = await shares(cluster, min(seconds, 5))
    print(f"idle brokers: {percent(idle)} of a core", flush=True)

    began_s, before = time.monotonic(), sum(cpu_s(cluster))
    for start in range(0, members, 50):
        await asyncio.gather(*(one.connect(ports[one.number % len(ports)]) for one in all_members[start : start + 50]))

    tasks: list[asyncio.Task[None]] = []

    def start_task(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    async def join_and_keep_up(one: Member) -> None:
        await one.join()
        await one.keep_up(HEARTBEAT_INTERVAL_S * one.number / members)

    for one in all_members:
        start_task(join_and_keep_up(one))
    while not is_stable(all_members):
        await asyncio.sleep(RETRY_S)
        for task in tasks:
            if task.done():
                task.result()
    print(
        f"{members} members in {groups} groups are stable after {time.monotonic() - began_s:.1f} s, "
        f"{sum(cpu_s(cluster)) - before:.1f} s of the brokers' processors",
        flush=True,
    )
    await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    sent = sum(one.heartbeats for one in all_members)
    busy = await shares(cluster, seconds)
    rate = (sum(one.heartbeats for one in all_members) - sent) / seconds
    cost_us = 1e6 * (sum(busy) - sum(idle)) / rate
    print(f"heartbeats, {rate:.0f} a second: {percent(busy)} of a core; one costs {cost_us:.0f} us", flush=True)

    for one in all_members:
        start_task(one.fetch(port_of[leaders[one.number % 10]]))
    await asyncio.sleep(2)
    busy = await shares(cluster, seconds)
    print(f"and fetches that wait {FETCH_WAIT_MS} ms, {2 * members} a second: {percent(busy)} of a core", flush=True)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()


def is_stable(all_members: list[Member]) -> bool:
    generations: dict[str, set[int]] = {}
    for one in all_members:
        generations.setdefault(one.group_id, set()).add(one.generation_id)
    return all(len(numbers) == 1 and -1 not in numbers for numbers in generations.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    let_signals_interrupt()
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(Path(directory))
        cluster.up(options.brokers, free_ports(options.brokers)[0])
        try:
            uvloop.run(run(cluster, options.members, options.groups, options.seconds))
        finally:
            cluster.down(kill=True)


if __name__ == "__main__":
    main()

"""One attack on a cluster of three brokers beside an innocent producer, and the verdict.

The cluster is new for each attack, so that none hides what another has left behind. The innocent producer sends small
records with acks=all at a fixed rate; each latency counts from the time at which the record was due, so a stall is not
hidden by the records that it holds back. The attack runs in a process of its own at a low priority: on a small machine
it would otherwise take the processor from the brokers, as no attacker on another machine can.

Memory is each broker's peak (VmHWM, which the kernel resets on request), so that no spike falls between two samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.local import broker_process
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import ProcessState
from minibroker.protocol.errors import MinibrokerError
from tests.faults.hostile.attacks import ATTACK_S, Attack, Target
from tests.faults.hostile.frames import Check, bad_lines, resident_bytes

BROKERS = 3
INNOCENT_TOPIC = "innocent"
RECORDS_PER_SECOND = 100
QUIET_S, BRIEF_QUIET_S = 5.0, 2.0
MAX_GROWTH_BYTES = 256 * 1024 * 1024
LEFT_BYTES = 64 * 1024 * 1024
"""Growth that counts as given back: the allocator keeps some pages, and the logs have grown."""
BACK_WITHIN_S = 60.0
MAX_SLOWDOWN = 3.0
NOISE_MS = 50.0
"""The p99 that a small machine reaches without an attack."""
FAILOVER_MS = 3_000.0
"""The limit of the p99 for an attack that kills brokers: a failover on a machine that the attack keeps busy takes less,
and the end of a ZooKeeper session takes longer."""
PREPARED_WITHIN_S = 60.0
ENDED_WITHIN_S = 30.0
SESSION_ENDS = (" is over: ", ": ending the ZooKeeper session")


# --- The innocent producer ---------------------------------------------------------------------------------------


class Innocent:
    """Sends a record every 10 ms, and remembers how late each acknowledgement was."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._milliseconds: list[float] = []
        self.failed: list[str] = []

    async def measure(self, until: Callable[[float], bool]) -> float:
        """Send until `until(elapsed seconds)`, and return the p99 in milliseconds once all is acknowledged."""
        self._milliseconds.clear()
        began_s = time.monotonic()
        number = 0
        async with asyncio.TaskGroup() as group:
            while not until(time.monotonic() - began_s):
                due_s = began_s + number / RECORDS_PER_SECOND
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._send(number, due_s))
                number += 1
        ordered = sorted(self._milliseconds)
        return ordered[int(len(ordered) * 0.99)] if ordered else 0.0

    async def _send(self, number: int, due_s: float) -> None:
        try:
            await self._producer.send(INNOCENT_TOPIC, b"x" * 100, partition=number % BROKERS)
        except MinibrokerError as error:
            self.failed.append(str(error))
        self._milliseconds.append((time.monotonic() - due_s) * 1_000)


# --- The brokers' memory -----------------------------------------------------------------------------------------


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # the process is dead and not yet reaped


def _mebibytes(values: dict[int, int]) -> str:
    return ", ".join(f"{value / 2**20:.0f}" for value in values.values()) + " MiB"


async def _memory_back(pids: dict[int, int], before: dict[int, int]) -> tuple[float, dict[int, int]]:
    """Wait until each broker is near its old size, or BACK_WITHIN_S; return the seconds and the sizes."""
    began_s = time.monotonic()
    while True:
        now = {broker: resident_bytes(pid) for broker, pid in pids.items()}
        waited_s = time.monotonic() - began_s
        if waited_s >= BACK_WITHIN_S or all(now[broker] <= before[broker] + LEFT_BYTES for broker in pids):
            return waited_s, now
        await asyncio.sleep(0.25)


# --- The cluster ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _cluster(directory: Path, settings: dict[str, str]) -> AsyncIterator[Target]:
    *ports, zookeeper_port = free_ports(2 * BROKERS + 1)
    data = {number + 1: ports[number] for number in range(BROKERS)}
    control = {number + 1: ports[BROKERS + number] for number in range(BROKERS)}
    cluster = LocalCluster(directory)
    planned = ClusterFile(
        zookeeper=ZooKeeperEntry(f"{LOOPBACK}:{zookeeper_port}", zookeeper_port),
        brokers=tuple(
            BrokerEntry(
                broker, data[broker], settings={"listeners": broker_process.listeners(data[broker], control[broker])}
            )
            for broker in data
        ),
        settings=settings,
    )
    await asyncio.to_thread(cluster.launch, planned)
    try:
        yield Target(directory, cluster.bootstrap(), data, control)
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


class _Ended(NamedTuple):
    code: int
    output: str


async def _started(attack: Attack, target: Target, step: str, limit_s: float) -> asyncio.subprocess.Process:
    """Start a process for a step of the attack, and return once it begins."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.faults.hostile", "--play", attack.name, "--step", step),
        *("--data", str(target.directory), "--seconds", str(limit_s)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=lambda: os.nice(10) and None,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def _ended(process: asyncio.subprocess.Process, limit_s: float) -> _Ended:
    """Wait for the end of a step, and end it some time after its limit."""
    try:
        async with asyncio.timeout(limit_s + ENDED_WITHIN_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return _Ended(1, f"it did not end by itself within {limit_s + ENDED_WITHIN_S:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert process.returncode is not None
    return _Ended(process.returncode, output.decode(errors="replace").strip())


def target_of(directory: Path) -> Target:
    """Return the running cluster in the directory, for a process that did not start it."""
    cluster = LocalCluster(directory)
    brokers = cluster.file().brokers
    control = {entry.id: int(entry.settings["listeners"].rpartition(":")[2]) for entry in brokers}
    return Target(directory, cluster.bootstrap(), {entry.id: entry.port for entry in brokers}, control)


def _pids(cluster: LocalCluster) -> dict[int, int]:
    return {
        entry.id: entry.process.pid
        for entry in cluster.file().brokers
        if entry.process is not None and cluster.state_of(entry.id) is ProcessState.RUNNING
    }


def _sessions_over(cluster: LocalCluster) -> int:
    text = "".join(cluster.log_of(broker + 1).read_text(errors="replace") for broker in range(BROKERS))
    return sum("ZooKeeper session" in line and any(end in line for end in SESSION_ENDS) for line in text.splitlines())


# --- One attack ----------------------------------------------------------------------------------------------------


async def judge(attack: Attack, directory: Path, *, brief: bool) -> list[Check]:
    """Run the attack on a new cluster below `directory`; return the checks."""
    async with (
        _cluster(directory, dict(attack.settings)) as target,
        Admin(target.bootstrap) as admin,
        Producer(target.bootstrap, linger_ms=0) as producer,
    ):
        cluster = target.cluster()
        await admin.create_topic(INNOCENT_TOPIC, partitions=BROKERS, replication_factor=BROKERS)
        innocent = Innocent(producer)
        if attack.prepare is not None:
            preparing = await _started(attack, target, "prepare", PREPARED_WITHIN_S)
            prepared = await _ended(preparing, PREPARED_WITHIN_S)
            if prepared.code:
                return [Check("preparation", False, prepared.output)]
        quiet_s = BRIEF_QUIET_S if brief else QUIET_S
        await innocent.measure(lambda elapsed_s: elapsed_s >= 1.0)  # warms up
        quiet_ms = await innocent.measure(lambda elapsed_s: elapsed_s >= quiet_s)
        pids = _pids(cluster)
        before = {broker: resident_bytes(pid) for broker, pid in pids.items()}
        sessions = _sessions_over(cluster)
        for pid in pids.values():
            _reset_peak(pid)

        playing = asyncio.create_task(_ended(await _started(attack, target, "attack", ATTACK_S), ATTACK_S))
        began_s = time.monotonic()
        attacked_ms = await innocent.measure(lambda _: playing.done())
        ended = await playing
        took_s = time.monotonic() - began_s

        alive = _pids(cluster)
        survivors = {broker: pid for broker, pid in alive.items() if pids.get(broker) == pid}
        peaks = {broker: _peak_bytes(pid) for broker, pid in survivors.items()}
        back_s, left = await _memory_back(survivors, before)
        lost = _sessions_over(cluster) - sessions
        lines = [line for broker in target.data_ports for line in bad_lines(cluster.log_of(broker))]
        limit_ms = FAILOVER_MS if attack.ends_sessions else max(MAX_SLOWDOWN * quiet_ms, NOISE_MS)
        grown = max((peaks[broker] - before[broker] for broker in peaks), default=0)
        dead = sorted(pids.keys() - survivors.keys())
        return [
            Check("the cluster did what it must", not ended.code, f"{took_s:.1f} s; {ended.output or 'nothing more'}"),
            Check("every broker lives", attack.ends_sessions or not dead, f"dead: {dead}" if dead else "all"),
            Check(
                "memory is bounded",
                grown <= MAX_GROWTH_BYTES,
                f"{_mebibytes(before)} before, at most {_mebibytes(peaks)} (limit +{MAX_GROWTH_BYTES >> 20})",
            ),
            Check("memory goes back", back_s < BACK_WITHIN_S, f"{_mebibytes(left)} after {back_s:.1f} s"),
            Check(
                "the innocent producer is served",
                attacked_ms <= limit_ms and not innocent.failed,
                f"p99 {attacked_ms:.1f} ms, {quiet_ms:.1f} ms quiet (limit {limit_ms:.0f} ms), "
                f"{len(innocent.failed)} failed {innocent.failed[:1]}",
            ),
            Check("no ZooKeeper session is lost", attack.ends_sessions or not lost, f"{lost} lost"),
            Check("no unhandled exception in a log", not lines, f"{len(lines)} lines {lines[:3]}"),
        ]

"""The simulated world: hosts with a network and durable disks, and the processes that they run.

    async def scenario() -> None:
        simulation = Simulation()
        world = simulation.host("broker-1").start_process()
        await world.process.run(program(world))
        world.process.kill()

    run(scenario(), seed=7)

`Simulation` holds what all processes share: the loop's time, the network, ZooKeeper. A `Host` has a name, an address
and a disk. A `VirtualWorld` implements `minibroker.protocol.world.World` for one process, and dies with it. Each
process draws its randomness from its own generator, derived from the run's seed, so processes do not affect each
other's draws.

Only tests cause faults: with `process.kill`, `process.pause`, `loop.jump`, `host.power_cut`, `host.clock_offset_ms`,
`host.disk.faults`, and the methods of `simulation.network` and `simulation.zookeeper` that name hosts.

Processes use ZooKeeper through `ProcessZooKeeper`. It stops the heartbeats of its sessions while the process is
paused, and when it is killed. Watchers and listeners run as the process that set them, whichever process caused the
event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.deploy.simulator.disk import ProcessDisk, VirtualDisk
from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.network import ProcessNetwork, VirtualNetwork
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.zookeeper import VirtualSession, VirtualZooKeeper
from minibroker.protocol.world import Operation, SessionState, Stat, Watcher, WatchEvent, World

T = TypeVar("T")

WALL_CLOCK_START_MS = 1_704_067_200_000
"""The wall clock's time when a run begins: January 1, 2024, 00:00 UTC."""

THREADS = 4
"""Number of functions that an executor runs at the same time."""
_HUNG_LOOK_S = 0.1
_MIN_WORK_S = 0.000_05
_MAX_WORK_S = 0.001

ZOOKEEPER_LATENCY_S = (0.000_1, 0.001)


class Simulation:
    """One world. Create it inside `minibroker.deploy.simulator.loop.run`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), (
            "a simulation runs on a virtual loop only: see minibroker.deploy.simulator.loop.run"
        )
        self.loop = loop
        self.network = VirtualNetwork(loop, self.random("network"))
        self.zookeeper_latency_s = ZOOKEEPER_LATENCY_S
        """Minimum and maximum, for each request and each response."""
        latencies = self.random("zookeeper")
        self.zookeeper = VirtualZooKeeper(
            lambda: latencies.uniform(*self.zookeeper_latency_s),
            self.random("faults of zookeeper"),
        )
        self._hosts: dict[str, Host] = {}

    def random(self, purpose: str) -> Random:
        """Return a generator for one purpose; it is the same in every run with this seed."""
        return Random(f"{self.loop.seed} {purpose}")

    def host(self, name: str) -> Host:
        """Return the host of that name. Creates it if necessary."""
        if name not in self._hosts:
            self._hosts[name] = Host(self, name, self.network.add_host(name))
        return self._hosts[name]


class Host:
    """A machine. Its disk and its address outlive its processes."""

    def __init__(self, simulation: Simulation, name: str, address: str) -> None:
        self.simulation = simulation
        self.name = name
        self.address = address
        self.clock_offset_ms = 0
        """Error of its wall clock. May be set at any time."""
        self.disk = VirtualDisk(
            f"boot-1-of-{name}", simulation.random(f"disk of {name}"), simulation.loop.record, self.wall_ms
        )
        self._starts = 0
        self._boots = 1
        self._has_power = True
        self._processes: list[Process] = []

    def wall_ms(self) -> int:
        return self.observed_ms() + self.clock_offset_ms

    def observed_ms(self) -> int:
        return WALL_CLOCK_START_MS + int(self.simulation.loop.now_s * 1000)

    def start_process(self) -> VirtualWorld:
        """Start a process, and return its World. The process is named after its host and the number of the start, as in
        `broker-1#2`. After a power cut, this also boots the host.
        """
        if not self._has_power:
            self._has_power = True
            self.simulation.network.power_on(self.address)
        self._starts += 1
        process = Process(self.simulation.loop, f"{self.name}#{self._starts}", self.address)
        self._processes = [*(other for other in self._processes if other.alive), process]
        return VirtualWorld(process, self)

    def power_cut(self) -> None:
        """Kill all processes without notice to their peers. The disk keeps synced data and some of the rest.

        The next `start_process` finds another boot id.
        """
        self.simulation.loop.record(f"{self.name}: power cut")
        self._has_power = False
        self.simulation.network.power_off(self.address)
        for process in self._processes:
            process.kill()
        self._processes.clear()
        self._boots += 1
        self.disk.power_cut(f"boot-{self._boots}-of-{self.name}")


class VirtualWorld:
    """`minibroker.protocol.world.World` for one process."""

    def __init__(self, process: Process, host: Host) -> None:
        simulation = host.simulation
        self.process = process
        self.clock = VirtualClock(simulation.loop, host, process)
        self.network: ProcessNetwork = simulation.network.of(process)
        self.disk: ProcessDisk = host.disk.of(process)
        self.zookeeper = ProcessZooKeeper(simulation.zookeeper, process)
        self.random = simulation.random(process.name)
        self._host = host
        self._executors = 0

    def new_executor(self, name: str) -> VirtualExecutor:
        host, number = self._host, self._executors
        self._executors += 1
        purpose = f"executor of {self.process.name}" + (f", {number}" if number else "")
        return VirtualExecutor(self.process, host.disk, host.simulation.random(purpose), name)

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> VirtualBeside:
        return VirtualBeside(asyncio.ensure_future(main(self)))


def _silence_clients_of_killed_processes() -> None:
    """Suppress the warning about unclosed clients if their process was killed: here, its objects outlive a process."""
    dropped = ClientRuntime.dropped

    def dropped_by_the_living(runtime: ClientRuntime, *arguments: Any) -> None:
        if not isinstance(runtime.world, VirtualWorld) or runtime.world.process.alive:
            dropped(runtime, *arguments)

    ClientRuntime.dropped = dropped_by_the_living  # type: ignore[assignment, method-assign]


_silence_clients_of_killed_processes()


class VirtualClock:
    """`minibroker.protocol.world.Clock`."""

    def __init__(self, loop: VirtualLoop, host: Host, process: Process) -> None:
        self._loop = loop
        self._host = host
        self._process = process

    def monotonic(self) -> float:
        return self._loop.now_s + self._process.ahead_s

    def running_s(self) -> float:
        """Return the seconds for which the process has not been paused, counted from any moment."""
        return self._loop.now_s - self._process.paused_s

    def wall_ms(self) -> int:
        return self._host.wall_ms()

    def observed_ms(self) -> int:
        return self._host.observed_ms()


class VirtualExecutor:
    """`minibroker.protocol.world.Executor`: THREADS functions at a time. Each waits a moment, then runs.

    An executor has the name of a log directory. While that directory hangs, no function begins. On a slow disk a
    function waits for the duration of one fdatasync before it runs, because its data must not be durable at once, and
    for the duration of its other fdatasyncs afterwards.
    """

    def __init__(self, process: Process, disk: VirtualDisk, random: Random, name: str) -> None:
        self._process = process
        self._name = name
        self._disk = disk
        self._random = random
        self._threads = asyncio.Semaphore(THREADS)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        self._process.check()
        # Shielded: a thread continues if its caller is cancelled, and its error is lost then, as in asyncio.
        work = asyncio.create_task(self._run(function, arguments), name="worker thread")
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(work)

    async def _run(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        faults = self._disk.faults
        async with self._threads:
            await asyncio.sleep(self._random.uniform(_MIN_WORK_S, _MAX_WORK_S) + faults.sync_delay_s)
            while faults.is_hung(self._name):  # noqa: ASYNC110 (no event: a test sets it at any time)
                await asyncio.sleep(_HUNG_LOOK_S)
            syncs_before = self._disk.syncs
            try:
                return function(*arguments)
            finally:
                for _ in range(self._disk.syncs - syncs_before - 1):
                    if not faults.sync_delay_s:  # the test has healed the disk meanwhile
                        break
                    await asyncio.sleep(faults.sync_delay_s)


class VirtualBeside:
    """`minibroker.protocol.world.Beside`: an ordinary task, because nothing blocks the virtual loop."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def call(self, function: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(function)

    async def wait(self) -> None:
        await self._task


# --- ZooKeeper -----------------------------------------------------------------------------------------------


Event = TypeVar("Event")


@dataclass(frozen=True)
class _OwnedCallback(Generic[Event]):
    """A callback that always runs as its process. Equal callbacks are equal, because ZooKeeper registers them once."""

    callback: Callable[[Event], None]
    process: Process = field(compare=False)

    def __call__(self, event: Event) -> None:
        asyncio.get_running_loop().call_soon(self.callback, event, context=self.process.new_context())


class ProcessZooKeeper:
    """`minibroker.protocol.world.ZooKeeper` for one process. If the process is killed, its sessions time out."""

    def __init__(self, server: VirtualZooKeeper, process: Process) -> None:
        self._server = server
        self._process = process

    async def connect(self, servers: str, session_timeout_ms: int, connect_timeout_ms: int) -> ProcessSession:
        self._process.check()
        session = await self._server.connect(servers, session_timeout_ms, connect_timeout_ms, owner=self._process.name)
        self._process.on_kill(session.sever)
        self._process.on_pause(session.pause)
        self._process.on_resume(session.go_on)
        return ProcessSession(session, self._process)


class ProcessSession:
    """`minibroker.protocol.world.ZooKeeperSession` for one process. Tests inject faults through `virtual`, the session
    itself."""

    def __init__(self, session: VirtualSession, process: Process) -> None:
        self.virtual = session
        self._process = process

    def _owned(self, watch: Watcher | None) -> _OwnedCallback[WatchEvent] | None:
        self._process.check()
        return None if watch is None else _OwnedCallback(watch, self._process)

    @property
    def session_id(self) -> int:
        return self.virtual.session_id

    @property
    def state(self) -> SessionState:
        return self.virtual.state

    @property
    def silent_s(self) -> float:
        return self.virtual.silent_s

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._process.check()
        self.virtual.on_state(_OwnedCallback(listener, self._process))

    def on_heard_again(self, listener: Callable[[float, float], None]) -> None:
        self.virtual.on_heard_again(listener)

    async def create(self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False) -> str:
        self._process.check()
        return await self.virtual.create(path, data, ephemeral=ephemeral, sequence=sequence)

    async def get(self, path: str, watch: Watcher | None = None) -> tuple[bytes, Stat]:
        return await self.virtual.get(path, self._owned(watch))

    async def get_all(self, paths: Sequence[str]) -> list[tuple[bytes, Stat] | None]:
        self._process.check()
        return await self.virtual.get_all(paths)

    async def exists(self, path: str, watch: Watcher | None = None) -> Stat | None:
        return await self.virtual.exists(path, self._owned(watch))

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        return await self.virtual.children(path, self._owned(watch))

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        self._process.check()
        return await self.virtual.set(path, data, version)

    async def delete(self, path: str, version: int = -1) -> None:
        self._process.check()
        await self.virtual.delete(path, version)

    async def multi(self, operations: Sequence[Operation]) -> list[str | Stat | None]:
        self._process.check()
        return await self.virtual.multi(operations)

    async def close(self) -> None:
        self._process.check()
        await self.virtual.close()

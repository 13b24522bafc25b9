from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.ownership import Owner, ProcessKilled, current_owner
from minibroker.deploy.simulator.world import WALL_CLOCK_START_MS, Simulation, VirtualWorld
from minibroker.protocol.apis import METADATA
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.messages import MetadataRequest
from minibroker.protocol.world import (
    ConnectionLoss,
    Create,
    NoNode,
    SessionState,
    WatchEvent,
    WatchKind,
    World,
    ZooKeeperSession,
)
from tests.running import run_by
from tests.simulation.simulator.test_virtual_network import _serve


def _world(name: str = "server") -> VirtualWorld:
    return Simulation().host(name).start_process()


@run_by(on_virtual_loop)
async def test_the_virtual_world_is_a_world() -> None:
    world: World = _world()
    assert await world.new_executor("any").run(divmod, 7, 2) == (3, 1)


@run_by(on_virtual_loop)
async def test_clocks_show_virtual_time() -> None:
    world = _world()
    assert (world.clock.monotonic(), world.clock.wall_ms()) == (0.0, WALL_CLOCK_START_MS)
    await asyncio.sleep(90)
    assert (world.clock.monotonic(), world.clock.wall_ms()) == (90.0, WALL_CLOCK_START_MS + 90_000)


def test_each_process_draws_its_own_random_numbers_from_the_seed() -> None:
    async def main() -> list[float]:
        simulation = Simulation()
        worlds = [simulation.host(name).start_process() for name in ("one", "one", "other")]
        return [world.random.random() for world in worlds]

    assert len(set(run(main(), seed=1) + run(main(), seed=2))) == 6
    assert run(main(), seed=1) == run(main(), seed=1)


@run_by(on_virtual_loop)
async def test_a_killed_process_cannot_use_its_world() -> None:
    world = _world()
    session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
    world.process.kill()
    with pytest.raises(ProcessKilled):
        await world.new_executor("any").run(int)
    with pytest.raises(ProcessKilled):
        await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
    with pytest.raises(ProcessKilled):
        await session.create("/node", b"")
    with pytest.raises(ProcessKilled):
        await session.get("/")


@run_by(on_virtual_loop)
async def test_the_session_of_a_killed_process_lives_for_its_timeout() -> None:
    simulation = Simulation()
    victim, watcher = (simulation.host(name).start_process() for name in ("victim", "watcher"))
    gone: asyncio.Future[float] = simulation.loop.create_future()

    async def hold() -> None:
        session = await victim.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        await session.create("/ephemeral", b"", ephemeral=True)
        await asyncio.Event().wait()

    async def watch() -> None:
        session = await watcher.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        seen = await session.exists("/ephemeral", lambda event: gone.set_result(watcher.clock.monotonic()))
        assert seen is not None

    victim.process.start(hold())
    await asyncio.sleep(1)
    await watcher.process.run(watch())
    await asyncio.sleep(600)  # a living process keeps its session
    killed_at = watcher.clock.monotonic()
    victim.process.kill()
    assert await gone - killed_at == pytest.approx(6, abs=0.01)


@run_by(on_virtual_loop)
async def test_a_watch_event_arrives_although_its_cause_is_killed_at_that_moment() -> None:
    simulation = Simulation()
    writer, watcher = (simulation.host(name).start_process() for name in ("writer", "watcher"))
    events: list[WatchEvent] = []
    names: list[str] = []
    looking: list[asyncio.Task[None]] = []

    async def watch() -> ZooKeeperSession:
        session = await watcher.zookeeper.connect("zookeeper:2181", 6_000, 6_000)

        def on_event(event: WatchEvent) -> None:
            events.append(event)
            looking.append(asyncio.create_task(look()))

        async def look() -> None:
            names.extend(await session.children("/"))

        await session.children("/", on_event)
        return session

    async def write() -> None:
        session = await writer.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        simulation.zookeeper.after = lambda *_: writer.process.kill()
        await session.multi([Create("/one", b""), Create("/two", b"")])

    await watcher.process.run(watch())
    with pytest.raises(ProcessKilled):
        await writer.process.run(write())
    await asyncio.sleep(1)
    assert events == [WatchEvent(WatchKind.CHILDREN, "/")]
    assert names == ["one", "two"]


@run_by(on_virtual_loop)
async def test_tasks_of_a_watcher_belong_to_the_process_that_set_it() -> None:
    simulation = Simulation()
    writer, watcher = (simulation.host(name).start_process() for name in ("writer", "watcher"))
    called_as: list[Owner | None] = []

    async def watch() -> None:
        session = await watcher.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        session.on_state(lambda _: called_as.append(current_owner.get()))
        await session.exists("/node", lambda _: called_as.append(current_owner.get()))
        simulation.loop.call_later(1, session.virtual.expire)

    async def write() -> None:
        session = await writer.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        await session.create("/node", b"")

    await watcher.process.run(watch())
    await writer.process.run(write())
    await asyncio.sleep(2)
    assert called_as == [watcher.process, watcher.process]


@run_by(on_virtual_loop)
async def test_the_session_of_a_process_that_killed_itself_times_out() -> None:
    simulation = Simulation()
    world = simulation.host("server").start_process()

    async def program() -> None:
        session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        await session.create("/ephemeral", b"", ephemeral=True)
        world.process.kill()

    world.process.start(program())
    await asyncio.sleep(5)
    assert simulation.zookeeper.has("/ephemeral")
    await asyncio.sleep(2)
    assert not simulation.zookeeper.has("/ephemeral")


@run_by(on_virtual_loop)
async def test_a_killed_process_receives_no_watch_events() -> None:
    simulation = Simulation()
    writer, victim = (simulation.host(name).start_process() for name in ("writer", "victim"))
    told: list[object] = []

    async def watch() -> None:
        session = await victim.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        session.on_state(told.append)
        await session.exists("/node", told.append)
        await asyncio.Event().wait()

    async def write() -> None:
        session = await writer.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        await session.create("/node", b"")

    victim.process.start(watch())
    await asyncio.sleep(1)
    victim.process.kill()
    await writer.process.run(write())
    await asyncio.sleep(60)
    assert told == []


@run_by(on_virtual_loop)
async def test_a_watch_set_twice_fires_once() -> None:
    world = _world()
    events: list[WatchEvent] = []
    session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
    watch = events.append
    await session.exists("/node", watch)
    await session.exists("/node", watch)
    await session.create("/node", b"")
    await asyncio.sleep(1)
    assert events == [WatchEvent(WatchKind.CREATED, "/node")]


@run_by(on_virtual_loop)
async def test_a_process_receives_the_states_of_its_session() -> None:
    world = _world()
    states: list[SessionState] = []
    session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
    session.on_state(states.append)
    session.virtual.suspend()
    await asyncio.sleep(1)
    session.virtual.resume()
    session.virtual.expire()
    await asyncio.sleep(1)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED, SessionState.EXPIRED]


# --- Pauses, clocks, threads --------------------------------------------------------------------------------------


@run_by(on_virtual_loop)
async def test_the_session_of_a_paused_process_outlives_a_short_pause() -> None:
    simulation = Simulation()
    world = simulation.host("server").start_process()
    session = await world.process.run(world.zookeeper.connect("zookeeper:2181", 6_000, 6_000))
    events: list[object] = []
    session.on_state(events.append)
    await world.process.run(session.children("/", events.append))
    for _ in range(3):
        world.process.pause()
        await asyncio.sleep(5)
        assert events == []
        world.process.resume()
        await asyncio.sleep(2)
    world.process.pause()
    simulation.zookeeper.make("/node")
    await asyncio.sleep(1)
    assert events == []
    world.process.resume()
    await asyncio.sleep(60)
    assert events == [WatchEvent(WatchKind.CHILDREN, "/")]
    assert await world.process.run(session.exists("/node")) is not None


def test_a_process_paused_beyond_its_session_timeout_learns_of_the_expiry_when_it_resumes() -> None:
    async def main() -> None:
        simulation = Simulation()
        world = simulation.host("server").start_process()
        seen: list[object] = []

        async def program() -> None:
            session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
            session.on_state(seen.append)
            await session.create("/mine", b"", ephemeral=True)
            await asyncio.sleep(2)
            # It resumes late and does not know yet that its session has expired.
            seen.append(session.state)
            try:
                await session.create("/zombie", b"")
            except ConnectionLoss:
                seen.append("lost")

        world.process.start(program())
        await asyncio.sleep(1)
        world.process.pause()
        await asyncio.sleep(5.9)
        assert simulation.zookeeper.has("/mine")
        await asyncio.sleep(0.2)
        assert not simulation.zookeeper.has("/mine")
        await asyncio.sleep(60)
        assert seen == []
        world.process.resume()
        await asyncio.sleep(0.21)
        assert seen == [SessionState.CONNECTED, SessionState.SUSPENDED, "lost", SessionState.EXPIRED]
        assert not simulation.zookeeper.has("/zombie")

    for seed in range(10):
        run(main(), seed=seed)


@run_by(on_virtual_loop)
async def test_a_paused_process_learns_of_its_lost_connection_when_it_resumes() -> None:
    simulation = Simulation()
    world = simulation.host("server").start_process()
    session = await world.process.run(world.zookeeper.connect("zookeeper:2181", 6_000, 6_000))
    states: list[SessionState] = []
    session.on_state(states.append)
    world.process.pause()
    simulation.zookeeper.lose_connections("server")
    await asyncio.sleep(1)
    assert session.state is SessionState.CONNECTED
    world.process.resume()
    await asyncio.sleep(0.21)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    await asyncio.sleep(60)
    assert await world.process.run(session.exists("/")) is not None


@run_by(on_virtual_loop)
async def test_a_jump_of_the_wall_clock_changes_only_the_wall_clock() -> None:
    host = Simulation().host("server")
    world = host.start_process()
    await asyncio.sleep(10)
    host.clock_offset_ms = -60_000
    assert (world.clock.monotonic(), world.clock.wall_ms()) == (10.0, WALL_CLOCK_START_MS - 50_000)
    assert host.start_process().clock.wall_ms() == WALL_CLOCK_START_MS - 50_000


def test_work_in_the_executor_takes_time_and_at_most_four_functions_run_at_once() -> None:
    async def main() -> list[int]:
        world = _world()
        executor = world.new_executor("any")
        order: list[int] = []
        started_s = world.clock.monotonic()
        works = [world.process.start(executor.run(order.append, number)) for number in range(40)]
        await asyncio.sleep(0.000_05)
        assert order == []
        await asyncio.gather(*works)
        assert 0.002 < world.clock.monotonic() - started_s < 0.010
        assert all(number <= position + 3 for position, number in enumerate(order))
        return order

    orders = [run(main(), seed=seed) for seed in range(3)]
    assert all(sorted(order) == list(range(40)) != order for order in orders)
    assert orders[0] != orders[1]


@run_by(on_virtual_loop)
async def test_executor_work_survives_a_cancelled_caller_but_not_a_kill_or_pause() -> None:
    simulation = Simulation()
    done: list[str] = []

    def work_of(name: str) -> VirtualWorld:
        world = simulation.host(name).start_process()
        tasks[name] = world.process.start(world.new_executor("any").run(done.append, name))
        return world

    tasks: dict[str, asyncio.Task[None]] = {}
    work_of("cancelled")
    killed = work_of("killed")
    paused = work_of("paused")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks["cancelled"].cancel()
    killed.process.kill()
    paused.process.pause()
    await asyncio.sleep(1)
    assert done == ["cancelled"]
    paused.process.resume()
    await asyncio.sleep(1)
    assert done == ["cancelled", "paused"]


@run_by(on_virtual_loop)
async def test_an_error_in_the_executor_is_raised_in_its_caller() -> None:
    world = _world()
    with pytest.raises(ZeroDivisionError):
        await world.new_executor("any").run(divmod, 1, 0)


def test_on_a_slow_disk_an_fdatasync_is_durable_only_after_its_delay() -> None:
    async def main() -> bytes:
        host = Simulation().host("server")
        world = host.start_process()
        host.disk.faults.sync_delay_s = 2.0
        file = world.disk.open("/log", create=True)
        world.disk.sync_directory("/")
        file.pwrite([b"x"], 0)
        executor = world.new_executor("any")

        def sync_three_times() -> None:
            for _ in range(3):
                file.fdatasync()

        await executor.run(sync_three_times)
        assert world.clock.monotonic() == pytest.approx(6, abs=0.01)
        file.pwrite([b"y"], 1)
        world.process.start(executor.run(file.fdatasync))
        await asyncio.sleep(1.9)
        host.power_cut()
        return host.start_process().disk.read_file("/log")

    assert b"x" in {run(main(), seed=seed) for seed in range(10)}


# --- Determinism --------------------------------------------------------------------------------------------------


async def _busy_scenario() -> str:
    """Run processes that use the network, the disk and ZooKeeper and are killed. Returns the trace."""
    simulation = Simulation()
    servers = [simulation.host(f"server-{number}").start_process() for number in range(3)]
    ports = [(await world.process.run(_serve(world.network, ""))).port for world in servers]

    async def program(world: VirtualWorld) -> None:
        session = await world.zookeeper.connect("zookeeper:2181", 6_000, 6_000)
        path = await session.create("/member-", b"", ephemeral=True, sequence=True)
        log = world.disk.open("/log", create=True)
        lost: set[str] = set()
        for step in range(30):
            number = world.random.randrange(3)
            try:
                connection = await open_connection(
                    world.network, f"server-{number}", ports[number], client_id=path, timeout_s=1
                )
                answers = [
                    connection.send(METADATA, MetadataRequest([f"{path}-{step}-{n}"]), timeout_s=1) for n in range(5)
                ]
                done, _ = await asyncio.wait([asyncio.ensure_future(answer) for answer in answers])
                for answer in done:
                    log.pwrite([answer.result().topics[0].name.encode()], log.size())
                connection.close()
            except NetworkError as error:
                lost.add(str(error))
            for name in await session.children("/"):
                try:
                    log.pwrite([(await session.get(f"/{name}"))[0]], log.size())
                except NoNode:
                    lost.add(name)
            await asyncio.sleep(world.random.random())

    clients = [simulation.host(f"client-{number}").start_process() for number in range(4)]
    for world in clients:
        world.process.start(program(world))
    for world in (clients[1], servers[0], clients[2]):
        await asyncio.sleep(4)
        world.process.kill()
    await asyncio.sleep(20)
    return simulation.loop.trace


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = [run(_busy_scenario(), seed=seed) for seed in (1, 2, 1)]
    assert traces[0] == traces[2] != traces[1]


def test_the_same_seed_gives_the_same_trace_in_another_process_with_other_hashes() -> None:
    program = (
        "from minibroker.deploy.simulator.loop import run\n"
        "from tests.simulation.simulator.test_virtual_world import _busy_scenario\n"
        "print(run(_busy_scenario(), seed=3))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert traces == {run(_busy_scenario(), seed=3) + "\n"}

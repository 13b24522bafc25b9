"""Crash detection on the virtual network, with exact times and faults that real sockets on loopback cannot show; and
the peers that a broker watches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from minibroker.controller.governing.crash_detection import PROMPT_S, PROVEN_S, CrashDetector
from minibroker.controller.governing.crash_watch import CrashWatch
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.model import CONTROL_LISTENER, Endpoint, RegisteredBroker
from minibroker.protocol.world import Incoming, ZooKeeperSession
from tests.running import run_by

PORT = 9093
DETECTION_S = 0.5
SLACK_S = 0.05
"""Seconds for latencies and for the pauses between attempts."""


class Suspected(NamedTuple):
    broker_id: int
    epoch: int
    reason: str
    at_s: float


class Watching:
    """A detector on its own host, and brokers on hosts `broker-N` that accept connections and send nothing."""

    def __init__(self) -> None:
        self.simulation = Simulation()
        self.network = self.simulation.network
        self.suspected: list[Suspected] = []
        self.zookeeper_takes_s = 0.0
        self.processes: dict[int, VirtualWorld] = {}
        here = self.simulation.host("watcher").start_process()
        self.clock = here.clock
        self.process = here.process
        self.detector = CrashDetector(here.network, here.clock, int(DETECTION_S * 1_000), self._in_touch)
        self.detector.on_suspicion(self._suspected)
        self._changed = asyncio.Event()

    def _suspected(self, broker_id: int, epoch: int, reason: str) -> None:
        self.suspected.append(Suspected(broker_id, epoch, reason, self.clock.monotonic()))
        self._changed.set()

    async def _in_touch(self) -> None:
        if self.zookeeper_takes_s:
            await asyncio.sleep(self.zookeeper_takes_s)

    async def start_broker(self, broker_id: int = 1) -> None:
        world = self.processes[broker_id] = self.simulation.host(f"broker-{broker_id}").start_process()

        async def listen() -> None:
            tasks: set[asyncio.Task[asyncio.Protocol]] = set()

            def accept(incoming: Incoming) -> None:
                tasks.add(asyncio.ensure_future(incoming.attach(asyncio.Protocol)))

            listener = await world.network.listen("", PORT)
            listener.start(accept)

        await world.process.run(listen())

    def kill(self, broker_id: int = 1) -> None:
        self.processes[broker_id].process.kill()

    def follow(self, *epochs: int, broker_id: int = 1) -> None:
        endpoint = Endpoint(CONTROL_LISTENER, f"broker-{broker_id}", PORT)
        self.detector.follow([RegisteredBroker(broker_id, epoch, (endpoint,)) for epoch in epochs])

    async def probe(self, epoch: int, broker_id: int = 1) -> list[int]:
        endpoint = Endpoint(CONTROL_LISTENER, f"broker-{broker_id}", PORT)
        return await self.detector.probe([RegisteredBroker(broker_id, epoch, (endpoint,))])

    async def next_suspicion(self, within_s: float = 200.0) -> Suspected:
        self._changed.clear()
        async with asyncio.timeout(within_s):
            await self._changed.wait()
        return self.suspected[-1]


def with_watching(scenario: Callable[[Watching], Awaitable[None]]) -> None:
    async def main() -> None:
        watching = Watching()
        await watching.start_broker()

        async def inside() -> None:
            try:
                await scenario(watching)
            finally:
                await watching.detector.close()

        await watching.process.run(inside())

    for seed in range(3):
        run(main(), seed=seed)


async def stands(watching: Watching, epoch: int = 1) -> None:
    """Follow the broker until a connection to it has been open for a while."""
    watching.follow(epoch)
    await asyncio.sleep(2 * PROVEN_S)
    assert not any(suspected.epoch == epoch for suspected in watching.suspected)


@run_by(with_watching)
async def test_a_killed_process_is_suspected_within_a_moment(watching: Watching, /) -> None:
    await stands(watching)
    killed_s = watching.clock.monotonic()
    watching.kill()
    found = await watching.next_suspicion()
    assert (found.broker_id, found.epoch) == (1, 1)
    assert "refuses" in found.reason
    assert found.at_s - killed_s < SLACK_S


@run_by(with_watching)
async def test_a_stopped_process_is_left_to_the_session_timeout(watching: Watching, /) -> None:
    await stands(watching)
    watching.processes[1].process.pause()
    await asyncio.sleep(600)
    assert not watching.suspected


@run_by(with_watching)
async def test_a_host_without_power_is_detected_by_keepalive_plus_the_detection_time(watching: Watching, /) -> None:
    await stands(watching)
    cut_s = watching.clock.monotonic()
    watching.simulation.host("broker-1").power_cut()
    found = await watching.next_suspicion()
    assert "cannot be reached (no answer)" in found.reason
    assert 2 + DETECTION_S <= found.at_s - cut_s <= 3 + DETECTION_S + SLACK_S


@run_by(with_watching)
async def test_a_host_whose_name_vanishes_is_suspected_right_after_keepalive(watching: Watching, /) -> None:
    await stands(watching)
    gone_s = watching.clock.monotonic()
    watching.network.unreachable("broker-1", True)
    found = await watching.next_suspicion()
    assert "Name or service not known" in found.reason
    assert 2 <= found.at_s - gone_s <= 3 + SLACK_S


@run_by(with_watching)
async def test_an_unknown_host_name_is_suspected_only_after_the_detection_time(watching: Watching, /) -> None:
    watching.network.unreachable("broker-1", True)
    began_s = watching.clock.monotonic()
    watching.follow(1)
    found = await watching.next_suspicion()
    assert DETECTION_S <= found.at_s - began_s <= DETECTION_S + SLACK_S


@run_by(with_watching)
async def test_a_link_restored_within_the_detection_time_is_not_a_crash(watching: Watching, /) -> None:
    await stands(watching)
    watching.network.reset("watcher", "broker-1")
    watching.network.block("watcher", "broker-1")
    await asyncio.sleep(DETECTION_S - SLACK_S)
    watching.network.heal()
    await asyncio.sleep(60)
    assert not watching.suspected


@run_by(with_watching)
async def test_a_rebooted_host_without_its_broker_is_suspected_as_soon_as_it_refuses(watching: Watching, /) -> None:
    await stands(watching)
    host = watching.simulation.host("broker-1")
    host.power_cut()
    host.start_process()
    up_s = watching.clock.monotonic()
    found = await watching.next_suspicion()
    assert "refuses" in found.reason
    assert found.at_s - up_s <= 1 + SLACK_S  # the next keepalive probe is answered by a reset


@pytest.mark.parametrize("is_refused", [True, False])
@run_by(with_watching)
async def test_consecutive_suspicions_take_2_8_32_and_then_always_128_seconds(
    watching: Watching, /, is_refused: bool
) -> None:
    await stands(watching)
    if is_refused:
        watching.kill()
    else:
        watching.simulation.host("broker-1").power_cut()
    await watching.next_suspicion()
    for epoch, takes_s in ((2, 2), (3, 8), (4, 32), (5, 128), (6, 128)):
        began_s = watching.clock.monotonic()
        watching.follow(epoch)
        found = await watching.next_suspicion()
        assert found.epoch == epoch
        assert takes_s <= found.at_s - began_s <= takes_s + 2 * DETECTION_S


@run_by(with_watching)
async def test_a_broker_that_came_back_is_suspected_at_once_when_it_crashes_again(watching: Watching, /) -> None:
    for epoch in (1, 2, 3):
        await stands(watching, epoch)
        killed_s = watching.clock.monotonic()
        watching.kill()
        assert (await watching.next_suspicion()).at_s - killed_s < SLACK_S
        await watching.start_broker()


@run_by(with_watching)
async def test_each_watch_suspects_once(watching: Watching, /) -> None:
    watching.kill()
    watching.follow(1)
    await watching.next_suspicion()
    watching.follow(1)
    await asyncio.sleep(600)
    assert len(watching.suspected) == 1


@run_by(with_watching)
async def test_no_broker_is_suspected_while_zookeeper_is_slow_and_dead_ones_are_afterwards(
    watching: Watching, /
) -> None:
    await stands(watching)
    watching.zookeeper_takes_s = 2 * PROMPT_S
    watching.kill()
    await asyncio.sleep(60)
    assert not watching.suspected
    watching.zookeeper_takes_s = PROMPT_S / 2
    answers_s = watching.clock.monotonic()
    assert (await watching.next_suspicion()).at_s - answers_s < 4 * PROMPT_S + SLACK_S


@run_by(with_watching)
async def test_a_probe_names_brokers_that_refuse_or_were_suspected_not_unreachable_ones(watching: Watching, /) -> None:
    assert await watching.probe(1) == []
    watching.network.block("watcher", "broker-1")
    began_s = watching.clock.monotonic()
    assert await watching.probe(1) == []
    assert watching.clock.monotonic() - began_s <= DETECTION_S + SLACK_S
    watching.follow(1)
    await watching.next_suspicion()
    assert await watching.probe(1) == [1]
    assert await watching.probe(2) == [], "nothing is known of its next run"
    watching.network.heal()
    watching.kill()
    assert await watching.probe(2) == [1]


@run_by(with_watching)
async def test_a_suspected_broker_with_a_new_connection_is_not_named_by_a_probe(watching: Watching, /) -> None:
    watching.kill()
    watching.follow(1)
    await watching.next_suspicion()
    assert await watching.probe(1) == [1]
    await watching.start_broker()
    watching.follow()
    watching.follow(1)
    await asyncio.sleep(SLACK_S)
    assert await watching.probe(1) == []


# --- The peers that a broker watches -------------------------------------------------------------------------------


class Office:
    """A CrashWatch of broker 0. `removed` lists the controllers that it removed: broker id and controller epoch."""

    def __init__(self, watching: Watching, session: ZooKeeperSession) -> None:
        self.removed: list[tuple[int, int]] = []
        self._watching = watching
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []
        self.watch = CrashWatch(
            0,
            watching.detector,
            self._sessions,
            lambda coroutine, name: self._tasks.append(asyncio.ensure_future(coroutine)),
            lambda broker_id, epoch, _reason: self.removed.append((broker_id, epoch)),
        )
        watching.detector.on_suspicion(self.watch.suspected)

    async def _sessions(self) -> ZooKeeperSession:
        return self._session

    def register(self, broker_id: int) -> RegisteredBroker:
        """Register the broker with a new epoch, as a new run of it does."""
        zookeeper, path = self._watching.simulation.zookeeper, znodes.broker_path(broker_id)
        if zookeeper.has(path):
            zookeeper.remove(path)
        endpoint = Endpoint(CONTROL_LISTENER, f"broker-{broker_id}", PORT)
        zookeeper.make(path, znodes.encode_broker((endpoint,), None, 0))
        return RegisteredBroker(broker_id, zookeeper.stat(path).czxid, (endpoint,))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def with_office(scenario: Callable[[Watching, Office], Awaitable[None]]) -> None:
    """Run the scenario while brokers 1 and 2 run."""

    async def inside(watching: Watching) -> None:
        await watching.start_broker(2)
        session = await watching.simulation.zookeeper.connect("zookeeper:2181", 6_000, 1_000)
        office = Office(watching, session)
        try:
            await scenario(watching, office)
        finally:
            await office.close()

    with_watching(inside)


@run_by(with_office)
async def test_a_controller_is_watched_once_registered_and_removed_once_crashed(
    watching: Watching, office: Office, /
) -> None:
    office.watch.controller_changed(1, 5)
    await asyncio.sleep(1)
    office.register(1)
    await asyncio.sleep(1)
    assert not office.removed
    watching.kill(1)
    await asyncio.sleep(1)
    assert office.removed == [(1, 5)]


@run_by(with_office)
async def test_a_crashed_broker_is_not_removed_from_an_office_that_it_does_not_hold(
    watching: Watching, office: Office, /
) -> None:
    brokers = (office.register(0), office.register(1), office.register(2))
    office.watch.controller_changed(0, 5)
    office.watch.brokers_changed(brokers)
    await asyncio.sleep(1)
    watching.kill(1)
    found = await watching.next_suspicion()
    assert (found.broker_id, found.epoch) == (1, brokers[1].epoch)
    await asyncio.sleep(600)
    assert office.removed == []
    assert len(watching.suspected) == 1, "no broker watches itself"


@run_by(with_office)
async def test_the_suspicion_of_a_broker_does_not_depose_another_that_is_the_controller(
    watching: Watching, office: Office, /
) -> None:
    """The controller in the detector's process does not know yet that it is out of office."""

    office.watch.brokers_changed((office.register(1), office.register(2)))
    office.watch.controller_changed(2, 6)
    await asyncio.sleep(1)
    watching.kill(1)
    await watching.next_suspicion()
    assert office.removed == []
    watching.kill(2)
    await watching.next_suspicion()
    assert office.removed == [(2, 6)]


@pytest.mark.parametrize("knows_address", [True, False])
@run_by(with_office)
async def test_a_controller_out_of_office_is_not_watched(
    watching: Watching, office: Office, /, knows_address: bool
) -> None:
    office.register(1)
    office.watch.controller_changed(1, 5)
    await asyncio.sleep(1 if knows_address else 0)  # or the look-up is in flight
    office.watch.controller_changed(None, 6)
    await asyncio.sleep(1)
    watching.kill(1)
    await asyncio.sleep(60)
    assert not watching.suspected


@run_by(with_office)
async def test_a_broker_watches_only_the_controller_unless_it_is_the_controller_itself(
    watching: Watching, office: Office, /
) -> None:
    brokers = (office.register(1), office.register(2))
    office.watch.controller_changed(1, 5)
    await asyncio.sleep(1)
    office.watch.controller_changed(0, 6)
    office.watch.brokers_changed(brokers)
    await asyncio.sleep(1)
    office.watch.controller_changed(2, 7)
    office.watch.brokers_changed(())
    await asyncio.sleep(1)
    watching.kill(1)
    await asyncio.sleep(60)
    assert not watching.suspected
    watching.kill(2)
    await asyncio.sleep(1)
    assert office.removed == [(2, 7)]


@run_by(with_office)
async def test_a_controller_that_leaves_before_its_address_is_found_is_not_watched(
    watching: Watching, office: Office, /
) -> None:
    office.watch.controller_changed(1, 5)
    office.watch.controller_changed(None, 5)
    office.watch.controller_changed(2, 6)
    office.register(1)
    office.register(2)
    await asyncio.sleep(1)
    watching.kill(1)
    await asyncio.sleep(60)
    assert not watching.suspected
    watching.kill(2)
    await asyncio.sleep(1)
    assert office.removed == [(2, 6)]

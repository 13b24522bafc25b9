"""Topics are created, enlarged and deleted while the controller is killed before or after each of its writes and
requests. The next controller finishes the operation, unless it had not begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from minibroker.controller.executing import executor
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.messages import CreatePartitionsTopic
from minibroker.protocol.world import ConnectionLoss, Operation
from tests.unit.controller.cluster import Cluster, ObedientBroker, Office, Told, simulate
from tests.unit.controller.test_controller_storm import Storm

BROKERS = (1, 2, 3)
TOPIC = "orders"
BEFORE, AFTER = ((1, 2, 3), (2, 3, 1)), ((1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 3, 2))


async def create(office: Office) -> None:
    await office.create(TOPIC, *BEFORE)


async def delete(office: Office) -> None:
    topic_id = office.controller.state.topic_ids[TOPIC] if office.controller.state else ""
    await office.delete(TOPIC)
    await office.run(office.controller.until_deleted({TOPIC: topic_id}))


async def enlarge(office: Office) -> None:
    await office.run(office.controller.create_partitions([CreatePartitionsTopic(TOPIC, len(AFTER))]))


async def enlarge_by_hand(office: Office) -> None:
    zookeeper = office.cluster.zookeeper
    topic = znodes.decode_topic(TOPIC, zookeeper.data(znodes.topic_path(TOPIC)))
    grown = znodes.TopicZnode(topic.topic_id, dict(enumerate(AFTER)))
    zookeeper.make(znodes.topic_path(TOPIC), znodes.encode_topic(grown))


class Killer:
    """Kills the controller at the n-th write or request, before it arrives or after it was carried out. Counts them."""

    def __init__(self, cluster: Cluster, office: Office) -> None:
        self.writes = self.requests = 0
        self.killed = False
        self._office = office
        self._at: tuple[str, int, bool] | None = None
        self._storm = Storm(cluster, Random(0))
        self._storm.random.random = lambda: 1.0  # type: ignore[method-assign]
        cluster.zookeeper.before = self._before_write
        cluster.zookeeper.after = self._after_write
        for broker in cluster.brokers.values():
            broker.answer = self._answerer(broker)

    def unhealed(self) -> str | None:
        return self._storm.unhealed() or (str(self._storm.problems) if self._storm.problems else None)

    def begin(self, at: tuple[str, int, bool] | None) -> None:
        """Kill at `at`: a write or a request, its number, and whether after it was carried out."""
        self.writes = self.requests = 0
        self._at = at

    def _is_time(self, kind: str, number: int, is_done: bool) -> bool:
        if self._at != (kind, number, is_done):
            return False
        self._at = None
        self._office.kill()
        return True

    def _is_controllers(self, session: VirtualSession) -> bool:
        return session is self._office._session.virtual if self._office._session else False

    def _before_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        if self._is_controllers(session):
            self.writes += 1
            if self._is_time("write", self.writes, False):
                raise ConnectionLoss("it never arrived")

    def _after_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        self._storm._watch_write(session, operations)
        if self._is_controllers(session):
            self._is_time("write", self.writes, True)

    def _answerer(self, broker: ObedientBroker) -> Callable[[Told], m.Message | None]:
        def answer(told: Told) -> m.Message | None:
            if not self._office.world.process.alive:
                return broker.obey(told)
            self.requests += 1
            if self._is_time("request", self.requests, False):
                return None
            response = broker.obey(told)
            return None if self._is_time("request", self.requests, True) else response

        return answer


async def _play(
    cluster: Cluster, operation: Callable[[Office], Coroutine[Any, Any, None]], at: tuple[str, int, bool] | None
) -> Killer:
    office = await cluster.start(BROKERS)
    killer = Killer(cluster, office)
    if operation is not create:
        await office.create(TOPIC, *BEFORE)
    await cluster.until(lambda: killer.unhealed() is None, f"made before {at}")
    await office.idle()
    killer.begin(at)
    is_told = False

    async def operate() -> None:
        nonlocal is_told
        with suppress(BrokerError, ProcessKilled):
            await operation(office)
            is_told = True

    operating = asyncio.create_task(operate())
    await asyncio.sleep(1)
    killer.killed = not office.world.process.alive
    if killer.killed:
        await cluster.elect(101)
    else:
        assert at is None or at[2], "only what is refused is not carried out, and so has no point after it"
        await office.idle()
    await cluster.until(lambda: killer.unhealed() is None, f"healed after {at}")
    await asyncio.wait([operating], timeout=1)
    path = znodes.topic_path(TOPIC)
    found = znodes.decode_topic(TOPIC, cluster.zookeeper.data(path)).partitions if cluster.zookeeper.has(path) else {}
    counts_of: dict[Any, tuple[int, int]] = {create: (0, 2), delete: (2, 0), enlarge: (2, 4), enlarge_by_hand: (4, 4)}
    counts = counts_of[operation]
    assert len(found) == counts[1] if is_told else len(found) in counts, (at, found)
    assert cluster.zookeeper.has(znodes.topic_config_path(TOPIC)) == bool(found), at
    if not found:
        assert not any(broker.roles for broker in cluster.brokers.values()), at
    return killer


@pytest.mark.slow
@pytest.mark.parametrize("operation", [create, delete, enlarge, enlarge_by_hand])
def test_the_next_controller_finishes_what_was_begun_wherever_its_predecessor_was_killed(
    operation: Callable[[Office], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MAX_OPERATIONS", 2)  # each write in a multi of its own
    points: dict[str, int] = {}
    killed = 0

    async def count(cluster: Cluster) -> None:
        killer = await _play(cluster, operation, None)
        points.update(write=killer.writes, request=killer.requests)

    simulate(count)
    for kind, number in points.items():
        for nth in range(1, number + 1):
            for is_done in (False, True):

                async def scenario(cluster: Cluster, at: tuple[str, int, bool] = (kind, nth, is_done)) -> None:
                    nonlocal killed
                    killed += (await _play(cluster, operation, at)).killed

                simulate(scenario)
    print(f"{operation.__name__}: {points['write']} writes, {points['request']} requests, killed at {killed} points")
    assert killed >= 2 * sum(points.values()) - 2
    assert points["request"] >= 6

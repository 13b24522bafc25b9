"""The watches of a controller: it sets all of them when it takes office, and follows none after it resigns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.controller.decisions import events
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.world import Watcher
from tests.running import run_by

TOPIC = "orders"

CHANGES = {
    # Kafka's BrokerChangeHandler, TopicChangeHandler, TopicDeletionHandler, IsrChangeNotificationHandler and
    # LogDirEventNotificationHandler: the parent that each watches, and a child that has no consequences.
    znodes.BROKER_IDS: ("not-a-number", b""),
    znodes.TOPICS: ("malformed", b"{}"),
    znodes.DELETE_TOPICS: ("unknown-topic", b""),
    znodes.ISR_CHANGES: ("isr_change_0000000007", b'{"version":1,"partitions":[]}'),
    znodes.LOG_DIR_EVENTS: ("log_dir_event_0000000007", b'{"version":1,"broker":99,"event":1}'),
}

NODES = (
    # Kafka's PreferredReplicaElectionHandler, PartitionReassignmentHandler and PartitionModificationsHandler: the node
    # that each watches, whether it exists or not.
    znodes.PREFERRED_REPLICA_ELECTION,
    znodes.REASSIGN_PARTITIONS,
    znodes.topic_path(TOPIC),
)


def with_controller(scenario: Callable[[VirtualCluster, int], Awaitable[None]]) -> None:
    """Run the scenario with three brokers and the id of the controller."""

    async def main() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        await cluster.until(cluster.active_controllers)
        await asyncio.sleep(1)
        [controller] = cluster.active_controllers()
        await scenario(cluster, controller)

    run(main(), seed=1)


async def resigned(cluster: VirtualCluster, controller: int) -> int:
    """Depose the controller, and return its successor."""
    cluster.simulation.zookeeper.remove(znodes.CONTROLLER)
    await cluster.until(
        lambda: len(cluster.active_controllers()) == 1 and controller not in cluster.active_controllers()
    )
    await asyncio.sleep(1)
    [successor] = cluster.active_controllers()
    return successor


@pytest.fixture
def lists_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each listing of children from now on: the broker and the path."""
    read = []
    children = VirtualSession.children

    async def listed(self: VirtualSession, path: str, watch: Watcher | None = None) -> list[str]:
        read.append((self.owner, path))
        return await children(self, path, watch)

    monkeypatch.setattr(VirtualSession, "children", listed)
    return read


def test_every_watch_of_a_controller_is_covered() -> None:
    """Watches on states that the controller could not read are not in the list."""
    assert len(CHANGES) + len(NODES) == len(set(events.WATCHED) - {events.UnreadableStateChange})


@run_by(with_controller)
async def test_only_the_controller_registers_each_listener_when_it_takes_office(
    cluster: VirtualCluster, controller: int, /
) -> None:
    """ZooKeeper may keep watches of the former controller; the last test shows that they have no effect."""

    def watching(path: str) -> set[str]:
        return {session.owner for session, _ in cluster.simulation.zookeeper.tree._child_watches[path]}

    former = cluster.process(controller).name
    assert {path: watching(path) for path in CHANGES} == {path: {former} for path in CHANGES}
    successor = cluster.process(await resigned(cluster, controller)).name
    assert {path: watching(path) - {former} for path in CHANGES} == {path: {successor} for path in CHANGES}


@pytest.mark.parametrize("path", NODES)
@run_by(with_controller)
async def test_a_node_is_watched_only_by_the_controller_and_its_successor(
    cluster: VirtualCluster, controller: int, /, path: str
) -> None:
    zookeeper = cluster.simulation.zookeeper

    def watching() -> set[str]:
        return {session.owner for session, _ in zookeeper.tree._data_watches.get(path, {})}

    zookeeper.make(znodes.topic_path(TOPIC), znodes.encode_topic(znodes.TopicZnode("an-id", {0: (0, 1)})))
    await asyncio.sleep(1)
    former = cluster.process(controller).name
    assert watching() == {former}
    successor = cluster.process(await resigned(cluster, controller)).name
    assert watching() - {former} == {successor}


@pytest.mark.parametrize("path", CHANGES)
@run_by(with_controller)
async def test_a_change_is_read_by_the_controller_and_so_is_the_next_one(
    cluster: VirtualCluster, controller: int, /, path: str, lists_read: list[tuple[str, str]]
) -> None:
    name, data = CHANGES[path]
    for number in range(2):
        lists_read.clear()
        cluster.simulation.zookeeper.make(f"{path}/{name}{number}", data)
        await asyncio.sleep(1)
        assert (cluster.process(controller).name, path) in lists_read


@pytest.mark.parametrize("path", CHANGES)
@run_by(with_controller)
async def test_a_change_after_a_resignation_is_read_only_by_the_next_controller(
    cluster: VirtualCluster, controller: int, /, path: str, lists_read: list[tuple[str, str]]
) -> None:
    successor = await resigned(cluster, controller)
    lists_read.clear()
    name, data = CHANGES[path]
    cluster.simulation.zookeeper.make(f"{path}/{name}", data)
    await asyncio.sleep(1)
    readers = {owner for owner, listed in lists_read if listed == path}
    assert readers == {cluster.process(successor).name}

"""Registration on simulated ZooKeeper, network and time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from minibroker.controller.governing.registration import (
    BrokerIdTaken,
    ClusterIdChanged,
    NodeOwner,
    Registration,
    SecretDiffers,
    judge_node,
)
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.network import ProcessNetwork
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, NO_EPOCH, Endpoint
from minibroker.protocol.world import (
    Check,
    ConnectionLoss,
    Create,
    Delete,
    Incoming,
    Operation,
    SessionExpired,
    SessionState,
)
from minibroker.protocol.znodes import (
    CLUSTER_ID,
    CONTROLLER_EPOCH,
    PERSISTENT_PATHS,
    SINCE_THIS_REGISTRATION,
    broker_path,
    decode_broker,
    encode_broker,
    encode_cluster_id,
)
from tests.running import run_by
from tests.waiting import until

SESSION_TIMEOUT_MS = 6_000
PATIENCE_S = 60.0
PATH = broker_path(1)


class Run:
    """One run of broker 1 on a host of its own, or on the host of another run."""

    def __init__(self, cluster: Cluster, host: str, port: int, broker_id: int = 1, secret: bytes | None = None) -> None:
        self.cluster = cluster
        self.world: VirtualWorld = cluster.simulation.host(host).start_process()
        self.endpoints = (Endpoint(DEFAULT_LISTENER, host, port), Endpoint(CONTROL_LISTENER, host, port + 1))
        self.broker_id = broker_id
        self.secret = secret
        self.trusted_since = SINCE_THIS_REGISTRATION
        self.heard: list[str] = []
        self.failures: list[Exception] = []
        self._registration: Registration | None = None

    async def start(self) -> Run:
        await self.world.process.run(self._start())
        return self

    async def _start(self) -> None:
        for endpoint in self.endpoints:
            listener = await self.world.network.listen(endpoint.host, endpoint.port)
            listener.start(Incoming.close)
        self._registration = self.make()
        await self._registration.connect()
        await self._registration.start(self.endpoints)

    def make(self) -> Registration:
        registration = Registration(
            self.world,
            zookeeper_connect="zookeeper:2181",
            session_timeout_ms=SESSION_TIMEOUT_MS,
            connect_timeout_ms=1_000,
            broker_id=self.broker_id,
            trusted_since=lambda: self.trusted_since,
            secret=self.secret,
            rack="r1",
        )
        registration.on_session(lambda session, epoch: self.heard.append(f"{session.session_id:x} {epoch}"))
        registration.on_session(lambda _, epoch: self.resolve(epoch))
        registration.on_lost(lambda state: self.heard.append(state.value))
        registration.on_failure(self.failures.append)
        return registration

    def resolve(self, broker_epoch: int) -> None:
        """Remember the epoch, as the data directory does."""
        if self.trusted_since == SINCE_THIS_REGISTRATION:
            self.trusted_since = broker_epoch

    @property
    def registration(self) -> Registration:
        assert self._registration is not None
        return self._registration

    @property
    def session(self) -> VirtualSession:
        [session] = [s for s in self.cluster.zookeeper.sessions if s.session_id == self.registration.session.session_id]
        return session

    async def close(self) -> None:
        await self.world.process.run(self.registration.close())

    def holds_the_node(self) -> bool:
        """The node exists, belongs to this run's session, and has the epoch that this run knows."""
        zookeeper = self.cluster.zookeeper
        try:
            session_id = self.registration.session.session_id
        except SessionExpired:
            return False
        if not zookeeper.has(PATH):
            return False
        stat = zookeeper.stat(PATH)
        return (stat.ephemeral_owner, stat.czxid) == (session_id, self.registration.broker_epoch)


class Cluster:
    def __init__(self) -> None:
        self.simulation = Simulation()
        self.zookeeper = self.simulation.zookeeper

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, PATIENCE_S, every_s=0.001)


def simulate(scenario: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scenario(Cluster())

    run(main())


# --- The decision ---

OWN = (Endpoint(DEFAULT_LISTENER, "here", 9092),)
ELSEWHERE = (Endpoint(DEFAULT_LISTENER, "there", 9092),)


@pytest.mark.parametrize(
    ("owner", "recorded", "was_registered", "answers", "verdict"),
    [
        (0xA, OWN, False, None, NodeOwner.OURS),
        (0xA, ELSEWHERE, True, True, NodeOwner.OURS),
        (0xB, OWN, True, None, NodeOwner.STALE),
        (0xB, ELSEWHERE, False, True, NodeOwner.STALE),
        (0xC, OWN, False, None, NodeOwner.STALE),
        (0xC, OWN, True, None, NodeOwner.UNKNOWN),
        (0xC, ELSEWHERE, False, None, NodeOwner.UNKNOWN),
        (0xC, ELSEWHERE, False, False, NodeOwner.STALE),
        (0xC, ELSEWHERE, False, True, NodeOwner.ALIVE),
        (0xC, ELSEWHERE, True, False, NodeOwner.UNKNOWN),
        (0xC, (), False, False, NodeOwner.UNKNOWN),
        (0, ELSEWHERE, False, None, NodeOwner.UNKNOWN),
    ],
)
def test_whose_node_it_is_for_session_a_after_session_b(
    owner: int, recorded: tuple[Endpoint, ...], was_registered: bool, answers: bool | None, verdict: NodeOwner
) -> None:
    judged = judge_node(
        owner,
        recorded,
        session_id=0xA,
        former_session_ids={0xB},
        own_endpoints=OWN,
        was_registered=was_registered,
        answers=answers,
    )
    assert judged is verdict


# --- Registering ---


@run_by(simulate)
async def test_a_broker_is_registered_with_its_endpoints_and_the_node_is_its_epoch(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    stat = cluster.zookeeper.stat(PATH)
    recorded = decode_broker(1, cluster.zookeeper.data(PATH), stat.czxid)
    assert (recorded.endpoints, recorded.rack) == (broker.endpoints, "r1")
    assert broker.registration.broker_epoch == stat.czxid
    assert broker.heard == [f"{stat.ephemeral_owner:x} {stat.czxid}"]
    assert set(PERSISTENT_PATHS) <= set(cluster.zookeeper.paths())
    await broker.close()
    assert not cluster.zookeeper.has(PATH)
    assert len(broker.heard) == 1


@run_by(simulate)
async def test_every_persistent_znode_of_a_kafka_cluster_is_there(cluster: Cluster, /) -> None:
    """Kafka's `ZkData.PersistentZkPaths`, for tools that look for them."""

    broker = await Run(cluster, "host-1", 9092).start()
    assert {
        "/consumers",
        "/brokers/ids",
        "/brokers/topics",
        "/config/changes",
        "/admin/delete_topics",
        "/brokers/seqid",
        "/isr_change_notification",
        "/latest_producer_id_block",
        "/log_dir_event_notification",
        "/config/topics",
        "/config/clients",
        "/config/users",
        "/config/brokers",
        "/config/ips",
    } <= set(cluster.zookeeper.paths())
    await broker.close()


@run_by(simulate)
async def test_a_registration_and_the_next_one_say_since_when_the_data_can_be_trusted(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    first = cluster.zookeeper.stat(PATH).czxid
    assert decode_broker(1, cluster.zookeeper.data(PATH), first).trusted_since == first
    broker.session.expire()
    await cluster.until(lambda: broker.registration.broker_epoch > first and broker.holds_the_node())
    second = cluster.zookeeper.stat(PATH).czxid
    assert decode_broker(1, cluster.zookeeper.data(PATH), second).trusted_since == first


@run_by(simulate)
async def test_brokers_agree_on_the_cluster_id_and_know_it_before_they_register(cluster: Cluster, /) -> None:
    runs = [Run(cluster, f"host-{i}", 9092, i) for i in (1, 2, 3)]
    registrations = [r.make() for r in runs]
    await asyncio.gather(*(r.world.process.run(g.connect()) for r, g in zip(runs, registrations, strict=True)))
    assert len({g.cluster_id for g in registrations}) == 1
    assert cluster.zookeeper.names("/brokers/ids") == []
    assert {g.broker_epoch for g in registrations} == {NO_EPOCH}


@run_by(simulate)
async def test_where_no_zookeeper_answers_connecting_fails_and_names_it(cluster: Cluster, /) -> None:
    cluster.zookeeper.reachable = False
    with pytest.raises(ConnectionLoss, match="zookeeper:2181"):
        await Run(cluster, "host-1", 9092).start()


@run_by(simulate)
async def test_a_broker_restarted_at_once_replaces_its_own_old_node_at_once(cluster: Cluster, /) -> None:
    cluster.zookeeper.make(CONTROLLER_EPOCH, b"3")
    writes: list[Operation] = []
    cluster.zookeeper.after = lambda _, operations: writes.extend(operations)
    first = await Run(cluster, "host-1", 9092).start()
    epoch = first.registration.broker_epoch
    first.world.process.kill()
    killed_at = cluster.now
    assert cluster.zookeeper.has(PATH)
    second = await Run(cluster, "host-1", 9092).start()
    assert cluster.now - killed_at < 0.5
    assert second.registration.broker_epoch > epoch
    assert [type(operation) for operation in writes[-3:]] == [Check, Delete, Create]
    await asyncio.sleep(10)  # the old session expires meanwhile, and takes nothing with it
    assert second.holds_the_node()
    assert len(second.heard) == 1


@run_by(simulate)
async def test_a_broker_restarted_with_another_port_finds_that_its_old_one_is_free(cluster: Cluster, /) -> None:
    first = await Run(cluster, "host-1", 9092).start()
    first.world.process.kill()
    killed_at = cluster.now
    second = await Run(cluster, "host-1", 9192).start()
    assert second.holds_the_node()
    assert cluster.now - killed_at < 0.5


@run_by(simulate)
async def test_the_id_of_a_live_broker_is_refused_and_its_node_left_alone(cluster: Cluster, /) -> None:
    first = await Run(cluster, "host-1", 9092).start()
    with pytest.raises(BrokerIdTaken, match=r"broker id 1 is taken by host-1:9092, host-1:9093: .* or stop that"):
        await Run(cluster, "host-2", 9092).start()
    await asyncio.sleep(1)
    assert first.holds_the_node()
    assert len(first.heard) == 1


SECRETS = (None, b"a secret of sixteen", b"another one of them")


@pytest.mark.parametrize("theirs", SECRETS)
@pytest.mark.parametrize("mine", SECRETS)
@run_by(simulate)
async def test_a_broker_whose_secret_is_not_that_of_the_others_does_not_register(
    cluster: Cluster, /, mine: bytes | None, theirs: bytes | None
) -> None:
    first = await Run(cluster, "host-1", 9092, secret=theirs).start()
    second = Run(cluster, "host-2", 9092, broker_id=2, secret=mine)
    if mine == theirs:
        await second.start()
    else:
        with pytest.raises(SecretDiffers, match="give all brokers of a cluster the same broker.secret.file"):
            await second.start()
        assert "/brokers/ids/2" not in cluster.zookeeper.paths()
    await second.close()
    await first.close()


@run_by(simulate)
async def test_a_broker_of_an_earlier_version_does_not_say_which_secret_it_has(cluster: Cluster, /) -> None:
    cluster.zookeeper.make("/brokers/ids/7", encode_broker([Endpoint(DEFAULT_LISTENER, "elsewhere", 1)], None, 0))
    broker = await Run(cluster, "host-1", 9092, secret=SECRETS[1]).start()
    assert broker.holds_the_node()


@run_by(simulate)
async def test_a_node_whose_broker_cannot_be_reached_is_waited_out(cluster: Cluster, /) -> None:
    gone = await cluster.simulation.host("elsewhere").start_process().zookeeper.connect("zookeeper:2181", 6_000, 1_000)
    for path in ("/brokers", "/brokers/ids"):
        await gone.create(path, b"")
    await gone.create(PATH, encode_broker([Endpoint(DEFAULT_LISTENER, "no-such-host", 9092)], None, 0), ephemeral=True)
    asyncio.get_running_loop().call_later(5.0, cluster.zookeeper.sessions[0].expire)
    began_at = cluster.now
    broker = await Run(cluster, "host-1", 9092).start()
    assert 5.0 <= cluster.now - began_at < 5.5
    assert broker.holds_the_node()


@pytest.mark.parametrize("content", [encode_broker([Endpoint("X", "no-such-host", 1)], None, 0), b"garbage"])
@run_by(simulate)
async def test_a_node_whose_session_lives_on_is_another_brokers_reachable_or_not(
    cluster: Cluster, /, content: bytes
) -> None:
    other = await cluster.simulation.host("elsewhere").start_process().zookeeper.connect("zookeeper:2181", 6_000, 1_000)
    for path in ("/brokers", "/brokers/ids"):
        await other.create(path, b"")
    await other.create(PATH, content, ephemeral=True)
    began_at = cluster.now
    with pytest.raises(BrokerIdTaken):
        await Run(cluster, "host-1", 9092).start()
    assert cluster.now - began_at >= SESSION_TIMEOUT_MS / 1000
    assert cluster.zookeeper.stat(PATH).ephemeral_owner == other.session_id


@run_by(simulate)
async def test_a_node_made_by_hand_is_to_be_deleted_by_hand(cluster: Cluster, /) -> None:
    cluster.zookeeper.make(PATH, encode_broker([Endpoint(DEFAULT_LISTENER, "no-such-host", 1)], None, 0))
    with pytest.raises(BrokerIdTaken, match="delete the znode /brokers/ids/1"):
        await Run(cluster, "host-1", 9092).start()


@run_by(simulate)
async def test_a_stale_node_is_judged_again_where_a_controller_was_elected_meanwhile(cluster: Cluster, /) -> None:
    cluster.zookeeper.make(CONTROLLER_EPOCH, b"3")
    first = await Run(cluster, "host-1", 9092).start()
    first.world.process.kill()
    elected = 0

    def elect(_: VirtualSession, operations: Sequence[Operation]) -> None:
        nonlocal elected
        if any(isinstance(operation, Delete) for operation in operations) and not elected:
            elected += 1
            cluster.zookeeper.make(CONTROLLER_EPOCH, b"4")

    cluster.zookeeper.before = elect
    second = await Run(cluster, "host-1", 9092).start()
    assert elected == 1
    assert second.holds_the_node()


class SwappingNetwork(ProcessNetwork):
    """Refuse the first `refusals` connections, and call `meanwhile` just before each refusal."""

    def __init__(
        self, network: ProcessNetwork, refusals: int, meanwhile: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._inner = network
        self._refusals = refusals
        self._meanwhile = meanwhile

    async def listen(self, host: str, port: int) -> Any:
        return await self._inner.listen(host, port)

    async def connect(self, host: str, port: int, factory: Callable[[], Any]) -> Any:
        if self._refusals == 0:
            return await self._inner.connect(host, port, factory)
        self._refusals -= 1
        if self._refusals == 0:
            await self._meanwhile()
        raise ConnectionRefusedError(f"{host}:{port}")


@run_by(simulate)
async def test_a_node_that_was_made_anew_while_the_old_one_was_judged_is_left_alone(cluster: Cluster, /) -> None:
    crashed = await Run(cluster, "host-1", 9092).start()
    crashed.world.process.kill()
    restarted = Run(cluster, "host-1", 9092)
    intruder = Run(cluster, "host-2", 9092)

    async def restart() -> None:
        await restarted.start()

    intruder.world.network = SwappingNetwork(intruder.world.network, len(crashed.endpoints), restart)
    with pytest.raises(BrokerIdTaken):
        await intruder.start()
    assert restarted.holds_the_node()
    assert len(restarted.heard) == 1


@run_by(simulate)
async def test_a_registration_whose_answer_is_lost_is_found_and_not_repeated(cluster: Cluster, /) -> None:
    def lose_the_answer(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(isinstance(operation, Create) and operation.path == PATH for operation in operations):
            cluster.zookeeper.after = None
            session.suspend()
            asyncio.get_running_loop().call_later(0.5, session.resume)

    cluster.zookeeper.after = lose_the_answer
    broker = await Run(cluster, "host-1", 9092).start()
    assert broker.holds_the_node()
    assert broker.heard == ["suspended", f"{broker.session.session_id:x} {broker.registration.broker_epoch}"]


# --- Staying registered ---


@run_by(simulate)
async def test_a_deleted_node_is_made_again_with_a_new_epoch_in_the_same_session(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    session_id = broker.session.session_id
    epochs = [broker.registration.broker_epoch]
    for _ in range(3):
        cluster.zookeeper.remove(PATH)
        removed_at = cluster.now
        await cluster.until(lambda: broker.holds_the_node() and broker.registration.broker_epoch > epochs[-1])
        assert cluster.now - removed_at < 0.1
        epochs.append(broker.registration.broker_epoch)
    assert broker.heard == [f"{session_id:x} {epoch}" for epoch in epochs]


@run_by(simulate)
async def test_a_lost_connection_changes_nothing_and_the_watch_is_set_again(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    epoch = broker.registration.broker_epoch
    broker.session.suspend()
    await asyncio.sleep(3)
    broker.session.resume()
    await asyncio.sleep(1)
    assert broker.holds_the_node()
    assert broker.registration.broker_epoch == epoch
    assert broker.heard[1:] == ["suspended"]
    cluster.zookeeper.remove(PATH)
    await cluster.until(broker.holds_the_node)
    assert broker.registration.broker_epoch > epoch


@run_by(simulate)
async def test_a_node_deleted_while_the_connection_was_lost_is_made_again(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    broker.session.suspend()
    cluster.zookeeper.remove(PATH)
    await asyncio.sleep(1)
    broker.session.resume()
    await cluster.until(broker.holds_the_node)
    assert len(broker.heard) == 3


@run_by(simulate)
async def test_an_expired_session_is_followed_by_another_and_a_new_registration(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    cluster_id = broker.registration.cluster_id
    first = broker.session
    first.expire()
    with pytest.raises(SessionExpired, match="broker 1 has no session"):
        _ = broker.registration.session
    await cluster.until(broker.holds_the_node)
    second = broker.session
    assert second is not first
    assert broker.heard[1:] == ["expired", f"{second.session_id:x} {broker.registration.broker_epoch}"]
    assert broker.registration.cluster_id == cluster_id


@run_by(simulate)
async def test_a_session_that_expired_before_the_start_is_replaced(cluster: Cluster, /) -> None:
    broker = Run(cluster, "host-1", 9092)
    registration = broker.make()
    await broker.world.process.run(registration.connect())
    cluster.zookeeper.sessions[0].expire()
    await broker.world.process.run(registration.start(broker.endpoints))
    assert registration.session.session_id == cluster.zookeeper.stat(PATH).ephemeral_owner


@run_by(simulate)
async def test_zookeeper_may_be_away_for_long_and_the_log_is_not_flooded(
    cluster: Cluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    cluster.zookeeper.reachable = False
    broker.session.expire()
    with caplog.at_level(logging.WARNING, "minibroker.registration"):
        await asyncio.sleep(600)
    assert 30 <= sum("has no ZooKeeper session" in message for message in caplog.messages) <= 61
    cluster.zookeeper.reachable = True
    await cluster.until(broker.holds_the_node)
    assert not broker.failures


@run_by(simulate)
async def test_a_registered_broker_gives_way_to_a_newer_one_with_its_id_and_says_so(cluster: Cluster, /) -> None:
    older = await Run(cluster, "host-1", 9092).start()
    older.session.suspend()
    cluster.zookeeper.remove(PATH)
    newer = await Run(cluster, "host-2", 9092).start()
    older.session.resume()
    await cluster.until(lambda: bool(older.failures))
    [failure] = older.failures
    assert isinstance(failure, BrokerIdTaken)
    assert "host-2:9092" in str(failure)
    assert newer.holds_the_node()
    assert len(newer.heard) == 1


@run_by(simulate)
async def test_a_new_session_at_another_cluster_is_a_failure_not_a_move(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    cluster.zookeeper.make(CLUSTER_ID, encode_cluster_id("another"))
    broker.session.expire()
    await cluster.until(lambda: bool(broker.failures))
    [failure] = broker.failures
    assert isinstance(failure, ClusterIdChanged)
    assert "another" in str(failure)
    assert not cluster.zookeeper.has(PATH)


@run_by(simulate)
async def test_a_wiped_zookeeper_gets_its_paths_and_the_same_cluster_id_again(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    cluster_id = broker.registration.cluster_id
    broker.session.suspend()
    for name in cluster.zookeeper.names("/"):
        cluster.zookeeper.remove(f"/{name}")
    cluster.zookeeper.end(broker.session)
    broker.session.resume()
    await cluster.until(broker.holds_the_node)
    assert broker.registration.cluster_id == cluster_id
    assert cluster.zookeeper.data(CLUSTER_ID) == encode_cluster_id(cluster_id)


@run_by(simulate)
async def test_closing_during_an_outage_ends_the_attempts_for_a_session(cluster: Cluster, /) -> None:
    broker = await Run(cluster, "host-1", 9092).start()
    cluster.zookeeper.reachable = False
    broker.session.expire()
    await asyncio.sleep(5)
    await broker.close()
    cluster.zookeeper.reachable = True
    await asyncio.sleep(5)
    assert not cluster.zookeeper.has(PATH)
    assert len(cluster.zookeeper.sessions) == 1
    assert broker.heard[1:] == [SessionState.EXPIRED.value]

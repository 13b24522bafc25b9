from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.metadata import (
    FAILOVER_S,
    Cluster,
    Leader,
    is_confirmed,
    is_denied,
    merged,
    refresh_pause_s,
    with_leader,
)
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol import topic_ids
from minibroker.protocol.apis import METADATA
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import ErrorCode, NetworkError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.unit.client.scripted_broker import DROP, HANG, Action, Received, ScriptedCluster, leap
from tests.waiting import until


def partition(index: int, leader: int, epoch: int) -> m.MetadataPartition:
    return m.MetadataPartition(0, index, leader, epoch, [0, 1], [0, 1], [])


def response(*partitions: m.MetadataPartition, topic_id: str = "id", code: int = 0) -> m.MetadataResponse:
    brokers = [m.MetadataBroker(0, "a", 1), m.MetadataBroker(1, "b", 2)]
    return m.MetadataResponse(0, brokers, "cluster", 0, [m.MetadataTopic(code, "t", topic_id, False, list(partitions))])


def test_the_pauses_between_refreshes_double_and_then_are_a_tenth_of_the_time() -> None:
    moments_s = [0.0]
    while moments_s[-1] < 0.1:
        moments_s.append(moments_s[-1] + refresh_pause_s(moments_s[-1]))
    assert moments_s == pytest.approx([0, 0.005, 0.01, 0.02, 0.04, 0.065, 0.09, 0.115])
    assert refresh_pause_s(0.7) == pytest.approx(0.07)
    assert refresh_pause_s(60) == 1


def test_a_leader_is_never_replaced_by_one_of_an_older_epoch() -> None:
    cluster = merged(Cluster(), response(partition(0, 1, 5)))
    assert merged(cluster, response(partition(0, 0, 4))).leader("t", 0) == Leader(1, 5)
    assert merged(cluster, response(partition(0, 0, 6))).leader("t", 0) == Leader(0, 6)


def test_another_topic_of_the_same_name_begins_anew() -> None:
    cluster = merged(Cluster(), response(partition(0, 1, 5), partition(1, 1, 5)))
    again = merged(cluster, response(partition(0, 0, 0), topic_id="other"))
    assert again.leader("t", 0) == Leader(0, 0)
    assert list(again.topics["t"].partitions) == [0]


def test_an_older_topic_of_the_same_name_is_not_believed() -> None:
    old, new = topic_ids.make(1, 7, b"chance"), topic_ids.make(2, 1, b"chance")
    cluster = merged(Cluster(), response(partition(0, 1, 0), topic_id=new))
    stale = response(partition(0, 0, 9), partition(1, 0, 9), topic_id=old)
    assert merged(cluster, stale).topics == cluster.topics
    assert merged(merged(Cluster(), stale), response(partition(0, 1, 0), topic_id=new)).topics == cluster.topics


def test_an_older_topic_of_another_cluster_is_believed() -> None:
    old, new = topic_ids.make(1, 7, b"chance"), topic_ids.make(2, 1, b"chance")
    cluster = merged(Cluster(), response(partition(0, 1, 0), topic_id=new))
    unnamed = response(partition(0, 0, 9), topic_id=old)
    unnamed.cluster_id = None
    cluster = merged(cluster, unnamed)
    assert cluster.topics["t"].topic_id == new
    other = response(partition(0, 0, 9), topic_id=old)
    other.cluster_id = "another cluster"
    assert merged(cluster, other).topics["t"].topic_id == old


def test_a_hint_about_another_topic_of_the_same_name_is_not_believed() -> None:
    cluster = merged(Cluster(), response(partition(0, 0, 0), topic_id="new"))
    here = TopicPartition("t", 0)
    assert with_leader(cluster, here, Leader(1, 9), "old") is cluster
    assert with_leader(cluster, here, Leader(1, 9), "new").leader("t", 0) == Leader(1, 9)


def test_partitions_that_an_answer_leaves_out_stay() -> None:
    cluster = merged(Cluster(), response(partition(0, 1, 0), partition(1, 0, 0)))
    assert merged(cluster, response(partition(1, 1, 1))).leader("t", 0) == Leader(1, 0)


def test_a_leader_without_an_address_is_no_leader() -> None:
    cluster = merged(Cluster(), response(partition(0, 9, 0), partition(1, -1, 3)))
    assert cluster.leader("t", 0) is None
    assert cluster.leader("t", 1) is None
    assert cluster.brokers == {0: Address("a", 1), 1: Address("b", 2)}


def test_an_error_for_a_topic_is_kept_beside_what_was_known_and_forgotten_later() -> None:
    cluster = merged(Cluster(), response(partition(0, 1, 0)))
    gone = merged(cluster, response(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    assert gone.errors == {"t": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert gone.leader("t", 0) == Leader(1, 0)
    assert merged(gone, response(partition(0, 1, 0))).errors == {}


def test_an_answer_without_brokers_does_not_make_us_forget_them() -> None:
    cluster = merged(Cluster(), response(partition(0, 1, 0)))
    assert merged(cluster, m.MetadataResponse(0, [], None, -1, [])).brokers == cluster.brokers


def test_a_leader_is_confirmed_by_another_broker_that_knows_it_and_none_that_knows_a_later_one() -> None:
    t0, leader = TopicPartition("t", 0), Leader(0, 5)
    current = response(partition(0, 0, 5))
    cluster = merged(Cluster(), current)
    older, newer = response(partition(0, 1, 4)), response(partition(0, 1, 6))
    another = response(partition(0, 0, 5), topic_id="other")
    assert is_confirmed(cluster, t0, leader, {1: current})
    assert is_confirmed(cluster, t0, leader, {0: current, 1: current})
    for answers in ({}, {0: current}, {1: older}, {1: another}, {1: response()}):
        assert not is_confirmed(cluster, t0, leader, answers)
    assert not is_confirmed(merged(cluster, newer), t0, leader, {1: current, 2: newer})
    alone = cluster._replace(brokers={0: Address("a", 1)}, most_brokers=1)
    assert is_confirmed(alone, t0, leader, {})
    assert not is_confirmed(alone, t0, Leader(0, 4), {})
    assert not is_confirmed(alone._replace(most_brokers=3), t0, leader, {}), "the others are out of its reach"


def test_a_topic_is_denied_by_two_brokers_or_by_the_only_one() -> None:
    there, gone = response(partition(0, 0, 5)), response(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    cluster = merged(Cluster(), there)
    fresh = m.MetadataResponse(0, [], "cluster", -1, gone.topics)
    assert is_denied(cluster, "t", "id", {0: gone, 1: gone})
    assert is_denied(cluster, "t", "earlier", {0: there, 1: gone})
    for answers in ({}, {0: gone}, {0: gone, 1: there}, {0: gone, 1: fresh}):
        assert not is_denied(cluster, "t", "id", answers)
    assert not is_denied(cluster, "t", None, {0: there, 1: there})
    alone = cluster._replace(brokers={0: Address("a", 1)}, most_brokers=1)
    assert is_denied(alone, "t", "id", {0: gone})
    assert not is_denied(alone._replace(most_brokers=3), "t", "id", {0: gone})


def test_a_broker_without_all_topics_denies_none() -> None:
    gone = response(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    cluster = merged(Cluster(), response(partition(0, 0, 5)))
    half_told = response(topic_id="", code=ErrorCode.LEADER_NOT_AVAILABLE)
    assert not is_denied(cluster, "t", "id", {0: half_told, 1: half_told})
    assert not is_denied(cluster, "t", "id", {0: half_told, 1: gone})
    some_partitions = response(code=ErrorCode.LEADER_NOT_AVAILABLE)
    assert not is_denied(cluster, "t", "id", {0: some_partitions, 1: gone, 2: gone}), "it knows of the topic"


def test_a_broker_that_knows_an_earlier_topic_of_the_name_does_not_deny_the_later_one() -> None:
    old, new = topic_ids.make(1, 7, b"chance"), topic_ids.make(2, 1, b"chance")
    behind, ahead = response(partition(0, 0, 5), topic_id=old), response(partition(0, 0, 0), topic_id=new)
    cluster = merged(Cluster(), ahead)
    assert not is_denied(cluster, "t", new, {0: behind, 1: behind})
    assert is_denied(cluster, "t", old, {0: ahead, 1: ahead})


def test_a_broker_that_lists_only_itself_does_not_replace_the_known_ones() -> None:
    leader = Leader(0, 5)
    both, alone = response(partition(0, 0, 5)), response(partition(0, 0, 5))
    alone.brokers = alone.brokers[:1]
    cluster = merged(merged(Cluster(), both), alone)
    assert list(cluster.brokers) == [0]
    assert not is_confirmed(cluster, TopicPartition("t", 0), leader, {0: alone})
    gone = response(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert not is_denied(cluster, "t", "id", {0: gone})


def test_a_topic_that_was_looked_at_is_forgotten_unless_somebody_else_wants_it() -> None:
    async def scenario(cluster: ScriptedCluster, client: ClientRuntime) -> None:
        for name in ("a", "b"):
            cluster.add_topic(name)
        metadata = client.metadata
        metadata.want("a")
        await client.start()
        with metadata.wanted(["a", "b"]):
            with metadata.wanted(["b"]):
                await metadata.refreshed()
            assert set(metadata.cluster.topics) == {"a", "b"}
        assert set(metadata.cluster.topics) == {"a"}
        await metadata.refreshed()
        assert set(cluster.requests(METADATA)[-1].topics) == {"a"}
        metadata.unwant("a")
        metadata.unwant("a")
        assert metadata.cluster.topics == {}

    run(scenario)


def test_a_hint_counts_only_if_its_epoch_is_newer() -> None:
    cluster = merged(Cluster(), response(partition(0, 0, 3)))
    here = TopicPartition("t", 0)
    assert with_leader(cluster, here, Leader(1, 4)).leader("t", 0) == Leader(1, 4)
    assert with_leader(cluster, here, Leader(1, 3)) is cluster
    assert with_leader(cluster, here, Leader(-1, 4)) is cluster
    assert with_leader(cluster, TopicPartition("other", 0), Leader(1, 4)) is cluster


def run(scenario: Callable[[ScriptedCluster, ClientRuntime], Coroutine[Any, Any, None]], brokers: int = 3) -> None:
    async def main() -> None:
        def crashed(error: BaseException) -> None:
            raise error

        async with asyncio.timeout(30), ScriptedCluster(brokers) as scripted:
            scripted.add_topic("orders")
            runtime = ClientRuntime(
                scripted.bootstrap,
                client_id="test",
                request_timeout_ms=5_000,
                retry_backoff_ms=10,
                metadata_max_age_ms=300_000,
                world=None,
                on_crash=crashed,
            )
            try:
                await scenario(scripted, runtime)
            finally:
                await runtime.close()

    asyncio.run(main())


@run_by(run)
async def test_any_bootstrap_address_will_do(scripted: ScriptedCluster, runtime: ClientRuntime, /) -> None:
    await scripted.nodes[0].stop()
    await scripted.nodes[1].stop()
    await runtime.start()
    assert list(runtime.metadata.cluster.brokers) == [2]


@run_by(run)
async def test_a_refresh_asks_another_broker_where_one_drops_it(
    scripted: ScriptedCluster, runtime: ClientRuntime, /
) -> None:
    await runtime.start()
    scripted.script(METADATA, DROP, DROP)
    runtime.metadata.want("orders")
    while "orders" not in runtime.metadata.cluster.topics:
        await runtime.metadata.refreshed()
    assert runtime.metadata.last_error is None
    assert len({received.node_id for received in scripted.received[1:]}) == 3


@run_by(run)
async def test_after_a_leader_is_lost_refreshes_go_on_by_themselves_until_there_is_another_or_some_time_has_passed(
    scripted: ScriptedCluster, runtime: ClientRuntime, /
) -> None:
    metadata = runtime.metadata
    metadata.want("orders")
    await runtime.start()
    await until(lambda: "orders" in metadata.cluster.topics)
    leaders = {each.leader.node_id for each in metadata.cluster.topics["orders"].partitions.values()}
    asked = len(scripted.requests(METADATA))
    metadata.suspect(metadata.cluster.brokers[min(leaders)])
    metadata.request_refresh()
    await until(lambda: len(scripted.requests(METADATA)) >= asked + 4)
    assert metadata._awaits_election(time.monotonic())
    partitions = metadata.cluster.topics["orders"].partitions
    for index in partitions:
        scripted.move("orders", index, NO_LEADER)
    await until(lambda: all(metadata.cluster.leader("orders", index) is None for index in partitions))
    assert metadata._awaits_election(time.monotonic())
    assert not metadata._awaits_election(time.monotonic() + FAILOVER_S)


def test_a_broker_that_does_not_answer_is_asked_last_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.metadata.FIRST_ATTEMPT_TIMEOUT_S", 0.1)

    async def scenario(scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        await runtime.start()
        scripted.rules.append(lambda received: HANG if received.node_id == 0 else None)
        for _ in range(30):
            await runtime.metadata.request_any(METADATA, m.MetadataRequest([]), timeout_s=1.0)
        assert len([received for received in scripted.received if received.node_id == 0]) <= 3

    run(scenario)


def test_brokers_that_were_reached_and_do_not_answer_are_not_said_to_be_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.metadata.FIRST_ATTEMPT_TIMEOUT_S", 0.1)

    async def scenario(scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        await runtime.start()
        scripted.rules.append(lambda received: HANG)
        with pytest.raises(RequestTimedOut, match="they hang or wait for ZooKeeper"):
            await runtime.metadata.request_any(METADATA, m.MetadataRequest([]), timeout_s=0.5)

    run(scenario)


def test_a_start_waits_longer_for_a_silent_broker_than_for_one_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.metadata.FIRST_ATTEMPT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("minibroker.client.cluster.runtime.START_PATIENCE_S", 0.1)

    async def scenario(scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        scripted.script(METADATA, *[HANG] * 3)
        await runtime.start()
        assert len(scripted.requests(METADATA)) > 3

    run(scenario)


def test_the_last_failure_of_a_broker_decides_whether_it_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.metadata.FIRST_ATTEMPT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("minibroker.client.cluster.runtime.SILENCE_PATIENCE_S", 30.0)

    async def scenario(scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        def hang_once(received: Received) -> Action:
            count = len(scripted.requests(METADATA))
            monkeypatch.setattr("minibroker.client.cluster.metadata.FIRST_ATTEMPT_TIMEOUT_S", 5.0)
            if count == 3:
                leap(runtime)
            return HANG if count == 1 else DROP

        scripted.rules.append(hang_once)
        with pytest.raises(NetworkError, match="If that is no broker, give the address") as failed:
            await runtime.start()
        assert not isinstance(failed.value, RequestTimedOut)

    run(scenario, brokers=1)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize(
    ("said", "why"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks HTTP, as a broker's metrics port does"), (b"", "closed by the")],
)
async def test_a_peer_that_is_no_broker_is_not_reported_to_wait_for_zookeeper(said: bytes, why: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(NetworkError, match=f"{why}.*give the address of a running broker") as failed:
        await Admin(f"127.0.0.1:{port}").start()
    assert not isinstance(failed.value, RequestTimedOut)
    server.close()


def test_a_broker_that_did_not_answer_once_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.metadata.FORGIVEN_S", 0.0)

    async def scenario(scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        await runtime.start()
        address = runtime.metadata.address(0)
        assert address is not None
        runtime.metadata.suspect(address)
        scripted.received.clear()
        async with asyncio.timeout(30):
            while not any(received.node_id == 0 for received in scripted.received):
                await runtime.metadata.request_any(METADATA, m.MetadataRequest([]), timeout_s=1.0)

    run(scenario)


@run_by(run)
async def test_the_bootstrap_addresses_are_asked_when_no_known_broker_answers(
    scripted: ScriptedCluster, runtime: ClientRuntime, /
) -> None:
    await runtime.start()
    moved = scripted.nodes.pop(2)
    known = runtime.metadata.cluster.brokers
    runtime.metadata.cluster = runtime.metadata.cluster._replace(brokers={2: known[2]})
    await moved.stop()
    await runtime.metadata.request_any(METADATA, m.MetadataRequest([]))
    assert scripted.received[-1].node_id in (0, 1)


@run_by(run)
async def test_a_refresh_that_fails_is_repeated_until_it_succeeds(
    scripted: ScriptedCluster, runtime: ClientRuntime, /
) -> None:
    await runtime.start()
    for node in scripted.nodes.values():
        await node.stop()
    error = None
    while error is None:  # a refresh may be under way that succeeds
        await runtime.metadata.refreshed()
        error = runtime.metadata.last_error
    assert isinstance(error, NetworkError)
    await scripted.nodes[1].start()
    while runtime.metadata.last_error is not None:
        await runtime.metadata.refreshed()
    assert list(runtime.metadata.cluster.brokers) == [1]


async def test_old_metadata_is_refreshed_without_being_asked() -> None:
    async with asyncio.timeout(30), ScriptedCluster() as scripted:
        runtime = ClientRuntime(
            scripted.bootstrap,
            client_id="test",
            request_timeout_ms=5_000,
            retry_backoff_ms=10,
            metadata_max_age_ms=20,
            world=None,
            on_crash=lambda error: None,
        )
        await runtime.start()
        await scripted.until(lambda: len(scripted.requests(METADATA)) >= 4)
        await runtime.close()


async def test_a_peer_that_speaks_another_protocol_is_named() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    runtime = ClientRuntime(
        f"127.0.0.1:{port}",
        client_id="test",
        request_timeout_ms=100,
        retry_backoff_ms=10,
        metadata_max_age_ms=1_000,
        world=None,
        on_crash=lambda error: None,
    )
    with pytest.raises(NetworkError, match=str(port)):
        await runtime.start()
    await runtime.close()
    server.close()
    await server.wait_closed()


@run_by(run)
async def test_an_advertised_address_that_cannot_be_reached_is_explained(
    scripted: ScriptedCluster, runtime: ClientRuntime, /
) -> None:
    runtime.metadata._bootstrap = runtime.metadata._bootstrap[:1]  # so that the start reaches no other broker
    await runtime.start()
    elsewhere = scripted.nodes[1]
    address = runtime.metadata.cluster.brokers[1]
    await elsewhere.stop()
    runtime.connections.advertised({1: address})
    with pytest.raises(NetworkError, match=rf"{address}.*Broker 1 advertises.*advertised\.listeners"):
        await runtime.connections.open(address, Purpose.REQUESTS)
    assert runtime.connections.error(address, Purpose.REQUESTS) is not None
    await elsewhere.start()
    while runtime.connections.error(address, Purpose.REQUESTS) is not None:
        runtime.connections.get(address, Purpose.REQUESTS)
        await asyncio.sleep(0.01)
    await elsewhere.stop()
    await asyncio.sleep(0.05)
    with pytest.raises(NetworkError) as raised:
        await runtime.connections.open(address, Purpose.PRODUCE)
    assert "advertises" not in str(raised.value)  # it was reached: it is down, not misnamed

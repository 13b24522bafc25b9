"""The controller takes office and loses it: elections, lost connections, expired sessions, newer controllers, bugs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import pytest

from minibroker.controller.decisions.events import Startup
from minibroker.controller.interruptions import LEAST_S, MOST, WITHIN_S
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Message
from minibroker.protocol.model import RegisteredBroker, TopicPartition
from minibroker.protocol.world import Operation, SessionState
from tests.running import run_by
from tests.unit.controller.cluster import Cluster, Office, Told, simulate

ORDERS_0 = TopicPartition("orders", 0)
ORDERS_1 = TopicPartition("orders", 1)


# --- Taking office -------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_the_next_controller_goes_on_where_the_last_one_was_killed(cluster: Cluster, /) -> None:
    first = await cluster.start([1, 2, 3])
    await first.create("orders", (1, 2, 3), (2, 3, 1))
    await cluster.has(ORDERS_1, 2, [2, 3, 1])
    first.kill()
    cluster.brokers[1].kill()
    second = await cluster.elect(101)
    await cluster.has(ORDERS_0, 2, [2, 3])
    assert second.epoch == 2
    assert cluster.state(ORDERS_0).controller_epoch == 2
    assert not first.resigned
    assert all(broker.controller_epoch == 2 for broker in cluster.brokers.values() if broker.id != 1)
    roles = cluster.brokers[3].roles
    await cluster.until(lambda: all(roles[p].leader_epoch == 1 for p in (ORDERS_0, ORDERS_1)))
    assert not any(role.is_new for role in roles.values())


@run_by(simulate)
async def test_a_registered_broker_that_refuses_connections_is_not_elected_but_removed(cluster: Cluster, /) -> None:
    first = await cluster.start([1, 2, 3])
    await first.create("orders", (1, 2, 3))
    await cluster.has(ORDERS_0, 1, [1, 2, 3])
    first.session.expire()
    # Both sessions live on for seconds, but the leader and the next in line are dead.
    cluster.brokers[1].kill()
    cluster.brokers[2].kill()
    assert cluster.zookeeper.names("/brokers/ids") == ["1", "2", "3"]
    second = await cluster.elect(101)
    await cluster.has(ORDERS_0, 3, [3])
    assert cluster.state(ORDERS_0).leader_epoch == 1, "no other broker was elected in between"
    assert cluster.zookeeper.names("/brokers/ids") == ["3"]
    await cluster.until(lambda: second.entries)
    assert second.entries[0]["notes"] == [
        "broker 1 is registered and cannot be reached: it is removed",
        "broker 2 is registered and cannot be reached: it is removed",
    ]


@run_by(simulate)
async def test_partitions_that_the_last_controller_did_not_get_to_are_created(cluster: Cluster, /) -> None:
    first = await cluster.start([1, 2])

    def die(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(operation.path == znodes.topic_path("orders") for operation in operations):
            first.kill()

    cluster.zookeeper.after = die
    with pytest.raises(BaseException):  # noqa: B017 - the simulator says that the process was killed
        await first.create("orders", (1, 2), (2, 1))
    assert not cluster.zookeeper.has(znodes.state_path(ORDERS_0))
    await cluster.elect(101)
    await cluster.has(ORDERS_0, 1, [1, 2])
    await cluster.has(ORDERS_1, 2, [2, 1])


@run_by(simulate)
async def test_notifications_left_over_are_removed_since_everything_was_just_read(cluster: Cluster, /) -> None:
    cluster.zookeeper.make(znodes.ISR_CHANGE_PREFIX + "0000000007", znodes.encode_isr_change([ORDERS_0]))
    await cluster.start([1])
    await cluster.until(lambda: cluster.zookeeper.names(znodes.ISR_CHANGES) == [])


@run_by(simulate)
async def test_znodes_that_make_no_sense_are_left_alone_and_the_rest_of_the_cluster_goes_on(
    cluster: Cluster, /
) -> None:
    first = await cluster.start([1, 2])
    await first.create("orders", (1, 2), (1, 2))
    await cluster.has(ORDERS_1, 1, [1, 2])
    first.session.expire()
    cluster.zookeeper.make("/brokers/ids/7", b"{")
    cluster.zookeeper.make("/brokers/ids/seven", b"")
    cluster.zookeeper.make("/brokers/topics/broken", b"[]")
    cluster.zookeeper.make("/brokers/topics/bad name", b'{"partitions": {}}')
    cluster.zookeeper.make("/admin/delete_topics/broken")
    cluster.zookeeper.make(znodes.state_path(ORDERS_0), b"nonsense")
    cluster.zookeeper.make(znodes.ISR_CHANGE_PREFIX + "0000000009", b"??")
    cluster.zookeeper.remove("/admin/delete_topics")
    cluster.zookeeper.make("/admin/delete_topics/broken")
    second = await cluster.elect(101)
    cluster.brokers[1].kill()
    second.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_1, 2, [2])
    assert cluster.zookeeper.data(znodes.state_path(ORDERS_0)) == b"nonsense"
    assert cluster.zookeeper.has("/admin/delete_topics/broken")
    assert not second.resigned

    def is_noted(part: str) -> bool:
        return any(part in note for entry in second.entries for note in entry.get("notes", []))

    for part in ("broker 7 is ignored", "topic broken is ignored", "orders-0 is left without a leader"):
        await cluster.until(partial(is_noted, part))
    # A later unreadable notification is removed as well.
    cluster.zookeeper.make(znodes.ISR_CHANGE_PREFIX + "0000000010", b"??")
    await cluster.until(lambda: cluster.zookeeper.names(znodes.ISR_CHANGES) == [])


@run_by(simulate)
async def test_a_standard_directory_that_was_removed_is_made_again(cluster: Cluster, /) -> None:
    cluster.zookeeper.remove("/admin/delete_topics")
    office = await cluster.start([1])
    await office.create("orders", (1,))
    await office.delete("orders")
    await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/orders"))
    assert not office.resigned


# --- Resigning -----------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_a_controller_that_resigned_sends_and_writes_nothing_more(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    tasks_before = {task for task in asyncio.all_tasks() if "office" in repr(task)}
    await office.run(office.controller.resign("a test"))
    assert not office.controller.is_active
    assert office.controller.state is None
    assert office.watched[-1] == ()
    assert (office.entries[-1]["event"], office.entries[-1]["cause"]) == ("Resignation", "a test")
    told = len(cluster.brokers[1].told)
    cluster.brokers[2].kill()
    office.suspect(cluster.brokers[2])
    await cluster.until(lambda: cluster.zookeeper.names("/brokers/ids") == ["1"])
    await asyncio.sleep(10)
    assert cluster.leader_and_isr(ORDERS_0) == (1, (1, 2))
    assert len(cluster.brokers[1].told) == told
    names = {task.get_name() for task in asyncio.all_tasks() - tasks_before}
    assert not any("outbox" in name or "controller of epoch" in name for name in names)
    with pytest.raises(BrokerError) as refused:
        await office.create("late", (1,))
    assert refused.value.code is ErrorCode.NOT_CONTROLLER


@run_by(simulate)
async def test_requests_that_wait_when_the_tenure_ends_are_sent_to_the_next_controller(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    office.session.suspend()
    waiting = [asyncio.create_task(_create(office, "first")), asyncio.create_task(_create(office, "second"))]
    await asyncio.sleep(1)
    assert not any(task.done() for task in waiting)
    await office.run(office.controller.resign("a test"))
    assert await asyncio.gather(*waiting) == [ErrorCode.NOT_CONTROLLER, ErrorCode.NOT_CONTROLLER]


async def _create(office: Office, name: str) -> ErrorCode:
    try:
        await office.create(name, (1,))
    except BrokerError as error:
        return error.code
    return ErrorCode.NONE


@run_by(simulate)
async def test_a_deposed_controller_changes_nothing_and_asks_to_resign(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    # Another broker was elected; the watch on /controller has not fired yet.
    cluster.zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(2))
    told = len(cluster.brokers[2].told)
    cluster.brokers[1].kill()
    await cluster.until(lambda: office.resigned)
    assert "another controller was elected" in office.resigned[0]
    assert cluster.leader_and_isr(ORDERS_0) == (1, (1, 2))
    assert len(cluster.brokers[2].told) == told
    assert await _create(office, "late") is ErrorCode.NOT_CONTROLLER


@run_by(simulate)
async def test_a_deposed_controller_denies_no_topic_that_its_successor_may_have_created(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    # Another broker was elected; the watch on /controller has not fired yet.
    cluster.zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(2))
    with pytest.raises(BrokerError) as refused:
        await office.delete("orders")
    assert refused.value.code is ErrorCode.NOT_CONTROLLER


@run_by(simulate)
async def test_a_state_written_by_a_newer_controller_deposes(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    state = cluster.state(ORDERS_0)
    newer = type(state)(2, 5, (2,), 9, 0)
    cluster.zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(9))
    cluster.zookeeper.make(znodes.state_path(ORDERS_0), znodes.encode_state(newer))
    cluster.zookeeper.make(znodes.ISR_CHANGE_PREFIX + "0000000001", znodes.encode_isr_change([ORDERS_0]))
    await cluster.until(lambda: office.resigned)
    assert "controller of epoch 9" in office.resigned[0]


@run_by(simulate)
async def test_a_broker_that_knows_a_newer_controller_deposes(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    cluster.brokers[2].controller_epoch = 5
    await office.create("orders", (1, 2))
    await cluster.until(lambda: office.resigned)
    assert "broker 2 knows of a newer controller" in office.resigned[0]


def test_a_bug_ends_the_tenure_and_the_administrator_is_not_sent_to_the_next_victim(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        office = await cluster.start([1])

        def bug(_: object) -> str | None:
            raise AttributeError("a bug")

        office.check_config = bug
        with pytest.raises(BrokerError) as failed:
            await office.create("orders", (1,), config={"retention.ms": "1"})
        assert failed.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
        await cluster.until(lambda: office.resigned and not cluster.zookeeper.has(znodes.CONTROLLER))
        assert not office.controller.is_active
        assert "AttributeError" in next(entry for entry in office.entries if "failure" in entry)["failure"]

    with caplog.at_level(logging.CRITICAL + 1, "minibroker.controller"):
        simulate(scenario)


@run_by(simulate)
async def test_the_same_process_can_take_office_again(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    await office.create("orders", (1,))
    await office.run(office.controller.resign("a test"))
    cluster.zookeeper.remove(znodes.CONTROLLER)
    await office.take_office()
    assert office.epoch == 2
    await office.create("clicks", (1,))
    await cluster.has(TopicPartition("clicks", 0), 1, [1])
    state = office.controller.state
    assert state is not None
    assert sorted(state.topic_ids) == ["clicks", "orders"]
    # An event of the former tenure has its own loop and finds no listener.
    office.session.suspend()
    office.session.resume()
    await office.idle()
    reconnections = [entry for entry in office.entries if entry["event"] == "SessionReconnected"]
    assert [entry["epoch"] for entry in reconnections] == [2]


# --- The session ---------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_changes_during_a_suspended_session_are_noticed_when_it_is_back(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2), (2, 3))
    await office.create("old", (2,))
    await cluster.has(TopicPartition("old", 0), 2, [2])
    office.session.suspend()
    topic = znodes.TopicZnode("AAAAAAAAAAAAAAAAAAAAAA", {0: (2,)})
    cluster.zookeeper.make("/brokers/topics/new", znodes.encode_topic(topic))
    cluster.zookeeper.make("/admin/delete_topics/old")
    await cluster.brokers[2].change_isr(ORDERS_1, [2])
    cluster.zookeeper.remove("/brokers/ids/1")
    cluster.brokers[1].kill()
    office.session.resume()
    await cluster.has(TopicPartition("new", 0), 2, [2])
    await cluster.has(ORDERS_0, 2, [2])
    await cluster.has(ORDERS_1, 2, [2])
    await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/old"))
    # The watches are set again.
    await cluster.brokers[1].start()
    await cluster.until(lambda: ORDERS_0 in cluster.brokers[1].roles)
    assert not office.resigned


@pytest.mark.parametrize("arrives", [False, True])
@run_by(simulate)
async def test_an_election_whose_connection_breaks_is_carried_out_once(cluster: Cluster, /, arrives: bool) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3), (2, 1, 3))
    await cluster.has(ORDERS_1, 2, [2, 1, 3])
    cuts = 0

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        nonlocal cuts
        if any(operation.path == znodes.state_path(ORDERS_0) for operation in operations):
            cuts += 1
            if cuts == 1:
                office.session.suspend()
                asyncio.get_running_loop().call_later(2, office.session.resume)

    if arrives:
        cluster.zookeeper.after = cut  # carried out, and the reply is lost
    else:
        cluster.zookeeper.before = _before_arrival(cluster, office)
    cluster.brokers[1].kill()
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 2, [2, 3])
    await cluster.has(ORDERS_1, 2, [2, 3])
    for partition in (ORDERS_0, ORDERS_1):
        state = cluster.state(partition)
        assert (state.leader_epoch, state.partition_epoch) == (1, 1), "written once"
    assert not office.resigned


def _before_arrival(cluster: Cluster, office: Office) -> Callable[[VirtualSession, Sequence[Operation]], None]:
    """Cut the connection when the removal of the broker is carried out, so that the election meets it suspended."""
    loop = asyncio.get_running_loop()

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(operation.path == "/brokers/ids/1" for operation in operations):
            cluster.zookeeper.before = None
            loop.call_later(0.001, office.session.suspend)
            loop.call_later(2, office.session.resume)

    return cut


@run_by(simulate)
async def test_a_topic_whose_creation_lost_its_reply_is_created_once_and_reported_as_such(cluster: Cluster, /) -> None:
    office = await cluster.start([1])

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(operation.path == "/brokers/topics/orders" for operation in operations):
            cluster.zookeeper.after = None
            office.session.suspend()
            asyncio.get_running_loop().call_later(1, office.session.resume)

    cluster.zookeeper.after = cut
    result = await office.create("orders", (1,))
    assert result.error_code == ErrorCode.NONE
    topic = znodes.decode_topic("orders", cluster.zookeeper.data("/brokers/topics/orders"))
    assert topic.topic_id == result.topic_id


@run_by(simulate)
async def test_an_expired_session_ends_the_tenure(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    office.session.expire()
    assert office.session.state is SessionState.EXPIRED
    cluster.brokers[1].kill()
    second = await cluster.elect(101)
    await cluster.has(ORDERS_0, 2, [2])
    assert await _create(office, "late") is ErrorCode.NOT_CONTROLLER
    assert not office.controller.is_active
    assert second.controller.is_active


@run_by(simulate)
async def test_a_session_that_expires_while_suspended_ends_a_tenure_that_waits_for_it(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    await office.idle()
    office.session.suspend()
    request = asyncio.create_task(_create(office, "orders"))
    await asyncio.sleep(10)
    assert not request.done()
    office.session.resume()
    assert await request is ErrorCode.NOT_CONTROLLER
    assert not office.controller.is_active


@run_by(simulate)
async def test_taking_office_is_cut_short_by_a_resignation(cluster: Cluster, /) -> None:
    await cluster.start_brokers([1])
    office = Office(cluster, 100)
    probing = asyncio.Event()

    async def never(brokers: Sequence[RegisteredBroker]) -> Collection[int]:
        probing.set()
        await asyncio.get_running_loop().create_future()
        return ()

    office.refused = never
    await office.take_office()
    await probing.wait()
    await office.run(office.controller.close())
    assert cluster.brokers[1].told == []
    assert not office.resigned


# --- Requests -----------------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_a_broker_that_hangs_up_gets_the_same_requests_again_in_order(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    broker = cluster.brokers[1]
    broker.answer = lambda told: None
    await office.create("a", (1,))
    await office.create("b", (1,))
    # The first request gets no answer in time; the connection is closed, and all requests are sent again in order.
    await asyncio.sleep(45)
    broker.answer = broker.obey
    await cluster.has(TopicPartition("b", 0), 1, [1])
    said = [(told.api, _topics_of(told)) for told in broker.told]
    assert said[0] == said[1] == ("UpdateMetadata", [])
    assert said[-4:] == [
        ("LeaderAndIsr", ["a"]),
        ("UpdateMetadata", ["a"]),
        ("LeaderAndIsr", ["b"]),
        ("UpdateMetadata", ["b"]),
    ]


def _topics_of(told: Told) -> list[str]:
    return [topic.topic_name for topic in told.body.topic_states]


@run_by(simulate)
async def test_a_broker_that_hangs_delays_no_other(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    cluster.brokers[1].answer = _mute
    for number in range(10):
        await office.create(f"topic-{number}", (2, 1))
    loop = asyncio.get_running_loop()
    started = loop.time()
    await cluster.until(lambda: len(cluster.brokers[2].roles) == 10)
    assert loop.time() - started < 1
    assert len(cluster.brokers[1].told) == 1


def _mute(told: Told) -> Message | None:
    return None


@run_by(simulate)
async def test_what_was_meant_for_a_former_run_is_not_sent_to_the_next(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    broker = cluster.brokers[1]
    former = broker.epoch
    broker.answer = _mute
    await office.create("orders", (1,))
    broker.answer = broker.obey
    await broker.bounce()
    await cluster.has(ORDERS_0, 1, [1])
    for told in broker.told:
        if told.body.broker_epoch == former:
            assert told.api == "UpdateMetadata", "the only one that was under way"
    assert [told.body.broker_epoch for told in broker.told] == sorted(t.body.broker_epoch for t in broker.told)


# --- The timeline --------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_the_timeline_explains_a_failover_step_by_step(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    cluster.brokers[1].kill()
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 2, [2])
    await cluster.until(lambda: office.entries[-1]["event"] == "UpdateMetadataAnswered")
    suspected, changed, answered, knew = office.entries[-4:]
    assert suspected["cause"] == (
        f"broker 1 (epoch {cluster.brokers[1].epoch}) is suspected: its connection was refused"
    )
    assert suspected["writes"] == [f"remove /brokers/ids/1 (epoch {cluster.brokers[1].epoch})"]
    assert changed["event"] == "BrokerChange"
    assert changed["moves"] == [
        "partition orders-0: OnlinePartition -> OfflinePartition",
        "replica orders-0 on 1: OnlineReplica -> OfflineReplica",
        "partition orders-0: OfflinePartition -> OnlinePartition",
    ]
    assert changed["writes"] == ["write orders-0: leader 2, epoch 1, isr [2] (over version 0)"]
    assert changed["requests"] == ["LeaderAndIsr to 2: orders-0", "UpdateMetadata to 2: orders-0"]
    assert (changed["lost"], changed["added"]) == ([1], [])
    assert (changed["elected"], changed["written_at_ms"]) == (1, changed["states"][0]["at_ms"])
    assert changed["states"] == [
        {
            "at_ms": changed["states"][0]["at_ms"],
            "partition": "orders-0",
            "leader": 2,
            "leader_before": 1,
            "isr": [2],
            "isr_before": [1, 2],
            "leader_epoch": 1,
            "min_isr": 1,
            "version": 1,
            "version_before": 0,
        }
    ]
    assert [(sent["request"], sent["broker"], sent["partitions"]) for sent in changed["sent"]] == [
        ("LeaderAndIsr", 2, 1),
        ("UpdateMetadata", 2, 1),
    ]
    assert changed["total_ms"] >= changed["sent"][0]["at_ms"] >= changed["states"][0]["at_ms"] > 0
    assert min(changed["reading_ms"], changed["writing_ms"]) > 0
    assert changed["total_ms"] >= changed["writing_ms"]
    assert answered["cause"] == "broker 2 answered LeaderAndIsr for 1 partition"
    assert (answered["request"], answered["broker"]) == ("LeaderAndIsr", 2)
    assert knew["cause"] == "broker 2 answered UpdateMetadata"
    assert min(answered["took_ms"], knew["took_ms"]) > 0
    numbers = [entry["number"] for entry in office.entries]
    assert numbers == list(range(1, len(numbers) + 1))
    assert office.controller.timeline.entries() == office.entries
    json.dumps(office.entries)


@run_by(simulate)
async def test_a_broker_records_its_stalls_unless_they_are_short_or_many(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    before = len(office.entries)
    office.controller.record_stall(LEAST_S - 0.01, LEAST_S - 0.01, 7)
    office.controller.record_stall(3.0, 1.4, 7)  # a call, such as a slow write, held up its event loop
    assert len(office.entries) == before
    for lasted_s in range(2, 2 + MOST + 3):
        office.controller.record_stall(lasted_s, lasted_s * 0.9, 7)
    recorded = office.entries[before:]
    assert [(e["event"], e["epoch"], e["lasted_ms"]) for e in recorded] == [
        ("BrokerStalled", 7, lasted_s * 1_000) for lasted_s in range(2, 2 + MOST)
    ]
    assert recorded[0]["cause"] == "broker 100 did not run for 2,000 ms"
    await asyncio.sleep(WITHIN_S)
    for _ in range(2):
        office.controller.record_stall(2.0, 2.0, 7)
    stalls = [e for e in office.entries[before:] if e["event"] == "BrokerStalled"]
    assert [e.get("unrecorded", 0) for e in stalls] == [0] * MOST + [3, 0]


@run_by(simulate)
async def test_a_broker_records_for_how_long_zookeeper_did_not_answer_apart_from_its_stalls(
    cluster: Cluster, /
) -> None:
    office = await cluster.start([1])
    for _ in range(MOST):
        office.controller.record_stall(2.0, 2.0, 7)
    office.controller.zookeeper_is_back(LEAST_S - 0.01, 7)
    assert office.entries[-1]["event"] == "BrokerStalled"
    office.controller.zookeeper_is_back(2.5, 7)
    away = office.entries[-1]
    assert (away["event"], away["epoch"], away["lasted_ms"]) == ("ZooKeeperAway", 7, 2_500)
    assert away["cause"] == "ZooKeeper did not answer broker 100 for 2,500 ms"


@run_by(simulate)
async def test_a_resignation_is_recorded_and_counted_and_leaves_the_event_under_way_alone(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    timeline = office.controller.timeline
    timeline.begin(Startup(7), 0)
    timeline.record("ControllerSuspected", "broker 9 is suspected", 6, {"broker": 9})
    timeline.add("notes", ["something"])
    timeline.end()
    during, event = office.entries[-2:]
    assert (during["event"], during["broker"], "notes" in during) == ("ControllerSuspected", 9, False)
    assert (event["event"], event["notes"]) == ("Startup", ["something"])
    await office.controller.resign("because")
    assert (office.entries[-1]["event"], office.entries[-1]["cause"]) == ("Resignation", "because")
    assert timeline.times["Resignation"].count == 1

"""The controller as a whole: brokers come and go, topics too, on a simulated ZooKeeper and network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableTopic,
    LeaderAndIsrRequest,
    LeaderAndIsrResponse,
    Message,
    StopReplicaResponse,
    UpdateMetadataResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Check, Delete, Operation
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.unit.controller.cluster import Cluster, ObedientBroker, Told, simulate

ORDERS_0 = TopicPartition("orders", 0)
ORDERS_1 = TopicPartition("orders", 1)


# --- Topics --------------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_a_created_topic_is_in_zookeeper_and_its_brokers_lead_and_follow(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    result = await office.create("orders", (1, 2, 3), (2, 3, 1), config={"retention.ms": "1000"})
    assert (result.error_code, result.num_partitions, result.replication_factor) == (ErrorCode.NONE, 2, 3)
    await cluster.has(ORDERS_0, 1, [1, 2, 3])
    await cluster.has(ORDERS_1, 2, [2, 3, 1])
    topic = znodes.decode_topic("orders", cluster.zookeeper.data("/brokers/topics/orders"))
    assert topic == znodes.TopicZnode(result.topic_id, {0: (1, 2, 3), 1: (2, 3, 1)})
    config = cluster.zookeeper.data("/config/topics/orders")
    assert znodes.decode_config("", config) == {"retention.ms": "1000"}
    assert json.loads(cluster.zookeeper.data("/brokers/topics/orders/partitions/0/state")) == {
        "controller_epoch": 1,
        "leader": 1,
        "leader_epoch": 0,
        "isr": [1, 2, 3],
        "version": 1,
        "isr_epochs": [cluster.brokers[b].epoch for b in (1, 2, 3)],
        "min_insync_replicas": 2,
    }
    for broker in cluster.brokers.values():
        roles = broker.roles
        await cluster.until(lambda: set(roles) == {ORDERS_0, ORDERS_1})  # noqa: B023 - it is awaited here
        assert all(role.is_new for role in broker.roles.values())


@run_by(simulate)
async def test_brokers_learn_where_the_leaders_are_and_in_which_order(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    first, all_told, leader_and_isr, metadata = cluster.brokers[2].told
    assert (first.api, all_told.api) == ("UpdateMetadata", "UpdateMetadata")
    assert (first.body.names_the_last, all_told.body.names_the_last) == (False, True)
    assert [broker.id for broker in first.body.live_brokers] == [1, 2]
    assert (leader_and_isr.api, metadata.api) == ("LeaderAndIsr", "UpdateMetadata")
    request = leader_and_isr.body
    assert (request.controller_id, request.controller_epoch, request.broker_epoch) == (
        100,
        1,
        cluster.brokers[2].epoch,
    )
    [leader] = request.live_leaders
    assert (leader.broker_id, leader.host_name, leader.port) == (1, "broker-1", 9092)


@run_by(simulate)
async def test_a_topic_created_by_hand_in_zookeeper_is_taken_in(cluster: Cluster, /) -> None:
    await cluster.start([1, 2])
    topic = znodes.TopicZnode("AAAAAAAAAAAAAAAAAAAAAA", {0: (2, 1)})
    cluster.zookeeper.make("/brokers/topics/orders", znodes.encode_topic(topic))
    await cluster.has(ORDERS_0, 2, [2, 1])
    await cluster.until(lambda: cluster.zookeeper.has("/brokers/topics/orders/id-AAAAAAAAAAAAAAAAAAAAAA"))


@run_by(simulate)
async def test_a_node_stands_for_the_id_of_each_topic_as_long_as_the_topic_is_there(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    topic_id = (await office.create("orders", (1,))).topic_id
    await cluster.has(ORDERS_0, 1, [1])
    assert cluster.zookeeper.names("/brokers/topics/orders") == [f"id-{topic_id}", "partitions"]
    await office.delete("orders")
    await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/orders"))


@run_by(simulate)
async def test_a_controller_that_takes_office_makes_the_nodes_of_ids_that_are_missing(cluster: Cluster, /) -> None:
    for topic, topic_id in (("orders", "AAAAAAAAAAAAAAAAAAAAAA"), ("old", ""), ("odd", "a/b")):
        znode = znodes.encode_topic(znodes.TopicZnode(topic_id, {0: (1,)}))
        cluster.zookeeper.make(znodes.topic_path(topic), znode)
    await cluster.start([1])
    await cluster.until(lambda: cluster.zookeeper.has("/brokers/topics/orders/id-AAAAAAAAAAAAAAAAAAAAAA"))
    await cluster.has(TopicPartition("old", 0), 1, [1])
    assert cluster.zookeeper.names("/brokers/topics/old") == ["partitions"]
    assert cluster.zookeeper.names("/brokers/topics/odd") == []


@run_by(simulate)
async def test_creating_what_exists_is_refused_even_if_somebody_else_created_it_a_moment_before(
    cluster: Cluster, /
) -> None:
    office = await cluster.start([1])
    await office.create("orders", (1,))
    again = await office.create("orders", (1,))
    assert again.error_code == ErrorCode.TOPIC_ALREADY_EXISTS

    theirs = znodes.encode_topic(znodes.TopicZnode("BBBBBBBBBBBBBBBBBBBBBB", {0: (1,)}))

    def steal(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(operation.path == "/brokers/topics/stolen" for operation in operations):
            cluster.zookeeper.before = None
            cluster.zookeeper.make("/brokers/topics/stolen", theirs)

    cluster.zookeeper.before = steal
    stolen = await office.create("stolen", (1,))
    assert (stolen.error_code, stolen.topic_id) == (ErrorCode.TOPIC_ALREADY_EXISTS, "")
    assert not cluster.zookeeper.has("/config/topics/stolen")
    await cluster.has(TopicPartition("stolen", 0), 1, [1])
    assert cluster.zookeeper.data("/brokers/topics/stolen") == theirs


@run_by(simulate)
async def test_settings_left_behind_by_an_earlier_topic_are_overwritten(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    cluster.zookeeper.make("/config/topics/orders", znodes.encode_config({"retention.ms": "1"}))
    result = await office.create("orders", (1,), config={"retention.ms": "2"})
    assert result.error_code == ErrorCode.NONE
    assert znodes.decode_config("", cluster.zookeeper.data("/config/topics/orders")) == {"retention.ms": "2"}


@run_by(simulate)
async def test_validation_alone_creates_nothing(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    [result] = await office.run(office.controller.create_topics([CreatableTopic("orders", 3, 1)], validate_only=True))
    assert (result.error_code, result.num_partitions, result.topic_id) == (ErrorCode.NONE, 3, "")
    assert cluster.zookeeper.names("/brokers/topics") == []


@run_by(simulate)
async def test_many_partitions_are_written_in_multis_of_at_most_a_hundred_operations_under_the_epoch(
    cluster: Cluster, /
) -> None:
    office = await cluster.start([1, 2, 3])
    written: list[Sequence[Operation]] = []
    cluster.zookeeper.after = lambda session, operations: written.append(operations)
    [result] = await office.run(office.controller.create_topics([CreatableTopic("orders", 250, 2)]))
    assert result.error_code == ErrorCode.NONE
    assert len(cluster.zookeeper.names("/brokers/topics/orders/partitions")) == 250
    assert {operations[0] for operations in written} == {Check(znodes.CONTROLLER_EPOCH, 1)}
    assert max(len(operations) for operations in written) <= 1 + 100
    # The topic; 100 partitions of two operations and their parent, no partition cut in two; 100 more without the
    # parent; 50 more.
    assert len(written) == 1 + 3 + 2 + 1


@run_by(simulate)
async def test_a_deleted_topic_leaves_nothing_behind(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    before = cluster.zookeeper.paths()
    await office.create("orders", (1, 2), (2, 1))
    await cluster.has(ORDERS_0, 1, [1, 2])
    unknown, known = await office.delete("ghost", "orders")
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert known.error_code == ErrorCode.NONE
    await cluster.until(lambda: cluster.zookeeper.paths() == before)
    for broker in cluster.brokers.values():
        assert sorted(broker.deleted) == [ORDERS_0, ORDERS_1]
        assert broker.topics == {}
    await office.idle()
    assert office.controller.state is not None
    assert office.controller.state.topic_ids == {}
    # The name is free again.
    assert (await office.create("orders", (2,))).error_code == ErrorCode.NONE
    await cluster.has(ORDERS_0, 2, [2])


@run_by(simulate)
async def test_a_topic_is_deleted_when_its_last_broker_is_back(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    cluster.brokers[2].kill()
    office.suspect(cluster.brokers[2])
    await cluster.has(ORDERS_0, 1, [1])
    await office.delete("orders")
    await cluster.until(lambda: cluster.brokers[1].deleted)
    await office.idle()
    assert cluster.zookeeper.has("/brokers/topics/orders")
    assert (await office.create("orders", (1,))).error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    assert office.controller.state is not None
    assert "broker 2" in office.controller.state.ineligible_topics["orders"]

    await cluster.brokers[2].start()
    await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/orders"))
    await cluster.until(lambda: not cluster.zookeeper.has("/admin/delete_topics/orders"))
    assert cluster.brokers[2].deleted == [ORDERS_0]
    assert cluster.brokers[2].roles == {}


def test_a_topic_whose_replicas_have_only_stopped_is_not_forgotten() -> None:
    async def scenario(cluster: Cluster) -> None:
        office = await cluster.start([1, 2])
        await office.create("orders", (1, 2))
        await cluster.has(ORDERS_0, 1, [1, 2])
        slow = cluster.brokers[2]

        def stop_only(told: Told) -> Message | None:
            deletes = told.api == "StopReplica" and told.body.topic_states[0].partition_states[0].delete_partition
            return None if deletes else slow.obey(told)

        slow.answer = stop_only
        await office.delete("orders")
        await cluster.until(lambda: cluster.brokers[1].deleted and slow.told[-1].api == "StopReplica")
        await office.idle()
        assert slow.roles == {}, "it was stopped first"
        assert slow.deleted == []
        assert cluster.zookeeper.has("/brokers/topics/orders")
        slow.answer = slow.obey
        await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/orders"))
        assert slow.deleted == [ORDERS_0]

    simulate(scenario)
    with planted("stopped-is-deleted"), pytest.raises(AssertionError):
        simulate(scenario)


@run_by(simulate)
async def test_a_broker_that_dies_while_it_deletes_is_asked_again_when_it_is_back(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    slow = cluster.brokers[2]
    slow.answer = _deaf_to("StopReplica", slow)
    await office.delete("orders")
    await cluster.until(lambda: slow.told[-1].api == "StopReplica")
    slow.kill()
    office.suspect(slow)
    await office.idle()
    slow.answer = slow.obey
    await slow.start()
    await cluster.until(lambda: not cluster.zookeeper.has("/admin/delete_topics/orders"))
    assert slow.deleted == [ORDERS_0]


@run_by(simulate)
async def test_a_deletion_goes_on_under_the_next_controller(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    for broker in cluster.brokers.values():
        broker.answer = _deaf_to("StopReplica", broker)
    await office.delete("orders")
    await cluster.until(lambda: all(b.told[-1].api == "StopReplica" for b in cluster.brokers.values()))
    office.kill()
    for broker in cluster.brokers.values():
        broker.answer = broker.obey
    await cluster.elect(101)
    await cluster.until(lambda: not cluster.zookeeper.has("/admin/delete_topics/orders"))
    assert not cluster.zookeeper.has("/brokers/topics/orders")


@run_by(simulate)
async def test_a_deletion_ends_only_when_every_live_broker_knows_of_it_whoever_is_controller(
    cluster: Cluster, /
) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1,))
    await cluster.has(ORDERS_0, 1, [1])
    slow = cluster.brokers[2]
    slow.answer = lambda told: None  # it has no replica, but serves metadata to clients
    await office.delete("orders")
    await cluster.until(lambda: cluster.brokers[1].deleted)
    await office.idle()
    assert cluster.zookeeper.has("/admin/delete_topics/orders")
    office.kill()
    slow.answer = slow.obey
    assert "orders" in slow.topics
    await cluster.elect(101)
    await cluster.until(lambda: not cluster.zookeeper.has("/admin/delete_topics/orders"))
    assert slow.topics == {}


@run_by(simulate)
async def test_deletion_copes_with_nodes_that_somebody_put_under_the_topic(cluster: Cluster, /) -> None:
    office = await cluster.start([1])
    await office.create("orders", (1,))
    removed = 0

    def intrude(session: VirtualSession, operations: Sequence[Operation]) -> None:
        nonlocal removed
        if any(isinstance(o, Delete) and o.path == "/brokers/topics/orders" for o in operations):
            removed += 1
            if removed == 1:
                cluster.zookeeper.make("/brokers/topics/orders/partitions/0/surprise")

    cluster.zookeeper.before = intrude
    await office.delete("orders")
    await cluster.until(lambda: not cluster.zookeeper.has("/admin/delete_topics/orders"))
    assert removed == 2
    assert not cluster.zookeeper.has("/brokers/topics/orders")
    assert not office.resigned


@run_by(simulate)
async def test_a_topic_created_and_marked_for_deletion_by_hand_at_once_is_deleted(cluster: Cluster, /) -> None:
    await cluster.start([1])
    topic = znodes.encode_topic(znodes.TopicZnode("AAAAAAAAAAAAAAAAAAAAAA", {0: (1,)}))
    cluster.zookeeper.make("/admin/delete_topics/orders")
    cluster.zookeeper.make("/brokers/topics/orders", topic)
    cluster.zookeeper.make("/admin/delete_topics/ghost")
    await cluster.until(lambda: cluster.zookeeper.names("/admin/delete_topics") == [])
    await cluster.until(lambda: not cluster.zookeeper.has("/brokers/topics/orders"))


# --- Brokers -------------------------------------------------------------------------------------------------


@run_by(simulate)
async def test_a_killed_leader_is_replaced_as_soon_as_it_is_suspected(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3), (2, 3, 1))
    await cluster.has(ORDERS_1, 2, [2, 3, 1])
    cluster.brokers[1].kill()
    writes = _writes_of(cluster)
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 2, [2, 3])
    await cluster.has(ORDERS_1, 2, [2, 3])
    assert (cluster.state(ORDERS_0).leader_epoch, cluster.state(ORDERS_1).leader_epoch) == (1, 1)
    # One to remove the registration, one for every election.
    assert [len(operations) for operations in writes] == [2, 3]
    assert cluster.brokers[2].led == {ORDERS_0, ORDERS_1}
    assert office.watched[-1] == (2, 3)


@run_by(simulate)
async def test_a_new_controller_first_elects_for_the_partitions_of_dead_brokers(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", *[(1, 2)] * 250, (3, 1))
    await cluster.has(TopicPartition("orders", 250), 3, [3, 1])
    office.kill()
    cluster.brokers[3].kill()
    told = len(cluster.brokers[1].told)
    await cluster.elect(101)
    await cluster.has(TopicPartition("orders", 250), 1, [1])
    first = next(t for t in cluster.brokers[1].told[told:] if t.api == "LeaderAndIsr")
    assert [state.partition_index for state in first.body.topic_states[0].partition_states] == [250]


@run_by(simulate)
async def test_a_broker_whose_session_expires_is_replaced_without_suspicion(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    cluster.brokers[1].kill()
    await cluster.has(ORDERS_0, 2, [2])


@run_by(simulate)
async def test_a_suspicion_of_an_earlier_run_hurts_nobody(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    former = cluster.brokers[1].epoch
    await cluster.brokers[1].bounce()
    await cluster.until(lambda: office.entries[-1]["event"] == "LeaderAndIsrAnswered")
    office.controller.suspect(1, former, "too late")
    await office.idle()
    assert cluster.zookeeper.has("/brokers/ids/1")
    [entry] = [entry for entry in office.entries if entry["event"] == "BrokerSuspected"]
    assert entry["notes"] == [f"broker 1 of epoch {former} is gone already"]


@run_by(simulate)
async def test_a_restarted_broker_loses_its_leaderships_and_gets_the_full_state(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await office.create("alone", (1,))
    alone = TopicPartition("alone", 0)
    await cluster.has(alone, 1, [1])
    bounced = cluster.brokers[1]
    told = len(bounced.told)
    await bounced.bounce()
    await cluster.has(ORDERS_0, 2, [2])
    # With no other member in the ISR it goes down with the old run and comes back with the new one.
    await cluster.until(lambda: cluster.state(alone).leader_epoch == 2)
    await cluster.has(alone, 1, [1])
    later = [told for told in bounced.told[told:] if told.body.broker_epoch == bounced.epoch]
    assert later[0].api == "UpdateMetadata"
    assert {topic.topic_name for topic in later[0].body.topic_states} == {"alone", "orders"}
    assert bounced.live_brokers == {1: bounced.epoch, 2: cluster.brokers[2].epoch}


@run_by(simulate)
async def test_a_partition_without_leader_gets_one_when_a_member_of_its_isr_is_back(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3))
    await cluster.has(ORDERS_0, 1, [1, 2, 3])
    for broker_id in (1, 2):
        cluster.brokers[broker_id].kill()
        office.suspect(cluster.brokers[broker_id])
        await office.idle()
    await cluster.has(ORDERS_0, 3, [3])
    cluster.brokers[3].kill()
    office.suspect(cluster.brokers[3])
    await cluster.until(lambda: cluster.leader_and_isr(ORDERS_0) == (-1, (3,)))
    assert office.controller.state is not None
    assert office.controller.state.offline_partition_count() == 1

    await cluster.brokers[1].start()
    await cluster.until(lambda: ORDERS_0 in cluster.brokers[1].roles)
    assert cluster.leader_and_isr(ORDERS_0) == (-1, (3,)), "broker 1 lacks what 3 has acknowledged"
    await cluster.brokers[3].start()
    await cluster.has(ORDERS_0, 3, [3])


@run_by(simulate)
async def test_the_setting_of_a_topic_allows_an_unclean_election(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2), config={"unclean.leader.election.enable": "true"})
    await office.create("dear", (1, 2))
    dear = TopicPartition("dear", 0)
    await cluster.has(dear, 1, [1, 2])
    for partition in (ORDERS_0, dear):
        await cluster.brokers[1].change_isr(partition, [1])
    await cluster.has(dear, 1, [1])
    cluster.brokers[1].kill()
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 2, [2])
    await cluster.has(dear, -1, [1])


@run_by(simulate)
async def test_a_leader_that_changed_its_isr_is_heard_by_everybody(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3))
    await cluster.has(ORDERS_0, 1, [1, 2, 3])
    await cluster.brokers[1].change_isr(ORDERS_0, [1, 3])
    await cluster.has(ORDERS_0, 1, [1, 3])
    await cluster.until(lambda: cluster.zookeeper.names("/isr_change_notification") == [])
    assert cluster.state(ORDERS_0).leader_epoch == 0


@run_by(simulate)
async def test_an_isr_changed_just_before_the_election_is_what_the_election_goes_by(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3), (1, 2, 3))
    await cluster.has(ORDERS_1, 1, [1, 2, 3])

    def shrink(session: VirtualSession, operations: Sequence[Operation]) -> None:
        """The dead leader's last write arrives between the decision and its write."""
        if any(operation.path == znodes.state_path(ORDERS_0) for operation in operations):
            cluster.zookeeper.before = None
            state = cluster.state(ORDERS_0)
            shrunk = type(state)(1, state.leader_epoch, (1, 3), state.controller_epoch, 0)
            cluster.zookeeper.make(znodes.state_path(ORDERS_0), znodes.encode_state(shrunk))

    cluster.zookeeper.before = shrink
    cluster.brokers[1].kill()
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 3, [3])
    await cluster.has(ORDERS_1, 2, [2, 3])
    assert cluster.state(ORDERS_0).leader_epoch == cluster.state(ORDERS_1).leader_epoch == 1
    [entry] = [entry for entry in office.entries if "conflicts" in entry]
    assert len(entry["conflicts"]) == 1
    assert entry["conflicts"][0].startswith("orders-0 is at version 1")


@run_by(simulate)
async def test_a_state_unchanged_after_a_conflict_is_still_sent_to_its_replicas(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("orders", (1, 2, 3))
    await cluster.has(ORDERS_0, 1, [1, 2, 3])

    def mend(session: VirtualSession, operations: Sequence[Operation]) -> None:
        """An administrator writes broker 3 as the leader, just before the controller elects broker 2."""
        if any(operation.path == znodes.state_path(ORDERS_0) for operation in operations):
            cluster.zookeeper.before = None
            by_hand = type(cluster.state(ORDERS_0))(3, 7, (3,), 1, 0)
            cluster.zookeeper.make(znodes.state_path(ORDERS_0), znodes.encode_state(by_hand))

    cluster.zookeeper.before = mend
    cluster.brokers[1].kill()
    office.suspect(cluster.brokers[1])
    await cluster.has(ORDERS_0, 3, [3])
    for broker_id in (2, 3):
        roles = cluster.brokers[broker_id].roles
        await cluster.until(lambda: roles[ORDERS_0].leader_epoch == 7)  # noqa: B023 - it is awaited here


@run_by(simulate)
async def test_a_replica_that_its_leader_takes_in_after_its_broker_died_is_taken_out_again(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    cluster.brokers[2].kill()
    office.suspect(cluster.brokers[2])
    await cluster.has(ORDERS_0, 1, [1])
    await cluster.until(lambda: cluster.brokers[1].roles[ORDERS_0].leader_epoch == 1)
    await cluster.brokers[1].change_isr(ORDERS_0, [1, 2])
    await cluster.until(lambda: cluster.state(ORDERS_0).leader_epoch == 2)
    await cluster.has(ORDERS_0, 1, [1])


@run_by(simulate)
async def test_a_failed_log_directory_moves_its_partitions_away(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2), (2, 1))
    await cluster.has(ORDERS_1, 2, [2, 1])
    broken = cluster.brokers[1]

    def fail(told: Told) -> Message:
        response = broken.obey(told)
        if isinstance(response, LeaderAndIsrResponse):
            for error in response.partition_errors:
                if error.partition_index == 0:
                    error.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        return response

    broken.answer = fail
    await broken.bounce()
    await cluster.has(ORDERS_0, 2, [2])
    state = office.controller.state
    assert state is not None
    await cluster.until(lambda: state.offline_replicas(ORDERS_0) == (1,))
    await cluster.until(lambda: broken.topics["orders"][0].offline_replicas == [1])
    assert broken.topics["orders"][1].offline_replicas == []


@pytest.mark.parametrize(
    ("refused_with", "times"), [(ErrorCode.BROKER_ID_NOT_REGISTERED, 100), (ErrorCode.UNKNOWN_SERVER_ERROR, 3)]
)
@pytest.mark.parametrize("api", ["LeaderAndIsr", "UpdateMetadata", "StopReplica"])
@run_by(simulate)
async def test_an_order_that_a_broker_could_not_carry_out_yet_comes_again_before_any_other(
    cluster: Cluster, /, api: str, refused_with: ErrorCode, times: int
) -> None:
    office = await cluster.start([1, 2])
    busy = cluster.brokers[1]
    refused: list[Told] = []
    responses: dict[str, Callable[[ErrorCode], Message]] = {
        "LeaderAndIsr": lambda code: LeaderAndIsrResponse(code, []),
        "UpdateMetadata": UpdateMetadataResponse,
        "StopReplica": lambda code: StopReplicaResponse(code, []),
    }

    def refuse(told: Told) -> Message:
        if refused and len(refused) < times:
            assert told == refused[0]
        elif told.api != api or refused:
            return busy.obey(told)
        refused.append(told)
        return responses[api](refused_with)

    busy.answer = refuse
    await office.create("orders", (1, 2))
    if api == "StopReplica":
        await cluster.until(lambda: ORDERS_0 in busy.roles)
        await office.delete("orders")
        await cluster.until(lambda: not cluster.zookeeper.has(znodes.topic_path("orders")))
        assert ORDERS_0 in busy.deleted
    else:
        await cluster.until(lambda: ORDERS_0 in busy.led and "orders" in busy.topics)
    assert len(refused) == times


@run_by(simulate)
async def test_an_order_that_a_broker_fails_at_again_and_again_does_not_hold_up_the_others(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    broken = cluster.brokers[1]

    def fail(told: Told) -> Message:
        body = told.body
        if isinstance(body, LeaderAndIsrRequest) and any(t.topic_name == "orders" for t in body.topic_states):
            return LeaderAndIsrResponse(ErrorCode.UNKNOWN_SERVER_ERROR, [])
        return broken.obey(told)

    broken.answer = fail
    await office.create("orders", (1, 2))
    await office.create("payments", (1, 2))
    await cluster.until(lambda: TopicPartition("payments", 0) in broken.roles)


# --- Helpers -------------------------------------------------------------------------------------------------


def _deaf_to(api: str, broker: ObedientBroker) -> Callable[[Told], Message | None]:
    return lambda told: None if told.api == api else broker.obey(told)


def _writes_of(cluster: Cluster) -> list[Sequence[Operation]]:
    """Return each transaction that the controller writes from now on: those that begin with the check of its epoch."""
    written: list[Sequence[Operation]] = []

    def note(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if operations[0].path == znodes.CONTROLLER_EPOCH:
            written.append(operations)

    cluster.zookeeper.after = note
    return written

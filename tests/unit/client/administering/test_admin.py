from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.administering.reassignment import Alteration, Listing
from minibroker.client.administering.topics import NewTopic
from minibroker.client.errors import Closed, InvalidSetting, PartitionErrors, TopicErrors
from minibroker.protocol.apis import CREATE_TOPICS, DELETE_RECORDS, DELETE_TOPICS, DESCRIBE_CONFIGS, METADATA
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.scripted_broker import (
    CARRY_OUT_AND_DROP,
    DROP,
    HANG,
    ORDINARY,
    Action,
    Received,
    ScriptedCluster,
    leap,
    reject,
)


def run(scenario: Callable[[ScriptedCluster, Admin], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ScriptedCluster(3) as cluster:
            cluster.controller = 1
            async with Admin(cluster.bootstrap, retry_backoff_ms=10, **settings) as admin:
                await scenario(cluster, admin)

    asyncio.run(main())


LIFECYCLE = ("start", "close")


@run_by(run)
async def test_topics_are_created_described_listed_and_deleted(cluster: ScriptedCluster, admin: Admin, /) -> None:
    await admin.create_topic("orders", partitions=2, replication_factor=3, configs={"retention.ms": "5"})
    request = cluster.requests(CREATE_TOPICS)[0]
    (topic,) = request.topics
    assert (topic.num_partitions, topic.replication_factor) == (2, 3)
    assert [(config.name, config.value) for config in topic.configs] == [("retention.ms", "5")]
    description = await admin.describe_topic("orders")
    assert [partition.leader for partition in description.partitions] == [0, 1]
    assert await admin.list_topics() == ["orders"]
    assert list(await admin.describe_topics()) == ["orders"]
    await admin.delete_topic("orders")
    assert await admin.list_topics() == []


@run_by(run)
async def test_partitions_can_be_assigned_to_brokers(cluster: ScriptedCluster, admin: Admin, /) -> None:
    await admin.create_topic("orders", assignments=[[0, 1], [1, 2]])
    topic = cluster.requests(CREATE_TOPICS)[0].topics[0]
    assert [(a.partition_index, a.broker_ids) for a in topic.assignments] == [(0, [0, 1]), (1, [1, 2])]
    assert (topic.num_partitions, topic.replication_factor) == (-1, -1)


@run_by(run)
async def test_the_cluster_is_described(cluster: ScriptedCluster, admin: Admin, /) -> None:
    description = await admin.describe_cluster()
    assert (description.cluster_id, description.controller_id) == ("scripted", 1)
    assert [broker.id for broker in description.brokers] == [0, 1, 2]
    cluster.controller = -1
    assert (await admin.describe_cluster()).controller_id is None


@run_by(run)
async def test_errors_name_the_topic_and_the_remedy(cluster: ScriptedCluster, admin: Admin, /) -> None:
    cluster.add_topic("orders")
    with pytest.raises(BrokerError, match="Choose another name") as caught:
        await admin.create_topic("orders")
    assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
    with pytest.raises(BrokerError) as caught:
        await admin.delete_topic("nowhere")
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    with pytest.raises(BrokerError) as caught:
        await admin.describe_topic("nowhere")
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    with pytest.raises(BrokerError) as caught:
        await admin.create_topic("no/slash")
    assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    with pytest.raises(InvalidSetting):
        await admin.create_topic("other", partitions=0)
    with pytest.raises(InvalidSetting):
        await admin.create_topic("other", partitions=1, assignments=[[0]])


@run_by(run)
async def test_of_several_topics_those_that_failed_are_named_and_the_others_are_there(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    cluster.add_topic("b")
    with pytest.raises(TopicErrors) as caught:
        await admin.create_topics([NewTopic("a"), NewTopic("b"), NewTopic("c")])
    assert list(caught.value.errors) == ["b"]
    assert await admin.list_topics() == ["a", "b", "c"]


@run_by(run)
async def test_a_controller_that_moved_is_found(cluster: ScriptedCluster, admin: Admin, /) -> None:
    cluster.controller = 2
    await admin.create_topic("orders")
    asked = [received.node_id for received in cluster.received if received.api is CREATE_TOPICS]
    assert asked == [1, 2]


@run_by(run)
async def test_a_controller_that_was_killed_is_replaced_by_its_successor(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    await cluster.nodes[1].stop()

    def successor(received: Received) -> None:
        cluster.controller = 2

    cluster.rules.append(successor)
    await admin.create_topic("orders")
    assert "orders" in cluster.topics


@pytest.mark.slow
@run_by(run)
async def test_a_controller_that_does_not_answer_is_left_once_there_is_another(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    cluster.rules.append(lambda received: HANG if received.node_id == 1 else None)
    creating = asyncio.ensure_future(admin.create_topic("orders"))
    await cluster.until(lambda: bool(cluster.requests(CREATE_TOPICS)))
    cluster.controller = 2
    await creating
    assert [received.node_id for received in cluster.received if received.api is CREATE_TOPICS] == [1, 2]


@run_by(run)
async def test_a_change_whose_answer_was_lost_counts_as_done_if_it_is_found_done(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    cluster.script(CREATE_TOPICS, CARRY_OUT_AND_DROP)
    await admin.create_topic("orders")
    assert len(cluster.requests(CREATE_TOPICS)) == 2
    cluster.script(DELETE_TOPICS, ORDINARY, CARRY_OUT_AND_DROP)
    await admin.delete_topic("orders")
    assert len(cluster.requests(DELETE_TOPICS)) == 3  # the first attempt asks only for the id


@run_by(run)
async def test_what_no_retry_mends_within_the_timeout_is_raised(cluster: ScriptedCluster, admin: Admin, /) -> None:
    def third_time_leaps(action: Action) -> Callable[[Received], Action | None]:
        def rule(received: Received) -> Action | None:
            if received.api is not CREATE_TOPICS:
                return None
            if len(cluster.requests(CREATE_TOPICS)) % 3 == 0:
                leap(admin)
            return action

        return rule

    cluster.rules = [third_time_leaps(reject(ErrorCode.NOT_CONTROLLER))]
    with pytest.raises(BrokerError) as caught:
        await admin.create_topic("orders")
    assert caught.value.code is ErrorCode.NOT_CONTROLLER
    assert len(cluster.requests(CREATE_TOPICS)) == 3
    cluster.rules = [third_time_leaps(DROP)]
    with pytest.raises(NetworkError):
        await admin.create_topic("orders")
    assert len(cluster.requests(CREATE_TOPICS)) == 6


@run_by(run)
async def test_a_creation_that_timed_out_is_not_asked_for_again(cluster: ScriptedCluster, admin: Admin, /) -> None:
    cluster.script(CREATE_TOPICS, reject(ErrorCode.REQUEST_TIMED_OUT))
    with pytest.raises(BrokerError) as caught:
        await admin.create_topic("orders")
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


@run_by(run)
async def test_an_admin_that_is_closed_says_so(cluster: ScriptedCluster, admin: Admin, /) -> None:
    await admin.close()
    await admin.close()
    with pytest.raises(Closed):
        await admin.list_topics()
    with pytest.raises(Closed):
        await admin.start()


@run_by(run)
async def test_every_call_of_a_client_that_does_not_run_raises_closed(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    reader = admin.timeline_reader()
    await admin.close()
    for client in (admin, Admin(cluster.bootstrap)):
        calls = [client.timeline_reader().read, *_calls_without_arguments(client)]
        assert client.timeline in calls
        for call in calls:
            with pytest.raises(Closed):
                await call()
    with pytest.raises(Closed):
        await reader.read()


def _calls_without_arguments(client: Admin) -> list[Callable[[], Coroutine[Any, Any, object]]]:
    methods = [getattr(client, name) for name in dir(client) if not name.startswith("_") and name not in LIFECYCLE]
    return [
        method
        for method in methods
        if inspect.iscoroutinefunction(inspect.unwrap(method))
        and all(p.default is not p.empty for p in inspect.signature(method).parameters.values())
    ]


@run_by(run)
async def test_a_read_of_timelines_ends_with_its_client(cluster: ScriptedCluster, admin: Admin, /) -> None:
    cluster.rules.append(lambda received: DROP if received.api is METADATA else None)
    reading = asyncio.ensure_future(admin.timeline_reader().read())
    await asyncio.sleep(0)
    await admin.close()
    with pytest.raises(Closed):
        await reading


@run_by(run)
async def test_a_name_where_a_list_is_expected_is_refused_and_nothing_is_deleted(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    await admin.create_topics([NewTopic("a", 1), NewTopic("b", 1), NewTopic("ab", 1)])
    for call in (admin.delete_topics, admin.describe_topics):
        with pytest.raises(InvalidSetting, match=r"names='ab': give a list: \['ab'\]"):
            await call("ab")
        with pytest.raises(InvalidSetting, match="a name is a str"):
            await call([b"ab"])  # type: ignore[list-item]
        with pytest.raises(InvalidSetting, match=r"names=\['ab'\]: a name is a str"):
            await call([["ab"]])  # type: ignore[list-item]
    for topics, named in (("ab", "'ab'"), (["ab"], "'ab'"), (NewTopic("ab"), "NewTopic")):
        with pytest.raises(InvalidSetting, match=f"topics={named}.*give a list of NewTopic, or call create_topic"):
            await admin.create_topics(topics)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"configs=\['x'\]: give a dict"):
        await admin.create_topic("c", configs=["x"])  # type: ignore[arg-type]
    assert await admin.list_topics() == ["a", "ab", "b"]


@pytest.mark.parametrize("replicas", ["12", {1, 2}, [2**31], [1.0], [True], 5], ids=str)
@run_by(run)
async def test_what_is_no_list_of_broker_ids_is_refused_before_anything_is_reassigned(
    cluster: ScriptedCluster, admin: Admin, /, replicas: Any
) -> None:
    with pytest.raises(InvalidSetting, match="replicas of orders-0=.*: give a list of broker ids, or None to cancel"):
        await admin.alter_partition_reassignments({TopicPartition("orders", 0): replicas})


def test_pairs_of_a_topic_and_a_number_can_be_reassigned_and_nothing_else() -> None:
    assert Alteration({("orders", 1): [1]}).names() == ["orders-1"]  # type: ignore[dict-item]
    with pytest.raises(InvalidSetting, match="give TopicPartition"):
        Alteration({"orders": [1]})  # type: ignore[dict-item]
    with pytest.raises(InvalidSetting, match="partitions=.*give a list"):
        Listing(TopicPartition("orders", 1))  # type: ignore[arg-type]


@run_by(run)
async def test_a_topic_that_is_to_be_created_twice_is_refused_before_anything_is_created(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    with pytest.raises(InvalidSetting, match="orders.*named 2 times: name it once"):
        await admin.create_topics([NewTopic("bills"), NewTopic("orders", 1), NewTopic("orders", 2)])
    assert not cluster.requests(CREATE_TOPICS)


@run_by(run)
async def test_brokers_are_asked_for_their_settings_together_as_one_may_not_answer(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    cluster.rules.append(lambda received: HANG if received.api is DESCRIBE_CONFIGS else None)
    asked = [ConfigResource.of_broker(broker_id) for broker_id in range(3)]
    describing = asyncio.create_task(admin.describe_configs(asked))
    await cluster.until(
        lambda: {each.node_id for each in cluster.received if each.api is DESCRIBE_CONFIGS} == {0, 1, 2}
    )
    assert not describing.done()
    describing.cancel()
    await asyncio.wait([describing])


def test_a_setting_is_not_set_to_none() -> None:
    with pytest.raises(InvalidSetting, match=r"retention\.ms=None: give a value, or .*ConfigChange\.delete"):
        ConfigChange.set("retention.ms", None)


@run_by(run)
async def test_a_change_where_a_list_of_changes_is_expected_is_refused(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    change = ConfigChange.set("retention.ms", 1)
    for changes in (change, ["retention.ms=1"]):
        with pytest.raises(InvalidSetting, match="changes of topic orders=.*: give a list of ConfigChange"):
            await admin.incremental_alter_configs({ConfigResource.of_topic("orders"): changes})  # type: ignore[dict-item]


# -- deleting records --


def with_ten_records_each(cluster: ScriptedCluster, partitions: int) -> None:
    """Return a cluster where broker N leads partition N."""
    cluster.add_topic("orders", partitions)
    for index in range(partitions):
        cluster.log("orders", index).end = 10


@run_by(run)
async def test_records_are_deleted_at_the_leader_of_each_partition(cluster: ScriptedCluster, admin: Admin, /) -> None:
    with_ten_records_each(cluster, 3)
    asked = {TopicPartition("orders", 0): 4, TopicPartition("orders", 1): -1}
    assert await admin.delete_records(asked) == {TopicPartition("orders", 0): 4, TopicPartition("orders", 1): 10}
    assert [cluster.log("orders", index).start for index in range(3)] == [4, 10, 0]
    assert len(cluster.requests(DELETE_RECORDS)) == 2
    assert await admin.delete_records({}) == {}


@run_by(run)
async def test_of_several_partitions_those_that_failed_are_named_and_the_others_are_deleted_from(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    with_ten_records_each(cluster, 2)
    good, beyond, absent, nowhere = (
        TopicPartition(name, index) for name, index in (("orders", 0), ("orders", 1), ("orders", 7), ("nowhere", 0))
    )
    with pytest.raises(PartitionErrors) as caught:
        await admin.delete_records(dict.fromkeys((absent, nowhere, good), 4) | {beyond: 11})
    codes = {p: error.code for p, error in caught.value.errors.items() if isinstance(error, BrokerError)}
    assert codes == {
        beyond: ErrorCode.OFFSET_OUT_OF_RANGE,
        absent: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        nowhere: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert "orders has no partition 7: its partitions are 0 to 1." in str(caught.value)
    assert caught.value.results == {good: 4}
    assert pickle.loads(pickle.dumps(caught.value)).results == {good: 4}
    assert [cluster.log("orders", index).start for index in range(2)] == [4, 0]
    for offset in (-2, 2**63, True):
        with pytest.raises(InvalidSetting):
            await admin.delete_records({good: offset})


@pytest.mark.parametrize("action", [DROP, CARRY_OUT_AND_DROP, reject(ErrorCode.REQUEST_TIMED_OUT)])
@run_by(run)
async def test_a_deletion_whose_answer_is_lost_or_negative_is_asked_for_again(
    cluster: ScriptedCluster, admin: Admin, /, action: Action
) -> None:
    with_ten_records_each(cluster, 1)
    cluster.script(DELETE_RECORDS, action)
    assert await admin.delete_records({TopicPartition("orders", 0): 4}) == {TopicPartition("orders", 0): 4}
    assert len(cluster.requests(DELETE_RECORDS)) == 2


@run_by(run)
async def test_a_late_attempt_to_delete_all_records_deletes_none_produced_since(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    with_ten_records_each(cluster, 1)

    def produced_meanwhile(received: Received) -> None:
        if received.api is DELETE_RECORDS:
            cluster.log("orders", 0).end += 1

    cluster.rules.append(produced_meanwhile)
    cluster.script(DELETE_RECORDS, DROP)
    assert await admin.delete_records({TopicPartition("orders", 0): -1}) == {TopicPartition("orders", 0): 10}
    asked = [request.topics[0].partitions[0].offset for request in cluster.requests(DELETE_RECORDS)]
    assert asked == [10, 10]


@run_by(run)
async def test_a_partition_without_a_leader_does_not_keep_the_others_from_being_deleted_from(
    cluster: ScriptedCluster, admin: Admin, /
) -> None:
    with_ten_records_each(cluster, 2)
    cluster.log("orders", 0).leader = -1
    cluster.rules.append(lambda _: leap(admin) if cluster.log("orders", 1).start == 10 else None)
    with pytest.raises(PartitionErrors) as caught:
        await admin.delete_records({TopicPartition("orders", index): -1 for index in range(2)})
    assert list(caught.value.errors) == [TopicPartition("orders", 0)]
    assert "may yet" not in str(caught.value)
    assert cluster.log("orders", 1).start == 10


@run_by(run)
async def test_a_deletion_is_asked_of_the_next_leader(cluster: ScriptedCluster, admin: Admin, /) -> None:
    with_ten_records_each(cluster, 1)

    def moved(received: Received) -> None:
        if received.api is DELETE_RECORDS:
            log = cluster.log("orders", 0)
            log.leader, log.epoch = 2, 1

    cluster.rules.append(moved)
    assert await admin.delete_records({TopicPartition("orders", 0): 4}) == {TopicPartition("orders", 0): 4}
    asked = [received.node_id for received in cluster.received if received.api is DELETE_RECORDS]
    assert (asked[0], asked[-1]) == (0, 2)


@pytest.mark.slow
@run_by(run, default_api_timeout_ms=1_500)
async def test_records_may_yet_be_deleted_if_time_runs_out(cluster: ScriptedCluster, admin: Admin, /) -> None:
    with_ten_records_each(cluster, 1)
    cluster.rules.append(lambda received: HANG if received.api is DELETE_RECORDS else None)
    with pytest.raises(PartitionErrors, match="may yet be deleted") as caught:
        await admin.delete_records({TopicPartition("orders", 0): 4})
    assert isinstance(caught.value.errors[TopicPartition("orders", 0)], NetworkError)


@run_by(run)
async def test_a_topic_that_was_created_again_since_loses_no_records(cluster: ScriptedCluster, admin: Admin, /) -> None:
    with_ten_records_each(cluster, 1)

    since: list[Received] = []

    def created_again(received: Received) -> Action | None:
        if received.api is DELETE_RECORDS and received.body.topics[0].topic_id == cluster.topics["orders"].topic_id:
            del cluster.topics["orders"]
            with_ten_records_each(cluster, 1)
        if cluster.requests(DELETE_RECORDS):
            since.append(received)
            if len(since) == 5:
                leap(admin)
        return None

    cluster.rules.append(created_again)
    with pytest.raises(PartitionErrors):
        await admin.delete_records({TopicPartition("orders", 0): 4})
    assert cluster.log("orders", 0).start == 0

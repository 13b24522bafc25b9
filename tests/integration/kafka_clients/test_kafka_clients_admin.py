"""Administration of real brokers with Kafka clients: topics, partitions, settings, groups, offsets, elections,
reassignments, producers."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)

from minibroker.client.administering.client_quotas import QuotaEntity
from minibroker.client.sync.admin import Admin
from minibroker.deploy.local.local_cluster import LocalCluster
from tests.live_cluster import live_cluster
from tests.waiting import until_true

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka_python

kafka: Any = importlib.import_module("confluent_kafka.admin")  # its type stubs are incomplete

pytestmark = pytest.mark.slow

PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with live_cluster(
        tmp_path_factory.mktemp("cluster"), settings={"group.initial.rebalance.delay.ms": "0"}
    ) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: LocalCluster) -> Any:
    return kafka.AdminClient({"bootstrap.servers": cluster.bootstrap(), "log_level": 0})


def result(futures: dict[Any, Any]) -> Any:
    """The result of the only future. Raises KafkaException."""
    [future] = futures.values()
    return future.result(PATIENCE_S)


def refusal(futures: dict[Any, Any]) -> int:
    with pytest.raises(KafkaException) as refused:
        result(futures)
    error: KafkaError = refused.value.args[0]
    code: int = error.code()
    return code


def write(cluster: LocalCluster, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap(), "enable.idempotence": True, "log_level": 0})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=0, timestamp=1_000 + number)
    assert producer.flush(PATIENCE_S) == 0


def test_topics_are_created_described_grown_and_deleted(admin: Any) -> None:
    topic = "orders"
    assert result(admin.create_topics([kafka.NewTopic("not-yet", 1, 3)], validate_only=True)) is None
    assert result(admin.create_topics([kafka.NewTopic(topic, 2, 3, config={"retention.ms": "60000"})])) is None
    assert refusal(admin.create_topics([kafka.NewTopic(topic, 2, 3)])) == KafkaError.TOPIC_ALREADY_EXISTS
    assert refusal(admin.create_topics([kafka.NewTopic("far", 1, 4)])) == KafkaError.INVALID_REPLICATION_FACTOR
    described = result(admin.describe_topics(TopicCollection([topic])))
    assert [len(partition.replicas) for partition in described.partitions] == [3, 3]
    assert refusal(admin.describe_topics(TopicCollection(["nope"]))) == KafkaError.UNKNOWN_TOPIC_OR_PART

    assert result(admin.create_partitions([kafka.NewPartitions(topic, 4)])) is None
    assert refusal(admin.create_partitions([kafka.NewPartitions(topic, 3)])) == KafkaError.INVALID_PARTITIONS
    # For all topics librdkafka sends three extra bytes.
    assert len(admin.list_topics(timeout=PATIENCE_S).topics[topic].partitions) == 4

    assert result(admin.delete_topics([topic])) is None
    assert refusal(admin.delete_topics([topic])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert topic not in admin.list_topics(timeout=PATIENCE_S).topics


def test_the_cluster_is_described(cluster: LocalCluster, admin: Any) -> None:
    described = admin.describe_cluster().result(PATIENCE_S)
    assert sorted(node.id for node in described.nodes) == [1, 2, 3]
    assert described.controller.id in (1, 2, 3)
    assert described.cluster_id


def test_settings_are_described_altered_one_by_one_and_replaced(admin: Any) -> None:
    topic = "settings"
    result(admin.create_topics([kafka.NewTopic(topic, 1, 3, config={"retention.ms": "60000"})]))
    resource = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic)

    def those_set() -> dict[str, str]:
        found: dict[str, Any] = result(admin.describe_configs([resource]))
        return {name: entry.value for name, entry in found.items() if entry.source == 1}

    assert those_set() == {"retention.ms": "60000"}
    setting = kafka.ConfigEntry("max.message.bytes", "70000", incremental_operation=kafka.AlterConfigOpType.SET)
    changed = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic, incremental_configs=[setting])
    assert result(admin.incremental_alter_configs([changed])) is None
    assert those_set() == {"retention.ms": "60000", "max.message.bytes": "70000"}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # AlterConfigs is deprecated since 2.3
        replaced = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic, set_config={"retention.ms": "80000"})
        assert result(admin.alter_configs([replaced])) is None
        assert those_set() == {"retention.ms": "80000"}
        nonsense = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic, set_config={"retention.ms": "soon"})
        assert refusal(admin.alter_configs([nonsense])) == KafkaError.INVALID_CONFIG
    assert those_set() == {"retention.ms": "80000"}

    broker = result(admin.describe_configs([kafka.ConfigResource(kafka.ConfigResource.Type.BROKER, "2")]))
    assert broker["broker.id"].value == "2"
    assert broker["broker.id"].is_read_only


def test_groups_and_their_offsets_are_listed_described_altered_and_deleted(cluster: LocalCluster, admin: Any) -> None:
    topic, group = "read", "readers"
    result(admin.create_topics([kafka.NewTopic(topic, 1, 3)]))
    write(cluster, topic, 10)
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap(),
            "group.id": group,
            "auto.offset.reset": "earliest",
            "client.id": "the-reader",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    until_true(lambda: consumer.poll(1.0) is not None)

    described = result(admin.describe_consumer_groups([group]))
    assert described.state == ConsumerGroupState.STABLE
    assert [member.client_id for member in described.members] == ["the-reader"]
    assert [(p.topic, p.partition) for p in described.members[0].assignment.topic_partitions] == [(topic, 0)]
    assert refusal(admin.delete_consumer_groups([group])) == KafkaError.NON_EMPTY_GROUP
    consumer.close()

    listed = admin.list_consumer_groups().result(PATIENCE_S).valid
    assert [one.state for one in listed if one.group_id == group] == [ConsumerGroupState.EMPTY]
    to = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 5)])
    result(admin.alter_consumer_group_offsets([to]))
    found = result(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]))
    assert [(p.topic, p.partition, p.offset) for p in found.topic_partitions] == [(topic, 0, 5)]
    assert result(admin.delete_consumer_groups([group])) is None
    assert refusal(admin.delete_consumer_groups([group])) == KafkaError.GROUP_ID_NOT_FOUND


def test_offsets_are_listed_and_records_deleted(cluster: LocalCluster, admin: Any) -> None:
    topic = "listed"
    result(admin.create_topics([kafka.NewTopic(topic, 1, 3)]))
    write(cluster, topic, 10)
    partition = TopicPartition(topic, 0)

    def offset(spec: Any) -> int:
        found: int = result(admin.list_offsets({partition: spec})).offset
        return found

    assert (offset(kafka.OffsetSpec.earliest()), offset(kafka.OffsetSpec.latest())) == (0, 10)
    assert (offset(kafka.OffsetSpec.max_timestamp()), offset(kafka.OffsetSpec.for_timestamp(1_003))) == (
        9,
        3,
    )
    assert result(admin.delete_records([TopicPartition(topic, 0, 4)])).low_watermark == 4
    assert offset(kafka.OffsetSpec.earliest()) == 4
    assert refusal(admin.delete_records([TopicPartition(topic, 0, 99)])) == KafkaError.OFFSET_OUT_OF_RANGE


def test_no_election_is_needed_for_a_partition_with_its_preferred_leader(admin: Any) -> None:
    result(admin.create_topics([kafka.NewTopic("elected", 1, 3)]))
    outcome = admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition("elected", 0)]).result(PATIENCE_S)
    assert [error.code() for error in outcome.values()] == [KafkaError.ELECTION_NOT_NEEDED]


def test_kafka_python_s_admin_client_lists_producers_log_dirs_and_reassignments(
    cluster: LocalCluster, admin: Any
) -> None:
    topic = "looked-at"
    result(admin.create_topics([kafka.NewTopic(topic, 1, 3)]))
    write(cluster, topic, 10)
    partition = kafka_python.TopicPartition(topic, 0)
    other = kafka_python.KafkaAdminClient(bootstrap_servers=cluster.bootstrap().split(","))
    try:
        assert sorted(broker["broker_id"] for broker in other.describe_cluster()["brokers"]) == [1, 2, 3]
        found = [one for broker in other.describe_log_dirs() for path in broker["log_dirs"] for one in path["topics"]]
        sizes = [p["partition_size"] for one in found if one["name"] == topic for p in one["partitions"]]
        assert len(sizes) == 3
        assert min(sizes) > 0
        [state] = other.describe_producers([partition]).values()
        assert [(one.producer_epoch, one.last_sequence) for one in state.active_producers] == [(0, 9)]
        assert other.list_partition_reassignments() == {}
    finally:
        other.close()


def test_a_client_over_its_quota_of_mutations_is_served_and_slowed_down(cluster: LocalCluster) -> None:
    """librdkafka's CreateTopics is older than THROTTLING_QUOTA_EXCEEDED."""
    with Admin(cluster.bootstrap()) as admin:
        admin.alter_client_quotas({QuotaEntity(client_id="limited"): {"controller_mutation_rate": 1}})
    limited = kafka.AdminClient({"bootstrap.servers": cluster.bootstrap(), "client.id": "limited", "log_level": 0})
    unlimited = kafka.AdminClient({"bootstrap.servers": cluster.bootstrap(), "log_level": 0})

    def seconds_to_create(client: Any, topic: str, partitions: int) -> float:
        began = time.monotonic()
        result(client.create_topics([kafka.NewTopic(topic, partitions, 1)]))
        return time.monotonic() - began

    # 11 tokens at first, from when the controller's broker knows the quota. A topic waits until the debt of the one
    # before it is paid.
    assert any(seconds_to_create(limited, f"mutations-{number}", 8) > 2 for number in range(1, 7))
    assert seconds_to_create(unlimited, "mutations-unlimited", 11) < 5

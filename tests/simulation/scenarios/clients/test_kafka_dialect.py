"""Kafka's protocol beside the native one on the same ports: versions, answers, and input that closes a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from minibroker.broker.handlers.metadata import FIRST_NEWS_MS
from minibroker.broker.network.kafka_dialect import KafkaDialect
from minibroker.broker.network.native_dialect import NativeDialect
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import CONTROL_PORT, PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import KafkaConnection, connect, request_frame
from minibroker.deploy.simulator.waiting import until
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import apis as kafka
from minibroker.protocol.kafka import data, metadata, transactions
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    decode_batch,
    encode_batch,
    iterate_batches,
    parse_header,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.topic_ids import make
from tests.kafka_messages import THEIRS
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, replicas_of, session_of, with_client

ORDERS = "orders"

Program = Callable[[VirtualCluster, VirtualWorld], Awaitable[None]]


def with_cluster(
    program: Program,
    settings: dict[str, str] | None = None,
    brokers: int = 3,
    configs: dict[str, str] | None = None,
) -> None:
    """Run the program as a client of a cluster with a topic of one partition."""
    topic = {"name": ORDERS, "partitions": 1, "replication_factor": brokers, "configs": configs}
    with_client(program, topic, settings=settings, brokers=brokers)


def wire(api: Any, **values: Any) -> Any:
    """Return a request as it is on the wire, which can differ from the native struct."""
    return api.request.cls(**values)


def about(*names: str, creates: bool = False) -> Any:
    cls = metadata.METADATA.request.fields[0].type.of.cls  # type: ignore[attr-defined]
    return wire(metadata.METADATA, topics=[cls("", name) for name in names], allow_auto_topic_creation=creates)


def batch(*values: bytes) -> memoryview:
    return memoryview(encode_batch(list(values), base_timestamp=1_000, magic=MAGIC_RECORDS))


def produce(records: memoryview, acks: int = -1, topic: str = ORDERS) -> Any:
    partitions = [m.ProducePartition(0, records)]
    return m.ProduceRequest(None, acks, 5_000, [m.ProduceTopic(topic, partitions)])


def fetch(
    offset: int = 0, replica_id: int = -1, max_wait_ms: int = 0, topic: str = ORDERS, topic_ids: Sequence[str] = ("",)
) -> Any:
    partition = m.FetchPartition(0, -1, offset, -1, -1, 1_000_000)
    topics = [m.FetchTopic(topic, topic_id, [partition]) for topic_id in topic_ids]
    request = wire(
        data.FETCH,
        replica_id=replica_id,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=1_000_000,
        isolation_level=0,
        topics=topics,
    )
    request.replica_state.replica_id = replica_id
    return request


async def to_leader(cluster: VirtualCluster, world: VirtualWorld) -> KafkaConnection:
    while True:
        connection = await connect(world.network, host_name(1), PORT)
        answer = await connection.request(metadata.METADATA, 12, about(ORDERS))
        connection.close()
        if answer.topics[0].partitions and answer.topics[0].partitions[0].leader_id != NO_LEADER:
            return await connect(world.network, host_name(answer.topics[0].partitions[0].leader_id), PORT)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("version", range(5))
@run_by(with_cluster)
async def test_api_versions_lists_the_versions_that_a_client_can_use(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    request = m.ApiVersionsRequest("librdkafka", "2.6.1") if version >= 3 else m.ApiVersionsRequest()
    answer = await connection.request(metadata.API_VERSIONS, version, request)
    assert answer.error_code == ErrorCode.NONE
    told = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
    assert told[apis.PRODUCE.key] == (0, 12)
    assert told[apis.FETCH.key] == (4, 17)
    assert apis.ENVELOPE.key not in told
    # Java clients that send version 3 reject supported features with a lowest level of 0 (KAFKA-17011)
    assert answer.supported_features == ([m.SupportedFeature("transaction.version", 0, 2)] if version >= 4 else [])
    finalized = [m.FinalizedFeature("transaction.version", 2, 2)] if version >= 3 else []
    assert answer.finalized_features == finalized
    assert answer.finalized_features_epoch == (0 if version >= 3 else -1)


@run_by(with_cluster)
async def test_api_versions_in_a_later_version_lists_the_supported_ones_and_the_client_continues(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    frame = request_frame(metadata.API_VERSIONS, 3, 7, m.ApiVersionsRequest("future", "9"))
    frame[6:8] = (99).to_bytes(2, "big")
    connection.write(frame)
    correlation_id, answer = await connection.answer(metadata.API_VERSIONS, 0)
    assert (correlation_id, answer.error_code) == (7, ErrorCode.UNSUPPORTED_VERSION)
    assert len(answer.api_keys) == len(kafka.KAFKA_APIS)
    assert not (await connection.request(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())).error_code


@run_by(with_cluster)
async def test_an_invalid_client_software_name_is_refused_and_a_valid_one_is_counted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    counts = cluster.broker(1)._server.metrics.client_software
    connection = await connect(world.network, host_name(1), PORT)
    connection.send(metadata.API_VERSIONS, 3, m.ApiVersionsRequest("a b\n", "1"))
    _, answer = await connection.answer(metadata.API_VERSIONS, 0)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    for _ in range(2):
        await connection.request(metadata.API_VERSIONS, 3, m.ApiVersionsRequest("librdkafka", "2.6.1"))
    assert counts.connections == {("librdkafka", "2.6.1"): 1}
    connection.close()
    await cluster.until(lambda: not counts.connections)


@run_by(with_cluster)
async def test_the_first_bytes_may_come_one_by_one_in_either_dialect(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    kafkas = request_frame(metadata.API_VERSIONS, 0, 7, m.ApiVersionsRequest())
    native = apis.encode_request(apis.API_VERSIONS, 7, "test", m.ApiVersionsRequest())
    for frame in (kafkas, native):
        connection = await connect(world.network, host_name(1), PORT)
        for byte in frame:
            connection.write(bytes([byte]))
            await asyncio.sleep(0.001)
        answer = await asyncio.wait_for(connection.frames.get(), 5)
        if frame is kafkas:
            assert answer[:4] == (7).to_bytes(4, "big")
        else:
            assert apis.decode_response_envelope(answer).correlation_id == 7


@pytest.mark.parametrize(
    ("what", "port", "frame"),
    [
        ("an API that is not served", PORT, b"\0\0\0\x0a\0\x04\0\0\0\0\0\x07\xff\xff"),
        ("a version that is not served", PORT, b"\0\0\0\x0a\0\x01\0\x03\0\0\0\x07\xff\xff"),
        ("half of a header", PORT, b"\0\0\0\x05\0\x03\0\0\0"),
        ("a length of two gigabytes", PORT, b"\x7f\xff\xff\xff\0\x12\0\0\0\0\0\x07\xff\xff"),
        ("Kafka's protocol to the control plane", CONTROL_PORT, b"\0\0\0\x0a\0\x12\0\0\0\0\0\x07\xff\xff"),
    ],
)
@run_by(with_cluster)
async def test_bad_input_closes_the_connection_without_an_answer(
    cluster: VirtualCluster, world: VirtualWorld, /, what: str, port: int, frame: bytes
) -> None:
    connection = await connect(world.network, host_name(1), port)
    connection.write(frame)
    await asyncio.wait_for(connection.closed.wait(), 5)
    assert connection.frames.empty()
    assert cluster.broker(1)._server.metrics.bad_input == 1


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc", "a TLS handshake, but this listener is PLAINTEXT"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP, but this listener serves Kafka's protocol: metrics are at metrics.listener"),
    ],
)
def test_a_client_of_another_protocol_is_named_in_the_log(
    frame: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        connection = await connect(world.network, host_name(1), PORT)
        connection.write(frame)
        await asyncio.wait_for(connection.closed.wait(), 5)
        assert connection.frames.empty()
        assert cluster.broker(1)._server.metrics.bad_input == 1

    with_cluster(program)
    assert [record for record in caplog.records if said in record.getMessage()]


@run_by(with_cluster)
async def test_produce_in_a_version_of_old_records_says_that_it_is_not_supported(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    for version in (0, 1, 2):
        connection = await to_leader(cluster, world)
        answer = await connection.request(data.PRODUCE, version, produce(batch(b"a")))
        assert answer.responses[0].partition_responses[0].error_code == ErrorCode.UNSUPPORTED_VERSION
        await asyncio.wait_for(connection.closed.wait(), 5)
    connection = await to_leader(cluster, world)
    connection.send(data.PRODUCE, 2, produce(batch(b"a"), acks=0))
    await asyncio.wait_for(connection.closed.wait(), 5)
    assert connection.frames.empty()


@pytest.mark.parametrize("version", range(3, 10))
@run_by(with_cluster)
async def test_produced_batches_are_stored_unchanged_and_read_in_both_dialects(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    connection = await to_leader(cluster, world)
    answer = await connection.request(data.PRODUCE, version, produce(batch(b"a", b"b")))
    result = answer.responses[0].partition_responses[0]
    assert (result.error_code, result.base_offset) == (ErrorCode.NONE, 0)
    for fetch_version in range(4, 13):
        answer = await connection.request(data.FETCH, fetch_version, fetch())
        [part] = answer.responses[0].partitions
        assert (part.error_code, part.high_watermark, part.last_stable_offset) == (ErrorCode.NONE, 2, 2)
        header = parse_header(part.records)
        assert (header.magic, header.base_offset) == (MAGIC_RECORDS, 0)
        assert decode_batch(part.records, header).values == [b"a", b"b"]
    async with Consumer(cluster.bootstrap, world=world) as consumer:
        consumer.assign([TopicPartition(ORDERS, 0)])
        consumer.seek_to_beginning()
        assert [(await anext(consumer)).value for _ in range(2)] == [b"a", b"b"]


@run_by(with_cluster)
async def test_answers_come_in_the_order_of_the_requests_and_acks_0_has_none(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    waits = connection.send(data.FETCH, 12, fetch(max_wait_ms=400))
    connection.send(data.PRODUCE, 9, produce(batch(b"a"), acks=0))
    quick = connection.send(metadata.METADATA, 12, about(ORDERS))
    assert (await connection.answer(data.FETCH, 12))[0] == waits
    assert (await connection.answer(metadata.METADATA, 12))[0] == quick
    answer = await connection.request(data.FETCH, 12, fetch(max_wait_ms=400))
    assert answer.responses[0].partitions[0].high_watermark == 1


@pytest.mark.parametrize(
    ("count", "size", "min_bytes", "max_bytes"),
    [
        (16, 250_000, 4_000_000, 50_000_000),
        (16, 250_000, 2_000_000, 50_000_000),
        (6, 250_000, 1_500_000, 4_000_000),
        (3, 700_000, 1_500_000, 4_000_000),
        (5, 262_000, 1 << 20, 4_000_000),
        (5, 250_000, 500_000, 4_000_000),
        (4, 250_000, 2_000_000, 1_000_000),
    ],
)
@run_by(with_cluster)
async def test_a_fetch_with_large_min_bytes_is_answered_at_once_if_they_exist(
    cluster: VirtualCluster, world: VirtualWorld, /, count: int, size: int, min_bytes: int, max_bytes: int
) -> None:
    """The answers together contain all records except a remainder of less than `min_bytes`."""
    wait_ms = 5_000

    connection = await to_leader(cluster, world)
    for _ in range(count):
        answer = await connection.request(data.PRODUCE, 9, produce(batch(bytes(size))))
        assert answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    began_s, offset = world.clock.monotonic(), 0
    while (left := count - offset) == count or left * size >= min(min_bytes, max_bytes):
        asked = m.FetchPartition(0, -1, offset, -1, -1, 50_000_000)
        topic = m.FetchTopic(ORDERS, "", [asked])
        answer = await connection.request(data.FETCH, 12, m.FetchRequest(-1, wait_ms, min_bytes, max_bytes, 0, [topic]))
        offset += sum(1 for _ in iterate_batches(answer.responses[0].partitions[0].records))
    assert world.clock.monotonic() - began_s < 1
    assert min_bytes > max_bytes or (count - offset) * size < min(min_bytes, 4 * size)


@run_by(with_cluster, brokers=1)
async def test_large_records_keep_their_place_among_small_ones(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    """Large records are not copied into the answer, but sent between its parts."""
    sizes = [100, 30_000, 5, 200_000, 70_000]

    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("sized", partitions=len(sizes), replication_factor=1)
    connection = await connect(world.network, host_name(0), PORT)
    values = [bytes([index]) * size for index, size in enumerate(sizes)]
    for index, value in enumerate(values):
        request = m.ProduceRequest(None, 1, 5_000, [m.ProduceTopic("sized", [m.ProducePartition(index, batch(value))])])
        async with asyncio.timeout(5):  # until the broker leads
            while True:
                answer = await connection.request(data.PRODUCE, 9, request)
                if answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE:
                    break
                await asyncio.sleep(0.1)
    asked = [m.FetchPartition(index, -1, 0, -1, -1, 1_000_000) for index in range(len(sizes))]
    for version in (4, 12):
        wanted = m.FetchRequest(-1, 0, 1, 1_000_000, 0, [m.FetchTopic("sized", "", asked)])
        connection.send(data.FETCH, version, wanted)
        connection.send(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())
        _, answer = await connection.answer(data.FETCH, version)
        read = {part.partition_index: part.records for part in answer.responses[0].partitions}
        assert {index: decode_batch(records).values for index, records in read.items()} == {
            index: [value] for index, value in enumerate(values)
        }
        _, answer = await connection.answer(metadata.API_VERSIONS, 0)
        assert answer.error_code == ErrorCode.NONE


@run_by(with_cluster)
async def test_batches_in_flight_together_are_replicated_together_and_answered_in_order(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    await connection.request(data.PRODUCE, 9, produce(batch(b"first")))
    began_s = world.clock.monotonic()
    await connection.request(data.PRODUCE, 9, produce(batch(b"alone")))
    alone_s = world.clock.monotonic() - began_s
    began_s = world.clock.monotonic()
    sent = [connection.send(data.PRODUCE, 9, produce(batch(b"%d" % number))) for number in range(20)]
    answers = [await connection.answer(data.PRODUCE, 9) for _ in sent]
    assert world.clock.monotonic() - began_s < 10 * alone_s
    assert [correlation_id for correlation_id, _ in answers] == sent
    offsets = [answer.responses[0].partition_responses[0].base_offset for _, answer in answers]
    assert offsets == list(range(2, 22))


@pytest.mark.parametrize("api", [data.LIST_OFFSETS, data.FETCH], ids=lambda api: api.name)
@run_by(with_cluster)
async def test_a_request_sent_after_a_batch_is_answered_from_a_log_that_has_it(
    cluster: VirtualCluster, world: VirtualWorld, /, api: KafkaApi
) -> None:
    """Kafka handles the requests of a connection one after the other."""
    latest = m.ListOffsetsTopic(ORDERS, [m.ListOffsetsPartition(0, -1, m.LATEST_TIMESTAMP)])

    connection = await to_leader(cluster, world)
    await connection.request(data.PRODUCE, 9, produce(batch(b"a")))
    connection.send(data.PRODUCE, 9, produce(batch(b"b")))
    connection.send(api, 5, m.ListOffsetsRequest(-1, 0, [latest]) if api is data.LIST_OFFSETS else fetch(1))
    await connection.answer(data.PRODUCE, 9)
    _, answer = await connection.answer(api, 5)
    if api is data.LIST_OFFSETS:
        assert answer.topics[0].partitions[0].offset == 2
    else:
        assert decode_batch(answer.responses[0].partitions[0].records).values == [b"b"]


@run_by(with_cluster)
async def test_a_failure_with_acks_0_closes_the_connection(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await to_leader(cluster, world)
    connection.send(data.PRODUCE, 9, produce(batch(b"a"), acks=0, topic="nobody-has-it"))
    await asyncio.wait_for(connection.closed.wait(), 5)
    assert connection.frames.empty()


@run_by(with_cluster)
async def test_an_error_is_where_clients_of_kafka_look_for_it(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await to_leader(cluster, world)
    twice = produce(batch(b"a"))
    twice.topic_data.append(twice.topic_data[0])
    part = (await connection.request(data.PRODUCE, 9, twice)).responses[0].partition_responses[0]
    assert part.error_code == ErrorCode.INVALID_REQUEST
    assert "twice" in part.error_message
    answer = await connection.request(data.PRODUCE, 9, produce(memoryview(b"")))
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.INVALID_RECORD
    for version in (4, 12, 14, 15, 17):
        answer = await connection.request(data.FETCH, version, fetch(replica_id=2))
        assert answer.responses[0].partitions[0].error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    answer = await connection.request(data.FETCH, 11, fetch(topic="nobody-has-it"))
    assert answer.error_code == ErrorCode.NONE
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    topics = [m.ListOffsetsTopic(ORDERS, [m.ListOffsetsPartition(0, 99, -1)])]
    answer = await connection.request(data.LIST_OFFSETS, 7, m.ListOffsetsRequest(-1, 0, topics))
    assert answer.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


@run_by(with_cluster)
async def test_a_transactional_producer_finds_its_coordinator_and_gets_an_epoch(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    request = wire(metadata.FIND_COORDINATOR, key="etl", key_type=1, coordinator_keys=["etl"])
    found = await connection.request(metadata.FIND_COORDINATOR, 1, request)
    while found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:  # the topic is being created
        await asyncio.sleep(0.1)
        found = await connection.request(metadata.FIND_COORDINATOR, 1, request)
    assert found.error_code == ErrorCode.NONE
    [same] = (await connection.request(metadata.FIND_COORDINATOR, 4, request)).coordinators
    assert (same.error_code, same.node_id, same.host) == (ErrorCode.NONE, found.node_id, found.host)
    others = await connect(world.network, host_name((found.node_id + 1) % 3), PORT)
    refused = await others.request(data.INIT_PRODUCER_ID, 4, m.InitProducerIdRequest("etl"))
    assert refused.error_code == ErrorCode.NOT_COORDINATOR
    coordinator = await connect(world.network, found.host, found.port)
    epochs: list[int] = []
    while len(epochs) < 2:
        answer = await coordinator.request(data.INIT_PRODUCER_ID, 4, m.InitProducerIdRequest("etl"))
        if answer.error_code == ErrorCode.NONE:
            epochs.append(answer.producer_epoch)
        else:
            assert answer.error_code in (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS)
            await asyncio.sleep(0.1)
    assert epochs == [0, 1]
    for version, fenced in ((1, ErrorCode.INVALID_PRODUCER_EPOCH), (5, ErrorCode.PRODUCER_FENCED)):
        end = t.EndTxnRequest("etl", answer.producer_id, 0, True)
        ended = await coordinator.request(transactions.END_TXN, version, end)
        assert ended.error_code == fenced


async def id_of_orders(connection: KafkaConnection) -> str:
    return str((await connection.request(metadata.METADATA, 12, about(ORDERS))).topics[0].topic_id)


@pytest.mark.parametrize("version", [13, 15, 17])
@run_by(with_cluster)
async def test_a_fetch_by_topic_id_reports_unknown_ids_at_once(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    unknown = make(9, 9, b"nobody")

    connection = await to_leader(cluster, world)
    known = await id_of_orders(connection)
    await connection.request(data.PRODUCE, 11, produce(batch(b"a")))
    waits = connection.send(data.FETCH, version, fetch(1, max_wait_ms=20_000, topic_ids=[unknown, known]))
    answered, answer = await connection.answer(data.FETCH, version, timeout_s=1)
    assert answered == waits
    codes = {topic.topic_id: topic.partitions[0].error_code for topic in answer.responses}
    assert codes == {unknown: ErrorCode.UNKNOWN_TOPIC_ID, known: ErrorCode.NONE}
    answer = await connection.request(data.FETCH, version, fetch(topic_ids=[known]))
    assert [topic.topic_id for topic in answer.responses] == [known]
    records = answer.responses[0].partitions[0].records
    assert decode_batch(records, parse_header(records)).values == [b"a"]
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.delete_topic(ORDERS)
        await admin.create_topic(ORDERS, partitions=1, replication_factor=3)
    answer = await connection.request(data.FETCH, version, fetch(topic_ids=[known]))
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize(
    ("api", "version"), [(data.PRODUCE, 9), (data.PRODUCE, 10), (data.FETCH, 15), (data.FETCH, 16)]
)
@run_by(with_cluster)
async def test_a_follower_names_the_leader_in_its_refusal(
    cluster: VirtualCluster, world: VirtualWorld, /, api: KafkaApi, version: int
) -> None:
    leader, others, connections = await of_leader_and_others(cluster, world)
    connection = connections[min(others)]
    known = await id_of_orders(connection)
    asked = produce(batch(b"a")) if api is data.PRODUCE else fetch(topic_ids=[known])
    connection.send(api, version, asked)
    frame = await connection.frames.get()
    answer = THEIRS[api.key, "response"].decode(bytes(frame)[5:], version=version)
    [of_topic] = answer.responses
    [told] = of_topic.partition_responses if api is data.PRODUCE else of_topic.partitions
    assert told.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    if version == 9:
        return
    epoch = cluster.state(TopicPartition(ORDERS, 0)).leader_epoch
    assert (told.current_leader.leader_id, told.current_leader.leader_epoch) == (leader, epoch)
    endpoints = [(node.node_id, node.host, node.port) for node in answer.node_endpoints or ()]
    assert endpoints == ([] if version == 15 else [(leader, host_name(leader), PORT)])


@pytest.mark.parametrize("version", range(7))
@run_by(with_cluster)
async def test_a_group_has_a_coordinator_and_a_producer_an_id(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    request = wire(metadata.FIND_COORDINATOR, key="group", key_type=0, coordinator_keys=["group"])
    while True:
        answer = await connection.request(metadata.FIND_COORDINATOR, version, request)
        coordinator = answer.coordinators[0] if version >= 4 else answer
        if coordinator.error_code != ErrorCode.COORDINATOR_NOT_AVAILABLE:
            break
        await asyncio.sleep(0.1)
    assert (coordinator.error_code, coordinator.port) == (ErrorCode.NONE, PORT)
    assert coordinator.host == host_name(coordinator.node_id)
    answers = [
        await connection.request(data.INIT_PRODUCER_ID, min(version, 5), m.InitProducerIdRequest(None))
        for _ in range(2)
    ]
    assert {answer.error_code for answer in answers} == {ErrorCode.NONE}
    assert answers[0].producer_id != answers[1].producer_id


@pytest.mark.parametrize("version", range(13))
@run_by(with_cluster)
async def test_metadata_describes_brokers_topics_and_partitions(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    everything = wire(metadata.METADATA, topics=None if version else [], allow_auto_topic_creation=False)
    answer = await connection.request(metadata.METADATA, version, everything)
    assert {broker.node_id for broker in answer.brokers} == set(cluster.broker_ids)
    assert ORDERS in {topic.name for topic in answer.topics}
    answer = await connection.request(metadata.METADATA, version, about(ORDERS, "nobody-has-it"))
    codes = {topic.name: topic.error_code for topic in answer.topics}
    assert codes == {ORDERS: ErrorCode.NONE, "nobody-has-it": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


@run_by(with_cluster)
async def test_a_killed_broker_stays_in_metadata_until_clients_have_the_new_leader(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """librdkafka drops a broker that metadata does not name, together with the partitions that it is just moving off
    it."""

    connections = {id: await connect(world.network, host_name(id), PORT) for id in cluster.broker_ids}

    async def named_and_leader(asked: int) -> tuple[set[int], int]:
        answer = await connections[asked].request(metadata.METADATA, 12, about(ORDERS))
        return {broker.node_id for broker in answer.brokers}, answer.topics[0].partitions[0].leader_id

    async with asyncio.timeout(30):
        while (leader := (await named_and_leader(1))[1]) == NO_LEADER:
            await asyncio.sleep(0.01)
        cluster.kill_broker(leader)
        others = set(cluster.broker_ids) - {leader}
        for asked in others:
            while (found := await named_and_leader(asked))[1] not in others:
                await asyncio.sleep(0.01)
            assert found[0] == {leader, *others}
        for asked in others:
            while (await named_and_leader(asked))[0] != others:
                await asyncio.sleep(0.1)


@run_by(with_cluster)
async def test_a_metadata_request_right_after_the_loss_of_a_leader_names_its_successor(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """librdkafka asks once, in that millisecond, and then waits up to a second."""
    await lead_apart_from_the_controller(cluster, world)
    leader, others, connections = await of_leader_and_others(cluster, world)
    cluster.kill_broker(leader)

    async def ask(asked: int) -> None:
        await cluster.until(lambda: lost(cluster, asked) == {leader})
        began_s = world.clock.monotonic()
        connections[asked].send(metadata.METADATA, 12, about(ORDERS))
        produced = connections[asked].send(data.PRODUCE, 9, produce(batch(b"a")))
        _, answer = await connections[asked].answer(metadata.METADATA, 12)
        assert answer.topics[0].partitions[0].leader_id in others
        assert world.clock.monotonic() - began_s < KafkaDialect.election_wait_ms / 1_000
        assert (await connections[asked].answer(data.PRODUCE, 9))[0] == produced
        await cluster.until(lambda: not lost(cluster, asked))

    await asyncio.gather(*map(ask, others))


@run_by(with_cluster)
async def test_a_metadata_request_between_leader_and_isr_and_update_metadata_names_the_successor(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """A follower that has been told of its new leader has ended the fetcher of the dead one."""
    await lead_apart_from_the_controller(cluster, world)
    leader, others, connections = await of_leader_and_others(cluster, world)
    followed = TopicPartition(ORDERS, 0)
    cluster.kill_broker(leader)
    controller = cluster.active_controllers()[0]
    fetchers = replicas_of(cluster, controller).fetchers
    address = fetchers._fetchers[leader].address

    def is_told_by_leader_and_isr_alone() -> bool:
        described = cluster.broker(controller)._metadata.partition(followed)
        return described is not None and described.leader == leader and not fetchers.follows(followed, leader, address)

    await until(is_told_by_leader_and_isr_alone, every_s=0.000_05)
    assert lost(cluster, controller) == {leader}
    found = (await connections[controller].request(metadata.METADATA, 12, about(ORDERS))).topics[0].partitions[0]
    assert found.leader_id in others


@run_by(with_cluster)
async def test_a_metadata_request_after_the_controller_died_with_the_leader_names_the_successor(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """The new controller's first news are that the leader is gone; its elections follow."""
    await lead_at_the_controller(cluster, world)
    leader, others, connections = await of_leader_and_others(cluster, world)
    cluster.kill_broker(leader)
    asked = min(others)
    await cluster.until(lambda: leader not in cluster.broker(asked)._metadata._brokers)
    found = (await connections[asked].request(metadata.METADATA, 12, about(ORDERS))).topics[0].partitions[0]
    assert found.leader_id in others


@run_by(with_cluster)
async def test_without_an_electable_replica_kafka_clients_wait_a_second_and_native_ones_ask_on(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, others, connections = await of_leader_and_others(cluster, world)
    cluster.simulation.zookeeper.stop()
    cluster.kill_broker(leader)
    asked = min(others)
    await cluster.until(lambda: lost(cluster, asked) == {leader})
    native = await open_connection(world.network, host_name(asked), PORT, client_id="test", timeout_s=5)
    began_s = world.clock.monotonic()
    answer = await native.send(apis.METADATA, m.MetadataRequest([ORDERS], False), timeout_s=5)
    assert answer.topics[0].partitions[0].leader_id == leader
    waited_s = world.clock.monotonic() - began_s
    assert 0 <= waited_s - NativeDialect.election_wait_ms / 1_000 < 0.05
    began_s = world.clock.monotonic()
    found = (await connections[asked].request(metadata.METADATA, 12, about(ORDERS))).topics[0].partitions[0]
    assert (found.error_code, found.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, NO_LEADER)
    assert world.clock.monotonic() - began_s >= KafkaDialect.election_wait_ms / 1_000
    async with asyncio.timeout(2):
        while found.leader_id == NO_LEADER:
            answer = await connections[asked].request(metadata.METADATA, 12, about(ORDERS))
            found = answer.topics[0].partitions[0]
    assert found.leader_id == leader, "this broker alone may have lost it"
    native.close()


@run_by(with_cluster)
async def test_a_leader_whose_connection_breaks_and_is_restored_is_named_at_once(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, others, connections = await of_leader_and_others(cluster, world)
    asked = min(others)
    await asyncio.sleep(3)  # nothing is in flight: a fetch waits at the leader
    assert cluster.simulation.network.reset(host_name(asked), host_name(leader))
    await cluster.until(lambda: lost(cluster, asked) == {leader})
    began_s = world.clock.monotonic()
    answer = await connections[asked].request(metadata.METADATA, 12, about(ORDERS))
    assert answer.topics[0].partitions[0].leader_id == leader
    assert world.clock.monotonic() - began_s < 0.05


@run_by(with_cluster)
async def test_a_broker_that_no_longer_follows_a_leader_does_not_consider_it_lost(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, others, connections = await of_leader_and_others(cluster, world)
    asked = min(others)
    replicas = replicas_of(cluster, asked)
    replica = replicas.partitions.get(TopicPartition(ORDERS, 0))
    assert replica is not None
    await cluster.until(lambda: not replica.is_leader and asked in replica.isr)
    replicas.lifecycle.set_aside(replica, "its log does not fit")
    await asyncio.sleep(1)
    assert cluster.simulation.network.reset(host_name(asked), host_name(leader))
    for _ in range(3):
        began_s = world.clock.monotonic()
        answer = await connections[asked].request(metadata.METADATA, 12, about(ORDERS))
        assert answer.topics[0].partitions[0].leader_id == leader
        assert world.clock.monotonic() - began_s < 0.05
        await asyncio.sleep(1)


def lost(cluster: VirtualCluster, broker_id: int) -> set[int]:
    replicas = replicas_of(cluster, broker_id)
    return replicas.fetchers.lost_leaders()


async def lead_apart_from_the_controller(cluster: VirtualCluster, world: VirtualWorld) -> None:
    """Have the partition led by another broker than the controller's, so that an election after the loss of its leader
    need not wait for a new controller."""
    await lead_in_order(cluster, world, lambda controller: [*(set(cluster.broker_ids) - {controller}), controller])


async def lead_at_the_controller(cluster: VirtualCluster, world: VirtualWorld) -> None:
    await lead_in_order(cluster, world, lambda controller: [controller, *(set(cluster.broker_ids) - {controller})])


async def lead_in_order(cluster: VirtualCluster, world: VirtualWorld, ordered: Callable[[int], list[int]]) -> None:
    partition = TopicPartition(ORDERS, 0)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await cluster.until(lambda: len(cluster.active_controllers()) == 1)
        replicas = ordered(*cluster.active_controllers())
        await admin.alter_partition_reassignments({partition: replicas})
        await cluster.until(lambda: set(cluster.state(partition).isr) == set(replicas))
        await admin.elect_leaders("preferred", [partition])
        await cluster.until(
            lambda: all(
                replica_of(cluster, broker_id, partition).leader_id == replicas[0] for broker_id in cluster.broker_ids
            )
        )


async def of_leader_and_others(
    cluster: VirtualCluster, world: VirtualWorld
) -> tuple[int, set[int], dict[int, KafkaConnection]]:
    """Return the leader of the partition, the other brokers, and a connection to each broker."""
    connections = {id: await connect(world.network, host_name(id), PORT) for id in cluster.broker_ids}
    while True:
        answer = await connections[1].request(metadata.METADATA, 12, about(ORDERS))
        leader = answer.topics[0].partitions[0].leader_id
        if leader != NO_LEADER:
            return leader, set(cluster.broker_ids) - {leader}, connections
        await asyncio.sleep(0.1)


async def started_without_news(cluster: VirtualCluster) -> tuple[int, VirtualSession]:
    """Start a broker anew that no other can reach, and which cannot be elected as the controller. Return its id and its
    session of ZooKeeper, which is suspended."""
    [controller] = cluster.active_controllers()
    broker_id = min(set(cluster.broker_ids) - {controller})
    cluster.kill_broker(broker_id)
    for other in set(cluster.broker_ids) - {broker_id}:
        cluster.simulation.network.block(host_name(other), host_name(broker_id))
        cluster.simulation.network.block(host_name(broker_id), host_name(other))
    await cluster.start_broker(broker_id)
    session = session_of(cluster, broker_id)
    session.suspend()
    return broker_id, session


def every_topic() -> Any:
    return wire(metadata.METADATA, topics=None, allow_auto_topic_creation=False)


@run_by(with_cluster)
async def test_a_broker_without_news_of_the_cluster_answers_when_they_arrive(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """librdkafka 2.10 and later drops all brokers, with its last connection, after an answer that names none."""
    broker_id, session = await started_without_news(cluster)
    requests = [(metadata.METADATA, 12, about(ORDERS)), (metadata.METADATA, 12, every_topic())]
    requests += [(metadata.DESCRIBE_CLUSTER, 0, wire(metadata.DESCRIBE_CLUSTER))]
    asked = [
        (api, version, connection, connection.send(api, version, request))
        for api, version, request in requests
        for connection in [await connect(world.network, host_name(broker_id), PORT)]
    ]
    await asyncio.sleep(FIRST_NEWS_MS / 2_000)
    assert all(connection.frames.empty() for _, _, connection, _ in asked)
    cluster.simulation.network.heal()
    session.resume()
    for api, version, connection, sent in asked:
        correlation_id, answer = await connection.answer(api, version)
        assert correlation_id == sent
        field = "broker_id" if api is metadata.DESCRIBE_CLUSTER else "node_id"
        assert broker_id in {getattr(broker, field) for broker in answer.brokers}
        assert answer.controller_id in cluster.broker_ids


@run_by(with_cluster)
async def test_a_broker_that_hears_nothing_of_the_cluster_sends_kafka_clients_away(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    broker_id, _ = await started_without_news(cluster)
    connection = await connect(world.network, host_name(broker_id), PORT)
    began_s = world.clock.monotonic()
    connection.send(metadata.METADATA, 12, about(ORDERS))
    await connection.closed.wait()
    assert connection.frames.empty()
    assert world.clock.monotonic() - began_s >= FIRST_NEWS_MS / 1_000


@run_by(with_cluster)
async def test_a_topic_is_found_by_its_id(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    cls: Any = metadata.METADATA.request.fields[0].type.of.cls  # type: ignore[attr-defined]
    [topic] = (await connection.request(metadata.METADATA, 12, about(ORDERS))).topics
    by_id = [cls(topic.topic_id, None), cls("B" * 21 + "A", None)]
    request = wire(metadata.METADATA, topics=by_id, allow_auto_topic_creation=True)
    answer = await connection.request(metadata.METADATA, 12, request)
    assert [each.error_code for each in answer.topics] == [ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_ID]
    assert answer.topics[0].name == ORDERS


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_topic_is_created_automatically_if_broker_and_client_allow_it(is_enabled: bool) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        for broker_id in cluster.broker_ids:  # as the controller, and as another broker
            name = f"new-{broker_id}"
            connection = await connect(world.network, host_name(broker_id), PORT)
            for _ in range(10):
                [topic] = (await connection.request(metadata.METADATA, 9, about(name))).topics
                assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                await asyncio.sleep(0.2)
            codes = []
            for _ in range(50):
                [topic] = (await connection.request(metadata.METADATA, 9, about(name, creates=True))).topics
                codes.append(topic.error_code)
                await asyncio.sleep(0.2)
            if is_enabled:
                assert codes[0] == ErrorCode.LEADER_NOT_AVAILABLE
                assert codes[-1] == ErrorCode.NONE
                assert len(topic.partitions) == 4
            else:
                assert set(codes) == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
            [topic] = (await connection.request(metadata.METADATA, 9, about("__consumer.offsets", creates=True))).topics
            assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the name collides with an internal topic"
            [topic] = (await connection.request(metadata.METADATA, 9, about("no/name", creates=True))).topics
            assert topic.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION

    with_cluster(program, {"auto.create.topics.enable": str(is_enabled).lower(), "num.partitions": "4"})


@run_by(with_cluster, settings={"auto.create.topics.enable": "true"})
async def test_native_clients_create_no_topic_by_asking_for_it(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    async with Producer(cluster.bootstrap, world=world, delivery_timeout_ms=3_000) as producer:
        with pytest.raises(Exception, match="UNKNOWN_TOPIC_OR_PARTITION|metadata"):
            await producer.send("nobody-has-it", b"")


@run_by(with_cluster)
async def test_a_kafka_producer_continues_in_a_log_that_does_not_know_it(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """aiokafka's producer would be refused for ever; a native one renumbers its records."""

    connection = await to_leader(cluster, world)

    async def answer(sequence: int, magic: int) -> m.ProducePartitionResponse:
        records = encode_batch(
            [b"late"], base_timestamp=1_000, magic=magic, producer_id=7, producer_epoch=0, base_sequence=sequence
        )
        answer = await connection.request(data.PRODUCE, 9, produce(memoryview(records)))
        [part] = answer.responses[0].partition_responses
        return part  # type: ignore[no-any-return]

    assert (await answer(3, MAGIC_COLUMNS)).error_code == ErrorCode.UNKNOWN_PRODUCER_ID
    first = await answer(3, MAGIC_RECORDS)
    again = await answer(3, MAGIC_RECORDS)
    assert [(part.error_code, part.base_offset) for part in (first, again)] == [(ErrorCode.NONE, 0)] * 2
    gap = await answer(5, MAGIC_RECORDS)
    assert (gap.error_code, gap.log_start_offset) == (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0)


@run_by(with_cluster, configs={"compression.type": "zstd"})
async def test_a_client_older_than_zstd_is_refused_records_compressed_with_it(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    await connection.request(data.PRODUCE, 9, produce(batch(b"x")))
    old = await connection.request(data.FETCH, 9, fetch())
    assert old.responses[0].partitions[0].error_code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    new = await connection.request(data.FETCH, 10, fetch())
    [(header, _, _)] = iterate_batches(new.responses[0].partitions[0].records)
    assert header.compression is Compression.ZSTD


@run_by(with_cluster)
async def test_produce_versions_older_than_zstd_refuse_it(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await to_leader(cluster, world)
    codes = {}
    for version in (3, 6, 7, 9):
        for codec in (Compression.ZSTD, Compression.GZIP):
            sent = encode_batch([b"a" * 100], base_timestamp=1_000, magic=MAGIC_RECORDS, compression=codec)
            answer = await connection.request(data.PRODUCE, version, produce(memoryview(sent)))
            codes[version, codec] = answer.responses[0].partition_responses[0].error_code
    assert {key for key, code in codes.items() if code} == {(3, Compression.ZSTD), (6, Compression.ZSTD)}
    assert codes[3, Compression.ZSTD] == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


@pytest.mark.slow
@pytest.mark.parametrize("last", [MAGIC_RECORDS, MAGIC_COLUMNS])
@run_by(with_cluster)
async def test_a_fetch_of_very_many_batches_returns_only_records(
    cluster: VirtualCluster, world: VirtualWorld, /, last: int
) -> None:
    """The broker searches such a range for columns in slices."""
    count = 5_000

    connection = await to_leader(cluster, world)
    one = bytes(batch(b"a"))
    written = one * count + bytes(encode_batch([b"z"], base_timestamp=1_000, magic=last))
    with patch("minibroker.broker.handlers.produce.check_one_batch"):  # thousands of requests would take long
        answer = await connection.request(data.PRODUCE, 9, produce(memoryview(written)))
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    answer = await connection.request(data.FETCH, 11, fetch())
    [part] = answer.responses[0].partitions
    found = list(iterate_batches(part.records))
    assert [header.base_offset for header, _, _ in found] == list(range(count + 1))
    assert {header.magic for header, _, _ in found} == {MAGIC_RECORDS}


@run_by(with_cluster, configs={"record.format": "kafka"})
async def test_an_unknown_native_producer_must_begin_with_0_even_if_its_records_are_transcoded(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Otherwise it would not learn of records that were lost before."""

    connection = await to_leader(cluster, world)
    codes = []
    for sequence in (3, 0, 1):
        sent = encode_batch([b"a"], base_timestamp=1_000, producer_id=7, producer_epoch=0, base_sequence=sequence)
        answer = await connection.request(data.PRODUCE, 9, produce(memoryview(sent)))
        codes.append(answer.responses[0].partition_responses[0].error_code)
    assert codes == [ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.NONE, ErrorCode.NONE]


def of_producer(sequence: int, count: int) -> bytearray:
    return encode_batch(
        [b"v"] * count,
        keys=[b"k"] * count,
        base_timestamp=1_000,
        magic=MAGIC_RECORDS,
        producer_id=7,
        producer_epoch=0,
        base_sequence=sequence,
    )


async def codes_of(connection: KafkaConnection, answers: int) -> list[int]:
    """Return the error codes of answers to requests with one partition each."""
    told = [(await connection.answer(data.PRODUCE, 9))[1] for _ in range(answers)]
    return [answer.responses[0].partition_responses[0].error_code for answer in told]


@pytest.mark.parametrize("count", [2, 2_000])
@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_no_later_batch_overtakes_a_damaged_one_whatever_its_size(
    cluster: VirtualCluster, world: VirtualWorld, /, count: int
) -> None:
    """Large batches for a compacted topic are checked in a thread."""

    connection = await to_leader(cluster, world)
    first, second = of_producer(5, count), of_producer(5 + count, 1)
    damaged = bytearray(first)
    damaged[-1] ^= 1
    codes = []
    for together in ([damaged, second], [first, second]):
        for records in together:
            connection.send(data.PRODUCE, 9, produce(memoryview(records)))
        codes += await codes_of(connection, len(together))
    assert codes == [
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.NONE,
        ErrorCode.NONE,
    ]


def keyed(value: bytes, magic: int = MAGIC_RECORDS, count: int = 2_000) -> memoryview:
    return memoryview(encode_batch([value] * count, keys=[b"k"] * count, base_timestamp=1_000, magic=magic))


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_a_batch_checked_while_its_topic_changes_to_record_format_becomes_records(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, _, _ = await of_leader_and_others(cluster, world)
    replicas = replicas_of(cluster, leader)
    native = await open_connection(world.network, host_name(leader), PORT, client_id="test", timeout_s=5)
    await replicas.appender._check_turns.acquire()  # another producer's batch is being checked
    producing = native.send(apis.PRODUCE, produce(keyed(b"v", MAGIC_COLUMNS)), timeout_s=60)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.incremental_alter_configs(
            {ConfigResource.of_topic(ORDERS): [ConfigChange.set("record.format", "kafka")]}
        )
    await cluster.until(lambda: not replicas.partitions.require(TopicPartition(ORDERS, 0)).log.config.columns)
    replicas.appender._check_turns.release()
    assert not (await producing).responses[0].partition_responses[0].error_code
    answer = await native.send(apis.FETCH, fetch(0), timeout_s=5)
    batches = list(iterate_batches(answer.responses[0].partitions[0].records))
    assert [header.magic for header, _, _ in batches] == [MAGIC_RECORDS]
    native.close()


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_a_batch_whose_producer_has_left_before_its_turn_is_neither_checked_nor_appended(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Its producer retries it. If the abandoned request were handled as well, the queue would grow without end."""

    leader, _, _ = await of_leader_and_others(cluster, world)
    replicas = replicas_of(cluster, leader)
    await replicas.appender._check_turns.acquire()
    producers = [await connect(world.network, host_name(leader), PORT) for _ in range(3)]
    for number, producer in enumerate(producers):
        producer.send(data.PRODUCE, 9, produce(keyed(b"%d" % number)))
    await asyncio.sleep(0.1)
    producers[1].close()
    await asyncio.sleep(0.1)
    replicas.appender._check_turns.release()
    for number in (0, 2):
        _, answer = await producers[number].answer(data.PRODUCE, 9)
        assert not answer.responses[0].partition_responses[0].error_code
    answer = await producers[0].request(data.FETCH, 12, fetch(0))
    values = [
        decode_batch(answer.responses[0].partitions[0].records[start:end], header).values[0]
        for header, start, end in iterate_batches(answer.responses[0].partitions[0].records)
    ]
    assert set(values) == {b"0", b"2"}

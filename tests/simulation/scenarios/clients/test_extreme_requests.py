"""A request from any client is answered, and harms no broker, whatever numbers it contains."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api, Plane
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import ResourceType, TopicPartition
from minibroker.protocol.records import encode_batch
from tests.running import run_by

TOPIC = "orders"
RECORDS = 30
ANSWERED_WITHIN_S = 20
HARMLESS: list[tuple[Api[Any, Any], m.Message]] = [
    (
        apis.PRODUCE,
        m.ProduceRequest(
            None,
            -1,
            500,
            [m.ProduceTopic(TOPIC, [m.ProducePartition(0, memoryview(encode_batch([b"v"], base_timestamp=1)))])],
        ),
    ),
    (
        apis.FETCH,
        m.FetchRequest(-1, 500, 1, 10_000, 0, [m.FetchTopic(TOPIC, "", [m.FetchPartition(0, -1, 5, -1, -1, 200)])]),
    ),
    (apis.LIST_OFFSETS, m.ListOffsetsRequest(-1, 0, [m.ListOffsetsTopic(TOPIC, [m.ListOffsetsPartition(0, -1, 5)])])),
    (apis.METADATA, m.MetadataRequest(None)),
    (apis.API_VERSIONS, m.ApiVersionsRequest("test", "1")),
    (
        apis.CREATE_TOPICS,
        m.CreateTopicsRequest(
            [
                m.CreatableTopic("new", 1, 1),
                m.CreatableTopic("assigned", assignments=[m.CreatableAssignment(0, [0, 1])]),
            ],
            500,
            validate_only=True,
        ),
    ),
    (apis.DELETE_TOPICS, m.DeleteTopicsRequest(["none"], 500)),
    (
        apis.CREATE_PARTITIONS,
        m.CreatePartitionsRequest(
            [m.CreatePartitionsTopic(TOPIC, 2, [m.CreatePartitionsAssignment([0, 1, 2])], "", 0)], 500
        ),
    ),
    (apis.DELETE_RECORDS, m.DeleteRecordsRequest([m.DeleteRecordsTopic(TOPIC, [m.DeleteRecordsPartition(0, 0)])], 500)),
    (apis.INIT_PRODUCER_ID, m.InitProducerIdRequest(None)),
    (
        apis.OFFSET_FOR_LEADER_EPOCH,
        m.OffsetForLeaderEpochRequest(-1, [m.OffsetForLeaderTopic(TOPIC, [m.OffsetForLeaderPartition(0, -1, 0)])]),
    ),
    (
        apis.ALTER_REPLICA_LOG_DIRS,
        m.AlterReplicaLogDirsRequest([m.AlterReplicaLogDir("/none", [m.AlterReplicaLogDirTopic(TOPIC, [0])])]),
    ),
    (apis.DESCRIBE_LOG_DIRS, m.DescribeLogDirsRequest([m.DescribableLogDirTopic(TOPIC, [0])])),
    (apis.ELECT_LEADERS, m.ElectLeadersRequest(0, [m.ElectLeadersTopic(TOPIC, [0])], 500)),
    (apis.DESCRIBE_CONFIGS, m.DescribeConfigsRequest([m.DescribeConfigsResource(ResourceType.TOPIC, TOPIC)])),
    (
        apis.INCREMENTAL_ALTER_CONFIGS,
        m.IncrementalAlterConfigsRequest(
            [m.AlterConfigsResource(ResourceType.TOPIC, TOPIC, [m.AlterableConfig("retention.ms", 0, "-1")])],
            validate_only=True,
        ),
    ),
    (
        apis.ALTER_CONFIGS,
        m.AlterConfigsRequest(
            [m.ReplacedConfigs(ResourceType.TOPIC, TOPIC, [m.CreatableConfig("retention.ms", "-1")])],
            validate_only=True,
        ),
    ),
    (apis.DESCRIBE_ACLS, m.DescribeAclsRequest(1, None, None, None, 1, 1)),
    (apis.CREATE_ACLS, m.CreateAclsRequest([])),
    (apis.DELETE_ACLS, m.DeleteAclsRequest([])),
    (apis.DESCRIBE_CLIENT_QUOTAS, m.DescribeClientQuotasRequest([], False)),
    (
        apis.ALTER_CLIENT_QUOTAS,
        m.AlterClientQuotasRequest(
            [m.AlteredQuotas([m.QuotaEntityPart("client-id", "a")], [m.QuotaChange("producer_byte_rate", 1.0, True)])],
            validate_only=True,
        ),
    ),
    (apis.DESCRIBE_CLUSTER, m.DescribeClusterRequest()),
    (apis.DESCRIBE_PRODUCERS, m.DescribeProducersRequest([m.DescribeProducersTopic(TOPIC, [0])])),
    (
        apis.ALTER_PARTITION_REASSIGNMENTS,
        m.AlterPartitionReassignmentsRequest(
            500, [m.ReassignableTopic(TOPIC, [m.ReassignablePartition(0, [0, 1, 2]), m.ReassignablePartition(1)])]
        ),
    ),
    (
        apis.LIST_PARTITION_REASSIGNMENTS,
        m.ListPartitionReassignmentsRequest(500, [m.ListPartitionReassignmentsTopic(TOPIC, [0])]),
    ),
    (
        apis.ADD_PARTITIONS_TO_TXN,
        t.AddPartitionsToTxnRequest([t.TransactionToExtend("etl", 5, 0, [t.TransactionTopic(TOPIC, [0])], True)]),
    ),
    (apis.ADD_OFFSETS_TO_TXN, t.AddOffsetsToTxnRequest("etl", 5, 0, "billing")),
    (apis.END_TXN, t.EndTxnRequest("etl", 5, 0, False)),
    (
        apis.WRITE_TXN_MARKERS,
        t.WriteTxnMarkersRequest([t.TransactionMarker(5, 0, False, 0, [t.TransactionTopic(TOPIC, [0])])]),
    ),
    (
        apis.TXN_OFFSET_COMMIT,
        t.TxnOffsetCommitRequest(
            "etl", "billing", 5, 0, [t.TxnOffsetCommitTopic(TOPIC, [t.TxnOffsetCommitPartition(0, 5)])]
        ),
    ),
    (apis.DESCRIBE_TRANSACTIONS, t.DescribeTransactionsRequest(["etl"])),
    (apis.LIST_TRANSACTIONS, t.ListTransactionsRequest([], [5])),
    (apis.FIND_COORDINATOR, g.FindCoordinatorRequest(0, ["billing"])),
    (
        apis.JOIN_GROUP,
        g.JoinGroupRequest("billing", 10_000, 1_000, "", None, "consumer", [g.JoinGroupProtocol("range", b"")]),
    ),
    (apis.SYNC_GROUP, g.SyncGroupRequest("billing", 1, "m", None, "consumer", "range", [])),
    (apis.HEARTBEAT, g.HeartbeatRequest("billing", 1, "m", None)),
    (apis.LEAVE_GROUP, g.LeaveGroupRequest("billing", [g.LeavingMember("m", None)])),
    (
        apis.OFFSET_COMMIT,
        g.OffsetCommitRequest(
            "billing", -1, "", None, [g.OffsetCommitTopic(TOPIC, [g.OffsetCommitPartition(0, 5, -1)])]
        ),
    ),
    (apis.OFFSET_FETCH, g.OffsetFetchRequest([g.OffsetFetchGroup("billing", [g.OffsetFetchTopic(TOPIC, [0])])])),
    (apis.OFFSET_DELETE, g.OffsetDeleteRequest("billing", [g.OffsetDeleteTopic(TOPIC, [0])])),
    (apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["billing"])),
    (apis.LIST_GROUPS, g.ListGroupsRequest()),
    (apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"])),
    (apis.SASL_HANDSHAKE, m.SaslHandshakeRequest("PLAIN")),
    (apis.SASL_AUTHENTICATE, m.SaslAuthenticateRequest(b"")),
    (apis.DESCRIBE_USER_SCRAM_CREDENTIALS, m.DescribeUserScramCredentialsRequest([m.ScramUserName("alice")])),
    (
        apis.ALTER_USER_SCRAM_CREDENTIALS,
        m.AlterUserScramCredentialsRequest(
            [m.ScramCredentialDeletion("alice", 1)], [m.ScramCredentialUpsertion("bob", 2, 4_096, bytes(32), bytes(64))]
        ),
    ),
    (apis.ENVELOPE, m.EnvelopeRequest(1, True, memoryview(b"none"))),
    (apis.DESCRIBE_HEALTH, m.DescribeHealthRequest()),
    (apis.DESCRIBE_TIMELINE, m.DescribeTimelineRequest(0, 0, 10)),
    (apis.BROKER_HANDSHAKE, m.BrokerHandshakeRequest(1, 0, bytes(32))),
    (apis.BROKER_AUTHENTICATE, m.BrokerAuthenticateRequest(bytes(32))),
]


class Extreme(NamedTuple):
    api: Api[Any, Any]
    request: m.Message
    what: str


def extremes(api: Api[Any, Any], harmless: m.Message) -> Iterator[Extreme]:
    """Yield the request with each of its numbers replaced in turn by the protocol's minimum and maximum, and by values
    around zero."""
    for path, number in numbers(inspect.type_info(type(harmless)), harmless):
        assert number.ge is not None
        lowest, highest = int(number.ge), int(number.le) if number.le is not None else int(number.lt or 0) - 1
        for value in sorted({lowest, lowest + 1, -2, -1, 0, 1, highest}):
            if not lowest <= value <= highest or (path[-1] == "acks" and value == 0):
                continue  # with acks=0 there is no answer
            request = api.request_decoder.decode(msgspec.msgpack.encode(harmless))
            target: Any = request
            for step in path[:-1]:
                target = target[step] if isinstance(step, int) else getattr(target, step)
            if isinstance(path[-1], int):
                target[path[-1]] = value
            else:
                setattr(target, path[-1], value)
            yield Extreme(api, request, f"{api.name}, {'.'.join(map(str, path))} = {value}")


def numbers(kind: inspect.Type, value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, inspect.IntType]]:
    """Yield the path and the type of each number in a message."""
    if isinstance(kind, inspect.IntType):
        yield path, kind
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from numbers(field.type, getattr(value, field.name), (*path, field.name))
    elif isinstance(kind, inspect.ListType):
        for index, item in enumerate(value):
            yield from numbers(kind.item_type, item, (*path, index))
    elif isinstance(kind, inspect.UnionType) and value is not None:
        for choice in kind.types:
            if not isinstance(choice, inspect.NoneType):
                yield from numbers(choice, value, path)


def test_every_client_request_is_covered() -> None:
    sent_by_anybody = {api.key for api in apis.APIS.values() if api.plane is not Plane.CONTROL}
    assert {api.key for api, _ in HARMLESS} == sent_by_anybody


@pytest.mark.parametrize(("api", "harmless"), HARMLESS, ids=[api.name for api, _ in HARMLESS])
def test_a_broker_survives_every_extreme_number_in_a_request(
    api: Api[Any, Any], harmless: m.Message, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[str] = []

    async def scenario() -> None:
        cluster = VirtualCluster(Simulation(), on_broker_failure=lambda b, e: failures.append(f"broker {b}: {e!r}"))
        await cluster.start()
        world = cluster.client("stranger")

        async def inside() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic(TOPIC, partitions=1, replication_factor=3, configs={"segment.bytes": "600"})
            async with Producer(cluster.bootstrap, world=world) as producer:
                for number in range(RECORDS):
                    await producer.send(TOPIC, b"%d" % number)
            leader = cluster.state(TopicPartition(TOPIC, 0)).leader
            controller = cluster.active_controllers()[0]
            broker_id = controller if api in (apis.CREATE_TOPICS, apis.DELETE_TOPICS) else leader
            for extreme in extremes(api, harmless):
                connection = await open_connection(
                    world.network, host_name(broker_id), PORT, client_id="stranger", timeout_s=5
                )
                try:
                    await connection.request(api, extreme.request, timeout_s=ANSWERED_WITHIN_S)
                except Exception as error:
                    if not isinstance(error, BrokerError) or error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
                        raise AssertionError(f"{extreme.what}: {error!r}, {failures}") from error
                finally:
                    connection.close()
            await asyncio.sleep(1)
            assert cluster.living() == [0, 1, 2]
            async with Producer(cluster.bootstrap, world=world) as producer:
                last = (await producer.send(TOPIC, b"still there", partition=0)).offset
            async with Consumer(cluster.bootstrap, partitions=[TopicPartition(TOPIC, 0)], world=world) as consumer:
                async for record in consumer:
                    if record.offset == last:
                        assert record.value == b"still there"
                        break

        await world.process.run(inside())

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert not failures
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@run_by(on_virtual_loop)
async def test_a_limit_below_zero_is_refused_by_name() -> None:
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    world = cluster.client("stranger")

    async def inside() -> None:
        connection = await open_connection(world.network, host_name(0), PORT, client_id="stranger", timeout_s=5)
        api, harmless = next((api, request) for api, request in HARMLESS if api is apis.FETCH)
        assert isinstance(harmless, m.FetchRequest)
        whole = msgspec.structs.replace(harmless, max_bytes=-3)
        of_partition = copy.deepcopy(harmless)
        of_partition.topics[0].partitions[0].partition_max_bytes = -4
        for request, why in (
            (whole, "max_bytes is -3; it must be 0 or more"),
            (of_partition, "partition_max_bytes of orders-0 is -4; it must be 0 or more"),
        ):
            with pytest.raises(BrokerError) as refused:
                await connection.request(api, request, timeout_s=5)
            assert refused.value.code is ErrorCode.INVALID_REQUEST
            assert refused.value.detail == f"Fetch: {why}"

    await world.process.run(inside())

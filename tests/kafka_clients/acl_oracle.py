"""Compares who may do what with Apache Kafka 3.9: `python -m tests.kafka_clients.acl_oracle --kafka-jars DIRECTORY`.

Both clusters get the same access control lists, in the same znodes, and the same requests of Kafka's protocol from
User:ANONYMOUS. Of the answers, the errors of authorization, the things that are listed, and the authorized operations
must be equal, with and without `allow.everyone.if.no.acl.found`. `sets` has the lists, `requests` the requests.
DIRECTORY has the jars of Kafka's broker and ZooKeeper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError

from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.simulator.kafka_connection import KafkaConnection, connect
from minibroker.protocol import acl_znodes
from minibroker.protocol import messages as m
from minibroker.protocol.acls import (
    CLUSTER_NAME,
    SUPPORTED_OPERATIONS,
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import acls, brokers, configs, data, groups, metadata, sasl, topics, transactions
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.records import MAGIC_RECORDS, encode_batch
from minibroker.protocol.world.real import RealWorld
from tests.live_cluster import live_cluster
from tests.waiting import until_true

Op, Kind = AclOperation, AclResourceType
TOPICS = ("orders", "secrets")
ME = "User:ANONYMOUS"
HOST = "127.0.0.1"
AUTHORIZATION = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
PATIENCE_S = 60.0


class Target(NamedTuple):
    name: str
    port: int
    zookeeper: str


# -- the clusters --


@contextmanager
def kafka(directory: Path, jars: str, open_by_default: str) -> Iterator[Target]:
    """Run one broker, whose own connections are User:admin by SASL; clients are User:ANONYMOUS."""
    zookeeper_port, port, internal = free_ports(3)
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="admin" password="admin" '
    (directory / "zookeeper.cfg").write_text(
        f"tickTime=2000\ndataDir={directory}/zookeeper\nclientPort={zookeeper_port}\n"
        f"clientPortAddress=127.0.0.1\nadmin.enableServer=false\nmaxClientCnxns=0\n"
    )
    (directory / "broker.properties").write_text(
        f"broker.id=0\nlog.dirs={directory}/data\nzookeeper.connect=127.0.0.1:{zookeeper_port}\n"
        f"listeners=CLIENTS://127.0.0.1:{port},BROKERS://127.0.0.1:{internal}\n"
        "listener.security.protocol.map=CLIENTS:PLAINTEXT,BROKERS:SASL_PLAINTEXT\n"
        "inter.broker.listener.name=BROKERS\nsasl.mechanism.inter.broker.protocol=PLAIN\nsasl.enabled.mechanisms=PLAIN\n"
        f'listener.name.brokers.plain.sasl.jaas.config={login}user_admin="admin";\n'
        "authorizer.class.name=kafka.security.authorizer.AclAuthorizer\nsuper.users=User:admin\n"
        f"allow.everyone.if.no.acl.found={open_by_default}\n"
        "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "transaction.state.log.num.partitions=1\ngroup.initial.rebalance.delay.ms=0\n"
    )
    processes = []
    try:
        for main, config, name, awaited in (
            ("org.apache.zookeeper.server.quorum.QuorumPeerMain", "zookeeper.cfg", "zookeeper", zookeeper_port),
            ("kafka.Kafka", "broker.properties", "broker", port),
        ):
            with open(directory / f"{name}.log", "wb") as log:
                command = ["java", "-Xmx512m", "-cp", f"{jars}/*", main, str(directory / config)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            until_true(partial(_accepts, awaited), PATIENCE_S)
        yield Target("Apache Kafka", port, f"127.0.0.1:{zookeeper_port}")
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@contextmanager
def ours(directory: Path, open_by_default: str) -> Iterator[Target]:
    settings = {
        "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
        "allow.everyone.if.no.acl.found": open_by_default,
        "auto.create.topics.enable": "true",
        "zookeeper.set.acl": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
    with live_cluster(directory, 1, settings) as cluster:
        port = int(cluster.bootstrap().split(",")[0].rpartition(":")[2])
        yield Target("minibroker", port, cluster.file().zookeeper.connect)


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


# -- access control lists --


def acl(
    operation: AclOperation,
    kind: AclResourceType,
    name: str,
    *,
    pattern: PatternType = PatternType.LITERAL,
    principal: str = ME,
    host: str = "*",
    permission: AclPermissionType = AclPermissionType.ALLOW,
) -> AclBinding:
    return AclBinding(ResourcePattern(kind, name, pattern), AccessControlEntry(principal, host, operation, permission))


_NAMES = {Kind.TOPIC: "orders", Kind.GROUP: "a", Kind.TRANSACTIONAL_ID: "t", Kind.CLUSTER: CLUSTER_NAME}
_OTHERS = {Kind.TOPIC: "missing", Kind.GROUP: "b", Kind.TRANSACTIONAL_ID: "u"}


def sets() -> Iterator[tuple[str, list[AclBinding]]]:
    """Each set of access control lists with its description."""
    yield "nothing", []
    everything = [acl(Op.ALL, kind, CLUSTER_NAME if kind is Kind.CLUSTER else "*") for kind in _NAMES]
    yield "everything", everything
    for kind, name in _NAMES.items():
        for operation in (*SUPPORTED_OPERATIONS[kind], Op.ALL):
            yield f"allow {operation.name} on {kind.name}", [acl(operation, kind, name)]
            denied = acl(operation, kind, name, permission=AclPermissionType.DENY)
            yield f"everything but {operation.name} on {kind.name}", [*everything, denied]
    for kind, name in _NAMES.items():
        without = [each for each in everything if each.pattern.resource_type is not kind]
        yield f"everything but {kind.name}", without
        if kind is not Kind.CLUSTER:
            prefixed = acl(Op.ALL, kind, name[:1], pattern=PatternType.PREFIXED)
            yield f"{kind.name} by its prefix", [*without, prefixed]
            other = acl(Op.ALL, kind, _OTHERS[kind])
            yield f"another {kind.name}", [*without, other]
            denied = acl(Op.ALL, kind, name[:1], pattern=PatternType.PREFIXED, permission=AclPermissionType.DENY)
            yield f"everything but {kind.name} by its prefix", [*everything, denied]
        own = CLUSTER_NAME if kind is Kind.CLUSTER else "*"
        yield f"everybody on {kind.name}", [*without, acl(Op.ALL, kind, own, principal="User:*")]
        yield f"somebody else on {kind.name}", [*without, acl(Op.ALL, kind, own, principal="User:bob")]
        yield f"this host on {kind.name}", [*without, acl(Op.ALL, kind, own, host=HOST)]
        yield f"another host on {kind.name}", [*without, acl(Op.ALL, kind, own, host="10.1.2.3")]
    for operation in (Op.WRITE, Op.READ):
        denied = acl(operation, Kind.TOPIC, "o", pattern=PatternType.PREFIXED, permission=AclPermissionType.DENY)
        yield f"{operation.name} on TOPIC under a denied prefix", [acl(operation, Kind.TOPIC, "orders"), denied]
    yield (
        "DESCRIBE and CREATE on a missing topic",
        [
            acl(Op.DESCRIBE, Kind.TOPIC, "missing"),
            acl(Op.CREATE, Kind.TOPIC, "missing"),
        ],
    )
    yield (
        "what a producer needs",
        [
            acl(Op.WRITE, Kind.TOPIC, "orders"),
            acl(Op.WRITE, Kind.TRANSACTIONAL_ID, "t"),
        ],
    )
    yield "what a consumer needs", [acl(Op.READ, Kind.TOPIC, "orders"), acl(Op.READ, Kind.GROUP, "a")]


class Lists:
    """Writes access control lists to a cluster's ZooKeeper as Kafka's authorizer does."""

    def __init__(self, target: Target) -> None:
        self._zookeeper = KazooClient(target.zookeeper)
        self._zookeeper.start()
        self._written: set[ResourcePattern] = set()

    def close(self) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()

    def replace(self, bindings: list[AclBinding]) -> None:
        """Make these the only ones."""
        wanted: dict[ResourcePattern, set[AccessControlEntry]] = {pattern: set() for pattern in self._written}
        for pattern, entry in bindings:
            wanted.setdefault(pattern, set()).add(entry)
        for pattern, entries in wanted.items():
            path = acl_znodes.acl_path(pattern)
            if not entries:
                with suppress(NoNodeError):
                    self._zookeeper.delete(path)
            else:
                value = acl_znodes.encode_acls(entries)
                try:
                    self._zookeeper.create(path, value)
                except NodeExistsError:
                    self._zookeeper.set(path, value)
            changes = acl_znodes.CHANGES[pattern.pattern_type]
            self._zookeeper.create(
                f"{changes}/{acl_znodes.CHANGE_PREFIX}", acl_znodes.encode_change(pattern), sequence=True
            )
        self._written = {pattern for pattern, entries in wanted.items() if entries}

    def topic_ids(self) -> dict[str, str]:
        """Return the topics by their ids."""
        paths = {name: f"/brokers/topics/{name}" for name in TOPICS}
        return {json.loads(self._zookeeper.get(path)[0])["topic_id"]: name for name, path in paths.items()}


# -- requests --


class Asked(NamedTuple):
    api: KafkaApi
    version: int
    body: Any

    def __str__(self) -> str:
        return f"{self.api.name} v{self.version}"


def wire(api: KafkaApi, **values: Any) -> Any:
    cls = api.request.cls
    assert cls is not None
    return cls(**values)


def about(api: KafkaApi, names: list[tuple[str, str | None]] | None, creates: bool = False, **more: Any) -> Any:
    cls = api.request.fields[0].type.of.cls  # type: ignore[attr-defined]
    named = None if names is None else [cls(topic_id, name) for topic_id, name in names]
    return wire(api, topics=named, allow_auto_topic_creation=creates, **more)


def requests(ids: dict[str, str]) -> list[Asked]:
    """Return requests that change as little as possible. `ids`: the topics by their ids."""
    both = ["orders", "secrets"]
    id_of = {name: topic_id for topic_id, name in ids.items()}
    batch = memoryview(encode_batch([b"value"], base_timestamp=1_000, magic=MAGIC_RECORDS))
    of_transaction_t = memoryview(
        encode_batch(
            [b"value"],
            base_timestamp=1_000,
            magic=MAGIC_RECORDS,
            producer_id=999_999,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        )
    )
    partition = m.FetchPartition(0, -1, 0, -1, -1, 1_000)

    def produce(transactional_id: str | None, batch: memoryview = batch) -> m.ProduceRequest:
        return m.ProduceRequest(
            transactional_id, 1, 5_000, [m.ProduceTopic(name, [m.ProducePartition(0, batch)]) for name in both]
        )

    def fetch(version: int, replica_id: int = -1) -> Asked:
        fetched = [m.FetchTopic("" if version > 12 else name, id_of[name], [partition]) for name in both]
        return Asked(data.FETCH, version, m.FetchRequest(replica_id, 0, 0, 10_000, 0, fetched))

    commits = [g.OffsetCommitTopic(name, [g.OffsetCommitPartition(0, 0, -1, "")]) for name in both]
    offsets = [g.OffsetFetchTopic(name, [0]) for name in both]
    of_transaction = [t.TransactionTopic(name, [0]) for name in both]
    metadata_flags = {"include_topic_authorized_operations": True, "include_cluster_authorized_operations": True}
    resources = [m.DescribeConfigsResource(2, "orders", []), m.DescribeConfigsResource(4, "0", [])]
    found: list[Asked] = [
        Asked(data.PRODUCE, 9, produce(None)),
        fetch(11),
        fetch(13),
        Asked(
            data.LIST_OFFSETS,
            6,
            m.ListOffsetsRequest(
                -1, 0, [m.ListOffsetsTopic(name, [m.ListOffsetsPartition(0, -1, -1)]) for name in both]
            ),
        ),
        Asked(
            data.OFFSET_FOR_LEADER_EPOCH,
            3,
            m.OffsetForLeaderEpochRequest(
                -1, [m.OffsetForLeaderTopic(name, [m.OffsetForLeaderPartition(0, -1, 0)]) for name in both]
            ),
        ),
        Asked(metadata.METADATA, 9, about(metadata.METADATA, None, **metadata_flags)),
        Asked(metadata.METADATA, 9, about(metadata.METADATA, [("", name) for name in both], **metadata_flags)),
        Asked(metadata.METADATA, 12, about(metadata.METADATA, [(topic_id, None) for topic_id in ids])),
        Asked(metadata.METADATA, 9, about(metadata.METADATA, [("", "orders"), ("", "nowhere")], creates=True)),
        Asked(metadata.DESCRIBE_CLUSTER, 0, m.DescribeClusterRequest(include_cluster_authorized_operations=True)),
        *(
            Asked(
                metadata.FIND_COORDINATOR,
                4,
                wire(metadata.FIND_COORDINATOR, key="", key_type=kind, coordinator_keys=keys),
            )
            for kind, keys in ((0, ["a", "b"]), (1, ["t", "u"]))
        ),
        Asked(groups.OFFSET_COMMIT, 7, g.OffsetCommitRequest("a", -1, "", None, commits)),
        *(
            Asked(
                groups.OFFSET_FETCH,
                8,
                wire(
                    groups.OFFSET_FETCH,
                    group_id="",
                    topics=None,
                    groups=[g.OffsetFetchGroup("a", asked), g.OffsetFetchGroup("b", asked)],
                    require_stable=False,
                ),
            )
            for asked in (offsets, None)
        ),
        Asked(
            groups.JOIN_GROUP,
            5,
            g.JoinGroupRequest("a", 1, 1, "", None, "consumer", [g.JoinGroupProtocol("range", b"")]),
        ),
        Asked(groups.SYNC_GROUP, 3, g.SyncGroupRequest("a", 1, "nobody", None, None, None, [])),
        Asked(groups.HEARTBEAT, 3, g.HeartbeatRequest("a", 1, "nobody", None)),
        Asked(
            groups.LEAVE_GROUP,
            3,
            wire(groups.LEAVE_GROUP, group_id="a", member_id="", members=[g.LeavingMember("nobody", None)]),
        ),
        Asked(groups.DESCRIBE_GROUPS, 5, g.DescribeGroupsRequest(["a", "b"], include_authorized_operations=True)),
        Asked(groups.LIST_GROUPS, 4, g.ListGroupsRequest([])),
        Asked(groups.DELETE_GROUPS, 2, g.DeleteGroupsRequest(["c", "d"])),
        Asked(
            topics.CREATE_TOPICS,
            5,
            m.CreateTopicsRequest([m.CreatableTopic(name, 1, 1) for name in ("missing", "other")], 5_000, True),
        ),
        Asked(
            topics.DELETE_TOPICS,
            5,
            wire(topics.DELETE_TOPICS, topics=[], topic_names=["missing", "other"], timeout_ms=5_000),
        ),
        Asked(
            topics.DELETE_RECORDS,
            2,
            m.DeleteRecordsRequest(
                [m.DeleteRecordsTopic(name, [m.DeleteRecordsPartition(0, 0)]) for name in both], 5_000
            ),
        ),
        Asked(
            topics.CREATE_PARTITIONS,
            2,
            m.CreatePartitionsRequest([m.CreatePartitionsTopic(name, 1) for name in both], 5_000, True),
        ),
        Asked(topics.ELECT_LEADERS, 2, m.ElectLeadersRequest(0, [m.ElectLeadersTopic("orders", [0])], 5_000)),
        Asked(topics.ALTER_PARTITION_REASSIGNMENTS, 0, m.AlterPartitionReassignmentsRequest(5_000, [])),
        Asked(topics.LIST_PARTITION_REASSIGNMENTS, 0, m.ListPartitionReassignmentsRequest(5_000, None)),
        Asked(data.INIT_PRODUCER_ID, 4, m.InitProducerIdRequest(None)),
        Asked(data.INIT_PRODUCER_ID, 4, m.InitProducerIdRequest("t")),
        Asked(
            transactions.ADD_PARTITIONS_TO_TXN,
            3,
            wire(
                transactions.ADD_PARTITIONS_TO_TXN,
                transactions=[],
                v3_and_below_transactional_id="t",
                v3_and_below_producer_id=999_999,
                v3_and_below_producer_epoch=0,
                v3_and_below_topics=of_transaction,
            ),
        ),
        Asked(
            transactions.ADD_PARTITIONS_TO_TXN,
            4,
            wire(
                transactions.ADD_PARTITIONS_TO_TXN,
                transactions=[t.TransactionToExtend("t", 999_999, 0, of_transaction, True)],
                v3_and_below_transactional_id="",
                v3_and_below_producer_id=0,
                v3_and_below_producer_epoch=0,
                v3_and_below_topics=[],
            ),
        ),
        Asked(transactions.ADD_OFFSETS_TO_TXN, 3, t.AddOffsetsToTxnRequest("t", 999_999, 0, "a")),
        Asked(transactions.END_TXN, 3, t.EndTxnRequest("t", 999_999, 0, True)),
        Asked(
            transactions.TXN_OFFSET_COMMIT,
            3,
            t.TxnOffsetCommitRequest(
                "t",
                "a",
                999_999,
                0,
                [t.TxnOffsetCommitTopic(name, [t.TxnOffsetCommitPartition(0, 0, -1, "")]) for name in both],
            ),
        ),
        Asked(
            transactions.WRITE_TXN_MARKERS,
            1,
            t.WriteTxnMarkersRequest([t.TransactionMarker(999_999, 0, False, 0, [t.TransactionTopic("nowhere", [0])])]),
        ),
        Asked(transactions.DESCRIBE_TRANSACTIONS, 0, t.DescribeTransactionsRequest(["t", "u"])),
        Asked(transactions.LIST_TRANSACTIONS, 0, t.ListTransactionsRequest()),
        Asked(
            metadata.DESCRIBE_PRODUCERS, 0, m.DescribeProducersRequest([m.DescribeProducersTopic(n, [0]) for n in both])
        ),
        Asked(configs.DESCRIBE_CONFIGS, 2, m.DescribeConfigsRequest(resources)),
        Asked(
            configs.INCREMENTAL_ALTER_CONFIGS,
            1,
            m.IncrementalAlterConfigsRequest(
                [
                    m.AlterConfigsResource(2, "orders", [m.AlterableConfig("retention.ms", 0, "1000")]),
                    m.AlterConfigsResource(4, "0", [m.AlterableConfig("log.retention.ms", 0, "1000")]),
                ],
                True,
            ),
        ),
        Asked(
            configs.ALTER_CONFIGS,
            1,
            m.AlterConfigsRequest(
                [m.ReplacedConfigs(2, "orders", []), m.ReplacedConfigs(4, "0", [])], validate_only=True
            ),
        ),
        Asked(
            brokers.ALTER_REPLICA_LOG_DIRS,
            1,
            m.AlterReplicaLogDirsRequest(
                [m.AlterReplicaLogDir("/nowhere", [m.AlterReplicaLogDirTopic("orders", [0])])]
            ),
        ),
        Asked(brokers.DESCRIBE_LOG_DIRS, 3, m.DescribeLogDirsRequest([m.DescribableLogDirTopic("orders", [0])])),
        Asked(acls.DESCRIBE_ACLS, 1, m.DescribeAclsRequest(7, None, None, None, 1, 1, 1)),
        Asked(acls.CREATE_ACLS, 1, m.CreateAclsRequest([m.AclCreation(4, "wrong", ME, "*", 3, 3)])),
        Asked(acls.DELETE_ACLS, 1, m.DeleteAclsRequest([m.AclFilterFields(2, "nowhere", None, None, 1, 1)])),
        Asked(
            sasl.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, m.DescribeUserScramCredentialsRequest([m.ScramUserName("nobody")])
        ),
        Asked(
            sasl.ALTER_USER_SCRAM_CREDENTIALS,
            0,
            m.AlterUserScramCredentialsRequest([m.ScramCredentialDeletion("nobody", 1)], []),
        ),
        Asked(
            configs.DESCRIBE_CLIENT_QUOTAS,
            1,
            m.DescribeClientQuotasRequest([m.QuotaFilterComponent("user", 0, "nobody")], False),
        ),
        Asked(
            configs.ALTER_CLIENT_QUOTAS,
            1,
            m.AlterClientQuotasRequest(
                [
                    m.AlteredQuotas(
                        [m.QuotaEntityPart("user", "nobody")], [m.QuotaChange("producer_byte_rate", 1.0, False)]
                    )
                ],
                True,
            ),
        ),
        Asked(groups.OFFSET_DELETE, 0, _offset_delete(both)),
        Asked(data.PRODUCE, 9, produce("t")),
        Asked(data.PRODUCE, 9, produce("t", of_transaction_t)),
    ]
    return found


def _offset_delete(names: list[str]) -> Any:
    field = groups.OFFSET_DELETE.request.fields[1]
    topic = field.type.of.cls  # type: ignore[attr-defined]
    part = field.type.of.fields[1].type.of.cls  # type: ignore[attr-defined]
    return wire(groups.OFFSET_DELETE, group_id="a", topics=[topic(name, [part(9)]) for name in names])


# -- answers --

_IDENTITIES = (
    "name",
    "topic",
    "topic_name",
    "group_id",
    "key",
    "transactional_id",
    "resource_name",
    "log_dir",
    "partition_index",
    "partition",
    "index",
    "partition_id",
    "producer_id",
)
_LISTED = {"Metadata", "ListGroups", "ListTransactions", "OffsetFetch"}
"""APIs whose answers leave out what may not be seen."""


def outcome(asked: Asked, answer: Any, ids: dict[str, str]) -> set[str]:
    """Return what an answer says about rights: errors of authorization, things listed, operations."""
    found: set[str] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, msgspec.Struct):
            if getattr(value, "error_code", 0) in AUTHORIZATION:  # more inside says nothing
                found.add(f"{path} {ErrorCode(value.error_code).name}")  # type: ignore[attr-defined]
                if getattr(value, "topic_config_error_code", 0):
                    found.add(f"{path} topic_config_error_code")
                return
            for field in value.__struct_fields__:
                inner = getattr(value, field)
                if field == "topic_config_error_code":
                    if inner in AUTHORIZATION:
                        found.add(f"{path} {field}")
                elif field.endswith("authorized_operations"):
                    found.add(f"{path} {field} {inner:#x}")
                elif isinstance(inner, list | msgspec.Struct):
                    walk(inner, f"{path}.{field}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                named = (getattr(item, each) for each in _IDENTITIES if getattr(item, each, None) not in (None, ""))
                name = next(named, ids.get(getattr(item, "topic_id", ""), number))
                if asked.api.name in _LISTED and isinstance(name, str) and not name.startswith(("__", "marker")):
                    found.add(f"{path}[{name}] is there")
                if isinstance(item, msgspec.Struct) and not str(name).startswith(("__", "marker")):
                    walk(item, f"{path}[{name}]")

    walk(answer, "")
    return found


async def answers(target: Target, ids: dict[str, str]) -> list[tuple[str, set[str]]]:
    results = []
    for number, asked in enumerate(requests(ids)):
        connection = await connect(RealWorld().network, HOST, target.port)
        try:
            answer = await connection.request(asked.api, asked.version, asked.body)
            found = outcome(asked, answer, ids)
        except (TimeoutError, OSError) as error:
            found = {repr(error)}
        finally:
            connection.close()
        results.append((f"{number} {asked}", found))
    return results


async def until(target: Target, what: str, condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError, TimeoutError):
            connection = await connect(RealWorld().network, HOST, target.port)
            try:
                if await condition(connection):
                    return
            finally:
                connection.close()
        assert time.monotonic() < deadline, f"{target.name}: {what}"
        await asyncio.sleep(0.02)


async def write(target: Target, lists: Lists, number: int, bindings: list[AclBinding]) -> None:
    """Replace the lists, and wait until they hold: the marks at their end do. There is one for each kind of pattern
    that allows, if nothing else did, and one that denies, if something else allowed."""
    marks = [
        acl(Op.DESCRIBE, Kind.TOPIC, f"marker-{number}-{pattern}-{permission}", pattern=pattern, permission=permission)
        for pattern in (PatternType.LITERAL, PatternType.PREFIXED)
        for permission in (AclPermissionType.ALLOW, AclPermissionType.DENY)
    ]
    lists.replace([*bindings, *marks])

    async def seen(connection: KafkaConnection) -> bool:
        asked = about(metadata.METADATA, [("", mark.pattern.name) for mark in marks])
        answer = await connection.request(metadata.METADATA, 5, asked)
        refused = {topic.name: topic.error_code in AUTHORIZATION for topic in answer.topics}
        return all(refused[mark.pattern.name] is (mark.entry.permission is AclPermissionType.DENY) for mark in marks)

    await until(target, "the access control lists do not come into force", seen)


async def prepare(target: Target, lists: Lists) -> dict[str, str]:
    """Create the topics, the coordinators and a group's offsets. Return the topics by their ids."""
    everything = [acl(Op.ALL, kind, CLUSTER_NAME if kind is Kind.CLUSTER else "*") for kind in _NAMES]
    await write(target, lists, 0, everything)

    async def created(connection: KafkaConnection) -> bool:
        request = m.CreateTopicsRequest([m.CreatableTopic(name, 1, 1) for name in TOPICS], 5_000)
        answer = await connection.request(topics.CREATE_TOPICS, 5, request)
        return all(r.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS) for r in answer.topics)

    async def coordinated(connection: KafkaConnection) -> bool:
        codes = []
        for kind, key in ((0, "a"), (1, "t")):
            body = wire(metadata.FIND_COORDINATOR, key="", key_type=kind, coordinator_keys=[key])
            codes += [c.error_code for c in (await connection.request(metadata.FIND_COORDINATOR, 4, body)).coordinators]
        commits = [g.OffsetCommitTopic(name, [g.OffsetCommitPartition(0, 0, -1, "")]) for name in TOPICS]
        for group in ("a", "b"):
            body = g.OffsetCommitRequest(group, -1, "", None, commits)
            answer = await connection.request(groups.OFFSET_COMMIT, 7, body)
            codes += [part.error_code for topic in answer.topics for part in topic.partitions]
        for transactional_id in ("t", "u"):
            answer = await connection.request(data.INIT_PRODUCER_ID, 4, m.InitProducerIdRequest(transactional_id))
            codes.append(answer.error_code)
        return not any(codes)

    await until(target, "the topics are not created", created)
    await until(target, "there are no coordinators", coordinated)
    return lists.topic_ids()


async def compare(targets: list[Target], only: str) -> int:
    lists = [Lists(target) for target in targets]
    differences = compared = 0
    ids = [await prepare(*each) for each in zip(targets, lists, strict=True)]
    for number, (name, bindings) in enumerate(sets(), 1):
        if only not in name:
            continue
        found = []
        for target, its_lists, its_ids in zip(targets, lists, ids, strict=True):
            await write(target, its_lists, number, bindings)
            found.append(await answers(target, its_ids))
        for (asked, theirs), (_, mine) in zip(*found, strict=True):
            compared += 1
            if theirs != mine:
                differences += 1
                sys.stdout.write(f"{name}: {asked}\n")
                for text in sorted(theirs - mine):
                    sys.stdout.write(f"    {targets[0].name} alone: {text}\n")
                for text in sorted(mine - theirs):
                    sys.stdout.write(f"    {targets[1].name} alone: {text}\n")
    for each in lists:
        each.close()
    sys.stdout.write(f"{compared} answers compared, {differences} differ\n")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kafka-jars", required=True, help="a directory with the jars of Kafka 3.9 and ZooKeeper")
    parser.add_argument("--only", default="", help="only sets of lists whose description has this text")
    options = parser.parse_args()
    let_signals_interrupt()
    with tempfile.TemporaryDirectory() as name:
        differences = 0
        for by_default in ("false", "true"):
            sys.stdout.write(f"allow.everyone.if.no.acl.found={by_default}\n")
            directory = Path(name, by_default)
            os.makedirs(directory / "kafka")
            with (
                kafka(directory / "kafka", options.kafka_jars, by_default) as theirs,
                ours(directory / "ours", by_default) as mine,
            ):
                differences += asyncio.run(compare([theirs, mine], options.only))
        sys.exit(differences > 0)


if __name__ == "__main__":
    main()

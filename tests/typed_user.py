"""A user's program with the whole public API, checked by mypy and never run. One test type-checks it beside the
installed minibroker; another checks that no public name is missing."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import assert_type

from minibroker import (
    DEFAULT_ENTITY,
    AccessControlEntry,
    AclBinding,
    AclErrors,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    Address,
    Admin,
    AlterOperation,
    ApiTimedOut,
    ArrowArray,
    Assignor,
    AuthenticationFailed,
    BatchDelivery,
    BatchDeliveryFailed,
    BatchMetadata,
    BrokerDescription,
    BrokerError,
    BrokersFailed,
    BufferFull,
    ClientCrashed,
    Closed,
    ClusterDescription,
    CommitFailed,
    CommitOutcomeUnknown,
    ConfigChange,
    ConfigEntry,
    ConfigErrors,
    ConfigResource,
    ConfigSource,
    ConfigSynonym,
    ConfigType,
    Consumer,
    ConsumerBatch,
    ConsumerStatus,
    Coordinator,
    CorruptBatch,
    Delivery,
    DeliveryFailed,
    DeliveryTimedOut,
    DeserializationFailed,
    ErrorCode,
    FailedRecord,
    ForkedClient,
    GroupDescription,
    GroupErrors,
    GroupListing,
    GroupMetadata,
    GroupRebalance,
    InvalidAssignment,
    InvalidSetting,
    InvalidTransactionState,
    ListenerTimedOut,
    LogDirDescription,
    LogDirReplica,
    LogTruncated,
    MaxPollIntervalExceeded,
    MemberDescription,
    MinibrokerError,
    NetworkError,
    NewTopic,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    OffsetErrors,
    PartialFailure,
    PartitionDescription,
    Partitioner,
    PartitionerFailed,
    PartitionErrors,
    PartitionReassignment,
    Partitions,
    PartMetadata,
    PatternType,
    Processor,
    Producer,
    ProducerErrors,
    ProducerFenced,
    ProducerRecord,
    ProducerState,
    QuotaEntity,
    QuotaErrors,
    RebalanceListener,
    RebalanceProtocol,
    Record,
    RecordMetadata,
    RecordPartitioner,
    ResourcePattern,
    ResourceType,
    RoundRobin,
    ScramCredentialInfo,
    Security,
    SerializationFailed,
    Subscription,
    TimelineRead,
    TimelineReader,
    TopicDescription,
    TopicErrors,
    TopicPartition,
    Transaction,
    TransactionAborted,
    TransactionalIdErrors,
    TransactionDescription,
    TransactionError,
    TransactionListing,
    UserErrors,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
    WithinListener,
    WithoutKey,
    WrongEventLoop,
    crc32,
    main,
    murmur2,
    sync,
    testing,
)

BOOTSTRAP = "localhost:9092"
P0 = TopicPartition("orders", 0)


# --- asynchronous ---


def told(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
    if metadata is not None:
        assert_type(metadata.offset, int)
    else:
        print(error)


def by_length(topic: str, key: bytes | None, value: bytes | None, partitions: Partitions) -> int:
    return len(value or b"") % partitions.count if partitions.available else 0


async def produce() -> None:
    async with Producer(
        [BOOTSTRAP],
        acks="all",
        compression="zstd",
        partitioner=Partitioner(by_key=murmur2, without_key=WithoutKey.STICKY),
        key_serializer="str",
        value_serializer=lambda value: repr(value).encode(),
    ) as producer:
        delivery = producer.send("orders", {"n": 1}, key="k", headers=[("h", b"1")], on_delivery=told)
        assert_type(delivery, Delivery)
        assert_type(delivery.done(), bool)
        assert_type(await delivery, RecordMetadata)
        task = asyncio.create_task(producer.send("orders", 2, partition=0, timestamp_ms=1))
        assert_type(await task, RecordMetadata)
        await producer.drain()
        batch = producer.send_batch("orders", [b"a", b"b"], keys=["k", None], timestamps_ms=[1, 2], partition=0)
        producer.send_batch("orders", 5)  # type: ignore[arg-type]
        producer.send_batch("orders", [b"a"], timestamps_ms=["1"])  # type: ignore[list-item]
        assert_type(batch, BatchDelivery)
        places = await batch
        assert_type(places, BatchMetadata)
        assert_type(places.parts, tuple[PartMetadata, ...])
        assert_type(places.offsets(), list[tuple[int, int]])
        await producer.flush()
    consumer = Consumer(BOOTSTRAP, group="billing", isolation_level="read_committed")
    async with Producer(BOOTSTRAP, transactional_id="billing-1", transaction_timeout_ms=10_000) as transactional:
        async with transactional.transaction() as transaction:
            assert_type(transaction, Transaction)
            transactional.send("orders", b"v")
            assert_type(consumer.group_metadata(), GroupMetadata)
            await transaction.send_offsets({P0: 7}, consumer.group_metadata())
        assert_type(await transaction.was_committed(), bool)
    partitioners: tuple[RecordPartitioner, ...] = (by_length, RoundRobin())
    for partitioner in partitioners:
        other = Producer(BOOTSTRAP, partitioner=partitioner)
        await other.start()
        await other.close()
    Producer(BOOTSTRAP, partitioner=Partitioner(by_key=crc32))


def columns_of(array: ArrowArray) -> int:
    return len(Producer(BOOTSTRAP).send_batch("orders", array))


class FirstTakesAll:
    name = "first"
    protocol = RebalanceProtocol.EAGER

    def assign(
        self, members: Mapping[str, Subscription], partitions: Mapping[str, int]
    ) -> dict[str, list[TopicPartition]]:
        first = min(members)
        everything = [TopicPartition(topic, index) for topic, count in partitions.items() for index in range(count)]
        return {member: everything if member == first else [] for member in members}


def with_assignor(assignor: Assignor) -> Consumer:
    return Consumer(BOOTSTRAP, group="billing", topics=["orders"], partition_assignment_strategy=assignor)


class Committing(RebalanceListener):
    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self.consumer.commit()

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            print(await self.consumer.position(partition))

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        print(partitions)


async def consume() -> None:
    async with Consumer(BOOTSTRAP, group="billing", auto_offset_reset="latest", enable_auto_commit=False) as consumer:
        consumer.subscribe(["orders"], listener=Committing(consumer))
        consumer.subscribe(pattern="orders-.*")
        assert_type(consumer.subscription(), list[str])
        async for record in consumer:
            assert_type(record, Record)
            assert_type(record.headers, Sequence[tuple[str, bytes | None]])
            break
        assert_type(await anext(consumer), Record)
        assert_type(consumer.batches(), AsyncIterator[ConsumerBatch])
        async for batch in consumer.batches():
            assert_type(batch.records(), list[Record])
            assert_type(batch.offsets, Sequence[int])
            batch.to_arrow()
            break
        assert_type(await consumer.poll(timeout_ms=100, max_records=10), list[Record])
        await consumer.commit()
        await consumer.commit({P0: 7})
        await consumer.commit_nowait({P0: OffsetAndMetadata(7, leader_epoch=1, metadata="m")})
        assert_type(await consumer.committed(P0), dict[TopicPartition, OffsetAndMetadata | None])
        assert_type(consumer.group_metadata(), GroupMetadata)
        assert_type(await consumer.position(P0), int)
        assert_type(consumer.position_epoch(P0), int | None)
        consumer.seek(P0, 3, leader_epoch=1)
        consumer.seek_to_beginning(P0)
        consumer.seek_to_end()
        consumer.seek_to_time(1_700_000_000_000, P0)
        consumer.pause(P0)
        consumer.resume(*consumer.paused())
        assert_type(await consumer.lag(), dict[TopicPartition, int])
        assert_type(await consumer.beginning_offsets([P0]), dict[TopicPartition, int])
        assert_type(await consumer.end_offsets(consumer.assignment()), dict[TopicPartition, int])
        found = await consumer.offsets_for_times({P0: 1})
        assert_type(found, dict[TopicPartition, OffsetAndTimestamp | None])
        status = consumer.status()
        assert_type(status, ConsumerStatus)
        assert_type(status.partitions, dict[TopicPartition, str])
        await consumer.unsubscribe()
        consumer.assign([P0])
    by_hand = Consumer(BOOTSTRAP, partitions=[P0])
    await by_hand.start()
    await by_hand.close(timeout_ms=1_000)


async def administer() -> None:
    async with Admin(BOOTSTRAP, default_api_timeout_ms=10_000) as admin:
        await admin.create_topic("orders", partitions=3, replication_factor=3, configs={"retention.ms": "1000"})
        await admin.create_topics([NewTopic("a", partitions=1), NewTopic("b", assignments=[[1, 2]])])
        await admin.create_partitions("a", 2)
        assert_type(await admin.list_topics(internal=True), list[str])
        topic = await admin.describe_topic("orders")
        assert_type(topic, TopicDescription)
        assert_type(topic.partitions, tuple[PartitionDescription, ...])
        assert_type(await admin.describe_topics(["a"]), dict[str, TopicDescription])
        cluster = await admin.describe_cluster()
        assert_type(cluster, ClusterDescription)
        assert_type(cluster.brokers, tuple[BrokerDescription, ...])
        acl = AclBinding(
            ResourcePattern(AclResourceType.TOPIC, "orders", PatternType.PREFIXED),
            AccessControlEntry("User:alice", "*", AclOperation.READ, AclPermissionType.ALLOW),
        )
        try:
            await admin.create_acls([acl])
            password = UserScramCredentialUpsertion("alice", "SCRAM-SHA-256", "secret", iterations=8192)
            await admin.alter_user_scram_credentials([password, UserScramCredentialDeletion("bob", "SCRAM-SHA-512")])
        except AclErrors as failed:
            assert_type(failed.errors, dict[AclBinding, MinibrokerError])
        except UserErrors as some:
            assert_type(some.results, dict[str, tuple[ScramCredentialInfo, ...]])
        except AuthenticationFailed as refused:
            print(refused.reason, refused.user)
        assert_type(await admin.describe_acls(AclFilter(principal="User:alice")), list[AclBinding])
        users = await admin.describe_user_scram_credentials(["alice"])
        assert_type(users, dict[str, tuple[ScramCredentialInfo, ...]])
        assert_type(await admin.delete_acls([AclFilter(AclResourceType.TOPIC, "orders")]), list[AclBinding])
        dirs = await admin.describe_log_dirs([1])
        assert_type(dirs, dict[int, tuple[LogDirDescription, ...]])
        assert_type(dirs[1][0].replicas, Mapping[TopicPartition, LogDirReplica])
        await admin.alter_partition_reassignments({P0: [1, 2, 3], TopicPartition("a", 0): None})
        moving = await admin.list_partition_reassignments([P0])
        assert_type(moving, dict[TopicPartition, PartitionReassignment])
        resource = ConfigResource.of_topic("orders")
        described = await admin.describe_configs([resource, ConfigResource.of_broker(1)], synonyms=True)
        entry = described[resource]["retention.ms"]
        assert_type(entry, ConfigEntry)
        assert_type(entry.source, ConfigSource)
        assert_type(entry.type, ConfigType)
        assert_type(entry.synonyms, tuple[ConfigSynonym, ...])
        assert_type(resource.type, ResourceType)
        change = ConfigChange.set("retention.ms", 1_000)
        assert_type(change.operation, AlterOperation)
        await admin.incremental_alter_configs({resource: [change, ConfigChange.delete("retention.bytes")]})
        entity = QuotaEntity(user="alice", client_id=DEFAULT_ENTITY)
        await admin.alter_client_quotas({entity: {"producer_byte_rate": 1_000, "request_percentage": None}})
        assert_type(await admin.describe_client_quotas(user="alice"), dict[QuotaEntity, dict[str, float]])
        assert_type(await admin.delete_records({P0: -1}), dict[TopicPartition, int])
        offsets = await admin.list_offsets({P0: "max_timestamp", TopicPartition("a", 0): 1_700_000_000_000})
        assert_type(offsets, dict[TopicPartition, OffsetAndTimestamp | None])
        await admin.list_offsets({P0: "latest"}, isolation_level="read_committed", timeout_ms=3_000)
        assert_type(await admin.elect_leaders("preferred", [P0]), dict[TopicPartition, bool])
        assert_type(await admin.list_groups(["Stable"]), list[GroupListing])
        group = (await admin.describe_groups(["billing"]))["billing"]
        assert_type(group, GroupDescription)
        assert_type(group.coordinator, Coordinator)
        assert_type(group.coordinator.address, Address)
        assert_type(group.members, tuple[MemberDescription, ...])
        assert_type(group.rebalances, tuple[GroupRebalance, ...])
        committed = await admin.list_group_offsets("billing")
        assert_type(committed, dict[TopicPartition, OffsetAndMetadata | None])
        await admin.alter_group_offsets("billing", {P0: 7})
        await admin.delete_group_offsets("billing", [P0])
        await admin.delete_groups(["billing"])
        assert_type(await admin.remove_group_members("billing"), list[str])
        assert_type(await admin.list_transactions(states=["Ongoing"], duration_ms=1), list[TransactionListing])
        transaction = (await admin.describe_transactions(["etl"]))["etl"]
        assert_type(transaction, TransactionDescription)
        assert_type(transaction.partitions, tuple[TopicPartition, ...])
        assert_type(await admin.describe_producers([P0]), dict[TopicPartition, tuple[ProducerState, ...]])
        await admin.fence_producers(["etl"])
        await admin.abort_transaction(P0, producer_id=1, producer_epoch=0, coordinator_epoch=0, start_offset=3)
        assert_type(await admin.timeline(), TimelineRead)
        assert_type(admin.timeline_reader(since_ms=1), TimelineReader)
        assert_type(admin.timeline_reader().answer_within_s, float)
        print((await admin.timeline_reader().read()).errors)
        await admin.delete_topic("orders")
        await admin.delete_topics(["a", "b"])
    security: Security = {"security_protocol": "PLAINTEXT", "ssl_cafile": None}
    other = Admin(BOOTSTRAP, **security)
    await other.start()
    await other.close()


# --- blocking ---


async def bills(records: list[Record]) -> AsyncIterator[ProducerRecord]:
    for record in records:
        yield ProducerRecord("bills", record.value, key=record.key)


def bills_blocking(records: list[Record]) -> list[ProducerRecord]:
    return [ProducerRecord("bills", record.value) for record in records]


async def process() -> None:
    for group in ("a", "b"):
        async with Processor(BOOTSTRAP, topics=["orders"], group=group, transactional_id="t", process=bills) as one:
            one.stop()
            assert_type(await one.run(), None)
    other = Processor(BOOTSTRAP, pattern="o.*", group="g", group_instance_id="i", process=lambda _: None)
    await other.start()
    await other.close()
    Processor(BOOTSTRAP, topics=["orders"], group="g", transactional_id="t", process=len)  # type: ignore[arg-type]


def process_blocking() -> None:
    with sync.Processor(
        BOOTSTRAP, topics=["orders"], group="g", transactional_id="t", process=bills_blocking
    ) as processor:
        processor.stop()
        assert_type(processor.run(), None)
    sync.Processor(BOOTSTRAP, topics=["orders"], group="g", transactional_id="t", process=bills)  # type: ignore[arg-type]
    other = sync.Processor(BOOTSTRAP, pattern="o.*", group="g", group_instance_id="i", process=lambda _: None)
    other.start()
    other.close()


def produce_blocking() -> None:
    with sync.Producer(BOOTSTRAP, value_serializer="json", key_serializer=str.encode) as producer:
        delivery = producer.send("orders", {"n": 1}, key="k", headers=[("h", None)], on_delivery=told)
        assert_type(delivery, sync.Delivery)
        assert_type(delivery.done(), bool)
        assert_type(delivery.result(), RecordMetadata)
        assert_type(producer.send("orders", 1, partition=0, timestamp_ms=1).result(timeout_ms=10), RecordMetadata)
        producer.drain()
        batch = producer.send_batch("orders", [1, 2], keys=["k", None], timestamps_ms=[1, 2], partition=0)
        assert_type(batch, sync.BatchDelivery)
        assert_type(batch.done(), bool)
        assert_type(batch.result(timeout_ms=10), BatchMetadata)
        producer.flush()
        producer.flush(timeout_ms=10)
    with sync.Producer(BOOTSTRAP, transactional_id="billing-1", transaction_timeout_ms=10_000) as transactional:
        with transactional.transaction() as transaction:
            assert_type(transaction, sync.Transaction)
            transaction.send_offsets({P0: OffsetAndMetadata(7)}, GroupMetadata("billing"))
        assert_type(transaction.was_committed(), bool)
    other = sync.Producer([BOOTSTRAP], partitioner=by_length)
    other.start()
    other.close(timeout_ms=10)


class CommittingBlocking(sync.RebalanceListener):
    def __init__(self, consumer: sync.Consumer) -> None:
        self.consumer = consumer

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.consumer.commit()

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        print([self.consumer.position(partition) for partition in partitions])

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        print(partitions)


def consume_blocking() -> None:
    with sync.Consumer(BOOTSTRAP, group="billing") as consumer:
        consumer.subscribe(["orders"], listener=CommittingBlocking(consumer))
        consumer.subscribe(pattern="orders-.*")
        assert_type(consumer.subscription(), list[str])
        for record in consumer:
            assert_type(record, Record)
            break
        assert_type(next(consumer), Record)
        assert_type(consumer.batches(), Iterator[ConsumerBatch])
        for batch in consumer.batches():
            assert_type(batch, ConsumerBatch)
            break
        assert_type(consumer.poll(timeout_ms=100, max_records=10), list[Record])
        consumer.commit()
        consumer.commit({P0: 7})
        committing = consumer.commit_nowait({P0: OffsetAndMetadata(7)})
        assert_type(committing, concurrent.futures.Future[None])
        assert_type(consumer.committed(P0), dict[TopicPartition, OffsetAndMetadata | None])
        assert_type(consumer.group_metadata(), GroupMetadata)
        assert_type(consumer.position(P0), int)
        assert_type(consumer.position_epoch(P0), int | None)
        consumer.seek(P0, 3, leader_epoch=1)
        consumer.seek_to_beginning(P0)
        consumer.seek_to_end()
        consumer.seek_to_time(1_700_000_000_000, P0)
        consumer.pause(P0)
        consumer.resume(*consumer.paused())
        assert_type(consumer.lag(), dict[TopicPartition, int])
        assert_type(consumer.beginning_offsets([P0]), dict[TopicPartition, int])
        assert_type(consumer.end_offsets(consumer.assignment()), dict[TopicPartition, int])
        assert_type(consumer.offsets_for_times({P0: 1}), dict[TopicPartition, OffsetAndTimestamp | None])
        assert_type(consumer.status(), ConsumerStatus)
        consumer.unsubscribe()
        consumer.assign([P0])
    by_hand = sync.Consumer(BOOTSTRAP, partitions=[P0])
    by_hand.start()
    by_hand.close(timeout_ms=1_000)


def administer_blocking() -> None:
    with sync.Admin(BOOTSTRAP) as admin:
        admin.create_topic("orders", partitions=3, replication_factor=3, configs={"retention.ms": "1000"})
        admin.create_topics([NewTopic("a", partitions=1)])
        admin.create_partitions("a", 2)
        assert_type(admin.list_topics(internal=True), list[str])
        assert_type(admin.describe_topic("orders"), TopicDescription)
        assert_type(admin.describe_topics(["a"]), dict[str, TopicDescription])
        assert_type(admin.describe_cluster(), ClusterDescription)
        acl = AclBinding(
            ResourcePattern(AclResourceType.TOPIC, "orders"),
            AccessControlEntry("User:alice", "*", AclOperation.READ, AclPermissionType.ALLOW),
        )
        admin.create_acls([acl])
        admin.alter_user_scram_credentials([UserScramCredentialDeletion("bob", "SCRAM-SHA-512")])
        assert_type(admin.describe_acls(AclFilter(principal="User:alice")), list[AclBinding])
        assert_type(admin.describe_user_scram_credentials(), dict[str, tuple[ScramCredentialInfo, ...]])
        assert_type(admin.delete_acls([AclFilter(AclResourceType.TOPIC, "orders")]), list[AclBinding])
        assert_type(admin.describe_log_dirs([1]), dict[int, tuple[LogDirDescription, ...]])
        admin.alter_partition_reassignments({P0: [1, 2, 3]})
        assert_type(admin.list_partition_reassignments([P0]), dict[TopicPartition, PartitionReassignment])
        resource = ConfigResource.of_all_brokers()
        admin.describe_configs([ConfigResource.of_broker_logger(1)])
        described = admin.describe_configs([resource], names=["retention.ms"])
        assert_type(described, dict[ConfigResource, dict[str, ConfigEntry]])
        admin.incremental_alter_configs({resource: [ConfigChange.append("a", "b")]}, validate_only=True)
        admin.alter_client_quotas({QuotaEntity(client_id="a"): {"consumer_byte_rate": 1e6}}, validate_only=True)
        assert_type(admin.describe_client_quotas(), dict[QuotaEntity, dict[str, float]])
        assert_type(admin.delete_records({P0: -1}), dict[TopicPartition, int])
        assert_type(admin.list_offsets({P0: "latest"}), dict[TopicPartition, OffsetAndTimestamp | None])
        assert_type(admin.elect_leaders("unclean"), dict[TopicPartition, bool])
        assert_type(admin.list_groups(), list[GroupListing])
        assert_type(admin.describe_groups(["billing"]), dict[str, GroupDescription])
        committed = admin.list_group_offsets("billing", [P0])
        assert_type(committed, dict[TopicPartition, OffsetAndMetadata | None])
        admin.alter_group_offsets("billing", {P0: OffsetAndMetadata(7)})
        admin.delete_group_offsets("billing", [P0])
        assert_type(admin.remove_group_members("billing", ["worker-1"]), list[str])
        admin.delete_groups(["billing"])
        assert_type(admin.list_transactions(producer_ids=[1]), list[TransactionListing])
        assert_type(admin.describe_transactions(["etl"]), dict[str, TransactionDescription])
        assert_type(admin.describe_producers([P0]), dict[TopicPartition, tuple[ProducerState, ...]])
        admin.fence_producers(["etl"])
        admin.abort_transaction(P0, producer_id=1, producer_epoch=0, coordinator_epoch=0, start_offset=3)
        print(admin.timeline().entries)
        reader = admin.timeline_reader()
        assert_type(reader, sync.TimelineReader)
        print(reader.read().errors)
        admin.delete_topic("orders")
        admin.delete_topics(["a"])
    other = sync.Admin(BOOTSTRAP)
    other.start()
    other.close()


# --- a cluster inside a test ---


async def break_cluster() -> None:
    async with testing.LocalCluster(
        2, topics=["a", NewTopic("b")], settings={"x": "y"}, broker_settings={2: {"x": "z"}}
    ) as cluster:
        assert_type(cluster.bootstrap_servers, str)
        assert_type(await cluster.add_user("alice"), Security)
        print(cluster.ssl_bootstrap_servers, cluster.security("alice"), cluster.certificates.authority)
        print(cluster.directory / "logs", cluster.log_of("zookeeper").read_text())
        assert_type(await cluster.find("all"), list[testing.Member])
        assert_type(await cluster.evidence(), str)
        await cluster.create_topics(["c"])
        await cluster.delete_topics(["c"])
        assert_type(await cluster.kill("leader:a-0"), list[testing.Member])
        await cluster.start(1)
        await cluster.stop("controller")
        await cluster.pause(1)
        await cluster.resume(1)
        await cluster.isolate(1)
        await cluster.cut(1, "zookeeper")
        await cluster.cut("leader:a-0", 2, one_way=True)
        await cluster.slow_network(1, 0.1, between=2)
        await cluster.drop_connections(1)
        await cluster.move_clock(1, -60)
        assert_type(await cluster.move_coordinator("coordinator:g"), list[testing.Member])
        assert_type(await cluster.fill_disk("controller"), list[testing.Member])
        await cluster.break_disk(1)
        await cluster.slow_disk(1, 0.2, write_delay_s=0.1)
        await cluster.mend_disk(1)
        await cluster.heal()
        await cluster.restore()
        try:
            await cluster.wait_healthy(timeout_s=1)
        except testing.LaunchTimedOut:
            raise
        except testing.LaunchError as error:
            print(error)


def break_cluster_blocking() -> None:
    with testing.SyncLocalCluster(2, topics=["a"], settings={"x": "y"}, broker_settings={2: {"x": "z"}}) as cluster:
        assert_type(cluster.bootstrap_servers, str)
        assert_type(cluster.add_user("alice"), Security)
        print(cluster.ssl_bootstrap_servers, cluster.security("alice"), cluster.certificates.authority)
        print(cluster.directory / "logs", cluster.log_of(1).read_text())
        assert_type(cluster.find(1), list[testing.Member])
        assert_type(cluster.evidence(), str)
        cluster.create_topics(["c"])
        cluster.delete_topics(["c"])
        assert_type(cluster.kill("leader:a-0"), list[testing.Member])
        cluster.start(1)
        cluster.stop("controller")
        cluster.pause(1)
        cluster.resume(1)
        cluster.isolate(1)
        cluster.cut(1, "zookeeper")
        cluster.cut("leader:a-0", 2, one_way=True)
        cluster.slow_network(1, 0.1, between=2)
        cluster.drop_connections(1)
        cluster.move_clock(1, -60)
        assert_type(cluster.move_coordinator("transactions:t"), list[testing.Member])
        assert_type(cluster.fill_disk("controller"), list[testing.Member])
        cluster.break_disk(1)
        cluster.slow_disk(1, 0.2, write_delay_s=0.1)
        cluster.mend_disk(1)
        cluster.heal()
        cluster.restore()
        cluster.wait_healthy(timeout_s=1)
        assert_type(testing.LocalCluster.around(cluster), testing.LocalCluster)


# --- errors ---


def explain(error: MinibrokerError) -> object:
    match error:
        case BrokerError(code=code):
            return assert_type(code, ErrorCode)
        case BatchDeliveryFailed(indexes=indexes, metadata=metadata):
            assert_type(metadata, BatchMetadata)
            return assert_type(indexes, tuple[int, ...])
        case DeliveryFailed(failures=failures):
            return assert_type(failures, tuple[FailedRecord, ...])
        case TopicErrors(errors=by_topic):
            return assert_type(by_topic, dict[str, MinibrokerError])
        case TransactionalIdErrors(results=of_ids):
            return assert_type(of_ids, dict[str, TransactionDescription])
        case ProducerErrors(results=of_producers):
            return assert_type(of_producers, dict[TopicPartition, tuple[ProducerState, ...]])
        case OffsetErrors(results=found):
            return assert_type(found, dict[TopicPartition, OffsetAndTimestamp | None])
        case GroupErrors(results=of_groups):
            return of_groups
        case PartitionErrors(errors=by_partition) | CommitFailed(errors=by_partition):
            return by_partition
        case BrokersFailed(results=of_brokers):
            return of_brokers
        case ConfigErrors(results=of_resources):
            return of_resources
        case QuotaErrors(errors=of_entities):
            return of_entities
        case CorruptBatch(next_offset=offset):
            return assert_type(offset, int | None)
        case LogTruncated(diverging_offset=offset):
            return assert_type(offset, int)
        case InvalidSetting(name=name):
            return assert_type(name, str)
        case DeserializationFailed() | SerializationFailed() | PartitionerFailed() | InvalidAssignment():
            return "the user's own functions"
        case ApiTimedOut() | DeliveryTimedOut() | BufferFull() | NetworkError() | MaxPollIntervalExceeded():
            return "try again"
        case Closed() | ClientCrashed() | WrongEventLoop() | WithinListener() | ForkedClient():
            return "make another client"
        case ProducerFenced(is_commit_unknown=is_commit_unknown):
            return assert_type(is_commit_unknown, bool)
        case TransactionAborted() | CommitOutcomeUnknown() | InvalidTransactionState():
            return "repeat it, or find out"
        case TransactionError(is_fatal=is_fatal):
            return assert_type(is_fatal, bool)
        case ListenerTimedOut():
            return "a shorter listener"
        case PartialFailure(errors=errors):
            return list(errors)
        case _:
            return error


if __name__ == "__main__":
    asyncio.run(produce())
    main()

"""Administrators list, describe and end transactions, hanging ones included."""

from __future__ import annotations

from functools import partial

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.transactions import ProducerErrors, TransactionalIdErrors, TransactionListing
from minibroker.client.cli.hanging import OpenTransaction, hanging, longest_timeout_ms
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.transactions.raw_transactions import RawProducer
from tests.simulation.scenarios.transactions.test_coordinator import P0, P1, with_topic

E = ErrorCode
UNVERIFIED = {"transaction.partition.verification.enable": "false"}
"""Leaders append what no coordinator knows, as Kafka's did before KIP-890."""


def code_of(error: MinibrokerError) -> ErrorCode:
    assert isinstance(error, BrokerError)
    return error.code


async def stable_offset(admin: Admin, partition: TopicPartition) -> int:
    found = (await admin.list_offsets({partition: "latest"}, isolation_level="read_committed"))[partition]
    assert found is not None
    return found.offset


@run_by(with_topic)
async def test_transactions_are_listed_and_described_by_their_coordinators(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        assert await admin.list_transactions() == []
        first, second = RawProducer(cluster, world, "a"), RawProducer(cluster, world, "b")
        for producer in (first, second):
            assert await producer.init() is E.NONE
        assert await first.send(P1, b"1") is E.NONE
        assert await first.send(P0, b"1") is E.NONE
        ongoing = TransactionListing("a", first.producer_id, "Ongoing")
        empty = TransactionListing("b", second.producer_id, "Empty")
        assert await admin.list_transactions() == [ongoing, empty]
        assert await admin.list_transactions(states=["Ongoing", "PrepareCommit"]) == [ongoing]
        assert await admin.list_transactions(producer_ids=[second.producer_id]) == [empty]
        assert await admin.list_transactions(duration_ms=0) == [ongoing]
        assert await admin.list_transactions(duration_ms=3_600_000) == []

        with pytest.raises(TransactionalIdErrors) as failed:
            await admin.describe_transactions(["a", "b", "c"])
        assert code_of(failed.value.errors["c"]) is E.TRANSACTIONAL_ID_NOT_FOUND
        described = failed.value.results["a"]
        assert described.partitions == (P0, P1)
        assert (described.producer_id, described.producer_epoch) == (first.producer_id, 0)
        assert (described.state, described.timeout_ms) == ("Ongoing", 60_000)
        assert described.started_ms is not None
        assert described.coordinator.node_id == await first.find_coordinator()
        assert failed.value.results["b"].started_ms is None

        [producing] = (await admin.describe_producers([P0]))[P0]
        assert (producing.producer_id, producing.producer_epoch) == (first.producer_id, 0)
        assert (producing.current_txn_start_offset, producing.coordinator_epoch) == (0, None)
        assert await first.end() is E.NONE
        await first.until_state("CompleteCommit")
        [producing] = (await admin.describe_producers([P0]))[P0]
        assert producing.current_txn_start_offset is None
        assert producing.coordinator_epoch is not None
        nowhere = TopicPartition("nowhere", 0)
        with pytest.raises(ProducerErrors) as unknown:
            await admin.describe_producers([nowhere, P0])
        assert code_of(unknown.value.errors[nowhere]) is E.UNKNOWN_TOPIC_OR_PARTITION
        assert unknown.value.results == {P0: (producing,)}


@run_by(with_topic)
async def test_fencing_aborts_the_open_transaction_and_stops_its_producer(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        producer = RawProducer(cluster, world)
        assert await producer.init() is E.NONE
        assert await producer.send(P0, b"never") is E.NONE
        assert await stable_offset(admin, P0) == 0
        before = (await admin.describe_transactions(["t"]))["t"]
        await admin.fence_producers(["t"])
        assert await stable_offset(admin, P0) == 2
        assert await producer.send(P0, b"late") is E.INVALID_PRODUCER_EPOCH
        assert await producer.end() is E.PRODUCER_FENCED
        after = (await admin.describe_transactions(["t"]))["t"]
        assert (after.state, after.timeout_ms) == ("Empty", before.timeout_ms)
        assert await producer.init() is E.NONE
        assert await producer.send(P0, b"next") is E.NONE
        assert await producer.end() is E.NONE


@run_by(with_topic)
async def test_fencing_an_unknown_id_creates_none(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        with pytest.raises(TransactionalIdErrors) as failed:
            await admin.fence_producers(["typo"])
        assert code_of(failed.value.errors["typo"]) is E.TRANSACTIONAL_ID_NOT_FOUND
        assert await admin.list_transactions() == []


@run_by(partial(with_topic, settings=UNVERIFIED))
async def test_a_hanging_transaction_is_found_and_aborted(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        old = RawProducer(cluster, world, "old", raises_epoch=False)
        assert await old.init() is E.NONE
        assert await old.send(P0, b"hangs") is E.NONE
        new = RawProducer(cluster, world, "new")
        assert await new.init() is E.NONE
        assert await new.send(P0, b"is known") is E.NONE
        assert await new.send(P1, b"is known") is E.NONE
        later_ms = world.clock.wall_ms() + 1
        producers = await admin.describe_producers([P0, P1])
        found = await hanging(admin, producers, later_ms)
        [producer] = [each for each in producers[P0] if each.producer_id == old.producer_id]
        assert found == [OpenTransaction(P0, producer)]
        assert await hanging(admin, producers, later_ms - await longest_timeout_ms(admin)) == []

        assert await new.end() is E.NONE
        await new.until_state("CompleteCommit")
        assert await stable_offset(admin, P0) == 0
        assert producer.current_txn_start_offset == 0
        abort = partial(
            admin.abort_transaction, P0, producer_id=old.producer_id, coordinator_epoch=0, producer_epoch=old.epoch
        )
        await abort(start_offset=1)
        assert await stable_offset(admin, P0) == 0
        await abort(start_offset=0)
        assert await stable_offset(admin, P0) == 4
        assert await hanging(admin, producers, later_ms) == []
        assert await hanging(admin, await admin.describe_producers([P0, P1]), world.clock.wall_ms() + 1) == []


@run_by(partial(with_topic, settings=UNVERIFIED))
async def test_a_late_abort_does_not_end_the_next_transaction_of_the_producer(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        old = RawProducer(cluster, world, "old", raises_epoch=False)
        assert await old.init() is E.NONE
        assert await old.send(P0, b"hangs") is E.NONE
        abort = partial(
            admin.abort_transaction, P0, producer_id=old.producer_id, producer_epoch=old.epoch, coordinator_epoch=0
        )
        await abort(start_offset=0)
        end = await stable_offset(admin, P0)
        assert await old.send(P0, b"next") is E.NONE
        await abort(start_offset=0)
        assert await stable_offset(admin, P0) == end
        await abort(start_offset=end)
        assert await stable_offset(admin, P0) == end + 2

"""Transactions that another process ends than the one that wrote them, against a scripted cluster."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.coordinators import Coordinators, KeyType
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import TransactionAborted
from minibroker.client.producer import Producer
from minibroker.client.transactions.prepared import PreparedTransaction, end_prepared, fence, is_open, prepare
from minibroker.protocol.apis import DESCRIBE_TRANSACTIONS, END_TXN, PRODUCE
from minibroker.protocol.errors import ErrorCode
from tests.running import run_by
from tests.unit.client.scripted_broker import CARRY_OUT_AND_DROP, ScriptedCluster, reject
from tests.unit.client.transactions.test_producer_transactions import committed, ends, producer_of, run

E = ErrorCode


def coordinators_of(producer: Producer) -> Coordinators:
    runtime: ClientRuntime = producer._runtime
    return Coordinators(runtime, Purpose.REQUESTS, KeyType.TRANSACTION)


async def prepared(cluster: ScriptedCluster) -> PreparedTransaction:
    """Write a record in a transaction, and leave it open."""
    async with producer_of(cluster) as producer, producer.transaction() as transaction:
        producer.send("orders", b"a", partition=0)
        identity = await prepare(transaction)
    assert identity is not None
    return identity


@run_by(run)
async def test_a_prepared_transaction_is_committed_by_another_client_even_if_the_answer_is_lost(
    cluster: ScriptedCluster, /
) -> None:
    identity = await prepared(cluster)
    assert (ends(cluster), committed(cluster)) == ([], [])
    async with Producer(cluster.bootstrap, retry_backoff_ms=5) as other:
        coordinators = coordinators_of(other)
        cluster.script(DESCRIBE_TRANSACTIONS, reject(E.NOT_COORDINATOR))
        assert await is_open(coordinators, identity, 10)
        cluster.script(END_TXN, CARRY_OUT_AND_DROP)
        assert await end_prepared(coordinators, identity, committed=True, timeout_s=10) is E.NONE
        assert await end_prepared(coordinators, identity, committed=True, timeout_s=10) is E.NONE
        assert not await is_open(coordinators, identity, 10)
    assert committed(cluster) == [b"a"]


@run_by(run)
async def test_the_end_of_a_prepared_transaction_says_whether_it_was_aborted_or_taken(
    cluster: ScriptedCluster, /
) -> None:
    identity = await prepared(cluster)
    async with Producer(cluster.bootstrap, retry_backoff_ms=5) as other:
        coordinators = coordinators_of(other)
        cluster.transactions.time_out("t")
        assert await end_prepared(coordinators, identity, committed=True, timeout_s=10) is E.TRANSACTION_ABORTABLE
        await fence(coordinators, "t", 10)
        assert await end_prepared(coordinators, identity, committed=True, timeout_s=10) is E.PRODUCER_FENCED
        again = await prepared(cluster)
        await fence(coordinators, "t", 10)
        assert not await is_open(coordinators, again, 10)
    assert committed(cluster) == []


@run_by(run)
async def test_a_transaction_without_records_or_with_a_failed_one_is_not_prepared(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        async with producer.transaction() as transaction:
            assert await prepare(transaction) is None
        cluster.script(PRODUCE, reject(E.INVALID_RECORD))
        with pytest.raises(TransactionAborted):  # noqa: PT012
            async with producer.transaction() as transaction:
                producer.send("orders", b"a", partition=0)
                await asyncio.sleep(0)
                await prepare(transaction)
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"b"]

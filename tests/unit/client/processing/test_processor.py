"""Processors against a scripted cluster: which batches are repeated, from where, and what `run` raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from minibroker.client.errors import (
    Closed,
    CommitFailed,
    InvalidSetting,
    InvalidTransactionState,
    ProducerFenced,
    SerializationFailed,
    TransactionAborted,
)
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import Process, ProducerRecord
from minibroker.client.processor import Processor
from minibroker.client.producer import Producer
from minibroker.protocol.apis import END_TXN, OFFSET_FETCH, PRODUCE, TXN_OFFSET_COMMIT, Api
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from tests.running import run_by
from tests.unit.client.scripted_broker import (
    CARRY_OUT_AND_DROP,
    CARRY_OUT_AND_HANG,
    DROP,
    HANG,
    Action,
    Received,
    ScriptedCluster,
    reject,
)

E = ErrorCode
GROUP = "billing"


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(1) as cluster:
            cluster.add_topic("orders")
            cluster.add_topic("bills")
            await scenario(cluster)

    asyncio.run(main())


async def send(cluster: ScriptedCluster, *values: bytes) -> None:
    async with Producer(cluster.bootstrap) as producer:
        for value in values:
            await producer.send("orders", value)


def processor_of(cluster: ScriptedCluster, process: Process, **settings: Any) -> Processor:
    given: dict[str, Any] = {
        "topics": ["orders"],
        "group": GROUP,
        "transactional_id": "billing-1",
        "max_poll_records": 2,
        "retry_backoff_ms": 5,
    }
    return Processor(cluster.bootstrap, process=process, **(given | settings))


def billed(cluster: ScriptedCluster) -> list[bytes | None]:
    return cluster.log("bills").committed_values()


def committed(cluster: ScriptedCluster) -> int | None:
    """Return the group's offset."""
    found = [at.offset for (topic, _), at in cluster.groups.group(GROUP).offsets.items() if topic == "orders"]
    return found[0] if found else None


class Billing:
    """Bills each record, and stops the processor after that many. `errors` are raised by the first calls."""

    def __init__(self, count: int, *errors: Exception) -> None:
        self.processor: Processor
        self.calls: list[list[bytes]] = []
        self._left = count
        self._errors = list(errors)

    def __call__(self, records: list[Record]) -> list[ProducerRecord]:
        self.calls.append([record.value for record in records])
        if self._errors:
            raise self._errors.pop(0)
        if records[-1].offset == self._left - 1:
            self.processor.stop()
        return [ProducerRecord("bills", b"bill of " + record.value) for record in records]

    async def run(self, cluster: ScriptedCluster, **settings: Any) -> None:
        async with processor_of(cluster, self, **settings) as self.processor:
            await self.processor.run()


BILLS = [b"bill of a", b"bill of b", b"bill of c"]
IN_ORDER = [[b"a", b"b"], [b"c"]]


# --- what is processed ---


@run_by(run)
async def test_each_poll_is_a_transaction_and_stop_ends_after_its_batch(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a", b"b", b"c")
    billing = Billing(3)
    await billing.run(cluster)
    assert (billing.calls, billed(cluster)) == (IN_ORDER, BILLS)
    assert [end.committed for end in cluster.requests(END_TXN)] == [True, True]
    offsets = [p.committed_offset for r in cluster.requests(TXN_OFFSET_COMMIT) for t in r.topics for p in t.partitions]
    assert offsets == [2, 3]


async def coroutine(records: list[Record]) -> list[ProducerRecord]:
    return [ProducerRecord("bills", record.value) for record in records]


async def asynchronous_generator(records: list[Record]) -> AsyncIterator[ProducerRecord]:
    for record in records:
        yield ProducerRecord("bills", record.value)


def generator(records: list[Record]) -> Iterator[ProducerRecord]:
    for record in records:
        yield ProducerRecord("bills", record.value)


def nothing(records: list[Record]) -> None:
    """Keep no record."""


@pytest.mark.parametrize("process", [coroutine, asynchronous_generator, generator, nothing])
def test_the_function_may_be_of_any_kind(process: Process) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await send(cluster, b"a", b"b")
        async with processor_of(cluster, process) as processor:
            running = asyncio.ensure_future(processor.run())
            await cluster.until(lambda: bool(cluster.requests(END_TXN)))
            processor.stop()
            await running
        assert billed(cluster) == ([] if process is nothing else [b"a", b"b"])
        assert committed(cluster) == 2

    run(scenario)


@pytest.mark.parametrize("returned", [[("bills", b"x")], ProducerRecord("bills", b"x"), 7])
def test_other_results_are_refused(returned: Any) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await send(cluster, b"a")
        async with processor_of(cluster, lambda _: returned) as processor:
            with pytest.raises(TypeError, match="return "):
                await processor.run()
        assert (billed(cluster), cluster.requests(END_TXN)) == ([], [])

    run(scenario)


@run_by(run)
async def test_transactions_keep_their_distance(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")
    clock = asyncio.get_running_loop()
    times: list[float] = []

    def process(records: list[Record]) -> None:
        times.append(clock.time())

    async with processor_of(cluster, process, commit_interval_ms=300) as processor:
        running = asyncio.ensure_future(processor.run())
        await cluster.until(lambda: len(times) == 1)
        await send(cluster, b"b")
        await send(cluster, b"c")
        await cluster.until(lambda: committed(cluster) == 3)
        processor.stop()
        await running
    assert times[1] - times[0] >= 0.29


# --- failures of the function ---


@run_by(run)
async def test_an_exception_propagates_and_the_next_run_repeats_the_batch(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a", b"b", b"c")
    billing = Billing(3, ZeroDivisionError(), BrokerError(E.NOT_COORDINATOR))
    async with processor_of(cluster, billing) as billing.processor:
        with pytest.raises(ZeroDivisionError):
            await billing.processor.run()
        with pytest.raises(BrokerError):  # of the function: not one that is repeated
            await billing.processor.run()
        assert billed(cluster) == []
        await billing.processor.run()
    assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], [b"a", b"b"], *IN_ORDER], BILLS)


@run_by(run)
async def test_a_result_that_cannot_be_sent_aborts_and_is_raised(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")

    def process(records: list[Record]) -> list[ProducerRecord]:
        return [ProducerRecord("bills", b"good"), ProducerRecord("bills", b"bad", key=object())]

    async with processor_of(cluster, process, key_serializer="json") as processor:
        with pytest.raises(SerializationFailed):
            await processor.run()
    assert billed(cluster) == []
    assert committed(cluster) is None


# --- failures of transactions ---


@pytest.mark.parametrize(
    ("api", "action"),
    [
        (PRODUCE, reject(E.INVALID_TXN_STATE)),
        (PRODUCE, reject(E.INVALID_PRODUCER_EPOCH)),
        (TXN_OFFSET_COMMIT, reject(E.ILLEGAL_GENERATION)),
        (TXN_OFFSET_COMMIT, reject(E.UNKNOWN_MEMBER_ID)),
        (TXN_OFFSET_COMMIT, reject(E.TRANSACTION_ABORTABLE)),
        (END_TXN, reject(E.TRANSACTION_ABORTABLE)),
    ],
    ids=lambda value: value.name if isinstance(value, Api) else str(value.code.name),
)
def test_after_an_abort_the_batch_comes_again_from_the_committed_offset(api: Api[Any, Any], action: Action) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await send(cluster, b"a", b"b", b"c")
        cluster.script(api, Action(), action)  # the second transaction fails
        billing = Billing(3)
        await billing.run(cluster)
        assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], [b"c"], [b"c"]], BILLS)

    run(scenario)


@run_by(run)
async def test_without_a_committed_offset_it_goes_back_to_the_first_record_of_the_batch(
    cluster: ScriptedCluster, /
) -> None:
    await send(cluster, b"before")
    started = asyncio.Event()
    billing = Billing(3)
    cluster.script(TXN_OFFSET_COMMIT, reject(E.ILLEGAL_GENERATION))
    async with processor_of(cluster, billing, auto_offset_reset="latest") as billing.processor:
        running = asyncio.ensure_future(billing.processor.run())
        while not billing.processor._consumer.assignment():
            await asyncio.sleep(0.01)
        await billing.processor._consumer.position(billing.processor._consumer.assignment()[0])
        started.set()
        await send(cluster, b"a", b"b")
        await running
    assert billing.calls[0][0] == b"a"
    assert billed(cluster) == [b"bill of a", b"bill of b"]


@pytest.mark.parametrize("action", [CARRY_OUT_AND_HANG, CARRY_OUT_AND_DROP, HANG, DROP])
def test_a_commit_without_an_answer_is_found_out_and_not_repeated(action: Action) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await send(cluster, b"a", b"b", b"c")
        cluster.script(END_TXN, *[action] * 3)
        billing = Billing(3)
        await billing.run(
            cluster,
            request_timeout_ms=500,
            transaction_timeout_ms=1_500,
            producer_settings={"max_block_ms": 1_500, "delivery_timeout_ms": 60_000},
        )
        assert (billing.calls, billed(cluster)) == (IN_ORDER, BILLS)

    run(scenario)


@run_by(run)
async def test_an_aborted_commit_that_was_not_answered_is_repeated(cluster: ScriptedCluster, /) -> None:
    """The coordinator aborts the transaction by its time-out while the producer waits for the answer."""
    await send(cluster, b"a", b"b", b"c")

    def hang_twice(received: Received) -> Action | None:
        count = len(cluster.requests(END_TXN))
        if received.api is not END_TXN or count > 2:
            return None
        if count == 2:
            cluster.transactions.time_out("billing-1")
        return HANG

    cluster.rules.append(hang_twice)
    billing = Billing(3)
    settings = {"transaction_timeout_ms": 150, "request_timeout_ms": 100, "producer_settings": {"max_block_ms": 150}}
    await billing.run(cluster, **settings)
    assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], *IN_ORDER], BILLS)


@pytest.mark.parametrize("code", [E.INVALID_GROUP_ID, E.FENCED_INSTANCE_ID, E.OFFSET_METADATA_TOO_LARGE])
def test_errors_that_repeating_does_not_end_are_raised(code: ErrorCode) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await send(cluster, b"a")
        cluster.script(TXN_OFFSET_COMMIT, reject(code))
        with pytest.raises(TransactionAborted) as raised:
            await Billing(1).run(cluster)
        assert isinstance(raised.value.__cause__, CommitFailed)
        assert isinstance(raised.value.reason, BrokerError)
        assert raised.value.reason.code is code
        assert (billed(cluster), committed(cluster)) == ([], None)

    run(scenario)


@run_by(run)
async def test_a_refused_result_is_raised_with_its_reason(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")
    cluster.script(PRODUCE, reject(E.INVALID_RECORD))
    with pytest.raises(TransactionAborted) as raised:
        await Billing(1).run(cluster)
    assert isinstance(raised.value.reason, BrokerError)
    assert raised.value.reason.code is E.INVALID_RECORD


@run_by(run)
async def test_a_twin_fences_the_processor_for_good(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")
    billing = Billing(1)
    async with processor_of(cluster, billing) as billing.processor:
        async with Producer(cluster.bootstrap, transactional_id="billing-1"):
            pass
        for _ in range(2):
            with pytest.raises(ProducerFenced, match="billing-1"):
                await billing.processor.run()
    assert billed(cluster) == []


@run_by(run)
async def test_it_goes_back_once_the_coordinator_answers(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")
    cluster.script(TXN_OFFSET_COMMIT, reject(E.ILLEGAL_GENERATION))

    def process(records: list[Record]) -> list[ProducerRecord]:
        cluster.script(OFFSET_FETCH, *[reject(E.UNSTABLE_OFFSET_COMMIT)] * 3)
        return billing(records)

    billing = Billing(1)
    async with processor_of(cluster, process) as billing.processor:
        await billing.processor.run()
    assert billed(cluster) == [b"bill of a"]


# --- its life ---


@run_by(run)
async def test_stop_ends_a_run_that_waits_for_records(cluster: ScriptedCluster, /) -> None:
    async with processor_of(cluster, nothing) as processor:
        running = asyncio.ensure_future(processor.run())
        await cluster.until(lambda: bool(cluster.requests(OFFSET_FETCH)))
        began = asyncio.get_running_loop().time()
        processor.stop()
        await running
        assert asyncio.get_running_loop().time() - began < 10
        processor.stop()
        await processor.run()  # `stop` came before


@run_by(run)
async def test_stop_gives_up_repeating_after_a_while(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a")
    cluster.script(TXN_OFFSET_COMMIT, *[reject(E.ILLEGAL_GENERATION)] * 1_000)
    async with asyncio.timeout(20):
        billing = Billing(1)
        await billing.run(cluster, transaction_timeout_ms=200)
    assert billed(cluster) == []
    assert len(billing.calls) > 1


@run_by(run)
async def test_close_aborts_and_a_cancelled_run_may_be_continued(cluster: ScriptedCluster, /) -> None:
    await send(cluster, b"a", b"b", b"c")
    holds = asyncio.Event()
    calls = 0

    async def process(records: list[Record]) -> list[ProducerRecord]:
        nonlocal calls
        calls += 1
        if calls != 2:
            holds.set()
            await asyncio.Event().wait()
        return await coroutine(records)

    async with processor_of(cluster, process) as processor:
        running = asyncio.ensure_future(processor.run())
        await holds.wait()
        with pytest.raises(InvalidTransactionState, match="under way"):
            await processor.run()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        holds.clear()
        again = asyncio.ensure_future(processor.run())
        await holds.wait()
        await processor.close()
        with pytest.raises(Closed):
            await again
        with pytest.raises(Closed):
            await processor.run()
    assert billed(cluster) == [b"a", b"b"]


@run_by(run)
async def test_a_processor_that_cannot_start_leaves_nothing_open(cluster: ScriptedCluster, /) -> None:
    processor = processor_of(cluster, nothing, topics=["missing"], consumer_settings={"default_api_timeout_ms": 50})
    with pytest.raises(MinibrokerError):
        await processor.start()
    with pytest.raises(Closed):
        await processor.run()


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"process": 3}, "process"),
        ({"transactional_id": None}, "transactional_id"),
        ({"topics": None}, "topics"),
        ({"commit_interval_ms": -1}, "commit_interval_ms"),
        ({"consumer_settings": {"group": "x"}}, r"consumer_settings\['group'\]"),
        ({"consumer_settings": {"enable_auto_commit": True}}, "enable_auto_commit"),
        ({"producer_settings": {"transactional_id": "x"}}, r"producer_settings\['transactional_id'\]"),
        ({"producer_settings": {"acks": 1}}, "transactional_id"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"process": nothing, "topics": ["orders"], "group": GROUP, "transactional_id": "t"}
    with pytest.raises(InvalidSetting, match=named):
        Processor("127.0.0.1:1", **(given | settings))


def test_the_name_of_a_static_member_is_the_transactional_id() -> None:
    processor = Processor("127.0.0.1:1", process=nothing, topics=["orders"], group=GROUP, group_instance_id="one")
    assert processor._producer._transactions is not None
    assert processor._producer._transactions.transactional_id == "billing-one"

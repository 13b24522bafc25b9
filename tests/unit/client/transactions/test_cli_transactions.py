"""`minibroker transactions`: its output, its questions and its refusals."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from minibroker import application
from minibroker.broker.transactions.states import TransactionState
from minibroker.client.administering.transactions import ProducerState, TransactionDescription
from minibroker.client.cli.hanging import OpenTransaction, open_transactions, still_open, unknown_to_all
from minibroker.client.cli.terminal.output import run_app
from minibroker.client.cli.transactions import not_open, sentence
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_PRODUCERS, INIT_PRODUCER_ID, LIST_TRANSACTIONS, WRITE_TXN_MARKERS
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.administering.administered_transactions import TransactionCluster
from tests.unit.client.scripted_broker import DROP, reject

P0, P1 = (TopicPartition("orders", number) for number in range(2))
S = TransactionState
HANGS = m.ActiveProducer(7, 2, 5, 86_400_000, 4, 30)
"""A producer whose transaction is in no coordinator."""
KNOWN = m.ActiveProducer(8, 3, 5, 86_400_000, -1, 40)
"""The producer of `etl`."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Coroutine[Any, Any, Ended]]


class Terminal(io.StringIO):
    """A user at a terminal who answers."""

    def isatty(self) -> bool:
        return True


def typed(cluster: TransactionCluster, *arguments: str, answer: str | None = None) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        patched.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer + "\n"))
        code = run_app(application(), ["transactions", *arguments, "--bootstrap", cluster.bootstrap])
    return Ended(code, out.getvalue(), err.getvalue())


def run(scenario: Callable[[TransactionCluster, Command], Coroutine[Any, Any, None]]) -> None:
    """Broker 1 coordinates `etl`, which has an open transaction in both partitions of `orders`, and `idle`. In
    orders-0 hangs a transaction, too."""

    async def main() -> None:
        cluster = TransactionCluster(3)
        async with asyncio.timeout(60), cluster:
            cluster.add_topic("orders", 2)
            cluster.transactions.coordinator = 1
            cluster.add_transaction("etl", S.ONGOING, 8, P0, P1)
            cluster.add_transaction("idle", S.COMPLETE_ABORT, 9)
            cluster.producers = {P0: [HANGS, KNOWN], P1: [KNOWN]}

            async def command(*arguments: str, answer: str | None = None) -> Ended:
                return await asyncio.to_thread(typed, cluster, *arguments, answer=answer)

            await scenario(cluster, command)

    asyncio.run(main())


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- list, describe ------------------------------------------------------------------------------------------------


@run_by(run)
async def test_transactional_ids_are_listed_by_state_and_producer(
    cluster: TransactionCluster, command: Command, /
) -> None:
    assert table((await command("list")).out) == [
        ["transactional", "id", "producer", "state"],
        ["etl", "8", "Ongoing"],
        ["idle", "9", "CompleteAbort"],
    ]
    assert json.loads((await command("list", "--state", "Ongoing", "--format", "json")).out) == [
        {"transactional_id": "etl", "producer_id": 8, "state": "Ongoing"}
    ]
    assert table((await command("list", "--producer-id", "9")).out)[1:] == [["idle", "9", "CompleteAbort"]]
    ended = await command("list", "--state", "ongoing")
    assert ended.code == 2
    assert "give one of Empty, Ongoing, PrepareCommit" in ended.err


@run_by(run)
async def test_a_very_long_transactional_id_does_not_widen_the_table(
    cluster: TransactionCluster, command: Command, /
) -> None:
    cluster.add_transaction("x" * 30_000, S.COMPLETE_ABORT, 10)
    lines = (await command("list")).out.splitlines()
    assert max(map(len, lines)) < 200
    assert any("x" * 100 + "... (30,000 characters)  10" in line for line in lines)
    listed = json.loads((await command("list", "--format", "json")).out)
    assert "x" * 30_000 in [each["transactional_id"] for each in listed]


def test_a_broker_that_does_not_answer_is_named_after_the_transactions_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minibroker.client.cli.command_admin.API_TIMEOUT_MS", 2_000)

    async def scenario(cluster: TransactionCluster, command: Command) -> None:
        cluster.rules.append(lambda r: DROP if r.api is LIST_TRANSACTIONS and r.node_id == 0 else None)
        ended = await command("list")
        assert ended.code == 1
        assert len(table(ended.out)) == 3
        assert ended.err.startswith("error: broker 0: ")

    run(scenario)


@run_by(run)
async def test_a_transaction_is_described_with_its_partitions(cluster: TransactionCluster, command: Command, /) -> None:
    first, _, *rest = (await command("describe", "etl")).out.splitlines()
    assert first.startswith("etl: Ongoing for ")
    assert first.endswith(
        f" s, time-out 60 s, producer 8 in epoch 3, coordinator broker 1 (127.0.0.1:{cluster.nodes[1].port}), "
        "2 partitions"
    )
    assert table("\n".join(rest)) == [["topic", "partition"], ["orders", "0"], ["orders", "1"]]
    found = json.loads((await command("describe", "idle", "--format", "json")).out)
    assert (found["state"], found["started_ms"], found["coordinator"]) == ("CompleteAbort", None, 1)
    ended = await command("describe", "typo")
    assert ended.code == 1
    assert "TRANSACTIONAL_ID_NOT_FOUND: transactional id typo" in ended.err
    assert "`minibroker transactions list --bootstrap" in ended.err
    assert (await command("describe", "")).code == 2


def test_the_sentence_of_a_transaction_gives_its_age() -> None:
    found = TransactionDescription("a", "Ongoing", 7, 2, 1_500, 10_000, (P0,), Coordinator(1, Address("b", 9092)))
    text = "a: Ongoing for 2.5 s, time-out 1.5 s, producer 7 in epoch 2, coordinator broker 1 (b:9092), 1 partition"
    assert sentence(found, 12_500) == text
    assert "for 0.0 s" in sentence(found, 9_000)


# --- abort ---------------------------------------------------------------------------------------------------------


@run_by(run)
async def test_an_ongoing_transaction_is_aborted_after_a_question(
    cluster: TransactionCluster, command: Command, /
) -> None:
    ended = await command("abort", "--transactional-id", "etl", "--dry-run")
    assert ended.out.startswith("would abort the transaction of etl (Ongoing for ")
    ended = await command("abort", "--transactional-id", "etl", answer="n")
    assert (ended.code, ended.out) == (1, "")
    assert "and fence its producer? [y/N]" in ended.err
    assert cluster.requests(INIT_PRODUCER_ID) == []
    ended = await command("abort", "--transactional-id", "etl", "--yes", "--format", "json")
    found = json.loads(ended.out)
    assert (found["aborted"], found["producer_id"], found["partitions"]) == (True, 8, [P0._asdict(), P1._asdict()])
    assert cluster.transactions.known["etl"].state is S.EMPTY
    [fencing] = {request.transactional_id for request in cluster.requests(INIT_PRODUCER_ID)}
    assert fencing == "etl"


@run_by(run)
async def test_a_transaction_that_is_not_open_is_not_aborted(cluster: TransactionCluster, command: Command, /) -> None:
    ended = await command("abort", "--transactional-id", "idle", "--yes")
    assert ended.code == 1
    assert "idle has no open transaction: it is CompleteAbort" in ended.err
    cluster.add_transaction("ending", S.PREPARE_COMMIT, 5, P0)
    ended = await command("abort", "--transactional-id", "ending", "--yes")
    assert "its outcome is decided (PrepareCommit)" in ended.err
    assert "`minibroker status`" in ended.err.replace(f" --bootstrap {cluster.bootstrap}", "")
    assert "TRANSACTIONAL_ID_NOT_FOUND" in (await command("abort", "--transactional-id", "typo", "--yes")).err
    assert cluster.requests(INIT_PRODUCER_ID) == []


@run_by(run)
async def test_a_hanging_transaction_is_aborted_in_its_partition(
    cluster: TransactionCluster, command: Command, /
) -> None:
    arguments = ("abort", "--topic", "orders", "--partition", "0", "--start-offset", "30")
    which = "abort the transaction of producer 7, epoch 2, in orders-0 from offset 30"
    assert (await command(*arguments, "--dry-run")).out == f"would {which}\n"
    assert cluster.markers == []
    ended = await command(*arguments, answer="y")
    assert ended.out == f"{which.replace('abort', 'aborted', 1)}\n"
    assert f"A{which[1:]}? [y/N]" in ended.err
    [marker] = cluster.markers
    assert (marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, marker.start_offset) == (7, 2, 4, 30)
    assert not marker.committed
    assert [(topic.name, topic.partitions) for topic in marker.topics] == [("orders", [0])]
    cluster.script(WRITE_TXN_MARKERS, reject(ErrorCode.INVALID_PRODUCER_EPOCH))
    ended = await command(*arguments, "--yes")
    assert ended.code == 1
    assert "INVALID_PRODUCER_EPOCH: the transaction of producer 7 in orders-0" in ended.err


@run_by(run)
async def test_a_transaction_that_its_coordinator_knows_is_not_aborted_in_one_partition(
    cluster: TransactionCluster, command: Command, /
) -> None:
    ended = await command("abort", "--topic", "orders", "--partition", "0", "--start-offset", "40", "--yes")
    assert ended.code == 1
    assert "does not hang: its coordinator knows it as etl (Ongoing)" in ended.err
    assert "`minibroker transactions abort --transactional-id etl --bootstrap" in ended.err
    ended = await command("abort", "--topic", "orders", "--partition", "0", "--start-offset", "31", "--yes")
    assert "no open transaction of orders-0 begins at offset 31: the open ones begin at 30, 40" in ended.err
    assert cluster.markers == []


def test_an_error_about_a_start_offset_names_the_first_open_transactions() -> None:
    producers = [ProducerState(number, 0, 0, 1, None, 10 * number) for number in range(1, 8)]
    assert "begin at 10, 20, 30, 40, 50 and 2 more." in not_open(P0, 5, producers)
    assert "none is open there." in not_open(P0, 5, [])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--topic", "orders", "--partition", "0"),
        ("--topic", "orders", "--start-offset", "3"),
        ("--transactional-id", "etl", "--partition", "0"),
        ("--transactional-id", "etl", "--topic", "orders", "--partition", "0", "--start-offset", "3"),
    ],
)
@run_by(run)
async def test_abort_needs_either_an_id_or_all_of_a_partition_and_offset(
    cluster: TransactionCluster, command: Command, /, arguments: tuple[str, ...]
) -> None:
    ended = await command("abort", *arguments, "--yes")
    assert ended.code == 2
    assert "give either --transactional-id ID, or for a hanging one --topic TOPIC" in ended.err
    assert cluster.received == []


# --- find-hanging --------------------------------------------------------------------------------------------------


@run_by(run)
async def test_hanging_transactions_are_found_and_the_exit_code_says_so(
    cluster: TransactionCluster, command: Command, /
) -> None:
    ended = await command("find-hanging")
    assert ended.code == 4
    assert table(ended.out) == [
        ["topic", "partition", "producer", "epoch", "start", "offset", "last", "record"],
        ["orders", "0", "7", "2", "30", "1970-01-02", "00:00:00.000", "UTC"],
    ]
    [found] = json.loads((await command("find-hanging", "--topic", "orders", "--format", "json")).out)
    assert (found["topic"], found["partition"], found["producer_id"], found["current_txn_start_offset"]) == (
        "orders",
        0,
        7,
        30,
    )
    ended = await command("find-hanging", "--topic", "orders", "--partition", "1")
    assert (ended.code, ended.out) == (0, "no hanging transactions\n")
    ended = await command("find-hanging", "--older-than", str(10**13))
    assert (ended.code, ended.out) == (0, "no hanging transactions\n")
    assert (await command("find-hanging", "--partition", "1")).code == 2


@run_by(run)
async def test_a_partition_that_cannot_be_searched_is_named_after_what_was_found(
    cluster: TransactionCluster, command: Command, /
) -> None:
    cluster.rules.append(
        lambda r: (
            reject(ErrorCode.KAFKA_STORAGE_ERROR)
            if r.api is DESCRIBE_PRODUCERS and r.body.topics[0].partition_indexes == [1]
            else None
        )
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("minibroker.client.cli.command_admin.API_TIMEOUT_MS", 2_000)
        ended = await command("find-hanging")
    assert ended.code == 1
    assert [row[2] for row in table(ended.out)[1:]] == ["7"]
    assert "KAFKA_STORAGE_ERROR: the producers of orders-1." in ended.err


def test_what_hangs_is_decided_by_logs_and_coordinators() -> None:
    old, new = ProducerState(7, 2, 5, 100, 4, 30), ProducerState(8, 2, 5, 200, 4, 40)
    ended = ProducerState(9, 2, 5, 100, 4, None)
    assert open_transactions({P1: [new], P0: [old, ended]}, 150) == [OpenTransaction(P0, old)]
    both = open_transactions({P1: [new], P0: [old, ended]}, 250)
    assert both == [OpenTransaction(P0, old), OpenTransaction(P1, new)]
    coordinator = Coordinator(1, Address("b", 9092))
    knows_new = TransactionDescription("a", "Ongoing", 8, 2, 1, 1, (P1,), coordinator)
    knows_another_partition = TransactionDescription("b", "Ongoing", 7, 2, 1, 1, (P1,), coordinator)
    assert unknown_to_all(both, [knows_new, knows_another_partition]) == both[:1]
    assert still_open(both, {P0: [old], P1: [new._replace(current_txn_start_offset=50)]}) == both[:1]

"""`consume --group` commits the records written, and no others; `consume --isolation-level`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker import application
from minibroker.client.cli.records import consume_group as module
from minibroker.client.cli.records.consume_group import consume_group
from minibroker.client.cli.terminal.output import USAGE, run_app
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.protocol.apis import OFFSET_COMMIT
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import ControlType, encode_batch
from tests.running import run_by
from tests.unit.client.consuming.test_consumer import fill
from tests.unit.client.scripted_broker import HANG, ScriptedCluster, reject
from tests.unit.client.scripted_thread import scripted_cluster
from tests.waiting import until


class Output:
    """An output that keeps the records written."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.records: list[tuple[int, int]] = []
        self.told: list[int] = []
        self._fails_after = fails_after

    def write(self, batch: ConsumerBatch, limit: int | None) -> int:
        records = batch.records()[:limit]
        if self._fails_after is not None and len(self.records) >= self._fails_after:
            raise BrokenPipeError
        self.records += [(record.partition, record.offset) for record in records]
        return len(records)

    def next_offsets(self) -> dict[int, int]:
        return {partition: offset + 1 for partition, offset in self.records}


def consuming(
    cluster: ScriptedCluster, output: Output, count: int | None = None, *, exit_at_end: bool = False
) -> asyncio.Task[int]:
    return asyncio.create_task(
        consume_group(
            cluster.bootstrap,
            ["orders"],
            "billing",
            "earliest",
            "read_uncommitted",
            count,
            exit_at_end,
            output.write,
            output.told.append,
        )
    )


def committed(cluster: ScriptedCluster) -> dict[int, int]:
    return {partition: at.offset for (_, partition), at in cluster.groups.group("billing").offsets.items()}


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    """Two partitions: ten batches of one record in the first, three in the second."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster() as cluster:
            cluster.add_topic("orders", 2)
            for _ in range(10):
                fill(cluster.log("orders"), 1)
            fill(cluster.log("orders", 1), 3)
            await scenario(cluster)

    asyncio.run(main())


@run_by(run)
async def test_at_the_end_all_is_committed_and_the_next_one_finds_nothing(cluster: ScriptedCluster, /) -> None:
    output = Output()
    assert await consuming(cluster, output, exit_at_end=True) == 13
    assert committed(cluster) == {0: 10, 1: 3}
    assert await consuming(cluster, again := Output(), exit_at_end=True) == 0
    assert again.records == []
    assert cluster.groups.group("billing").members == {}


@pytest.mark.parametrize("count", [1, 2, 7, 12, 13])
@run_by(run)
async def test_a_count_that_ends_within_a_batch_commits_just_that_many(cluster: ScriptedCluster, /, count: int) -> None:
    first, rest = Output(), Output()
    assert await consuming(cluster, first, count) == count
    assert committed(cluster) == first.next_offsets()
    assert await consuming(cluster, rest, exit_at_end=True) == 13 - count
    assert sorted(first.records + rest.records) == [*((0, n) for n in range(10)), *((1, n) for n in range(3))]


@run_by(run)
async def test_an_interruption_commits_what_was_written(cluster: ScriptedCluster, /) -> None:
    output = Output()
    task = consuming(cluster, output)
    await until(lambda: len(output.records) == 13)
    assert committed(cluster) == {}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert committed(cluster) == {0: 10, 1: 3}
    assert output.told == [13]


@run_by(run)
async def test_records_that_a_gone_reader_did_not_get_are_not_committed(cluster: ScriptedCluster, /) -> None:
    output = Output(fails_after=4)
    with pytest.raises(BrokenPipeError):
        await consuming(cluster, output)
    assert committed(cluster) == output.next_offsets()
    assert len(output.records) < 13


def test_what_was_written_is_committed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_EVERY_S", 0.05)

    async def scenario(cluster: ScriptedCluster) -> None:
        task = consuming(cluster, Output())
        await until(lambda: committed(cluster) == {0: 10, 1: 3})
        requests = len(cluster.requests(OFFSET_COMMIT))
        fill(cluster.log("orders", 1), 1)
        cluster.notify()
        await until(lambda: committed(cluster) == {0: 10, 1: 4})
        assert len(cluster.requests(OFFSET_COMMIT)) == requests + 1
        task.cancel()
        await asyncio.wait([task])
        assert len(cluster.requests(OFFSET_COMMIT)) == requests + 1

    run(scenario)


def test_a_failed_commit_is_reported_and_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "COMMIT_EVERY_S", 0.05)

    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.script(OFFSET_COMMIT, reject(ErrorCode.OFFSET_METADATA_TOO_LARGE))
        task = consuming(cluster, Output())
        await until(lambda: committed(cluster) == {0: 10, 1: 3})
        task.cancel()
        await asyncio.wait([task])

    run(scenario)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: ")
    assert "OFFSET_METADATA_TOO_LARGE" in warnings[0]


@run_by(run)
async def test_a_last_commit_that_fails_is_an_error(cluster: ScriptedCluster, /) -> None:
    cluster.script(OFFSET_COMMIT, reject(ErrorCode.OFFSET_METADATA_TOO_LARGE))
    with pytest.raises(CommitFailed, match="OFFSET_METADATA_TOO_LARGE"):
        await consuming(cluster, Output(), exit_at_end=True)


def test_an_interruption_does_not_wait_for_ever_for_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAST_COMMIT_S", 0.2)

    async def scenario(cluster: ScriptedCluster) -> None:
        output = Output()
        task = consuming(cluster, output)
        await until(lambda: len(output.records) == 13)
        cluster.rules.append(lambda received: HANG if received.api is OFFSET_COMMIT else None)
        task.cancel()
        with pytest.raises(TimeoutError, match="interrupted after 13 records; the last ones are not committed"):
            await task

    run(scenario)


@pytest.mark.slow
@run_by(run)
async def test_partitions_that_go_to_another_member_are_committed_first(cluster: ScriptedCluster, /) -> None:
    output = Output()
    task = consuming(cluster, output)
    await until(lambda: len(output.records) == 13)
    async with Consumer(cluster.bootstrap, group="billing", topics=["orders"]) as other:
        asking = asyncio.ensure_future(anext(other))
        await until(lambda: len(other.assignment()) == 1)
        (taken,) = other.assignment()
        assert committed(cluster)[taken.partition] == (10, 3)[taken.partition]
        assert await other.position(TopicPartition("orders", taken.partition)) == (10, 3)[taken.partition]
        asking.cancel()
        await asyncio.wait([asking])
    task.cancel()
    await asyncio.wait([task])
    assert committed(cluster) == {0: 10, 1: 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--group", ""], "--group is empty: give the name of a group"),
        (["--group", "g", "-p", "1"], "--partition 1 cannot be used with --group"),
        (["--group", "g", "--from", "42"], "--from 42 cannot be used with --group"),
        (["-g", "g", "--from", "-10"], "`minibroker groups reset-offsets"),
    ],
)
def test_options_that_make_no_sense_for_a_member_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), ["consume", "orders", *arguments, "-b", "127.0.0.1:1"]) == 2
    assert said in capsys.readouterr().err


# --- isolation levels ---


def fill_with_transactions(cluster: ScriptedCluster) -> None:
    """Write "0", "1" in a transaction that is aborted, and "2" in one that is open."""
    log = cluster.log("orders")
    log.append(encode_batch([b"0"], base_timestamp=1))
    for producer, value in ((7, b"1"), (8, b"2")):
        batch = encode_batch(
            [value], base_timestamp=1, producer_id=producer, producer_epoch=0, base_sequence=0, transactional=True
        )
        log.append(batch)
        if producer == 7:
            log.end_transaction(7, ControlType.ABORT)


@pytest.mark.parametrize("options", [[], ["--group", "billing"]], ids=["alone", "group"])
@pytest.mark.parametrize(("level", "lines"), [("read_committed", "0\n"), ("read_uncommitted", "0\n1\n2\n")])
def test_consume_reads_with_an_isolation_level(
    capfdbinary: pytest.CaptureFixture[bytes], level: str, lines: str, options: list[str]
) -> None:
    with scripted_cluster() as cluster:
        cluster.do(lambda: fill_with_transactions(cluster.cluster))
        arguments = ["consume", "orders", "-b", cluster.bootstrap, "--exit-at-end", *options]
        assert run_app(application(), [*arguments, "--isolation-level", level]) == 0
    assert capfdbinary.readouterr().out == lines.encode()


def test_an_unknown_isolation_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["consume", "orders", "-b", "127.0.0.1:1", "--isolation-level", "serializable"]
    assert run_app(application(), arguments) == USAGE
    assert "read_committed" in capsys.readouterr().err

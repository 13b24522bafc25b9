from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from minibroker.client import producer
from minibroker.client.cli.records import produce
from minibroker.client.cli.records import tally as tally_module
from minibroker.client.cli.records.produce import Acks, Codec, Produced, Template, produce_lines
from minibroker.client.cli.records.tally import Tally, name_lines
from minibroker.client.cli.terminal.output import FAILURE, TIMED_OUT, explain
from minibroker.client.errors import DeliveryTimedOut
from minibroker.client.producer import Producer
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, ORDINARY, ScriptedCluster, reject
from tests.waiting import until


@pytest.mark.parametrize(
    ("template", "line", "key", "value"),
    [
        (Template(), b"a:1", None, b"a:1"),
        (Template(), b"", None, b""),
        (Template(key=b"k"), b"a:1", b"k", b"a:1"),
        (Template(key_separator=b":"), b"a:1:2", b"a", b"1:2"),
        (Template(key_separator=b":"), b":1", b"", b"1"),
        (Template(key_separator=b":"), b"a", None, b"a"),
        (Template(key=b"k", key_separator=b"::"), b"a::1", b"a", b"1"),
        (Template(key=b"k", key_separator=b"::"), b"a:1", b"k", b"a:1"),
        (Template(key_separator=b":"), b"a:", b"a", b""),
        (Template(key_separator=b":", tombstone=True), b"a:", b"a", None),
        (Template(key=b"k", tombstone=True), b"", b"k", None),
        (Template(tombstone=True), b"1", None, b"1"),
    ],
)
def test_a_line_becomes_a_key_and_a_value(
    template: Template, line: bytes, key: bytes | None, value: bytes | None
) -> None:
    assert template.key_and_value(line) == (key, value)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([7], "line 7"),
        ([2, 1], "lines 1 to 2"),
        ([1, 3], "lines 1, 3"),
        ([*range(10, 500), 1, 3, 5, 7], "lines 1, 3, 5, 7, 10 to 499"),
        ([*range(10, 500), 1, 3, 5, 7, 501, 502, 600], "lines 1, 3, 5, 7, 10 to 499 and 3 more"),
    ],
)
def test_a_handful_of_lines_is_named_and_the_rest_counted(numbers: list[int], named: str) -> None:
    assert name_lines(numbers) == named


# --- Against a broker ---


class Pipe:
    """A pipe as standard input: lines come when the test writes them."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()

    def write(self, data: bytes) -> None:
        os.write(self._writing, data)

    def end(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.end()
    os.close(pipe.reading)


def run(scenario: Callable[[ScriptedCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster() as cluster:
            cluster.add_topic("orders")
            await scenario(cluster)

    asyncio.run(main())


def produced(cluster: ScriptedCluster, pipe: Pipe, tally: Tally) -> asyncio.Task[Produced]:
    arguments = (cluster.bootstrap, "orders", pipe.reading, Template(), Acks.ALL, Codec.NONE, tally)
    return asyncio.create_task(produce_lines(*arguments))


@run_by(run)
async def test_every_line_is_acknowledged_at_the_end(cluster: ScriptedCluster, /, pipe: Pipe) -> None:
    tally = Tally()
    task = produced(cluster, pipe, tally)
    pipe.write(b"one\n\nthree")
    pipe.end()
    assert (await task)[:3] == ("orders", 3, 8)
    assert str(tally) == "3 of 3 lines acknowledged"
    assert cluster.log("orders").values() == [b"one", b"", b"three"]


@pytest.mark.slow
@run_by(run)
async def test_lines_that_a_broker_refuses_are_named_with_the_reason_once_before_the_input_ends(
    cluster: ScriptedCluster, /, pipe: Pipe
) -> None:
    tally = Tally()
    task = produced(cluster, pipe, tally)
    pipe.write(b"one\ntwo\n")
    await until(lambda: tally.acknowledged == 2)
    cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD), reject(ErrorCode.INVALID_RECORD))
    pipe.write(b"three\nfour\n")
    with pytest.raises(MinibrokerError) as raised:
        await task
    assert str(raised.value).startswith("2 of 4 lines acknowledged, 2 not: lines 3 to 4: INVALID_RECORD")
    assert str(raised.value).count("INVALID_RECORD") == 1
    assert str(raised.value).endswith(". No line after 4 was sent")
    assert explain(raised.value)[0] == FAILURE


@run_by(run)
async def test_lines_that_a_broker_refuses_at_the_end_are_named_too(cluster: ScriptedCluster, /, pipe: Pipe) -> None:
    cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
    pipe.write(b"one\n")
    pipe.end()
    with pytest.raises(MinibrokerError, match="^0 of 1 lines acknowledged, 1 not: line 1: INVALID_RECORD") as raised:
        await produced(cluster, pipe, Tally())
    assert "was sent" not in str(raised.value)


@run_by(run)
async def test_a_line_that_cannot_be_sent_is_the_last_and_those_before_it_are_acknowledged(
    cluster: ScriptedCluster, /, pipe: Pipe
) -> None:
    task = produced(cluster, pipe, Tally())
    lines = b"one\n" + b"x" * 2_000_000 + b"\nthree\n"
    await asyncio.gather(asyncio.to_thread(pipe.write, lines), asyncio.wait((task,)))
    with pytest.raises(MinibrokerError) as raised:
        await task
    assert str(raised.value).startswith("1 of 2 lines acknowledged, 1 not: line 2: MESSAGE_TOO_LARGE")
    assert str(raised.value).endswith(". No line after 2 was sent")
    assert cluster.log("orders").values() == [b"one"]


def test_an_unreadable_input_does_not_hide_the_outcome_of_earlier_lines(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minibroker.client.cli.records.lines.MAX_LINE_BYTES", 1_000)

    async def scenario(cluster: ScriptedCluster) -> None:
        task = produced(cluster, pipe, Tally())
        pipe.write(b"one\n" + b"x" * 2_000)
        with pytest.raises(MinibrokerError, match=r"line 2 is longer than 1000 bytes.* \(1 of 1 lines acknowledged\)"):
            await task

    run(scenario)


@run_by(run)
async def test_an_interruption_sends_what_was_read_before_it_counts(cluster: ScriptedCluster, /, pipe: Pipe) -> None:
    tally = Tally()
    task = produced(cluster, pipe, tally)
    pipe.write(b"one\ntwo\nunfinished")
    await until(lambda: tally.lines == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert str(tally) == "2 of 2 lines acknowledged"
    assert cluster.log("orders").values() == [b"one", b"two"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interruption_waits_only_so_long_for_brokers_that_do_not_answer(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "CANCELLED_FLUSH_S", 0.1)

    async def scenario(cluster: ScriptedCluster) -> None:
        tally = Tally()
        task = produced(cluster, pipe, tally)
        pipe.write(b"one\n")
        await until(lambda: tally.acknowledged == 1)
        cluster.script(PRODUCE, HANG)
        pipe.write(b"two\nthree\n")
        await until(lambda: tally.lines == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert str(tally).startswith("1 of 3 lines acknowledged, 2 not: lines 2 to 3: ")

    run(scenario)


@pytest.mark.parametrize("rejected", [1, 2, 3, 5, 8, 13, 30, 60])
def test_what_counts_as_acknowledged_is_in_the_log_and_nothing_else_whenever_a_failure_comes(
    rejected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "_SETTLE_EVERY_S", 0.0)
    monkeypatch.setattr(tally_module, "_MOST_UNSETTLED", 100_000)
    # With so little room the failures may reach `drain` instead of the `flush` under way.
    monkeypatch.setattr(
        produce,
        "open_producer",
        lambda bootstrap, *_: Producer(bootstrap, batch_size=2_000, max_request_size=2_000, buffer_memory=20_000),
    )
    lines = [b"%d" % number for number in range(1, 200_001)]
    (tmp_path / "input").write_bytes(b"\n".join(lines))

    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.script(PRODUCE, *[ORDINARY] * (rejected - 1), reject(ErrorCode.INVALID_RECORD))
        tally = Tally()
        with (tmp_path / "input").open("rb") as file, pytest.raises(MinibrokerError):
            await produce_lines(cluster.bootstrap, "orders", file.fileno(), Template(), Acks.ALL, Codec.NONE, tally)
        arrived = cluster.log("orders").values()
        sent = lines[: tally.lines]
        missing = [int(line) for line in sorted(set(sent) - set(arrived), key=int)]
        assert tally.acknowledged == len(arrived) == tally.lines - len(missing)
        counts = f"{len(arrived)} of {tally.lines} lines acknowledged, {len(missing)} not"
        assert str(tally).startswith(f"{counts}: {name_lines(missing)}: INVALID_RECORD")

    run(scenario)


def test_a_long_input_continues_once_fewer_records_are_unacknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "_SETTLE_EVERY_S", 0.001)
    monkeypatch.setattr(tally_module, "_MOST_UNSETTLED", 0)
    (tmp_path / "input").write_bytes(b"x" * 200 + b"\n" + b"y\n" * 300_000)

    async def scenario(cluster: ScriptedCluster) -> None:
        tally = Tally()
        with (tmp_path / "input").open("rb") as file:
            await produce_lines(cluster.bootstrap, "orders", file.fileno(), Template(), Acks.ALL, Codec.NONE, tally)
        assert str(tally) == "300001 of 300001 lines acknowledged"

    run(scenario)


def test_lines_that_failed_for_lack_of_time_alone_are_a_timeout() -> None:
    tally = Tally()
    tally.refuse(DeliveryTimedOut("too late"))
    assert explain(tally.failure("text")) == (TIMED_OUT, "error: text")
    tally.refuse(BrokerError(ErrorCode.INVALID_RECORD, "no"))
    assert explain(tally.failure("text"))[0] == FAILURE


def test_many_reasons_are_cut_short() -> None:
    tally = Tally()
    for number in range(9):
        tally.refuse(MinibrokerError(f"reason {number}."))
    assert str(tally) == (
        "0 of 9 lines acknowledged, 9 not: line 1: reason 0; line 2: reason 1; line 3: reason 2; line 4: reason 3; "
        "line 5: reason 4; and 4 other reasons"
    )

"""The blocking consumer against scripted brokers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import pytest

import minibroker
from minibroker.client.errors import Closed, CommitFailed, InvalidSetting, MaxPollIntervalExceeded, WithinListener
from minibroker.client.sync.background import Call
from minibroker.protocol.apis import LEAVE_GROUP
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import encode_batch
from minibroker.sync import Consumer, RebalanceListener
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster
from tests.waiting import until_true

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


@pytest.fixture
def cluster() -> Iterator[ClusterThread]:
    with scripted_cluster(partitions=2) as cluster:
        yield cluster


def fill(cluster: ClusterThread, *batches: list[bytes], partition: int = 0) -> None:
    def work() -> None:
        for values in batches:
            cluster.cluster.log("orders", partition).append(encode_batch(values, base_timestamp=1_000))
        cluster.cluster.notify()

    cluster.do(work)


def test_records_are_iterated_one_by_one_and_the_position_follows_each(cluster: ClusterThread) -> None:
    fill(cluster, [b"0", b"1", b"2"], [b"3", b"4"])
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        seen = []
        for record in consumer:
            seen.append(record.value)
            assert consumer.position(P0) == record.offset + 1
            if len(seen) == 4:
                break
        assert seen == [b"0", b"1", b"2", b"3"]
        assert next(consumer).value == b"4"


def test_an_iteration_that_was_left_goes_on_with_the_next_record(cluster: ClusterThread) -> None:
    fill(cluster, [b"%d" % number for number in range(100)])
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        values = [record.value for _ in range(10) for record in islice(iter(consumer), 10)]
        assert values == [b"%d" % number for number in range(100)]


def test_batches_and_records_may_be_mixed(cluster: ClusterThread) -> None:
    fill(cluster, [b"0", b"1", b"2"], [b"3", b"4"], [b"5"])
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        assert next(consumer).value == b"0"
        batches = consumer.batches()
        assert list(next(batches).values) == [b"1", b"2"]
        assert consumer.position(P0) == 3
        assert next(consumer).value == b"3"
        assert [list(batch.values) for batch in islice(batches, 2)] == [[b"4"], [b"5"]]


def test_seek_drops_what_was_handed_out_and_pause_holds_it_back(cluster: ClusterThread) -> None:
    fill(cluster, [b"%d" % number for number in range(10)])
    fill(cluster, [b"other"], partition=1)
    with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert consumer.assignment() == [P0, P1]
        seen = []
        for record in consumer:
            seen.append(record.value)
            if record.value == b"2":
                consumer.seek(P0, 8)
            if len(seen) == 6:
                break
        assert sorted(value or b"" for value in seen) == [b"0", b"1", b"2", b"8", b"9", b"other"]
        consumer.seek_to_beginning()
        consumer.pause(P0)
        assert consumer.paused() == [P0]
        assert next(consumer).value == b"other"
        consumer.resume(P0)
        assert next(consumer).value == b"0"
        consumer.seek_to_end(P0)
        assert consumer.position(P0) == 10
        assert consumer.position_epoch(P0) == 0
        assert consumer.beginning_offsets([P0]) == {P0: 0}
        assert consumer.end_offsets([P0, P1]) == {P0: 10, P1: 1}
        found = consumer.offsets_for_times({P0: 1_000})[P0]
        assert found is not None
        assert found.offset == 0


def test_several_threads_share_the_records_and_miss_none(cluster: ClusterThread) -> None:
    fill(cluster, *[[b"%d" % (batch * 100 + number) for number in range(100)] for batch in range(50)])
    seen: list[list[bytes | None]] = [[] for _ in range(4)]
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:

        def work(own: list[bytes | None]) -> None:
            with suppress(Closed):
                for record in consumer:
                    own.append(record.value)  # noqa: PERF401

        threads = [threading.Thread(target=work, args=(own,)) for own in seen]
        for thread in threads:
            thread.start()
        while sum(map(len, seen)) < 5_000:
            threads[0].join(0.01)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    everything = sorted(int(value or b"") for own in seen for value in own)
    assert everything == list(range(5_000))


def test_closing_ends_an_iteration_in_another_thread(cluster: ClusterThread) -> None:
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        caught: list[BaseException] = []

        def work() -> None:
            try:
                next(consumer)
            except Closed as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
    thread.join(60)
    assert len(caught) == 1
    with pytest.raises(Closed, match="is closed"):
        next(consumer)


@pytest.mark.parametrize("by", ["close", "with"])
@pytest.mark.parametrize(("is_through", "committed"), [(False, 1), (True, 2)])
def test_closing_commits_what_another_thread_has_in_hand_only_if_that_is_through_with_it(
    cluster: ClusterThread, is_through: bool, committed: int, by: str
) -> None:
    fill(cluster, [b"0", b"1", b"2"])
    consumer = Consumer(cluster.bootstrap, topics=["orders"], group="billing", enable_auto_commit=True)
    consumer.start()
    is_busy, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        next(consumer)
        next(consumer)
        is_busy.set()
        goes_on.wait(60)

    working = threading.Thread(target=work)
    working.start()
    assert is_busy.wait(60)
    if is_through:
        goes_on.set()
        working.join(60)
    if by == "close":
        consumer.close()
    else:
        consumer.__exit__(None, None, None)
    goes_on.set()
    working.join(60)
    assert not working.is_alive()
    assert cluster.do(lambda: cluster.cluster.groups.group("billing").offsets["orders", 0].offset) == committed


class _Asynchronous(RebalanceListener):
    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:  # type: ignore[override]
        """A coroutine, which the consumer would not await."""


def test_a_commit_after_the_member_was_idle_for_too_long_fails_until_it_has_joined_again(
    cluster: ClusterThread,
) -> None:
    fill(cluster, [b"0", b"1"])
    with Consumer(cluster.bootstrap, topics=["orders"], group="billing", max_poll_interval_ms=300) as consumer:
        assert len(consumer.poll(timeout_ms=10_000)) == 2
        until_true(lambda: cluster.cluster.requests(LEAVE_GROUP), every_s=0.005)
        with pytest.raises(MaxPollIntervalExceeded):
            consumer.poll(timeout_ms=10_000)
        for _ in range(2):
            with pytest.raises(CommitFailed, match="max_poll_interval_ms=300"):
                consumer.commit()
        with pytest.raises(CommitFailed, match="max_poll_interval_ms=300"):
            consumer.commit_nowait().result(60)
        assert len(consumer.poll(timeout_ms=10_000)) == 2
        consumer.commit()
        assert cluster.cluster.groups.group("billing").offsets["orders", 0].offset == 2


def test_errors_are_raised_to_the_caller_and_iterating_anew_tries_again(cluster: ClusterThread) -> None:
    fill(cluster, [b"0"])
    with pytest.raises(InvalidSetting, match=r"derive it from minibroker.sync.RebalanceListener"):
        Consumer(cluster.bootstrap, topics=["orders"], group="g", listener=minibroker.RebalanceListener())  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="on_partitions_assigned is called, not awaited"):
        Consumer(cluster.bootstrap, topics=["orders"], group="g", listener=_Asynchronous())
    with Consumer(cluster.bootstrap, partitions=[P0], auto_offset_reset="none") as consumer:
        for _ in range(2):
            with pytest.raises(BrokerError) as caught:
                next(iter(consumer))
            assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        consumer.seek(P0, 0)
        assert next(iter(consumer)).value == b"0"
        with pytest.raises(InvalidSetting, match="not assigned"):
            consumer.position(P1)


def interrupt_at_the_end_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Interrupt the next waiting caller exactly when its call ends."""
    wait = Call.wait

    def interrupted(call: Call[object]) -> None:
        wait(call)
        if interruptions:
            interruptions.pop()
            raise KeyboardInterrupt

    interruptions: list[None] = []
    monkeypatch.setattr(Call, "wait", interrupted)
    return lambda: interruptions.append(None)


def test_a_caller_that_is_interrupted_when_its_batch_has_come_misses_nothing(
    cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, [b"0", b"1"], [b"2", b"3"])
    interrupt = interrupt_at_the_end_of(monkeypatch)
    with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            next(iter(consumer))
        assert consumer.position(P0) == 0
        assert [record.value for record in islice(consumer, 1)] == [b"0"]
        batches = consumer.batches()
        assert list(next(batches).values) == [b"1"]
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert consumer.position(P0) == 2
        assert list(next(batches).values) == [b"2", b"3"]


def test_a_listener_that_was_interrupted_is_called_again_by_the_next_call(cluster: ClusterThread) -> None:
    fill(cluster, [b"0", b"1"])
    calls: list[list[TopicPartition]] = []

    class Seeking(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            calls.append(partitions)
            if len(calls) == 1:
                raise KeyboardInterrupt
            consumer.seek(P0, 1)

    with Consumer(cluster.bootstrap, topics=["orders"], group="billing", listener=Seeking()) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(timeout_ms=10_000)
        assert [record.value for record in consumer.poll(timeout_ms=10_000)] == [b"1"]
        assert calls == [calls[0]] * 2


def test_a_listener_that_was_interrupted_is_not_called_again_by_the_goodbye(cluster: ClusterThread) -> None:
    calls = []

    class Exiting(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            calls.append(partitions)
            raise SystemExit(3)

    def read() -> None:
        with Consumer(cluster.bootstrap, topics=["orders"], group="billing", listener=Exiting()) as consumer:
            consumer.poll(timeout_ms=10_000)

    with pytest.raises(SystemExit, match="3"):
        read()
    assert len(calls) == 1
    assert not cluster.do(lambda: cluster.cluster.groups.group("billing").members)


@pytest.mark.parametrize("call", ["poll", "__next__", "batches"])
def test_a_listener_that_asks_for_records_gets_an_error_that_they_would_wait_for_it(
    cluster: ClusterThread, call: str
) -> None:
    fill(cluster, [b"0"])

    class Reading(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            next(consumer.batches()) if call == "batches" else getattr(consumer, call)()

    with Consumer(cluster.bootstrap, topics=["orders"], group="billing", listener=Reading()) as consumer:
        with pytest.raises(WithinListener, match=r"(poll|next)\(\) was called by a rebalance listener"):
            consumer.poll(timeout_ms=10_000)
        assert len(consumer.poll(timeout_ms=10_000)) == 1


@pytest.mark.parametrize("call", ["unsubscribe", "close"])
def test_a_listener_whose_call_would_wait_for_itself_gets_an_error_at_once(cluster: ClusterThread, call: str) -> None:
    fill(cluster, [b"0"])

    class Calling(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            getattr(consumer, call)()

    with Consumer(cluster.bootstrap, topics=["orders"], group="billing", listener=Calling()) as consumer:
        with pytest.raises(WithinListener, match=rf"{call}\(\) was called by a rebalance listener"):
            consumer.poll(timeout_ms=10_000)
        assert len(consumer.poll(timeout_ms=10_000)) == 1
        getattr(consumer, call)()

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    Closed,
    CommitFailed,
    InvalidSetting,
    ListenerTimedOut,
    MaxPollIntervalExceeded,
    WithinListener,
)
from minibroker.client.fetching.records import Record
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.group.states import Reaction
from minibroker.protocol.apis import (
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SYNC_GROUP,
    Api,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.consuming.test_consumer import fill, numbers, take
from tests.unit.client.scripted_broker import CARRY_OUT_AND_DROP, DROP, HANG, Action, Received, ScriptedCluster, reject
from tests.waiting import until

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 2
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


def member(cluster: ScriptedCluster, **settings: Any) -> Consumer:
    """A consumer that learns of a rebalance soon."""
    defaults: dict[str, Any] = {"group": "billing", "topics": ["orders"], "heartbeat_interval_ms": 20}
    if "pattern" in settings or "partitions" in settings:
        del defaults["topics"]
    return Consumer(cluster.bootstrap, **(defaults | settings))


async def assigned(consumer: Consumer, *partitions: TopicPartition) -> None:
    await until(lambda: consumer.assignment() == list(partitions))


class Diary(RebalanceListener):
    def __init__(self) -> None:
        self.entries: list[tuple[str, list[TopicPartition]]] = []

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.entries.append(("revoked", partitions))

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.entries.append(("assigned", partitions))

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.entries.append(("lost", partitions))


@run_by(run)
async def test_a_member_goes_on_where_the_group_has_committed(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, group="billing", topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 4)) == [0, 1, 2, 3]
        assert consumer.assignment() == [P0, P1]
        await consumer.commit()
        assert numbers(await take(consumer, 2)) == [4, 5]
    async with Consumer(cluster.bootstrap, group="billing", topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 2)) == [4, 5]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@run_by(run)
async def test_two_members_share_the_partitions_and_one_that_leaves_gives_its_own_back(
    cluster: ScriptedCluster, /, strategy: str
) -> None:
    diary = Diary()
    async with member(cluster, listener=diary, partition_assignment_strategy=strategy) as first:
        await assigned(first, P0, P1)
        async with member(cluster, partition_assignment_strategy=strategy) as second:
            await until(lambda: len(first.assignment()) == len(second.assignment()) == 1)
            assert sorted(first.assignment() + second.assignment()) == [P0, P1]
        await assigned(first, P0, P1)
    if strategy == "range":
        assert ("revoked", [P0, P1]) in diary.entries
    else:
        moved = next(entry for kind, entry in diary.entries if kind == "revoked")
        assert len(moved) == 1, "the other one stayed where it was"
    assert diary.entries[-1] == ("revoked", [P0, P1]), "close gives them up in good order"


@run_by(run)
async def test_a_partition_is_not_taken_away_while_its_record_is_being_worked_on(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 0), 10)
    fill(cluster.log("orders", 1), 10)
    async with member(cluster, partition_assignment_strategy="range") as first:
        await assigned(first, P0, P1)
        record = await anext(first)
        async with member(cluster, partition_assignment_strategy="range") as second:
            await until(lambda: "asked for the next records" in first.status().summary)
            await asyncio.sleep(0.2)
            assert second.assignment() == []
            await first.commit()  # still in time
            waiting = asyncio.ensure_future(anext(first))
            await until(lambda: len(second.assignment()) == 1)
            other = await waiting
            assert cluster.groups.group("billing").offsets["orders", record.partition].offset == 1
            assert (other.partition, other.offset) in ((record.partition, 1), (1 - record.partition, 0))


@run_by(run)
async def test_a_cooperative_member_reads_on_through_a_rebalance_that_revokes_nothing_of_it(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders", 0), 10)
    async with member(cluster) as first:
        await assigned(first, P0, P1)
        assert numbers(await take(first, 2)) == [0, 1]
        rejoins = len(cluster.requests(JOIN_GROUP))
        first.subscribe(["orders"])
        # The user holds a record, and a rebalance does not revoke its partition.
        await until(lambda: len(cluster.requests(JOIN_GROUP)) > rejoins)
        await until(lambda: first.status().member_state == "stable")
        assert first.status().generation_id == 2
        assert numbers(await take(first, 2)) == [2, 3]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@pytest.mark.parametrize("step", [JOIN_GROUP, SYNC_GROUP])
@run_by(run)
async def test_a_subscription_that_changes_in_the_middle_of_a_rebalance_is_what_is_read(
    cluster: ScriptedCluster, /, step: Api[Any, Any], strategy: str
) -> None:
    cluster.add_topic("payments", 2)
    fill(cluster.log("orders"), 10)
    fill(cluster.log("payments"), 10)
    async with member(cluster, partition_assignment_strategy=strategy) as consumer:

        def change(received: Received) -> Action | None:
            if received.api is step and consumer.subscription() == ["orders"]:
                consumer.subscribe(["payments"])
            return None

        cluster.rules.append(change)
        records = await take(consumer, 10)
        assert {record.topic for record in records} == {"payments"}
        assert {partition.topic for partition in consumer.assignment()} == {"payments"}


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@run_by(run)
async def test_a_subscription_that_changes_while_partitions_wait_to_be_given_up_is_what_is_read(
    cluster: ScriptedCluster, /, strategy: str
) -> None:
    cluster.add_topic("payments", 2)
    fill(cluster.log("orders"), 10)
    fill(cluster.log("payments"), 10)
    async with member(cluster, partition_assignment_strategy=strategy) as consumer:
        await take(consumer, 1)  # and is being processed
        consumer.subscribe(["gone"])
        await until(lambda: consumer.status().member_state == "preparing rebalance")
        consumer.subscribe(["payments"])
        assert {record.topic for record in await take(consumer, 10)} == {"payments"}


@run_by(run)
async def test_a_member_that_is_lost_as_its_user_asks_for_more_revokes_nothing(cluster: ScriptedCluster, /) -> None:
    cluster.add_topic("payments", 2)
    fill(cluster.log("orders"), 10)
    fill(cluster.log("payments"), 10)
    diary = Diary()
    async with member(cluster, listener=diary) as consumer:
        await take(consumer, 1)
        consumer.subscribe(["payments"])
        await until(lambda: consumer.status().member_state == "preparing rebalance")
        assert consumer._member is not None
        asking = asyncio.ensure_future(anext(consumer))  # it runs before the member learns of the loss
        consumer._member.standing.lose(Reaction.LOSE)
        assert (await asking).topic == "payments"
        assert [kind for kind, partitions in diary.entries if P0 in partitions] == ["assigned", "lost"]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@run_by(run)
async def test_what_is_subscribed_to_again_at_once_is_read_on(cluster: ScriptedCluster, /, strategy: str) -> None:
    cluster.add_topic("payments", 2)
    fill(cluster.log("orders"), 10)
    async with member(cluster, partition_assignment_strategy=strategy) as consumer:
        await assigned(consumer, P0, P1)
        consumer.subscribe(["payments"])
        consumer.subscribe(["orders"])
        assert numbers(await take(consumer, 10)) == list(range(10))


@run_by(run)
async def test_a_commit_that_meets_a_rebalance_is_repeated_in_the_next_generation(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster) as consumer:
        await take(consumer, 3)
        cluster.script(OFFSET_COMMIT, reject(ErrorCode.REBALANCE_IN_PROGRESS))
        await consumer.commit()
        first, second = cluster.requests(OFFSET_COMMIT)
        assert (first.generation_id, second.generation_id) == (1, 2)
        assert cluster.groups.group("billing").offsets["orders", 0].offset == 3
        assert numbers(await take(consumer, 2)) == [3, 4]


@run_by(run)
async def test_positions_in_a_deleted_topic_are_not_committed_for_its_successor(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster, metadata_max_age_ms=20, fetch_max_wait_ms=20) as consumer:
        record = (await take(consumer, 5))[-1]
        before = cluster.topics["orders"].topic_id
        cluster.add_topic("orders", 2)
        after = cluster.topics["orders"].topic_id
        fill(cluster.log("orders"), 10, prefix="new-")
        assert consumer.position_epoch(P0) == 0
        await until(lambda: consumer.position_epoch(P0) is None, 10)  # it has switched to the new protocol
        await consumer.commit({P0: record.offset + 1})
        assert cluster.groups.group("billing").offsets["orders", 0].topic_id == before
        await consumer.position(P0)
        await consumer.commit()
        assert cluster.groups.group("billing").offsets["orders", 0].topic_id == after
        record = (await take(consumer, 1))[-1]
        assert record.value == b"new-0"
        await consumer.commit({P0: record.offset + 1})
        assert cluster.groups.group("billing").offsets["orders", 0].topic_id == after


@run_by(run)
async def test_a_listener_can_ask_for_positions_where_nothing_is_committed(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    told: list[Any] = []

    class Asks(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            told.append([await consumer.position(partition) for partition in partitions])
            told.append(await consumer.lag())

    settings: dict[str, Any] = {"auto_offset_reset": "latest", "default_api_timeout_ms": 2_000}
    async with member(cluster, listener=Asks(), **settings) as consumer:
        await assigned(consumer, P0, P1)
        await until(lambda: len(told) == 2)
        assert told == [[10, 0], {P0: 0, P1: 0}]


@run_by(run)
async def test_a_listener_takes_its_time_before_it_seeks_where_nothing_is_committed(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)

    class Seeks(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            await asyncio.sleep(0.2)  # it queries a database
            for partition in partitions:
                consumer.seek(partition, 0)

    async with member(cluster, listener=Seeks(), auto_offset_reset="none") as consumer:
        assert numbers(await take(consumer, 10)) == list(range(10))


@pytest.mark.parametrize("group", [None, "billing"])
@run_by(run)
async def test_a_topic_that_begins_to_match_is_read_from_its_beginning_if_it_is_new(
    cluster: ScriptedCluster, /, group: str | None
) -> None:
    fill(cluster.log("orders"), 10)
    cluster.add_topic("notes", 1)
    settings: dict[str, Any] = {"auto_offset_reset": "latest", "metadata_max_age_ms": 20, "fetch_max_wait_ms": 20}
    async with member(cluster, pattern="orders.*", group=group, **settings) as consumer:
        await assigned(consumer, P0, P1)
        assert await consumer.position(P0) == 10
        cluster.add_topic("orders-2", 1)
        fill(cluster.log("orders-2"), 3)
        assert [(r.topic, r.offset) for r in await take(consumer, 3)] == [("orders-2", n) for n in range(3)]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@run_by(run)
async def test_with_latest_a_topic_that_is_created_again_is_read_from_its_beginning(
    cluster: ScriptedCluster, /, strategy: str
) -> None:
    fill(cluster.log("orders"), 10)
    settings: dict[str, Any] = {"auto_offset_reset": "latest", "metadata_max_age_ms": 20, "fetch_max_wait_ms": 20}
    async with member(cluster, partition_assignment_strategy=strategy, **settings) as consumer:
        await assigned(consumer, P0, P1)
        assert await consumer.position(P0) == 10
        cluster.add_topic("orders", 1)
        await assigned(consumer, P0)
        cluster.add_topic("orders", 2)
        fill(cluster.log("orders", 1), 3)
        assert numbers(await take(consumer, 3)) == [0, 1, 2]


@pytest.mark.slow
@run_by(run)
async def test_auto_commit_counts_an_offset_of_a_topic_that_was_created_again_as_another_one(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 5)
    fast: dict[str, Any] = {"metadata_max_age_ms": 20, "fetch_max_wait_ms": 20, "retry_backoff_ms": 10}
    offsets = cluster.groups.group("billing").offsets

    async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=1_000, **fast) as consumer:
        await take(consumer, 5)
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: ("orders", 0) in offsets)
        cluster.add_topic("orders", 2)
        fill(cluster.log("orders"), 5, prefix="new-")
        await waiting
        await take(consumer, 4)
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: offsets["orders", 0].topic_id == cluster.topics["orders"].topic_id)
        assert offsets["orders", 0].offset == 5
        waiting.cancel()
        await asyncio.wait([waiting])


@pytest.mark.slow
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION])
@run_by(run)
async def test_a_removed_member_reports_its_uncommitted_offsets_and_resumes_at_the_groups(
    cluster: ScriptedCluster, /, code: ErrorCode
) -> None:
    fill(cluster.log("orders"), 10)
    diary = Diary()
    async with member(cluster, listener=diary) as consumer:
        await take(consumer, 3)
        await consumer.commit()
        await take(consumer, 2)
        cluster.script(OFFSET_COMMIT, reject(code))
        with pytest.raises(CommitFailed, match=code.name) as raised:
            await consumer.commit()
        assert raised.value.errors.keys() == {P0, P1}
        with pytest.raises(CommitFailed):  # nor does it come back to it
            await consumer.commit({P0: 5})
        assert numbers(await take(consumer, 2)) == [3, 4]
        assert ("lost", [P0, P1]) in diary.entries


@pytest.mark.parametrize("api", [JOIN_GROUP, SYNC_GROUP, OFFSET_FETCH, OFFSET_COMMIT, FIND_COORDINATOR, HEARTBEAT])
@pytest.mark.parametrize(
    "action",
    [
        reject(ErrorCode.NOT_COORDINATOR),
        reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        reject(ErrorCode.COORDINATOR_NOT_AVAILABLE),
        DROP,
        CARRY_OUT_AND_DROP,
    ],
    ids=["moved", "loads", "none", "drop", "carry out and drop"],
)
@run_by(run)
async def test_passing_errors_are_retried_silently(
    cluster: ScriptedCluster, /, api: Api[Any, Any], action: Action
) -> None:
    fill(cluster.log("orders"), 10)
    cluster.script(api, action)
    async with member(cluster) as consumer:
        assert numbers(await take(consumer, 3)) == [0, 1, 2]
        await consumer.commit()
        await until(lambda: len(cluster.requests(HEARTBEAT)) > 2)
        assert cluster.groups.group("billing").offsets["orders", 0].offset == 3
        assert numbers(await take(consumer, 2)) == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("api", [JOIN_GROUP, SYNC_GROUP, OFFSET_COMMIT, HEARTBEAT])
@run_by(run, brokers=2)
async def test_a_coordinator_that_hangs_is_left_when_brokers_name_another(
    cluster: ScriptedCluster, /, api: Api[Any, Any]
) -> None:
    fill(cluster.log("orders"), 10)

    def hang(received: Received) -> Action | None:
        return HANG if received.api is api and received.node_id == 0 else None

    cluster.rules.append(hang)
    async with member(cluster) as consumer:
        records = asyncio.ensure_future(take(consumer, 3))
        if api in (OFFSET_COMMIT, HEARTBEAT):
            await records
        committed = asyncio.ensure_future(consumer.commit())
        await cluster.until(lambda: any(r.api is api and r.node_id == 0 for r in cluster.received))
        cluster.groups.coordinator = 1
        assert numbers(await records) == [0, 1, 2]
        await asyncio.wait([committed])
        await consumer.commit()
        await cluster.until(lambda: any(r.api is HEARTBEAT and r.node_id == 1 for r in cluster.received))


@run_by(run)
async def test_what_the_group_refuses_is_raised_and_iterating_on_tries_again(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    cluster.script(JOIN_GROUP, reject(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
    async with member(cluster) as consumer:
        with pytest.raises(BrokerError, match="INCONSISTENT_GROUP_PROTOCOL.*assignor in common"):
            await anext(consumer)
        await asyncio.sleep(0.2)
        assert len(cluster.requests(JOIN_GROUP)) == 1, "the user has not asked for records since"
        assert "refused" in consumer.status().summary
        assert numbers(await take(consumer, 2)) == [0, 1]


@run_by(run)
async def test_a_static_member_whose_name_was_taken_says_so_and_does_not_fence_the_other_in_turn(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    diary = Diary()
    async with member(cluster, group_instance_id="till-1", listener=diary) as consumer:
        await take(consumer, 2)
        cluster.script(HEARTBEAT, reject(ErrorCode.FENCED_INSTANCE_ID))
        await until(lambda: not consumer.status().generation_id >= 0)
        for _ in range(2):
            with pytest.raises(BrokerError, match="FENCED_INSTANCE_ID"):
                await take(consumer, 9)
            with pytest.raises(CommitFailed, match="FENCED_INSTANCE_ID") as raised:
                await consumer.commit()
            assert raised.value.errors.keys() == {P0}
        assert ("lost", [P0, P1]) in diary.entries
        joins = len(cluster.requests(JOIN_GROUP))
        await asyncio.sleep(0.1)
        assert len(cluster.requests(JOIN_GROUP)) == joins
    assert not cluster.requests(LEAVE_GROUP), "a static member does not leave"


def test_a_member_that_is_not_asked_for_records_for_too_long_leaves_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 10)
        diary = Diary()
        async with member(cluster, max_poll_interval_ms=300, listener=diary) as consumer:
            assert numbers(await take(consumer, 2)) == [0, 1]
            await consumer.commit()
            await cluster.until(lambda: len(cluster.requests(LEAVE_GROUP)) == 1)
            with pytest.raises(CommitFailed, match="max_poll_interval_ms=300"):
                await consumer.commit()
            assert ("lost", [P0, P1]) not in diary.entries, "the user is still at it"
            with pytest.raises(MaxPollIntervalExceeded, match="raise max_poll_interval_ms"):
                await anext(consumer)
            assert numbers(await take(consumer, 2)) == [2, 3]
            assert ("lost", [P0, P1]) in diary.entries

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "leaves group billing" in caplog.text


@pytest.mark.parametrize("enable_auto_commit", [False, True])
def test_a_commit_after_the_member_was_idle_for_too_long_fails_until_it_has_joined_again(
    enable_auto_commit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 10)
        settings = {"max_poll_interval_ms": 300, "enable_auto_commit": enable_auto_commit}
        async with member(cluster, **settings) as consumer:
            await take(consumer, 2)
            await cluster.until(lambda: len(cluster.requests(LEAVE_GROUP)) == 1)
            with pytest.raises(MaxPollIntervalExceeded):
                await consumer.poll(timeout_ms=5_000)
            for _ in range(2):
                with pytest.raises(CommitFailed, match="billing were not committed: orders-0.*has left") as raised:
                    await consumer.commit()
                assert raised.value.errors.keys() == {P0}, "nothing was read of the other"
                assert isinstance(raised.value.errors[P0], MaxPollIntervalExceeded)
            with pytest.raises(CommitFailed, match="max_poll_interval_ms=300"):
                await consumer.commit_nowait()
            with pytest.raises(CommitFailed, match="max_poll_interval_ms=300"):
                await consumer.commit({P0: 1})
            assert not cluster.requests(OFFSET_COMMIT)
            assert numbers(await take(consumer, 1)) == [0]
            await consumer.commit()
            assert cluster.groups.group("billing").offsets["orders", 0].offset == 1

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "commit_nowait: offsets of group billing were not committed" in caplog.text


@run_by(run)
async def test_a_commit_after_a_loss_has_nothing_to_complain_of_where_all_was_committed_before(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster, max_poll_interval_ms=300) as consumer:
        await take(consumer, 2)
        await consumer.commit({P0: 2})
        await cluster.until(lambda: len(cluster.requests(LEAVE_GROUP)) == 1)
        with pytest.raises(MaxPollIntervalExceeded):
            await anext(consumer)
        await consumer.commit()
        await consumer.commit_nowait()
        assert len(cluster.requests(OFFSET_COMMIT)) == 1


@run_by(run)
async def test_a_position_that_the_user_has_chosen_is_among_what_cannot_be_committed_after_a_loss(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster, max_poll_interval_ms=300) as consumer:
        await take(consumer, 2)
        await consumer.commit()
        consumer.seek(P1, 0)
        await cluster.until(lambda: len(cluster.requests(LEAVE_GROUP)) == 1)
        with pytest.raises(MaxPollIntervalExceeded):
            await anext(consumer)
        with pytest.raises(CommitFailed) as raised:
            await consumer.commit()
        assert raised.value.errors.keys() == {P1}
        await consumer.unsubscribe()  # after that its positions no longer matter
        await consumer.commit()


@pytest.mark.slow
@run_by(run)
async def test_a_removed_member_that_does_not_know_commits_nothing_silently_before_it_rejoins(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)

    def loads(received: Received) -> Action | None:
        return reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) if received.api is JOIN_GROUP else None

    async with member(cluster) as consumer:
        await take(consumer, 2)
        cluster.rules.append(loads)
        cluster.script(HEARTBEAT, reject(ErrorCode.UNKNOWN_MEMBER_ID))
        await until(lambda: consumer.status().generation_id < 0)
        assert await consumer.poll(timeout_ms=0) == []
        await assigned(consumer)
        for _ in range(2):
            with pytest.raises(CommitFailed, match="orders-0.*the group went on without this member") as raised:
                await consumer.commit()
            assert raised.value.errors.keys() == {P0}
        cluster.rules.remove(loads)
        await assigned(consumer, P0, P1)
        await consumer.commit()  # of the new assignment, before any record of it was read
        assert numbers(await take(consumer, 2)) == [0, 1]


@pytest.mark.slow
@run_by(run)
async def test_a_user_that_takes_record_after_record_is_no_idle_one(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10, batch=10)
    async with member(cluster, max_poll_interval_ms=500) as consumer:
        for offset in range(10):  # out of one batch
            assert (await anext(consumer)).offset == offset
            await asyncio.sleep(0.15)
        assert not cluster.requests(LEAVE_GROUP)


@pytest.mark.slow
@run_by(run)
async def test_a_user_that_waits_for_records_is_no_idle_one(cluster: ScriptedCluster, /) -> None:
    async with member(cluster, max_poll_interval_ms=200) as consumer:
        assert await consumer.poll(timeout_ms=1_000) == []
        assert not cluster.requests(LEAVE_GROUP)
        assert "at the end" in consumer.status().summary


@pytest.mark.parametrize("leaves_by", ["break", "exception"])
@pytest.mark.parametrize("mode", ["records", "batches", "poll"])
@run_by(run)
async def test_auto_commit_counts_what_is_in_hand_only_if_the_consumer_is_left_without_an_exception(
    cluster: ScriptedCluster, /, mode: str, leaves_by: str
) -> None:
    fill(cluster.log("orders"), 10, batch=2)

    class Oops(Exception):
        pass

    async def work() -> None:
        async with member(cluster, enable_auto_commit=True) as consumer:
            if mode == "records":
                await take(consumer, 5)
            elif mode == "batches":
                batches = consumer.batches()
                for _ in range(3):
                    await anext(batches)
            else:
                assert numbers(await consumer.poll(30_000, max_records=3)) == [0, 1, 2]
                assert numbers(await consumer.poll(30_000, max_records=4)) == [3, 4, 5, 6]
            if leaves_by == "exception":
                raise Oops

    with contextlib.suppress(Oops):
        await work()
    done = {"records": (5, 4), "batches": (6, 4), "poll": (7, 3)}[mode]
    expected = done[leaves_by == "exception"]
    assert cluster.groups.group("billing").offsets["orders", 0].offset == expected


@pytest.mark.parametrize("by", ["commit", "commit_nowait", "offsets"])
@pytest.mark.parametrize("is_polled", [False, True])
@run_by(run)
async def test_leaving_the_consumer_by_an_exception_does_not_set_back_the_users_commits(
    cluster: ScriptedCluster, /, by: str, is_polled: bool
) -> None:
    class Oops(Exception):
        pass

    fill(cluster.log("orders"), 10)

    async def work() -> None:
        async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000) as consumer:
            records = await consumer.poll(timeout_ms=10_000, max_records=3) if is_polled else await take(consumer, 3)
            assert numbers(records) == [0, 1, 2]
            if by == "commit":
                await consumer.commit()
            elif by == "commit_nowait":
                consumer.commit_nowait()
            else:
                await consumer.commit({P0: 2})
            raise Oops

    with pytest.raises(Oops):
        await work()
    assert cluster.groups.group("billing").offsets["orders", 0].offset == (2 if by == "offsets" else 3)


@pytest.mark.parametrize(
    ("reader", "committed"), [("is in the middle", 1), ("was cancelled", 1), ("has failed", 1), ("is through", 2)]
)
@run_by(run)
async def test_closing_commits_what_another_task_has_in_hand_only_if_that_is_through_with_it(
    cluster: ScriptedCluster, /, reader: str, committed: int
) -> None:
    fill(cluster.log("orders"), 10)
    consumer = member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000)
    await consumer.start()
    is_busy, goes_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await anext(consumer)
        await anext(consumer)
        is_busy.set()
        await goes_on.wait()
        if reader == "has failed":
            raise ZeroDivisionError

    working = asyncio.create_task(work())
    await is_busy.wait()
    if reader == "was cancelled":
        working.cancel()
        await asyncio.wait([working])
    elif reader != "is in the middle":
        goes_on.set()
        await asyncio.wait([working])
    await consumer.close()
    goes_on.set()
    await asyncio.wait([working])
    assert cluster.groups.group("billing").offsets["orders", 0].offset == committed


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
@run_by(run)
async def test_an_unsubscribed_partition_can_be_committed_until_it_is_given_up(
    cluster: ScriptedCluster, /, strategy: str
) -> None:
    consumer: Consumer | None = None

    class Listener(RebalanceListener):
        async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            assert consumer is not None
            await consumer.commit()

    cluster.add_topic("payments", 1)
    fill(cluster.log("orders"), 10)
    consumer = member(cluster, listener=Listener(), partition_assignment_strategy=strategy)
    async with consumer:
        await take(consumer, 3)
        consumer.subscribe(["payments"])
        assert await consumer.poll(timeout_ms=500) == []
        await assigned(consumer, TopicPartition("payments", 0))
    offsets = cluster.groups.group("billing").offsets
    assert [committed.offset for partition, committed in offsets.items() if partition == P0] == [3]


@run_by(run)
async def test_auto_commit_counts_partitions_by_hand_too_when_others_take_their_place_and_at_the_end(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    fill(cluster.log("orders", 1), 10)
    settings = {"group": "billing", "enable_auto_commit": True, "auto_commit_interval_ms": 60_000}
    async with Consumer(cluster.bootstrap, **settings) as consumer:  # type: ignore[arg-type]
        consumer.assign([P0])
        await take(consumer, 10)
        consumer.assign([P1])
        await take(consumer, 10)
    offsets = cluster.groups.group("billing").offsets
    assert {partition: committed.offset for partition, committed in offsets.items()} == {P0: 10, P1: 10}


@pytest.mark.parametrize("call", ["close", "unsubscribe"])
@run_by(run)
async def test_an_exception_of_a_listener_within_a_call_is_raised_from_the_call(
    cluster: ScriptedCluster, /, call: str
) -> None:
    class Oops(Exception):
        pass

    class Listener(RebalanceListener):
        async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            raise Oops

    consumer = member(cluster, listener=Listener())
    await consumer.start()
    await assigned(consumer, P0, P1)
    with pytest.raises(Oops):
        await (consumer.close() if call == "close" else consumer.unsubscribe())
    await consumer.close()

    async def fail() -> None:
        async with member(cluster, listener=Listener()) as consumer:
            await assigned(consumer, P0, P1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await fail()
    assert "Oops" in caught.value.__notes__[0]


@run_by(run)
async def test_unsubscribing_after_work_that_failed_commits_what_came_before_it(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000) as consumer:
        await take(consumer, 3)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            await consumer.unsubscribe()
    assert cluster.groups.group("billing").offsets["orders", 0].offset == 2


@run_by(run)
async def test_auto_commit_leaves_out_the_record_that_is_being_worked_on(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10, batch=10)
    async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=50) as consumer:
        await take(consumer, 3)
        await asyncio.sleep(0.3)
        # On a slow machine, earlier ones may have been committed.
        committed = cluster.groups.group("billing").offsets.get(("orders", 0))
        assert committed is None or committed.offset <= 2, "the third is still in hand"
        records = await take(consumer, 7)
        waiting = asyncio.ensure_future(anext(consumer))
        offsets = cluster.groups.group("billing").offsets
        await until(lambda: ("orders", 0) in offsets and offsets["orders", 0].offset == records[-1].offset + 1)
        assert records[-1].offset == 9
        waiting.cancel()


@run_by(run)
async def test_a_revoked_partition_is_committed_before_another_member_gets_it(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 0), 60)
    fill(cluster.log("orders", 1), 60)
    seen: list[Record] = []

    async def consume(consumer: Consumer) -> None:
        async for record in consumer:
            seen.append(record)
            await asyncio.sleep(0.01)

    async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000) as first:
        one = asyncio.ensure_future(consume(first))
        await until(lambda: len({record.partition for record in seen}) == 2)
        async with member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000) as second:
            two = asyncio.ensure_future(consume(second))
            await until(lambda: len(seen) >= 120)
            one.cancel()
            two.cancel()
    assert sorted((record.partition, record.offset) for record in seen) == [
        (partition, offset) for partition in (0, 1) for offset in range(60)
    ]


@run_by(run)
async def test_commits_are_carried_out_in_the_order_of_the_calls_whatever_happens_to_the_first(
    cluster: ScriptedCluster, /
) -> None:
    async with member(cluster) as consumer:
        await assigned(consumer, P0, P1)
        cluster.script(OFFSET_COMMIT, DROP, reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        first = consumer.commit_nowait({P0: 1})
        second = consumer.commit_nowait({P0: 2})
        await consumer.commit({P0: OffsetAndMetadata(3, None, "by hand")})
        assert first.done()
        assert second.done()
        offsets = [
            partition.committed_offset
            for request in cluster.requests(OFFSET_COMMIT)
            for topic in request.topics
            for partition in topic.partitions
        ]
        assert offsets == [1, 1, 1, 2, 3]
        assert await consumer.committed(P0, P1) == {P0: OffsetAndMetadata(3, None, "by hand"), P1: None}


def test_a_commit_nobody_waits_for_does_not_fail_silently(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        async with member(cluster) as consumer:
            await assigned(consumer, P0, P1)
            cluster.script(OFFSET_COMMIT, reject(ErrorCode.OFFSET_METADATA_TOO_LARGE))
            commit = consumer.commit_nowait({P0: 1})
            await asyncio.wait([commit])
            with pytest.raises(CommitFailed, match="offset.metadata.max.bytes"):
                await commit

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "commit_nowait" in caplog.text


@run_by(run)
async def test_another_members_partition_cannot_be_committed(cluster: ScriptedCluster, /) -> None:
    async with member(cluster) as first, member(cluster) as second:
        await until(lambda: len(first.assignment()) == len(second.assignment()) == 1)
        (others,) = second.assignment()
        with pytest.raises(CommitFailed, match="not assigned to this member"):
            await first.commit({others: 1})
        assert not cluster.requests(OFFSET_COMMIT)


@run_by(run)
async def test_an_exception_of_a_listener_reaches_the_user_and_the_rebalance_goes_on(
    cluster: ScriptedCluster, /
) -> None:
    class Oops(Exception):
        pass

    class Listener(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            raise Oops(partitions)

    fill(cluster.log("orders"), 10)
    async with member(cluster, listener=Listener()) as consumer:
        with pytest.raises(Oops):
            await anext(consumer)
        assert numbers(await take(consumer, 2)) == [0, 1]


@pytest.mark.parametrize("pause_s", [0, 0.05])
@run_by(run)
async def test_a_member_that_polls_without_waiting_gets_what_is_there(
    cluster: ScriptedCluster, /, pause_s: float
) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster) as consumer:
        got: list[Record] = []
        while len(got) < 10:
            got += await consumer.poll(timeout_ms=0)
            await asyncio.sleep(pause_s)
        assert numbers(got) == list(range(10))
        fill(cluster.log("orders"), 1)
        while len(got) < 11:
            got += await consumer.poll(timeout_ms=0)
            await asyncio.sleep(pause_s)


@pytest.mark.parametrize("call", ["poll", "anext", "batches"])
@run_by(run)
async def test_a_listener_that_asks_for_records_gets_an_error_that_they_would_wait_for_it(
    cluster: ScriptedCluster, /, call: str
) -> None:
    consumer: Consumer

    async def ask() -> None:
        if call == "poll":
            await consumer.poll(timeout_ms=10_000)
        else:
            await anext(consumer if call == "anext" else consumer.batches())

    class Listener(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            await ask()

    class Starting(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            tasks.append(asyncio.create_task(ask_meanwhile()))
            await begun.wait()

    async def ask_meanwhile() -> None:
        begun.set()
        await ask()

    begun = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    fill(cluster.log("orders"), 10)
    consumer = member(cluster, listener=Listener())
    async with consumer:
        with pytest.raises(WithinListener, match=r"(poll|anext)\(\) was called by a rebalance listener"):
            await anext(consumer)
    consumer = member(cluster, listener=Starting())
    async with consumer:
        await until(lambda: bool(tasks), 5)
        await tasks[0]  # it waits for the listener, and the listener does not wait for it


@run_by(run)
async def test_a_listener_may_seek_and_commit(cluster: ScriptedCluster, /) -> None:
    consumer: Consumer | None = None

    class Listener(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            assert consumer is not None
            consumer.seek(P0, 5)
            assert await consumer.position(P0) == 5

        async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            assert consumer is not None
            await consumer.commit()

    fill(cluster.log("orders"), 10)
    consumer = member(cluster, listener=Listener())
    async with consumer:
        assert numbers(await take(consumer, 2)) == [5, 6]
    assert cluster.groups.group("billing").offsets["orders", 0].offset == 7


def test_a_listener_that_hangs_is_cancelled_when_the_rebalance_is_over_for_it(caplog: pytest.LogCaptureFixture) -> None:
    class Listener(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            await asyncio.Event().wait()

    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 10)
        async with member(cluster, listener=Listener(), max_poll_interval_ms=200) as consumer:
            with pytest.raises(ListenerTimedOut, match="did not return within max_poll_interval_ms=200"):
                await take(consumer, 2)
            assert numbers(await take(consumer, 2)) == [0, 1]

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "on_partitions_assigned did not return" in caplog.text


@pytest.mark.parametrize("reads", ["records", "poll"])
@run_by(run)
async def test_a_timeout_of_the_listeners_own_is_raised_as_it_is(cluster: ScriptedCluster, /, reads: str) -> None:
    class Listener(RebalanceListener):
        async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            raise TimeoutError("the database does not answer")

    async with member(cluster, listener=Listener()) as consumer:
        with pytest.raises(TimeoutError, match="the database does not answer") as caught:
            await (take(consumer, 2) if reads == "records" else consumer.poll(timeout_ms=10_000))
        assert type(caught.value) is TimeoutError


@run_by(run)
async def test_a_listener_that_hangs_at_the_end_is_an_error_of_ours_with_a_remedy(cluster: ScriptedCluster, /) -> None:
    class Listener(RebalanceListener):
        async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            await asyncio.Event().wait()

    fill(cluster.log("orders"), 10)
    with pytest.raises(ListenerTimedOut, match="raise max_poll_interval_ms") as caught:
        async with member(cluster, listener=Listener(), max_poll_interval_ms=200) as consumer:
            await take(consumer, 2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@run_by(run)
async def test_a_member_closed_while_its_body_reads_commits_and_leaves_before_the_body_ends(
    cluster: ScriptedCluster, /
) -> None:
    """A signal handler does this: the iteration raises Closed, and `async with` closes once more."""

    fill(cluster.log("orders"), 3)
    cluster.script(OFFSET_COMMIT, reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
    consumer = member(cluster, enable_auto_commit=True, auto_commit_interval_ms=60_000)
    closing: list[asyncio.Task[None]] = []

    async def body() -> None:
        async with consumer:
            assert numbers(await take(consumer, 3)) == [0, 1, 2]
            reading = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(0)  # it asks for the next one, so the third is processed
            closing.append(asyncio.create_task(consumer.close()))
            await reading

    with pytest.raises(Closed):
        await body()
    group = cluster.groups.group("billing")
    assert {partition: committed.offset for partition, committed in group.offsets.items()} == {P0: 3, P1: 0}
    assert not group.members
    assert closing[0].done()


@run_by(run)
async def test_close_ends_in_time_even_without_an_answer(cluster: ScriptedCluster, /) -> None:
    consumer = member(cluster, enable_auto_commit=True)
    await consumer.start()
    fill(cluster.log("orders"), 3)
    await take(consumer, 2)
    cluster.rules.append(lambda received: HANG if received.api is not FETCH else None)
    began = asyncio.get_running_loop().time()
    await consumer.close(timeout_ms=300)
    assert asyncio.get_running_loop().time() - began < 2


@run_by(run)
async def test_new_partitions_and_topics_are_shared_out(cluster: ScriptedCluster, /) -> None:
    async with member(cluster, pattern="ord.*", metadata_max_age_ms=50) as consumer:
        await assigned(consumer, P0, P1)
        cluster.topics["orders"].logs += cluster.add_topic("other", 1).logs
        await assigned(consumer, P0, P1, TopicPartition("orders", 2))
        cluster.add_topic("orderlies", 1)
        await until(lambda: TopicPartition("orderlies", 0) in consumer.assignment())
        assert consumer.subscription() == ["orderlies", "orders"]
        del cluster.topics["orderlies"]
        await assigned(consumer, P0, P1, TopicPartition("orders", 2))


@run_by(run)
async def test_partitions_that_come_later_are_read_from_their_beginning_even_with_latest(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster, metadata_max_age_ms=50, auto_offset_reset="latest") as consumer:
        await assigned(consumer, P0, P1)
        assert await consumer.position(P0) == 10
        log = cluster.add_topic("other", 1).logs[0]
        fill(log, 5)
        cluster.topics["orders"].logs.append(log)
        assert numbers(await take(consumer, 2)) == [0, 1]


@run_by(run)
async def test_offsets_that_were_committed_in_an_earlier_topic_of_that_name_do_not_count(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    async with member(cluster) as consumer:
        await take(consumer, 5)
        await consumer.commit()
    del cluster.topics["orders"]
    cluster.add_topic("orders", 2)
    fill(cluster.log("orders"), 10)
    async with member(cluster, auto_offset_reset="latest") as consumer:
        assert numbers(await take(consumer, 2)) == [0, 1]
        assert await consumer.committed(P0) == {P0: None}


@run_by(run)
async def test_a_commit_says_in_which_topic_and_behind_which_epoch_the_offset_is(cluster: ScriptedCluster, /) -> None:
    cluster.log("orders").epoch = 7
    fill(cluster.log("orders"), 10)
    async with member(cluster) as consumer:
        await take(consumer, 5)
        await consumer.commit()
        stored = cluster.groups.group("billing").offsets["orders", 0]
        assert (stored.offset, stored.leader_epoch) == (5, 7)
        assert stored.topic_id == cluster.topics["orders"].topic_id
    async with member(cluster) as consumer:
        await assigned(consumer, P0, P1)
        await until(lambda: consumer.position_epoch(P0) == 7)


@run_by(run)
async def test_partitions_by_hand_have_commits_and_no_members(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    for first in (0, 3):
        async with member(cluster, partitions=[P0]) as consumer:
            assert numbers(await take(consumer, 3)) == [first, first + 1, first + 2]
            await consumer.commit()
    assert not cluster.requests(JOIN_GROUP)


@run_by(run)
async def test_subscribe_unsubscribe_and_assign_in_turn(cluster: ScriptedCluster, /) -> None:
    cluster.add_topic("invoices", 1)
    fill(cluster.log("orders"), 10)
    fill(cluster.log("invoices"), 10)
    async with Consumer(cluster.bootstrap, group="billing", heartbeat_interval_ms=20) as consumer:
        with pytest.raises(InvalidSetting, match="subscribe"):
            await consumer.poll(timeout_ms=10)
        consumer.subscribe(["invoices"])
        assert {record.topic for record in await take(consumer, 2)} == {"invoices"}
        with pytest.raises(InvalidSetting, match="unsubscribe"):
            consumer.assign([P0])
        consumer.subscribe(["orders"])
        assert {record.topic for record in await take(consumer, 2)} == {"orders"}
        await consumer.unsubscribe()
        assert consumer.assignment() == []
        assert len(cluster.requests(LEAVE_GROUP)) == 1
        consumer.assign([P0])
        assert numbers(await take(consumer, 2)) == [0, 1]
        await consumer.commit()
        assert cluster.requests(OFFSET_COMMIT)[-1].generation_id == -1


def test_a_topic_that_does_not_come_is_raised_from_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.fetching.fetcher.UNKNOWN_TOPIC_PATIENCE_S", 0.3)

    async def scenario(cluster: ScriptedCluster) -> None:
        async with member(cluster) as consumer:
            await assigned(consumer, P0, P1)
            consumer.subscribe(["orders", "ordres"])
            with pytest.raises(BrokerError, match=r"UNKNOWN_TOPIC_OR_PARTITION.*ordres"):
                await anext(consumer)

    run(scenario)


@run_by(run, partitions=1)
async def test_members_beyond_the_partitions_are_told_why_they_get_nothing(cluster: ScriptedCluster, /) -> None:
    async with member(cluster) as first:
        await assigned(first, P0)
        async with member(cluster) as second:
            await until(lambda: second.status().member_state == "stable")
            assert "other members of group billing have the one partition" in str(second.status())


def test_settings_of_members_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="session_timeout_ms"):
        Consumer("localhost:9092", group="g", topics=["t"], heartbeat_interval_ms=50_000)
    with pytest.raises(InvalidSetting, match="group="):
        Consumer("localhost:9092", topics=["t"], enable_auto_commit=True)
    with pytest.raises(InvalidSetting, match="one of"):
        Consumer("localhost:9092", topics=["t"], pattern="t.*")
    with pytest.raises(InvalidSetting, match="regular expression"):
        Consumer("localhost:9092", pattern="(")
    with pytest.raises(InvalidSetting, match="cooperative-sticky"):
        Consumer("localhost:9092", group="g", topics=["t"], partition_assignment_strategy="fair")


@pytest.mark.slow
@run_by(run)
async def test_a_function_may_assign_and_what_is_wrong_with_its_decision_is_raised(cluster: ScriptedCluster, /) -> None:
    calls = []

    def last_first(members: Any, partitions: Any) -> Any:
        calls.append(partitions)
        if len(calls) == 1:
            return {member_id: [] for member_id in members}
        return {
            max(members): [TopicPartition(topic, index) for topic in partitions for index in range(partitions[topic])]
        }

    fill(cluster.log("orders"), 10)
    async with member(cluster, partition_assignment_strategy=last_first) as consumer:
        with pytest.raises(MinibrokerError, match=r"last_first.*no member got"):
            await anext(consumer)
        assert numbers(await take(consumer, 2)) == [0, 1]


@run_by(run)
async def test_iterations_that_are_cancelled_lose_nothing_through_rebalances(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 0), 30)
    fill(cluster.log("orders", 1), 30)
    seen: list[tuple[int, int]] = []
    async with member(cluster) as consumer:
        while len(seen) < 60:
            try:
                async with asyncio.timeout(0.002):
                    async for record in consumer:
                        seen.append((record.partition, record.offset))
                        await asyncio.sleep(0)
            except TimeoutError:
                if len(seen) % 7 == 0:
                    consumer.subscribe(["orders"])
            await consumer.commit()
    assert sorted(seen) == [(partition, offset) for partition in (0, 1) for offset in range(30)]


@run_by(run)
async def test_unsubscribe_and_close_free_a_rebalance_that_waits_for_the_record_in_hand(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders", 0), 10)
    for way in ("unsubscribe", "close"):
        first = member(cluster, partition_assignment_strategy="range")
        await first.start()
        await anext(first)
        async with member(cluster, partition_assignment_strategy="range") as second:
            await until(lambda first=first: "asked for the next" in first.status().summary, 10)  # type: ignore[misc]
            await (first.unsubscribe() if way == "unsubscribe" else first.close())
            await assigned(second, P0, P1)
        await first.close()

"""Errors, warnings and status texts for users of groups, and the calls that they may make at each moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupErrors
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed, InvalidSetting, MaxPollIntervalExceeded, WithinListener
from minibroker.client.group.commits import Commits, OffsetAndMetadata
from minibroker.client.group.heart import News, Overslept
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.waiting import until

P0, P1 = (TopicPartition("orders", index) for index in range(2))


class Scene:
    """A cluster with the topic of P0 and P1, which have 10 records each, and an administrator."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        few = {"offsets.topic.num.partitions": "4", "group.initial.rebalance.delay.ms": "0"}
        self.cluster = VirtualCluster(Simulation(), settings=few | (settings or {}))
        self.world = self.cluster.client("user")
        self.admin = Admin(self.cluster.bootstrap, world=self.world)

    async def prepare(self) -> None:
        await self.admin.create_topic("orders", partitions=2, replication_factor=3)
        async with Producer(self.cluster.bootstrap, world=self.world) as producer:
            for partition in (0, 1):
                await producer.send_batch("orders", [b"x"] * 10, partition=partition)

    def consumer(self, **settings: object) -> Consumer:
        return Consumer(
            self.cluster.bootstrap,
            **({"group": "billing", "topics": ["orders"], "world": self.world} | settings),  # type: ignore[arg-type]
        )


def play(program: Callable[[Scene], Awaitable[None]], settings: dict[str, str] | None = None, seed: int = 0) -> None:
    async def scenario() -> None:
        scene = Scene(settings)
        await scene.cluster.start()

        async def inside() -> None:
            async with scene.admin:
                await scene.prepare()
                await program(scene)

        await scene.world.process.run(inside())

    run(scenario(), seed=seed)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_close_does_not_warn_of_a_commit_that_another_member_has_made(caplog: pytest.LogCaptureFixture) -> None:
    async def program(scene: Scene) -> None:
        for number in range(40):
            settings = {"enable_auto_commit": True, "auto_commit_interval_ms": 1 + number % 7}
            async with scene.consumer(group=f"billing-{number}", **settings) as consumer:
                assert await consumer.poll(timeout_ms=5_000)
                await consumer.poll(timeout_ms=number)

    play(program)
    assert warnings(caplog) == []


def test_a_member_whose_user_is_away_leaves_once_and_rejoins_with_the_user(caplog: pytest.LogCaptureFixture) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer(max_poll_interval_ms=8_000) as away:
            assert await away.poll(timeout_ms=5_000)
            while await away.poll(timeout_ms=1_000):
                pass
            await asyncio.sleep(60)
            assert (await scene.admin.describe_groups(["billing"]))["billing"].members == ()
            with pytest.raises(MaxPollIntervalExceeded):
                await away.poll(timeout_ms=1_000)
            while away.assignment() != [P0, P1]:
                await away.poll(timeout_ms=1_000)

    play(program)
    [left] = warnings(caplog)
    assert "leaves group billing" in left


async def committed_too_late(consumer: Consumer, offsets: dict[TopicPartition, int] | None) -> CommitFailed:
    with pytest.raises(CommitFailed) as failed:
        await consumer.commit(offsets)
    assert "max_poll_interval_ms=8000" in str(failed.value)
    return failed.value


@pytest.mark.parametrize("offsets", [None, {P0: 5}])
@pytest.mark.parametrize("is_asked_again", [False, True])
@run_by(play)
async def test_a_commit_after_max_poll_interval_ms_is_refused_with_the_reason(
    scene: Scene, /, is_asked_again: bool, offsets: dict[TopicPartition, int] | None
) -> None:
    """The reason is the same whether the user has records in hand or not."""

    async with scene.consumer(max_poll_interval_ms=8_000) as consumer:
        read = 0
        while read < 20:
            read += len(await consumer.poll(timeout_ms=5_000))
        if is_asked_again:
            assert await consumer.poll(timeout_ms=1_000) == []
        await asyncio.sleep(20)
        failed = await committed_too_late(consumer, offsets)
        assert failed.errors.keys() == ({P0, P1} if offsets is None else offsets.keys())
        with pytest.raises(MaxPollIntervalExceeded):
            await consumer.poll(timeout_ms=1_000)
        assert await consumer.poll(timeout_ms=5_000)
        await consumer.commit()


@run_by(play)
async def test_a_commit_refused_because_the_member_just_left_says_why(scene: Scene, /) -> None:
    async with scene.consumer(max_poll_interval_ms=8_000) as consumer:
        assert await consumer.poll(timeout_ms=5_000)
        member = consumer._member
        assert member is not None
        hear = member._hear
        heard: list[News] = []
        member._heart._tell = heard.append
        await until(lambda: any(isinstance(news, Overslept) for news in heard), 20)
        await asyncio.sleep(1)  # until the member has left
        committing = asyncio.ensure_future(committed_too_late(consumer, None))
        await asyncio.sleep(0)  # the request is in flight before the loop runs the heart's callback
        for news in heard:
            hear(news)
        await committing


@run_by(play)
async def test_a_manual_commit_in_a_group_with_members_is_refused_with_the_remedy(scene: Scene, /) -> None:
    async with scene.consumer() as member, scene.consumer(topics=None, partitions=[P0]) as by_hand:
        assert await member.poll(timeout_ms=5_000)
        said = r"NON_EMPTY_GROUP: group billing has members, .*describe billing.*a group of their own, or subscribe"
        with pytest.raises(CommitFailed, match=said):
            await by_hand.commit({P0: 3})


@run_by(play)
async def test_a_commit_for_a_topic_that_was_deleted_does_not_wait(scene: Scene, /) -> None:
    async with scene.consumer() as consumer:
        assert await consumer.poll(timeout_ms=5_000)
        await scene.admin.delete_topic("orders")
        with pytest.raises(CommitFailed, match="UNKNOWN_TOPIC_OR_PARTITION"):
            async with asyncio.timeout(3):
                await consumer.commit({P0: 3})


class Calling(RebalanceListener):
    """A listener that makes a call the first time it is called."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self.call: Callable[[], Awaitable[object]] | None = call

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        call, self.call = self.call, None
        if call is not None:
            await call()


@pytest.mark.parametrize("by", ["itself", "a task"])
@pytest.mark.parametrize("what", ["unsubscribe", "close"])
@run_by(play)
async def test_a_listener_whose_call_would_wait_for_itself_gets_an_error_at_once(
    scene: Scene, /, what: str, by: str
) -> None:
    async def call() -> None:
        called = getattr(consumer, what)()
        await (called if by == "itself" else asyncio.wait_for(called, 100))

    async with scene.consumer(listener=Calling(call)) as consumer:
        with pytest.raises(WithinListener, match=rf"{what}\(\) was called by a rebalance listener"):
            async with asyncio.timeout(5):
                await anext(consumer)
        assert await consumer.poll(timeout_ms=5_000)
        await getattr(consumer, what)()


@run_by(play)
async def test_a_task_started_by_a_listener_may_unsubscribe_after_the_listener_returned(scene: Scene, /) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def soon() -> None:
        await asyncio.sleep(1)
        await consumer.unsubscribe()

    async def call() -> None:
        tasks.append(asyncio.create_task(soon()))

    async with scene.consumer(listener=Calling(call)) as consumer:
        await consumer.poll(timeout_ms=5_000)
        await asyncio.wait_for(tasks[0], 10)
        assert consumer.subscription() == []


@pytest.mark.parametrize("then", ["subscribe", "assign", "unsubscribe"])
@run_by(play)
async def test_a_consumer_whose_unsubscribe_was_cancelled_can_be_used(scene: Scene, /, then: str) -> None:
    cluster = scene.cluster
    async with scene.consumer() as consumer:
        assert await consumer.poll(timeout_ms=5_000)
        for broker_id in cluster.broker_ids:
            cluster.pause_broker(broker_id)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await consumer.unsubscribe()
        assert consumer.subscription() == []
        if then == "assign":
            with pytest.raises(InvalidSetting, match=r"still leaving group billing: call unsubscribe\(\) again"):
                consumer.assign([P0])
        for broker_id in cluster.broker_ids:
            cluster.resume_broker(broker_id)
        if then == "subscribe":
            consumer.subscribe(["orders"])
        else:
            async with asyncio.timeout(20):
                await consumer.unsubscribe()
            consumer.assign([P0])
        consumer_reads = [P0, P1] if then == "subscribe" else [P0]
        await until(lambda: consumer.assignment() == consumer_reads, 30)
        await asyncio.sleep(15)
        assert consumer.assignment() == consumer_reads
        assert await consumer.poll(timeout_ms=5_000)


# --- Reasons for a wait ---


class Slow(RebalanceListener):
    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        await asyncio.sleep(10)


def test_a_rebalance_that_waits_for_another_member_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def program(scene: Scene) -> None:
        async with (
            scene.consumer(client_id="idle", partition_assignment_strategy="range") as idle,
            scene.consumer(client_id="eager", partition_assignment_strategy="range") as eager,
        ):
            assert await idle.poll(timeout_ms=5_000)
            assert await eager.poll(timeout_ms=10_000) == []
            assert "waits for other members" in str(eager.status())
            assert "`minibroker groups describe billing`" in str(eager.status())
            assert "until this consumer is asked for the next records" in str(idle.status())
            await asyncio.gather(idle.poll(timeout_ms=5_000), eager.poll(timeout_ms=5_000))
            assert "waits" not in str(eager.status())

    play(program)
    [said] = [line for line in warnings(caplog) if "no progress" in line]
    assert said.startswith("eager: no progress for ")
    assert "group billing has been rebalancing for" in said
    assert "waits for other members" in said


@run_by(play)
async def test_a_member_without_partitions_reports_that_another_may_not_have_revoked_yet(scene: Scene, /) -> None:
    async with scene.consumer() as idle, scene.consumer() as eager:
        assert await idle.poll(timeout_ms=5_000)
        assert await eager.poll(timeout_ms=5_000) == []
        assert "gives its partitions up only when its user asks for the next records" in str(eager.status())


def test_a_rebalance_that_waits_for_a_listener_names_its_method(caplog: pytest.LogCaptureFixture) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer(listener=Slow()) as consumer:
            assert await consumer.poll(timeout_ms=3_000) == []
            assert "waits for this consumer's listener: on_partitions_assigned has not returned for 2." in str(
                consumer.status()
            )
            assert await consumer.poll(timeout_ms=10_000)

    play(program)
    [said] = warnings(caplog)
    assert "no progress for 5.0 s of group billing" in said
    assert "on_partitions_assigned has not returned" in said


def test_a_member_that_waits_for_replicas_of_the_offsets_topic_reports_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer() as consumer:
            assert await consumer.poll(timeout_ms=5_000)
        scene.cluster.kill_broker(2)
        await asyncio.sleep(15)
        async with scene.consumer(client_id="late") as late:
            for _ in range(10):
                assert await late.poll(timeout_ms=1_000) == []
                assert "__consumer_offsets" in str(late.status())
                assert "min.insync.replicas" in str(late.status())
            await scene.cluster.start_broker(2)
            await late.poll(timeout_ms=20_000)
            assert "__consumer_offsets" not in str(late.status())

    play(program, {"min.insync.replicas": "3"})
    assert [line for line in warnings(caplog) if "late: no progress for 5." in line and "__consumer_offsets" in line]


def test_a_member_without_a_coordinator_reports_too_few_brokers_for_the_offsets_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer(client_id="early") as early:
            for _ in range(10):
                assert await early.poll(timeout_ms=1_000) == []
                assert "waits for other members" not in str(early.status())
            assert "__consumer_offsets cannot be created" in str(early.status())
            assert "offsets.topic.replication.factor" in str(early.status())

    play(program, {"offsets.topic.replication.factor": "4"})
    said = [line for line in warnings(caplog) if line.startswith("early: no progress")]
    assert said
    assert all("offsets.topic.replication.factor" in line for line in said), said


def test_a_call_that_waits_while_all_partitions_are_paused_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer() as consumer:
            assert await consumer.poll(timeout_ms=5_000)
            consumer.pause(*consumer.assignment())
            await asyncio.sleep(20)
            assert warnings(caplog) == [], "no call waits for records"
            for _ in range(8):
                assert await consumer.poll(timeout_ms=1_000) == []
            consumer.resume(*consumer.assignment())
            await consumer.poll(timeout_ms=1_000)

    play(program)
    [said] = warnings(caplog)
    assert said.endswith("no progress for 5.0 s of records: all 2 partitions are paused: call resume()")


@pytest.mark.parametrize("group", [None, "billing"])
@run_by(play)
async def test_the_status_of_a_new_consumer_reports_no_problem(scene: Scene, /, group: str | None) -> None:
    said: set[str] = set()
    async with scene.consumer(group=group) as consumer:
        for _ in range(400):
            said.add(str(consumer.status()))
            await asyncio.sleep(0.000_5)
        assert await consumer.poll(timeout_ms=1_000)
    assert not [line for line in said if "does not answer" in line or "other members" in line]


@pytest.mark.parametrize("group", [None, "billing"])
@run_by(play)
async def test_a_topic_that_begins_to_match_is_read_within_half_a_minute(scene: Scene, /, group: str | None) -> None:
    async with scene.consumer(group=group, topics=None, pattern="order.*") as consumer:
        assert await consumer.poll(timeout_ms=5_000)
        await scene.admin.create_topic("orders-of-today", partitions=1, replication_factor=3)
        async with Producer(scene.cluster.bootstrap, world=scene.world) as producer:
            await producer.send("orders-of-today", b"new")
        async with asyncio.timeout(35):
            while not any(record.value == b"new" for record in await consumer.poll(timeout_ms=1_000)):
                pass


def test_a_member_whose_event_loop_ends_at_any_moment_commits_and_leaves_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`asyncio.run` ends by cancelling all tasks, including the client's, even in the middle of a join."""

    async def program(scene: Scene) -> None:
        loop = asyncio.get_running_loop()

        async def body(consumer: Consumer) -> None:
            async with consumer:
                async for _ in consumer:
                    pass

        for moment in range(36):
            world = scene.cluster.client(f"ends-{moment}")
            settings = {"group": f"ends-{moment}", "world": world, "enable_auto_commit": True}
            if moment % 3 == 0:
                settings |= {"topics": None, "partitions": [P0]}
            task = world.process.start(body(scene.consumer(**settings)))
            await asyncio.sleep(moment / 4_000)
            began = loop.time()
            doomed = world.process.tasks()
            for each in doomed:
                each.cancel()
            await asyncio.wait(doomed)
            assert task.cancelled()
            assert loop.time() - began < 0.2
            assert not world.process.tasks()
            try:
                described = (await scene.admin.describe_groups([f"ends-{moment}"]))[f"ends-{moment}"]
            except GroupErrors:  # the group does not exist yet
                continue
            assert not described.members, moment

    play(program)
    assert warnings(caplog) == []


def test_the_automatic_commits_of_an_idle_consumer_do_not_expire_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[float] = []
    original = Commits.commit

    async def commit(self: Commits, *arguments: Any) -> None:
        made.append(asyncio.get_running_loop().time())
        await original(self, *arguments)

    monkeypatch.setattr(Commits, "commit", commit)

    async def program(scene: Scene) -> None:
        async with scene.consumer(topics=None, partitions=[P0], enable_auto_commit=True) as consumer:
            assert len(await consumer.poll(5_000)) == 10
            for _ in range(30):  # two and a half minutes
                await consumer.poll(5_000)
                committed = (await scene.admin.list_group_offsets("billing")).get(P0)
                assert (committed is None and not made) or (committed is not None and committed.offset == 10)
            assert len(made) < 10

    play(program, {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"})


@pytest.mark.parametrize("read", [{}, {"topics": None, "partitions": [P0]}])
@pytest.mark.parametrize("offset", [4, 15])
@run_by(play)
async def test_an_idle_consumer_does_not_overwrite_commits_of_its_user_or_an_administrator(
    scene: Scene, /, read: dict[str, Any], offset: int
) -> None:
    async def committed() -> int | None:
        found = (await scene.admin.list_group_offsets("billing")).get(P0)
        return None if found is None else found.offset

    async def idle_at(expected: int) -> None:
        for _ in range(5):
            await consumer.poll(5_000)
            assert await committed() == expected

    async with scene.consumer(enable_auto_commit=True, **read) as consumer:
        while await consumer.poll(8_000):
            pass
        assert await committed() == 10
        await consumer.commit({P0: offset})
        await idle_at(offset)
        if read:
            await scene.admin.alter_group_offsets("billing", {P0: 3})
            await idle_at(3)


@pytest.mark.parametrize("read", [{}, {"topics": None, "partitions": [P0]}])
@run_by(play)
async def test_calls_that_commit_end_by_default_api_timeout_ms_while_no_coordinator_answers(
    scene: Scene, /, read: dict[str, Any]
) -> None:
    loop = asyncio.get_running_loop()
    settings = {"default_api_timeout_ms": 6_000, "auto_commit_interval_ms": 1_000, "enable_auto_commit": True}
    async with scene.consumer(**settings, **read) as consumer:
        assert await consumer.poll(5_000)
        for broker in scene.cluster.broker_ids:
            scene.cluster.pause_broker(broker)
        for _ in range(3):
            await consumer.poll(1_000)
        began = loop.time()
        with pytest.raises(CommitFailed, match="an earlier commit of this consumer has not ended within 6 s"):
            await consumer.commit()
        assert loop.time() < began + 6.1
        began = loop.time()
        await consumer.unsubscribe()
        assert loop.time() < began + 6.1
        for broker in scene.cluster.broker_ids:
            scene.cluster.resume_broker(broker)


@run_by(play, settings={"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"})
async def test_an_offset_does_not_expire_while_all_brokers_are_stopped(scene: Scene, /) -> None:
    async with scene.consumer(topics=None, partitions=[P0]) as consumer:
        await consumer.commit({P0: 7})
        for broker in scene.cluster.broker_ids:
            scene.cluster.pause_broker(broker)
        await asyncio.sleep(80)
        for broker in scene.cluster.broker_ids:
            scene.cluster.resume_broker(broker)
        await asyncio.sleep(6)
        assert (await consumer.committed(P0))[P0] == OffsetAndMetadata(7)


@pytest.mark.parametrize("name", [None, "worker-1"])
def test_members_that_are_removed_join_again_and_the_group_names_the_reason(name: str | None) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer(group_instance_id=name) as consumer:
            assert await consumer.poll(timeout_ms=5_000)
            await consumer.commit()
            [before] = (await scene.admin.describe_groups(["billing"]))["billing"].members
            with pytest.raises(InvalidSetting, match=f"the members of group billing are {before.member_id}"):
                await scene.admin.remove_group_members("billing", [name or before.member_id, "nope"])
            removed = await scene.admin.remove_group_members("billing", None if name is None else [name, name])
            assert removed == [before.member_id]
            after = None
            async with asyncio.timeout(60):
                while after is None or [each.partitions for each in after.members] != [(P0, P1)]:
                    await consumer.poll(timeout_ms=100)
                    after = (await scene.admin.describe_groups(["billing"]))["billing"]
            assert after.members[0].member_id != before.member_id
            assert any("removed by an administrator" in each.reason for each in after.rebalances)
        if name is not None:  # a static member does not leave by itself
            assert await scene.admin.remove_group_members("billing")
        assert await scene.admin.remove_group_members("billing") == []

    play(program)

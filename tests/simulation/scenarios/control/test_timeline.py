"""The timelines of all brokers of a cluster, read and merged into the report of a failover."""

from __future__ import annotations

import asyncio
import errno
from typing import TypeVar

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.timeline import ASK_AGAIN_AFTER_S, Entry, TimelineRead
from minibroker.client.cli.timelines.failovers import failovers, last_failover
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.words import milliseconds, sentence
from minibroker.deploy.simulator.cluster import LOG_DIR, PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_TIMELINE
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import SessionState
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, send_numbers, session_of
from tests.simulation.seeds import every_seed

T = TypeVar("T")

PARTITIONS = [TopicPartition("orders", number) for number in range(6)]
SETTLED_S = 1
"""After that, the controller has handled what was notified, and has its answers."""


async def _start_cluster(ended: list[int] | None = None) -> VirtualCluster:
    """`ended` gets the brokers that end by themselves, which otherwise fails the test."""
    told = None if ended is None else lambda broker_id, _: ended.append(broker_id)
    cluster = VirtualCluster(Simulation(), on_broker_failure=told)
    await cluster.start()
    await as_admin(cluster, lambda admin: admin.create_topic("orders", partitions=6, replication_factor=3))
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    return cluster


async def _read(cluster: VirtualCluster) -> TimelineRead:
    return await as_admin(cluster, lambda admin: admin.timeline())


async def _resignations(cluster: VirtualCluster) -> list[Entry]:
    return [entry for entry in (await _read(cluster)).entries if entry["event"] == "Resignation"]


async def _story(cluster: VirtualCluster) -> Story:
    story = last_failover((await _read(cluster)).entries)
    assert story is not None
    return story


async def _all_led_without(cluster: VirtualCluster, broker_id: int) -> None:
    await cluster.until(lambda: all(cluster.state(p).leader not in (NO_LEADER, broker_id) for p in PARTITIONS))
    await asyncio.sleep(SETTLED_S)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_the_surviving_brokers_report_the_failover_of_a_killed_controller(seed: int) -> None:
    cluster = await _start_cluster()
    [killed] = cluster.active_controllers()
    led = [str(p) for p in PARTITIONS if cluster.state(p).leader == killed]
    cluster.kill_broker(killed)
    await _all_led_without(cluster, killed)
    [successor] = cluster.active_controllers()
    found = await _read(cluster)
    assert list(found.errors) == [killed]
    assert killed not in {entry["controller"] for entry in found.entries}
    story = last_failover(found.entries)
    assert story is not None
    assert f"broker {killed} was lost and broker {successor} became the controller" in story.title
    events = [step.event for step in story.steps]
    assert events[0] == "ControllerSuspected"
    assert events.index("ControllerRemoved") < events.index("Startup") < events.index("LeaderAndIsrAnswered")
    text = "\n".join(story.lines())
    for partition in led:
        assert f"{partition}: leader {killed} -> " in text
    assert story.elected == len(led)
    assert story.leaderless == ()
    assert story.led_ms is not None
    assert story.written_ms is not None
    assert 0 < story.written_ms <= story.led_ms < 1_000

    # After its restart it also returns its entries from before the kill, which are on its disk.
    await cluster.start_broker(killed)
    async with asyncio.timeout(30):
        while (whole := await _read(cluster)).errors:  # the others must learn first that it is back
            await asyncio.sleep(0.1)
    assert [entry["epoch"] for entry in whole.entries] == sorted(entry["epoch"] for entry in whole.entries)
    assert {(entry["controller"], entry["event"]) for entry in whole.entries} >= {
        (killed, "Startup"),
        (killed, "CreateTopicsRequest"),
        (successor, "Startup"),
    }
    assert last_failover(whole.entries) == story


@run_by(on_virtual_loop, seed=5)
async def test_the_report_of_a_killed_leader_begins_with_the_controllers_suspicion() -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    killed = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    cluster.kill_broker(killed)
    await _all_led_without(cluster, killed)
    story = await _story(cluster)
    assert story.title == f"broker {killed} was lost"
    assert [step.event for step in story.steps][:3] == ["BrokerSuspected", "BrokerSuspected", "BrokerChange"]
    assert story.steps[0].text == f"The connection of broker {controller} to broker {killed} is lost."
    assert story.steps[1].at_ms > 0
    assert f"remove /brokers/ids/{killed} " in story.steps[1].details[0]
    assert {step.broker for step in story.steps} == {controller}
    assert story.led_ms is not None


@run_by(on_virtual_loop, seed=8)
async def test_a_controller_whose_session_ended_reports_for_how_long_zookeeper_was_away() -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    session = session_of(cluster, controller)
    short_s, long_s = 3, 9  # the session lasts for 6
    session.suspend()
    await asyncio.sleep(short_s)
    session.resume()
    await cluster.until(lambda: session.state is SessionState.CONNECTED)
    assert cluster.active_controllers() == [controller]
    session.suspend()
    await asyncio.sleep(long_s)
    session.resume()
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    async with asyncio.timeout(30):
        while not (resignations := await _resignations(cluster)):
            await asyncio.sleep(0.1)
    [resignation] = resignations
    assert resignation["controller"] == controller
    assert 9_000 <= resignation["away_ms"] <= 9_500
    told = " ".join(step.text for step in (await _story(cluster)).steps)
    assert f"Broker {controller}, the controller until now, had lost its connection to ZooKeeper " in told
    assert f"and was without it for {milliseconds(resignation['away_ms'])}." in told
    assert sentence(resignation).endswith(" had lost its connection to ZooKeeper 9,000 ms before.")


@run_by(on_virtual_loop, seed=8)
async def test_brokers_whose_sessions_survive_record_for_how_long_zookeeper_was_away() -> None:
    cluster = await _start_cluster()
    sessions = [session_of(cluster, broker_id) for broker_id in cluster.broker_ids]
    for away_s in (0.5, 3.0):  # the sessions last for 6
        for session in sessions:
            session.suspend()
        await asyncio.sleep(away_s)
        for session in sessions:
            session.resume()
        await asyncio.sleep(SETTLED_S)
    found = (await _read(cluster)).entries
    away = [entry for entry in found if entry["event"] == "ZooKeeperAway"]
    assert sorted(entry["controller"] for entry in away) == list(cluster.broker_ids)
    assert {(entry["epoch"], entry["lasted_ms"]) for entry in away} == {(1, 3_000)}
    assert last_failover(found) is None
    again = [index for index, entry in enumerate(found) if entry["event"] == "SessionReconnected"]
    told = {entry["event"]: sentence(entry) for entry in found[again[-1] :]}
    assert told["LogDirFailure"] == "The notifications of lost log directories were read; there was none."
    assert not [
        text for text in told.values() if "lost a log" in text or "have changed" in text or "has changed" in text
    ]


@run_by(on_virtual_loop, seed=9)
async def test_the_report_of_a_broker_that_was_cut_from_zookeeper_says_for_how_long() -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    away = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    session, away_s = session_of(cluster, away), 9  # the session lasts for 6
    session.suspend()
    await asyncio.sleep(away_s)
    session.resume()
    await cluster.until(lambda: session.state is SessionState.EXPIRED)
    await cluster.until(lambda: all(away in cluster.state(p).isr for p in PARTITIONS))
    found = (await _read(cluster)).entries
    assert not [entry for entry in found if entry["event"] == "ZooKeeperAway"], "its session did not survive"
    [ended] = [entry for entry in found if entry["event"] == "SessionExpired"]
    assert (ended["controller"], ended["epoch"]) == (away, 1)
    assert 9_000 <= ended["away_ms"] <= 9_500
    story = await _story(cluster)
    without = f"no ZooKeeper for {milliseconds(ended['away_ms'])}"
    assert story.title == f"broker {away} lost the registration and registered again ({without})"
    assert story.steps[0].text.endswith(f" It had {without}, and its session ended.")
    assert not story.noticed_late


@run_by(on_virtual_loop)
async def test_neither_the_stop_of_a_whole_cluster_nor_its_start_is_a_failover() -> None:
    cluster = await _start_cluster()
    for broker_id in cluster.broker_ids:
        await cluster.stop_broker(broker_id)
    await asyncio.sleep(20)
    began_s = cluster.simulation.loop.time()
    await cluster.start()
    await cluster.until(lambda: all(cluster.state(p).leader != NO_LEADER for p in PARTITIONS))
    await asyncio.sleep(1)
    assert last_failover((await _read(cluster)).entries) is None
    cluster.kill_broker(cluster.broker_ids[0])
    await cluster.until(lambda: all(cluster.state(p).leader in cluster.broker_ids[1:] for p in PARTITIONS))
    await asyncio.sleep(1)
    story = await _story(cluster)
    assert story.title.startswith(f"broker {cluster.broker_ids[0]} was lost")
    assert max(step.at_ms for step in story.steps) < (cluster.simulation.loop.time() - began_s) * 1_000


@run_by(on_virtual_loop, seed=6)
async def test_the_report_of_a_hanging_controller_begins_when_another_broker_heard_from_it_for_the_last_time() -> None:
    """No broker suspects it, because its connections stay open: ZooKeeper ends its session."""

    cluster = await _start_cluster()
    [paused] = cluster.active_controllers()
    await asyncio.sleep(2)
    paused_ms = cluster.client("clock").clock.wall_ms()
    cluster.pause_broker(paused)
    await _all_led_without(cluster, paused)
    story = await _story(cluster)
    silences = [step for step in story.steps if step.event == "BrokerSilent"]
    assert {step.broker for step in silences} == set(cluster.broker_ids) - {paused}
    assert silences == list(story.steps[:2])
    assert paused_ms - 600 <= story.began_ms <= paused_ms  # fetches are answered every 500 ms
    assert story.led_ms is not None
    assert story.led_ms > 5_500
    assert not story.noticed_late
    cluster.resume_broker(paused)
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_broker_that_was_stopped_and_was_not_replaced_records_for_how_long(seed: int) -> None:
    cluster = await _start_cluster()
    stopped = next(broker_id for broker_id in cluster.broker_ids if cluster.state(PARTITIONS[0]).leader == broker_id)
    for paused_s in (0.5, 4.0):  # its session lasts for 6
        cluster.pause_broker(stopped)
        await asyncio.sleep(paused_s)
        cluster.resume_broker(stopped)
        await asyncio.sleep(SETTLED_S)
    found = (await _read(cluster)).entries
    [stall] = [entry for entry in found if entry["event"] == "BrokerStalled"]
    assert (stall["controller"], stall["epoch"]) == (stopped, 1)
    assert 3_850 <= stall["lasted_ms"] <= 4_000
    assert last_failover(found) is None
    assert cluster.state(PARTITIONS[0]).leader == stopped


@pytest.mark.parametrize("apart_s", [0, 0.3])
@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_after_an_outage_of_the_whole_cluster_all_partitions_are_led_again_when_brokers_run(
    seed: int, apart_s: float
) -> None:
    cluster = await _start_cluster()
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
        await asyncio.sleep(apart_s)
    outage_s = restart_s = 5
    await asyncio.sleep(outage_s)
    await asyncio.gather(*(cluster.start_broker(broker_id) for broker_id in cluster.broker_ids))
    await asyncio.sleep(restart_s)
    entries = (await _read(cluster)).entries
    story = failovers(entries)[-1]
    [controller] = cluster.active_controllers()
    assert story.title == f"all brokers had ended, and broker {controller} was started and became the controller"
    assert (story.elected, story.leaderless, story.noticed_late) == (len(PARTITIONS), (), True)
    assert story.led_ms is not None
    assert not story.may_have_run
    assert "until the last of " in story.ending()
    of_topic = failovers(entries, "elsewhere")[-1]
    assert (of_topic.title, of_topic.elected) == (story.title, 0)


@pytest.mark.parametrize("is_controller", [False, True])
@run_by(on_virtual_loop, seed=12)
async def test_the_report_of_a_broker_that_ends_because_its_disk_is_full_names_that(is_controller: bool) -> None:
    ended: list[int] = []
    cluster = await _start_cluster(ended)
    [controller] = cluster.active_controllers()
    full = controller if is_controller else next(b for b in cluster.broker_ids if b != controller)
    cluster.simulation.host(host_name(full)).disk.faults.break_directory(LOG_DIR, errno.ENOSPC)
    partition = next(p for p in PARTITIONS if cluster.state(p).leader == full)
    await send_numbers(cluster, partition.topic, range(3), partition.partition)
    await _all_led_without(cluster, full)
    assert ended == [full]
    story = await _story(cluster)
    assert story.title.startswith(f"broker {full} was lost (full disk)")
    text = "\n".join(story.lines())
    assert f"Broker {full} reports that its log directory has no space left (" in text
    assert "[Errno 28]" in text
    assert "hangs" not in text
    assert story.led_ms is not None


@run_by(on_virtual_loop, seed=7)
async def test_a_reader_gets_each_entry_once_across_a_failover_and_a_broker_restart() -> None:
    cluster = await _start_cluster()
    [killed] = cluster.active_controllers()

    async def follow(admin: Admin) -> None:
        reader = admin.timeline_reader()
        entries = list((await reader.read()).entries)
        assert [e["controller"] for e in entries if e["event"] == "Startup"][-1] == killed
        cluster.kill_broker(killed)
        await _all_led_without(cluster, killed)
        found = await reader.read()
        assert list(found.errors) == [killed]
        entries += found.entries
        assert [e["controller"] for e in entries if e["event"] == "Startup"][-1] != killed
        assert (await reader.read()).entries == ()
        await cluster.start_broker(killed)
        await asyncio.sleep(3)
        found = await reader.read()
        assert dict(found.errors) == {}
        entries += found.entries
        assert any(killed in entry.get("added", []) for entry in found.entries)
        names = [(entry["controller"], entry["number"]) for entry in entries]
        assert len(set(names)) == len(names)

    await as_admin(cluster, follow)


@run_by(on_virtual_loop, seed=11)
async def test_a_hanging_broker_is_named_each_time_and_delays_no_reader_for_long() -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    hanging = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)

    async def read(admin: Admin) -> None:
        reader = admin.timeline_reader()
        cluster.pause_broker(hanging)
        found = await reader.read()
        assert list(found.errors) == [hanging]
        assert "did not answer within 3 s" in str(found.errors[hanging])
        assert {entry["controller"] for entry in found.entries} == {controller}
        async with asyncio.timeout(2.5):  # the client may first ask the hanging broker for metadata
            assert list((await reader.read()).errors) == [hanging]
        cluster.resume_broker(hanging)
        await asyncio.sleep(ASK_AGAIN_AFTER_S)
        assert dict((await reader.read()).errors) == {}

    await as_admin(cluster, read)


@run_by(on_virtual_loop, seed=3)
async def test_a_moved_clock_neither_moves_a_failover_nor_merges_it_with_another() -> None:
    cluster = await _start_cluster()
    clock = cluster.client("clock").clock
    began_ms = []
    for moved_by_s in (300, -300):
        [controller] = cluster.active_controllers()
        for broker_id in cluster.broker_ids:
            if broker_id != controller:
                cluster.simulation.host(host_name(broker_id)).clock_offset_ms += moved_by_s * 1_000
        began_ms.append(clock.observed_ms())
        cluster.kill_broker(controller)
        await _all_led_without(cluster, controller)
        await cluster.start_broker(controller)
        await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in PARTITIONS))
        await asyncio.sleep(60)
    told = failovers((await _read(cluster)).entries)
    assert [story.began_ms for story in told] == [pytest.approx(each, abs=1_000) for each in began_ms]
    assert all(story.led_ms is not None and story.led_ms < 1_000 for story in told)


@run_by(on_virtual_loop, seed=8)
async def test_a_broker_returns_its_timeline_in_pages_and_from_a_given_time() -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    world = cluster.client("asking")

    async def ask(after: int, since_ms: int, most: int) -> m.DescribeTimelineResponse:
        connection = await open_connection(world.network, host_name(controller), PORT, client_id="t", timeout_s=1)
        return await connection.request(DESCRIBE_TIMELINE, m.DescribeTimelineRequest(after, since_ms, most))

    async def program() -> None:
        whole = await ask(0, 0, 1_000)
        assert whole.is_complete
        assert len(whole.entries) == whole.last_number
        first = await ask(0, 0, 3)
        assert [bytes(e) for e in first.entries] == [bytes(e) for e in whole.entries[:3]]
        assert not first.is_complete
        rest = await ask(3, 0, 1_000)
        assert [bytes(e) for e in rest.entries] == [bytes(e) for e in whole.entries[3:]]
        assert (await ask(0, world.clock.wall_ms() + 1, 1_000)).entries == []
        assert (await ask(2**63 - 1, -(2**63), 1)).entries == []

    await world.process.run(program())


@run_by(on_virtual_loop, seed=10)
async def test_a_timeline_that_is_too_large_for_one_answer_is_read_in_several() -> None:
    cluster = await _start_cluster()
    controller = cluster.broker(0).controller
    assert controller is not None
    for _ in range(20):
        controller.timeline.record("Large", "it is large", 9, {"notes": ["x" * 100_000]})
    recorded = [entry for entry in controller.timeline.entries() if entry["event"] == "Large"]
    found = await _read(cluster)
    assert [entry for entry in found.entries if entry["event"] == "Large"] == recorded


@run_by(on_virtual_loop, seed=9)
async def test_a_damaged_line_of_the_timeline_is_skipped_and_numbers_continue_after_a_restart() -> None:
    cluster = await _start_cluster()
    [killed] = cluster.active_controllers()
    before = cluster.broker(killed).controller
    assert before is not None
    recorded = before.timeline.last_number
    cluster.kill_broker(killed)
    file = cluster.simulation.host(host_name(killed)).disk.file(f"{LOG_DIR}/controller-timeline.jsonl")
    file.write([b'{"number": "x"}\n{"torn'], len(file.data))
    await _all_led_without(cluster, killed)
    await cluster.start_broker(killed)
    again = cluster.broker(killed).controller
    assert again is not None
    assert again.timeline.entries() == before.timeline.entries()
    assert again.timeline.last_number == recorded

"""Containers that fail, on a real engine: nothing acknowledged is lost, and the time without writes is printed.

Run by `make compose-test`, which builds the images first. Fails where there is no docker engine.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from urllib.request import urlopen

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.scenarios.stages.compose import BROKERS, run, service_of
from minibroker.deploy.trials.trial import Trial, longest_gap
from minibroker.protocol.model import TopicPartition
from tests.compose.containers import PROJECT, SERVICES, Containers, is_whole, wait_until

PARTITIONS = 3
PATIENCE_S = 120.0
ACKNOWLEDGED_BETWEEN = 500
"""Records on every partition before, during and after a fault."""

FAULTS: dict[str, tuple[Callable[[Containers, str], None], Callable[[Containers, str], None]]] = {
    "killed": (Containers.kill, Containers.start),
    "paused": (Containers.pause, Containers.unpause),
    "disconnected": (Containers.disconnect, Containers.connect),
}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lines() -> Iterator[bytes]:
    return (b"%020d %s" % (number, b"x" * 79) for number in itertools.count())


@pytest.fixture(scope="module")
def containers(request: pytest.FixtureRequest) -> Iterator[Containers]:
    cluster = Containers()
    cluster.down()  # remains of an interrupted run
    try:
        began_s = time.monotonic()
        cluster.up()
        up_s = time.monotonic() - began_s
        asyncio.run(first_record(cluster))
        first_s = time.monotonic() - began_s
        wait_until(lambda: all(map(cluster.is_healthy, SERVICES)), "all containers are healthy", PATIENCE_S)
        healthy_s = time.monotonic() - began_s
        tell(
            f"\ndocker-compose up: returned after {up_s:.1f} s, first acknowledged record after {first_s:.1f} s, "
            f"all healthy after {healthy_s:.1f} s"
        )
        yield cluster
        if request.session.testsfailed:
            tell(cluster.logs()[-20_000:])
    finally:
        cluster.down()
    left = run("docker", "ps", "--all", "--quiet", f"--filter=label=com.docker.compose.project={PROJECT}")
    assert not left.strip(), "a container was left behind"


async def first_record(cluster: Containers) -> None:
    """Create a topic with a replica on every broker and one record, as soon as the cluster accepts it."""
    async with asyncio.timeout(PATIENCE_S):
        while len((await asyncio.to_thread(cluster.view)).brokers) < len(BROKERS):
            await asyncio.sleep(0.02)
        async with Admin(cluster.bootstrap) as admin:
            await admin.create_topic("first", partitions=1, replication_factor=len(BROKERS))
        async with Producer(cluster.bootstrap, acks="all") as producer:
            await producer.send("first", b"hello")


def test_the_console_shows_the_cluster_and_breaks_nothing(containers: Containers) -> None:
    wait_until(lambda: "★ leader" in containers.console_page("/")[1], "the console shows a leader", PATIENCE_S)
    status, page = containers.console_page("/")
    assert status == 200
    assert "first-0" in page
    assert "3 of 3 alive" in page
    assert "Faults" not in page
    assert containers.console_page("/faults", b"action=kill&who=all")[0] == 404
    wait_until(lambda: containers.is_healthy("console"), "the console is healthy", PATIENCE_S)
    published = run("docker", "port", containers.container("console") or "").split()
    assert published[-1].startswith("127.0.0.1:")


def test_the_metrics_of_each_broker_are_published_on_loopback(containers: Containers) -> None:
    for broker in BROKERS:
        published = containers.compose("port", service_of(broker), "9095").strip()
        assert published.startswith("127.0.0.1:")
        with urlopen(f"http://{published}/metrics", timeout=PATIENCE_S) as page:
            assert b"kafka_controller_kafkacontroller_activecontrollercount" in page.read()


def victim_of(cluster: Containers, role: str, topic: str) -> str:
    view = cluster.view()
    if role == "zookeeper":
        return "zookeeper"
    if role == "controller":
        return f"broker-{view.controller_id}"
    return f"broker-{view.partitions[TopicPartition(topic, 0)].leader_id}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("role", ["leader", "controller", "zookeeper"])
async def test_nothing_acknowledged_is_lost_while_a_container_fails(
    containers: Containers, role: str, fault: str
) -> None:
    topic = f"{role}-{fault}"
    break_it, mend_it = FAULTS[fault]

    async with Admin(containers.bootstrap) as admin:
        await admin.create_topic(topic, partitions=PARTITIONS, replication_factor=len(BROKERS))
    trial = Trial(containers.bootstrap, topic, PARTITIONS, lines(), records_per_second=1_500)
    async with trial.sending():
        await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
        victim = await asyncio.to_thread(victim_of, containers, role, topic)
        logged = len(await asyncio.to_thread(suspicions, containers, victim))
        began_s = time.monotonic()
        await asyncio.to_thread(break_it, containers, victim)
        try:
            await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
        finally:
            await asyncio.to_thread(mend_it, containers, victim)
        await asyncio.to_thread(
            wait_until, lambda: is_whole(containers.view()), "every replica is in sync again", PATIENCE_S
        )
        await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
        gap = longest_gap(trial.acknowledged, began_s, time.monotonic())
    verdict = await trial.verdict()
    tell(f"{role} {fault}: write gap {gap.seconds * 1_000:.0f} ms; {verdict}")
    assert verdict.flawless
    assert verdict.failed == 0
    if victim != "zookeeper" and fault != "paused":  # a paused container keeps its connections; its session expires
        assert len(await asyncio.to_thread(suspicions, containers, victim)) > logged


def suspicions(cluster: Containers, victim: str) -> list[str]:
    text = f"broker {victim.removeprefix('broker-')} is suspected to have crashed"
    return [line for line in cluster.logs().splitlines() if text in line]


async def test_containers_that_are_stopped_end_cleanly_and_come_back_with_their_data(containers: Containers) -> None:
    async with Admin(containers.bootstrap) as admin:
        await admin.create_topic("stopped", partitions=PARTITIONS, replication_factor=len(BROKERS))
    trial = Trial(containers.bootstrap, "stopped", PARTITIONS, lines(), records_per_second=1_500)
    async with trial.sending():
        await trial.wait_for_acknowledgements(ACKNOWLEDGED_BETWEEN, PATIENCE_S)
    await asyncio.to_thread(containers.compose, "stop")
    codes = {broker: containers.state(f"broker-{broker}")["ExitCode"] for broker in BROKERS}
    assert codes == dict.fromkeys(BROKERS, 0)
    await asyncio.to_thread(containers.up)
    await asyncio.to_thread(
        wait_until, lambda: is_whole(containers.view()), "every replica is in sync again", PATIENCE_S
    )
    verdict = await trial.verdict()
    assert verdict.flawless
    assert verdict.read_back == verdict.sent

"""Bugs of Kafka's controller, planted one by one, and the test that sees each. A storm may need many seeds for a bug
that takes two rare faults together (`make mutants` says how many); these tests do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from tests.running import run_test
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.scenarios.control.test_forwarding import until_controller
from tests.simulation.scenarios.helpers import with_client
from tests.unit.broker.handlers.test_handlers_produce_and_control import (
    test_orders_for_a_former_run_of_the_broker_are_refused as orders_for_a_former_run,
)
from tests.unit.controller.test_controller_executor import (
    test_another_controller_deposes_before_anything_is_written as deposed_writes_nothing,
)
from tests.unit.controller.test_leadership import (
    test_a_candidate_whose_winning_reply_was_lost_takes_office as won_unheard,
)


def a_broker_that_is_killed_and_started_at_once_is_registered() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        cluster.simulation.network.block(host_name(0), host_name(1))  # so that no broker removes the old znode first
        cluster.simulation.network.block(host_name(0), host_name(2))
        cluster.kill_broker(0)
        async with asyncio.timeout(30):
            await cluster.start_broker(0)

    with_client(program)


def a_broker_that_is_back_before_it_is_missed_leads_again() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        controller = await until_controller(cluster)
        leader = (controller + 1) % 3
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", assignments=[[leader]])
        cluster.kill_broker(leader)
        await cluster.start_broker(leader)  # its new registration replaces the old one in a single transaction
        async with Producer(cluster.bootstrap, world=world, delivery_timeout_ms=20_000) as producer:
            async with asyncio.timeout(20):
                await producer.send("orders", b"value")

    with_client(program, settings={"zookeeper.session.timeout.ms": "60000", "broker.crash.detection.ms": "60000"})


SCENES: dict[str, Callable[[Path], None]] = {
    "unfenced-controller-writes": lambda _: run_test(deposed_writes_nothing),
    "bounce-not-noticed": lambda _: a_broker_that_is_back_before_it_is_missed_leads_again(),
    "stale-broker-epoch-accepted": lambda path: run_test(orders_for_a_former_run, tmp_path=path),
    "elected-and-never-started": lambda _: run_test(won_unheard),
    "own-old-registration-in-the-way": lambda _: a_broker_that_is_killed_and_started_at_once_is_registered(),
}

ELSEWHERE = (
    "old-deletion-hits-the-new-topic",  # test_topics_that_come_back.py
    "removed-replicas-are-forgotten",  # test_reassignment.py
)


@pytest.mark.parametrize("name", SCENES)
def test_a_bug_that_kafka_had_is_seen_and_nothing_is_seen_without_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    SCENES[name](tmp_path / "without")
    with planted(name), pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        SCENES[name](tmp_path / "with")


@pytest.mark.parametrize("number", ["1096", "1120", "6082", "7165", "7235", "13407"])
def test_each_of_these_bugs_is_among_them(number: str) -> None:
    assert any(f"KAFKA-{number}" in MUTANTS[name].family for name in (*SCENES, *ELSEWHERE))

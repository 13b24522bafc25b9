"""`minibroker stop` on a cluster of real processes moves the leaders first and reports it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from minibroker.deploy.local.processes import send_signal, wait_until_gone
from minibroker.deploy.local.who import AllBrokers, BrokerId, Controller
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC
from minibroker.deploy.trials.trial import Trial, TrialVerdict
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell

LONGEST_STOP_S = 15.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    # A rebalance, five seconds after a controller's election, would move leaders between a look and a stop.
    settings = {"auto.leader.rebalance.enable": "false", **NO_OFFSETS_TOPIC}
    with running_shell(tmp_path_factory.mktemp("shell"), settings) as shell:
        shell.ok("topics", "create", "orders", "--partitions", "3", "--replication-factor", "3")
        yield shell


@pytest.fixture
def minibroker(running: Shell) -> Shell:
    return running.healthy()


def leaders(shell: Shell) -> dict[int, int]:
    described = shell("topics", "describe", "orders", "--format", "json").json()["partitions"]
    return {each["partition"]: each["leader"] for each in described}


@pytest.mark.slow
def test_stop_moves_the_leaders_and_reports_their_number(minibroker: Shell) -> None:
    for who in ("leader:orders-0", "controller"):
        before = leaders(minibroker)
        said = minibroker("stop", who, "--format", "json").json()
        [victim] = said["ids"]
        assert said["handed_over"][str(victim)] == {
            "moved": list(before.values()).count(victim),
            "remaining": 0,
            "among_them": [],
            "problem": "",
        }
        assert victim not in leaders(minibroker).values()
        minibroker.ok("start", str(victim))
        minibroker.healthy()
    shown = minibroker.ok("stop", "1").splitlines()
    assert shown[0] == "stop: broker 1"
    assert shown[1].startswith("broker 1: ")
    assert "moved to other brokers" in shown[1]
    minibroker.ok("start", "1")


@pytest.mark.slow
def test_a_second_signal_ends_the_wait_for_other_brokers(minibroker: Shell) -> None:
    first, second, _ = (entry.id for entry in minibroker.cluster.file().brokers)
    minibroker.ok("stop", str(first))
    process = minibroker.cluster.file().broker(second).process
    assert process is not None
    send_signal(process, signal.SIGTERM)
    # A commit needs two replicas, so without the first broker the second one waits two seconds.
    assert wait_until_gone([process], 0.5) == [process]
    began_s = time.monotonic()
    send_signal(process, signal.SIGTERM)
    assert wait_until_gone([process], LONGEST_STOP_S) == []
    assert minibroker.cluster.handed_over(second) is None, "it did not wait"
    assert time.monotonic() - began_s < LONGEST_STOP_S
    assert minibroker.ok("start", "all") == f"start: broker {first}, broker {second}\n"


@pytest.mark.slow
def test_all_brokers_stop_at_once_without_a_long_wait_for_each_other(minibroker: Shell) -> None:
    began_s = time.monotonic()
    said = minibroker("stop", "all", "--format", "json").json()
    assert said["ids"] == [1, 2, 3]
    assert time.monotonic() - began_s < LONGEST_STOP_S
    minibroker.ok("start", "all")


@pytest.mark.slow
def test_the_controller_is_killed_during_a_controlled_shutdown_and_no_record_is_lost(minibroker: Shell) -> None:
    cluster = minibroker.cluster

    async def play() -> TrialVerdict:
        values = (b"%d" % number for number in itertools.count())
        trial = Trial(cluster.bootstrap(), "orders", 3, values, records_per_second=1_000)
        async with trial.sending():
            for pause_s in (0.0, 0.005, 0.02):
                await trial.wait_for_acknowledgements(50, PATIENCE_S)
                await asyncio.to_thread(_stop_one_and_kill_the_controller, minibroker, pause_s)
        return await trial.verdict()

    verdict = asyncio.run(play())
    assert verdict.flawless, verdict


def _stop_one_and_kill_the_controller(minibroker: Shell, pause_s: float) -> None:
    cluster = minibroker.cluster
    [controller] = cluster.resolve(Controller())
    stopping = next(entry for entry in cluster.file().brokers if entry.id != controller)
    assert stopping.process is not None
    send_signal(stopping.process, signal.SIGTERM)
    time.sleep(pause_s)
    cluster.kill(BrokerId(int(controller)))
    assert wait_until_gone([stopping.process], LONGEST_STOP_S) == []
    cluster.start(AllBrokers())
    minibroker.healthy()

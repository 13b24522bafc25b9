"""`minibroker timeline` on a cluster of real processes with killed brokers."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minibroker.deploy.local.processes import wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell, start

pytestmark = pytest.mark.slow


@pytest.fixture
def minibroker(tmp_path: Path) -> Iterator[Shell]:
    with running_shell(tmp_path) as shell:
        shell.ok("topics", "create", "orders", "--partitions", "3")
        yield shell


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _controller(minibroker: Shell) -> int:
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [c for c in [minibroker.cluster.view().controller_id] if c is not None]
        return bool(found)

    assert wait_until(is_there, PATIENCE_S)
    return found[0]


def _kill_controller(minibroker: Shell) -> int:
    killed = _controller(minibroker)
    minibroker.ok("kill", str(killed))

    def is_replaced() -> bool:
        view = minibroker.cluster.view()
        leaders = {state.leader_id for state in view.partitions.values()}
        return view.controller_id not in (killed, None) and bool(leaders) and not leaders & {killed, -1}

    assert wait_until(is_replaced, PATIENCE_S)
    return killed


class Following:
    """`minibroker timeline --follow` and its output so far."""

    def __init__(self, shell: Shell) -> None:
        self.process: subprocess.Popen[bytes] = start(["timeline", "--follow", "--format", "json"], shell.directory)
        self._printed = b""

    def entries(self) -> list[Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while select.select([descriptor], [], [], 0)[0] and (read := os.read(descriptor, 1 << 16)):
            self._printed += read
        return _lines(self._printed[: self._printed.rfind(b"\n") + 1].decode())

    def has(self, event: str, controller: int) -> bool:
        return any((entry["event"], entry["controller"]) == (event, controller) for entry in self.entries())

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        assert self.process.stderr is not None
        errors = self.process.stderr.read().decode()
        return self.process.wait(PATIENCE_S), errors

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def test_the_last_failover_is_shown_from_the_first_suspicion_to_the_last_leader(minibroker: Shell) -> None:
    assert "no failover is recorded" in minibroker.refused(1, "timeline", "--last-failover")
    killed = _kill_controller(minibroker)
    successor = _controller(minibroker)

    def story() -> str:
        return minibroker.ok("timeline", "--last-failover")

    assert wait_until(lambda: " led again." in story(), PATIENCE_S)
    told = story().splitlines()
    assert told[0].startswith(
        f"The last failover: broker {killed} was lost and broker {successor} became the controller"
    )
    assert re.search(rf"The connection of broker \d to broker {killed} is lost\.$", told[1])
    text = "\n".join(told)
    assert f"cannot reach broker {killed}, the controller (127.0.0.1:" in text
    assert f"has removed broker {killed} from office" in text
    assert f"Broker {successor} is elected controller" in text
    assert re.search(rf"orders-\d: leader {killed} -> \d, in sync \d \d \d -> \d \d \(leader epoch 1, znode", text)
    assert re.search(r"Broker \d has assumed its role in \d+ partitions, \d+ ms after", text)
    assert re.fullmatch(r"In all: \d+ ms until the (partition|last of \d+ partitions) (was|were) led again\.", told[-1])

    *steps, whole = _lines(minibroker.ok("timeline", "--last-failover", "--format", "json"))
    assert whole["event"] == "Failover"
    assert 0 < whole["written_ms"] <= whole["led_ms"] < 10_000
    assert [step["at_ms"] for step in steps] == sorted(step["at_ms"] for step in steps)

    header, row = minibroker.ok("timeline", "--failovers").splitlines()
    assert header.split("  ")[0] == "NUMBER"
    assert re.match(rf"1 .* \d+ ms .* broker {killed} was lost and broker {successor} became the controller$", row)
    of_orders = minibroker.ok("timeline", "--failover", "1", "--topic", "orders")
    assert f"leader {killed} -> " in of_orders
    assert "__consumer_offsets" not in of_orders
    assert "1 failover recorded" in minibroker.refused(2, "timeline", "--failover", "2")
    assert "partition of topic 'nope'" in minibroker.refused(1, "timeline", "--topic", "nope")

    # The entries of the dead broker are read from its files, unless brokers are named.
    entries = _lines(minibroker.ok("timeline", "--format", "json"))
    assert (killed, 1, "Startup") in {(entry["controller"], entry["epoch"], entry["event"]) for entry in entries}
    assert [entry["epoch"] for entry in entries] == sorted(entry["epoch"] for entry in entries)
    elsewhere = minibroker("timeline", "--bootstrap", minibroker.cluster.bootstrap(), "--format", "json")
    assert f"the entries of broker {killed} are missing: it is not alive" in elsewhere.err
    assert killed not in {entry["controller"] for entry in _lines(elsewhere.out)}
    minibroker.ok("start", str(killed))
    back = minibroker.ok("timeline", "--bootstrap", minibroker.cluster.bootstrap(), "--format", "json")
    assert killed in {entry["controller"] for entry in _lines(back)}

    # A loss that no controller can record yet is told beside the failover before.
    minibroker.ok("pause", "zookeeper")
    minibroker.ok("kill", str(killed))
    during = minibroker("timeline", "--last-failover")
    assert f"no later failover is recorded, but broker {killed} does not answer (" in during.err
    assert during.out.splitlines()[0] == told[0]
    hint = "no later failover is recorded, but brokers "
    without = re.compile(rf"^{hint}\d and \d have had no ZooKeeper for \d+ s: nothing can be elected", re.M)
    assert wait_until(lambda: without.search(minibroker("timeline", "--last-failover").err) is not None, PATIENCE_S)

    # If no broker answers, all entries are read from files.
    minibroker.ok("kill", "all")
    dead = minibroker("timeline", "--failovers")
    assert row in dead.out.splitlines()
    assert "the entries are read from the brokers' files: no broker answered" in dead.err


def test_a_broker_that_was_stopped_and_kept_its_partitions_is_told_with_the_time(minibroker: Shell) -> None:
    stopped, paused_s = _controller(minibroker), 2.0
    minibroker.ok("pause", str(stopped))
    time.sleep(paused_s)
    minibroker.ok("resume", str(stopped))

    def stalls() -> list[Any]:
        entries = _lines(minibroker.ok("timeline", "--format", "json"))
        return [entry for entry in entries if (entry["event"], entry["controller"]) == ("BrokerStalled", stopped)]

    assert wait_until(lambda: bool(stalls()), PATIENCE_S)
    assert stalls()[-1]["lasted_ms"] > 1_000 * paused_s - 100
    told = rf"  broker {stopped}, epoch 1: Broker {stopped} runs again\. It answered nothing for [\d,]+ ms, because"
    assert re.search(told, minibroker.ok("timeline"))
    assert f"; broker {stopped} answered nothing for " in minibroker.refused(1, "timeline", "--last-failover")


def test_brokers_whose_sessions_survive_a_pause_of_zookeeper_tell_for_how_long_it_did_not_answer(
    tmp_path: Path,
) -> None:
    paused_s = 5.5
    with running_shell(tmp_path, {"zookeeper.session.timeout.ms": "12000"}) as minibroker:  # a ping every 4 s
        minibroker.ok("pause", "zookeeper")
        time.sleep(paused_s)
        minibroker.ok("resume", "zookeeper")

        def away() -> list[Any]:
            entries = _lines(minibroker.ok("timeline", "--format", "json"))
            assert "SessionExpired" not in [entry["event"] for entry in entries]
            return [entry for entry in entries if entry["event"] == "ZooKeeperAway"]

        assert wait_until(lambda: len(away()) >= 3, PATIENCE_S)
        assert {entry["controller"] for entry in away()} == {1, 2, 3}
        assert all(entry["lasted_ms"] > 1_000 for entry in away())
        assert "ZooKeeper answers broker 2 again, after " in minibroker.ok("timeline")


def test_follow_survives_the_death_of_the_broker_it_asks_and_ends_with_ctrl_c(minibroker: Shell) -> None:
    first = _controller(minibroker)
    following = Following(minibroker)
    try:
        assert wait_until(lambda: following.has("Startup", first), PATIENCE_S)
        killed = _kill_controller(minibroker)
        second = _controller(minibroker)
        assert wait_until(lambda: following.has("Startup", second), PATIENCE_S)
        minibroker.ok("start", str(killed))
        assert wait_until(
            lambda: any(killed in entry.get("added", []) for entry in following.entries()[-30:]), PATIENCE_S
        )
        printed = [(entry["controller"], entry["number"]) for entry in following.entries()]
        assert len(set(printed)) == len(printed)
        code, errors = following.interrupt()
        assert code == 130
        assert "Traceback" not in errors
    finally:
        following.close()


def test_entries_before_the_given_time_are_left_out_and_bad_options_are_refused(minibroker: Shell) -> None:
    now_ms = time.time_ns() // 1_000_000 + 60_000
    assert minibroker.ok("timeline", "--since", str(now_ms)) == ""
    told = minibroker.ok("timeline", "--since", "2020-01-01")
    assert re.search(
        r"^\d\d:\d\d:\d\d\.\d\d\d  broker \d, epoch 1: A request came to create the topics orders\.$", told, re.M
    )
    assert "give a time" in minibroker.refused(2, "timeline", "--since", "yesterday")
    assert "give one of them" in minibroker.refused(2, "timeline", "--follow", "--last-failover")

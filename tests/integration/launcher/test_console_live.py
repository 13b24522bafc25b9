"""`minibroker console` on a cluster of real processes, read by an HTTP client."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell, start


@pytest.fixture
def minibroker(tmp_path: Path) -> Iterator[Shell]:
    with running_shell(tmp_path) as shell:
        shell.ok("topics", "create", "orders", "--partitions", "3")
        yield shell


class Console:
    """The process, and requests to it."""

    def __init__(self, shell: Shell, *options: str) -> None:
        self._streams: list[News] = []
        self.process: subprocess.Popen[bytes] = start(["console", "--port", "0", *options], shell.directory)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().decode().strip()
        assert address.startswith("http://127.0.0.1:"), self._ended()
        self.address = address.rstrip("/")
        self._port = int(self.address.rpartition(":")[2])

    def page(self, path: str) -> str:
        connection = self.open(path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200, (path, answer.status, text)
        return text

    def open(self, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("GET", path)
        return connection

    def command(self, page: str, **fields: str) -> None:
        """Press a button of a page."""
        token = page.partition('name="token" value="')[2].partition('"')[0]
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        origin = {"Origin": self.address, "Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/faults", urlencode({"token": token, **fields}), origin)
        answer = connection.getresponse()
        assert answer.status == 303, answer.read()
        connection.close()

    def news(self, path: str) -> News:
        self._streams.append(News(self, path))
        return self._streams[-1]

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        return self._ended()

    def _ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self.process.kill()
        self.process.communicate()


class News:
    """An event stream, and the sections that it has sent, by id."""

    def __init__(self, console: Console, path: str) -> None:
        self._connection = console.open(path)
        self._answer = self._connection.getresponse()
        assert self._answer.getheader("content-type", "").startswith("text/event-stream")
        self.sections: dict[str, str] = {}

    def until(self, section: str, *words: str) -> str:
        """Read until the section has all words."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(word in self.sections.get(section, "") for word in words):
            assert time.monotonic() < deadline_s, (words, self.sections)
            line = self._answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                for html in json.loads(line.removeprefix(b"data: ")):
                    self.sections[html.partition('id="section-')[2].partition('"')[0]] = html
        return self.sections[section]

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


@pytest.fixture
def console(minibroker: Shell) -> Iterator[Console]:
    console = Console(minibroker)
    yield console
    console.close()


def test_a_killed_leader_is_seen_live(minibroker: Shell, console: Console) -> None:
    minibroker.ok("produce", "orders", stdin=b"one\ntwo\nthree\n")
    minibroker.ok("consume", "orders", "--group", "billing", "--from", "earliest", "--count", "3")
    overview = console.page("/")
    assert "orders-0" in overview
    assert "★ leader" in overview
    assert "No failover is recorded" in console.page("/failovers")
    groups = console.page("/groups")
    assert "billing" in groups
    assert "lag 0" in groups
    assert "Lag in the last ten minutes" in groups
    assert "is gone: it leaves" in groups

    failovers, partitions = console.news("/events/failovers"), console.news("/events")
    failovers.until("failovers", "No failover is recorded")
    partitions.until("brokers", "✓ alive")
    killed = minibroker.ok("kill", "leader:orders-0").split()[-1]
    assert "<svg" in failovers.until("failovers", f"Broker {killed} was lost", " until ", "assumed its role")
    partitions.until("brokers", "✗ dead")
    partitions.until("troubles", "Partitions in trouble", "out of sync")
    assert f"Broker {killed} was lost" in console.page("/failovers?topic=orders")

    metrics = console.news("/events/metrics")
    metrics.until("plots", "per second now", "1 in ten minutes, the longest")
    metrics.until("producers", "Records/s", "no request", "orders")

    assert minibroker.status()["console"] == f"{console.address}/"
    # With all streams open, Ctrl-C ends the console at once.
    assert console.interrupt() == (130, "")
    assert minibroker.status()["console"] is None


def test_records_and_settings_are_shown(minibroker: Shell, console: Console) -> None:
    minibroker.ok("produce", "orders", "--partition", "0", stdin="".join(f"value {n}\n" for n in range(120)).encode())
    minibroker.ok("configs", "alter", "--topic", "orders", "--set", "retention.ms=86400000")
    news = console.news("/events/records?topic=orders")
    news.until("records", "value 119", "value 70")
    minibroker.ok("produce", "orders", "--partition", "1", stdin=b'{"is":"json"}\n')
    news.until("records", "is&quot;: &quot;json")
    assert 'href="/records?topic=orders"' in console.page("/records")
    page = console.page("/records?topic=orders&partition=0&start=10")
    assert "value 10<" in page
    assert "value 59<" in page
    assert "value 60<" not in page
    assert "value 0<" in console.page("/records?topic=orders&partition=0&start=@2020-01-01")
    assert "There is no record here" in console.page("/records?topic=orders&start=@2120-01-01")
    assert "76 61 6c" in console.page("/records?topic=orders&form=hex")
    for query in ("topic=none", "topic=orders&partition=3", "topic=orders&partition=x", "topic=orders&start=yesterday"):
        problem = console.page(f"/records?{query}")
        assert 'role="alert"' in problem
        assert "No broker answers" not in problem

    topic = console.page("/settings?topic=orders")
    assert "86400000" in topic
    assert "Settings of topic orders" in topic
    assert "Settings of broker 2" in console.page("/settings?broker=2")
    assert "Settings of all brokers" in console.page("/settings?broker=all")
    assert 'role="alert"' in console.page("/settings?topic=none")


@pytest.mark.slow
def test_buttons_break_and_mend_the_cluster_and_failovers_name_them(minibroker: Shell) -> None:
    console = Console(minibroker, "--allow-faults")
    try:
        page, states, failovers = (
            console.page("/faults"),
            console.news("/events/faults"),
            console.news("/events/failovers"),
        )
        states.until("members", "✓ running")
        console.command(page, action="kill", who="leader:orders-0")
        said = states.until("applied", "kill: broker ")
        killed = said.partition("kill: broker ")[2][0]
        states.until("members", "✗ not running")
        failovers.until("failovers", f"Broker {killed} was lost", "kill leader:orders-0", "before the first step")
        failovers.until("faults", "kill leader:orders-0", f"Broker {killed} was lost")
        console.command(page, action="start", who=killed)
        states.until("applied", f"start: broker {killed}")
        console.command(page, action="resume", who=killed)
        states.until("applied", f"broker {killed} is not paused")
        for action, state in {"pause": "? paused", "resume": "✓ running", "stop": "✗ not running"}.items():
            console.command(page, action=action, who=killed)
            states.until("applied", f"{action}: broker {killed}")
            states.until("members", state)
    finally:
        console.close()


@pytest.mark.slow
def test_a_paused_broker_counts_down_to_the_end_of_its_session(minibroker: Shell, console: Console) -> None:
    overview = console.news("/events")
    overview.until("brokers", "registered, timeout 6 s")
    paused = minibroker.ok("pause", "leader:orders-0").split()[-1]
    said = overview.until("brokers", "last heard", "session ends in")
    left = float(said.partition("session ends in ")[2].partition(">")[2].partition("<")[0])
    assert 0 <= left <= 6
    assert "No broker answers" not in console.page("/metrics")
    # ZooKeeper ends it, as the page has said.
    overview.until("brokers", "? paused (out of the cluster)", "over; last answer at")
    overview.until("problems", f"broker {paused} is paused", f"<code>minibroker resume {paused}</code>")
    minibroker.ok("resume", paused)
    overview.until("problems", 'id="section-problems"></section>')
    console.news("/events/failovers").until("interruptions", f"Broker {paused} answered nothing for ")


@pytest.mark.slow
def test_refused_writes_are_shown_by_error(minibroker: Shell, console: Console) -> None:
    minibroker.ok("topics", "create", "safe", "--partitions", "1", "--config", "min.insync.replicas=3")
    metrics, overview = console.news("/events/metrics"), console.news("/events")
    leader = minibroker("topics", "describe", "safe", "--format", "json").json()["partitions"][0]["leader"]
    minibroker.ok("kill", str(leader % 3 + 1))
    overview.until("troubles", "under min.insync.replicas")
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with start(["produce", "safe"], minibroker.directory, stdin=subprocess.PIPE, **silent) as producing:
        assert producing.stdin is not None
        try:
            producing.stdin.write(b"refused\n")
            producing.stdin.close()
            metrics.until("producers", "✗ refuses: NOT_ENOUGH_REPLICAS")
            metrics.until("plots", "batches refused per second")
        finally:
            producing.kill()


@pytest.mark.slow
def test_a_full_disk_is_named_with_the_fault_and_the_remedies(tmp_path: Path) -> None:
    with running_shell(tmp_path, allow_faults=True) as shell:
        shell.ok("topics", "create", "orders", "--partitions", "3")
        console = Console(shell, "--allow-faults")
        try:
            overview, faults = console.news("/events"), console.news("/events/faults")
            overview.until("brokers", "✓ alive")
            shell("fault", "fill-disk", "2")
            faults.until("members", "is full", 'value="heal"')
            overview.until("problems", "Injected faults", "minibroker heal 2")
            with suppress(AssertionError):  # the producer may outlast the broker
                shell.ok("produce", "orders", stdin=(b"x" * 1_000 + b"\n") * 100)
            overview.until(
                "problems", "No space left on device", "<code>minibroker heal 2</code>, then <code>minibroker start 2"
            )
        finally:
            console.close()


@pytest.mark.slow
def test_a_reassignment_is_watched_by_its_bytes(minibroker: Shell, console: Console) -> None:
    minibroker.ok("topics", "create", "moved", "--partitions", "1", "--replication-factor", "1")
    minibroker.ok("produce", "moved", stdin=(b"x" * 1_000 + b"\n") * 4_000)
    here = minibroker("topics", "describe", "moved", "--format", "json").json()["partitions"][0]["leader"]
    there = here % 3 + 1
    rate, replicas = "follower.replication.throttled.rate", "follower.replication.throttled.replicas"
    minibroker.ok("configs", "alter", "--topic", "moved", "--set", f"{replicas}=*")
    minibroker.ok("configs", "alter", "--broker", str(there), "--set", f"{rate}=1000")
    overview = console.news("/events")
    overview.until("troubles", "Every partition has a leader")
    plan = {"version": 1, "partitions": [{"topic": "moved", "partition": 0, "replicas": [there]}]}
    minibroker.ok("reassign", "execute", "-", stdin=json.dumps(plan).encode())
    said = overview.until("moves", "Reassignments: 1 partition", "moved-0", f"broker {there} (", f"broker {here}<")
    assert " %" in said
    overview.until("troubles", "being reassigned")
    minibroker.ok("configs", "alter", "--broker", str(there), "--delete", rate)
    overview.until("moves", 'id="section-moves"></section>')
    overview.until("troubles", "Every partition has a leader")


@pytest.mark.slow
def test_a_cluster_that_hangs_is_said_not_to_answer_until_it_is_back(minibroker: Shell, console: Console) -> None:
    minibroker.ok("kill", "leader:orders-0")
    failovers, partitions = console.news("/events/failovers"), console.news("/events")
    failovers.until("failovers", " until ")
    partitions.until("brokers", "✗ dead")
    minibroker.ok("pause", "all")
    partitions.until("notice", "No broker answers", "last known state")
    failovers.until("notice", "No broker answers")
    for path in ("/", "/groups"):
        page = console.page(path)
        assert "No broker answers" in page
        assert "client is closed" not in page
    minibroker.ok("resume", "all")
    partitions.until("notice", 'id="section-notice"></section>')
    failovers.until("notice", 'id="section-notice"></section>')
    assert " until " in console.page("/failovers")

    for command in (("kill", "all"), ("down",)):
        minibroker.ok(*command)
        afterwards = Console(minibroker)
        try:
            page = afterwards.page("/failovers")
            assert "No broker answers" in page
            assert " until " in page
        finally:
            afterwards.close()

"""minibroker's fixtures in users' test runs, each in its own pytest process.

The option -p names the plugin, so that this repository's is used, installed or not; test_installed_wheel.py finds one
by its entry point.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.testing_support import left_behind
from tests.waiting import until_true

PATIENCE_S = 120.0
OURS = ("-p", "minibroker.deploy.testing.plugin")


class Run:
    """A user's directory with tests, and a directory for temporary files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.temporary = directory / "temporary"
        self.temporary.mkdir()

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        # Without the environment of this run's xdist workers, and only with the named plugins.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *OURS, *arguments],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Run pytest; return its exit code and output. Checks that it leaves nothing behind."""
        with self.begin(*arguments) as process:
            printed, _ = process.communicate(timeout=PATIENCE_S)
        assert left_behind(self.temporary) == []
        return process.returncode, printed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


INI = """
[pytest]
asyncio_default_fixture_loop_scope = function
minibroker_brokers = 2
minibroker_settings =
    num.partitions=2
    log.segment.bytes = 1048576
    2:log.segment.bytes=2097152
"""

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def minibroker_settings(minibroker_settings):
    return {**minibroker_settings, "num.partitions": "4"}

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

EVERY_KIND = """
import unittest
import pytest
from minibroker import Admin, Producer, ConfigResource, ResourceType, sync
from minibroker.testing import LocalCluster, SyncLocalCluster

topics = []

def partitions(cluster, topic):
    with sync.Admin(cluster.bootstrap_servers) as admin:
        assert admin.list_topics() == [topic]  # each test has its own
        topics.append(topic)
        return len(admin.describe_topic(topic).partitions)

def test_of_a_function(minibroker_cluster: SyncLocalCluster, minibroker_topic: str):
    assert minibroker_topic == "test_of_a_function-1"
    assert len(minibroker_cluster.bootstrap_servers.split(",")) == 2
    assert partitions(minibroker_cluster, minibroker_topic) == 4
    with sync.Admin(minibroker_cluster.bootstrap_servers) as admin:
        brokers = [ConfigResource(ResourceType.BROKER, number) for number in ("1", "2")]
        found = admin.describe_configs(brokers)
        assert [found[broker]["log.segment.bytes"].value for broker in brokers] == ["1048576", "2097152"]
    minibroker_cluster.kill("all")
    minibroker_cluster.kill("zookeeper")

@pytest.mark.minibroker_topic(partitions=1, replication_factor=1, configs={"retention.ms": "1000"})
def test_of_a_marked_function(minibroker_cluster, minibroker_topic):
    assert partitions(minibroker_cluster, minibroker_topic) == 1  # and the cluster is whole again

@pytest.mark.parametrize("text", ["a b/\\u00e9"])
def test_with_any_parameter(minibroker_topic, text):
    assert minibroker_topic == "test_with_any_parameter-a-b-xe9-3"

@pytest.mark.asyncio
async def test_under_pytest_asyncio(minibroker_async_cluster: LocalCluster, minibroker_topic: str):
    async with Producer(minibroker_async_cluster.bootstrap_servers) as producer:
        await producer.send(minibroker_topic, b"1", partition=0)
        assert await minibroker_async_cluster.kill(f"leader:{minibroker_topic}-0")
        await producer.send(minibroker_topic, b"2", partition=0)

@pytest.mark.anyio
async def test_under_anyio(minibroker_async_cluster: LocalCluster, minibroker_topic: str):
    async with Producer(minibroker_async_cluster.bootstrap_servers) as producer:
        await producer.send(minibroker_topic, b"1")
    await minibroker_async_cluster.wait_healthy(30)

class TestOfAClass(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def cluster(self, minibroker_cluster, minibroker_topic):
        self.cluster, self.topic = minibroker_cluster, minibroker_topic

    def test_method(self):
        assert partitions(self.cluster, self.topic) == 4

@pytest.mark.minibroker_topic(partition=1)
def test_with_a_mistyped_marker(minibroker_topic):
    raise AssertionError("must not run")

@pytest.mark.minibroker_topic(replication_factor=9)
def test_with_an_impossible_marker(minibroker_topic):
    raise AssertionError("must not run")

def test_that_fails(minibroker_topic):
    assert minibroker_topic == ""

def test_that_deletes_its_topic_itself(minibroker_cluster, minibroker_topic):
    minibroker_cluster.delete_topics([minibroker_topic])
"""


@pytest.mark.slow
def test_the_fixtures_serve_functions_coroutines_and_classes_and_obey_ini_and_markers(run: Run) -> None:
    run.write("pytest.ini", INI)
    run.write("conftest.py", CONFTEST)
    run.write("test_every_kind.py", EVERY_KIND)
    code, printed = run.pytest("-p", "pytest_asyncio.plugin", "-p", "anyio.pytest_plugin", "--strict-markers", "-rA")
    assert code == 1, printed
    assert "7 passed" in printed, printed
    assert "FAILED test_every_kind.py::test_that_fails" in printed, printed
    assert "ERROR test_every_kind.py::test_with_a_mistyped_marker" in printed, printed
    assert (
        "takes the keywords partitions, replication_factor and configs, and nothing else: it was given partition\n"
        in printed
    ), printed
    [told] = re.findall(r"ERROR at setup of test_with_an_impossible_marker _+\n(.*?)\n___", printed, re.DOTALL)
    assert "the replication factor is 9: it must be 1 to 2" in told, printed
    assert "another exception" not in told, printed
    assert ".py:" not in told, printed
    assert "1 failed, 7 passed, 2 errors" in printed, printed


WRECKERS = """
import pytest
from minibroker.testing import LaunchTimedOut

clusters = []

def is_whole(cluster):
    try:
        cluster.wait_healthy(0)
    except LaunchTimedOut:
        return False
    return True

@pytest.fixture(scope="module")
def topic(minibroker_cluster):
    minibroker_cluster.wait_healthy(0)  # so early already
    minibroker_cluster.create_topics(["of-the-module"])

@pytest.fixture(scope="class")
def topic_of_class(minibroker_cluster):
    minibroker_cluster.wait_healthy(0)
    minibroker_cluster.create_topics(["of-the-class"])
    minibroker_cluster.kill("all")

@pytest.fixture
def without_1(minibroker_cluster):
    return minibroker_cluster.kill(1)

def test_that_kills_all(minibroker_cluster):
    clusters.append(minibroker_cluster)
    minibroker_cluster.kill("all")
    minibroker_cluster.kill("zookeeper")

@pytest.mark.skip
def test_that_is_skipped(minibroker_cluster):
    raise AssertionError("must not run")

def test_without_a_cluster():
    assert not is_whole(clusters[0])  # it waits for nothing

def test_with_a_fixture_for_the_module(topic, minibroker_cluster):
    minibroker_cluster.kill(1)
    minibroker_cluster.start(1)

@pytest.mark.asyncio
async def test_under_pytest_asyncio(minibroker_async_cluster):
    await minibroker_async_cluster.wait_healthy(0)
    await minibroker_async_cluster.kill("controller")

@pytest.mark.anyio
async def test_under_anyio(minibroker_async_cluster):
    await minibroker_async_cluster.wait_healthy(0)
    await minibroker_async_cluster.pause(1)
    await minibroker_async_cluster.resume(1)
    await minibroker_async_cluster.pause("zookeeper")

class TestOfAClass:
    def test_first(self, topic_of_class, minibroker_cluster):
        assert not is_whole(minibroker_cluster)  # its own fixture has the last word

    def test_second(self, topic_of_class, minibroker_cluster):
        minibroker_cluster.wait_healthy(0)

def test_with_a_fault_of_its_own_fixture(without_1, minibroker_cluster):
    assert without_1 == [1]
    assert not is_whole(minibroker_cluster)
"""


@pytest.mark.slow
def test_each_test_finds_a_healthy_cluster_whatever_the_previous_test_did(run: Run) -> None:
    run.write("pytest.ini", "[pytest]\nminibroker_brokers = 2\nasyncio_default_fixture_loop_scope = function\n")
    run.write("conftest.py", CONFTEST)
    run.write("test_wreckers.py", WRECKERS)
    code, printed = run.pytest("-p", "pytest_asyncio.plugin", "-p", "anyio.pytest_plugin")
    assert (code, "8 passed, 1 skipped" in printed) == (0, True), printed


FAILING = """
import pytest
from minibroker.testing import LocalCluster, SyncLocalCluster

def test_earlier(minibroker_cluster):
    minibroker_cluster.kill("controller")

def test_that_fails(minibroker_cluster):
    controller = minibroker_cluster.find("controller")
    minibroker_cluster.kill("controller")
    minibroker_cluster.pause("zookeeper")
    raise AssertionError(f"killed {controller[0]}")

def test_that_passes(minibroker_cluster):
    minibroker_cluster.kill(1)

def test_that_expects_an_exception_of_its_own_cluster():
    with pytest.raises(ValueError, match="^mine$"), SyncLocalCluster(1) as cluster:
        raise ValueError("mine")

@pytest.mark.anyio
async def test_of_its_own_cluster():
    async with LocalCluster(1) as cluster:
        print(cluster)
        await cluster.stop(1)
        pytest.fail("mine")
"""


@pytest.mark.slow
def test_the_report_of_a_failed_test_tells_what_happened_to_the_cluster(run: Run) -> None:
    run.write("pytest.ini", "[pytest]\nminibroker_brokers = 2\n")
    run.write("conftest.py", CONFTEST)
    run.write("test_failing.py", FAILING)
    code, printed = run.pytest("-p", "anyio.pytest_plugin", "--minibroker-keep", "kept")
    assert (code, "2 failed, 3 passed" in printed) == (1, True), printed
    _, told, mine = printed.split("minibroker's cluster, call")
    killed = re.search(r"AssertionError: killed (\d)", printed)
    assert killed is not None
    assert f"broker {killed[1]} gone" in told
    assert "ZooKeeper paused" in told
    assert "what the test did: 2" in told
    assert re.search(rf"\+\d+ ms  kill controller \(broker {killed[1]}\)", told)
    assert re.search(r"s  pause zookeeper", told)
    assert "broker 1 gone" in mine
    assert "stop 1 (broker 1)" in mine
    assert re.search(r"<LocalCluster of 1 broker at 127\.0\.0\.1:\d+, data in /", printed)
    kept = [found for text in (told, mine) if (found := re.search("^data: (.*)$", text, re.MULTILINE))]
    assert [Path(found[1]).parent for found in kept] == [run.directory / "kept"] * 2
    stories = subprocess.run(
        [sys.executable, "-m", "minibroker", "timeline", "--failovers", "--data", kept[0][1]],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "became the controller" in stories.stdout

    code, printed = run.pytest("--minibroker-keep", "pytest.ini")
    assert (code, printed) == (4, "ERROR: --minibroker-keep 'pytest.ini': File exists; give a directory\n\n")


UNREPAIRED = """
def test_that_breaks_what_is_not_mended(minibroker_cluster):
    minibroker_cluster.kill(1)
    (minibroker_cluster.directory / "broker.secret").unlink()
    (minibroker_cluster.directory / "broker.secret").mkdir()

def test_after_it(minibroker_cluster):
    raise AssertionError("must not run")
"""


@pytest.mark.slow
def test_a_cluster_that_cannot_be_repaired_is_an_error_of_one_sentence(run: Run) -> None:
    run.write("pytest.ini", "[pytest]\nminibroker_brokers = 1\n")
    run.write("test_unrepaired.py", UNREPAIRED)
    code, printed = run.pytest()
    assert (code, "1 passed, 1 error" in printed) == (1, True), printed
    [told] = re.findall(r"ERROR at setup of test_after_it _+\n(.*?)\n=", printed, re.DOTALL)
    assert "broker 1" in told, printed
    assert ".py:" not in told, printed


WORKERS = """
import os
import pathlib
import pytest

@pytest.mark.parametrize("number", range(4))
def test_number(minibroker_cluster, minibroker_topic, number, worker_id):
    seen = pathlib.Path("seen", worker_id)
    seen.parent.mkdir(exist_ok=True)
    seen.write_text(minibroker_cluster.bootstrap_servers)
    minibroker_cluster.kill(1)
    minibroker_cluster.start(1)

@pytest.mark.parametrize("number", range(4))
def test_that_leaves_nobody(minibroker_cluster, number):
    minibroker_cluster.wait_healthy(0)
    minibroker_cluster.kill("all")
"""


@pytest.mark.slow
def test_each_worker_of_xdist_has_its_own_cluster(run: Run) -> None:
    run.write("pytest.ini", "[pytest]\nminibroker_brokers = 1\n")
    run.write("test_workers.py", WORKERS)
    code, printed = run.pytest("-p", "xdist.plugin", "-n", "2")
    assert (code, "8 passed" in printed) == (0, True), printed
    seen = [path.read_text() for path in (run.directory / "seen").iterdir()]
    assert len(set(seen)) == 2


ENDLESS = """
import time

def test_endless(minibroker_cluster, minibroker_topic):
    print("it runs", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_or_killed_run_leaves_nothing_behind(run: Run, number: signal.Signals) -> None:
    run.write("pytest.ini", "[pytest]\nminibroker_brokers = 1\n")
    run.write("test_endless.py", ENDLESS)
    with run.begin("-s") as process:
        assert process.stdout is not None
        while "it runs" not in (line := process.stdout.readline()):
            assert line
        assert len(left_behind(run.temporary)) >= 3
        process.send_signal(number)
        process.stdout.read()
        process.wait(PATIENCE_S)
        until_true(lambda: not left_behind(run.temporary), PATIENCE_S)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("minibroker_settings = many", "minibroker_settings: 'many' is neither NAME=VALUE nor ID:NAME=VALUE"),
        ("minibroker_brokers = 0", "brokers=0: give a whole number from 1 to"),
        ("minibroker_settings = nonsense=1", "nonsense"),
    ],
)
def test_an_invalid_ini_setting_is_an_error_of_one_sentence(run: Run, line: str, told: str) -> None:
    run.write("pytest.ini", f"[pytest]\n{line}\n")
    run.write("test_it.py", "def test_it(minibroker_topic): ...")
    code, printed = run.pytest()
    assert code != 0
    assert told in printed, printed
    assert "1 error" in printed, printed
    assert not re.search(r"\.py:\d+", printed), printed


UNUSED = """
import sys

def test_without_a_cluster():
    heavy = {"asyncio", "ssl", "msgspec", "kazoo", "typer", "uvloop", "minibroker.client", "minibroker.protocol"}
    print(sorted(name for name in sys.modules if name.startswith("minibroker")))
    assert not heavy & set(sys.modules)
"""


def test_a_run_without_our_fixtures_imports_nothing_heavy(run: Run) -> None:
    run.write("test_unused.py", UNUSED)
    code, printed = run.pytest("-s")
    assert code == 0, printed
    assert (
        "['minibroker', 'minibroker.deploy', 'minibroker.deploy.testing', 'minibroker.deploy.testing.plugin']"
        in printed
    )

"""Fixtures for all tests: a real ZooKeeper, and clusters of real brokers."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import pytest
from hypothesis import HealthCheck, settings

from minibroker.deploy.local import ports
from minibroker.deploy.local import zookeeper as zookeeper_launcher
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import send_signal, wait_until_gone
from minibroker.protocol.world import real
from tests import running

# The speed and load of the machine must not decide whether a property holds. CI draws the same examples in each run;
# other runs draw new ones.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("any machine")

# The user's environment must not choose the cluster.
for _name in ("MINIBROKER_BOOTSTRAP", "MINIBROKER_DATA"):
    os.environ.pop(_name, None)

# A shell lets its background jobs, and so their children, ignore Ctrl-C; tests of Ctrl-C need the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_chroot_numbers = itertools.count(1)


class _PortsOfThisWorker(SystemRandom):
    """Draws from the ports of this worker. Another worker must not draw a port while its server is not listening yet,
    or after the server was killed."""

    def randint(self, a: int, b: int) -> int:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        share = (b - a + 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        return super().randint(a + worker * share, a + (worker + 1) * share - 1)


ports._random = _PortsOfThisWorker()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    running.run_test(pyfuncitem.obj, **pyfuncitem.funcargs)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last test of a file, exclude all surviving objects, such as imported modules, from garbage collection.
    Each virtual run begins and ends with a collection, and late in a run of thousands of tests these took most of the
    time."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def files_are_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the files that a test leaves open, such as those of killed logs. One process runs thousands of tests, and
    Spark's gateway waits for ever if the process has 1024 descriptors."""
    own = f"{request.getfixturevalue('tmp_path')}/" if "tmp_path" in request.fixturenames else None
    yield
    if own is None:
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(own):
                real._open_files.discard(int(name))
                os.close(int(name))


@pytest.fixture(scope="session")
def zookeeper_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`127.0.0.1:PORT` of a real ZooKeeper for the whole run. All tests share it; use `zookeeper` instead."""
    directory = tmp_path_factory.mktemp("zookeeper")
    log = directory / "zookeeper.log"
    port = free_ports(1)[0]
    process = zookeeper_launcher.start(zookeeper_launcher.find_program(), directory, log, port)
    try:
        zookeeper_launcher.wait_until_serving(process, port, log)
        yield f"{LOOPBACK}:{port}"
    finally:
        send_signal(process, signal.SIGKILL)
        wait_until_gone([process], 10)


@pytest.fixture
def zookeeper(zookeeper_address: str) -> str:
    """A connection string with a chroot for this test alone: `127.0.0.1:PORT/test-N`."""
    return f"{zookeeper_address}/test-{next(_chroot_numbers)}"


@pytest.fixture
def local_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """`local_cluster(brokers=3, settings=None, zookeeper=None)`: a cluster of real processes, killed after the test.

    It has its own ZooKeeper unless an address is given. Its logs are in its `directory`.
    """
    clusters: list[LocalCluster] = []

    def start(
        brokers: int = 3, settings: Mapping[str, str] | None = None, zookeeper: str | None = None
    ) -> LocalCluster:
        cluster = LocalCluster(tmp_path / f"cluster-{len(clusters) + 1}")
        clusters.append(cluster)
        cluster.up(brokers, free_ports(brokers)[0], zookeeper, settings)
        return cluster

    yield start
    for cluster in clusters:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)

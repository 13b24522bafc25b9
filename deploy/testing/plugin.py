"""Fixtures for pytest: a cluster for the test run, and a new topic for each test that uses one.

pytest imports this module in every run where minibroker is installed, so it imports only pytest, and the cluster's
modules when a fixture is used. See docs/testing.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minibroker.client.administering.topics import NewTopic
    from minibroker.deploy.testing.cluster import LocalCluster, SyncLocalCluster

_SETTINGS = "minibroker_settings"
_BROKERS = "minibroker_brokers"
_MARKER = "minibroker_topic"
_KEEP = "--minibroker-keep"
_LONGEST_NAME = 200
_KEEP_VARIABLE = "MINIBROKER_KEEP"

_numbers = itertools.count(1)
_CLUSTER = pytest.StashKey["SyncLocalCluster"]()
"""The cluster of the fixture `minibroker_cluster`, while it lives."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("minibroker").addoption(
        _KEEP, metavar="DIR", help="Keep the data of each cluster in a directory below DIR, which is created."
    )
    parser.addini(_BROKERS, "Number of brokers in the cluster of the fixture minibroker_cluster.", default="3")
    parser.addini(
        _SETTINGS,
        "Settings of its brokers, one NAME=VALUE per line; ID:NAME=VALUE for one broker.",
        type="linelist",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    if (kept := config.getoption(_KEEP, None)) is not None:
        try:
            os.makedirs(kept, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"{_KEEP} {kept!r}: {error.strerror}; give a directory") from error
        os.environ[_KEEP_VARIABLE] = os.path.abspath(kept)
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(partitions=None, replication_factor=None, configs={{}}): "
        "the topic that the fixture minibroker_topic creates for this test.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restore the cluster before each test that uses it, in case an earlier test has broken it.

    An autouse fixture would run after fixtures of a wider scope, and in all tests of every project. The hook runs after
    pytest has decided whether to skip the test, and before the test's fixtures.
    """
    cluster = item.config.stash.get(_CLUSTER, None)
    if cluster is not None and "minibroker_cluster" in getattr(item, "fixturenames", ()):
        with _without_traceback():
            cluster._restore_if_touched()
            cluster._begin_evidence()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what happened to its clusters to the report of a failed test, before its fixtures restore the cluster."""
    report = yield
    module = sys.modules.get("minibroker.deploy.testing.cluster")
    found = [] if module is None else list(module.left_evidence)
    cluster = item.config.stash.get(_CLUSTER, None)
    if cluster is not None and "minibroker_cluster" in getattr(item, "fixturenames", ()) and report.failed:
        found.append(cluster._evidence_or_reason())
    if report.failed:
        report.sections.extend((f"minibroker's cluster, {report.when}", text) for text in found)
    if module is not None:
        module.left_evidence.clear()
    return report


@pytest.fixture(scope="session")
def minibroker_brokers(pytestconfig: pytest.Config) -> int:
    """The number of brokers of `minibroker_cluster`: the ini option of this name, unless this fixture is overridden."""
    text = str(pytestconfig.getini(_BROKERS))
    if not text.isdecimal():
        pytest.fail(f"{_BROKERS} = {text}: give a number of brokers, as in {_BROKERS} = 3", pytrace=False)
    return int(text)


@pytest.fixture(scope="session")
def minibroker_settings(pytestconfig: pytest.Config) -> Mapping[str, str]:
    """The settings of every broker of `minibroker_cluster`: the lines NAME=VALUE of the ini option of this name, unless
    this fixture is overridden."""
    return _settings_of(pytestconfig).get(None, {})


@pytest.fixture(scope="session")
def minibroker_broker_settings(pytestconfig: pytest.Config) -> Mapping[int, Mapping[str, str]]:
    """The additional settings of single brokers, by id: the lines ID:NAME=VALUE of the ini option minibroker_settings,
    unless this fixture is overridden."""
    return {id: own for id, own in _settings_of(pytestconfig).items() if id is not None}


@pytest.fixture(scope="session")
def minibroker_tls() -> bool:
    """Whether the brokers of `minibroker_cluster` also have a listener that is SSL. Override it to return True."""
    return False


@pytest.fixture(scope="session")
def minibroker_secure() -> bool:
    """Whether `minibroker_cluster` is secured, with TLS, users and access control lists. Override it to return True."""
    return False


@pytest.fixture(scope="session")
def minibroker_cluster(
    pytestconfig: pytest.Config,
    minibroker_brokers: int,
    minibroker_settings: Mapping[str, str],
    minibroker_broker_settings: Mapping[int, Mapping[str, str]],
    minibroker_tls: bool,
    minibroker_secure: bool,
) -> Iterator[SyncLocalCluster]:
    """A `minibroker.testing.SyncLocalCluster` for the whole run, started when the first test uses it. Each worker of
    pytest-xdist has its own."""
    from minibroker.deploy.testing.cluster import SyncLocalCluster

    with contextlib.ExitStack() as until_end:
        with _without_traceback():
            cluster = SyncLocalCluster(
                minibroker_brokers,
                settings=minibroker_settings,
                broker_settings=minibroker_broker_settings,
                tls=minibroker_tls,
                secure=minibroker_secure,
            )
            until_end.enter_context(cluster)
        pytestconfig.stash[_CLUSTER] = cluster
        yield cluster
        del pytestconfig.stash[_CLUSTER]


@pytest.fixture(scope="session")
def minibroker_async_cluster(minibroker_cluster: SyncLocalCluster) -> LocalCluster:
    """The cluster of `minibroker_cluster` with asynchronous methods: a `minibroker.testing.LocalCluster`."""
    from minibroker.deploy.testing.cluster import LocalCluster

    return LocalCluster.around(minibroker_cluster)


@pytest.fixture
def minibroker_topic(request: pytest.FixtureRequest, minibroker_cluster: SyncLocalCluster) -> Iterator[str]:
    """The name of a new topic in a healthy cluster. After the test the cluster is restored and the topic deleted."""
    topic = _topic_of(request.node)
    minibroker_cluster.restore()
    with _without_traceback():
        minibroker_cluster.create_topics([topic])
    try:
        yield topic.name
    finally:
        minibroker_cluster.restore()
        minibroker_cluster.delete_topics([topic.name])


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Fail with the message alone: the traceback of a rejected setting or marker shows only this module."""
    from minibroker.protocol.errors import MinibrokerError

    try:
        yield
    except MinibrokerError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        raise pytest.fail.Exception(text, pytrace=False) from None


def _topic_of(test: pytest.Item) -> NewTopic:
    """Return the topic that the marker describes, named after the test as far as a topic name allows, and a number."""
    from minibroker.client.administering.topics import NewTopic

    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", test.name)[:_LONGEST_NAME].strip("-")
    marker = test.get_closest_marker(_MARKER)
    asked = marker.kwargs if marker else {}
    if (marker and marker.args) or not asked.keys() <= {"partitions", "replication_factor", "configs"}:
        pytest.fail(
            f"the marker {_MARKER} takes the keywords partitions, replication_factor and configs, and nothing else: "
            f"it was given {', '.join([*map(repr, marker.args if marker else ()), *asked])}",
            pytrace=False,
        )
    return NewTopic(f"{name}-{next(_numbers)}", **asked)


def _settings_of(config: pytest.Config) -> dict[int | None, dict[str, str]]:
    """Return the settings by broker id; None is the key of those of every broker."""
    found: dict[int | None, dict[str, str]] = {}
    for line in config.getini(_SETTINGS):
        matched = re.fullmatch(r"(?:(?P<id>\d+):)?(?P<name>[^=:\s]+)\s*=\s*(?P<value>.*)", line.strip())
        if matched is None:
            pytest.fail(
                f"{_SETTINGS}: {line!r} is neither NAME=VALUE nor ID:NAME=VALUE, as in log.segment.bytes=1048576",
                pytrace=False,
            )
        id = None if matched["id"] is None else int(matched["id"])
        found.setdefault(id, {})[matched["name"]] = matched["value"]
    return found

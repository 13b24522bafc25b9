"""Fixtures of pytest: a cluster for the test run, and a fresh topic for each test that wants one.

pytest imports this module in every run of everybody who has minibroker installed: so it imports nothing but pytest, and
the cluster's modules only when a fixture is asked for. See docs/testing.md.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minibroker.client.administering.topics import NewTopic
    from minibroker.deploy.testing.cluster import LocalCluster, SyncLocalCluster

_SETTINGS = "minibroker_settings"
_BROKERS = "minibroker_brokers"
_MARKER = "minibroker_topic"
_LONGEST_NAME = 200

_numbers = itertools.count(1)
_CLUSTER = pytest.StashKey["SyncLocalCluster"]()
"""That of `minibroker_cluster`, while it lives."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_BROKERS, "How many brokers the cluster of the fixture minibroker_cluster has.", default="3")
    parser.addini(
        _SETTINGS,
        "Settings of its brokers, NAME=VALUE a line; ID:NAME=VALUE for one of them.",
        type="linelist",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(partitions=None, replication_factor=None, configs={{}}): "
        "how the topic of the fixture minibroker_topic is made for this test.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that uses the cluster finds it whole, whatever the one before it has done. A hook instead of a fixture,
    which would come after those of its users that have a wider scope, and be part of every test of everybody. Called
    after pytest has looked whether the test is skipped, and before it makes any fixture for it."""
    cluster = item.config.stash.get(_CLUSTER, None)
    if cluster is not None and "minibroker_cluster" in getattr(item, "fixturenames", ()):
        with _without_traceback():
            cluster._restore_if_touched()


@pytest.fixture(scope="session")
def minibroker_brokers(pytestconfig: pytest.Config) -> int:
    """How many brokers `minibroker_cluster` has: the ini option of this name. Override it to say otherwise."""
    text = str(pytestconfig.getini(_BROKERS))
    if not text.isdecimal():
        pytest.fail(f"{_BROKERS} = {text}: give a number of brokers, as in {_BROKERS} = 3", pytrace=False)
    return int(text)


@pytest.fixture(scope="session")
def minibroker_settings(pytestconfig: pytest.Config) -> Mapping[str, str]:
    """Settings of every broker of `minibroker_cluster`: the lines NAME=VALUE of the ini option of this name. Override
    it to say otherwise."""
    return _settings_of(pytestconfig).get(None, {})


@pytest.fixture(scope="session")
def minibroker_broker_settings(pytestconfig: pytest.Config) -> Mapping[int, Mapping[str, str]]:
    """Settings of single brokers, on top, by id: the lines ID:NAME=VALUE of the ini option minibroker_settings.
    Override it to say otherwise."""
    return {id: own for id, own in _settings_of(pytestconfig).items() if id is not None}


@pytest.fixture(scope="session")
def minibroker_cluster(
    pytestconfig: pytest.Config,
    minibroker_brokers: int,
    minibroker_settings: Mapping[str, str],
    minibroker_broker_settings: Mapping[int, Mapping[str, str]],
) -> Iterator[SyncLocalCluster]:
    """A `minibroker.testing.SyncLocalCluster` for the whole run, begun when the first test asks for it. Each worker of
    pytest-xdist has its own."""
    from minibroker.deploy.testing.cluster import SyncLocalCluster

    with contextlib.ExitStack() as until_end:
        with _without_traceback():
            cluster = SyncLocalCluster(
                minibroker_brokers, settings=minibroker_settings, broker_settings=minibroker_broker_settings
            )
            until_end.enter_context(cluster)
        pytestconfig.stash[_CLUSTER] = cluster
        yield cluster
        del pytestconfig.stash[_CLUSTER]


@pytest.fixture(scope="session")
def minibroker_async_cluster(minibroker_cluster: SyncLocalCluster) -> LocalCluster:
    """The cluster of `minibroker_cluster`, with methods to await: a `minibroker.testing.LocalCluster`."""
    from minibroker.deploy.testing.cluster import LocalCluster

    return LocalCluster.around(minibroker_cluster)


@pytest.fixture
def minibroker_topic(request: pytest.FixtureRequest, minibroker_cluster: SyncLocalCluster) -> Iterator[str]:
    """The name of a new topic in a cluster that is whole. It is deleted after the test, and what the test did to the
    cluster is put right."""
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
    """What a setting, or a marker, is refused with says all: the lines of this tool are none of its reader's."""
    from minibroker.protocol.errors import MinibrokerError

    try:
        yield
    except MinibrokerError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        raise pytest.fail.Exception(text, pytrace=False) from None


def _topic_of(test: pytest.Item) -> NewTopic:
    """As the marker says. Its name is the test's, as far as a topic may have it, and a number."""
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
    """By broker id; None: those of every broker."""
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

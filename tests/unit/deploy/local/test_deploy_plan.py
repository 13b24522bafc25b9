"""The brokers of a cluster that starts, grows or has shrunk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import plan
from minibroker.deploy.local.cluster_file import ClusterFile, Leaving
from minibroker.deploy.local.plan import Options


def planned(before: ClusterFile | None, brokers: int | None = None, with_replicas: tuple[int, ...] = ()) -> ClusterFile:
    options = Options(brokers, None if before else 9092)
    return plan.planned(Path("data"), before, options, with_replicas, lambda wished, taken: wished or 2181)


def ports(cluster: ClusterFile) -> dict[int, tuple[int, int | None]]:
    return {entry.id: (entry.port, entry.metrics_port) for entry in cluster.brokers}


def test_brokers_are_numbered_from_one_and_keep_their_ids_after_a_removal() -> None:
    first = planned(None)
    assert ports(first) == {1: (9092, 10092), 2: (9093, 10093), 3: (9094, 10094)}
    without_first = first.without_broker(1)
    assert without_first.base_port == 9092
    assert ports(planned(without_first)) == {2: (9093, 10093), 3: (9094, 10094)}
    assert ports(planned(without_first, 4)).keys() == {1, 2, 3, 4}
    assert ports(planned(without_first, 1)).keys() == {2}
    assert ports(planned(without_first, with_replicas=(5,))).keys() == {2, 3, 5}


def test_brokers_with_replicas_are_not_left_out() -> None:
    shrunk = planned(None).without_broker(2)
    with pytest.raises(LaunchError, match=r"--brokers 1 would leave out broker 3, .* give 2 or more.*brokers remove"):
        planned(shrunk, 1, with_replicas=(1, 3))


def test_a_running_cluster_grows_by_the_lowest_free_ids() -> None:
    running = planned(None)
    grown = plan.grown(running.without_broker(2), 4, lambda wished, taken: wished or 2181)
    assert ports(grown) == {1: (9092, 10092), 2: (9093, 10093), 3: (9094, 10094), 4: (9095, 10095)}
    assert plan.grown(running, 3, lambda wished, taken: wished or 1) == running
    with pytest.raises(LaunchError, match="go past port 65535"):
        plan.grown(running, 60_000, lambda wished, taken: wished or 1)
    own = running.with_broker(msgspec.structs.replace(running.brokers[0], settings={"rack": "a"}))
    with pytest.raises(LaunchError, match="settings of their own"):
        plan.grown(own, 4, lambda wished, taken: wished or 1)


def test_the_default_number_of_replicas_stays_while_the_cluster_grows() -> None:
    small = planned(None, 1)
    grown = plan.grown(small, 3, lambda wished, taken: wished or 2181)
    assert [plan.usual_replicas(cluster) for cluster in (small, grown, planned(grown))] == [1, 1, 3]


def test_only_fewer_brokers_are_a_difference_to_a_running_cluster() -> None:
    running = planned(None)
    assert plan.differences(running, Options(brokers=4)) == []
    assert plan.differences(running, Options(brokers=2, log_dirs=2)) == ["--brokers 2", "--log-dirs 2"]
    assert plan.differences(running.without_broker(1), Options(brokers=2, base_port=9092)) == []


def test_a_broker_that_was_leaving_still_leaves_after_the_next_up() -> None:
    before = planned(None)
    leaving = before.with_broker(msgspec.structs.replace(before.brokers[2], leaving=Leaving(1_000, ("orders",))))
    assert planned(leaving).brokers[2].leaving == Leaving(1_000, ("orders",))

"""The launcher's side of the faults that brokers inject into themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local import cluster_file, injected, plan
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import AllBrokers, BrokerId, ZooKeeperServer
from minibroker.protocol import faults
from minibroker.protocol.faults import Faults, Obeyed, encoded


def cluster_in(directory: Path, *, allow_faults: bool = True, log_dirs: int = 1) -> FaultyCluster:
    """A cluster whose processes are all gone."""
    file = ClusterFile(
        ZooKeeperEntry("127.0.0.1:1", 1),
        (BrokerEntry(1, 9092), BrokerEntry(2, 9093)),
        log_dirs=log_dirs,
        allow_faults=allow_faults,
    )
    cluster_file.save(directory, file)
    injected.begin(directory)
    return FaultyCluster(directory)


def test_faults_are_kept_for_a_broker_that_is_gone_and_healed_by_one_word(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path, log_dirs=2)
    assert cluster.fill_disk(BrokerId(2), 2) == [2]
    assert cluster.slow_disk(AllBrokers(), 0.2, 0.1) == [1, 2]
    first, second = f"{tmp_path}/broker-2", f"{tmp_path}/broker-2-disk-2"
    assert faults.described(cluster.faults()[2]) == [
        f"each fsync in {first} takes 200 ms longer",
        f"each write in {first} takes 100 ms longer",
        f"the disk of {second} is full",
        f"each fsync in {second} takes 200 ms longer",
        f"each write in {second} takes 100 ms longer",
    ]
    assert cluster.heal(BrokerId(2)) == [2]
    assert cluster.faults().keys() == {1}
    assert cluster.heal(AllBrokers()) == [1]
    assert cluster.heal(AllBrokers()) == []
    assert injected.faults_of(tmp_path, 2).revision == 3


def test_a_cluster_that_was_not_started_for_it_has_no_such_faults(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path, allow_faults=False)
    with pytest.raises(LaunchError, match="`minibroker up --allow-faults`"):
        cluster.break_disk(BrokerId(1))
    assert not injected.file_of(tmp_path, 1).exists()
    assert cluster.heal(AllBrokers()) == []


def test_what_cannot_be_broken_is_refused_with_the_names(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path, log_dirs=2)
    with pytest.raises(LaunchError, match="there is no log directory 3: each broker has 2"):
        cluster.fill_disk(BrokerId(1), 3)
    with pytest.raises(LaunchError, match="there is no broker 7 in this cluster: its ids are 1, 2"):
        cluster.fill_disk(BrokerId(7))
    with pytest.raises(LaunchError, match="ZooKeeper has no such faults"):
        cluster.fill_disk(ZooKeeperServer())
    with pytest.raises(LaunchError, match="a delay of 601 s: give seconds from 0 to 600"):
        cluster.slow_disk(BrokerId(1), 601)
    assert cluster.faults() == {}


def words(cluster: FaultyCluster) -> dict[int, list[str]]:
    return {broker_id: faults.described(found) for broker_id, found in cluster.faults().items()}


def test_both_ends_know_of_a_cut_and_both_are_healed(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    assert cluster.cut(BrokerId(1), BrokerId(2), one_way=True) == [1, 2]
    assert words(cluster) == {
        1: ["nothing that it sends arrives at broker 2"],
        2: ["nothing that broker 1 sends arrives"],
    }
    assert cluster.heal(BrokerId(2)) == [2]
    assert cluster.faults() == {}
    assert cluster.cut(BrokerId(1), AllBrokers()) == [1, 2]
    assert words(cluster) == {1: ["it is cut from broker 2"], 2: ["it is cut from broker 1"]}
    cluster.heal(AllBrokers())
    cluster.slow_network(BrokerId(2), 0.05, BrokerId(1))
    assert words(cluster) == {
        1: ["each packet between it and broker 2 takes 50 ms longer"],
        2: ["each packet between it and broker 1 takes 50 ms longer"],
    }
    cluster.slow_network(BrokerId(1), 0.0, BrokerId(2))
    assert cluster.faults() == {}


def test_zookeeper_is_cut_from_all_and_healed_by_its_name(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    assert cluster.cut(ZooKeeperServer(), AllBrokers()) == ["zookeeper", 1, 2]
    cluster.fill_disk(BrokerId(2))
    assert words(cluster)[1] == ["it is cut from ZooKeeper"]
    assert cluster.heal(ZooKeeperServer()) == [1, 2]
    assert words(cluster) == {2: [f"the disk of {tmp_path}/broker-2 is full"]}


def test_an_isolated_broker_is_cut_from_the_others_at_their_ends_too(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    assert cluster.isolate(BrokerId(1)) == [1]
    assert words(cluster) == {1: ["it is isolated"], 2: ["it is cut from broker 1"]}
    assert cluster.heal(BrokerId(1)) == [1]
    assert cluster.faults() == {}


def test_a_clock_jumps_and_not_further_than_ten_years(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    cluster.move_clock(BrokerId(1), 60)
    cluster.move_clock(AllBrokers(), -90.5)
    assert words(cluster) == {1: ["its wall clock is 30500 ms behind"], 2: ["its wall clock is 90500 ms behind"]}
    for by_s in (4e8, float("nan"), float("-inf")):
        with pytest.raises(LaunchError, match="give at most ten years"):
            cluster.move_clock(BrokerId(1), by_s)
    cluster.heal(AllBrokers())
    assert cluster.faults() == {}


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    with pytest.raises(LaunchError, match="both ends are broker 1: give two different processes"):
        cluster.cut(BrokerId(1), BrokerId(1))
    with pytest.raises(LaunchError, match="cut apart in both ways: leave one-way out"):
        cluster.cut(BrokerId(1), ZooKeeperServer(), one_way=True)
    with pytest.raises(LaunchError, match="the way to ZooKeeper cannot be slow"):
        cluster.slow_network(BrokerId(1), 0.1, ZooKeeperServer())
    with pytest.raises(LaunchError, match="`minibroker fault cut zookeeper all`"):
        cluster.isolate(ZooKeeperServer())
    assert cluster.faults() == {}


def test_connections_are_dropped_as_often_as_it_is_said(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    cluster.drop_connections(AllBrokers())
    cluster.drop_connections(BrokerId(1))
    assert [injected.faults_of(tmp_path, number).drops for number in (1, 2)] == [2, 1]
    assert cluster.faults() == {}


def test_a_damaged_file_is_reported_with_the_remedy(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    injected.file_of(tmp_path, 1).write_text("{")
    with pytest.raises(LaunchError, match="broker-1.json is damaged .*: remove it, which heals the broker"):
        cluster.faults()


def test_the_launcher_waits_until_a_running_broker_obeys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injected, "OBEYED_TIMEOUT_S", 0.0)
    cluster_in(tmp_path)
    answer = Path(faults.obeyed_path(str(injected.file_of(tmp_path, 1))))
    for before in (None, encoded(Obeyed(4)), b"{"):
        if before is not None:
            answer.write_bytes(before)
        with pytest.raises(LaunchTimedOut, match="broker 1 does not obey .*broker-1.json"):
            injected.wait_until_obeyed(tmp_path, 1, 5, lambda: True)
        injected.wait_until_obeyed(tmp_path, 1, 5, lambda: False)
    answer.write_bytes(encoded(Obeyed(5)))
    injected.wait_until_obeyed(tmp_path, 1, 5, lambda: True)


def test_a_start_that_fails_names_the_faults(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    cluster.break_disk(BrokerId(1))
    expected = f"refuses; broker 1 has faults \\(the disk of {tmp_path}/broker-1 is broken\\): `minibroker heal`"
    with (
        pytest.raises(LaunchError, match=expected),
        injected.naming_faults(tmp_path, cluster.file()),
    ):
        raise LaunchError("it refuses")
    cluster.heal(AllBrokers())
    with pytest.raises(LaunchError, match="^it refuses$"), injected.naming_faults(tmp_path, cluster.file()):
        raise LaunchError("it refuses")


def test_up_remembers_whether_faults_are_allowed(tmp_path: Path) -> None:
    def planned(before: ClusterFile | None, allow_faults: bool | None) -> ClusterFile:
        options = plan.Options(allow_faults=allow_faults)
        return plan.planned(tmp_path, before, options, [], lambda wished, taken: wished or 1)

    first = planned(None, True)
    assert first.allow_faults
    assert planned(first, None).allow_faults
    assert not planned(first, False).allow_faults
    assert not planned(None, None).allow_faults
    assert plan.differences(first, plan.Options(allow_faults=False)) == ["--no-allow-faults"]
    assert plan.differences(planned(None, None), plan.Options(allow_faults=True)) == ["--allow-faults"]
    assert plan.differences(first, plan.Options(allow_faults=True)) == []


def test_up_begins_without_the_faults_of_an_earlier_time(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    cluster.fill_disk(BrokerId(1))
    injected.begin(tmp_path)
    assert injected.faults_of(tmp_path, 1) == Faults()


def test_a_second_healing_waits_for_what_the_first_ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def obey(broker_id: int) -> None:
        path = Path(faults.obeyed_path(str(injected.file_of(tmp_path, broker_id))))
        path.write_bytes(encoded(Obeyed(2)))

    cluster = cluster_in(tmp_path)
    cluster.fill_disk(AllBrokers())
    cluster.heal(AllBrokers())  # of processes that are gone, so nothing has obeyed
    monkeypatch.setattr(cluster, "state_of", lambda who: ProcessState.RUNNING)
    monkeypatch.setattr(injected, "OBEYED_TIMEOUT_S", 0.05)
    with pytest.raises(LaunchTimedOut, match="broker 1 does not obey"):
        cluster.heal(BrokerId(1))
    obey(2)
    monkeypatch.setattr(injected, "OBEYED_TIMEOUT_S", 30.0)
    with ThreadPoolExecutor(1) as threads:
        healing = threads.submit(cluster.heal, AllBrokers())
        assert not wait([healing], 0.1).done
        obey(1)
        assert healing.result(10) == [1]
    assert cluster.heal(AllBrokers()) == []

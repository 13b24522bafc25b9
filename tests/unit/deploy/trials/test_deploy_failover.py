from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.failover import FailoverOutcome, Round, Victims, choose_victims
from minibroker.deploy.trials.trial import Gap, TrialVerdict
from minibroker.protocol.messages import MetadataPartition
from minibroker.protocol.model import TopicPartition

PARTITION = TopicPartition("t", 0)


def victims(who: Victims, leader: int, controller: int) -> list[object]:
    state = MetadataPartition(0, 0, leader, 0, [1, 2, 3], [1, 2, 3], [])
    brokers = {broker: ("127.0.0.1", 9091 + broker) for broker in (1, 2, 3)}
    view = ClusterView(brokers, controller, 1, {PARTITION: state})
    return list(choose_victims(who, view, PARTITION, [1, 2, 3]))


def test_the_victims_are_those_that_have_the_role_now() -> None:
    assert victims(Victims.LEADER, 2, 3) == [2]
    assert victims(Victims.CONTROLLER, 2, 3) == [3]
    assert victims(Victims.BOTH, 2, 3) == [3, 2]
    assert victims(Victims.ZOOKEEPER, 2, 3) == ["zookeeper"]
    assert victims(Victims.ALL, 2, 3) == [1, 2, 3]


def test_if_one_broker_has_both_roles_another_dies_with_it() -> None:
    assert victims(Victims.BOTH, 1, 1) == [1, 2]
    assert victims(Victims.BOTH, 3, 3) == [3, 1]


def test_the_figures_are_of_all_rounds_in_milliseconds() -> None:
    gaps = [0.1, 0.5, 0.2, 0.1204]
    rounds = [Round([1], Gap(0, seconds, 0.0), 1.0) for seconds in gaps]
    verdict = TrialVerdict(10, 9, 1, 10, 0, 0, 0, 0)
    figures = FailoverOutcome("t", verdict, ["why"], Gap(0, 0.0104, 0.0), rounds).figures()
    assert figures == {
        **verdict._asdict(),
        "quiet_gap_ms": 10,
        "gap_median_ms": 160,
        "gap_p95_ms": 500,
        "gap_max_ms": 500,
    }

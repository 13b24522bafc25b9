from __future__ import annotations

from msgspec.structs import replace

from minibroker.client.administering.movements import Copy, Movement
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import Process, ProcessState
from minibroker.deploy.local.recovery import ask_recoveries
from minibroker.deploy.observing import rights
from minibroker.deploy.observing.cluster_view import SLOW_AFTER_S, ClusterView, controller_first, merge
from minibroker.deploy.observing.commits import awaited, waiting
from minibroker.deploy.observing.followers import slow_followers
from minibroker.deploy.observing.status import some_of, status_of_processes, status_of_view
from minibroker.deploy.observing.status_screen import problem_lines, status_lines, status_object
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    ResourcePattern,
)
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import ErrorCode, NetworkError
from minibroker.protocol.messages import (
    DescribeHealthResponse,
    LaggingFollower,
    MetadataBroker,
    MetadataPartition,
    MetadataResponse,
    MetadataTopic,
    SlowCommit,
)
from minibroker.protocol.messages import SlowDisk as SlowDiskMessage
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.recovery_progress import METRICS, RecoveryProgress, of_metrics

CLUSTER = ClusterFile(
    zookeeper=ZooKeeperEntry("127.0.0.1:2181", 2181, Process(1, "b")),
    brokers=tuple(BrokerEntry(number, 9091 + number, Process(100 + number, "b")) for number in (1, 2, 3)),
)
ALL_RUN = {1: ProcessState.RUNNING, 2: ProcessState.RUNNING, 3: ProcessState.RUNNING}


def answer(
    *,
    controller: tuple[int, int] = (1, 7),
    brokers: tuple[int, ...] = (1, 2, 3),
    partitions: dict[int, tuple[int, int, list[int]]] | None = None,
) -> MetadataResponse:
    """A cluster's metadata. `partitions`: number -> leader, leader epoch, ISR."""
    states = [
        MetadataPartition(0, number, leader, epoch, [1, 2, 3], isr, [])
        for number, (leader, epoch, isr) in (partitions or {}).items()
    ]
    return MetadataResponse(
        throttle_time_ms=0,
        brokers=[MetadataBroker(broker, "127.0.0.1", 9091 + broker) for broker in brokers],
        cluster_id="c",
        controller_id=controller[0],
        topics=[MetadataTopic(0, "orders", "", False, states)] if states else [],
        controller_epoch=controller[1],
    )


def test_the_answer_with_the_newest_controller_epoch_counts() -> None:
    deposed = answer(controller=(1, 7), brokers=(1, 2, 3))
    current = answer(controller=(2, 8), brokers=(2, 3))
    view = merge([deposed, current])
    assert (view.controller_id, view.controller_epoch) == (2, 8)
    assert sorted(view.brokers) == [2, 3]


def test_who_may_not_see_all_topics_is_not_told_that_all_is_well() -> None:
    view = merge([answer()])._replace(missing_rights=(rights.TOPICS, rights.CLUSTER))
    status = status_of_view(view, principal="User:bob")
    assert status_lines(status)[-2:] == ["offline partitions: unknown", "under-replicated partitions: unknown"]
    assert problem_lines(status)[-1:] == [
        "User:bob may not see everything, so this is unknown: the state of all topics that it does not see; "
        f"{rights.UNKNOWN[rights.CLUSTER]}: an administrator can allow it with `minibroker acls add --allow-principal "
        "User:bob --operation Describe --operation DescribeConfigs --topic '*'` and `minibroker acls add "
        "--allow-principal User:bob --operation Describe --cluster`"
    ]
    assert status.stalled_partitions is None
    assert [broker.leaders for broker in status.brokers] == [None] * 3
    assert (status.is_unknown, status.is_any_partition_in_trouble) == (False, True), "the controller is known"
    seen = merge([answer(partitions={0: (-1, 4, [1])})])._replace(missing_rights=(rights.TOPICS,))
    assert status_of_view(seen).offline_partitions == ["orders-0"]


def test_the_rights_that_a_client_lacks_follow_from_the_answer_about_all_topics() -> None:
    def about(error: ErrorCode, of_topic: int, of_cluster: int) -> list[str]:
        topic = MetadataTopic(error, "*", "", False, [], of_topic)
        return rights.missing(replace(answer(), topics=[topic], cluster_authorized_operations=of_cluster))

    describe, configs = 1 << AclOperation.DESCRIBE, 1 << AclOperation.DESCRIBE_CONFIGS
    assert about(ErrorCode.INVALID_TOPIC_EXCEPTION, describe | configs, describe) == []
    assert about(ErrorCode.INVALID_TOPIC_EXCEPTION, describe, describe) == [rights.CONFIGS]
    assert about(ErrorCode.TOPIC_AUTHORIZATION_FAILED, 0, 0) == [rights.TOPICS, rights.CLUSTER]


def test_topics_that_deny_entries_hide_are_named_and_nothing_is_said_of_all_topics() -> None:
    view = merge([answer()])._replace(hidden_topics=("pay", "tmp*"))
    status = status_of_view(view, principal="User:bob")
    assert status_lines(status)[-2:] == ["offline partitions: unknown", "under-replicated partitions: unknown"]
    assert problem_lines(status)[-1:] == [
        "User:bob may not Describe topics pay and tmp*, so it is unknown if there are any, and their state: DENY "
        "entries hide them, which `minibroker acls list` shows"
    ]
    assert (status.is_unknown, status.hides_topics) == (False, True)

    def denied(name: str, operation: AclOperation) -> AclBinding:
        entry = AccessControlEntry("User:bob", "*", operation, AclPermissionType.DENY)
        return AclBinding(ResourcePattern(AclResourceType.TOPIC, name), entry)

    entries = [
        denied("pay", AclOperation.DESCRIBE),
        denied("all", AclOperation.ALL),
        denied("*", AclOperation.ALL),
        denied("orders", AclOperation.WRITE),  # denies no Describe
    ]
    assert list(rights.names_denied(entries)) == ["all", "pay"]


def test_of_each_partition_the_newest_leader_epoch_counts() -> None:
    lagging = answer(partitions={0: (1, 4, [1, 2, 3]), 1: (3, 9, [3])})
    ahead = answer(partitions={0: (2, 5, [2, 3]), 1: (1, 8, [1])})
    view = merge([lagging, ahead])
    assert view.partitions[TopicPartition("orders", 0)].leader_id == 2
    assert view.partitions[TopicPartition("orders", 1)].leader_id == 3


def test_of_equally_new_answers_the_controllers_counts() -> None:
    cut_off = answer(controller=(3, 7), partitions={0: (2, 4, [1, 2, 3])})
    its_own = answer(controller=(3, 7), partitions={0: (2, 4, [2, 3])})
    answers = {("127.0.0.1", 9092): cut_off, ("127.0.0.1", 9094): its_own}
    assert merge(controller_first(answers)).partitions[TopicPartition("orders", 0)].isr_nodes == [2, 3]
    assert controller_first({}) == []


def test_without_answers_the_view_is_empty() -> None:
    view = merge([])
    assert (view.brokers, view.controller_id, view.controller_epoch, view.partitions) == ({}, None, None, {})


def test_a_whole_cluster_has_no_problems() -> None:
    status = status_of_processes(
        CLUSTER, ALL_RUN, ProcessState.RUNNING, merge([answer(partitions={0: (1, 0, [1, 2, 3])})])
    )
    assert status.problems() == []
    assert [broker.pid for broker in status.brokers] == [101, 102, 103]
    assert (status.controller.id, status.controller.epoch) == (1, 7)


def test_a_dead_broker_and_what_it_left_behind_are_problems() -> None:
    states = {**ALL_RUN, 3: ProcessState.GONE}
    view = merge([answer(brokers=(1, 2), partitions={0: (1, 0, [1, 2]), 1: (-1, 3, [3])})])
    status = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view)
    assert status.offline_partitions == ["orders-1"]
    assert status.under_replicated_partitions == ["orders-0", "orders-1"]
    problems = status.problems()
    assert problems[0] == "broker 3 is not running: `minibroker start 3`"
    assert problems[1] == "orders-1 without a leader: `minibroker start 3`"
    assert len(problems) == 3
    assert (status.brokers[2].alive, status.brokers[2].pid) == (False, None)


def test_partitions_that_refuse_acks_all_are_told_apart_from_those_that_lack_a_replica() -> None:
    states = {**ALL_RUN, 3: ProcessState.GONE}
    view = merge([answer(brokers=(1, 2), partitions={0: (1, 0, [1, 2]), 1: (2, 3, [2])})])
    assert view.under_min_isr_partitions() == [], "no one has said how many are wanted"
    view = view._replace(min_insync_replicas={"orders": 2})
    status = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view)
    assert status.under_min_isr_partitions == ["orders-1"]
    assert status.problems()[-2].startswith("orders-1 with fewer replicas in sync than min.insync.replicas: ")


def test_records_that_were_there_at_the_first_look_and_are_not_committed_at_the_second_wait() -> None:
    first, second, third = (TopicPartition("orders", number) for number in range(3))
    assert waiting({first: 5, second: 5, third: 5}, {first: 5, second: 4}) == [second]
    assert waiting({first: 5}, {first: 9}) == []
    assert waiting({}, {first: 9}) == []


def test_of_members_for_which_records_may_wait_those_count_that_the_leader_names_or_that_do_not_answer() -> None:
    """Else all of them: that a healthy follower's log has another size at another moment is no reason to blame it."""
    view = merge([answer(partitions={0: (1, 0, [3, 1, 2]), 1: (1, 0, [3, 1, 2])})])
    view = view._replace(answered=frozenset(view.brokers.values()))
    name, other = (TopicPartition("orders", number) for number in range(2))
    assert awaited(view, name, {}) == ([2, 3], False)
    assert awaited(view, name, {name: {3}}) == ([3], True)
    assert awaited(view, name, {name: {2, 3, 4}}) == ([2, 3], True)
    assert awaited(view, name, {other: {2}}) == ([2], True), "an answer names a limited number"
    without_3 = view._replace(answered=view.answered - {view.brokers[3]})
    assert awaited(without_3, name, {}) == ([3], True)


def test_a_follower_for_which_writes_wait_is_a_problem_though_it_is_in_sync() -> None:
    view = merge([answer(partitions={0: (1, 0, [1, 2, 3]), 1: (1, 0, [1, 2, 3]), 2: (1, 0, [1, 2, 3])})])
    names = [TopicPartition("orders", number) for number in range(3)]
    view = view._replace(
        answered=frozenset(view.brokers.values()), stalls={names[0]: [2], names[1]: [2, 3], names[2]: [2]}
    )
    status = status_of_view(view._replace(doubted_stalls=frozenset({names[1]})))
    assert status.is_any_partition_in_trouble
    assert problem_lines(status) == [
        "orders-0, orders-2 with records that broker 2, in the ISR, has not copied for 2 s or longer: acks=all waits "
        "until it does or leaves the ISR (replica.lag.time.max.ms); look where broker 2 runs",
        "orders-1 with records that broker 2 or 3 (no leader said which), in the ISR, has not copied for 2 s or "
        "longer: acks=all waits until it does or leaves the ISR (replica.lag.time.max.ms); look where brokers 2 and 3 "
        "run",
    ]
    assert status_object(status)["stalled_partitions"] == {"orders-0": [2], "orders-1": [2, 3], "orders-2": [2]}
    assert problem_lines(status_of_view(view))[1].startswith(
        "orders-1 with records that brokers 2 and 3, in the ISR, have not copied for 2 s or longer: acks=all waits "
        "until they do or leave the ISR"
    )


def test_partitions_are_away_from_their_preferred_broker_only_where_that_one_could_lead() -> None:
    partitions = {0: (1, 0, [1, 2, 3]), 1: (2, 3, [1, 2]), 2: (2, 3, [2, 3]), 3: (-1, 3, [1])}
    status = status_of_view(merge([answer(partitions=partitions)]))
    assert status.not_preferred_partitions == ["orders-1"]
    assert status_of_view(merge([])).not_preferred_partitions is None


def test_the_end_of_a_broker_is_reported_with_its_reason_and_a_full_disk() -> None:
    states = {**ALL_RUN, 3: ProcessState.GONE}
    status = status_of_processes(
        CLUSTER,
        states,
        ProcessState.RUNNING,
        merge([answer(brokers=(1, 2))]),
        last_errors={3: "the log directory /data/broker-3 has failed: No space left on device"},
        full_disk="/data",
    )
    assert status.problems() == [
        "the disk of /data is full: make room there, then start the processes that have ended",
        "broker 3 is not running (the log directory /data/broker-3 has failed: No space left on device): "
        "free space there, then `minibroker start 3`",
    ]


def test_a_paused_broker_lives_but_is_a_problem() -> None:
    status = status_of_processes(CLUSTER, {**ALL_RUN, 2: ProcessState.PAUSED}, ProcessState.RUNNING, merge([answer()]))
    assert status.brokers[1].alive
    assert status.problems() == ["broker 2 is paused: `minibroker resume 2`"]


def test_a_paused_controller_is_called_so_and_its_problem_says_when_its_session_ends() -> None:
    states = {**ALL_RUN, 2: ProcessState.PAUSED}
    view = merge([answer(controller=(2, 7))])._replace(health=told({1: -1, 3: -1}))
    status = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view)
    assert status.problems() == [
        "broker 2, the controller, is paused (its ZooKeeper session ends 6 s after its last heartbeat): "
        "`minibroker resume 2`"
    ]
    held = status_of_processes(CLUSTER, states, ProcessState.PAUSED, view)
    assert held.problems()[1] == "broker 2, the controller, is paused: `minibroker resume 2`", "no session ends"
    over = merge([answer(controller=(1, 8), brokers=(1, 3))])._replace(health=told({1: -1, 3: -1}))
    assert status_of_processes(CLUSTER, states, ProcessState.RUNNING, over).problems() == [
        "broker 2 is paused and not in the cluster: `minibroker resume 2`"
    ]


def test_a_process_that_is_not_registered_is_a_problem() -> None:
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, merge([answer(brokers=(1, 3))]))
    assert status.problems() == ["broker 2 runs but is not in the cluster: see `minibroker logs 2`"]


def test_problems_that_injected_faults_explain_are_healed() -> None:
    """Nobody is sent to start brokers that run, or to repair a disk that is whole."""
    cut = {2: ["it is isolated"]}
    view = merge([answer(brokers=(1, 3), partitions={0: (1, 3, [1, 3])})])
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, silent=[2], faults=cut)
    assert status.problems() == [
        "broker 2 runs but does not answer and is not in the cluster; it has injected faults (it is isolated): "
        "`minibroker heal 2`",
        "orders-0 with replicas missing from the ISR: `minibroker heal` (faults are injected), then wait",
    ]
    whole = merge([answer(partitions={0: (1, 3, [1, 2, 3])})])
    slow = status_of_processes(
        CLUSTER, ALL_RUN, ProcessState.RUNNING, whole, silent=[1], faults={1: ["each packet takes 2000 ms longer"]}
    )
    assert slow.problems() == [
        "broker 1, the controller, runs but does not answer, and leads orders-0, whose writes wait; it has injected "
        "faults (each packet takes 2000 ms longer): `minibroker heal 1`"
    ]
    name = TopicPartition("orders", 0)
    waits = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, whole._replace(stalls={name: [2]}), faults=cut)
    assert waits.problems()[0].endswith("; `minibroker heal` ends the injected faults")
    full = {2: ["the disk of /d is full"]}
    offline = {2: {"/d": "No space left on device"}}
    failed = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, offline_log_dirs=offline, faults=full)
    assert "(No space left on device): `minibroker heal 2`, then restart the broker" in "\n".join(failed.problems())
    ended = status_of_processes(
        CLUSTER, {**ALL_RUN, 2: ProcessState.GONE}, ProcessState.RUNNING, view, faults=full
    ).problems()
    assert ended[0].endswith("(the disk of /d is full): `minibroker heal 2`, then `minibroker start 2`")
    assert ended[1].endswith("`minibroker heal` (faults are injected) and `minibroker start 2`, then wait")


def test_a_broker_that_was_started_anew_is_not_taken_for_its_run_before() -> None:
    told_of_both_runs = merge([answer(brokers=(1, 2, 3), partitions={0: (1, 0, [1, 2, 3])})])
    view = told_of_both_runs._replace(uninformed=frozenset([("127.0.0.1", 9093)]))
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view)
    assert [broker.registered for broker in status.brokers] == [True, False, True]
    assert status.problems() == ["broker 2 runs but is not in the cluster: see `minibroker logs 2`"]


def test_a_broker_that_says_nothing_is_a_problem_though_the_others_count_on_it() -> None:
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, merge([answer()]), silent=[2])
    assert status.problems() == [
        "broker 2 runs but does not answer: wait if it was just started, else see `minibroker logs 2`"
    ]


def test_a_leader_that_does_not_answer_is_named_with_the_partitions_that_wait_for_it() -> None:
    view = merge([answer(partitions={0: (2, 0, [1, 2, 3]), 1: (1, 0, [1, 2, 3]), 2: (2, 0, [1, 2, 3])})])
    paused = status_of_processes(CLUSTER, {**ALL_RUN, 2: ProcessState.PAUSED}, ProcessState.RUNNING, view)
    assert paused.problems() == [
        "broker 2 is paused, and leads orders-0, orders-2, whose writes wait, and is in the ISR of orders-1, where "
        "acks=all waits: `minibroker resume 2`"
    ]
    silent = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, silent=[2])
    assert silent.problems() == [
        "broker 2 runs but does not answer, and leads orders-0, orders-2, whose writes wait, and is in the ISR of "
        "orders-1, where acks=all waits: wait for the end of its ZooKeeper session, else see `minibroker logs 2`"
    ]
    assert "running, no answer" in status_lines(silent)[2]
    elsewhere = status_of_view(view._replace(answered=frozenset(view.brokers[id] for id in (1, 3))))
    assert elsewhere.problems() == [
        "broker 2 is registered but does not answer on port 9093, and leads orders-0, orders-2, and is in the ISR of "
        "orders-1: look where it runs"
    ]


def test_a_broker_that_only_follows_and_hangs_holds_up_acks_all() -> None:
    view = merge([answer(partitions={0: (1, 0, [1, 2, 3])})])
    paused = status_of_processes(CLUSTER, {**ALL_RUN, 2: ProcessState.PAUSED}, ProcessState.RUNNING, view)
    assert paused.problems() == [
        "broker 2 is paused, and is in the ISR of orders-0, where acks=all waits: `minibroker resume 2`"
    ]
    assert paused.is_any_partition_in_trouble


def test_partitions_that_bear_no_further_loss_are_named() -> None:
    view = merge([answer(partitions={0: (1, 0, [1, 3]), 1: (3, 0, [3, 1]), 2: (3, 0, [3, 1])})])
    view = view._replace(min_insync_replicas={"orders": 2})
    gone = status_of_processes(CLUSTER, {**ALL_RUN, 2: ProcessState.GONE}, ProcessState.RUNNING, view)
    assert gone.at_min_isr_partitions == gone.under_replicated_partitions == ["orders-0", "orders-1", "orders-2"]
    assert gone.problems()[-1] == (
        "orders-0, orders-1, orders-2 with replicas missing from the ISR (one more loss stops acks=all): "
        "`minibroker start 2`, then wait"
    )
    able = view._replace(min_insync_replicas={"orders": 1})
    assert status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, able).at_min_isr_partitions == []


def test_a_broker_that_was_not_started_here_is_shown_too() -> None:
    view = merge([answer(brokers=(1, 2, 3, 4), partitions={0: (4, 0, [1, 2, 3])})])
    view = view._replace(answered=frozenset(view.brokers.values()))
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view)
    assert [(broker.id, broker.leaders, broker.is_elsewhere) for broker in status.brokers][3:] == [(4, 1, True)]
    assert status.problems() == []
    view = view._replace(answered=frozenset(view.brokers[id] for id in (1, 2, 3)))
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view)
    assert status.problems() == [
        "broker 4 is registered but does not answer on port 9095, and leads orders-0: look where it runs"
    ]


def test_partitions_that_are_reassigned_are_told_apart_from_those_that_lack_a_broker() -> None:
    view = merge([answer(partitions={0: (1, 0, [1, 2]), 1: (1, 0, [1, 2])})])
    status = status_of_processes(
        CLUSTER,
        ALL_RUN,
        ProcessState.RUNNING,
        view._replace(
            movements=(
                Movement(TopicPartition("orders", 0), (Copy(2, 480_000_000),), (3,), 1_200_000_000),
                Movement(TopicPartition("orders", 7), (Copy(2, 0),), (), 0),
            )
        ),
    )
    assert status.under_replicated_partitions == ["orders-1"], "as in the metric, replicas that are added do not count"
    assert status.problems() == ["orders-1 with replicas missing from the ISR: wait"], "its broker runs"
    assert "moving, 40 % of 1.2 GB: orders-0, orders-7" in status_lines(status)
    assert status_object(status)["reassignments"] == {
        "moved_bytes": 480_000_000,
        "total_bytes": 1_200_000_000,
        "unknown": 0,
    }


def test_without_an_answer_from_any_broker_the_cluster_is_not_healthy() -> None:
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, merge([]))
    assert status.controller.id is None
    assert (status.offline_partitions, status.under_replicated_partitions) == (None, None)
    assert [(broker.registered, broker.leaders) for broker in status.brokers] == [(None, None)] * 3
    assert status.problems() == [
        "no broker that knows the controller and the partitions answers: see `minibroker logs all`"
    ]
    out = {1: ProcessState.PAUSED, 2: ProcessState.GONE, 3: ProcessState.GONE}
    assert status_of_processes(CLUSTER, out, ProcessState.RUNNING, merge([])).problems()[-1] == (
        "no broker that knows the controller and the partitions answers: `minibroker resume 1`, `minibroker start 2` "
        "and `minibroker start 3`"
    )


def test_a_few_partitions_are_named_and_the_rest_is_counted_by_topic() -> None:
    assert some_of([]) == ""
    assert some_of(["a-b-0", "c-1"]) == "a-b-0, c-1"
    six = [f"orders-{number}" for number in range(6)]
    assert some_of(six) == ", ".join(six)
    many = [f"orders-{number}" for number in range(1_500)] + [f"pay-ments-{number}" for number in range(700)]
    assert some_of(many) == (
        "orders-0, orders-1, orders-2, orders-3, orders-4 and 2,195 more partitions (orders 1,495, pay-ments 700)"
    )
    topics = [f"topic-{number}-0" for number in range(1_000)]
    assert some_of(topics).endswith("(topic-5 1, topic-6 1, topic-7 1, topic-8 1, topic-9 1, 990 more topics)")


def test_partitions_of_users_are_named_before_internal_ones() -> None:
    assert some_of(["__consumer_offsets-0", "__mine-0", "orders-0"]) == "__mine-0, orders-0, __consumer_offsets-0"


def test_problems_of_thousands_of_partitions_are_lines_that_can_be_read() -> None:
    states = {**ALL_RUN, 3: ProcessState.GONE}
    view = merge([answer(brokers=(1, 2), partitions={number: (-1, 3, [3]) for number in range(2_000)})])
    status = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view)
    problems = status.problems()
    assert len(problems) == 3
    assert all("(orders 1,995)" in problem for problem in problems[1:])
    assert max(map(len, [*problems, *status_lines(status)])) < 200


def test_a_zookeeper_that_is_gone_or_paused_is_a_problem() -> None:
    whole = merge([answer()])
    gone = status_of_processes(CLUSTER, ALL_RUN, ProcessState.GONE, whole)
    assert gone.problems() == [
        "ZooKeeper is not running, so no leader and no controller can be elected: `minibroker start zookeeper`"
    ]
    assert gone.zookeeper is not None
    assert gone.zookeeper.pid is None
    paused = status_of_processes(CLUSTER, ALL_RUN, ProcessState.PAUSED, whole)
    assert paused.problems() == [
        "ZooKeeper is paused, so no leader and no controller can be elected: `minibroker resume zookeeper`"
    ]


def test_what_brings_zookeeper_back_is_the_first_remedy_of_partitions_without_a_leader() -> None:
    states = {**ALL_RUN, 1: ProcessState.GONE}
    view = merge([answer(brokers=(2, 3), partitions={0: (-1, 4, [1])})])
    view = view._replace(answered=frozenset(view.brokers.values()))
    cut = {broker: ["it is cut from ZooKeeper"] for broker in (2, 3)}
    for server, cut_off, why, remedy in (
        (ProcessState.PAUSED, (), "ZooKeeper is paused", "`minibroker resume zookeeper`"),
        (
            ProcessState.RUNNING,
            (2, 3),
            "brokers 2 and 3 are cut from ZooKeeper by injected faults",
            "`minibroker heal`",
        ),
    ):
        faults = cut if cut_off else {}
        status = status_of_processes(CLUSTER, states, server, view, faults=faults, cut_from_zookeeper=cut_off)
        problems = status.problems()
        assert problems[0] == f"{why}, so no leader and no controller can be elected: {remedy}"
        assert f"orders-0 without a leader: {remedy}, then `minibroker start 1`" in problems
    assert "ZooKeeper at 127.0.0.1:2181: running, not reached by brokers 2 and 3" in status_lines(status)
    one = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view, faults=cut, cut_from_zookeeper=[2])
    assert one.problems()[0] == "broker 1 is not running: `minibroker start 1`", "broker 3 reaches ZooKeeper"


def test_without_zookeeper_its_remedy_comes_before_those_of_a_dead_broker() -> None:
    """No broker starts without ZooKeeper, and none leaves the ISR."""
    states = {**ALL_RUN, 3: ProcessState.GONE}
    view = merge([answer(partitions={0: (1, 4, [1, 2, 3]), 1: (1, 4, [1, 2, 3])})])
    first, second = (TopicPartition("orders", number) for number in range(2))
    view = view._replace(answered=frozenset(view.brokers.values()), stalls={first: [3], second: [2]})
    full = {3: "log directory /x: [Errno 28] No space left on device"}
    status = status_of_processes(CLUSTER, states, ProcessState.PAUSED, view, full)
    dead, *_, of_3, of_2 = status.problems()[1:]
    assert dead.endswith("): `minibroker resume zookeeper`, then free space there, then `minibroker start 3`")
    assert of_3.endswith("; `minibroker resume zookeeper`, then `minibroker start 3`")
    assert of_2.endswith("; `minibroker resume zookeeper`, then wait")
    reached = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view)
    assert [text.rpartition("; ")[2] for text in reached.problems()[-2:]] == [
        "`minibroker start 3`",
        "see `minibroker logs 2`",
    ]


def told(away_s: dict[int, float]) -> dict[int, DescribeHealthResponse]:
    """What brokers say of their connections to ZooKeeper. A negative time: there is one."""
    return {broker: DescribeHealthResponse(0, 0, broker, round(s * 1_000), 6_000) for broker, s in away_s.items()}


def test_a_broker_that_does_not_reach_zookeeper_says_so_whatever_the_cause_is() -> None:
    whole = merge([answer(partitions={0: (1, 0, [1, 2, 3])})])
    whole = whole._replace(answered=frozenset(whole.brokers.values()))
    away = whole._replace(health=told({1: 3.4, 2: -1, 3: 0.4}))
    for status in (status_of_view(away), status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, away)):
        assert status.problems() == [
            "broker 1, the controller, has had no connection to ZooKeeper for 3 s (its session ends after 6 s without "
            "one): check ZooKeeper and the network between the two"
        ]
        assert (status.cut_from_zookeeper, status.can_elect) == ([1], False)
        assert "running, without ZooKeeper" in status_lines(status)[1]
    moved = merge([answer(controller=(2, 8), brokers=(2, 3), partitions={0: (2, 0, [2, 3])})])
    out = moved._replace(
        answered=frozenset(whole.answered), health=told({1: 9, 2: -1, 3: -1}), unregistered={1: ("127.0.0.1", 9092)}
    )
    for status in (status_of_view(out), status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, out)):
        assert status.problems() == [
            "broker 1 runs but is not in the cluster, since it has had no connection to ZooKeeper for 9 s: check "
            "ZooKeeper and the network between the two",
            "orders-0 with replicas missing from the ISR: let broker 1 reach ZooKeeper, then wait",
        ]
        assert status.can_elect


def test_if_no_broker_reaches_zookeeper_that_is_one_problem() -> None:
    away = merge([answer()])
    away = away._replace(health=told({1: 30, 2: 29.6, 3: 30.2}), answered=frozenset(away.brokers.values()))
    status = status_of_view(away)
    assert status.problems() == [
        "brokers 1, 2 and 3 have had no connection to ZooKeeper for 30 s, so no leader and no controller can be "
        "elected: check ZooKeeper and the network between it and the brokers"
    ]
    assert not status.can_elect
    dead = status_of_processes(CLUSTER, ALL_RUN, ProcessState.GONE, away)
    assert dead.problems() == [
        "ZooKeeper is not running, so no leader and no controller can be elected: `minibroker start zookeeper`"
    ]


def test_a_controller_that_injected_faults_isolate_elects_nobody_whatever_they_are_called() -> None:
    view = merge([answer(partitions={0: (2, 0, [1, 2, 3])})])
    status = status_of_processes(
        CLUSTER, ALL_RUN, ProcessState.RUNNING, view, faults={1: ["words"]}, cut_from_zookeeper=[1]
    )
    assert not status.can_elect
    assert "no leader can move until the controller reaches ZooKeeper again" in status_lines(status)[-1]


def test_a_zookeeper_that_was_not_started_here_is_not_to_be_started_here() -> None:
    elsewhere = replace(CLUSTER, zookeeper=ZooKeeperEntry("elsewhere:2181"))
    problems = status_of_processes(elsewhere, ALL_RUN, ProcessState.GONE, merge([answer()])).problems()
    assert problems == [
        "no ZooKeeper answers at elsewhere:2181, so no leader and no controller can be elected: start it where it runs"
    ]


def test_of_a_cluster_that_is_down_nothing_else_is_to_be_said() -> None:
    gone = dict.fromkeys(ALL_RUN, ProcessState.GONE)
    status = status_of_processes(CLUSTER, gone, ProcessState.GONE, merge([]))
    assert status.problems() == ["the cluster is down: `minibroker up`"]


def test_a_cluster_elsewhere_shows_who_is_registered() -> None:
    status = status_of_view(merge([answer(brokers=(3, 1))]))
    assert [(broker.id, broker.pid, broker.alive) for broker in status.brokers] == [(1, None, True), (3, None, True)]
    assert status.zookeeper is None


def test_a_dead_leader_leads_nothing_though_brokers_have_not_heard_of_its_end() -> None:
    """This is the state without ZooKeeper, which would report the brokers."""
    states = {**ALL_RUN, 3: ProcessState.GONE}
    view = merge([answer(controller=(3, 7), partitions={0: (1, 0, [1, 2, 3]), 1: (3, 3, [1, 2, 3])})])
    status = status_of_processes(CLUSTER, states, ProcessState.GONE, view)
    assert status.offline_partitions == ["orders-1"]
    assert status.under_replicated_partitions == ["orders-0", "orders-1"]
    assert status.controller.id is None
    assert [broker.leaders for broker in status.brokers] == [1, 0, 0]


def test_a_log_directory_that_is_offline_is_named_with_its_reason() -> None:
    view = merge([answer()])
    failed = {2: {"/disks/b": "[Errno 5] Input/output error"}}
    said = (
        "broker 2 has taken its log directory /disks/b offline ([Errno 5] Input/output error): repair the disk, then "
        "restart the broker"
    )
    here = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, offline_log_dirs=failed)
    assert said in here.problems()
    assert [broker.offline_log_dirs for broker in here.brokers if broker.id == 2] == [failed[2]]
    assert said in status_of_view(view, failed).problems()


def test_of_a_full_disk_is_said_where_to_free_space_and_nothing_is_to_be_repaired() -> None:
    full = {"/disks/b": "[Errno 28] No space left on device"}
    view = seen_lagging(late(2, 0, -1, 35_000), isr=[1, 3])
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, offline_log_dirs={2: full})
    assert status.problems() == [
        "broker 2 has taken its log directory /disks/b offline ([Errno 28] No space left on device): free space in "
        "/disks/b, or move replicas away (`minibroker reassign`), then restart the broker",
        "orders-0, orders-1 with replicas missing from the ISR: free space in /disks/b",
    ], "broker 2 copies nothing to that directory, which is not for its network"
    both = {2: full, 3: {"/disks/c": "[Errno 5] Input/output error"}}
    gone = merge([answer(partitions={0: (1, 0, [1])})])
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, gone, offline_log_dirs=both)
    assert status.problems()[-1].endswith("repair the disks of the log directories and free space in /disks/b")


RECOVERY = RecoveryProgress(12, 9, 20, 4_000_000_000, 2_800_000_000)


def test_a_broker_that_recovers_says_how_far_it_is_and_is_to_be_waited_for() -> None:
    view = merge([answer(brokers=(1, 2), partitions={0: (1, 0, [1, 2])})])
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, recoveries={3: RECOVERY})
    assert status.brokers[2].recovery == RECOVERY
    assert status.problems()[0] == "broker 3 is recovering (3 of 12 logs, 1.2 of 4.0 GB): wait"
    assert "recovering: 3 of 12 logs, 1.2 of 4.0 GB" in status_lines(status)[3]


def test_a_recovery_is_shown_where_no_broker_knows_the_cluster_yet() -> None:
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, merge([]), recoveries={1: RECOVERY})
    assert "broker 1 is recovering (3 of 12 logs, 1.2 of 4.0 GB): wait" in status.problems()


def test_the_page_of_metrics_says_of_all_log_directories_together_how_far_a_recovery_is() -> None:
    page = "".join(
        f'# TYPE {name} gauge\n{name}{{dir="/a b"}} {number}.0\n{name}{{dir="/c"}} 1e+09\n'
        for number, name in enumerate(METRICS.values())
    )
    assert of_metrics(page) == RecoveryProgress(*(number + 10**9 for number in range(5)))
    assert of_metrics("") == RecoveryProgress()


def test_a_broker_that_does_not_answer_says_nothing_of_its_recovery() -> None:
    assert ask_recoveries({}) == {}
    assert ask_recoveries({1: free_ports(1)[0]}) == {}


def test_failed_disks_alone_are_no_reason_to_advise_starting_brokers() -> None:
    failed = {1: {"/disks/a": "[Errno 5] Input/output error"}}
    whole = merge([answer(partitions={0: (-1, 3, [1]), 1: (2, 1, [2, 3])})])
    only_disks = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, whole, offline_log_dirs=failed)
    assert only_disks.problems()[1:] == [
        "orders-0 without a leader: repair the disks of the log directories",
        "orders-0, orders-1 with replicas missing from the ISR: repair the disks of the log directories",
    ]
    states = {**ALL_RUN, 3: ProcessState.GONE}
    both = status_of_processes(CLUSTER, states, ProcessState.RUNNING, whole, offline_log_dirs=failed)
    assert both.problems()[-1].endswith("repair the disks of the log directories and `minibroker start 3`")


def test_problems_are_part_of_what_status_prints_and_of_its_json() -> None:
    states = {**ALL_RUN, 3: ProcessState.GONE}
    status = status_of_processes(CLUSTER, states, ProcessState.RUNNING, merge([answer(brokers=(1, 2))]))
    assert problem_lines(status) == ["broker 3 is not running: `minibroker start 3`"]
    assert status_object(status)["problems"] == problem_lines(status)


def test_partitions_that_lack_a_paused_broker_name_the_command_that_resumes_it() -> None:
    states = {**ALL_RUN, 2: ProcessState.PAUSED}
    view = merge([answer(partitions={0: (1, 1, [1, 3]), 1: (-1, 1, [2])})])
    view = view._replace(min_insync_replicas={"orders": 3})
    problems = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view).problems()
    assert problems[1] == "orders-1 without a leader: `minibroker resume 2`"
    refused, missing = (text for text in problems if text.startswith("orders-0"))
    assert "min.insync.replicas" in refused
    assert all(text.endswith(": `minibroker resume 2`, then wait") for text in (refused, missing)), problems


def test_a_paused_broker_without_a_missing_replica_is_not_resumed_for_it() -> None:
    states = {**ALL_RUN, 2: ProcessState.PAUSED, 3: ProcessState.GONE}
    view = merge([answer(brokers=(1, 2), partitions={0: (1, 1, [1, 2])})])
    problems = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view).problems()
    assert problems[-1] == "orders-0 with replicas missing from the ISR: `minibroker start 3`, then wait"
    skewed = status_of_processes(CLUSTER, states, ProcessState.RUNNING, view, faults={1: ["its clock is ahead"]})
    assert skewed.problems()[-1] == problems[-1], "the faults of broker 1 do not keep broker 3 out"
    waits = view._replace(stalls={TopicPartition("orders", 0): [2]})
    stalled = status_of_processes(CLUSTER, states, ProcessState.RUNNING, waits).problems()[-1]
    assert stalled.endswith("(replica.lag.time.max.ms); `minibroker resume 2`")


def test_a_broker_elsewhere_that_is_not_registered_is_missing_and_looked_for_where_it_runs() -> None:
    view = merge([answer(brokers=(1, 2), partitions={0: (1, 1, [1, 2]), 1: (-1, 1, [3])})])
    view = view._replace(
        answered=frozenset(view.brokers.values()),
        failures={("host", 9094): RequestTimedOut("no answer"), ("other", 9094): NetworkError("refused")},
    )
    status = status_of_view(view)
    assert status.problems() == [
        "broker 3 has replicas, but is not in the cluster: it has stopped, hangs or does not reach ZooKeeper; look "
        "where it runs",
        "the broker at host:9094 accepts connections but does not answer: it hangs; look where it runs",
        "orders-1 without a leader: bring broker 3 back",
        "orders-0, orders-1 with replicas missing from the ISR: bring broker 3 back, then wait",
    ]
    assert status_lines(status)[3].split() == ["3", "-", "-", "missing", "0"]


def test_a_broker_that_answers_late_is_slow_and_says_how_long_it_took() -> None:
    view = merge([answer()])
    view = view._replace(
        answered=frozenset(view.brokers.values()),
        answer_s={view.brokers[1]: SLOW_AFTER_S, view.brokers[2]: SLOW_AFTER_S + 0.5},
    )
    said = "broker 2 is slow to answer (it took 1.5 s, and should take at most 1 s)"
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view)
    assert status.problems() == [f"{said}: see `minibroker logs 2`"]
    assert "running, slow to answer" in status_lines(status)[2]
    ill = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, faults={2: ["it is slow"]})
    assert ill.problems() == [f"{said}; it has injected faults (it is slow): `minibroker heal 2`"]
    assert status_of_view(view).problems() == [f"{said}: look where it runs"]


def late(broker: int, partition: int, behind_ms: int, silent_ms: int, records: int = 7) -> LaggingFollower:
    return LaggingFollower(broker, "orders", partition, records, behind_ms, silent_ms, False)


def seen_lagging(*named: LaggingFollower, isr: list[int]) -> ClusterView:
    """What leader 1 of two partitions says of its followers."""
    view = merge([answer(partitions={0: (1, 0, isr), 1: (1, 0, isr)})])
    health = {1: DescribeHealthResponse(0, 0, 1, -1, 6_000, [*named])}
    return view._replace(answered=frozenset(view.brokers.values()), health=health)


def test_a_follower_that_copies_slowly_is_named_with_its_partitions_and_how_far_it_is_behind() -> None:
    whole = seen_lagging(late(3, 0, 2_140, 300, 1_234), late(3, 1, 1_500, 300), isr=[1, 2, 3])
    in_sync = (
        "broker 3 is a slow follower of orders-0, orders-1: in the ISR, but up to 1,234 records and 2.1 s behind: "
        "acks=all waits for it; "
    )
    look = "check the disk, processor and network of broker 3"
    assert status_of_view(whole).problems() == [in_sync + look]
    faults = {3: ["each packet that it sends takes 1000 ms longer"]}
    ordered = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, whole, faults=faults)
    assert ordered.problems() == [in_sync + "`minibroker heal` ends the injected faults"]
    out = status_of_view(seen_lagging(late(3, 0, 40_000, 300, 1), isr=[1, 2])).problems()
    assert out[1:] == [
        "broker 3 is a slow follower of orders-0: out of the ISR, up to 1 record and 40.0 s behind; wait while it "
        f"catches up, else {look}"
    ]
    cut = status_of_view(seen_lagging(late(3, 0, -1, 35_000), isr=[1, 2])).problems()
    assert cut[1:] == [
        "broker 3 is a slow follower of orders-0: out of the ISR, up to 7 records behind, and has not asked broker 1 "
        "for records for 35 s; check the network between broker 3 and broker 1"
    ]


def test_if_all_followers_of_a_leader_lag_behind_it_alone_that_leader_is_looked_at() -> None:
    both = seen_lagging(late(2, 0, 1_300, 300, 24), late(3, 0, 1_300, 300, 24), isr=[1, 2, 3])
    behind = "in the ISR, but up to 24 records and 1.3 s behind: acks=all waits for it; check the processor and network"
    assert status_of_view(both).problems() == [
        f"broker {broker} lags behind broker 1, as other followers do, in orders-0: {behind} of broker 1"
        for broker in (2, 3)
    ]
    name = TopicPartition("orders", 1)
    elsewhere = DescribeHealthResponse(0, 0, 2, -1, 6_000, [late(3, 1, 1_300, 300)])
    also = both._replace(
        partitions={**both.partitions, name: replace(both.partitions[name], leader_id=2)},
        health={**both.health, 2: elsewhere},
    )
    assert [slow.is_by_leader for slow in slow_followers(also)] == [False, False], "broker 3 is slow everywhere"


def test_brokers_that_have_delayed_acks_all_are_told_and_are_no_problem() -> None:
    view = merge([answer(partitions={0: (1, 0, [1, 2, 3]), 1: (3, 0, [1, 2, 3]), 2: (3, 0, [1, 2, 3])})])
    waits = {
        1: [SlowCommit("orders", 0, 2, 5, 2_340), SlowCommit("orders", 2, 2, 1, 9_000)],
        3: [SlowCommit("orders", 1, 2, 1, 1_200)],
    }
    health = {id: DescribeHealthResponse(0, 0, id, -1, 6_000, slow_commits=slow) for id, slow in waits.items()}
    view = view._replace(answered=frozenset(view.brokers.values()), health=health)
    took = "acks=all took up to 2.3 s in orders-0, orders-1 within the last 10 s, until broker 2 had copied the records"
    status = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view)
    assert (status.problems(), status.is_any_partition_in_trouble) == ([], True)
    assert f"{took}: check the disk, processor and network of broker 2" in status_lines(status), "orders-2: no leader's"
    ill = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, faults={3: ["it is slow"]})
    assert f"{took}: `minibroker heal` ends the injected faults" in status_lines(ill)


def test_a_follower_of_which_more_is_known_is_not_only_called_slow() -> None:
    lagging = late(3, 0, 2_100, 300)
    whole = seen_lagging(lagging, isr=[1, 2, 3])
    name = TopicPartition("orders", 0)
    assert len(slow_followers(whole)) == 1
    assert slow_followers(whole._replace(stalls={name: [3]})) == [], "records wait for it"
    silent = whole._replace(answered=frozenset(address for broker, address in whole.brokers.items() if broker != 3))
    assert slow_followers(silent) == [], "it does not answer"
    moving = whole._replace(movements=(Movement(name, (Copy(3, 5),), (), 10),))
    assert slow_followers(moving) == [], "it is being added"
    deposed = seen_lagging(lagging, isr=[1, 2, 3])
    deposed = deposed._replace(partitions={name: replace(deposed.partitions[name], leader_id=2)})
    assert slow_followers(deposed) == [], "another broker leads"


def test_a_disk_that_takes_seconds_is_named_with_what_waits_for_it() -> None:
    view = merge([answer()])
    health = DescribeHealthResponse(0, 0, 2, -1, 6_000, [], [SlowDiskMessage("/d", 3, 2_340, "write")])
    view = view._replace(answered=frozenset(view.brokers.values()), health={2: health})
    slow = (
        "the disk of broker 2 at /d is slow: 3 calls took 1 s or longer within 20 s, a write 2.3 s. Meanwhile clients "
        "wait: all of them for a write, those of topics with durability=synced for a flush; "
    )
    assert status_of_view(view).problems() == [slow + "check the disk"]
    faults = {2: ["each write in /d takes 2000 ms longer"]}
    ordered = status_of_processes(CLUSTER, ALL_RUN, ProcessState.RUNNING, view, faults=faults)
    assert ordered.problems() == [slow + "`minibroker heal 2` ends the injected faults"]

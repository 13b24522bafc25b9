"""Plans carried out on a simulated ZooKeeper: the writes, the controller's state after them, and the steps left
undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from minibroker.controller.decisions import brokers
from minibroker.controller.decisions import plan as p
from minibroker.controller.decisions.cluster_state import NOT_WRITTEN, ClusterState
from minibroker.controller.decisions.events import Startup
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.controller.executing import requests
from minibroker.controller.executing.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.executing.executor import PlanExecutor, PlanOutcome
from minibroker.controller.executing.outbox import Outbox
from minibroker.controller.timeline import MAX_LINES, Timeline
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.apis import LEADER_AND_ISR, UPDATE_METADATA, encode_request
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.world import ConnectionLoss, Operation, ZooKeeperError
from minibroker.protocol.znodes import TopicZnode
from tests.running import run_by
from tests.unit.controller.pictures import CONTROLLER, EPOCH, broker, carry_out, leads, partition, picture

A = TopicPartition("a", 0)
B = TopicPartition("b", 0)


class Desk:
    """An executor with its state. There are no brokers: requests have tests of their own."""

    def __init__(self, simulation: Simulation, state: ClusterState, session: VirtualSession) -> None:
        world = simulation.host("office").start_process()
        self.zookeeper = simulation.zookeeper
        self.state = state
        self.entries: list[dict[str, Any]] = []
        self.timeline = Timeline(world.clock, CONTROLLER, self.entries.append)
        outbox = Outbox(
            BrokerConnections(world, 0, None), EPOCH, "test", 1.0, lambda event: None, lambda failure: None, world.clock
        )
        self.multis: list[Sequence[Operation]] = []
        self.zookeeper.after = lambda session, operations: self.multis.append(operations)
        access = ZooKeeperAccess(session, world.clock)
        session.on_state(lambda state: access.session_changed())
        version = self.zookeeper.stat(znodes.CONTROLLER_EPOCH).version
        self._executor = PlanExecutor(access, state, version, outbox, self.timeline)

    async def execute(self, plan: p.Plan) -> PlanOutcome:
        self.timeline.begin(Startup(EPOCH), 0)
        try:
            return await self._executor.execute(plan)
        finally:
            self.timeline.end()

    def put_state(self, where: TopicPartition, state: LeaderAndIsr) -> None:
        """Write a state as a leader or another controller does."""
        self.zookeeper.make(znodes.state_path(where), znodes.encode_state(state))


def on_a_desk(
    scenario: Callable[[Desk], Coroutine[Any, Any, None]],
    assignments: dict[str, tuple[int, ...]],
    states: dict[str, LeaderAndIsr],
) -> None:
    """Take over ZooKeeper's partition states, with version 0. No broker lives."""

    async def main() -> None:
        simulation = Simulation()
        zookeeper = simulation.zookeeper
        for path in znodes.PERSISTENT_PATHS:
            zookeeper.make(path)
        zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(EPOCH))
        for name, replicas in assignments.items():
            topic = znodes.encode_topic(TopicZnode(f"id-of-{name}", {0: replicas}))
            zookeeper.make(znodes.topic_path(partition(name).topic), topic)
        for name, state in states.items():
            zookeeper.make(znodes.state_path(partition(name)), znodes.encode_state(state))
        session = await zookeeper.connect("zookeeper:2181", 6_000, 1_000)
        await scenario(Desk(simulation, picture([], assignments, states), session))

    run(main())


def online(where: TopicPartition, leader: int, epoch: int, isr: Sequence[int], version: int) -> p.Plan:
    """Write a state, and move the partition to Online."""
    state = LeaderAndIsr(leader, epoch, tuple(isr), EPOCH, version)
    return p.Plan(
        writes=(p.WriteState(where, state),), partition_moves=(p.PartitionMove(where, PartitionState.ONLINE),)
    )


def test_an_illegal_move_changes_nothing_and_is_shown_with_both_states(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> None:
        replica = PartitionReplica(A, 1)
        plan = p.Plan(
            partition_moves=(
                p.PartitionMove(A, PartitionState.NON_EXISTENT),
                p.PartitionMove(A, PartitionState.ONLINE),
                p.PartitionMove(B, PartitionState.NEW),
            ),
            replica_moves=(
                p.ReplicaMove(replica, ReplicaState.DELETION_SUCCESSFUL),
                p.ReplicaMove(PartitionReplica(B, 1), ReplicaState.ONLINE),
            ),
            writes=(
                p.WriteState(A, leads(2, 5, [2], version=0)),
                p.WriteState(B, leads(2, 5, [2], version=0, controller_epoch=EPOCH)),
            ),
        )
        await desk.execute(plan)
        [entry] = desk.entries
        # The move from Offline to NonExistent is legal, the next one to Online is not: the partition is not written.
        assert entry["illegal_moves"] == [
            "partition a-0: NonExistentPartition -> OnlinePartition is not a legal move",
            "partition b-0: OfflinePartition -> NewPartition is not a legal move",
            "replica a-0 on 1: OfflineReplica -> ReplicaDeletionSuccessful is not a legal move",
        ]
        assert desk.multis == []
        assert desk.state.partition_state(B) is PartitionState.OFFLINE
        assert desk.state.replica_state(replica) is ReplicaState.OFFLINE
        assert desk.state.replica_state(PartitionReplica(B, 1)) is ReplicaState.ONLINE, "the legal one took place"
        assert desk.state.leadership[A].leader == 1

    with caplog.at_level(logging.ERROR, "minibroker.controller.executing.executor"):
        on_a_desk(scenario, {"a-0": (1, 2), "b-0": (1, 2)}, {"a-0": leads(1, 4, [1, 2]), "b-0": leads(1, 4, [1, 2])})
    assert "OfflinePartition -> NewPartition is not a legal move" in caplog.text


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={"a-0": leads(1, 4, [1, 2])})
async def test_what_was_written_is_remembered_with_the_version_that_it_got(desk: Desk, /) -> None:
    assert await desk.execute(online(A, 2, 5, [2], version=0)) == PlanOutcome()
    assert desk.state.leadership[A] == LeaderAndIsr(2, 5, (2,), EPOCH, 1)
    assert desk.state.partition_state(A) is PartitionState.ONLINE


def test_conflicts_are_dropped_and_the_rest_is_sent_again_however_many_there_are() -> None:
    names = [f"t{number}-0" for number in range(40)]

    async def scenario(desk: Desk) -> None:
        changed = [partition(name) for name in names[::2]]
        for where in changed:
            desk.put_state(where, leads(1, 4, [1]))
        desk.multis.clear()
        plans = [online(partition(name), 2, 5, [2], version=0) for name in names]
        plan = p.Plan(
            writes=tuple(write for plan in plans for write in plan.writes),
            partition_moves=tuple(move for plan in plans for move in plan.partition_moves),
        )
        outcome = await desk.execute(plan)
        assert sorted(outcome.conflicts) == sorted(changed)
        assert len(desk.multis) == 1, "one was refused, one succeeded"
        for name in names:
            where = partition(name)
            held = desk.state.leadership[where]
            if where in changed:
                assert (held.leader, held.leader_epoch, held.isr, held.partition_epoch) == (1, 4, (1,), 1)
                assert desk.state.partition_state(where) is PartitionState.OFFLINE
            else:
                assert (held.leader, held.leader_epoch, held.partition_epoch) == (2, 5, 1)
                assert desk.state.partition_state(where) is PartitionState.ONLINE

    on_a_desk(scenario, dict.fromkeys(names, (1, 2)), dict.fromkeys(names, leads(1, 4, [1, 2])))


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={"a-0": leads(1, 4, [1, 2])})
async def test_a_state_that_names_a_controller_which_was_never_elected_is_left_alone(desk: Desk, /) -> None:
    by_hand = leads(2, 9, [2], controller_epoch=EPOCH + 1)
    desk.put_state(A, by_hand)
    await desk.execute(online(A, 2, 5, [2], version=0))
    assert desk.state.leadership[A].leader == 1
    assert desk.zookeeper.data(znodes.state_path(A)) == znodes.encode_state(by_hand)


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={"a-0": leads(1, 4, [1, 2])})
async def test_another_controller_deposes_before_anything_is_written(desk: Desk, /) -> None:
    desk.zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(EPOCH + 1))
    desk.multis.clear()
    with pytest.raises(ControllerMoved):
        await desk.execute(online(A, 2, 5, [2], version=0))
    assert desk.multis == []


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={})
async def test_a_state_that_a_former_controller_created_is_adopted(desk: Desk, /) -> None:
    desk.put_state(A, leads(2, 0, [2]))
    outcome = await desk.execute(online(A, 1, 0, [1, 2], version=NOT_WRITTEN))
    assert outcome.conflicts == (A,)
    assert desk.state.leadership[A] == leads(2, 0, [2], version=0)
    assert desk.state.partition_state(A) is PartitionState.NEW


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={})
async def test_a_partition_node_without_a_state_does_not_keep_the_state_from_being_created(desk: Desk, /) -> None:
    desk.zookeeper.make(znodes.partition_path(A))
    assert await desk.execute(online(A, 1, 0, [1, 2], version=NOT_WRITTEN)) == PlanOutcome()
    assert desk.state.leadership[A] == LeaderAndIsr(1, 0, (1, 2), EPOCH, 0)


@pytest.mark.parametrize("version", [0, NOT_WRITTEN])
@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={"a-0": leads(1, 4, [1, 2])})
async def test_what_vanished_from_zookeeper_is_not_written(desk: Desk, /, version: int) -> None:
    desk.zookeeper.remove("/brokers/topics/a")
    plan = online(A, 2, 5, [2], version)
    parent = p.EnsureNode(znodes.partitions_path("a"))
    assert await desk.execute(p.Plan(writes=(parent, *plan.writes))) == PlanOutcome()
    assert not desk.zookeeper.has("/brokers/topics/a")
    assert "is gone: it is not written" in desk.entries[0]["conflicts"][0]


@run_by(on_a_desk, assignments={"a-0": (1, 2)}, states={"a-0": leads(1, 4, [1, 2])})
async def test_a_state_that_cannot_be_read_is_not_overwritten(desk: Desk, /) -> None:
    desk.zookeeper.make(znodes.state_path(A), b"by hand")
    assert await desk.execute(online(A, 2, 5, [2], version=0)) == PlanOutcome()
    assert desk.zookeeper.data(znodes.state_path(A)) == b"by hand"
    assert desk.state.leadership[A].leader == 1


@run_by(on_a_desk, assignments={}, states={})
async def test_nodes_to_be_there_may_be_there_and_nodes_to_be_gone_may_be_gone(desk: Desk, /) -> None:
    writes = (
        p.EnsureNode("/admin/delete_topics"),
        p.RemoveNode("/admin/nothing"),
        p.EnsureNode("/admin/new"),
        p.RemoveNode("/log_dir_event_notification"),
    )
    assert await desk.execute(p.Plan(writes=writes)) == PlanOutcome()
    assert desk.zookeeper.names("/admin") == ["delete_topics", "new"]
    assert not desk.zookeeper.has("/log_dir_event_notification")


@run_by(on_a_desk, assignments={}, states={})
async def test_only_that_run_of_a_broker_is_removed_that_was_meant(desk: Desk, /) -> None:
    desk.zookeeper.make("/brokers/ids/1")
    former = desk.zookeeper.stat("/brokers/ids/1").czxid
    desk.zookeeper.remove("/brokers/ids/1")

    def join(session: VirtualSession, operations: Sequence[Operation]) -> None:
        desk.zookeeper.before = None
        desk.zookeeper.make("/brokers/ids/2")

    # Refused at first, as broker 1 is gone; at the second look it has registered anew.
    desk.zookeeper.before = join
    await desk.execute(p.Plan(writes=(p.RemoveBroker(1, former), p.RemoveNode("/brokers/ids/2"))))
    assert desk.zookeeper.names("/brokers/ids") == []
    desk.zookeeper.make("/brokers/ids/1")
    await desk.execute(p.Plan(writes=(p.RemoveNode("/brokers/ids/9"), p.RemoveBroker(1, former))))
    assert desk.zookeeper.names("/brokers/ids") == ["1"]


@run_by(on_a_desk, assignments={}, states={})
async def test_a_node_with_unexpected_children_abandons_the_plan(desk: Desk, /) -> None:
    outcome = await desk.execute(
        p.Plan(changes=brokers.lost(desk.state, [1]).changes, writes=(p.RemoveNode("/admin"),))
    )
    assert outcome.obstacle is not None
    assert "/admin" in outcome.obstacle
    assert "changes" not in desk.entries[0]


@run_by(on_a_desk, assignments={}, states={})
async def test_an_error_that_nobody_expects_is_not_swallowed(desk: Desk, /) -> None:
    desk.zookeeper.make("/mine", b"")
    with pytest.raises(ZooKeeperError):
        await desk.execute(p.Plan(writes=(p.RemoveNode("/"),)))


@run_by(on_a_desk, assignments={}, states={})
async def test_large_writes_go_into_several_multis(desk: Desk, /) -> None:
    topics = [
        p.CreateTopic(f"t{number}", TopicZnode("id", {0: (1,)}), {"some.setting": "x" * 400_000}) for number in range(5)
    ]
    assert await desk.execute(p.Plan(writes=tuple(topics))) == PlanOutcome()
    assert [len(multi) for multi in desk.multis] == [7, 7, 4]


@run_by(on_a_desk, assignments={}, states={})
async def test_the_timeline_cuts_long_lists_and_says_how_much_is_missing(desk: Desk, /) -> None:
    await desk.execute(p.Plan(notes=tuple(f"note {number}" for number in range(MAX_LINES + 50))))
    await desk.execute(p.Plan(notes=("short",)))
    long, short = desk.entries
    assert len(long["notes"]) == MAX_LINES + 1
    assert long["notes"][-1] == "and 50 more"
    assert short["notes"] == ["short"]


@run_by(on_a_desk, assignments={}, states={})
async def test_the_timeline_counts_all_lost_leaders_though_it_does_not_list_all(desk: Desk, /) -> None:
    names = [TopicPartition("many", number) for number in range(MAX_LINES + 50)]
    before, without = leads(1, 5, [1]), leads(NO_LEADER, 6, [1])
    desk.timeline.begin(Startup(EPOCH), 0)
    desk.timeline.add_states("states", dict.fromkeys(names, before), dict.fromkeys(names, without))
    desk.timeline.add_states("states", dict.fromkeys(names, without), {names[0]: before, names[1]: without})
    desk.timeline.end()
    [entry] = desk.entries
    assert (len(entry["states"]), entry["states_omitted"]) == (MAX_LINES, 52)
    assert (entry["elected"], entry["leaderless"]) == (MAX_LINES + 51, MAX_LINES + 50)


# --- The requests that follow ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_about_many_partitions_fit_the_frames_that_brokers_take() -> None:
    topics = [("t" * 240) + str(number) for number in range(3_000)]
    names = {f"{topic}-{index}": (1, 2, 3) for topic in topics for index in range(4)}
    state = picture([1, 2, 3], names, dict.fromkeys(names, leads(1, 2**31 - 1, [1, 2, 3], 2**31 - 1)))
    partitions = sorted(state.assignments)
    sent = list(requests.leader_and_isr(state, broker(1), partitions, frozenset(), {}))
    assert [part for _, parts in sent for part in parts] == partitions
    assert len(sent) > 1
    update = p.MetadataUpdate((1, 2, 3), tuple(partitions), names_the_last=True)
    metadata = [made_out(broker(2)) for made_out in requests.update_metadata(state, update)]
    assert sum(len(topic.partition_states) for request in metadata for topic in request.topic_states) == len(names)
    assert [request.names_the_last for request in metadata] == [False] * (len(metadata) - 1) + [True]
    frames = [encode_request(LEADER_AND_ISR, 1, "test", request) for request, _ in sent]
    frames += [encode_request(UPDATE_METADATA, 1, "test", request) for request in metadata]
    assert max(len(frame) for frame in frames) <= MAX_SMALL_REQUEST_BYTES


def test_metadata_names_replicas_that_are_down_and_topics_that_are_gone() -> None:
    state = picture([1, 2], {"a-0": (1, 2, 3)}, {"a-0": leads(1, 4, [1, 2])})
    update = p.MetadataUpdate((1,), (A,), (p.DeletedTopic("old", "old-id"),))
    first, second = (made_out(broker(1)) for made_out in requests.update_metadata(state, update))
    [told] = first.topic_states
    [told_partition] = told.partition_states
    assert (told_partition.leader, told_partition.isr, told_partition.offline_replicas) == (1, [1, 2], [3])
    assert [(b.id, b.broker_epoch) for b in first.live_brokers] == [(1, 10), (2, 20)]
    [gone] = second.topic_states
    assert (gone.topic_name, gone.topic_id, gone.deleted, gone.partition_states) == ("old", "old-id", True, [])


def test_a_partition_without_a_state_is_not_told_of_and_a_leader_that_is_none_has_no_address() -> None:
    state = picture([1, 2], {"a-0": (1, 2), "b-0": (1, 2)}, {"a-0": leads(NO_LEADER, 4, [3])})
    carry_out(state, p.Plan())
    [(request, parts)] = requests.leader_and_isr(state, broker(1), [A, B], frozenset(), {})
    assert parts == (A,)
    assert request.live_leaders == []


# --- Topics whose assignment is written again ----------------------------------------------------------------------


def _grown(version: int, topic_id: str = "id-of-a-0") -> p.Plan:
    return p.Plan(writes=(p.SetTopic("a", _two_partitions(topic_id), version),))


def _two_partitions(topic_id: str = "id-of-a-0") -> TopicZnode:
    return TopicZnode(topic_id, {0: (1,), 1: (2,)})


def _topic_of(desk: Desk) -> TopicZnode:
    return znodes.decode_topic("a", desk.zookeeper.data(znodes.topic_path("a")))


@run_by(on_a_desk, assignments={"a-0": (1,)}, states={})
async def test_a_topic_is_written_over_the_version_that_was_read_and_no_other(desk: Desk, /) -> None:
    desk.zookeeper.make(znodes.topic_id_path("a", "id-of-a-0"))
    assert (await desk.execute(_grown(0))).unwritten_topics == frozenset()
    assert sorted(_topic_of(desk).partitions) == [0, 1]
    desk.zookeeper.make(znodes.topic_path("a"), znodes.encode_topic(TopicZnode("id-of-a-0", {0: (9,)})))
    assert (await desk.execute(_grown(1))).unwritten_topics == {"a"}
    assert _topic_of(desk).partitions == {0: (9,)}


@pytest.mark.parametrize("arrives", [True, False])
@run_by(on_a_desk, assignments={"a-0": (1,)}, states={})
async def test_a_topic_whose_write_was_not_answered_is_looked_at_again(desk: Desk, /, arrives: bool) -> None:
    desk.zookeeper.make(znodes.topic_id_path("a", "id-of-a-0"))

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        desk.zookeeper.before = None
        if arrives:
            desk.zookeeper.make(znodes.topic_path("a"), znodes.encode_topic(_two_partitions()))
        raise ConnectionLoss("whether it arrived is not known")

    desk.zookeeper.before = cut
    assert (await desk.execute(_grown(0))).unwritten_topics == frozenset()
    assert sorted(_topic_of(desk).partitions) == [0, 1]
    assert desk.zookeeper.stat(znodes.topic_path("a")).version == 1


@run_by(on_a_desk, assignments={"a-0": (1,)}, states={})
async def test_a_topic_of_that_name_that_was_made_since_is_not_written(desk: Desk, /) -> None:
    desk.zookeeper.make(znodes.topic_id_path("a", "another"))  # of version 0, as the one that was read
    assert (await desk.execute(_grown(0))).unwritten_topics == {"a"}
    assert (await desk.execute(_grown(0, "another"))).unwritten_topics == frozenset()
    desk.zookeeper.remove(znodes.topic_id_path("a", "another"))
    desk.zookeeper.remove(znodes.topic_path("a"))
    assert (await desk.execute(_grown(1, "another"))).unwritten_topics == {"a"}


# --- Assignments, and the requests for them ---


@run_by(on_a_desk, assignments={}, states={})
async def test_changes_by_hand_to_the_list_of_reassignments_are_left_alone(desk: Desk, /) -> None:
    one, other = znodes.Reassignment(A, (1,)), znodes.Reassignment(B, (1,))
    path = znodes.REASSIGN_PARTITIONS
    desk.zookeeper.make(path, znodes.encode_reassignments([one, other]))
    await desk.execute(p.Plan(writes=(p.SetReassignments((other,), 0),)))
    assert znodes.decode_reassignments(desk.zookeeper.data(path)) == [other]
    await desk.execute(p.Plan(writes=(p.SetReassignments((), 0),)))
    assert znodes.decode_reassignments(desk.zookeeper.data(path)) == [other], "version 0 is no more"
    await desk.execute(p.Plan(writes=(p.SetReassignments((), 1),)))
    assert not desk.zookeeper.has(path)

from __future__ import annotations

from math import inf

from minibroker.client.cluster.metadata import Leader
from minibroker.client.fetching.fetch_state import Due, FetchedBatch, TopicPartitionState, due_fetches
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.messages import EpochEndOffset
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import encode_batch, parse_header

NOW = 100.0
LEADER = Leader(1, 5)
OTHER = Leader(2, 5)


def reading(index: int, position: int | None = 10) -> TopicPartitionState:
    state = TopicPartitionState(TopicPartition("orders", index), None)
    state.move(position, epoch=5)
    return state


def due(*states: TopicPartitionState, leaders: dict[int, Leader] | None = None) -> Due:
    def leader_of(topic: str, index: int) -> Leader | None:
        return LEADER if leaders is None else leaders.get(index)

    return due_fetches(states, leader_of, NOW, max_bytes=1_000, max_partition_bytes=100)


def test_whatever_is_in_no_request_is_asked_of_its_leader() -> None:
    here, there, asked = reading(0), reading(1), reading(2)
    asked.outstanding_generation = asked.generation
    leaders = {0: LEADER, 1: OTHER, 2: LEADER}
    assert due(here, there, asked, leaders=leaders) == Due({1: [(here, LEADER)], 2: [(there, OTHER)]}, [], False, inf)


def test_a_partition_that_was_moved_is_asked_for_though_an_older_request_is_out() -> None:
    state = reading(0)
    state.outstanding_generation = state.generation
    state.move(50)
    assert due(state).by_leader == {1: [(state, LEADER)]}


def read(state: TopicPartitionState, epoch: int, base_offset: int, count: int) -> None:
    data = encode_batch([b""] * count, base_timestamp=0, base_offset=base_offset, partition_leader_epoch=epoch)
    header = parse_header(data)
    state.arrived(FetchedBatch(state, header, memoryview(data), 0, len(data), header.next_offset))


def test_where_two_histories_part_is_found_in_as_many_rounds_as_there_are_epochs_that_differ() -> None:
    state = TopicPartitionState(TopicPartition("orders", 0), None)
    state.move(0)
    for epoch, base_offset in ((1, 0), (1, 10), (3, 20), (3, 30), (5, 40)):
        read(state, epoch, base_offset, 10)
    assert (state.fetch_offset, state.last_epoch, state.position_epoch) == (50, 5, NO_EPOCH)
    # The leader has epoch 1 up to 15, 2 up to 25, and 4 up to 60.
    assert state.diverging_offset(EpochEndOffset(4, 60)) == 40
    state.go_back(40)
    assert (state.fetch_offset, state.last_epoch, state.position_epoch) == (40, 3, 3)
    assert state.diverging_offset(EpochEndOffset(2, 25)) == 20
    state.go_back(20)
    assert (state.last_epoch, state.position_epoch) == (1, 1)
    assert state.diverging_offset(EpochEndOffset(1, 15)) == 15
    state.go_back(15)
    assert (state.fetch_offset, state.last_epoch, state.position) == (15, 1, 15)


def test_of_a_position_that_was_chosen_only_the_record_before_it_is_known() -> None:
    state = TopicPartitionState(TopicPartition("orders", 0), None)
    state.move(20, epoch=3)
    assert (state.last_epoch, state.position_epoch) == (3, 3)
    assert state.diverging_offset(EpochEndOffset(2, 25)) == 19
    assert state.diverging_offset(EpochEndOffset(3, 12)) == 12
    state.go_back(12)
    assert (state.last_epoch, state.position_epoch) == (NO_EPOCH, NO_EPOCH)


def test_what_has_no_position_or_is_the_users_turn_is_not_asked_for() -> None:
    lost, paused, stopped = reading(0, None), reading(1), reading(2)
    paused.is_paused = True
    stopped.error = MinibrokerError("to be raised")
    assert due(lost, paused, stopped, leaders={}) == Due({}, [], False, inf)


def test_a_partition_without_a_leader_is_what_metadata_is_needed_for() -> None:
    there = reading(1)
    assert due(reading(0), there, leaders={1: LEADER}) == Due({1: [(there, LEADER)]}, [], True, inf)


def test_what_one_leader_has_refused_waits_for_another_or_for_its_time() -> None:
    state, later = reading(0), reading(1)
    state.trouble = ErrorCode.NOT_LEADER_OR_FOLLOWER
    state.retry_at, state.tried = NOW + 2, LEADER
    later.retry_at, later.tried = NOW + 3, LEADER
    assert due(state, later) == Due({}, [], False, NOW + 2)
    assert due(state, leaders={0: OTHER}).by_leader == {2: [(state, OTHER)]}
    state.retry_at = NOW
    assert due(state).by_leader == {1: [(state, LEADER)]}


def test_a_leader_older_than_what_was_read_is_not_asked_but_doubted_from_time_to_time() -> None:
    state = reading(0)
    deposed = Leader(1, 4)
    assert due(state, leaders={0: deposed}) == Due({}, [(state, deposed)], False, inf)
    state.retry_at = NOW + 1
    assert due(state, leaders={0: deposed}) == Due({}, [], False, NOW + 1)


def test_a_leader_is_left_alone_while_one_of_its_partitions_or_all_together_have_enough() -> None:
    states = [reading(index) for index in range(12)]
    states[0].fetched_bytes = 51
    assert due(states[0], states[1]).by_leader == {}
    assert due(states[0], states[1], leaders={0: LEADER, 1: OTHER}).by_leader == {2: [(states[1], OTHER)]}
    for state in states:
        state.fetched_bytes = 50
    assert due(*states).by_leader == {}
    assert len(due(*states[:10]).by_leader[1]) == 10


def test_what_holds_no_records_for_the_user_leaves_nothing_to_commit() -> None:
    state = reading(0, position=10)
    seen = [state.has_uncommitted]  # the consumer itself began there
    state.pass_over(12)
    seen.append(state.has_uncommitted)
    state.position = 15
    state.pass_over(17)
    seen.append(state.has_uncommitted)
    state.saved = 17
    seen.append(state.has_uncommitted)
    state.go_back(13)
    seen.append(state.has_uncommitted)
    assert seen == [False, False, True, False, True]

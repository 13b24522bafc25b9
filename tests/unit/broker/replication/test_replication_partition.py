from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from minibroker.broker.replication.following import copying
from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation
from minibroker.broker.replication.partition import Partition, Settings
from minibroker.broker.replication.reading import offset_for, tell_producers
from minibroker.broker.replication.throttle import Quota
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage.search import Steps
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    EARLIEST_LOCAL_TIMESTAMP,
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    EpochEndOffset,
    FetchPartitionResponse,
)
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from tests.replication_support import LAG_S, ME, fetch_of, open_partition, partition_over, state
from tests.storage_support import NOW, Clock, batch, everything, headers, stamped


def refusal(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(BrokerError) as raised:
        call()
    return raised.value.code


def append(partition: Partition, count: int = 1, acks: int = 1) -> int:
    """Append a batch as leader. Returns the offset after it."""
    return partition.append(batch(count), required_acks=acks, now_ms=NOW).next_offset


def fetches(partition: Partition, follower: int, offset: int, broker_epoch: int = 1, start: int = 0) -> bool:
    """Let the follower fetch in the leader's epoch. Returns whether the high watermark moved."""
    last_epoch = partition.log.epoch_at(offset - 1) if offset else -1
    asked = fetch_of(offset, epoch=partition.leader_epoch, last_epoch=last_epoch, start=start)
    assert partition.check_fetch(asked, follower) is None
    return partition.record_follower_fetch(follower, asked, broker_epoch)


def answered(
    records: bytes = b"", high_watermark: int = -1, diverging: EpochEndOffset | None = None
) -> FetchPartitionResponse:
    return FetchPartitionResponse(
        0, ErrorCode.NONE, high_watermark, diverging_epoch=diverging, records=memoryview(records)
    )


def out_of_range(
    start: int, previous_epoch: int | None = None, producers: bytes | memoryview = b""
) -> FetchPartitionResponse:
    """Answer a follower whose log ends before its leader's begins."""
    previous = None if previous_epoch is None else EpochEndOffset(previous_epoch, start)
    return FetchPartitionResponse(
        0,
        ErrorCode.OFFSET_OUT_OF_RANGE,
        log_start_offset=start,
        diverging_epoch=previous,
        producers=memoryview(producers),
    )


# -- who leads --


def test_a_new_replica_neither_leads_nor_follows(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    assert refusal(lambda: append(partition)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert refusal(lambda: partition.check_fetch(fetch_of(0), CONSUMER)) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_leader_begins_its_epoch_at_its_logs_end(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=0))
    append(partition, 3)
    partition.become_leader(state(epoch=4))
    append(partition, 2)
    assert partition.end_offset_for_epoch(0, -1) == (0, 3)
    assert partition.end_offset_for_epoch(3, -1) == (0, 3)
    assert partition.end_offset_for_epoch(4, -1) == (4, 5)
    # The answer would count as a truncation: a later leader knows this epoch.
    assert refusal(lambda: partition.end_offset_for_epoch(5, -1)) is ErrorCode.UNKNOWN_LEADER_EPOCH
    assert [h.partition_leader_epoch for h in headers(everything(partition.log))] == [0, 4]


def test_a_deposed_leader_refuses_what_only_a_leader_does(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=0))
    append(partition)
    partition.become_follower(state(leader=2, epoch=1))
    assert not any(partition.leads_in(epoch) for epoch in (0, 1))
    assert refusal(lambda: append(partition)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert refusal(lambda: partition.check_fetch(fetch_of(0, epoch=1), 3)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert refusal(lambda: partition.check_fetch(fetch_of(0, epoch=0), 3)) is ErrorCode.FENCED_LEADER_EPOCH
    assert refusal(lambda: partition.check_fetch(fetch_of(0, epoch=2), 3)) is ErrorCode.UNKNOWN_LEADER_EPOCH
    assert partition.isr_to_propose() is None
    found = partition.admit(fetch_of(0), CONSUMER)
    assert found is not None
    assert (found.error_code, found.current_leader_id, found.current_leader_epoch) == (
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        2,
        1,
    )


def test_only_an_older_leader_epoch_is_stale(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=3))
    assert [partition.is_stale(state(epoch=e)) for e in (2, 3, 4)] == [True, False, False]


def test_the_same_epoch_told_again_changes_the_isr_if_it_is_newer_and_nothing_else(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state(epoch=3, version=7))
    end = append(partition)
    fetches(partition, 2, end)
    partition.become_leader(state(epoch=3, isr=(1,), version=6))
    assert partition.isr == (1, 2, 3)
    clock.now_ms += int((LAG_S + 1) * 1_000)  # otherwise 3 would count as about to join
    partition.become_leader(state(epoch=3, isr=(1, 2), version=8))
    assert list(partition.isr) == [1, 2]
    assert partition.partition_epoch == 8
    assert partition.high_watermark == end  # the fetch position of 2 is kept
    assert partition.leading_since_epoch == 3


# -- high watermark and acknowledgement --


def test_the_high_watermark_is_the_lowest_end_of_the_isr_and_never_goes_back(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state())
    append(partition, 5)
    assert not fetches(partition, 2, 5)
    assert partition.high_watermark == 0
    assert fetches(partition, 3, 5)
    assert partition.high_watermark == 5
    assert not fetches(partition, 3, 0)
    assert partition.high_watermark == 5


def test_what_was_sent_to_a_follower_counts_once_it_asks_for_what_comes_after_it(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2), replicas=(1, 2)))
    append(partition, 5)
    assert not fetches(partition, 2, 0)
    assert partition.read(fetch_of(0), 2, FetchIsolation.LOG_END, max_bytes=1_000, at_least_one=True).records
    assert partition.high_watermark == 0
    assert fetches(partition, 2, 5)
    assert partition.high_watermark == 5


def test_a_restart_begins_at_the_checkpointed_high_watermark_within_the_log(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state())
    append(partition, 5)
    for checkpointed, expected in ((3, 3), (9, 5), (-1, 0)):
        assert partition_over(partition.log, clock, checkpointed).high_watermark == expected


@pytest.mark.parametrize(
    ("replicas", "configured", "needed"),
    [((1,), None, 1), ((1, 2), None, 1), ((1, 2, 3), None, 2), ((1, 2, 3), 3, 3), ((1, 2, 3), 1, 1), ((1, 2), 3, 2)],
)
def test_min_insync_replicas_is_the_topics_own_or_follows_from_the_replicas(
    tmp_path: Path, replicas: tuple[int, ...], configured: int | None, needed: int
) -> None:
    partition, _ = open_partition(tmp_path, min_insync_replicas=configured)
    partition.become_leader(state(isr=replicas[:needed], replicas=replicas))
    append(partition, acks=-1)
    if needed > 1:
        partition.become_leader(state(epoch=1, isr=replicas[: needed - 1], replicas=replicas))
        end = partition.log.log_end_offset
        assert refusal(lambda: append(partition, acks=-1)) is ErrorCode.NOT_ENOUGH_REPLICAS
        assert partition.log.log_end_offset == end


def test_an_append_has_three_endings(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state())
    end = append(partition, acks=-1)
    assert partition.acknowledgement(end, 0) is None
    fetches(partition, 2, end)
    fetches(partition, 3, end)
    assert partition.acknowledgement(end, 0) is ErrorCode.NONE
    partition.become_leader(state(epoch=1, isr=(1,)))
    assert partition.acknowledgement(end, 0) is ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    partition.become_follower(state(leader=2, epoch=2))
    assert partition.acknowledgement(end, 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    partition.become_leader(state(epoch=3))  # leader again: the records of then may have been cut since
    assert partition.acknowledgement(end, 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER


# -- the ISR --


def test_until_the_outcome_is_known_the_high_watermark_waits_for_both_isrs(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state())
    end = append(partition)
    clock.now_ms += int((LAG_S + 1) * 1_000)
    fetches(partition, 2, end)
    isr = partition.isr_to_propose()
    assert isr == (1, 2)
    proposal = partition.propose_isr(isr)
    assert proposal == LeaderAndIsr(1, 0, (1, 2), 1, 0, to_commit=2)
    assert partition.isr_to_propose() is None  # one at a time
    assert not partition.advance_high_watermark()
    assert partition.isr_written(proposal, 1)
    assert (partition.isr, partition.partition_epoch, partition.high_watermark) == ((1, 2), 1, end)


def test_a_follower_that_is_gone_before_it_joined_is_not_waited_for(tmp_path: Path) -> None:
    alive: dict[int, int] = {2: 1, 3: 1}
    partition, _ = open_partition(tmp_path, alive=alive)
    partition.become_leader(state(isr=(1, 3)))
    fetches(partition, 2, 0)  # it has caught up, and is about to join
    end = append(partition)
    fetches(partition, 3, end)
    assert partition.high_watermark < end
    assert not partition.advance_high_watermark()
    del alive[2]
    assert partition.advance_high_watermark()
    assert partition.high_watermark == end
    del alive[3]
    end = append(partition)
    assert not partition.advance_high_watermark(), "what is in the ISR is waited for in any case"


def test_a_follower_that_fetches_until_its_broker_stops_is_not_waited_for(tmp_path: Path) -> None:
    alive: dict[int, int] = {2: 1, 3: 1}
    partition, _ = open_partition(tmp_path, alive=alive)
    partition.become_leader(state(isr=(1, 3)))
    del alive[2]
    partition.disregard_the_gone()
    fetches(partition, 2, 0)
    assert fetches(partition, 3, append(partition))


def test_a_follower_that_is_gone_before_its_isr_change_is_refused_is_not_waited_for(tmp_path: Path) -> None:
    alive: dict[int, int] = {2: 1, 3: 1}
    partition, _ = open_partition(tmp_path, alive=alive)
    partition.become_leader(state(isr=(1, 3)))
    fetches(partition, 2, 0)
    proposal = partition.propose_isr((1, 2, 3))
    end = append(partition)
    fetches(partition, 3, end)
    del alive[2]
    partition.disregard_the_gone()
    assert not partition.advance_high_watermark(), "the change may have been made"
    assert partition.isr_conflict(proposal, LeaderAndIsr(1, 0, (1, 3), 1, 2))
    assert partition.high_watermark == end


def test_a_joining_follower_counts_for_the_high_watermark_before_min_insync_replicas(
    tmp_path: Path,
) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1,)))
    fetches(partition, 2, 0)
    isr = partition.isr_to_propose()
    assert isr == (1, 2)
    proposal = partition.propose_isr(isr)
    append(partition)
    assert partition.high_watermark == 0
    assert refusal(lambda: append(partition, acks=-1)) is ErrorCode.NOT_ENOUGH_REPLICAS
    partition.isr_written(proposal, 1)
    append(partition, acks=-1)


def test_a_conflict_within_this_leadership_is_adopted(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2)))
    fetches(partition, 3, 0)
    proposal = partition.propose_isr((1, 2, 3))
    partition.isr_conflict(proposal, LeaderAndIsr(1, 0, (1,), 1, 5))
    assert (partition.isr, partition.proposed_isr, partition.partition_epoch) == ((1,), None, 5)


def test_a_conflict_with_another_leadership_leaves_both_isrs_counted(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2)))
    fetches(partition, 3, 0)
    proposal = partition.propose_isr((1, 2, 3))
    assert not partition.isr_conflict(proposal, LeaderAndIsr(2, 1, (2,), 1, 1))
    assert partition.maximal_isr == {1, 2, 3}
    assert partition.isr_to_propose() is None


def test_an_outcome_that_comes_after_the_controllers_word_is_ignored(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2)))
    fetches(partition, 3, 0)
    proposal = partition.propose_isr((1, 2, 3))
    partition.become_leader(state(epoch=1, isr=(1,)))
    assert not partition.is_pending(proposal)
    partition.isr_written(proposal, 1)
    partition.isr_conflict(proposal, msgspec.structs.replace(proposal, isr=(1, 3), partition_epoch=9))
    assert (partition.isr, partition.partition_epoch) == ((1,), 1)


def test_a_follower_joins_once_it_has_what_the_leader_had_when_its_epoch_began(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1,)))
    append(partition, 2)
    append(partition, 3)
    partition.become_follower(state(leader=2, epoch=1, isr=(1, 2)))
    partition.become_leader(state(epoch=2, isr=(1, 2)))
    fetches(partition, 3, 2)
    assert partition.isr_to_propose() is None
    fetches(partition, 3, 5)
    assert partition.isr_to_propose() == (1, 2, 3)


@pytest.mark.parametrize(("alive", "fetched_in", "joins"), [({3: 8}, 8, True), ({3: 9}, 8, False), ({}, 8, False)])
def test_a_follower_joins_only_in_the_broker_epoch_that_lives(
    tmp_path: Path, alive: dict[int, int], fetched_in: int, joins: bool
) -> None:
    partition, _ = open_partition(tmp_path, alive=alive)
    partition.become_leader(state(isr=(1, 2)))
    fetches(partition, 3, 0, fetched_in)
    assert partition.isr_to_propose() == ((1, 2, 3) if joins else None)


def test_the_last_member_never_leaves_the_isr(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state())
    append(partition)
    clock.now_ms += int((LAG_S + 1) * 1_000)
    assert partition.isr_to_propose() == (1,)


def test_a_replica_that_lags_does_not_join_even_where_the_high_watermark_stands_still(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state(isr=(1,)))  # too small to commit anything, so 0 is all there is to catch up with
    append(partition)
    fetches(partition, 2, 0)
    clock.now_ms += int((LAG_S + 1) * 1_000)
    assert partition.isr_to_propose() is None
    fetches(partition, 2, 1)
    assert partition.isr_to_propose() == (1, 2)


def test_a_broker_that_holds_no_replica_cannot_fetch_as_one(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state())
    assert refusal(lambda: partition.check_fetch(fetch_of(0), 9)) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# -- below min.insync.replicas, and which replicas are eligible then --


def test_nothing_is_committed_while_fewer_than_min_insync_replicas_are_in_sync(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state())
    end = append(partition, 3)
    fetches(partition, 2, end)
    fetches(partition, 3, end)
    partition.become_leader(state(epoch=1, isr=(1,), eligible={2: 1, 3: 1}))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    assert append(partition, acks=1) == end + 1
    assert not partition.advance_high_watermark()
    fetches(partition, 2, end + 1)
    assert partition.high_watermark == end
    proposal = partition.propose_isr((1, 2))
    assert not partition.advance_high_watermark()
    partition.isr_written(proposal, 2)
    assert partition.high_watermark == end + 1


@pytest.mark.parametrize(("replicas", "configured"), [((1, 2), None), ((1, 2, 3), 1), ((1,), 2)])
def test_where_one_in_sync_replica_is_enough_or_all_there_are_it_commits_alone(
    tmp_path: Path, replicas: tuple[int, ...], configured: int | None
) -> None:
    partition, clock = open_partition(tmp_path, min_insync_replicas=configured)
    partition.become_leader(state(isr=(1,), replicas=replicas))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    assert append(partition) == partition.high_watermark


def test_an_append_that_waits_when_too_few_are_left_in_sync_is_told_at_once(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state())
    end = append(partition, acks=-1)
    partition.become_leader(state(epoch=1, isr=(1,)))
    assert partition.high_watermark < end
    assert partition.acknowledgement(end, 0) is ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


def test_a_replica_that_leaves_a_too_small_isr_stays_eligible_with_its_recorded_epoch(
    tmp_path: Path,
) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state(isr_epochs=(11, 12, 13)))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    append(partition)
    fetches(partition, 3, 1, broker_epoch=1)
    one_left = partition.propose_isr((1, 3))
    assert (one_left.isr_epochs, one_left.eligible) == ((11, 13), ())
    partition.isr_written(one_left, 1)
    two_left = partition.propose_isr((1,))
    assert (two_left.isr_epochs, two_left.eligible, two_left.eligible_epochs) == ((11,), (3,), (13,))
    partition.isr_written(two_left, 2)
    assert (partition.eligible, partition.eligible_epochs) == ((3,), (13,))


def test_replicas_join_with_the_epoch_they_fetch_in_and_enough_of_them_end_all_eligibility(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path, alive={1: 21, 2: 22, 3: 23}, min_insync_replicas=3)
    partition.become_leader(state(isr=(1,), isr_epochs=(11,), eligible={2: 12, 3: 13}))
    fetches(partition, 2, 0, broker_epoch=22)
    isr = partition.isr_to_propose()
    assert isr == (1, 2)
    proposal = partition.propose_isr(isr)
    assert (proposal.isr_epochs, proposal.eligible, proposal.eligible_epochs) == ((11, 22), (3,), (13,))
    partition.isr_written(proposal, 1)
    fetches(partition, 3, 0, broker_epoch=23)
    proposal = partition.propose_isr((1, 2, 3))
    assert (proposal.isr_epochs, proposal.eligible, proposal.eligible_epochs) == ((11, 22, 23), (), ())


def test_what_others_could_not_have_is_not_committed_while_they_are_on_record(tmp_path: Path) -> None:
    """This happens while the controller's broker and this one have different settings."""
    partition, clock = open_partition(tmp_path, min_insync_replicas=1)
    partition.become_leader(state(isr=(1,), eligible={2: 12}))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    append(partition)
    assert partition.high_watermark == 0
    assert partition.isr_to_propose() == (1,)
    proposal = partition.propose_isr((1,))
    assert proposal.eligible == ()
    assert partition.isr_written(proposal, 1)
    assert partition.high_watermark == 1
    assert partition.isr_to_propose() is None


def set_min_insync_replicas(partition: Partition, least: int) -> None:
    partition.reconfigure(Settings(ME, LAG_S, None), least, None, None)


def test_with_fewer_replicas_required_no_commit_precedes_the_removal_of_eligible_ones(
    tmp_path: Path,
) -> None:
    partition, clock = open_partition(tmp_path, min_insync_replicas=3)
    partition.become_leader(state(isr=(1,), eligible={2: 12, 3: 13}))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    append(partition)
    set_min_insync_replicas(partition, 1)
    assert not partition.advance_high_watermark()
    assert partition.isr_to_propose() == (1,)
    proposal = partition.propose_isr((1,))
    assert proposal.eligible == ()
    set_min_insync_replicas(partition, 2)  # on its way to ZooKeeper, which carries it out despite the error
    assert not partition.isr_written(proposal, 1)
    assert (partition.high_watermark, partition.eligible) == (0, ())
    set_min_insync_replicas(partition, 1)
    assert partition.advance_high_watermark()


def test_with_more_replicas_required_nothing_more_is_committed_and_who_waits_is_told(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path, min_insync_replicas=1)
    partition.become_leader(state(isr=(1,)))
    clock.now_ms += int((LAG_S + 1) * 1_000)
    assert append(partition, acks=-1) == partition.high_watermark == 1
    set_min_insync_replicas(partition, 2)
    assert append(partition, acks=1) == 2
    assert partition.high_watermark == 1
    assert partition.acknowledgement(2, 0) is ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    assert refusal(lambda: append(partition, acks=-1)) is ErrorCode.NOT_ENOUGH_REPLICAS


def test_a_higher_number_goes_on_record_before_anything_is_committed_by_it_and_a_lower_one_too(tmp_path: Path) -> None:
    """A controller that shrinks the ISR reads the record; an earlier write of it may come late."""
    partition, _ = open_partition(tmp_path, min_insync_replicas=1)
    partition.become_leader(state(to_commit=1))
    assert partition.isr_to_propose() is None
    set_min_insync_replicas(partition, 2)
    end = append(partition, acks=-1)
    for follower in (2, 3):
        fetches(partition, follower, end)
    assert partition.high_watermark == 0
    isr = partition.isr_to_propose()
    assert isr == (1, 2, 3)
    assert partition.acknowledgement(end, 0) is None
    proposal = partition.propose_isr(isr)
    assert partition.isr_written(proposal, 1)
    assert (proposal.to_commit, partition.high_watermark) == (2, end)
    set_min_insync_replicas(partition, 1)
    lower = partition.propose_isr((1, 2, 3))
    set_min_insync_replicas(partition, 2)
    end = append(partition, acks=-1)
    for follower in (2, 3):
        fetches(partition, follower, end)
    assert partition.high_watermark < end, "the lower one is on its way"
    assert not partition.isr_written(lower, 2)
    assert partition.isr_to_propose() == (1, 2, 3)


def test_a_number_that_is_not_on_record_is_put_there_and_nothing_waits_for_that(tmp_path: Path) -> None:
    """Kafka's znodes have no such number: then a replica that leaves the ISR stays eligible."""
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(to_commit=0))
    end = append(partition)
    for follower in (2, 3):
        fetches(partition, follower, end)
    assert partition.high_watermark == end
    assert partition.isr_to_propose() == (1, 2, 3)
    assert partition.propose_isr((1, 2, 3)).to_commit == 2


def test_who_is_on_record_beside_a_large_isr_is_struck_off_once_all_of_that_have_fetched(tmp_path: Path) -> None:
    """The leader does not know whether the silent ones live; without the others it could then commit nothing."""
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2), eligible={3: 13}))
    end = append(partition)
    assert partition.isr_to_propose() is None
    fetches(partition, 3, 0)
    assert partition.isr_to_propose() is None
    fetches(partition, 2, end)
    assert partition.high_watermark == 0
    assert partition.isr_to_propose() == (1, 2)
    proposal = partition.propose_isr((1, 2))
    assert proposal.eligible == ()
    assert partition.isr_written(proposal, 1)


def test_a_conflict_brings_the_epochs_and_the_eligible_too(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2)))
    proposal = partition.propose_isr((1, 2, 3))
    partition.isr_conflict(proposal, LeaderAndIsr(1, 0, (1,), 1, 5, (7,), (2,), (8,)))
    assert (partition.isr_epochs, partition.eligible, partition.eligible_epochs) == ((7,), (2,), (8,))


# -- throttles --


def test_what_is_over_the_rate_is_kept_from_those_that_the_high_watermark_does_not_wait_for(tmp_path: Path) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2), replicas=(1, 2, 3)))
    append(partition, 4)
    partition.leader_quota = quota = Quota(100, clock)
    fetches(partition, 3, 0)
    fetches(partition, 2, 4)

    def gets(replica_id: int, offset: int = 0) -> bool:
        found = partition.read(
            fetch_of(offset), replica_id, FetchIsolation.of(replica_id, 0), max_bytes=1_000, at_least_one=True
        )
        assert found.error_code == ErrorCode.NONE
        return len(found.records) > 0

    assert [gets(replica_id) for replica_id in (2, 3, CONSUMER)] == [True, True, True]
    quota.record(200)
    assert [gets(replica_id) for replica_id in (2, 3, CONSUMER)] == [True, False, True]
    clock.now_ms += 1_000
    assert gets(3)
    quota.record(10_000)
    assert not gets(3)
    # It has every record: new ones are not committed before it has them.
    fetches(partition, 3, 4)
    append(partition, 1)
    assert gets(3, 4)


# -- where consumers begin --


def test_latest_is_not_available_until_the_high_watermark_has_reached_the_epochs_start(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1,)))
    append(partition, 4)
    partition = partition_over(partition.log, Clock(), high_watermark=1)
    partition.become_leader(state(epoch=1))

    def latest() -> object:
        return finish_at_once(offset_for(partition, LATEST_TIMESTAMP, -1, CONSUMER))

    assert refusal(latest) is ErrorCode.OFFSET_NOT_AVAILABLE
    assert finish_at_once(offset_for(partition, EARLIEST_TIMESTAMP, -1, CONSUMER)) == (-1, 0)
    assert finish_at_once(offset_for(partition, LATEST_TIMESTAMP, -1, 2)) == (-1, 4)
    # Between the high watermark and the log's end a consumer waits; this offset is not out of range.
    found = partition.read(fetch_of(4), CONSUMER, FetchIsolation.HIGH_WATERMARK, max_bytes=100, at_least_one=True)
    assert (found.error_code, len(found.records)) == (ErrorCode.NONE, 0)
    fetches(partition, 2, 4)
    fetches(partition, 3, 4)
    assert latest() == (-1, 4)


def test_offsets_for_times(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1,), replicas=(1, 2)))
    append(partition, 3)
    assert finish_at_once(offset_for(partition, NOW + 1, -1, CONSUMER)) == (NOW + 1, 1)
    assert finish_at_once(offset_for(partition, NOW + 99, -1, CONSUMER)) == (-1, -1)
    assert finish_at_once(offset_for(partition, MAX_TIMESTAMP, -1, CONSUMER)) == (NOW + 2, 2)
    assert finish_at_once(offset_for(partition, EARLIEST_LOCAL_TIMESTAMP, -1, CONSUMER)) == (-1, 0)
    assert finish_at_once(offset_for(partition, LATEST_TIERED_TIMESTAMP, -1, CONSUMER)) == (-1, -1)
    assert refusal(lambda: finish_at_once(offset_for(partition, -6, -1, CONSUMER))) is ErrorCode.UNSUPPORTED_VERSION
    assert refusal(lambda: finish_at_once(offset_for(partition, NOW, 5, CONSUMER))) is ErrorCode.UNKNOWN_LEADER_EPOCH


def test_an_answer_that_took_long_is_that_of_the_epoch_in_which_it_is_given(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2), replicas=(1, 2)))
    for _ in range(200):
        append(partition)
    fetches(partition, 2, 200)
    append(partition)
    assert partition.high_watermark == 200

    def begun() -> Steps[tuple[int, int]]:
        steps = offset_for(partition, MAX_TIMESTAMP, -1, CONSUMER)
        next(steps)
        return steps

    partition.log.move_log_start_offset(1)
    steps = begun()
    partition.become_follower(state(leader=2, epoch=1))
    assert refusal(lambda: finish_at_once(steps)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    partition.become_leader(state(epoch=2, isr=(1, 2), replicas=(1, 2)))
    fetches(partition, 2, 201)
    append(partition)
    steps = begun()
    partition.become_follower(state(leader=2, epoch=3))
    partition.become_leader(state(epoch=4, isr=(1, 2), replicas=(1, 2)))
    assert partition.high_watermark == 201
    assert refusal(lambda: finish_at_once(steps)) is ErrorCode.OFFSET_NOT_AVAILABLE


# -- divergence --


def test_a_leader_tells_where_the_followers_log_parts_from_its_own(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=0))
    append(partition, 5)
    partition.become_leader(state(epoch=3))
    append(partition, 5)
    diverging = [
        partition.check_fetch(fetch_of(offset, epoch=3, last_epoch=last), 2)
        for offset, last in ((5, 0), (7, 0), (7, 2), (10, 3), (12, 3), (0, -1))
    ]
    assert diverging == [
        None,
        EpochEndOffset(0, 5),
        EpochEndOffset(0, 5),
        None,
        EpochEndOffset(3, 10),
        None,
    ]


@pytest.mark.parametrize("offset", [3, 5, 12])
def test_a_follower_with_an_empty_log_of_unknown_history_begins_where_its_leader_does(
    tmp_path: Path, offset: int
) -> None:
    leader, _ = open_partition(tmp_path / "leader")
    leader.become_leader(state(epoch=0))
    append(leader, 2)
    leader.become_leader(state(epoch=3))
    append(leader, 3)
    leader.log.move_log_start_offset(2)
    answer = leader.admit(fetch_of(offset, epoch=3, last_epoch=-1), 2)
    assert answer is not None
    assert (answer.error_code, answer.log_start_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 2)
    assert answer.diverging_epoch == EpochEndOffset(0, 2)
    assert leader.admit(fetch_of(2, epoch=3, last_epoch=-1), 2) is None
    assert leader.admit(fetch_of(offset if offset < 5 else 5, epoch=3, last_epoch=-1), CONSUMER) is None


def test_an_empty_log_goes_on_only_with_the_history_that_it_was_emptied_in(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=5))
    copying.restart(partition, out_of_range(4, previous_epoch=4))
    partition.become_leader(state(epoch=6))
    assert partition.check_fetch(fetch_of(4, epoch=6, last_epoch=4), 2) is None
    assert partition.check_fetch(fetch_of(4, epoch=6, last_epoch=5), 2) == EpochEndOffset(4, 4)
    partition.become_follower(state(leader=2, epoch=7))
    assert copying.next_fetch(partition, 100).last_fetched_epoch == 6
    copying.apply_fetched(partition, answered(diverging=EpochEndOffset(4, 9)))  # 6 has written nothing
    assert copying.next_fetch(partition, 100).last_fetched_epoch == 4
    assert not copying.must_restart(partition, 0)
    copying.apply_fetched(partition, answered(diverging=EpochEndOffset(3, 2)))
    assert (copying.next_fetch(partition, 100).fetch_offset, copying.next_fetch(partition, 100).last_fetched_epoch) == (
        2,
        -1,
    )
    assert copying.must_restart(partition, 0)


@pytest.mark.parametrize("offset", [6, 1])
def test_a_leader_that_may_be_deposed_does_not_say_that_an_offset_is_beyond_its_end_or_deleted(
    tmp_path: Path, offset: int
) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=3))
    append(partition, 5)
    partition.log.move_log_start_offset(2)
    doubts = True
    partition._may_be_deposed = lambda told_in_broker_epoch: doubts
    asked = fetch_of(offset, epoch=3)
    assert refusal(lambda: partition.check_fetch(asked, CONSUMER)) is ErrorCode.OFFSET_NOT_AVAILABLE
    assert partition.check_fetch(fetch_of(5, epoch=3), CONSUMER) is None
    doubts = False
    assert refusal(lambda: partition.check_fetch(asked, CONSUMER)) is ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize("replica_id", [2, CONSUMER])
def test_a_leader_does_not_say_where_a_history_parts_that_is_younger_than_its_own(
    tmp_path: Path, replica_id: int
) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(epoch=3))
    append(partition, 5)
    code = refusal(lambda: partition.check_fetch(fetch_of(7, epoch=3, last_epoch=4), replica_id))
    assert code is ErrorCode.UNKNOWN_LEADER_EPOCH


def test_a_follower_copies_and_learns_the_high_watermark_up_to_its_own_end(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=1))
    assert copying.next_fetch(partition, 100) == fetch_of(0, epoch=1, max_bytes=100)
    assert copying.apply_fetched(partition, answered(stamped(batch(3), 0, 1), high_watermark=9)).appended
    assert (partition.log.log_end_offset, partition.high_watermark) == (3, 3)
    assert copying.next_fetch(partition, 100) == fetch_of(3, epoch=1, last_epoch=1, max_bytes=100)
    copying.apply_fetched(partition, answered(high_watermark=1))
    assert partition.high_watermark == 3


def test_a_follower_truncates_to_the_diverging_epoch(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=1))
    copying.apply_fetched(partition, answered(stamped(batch(3), 0, 0) + stamped(batch(2), 3, 1), high_watermark=5))
    partition.become_follower(state(leader=3, epoch=2))
    fetched = copying.apply_fetched(partition, answered(high_watermark=99, diverging=EpochEndOffset(0, 3)))
    assert (fetched.truncated_to, partition.log.log_end_offset, partition.high_watermark) == (3, 3, 3)
    assert partition.log.latest_epoch == 0


def test_a_follower_truncates_in_rounds_where_it_lacks_the_leaders_epoch(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=5))
    copying.apply_fetched(partition, answered(stamped(batch(4), 0, 1) + stamped(batch(4), 4, 5)))
    # The leader's log: epoch 1 up to 2, epoch 3 up to 7. It has no epoch 5.
    assert copying.apply_fetched(partition, answered(diverging=EpochEndOffset(3, 7))).truncated_to == 4
    assert copying.next_fetch(partition, 100).last_fetched_epoch == 1
    assert copying.apply_fetched(partition, answered(diverging=EpochEndOffset(1, 2))).truncated_to == 0


def test_the_high_watermark_is_never_past_the_end_of_a_truncated_log(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=1))
    copying.apply_fetched(partition, answered(stamped(batch(10), 0, 0), high_watermark=10))
    # In the middle of the batch: the whole batch goes.
    assert copying.apply_fetched(partition, answered(diverging=EpochEndOffset(0, 5))).truncated_to == 0
    assert (partition.log.log_end_offset, partition.high_watermark) == (0, 0)
    partition.become_leader(state(epoch=2))
    end = append(partition, acks=-1)
    assert partition.acknowledgement(end, 2) is None  # no follower has it


def test_a_follower_starts_afresh_where_the_leaders_log_begins_later(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=1))
    copying.apply_fetched(partition, answered(stamped(batch(3), 0, 1), high_watermark=3))
    copying.restart(partition, out_of_range(50))
    assert (partition.log.log_start_offset, partition.log.log_end_offset, partition.high_watermark) == (50, 50, 50)
    assert copying.next_fetch(partition, 100).last_fetched_epoch == -1
    copying.restart(partition, out_of_range(50, previous_epoch=1))
    assert copying.next_fetch(partition, 100).last_fetched_epoch == 1
    copying.restart(partition, out_of_range(0))
    assert copying.next_fetch(partition, 100).last_fetched_epoch == -1


def test_a_follower_that_starts_afresh_knows_who_wrote_what_it_does_not_get(tmp_path: Path) -> None:
    leader, (partition, _) = open_partition(tmp_path / "leader")[0], open_partition(tmp_path / "follower")[0:2]
    leader.become_leader(state(epoch=3))
    for sequence in range(3):
        leader.append(batch(2, producer_id=7, sequence=2 * sequence), required_acks=1, now_ms=NOW)
    leader.append(batch(2, producer_id=8), required_acks=1, now_ms=NOW)
    leader.log.move_log_start_offset(5)  # within a batch
    answer = leader.admit(fetch_of(0, epoch=3, last_epoch=-1), 2)
    assert answer is not None
    tell_producers(leader, answer)
    partition.become_follower(state(leader=2, epoch=3))
    copying.restart(partition, answer)
    assert [(i, [b.first_offset for b in p.batches]) for i, p in partition.log.producers()] == [(7, [0, 2])]
    asked = fetch_of(5, epoch=3, last_epoch=3)
    copying.apply_fetched(partition, leader.read(asked, 2, FetchIsolation.LOG_END, max_bytes=10_000, at_least_one=True))
    assert dict(partition.log.producers()).keys() == {7, 8}
    for (_, here), (_, there) in zip(partition.log.producers(), leader.log.producers(), strict=True):
        assert here.batches == there.batches


def test_a_follower_does_not_start_afresh_on_what_was_damaged_on_its_way(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_follower(state(leader=2, epoch=1))
    copying.apply_fetched(partition, answered(stamped(batch(3), 0, 1), high_watermark=3))
    damaged = out_of_range(50, producers=b"no snapshot")
    assert refusal(lambda: copying.restart(partition, damaged)) is ErrorCode.CORRUPT_MESSAGE
    assert partition.log.log_end_offset == 3


def test_a_partition_without_a_leader_follows_nobody(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state())
    partition.become_follower(state(leader=NO_LEADER, epoch=1))
    assert not partition.is_leader
    assert refusal(lambda: append(partition)) is ErrorCode.NOT_LEADER_OR_FOLLOWER


# -- deletions --


def leader_of_five(path: Path) -> Partition:
    """Return a leader whose records are all committed."""
    partition, _ = open_partition(path)
    partition.become_leader(state())
    append(partition, 5)
    fetches(partition, 2, 5)
    fetches(partition, 3, 5)
    return partition


def test_a_leader_deletes_up_to_its_high_watermark_and_never_back(tmp_path: Path) -> None:
    partition = leader_of_five(tmp_path)
    append(partition)
    assert partition.delete_records(3) == 3
    assert partition.delete_records(1) == 1
    assert partition.log.log_start_offset == 3
    for offset in (6, 7, -2):
        assert refusal(lambda offset=offset: partition.delete_records(offset)) is ErrorCode.OFFSET_OUT_OF_RANGE  # type: ignore[misc]
    assert partition.delete_records(-1) == 5
    assert partition.log.log_start_offset == 5


def test_a_new_leader_deletes_nothing_of_which_it_does_not_know_whether_it_is_committed(tmp_path: Path) -> None:
    log = leader_of_five(tmp_path).log
    partition = partition_over(log, Clock(), 2)
    partition.become_leader(state(epoch=1))
    for offset in (-1, 3, 5):
        assert refusal(lambda offset=offset: partition.delete_records(offset)) is ErrorCode.OFFSET_NOT_AVAILABLE  # type: ignore[misc]
    assert refusal(lambda: partition.delete_records(6)) is ErrorCode.OFFSET_OUT_OF_RANGE
    assert partition.delete_records(2) == 2


def test_only_a_leader_deletes_and_none_that_may_be_deposed_or_has_too_few_in_sync(tmp_path: Path) -> None:
    partition = leader_of_five(tmp_path)
    partition._may_be_deposed = lambda told_in_broker_epoch: True
    assert refusal(lambda: partition.delete_records(3)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    partition._may_be_deposed = lambda told_in_broker_epoch: False
    partition.become_leader(state(epoch=1, isr=(1,)))
    assert refusal(lambda: partition.delete_records(3)) is ErrorCode.NOT_ENOUGH_REPLICAS
    partition.become_follower(state(leader=2, epoch=2))
    assert refusal(lambda: partition.delete_records(3)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert partition.log.log_start_offset == 0


def test_an_isr_that_is_on_its_way_counts_for_the_low_watermark(tmp_path: Path) -> None:
    partition = leader_of_five(tmp_path)
    partition.become_leader(state(epoch=1, isr=(1, 2)))
    partition.delete_records(3)
    store_start(partition)
    fetches(partition, 2, 5, start=3)
    fetches(partition, 3, 5)
    assert partition.low_watermark == 3
    partition.propose_isr((1, 2, 3))
    assert partition.low_watermark == 0
    assert partition.deletion(3, partition.leading_since_epoch) is None
    fetches(partition, 3, 5, start=3)
    assert partition.deletion(3, partition.leading_since_epoch) is ErrorCode.NONE


def test_a_follower_tells_where_its_log_would_begin_after_a_crash(tmp_path: Path) -> None:
    leader, (partition, _) = leader_of_five(tmp_path / "leader"), open_partition(tmp_path / "follower")
    asked: list[TopicPartition] = []
    partition.store_start_soon = asked.append
    partition.become_follower(state(leader=2))
    for start in (0, 3):
        leader.delete_records(start)
        next_fetch = copying.next_fetch(partition, 1_000)
        copying.apply_fetched(
            partition, leader.read(next_fetch, 2, FetchIsolation.LOG_END, max_bytes=1_000, at_least_one=True)
        )
    assert partition.log.log_start_offset == 3
    assert copying.next_fetch(partition, 1_000).log_start_offset == 0
    assert asked == [partition.topic_partition]
    store_start(partition)
    assert copying.next_fetch(partition, 1_000).log_start_offset == 3
    copying.restart(partition, out_of_range(7))
    assert copying.next_fetch(partition, 1_000).log_start_offset == 7  # an empty log has no earlier file
    assert len(asked) == 1


def store_start(partition: Partition) -> None:
    checkpoint = partition.log._directory.log_start_offsets
    checkpoint.write(checkpoint.stage({partition.log.partition: partition.log.log_start_offset}))


# -- a reassignment --


def test_a_leader_takes_in_the_replicas_that_a_reassignment_adds_and_lets_them_join(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2), replicas=(1, 2)))
    end = append(partition)
    assert refusal(lambda: partition.check_fetch(fetch_of(0), 3)) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    told = state(epoch=1, isr=(1, 2), replicas=(3, 1, 2))
    told.adding_replicas, told.removing_replicas = [3], [2]
    partition.become_leader(told)
    assert (partition.min_insync_replicas, partition.replication_factor) == (1, 2), "not yet 2, as of three replicas"
    fetches(partition, 2, end)
    fetches(partition, 3, end)
    assert partition.isr_to_propose() == (3, 1, 2)


def test_a_leader_lets_no_replica_join_that_a_reassignment_has_removed(tmp_path: Path) -> None:
    partition, _ = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2, 3)))
    proposed = partition.propose_isr((1, 2))
    partition.become_leader(state(epoch=1, isr=(1, 3), replicas=(1, 3), to_commit=1))
    assert not partition.isr_written(proposed, 1), "it was meant for the epoch before"
    assert refusal(lambda: partition.check_fetch(fetch_of(0), 2)) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert partition.isr_to_propose() is None

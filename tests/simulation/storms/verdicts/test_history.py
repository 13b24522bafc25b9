"""The verdict finds each anomaly, and none in a correct history."""

from __future__ import annotations

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Acknowledged, History, Polled, Sent, check

DURABLE = TopicPartition("durable", 0)
FAST = TopicPartition("fast", 0)


def a_history(*sent: bytes, partition: TopicPartition = DURABLE) -> History:
    """Return a history of records that one producer sent, acknowledged and read back from offset 0 on."""
    history = History(durable_topics=frozenset({DURABLE.topic}))
    for offset, value in enumerate(sent):
        history.sent[value] = Sent("p", offset, partition)
        history.acknowledged[partition].append(Acknowledged(value, offset, 1.0))
    history.polled += [Polled("c", partition, offset, value, 2.0) for offset, value in enumerate(sent)]
    history.final[partition] = dict(enumerate(sent))
    return history


def kinds(history: History) -> set[str]:
    return {anomaly.kind for anomaly in check(history)}


def test_a_correct_history_has_no_anomaly() -> None:
    assert check(a_history(b"a", b"b", b"c")) == []


def test_a_record_that_failed_may_be_there_or_not() -> None:
    history = a_history(b"a", b"b")
    for number, value in enumerate([b"there", b"not there"], 2):
        history.sent[value] = Sent("p", number, DURABLE)
        history.failed += 1
    history.final[DURABLE][2] = b"there"
    assert check(history) == []


def test_an_acknowledged_record_that_is_not_there_is_lost() -> None:
    history = a_history(b"a", b"b")
    history.polled.clear()
    del history.final[DURABLE][1]
    assert kinds(history) == {"lost write"}


def test_a_record_that_was_read_and_is_not_there_is_lost_whatever_its_acks() -> None:
    history = a_history(b"a", b"b", partition=FAST)
    history.acknowledged.clear()
    del history.final[FAST][1]
    assert kinds(history) == {"lost write"}


def test_an_acknowledged_record_of_acks_1_may_be_lost_and_is_counted() -> None:
    history = a_history(b"a", b"b", partition=FAST)
    history.polled.clear()
    del history.final[FAST][1]
    assert check(history) == []
    assert history.lost_with_acks_1() == 1


def test_an_offset_with_two_values_is_inconsistent() -> None:
    history = a_history(b"a", b"b")
    history.final[DURABLE] = {0: b"b", 1: b"a"}
    assert "inconsistent offset" in kinds(history)


def test_a_value_at_two_offsets_is_a_duplicate() -> None:
    history = a_history(b"a", b"b")
    history.final[DURABLE][2] = b"a"
    assert "duplicate" in kinds(history)


def test_records_of_one_producer_in_another_order_are_reordered() -> None:
    history = a_history(b"a", b"b")
    history.sent |= {b"a": Sent("p", 1, DURABLE), b"b": Sent("p", 0, DURABLE)}
    assert kinds(history) == {"reordering"}


def test_a_value_that_was_not_sent_to_the_partition_is_a_phantom() -> None:
    history = a_history(b"a")
    history.final[DURABLE][1] = b"never sent"
    assert kinds(history) == {"phantom"}
    history = a_history(b"a")
    history.sent[b"a"] = Sent("p", 0, TopicPartition("durable", 1))
    assert kinds(history) == {"phantom"}


def test_a_consumer_that_skips_or_steps_back_is_seen_and_another_one_may_begin_anywhere() -> None:
    history = a_history(b"a", b"b", b"c", b"d")
    history.polled = [Polled("c", DURABLE, 0, b"a", 1.0), Polled("c", DURABLE, 2, b"c", 2.0)]
    assert kinds(history) == {"poll skip"}
    history.polled = [Polled("c", DURABLE, 2, b"c", 1.0), Polled("c", DURABLE, 0, b"a", 2.0)]
    assert kinds(history) == {"poll step back"}
    history.polled = [Polled("c#1", DURABLE, 2, b"c", 1.0), Polled("c#2", DURABLE, 0, b"a", 2.0)]
    assert check(history) == []


def test_a_consumer_that_was_told_of_a_truncation_is_an_anomaly() -> None:
    history = a_history(b"a")
    history.truncations.append("c: LogTruncated")
    assert kinds(history) == {"truncated under a consumer"}


def test_a_consumer_out_of_range_is_an_anomaly_only_beyond_the_final_end() -> None:
    history = a_history(b"a", b"b")
    history.out_of_range.append(("c: OFFSET_OUT_OF_RANGE", DURABLE, 2))
    assert check(history) == []
    history.out_of_range.append(("c: OFFSET_OUT_OF_RANGE", DURABLE, 3))
    assert kinds(history) == {"truncated under a consumer"}


# --- Records that are deleted --------------------------------------------------------------------------------------


def a_history_whose_first_two_records_were_deleted() -> History:
    history = a_history(b"a", b"b", b"c", b"d")
    history.begins[DURABLE] = 2
    for offset in (0, 1):
        del history.final[DURABLE][offset]
    return history


def test_deleted_records_are_not_lost_but_later_ones_are() -> None:
    history = a_history_whose_first_two_records_were_deleted()
    assert check(history) == []
    del history.final[DURABLE][2]
    assert kinds(history) == {"lost write"}


def test_a_consumer_may_skip_only_records_deleted_by_then() -> None:
    history = a_history_whose_first_two_records_were_deleted()
    first, last = Polled("c", DURABLE, 0, b"a", 1.0), Polled("c", DURABLE, 2, b"c", 2.0)
    history.polled = [first, last._replace(deleted=2)]
    assert check(history) == []
    history.polled = [first, last._replace(deleted=1)]
    assert kinds(history) == {"poll skip"}
    history.polled = [last, first._replace(deleted=2)]
    assert kinds(history) == {"poll step back"}


def test_a_record_read_before_its_deletion_must_not_return() -> None:
    history = a_history_whose_first_two_records_were_deleted()
    history.final[DURABLE][4] = b"b"
    assert kinds(history) == {"duplicate", "reordering"}


def test_deleted_records_are_no_hole_after_a_power_loss() -> None:
    history = a_history_whose_first_two_records_were_deleted()
    history.power_lost([DURABLE], 3.0)
    assert check(history) == []


# --- The power of several hosts at once ------------------------------------------------------------------------


def test_a_log_end_may_be_lost_with_the_power_of_all_its_holders_and_its_offsets_reused() -> None:
    history = a_history(b"a", b"b", b"c")
    history.power_lost([DURABLE], 3.0)
    history.sent[b"d"] = Sent("p", 3, DURABLE)
    history.acknowledged[DURABLE].append(Acknowledged(b"d", 1, 4.0))
    history.final[DURABLE] = {0: b"a", 1: b"d"}
    assert check(history) == []
    assert history.lost_with_power() == 2


def test_a_record_acknowledged_after_a_power_loss_is_not_lost_legally() -> None:
    history = a_history(b"a", b"b")
    history.power_lost([DURABLE], 0.5)
    history.polled.clear()
    del history.final[DURABLE][1]
    assert kinds(history) == {"lost write"}
    assert history.lost_with_power() == 0


def test_a_power_cut_excuses_no_other_partition() -> None:
    history = a_history(b"a", b"b")
    history.power_lost([TopicPartition("durable", 1)], 3.0)
    del history.final[DURABLE][1]
    assert kinds(history) == {"lost write"}


def test_a_power_loss_may_remove_the_end_of_a_log_but_not_the_middle() -> None:
    history = a_history(b"a", b"b", b"c")
    history.power_lost([DURABLE], 3.0)
    del history.final[DURABLE][1]
    assert kinds(history) == {"hole"}


def test_records_after_one_power_loss_may_survive_the_next() -> None:
    history = a_history(b"a", b"b")
    history.power_lost([DURABLE], 3.0)
    history.sent[b"c"] = Sent("p", 2, DURABLE)
    history.acknowledged[DURABLE].append(Acknowledged(b"c", 1, 4.0))
    history.power_lost([DURABLE], 5.0)
    history.final[DURABLE] = {0: b"a", 1: b"c"}
    assert check(history) == []


def test_the_next_power_loss_may_bring_back_records_whose_truncation_was_not_flushed() -> None:
    history = a_history(b"a", b"b", b"c")
    history.power_lost([DURABLE], 3.0)
    history.sent[b"d"] = Sent("p", 3, DURABLE)
    history.acknowledged[DURABLE].append(Acknowledged(b"d", 1, 4.0))
    history.power_lost([DURABLE], 5.0)
    assert check(history) == []


def test_an_offset_has_one_value_between_two_power_cuts() -> None:
    history = a_history(b"a", b"b")
    history.power_lost([DURABLE], 3.0)
    history.polled.append(Polled("another", DURABLE, 1, b"a", 2.5))
    assert "inconsistent offset" in kinds(history)

"""The verdict on re-created topics finds each anomaly, and none in a correct history."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import TopicIdPartition
from tests.simulation.storms.verdicts.incarnations import (
    Acknowledged,
    AdminCall,
    Incarnation,
    Lives,
    Polled,
    Sent,
    check,
    has_read_all,
)

TOPIC = "reborn"
PARTITION = TopicPartition(TOPIC, 0)
OLD, NEW = TopicIdPartition("old", PARTITION), TopicIdPartition("new", PARTITION)


def an_incarnation(topic_id: str, created_s: float, gone_s: float = inf, *, unclean: bool = False) -> Incarnation:
    return Incarnation(TOPIC, topic_id, {0: (0, 1, 2)}, 2, unclean, created_s, gone_s, gone_s)


def two_lives(old: Sequence[bytes] = (b"a", b"b"), new: Sequence[bytes] = (b"c", b"d")) -> Lives:
    """Return the history of a topic that existed from 0 to 10 s, and again from 11 s on. Each record was sent half a
    second after the creation, acknowledged half a second later, and read by one long-lived consumer."""
    lives = Lives()
    lives.incarnations[TOPIC] = [an_incarnation("old", 0, 10), an_incarnation("new", 11)]
    lives.calls = [
        AdminCall("create", TOPIC, 0, 0.1, True, 1),
        AdminCall("delete", TOPIC, 10, 10.1, True),
        AdminCall("create", TOPIC, 11, 11.1, True, 1),
    ]
    number = 0
    for identified, values, born_s in ((OLD, old, 0.0), (NEW, new, 11.0)):
        for offset, value in enumerate(values):
            lives.sent.setdefault(value, Sent("p", number, TOPIC, None, born_s + 0.5))
            lives.acknowledged.append(Acknowledged(value, PARTITION, offset, born_s + 1))
            lives.committed[identified][offset] = value
            lives.polled["c", PARTITION].append(Polled(offset, value, born_s + 2))
            number += 1
    lives.readers["c"] = [PARTITION]
    return lives


def kinds(lives: Lives) -> list[str]:
    return [anomaly.kind for anomaly in check(lives)]


def test_two_correct_incarnations_have_no_anomaly() -> None:
    assert check(two_lives()) == []


def test_a_record_of_the_old_topic_is_not_lost() -> None:
    lives = two_lives()
    lives.sent[b"x"] = Sent("p", 9, TOPIC, None, 9.5)
    lives.acknowledged.append(Acknowledged(b"x", PARTITION, 2, 10.5))
    assert check(lives) == []


def test_a_record_acknowledged_after_a_re_creation_may_be_in_the_topic_it_was_sent_to() -> None:
    lives = two_lives()
    lives.sent[b"x"] = Sent("p", 9, TOPIC, None, 10.5)
    lives.acknowledged.append(Acknowledged(b"x", PARTITION, 2, 11.5))
    assert check(lives) == []


def test_a_missing_record_that_was_sent_and_acknowledged_in_the_new_topic_is_lost() -> None:
    lives = two_lives()
    del lives.committed[NEW][1]
    lives.polled["c", PARTITION].pop()
    assert kinds(lives) == ["lost write"]


def test_a_loss_in_a_topic_with_unclean_elections_is_legal_and_counted() -> None:
    lives = two_lives()
    lives.incarnations[TOPIC][1] = an_incarnation("new", 11, unclean=True)
    del lives.committed[NEW][1]
    assert check(lives) == []
    assert lives.legal_losses() == 1


def test_a_topic_with_one_required_replica_may_lose_records_only_after_harm() -> None:
    lives = two_lives()
    weak = lives.incarnations[TOPIC][1]
    weak.min_insync_replicas = 1
    assert weak.is_weak
    del lives.committed[NEW][1]
    lives.polled["c", PARTITION].pop()
    assert kinds(lives) == ["lost write"]
    weak.was_harmed = True
    assert check(lives) == []


def test_an_acknowledged_offset_with_another_value_is_inconsistent_even_in_an_old_topic() -> None:
    lives = two_lives()
    lives.committed[OLD][1] = b"x"
    lives.sent[b"x"] = Sent("q", 0, TOPIC, None, 0.5)
    lives.polled["c", PARTITION][1] = Polled(1, b"x", 2)
    assert kinds(lives) == ["inconsistent offset"]


def test_a_record_in_both_topics_was_retried_and_a_record_twice_in_one_is_a_duplicate() -> None:
    assert check(two_lives(old=(b"a", b"b"), new=(b"b", b"c"))) == []
    assert kinds(two_lives(old=(b"a", b"b"), new=(b"c", b"d", b"c"))) == ["duplicate"]
    assert kinds(two_lives(old=(b"a", b"b", b"a"), new=(b"c",))) == ["duplicate"]


def test_records_of_a_producer_in_another_order_are_reordered_within_one_topic_only() -> None:
    lives = two_lives()
    lives.sent[b"c"] = Sent("p", 0, TOPIC, None, 11.5)
    assert check(lives) == []
    lives.sent[b"d"] = Sent("p", -1, TOPIC, None, 11.5)
    assert kinds(lives) == ["reordering"]


def test_a_record_that_was_sent_to_another_partition_is_a_phantom() -> None:
    lives = two_lives()
    lives.sent[b"c"] = Sent("p", 2, TOPIC, 1, 11.5)
    assert kinds(lives) == ["phantom"]


def test_a_consumer_that_skips_the_first_records_of_the_new_topic_is_seen() -> None:
    lives = two_lives()
    del lives.polled["c", PARTITION][2]
    assert kinds(lives) == ["poll skip"]


def test_a_consumer_may_miss_the_end_of_an_old_topic_and_a_whole_one() -> None:
    lives = two_lives()
    del lives.polled["c", PARTITION][1]
    assert check(lives) == []
    del lives.polled["c", PARTITION][0]
    assert check(lives) == []


def test_a_consumer_that_skips_within_a_topic_or_goes_back_is_seen() -> None:
    lives = two_lives(new=(b"c", b"d", b"e"))
    del lives.polled["c", PARTITION][3]
    assert kinds(lives) == ["poll skip"]
    lives = two_lives()
    lives.polled["c", PARTITION].append(Polled(0, b"c", 14))
    assert "poll step back" in kinds(lives)


def test_a_record_of_the_old_topic_after_one_of_the_new_is_seen() -> None:
    lives = two_lives()
    lives.polled["c", PARTITION].insert(3, Polled(1, b"b", 14))
    assert "a record of an older incarnation" in kinds(lives)


def test_records_prefetched_from_the_old_topic_may_be_returned_after_its_deletion() -> None:
    lives = two_lives()
    lives.polled["c", PARTITION][1] = Polled(1, b"b", 12)
    assert check(lives) == []


def test_a_consumer_that_has_not_read_the_last_topic_to_its_end_is_seen() -> None:
    lives = two_lives()
    lives.polled["c", PARTITION].pop()
    assert kinds(lives) == ["poll skip"]
    lives.polled.clear()
    assert kinds(lives) == ["poll skip"]
    lives.readers.clear()
    assert check(lives) == []


def test_a_consumer_that_read_the_last_record_only_in_the_old_topic_has_not_read_all() -> None:
    lives = two_lives(old=[b"a", b"b"], new=[b"b"])
    assert has_read_all(lives, "c", PARTITION)
    lives.polled["c", PARTITION].pop()
    assert not has_read_all(lives, "c", PARTITION)


def test_the_last_records_of_an_old_topic_may_be_unknown() -> None:
    lives = two_lives()
    del lives.committed[OLD][1]
    assert check(lives) == []


def test_a_record_sent_after_a_deletion_was_not_read_from_the_old_topic() -> None:
    lives = two_lives(old=(b"a",), new=(b"b", b"c"))
    del lives.polled["c", PARTITION][1]
    assert kinds(lives) == ["poll skip"]


def test_a_value_that_no_incarnation_can_have_is_seen() -> None:
    lives = two_lives()
    lives.polled["c", PARTITION].append(Polled(1, b"x", 14))
    assert "a record that no log holds" in kinds(lives)


def test_a_record_in_two_topics_at_one_offset_is_followed_both_ways() -> None:
    lives = two_lives(old=(b"a", b"b"), new=(b"a", b"c"))
    lives.polled["c", PARTITION] = [Polled(0, b"a", 12), Polled(1, b"c", 12)]
    assert check(lives) == []
    lives.polled["c", PARTITION] = [Polled(offset, value, 12) for offset, value in ((0, b"a"), (0, b"a"), (1, b"c"))]
    assert check(lives) == []


def test_an_acknowledged_creation_without_a_topic_is_seen() -> None:
    lives = two_lives()
    lives.calls.append(AdminCall("create", TOPIC, 10.2, 10.4, True, 1))
    assert kinds(lives) == ["a creation that did not happen"]
    lives.calls[-1] = AdminCall("create", TOPIC, 10.2, inf, False, 1)
    assert check(lives) == []


def test_an_acknowledged_deletion_without_an_effect_is_seen() -> None:
    lives = two_lives()
    lives.calls.append(AdminCall("delete", TOPIC, 12, 13, True))
    assert kinds(lives) == ["a deletion that did not happen"]


def test_a_creation_or_deletion_without_a_request_is_seen_and_a_late_one_may_happen_any_time() -> None:
    lives = two_lives()
    lives.calls[1:] = []
    assert kinds(lives) == ["deleted unasked", "created unasked"]
    lives.calls += [AdminCall("delete", TOPIC, 5, inf, False), AdminCall("create", TOPIC, 6, inf, False, 1)]
    assert check(lives) == []
    lives.calls[-1] = AdminCall("create", TOPIC, 6, inf, False, 7)
    assert kinds(lives) == ["created unasked"]

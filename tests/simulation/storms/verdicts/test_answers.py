"""The verdict on users' answers finds each anomaly, and none in a correct history."""

from __future__ import annotations

import pytest

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.answers import (
    ANY,
    DONE,
    EXISTS,
    IN_DOUBT,
    LABEL,
    UNKNOWN,
    Answers,
    OffsetTold,
    PositionTold,
    RangeRead,
    Refused,
    Stored,
    TopicOperation,
    TopicSeen,
    Written,
    check_topic,
    check_users,
    forget,
    label_of,
)
from tests.simulation.storms.verdicts.history import Acknowledged, History, Polled, Sent

P = TopicPartition("users", 0)
OTHER = TopicPartition("users", 1)
THERE, GOING, GONE = TopicSeen(True, False, 3), TopicSeen(True, True, 3), TopicSeen(False, False, 0)


def a_story(*labels: bytes) -> tuple[History, Answers]:
    """Return a history of records without keys that one producer sent second by second. They were acknowledged and read
    back from offset 0 on, and the timestamp of each is 1000 times its offset."""
    history, answers = History(frozenset({"users"})), Answers()
    history.final = {P: dict(enumerate(labels)), OTHER: {}}
    answers.stored = {P: {}, OTHER: {}}
    for offset, label in enumerate(labels):
        history.sent[label] = Sent("p", offset, TopicPartition("users", ANY))
        history.acknowledged[P].append(Acknowledged(label, offset, offset + 0.5))
        answers.written[label] = Written(None, label, (), 1_000 * offset, float(offset))
        answers.stored[P][offset] = Stored(None, label, (), 1_000 * offset)
    return history, answers


def kinds(story: tuple[History, Answers]) -> set[str]:
    return {anomaly.kind for anomaly in check_users(*story)}


def told(
    question: str, offset: int | None, *, at_s: float = 10.0, asked_ms: int = 0, healed: bool = False
) -> OffsetTold:
    timestamp_ms = -1 if offset is None or question != "time" else 1_000 * offset
    return OffsetTold("c", P, question, asked_ms, offset, timestamp_ms, at_s, healed)


def test_a_correct_story_has_no_anomaly() -> None:
    history, answers = a_story(b"a", b"b", b"c")
    history.starts["c", P] = 1
    history.polled.append(Polled("c", P, 1, b"b", 3.0))
    answers.ranges.append(RangeRead("s", P, 1, 3, {1: b"b", 2: b"c"}, None, 5.0))
    answers.offsets += [
        told("beginning", 0),
        told("end", 3),
        told("end", 2, at_s=1.7),
        told("end", 1),  # outdated, from a leader that was cut off
        told("time", 2, asked_ms=1_001),
        told("time", None, asked_ms=1_001),  # likewise
        told("time", None, asked_ms=2_001, healed=True),
    ]
    assert check_users(history, answers) == []


def test_a_label_is_the_value_or_for_a_tombstone_a_header_or_the_key() -> None:
    assert label_of(b"k", b"v", ()) == b"v"
    assert label_of(b"k", b"", ()) == b""
    assert label_of(b"k", None, ((LABEL, b"l"),)) == b"l"
    assert label_of(b"k", None, ()) == b"k"


def test_a_consumer_that_begins_at_another_offset_than_prescribed_is_seen() -> None:
    story = a_story(b"a", b"b", b"c")
    story[0].starts["c", P] = 2
    story[0].polled.append(Polled("c", P, 0, b"a", 3.0))
    assert kinds(story) == {"poll step back"}
    story[0].starts["c", P] = 0
    story[0].polled[:] = [Polled("c", P, 2, b"c", 3.0)]
    assert kinds(story) == {"poll skip"}


@pytest.mark.parametrize(
    "change", [{"key": b"k"}, {"value": b"a", "headers": (("h", None),)}, {"timestamp_ms": 7}], ids=str
)
def test_a_record_with_another_key_header_or_time_is_altered(change: dict[str, object]) -> None:
    story = a_story(b"a", b"b")
    story[1].stored[P][0] = story[1].stored[P][0]._replace(**change)  # type: ignore[arg-type]
    assert kinds(story) == {"altered record"}


def test_a_record_without_an_explicit_timestamp_may_have_any() -> None:
    story = a_story(b"a")
    story[1].written[b"a"] = story[1].written[b"a"]._replace(timestamp_ms=None)
    assert kinds(story) == set()


def test_a_record_in_two_partitions_is_a_duplicate() -> None:
    story = a_story(b"a", b"b")
    story[0].final[OTHER][0] = b"b"
    assert "duplicate" in kinds(story)


def test_a_record_in_a_partition_other_than_that_of_its_key_is_a_phantom() -> None:
    story = a_story(b"a", b"b")
    story[0].sent[b"b"] = Sent("p", 1, OTHER)
    assert kinds(story) == {"phantom"}


@pytest.mark.parametrize(
    "answer",
    [
        told("beginning", 1),
        told("end", 4),  # beyond the end
        told("end", 3, at_s=1.5),  # the third was sent later
        told("end", 2, healed=True),
        told("time", 2, asked_ms=900),  # the second is younger
        told("time", 1, asked_ms=1_001),  # it is older
        told("time", 1, asked_ms=900)._replace(timestamp_ms=999),
        told("time", None, asked_ms=900, healed=True),
    ],
)
def test_a_wrong_answer_about_offsets_is_seen(answer: OffsetTold) -> None:
    story = a_story(b"a", b"b", b"c")
    story[1].offsets.append(answer)
    assert kinds(story) == {"wrong answer"}


def test_a_position_other_than_the_next_offset_is_seen() -> None:
    story = a_story(b"a", b"b", b"c")
    story[1].positions.append(PositionTold("c", P, 2, 2, 5.0))
    assert kinds(story) == set()
    story[1].positions.append(PositionTold("c", P, 0, 2, 5.0))
    assert kinds(story) == {"wrong answer"}


def test_forgotten_partitions_are_not_judged() -> None:
    history, answers = a_story(b"a", b"b", b"c")
    del history.final[P][1]
    history.polled.append(Polled("c", P, 1, b"b", 3.0))
    answers.offsets.append(told("end", 4))
    answers.ranges.append(RangeRead("s", P, 0, 3, {}, None, 5.0))
    answers.refused.append(Refused("c", P, 2, "OFFSET_OUT_OF_RANGE", 5.0))
    answers.positions.append(PositionTold("c", P, 0, 2, 5.0))
    assert kinds((history, answers))
    forget(history, answers, {P})
    assert kinds((history, answers)) == set()


def test_a_complete_range_that_lacks_a_record_is_seen() -> None:
    story = a_story(b"a", b"b", b"c")
    story[1].ranges.append(RangeRead("s", P, 0, 3, {0: b"a", 1: b"b"}, None, 5.0))
    assert kinds(story) == {"incomplete range"}


def test_a_loss_that_spark_reports_is_legal_only_if_a_record_is_gone() -> None:
    history, answers = a_story(b"a", b"b", b"c")
    answers.ranges.append(RangeRead("s", P, 1, 3, {}, "gone", 5.0))
    assert kinds((history, answers)) == {"a loss that was none"}
    del history.final[P][2]
    assert kinds((history, answers)) == {"lost write"}


def test_a_consumer_out_of_range_within_the_log_is_seen() -> None:
    story = a_story(b"a", b"b")
    story[1].refused.append(Refused("c", P, 2, "OFFSET_OUT_OF_RANGE", 5.0))
    assert kinds(story) == {"out of range, and was not"}
    story[1].refused[:] = [Refused("c", P, 3, "OFFSET_OUT_OF_RANGE", 5.0)]
    assert kinds(story) == set()


# --- Topics ----------------------------------------------------------------------------------------------------


def creation(began_s: float, outcome: str, seen: TopicSeen, *, lasts_s: float = 1.0) -> TopicOperation:
    return TopicOperation("create", "a", 3, began_s, began_s + lasts_s, outcome, seen)


def deletion(began_s: float, outcome: str, seen: TopicSeen) -> TopicOperation:
    return TopicOperation("delete", "a", 0, began_s, began_s + 1, outcome, seen)


@pytest.mark.parametrize(
    ("operations", "at_end"),
    [
        ([creation(0, DONE, THERE)], THERE),
        ([creation(0, DONE, THERE), deletion(2, DONE, GOING)], GONE),
        ([creation(0, DONE, THERE), deletion(2, DONE, GOING), creation(4, EXISTS, GOING)], GONE),
        ([creation(0, DONE, THERE), deletion(2, DONE, GONE), creation(4, DONE, THERE)], THERE),
        ([creation(0, DONE, THERE), creation(0.5, EXISTS, THERE)], THERE),
        ([creation(0, DONE, THERE), creation(0.5, IN_DOUBT, THERE)], THERE),
        ([creation(0, IN_DOUBT, GONE), deletion(2, UNKNOWN, GONE)], THERE),  # it was carried out later
        ([creation(0, DONE, THERE), deletion(2, IN_DOUBT, THERE), creation(4, DONE, GONE)], GONE),
        ([creation(0, IN_DOUBT, GONE), creation(0.5, EXISTS, THERE)], THERE),
        ([deletion(0, UNKNOWN, GONE)], GONE),
    ],
)
def test_possible_answers_about_topics_are_no_anomaly(operations: list[TopicOperation], at_end: TopicSeen) -> None:
    assert check_topic("t", operations, at_end) == []


@pytest.mark.parametrize(
    ("kind", "operations", "at_end"),
    [
        ("an acknowledged create is not true", [creation(0, DONE, GONE)], THERE),
        (
            "an acknowledged create is not true",
            [creation(0, DONE, THERE), deletion(2, DONE, GOING), creation(4, DONE, GOING)],
            GONE,
        ),
        ("an acknowledged create is not true", [creation(0, DONE, TopicSeen(True, False, 1))], THERE),
        ("an acknowledged delete is not true", [creation(0, DONE, THERE), deletion(2, DONE, THERE)], GONE),
        ("a create found itself", [creation(0, EXISTS, THERE)], THERE),
        ("a delete did not find its topic", [creation(0, DONE, THERE), deletion(2, UNKNOWN, GONE)], GONE),
        ("two creates of one topic succeeded", [creation(0, DONE, THERE), creation(0.5, DONE, THERE)], THERE),
        ("neither of two creates succeeded", [creation(0, EXISTS, THERE), creation(0.5, EXISTS, THERE)], THERE),
        ("an acknowledged operation was undone", [creation(0, DONE, THERE)], GONE),
        ("an acknowledged operation was undone", [creation(0, DONE, THERE), deletion(2, DONE, GOING)], GOING),
    ],
)
def test_a_wrong_answer_about_a_topic_is_seen(kind: str, operations: list[TopicOperation], at_end: TopicSeen) -> None:
    assert kind in {anomaly.kind for anomaly in check_topic("t", operations, at_end)}

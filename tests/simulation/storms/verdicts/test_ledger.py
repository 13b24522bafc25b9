"""The verdict on a bookkeeper finds each kind of anomaly, and none in a correct history."""

from __future__ import annotations

import pytest

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.ledger import Ledger, Retention, check_ledger

P = TopicPartition("orders", 0)
Q = TopicPartition("orders", 1)
RETENTION = Retention(60.0, 10.0)


def ledger() -> Ledger:
    return Ledger("billing")


def done(ledger: Ledger, offset: int | None, at_s: float, *, client: str = "a") -> None:
    ledger.acknowledge(ledger.begin(client, {P: offset}, at_s), at_s + 1)


def in_doubt(ledger: Ledger, offset: int | None, at_s: float, *, client: str = "a") -> None:
    ledger.begin(client, {P: offset}, at_s)


def look(ledger: Ledger, offset: int | None, at_s: float, *, is_punctual: bool = False) -> None:
    ledger.look({P: offset}, at_s, at_s + 1, is_punctual=is_punctual)


def kinds(ledger: Ledger) -> list[str]:
    return [anomaly.kind for anomaly in check_ledger(ledger, RETENTION)]


def test_a_lookup_finds_the_last_offset_and_no_earlier_one() -> None:
    story = ledger()
    look(story, None, 0)
    done(story, 5, 2)
    look(story, 5, 4)
    done(story, 3, 6)
    look(story, 3, 8)
    done(story, None, 10)
    look(story, None, 12)
    assert kinds(story) == []


@pytest.mark.parametrize("found", [5, 9])
def test_an_overwritten_offset_and_one_that_was_never_set_are_accused(found: int) -> None:
    story = ledger()
    done(story, 5, 0)
    done(story, 6, 2)
    look(story, found, 4)
    assert kinds(story) == ["another offset is committed"]


def test_an_offset_that_returns_after_its_deletion_is_accused() -> None:
    story = ledger()
    done(story, 5, 0)
    done(story, None, 2)
    look(story, 5, 4)
    assert kinds(story) == ["another offset is committed"]


def test_an_offset_that_expires_early_is_accused() -> None:
    story = ledger()
    done(story, 5, 0)
    look(story, None, 50)
    assert kinds(story) == ["a committed offset is gone"]


def test_an_unused_offset_may_expire_and_stays_gone() -> None:
    story = ledger()
    done(story, 5, 0)
    look(story, None, 60)
    assert kinds(story) == []
    look(story, 5, 62)
    assert kinds(story) == ["another offset is committed"]


def test_an_offset_that_a_member_used_is_kept_for_longer() -> None:
    for signs, is_legal in (([30.0], False), ([30.0, 62.0], False), ([61.5], True)):
        story = ledger()
        done(story, 5, 0)
        story.used_s["orders"] = signs
        look(story, None, 70)
        assert kinds(story) == ([] if is_legal else ["a committed offset is gone"]), signs


def test_a_member_that_reads_another_topic_keeps_no_offset() -> None:
    story = ledger()
    done(story, 5, 0)
    story.used_s["invoices"] = [30.0]
    look(story, None, 70)
    assert kinds(story) == []


def test_a_call_in_doubt_may_take_effect_at_any_time_or_never() -> None:
    for found in ([5, 6], [5, 5], [6, 6]):
        story = ledger()
        done(story, 5, 0)
        in_doubt(story, 6, 2)
        for number, offset in enumerate(found):
            look(story, offset, 4 + number)
        assert kinds(story) == [], found


def test_a_call_in_doubt_is_over_after_a_later_acknowledgement_of_its_client() -> None:
    for client, is_over in (("a", True), ("b", False)):
        story = ledger()
        in_doubt(story, 6, 0)
        done(story, 7, 2, client=client)
        look(story, 6, 4)
        assert kinds(story) == (["another offset is committed"] if is_over else []), client


def test_a_deletion_in_doubt_may_have_been_carried_out() -> None:
    story = ledger()
    done(story, 5, 0)
    in_doubt(story, None, 2)
    look(story, None, 4)
    assert kinds(story) == []


def test_a_call_that_failed_for_some_partitions_is_certain_for_the_others() -> None:
    story = ledger()
    call = story.begin("a", {P: 5, Q: 6}, 0)
    story.acknowledge(call, 1, but_for={Q: "an error"})
    story.look({P: 5, Q: None}, 2, 3)
    assert kinds(story) == []
    story.look({P: None, Q: 6}, 4, 5)
    assert kinds(story) == ["a committed offset is gone"]


def test_an_offset_kept_for_too_long_is_accused_if_there_was_no_fault() -> None:
    for at_s, used_until_s, is_punctual, accused in (
        (75, 0, True, True),
        (75, 0, False, False),
        (70, 0, True, False),
        (75, 20, True, False),
    ):
        story = ledger()
        done(story, 5, 0)
        story.may_be_used_until_s = used_until_s
        look(story, 5, at_s, is_punctual=is_punctual)
        assert kinds(story) == (["an offset is kept for too long"] if accused else []), (at_s, used_until_s)

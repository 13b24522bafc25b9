from __future__ import annotations

from random import Random

import pytest

from minibroker.protocol import topic_ids
from minibroker.protocol.znodes import new_uuid


def test_an_id_is_22_characters_that_kafkas_tools_take_for_any_other() -> None:
    topic_id = topic_ids.make(2**31 - 1, 2**32 - 1, b"\xff" * 6)
    assert len(topic_id) == 22
    assert not topic_id.startswith("-")
    assert topic_ids.nonce(topic_id) == b"\xff" * 6


def test_the_later_topic_has_the_newer_id_whatever_the_nonces_are() -> None:
    ids = [
        topic_ids.make(epoch, number, nonce)
        for epoch, number, nonce in ((1, 1, b"zzzzzz"), (1, 2, b"aaaaaa"), (1, 300, b"~~~~~~"), (2, 1, b"000000"))
    ]
    for index, topic_id in enumerate(ids):
        for later in ids[index + 1 :]:
            assert topic_ids.is_older(topic_id, later)
            assert not topic_ids.is_older(later, topic_id)
        assert not topic_ids.is_older(topic_id, topic_id)


@pytest.mark.parametrize(
    "foreign", ["", "id-of-a", "not base64!", "é", topic_ids.NO_TOPIC, new_uuid(Random(1)), "bWIA"]
)
def test_an_id_that_was_not_made_here_has_no_age_and_no_nonce(foreign: str) -> None:
    own = topic_ids.make(1, 1, b"chance")
    assert topic_ids.age(foreign) is None
    assert topic_ids.nonce(foreign) is None
    assert not topic_ids.is_older(foreign, own)
    assert not topic_ids.is_older(own, foreign)


def test_a_nonce_of_another_length_is_a_bug() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        topic_ids.make(1, 1, b"short")

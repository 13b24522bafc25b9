"""The verdict on deletions accepts the legal ones and no other."""

from math import inf
from random import Random

import pytest

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.clients.shrinking import Batch, Rule, Shrinking, illegal, in_force
from tests.simulation.storms.verdicts.history import TopicIdPartition

NOW_MS = 10_000
BATCHES = [Batch(0, 10, 100, 1_000), Batch(10, 20, 100, 5_000), Batch(20, 30, 100, 2_000), Batch(30, 40, 100, 9_000)]


@pytest.mark.parametrize(
    ("start", "retention_ms", "retention_bytes", "is_legal"),
    [
        (0, None, None, True),
        (10, None, None, False),
        (20, None, 200, True),
        (20, None, 201, False),
        (30, 4_999, None, True),
        (30, 5_000, None, False),
        (30, 5_000, 200, True),
        (40, 0, None, True),
    ],
)
def test_a_log_start_may_move_past_records_that_are_too_old_or_exceed_the_size(
    start: int, retention_ms: int | None, retention_bytes: int | None, is_legal: bool
) -> None:
    assert (illegal(BATCHES, start, NOW_MS, retention_ms, retention_bytes) is None) == is_legal


def test_a_loss_of_all_power_voids_promised_deletions_since_their_offsets_may_be_reused() -> None:
    shrinking = Shrinking(None, Random(1))  # type: ignore[arg-type]  # the test needs no storm
    exposed, other = (TopicIdPartition("id", TopicPartition("durable-shrinking", number)) for number in range(2))
    promises = shrinking.promised
    promises.update({exposed: 416, other: 5})
    shrinking.forgive([exposed.topic_partition])
    assert promises == {other: 5}, "the judge of logs looks at the same promises"


def test_every_retention_in_force_since_the_leaders_lookup_counts() -> None:
    first, second, third = (Rule(since_s, None, None) for since_s in (-inf, 5.0, 9.0))
    rules = [first, second, third]
    assert in_force(rules, 3.0) == rules
    assert in_force(rules, 6.0) == [second, third]
    assert in_force(rules, 10.0) == [third]

"""How log lines name many partitions."""

from __future__ import annotations

import pytest

from minibroker.broker.metrics.log_lines import named
from minibroker.controller.decisions import events
from minibroker.protocol.model import TopicPartition

PARTITIONS = [TopicPartition("orders", number) for number in range(5)]


@pytest.mark.parametrize(
    ("limit", "said"), [(3, "orders-0, orders-1, orders-2 and 2 more"), (1, "orders-0 and 4 more")]
)
def test_so_many_partitions_are_named_and_the_others_counted(limit: int, said: str) -> None:
    assert named(PARTITIONS, limit) == said


def test_causes_are_sentences_with_a_verb() -> None:
    assert events.ClusterFormed(1).cause.startswith("brokers have come or a topic is gone, so ")
    assert events.PartitionReassignment(1).cause.startswith("/admin/reassign_partitions may ask for ")

"""The throttle of reassignments."""

from __future__ import annotations

import pytest

from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.cli import throttling
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

P, Q = TopicPartition("orders", 0), TopicPartition("orders", 1)


def test_a_throttle_names_all_present_replicas_as_leaders_and_the_added_ones_as_followers() -> None:
    changes = throttling.throttled({P: (1, 2), Q: (1, 2)}, {P: (3, 1), Q: (2, 1)}, {})
    assert changes == {
        ConfigResource.of_topic("orders"): [
            ConfigChange.append(throttling.LEADERS, "0:1,0:2"),
            ConfigChange.append(throttling.FOLLOWERS, "0:3"),
        ]
    }, "a partition whose replicas only change their order copies nothing"
    with pytest.raises(MinibrokerError, match=r"'orders' has leader.replication.throttled.replicas=\*.*configs alter"):
        throttling.throttled({P: (1,)}, {P: (2,)}, {"orders": {throttling.LEADERS: "*"}})


def test_the_end_removes_lists_of_replicas_and_keeps_a_throttle_of_all() -> None:
    settings = {
        "orders": {throttling.LEADERS: "0:1", throttling.FOLLOWERS: "0:3"},
        "own": {throttling.LEADERS: "*", throttling.FOLLOWERS: ""},
    }
    assert throttling.unthrottled(settings) == {
        ConfigResource.of_topic("orders"): [
            ConfigChange.delete(throttling.LEADERS),
            ConfigChange.delete(throttling.FOLLOWERS),
        ]
    }

"""WHO, the argument of commands: a broker id, `controller`, `leader:TOPIC-PARTITION`, `coordinator:GROUP`, `all` or
`zookeeper`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from minibroker.deploy.errors import hidden_from_pytest
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition, topic_name_problem

__tracebackhide__ = hidden_from_pytest

ZOOKEEPER: Final = "zookeeper"
Member = int | Literal["zookeeper"]
"""A process of the cluster: a broker's id, or the ZooKeeper that was started here."""


class BrokerId(NamedTuple):
    id: int


class Controller(NamedTuple):
    pass


class LeaderOf(NamedTuple):
    partition: TopicPartition


class CoordinatorOf(NamedTuple):
    group: str


class AllBrokers(NamedTuple):
    pass


class ZooKeeperServer(NamedTuple):
    pass


Elected = Controller | LeaderOf | CoordinatorOf
"""The members that elections choose: they change, and for a moment there may be none."""
Who = BrokerId | Elected | AllBrokers | ZooKeeperServer


class MalformedWho(MinibrokerError, ValueError):
    """The text names no member of a cluster; the message says what is expected."""


def name_of(member: Member) -> str:
    return "ZooKeeper" if isinstance(member, str) else f"broker {member}"


def parse_who(text: str) -> Who:
    """Raises MalformedWho."""
    if text == "controller":
        return Controller()
    if text == "all":
        return AllBrokers()
    if text == "zookeeper":
        return ZooKeeperServer()
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        return BrokerId(int(text))
    if text.startswith("leader:"):
        return LeaderOf(_partition(text))
    if text.startswith("coordinator:"):
        return CoordinatorOf(_group(text))
    raise MalformedWho(
        f"{text!r} names no process: give a broker id, controller, leader:TOPIC-PARTITION, coordinator:GROUP, all or "
        f"zookeeper"
    )


def _partition(text: str) -> TopicPartition:
    topic, dash, number = text.removeprefix("leader:").rpartition("-")
    if not (dash and number.isascii() and number.isdecimal() and len(number) <= 10) or topic_name_problem(topic):
        raise MalformedWho(
            f"{text!r} names no partition: leader:TOPIC-PARTITION is expected, for instance leader:orders-0"
        )
    return TopicPartition(topic, int(number))


def _group(text: str) -> str:
    group = text.removeprefix("coordinator:")
    if not group or group.encode(errors="ignore").decode() != group:  # names travel as UTF-8
        raise MalformedWho(f"{text!r} names no group: coordinator:GROUP is expected, for instance coordinator:billing")
    return group

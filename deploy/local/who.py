"""WHO, the argument of commands: a broker id, `controller`, `leader:TOPIC-PARTITION`, `follower:TOPIC-PARTITION`,
`coordinator:GROUP`, `transactions:ID`, `all` or `zookeeper`."""

from __future__ import annotations

from collections.abc import Iterable
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


class FollowerOf(NamedTuple):
    """The first in-sync replica, in the order of the assignment, that does not lead."""

    partition: TopicPartition


class CoordinatorOf(NamedTuple):
    group: str


class TransactionsOf(NamedTuple):
    """The coordinator of a transactional id."""

    transactional_id: str


class AllBrokers(NamedTuple):
    pass


class ZooKeeperServer(NamedTuple):
    pass


Coordinated = CoordinatorOf | TransactionsOf
"""A broker follows from the hash of such a name, also if no group or producer has the name."""
Elected = Controller | LeaderOf | FollowerOf | Coordinated
"""The members that elections choose, or do not choose: they change, and for a moment there may be none."""
Who = BrokerId | Elected | AllBrokers | ZooKeeperServer


class MalformedWho(MinibrokerError, ValueError):
    """The text names no member of a cluster; the message says what is expected."""


def name_of(member: Member) -> str:
    return "ZooKeeper" if isinstance(member, str) else f"broker {member}"


def acted(action: str, members: Iterable[Member]) -> str:
    """Return what a command has done, in words."""
    return f"{action}: {', '.join(map(name_of, members)) or 'nothing to do'}"


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
        return LeaderOf(_partition(text, "leader:"))
    if text.startswith("follower:"):
        return FollowerOf(_partition(text, "follower:"))
    if text.startswith("coordinator:"):
        return CoordinatorOf(_group(text))
    if text.startswith("transactions:"):
        return TransactionsOf(_transactional_id(text))
    raise MalformedWho(
        f"{text!r} names no process: give a broker id, controller, leader:TOPIC-PARTITION, follower:TOPIC-PARTITION, "
        f"coordinator:GROUP, transactions:ID, all or zookeeper"
    )


def _partition(text: str, role: str) -> TopicPartition:
    topic, dash, number = text.removeprefix(role).rpartition("-")
    whole = text.removeprefix(role)
    if topic_name_problem(whole) is None and not whole.endswith("-") and not number.isdecimal():
        raise MalformedWho(
            f"{text!r} lacks the number of a partition: {role}TOPIC-PARTITION is expected, here {text}-0 for partition "
            f"0 of {whole}"
        )
    if not (dash and number.isascii() and number.isdecimal() and len(number) <= 10) or topic_name_problem(topic):
        raise MalformedWho(
            f"{text!r} names no partition: {role}TOPIC-PARTITION is expected, for instance {role}orders-0"
        )
    return TopicPartition(topic, int(number))


def _group(text: str) -> str:
    group = text.removeprefix("coordinator:")
    if not _is_name(group):
        raise MalformedWho(f"{text!r} names no group: coordinator:GROUP is expected, for instance coordinator:billing")
    return group


def _transactional_id(text: str) -> str:
    transactional_id = text.removeprefix("transactions:")
    if not _is_name(transactional_id):
        raise MalformedWho(
            f"{text!r} names no transactional id: transactions:ID is expected, for instance transactions:shop-1"
        )
    return transactional_id


def _is_name(text: str) -> bool:
    """Whether the text can be a name, which travels as UTF-8."""
    return bool(text) and text.encode(errors="ignore").decode() == text

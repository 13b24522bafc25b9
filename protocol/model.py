"""The values that brokers, the controller and clients speak about. Frozen, comparable, printable."""

from typing import NamedTuple

import msgspec

NO_LEADER = -1
"""The leader of a partition that has none (Kafka's `LeaderAndIsr.NoLeader`)."""

NO_EPOCH = -1
"""An epoch that is not known, or not checked (Kafka's `UNDEFINED_EPOCH`)."""

NO_CONTROLLER = -1

INITIAL_CONTROLLER_EPOCH = 0
"""`/controller_epoch` is created with this value; the first controller elected has epoch 1."""

INITIAL_LEADER_EPOCH = 0

DEFAULT_LISTENER = "PLAINTEXT"
CONTROL_LISTENER = "CONTROLLER"
"""The listener of its own that carries control traffic (KIP-291)."""

LEGAL_TOPIC_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MAX_TOPIC_NAME_LENGTH = 249


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Endpoint(NamedTuple):
    listener: str
    host: str
    port: int


class Broker(msgspec.Struct, frozen=True):
    """A registered broker. `epoch` is the czxid of its znode (KIP-380): it changes with every registration."""

    id: int
    epoch: int
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None

    def endpoint(self, listener: str) -> Endpoint | None:
        """The endpoint of that listener, or None where the broker has no such listener."""
        return next((e for e in self.endpoints if e.listener == listener), None)


class LeaderAndIsr(msgspec.Struct, frozen=True):
    """The state of a partition as its znode holds it, with the version of the znode.

    `partition_epoch` is the znode's data version; a write is conditional on it. `controller_epoch` is the
    epoch of the controller that wrote it last. `isr` is in the order of the assignment.
    """

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    controller_epoch: int
    partition_epoch: int


def topic_name_problem(name: str) -> str | None:
    """Why `name` is no legal topic name, as a sentence with the rule; None where it is legal.

    Kafka's rule (`Topic.validate`): 1 to 249 of `[a-zA-Z0-9._-]`, and neither `.` nor `..`. Names become
    directories, so this is also what keeps a path from leaving the log directory.
    """
    if not name:
        return "the topic name is empty: give 1 to 249 characters out of a-z A-Z 0-9 . _ -"
    if name in (".", ".."):
        return f"{name!r} cannot be a topic name, since it would name a directory: choose another"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"the topic name is {len(name)} characters long: the limit is {MAX_TOPIC_NAME_LENGTH}"
    illegal = sorted(set(name) - LEGAL_TOPIC_CHARACTERS)
    if illegal:
        shown = " ".join(repr(c) for c in illegal[:5])
        return f"topic name {name[:80]!r} holds {shown}: only a-z A-Z 0-9 . _ - are legal"
    return None

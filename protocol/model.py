"""The values that brokers, the controller and clients exchange. Frozen, comparable, printable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

NO_LEADER = -1
"""The leader of a partition that has none (Kafka's `LeaderAndIsr.NoLeader`)."""

NO_EPOCH = -1
"""An epoch that is unknown or not checked (Kafka's `UNDEFINED_EPOCH`)."""

NO_CONTROLLER = -1

INITIAL_CONTROLLER_EPOCH = 0
"""`/controller_epoch` is created with this value; the first controller elected has epoch 1."""

INITIAL_LEADER_EPOCH = 0

PLAINTEXT = "PLAINTEXT"
SSL = "SSL"
SASL_PLAINTEXT = "SASL_PLAINTEXT"
SASL_SSL = "SASL_SSL"
SECURITY_PROTOCOLS = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)
DEFAULT_LISTENER = "PLAINTEXT"
CONTROL_LISTENER = "CONTROLLER"
"""The separate listener for control traffic (KIP-291)."""

LEGAL_TOPIC_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MAX_TOPIC_NAME_LENGTH = 249


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        if len(self.topic) > MAX_TOPIC_NAME_LENGTH:  # not a legal name; a small request may name many of its partitions
            return f"{self.topic[:80]}...-{self.partition}"
        return f"{self.topic}-{self.partition}"


class Endpoint(NamedTuple):
    listener: str
    host: str
    port: int
    security_protocol: str = PLAINTEXT


class RegisteredBroker(msgspec.Struct, frozen=True):
    """A registered broker. `epoch` is the czxid of its znode (KIP-380): it changes with every registration.

    `trusted_since`: records written since that broker epoch are still on the broker's disk (or in its host's memory);
    earlier ones may be lost. 0, as for Kafka's brokers: nothing was ever lost.
    `synced_since`: the same for flushed records, which count for replicas with durability=synced.
    """

    id: int
    epoch: int
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None
    trusted_since: int = 0
    synced_since: int = 0

    def endpoint(self, listener: str) -> Endpoint | None:
        """Return the endpoint of that listener, or None if the broker has no such listener."""
        return next((e for e in self.endpoints if e.listener == listener), None)

    @property
    def control_endpoint(self) -> Endpoint | None:
        """The endpoint for control requests, or None if the broker has none."""
        return self.endpoint(CONTROL_LISTENER) or self.endpoint(DEFAULT_LISTENER)

    @property
    def data_endpoint(self) -> Endpoint | None:
        """The endpoint from which followers fetch, or None if the broker has none. A broker registers it first."""
        return next((e for e in self.endpoints if e.listener != CONTROL_LISTENER), None)


class ZooKeeperContact(NamedTuple):
    """What a broker knows of its session with ZooKeeper."""

    away_s: float | None
    """Seconds since ZooKeeper was last heard of, or the connection was lost. None: there is one."""
    session_timeout_ms: int
    losses: int = 0
    """How many times the connection was lost, or ZooKeeper did not answer a ping in time, since the broker started."""
    recent_losses: int = 0
    """Those of the last minute."""


class Member(NamedTuple):
    """A replica that had all acknowledged records, and the broker epoch in which it was known to have them.

    NO_EPOCH: the epoch is unknown, since Kafka's state znodes have none. Such a member is trusted, as in Kafka.
    """

    broker_id: int
    epoch: int


class LeaderAndIsr(msgspec.Struct, frozen=True):
    """The state of a partition as its znode holds it, with the version of the znode.

    `partition_epoch` is the znode's data version; a write is conditional on it. `controller_epoch` is the
    epoch of the controller that wrote it last. `isr` is in the order of the assignment.

    `eligible` are replicas outside the ISR that nevertheless have all acknowledged records (KIP-966's eligible leader
    replicas). The epochs are in the order of their replicas; empty if none is known.

    `to_commit` is the leader's min.insync.replicas. The leader commits by a higher number only after recording it here,
    so the controller knows the promise when it shrinks the ISR (`eligible_after`). 0: unknown, as in Kafka's znodes.
    """

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    controller_epoch: int
    partition_epoch: int
    isr_epochs: tuple[int, ...] = ()
    eligible: tuple[int, ...] = ()
    eligible_epochs: tuple[int, ...] = ()
    to_commit: int = 0

    @property
    def in_sync_members(self) -> tuple[Member, ...]:
        return members(self.isr, self.isr_epochs)

    @property
    def eligible_members(self) -> tuple[Member, ...]:
        return members(self.eligible, self.eligible_epochs)


def members(broker_ids: Sequence[int], epochs: Sequence[int]) -> tuple[Member, ...]:
    """Return the replicas with their epochs, or with NO_EPOCH if there is not one epoch for each."""
    if not broker_ids:
        return ()
    known = epochs if len(epochs) == len(broker_ids) else [NO_EPOCH] * len(broker_ids)
    return tuple(map(Member, broker_ids, known))


def split(group: Iterable[Member]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids and epochs of the members: the reverse of `members`."""
    group = tuple(group)
    if not group:
        return (), ()
    epochs = tuple(member.epoch for member in group)
    return tuple(member.broker_id for member in group), epochs if set(epochs) != {NO_EPOCH} else ()


def leader_and_isr(
    leader: int,
    leader_epoch: int,
    isr: Iterable[Member],
    eligible: Iterable[Member],
    controller_epoch: int,
    partition_epoch: int,
    to_commit: int,
) -> LeaderAndIsr:
    isr_ids, isr_epochs = split(isr)
    eligible_ids, eligible_epochs = split(eligible)
    return LeaderAndIsr(
        leader,
        leader_epoch,
        isr_ids,
        controller_epoch,
        partition_epoch,
        isr_epochs,
        eligible_ids,
        eligible_epochs,
        to_commit,
    )


class ReplicaAssignment(NamedTuple):
    """The brokers that hold replicas of a partition, and those that a reassignment adds or removes (KIP-455).

    `replicas` are all of them, those of the target first, in its order. A replica that is both `adding` and `removing`
    was added by a reassignment that was cancelled or replaced. It belongs neither to the origin nor to the target, but
    may have records that no other replica has, so it is removed together with the others and not before.
    """

    replicas: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas after the reassignment."""
        return tuple(b for b in self.replicas if b not in self.removing)

    @property
    def origin(self) -> tuple[int, ...]:
        """The replicas before the reassignment. Their order is not kept, as in Kafka."""
        return tuple(b for b in self.replicas if b not in self.adding)

    @property
    def is_being_reassigned(self) -> bool:
        return bool(self.adding or self.removing)

    @property
    def is_cancelled(self) -> bool:
        """Whether the partition returns to its former replicas."""
        return self.is_being_reassigned and set(self.origin) == set(self.target)

    @property
    def replication_factor(self) -> int:
        """The replication factor for min.insync.replicas: that of the origin until the reassignment is over.

        A reassignment to more replicas must not raise the requirement when it begins. One to fewer replicas may still
        be cancelled, so records are acknowledged by the rule of the origin until its end."""
        return len(self.origin) or len(self.replicas)

    def reassigned_to(self, target: Iterable[int]) -> ReplicaAssignment:
        """Return the assignment with `target` as its new target and the same origin."""
        target = tuple(target)
        replicas = (*target, *(b for b in self.replicas if b not in target))
        origin = self.origin
        return ReplicaAssignment(
            replicas,
            tuple(b for b in replicas if b not in origin),
            tuple(b for b in replicas if b not in target),
        )


# --- min.insync.replicas -------------------------------------------------------------------------------------


def min_insync_replicas(configured: int | None, replication_factor: int) -> int:
    """Return the number of in-sync replicas that acks=all and every advance of the high watermark require (KIP-966).

    `configured` is the topic's setting or the broker's; None: 2 for three or more replicas, otherwise 1. The result
    never exceeds the replication factor (Kafka's `Partition.effectiveMinIsr`)."""
    return min(configured or (2 if replication_factor >= 3 else 1), replication_factor)


def eligible_after(
    eligible: Iterable[Member], leaving: Iterable[Member], isr: Iterable[int], to_commit: int
) -> tuple[Member, ...]:
    """Return the replicas that are eligible beside `isr`, the new ISR, once `leaving` have left it (KIP-966).

    With fewer than `to_commit` in sync, nothing is committed. So a replica that was in the ISR when it became too small
    still has all committed records, and so has a replica that was already eligible. As soon as enough are in sync, they
    commit records that other replicas may lack, so no other replica is eligible. With `to_commit` 0, the number that is
    enough is unknown, and all stay eligible.
    """
    isr = tuple(isr)
    if 0 < to_commit <= len(isr):
        return ()
    return tuple({m.broker_id: m for m in (*eligible, *leaving) if m.broker_id not in isr}.values())


class ElectionType(IntEnum):
    """The kind of election that an administrator requests (Kafka's ElectionType, KIP-460)."""

    PREFERRED = 0
    """Elect the first replica of the assignment if it is in sync."""
    UNCLEAN = 1
    """Elect any live replica if none is left that has all committed records."""


WITHOUT_EFFECT = "Without effect"
"""The documentation of a setting begins with this if brokers accept and show it, for tools, but ignore it."""
NOT_KNOWN_TO_BROKERS = (
    f"{WITHOUT_EFFECT}: a broker has no setting of this name. Its value may be a secret, and is not shown."
)
DURABILITY = "durability"
"""The topic setting that says whether acks=all waits for the memory of every in-sync replica (REPLICATED, as in Kafka)
or for their disks (SYNCED)."""
REPLICATED: Final = "replicated"
SYNCED: Final = "synced"


class ResourceType(IntEnum):
    """A kind of resource with settings (Kafka's ConfigResource.Type)."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8


class ConfigSource(IntEnum):
    """The source of a setting's value (KIP-226, KIP-412). Of the first five, the lower number wins."""

    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6


class ConfigType(IntEnum):
    UNKNOWN = 0
    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class AlterOperation(IntEnum):
    """A change to a setting (KIP-339). The last two are for lists."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})
"""The brokers' own topics (Kafka's `Topic.isInternal`). Only brokers create, delete and write to them; clients may
read them."""
CLEANUP_POLICY = "cleanup.policy"
INTERNAL_CLEANUP_POLICY = "compact"
"""The cleanup policy of internal topics. Settings cannot change it: the topics hold the only copy of their data."""


def internal_partition(key: str, count: int) -> int:
    """Return the partition, of `count` in an internal topic, for a group or transactional id: by Java's
    `String.hashCode` (over UTF-16 units) as in Kafka."""
    value = 0
    data = key.encode("utf-16-be")
    for position in range(0, len(data), 2):
        value = (31 * value + (data[position] << 8 | data[position + 1])) & 0xFFFFFFFF
    if value >= 1 << 31:
        value = (1 << 32) - value  # the absolute value of Java's negative number
    return 0 if value == 1 << 31 else value % count


def topic_name_problem(name: str) -> str | None:
    """Return why `name` is not a legal topic name, with the rule, or None if it is legal.

    Kafka's rule (`Topic.validate`): 1 to 249 of `[a-zA-Z0-9._-]`, and neither `.` nor `..`. Names become
    directories, so the rule also keeps paths within the log directory.
    """
    if not name:
        return "the topic name is empty: give 1 to 249 of the characters a-z A-Z 0-9 . _ -"
    if name in (".", ".."):
        return f"{name!r} cannot be a topic name, since it would name a directory: choose another"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"the topic name is {len(name)} characters long: the limit is {MAX_TOPIC_NAME_LENGTH}"
    if not LEGAL_TOPIC_CHARACTERS.issuperset(name):
        illegal = sorted(set(name) - LEGAL_TOPIC_CHARACTERS)
        shown = " ".join(repr(c) for c in illegal[:5])
        return f"topic name {name[:80]!r} contains {shown}: only a-z A-Z 0-9 . _ - are legal"
    return None


def is_encrypted(security_protocol: str) -> bool:
    return security_protocol in (SSL, SASL_SSL)


def uses_sasl(security_protocol: str) -> bool:
    return security_protocol in (SASL_PLAINTEXT, SASL_SSL)


def without_sasl(security_protocol: str) -> str:
    return SSL if is_encrypted(security_protocol) else PLAINTEXT

"""Users, their credentials and their rights in a storm, and the verdict on who was served.

In some storms all clients authenticate themselves, by SCRAM or PLAIN, for sessions that end after some seconds, and
each may do only what it needs. Administrators, and the clients that read everything at the end, are super users. Faults
take rights and credentials away for a while (`faults.faults_of_security`).

A change comes into force at a broker when the broker hears of it. A broker that is paused, starts, or has no good
connection to ZooKeeper hears nothing; its time begins after that. HEARS_WITHIN_S later:

- no request is allowed that needs a right which its user has lost,
- no record that was sent after that is acknowledged, or refused and in the log nevertheless,
- no user without a valid credential is served, once its last session is over as well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import scramp.core

from minibroker.broker.handlers.authorization import Authorizer
from minibroker.broker.network.request_channel import Request
from minibroker.broker.security.access import Inquiry
from minibroker.broker.security.sasl import BEFORE_AUTHENTICATION
from minibroker.broker.security.scram_credentials import as_text
from minibroker.client.admin import Admin
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.security import Credentials
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.kafka_clients import Links
from minibroker.deploy.simulator.ownership import current_owner
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import acl_znodes, znodes
from minibroker.protocol.acls import (
    WILDCARD,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    ResourcePattern,
    word_of,
)
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.sasl.mechanisms import PLAIN, SCRAM_SHA_256
from minibroker.protocol.sasl.scram import LEAST_ITERATIONS, ScramMechanism, credential_of, salted_password
from minibroker.protocol.world import Create, Delete, Operation, SessionState, SetData, World
from tests.simulation.mutants.planting import Patches
from tests.simulation.storms.verdicts.history import Anomaly, History

if TYPE_CHECKING:
    from tests.simulation.storms.ground import Ground

HEARS_WITHIN_S = 5.0
TWIN = "-twin"
"""The end of the name of a second instance, which is the same user."""
_PROBABILITY = 0.4
_ADMINISTRATOR = "admin"
_PLAIN_USERS = ["plain-0", "plain-1", "plain-2"]
_PLAIN_PROBABILITY = 0.3
_SALT = b"sixteen bytes..."
_RETRY_S = 0.3


class Right(NamedTuple):
    kind: AclResourceType
    name: str
    operation: AclOperation


def may_read(*topics: str) -> list[Right]:
    return [Right(AclResourceType.TOPIC, topic, AclOperation.READ) for topic in topics]


def may_write(*topics: str) -> list[Right]:
    return [Right(AclResourceType.TOPIC, topic, AclOperation.WRITE) for topic in topics]


def may_join(group: str) -> list[Right]:
    return [Right(AclResourceType.GROUP, group, AclOperation.READ)]


def may_use(transactional_id: str) -> list[Right]:
    return [Right(AclResourceType.TRANSACTIONAL_ID, transactional_id, AclOperation.WRITE)]


class Holding(NamedTuple):
    """A user, and a resource on which it has rights."""

    user: str
    pattern: ResourcePattern

    def __str__(self) -> str:
        return f"{self.user} on {self.pattern}"


@dataclass
class Denied:
    """A record that was sent and refused while all brokers knew that its user may not write."""

    partition: TopicPartition
    value: bytes
    until_s: float = math.inf
    """When the right was given back. A request that was late on its way may be carried out after that."""


@dataclass
class _Loss:
    """The rights of a holding are gone."""

    at_s: float
    heard_s: float = math.inf
    """When all brokers knew."""
    denied: list[Denied] = field(default_factory=list)


class Security:
    """The users of a storm. Without security, all methods do nothing."""

    def __init__(self, storm: Ground) -> None:
        dice = Random(f"{storm.report.seed} access")
        self.is_on = dice.random() < _PROBABILITY
        self.session_s = dice.choice([2.0, 5.0, 15.0])
        """Seconds after which a client must authenticate itself again."""
        self._storm = storm
        self._dice = dice
        self._users: dict[str, str] = {}
        """The user of each client that is not an administrator, by host."""
        self._passwords: dict[str, str] = {}
        """The passwords that clients of SCRAM have."""
        self._invalid_s: dict[str, float] = {}
        """Since when a user's credential is not the one that its clients have."""
        self._rights: dict[Holding, set[AclOperation]] = {}
        self._taken: set[Holding] = set()
        """Holdings whose rights a fault has taken."""
        self._acls: dict[ResourcePattern, frozenset[AccessControlEntry]] = {}
        """What ZooKeeper has."""
        self._losses: dict[Holding, _Loss] = {}
        self._deaf_s: dict[str, float] = {}
        """When each broker, by host, was last seen in a state in which it hears of no changes."""
        self._denied: list[Denied] = []
        self._news = asyncio.Event()

    @property
    def settings(self) -> dict[str, str]:
        """The settings of brokers."""
        if not self.is_on:
            return {}
        users = " ".join(f'user_{user}="of {user}"' for user in (_ADMINISTRATOR, *_PLAIN_USERS))
        return {
            "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": f"{PLAIN},{SCRAM_SHA_256}",
            "plain.sasl.jaas.config": f"PlainLoginModule required {users} ;",
            "connections.max.reauth.ms": str(int(self.session_s * 1_000)),
            "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
            "super.users": f"User:{_ADMINISTRATOR}",
        }

    # -- users --

    def allow(self, host: str, rights: Sequence[Right]) -> None:
        """Give the client on that host a user with these rights alone; without rights, it is an administrator."""
        if not self.is_on or not rights:
            return
        is_plain = self._dice.random() < _PLAIN_PROBABILITY
        user = self._users[host] = self._dice.choice(_PLAIN_USERS) if is_plain else host
        if not is_plain:
            self._passwords[user] = f"of {user}"
            self._store(user, self._passwords[user])
        for kind, name, operation in rights:
            self._rights.setdefault(Holding(user, ResourcePattern(kind, name)), set()).add(operation)
        self._news.set()

    def credentials_of(self, world: World) -> Credentials | None:
        """Return the credentials of clients in this process."""
        host = world.process.name.partition("#")[0] if isinstance(world, VirtualWorld) else ""
        user = self._users.get(host.removesuffix(TWIN), _ADMINISTRATOR)
        password = self._passwords.get(user)
        return (
            Credentials(PLAIN, user, f"of {user}") if password is None else Credentials(SCRAM_SHA_256, user, password)
        )

    def start(self) -> None:
        """Start the administrator who keeps the ACLs as they are wanted."""
        if self.is_on:
            self._storm.event("clients authenticate themselves")
            world = self._storm.cluster.client("acl-admin")
            world.process.start(self._keep_acls(world), "acl-admin")

    async def _keep_acls(self, world: World) -> None:
        while True:
            try:
                async with Admin(self._storm.cluster.bootstrap, default_api_timeout_ms=5_000, world=world) as admin:
                    while True:
                        self._news.clear()
                        wanted, present = self._wanted(), self._present()
                        if extra := sorted(present - wanted):
                            await admin.delete_acls(map(_filter_of, extra))
                        if missing := sorted(wanted - present):
                            await admin.create_acls(missing)
                        if self.is_whole():
                            await self._news.wait()
            except MinibrokerError as error:
                self._storm.note_once("acl-admin", f"acl-admin: {error!r}")
                await asyncio.sleep(_RETRY_S)

    def _wanted(self) -> set[AclBinding]:
        return {
            AclBinding(pattern, AccessControlEntry(f"User:{user}", WILDCARD, operation, AclPermissionType.ALLOW))
            for (user, pattern), operations in self._rights.items()
            if Holding(user, pattern) not in self._taken
            for operation in operations
        }

    def _present(self) -> set[AclBinding]:
        return {AclBinding(pattern, entry) for pattern, entries in self._acls.items() for entry in entries}

    def is_whole(self) -> bool:
        """Return whether ZooKeeper has the ACLs that it should."""
        return self._wanted() == self._present()

    def _store(self, user: str, password: str | None) -> None:
        """Write a user's credential to ZooKeeper, as another broker would."""
        texts = {}
        if password is not None:
            salted = salted_password(ScramMechanism.SCRAM_SHA_256, password, _SALT, LEAST_ITERATIONS)
            made = credential_of(ScramMechanism.SCRAM_SHA_256, salted, _SALT, LEAST_ITERATIONS)
            texts = {SCRAM_SHA_256: as_text(made)}
        zookeeper, path = self._storm.simulation.zookeeper, f"{znodes.USER_CONFIGS}/{user}"
        zookeeper.make(path, znodes.encode_config(texts))
        zookeeper.add(znodes.CONFIG_CHANGE_PREFIX, znodes.encode_config_change(path))

    # -- faults --

    @property
    def holdings(self) -> list[Holding]:
        """The holdings whose rights can be taken."""
        return sorted(set(self._rights) - self._taken)

    @contextmanager
    def without_rights(self, holding: Holding) -> Iterator[None]:
        self._taken.add(holding)
        self._news.set()
        try:
            yield
        finally:
            self._taken.discard(holding)
            self._news.set()

    @property
    def changeable(self) -> list[str]:
        """The users whose credentials can be changed."""
        return sorted(set(self._passwords) - set(self._invalid_s))

    @contextmanager
    def with_password(self, user: str, password: str | None) -> Iterator[None]:
        """Give a user a password that its clients do not have; None: delete its credential."""
        self._store(user, password)
        self._invalid_s[user] = self._storm.now_s
        try:
            yield
        finally:
            del self._invalid_s[user]
            self._store(user, self._passwords[user])

    def renew_password(self, user: str) -> None:
        """Change a user's password for good. New clients have it; the others fail at the end of their session."""
        self._passwords[user] += ", renewed"
        self._store(user, self._passwords[user])

    # -- the verdict --

    def written(self, operations: Sequence[Operation]) -> None:
        """Follow a write to ZooKeeper."""
        for operation in operations:
            parent, _, name = getattr(operation, "path", "").rpartition("/")
            above, _, kind = parent.rpartition("/")
            if above != acl_znodes.ACLS or not isinstance(operation, Create | SetData | Delete):
                continue
            pattern = ResourcePattern(word_of(AclResourceType, kind), name)
            data = b"" if isinstance(operation, Delete) else operation.data
            before = self._acls.get(pattern, frozenset())
            after = self._acls[pattern] = acl_znodes.decode_acls(operation.path, data)
            for user in sorted({entry.principal.removeprefix("User:") for entry in before ^ after}):
                self._changed(Holding(user, pattern), is_lost=all(entry.principal != f"User:{user}" for entry in after))

    def _changed(self, holding: Holding, *, is_lost: bool) -> None:
        if is_lost:
            self._losses.setdefault(holding, _Loss(self._storm.now_s))
        elif (loss := self._losses.pop(holding, None)) is not None:
            for denied in loss.denied:
                denied.until_s = self._storm.now_s
        self._storm.note(f"ACLs: {holding}: {'no rights' if is_lost else 'rights'}")

    def look(self) -> None:
        """See which brokers hear of changes."""
        if not self.is_on:
            return
        now_s = self._storm.now_s
        for broker_id in self._storm.cluster.broker_ids:
            if self._storm.cluster.process(broker_id).alive and not self._hears(broker_id):
                self._deaf_s[host_name(broker_id)] = now_s
        last_s = max(self._deaf_s.values(), default=0.0)
        for holding, loss in self._losses.items():
            if loss.heard_s == math.inf and now_s > max(loss.at_s, last_s) + HEARS_WITHIN_S:
                loss.heard_s = now_s
                self._storm.event("rights lost")
                self._storm.note(f"all brokers know that {holding} has no rights")

    def _hears(self, broker_id: int) -> bool:
        zookeeper, host, process = (
            self._storm.simulation.zookeeper,
            host_name(broker_id),
            self._storm.cluster.process(broker_id),
        )
        return (
            process.running
            and self._storm.cluster.living_broker(broker_id) is not None
            and zookeeper.running
            and host not in zookeeper.slow_hosts
            and not zookeeper.is_lagging(host)
            and any(
                s.owner == process.name and s.state is SessionState.CONNECTED for s in zookeeper.live_sessions(host)
            )
        )

    def _is_over(self, since_s: float, host: str, more_s: float = 0.0) -> bool:
        """Return whether the broker on that host must have heard of a change, and so much more time has passed."""
        return self._storm.now_s > max(since_s, self._deaf_s.get(host, 0.0)) + HEARS_WITHIN_S + more_s

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Give clients their credentials, and observe what brokers allow."""
        if not self.is_on:
            yield
            return
        patches = Patches()
        hashed = cache(scramp.core.hi)  # a millisecond for each connection, and again for each session
        patches.set(scramp.core, "hi", lambda how, password, salt, times: hashed(how, password, salt, int(times)))
        patches.set(Links, "credentials_of", staticmethod(self.credentials_of))

        @patches.instead_of(Client, "__init__")
        def initialize(original: Any, client: Client, *arguments: Any, world: World, **named: Any) -> None:
            credentials = self.credentials_of(world)
            assert credentials is not None
            named["security"] = {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": credentials.mechanism,
                "sasl_plain_username": credentials.username,
                "sasl_plain_password": credentials.password,
            }
            original(client, *arguments, world=world, **named)

        @patches.instead_of(Authorizer, "check")
        def check(original: Any, authorizer: Authorizer, request: Request) -> None:
            self._served(request)
            original(authorizer, request)

        @patches.instead_of(Inquiry, "may")
        def may(original: Any, inquiry: Inquiry, operation: AclOperation, kind: AclResourceType, name: str) -> bool:
            is_allowed: bool = original(inquiry, operation, kind, name)
            if is_allowed and self._losses:
                self._allowed(Holding(inquiry.sender.name, ResourcePattern(kind, name)), inquiry.api.name)
            return is_allowed

        try:
            yield
        finally:
            patches.undo()

    def _allowed(self, holding: Holding, api: str) -> None:
        loss, host = self._losses.get(holding), _this_host()
        if loss is not None and self._is_over(loss.at_s, host):
            text = (
                f"{host} allows a {api} of {holding}, {self._storm.now_s - loss.at_s:.1f} s after the rights were taken"
            )
            self._storm.accuse(Anomaly("allowed without a right", text))

    def _served(self, request: Request) -> None:
        if request.session.gate is None or request.api.key in BEFORE_AUTHENTICATION:
            return
        user, host = request.principal.name, _this_host()
        since_s = self._invalid_s.get(user)
        if since_s is not None and self._is_over(since_s, host, self.session_s):
            text = f"{host} serves a {request.api.name} of {user}, {self._storm.now_s - since_s:.1f} s after the loss"
            self._storm.accuse(Anomaly("served without a credential", text))

    def acknowledged(self, host: str, partition: TopicPartition, value: bytes, sent_s: float) -> None:
        """Judge a record that a producer sent at that time, and that is acknowledged now."""
        if self._loss_of(host, partition.topic, sent_s) is not None:
            text = f"{value[:40]!r} of {host} in {partition}, sent at {sent_s:.3f} s, is acknowledged"
            self._storm.accuse(Anomaly("written without a right", text))

    def refused(self, host: str, partition: TopicPartition, value: bytes, sent_s: float) -> None:
        """Record that a record sent at that time is refused now for lack of a right."""
        if (loss := self._loss_of(host, partition.topic, sent_s)) is not None:
            loss.denied.append(Denied(partition, value))
            self._denied.append(loss.denied[-1])
            self._storm.event("record refused for lack of a right")

    def _loss_of(self, host: str, topic: str, sent_s: float) -> _Loss | None:
        holding = Holding(self._users.get(host, ""), ResourcePattern(AclResourceType.TOPIC, topic))
        loss = self._losses.get(holding)
        return loss if loss is not None and loss.heard_s <= sent_s else None

    def judge(self, history: History) -> Iterator[Anomaly]:
        """Yield refused records that are in the log in front of one that was acknowledged before the right was given
        back."""
        offsets = {p: {value: offset for offset, value in values.items()} for p, values in history.final.items()}
        for partition, value, until_s in ((d.partition, d.value, d.until_s) for d in self._denied):
            offset = offsets.get(partition, {}).get(value)
            if offset is not None and any(
                known.offset > offset and known.at_s <= until_s for known in history.acknowledged[partition]
            ):
                yield Anomaly(
                    "written without a right", f"{value[:40]!r} was refused, and is in {partition} at {offset}"
                )


def _filter_of(binding: AclBinding) -> AclFilter:
    (kind, name, pattern_type), (principal, host, operation, permission) = binding
    return AclFilter(kind, name, pattern_type, principal, host, operation, permission)


def _this_host() -> str:
    """Return the host of the broker whose code is running."""
    owner = current_owner.get()
    return "" if owner is None else owner.name.partition("#")[0]

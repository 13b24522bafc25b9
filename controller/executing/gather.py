"""Reads from ZooKeeper for decisions, batched, pipelined and decoded.

Znodes may have been written by hand, so some cannot be decoded. Such a znode must not end the tenure, since every later
controller would read the same. The timeline reports it, its topic or partition is left alone, and the rest of the
cluster is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from minibroker.controller.decisions import events
from minibroker.controller.decisions.cluster_state import TopicSettings
from minibroker.controller.executing.access import ZooKeeperAccess
from minibroker.protocol import znodes
from minibroker.protocol.model import (
    DURABILITY,
    SYNCED,
    LeaderAndIsr,
    RegisteredBroker,
    TopicPartition,
    topic_name_problem,
)
from minibroker.protocol.world import NodeExists, NoNode, Stat, Watcher, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode, Reassignment, TopicZnode

_Node = tuple[bytes, Stat]

UNCLEAN_LEADER_ELECTION = "unclean.leader.election.enable"
MIN_INSYNC_REPLICAS = "min.insync.replicas"
STATES_AT_ONCE = 100
"""States per request: decoding them blocks the loop for a millisecond."""
MOST_LOOKED_UP = 20
"""Topics that are looked up one by one. For more, all names are read at once."""
LONGEST_EXAMPLE = 500
"""Characters."""


_EVENTS_OF_CHILDREN: Mapping[str, type[events.Event]] = {
    znodes.BROKER_IDS: events.BrokerChange,
    znodes.TOPICS: events.TopicChange,
    znodes.DELETE_TOPICS: events.DeleteTopics,
    znodes.ISR_CHANGES: events.IsrChange,
    znodes.LOG_DIR_EVENTS: events.LogDirFailure,
}
"""The nodes whose children are watched, and the event of each."""

Watchers = Mapping[type[events.Event], Watcher]
"""The watcher that raises each kind of event in `events.WATCHED`. The read that belongs to it sets it again."""


class Overview(NamedTuple):
    """The names of everything, read at once when office is taken."""

    broker_ids: Sequence[int]
    topics: Sequence[str]
    topics_to_delete: Sequence[str]
    isr_notifications: Sequence[str]
    log_dir_notifications: Sequence[str]


class TopicZnodes(NamedTuple):
    read: Mapping[str, TopicZnode]
    malformed: Mapping[str, str]
    """The problem of each znode that could not be decoded, with an example of valid content."""
    versions: Mapping[str, int]
    """The data versions of all these znodes."""
    changed_in: Mapping[str, int]
    """The transaction that last changed each of the znodes (its mzxid). Unlike a version, it is never repeated by a
    later znode of the same name."""


class States(NamedTuple):
    read: dict[TopicPartition, LeaderAndIsr]
    malformed: set[TopicPartition]


class PreferredElection(NamedTuple):
    """The content of `/admin/preferred_replica_election`."""

    partitions: Sequence[TopicPartition]
    """In the order of the znode; empty if it is malformed."""
    problem: str
    """Why the znode could not be decoded; empty if it could."""
    czxid: int
    version: int


class ReassignmentsRead(NamedTuple):
    entries: Sequence[Reassignment]
    version: int
    problem: str = ""
    """Why the znode could not be decoded; empty if it could."""


class Gather:
    """`note` is called with a sentence about every znode that cannot be decoded: once, however often it is read, until
    it is repaired or has another problem."""

    def __init__(self, access: ZooKeeperAccess, epoch: int, watchers: Watchers, note: Callable[[str], None]) -> None:
        self._access = access
        self._session = access.session
        self._epoch = epoch
        self._watchers = watchers
        self._report = note
        self._problems: dict[str, str] = {}
        """The reported problems, by path."""

    async def overview(self) -> Overview:
        """Read all names for taking office, and set their watches."""
        found = await self._access.read([partial(self._children, path) for path in _EVENTS_OF_CHILDREN])
        ids, topics, deletions, isr_changes, log_dir_failures = (names or [] for names in found)
        return Overview(
            _broker_ids(ids),
            topics,
            deletions,
            [f"{znodes.ISR_CHANGES}/{name}" for name in isr_changes],
            [f"{znodes.LOG_DIR_EVENTS}/{name}" for name in log_dir_failures],
        )

    async def brokers(self, known: Iterable[int]) -> dict[int, RegisteredBroker]:
        """Return the registered brokers. The data of the `known` ones is read together with the list."""
        guess = sorted(known)
        calls: list[Callable[[], Awaitable[list[str] | _Node]]] = [lambda: self._children(znodes.BROKER_IDS)]
        calls += [self._getter(znodes.broker_path(broker_id)) for broker_id in guess]
        children, *nodes = await self._access.read(calls)
        ids = _broker_ids(children if isinstance(children, list) else [])
        registered = await self.registered([broker_id for broker_id in ids if broker_id not in guess])
        for broker_id, node in zip(guess, nodes, strict=True):
            if broker_id in ids and isinstance(node, tuple):
                self._decode_broker(broker_id, node, registered)
        await self._watch_unreadable([broker_id for broker_id in guess if broker_id in ids], registered)
        return registered

    async def broker_epoch(self, broker_id: int) -> int | None:
        """Return the epoch of the broker's registration, or None if it is not registered."""
        [stat] = await self._access.read([self._checker(znodes.broker_path(broker_id))])
        return stat.czxid if stat is not None else None

    async def registered(self, broker_ids: Sequence[int]) -> dict[int, RegisteredBroker]:
        """Return those of the brokers that are registered. Registrations that cannot be decoded are watched."""
        brokers: dict[int, RegisteredBroker] = {}
        await self._read_brokers(broker_ids, brokers)
        await self._watch_unreadable(broker_ids, brokers)
        return brokers

    async def _watch_unreadable(self, broker_ids: Iterable[int], brokers: dict[int, RegisteredBroker]) -> None:
        unreadable = [broker_id for broker_id in broker_ids if znodes.broker_path(broker_id) in self._problems]
        await self._read_brokers(unreadable, brokers, self._watchers[events.BrokerChange])

    async def _read_brokers(
        self, broker_ids: Sequence[int], brokers: dict[int, RegisteredBroker], watcher: Watcher | None = None
    ) -> None:
        nodes = await self._access.read([self._getter(znodes.broker_path(b), watcher) for b in broker_ids])
        for broker_id, node in zip(broker_ids, nodes, strict=True):
            if node is not None:
                self._decode_broker(broker_id, node, brokers)

    def _decode_broker(self, broker_id: int, node: _Node, brokers: dict[int, RegisteredBroker]) -> None:
        data, stat = node
        path = znodes.broker_path(broker_id)
        try:
            brokers[broker_id] = znodes.decode_broker(broker_id, data, stat.czxid)
            self._problems.pop(path, None)
        except MalformedZnode as error:
            self._note(path, str(error), f"broker {broker_id} is ignored: {error}")

    async def topic_names(self) -> Sequence[str]:
        return await self._names(znodes.TOPICS)

    async def present(self, names: Sequence[str]) -> list[str]:
        """Return those of the topics that exist. One read suffices, since a request may name thousands."""
        if len(names) > MOST_LOOKED_UP:
            there = frozenset(await self.topic_names())
            return [name for name in names if name in there]
        found = await self.existing([znodes.topic_path(name) for name in names])
        return [name for name in names if znodes.topic_path(name) in found]

    async def with_configs(self, names: Sequence[str]) -> list[str]:
        """Return those of the topics that have settings, whether the topics exist or not."""
        if len(names) > MOST_LOOKED_UP:
            [there] = await self._access.read([partial(self._session.children, znodes.TOPIC_CONFIGS)])
            configured = frozenset(there or [])
            return [name for name in names if name in configured]
        found = await self.existing([znodes.topic_config_path(name) for name in names])
        return [name for name in names if znodes.topic_config_path(name) in found]

    async def topics_to_delete(self) -> Sequence[str]:
        return await self._names(znodes.DELETE_TOPICS)

    async def _names(self, path: str) -> list[str]:
        [names] = await self._access.read([lambda: self._children(path)])
        return names or []

    async def topics(self, names: Sequence[str], *, watch: bool = True, known: Container[str] = ()) -> TopicZnodes:
        """Read the topics that exist, and watch them unless `watch` is False. Problems of the `known` ones are not
        reported: the caller restores their znodes."""
        watcher = self._watchers[events.PartitionModifications] if watch else None
        nodes = await self._access.read([self._getter(znodes.topic_path(name), watcher) for name in names])
        read: dict[str, TopicZnode] = {}
        versions: dict[str, int] = {}
        changed_in: dict[str, int] = {}
        malformed: dict[str, str] = {}
        for name, node in zip(names, nodes, strict=True):
            if node is None:
                continue
            versions[name], changed_in[name] = node[1].version, node[1].mzxid
            try:
                read[name] = znodes.decode_topic(name, node[0])
                self._problems.pop(znodes.topic_path(name), None)
            except MalformedZnode as error:
                malformed[name] = str(error)
        for name in [name for name in malformed if name not in known]:
            problem, example = malformed[name], await self._example(name)
            if example:
                malformed[name] = f"{problem}, as in {example}, with all replicas of each partition (these are in sync)"
            self._note(znodes.topic_path(name), problem, f"topic {name} is ignored: {malformed[name]}")
        return TopicZnodes(read, malformed, versions, changed_in)

    async def _example(self, topic: str) -> str:
        """Return content that could be written to the topic's znode, derived from the nodes below it; empty if these do
        not suffice."""
        paths = [znodes.topic_path(topic), znodes.partitions_path(topic)]
        below, numbers = await self._access.read([partial(self._session.children, path) for path in paths])
        ids = [name.removeprefix("id-") for name in below or [] if name.startswith("id-")]
        partitions = [TopicPartition(topic, p) for name in numbers or [] if (p := znodes.number(name)) is not None]
        if topic_name_problem(topic) is not None or not ids or not partitions:
            return ""
        states = (await self.states(sorted(partitions))).read
        in_sync = {p.partition: states[p].isr if p in states else () for p in sorted(partitions)}
        example = znodes.encode_topic(TopicZnode(ids[0], in_sync)).decode()
        return example if len(example) <= LONGEST_EXAMPLE else f"{example[:LONGEST_EXAMPLE]}..."

    async def states(self, partitions: Sequence[TopicPartition]) -> States:
        """Read the state znodes that exist. Those that cannot be decoded are watched. Raises ControllerMoved if a newer
        controller has written one."""
        parts = [partitions[start : start + STATES_AT_ONCE] for start in range(0, len(partitions), STATES_AT_ONCE)]
        answers = await self._access.read([self._states_getter(part) for part in parts])
        states = States({}, set())
        for part, nodes in zip(parts, answers, strict=True):
            self._decode_states(part, nodes or [], states)
            await asyncio.sleep(0)
        unreadable = sorted(states.malformed)
        states.malformed.clear()
        watcher = self._watchers[events.UnreadableStateChange]
        nodes = await self._access.read([self._getter(znodes.state_path(p), watcher) for p in unreadable])
        self._decode_states(unreadable, nodes, states)
        await self._require_term(states)
        return states

    def _states_getter(self, partitions: Sequence[TopicPartition]) -> Callable[[], Awaitable[list[_Node | None]]]:
        return lambda: self._session.get_all([znodes.state_path(partition) for partition in partitions])

    def _decode_states(
        self, partitions: Sequence[TopicPartition], nodes: Sequence[_Node | None], states: States
    ) -> None:
        for partition, node in zip(partitions, nodes, strict=True):
            if node is None:
                continue
            try:
                states.read[partition] = decode_own_state(partition, node[0], node[1].version, self._epoch)
                self._problems.pop(znodes.state_path(partition), None)
            except MalformedZnode as error:
                states.malformed.add(partition)
                path = znodes.state_path(partition)
                self._note(path, str(error), f"{partition} is left without a leader: {error}")

    async def watched_states(
        self, partitions: Sequence[TopicPartition], watcher: Callable[[TopicPartition], Watcher]
    ) -> States:
        """Like `states`; `watcher` returns the watcher of each partition's znode."""
        nodes = await self._access.read([self._getter(znodes.state_path(p), watcher(p)) for p in partitions])
        states = States({}, set())
        self._decode_states(partitions, nodes, states)
        await self._require_term(states)
        return states

    async def _require_term(self, states: States) -> None:
        if states.malformed:  # a newer controller may have written it
            await self._access.require_term(self._epoch)

    async def reassignments(self) -> ReassignmentsRead | None:
        """Read `/admin/reassign_partitions`; None if it does not exist. It is watched in either case."""
        [node] = await self._access.read([self._watched_reassignments])
        if node is None:
            return None
        data, stat = node
        try:
            return ReassignmentsRead(znodes.decode_reassignments(data), stat.version)
        except MalformedZnode as error:
            return ReassignmentsRead((), stat.version, str(error))

    async def _watched_reassignments(self) -> tuple[bytes, Stat] | None:
        watcher = self._watchers[events.PartitionReassignment]
        while True:
            try:
                return await self._session.get(znodes.REASSIGN_PARTITIONS, watcher)
            except NoNode:
                if await self._session.exists(znodes.REASSIGN_PARTITIONS, watcher) is None:
                    return None

    async def isr_notifications(self) -> Sequence[str]:
        """Return the paths of the notifications."""
        return [f"{znodes.ISR_CHANGES}/{name}" for name in await self._names(znodes.ISR_CHANGES)]

    async def changed_partitions(self, notifications: Sequence[str]) -> list[TopicPartition]:
        """Return the partitions that the notifications name, each once."""
        nodes = await self._access.read([self._getter(path) for path in notifications])
        partitions: dict[TopicPartition, None] = {}
        for path, node in zip(notifications, nodes, strict=True):
            if node is None:
                continue
            try:
                partitions.update(dict.fromkeys(znodes.decode_isr_change(path, node[0])))
            except MalformedZnode as error:
                self._report(f"an ISR change is ignored: {error}")
        return list(partitions)

    async def log_dir_notifications(self) -> Sequence[str]:
        """Return the paths of the notifications."""
        return [f"{znodes.LOG_DIR_EVENTS}/{name}" for name in await self._names(znodes.LOG_DIR_EVENTS)]

    async def brokers_of_failures(self, notifications: Sequence[str]) -> dict[int, str]:
        """Return the brokers that the notifications name, each with a reason; empty: not known."""
        nodes = await self._access.read([self._getter(path) for path in notifications])
        reasons: dict[int, str] = {}
        for path, node in zip(notifications, nodes, strict=True):
            if node is None:
                continue
            try:
                broker_id, reason = znodes.decode_log_dir_event(path, node[0])
                reasons[broker_id] = reason or reasons.get(broker_id, "")
            except MalformedZnode as error:
                self._report(f"a failure of a log directory is ignored: {error}")
        return dict(sorted(reasons.items()))

    async def preferred_election(self) -> PreferredElection | None:
        """Read `/admin/preferred_replica_election`; None if it does not exist. It is watched in either case."""
        path, watcher = znodes.PREFERRED_REPLICA_ELECTION, self._watchers[events.PreferredReplicaElection]
        [there] = await self._access.read([lambda: self._session.exists(path, watcher)])
        if there is None:
            return None
        [node] = await self._access.read([self._getter(path)])
        if node is None:
            return None
        data, stat = node
        try:
            return PreferredElection(znodes.decode_preferred_election(data), "", stat.czxid, stat.version)
        except MalformedZnode as error:
            return PreferredElection((), str(error), stat.czxid, stat.version)

    async def configs(self, topics: Sequence[str]) -> dict[str, Mapping[str, str]]:
        """Return the settings of those of the topics that have any; empty if the znode is malformed."""
        paths = [znodes.topic_config_path(topic) for topic in topics]
        nodes = await self._access.read([self._getter(path) for path in paths])
        configs: dict[str, Mapping[str, str]] = {}
        for topic, path, node in zip(topics, paths, nodes, strict=True):
            if node is None:
                continue
            try:
                configs[topic] = znodes.decode_config(path, node[0])
                self._problems.pop(path, None)
            except MalformedZnode as error:
                configs[topic] = {}
                self._note(path, str(error), f"the settings of topic {topic} are ignored: {error}")
        return configs

    async def topic_settings(self, topics: Sequence[str], default: TopicSettings) -> dict[str, TopicSettings]:
        """Return the settings that decide elections. `default` applies to settings that a topic does not have, and to a
        min.insync.replicas that is no number."""
        configs = await self.configs(topics)
        return {topic: self._topic_settings(topic, configs.get(topic, {}), default) for topic in topics}

    async def settings_version(self) -> int | None:
        """Return the version of all settings in ZooKeeper, which every change raises (`TopicSettings.version`)."""
        [stat] = await self._access.read([self._checker(znodes.CONFIG_CHANGES)])
        return None if stat is None else stat.version

    async def read_again(self, read: Callable[[ZooKeeperSession], Awaitable[object]]) -> None:
        """Call `read` with the session, again after a lost connection."""
        await self._access.read([lambda: read(self._session)])

    def _topic_settings(self, topic: str, config: Mapping[str, str], default: TopicSettings) -> TopicSettings:
        unclean = config.get(UNCLEAN_LEADER_ELECTION, str(default.unclean_leader_election)).strip().lower() == "true"
        is_synced = config.get(DURABILITY) == SYNCED
        text = config.get(MIN_INSYNC_REPLICAS, "").strip()
        path = f"{znodes.topic_config_path(topic)} {MIN_INSYNC_REPLICAS}"
        if not text:
            return TopicSettings(unclean, default.min_insync_replicas, is_synced)
        min_insync_replicas = znodes.number(text, 2**63 - 1)
        if not min_insync_replicas:
            problem = f"topic {topic} has {MIN_INSYNC_REPLICAS}={text[:80]!r}, not a number of replicas: correct it"
            self._note(path, problem, problem)
            return TopicSettings(unclean, default.min_insync_replicas, is_synced)
        self._problems.pop(path, None)
        return TopicSettings(unclean, min_insync_replicas, is_synced)

    def _note(self, path: str, problem: str, note: str) -> None:
        """Report a problem unless it has been reported."""
        if self._problems.get(path) != problem:
            self._problems[path] = problem
            self._report(note)

    async def existing(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those of the nodes that exist."""
        stats = await self._access.read([self._checker(path) for path in paths])
        return frozenset(path for path, stat in zip(paths, stats, strict=True) if stat is not None)

    async def tree(self, root: str) -> list[str]:
        """Return the node and all below it, children before their parents; empty if it does not exist."""
        levels = [[root]]
        while levels[-1]:
            level = levels[-1]
            names = await self._access.read([partial(self._session.children, path) for path in level])
            levels[-1] = [path for path, found in zip(level, names, strict=True) if found is not None]
            levels.append([f"{path}/{name}" for path, found in zip(level, names, strict=True) for name in found or []])
        return [path for level in reversed(levels) for path in level]

    def _getter(self, path: str, watcher: Watcher | None = None) -> Callable[[], Awaitable[_Node]]:
        return lambda: self._session.get(path, watcher)

    def _checker(self, path: str) -> Callable[[], Awaitable[Stat | None]]:
        return lambda: self._session.exists(path)

    async def _children(self, path: str) -> list[str]:
        """Return the names of the children, and watch them. Every broker creates the node at its start; if it is gone,
        it is created again."""
        watcher = self._watchers[_EVENTS_OF_CHILDREN[path]]
        while True:
            try:
                return await self._session.children(path, watcher)
            except NoNode:
                self._report(f"the znode {path} was missing; it is made again")
            try:
                await self._session.create(path, b"")
            except NodeExists:
                continue


def _broker_ids(names: Iterable[str]) -> list[int]:
    return sorted(broker_id for name in names if (broker_id := znodes.number(name)) is not None)


def decode_own_state(partition: TopicPartition, data: bytes, version: int, epoch: int) -> LeaderAndIsr:
    """Decode a state. Raises MalformedZnode, also for a controller epoch higher than `epoch`: then the caller checks
    whether a newer controller was elected (`ZooKeeperAccess.require_term`) or the znode was written by hand."""
    state = znodes.decode_state(partition, data, version)
    if state.controller_epoch > epoch:
        raise MalformedZnode(
            f"the znode {znodes.state_path(partition)} has controller_epoch {state.controller_epoch}, and the "
            f"controller's is {epoch}; correct it"
        )
    return state

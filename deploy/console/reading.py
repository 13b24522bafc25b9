"""Reads the cluster through an Admin client.

A broker that hangs must not hide the others. So each broker is asked separately for its replicas, has one second, and
is shown as silent after that; ends of partitions are asked only of leaders that answered.

A page reads what it shows. The ends of a thousand partitions would take most of a reading's time, and the committed
offsets of each group cost its coordinator a write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigEntry, ConfigErrors, ConfigResource
from minibroker.client.administering.groups import GroupErrors, GroupListing
from minibroker.client.administering.log_dirs import LogDirReplica
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.timeline import Entry, TimelineReader, merged
from minibroker.client.administering.topics import PartitionDescription, TopicDescription
from minibroker.client.cli.group_details import (
    NOBODYS_TOPIC,
    GroupDetails,
    PartitionLag,
    end_offsets,
    refuses_one_of,
    topics_of,
)
from minibroker.client.cli.terminal import security
from minibroker.client.cli.timelines.timeline import entries_in_files, entries_of_all
from minibroker.client.consumer import Consumer
from minibroker.client.errors import BrokersFailed, InvalidSetting
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.deploy.console.record_page import ALL_BROKERS, Settings
from minibroker.deploy.console.records import (
    MAX_ANSWER_BYTES,
    MAX_BUFFER_BYTES,
    MAX_PARTITION_BYTES,
    RecordReading,
    Records,
)
from minibroker.deploy.console.sampling import Sight
from minibroker.deploy.console.sessions import Contacts
from minibroker.deploy.console.state import ClusterState, Groups, Move, Timeline
from minibroker.deploy.console.views import (
    GROUPS_A_PAGE,
    Query,
    broker_ids,
    page_of,
    shown_partitions,
    without_dead,
)
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.broker_process import last_error
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.injected import all_faults
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState, state_of
from minibroker.deploy.local.who import ZOOKEEPER, Member
from minibroker.deploy.observing.cluster_view import ASK_END_OFFSETS_TIMEOUT_S, SLOW_AFTER_S
from minibroker.deploy.observing.rights import DENIED, names_denied
from minibroker.deploy.observing.status import Status
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.faults import Faults
from minibroker.protocol.model import TopicPartition, topic_name_problem

T = TypeVar("T")

CLIENT_ID = "minibroker-console"
ANSWER_WITHIN_S = SLOW_AFTER_S
API_TIMEOUT_MS = 1_500
"""A request that one hanging broker has not answered in `ANSWER_WITHIN_S` can still be answered by another."""
ENDS_WITHIN_MS = ASK_END_OFFSETS_TIMEOUT_S * 1_000
"""A new leader below min.insync.replicas does not tell the end, and the rest of the page must not wait for it."""
MAX_ENTRIES = 2_000
"""As many entries of each broker's timeline are kept as the broker itself keeps."""
_CLUSTER, _TIMELINE, _GROUPS, _RECORDS, _SETTINGS, _SAMPLES = (
    "cluster",
    "timeline",
    "groups",
    "records",
    "settings",
    "samples",
)
_MIN_ISR = "min.insync.replicas"
_SESSION_TIMEOUT = "zookeeper.session.timeout.ms"
_TOPICS_AT_A_TIME = 100
_GROUPS_AT_A_TIME = 16
REASSIGNMENTS_EVERY_S = 3.0
RIGHTS_EVERY_S = 10.0
GROUPS_SAMPLED = 20
"""The lag of more groups is not sampled, since each costs its coordinator a write."""


class _OfThisMachine(TypedDict, total=False):
    """Fields of `ClusterState`."""

    paused: frozenset[int]
    running: frozenset[int]
    gone: frozenset[int]
    zookeeper: ProcessState | None
    last_errors: Mapping[int, str]
    faults: Mapping[int, Faults]


Key = tuple[int, int]
"""An entry's number and time: if a broker's disk is replaced, it counts from 1 again."""


class Reader:
    def __init__(self, servers: Callable[[], str], files: Path | None) -> None:
        """`servers` returns the bootstrap list, which may change when a local cluster is started again. `files` is the
        directory of a local cluster, whose files have the timelines of dead brokers."""
        self._servers = servers
        self._files = files
        self._admins: dict[str, Admin] = {}
        """For each kind of reading its own client, so that one whose cluster is gone can close it."""
        self._timeline: TimelineReader | None = None
        self._entries: dict[int, dict[Key, Entry]] = {}
        self._looked_for: set[int] = set()
        """Dead brokers whose files have been read."""
        self._told = Timeline(0, [], {})
        self._contacts = Contacts()
        self._ids: Sequence[int] = ()
        """The registered brokers of the last reading."""
        self._machine = _Machine({}, {})
        """At the last reading."""
        self._reassigned: dict[TopicPartition, PartitionReassignment] = {}
        self._reassigned_at_s = float("-inf")
        self._hides_topics = False
        self._rights_at_s = float("-inf")

    @property
    def silent(self) -> tuple[int, ...]:
        """The registered brokers that do not answer, while others do."""
        return self._contacts.silent

    async def close(self) -> None:
        for kind in list(self._admins):
            await self._drop(kind)

    async def cluster(self, query: Query, health: Status | None = None) -> ClusterState:
        """`health`: see `views.overview`. Raises MinibrokerError if no broker answers."""
        admin = await self._open(_CLUSTER)
        # What needs no answer to another question is asked at the same time: each may wait for a broker that hangs.
        async with _asking(self._ask_replicas(admin, self._ids)) as known:
            try:
                description, topics, hides_topics, local = await asyncio.gather(
                    admin.describe_cluster(),
                    admin.describe_topics(),
                    self._may_hide_topics(admin),
                    asyncio.to_thread(self.of_this_machine),
                )
            except MinibrokerError:
                self._contacts.lost()
                await self._drop(_CLUSTER)
                raise
            description, topics = without_dead(description, topics, local.get("gone", ()))
            found, reassigned = await asyncio.gather(
                self._replicas(admin, [broker.id for broker in description.brokers], known),
                self._reassignments(admin, topics, description.controller_id),
            )
        behind = {broker_id: _lags(replicas) for broker_id, replicas in found.items()}
        await self._learn_timeouts(admin, self._contacts.unknown(behind))
        state = ClusterState(description, topics, behind, {}, await _min_isr(admin, topics), **local)
        now_s = time.monotonic()
        sessions = {broker_id: self._contacts.session(broker_id, now_s) for broker_id in broker_ids(state)}
        answering = [
            partition
            for partition in shown_partitions(state, query, health)
            if topics[partition.topic].partitions[partition.partition].leader in behind
        ]
        moves = {
            partition: Move(
                one.adding_replicas,
                one.removing_replicas,
                {broker_id: each[partition].size for broker_id, each in found.items() if partition in each},
            )
            for partition, one in reassigned.items()
        }
        ends = await end_offsets(admin, topics, answering, ENDS_WITHIN_MS)
        return state._replace(ends=ends, sessions=sessions, moves=moves, hides_topics=hides_topics)

    async def _may_hide_topics(self, admin: Admin) -> bool:
        """Return whether there may be topics that brokers do not show to this user, see `rights`."""
        if time.monotonic() >= self._rights_at_s + RIGHTS_EVERY_S:
            self._rights_at_s = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    self._hides_topics = await refuses_one_of(admin, [NOBODYS_TOPIC, *await _topics_denied(admin)])
            except (TimeoutError, MinibrokerError):
                pass  # what was known before holds
        return self._hides_topics

    def machine_has_changed(self) -> bool:
        """Return whether processes of this machine have ended, paused or gone on since the cluster was read, or have
        other faults."""
        cluster = None if self._files is None else LocalCluster(self._files).file_or_none()
        if self._files is None or cluster is None or not self._machine.processes:
            return False
        return _machine(self._files, cluster) != self._machine

    def of_this_machine(self) -> _OfThisMachine:
        """Return what needs no answer of a broker; nothing of a cluster elsewhere."""
        cluster = None if self._files is None else LocalCluster(self._files).file_or_none()
        if self._files is None or cluster is None:
            return {}
        machine = self._machine = _machine(self._files, cluster)
        states = machine.processes
        paused, running, gone = (
            frozenset(each.id for each in cluster.brokers if states[each.id] is wanted)
            for wanted in (ProcessState.PAUSED, ProcessState.RUNNING, ProcessState.GONE)
        )
        errors = {id: last_error(LocalCluster(self._files).log_of(id)) for id in gone}
        return {
            "paused": paused,
            "running": running,
            "gone": gone,
            "zookeeper": states.get(ZOOKEEPER),
            "last_errors": {id: error for id, error in errors.items() if error is not None},
            "faults": machine.faults,
        }

    async def _replicas(
        self, admin: Admin, ids: Sequence[int], known: asyncio.Task[_Answers] | None = None
    ) -> dict[int, Replicas]:
        """Return the replicas of the brokers that answer. `known`: some have been asked already."""
        found = _Answers(time.monotonic(), {}) if known is None else await known
        more = await self._ask_replicas(admin, [broker_id for broker_id in ids if broker_id not in found.of_brokers])
        answers = {**found.of_brokers, **more.of_brokers}
        self._ids = list(ids)
        self._contacts.asked(
            {broker_id: answers[broker_id] is not None for broker_id in ids},
            found.asked_s,
            time.monotonic(),
            time.time_ns() // 1_000_000,
        )
        return {broker_id: each for broker_id in ids if (each := answers[broker_id]) is not None}

    async def _ask_replicas(self, admin: Admin, ids: Sequence[int]) -> _Answers:
        asked_s = time.monotonic()
        found = await asyncio.gather(*(_replicas_of(admin, broker_id) for broker_id in ids))
        return _Answers(asked_s, dict(zip(ids, found, strict=True)))

    async def _reassignments(
        self, admin: Admin, topics: Mapping[str, TopicDescription], controller_id: int | None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """Return the reassignments in progress. The controller writes to ZooKeeper before it answers, so it is asked
        only if there may be one, and at most every REASSIGNMENTS_EVERY_S. One that hangs is not waited for."""
        if not any(len(each.isr) < len(each.replicas) for topic in topics.values() for each in topic.partitions):
            return {}
        is_due = time.monotonic() >= self._reassigned_at_s + REASSIGNMENTS_EVERY_S
        if is_due and controller_id is not None and controller_id not in self._contacts.silent:
            self._reassigned_at_s = time.monotonic()
            with suppress(TimeoutError, MinibrokerError):
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    self._reassigned = await admin.list_partition_reassignments()
        replicas = {
            TopicPartition(topic.name, each.partition): set(each.replicas)
            for topic in topics.values()
            for each in topic.partitions
            if len(each.isr) < len(each.replicas)
        }
        # One that is done since then has other replicas.
        return {name: one for name, one in self._reassigned.items() if replicas.get(name) == set(one.replicas)}

    async def _learn_timeouts(self, admin: Admin, brokers: Sequence[int]) -> None:
        """Ask these brokers for their session timeouts, once each time that they come."""
        if not brokers:
            return
        resources = [ConfigResource.of_broker(broker_id) for broker_id in brokers]
        found: Mapping[ConfigResource, Mapping[str, ConfigEntry]]
        refused: dict[ConfigResource, MinibrokerError] = {}
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                found = await admin.describe_configs(resources, names=[_SESSION_TIMEOUT])
        except ConfigErrors as failed:
            found = failed.results
            refused = {each: error for each, error in failed.errors.items() if isinstance(error, BrokerError)}
        except (TimeoutError, MinibrokerError):
            return
        for resource in resources:
            entry = found.get(resource, {}).get(_SESSION_TIMEOUT)
            if entry is not None or resource in refused:
                timeout_s = int(entry.value) / 1_000 if entry is not None and entry.value else None
                self._contacts.learn(int(resource.name), timeout_s)

    async def timeline(self) -> Timeline:
        """Raises MinibrokerError if no broker answers."""
        admin = await self._open(_TIMELINE)
        if self._timeline is None:
            self._timeline = admin.timeline_reader()
            self._timeline.answer_within_s = ANSWER_WITHIN_S
        try:
            found = await self._timeline.read()
        except MinibrokerError:
            await self._drop(_TIMELINE)
            raise
        is_new = False
        for entry in found.entries:
            is_new = self._add(entry["controller"], [entry]) or is_new
        looked_for, self._looked_for = self._looked_for, set(found.errors)
        for broker_id in found.errors.keys() - looked_for:
            if self._files is not None and (entries := entries_in_files(self._files, broker_id, 0)):
                is_new = self._add(broker_id, entries) or is_new
        missing = {broker_id: str(error) for broker_id, error in found.errors.items() if broker_id not in self._entries}
        if is_new or missing != self._told.missing:
            by_broker = {
                broker_id: sorted(entries.values(), key=lambda entry: int(entry["number"]))
                for broker_id, entries in self._entries.items()
            }
            self._told = Timeline(self._told.version + 1, merged(by_broker), missing)
        return self._told

    def timeline_in_files(self) -> Timeline | None:
        """Return the timeline of a local cluster, dead or alive. None: it is not a local one, or recorded nothing."""
        by_broker = {} if self._files is None else entries_of_all(self._files, 0)
        return Timeline(0, merged(by_broker), {}) if any(by_broker.values()) else None

    async def groups(self, query: Query) -> Groups:
        """Raises MinibrokerError if no broker answers."""
        admin = await self._open(_GROUPS)
        silent: tuple[int, ...] = ()
        try:
            listed = await admin.list_groups()
        except BrokersFailed as failed:
            answers: Mapping[int, list[GroupListing]] = failed.results
            listed = sorted({each.group: each for answer in answers.values() for each in answer}.values())
            silent = tuple(sorted(failed.errors))
        except MinibrokerError:
            await self._drop(_GROUPS)
            raise
        selected = [each.group for each in listed if query.group in ("", each.group)]
        _, _, names = page_of(selected, query.page, GROUPS_A_PAGE)
        errors: dict[str, str] = {}
        try:
            described = await admin.describe_groups(names)
        except GroupErrors as failed_groups:
            described = dict(failed_groups.results)
            errors = {group: str(error) for group, error in failed_groups.errors.items()}
        committed, more_errors = await _committed(admin, described)
        topics, refused = await topics_of(
            admin,
            {p.topic for offsets in committed.values() for p in offsets}
            | {p.topic for each in described.values() for member in each.members for p in member.partitions or ()},
        )
        parts = {
            group: _partitions(offsets, {p for m in described[group].members for p in m.partitions or ()}, topics)
            for group, offsets in committed.items()
        }
        answering = _led_by_others(topics, self._contacts.silent)
        wanted = {p for each in parts.values() for p in each if p in answering}
        ends = await end_offsets(admin, topics, wanted, ENDS_WITHIN_MS)
        details = []
        for group, partitions in parts.items():
            owners = {p: member.member_id for member in described[group].members for p in member.partitions or ()}
            lags = (PartitionLag(p, committed[group].get(p), ends.get(p), owners.get(p)) for p in partitions)
            owned = {p.topic for p in owners}
            details.append(
                GroupDetails(
                    described[group],
                    tuple(lags),
                    tuple(topic for topic in refused if topic in owned),
                    not committed[group] and owned.isdisjoint(refused) and await self._may_hide_topics(admin),
                )
            )
        hides_groups = not listed and await _refuses_the_cluster(admin)
        principal = security.principal()
        missing_rights = tuple(text for each in details if (text := each.missing_right(principal)) is not None)
        return Groups(tuple(details), errors | more_errors, len(selected), silent, hides_groups, missing_rights)

    async def records(self, reading: RecordReading) -> Records:
        """Raises MinibrokerError if no broker answers."""
        admin = await self._open(_RECORDS)
        try:
            return await reading.read(admin, self._consumer)
        except MinibrokerError:
            await self._drop(_RECORDS)
            raise

    def _consumer(self, partitions: Sequence[TopicPartition]) -> Consumer:
        return Consumer(
            self._servers(),
            partitions=partitions,
            client_id=CLIENT_ID,
            max_partition_fetch_bytes=MAX_PARTITION_BYTES,
            fetch_max_bytes=MAX_ANSWER_BYTES,
            fetch_max_buffer_bytes=MAX_BUFFER_BYTES,
            request_timeout_ms=ANSWER_WITHIN_S * 1_000,
            default_api_timeout_ms=API_TIMEOUT_MS,
            **security.chosen(),
        )

    async def look(self) -> Sight:
        """Return what a sample of the plots needs. Raises MinibrokerError if no broker answers."""
        admin = await self._open(_SAMPLES)
        try:
            topics = await admin.describe_topics()
            ids = [broker.id for broker in (await admin.describe_cluster()).brokers]
        except MinibrokerError:
            self._contacts.lost()
            await self._drop(_SAMPLES)
            raise
        found = await self._replicas(admin, ids)
        partitions = [each for topic in topics.values() for each in topic.partitions]
        names = {
            TopicPartition(topic.name, each.partition)
            for topic in topics.values()
            if not topic.is_internal
            for each in topic.partitions
        }
        ends, committed, hides_topics = await asyncio.gather(
            end_offsets(admin, topics, names, ENDS_WITHIN_MS), _sampled_offsets(admin), self._may_hide_topics(admin)
        )
        lags = None if committed is None else sampled_lags(committed, names, ends)
        sight = Sight(
            ends,
            sum(each.leader is None for each in partitions),
            sum(len(each.isr) < len(each.replicas) for each in partitions),
            follower_lag(partitions, {broker_id: _lags(replicas) for broker_id, replicas in found.items()}),
            lags,
            0 if committed is None or lags is None else len(committed) - len(lags),
        )
        return sight.of_some_topics() if hides_topics else sight

    async def settings(self, query: Query) -> Settings:
        """Return the settings of the query's topic or broker, or of the first broker. Raises MinibrokerError if no
        broker answers."""
        admin = await self._open(_SETTINGS)
        try:
            brokers = tuple(broker.id for broker in (await admin.describe_cluster()).brokers)
            topics = tuple(await admin.list_topics())
        except MinibrokerError:
            await self._drop(_SETTINGS)
            raise
        if query.topic:
            resource = ConfigResource.of_topic(query.topic)
        elif query.broker == ALL_BROKERS:
            resource = ConfigResource.of_all_brokers()
        else:
            chosen = query.broker if query.broker.isdecimal() and query.broker.isascii() else ""
            resource = ConfigResource.of_broker(int(chosen[:9]) if chosen else brokers[0])
        try:
            found = await admin.describe_configs([resource], synonyms=True, documentation=True)
        except ConfigErrors as failed:
            return Settings(topics, brokers, str(resource), (), str(failed.errors[resource]))
        except InvalidSetting as error:
            return Settings(topics, brokers, str(resource), (), str(error))
        return Settings(topics, brokers, str(resource), tuple(found[resource].values()), None)

    async def _open(self, kind: str) -> Admin:
        if kind not in self._admins:
            admin = Admin(
                self._servers(),
                client_id=CLIENT_ID,
                request_timeout_ms=ANSWER_WITHIN_S * 1_000,
                default_api_timeout_ms=API_TIMEOUT_MS,
                **security.chosen(),
            )
            await admin.start()
            self._admins[kind] = admin
        return self._admins[kind]

    async def _drop(self, kind: str) -> None:
        """The next reading begins with a new client: this one may have crashed, or know a cluster that is gone."""
        admin = self._admins.pop(kind, None)
        if kind == _TIMELINE:
            self._timeline = None
            self._entries, self._looked_for = {}, set()
        if admin is not None:  # otherwise the console ends, and has closed it
            await admin.close()

    def _add(self, broker_id: int, entries: list[Entry]) -> bool:
        """Return whether there is a new entry."""
        known = self._entries.setdefault(broker_id, {})
        new = {(entry["number"], entry["time_ms"]): entry for entry in entries}
        is_new = not new.keys() <= known.keys()
        known.update(new)
        while len(known) > MAX_ENTRIES:
            del known[next(iter(known))]
        return is_new


Replicas = Mapping[TopicPartition, LogDirReplica]


@asynccontextmanager
async def _asking(question: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Ask while the block runs. What has no answer at its end is given up."""
    task = asyncio.create_task(question)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


class _Answers(NamedTuple):
    asked_s: float
    of_brokers: Mapping[int, Replicas | None]
    """None: it has not answered."""


class _Machine(NamedTuple):
    processes: Mapping[Member, ProcessState]
    faults: Mapping[int, Faults]
    """Those that brokers were ordered to have."""


def _machine(directory: Path, cluster: ClusterFile) -> _Machine:
    states: dict[Member, ProcessState] = {each.id: state_of(each.process) for each in cluster.brokers}
    if cluster.zookeeper.port is not None:
        states[ZOOKEEPER] = state_of(cluster.zookeeper.process)
    with suppress(LaunchError):  # `minibroker status`, beside it, says that a file is damaged
        return _Machine(states, all_faults(directory, cluster))
    return _Machine(states, {})


async def _replicas_of(admin: Admin, broker_id: int) -> Replicas | None:
    """Return the replicas of a broker; None if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            directories = (await admin.describe_log_dirs([broker_id]))[broker_id]
    except BrokersFailed as failed:  # a broker that refuses to tell, answers
        return {} if isinstance(failed.errors[broker_id], BrokerError) else None
    except (TimeoutError, MinibrokerError):
        return None
    return {
        partition: replica
        for directory in directories
        for partition, replica in directory.replicas.items()
        if not replica.is_future
    }


async def _topics_denied(admin: Admin) -> list[str]:
    """Return the names of DENY entries that may hide topics; none if this user may not see the entries."""
    try:
        return [name for name in names_denied(await admin.describe_acls(DENIED)) if topic_name_problem(name) is None]
    except BrokerError:
        return []


async def _refuses_the_cluster(admin: Admin) -> bool:
    """Return whether this user may not Describe the cluster, and so not all of its groups."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await admin.describe_log_dirs()
    except BrokersFailed as failed:
        return any(
            isinstance(error, BrokerError) and error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            for error in failed.errors.values()
        )
    except (TimeoutError, MinibrokerError):
        pass
    return False


def _lags(replicas: Replicas) -> dict[TopicPartition, int]:
    """Return how far each replica is behind."""
    return {partition: replica.offset_lag for partition, replica in replicas.items()}


def _led_by_others(topics: Mapping[str, TopicDescription], silent: Collection[int]) -> set[TopicPartition]:
    """Return the partitions whose leaders are not silent."""
    return {
        TopicPartition(topic.name, each.partition)
        for topic in topics.values()
        for each in topic.partitions
        if each.leader not in silent
    }


def follower_lag(
    partitions: Iterable[PartitionDescription], behind: Mapping[int, Mapping[TopicPartition, int]]
) -> int | None:
    """Return the sum; None if a broker that has replicas did not answer, or does not know how far it is behind: a
    follower that is cut off from its leader compares itself with what it heard last."""
    known = list(partitions)
    if not {broker_id for each in known for broker_id in each.replicas} <= behind.keys():
        return None
    for broker_id, lags in behind.items():
        out_of_sync = sum(broker_id in each.replicas and broker_id not in each.isr for each in known)
        if out_of_sync > sum(lag > 0 for lag in lags.values()):
            return None
    return sum(max(0, lag) for lags in behind.values() for lag in lags.values())


def sampled_lags(
    committed: Mapping[str, Committed | None],
    existing: Collection[TopicPartition],
    ends: Mapping[TopicPartition, int],
) -> dict[str, int | None]:
    """Return the lags of groups that have committed; None if the commits or the end of a partition are not known."""
    lags: dict[str, int | None] = {}
    for group, found in committed.items():
        offsets = {partition: each.offset for partition, each in (found or {}).items() if partition in existing}
        if found is None or not offsets.keys() <= ends.keys():
            lags[group] = None
        elif offsets:
            lags[group] = sum(max(0, ends[partition] - offset) for partition, offset in offsets.items())
    return lags


async def _min_isr(admin: Admin, topics: Mapping[str, TopicDescription]) -> dict[str, int]:
    out_of_sync = [
        topic.name for topic in topics.values() if any(len(each.isr) < len(each.replicas) for each in topic.partitions)
    ]
    resources = [ConfigResource.of_topic(name) for name in out_of_sync[:_TOPICS_AT_A_TIME]]
    if not resources:
        return {}
    found: Mapping[ConfigResource, Mapping[str, ConfigEntry]]
    try:
        found = await admin.describe_configs(resources, names=[_MIN_ISR])
    except ConfigErrors as failed:
        found = failed.results
    except MinibrokerError:
        return {}
    return {
        resource.name: int(entries[_MIN_ISR].value or 0) for resource, entries in found.items() if _MIN_ISR in entries
    }


async def _sampled_offsets(admin: Admin) -> dict[str, Committed | None] | None:
    """Return the committed offsets of each sampled group, or None. None: not all groups could be listed."""
    try:
        groups = [each.group for each in await admin.list_groups()]
    except MinibrokerError:
        return None
    sampled = groups[:GROUPS_SAMPLED]
    found, _ = await _committed(admin, dict.fromkeys(sampled))
    return {group: found.get(group) for group in sampled}


Committed = dict[TopicPartition, OffsetAndMetadata]


async def _committed(admin: Admin, groups: Mapping[str, object]) -> tuple[dict[str, Committed], dict[str, str]]:
    """Return the committed offsets of each group, or the error."""
    turns = asyncio.Semaphore(_GROUPS_AT_A_TIME)

    async def ask(group: str) -> Committed | MinibrokerError:
        async with turns:
            try:
                found = await admin.list_group_offsets(group)
            except MinibrokerError as error:
                return error
        return {partition: offset for partition, offset in found.items() if offset is not None}

    answers = dict(zip(groups, await asyncio.gather(*map(ask, groups)), strict=True))
    return (
        {group: answer for group, answer in answers.items() if not isinstance(answer, MinibrokerError)},
        {group: str(answer) for group, answer in answers.items() if isinstance(answer, MinibrokerError)},
    )


def _partitions(
    committed: Committed, assigned: set[TopicPartition], topics: Mapping[str, TopicDescription]
) -> list[TopicPartition]:
    """Return the assigned partitions, and all of topics with commits."""
    names = {partition.topic for partition in committed}
    others = {
        TopicPartition(name, each.partition) for name in names if name in topics for each in topics[name].partitions
    }
    return sorted({*committed, *assigned, *others})

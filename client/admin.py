"""Creating, enlarging, describing and deleting topics; deleting records, looking up offsets; groups; describing the
cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Literal, NamedTuple, Protocol, TypeVar

from minibroker.client.administering import groups as groups_
from minibroker.client.administering.configs import (
    ConfigChange,
    ConfigEntry,
    ConfigErrors,
    ConfigResource,
    alter_request,
    altered,
    check_changes,
    check_resources,
    describe_request,
    described,
)
from minibroker.client.administering.deletion import delete_records
from minibroker.client.administering.elections import LeaderElections
from minibroker.client.administering.groups import (
    GroupDescription,
    GroupErrors,
    GroupListing,
    check_group,
    check_groups,
    check_states,
)
from minibroker.client.administering.new_partitions import Growth
from minibroker.client.administering.offsets import OffsetAndTimestamp, list_offsets
from minibroker.client.administering.reassignment import Alteration, Listing, PartitionReassignment
from minibroker.client.administering.timeline import TimelineRead, TimelineReader
from minibroker.client.cluster.calls import ends_with_its_client
from minibroker.client.cluster.connections import OVERDUE_S, Purpose, exponential_backoff_s
from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.errors import BrokersFailed, InvalidSetting, PartitionErrors, TopicErrors, no_such_partition
from minibroker.client.group.commits import OffsetAndMetadata, check_offsets
from minibroker.client.log import Logger
from minibroker.client.settings import (
    Address,
    check_boolean,
    check_by_partition,
    check_choice,
    check_integer,
    check_ms,
    check_names,
    check_partitions,
    check_text,
    check_topic_name,
    knows_other_names,
)
from minibroker.client.stalls import LOOK_EVERY_S, Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.apis import (
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    DESCRIBE_LOG_DIRS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_GROUPS,
    METADATA,
    Api,
)
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import (
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    as_sentence,
    error_of,
)
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_CONTROLLER, NO_LEADER, ElectionType, TopicPartition
from minibroker.protocol.topic_ids import NO_TOPIC, NONCE_BYTES, is_older
from minibroker.protocol.world import World

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)

logger = Logger("minibroker.client")

KNOWN_WITHIN_S = 3.0
"""How long brokers may take to hear of a new topic before its creator goes on without them."""
_FIRST_LOOK_S = 0.005

FORWARDER_PATIENCE_S = 5.0
"""How long a broker that takes a request to the controller may be silent before another one is asked: it may hang, or
be cut off itself. Doubled after each time, as it may be the controller that takes long."""


OffsetSpec = Literal["earliest", "latest", "max_timestamp"] | int
_SPECS = {"earliest": m.EARLIEST_TIMESTAMP, "latest": m.LATEST_TIMESTAMP, "max_timestamp": m.MAX_TIMESTAMP}


class NewTopic(NamedTuple):
    """A topic to create. None, for partitions and replication factor, is the brokers' default."""

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, str] = {}
    assignments: Sequence[Sequence[int]] | None = None
    """Broker ids for each partition, the preferred leader first. Replaces the two numbers."""


class PartitionDescription(NamedTuple):
    partition: int
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]


class TopicDescription(NamedTuple):
    name: str
    topic_id: str
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]
    """Ascending."""


class BrokerDescription(NamedTuple):
    id: int
    host: str
    port: int
    rack: str | None


class ClusterDescription(NamedTuple):
    cluster_id: str | None
    controller_id: int | None
    """None if there is no controller now."""
    brokers: tuple[BrokerDescription, ...]
    """Those alive, ascending."""


class LogDirReplica(NamedTuple):
    size: int
    """In bytes."""
    offset_lag: int
    """How far the log ends before the high watermark; -1: not known."""
    is_future: bool


class LogDirDescription(NamedTuple):
    """One log directory of a broker (KIP-113, KIP-827)."""

    log_dir: str
    error: str | None
    """Why it is offline, so that nothing else is known of it; None where it is not."""
    replicas: Mapping[TopicPartition, LogDirReplica]
    total_bytes: int | None
    usable_bytes: int | None
    """Of the file system that it is on."""


class Admin(Client):
    """Administration. Use it as `async with Admin("host:9092") as admin`, or call `start` and `close`.

    Every call retries what may succeed by itself (a moved controller, a lost connection) until
    `default_api_timeout_ms`, and then raises BrokerError or NetworkError. If a connection broke before the answer,
    the next attempt finds out what the one before has done: a topic that somebody else created is an error, and one
    that was created in the meantime is never deleted. What this call created and somebody else has deleted since is not
    created again by the broker that created it. (A topic may still be created after the call has given up.)

    Not thread-safe, and for one event loop, the one in which it is started: a call from another, to `close` as well,
    raises WrongEventLoop. An admin client that is dropped without `close` warns (ResourceWarning).
    """

    _noun = "admin client"

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str = "minibroker-admin",
        request_timeout_ms: float = 30_000,
        default_api_timeout_ms: float = 60_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 300_000,
        world: World | None = None,
    ) -> None:
        self._api_timeout_s = check_ms("default_api_timeout_ms", default_api_timeout_ms, lowest=1)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
        )
        self._coordinators = Coordinators(self._runtime)
        self._failed_at: dict[str, float] = {}
        """Brokers that could not be reached, or did not do what they were asked to, by `Connection.address`, and when
        that was."""

    def __repr__(self) -> str:
        return f"<Admin {self._state}, bootstrap={self._runtime.bootstrap}>"

    # -- topics --

    @ends_with_its_client
    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        assignments: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Create a topic; on return its partitions have leaders, and the brokers know it. (A broker that has not heard
        of it after 3 s, because it is cut off or hangs, is not waited for.)

        Raises BrokerError (TOPIC_ALREADY_EXISTS, INVALID_REPLICATION_FACTOR, REQUEST_TIMED_OUT if the leaders are not
        there in time, ...), NetworkError. If these say so, the topic may yet be created.
        """
        topic = NewTopic(name, partitions, replication_factor, configs or {}, assignments)
        await _single(name, self.create_topics([topic]))

    @ends_with_its_client
    async def create_topics(self, topics: Iterable[NewTopic]) -> None:
        """Create several topics. Raises TopicErrors naming those that failed; the others are created. Raises
        InvalidSetting."""
        given: object = topics
        if isinstance(given, NewTopic | str):
            raise InvalidSetting("topics", topics, "give a list of NewTopic, or call create_topic")
        creatable = [_creatable(topic) for topic in topics]
        for name, count in Counter(topic.name for topic in creatable).items():
            if count > 1:
                raise InvalidSetting("topics", name, f"it is named {count} times: name it once")
        creation = _Creation(creatable, self._runtime.world.random)
        errors = await self._change_topics(creation)
        created = [name for name in creation.names() if name not in errors]
        if created:
            await self._until_known(dict.fromkeys(created, 0))
        if errors:
            raise TopicErrors(errors)

    @ends_with_its_client
    async def create_partitions(
        self, topic: str, count: int, *, assignments: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Give a topic more partitions, so that there are `count`; on return they have leaders, and the brokers know
        them. Producers and consumers find them with their next refresh of metadata (`metadata_max_age_ms`); consumers
        of whole topics read them from their beginning. Records of one key may end up in another partition than before.

        `assignments`: broker ids for each of the new partitions, the preferred leader first. A topic of that name that
        is created during the call stays as it is. Raises BrokerError (INVALID_PARTITIONS where there are as many
        already, UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT, REQUEST_TIMED_OUT if the leaders are not there
        in time, ...), NetworkError. If these say so, the partitions may yet be added.
        """
        (name,) = check_names("topic", [topic])
        check_integer("count", count, 1, 10_000)
        errors = await self._change_topics(Growth(name, count, assignments))
        if errors:
            raise errors[name]
        await self._until_known({name: count})

    @ends_with_its_client
    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records: the one that has the name now, and none that is created later. On return
        it is gone, and the name is free.

        Raises BrokerError (UNKNOWN_TOPIC_OR_PARTITION; TOPIC_DELETION_DISABLED; REQUEST_TIMED_OUT, with what it waits
        for, if it is not gone in time, as while a broker that has a replica is down: it then goes on by itself; ...),
        NetworkError.
        """
        await _single(name, self.delete_topics([name]))

    @ends_with_its_client
    async def delete_topics(self, names: Iterable[str]) -> None:
        """Delete several topics. Raises TopicErrors naming those that failed; the others are deleted."""
        errors = await self._change_topics(_Deletion(check_names("names", names)))
        if errors:
            raise TopicErrors(errors)

    @ends_with_its_client
    async def alter_partition_reassignments(self, reassignments: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        """Let each partition have these replicas, the preferred leader first; None: go back to those that it had before
        the reassignment that is under way. One that is under way already is replaced.

        On return it is on record and has begun. It goes on by itself, whichever controller is in office, until all of
        the new replicas are in sync: `list_partition_reassignments` shows it. Raises PartitionErrors naming those that
        were refused (INVALID_REPLICA_ASSIGNMENT, UNKNOWN_TOPIC_OR_PARTITION, NO_REASSIGNMENT_IN_PROGRESS); the others
        are reassigned.
        """
        alteration = Alteration(reassignments)
        errors = await self._change_topics(alteration)
        if errors:
            raise PartitionErrors({alteration.partitions[name]: error for name, error in errors.items()})

    @ends_with_its_client
    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The reassignments that are under way, of these partitions or of all."""
        listing = Listing(partitions)
        for error in (await self._change_topics(listing)).values():
            raise error
        return listing.found

    @ends_with_its_client
    async def list_topics(self, *, internal: bool = False) -> list[str]:
        """The names of all topics, sorted; with `internal`, also those of the brokers' own topics."""
        check_boolean("internal", internal)
        response = await self._metadata(None)
        return sorted(topic.name for topic in response.topics if internal or not topic.is_internal)

    @ends_with_its_client
    async def describe_topic(self, name: str) -> TopicDescription:
        """Raises BrokerError: UNKNOWN_TOPIC_OR_PARTITION."""
        try:
            return (await self.describe_topics([name]))[name]
        except TopicErrors as error:
            raise error.errors[name] from None

    @ends_with_its_client
    async def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        """What the topics, or all of them, look like now, by name. Raises TopicErrors for those that do not exist."""
        response = await self._metadata(None if names is None else check_names("names", names))
        errors: dict[str, MinibrokerError] = {
            topic.name: BrokerError(error_of(topic.error_code), f"topic {topic.name!r}")
            for topic in response.topics
            if topic.error_code != ErrorCode.NONE and not topic.partitions
        }
        if errors:
            raise TopicErrors(errors)
        return {topic.name: _description(topic) for topic in sorted(response.topics, key=lambda topic: topic.name)}

    @ends_with_its_client
    async def describe_cluster(self) -> ClusterDescription:
        """The brokers that are alive, and which of them is the controller."""
        response = await self._metadata([])
        brokers = (BrokerDescription(b.node_id, b.host, b.port, b.rack) for b in response.brokers)
        controller = None if response.controller_id == NO_CONTROLLER else response.controller_id
        return ClusterDescription(response.cluster_id, controller, tuple(sorted(brokers)))

    @ends_with_its_client
    async def describe_log_dirs(
        self, broker_ids: Iterable[int] | None = None
    ) -> dict[int, tuple[LogDirDescription, ...]]:
        """What is in the log directories of these brokers, or of all that are alive, in the order of their `log.dirs`.

        Raises BrokersFailed where one of them does not answer in time, or is not alive: with what the others have said
        (`results`), and an error for each that has not (`errors`). Raises NetworkError where no broker answers at all.
        """
        cluster = await self.describe_cluster()
        alive = {broker.id: Address(broker.host, broker.port) for broker in cluster.brokers}
        wanted = sorted(alive) if broker_ids is None else list(dict.fromkeys(broker_ids))
        errors: dict[int, MinibrokerError] = {}
        for broker_id in wanted:
            if broker_id not in alive:
                errors[broker_id] = NetworkError(
                    f"it is not alive (those that are: {', '.join(map(str, alive))}): see `minibroker status`"
                )
        tasks = {
            broker_id: asyncio.create_task(self._log_dirs_of(alive[broker_id]))
            for broker_id in wanted
            if broker_id in alive
        }
        results: dict[int, tuple[LogDirDescription, ...]] = {}
        stalls: Stalls[int] = Stalls(self._runtime.connections.client_id, lambda broker_id: f"broker {broker_id}")
        try:
            while pending := [task for task in tasks.values() if not task.done()]:
                await asyncio.wait(pending, timeout=LOOK_EVERY_S)
                # One that has failed goes on to count as waiting: nothing is over there.
                silent = [
                    broker_id for broker_id, task in tasks.items() if not task.done() or task.exception() is not None
                ]
                stalls.look(self._runtime.clock.monotonic(), silent, lambda _: "no answer to DescribeLogDirs yet")
            for broker_id, task in tasks.items():
                try:
                    results[broker_id] = task.result()
                except (NetworkError, BrokerError, InvalidMessage) as error:
                    errors[broker_id] = error
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        if errors:
            raise BrokersFailed(errors, results)
        return results

    @ends_with_its_client
    async def timeline(self, since_ms: int = 0) -> TimelineRead:
        """What the controllers of this cluster did (from that time on, by the brokers' clocks), as far as the brokers
        that answer remember it: each the last 2,000 entries of its own controller.

        Raises NetworkError where no broker answers at all."""
        return await self.timeline_reader(since_ms).read()

    def timeline_reader(self, since_ms: int = 0) -> TimelineReader:
        """Reads the same, and then what is new, again and again."""
        check_integer("since_ms", since_ms, 0, 1 << 62)
        return TimelineReader(self._runtime, self._metadata, since_ms)

    async def _log_dirs_of(self, address: Address) -> tuple[LogDirDescription, ...]:
        response = await self._ask_at(address, DESCRIBE_LOG_DIRS, m.DescribeLogDirsRequest(None))
        return tuple(_log_dir(result) for result in response.results)

    async def _ask_at(
        self, address: Address | None, api: Api[Request, Response], body: Request, deadline: float | None = None
    ) -> Response:
        """That very broker, or any (None), until it has answered: for what may be repeated. Raises NetworkError,
        BrokerError."""
        if deadline is None:
            deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        attempts = 0
        while True:
            self._check_running()
            remaining_s = max(0.001, deadline - self._runtime.clock.monotonic())
            timeout_s = min(self._runtime.request_timeout_s, remaining_s)
            try:
                if address is None:
                    return await self._runtime.metadata.request_any(api, body, timeout_s=timeout_s)
                connection = await self._runtime.connection_soon(address)
                return await connection.request(api, body, timeout_s=timeout_s)
            except NetworkError as error:
                attempts += 1
                pause_s = exponential_backoff_s(attempts, self._runtime.retry_backoff_s, self._runtime.world.random)
                if self._runtime.clock.monotonic() + pause_s >= deadline:
                    hint = "" if address is None else ": see `minibroker status`"  # where all were asked, it is there
                    raise type(error)(f"{error}{hint}") from error
            await asyncio.sleep(pause_s)

    # -- settings --

    @ends_with_its_client
    async def describe_configs(
        self,
        resources: Iterable[ConfigResource],
        *,
        names: Collection[str] | None = None,
        synonyms: bool = False,
        documentation: bool = False,
    ) -> dict[ConfigResource, dict[str, ConfigEntry]]:
        """The settings of topics and brokers as they hold now, by name, and where each comes from (KIP-226); only those
        of these `names`, if there are any. Of `ConfigResource.of_all_brokers` those that are set.

        Raises ConfigErrors with an error for each resource that failed: BrokerError (UNKNOWN_TOPIC_OR_PARTITION,
        INVALID_CONFIG where what is in ZooKeeper makes no sense, ...), NetworkError where a broker cannot be reached.
        """
        asked = check_resources(resources)
        check_boolean("synonyms", synonyms)
        check_boolean("documentation", documentation)
        results: dict[ConfigResource, dict[str, ConfigEntry]] = {}

        async def ask(address: Address | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
            body = describe_request(some, names, synonyms, documentation)
            response = await self._ask_at(address, DESCRIBE_CONFIGS, body)
            found, errors = described(some, response)
            results.update(found)
            return errors

        errors = await self._of_each(asked, ask)
        if errors:
            raise ConfigErrors(errors, results)
        return {resource: results[resource] for resource in asked}

    @ends_with_its_client
    async def incremental_alter_configs(
        self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool = False
    ) -> None:
        """Change settings of topics and brokers (KIP-339), or only find out whether that could be done. On return they
        are in ZooKeeper, for good, and every broker that lives hears of them soon; one that does not, when it is back.

        The changes of one resource are carried out together or not at all. What somebody else changes at the same time
        is kept, where it is another setting. A topic that is created while this goes on gets nothing that was meant for
        the one before it. To repeat a call does no harm.

        Raises ConfigErrors with an error for each resource that failed; the others are changed: BrokerError
        (INVALID_CONFIG, UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST, REQUEST_TIMED_OUT: then it may yet be changed),
        NetworkError where a broker cannot be reached.
        """
        asked = check_changes(changes)
        check_boolean("validate_only", validate_only)

        async def ask(address: Address | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
            deadline = self._runtime.clock.monotonic() + self._api_timeout_s
            known: dict[ConfigResource, tuple[str, int]] = {}
            errors: dict[ConfigResource, MinibrokerError] = {}
            attempts = 0
            while True:
                body = alter_request({resource: changes[resource] for resource in some}, validate_only, known)
                try:
                    response = await self._ask_at(address, INCREMENTAL_ALTER_CONFIGS, body, deadline)
                except RequestTimedOut as error:
                    if validate_only:
                        raise
                    raise RequestTimedOut(f"{error}. They may yet be changed") from error
                refused, versions = altered(some, response)
                known |= versions
                some = [resource for resource in some if resource in versions]
                errors |= {resource: error for resource, error in refused.items() if resource not in versions}
                if not some:
                    return errors
                if attempts:  # the first answer was only a look-up
                    pause_s = exponential_backoff_s(attempts, self._runtime.retry_backoff_s, self._runtime.world.random)
                    if self._runtime.clock.monotonic() + pause_s >= deadline:
                        return errors | {resource: refused[resource] for resource in some}
                    await asyncio.sleep(pause_s)
                attempts += 1

        errors = await self._of_each(asked, ask)
        if errors:
            raise ConfigErrors(errors)

    async def _of_each(
        self,
        resources: Sequence[ConfigResource],
        ask: Callable[[Address | None, list[ConfigResource]], Awaitable[dict[ConfigResource, MinibrokerError]]],
    ) -> dict[ConfigResource, MinibrokerError]:
        """Ask for the settings of each broker there, and for all others anywhere. A broker that cannot be reached where
        it is said to be is looked for at all addresses that are known: it may be behind one of them, and any broker can
        correct the `advertised.listeners` of another. Returns what went wrong."""
        self._check_running()
        places: dict[int | None, list[ConfigResource]] = {}
        for resource in resources:
            places.setdefault(resource.broker_id, []).append(resource)
        brokers: dict[int, Address] = {}
        if any(broker_id is not None for broker_id in places):
            cluster = await self.describe_cluster()
            brokers = {broker.id: Address(broker.host, broker.port) for broker in cluster.brokers}

        async def ask_at(broker_id: int | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
            try:
                if broker_id is not None and broker_id not in brokers:
                    raise NetworkError(
                        f"broker {broker_id} is not alive (those that are: {', '.join(map(str, brokers))}): start it, "
                        f"or see `minibroker status`"
                    )
                if broker_id is None:
                    return await ask(None, some)
                if not await self._is_reachable(brokers[broker_id]):
                    for other in self._runtime.metadata.addresses():
                        if other == brokers[broker_id] or not await self._is_reachable(other):
                            continue
                        with suppress(TimeoutError, NetworkError):
                            async with asyncio.timeout(FORWARDER_PATIENCE_S):
                                errors = await ask(other, some)
                            if not any(_is_refusal_of_another(error) for error in errors.values()):
                                return errors
                return await ask(brokers[broker_id], some)
            except (NetworkError, BrokerError, InvalidMessage) as error:
                return dict.fromkeys(some, error)

        # Together: what one broker that does not answer takes, it takes from no other.
        answers = await asyncio.gather(*(ask_at(broker_id, some) for broker_id, some in places.items()))
        return {resource: error for errors in answers for resource, error in errors.items()}

    async def _is_reachable(self, address: Address) -> bool:
        try:
            await self._runtime.connection_soon(address)
        except NetworkError:
            return False
        return True

    async def _metadata(self, topics: list[str] | None) -> m.MetadataResponse:
        """What a broker says. If it has not been told of all topics yet, or of all partitions of one, it or another
        broker is asked again."""
        deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        while True:
            self._check_running()
            remaining_s = max(0.0, deadline - self._runtime.clock.monotonic())
            response = await self._runtime.metadata.request_any(
                METADATA, m.MetadataRequest(topics), timeout_s=remaining_s
            )
            is_partial = not response.brokers or any(
                t.error_code == ErrorCode.LEADER_NOT_AVAILABLE and not t.partitions for t in response.topics
            )
            if not is_partial or remaining_s <= self._runtime.retry_backoff_s:
                return response
            await asyncio.sleep(self._runtime.retry_backoff_s)

    # -- at the leaders --

    @ends_with_its_client
    async def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records of each partition that come before its offset; -1: all that are committed by now. Returns
        the low watermark of each: no replica that may become leader has records below it, and none will, whatever
        processes are killed or hosts lose their power. (An unclean election may bring them back, and a deposed leader
        that is cut off may serve them until it hears of its successor.) An offset before the first one deletes nothing,
        and is no error, so a call may be repeated.

        Nothing is deleted in a topic of that name that is created later. Disk space is freed later, a segment at a
        time. Raises PartitionErrors with the low watermarks of those that succeeded (`results`) and an error for each
        that failed (`errors`), which says so where records may yet be deleted: BrokerError (OFFSET_OUT_OF_RANGE above
        the high watermark, POLICY_VIOLATION with cleanup.policy=compact, NOT_ENOUGH_REPLICAS, REQUEST_TIMED_OUT,
        UNKNOWN_TOPIC_OR_PARTITION, ...), NetworkError. Raises NetworkError itself where no broker answers at all.
        """
        self._check_running()
        deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        asked = check_by_partition("offsets", offsets, 5)
        for offset in asked.values():
            check_integer("offset", offset, m.UP_TO_HIGH_WATERMARK, 2**63 - 1)
        if not asked:
            return {}
        response = await self._metadata(sorted({partition.topic for partition in asked}))
        topics = {topic.name: topic for topic in response.topics}
        errors = {}
        for partition in asked:
            problem = _missing(partition, topics.get(partition.topic))
            if problem is not None:
                errors[partition] = problem
        there = {partition: offset for partition, offset in asked.items() if partition not in errors}
        ids = {partition.topic: topics[partition.topic].topic_id for partition in there}
        remaining_s = max(0.001, deadline - self._runtime.clock.monotonic())
        deleted = await delete_records(self._runtime, there, ids, remaining_s)
        for partition, error in deleted.errors.items():
            errors[partition] = _or_yet(error, _MAY_YET) if partition in deleted.undecided else error
        if errors:
            raise PartitionErrors(errors, deleted.low_watermarks)
        return deleted.low_watermarks

    @ends_with_its_client
    async def list_offsets(
        self, offsets: Mapping[TopicPartition, OffsetSpec]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the offset that is asked for: "earliest", the first in the log; "latest", the high
        watermark; "max_timestamp", the record with the largest timestamp, the first of several (KIP-734); or
        milliseconds since 1970, the first record at or after that time. Of records only those below the high watermark
        count. None: there is no such record. Raises BrokerError, NetworkError."""
        self._check_running()
        asked = {}
        for partition, spec in check_by_partition("offsets", offsets, "'latest'").items():
            if isinstance(spec, str):
                check_choice("offsets", spec, list(_SPECS))
                asked[partition] = _SPECS[spec]
            else:
                asked[partition] = check_integer("offsets", spec, 0, 1 << 62)
        return await list_offsets(self._runtime, asked, self._api_timeout_s)

    # -- groups --

    @ends_with_its_client
    async def list_groups(self, states: Iterable[str] | None = None) -> list[GroupListing]:
        """All groups, or those in these states, sorted by name: what the brokers that are alive say, each of the groups
        that it coordinates.

        Raises BrokersFailed where one of them has not answered in time: with what the others have said (`results`, by
        broker), and an error for each that has not (`errors`). Raises NetworkError where no broker answers at all.
        """
        self._check_running()
        request = g.ListGroupsRequest(check_states(states))
        deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        attempts = 0
        while True:
            # All of them again, since the groups of a broker that failed have gone to others.
            cluster = await self.describe_cluster()
            timeout_s = min(OVERDUE_S * 2.0**attempts, self._runtime.request_timeout_s)
            answers = await asyncio.gather(*(self._groups_at(each, request, timeout_s) for each in cluster.brokers))
            by_broker = {broker.id: answer for broker, answer in zip(cluster.brokers, answers, strict=True)}
            found = {broker: answer for broker, answer in by_broker.items() if isinstance(answer, list)}
            if len(found) == len(by_broker):
                return sorted({each.group: each for groups in found.values() for each in groups}.values())
            attempts += 1
            pause_s = exponential_backoff_s(attempts, self._runtime.retry_backoff_s, self._runtime.world.random)
            errors = {broker: answer for broker, answer in by_broker.items() if isinstance(answer, MinibrokerError)}
            is_final = any(isinstance(error, BrokerError) and not error.retriable for error in errors.values())
            if is_final or self._runtime.clock.monotonic() + pause_s >= deadline:
                raise BrokersFailed(errors, found)
            await asyncio.sleep(pause_s)

    async def _groups_at(
        self, broker: BrokerDescription, request: g.ListGroupsRequest, timeout_s: float
    ) -> list[GroupListing] | MinibrokerError:
        """Those that it coordinates."""
        try:
            connection = await self._runtime.connection_soon(Address(broker.host, broker.port))
            response = await connection.request(LIST_GROUPS, request, timeout_s=timeout_s)
        except (NetworkError, BrokerError, InvalidMessage) as error:
            return error
        if response.error_code != ErrorCode.NONE:
            return BrokerError(error_of(response.error_code), LIST_GROUPS.name)
        return [GroupListing(each.group_id, each.protocol_type, each.group_state) for each in response.groups]

    @ends_with_its_client
    async def describe_groups(self, groups: Iterable[str]) -> dict[str, GroupDescription]:
        """State, coordinator, assignor and members of these groups, by name.

        Raises GroupErrors with what was found (`results`) and an error for each other group (`errors`): BrokerError
        (GROUP_ID_NOT_FOUND; COORDINATOR_NOT_AVAILABLE while nobody leads the partition of __consumer_offsets that has
        the group, ...), NetworkError.
        """
        self._check_running()
        results, errors = await groups_.of_each(
            check_groups("groups", groups),
            lambda group: groups_.describe(self._coordinators, group, self._api_timeout_s),
        )
        if errors:
            raise GroupErrors(errors, results)
        return results

    @ends_with_its_client
    async def delete_groups(self, groups: Iterable[str]) -> None:
        """Delete groups without members, with all that they have committed.

        Raises GroupErrors with an error for each that failed; the others are deleted: BrokerError (NON_EMPTY_GROUP,
        which names the members; GROUP_ID_NOT_FOUND, ...), NetworkError.
        """
        self._check_running()
        _, errors = await groups_.of_each(
            check_groups("groups", groups),
            lambda group: groups_.delete(self._coordinators, group, self._api_timeout_s),
        )
        if errors:
            raise GroupErrors(errors)

    @ends_with_its_client
    async def list_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What a group has committed: of these partitions, None where that is nothing; or of all of which it has. What
        it has committed in a topic that was deleted and created again since counts as nothing, as it does for
        consumers. A group that does not exist has committed nothing. Raises BrokerError, NetworkError."""
        self._check_running()
        asked = None if partitions is None else check_partitions("partitions", partitions)
        check_group("group", group)
        found = await groups_.committed(self._coordinators, group, asked, self._api_timeout_s)
        ids: dict[str, str] = {}
        if names := sorted({partition.topic for partition, each in found.items() if each.topic_id}):
            ids = {topic.name: topic.topic_id for topic in (await self._metadata(names)).topics}
        offsets: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(asked or ())
        for partition, each in found.items():
            if not is_older(each.topic_id, ids.get(partition.topic, "")):
                offsets[partition] = each.offset
        return offsets

    @ends_with_its_client
    async def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        """Commit offsets for a group that has no members, or does not exist yet. To repeat a call does no harm. Of a
        topic that is created again during the call, nothing is committed.

        Raises PartitionErrors with an error for each that was refused; the others are committed: BrokerError
        (UNKNOWN_TOPIC_OR_PARTITION, OFFSET_METADATA_TOO_LARGE, ...). Raises BrokerError (NON_EMPTY_GROUP, which names
        the members), NetworkError where nothing is known to be committed.
        """
        self._check_running()
        deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        asked = check_offsets(offsets)
        check_group("group", group)
        if not asked:
            return
        response = await self._metadata(sorted({partition.topic for partition in asked}))
        topics = {topic.name: topic for topic in response.topics}
        problems = {partition: _missing(partition, topics.get(partition.topic)) for partition in asked}
        errors = {partition: problem for partition, problem in problems.items() if problem is not None}
        there = {partition: offset for partition, offset in asked.items() if partition not in errors}
        if there:
            ids = {name: topic.topic_id for name, topic in topics.items()}
            remaining_s = max(0.001, deadline - self._runtime.clock.monotonic())
            errors |= await groups_.commit(self._coordinators, group, there, ids, remaining_s)
        if errors:
            raise PartitionErrors(errors)

    @ends_with_its_client
    async def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Delete what a group has committed of these partitions. One of which it has committed nothing is no error.

        Raises PartitionErrors with an error for each that was refused; of the others it is deleted: BrokerError
        (GROUP_SUBSCRIBED_TO_TOPIC while members read the topic). Raises BrokerError (GROUP_ID_NOT_FOUND,
        NON_EMPTY_GROUP for a group whose members are no consumers), NetworkError.
        """
        self._check_running()
        asked = check_partitions("partitions", partitions)
        errors = await groups_.delete_offsets(
            self._coordinators, check_group("group", group), asked, self._api_timeout_s
        )
        if errors:
            raise PartitionErrors(errors)

    # -- at the controller --

    @ends_with_its_client
    async def elect_leaders(
        self, election_type: Literal["preferred", "unclean"], partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, bool]:
        """Elect leaders for these partitions, or for all (KIP-460). Whether each was elected: False where that was not
        needed, perhaps since an earlier attempt of this very call had done it. Of all partitions those are left out
        which needed no election.

        "preferred": the first of the partition's replicas leads, if it is alive and in sync; nothing is lost, and
        writes go on with the new leader. "unclean": a partition that has no leader gets one, if any of its replicas
        lives: one that has all acknowledged records if there is such a one, or else **what that replica lacks is lost
        for good**.

        Raises PartitionErrors with the results of those that succeeded (`results`) and an error for each that failed
        (`errors`): BrokerError (PREFERRED_LEADER_NOT_AVAILABLE, ELIGIBLE_LEADERS_NOT_AVAILABLE,
        UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION for a topic that is being deleted, REQUEST_TIMED_OUT where
        the leader was elected and the brokers do not show it yet). Raises BrokerError and NetworkError where the
        controller does not answer.
        """
        check_choice("election_type", election_type, [name.lower() for name in ElectionType.__members__])
        asked = None if partitions is None else check_partitions("partitions", partitions)
        if asked is not None and not asked:
            return {}
        elections = LeaderElections(ElectionType[election_type.upper()], asked)
        for error in (await self._change_topics(elections)).values():
            raise error
        return elections.outcome()

    async def _change_topics(self, change: _Change[Request, Response]) -> dict[str, MinibrokerError]:
        """Ask the controller until each topic has succeeded or failed. Returns what went wrong, by topic."""
        self._check_running()
        api = change.api
        deadline = self._runtime.clock.monotonic() + self._api_timeout_s
        errors: dict[str, MinibrokerError] = {}
        pending = change.names()
        attempts = 0
        was_sent = False
        last_error: MinibrokerError = NetworkError(
            f"{api.name}: no broker could be reached in time (see `minibroker status`)"
        )
        silences = 0
        stalls: Stalls[str] = Stalls(self._runtime.connections.client_id)
        while pending:
            connection = None
            try:
                async with asyncio.timeout(max(0.0, deadline - self._runtime.clock.monotonic())):
                    connection = await self._controller(api)
                remaining_s = max(0.001, deadline - self._runtime.clock.monotonic())
                timeout_s = min(self._runtime.request_timeout_s, remaining_s)
                # The broker may take that long, and then has a second more to say that it did not succeed.
                patience_s = timeout_s + 1.0
                cluster = self._runtime.metadata.cluster
                controller_id = cluster.controller_id
                if connection.address != _connection_address(cluster.brokers.get(controller_id)):
                    patience_s = min(patience_s, FORWARDER_PATIENCE_S * 2.0**silences)
                body = change.request(pending, round(timeout_s * 1_000), cluster.controller_epoch)
                was_sent = True
                response = await self._runtime.ask(
                    connection,
                    api,
                    body,
                    timeout_s=patience_s,
                    is_in_charge=partial(self._is_controller, controller_id),
                )
            except TimeoutError:
                pass  # what the attempt before ran into says more
            except (NetworkError, InvalidMessage) as error:
                last_error = error
                silences += isinstance(error, RequestTimedOut)
                self._note_failure(connection)
            except BrokerError as error:
                last_error = error
                self._note_failure(connection)
                if not error.retriable:
                    raise
            else:
                answers = change.results(response)
                still_pending = []
                last_error = BrokerError(ErrorCode.NOT_CONTROLLER, api.name)
                for name in pending:
                    code, message = answers.get(name, (ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out"))
                    problem = BrokerError(error_of(code), message or name, is_complete=bool(message))
                    if code == ErrorCode.NONE:
                        continue
                    if problem.retriable and code not in change.final:
                        still_pending.append(name)
                        last_error = problem
                    else:
                        errors[name] = problem
                pending = still_pending
            if pending:
                attempts += 1
                if attempts == 1 and change.is_prepared:
                    continue
                pause_s = exponential_backoff_s(attempts, self._runtime.retry_backoff_s, self._runtime.world.random)
                if self._runtime.clock.monotonic() + pause_s >= deadline:
                    errors |= dict.fromkeys(pending, _or_yet(last_error, change.may_yet) if was_sent else last_error)
                    break
                logger.debug("%s: %s of %s: %s", self._runtime.connections.client_id, api.name, pending, last_error)
                waiting = {api.name: str(last_error)}
                stalls.look(self._runtime.clock.monotonic(), waiting, waiting.__getitem__)
                await asyncio.sleep(pause_s)
                await self._refresh(deadline)
                self._check_running()
        if not pending:
            stalls.look(self._runtime.clock.monotonic(), (), str)
        return errors

    async def _until_known(self, topics: Mapping[str, int]) -> None:
        """Wait until every broker that answers knows the topics, with at least so many partitions: the next client may
        ask any of them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN_S), asyncio.TaskGroup() as group:
                for address in self._runtime.metadata.cluster.brokers.values():
                    group.create_task(self._until_known_at(address, topics))

    async def _until_known_at(self, address: Address, topics: Mapping[str, int]) -> None:
        attempts = 0
        with suppress(NetworkError, InvalidMessage, BrokerError):
            connection = await self._runtime.connections.open(address, Purpose.REQUESTS)
            while True:
                response = await connection.request(METADATA, m.MetadataRequest(list(topics)), timeout_s=KNOWN_WITHIN_S)
                if all(t.error_code == ErrorCode.NONE and len(t.partitions) >= topics[t.name] for t in response.topics):
                    return
                attempts += 1
                await asyncio.sleep(exponential_backoff_s(attempts, _FIRST_LOOK_S, self._runtime.world.random))

    async def _controller(self, api: Api[Request, Response]) -> Connection:
        """To the controller, or to a broker that can ask it (KIP-590): where this client cannot reach the controller,
        or not soon, or its listener is not the controller's. Of several such brokers the one that failed longest ago.

        Raises NetworkError, BrokerError(NOT_CONTROLLER)."""
        cluster = self._runtime.metadata.cluster
        if cluster.controller_id == NO_CONTROLLER or not cluster.brokers:
            raise BrokerError(
                ErrorCode.NOT_CONTROLLER, f"{api.name}: no controller can be reached (see `minibroker status`)"
            )

        def order(broker_id: int) -> tuple[bool, float]:
            failed_at = self._failed_at.get(_connection_address(cluster.brokers[broker_id]), float("-inf"))
            return broker_id != cluster.controller_id, failed_at

        reasons: dict[str, None] = {}
        for broker_id in sorted(cluster.brokers, key=order):
            address = cluster.brokers[broker_id]
            try:
                return await self._runtime.connection_soon(address)
            except NetworkError as error:
                reasons[str(error)] = None
                self._runtime.metadata.suspect(address)
                self._failed_at[_connection_address(address)] = self._runtime.clock.monotonic()
        raise NetworkError("; ".join(reasons))

    def _note_failure(self, connection: Connection | None) -> None:
        if connection is not None:
            self._failed_at[connection.address] = self._runtime.clock.monotonic()

    def _is_controller(self, broker_id: int) -> bool:
        return self._runtime.metadata.cluster.controller_id in (broker_id, NO_CONTROLLER)

    async def _refresh(self, deadline: float) -> None:
        """Ask who the controller is now."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._runtime.clock.monotonic())):
                await self._runtime.metadata.refreshed()
        except TimeoutError:
            return  # the attempt that follows is the last, and says what is wrong


_MAY_YET = "They may yet be deleted; to ask for it again does no harm. See `minibroker status` for replicas out of sync"


def _missing(partition: TopicPartition, topic: m.MetadataTopic | None) -> MinibrokerError | None:
    """Why there is nothing to ask for."""
    if topic is None or not topic.partitions:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else error_of(topic.error_code)
        return BrokerError(code, partition.topic)
    if all(one.partition_index != partition.partition for one in topic.partitions):
        return no_such_partition(partition, len(topic.partitions))
    return None


class _Change(Protocol[Request, Response]):
    """A change of several topics that is asked of the controller until it is done."""

    @property
    def api(self) -> Api[Request, Response]: ...

    @property
    def final(self) -> Collection[ErrorCode]:
        """Errors for a topic that are retriable elsewhere, but not here."""

    @property
    def is_prepared(self) -> bool:
        """Whether the first answer was only a look-up: the change can be requested now, without a pause."""

    @property
    def may_yet(self) -> str:
        """A sentence about what may happen to a topic although the caller was told of an error."""

    def names(self) -> list[str]: ...

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> Request: ...

    def results(self, response: Response) -> dict[str, tuple[int, str]]:
        """Error code and message for each topic; NONE: some attempt has done it."""


class _Creation:
    """Each topic carries a nonce, the same in all attempts. It becomes part of the topic's id, so the controller
    recognises a topic that an earlier attempt created, and its answer needs no interpretation. And each attempt is for
    one controller: a later one, which does not know what its predecessor has created, does not carry it out."""

    api = CREATE_TOPICS
    final = (ErrorCode.REQUEST_TIMED_OUT,)
    """The topic exists then, but not all of its partitions have leaders: the user must hear of that."""
    is_prepared = False
    may_yet = "It may yet be created: see `minibroker topics list` before you try again"

    def __init__(self, topics: Iterable[m.CreatableTopic], random: Random) -> None:
        self._topics = {topic.name: topic for topic in topics}
        for topic in self._topics.values():
            topic.nonce = random.randbytes(NONCE_BYTES)

    def names(self) -> list[str]:
        return list(self._topics)

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.CreateTopicsRequest:
        topics = [self._topics[name] for name in names]
        return m.CreateTopicsRequest(topics, timeout_ms, controller_epoch=controller_epoch)

    def results(self, response: m.CreateTopicsResponse) -> dict[str, tuple[int, str]]:
        return {topic.name: (topic.error_code, topic.error_message) for topic in response.topics}


class _Deletion:
    """Each request names its topic by id, so that a retry, or a request that was on its way for long, deletes no topic
    that was created in the meantime.

    The ids come from the controller, during this call: the first request has an id that no topic has, and is refused
    with the current ids. So a topic that is gone later on, or has another id, counts as deleted, whoever did it. (An id
    from some broker's metadata would not do: it may be that of a topic which was deleted long before.)
    """

    api = DELETE_TOPICS
    final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,)
    may_yet = "It may yet be deleted: see `minibroker topics list` before you try again"

    def __init__(self, names: Iterable[str]) -> None:
        self._ids = dict.fromkeys(names, NO_TOPIC)
        self.is_prepared = False

    def names(self) -> list[str]:
        return list(self._ids)

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.DeleteTopicsRequest:
        return m.DeleteTopicsRequest(list(names), timeout_ms, [self._ids[name] for name in names])

    def results(self, response: m.DeleteTopicsResponse) -> dict[str, tuple[int, str]]:
        results: dict[str, tuple[int, str]] = {}
        for topic in response.responses:
            code = topic.error_code
            is_gone = code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
            if is_gone and self._ids.get(topic.name) != NO_TOPIC:
                code = ErrorCode.NONE
            elif code == ErrorCode.UNKNOWN_TOPIC_ID:
                self._ids[topic.name] = topic.topic_id
                self.is_prepared = True
            results[topic.name] = code, topic.error_message
        return results


def _connection_address(address: Address | None) -> str:
    """As a Connection to it has it."""
    return "" if address is None else f"{address.host}:{address.port}"


def _or_yet(error: MinibrokerError, may_yet: str) -> MinibrokerError:
    """The error of the last attempt, with the warning that this or an earlier attempt may yet be carried out."""
    if isinstance(error, BrokerError):
        said = [as_sentence(error.detail)] if error.detail else []
        return BrokerError(error.code, " ".join([*said, may_yet]), is_complete=True)
    return NetworkError(f"{error}. {may_yet}")


def _is_refusal_of_another(error: MinibrokerError) -> bool:
    """Whether a broker may have said that it is not the one that was meant."""
    return isinstance(error, BrokerError) and error.code is ErrorCode.INVALID_REQUEST


async def _single(name: str, change: Coroutine[object, object, None]) -> None:
    """A change of one topic: raises that topic's own error."""
    try:
        await change
    except TopicErrors as error:
        raise error.errors[name] from None


def _creatable(topic: NewTopic) -> m.CreatableTopic:
    if not isinstance(topic, NewTopic):
        raise InvalidSetting("topics", topic, "give a list of NewTopic, or call create_topic")
    if not isinstance(topic.configs, Mapping):
        raise InvalidSetting("configs", topic.configs, "give a dict of settings' names and values")
    if not isinstance(topic.name, str):
        raise InvalidSetting("name", topic.name, "a name is a str")
    check_topic_name(topic.name)
    assignments = []
    if topic.assignments is not None:
        if topic.partitions is not None or topic.replication_factor is not None:
            raise InvalidSetting(
                "assignments",
                topic.assignments,
                "they determine the partitions and the replication factor: leave those out",
            )
        assignments = [m.CreatableAssignment(index, list(ids)) for index, ids in enumerate(topic.assignments)]
    if topic.partitions is not None:
        check_integer("partitions", topic.partitions, 1, 10_000)
    if topic.replication_factor is not None:
        check_integer("replication_factor", topic.replication_factor, 1, 1_000)
    return m.CreatableTopic(
        topic.name,
        -1 if topic.partitions is None else topic.partitions,
        -1 if topic.replication_factor is None else topic.replication_factor,
        assignments,
        [
            m.CreatableConfig(check_text("configs", name), check_text(name, str(value)))
            for name, value in topic.configs.items()
        ],
    )


def _description(topic: m.MetadataTopic) -> TopicDescription:
    return TopicDescription(
        topic.name,
        topic.topic_id,
        topic.is_internal,
        tuple(
            PartitionDescription(
                partition.partition_index,
                None if partition.leader_id == NO_LEADER else partition.leader_id,
                partition.leader_epoch,
                tuple(partition.replica_nodes),
                tuple(partition.isr_nodes),
                tuple(partition.offline_replicas),
            )
            for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
        ),
    )


def _log_dir(result: m.DescribeLogDirsResult) -> LogDirDescription:
    error = None
    if result.error_code != ErrorCode.NONE:
        error = result.error_message or error_of(result.error_code).name
    return LogDirDescription(
        result.log_dir,
        error,
        {
            TopicPartition(topic.name, p.partition_index): LogDirReplica(
                p.partition_size, p.offset_lag, p.is_future_key
            )
            for topic in result.topics
            for p in topic.partitions
        },
        None if result.total_bytes < 0 else result.total_bytes,
        None if result.usable_bytes < 0 else result.usable_bytes,
    )

"""The admin client. `administering/` has one file per family of calls."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, Unpack

from minibroker.client.administering import acls as acls_
from minibroker.client.administering import client_quotas, deletion, elections, group_offsets, log_dirs, reassignment
from minibroker.client.administering import configs as configs_
from minibroker.client.administering import groups as groups_
from minibroker.client.administering import offsets as offsets_
from minibroker.client.administering import scram as scram_
from minibroker.client.administering import topics as topics_
from minibroker.client.administering import transactions as transactions_
from minibroker.client.administering.client_quotas import QuotaEntity
from minibroker.client.administering.configs import ConfigChange, ConfigEntry, ConfigResource
from minibroker.client.administering.groups import GroupDescription, GroupListing
from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.requests import AdminRequests, ClusterDescription
from minibroker.client.administering.scram import (
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from minibroker.client.administering.timeline import TimelineRead, TimelineReader
from minibroker.client.administering.topics import NewTopic, TopicDescription
from minibroker.client.administering.transactions import ProducerState, TransactionDescription, TransactionListing
from minibroker.client.cluster.calls import ends_with_its_client
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.errors import TopicErrors
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.other_names import knows_other_names
from minibroker.client.security import Security
from minibroker.client.settings import (
    IsolationLevel,
    check_boolean,
    check_by_partition,
    check_choice,
    check_integer,
    check_isolation_level,
    check_ms,
)
from minibroker.protocol import messages as m
from minibroker.protocol.acls import AclBinding, AclFilter
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

T = TypeVar("T")
_ALL_ACLS = AclFilter()

OffsetSpec = Literal["earliest", "latest", "max_timestamp"] | int
_SPECS = {"earliest": m.EARLIEST_TIMESTAMP, "latest": m.LATEST_TIMESTAMP, "max_timestamp": m.MAX_TIMESTAMP}


class Admin(Client):
    """Administration. Use it as `async with Admin("host:9092") as admin`, or call `start` and `close`.

    Each call retries transient failures (a moved controller, a lost connection) for `default_api_timeout_ms`, and then
    raises BrokerError or NetworkError. If a connection breaks before the answer, the next attempt finds out what the
    previous one did: a topic that another client created is an error, and a topic that was created during the call is
    never deleted. A topic that this call created and another client deleted is not created again by the same broker.
    After a call has failed, what it requested may still happen; the error says so.

    Not thread-safe. It belongs to the event loop in which it is started: a call from another loop, `close` included,
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
        **security: Unpack[Security],
    ) -> None:
        timeout_s = check_ms("default_api_timeout_ms", default_api_timeout_ms, lowest=1)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
            security=security,
        )
        self._admin_requests = AdminRequests(self._runtime, timeout_s)

    @property
    def _requests(self) -> AdminRequests:
        self._check_running()
        return self._admin_requests

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
        """Create a topic. On return its partitions have leaders, and the brokers know it, except for those that have
        not learned of it within 3 s because they are cut off or hang.

        Raises BrokerError (TOPIC_ALREADY_EXISTS, INVALID_REPLICATION_FACTOR, REQUEST_TIMED_OUT if the leaders are not
        elected in time, ...), NetworkError. The error says if the topic may still be created.
        """
        topic = NewTopic(name, partitions, replication_factor, configs or {}, assignments)
        await _single(name, topics_.create(self._requests, [topic]))

    @ends_with_its_client
    async def create_topics(self, topics: Iterable[NewTopic]) -> None:
        """Create several topics. Raises TopicErrors naming those that failed; the others are created. Raises
        InvalidSetting."""
        await topics_.create(self._requests, topics)

    @ends_with_its_client
    async def create_partitions(
        self, topic: str, count: int, *, assignments: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Add partitions to a topic, so that it has `count`. On return they have leaders, and the brokers know them.
        Producers and consumers find them with their next refresh of metadata (`metadata_max_age_ms`); consumers of
        whole topics read them from the beginning. Records of a key may go to another partition than before.

        `assignments`: broker ids for each new partition, the preferred leader first. A topic of that name that is
        created during the call is not changed. Raises BrokerError (INVALID_PARTITIONS if it has that many already,
        UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT, REQUEST_TIMED_OUT if the leaders are not elected in
        time, ...), NetworkError. The error says if the partitions may still be added.
        """
        await topics_.create_partitions(self._requests, topic, count, assignments)

    @ends_with_its_client
    async def delete_topic(self, name: str) -> None:
        """Delete the topic that has this name now, with all its records. A topic that is created later is never
        deleted. On return the topic is gone, and the name is free.

        Raises BrokerError (UNKNOWN_TOPIC_OR_PARTITION; TOPIC_DELETION_DISABLED; REQUEST_TIMED_OUT if the topic is not
        gone in time, for instance while a broker with a replica is down: the error says what the deletion waits for,
        and it continues by itself; ...), NetworkError.
        """
        await _single(name, topics_.delete(self._requests, [name]))

    @ends_with_its_client
    async def delete_topics(self, names: Iterable[str]) -> None:
        """Delete several topics. Raises TopicErrors naming those that failed; the others are deleted."""
        await topics_.delete(self._requests, names)

    @ends_with_its_client
    async def list_topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of all topics, sorted; with `internal`, include the brokers' own topics."""
        check_boolean("internal", internal)
        response = await self._requests.metadata(None)
        return sorted(topic.name for topic in response.topics if internal or not topic.is_internal)

    @ends_with_its_client
    async def describe_topic(self, name: str) -> TopicDescription:
        """Return the topic's partitions, leaders and replicas. Raises BrokerError: UNKNOWN_TOPIC_OR_PARTITION."""
        return (await _single(name, topics_.describe(self._requests, [name])))[name]

    @ends_with_its_client
    async def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        """Return the descriptions of these topics, or of all, by name. Raises TopicErrors for those that do not
        exist."""
        return await topics_.describe(self._requests, names)

    # -- brokers --

    @ends_with_its_client
    async def describe_cluster(self) -> ClusterDescription:
        """Return the live brokers and the controller."""
        return await self._requests.cluster()

    @ends_with_its_client
    async def describe_log_dirs(
        self, broker_ids: Iterable[int] | None = None
    ) -> dict[int, tuple[LogDirDescription, ...]]:
        """Return the log directories of these brokers, or of all live brokers, in the order of their `log.dirs`.

        Raises BrokersFailed if a broker is not alive or does not answer in time: `results` has the answers of the other
        brokers, `errors` the error of each that failed. Raises NetworkError if no broker answers at all.
        """
        return await log_dirs.describe(self._requests, broker_ids)

    # -- access control lists --

    @ends_with_its_client
    async def create_acls(self, bindings: Iterable[AclBinding]) -> None:
        """Create access control lists; those that exist already succeed. They hold at once on the broker that answers,
        and on the others within moments.

        Raises AclErrors naming those that were not created; BrokerError (SECURITY_DISABLED: the brokers have no
        authorizer; CLUSTER_AUTHORIZATION_FAILED: this principal may not Alter the cluster), NetworkError.
        """
        await acls_.create(self._requests, bindings)

    @ends_with_its_client
    async def describe_acls(self, wanted: AclFilter = _ALL_ACLS) -> list[AclBinding]:
        """Return the access control lists that match, as the broker that answers knows them. Raises BrokerError
        (SECURITY_DISABLED, CLUSTER_AUTHORIZATION_FAILED), NetworkError."""
        return await acls_.describe(self._requests, wanted)

    @ends_with_its_client
    async def delete_acls(self, filters: Iterable[AclFilter]) -> list[AclBinding]:
        """Delete all access control lists that match one of the filters, and return them. If the connection breaks
        during the call, those that an earlier attempt has deleted are not returned. Raises as `create_acls`."""
        return await acls_.delete(self._requests, list(filters))

    async def timeline(self, since_ms: int = 0) -> TimelineRead:
        """Return what the controllers of this cluster did since that time, by the brokers' clocks. Each broker
        remembers the last 2,000 entries of its own controller.

        Raises as `TimelineReader.read`."""
        return await self.timeline_reader(since_ms).read()

    def timeline_reader(self, since_ms: int = 0) -> TimelineReader:
        """Return a reader whose first `read` returns the same as `timeline`, and each later one what is new."""
        check_integer("since_ms", since_ms, 0, 1 << 62)
        return TimelineReader(lambda: self._requests, since_ms, self._calls, self._not_running)

    # -- users --

    @ends_with_its_client
    async def describe_user_scram_credentials(
        self, users: Iterable[str] | None = None
    ) -> dict[str, tuple[ScramCredentialInfo, ...]]:
        """Return for which mechanisms these users, or all, have a password, by name (KIP-554).

        Raises UserErrors for users without one (RESOURCE_NOT_FOUND): `results` has the others. Raises BrokerError
        (CLUSTER_AUTHORIZATION_FAILED: this principal may not Describe the cluster), NetworkError."""
        return await scram_.describe(self._requests, users)

    @ends_with_its_client
    async def alter_user_scram_credentials(
        self, changes: Iterable[UserScramCredentialUpsertion | UserScramCredentialDeletion]
    ) -> None:
        """Set and delete passwords for SCRAM (KIP-554). They are salted and hashed here, and never sent. The brokers
        know of a change within moments. Connections of a user stay authenticated until their session ends.

        Raises UserErrors with an error for each user that failed; the others are changed: BrokerError
        (RESOURCE_NOT_FOUND, UNACCEPTABLE_CREDENTIAL, CLUSTER_AUTHORIZATION_FAILED: this principal may not Alter the
        cluster), NetworkError."""
        await scram_.alter(self._requests, changes)

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
        """Return the effective settings of topics and brokers, by name, and the source of each (KIP-226). `names`
        restricts them. `ConfigResource.of_all_brokers` has only the settings that are set there.

        Raises ConfigErrors with an error for each resource that failed: BrokerError (UNKNOWN_TOPIC_OR_PARTITION,
        INVALID_CONFIG if ZooKeeper has invalid settings, ...), NetworkError if a broker cannot be reached.
        """
        check_boolean("synonyms", synonyms)
        check_boolean("documentation", documentation)
        return await configs_.describe(
            self._requests, resources, names=names, synonyms=synonyms, documentation=documentation
        )

    @ends_with_its_client
    async def incremental_alter_configs(
        self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool = False
    ) -> None:
        """Change settings of topics and brokers (KIP-339); with `validate_only`, check the change without making it. On
        return the changes are stored in ZooKeeper. Live brokers apply them soon, the others when they are back.

        The changes of one resource are applied together or not at all. Concurrent changes of other settings are kept.
        A topic that is created during the call is not changed. Repeating a call does no harm.

        Raises ConfigErrors with an error for each resource that failed; the others are changed: BrokerError
        (INVALID_CONFIG, UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST, REQUEST_TIMED_OUT: it may still be changed),
        NetworkError if a broker cannot be reached.
        """
        check_boolean("validate_only", validate_only)
        await configs_.alter(self._requests, changes, validate_only=validate_only)

    # -- quotas --

    @ends_with_its_client
    async def describe_client_quotas(
        self, *, user: str | None = None, client_id: str | None = None, ip: str | None = None
    ) -> dict[QuotaEntity, dict[str, float]]:
        """Return the quotas of all users, clients and addresses, or those of a user, client id or IP address, by
        Kafka's names (KIP-546). DEFAULT_ENTITY asks for the default. Raises BrokerError, NetworkError."""
        return await client_quotas.describe(self._requests, user, client_id, ip)

    @ends_with_its_client
    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, validate_only: bool = False
    ) -> None:
        """Set quotas: "producer_byte_rate" and "consumer_byte_rate" in bytes per second, "request_percentage" of a
        handler's time, each for one broker; "controller_mutation_rate" in partitions per second, for the cluster; of an
        address, "connection_creation_rate" in connections per second. None removes a quota. The brokers apply them
        within moments. The changes of an entity are made together or not at all; repeating a call does no harm.

        Raises QuotaErrors with an error for each entity that failed: BrokerError (INVALID_REQUEST), and NetworkError
        or BrokerError if the whole call failed."""
        check_boolean("validate_only", validate_only)
        await client_quotas.alter(self._requests, changes, validate_only=validate_only)

    # -- records --

    @ends_with_its_client
    async def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records before an offset of each partition; -1: all records that are committed now. Return the low
        watermark of each partition: no replica that may become leader has or will have records below it, whatever
        processes crash or hosts lose power. (An unclean election may restore them, and a deposed leader that is cut off
        may serve them until it learns of its successor.) An offset below the first one deletes nothing and is no error,
        so a call may be repeated.

        A topic of that name that is created during the call loses nothing. Disk space is freed later, one segment at a
        time. Raises PartitionErrors with the low watermarks of the partitions that succeeded (`results`) and the error
        of each other partition (`errors`), which says if its records may still be deleted: BrokerError
        (OFFSET_OUT_OF_RANGE above the high watermark, POLICY_VIOLATION with cleanup.policy=compact,
        NOT_ENOUGH_REPLICAS, REQUEST_TIMED_OUT, UNKNOWN_TOPIC_OR_PARTITION, ...), NetworkError. Raises NetworkError if
        no broker answers at all.
        """
        return await deletion.delete_records(self._requests, offsets)

    @ends_with_its_client
    async def list_offsets(
        self,
        offsets: Mapping[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel = "read_uncommitted",
        timeout_ms: float | None = None,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return an offset of each partition: "earliest", the first in the log; "latest", the high watermark;
        "max_timestamp", the first record with the largest timestamp (KIP-734); or milliseconds since 1970, the first
        record at or after that time. Only records below the high watermark count, or with "read_committed" those below
        the last stable offset, where the oldest open transaction begins. None: there is no such record. `timeout_ms`
        replaces `default_api_timeout_ms` for this call.

        Raises OffsetErrors with the offsets of the partitions whose leaders answered (`results`) and the error of each
        other partition (`errors`): BrokerError (UNKNOWN_TOPIC_OR_PARTITION; OFFSET_NOT_AVAILABLE if a new leader does
        not know its high watermark yet; ...), NetworkError.
        """
        level = check_isolation_level(isolation_level)
        timeout_s = None if timeout_ms is None else check_ms("timeout_ms", timeout_ms, lowest=1)
        asked = {}
        for partition, spec in check_by_partition("offsets", offsets, "'latest'").items():
            if isinstance(spec, str):
                check_choice("offsets", spec, list(_SPECS))
                asked[partition] = _SPECS[spec]
            else:
                asked[partition] = check_integer("offsets", spec, 0, 1 << 62)
        return await offsets_.list_offsets(self._requests, asked, level, timeout_s)

    # -- groups --

    @ends_with_its_client
    async def list_groups(self, states: Iterable[str] | None = None) -> list[GroupListing]:
        """Return all groups, or those in these states, sorted by name. Each live broker reports the groups that it
        coordinates.

        Raises BrokersFailed if a broker does not answer in time: `results` has the groups of the other brokers, by
        broker, `errors` the error of each that failed. Raises NetworkError if no broker answers at all.
        """
        return await groups_.list_groups(self._requests, states)

    @ends_with_its_client
    async def describe_groups(self, groups: Iterable[str]) -> dict[str, GroupDescription]:
        """Return state, coordinator, assignor and members of these groups, by name.

        Raises GroupErrors with the descriptions that were found (`results`) and the error of each other group
        (`errors`): BrokerError (GROUP_ID_NOT_FOUND; COORDINATOR_NOT_AVAILABLE while the group's partition of
        __consumer_offsets has no leader, ...), NetworkError.
        """
        return await groups_.describe_groups(self._requests, groups)

    @ends_with_its_client
    async def delete_groups(self, groups: Iterable[str]) -> None:
        """Delete groups that have no members, with their committed offsets.

        Raises GroupErrors with the error of each that failed; the others are deleted: BrokerError (NON_EMPTY_GROUP,
        which names the members; GROUP_ID_NOT_FOUND, ...), NetworkError.
        """
        await groups_.delete_groups(self._requests, groups)

    @ends_with_its_client
    async def remove_group_members(self, group: str, members: Iterable[str] | None = None) -> list[str]:
        """Remove members from a group, as if they had left it: those with these member ids or names
        (`group_instance_id`), or all (None). Return the member ids. A member that lives joins again, so this also
        forces a rebalance; offsets stay. (Kafka's removeMembersFromConsumerGroup.)

        Raises InvalidSetting for a name that no member has, and then none is removed; BrokerError (GROUP_ID_NOT_FOUND),
        NetworkError."""
        return await groups_.remove_members(self._requests, group, members)

    @ends_with_its_client
    async def list_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the offsets that a group has committed: for these partitions, None if there is none; or for all
        partitions that have one. Offsets in a topic that was deleted and created again since do not count, as for
        consumers. A group that does not exist has committed nothing. Raises BrokerError, NetworkError."""
        return await group_offsets.committed_offsets(self._requests, group, partitions)

    @ends_with_its_client
    async def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        """Commit offsets for a group that has no members, or does not exist yet. Nothing is committed for a topic that
        is created again during the call. Repeating a call does no harm.

        Raises PartitionErrors with the error of each partition that was rejected; the others are committed: BrokerError
        (UNKNOWN_TOPIC_OR_PARTITION, OFFSET_METADATA_TOO_LARGE, ...). Raises BrokerError (NON_EMPTY_GROUP, which names
        the members) or NetworkError if no offset is known to be committed.
        """
        await group_offsets.alter(self._requests, group, offsets)

    @ends_with_its_client
    async def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Delete the committed offsets of these partitions. A partition without one is no error.

        Raises PartitionErrors with the error of each partition that was rejected; the offsets of the others are
        deleted: BrokerError (GROUP_SUBSCRIBED_TO_TOPIC while members read the topic). Raises BrokerError
        (GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP for a group whose members are no consumers), NetworkError.
        """
        await group_offsets.delete(self._requests, group, partitions)

    # -- transactions --

    @ends_with_its_client
    async def list_transactions(
        self,
        *,
        states: Iterable[str] | None = None,
        producer_ids: Iterable[int] | None = None,
        duration_ms: int | None = None,
    ) -> list[TransactionListing]:
        """Return all transactional ids, sorted, or those in these states, with these producer ids, or whose transaction
        is open for more than `duration_ms`. Each live broker reports the ids that it coordinates.

        Raises BrokersFailed if a broker does not answer in time: `results` has the ids of the other brokers, by broker,
        `errors` the error of each that failed. Raises NetworkError if no broker answers at all.
        """
        return await transactions_.list_transactions(self._requests, states, producer_ids, duration_ms)

    @ends_with_its_client
    async def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionDescription]:
        """Return state, producer, coordinator and partitions of these transactional ids.

        Raises TransactionalIdErrors with the descriptions that were found (`results`) and the error of each other id
        (`errors`): BrokerError (TRANSACTIONAL_ID_NOT_FOUND; COORDINATOR_NOT_AVAILABLE while the id's partition of
        __transaction_state has no leader, ...), NetworkError.
        """
        return await transactions_.describe_transactions(self._requests, transactional_ids)

    @ends_with_its_client
    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[ProducerState, ...]]:
        """Return the producers that the leader of each partition remembers, by ascending producer id, with the first
        offset of their open transactions (KIP-664).

        Raises ProducerErrors with the producers of the other partitions (`results`) and the error of each partition
        that failed (`errors`): BrokerError (UNKNOWN_TOPIC_OR_PARTITION, ...), NetworkError.
        """
        return await transactions_.describe_producers(self._requests, partitions)

    @ends_with_its_client
    async def fence_producers(self, transactional_ids: Iterable[str]) -> None:
        """Abort the open transactions of these ids, and fence their producers: each request of a running producer with
        such an id fails from now on. A producer that starts later is not affected. Repeating a call does no harm.

        Raises TransactionalIdErrors with the error of each id that failed; the others are fenced: BrokerError
        (TRANSACTIONAL_ID_NOT_FOUND, ...), NetworkError. The error says if the producer may yet be fenced.
        """
        await transactions_.fence_producers(self._requests, transactional_ids)

    @ends_with_its_client
    async def abort_transaction(
        self,
        partition: TopicPartition,
        *,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        start_offset: int,
    ) -> None:
        """Abort a hanging transaction in one partition: it is open in the log, but no coordinator knows it, so nothing
        else ends it (KIP-664). The arguments are those of `describe_producers`: `coordinator_epoch` is 0 if it has
        None, and `start_offset` is `current_txn_start_offset`. If the producer has another transaction open, or none,
        nothing is done, so repeating a call does no harm.

        **Not for a transaction that a coordinator knows**: if that one is committed, its records in this partition are
        lost. `fence_producers` aborts it in all of its partitions. `minibroker transactions find-hanging` tells them
        apart.

        Raises BrokerError (INVALID_PRODUCER_EPOCH: the producer has a newer epoch; TRANSACTION_COORDINATOR_FENCED: a
        newer coordinator has ended its transaction; UNKNOWN_TOPIC_OR_PARTITION; ...), NetworkError.
        """
        await transactions_.abort_transaction(
            self._requests, partition, producer_id, producer_epoch, coordinator_epoch, start_offset
        )

    # -- replicas and leaders --

    @ends_with_its_client
    async def alter_partition_reassignments(self, reassignments: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        """Assign these replicas to each partition, the preferred leader first. None cancels the reassignment in
        progress and restores the replicas from before it. A new reassignment replaces one in progress.

        On return the reassignment is recorded and has begun. It continues under any controller until all new replicas
        are in sync; `list_partition_reassignments` shows it. Raises PartitionErrors naming the partitions that were
        rejected (INVALID_REPLICA_ASSIGNMENT, UNKNOWN_TOPIC_OR_PARTITION, NO_REASSIGNMENT_IN_PROGRESS); the others are
        reassigned.
        """
        await reassignment.alter(self._requests, reassignments)

    @ends_with_its_client
    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """Return the reassignments in progress, of these partitions or of all."""
        return await reassignment.in_progress(self._requests, partitions)

    @ends_with_its_client
    async def elect_leaders(
        self, election_type: Literal["preferred", "unclean"], partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, bool]:
        """Elect leaders for these partitions, or for all (KIP-460). Return whether each was elected: False if that was
        not necessary, perhaps because an earlier attempt of this call elected it. For all partitions, those that needed
        no election are left out.

        "preferred": the first replica of the partition leads, if it is alive and in sync; nothing is lost, and writes
        continue with the new leader. "unclean": a partition without leader gets one, if any of its replicas is alive: a
        replica with all acknowledged records, if there is one; otherwise **the records that the new leader lacks are
        lost permanently**.

        Raises PartitionErrors with the results of the partitions that succeeded (`results`) and the error of each other
        partition (`errors`): BrokerError (PREFERRED_LEADER_NOT_AVAILABLE, ELIGIBLE_LEADERS_NOT_AVAILABLE,
        UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION for a topic that is being deleted, REQUEST_TIMED_OUT if the
        leader was elected and the brokers do not show it yet). Raises BrokerError and NetworkError if the controller
        does not answer.
        """
        return await elections.elect(self._requests, election_type, partitions)


async def _single(name: str, call: Coroutine[object, object, T]) -> T:
    """Await a call about one topic, and raise that topic's own error."""
    try:
        return await call
    except TopicErrors as error:
        raise error.errors[name] from None

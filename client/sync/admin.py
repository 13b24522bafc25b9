"""The blocking admin client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from minibroker.client.admin import Admin as AsyncAdmin
from minibroker.client.admin import OffsetSpec
from minibroker.client.administering.configs import ConfigChange, ConfigEntry, ConfigResource
from minibroker.client.administering.groups import GroupDescription, GroupListing
from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.requests import ClusterDescription
from minibroker.client.administering.timeline import TimelineRead
from minibroker.client.administering.timeline import TimelineReader as AsyncTimelineReader
from minibroker.client.administering.topics import NewTopic, TopicDescription
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.settings import knows_other_names
from minibroker.client.sync.facade import Facade
from minibroker.protocol.model import TopicPartition


class Admin(Facade[AsyncAdmin]):
    """Administration, from any thread. Use it as `with Admin("host:9092") as admin`, or call `start` and `close`.

    Guarantees, settings and errors are those of `minibroker.Admin`. A call that is interrupted (Ctrl-C) may yet take
    effect. After a fork the child gets ForkedClient from every call but `close`, which does nothing there. The
    constructor raises InvalidSetting.
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
    ) -> None:
        super().__init__(
            AsyncAdmin(
                bootstrap,
                client_id=client_id,
                request_timeout_ms=request_timeout_ms,
                default_api_timeout_ms=default_api_timeout_ms,
                retry_backoff_ms=retry_backoff_ms,
                metadata_max_age_ms=metadata_max_age_ms,
            )
        )

    # -- topics --

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        assignments: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Create a topic; on return its partitions have leaders, and the brokers know it. Raises BrokerError
        (TOPIC_ALREADY_EXISTS, ...), NetworkError."""
        self._call(
            lambda: self._client.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor,
                configs=configs,
                assignments=assignments,
            )
        )

    def create_topics(self, topics: Iterable[NewTopic]) -> None:
        """Create several topics. Raises TopicErrors naming those that failed; the others are created."""
        self._call(lambda: self._client.create_topics(topics))

    def create_partitions(self, topic: str, count: int, *, assignments: Sequence[Sequence[int]] | None = None) -> None:
        """Give a topic more partitions, so that there are `count`. Raises BrokerError (INVALID_PARTITIONS, ...),
        NetworkError."""
        self._call(lambda: self._client.create_partitions(topic, count, assignments=assignments))

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records; on return it is gone, and the name is free. Raises BrokerError
        (UNKNOWN_TOPIC_OR_PARTITION, ...), NetworkError."""
        self._call(lambda: self._client.delete_topic(name))

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete several topics. Raises TopicErrors naming those that failed; the others are deleted."""
        self._call(lambda: self._client.delete_topics(names))

    def alter_partition_reassignments(self, reassignments: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        """Let each partition have these replicas; None: go back to those from before. On return it has begun. Raises
        PartitionErrors naming those that were refused."""
        self._call(lambda: self._client.alter_partition_reassignments(reassignments))

    def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The reassignments that are under way, of these partitions or of all."""
        return self._call(lambda: self._client.list_partition_reassignments(partitions))

    def list_topics(self, *, internal: bool = False) -> list[str]:
        """The names of all topics, sorted; with `internal`, also those of the brokers' own topics."""
        return self._call(lambda: self._client.list_topics(internal=internal))

    def describe_topic(self, name: str) -> TopicDescription:
        """Raises BrokerError: UNKNOWN_TOPIC_OR_PARTITION."""
        return self._call(lambda: self._client.describe_topic(name))

    def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        """What the topics, or all of them, look like now, by name. Raises TopicErrors for those that do not exist."""
        return self._call(lambda: self._client.describe_topics(names))

    def describe_cluster(self) -> ClusterDescription:
        """The brokers that are alive, and which of them is the controller."""
        return self._call(self._client.describe_cluster)

    def describe_log_dirs(self, broker_ids: Iterable[int] | None = None) -> dict[int, tuple[LogDirDescription, ...]]:
        """What is in the log directories of these brokers, or of all that are alive. Raises BrokersFailed with what the
        others said, where one does not answer."""
        return self._call(lambda: self._client.describe_log_dirs(broker_ids))

    def timeline(self, since_ms: int = 0) -> TimelineRead:
        """What the controllers of this cluster did. Raises NetworkError where no broker answers at all."""
        return self._call(lambda: self._client.timeline(since_ms))

    def timeline_reader(self, since_ms: int = 0) -> TimelineReader:
        """Reads the same, and then what is new, again and again."""
        return TimelineReader(self, self._client.timeline_reader(since_ms))

    # -- settings --

    def describe_configs(
        self,
        resources: Iterable[ConfigResource],
        *,
        names: Collection[str] | None = None,
        synonyms: bool = False,
        documentation: bool = False,
    ) -> dict[ConfigResource, dict[str, ConfigEntry]]:
        """The settings of topics and brokers as they hold now, by name, and where each comes from. Raises ConfigErrors
        with an error for each resource that failed."""
        return self._call(
            lambda: self._client.describe_configs(
                resources, names=names, synonyms=synonyms, documentation=documentation
            )
        )

    def incremental_alter_configs(
        self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool = False
    ) -> None:
        """Change settings of topics and brokers, or only find out whether that could be done. Raises ConfigErrors with
        an error for each resource that failed; the others are changed."""
        self._call(lambda: self._client.incremental_alter_configs(changes, validate_only=validate_only))

    # -- at the leaders --

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records of each partition that come before its offset; -1: all that are committed by now. Returns
        where each partition begins then. Raises PartitionErrors, NetworkError."""
        return self._call(lambda: self._client.delete_records(offsets))

    def list_offsets(
        self, offsets: Mapping[TopicPartition, OffsetSpec]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the offset that is asked for: "earliest", "latest", "max_timestamp", or milliseconds since
        1970. None: there is no such record. Raises BrokerError, NetworkError."""
        return self._call(lambda: self._client.list_offsets(offsets))

    # -- groups --

    def list_groups(self, states: Iterable[str] | None = None) -> list[GroupListing]:
        """All groups, or those in these states, sorted by name. Raises BrokersFailed with what the others said, where a
        broker does not answer; NetworkError where none does."""
        return self._call(lambda: self._client.list_groups(states))

    def describe_groups(self, groups: Iterable[str]) -> dict[str, GroupDescription]:
        """State, coordinator, assignor and members of these groups, by name. Raises GroupErrors with what was found,
        and an error for each other group."""
        return self._call(lambda: self._client.describe_groups(groups))

    def delete_groups(self, groups: Iterable[str]) -> None:
        """Delete groups without members, with all that they have committed. Raises GroupErrors with an error for each
        that failed; the others are deleted."""
        self._call(lambda: self._client.delete_groups(groups))

    def list_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What a group has committed: of these partitions, None where that is nothing; or of all of which it has.
        Raises BrokerError, NetworkError."""
        return self._call(lambda: self._client.list_group_offsets(group, partitions))

    def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        """Commit offsets for a group that has no members, or does not exist yet. Raises PartitionErrors with an error
        for each partition that was refused; BrokerError (NON_EMPTY_GROUP), NetworkError."""
        self._call(lambda: self._client.alter_group_offsets(group, offsets))

    def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Delete what a group has committed of these partitions. Raises PartitionErrors with an error for each that was
        refused; BrokerError (GROUP_ID_NOT_FOUND, ...), NetworkError."""
        self._call(lambda: self._client.delete_group_offsets(group, partitions))

    # -- at the controller --

    def elect_leaders(
        self, election_type: Literal["preferred", "unclean"], partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, bool]:
        """Elect leaders for these partitions, or for all: whether each was elected, or need not be. Raises
        PartitionErrors; BrokerError and NetworkError where the controller does not answer."""
        return self._call(lambda: self._client.elect_leaders(election_type, partitions))


class TimelineReader:
    """Reads what is new in the timelines of all brokers, again and again. Belongs to an admin client."""

    def __init__(self, admin: Admin, reader: AsyncTimelineReader) -> None:
        self._admin = admin
        self._reader = reader

    def read(self) -> TimelineRead:
        """What the brokers that answer have recorded since the last call. Raises NetworkError where none does."""
        return self._admin._call(self._reader.read)

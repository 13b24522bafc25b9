"""Details for `groups describe` beyond the group itself: its committed offsets, and the ends of its partitions.

As in `topics describe`, details that do not arrive soon are left out, so that a broker that does not answer does not
hide the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupDescription, GroupErrors
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal.output import DETAILS_WITHIN_MS
from minibroker.client.errors import TopicErrors
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.protocol.model import TopicPartition


class PartitionLag(NamedTuple):
    partition: TopicPartition
    committed: OffsetAndMetadata | None
    """None: nothing is committed."""
    end_offset: int | None
    """The high watermark. None: no broker answered in time, or the partition no longer exists."""
    member_id: str | None
    """The member to which the partition is assigned."""

    @property
    def lag(self) -> int | None:
        """Records between the committed offset and the end. None: unknown. Negative if the commit is beyond the end, as
        in Kafka's tool: the group will miss the records up to it."""
        if self.committed is None or self.end_offset is None:
            return None
        return self.end_offset - self.committed.offset


class GroupDetails(NamedTuple):
    group: GroupDescription
    partitions: tuple[PartitionLag, ...]
    """All partitions of topics with commits of the group, and those assigned to its members, sorted."""

    @property
    def lag(self) -> int | None:
        """The sum of the known lags. None: no lag is known."""
        known = [max(0, each.lag) for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def without_commit(self) -> int:
        """Partitions with records but no commit. The members decide where they begin (`auto_offset_reset`), so their
        lag is unknown."""
        return sum(each.committed is None and each.end_offset != 0 for each in self.partitions)

    @property
    def beyond_end(self) -> int:
        """Partitions whose commit is beyond the end."""
        return sum(each.lag is not None and each.lag < 0 for each in self.partitions)


async def details_of(admin: Admin, group: str) -> GroupDetails:
    """Raises BrokerError (GROUP_ID_NOT_FOUND), NetworkError."""
    try:
        described = (await admin.describe_groups([group]))[group]
    except GroupErrors as failed:
        raise failed.errors[group] from None
    committed = await admin.list_group_offsets(group)
    owners = {partition: each.member_id for each in described.members for partition in each.partitions or ()}
    topics = await topics_of(admin, {partition.topic for partition in (*committed, *owners)})
    with_commits = {partition.topic for partition in committed}
    others = [
        TopicPartition(name, each.partition)
        for name, topic in topics.items()
        if name in with_commits
        for each in topic.partitions
    ]
    partitions = sorted({*committed, *owners, *others})
    ends = await end_offsets(admin, topics, partitions)
    return GroupDetails(
        described,
        tuple(PartitionLag(p, committed.get(p), ends.get(p), owners.get(p)) for p in partitions),
    )


async def end_offsets(
    admin: Admin,
    topics: Mapping[str, TopicDescription],
    partitions: Iterable[TopicPartition],
    patience_ms: float = DETAILS_WITHIN_MS,
) -> dict[TopicPartition, int]:
    """Return the ends of partitions whose leaders tell them in time."""
    wanted = set(partitions)
    names = (
        TopicPartition(topic.name, each.partition)
        for topic in topics.values()
        for each in topic.partitions
        if each.leader is not None
    )
    try:
        found = await admin.list_offsets(
            dict.fromkeys((name for name in names if name in wanted), "latest"), timeout_ms=patience_ms
        )
    except OffsetErrors as failed:
        found = failed.results
    return {name: each.offset for name, each in found.items() if each is not None}


async def topics_of(admin: Admin, names: Iterable[str]) -> dict[str, TopicDescription]:
    """Return the partitions that still exist."""
    left = sorted(names)
    while left:
        try:
            return await admin.describe_topics(left)
        except TopicErrors as failed:
            left = [name for name in left if name not in failed.errors]
    return {}

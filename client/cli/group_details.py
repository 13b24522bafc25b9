"""Details for `groups describe` beyond the group itself: its committed offsets, and the ends of its partitions.

As in `topics describe`, details that do not arrive soon are left out, so that a broker that does not answer does not
hide the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupDescription, GroupErrors
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal.output import DETAILS_WITHIN_MS
from minibroker.client.errors import TopicErrors, acl_commands
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of, printable

NOBODYS_TOPIC = "-.-"
"""A legal name that only rights to all topics cover, see `minibroker.deploy.observing.rights`."""


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
    refused: tuple[str, ...] = ()
    """Topics of its members that the client may not Describe."""
    may_hide_commits: bool = False
    """Whether it shows no commit to the client, which may not Describe all topics: there may be some in others."""

    @property
    def lag(self) -> int | None:
        """The sum of the known lags. None: no lag is known."""
        known = [max(0, each.lag) for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def without_commit(self) -> int:
        """Partitions with records but no commit. The members decide where they begin (`auto_offset_reset`), so their
        lag is unknown."""
        known = (each for each in self.partitions if each.partition.topic not in self.refused)
        return sum(each.committed is None and each.end_offset != 0 for each in known)

    @property
    def beyond_end(self) -> int:
        """Partitions whose commit is beyond the end."""
        return sum(each.lag is not None and each.lag < 0 for each in self.partitions)

    def missing_right(self, principal: str | None) -> str | None:
        """Return a sentence: which right the client lacks to see the offsets, and the remedy. None: it may lack none.
        `principal`: None if the client does not know its own."""
        who, group = principal or "this client", printable(self.group.group)
        if self.refused:
            commands = acl_commands(principal, [f"--operation Describe {' '.join(map(_option, self.refused))}"])
            return (
                f"{who} may not Describe {all_of('topic', self.refused)}, so the offsets of group {group} there are "
                f"unknown: an administrator can allow it with {commands}"
            )
        if self.may_hide_commits:
            commands = acl_commands(principal, ["--operation Describe --topic TOPIC"])
            return (
                f"{who} may not Describe all topics, so group {group} may have offsets that are not shown: an "
                f"administrator can allow it with {commands}, for each topic of the group instead of TOPIC"
            )
        return None


def _option(topic: str) -> str:
    return f"--topic {shlex.quote(topic)}"


async def details_of(admin: Admin, group: str) -> GroupDetails:
    """Raises BrokerError (GROUP_ID_NOT_FOUND), NetworkError."""
    try:
        described = (await admin.describe_groups([group]))[group]
    except GroupErrors as failed:
        raise failed.errors[group] from None
    committed = await admin.list_group_offsets(group)
    owners = {partition: each.member_id for each in described.members for partition in each.partitions or ()}
    topics, refused = await topics_of(admin, {partition.topic for partition in (*committed, *owners)})
    may_hide_commits = not committed and not refused and await refuses_one_of(admin, [NOBODYS_TOPIC])
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
        refused,
        may_hide_commits,
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


async def topics_of(admin: Admin, names: Iterable[str]) -> tuple[dict[str, TopicDescription], tuple[str, ...]]:
    """Return the partitions that still exist, and the names of topics that the client may not Describe."""
    left, refused = sorted(names), tuple[str, ...]()
    while left:
        try:
            return await admin.describe_topics(left), refused
        except TopicErrors as failed:
            left = [name for name in left if name not in failed.errors]
            refused += tuple(name for name, error in failed.errors.items() if _is_refusal(error))
    return {}, refused


async def refuses_one_of(admin: Admin, topics: Sequence[str]) -> bool:
    """Return whether the client may not Describe one of these topics."""
    try:
        await admin.describe_topics(topics)
    except TopicErrors as failed:
        return any(map(_is_refusal, failed.errors.values()))
    return False


def _is_refusal(error: MinibrokerError) -> bool:
    return isinstance(error, BrokerError) and error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED

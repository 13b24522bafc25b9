"""The topics or partitions that a consumer reads, and the changes of topics that require a rebalance."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from minibroker.client.cluster.metadata import Metadata, TopicInfo
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import InvalidSetting, no_such_partition, topic_error
from minibroker.client.settings import check_names, check_partitions
from minibroker.client.stalls import STALL_S, Stalls
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition

_Size = tuple[str, int]
"""A topic's id and number of partitions; `("", 0)` if the topic does not exist."""


class Subscribed(NamedTuple):
    """A subscription: to topics by name, or to all topics whose names match a pattern."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None

    def names(self, topics: Mapping[str, TopicInfo]) -> list[str]:
        """The topics subscribed to; with a pattern, those of `topics` that match."""
        if self.pattern is None:
            return list(self.topics)
        return sorted(name for name, info in topics.items() if not info.is_internal and self.includes(name))

    def includes(self, topic: str) -> bool:
        """Whether the subscription includes this topic, existing or not."""
        return topic in self.topics if self.pattern is None else self.pattern.fullmatch(topic) is not None


def checked_subscription(topics: Sequence[str] | None, pattern: str | re.Pattern[str] | None) -> Subscribed:
    """Raises InvalidSetting."""
    if pattern is None:
        checked = check_names("topics", topics or ())
        if not checked:
            raise InvalidSetting("topics", topics, 'give at least one, as in topics=["name"]')
        return Subscribed(tuple(checked))
    try:
        compiled: re.Pattern[Any] = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidSetting("pattern", pattern, f"is no regular expression: {error}") from error
    if isinstance(compiled.pattern, bytes):
        raise InvalidSetting("pattern", pattern, "names of topics are text: give a pattern of str, not of bytes")
    return Subscribed((), compiled)


class Selection:
    """The choice of the user (Kafka's SubscriptionState): a subscription, partitions assigned by hand, or nothing."""

    def __init__(
        self,
        topics: Sequence[str] | None,
        pattern: str | re.Pattern[str] | None,
        partitions: Sequence[TopicPartition] | None,
    ) -> None:
        """Raises InvalidSetting."""
        if [topics, pattern, partitions].count(None) < 2:
            raise InvalidSetting("topics", topics, "give one of topics, pattern and partitions")
        for name, value in (("topics", topics), ("pattern", pattern), ("partitions", partitions)):
            if value is not None and not value:
                raise InvalidSetting(name, value, 'give at least one, as in topics=["name"]')
        self.subscribed: Subscribed | None = None
        if topics is not None or pattern is not None:
            self.subscribed = checked_subscription(topics, pattern)
        self.assigned: list[TopicPartition] | None = None
        if partitions is not None:
            self.assigned = check_partitions("partitions", partitions)

    @property
    def is_empty(self) -> bool:
        return self.subscribed is None and self.assigned is None

    def clear(self) -> None:
        self.subscribed = self.assigned = None

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are subscribed to by name."""
        return () if self.subscribed is None else self.subscribed.topics

    def want(self, metadata: Metadata) -> None:
        """Keep the metadata of these topics up to date."""
        for topic in (*self.topics, *(partition.topic for partition in self.assigned or ())):
            metadata.want(topic)
        metadata.want_all(self.subscribed is not None and self.subscribed.pattern is not None)

    async def found(self, runtime: ClientRuntime, patience_s: float, group: str | None) -> None:
        """Wait until metadata has all topics and partitions. Raises BrokerError after `patience_s`, or at once if the
        error is not retriable. `group`: the one of the reader, for the advice if it may not know a topic."""
        clock, metadata = runtime.clock, runtime.metadata
        deadline = clock.monotonic() + patience_s
        stalls: Stalls[str] = Stalls(runtime.connections.client_id)
        while (problem := self._missing(runtime, group)) is not None:
            if not ERRORS[problem.code].retriable or clock.monotonic() >= deadline:
                raise problem
            waiting = {"topic lookup": str(problem)}
            stalls.look(clock.monotonic(), waiting, waiting.__getitem__)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(deadline - clock.monotonic(), STALL_S))):
                    await metadata.refreshed()
        stalls.look(clock.monotonic(), (), str)

    def _missing(self, runtime: ClientRuntime, group: str | None) -> BrokerError | None:
        cluster, principal = runtime.metadata.cluster, runtime.protection.principal
        for topic in self.topics:
            if topic not in cluster.topics:
                error = cluster.errors.get(topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                return topic_error(error, topic, topic, principal, AclOperation.READ, group)
        for partition in self.assigned or ():
            info, code = cluster.topics.get(partition.topic), cluster.errors.get(partition.topic)
            if info is None or (code is not None and partition.partition not in info.partitions):
                error = code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                return topic_error(error, str(partition), partition.topic, principal, AclOperation.READ, group)
            if partition.partition not in info.partitions:
                return no_such_partition(partition, len(info.partitions))
        return None


class TopicWatch:
    """Compares metadata with the topics for which a member has joined."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._joined: list[str] = []
        self._assigned: dict[str, _Size] | None = None
        """Only at the group's leader: the sizes by which it assigned the topics of all members."""
        self._first: dict[str, _Size] = {}
        """Sizes when the member first joined for each topic. Later partitions are read from their beginning."""

    def joins_for(self, topics: list[str]) -> None:
        self._joined = topics
        for topic, size in self._sizes(topics).items():
            if size[1]:
                self._first.setdefault(topic, size)

    def leads(self, topics: Iterable[str]) -> dict[str, int]:
        """Watch the topics of all members. Returns the partition counts of those that exist."""
        self._assigned = self._sizes(topics)
        return {topic: count for topic, (_, count) in self._assigned.items() if count}

    def leads_no_more(self) -> None:
        self._assigned = None

    def why_rebalance(self, subscribed: Subscribed) -> str | None:
        """Why a stable member must join again; None if nothing has changed."""
        if subscribed.names(self._metadata.cluster.topics) != self._joined:
            pattern = subscribed.pattern
            return "the subscription has changed" if pattern is None else f"other topics match {pattern.pattern!r}"
        before = self._assigned
        if before is not None and before != (now := self._sizes(before)):
            changed = [name for name in now if now[name] != before[name]]
            return f"topics or partitions have come or gone: {', '.join(changed)}"
        return None

    def is_new(self, partition: TopicPartition) -> bool:
        """Whether the partition was created after the member first joined for its topic."""
        info = self._metadata.cluster.topics.get(partition.topic)
        if info is None:
            return False
        topic_id, count = self._first.setdefault(partition.topic, (info.topic_id, len(info.partitions)))
        return topic_id != info.topic_id or partition.partition >= count or self._metadata.is_new(partition.topic)

    def _sizes(self, topics: Iterable[str]) -> dict[str, _Size]:
        existing = self._metadata.cluster.existing()
        return {
            name: ("", 0) if name not in existing else (existing[name].topic_id, len(existing[name].partitions))
            for name in topics
        }

"""Topics, partitions and offsets to read, from brokers that can be trusted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from minibroker.client.cluster.metadata import is_confirmed, is_denied
from minibroker.client.cluster.offsets import Found, Known, find_offsets
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import no_such_partition
from minibroker.client.fetching.fetcher import UNKNOWN_TOPIC_PATIENCE_S
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError, error_of
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import READ_UNCOMMITTED
from minibroker.spark_jobs.source.offsets import Offsets, TopicOffsets, by_partition, epochs_of, grouped
from minibroker.spark_jobs.source.options import LATEST, Subscription

logger = logging.getLogger(__name__)


class Topics(NamedTuple):
    """The partitions that a subscription matches now."""

    ids: Mapping[str, str]
    partitions: tuple[TopicPartition, ...]


class LookUps:
    """Waits for brokers and leaders up to `patience_s`, and then raises NetworkError or BrokerError.

    A topic or offset known before is not given up because one broker denies it: that broker may have been cut off from
    the others for long, and a driver that reaches only it would lose records that all others have. A second broker must
    confirm the denial, and is waited for (`minibroker.client.cluster.metadata.is_denied`, `is_confirmed`).

    The end of a log, LATEST, is its high watermark, or for READ_COMMITTED its last stable offset.
    """

    def __init__(self, cluster: ClientRuntime, patience_s: float, isolation_level: int = READ_UNCOMMITTED) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._isolation_level = isolation_level
        self._missing: frozenset[str] = frozenset()
        """Topics and partitions that are missing although they were waited for."""
        self._wanted: set[str] = set()

    def _now(self) -> float:
        return self._cluster.clock.monotonic()

    async def topics(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> Topics:
        """Return the existing topics and partitions of the subscription, with all topics of `since` unless those are
        known to be gone.

        Raises BrokerError if a named topic or partition does not exist; if `is_lenient`, it is left out with a warning.
        A pattern may match nothing.
        """
        names = sorted({*subscription.topics, *(partition.topic for partition in subscription.partitions)}) or None
        metadata = self._cluster.metadata
        began = self._now()
        while True:
            response = await metadata.request_any(METADATA, m.MetadataRequest(names), timeout_s=self._patience_s)
            problems = _problems(subscription, response)
            missing = frozenset(problems) if all(map(says_unknown, problems.values())) else frozenset()
            if is_lenient and missing and missing <= self._missing:
                break
            problem = next(iter(problems.values()), None) or await self._hidden(subscription, response, since)
            if problem is None:
                break
            if not problem.retriable or self._now() >= began + self._patience_s:
                raise problem
            if missing and self._now() >= began + UNKNOWN_TOPIC_PATIENCE_S and await self._are_denied(response):
                if not is_lenient:
                    raise problem
                logger.warning("%s (failOnDataLoss=false: going on without)", "; ".join(map(str, problems.values())))
                break
            await asyncio.sleep(self._cluster.retry_backoff_s)
        self._missing = missing
        wanted = [topic for topic in response.topics if topic.partitions and _is_wanted(subscription, topic)]
        for topic in self._wanted - {topic.name for topic in wanted}:
            metadata.unwant(topic)
        return Topics(
            {topic.name: topic.topic_id for topic in wanted},
            tuple(
                sorted(
                    partition
                    for topic in wanted
                    for entry in topic.partitions
                    if subscription.wants(partition := TopicPartition(topic.name, entry.partition_index))
                )
            ),
        )

    async def _are_denied(self, response: m.MetadataResponse) -> bool:
        """Return whether other brokers also deny the topics that `response` does not know."""
        unknown = [topic.name for topic in response.topics if not topic.partitions]
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone(unknown)
        return all(is_denied(metadata.cluster, topic, None, answers) for topic in unknown)

    async def _hidden(
        self, subscription: Subscription, response: m.MetadataResponse, since: Offsets | None
    ) -> BrokerError | None:
        """Return an error for a topic of `since` that `response` lacks or has with another id, but may still exist."""
        there = {topic.name: topic.topic_id for topic in response.topics if topic.partitions}
        lacking = {
            topic: entry.topic_id
            for topic, entry in (since or {}).items()
            if subscription.wants_topic(topic) and there.get(topic) != entry.topic_id and topic not in self._missing
        }
        if not lacking:
            return None
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone(lacking)
        for topic, topic_id in lacking.items():
            if not is_denied(metadata.cluster, topic, topic_id, answers):
                return BrokerError(ErrorCode.UNKNOWN_TOPIC_ID, f"topic {topic} with id {topic_id}")
        return None

    async def offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, Found]:
        """Look up timestamps, EARLIEST or LATEST, at leaders not older than `known`."""
        found: dict[TopicPartition, Found] = {}
        for partition in timestamps:
            self._wanted.add(partition.topic)
            self._cluster.metadata.want(partition.topic)
        deadline = self._now() + self._patience_s
        was_unknown = False
        while True:
            missing = {partition: what for partition, what in timestamps.items() if partition not in found}
            try:
                await find_offsets(
                    self._cluster,
                    missing,
                    min(UNKNOWN_TOPIC_PATIENCE_S, self._patience_s),
                    found,
                    known,
                    isolation_level=self._isolation_level,
                )
                return found
            except (NetworkError, BrokerError) as error:
                # This is the last of many errors: a broker that has just started denies any topic, but not twice.
                is_unknown = isinstance(error, BrokerError) and says_unknown(error)
                is_final = isinstance(error, BrokerError) and not error.retriable
                if is_final or (is_unknown and was_unknown) or self._now() >= deadline:
                    raise
                was_unknown = is_unknown

    async def ends(
        self, known: Mapping[TopicPartition, Known], at_least: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Found]:
        """Return the ends of the logs, from leaders not older than `known`. An end below
        `at_least`, which was reached before, must be confirmed by another broker."""
        deadline = self._now() + self._patience_s
        while True:
            found = await self.offsets(dict.fromkeys(known, LATEST), known)
            low = [partition for partition, least in at_least.items() if offset_of(found[partition]) < least]
            doubtful = await self._doubtful({partition: found[partition].leader_epoch for partition in low})
            if not doubtful:
                return found
            if self._now() >= deadline:
                first = doubtful[0]
                raise NetworkError(
                    f"{first} ends at offset {offset_of(found[first])}, says its leader of epoch "
                    f"{found[first].leader_epoch}, but it is known to have reached {at_least[first]}; no other broker "
                    "could be reached that knows whether that one still leads. See `minibroker status`, and whether "
                    "this machine reaches all brokers"
                )
            await asyncio.sleep(self._cluster.retry_backoff_s)

    async def _doubtful(self, epochs: Mapping[TopicPartition, int]) -> list[TopicPartition]:
        """Return the partitions whose leader of this epoch no other broker confirms."""
        if not epochs:
            return []
        metadata = self._cluster.metadata
        answers = await metadata.ask_everyone({partition.topic for partition in epochs})
        doubtful = []
        for partition, epoch in epochs.items():
            leader = metadata.cluster.leader(*partition)
            is_same = leader is not None and leader.epoch == epoch
            if leader is None or not is_same or not is_confirmed(metadata.cluster, partition, leader, answers):
                doubtful.append(partition)
        return doubtful

    async def latest(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> dict[str, TopicOffsets]:
        deadline = self._now() + self._patience_s
        while True:
            topics = await self.topics(subscription, is_lenient=is_lenient, since=since)
            same = {topic: entry for topic, entry in (since or {}).items() if topics.ids.get(topic) == entry.topic_id}
            epochs, offsets = epochs_of(same), by_partition(same)
            known = {
                partition: Known(topics.ids[partition.topic], epochs.get(partition, NO_EPOCH))
                for partition in topics.partitions
            }
            try:
                found = await self.ends(
                    known, {partition: offsets[partition] for partition in known if partition in offsets}
                )
            except BrokerError as error:
                # The topic was deleted between the two requests, or created again. The next look at the topics says so.
                is_gone = says_unknown(error) and (is_lenient or self._now() < deadline)
                is_another = error.code is ErrorCode.UNKNOWN_TOPIC_ID and self._now() < deadline
                if not is_gone and not is_another:
                    raise
                continue
            return grouped(
                topics.ids,
                {partition: offset_of(end) for partition, end in found.items()},
                {partition: end.leader_epoch for partition, end in found.items()},
            )


def offset_of(found: Found) -> int:
    return 0 if found.result is None else found.result.offset


def _problems(subscription: Subscription, response: m.MetadataResponse) -> dict[str, BrokerError]:
    """Return the errors, by the missing topic or partition."""
    if not response.brokers:
        # It has just started, and has no metadata from the controller yet.
        return {"": BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, "a broker that knows of no broker")}
    there = {topic.name: topic for topic in response.topics}
    problems: dict[str, BrokerError] = {}
    for name in subscription.topics:
        topic = there.get(name)
        if topic is None or not topic.partitions:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else error_of(topic.error_code)
            problems[name] = BrokerError(code or ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name}")
    for partition in subscription.partitions:
        topic = there.get(partition.topic)
        indexes = [] if topic is None else sorted(entry.partition_index for entry in topic.partitions)
        if partition.partition not in indexes:
            problems[str(partition)] = (
                no_such_partition(partition, len(indexes))
                if indexes
                else BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {partition}; there is no such topic")
            )
    return problems


def says_unknown(error: BrokerError) -> bool:
    return error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _is_wanted(subscription: Subscription, topic: m.MetadataTopic) -> bool:
    return subscription.wants_topic(topic.name) and (subscription.pattern is None or not topic.is_internal)

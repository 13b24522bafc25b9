"""Planted bugs of retention: deletion at the start of a log, and followers that adopt it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec

from minibroker.broker.replication.following import copying
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.upkeep import log_retention
from minibroker.broker.replication.upkeep.log_cleaner import LogCleaner
from minibroker.broker.settings.types import InvalidConfig
from minibroker.broker.storage import log, retention
from minibroker.broker.storage.flushing import FlushedLog
from minibroker.broker.storage.segment import Segment
from minibroker.protocol.messages import FetchPartitionResponse
from minibroker.protocol.znodes import MalformedZnode
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KAFKA-5634", "the leader deletes by age and size beyond its high watermark")
def deleted_above_the_high_watermark(patches: Patches) -> None:
    @patches.instead_of(retention, "expired")
    def expired(original: Any, *segments: Any, high_watermark: int, **rest: Any) -> Any:
        return original(*segments, high_watermark=math.inf, **rest)


@mutant("retention", "the age of a segment is that of its first batch")
def aged_by_the_first_batch(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "extents")
    def extents(original: Any, self: FlushedLog) -> Any:
        found = zip(original(self), self._segments, strict=True)
        return [e._replace(newest_ms=s.first_timestamp) if s.size else e for e, s in found]


@mutant(
    "retention", "a segment is deleted as soon as the log exceeds its size limit, even if the rest is then below it"
)
def a_segment_too_many(patches: Patches) -> None:
    @patches.instead_of(retention, "expired")
    def expired(original: Any, segments: Any, **rest: Any) -> Any:
        largest = max(segment.size for segment in segments)
        if rest["retention_bytes"] is not None:
            rest["retention_bytes"] = max(0, rest["retention_bytes"] - largest + 1)
        return original(segments, **rest)


@mutant("retention", "followers decide about deletion by age and size themselves")
def followers_delete_by_themselves(patches: Patches) -> None:
    @patches.instead_of(log_retention, "expired_until")
    def expired_until(original: Any, partition: Partition, now_ms: int, limit: int) -> Any:
        if partition.is_leader:
            return original(partition, now_ms, limit)
        return retention.expired(
            partition.log.extents(),
            log_start_offset=partition.log.log_start_offset,
            high_watermark=min(limit, partition.high_watermark),
            now_ms=now_ms,
            retention_ms=partition.log.config.retention_ms,
            retention_bytes=partition.log.config.retention_bytes,
        )


@mutant("retention", "a follower does not adopt its leader's log start")
def log_start_not_adopted(patches: Patches) -> None:
    @patches.instead_of(copying, "apply_fetched")
    def apply_fetched(original: Any, partition: Partition, response: Any) -> Any:
        response.log_start_offset = 0
        return original(partition, response)


@mutant(
    "a batch twice", "a replica that begins at its leader's log start does not know the producers of earlier records"
)
def begins_without_producers(patches: Patches) -> None:
    @patches.instead_of(copying, "restart")
    def restart(original: Any, partition: Partition, refusal: FetchPartitionResponse) -> None:
        original(partition, msgspec.structs.replace(refusal, producers=memoryview(b"")))


@mutant("a batch twice", "such a replica does not store the producers that it was sent")
def told_producers_are_not_written(patches: Patches) -> None:
    patches.set(log, "write_told", lambda *_: None)


@mutant("outdated rule", "deletion and compaction use the settings that this broker has cached")
def settings_not_read_before_deletion(patches: Patches) -> None:
    @patches.instead_of(ReplicaSettings, "with_present_settings")
    async def with_present_settings(_original: Any, self: ReplicaSettings, partitions: Any) -> list[Partition]:
        return list(partitions)


@mutant("outdated rule", "records written after the read of the settings are compacted by these settings")
def compacted_past_what_was_asked(patches: Patches) -> None:
    @patches.instead_of(LogCleaner, "_candidate")
    def candidate(original: Any, self: LogCleaner, partition: Partition, limit: int) -> Any:
        return original(self, partition, partition.high_watermark)


@mutant("busy loop", "a failed pass of the cleaner counts as done and is repeated at once")
def cleaner_never_waits(patches: Patches) -> None:
    @patches.instead_of(LogCleaner, "_compact")
    async def compact(original: Any, self: LogCleaner, *arguments: Any) -> bool:
        await original(self, *arguments)
        return True


@mutant("outdated rule", "records written after the read of the settings are deleted by these settings")
def deleted_past_what_was_asked(patches: Patches) -> None:
    @patches.instead_of(log_retention, "expire")
    def expire(original: Any, partition: Partition, now_ms: int, limit: int) -> None:
        original(partition, now_ms, partition.high_watermark)


@mutant("outdated rule", "a broker that cannot read the settings continues to delete by the former ones")
def deletes_by_what_held_before(patches: Patches) -> None:
    @patches.instead_of(ReplicaSettings, "topic_config_changed")
    async def topic_config_changed(original: Any, self: ReplicaSettings, topic: str, session: Any) -> None:
        with suppress(InvalidConfig, MalformedZnode):
            await original(self, topic, session)


@mutant("no timestamps", "a segment without timestamps counts as old as 1970")
def aged_since_1970(patches: Patches) -> None:
    @patches.instead_of(Segment, "newest_ms")
    def newest_ms(original: Any, self: Segment) -> int:
        return max(self.max_timestamp, 0)

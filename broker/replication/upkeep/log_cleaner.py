"""Compacts the logs of topics with cleanup.policy=compact, the dirtiest first, one at a time (Kafka's LogCleaner).

Each replica compacts its own log, as far as it is committed. So replicas of one partition may differ in earlier records
of a key, never in the latest one.

The policy of a topic is read again before each pass. An operator may have set another policy since, and clients written
records that must all stay; a replica that does not know the change would keep only the latest, and might lead. Records
from before the settings were read may go, as if they had gone then.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.throttle import Quota
from minibroker.broker.replication.upkeep import WithPresentSettings
from minibroker.broker.scheduling.sleeps import Sleeps
from minibroker.broker.storage.compaction.cleanable import Candidate, Cleanable, dirtiest
from minibroker.broker.storage.compaction.cleaning import CannotBeCleaned
from minibroker.broker.storage.compaction.key_map import KeyMap
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.replication")

LEAST_BACKOFF_S = 0.1
"""A look goes over all partitions, and a back-off of 0 is to leave time for other work."""


class CleanerSettings(NamedTuple):
    """`log.cleaner.*`."""

    backoff_ms: int
    dedupe_buffer_size: int
    io_max_bytes_per_second: float


class LogCleaner:
    def __init__(
        self,
        world: World,
        logs: LogDirs,
        partitions: Mapping[TopicPartition, Partition],
        settings: CleanerSettings,
        sleeps: Sleeps,
        with_present_settings: WithPresentSettings,
    ) -> None:
        """`partitions` is read anew each time."""
        self._world = world
        self._logs = logs
        self._partitions = partitions
        self._settings = settings
        self._sleeps = sleeps
        self._with_present_settings = with_present_settings
        self._uncleanable: dict[TopicPartition, Log] = {}
        """Logs that are left alone, since they could not be read."""
        self._quota = Quota(settings.io_max_bytes_per_second, world.clock, burst_s=0)
        """The most bytes read and written per second."""
        self._done_bytes = 0
        """Read and written by the pass that is under way."""
        self.passes = 0

    @property
    def uncleanable(self) -> int:
        """How many logs are left alone, since they could not be read; until the broker starts anew."""
        return sum(
            partition.topic_partition in self._uncleanable
            and self._uncleanable[partition.topic_partition] is partition.log
            for partition in self._partitions.values()
        )

    def configure(self, settings: CleanerSettings) -> None:
        """Apply new settings at any time. The caller must wake the sleeping task."""
        self._settings = settings
        self._quota.change_rate(settings.io_max_bytes_per_second)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while await self.run_once():
                pass
            await self._sleeps.sleep(lambda: max(LEAST_BACKOFF_S, self._settings.backoff_ms / 1_000))

    async def run_once(self) -> bool:
        """One pass over the dirtiest log; if that is given up or fails, over the next one. False: no log is dirty
        enough, or none of those could be compacted."""
        found: list[tuple[Partition, Candidate]] = []
        for partition in list(self._partitions.values()):
            candidate = self._candidate(partition, partition.last_stable_offset)
            if candidate is not None:
                found.append((partition, candidate))
        while (chosen := dirtiest(candidate for _, candidate in found)) is not None:
            partition = next(partition for partition, candidate in found if candidate is chosen)
            what = await self._what_may_go(partition)
            if what is not None and await self._compact(partition.log, what):
                return True
            found.remove((partition, chosen))
        return False

    def _candidate(self, partition: Partition, limit: int) -> Candidate | None:
        log = partition.log
        if not log.config.compact or self._uncleanable.get(partition.topic_partition) is log:
            return None
        try:
            return log.candidate(limit, self._world.clock.wall_ms())
        except BrokerError as error:
            self._leave_alone(log, error)
            return None

    async def _what_may_go(self, partition: Partition) -> Cleanable | None:
        """Return the candidate by the present settings. None: there is none, or the settings cannot be read."""
        limit = partition.last_stable_offset  # the settings that were read may not apply to later records
        if not await self._with_present_settings([partition]):
            return None
        candidate = self._candidate(partition, min(limit, partition.last_stable_offset))
        return None if candidate is None or dirtiest([candidate]) is None else candidate.cleanable

    async def _compact(self, log: Log, what: Cleanable) -> bool:
        """False: it was given up, or has failed. It may fail again at once, so `run` must not go on for it."""
        key_map = KeyMap(self._settings.dedupe_buffer_size, self._world.random.randbytes(16))
        before_bytes, began_s, self._done_bytes = log.size, self._world.clock.monotonic(), 0
        try:
            if not await log.compact(what, key_map, self._pace):
                return False
        except (BrokerError, CannotBeCleaned) as error:
            self._leave_alone(log, error)
            return False
        self.passes += 1
        logger.info(
            "%s: compacted from offset %d to %d, %d keys, %d to %d bytes; %d bytes read and written in %.3f s",
            log.partition,
            what.first_dirty,
            log.first_dirty_offset,
            len(key_map),
            before_bytes,
            log.size,
            self._done_bytes,
            self._world.clock.monotonic() - began_s,
        )
        await self._logs.at(log.log_dir, LogCheckpoints.checkpoint_first_dirty_offsets)
        return True

    def _leave_alone(self, log: Log, error: MinibrokerError) -> None:
        if isinstance(error, BrokerError) and error.code in (
            ErrorCode.KAFKA_STORAGE_ERROR,  # its directory is offline, which is reported elsewhere
            ErrorCode.NOT_LEADER_OR_FOLLOWER,  # it is closed
        ):
            return
        self._uncleanable[log.partition] = log
        logger.error("%s is not compacted any more until this broker starts anew: %s", log.partition, error)

    async def _pace(self, done: int, stopped: asyncio.Event) -> None:
        self._done_bytes += done
        self._quota.record(done)
        await self._sleeps.sleep_until(lambda: self._quota.free_at_s, stopped)

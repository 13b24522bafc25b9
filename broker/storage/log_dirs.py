"""The log directories of a broker (`log.dirs`): the replicas in each, and what happens when a disk fails.

Each directory has its own `LogManager`, with its lock, checkpoints and marker of a clean stop. A directory that cannot
be opened, or whose disk fails or hangs later, is offline until the broker is restarted; the others serve on. Meanwhile
nothing is written there, and no replica that may be in it is made anew elsewhere: its broker may be on record as having
acknowledged records, and would lead with an empty log. So only a replica that is new to the cluster (`is_new`, as in
Kafka) is created, in the online directory with the fewest replicas.

A replica in several directories is one whose directory came back: the broker had gone on without it and made the
replica anew in another (or an operator copied it). The longest log is served, by the rule of the last resort in
elections; the others are renamed, and kept until an operator removes them. (Kafka does not start then.) The choice
loses nothing, since nothing here is trusted until the broker has caught up. Rejected: serving none until an operator
removes one (at night, none is there); serving the one that was made last (no file says so, and a directory may go and
come more than once).

A *stray* is a replica of a topic that was deleted while its directory was not in `log.dirs`. The next topic of that
name shows it: ids tell their age (`protocol.topic_ids`), and no topic is created while an older one has its name. So
only the replica of an older topic gives way, never one of a newer topic to an order that comes late.

A replica can be moved from one directory to another (`replication.upkeep.log_mover`), and no crash leaves none: the
copy is complete and on disk before it gets its name, and only then does the other one lose its own. A start between the
two finds both, and keeps one as above.

Whether this broker's data can be trusted is decided by all its directories together: see `continuity`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from minibroker.broker.storage.descriptors import Room, room_on
from minibroker.broker.storage.directory import HUNG_AFTER_S, LogDirectoryFailed
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.recovery.continuity import combined, least_of
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.recovery_progress import RecoveryProgress
from minibroker.protocol.topic_ids import age, is_older
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.storage")


class LogDirs:
    """Use: `open`, then anything, then `close`. Belongs to the event loop."""

    def __init__(
        self,
        world: World,
        log_dirs: Sequence[str],
        broker_id: int,
        *,
        default_config: LogConfig | None = None,
        checkpoint_interval_ms: int = 60_000,
    ) -> None:
        """`log_dirs` are absolute paths, none within another. The other arguments are as for `LogManager`."""
        self.paths = tuple(log_dirs)
        self._world = world
        self._candidates = [
            LogManager(
                world, path, broker_id, default_config=default_config, checkpoint_interval_ms=checkpoint_interval_ms
            )
            for path in log_dirs
        ]
        self._managers: list[LogManager] = []
        """The directories that were opened, in the order of the setting. Some may have failed since."""
        self._unopened: dict[str, str] = {}
        """The paths of the others, and the reason."""
        self._listeners: list[Callable[[LogManager], None]] = []

    # -- open and close --

    async def open(self, cluster_id: str) -> None:
        """Take the directories and open every log in them. Raises DataDirectoryUnusable if a directory belongs to
        another broker, or if none can be used."""
        try:
            outcomes = await asyncio.gather(
                *(self._open(manager, cluster_id) for manager in self._candidates), return_exceptions=True
            )
            failures = [outcome for outcome in outcomes if outcome is not None]
            for failure in failures:
                if not self._managers or not isinstance(failure, LogDirectoryFailed):
                    raise failure
                logger.error("going on without it: %s", failure)
            self._managers.sort(key=self._candidates.index)
            await self._set_doubles_aside()
            await self._agree()
            if not self.online:
                raise LogDirectoryFailed("; ".join(self.offline.values()))
            for manager in self._managers:
                manager.directory.on_offline(partial(self._failed, manager))
                manager.directory.on_silence(partial(self._silent, manager))
        except BaseException:
            await self.close(clean=False)
            raise

    async def _open(self, manager: LogManager, cluster_id: str) -> None:
        try:
            await manager.open(cluster_id)
        except LogDirectoryFailed as error:
            self._unopened[manager.log_dir] = str(error)
            raise
        self._managers.append(manager)

    async def _set_doubles_aside(self) -> None:
        homes: dict[TopicPartition, list[LogManager]] = {}
        for manager in self._managers:
            for partition in (*(log.partition for log in manager.logs()), *manager.damaged):
                homes.setdefault(partition, []).append(manager)
        for partition, managers in sorted(homes.items()):
            if len(managers) < 2:
                continue
            held = [await manager.topic_id(partition) for manager in managers]
            await self._going_on(self._set_strays_aside(partition, max(held, key=lambda topic_id: age(topic_id) or -1)))
            await self._going_on(self._keep_the_longest(partition))

    async def _keep_the_longest(self, partition: TopicPartition) -> None:
        """Keep one of several replicas of the partition. Raises BrokerError KAFKA_STORAGE_ERROR."""
        homes = self._homes(partition)
        if len(homes) < 2:
            return
        where = " and in ".join(manager.log_dir for manager in homes)
        for manager in homes:
            await manager.distrust(f"{partition} is in {where}")
        kept = max(homes, key=lambda manager: _how_long(manager.get(partition)))
        for manager in homes:
            if manager is not kept:
                await manager.set_stray_aside(partition, f"it is in {where}, and not longer here")

    async def _set_strays_aside(self, partition: TopicPartition, topic_id: str) -> None:
        """Set aside replicas of older topics of that name. Raises BrokerError KAFKA_STORAGE_ERROR."""
        for manager in self._managers:
            held = await manager.topic_id(partition)
            if is_older(held, topic_id):
                await manager.set_stray_aside(
                    partition, f"its topic, {held}, was deleted, and {topic_id} came after it"
                )

    async def _agree(self) -> None:
        verdict = combined([manager.continuity.witness() for manager in self._managers], len(self._unopened))
        if verdict.doubt:
            logger.warning("what this broker had is not believed until it has caught up: %s", verdict.doubt)
        for manager in self._managers:
            await self._going_on(manager.agree(verdict))

    async def close(self, *, clean: bool = True, broker_epoch: int = -1) -> None:
        """Stop. With `clean`, everything in online directories is on disk on return, with the marker that says so.
        Appends must have stopped before. Errors are raised when all directories are closed."""
        if clean and len(self.online) > 1:
            await asyncio.gather(*(self._going_on(m.checkpoints.checkpoint_recovery_points()) for m in self.online))
            await self.note_failed()  # while the others can still be written to
        outcomes = await asyncio.gather(
            *(manager.close(clean=clean, broker_epoch=broker_epoch) for manager in self._managers),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    @property
    def recovery(self) -> dict[str, RecoveryProgress]:
        """The progress of opening the logs, by directory."""
        return {manager.log_dir: manager.recovery for manager in self._candidates}

    # -- which are online --

    @property
    def online(self) -> list[LogManager]:
        """The online directories, in the order of the setting."""
        return [manager for manager in self._managers if manager.directory.failure is None]

    @property
    def offline(self) -> dict[str, str]:
        """The paths of the offline directories, and the reason."""
        failed = {
            manager.log_dir: str(manager.directory.failure)
            for manager in self._managers
            if manager.directory.failure is not None
        }
        return {**self._unopened, **failed}

    def on_offline(self, listener: Callable[[LogManager], None]) -> None:
        """Call `listener` once for each opened directory that fails: nothing is appended to its logs or read from them
        any more."""
        self._listeners.append(listener)

    def _failed(self, manager: LogManager) -> None:
        for listener in self._listeners:
            listener(manager)

    def _silent(self, manager: LogManager) -> None:
        """Give up a directory whose disk hangs if the broker can go on with another. If all disks hang, the cause is
        not one disk, and may pass."""
        others = [other for other in self.online if other is not manager]
        if manager.directory.failure is not None or any(
            other.directory.silent_s < HUNG_AFTER_S / 2 for other in others
        ):
            manager.directory.give_up()

    async def note_failed(self) -> None:
        """Record in the online directories, durable on return, which others have failed. Their data is not trusted when
        they are back, even if their own disks could not record the failure."""
        failed = [
            manager.continuity.directory_id for manager in self._managers if manager.directory.failure is not None
        ]
        await asyncio.gather(*(self._going_on(manager.note_failed(failed)) for manager in self.online))

    # -- what the cluster may believe --

    @property
    def trusted_since(self) -> int:
        """The broker epoch since which nothing was lost; SINCE_THIS_REGISTRATION: from the next registration on."""
        return least_of(manager.continuity.trusted_since for manager in self.online)

    @property
    def synced_since(self) -> int:
        """The broker epoch since which nothing flushed was lost."""
        return least_of(manager.continuity.synced_since for manager in self.online)

    def registered(self, broker_epoch: int) -> None:
        """As `LogManager.registered`, for every directory."""
        for manager in self._managers:
            manager.registered(broker_epoch)

    # -- logs --

    @property
    def room(self) -> Room:
        """The room for files, the same for all directories."""
        return room_on(self._world.disk)

    def get(self, partition: TopicPartition) -> Log | None:
        for manager in self._managers:
            log = manager.get(partition)
            if log is not None:
                return log
        return None

    def logs(self) -> Iterator[Log]:
        """Yield the logs in online directories."""
        for manager in self.online:
            yield from manager.logs()

    def logs_in(self, path: str) -> list[Log]:
        """Return the logs of one directory; empty if it is offline."""
        return [log for manager in self._online_at(path) for log in manager.logs()]

    async def space(self, path: str) -> tuple[int, int]:
        """As `LogManager.space`, also for a directory that is offline."""
        return await next(manager.space() for manager in self._candidates if manager.log_dir == path)

    @property
    def damaged(self) -> dict[TopicPartition, str]:
        """Replicas in online directories that could not be opened or were set aside, and the reason."""
        return {partition: why for manager in self.online for partition, why in manager.damaged.items()}

    @property
    def healable(self) -> set[TopicPartition]:
        """The damaged replicas that a copy from the leader would replace: those with damaged files, in one directory
        only. Empty while a directory could not be opened, since nothing is made anew then."""
        found = {partition for manager in self.online for partition in manager.healable}
        return set() if self._unopened else {p for p in found if len(self._homes(p)) == 1}

    @property
    def offline_replica_count(self) -> int:
        """The number of known replicas that are offline. Those in a directory that could not be opened are unknown."""
        return sum(len(m.damaged) if m.directory.failure is None else m.replica_count for m in self._managers)

    def is_offline(self, partition: TopicPartition) -> bool:
        """Whether the partition has a replica that is damaged or in a failed directory, and none that can be served.
        (One that was being moved has another, in the directory that works.)"""
        if any(m.directory.failure is None and m.get(partition) is not None for m in self._managers):
            return False
        return any(m.directory.failure is not None or partition in m.damaged for m in self._homes(partition))

    def _homes(self, partition: TopicPartition) -> list[LogManager]:
        return [manager for manager in self._managers if manager.has(partition)]

    def _check_homes(self, homes: Sequence[LogManager], partition: TopicPartition, *, may_be_unknown: bool) -> None:
        """Raises BrokerError KAFKA_STORAGE_ERROR if the replica is, or may be, in an offline directory."""
        for manager in homes:
            manager.directory.check()
        if self._unopened and not homes and not may_be_unknown:
            raise BrokerError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{partition} may be in {' or '.join(self._unopened)}, which could not be opened",
            )

    async def topic_id(self, partition: TopicPartition) -> str:
        """As `LogManager.topic_id`, for the first replica that has one."""
        for manager in self._homes(partition):
            topic_id = await manager.topic_id(partition)
            if topic_id:
                return topic_id
        return ""

    def set_aside(
        self, partition: TopicPartition, reason: str, *, is_damaged: bool = False
    ) -> Coroutine[Any, Any, None]:
        """As `LogManager.set_aside`."""
        homes = self._homes(partition)
        return _all_of([manager.set_aside(partition, reason, is_damaged=is_damaged) for manager in homes])

    async def get_or_create(
        self, partition: TopicPartition, topic_id: str, config: LogConfig, *, is_new: bool = False
    ) -> Log:
        """As `LogManager.get_or_create`, but a replica of an older topic gives way. Also raises KAFKA_STORAGE_ERROR if
        the replica is, or may be, in an offline directory. `is_new`: the partition is new, so no directory has an
        earlier replica."""
        await self._set_strays_aside(partition, topic_id)
        await self._keep_the_longest(partition)
        homes = self._homes(partition)
        self._check_homes(homes, partition, may_be_unknown=is_new)
        home = homes[0] if homes else min(self.online, key=lambda manager: manager.replica_count, default=None)
        if home is None:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, "no log directory is online")
        log = await home.get_or_create(partition, topic_id, config)
        home.directory.check()  # another log's write may have failed during the wait
        return log

    async def create(
        self, partitions: Sequence[TopicPartition], topic_id: str, config: LogConfig, new: Collection[TopicPartition]
    ) -> None:
        """Create the logs of partitions of one topic that are in no directory yet, as far as that works;
        `get_or_create` reports each failure. `new` are the partitions that are new to the cluster."""
        shares: dict[LogManager, list[TopicPartition]] = {}
        online = self.online
        if not online:
            return
        for partition in partitions:
            if not self._homes(partition) and (partition in new or not self._unopened):
                home = min(online, key=lambda manager: manager.replica_count + len(shares.get(manager, ())))
                shares.setdefault(home, []).append(partition)
        for home, share in shares.items():
            with suppress(BrokerError):
                await home.create(share, topic_id, config)

    async def delete(self, partition: TopicPartition) -> None:
        """As `LogManager.delete`. Also raises KAFKA_STORAGE_ERROR if an offline directory has the replica, or may have
        it: it would come back with the directory."""
        homes = self._homes(partition)
        self._check_homes(homes, partition, may_be_unknown=False)
        for manager in homes:
            await manager.delete(partition)

    # -- moving from one directory to another --

    def check_destination(self, partition: TopicPartition, path: str) -> None:
        """Raises BrokerError: LOG_DIR_NOT_FOUND if there is no such directory, KAFKA_STORAGE_ERROR if it is offline."""
        if path not in self.paths:
            raise BrokerError(
                ErrorCode.LOG_DIR_NOT_FOUND,
                f"{partition} cannot be moved to {path!r}: the log directories of this broker are "
                f"{', '.join(self.paths)}",
            )
        if path in self.offline:
            raise BrokerError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{partition} cannot be moved to {path}, which is offline: {self.offline[path]}",
            )

    def _destination(self, partition: TopicPartition, path: str) -> LogManager:
        """Raises as `check_destination`."""
        self.check_destination(partition, path)
        return next(iter(self._online_at(path)))

    async def create_future(self, original: Log, path: str, config: LogConfig) -> Log:
        """Return an empty log in the directory `path` for a copy of `original`: see `LogManager.create_future`. Raises
        BrokerError as `check_destination`, also KAFKA_STORAGE_ERROR if there is too little room for the copy."""
        partition = original.partition
        destination = self._destination(partition, path)
        if destination.has(partition):
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"there is, or may be, a replica of it in {path} already")
        _, usable_bytes = await destination.space()
        if 0 <= usable_bytes < original.size:
            raise BrokerError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{path} has room for {usable_bytes} bytes, and the replica in {original.path} has {original.size}",
            )
        return await destination.create_future(partition, original.topic_id, config)

    async def discard_future(self, future: Log) -> None:
        """As `LogManager.discard_future`."""
        for manager in self._managers:
            if manager.log_dir == future.log_dir:
                await manager.discard_future(future)

    def replace(self, original: Log, future: Log, high_watermark: int) -> asyncio.Task[None]:
        """Serve the replica from `future`, which is complete, from this turn of the loop on; blocks on the disk. The
        returned task ends when `original` is gone: see `LogManager.give_away`. Raises BrokerError as
        `LogManager.adopt_future`, with nothing replaced."""
        partition = original.partition
        source = next(manager for manager in self._managers if manager.get(partition) is original)
        self._destination(partition, future.log_dir).adopt_future(future, high_watermark)
        return source.give_away(partition)

    # -- checkpoints --

    def high_watermark(self, partition: TopicPartition) -> int:
        """As `LogManager.high_watermark`."""
        return max((manager.checkpoints.high_watermark(partition) for manager in self._homes(partition)), default=0)

    async def at(self, path: str, work: Callable[[LogCheckpoints], Awaitable[object]]) -> None:
        """Do this work on the checkpoints of a directory, if it is online. A disk that fails at it takes it offline."""
        for manager in self._online_at(path):
            await self._going_on(work(manager.checkpoints))

    def _online_at(self, path: str) -> list[LogManager]:
        return [manager for manager in self.online if manager.log_dir == path]

    async def _going_on(self, work: Awaitable[object]) -> None:
        """Do the work, and ignore the failure of its directory, which is reported already."""
        try:
            await work
        except BrokerError as error:
            if error.code is not ErrorCode.KAFKA_STORAGE_ERROR:
                raise


def _how_long(log: Log | None) -> tuple[int, int, int]:
    """Order logs by last epoch, then end. Of two that end alike the younger one begins later, since records were
    deleted in between. None: the log cannot be opened."""
    return (NO_EPOCH - 1, -1, -1) if log is None else (log.latest_epoch, log.log_end_offset, log.log_start_offset)


async def _all_of(works: Sequence[Awaitable[None]]) -> None:
    for work in works:
        await work

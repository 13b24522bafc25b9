"""The logs of one log directory (the larger part of Kafka's LogManager): opening, creating, deleting, closing.

A worker thread opens each log. A log with damaged files costs this broker that replica and nothing else: the replica is
listed in `damaged`, and requests for it raise until it is deleted, which happens once the cluster no longer counts on
it (`replication/upkeep/healing.py`). The same holds for a log that turns out to be damaged while in use, or whose
contract was broken (`set_aside`); the latter is never deleted. If the disk itself fails (DISK_ERRORS), the log
directory is not opened: an error that the next start may not meet must not cost a replica for the broker's lifetime.
Operations that block for more than a moment (creating, deleting, recovering) run off the event loop, one at a time for
each partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from minibroker.broker.storage.checkpoints import (
    MalformedFile,
)
from minibroker.broker.storage.descriptors import TooManySegments, check_room
from minibroker.broker.storage.directory import (
    DELETED,
    FUTURE,
    STRAY,
    DataDirectoryUnusable,
    LogDirectory,
    LogDirectoryFailed,
    moved_name,
)
from minibroker.broker.storage.flushing import SHORTAGE_PAUSE_S, write_topic_id
from minibroker.broker.storage.io_errors import DISK_ERRORS, Shortage, Trouble, shortage, trouble_of
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.opening import LogOpener, Opened, read_topic_id
from minibroker.broker.storage.recovery.continuity import CONTINUITY_FILE, DataContinuity, Verdict
from minibroker.broker.storage.recovery.recovery import (
    DamagedLog,
    RecoveryReport,
    to_be_read,
)
from minibroker.broker.storage.recovery.recovery_progress import DirectoryProgress
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition, topic_name_problem
from minibroker.protocol.records import CorruptRecord
from minibroker.protocol.recovery_progress import RecoveryProgress
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.storage")

SHORTAGE_PATIENCE_S = 5.0
"""Seconds that an indispensable change waits for file descriptors to become free. Some orders wait behind it."""

NEWS_INTERVAL_S = 5.0
"""Seconds between two log lines about the progress of a long recovery."""

T = TypeVar("T")

_COPIED_AGAIN = (
    "It is copied again once another broker leads and nothing depends on this one; until then, nothing of it is deleted"
)


class LogManager:
    """Use: `open`, then anything, then `close`. Belongs to the event loop, except for `write_high_watermarks`."""

    def __init__(
        self,
        world: World,
        log_dir: str,
        broker_id: int,
        *,
        default_config: LogConfig | None = None,
        checkpoint_interval_ms: int = 60_000,
    ) -> None:
        """`log_dir` is an absolute path. `default_config` applies to logs until a role is ordered for them;
        `checkpoint_interval_ms` is log.flush.offset.checkpoint.interval.ms."""
        if not log_dir.startswith("/"):
            raise ValueError(f"the log directory {log_dir!r} must be an absolute path")
        self.log_dir = log_dir
        self.was_clean = False
        """The previous broker stopped cleanly, so nothing can be missing."""
        self.previous_broker_epoch = -1
        """The epoch of the broker that stopped cleanly, -1 if unknown."""
        self.reports: dict[TopicPartition, RecoveryReport] = {}
        """A report of the opening of each log."""
        self.damaged: dict[TopicPartition, str] = {}
        """Replicas that could not be opened or were set aside, and the reason."""
        self.healable: set[TopicPartition] = set()
        """Those among them whose files are damaged, so that a copy from the leader would be better."""
        self._not_flushed: dict[TopicPartition, Log] = {}
        """Logs that were set aside before they were wholly flushed. A stop that leaves one is not clean."""
        self._world = world
        self._disk = world.disk
        self._broker_id = broker_id
        self._default_config = default_config or LogConfig()
        self._checkpoint_interval_s = checkpoint_interval_ms / 1_000
        self.directory = LogDirectory(world, log_dir)
        self.continuity = DataContinuity(self._disk, log_dir, world.random)
        self._opener = LogOpener(self.directory, self.continuity, self._default_config.index_interval_bytes)
        self._progress = DirectoryProgress()
        self._logs: dict[TopicPartition, Log] = {}
        self.checkpoints = LogCheckpoints(self.directory, self.continuity, self._logs, self.damaged)
        self._unsettled: set[TopicPartition] = set()
        self._partition_locks: WeakValueDictionary[TopicPartition, asyncio.Lock] = WeakValueDictionary()
        """A lock exists while a task holds it or waits for it."""
        self._stopping = asyncio.Event()
        self._run = self.directory.run_unless_hung
        self._checkpointing: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()

    def _path(self, name: str) -> str:
        return f"{self.log_dir}/{name}"

    # -- open --

    async def open(self, cluster_id: str) -> None:
        """Take the directory and open every log in it. Raises DataDirectoryUnusable, and then holds nothing of it."""
        try:
            self.directory.take()
            try:
                is_new = self.directory.check_owner(self._broker_id, cluster_id)
                stopped_epoch = self.directory.read_clean_marker()
                if stopped_epoch is not None:
                    self.was_clean, self.previous_broker_epoch = True, stopped_epoch
                self.continuity.begin(was_clean=self.was_clean, is_new=is_new)
                self.directory.remove_clean_marker()
                recovery_points, log_start_offsets = self.checkpoints.read()
                await self._open_logs(recovery_points, log_start_offsets)
                await self.checkpoints.correct()
            except BaseException:
                await self.close(clean=False)
                raise
        except OSError as error:
            if trouble_of(error, is_read=True) is Trouble.SHORTAGE:
                raise DataDirectoryUnusable(
                    shortage(f"opening the data directory {self.log_dir}", error).detail
                ) from error
            raise LogDirectoryFailed(
                f"the data directory {self.log_dir} cannot be used: {error}. Check that it is a directory, that the "
                f"broker's user may write to it and that the disk is not full, or choose another with log.dirs or "
                f"--data"
            ) from error
        self._checkpointing = asyncio.get_running_loop().create_task(
            self._checkpoint_regularly(), name="log checkpoints"
        )
        self._checkpointing.add_done_callback(self._report_failure)

    async def _open_logs(
        self, recovery_points: Mapping[TopicPartition, int], log_start_offsets: Mapping[TopicPartition, int] | None
    ) -> None:
        """`log_start_offsets`: 0 for logs that it does not name; None: not known."""
        found, deleted = self.directory.contents()
        for name in deleted:
            logger.info("removing %s, left over from a deletion or a move", self._path(name))
            self._remove_in_background(self._path(name))

        # A replica that could not be opened last time was not part of the clean stop.
        clean = frozenset(p for p in found if self.was_clean and p in recovery_points)
        disk_failures: list[OSError] = []

        async def measure(partition: TopicPartition) -> None:
            try:
                to_do = await self._run(
                    to_be_read, self._disk, self._path(str(partition)), recovery_points.get(partition, 0)
                )
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    disk_failures.append(error)
                return  # any other error is met again, and handled, when this log is opened
            self._progress.measured(partition, to_do)

        too_large: dict[TopicPartition, TooManySegments] = {}

        async def open_one(partition: TopicPartition, is_last: bool = False) -> None:
            too_large.pop(partition, None)
            try:
                opened = await self._run(
                    self._opener.open,
                    partition,
                    partition in clean,
                    recovery_points.get(partition, 0),
                    None if log_start_offsets is None else log_start_offsets.get(partition, 0),
                    self._progress.of(partition),
                    is_last,
                )
            except TooManySegments as error:
                too_large[partition] = error
                return
            except (DamagedLog, MalformedFile, CorruptRecord, OSError) as error:
                if isinstance(error, OSError) and (
                    error.errno in DISK_ERRORS or trouble_of(error, is_read=True) is Trouble.SHORTAGE
                ):
                    disk_failures.append(error)
                    return
                self.damaged[partition] = (
                    f"the replica in {self._path(str(partition))} cannot be opened: {error}. {_COPIED_AGAIN}"
                )
                self.healable.add(partition)
                logger.error("%s", self.damaged[partition])
                return
            finally:
                if is_last or partition not in too_large:
                    self._progress.opened(partition)
            self._adopt(partition, opened, self._default_config)

        self._progress.begin(found)
        news = asyncio.get_running_loop().create_task(self._tell_progress(), name="news of the recovery")
        try:
            await asyncio.gather(*(measure(partition) for partition in found if partition not in clean))
            if not disk_failures:
                await asyncio.gather(*(open_one(partition) for partition in found))
                for partition in sorted(too_large, key=lambda partition: too_large[partition].segments):
                    await open_one(partition, True)
        finally:
            news.cancel()
            self._progress.given_up()
        if disk_failures:
            raise disk_failures[0]
        if self.damaged:
            await self._distrust(f"{len(self.damaged)} replicas cannot be opened")
        if too_large:
            self._leave_closed(too_large)
        gone = sorted(p for p, offset in recovery_points.items() if offset > 0 and p not in found)
        if gone:
            await self._distrust(f"the directories of {', '.join(map(str, gone[:10]))} are gone")

    def _leave_closed(self, too_large: Mapping[TopicPartition, TooManySegments]) -> None:
        """Serve the other logs. These have lost nothing, so the directory is trusted as before."""
        for partition, error in too_large.items():
            self.damaged[partition] = (
                f"the replica in {self._path(str(partition))} is not open: {error}. Raise the hard limit of this "
                f"process (`ulimit -Hn`, LimitNOFILE of systemd, `--ulimit nofile` of Docker) and restart the broker, "
                f"or delete the topic"
            )
        first = self.damaged[min(too_large)]
        logger.error("%d of the replicas in %s are not served; %s", len(too_large), self.log_dir, first)

    @property
    def recovery(self) -> RecoveryProgress:
        """The progress of opening the logs. Once that has ended, nothing remains."""
        return self._progress.now

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(NEWS_INTERVAL_S)
            logger.info("recovering %s: %s", self.log_dir, self.recovery)

    def _adopt(self, partition: TopicPartition, opened: Opened, config: LogConfig) -> Log:
        report = opened.recovered.report
        self.reports[partition] = report
        if report.problem:
            logger.warning(
                "%s: cut %d bytes; it now ends at offset %d: %s",
                partition,
                report.bytes_cut,
                report.log_end_offset,
                report.problem,
            )
        first_dirty = min(self.directory.first_dirty_offsets.values.get(partition, 0), report.log_end_offset)
        log = Log(
            self.directory,
            self._path(str(partition)),
            partition,
            opened.topic_id,
            config,
            opened.recovered,
            first_dirty,
            has_durable_id=opened.has_durable_id,
        )
        self._logs[partition] = log
        return log

    # -- what the cluster may believe of this directory --

    async def agree(self, verdict: Verdict) -> None:
        """Record the verdict of all directories, durable on return. Raises BrokerError KAFKA_STORAGE_ERROR."""
        await self._note(self.continuity.agree, verdict)

    async def note_failed(self, directories: Collection[str]) -> None:
        """Record that other directories have failed, durable on return. Raises BrokerError KAFKA_STORAGE_ERROR."""
        await self._note(self.continuity.note_failed, directories)

    async def _note(self, write: Callable[[Any], None], what: object) -> None:
        self.directory.check()
        doing = f"writing {self._path(CONTINUITY_FILE)}"
        try:
            await self._patiently(doing, lambda: self._run(write, what))
        except OSError as error:
            self.directory.fail_and_raise(error, doing)

    async def _patiently(self, doing: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, which is repeated from its beginning for SHORTAGE_PATIENCE_S while it meets a
        shortage. Raises OSError, and BrokerError if the directory fails in between."""
        until_s = self._world.clock.monotonic() + SHORTAGE_PATIENCE_S
        while True:
            try:
                return await attempt()
            except OSError as error:
                if trouble_of(error) is not Trouble.SHORTAGE or self._world.clock.monotonic() >= until_s:
                    raise
                self.directory.tell_of_shortage(error, doing)
            await asyncio.sleep(SHORTAGE_PAUSE_S)
            self.directory.check()

    def registered(self, broker_epoch: int) -> None:
        """Take the broker's new epoch. If nothing is lost since that epoch, record that, durable on return; this blocks
        once. A disk that fails here takes the directory offline."""
        if self.directory.failure is not None:
            return
        try:
            self.continuity.registered(broker_epoch)
        except OSError as error:
            self.directory.fail(error, f"writing {self._path(CONTINUITY_FILE)}")

    async def distrust(self, reason: str) -> None:
        """Do not vouch for the data here before the next registration. Raises BrokerError KAFKA_STORAGE_ERROR."""
        await self._note(self.continuity.distrust, reason)

    async def _distrust(self, reason: str) -> None:
        """Raises OSError."""
        await self._run(self.continuity.distrust, reason)

    # -- logs --

    def get(self, partition: TopicPartition) -> Log | None:
        return self._logs.get(partition)

    def logs(self) -> list[Log]:
        return list(self._logs.values())

    def has(self, partition: TopicPartition) -> bool:
        """Whether a replica of the partition is here, or may be here, usable or not."""
        return partition in self._logs or partition in self.damaged or partition in self._unsettled

    @property
    def replica_count(self) -> int:
        new = sum(1 for p in self._unsettled if p not in self._logs and p not in self.damaged)
        return len(self._logs) + len(self.damaged) + new

    async def topic_id(self, partition: TopicPartition) -> str:
        """Return the topic id of the replica here, usable or not. Empty if there is none, or if its id is not known."""
        log = self._logs.get(partition)
        if log is not None:
            return log.topic_id
        if partition not in self.damaged:
            return ""
        try:
            return await self._run(read_topic_id, self._disk, self._path(str(partition)))
        except (MalformedFile, OSError, BrokerError):
            return ""

    def set_aside(self, partition: TopicPartition, reason: str, *, is_damaged: bool = False) -> Awaitable[None]:
        """Take a log out of service: it is `damaged` until the next start opens it again or, if its files are damaged,
        until it is deleted. The awaitable closes it."""
        log = self._logs.pop(partition, None)
        if log is not None:
            if is_damaged:
                self.healable.add(partition)
                remedy = _COPIED_AGAIN
            else:
                remedy = (
                    "Restart the broker to have it opened again, or move that directory away to have it copied from "
                    "the leader again"
                )
            self.damaged[partition] = f"the replica in {log.path} was set aside: {reason}. {remedy}"
            logger.error("%s", self.damaged[partition])
            self._not_flushed[partition] = log
        return self._end(partition, log)

    async def _end(self, partition: TopicPartition, log: Log | None) -> None:
        if log is None:
            return
        async with self._exclusively(partition):
            with suppress(BrokerError):  # the directory is offline or has a shortage: the log stays unflushed
                await log.checkpoint()  # a clean stop vouches for this log as well
                if log.recovery_point >= log.log_end_offset and self._not_flushed.get(partition) is log:
                    del self._not_flushed[partition]
            if partition in self.damaged:
                # Both, since a recovery point promises everything from the log start on.
                starts, points = self.directory.log_start_offsets, self.directory.recovery_points
                if log.has_durable_id:
                    starts.stage({**starts.values, partition: log.log_start_offset})
                points.stage({**points.values, partition: log.recovery_point})
            with suppress(BrokerError):
                await log.close()

    async def get_or_create(self, partition: TopicPartition, topic_id: str, config: LogConfig) -> Log:
        """Return the partition's log, with `config` applied. An empty `topic_id` matches any topic.

        Raises BrokerError: INCONSISTENT_TOPIC_ID (the log belongs to another topic of that name), KAFKA_STORAGE_ERROR
        (the directory has failed, or the replica is damaged), INVALID_TOPIC_EXCEPTION.
        """
        problem = topic_name_problem(partition.topic)
        if problem:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
        async with self._exclusively(partition):
            self.directory.check()
            if partition in self.damaged:
                if self._disk.exists(self._path(str(partition))):
                    raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, self.damaged[partition])
                self._forget_damage(partition)
            log = self._logs.get(partition)
            if log is not None and topic_id and log.topic_id and log.topic_id != topic_id:
                raise BrokerError(
                    ErrorCode.INCONSISTENT_TOPIC_ID,
                    f"{log.path} belongs to the topic with id {log.topic_id}, not {topic_id}",
                )
            if log is None:
                check_room(self._disk, self._path(str(partition)))
            with self._under_way(partition):
                try:
                    if log is None:
                        [opened] = await self._run(self._opener.create, [partition], topic_id)
                        log = self._adopt(partition, opened, config)
                    elif topic_id and not log.topic_id:
                        await self._run(write_topic_id, self._disk, log.path, topic_id)
                        log.topic_id = topic_id
                except OSError as error:
                    self.directory.refuse(error, f"creating {self._path(str(partition))}")
            log.configure(config)
            return log

    async def create(self, partitions: Sequence[TopicPartition], topic_id: str, config: LogConfig) -> None:
        """As `get_or_create`, for partitions of one topic that are not here: they share one call of a worker thread and
        its wait for the disk. Raises BrokerError as it does, with none of them created."""
        problem = topic_name_problem(partitions[0].topic)
        if problem:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
        async with AsyncExitStack() as held:
            for partition in sorted(partitions):
                await held.enter_async_context(self._exclusively(partition))
            self.directory.check()
            wanted = [p for p in partitions if p not in self._logs and p not in self.damaged]
            for partition in wanted:
                held.enter_context(self._under_way(partition))
            if wanted:
                check_room(self._disk, self._path(str(wanted[0])), len(wanted))
            try:
                created = await self._run(self._opener.create, wanted, topic_id)
            except OSError as error:
                self.directory.refuse(error, f"creating {len(wanted)} logs of {topic_id}")
            for partition, opened in zip(wanted, created, strict=True):
                self._adopt(partition, opened, config).configure(config)

    async def delete(self, partition: TopicPartition) -> None:
        """Forget the log, if there is one, and remove its files in the background. Once this returns, a restart does
        not find it. Raises BrokerError KAFKA_STORAGE_ERROR."""
        doomed = await self._move_away(partition, DELETED)
        if doomed:
            self._remove_in_background(doomed)

    async def set_stray_aside(self, partition: TopicPartition, reason: str) -> None:
        """Forget the log, if there is one, and rename its directory, which is never read or removed from then on.
        Raises BrokerError KAFKA_STORAGE_ERROR."""
        stray = await self._move_away(partition, STRAY)
        if stray:
            logger.warning("%s: what was here is in %s now, and can be removed: %s", partition, stray, reason)

    async def _move_away(self, partition: TopicPartition, suffix: str) -> str:
        """Move the replica away, durable on return. Return its new path, or an empty string if there is none."""
        log = self._logs.pop(partition, None)
        with self._under_way(partition):
            async with self._exclusively(partition):
                if log is None:
                    log = self._logs.pop(partition, None)  # it was being created
                if log is None and partition not in self.damaged:
                    return ""
                self.directory.check()
                if log is not None:
                    await log.close()
                self._forget_damage(partition)
                self.reports.pop(partition, None)
                path = self._path(str(partition))
                moved = self._path(moved_name(partition, f"{self._world.random.getrandbits(128):032x}", suffix))

                async def move() -> bool:
                    names = await self._run(self._disk.list, self.log_dir) if log is None else None
                    if names is not None and not {str(partition), moved.rpartition("/")[2]} & set(names):
                        await self._run(self._disk.sync_directory, self.log_dir)
                        return False  # it was damaged, and has been moved away by hand or by an earlier attempt
                    # The next start would count a recovery point without a log as a loss.
                    await self._run(self.directory.lower_offsets, partition, 0)
                    await self._run(self._rename_away, path, moved)
                    return True

                try:
                    was_there = await self._patiently(f"renaming {path}", move)
                except OSError as error:
                    if trouble_of(error) is Trouble.SHORTAGE:
                        self.damaged[partition] = f"the replica in {path} could not be moved away: {error}"
                        self.healable.add(partition)  # the healer tries again once nothing counts on it
                    self.directory.refuse(error, f"renaming {path}")
        return moved if was_there else ""

    # -- moving to another log directory --

    async def create_future(self, partition: TopicPartition, topic_id: str, config: LogConfig) -> Log:
        """Return an empty log for a copy of a replica in another directory. Until `adopt_future` it is no replica, and
        the next start would remove it. Raises BrokerError KAFKA_STORAGE_ERROR."""
        self.directory.check()
        check_room(self._disk, self._path(str(partition)))
        path = self._path(moved_name(partition, f"{self._world.random.getrandbits(128):032x}", FUTURE))
        try:
            recovered = await self._run(self._opener.create_future, partition, path, topic_id)
        except OSError as error:
            self.directory.refuse(error, f"creating {path}")
        return Log(self.directory, path, partition, topic_id, config, recovered, has_durable_id=not topic_id)

    async def discard_future(self, log: Log) -> None:
        """Close the log, and remove its files in the background."""
        with suppress(BrokerError):  # the disk hangs: the files are left to the worker thread
            await log.close()
            if self.directory.failure is None:
                self._remove_in_background(log.path)

    def adopt_future(self, log: Log, high_watermark: int) -> None:
        """Make the log this directory's replica, wholly on disk: after a crash the next start finds it. Blocks. Raises
        BrokerError KAFKA_STORAGE_ERROR, with nothing changed unless the directory has failed."""
        partition = log.partition
        path = self._path(str(partition))
        self.directory.check()
        with self._under_way(partition):
            try:
                log.flush_now()
                # Before its name: without the first, deleted records would be back.
                for checkpoint, offset in (
                    (self.directory.log_start_offsets, log.log_start_offset),
                    (self.directory.high_watermarks, high_watermark),
                    (self.directory.first_dirty_offsets, log.first_dirty_offset),
                ):
                    if offset > 0:
                        checkpoint.write(checkpoint.stage({**checkpoint.values, partition: offset}))
                self._disk.rename(log.path, path)
                try:
                    self._disk.sync_directory(self.log_dir)
                except OSError:
                    self._disk.rename(path, log.path)
                    raise
            except OSError as error:
                self.directory.refuse(error, f"moving {partition} to {self.log_dir}")
            log.moved(path)
            self._logs[partition] = log

    def give_away(self, partition: TopicPartition) -> asyncio.Task[None]:
        """Forget the log at once, since another directory has the replica. The returned task ends when its files are
        gone, and raises BrokerError KAFKA_STORAGE_ERROR if the directory fails before a restart would miss them."""
        log = self._logs.pop(partition)
        self._unsettled.add(partition)
        task = asyncio.get_running_loop().create_task(
            self._remove_given_away(log), name=f"removal of {log.path}, which is in another directory now"
        )
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        task.add_done_callback(self._report_failure)
        return task

    async def _remove_given_away(self, log: Log) -> None:
        partition = log.partition
        moved = self._path(moved_name(partition, f"{self._world.random.getrandbits(128):032x}", DELETED))
        async with self._exclusively(partition):
            with self._under_way(partition):
                await log.close()
                self.reports.pop(partition, None)
                while True:
                    self.directory.check()
                    try:
                        await self._run(self.directory.lower_offsets, partition, 0)
                        await self._run(self._rename_away, log.path, moved)
                        break
                    except OSError as error:
                        doing = f"renaming {log.path}"
                        if trouble_of(error) is not Trouble.SHORTAGE:
                            self.directory.fail_and_raise(error, doing)
                        self.directory.tell_of_shortage(error, doing)
                    if self._stopping.is_set():
                        return  # the next start keeps the longer log
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
        await self._remove_tree(moved)

    def _forget_damage(self, partition: TopicPartition) -> None:
        self.damaged.pop(partition, None)
        self.healable.discard(partition)
        self._not_flushed.pop(partition, None)

    @contextmanager
    def _under_way(self, partition: TopicPartition) -> Iterator[None]:
        """Mark a creation or deletion. If the directory fails in between, the replica may exist when the directory is
        back."""
        self._unsettled.add(partition)
        try:
            yield
        finally:
            if self.directory.failure is None:
                self._unsettled.discard(partition)

    def _rename_away(self, path: str, moved: str) -> None:
        if not self._disk.exists(moved):  # the last attempt may have come this far
            self._disk.rename(path, moved)
        self._disk.sync_directory(self.log_dir)

    def _remove_in_background(self, path: str) -> None:
        task = asyncio.get_running_loop().create_task(self._remove_tree(path), name=f"remove {path}")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        task.add_done_callback(self._report_failure)

    async def _remove_tree(self, path: str) -> None:
        try:
            await self.directory.run(self._disk.remove_tree, path)
        except OSError as error:
            self.directory.fail_unless_short(error, f"removing {path}")  # the next start removes it

    @asynccontextmanager
    async def _exclusively(self, partition: TopicPartition) -> AsyncIterator[None]:
        """Serialize creations and deletions of one partition."""
        lock = self._partition_locks.setdefault(partition, asyncio.Lock())
        async with lock:
            yield

    # -- checkpoints --

    async def _checkpoint_regularly(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._checkpoint_interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                if self.directory.failure is not None:
                    return
                try:
                    await self.checkpoints.checkpoint_recovery_points()
                    await self.checkpoints.checkpoint_first_dirty_offsets()
                except Shortage:
                    continue
                except BrokerError:
                    return  # the directory is offline; its listeners know

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.directory.fail(error, task.get_name())

    async def space(self) -> tuple[int, int]:
        """Return the size of the disk and its free space in bytes; -1 if it reports none."""
        try:
            return await self._run(self._disk.space, self.log_dir)
        except (OSError, BrokerError):
            return -1, -1

    # -- failure and end --

    async def close(self, *, clean: bool = True, broker_epoch: int = -1) -> None:
        """Stop. With `clean`, everything is on disk on return, with the marker that says so, unless the directory has
        failed or was never opened. Appends must have stopped before."""
        self._stopping.set()
        if self._checkpointing is not None:
            await asyncio.wait([self._checkpointing])
        if self._removals:
            with suppress(BrokerError):
                await self.directory.unless_hung(asyncio.wait(set(self._removals)))
        opened = self.directory.is_taken and self._checkpointing is not None
        clean = clean and opened and self.directory.failure is None
        if clean:
            try:
                for partition, log in list(self._not_flushed.items()):
                    await self._end(partition, log)  # the task that was closing it has been cancelled
                outcomes = await asyncio.gather(*(log.checkpoint() for log in self.logs()), return_exceptions=True)
                for outcome in outcomes:
                    if outcome is not None:
                        raise outcome
                await self.checkpoints.note_recovery_points()
                await self.checkpoints.checkpoint_first_dirty_offsets()
            except BrokerError:
                clean = False  # the directory went offline; its listeners know
            if clean and self._not_flushed:
                clean = False
                logger.warning("%s does not stop cleanly: not all of %s is on disk", self.log_dir, [*self._not_flushed])
        if self.directory.is_hung:
            return  # worker threads may still use the files and the lock
        for log in self.logs():
            await log.close()
        if opened and self.directory.failure is not None:
            try:
                # The kernel may have given up pages that it could not write: what they held may be
                # gone at any time.
                await self._distrust("the log directory has failed")
            except OSError as error:
                logger.error("%s cannot be written: %s", self._path(CONTINUITY_FILE), error)
        if clean:
            self.directory.write_clean_marker(broker_epoch)
        self.directory.release()

"""The data directory of a broker: its owner, its contents, the state that its logs share, and the failure of its disk.

One broker process owns the directory, by its lock; `meta.properties` names the broker and the cluster. The
clean-shutdown marker is the last file that a stopping broker writes and the first that a starting one removes, durably,
before any append: a marker that stays too long hides a torn log (KAFKA-15375, KAFKA-10471). It is not written if the
disk has failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from posixpath import dirname
from typing import NamedTuple, NoReturn, TypeVar

from minibroker.broker.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    META_PROPERTIES_FILE,
    RECOVERY_POINT_FILE,
    MalformedFile,
    MetaProperties,
    OffsetCheckpoint,
    decode_clean_shutdown,
    decode_meta_properties,
    encode_clean_shutdown,
    encode_meta_properties,
)
from minibroker.broker.storage.io_errors import Trouble, shortage, trouble_of
from minibroker.broker.storage.recovery.continuity import CONTINUITY_FILE
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition, topic_name_problem
from minibroker.protocol.world import Lock, World

logger = logging.getLogger("minibroker.storage")

T = TypeVar("T")

_OWN_FILES = (
    RECOVERY_POINT_FILE,
    LOG_START_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    CLEANER_OFFSET_FILE,
    META_PROPERTIES_FILE,
    CLEAN_SHUTDOWN_FILE,
    CONTINUITY_FILE,
    LOCK_FILE,
    "controller-timeline.jsonl",  # the broker's flight recorder, kept with its data
    "controller-timeline.jsonl.1",
)
FLUSHES_AT_ONCE = 3
"""Each takes a worker thread of the directory, and leaves one for other work."""
HUNG_AFTER_S = 30
"""A disk hangs when none of the calls under way has returned for this many seconds. A slow disk returns some."""
_LOOK_S = 1.0

SHORTAGE_LOG_INTERVAL_S = 10.0

DELETED = "-delete"
STRAY = "-stray"
"""The suffix of a replica whose topic was deleted while this directory was away (Kafka's strays). An operator may
remove it."""
FUTURE = "-future"
"""The suffix of an incomplete copy of a replica that is being moved here from another directory."""

_MAX_FILE_NAME = 255
_MOVED_NAME = re.compile(rf".+-[0-9]+\.[0-9a-f]{{32}}({DELETED}|{STRAY}|{FUTURE})", re.ASCII)
_PARTITION_NAME = re.compile(r"(.+)-(0|[1-9][0-9]{0,9})", re.ASCII)


class DataDirectoryUnusable(MinibrokerError):
    """The broker cannot start on this data directory. The message names it, the reason and the remedy."""


class LogDirectoryFailed(DataDirectoryUnusable):
    """The disk or the operating system fails. The broker can start without this directory if it has others."""


class Contents(NamedTuple):
    """The contents of a data directory besides its own files."""

    partitions: list[TopicPartition]
    deleted: list[str]
    """Names left by an interrupted deletion or move."""


class LogDirectory:
    """Use: `take`, `check_owner`, then anything, in the end `release`."""

    def __init__(self, world: World, path: str) -> None:
        self.world = world
        self.path = path
        self.recovery_points = OffsetCheckpoint(world.disk, f"{path}/{RECOVERY_POINT_FILE}")
        self.log_start_offsets = OffsetCheckpoint(world.disk, f"{path}/{LOG_START_OFFSET_FILE}")
        self.high_watermarks = OffsetCheckpoint(world.disk, f"{path}/{HIGH_WATERMARK_FILE}")
        self.flush_turns = asyncio.Semaphore(FLUSHES_AT_ONCE)
        """Logs take turns in the order in which they came, so busy logs do not starve others."""
        self.first_dirty_offsets = OffsetCheckpoint(world.disk, f"{path}/{CLEANER_OFFSET_FILE}")
        self.producers = 0
        """The producers that all logs here know, counted anew with each checkpoint."""
        self.failure: BaseException | None = None
        """The error that took the directory offline; None while it is online."""
        self._silent_until_s = -math.inf
        self.silent_s = 0.0
        """Seconds during which calls were under way and none returned."""
        self._listeners: list[Callable[[], None]] = []
        self._on_silence: Callable[[], None] = lambda: None
        self._calls = 0
        self._look: asyncio.TimerHandle | None = None
        self._hung = asyncio.Event()
        self._disk = world.disk
        self._executor = world.new_executor(path)
        self._lock: Lock | None = None

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}"

    # -- whose it is --

    def take(self) -> None:
        """Create the directory if it is missing, and lock it. Raises DataDirectoryUnusable, OSError."""
        self._make()
        try:
            self._lock = self._disk.lock(self._path(LOCK_FILE))
        except BlockingIOError as error:
            raise DataDirectoryUnusable(
                f"the data directory {self.path} is in use by another broker process: stop it, or choose another "
                f"directory with log.dirs or --data"
            ) from error

    def _make(self) -> None:
        missing: list[str] = []
        path = self.path
        while not self._disk.exists(path):
            missing.append(path)
            path = dirname(path)
        self._disk.make_directories(self.path)
        for path in missing:
            self._disk.sync_directory(dirname(path))

    @property
    def is_taken(self) -> bool:
        return self._lock is not None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_owner(self, broker_id: int, cluster_id: str) -> bool:
        """Make this broker the owner, unless another one is. Return True if the directory had no owner. Raises
        DataDirectoryUnusable, OSError."""
        path = self._path(META_PROPERTIES_FILE)
        mine = MetaProperties(broker_id, cluster_id)
        if not self._disk.exists(path):
            is_new = not self.contents().partitions
            self._disk.write_atomically(path, encode_meta_properties(mine))
            return is_new
        try:
            found = decode_meta_properties(path, self._disk.read_file(path))
        except MalformedFile as error:
            raise DataDirectoryUnusable(
                f"{error}. If {self.path} is the data directory of broker {broker_id} in cluster "
                f"{cluster_id}, remove that file; otherwise choose another directory with log.dirs or --data"
            ) from error
        if found.cluster_id != cluster_id:
            raise DataDirectoryUnusable(
                f"the data directory {self.path} belongs to cluster {found.cluster_id}, but this ZooKeeper holds "
                f"cluster {cluster_id}: connect to that cluster's ZooKeeper, or choose an empty directory with "
                f"log.dirs or --data"
            )
        if found.broker_id != broker_id:
            raise DataDirectoryUnusable(
                f"the data directory {self.path} belongs to broker {found.broker_id}, but this is broker "
                f"{broker_id}: start it with broker.id={found.broker_id}, or choose another directory with log.dirs "
                f"or --data"
            )
        return False

    # -- the marker of a clean stop --

    def read_clean_marker(self) -> int | None:
        """Return the epoch of the broker that stopped cleanly: -1 if unknown, None if none did. Raises OSError."""
        path = self._path(CLEAN_SHUTDOWN_FILE)
        if not self._disk.exists(path):
            return None
        try:
            return decode_clean_shutdown(path, self._disk.read_file(path))
        except MalformedFile as error:
            logger.warning("%s; treating the last stop as a crash", error)
            return None

    def remove_clean_marker(self) -> None:
        """Durable on return. Raises OSError."""
        path = self._path(CLEAN_SHUTDOWN_FILE)
        if self._disk.exists(path):
            self._disk.remove(path)
            self._disk.sync_directory(self.path)

    def write_clean_marker(self, broker_epoch: int) -> None:
        """A disk that fails here takes the directory offline."""
        path = self._path(CLEAN_SHUTDOWN_FILE)
        try:
            self._disk.write_atomically(path, encode_clean_shutdown(broker_epoch))
        except OSError as error:
            self.fail(error, f"writing {path}")

    # -- what is in it --

    def contents(self) -> Contents:
        """Raises OSError."""
        partitions: list[TopicPartition] = []
        deleted: list[str] = []
        for name in self._disk.list(self.path):
            moved = _MOVED_NAME.fullmatch(name)
            if moved is not None and moved[1] in (DELETED, FUTURE):
                deleted.append(name)
                continue
            if moved is not None:
                logger.warning("ignoring %s: its topic was deleted, so it can be removed", self._path(name))
                continue
            partition = partition_of(name)
            if partition is not None:
                partitions.append(partition)
            elif name.removesuffix(".tmp").removesuffix(".worker") not in _OWN_FILES:
                logger.info("ignoring %s: it is not the directory of a partition", self._path(name))
        return Contents(partitions, deleted)

    # -- what its logs share --

    def lower_offsets(self, partition: TopicPartition, offset: int) -> None:
        """Lower every checkpoint of the partition to `offset` at most, durable on return. Records that a log holds
        beyond it, after a cut or in a new topic of that name, are neither flushed nor committed nor compacted, whatever
        was there before. Raises OSError."""
        if not self.recovery_points.is_written:
            # This file holds the points of all logs, which promise everything from the log start on.
            self.log_start_offsets.write_staged()
        for checkpoint in (
            self.recovery_points,
            self.log_start_offsets,
            self.high_watermarks,
            self.first_dirty_offsets,
        ):
            checkpoint.lower(partition, offset)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """As `Executor.run`, in the threads of this directory: a disk that hangs blocks no other directory."""
        self._calls += 1
        if self._look is None:
            self._look_later()
        try:
            return await self._executor.run(function, *arguments)
        finally:
            self._calls -= 1
            self.silent_s = 0.0
            if not self._calls and self._look is not None:
                self._look.cancel()
                self._look = None

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_now)

    def _look_now(self) -> None:
        # Counted, not measured: calls that return while this process is stopped go unseen.
        self.silent_s += _LOOK_S
        self._look_later()
        if self.silent_s >= HUNG_AFTER_S and not self.is_hung:
            self._on_silence()

    def on_silence(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the disk hangs, and again every second until it does not, or is given up."""
        self._on_silence = listener

    def give_up(self) -> None:
        """Take the directory offline until the next start, since its disk hangs. Waiting callers are released."""
        self.fail(TimeoutError(f"no call has returned for {self.silent_s:.0f} s: the disk hangs"), "work in it")
        self._hung.set()

    @property
    def is_hung(self) -> bool:
        """Whether the directory was given up. Worker threads may still use it."""
        return self._hung.is_set()

    async def unless_hung(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises BrokerError KAFKA_STORAGE_ERROR once the directory is given up. Then, and
        if the caller is cancelled, the work goes on, so its resources must be left to it."""
        loop = asyncio.get_running_loop()
        task, hung = asyncio.ensure_future(work, loop=loop), loop.create_task(self._hung.wait())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may have gone
        try:
            await asyncio.wait((task, hung), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung.cancel()
        if not task.done():
            self.check()
        return task.result()

    async def run_unless_hung(self, function: Callable[..., T], *arguments: object) -> T:
        """`run` the function. Raises BrokerError KAFKA_STORAGE_ERROR if the disk hangs."""
        return await self.unless_hung(self.run(function, *arguments))

    # -- whether its disk has failed --

    def on_offline(self, listener: Callable[[], None]) -> None:
        """Call `listener`, once, when the directory fails; at once if it has failed already."""
        self._listeners.append(listener)
        if self.failure is not None:
            listener()

    def fail(self, error: BaseException, doing: str) -> None:
        """Take the directory offline until the next start. Called in the event loop."""
        if self.failure is None:
            self.failure = error
            logger.error("the log directory %s is offline: %s failed: %r", self.path, doing, error, exc_info=error)
            for listener in self._listeners:
                listener()

    def check(self) -> None:
        """Raises BrokerError (KAFKA_STORAGE_ERROR) once the directory has failed."""
        if self.failure is not None:
            raise BrokerError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"the log directory {self.path} is offline: {self.failure!r}"
            )

    def refuse(self, error: OSError, doing: str, *, is_read: bool = False) -> NoReturn:
        """Raise the BrokerError for a call that has changed nothing (`is_read`) or will be repeated from its beginning:
        Shortage, UNKNOWN_SERVER_ERROR for a bug; otherwise as `fail_and_raise`."""
        trouble = trouble_of(error, is_read=is_read)
        if trouble is Trouble.SHORTAGE:
            self.tell_of_shortage(error, doing)
            raise shortage(doing, error) from error
        if trouble is Trouble.BUG:
            logger.error("%s failed, which is a bug: %r", doing, error, exc_info=error)
            raise BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{doing} failed: {error}") from error
        self.fail_and_raise(error, doing)

    def tell_of_shortage(self, error: OSError | str, doing: str) -> None:
        """Log a shortage at intervals, since many calls may meet it. Called in the event loop."""
        now_s = self.world.clock.monotonic()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + SHORTAGE_LOG_INTERVAL_S
            logger.warning("%s", shortage(doing, error).detail)

    def fail_unless_short(self, error: OSError, doing: str) -> None:
        """As `fail`, for work that can be left undone during a shortage."""
        if trouble_of(error) is Trouble.SHORTAGE:
            self.tell_of_shortage(error, doing)
        else:
            self.fail(error, doing)

    def fail_and_raise(self, error: OSError, doing: str) -> NoReturn:
        """Take the directory offline and raise BrokerError KAFKA_STORAGE_ERROR: the work may be half done."""
        self.fail(error, doing)
        raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{doing} failed: {error}") from error


def partition_of(directory: str) -> TopicPartition | None:
    """The partition whose directory has this name; None where it is no partition's."""
    match = _PARTITION_NAME.fullmatch(directory)
    if match is None or topic_name_problem(match[1]) is not None:
        return None
    return TopicPartition(match[1], int(match[2]))


def moved_name(partition: TopicPartition, unique: str, suffix: str) -> str:
    """`<topic>-<partition>.<unique><suffix>`, with the topic cut where a file name would be too long. The suffix is
    DELETED, STRAY or FUTURE."""
    suffix = f"-{partition.partition}.{unique}{suffix}"
    return partition.topic[: _MAX_FILE_NAME - len(suffix)] + suffix

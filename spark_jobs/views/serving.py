"""The version of a view that is served, in one small file, CURRENT, that is replaced as a whole.

    ROOT/CURRENT    the version that is served, and its offsets when it took over
    ROOT/NAME/      the table of each version, with the checkpoint of the stream that fills it

A new version fills its table beside the served one. Once it has everything that the served one has, it replaces
CURRENT; the old version sees that and stops, and can never serve again.

Readers must not go back in time, so the old version may publish nothing between the comparison and the switch. Both
therefore take one lock: the old version for each publication; the new one before it writes the batch that reaches the
old one, until it has switched. (If it compared after its batch, a busy topic would always keep it one batch behind.)
The operating system releases the lock of a process that dies.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world.real import RealWorld
from minibroker.spark_jobs.source.offsets import Offsets, from_json, to_json
from minibroker.spark_jobs.tables.manifests import Table

FILE_NAME = "CURRENT"
LOCK_FILE = "lock"
_LOCK_POLL_S = 0.01


class Retired(msgspec.Struct, frozen=True):
    """A version that served before."""

    token: str
    """The token of its stream's table."""
    directories: list[str]
    at_ms: int


class Current(msgspec.Struct, frozen=True):
    generation: int
    """The number of switches."""
    view: str
    """The name of its logic."""
    stream: str
    """The directory of the table that a stream fills."""
    token: str
    batch: str | None
    """The directory of a batch job's result up to the stream's beginning; None: the stream has everything."""
    offsets: dict[str, dict[str, Any]]
    """Its offsets when it took over."""
    retired: list[Retired]

    @property
    def directories(self) -> list[str]:
        return [self.stream] if self.batch is None else [self.stream, self.batch]


class Replaced(MinibrokerError):
    """Another version of the view is served now, so this one must not go on."""


def reached(end: Offsets, other: Offsets) -> bool:
    """Return whether `end` has everything that `other` has, except for topics that were created again."""
    for topic, entry in other.items():
        there = end.get(topic)
        if there is None:
            return False
        if there.topic_id == entry.topic_id and any(
            there.offsets.get(partition, 0) < offset for partition, offset in entry.offsets.items()
        ):
            return False
    return True


class Serving:
    def __init__(self, root: Path, world: RealWorld | None = None) -> None:
        self.root = root.absolute()
        self._world = RealWorld() if world is None else world

    def current(self) -> Current | None:
        """Return None if no version was ever served. Raises MinibrokerError if the file is damaged."""
        path = self.root / FILE_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=Current)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise MinibrokerError(f"{path} is damaged ({error}): remove it, and start the view again") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, after other versions have published or switched."""
        while True:
            try:
                lock = self._world.disk.lock(str(self.root / LOCK_FILE))
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def publishing(self, token: str) -> Iterator[None]:
        """Hold the lock for the version that serves. Raises Replaced if another has replaced it."""
        with self.locked():
            self.check(token)
            yield

    def check(self, token: str) -> None:
        current = self.current()
        if current is not None and any(one.token == token for one in current.retired):
            raise Replaced(
                f"this version of the view was replaced by {current.stream} and cannot serve again: to go back to it, "
                "remove its directory and start it anew"
            )

    def serves(self, token: str) -> bool:
        current = self.current()
        return current is not None and current.token == token

    def may_take_over(self, end: Offsets) -> bool:
        """Return whether a version with this end has everything that is served now."""
        current = self.current()
        if current is None:
            return True
        served = Table(self.root / current.stream).end()
        return served is None or reached(end, from_json(served))

    def switch(self, view: str, stream: str, token: str, batch: str | None, end: Offsets) -> Current:
        """Switch to another version, with the lock held. Returns once no power cut can undo it."""
        before = self.current()
        retired: list[Retired] = []
        if before is not None:
            now_ms = self._world.clock.wall_ms()
            retired = [*before.retired, Retired(before.token, before.directories, now_ms)]
        generation = 1 if before is None else before.generation + 1
        current = Current(generation, view, stream, token, batch, to_json(end), retired)
        self._write(current)
        return current

    def retired_before(self, age_ms: int) -> list[str]:
        """Return the directories of versions that were replaced at least `age_ms` ago."""
        current = self.current()
        if current is None:
            return []
        latest_ms = self._world.clock.wall_ms() - age_ms
        return [name for one in current.retired if one.at_ms <= latest_ms for name in one.directories]

    def _write(self, current: Current) -> None:
        content = msgspec.json.format(msgspec.json.encode(current), indent=1)
        self._world.disk.write_atomically(str(self.root / FILE_NAME), content)

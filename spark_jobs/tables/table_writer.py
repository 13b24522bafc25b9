"""The writer of a table, exactly once: each batch of a query becomes one manifest, however often Spark repeats it.

Spark repeats a batch that it does not know to be finished, with the same number and the same offsets. Therefore:

1. The rows are written to a directory of this attempt alone, below `_staging`. A driver's JVM outlives a killed driver
   for a moment and may still write: it cannot touch its successor's files.
2. Every file is fsynced, and the whole directory becomes `data/batch=N` by one rename. Remains of an earlier attempt,
   which no manifest names, are removed first.
3. The manifest gets its name. From then on, and not before, the batch is in the table.

A batch whose manifest exists is not written again; it must be of the same query and end at the same offsets.

Table and checkpoint belong together: with another checkpoint the query would begin at batch 0 and write everything
twice, with another table it would begin in the middle. Both have the same token, and a mismatch is an error. One
process at a time may write: it holds a lock that the operating system releases when it dies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pyarrow.parquet

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world.real import RealWorld
from minibroker.spark_jobs.source.offsets import Offsets, from_json, to_json
from minibroker.spark_jobs.tables.checkpoint import Checkpoint, sync_path
from minibroker.spark_jobs.tables.manifests import (
    MANIFESTS,
    TABLE_FILE,
    DataFile,
    Manifest,
    Span,
    Table,
    TableIdentity,
    effective,
    next_compaction,
)

LOCK_FILE = "lock"
STAGING = "_staging"
TOKEN_FILE = "minibroker-table.json"
"""The file with the token in the checkpoint."""

KEEP_REPLACED_MS = 60 * 60 * 1_000
"""The time for which files stay after a compaction has replaced them."""
ENOUGH_BYTES = 256 * 1024 * 1024
"""The total size of files from which a manifest is not compacted any more."""

WriteParquet = Callable[[Path], None]
"""Writes the rows of a batch as Parquet files into a directory that does not exist yet."""
Rewrite = Callable[[Sequence[str], Path], None]
"""Writes the rows of the given files into a directory that does not exist yet."""


class _Token(msgspec.Struct, frozen=True):
    token: str
    table: str


class TableWriter:
    """The one writer of a table. `close` it, or use it in `with`."""

    def __init__(
        self,
        directory: Path,
        checkpoint: Path,
        content: Mapping[str, str],
        *,
        keep_replaced_ms: int = KEEP_REPLACED_MS,
        world: RealWorld | None = None,
    ) -> None:
        """Open the table, or create its directory. Raises MinibrokerError, without changes, if another process writes,
        or if table, checkpoint and content do not belong together."""
        self.table = Table(directory)
        self.checkpoint = Checkpoint(checkpoint.absolute())
        self._world = RealWorld() if world is None else world
        self._disk = self._world.disk
        self._keep_replaced_ms = keep_replaced_ms
        self.table.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = self._disk.lock(str(self.table.directory / LOCK_FILE))
        except BlockingIOError as error:
            raise MinibrokerError(
                f"another process is writing to {self.table.directory}: stop it, or choose another directory"
            ) from error
        try:
            self._identity = self._bind(dict(content))
            self._manifests = self.table.manifests()
            self._check_query()
            (self.table.directory / MANIFESTS).mkdir(exist_ok=True)
            self.table.data.mkdir(exist_ok=True)
            self._disk.sync_directory(str(self.table.directory))
            self._remove_leftovers()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.release()

    # -- what belongs together --

    def _bind(self, content: dict[str, str]) -> TableIdentity | None:
        """Return the identity; None for a new table, which `begin` will identify."""
        identity = self.table.identity()
        token_path = self.checkpoint.directory / TOKEN_FILE
        try:
            token = msgspec.json.decode(token_path.read_bytes(), type=_Token)
        except FileNotFoundError:
            token = None
        except msgspec.MsgspecError as error:
            raise MinibrokerError(
                f"{token_path} is damaged ({error}): use a new checkpoint and a new output"
            ) from error
        if identity is None and token is None:
            if self.checkpoint.last_batch() is not None:
                raise MinibrokerError(
                    f"the checkpoint {self.checkpoint.directory} is another query's, and the output "
                    f"{self.table.directory} is new: use a new checkpoint"
                )
            if self.table.spans():
                raise MinibrokerError(f"{self.table.directory} has manifests and no {TABLE_FILE}: use another output")
            return None
        if identity is None:
            assert token is not None
            raise MinibrokerError(
                f"the checkpoint {self.checkpoint.directory} belongs to the output {token.table}, and "
                f"{self.table.directory} is new: what was read before would be missing there. "
                f"Go on with {token.table}, or use a new checkpoint"
            )
        if token is None and not self.table.spans() and self.checkpoint.last_batch() is None:
            return None  # `begin` died between the two files, before anything was written
        if token is None or token.token != identity.token:
            other = "new" if token is None else f"that of the output {token.table}"
            raise MinibrokerError(
                f"the output {self.table.directory} belongs to the checkpoint {identity.checkpoint}, and "
                f"{self.checkpoint.directory} is {other}: records would be missing or there twice. "
                "Give the one that belongs to it, or another output"
            )
        if identity.content != content:
            raise MinibrokerError(
                f"the output {self.table.directory} holds {_said(identity.content)}, not {_said(content)}: "
                "use another output and another checkpoint"
            )
        return identity

    def begin(self, content: Mapping[str, str], start: Offsets) -> None:
        """Tie a new table and its checkpoint together. Does nothing for a table that has an identity."""
        if self._identity is not None:
            return
        token = f"{self._world.random.getrandbits(128):032x}"
        self._identity = TableIdentity(token, str(self.checkpoint.directory), dict(content), to_json(start))
        self.checkpoint.directory.mkdir(parents=True, exist_ok=True)
        self._write(self.table.directory / TABLE_FILE, self._identity)
        self._write(self.checkpoint.directory / TOKEN_FILE, _Token(token, str(self.table.directory)))

    def _check_query(self) -> None:
        if not self._manifests:
            return
        last = self._manifests[-1]
        query, begun = self.checkpoint.query_id(), self.checkpoint.last_batch()
        if query != last.query or begun is None or begun < last.last_batch:
            raise MinibrokerError(
                f"the output {self.table.directory} has batches up to {last.last_batch} of query {last.query}, and "
                f"the checkpoint {self.checkpoint.directory} is at batch {begun} of query {query}: files of it were "
                "removed or restored from a copy. Use a new checkpoint and a new output"
            )

    # -- batches --

    @property
    def token(self) -> str | None:
        """None before `begin`."""
        return None if self._identity is None else self._identity.token

    @property
    def end(self) -> Offsets:
        """The offsets up to which records are in the table."""
        if self._manifests:
            return from_json(self._manifests[-1].end)
        assert self._identity is not None
        return from_json(self._identity.start)

    @property
    def last(self) -> Manifest | None:
        return self._manifests[-1] if self._manifests else None

    def publish(self, batch: int, write: WriteParquet, *, guard: AbstractContextManager[object] | None = None) -> bool:
        """Add a batch of the checkpoint's query to the table; return False if it is there already. `guard` is entered
        while the batch becomes visible.

        Raises MinibrokerError if the batch is neither the next one nor equal to one that is there.
        """
        query = self.checkpoint.query_id()
        start, end = self.checkpoint.start_of(batch), self.checkpoint.end_of(batch)
        self.checkpoint.sync(batch)
        return self.publish_range(str(query), batch, start, end, write, guard=guard)

    def publish_range(
        self,
        query: str,
        batch: int,
        start: Offsets,
        end: Offsets,
        write: WriteParquet,
        *,
        guard: AbstractContextManager[object] | None = None,
    ) -> bool:
        """Publish a batch of a query whose offsets do not come from a checkpoint."""
        expected = self._manifests[-1].last_batch + 1 if self._manifests else 0
        if batch < expected:
            self._check_same(batch, query, end)
            return False
        if batch != expected or start != self.end:
            raise self._mismatch(
                f"batch {batch} from {to_json(start)}", f"batch {expected} from {to_json(self.end)} should be next"
            )
        manifest = self._placed(query, Span(batch, batch), start, end, 0, write)
        if guard is None:
            self._add(manifest)
        else:
            with guard:
                self._add(manifest)
        return True

    def _check_same(self, batch: int, query: str, end: Offsets) -> None:
        known = next(one for one in self._manifests if one.first_batch <= batch <= one.last_batch)
        if known.query != query or (known.last_batch == batch and from_json(known.end) != end):
            raise self._mismatch(
                f"batch {batch} of query {query} up to {to_json(end)}",
                f"it is there as one of query {known.query} up to {known.end}",
            )

    def _mismatch(self, given: str, there: str) -> MinibrokerError:
        return MinibrokerError(
            f"the checkpoint {self.checkpoint.directory} and the output {self.table.directory} do not match: {given}, "
            f"but {there}. Use a new checkpoint and a new output"
        )

    def _placed(
        self, query: str, span: Span, start: Offsets, end: Offsets, level: int, write: WriteParquet
    ) -> Manifest:
        """Do steps 1 and 2 of the module's docstring: the files are in their place, durable, and not visible yet."""
        staged = self.table.directory / STAGING / f"{span.first}-{self._world.random.getrandbits(64):016x}"
        write(staged)
        parquet = sorted(staged.rglob("*.parquet"))
        place = self.table.data / span.directory_name
        files = []
        for path in parquet:
            rows = pyarrow.parquet.read_metadata(path).num_rows
            if rows:
                visible = place / path.relative_to(staged)
                files.append(DataFile(str(visible.relative_to(self.table.directory)), rows, path.stat().st_size))
        if files:
            _sync_tree(staged)
            if place.exists():
                shutil.rmtree(place)
            os.rename(staged, place)
            self._disk.sync_directory(str(place.parent))
        elif staged.exists():
            shutil.rmtree(staged)
        rows = sum(file.rows for file in files)
        return Manifest(query, span.first, span.last, to_json(start), to_json(end), rows, files, level)

    def _add(self, manifest: Manifest) -> None:
        """Do step 3."""
        self._write(self.table.directory / MANIFESTS / manifest.span.file_name, manifest)
        self._manifests = [one for one in self._manifests if one.first_batch < manifest.first_batch] + [manifest]

    # -- fewer, larger files --

    def compact(self, rewrite: Rewrite, fan_in: int) -> list[Manifest]:
        """Compact each `fan_in` or more neighbouring manifests of one level into one, and return the new manifests.
        Files that were replaced at least an hour ago are removed."""
        made = []
        while chosen := next_compaction(self._manifests, fan_in, ENOUGH_BYTES):
            made.append(self._replaced(chosen, rewrite))
        if made:
            self._remove_replaced()
        return made

    def _replaced(self, chosen: Sequence[Manifest], rewrite: Rewrite) -> Manifest:
        files = [str(self.table.directory / file.path) for one in chosen for file in one.files]
        merged = self._placed(
            chosen[-1].query,
            Span(chosen[0].first_batch, chosen[-1].last_batch),
            from_json(chosen[0].start),
            from_json(chosen[-1].end),
            chosen[0].level + 1,
            lambda directory: rewrite(files, directory) if files else None,
        )
        after = [one for one in self._manifests if one.first_batch > merged.last_batch]
        self._add(merged)
        self._manifests += after
        return merged

    def _remove_replaced(self) -> None:
        spans = self.table.spans()
        counting = effective(spans) or []
        now_ms = self._world.clock.wall_ms()
        for span in spans:
            if span in counting:
                continue
            successor = next(one for one in counting if one.first <= span.first and span.last <= one.last)
            written_ms = (self.table.directory / MANIFESTS / successor.file_name).stat().st_mtime_ns // 1_000_000
            if now_ms - written_ms >= self._keep_replaced_ms:
                self._remove_tree(self.table.data / span.directory_name)
                (self.table.directory / MANIFESTS / span.file_name).unlink()

    def _remove_leftovers(self) -> None:
        """Remove the files of failed attempts."""
        self._remove_tree(self.table.directory / STAGING)
        named = {span.directory_name for span in self.table.spans()}
        for path in self.table.data.iterdir():
            if path.name not in named:
                self._remove_tree(path)

    @staticmethod
    def _remove_tree(path: Path) -> None:
        # A JVM that has outlived its driver may still write there.
        shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, content: msgspec.Struct) -> None:
        self._disk.write_atomically(str(path), msgspec.json.format(msgspec.json.encode(content), indent=1))


def _sync_tree(directory: Path) -> None:
    for parent, _, names in os.walk(directory):
        for name in [*names, "."]:
            sync_path(os.path.join(parent, name))


def _said(content: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(content.items()))

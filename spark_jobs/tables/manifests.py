"""A table of Parquet files that any reader can read: only files that a manifest names belong to it.

    TABLE/table.json                     the job that fills the table, and its checkpoint
    TABLE/manifests/FIRST-LAST.json      the files of batches FIRST to LAST
    TABLE/data/batch=.../...parquet

Parquet files appear one after the other, a manifest by one rename. A batch is therefore there as a whole or not at all,
however its writer ended; files that no manifest names are remains of a failed attempt. A compaction is also a manifest:
one of batches 0-9 replaces those of the ten batches when it gets its name. The replaced files stay on the disk for a
while, for readers that chose them before.

The names of manifests alone decide which are effective: the widest that begins at batch 0, the widest that begins after
its end, and so on. Batches have no gaps. A listing of the directory may miss names that are added or removed meanwhile;
that shows as a gap, and the directory is listed again.

Rejected: Spark's file sink (only Spark reads its log of files), one list of all files (written anew by each batch), and
table formats such as Delta's (a jar to match with Spark's version).
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minibroker.protocol.errors import MinibrokerError

TABLE_FILE = "table.json"
MANIFESTS = "manifests"
DATA = "data"

_LISTING_PATIENCE_S = 10.0


class DataFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the table's directory."""
    rows: int
    bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """Batches `first_batch` to `last_batch`, complete."""

    query: str
    """The id of the streaming query, as in its checkpoint."""
    first_batch: int
    last_batch: int
    start: dict[str, dict[str, Any]]
    """The offsets of the first records, as in Spark's checkpoint, with the topics' ids."""
    end: dict[str, dict[str, Any]]
    """The offsets after the last records."""
    rows: int
    files: list[DataFile]
    level: int = 0
    """The number of compactions that have rewritten these rows."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def span(self) -> "Span":
        return Span(self.first_batch, self.last_batch)


class TableIdentity(msgspec.Struct, frozen=True):
    token: str
    """A random text that is also in the checkpoint of the query that fills the table."""
    checkpoint: str
    """The path of that checkpoint, for messages."""
    content: dict[str, str]
    """A description of the rows, so that no other job continues the table."""
    start: dict[str, dict[str, Any]]
    """The offsets at which the table begins."""


class Span(NamedTuple):
    """Batches `first` to `last`, both included."""

    first: int
    last: int

    @property
    def file_name(self) -> str:
        return f"{self.first:012d}-{self.last:012d}.json"

    @property
    def directory_name(self) -> str:
        """The directory of its files, and a value of the column `batch`."""
        return f"batch={self.first}" if self.first == self.last else f"batch={self.first}-{self.last}"


def span_of(file_name: str) -> Span | None:
    """Return None if the name is not a manifest's, such as that of one being written."""
    first, dash, last = file_name.removesuffix(".json").partition("-")
    if not file_name.endswith(".json") or not dash or not first.isdigit() or not last.isdigit():
        return None
    return Span(int(first), int(last))


def effective(spans: Iterable[Span]) -> list[Span] | None:
    """Return the effective spans, in order; None if there is a gap."""
    found: list[Span] = []
    upto = -1
    for span in sorted(spans, key=lambda one: (one.first, -one.last)):
        if span.last <= upto:
            continue  # replaced
        if span.first != upto + 1:
            return None
        found.append(span)
        upto = span.last
    return found


def next_compaction(manifests: Sequence[Manifest], fan_in: int, enough_bytes: int) -> Sequence[Manifest]:
    """Return the manifests to compact into one now: `fan_in` or more neighbours of one level, preferring the newest, or
    none.

    Each row is rewritten once for each level, so log(batches) times in all. Manifests of `enough_bytes` are kept.
    """
    stop = len(manifests)
    while stop:
        level = manifests[stop - 1].level
        start = stop
        while start and manifests[start - 1].level == level and manifests[start - 1].bytes < enough_bytes:
            start -= 1
        if stop - start >= fan_in:
            return manifests[start:stop]
        stop = min(start, stop - 1)
    return ()


class Table:
    """A table as its readers see it. Never writes."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()

    @property
    def data(self) -> Path:
        return self.directory / DATA

    def identity(self) -> TableIdentity | None:
        """Return None if there is no table yet. Raises MinibrokerError if it is damaged."""
        path = self.directory / TABLE_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=TableIdentity)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise MinibrokerError(f"{path} is damaged ({error}): this is not a table, or no longer one") from error

    def spans(self) -> list[Span]:
        """Return the spans of all manifests, including replaced ones."""
        try:
            names = [entry.name for entry in (self.directory / MANIFESTS).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(span for name in names if (span := span_of(name)) is not None)

    def manifests(self) -> list[Manifest]:
        """Return the effective manifests at one moment, in order. Raises MinibrokerError if the table is damaged."""
        give_up_at = time.monotonic() + _LISTING_PATIENCE_S
        while True:
            spans = effective(self.spans())
            if spans is not None:
                try:
                    return [self.manifest(span) for span in spans]
                except FileNotFoundError as error:  # replaced long ago and removed just now: list again
                    problem = f"{error.filename} is gone"
            else:
                problem = "a manifest between others is missing"
            if time.monotonic() > give_up_at:
                raise MinibrokerError(
                    f"{self.directory / MANIFESTS}: {problem}: it was removed, and the rest cannot be trusted"
                )

    def manifest(self, span: Span) -> Manifest:
        path = self.directory / MANIFESTS / span.file_name
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except msgspec.MsgspecError as error:
            raise MinibrokerError(f"{path} is damaged ({error}): the table cannot be read without it") from error

    def end(self) -> dict[str, dict[str, Any]] | None:
        """Return the offsets up to which records are in the table; None if there is no table."""
        manifests = self.manifests()
        if manifests:
            return manifests[-1].end
        identity = self.identity()
        return None if identity is None else identity.start

    def files(self) -> list[str]:
        """Return the paths of the Parquet files at one moment, for Spark, pyarrow or any other reader of Parquet.

        They stay for an hour after compactions have replaced them."""
        return [str(self.directory / file.path) for manifest in self.manifests() for file in manifest.files]

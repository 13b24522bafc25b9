"""Spark's checkpoint of a streaming query: its id, and the offsets of its batches.

Spark writes a batch's offsets before the batch runs, but passes only the batch's number to a `foreachBatch` function.
The files are internal to Spark; their format (a version, a line of JSON, then a line for each source) has not changed
from 2.1 to 4.3.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.source.initial_offsets import FILE_NAME
from minibroker.spark_jobs.source.offsets import Offsets, from_json


class Checkpoint:
    """The checkpoint of a query with one source, on the driver's disk. Methods raise MinibrokerError for files that
    Spark has not written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def query_id(self) -> str | None:
        """Return None if the query has not run yet."""
        path = self.directory / "metadata"
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["id"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path, error) from error

    def last_batch(self) -> int | None:
        """Return the last batch that was begun, or None."""
        try:
            names = [path.name for path in (self.directory / "offsets").iterdir()]
        except FileNotFoundError:
            return None
        return max((int(name) for name in names if name.isdigit()), default=None)

    def start(self) -> Offsets:
        """Return the start of batch 0."""
        path = self.directory / FILE_NAME
        try:
            return from_json(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError) as error:
            raise self._damaged(path, error) from error

    def start_of(self, batch: int) -> Offsets:
        return self.start() if batch == 0 else self.end_of(batch - 1)

    def end_of(self, batch: int) -> Offsets:
        path = self.directory / "offsets" / str(batch)
        try:
            version, _, *sources = path.read_text(encoding="utf-8").splitlines()
            if version != "v1" or len(sources) != 1:
                raise ValueError(f"version {version} with {len(sources)} sources")
            return from_json(json.loads(sources[0]))
        except (FileNotFoundError, ValueError) as error:
            raise self._damaged(path, error) from error

    def sync(self, batch: int) -> None:
        """Fsync the beginning of this batch and its predecessors' files, so that no power cut undoes them. Spark itself
        never fsyncs."""
        for folder, name in (("offsets", str(batch)), ("commits", str(batch - 1)), ("", "metadata"), ("", FILE_NAME)):
            for path in (self.directory / folder / name, self.directory / folder / f".{name}.crc"):
                if path.exists():
                    sync_path(path)
        for folder in ("offsets", "commits", ""):
            if (self.directory / folder).exists():
                sync_path(self.directory / folder)

    def _damaged(self, path: Path, error: Exception) -> MinibrokerError:
        return MinibrokerError(f"{path} is not as Spark writes it ({error}): this checkpoint can no longer be used")


def sync_path(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A stream's initial offsets, kept in a file, since Spark asks for them again until its first batch is committed.

Spark writes a batch's end to the checkpoint, and its beginning only as the end of the batch before. It therefore asks
the source for the initial offset at the start, and again at a restart if batch 0 is not committed. A different answer
("latest", or "earliest" after retention) would silently lose the records in between. The first answer is therefore
written to a file in the checkpoint before it is returned, and the file decides from then on.

    options |= keep_initial_offsets(options, checkpoint)   # before the query is started
    spark.readStream.format("minibroker").options(**options)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from minibroker.client.errors import InvalidSetting
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world.real import RealDisk
from minibroker.spark_jobs.source.bounds import starting_offsets
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.offsets import TopicOffsets, from_json, to_json
from minibroker.spark_jobs.source.options import parse_read_options

FILE_NAME = "minibroker-initial.json"


def keep_initial_offsets(options: Mapping[str, str], checkpoint: str | Path) -> dict[str, str]:
    """Return the option that makes a stream begin at the offsets of the first call.

    Resolves the offsets, unless `<checkpoint>/minibroker-initial.json` exists. The checkpoint must be a directory on
    the driver's machine. Raises InvalidSetting, and as `minibroker.spark_jobs.source.bounds.resolve`.
    """
    path = _local(checkpoint) / FILE_NAME
    parsed = parse_read_options(options, is_streaming=True)

    def resolve() -> dict[str, TopicOffsets]:
        with LogClient(
            parsed.bootstrap,
            f"{parsed.client_id}-driver",
            isolation_level=parsed.isolation_level,
            security=parsed.security,
        ) as client:
            return starting_offsets(client, parsed)

    load_or_store(path, resolve)
    return {"initialOffsetsFile": str(path)}


def load_or_store(path: Path, resolve: Callable[[], Mapping[str, TopicOffsets]]) -> Mapping[str, TopicOffsets]:
    """Return the offsets in the file. If there is none, write those of `resolve` (fsync, rename) and return them."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        offsets = resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        RealDisk().write_atomically(str(path.absolute()), json.dumps(to_json(offsets)).encode())
        return offsets
    except ValueError as error:
        raise MinibrokerError(
            f"{path} is not JSON ({error}): it was not written by this source. Use a new checkpoint"
        ) from error
    return from_json(content)


def _local(checkpoint: str | Path) -> Path:
    text = str(checkpoint)
    if "://" in text and not text.startswith("file://"):
        raise InvalidSetting(
            "checkpoint",
            text,
            "initial offsets are kept on the driver's disk: give a local path for initialOffsetsFile",
        )
    return Path(text.removeprefix("file://")).absolute()

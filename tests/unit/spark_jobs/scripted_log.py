"""The scripted brokers of the client's tests for blocking callers: they live in a thread with its own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspark.sql.pandas.types import to_arrow_schema

from minibroker.protocol.apis import Api
from minibroker.protocol.records import READ_UNCOMMITTED, Header, encode_batch
from minibroker.spark_jobs.source.offsets import OffsetRange
from minibroker.spark_jobs.source.reading import ReadSettings, read_range
from minibroker.spark_jobs.source.source import read_schema
from tests.unit.client.scripted_broker import Action, Log, ScriptedCluster

T = TypeVar("T")


class ScriptedLog:
    """Scripted brokers in a thread. `cluster` belongs to it: use `call`."""

    def __init__(self, cluster: ScriptedCluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self.bootstrap = cluster.bootstrap
        self._loop = loop

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def script(self, api: Api[Any, Any], *actions: Action) -> None:
        self.call(lambda: self.cluster.script(api, *actions))

    def topic(self, name: str = "t", partitions: int = 1) -> str:
        """Create a topic. Returns its id."""
        return self.call(lambda: self.cluster.add_topic(name, partitions)).topic_id

    def log(self, name: str = "t", partition: int = 0) -> Log:
        return self.cluster.log(name, partition)

    def append(
        self,
        values: Sequence[bytes | None],
        *,
        name: str = "t",
        partition: int = 0,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Sequence[Header] | None] | None = None,
        timestamp: int = 1_000,
    ) -> None:
        data = encode_batch(values, base_timestamp=timestamp, keys=keys, headers=headers)
        self.call(lambda: self.log(name, partition).append(data))

    def append_raw(self, data: bytes | bytearray, *, name: str = "t", partition: int = 0) -> None:
        """Append batches that already carry their offsets."""
        self.call(lambda: self.log(name, partition).append_raw(bytes(data)))

    def wanted(self, start: int, end: int, name: str = "t", partition: int = 0) -> OffsetRange:
        return OffsetRange(name, self.cluster.topics[name].topic_id, partition, start, end)

    def rows(
        self,
        wanted: OffsetRange,
        *,
        include_headers: bool = False,
        fail_on_data_loss: bool = True,
        patience_s: float = 20.0,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> list[dict[str, Any]]:
        settings = ReadSettings(
            self.bootstrap, "test", include_headers, fail_on_data_loss, isolation_level=isolation_level
        )
        schema = to_arrow_schema(read_schema(include_headers), timezone="UTC")
        batches = list(read_range(settings, wanted, schema, patience_s=patience_s))
        assert all(batch.schema.equals(schema) for batch in batches)
        return [row for batch in batches for row in batch.to_pylist()]

    def offsets(self, wanted: OffsetRange, *, fail_on_data_loss: bool = True, patience_s: float = 20.0) -> list[int]:
        return [row["offset"] for row in self.rows(wanted, fail_on_data_loss=fail_on_data_loss, patience_s=patience_s)]


@contextmanager
def scripted_log(brokers: int = 1) -> Iterator[ScriptedLog]:
    started: list[ScriptedLog] = []
    is_started, end = threading.Event(), threading.Event()

    async def main() -> None:
        async with ScriptedCluster(brokers) as cluster:
            started.append(ScriptedLog(cluster, asyncio.get_running_loop()))
            is_started.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert is_started.wait(60)
    try:
        yield started[0]
    finally:
        end.set()
        thread.join(60)

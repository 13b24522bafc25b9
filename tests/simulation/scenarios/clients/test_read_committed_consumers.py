"""Consumers and Spark's readers of committed records, while the leader dies in the middle of a transaction.

The leader's log is written to directly: what is tested are replication, fetches and readers, not the coordinator.
"""

from __future__ import annotations

import pytest

from minibroker.broker.replication.partition import Partition
from minibroker.client.consumer import Consumer
from minibroker.client.settings import IsolationLevel
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    ControlType,
    EndTransactionMarker,
    encode_batch,
)
from minibroker.spark_jobs.source.offsets import OffsetRange
from minibroker.spark_jobs.source.reading import RangeFetcher, ReadSettings
from tests.running import run_by
from tests.simulation.scenarios.clients.test_consumers import P0, Scene, play
from tests.simulation.scenarios.helpers import replica_of

COMMIT, ABORT = ControlType.COMMIT, ControlType.ABORT


class Writer:
    """Writes at the present leader. A value is its offset."""

    def __init__(self, scene: Scene, magic: int) -> None:
        self._scene = scene
        self._magic = magic
        self._sequences: dict[int, int] = {}

    @property
    def leader(self) -> Partition:
        return replica_of(self._scene.cluster, self._scene.cluster.state(P0).leader, P0)

    def send(self, producer_id: int, count: int = 1) -> None:
        sequence, log = self._sequences.get(producer_id, 0), self.leader.log
        data = encode_batch(
            [b"%d" % (log.log_end_offset + number) for number in range(count)],
            base_timestamp=0,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
            magic=self._magic,
        )
        log.append_as_leader(bytes(data), self.leader.leader_epoch, 0)
        self._sequences[producer_id] = sequence + count

    def end(self, producer_id: int, type: ControlType) -> None:
        self.leader.append_marker(producer_id, 0, EndTransactionMarker(type, 1), raises_epoch=False, now_ms=0)

    async def replicated(self) -> None:
        await self._scene.cluster.until(lambda: self.leader.high_watermark == self.leader.log.log_end_offset)


async def consume_to_the_end(scene: Scene, level: IsolationLevel) -> tuple[list[int], int]:
    """Return the offsets of the records, and the position behind them."""
    world = scene.cluster.client("reader")

    async def consume() -> tuple[list[int], int]:
        offsets: list[int] = []
        async with Consumer(scene.cluster.bootstrap, partitions=[P0], isolation_level=level, world=world) as consumer:
            while (await consumer.lag(P0))[P0] > 0:
                for record in await consumer.poll(200):
                    assert record.value == b"%d" % record.offset
                    offsets.append(record.offset)
            return offsets, await consumer.position(P0)

    return await world.process.run(consume())


async def read_range(scene: Scene, end: int, isolation_level: int) -> list[int]:
    """Return the offsets that a task of Spark reads."""
    world = scene.cluster.client("task")

    async def read() -> list[int]:
        wanted = OffsetRange("t", scene.topic_id(), 0, 0, end)
        settings = ReadSettings(scene.cluster.bootstrap, "task", False, True, isolation_level=isolation_level)
        fetcher = RangeFetcher(settings, wanted, 60.0, world)
        await fetcher.start()
        offsets: list[int] = []
        try:
            while (fetched := await fetcher.next()) is not None:
                for batch in fetched[1]:
                    offsets += batch.offsets
        finally:
            await fetcher.close()
        return offsets

    return await world.process.run(read())


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS], ids=["columns", "records"])
@run_by(play)
async def test_committed_records_are_read_through_the_death_of_a_leader_in_a_transaction(
    scene: Scene, /, magic: int
) -> None:
    writer = Writer(scene, magic)
    writer.send(1, 3)  # 0 to 2: aborted
    writer.send(2)  # 3: committed
    writer.end(1, ABORT)  # 4
    writer.end(2, COMMIT)  # 5
    writer.send(1)  # 6: committed by the next leader
    writer.send(2)  # 7: aborted by the next leader
    await writer.replicated()
    assert await consume_to_the_end(scene, "read_committed") == ([3], 6)
    assert await consume_to_the_end(scene, "read_uncommitted") == ([0, 1, 2, 3, 6, 7], 8)
    assert await read_range(scene, 6, READ_COMMITTED) == [3]

    dead = scene.cluster.state(P0).leader
    scene.cluster.kill_broker(dead)
    await scene.cluster.until(lambda: scene.cluster.state(P0).leader not in (-1, dead))
    await scene.cluster.until(lambda: writer.leader.is_leader)
    assert await consume_to_the_end(scene, "read_committed") == ([3], 6)
    writer.end(2, ABORT)  # 8
    await writer.replicated()
    assert await consume_to_the_end(scene, "read_committed") == ([3], 6)
    writer.end(1, COMMIT)  # 9
    await writer.replicated()
    assert await consume_to_the_end(scene, "read_committed") == ([3, 6], 10)
    assert await consume_to_the_end(scene, "read_uncommitted") == ([0, 1, 2, 3, 6, 7], 10)
    assert await read_range(scene, 10, READ_COMMITTED) == [3, 6]
    assert await read_range(scene, 10, READ_UNCOMMITTED) == [0, 1, 2, 3, 6, 7]

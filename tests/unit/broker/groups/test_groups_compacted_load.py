"""A load of groups ends even if compaction left no record at the end of `__consumer_offsets`.

(In KAFKA-9065 such a load never ended, and the groups of no other partition were loaded.)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from minibroker.broker.storage.compaction.key_map import ENTRY_BYTES, KeyMap
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import iterate_batches
from minibroker.protocol.topic_ids import make
from tests.groups_support import GROUP, OFFSETS, OFFSETS_ID, ORDERS_ID, CoordinatedGroups, Scenario, with_groups
from tests.replication_support import ORDERS
from tests.waiting import until

PAYMENTS = TopicPartition("payments", 0)


async def compact(groups: CoordinatedGroups) -> None:
    """Compact the whole log and drop all tombstones."""
    partition = groups.broker.partition(OFFSETS)
    log = partition.log
    log.configure(structs.replace(log.config, delete_retention_ms=0))
    log.roll()
    for _ in range(2):  # a pass drops the tombstones that the pass before it found
        for manager in groups.broker.logs.online:
            await manager.checkpoints.checkpoint_recovery_points()
        what = log.candidate(partition.high_watermark, groups.broker.world.clock.wall_ms()).cleanable

        async def pace(done: int, stopped: asyncio.Event) -> None: ...

        assert await log.compact(what, KeyMap(1_000 * ENTRY_BYTES, b"salt"), pace)
        await asyncio.sleep(1)


async def load_again(groups: CoordinatedGroups) -> None:
    await groups.follow(1)
    await groups.lead(2, wait=False)
    await until(lambda: groups.groups.terms.loaded())


async def the_last_batch_is_empty(groups: CoordinatedGroups) -> None:
    assert await groups.commit(7) == ErrorCode.NONE
    assert await groups.groups.removal.delete(GROUP) is ErrorCode.NONE
    await compact(groups)
    log = groups.broker.partition(OFFSETS).log
    left = [piece.header for piece in iterate_batches(log.read(0, 1 << 20, log.log_end_offset))]
    assert left
    assert not any(header.records_count for header in left)
    await load_again(groups)
    assert groups.groups.terms.loaded()[0].groups == {}


async def the_last_batch_has_lost_its_last_record(groups: CoordinatedGroups) -> None:
    groups.announce({OFFSETS_TOPIC: OFFSETS_ID, "orders": ORDERS_ID, "payments": make(1, 4, b"paymen")}, epoch=2)
    topics = [g.OffsetCommitTopic(name, [g.OffsetCommitPartition(0, 7, -1, None)]) for name in ("orders", "payments")]
    committed: list[object] = []
    groups.groups.commits.commit(g.OffsetCommitRequest(GROUP, -1, "", None, topics), committed.append)
    await until(lambda: bool(committed))
    deleted: list[object] = []
    doomed = [g.OffsetDeleteTopic("payments", [0])]
    groups.groups.commits.delete(g.OffsetDeleteRequest(GROUP, doomed), deleted.append)
    await until(lambda: bool(deleted))
    await compact(groups)
    await load_again(groups)
    assert await groups.committed(ORDERS) == 7
    assert await groups.committed(PAYMENTS) == -1


@pytest.mark.parametrize("scenario", [the_last_batch_is_empty, the_last_batch_has_lost_its_last_record])
def test_a_load_ends_if_compaction_left_no_record_at_the_end(tmp_path: Path, scenario: Scenario) -> None:
    with_groups(tmp_path, scenario)

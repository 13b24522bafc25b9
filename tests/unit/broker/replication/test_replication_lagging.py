"""Which followers a leader calls lagging, and how far they are behind."""

from __future__ import annotations

from pathlib import Path

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep.lagging import LAGGING_AFTER_S, Lagging, confirmed, suspects
from tests.replication_support import open_partition, state
from tests.storage_support import NOW, Clock, batch

COMMITTED = 500


def lagging(partition: Partition, clock: Clock) -> list[Lagging]:
    """Return those that lag, after a while."""
    clock.now_ms += round(2 * LAGGING_AFTER_S * 1_000)
    now_s = clock.monotonic()
    return [late for each in suspects(partition, lambda _: True, now_s) if (late := confirmed(each, now_s)) is not None]


def test_a_member_of_the_isr_that_has_not_fetched_from_a_new_leader_lacks_only_what_is_not_committed(
    tmp_path: Path,
) -> None:
    partition, clock = open_partition(tmp_path)
    partition.become_leader(state(isr=(1, 2)))
    partition.append(batch(COMMITTED), required_acks=1, now_ms=NOW)
    partition.high_watermark = COMMITTED
    assert [late.broker_id for late in lagging(partition, clock)] == [3]
    partition.append(batch(3), required_acks=1, now_ms=NOW)
    [in_sync_one, outside] = sorted(lagging(partition, clock), key=lambda late: late.broker_id)
    assert (in_sync_one.broker_id, in_sync_one.is_in_sync, in_sync_one.records) == (2, True, 3)
    assert (outside.broker_id, outside.is_in_sync, outside.records) == (3, False, COMMITTED + 3)

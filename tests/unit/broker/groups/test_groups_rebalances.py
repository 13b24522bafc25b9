"""The rebalances that a coordinator remembers: what DescribeGroups says of them, and what they may take."""

from __future__ import annotations

import asyncio

from minibroker.broker.groups.listing import describe
from minibroker.broker.groups.rebalances import MOST_REASON, MOST_REBALANCES
from minibroker.protocol.messages import groups as g
from tests.groups_support import GROUP, CoordinatedGroups, with_groups
from tests.running import run_by


def remembered(groups: CoordinatedGroups, group_id: str = GROUP) -> list[g.DescribedRebalance]:
    return describe(groups.groups.terms, group_id).rebalances


@run_by(with_groups)
async def test_a_described_group_names_the_reason_and_the_length_of_its_last_rebalances(
    groups: CoordinatedGroups, /
) -> None:
    first, second = await groups.stable(2)
    (begun,) = remembered(groups)
    assert begun.reason.startswith("member client-")
    assert begun.reason.endswith(" joins")
    assert (begun.generation_id, begun.time_ms > 0) == (0, True)
    assert begun.took_ms >= 0

    # The second member is silent. The first one hears of it and joins again after 2 s.
    groups.heartbeat(first, 1)
    await asyncio.sleep(9)
    groups.heartbeat(first, 1)
    await asyncio.sleep(1.5)
    lost = remembered(groups)[-1]
    assert lost.reason == f"member {second} is gone: no heartbeat for 10000 ms"
    assert (lost.generation_id, lost.took_ms) == (1, -1)
    await asyncio.sleep(2)
    joined = await groups.join(first)
    await groups.sync(first, joined.generation_id, {first: b"all"})
    assert 2_000 <= remembered(groups)[-1].took_ms <= 3_500

    # A group that everyone has left is told about as well.
    groups.leave(first)
    await asyncio.sleep(0.1)
    assert [(each.generation_id, each.took_ms >= 0) for each in remembered(groups)[-2:]] == [(1, True), (2, True)]
    assert remembered(groups)[-1].reason == f"member {first} is gone: it leaves"


@run_by(with_groups)
async def test_the_next_coordinator_knows_no_rebalances_of_the_one_before(groups: CoordinatedGroups, /) -> None:
    await groups.stable()
    assert remembered(groups)
    await groups.follow(epoch=1)
    await groups.lead(epoch=2)
    assert remembered(groups) == []


@run_by(with_groups)
async def test_only_the_last_rebalances_are_kept_and_their_reasons_are_cut(groups: CoordinatedGroups, /) -> None:
    group_id = "flapping"
    for _ in range(MOST_REBALANCES):
        (member,) = await groups.stable(group_id=group_id)
        groups.leave(member, group_id=group_id)
    kept = remembered(groups, group_id)
    assert len(kept) == MOST_REBALANCES
    assert kept[-1].generation_id == 2 * MOST_REBALANCES - 1
    group = groups.group(group_id)
    term = groups.groups.terms.loaded()[0]
    groups.groups.members._prepare_rebalance(term, group, "x" * 10_000)
    assert len(remembered(groups, group_id)[-1].reason) == MOST_REASON


@run_by(with_groups)
async def test_rebalances_count_towards_the_memory_of_groups_and_are_forgotten_if_there_is_none(
    groups: CoordinatedGroups, /
) -> None:
    members = groups.groups.members
    (member,) = await groups.stable()
    before = members._kept_bytes()
    assert remembered(groups)
    groups.group().rebalances = ()
    assert members._kept_bytes() < before
    members.room.limit = 0
    groups.leave(member)
    assert remembered(groups) == []

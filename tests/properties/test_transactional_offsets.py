"""Committed offsets are a function of the log: memory, a load and a load after a compaction say the same.

Random commits, deletions and transactions of three producers. At the end the coordinator's offsets are those that the
rules give, and the next coordinator reads the same from the log, compacted or not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from tests.groups_support import OFFSETS, CoordinatedGroups, with_groups
from tests.replication_support import ORDERS
from tests.unit.broker.groups.test_groups_compacted_load import compact

GROUPS = ("billing", "shipping")
PRODUCERS = (7, 8, 9)

STEPS = [
    "commit",
    *["commit in transaction"] * 2,
    "end",
    "abort",
    "delete the offset",
    "delete the group",
    "load",
    "compact",
]

steps = st.lists(
    st.tuples(
        st.sampled_from(STEPS),
        st.sampled_from(GROUPS),
        st.sampled_from(PRODUCERS),
    ),
    max_size=25,
)


class Record(NamedTuple):
    group: str
    log_offset: int
    offset: int | None
    """None: a tombstone."""


class Model:
    def __init__(self) -> None:
        self.decided: list[Record] = []
        self.open: dict[int, list[Record]] = {producer: [] for producer in PRODUCERS}

    def offset_of(self, group: str) -> int:
        newest = max((one for one in self.decided if one.group == group), key=lambda one: one.log_offset, default=None)
        return -1 if newest is None or newest.offset is None else newest.offset

    def is_unstable(self, group: str) -> bool:
        """Whether an open transaction may change the offset."""
        newest = max((one.log_offset for one in self.decided if one.group == group), default=-1)
        return any(one.group == group and one.log_offset > newest for of in self.open.values() for one in of)


async def carry_out(groups: CoordinatedGroups, todo: list[tuple[str, str, int]]) -> None:
    model = Model()
    epoch = 0
    epochs = dict.fromkeys(PRODUCERS, 0)

    async def load() -> None:
        nonlocal epoch
        await groups.follow(epoch + 1)
        epoch += 2
        await groups.lead(epoch)

    async def check() -> None:
        for group in GROUPS:
            offset = model.offset_of(group)
            assert await groups.committed(group_id=group) == offset
            expected = ErrorCode.UNSTABLE_OFFSET_COMMIT if model.is_unstable(group) else offset
            assert await groups.stable_offset(group_id=group) == expected

    log = groups.broker.partition(OFFSETS)
    for number, (step, group, producer) in enumerate(todo):
        end = log.log.log_end_offset
        if step == "commit":
            assert await groups.commit(number, group_id=group) == ErrorCode.NONE
            model.decided.append(Record(group, end, number))
        elif step == "commit in transaction":
            committing = groups.commit_in_transaction(
                number, group_id=group, producer_id=producer, producer_epoch=epochs[producer]
            )
            assert await committing == ErrorCode.NONE
            model.open[producer].append(Record(group, end, number))
        elif step in ("end", "abort"):
            epochs[producer] += 1
            groups.end_transaction(committed=step == "end", producer_id=producer, epoch=epochs[producer])
            model.decided += model.open[producer] if step == "end" else []
            model.open[producer] = []
        elif step == "delete the offset":
            topics = [g.OffsetDeleteTopic(ORDERS.topic, [ORDERS.partition])]
            groups.groups.commits.delete(g.OffsetDeleteRequest(group, topics), lambda _: None)
        elif step == "delete the group":
            assert await groups.groups.removal.delete(group) in (ErrorCode.NONE, ErrorCode.GROUP_ID_NOT_FOUND)
        elif step == "load":
            await load()
        elif log.log.last_stable_offset(log.high_watermark) == end > 0:
            await compact(groups)
        log = groups.broker.partition(OFFSETS)
        if step.startswith("delete") and log.log.log_end_offset > end:
            model.decided.append(Record(group, end, None))
        await check()
    await load()
    await check()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_memory_and_the_log_agree_on_offsets_of_transactions(todo: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with_groups(Path(directory), lambda groups: carry_out(groups, todo))

"""The new offsets for `groups reset-offsets`; nothing is changed here.

As in Kafka's kafka-consumer-groups, an offset outside a partition's log is replaced by the nearest one inside, because
one offset or shift may apply to many partitions of different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.cli.terminal.start_position import AtOffset, AtTime, Edge, Last, StartPosition
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition


class Shift(NamedTuple):
    by: int
    """Records to move forward; negative: backward."""


class Reset(NamedTuple):
    partition: TopicPartition
    old: int | None
    """None: nothing is committed."""
    new: OffsetAndMetadata
    lag: int
    """Afterwards."""


async def planned(
    admin: Admin, group: str, partitions: Sequence[TopicPartition], target: StartPosition | Shift
) -> list[Reset]:
    """Raises MinibrokerError if there is no offset to shift, BrokerError, NetworkError."""
    committed = await admin.list_group_offsets(group, partitions)
    if isinstance(target, Shift) and (bare := [p for p in partitions if committed[p] is None]):
        raise MinibrokerError(
            f"group {group} has committed nothing in {', '.join(map(str, bare))}, so there is no offset to "
            "shift: use --to"
        )
    earliest = _all_there(await admin.list_offsets(dict.fromkeys(partitions, "earliest")))
    latest = _all_there(await admin.list_offsets(dict.fromkeys(partitions, "latest")))
    at: Mapping[TopicPartition, OffsetAndTimestamp | None] = {}
    if isinstance(target, AtTime):
        at = await admin.list_offsets(dict.fromkeys(partitions, target.timestamp_ms))
    resets = []
    for partition in partitions:
        old = committed[partition]
        first, end = earliest[partition], latest[partition]
        new = _new(target, None if old is None else old.offset, first, end, at.get(partition))
        resets.append(Reset(partition, None if old is None else old.offset, new, end.offset - new.offset))
    return resets


def _all_there(
    found: Mapping[TopicPartition, OffsetAndTimestamp | None],
) -> dict[TopicPartition, OffsetAndTimestamp]:
    return {partition: each for partition, each in found.items() if each is not None}


def _new(
    target: StartPosition | Shift,
    old: int | None,
    first: OffsetAndTimestamp,
    end: OffsetAndTimestamp,
    at: OffsetAndTimestamp | None,
) -> OffsetAndMetadata:
    """`at`: the first record at or after the requested time. None: there is no such record, and the end applies."""
    match target:
        case Edge.BEGINNING:
            wanted = first.offset
        case Edge.END:
            wanted = end.offset
        case AtOffset(offset):
            wanted = offset
        case Last(records):
            wanted = end.offset - records
        case Shift(by):
            wanted = (old or 0) + by
        case AtTime():
            wanted = end.offset if at is None else at.offset
    offset = min(max(wanted, first.offset), end.offset)
    epochs = {found.offset: found.leader_epoch for found in (first, end, *([at] if at is not None else []))}
    return OffsetAndMetadata(offset, epochs.get(offset))

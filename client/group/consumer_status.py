"""Explains in words why a consumer gets no records, from its own knowledge, without requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.fetcher import Fetcher
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.group.member import GroupMember
from minibroker.client.group.subscription import Selection
from minibroker.client.group.waits import waits_for
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

_READY = "records are there: ask for them"
_AT_THE_END = "at the end: nothing new has been written"
_NAMES_SHOWN = 5


class ConsumerStatus(NamedTuple):
    """`str()` of it is the summary."""

    summary: str
    """One or two sentences: why no records arrive, or that records are there."""
    member_state: str | None
    """"unjoined", "preparing rebalance", "completing rebalance", "stable"; None: this is no member of a group."""
    member_id: str
    generation_id: int
    """-1: in none."""
    coordinator: str | None
    """The broker that coordinates the group, if it is known."""
    partitions: dict[TopicPartition, str]
    """The reason for which each assigned partition waits."""

    def __str__(self) -> str:
        return self.summary


def describe(
    *,
    state: str,
    fetcher: Fetcher,
    states: Mapping[TopicPartition, TopicPartitionState],
    member: GroupMember | None,
    reads: Selection,
    runtime: ClientRuntime,
    in_hand: InHand,
) -> ConsumerStatus:
    """Describe a consumer. `state` is that of its life cycle."""
    partitions = {partition: _of_partition(fetcher, states[partition]) for partition in sorted(states)}

    def summary() -> str:
        if state != "running":
            return f"the consumer is {state}"
        if reads.is_empty:
            return "there is nothing to read: call subscribe() or assign()"
        if member is not None and (wait := waits_for(member, runtime, in_hand)) is not None:
            return wait.text
        if not partitions:
            return _of_nothing(member, reads, runtime)
        counted = Counter(partitions.values())
        if len(counted) == 1:
            (why,) = counted
            return f"{_named(list(partitions))}: {why}"
        return "; ".join(
            f"{_named([partition for partition, reason in partitions.items() if reason == why])}: {why}"
            for why in counted
        )

    if member is None:
        return ConsumerStatus(summary(), None, "", -1, None, partitions)
    standing = member.standing
    return ConsumerStatus(
        summary(), standing.state.phase, standing.member_id, standing.generation_id, member.coordinator, partitions
    )


def _of_nothing(member: GroupMember | None, reads: Selection, runtime: ClientRuntime) -> str:
    """The summary if no partitions are assigned."""
    topics, subscribed = runtime.metadata.cluster.existing(), reads.subscribed
    names = [] if subscribed is None else subscribed.names(topics)
    missing = [name for name in names if name not in topics]
    if missing:
        return f"there is no topic {', '.join(missing)}: see `minibroker topics list`"
    if not names:
        pattern = "" if subscribed is None or subscribed.pattern is None else subscribed.pattern.pattern
        return f"no topic matches {pattern!r}: see `minibroker topics list`"
    count = sum(len(topics[name].partitions) for name in names)
    if member is None:
        return f"{', '.join(names)}: their partitions are not known yet"
    every = "the one partition" if count == 1 else f"all {count} partitions"
    return (
        f"other members of group {member.group} have {every} of {', '.join(names)}: there are more members than "
        "partitions, which leaves some idle, or one gives its partitions up only when its user asks for the next "
        f"records: see `minibroker groups describe {member.group}`"
    )


def _of_partition(fetcher: Fetcher, state: TopicPartitionState) -> str:
    if state.is_paused:
        return "paused: call resume()"
    if state.is_gone:
        return "it does not exist any more; once it is created again, it is read from its beginning"
    if state.is_held:
        return "the committed offset is being looked up, or the listener being told"
    if state.error is not None:
        return f"the next call for records raises: {state.error}"
    if state.has_records:
        return _READY
    if (why := fetcher.why_waiting(state)) is not None:
        return why
    if state.position is not None and state.end_offset is not None and state.fetch_offset >= state.end_offset:
        held_back = (state.high_watermark or 0) - state.end_offset
        if held_back > 0:
            offsets = counted(held_back, "offset")
            return f"at the last stable offset, {state.end_offset}: an open transaction holds back {offsets}"
        return _AT_THE_END
    return "being fetched"


def _named(partitions: Sequence[TopicPartition]) -> str:
    names = ", ".join(map(str, partitions[:_NAMES_SHOWN]))
    return names if len(partitions) <= _NAMES_SHOWN else f"{names} and {len(partitions) - _NAMES_SHOWN} more"

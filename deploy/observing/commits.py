"""Partitions whose records are not committed, because a member of the ISR does not copy them.

The problem: a follower that is cut off from its leader stays in the ISR for `replica.lag.time.max.ms`, and writes with
acks=all wait for it. Brokers report neither followers' positions nor the leader's log end among the offsets of
consumers.

The choice: OffsetForLeaderEpoch returns the leader's log end. A partition has stalled if, PATIENCE_S later, its high
watermark is still below it. The high watermark is asked for again until all partitions have reached it, so a healthy
cluster costs two questions for each leader, also under load. After that, the leader is asked which followers lag
(DescribeHealth). If it does not say, the sizes of the logs are compared. They are not of one moment, so under load each
follower is doubted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from minibroker.client.administering.movements import Sizes
from minibroker.deploy.observing.cluster_view import (
    ASK_END_OFFSETS_TIMEOUT_S,
    ClusterView,
    ask,
    ask_end_offsets,
    ask_sizes,
)
from minibroker.protocol.apis import DESCRIBE_HEALTH, OFFSET_FOR_LEADER_EPOCH
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    DescribeHealthRequest,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from minibroker.protocol.model import NO_EPOCH, TopicPartition

PATIENCE_S = 2.0
_EVERY_S = 0.1
_ASK_LAGGING_TIMEOUT_S = 0.8
"""A leader looks at suspects twice, 0.3 s apart."""
_CONSUMER = -1


def waiting(ends: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, int]) -> list[TopicPartition]:
    """Return the partitions whose high watermarks in `committed` are below the log ends that they had before. If
    either is unknown, nothing is said."""
    return [name for name, end in ends.items() if committed.get(name, end) < end]


class Awaited(NamedTuple):
    brokers: list[int]
    is_known: bool
    """Whether the leader waits for each of them, and not only for one."""


def awaited(view: ClusterView, name: TopicPartition, sizes: Sizes, lagging: Collection[int]) -> Awaited:
    """Return the members of the ISR that the leader waits for: those that it says are `lagging`, or else those whose
    logs are not as large as its own."""
    state = view.partitions[name]
    others = [broker for broker in state.isr_nodes if broker != state.leader_id]
    if named := sorted({*others} & {*lagging}):
        return Awaited(named, is_known=True)
    whole = sizes.get(state.leader_id, {}).get(name)
    behind = [broker for broker in others if whole is None or sizes.get(broker, {}).get(name) != whole]
    doubted = sorted(behind or others)
    return Awaited(doubted, is_known=len(doubted) == 1)


async def with_stalls(view: ClusterView, patience_s: float = PATIENCE_S) -> ClusterView:
    """Add `stalls` and `doubted_stalls`. This takes `patience_s` if there is one, and the time of the last answers.
    Partitions below `min.insync.replicas` are left out, whose records are not committed."""
    refusing = set(view.under_min_isr_partitions())
    able = (name for name, state in view.partitions.items() if len(state.isr_nodes) > 1 and name not in refusing)
    ends = await _ask_log_ends(view, able)
    clock = asyncio.get_running_loop().time
    until_s = clock() + patience_s
    while ends:
        is_last = clock() >= until_s
        asked = view._replace(partitions={name: view.partitions[name] for name in ends})
        left = waiting(ends, await ask_end_offsets(asked))
        ends = {name: ends[name] for name in left}
        if is_last:
            break
        if ends:
            await asyncio.sleep(_EVERY_S)
    if not ends:
        return view
    sizes, lagging = await asyncio.gather(
        ask_sizes(view, sorted(view.brokers), ends, ASK_END_OFFSETS_TIMEOUT_S), _ask_lagging(view, ends)
    )
    found = {name: awaited(view, name, sizes, lagging.get(name, ())) for name in sorted(ends)}
    return view._replace(
        stalls={name: each.brokers for name, each in found.items()},
        doubted_stalls=frozenset(name for name, each in found.items() if not each.is_known),
    )


async def _ask_lagging(view: ClusterView, names: Iterable[TopicPartition]) -> dict[TopicPartition, set[int]]:
    """Return the followers that lag, as the leaders of these partitions say."""
    leaders = sorted({view.partitions[name].leader_id for name in names})
    request = DescribeHealthRequest()
    answers = await asyncio.gather(
        *(ask(view.access, view.brokers[id], DESCRIBE_HEALTH, request, _ASK_LAGGING_TIMEOUT_S) for id in leaders)
    )
    lagging: dict[TopicPartition, set[int]] = {}
    for leader, answer in zip(leaders, answers, strict=True):
        for late in () if answer is None else answer.lagging_followers:
            name = TopicPartition(late.topic_name, late.partition_index)
            if name in view.partitions and view.partitions[name].leader_id == leader:
                lagging.setdefault(name, set()).add(late.broker_id)
    return lagging


async def _ask_log_ends(view: ClusterView, names: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    led: dict[int, dict[str, OffsetForLeaderTopic]] = {}
    for name in names:
        state = view.partitions[name]
        if view.brokers.get(state.leader_id) in view.answered:
            topics = led.setdefault(state.leader_id, {})
            question = OffsetForLeaderPartition(name.partition, NO_EPOCH, state.leader_epoch)
            topics.setdefault(name.topic, OffsetForLeaderTopic(name.topic, [])).partitions.append(question)
    answers = await asyncio.gather(
        *(
            ask(
                view.access,
                view.brokers[broker],
                OFFSET_FOR_LEADER_EPOCH,
                OffsetForLeaderEpochRequest(_CONSUMER, list(topics.values())),
                ASK_END_OFFSETS_TIMEOUT_S,
            )
            for broker, topics in led.items()
        )
    )
    return {
        TopicPartition(topic.topic, found.partition): found.end_offset
        for answer in answers
        if answer is not None
        for topic in answer.topics
        for found in topic.partitions
        if found.error_code == ErrorCode.NONE and found.end_offset >= 0
    }

"""Partitions whose records are not committed, because a member of the ISR does not copy them.

The problem: a follower that is cut off from its leader stays in the ISR for `replica.lag.time.max.ms`, and writes with
acks=all wait for it. Brokers report neither followers' positions nor the leader's log end among the offsets of
consumers.

The choice: OffsetForLeaderEpoch returns the leader's log end. A partition has stalled if, PATIENCE_S later, its high
watermark is still below it. The high watermark is asked for again until all partitions have reached it, so a healthy
cluster costs two questions for each leader, also under load. After that, the leader is asked which followers lag
(DescribeHealth). If it names none and the records still wait, it is not known which member has not copied them, unless
one does not answer at all.

Rejected: comparing the sizes of the logs. They are not of one moment, so a healthy follower under load was blamed; and
a follower whose fetches arrive late has the records already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minibroker.deploy.observing.cluster_view import (
    ASK_END_OFFSETS_TIMEOUT_S,
    ClusterView,
    ask,
    ask_end_offsets,
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


Lagging = Mapping[TopicPartition, set[int]]
"""The followers that leaders call lagging."""


def awaited(view: ClusterView, name: TopicPartition, lagging: Lagging) -> Awaited:
    """Return the members of the ISR for which the leader waits: those that it names. If it names none here, those that
    do not answer; else those that it names for other partitions, since an answer is bounded; else all."""
    state = view.partitions[name]
    others = {broker for broker in state.isr_nodes if broker != state.leader_id}
    if named := others & lagging.get(name, set()):
        return Awaited(sorted(named), is_known=True)
    silent = {broker for broker in others if view.brokers.get(broker) not in view.answered}
    elsewhere = {
        broker
        for other, brokers in lagging.items()
        if view.partitions[other].leader_id == state.leader_id
        for broker in brokers
    }
    doubted = silent or others & elsewhere or others
    return Awaited(sorted(doubted), is_known=len(doubted) == 1)


async def with_stalls(view: ClusterView, patience_s: float = PATIENCE_S) -> ClusterView:
    """Add `stalls` and `doubted_stalls`. This takes `patience_s` if there is one, and the time of the last answers.
    What is committed by the time of an answer that names no follower is no stall any more. Partitions below
    `min.insync.replicas` are left out, whose records are not committed."""
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
    lagging = await _ask_lagging(view, ends)
    if unnamed := {name: end for name, end in ends.items() if name not in lagging}:
        asked = view._replace(partitions={name: view.partitions[name] for name in unnamed})
        still = set(waiting(unnamed, await ask_end_offsets(asked)))
        ends = {name: end for name, end in ends.items() if name in lagging or name in still}
    found = {name: awaited(view, name, lagging) for name in sorted(ends)}
    return view._replace(
        stalls={name: each.brokers for name, each in found.items()},
        doubted_stalls=frozenset(name for name, each in found.items() if not each.is_known),
    )


async def _ask_lagging(view: ClusterView, names: Iterable[TopicPartition]) -> dict[TopicPartition, set[int]]:
    """Return the members of the ISR that lag, as the leaders of these partitions say."""
    leaders = sorted({view.partitions[name].leader_id for name in names})
    request = DescribeHealthRequest()
    answers = await asyncio.gather(
        *(ask(view.access, view.brokers[id], DESCRIBE_HEALTH, request, _ASK_LAGGING_TIMEOUT_S) for id in leaders)
    )
    lagging: dict[TopicPartition, set[int]] = {}
    for leader, answer in zip(leaders, answers, strict=True):
        for late in () if answer is None else answer.lagging_followers:
            name = TopicPartition(late.topic_name, late.partition_index)
            state = view.partitions.get(name)
            if state is not None and state.leader_id == leader and late.broker_id in state.isr_nodes:
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

"""Fetches that repeat an earlier request by its number, so that quiet partitions cost nothing on the wire.

The problem: a follower fetches each of its partitions twice a second, mostly without any news. With thousands of quiet
partitions that is a steady stream of names, offsets and epochs which the leader already knows.

The choice: a request may use a *slot* of its connection. The leader keeps the topics of the request in the slot, and
its last response for each partition; the follower also keeps the topics. To send the same request again, the follower
names the slot and no topics, and the response leaves out unchanged partitions. Only bytes are saved: the leader handles
the request as if it had come in full, and the follower computes its full request before it compares. So neither can act
on outdated state, and no state must be kept in step: if a partition is added, removed or moves, the request differs and
is sent in full. Slots end with their connection. A follower uses a slot only after the leader has confirmed it in a
response.

Rejected: fetch sessions (KIP-227), where each request changes a set of partitions at the leader. Both sides' sets must
agree after each change and error, and concurrent requests would each need a session. Their incremental responses are
the model for the ones here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import MAX_FETCH_SLOTS, FetchPartitionResponse, FetchRequest, FetchTopic
from minibroker.protocol.model import TopicPartition

Answer = list[tuple[TopicPartition, FetchPartitionResponse]]

NO_SLOT = -1

F = TypeVar("F")


class LeaderSlots:
    """The leader's side of the slots of one connection."""

    def __init__(self) -> None:
        self._asked: dict[int, list[FetchTopic]] = {}
        self._told: dict[TopicPartition, FetchPartitionResponse] = {}
        """The last responses for partitions in slots, without those that had records or an error."""

    def open(self, request: FetchRequest) -> Callable[[Answer], Answer]:
        """Fill in the topics of a request that names only its slot. Return a function that shortens its answer.

        Raises BrokerError(INVALID_REQUEST) if the slot is empty.
        """
        slot = request.slot
        asked_before = self._asked.get(slot, [])
        if slot != NO_SLOT and not request.topics:
            if not asked_before:
                raise BrokerError(ErrorCode.INVALID_REQUEST, f"nothing was asked for in slot {slot} yet")
            request.topics = asked_before
            return self._news
        for topic in asked_before:
            for fetch in topic.partitions:
                self._told.pop(TopicPartition(topic.topic, fetch.partition), None)
        if slot == NO_SLOT:
            return self._forget
        self._asked[slot] = request.topics
        return self._note

    def _forget(self, answer: Answer) -> Answer:
        if self._told:
            for topic_partition, _ in answer:
                self._told.pop(topic_partition, None)
        return answer

    def _note(self, answer: Answer) -> Answer:
        for topic_partition, response in answer:
            if len(response.records) or response.error_code or response.diverging_epoch is not None:
                self._told.pop(topic_partition, None)
            else:
                self._told[topic_partition] = response
        return answer

    def _news(self, answer: Answer) -> Answer:
        return self._note([part for part in answer if self._told.get(part[0]) != part[1]])


class FollowerSlots(Generic[F]):
    """The follower's side of the slots of one connection. F is a requested partition, compared by `==`."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Sequence[F], list[FetchTopic]]] = {}
        """The requests in the slots, the least recently used first."""

    def choose(self, asked: Sequence[F], topics: list[FetchTopic], busy: Collection[int]) -> tuple[int, bool]:
        """Return a slot that is not busy, and whether the leader already has exactly these topics in it."""
        for slot, (before, known) in self._kept.items():
            if slot not in busy and before == asked and known == topics:
                return slot, True
        for slot in range(MAX_FETCH_SLOTS):
            if slot not in busy and slot not in self._kept:
                return slot, False
        for slot in self._kept:
            if slot not in busy:
                del self._kept[slot]
                return slot, False
        return NO_SLOT, False

    def keep(self, slot: int, asked: Sequence[F], topics: list[FetchTopic]) -> None:
        """Record that the leader has confirmed this slot in its response."""
        self._kept.pop(slot, None)
        self._kept[slot] = asked, topics

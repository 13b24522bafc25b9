"""A fetch that says "the same again": quiet partitions cost nothing on the wire.

The problem. A follower asks twice a second for each partition that it follows, and hears that nothing has happened.
With thousands of quiet partitions that is a steady stream of names, offsets and epochs which the other side knows.

The choice. A request may go in a *slot* of its connection. The leader keeps what was asked for in it, and what it said
last of each partition; the follower keeps what it asked for. Where it would ask for exactly that again, it names the
slot and no topics; and an answer to that leaves out the partitions of which there is nothing new to say. Only the wire
is spared: the leader handles the request as if it had come in full, and the follower works out its request in full
before it compares. So neither can act on something that is out of date, and there is nothing to be kept in step: a
partition that goes, comes, or moves makes another request, which is sent in full. Slots end with their connection.

A leader that says in its answer that it keeps the slot is the only one who is asked so.

Rejected: fetch sessions (KIP-227), where a request changes a set of partitions that the leader keeps: both sides' sets
must agree after each change and error, and requests that are outstanding side by side would need a session each.
Answers without what did not change, as they are there, are taken from it.
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
    """The slots of one connection, as its leader keeps them."""

    def __init__(self) -> None:
        self._asked: dict[int, list[FetchTopic]] = {}
        self._told: dict[TopicPartition, FetchPartitionResponse] = {}
        """What was said last of partitions that are asked for in slots. Not of those that got records or an error."""

    def open(self, request: FetchRequest) -> Callable[[Answer], Answer]:
        """Fill in the topics of a request that names only its slot. Returns what shortens its answer.

        Raises BrokerError(INVALID_REQUEST) where the slot is empty.
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
    """The slots of one connection, as its follower keeps them. F: for what partitions are asked, compared by `==`."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Sequence[F], list[FetchTopic]]] = {}
        """Those that were used last come last."""

    def choose(self, asked: Sequence[F], topics: list[FetchTopic], busy: Collection[int]) -> tuple[int, bool]:
        """A slot that is not among the busy ones, and whether the leader has just these topics in it already."""
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
        """The leader has answered, and keeps this slot."""
        self._kept.pop(slot, None)
        self._kept[slot] = asked, topics

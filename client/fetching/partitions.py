"""The partitions that a consumer reads: which they are, their positions, and the batches that wait to be taken.

Nothing here sends requests; the fetcher does. A partition that is moved drops its batches undecoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.fetch_state import FetchedBatch, TopicPartitionState
from minibroker.client.log import Logger
from minibroker.client.tasks import Pulse
from minibroker.protocol import messages as m
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import NO_EPOCH, TopicPartition

logger = Logger("minibroker.client")

RESETS = {"earliest": m.EARLIEST_TIMESTAMP, "latest": m.LATEST_TIMESTAMP}


class _Gone(NamedTuple):
    """A topic that was read as a whole and has been deleted."""

    topic_id: str
    states: list[TopicPartitionState]
    """Its partitions. If brokers were wrong about the deletion, they are read on."""


class FetchedPartitions:
    """`pulse` beats when there may be something to take."""

    def __init__(self, runtime: ClientRuntime, *, auto_offset_reset: str, max_partition_bytes: int) -> None:
        self._metadata = runtime.metadata
        self._who = runtime.connections.client_id
        self._max_partition_bytes = max_partition_bytes
        self.reset = RESETS.get(auto_offset_reset)
        """The timestamp that `auto_offset_reset` stands for; None for "none"."""
        self.states: dict[TopicPartition, TopicPartitionState] = {}
        """In the order in which they are asked for."""
        self.topics: dict[str, str] = {}
        """The ids, as last seen, of all topics with partitions here."""
        self._whole_topics: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None
        self.gone: dict[str, _Gone] = {}
        self.named: Collection[str] = ()
        """Topics that the user has named, whether or not they exist."""
        self._with_data: dict[TopicPartitionState, None] = {}
        """Partitions with batches to take, in the order of their turns."""
        self._stopped: dict[TopicPartitionState, None] = {}
        """Partitions with an error to raise."""
        self.errors: list[BaseException] = []
        """Errors that calls for records raise, one at a time, before they return anything."""
        self.is_full = False
        """The buffer is full, so nothing more is fetched."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the fetcher."""
        self.pulse = Pulse()

    # -- which partitions --

    def assign_topics(self, topics: Sequence[str], pattern: re.Pattern[str] | None = None) -> None:
        """Read all partitions of these topics, or of the topics that match, and nothing else. Partitions that are added
        later are read from their beginning."""
        for topic in self._whole_topics.keys() - set(topics):
            if pattern is None or pattern.fullmatch(topic) is None:
                del self._whole_topics[topic]
        for topic in topics:
            self._add_topic(topic)
        self._pattern = pattern
        self.gone = {
            topic: gone
            for topic, gone in self.gone.items()
            if topic in self._whole_topics or (pattern is not None and pattern.fullmatch(topic) is not None)
        }
        self.remove([partition for partition in self.states if partition.topic not in self._whole_topics])

    def _add_topic(self, topic: str) -> None:
        self._whole_topics.setdefault(topic)
        self.topics.setdefault(topic, "")
        self._metadata.want(topic)

    def assign_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self.topics.setdefault(partition.topic, "")
            self._metadata.want(partition.topic)
            self.states[partition] = TopicPartitionState(partition, self.reset)

    def add_held(self, partitions: Sequence[TopicPartition]) -> list[TopicPartitionState]:
        """Add partitions, and fetch nothing of them until they are released. Returns those that are new."""
        added = []
        for partition in partitions:
            if partition not in self.states:
                info = self._metadata.cluster.topics.get(partition.topic)
                self.topics.setdefault(partition.topic, "" if info is None else info.topic_id)
                self._metadata.want(partition.topic)
                state = self.states[partition] = TopicPartitionState(partition, self.reset)
                state.is_held = state.awaits_committed = True
                added.append(state)
        return added

    def release(self, states: Iterable[TopicPartitionState]) -> None:
        for state in states:
            state.is_held = False
        self.wake()
        self.pulse.notify()

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions no more, and drop their batches."""
        for partition in list(partitions):
            state = self.states.pop(partition, None)
            if state is not None:
                self.move(state, None)
        for topic in self.topics.keys() - self._whole_topics.keys() - {partition.topic for partition in self.states}:
            del self.topics[topic]

    def assign_none(self) -> None:
        self._whole_topics.clear()
        self.gone.clear()
        self._pattern = None
        self.remove(self.states)

    def topic_id(self, partition: TopicPartition) -> str:
        """The id of the topic that is read under this name; empty if it is not known."""
        return self.topics.get(partition.topic, "")

    def handed_out_of(self, partition: TopicPartition) -> str:
        """The id of the topic whose records the user has. The topic may have been created again since."""
        state = self.states.get(partition)
        return (state.handed_out_of if state is not None else "") or self.topic_id(partition)

    def adopt_topics(self) -> None:
        """Adopt the topics and partitions that metadata has now."""
        existing = self._metadata.cluster.existing()
        if self._pattern is not None:
            for topic, found in sorted(existing.items()):
                if not found.is_internal and topic not in self._whole_topics and self._pattern.fullmatch(topic):
                    self._add_topic(topic)
        for topic in self.topics:
            info = existing.get(topic)
            if info is None:
                continue
            gone = self.gone.pop(topic, None)
            if gone is not None:
                logger.info("%s: topic %s exists again", self._who, topic)
                self.topics[topic] = gone.topic_id
                self.states |= {state.partition: state for state in gone.states}
            known_id, self.topics[topic] = self.topics[topic], info.topic_id or self.topics[topic]
            known = [state for state in self.states.values() if state.partition.topic == topic]
            if topic in self._whole_topics:
                for index in sorted(info.partitions):
                    partition = TopicPartition(topic, index)
                    if partition not in self.states:
                        is_new = bool(known) or self._metadata.is_new(topic)
                        reset = m.EARLIEST_TIMESTAMP if is_new else self.reset
                        self.states[partition] = TopicPartitionState(partition, reset)
            if known_id and info.topic_id and known_id != info.topic_id:
                for state in known:
                    self._topic_was_recreated(state, state.partition.partition in info.partitions)

    def _topic_was_recreated(self, state: TopicPartitionState, is_there: bool) -> None:
        """Drop the records of the earlier topic of this name."""
        self.move(state, None, None if self.reset is None else m.EARLIEST_TIMESTAMP)
        if not is_there and state.partition.topic in self._whole_topics:
            del self.states[state.partition]
        elif self.reset is None:
            error_text = (
                f"{state.partition.topic} was deleted and created again, so the position in {state.partition} means "
                'nothing there, and auto_offset_reset="none" forbids choosing one: call seek()'
            )
            self.stop(state, BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, error_text))

    def are_gone(self, topic: str, states: list[TopicPartitionState]) -> None:
        """No broker has these partitions of the topic any more: read them only if they are created again."""
        exists = topic in self._metadata.cluster.existing()
        self.warn_of_gone(", ".join(str(state.partition) for state in states) if exists else f"topic {topic}")
        if exists or topic not in self._whole_topics:
            for state in states:
                state.is_gone = True
            return
        self.gone[topic] = _Gone(self.topics[topic], states)
        for state in states:
            del self.states[state.partition]
            self._with_data.pop(state, None)
            self._stopped.pop(state, None)
        if topic not in self.named:  # it matched the pattern
            del self._whole_topics[topic], self.topics[topic]
            self._metadata.unwant(topic)

    def warn_of_gone(self, gone: str) -> None:
        logger.warning(
            "%s: %s does not exist any more, and is not read; once it is created again, it is read from its beginning",
            self._who,
            gone,
        )

    # -- positions --

    def move(
        self, state: TopicPartitionState, position: int | None, reset: int | None = None, epoch: int = NO_EPOCH
    ) -> None:
        """Go on elsewhere. Drops the batches that were not handed out yet."""
        state.move(position, reset, epoch)
        self._was_moved(state)

    def go_back(self, state: TopicPartitionState, position: int) -> None:
        """Fetch again from `position`, up to which all records were read. Drops the batches from there on."""
        state.go_back(position)
        self._was_moved(state)

    def _was_moved(self, state: TopicPartitionState) -> None:
        self._with_data.pop(state, None)
        self._stopped.pop(state, None)
        self.wake()

    def cut(self) -> None:
        """End all open batches: the rest of their records is fetched again."""
        for state in self.states.values():
            if state.open is not None and state.open.left:
                assert state.position is not None
                self.go_back(state, state.position)

    def stop(self, state: TopicPartitionState, error: MinibrokerError) -> None:
        """Fetch nothing more of the partition until `take` has raised this error."""
        state.error = error
        self._stopped[state] = None

    def is_first_suspicion(self, state: TopicPartitionState, error: MinibrokerError) -> bool:
        """Whether a corrupt batch is corrupt for the first time. It is then fetched once more: the leader looks at its
        disk first, and if that is damaged, another broker becomes the leader, if one can. The second time the error is
        raised to the user."""
        is_first, state.suspicion = state.suspicion is None, error
        if not is_first:
            state.suspicion = None  # the user may try again
        return is_first

    # -- batches --

    def has_data(self, state: TopicPartitionState) -> None:
        """Batches of this partition have arrived."""
        self._with_data.setdefault(state, None)

    def take(self) -> FetchedBatch | None:
        """Return the next batch, from each partition in turn; None if there is none. Raises the error that stopped a
        partition."""
        for state in self._stopped:
            if not state.is_paused and not state.is_held and not state.fetched:
                error, state.error = state.error, None
                del self._stopped[state]
                self.wake()
                assert error is not None
                raise error
        for state in self._with_data:
            if not state.is_paused and not state.is_held:
                batch = state.fetched.popleft()
                del self._with_data[state]
                if state.fetched:
                    self._with_data[state] = None
                before = state.fetched_bytes
                state.fetched_bytes -= batch.end - batch.start
                half = self._max_partition_bytes // 2
                if state.fetched_bytes <= half < before or not state.fetched or self.is_full:
                    self.wake()
                state.handed_out_of = self.topic_id(state.partition)
                return batch
        return None

    def put_back(self, batch: FetchedBatch) -> None:
        """Undo `take`: this batch is the next one of its partition."""
        state = batch.state
        state.fetched.appendleft(batch)
        state.fetched_bytes += batch.end - batch.start
        self._with_data.setdefault(state, None)

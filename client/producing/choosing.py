"""Which partition each record goes to, by the producer's partitioner and the state of the topic. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from minibroker.client.errors import PartitionerFailed, no_such_partition
from minibroker.client.producing.columns import Columns
from minibroker.client.producing.partitioners import (
    Partitioner,
    Partitions,
    RecordPartitioner,
    WithoutKey,
    choose_adaptive,
    choose_round_robin,
    choose_sticky,
    partitions_of,
)
from minibroker.client.producing.queues import TopicState
from minibroker.client.shown import shown
from minibroker.protocol.model import TopicPartition


def check_partition(state: TopicState, count: int, partition: int) -> None:
    """Raises BrokerError (UNKNOWN_TOPIC_OR_PARTITION)."""
    if not 0 <= partition < count:
        raise no_such_partition(TopicPartition(state.name, partition), count)


class PartitionChoice:
    """Chooses partitions of topics whose number of partitions is known."""

    def __init__(self, partitioner: Partitioner | RecordPartitioner, random: Random) -> None:
        self._chooser: RecordPartitioner | None = None
        """The application's function that chooses for every record."""
        if isinstance(partitioner, Partitioner):
            self.by_key, self.without_key = partitioner
        else:
            self._chooser = partitioner
            self.by_key, self.without_key = Partitioner()
        self._random = random

    @property
    def is_for_each_record(self) -> bool:
        """Whether every record is chosen for by itself, with a key or without."""
        return self._chooser is not None or self.without_key is WithoutKey.ROUND_ROBIN

    def of_record(self, state: TopicState, count: int, key: bytes | None, value: bytes | None) -> int | None:
        """Return the record's partition; None: it has no key and may go to the topic's sticky partition.

        Raises PartitionerFailed, and BrokerError if the hash of a key is no partition."""
        if self._chooser is not None:
            return self._chosen(self._chooser, state, count, key, value)
        if key is not None:
            partition = self.by_key(key, count)
            check_partition(state, count, partition)
            return partition
        if self.without_key is WithoutKey.ROUND_ROBIN:
            state.previous = choose_round_robin(state.available, state.previous)
            return state.previous
        return None

    def of_records(self, state: TopicState, count: int, columns: Columns) -> list[int]:
        """Return the partition of each record of a `send_batch`. Raises as `of_record`."""
        keys = columns.keys
        if self._chooser is not None:
            chooser = self._chooser
            return [
                self._chosen(chooser, state, count, None if keys is None else keys[index], value)
                for index, value in enumerate(columns.values)
            ]
        if keys is None:
            keys = [None] * len(columns)
        with_key = [key for key in keys if key is not None]
        targets = partitions_of(with_key, self.by_key, count)
        for target in set(targets):
            check_partition(state, count, target)
        if len(with_key) == len(keys):
            return targets
        chosen = iter(targets)
        without_key = self._without_key(state, len(keys) - len(with_key))
        return [next(without_key) if key is None else next(chosen) for key in keys]

    def next_sticky(self, state: TopicState) -> int:
        """Choose and note another partition for the topic's records without a key."""
        if self.without_key is WithoutKey.STICKY:
            chosen = choose_sticky(state.available, state.sticky, self._random)
        else:
            lengths = [state.queue_length(partition) for partition in state.available]
            chosen = choose_adaptive(state.available, lengths, self._random)
        state.sticky, state.sticky_bytes = chosen, 0
        return chosen

    def _without_key(self, state: TopicState, count: int) -> Iterator[int]:
        """Yield the partitions of `count` records without a key among records with one: the sticky partition for all of
        them, unless round robin applies. The end of a `send_batch` is not a reason to change the sticky partition."""
        if self.without_key is WithoutKey.ROUND_ROBIN:
            for _ in range(count):
                state.previous = choose_round_robin(state.available, state.previous)
                yield state.previous
            return
        sticky = state.sticky
        if sticky is None or state.sticky_bytes >= state.batch_size:
            sticky = self.next_sticky(state)
        for _ in range(count):
            yield sticky

    @staticmethod
    def _chosen(
        chooser: RecordPartitioner, state: TopicState, count: int, key: bytes | None, value: bytes | None
    ) -> int:
        # The application's own errors must not pass for the client's: the sender's task may call this.
        try:
            partition = chooser(state.name, key, value, Partitions(count, state.available))
        except Exception as error:
            raise PartitionerFailed(f"the partitioner failed for a record of {state.name}: {shown(error)}") from error
        if type(partition) is not int or not 0 <= partition < count:
            raise PartitionerFailed(
                f"the partitioner returned {shown(partition)} for a record of {state.name}: it must be an int from "
                f"0 to {count - 1}"
            )
        return partition

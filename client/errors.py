"""The client library's own errors; those of `minibroker.protocol.errors` (BrokerError, NetworkError) come from brokers
and the network.

All derive from MinibrokerError, so `except MinibrokerError` catches everything. Every message names the value, the rule
and the remedy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from minibroker.client.shown import shown, shows_only
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

if TYPE_CHECKING:
    from minibroker.client.administering.configs import ConfigEntry, ConfigResource
    from minibroker.client.administering.groups import GroupDescription
    from minibroker.client.producing.delivery import BatchMetadata


def no_such_partition(partition: TopicPartition, count: int, doing: str = "") -> BrokerError:
    """UNKNOWN_TOPIC_OR_PARTITION for a topic that is there, and has `count` partitions. `doing` comes before it."""
    topic, index = partition
    return BrokerError(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        f"{doing}{topic} has no partition {index}: its partitions are 0 to {count - 1}. Name one of them, or add "
        f"partitions with `minibroker topics alter {topic} --partitions {index + 1}`",
        is_complete=True,
    )


class ApiTimedOut(MinibrokerError, TimeoutError):
    """A call did not get its answer within `default_api_timeout_ms`."""


class InvalidSetting(MinibrokerError, ValueError):
    """A setting has a value that it cannot have. Raised by constructors, before anything is started."""

    def __init__(self, name: str, value: object, rule: str) -> None:
        super().__init__(f"{name}={shown(value)}: {rule}")
        self.name = name
        self.value = value


class InvalidAssignment(MinibrokerError, ValueError):
    """An assignor of the user's decided what a group cannot do."""

    def __init__(self, assignor: str, what: str) -> None:
        super().__init__(f"assignor {assignor}: {what}")


class Closed(MinibrokerError, RuntimeError):
    """The producer, consumer or admin was closed, or not started yet."""


class WrongEventLoop(MinibrokerError, RuntimeError):
    """A producer, consumer or admin was used from an event loop other than the one in which it was started, or from a
    thread in which none runs. Nothing was done."""


class ListenerTimedOut(MinibrokerError, TimeoutError):
    """A rebalance listener took longer than `max_poll_interval_ms`, for which its group waited, and was cancelled."""

    def __init__(self, method: str, max_poll_interval_ms: int) -> None:
        self._arguments = method, max_poll_interval_ms
        super().__init__(
            f"{method} did not return within max_poll_interval_ms={max_poll_interval_ms}, and was cancelled: let it do "
            "less, or bound what it waits for, or raise max_poll_interval_ms"
        )

    def __reduce__(self) -> tuple[type[ListenerTimedOut], tuple[str, int]]:
        return type(self), self._arguments


class WithinListener(MinibrokerError, RuntimeError):
    """A rebalance listener has called `unsubscribe` or `close`, or has asked for records: these wait until it has
    returned. Nothing was done."""

    def __init__(self, call: str) -> None:
        self._call = call
        super().__init__(
            f"{call}() was called by a rebalance listener, for which it would wait: let the listener return, or raise, "
            "and call it from the loop that reads"
        )

    def __reduce__(self) -> tuple[type[WithinListener], tuple[str]]:
        return type(self), (self._call,)


class ForkedClient(MinibrokerError, RuntimeError):
    """A client of `minibroker.sync` was used in a child that was forked from its process. Nothing was done: make a new
    one in the child."""


class ClientCrashed(MinibrokerError, RuntimeError):
    """A background task of the client met a bug. Nothing is sent or fetched any more; the cause is chained."""


class BufferFull(MinibrokerError):
    """`send` was called faster than brokers take records, and `drain` was not awaited in between."""


class PartitionerFailed(MinibrokerError):
    """The function that was given as `partitioner` raised (that is the cause), or returned what is no partition."""


class SerializationFailed(MinibrokerError, ValueError):
    """A key or value could not be made bytes, so nothing was sent. The serializer's error is the cause.

    `topic`; `what`, which is "key" or "value" (with an index: of `send_batch`); and the `type` of what was passed.
    """

    def __init__(self, topic: str, what: str, type: type, problem: str) -> None:
        self.topic = topic
        self.what = what
        self.type = type
        self._problem = problem
        super().__init__(f"the {what} for {topic}, of type {type.__name__}, cannot be serialized: {problem}")

    def __reduce__(self) -> tuple[type[SerializationFailed], tuple[str, str, type, str]]:
        return SerializationFailed, (self.topic, self.what, self.type, self._problem)


class DeserializationFailed(MinibrokerError, ValueError):
    """A record's key or value is not what the deserializer reads. Its error is the cause.

    `partition` and `offset` of the record, `what` ("key" or "value"), and the `data` as it is in the log.
    """

    def __init__(self, topic: str, partition: int, offset: int, what: str, problem: str, data: bytes) -> None:
        self.partition = TopicPartition(topic, partition)
        self.offset = offset
        self.what = what
        self.data = data
        self._problem = problem
        super().__init__(
            f"{self.partition} at offset {offset}: the {what} of {counted(len(data), 'byte')} cannot be "
            f"deserialized: {problem}"
        )

    def __reduce__(self) -> tuple[type[DeserializationFailed], tuple[str, int, int, str, str, bytes]]:
        return type(self), (*self.partition, self.offset, self.what, self._problem, self.data)


class DeliveryTimedOut(MinibrokerError, TimeoutError):
    """A record was not acknowledged within `delivery_timeout_ms`. It may be in the log all the same."""


@shows_only("topic", "partition", "timestamp_ms", "error")
class FailedRecord(NamedTuple):
    """A record that is not known to be in the log, and why."""

    topic: str
    partition: int | None
    """None if no partition had been chosen yet."""
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Sequence[tuple[str, bytes | None]]
    error: MinibrokerError


def records_were(count: int) -> str:
    return "1 record was" if count == 1 else f"{count} records were"


class DeliveryFailed(MinibrokerError):
    """Records failed and nobody awaited their Delivery. `failures` holds all of them, in no global order, but in
    the order of their `send` within each partition."""

    def __init__(self, failures: Sequence[FailedRecord]) -> None:
        self.failures = tuple(failures)
        reasons = Counter((failure.topic, failure.partition, str(failure.error)) for failure in failures)
        lines = [
            f"{count} of {topic if partition is None else f'{topic}-{partition}'}: {reason}"
            for (topic, partition, reason), count in reasons.most_common(5)
        ]
        if len(reasons) > len(lines):
            lines.append(f"and {len(reasons) - len(lines)} other reasons")
        super().__init__(f"{records_were(len(failures))} not delivered (see .failures). " + "; ".join(lines))

    def __reduce__(self) -> tuple[type[DeliveryFailed], tuple[Any, ...]]:
        return type(self), (self.failures,)


class BatchDeliveryFailed(DeliveryFailed):
    """Records of a `send_batch` failed.

    `failures` holds those that failed, `indexes` says which records of the call these are, in the same order, and
    `metadata` where the others are.
    """

    def __init__(self, failures: Sequence[FailedRecord], indexes: Sequence[int], metadata: BatchMetadata) -> None:
        super().__init__(failures)
        self.indexes = tuple(indexes)
        self.metadata = metadata

    def __reduce__(self) -> tuple[type[DeliveryFailed], tuple[Any, ...]]:
        return type(self), (self.failures, self.indexes, self.metadata)


class TopicErrors(MinibrokerError):
    """Some topics of a request failed. `errors` has one entry for each, by name; the other topics succeeded."""

    def __init__(self, errors: dict[str, MinibrokerError]) -> None:
        self.errors = errors
        super().__init__(_grouped(errors))

    def __reduce__(self) -> tuple[type[TopicErrors], tuple[dict[str, MinibrokerError]]]:
        return type(self), (self.errors,)


class PartitionErrors(MinibrokerError):
    """Some partitions of a request failed. `errors` has one entry for each; the other partitions succeeded, and
    `results` has what the call would have returned for them."""

    def __init__(
        self,
        errors: dict[TopicPartition, MinibrokerError],
        results: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        self.errors = errors
        self.results = dict(results)
        super().__init__(_grouped({str(partition): error for partition, error in sorted(errors.items())}))

    def __reduce__(
        self,
    ) -> tuple[type[PartitionErrors], tuple[dict[TopicPartition, MinibrokerError], dict[TopicPartition, int]]]:
        return type(self), (self.errors, self.results)


class GroupErrors(MinibrokerError):
    """Some groups of a request failed. `errors` has one entry for each, by name; the other groups succeeded, and
    `results` has what the call would have returned for them."""

    def __init__(
        self,
        errors: Mapping[str, MinibrokerError],
        results: Mapping[str, GroupDescription] = MappingProxyType({}),
    ) -> None:
        self.errors = dict(errors)
        self.results = dict(results)
        super().__init__("; ".join(f"{name}: {error}" for name, error in errors.items()))

    def __reduce__(
        self,
    ) -> tuple[type[GroupErrors], tuple[dict[str, MinibrokerError], dict[str, GroupDescription]]]:
        return type(self), (self.errors, self.results)


class BrokersFailed(MinibrokerError):
    """Some brokers of a request did not do what was asked. `errors` has one entry for each, by id; the others did, and
    `results` has what the call would have returned for them."""

    def __init__(
        self,
        errors: dict[int, MinibrokerError],
        results: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self.errors = errors
        self.results = dict(results)
        """By id, too."""
        super().__init__(_grouped({f"broker {broker}": error for broker, error in sorted(errors.items())}))

    def __reduce__(
        self,
    ) -> tuple[type[BrokersFailed], tuple[dict[int, MinibrokerError], dict[int, Any]]]:
        return type(self), (self.errors, self.results)


class ConfigErrors(MinibrokerError):
    """Some resources of a request failed. `errors` has one entry for each; the other resources succeeded, and `results`
    has what the call would have returned for them."""

    def __init__(
        self,
        errors: Mapping[ConfigResource, MinibrokerError],
        results: Mapping[ConfigResource, Mapping[str, ConfigEntry]] = MappingProxyType({}),
    ) -> None:
        self.errors = dict(errors)
        self.results = dict(results)
        super().__init__(_grouped({str(resource): error for resource, error in errors.items()}))

    def __reduce__(
        self,
    ) -> tuple[
        type[ConfigErrors],
        tuple[dict[ConfigResource, MinibrokerError], dict[ConfigResource, Mapping[str, ConfigEntry]]],
    ]:
        return type(self), (self.errors, self.results)


class CommitFailed(MinibrokerError):
    """Offsets were not committed, or that is not known. `errors` has one entry for each partition; those of the same
    call that are not in it are committed."""

    def __init__(self, group: str, errors: dict[TopicPartition, MinibrokerError]) -> None:
        self.group = group
        self.errors = errors
        named = _grouped({str(partition): error for partition, error in sorted(errors.items())})
        super().__init__(f"offsets of group {group} were not committed: {named}")

    def __reduce__(self) -> tuple[type[CommitFailed], tuple[str, dict[TopicPartition, MinibrokerError]]]:
        return type(self), (self.group, self.errors)


class MaxPollIntervalExceeded(MinibrokerError):
    """The consumer was asked for no records for longer than `max_poll_interval_ms`, so it has left its group, and
    others may have read on from what was committed. Iterating on goes on as a new member.

    `silent_s`: for how long nothing was asked for.
    """

    def __init__(self, silent_s: float, max_poll_interval_s: float) -> None:
        self.silent_s = silent_s
        self.max_poll_interval_s = max_poll_interval_s
        super().__init__(
            f"no records were asked for during {silent_s:.1f} s, which is more than max_poll_interval_ms="
            f"{max_poll_interval_s * 1_000:.0f}, so this consumer has left its group: process fewer records at a time "
            "(max_poll_records), or raise max_poll_interval_ms. Iterating on joins again"
        )

    def __reduce__(self) -> tuple[type[MaxPollIntervalExceeded], tuple[float, float]]:
        return type(self), (self.silent_s, self.max_poll_interval_s)


class CorruptBatch(MinibrokerError):
    """A batch arrived damaged. Iterating again fetches it again; `seek` past it skips it.

    `partition`, `problem`, and `next_offset`, the one behind the batch, None where its end cannot be told.
    """

    def __init__(self, partition: TopicPartition, problem: str, remedy: str, next_offset: int | None = None) -> None:
        self.partition = partition
        self.problem = problem
        self.next_offset = next_offset
        self._remedy = remedy
        super().__init__(f"{partition} {problem}. {remedy}")

    def __reduce__(self) -> tuple[type[CorruptBatch], tuple[TopicPartition, str, str, int | None]]:
        return type(self), (self.partition, self.problem, self._remedy, self.next_offset)


class LogTruncated(MinibrokerError):
    """Records that this consumer had read are no longer in the log (after an unclean election), and with
    `auto_offset_reset="none"` the caller must say where to go on: `seek`. (Kafka's LogTruncationException, KIP-320.)

    `partition`, `offset` (the position), and `diverging_offset`, from which on the log is another one than was read.
    """

    def __init__(self, partition: TopicPartition, offset: int, diverging_offset: int) -> None:
        self.partition = partition
        self.offset = offset
        self.diverging_offset = diverging_offset
        super().__init__(
            f"{partition}: records from offset {diverging_offset} on, up to {offset}, were lost in an unclean "
            f'election, and auto_offset_reset="none": call seek(), for instance to {diverging_offset}'
        )

    def __reduce__(self) -> tuple[type[LogTruncated], tuple[TopicPartition, int, int]]:
        return type(self), (self.partition, self.offset, self.diverging_offset)


def _grouped(errors: Mapping[str, MinibrokerError]) -> str:
    """Each text once, after the names of all that it concerns, if it does not have the name itself."""
    alike: dict[str, list[str]] = {}
    for name, error in errors.items():
        alike.setdefault(str(error), []).append(name)
    return "; ".join(
        text if len(names) == 1 and _names(text, names[0]) else f"{', '.join(names)}: {text}"
        for text, names in alike.items()
    )


def _names(text: str, name: str) -> bool:
    """A name may be a word that any text has: it counts in quotes, or as a partition's."""
    return repr(name) in text or bool(re.search(r"-\d+$", name) and re.search(rf"(?<![\w.-]){re.escape(name)}\b", text))

"""The records that a consumer hands out, and batches of them as columns."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec

from minibroker.client.serializers import Deserializer, deserialize
from minibroker.client.shown import shows_only
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import Header
from minibroker.protocol.words import counted

_MOST_MS = (1 << 63) - 1
"""The largest timestamp in Arrow. Two numbers in a batch may add up to one more."""


@shows_only("topic", "partition", "offset")
class Record(msgspec.Struct, frozen=True, gc=False):
    """One record. The garbage collector need not track it: it refers to nothing that could refer to it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    """-1 if the producer set none."""
    key: Any
    """bytes or None, or the result of the consumer's `key_deserializer`."""
    value: Any
    """bytes, or the result of `value_deserializer`; None: a tombstone."""
    headers: Sequence[Header] = ()


class ConsumerBatch:
    """Records of one partition in the order of their offsets, as columns of equal length.

    Iterating over it makes Record objects; the columns are there already.
    """

    __slots__ = ("_headers", "_keys", "next_offset", "offsets", "partition", "timestamps", "topic", "values")

    def __init__(
        self,
        topic: str,
        partition: int,
        offsets: Sequence[int],
        timestamps: Sequence[int],
        keys: Sequence[Any] | None,
        values: Sequence[Any],
        headers: Sequence[Sequence[Header] | None] | None,
        next_offset: int,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offsets = offsets
        self.timestamps = timestamps
        """Milliseconds since 1970."""
        self._keys = keys
        self.values = values
        self._headers = headers
        self.next_offset = next_offset
        """The offset at which consumption continues after this batch. It is greater than the last offset plus one if
        compaction or control batches left gaps."""

    @property
    def keys(self) -> Sequence[Any]:
        return [None] * len(self.values) if self._keys is None else self._keys

    @property
    def headers(self) -> Sequence[Sequence[Header]]:
        return [()] * len(self.values) if self._headers is None else [headers or () for headers in self._headers]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records())

    def __repr__(self) -> str:
        span = f"offsets {self.offsets[0]} to {self.offsets[-1]}" if self.values else "empty"
        return f"ConsumerBatch({self.topic}-{self.partition}, {counted(len(self), 'record')}, {span})"

    def records(self) -> list[Record]:
        # One call into C: map stops at the shortest iterable, and the endless ones cost nothing.
        return list(
            map(
                Record,
                repeat(self.topic),
                repeat(self.partition),
                self.offsets,
                self.timestamps,
                repeat(None) if self._keys is None else self._keys,
                self.values,
                repeat(()) if self._headers is None else self.headers,
            )
        )

    def since(self, index: int) -> "ConsumerBatch":
        """Return the batch without its first `index` records."""
        return self._cut(slice(index, None), self.next_offset)

    def until(self, index: int) -> "ConsumerBatch":
        """Return the batch without its records from `index` on."""
        return self._cut(slice(index), self.offsets[index] if index < len(self) else self.next_offset)

    def _cut(self, part: slice, next_offset: int) -> "ConsumerBatch":
        return ConsumerBatch(
            self.topic,
            self.partition,
            self.offsets[part],
            self.timestamps[part],
            None if self._keys is None else self._keys[part],
            self.values[part],
            None if self._headers is None else self._headers[part],
            next_offset,
        )

    def deserialized(self, key: Deserializer | None, value: Deserializer | None) -> "ConsumerBatch":
        """Return the batch with its keys and values deserialized. Raises DeserializationFailed for the first record
        for which that fails."""
        keys: list[Any] | None = None if key is None or self._keys is None else []
        values: list[Any] | None = None if value is None else []
        for index, offset in enumerate(self.offsets):
            if keys is not None and key is not None and self._keys is not None:
                keys.append(deserialize(key, self._keys[index], self.topic, self.partition, offset, "key"))
            if values is not None and value is not None:
                values.append(deserialize(value, self.values[index], self.topic, self.partition, offset, "value"))
        return ConsumerBatch(
            self.topic,
            self.partition,
            self.offsets,
            self.timestamps,
            self._keys if keys is None else keys,
            self.values if values is None else values,
            self._headers,
            self.next_offset,
        )

    def to_arrow(self) -> Any:
        """A pyarrow.RecordBatch with the columns topic, partition, offset, timestamp (ms, UTC), key, value. Keys and
        values are binary, or what pyarrow takes deserialized ones for.

        Raises MinibrokerError if pyarrow is not installed, or has no type for them.
        """
        try:
            import pyarrow
        except ImportError as error:
            raise MinibrokerError("to_arrow() needs pyarrow, which is not installed: pip install pyarrow") from error
        count = len(self)
        milliseconds = pyarrow.timestamp("ms", "UTC")
        try:
            times = pyarrow.array(list(self.timestamps), milliseconds)
        except OverflowError:
            times = pyarrow.array([min(each, _MOST_MS) for each in self.timestamps], milliseconds)

        def column(values: Sequence[Any]) -> Any:
            try:
                if all(value is None or type(value) is bytes for value in values):
                    return pyarrow.array(values, pyarrow.binary())
                return pyarrow.array(values)
            except pyarrow.ArrowException as error:
                raise MinibrokerError(f"to_arrow(): these values have no type in Arrow in common: {error}") from error

        return pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.repeat(pyarrow.scalar(self.topic, pyarrow.string()), count),
                pyarrow.repeat(pyarrow.scalar(self.partition, pyarrow.int32()), count),
                pyarrow.array(list(self.offsets), pyarrow.int64()),
                times,
                pyarrow.nulls(count, pyarrow.binary()) if self._keys is None else column(self._keys),
                column(self.values),
            ],
            names=["topic", "partition", "offset", "timestamp", "key", "value"],
        )

"""What a consumer hands out: records, and batches of them as columns."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import Header


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record. The garbage collector need not track it: it refers to nothing that could refer to it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    """None: a tombstone."""
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
        keys: Sequence[bytes | None] | None,
        values: Sequence[bytes | None],
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
        """Where consumption goes on after this batch: more than the last offset plus one if compaction or control
        batches left gaps."""

    @property
    def keys(self) -> Sequence[bytes | None]:
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
        return f"ConsumerBatch({self.topic}-{self.partition}, {len(self)} records, {span})"

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
        """The batch without its first `index` records."""
        return ConsumerBatch(
            self.topic,
            self.partition,
            self.offsets[index:],
            self.timestamps[index:],
            None if self._keys is None else self._keys[index:],
            self.values[index:],
            None if self._headers is None else self._headers[index:],
            self.next_offset,
        )

    def to_arrow(self) -> Any:
        """A pyarrow.RecordBatch with the columns topic, partition, offset, timestamp (ms, UTC), key, value.

        Raises MinibrokerError if pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError as error:
            raise MinibrokerError(
                "to_arrow() needs pyarrow, which is not installed: pip install 'minibroker[spark]'"
            ) from error
        count = len(self)
        return pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.repeat(pyarrow.scalar(self.topic, pyarrow.string()), count),
                pyarrow.repeat(pyarrow.scalar(self.partition, pyarrow.int32()), count),
                pyarrow.array(list(self.offsets), pyarrow.int64()),
                pyarrow.array(list(self.timestamps), pyarrow.timestamp("ms", "UTC")),
                pyarrow.nulls(count, pyarrow.binary())
                if self._keys is None
                else pyarrow.array(self._keys, pyarrow.binary()),
                pyarrow.array(self.values, pyarrow.binary()),
            ],
            names=["topic", "partition", "offset", "timestamp", "key", "value"],
        )

"""Encoding and decoding of records, compared with the record builders and readers of aiokafka and kafka-python.

    python -m tests.benchmarks.bench_codecs [--records 1000] [--value-bytes 100] [--seconds 0.5]

aiokafka's are in C (Cython), kafka-python's in Python; both write and read Kafka's batches of version 2 record by
record, as their producers and consumers do. minibroker's producer writes batches of columns. Each codec encodes the
same distinct random values, keys and timestamps, from Python's bytes to a batch with its checksum. It then checks the
checksum, decodes the batch, and reads the offset, timestamp, key and value of each record; minibroker does this twice,
as columns and as one Record each. (A timestamp becomes an int when it is read, in columns as in aiokafka's records.)
The decoded records are compared with the encoded ones. All codecs take turns, and the best CPU time counts, which other
load on the machine changes little.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiokafka.record import default_records as aiokafka_records
from kafka.record import default_records as kafka_records

from minibroker.client.fetching.records import ConsumerBatch
from minibroker.protocol.records import DecodedBatch, decode_batch, encode_batch

NOW = 1_700_000_000_000
MAGIC = 2
CAPACITY = 1 << 30
TARGETS = {"aiokafka": 3.0, "kafka-python": 10.0}

Row = tuple[int, int, bytes | None, bytes | None]
"""Offset, timestamp, key, value."""


ROUNDS = 15


def nanoseconds(calls: Sequence[Callable[[], object]], records: int, seconds: float) -> list[float]:
    """CPU time per record of each call, the best of several rounds in which the calls take turns."""
    numbers = []
    for call in calls:
        number = 1
        while _took(call, number) < seconds / ROUNDS:
            number *= 2
        numbers.append(number)
    rounds = [
        [_took(call, number) / number for call, number in zip(calls, numbers, strict=True)] for _ in range(ROUNDS)
    ]
    return [min(column) / records * 1e9 for column in zip(*rounds, strict=True)]


def _took(call: Callable[[], object], number: int) -> float:
    began = time.process_time()
    for _ in range(number):
        call()
    return time.process_time() - began


class Ours:
    name = "minibroker, columns"

    def encode(self, values: list[bytes], keys: list[bytes] | None, timestamps: list[int]) -> bytes | bytearray:
        return encode_batch(values, timestamps=timestamps, keys=keys, is_checked=True)

    def decode(self, data: bytes | bytearray) -> DecodedBatch:
        return decode_batch(data)

    def rows(self, decoded: Any) -> list[Row]:
        keys = decoded.keys or [None] * decoded.count
        return list(zip(decoded.offsets, decoded.timestamps, keys, decoded.values, strict=True))


class OurRecords(Ours):
    name = "minibroker, a Record each"

    def decode(self, data: bytes | bytearray) -> Any:
        batch = decode_batch(data)
        columns = ConsumerBatch(
            "t", 0, batch.offsets, batch.timestamps, batch.keys, batch.values, batch.headers, batch.header.next_offset
        )
        return columns.records()

    def rows(self, decoded: Any) -> list[Row]:
        return [(record.offset, record.timestamp_ms, record.key, record.value) for record in decoded]


class Theirs:
    def __init__(self, name: str, builder: Any, reader: Any) -> None:
        self.name = name
        self._builder = builder
        self._reader = reader

    def encode(self, values: list[bytes], keys: list[bytes] | None, timestamps: list[int]) -> bytes | bytearray:
        builder = self._builder(MAGIC, 0, False, -1, -1, -1, CAPACITY)
        append = builder.append
        for index, value in enumerate(values):
            append(index, timestamps[index], None if keys is None else keys[index], value, [])
        built: bytes | bytearray = builder.build()
        return built

    def decode(self, data: bytes | bytearray) -> Any:
        batch = self._reader(bytes(data))
        if not batch.validate_crc():
            raise SystemExit(f"{self.name}: the checksum is wrong")
        return list(batch)

    def rows(self, decoded: Any) -> list[Row]:
        return [(record.offset, record.timestamp, record.key, record.value) for record in decoded]


def codecs() -> Sequence[Ours | Theirs]:
    return (
        Ours(),
        OurRecords(),
        Theirs("aiokafka", aiokafka_records.DefaultRecordBatchBuilder, aiokafka_records.DefaultRecordBatch),
        Theirs("kafka-python", kafka_records.DefaultRecordBatchBuilder, kafka_records.DefaultRecordBatch),
    )


def measure(records: int, value_bytes: int, seconds: float) -> bool:
    """Print the table. Return whether columns reach all TARGETS."""
    source = random.Random(1)
    values = [source.randbytes(value_bytes) for _ in range(records)]
    some_keys = [b"%d" % source.getrandbits(30) for _ in range(records)]
    timestamps = [NOW + index * 10 // records for index in range(records)]  # a batch of ten milliseconds
    is_as_fast = True
    print(f"{records} records of {value_bytes} bytes: ns of CPU per record, and the ratio to minibroker's")
    print(f"{'':12}{'':28}{'encode':>8}{'ratio':>8}{'decode':>8}{'ratio':>8}")
    for what, keys in (("values", None), ("keys, values", some_keys)):
        expected = [(index, timestamps[index], keys and keys[index], values[index]) for index in range(records)]
        calls: list[Callable[[], object]] = []
        for codec in codecs():
            encode = partial(codec.encode, values, keys, timestamps)
            decode = partial(codec.decode, bytes(encode()))
            if codec.rows(decode()) != expected:
                raise SystemExit(f"{codec.name}: the decoded records differ from the encoded ones")
            calls += [encode, decode]
        each = nanoseconds(calls, records, seconds)
        figures = {codec.name: (each[2 * index], each[2 * index + 1]) for index, codec in enumerate(codecs())}
        ours = figures[Ours.name]
        for name, (encoding, decoding) in figures.items():
            ratios = encoding / ours[0], decoding / ours[1]
            is_as_fast &= min(ratios) >= TARGETS.get(name, 0.0)
            print(f"{what:12}  {name:26}{encoding:8.1f}{ratios[0]:7.1f}x{decoding:8.1f}{ratios[1]:7.1f}x")
    return is_as_fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.5, help="total time of each codec")
    options = parser.parse_args()
    if not measure(options.records, options.value_bytes, options.seconds):
        targets = ", ".join(f"{factor:g} x {name}" for name, factor in TARGETS.items())
        raise SystemExit(f"bench_codecs: not as fast as it must be ({targets})")


if __name__ == "__main__":
    main()

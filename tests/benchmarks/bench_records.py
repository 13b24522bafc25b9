"""Encoding and decoding of record batches: nanoseconds per record, columns against records.

Values are distinct and random, so nothing compresses and nothing is cached; the decoded records are compared with the
encoded ones. The baseline of each row is the same batch in magic 2, Kafka's varint records, in pure Python: the cost of
a client that handles records one by one.

Run from the repository's root: `python -m tests.benchmarks.bench_records`.
"""

from __future__ import annotations

import argparse
import random
import timeit
from collections.abc import Callable
from typing import Any

from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS, decode_batch, encode_batch, parse_header
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.transcoding import as_records, decompressed, finished

NOW = 1_700_000_000_000


def nanoseconds_per_record(call: Callable[[], object], records: int, seconds: float) -> float:
    """The best of five runs, because noise only adds time."""
    timer = timeit.Timer(call)
    number = 1
    while timer.timeit(number) < seconds / 5:
        number *= 2
    return min(timer.repeat(repeat=5, number=number)) / number / records * 1e9


def measure(records: int, value_bytes: int, seconds: float) -> None:
    source = random.Random(1)
    values = [source.randbytes(value_bytes) for _ in range(records)]
    keys = [b"%d" % source.getrandbits(30) for _ in range(records)]
    deltas = [index * 10 // records for index in range(records)]  # a batch of ten milliseconds
    rows: dict[str, dict[str, Any]] = {
        "values": {},
        "values, timestamps": {"timestamp_deltas": deltas},
        "values, timestamps, keys": {"timestamp_deltas": deltas, "keys": keys},
    }
    for codec in Compression:
        if codec is not Compression.NONE:
            rows[f"values, {codec.name.lower()}"] = {"compression": codec}

    print(f"{records} records of {value_bytes} bytes, ns per record (ratio: baseline / columns)")
    print(
        f"{'':26}{'encode':>8}{'baseline':>10}{'ratio':>7}{'decode':>10}{'baseline':>10}{'ratio':>7}{'transcode':>14}"
    )
    for name, arguments in rows.items():
        figures: dict[tuple[str, int], float] = {}
        for magic in (MAGIC_COLUMNS, MAGIC_RECORDS):

            def encode(magic: int = magic, arguments: dict[str, Any] = arguments) -> bytearray:
                return encode_batch(values, base_timestamp=NOW, magic=magic, **arguments)

            batch = encode()
            decoded = decode_batch(batch)
            if decoded.values != values or decoded.keys != arguments.get("keys"):
                raise SystemExit(f"{name}: the decoded records differ from the encoded ones")
            figures["encode", magic] = nanoseconds_per_record(encode, records, seconds)
            figures["decode", magic] = nanoseconds_per_record(
                lambda batch=batch: decode_batch(batch),  # type: ignore[misc]
                records,
                seconds,
            )
        line = f"{name:26}"
        for action in ("encode", "decode"):
            columns, baseline = figures[action, MAGIC_COLUMNS], figures[action, MAGIC_RECORDS]
            line += f"{columns:{8 if action == 'encode' else 10}.1f}{baseline:10.1f}{baseline / columns:6.1f}x"
        print(line + f"{nanoseconds_per_record(transcoder(rows[name], values), records, seconds):14.1f}")


def transcoder(arguments: dict[str, Any], values: list[bytes]) -> Callable[[], object]:
    """Transcode columns to Kafka's records as a broker does for Kafka clients, compressed again if they were."""
    batch = encode_batch(values, base_timestamp=NOW, **arguments)
    header = parse_header(batch)
    if decode_batch(finished(as_records(header, decompressed(batch, header), 0))).values != values:
        raise SystemExit("the transcoded records differ from the encoded ones")
    return lambda: finished(as_records(header, decompressed(batch, header), 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.1, help="per run, five runs each")
    options = parser.parse_args()
    measure(options.records, options.value_bytes, options.seconds)


if __name__ == "__main__":
    main()

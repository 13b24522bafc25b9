"""Appends to a log and reads from it, in MB/s, compared with the least possible work.

The baseline of an append is CRC-32C over the batch and one pwrite at the end of a file; that of a read is one pread of
the same number of bytes. Batches are distinct random bytes; after the run all of them are read back and compared.

Run from the repository's root: `python -m tests.benchmarks.bench_log`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable

from crc32c import crc32c

from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.records import encode_batch
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import NOW, open_log, stamped


def megabytes_per_second(call: Callable[[int], None], count: int, size: int) -> float:
    """The best of ten parts, because noise only lowers the rate."""
    best = float("inf")
    part = count // 10
    for number in range(10):
        start = time.perf_counter()
        for index in range(number * part, (number + 1) * part):
            call(index)
        best = min(best, time.perf_counter() - start)
    return part * size / best / 1e6


def measure(directory: str, batch_bytes: int, total_bytes: int, batches_per_set: int) -> None:
    source = random.Random(1)
    set_bytes = batch_bytes * batches_per_set
    count = total_bytes // set_bytes // 10 * 10
    kinds = [
        [bytes(encode_batch([source.randbytes(batch_bytes - 100)], base_timestamp=NOW)) for _ in range(batches_per_set)]
        for _ in range(min(count, 64))
    ]
    record_sets = [b"".join(kind) for kind in kinds]
    size = len(record_sets[0])
    # A flush in the background would be measured with the batch after it.
    config = LogConfig(flush_bytes=2**40, max_message_bytes=2**30)
    opened = open_log(f"{directory}/log-{batch_bytes}-{batches_per_set}", config)
    log: Log = opened.log
    raw = RealDisk().open(f"{directory}/raw-{batch_bytes}-{batches_per_set}", create=True)

    def append_raw(index: int) -> None:
        records = record_sets[index % len(record_sets)]
        crc32c(records)
        raw.pwrite([records], index * size)

    def append(index: int) -> None:
        log.append_as_leader(record_sets[index % len(record_sets)], 0, NOW)

    def read_raw(index: int) -> None:
        raw.pread(size, index * size)

    def read(index: int) -> None:
        offset = index * batches_per_set
        if len(log.read(offset, size, log.log_end_offset)) != size:
            raise SystemExit(f"there are not {size} bytes at offset {offset}")

    starts = list(range(count))
    source.shuffle(starts)
    print(f"sets of {batches_per_set} x {batch_bytes} bytes")
    for name, baseline, call in (
        ("append", append_raw, append),
        ("read in order", read_raw, read),
        ("read anywhere", read_raw, lambda index: read(starts[index])),
    ):
        least = megabytes_per_second(baseline, count, size)
        reached = megabytes_per_second(call, count, size)
        microseconds = size / reached - size / least
        print(
            f"  {name:<14}{reached:8.0f} MB/s, baseline {least:6.0f} MB/s, ratio {reached / least:.2f}, "
            f"{microseconds:5.1f} us more"
        )
    for index in range(count):
        kind = kinds[index % len(kinds)]
        offset = index * batches_per_set
        expected = b"".join(stamped(batch, offset + number, 0) for number, batch in enumerate(kind))
        if log.read(offset, size, log.log_end_offset) != expected:
            raise SystemExit(f"set {index} differs from the appended one")
    raw.close()
    asyncio.run(log.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128, help="appended for each row (default: %(default)s)")
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for batch_bytes, batches_per_set in ((65_536, 1), (16_384, 1), (16_384, 8), (1_024, 1), (1_024, 64)):
            measure(directory, batch_bytes, arguments.megabytes * 1_000_000, batches_per_set)


if __name__ == "__main__":
    main()

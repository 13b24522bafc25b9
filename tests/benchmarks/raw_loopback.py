"""The machine's limit: the bytes of records over loopback, with checksums and writes, without a broker.

    python -m tests.benchmarks.raw_loopback [--megabytes 256]

Produce: one process computes the CRC-32C of a frame and sends it; another receives it, computes the CRC again, appends
the frame to a file, and acknowledges. Five frames of a producer's default batch size are in flight. Consume: one
process reads such frames from the file and sends them, the other receives them and computes their CRC. These are the
baselines of the matrix.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

FRAME_BYTES = 256 * 1024
IN_FLIGHT = 5
DISTINCT_FRAMES = 64


class Raw(NamedTuple):
    produce: float
    """MB/s."""
    consume: float


def receive(connection: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        received += count


def serve(pipe: multiprocessing.connection.Connection, path: Path, frames: int) -> None:
    """Append `frames` frames to the file, then send them all back."""
    buffer = memoryview(bytearray(FRAME_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server, path.open("w+b", buffering=0) as file:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(frames):
                receive(connection, buffer)
                crc32c(buffer)
                file.write(buffer)
                connection.sendall(b".")
            connection.recv(1)
            for number in range(frames):
                connection.sendall(os.pread(file.fileno(), FRAME_BYTES, number * FRAME_BYTES))


def measure_once(directory: Path, frames: int) -> Raw:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = directory / "raw"
    process = context.Process(target=serve, args=(theirs, path, frames), daemon=True)
    process.start()
    try:
        sources = [os.urandom(FRAME_BYTES) for _ in range(DISTINCT_FRAMES)]
        with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            acknowledged = memoryview(bytearray(1))
            began = time.perf_counter()
            for number in range(frames + IN_FLIGHT):
                if number >= IN_FLIGHT:
                    receive(connection, acknowledged)
                if number < frames:
                    frame = sources[number % DISTINCT_FRAMES]
                    crc32c(frame)
                    connection.sendall(frame)
            produced_s = time.perf_counter() - began
            buffer = memoryview(bytearray(FRAME_BYTES))
            began = time.perf_counter()
            connection.sendall(b".")
            for number in range(frames):
                receive(connection, buffer)
                if crc32c(buffer) != crc32c(sources[number % DISTINCT_FRAMES]):
                    raise SystemExit(f"frame {number} differs from the sent one")
            consumed_s = time.perf_counter() - began
    finally:
        process.terminate()
        process.join()
        path.unlink(missing_ok=True)
    megabytes = frames * FRAME_BYTES / 1e6
    return Raw(megabytes / produced_s, megabytes / consumed_s)


def measure(directory: Path, megabytes: int, repeats: int = 3) -> Raw:
    """The best of the repeats, because noise only lowers the rates."""
    results = [measure_once(directory, max(IN_FLIGHT, megabytes * 1_000_000 // FRAME_BYTES)) for _ in range(repeats)]
    return Raw(max(r.produce for r in results), max(r.consume for r in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    with tempfile.TemporaryDirectory(prefix="minibroker-raw-") as directory:
        raw = measure(Path(directory), parser.parse_args().megabytes)
    print(f"produce {raw.produce:,.0f} MB/s, consume {raw.consume:,.0f} MB/s")


if __name__ == "__main__":
    main()

"""Send malformed frames of Kafka's protocol in bulk: to the decoders in process, and to a live broker.

    python -m tests.faults.hostile.kafka [--frames 200000] [--seed 1] [--live FRAMES]

A request is drawn from the layouts that declare the APIs, in any version, with names and records that a broker may
know, then damaged: in its bytes, its lengths, its header. Each frame is first decoded in process, where the decoder may
raise BadInput only and must use memory in proportion to the frame's bytes. Then the frame goes to a broker process,
which must answer it, wait for the rest of it, or close the connection if the decoder has refused the frame. Frame N of
a seed is always the same. Exit code 1 unless every check passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import struct
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import uvloop

from minibroker.broker.network.dialect import BadInput, Undecoded
from minibroker.broker.network.kafka_dialect import KafkaDialect, KafkaListener
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.simulator.kafka_connection import read_response, request_frame
from minibroker.protocol.apis import API_VERSIONS, Plane
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.kafka.apis import KAFKA_APIS, RequestHeader
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import FetchPartition, FetchRequest, ProduceRequest
from tests.faults.hostile.frames import (
    CONNECTIONS,
    PATIENCE_S,
    Check,
    attack_live,
    error_codes,
    read_answer,
    report,
    reset,
    table,
)
from tests.faults.hostile.grammar import MAX_REQUEST_BYTES, OPEN_TOPIC, hostile_records
from tests.kafka_messages import random_struct

TEXTS = ("", OPEN_TOPIC, OPEN_TOPIC, "nobody-has-it", "a/b", "..", "line\nbreak", "x" * 250, "\U0001f600" * 60)
NASTY = (
    b"\xff\xff\xff\xff\x0f",  # the largest varint
    b"\xff\xff\xff\xff\xff\xff",  # a varint that does not end
    b"\x80\x80\x80\x80\x80",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff\xff",
    b"\xa4\xff\xfe",
    bytes(64),
)
OVERHEAD_BYTES = 20_000
"""Memory that an exception and its text may use, for a frame of any size."""
BYTES_PER_BYTE = 150
"""Memory allowed for each byte of a frame: an empty string of one byte becomes several objects."""
QUIET_S = 0.05
REQUESTS_PER_CONNECTION = 10


class Frame(NamedTuple):
    kind: str
    data: bytes
    """The bytes on the wire, including the announced length."""


class Verdict(NamedTuple):
    frame: Frame
    asked: tuple[RequestHeader, Any] | None
    """None: refused."""


def hostile_frame(seed: int, number: int) -> Frame:
    random = Random(f"{seed}/kafka/{number}")
    api: KafkaApi = random.choice(list(KAFKA_APIS.values()))
    version = random.randint(api.advertised_from, api.max_version)
    wire = random_struct(random, api.request, version, TEXTS)
    if isinstance(wire, ProduceRequest):
        if random.random() < 0.8:
            wire.transactional_id, wire.acks = None, random.choice((-1, 0, 1))
        for topic in wire.topic_data:
            for part in topic.partition_data:
                part.index, part.records = random.choice((0, 1, 7)), memoryview(hostile_records(random)[1])
    elif isinstance(wire, FetchRequest) and random.random() < 0.8:
        wire.replica_id, wire.max_wait_ms, wire.max_bytes = -1, 10, random.choice((0, 1, 10_000, 2**31 - 1))
        for asked in wire.topics:
            asked.partitions = [FetchPartition(random.choice((0, 1, 7)), -1, random.choice((-1, 0, 5)), -1, -1, 1_000)]
    frame = request_frame(api, version, random.choice((0, 1, 2**31 - 1)), wire)
    kind, damage = random.choice(DAMAGES)
    damage(random, frame)
    return Frame(kind, bytes(frame))


def _with_right_length(frame: bytearray) -> None:
    struct.pack_into(">i", frame, 0, len(frame) - 4)


def _flip(random: Random, frame: bytearray) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        frame[random.randrange(5, len(frame))] = random.randrange(256)


def _put(random: Random, frame: bytearray) -> None:
    position = random.randrange(12, len(frame) + 1)
    nasty = random.choice(NASTY)
    frame[position : position + random.choice((0, len(nasty)))] = nasty
    _with_right_length(frame)


def _cut(random: Random, frame: bytearray) -> None:
    del frame[random.randrange(5, len(frame)) :]
    _with_right_length(frame)


def _lengthen(random: Random, frame: bytearray) -> None:
    frame += random.randbytes(random.choice((1, 30, 3_000)))
    _with_right_length(frame)


def _lie(random: Random, frame: bytearray) -> None:
    struct.pack_into(">i", frame, 0, random.choice((2**31 - 1, -1, -(2**31), 0, 1, 9, 2 * len(frame), 2**20 + 1)))


def _mislead(random: Random, frame: bytearray) -> None:
    struct.pack_into(">hh", frame, 4, random.choice((0, 1, 3, 18, 22, 75, 255)), random.choice((-1, 0, 3, 9, 12, 99)))


def _scramble(random: Random, frame: bytearray) -> None:
    frame[14:] = random.randbytes(random.choice((0, 3, 30, 300)))
    _with_right_length(frame)


def _claim(random: Random, frame: bytearray) -> None:
    """As many elements as fit, each of the smallest size."""
    elements = random.choice((100, 10_000, 100_000, 250_000, 300_000))
    claim = random.choice(
        (elements.to_bytes(4, "big"), bytes([elements & 0x7F | 0x80, elements >> 7 & 0x7F | 0x80, elements >> 14]))
    )
    frame[random.randrange(12, len(frame)) :] = claim + bytes([random.choice((0, 0, 1))]) * random.choice(
        (elements, 2 * elements)
    )
    _with_right_length(frame)


DAMAGES = (
    ("well-formed", lambda random, frame: None),
    ("bytes changed", _flip),
    ("a nasty length put in", _put),
    ("cut off", _cut),
    ("too long", _lengthen),
    ("a length that lies", _lie),
    ("another API or version", _mislead),
    ("random bytes", _scramble),
    ("many elements", _claim),
)


class InProcess:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.escaped: list[str] = []
        self._listener = KafkaListener(MAX_REQUEST_BYTES)

    def read(self, name: str, frame: Frame) -> Verdict:
        """Decode the frame like a connection that receives only this frame."""
        self.kinds[frame.kind] += 1
        dialect = KafkaDialect(self._listener)
        try:
            for each in cut(dialect, frame):
                _, header, body = dialect.decode(each)
                return Verdict(frame, (header, body.decode() if isinstance(body, Undecoded) else body))
        except BadInput:
            self.refused[frame.kind] += 1
        except Exception as error:  # noqa: BLE001 - any other exception is the bug that this looks for
            self.escaped.append(f"frame {name} ({frame.kind}): {error!r}"[:300])
        return Verdict(frame, None)


def cut(dialect: KafkaDialect, frame: Frame) -> Sequence[Any]:
    """Split the bytes into frames as a connection does. Raises BadInput."""
    sent = memoryview(frame.data)
    frames: Sequence[Any] = ()
    while sent and not frames:
        buffer = dialect.get_buffer()
        count = min(len(buffer), len(sent))
        buffer[:count] = sent[:count]
        sent = sent[count:]
        frames = dialect.received(count)
    return frames


def greediest(seed: int, count: int) -> tuple[float, int]:
    """Find the one of the first `count` frames whose decoding uses the most memory for each of its bytes. Return that
    ratio and the frame's number."""
    dialect, worst = KafkaDialect(KafkaListener(MAX_REQUEST_BYTES)), (0.0, -1)
    for number in range(count):
        frame = hostile_frame(seed, number)
        tracemalloc.start()
        with contextlib.suppress(BadInput):
            body = dialect.decode(frame.data[4:])[2]
            if isinstance(body, Undecoded):
                body.decode()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        worst = max(worst, ((peak - OVERHEAD_BYTES) / len(frame.data), number))
    return worst


class KafkaAttack:
    """Sends frames to a broker, and records every answer that no broker should give."""

    def __init__(self, port: int, verdicts: Iterator[tuple[str, Verdict]]) -> None:
        self._port = port
        self._verdicts = verdicts
        self.connections = 0
        self.frames = 0
        self.answers: Counter[str] = Counter()
        self.unwanted: list[str] = []

    async def play_all(self, until_frames: int) -> None:
        async def worker(number: int) -> None:
            while self.frames < until_frames:
                await self._connection(f"127.0.0.{number + 2}", until_frames)

        await asyncio.gather(*(worker(number) for number in range(CONNECTIONS)))

    async def _connection(self, source_address: str, until_frames: int) -> None:
        """Send frames on one connection until it is closed."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self._port, local_addr=(source_address, 0))
        self.connections += 1
        try:
            for _ in range(REQUESTS_PER_CONNECTION):
                if self.frames >= until_frames or not await self._play(*next(self._verdicts), reader, writer):
                    return
        finally:
            reset(writer)

    async def _play(
        self, name: str, verdict: Verdict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Send one frame; return whether the connection can be used for another."""
        self.frames += 1
        where = f"frame {name} ({verdict.frame.kind})"
        is_whole = len(verdict.frame.data) == 4 + struct.unpack_from(">i", verdict.frame.data)[0]
        patience_s = PATIENCE_S if verdict.asked is None and is_whole else QUIET_S
        try:
            writer.write(verdict.frame.data)
            async with asyncio.timeout(patience_s):
                answer = await read_answer(reader)
        except TimeoutError:
            if patience_s == PATIENCE_S:
                self.unwanted.append(f"neither answered nor closed: {where}")
            return False
        except (asyncio.IncompleteReadError, ConnectionError):
            may_close = verdict.asked is None or (
                isinstance(verdict.asked[1], ProduceRequest) and verdict.asked[1].acks == 0
            )
            if not may_close:
                self.unwanted.append(f"closed by the broker: {where}")
            return False
        if verdict.asked is None:
            return False  # an old version of Produce, which the broker refuses with an answer
        self._judge(verdict.asked[0], answer, where)
        return True

    def _judge(self, header: RequestHeader, answer: bytes, where: str) -> None:
        api = KAFKA_APIS[header.api_key]
        versions = (header.api_version, 0) if header.api_key == API_VERSIONS.key else (header.api_version,)
        for version in versions:
            with contextlib.suppress(InvalidMessage):
                correlation_id, body = read_response(api, version, answer)
                break
        else:
            self.unwanted.append(f"an answer that cannot be read: {where}")
            return
        if correlation_id != header.correlation_id:
            self.unwanted.append(f"an answer to {correlation_id}: {where}")
        for code in error_codes(body):
            self.answers[f"{ErrorCode(code).name} ({api.name})"] += 1
            if code == ErrorCode.UNKNOWN_SERVER_ERROR:
                self.unwanted.append(f"UNKNOWN_SERVER_ERROR: {where}")


def run(frames: int, live_frames: int, seed: int, directory: Path) -> list[Check]:
    """Print the outcomes by kind; return the checks."""
    in_process = InProcess()
    print(f"seed {seed}, {frames} frames, {live_frames} of them live", flush=True)

    def verdicts() -> Iterator[tuple[str, Verdict]]:
        for number in range(frames):
            yield str(number), in_process.read(str(number), hostile_frame(seed, number))

    source = verdicts()
    checks, attack, summary = uvloop.run(
        attack_live(directory, lambda ports: KafkaAttack(ports[Plane.DATA], source), live_frames)
    )
    for _ in source:
        pass
    ratio, number = greediest(seed, frames // 20)
    print("\n".join(summary))
    table("frames by kind", in_process.kinds)
    table("refused", in_process.refused)
    table("answers of the broker", attack.answers)
    escaped = "".join(f"\n      {line}" for line in in_process.escaped[:10])
    return [
        *checks,
        Check("the dialect raises BadInput only", not in_process.escaped, f"{frames} frames{escaped}"),
        Check(
            "a frame uses no more memory than its size allows",
            ratio <= BYTES_PER_BYTE,
            f"at most {ratio:.0f} bytes for each, in frame {number}, of {frames // 20} (limit {BYTES_PER_BYTE})",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--live", type=int, help="how many of the frames go to a broker (default: a tenth)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, metavar="N", help="print frame N of the seed and what must come of it")
    arguments = parser.parse_args()
    let_signals_interrupt()
    if arguments.show is not None:
        frame = hostile_frame(arguments.seed, arguments.show)
        print(frame.kind, frame.data[:2_000], InProcess().read("", frame).asked, sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="minibroker-hostile-") as temporary:
        live = arguments.frames // 10 if arguments.live is None else arguments.live
        checks = run(arguments.frames, live, arguments.seed, Path(temporary))
    sys.exit(report("hostile kafka", checks))


if __name__ == "__main__":
    main()

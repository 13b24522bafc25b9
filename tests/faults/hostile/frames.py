"""Send hundreds of thousands of malformed frames: to the decoders in process, and to a live broker.

    python -m tests.faults.hostile.frames [--frames 200000] [--seed 1] [--live FRAMES] [--keep DIR]

Each frame is first read in process, where the decoders may raise InvalidMessage and CorruptRecord only; this also
decides what the broker must do with it. Then the frame goes to a broker process over real sockets, pipelined with
others up to the first one that ends the connection. A producer and a consumer of another topic work throughout. Frame N
of a seed is always the same; `--show N` prints it. Exit code 1 unless every check passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

import hypothesis
import msgspec
import uvloop
from hypothesis import strategies as st

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api, Plane
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, TopicPartition
from tests.faults.hostile.grammar import (
    OPEN_TOPIC,
    WATCHED_TOPIC,
    Ending,
    Hostile,
    Reading,
    decode_records,
    hostile_frame,
    hostile_records,
    read,
)

LEGITIMATE_TOPIC = "legitimate"
WATCHED_RECORDS = 2_000
HYPOTHESIS_SHARE = 0.02
RECORDS_SHARE = 0.1
CONNECTIONS = 12
REQUESTS_PER_CONNECTION = 20
PATIENCE_S = 30.0
MAX_GROWTH_BYTES = 64 * 1024 * 1024
SENTINEL = 2**31 - 1
ANSWERED_LATER = (
    apis.CREATE_TOPICS,
    apis.DELETE_TOPICS,
    apis.CREATE_PARTITIONS,
    apis.DELETE_RECORDS,
    apis.INIT_PRODUCER_ID,
    apis.ALTER_PARTITION_REASSIGNMENTS,
    apis.LIST_PARTITION_REASSIGNMENTS,
)
"""APIs whose answer comes from a task or waits for other brokers, so that a later request may be answered first."""
LATE_ANSWERS_S = 0.2
BAD_LOG_LINES = (
    "Traceback",
    "failed in its handler",
    "never retrieved",
    "Exception in callback",
    " ERROR ",
    "CRITICAL",
)


class Check(NamedTuple):
    name: str
    passed: bool
    detail: str


# --- Frames ------------------------------------------------------------------------------------------------------


def hypothesis_frames(seed: int, count: int) -> list[Hostile]:
    """Frames drawn by hypothesis: any MessagePack in any envelope, and any bytes."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=20,
    )
    envelopes = st.tuples(
        st.sampled_from(list(apis.APIS)) | st.integers(-(2**15), 2**15 - 1),
        st.just(0) | st.integers(-(2**15), 2**15 - 1),
        st.integers(0, SENTINEL - 1),
        st.none() | st.text(max_size=260),
        values,
    )
    payloads = st.one_of(
        envelopes.map(lambda e: msgspec.msgpack.encode(e)), values.map(msgspec.msgpack.encode), st.binary(max_size=200)
    )
    frames: list[Hostile] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(list(Plane)), payloads)
    def collect(plane: Plane, payload: bytes) -> None:
        frames.append(Hostile("hypothesis", plane, struct.pack(">i", len(payload)) + payload))

    if count:
        collect()
    return frames


def all_frames(seed: int, count: int, drawn: Sequence[Hostile]) -> Iterator[tuple[str, Hostile]]:
    """Yield `count` pairs (name, frame), including those drawn by hypothesis."""
    for number in range(count - len(drawn)):
        yield str(number), hostile_frame(seed, number)
        if number < len(drawn):
            yield f"hypothesis {number}", drawn[number]
    for number in range(count - len(drawn), len(drawn)):
        yield f"hypothesis {number}", drawn[number]


class InProcess:
    """Reads every frame as a listener does, and counts the outcomes."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.escaped: list[str] = []

    def read(self, name: str, frame: Hostile) -> Reading | None:
        self.kinds[frame.kind] += 1
        try:
            reading = read(frame)
        except Exception as error:  # noqa: BLE001 - any other exception is the bug that this looks for
            self.escaped.append(f"frame {name} ({frame.kind}): {error!r}"[:300])
            return None
        self.endings[reading.ending.name.lower()] += 1
        return reading

    def decode(self, seed: int, number: int) -> None:
        kind, records = hostile_records(Random(f"{seed}/records/{number}"))
        try:
            whole = decode_records(records)
        except Exception as error:  # noqa: BLE001
            self.escaped.append(f"records {number} ({kind}): {error!r}"[:300])
            return
        self.records[f"{kind}, {'decoded' if whole else 'refused'}"] += 1


# --- Live --------------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """The bytes that one connection sends, and the answers it must get."""

    plane: Plane
    names: list[str]
    data: bytes
    requests: list[tuple[int, Api[Any, Any], Any]]
    is_closed: bool
    """Whether the broker must close the connection at the end."""


def _sentinel() -> bytes:
    return bytes(apis.encode_request(apis.API_VERSIONS, SENTINEL, "hostile", m.ApiVersionsRequest()))


def scripts(readings: Iterator[tuple[str, Hostile, Reading]]) -> Iterator[Script]:
    """Join the frames of each plane up to the first that ends the connection. Every second time that requests with late
    answers come before it, send them without it, so that they are answered."""
    pending: dict[Plane, list[tuple[str, Hostile, Reading]]] = {plane: [] for plane in Plane}
    patient = False
    for name, frame, reading in readings:
        queue = pending[frame.plane]
        late = any(api in ANSWERED_LATER for _, _, earlier in queue for _, api, _ in earlier.requests)
        if late and reading.ending is not Ending.ANSWERED:
            patient = not patient
            if patient:
                yield _script(frame.plane, queue)
                queue.clear()
        queue.append((name, frame, reading))
        if reading.ending is not Ending.ANSWERED or len(queue) >= REQUESTS_PER_CONNECTION:
            yield _script(frame.plane, queue)
            queue.clear()
    for plane, queue in pending.items():
        if queue:
            yield _script(plane, queue)


def _script(plane: Plane, queue: Sequence[tuple[str, Hostile, Reading]]) -> Script:
    pieces = [frame.data for _, frame, _ in queue]
    ending = queue[-1][2].ending
    if ending is Ending.WAITING:
        pieces.insert(-1, _sentinel())
    elif ending is Ending.ANSWERED:
        pieces.append(_sentinel())
    requests = [request for _, _, reading in queue for request in reading.requests]
    names = [f"{name} ({frame.kind})" for name, frame, _ in queue]
    return Script(plane, names, b"".join(pieces), requests, ending is Ending.REFUSED)


class Attack:
    """Sends scripts to a broker, and records every answer that no broker should give."""

    def __init__(self, ports: dict[Plane, int], source: Iterator[Script]) -> None:
        self._ports = ports
        self._source = source
        self.connections = 0
        self.frames = 0
        self.answers: Counter[str] = Counter()
        self.unwanted: list[str] = []

    async def play_all(self, until_frames: int) -> None:
        """Play scripts until `until_frames` frames were sent since the beginning. Begun scripts are finished."""

        async def worker(number: int) -> None:
            while self.frames < until_frames:
                script = next(self._source, None)
                if script is None:
                    return
                self.frames += len(script.names)
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await self._play(script, f"127.0.0.{number + 2}")
                except TimeoutError:
                    self.unwanted.append(f"no end within {PATIENCE_S:g} s: frames {', '.join(script.names)}")
                except OSError as error:
                    self.unwanted.append(f"cannot connect: {error}")
                    return

        await asyncio.gather(*(worker(number) for number in range(CONNECTIONS)))

    async def _play(self, script: Script, source_address: str) -> None:
        reader, writer = await asyncio.open_connection(
            LOOPBACK, self._ports[script.plane], local_addr=(source_address, 0), limit=2**20
        )
        self.connections += 1
        late = any(api in ANSWERED_LATER for _, api, _ in script.requests)
        try:
            writer.write(script.data)
            while not self._judge(script, await read_answer(reader)):
                pass
            if late:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LATE_ANSWERS_S):
                        while True:
                            self._judge(script, await read_answer(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            # A broker reports a failed Produce with acks=0 by closing the connection.
            may_close = script.is_closed or any(
                isinstance(body, m.ProduceRequest) and body.acks == 0 for _, _, body in script.requests
            )
            if not may_close:
                self.unwanted.append(f"closed by the broker: frames {', '.join(script.names)}")
        finally:
            reset(writer)

    def _judge(self, script: Script, frame: bytes) -> bool:
        """Count an answer; return True for the answer to the sentinel."""
        where = f"{script.plane.value} plane, frames {', '.join(script.names)}"
        try:
            envelope = apis.decode_response_envelope(frame)
        except InvalidMessage as error:
            self.unwanted.append(f"unreadable answer: {error}: {where}")
            return False
        if envelope.error_code:
            self._count(envelope.error_code, "whole request", envelope.error_message, where)
            return False
        asked = [api for correlation_id, api, _ in script.requests if correlation_id == envelope.correlation_id]
        if not script.is_closed and envelope.correlation_id == SENTINEL:
            asked.append(apis.API_VERSIONS)
        if not asked:
            self.unwanted.append(f"an answer to {envelope.correlation_id}, which was not sent: {where}")
            return False
        problem = ""
        for api in asked:
            try:
                body = apis.decode_response(api, envelope)
            except (InvalidMessage, BrokerError) as error:
                problem = str(error)
                continue
            for code in error_codes(body):
                self._count(code, api.name, "", where)
            return not script.is_closed and envelope.correlation_id == SENTINEL
        self.unwanted.append(f"unreadable answer: {problem}: {where}")
        return False

    def _count(self, code: int, what: str, message: str, where: str) -> None:
        self.answers[f"{ErrorCode(code).name} ({what})"] += 1
        if code == ErrorCode.UNKNOWN_SERVER_ERROR:
            self.unwanted.append(f"UNKNOWN_SERVER_ERROR {message}: {where}")


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset: tens of thousands of connections in TIME_WAIT would use up the ports."""
    with contextlib.suppress(OSError, AttributeError):  # a closed connection has no socket
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(length)


def error_codes(value: Any) -> Iterator[int]:
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            inner = getattr(value, field)
            if field == "error_code":
                yield inner
            else:
                yield from error_codes(inner)
    elif isinstance(value, list):
        for inner in value:
            if not isinstance(inner, msgspec.Struct):
                return
            yield from error_codes(inner)


class LegitimateTraffic:
    """A producer and a consumer of their own topic."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._ending = asyncio.Event()
        self.acknowledged: list[bytes] = []
        self.consumed: list[bytes] = []
        self.slowest_s = 0.0

    async def run(self) -> None:
        """Produce and consume until `end`, then until all acknowledged records have been read."""
        async with (
            Producer(self._bootstrap) as producer,
            Consumer(self._bootstrap, topics=[LEGITIMATE_TOPIC]) as consumer,
        ):
            reading = asyncio.create_task(self._consume(consumer))
            number = 0
            while not self._ending.is_set():
                value = b"%d" % number
                began_s = time.monotonic()
                await producer.send(LEGITIMATE_TOPIC, value)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                self.acknowledged.append(value)
                number += 1
                await asyncio.sleep(0.01)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while len(self.consumed) < len(self.acknowledged) and not reading.done():
                        await asyncio.sleep(0.01)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def end(self) -> None:
        self._ending.set()

    async def _consume(self, consumer: Consumer) -> None:
        async for record in consumer:
            assert record.value is not None
            self.consumed.append(record.value)


async def _fill_watched(bootstrap: str) -> None:
    async with Producer(bootstrap) as producer:
        for number in range(WATCHED_RECORDS):
            producer.send(WATCHED_TOPIC, hashlib.sha256(b"%d" % number).digest(), key=b"%d" % number, partition=0)
        await producer.flush()


async def _digest(bootstrap: str) -> str:
    """A digest of all records of the watched topic, and their number."""
    digest = hashlib.sha256()
    count = 0
    async with Consumer(bootstrap, partitions=[TopicPartition(WATCHED_TOPIC, 0)]) as consumer:
        ends = await consumer.end_offsets([TopicPartition(WATCHED_TOPIC, 0)])
        async for record in consumer:
            digest.update(repr((record.offset, record.key, record.value)).encode())
            count += 1
            if record.offset == ends[TopicPartition(WATCHED_TOPIC, 0)] - 1:
                break
    return f"{count} records, {digest.hexdigest()[:16]}"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bad_lines(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if any(bad in line for bad in BAD_LOG_LINES)]


def start_broker(cluster: LocalCluster, settings: dict[str, str]) -> dict[Plane, int]:
    """Start one broker with listeners on known ports. Blocking."""
    data_port, control_port = free_ports(2)
    listeners = f"{DEFAULT_LISTENER}://{LOOPBACK}:{data_port},{CONTROL_LISTENER}://{LOOPBACK}:{control_port}"
    cluster.up(
        1,
        data_port,
        settings={"listeners": listeners, "control.plane.listener.name": CONTROL_LISTENER, **settings},
    )
    return {Plane.DATA: data_port, Plane.CONTROL: control_port}


class Attacker(Protocol):
    connections: int
    frames: int
    answers: Counter[str]
    unwanted: list[str]

    async def play_all(self, until_frames: int) -> None:
        """Send frames until `until_frames` were sent since the beginning. Begun work is finished."""
        ...


AttackerT = TypeVar("AttackerT", bound=Attacker)


async def attack_live(
    directory: Path, attack_on: Callable[[dict[Plane, int]], AttackerT], count: int
) -> tuple[list[Check], AttackerT, list[str]]:
    """Start a broker, attack it, judge it. The first tenth of the frames warms up its memory."""
    cluster = LocalCluster(directory)
    # Each bad frame costs its sender the connection, so the attack reconnects faster than the default rate allows.
    rate = {"max.connection.creation.rate": "1000000", "default.replication.factor": "1"}
    ports = await asyncio.to_thread(start_broker, cluster, rate)
    try:
        bootstrap = cluster.bootstrap()
        process = cluster.file().broker(1).process
        assert process is not None
        async with Admin(bootstrap) as admin:
            for topic in (WATCHED_TOPIC, OPEN_TOPIC, LEGITIMATE_TOPIC):
                await admin.create_topic(topic, partitions=2 if topic == OPEN_TOPIC else 1, replication_factor=1)
        await _fill_watched(bootstrap)
        before = await _digest(bootstrap)
        traffic = LegitimateTraffic(bootstrap)
        running = asyncio.create_task(traffic.run())
        attack = attack_on(ports)
        began_s = time.monotonic()
        await attack.play_all(count // 10)
        warm = resident_bytes(process.pid)
        during = len(traffic.acknowledged)
        await attack.play_all(count)
        took_s = time.monotonic() - began_s
        during = len(traffic.acknowledged) - during
        await asyncio.sleep(1)  # time to free memory
        cold = resident_bytes(process.pid)
        after_attack = len(traffic.acknowledged)
        while len(traffic.acknowledged) < after_attack + 50 and not running.done():
            await asyncio.sleep(0.01)
        traffic.end()
        await running
        after = await _digest(bootstrap)
        lines = bad_lines(cluster.log_of(1))
        alive = cluster.state_of(1).name == "RUNNING"
        checks = [
            Check("the broker lives", alive, f"process {process.pid}"),
            Check(
                "no unhandled exception in its log",
                not lines,
                f"{len(lines)} lines" + "".join(f"\n      {line}" for line in lines[:10]),
            ),
            Check(
                "every answer is one that a broker should give",
                not attack.unwanted,
                f"{len(attack.unwanted)} were not" + "".join(f"\n      {line[:600]}" for line in attack.unwanted[:10]),
            ),
            Check(
                "memory stays",
                cold - warm <= MAX_GROWTH_BYTES,
                f"{warm / 2**20:.1f} MiB after the warm-up, {cold / 2**20:.1f} MiB at the end: "
                f"{(cold - warm) / 2**20:+.1f} MiB (limit +{MAX_GROWTH_BYTES / 2**20:.0f})",
            ),
            Check(
                "a legitimate producer and consumer were served",
                during > 0 and traffic.consumed == traffic.acknowledged,
                f"{len(traffic.acknowledged)} acknowledged, {len(traffic.consumed)} consumed, "
                f"{during} of them during the attack; the slowest took {traffic.slowest_s * 1_000:.0f} ms",
            ),
            Check("existing data is unchanged", before == after, after if before == after else f"{before} -> {after}"),
        ]
        summary = [
            f"live: {attack.frames} frames on {attack.connections} connections in {took_s:.0f} s "
            f"({attack.frames / took_s:.0f} frames/s)"
        ]
        return checks, attack, summary
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


# --- All together --------------------------------------------------------------------------------------------------


def run(frames: int, live_frames: int, seed: int, directory: Path) -> list[Check]:
    """Print the outcomes by kind; return the checks."""
    in_process = InProcess()
    too_obedient = 0
    print(f"seed {seed}, {frames} frames, {live_frames} of them live", flush=True)
    drawn = hypothesis_frames(seed, int(frames * HYPOTHESIS_SHARE))

    def readings() -> Iterator[tuple[str, Hostile, Reading]]:
        nonlocal too_obedient
        for name, frame in all_frames(seed, frames, drawn):
            reading = in_process.read(name, frame)
            if reading is None:
                continue
            if reading.is_safe:
                yield name, frame, reading
            else:
                too_obedient += 1

    source = readings()
    checks, attack, summary = uvloop.run(
        attack_live(directory, lambda ports: Attack(ports, scripts(source)), live_frames)
    )
    for _ in source:
        pass
    batches = int(frames * RECORDS_SHARE)
    for number in range(batches):
        in_process.decode(seed, number)

    print("\n".join(summary))
    table("frames by kind", in_process.kinds)
    table("required outcomes", in_process.endings)
    print(f"well-formed requests that would change the watched topic, read in process only: {too_obedient}")
    table("answers of the broker", attack.answers)
    table(f"record batches decoded in process ({batches})", in_process.records)
    checks.append(
        Check(
            "decoders raise InvalidMessage or CorruptRecord only",
            not in_process.escaped,
            f"{frames} frames and {batches} batches" + "".join(f"\n      {line}" for line in in_process.escaped[:10]),
        )
    )
    return checks


def table(title: str, counts: Counter[str]) -> None:
    print(f"{title}:")
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:>8}  {name}")


def report(name: str, checks: Sequence[Check]) -> int:
    """Print each check and the total; return the exit code."""
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}")
    failed = sum(not check.passed for check in checks)
    print(f"{name}: {len(checks) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--live", type=int, help="how many of the frames go to a broker (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    parser.add_argument("--show", type=int, metavar="N", help="print frame N of the seed and what must come of it")
    arguments = parser.parse_args()
    if arguments.show is not None:
        frame = hostile_frame(arguments.seed, arguments.show)
        print(frame.kind, frame.plane, frame.data[:2_000], read(frame), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="minibroker-hostile-") as temporary:
        live = arguments.frames if arguments.live is None else arguments.live
        checks = run(arguments.frames, live, arguments.seed, arguments.keep or Path(temporary))
    sys.exit(report("hostile frames", checks))


if __name__ == "__main__":
    main()

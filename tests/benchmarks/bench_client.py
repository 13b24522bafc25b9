"""The client: the cost of a `send`, and the records per second that it produces and consumes.

    python tests/benchmarks/bench_client.py [--records 500000] [--value-bytes 100]

The other side is a scripted broker in its own process, which counts the produced records and drops them, so this
measures the client and not a broker. Values are distinct and random; a pass that is not timed compares the consumed
values with the log. All figures but the round trip are CPU time of this process, which other load changes little.

Each figure stands beside a baseline of the same run: for `send`, a future and a tuple per record, which a client
without batches of columns would have to create; for produce and consume, only encoding and decoding the same batches;
for the round trip, a bare request on the same connection class; for the blocking clients, the asynchronous ones.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import multiprocessing.connection
import sys
import time
import zlib
from itertools import islice
from pathlib import Path
from random import Random
from threading import Thread

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvloop

from minibroker import sync
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import decode_batch, encode_batch
from minibroker.protocol.world.real import RealNetwork
from tests.unit.client.scripted_broker import ScriptedCluster

PARTITIONS = 6
BATCH_RECORDS = 2_000
POOL = 20_000
KEPT = TopicPartition("kept", 0)
CRUMBS = 20_000
"""Batches of one record each."""


def pool(value_bytes: int) -> list[bytes]:
    random = Random(1)
    return [random.randbytes(value_bytes) for _ in range(POOL)]


def serve(pipe: multiprocessing.connection.Connection, records: int, value_bytes: int) -> None:
    """Run the scripted broker, with a topic that drops its records and one that holds `records` records."""

    async def main() -> None:
        async with ScriptedCluster(1) as cluster:
            cluster.add_topic("null", PARTITIONS, keeps=False)
            log = cluster.add_topic("kept").logs[0]
            values = pool(value_bytes)
            for start in range(0, records, BATCH_RECORDS):
                chunk = [values[index % POOL] for index in range(start, min(start + BATCH_RECORDS, records))]
                log.append(encode_batch(chunk, base_timestamp=1_000))
            crumbs = cluster.add_topic("crumbs").logs[0]
            for index in range(CRUMBS):
                crumbs.append(encode_batch([values[index % POOL]], base_timestamp=1_000))
            pipe.send(cluster.bootstrap)
            while not pipe.poll():
                await asyncio.sleep(0.05)

    uvloop.run(main())


def report(what: str, figure: float, unit: str, baseline: float, of_what: str) -> None:
    print(f"{what:44}{figure:12,.0f} {unit:10} {figure / baseline:6.2f} x {of_what} ({baseline:,.0f})")


async def cost_of_send(bootstrap: str, values: list[bytes], records: int) -> None:
    loop = asyncio.get_running_loop()
    queue: list[tuple[str, bytes, int, asyncio.Future[None]]] = []
    start = time.process_time()
    for index in range(records):
        future: asyncio.Future[None] = loop.create_future()
        queue.append(("null", values[index % POOL], time.time_ns() // 1_000_000, future))
    baseline = (time.process_time() - start) / records * 1e9
    queue.clear()
    for name in ("send", "send with key", "send and drain"):
        async with Producer(bootstrap, buffer_memory=4 << 30) as producer:
            await producer.send("null", b"warm")
            gc.collect()
            start = time.process_time()
            if name == "send":
                for index in range(records):
                    producer.send("null", values[index % POOL])
            elif name == "send with key":
                for index in range(records):
                    value = values[index % POOL]
                    producer.send("null", value, key=value)
            else:
                for index in range(records):
                    producer.send("null", values[index % POOL])
                    await producer.drain()
            report(name, (time.process_time() - start) / records * 1e9, "ns", baseline, "a future per record")


async def produce(bootstrap: str, values: list[bytes], records: int) -> None:
    deltas = [index // 400 for index in range(BATCH_RECORDS)]
    start = time.process_time()
    for first in range(0, records, BATCH_RECORDS):
        chunk = [values[index % POOL] for index in range(first, first + BATCH_RECORDS)]
        encode_batch(chunk, base_timestamp=1_000, timestamp_deltas=deltas)
    baseline = records / (time.process_time() - start)
    for name, keyed in (("produce", False), ("produce with keys", True)):
        async with Producer(bootstrap) as producer:
            await producer.send("null", b"warm")
            start = time.process_time()
            for index in range(records):
                value = values[index % POOL]
                producer.send("null", value, key=value if keyed else None)
                await producer.drain()
            await producer.flush()
            report(name, records / (time.process_time() - start), "rec/CPU-s", baseline, "encoding alone")


async def consume(bootstrap: str, values: list[bytes], records: int) -> None:
    async with Consumer(bootstrap, partitions=[KEPT]) as consumer:
        seen = 0
        async for batch in consumer.batches():
            for index, value in enumerate(batch.values):
                if value != values[(batch.offsets[index]) % POOL]:
                    raise SystemExit(f"the record at offset {batch.offsets[index]} differs from the stored one")
            seen += len(batch)
            if seen >= records:
                break
    stored = encode_batch(values[:BATCH_RECORDS], base_timestamp=1_000)
    start = time.process_time()
    for _ in range(0, records, BATCH_RECORDS):
        decode_batch(stored)
    baseline = records / (time.process_time() - start)
    for name in ("consume by batches", "consume by records"):
        async with Consumer(bootstrap, partitions=[KEPT]) as consumer:
            start = time.process_time()
            seen = 0
            if name == "consume by batches":
                async for batch in consumer.batches():
                    seen += len(batch)
                    if seen >= records:
                        break
            else:
                async for _ in consumer:
                    seen += 1
                    if seen >= records:
                        break
            report(name, records / (time.process_time() - start), "rec/CPU-s", baseline, "decoding alone")


async def round_trip(bootstrap: str, value: bytes) -> None:
    rounds = 2_000
    host, port = bootstrap.split(":")
    connection = await open_connection(RealNetwork(), host, int(port), client_id="bench", timeout_s=5.0)
    start = time.perf_counter()
    for _ in range(rounds):
        await connection.request(METADATA, m.MetadataRequest([]))
    baseline = (time.perf_counter() - start) / rounds * 1e6
    connection.close()
    await connection.wait_closed()
    async with Producer(bootstrap) as producer:
        await producer.send("null", b"warm")
        start = time.perf_counter()
        for _ in range(rounds):
            await producer.send("null", value)
        report("awaited send", (time.perf_counter() - start) / rounds * 1e6, "us", baseline, "a bare request")


def blocking_clients(bootstrap: str, values: list[bytes], records: int) -> None:
    """Measure the blocking clients beside the asynchronous ones."""

    async def asynchronous(name: str) -> float:
        start = time.process_time()
        if name == "send":
            async with Producer(bootstrap) as producer:
                for index in range(records):
                    producer.send("null", values[index % POOL])
                    await producer.drain()
            return records / (time.process_time() - start)
        count, topic = (CRUMBS, "crumbs") if name == "crumbs" else (records, "kept")
        async with Consumer(bootstrap, topics=[topic]) as consumer:
            seen = 0
            async for _ in consumer:
                seen += 1
                if seen == count:
                    break
        return count / (time.process_time() - start)

    def send(producer: sync.Producer, share: int) -> None:
        for index in range(share):
            producer.send("null", values[index % POOL])

    baseline = asyncio.run(asynchronous("send"))
    for threads in (1, 4):
        start = time.process_time()
        with sync.Producer(bootstrap) as producer:
            workers = [Thread(target=send, args=(producer, records // threads)) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        figure = records / (time.process_time() - start)
        report(f"blocking send, {threads} threads", figure, "rec/CPU-s", baseline, "send and drain")
    start = time.process_time()
    with sync.Producer(bootstrap) as producer:
        for first in range(0, records, BATCH_RECORDS):
            producer.send_batch("null", [values[index % POOL] for index in range(first, first + BATCH_RECORDS)])
    report("blocking send_batch", records / (time.process_time() - start), "rec/CPU-s", baseline, "send and drain")
    for name, count, topic in (("records", records, "kept"), ("crumbs", CRUMBS, "crumbs")):
        baseline = asyncio.run(asynchronous(name))
        start = time.process_time()
        with sync.Consumer(bootstrap, topics=[topic]) as reader:
            for _ in islice(reader, count):
                pass
        figure = count / (time.process_time() - start)
        report(f"blocking consume by {name}", figure, "rec/CPU-s", baseline, "async for")
    rounds = 2_000
    with sync.Producer(bootstrap) as producer:
        producer.send("null", b"warm").result()
        start = time.perf_counter()
        for _ in range(rounds):
            producer.send("null", values[0]).result()
        print(f"{'blocking send and result':44}{(time.perf_counter() - start) / rounds * 1e6:12,.0f} us")


async def measure(bootstrap: str, records: int, value_bytes: int) -> None:
    values = pool(value_bytes)
    print(f"{records} records of {value_bytes} bytes (pool checksum {zlib.crc32(b''.join(values)):#x})")
    await cost_of_send(bootstrap, values, records)
    await produce(bootstrap, values, records)
    await consume(bootstrap, values, records)
    await round_trip(bootstrap, values[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    options = parser.parse_args()
    records = max(BATCH_RECORDS, options.records // BATCH_RECORDS * BATCH_RECORDS)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, records, options.value_bytes), daemon=True)
    process.start()
    try:
        bootstrap = ours.recv()
        uvloop.run(measure(bootstrap, records, options.value_bytes))
        blocking_clients(bootstrap, pool(options.value_bytes), records)
    finally:
        ours.send("end")
        process.join(10)


if __name__ == "__main__":
    main()

"""The disk of a log directory begins to fail at any call: other brokers lead its partitions, the other directory stays
in use, no acknowledged record is lost, and the replicas return with a new disk. A first run counts the disk calls of
one broker, by kind, while a cluster starts, appends records, deletes and compacts them, deletes a topic, and while that
broker is killed, recovers, stops and starts. The same run is then repeated with another call failing each time,
together with all later calls in that directory."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name, log_dir
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.simulation.scenarios.helpers import as_admin

SETTINGS = {
    "log.retention.check.interval.ms": "400",
    "log.cleaner.backoff.ms": "300",
    "log.flush.offset.checkpoint.interval.ms": "700",
    "replica.high.watermark.checkpoint.interval.ms": "900",
}
RETENTION_BYTES = 2_000
TOPICS = {
    "replicated": {"durability": "replicated", "segment.bytes": "1500"},
    "synced": {"durability": "synced", "segment.bytes": "1500"},
    "compacted": {"cleanup.policy": "compact", "segment.bytes": "700", "min.cleanable.dirty.ratio": "0.1"},
    "shrinking": {"retention.bytes": str(RETENTION_BYTES), "segment.bytes": "700"},
}
DOOMED = "doomed"
"""The topic that is deleted during the run."""
ASSIGNMENTS = [[1, 2, 0], [2, 1, 0], [1, 0, 2]]
PARTITIONS = [TopicPartition(topic, number) for topic in TOPICS for number in range(len(ASSIGNMENTS))]
KEYS = 3
VICTIM = 1
WITHIN_S = 10
SEEDS = 2
POINTS = 20
ERRORS = (errno.EIO, errno.ENOSPC)


@dataclass(frozen=True)
class Point:
    """The call at which the directory begins to fail."""

    seed: int
    directory: int
    operation: str
    after: int
    """Number of calls of the operation that succeed first."""
    error: int

    def __str__(self) -> str:
        name = errno.errorcode[self.error]
        return f"seed {self.seed}: directory {self.directory}, {self.operation} {self.after}, {name}"


@dataclass
class Outcome:
    counts: list[Counter[str]] = field(default_factory=list)
    """Number of calls by operation, for each directory of the victim."""
    phase: str = ""
    """The phase of the run in which the directory failed; empty if it did not."""
    led: int = 0
    """Number of the directory's partitions that the victim led at that moment."""
    moved_s: float = 0.0
    """Seconds until other brokers led all of them."""
    led_on: int = 0
    """Number of partitions of the other directory that the victim led before and after."""


class Run:
    """One cluster, from its first start until its records are checked."""

    def __init__(self, seed: int, point: Point | None) -> None:
        self.outcome = Outcome()
        self._point = point
        self._cluster = VirtualCluster(Simulation(), settings=SETTINGS, log_dirs=2)
        self._disk = self._cluster.simulation.host(host_name(VICTIM)).disk
        self._phase = "first start"
        self._broken = asyncio.Event()
        self._sent: dict[TopicPartition, int] = Counter()
        self._offsets: dict[TopicPartition, dict[int, int]] = defaultdict(dict)
        """The offset of each acknowledged number; -1 if the broker no longer knew it."""
        self._last_round = False

    async def play(self) -> Outcome:
        cluster, point = self._cluster, self._point
        if point is None:
            self.outcome.counts = [self._disk.faults.count_calls(log_dir(number)) for number in (0, 1)]
        else:
            self._disk.faults.break_directory_at(
                log_dir(point.directory), point.operation, point.error, point.after, self._has_broken
            )
        await cluster.start()
        watching = asyncio.ensure_future(self._watch())
        self._phase = "new topics"
        await self._create_topics()
        self._phase = "serving"
        sending = asyncio.ensure_future(self._send_all())
        await asyncio.sleep(1)
        await self._delete_topic()
        await asyncio.sleep(1.5)
        cluster.kill_broker(VICTIM)
        self._phase = "recovery"
        await cluster.start_broker(VICTIM)
        self._phase = "following"
        await asyncio.sleep(1)
        self._phase = "clean stop"
        await cluster.stop_broker(VICTIM)
        self._phase = "start after it"
        await cluster.start_broker(VICTIM)
        await asyncio.sleep(0.5)
        self._last_round = True
        await sending
        if point is not None:
            self._phase = ""
            await asyncio.wait_for(watching, 2 * WITHIN_S)
        watching.cancel()
        await self._mend()
        await self._judge()
        return self.outcome

    def _has_broken(self) -> None:
        self.outcome.phase = self._phase
        self._broken.set()

    # -- the directory that fails --

    def _led_in(self, number: int) -> list[TopicPartition]:
        """Return the partitions in this directory that the victim leads."""
        try:
            there = self._disk.directory(log_dir(number)).entries
        except FileNotFoundError:  # the directory failed before it was created
            return []
        return [p for p in PARTITIONS if str(p) in there and self._leader(p) == VICTIM]

    def _leader(self, partition: TopicPartition) -> int:
        with suppress(KeyError):
            return self._cluster.state(partition).leader
        return NO_LEADER

    async def _watch(self) -> None:
        """Assert that, once the directory has failed, its leaders change in time and no other leader changes."""
        cluster = self._cluster
        await self._broken.wait()
        assert self._point is not None
        began_s, process = cluster.simulation.loop.now_s, cluster.process(VICTIM)
        serves = cluster.living_broker(VICTIM) is not None and self._phase != "clean stop"
        lost = self._led_in(self._point.directory)
        kept = self._led_in(1 - self._point.directory) if serves else []
        epochs = {partition: cluster.state(partition).leader_epoch for partition in kept}
        await cluster.until(lambda: all(self._leader(p) not in (VICTIM, NO_LEADER) for p in lost), WITHIN_S)
        self.outcome.led, self.outcome.moved_s = len(lost), cluster.simulation.loop.now_s - began_s
        await asyncio.sleep(0.2)
        if cluster.process(VICTIM) is process and process.alive and self._phase != "clean stop":
            assert {p: cluster.state(p).leader_epoch for p in kept if self._leader(p) == VICTIM} == epochs
            self.outcome.led_on = len(kept)

    async def _mend(self) -> None:
        cluster = self._cluster
        assert cluster.living() == list(cluster.broker_ids)
        if self._point is not None:
            assert list(cluster.broker(VICTIM)._logs.offline) == [log_dir(self._point.directory)]
            await cluster.stop_broker(VICTIM)
            self._disk.faults.clear()
            await cluster.start_broker(VICTIM)
        assert not cluster.broker(VICTIM)._logs.offline
        await cluster.until(lambda: all(len(cluster.state(p).isr) == len(cluster.broker_ids) for p in PARTITIONS))
        await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path(DOOMED)))

    # -- clients --

    async def _create_topics(self) -> None:
        await as_admin(
            self._cluster,
            lambda admin: admin.create_topics(
                NewTopic(name, configs=configs, assignments=ASSIGNMENTS)
                for name, configs in {**TOPICS, DOOMED: {}}.items()
            ),
        )

    async def _delete_topic(self) -> None:
        world = self._cluster.client("admin")

        async def delete() -> None:
            async with Admin(self._cluster.bootstrap, default_api_timeout_ms=1_000, world=world) as admin:
                try:
                    await admin.delete_topic(DOOMED)
                except BrokerError as error:  # the deletion waits for the log directory
                    if error.code is not ErrorCode.REQUEST_TIMED_OUT:
                        raise

        await world.process.run(delete())

    async def _send_all(self) -> None:
        """Send records to every partition one at a time, until all are acknowledged."""
        world = self._cluster.client("producer")

        async def send(producer: Producer, partition: TopicPartition) -> None:
            while not self._last_round:
                number = self._sent[partition]
                self._sent[partition] += 1
                key, value = b"%d" % (number % KEYS), b"%d" % number + b" " * 80
                told = await producer.send(partition.topic, value, key=key, partition=partition.partition)
                self._offsets[partition][number] = told.offset
                await asyncio.sleep(0.06)

        async def produce() -> None:
            async with Producer(self._cluster.bootstrap, world=world) as producer:
                await asyncio.gather(*(send(producer, partition) for partition in PARTITIONS))

        await world.process.run(produce())

    async def _judge(self) -> None:
        found = await self._read_all()
        for partition in PARTITIONS:
            numbers = list(found[partition].values())
            assert numbers == sorted(set(numbers)), f"{partition}: twice, or out of order: {numbers}"
            sent = range(self._sent[partition])
            match partition.topic:
                case "compacted":
                    assert set(sent[-KEYS:]) <= set(numbers), f"{partition}: {numbers} of {sent}"
                case "shrinking":
                    assert len(numbers) > RETENTION_BYTES // 200
                    assert numbers == list(sent[-len(numbers) :]), f"{partition}: {numbers} of {sent}"
                case _:
                    assert numbers == list(sent), f"{partition}: {numbers} of {sent}"
            told = self._offsets[partition]
            moved = [n for offset, n in found[partition].items() if told[n] not in (offset, -1)]
            assert not moved, f"{partition}: acknowledged at other offsets: {moved}"

    async def _read_all(self) -> dict[TopicPartition, dict[int, int]]:
        """Return the number of each record by partition and offset, as a new consumer reads them."""
        world = self._cluster.client("consumer")
        found: dict[TopicPartition, dict[int, int]] = {partition: {} for partition in PARTITIONS}

        async def read() -> None:
            async with Consumer(
                self._cluster.bootstrap, partitions=PARTITIONS, auto_offset_reset="earliest", world=world
            ) as consumer:
                ends = await consumer.end_offsets(PARTITIONS)
                batches = consumer.batches()
                while ends:
                    batch = await anext(batches)
                    partition = TopicPartition(batch.topic, batch.partition)
                    for offset, value in zip(batch.offsets, batch.values, strict=True):
                        found[partition][offset] = int(value or b"")
                    if partition in ends and batch.offsets[-1] + 1 >= ends[partition]:
                        del ends[partition]

        async with asyncio.timeout(60):
            await world.process.run(read())
        return found


def _play(seed: int, point: Point | None) -> Outcome:
    async def main() -> Outcome:
        return await Run(seed, point).play()

    return run(main(), seed=seed)


@cache
def _counts(seed: int) -> Sequence[Counter[str]]:
    """Return the number of calls for each directory of the victim in a run without failures."""
    return _play(seed, None).counts


def _points(count: int) -> list[Point]:
    """Return points spread evenly over the kinds of call, and within a kind over the run; none occurs twice."""
    pools: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for seed in range(SEEDS):
        for directory, counts in enumerate(_counts(seed)):
            for operation, calls in sorted(counts.items()):
                pools[operation] += [(seed, directory, after) for after in range(calls)]
    shares = Counter[str]()
    while shares.total() < count:
        for operation in sorted(pools):
            shares[operation] += shares[operation] < len(pools[operation]) and shares.total() < count
    points: list[Point] = []
    random = Random(2)  # a draw in which the mutant io-error-ignored is seen
    for operation, share in sorted(shares.items()):
        pool = pools[operation]
        for number in range(share):
            first, end = len(pool) * number // share, len(pool) * (number + 1) // share
            seed, directory, after = pool[random.randrange(first, end)]
            points.append(Point(seed, directory, operation, after, ERRORS[len(points) % 2]))
    return points


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_directory_may_begin_to_fail_with_any_call() -> None:
    outcomes: dict[str, list[tuple[Point, Outcome]]] = defaultdict(list)
    failures: list[str] = []
    for point in _points(POINTS):
        try:
            outcomes[point.operation].append((point, _play(point.seed, point)))
        except Exception as error:  # noqa: BLE001 - reported below with the others
            failures.append(f"{point}: {error!r}")
    print("\n" + _table(outcomes))
    assert failures == []
    assert sum(map(len, outcomes.values())) == POINTS
    assert all(outcome.phase for each in outcomes.values() for _, outcome in each)


def _table(outcomes: dict[str, list[tuple[Point, Outcome]]]) -> str:
    """Return a table with a line for each kind of call."""
    lines = [
        f"{'call':16}{'points':>7}{'of':>7}{'EIO':>5}{'ENOSPC':>7}{'led':>5}{'moved s':>9}{'led on':>7}  failed during"
    ]
    for operation, each in sorted(outcomes.items()):
        calls = sum(counts[operation] for seed in range(SEEDS) for counts in _counts(seed))
        errors = Counter(point.error for point, _ in each)
        phases = Counter(outcome.phase for _, outcome in each)
        lines.append(
            f"{operation:16}{len(each):7}{calls:7}{errors[errno.EIO]:5}{errors[errno.ENOSPC]:7}"
            f"{sum(outcome.led for _, outcome in each):5}{max(outcome.moved_s for _, outcome in each):9.2f}"
            f"{sum(outcome.led_on for _, outcome in each):7}  "
            + ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
        )
    return "\n".join(lines)

"""Clients as people write them, on topics of their own (acks=all), beside the strict workload. Each storm draws some.

The strict workload names partitions, awaits each record in its own task and reads by batches from its last position.
Users do other things:

- Producers send by key or leave the partition to the partitioner; they drain, flush and close half-way, send a single
  record and close, or send more than fits into a batch.
- Consumers read record by record, from the beginning, the end or any offset, look up offsets meanwhile, and often start
  afresh without a position.
- Spark's tasks read ranges of acknowledged records.
- Administrators create and delete topics, several of them at a time.

Every answer is recorded and judged at the end (`answers.py`). A missing answer is an anomaly at once: a delivery ends
within its delivery timeout, every record has an outcome after `flush` and `close`, and a failure that nothing awaited
is reported.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.cluster.connections import Purpose
from minibroker.client.consumer import Consumer
from minibroker.client.errors import BufferFull, ClientCrashed, DeliveryFailed
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.client.settings import Address
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import WALL_CLOCK_START_MS, VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import METADATA
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from minibroker.spark_jobs.source.offsets import DataLost, OffsetRange
from minibroker.spark_jobs.source.reading import RangeFetcher, ReadSettings
from tests.simulation.storms.clients.habits import (
    GRACE_S,
    MAX_MESSAGE_BYTES,
    SMALL_BATCHES,
    TOPIC,
    Habits,
    draw_habits,
    draw_kinds,
)
from tests.simulation.storms.clients.interruptions import AT_ONCE_S, begun, may_be_interrupted, patiently
from tests.simulation.storms.clients.reading import Reading, now_s
from tests.simulation.storms.clients.workload import Guests
from tests.simulation.storms.security import Right, may_read, may_write
from tests.simulation.storms.verdicts.answers import (
    ANY,
    DONE,
    EXISTS,
    IN_DOUBT,
    LABEL,
    UNKNOWN,
    Answers,
    Headers,
    RangeRead,
    Stored,
    TopicOperation,
    TopicSeen,
    Written,
    check_topic,
    check_users,
    forget,
    label_of,
)
from tests.simulation.storms.verdicts.history import Acknowledged, Anomaly, History, Sent

WITHIN_S = 60.0
"""Seconds after healing within which metadata must be correct, as for the whole storm."""
_RETRY_S = 0.5
_REST_S = 1.5
_LONGEST_REST_S = 100.0
"""Slightly less than a storm waits for its users to end."""


@dataclass
class _Life:
    """One producer, from its start to its close."""

    who: str
    producer: Producer
    numbers: Iterator[int] = field(default_factory=itertools.count)
    open: list[tuple[Delivery, bytes]] = field(default_factory=list)
    """Records that were not awaited yet."""
    reported: set[bytes] = field(default_factory=set)
    """Records whose failure `drain`, `flush` or `close` has reported."""
    awaiting: set[asyncio.Task[bool]] = field(default_factory=set)


class Users(Guests):
    """Draws users, starts them on a cluster, and records the answers that they get.

    `acknowledged_end` is updated to one past the highest acknowledged offset of each partition.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        acknowledged_end: Counter[TopicPartition],
        *,
        event: Callable[[str], None],
        accuse: Callable[[Anomaly], None],
    ) -> None:
        super().__init__(cluster)
        self._replicas = len(cluster.broker_ids)
        self._acknowledged_end = acknowledged_end
        self._event = event
        self._accuse = accuse
        random = cluster.simulation.random("users")
        self._topics = {TOPIC: random.choice([1, 1, 2, 3, 4])}
        self._producers = [draw_habits(random, kind, self._topics) for kind in draw_kinds(random)]
        if any(habits.topic == SMALL_BATCHES for habits in self._producers):
            self._topics[SMALL_BATCHES] = 1
        self._others: dict[str, Callable[[str, VirtualWorld], Coroutine[Any, Any, None]]] = {
            name: live
            for name, live, share in (
                ("user-consumer", self._consume, 0.6),
                ("user-spark", self._read_ranges, 0.35),
                ("user-admin", self._administer, 0.4),
            )
            if random.random() < share
        }
        self.partitions = [TopicPartition(topic, p) for topic, count in self._topics.items() for p in range(count)]
        self._history = History(frozenset(self._topics))
        self._answers = Answers()
        self._topic_ids: dict[str, str] = {}
        self._operations: dict[str, list[TopicOperation]] = {}
        """Operations on side topics, by name."""
        self._producing: dict[str, asyncio.Task[None]] = {}
        self._forgiven: set[TopicPartition] = set()
        self._stopping = False

    # -- their lives --

    async def create_topics(self, admin: Admin) -> None:
        for topic, count in self._topics.items():
            configs = {"max.message.bytes": str(MAX_MESSAGE_BYTES)} if topic == SMALL_BATCHES else {}
            await admin.create_topic(topic, partitions=count, replication_factor=self._replicas, configs=configs)
            self._topic_ids[topic] = self._znode(topic).topic_id

    @property
    def names(self) -> list[str]:
        return [*(f"user-producer-{number}" for number in range(len(self._producers))), *self._others]

    def rights(self, name: str) -> list[Right]:
        if name == "user-admin":
            return []
        return may_read(*self._topics) if name in self._others else may_write(*self._topics)

    def stay_away(self) -> None:
        """Remove all users from this storm."""
        self._producers.clear()
        self._others.clear()

    def _run(self, name: str, world: VirtualWorld) -> None:
        if name in self._others:
            world.process.start(self._others[name](name, world), name)
        else:
            habits = self._producers[int(name.rpartition("-")[2])]
            self._producing[name] = world.process.start(self._produce(name, world, habits), name)

    async def finish(self) -> None:
        """Stop sending, wait until each record has its outcome, and end the other users."""
        self._stopping = True
        for producing in self._producing.values():
            await producing
        for name, process in self._processes.items():
            if name not in self._producing:
                process.kill()

    @contextmanager
    def _whatever_happens(self, who: str) -> Iterator[None]:
        """Let a client that gives up start again, and accuse one that crashes."""
        try:
            yield
        except ClientCrashed as error:
            self._accuse(Anomaly("a client crashed", f"{who}: {error!r} {error.__cause__!r}"))
        except MinibrokerError:
            pass  # the outcome of each record is already recorded

    def _identity(self, name: str, attempt: int) -> str:
        return f"{name}#{self._starts[name]}.{attempt}"

    def _bootstrap(self, random: Random) -> str:
        """Return the brokers' addresses in any order, sometimes a single one."""
        addresses = self._cluster.bootstrap.split(",")
        random.shuffle(addresses)
        return ",".join(addresses[: random.choice([1, len(addresses)])])

    # -- producing --

    async def _produce(self, name: str, world: VirtualWorld, habits: Habits) -> None:
        for attempt in itertools.count(1):
            if self._stopping:
                return
            who = self._identity(name, attempt)
            with self._whatever_happens(who):
                await self._produce_for_a_life(who, world, habits)
            await _rest(world.random, habits.pause_s if habits.records == 1 else _REST_S)

    async def _produce_for_a_life(self, who: str, world: VirtualWorld, habits: Habits) -> None:
        random = world.random
        producer = Producer(
            self._bootstrap(random), world=world, partitioner=habits.partitioner, **dict(habits.settings)
        )
        await producer.start()
        self._event(f"producer {habits.kind}")
        self._event(f"records {habits.style}")
        life = _Life(who, producer)

        async def close() -> None:
            await self._call(life, "close", producer.close(), habits.limit_s)

        try:
            for number in range(habits.records):
                if self._stopping:
                    break
                self._send(life, habits, random)
                if habits.style == "awaited" and not await self._gives_up(life.open[-1][0], random):
                    delivery, label = life.open.pop()
                    await self._ending(delivery, label, who, habits.limit_s)
                elif habits.style == "tasks":
                    delivery, label = life.open.pop()
                    life.awaiting.add(asyncio.create_task(self._ending(delivery, label, who, habits.limit_s)))
                elif habits.style == "drained":
                    await self._call(life, "drain", producer.drain(), habits.limit_s)
                if number % habits.burst == habits.burst - 1:
                    if habits.style == "flushed":
                        flush = self._call(life, "flush", producer.flush(), habits.limit_s)
                        if await may_be_interrupted(flush, random, self._accuse, self._event, who, close):
                            await self._all_have_ended(life, "flush")
                    if number + 1 < habits.records:
                        await _rest(random, habits.pause_s)
        finally:
            await close()
            await self._all_have_ended(life, "close")

    def _send(self, life: _Life, habits: Habits, random: Random) -> None:
        number = next(life.numbers)
        unique = b"%s/%d|" % (life.who.encode(), number)
        key = b"key-%d" % random.randrange(habits.keys) if habits.keys else None
        value: bytes | None = unique + random.randbytes(random.randint(0, habits.max_value_bytes))
        headers: Headers = ()
        timestamp_ms = None
        oddity = random.random()
        if oddity < 0.1:
            headers = (("kind", b"odd"), ("nothing", None))
        elif oddity < 0.2:
            timestamp_ms = WALL_CLOCK_START_MS + random.randrange(-100_000, 400_000)
        elif oddity < 0.3 and key is not None:
            value, headers = None, ((LABEL, unique),)
            self._event("tombstone")
        label = label_of(key, value, headers)
        partition = ANY if key is None else habits.partitioner.by_key(key, habits.partitions)
        self._history.sent[label] = Sent(life.who, number, TopicPartition(habits.topic, partition))
        self._answers.written[label] = Written(key, value, headers, timestamp_ms, now_s())
        try:
            delivery = life.producer.send(
                habits.topic, value, key=key, timestamp_ms=timestamp_ms, headers=headers or None
            )
        except BaseException:
            del self._history.sent[label], self._answers.written[label]
            raise
        life.open.append((delivery, label))

    async def _gives_up(self, delivery: Delivery, random: Random) -> bool:
        """Return whether the user stops waiting for this record, as happens now and then."""
        if random.random() > 0.2:
            return False
        try:
            await asyncio.wait_for(
                delivery, random.choice([0.005, 0.1, 3.0, 10.0]) * random.choice([random.random(), 1])
            )
        except MinibrokerError:
            return False
        except TimeoutError:
            self._event("a wait for a record is given up")
            return True
        return False

    async def _ending(self, delivery: Delivery, label: bytes, who: str, within_s: float) -> bool:
        """Wait for a record's outcome, and return whether it was acknowledged."""
        ending = begun(delivery)
        await patiently(ending, within_s)
        if not ending.done():
            ending.cancel()
            self._accuse(Anomaly("a silent client", f"{who}: nothing was heard of {label[:60]!r} for {within_s:g} s"))
            return False
        try:
            metadata = ending.result()
        except MinibrokerError:
            self._history.failed += 1
            return False
        partition = TopicPartition(metadata.topic, metadata.partition)
        if delivery._batch.partition >= 0 and delivery._batch.forwarded is not None:
            self._event("batch split")
        self._history.acknowledged[partition].append(Acknowledged(label, metadata.offset, now_s()))
        if partition not in self._forgiven:  # it may have been acknowledged before the power cut
            self._acknowledged_end[partition] = max(self._acknowledged_end[partition], metadata.offset + 1)
        return True

    async def _call(self, life: _Life, what: str, call: Awaitable[None], within_s: float) -> None:
        """Call `drain`, `flush` or `close`, and record the failures that they report."""
        calling = begun(call)
        try:
            await patiently(calling, within_s)
        finally:
            calling.cancel()
        if not calling.done():
            self._accuse(Anomaly("a silent client", f"{life.who}: {what} has not ended within {within_s:g} s"))
            return
        try:
            calling.result()
        except BufferFull:
            self._event("drain gave up")
        except DeliveryFailed as error:
            life.reported |= {label_of(f.key, f.value, f.headers) for f in error.failures}

    async def _all_have_ended(self, life: _Life, after: str) -> None:
        if life.awaiting:
            done, silent = await asyncio.wait(life.awaiting, timeout=AT_ONCE_S)
            life.awaiting -= done
            if silent:
                text = f"{life.who}: {len(silent)} records have had no ending after {after}"
                self._accuse(Anomaly("a silent client", text))
        failed = set()
        for delivery, label in life.open:
            if not await self._ending(delivery, label, f"{life.who}, after {after}", AT_ONCE_S):
                failed.add(label)
        life.open.clear()
        if failed != life.reported:
            text = (
                f"{life.who}: {len(failed)} records failed, {after} and what came before reported {len(life.reported)}"
            )
            self._accuse(Anomaly("failures not reported", text))
        life.reported.clear()

    # -- consuming --

    async def _consume(self, name: str, world: VirtualWorld) -> None:
        for attempt in itertools.count(1):
            who = self._identity(name, attempt)
            with self._whatever_happens(who):
                reading = Reading(who, self._history, self._answers, self._acknowledged_end, self._event, self._accuse)
                await reading.read_for_a_life(self._bootstrap(world.random), world, self._topics)
            await asyncio.sleep(_RETRY_S)

    # -- Spark --

    async def _read_ranges(self, name: str, world: VirtualWorld) -> None:
        for attempt in itertools.count(1):
            await asyncio.sleep(world.random.expovariate(1 / 8))
            partition = world.random.choice(self.partitions)
            known = self._acknowledged_end[partition]
            if known:
                end = known if world.random.random() < 0.5 else world.random.randint(1, known)
                start = max(0, end - world.random.randint(1, 60))
                with self._whatever_happens(name):
                    await self._read_range(
                        self._identity(name, attempt), world, self._bootstrap(world.random), partition, start, end
                    )

    async def _read_range(
        self, who: str, world: VirtualWorld, bootstrap: str, partition: TopicPartition, start: int, end: int
    ) -> None:
        """Read acknowledged offsets from `start` to `end`, as a task of Spark does."""
        fails_on_loss = world.random.random() < 0.5
        settings = ReadSettings(bootstrap, "user-spark", include_headers=False, fail_on_data_loss=fails_on_loss)
        wanted = OffsetRange(partition.topic, self._topic_ids[partition.topic], partition.partition, start, end)
        fetcher = RangeFetcher(settings, wanted, world.random.choice([10.0, 60.0]), world)
        labels: dict[int, bytes] = {}
        loss = None
        try:
            await fetcher.start()
            while (fetched := await fetcher.next()) is not None:
                first_offset, batches = fetched
                for batch in batches:
                    keys = batch.keys or [None] * batch.count
                    headers = batch.headers or [None] * batch.count
                    for offset, key, value, some in zip(batch.offsets, keys, batch.values, headers, strict=True):
                        if first_offset <= offset < end:
                            labels[offset] = label_of(key, value, some or ())
        except DataLost as error:
            loss = str(error)
        finally:
            await fetcher.close()
        self._event("range failing on loss" if fails_on_loss else "range whatever is lost")
        self._answers.ranges.append(RangeRead(who, partition, start, end, labels, loss, now_s()))

    # -- administration --

    async def _administer(self, name: str, world: VirtualWorld) -> None:
        random = world.random
        for attempt in itertools.count(1):
            await asyncio.sleep(random.expovariate(1 / 10))
            who = self._identity(name, attempt)
            topic = f"users-side-{self._starts[name]}-{attempt}"
            with self._whatever_happens(who):
                course = random.choice(["created", "created and deleted", "created again", "created twice at once"])
                self._event(f"topic {course}")
                if course == "created twice at once":
                    counts = random.sample([1, 2, 3], 2)
                    await asyncio.gather(
                        *(self._change(f"{who}/{i}", world, topic, "create", counts[i]) for i in range(2))
                    )
                    continue
                if await self._change(who, world, topic, "create", random.randint(1, 3)) != DONE or course == "created":
                    continue
                await asyncio.sleep(random.choice([0.0, 0.5, 3.0]))
                if course == "created again" and random.random() < 0.6:
                    self._hold_up_deletions(random)
                if await self._change(who, world, topic, "delete", 0) == DONE and course == "created again":
                    await asyncio.sleep(random.choice([0.0, 0.0, 0.2, 2.0]))
                    await self._change(who, world, topic, "create", random.randint(1, 3))

    async def _change(self, who: str, world: VirtualWorld, topic: str, what: str, partitions: int) -> str:
        """Create or delete a topic, and return the outcome."""
        random = world.random
        operations = self._operations.setdefault(topic, [])
        index = len(operations)
        began_s = now_s()
        # It stays in doubt if the process dies during the call.
        operations.append(TopicOperation(what, who, partitions, began_s, float("inf"), IN_DOUBT, self._seen(topic)))
        outcome = IN_DOUBT
        topic_id = self._topic_id(topic)
        if random.random() < 0.4:
            self._answers_lost(who.partition("#")[0], random)
        try:
            async with Admin(
                self._bootstrap(random),
                request_timeout_ms=random.choice([1_000, 5_000]),
                default_api_timeout_ms=random.choice([5_000, 20_000]),
                world=world,
            ) as admin:

                async def change() -> None:
                    if what == "create":
                        await admin.create_topic(topic, partitions=partitions, replication_factor=self._replicas)
                        return
                    await admin.delete_topic(topic)
                    if topic_id is not None and self._topic_id(topic) == topic_id:
                        self._accuse(Anomaly("a deleted topic is still there", f"{topic} ({topic_id}), for {who}"))

                if await may_be_interrupted(change(), random, self._accuse, self._event, who, admin.close):
                    outcome = DONE
        except BrokerError as error:
            if error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                outcome = EXISTS
            elif error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                outcome = UNKNOWN
        except MinibrokerError:
            pass
        finally:
            operations[index] = TopicOperation(what, who, partitions, began_s, now_s(), outcome, self._seen(topic))
        return outcome

    def _answers_lost(self, host: str, random: Random) -> None:
        """Reset the host's connections several times within a moment."""
        self._event("administrator's connections break")
        at_s = 0.0
        for _ in range(6):
            at_s += random.expovariate(1 / 0.01)
            for broker_id in self._cluster.broker_ids:
                network = self._cluster.simulation.network
                asyncio.get_running_loop().call_later(at_s, network.reset, host, host_name(broker_id))

    def _hold_up_deletions(self, random: Random) -> None:
        """Block for a moment the link from the controller to a broker that has to delete its replica."""
        for controller in self._cluster.active_controllers():
            other = random.choice([broker_id for broker_id in self._cluster.broker_ids if broker_id != controller])
            link = host_name(controller), host_name(other)
            network = self._cluster.simulation.network
            network.block(*link)
            # In an empty context: the link must come back even if the administrator's process is killed meanwhile.
            asyncio.get_running_loop().call_later(random.uniform(0.3, 2), network.unblock, *link, context=Context())

    def _seen(self, topic: str) -> TopicSeen:
        zookeeper = self._cluster.simulation.zookeeper
        if not zookeeper.has(znodes.topic_path(topic)):
            return TopicSeen(False, False, 0)
        return TopicSeen(True, zookeeper.has(znodes.delete_topic_path(topic)), len(self._znode(topic).partitions))

    def _topic_id(self, topic: str) -> str | None:
        there = self._cluster.simulation.zookeeper.has(znodes.topic_path(topic))
        return self._znode(topic).topic_id if there else None

    def _znode(self, topic: str) -> znodes.TopicZnode:
        return znodes.decode_topic(topic, self._cluster.simulation.zookeeper.data(znodes.topic_path(topic)))

    # -- visitors --

    def send_on(self, partition: TopicPartition, records: int) -> None:
        """Start a producer that sends this many records to the partition."""
        world = self._new_process("visiting-producer")
        who = self._identity("visiting-producer", 1)

        async def send() -> None:
            with self._whatever_happens(who):
                async with Producer(self._cluster.bootstrap, delivery_timeout_ms=15_000, world=world) as producer:
                    for number in range(records):
                        label = b"%s/%d|" % (who.encode(), number)
                        self._history.sent[label] = Sent(who, number, partition)
                        self._answers.written[label] = Written(None, label, (), None, now_s())
                        delivery = producer.send(partition.topic, label, partition=partition.partition)
                        await self._ending(delivery, label, who, 15 + GRACE_S)

        world.process.start(send(), who)

    def visit(self, partition: TopicPartition, first_address: str, start: int, random: Random) -> str:
        """Start a consumer that reaches this broker first and begins at an acknowledged offset. Return its host."""
        name = f"visitor-{self._starts['visitor']}"
        self._starts["visitor"] += 1
        world = self._new_process(name)
        others = [address for address in self._cluster.bootstrap.split(",") if address != first_address]
        bootstrap = ",".join([first_address, *others])
        end = self._acknowledged_end[partition]
        reading = Reading(name, self._history, self._answers, self._acknowledged_end, self._event, self._accuse)
        reset = random.choice(["earliest", "earliest", "latest", "none"])
        is_spark = start < end and random.random() < 0.4

        async def visit() -> None:
            with self._whatever_happens(name):
                if is_spark:
                    await self._read_range(name, world, bootstrap, partition, start, end)
                else:
                    await reading.begin_at(bootstrap, world, partition, start, reset)

        self._event(f"fresh {'range' if is_spark else 'consumer'} at a deposed leader")
        world.process.start(visit(), name)
        return name

    # -- the end --

    async def read_back(self) -> None:
        """Read all records, and ask the brokers for the offsets of the partitions."""
        world = self._cluster.client("user-reader")
        await world.process.run(self._read_back(world))

    async def _read_back(self, world: World) -> None:
        self._history.final = {partition: {} for partition in self.partitions}
        self._answers.stored = {partition: {} for partition in self.partitions}
        async with Consumer(self._cluster.bootstrap, topics=list(self._topics), world=world) as consumer:
            ends = await consumer.end_offsets(self.partitions)
            missing = {partition for partition in self.partitions if ends[partition] > 0}
            while missing:
                record = await anext(consumer)
                partition = TopicPartition(record.topic, record.partition)
                self._history.final[partition][record.offset] = label_of(record.key, record.value, record.headers)
                self._answers.stored[partition][record.offset] = Stored(
                    record.key, record.value, tuple(record.headers), record.timestamp_ms
                )
                if record.offset + 1 >= ends[partition]:
                    missing.discard(partition)
            reading = Reading("reader", self._history, self._answers, self._acknowledged_end, self._event, self._accuse)
            await reading.ask_everything(consumer, self.partitions, world.random, is_healed=True)

    async def look_at_topics(self) -> None:
        """Wait until each broker describes all topics as ZooKeeper does, and no deletion is pending."""
        world = self._cluster.client("user-reader")
        await world.process.run(self._look_at_topics(world))

    async def _look_at_topics(self, world: World) -> None:
        problem: str | None = None
        try:
            async with asyncio.timeout(WITHIN_S), Admin(self._cluster.bootstrap, world=world) as admin:
                while (problem := await self._wrong_metadata(admin)) is not None:
                    await asyncio.sleep(_RETRY_S)
                with_doubt = "users-side-never"
                try:
                    await admin.delete_topic(with_doubt)
                    self._accuse(Anomaly("a delete found what never was", with_doubt))
                except BrokerError as error:
                    if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                        self._accuse(Anomaly("a delete found what never was", f"{with_doubt}: {error}"))
                try:
                    await admin.create_topic(TOPIC, partitions=1, replication_factor=self._replicas)
                    self._accuse(Anomaly("a topic was created twice", TOPIC))
                except BrokerError as error:
                    if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                        self._accuse(Anomaly("a topic was created twice", f"{TOPIC}: {error}"))
        except TimeoutError:
            self._accuse(Anomaly("wrong metadata", f"{WITHIN_S:g} s after everything was whole, {problem}"))

    async def _wrong_metadata(self, admin: Admin) -> str | None:
        try:
            return await self._difference(admin)
        except MinibrokerError as error:
            return f"it said {error}"

    async def _difference(self, admin: Admin) -> str | None:
        """Return a difference between a broker's description of the topics and ZooKeeper, or None."""
        zookeeper = self._cluster.simulation.zookeeper
        doomed = zookeeper.names(znodes.DELETE_TOPICS)
        if doomed:
            return f"these are still being deleted: {doomed}"
        names = zookeeper.names(znodes.TOPICS)
        if await admin.list_topics(internal=True) != sorted(names):
            return f"list_topics differs from {sorted(names)}"
        described = await admin.describe_topics(names)
        for name in names:
            partitions = {p.partition: p.replicas for p in described[name].partitions}
            if (described[name].topic_id, partitions) != (self._znode(name).topic_id, self._znode(name).partitions):
                return f"describe_topics says of {name}: {described[name]}"
        for broker_id in self._cluster.broker_ids:
            connection = await admin._runtime.connections.open(Address(host_name(broker_id), PORT), Purpose.REQUESTS)
            answer = await connection.request(METADATA, m.MetadataRequest(None), timeout_s=5)
            told = {topic.name: topic for topic in answer.topics}
            if sorted(told) != sorted(names):
                return f"broker {broker_id} knows {sorted(told)}, ZooKeeper {sorted(names)}"
            for name in names:
                znode = self._znode(name)
                states = {p: self._cluster.state(TopicPartition(name, p)) for p in znode.partitions}
                due = {p: (s.leader, s.leader_epoch, s.isr, tuple(znode.partitions[p])) for p, s in states.items()}
                found = {
                    p.partition_index: (p.leader_id, p.leader_epoch, tuple(p.isr_nodes), tuple(p.replica_nodes))
                    for p in told[name].partitions
                }
                if found != due or told[name].topic_id != znode.topic_id:
                    return f"broker {broker_id} says of {name}: {found}; in ZooKeeper it is {due}"
        return None

    def forgive(self, partitions: Iterable[TopicPartition]) -> None:
        """Judge no answer about these partitions: they may legally have lost acknowledged records."""
        self._forgiven.update(partitions)

    def judge(self) -> list[Anomaly]:
        if self._forgiven:
            forget(self._history, self._answers, self._forgiven)
        topics = [
            anomaly
            for topic, operations in self._operations.items()
            for anomaly in check_topic(topic, operations, self._seen(topic))
        ]
        return [*topics, *check_users(self._history, self._answers)]


async def _rest(random: Random, mean_s: float) -> None:
    await asyncio.sleep(min(random.expovariate(1 / mean_s), _LONGEST_REST_S))

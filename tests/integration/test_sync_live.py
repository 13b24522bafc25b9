"""Blocking clients and a cluster of real brokers: threads, forks, Ctrl-C, brokers that are stopped and restarted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from minibroker.client.administering.topics import NewTopic
from minibroker.client.errors import ApiTimedOut, Closed, MaxPollIntervalExceeded
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import BrokerId
from minibroker.protocol.model import TopicPartition
from minibroker.sync import Admin, Consumer, Producer, RebalanceListener
from tests.live_cluster import live_cluster
from tests.waiting import until_true

pytestmark = pytest.mark.slow

PATIENCE_S = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"zookeeper.session.timeout.ms": "6000", "group.min.session.timeout.ms": "1000"}
    with live_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    """The test's own topic, with three partitions."""
    name: str = request.node.name[:100]
    with Admin(cluster.bootstrap()) as admin:
        # The previous test may have restarted brokers.
        until_true(lambda: len(admin.describe_cluster().brokers) == 3, PATIENCE_S)
        admin.create_topics([NewTopic(name, partitions=3, replication_factor=3)])
    return name


def program(cluster: LocalCluster, topic: str, text: str) -> subprocess.Popen[str]:
    lines = [
        "import os, sys, time, threading, multiprocessing",
        "from minibroker.sync import Admin, Consumer, Producer",
        "from minibroker import Closed, ForkedClient, TopicPartition",
        f"bootstrap, topic = {cluster.bootstrap()!r}, {topic!r}",
        text,
    ]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


class Told(RebalanceListener):
    """Records the callbacks and their threads; `held` are the member's partitions according to them."""

    def __init__(self) -> None:
        self.consumer: Consumer | None = None
        self.events: list[tuple[str, list[TopicPartition]]] = []
        self.held: set[TopicPartition] = set()
        self.threads: set[int] = set()

    def _note(self, event: str, partitions: list[TopicPartition]) -> None:
        self.events.append((event, partitions))
        self.threads.add(threading.get_ident())

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._note("assigned", partitions)
        self.held |= set(partitions)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._note("revoked", partitions)
        self.held -= set(partitions)
        if self.consumer is not None:
            self.consumer.commit()


def test_threads_send_and_the_members_of_a_group_share_what_they_sent(cluster: LocalCluster, topic: str) -> None:
    threads, records = 4, 5_000
    bootstrap = cluster.bootstrap()
    with Producer(bootstrap, key_serializer="str", value_serializer="msgpack") as producer:

        def send(name: int) -> None:
            for number in range(records):
                producer.send(topic, [name, number], key=str(number % 100))

        senders = [threading.Thread(target=send, args=(name,)) for name in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE_S)

    seen: list[list[tuple[int, bytes | None, bytes | None]]] = [[], []]
    listeners = [Told(), Told()]
    own_threads: list[int] = [0, 0]
    stop = threading.Event()

    def consume(index: int) -> None:
        own_threads[index] = threading.get_ident()
        listener = listeners[index]
        with Consumer(bootstrap, topics=[topic], group="sharing", listener=listener) as consumer:
            listener.consumer = consumer
            while not stop.is_set():
                for record in consumer.poll(timeout_ms=200):
                    seen[index].append((record.partition, record.key, record.value))
            consumer.commit()

    members = [threading.Thread(target=consume, args=(index,)) for index in range(2)]
    for member in members:
        member.start()
    until_true(lambda: sum(map(len, seen)) >= threads * records, PATIENCE_S)
    # With the cooperative protocol a new member gets its partitions only after the other has revoked them.
    until_true(lambda: all(listener.held for listener in listeners), PATIENCE_S)
    stop.set()
    for member in members:
        member.join(PATIENCE_S)
        assert not member.is_alive()
    counts = Counter(value for own in seen for _, _, value in own)
    assert len(counts) == threads * records
    assert set(counts.values()) == {1}
    for index, listener in enumerate(listeners):
        assert listener.threads == {own_threads[index]}
        assert listener.events[-1][0] == "revoked"
    with Consumer(bootstrap, topics=[topic], group="sharing") as consumer:
        assert consumer.poll(timeout_ms=1_500) == []
        at = consumer.committed(*(TopicPartition(topic, partition) for partition in range(3)))
        assert sum(0 if offset is None else offset.offset for offset in at.values()) == threads * records


def test_heartbeats_continue_while_the_callers_thread_is_busy_but_not_forever(
    cluster: LocalCluster, topic: str
) -> None:
    with Producer(cluster.bootstrap()) as producer:
        for number in range(6):
            producer.send(topic, b"%d" % number, partition=0)
    listener = Told()
    with Consumer(
        cluster.bootstrap(),
        topics=[topic],
        group="busy",
        listener=listener,
        session_timeout_ms=4_000,
        heartbeat_interval_ms=400,
        max_poll_interval_ms=10_000,
    ) as consumer:
        assert next(consumer).value == b"0"
        generation = consumer.status().generation_id
        time.sleep(5)  # longer than the session
        assert next(consumer).value == b"1"
        consumer.commit()
        assert consumer.status().generation_id == generation
        until_true(lambda: consumer.status().generation_id != generation, 60)  # no thread polls
        with pytest.raises(MaxPollIntervalExceeded):
            consumer.poll(timeout_ms=10_000)
        until_true(lambda: bool(consumer.poll(timeout_ms=500)), 60)


def test_forked_children_use_their_own_clients(cluster: LocalCluster, topic: str) -> None:
    code, out, err = ended(
        program(
            cluster,
            topic,
            """
producer = Producer(bootstrap)
consumer = Consumer(bootstrap, topics=[topic], group="forked")
producer.start(), consumer.start()
producer.send(topic, b"parent", partition=0).result()
assert next(consumer).value == b"parent"
def work(number):
    for call in (lambda: producer.send(topic, b"x"), lambda: next(consumer), consumer.commit, consumer.assignment):
        try:
            call()
        except ForkedClient:
            continue
        raise SystemExit("no error")
    with Producer(bootstrap) as own:
        own.send(topic, b"child %d" % number, partition=1).result()
    with Consumer(bootstrap, partitions=[TopicPartition(topic, 0)]) as own:
        assert next(own).value == b"parent"
context = multiprocessing.get_context("fork")
workers = [context.Process(target=work, args=(number,)) for number in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert [worker.exitcode for worker in workers] == [0, 0, 0]
child = os.fork()
if child == 0:
    work(3)
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
producer.send(topic, b"parent again", partition=0).result()
values = []
for record in consumer:
    values.append(record.value.decode())
    if len(values) == 5:
        break
print(sorted(values))
consumer.commit()
consumer.close()
producer.close()
""",
        )
    )
    assert (code, err) == (0, "")
    assert out == "['child 0', 'child 1', 'child 2', 'child 3', 'parent again']\n"


def test_ctrl_c_ends_a_consumer_and_the_next_one_resumes_at_its_commits(cluster: LocalCluster, topic: str) -> None:
    with Producer(cluster.bootstrap()) as producer:
        for number in range(1_000):
            producer.send(topic, b"%d" % number, partition=0)
    text = """
seen = 0
try:
    with Consumer(bootstrap, topics=[topic], group="interrupted") as consumer:
        for record in consumer:
            print(int(record.value))
            seen += 1
            consumer.commit({TopicPartition(topic, 0): record.offset + 1})
            if seen == 20:
                print("ready", flush=True)
                time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    numbers: list[int] = []
    for _ in range(2):
        process = program(cluster, topic, text)
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
            numbers.append(int(line))
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        code, out, err = ended(process)
        assert (code, out, err) == (0, "interrupted\n", "")
        assert time.monotonic() - began < 15
    assert numbers == list(range(40))


def test_ctrl_c_ends_a_consumer_that_waits_for_records(cluster: LocalCluster, topic: str) -> None:
    process = program(
        cluster,
        topic,
        """
with Consumer(bootstrap, topics=[topic], group="waiting") as consumer:
    consumer.poll(100)
    try:
        print("ready", flush=True)
        next(consumer)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(next(consumer).value)
""",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)  # so that it waits, in all probability
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    with Producer(cluster.bootstrap()) as producer:
        producer.send(topic, b"v")
    assert ended(process) == (0, "b'v'\n", "")


def test_a_member_whose_script_ends_without_close_leaves_its_group_without_a_commit(
    cluster: LocalCluster, topic: str
) -> None:
    with Producer(cluster.bootstrap()) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
    process = program(
        cluster,
        topic,
        """
from minibroker.sync import RebalanceListener
class Listener(RebalanceListener):
    def on_partitions_revoked(self, partitions):
        print("told", flush=True)
consumer = Consumer(
    bootstrap, topics=[topic], group="left", listener=Listener(), enable_auto_commit=True, session_timeout_ms=60_000
)
consumer.start()
assert [next(consumer).value for _ in range(3)] == [b"0", b"1", b"2"]
consumer.commit({TopicPartition(topic, 0): 2})
""",
    )
    code, out, err = ended(process)
    assert (code, out, err) == (0, "", "")
    with Consumer(cluster.bootstrap(), topics=[topic], group="left") as consumer:
        began = time.monotonic()
        assert next(consumer).value == b"2"
        assert time.monotonic() - began < 30  # less than the session


def test_a_listeners_error_is_raised_in_the_thread_that_polls(cluster: LocalCluster, topic: str) -> None:
    class Failing(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            raise ZeroDivisionError

    with Producer(cluster.bootstrap()) as producer:
        producer.send(topic, b"v")
    with Consumer(cluster.bootstrap(), topics=[topic], group="failing", listener=Failing()) as consumer:
        with pytest.raises(ZeroDivisionError):
            next(consumer)
        assert next(consumer).value == b"v"
        committed = consumer.commit_nowait()
        committed.result(30)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_close_is_bounded_while_no_broker_answers(
    cluster: LocalCluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    bootstrap = cluster.bootstrap()
    producer, admin = Producer(bootstrap), Admin(bootstrap)
    consumer = Consumer(bootstrap, topics=[topic], group="paused", enable_auto_commit=True)
    for client in (producer, admin, consumer):
        client.start()
    producer.send(topic, b"v", partition=0).result()
    assert next(consumer).value == b"v"
    brokers = [BrokerId(number) for number in (1, 2, 3)]
    for broker in brokers:
        cluster.pause(broker)
    try:
        deliveries = [producer.send(topic, b"lost?") for _ in range(7)]
        began = time.monotonic()
        with pytest.raises(ApiTimedOut):
            producer.close(timeout_ms=1_000)
        assert time.monotonic() - began < 10
        for delivery in deliveries:
            with pytest.raises(Closed):
                delivery.result()
        assert "7 records were not acknowledged" in caplog.text
        began = time.monotonic()
        consumer.close(timeout_ms=1_000)
        assert time.monotonic() - began < 10
        assert "gave up leaving the group after 1.0 s" in caplog.text
        began = time.monotonic()
        admin.close()
        assert time.monotonic() - began < 5
    finally:
        for broker in brokers:
            cluster.resume(broker)
    with Admin(bootstrap) as again:
        until_true(lambda: len(again.describe_cluster().brokers) == 3, 60)


def have_reached(seen: dict[int, list[int]], goals: dict[int, int]) -> bool:
    return all(len(seen[name]) > goal for name, goal in goals.items())


def test_a_producer_and_a_consumer_continue_while_each_broker_is_killed_and_restarted(
    cluster: LocalCluster, topic: str
) -> None:
    bootstrap = cluster.bootstrap()
    stop = threading.Event()
    sent: list[int] = [0, 0]
    seen: dict[int, list[int]] = {0: [], 1: []}

    def send(producer: Producer, name: int) -> None:
        while not stop.is_set():
            producer.send(topic, b"%d %d" % (name, sent[name]), partition=name)
            sent[name] += 1
            if sent[name] % 20 == 0:
                stop.wait(0.01)

    def consume(consumer: Consumer) -> None:
        for record in consumer:
            name, number = (record.value or b"").split()
            seen[int(name)].append(int(number))
            if number == b"-1" and all(numbers and numbers[-1] == -1 for numbers in seen.values()):
                consumer.commit()
                return

    with Producer(bootstrap) as producer, Consumer(bootstrap, topics=[topic], group="restarts") as consumer:
        senders = [threading.Thread(target=send, args=(producer, name)) for name in (0, 1)]
        reader = threading.Thread(target=consume, args=(consumer,))
        for thread in (*senders, reader):
            thread.start()
        until_true(lambda: all(seen.values()), PATIENCE_S)
        for broker in (1, 2, 3):
            cluster.kill(BrokerId(broker))
            goals = {name: len(numbers) + 50 for name, numbers in seen.items()}
            until_true(partial(have_reached, seen, goals), PATIENCE_S)
            cluster.start(BrokerId(broker))
            until_true(
                lambda: len(cluster.view().brokers) == 3 and not cluster.view().under_replicated_partitions(),
                PATIENCE_S,
            )
        stop.set()
        for sender in senders:
            sender.join(PATIENCE_S)
        for name in (0, 1):
            producer.send(topic, b"%d -1" % name, partition=name)
        producer.flush()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    for name in (0, 1):
        # At least once: records without a commit when the coordinator was killed may be delivered again.
        assert list(dict.fromkeys(seen[name])) == [*range(sent[name]), -1]


def test_the_examples_of_the_sync_page_run_without_a_warning(cluster: LocalCluster, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "sync.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 6
    address = cluster.bootstrap().split(",")[0]
    told = []
    for number, example in enumerate(examples):
        script = tmp_path / f"example_{number}.py"
        script.write_text(example.replace("localhost:9092", address))
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-X", "dev", script], capture_output=True, text=True, timeout=PATIENCE_S
        )
        # asyncio's debug mode, which -X dev turns on, also logs slow steps, which other load can cause.
        warned = re.sub(r"^Executing <.* took [0-9.]+ seconds\n", "", ran.stderr, flags=re.MULTILINE)
        assert (ran.returncode, warned) == (0, ""), example
        told.append(ran.stdout)
    assert told[0].strip().isdigit()
    assert "of" in told[3]
    assert told[4].startswith("assigned: invoices-0 invoices-1 invoices-2\n")

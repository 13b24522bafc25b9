"""The metrics page: what it says, that it does not hold up the loop, and what its HTTP listener puts up with."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from minibroker.broker.groups.group import Group, MemberMetadata
from minibroker.broker.groups.records import OffsetValue
from minibroker.broker.groups.terms import GroupTerm
from minibroker.broker.metrics.disk_times import WINDOW_S, DiskTimes, TimedFile
from minibroker.broker.metrics.groups import MAX_OFFSETS, PART_OFFSETS, committed_offsets
from minibroker.broker.metrics.listener import (
    MAX_CONNECTIONS,
    MAX_DISCARDED_BYTES,
    MAX_REQUEST_BYTES,
    PATH,
    TIMEOUT_S,
    MetricsListener,
)
from minibroker.broker.metrics.loop_lag import PROBES_PER_WINDOW, LoopLag
from minibroker.broker.metrics.metrics import (
    CONTROLLER_STATES,
    PART_SAMPLES,
    REQUEST_BOUNDS_MS,
    error_metrics,
    exposition,
)
from minibroker.broker.metrics.running_time import RunningTime
from minibroker.broker.network.metrics import MAX_SOFTWARE, ApiMetrics, Times
from minibroker.broker.settings.parsing import broker_config
from minibroker.broker.settings.types import InvalidConfig
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.controller.decisions import events
from minibroker.deploy.simulator import kafka_connection
from minibroker.deploy.simulator.cluster import PORT as DATA_PORT
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.apis import DESCRIBE_HEALTH
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import ErrorCode, NetworkError
from minibroker.protocol.kafka.data import FETCH
from minibroker.protocol.kafka.metadata import API_VERSIONS
from minibroker.protocol.messages import (
    ApiVersionsRequest,
    Buffer,
    DescribeHealthRequest,
    FetchPartition,
    FetchRequest,
    FetchTopic,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import File, Network
from minibroker.protocol.world.real import RealDisk
from tests.running import run_by
from tests.simulation.scenarios.transactions.raw_transactions import RawProducer

PORT = 9404
TEXT = b"# a page\n" * 10_000
GET = f"GET {PATH} HTTP/1.1\r\nHost: broker\r\n\r\n".encode()
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Browser(asyncio.Protocol):
    """Keeps what it is sent, until the connection ends."""

    def __init__(self, ends_too: bool = True) -> None:
        self.received = bytearray()
        self.at_end = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._ends_too = ends_too

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        if not self.at_end.done():
            self.at_end.set_result(None)
        return not self._ends_too

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.at_end.done():
            self.at_end.set_result(None)

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        return bytes(self.received.partition(b"\r\n\r\n")[2])


async def ask(network: Network, host: str, data: bytes, *, ends: bool = False) -> Browser:
    browser = await network.connect(host, PORT, Browser)
    assert browser.transport is not None
    browser.transport.write(data)
    if ends:
        browser.transport.write_eof()
    await browser.at_end
    return browser


def with_listener(
    test: Callable[[MetricsListener, Network], Coroutine[Any, Any, None]],
    render: Callable[[], Awaitable[bytes]] | None = None,
) -> None:
    """`test` gets a listener on host `broker`, and the network of another host."""

    async def text() -> bytes:
        await asyncio.sleep(0.01)
        return TEXT

    async def scenario() -> None:
        simulation = Simulation()
        server = simulation.host("broker").start_process()
        client = simulation.host("client").start_process()
        listener = MetricsListener(server.network, render or text)

        async def start() -> None:
            await listener.bind("broker", PORT)
            listener.start()

        await server.process.run(start())
        await client.process.run(test(listener, client.network))
        await server.process.run(listener.close())
        assert server.network.connections == 0

    run(scenario())


# --- What the listener puts up with --------------------------------------------------------------------------------


@run_by(with_listener)
async def test_a_get_of_the_page_is_answered_in_whole_and_the_connection_ends(
    listener: MetricsListener, network: Network, /
) -> None:
    browser = await ask(network, "broker", GET)
    assert browser.status == 200
    assert browser.body == TEXT
    assert b"text/plain; version=0.0.4" in browser.received


@run_by(with_listener)
async def test_a_peer_that_has_ended_its_side_still_gets_its_answer(
    listener: MetricsListener, network: Network, /
) -> None:
    assert (await ask(network, "broker", GET, ends=True)).body == TEXT


@run_by(with_listener)
async def test_a_head_request_gets_the_length_and_no_body(listener: MetricsListener, network: Network, /) -> None:
    browser = await ask(network, "broker", GET.replace(b"GET", b"HEAD"))
    assert browser.status == 200
    assert browser.body == b""
    assert f"Content-Length: {len(TEXT)}".encode() in browser.received


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (GET.replace(PATH.encode(), b"/"), 404),
        (GET.replace(PATH.encode(), b"/metrics/../secret"), 404),
        (GET.replace(PATH.encode(), PATH.encode() + b"?name[]=up"), 200),
        (GET.replace(b"GET", b"DELETE"), 405),
        (GET.replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
        (GET.replace(b"HTTP/1.1", b"HTTP/one"), 400),
        (GET.replace(b"Host: broker\r\n", b""), 400),
        (GET.replace(b"Host", b"H\0st"), 400),
        (b"\x00\x00\x00\x05hello\r\n\r\n", 400),
        (b"\r\n" * 5_000, 400),
        (b"x" * (MAX_REQUEST_BYTES + 1), 431),
        (GET[:-2] + b"Cookie: " + b"x" * MAX_REQUEST_BYTES, 431),
        (GET[:-2] + b"Cookie: " + b"x" * (MAX_REQUEST_BYTES + 1_024) + b"\r\n\r\n", 431),
        (GET[:-2] + b"Cookie: " + b"x" * (MAX_REQUEST_BYTES - 1_024) + b"\r\n\r\n", 200),
        (GET[:-2] + b"Content-Length: 400000\r\n\r\n" + b"x" * 400_000, 200),
        (GET * 3, 200),
    ],
)
@run_by(with_listener)
async def test_bad_requests_are_answered_with_the_status_that_says_so(
    listener: MetricsListener, network: Network, /, request_bytes: bytes, status: int
) -> None:
    browser = await ask(network, "broker", request_bytes)
    assert browser.status == status
    assert (await ask(network, "broker", GET)).body == TEXT


@pytest.mark.parametrize("request_bytes", [b"", GET[:10], GET[:-1]])
@run_by(with_listener)
async def test_a_peer_that_ends_its_side_too_early_is_let_go(
    listener: MetricsListener, network: Network, /, request_bytes: bytes
) -> None:
    browser = await ask(network, "broker", request_bytes, ends=True)
    assert not browser.received or browser.status == 400


@run_by(with_listener)
async def test_a_peer_that_dawdles_is_closed_when_its_time_is_up(
    listener: MetricsListener, network: Network, /
) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    browser = await network.connect("broker", PORT, Browser)
    assert browser.transport is not None
    for byte in itertools.chain(GET[:-1], itertools.repeat(ord("x"))):
        if browser.at_end.done():
            break
        browser.transport.write(bytes([byte]))
        await asyncio.sleep(1)
    assert not browser.received
    assert TIMEOUT_S <= clock() - began <= TIMEOUT_S + 2


@run_by(with_listener)
async def test_a_peer_that_never_ends_its_side_is_closed_when_its_time_is_up(
    listener: MetricsListener, network: Network, /
) -> None:
    browser = await network.connect("broker", PORT, lambda: Browser(ends_too=False))
    assert browser.transport is not None
    browser.transport.write(GET)
    await asyncio.sleep(TIMEOUT_S + 1)
    assert browser.body == TEXT
    browser.transport.write(b"x")
    await asyncio.sleep(1)
    assert browser.transport.is_closing()


@run_by(with_listener)
async def test_a_peer_that_goes_on_sending_after_its_request_is_cut_off(
    listener: MetricsListener, network: Network, /
) -> None:
    browser = await network.connect("broker", PORT, lambda: Browser(ends_too=False))
    assert browser.transport is not None
    browser.transport.write(GET)
    sent = 0
    while not browser.transport.is_closing():
        browser.transport.write(b"x" * 100_000)
        sent += 100_000
        await asyncio.sleep(0.01)
    assert sent < 2 * MAX_DISCARDED_BYTES


@run_by(with_listener)
async def test_more_connections_than_allowed_are_refused_and_the_others_served(
    listener: MetricsListener, network: Network, /
) -> None:
    idle = [await network.connect("broker", PORT, Browser) for _ in range(MAX_CONNECTIONS - 1)]
    last = await network.connect("broker", PORT, Browser)
    refused = await ask(network, "broker", GET)
    assert not refused.received
    for browser in [*idle, last]:
        assert browser.transport is not None
        browser.transport.write(GET)
        await browser.at_end
        assert browser.body == TEXT
    assert (await ask(network, "broker", GET)).body == TEXT


def test_scrapes_are_rendered_one_after_the_other() -> None:
    rendering = itertools.count(1)
    at_once = 0

    async def render() -> bytes:
        nonlocal at_once
        at_once += 1
        assert at_once == 1
        await asyncio.sleep(0.1)
        at_once -= 1
        return b"%d" % next(rendering)

    async def test(listener: MetricsListener, network: Network) -> None:
        browsers = await asyncio.gather(*(ask(network, "broker", GET) for _ in range(5)))
        assert sorted(browser.body for browser in browsers) == [b"1", b"2", b"3", b"4", b"5"]

    with_listener(test, render)


def test_a_scrape_that_fails_is_answered_with_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def render() -> bytes:
        raise ValueError("a broken gauge")

    async def test(listener: MetricsListener, network: Network) -> None:
        assert (await ask(network, "broker", GET)).status == 500

    with_listener(test, render)
    assert "a broken gauge" in caplog.text


def test_close_ends_scrapes_that_are_under_way() -> None:
    async def render() -> bytes:
        await asyncio.sleep(5)
        return b""

    async def test(listener: MetricsListener, network: Network) -> None:
        browser = await network.connect("broker", PORT, Browser)
        assert browser.transport is not None
        browser.transport.write(GET)
        await asyncio.sleep(0.1)

    with_listener(test, render)


@run_by(with_listener)
async def test_a_port_that_is_taken_is_named_with_the_remedy(listener: MetricsListener, network: Network, /) -> None:
    with pytest.raises(NetworkError, match=r"metrics.listener cannot listen on broker:9404: .* Give it a free port"):
        await MetricsListener(network, lambda: asyncio.sleep(0, b"")).bind("broker", PORT)


# --- What the page says --------------------------------------------------------------------------------------------


def samples(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


class Families(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def gauge(name: str, numbers: range) -> Metric:
    family = GaugeMetricFamily(name, "A number.", labels=["number"])
    for number in numbers:
        family.add_metric([f'"{number}"\n'], number)
    return family


def test_parts_of_a_family_are_one_family_in_the_text() -> None:
    parts = [gauge("a", range(3)), gauge("a", range(3, 5)), gauge("b", range(2)), gauge("c", range(0))]
    whole = [gauge("a", range(5)), gauge("b", range(2)), gauge("c", range(0))]
    text = run(exposition(parts, lambda: 0.0))
    assert text == generate_latest(Families(whole))


def test_refused_batches_are_counted_by_error_beside_failed_handlers() -> None:
    produce, fetch = ApiMetrics("Produce"), ApiMetrics("Fetch")
    produce.errors, fetch.errors = 4, 2
    family = error_metrics([produce, fetch], {ErrorCode.NOT_ENOUGH_REPLICAS: 3, ErrorCode.UNKNOWN_SERVER_ERROR: 1})
    assert {(each.labels["request"], each.labels["error"]): each.value for each in family.samples} == {
        ("Produce", "UNKNOWN_SERVER_ERROR"): 5,
        ("Fetch", "UNKNOWN_SERVER_ERROR"): 2,
        ("Produce", "NOT_ENOUGH_REPLICAS"): 3,
    }


def test_a_duration_is_counted_by_the_smallest_bound_that_it_does_not_exceed() -> None:
    times = Times()
    for duration_s in (0.0, 0.0005, 0.00051, 10.0, 11.0):
        times.add(duration_s)
    assert times.counts == [2, 1, *[0] * 11, 1, 1]
    assert times.sum_s == pytest.approx(21.00101)


def test_the_loop_gets_its_turn_whenever_a_slice_is_over() -> None:
    """Every part takes 0.6 ms here, so two of them are a slice."""
    time_s = 0.0
    turns: list[int] = []
    made = 0

    def parts() -> Iterator[Metric]:
        nonlocal time_s, made
        for _ in range(20):
            time_s += 0.0006
            made += 1
            yield gauge("a", range(PART_SAMPLES))

    async def scenario() -> None:
        async def others() -> None:
            while True:
                turns.append(made)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(others())
        await exposition(parts(), lambda: time_s)
        task.cancel()

    run(scenario())
    steps = {after - before for before, after in itertools.pairwise(turns)}
    assert steps <= {0, 2}
    assert made == 20


def test_every_event_of_the_controller_has_a_state_in_which_its_time_counts() -> None:
    def leaves(event: type[events.Event]) -> list[str]:
        below = [name for child in event.__subclasses__() for name in leaves(child)]
        return below or [event.__name__]

    assert set(CONTROLLER_STATES) == {*leaves(events.Event), "Resignation"}


def test_lag_is_counted_in_buckets_and_its_maximum_forgets() -> None:
    lag = LoopLag(time.monotonic)
    for lag_s in (0.0, 0.001, 0.0011, 7.0):
        lag.observe(lag_s)
    assert lag.counts[:2] == [2, 1]
    assert lag.counts[-1] == 1
    assert lag.sum_s == pytest.approx(7.0021)
    assert lag.max_s == 7.0
    for _ in range(PROBES_PER_WINDOW):
        lag.observe(0.5)
    assert lag.max_s == 7.0
    for _ in range(PROBES_PER_WINDOW):
        lag.observe(0.25)
    assert lag.max_s == 0.5


@pytest.mark.parametrize("value", ["9404", "host:", "host:port", ":9404", "host:65536", "http://host:1"])
def test_a_malformed_listener_is_named(value: str) -> None:
    with pytest.raises(InvalidConfig, match="metrics.listener"):
        broker_config(
            {"broker.id": "1", "log.dirs": "/d", "zookeeper.connect": "z:2181", "metrics.listener": value},
        )


@run_by(on_virtual_loop)
async def test_a_broker_counts_what_a_producer_and_a_consumer_send_and_read() -> None:
    cluster = VirtualCluster(Simulation(), 2, {"metrics.listener": f"0.0.0.0:{PORT}"})
    await cluster.start()
    world = cluster.client("client")

    async def scrape(broker_id: int) -> Samples:
        return samples((await ask(world.network, f"broker-{broker_id}", GET)).body)

    async def traffic() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=2)
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(10):
                await producer.send("orders", b"%d" % number)
        async with Consumer(cluster.bootstrap, topics=["orders"], world=world) as consumer:
            count = 0
            async for _ in consumer:
                count += 1
                if count == 10:
                    break

    async def program() -> None:
        before = [await scrape(broker_id) for broker_id in (0, 1)]
        await traffic()
        pages = [await scrape(broker_id) for broker_id in (0, 1)]
        assert all(page.keys() >= earlier.keys() for page, earlier in zip(pages, before, strict=True))

        def value(page: Samples, name: str, **labels: str) -> float:
            return page[name, frozenset(labels.items())]

        [leader] = [page for page in pages if value(page, "kafka_server_replicamanager_leadercount") == 1]
        [follower] = [page for page in pages if value(page, "kafka_server_replicamanager_leadercount") == 0]
        topic = "kafka_server_brokertopicmetrics_"
        in_bytes = value(leader, f"{topic}bytesin_total", topic="orders")
        assert value(leader, f"{topic}messagesin_total", topic="orders") == 10
        assert value(leader, f"{topic}bytesout_total", topic="orders") == in_bytes
        assert value(leader, f"{topic}replicationbytesout_total", topic="orders") == in_bytes
        assert value(follower, f"{topic}replicationbytesin_total", topic="orders") == in_bytes
        assert value(follower, f"{topic}bytesin_total", topic="orders") == 0
        for page in pages:
            assert value(page, "kafka_log_log_size", topic="orders", partition="0") == in_bytes
            assert value(page, "kafka_log_log_logendoffset", topic="orders", partition="0") == 10
            assert value(page, "kafka_server_replicamanager_partitioncount") == 1
            assert value(page, "kafka_server_replicamanager_underreplicatedpartitions") == 0
        requests = "kafka_network_requestmetrics_"
        assert value(leader, f"{requests}requests_total", request="Produce") == 10
        assert value(leader, f"{requests}totaltimems_count", request="Produce") == 10
        phases = ("requestqueuetimems", "localtimems", "remotetimems", "responsesendtimems")
        sums = [value(leader, f"{requests}{phase}_sum", request="Produce") for phase in phases]
        assert sum(sums) == pytest.approx(value(leader, f"{requests}totaltimems_sum", request="Produce"))
        assert sums[2] > 0  # acks=all: a follower's fetch completed it
        for phase in ("totaltimems", *phases[:3]):
            buckets = [value(leader, f"{requests}{phase}_bucket", request="Produce", le=le) for le in REQUEST_BOUNDS_MS]
            assert buckets == sorted(buckets)
            assert buckets[-1] == value(leader, f"{requests}{phase}_count", request="Produce") == 10
        unused = [
            labels for name, labels in leader if name.endswith("_bucket") and ("request", "AlterConfigs") in labels
        ]
        assert unused == [frozenset({("request", "AlterConfigs"), ("le", "+Inf")})] * 4
        [controller] = cluster.active_controllers()
        for broker_id, page in enumerate(pages):
            active = int(broker_id == controller)
            assert value(page, "kafka_controller_kafkacontroller_activecontrollercount") == active
            assert value(page, "kafka_controller_kafkacontroller_globalpartitioncount") == active
            name = "kafka_controller_controllerstats_controllerchangerateandtimems_count"
            assert value(page, name) == active
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.delete_topic("orders")
        for broker_id in (0, 1):
            while any(dict(labels).get("topic") == "orders" for _, labels in await scrape(broker_id)):
                await asyncio.sleep(0.1)

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_the_page_has_what_the_lag_of_a_group_is_computed_from() -> None:
    settings = {"metrics.listener": f"0.0.0.0:{PORT}", "offsets.topic.replication.factor": "1"}
    cluster = VirtualCluster(Simulation(), 1, settings)
    await cluster.start()
    world = cluster.client("client")

    async def program() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=1)
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(10):
                await producer.send("orders", b"%d" % number)
        async with Consumer(cluster.bootstrap, topics=["orders"], group="billing", world=world) as consumer:
            async for record in consumer:
                if record.offset == 6:
                    break
            await consumer.commit({TopicPartition("orders", 0): 7})
        page = samples((await ask(world.network, "broker-0", GET)).body)
        orders = {("topic", "orders"), ("partition", "0")}
        assert page["minibroker_partition_high_watermark", frozenset(orders)] == 10
        assert page["minibroker_group_committed_offset", frozenset({*orders, ("group", "billing")})] == 7
        assert page["minibroker_group_committed_offsets_left_out", frozenset()] == 0

    await world.process.run(program())


def test_the_page_bounds_committed_offsets_and_leaves_out_groups_without_members_first() -> None:
    def group(name: str, offsets: int, members: int = 0) -> Group:
        made = Group(name)
        for partition in range(offsets):
            made.offsets.load(TopicPartition("orders", partition), OffsetValue(7, -1, "", 0), partition, 0.0)
        for member in range(members):
            made.members[str(member)] = MemberMetadata(str(member), None, "client", "host", 1_000, 500, ())
        return made

    term = GroupTerm(TopicPartition("__consumer_offsets", 0), 0, 0, 0)
    for each in (group("idle", 20), group("g" * 250, 3, 1), group("busy", MAX_OFFSETS - 5, 1), group("more", 9)):
        term.groups[each.group_id] = each
    *parts, left_out = committed_offsets([term])
    shown = Counter(sample.labels["group"] for part in parts for sample in part.samples)
    assert shown == {"busy": MAX_OFFSETS - 5, "idle": 5}
    assert left_out.samples[0].value == 20 - 5 + 9 + 3
    assert max(len(part.samples) for part in parts) == PART_OFFSETS


@run_by(on_virtual_loop)
async def test_the_page_counts_transactions_and_what_waits_for_them() -> None:
    settings = {
        "transaction.partition.verification.enable": "false",
        "transaction.max.timeout.ms": "60000",
        "transaction.state.log.replication.factor": "1",
    }
    cluster = VirtualCluster(Simulation(), 1, {"metrics.listener": f"0.0.0.0:{PORT}", **settings})
    await cluster.start()
    world = cluster.client("client")
    late = "kafka_server_replicamanager_partitionswithlatetransactionscount"
    coordinator = "minibroker_transaction_coordinator_"

    async def scrape() -> dict[tuple[str, str], float]:
        """Return the values by name and topic, or state."""
        page = samples((await ask(world.network, "broker-0", GET)).body)
        return {(name, dict(of).get("topic", dict(of).get("state", ""))): value for (name, of), value in page.items()}

    async def program() -> None:
        orders = TopicPartition("orders", 0)
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=1)
        producer = RawProducer(cluster, world)
        producer.timeout_ms = 60_000
        assert await producer.init() is ErrorCode.NONE
        for committed in (True, False, False):
            assert await producer.send(orders, b"1", b"2") is ErrorCode.NONE
            page = await scrape()
            assert page["kafka_cluster_partition_laststableoffsetlag", "orders"] == 2
            assert (page[f"{coordinator}ids", "Ongoing"], page[f"{coordinator}ids", "Empty"]) == (1, 0)
            assert await producer.end(committed=committed) is ErrorCode.NONE
            await producer.until_state("CompleteCommit" if committed else "CompleteAbort")
        page = await scrape()
        assert page["kafka_cluster_partition_laststableoffsetlag", "orders"] == 0
        counts = {name: page[f"{coordinator}{name}_total", ""] for name in ("committed", "aborted", "timed_out")}
        assert counts == {"committed": 1, "aborted": 2, "timed_out": 0}
        assert page["kafka_server_transaction_coordinator_metrics_partition_load_time_ms_count", ""] == 50

        assert await producer.send(orders, b"times out") is ErrorCode.NONE
        hanging = RawProducer(cluster, world, "hangs", raises_epoch=False)
        assert await hanging.init() is ErrorCode.NONE
        assert await hanging.send(orders, b"hangs") is ErrorCode.NONE
        await producer.until_state("CompleteAbort", within_s=90)
        page = await scrape()
        assert (page[f"{coordinator}timed_out_total", ""], page[late, ""]) == (1, 0)
        await asyncio.sleep(6 * 60)
        page = await scrape()
        assert page[late, ""] == 1
        assert page["kafka_cluster_partition_laststableoffsetlag", "orders"] == 2

    await world.process.run(program())


class SlowFile:
    """A file whose calls take so long, by its clock."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.now_s = 100.0
        self.takes_s = 0.0
        self.in_a_flush: Callable[[], None] = lambda: None
        self.pread, self.size, self.modified_ms = file.pread, file.size, file.modified_ms
        self.set_modified_ms, self.truncate, self.close = file.set_modified_ms, file.truncate, file.close

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        self.now_s += self.takes_s
        return self._file.pwrite(data, position)

    def fdatasync(self) -> None:
        self.now_s += self.takes_s
        self.in_a_flush()
        self._file.fdatasync()


def test_writes_and_flushes_that_take_a_second_are_remembered_for_twenty(tmp_path: Path) -> None:
    (tmp_path / "d1").mkdir()
    slow = SlowFile(RealDisk().open(f"{tmp_path}/d1/f", create=True))
    times = DiskTimes([f"{tmp_path}/d", f"{tmp_path}/d1"], lambda: slow.now_s)
    file = TimedFile(slow, f"{tmp_path}/d1/f", times)

    def found() -> list[tuple[str, int, float, str]]:
        return [(Path(path).name, calls, round(s, 3), call) for path, calls, s, call in times.slow()]

    def heal() -> None:
        times.healed(f"{tmp_path}/d1")
        under_way.extend(found())

    slow.takes_s = 0.9
    assert file.pwrite([b"abc"], 0) == 3
    file.fdatasync()
    assert found() == []
    slow.takes_s = 1.2
    file.pwrite([b"abc"], 3)
    assert found() == [("d1", 1, 1.2, "write")]
    slow.takes_s = 2.5
    under_way: list[object] = []
    slow.in_a_flush = lambda: under_way.extend(found())
    file.fdatasync()
    assert under_way == [("d1", 2, 2.5, "flush")], "one that hangs counts before it has ended"
    assert found() == [("d1", 2, 2.5, "flush")]
    slow.now_s += WINDOW_S - 1
    assert found() == [("d1", 1, 2.5, "flush")]
    slow.now_s += 2
    assert found() == []
    assert times.totals == {f"{tmp_path}/d": 0, f"{tmp_path}/d1": 2}
    file.pwrite([b"abc"], 3)
    under_way.clear()
    slow.in_a_flush = heal
    file.fdatasync()
    assert (under_way, found()) == ([], []), "a healed disk is forgotten, and with it what began before"
    slow.in_a_flush = lambda: None
    file.fdatasync()
    assert found() == [("d1", 1, 2.5, "flush")]
    assert file.pread(6, 0) == b"abcabc"
    file.close()


def test_time_in_which_the_process_does_not_run_does_not_count() -> None:
    now_s = 100.0
    running = RunningTime(lambda: now_s)
    for elapsed_s in (0.05, 0.1, 0.1):
        now_s += elapsed_s
        running.tick()
    began_s = running.seconds()
    assert began_s == pytest.approx(0.25)
    now_s += 5
    assert running.seconds() == pytest.approx(0.45), "a call that ends before the thread wakes up does not count it"
    running.tick()
    now_s += 0.1
    assert running.seconds() - began_s == pytest.approx(0.3)


@run_by(on_virtual_loop)
async def test_a_broker_tells_for_how_long_and_how_often_it_has_not_reached_zookeeper() -> None:
    cluster = VirtualCluster(Simulation(), 1, {"metrics.listener": f"0.0.0.0:{PORT}"})
    await cluster.start()
    world = cluster.client("client")

    async def away_s() -> tuple[float, float]:
        page = samples((await ask(world.network, "broker-0", GET)).body)
        connection = await open_connection(world.network, "broker-0", DATA_PORT, client_id="t", timeout_s=1)
        health = await connection.request(DESCRIBE_HEALTH, DescribeHealthRequest())
        assert (health.broker_id, health.zookeeper_session_timeout_ms) == (0, 6_000)
        return page["minibroker_zookeeper_away_seconds", frozenset()], health.zookeeper_away_ms / 1_000

    async def losses() -> tuple[float, int]:
        page = samples((await ask(world.network, "broker-0", GET)).body)
        connection = await open_connection(world.network, "broker-0", DATA_PORT, client_id="t", timeout_s=1)
        health = await connection.request(DESCRIBE_HEALTH, DescribeHealthRequest())
        return page["minibroker_zookeeper_connection_losses_total", frozenset()], health.zookeeper_losses

    async def program() -> None:
        assert await away_s() == (0, -0.001)
        cluster.simulation.zookeeper.cut("broker-0")
        for cut_s, elapsed_s in ((4, 4), (20, 16)):  # the session lasts for 6
            await asyncio.sleep(elapsed_s)
            assert await away_s() == pytest.approx((cut_s, cut_s), abs=0.2)
        cluster.simulation.zookeeper.uncut("broker-0")
        async with asyncio.timeout(30):
            while await away_s() != (0, -0.001):
                await asyncio.sleep(0.1)
        assert await losses() == (1, 1)
        shorter_than_a_session_s, recent_s = 2, 60
        for change in (cluster.simulation.zookeeper.cut, cluster.simulation.zookeeper.uncut) * 3:
            change("broker-0")
            await asyncio.sleep(shorter_than_a_session_s)
        assert await losses() == (4, 4)
        await asyncio.sleep(recent_s)
        assert await losses() == (4, 0)

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_the_page_names_the_software_of_kafkas_clients_and_not_more_kinds_than_are_allowed() -> None:
    cluster = VirtualCluster(Simulation(), 1, {"metrics.listener": f"0.0.0.0:{PORT}"})
    await cluster.start()
    world = cluster.client("client")

    async def program() -> None:
        for number in range(MAX_SOFTWARE + 3):
            connection = await kafka_connection.connect(world.network, "broker-0", DATA_PORT)
            await connection.request(API_VERSIONS, 3, ApiVersionsRequest("librdkafka", f"2.{number}"))
        page = samples((await ask(world.network, "broker-0", GET)).body)
        name = "kafka_server_socket_server_metrics_connections"
        counts = {
            dict(labels)["clientsoftwareversion"]: value for (family, labels), value in page.items() if family == name
        }
        assert len(counts) == MAX_SOFTWARE + 1
        assert (counts["2.0"], counts["other"]) == (1, 3)

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_the_page_tells_the_connections_of_each_listener_and_the_delays_of_those_that_came_too_fast() -> None:
    settings = {
        "metrics.listener": f"0.0.0.0:{PORT}",
        "listener.name.plaintext.max.connection.creation.rate": "2",
        "connections.max.idle.ms": "1000",
    }
    cluster = VirtualCluster(Simulation(), 1, settings)
    await cluster.start()
    world = cluster.client("client")

    async def program() -> None:
        prefix = "kafka_server_socket_server_metrics_"

        async def measured(name: str, listener: str = "PLAINTEXT") -> float:
            page = samples((await ask(world.network, "broker-0", GET)).body)
            return page[f"{prefix}{name}", frozenset({("listener", listener)})]

        before = await measured("connection_accept_total")
        for _ in range(4):
            connection = await kafka_connection.connect(world.network, "broker-0", DATA_PORT)
            await connection.request(API_VERSIONS, 3, ApiVersionsRequest("librdkafka", "2"))
        assert await measured("connection_accept_total") == before + 4
        assert await measured("connection_accept_throttle_time_count") >= 2
        assert 500 < await measured("connection_accept_throttle_time_sum") < 3_000
        assert await measured("ip_connection_accept_throttle_time_count") == 0
        assert await measured("connection_accept_throttle_time_count", "CONTROLLER") == 0
        assert await measured("connection_count") >= 1
        await asyncio.sleep(5)
        assert await measured("connection_count") == 0

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_the_page_tells_what_was_turned_into_records_for_kafkas_clients() -> None:
    cluster = VirtualCluster(Simulation(), 1, {"metrics.listener": f"0.0.0.0:{PORT}"})
    await cluster.start()
    world = cluster.client("client")

    async def program() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=1)
        async with Producer(cluster.bootstrap, world=world) as producer:
            await producer.send("orders", b"native")
        connection = await kafka_connection.connect(world.network, "broker-0", DATA_PORT)
        asked = FetchRequest(
            -1, 0, 1, 1 << 20, 0, [FetchTopic("orders", "", [FetchPartition(0, -1, 0, -1, -1, 1 << 20)])]
        )
        made = 0
        for _ in range(2):
            made = len((await connection.request(FETCH, 11, asked)).responses[0].partitions[0].records)
        page = samples((await ask(world.network, "broker-0", GET)).body)
        told = {
            (name.removeprefix("minibroker_transcoding_"), dict(labels).get("request")): value
            for (name, labels), value in page.items()
            if name.startswith("minibroker_transcoding_") and not name.endswith("_created")
        }
        assert told.pop(("seconds_total", "Fetch")) >= 0
        assert told == {
            ("records_total", "Fetch"): 1,
            ("bytes_total", "Fetch"): made,
            ("records_total", "Produce"): 0,
            ("bytes_total", "Produce"): 0,
            ("seconds_total", "Produce"): 0,
            ("cache_hits_total", None): 1,
            ("cache_misses_total", None): 1,
            ("cache_bytes", None): made,
        }

    await world.process.run(program())

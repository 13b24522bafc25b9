"""The console's readings and its web edge."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Scope

from minibroker.client.administering.requests import ClusterDescription
from minibroker.client.errors import Closed, InvalidSetting
from minibroker.deploy.console import command, edge, reading
from minibroker.deploy.console.command import listen
from minibroker.deploy.console.connections import BoundedProtocol
from minibroker.deploy.console.edge import HEADERS, Console, Server, host_name
from minibroker.deploy.console.faults import Faults
from minibroker.deploy.console.reading import Reader
from minibroker.deploy.console.sampling import Sampler, Sight
from minibroker.deploy.console.shared import MAX_KEPT, MAX_PAUSE_S, NOT_IN_TIME, Look, Pace, Readings, Shared
from minibroker.deploy.console.state import ClusterState, Groups, Timeline
from minibroker.deploy.console.views import Query
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file, injected
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.observing.status import ControllerStatus, Status, ZooKeeperStatus
from minibroker.protocol.errors import MinibrokerError, NetworkError
from tests.waiting import until

NO_QUERY = Query()
UNHURRIED = Pace(share=1_000)
"""These tests share the process's time with others."""


class Cluster:
    """Answers like the Reader of a cluster without brokers, or raises."""

    def __init__(self) -> None:
        self.reads = 0
        self.queries: list[Query] = []
        self.under_way = 0
        self.most_at_once = 0
        self.epoch = 1
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def cluster(self, query: Query = NO_QUERY, health: Status | None = None) -> ClusterState:
        self.queries.append(query)
        self.reads += 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            await asyncio.sleep(0)
            await self.answers.wait()
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        return ClusterState(ClusterDescription("c", None, (), self.epoch), {}, {}, {}, {})

    silent: tuple[int, ...] = ()

    async def timeline(self) -> Timeline:
        return Timeline(0, [], {})

    async def look(self) -> Sight:
        return Sight({}, 0, 0, 0, {})

    def machine_has_changed(self) -> bool:
        return False

    def timeline_in_files(self) -> Timeline | None:
        return None

    async def groups(self, query: Query) -> Groups:
        return Groups((), {}, 0, ())


def _console(cluster: Cluster, faults: Faults | None = None, health: Callable[[], Status] | None = None) -> Console:
    reader: Any = cluster
    return Console(reader, Sampler(reader.look, None), faults, UNHURRIED, health)


def _application(cluster: Cluster) -> Starlette:
    return _console(cluster).application("127.0.0.1")


class Request:
    """A request to an ASGI application, and what it has sent so far."""

    def __init__(
        self,
        application: Starlette,
        path: str,
        host: str | None = "127.0.0.1:8080",
        method: str = "GET",
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
    ) -> None:
        path, _, query = path.partition("?")
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._left = asyncio.Event()
        self._given: bytes | None = body
        given = ([] if host is None else [("host", host)]) + list(headers.items())
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8080),
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(application(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._given is not None:
            given, self._given = self._given, None
            return {"type": "http.request", "body": given, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    async def leave(self) -> None:
        self._left.set()
        await self.task

    async def ended(self) -> Request:
        await self.task
        return self


async def test_viewers_share_one_reading_at_a_time() -> None:
    cluster = Cluster()
    shared = Shared(cluster.cluster, 0.01)
    first = await asyncio.gather(*(shared.after(0) for _ in range(20)))
    assert {reading.number for reading in first} == {1}
    assert cluster.reads == 1
    await asyncio.gather(*(shared.after(1) for _ in range(20)))
    assert (cluster.reads, cluster.most_at_once) == (2, 1)


async def test_a_reading_that_fails_keeps_the_value_before_and_its_time() -> None:
    outcomes: list[str | MinibrokerError] = ["a state", MinibrokerError("no broker answers")]

    async def read() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MinibrokerError):
            raise outcome
        return outcome

    shared = Shared(read, 0.0)
    good = await shared.after(0)
    assert good.read_at_ms is not None
    assert abs(good.read_at_ms - time.time() * 1_000) < 60_000
    assert await shared.after(1) == replace(good, number=2, error="no broker answers")


async def test_a_viewer_that_leaves_in_the_middle_of_its_reading_does_not_block_the_others() -> None:
    cluster = Cluster()
    cluster.answers.clear()
    shared = Shared(cluster.cluster, 0.0)
    leaving = asyncio.create_task(shared.after(0))
    staying = asyncio.create_task(shared.after(0))
    await until(lambda: cluster.under_way == 1)
    leaving.cancel()
    cluster.answers.set()
    assert (await staying).number == 1


async def test_a_cluster_that_cannot_be_read_keeps_its_last_state_until_it_recovers() -> None:
    cluster = Cluster()
    shared = Shared(cluster.cluster, 0.0)
    cluster.error = NetworkError("no broker")
    assert ((await shared.after(0)).value, (await shared.after(0)).error) == (None, "no broker")
    cluster.error = None
    found = await shared.after(1)
    assert found.error is None
    cluster.error = TimeoutError()
    lost = await shared.after(found.number)
    assert (lost.value, lost.error) == (found.value, NOT_IN_TIME)


async def test_a_page_does_not_wait_for_a_cluster_that_hangs_and_says_so() -> None:
    cluster = Cluster()
    shared = Shared(cluster.cluster, 0.0)
    found = await shared.after(0)
    cluster.answers.clear()
    hanging = await shared.soon(0.01)
    assert (hanging.value, hanging.error) == (found.value, NOT_IN_TIME)
    cluster.answers.set()
    assert (await shared.soon(60)).error is None


async def test_an_expensive_reading_is_followed_by_a_pause_in_which_the_last_one_is_shown() -> None:
    cluster = Cluster()
    used_s = 0.0

    async def read() -> ClusterState:
        nonlocal used_s
        used_s += 0.002
        return await cluster.cluster()

    clock = asyncio.get_running_loop().time
    shared = Shared(read, 0.0, pace=Pace(0.02, lambda: used_s, burst_s=0.0))
    began_s = clock()
    first = await shared.after(0)
    await shared.after(first.number)
    assert clock() - began_s >= 0.1
    used_s += 1.0
    assert (await shared.soon(60)).number == 2
    assert cluster.reads == 2


class Expensive(Cluster):
    """A reading takes 0.08 s of processor time."""

    used_s = 0.0

    async def cluster(self, query: Query = NO_QUERY, health: Status | None = None) -> ClusterState:
        self.used_s += 0.08
        return await super().cluster(query, health)


async def test_a_page_that_is_read_less_often_says_of_when_it_is() -> None:
    cluster = Expensive()
    reader: Any = cluster
    pace = Pace(0.02, lambda: cluster.used_s, burst_s=0.0)
    large = Console(reader, Sampler(reader.look, None), None, pace).application("127.0.0.1")
    page = (await Request(large, "/").ended()).body.decode()
    assert re.search(r"As of \d\d:\d\d:\d\d UTC\. .* follows within 4 s\.", page)
    small = (await Request(_application(Cluster()), "/").ended()).body.decode()
    assert '<section id="section-age"></section>' in small
    assert (await Shared(cluster.cluster, 5.0).after(0)).next_in_s == 0, "not every page is to follow closely"


async def test_the_first_reading_does_not_pay_for_those_of_others() -> None:
    cluster = Cluster()
    used_s = 0.0
    pace = Pace(0.02, lambda: used_s, burst_s=0.0)
    used_s += 10.0
    assert pace.pause_s() == MAX_PAUSE_S
    began_s = asyncio.get_running_loop().time()
    assert (await Shared(cluster.cluster, 0.0, pace=pace).soon(60)).number == 1
    assert asyncio.get_running_loop().time() - began_s < MAX_PAUSE_S / 2


async def test_a_look_is_taken_beside_a_reading_which_waits_for_the_first_one_only() -> None:
    answers: list[int | Exception] = [1, 1, NetworkError("no broker"), ZeroDivisionError("a fault of ours"), 2]
    may_end = threading.Event()
    may_end.set()

    def take() -> int:
        may_end.wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    look = Look(take, 0.0, 1_000.0)
    look.begin()
    await look.first(60)
    assert (look.value, look.error, look.version) == (1, None, 1)
    may_end.clear()
    look.begin()
    await look.first(60)
    assert look.version == 1
    may_end.set()
    await until(lambda: len(answers) == 3)
    for version, value, error in ((2, None, "no broker"), (3, None, "fault of the console"), (4, 2, None)):
        while look.version < version:
            look.begin()
            await asyncio.sleep(0)
        assert (look.value, look.version) == (value, version)
        assert (error or "") in (look.error or "")


async def test_what_a_look_has_found_is_forgotten_after_a_rest_and_then_looked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    may_end.set()
    answers = [1, 2]

    def take() -> int:
        may_end.wait()
        return answers.pop(0)

    look = Look(take, 60.0, 1_000.0)
    assert not look.is_known
    look.begin()
    await look.first(60)
    look.begin()
    assert (look.value, look.is_known, look.version) == (1, True, 1)
    monkeypatch.setattr("minibroker.deploy.console.shared.REST_S", -1.0)  # any time is longer
    may_end.clear()
    look.begin()
    assert (look.value, look.is_known, look.version) == (None, False, 2)
    may_end.set()
    await look.first(60)
    assert (look.value, look.is_known, look.version) == (2, True, 3)


async def test_a_page_that_nobody_follows_waits_for_a_new_look_or_says_of_when_the_problems_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minibroker.deploy.console.shared.ALONE_S", -1.0)  # any time is longer
    monkeypatch.setattr(edge, "EVERY_S", 0.0)
    down = ZooKeeperStatus("127.0.0.1:2181", None, False, False, False)
    status = Status([], ControllerStatus(None, None), down, None, None)
    may_end = threading.Event()
    may_end.set()

    def look() -> Status:
        may_end.wait()
        return status

    application = _console(Cluster(), health=look).application("127.0.0.1")

    async def heading() -> str:
        page = (await Request(application, "/").ended()).body.decode()
        return page.partition('<section id="section-problems"><h2>')[2].partition("</h2>")[0]

    assert await heading() == "1 problem"
    may_end.clear()
    monkeypatch.setattr(edge, "HEALTH_IS_OLD_AFTER_S", 0.0)
    assert re.fullmatch(r"1 problem, as of \d\d:\d\d:\d\d UTC", await heading())
    may_end.set()
    async with asyncio.timeout(60):
        while await heading() != "1 problem":
            await asyncio.sleep(0)


async def test_a_page_that_waits_for_one_broker_names_it() -> None:
    cluster = Cluster()
    cluster.error = TimeoutError()
    application = _application(cluster)
    assert b"No broker answers" in (await Request(application, "/").ended()).body
    cluster.silent = (2,)
    page = (await Request(application, "/").ended()).body
    assert b"Broker 2 does not answer" in page
    assert b"No broker answers" not in page


async def test_the_overview_shows_problems_also_if_no_broker_answers() -> None:
    cluster = Cluster()
    cluster.error = NetworkError("no broker")
    zookeeper = ZooKeeperStatus("127.0.0.1:2181", None, False, False, False)
    status = Status([], ControllerStatus(None, None), zookeeper, None, None)
    console = _console(cluster, health=lambda: status)
    page = (await Request(console.application("127.0.0.1"), "/").ended()).body.decode()
    assert "No broker answers" in page
    assert "the cluster is down: <code>minibroker up</code>" in page


async def test_news_of_a_process_end_the_pause_after_an_expensive_reading() -> None:
    cluster = Cluster()
    used_s, is_urgent = 0.0, False
    clock = asyncio.get_running_loop().time
    pace = Pace(0.02, lambda: used_s, burst_s=0.0)
    shared = Shared(cluster.cluster, 0.01, pace=pace, is_urgent=lambda: is_urgent)
    first = await shared.after(0)
    used_s += 1.0
    began_s = clock()
    second = asyncio.create_task(shared.after(first.number))
    await asyncio.sleep(0.05)
    assert not second.done()
    is_urgent = True
    await second
    assert clock() - began_s < 2


def test_a_pause_has_a_limit_and_savings_are_spent_before_there_is_one() -> None:
    now_s, used_s = 0.0, 0.0
    pace = Pace(0.02, lambda: used_s, 0.1, lambda: now_s)
    used_s = 0.09
    assert pace.pause_s() == 0
    used_s += 0.03
    assert pace.pause_s() == pytest.approx(1.0)
    now_s += 0.5
    assert pace.pause_s() == pytest.approx(0.5)
    used_s += 100
    assert pace.pause_s() == 5.0
    now_s += 1_000
    assert pace.pause_s() == 0
    used_s += 0.1
    assert pace.pause_s() == 0, "a tenth of a second has been saved, and not more"
    used_s += 0.01
    assert pace.pause_s() > 0


async def test_a_look_that_began_before_a_change_is_followed_by_another_at_once() -> None:
    may_end = threading.Event()
    looks = 0

    def take() -> int:
        nonlocal looks
        looks += 1
        may_end.wait()
        return looks

    look = Look(take, 60.0, 1_000.0)
    look.begin()
    look.hurry()
    may_end.set()
    await until(lambda: look.value == 1)
    look.begin()
    await until(lambda: look.value == 2)
    look.begin()
    look.hurry()
    await until(lambda: look.value == 3)


async def test_each_selection_has_a_reading_and_those_without_viewers_are_forgotten() -> None:
    cluster = Cluster()
    readings: Readings[int, ClusterState] = Readings(lambda _: Shared(cluster.cluster, 0.0))
    watched = readings.of(0)
    cluster.answers.clear()
    waiting = asyncio.create_task(watched.after(0))
    await until(lambda: watched.is_watched)
    other = readings.of(1)
    for selection in range(2, MAX_KEPT + 2):
        readings.of(selection)
    assert readings.of(0) is watched
    assert readings.of(1) is not other
    readings.end()
    assert (await waiting).error == NOT_IN_TIME
    assert (await readings.of(-1).after(0)).error == NOT_IN_TIME


async def test_the_frame_of_a_page_is_sent_before_the_cluster_has_answered() -> None:
    cluster = Cluster()
    cluster.answers.clear()
    request = Request(_application(cluster), "/")
    await until(lambda: cluster.under_way == 1)
    assert b"<h1>Overview</h1>" in request.body
    assert b"section-" not in request.body
    cluster.answers.set()
    assert b"section-brokers" in (await request.ended()).body
    assert request.body.endswith(b"</html>")


async def test_viewers_of_one_page_share_the_reading_of_what_it_shows() -> None:
    cluster = Cluster()
    application = _application(cluster)
    streams = [Request(application, "/events?topic=orders&page=2&group=none") for _ in range(3)]
    await until(lambda: all(stream.body for stream in streams))
    assert {(query.topic, query.page) for query in cluster.queries} == {("orders", 2)}
    for stream in streams:
        await stream.leave()


class HangingAdmin:
    """Never lists groups; fails to describe the cluster. A call in progress ends with `close`, as in an Admin."""

    opened: list[HangingAdmin]

    def __init__(self, *_: object, **__: object) -> None:
        self.opened.append(self)
        self._closed = asyncio.Event()
        self.is_asked = False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self._closed.set()

    async def describe_cluster(self) -> None:
        raise NetworkError("no broker answered")

    async def describe_topics(self, _: Sequence[str] | None = None) -> None:
        raise NetworkError("no broker answered")

    async def list_groups(self) -> None:
        self.is_asked = True
        await self._closed.wait()
        raise Closed("the admin client is closed")


async def test_a_failed_reading_leaves_the_clients_of_other_readings_open(monkeypatch: pytest.MonkeyPatch) -> None:
    HangingAdmin.opened = []
    monkeypatch.setattr(reading, "Admin", HangingAdmin)
    reader = Reader(lambda: "127.0.0.1:9092", None)
    groups = asyncio.create_task(reader.groups(NO_QUERY))
    await until(lambda: any(admin.is_asked for admin in HangingAdmin.opened))
    with pytest.raises(NetworkError, match="no broker answered"):
        await reader.cluster(NO_QUERY)
    done, _ = await asyncio.wait([groups], timeout=0.05)
    assert not done
    await reader.close()
    with pytest.raises(Closed):
        await groups


def test_errors_and_faults_of_this_machine_are_read_at_each_reading_and_their_change_is_news(
    tmp_path: Path,
) -> None:
    cluster_file.save(tmp_path, ClusterFile(ZooKeeperEntry("z:1", 1), (BrokerEntry(1, 9092),), allow_faults=True))
    injected.begin(tmp_path)
    cluster = FaultyCluster(tmp_path)
    cluster.log_of(1).parent.mkdir()
    cluster.log_of(1).write_text("error: its disk is full\n", encoding="utf-8")
    reader = Reader(lambda: "", tmp_path)
    assert not reader.machine_has_changed()
    found = reader.of_this_machine()
    assert (set(found["gone"]), found["last_errors"]) == ({1}, {1: "its disk is full"})
    assert found["faults"] == {}
    assert not reader.machine_has_changed()
    cluster.fill_disk(BrokerId(1))
    assert reader.machine_has_changed()
    assert reader.of_this_machine()["faults"].keys() == {1}


def test_an_address_that_is_none_is_rejected_before_the_console_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", lambda serving: serving.close())
    with pytest.raises(InvalidSetting, match="the port must be a number"):
        command.console(port=0, bootstrap="x:y", data=Path("none"))


def test_a_port_that_is_taken_is_reported_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen at 127.0.0.1:{port} .*: choose another --port"):
            listen("127.0.0.1", port)


async def test_each_answer_has_the_headers_that_protect_a_page() -> None:
    application = _application(Cluster())
    for path in ("/", "/failovers", "/groups", "/static/console.css", "/static/console.js", "/nothing"):
        answer = await Request(application, path).ended()
        assert answer.headers.items() >= HEADERS.items(), path
        assert answer.status == (404 if path == "/nothing" else 200)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:8080", "10.0.0.7"]
)
async def test_hosts_that_no_stranger_can_rebind_are_served(host: str) -> None:
    assert (await Request(_application(Cluster()), "/", host).ended()).status == 200


@pytest.mark.parametrize("host", ["evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", None])
async def test_other_hosts_are_rejected_before_the_cluster_is_read(host: str | None) -> None:
    cluster = Cluster()
    for path in ("/", "/events"):
        answer = await Request(_application(cluster), path, host).ended()
        assert (answer.status, cluster.reads) == (421, 0)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_the_console_is_read_only(method: str) -> None:
    assert (await Request(_application(Cluster()), "/", method=method).ended()).status == 405


async def test_pages_and_files_answer_to_head_and_event_streams_do_not_stay_open() -> None:
    for path, status in {"/": 200, "/static/console.css": 200, "/events": 405, "/events/groups": 405}.items():
        async with asyncio.timeout(10):
            assert (await Request(_application(Cluster()), path, method="HEAD").ended()).status == status, path


def test_a_host_header_is_taken_apart() -> None:
    assert [host_name(host) for host in ("a:1", "a", "[::1]:1", "[::1]")] == ["a", "a", "::1", "::1"]


@pytest.mark.parametrize(
    "query", ["page=-1", "page=x", "page=99999999999", "page=%C2%B2", "topic=%00%3Cb%3E", "internal=2"]
)
async def test_any_query_is_answered(query: str) -> None:
    answer = await Request(_application(Cluster()), f"/?{query}").ended()
    assert answer.status == 200
    assert b"<b>" not in answer.body


async def test_an_event_stream_sends_all_sections_and_then_those_that_change() -> None:
    cluster = Cluster()
    request = Request(_application(cluster), "/events")
    await until(lambda: request.body.endswith(b"\n\n"))
    assert request.headers["content-type"].startswith("text/event-stream")
    first = request.body
    assert first.count(b"section-") == 8
    cluster.epoch = 2
    await until(lambda: len(request.body) > len(first) and request.body.endswith(b"\n\n"))
    news = request.body[len(first) :]
    assert b"epoch 2" in news
    assert news.count(b"section-") == 1
    await request.leave()


async def test_event_streams_have_a_limit_beside_which_pages_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "MAX_STREAMS", 2)
    application = _application(Cluster())
    first, second = (Request(application, "/events") for _ in range(2))
    await until(lambda: first.body and second.body)
    refused = await Request(application, "/events/groups").ended()
    assert refused.status == 503
    assert b"2 pages are followed already" in refused.body
    assert (await Request(application, "/").ended()).status == 200
    await first.leave()
    third = Request(application, "/events/groups")
    await until(lambda: third.body)
    for stream in (second, third):
        await stream.leave()


async def test_strangers_that_connect_and_say_nothing_do_not_lock_viewers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_connections", 3)
    monkeypatch.setattr(BoundedProtocol, "request_within_s", 0.2)
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    cluster = Cluster()
    server = Server(_console(cluster), "127.0.0.1", 60)
    serving = asyncio.create_task(server.serve([listening]))
    events, stream = await asyncio.open_connection("127.0.0.1", port)
    stream.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await events.readuntil(b"event: sections")
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
    for number, (_, writer) in enumerate(strangers):
        writer.write(b"GET / HTTP/1.1\r\n"[: 2 * number])
    async with asyncio.timeout(60):
        for reader, _ in strangers:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        answer, viewer = await asyncio.open_connection("127.0.0.1", port)
        viewer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await answer.readline()).startswith(b"HTTP/1.1 200")
        await answer.readuntil(b"</html>")
        cluster.epoch = 2
        await events.readuntil(b"epoch 2")  # the stream goes on
        server.should_exit = True
        await serving
    for _, writer in (*strangers, (answer, viewer), (events, stream)):
        writer.close()


async def test_nobody_reads_the_cluster_when_nobody_watches() -> None:
    cluster = Cluster()
    cluster.answers.clear()
    request = Request(_application(cluster), "/events")
    await until(lambda: cluster.under_way == 1)
    await request.leave()
    assert cluster.under_way == 0


async def test_event_streams_end_with_the_console_and_pages_answer_even_if_the_cluster_hangs() -> None:
    cluster = Cluster()
    console = _console(cluster)
    application = console.application("127.0.0.1")
    stream = Request(application, "/events")
    await until(lambda: stream.body)
    cluster.answers.clear()
    await until(lambda: cluster.under_way == 1)
    page = Request(application, "/")
    console.end()
    async with asyncio.timeout(10):
        await stream.ended()
        assert (await page.ended()).status == 200
    assert cluster.under_way == 0


async def test_neither_an_invalid_request_nor_the_end_of_a_stream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(_console(cluster), "127.0.0.1", 60)
    serving = asyncio.create_task(server.serve([listening]))
    answer, invalid = await asyncio.open_connection("127.0.0.1", port)
    invalid.write(b"x\r\n\r\n")
    assert (await answer.readline()).startswith(b"HTTP/1.1 400")
    events, stream = await asyncio.open_connection("127.0.0.1", port)
    stream.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await events.readuntil(b"event: sections")
    cluster.answers.clear()
    await until(lambda: cluster.under_way == 1)
    server.should_exit = True
    async with asyncio.timeout(30):
        await serving
    invalid.close()
    stream.close()
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]

"""The kazoo-backed session against a real ZooKeeper: order, watches, connection loss, expiry, the guard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from minibroker.controller.zookeeper import KazooZooKeeper
from minibroker.protocol.world import (
    BadVersion,
    Check,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    SessionExpired,
    SessionState,
    SetData,
    Stat,
    WatchEvent,
    WatchKind,
    ZooKeeperError,
)
from tests.integration.zookeeper.zookeeper_process import zookeeper_process
from tests.integration.zookeeper.zookeeper_sessions import expire, open_session, record_events, record_states

Runner = Callable[[Coroutine[object, object, None]], None]


async def test_a_node_is_created_read_changed_and_deleted(zookeeper: str) -> None:
    async with open_session(zookeeper) as session:
        assert await session.create("/node", b"one") == "/node"
        data, stat = await session.get("/node")
        assert (data, stat.version, stat.ephemeral_owner, stat.children_count) == (b"one", 0, 0, 0)
        changed = await session.set("/node", b"two", 0)
        assert changed.version == 1
        assert changed.czxid == stat.czxid < changed.mzxid
        assert await session.exists("/node") == changed
        await session.delete("/node", 1)
        assert await session.exists("/node") is None


async def test_an_ephemeral_node_names_its_session_and_ends_with_it(zookeeper: str) -> None:
    async with open_session(zookeeper) as observer:
        async with open_session(zookeeper) as owner:
            await owner.create("/mine", b"", ephemeral=True)
            stat = await observer.exists("/mine")
            assert stat is not None
            assert stat.ephemeral_owner == owner.session_id != observer.session_id
        assert await observer.exists("/mine") is None


async def test_errors_have_their_own_types_and_name_the_path(zookeeper: str) -> None:
    async with open_session(zookeeper) as session:
        await session.create("/parent", b"")
        await session.create("/parent/child", b"")
        with pytest.raises(NoNode, match="/nowhere"):
            await session.get("/nowhere")
        with pytest.raises(NoNode, match="/nowhere"):
            await session.children("/nowhere")
        with pytest.raises(NoNode, match="/no/parent"):
            await session.create("/no/parent", b"")
        with pytest.raises(NodeExists, match="/parent"):
            await session.create("/parent", b"")
        with pytest.raises(BadVersion, match="/parent/child"):
            await session.set("/parent/child", b"", 7)
        with pytest.raises(NotEmpty, match="/parent"):
            await session.delete("/parent")


async def test_a_request_that_is_too_large_is_refused_and_the_connection_stays_open(zookeeper: str) -> None:
    async with open_session(zookeeper) as session:
        states = record_states(session)
        with pytest.raises(ZooKeeperError, match="split it"):
            await session.create("/large", bytes(2_000_000))
        assert await session.exists("/large") is None
        assert states.seen == []


async def test_the_chroot_is_created_and_all_paths_are_below_it(zookeeper_address: str, zookeeper: str) -> None:
    root = "/" + zookeeper.partition("/")[2]
    async with (
        open_session(zookeeper_address) as outside,
        open_session(f"{zookeeper}/deep/chroot") as session,
        open_session(f"{zookeeper}/deep/chroot/"),
    ):
        assert await session.children("/") == []
        events = record_events()
        assert await session.children("/", events) == []
        assert await session.exists("/node-0000000000", events) is None
        assert await session.create("/node-", b"x", sequence=True) == "/node-0000000000"
        assert await session.multi([Create("/node-", b"y", sequence=True)]) == ["/node-0000000001"]
        assert await outside.children(f"{root}/deep/chroot") == ["node-0000000000", "node-0000000001"]
        seen = await events.until(lambda seen: len(seen) == 2)
        assert sorted(seen, key=str) == [
            WatchEvent(WatchKind.CHILDREN, "/"),
            WatchEvent(WatchKind.CREATED, "/node-0000000000"),
        ]


async def test_a_multi_returns_a_result_for_each_operation(zookeeper: str) -> None:
    async with open_session(zookeeper) as session:
        assert await session.multi([]) == []
        await session.create("/a", b"")
        await session.create("/b", b"")
        created, stat, checked, deleted = await session.multi(
            [Create("/c-", b"", sequence=True), SetData("/a", b"new", 0), Check("/b", 0), Delete("/b", 0)]
        )
        assert created == "/c-0000000002"
        assert isinstance(stat, Stat)
        assert stat.version == 1
        assert (checked, deleted) == (None, None)
        assert await session.children("/") == ["a", "c-0000000002"]


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (Create("/there", b""), NodeExists),
        (SetData("/there", b"", 9), BadVersion),
        (SetData("/nowhere", b""), NoNode),
        (Delete("/nowhere"), NoNode),
        (Delete("/"), ZooKeeperError),
        (Check("/there", 3), BadVersion),
        (Check("/nowhere", -1), NoNode),
    ],
    ids=str,
)
async def test_a_refused_multi_names_the_culprit_and_changes_nothing(
    zookeeper: str, position: int, culprit: Operation, cause: type[Exception]
) -> None:
    async with open_session(zookeeper) as session:
        await session.create("/there", b"as it was")
        operations: list[Operation] = [Create("/new", b""), SetData("/there", b"changed"), Check("/there", 1)]
        operations.insert(position, culprit)
        with pytest.raises(MultiFailed) as failure:
            await session.multi(operations)
        if not (position == 3 and isinstance(culprit, Check)):
            assert failure.value.index == position
        assert isinstance(failure.value.cause, cause)
        assert culprit.path in str(failure.value.cause)
        assert await session.children("/") == ["there"]
        assert (await session.get("/there"))[0] == b"as it was"


async def test_watches_fire_once_with_the_kind_of_event(zookeeper: str) -> None:
    async with open_session(zookeeper) as session, open_session(zookeeper) as other:
        events = record_events()
        assert await session.exists("/node", events) is None
        await other.create("/node", b"")
        await events.until(lambda seen: len(seen) == 1)
        await session.get("/node", events)
        await other.set("/node", b"1")
        await events.until(lambda seen: len(seen) == 2)
        await other.set("/node", b"2")
        await session.children("/node", events)
        await other.create("/node/child", b"")
        await events.until(lambda seen: len(seen) == 3)
        await other.delete("/node/child")
        await session.exists("/node", events)
        await other.delete("/node")
        await events.until(lambda seen: len(seen) == 4)
        with pytest.raises(NoNode):
            await session.get("/node", events)
        with pytest.raises(NoNode):
            await session.children("/node", events)
        await session.create("/node", b"")
        assert events.seen == [
            WatchEvent(WatchKind.CREATED, "/node"),
            WatchEvent(WatchKind.CHANGED, "/node"),
            WatchEvent(WatchKind.CHILDREN, "/node"),
            WatchEvent(WatchKind.DELETED, "/node"),
        ]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_events_and_responses_come_in_the_order_in_which_zookeeper_sent_them(zookeeper: str, run: Runner) -> None:
    async def scenario() -> None:
        count = 300
        async with open_session(zookeeper) as session:
            await session.multi([Create(f"/node-{i}", b"") for i in range(count)])
            seen: list[str] = []

            def note_event(event: WatchEvent) -> None:
                seen.append(event.path.replace("/node-", "event "))

            async def note(name: str, call: Coroutine[object, object, object]) -> None:
                await call
                seen.append(name)

            calls = []
            for i in range(count):
                calls.append(asyncio.create_task(note(f"get {i}", session.get(f"/node-{i}", note_event))))
                calls.append(asyncio.create_task(note(f"set {i}", session.set(f"/node-{i}", b"x"))))
                calls.append(asyncio.create_task(note(f"create {i}", session.create(f"/node-{i}/child", b""))))
                calls.append(asyncio.create_task(note(f"exists {i}", session.exists(f"/node-{i}"))))
            await asyncio.gather(*calls)
            assert seen == [f"{name} {i}" for i in range(count) for name in ("get", "event", "set", "create", "exists")]

    run(scenario())


@pytest.mark.slow
async def test_the_session_survives_a_restart_of_zookeeper_and_its_watches_do_not() -> None:
    with zookeeper_process() as server:
        async with open_session(server.address, 10_000) as session:
            states = record_states(session)
            session_id = session.session_id
            events = record_events()
            await session.create("/mine", b"", ephemeral=True)
            await session.get("/mine", events)
            await session.children("/", events)
            await asyncio.to_thread(server.kill)
            await states.until(lambda seen: len(seen) == 1)
            assert session.state is SessionState.SUSPENDED
            late = asyncio.create_task(session.exists("/mine"))
            await asyncio.to_thread(server.start)
            assert await states.until(lambda seen: len(seen) == 2) == [
                SessionState.SUSPENDED,
                SessionState.CONNECTED,
            ]
            stat = await late
            assert stat is not None
            assert stat.ephemeral_owner == session_id == session.session_id
            # An event would arrive before the response of the set that causes it.
            await session.set("/mine", b"changed")
            await session.create("/another", b"")
            assert events.seen == []
            await session.get("/mine", events)
            await session.set("/mine", b"changed again")
            assert events.seen == [WatchEvent(WatchKind.CHANGED, "/mine")]


@pytest.mark.slow
async def test_pending_calls_end_with_connection_loss_when_the_connection_breaks() -> None:
    with zookeeper_process() as server:
        async with open_session(server.address) as session:
            await asyncio.to_thread(server.pause)
            calls = [asyncio.create_task(session.create(f"/node-{i}", b"")) for i in range(1_000)]
            await asyncio.sleep(0)
            await asyncio.to_thread(server.kill)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {ConnectionLoss}
            await asyncio.to_thread(server.start)
            # The executed calls are a prefix, since ZooKeeper keeps the order of the calls.
            numbers = sorted(int(name.removeprefix("node-")) for name in await session.children("/") if "-" in name)
            assert numbers == list(range(len(numbers)))


@pytest.mark.slow
async def test_thousands_of_calls_wait_for_the_connection_without_blocking_the_loop() -> None:
    with zookeeper_process() as server:
        async with open_session(server.address, 10_000) as session:
            states = record_states(session)
            await asyncio.to_thread(server.kill)
            await states.until(lambda seen: seen == [SessionState.SUSPENDED])
            # kazoo's own socket pair would fill up after some 280 calls and block the loop, which restarts ZooKeeper.
            calls = [asyncio.create_task(session.create(f"/node-{i:04}", b"")) for i in range(2_000)]
            await asyncio.sleep(0)
            await asyncio.to_thread(server.start)
            assert await asyncio.gather(*calls) == [f"/node-{i:04}" for i in range(2_000)]


async def test_an_expired_session_stays_expired_and_no_other_session_replaces_it(zookeeper: str) -> None:
    async with open_session(zookeeper) as session, open_session(zookeeper) as observer:
        states = record_states(session)
        session_id = session.session_id
        await session.create("/mine", b"", ephemeral=True)
        events = record_events()
        await session.get("/mine", events)
        await expire(zookeeper, session)
        await states.until(lambda seen: SessionState.EXPIRED in seen)
        assert states.seen[-1] is SessionState.EXPIRED
        assert session.state is SessionState.EXPIRED
        with pytest.raises(SessionExpired):
            await session.get("/mine")
        with pytest.raises(SessionExpired):
            await session.multi([Create("/other", b"")])
        assert await observer.exists("/mine") is None
        assert session.session_id == session_id
        await session.close()
        assert states.seen.count(SessionState.EXPIRED) == 1


async def test_after_expiry_no_server_is_asked_for_a_new_session(zookeeper: str) -> None:
    address, _, chroot = zookeeper.partition("/")
    host, _, port = address.partition(":")
    asked_for: list[int] = []

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                sink.write(data)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connect request: length, protocol version, last zxid, timeout, session id (0 for a new one), password.
        connect = await reader.readexactly(4 + 4 + 8 + 4 + 8)
        asked_for.append(int.from_bytes(connect[-8:], "big"))
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        upstream_writer.write(connect)
        await asyncio.gather(relay(reader, upstream_writer), relay(upstream_reader, writer))
        for stream in (writer, upstream_writer):
            with contextlib.suppress(ConnectionError):
                await stream.wait_closed()

    proxied: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxied.append(asyncio.create_task(serve(reader, writer)))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy_address = "{}:{}".format(*proxy.sockets[0].getsockname())
    # kazoo tries all its servers without a pause, so with two it would soon request another session.
    async with open_session(f"{proxy_address},{proxy_address}/{chroot}") as session:
        states = record_states(session)
        attempts = len(asked_for)
        await expire(zookeeper, session)
        await states.until(lambda seen: SessionState.EXPIRED in seen)
    proxy.close()
    await asyncio.gather(*proxied)
    assert set(asked_for[attempts:]) == {session.session_id}


async def test_a_closed_or_expired_session_leaves_no_thread_behind(zookeeper: str) -> None:
    before = set(threading.enumerate())
    async with open_session(zookeeper) as session:
        states = record_states(session)
        client = session._client
        guard = session._guard
        assert guard is not None
        await expire(zookeeper, session)
        await states.until(lambda seen: SessionState.EXPIRED in seen)
    guard.join(60)
    left = {thread for thread in set(threading.enumerate()) - before if thread.name != "asyncio_0"}
    assert not left
    assert client.client_state == "CLOSED"


@pytest.mark.slow
async def test_a_closed_session_answers_every_pending_call() -> None:
    with zookeeper_process() as server:
        async with open_session(server.address, 1_000) as session:
            await asyncio.to_thread(server.kill)
            calls = [asyncio.create_task(session.create(f"/node-{i}", b"")) for i in range(10)]
            await asyncio.sleep(0)
            await session.close()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} <= {ConnectionLoss, SessionExpired}
            assert session.state is SessionState.EXPIRED
            await session.close()


@pytest.mark.slow
def test_a_session_ends_when_its_event_loop_is_stuck(zookeeper: str, caplog: pytest.LogCaptureFixture) -> None:
    gone = threading.Event()
    watching = threading.Event()

    async def observe() -> None:
        async with open_session(zookeeper) as observer:
            events = record_events()
            assert await observer.exists("/mine", events) is not None
            watching.set()
            await events.until(lambda seen: seen == [WatchEvent(WatchKind.DELETED, "/mine")])
            gone.set()

    async def scenario() -> None:
        async with open_session(zookeeper, 1_000) as session:
            states = record_states(session)
            await session.create("/mine", b"", ephemeral=True)
            observer = threading.Thread(target=asyncio.run, args=(observe(),))
            observer.start()
            assert watching.wait(30)
            assert gone.wait(30)  # blocks the loop until ZooKeeper has removed the node
            observer.join()
            await states.until(lambda seen: seen == [SessionState.EXPIRED])
            with pytest.raises(SessionExpired):
                await session.exists("/mine")

    with caplog.at_level(logging.ERROR, "minibroker.zookeeper"):
        asyncio.run(scenario())
    assert "the event loop has not run for 1000 ms" in caplog.text


@pytest.mark.slow
async def test_a_loop_that_is_late_but_not_stuck_keeps_its_session(zookeeper: str) -> None:
    async with open_session(zookeeper, 2_000) as session:
        states = record_states(session)
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251 - the test needs a blocked loop
            await session.exists("/")
        assert states.seen == []


async def test_if_no_zookeeper_answers_the_error_names_the_servers() -> None:
    with pytest.raises(ConnectionLoss, match=r"127\.0\.0\.1:1/chroot within 300 ms"):
        await KazooZooKeeper().connect("127.0.0.1:1/chroot", 6_000, 300)
    for malformed in ("", "host:port", "/chroot"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            await KazooZooKeeper().connect(malformed, 6_000, 300)

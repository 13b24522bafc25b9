"""The virtual ZooKeeper. Its contract is tested on a real ZooKeeper as well, its faults on the virtual one alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random

import pytest

from minibroker.controller.zookeeper import KazooZooKeeper
from minibroker.deploy.simulator.loop import Stuck, on_virtual_loop, run
from minibroker.deploy.simulator.zookeeper import VirtualSession, VirtualZooKeeper
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
    ZooKeeper,
    ZooKeeperError,
    ZooKeeperSession,
)
from tests.running import run_by

Open = Callable[[], Coroutine[None, None, ZooKeeperSession]]
Scenario = Callable[[Open], Coroutine[None, None, None]]
Play = Callable[[Scenario], None]


@pytest.fixture(params=["simulated", "real"])
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario, which opens its sessions on one ZooKeeper."""
    if request.param == "simulated":
        return lambda scenario: run(_with_sessions(VirtualZooKeeper(), "zookeeper:2181/chroot", scenario))
    servers: str = request.getfixturevalue("zookeeper")
    return lambda scenario: asyncio.run(_with_sessions(KazooZooKeeper(), servers, scenario))


async def _with_sessions(zookeeper: ZooKeeper, servers: str, scenario: Scenario) -> None:
    sessions: list[ZooKeeperSession] = []

    async def open_session() -> ZooKeeperSession:
        sessions.append(await zookeeper.connect(servers, 6_000, 10_000))
        return sessions[-1]

    try:
        await scenario(open_session)
    finally:
        for session in sessions:
            await session.close()


class Events:
    """A watcher that records events."""

    def __init__(self) -> None:
        self.seen: list[WatchEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: WatchEvent) -> None:
        self.seen.append(event)
        self._changed.set()

    async def next(self, count: int) -> list[WatchEvent]:
        """Wait until there are `count` events, and remove and return them."""
        while len(self.seen) < count:
            self._changed.clear()
            await self._changed.wait()
        seen, self.seen = self.seen, []
        return seen


# --- Contract ------------------------------------------------------------------------------------------------


@run_by("play")
async def test_one_request_reads_many_nodes_and_sees_earlier_writes(open_session: Open, /) -> None:
    session = await open_session()
    await session.create("/one", b"1")
    await session.create("/empty", b"")
    stat, (one, nowhere, empty, again) = await asyncio.gather(
        session.set("/one", b"2"), session.get_all(["/one", "/nowhere", "/empty", "/one"])
    )
    assert one == again == (b"2", stat)
    assert nowhere is None
    assert empty == await session.get("/empty")
    assert await session.get_all([]) == []

    many = [f"/node-{number}" for number in range(500)]
    await session.multi([Create(path, path.encode() * 10) for path in many])
    nodes = await session.get_all(many)
    assert [node[0] for node in nodes if node is not None] == [path.encode() * 10 for path in many]


@run_by("play")
async def test_versions_count_and_transactions_are_numbered(open_session: Open, /) -> None:
    session = await open_session()
    await session.create("/node", b"one")
    data, created = await session.get("/node")
    assert (data, created.version, created.czxid) == (b"one", 0, created.mzxid)
    changed = await session.set("/node", b"two", 0)
    assert (changed.version, changed.czxid) == (1, created.czxid)
    assert changed.mzxid > created.mzxid
    await session.create("/node/child", b"")
    stat = await session.exists("/node")
    assert stat == changed._replace(children_count=1)
    with pytest.raises(BadVersion):
        await session.set("/node", b"three", 0)
    with pytest.raises(BadVersion):
        await session.delete("/node/child", 3)
    await session.delete("/node/child")
    await session.delete("/node", 1)
    await session.create("/node", b"")
    again = await session.exists("/node")
    assert again is not None
    assert again.version == 0
    assert again.czxid > changed.mzxid


@run_by("play")
async def test_each_rejection_has_its_own_error_type(open_session: Open, /) -> None:
    session = await open_session()
    await session.create("/parent", b"")
    await session.create("/parent/child", b"")
    await session.create("/mine", b"", ephemeral=True)
    for refused, call in [
        (NodeExists, session.create("/parent", b"")),
        (NoNode, session.create("/nowhere/child", b"")),
        (NoNode, session.get("/nowhere")),
        (NoNode, session.set("/nowhere", b"")),
        (NoNode, session.children("/nowhere")),
        (NoNode, session.delete("/nowhere")),
        (NotEmpty, session.delete("/parent")),
        (ZooKeeperError, session.create("/mine/child", b"")),
        (ZooKeeperError, session.create("/large", bytes(2_000_000))),
    ]:
        with pytest.raises(refused):
            await call
    assert await session.exists("/nowhere") is None
    assert await session.children("/") == ["mine", "parent"]


@run_by("play")
async def test_sequential_nodes_count_the_creations_before_them(open_session: Open, /) -> None:
    session = await open_session()
    assert await session.create("/n-", b"", sequence=True) == "/n-0000000000"
    await session.create("/other", b"")
    await session.delete("/n-0000000000")
    await session.create("/other/child", b"")
    assert await session.multi([Create("/n-", b"", sequence=True)]) == ["/n-0000000002"]
    assert await session.create("/n-", b"", sequence=True) == "/n-0000000003"
    assert await session.children("/") == ["n-0000000002", "n-0000000003", "other"]


@run_by("play")
async def test_ephemeral_nodes_end_with_their_session(open_session: Open, /) -> None:
    owner, observer = await open_session(), await open_session()
    await owner.create("/mine", b"", ephemeral=True)
    events = Events()
    stat = await observer.exists("/mine", events)
    assert stat is not None
    assert stat.ephemeral_owner == owner.session_id != observer.session_id
    await owner.close()
    assert await events.next(1) == [WatchEvent(WatchKind.DELETED, "/mine")]
    assert await observer.exists("/mine") is None
    with pytest.raises(SessionExpired):
        await owner.exists("/mine")


@run_by("play")
async def test_a_check_of_any_version_requires_the_node(open_session: Open, /) -> None:
    session = await open_session()
    await session.create("/guard", b"")
    await session.create("/state", b"")
    write: list[Operation] = [Check("/guard", -1), SetData("/state", b"1", 0)]
    assert [getattr(result, "version", None) for result in await session.multi(write)] == [None, 1]
    await session.delete("/guard")
    await session.delete("/state")
    await session.create("/state", b"another of that name")
    with pytest.raises(MultiFailed) as failure:
        await session.multi(write)
    assert (failure.value.index, type(failure.value.cause)) == (0, NoNode)
    assert (await session.get("/state"))[0] == b"another of that name"


@run_by("play")
async def test_a_multi_is_one_transaction_in_which_each_operation_sees_the_ones_before_it(
    open_session: Open, /
) -> None:
    session = await open_session()
    assert await session.multi([]) == []
    created, below, stat, checked, deleted = await session.multi(
        [
            Create("/a", b"1"),
            Create("/a/b", b""),
            SetData("/a", b"2", 0),
            Check("/a", 1),
            Delete("/a/b", 0),
        ]
    )
    assert (created, below, checked, deleted) == ("/a", "/a/b", None, None)
    assert isinstance(stat, Stat)
    assert (stat.version, stat.czxid) == (1, stat.mzxid)


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (Create("/there", b""), NodeExists),
        (Create("/nowhere/child", b""), NoNode),
        (SetData("/there", b"", 9), BadVersion),
        (SetData("/nowhere", b""), NoNode),
        (Delete("/parent"), NotEmpty),
        (Delete("/there", 5), BadVersion),
        (Check("/there", 3), BadVersion),
        (Check("/nowhere", -1), NoNode),
        (Check("/nowhere", 0), NoNode),
    ],
    ids=str,
)
@run_by("play")
async def test_a_rejected_multi_names_the_first_failed_operation_and_changes_no_node(
    open_session: Open, /, culprit: Operation, cause: type[Exception]
) -> None:
    session = await open_session()
    await session.create("/there", b"as it was")
    await session.create("/parent", b"")
    await session.create("/parent/child", b"")
    events = Events()
    await session.children("/", events)
    _, before = await session.get("/there", events)
    with pytest.raises(MultiFailed) as failure:
        await session.multi(
            [
                Create("/new", b""),
                SetData("/there", b"new"),
                Delete("/parent/child"),
                Create("/parent/child", b""),
                culprit,
                Delete("/nowhere"),
            ]
        )
    assert failure.value.index == 4
    assert isinstance(failure.value.cause, cause)
    assert await session.get("/there") == (b"as it was", before)
    assert await session.children("/") == ["parent", "there"]
    assert await session.children("/parent") == ["child"]
    assert events.seen == []


@run_by("play")
async def test_each_watch_fires_once_for_its_node(open_session: Open, /) -> None:
    session, other = await open_session(), await open_session()
    events = Events()
    assert await session.exists("/node", events) is None
    await other.create("/node", b"")
    assert await events.next(1) == [WatchEvent(WatchKind.CREATED, "/node")]
    await session.get("/node", events)
    await session.children("/node", events)
    await session.children("/", events)
    await other.create("/node/child", b"")
    await other.create("/node/second", b"")
    assert await events.next(1) == [WatchEvent(WatchKind.CHILDREN, "/node")]
    await other.set("/node", b"1")
    await other.set("/node", b"2")
    assert await events.next(1) == [WatchEvent(WatchKind.CHANGED, "/node")]
    await session.get("/node/child", events)
    await other.delete("/node/child")
    assert await events.next(1) == [WatchEvent(WatchKind.DELETED, "/node/child")]
    await session.get("/node", events)
    await session.children("/node", events)
    await other.multi([Delete("/node/second"), Delete("/node")])
    fired = await events.next(3)
    assert sorted(fired, key=str) == [
        WatchEvent(WatchKind.CHILDREN, "/"),
        WatchEvent(WatchKind.CHILDREN, "/node"),
        WatchEvent(WatchKind.DELETED, "/node"),
    ]
    with pytest.raises(NoNode):
        await session.get("/node", events)
    await other.create("/node", b"")
    assert await session.exists("/node") is not None
    assert events.seen == []


@run_by("play")
async def test_events_and_answers_arrive_in_the_order_in_which_they_happened(open_session: Open, /) -> None:
    session = await open_session()
    count = 50
    await session.multi([Create(f"/node-{i}", b"") for i in range(count)])
    seen: list[str] = []

    async def note(name: str, call: Coroutine[None, None, object]) -> None:
        await call
        seen.append(name)

    def note_event(event: WatchEvent) -> None:
        seen.append(event.path.replace("/node-", "event "))

    calls = []
    for i in range(count):
        calls.append(asyncio.create_task(note(f"get {i}", session.get(f"/node-{i}", note_event))))
        calls.append(asyncio.create_task(note(f"set {i}", session.set(f"/node-{i}", b"x"))))
        calls.append(asyncio.create_task(note(f"exists {i}", session.exists(f"/node-{i}"))))
    await asyncio.gather(*calls)
    order = [seen.index(f"{name} {i}") for i in range(count) for name in ("get", "set", "exists")]
    assert order == sorted(order)
    for i in range(count):
        assert seen.index(f"event {i}") < seen.index(f"set {i}"), "an event comes before the answer of its cause"


# --- Faults: the virtual one alone -----------------------------------------------------------------------------


def on_virtual_time(scenario: Callable[[VirtualZooKeeper], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        await scenario(VirtualZooKeeper(lambda: 0.001))

    run(main())


async def _open(zookeeper: VirtualZooKeeper) -> VirtualSession:
    return await zookeeper.connect("zookeeper:2181", 6_000, 1_000)


@run_by(on_virtual_time)
async def test_a_cut_loses_requests_and_replies_in_transit(zookeeper: VirtualZooKeeper, /) -> None:
    session = await _open(zookeeper)
    states: list[SessionState] = []
    session.on_state(states.append)
    lost = asyncio.create_task(session.create("/never", b""))
    await asyncio.sleep(0)
    session.suspend()
    with pytest.raises(ConnectionLoss):
        await lost
    with pytest.raises(ConnectionLoss):
        await session.exists("/never")
    session.resume()
    assert await session.exists("/never") is None
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]


@run_by(on_virtual_time)
async def test_a_request_may_arrive_though_its_answer_is_lost(zookeeper: VirtualZooKeeper, /) -> None:
    session = await _open(zookeeper)

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        session.suspend()

    zookeeper.after = cut
    with pytest.raises(ConnectionLoss):
        await session.create("/first", b"")
    zookeeper.after = None
    session.resume()
    second = asyncio.create_task(session.create("/second", b""))
    await asyncio.sleep(0)
    session.suspend(requests_arrive=True)
    with pytest.raises(ConnectionLoss):
        await second
    assert zookeeper.names("/") == ["first", "second"]


@run_by(on_virtual_time)
async def test_watches_are_forgotten_with_the_connection(zookeeper: VirtualZooKeeper, /) -> None:
    session = await _open(zookeeper)
    events = Events()
    await session.children("/", events)
    session.suspend()
    session.resume()
    await session.create("/node", b"")
    assert events.seen == []


@run_by(on_virtual_time)
async def test_a_session_outlives_its_connection_for_its_timeout(zookeeper: VirtualZooKeeper, /) -> None:
    session = await _open(zookeeper)
    await session.create("/mine", b"", ephemeral=True)
    for _ in range(3):
        session.suspend()
        await asyncio.sleep(5)
        session.resume()
        assert session.state is SessionState.CONNECTED
    session.suspend()
    await asyncio.sleep(5.9)
    assert zookeeper.has("/mine")
    await asyncio.sleep(0.2)
    assert not zookeeper.has("/mine")
    states: list[SessionState] = [session.state]  # it is not informed before it reconnects
    session.on_state(states.append)
    session.resume()
    assert states == [SessionState.SUSPENDED, SessionState.EXPIRED]
    with pytest.raises(SessionExpired):
        await session.exists("/")


@run_by(on_virtual_time)
async def test_the_session_of_a_killed_process_ends_after_its_timeout_even_if_it_was_cut_before(
    zookeeper: VirtualZooKeeper, /
) -> None:
    session = await _open(zookeeper)
    await session.create("/mine", b"", ephemeral=True)
    states: list[SessionState] = []
    session.on_state(states.append)
    session.suspend()
    session.resume()
    states.clear()
    session.sever()
    await asyncio.sleep(5.9)
    assert zookeeper.has("/mine")
    await asyncio.sleep(0.2)
    assert not zookeeper.has("/mine")
    assert states == []


@run_by(on_virtual_time)
async def test_a_connected_session_is_informed_of_its_expiry_at_once(zookeeper: VirtualZooKeeper, /) -> None:
    session = await _open(zookeeper)
    pending = asyncio.create_task(session.get("/"))
    await asyncio.sleep(0)
    session.expire()
    assert session.state is SessionState.EXPIRED
    with pytest.raises(SessionExpired):
        await pending


@run_by(on_virtual_time)
async def test_without_a_server_no_client_can_connect(zookeeper: VirtualZooKeeper, /) -> None:
    zookeeper.reachable = False
    with pytest.raises(ConnectionLoss, match="zookeeper:2181"):
        await _open(zookeeper)


# --- Faults that name hosts: clients reconnect by themselves ---------------------------------------------------


async def _open_from(zookeeper: VirtualZooKeeper, host: str) -> tuple[VirtualSession, list[SessionState]]:
    session = await zookeeper.connect("zookeeper:2181", 6_000, 10_000, owner=f"{host}#1")
    states: list[SessionState] = []
    session.on_state(states.append)
    return session, states


def _on_seeds(scenario: Callable[[VirtualZooKeeper], Coroutine[None, None, None]]) -> None:
    async def main(seed: int) -> None:
        await scenario(VirtualZooKeeper(lambda: 0.001, Random(seed)))

    for seed in range(5):
        run(main(seed))


@run_by(_on_seeds)
async def test_a_host_that_is_cut_off_is_suspended_and_reconnects_afterwards(zookeeper: VirtualZooKeeper, /) -> None:
    session, states = await _open_from(zookeeper, "one")
    other, others_states = await _open_from(zookeeper, "other")
    await session.create("/mine", b"", ephemeral=True)
    zookeeper.cut("one")
    await asyncio.sleep(5)
    assert states == [SessionState.SUSPENDED]
    zookeeper.uncut("one")
    await asyncio.sleep(0.21)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    await asyncio.sleep(60)
    assert await session.exists("/mine") == await other.exists("/mine") is not None
    assert others_states == []


@run_by(_on_seeds)
async def test_a_host_cut_off_beyond_its_timeout_learns_that_its_session_has_expired(
    zookeeper: VirtualZooKeeper, /
) -> None:
    session, states = await _open_from(zookeeper, "one")
    await session.create("/mine", b"", ephemeral=True)
    zookeeper.cut("one")
    await asyncio.sleep(60)
    assert not zookeeper.has("/mine")
    assert states == [SessionState.SUSPENDED]
    zookeeper.uncut("one")
    await asyncio.sleep(0.21)
    assert states == [SessionState.SUSPENDED, SessionState.EXPIRED]


def test_a_cut_still_processes_a_prefix_of_the_requests_in_transit() -> None:
    async def main(seed: int) -> int:
        zookeeper = VirtualZooKeeper(lambda: 0.001, Random(seed))
        session, _ = await _open_from(zookeeper, "one")
        calls = [asyncio.create_task(session.create(f"/{number}", b"")) for number in range(4)]
        await asyncio.sleep(0)
        zookeeper.cut("one")
        for call in calls:
            with pytest.raises(ConnectionLoss):
                await call
        names = zookeeper.names("/")
        assert names == ["0", "1", "2", "3"][: len(names)]
        return len(names)

    assert {run(main(seed)) for seed in range(40)} == {0, 1, 2, 3, 4}


def test_calls_without_a_connection_fail_or_wait_for_the_next_one() -> None:
    async def main(seed: int) -> str:
        zookeeper = VirtualZooKeeper(lambda: 0.001, Random(seed))
        session, _ = await _open_from(zookeeper, "one")
        zookeeper.cut("one")
        call = asyncio.create_task(session.create("/node", b""))
        await asyncio.sleep(1)
        assert zookeeper.names("/") == []
        zookeeper.uncut("one")
        try:
            return await call
        except ConnectionLoss:
            return "failed"

    assert {run(main(seed)) for seed in range(20)} == {"/node", "failed"}


@run_by(_on_seeds)
async def test_calls_that_wait_for_a_connection_end_with_the_session(zookeeper: VirtualZooKeeper, /) -> None:
    session, _ = await _open_from(zookeeper, "one")
    zookeeper.cut("one")
    calls = [asyncio.create_task(session.exists("/")) for _ in range(10)]
    await asyncio.sleep(10)
    zookeeper.uncut("one")
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ConnectionLoss, SessionExpired}


@run_by(_on_seeds)
async def test_connecting_from_a_host_that_is_cut_off_waits_and_fails(zookeeper: VirtualZooKeeper, /) -> None:
    zookeeper.cut("one")
    with pytest.raises(ConnectionLoss, match="10000 ms"):
        await _open_from(zookeeper, "one")
    asyncio.get_running_loop().call_later(5, zookeeper.uncut, "one")
    session, _ = await _open_from(zookeeper, "one")
    assert await session.exists("/") is not None


@run_by(_on_seeds)
async def test_a_stopped_server_keeps_its_nodes_and_expires_sessions_only_after_its_start(
    zookeeper: VirtualZooKeeper, /
) -> None:
    session, states = await _open_from(zookeeper, "one")
    lost, _ = await _open_from(zookeeper, "other")
    await session.create("/mine", b"", ephemeral=True)
    await lost.create("/others", b"", ephemeral=True)
    lost.sever()
    await asyncio.sleep(5)
    zookeeper.stop()
    zookeeper.stop()
    with pytest.raises(ConnectionLoss):
        await _open_from(zookeeper, "third")
    await asyncio.sleep(600)
    zookeeper.start()
    await asyncio.sleep(5.9)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert zookeeper.names("/") == ["mine", "others"]
    await asyncio.sleep(0.2)
    assert zookeeper.names("/") == ["mine"]


@run_by(_on_seeds)
async def test_lost_connections_are_restored_without_their_watches(zookeeper: VirtualZooKeeper, /) -> None:
    session, states = await _open_from(zookeeper, "one")
    events = Events()
    await session.children("/", events)
    zookeeper.lose_connections("one")
    await asyncio.sleep(0.21)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    await session.create("/node", b"")
    assert events.seen == []


@run_by(_on_seeds)
async def test_a_process_that_resumes_twice_after_one_loss_stays_connected(zookeeper: VirtualZooKeeper, /) -> None:
    session, states = await _open_from(zookeeper, "one")
    session.pause()
    zookeeper.lose_connections("one")
    for latency_s in (0.0, 1.0):
        zookeeper.slow_hosts["one"] = (latency_s, latency_s)
        session.pause()
        session.go_on()
    await asyncio.sleep(2)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]


@run_by(_on_seeds)
async def test_a_session_ended_by_the_server_is_informed_when_it_has_reconnected(
    zookeeper: VirtualZooKeeper, /
) -> None:
    session, states = await _open_from(zookeeper, "one")
    await session.create("/mine", b"", ephemeral=True)
    call = asyncio.create_task(session.create("/never", b""))
    await asyncio.sleep(0)
    zookeeper.expire("one")
    assert zookeeper.names("/") == []
    with pytest.raises(ConnectionLoss):
        await call
    await asyncio.sleep(0.21)
    assert states == [SessionState.SUSPENDED, SessionState.EXPIRED]
    assert zookeeper.names("/") == []


def test_a_session_closed_without_a_connection_stops_its_attempts_to_reconnect() -> None:
    async def scenario(zookeeper: VirtualZooKeeper) -> None:
        session, _ = await _open_from(zookeeper, "one")
        zookeeper.cut("one")
        await session.close()
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="everything waits"):
        _on_seeds(scenario)


@run_by(_on_seeds)
async def test_a_session_closed_without_a_connection_stays_closed(zookeeper: VirtualZooKeeper, /) -> None:
    session, states = await _open_from(zookeeper, "one")
    await session.create("/mine", b"", ephemeral=True)
    zookeeper.cut("one")
    await session.close()
    zookeeper.uncut("one")
    await asyncio.sleep(5.9)
    assert zookeeper.has("/mine")
    await asyncio.sleep(0.2)
    assert not zookeeper.has("/mine")
    assert states == [SessionState.SUSPENDED]


# --- A server that lags ----------------------------------------------------------------------------------------


async def _behind(server: VirtualZooKeeper, owner: str = "broker-1#1") -> VirtualSession:
    """Return a session at a server that lags by two seconds."""
    session = await server.connect("zookeeper:2181", 6_000, 10_000, owner=owner)
    server.lag("broker-1", 2.0)
    session.suspend()
    session.resume()
    return session


@run_by(on_virtual_loop)
async def test_a_lagging_server_answers_from_older_state_and_fires_watches_late() -> None:
    server = VirtualZooKeeper()
    server.make("/a", b"old")
    session = await _behind(server)
    events = Events()
    server.make("/a", b"new")
    data, stat = await session.get("/a", events)
    assert data == b"old"
    with pytest.raises(BadVersion):  # writes see the current state
        await session.set("/a", b"from the old one", stat.version)
    assert [event.kind for event in events.seen] == [WatchKind.CHANGED], "the answer came after what it is based on"
    assert (await session.get("/a"))[0] == b"new"
    assert await session.exists("/b", events) is None
    server.make("/b")
    await asyncio.sleep(1.9)
    assert len(events.seen) == 1
    await asyncio.sleep(0.2)
    assert len(events.seen) == 2


@run_by(on_virtual_loop)
async def test_a_session_reads_its_own_writes_at_a_lagging_server_in_order() -> None:
    server = VirtualZooKeeper()
    session = await _behind(server)
    answered: list[str] = []

    async def call(name: str, answer: Coroutine[None, None, object]) -> None:
        await answer
        answered.append(name)

    async with asyncio.TaskGroup() as calls:
        calls.create_task(call("exists", session.exists("/mine")))
        calls.create_task(call("create", session.create("/mine", b"1")))
        calls.create_task(call("get", session.get("/mine")))
        await asyncio.sleep(0.1)
        assert server.data("/mine") == b"1"
        assert answered == ["exists"]
    assert answered == ["exists", "create", "get"]


@run_by(on_virtual_loop)
async def test_a_session_does_not_connect_to_a_server_behind_the_state_it_has_seen() -> None:
    server = VirtualZooKeeper()
    session = await server.connect("zookeeper:2181", 6_000, 10_000, owner="broker-1#1")
    server.lag("broker-1", 2.0)
    await session.create("/mine", b"")
    session.suspend()
    session.resume()
    server.make("/mine", b"of another")
    assert (await session.get("/mine"))[0] == b"of another"
    assert server.stale_sessions("broker-1") == 0
    await asyncio.sleep(3)
    session.suspend()
    session.resume()
    server.make("/mine", b"later")
    assert (await session.get("/mine"))[0] == b"of another"


@run_by(on_virtual_loop)
async def test_a_server_that_catches_up_keeps_watches_and_answers_waiting_requests() -> None:
    server = VirtualZooKeeper()
    session = await _behind(server)
    events = Events()
    await session.exists("/a", events)
    await session.exists("/b", events)
    creating = asyncio.ensure_future(session.create("/a", b""))
    await asyncio.sleep(0.1)
    server.unlag("broker-1")
    await creating
    assert len(events.seen) == 1
    server.make("/b")
    await asyncio.sleep(0.1)
    assert [event.path for event in events.seen] == ["/a", "/b"]


@run_by(on_virtual_loop)
async def test_a_write_through_a_lagging_server_is_applied_although_its_answer_is_lost() -> None:
    server = VirtualZooKeeper()
    session = await _behind(server)
    creating = asyncio.ensure_future(session.create("/mine", b"", ephemeral=True))
    await asyncio.sleep(0.1)
    session.suspend()
    with pytest.raises(ConnectionLoss):
        await creating
    assert server.has("/mine")
    await asyncio.sleep(7)
    assert not server.has("/mine"), "it expires for everybody"

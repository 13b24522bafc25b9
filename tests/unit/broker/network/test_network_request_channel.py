from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.broker.network.dialect import Answer, Asked, BadInput
from minibroker.broker.network.handler_pool import RequestHandlerPool
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.native_dialect import NativeDialect, NativeListener
from minibroker.broker.network.request_channel import SLICE_S, Request, RequestChannel, RequestSource, Session
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from tests.running import run_by


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A source of requests that does with room whatever the test says."""

    peer = "127.0.0.1:1"
    listener = "DATA"
    closed = False
    dialect = NativeDialect(NativeListener("DATA", apis.Plane.DATA, 1 << 20))

    def __init__(self, on_room: Callable[[], None] | None = None) -> None:
        self._on_room = on_room
        self.session = Session()

    def proved_broker(self) -> None:
        pass

    def authenticated(self) -> None:
        pass

    def close(self) -> None:
        pass

    def introduced(self, name: str, version: str) -> None:
        raise AssertionError("no peer introduces itself here")

    def answered(self, request: Request, answer: Answer | None) -> None:
        raise AssertionError("nothing is answered here")

    def handled(self, *, wake: bool) -> None:
        """Do nothing: this source sends no more."""

    def refused(self, bad_input: BadInput) -> None:
        raise AssertionError("nothing is decoded late here")

    def close_connection(self, reason: str) -> None:
        raise AssertionError("nothing is closed here")

    on_answer = None

    def throttle(self, seconds: float) -> None: ...

    def room_in_channel(self, size: int) -> None:
        assert self._on_room is not None
        self._on_room()


def request(number: int, size: int = 1, source: RequestSource | None = None) -> Request:
    envelope = apis.decode_request_envelope(
        apis.encode_request(apis.METADATA, number, None, m.MetadataRequest(None))[4:]
    )
    return Request(source or Source(), lambda: 0.0, apis.METADATA, envelope, m.MetadataRequest(None), size, 0.0)


def number_of(request: Request | None) -> int:
    assert request is not None
    return request.correlation_id


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


async def turn() -> None:
    await asyncio.sleep(0)


@run_by(run)
async def test_an_idle_handler_gets_a_request_without_a_stay_in_the_queue() -> None:
    channel = RequestChannel(10, 1_000, Clock())
    waiting = channel.wait()
    channel.offer(request(1), wake=True)
    assert len(channel) == 0
    assert number_of(await waiting) == 1


@run_by(run)
async def test_requests_are_taken_in_the_order_of_their_offers() -> None:
    clock = Clock()
    channel = RequestChannel(10, 1_000, clock)
    first = channel.wait()
    for number in range(5):
        channel.offer(request(number), wake=number % 2 == 0)
    assert number_of(await first) == 0
    channel.woken(clock.now)
    assert [number_of(channel.poll(clock.now)) for _ in range(4)] == [1, 2, 3, 4]
    assert channel.poll(clock.now) is None


@run_by(run)
async def test_a_connection_that_seldom_asks_does_not_wait_for_those_that_always_do() -> None:
    clock = Clock()
    channel = RequestChannel(100, 1_000, clock)
    channel.woken(clock.now)
    busy = [Source() for _ in range(10)]
    seldom = Source()

    def handle_next(seconds: float) -> RequestSource:
        taken = channel.poll(clock.now)
        assert taken is not None
        channel.handled(taken, seconds)
        return taken.source

    for source in busy:
        channel.offer(request(1, source=source), wake=False)
    for number in range(25):
        channel.offer(request(1, source=handle_next(0.001 + number / 100_000)), wake=False)
    for _ in range(5):
        channel.offer(request(1, source=seldom), wake=False)
        assert handle_next(0.000_001) is seldom
    # It gets what the others get, and no more for having waited.
    served = []
    channel.offer(request(1, source=seldom), wake=False)
    for _ in range(110):
        served.append(handle_next(0.001))
        channel.offer(request(1, source=served[-1]), wake=False)
    assert all(9 <= served.count(source) <= 11 for source in [seldom, *busy])


@run_by(run)
async def test_all_lost_connections_together_have_the_turns_of_one() -> None:
    clock = Clock()
    channel = RequestChannel(1_000, 100_000, clock)
    channel.woken(clock.now)
    here, lost = Source(), [Source() for _ in range(20)]
    for source in lost:
        source.closed = True
        channel.offer(request(1, source=source), wake=False)
    channel.offer(request(1, source=here), wake=False)
    served = []
    for _ in range(100):
        taken = channel.poll(clock.now)
        assert taken is not None
        served.append(taken.source)
        channel.handled(taken, 0.01)
        channel.offer(request(1, source=taken.source), wake=False)
    assert served.count(here) >= 40


@run_by(run)
async def test_a_request_that_waited_long_costs_its_connection_no_long_wait() -> None:
    clock = Clock()
    channel = RequestChannel(100, 1_000, clock)
    channel.woken(clock.now)
    waited, busy = Source(), Source()
    for seconds, source in ((30.0, waited), (0.001, busy)):
        channel.offer(request(1, source=source), wake=False)
        taken = channel.poll(clock.now)
        assert taken is not None
        channel.handled(taken, seconds)
    channel.offer(request(1, source=waited), wake=False)
    for _ in range(5):
        channel.offer(request(1, source=busy), wake=False)
        taken = channel.poll(clock.now)
        assert taken is not None
        if taken.source is waited:
            return
        channel.handled(taken, 0.001)
    raise AssertionError("it waits for longer than a handler computes")


@run_by(run)
async def test_connections_stand_in_line_in_the_order_of_their_turns() -> None:
    clock = Clock()
    channel = RequestChannel(1, 1_000, clock)
    channel.woken(clock.now)
    channel.offer(request(1), wake=False)
    called = []
    busy, seldom = Source(lambda: called.append("busy")), Source(lambda: called.append("seldom"))
    busy.session.turns.begin_s = 0.1
    follower = Source(lambda: called.append("follower"))
    follower.session.set_broker(2)
    channel.get_in_line(busy, 1)
    channel.get_in_line(seldom, 1)
    channel.get_in_line(follower, 1)
    channel.poll(clock.now)
    assert called == ["follower", "seldom", "busy"]


@run_by(run)
async def test_the_fetches_of_followers_are_taken_first() -> None:
    clock = Clock()
    channel = RequestChannel(10, 1_000, clock)
    follower = Source()
    follower.session.set_broker(2)
    apis_asked: list[apis.Api[Any, Any]] = [apis.FETCH, apis.METADATA, apis.METADATA, apis.FETCH]
    for number, (source, api) in enumerate(zip([Source(), Source(), follower, follower], apis_asked, strict=True)):
        each = request(number, source=source)
        each.api = api
        channel.offer(each, wake=True)
    channel.woken(clock.now)
    assert [number_of(channel.poll(clock.now)) for _ in range(4)] == [3, 0, 1, 2]


@run_by(run)
async def test_after_each_fetch_of_a_follower_it_is_a_clients_turn() -> None:
    clock = Clock()
    channel = RequestChannel(10, 1_000, clock)
    followers = [Source(), Source()]
    for number, follower in enumerate([*followers, *followers]):
        follower.session.set_broker(2)
        fetch = request(number, source=follower)
        fetch.api = apis.FETCH
        channel.offer(fetch, wake=False)
    for number in (4, 5):
        channel.offer(request(number), wake=False)
    channel.woken(clock.now)
    assert [number_of(channel.poll(clock.now)) for _ in range(6)] == [0, 4, 1, 5, 2, 3]


@run_by(run)
async def test_sources_that_find_the_channel_full_are_called_in_turn_once_there_is_room() -> None:
    clock = Clock()
    channel = RequestChannel(2, 1_000, clock)
    channel.woken(clock.now)
    called = []

    def stand_in_line(number: int) -> None:
        def on_room() -> None:
            called.append(number)
            channel.offer(request(number), wake=True)

        assert not channel.has_room(1)
        channel.get_in_line(Source(on_room), 1)

    for number in (1, 2):
        assert channel.has_room(1)
        channel.offer(request(number), wake=True)
    for number in (3, 4, 5):
        stand_in_line(number)
    assert channel.in_line == 3
    assert number_of(channel.poll(clock.now)) == 1
    assert called == [3]
    assert number_of(channel.poll(clock.now)) == 2
    assert called == [3, 4]
    assert not channel.has_room(1)
    assert [number_of(channel.poll(clock.now)) for _ in range(3)] == [3, 4, 5]
    assert channel.has_room(1)


@run_by(run)
async def test_a_place_that_its_owner_gives_up_goes_to_the_next_in_line() -> None:
    clock = Clock()
    channel = RequestChannel(1, 1_000, clock)
    channel.woken(clock.now)
    channel.offer(request(1), wake=True)
    called = []
    channel.get_in_line(Source(lambda: called.append("left")), 1)
    channel.get_in_line(Source(lambda: channel.offer(request(2), wake=True)), 1)
    assert number_of(channel.poll(clock.now)) == 1
    assert called == ["left"]
    assert number_of(channel.poll(clock.now)) == 2


@run_by(run)
async def test_bytes_count_until_the_request_is_handled_and_a_large_request_gets_in_alone() -> None:
    clock = Clock()
    channel = RequestChannel(10, 100, clock)
    channel.woken(clock.now)
    first = request(1, size=60)
    channel.offer(first, wake=True)
    assert channel.has_room(40)
    assert not channel.has_room(41)
    large = request(2, size=500)
    channel.get_in_line(Source(lambda: channel.offer(large, wake=True)), 500)
    assert not channel.has_room(1)  # otherwise the large one would wait for ever
    assert channel.poll(clock.now) is first
    assert channel.poll(clock.now) is None
    channel.handled(first, 0.0)
    assert channel.poll(clock.now) is large
    assert channel.bytes == 500
    channel.handled(large, 0.0)
    assert channel.bytes == 0


@run_by(run)
async def test_handlers_share_a_slice_and_rest_for_one_turn_of_the_loop() -> None:
    clock = Clock()
    channel = RequestChannel(100, 1_000, clock)
    first = channel.wait()
    for number in range(10):
        channel.offer(request(number), wake=True)
    await first
    channel.woken(clock.now)
    clock.now += SLICE_S * 0.6
    assert number_of(channel.poll(clock.now)) == 1
    clock.now += SLICE_S * 0.6
    assert channel.poll(clock.now) is None
    waiting = [channel.wait(), channel.wait()]
    channel.offer(request(10), wake=True)  # waiting handlers get it before any other
    assert not waiting[0].done()
    await turn()
    assert number_of(await waiting[0]) == 2
    channel.woken(clock.now)
    assert number_of(channel.poll(clock.now)) == 3


@run_by(run)
async def test_another_handler_is_woken_when_the_first_waits() -> None:
    """Each handler that ran a request of its own would lengthen the turn of the loop."""
    clock = Clock()
    channel = RequestChannel(100, 1_000, clock)
    waiting = [channel.wait() for _ in range(3)]
    for number in range(5):
        channel.offer(request(number), wake=True)
    for number, future in enumerate(waiting):
        assert [each.done() for each in waiting].count(True) == number + 1
        assert number_of(await future) == number
        channel.woken(clock.now)  # it waits for a disk, and does not poll
        await turn()
    assert [number_of(channel.poll(clock.now)) for _ in range(2)] == [3, 4]


@run_by(run)
async def test_a_connection_that_asks_for_little_does_not_wait_for_a_thousand_new_ones() -> None:
    clock = Clock()
    channel = RequestChannel(10_000, 1_000_000, clock)
    channel.woken(clock.now)
    known = Source()
    for _ in range(20):
        channel.offer(request(1, source=known), wake=False)
        taken = channel.poll(clock.now)
        assert taken is not None
        channel.handled(taken, 0.000_1)
    for _ in range(1_000):
        channel.offer(request(2), wake=False)
    for _ in range(8):
        channel.offer(request(1, source=known), wake=False)
        first, second = (channel.poll(clock.now) for _ in range(2))
        assert first is not None
        assert first.source is known
        assert second is not None
        channel.handled(first, 0.000_1)
        channel.handled(second, 0.002)


@run_by(run)
async def test_control_work_comes_first() -> None:
    clock = Clock()
    control = RequestChannel(20, 1_000, clock)
    data = RequestChannel(100, 1_000, clock, gives_way_to=control)
    handled: list[str] = []
    sources = {channel: Source() for channel in (control, data)}

    async def handler(request: Request) -> None:
        plane = "control" if request.source is sources[control] else "data"
        handled.append(plane)
        if len(handled) == 20:
            control.offer(request_of(control), wake=True)

    def request_of(channel: RequestChannel) -> Request:
        return request(1, source=sources[channel])

    pools = [
        RequestHandlerPool("data", 2, data, handler, NetworkMetrics(), clock),
        RequestHandlerPool("control", 1, control, handler, NetworkMetrics(), clock),
    ]
    for pool in pools:
        pool.start()
    await turn()
    for _ in range(50):
        data.offer(request_of(data), wake=True)
    control.offer(request_of(control), wake=True)
    while len(handled) < 52:
        await turn()
    # A data handler held a request when each of the control requests came. It finishes it; no other request goes before
    # the control requests.
    assert handled[:3] == ["data", "control", "data"]
    assert "control" in handled[20:22]
    for channel in (control, data):
        channel.close()
    for pool in pools:
        await pool.close(1)


@pytest.mark.parametrize("busy", [1, 3])
@run_by(run)
async def test_a_handler_that_is_no_longer_needed_leaves_nothing_in_the_queue(busy: int) -> None:
    """A connection's next request is queued for the handler that has just handled the one before."""
    clock = Clock()
    channel = RequestChannel(100, 1_000, clock)
    handled: list[int] = []

    class Pipelining(Source):
        def handled(self, *, wake: bool) -> None:
            handled.append(1)
            if len(handled) < 200:
                channel.offer(request(1, source=self), wake=wake)

    async def handler(_: Request) -> None:
        await turn()

    pool = RequestHandlerPool("data", 8, channel, handler, NetworkMetrics(), clock)
    pool.start()
    await turn()
    for _ in range(busy):
        channel.offer(request(1, source=Pipelining()), wake=True)
    for size in range(7, 0, -1):
        before = len(handled)
        while len(handled) < before + 20:
            await turn()
        pool.resize(size)
    while len(handled) < 200:
        await turn()
    channel.close()
    await pool.close(1)


@run_by(run)
async def test_a_closed_channel_empties_its_queue_and_then_ends_its_handlers() -> None:
    clock = Clock()
    channel = RequestChannel(1, 1_000, clock)
    channel.woken(clock.now)
    channel.offer(request(1), wake=True)
    channel.get_in_line(Source(), 1)
    channel.close()
    assert not channel.has_room(1)
    assert channel.in_line == 0
    assert number_of(channel.poll(clock.now)) == 1
    assert await channel.wait() is None


@run_by(run)
async def test_a_closed_channel_ends_handlers_that_are_idle_already() -> None:
    channel = RequestChannel(1, 1_000, Clock())
    idle = [channel.wait(), channel.wait()]
    channel.close()
    assert [await future for future in idle] == [None, None]


@run_by(run)
async def test_a_request_is_not_given_to_a_handler_that_was_cancelled() -> None:
    channel = RequestChannel(1, 1_000, Clock())
    gone, alive = channel.wait(), channel.wait()
    gone.cancel()
    channel.offer(request(1), wake=True)
    assert number_of(await alive) == 1


@run_by(run)
async def test_a_large_answer_that_cannot_be_encoded_closes_its_connection() -> None:
    """Otherwise the client would wait for its time-out."""

    class Broken(NativeDialect):
        def encode_response(self, asked: Asked, body: m.Message) -> Answer:
            raise ValueError("a bug")

    class Closing(Source):
        dialect = Broken(NativeListener("DATA", apis.Plane.DATA, 1 << 20))

        def __init__(self) -> None:
            super().__init__()
            self.events: list[object] = []

        def answered(self, request: Request, answer: Answer | None) -> None:
            self.events.append(answer)

        def close_connection(self, reason: str) -> None:
            self.events.append(reason)

    source = Closing()
    large = request(1, source=source)
    large.large = LargeRequests(InThisThread())
    large.respond(m.MetadataResponse(0, [], None, -1, []))
    await large.large.close()
    assert source.events == ["the answer to Metadata cannot be encoded: see the broker's log", None]


class InThisThread:
    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def close(self) -> None: ...

from __future__ import annotations

import asyncio

from minibroker.broker.network.dialect import Answer
from minibroker.broker.network.handler_pool import Continuation, RequestHandlerPool
from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.request_channel import Request, RequestChannel
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.running import run_by
from tests.unit.broker.network.test_network_request_channel import Clock, Source, request, run, turn


class Ended(Source):
    """A source that records the outcome of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[int] = []
        self.is_handled = False

    def answered(self, request: Request, answer: Answer | None) -> None:
        assert answer is not None
        self.answers.append(request.correlation_id)

    def handled(self, *, wake: bool) -> None:
        self.is_handled = True


class Pool:
    """One handler task. Requests of more than one byte leave unfinished work, which waits for `gate`."""

    def __init__(self) -> None:
        clock = Clock()
        self.metrics = NetworkMetrics()
        self.channel = RequestChannel(100, 1_000, clock)
        self.gate = asyncio.Event()
        self.error: BrokerError | None = None
        self.pool = RequestHandlerPool("data", 1, self.channel, self.handle, self.metrics, clock)
        self.pool.start()

    async def handle(self, request: Request) -> Continuation | None:
        return self.rest() if request.size > 1 else None

    async def rest(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def offer(self, size: int) -> Ended:
        source = Ended()
        self.channel.offer(request(1, size, source), wake=True)
        return source


@run_by(run)
async def test_unfinished_work_of_a_request_holds_up_only_its_own_connection() -> None:
    pool = Pool()
    await turn()
    long = [pool.offer(size=10) for _ in range(20)]
    short = pool.offer(size=1)
    while not short.is_handled:
        await turn()
    assert not any(source.is_handled for source in long)
    assert pool.channel.bytes == 0, "no other request waits for room because of it"
    pool.gate.set()
    while not all(source.is_handled for source in long):
        await turn()
    assert pool.channel.bytes == 0
    assert pool.metrics.per_api[apis.METADATA.key].handled == 21
    pool.channel.close()
    await pool.pool.close(1)


@run_by(run)
async def test_unfinished_work_of_a_request_may_fail_and_is_answered_then() -> None:
    pool = Pool()
    pool.error = BrokerError(ErrorCode.CORRUPT_MESSAGE, "as it came")
    pool.gate.set()
    source = pool.offer(size=10)
    while not source.is_handled:
        await turn()
    assert source.answers == [1]
    assert pool.metrics.per_api[apis.METADATA.key].errors == 1
    pool.channel.close()
    await pool.pool.close(1)


@run_by(run)
async def test_the_end_waits_for_unfinished_work_and_then_cancels_it() -> None:
    pool, other = Pool(), Pool()
    late, in_time = pool.offer(size=10), other.offer(size=10)
    asyncio.get_running_loop().call_later(0.01, other.gate.set)
    for each in (pool, other):
        each.channel.close()
        await each.pool.close(0.05)
    assert in_time.is_handled
    assert not late.is_handled
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("rest of")]

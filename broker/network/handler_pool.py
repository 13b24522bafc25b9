"""The tasks that take requests from a channel and run their handlers (Kafka's KafkaRequestHandlerPool)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from minibroker.broker.network.dialect import Undecoded
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.request_channel import Request, RequestChannel
from minibroker.protocol.errors import BrokerError, ErrorCode

logger = logging.getLogger("minibroker.network")

Continuation = Awaitable[None]
"""The rest of a request's handling, which waits long for a thread. The connection's next request waits for it; the few
handler tasks continue with other requests, and the channel has room again. Each connection has at most one
continuation, so only the number of connections bounds their memory, as in Kafka, whose channels do not count bytes."""

RequestHandler = Callable[[Request], Awaitable[Continuation | None]]


UNAUTHORIZED = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


class RequestHandlerPool:
    """`size` handler tasks on one channel. An exception of a handler is answered as an error, and the task
    continues."""

    def __init__(
        self,
        name: str,
        size: int,
        channel: RequestChannel,
        handler: RequestHandler,
        metrics: NetworkMetrics,
        clock: Callable[[], float],
        large: LargeRequests | None = None,
    ) -> None:
        """`large`: handles the large requests of the channel, if it has any."""
        self.size = size
        self._large = large
        self._name = name
        self._channel = channel
        self._handler = handler
        self._metrics = metrics.per_api
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._continuations: set[asyncio.Task[None]] = set()
        self._capacity_s = 0.0
        """Seconds of task time available until `_since_s`, over all tasks."""
        self._since_s: float | None = None
        """Time of the start or of the last resize."""
        self.busy_s = 0.0
        """Seconds spent in handlers, over all tasks. Waits for disks are included, continuations are not."""

    def start(self) -> None:
        self._since_s = self._clock()
        self._add_tasks()

    def resize(self, size: int) -> None:
        """Change the number of tasks, at any time. Excess tasks end after their current or next request."""
        if self._since_s is None or size == self.size:
            self.size = size
            return
        now_s = self._clock()
        self._capacity_s += (now_s - self._since_s) * self.size
        self._since_s, self.size = now_s, size
        self._add_tasks()

    def _add_tasks(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(len(self._tasks), self.size):
            name = f"{self._name}-request-handler-{number}"
            self._tasks.append(loop.create_task(self._handle_requests(), name=name))

    def idle_ratio(self) -> float:
        """Return the fraction of its time since the start for which the average task was idle (Kafka's
        RequestHandlerAvgIdlePercent). It is low if handlers wait; if they use up the processor, the event loop's lag
        shows it instead."""
        if self._since_s is None:
            return 1.0
        capacity_s = self._capacity_s + (self._clock() - self._since_s) * self.size
        return 1.0 - self.busy_s / capacity_s if capacity_s > 0 else 1.0

    async def close(self, grace_s: float) -> None:
        """Let the tasks handle the requests queued in the channel, which must be closed. Cancel them after
        `grace_s`."""
        deadline_s = asyncio.get_running_loop().time() + grace_s
        for tasks in (self._tasks, self._continuations):  # these may grow until the tasks have ended
            if not tasks:
                continue
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            done, late = await asyncio.wait(tasks, timeout=left_s)
            if late:
                logger.warning("%s: %d requests were not handled within %g s", self._name, len(late), grace_s)
            for task in late:
                task.cancel()
            for outcome in await asyncio.gather(*done, *late, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("%s: a request handler task had failed", self._name, exc_info=outcome)
        if self._large is not None:
            await self._large.close()

    async def _handle_requests(self) -> None:
        channel, clock, handler = self._channel, self._clock, self._handler
        loop = asyncio.get_running_loop()
        now = clock()
        while True:
            request = channel.poll(now)
            if request is None:
                request = await channel.wait()
                now = clock()
                channel.woken(now)
                if request is None:
                    return
            request.dequeued_at = now
            continuation: Continuation | None
            if type(request.body) is Undecoded:
                assert self._large is not None
                continuation, failed = self._large.handle(request, handler), False
            else:
                continuation, failed = await self._attempt(request, handler)
            now = clock()
            took_s = now - request.dequeued_at
            self.busy_s += took_s
            channel.handled(request, took_s)
            if continuation is None:
                self._handled(request, failed, now, wake=False)
            else:
                task = loop.create_task(self._finish(request, continuation), name=f"continuation of {request!r}")
                self._continuations.add(task)
                task.add_done_callback(self._continuations.discard)
            if len(self._tasks) > self.size:
                this = asyncio.current_task()
                self._tasks = [task for task in self._tasks if task is not this]
                channel.leave()
                return

    async def _finish(self, request: Request, continuation: Continuation) -> None:
        _, failed = await self._attempt(request, lambda _: continuation)
        self._handled(request, failed, self._clock(), wake=True)

    async def _attempt(self, request: Request, handler: RequestHandler) -> tuple[Continuation | None, bool]:
        """Run the handler. Return its continuation, if any, and whether it failed; a failure is answered here."""
        try:
            return await handler(request), False
        except BrokerError as error:
            of_api = self._metrics[request.api.key]
            of_api.unauthorized += error.code in UNAUTHORIZED
            request.fail(error.code, error.detail)
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            logger.exception("%r was cancelled by a task that its handler awaited", request)
            request.fail(ErrorCode.UNKNOWN_SERVER_ERROR, "a task that the handler awaited was cancelled")
        except Exception as error:
            logger.exception("%r failed in its handler", request)
            request.fail(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__} in the handler")
        return None, True

    def _handled(self, request: Request, failed: bool, now: float, *, wake: bool) -> None:
        request.handled_at = now
        of_api = self._metrics[request.api.key]
        of_api.handled += 1
        of_api.errors += failed
        of_api.request_bytes += request.size
        of_api.request_queue.add(request.dequeued_at - request.received_at)
        of_api.local.add(now - request.dequeued_at)
        request.source.handled(wake=wake)


def _this_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

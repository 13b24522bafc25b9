"""The tasks that take requests from a channel and run their handlers (Kafka's KafkaRequestHandlerPool)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.request_channel import Request, RequestChannel
from minibroker.protocol.errors import BrokerError, ErrorCode

logger = logging.getLogger("minibroker.network")

Rest = Awaitable[None]
"""What is left of a request, and waits for a thread for long. Its connection's next request waits for it, and nobody
else's: there are few handler tasks, and they go on, and the channel has room again. So what rests hold is bounded by
the connections alone, of which each has one at most, as in Kafka, whose channels know no bytes."""

RequestHandler = Callable[[Request], Awaitable[Rest | None]]


class RequestHandlerPool:
    """`size` handler tasks on one channel. Whatever a handler raises is answered, and the task goes on."""

    def __init__(
        self,
        name: str,
        size: int,
        channel: RequestChannel,
        handler: RequestHandler,
        metrics: NetworkMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.size = size
        self._name = name
        self._channel = channel
        self._handler = handler
        self._metrics = metrics.per_api
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._rests: set[asyncio.Task[None]] = set()
        self._capacity_s = 0.0
        """Seconds that all tasks together have had until `_since_s`."""
        self._since_s: float | None = None
        """When it was started, or given its present size."""
        self.busy_s = 0.0
        """Seconds spent in handlers, waiting for disks included but for rests, added up over the tasks."""

    def start(self) -> None:
        self._since_s = self._clock()
        self._add_tasks()

    def resize(self, size: int) -> None:
        """At any time. Of tasks that are too many each ends with the request that it has, or gets next."""
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
        """The part of its time, since the start, in which the average task had nothing to do: 1.0 is all of it.
        (Kafka's RequestHandlerAvgIdlePercent.) It is low if handlers wait for something; if they use up the
        processor, that shows in the event loop's lag instead."""
        if self._since_s is None:
            return 1.0
        capacity_s = self._capacity_s + (self._clock() - self._since_s) * self.size
        return 1.0 - self.busy_s / capacity_s if capacity_s > 0 else 1.0

    async def close(self, grace_s: float) -> None:
        """Let the tasks handle what is queued in the channel, which must be closed; after `grace_s` cancel them."""
        deadline_s = asyncio.get_running_loop().time() + grace_s
        for tasks in (self._tasks, self._rests):  # which may become more until the tasks have ended
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
            rest, failed = await self._attempt(request, handler)
            now = clock()
            self.busy_s += now - request.dequeued_at
            channel.handled(request)
            if rest is None:
                self._handled(request, failed, now, wake=False)
            else:
                task = loop.create_task(self._finish(request, rest), name=f"rest of {request!r}")
                self._rests.add(task)
                task.add_done_callback(self._rests.discard)
            if len(self._tasks) > self.size:
                this = asyncio.current_task()
                self._tasks = [task for task in self._tasks if task is not this]
                return

    async def _finish(self, request: Request, rest: Rest) -> None:
        _, failed = await self._attempt(request, lambda _: rest)
        self._handled(request, failed, self._clock(), wake=True)

    async def _attempt(self, request: Request, handler: RequestHandler) -> tuple[Rest | None, bool]:
        """What is left, and whether it has failed, which is answered then."""
        try:
            return await handler(request), False
        except BrokerError as error:
            of_api = self._metrics[request.api.key]
            of_api.unauthorized += error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            request.fail(error.code, error.detail)
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            logger.exception("%r was cancelled by something that its handler waited for", request)
            request.fail(ErrorCode.UNKNOWN_SERVER_ERROR, "what the handler waited for was cancelled")
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
        of_api.request_queue_s += request.dequeued_at - request.received_at
        of_api.local_s += now - request.dequeued_at
        request.source.handled(wake=wake)


def _this_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

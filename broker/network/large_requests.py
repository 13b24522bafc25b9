"""Requests that name thousands of things take turns, and their bodies are decoded and encoded in a worker thread.

The problem. A frame of a megabyte has room for a hundred thousand partitions or groups. It takes a tenth of a second to
decode them and longer to encode the answer. Meanwhile the event loop serves no one, so a few connections that send such
requests would stop the broker.

The choice. A dialect decodes few elements at once; for a body with more it returns `Undecoded`. The handler task leaves
such a request as a continuation, so that it is free for others, and the body is decoded when its turn comes. Only
MOST_AT_ONCE of them are in memory decoded; until then there is only the frame. Brokers that have proved themselves do
not take turns (`NativeDialect`).

A small request may have a large answer: the offsets of all groups, or the members of a large one. Its handler leaves
the answer to `answer`, for which the same turns count. It also waits until clients have read enough of earlier answers,
since it costs its client next to nothing.

Rejected: bounds so low that every request is quick. An administrator may ask for all groups of a cluster at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from minibroker.broker.network.dialect import Answer, BadInput, Undecoded
from minibroker.protocol.apis import READS, Api
from minibroker.protocol.messages import Message
from minibroker.protocol.world import Executor

logger = logging.getLogger("minibroker.network")

MOST_AT_ONCE = 2
"""Large requests that are handled at a time."""


class LargeRequest(Protocol):
    """A request whose body is `Undecoded` at first."""

    api: Api[Any, Any]
    body: Any
    large: LargeRequests | None
    """Encodes the answer."""

    @property
    def closed(self) -> bool: ...
    def respond(self, body: Message) -> None: ...
    def refuse(self, bad_input: BadInput) -> None: ...
    def respond_nothing(self) -> None: ...


R = TypeVar("R", bound=LargeRequest)


class LargeRequests:
    def __init__(
        self, executor: Executor, when_read: Callable[[Callable[[], None]], None] = lambda call: call()
    ) -> None:
        """`when_read` makes a call once clients have read enough of earlier answers."""
        self._executor = executor
        self._when_read = when_read
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._encoding: set[asyncio.Task[None]] = set()

    async def handle(self, request: R, handler: Callable[[R], Awaitable[Awaitable[None] | None]]) -> None:
        """Decode and handle the request in its turn. The answer to it is encoded within the turn if the handler gives
        one before it returns."""
        undecoded = request.body
        assert isinstance(undecoded, Undecoded)
        async with self._turns:
            if request.closed and request.api.key in READS:
                request.respond_nothing()
                return
            body = await self._executor.run(_decoded, undecoded)
            if isinstance(body, BadInput):
                request.refuse(body)
                return
            request.body = body
            request.large = self
            continuation = await handler(request)
            if continuation is not None:
                await continuation
            if self._encoding:
                await asyncio.wait(self._encoding)

    async def answer(self, request: R, build: Callable[[], Awaitable[Message]]) -> None:
        """Answer the request, in its turn, with the body that `build` returns."""
        async with self._turns:
            room = asyncio.Event()
            self._when_read(room.set)
            await room.wait()
            if request.closed:
                request.respond_nothing()
                return
            body = await build()
            request.large = self
            request.respond(body)
            if self._encoding:
                await asyncio.wait(self._encoding)

    def encode(self, encode: Callable[[], Answer | None], finish: Callable[[Answer | None], None]) -> None:
        """Call `finish` with the result of `encode`, which runs in a worker thread; None if it raises, which is
        logged."""
        task = asyncio.get_running_loop().create_task(self._encode(encode, finish), name="encoding of a large answer")
        self._encoding.add(task)
        task.add_done_callback(self._encoding.discard)

    async def close(self) -> None:
        """Wait for the answers that are being encoded."""
        if self._encoding:
            await asyncio.wait(self._encoding)

    async def _encode(self, encode: Callable[[], Answer | None], finish: Callable[[Answer | None], None]) -> None:
        answer = None
        try:
            answer = await self._executor.run(encode)
        except Exception:  # the dispatch of this request ends here
            logger.exception("a large answer cannot be encoded")
        finish(answer)


def _decoded(undecoded: Undecoded) -> Message | BadInput:
    """Return the body, or the error. An error that is raised through a future refers to itself by its traceback, so
    that the frame would wait for the collector."""
    try:
        return undecoded.decode()
    except BadInput as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

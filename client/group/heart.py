"""The heartbeats of a group member, which go on while its user blocks the event loop (Kafka's HeartbeatThread, KIP-62).

The problem: a group removes a member that is silent for `session_timeout_ms`. The member's tasks run in the user's
event loop, and a user who computes there for a minute stops all of them, although nothing is wrong.

The choice: the heart runs beside the loop (`World.beside`), with connections of its own, and finds the coordinator by
itself. The member gives it the generation and the member id to send. The heart reports that the group rebalances, or
that it has removed the member. It never joins: joining takes partitions from the user, who must be asked first.

Heartbeats alone would keep a member in the group whose user is stuck forever. So the heart also watches whether records
are asked for. After `max_poll_interval_ms` without that, it leaves the group on the member's behalf, and reports it.

Rejected: the whole member beside the loop (each of its steps needs the user's loop, for positions and the listener); a
socket without a loop (the coordinator moves, which requires look-ups, time limits and retries that exist already).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from minibroker.client.cluster.connections import OVERDUE_S
from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.log import Logger, defer
from minibroker.client.security import Protection
from minibroker.client.tasks import Waker
from minibroker.protocol.apis import HEARTBEAT, LEAVE_GROUP
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.world import Beside, World

logger = Logger("minibroker.client")

LEAVE_PATIENCE_S = 5.0


class Membership(NamedTuple):
    """The identity of a member in its group, which each of its requests names."""

    group: str
    generation_id: int
    member_id: str
    group_instance_id: str | None = None


class Refused(NamedTuple):
    """The coordinator has answered a heartbeat with this error."""

    membership: Membership
    code: ErrorCode


class Overslept(NamedTuple):
    """The member has left, because no records were asked for during `max_poll_interval_ms`."""

    membership: Membership
    silent_s: float


class Unreachable(NamedTuple):
    """No heartbeat was answered for a while."""

    reason: str


class Heard(NamedTuple):
    """A heartbeat was answered."""


News = Refused | Overslept | Unreachable | Heard


class Heart:
    """See the module. Made in the consumer's loop, in which `tell` is called."""

    def __init__(
        self,
        runtime: ClientRuntime,
        in_hand: InHand,
        tell: Callable[[News], None],
        *,
        heartbeat_interval_s: float,
        max_poll_interval_s: float,
    ) -> None:
        self._runtime = partial(
            ClientRuntime,
            runtime.bootstrap,
            client_id=runtime.connections.client_id,
            request_timeout_ms=runtime.request_timeout_s * 1_000,
            retry_backoff_ms=runtime.retry_backoff_s * 1_000,
            metadata_max_age_ms=runtime.metadata_max_age_s * 1_000,
        )
        self._protection = runtime.protection
        self._client_id = runtime.connections.client_id
        self._in_hand = in_hand
        self._tell = tell
        self._interval_s = heartbeat_interval_s
        self._max_poll_interval_s = max_poll_interval_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beside: Beside | None = None
        # Only the heart uses the attributes below.
        self._membership: Membership | None = None
        self._waker: Waker | None = None
        self._mark: object = None
        self._marked_at = 0.0

    # -- in the consumer's loop --

    async def run(self, world: World) -> None:
        """The task. Runs until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._beside = world.beside(self._main, f"heart of {self._client_id}")
        await self._beside.wait()

    def beat(self, membership: Membership | None) -> None:
        """Send heartbeats for this membership from now on; None: send none."""
        assert self._beside is not None, "the heart runs before the member joins"
        self._beside.call(lambda: self._set(membership))

    # -- beside it --

    def _set(self, membership: Membership | None) -> None:
        self._membership = membership
        if self._waker is not None:
            self._waker.wake()

    async def _main(self, world: World) -> None:
        if (loop := asyncio.get_running_loop()) is not self._loop:
            defer(loop)
        crashed: list[BaseException] = []
        protection = with_tokens_of(self._loop, self._protection)
        runtime = self._runtime(world=world, on_crash=crashed.append, protection=protection)
        self._waker = Waker()
        self._mark, self._marked_at = self._in_hand.mark(), world.clock.monotonic()
        runtime.metadata.request_refresh()  # as long as the bootstrap addresses are those of living brokers
        runtime.go_on()
        beats = asyncio.get_running_loop().create_task(self._beats(runtime), name="heartbeats")
        try:
            while self._loop is not None and not self._loop.is_closed():
                look_s = min(self._interval_s, self._max_poll_interval_s / 4)
                await asyncio.wait([beats], timeout=look_s)
                if crashed:
                    raise crashed[0]
                if beats.done():
                    beats.result()
                if (slept_s := self._slept_s(world.clock.monotonic())) > self._max_poll_interval_s:
                    await self._leave(runtime, slept_s)
        finally:
            beats.cancel()
            await asyncio.wait([beats])
            await runtime.close()

    def _slept_s(self, now: float) -> float:
        """Return the seconds since the user last asked for records."""
        mark = self._in_hand.mark()
        if self._in_hand.asking or mark != self._mark:
            self._mark, self._marked_at = mark, now
        return now - max(self._marked_at, self._in_hand.asked_at)

    async def _beats(self, runtime: ClientRuntime) -> None:
        assert self._waker is not None
        coordinators = Coordinators(runtime)
        clock = runtime.clock
        beat_at = clock.monotonic()
        said: Membership | None = None
        while True:
            membership = self._membership
            now = clock.monotonic()
            if membership != said:
                said, beat_at = membership, now + self._interval_s
            if membership is None or now < beat_at:
                await self._waker.sleep(None if membership is None else beat_at - now)
                continue
            beat_at = now + self._interval_s
            request = g.HeartbeatRequest(
                membership.group, membership.generation_id, membership.member_id, membership.group_instance_id
            )
            try:
                answered = await coordinators.request(
                    membership.group,
                    HEARTBEAT,
                    request,
                    code_of=lambda response: response.error_code,
                    timeout_s=max(self._interval_s, OVERDUE_S * 3),
                )
            except (NetworkError, InvalidMessage, BrokerError) as error:
                self._pass_on(Unreachable(str(error)))
                beat_at = clock.monotonic()
                continue
            code = error_of(answered.response.error_code)
            if membership is self._membership:
                self._pass_on(Heard() if code is ErrorCode.NONE else Refused(membership, code))

    async def _leave(self, runtime: ClientRuntime, slept_s: float) -> None:
        membership, self._membership = self._membership, None
        if membership is None:
            return
        logger.warning(
            "%s: leaves group %s, as no records were asked for during %.1f s, which is more than "
            "max_poll_interval_ms=%d: process fewer records at a time, or raise it",
            self._client_id,
            membership.group,
            slept_s,
            round(self._max_poll_interval_s * 1_000),
        )
        self._pass_on(Overslept(membership, slept_s))
        await leave(Coordinators(runtime), membership, "max_poll_interval_ms is over", LEAVE_PATIENCE_S)

    def _pass_on(self, news: News) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._tell, news)
        except RuntimeError:
            return  # it was closed just now


def with_tokens_of(loop: asyncio.AbstractEventLoop | None, protection: Protection) -> Protection:
    """Return the same protection for another thread. A coroutine that provides tokens runs in the user's loop, to which
    its connections and locks belong."""
    sasl = protection.sasl
    if loop is None or sasl is None or not inspect.iscoroutinefunction(sasl.token_provider):
        return protection
    provider: Callable[[], Coroutine[Any, Any, str]] = sasl.token_provider

    async def token() -> str:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(provider(), loop))

    return protection._replace(sasl=replace(sasl, token_provider=token))


async def leave(coordinators: Coordinators, membership: Membership, reason: str, timeout_s: float) -> None:
    """Leave the group. If the coordinator does not answer in time, the group notices at the end of the session. Static
    members do not leave: they are expected back (KIP-345)."""
    if membership.group_instance_id is not None or not membership.member_id:
        return
    request = g.LeaveGroupRequest(
        membership.group, [g.LeavingMember(membership.member_id, membership.group_instance_id, reason)]
    )
    try:
        await coordinators.request(
            membership.group, LEAVE_GROUP, request, code_of=lambda response: response.error_code, timeout_s=timeout_s
        )
    except (NetworkError, InvalidMessage, BrokerError) as error:
        logger.info("leaving group %s: %s", membership.group, error)

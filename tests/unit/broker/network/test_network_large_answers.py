"""Large answers to small requests take turns, wait until earlier answers are read, and are encoded in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from minibroker.broker.network.dialect import BadInput, Undecoded
from minibroker.broker.network.large_requests import MOST_AT_ONCE, LargeRequests
from minibroker.deploy.simulator.loop import run
from minibroker.protocol.apis import LIST_GROUPS, METADATA, PRODUCE, Api
from minibroker.protocol.messages import Message
from minibroker.protocol.messages.groups import ListGroupsRequest, ListGroupsResponse
from tests.running import run_by

T = TypeVar("T")
BODY = ListGroupsResponse(0, 0, [])


def with_loop(program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(program())


class Threads:
    """An executor whose calls take a second each."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        self.calls += 1
        await asyncio.sleep(1)
        return function(*arguments)


class Asked:
    """A small request."""

    def __init__(self) -> None:
        self.api: Api[Any, Any] = LIST_GROUPS
        self.body: Any = ListGroupsRequest()
        self.large: LargeRequests | None = None
        self.closed = False
        self.answers: list[Message | None] = []

    def respond(self, body: Message) -> None:
        assert self.large is not None
        self.large.encode(lambda: [b"encoded"], lambda answer: self.answers.append(body))

    def refuse(self, bad_input: BadInput) -> None:
        raise AssertionError

    def respond_nothing(self) -> None:
        self.answers.append(None)


async def build() -> Message:
    return BODY


@run_by(with_loop)
async def test_as_many_are_encoded_at_a_time_as_there_are_turns() -> None:
    threads = Threads()
    large = LargeRequests(threads)
    asked = [Asked() for _ in range(3 * MOST_AT_ONCE)]
    tasks = [asyncio.create_task(large.answer(each, build)) for each in asked]
    await asyncio.sleep(0.5)
    assert threads.calls == MOST_AT_ONCE
    await asyncio.gather(*tasks)
    assert [each.answers for each in asked] == [[BODY]] * len(asked)


@pytest.mark.parametrize("leaves", [False, True])
@run_by(with_loop)
async def test_nothing_is_built_before_earlier_answers_are_read(leaves: bool) -> None:
    read: list[Callable[[], None]] = []
    threads = Threads()
    large, asked = LargeRequests(threads, read.append), Asked()
    task = asyncio.create_task(large.answer(asked, build))
    await asyncio.sleep(10)
    assert (asked.answers, threads.calls) == ([], 0)
    asked.closed = leaves
    read.pop()()
    await task
    assert asked.answers == ([None] if leaves else [BODY])


@pytest.mark.parametrize(("api", "handled"), [(PRODUCE, True), (METADATA, False)])
@run_by(with_loop)
async def test_of_what_a_lost_connection_has_left_reads_are_not_handled(api: Api[Any, Any], handled: bool) -> None:
    asked = Asked()
    asked.api, asked.closed, asked.body = api, True, Undecoded(lambda: BODY)
    bodies = []

    async def handler(request: Asked) -> None:
        bodies.append(request.body)

    await LargeRequests(Threads()).handle(asked, handler)
    assert bodies == ([BODY] if handled else [])

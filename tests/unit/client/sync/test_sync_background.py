"""Calls into the thread of a blocking client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from minibroker.client.errors import Closed
from minibroker.client.sync.background import Background, Call


class Owner:
    """The part of a client that its thread calls."""

    def __init__(self) -> None:
        self.background = Background("test client", self.was_forked, self.begin_to_exit)

    def was_forked(self) -> None: ...

    def begin_to_exit(self) -> None: ...


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    owner.background.start()
    yield owner
    owner.background.stop(10)
    assert not owner.background._thread.is_alive()


def test_an_interrupted_caller_leaves_no_task_behind(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []
    began = threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    def interrupted(call: Call[object]) -> None:
        began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        owner.background.call(work)
    assert outcomes == ["cancelled"]


def test_calls_that_are_under_way_when_the_thread_ends_and_those_that_come_later_raise_closed(owner: Owner) -> None:
    caught: list[BaseException] = []
    began = threading.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            owner.background.call(work)
        except Closed as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    began.wait(60)
    owner.background.stop(10)
    thread.join(60)
    call()
    assert len(caught) == 2


def test_a_call_that_is_on_its_way_when_the_loop_ends_gets_an_answer(owner: Owner) -> None:
    for _ in range(200):
        other = Owner()
        other.background.start()
        outcomes: list[object] = []

        async def work() -> int:
            return 1

        def call(other: Owner = other, outcomes: list[object] = outcomes) -> None:
            try:
                while True:
                    outcomes.append(other.background.call(work))
            except Closed:
                outcomes.append(Closed)

        thread = threading.Thread(target=call)
        thread.start()
        other.background.stop(10)
        thread.join(60)
        assert not thread.is_alive()
        assert outcomes[-1] is Closed


def test_a_call_from_the_clients_own_thread_is_refused_as_it_would_wait_for_ever(owner: Owner) -> None:
    async def nothing() -> None: ...

    async def work() -> None:
        owner.background.call(nothing)

    with pytest.raises(RuntimeError, match="the client's own thread"):
        owner.background.call(work)


def test_the_exception_of_a_call_is_raised_to_its_caller(owner: Owner) -> None:
    async def work() -> None:
        raise ZeroDivisionError("in the loop")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the loop"):
            owner.background.call(work)

"""SIGTERM to a command that can end as it does at Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
import typer

from minibroker.client.cli.terminal.output import run_until_terminated


@pytest.fixture(autouse=True)
def sigterm_as_a_process_begins_with_it() -> Iterator[None]:
    """Set SIGTERM to its default, as in a new process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_lets_a_command_finish_and_the_exit_code_is_143() -> None:
    said: list[str] = []

    async def command() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            said.append("committed")

    with pytest.raises(typer.Exit) as ended:
        run_until_terminated(command())
    assert (ended.value.exit_code, said) == (143, ["committed"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_sigterm_does_not_wait() -> None:
    async def command() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError

    with pytest.raises(typer.Exit) as ended:
        run_until_terminated(command())
    assert ended.value.exit_code == 143


def test_an_error_of_the_last_commit_is_reported_and_a_result_returned() -> None:
    async def failing() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("not committed") from None

    async def counting() -> int:
        return 7

    with pytest.raises(OSError, match="not committed"):
        run_until_terminated(failing())
    assert run_until_terminated(counting()) == 7


def test_where_sigterm_is_ignored_it_stays_so() -> None:
    async def command() -> int:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        return 7

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run_until_terminated(command()) == 7
    finally:
        signal.signal(signal.SIGTERM, before)

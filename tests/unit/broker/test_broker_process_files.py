"""The preparations of a broker's process before it starts a broker. Run in this process, and undone afterwards."""

from __future__ import annotations

import resource

import pytest

import minibroker.broker.__main__ as process


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        process._allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_log_level_that_does_not_exist_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINIBROKER_LOG_LEVEL", "verbose")
    assert process.log_level_problem() == "MINIBROKER_LOG_LEVEL=verbose: give DEBUG, INFO, WARNING or ERROR"
    monkeypatch.setenv("MINIBROKER_LOG_LEVEL", "debug")
    assert process.log_level_problem() is None

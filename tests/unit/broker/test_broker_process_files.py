"""How many files the process of a broker may have open. In this process, and undone afterwards."""

from __future__ import annotations

import resource

import minibroker.broker.__main__ as process


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        process._allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

"""Runs `async def` tests with asyncio.run, or with the runner that `@run_by` names.

A runner is a function that takes the test as a program and calls it with its resources: a cluster, a virtual world.

    @run_by(with_cluster, settings=LONG_SESSION)
    async def test_a_leader_is_killed(cluster: VirtualCluster, /, caplog: pytest.LogCaptureFixture) -> None: ...

The arguments before the slash come from the runner, those after it from pytest.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest


def run_by(runner: Callable[..., object] | str, **arguments: object) -> Callable[[Callable[..., Any]], Any]:
    """Run the test with `runner(test, **arguments)`, or with the fixture of this name.

    A parameter of the runner with the name of an argument of the test receives the same value. A runner may also have
    the parameter `tmp_path`, even if the test has no such argument.
    """
    fixtures = {runner} if isinstance(runner, str) else {"tmp_path"} & inspect.signature(runner).parameters.keys()

    def mark(test: Callable[..., Any]) -> Any:
        marked = pytest.mark.run_by.with_args(runner, arguments)(test)
        return pytest.mark.usefixtures(*fixtures)(marked) if fixtures else marked

    return mark


def run_test(test: Callable[..., Any], /, **values: object) -> None:
    """Run an asynchronous test. `values` contains its arguments after the slash, and may contain others."""
    names = [name for name, one in inspect.signature(test).parameters.items() if one.kind is not one.POSITIONAL_ONLY]
    program = functools.partial(test, **{name: values[name] for name in names})
    mark = next((mark for mark in getattr(test, "pytestmark", ()) if mark.name == "run_by"), None)
    if mark is None:
        asyncio.run(program())
        return
    runner, arguments = mark.args
    if isinstance(runner, str):
        fixture = values[runner]
        assert callable(fixture)
        fixture(program)
        return
    parameters = inspect.signature(runner).parameters
    arguments = {name: values[name] for name in parameters if name in names or name == "tmp_path"} | arguments
    first = next(name for name in parameters if name not in arguments)
    runner(**{first: program}, **arguments)

"""The blocking clients keep step with the asynchronous ones."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import minibroker
import minibroker.sync
from minibroker.client.administering import timeline
from minibroker.sync import Admin, Consumer, Processor, Producer, TimelineReader

PAIRS = [
    (minibroker.Admin, Admin),
    (minibroker.Consumer, Consumer),
    (minibroker.Processor, Processor),
    (minibroker.Producer, Producer),
    (timeline.TimelineReader, TimelineReader),
]
FUNCTIONS = {"process"}
"""Parameters of other types in blocking clients: functions that are called, not awaited."""
LACKING = {"world"}
"""Parameters that blocking clients lack: a simulated world has no threads."""
OF_TASKS = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__"}
BOUND = {"timeout_ms"}
"""The extra parameter of blocking methods, in place of `asyncio.timeout`. It comes last and is optional."""


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if name not in LACKING}


def public(kind: type) -> dict[str, Any]:
    members = {name: member for name, member in inspect.getmembers(kind) if callable(member)}
    return {name: member for name, member in members.items() if not name.startswith("_") or name in OF_TASKS}


METHODS = [(ours, theirs, name) for theirs, ours in PAIRS for name in public(theirs)]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"), METHODS, ids=[f"{theirs.__name__}.{name}" for _, theirs, name in METHODS]
)
def test_every_method_of_an_asynchronous_client_is_there_with_the_same_parameters(
    ours: type, theirs: type, name: str
) -> None:
    blocking = getattr(ours, OF_TASKS.get(name, name), None)
    assert blocking is not None, f"minibroker.sync lacks {theirs.__name__}.{name}"
    assert not inspect.iscoroutinefunction(blocking)
    assert blocking.__doc__ or name in OF_TASKS
    expected, found = parameters(getattr(theirs, name)), parameters(blocking)
    extra = {parameter: found.pop(parameter) for parameter in BOUND - set(expected) if parameter in found}
    assert all(parameter.default is None for parameter in extra.values())
    assert list(found) == list(expected)
    for parameter in found.values():
        assert parameter.kind == expected[parameter.name].kind
        assert parameter.default == expected[parameter.name].default
        if name not in OF_TASKS:
            assert parameter.annotation == expected[parameter.name].annotation


@pytest.mark.parametrize(("theirs", "ours"), PAIRS[:4], ids=lambda kind: kind.__name__)
def test_the_constructors_take_the_same_settings_with_the_same_defaults(theirs: type, ours: type) -> None:
    expected, found = parameters(theirs), parameters(ours)
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert parameter.default == expected[name].default
        assert parameter.annotation == expected[name].annotation or name in FUNCTIONS


def test_nothing_is_there_that_the_asynchronous_clients_lack() -> None:
    for theirs, ours in PAIRS:
        own = {name for name in public(ours) if name not in OF_TASKS.values()}
        assert own <= set(public(theirs))


USER = ast.parse((Path(__file__).parents[3] / "typed_user.py").read_text())
"""The file that mypy checks where the wheel is installed (tests/integration/launcher/test_installed_wheel.py)."""


def called_in(function: str) -> set[str]:
    (found,) = [node for node in USER.body if getattr(node, "name", "") == function]
    return {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (minibroker.Producer, "produce"),
        (minibroker.Consumer, "consume"),
        (minibroker.Processor, "process"),
        (minibroker.Admin, "administer"),
        (Producer, "produce_blocking"),
        (Consumer, "consume_blocking"),
        (Processor, "process_blocking"),
        (Admin, "administer_blocking"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_users_file_calls_every_method_of_each_client(kind: type, function: str) -> None:
    assert {name for name in public(kind) if name not in {*OF_TASKS, *OF_TASKS.values()}} - called_in(function) == set()


def test_the_users_file_uses_every_public_name() -> None:
    used = {node.id for node in ast.walk(USER) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(USER) if isinstance(node, ast.Attribute)}
    assert set(minibroker.__all__) - used == set()
    assert set(minibroker.sync.__all__) - attributes == set()


def test_the_package_offers_its_users_no_names_that_are_not_for_them() -> None:
    shown = {name for name in dir(minibroker) if not name.startswith("__")}
    assert shown >= {"Producer", "sync"}
    modules = {name for name in shown if inspect.ismodule(getattr(minibroker, name))}
    assert shown - modules == set(minibroker.__all__)
    assert all(getattr(minibroker, name).__name__ == f"minibroker.{name}" for name in modules)
    starred: dict[str, object] = {}
    exec("from minibroker import *", starred)  # the script's own `main` stays
    assert starred.keys() - {"__builtins__"} == set(minibroker.__all__)
    assert "main" not in starred

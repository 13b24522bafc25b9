"""`minibroker` and `minibroker.sync` export every type that public methods accept, return and raise."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import minibroker
import minibroker.sync
from minibroker.client import errors as client_errors
from minibroker.protocol import errors as protocol_errors
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world import World

NOT_FOR_USERS = {World}
"""A simulated world is for minibroker's own tests."""
PUBLIC = [getattr(module, name) for module in (minibroker, minibroker.sync) for name in module.__all__]
CLASSES = [value for value in PUBLIC if inspect.isclass(value)]
MADE_BY_CLIENTS = ("Delivery", "BatchDelivery", "TimelineReader", "Transaction")
"""Types that users never construct."""
ERRORS = {
    name: kind
    for module in (client_errors, protocol_errors)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, MinibrokerError)
}


def methods(kind: type) -> Iterator[Callable[..., Any]]:
    for name, method in inspect.getmembers(kind, callable):
        if not name.startswith("_") or (name == "__init__" and kind.__name__ not in MADE_BY_CLIENTS):
            yield method


def named_in(annotation: Any) -> Iterator[type]:
    for part in (annotation, typing.get_origin(annotation)):
        if inspect.isclass(part) and part.__module__.startswith("minibroker."):
            yield part
    for argument in typing.get_args(annotation):
        yield from named_in(argument)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_users_can_import_each_class_that_a_public_signature_names(kind: type) -> None:
    hints = [typing.get_type_hints(method) for method in methods(kind) if inspect.isfunction(method)]
    if issubclass(kind, tuple):
        hints.append(typing.get_type_hints(kind))
    named = {found for each in hints for annotation in each.values() for found in named_in(annotation)}
    assert named - NOT_FOR_USERS - set(PUBLIC) == set()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_users_can_import_each_error_that_a_public_docstring_names(kind: type) -> None:
    texts = [kind.__doc__ or "", *(method.__doc__ or "" for method in methods(kind))]
    named = {word for text in texts for word in re.findall(r"\b[A-Z]\w+", text) if word in ERRORS}
    assert named - set(minibroker.__all__) == set()


def test_the_blocking_clients_have_the_names_of_the_asynchronous_ones() -> None:
    assert set(minibroker.sync.__all__) <= set(minibroker.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Consumers'"):
        _ = minibroker.Consumers

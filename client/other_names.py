"""Hints for names that a client does not have: those of other Kafka clients, and mistyped ones. Python's own TypeError
and AttributeError name no alternative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from minibroker.client.security import Security

P = ParamSpec("P")
Self = TypeVar("Self")

_ELSEWHERE = {
    "bootstrap_servers": "it is called bootstrap here, and comes first",
    "group_id": "it is called group here: group=...",
    "compression_type": "it is called compression here: compression=...",
}
"""Arguments of Kafka, aiokafka and kafka-python that have another name here (`docs/client.md`)."""


def arguments_of(init: Callable[..., object]) -> list[str]:
    """Return the names that a client's constructor takes, those about security included."""
    parameters = inspect.signature(init).parameters.values()
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    return [*named, *Security.__annotations__]


def meant(name: str, known: Collection[str]) -> str | None:
    """Return a hint for a name that a constructor does not take; None if nothing is similar."""
    plain = name.replace(".", "_")
    if plain in _ELSEWHERE:
        return _ELSEWHERE[plain]
    if plain != name:
        return f"write it with _: {plain}=..."
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else None


def knows_other_names(init: Callable[Concatenate[Self, P], None]) -> Callable[Concatenate[Self, P], None]:
    """Decorate the constructor of a client: an unknown argument raises a TypeError that names the class that was
    called, and the name that was meant."""
    known = arguments_of(init)

    @wraps(init)
    def checked(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                who = type(self).__name__
                raise TypeError(f"{who}() has no argument {name}: {meant(name, known) or f'help({who}) lists them'}")
        init(self, *args, **kwargs)

    return checked


class Elsewhere:
    """A method of Kafka's clients that has another name here. Its use raises an AttributeError that has that name."""

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._hint}")


class NamesOfKafkasProducer:
    """Kafka's methods of transactions. Not `__getattr__`, which would slow down each access to an attribute."""

    if not TYPE_CHECKING:
        init_transactions = Elsewhere("the start of a producer with a transactional_id does that")
        begin_transaction = Elsewhere("use `with producer.transaction():`, in asyncio `async with`")
        commit_transaction = Elsewhere("the end of the block `with producer.transaction():` commits")
        abort_transaction = Elsewhere("an exception that leaves the block `with producer.transaction():` aborts")
        send_offsets_to_transaction = Elsewhere(
            "call send_offsets(positions, consumer.group_metadata()) of the transaction"
        )
        send_offsets = Elsewhere(
            "call it on the transaction: `with producer.transaction() as transaction:` (in asyncio `async with`), then "
            "transaction.send_offsets(positions, consumer.group_metadata())"
        )


class NamesOfKafkasTransaction:
    """Names that a transaction might have, and `await`, which it is not made for."""

    if not TYPE_CHECKING:
        begin = Elsewhere("its block begins it: `with producer.transaction():`, in asyncio `async with`")
        commit = Elsewhere("the end of its block commits it")
        abort = Elsewhere("an exception that leaves its block aborts it: raise one of your own")
        send = Elsewhere("call producer.send within its block")
        send_batch = Elsewhere("call producer.send_batch within its block")

        def __await__(self) -> Generator[Any, None, None]:
            raise TypeError(
                "a transaction is a block, and is not awaited: write `with producer.transaction():`, in asyncio "
                "`async with`"
            )

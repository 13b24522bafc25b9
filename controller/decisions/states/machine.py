"""The checker of both state machines: a move is legal if the table of its machine has it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

State = TypeVar("State", bound=Enum)
Table = Mapping[State, frozenset[State]]


def check(table: Table[State], current: State, target: State) -> bool:
    """Return whether the table allows the move from `current` to `target`."""
    return current in table[target]


class IllegalMove(NamedTuple):
    """A move that was refused and changed nothing."""

    what: str
    """`partition orders-0` or `replica orders-0 on 2`."""
    current: Enum
    target: Enum

    def __str__(self) -> str:
        return f"{self.what}: {self.current.value} -> {self.target.value} is not a legal move"

"""How a bug gets into the product at run time, and out again.

A mutant replaces functions, methods and properties of product modules. It gets at what it replaces, so most of them
are a few lines around the original: the smaller, the fewer changes of the product break it. A name that the product
does not have any more raises at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

PRODUCT = "minibroker"

Replacement = Callable[..., Any]
"""Takes the original as its first argument, then what the original takes."""


class Patches:
    """What a mutant has replaced, to be undone."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def instead_of(self, owner: type | ModuleType, name: str) -> Callable[[Replacement], None]:
        """A decorator: from now on the decorated function is called in place of `owner.name`.

        A function of a module is replaced in every module of the product that knows it, by whatever name.
        """
        original = vars(owner)[name]

        def plant(replacement: Replacement) -> None:
            if isinstance(original, property):
                self.set(owner, name, property(lambda instance: replacement(original.fget, instance)))
                return
            assert callable(original), f"{owner.__name__}.{name} is neither a function nor a property"

            @functools.wraps(original)
            def stand_in(*arguments: Any, **named: Any) -> Any:
                return replacement(original, *arguments, **named)

            if isinstance(owner, type):
                self.set(owner, name, stand_in)
                return
            for module, known_as in _known_as(original):
                self.set(module, known_as, stand_in)

        return plant

    def set(self, owner: type | ModuleType, name: str, value: Any) -> None:
        """Let `owner.name` be `value`. It must be there already."""
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            owner, name, before = self._undo.pop()
            setattr(owner, name, before)


def _known_as(function: object) -> list[tuple[ModuleType, str]]:
    modules = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == PRODUCT]
    return [(module, name) for module in modules for name, value in vars(module).items() if value is function]


@dataclass(frozen=True)
class Mutant:
    """A bug to be planted."""

    name: str
    family: str
    """Kafka's number for it, or what else it is known by."""
    breaks: str
    """What is wrong, in a sentence."""
    plant: Callable[[Patches], None]


def mutant(family: str, breaks: str) -> Callable[[Callable[[Patches], None]], Mutant]:
    """A decorator: makes a Mutant of the function that plants it, named as the function is."""

    def make(plant: Callable[[Patches], None]) -> Mutant:
        return Mutant(plant.__name__.strip("_").replace("_", "-"), family, breaks, plant)

    return make


def mutants_of(module: ModuleType) -> list[Mutant]:
    """In the order in which they stand there."""
    return [value for value in vars(module).values() if isinstance(value, Mutant)]

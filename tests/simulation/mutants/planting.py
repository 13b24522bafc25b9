"""Plants bugs in the product at run time, and removes them.

A mutant replaces functions, methods and properties of product modules. It can call the originals, so most mutants are a
few lines around one: the smaller a mutant, the fewer changes of the product break it. A name that no longer exists in
the product raises at once.
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
"""Takes the original function, then the arguments of the original."""


class Patches:
    """Replaces attributes for a mutant, and restores them."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def instead_of(self, owner: type | ModuleType, name: str) -> Callable[[Replacement], None]:
        """A decorator: the decorated function is called in place of `owner.name` until `undo`.

        A module's function is replaced in all product modules that import it, under any name.
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
        """Set `owner.name`, which must exist, until `undo`."""
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
    """Kafka's issue number, or another name of the kind of bug."""
    breaks: str
    """The wrong behaviour, in one sentence."""
    plant: Callable[[Patches], None]


def mutant(family: str, breaks: str) -> Callable[[Callable[[Patches], None]], Mutant]:
    """A decorator: turns a function that plants a bug into a Mutant, named after the function."""

    def make(plant: Callable[[Patches], None]) -> Mutant:
        return Mutant(plant.__name__.strip("_").replace("_", "-"), family, breaks, plant)

    return make


def mutants_of(module: ModuleType) -> list[Mutant]:
    """Return the module's mutants in the order of their definition."""
    return [value for value in vars(module).values() if isinstance(value, Mutant)]

"""The registry of attacks: what each sends, and to which cluster.

A family's module registers its attacks; the harness runs them in a process of their own:

    @attack(settings={"num.partitions": "6"}, prepare=fill)
    async def constant_column(target: Target) -> None:
        \"\"\"A column said once for a million records.\"\"\"
        ...
        assert answer.error_code == ErrorCode.INVALID_RECORD, answer

The first sentence of the docstring is printed. An attack ends by itself within ATTACK_S, or is cancelled then; both are
fine. It raises AssertionError if the cluster did something that it must not, such as accepting what it must refuse.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from minibroker.deploy.local.local_cluster import LocalCluster

FAMILIES = ("requests", "topics", "memory", "listeners", "readers")
"""The modules of this folder that register attacks."""
ATTACK_S = 10.0


class Target(NamedTuple):
    """The cluster under attack: three brokers, with ids from 1."""

    directory: Path
    bootstrap: str
    data_ports: dict[int, int]
    """The port of each broker's data listener, by broker id."""
    control_ports: dict[int, int]
    """The port of each broker's control listener, by broker id."""

    def cluster(self) -> LocalCluster:
        """Return the launcher, to kill a member or to read a log. Its methods block."""
        return LocalCluster(self.directory)


class Attack(NamedTuple):
    family: str
    name: str
    run: Callable[[Target], Awaitable[None]]
    settings: Mapping[str, str]
    """Settings of the brokers."""
    prepare: Callable[[Target], Awaitable[None]] | None
    """Runs before anything is measured, for at most a minute: creates topics and stores records."""
    ends_sessions: bool
    """Whether the attack itself kills brokers, so that their sessions end, and their memory begins anew."""

    @property
    def sentence(self) -> str:
        return (self.run.__doc__ or self.name).strip().partition("\n\n")[0].replace("\n    ", " ")


_registered: dict[str, Attack] = {}


def attack(
    *,
    settings: Mapping[str, str] | None = None,
    prepare: Callable[[Target], Awaitable[None]] | None = None,
    ends_sessions: bool = False,
) -> Callable[[Callable[[Target], Awaitable[None]]], Callable[[Target], Awaitable[None]]]:
    """Register a function as an attack. Its name is the function's, with hyphens; its family is the module's."""

    def register(run: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Awaitable[None]]:
        name = run.__name__.replace("_", "-")
        assert name not in _registered, f"two attacks are called {name}"
        family = run.__module__.rpartition(".")[2]
        _registered[name] = Attack(family, name, run, settings or {}, prepare, ends_sessions)
        return run

    return register


def registered() -> dict[str, Attack]:
    """Import the families; return all attacks by name."""
    package = __name__.rpartition(".")[0]
    for family in FAMILIES:
        if importlib.util.find_spec(f"{package}.{family}") is not None:
            importlib.import_module(f"{package}.{family}")
    return _registered


def chosen(only: str) -> list[Attack]:
    """Return the attacks that are named, or whose family is, in a list with commas; all for an empty one. Raises
    KeyError for an unknown name."""
    attacks = registered()
    if not only:
        return list(attacks.values())
    for name in only.split(","):
        if name not in attacks and name not in FAMILIES:
            raise KeyError(f"there is no attack and no family {name}: there are {', '.join([*FAMILIES, *attacks])}")
    return [each for each in attacks.values() if {each.name, each.family} & set(only.split(","))]

"""Closes an ensemble that serves one cluster alone to everybody without the brokers' credential.

The problem: whoever may create and delete children of `/` can delete `/controller`, and nodes that were created before
brokers had a credential stay open. Anybody who can write `/brokers/ids` redirects producers and followers to processes
of their own, and acknowledged records are lost.

The choice: the first session that finds `/` open protects each open node, children before their parents, and `/` last.
So an interrupted pass begins again, and a later start only looks at `/`. A node with any other ACL was protected by an
administrator, and stays as it is. This is for ensembles that the launcher or Docker Compose start; in an ensemble with
other users nothing but the cluster's new nodes is protected, as in Kafka.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from minibroker.protocol.world import NoNode

_log = logging.getLogger("minibroker.zookeeper")

Result = TypeVar("Result")

_AT_ONCE = 100
"""Nodes that are looked at, or protected, at a time."""


class Ensemble(Protocol):
    """The operations that the pass needs. Paths are those of the ensemble, above any chroot."""

    async def is_open(self, path: str) -> bool:
        """Return whether everybody may change the node. Raises NoNode."""
        ...

    async def protect(self, path: str) -> None:
        """Give the node the ACL of nodes that this session creates. Raises NoNode."""
        ...

    async def all_children(self, path: str) -> list[str]:
        """Raises NoNode."""
        ...


async def protect_all(ensemble: Ensemble) -> None:
    """Protect every open node, if `/` is open. Raises ZooKeeperError."""
    if not await ensemble.is_open("/"):
        return
    found, level = ["/"], ["/"]
    while level:
        level = [child for children in await _each(level, ensemble, _children) for child in children]
        found += level
    protected = sum(await _each(found[:0:-1], ensemble, _protect_if_open))
    await ensemble.protect("/")
    _log.info("ZooKeeper accepts changes from the brokers of this cluster only; %d open nodes are protected", protected)


async def _children(ensemble: Ensemble, path: str) -> list[str]:
    try:
        names = await ensemble.all_children(path)
    except NoNode:
        return []
    return [f"{path.rstrip('/')}/{name}" for name in names]


async def _protect_if_open(ensemble: Ensemble, path: str) -> bool:
    try:
        if not await ensemble.is_open(path):
            return False
        await ensemble.protect(path)
    except NoNode:  # its session has ended
        return False
    return True


async def _each(
    paths: Sequence[str], ensemble: Ensemble, of_one: Callable[[Ensemble, str], Awaitable[Result]]
) -> list[Result]:
    results: list[Result] = []
    for begin in range(0, len(paths), _AT_ONCE):
        results += await asyncio.gather(*(of_one(ensemble, path) for path in paths[begin : begin + _AT_ONCE]))
    return results

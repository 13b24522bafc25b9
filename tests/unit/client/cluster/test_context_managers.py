"""`with` instead of `async with`, or the reverse, raises an error that names the right one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import minibroker
import minibroker.sync
from minibroker.testing import LocalCluster, SyncLocalCluster


async def enter(manager: Any) -> None:
    async with manager:
        pass


@pytest.mark.parametrize("kind", [minibroker.Producer, minibroker.Consumer, minibroker.Admin])
def test_with_for_an_asynchronous_client_names_async_with_and_the_blocking_module(kind: Any) -> None:
    expected = rf"{kind.__name__} is asynchronous: write `async with`.*minibroker\.sync"
    with pytest.raises(TypeError, match=expected), kind("localhost:9"):
        pass


def test_a_processor_names_the_other_processor() -> None:
    settings: dict[str, Any] = {"topics": ["orders"], "group": "g", "transactional_id": "t", "process": id}
    misused: Any = minibroker.Processor("localhost:9", **settings)
    with pytest.raises(TypeError, match=r"use Processor of minibroker\.sync"), misused:
        pass
    with pytest.raises(TypeError, match=r"use Processor of minibroker$"):
        asyncio.run(enter(minibroker.sync.Processor("localhost:9", **settings)))


@pytest.mark.parametrize("kind", [minibroker.sync.Producer, minibroker.sync.Consumer, minibroker.sync.Admin])
def test_async_with_for_a_blocking_client_names_with(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} is blocking: write `with`"):
        asyncio.run(enter(kind("localhost:9")))


def test_clusters_for_tests_name_each_other() -> None:
    misused: Any = LocalCluster()
    with pytest.raises(TypeError, match=r"async with.*SyncLocalCluster"), misused:
        pass
    with pytest.raises(TypeError, match=r"`with`.*minibroker\.testing\.LocalCluster"):
        asyncio.run(enter(SyncLocalCluster()))

"""The real World closes each descriptor once: by the second time its number may be another file's or connection's."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path
from typing import cast

import pytest
import uvloop

from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol.world.real import RealDisk, RealNetwork


@pytest.mark.parametrize("kind", ["file", "lock"])
def test_a_descriptor_is_closed_once_though_two_threads_close_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "file")
    opened = RealDisk().open(path, create=True) if kind == "file" else RealDisk().lock(path)
    close = opened.close if kind == "file" else opened.release  # type: ignore[union-attr]
    closed: list[int] = []
    of_system = os.close

    def close_as_another_thread_does_too(descriptor: int) -> None:
        of_system(descriptor)
        closed.append(descriptor)
        assert len(closed) == 1
        close()

    monkeypatch.setattr(os, "close", close_as_another_thread_does_too)
    close()
    assert len(closed) == 1


class Leaving(asyncio.Protocol):
    def __init__(self, how: str) -> None:
        self.how = how
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        if self.how == "abort":
            connection.abort()
        else:
            connection.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_connection_that_ends_when_it_is_made_closes_no_other_descriptor(how: str) -> None:
    async def main() -> None:
        with socket.create_server((LOOPBACK, 0)) as listening:
            protocol = await RealNetwork().connect(LOOPBACK, listening.getsockname()[1], lambda: Leaving(how))
            await asyncio.wait_for(protocol.lost, 60)
            del protocol
            others = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
            gc.collect()
            for other in others:
                os.close(other)

    uvloop.run(main())

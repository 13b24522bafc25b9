"""The matrix of third-party clients takes its cluster down, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kafka_clients import matrix


class Cluster:
    """A cluster that takes a while to start."""

    told: list[str]

    def __init__(self, directory: Path) -> None:
        self.told = Cluster.told = []

    def up(self, *_: Any, **__: Any) -> None:
        self.told.append("starting")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        self.told.append("up")

    def file_or_none(self) -> object:
        return "file"

    def down(self, *, kill: bool) -> None:
        self.told.append("down")


def test_a_matrix_that_is_terminated_takes_its_cluster_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "LocalCluster", Cluster)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(matrix.try_clients(tmp_path, tmp_path, []))
    assert Cluster.told == ["starting", "up", "down"]

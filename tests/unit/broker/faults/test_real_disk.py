"""The files of the real World."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minibroker.protocol.world.real import RealDisk


@pytest.mark.parametrize("kind", ["file", "lock"])
def test_a_descriptor_is_closed_once_though_two_threads_close_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is closed, its number may already belong to another file or connection."""
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

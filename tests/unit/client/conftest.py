"""Fixtures for the client's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up a cluster that they cannot reach at their start after 0.7 s instead of 2 s."""
    monkeypatch.setattr("minibroker.client.cluster.runtime.START_PATIENCE_S", 0.7)

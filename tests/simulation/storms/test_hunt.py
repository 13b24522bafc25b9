"""The hunt for planted bugs reports its progress when it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.storms import hunt

NAME = next(iter(MUTANTS))


def stopped_after(count: int) -> Any:
    def simulate_many(*_: Any, **__: Any) -> Iterator[Any]:
        for seed in range(1, count + 1):
            yield SimpleNamespace(report=SimpleNamespace(seed=seed, anomalies=[]))
        raise KeyboardInterrupt

    return simulate_many


def test_an_interrupted_hunt_reports_how_many_seeds_it_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hunt, "simulate_many", stopped_after(7))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["hunt", "--mutant", NAME])
    assert hunt.main() == 130
    told = capsys.readouterr().out
    assert f"stopped at {NAME} after 7 seeds" in told
    assert ">  7  stopped" in told

"""A sample of the malformed input in bulk. `make hostile` sends all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile import kafka
from tests.faults.hostile.frames import report, run

FRAMES = 10_000
LIVE_FRAMES = 2_500
SEED = 2_024


@pytest.mark.slow
def test_malformed_frames_harm_neither_the_broker_nor_its_clients(tmp_path: Path) -> None:
    checks = run(FRAMES, LIVE_FRAMES, SEED, tmp_path)
    report("hostile frames", checks)
    assert [check for check in checks if not check.passed] == []


@pytest.mark.slow
def test_malformed_frames_of_kafkas_protocol_harm_neither_the_broker_nor_its_clients(tmp_path: Path) -> None:
    checks = kafka.run(FRAMES, LIVE_FRAMES, SEED, tmp_path)
    report("hostile kafka", checks)
    assert [check for check in checks if not check.passed] == []

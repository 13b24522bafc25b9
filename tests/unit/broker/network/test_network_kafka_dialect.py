"""Kafka's dialect, frame by frame: nonsense is BadInput. `make hostile` sends a hundred times as much of it."""

from __future__ import annotations

from tests.faults.hostile.kafka import InProcess, hostile_frame

FRAMES = 2_000


def test_frames_that_no_honest_client_sends_are_read_or_refused() -> None:
    in_process = InProcess()
    asked = sum(in_process.read(str(n), hostile_frame(7, n)).asked is not None for n in range(FRAMES))
    assert in_process.escaped == []
    assert FRAMES // 10 < asked < FRAMES // 2
    assert len(in_process.kinds) == len(in_process.refused)

"""A process that appends is killed; its log has every append that it reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from minibroker.broker.storage.recovery.recovery import recover
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import NOW, batch, everything, open_log, produced, stamped

APPENDER = """
import asyncio, sys
from tests.storage_support import NOW, batch, open_log
from minibroker.broker.storage.log_config import LogConfig

async def run():
    log = open_log(sys.argv[1], LogConfig(segment_bytes=200_000, flush_bytes=300_000)).log
    number = 0
    while True:
        log.append_as_leader(batch(5, size=200, producer_id=1, sequence=5 * number), 0, NOW)
        number += 1
        print(number, flush=True)
        await asyncio.sleep(0)

asyncio.run(run())
"""


def test_a_killed_process_loses_no_append_that_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDER, str(path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    said = 0
    for line in process.stdout:
        said = int(line)
        if said == 2_000:
            process.send_signal(signal.SIGKILL)
            break
    for line in process.stdout.read().splitlines():
        said = int(line)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    recovered = recover(
        RealDisk(),
        str(path),
        recovery_point=0,
        clean=False,
        log_start_offset=0,
        index_interval_bytes=4_096,
        now_ms=NOW,
    )
    for segment in recovered.segments:
        segment.close()
    assert not recovered.report.lost_more_than_an_incomplete_batch
    opened = open_log(str(path))
    assert opened.log.log_end_offset >= 5 * said
    expected = [stamped(batch(5, size=200, producer_id=1, sequence=5 * n), 5 * n, 0) for n in range(said)]
    assert everything(opened.log).startswith(b"".join(expected))
    assert opened.log.append_as_leader(produced(expected[-1]), 0, NOW).duplicate

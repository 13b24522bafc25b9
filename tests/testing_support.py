"""Processes that own a cluster of `minibroker.testing`, and a search for their remains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def left_behind(temporary: Path) -> list[str]:
    """Return the directories of clusters under `temporary`, and the command lines of processes that name one."""
    found = [str(path) for path in temporary.glob("minibroker-test-*")]
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                line = Path(f"/proc/{name}/cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if f"{temporary}/minibroker-test-" in line:
                found.append(line)
    return found


OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from minibroker.testing import SyncLocalCluster
with SyncLocalCluster(1) as cluster:
    print("up", flush=True)
    if "isolate" in sys.argv:
        cluster.isolate(1)
        print("isolated", flush=True)
    input()
"""


def owner(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a process with a cluster under `temporary`. It prints `up` and lives until it reads a line or is killed."""
    command = [sys.executable, "-c", OWNER, str(temporary), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

"""The command line as a user types it: each command is a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minibroker.deploy.local.local_cluster import LocalCluster

PATIENCE_S = 60.0


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self
        assert self.out.count("\n") == 1, self
        return json.loads(self.out)


def start(arguments: Sequence[str], directory: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start `minibroker ARGUMENTS` with the working directory `directory`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "minibroker", *arguments],
        cwd=directory,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        **options,
    )


def run(arguments: Sequence[str], directory: Path, stdin: bytes = b"") -> Ended:
    process = start(arguments, directory, stdin=subprocess.PIPE)
    try:
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    return Ended(process.returncode, out.decode(), err.decode())


class Shell:
    """Commands on the cluster in `.minibroker` of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cluster = LocalCluster(directory / ".minibroker")

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Ended:
        return run(arguments, self.directory, stdin)

    def ok(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must succeed without a message on stderr; return its output."""
        ended = self(*arguments, stdin=stdin)
        assert (ended.code, ended.err) == (0, ""), ended
        return ended.out

    def refused(self, code: int, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must fail with this exit code and one line on stderr; return that line."""
        ended = self(*arguments, stdin=stdin)
        assert ended.code == code, ended
        assert ended.out == "", ended
        assert ended.err.startswith("error: "), ended
        assert ended.err.count("\n") == 1, ended
        return ended.err

    def status(self) -> Any:
        return json.loads(self("status", "--format", "json").out)

"""The command line as a user types it: each command is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import wait_until
from tests.integration.cli.forking import ForkedCommand

PATIENCE_S = 240.0


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
    """Run `minibroker ARGUMENTS` to its end, in a process that does not import the command line again."""
    pipes = [os.pipe() for _ in range(3)]
    (given, ours_given), (ours_out, out), (ours_err, err) = pipes
    command = ForkedCommand(arguments, directory, (given, out, err))
    for descriptor in (given, out, err):
        os.close(descriptor)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(_write, ours_given, stdin)
        printed = [pool.submit(_read, descriptor) for descriptor in (ours_out, ours_err)]
        code = command.wait(PATIENCE_S)
        return Ended(code, *(future.result().decode() for future in printed))


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as stream:
        stream.write(data)


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as stream:
        return stream.read()


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

    def healthy(self) -> Shell:
        """Wait until the cluster is healthy; return the shell."""
        assert wait_until(lambda: not self.cluster.status().problems(), PATIENCE_S), self.cluster.status()
        return self


@contextmanager
def running_shell(
    directory: Path, settings: Mapping[str, str] | None = None, *, allow_faults: bool = False
) -> Iterator[Shell]:
    """A shell with a cluster of three brokers, which is killed at the end."""
    shell = Shell(directory)
    options = [text for name, value in (settings or {}).items() for text in ("--override", f"{name}={value}")]
    options += ["--allow-faults"] if allow_faults else []
    try:
        shell.ok("up", "--detach", "--base-port", str(free_ports(3)[0]), *options)
        yield shell
    finally:
        if shell.cluster.file_or_none() is not None:
            shell.cluster.down(kill=True)

"""A server that has imported the command line and forks for each command: the imports take longer than most commands.

A request holds a command's directory, arguments and standard streams, and a socket for its process id and exit code.
The server ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LONGEST = 1 << 16


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


class ForkedCommand:
    """`minibroker ARGUMENTS` in a process of the server. The descriptors are its standard streams."""

    def __init__(self, arguments: Sequence[str], directory: Path, streams: Sequence[int]) -> None:
        self._answers, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answers:
            request = json.dumps([str(directory), *arguments]).encode()
            socket.send_fds(_server(), [request], [answers.fileno(), *streams])
        self._pid = int(self._answers.recv(_LONGEST))

    def wait(self, within_s: float) -> int:
        """Return the exit code. Kills the command and raises TimeoutError if it takes longer."""
        with self._answers:
            self._answers.settimeout(within_s)
            try:
                return int(self._answers.recv(_LONGEST))
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)
                raise


def _serve(connection: socket.socket) -> None:
    """Return in the process of a command, after setting up its directory, arguments and streams."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 4)
        if not request:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    connection.close()
    answers, *streams = descriptors
    pid = os.fork()
    if pid:
        for stream in (0, 1, 2, *streams):
            os.close(stream)
        os.write(answers, b"%d" % pid)
        os.write(answers, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(answers)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(streams[number], number)
        os.close(streams[number])
        setattr(sys, name, os.fdopen(number, mode, closefd=False))
    directory, *sys.argv[1:] = json.loads(request)
    os.chdir(directory)


if __name__ == "__main__":
    import minibroker
    from minibroker.client.cli.terminal.output import run_app

    # Help imports the modules that parse and print, which a command imports as it needs them.
    with contextlib.redirect_stdout(io.StringIO()):
        run_app(minibroker.application(), ["topics", "list", "--help"])
    gc.freeze()  # else each command's end would collect, and copy, all of these modules' pages
    _serve(socket.socket(fileno=int(sys.argv[1])))
    minibroker.main()

"""The process that takes down the cluster of a test run that ended without doing so itself.

    python -I -S guardian.py OWNER_PID DIRECTORY [keep]

The problem: SIGKILL, a crash of the interpreter or a cancelled CI job end a test run at any moment, and neither a
process nor a directory may outlive it. The choice: a process in a session of its own that waits until its parent is
gone, then kills all processes of the directory's cluster, and removes the directory unless told to keep it. It finds
them by their command lines, which name the directory, so it also finds a process that was started a moment before the
end and is recorded nowhere. Rejected: PR_SET_PDEATHSIG, which follows the thread that forked, not the process, and
removes no directory; a pipe to the test run, which a forked child holds open; cluster.json, which is written a moment
after a process starts.

It runs as a script without site-packages, with Python's own library alone, so that it starts quickly with each cluster.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

_INTERVAL_S = 0.1
_PATIENCE_S = 10.0


def is_of_cluster(arguments: list[str], directory: str) -> bool:
    """Return whether the launcher writes this command line for a broker or ZooKeeper of the cluster in `directory`."""
    broker = ("minibroker.broker", f"broker.secret.file={directory}/broker.secret")
    zookeeper = ("org.apache.zookeeper.server.quorum.QuorumPeerMain", f"{directory}/zookeeper/zoo.cfg")
    return any(program in arguments and own in arguments for program, own in (broker, zookeeper))


def processes_of_cluster(directory: str) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
                arguments = file.read().split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if is_of_cluster(arguments, directory):
            found.append(int(name))
    return found


def mark(directory: str) -> str:
    """Return the comment that marks the cluster's rules in the packet filter."""
    return f"minibroker:{directory}"


def remove_rules(directory: str) -> None:
    """Remove the rules that `isolate` added, if this machine has a packet filter."""
    program = shutil.which("iptables")
    if program is None:
        return
    listed = subprocess.run([program, "-w", "-S", "OUTPUT"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        words = shlex.split(line)
        if mark(directory) in words:
            subprocess.run([program, "-w", "-D", *words[1:]], capture_output=True, check=False)


def take_down(directory: str, keeps: bool) -> None:
    """Kill the processes, wait until they are gone, remove the directory unless it is kept."""
    remove_rules(directory)
    deadline_s = time.monotonic() + _PATIENCE_S
    quiet = 0
    # A child of the owner becomes recognisable a moment after its fork, so one empty look is not enough.
    while quiet < 2 and time.monotonic() < deadline_s:
        found = processes_of_cluster(directory)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(_INTERVAL_S)
    if not keeps:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    owner, directory, keeps = int(sys.argv[1]), sys.argv[2], "keep" in sys.argv[3:]
    while os.getppid() == owner:
        time.sleep(_INTERVAL_S)
    take_down(directory, keeps)


if __name__ == "__main__":
    main()

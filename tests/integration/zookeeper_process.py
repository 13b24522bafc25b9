"""A ZooKeeper of a test's own, to be killed, paused and started again on the same data."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minibroker.deploy import zookeeper as launcher
from minibroker.deploy.ports import LOOPBACK, free_ports
from minibroker.deploy.processes import Process, send_signal, wait_until_gone


class ZooKeeperProcess:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "zookeeper.log"
        self._program = launcher.find_program()
        self._port = free_ports(1)[0]
        self.address = f"{LOOPBACK}:{self._port}"
        self._process: Process | None = None

    def start(self) -> None:
        """Returns once it serves."""
        assert self._process is None
        self._process = launcher.start(self._program, self._directory, self._log, self._port)
        launcher.wait_until_serving(self._process, self._port, self._log)

    def kill(self) -> None:
        """SIGKILL; sessions live on in the data directory."""
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)
            assert not wait_until_gone([self._process], 10)
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        assert self._process is not None
        send_signal(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        send_signal(self._process, signal.SIGCONT)


@contextmanager
def zookeeper_process() -> Iterator[ZooKeeperProcess]:
    with tempfile.TemporaryDirectory(prefix="zookeeper-") as directory:
        process = ZooKeeperProcess(Path(directory))
        process.start()
        try:
            yield process
        finally:
            process.kill()

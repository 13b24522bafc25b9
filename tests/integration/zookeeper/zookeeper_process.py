"""A test's own ZooKeeper, which can be killed, paused and restarted on the same data."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from minibroker.deploy.local import zookeeper as launcher
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import Process, is_alive, send_signal, spawn, wait_until, wait_until_gone


class ZooKeeperProcess:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "zookeeper.log"
        self._program = launcher.find_program()
        self._port = free_ports(1)[0]
        self.address = f"{LOOPBACK}:{self._port}"
        self._process: Process | None = None

    def start(self) -> None:
        """Start the server; return when it serves."""
        assert self._process is None
        self._process = launcher.start(self._program, self._directory, self._log, self._port)
        launcher.wait_until_serving(self._process, self._port, self._log)

    def kill(self) -> None:
        """Send SIGKILL; sessions survive in the data directory."""
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)
            assert not wait_until_gone([self._process], 10)
            self._process = None

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, but no request is answered."""
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


class ZooKeeperEnsemble:
    """Three servers that elect a leader, on loopback."""

    def __init__(
        self,
        directory: Path,
        program: launcher.ZooKeeperProgram | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls`: how to ask a server by TLS."""
        self._directory = directory
        self._program = program or launcher.find_program()
        self._tls = tls
        ports = free_ports(9)
        self._client_ports, self._quorum_ports, self._election_ports = ports[:3], ports[3:6], ports[6:]
        self.addresses = ",".join(f"{LOOPBACK}:{port}" for port in self._client_ports)
        self._processes: dict[int, Process] = {}

    def start(self) -> None:
        """Start all servers; return when all serve."""
        for server in range(3):
            self._spawn(server)
        for server, process in self._processes.items():
            assert wait_until(partial(self._serves_or_ended, server, process), launcher.START_TIMEOUT_S)
            assert is_alive(process), self._log(server).read_text()

    def _serves_or_ended(self, server: int, process: Process) -> bool:
        return not is_alive(process) or bool(self._ask(server))

    def client_port(self, server: int) -> int:
        return self._client_ports[server]

    def leader(self) -> int:
        """Wait until a server leads; return its number."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [server for server in self._processes if "Mode: leader" in self._ask(server)]
            return bool(found)

        assert wait_until(look, 30), "no ZooKeeper server leads the ensemble"
        return found[0]

    def pause(self, server: int) -> None:
        """Send SIGSTOP: the system still accepts connections to the server."""
        send_signal(self._processes[server], signal.SIGSTOP)

    def resume(self, server: int) -> None:
        """Return once it follows. A leader that was deposed meanwhile leads for a moment more, and its clock says that
        all sessions have expired: a client that meets it just then is told so."""
        send_signal(self._processes[server], signal.SIGCONT)
        assert wait_until(lambda: "Mode: follower" in self._ask(server), 30), (
            f"ZooKeeper server {server} does not follow"
        )

    def kill(self, server: int) -> None:
        process = self._processes.pop(server)
        send_signal(process, signal.SIGKILL)
        assert not wait_until_gone([process], 10)

    def kill_all(self) -> None:
        for server in list(self._processes):
            self.kill(server)

    def _ask(self, server: int) -> str:
        try:
            with contextlib.ExitStack() as opened:
                connection = opened.enter_context(
                    socket.create_connection((LOOPBACK, self._client_ports[server]), timeout=2)
                )
                if self._tls is not None:
                    connection = opened.enter_context(self._tls().wrap_socket(connection, server_hostname=LOOPBACK))
                connection.sendall(b"srvr")
                answer = b"".join(iter(lambda: connection.recv(4_096), b"")).decode()
        except OSError:
            return ""
        return answer if "Mode: " in answer else ""

    def _client_port_lines(self, server: int) -> list[str]:
        return [f"clientPort={self._client_ports[server]}", f"clientPortAddress={LOOPBACK}"]

    def _log(self, server: int) -> Path:
        return self._directory / f"zookeeper-{server}.log"

    def _spawn(self, server: int) -> None:
        data = self._directory / f"server-{server}"
        data.mkdir()
        (data / "myid").write_text(str(server + 1))
        members = [
            f"server.{number + 1}={LOOPBACK}:{self._quorum_ports[number]}:{self._election_ports[number]}"
            for number in range(3)
        ]
        configuration = self._directory / f"server-{server}.cfg"
        lines = [
            "tickTime=500",
            "initLimit=20",
            "syncLimit=10",
            f"dataDir={data}",
            *self._client_port_lines(server),
            "admin.enableServer=false",
            "maxClientCnxns=0",
            "4lw.commands.whitelist=srvr",
            *members,
        ]
        configuration.write_text("\n".join(lines) + "\n")
        command = [str(self._program.java), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m", "-cp"]
        class_path = os.pathsep.join(str(path) for path in self._program.class_path)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._processes[server] = spawn([*command, class_path, main, str(configuration)], self._log(server))


@contextmanager
def zookeeper_ensemble() -> Iterator[ZooKeeperEnsemble]:
    with tempfile.TemporaryDirectory(prefix="zookeepers-") as directory:
        ensemble = ZooKeeperEnsemble(Path(directory))
        try:
            ensemble.start()
            yield ensemble
        finally:
            ensemble.kill_all()

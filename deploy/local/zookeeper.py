"""A real ZooKeeper as a local process: one standalone server on loopback.

    python -m minibroker.deploy.local.zookeeper

finds the installation or downloads the jars now, so that the first `minibroker up` needs no network. The first found
is used: ZOOKEEPER_HOME, Debian's package, the jars that `zookeeper_jars` downloads. Ticks of 500 ms allow sessions of
1 to 10 s.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

from minibroker.client.java import find_java
from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import OWNER_ONLY, Process, is_alive, spawn, wait_until
from minibroker.deploy.local.zookeeper_jars import zookeeper_jars
from minibroker.protocol.connections.tls import TlsFailed, UnusableCredentials, why_not_connected
from minibroker.protocol.connections.zookeeper_tls import ENABLE, WITHOUT_LEADER, ZOOKEEPER, ZooKeeperTls
from minibroker.protocol.errors import MinibrokerError

DEFAULT_PORT = 2181
OWN_WITHOUT_TLS = (
    f"{ENABLE}=true, but the ZooKeeper that `minibroker up` starts speaks no TLS: give --zookeeper HOST:PORT of one "
    "that does, or leave the setting away"
)
START_TIMEOUT_S = 60.0
"""A start takes one second, or up to thirty on a busy machine."""

ASK_TIMEOUT_S = 2.0
"""The time in which a running server must answer."""

_PROBE_TIMEOUT_S = 0.2
"""The time for one probe of a starting server. A connection that ZooKeeper accepts a few milliseconds before it has
loaded its data is never answered or closed (a NullPointerException in its log), so a longer wait does not help."""

_DEBIAN_JARS = Path("/usr/share/java")


class ZooKeeperProgram:
    """Java and the class path, found before any process starts."""

    def __init__(self, java: Path, class_path: list[Path]) -> None:
        self.java = java
        self.class_path = class_path


def find_program(environment: Mapping[str, str] = os.environ) -> ZooKeeperProgram:
    """Find both, and download missing jars. Raises MinibrokerError with the remedy if that fails."""
    java = find_java(
        environment, "ZooKeeper", "install a Java runtime, or name a running ZooKeeper with --zookeeper HOST:PORT"
    )
    return ZooKeeperProgram(java, _find_class_path(environment))


def start(program: ZooKeeperProgram, data: Path, log: Path, port: int) -> Process:
    """Start a server over the directory `data`; it does not answer yet (`wait_until_serving`)."""
    data.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
    log.parent.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
    configuration = data / "zoo.cfg"
    configuration.write_text(
        "tickTime=500\n"
        f"dataDir={_property(str(data / 'data'))}\n"
        f"clientPort={port}\n"
        f"clientPortAddress={LOOPBACK}\n"
        "admin.enableServer=false\n"
        "maxClientCnxns=0\n"
        "4lw.commands.whitelist=srvr,ruok\n"
        "autopurge.purgeInterval=1\n",
        encoding="utf-8",
    )
    command = [
        str(program.java),
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-Xmx256m",
        f"-XX:ErrorFile={log.parent / 'zookeeper-crash-%p.log'}",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
        "-Dzookeeper.jmx.log4j.disable=true",
        "-cp",
        os.pathsep.join(str(path) for path in program.class_path),
        "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        str(configuration),
    ]
    try:
        return spawn(command, log)
    except OSError as error:
        raise LaunchError(f"ZooKeeper did not start: {program.java}: {error.strerror}") from error


def _property(value: str) -> str:
    """Escape the value for a file of Java properties: ASCII, with UTF-16 units as escapes after a backslash."""
    units = memoryview(value.encode("utf-16")[2:]).cast("H")
    return "".join(chr(u) if 0x20 <= u < 0x7F and u != ord("\\") else f"\\u{u:04x}" for u in units)


def wait_until_serving(process: Process, port: int, log: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Raises LaunchError if the process ends, LaunchTimedOut if it does not answer in time."""
    if not wait_until(lambda: not is_alive(process) or is_serving(LOOPBACK, port, _PROBE_TIMEOUT_S), timeout_s):
        raise LaunchTimedOut(f"ZooKeeper did not answer on port {port} within {timeout_s:g} s: see {log}")
    if not is_alive(process):
        raise LaunchError(f"ZooKeeper ended while it started on port {port}: see {log}")


def tls_of(settings: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return how brokers with these settings connect to ZooKeeper; None without TLS. Raises LaunchError."""
    tls = ZooKeeperTls.of(settings)
    try:
        return None if tls is None else tls.context()
    except UnusableCredentials as error:
        raise LaunchError(str(error)) from error


def is_serving(host: str, port: int, timeout_s: float = ASK_TIMEOUT_S, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether a ZooKeeper answers `srvr` there and accepts requests. Raises TlsFailed."""
    return _is_served(_ask_srvr(host, port, timeout_s, tls))


def _is_served(answer: str) -> bool:
    # A server that does not allow the command names the whitelist; it counts as serving.
    return answer.startswith("Zookeeper version") or "not in the whitelist" in answer


def check_servers(servers: str, tls: ssl.SSLContext | None = None) -> None:
    """Raises LaunchError if no server of `HOST:PORT,HOST:PORT/chroot` answers, or if the text is malformed."""
    remedy = _why_silent(servers, tls)
    if remedy is not None:
        raise LaunchError(f"no ZooKeeper answers at {servers}: {remedy}")


def is_any_serving(servers: str, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether a server of `HOST:PORT,HOST:PORT/chroot` answers. Raises LaunchError if the text is malformed."""
    return _why_silent(servers, tls) is None


def _why_silent(servers: str, tls: ssl.SSLContext | None) -> str | None:
    """Return None if a server answers, otherwise the remedy. Raises LaunchError if the text is malformed."""
    remedy = "start it, correct the address, or leave out --zookeeper to get one of its own"
    if tls is None:
        remedy += f" (if it is a secureClientPort, give --override {ENABLE}=true)"
    addresses, _, _ = servers.partition("/")
    for address in addresses.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
            raise LaunchError(
                f"{address!r} is not the address of a ZooKeeper: HOST:PORT is expected, for instance 127.0.0.1:2181"
            )
        try:
            answer = _ask_srvr(host.removeprefix("[").removesuffix("]"), int(port), ASK_TIMEOUT_S, tls)
            if _is_served(answer):
                return None
            if "not currently serving" in answer:
                remedy = f"it serves no requests: {WITHOUT_LEADER}"
        except TlsFailed as error:
            remedy = str(error)
    return remedy


def _ask_srvr(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> str:
    answer = b""
    try:
        with (
            socket.create_connection((host, port), timeout_s) as below,
            below if tls is None else _secured(below, tls, host, timeout_s) as connection,
        ):
            connection.sendall(b"srvr")
            while len(answer) < 4_096 and (more := connection.recv(4_096)):
                answer += more
    except TlsFailed:
        raise
    except ssl.SSLError as error:  # TLS 1.3: the server refuses a certificate after the client's handshake
        if not answer:
            raise TlsFailed(why_not_connected(error, host, ZOOKEEPER)) from error
    except OSError:
        return ""
    return answer.decode("utf-8", "replace")


def _secured(below: socket.socket, tls: ssl.SSLContext, host: str, timeout_s: float) -> ssl.SSLSocket:
    """Raises TlsFailed."""
    try:
        return tls.wrap_socket(below, server_hostname=host)
    except OSError as error:
        raise TlsFailed(why_not_connected(error, host, ZOOKEEPER, timeout_s)) from error


def _find_class_path(environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("ZOOKEEPER_HOME")
    if home:
        jars = sorted(Path(home, "lib").glob("*.jar")) + sorted(Path(home).glob("*.jar"))
        if not any(jar.name.startswith("zookeeper-") for jar in jars):
            raise LaunchError(
                f"ZOOKEEPER_HOME is {home}, but there is no lib/zookeeper-*.jar: point it at an unpacked ZooKeeper, "
                "or unset it"
            )
        return [Path(home, "conf"), *jars]
    if (_DEBIAN_JARS / "zookeeper.jar").exists():
        # Its manifest names the jars it needs, but no implementation of the logging interface.
        names = ("zookeeper.jar", "zookeeper-jute.jar", "slf4j-simple.jar")
        return [_DEBIAN_JARS / name for name in names if (_DEBIAN_JARS / name).exists()]
    return zookeeper_jars(environment)


def main() -> int:
    try:
        find_program()
    except MinibrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A test's own ZooKeeper that speaks TLS alone and demands a certificate, by an authority that can be replaced."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from minibroker.deploy.local import zookeeper as launcher
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import is_alive, spawn, wait_until
from minibroker.deploy.local.zookeeper_jars import zookeeper_jars
from tests.integration.zookeeper.zookeeper_process import ZooKeeperEnsemble, ZooKeeperProcess

PASSWORD = "a key's password"
_NETTY = "4.1.130.Final"
"""Of the ZooKeeper that `zookeeper_jars` has. Its four native libraries are not needed."""
_SHA256_OF_NETTY = {
    "buffer": "00a522b67ea35cb7b4dd9cf27f85c6c58f5e306785aa045302e5f6b2d4944a87",
    "codec": "52636bc29bd62120b97bbe5d1d21eab9b1cb2bef8efbb54d2221c5f3fa08d8cd",
    "common": "53921f28dd5a352b1bed0e1cbcc54d013dc60ffebeae9b2b1e53eabef317e581",
    "handler": "98c78ec187ca30a4b9775bf6f632f5c9929db6bf06a60e6971f945813880ca0f",
    "resolver": "48c5b218a89d184e1b601d46433957f515fcefdb4464182b1348bce4f5a18f35",
    "transport": "1bf573266d271f856705a9984d25449c56a1d73c02a16af12033ceccfe555dbb",
    "transport-classes-epoll": "1c352508d70aca1ccc3068daac907ad1e9d8dc68b07148d57426730bf0d0c8b6",
    "transport-native-unix-common": "cf5efc4168597d7cd14695b469418cac2a1134533f9a0c82ef0538d796fd39e1",
}


class TlsFiles:
    """The files of servers and clients, in a directory. `settings` are those of brokers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authorities = 0
        self.settings = {
            "zookeeper.ssl.client.enable": "true",
            "zookeeper.ssl.keystore.location": str(directory / "client.pem"),
            "zookeeper.ssl.keystore.password": PASSWORD,
            "zookeeper.ssl.truststore.location": str(directory / "authority.pem"),
        }
        self.replace_authority()

    def replace_authority(self) -> None:
        """Sign all certificates anew. A server uses and demands the new ones from its next start on."""
        self._authorities += 1
        made = Certificates(self._directory / f"authority-{self._authorities}")
        for name, data in (
            ("server.pem", in_pkcs8(made.broker)),
            ("client.pem", in_pkcs8(made.client("broker"), PASSWORD)),
            ("probe.pem", in_pkcs8(made.client("probe"))),
            ("authority.pem", made.authority.read_bytes()),
        ):
            (self._directory / f"{name}.new").write_bytes(data)
            (self._directory / f"{name}.new").replace(self._directory / name)

    def probe(self) -> ssl.SSLContext:
        """Return how this process asks a server."""
        keystore = {"zookeeper.ssl.keystore.location": str(self._directory / "probe.pem")}
        tls = launcher.tls_of({**self.settings, **keystore})
        assert tls is not None
        return tls

    def of_server(self, port: int) -> list[str]:
        """Return the lines of a server's configuration."""
        return [
            f"secureClientPort={port}",
            f"secureClientPortAddress={LOOPBACK}",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            *self._stores("ssl"),
            "ssl.clientAuth=need",
        ]

    def of_quorum(self) -> list[str]:
        """Return the lines with which servers connect to each other."""
        return ["sslQuorum=true", *self._stores("ssl.quorum")]

    def _stores(self, prefix: str) -> list[str]:
        return [
            f"{prefix}.keyStore.location={self._directory / 'server.pem'}",
            f"{prefix}.trustStore.location={self._directory / 'authority.pem'}",
        ]


def _program() -> launcher.ZooKeeperProgram:
    netty = {
        f"io/netty/netty-{name}/{_NETTY}/netty-{name}-{_NETTY}.jar": sha256 for name, sha256 in _SHA256_OF_NETTY.items()
    }
    return launcher.ZooKeeperProgram(launcher.find_program().java, zookeeper_jars(os.environ, netty))


class TlsZooKeeper(ZooKeeperProcess):
    """The files of the clients are at `settings`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._program = _program()
        self._files = TlsFiles(directory)
        self.settings = self._files.settings

    def replace_authority(self) -> None:
        self._files.replace_authority()

    def start(self) -> None:
        assert self._process is None
        configuration = self._directory / "zoo.cfg"
        lines = [
            "tickTime=500",
            f"dataDir={self._directory / 'data'}",
            *self._files.of_server(self._port),
            "admin.enableServer=false",
            "maxClientCnxns=0",
            "4lw.commands.whitelist=srvr",
        ]
        configuration.write_text("\n".join(lines) + "\n")
        class_path = os.pathsep.join(str(path) for path in self._program.class_path)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        self._process = process = spawn(
            [str(self._program.java), *options, "-cp", class_path, main, str(configuration)], self._log
        )
        tls = self._files.probe()
        assert wait_until(
            lambda: not is_alive(process) or launcher.is_any_serving(self.address, tls), launcher.START_TIMEOUT_S
        )
        assert is_alive(process), self._log.read_text()


class TlsEnsemble(ZooKeeperEnsemble):
    """Three servers that speak TLS alone, with clients and with each other, and demand certificates."""

    def __init__(self, directory: Path) -> None:
        self._files = TlsFiles(directory)
        super().__init__(directory, _program(), self._files.probe)
        self.settings = self._files.settings

    def _client_port_lines(self, server: int) -> list[str]:
        return [*self._files.of_server(self._client_ports[server]), *self._files.of_quorum()]


def in_pkcs8(path: Path, password: str | None = None) -> bytes:
    """Return the key, which is all that ZooKeeper reads, and the certificates of the file."""
    pem = path.read_bytes()
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    key = load_pem_private_key(pem, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return key + pem[pem.index(b"-----BEGIN CERTIFICATE") :]


@contextmanager
def tls_zookeeper() -> Iterator[TlsZooKeeper]:
    with tempfile.TemporaryDirectory(prefix="zookeeper-") as directory:
        server = TlsZooKeeper(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def tls_ensemble() -> Iterator[TlsEnsemble]:
    with tempfile.TemporaryDirectory(prefix="zookeepers-") as directory:
        ensemble = TlsEnsemble(Path(directory))
        try:
            ensemble.start()
            yield ensemble
        finally:
            ensemble.kill_all()

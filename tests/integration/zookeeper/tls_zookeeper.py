"""A test's own ZooKeeper that speaks TLS alone and demands a certificate, by an authority that can be replaced."""

from __future__ import annotations

import os
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
from tests.integration.zookeeper.zookeeper_process import ZooKeeperProcess

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


class TlsZooKeeper(ZooKeeperProcess):
    """The files of the clients are at `settings`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        netty = {
            f"io/netty/netty-{name}/{_NETTY}/netty-{name}-{_NETTY}.jar": sha256
            for name, sha256 in _SHA256_OF_NETTY.items()
        }
        self._program = launcher.ZooKeeperProgram(launcher.find_program().java, zookeeper_jars(os.environ, netty))
        self._authorities = 0
        self.settings = {
            "zookeeper.ssl.client.enable": "true",
            "zookeeper.ssl.keystore.location": str(directory / "client.pem"),
            "zookeeper.ssl.keystore.password": PASSWORD,
            "zookeeper.ssl.truststore.location": str(directory / "authority.pem"),
        }
        self.replace_authority()

    def replace_authority(self) -> None:
        """Sign all certificates anew. The server uses and demands the new ones from its next start on."""
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

    def start(self) -> None:
        assert self._process is None
        configuration = self._directory / "zoo.cfg"
        configuration.write_text(
            "tickTime=500\n"
            f"dataDir={self._directory / 'data'}\n"
            f"secureClientPort={self._port}\n"
            f"secureClientPortAddress={LOOPBACK}\n"
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
            f"ssl.keyStore.location={self._directory / 'server.pem'}\n"
            f"ssl.trustStore.location={self._directory / 'authority.pem'}\n"
            "ssl.clientAuth=need\n"
            "admin.enableServer=false\n"
            "maxClientCnxns=0\n"
            "4lw.commands.whitelist=srvr\n"
        )
        class_path = os.pathsep.join(str(path) for path in self._program.class_path)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        self._process = process = spawn(
            [str(self._program.java), *options, "-cp", class_path, main, str(configuration)], self._log
        )
        probe = str(self._directory / "probe.pem")
        tls = launcher.tls_of({**self.settings, "zookeeper.ssl.keystore.location": probe})
        assert wait_until(
            lambda: not is_alive(process) or launcher.is_any_serving(self.address, tls), launcher.START_TIMEOUT_S
        )
        assert is_alive(process), self._log.read_text()


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

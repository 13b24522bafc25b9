"""Certificates for clusters on this machine and in tests: an authority, the brokers' certificate, and clients'.

trustme makes them (the extra `tls`). It is made for this, and saves a hundred lines on `cryptography`, which it uses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.processes import OWNER_ONLY

if TYPE_CHECKING:
    import trustme

AUTHORITY = "ca.pem"
BROKER = "broker.pem"
HOSTS = ("127.0.0.1", "localhost", "::1")


class Certificates:
    """PEM files in a directory, by an authority of its own, which is made at the first time. All are readable by their
    owner alone. Raises LaunchError without trustme."""

    def __init__(self, directory: Path) -> None:
        try:
            import trustme
        except ImportError:
            raise LaunchError(
                "certificates are made by trustme, which is not installed: pip install 'minibroker[tls]'"
            ) from None
        directory.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        self._directory = directory
        self.authority = directory / AUTHORITY
        """The certificate of the authority, which brokers and clients trust."""
        self.broker = directory / BROKER
        """The private key and the certificate of all brokers."""
        key = directory / "ca.key"
        if key.exists() and self.authority.exists():
            self._authority: trustme.CA = trustme.CA.from_pem(self.authority.read_bytes(), key.read_bytes())
        else:
            self._authority = trustme.CA(organization_name="minibroker")
            _write(key, self._authority.private_key_pem.bytes())
            _write(self.authority, self._authority.cert_pem.bytes())
        if not self.broker.exists():
            self.renew()

    def renew(self) -> None:
        """Replace the brokers' certificate. They use it within seconds."""
        _write(self.broker, _pem(self._authority.issue_cert(*HOSTS, common_name="broker")))

    def client(self, name: str) -> Path:
        """Return a file with a private key and a certificate for `CN=name`."""
        path = self._directory / f"client-{name}.pem"
        _write(path, _pem(self._authority.issue_cert(f"{name}@example.org", common_name=name)))
        return path

    def settings(self) -> dict[str, str]:
        """Return the settings of brokers with a listener that is SSL."""
        return {
            "ssl.keystore.location": str(self.broker),
            "ssl.truststore.location": str(self.authority),
            "ssl.client.auth": "requested",
        }


def _pem(certificate: trustme.LeafCert) -> bytes:
    return bytes(certificate.private_key_and_cert_chain_pem.bytes())


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)

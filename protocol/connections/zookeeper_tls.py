"""The TLS context of connections to ZooKeeper, from the settings of a broker or a launcher."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from minibroker.protocol.connections.tls import Identity, Peer, UnusableCredentials, load_authorities, load_identity

_logger = logging.getLogger("minibroker.zookeeper")

ENABLE = "zookeeper.ssl.client.enable"
KEYSTORE = "zookeeper.ssl.keystore.location"
PASSWORD = "zookeeper.ssl.keystore.password"
TRUSTSTORE = "zookeeper.ssl.truststore.location"
HOST_CHECK = "zookeeper.ssl.endpoint.identification.algorithm"

WITHOUT_LEADER = "if a majority of its ensemble is missing, start the other servers"
ZOOKEEPER = Peer(
    name="ZooKeeper",
    trust=f"give the authority's certificate as {TRUSTSTORE}",
    any_name=f"{HOST_CHECK}=",
    plaintext=(
        f"{WITHOUT_LEADER}; if that port is ZooKeeper's clientPort, give its secureClientPort as zookeeper.connect, or "
        f"leave {ENABLE} away"
    ),
    certificate=(
        f"with ssl.clientAuth=need, it needs a certificate in {KEYSTORE} by an authority in its ssl.trustStore.location"
    ),
)


class ZooKeeperTls(NamedTuple):
    """The settings with which TLS is enabled."""

    keystore: str | None
    """A PEM file with a private key and a chain of certificates."""
    password: str | None
    truststore: str | None
    """None: the authorities of the operating system."""
    checks_host: bool

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> ZooKeeperTls | None:
        """Return None if the settings of a broker do not enable TLS."""
        if settings.get(ENABLE, "").lower() not in ("true", "1"):
            return None
        checks_host = settings.get(HOST_CHECK, "https") == "https"
        return cls(settings.get(KEYSTORE), settings.get(PASSWORD), settings.get(TRUSTSTORE), checks_host)

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises UnusableCredentials, which names the setting and shows no secret."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.checks_host
        if self.keystore is not None:
            identity = Identity(os.path.abspath(self.keystore), None, self.password)
            try:
                load_identity(context, identity, f"set {PASSWORD} to its password")
            except UnusableCredentials as error:
                raise UnusableCredentials(f"{KEYSTORE}={self.keystore} cannot be used: {error}") from error
        if self.truststore is None:
            context.load_default_certs()
            return context
        try:
            load_authorities(context, os.path.abspath(self.truststore))
        except UnusableCredentials as error:
            raise UnusableCredentials(f"{TRUSTSTORE}={self.truststore} cannot be used: {error}") from error
        return context


class RenewedContext:
    """The context of the next connection: called for each, it reads the files again, as certificates are renewed. If
    they cannot be used, it logs that once, and the previous certificates stay in use."""

    def __init__(self, tls: ZooKeeperTls) -> None:
        """Raises UnusableCredentials."""
        self._tls = tls
        self._context = tls.context()
        self._complaint: str | None = None

    def __call__(self) -> ssl.SSLContext:
        try:
            self._context = self._tls.context()
            self._complaint = None
        except UnusableCredentials as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _logger.error("%s. The previous certificates stay in use", error)
        return self._context

"""Reads the credentials that the settings name: the brokers' shared secret, their digest for ZooKeeper, and the
certificates of their TLS connections to it."""

import logging
import os

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.connections.broker_proof import LEAST_SECRET_BYTES
from minibroker.protocol.connections.tls import UnusableCredentials
from minibroker.protocol.connections.zookeeper_tls import (
    ENABLE,
    KEYSTORE,
    TRUSTSTORE,
    RenewedContext,
    ZooKeeperTls,
)
from minibroker.protocol.world import Disk

_logger = logging.getLogger("minibroker.zookeeper")


def broker_secret(config: BrokerConfig, disk: Disk) -> bytes | None:
    """Return the secret with which brokers authenticate to each other, or None. Surrounding white space is ignored.
    Raises InvalidConfig, which does not show the secret."""
    path = config.broker_secret_file
    if path is not None:
        try:
            found = disk.read_file(os.path.abspath(path)).strip()
        except OSError as error:
            raise InvalidConfig(
                f"broker.secret.file={path} cannot be read: {error.strerror}; make it a file that this user can "
                f"read, with the same secret for every broker"
            ) from error
    elif config.broker_secret is not None:
        found = config.broker_secret.strip().encode()
    else:
        return None
    if len(found) < LEAST_SECRET_BYTES:
        name = f"in broker.secret.file={path}" if path is not None else "in broker.secret"
        raise InvalidConfig(
            f"the secret {name} has {len(found)} bytes, but at least {LEAST_SECRET_BYTES} are needed; "
            f"`openssl rand -hex 32` makes one"
        )
    return found


def zookeeper_digest(config: BrokerConfig, disk: Disk) -> str | None:
    """Return `NAME:PASSWORD`, the credential for ZooKeeper, or None. Surrounding white space is ignored. Raises
    InvalidConfig, which does not show it."""
    path = config.zookeeper_digest_file
    if path is None:
        return None
    try:
        name, separator, password = disk.read_file(os.path.abspath(path)).decode().strip().partition(":")
    except OSError as error:
        raise InvalidConfig(
            f"zookeeper.digest.file={path} cannot be read: {error.strerror}; make it a file that this user can read, "
            f"with the same NAME:PASSWORD for every broker"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"zookeeper.digest.file={path} is not text: one line NAME:PASSWORD is expected") from error
    if not (name and separator and password) or any(character.isspace() for character in name + password):
        raise InvalidConfig(
            f"zookeeper.digest.file={path} does not hold NAME:PASSWORD, without white space in it: "
            f"`echo minibroker:$(openssl rand -hex 16) > {path}` makes one"
        )
    return f"{name}:{password}"


def zookeeper_tls(config: BrokerConfig) -> RenewedContext | None:
    """Return the TLS of connections to ZooKeeper, or None. Raises InvalidConfig, which shows no secret."""
    keystore, truststore = config.zookeeper_ssl_keystore_location, config.zookeeper_ssl_truststore_location
    if not config.zookeeper_ssl_client_enable:
        for name, path in ((KEYSTORE, keystore), (TRUSTSTORE, truststore)):
            if path is not None:
                _logger.warning(
                    "%s=%s has no effect: connections to ZooKeeper are encrypted only if %s=true", name, path, ENABLE
                )
        return None
    checks_host = config.zookeeper_ssl_endpoint_identification_algorithm == "https"
    try:
        return RenewedContext(ZooKeeperTls(keystore, config.zookeeper_ssl_keystore_password, truststore, checks_host))
    except UnusableCredentials as error:
        raise InvalidConfig(str(error)) from error

"""Makes the TLS contexts of a listener from its settings and files."""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import listener_config
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.connections.tls import Identity, UnusableCredentials, load_authorities, load_identity
from minibroker.protocol.world import Disk

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_VERIFY = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class TlsContexts(NamedTuple):
    """The contexts of a listener, for connections that it accepts and for those to the same listener of others."""

    serving: ssl.SSLContext
    connecting: ssl.SSLContext


def tls_files(config: BrokerConfig, listener: str, disk: Disk) -> dict[str, bytes]:
    """Return the contents of the files of a listener's certificates by their paths. Raises InvalidConfig."""
    own = listener_config(config, listener)
    found: dict[str, bytes] = {}
    for setting, path in (
        ("ssl.keystore.location", own.ssl_keystore_location),
        ("ssl.truststore.location", own.ssl_truststore_location),
    ):
        if path is not None:
            try:
                found[path] = disk.read_file(os.path.abspath(path))
            except OSError as error:
                raise InvalidConfig(
                    f"{setting}={path} of the listener {listener} cannot be read: {error.strerror}; make it a PEM file "
                    f"that this user can read"
                ) from error
    return found


def tls_contexts(config: BrokerConfig, listener: str) -> TlsContexts:
    """Raises InvalidConfig, which names the setting and the remedy, and shows no secret."""
    own = listener_config(config, listener)
    identity = _identity(own, listener)
    serving, connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    versions = [_VERSIONS[name.strip()] for name in own.ssl_enabled_protocols.split(",")]
    for context in (serving, connecting):
        context.minimum_version, context.maximum_version = min(versions), max(versions)
        try:
            load_identity(context, identity, "set ssl.key.password to its password")
        except UnusableCredentials as error:
            setting = "ssl.keystore.location" if identity.are_files else "ssl.keystore.certificate.chain"
            raise InvalidConfig(f"{setting} of the listener {listener}: {error}") from error
    _trust(own, listener, serving, connecting)
    connecting.check_hostname = own.ssl_endpoint_identification_algorithm == "https"
    return TlsContexts(serving, connecting)


def _identity(own: BrokerConfig, listener: str) -> Identity:
    path, chain, key = own.ssl_keystore_location, own.ssl_keystore_certificate_chain, own.ssl_keystore_key
    if path is not None:
        if chain is not None or key is not None:
            raise InvalidConfig(
                f"the listener {listener} has ssl.keystore.location and also ssl.keystore.certificate.chain or "
                f"ssl.keystore.key: keep the file or the texts"
            )
        return Identity(os.path.abspath(path), None, own.ssl_key_password)
    if chain is None or key is None:
        raise InvalidConfig(
            f"the listener {listener} is SSL, but has no certificate: set ssl.keystore.location to a PEM file with the "
            f"private key and the certificate chain (or ssl.keystore.certificate.chain and ssl.keystore.key)"
        )
    return Identity(_lines(chain), _lines(key), own.ssl_key_password, are_files=False)


def _trust(own: BrokerConfig, listener: str, serving: ssl.SSLContext, connecting: ssl.SSLContext) -> None:
    path, text = own.ssl_truststore_location, own.ssl_truststore_certificates
    if path is not None and text is not None:
        raise InvalidConfig(
            f"the listener {listener} has ssl.truststore.location and ssl.truststore.certificates: keep one of them"
        )
    if path is None and text is None:
        if own.ssl_client_auth != "none":
            raise InvalidConfig(
                f"the listener {listener} has ssl.client.auth={own.ssl_client_auth}, but nothing says which "
                f"certificates to accept: set ssl.truststore.location to a PEM file with the authorities that sign them"
            )
        connecting.load_default_certs()
        return
    for context in (serving, connecting):
        try:
            load_authorities(context, path and os.path.abspath(path), text and _lines(text))
        except UnusableCredentials as error:
            setting = "ssl.truststore.location" if path is not None else "ssl.truststore.certificates"
            raise InvalidConfig(f"{setting} of the listener {listener}: {error}") from error
    serving.verify_mode = _VERIFY[own.ssl_client_auth]


def _lines(pem: str) -> str:
    """Return the text with the line ends that properties files write as `\\\\n`."""
    return pem.replace("\\n", "\n")

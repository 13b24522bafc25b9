"""TLS under the connections of brokers and clients, by Python's `ssl`.

`TlsNetwork` is a Network on top of another one, so that TLS ends at the edge: processors, dialects, clients and the
simulation know nothing of it. Connections are accepted with the handshake in `Incoming.attach`; a connection that has
not completed it occupies no processor and no request. When connecting, the handshake follows on an open connection
(`secure`), because crash detection must know whether the host accepted, whatever comes of the handshake.

OpenSSL's errors name what it saw in the bytes. A user needs to know what to change, so they are translated here.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from minibroker.protocol.world import Incoming, Listener, Network

P = TypeVar("P", bound=asyncio.BaseProtocol)

Contexts = Callable[[], ssl.SSLContext]
"""Returns the context for the next connection. A broker's changes when its certificate is renewed."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for the handshake of a connection made here."""

_NOT_TLS = frozenset(
    {
        "BAD_RECORD_TYPE",
        "HTTPS_PROXY_REQUEST",
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
        "UNKNOWN_PROTOCOL",
        "UNSUPPORTED_PROTOCOL",
        "WRONG_VERSION_NUMBER",
    }
)
"""OpenSSL's reasons when the first bytes are not a TLS record."""

_UNTRUSTED = frozenset({18, 19, 20, 21})
_WRONG_HOST = frozenset({62, 63, 64})
_NOT_NOW = frozenset({9, 10})
"""OpenSSL's codes of certificates that cannot be verified (X509_V_ERR_...)."""


class TlsFailed(OSError):
    """A TLS handshake failed. The text has the remedy."""


class UnusableCredentials(ValueError):
    """A certificate, key or list of authorities cannot be used. The text says which, and why."""


class Identity(NamedTuple):
    """A certificate with its private key: files, or the PEM texts themselves."""

    certificate: str
    key: str | None
    """None: it is in the file of the certificate."""
    password: str | None
    are_files: bool = True


def load_identity(context: ssl.SSLContext, identity: Identity, remedy: str) -> None:
    """Raises UnusableCredentials; `remedy` names the setting of the key's password."""

    def missing_password() -> str:
        raise UnusableCredentials(f"the private key is encrypted: {remedy}")

    password = missing_password if identity.password is None else identity.password
    try:
        if identity.are_files:
            context.load_cert_chain(identity.certificate, identity.key, password)
            return
        with tempfile.TemporaryDirectory() as directory:  # Python's ssl reads identities from files alone
            path = os.path.join(directory, "identity.pem")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(f"{identity.key or ''}\n{identity.certificate}\n")
            context.load_cert_chain(path, None, password)
    except FileNotFoundError:
        missing = [path for path in (identity.certificate, identity.key) if path and not os.path.exists(path)]
        raise UnusableCredentials(f"there is no file {' and no file '.join(missing)}") from None
    except ssl.SSLError as error:
        raise UnusableCredentials(_why_unusable(identity, error, remedy)) from error
    except UnicodeEncodeError as error:
        raise UnusableCredentials("the text is not PEM, which is ASCII") from error
    except OSError as error:
        raise UnusableCredentials(f"{identity.certificate} cannot be read: {error.strerror or error}") from error


def _why_unusable(identity: Identity, error: ssl.SSLError, remedy: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the private key does not belong to the certificate: give the key that its request was made with"
    if identity.password is not None and error.reason in (None, "BAD_DECRYPT", "PEM_LIB"):
        return f"the private key cannot be decrypted, or is not PEM: {remedy}"
    where = identity.certificate if identity.are_files else "the text"
    also = f" and {identity.key}" if identity.are_files and identity.key is not None else ""
    return (
        f"{where}{also} must have a certificate chain and its private key in PEM (BEGIN CERTIFICATE, BEGIN PRIVATE "
        f"KEY): {error.reason or error}. `openssl pkcs12 -in FILE.p12 -out FILE.pem` converts a PKCS12 store"
    )


def load_authorities(context: ssl.SSLContext, path: str | None = None, text: str | None = None) -> None:
    """Trust these authorities, in PEM. Raises UnusableCredentials."""
    try:
        context.load_verify_locations(cafile=path, cadata=text)
    except FileNotFoundError:
        raise UnusableCredentials(f"there is no file {path}") from None
    except ssl.SSLError as error:
        raise UnusableCredentials(
            f"{path or 'the text'} has no certificate of an authority in PEM (BEGIN CERTIFICATE): "
            f"{error.reason or error}"
        ) from error
    except (OSError, ValueError) as error:
        raise UnusableCredentials(f"{path or 'the text'} cannot be read: {error}") from error


@runtime_checkable
class StartsTls(Protocol):
    """A transport that a World has put in front of the event loop's, which knows only its own."""

    async def start_tls(
        self,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        *,
        server_hostname: str,
        ssl_handshake_timeout: float,
    ) -> asyncio.Transport | None: ...


class TlsNetwork:
    """A Network whose connections are TLS. `serving` gives the contexts of accepted connections, `connecting` those of
    connections made here."""

    def __init__(
        self, network: Network, *, serving: Contexts | None = None, connecting: Contexts | None = None
    ) -> None:
        self._network = network
        self._serving = serving
        self._connecting = connecting

    async def addresses(self, host: str) -> list[str]:
        return await self._network.addresses(host)

    async def listen(self, host: str, port: int) -> Listener:
        assert self._serving is not None
        return _TlsListener(await self._network.listen(host, port), self._serving)

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        """As Network.connect. Raises TlsFailed if the handshake fails."""
        below = await self._network.connect(host, port, _Below)
        assert below.transport is not None
        return await self.secure(below.transport, host, factory)

    async def secure(self, below: asyncio.Transport, host: str, factory: Callable[[], P]) -> P:
        """Make the handshake on an open connection, which is closed if it fails. Raises TlsFailed."""
        assert self._connecting is not None
        protocol = factory()
        try:
            start_tls = (
                below.start_tls
                if isinstance(below, StartsTls)
                else partial(asyncio.get_running_loop().start_tls, below)
            )
            transport = await start_tls(
                protocol,
                self._connecting(),
                server_hostname=host,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
            if transport is None:
                raise ConnectionResetError
        except BaseException as error:
            below.abort()
            if isinstance(error, OSError):
                raise TlsFailed(why_not_connected(error, host)) from error
            raise
        protocol.connection_made(transport)
        return protocol


class _Below(asyncio.Protocol):
    """Keeps the transport until the handshake begins. The server does not speak before."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it


class _TlsListener:
    def __init__(self, listener: Listener, contexts: Contexts) -> None:
        self._listener = listener
        self._contexts = contexts

    @property
    def port(self) -> int:
        return self._listener.port

    def start(self, on_connection: Callable[[Incoming], None], may_accept: Callable[[], bool] = lambda: True) -> None:
        self._listener.start(lambda incoming: on_connection(_TlsIncoming(incoming, self._contexts)), may_accept)

    async def close(self) -> None:
        await self._listener.close()


class _TlsIncoming:
    def __init__(self, incoming: Incoming, contexts: Contexts) -> None:
        self._incoming = incoming
        self._contexts = contexts
        self.peer = incoming.peer

    async def attach(self, factory: Callable[[], P], tls: ssl.SSLContext | None = None) -> P:
        """Raises TlsFailed."""
        try:
            return await self._incoming.attach(factory, tls or self._contexts())
        except OSError as error:
            raise TlsFailed(why_not_accepted(error)) from error

    def close(self) -> None:
        self._incoming.close()


def why_not_accepted(error: OSError) -> str:
    """Return why a handshake with a client failed, for the log of a broker."""
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
            return "it sent HTTP in plaintext, but this listener speaks TLS: use https"
        if reason in _NOT_TLS:
            return (
                "it sent plaintext, or a version of TLS that ssl.enabled.protocols does not have, but this listener is "
                'SSL: set the client\'s security.protocol=SSL (minibroker: security_protocol="SSL"), or use a listener '
                "that is PLAINTEXT"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return (
                "it sent no certificate, but ssl.client.auth=required: give the client a certificate "
                "(ssl.keystore.location; minibroker: ssl_certfile and ssl_keyfile)"
            )
        if "ALERT" in reason:
            return (
                f"it refuses this broker's certificate ({reason.lower()}): give the client the authority that signed it"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not accepted ({error.verify_message}): sign it by an authority in "
                f"ssl.truststore.location, or add its authority there"
            )
        return f"the TLS handshake failed: {error.reason or error}"
    if isinstance(error, ConnectionAbortedError):
        return "its TLS handshake was not complete in time"
    return "it closed the connection in the TLS handshake; perhaps it does not trust this broker's certificate"


class Peer(NamedTuple):
    """The other side in the errors of a handshake, and the remedies that they give."""

    name: str
    trust: str
    """Trust its authority."""
    any_name: str
    """Accept any name in its certificate."""
    plaintext: str
    """It may not speak TLS."""
    certificate: str
    """It may require a certificate."""


BROKER = Peer(
    name="the broker",
    trust="give the authority's certificate as ssl_cafile (ssl.truststore.location)",
    any_name="ssl_check_hostname=False (ssl.endpoint.identification.algorithm=)",
    plaintext=(
        "if that listener is PLAINTEXT, leave security_protocol (security.protocol) away, or use the port of a "
        "listener that is SSL"
    ),
    certificate="with ssl.client.auth=required, give ssl_certfile and ssl_keyfile",
)


def why_not_connected(error: OSError, host: str, peer: Peer = BROKER, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> str:
    """Return why a handshake with a server failed, for the user of its client."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNTRUSTED:
            return (
                f"{peer.name}'s certificate is not signed by a trusted authority ({error.verify_message}): {peer.trust}"
            )
        if error.verify_code in _WRONG_HOST:
            return (
                f"{peer.name}'s certificate is not for {host!r} ({error.verify_message}): connect by a name that it "
                f"has, or add the name to it (subjectAltName); {peer.any_name} does not check names"
            )
        if error.verify_code in _NOT_NOW:
            return (
                f"{peer.name}'s certificate is not valid now ({error.verify_message}): renew it, or correct the clock"
            )
        return f"{peer.name}'s certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        reason = error.reason or ""
        if reason in _NOT_TLS:
            return f"it does not answer with TLS: {peer.plaintext}"
        if "ALERT" in reason:
            why = f" ({peer.certificate})" if "CERTIFICATE" in reason else ""
            return f"{peer.name} refuses the TLS handshake ({reason.lower()}); its log says why{why}"
        return f"the TLS handshake failed: {error.reason or error}"
    if isinstance(error, ConnectionAbortedError | TimeoutError):
        return f"the TLS handshake was not complete after {timeout_s:g} s"
    return (
        f"it closed the connection in the TLS handshake: {peer.plaintext}; otherwise its log says why "
        f"({peer.certificate})"
    )

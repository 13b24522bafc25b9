"""TLS under the connections of `zookeeper`, in place of kazoo's.

With `use_ssl`, kazoo gives the handshake a whole session timeout: one server that accepts connections and answers
nothing would end the session. It retries silently and endlessly, whatever has failed, even if a file of a certificate
cannot be read, and it waits for bytes that are decrypted already. Here a handshake has a time limit of its own, and the
reason of a failure is logged once and kept for the caller that waits for the session. ZooKeeper logs 5 KB for a failed
handshake, and there were eight per second, so each server is asked only once per second after one.

A server of an ensemble that has no leader closes connections, often within the handshake, as a `clientPort` without TLS
does. If TLS has worked before in the session, the settings are not the reason.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from minibroker.protocol.connections.tls import Contexts, why_not_connected
from minibroker.protocol.connections.zookeeper_tls import WITHOUT_LEADER, ZOOKEEPER

_PAUSE_AFTER_FAILURE_S = 1.0

_logger = logging.getLogger("minibroker.zookeeper")


class TlsConnector:
    """Opens connections. Its methods run on kazoo's thread."""

    def __init__(self, contexts: Contexts, handshake_timeout_s: float) -> None:
        self._contexts = contexts
        self._timeout_s = handshake_timeout_s
        self._failures: dict[tuple[str, int], str] = {}
        """Why the last handshake with each server failed. Empty after a connection on which one has answered."""
        self._was_answered = False
        self._paused_until_s: dict[tuple[str, int], float] = {}

    @property
    def failure(self) -> str | None:
        """Why the last handshakes failed; None if none has since ZooKeeper has answered."""
        failures = dict(self._failures)  # another thread may add one
        if len(set(failures.values())) <= 1:
            return next(iter(failures.values()), None)
        return "; ".join(f"{host}:{port}: {why}" for (host, port), why in sorted(failures.items()))

    def connect(self, address: tuple[str, int], host: str, timeout_s: float) -> ssl.SSLSocket:
        """Raises OSError. `host` is the name in zookeeper.connect, which the certificate must have."""
        if time.monotonic() < self._paused_until_s.get(address, 0.0):
            raise ConnectionAbortedError("the last handshake failed a moment ago")
        below = socket.create_connection(address, timeout_s)
        try:
            below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            below.settimeout(self._timeout_s)
            context = self._contexts()
            context.sslsocket_class = _Socket
            connection = context.wrap_socket(below, server_hostname=host)
        except OSError as error:
            below.close()
            self._failed(address, why_not_connected(error, host, ZOOKEEPER, self._timeout_s), error)
            raise
        assert isinstance(connection, _Socket)
        connection.on_first_answer = lambda error: self._first_answer(address, host, error)
        return connection

    def _first_answer(self, address: tuple[str, int], host: str, error: OSError | None) -> None:
        # TLS 1.3: a server judges the client's certificate when the client's handshake is complete.
        if error is None:
            self._was_answered = True
            self._failures = {}
        elif isinstance(error, ssl.SSLError):
            self._failed(address, why_not_connected(error, host, ZOOKEEPER), error)
        else:
            why = f"it closed the connection after the TLS handshake: {WITHOUT_LEADER}; otherwise its log says why"
            self._failed(address, f"{why} ({ZOOKEEPER.certificate})", error)

    def _failed(self, address: tuple[str, int], why: str, error: OSError) -> None:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            self._paused_until_s[address] = time.monotonic() + _PAUSE_AFTER_FAILURE_S
        elif self._was_answered and not isinstance(error, TimeoutError):
            why = "it closed the connection: it is stopping, or its ensemble has no leader at the moment"
        if why != self._failures.get(address):
            self._failures[address] = why
            _logger.warning("ZooKeeper at %s:%d cannot be used by TLS, trying again: %s", *address, why)


class _Socket(ssl.SSLSocket):
    """Reports the first answer, or the error in its place."""

    on_first_answer: Callable[[OSError | None], None] | None = None

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        if self.on_first_answer is None:
            return super().recv(size, flags)
        try:
            data = super().recv(size, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError as error:
            self._report(error)
            raise
        self._report(None if data else ConnectionResetError())
        return data

    def _report(self, error: OSError | None) -> None:
        report, self.on_first_answer = self.on_first_answer, None
        assert report is not None
        report(error)


def pending(readers: list[Any]) -> list[Any]:
    """Return the connections with decrypted bytes that poll does not see: several answers can share a TLS record."""
    return [reader for reader in readers if isinstance(reader, ssl.SSLSocket) and reader.pending()]

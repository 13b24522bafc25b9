"""Limits of the console's own connections, so that a client that opens many, or never asks, does not lock others out.

uvicorn limits neither. A connection beyond MAX_CONNECTIONS is closed at once, and one whose client has not sent a whole
request within REQUEST_WITHIN_S is closed then. Event streams have a limit of their own (`edge`), below that of
connections, so that pages are served beside them.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
REQUEST_WITHIN_S = 10.0


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP with these limits."""

    max_connections = MAX_CONNECTIONS
    request_within_s = REQUEST_WITHIN_S
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_asking:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_asking(self) -> bool:
        """Whether no request is under way, so that the next one is awaited."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_request(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.request_within_s, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        if self._is_asking:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

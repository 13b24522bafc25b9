"""Chooses the dialect of a connection by the beginning of its first frame.

After the length, our own frames begin with 0x95, an array of five, and Kafka's with the high byte of an API key, 0x00.
The first five bytes therefore suffice. They are read separately; then the chosen dialect takes over as if it had been
there from the beginning, and later frames cost nothing more. Other beginnings go to our own dialect, which reports the
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from minibroker.broker.network.dialect import Answer, Asked, BadInput, Dialect, Frame, Undecoded
from minibroker.protocol.apis import Api
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ApiVersion, Message

_LENGTH_BYTES = 4
_PREFIX_BYTES = _LENGTH_BYTES + 1
_KAFKAS = 0x00
_STRANGERS = {
    b"\x16\x03": "a TLS handshake, but this listener is PLAINTEXT: set the client's security.protocol to that, or "
    "use the port of a listener that is SSL",
    b"GET ": "HTTP, but this listener serves Kafka's protocol: metrics are at metrics.listener",
    b"HEAD": "HTTP, but this listener serves Kafka's protocol: metrics are at metrics.listener",
    b"POST": "HTTP, but this listener serves Kafka's protocol",
}
"""Common strays. Their first bytes would parse as a frame length of 1 GB."""


class FirstFrame:
    """The dialect of a connection until five bytes have been read. `chosen` is called with its successor, which already
    has these bytes."""

    answers_in_order = False
    send_buffer_bytes = None
    reads_columns = False
    drops_unnamed_brokers = False
    election_wait_ms = 0
    rests_on_named_leaders = False
    api_versions: Sequence[ApiVersion] = ()
    has_more = False
    is_full = False

    def __init__(
        self,
        native: Callable[[], Dialect],
        kafka: Callable[[], Dialect],
        chosen: Callable[[Dialect], None],
        max_request_bytes: int,
    ) -> None:
        self._native = native
        self._kafka = kafka
        self._chosen = chosen
        self._max_request_bytes = max_request_bytes
        self._prefix = bytearray(_PREFIX_BYTES)
        self._filled = 0

    @property
    def in_frame(self) -> bool:
        return self._filled > 0

    def get_buffer(self) -> memoryview:
        return memoryview(self._prefix)[self._filled :]

    def received(self, count: int) -> Sequence[Frame]:
        """Raise BadInput like the chosen dialect, and for other beginnings whose length is invalid."""
        self._filled += count
        length = int.from_bytes(self._prefix[:_LENGTH_BYTES], "big", signed=True)
        if self._filled >= _LENGTH_BYTES and length > self._max_request_bytes:
            for beginning, stranger in _STRANGERS.items():
                if self._prefix.startswith(beginning):
                    raise BadInput(stranger, None)
        if self._filled < _LENGTH_BYTES or (self._filled < _PREFIX_BYTES and length > 0):
            return ()
        is_kafkas = self._filled == _PREFIX_BYTES and length > 0 and self._prefix[_LENGTH_BYTES] == _KAFKAS
        dialect = self._kafka() if is_kafkas else self._native()
        self._chosen(dialect)
        dialect.get_buffer()[: self._filled] = self._prefix[: self._filled]
        return dialect.received(self._filled)

    def more(self) -> Sequence[Frame]:
        raise AssertionError("no frame has been read")

    def api_key(self, frame: Frame) -> int:
        raise AssertionError("no frame has been read")

    def may_overlap(self, frame: Frame) -> bool:
        raise AssertionError("nothing has been asked")

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        raise AssertionError("nothing has been asked")

    def knows_mutation_quotas(self, api_key: int, api_version: int) -> bool:
        raise AssertionError("nothing has been asked")

    def decode(self, frame: Frame) -> tuple[Api[Any, Any], NoReturn, Message | Undecoded]:
        raise AssertionError("no frame has been read")

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        raise AssertionError("nothing has been asked")

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer | None:
        raise AssertionError("nothing has been asked")

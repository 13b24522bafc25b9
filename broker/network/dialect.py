"""The interface of a wire dialect, which turns the bytes of a connection into requests, and answers into bytes.

The problem: handlers work with typed messages. The wire protocol determines their framing, their versions, the form of
errors, and whether a client accepts answers out of order. Several protocols share one port.

The choice: each connection has its own dialect object and uses only the interface declared here. A dialect does no I/O:
the connection owns the socket and decides when to read. This costs one call per read and per message, not per record,
and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minibroker.protocol.apis import Api
from minibroker.protocol.connections.framing import FrameTooLarge
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ApiVersion, Buffer, Message

Frame = bytes | memoryview
"""The received bytes of one request. A large frame has a buffer of its own, from which its records are written to the
log."""

FRAMES_AT_ONCE = 16
"""The frames that are cut at a time out of the bytes received. To cut so few costs as much as to read them."""

Answer = Sequence[Buffer]
"""A frame to send, in pieces. Large pieces are memory read from a file, and do not change until they are sent."""


class BadInput(Exception):
    """The peer's input is invalid, and input after it cannot be understood either. `answer` reports this to the peer,
    if that is possible. `frames` were complete before."""

    def __init__(self, reason: str, answer: Answer | None, frames: Sequence[Frame] = ()) -> None:
        super().__init__(reason)
        self.answer = answer
        self.frames = frames


class Undecoded:
    """A body that is too large to be decoded by the event loop at once (`large_requests`)."""

    __slots__ = ("decode",)

    def __init__(self, decode: Callable[[], Message]) -> None:
        self.decode = decode
        """Returns the body. Raises BadInput. May run in any thread."""


def why_too_large(error: FrameTooLarge, max_request_bytes: int) -> str:
    limit = f"socket.request.max.bytes={max_request_bytes}"
    return f"{error} (frames with records may have {limit}, all others 1 MiB)"


class Header(Protocol):
    """The header of a request."""

    @property
    def api_version(self) -> int: ...
    @property
    def correlation_id(self) -> int: ...
    @property
    def client_id(self) -> str | None: ...


class Asked(Header, Protocol):
    """The parts of a request that its answer depends on."""

    @property
    def api(self) -> Api[Any, Any]: ...
    @property
    def body(self) -> Any: ...


class Dialect(Protocol):
    """The dialect of one connection. Its methods are called in the order of events on that connection."""

    @property
    def answers_in_order(self) -> bool:
        """Whether the peer matches answers to requests by their order. A request is then handled only when all earlier
        ones have been answered, unless it and all of these may overlap."""
        ...

    def api_key(self, frame: Frame) -> int:
        """Return the key of a request's API, which may be unknown."""
        ...

    def may_overlap(self, frame: Frame) -> bool:
        """Return whether the request may be handled while earlier ones of its kind, whose handlers have returned, still
        await their answers. Only used with answers in order; answers that are ready too early are held back."""
        ...

    @property
    def send_buffer_bytes(self) -> int | None:
        """The size of the operating system's send buffer. None: the system's choice, up to some MiB."""
        ...

    @property
    def reads_columns(self) -> bool:
        """Whether the peer reads batches of magic 77. Other peers are sent Kafka's records."""
        ...

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        """Return whether a client that sends this version of Produce or Fetch may know zstd (KIP-110)."""
        ...

    def knows_mutation_quotas(self, api_key: int, api_version: int) -> bool:
        """Return whether a client that sends this version of CreateTopics, DeleteTopics or CreatePartitions knows
        THROTTLING_QUOTA_EXCEEDED (KIP-599)."""
        ...

    @property
    def drops_unnamed_brokers(self) -> bool:
        """Whether the peer drops a broker that a Metadata answer does not name, together with the requests that it was
        about to move to another broker. For such peers, a broker is named for a while after it has gone, and a broker
        that has just started does not answer until it can name the others."""
        ...

    @property
    def election_wait_ms(self) -> int:
        """How long a Metadata answer may wait for the election of leaders that this broker has just lost."""
        ...

    @property
    def rests_on_named_leaders(self) -> bool:
        """Whether the peer, once a Metadata answer names a leader for each partition, waits a second before it asks
        again, even if it cannot reach that leader. For such peers, a leader that this broker has just lost is not
        named."""
        ...

    @property
    def api_versions(self) -> Sequence[ApiVersion]:
        """The APIs and versions that an ApiVersions answer lists."""
        ...

    @property
    def in_frame(self) -> bool:
        """Whether a request has arrived in part, and no other before it has yet to be returned."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether complete frames have been received that neither `received` nor `more` has returned."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether these leave little room in the buffer, so that nothing should be read."""
        ...

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes. Never empty; valid until `received`."""
        ...

    def received(self, count: int) -> Sequence[Frame]:
        """Return the frames completed by `count` bytes put into the buffer, in order and at most FRAMES_AT_ONCE; none
        while there are others before them. Raises BadInput."""
        ...

    def more(self) -> Sequence[Frame]:
        """Return further frames. Raises BadInput."""
        ...

    def decode(self, frame: Frame) -> tuple[Api[Any, Any], Header, Message | Undecoded]:
        """Return the API, the header and the typed body, or `Undecoded` if that would take long. Raises BadInput, also
        for APIs that this listener does not serve."""
        ...

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        """Return the bytes of the answer. Never raises because of a value, because the caller may have further answers
        to send. May run in any thread."""
        ...

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer | None:
        """Return the bytes of an answer that reports the failure of the whole request. None: no answer can tell this
        peer of it (it expects none, and would take one for the answer to its next request), so its connection is closed
        instead. May run in any thread."""
        ...

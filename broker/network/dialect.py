"""What a connection speaks: how its bytes become requests, and answers become bytes. The interface of every dialect.

The problem: handlers work with typed messages. How those are framed, which versions they have, how an error looks in
the answer of an API, and whether a peer takes answers in another order than that of its requests, depend on what is
spoken on the wire; and a protocol other than our own may come to the same port.

The choice: each connection has a dialect, an object of its own, and asks it for nothing but what is declared here. It
does no I/O: the connection has the socket, and says when to read. It costs a call per read and per message, not per
record, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from minibroker.protocol.apis import Api
from minibroker.protocol.connections.framing import FrameTooLarge
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ApiVersion, Buffer, Message

Frame = bytes | memoryview
"""What arrived of one request. A large one is a buffer of its own, which its records are written to the log from."""

Answer = Sequence[Buffer]
"""A frame to send, in pieces: large ones are memory that is read from a file, and do not change until they are sent."""


class BadInput(Exception):
    """What a peer sent cannot be understood, nor can what comes after it. `answer` tells the peer, where it can be
    told; `frames` were complete before."""

    def __init__(self, reason: str, answer: Answer | None, frames: Sequence[Frame] = ()) -> None:
        super().__init__(reason)
        self.answer = answer
        self.frames = frames


def why_too_large(error: FrameTooLarge, max_request_bytes: int) -> str:
    limit = f"socket.request.max.bytes={max_request_bytes}"
    return f"{error} (records may come in frames of {limit}, all else in 1 MiB)"


class Header(Protocol):
    """What comes before the body of a request."""

    @property
    def api_version(self) -> int: ...
    @property
    def correlation_id(self) -> int: ...
    @property
    def client_id(self) -> str | None: ...


class Asked(Header, Protocol):
    """A request, as far as its answer depends on it."""

    @property
    def api(self) -> Api[Any, Any]: ...
    @property
    def body(self) -> Any: ...


class Dialect(Protocol):
    """One connection's. Its methods are called in the order in which things happen on that connection."""

    @property
    def answers_in_order(self) -> bool:
        """The peer matches answers to its requests by their order, in which they leave. No request is handled until
        those before it have been answered, unless it and all of these may overlap."""
        ...

    def may_overlap(self, frame: Frame) -> bool:
        """With answers in order: the request may be handled while others of this kind, sent before it, have not been
        answered but for their handlers, which have returned. Answers that are given too early are held back."""
        ...

    @property
    def send_buffer_bytes(self) -> int | None:
        """How much of its answers the operating system may hold. None: as it thinks fit, up to some MiB."""
        ...

    @property
    def reads_columns(self) -> bool:
        """The peer knows batches of magic 77. Who does not is sent Kafka's records."""
        ...

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        """Who sends that version of Produce or Fetch may know zstd (KIP-110)."""
        ...

    @property
    def drops_unnamed_brokers(self) -> bool:
        """The peer gives up a broker that an answer to Metadata does not name, and with it what it was about to move
        to another one: a broker is named for a while after it has gone."""
        ...

    @property
    def rests_on_named_leaders(self) -> bool:
        """Once each partition has a leader in an answer to Metadata, the peer asks no more for a second, even if it
        cannot reach that leader: one that this broker has just lost is not named."""
        ...

    @property
    def api_versions(self) -> Sequence[ApiVersion]:
        """What the answer to ApiVersions lists."""
        ...

    @property
    def in_frame(self) -> bool:
        """Some bytes of a request have arrived, but not all."""
        ...

    def get_buffer(self) -> memoryview:
        """Where the next bytes go. Never empty; valid until `received`."""
        ...

    def received(self, count: int) -> Sequence[Frame]:
        """`count` bytes were put into the buffer. The frames completed by them, in order. Raises BadInput."""
        ...

    def decode(self, frame: Frame) -> tuple[Api[Any, Any], Header, Message]:
        """The API, header, and typed body. Raises BadInput, also for what this listener does not serve."""
        ...

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        """The bytes of the answer. Never raises for a value: where it is called, answers of others may be due, too."""
        ...

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer | None:
        """The bytes of an answer that says that the request as a whole has failed. None: the peer awaits no answer, and
        would take it for that to its next request; that its connection is closed is what tells it."""
        ...

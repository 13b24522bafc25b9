"""minibroker's own dialect: MessagePack in frames, answers matched by correlation id in any order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from minibroker.broker.network.dialect import (
    FRAMES_AT_ONCE,
    Answer,
    Asked,
    BadInput,
    Frame,
    Undecoded,
    why_too_large,
)
from minibroker.protocol import apis
from minibroker.protocol.connections.framing import (
    MAX_SMALL_REQUEST_BYTES,
    FrameReader,
    FrameTooLarge,
    api_key_of,
    correlation_id_of,
    request_limit,
)
from minibroker.protocol.connections.value_budget import check_values, count_values
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.messages import MAX_PRODUCE_PARTITIONS, Message, RequestEnvelope

_PREFIX = 16  # the first bytes of a frame, which include its correlation id
_MAX_HEAD_BYTES = 4_096  # more than the first bytes of a frame with the client id

MAX_UNPROVED_BYTES = 64 * 1024
"""The largest frame of a connection that must prove first who is at its other end. A proof has 200 bytes."""

_NO_API = -1
_MAX_PRODUCE_VALUES = 7 * MAX_PRODUCE_PARTITIONS
"""A partition takes three values, and seven as the only one of its topic."""
_QUICK_PRODUCE_VALUES = 7_000
"""Values that are counted and decoded within a slice of the event loop. To count `_MAX_PRODUCE_VALUES` takes 50 ms."""


class NativeListener:
    """The state that all connections of a listener share: its APIs and the size limits of frames. `requires_proof`: the
    other end of a connection must prove who it is before it sends anything large."""

    def __init__(self, name: str, plane: apis.Plane, max_request_bytes: int, *, requires_proof: bool = False) -> None:
        self.name = name
        self.plane = plane
        self.max_request_bytes = max_request_bytes
        self.requires_proof = requires_proof
        self.apis = {key: api for key, api in apis.APIS.items() if api.plane in (plane, None)}
        # The control plane's requests come from brokers and may cover every partition of the cluster.
        large = {key for key, api in self.apis.items() if api is apis.PRODUCE or api.plane is apis.Plane.CONTROL}
        self.limit_of = request_limit(max_request_bytes, frozenset(large))

    def why_not_served(self, envelope: RequestEnvelope) -> tuple[ErrorCode, str]:
        api = apis.APIS.get(envelope.api_key)
        if api is None:
            return ErrorCode.INVALID_REQUEST, f"unknown API {envelope.api_key}"
        if api.key not in self.apis:
            reason = f"{api.name} is not served on listener {self.name} of the {self.plane.value} plane"
            if self.plane is apis.Plane.CONTROL:
                reason += ": connect clients to another listener"
            return ErrorCode.INVALID_REQUEST, reason
        versions = f"{api.min_version} to {api.max_version}"
        reason = f"version {envelope.api_version} of {api.name}; this broker knows {versions}"
        return ErrorCode.UNSUPPORTED_VERSION, reason


class NativeDialect(FrameReader):
    """See `Dialect`."""

    answers_in_order = False
    send_buffer_bytes = None
    reads_columns = True
    drops_unnamed_brokers = False
    election_wait_ms = 150
    """Longer than most elections. Our client asks again within milliseconds."""
    rests_on_named_leaders = False
    api_versions = apis.API_KEYS

    def __init__(
        self,
        listener: NativeListener,
        is_broker: Callable[[], bool] = lambda: False,
        is_authenticated: Callable[[], bool] | None = None,
    ) -> None:
        """`is_broker`: whether the other end of the connection has proved to be a broker. `is_authenticated`: whether
        it has authenticated itself by SASL; None: it need not."""

        def limit_of(prefix: bytes) -> int:
            if may_send_all():
                return listener.limit_of(prefix)
            return MAX_UNPROVED_BYTES if listener.requires_proof else MAX_SMALL_REQUEST_BYTES

        def may_send_all() -> bool:
            if listener.requires_proof:
                return is_broker()
            return is_authenticated is None or is_authenticated()

        # Not methods: in a cycle of references, the buffers of closed connections would wait for the collector.
        super().__init__(limit_of, FRAMES_AT_ONCE)
        self._listener = listener
        self._may_send_all = may_send_all
        self._is_broker = is_broker

    def api_key(self, frame: Frame) -> int:
        key = api_key_of(bytes(frame[:_PREFIX]))
        return _NO_API if key is None else key

    def may_overlap(self, frame: Frame) -> bool:
        return True

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        return True

    def knows_mutation_quotas(self, api_key: int, api_version: int) -> bool:
        return True

    def received(self, count: int) -> list[Frame]:
        try:
            return self.buffer_updated(count)
        except FrameTooLarge as error:
            raise self._too_large(error) from error

    def more(self) -> list[Frame]:
        try:
            return self.cut()
        except FrameTooLarge as error:
            raise self._too_large(error) from error

    def decode(self, frame: Frame) -> tuple[apis.Api[Any, Any], RequestEnvelope, Message | Undecoded]:
        try:
            takes_long = isinstance(frame, memoryview) and self._takes_long(frame)
            envelope = _head(frame) if takes_long else apis.decode_request_envelope(frame)
            api = self._listener.apis.get(envelope.api_key)
            if api is not None and api.min_version <= envelope.api_version <= api.max_version:
                if takes_long:
                    return api, envelope, Undecoded(partial(_decode_apart, api, envelope.correlation_id, frame))
                return api, envelope, apis.decode_request(api, envelope)
        except InvalidMessage as error:
            raise _bad_input(str(error), ErrorCode.INVALID_REQUEST, bytes(frame[:_PREFIX])) from error
        code, reason = self._listener.why_not_served(envelope)
        raise BadInput(reason, [apis.encode_error(envelope.correlation_id, code, reason)])

    def _too_large(self, error: FrameTooLarge) -> BadInput:
        reason = why_too_large(error, self._listener.max_request_bytes)
        if self._listener.requires_proof and not self._may_send_all():
            reason = f"{error}: on listener {self._listener.name}, a broker proves who it is before it sends more"
        return _bad_input(reason, ErrorCode.INVALID_REQUEST, error.prefix, error.frames)

    def _takes_long(self, frame: memoryview) -> bool:
        """Return whether decoding a large frame may take long. Control requests keep their order, and a broker does not
        wait for strangers."""
        if self._listener.plane is apis.Plane.CONTROL or self._is_broker():
            return False
        if api_key_of(bytes(frame[:_PREFIX])) != apis.PRODUCE.key:
            return True
        return count_values(frame, _QUICK_PRODUCE_VALUES)[0] > _QUICK_PRODUCE_VALUES

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        return [apis.encode_response(asked.correlation_id, body)]

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer:
        return [apis.encode_error(asked.correlation_id, code, message)]


def _head(frame: Frame) -> RequestEnvelope:
    """Return the envelope of a large frame, with nil instead of the body: even to skip a body takes long. Raises
    InvalidMessage."""
    prefix = bytes(frame[:_MAX_HEAD_BYTES])
    _, position = count_values(b"\x94" + prefix[1:], 4)
    return apis.decode_request_envelope(prefix[:position] + b"\xc0")


def _decode_apart(api: apis.Api[Any, Any], correlation_id: int, frame: Frame) -> Message:
    try:
        if api is apis.PRODUCE:
            check_values(frame, _MAX_PRODUCE_VALUES, "partitions")
        body: Message = apis.decode_request(api, apis.decode_request_envelope(frame))
    except InvalidMessage as error:
        answer = [apis.encode_error(correlation_id, ErrorCode.INVALID_REQUEST, str(error))]
        raise BadInput(str(error), answer) from error
    return body


def _bad_input(reason: str, code: ErrorCode, prefix: bytes, frames: list[Frame] | None = None) -> BadInput:
    """Return the error with an answer, if the frame's first bytes identify the request."""
    correlation_id = correlation_id_of(prefix)
    answer = None if correlation_id is None else [apis.encode_error(correlation_id, code, reason)]
    return BadInput(reason, answer, frames or [])

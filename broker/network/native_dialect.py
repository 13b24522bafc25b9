"""minibroker's own dialect: MessagePack in frames, answers matched by correlation id in any order."""

from __future__ import annotations

from typing import Any

from minibroker.broker.network.dialect import Answer, Asked, BadInput, Frame, why_too_large
from minibroker.protocol import apis
from minibroker.protocol.connections.framing import FrameReader, FrameTooLarge, correlation_id_of, request_limit
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.messages import Message, RequestEnvelope

_PREFIX = 16  # the first bytes of a frame, which include its correlation id


class NativeListener:
    """The state that all connections of a listener share: its APIs and the size limits of frames."""

    def __init__(self, name: str, plane: apis.Plane, max_request_bytes: int) -> None:
        self.name = name
        self.plane = plane
        self.max_request_bytes = max_request_bytes
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
    rests_on_named_leaders = False
    api_versions = apis.API_KEYS

    def __init__(self, listener: NativeListener) -> None:
        super().__init__(listener.limit_of)
        self._listener = listener

    def may_overlap(self, frame: Frame) -> bool:
        return True

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        return True

    def received(self, count: int) -> list[Frame]:
        try:
            return self.buffer_updated(count)
        except FrameTooLarge as error:
            reason = why_too_large(error, self._listener.max_request_bytes)
            raise _bad_input(reason, ErrorCode.INVALID_REQUEST, error.prefix, error.frames) from error

    def decode(self, frame: Frame) -> tuple[apis.Api[Any, Any], RequestEnvelope, Message]:
        try:
            envelope = apis.decode_request_envelope(frame)
            api = self._listener.apis.get(envelope.api_key)
            if api is not None and api.min_version <= envelope.api_version <= api.max_version:
                return api, envelope, apis.decode_request(api, envelope)
        except InvalidMessage as error:
            raise _bad_input(str(error), ErrorCode.INVALID_REQUEST, bytes(frame[:_PREFIX])) from error
        code, reason = self._listener.why_not_served(envelope)
        raise BadInput(reason, [apis.encode_error(envelope.correlation_id, code, reason)])

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        return [apis.encode_response(asked.correlation_id, body)]

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer:
        return [apis.encode_error(asked.correlation_id, code, message)]


def _bad_input(reason: str, code: ErrorCode, prefix: bytes, frames: list[Frame] | None = None) -> BadInput:
    """Return the error with an answer, if the frame's first bytes identify the request."""
    correlation_id = correlation_id_of(prefix)
    answer = None if correlation_id is None else [apis.encode_error(correlation_id, code, reason)]
    return BadInput(reason, answer, frames or [])

"""Kafka's own protocol, as its clients speak it (`protocol/kafka`).

What differs from our own: answers leave in the order of the requests; a request with acks 0 has none; an error of a
request as a whole is said in the body, in a place of its own for each API.

In Kafka no request is handled before the one before it has been answered. Here Produce is an exception: a producer
that has five batches on their way gets them replicated together, not one by one. So is Metadata, which changes nothing
and may wait for an election (`handlers.metadata`). All else stays as in Kafka, since clients rely on it: an OffsetFetch
that comes after an OffsetCommit finds what that has written.

Bad input closes the connection without an answer, as in Kafka, with two exceptions. ApiVersions in a version that is
not served is answered in version 0 with UNSUPPORTED_VERSION and all that is served, and its sender goes on with that.
Produce in the versions that are advertised and not served is refused with the same error.
"""

from __future__ import annotations

import logging
from struct import error as StructError  # noqa: N812 - it is an exception, not a format
from typing import Any

from minibroker.broker.network.dialect import Answer, Asked, BadInput, Frame, why_too_large
from minibroker.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE, Api
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES, FrameReader, FrameTooLarge
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.kafka import apis as kafka
from minibroker.protocol.kafka.primitives import Reader
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import ApiVersion, ApiVersionsRequest, ApiVersionsResponse, Message, ProduceRequest

logger = logging.getLogger("minibroker.network")


_OVERLAPPING = {PRODUCE.key, METADATA.key}
"""A producer has several Produce requests under way, and what it asks of Metadata is not about these. Whatever else it
sends may be: who asks where a log ends, behind a Produce request, counts on finding that in it."""
_ZSTD_SINCE = {PRODUCE.key: 7, FETCH.key: 10}
"""Versions of Kafka 2.1, with which zstd came."""


class KafkaListener:
    """What is the same for all connections of a listener."""

    def __init__(self, max_request_bytes: int) -> None:
        self.max_request_bytes = max_request_bytes

    def limit_of(self, prefix: bytes) -> int:
        """How large the frame may be that begins with this."""
        if kafka.api_key_of(prefix) == PRODUCE.key:
            return self.max_request_bytes
        return min(MAX_SMALL_REQUEST_BYTES, self.max_request_bytes)


class KafkaDialect(FrameReader):
    """See `Dialect`."""

    answers_in_order = True
    send_buffer_bytes = 200 * 1024
    """Where client and brokers share two cores, librdkafka reads a twentieth more than with the megabytes that the
    system would hold: less falls out of the processor's cache between being sent and being read. With the 100 KiB of
    Kafka's `socket.send.buffer.bytes` aiokafka reads a fiftieth less. Our own client reads an eighth less than with
    the megabytes (`docs/benchmarks.md`). More than 208 KiB older kernels do not give."""
    reads_columns = False
    drops_unnamed_brokers = True
    rests_on_named_leaders = True
    api_versions: list[ApiVersion] = kafka.API_KEYS

    def __init__(self, listener: KafkaListener) -> None:
        super().__init__(listener.limit_of)
        self._listener = listener

    def may_overlap(self, frame: Frame) -> bool:
        return kafka.api_key_of(frame[:2]) in _OVERLAPPING

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        return api_version >= _ZSTD_SINCE[api_key]

    def received(self, count: int) -> list[Frame]:
        try:
            return self.buffer_updated(count)
        except FrameTooLarge as error:
            raise BadInput(why_too_large(error, self._listener.max_request_bytes), None, error.frames) from error

    def decode(self, frame: Frame) -> tuple[Api[Any, Any], kafka.RequestHeader, Message]:
        reader = Reader(frame)
        header = None
        try:
            header = kafka.read_header(reader)
            if (
                header.api_key == API_VERSIONS.key
                and header.api_version > kafka.KAFKA_APIS[API_VERSIONS.key].max_version
            ):
                return API_VERSIONS, header, ApiVersionsRequest()
            api = kafka.check_supported(kafka.KAFKA_APIS.get(header.api_key), header)
            # What may follow is left alone, as in Kafka: librdkafka asks for the metadata of all topics with three
            # bytes more than there should be.
            body = api.read_request(reader, header.api_version)
        except InvalidMessage as error:
            what = "not a request header" if header is None else f"{header} of Kafka's protocol"
            raise BadInput(f"{what}: {error}", None) from error
        if header.api_version < api.min_version:
            raise self._refused(api, header, body)
        return api.api, header, body

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        api, version = kafka.KAFKA_APIS[asked.api.key], asked.api_version
        if isinstance(body, ApiVersionsResponse):
            if version > api.max_version:
                body.error_code = ErrorCode.UNSUPPORTED_VERSION
            if body.error_code:
                version = 0  # which everybody can read
        frame = kafka.begin_response(api, version, asked.correlation_id)
        try:
            api.write_response(frame, body, version)
        except StructError as error:  # what our own clients have called something may be too long for this version
            logger.error("%s in version %d of Kafka's protocol cannot be answered: %s", api.name, version, error)
            frame = kafka.begin_response(api, version, asked.correlation_id)
            failed = api.failed(asked.body, ErrorCode.UNKNOWN_SERVER_ERROR, "this version cannot say the answer")
            api.write_response(frame, failed, version)
        return frame.pieces()

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer | None:
        if isinstance(asked.body, ProduceRequest) and asked.body.acks == 0:
            return None
        failed = kafka.KAFKA_APIS[asked.api.key].failed(asked.body, code, message[:1_000])
        return self.encode_response(asked, failed)

    def _refused(self, api: KafkaApi, header: kafka.RequestHeader, body: Message) -> BadInput:
        reason = (
            f"version {header.api_version} of {api.name} in Kafka's protocol, whose records nobody writes any more; "
            f"this broker serves {api.min_version} to {api.max_version}: upgrade the client"
        )
        if isinstance(body, ProduceRequest) and body.acks == 0:
            return BadInput(reason, None)
        frame = kafka.begin_response(api, header.api_version, header.correlation_id)
        api.write_response(frame, api.failed(body, ErrorCode.UNSUPPORTED_VERSION, reason), header.api_version)
        return BadInput(reason, frame.pieces())

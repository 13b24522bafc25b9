"""Kafka's own protocol, for its clients (`protocol/kafka`).

It differs from our own as follows: answers leave in the order of the requests, a request with acks 0 has no answer, and
an error of a whole request is part of the body, at a place that depends on the API.

Kafka handles a request only when the previous one has been answered. Here Produce is an exception: the five batches
that a producer has in flight are replicated together, not one by one. Metadata is another: it changes nothing and may
wait for an election (`handlers.metadata`). All other APIs work as in Kafka, since clients rely on it: an OffsetFetch
after an OffsetCommit returns the committed offsets.

Bad input closes the connection without an answer, as in Kafka, with two exceptions. ApiVersions in an unsupported
version is answered in version 0 with UNSUPPORTED_VERSION and all supported versions, and the client continues with
that. Produce in versions that are listed but not supported is rejected with the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from struct import error as StructError  # noqa: N812 - it is an exception, not a format
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
from minibroker.protocol.apis import (
    API_VERSIONS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    FETCH,
    METADATA,
    PRODUCE,
    Api,
)
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES, FrameReader, FrameTooLarge
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.kafka import apis as kafka
from minibroker.protocol.kafka.primitives import MessageReader, TooManyElements
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    Message,
    MetadataRequest,
    ProduceRequest,
)

logger = logging.getLogger("minibroker.network")


_QUICK_ELEMENTS = 2_000
"""Elements of a request that are decoded within a few slices of the event loop."""

_OVERLAPPING = {PRODUCE.key, METADATA.key}
"""A producer has several Produce requests in flight, and its Metadata requests do not concern them. Other requests may:
a client that asks for a log's end after a Produce request expects the produced records to be counted."""
_ZSTD_SINCE = {PRODUCE.key: 7, FETCH.key: 10}
"""Versions of Kafka 2.1, which introduced zstd."""
_MUTATION_QUOTAS_SINCE = {CREATE_TOPICS.key: 6, DELETE_TOPICS.key: 5, CREATE_PARTITIONS.key: 3}
"""Versions of Kafka 2.7, which introduced quotas for controller mutations (KIP-599)."""


class KafkaListener:
    """The state that all connections of a listener share."""

    def __init__(self, max_request_bytes: int) -> None:
        self.max_request_bytes = max_request_bytes

    def limit_of(self, prefix: bytes) -> int:
        """Return the size limit of a frame that begins with this prefix."""
        if kafka.api_key_of(prefix) == PRODUCE.key:
            return self.max_request_bytes
        return min(MAX_SMALL_REQUEST_BYTES, self.max_request_bytes)


class KafkaDialect(FrameReader):
    """See `Dialect`."""

    answers_in_order = True
    send_buffer_bytes = 200 * 1024
    """With client and brokers on two cores, librdkafka reads 5% more than with the system's default of some MiB,
    because less data leaves the processor's cache between sending and reading. With the 100 KiB of Kafka's
    `socket.send.buffer.bytes`, aiokafka reads 2% less. Our own client reads 12% less than with the default
    (`docs/benchmarks.md`). Older kernels allow at most 208 KiB."""
    reads_columns = False
    drops_unnamed_brokers = True
    election_wait_ms = 300
    """Several times the usual duration of an election."""
    rests_on_named_leaders = True
    api_versions: list[ApiVersion] = kafka.API_KEYS

    def __init__(self, listener: KafkaListener, may_send_all: Callable[[], bool] | None = None) -> None:
        """`may_send_all`: whether the client has authenticated itself; None: it need not."""

        def limit_of(prefix: bytes) -> int:
            assert may_send_all is not None
            return listener.limit_of(prefix) if may_send_all() else MAX_SMALL_REQUEST_BYTES

        super().__init__(listener.limit_of if may_send_all is None else limit_of, FRAMES_AT_ONCE)
        self._listener = listener

    def api_key(self, frame: Frame) -> int:
        return kafka.api_key_of(frame[:2])

    def may_overlap(self, frame: Frame) -> bool:
        return kafka.api_key_of(frame[:2]) in _OVERLAPPING

    def knows_zstd(self, api_key: int, api_version: int) -> bool:
        return api_version >= _ZSTD_SINCE[api_key]

    def knows_mutation_quotas(self, api_key: int, api_version: int) -> bool:
        return api_version >= _MUTATION_QUOTAS_SINCE[api_key]

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

    def decode(self, frame: Frame) -> tuple[Api[Any, Any], kafka.RequestHeader, Message | Undecoded]:
        reader = MessageReader(frame, _QUICK_ELEMENTS)
        header = None
        try:
            header = kafka.read_header(reader)
            if (
                header.api_key == API_VERSIONS.key
                and header.api_version > kafka.KAFKA_APIS[API_VERSIONS.key].max_version
            ):
                return API_VERSIONS, header, ApiVersionsRequest()
            api = kafka.check_supported(kafka.KAFKA_APIS.get(header.api_key), header)
            start = reader.position
            return api.api, header, self._body(api, header, reader)
        except TooManyElements:
            assert header is not None
            return api.api, header, Undecoded(partial(self._body_apart, api, header, frame, start))
        except InvalidMessage as error:
            raise _bad_input(header, error) from error

    def _too_large(self, error: FrameTooLarge) -> BadInput:
        return BadInput(why_too_large(error, self._listener.max_request_bytes), None, error.frames)

    def _body(self, api: KafkaApi, header: kafka.RequestHeader, reader: MessageReader) -> Message:
        """Raises InvalidMessage and BadInput."""
        # Trailing bytes are ignored, as in Kafka: librdkafka asks for the metadata of all topics with three bytes too
        # many.
        body: Message = api.read_request(reader, header.api_version)
        if header.api_version < api.min_version:
            raise self._refused(api, header, body)
        return body

    def _body_apart(self, api: KafkaApi, header: kafka.RequestHeader, frame: Frame, start: int) -> Message:
        reader = MessageReader(frame, api.max_elements)
        reader.position = start
        try:
            return self._body(api, header, reader)
        except InvalidMessage as error:
            raise _bad_input(header, error) from error

    def encode_response(self, asked: Asked, body: Message) -> Answer:
        api, version = kafka.KAFKA_APIS[asked.api.key], asked.api_version
        if isinstance(body, ApiVersionsResponse):
            if version > api.max_version:
                body.error_code = ErrorCode.UNSUPPORTED_VERSION
            if body.error_code:
                version = 0  # which every client can read
        frame = kafka.begin_response(api, version, asked.correlation_id)
        try:
            api.write_response(frame, body, version)
        except StructError as error:  # a name chosen by our own clients may be too long for this version
            logger.error("%s in version %d of Kafka's protocol cannot be answered: %s", api.name, version, error)
            frame = kafka.begin_response(api, version, asked.correlation_id)
            failed = api.failed(asked.body, ErrorCode.UNKNOWN_SERVER_ERROR, "this version cannot express the answer")
            api.write_response(frame, failed, version)
        return frame.pieces()

    def encode_error(self, asked: Asked, code: ErrorCode, message: str) -> Answer | None:
        if isinstance(asked.body, ProduceRequest) and asked.body.acks == 0:
            return None
        if isinstance(asked.body, MetadataRequest):
            return None  # it would name no brokers, and librdkafka would drop all that it knows
        failed = kafka.KAFKA_APIS[asked.api.key].failed(asked.body, code, message[:1_000])
        return self.encode_response(asked, failed)

    def _refused(self, api: KafkaApi, header: kafka.RequestHeader, body: Message) -> BadInput:
        reason = (
            f"version {header.api_version} of {api.name} in Kafka's protocol is obsolete; "
            f"this broker serves {api.min_version} to {api.max_version}: upgrade the client"
        )
        if isinstance(body, ProduceRequest) and body.acks == 0:
            return BadInput(reason, None)
        frame = kafka.begin_response(api, header.api_version, header.correlation_id)
        api.write_response(frame, api.failed(body, ErrorCode.UNSUPPORTED_VERSION, reason), header.api_version)
        return BadInput(reason, frame.pieces())


def _bad_input(header: kafka.RequestHeader | None, error: InvalidMessage) -> BadInput:
    what = "not a request header" if header is None else f"{header} of Kafka's protocol"
    return BadInput(f"{what}: {error}", None)

"""The table of APIs that are served to Kafka's clients, and the headers before requests and responses.

ApiVersions advertises exactly this table. A client does without an API that is not in it, or reports that the broker
is too old.
"""

from __future__ import annotations

from struct import Struct

import msgspec

from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.kafka import acls, brokers, configs, data, groups, metadata, sasl, topics, transactions
from minibroker.protocol.kafka.primitives import LENGTH16, FrameWriter, MessageReader
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import ApiVersion

KAFKA_APIS: dict[int, KafkaApi] = {
    api.key: api
    for family in (data, metadata, groups, transactions, topics, configs, acls, sasl, brokers)
    for api in family.APIS
}
"""The APIs by their keys."""

API_KEYS = [ApiVersion(key, api.advertised_from, api.max_version) for key, api in sorted(KAFKA_APIS.items())]
"""The response to ApiVersions."""

_PREFIX = Struct(">hhi")
_LENGTH = Struct(">i")

PREFIX_BYTES = _PREFIX.size
_NO_TAGS = 0


class RequestHeader(msgspec.Struct):
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


def api_key_of(prefix: bytes | memoryview) -> int:
    """The API key in the first bytes of a request."""
    return int.from_bytes(prefix[:2], "big", signed=True)


def read_header(reader: MessageReader) -> RequestHeader:
    """Read the header of any request. Tagged fields are skipped if the API is known. Raises InvalidMessage."""
    key, version, correlation_id = reader.unpack(_PREFIX)
    length: int = reader.unpack(LENGTH16)[0]
    if length < -1:
        raise reader.problem(f"a client id of {length} bytes")
    client_id = None if length == -1 else reader.string(length, length)
    api = KAFKA_APIS.get(key)
    if api is not None and api.is_flexible(version):
        reader.skip_tagged_fields()
    return RequestHeader(key, version, correlation_id, client_id)


def begin_response(api: KafkaApi, version: int, correlation_id: int) -> FrameWriter:
    """Return a frame with room for its length and with the header of a response.

    The header of ApiVersions never has tagged fields: a client must be able to read it before it knows the versions
    (KIP-511)."""
    frame = FrameWriter()
    frame += _LENGTH.pack(correlation_id)
    if api.is_flexible(version) and api is not metadata.API_VERSIONS:
        frame.append(_NO_TAGS)
    return frame


def check_supported(api: KafkaApi | None, header: RequestHeader) -> KafkaApi:
    """Return `api`. Raises InvalidMessage if the API or its version is not advertised."""
    if api is None:
        raise InvalidMessage(f"API {header.api_key} of Kafka's protocol is not served here")
    if not api.advertised_from <= header.api_version <= api.max_version:
        raise InvalidMessage(
            f"version {header.api_version} of {api.name} in Kafka's protocol; "
            f"this broker serves {api.advertised_from} to {api.max_version}"
        )
    return api

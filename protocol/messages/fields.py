"""Types of fields, bounds of lists, and the envelopes around every message."""

from typing import Annotated

import msgspec
from msgspec import Meta

PROOF_BYTES = 32
"""The size of a SHA-256 proof, and of the nonces that make each proof unique."""

Int8 = Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)]
Int16 = Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
String = Annotated[str, Meta(max_length=32_767)]
Name = Annotated[str, Meta(max_length=249)]
TopicName = String
"""A topic's name in a client's request. It may be longer than a legal name: the handler then rejects that entry alone,
as in Kafka, while a failure to decode it would reject the whole request."""
TopicId = Annotated[str, Meta(max_length=22)]
"""URL-safe base64 of 16 bytes, 22 characters (Kafka's Uuid; see `topic_ids`); empty: unknown, not checked."""

Nonce = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]

Replicas = Annotated[list[Int32], Meta(max_length=1_000)]
BrokerEpochs = Annotated[list[Int64], Meta(max_length=1_000)]
"""One for each replica of another list, in its order; empty: unknown."""

MAX_TOPICS = 20_000
MAX_PARTITIONS = 100_000
MAX_BROKERS = 10_000
MAX_RECORD_ERRORS = 10_000
"""Errors of one batch; librdkafka puts at most this many records into a batch."""
MAX_FETCH_SLOTS = 32
"""Slots of one connection."""

ANY_VERSION = -1
"""The known version in a change that is not conditional."""
NO_VERSION = -2
"""A known version that no znode has: the change is rejected, and the response has the current version."""

NO_OPERATIONS = -(2**31)
"""Authorized operations (KIP-430) that the client did not request."""

FetchSlot = Annotated[int, Meta(ge=-1, lt=MAX_FETCH_SLOTS)]

Buffer = bytes | bytearray | memoryview
"""What an encoder accepts as bytes; a decoder always returns a memoryview."""


class Message(msgspec.Struct, array_like=True):
    """A positional MessagePack array."""


class RequestEnvelope(Message):
    api_key: Int16
    api_version: Int16
    correlation_id: Int32
    client_id: Name | None
    body: msgspec.Raw


class ResponseEnvelope(Message):
    """If the request could not be decoded, `error_code` is set and `body` is nil."""

    correlation_id: Int32
    body: msgspec.Raw
    error_code: Int16 = 0
    error_message: String = ""


class Attempt(Message):
    """Identifies an attempt of a client to change something, so that the coordinator can recognise one that arrives
    late (see `broker/coordinating/attempts.py`). Kafka has nothing like it."""

    client_instance: String
    """Unique for each client."""
    number: Int64
    """Grows with each attempt that the client sends."""
    coordinator_epoch: Int32
    """The highest `leader_epoch` that FindCoordinator has named for this group; -1: none."""

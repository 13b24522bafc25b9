"""Topic ids that reveal which of two topics of one name is newer. Pure.

The problem: a topic is deleted and created again under its name, while a broker that is cut off from the controller
still describes the old one. A process that receives both descriptions must know which is newer, or it returns to a
deleted topic.

The choice: an id is 16 bytes as URL-safe base64, like Kafka's Uuid, so tools for Kafka accept it. The controller
composes it of a marker, its epoch, the number of the topic within its term, and six random bytes. Epoch and number
define the order. The random bytes are the nonce: they keep ids distinct if ZooKeeper was wiped and epochs began again,
and the client that creates a topic may draw them, to recognise the topic later.

Rejected: random ids with a generation beside them, an extra field in every message, file and position that holds an id;
the czxid of the topic's znode, which is known only once the znode, with the id in it, has been written.

An id from another source (made by hand, or by other tools) has no age and is neither older nor newer than another.
"""

import base64
import binascii
import struct

NONCE_BYTES = 6

NO_TOPIC = "A" * 22
"""The id that no topic has (Kafka's Uuid.ZERO_UUID)."""

_MARKER = b"mb"
_LAYOUT = struct.Struct(f">2sII{NONCE_BYTES}s")


def make(controller_epoch: int, number: int, nonce: bytes) -> str:
    """Return the id of the topic with that number, from 1 on, in the term of the controller of that epoch."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"the nonce has {len(nonce)} bytes: {NONCE_BYTES} are expected")
    data = _LAYOUT.pack(_MARKER, controller_epoch, number, nonce)
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def age(topic_id: str) -> int | None:
    """Return a number that is greater for topics created later; None for an id without an age."""
    parts = _parts(topic_id)
    return None if parts is None else parts[0] << 32 | parts[1]


def nonce(topic_id: str) -> bytes | None:
    """Return the nonce of an id from `make`; None for other ids."""
    parts = _parts(topic_id)
    return None if parts is None else parts[2]


def is_older(topic_id: str, other: str) -> bool:
    """Return whether the first topic was certainly created before the other."""
    if topic_id == other:  # nearly always; called for each partition of an order
        return False
    own, others = age(topic_id), age(other)
    return own is not None and others is not None and own < others


def _parts(topic_id: str) -> tuple[int, int, bytes] | None:
    try:
        data = base64.b64decode(topic_id + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(data) != _LAYOUT.size:
        return None
    marker, controller_epoch, number, drawn = _LAYOUT.unpack(data)
    return (controller_epoch, number, drawn) if marker == _MARKER else None

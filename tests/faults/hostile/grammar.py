"""A grammar of malformed frames over all declared APIs, so that a new API is covered without a change here.

A request is drawn from the schema that declares it (`msgspec.inspect`), with names, partitions, epochs and records that
a broker may know, then damaged: in its values, in its shape, in its bytes. Frame `number` of a seed is always the same.

`Reading` holds the outcome that a reader of these bytes must reach. It also marks requests which a broker must *obey*:
a request to delete a topic may be well-formed, so requests that would change the watched topic are never sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from functools import cache
from random import Random
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api, Plane
from minibroker.protocol.connections.framing import FrameReader, FrameTooLarge, request_limit
from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.records import CorruptRecord, decode_batch, encode_batch, iterate_batches, validate_batch
from minibroker.protocol.records.compression import Compression, compress

WATCHED_TOPIC = "watched"
"""A topic whose records must not change."""
OPEN_TOPIC = "open"
"""A topic to which every well-formed request may write."""
CREATED_TOPICS = ("created-0", "created-1", "created-2")

MAX_REQUEST_BYTES = 100 * 1024 * 1024
_BOMB_BYTES = 16 * 1024 * 1024

_INTEGERS = (
    -(2**63),
    -(2**31) - 1,
    -(2**31),
    -32769,
    -129,
    -2,
    -1,
    0,
    1,
    2**15,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**64 - 1,
)
_ILLEGAL_NAMES = ("", ".", "..", "../../etc/passwd", "a/b", "a\x00b", "line\nbreak", "x" * 249, "x" * 250, "\U0001f600")
_WRONG_TYPES: tuple[Any, ...] = (None, True, 1.5, float("nan"), "text", b"bytes", [], {}, {"a": 1}, [[]], -1)
_RAW = (
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xdd\x7f\xff\xff\xff\x00",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc6\x7f\xff\xff\xffab",
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc1",  # never used
    b"\xa4\xff\xfe\xfd\xfc",  # a string that is not UTF-8
    b"\xa3\xed\xa0\x80",  # a lone surrogate
)

_encoder = msgspec.msgpack.Encoder()
_HEADER = struct.Struct(">qiibIhiqqqhii")


class Hostile(NamedTuple):
    kind: str
    plane: Plane
    """The plane of the listener to which the frame is sent."""
    data: bytes
    """The bytes on the wire, including the announced length."""


# --- Records ---------------------------------------------------------------------------------------------------


def _batch(random: Random) -> bytearray:
    count = random.choice((1, 1, 3, 20))
    idempotent = random.random() < 0.3
    return encode_batch(
        [random.choice((None, b"", random.randbytes(random.randrange(60)))) for _ in range(count)],
        base_timestamp=1_700_000_000_000,
        timestamp_deltas=[random.randrange(5) for _ in range(count)],
        keys=None if random.random() < 0.5 else [b"key"] * count,
        headers=None if random.random() < 0.7 else [[("name", b"value")]] * count,
        compression=random.choice(list(Compression)),
        magic=random.choice((2, 77)),
        producer_id=random.randrange(50) if idempotent else -1,
        producer_epoch=0 if idempotent else -1,
        base_sequence=0 if idempotent else -1,
    )


def _with_body(header: bytes | bytearray, body: bytes, **fields: int) -> bytearray:
    """Put the header before another body, with some fields changed and with the right length and CRC."""
    values = list(_HEADER.unpack_from(header))
    values[1] = _HEADER.size + len(body) - 12
    names = (
        "base_offset",
        "length",
        "epoch",
        "magic",
        "crc",
        "attributes",
        "last",
        "base",
        "max",
        "id",
        "e",
        "s",
        "count",
    )
    for name, value in fields.items():
        values[names.index(name)] = value
    batch = bytearray(_HEADER.pack(*values)) + body
    struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return batch


@cache
def _bomb(codec: Compression) -> bytes:
    return compress(codec, bytes(_BOMB_BYTES))


def _bomb_batch(random: Random) -> bytes:
    codec = random.choice(list(Compression)[1:])
    return bytes(_with_body(_batch(random), _bomb(codec), magic=77, attributes=int(codec)))


def _wrong_count(random: Random) -> bytes:
    batch = _batch(random)
    count = random.choice((-(2**31), -1, 0, 2, 1000, 1 << 20, (1 << 20) + 1, 2**31 - 1))
    last = random.choice((count - 1, 0, 2**31 - 1, -1))
    return bytes(_with_body(batch, bytes(batch[61:]), count=count, last=max(-(2**31), last)))


def _wrong_length(random: Random) -> bytes:
    batch = _batch(random)
    struct.pack_into(">i", batch, 8, random.choice((-(2**31), -1, 0, 48, 49, len(batch), 2**31 - 1)))
    return bytes(batch)


def _wrong_crc(random: Random) -> bytes:
    batch = _batch(random)
    batch[17 + random.randrange(4)] ^= 1 << random.randrange(8)
    return bytes(batch)


def _wrong_header(random: Random) -> bytes:
    """One field at the end of its range, with the right CRC."""
    batch = _batch(random)
    widths = {0: 8, 2: 4, 3: 1, 5: 2, 6: 4, 7: 8, 8: 8, 9: 8, 10: 2, 11: 4, 12: 4}
    positions = {0: 0, 2: 12, 3: 16, 5: 21, 6: 23, 7: 27, 8: 35, 9: 43, 10: 51, 11: 53, 12: 57}
    field = random.choice(list(widths))
    bits = 8 * widths[field]
    value = random.choice((-(1 << (bits - 1)), -1, 0, 1, (1 << (bits - 1)) - 1, random.getrandbits(bits - 1)))
    batch[positions[field] : positions[field] + widths[field]] = value.to_bytes(widths[field], "big", signed=True)
    struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return bytes(batch)


def _wrong_body(random: Random) -> bytes:
    """A body that no encoder writes, with the right CRC."""
    batch = _batch(random)
    plain = encode_batch([b"v", b"w"], base_timestamp=1, magic=random.choice((2, 77)))
    body = bytearray(plain[61:])
    shape = random.randrange(5)
    if shape == 0:
        body[random.randrange(len(body))] ^= 1 << random.randrange(8)
        return bytes(_with_body(plain, bytes(body)))
    if shape == 1:
        return bytes(_with_body(plain, bytes(body[: random.randrange(len(body))])))
    if shape == 2:
        return bytes(_with_body(batch, random.randbytes(random.randrange(100))))
    if shape == 3:
        nested = random.choice((b"\x91", b"\x95", b"\x81", b"\xdd\x00\x00\x00\x01")) * random.choice(
            (10, 2_000, 20_000)
        )
        return bytes(_with_body(plain, nested, magic=77, attributes=0))
    return bytes(_with_body(plain, b"\x95" + random.choice(_RAW) * random.randrange(1, 6), magic=77, attributes=0))


def _flipped(random: Random) -> bytes:
    batch = _batch(random)
    for _ in range(random.choice((1, 1, 2, 8))):
        batch[random.randrange(len(batch))] ^= 1 << random.randrange(8)
    return bytes(batch)


RECORD_KINDS: dict[str, Callable[[Random], bytes]] = {
    "whole": lambda random: bytes(_batch(random)),
    "two batches": lambda random: bytes(_batch(random) + _batch(random)),
    "wrong CRC": _wrong_crc,
    "wrong count": _wrong_count,
    "wrong length": _wrong_length,
    "wrong header": _wrong_header,
    "wrong body": _wrong_body,
    "bit flips": _flipped,
    "cut short": lambda random: (lambda b: bytes(b[: random.randrange(len(b))]))(_batch(random)),
    "garbage": lambda random: random.randbytes(random.randrange(200)),
    "empty": lambda random: b"",
}


def hostile_records(random: Random) -> tuple[str, bytes]:
    """A kind of damage, and the bytes in place of a record batch."""
    if random.random() < 0.01:
        return "bomb", _bomb_batch(random)
    kind = random.choice(list(RECORD_KINDS))
    return kind, RECORD_KINDS[kind](random)


# --- Requests from their schemas ---------------------------------------------------------------------------------


@cache
def _schema(api_key: int) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(apis.APIS[api_key].request)


class _Draw:
    """Draws a request that matches its schema, as plain lists."""

    def __init__(self, random: Random, api: Api[Any, Any]) -> None:
        self.random = random
        self.api = api

    def body(self) -> list[Any]:
        body = self._value(_schema(self.api.key), "")
        assert isinstance(body, list)
        return body

    def _value(self, node: Any, name: str) -> Any:
        random = self.random
        match node:
            case msgspec.inspect.StructType():
                return [self._value(field.type, field.name) for field in node.fields]
            case msgspec.inspect.ListType():
                if name in ("isr", "replicas", "broker_ids", "offline_replicas"):
                    return [random.choice((1, 1, 2, -1, 2**31 - 1)) for _ in range(random.randrange(4))]
                size = random.choice((0, 1, 1, 1, 2, 2, 5))
                entries = [self._value(node.item_type, name) for _ in range(size)]
                if entries and random.random() < 0.05:
                    entries.append(entries[0])  # a duplicate topic or partition
                return entries
            case msgspec.inspect.UnionType():
                return self._value(random.choice(node.types), name)
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.BoolType():
                return random.random() < (0.9 if name == "validate_only" else 0.5)
            case msgspec.inspect.IntType():
                return self._integer(node, name)
            case msgspec.inspect.FloatType():
                return random.choice((0.0, 1.0, -1.0, 1e6, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")))
            case msgspec.inspect.StrType():
                return self._text(name)
            case msgspec.inspect.BytesType():
                least = node.min_length or 0
                return random.randbytes(random.choice((least, least + 1, node.max_length or 100)))
            case msgspec.inspect.MemoryViewType():
                return hostile_records(random)[1]
        raise AssertionError(f"no way to draw {node}")

    def _integer(self, node: Any, name: str) -> int:
        random = self.random
        known = {
            "acks": (-1, -1, -1, 1, 1, 1, 1, 0, 7),
            "replica_id": (-1, -1, 1, 2, 3, -2, 99, 2**31 - 1),
            "broker_epoch": (-1, 0, -(2**63)),
            "num_partitions": (-1, 1, 2, 0, -2, 10_001, 2**31 - 1),
            "count": (-1, 1, 2, 3, 0, 10_001, 2**31 - 1),
            "replication_factor": (-1, 1, 1, 0, 2, 1_000, 2**15 - 1),
            "timeout_ms": (0, 1, 1_000, -1, 2**31 - 1),
            "max_wait_ms": (0, 1, 5, 500, -1, -(2**31), 2**31 - 1),
            "current_leader_epoch": (-1, -1, 0, 1, -2, 2**31 - 1),
        }.get(name)
        if known is not None:
            return random.choice(known)
        if name in ("index", "partition", "partition_index") and random.random() < 0.8:
            return random.choice((0, 0, 1, 1, 2))
        if name == "isolation_level" or random.random() < 0.6:
            return random.randrange(-2, 100)
        lowest = int(node.ge)
        highest = int(node.le) if node.le is not None else int(node.lt) - 1
        return min(max(random.choice(_INTEGERS), lowest), highest)

    def _text(self, name: str) -> str:
        random = self.random
        if name == "topic_id":
            return random.choice(("", "", "A" * 22))
        if self.api in (apis.DELETE_TOPICS, apis.CREATE_PARTITIONS, apis.ALTER_PARTITION_REASSIGNMENTS):
            return random.choice((*CREATED_TOPICS, "missing", *_ILLEGAL_NAMES[:-4]))
        if self.api is apis.CREATE_TOPICS:
            return random.choice((*CREATED_TOPICS, WATCHED_TOPIC, *_ILLEGAL_NAMES[:-4], "y" * 32_767))
        if random.random() < 0.1:
            return random.choice([text for text in _ILLEGAL_NAMES if len(text) < 250])
        return random.choice((OPEN_TOPIC, OPEN_TOPIC, OPEN_TOPIC, WATCHED_TOPIC, WATCHED_TOPIC, "missing", "1"))


def _request(random: Random, api: Api[Any, Any] | None = None) -> list[Any]:
    api = api or random.choice(list(apis.APIS.values()))
    return [api.key, api.max_version, random.randrange(2**31), "hostile", _Draw(random, api).body()]


def _places(tree: list[Any]) -> list[tuple[list[Any], int]]:
    """The place (list, index) of every element of the nested lists."""
    found = []
    for position, value in enumerate(tree):
        found.append((tree, position))
        if isinstance(value, list):
            found += _places(value)
    return found


def _framed(payload: bytes | bytearray) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def _plane_of(random: Random, request: list[Any]) -> Plane:
    """The request's own plane in most cases."""
    right = apis.APIS[request[0]].plane or random.choice(list(Plane))
    if random.random() < 0.1:
        return Plane.CONTROL if right is Plane.DATA else Plane.DATA
    return right


_Built = tuple[Plane, bytes]


def _well_formed(random: Random) -> _Built:
    request = _request(random)
    return _plane_of(random, request), _framed(_encoder.encode(request))


def _produce(random: Random) -> _Built:
    request = _request(random, apis.PRODUCE)
    request[4][0] = None
    return Plane.DATA, _framed(_encoder.encode(request))


def _replaced(choices: tuple[Any, ...]) -> Callable[[Random], _Built]:
    def build(random: Random) -> _Built:
        request = _request(random)
        plane = _plane_of(random, request)
        holder, position = random.choice(_places(request))
        holder[position] = deepcopy(random.choice(choices))
        return plane, _framed(_encoder.encode(request))

    return build


def _reshaped(random: Random) -> _Built:
    """Fields missing, added, swapped, repeated."""
    request = _request(random)
    plane = _plane_of(random, request)
    for _ in range(random.choice((1, 1, 3))):
        holders = [request, *(h[p] for h, p in _places(request) if isinstance(h[p], list))]
        holder = random.choice(holders)
        move = random.randrange(4)
        if move == 0 and holder:
            del holder[random.randrange(len(holder)) :]
        elif move == 1:
            holder.append(deepcopy(random.choice(_WRONG_TYPES)))
        elif move == 2 and len(holder) > 1:
            random.shuffle(holder)
        elif holder:
            holder.append(deepcopy(holder[random.randrange(len(holder))]))
    return plane, _framed(_encoder.encode(request))


def _deep(random: Random) -> _Built:
    request = _request(random)
    depth = random.choice((5, 100, 1_100, 10_000, 60_000))
    opening = random.choice((b"\x91", b"\x92\x00", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01", b"\x81\x91"))
    nested = opening * depth + random.choice((b"", b"\xc0"))
    if random.random() < 0.2:
        return Plane.DATA, _framed(nested)
    holder, position = random.choice(_places(request))
    holder[position] = msgspec.Raw(nested)
    return Plane.DATA, _framed(_encoder.encode(request))


def _announced(random: Random) -> _Built:
    """A length other than that of the bytes that follow."""
    plane, frame = _well_formed(random)
    length = random.choice(
        (-(2**31), -1, 0, 1, 3, 2**20, 2**20 + 1, MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1, 2**31 - 1)
    )
    return plane, struct.pack(">i", length) + frame[4:]


def _truncated(random: Random) -> _Built:
    plane, frame = _well_formed(random)
    cut = frame[: random.randrange(len(frame))]
    if len(cut) > 4 and random.random() < 0.5:
        return plane, _framed(cut[4:])  # a frame as announced, of half a message
    return plane, cut


def _bit_flips(random: Random) -> _Built:
    plane, frame = _well_formed(random)
    changed = bytearray(frame)
    for _ in range(random.choice((1, 1, 1, 2, 4, 30))):
        changed[random.randrange(4 if random.random() < 0.9 else 0, len(changed))] ^= 1 << random.randrange(8)
    return plane, bytes(changed)


def _wrong_envelope(random: Random) -> _Built:
    request = _request(random)
    plane = _plane_of(random, request)
    shape = random.randrange(3)
    if shape == 0:
        request[1] = random.choice((1, 2, 17, 127, -1, 2**15 - 1))
    elif shape == 1:
        request[0] = random.choice((7, 8, 21, 24, 127, 1_000, -1, 2**15 - 1))
    else:
        request[3] = random.choice((None, "", "x" * 249, "x" * 250, "a\nb", "\x1b[31m", 3))
    return plane, _framed(_encoder.encode(request))


def _garbage(random: Random) -> _Built:
    noise = random.randbytes(random.choice((1, 4, 5, 12, 40, 300, 5_000)))
    plane = random.choice((Plane.DATA, Plane.CONTROL))
    return plane, _framed(noise) if random.random() < 0.7 else noise


_STRANGERS = (
    b"GET / HTTP/1.1\r\nHost: localhost:9092\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n",
    b"POST /topics/t HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(range(190)),  # TLS client hello
    b"SSH-2.0-OpenSSH_9.6\r\n",
    bytes.fromhex("0000001b00120003000000010007636f6e736f6c6500066c696272646b00"),  # Kafka's own ApiVersions
    b"\x00\x00\x00\x00" * 20,
    b"\xff" * 64,
    b"*1\r\n$4\r\nPING\r\n",
    b"ruok",
)


def _strangers(random: Random) -> _Built:
    return random.choice((Plane.DATA, Plane.CONTROL)), random.choice(_STRANGERS)


def _long_lists(random: Random) -> _Built:
    """Lists as long as a frame of 1 MiB allows."""
    request = random.choice(
        (
            [3, 0, 1, "hostile", [[f"t{number}" for number in range(m.MAX_TOPICS)]]],
            [3, 0, 1, "hostile", [["t"] * (m.MAX_TOPICS + 1)]],
            [1, 0, 1, "hostile", [-1, 0, 1, 1, 0, [[OPEN_TOPIC, "", [[n, -1, 0, -1, 0, 1] for n in range(50_000)]]]]],
            [2, 0, 1, "hostile", [-1, 0, [["missing", [[n, -1, -1] for n in range(50_000)]]]]],
            [20, 0, 1, "hostile", [[f"absent-{number}" for number in range(m.MAX_TOPICS)], 0]],
            [19, 0, 1, "hostile", [[["z" * 32_767, 1, 1] for _ in range(30)], 0, True]],
            [3, 0, 1, "hostile", [["m" * 32_767 for _ in range(30)]]],
        )
    )
    return Plane.DATA, _framed(_encoder.encode(request))


KINDS: dict[str, tuple[float, Callable[[Random], _Built]]] = {
    "well-formed": (10, _well_formed),
    "produce": (14, _produce),
    "wrong type": (12, _replaced(_WRONG_TYPES)),
    "integer at its limit": (12, _replaced(_INTEGERS)),
    "raw MessagePack": (8, _replaced(tuple(msgspec.Raw(raw) for raw in _RAW))),
    "illegal name": (4, _replaced(_ILLEGAL_NAMES)),
    "reshaped": (8, _reshaped),
    "deep": (3, _deep),
    "announced length": (5, _announced),
    "truncated": (6, _truncated),
    "bit flips": (9, _bit_flips),
    "wrong envelope": (5, _wrong_envelope),
    "garbage": (2.5, _garbage),
    "other protocols": (1.5, _strangers),
    "long lists": (0.02, _long_lists),
}
_NAMES = list(KINDS)
_WEIGHTS = [weight for weight, _ in KINDS.values()]


def hostile_frame(seed: int, number: int) -> Hostile:
    """Return the frame of this seed and number, always the same one."""
    random = Random(f"{seed}/{number}")
    (kind,) = random.choices(_NAMES, _WEIGHTS)
    plane, data = KINDS[kind][1](random)
    return Hostile(kind, plane, data)


# --- Required outcomes ---------------------------------------------------------------------------------------------


class Ending(Enum):
    ANSWERED = "every frame is a request"
    REFUSED = "an error, and the connection is closed"
    WAITING = "the rest of a frame is due"


class Reading(NamedTuple):
    requests: list[tuple[int, Api[Any, Any], Any]]
    """Correlation id, API and body of each request before the end."""
    ending: Ending

    @property
    def is_safe(self) -> bool:
        return all(_is_safe(api, body) for _, api, body in self.requests)


_ACCEPTED = {plane: {key: api for key, api in apis.APIS.items() if api.plane in (plane, None)} for plane in Plane}
_LIMIT_OF = {
    plane: request_limit(
        MAX_REQUEST_BYTES,
        frozenset(key for key, api in accepted.items() if api is apis.PRODUCE or api.plane is Plane.CONTROL),
    )
    for plane, accepted in _ACCEPTED.items()
}


def read(hostile: Hostile) -> Reading:
    """Read the frame as a listener must. Any exception raised here would be raised in a listener."""
    reader = FrameReader(_LIMIT_OF[hostile.plane])
    ending = Ending.ANSWERED
    frames: list[bytes | memoryview] = []
    data = memoryview(hostile.data)
    while data and ending is Ending.ANSWERED:
        buffer = reader.get_buffer()
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        try:
            frames += reader.buffer_updated(size)
        except FrameTooLarge as error:
            frames += error.frames
            ending = Ending.REFUSED
    if ending is Ending.ANSWERED and reader.in_frame:
        ending = Ending.WAITING
    requests: list[tuple[int, Api[Any, Any], Any]] = []
    for frame in frames:
        try:
            envelope = apis.decode_request_envelope(frame)
            api = _ACCEPTED[hostile.plane].get(envelope.api_key)
            if api is None or not api.min_version <= envelope.api_version <= api.max_version:
                return Reading(requests, Ending.REFUSED)
            requests.append((envelope.correlation_id, api, apis.decode_request(api, envelope)))
        except InvalidMessage:
            return Reading(requests, Ending.REFUSED)
    return Reading(requests, ending)


def _is_safe(api: Api[Any, Any], body: Any) -> bool:
    """Return False for a request which a broker would obey, and which would change the watched topic or the cluster."""
    if isinstance(body, m.ProduceRequest):
        return not any(
            topic.name == WATCHED_TOPIC and any(_is_appendable(part.records) for part in topic.partition_data)
            for topic in body.topic_data
        )
    if isinstance(body, m.DeleteTopicsRequest):
        return WATCHED_TOPIC not in body.topics and OPEN_TOPIC not in body.topics
    if isinstance(body, m.DeleteRecordsRequest):
        return all(topic.name != WATCHED_TOPIC for topic in body.topics)
    if isinstance(body, m.CreateTopicsRequest):
        return body.validate_only or all(topic.name in CREATED_TOPICS or len(topic.name) != 9 for topic in body.topics)
    return True


def _is_appendable(records: memoryview) -> bool:
    """Whether a broker may append the first batch; a broker checks only its header and CRC."""
    try:
        slices = list(iterate_batches(records))
        for found in slices:
            validate_batch(records, found.header, found.start)
    except CorruptRecord:
        return False
    return bool(slices)


def decode_records(records: bytes) -> bool:
    """Decode the records as a consumer does, with and without the check of the CRC. Return True if there is a batch."""
    whole = False
    for check_crc in (True, False):
        try:
            decode_batch(records, check_crc=check_crc, max_body_bytes=_BOMB_BYTES // 2)
            whole = True
        except CorruptRecord:
            continue
    return whole

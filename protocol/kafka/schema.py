"""How the messages of Kafka's protocol are declared: once for all versions, and compiled for each version in use.

The problem: an API has up to thirteen versions, whose fields come and go, and from some version on lengths are varints
and structs end in tagged fields. A class by hand for each would be thousands of lines.

The choice. A `Layout` says how one of our structs lies on the wire: its fields, in the order of Kafka's schema. What it
decodes to is the struct of `protocol.messages` or `group_messages` itself; their fields have Kafka's names.

    PARTITION = Layout(
        m.ListOffsetsPartition,
        Field("partition_index", INT32),
        Field("current_leader_epoch", INT32, "4+", default=-1),
        Field("timestamp", INT64),
    )

- `versions`: in which the field is there ("0+", "4+", "8-10"). In the others a decoded struct has `default`, or else
  the default of the class.
- `nullable`: the versions in which it may be null. Null is None; `on_null` is what it becomes where ours is never None.
- `tag`: a tagged field (KIP-482) of that number, in the versions that are flexible. It is written where it differs from
  `default`, which is needed.
- A field that our struct does not have: it is skipped when a message is decoded, and written as `default`, or as what
  `get` returns of the struct. (`get` may also override a field that our struct has.)
- What is nested is a Layout, or an `Array` of one or of a primitive. `Layout(None, ...)` is of something that is
  skipped.

Bounds of strings, bytes and arrays are those of our structs' annotations (`Meta(max_length=...)`): they are not
declared again. What is over one is an InvalidMessage.

A `KafkaApi` is a row of the table in `apis`: our API, the versions that are served, the first flexible one, the layouts
of request and response, and what the answer is when the request fails as a whole. Where the shape differs and not only
the names, request or response is a struct of its own, declared beside its layout, and `to_ours(wire, version)` or
`from_ours(ours, version)` makes the one of the other:

    KafkaApi(apis.HEARTBEAT, 0, 4, first_flexible=4, request=..., response=..., failed=lambda request, code, message:
        g.HeartbeatResponse(0, code))

`failed` returns our response struct (before `from_ours`), with the error wherever clients look for it in that API.

Compiled means: a list of small functions, one for each field, and one for each run of fields of fixed size. Rejected:
generated source for `exec` (faster by a half, and nobody can step through it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any, NamedTuple, Protocol

import msgspec

from minibroker.protocol.apis import Api
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.primitives import (
    LENGTH16,
    LENGTH32,
    MAX_ELEMENTS,
    MAX_STRING_BYTES,
    UUID_BYTES,
    FrameWriter,
    Reader,
    topic_id_of,
    uuid_of,
    write_unsigned_varint,
)
from minibroker.protocol.messages import Buffer, Message

Decode = Callable[[Reader], Any]
Encode = Callable[[bytearray, Any], None]
Failed = Callable[[Any, ErrorCode, str], Message]

NO_BOUND = 2**31 - 1

_PRESENCE = Struct(">b")
_NO_STRING = b"\xff\xff"


class Codec(NamedTuple):
    """A type, compiled for a version."""

    decode: Decode
    encode: Encode
    least_bytes: int
    """What the smallest value takes on the wire."""


class Bounds(NamedTuple):
    """Of a value, and of the elements of an array, as our struct's annotations have them."""

    max_length: int = NO_BOUND
    of_items: Bounds | None = None


class Type(Protocol):
    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds, /) -> Codec: ...


class Fixed:
    """A number or a bool."""

    def __init__(self, character: str) -> None:
        self.character = character
        self._struct = Struct(f">{character}")

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> Codec:
        layout = self._struct
        pack = layout.pack

        def decode(reader: Reader) -> Any:
            return reader.unpack(layout)[0]

        def encode(out: bytearray, value: Any) -> None:
            out += pack(value)

        return Codec(decode, encode, layout.size)


class _Uuid:
    """A topic id: empty is all zeroes."""

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> Codec:
        def decode(reader: Reader) -> str:
            return topic_id_of(reader.take(UUID_BYTES))

        def encode(out: bytearray, value: str) -> None:
            out += uuid_of(value)

        return Codec(decode, encode, UUID_BYTES)


class _String:
    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> Codec:
        max_length = min(bounds.max_length, MAX_STRING_BYTES)
        read_length = _read_length(flexible, LENGTH16, nullable)
        pack = LENGTH16.pack

        def decode(reader: Reader) -> str | None:
            length = read_length(reader)
            return None if length < 0 else reader.string(length, max_length)

        def encode_compact(out: bytearray, value: str | None) -> None:
            if value is None:
                out.append(0)
            else:
                data = value.encode()
                write_unsigned_varint(out, len(data) + 1)
                out += data

        def encode_plain(out: bytearray, value: str | None) -> None:
            if value is None:
                out += _NO_STRING
            else:
                data = value.encode()
                out += pack(len(data)) + data

        return Codec(decode, encode_compact if flexible else encode_plain, 1 if flexible else 2)


_REFERRED_BYTES = 16 * 1024
"""A piece of a frame that is smaller is copied faster than it is sent by itself."""


class _Bytes:
    """`copied`: it outlives the frame that it came in."""

    def __init__(self, copied: bool) -> None:
        self._copied = copied

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> Codec:
        max_length = bounds.max_length
        read_length = _read_length(flexible, LENGTH32, nullable)
        write_length = _write_length(flexible, LENGTH32)
        copied = self._copied

        def decode(reader: Reader) -> bytes | memoryview | None:
            length = read_length(reader)
            if length < 0:
                return None
            if length > max_length:
                raise reader.problem(f"{length} bytes; {max_length} are allowed")
            view = reader.view(length)
            return bytes(view) if copied else view

        def encode(out: bytearray, value: Buffer | None) -> None:
            if value is None:
                write_length(out, -1)
            else:
                write_length(out, len(value))
                if not copied and len(value) >= _REFERRED_BYTES and isinstance(out, FrameWriter):
                    out.refer(value)
                else:
                    out += value

        return Codec(decode, encode, 1 if flexible else 4)


class Array:
    def __init__(self, of: Type) -> None:
        self.of = of

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> Codec:
        item_decode, item_encode, least_bytes = self.of.compiled(version, flexible, False, bounds.of_items or Bounds())
        max_count = min(bounds.max_length, MAX_ELEMENTS)
        read_length = _read_length(flexible, LENGTH32, nullable)
        write_length = _write_length(flexible, LENGTH32)

        def decode(reader: Reader) -> list[Any] | None:
            count = read_length(reader)
            if count < 0:
                return None
            return [item_decode(reader) for _ in range(reader.count(count, least_bytes, max_count))]

        def encode(out: bytearray, value: Sequence[Any] | None) -> None:
            if value is None:
                write_length(out, -1)
                return
            write_length(out, len(value))
            for item in value:
                item_encode(out, item)

        return Codec(decode, encode, 1 if flexible else 4)


INT8 = Fixed("b")
INT16 = Fixed("h")
INT32 = Fixed("i")
INT64 = Fixed("q")
BOOL = Fixed("?")
UUID = _Uuid()
STRING = _String()
BYTES = _Bytes(copied=True)
RECORDS = _Bytes(copied=False)
"""Bytes that stay in the frame (see `messages`)."""

_NOT_GIVEN: Any = object()


class Versions(NamedTuple):
    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


NO_VERSIONS = Versions(1, 0)


def versions_of(text: str) -> Versions:
    """ "4+", "8-10", "3"; empty: none."""
    if not text:
        return NO_VERSIONS
    if text.endswith("+"):
        return Versions(int(text[:-1]), NO_BOUND)
    first, _, last = text.partition("-")
    return Versions(int(first), int(last or first))


class Field:
    """See the module's essay."""

    NOT_GIVEN = _NOT_GIVEN

    def __init__(
        self,
        name: str,
        type: Type,
        versions: str = "0+",
        *,
        nullable: str = "",
        tag: int | None = None,
        default: Any = _NOT_GIVEN,
        get: Callable[[Any], Any] | None = None,
        on_null: Any = None,
    ) -> None:
        self.name = name
        self.type = type
        self.versions = versions_of(versions)
        self.nullable = versions_of(nullable)
        self.tag = tag
        self.default = default
        self.get = get
        self.on_null = on_null


Step = Callable[[Reader, list[Any]], None]
"""Reads some of the fields, and appends their values."""


class Layout:
    """How a struct of ours lies on the wire (see the module's essay). Also the type of a nested struct."""

    def __init__(self, cls: type[msgspec.Struct] | None, *fields: Field) -> None:
        self.cls = cls
        self.fields = fields
        self._ours = {} if cls is None else {field.name: field for field in msgspec.structs.fields(cls)}
        self._bounds = _bounds_of_fields(cls)
        self._compiled: dict[tuple[int, bool], Codec] = {}

    def compiled(self, version: int, flexible: bool, nullable: bool = False, bounds: Bounds | None = None) -> Codec:
        key = (version, flexible)
        if key not in self._compiled:
            present = [field for field in self.fields if version in field.versions]
            plain = [field for field in present if field.tag is None]
            tagged = [field for field in present if field.tag is not None]
            parts = [self._of(field, version, flexible) for field in plain]
            tags = [self._of(field, version, flexible) for field in tagged]
            decode = self._decoder(list(zip(plain, parts, strict=True)), list(zip(tagged, tags, strict=True)), flexible)
            encode = self._encoder(list(zip(plain, parts, strict=True)), list(zip(tagged, tags, strict=True)), flexible)
            least_bytes = sum(codec.least_bytes for codec in parts) + flexible
            self._compiled[key] = Codec(decode, encode, least_bytes)
        codec = self._compiled[key]
        return _nullable_struct(codec) if nullable else codec

    def _of(self, field: Field, version: int, flexible: bool) -> Codec:
        bounds = self._bounds.get(field.name, Bounds())
        return field.type.compiled(version, flexible, version in field.nullable, bounds)

    # -- decoding --

    def _decoder(self, plain: list[tuple[Field, Codec]], tagged: list[tuple[Field, Codec]], flexible: bool) -> Decode:
        names: list[str] = []  # of the values, in the order in which the steps append them
        steps: list[Step] = []
        run = ""

        def end_run() -> None:
            nonlocal run
            if run:
                steps.append(_fixed_run(Struct(f">{run}")))
                run = ""

        for field, codec in plain:
            is_ours = field.name in self._ours
            if isinstance(field.type, Fixed):
                run += field.type.character if is_ours else f"{codec.least_bytes}x"
            else:
                end_run()
                steps.append(_value_step(codec.decode, field.on_null) if is_ours else _skip_step(codec.decode))
            if is_ours:
                names.append(field.name)
        end_run()
        if flexible:
            ours = [(field, codec) for field, codec in tagged if field.name in self._ours]
            names += [field.name for field, _ in ours]
            steps.append(_tagged_step(ours) if ours else _no_tags_step)
        cls = self.cls
        if cls is None:
            return _skipper(steps)
        declared = {field.name: field for field in self.fields}
        for name, ours_field in self._ours.items():
            if name not in names:
                steps.append(_default_step(cls, ours_field, declared.get(name)))
                names.append(name)
        return _struct_decoder(cls, steps, [names.index(name) for name in self._ours])

    # -- encoding --

    def _encoder(self, plain: list[tuple[Field, Codec]], tagged: list[tuple[Field, Codec]], flexible: bool) -> Encode:
        steps: list[Encode] = []
        characters = ""
        names: list[str] = []

        def end_run() -> None:
            nonlocal characters
            if characters:
                steps.append(_write_run(Struct(f">{characters}"), names.copy()))
                characters = ""
                names.clear()

        for field, codec in plain:
            if isinstance(field.type, Fixed) and field.get is None and field.name in self._ours:
                characters += field.type.character
                names.append(field.name)
                continue
            end_run()
            steps.append(self._write_step(field, codec))
        end_run()
        if flexible:
            steps.append(_write_tagged([(field, self._getter(field), codec) for field, codec in tagged]))

        def encode(out: bytearray, value: Any) -> None:
            for step in steps:
                step(out, value)

        return encode

    def _getter(self, field: Field) -> Callable[[Any], Any]:
        if field.get is not None:
            return field.get
        if field.name in self._ours:
            return attrgetter(field.name)
        default = field.default
        return lambda value: default

    def _write_step(self, field: Field, codec: Codec) -> Encode:
        encode = codec.encode
        if field.get is None and field.name not in self._ours:
            if field.default is _NOT_GIVEN:
                return _never_written(field.name)
            constant = bytearray()
            encode(constant, field.default)

            def write_constant(out: bytearray, value: Any) -> None:
                out += constant

            return write_constant
        get = self._getter(field)

        def write(out: bytearray, value: Any) -> None:
            encode(out, get(value))

        return write


class KafkaApi:
    """One row of the table: an API as Kafka's clients know it. See the module's essay."""

    def __init__(
        self,
        api: Api[Any, Any],
        min_version: int,
        max_version: int,
        *,
        first_flexible: int,
        request: Layout,
        response: Layout,
        failed: Failed,
        to_ours: Callable[[Any, int], Any] | None = None,
        from_ours: Callable[[Any, int], Any] | None = None,
        advertised_from: int | None = None,
    ) -> None:
        self.api = api
        self.key = api.key
        self.name = api.name
        self.min_version = min_version
        self.max_version = max_version
        self.advertised_from = min_version if advertised_from is None else advertised_from
        """The lowest version in ApiVersions. Where it is lower than `min_version`, those between are refused."""
        self.first_flexible = first_flexible
        self.failed = failed
        self.request = request
        self.response = response
        self._to_ours = to_ours
        self._from_ours = from_ours
        self._decoders: dict[int, Decode] = {}
        self._encoders: dict[int, Encode] = {}

    def __repr__(self) -> str:
        return f"KafkaApi({self.name})"

    def is_flexible(self, version: int) -> bool:
        return version >= self.first_flexible

    def read_request(self, reader: Reader, version: int) -> Any:
        """Our request struct. Raises InvalidMessage."""
        decode = self._decoders.get(version)
        if decode is None:
            decode = self._decoders[version] = self.request.compiled(version, self.is_flexible(version)).decode
        body = decode(reader)
        return body if self._to_ours is None else self._to_ours(body, version)

    def write_response(self, out: bytearray, body: Any, version: int) -> None:
        encode = self._encoders.get(version)
        if encode is None:
            encode = self._encoders[version] = self.response.compiled(version, self.is_flexible(version)).encode
        encode(out, body if self._from_ours is None else self._from_ours(body, version))


# -- lengths --


def _read_length(flexible: bool, fixed: Struct, nullable: bool) -> Callable[[Reader], int]:
    """-1 is null."""

    def compact(reader: Reader) -> int:
        length = reader.unsigned_varint() - 1
        if length < 0 and not nullable:
            raise reader.problem("null, where a value is needed")
        return length

    def plain(reader: Reader) -> int:
        length: int = reader.unpack(fixed)[0]
        if length < 0 and not (nullable and length == -1):
            raise reader.problem(f"a length of {length}")
        return length

    return compact if flexible else plain


def _write_length(flexible: bool, fixed: Struct) -> Callable[[bytearray, int], None]:
    pack = fixed.pack

    def compact(out: bytearray, length: int) -> None:
        write_unsigned_varint(out, length + 1)

    def plain(out: bytearray, length: int) -> None:
        out += pack(length)

    return compact if flexible else plain


def _nullable_struct(codec: Codec) -> Codec:
    """A byte before it says whether it is there."""

    def decode(reader: Reader) -> Any:
        return None if reader.unpack(_PRESENCE)[0] < 0 else codec.decode(reader)

    def encode(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0xFF)
        else:
            out.append(1)
            codec.encode(out, value)

    return Codec(decode, encode, 1)


# -- steps of decoding --


def _fixed_run(layout: Struct) -> Step:
    unpack_from, size = layout.unpack_from, layout.size

    def step(reader: Reader, values: list[Any]) -> None:
        position = reader.position
        if position + size > reader.end:
            raise reader.problem(f"{size} bytes are expected, {reader.end - position} are left")
        values += unpack_from(reader.data, position)
        reader.position = position + size

    return step


def _value_step(decode: Decode, on_null: Any) -> Step:
    if on_null is None:

        def step(reader: Reader, values: list[Any]) -> None:
            values.append(decode(reader))

        return step

    def step_without_null(reader: Reader, values: list[Any]) -> None:
        value = decode(reader)
        values.append(on_null if value is None else value)

    return step_without_null


def _skip_step(decode: Decode) -> Step:
    def step(reader: Reader, values: list[Any]) -> None:
        decode(reader)

    return step


def _no_tags_step(reader: Reader, values: list[Any]) -> None:
    reader.skip_tagged_fields()


def _tagged_step(fields: list[tuple[Field, Codec]]) -> Step:
    places = {field.tag: (index, field, codec) for index, (field, codec) in enumerate(fields)}
    defaults = [field.default for field, _ in fields]

    def step(reader: Reader, values: list[Any]) -> None:
        found = defaults.copy()
        for _ in range(reader.tag_count()):
            tag = reader.unsigned_varint()
            size = reader.unsigned_varint()
            place = places.get(tag)
            if place is None:
                reader.view(size)
                continue
            end = reader.position + size
            index, field, codec = place
            value = codec.decode(reader)
            if reader.position != end:
                raise reader.problem(f"tagged field {tag} has {size} bytes, and its value ends elsewhere")
            found[index] = field.on_null if value is None else value
        values += found

    return step


def _default_step(cls: type[msgspec.Struct], ours: msgspec.structs.FieldInfo, declared: Field | None) -> Step:
    """For a field that this version does not have."""
    if declared is not None and declared.default is not _NOT_GIVEN:
        value = declared.default
    elif ours.default is not msgspec.NODEFAULT:
        value = ours.default
    elif ours.default_factory is not msgspec.NODEFAULT:
        factory = ours.default_factory

        def make(reader: Reader, values: list[Any]) -> None:
            values.append(factory())

        return make
    else:
        name = f"{cls.__name__}.{ours.name}"

        def fail(reader: Reader, values: list[Any]) -> None:
            raise AssertionError(f"{name} is not in this version, and has no default")

        return fail
    if isinstance(value, list):
        assert not value, f"{cls.__name__}.{ours.name}: a default that is shared"
        return lambda reader, values: values.append([])
    return lambda reader, values: values.append(value)


def _struct_decoder(cls: type[msgspec.Struct], steps: list[Step], order: list[int]) -> Decode:
    def in_order(reader: Reader) -> Any:
        values: list[Any] = []
        for step in steps:
            step(reader, values)
        return cls(*values)

    if order == list(range(len(order))):
        return in_order
    pick = itemgetter(*order)

    def reordered(reader: Reader) -> Any:
        values: list[Any] = []
        for step in steps:
            step(reader, values)
        return cls(*pick(values))

    return reordered


def _skipper(steps: list[Step]) -> Decode:
    def skip(reader: Reader) -> None:
        for step in steps:
            step(reader, [])

    return skip


# -- steps of encoding --


def _write_run(layout: Struct, names: list[str]) -> Encode:
    pack, get = layout.pack, attrgetter(*names)
    if len(names) == 1:

        def write_one(out: bytearray, value: Any) -> None:
            out += pack(get(value))

        return write_one

    def write(out: bytearray, value: Any) -> None:
        out += pack(*get(value))

    return write


def _never_written(name: str) -> Encode:
    def write(out: bytearray, value: Any) -> None:
        raise AssertionError(f"{name} is only read: our struct does not have it, and there is no default")

    return write


def _write_tagged(fields: list[tuple[Field, Callable[[Any], Any], Codec]]) -> Encode:
    fields = sorted(fields, key=lambda entry: entry[0].tag or 0)
    assert all(field.default is not _NOT_GIVEN for field, _, _ in fields), "a tagged field needs a default"

    if not fields:
        return lambda out, value: out.append(0)

    def write(out: bytearray, value: Any) -> None:
        present: list[tuple[int, bytearray]] = []
        for field, get, codec in fields:
            item = get(value)
            if item != field.default:
                data = bytearray()
                codec.encode(data, item)
                assert field.tag is not None
                present.append((field.tag, data))
        write_unsigned_varint(out, len(present))
        for tag, data in present:
            write_unsigned_varint(out, tag)
            write_unsigned_varint(out, len(data))
            out += data

    return write


# -- bounds --


def _bounds_of_fields(cls: type[msgspec.Struct] | None) -> dict[str, Bounds]:
    if cls is None:
        return {}
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _bounds_of(field.type) for field in info.fields}


def _bounds_of(info: msgspec.inspect.Type) -> Bounds:
    if isinstance(info, msgspec.inspect.UnionType):
        [info] = [each for each in info.types if not isinstance(each, msgspec.inspect.NoneType)] or [info]
    if isinstance(info, msgspec.inspect.ListType):
        length = NO_BOUND if info.max_length is None else info.max_length
        return Bounds(length, _bounds_of(info.item_type))
    length_of_it = getattr(info, "max_length", None)
    return Bounds(NO_BOUND if length_of_it is None else length_of_it)

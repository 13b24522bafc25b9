"""How the messages of Kafka's protocol are declared: once for all versions, and compiled for each version in use.

The problem: an API has up to thirteen versions. Fields come and go between them, and from some version on lengths are
varints and structs end in tagged fields. A handwritten class for each version would be thousands of lines.

The choice: a `Schema` lists the fields of one of our structs as they lie on the wire, in the order of Kafka's schema.
Messages are decoded into the structs of `protocol.messages`, whose fields have Kafka's names.

    PARTITION = Schema(
        m.ListOffsetsPartition,
        Field("partition_index", INT32),
        Field("current_leader_epoch", INT32, "4+", default=-1),
        Field("timestamp", INT64),
    )

- `versions`: the versions that have the field ("0+", "4+", "8-10"). In the others a decoded struct has `default`, or
  the default of the class.
- `nullable`: the versions in which the field may be null. Null is decoded as None, or as `on_null` if our field is
  never None.
- `tag`: the number of a tagged field (KIP-482) in the flexible versions. A tagged field needs a `default`, and is
  written only if its value differs from it.
- `kafka_name`: the name in Kafka's schema, if ours is another.
- A field that our struct lacks is skipped when a message is decoded. It is written as `default`, or as the result of
  `get(struct)`. (`get` may also override a field that our struct has.)
- A nested struct is a Schema, an array of them `structs(...)`, an array of primitives an `Array`. `Schema(None, ...)`
  describes a struct that is skipped.

Strings, bytes and arrays have the bounds of our structs' annotations (`Meta(max_length=...)`), which are not repeated
here. A value over its bound raises InvalidMessage.

A `KafkaApi` is a row of the table in `apis`: our API, the versions served, the first flexible version, the schemas of
request and response, and the response to a request that fails as a whole. If Kafka's message has another shape than
ours, and not only other names, it is declared as a struct of its own beside its schema. `to_ours(wire, version)` or
`from_ours(ours, version)` then converts it:

    KafkaApi(apis.HEARTBEAT, 0, 4, first_flexible=4, request=..., response=..., failed=lambda request, code, message:
        g.HeartbeatResponse(0, code))

`failed` returns our response struct (before `from_ours`), with the error where clients of that API look for it.

A compiled version is a list of small functions, one for each field and one for each run of fields of fixed size.
Rejected: generated source for `exec`, which is twice as fast but cannot be read in a debugger.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from minibroker.protocol.apis import Api
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.primitives import MAX_ELEMENTS, MessageReader, write_unsigned_varint
from minibroker.protocol.kafka.types import NO_BOUND, STRING, Array, Bounds, CompiledType, Decode, Encode, Fixed, Type
from minibroker.protocol.messages import Message

Failed = Callable[[Any, ErrorCode, str], Message]

_PRESENCE = Struct(">b")
_NOT_GIVEN: Any = object()


class Versions(NamedTuple):
    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


NO_VERSIONS = Versions(1, 0)


def versions_of(text: str) -> Versions:
    """Parse "4+", "8-10" or "3"; an empty text means no version."""
    if not text:
        return NO_VERSIONS
    if text.endswith("+"):
        return Versions(int(text[:-1]), NO_BOUND)
    first, _, last = text.partition("-")
    return Versions(int(first), int(last or first))


class Field:
    """One field of a `Schema` (see the module)."""

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
        kafka_name: str = "",
    ) -> None:
        self.name = name
        self.kafka_name = kafka_name or name
        self.type = type
        self.versions = versions_of(versions)
        self.nullable = versions_of(nullable)
        self.tag = tag
        self.default = default
        self.get = get
        self.on_null = on_null


_CompiledField = tuple[Field, CompiledType]
Step = Callable[[MessageReader, list[Any]], None]
"""Reads some of the fields and appends their values."""


class Schema:
    """The fields of one of our structs as they lie on the wire (see the module). Also the type of a nested struct."""

    def __init__(self, cls: type[msgspec.Struct] | None, *fields: Field) -> None:
        self.cls = cls
        self.fields = fields
        self._ours = {} if cls is None else {field.name: field for field in msgspec.structs.fields(cls)}
        self._bounds = _bounds_of_fields(cls)
        self._compiled: dict[tuple[int, bool], CompiledType] = {}

    def compiled(
        self, version: int, flexible: bool, nullable: bool = False, bounds: Bounds | None = None
    ) -> CompiledType:
        key = (version, flexible)
        if key not in self._compiled:
            present = [field for field in self.fields if version in field.versions]
            plain = [self._of(field, version, flexible) for field in present if field.tag is None]
            tagged = [self._of(field, version, flexible) for field in present if field.tag is not None]
            self._compiled[key] = CompiledType(
                self._decoder(plain, tagged, flexible),
                self._encoder(plain, tagged, flexible),
                sum(compiled.least_bytes for _, compiled in plain) + flexible,
            )
        compiled = self._compiled[key]
        return _nullable_struct(compiled) if nullable else compiled

    def _of(self, field: Field, version: int, flexible: bool) -> _CompiledField:
        bounds = self._bounds.get(field.name, Bounds())
        return field, field.type.compiled(version, flexible, version in field.nullable, bounds)

    # -- decoding --

    def _decoder(self, plain: list[_CompiledField], tagged: list[_CompiledField], flexible: bool) -> Decode:
        names: list[str] = []  # in the order in which the steps append the values
        steps: list[Step] = []
        run = ""

        def end_run() -> None:
            nonlocal run
            if run:
                steps.append(_fixed_run(Struct(f">{run}")))
                run = ""

        for field, compiled in plain:
            is_ours = field.name in self._ours
            if isinstance(field.type, Fixed):
                run += field.type.character if is_ours else f"{compiled.least_bytes}x"
            else:
                end_run()
                steps.append(_value_step(compiled.decode, field.on_null) if is_ours else _skip_step(compiled.decode))
            if is_ours:
                names.append(field.name)
        end_run()
        if flexible:
            ours = [(field, compiled) for field, compiled in tagged if field.name in self._ours]
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

    def _encoder(self, plain: list[_CompiledField], tagged: list[_CompiledField], flexible: bool) -> Encode:
        steps: list[Encode] = []
        characters = ""
        names: list[str] = []

        def end_run() -> None:
            nonlocal characters
            if characters:
                steps.append(_write_run(Struct(f">{characters}"), names.copy()))
                characters = ""
                names.clear()

        for field, compiled in plain:
            if isinstance(field.type, Fixed) and field.get is None and field.name in self._ours:
                characters += field.type.character
                names.append(field.name)
                continue
            end_run()
            steps.append(self._write_step(field, compiled))
        end_run()
        if flexible:
            steps.append(_write_tagged([(field, self._getter(field), compiled) for field, compiled in tagged]))

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

    def _write_step(self, field: Field, compiled: CompiledType) -> Encode:
        encode = compiled.encode
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


def structs(cls: type[msgspec.Struct] | None, *fields: Field) -> Array:
    """An array of structs with these fields."""
    return Array(Schema(cls, *fields))


def error_message(versions: str) -> Field:
    """A message that is empty in our struct and null in Kafka's if there is none."""
    return Field(
        "error_message",
        STRING,
        versions,
        nullable=versions,
        get=lambda result: result.error_message or None,
        default="",
        on_null="",
    )


class KafkaApi:
    """An API as Kafka's clients know it (see the module)."""

    def __init__(
        self,
        api: Api[Any, Any],
        min_version: int,
        max_version: int,
        *,
        first_flexible: int,
        request: Schema,
        response: Schema,
        failed: Failed,
        to_ours: Callable[[Any, int], Any] | None = None,
        from_ours: Callable[[Any, int], Any] | None = None,
        advertised_from: int | None = None,
        max_elements: int = MAX_ELEMENTS,
    ) -> None:
        self.api = api
        self.key = api.key
        self.name = api.name
        self.min_version = min_version
        self.max_version = max_version
        self.advertised_from = min_version if advertised_from is None else advertised_from
        """The lowest version in ApiVersions. Requests below `min_version` are rejected even if they are advertised."""
        self.first_flexible = first_flexible
        self.max_elements = max_elements
        """Elements of all arrays of a request together."""
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

    def read_request(self, reader: MessageReader, version: int) -> Any:
        """Return our request struct. Raises InvalidMessage."""
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


def _nullable_struct(compiled: CompiledType) -> CompiledType:
    """A struct behind a byte: 1 if the struct follows, -1 if it is null."""

    def decode(reader: MessageReader) -> Any:
        return None if reader.unpack(_PRESENCE)[0] < 0 else compiled.decode(reader)

    def encode(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0xFF)
        else:
            out.append(1)
            compiled.encode(out, value)

    return CompiledType(decode, encode, 1)


# -- steps of decoding --


def _fixed_run(layout: Struct) -> Step:
    unpack_from, size = layout.unpack_from, layout.size

    def step(reader: MessageReader, values: list[Any]) -> None:
        position = reader.position
        if position + size > reader.end:
            raise reader.problem(f"{size} bytes are expected, {reader.end - position} are left")
        values += unpack_from(reader.data, position)
        reader.position = position + size

    return step


def _value_step(decode: Decode, on_null: Any) -> Step:
    if on_null is None:

        def step(reader: MessageReader, values: list[Any]) -> None:
            values.append(decode(reader))

        return step

    def step_without_null(reader: MessageReader, values: list[Any]) -> None:
        value = decode(reader)
        values.append(on_null if value is None else value)

    return step_without_null


def _skip_step(decode: Decode) -> Step:
    def step(reader: MessageReader, values: list[Any]) -> None:
        decode(reader)

    return step


def _no_tags_step(reader: MessageReader, values: list[Any]) -> None:
    reader.skip_tagged_fields()


def _tagged_step(fields: list[_CompiledField]) -> Step:
    places = {field.tag: (index, field, compiled) for index, (field, compiled) in enumerate(fields)}
    defaults = [field.default for field, _ in fields]

    def step(reader: MessageReader, values: list[Any]) -> None:
        found = defaults.copy()
        for _ in range(reader.tag_count()):
            tag = reader.unsigned_varint()
            size = reader.unsigned_varint()
            place = places.get(tag)
            if place is None:
                reader.view(size)
                continue
            end = reader.position + size
            index, field, compiled = place
            value = compiled.decode(reader)
            if reader.position != end:
                raise reader.problem(f"tagged field {tag} has {size} bytes, but its value ends elsewhere")
            found[index] = field.on_null if value is None else value
        values += found

    return step


def _default_step(cls: type[msgspec.Struct], ours: msgspec.structs.FieldInfo, declared: Field | None) -> Step:
    """Append the default of a field that this version does not have."""
    if declared is not None and declared.default is not _NOT_GIVEN:
        value = declared.default
    elif ours.default is not msgspec.NODEFAULT:
        value = ours.default
    elif ours.default_factory is not msgspec.NODEFAULT:
        factory = ours.default_factory

        def make(reader: MessageReader, values: list[Any]) -> None:
            values.append(factory())

        return make
    else:
        name = f"{cls.__name__}.{ours.name}"

        def fail(reader: MessageReader, values: list[Any]) -> None:
            raise AssertionError(f"{name} is not in this version and has no default")

        return fail
    if isinstance(value, list):
        assert not value, f"{cls.__name__}.{ours.name}: a default that is shared"
        return lambda reader, values: values.append([])
    return lambda reader, values: values.append(value)


def _struct_decoder(cls: type[msgspec.Struct], steps: list[Step], order: list[int]) -> Decode:
    def in_order(reader: MessageReader) -> Any:
        values: list[Any] = []
        for step in steps:
            step(reader, values)
        return cls(*values)

    if order == list(range(len(order))):
        return in_order
    pick = itemgetter(*order)

    def reordered(reader: MessageReader) -> Any:
        values: list[Any] = []
        for step in steps:
            step(reader, values)
        return cls(*pick(values))

    return reordered


def _skipper(steps: list[Step]) -> Decode:
    def skip(reader: MessageReader) -> None:
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
        raise AssertionError(f"{name} cannot be written: our struct does not have it, and it has no default")

    return write


def _write_tagged(fields: list[tuple[Field, Callable[[Any], Any], CompiledType]]) -> Encode:
    fields = sorted(fields, key=lambda entry: entry[0].tag or 0)
    assert all(field.default is not _NOT_GIVEN for field, _, _ in fields), "a tagged field needs a default"

    if not fields:
        return lambda out, value: out.append(0)

    def write(out: bytearray, value: Any) -> None:
        present: list[tuple[int, bytearray]] = []
        for field, get, compiled in fields:
            item = get(value)
            if item != field.default:
                data = bytearray()
                compiled.encode(data, item)
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

"""An independent source for tests of Kafka's protocol: the classes and JSON schemas of kafka-python."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from minibroker.protocol.kafka.schema import Field, Schema
from minibroker.protocol.kafka.types import BOOL, BYTES, FLOAT64, RECORDS, STRING, UUID, Array, Fixed, Type
from minibroker.protocol.topic_ids import make

with warnings.catch_warnings():  # it reads its schemas in a way that Python 3.11 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.protocol.api_message import ApiMessage


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


THEIRS: dict[tuple[int, str], Any] = {(each.API_KEY, each.type): each for each in _subclasses(ApiMessage)}
"""kafka-python's class for an API key and "request" or "response"."""

RENAMED = dict.fromkeys(("topic_authorized_operations", "cluster_authorized_operations"), "authorized_operations")
"""Fields that kafka-python has renamed in its copies of Kafka's schemas."""

SINCE_RENAMED = {"generation_id_or_member_epoch": "generation_id"}
"""Fields that Kafka has renamed since, because newer versions use them in another way."""

_NAMES = {"b": "int8", "h": "int16", "i": "int32", "q": "int64", "d": "float64", "?": "bool"}


def in_words(schema: Schema, version: int) -> list[tuple[Any, ...]]:
    """Return the fields of a version, each as name, type, nested fields, nullability, and tag."""
    return [
        (
            RENAMED.get(field.kafka_name, field.kafka_name),
            *_type_in_words(field.type, version),
            version in field.nullable,
            field.tag,
        )
        for field in schema.fields
        if version in field.versions
    ]


def _type_in_words(type: Type, version: int) -> tuple[str, Any]:
    if isinstance(type, Fixed):
        return _NAMES[type.character], None
    if isinstance(type, Array):
        name, nested = _type_in_words(type.of, version)
        return f"[]{name}", nested
    if isinstance(type, Schema):
        return "struct", in_words(type, version)
    return {id(STRING): "string", id(UUID): "uuid"}.get(id(type), "bytes"), None


def without_tags_beside(theirs: list[tuple[Any, ...]], ours: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return their words without the tagged fields that ours lack: tagged fields are optional."""
    nested_of_ours = {name: nested for name, _, nested, *_ in ours}
    return [
        (name, type, nested and without_tags_beside(nested, nested_of_ours.get(name) or []), nullable, tag)
        for name, type, nested, nullable, tag in theirs
        if tag is None or name in nested_of_ours
    ]


def oldest_of(theirs: Any) -> int:
    """Return the oldest version that Kafka 4 still supports, or 0."""
    return int(theirs._json["validVersions"].partition("-")[0])


def theirs_in_words(fields: list[dict[str, Any]], version: int) -> list[tuple[Any, ...]]:
    """Like `in_words`, for one of Kafka's JSON schemas."""
    words = []
    for field in fields:
        if not _is_in(field["versions"], version):
            continue
        name, array = field["type"].removeprefix("[]"), field["type"].startswith("[]")
        nested = theirs_in_words(field["fields"], version) if "fields" in field else None
        name = "struct" if nested is not None else {"records": "bytes", "bitfield": "int32"}.get(name, name)
        words.append(
            (
                SINCE_RENAMED.get(_snake_case(field["name"]), _snake_case(field["name"])),
                f"[]{name}" if array else name,
                nested,
                _is_in(field.get("nullableVersions", "none"), version),
                field["tag"] if _is_in(field.get("taggedVersions", "none"), version) else None,
            )
        )
    return words


def _is_in(versions: str, version: int) -> bool:
    if versions == "none":
        return False
    first, _, last = versions.partition("-")
    if first.endswith("+"):
        return version >= int(first[:-1])
    return int(first) <= version <= int(last or first)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


TEXTS = ("", "orders", "zażółć", "a" * 200)


def random_struct(random: Random, schema: Schema, version: int, texts: Sequence[str] = TEXTS) -> Any:
    """Return a struct of ours with random values in the fields of the version and decoding's defaults in the others."""
    cls = schema.cls
    assert cls is not None
    values = {}
    for field in schema.fields:
        if field.name in cls.__struct_fields__:
            if version in field.versions and field.get is None:
                values[field.name] = _random_value(random, field, version, texts)
            elif version not in field.versions and field.default is not Field.NOT_GIVEN:
                values[field.name] = field.default
    return cls(**values)


def _random_value(random: Random, field: Field, version: int, texts: Sequence[str]) -> Any:
    if version in field.nullable and random.random() < 0.2:
        return field.on_null
    return _random_of(random, field.type, version, texts)


def _random_of(random: Random, type: Type, version: int, texts: Sequence[str]) -> Any:
    if isinstance(type, Array):
        sizes = (0, 1, 2) if isinstance(type.of, Schema) else (0, 1, 150)
        return [_random_of(random, type.of, version, texts) for _ in range(random.choice(sizes))]
    if isinstance(type, Schema):
        return random_struct(random, type, version, texts)
    if isinstance(type, Fixed):
        if type is BOOL:
            return random.random() < 0.5
        if type is FLOAT64:
            return random.choice((-1.5, 0.0, 1e300))
        bits = {"b": 7, "h": 15, "i": 31, "q": 63}[type.character]
        return random.choice((-1, 0, 1, -(2**bits), 2**bits - 1))
    if type is UUID:
        return random.choice(("", make(random.randrange(100), 7, random.randbytes(6))))
    if type is STRING:
        return random.choice(texts)
    data = random.choice((b"", random.randbytes(3), random.randbytes(300)))
    assert type in (BYTES, RECORDS)
    return memoryview(data) if type is RECORDS else data


def smallest_struct(schema: Schema, version: int) -> Any:
    """Return the struct of ours with the smallest encoding."""
    assert schema.cls is not None
    values = {}
    for field in schema.fields:
        if field.name in schema.cls.__struct_fields__:
            if version in field.versions:
                values[field.name] = smallest_of(field.type, version)
            elif field.default is not Field.NOT_GIVEN:
                values[field.name] = field.default
    return schema.cls(**values)


def smallest_of(type: Type, version: int) -> Any:
    if isinstance(type, Schema):
        return smallest_struct(type, version)
    if isinstance(type, Array):
        return []
    if isinstance(type, Fixed):
        return 0
    return "" if type in (STRING, UUID) else b""

"""Serializers and deserializers: the choices for `key_serializer` and `value_serializer` of a producer, and their
counterparts of a consumer.

A choice is a name or a function: `"bytes"` (unchanged), `"str"` (UTF-8), `"json"`, `"msgpack"`, or a callable. A
missing key or value (a tombstone) is None on both sides, and no function is called for it. So JSON's null can only be
inside a value.

Failures are raised as SerializationFailed, which names the topic and the type of the value, or DeserializationFailed,
which names partition and offset of the record. The original error is the cause.

JSON is msgspec's, which also accepts dataclasses, datetimes, UUIDs and the like. Bytes, NaN and infinity are rejected
at any depth, since msgspec would write them as base64 text and as null, and they would not be read back unchanged.
MessagePack is the `msgpack` package's: tuples are read back as lists, keys of maps may have any type that a dict
accepts, timestamps are datetimes in UTC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgpack
import msgspec

from minibroker.client.errors import DeserializationFailed, InvalidSetting, SerializationFailed

Name = Literal["bytes", "str", "json", "msgpack"]
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]
SerializerChoice = Name | Serializer
DeserializerChoice = Name | Deserializer


def _bytes(value: object) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError("it must be bytes, bytearray or memoryview")


def _from_bytes(data: bytes) -> bytes:
    return data


def _str(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise TypeError("it must be str")


def _from_str(data: bytes) -> str:
    return data.decode()


_BYTES_LIKE = (bytes, bytearray, memoryview)


def _json(value: object) -> bytes:
    data = msgspec.json.encode(value)  # first: it rejects values that contain themselves
    left = [value]
    while left:
        each = left.pop()
        kind = type(each)
        if kind is str or kind is int:
            continue
        if isinstance(each, dict):
            left += [key for key in each if type(key) is not str]
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        elif isinstance(each, float):
            if not math.isfinite(each):
                raise ValueError(f"JSON has no {each}: send None in its place, or use msgpack")
        elif isinstance(each, _BYTES_LIKE):
            rule = "JSON has no bytes: decode them to str, or use msgpack, or bytes for values that are JSON already"
            raise TypeError(rule)
        else:  # such as a dataclass
            plain = msgspec.to_builtins(each, builtin_types=_BYTES_LIKE)
            if type(plain) is not kind:
                left.append(plain)
    return data


def _msgpack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, datetime=True)
    return packed


def _from_msgpack(data: bytes) -> object:
    # timestamp=3 reads timestamps as datetimes, which is how they were packed.
    return msgpack.unpackb(data, timestamp=3, strict_map_key=False)


SERIALIZERS: Mapping[str, Serializer] = {
    "bytes": _bytes,
    "str": _str,
    "json": _json,
    "msgpack": _msgpack,
}
DESERIALIZERS: Mapping[str, Deserializer] = {
    "bytes": _from_bytes,
    "str": _from_str,
    "json": msgspec.json.decode,
    "msgpack": _from_msgpack,
}


def choose_serializer(setting: str, choice: SerializerChoice) -> Serializer | None:
    """Return the function that a setting names; None for "bytes", which needs none. Raises InvalidSetting."""
    return _chosen(setting, choice, SERIALIZERS)


def choose_deserializer(setting: str, choice: DeserializerChoice) -> Deserializer | None:
    """Return the function that a setting names; None for "bytes", which needs none. Raises InvalidSetting."""
    return _chosen(setting, choice, DESERIALIZERS)


def _chosen(
    setting: str, choice: str | Callable[[Any], Any], named: Mapping[str, Callable[[Any], Any]]
) -> Callable[[Any], Any] | None:
    if isinstance(choice, str) and choice in named:
        return None if choice == "bytes" else named[choice]
    if isinstance(choice, str) or not callable(choice):
        names = ", ".join(f'"{name}"' for name in named)
        raise InvalidSetting(setting, choice, f"give one of {names}, or a function")
    return choice


def serialize(serializer: Serializer, value: object, topic: str, what: str) -> bytes | None:
    """Return `value` as bytes; None stays None. `what` is "key" or "value", perhaps with an index. Raises
    SerializationFailed."""
    if value is None:
        return None
    try:
        data = serializer(value)
    except Exception as error:
        raise SerializationFailed(topic, what, type(value), str(error) or repr(error)) from error
    if type(data) is not bytes:
        raise SerializationFailed(topic, what, type(value), f"the serializer returned {type(data).__name__}, not bytes")
    return data


def deserialize(
    deserializer: Deserializer, data: bytes | None, topic: str, partition: int, offset: int, what: str
) -> Any:
    """Return the value of `data`; None stays None. `what` is "key" or "value". Raises DeserializationFailed."""
    if data is None:
        return None
    try:
        return deserializer(data)
    except Exception as error:
        raise DeserializationFailed(topic, partition, offset, what, str(error) or repr(error), data) from error

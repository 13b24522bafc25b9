"""Users' values in messages: bounded in length, and without the contents of records.

A value that is passed by mistake as a setting may be a record with personal data, or a megabyte long, and error
messages end up in logs. Short values look as in `repr`. Rejected: `reprlib`, which cuts lists after six elements, even
short ones, and bounds each element instead of the whole.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")

LIMIT = 100
"""The approximate number of characters that a value may take."""
_LEAST = 10
"""No element is begun with less room than this. Each level of nesting takes some room, so that a value that contains
itself ends."""
_BITS = 256
"""An integer with more bits is not written out; Python refuses to do that for long ones."""

_fields: dict[type, tuple[str, ...]] = {}
_LISTS = (list, set, frozenset, deque, KeysView, ValuesView, ItemsView)


def shows_only(*fields: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose other fields are private data, and must not appear in messages."""

    def decorate(kind: type[T]) -> type[T]:
        _fields[kind] = fields
        return kind

    return decorate


def undecodable(path: Path) -> str | None:
    """Return a printable form of a path that is not UTF-8; None if it is UTF-8."""
    encoded = os.fsencode(path.absolute())
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return encoded.decode("utf-8", "backslashreplace")
    return None


def shown(value: object, limit: int = LIMIT) -> str:
    """Return the value as text for a message."""
    kind = type(value)
    if limit <= 0:
        return "..."
    names = next((_fields[base] for base in kind.__mro__ if base in _fields), None)
    if names is None and isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
    if names:
        return f"{kind.__name__}({_named(value, names, limit)})"
    if isinstance(value, (str, bytes, bytearray)) and len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{repr(value[:limit])[:limit]}... ({len(value)} {unit})"
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, tuple):
        inner = _joined((("", each) for each in value), len(value), limit)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, (dict, MappingProxyType)):
        pairs = ((f"{shown(key, limit)}: ", each) for key, each in value.items())
        return _wrapped(kind, dict, f"{{{_joined(pairs, len(value), limit)}}}")
    if isinstance(value, _LISTS) and (value or isinstance(value, list)):
        inner = _joined((("", each) for each in value), len(value), limit)
        if isinstance(value, set):
            return _wrapped(kind, set, f"{{{inner}}}")
        return _wrapped(kind, list, f"{{{inner}}}" if isinstance(value, frozenset) else f"[{inner}]")
    return _cut(repr(value), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _named(value: object, names: tuple[str, ...], limit: int) -> str:
    """Return all of these fields, each shortened if necessary: the last one may be the number of a partition."""
    texts = [shown(getattr(value, name), limit - len("()")) for name in names]
    if sum(map(len, texts)) > limit:
        texts = [_cut(text, limit // len(texts)) for text in texts]
    return ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))


def _joined(elements: Iterable[tuple[str, object]], count: int, limit: int) -> str:
    """Join as many of the elements, each with its prefix, as fit."""
    parts: list[str] = []
    left = limit
    for before, each in elements:
        if left < _LEAST:
            break
        parts.append(f"{before}{shown(each, left - len(before) - len('[]'))}")
        left -= len(parts[-1]) + len(", ")
    more = [f"... {count - len(parts)} more"] if len(parts) < count else []
    return ", ".join(parts + more)


def _wrapped(kind: type, plain: type, text: str) -> str:
    return text if kind is plain else f"{kind.__name__}({text})"

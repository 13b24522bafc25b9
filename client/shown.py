"""How a user's value is shown in a message: bounded, and of a record no more than where it is.

What is passed where a setting is expected may be a record, with all that it says about somebody, or a megabyte of one;
messages of errors end up in logs. Short values read as `repr` has them. Rejected: `reprlib`, which cuts lists after six
elements, however short, and bounds each element instead of the whole.
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
"""About so many characters a value may take."""
_LEAST = 10
"""With less room than that no element is begun. (Each level of nesting takes some, so what contains itself ends.)"""
_BITS = 256
"""An integer with more of them is not written out: Python refuses that for long ones."""

_fields: dict[type, tuple[str, ...]] = {}
_LISTS = (list, set, frozenset, deque, KeysView, ValuesView, ItemsView)


def shows_only(*fields: str) -> Callable[[type[T]], type[T]]:
    """A decorator for a class of which the other fields are nobody's business."""

    def decorate(kind: type[T]) -> type[T]:
        _fields[kind] = fields
        return kind

    return decorate


def undecodable(path: Path) -> str | None:
    """How a path that is not UTF-8 is shown, as files of text cannot name it. None: it is UTF-8."""
    encoded = os.fsencode(path.absolute())
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return encoded.decode("utf-8", "backslashreplace")
    return None


def shown(value: object, limit: int = LIMIT) -> str:
    """`value` for a message."""
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
    """All of these fields, the last one, too: of a partition that is its number."""
    texts = [shown(getattr(value, name), limit - len("()")) for name in names]
    if sum(map(len, texts)) > limit:
        texts = [_cut(text, limit // len(texts)) for text in texts]
    return ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))


def _joined(elements: Iterable[tuple[str, object]], count: int, limit: int) -> str:
    """As many of the elements, with what comes before each, as there is room for."""
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

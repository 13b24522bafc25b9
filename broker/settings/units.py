"""The units of settings, and the numbers that values such as `1d` stand for.

The unit of a setting is in its name, as in Kafka, and its value is a bare number. A value with a unit is refused, since
Kafka's tools could not read it. The error has the number to write.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

_SECOND, _MINUTE, _HOUR = 1_000, 60_000, 3_600_000
_UNITS = {
    "ms": ("milliseconds", 1),
    "seconds": ("seconds", _SECOND),
    "minutes": ("minutes", _MINUTE),
    "hours": ("hours", _HOUR),
}
_TIMES = {
    "ms": 1,
    "millisecond": 1,
    "s": _SECOND,
    "sec": _SECOND,
    "second": _SECOND,
    "m": _MINUTE,
    "min": _MINUTE,
    "minute": _MINUTE,
    "h": _HOUR,
    "hour": _HOUR,
    "d": 24 * _HOUR,
    "day": 24 * _HOUR,
    "w": 7 * 24 * _HOUR,
    "week": 7 * 24 * _HOUR,
}
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_OF_BYTES = (".buffer.size", ".throttled.rate")
"""The ends of names of settings in bytes that do not say so."""
_WITH_UNIT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,12})")
_SIZE = re.compile("([kmgt]?)(i?)(?:b|byte|bytes)?")


def unit_of(name: str) -> str | None:
    """Return the unit of a setting in words; None: it has none."""
    last = name.rpartition(".")[2]
    if last == "bytes" or name.endswith(_OF_BYTES):
        return "bytes"
    return _UNITS[last][0] if last in _UNITS else None


def converted(name: str, value: str) -> Iterator[tuple[str, int]]:
    """Yield a value with a unit, and the number that it stands for in the unit of the setting. Two pairs if the unit
    has two meanings: `1GB` is 1000000000, and `1GiB` is 1073741824. Nothing for any other value."""
    found = _WITH_UNIT.fullmatch(value.strip())
    if found is None or unit_of(name) is None:
        return
    amount, unit = Fraction(found[1]), found[2].lower()
    if unit_of(name) == "bytes":
        size = _SIZE.fullmatch(unit)
        if size is None:
            return
        prefix, power = size[1], _PREFIXES[size[1]]
        meanings = {f"{prefix.upper()}iB": 1_024**power} if prefix else {}
        if not size[2]:
            meanings = {f"{prefix.upper()}B": 1_000**power} | meanings
    else:
        milliseconds = _TIMES.get(unit) or _TIMES.get(unit.removesuffix("s"))
        if milliseconds is None:
            return
        meanings = {found[2]: milliseconds}
        amount /= _UNITS[name.rpartition(".")[2]][1]
    for shown, factor in meanings.items():
        number = amount * factor
        if number.denominator == 1:
            yield f"{found[1]}{shown}", int(number)

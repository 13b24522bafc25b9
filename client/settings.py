"""Checks of what users pass to constructors: each error names the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minibroker.client.errors import InvalidSetting

MAX_MS = 2**31 - 1


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[Address, ...]:
    """`"host:port,host:port"` or a list of `"host:port"`; IPv6 in brackets. Raises InvalidSetting."""
    rule = 'give brokers as "host:port", several separated by commas or as a list'
    if isinstance(bootstrap, str):
        entries = bootstrap.split(",")
    elif isinstance(bootstrap, Sequence) and all(isinstance(entry, str) for entry in bootstrap):
        entries = [entry for text in bootstrap for entry in text.split(",")]
    else:
        raise InvalidSetting("bootstrap", bootstrap, rule)
    addresses = []
    for entry in (entry.strip() for entry in entries):
        host, separator, port = entry.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidSetting("bootstrap", entry, "put an IPv6 address in brackets, as in [::1]:9092")
        if not separator or not host:
            raise InvalidSetting("bootstrap", entry, rule)
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            raise InvalidSetting("bootstrap", entry, "the port must be a number from 1 to 65535")
        addresses.append(Address(host, int(port)))
    if not addresses:
        raise InvalidSetting("bootstrap", bootstrap, rule)
    return tuple(dict.fromkeys(addresses))


def check_integer(name: str, value: int, lowest: int, highest: int) -> int:
    """The value, if it is an int within both bounds. Raises InvalidSetting."""
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidSetting(name, value, f"give a whole number from {lowest} to {highest}")
    return value


def check_ms(name: str, value: float, lowest: int = 0) -> float:
    """The milliseconds as seconds. Fractions are allowed. Raises InvalidSetting."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= MAX_MS:
        raise InvalidSetting(name, value, f"give milliseconds, a number from {lowest} to {MAX_MS}")
    return value / 1_000


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """The value, if it is one of the choices. Raises InvalidSetting naming them."""
    if value not in choices:
        raise InvalidSetting(name, value, f"use one of {', '.join(repr(choice) for choice in choices)}")
    return value

"""The principal of a client's certificate (Kafka's DefaultKafkaPrincipalBuilder and SslPrincipalMapper, KIP-371).

Pure. A distinguished name is written as Java's X500Principal.getName does, by RFC 2253: the last part of the
certificate first, `CN=alice,OU=Orders,O=Shop,C=DE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.principal import ANONYMOUS, USER, Principal

_SHORT = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}
"""The keywords of RFC 2253 for OpenSSL's names. Java writes other attributes by their number and in hexadecimal."""
_EMAIL = "1.2.840.113549.1.9.1"
_SPECIAL = re.compile(r'([,+"\\<>;])')

_RULE = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)|DEFAULT")


class _Rule(NamedTuple):
    pattern: re.Pattern[str] | None
    """None: every name stays as it is."""
    replacement: str
    case: str


class PrincipalRules:
    """The rules of `ssl.principal.mapping.rules`."""

    def __init__(self, text: str) -> None:
        """Raises InvalidConfig."""
        self._rules: list[_Rule] = []
        position, text = 0, text.strip()
        while position < len(text):
            matched = _RULE.match(text, position)
            if matched is None:
                raise InvalidConfig(
                    f"ssl.principal.mapping.rules: {text[position:][:80]!r} is neither DEFAULT nor "
                    f"RULE:PATTERN/REPLACEMENT/ with L, U or nothing behind it"
                )
            self._rules.append(_rule(matched))
            position = matched.end()
            separator = re.compile(r"\s*(,\s*|$)").match(text, position)
            if separator is None:
                raise InvalidConfig(f"ssl.principal.mapping.rules: a comma is missing before {text[position:][:80]!r}")
            position = separator.end()

    def principal(self, certificate: Mapping[str, Any] | None) -> Principal | None:
        """Return the principal of a connection with this certificate, as Python's ssl returns it; None if no rule
        matches its name. Without a certificate: ANONYMOUS."""
        if not certificate:
            return ANONYMOUS
        name = distinguished_name(certificate.get("subject", ()))
        for pattern, replacement, case in self._rules:
            if pattern is None:
                return Principal(USER, name)
            matched = pattern.fullmatch(name)
            if matched is not None:
                mapped = matched.expand(replacement)
                mapped = mapped.lower() if case == "L" else mapped.upper() if case == "U" else mapped
                return Principal(USER, mapped)
        return None


def _rule(matched: re.Match[str]) -> _Rule:
    if matched[1] is None:
        return _Rule(None, "", "")
    try:
        pattern = re.compile(matched[1])
        # Java refers to groups by $1, Python by \g<1>.
        replacement = re.sub(r"\$(\d)", r"\\g<\1>", matched[2])
        if max(map(int, re.findall(r"\\g<(\d)>", replacement)), default=0) > pattern.groups:
            raise re.error(f"there is no group {replacement}")
    except re.error as error:
        raise InvalidConfig(
            f"ssl.principal.mapping.rules: the rule {matched[0]!r} is no regular expression: {error}"
        ) from error
    return _Rule(pattern, replacement, matched[3])


def distinguished_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    """Return the name of a certificate's subject by RFC 2253."""
    return ",".join("+".join(_attribute(*each) for each in part) for part in reversed(subject))


def _attribute(name: str, value: str) -> str:
    if name == "emailAddress" and value.isascii() and len(value) < 128:
        return f"{_EMAIL}=#16{len(value):02x}{value.encode().hex()}"
    text = _SPECIAL.sub(r"\\\1", value)
    if text.startswith((" ", "#")):
        text = f"\\{text}"
    if text.endswith(" "):
        text = f"{text[:-1]}\\ "
    return f"{_SHORT.get(name, name)}={text}"

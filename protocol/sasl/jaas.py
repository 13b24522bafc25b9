"""Kafka's `sasl.jaas.config`: a login module of Java with its options, of which clients and brokers here use a part.

    org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="secret";

The text has passwords, so errors name the rule and never the text.
"""

import re
from typing import NamedTuple

PLAIN_MODULE = "PlainLoginModule"
SCRAM_MODULE = "ScramLoginModule"
OAUTHBEARER_MODULE = "OAuthBearerLoginModule"

FLAGS = ("required", "requisite", "sufficient", "optional")

_TOKEN = re.compile(
    r"""\s* (?: "(?P<double> (?: [^"\\] | \\. )* )" | '(?P<single> (?: [^'\\] | \\. )* )'
             | (?P<word> [^\s"'=;]+ ) | (?P<mark> [=;] ) )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r"}


class JaasError(ValueError):
    """The text is not a login module with options. The message has no part of the text."""


class LoginModule(NamedTuple):
    name: str
    """The class without its package, as in PLAIN_MODULE."""
    options: dict[str, str]

    def __repr__(self) -> str:
        return f"LoginModule({self.name!r}, {{...}})"


def parse_jaas(text: str) -> LoginModule:
    """Return the one login module of the text. Raises JaasError."""
    rule = 'it is MODULE required NAME="VALUE" ... ;'
    tokens = _tokens(text)
    if len(tokens) < 3 or tokens[0][0] != "word" or tokens[1][0] != "word" or tokens[1][1].lower() not in FLAGS:
        raise JaasError(rule)
    if tokens[-1] != ("mark", ";"):
        raise JaasError(f"{rule}, with a semicolon at the end")
    options: dict[str, str] = {}
    rest = tokens[2:-1]
    for index in range(0, len(rest), 3):
        parts = rest[index : index + 3]
        if len(parts) != 3 or parts[0][0] != "word" or parts[1] != ("mark", "=") or parts[2][0] == "mark":
            raise JaasError(f'{rule}: after the word {FLAGS[0]}, option {index // 3 + 1} is not NAME="VALUE"')
        name = parts[0][1]
        if name in options:
            raise JaasError(f"option {index // 3 + 1} has the name of an earlier one: give each once")
        options[name] = parts[2][1]
    return LoginModule(tokens[0][1].rpartition(".")[2], options)


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        token = _TOKEN.match(text, position)
        if token is None:
            raise JaasError("a quotation mark has no counterpart")
        kind = token.lastgroup or ""
        value = token[kind]
        if kind in ("double", "single"):
            kind, value = "text", _ESCAPED.sub(lambda escaped: _CONTROL.get(escaped[1], escaped[1]), value)
        found.append((kind, value))
        position = token.end()
    return found

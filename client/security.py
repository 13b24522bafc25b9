"""How clients protect their connections: the arguments that all of them share.

They are typed once (Unpack), unlike the other settings, which each constructor lists: there are eight constructors, and
many of these arguments. The names are those of aiokafka and kafka-python.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from minibroker.client.errors import InvalidSetting
from minibroker.client.settings import check_text
from minibroker.protocol.connections.tls import Identity, UnusableCredentials, load_authorities, load_identity
from minibroker.protocol.sasl.jaas import (
    OAUTHBEARER_MODULE,
    PLAIN_MODULE,
    SCRAM_MODULE,
    JaasError,
    LoginModule,
    parse_jaas,
)

SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

TokenProvider = Callable[[], str | Awaitable[str]]
"""Returns the token of a new connection, or of one that authenticates again. A function that is no coroutine runs in a
thread."""


class Security(TypedDict, total=False):
    """Arguments of every client."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    """"SSL" and "SASL_SSL": connections are encrypted, and brokers prove who they are. "SASL_SSL" and "SASL_PLAINTEXT":
    the client authenticates itself with `sasl_mechanism`. Default: "PLAINTEXT"."""
    ssl_cafile: str | None
    """A PEM file with the authorities that sign the brokers' certificates. Default: those of the operating system."""
    ssl_certfile: str | None
    """A PEM file with the client's certificate and those between it and its authority, if brokers ask for one."""
    ssl_keyfile: str | None
    """A PEM file with the private key of the certificate, if that is not in the same file."""
    ssl_password: str | None
    """The password of an encrypted private key."""
    ssl_check_hostname: bool
    """Whether a broker's certificate must have the host name by which it is reached. Default: True."""
    ssl_context: ssl.SSLContext | None
    """A context of your own, in place of the files."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
    """How the client authenticates itself; the broker's `sasl.enabled.mechanisms` must have it."""
    sasl_plain_username: str | None
    """The user, for PLAIN and SCRAM."""
    sasl_plain_password: str | None
    """The user's password. SCRAM proves that the client knows it; PLAIN sends it, and needs "SASL_SSL"."""
    sasl_oauth_token_provider: TokenProvider | None
    """For OAUTHBEARER: a function, synchronous or not, that returns a token that is valid for a while."""


@dataclass(frozen=True)
class Credentials:
    """How a client authenticates itself. Neither the password nor the provider is shown."""

    mechanism: str
    username: str = ""
    password: str = field(default="", repr=False)
    token_provider: TokenProvider | None = field(default=None, repr=False)


class Protection(NamedTuple):
    """The arguments, checked and loaded."""

    tls: ssl.SSLContext | None = None
    """None: connections are not encrypted."""
    sasl: Credentials | None = None
    """None: the client does not authenticate itself, except perhaps by its certificate."""

    @property
    def principal(self) -> str | None:
        """The principal that brokers give the client. None: only they know it, from a certificate or a token."""
        if self.sasl is not None:
            return f"User:{self.sasl.username}" if self.sasl.username else None
        return "User:ANONYMOUS" if self.tls is None else None


UNPROTECTED = Protection()

_FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password")


def protection(who: str, security: Mapping[str, Any]) -> Protection:
    """Return how to protect connections. Raises InvalidSetting, and TypeError for a name that is no argument of `who`,
    as Python does."""
    for name in security:
        if name not in Security.__annotations__:
            raise TypeError(f"{who}.__init__() got an unexpected keyword argument {name!r}")
    protocol = security.get("security_protocol", "PLAINTEXT")
    if protocol not in SECURITY_PROTOCOLS:
        choices = " or ".join(map(repr, SECURITY_PROTOCOLS))
        raise InvalidSetting("security_protocol", protocol, f"use {choices}")
    is_encrypted, authenticates = protocol.endswith("SSL"), protocol.startswith("SASL")
    for prefix, is_used, alternatives in (
        ("ssl_", is_encrypted, '"SASL_SSL"' if authenticates else '"SSL" or "SASL_SSL"'),
        ("sasl_", authenticates, '"SASL_SSL"' if is_encrypted else '"SASL_SSL" or "SASL_PLAINTEXT"'),
    ):
        given = [name for name in _given(security) if name.startswith(prefix)]
        if given and not is_used:
            raise InvalidSetting(given[0], _shown(given[0], security), f"it needs security_protocol={alternatives}")
    return Protection(
        _tls_context(security) if is_encrypted else None, _credentials(security) if authenticates else None
    )


def _given(security: Mapping[str, Any]) -> list[str]:
    return [name for name in Security.__annotations__ if security.get(name) is not None]


def _shown(name: str, security: Mapping[str, Any]) -> object:
    """Return the value for a message, which never has a password."""
    return "..." if name.endswith("_password") else security[name]


def _credentials(security: Mapping[str, Any]) -> Credentials:
    mechanism = security.get("sasl_mechanism")
    if mechanism not in SASL_MECHANISMS:
        raise InvalidSetting("sasl_mechanism", mechanism, f"use {' or '.join(map(repr, SASL_MECHANISMS))}")
    names = ["sasl_plain_username", "sasl_plain_password"]
    other = ["sasl_oauth_token_provider"]
    if mechanism == "OAUTHBEARER":
        names, other = other, names
    for name in other:
        if security.get(name) is not None:
            rule = f"{mechanism} does not use it: give {' and '.join(names)}"
            raise InvalidSetting(name, _shown(name, security), rule)
    for name in names:
        if security.get(name) is None:
            raise InvalidSetting(name, None, f"{mechanism} needs it")
    if mechanism == "OAUTHBEARER":
        provider = security["sasl_oauth_token_provider"]
        if not callable(provider):
            rule = "give a function that returns a token (of an object with a method token, give that method)"
            raise InvalidSetting("sasl_oauth_token_provider", provider, rule)
        return Credentials(mechanism, token_provider=provider)
    username, password = (_checked_text(name, security) for name in names)
    return Credentials(mechanism, username, password)


def _checked_text(name: str, security: Mapping[str, Any]) -> str:
    value = security[name]
    rule = "give text, not empty and without the character NUL"
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidSetting(name, _shown(name, security), rule)
    if name.endswith("_password"):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidSetting(name, "...", "it has half of a surrogate pair: give it in UTF-8") from None
        return value
    return check_text(name, value)


def _tls_context(security: Mapping[str, Any]) -> ssl.SSLContext:
    checks_hostname = security.get("ssl_check_hostname", True)
    if type(checks_hostname) is not bool:
        raise InvalidSetting("ssl_check_hostname", checks_hostname, "give True or False")
    own = security.get("ssl_context")
    if own is not None:
        if not isinstance(own, ssl.SSLContext):
            raise InvalidSetting("ssl_context", own, "give an ssl.SSLContext")
        replaced = [name for name in _given(security) if name.startswith("ssl_") and name != "ssl_context"]
        if replaced:
            raise InvalidSetting("ssl_context", own, f"it replaces {', '.join(replaced)}: drop these")
        return own
    return _from_files(security, checks_hostname)


def _from_files(security: Mapping[str, Any], checks_hostname: bool) -> ssl.SSLContext:
    cafile, certfile, keyfile, password = (security.get(name) for name in _FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = checks_hostname
    if cafile is None:
        context.load_default_certs()
    else:
        try:
            load_authorities(context, cafile)
        except UnusableCredentials as error:
            raise InvalidSetting("ssl_cafile", cafile, str(error)) from error
    if certfile is None:
        if keyfile is not None:
            raise InvalidSetting("ssl_keyfile", keyfile, "give its certificate, too: ssl_certfile")
        return context
    try:
        load_identity(context, Identity(certfile, keyfile, password), "give its password as ssl_password")
    except UnusableCredentials as error:
        raise InvalidSetting("ssl_certfile", certfile, str(error)) from error
    return context


KAFKA_NAMES = (
    "security.protocol",
    "ssl.truststore.location",
    "ssl.truststore.type",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "sasl.mechanism",
    "sasl.jaas.config",
    "sasl.username",
    "sasl.password",
    "sasl.oauthbearer.token.endpoint.url",
)
"""Kafka's names of these arguments, for files and options. `sasl.username` and `sasl.password` are librdkafka's."""

SECRET_NAMES = frozenset({"ssl.key.password", "sasl.jaas.config", "sasl.password"})
"""Those whose values must not be shown."""


def from_kafka_names(values: Mapping[str, str]) -> Security:
    """Return the arguments for settings with Kafka's names. Raises InvalidSetting."""
    made: Security = {}
    for name in ("ssl.truststore.type", "ssl.keystore.type"):
        if values.get(name, "PEM") != "PEM":
            raise InvalidSetting(name, values[name], "give PEM, and the files in that format")
    match values.get("security.protocol", "PLAINTEXT"):
        case "PLAINTEXT":
            return made
        case "SSL" | "SASL_PLAINTEXT" | "SASL_SSL" as protocol:
            made["security_protocol"] = protocol
        case other:
            raise InvalidSetting("security.protocol", other, f"give {', '.join(SECURITY_PROTOCOLS)}")
    if protocol != "SASL_PLAINTEXT":
        if "ssl.truststore.location" in values:
            made["ssl_cafile"] = values["ssl.truststore.location"]
        if "ssl.keystore.location" in values:
            made["ssl_certfile"] = values["ssl.keystore.location"]
        if "ssl.key.password" in values:
            made["ssl_password"] = values["ssl.key.password"]
        if values.get("ssl.endpoint.identification.algorithm", "https") == "":
            made["ssl_check_hostname"] = False
    if protocol != "SSL":
        made.update(_sasl_of(values))
    return made


_MODULES = {
    "PLAIN": PLAIN_MODULE,
    "SCRAM-SHA-256": SCRAM_MODULE,
    "SCRAM-SHA-512": SCRAM_MODULE,
    "OAUTHBEARER": OAUTHBEARER_MODULE,
}


def _sasl_of(values: Mapping[str, str]) -> Security:
    made: Security = {}
    match values.get("sasl.mechanism"):
        case "PLAIN" | "SCRAM-SHA-256" | "SCRAM-SHA-512" | "OAUTHBEARER" as mechanism:
            made["sasl_mechanism"] = mechanism
        case other:
            raise InvalidSetting("sasl.mechanism", other, f"give {', '.join(SASL_MECHANISMS)}")
    module = _module_of(values, _MODULES[mechanism])
    if mechanism == "OAUTHBEARER":
        made["sasl_oauth_token_provider"] = _token_file(values)
        return made
    username = values.get("sasl.username", module.options.get("username"))
    password = values.get("sasl.password", module.options.get("password"))
    if not username or not password:
        rule = f'give {module.name} required username="NAME" password="PASSWORD"; or sasl.username and sasl.password'
        raise InvalidSetting("sasl.jaas.config", "..." if "sasl.jaas.config" in values else None, rule)
    made["sasl_plain_username"] = username
    made["sasl_plain_password"] = password
    return made


def _module_of(values: Mapping[str, str], expected: str) -> LoginModule:
    if "sasl.jaas.config" not in values:
        return LoginModule(expected, {})
    try:
        module = parse_jaas(values["sasl.jaas.config"])
    except JaasError as error:
        raise InvalidSetting("sasl.jaas.config", "...", str(error)) from None
    if module.name != expected:
        raise InvalidSetting("sasl.jaas.config", "...", f"sasl.mechanism={values['sasl.mechanism']} needs {expected}")
    return module


class TokenFile:
    """A provider of the token in a file, which another program renews."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        """The value of `sasl.oauthbearer.token.endpoint.url` that names the file."""
        return f"file://{self._path}"

    def __call__(self) -> str:
        return self._path.read_text(encoding="ascii").strip()


def _token_file(values: Mapping[str, str]) -> TokenFile:
    name = "sasl.oauthbearer.token.endpoint.url"
    url = values.get(name)
    scheme, _, path = (url or "").partition(":")
    if scheme != "file" or not path.startswith("/"):
        rule = "give the file of a token, as file:///run/token; in Python, sasl_oauth_token_provider may ask any server"
        raise InvalidSetting(name, url, rule)
    return TokenFile(Path("/" + path.lstrip("/")))

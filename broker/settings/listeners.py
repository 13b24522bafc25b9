"""Parses and checks the values of `listeners`, `advertised.listeners` and `listener.security.protocol.map`."""

from collections.abc import Collection, Mapping

from minibroker.broker.settings.types import SHORT_NUMBER, InvalidConfig
from minibroker.protocol.model import PLAINTEXT, SECURITY_PROTOCOLS, Endpoint

ADVERTISED_LISTENERS = "advertised.listeners"

_PROTOCOL_MAP = "listener.security.protocol.map"


def parse_listeners(setting: str, text: str) -> list[Endpoint]:
    """Parse `NAME://HOST:PORT,...`. The order is kept. Raises InvalidConfig."""
    endpoints: list[Endpoint] = []
    for part in text.split(","):
        name, separator, address = part.strip().partition("://")
        host, colon, port = address.rpartition(":")
        if not (name and separator and colon and SHORT_NUMBER.fullmatch(port) and int(port) < 65_536):
            raise InvalidConfig(
                f"{setting} has {part.strip()!r}: NAME://HOST:PORT is expected, with a port from 0 to 65535"
            )
        if any(e.listener == name for e in endpoints):
            raise InvalidConfig(f"{setting} names the listener {name} twice")
        endpoints.append(Endpoint(name, host.removeprefix("[").removesuffix("]"), int(port)))
    return endpoints


def parse_protocol_map(text: str) -> dict[str, str]:
    """Parse `NAME:PROTOCOL,...`. Raises InvalidConfig."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, protocol = (piece.strip() for piece in part.partition(":"))
        if not name or protocol not in SECURITY_PROTOCOLS:
            raise InvalidConfig(
                f"{_PROTOCOL_MAP} has {part!r}: NAME:PROTOCOL is expected, and PROTOCOL is "
                f"{' or '.join(SECURITY_PROTOCOLS)}"
            )
        if name in found:
            raise InvalidConfig(f"{_PROTOCOL_MAP} names the listener {name} twice")
        found[name] = protocol
    return found


def protocol_of(listener: str, protocols: Mapping[str, str]) -> str:
    """Return the protocol of a listener for clients, given the map. Raises InvalidConfig."""
    if listener in protocols:
        return protocols[listener]
    if listener in SECURITY_PROTOCOLS:
        return listener
    if protocols:
        raise InvalidConfig(f"{_PROTOCOL_MAP} has no protocol for the listener {listener}: add {listener}:PROTOCOL")
    return PLAINTEXT


ALL_ADDRESSES = ("", "0.0.0.0", "::")


def parse_advertised(text: str, listeners: Collection[str]) -> list[Endpoint]:
    """Parse the `advertised.listeners` of a broker that has these listeners. Raises InvalidConfig."""
    endpoints = parse_listeners(ADVERTISED_LISTENERS, text)
    for endpoint in endpoints:
        if endpoint.listener not in listeners:
            raise InvalidConfig(
                f"{ADVERTISED_LISTENERS} names {endpoint.listener}, which is not among listeners "
                f"({', '.join(listeners)})"
            )
        if endpoint.host in ALL_ADDRESSES:
            raise InvalidConfig(
                f"{ADVERTISED_LISTENERS} has the host {endpoint.host!r} for {endpoint.listener}, which is not an "
                f"address to connect to: give the host name or address at which clients and other brokers reach this "
                f"broker"
            )
    return endpoints

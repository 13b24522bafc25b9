"""The entities that have quotas, their znodes, and the limit of a client (Kafka's ClientQuotaManager). Pure.

An entity is a user, a client id, or a client id of a user; each part may be the default of all that have no quota of
their own. An address is an entity of another kind, with a quota for its new connections (KIP-612). The most specific
entity decides:

    user and client id    the pair shares one quota
    user                  all of the user's clients share one quota
    client id             all clients of that id share one quota

A default gives each user, client id or pair a quota of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import quote, unquote

from minibroker.protocol.acls import name_problem
from minibroker.protocol.znodes import CLIENT_CONFIGS, IP_CONFIGS, USER_CONFIGS


class QuotaKey(Enum):
    """The limits, by Kafka's names."""

    PRODUCER_BYTE_RATE = "producer_byte_rate"
    """Bytes of Produce requests per second."""
    CONSUMER_BYTE_RATE = "consumer_byte_rate"
    """Bytes of fetched records per second."""
    REQUEST_PERCENTAGE = "request_percentage"
    """Time in handlers, as a percentage of one task's time."""
    CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
    """Partitions created and deleted per second, in the whole cluster (KIP-599)."""
    CONNECTION_CREATION_RATE = "connection_creation_rate"
    """Connections of an address per second."""


WHOLE_NUMBERS = frozenset({QuotaKey.PRODUCER_BYTE_RATE, QuotaKey.CONSUMER_BYTE_RATE, QuotaKey.CONNECTION_CREATION_RATE})
OF_ADDRESSES = frozenset({QuotaKey.CONNECTION_CREATION_RATE})
"""The quotas of addresses. All others are those of users and clients."""
_LONGEST_SHOWN = 100
"""Characters of a name in a message. A comparison takes a time that grows with the name."""


class Default(Enum):
    DEFAULT = "<default>"


DEFAULT = Default.DEFAULT
"""In place of a name: all users, or all clients, without a quota of their own."""
Part = str | Default | None


class QuotaEntity(NamedTuple):
    """None: the part is not part of the entity. One part at least is given."""

    user: Part = None
    client_id: Part = None
    ip: Part = None
    """Alone."""

    def __str__(self) -> str:
        parts = (("user", self.user), ("client id", self.client_id), ("address", self.ip))
        return ", ".join(
            f"default {noun}" if part is DEFAULT else f"{noun} {part!r}" for noun, part in parts if part is not None
        )


Quotas = Mapping[QuotaEntity, Mapping[QuotaKey, float]]


class Limit(NamedTuple):
    """A quota that applies. `shared_by`: the user and client id whose requests count together; "" stands for all."""

    value: float
    shared_by: tuple[str, str]


def limit_of(quotas: Quotas, key: QuotaKey, user: str, client_id: str) -> Limit | None:
    """Return the limit of the most specific entity that has this key; None: unlimited."""
    both, by_user, by_client = (user, client_id), (user, ""), ("", client_id)
    for entity, shared_by in (
        (QuotaEntity(user, client_id), both),
        (QuotaEntity(user, DEFAULT), both),
        (QuotaEntity(user), by_user),
        (QuotaEntity(DEFAULT, client_id), both),
        (QuotaEntity(DEFAULT, DEFAULT), both),
        (QuotaEntity(DEFAULT), by_user),
        (QuotaEntity(None, client_id), by_client),
        (QuotaEntity(None, DEFAULT), by_client),
    ):
        value = quotas.get(entity, {}).get(key)
        if value is not None:
            return Limit(value, shared_by)
    return None


def connection_rates(quotas: Quotas) -> dict[str | None, float]:
    """Return the connections per second of each address that has a quota; None: of all others."""
    return {
        entity.ip if isinstance(entity.ip, str) else None: of_entity[QuotaKey.CONNECTION_CREATION_RATE]
        for entity, of_entity in quotas.items()
        if entity.ip is not None and QuotaKey.CONNECTION_CREATION_RATE in of_entity
    }


# --- znodes --------------------------------------------------------------------------------------------------------

CLIENTS = "clients"


def path_of(entity: QuotaEntity) -> str:
    """Return the path of the entity's settings: /config/users/U, /config/clients/C, /config/users/U/clients/C or
    /config/ips/A."""
    if entity.ip is not None:
        return f"{IP_CONFIGS}/{DEFAULT.value if entity.ip is DEFAULT else entity.ip}"
    if entity.user is None:
        return f"{CLIENT_CONFIGS}/{_node_name(entity.client_id)}"
    path = f"{USER_CONFIGS}/{_node_name(entity.user)}"
    return path if entity.client_id is None else f"{path}/{CLIENTS}/{_node_name(entity.client_id)}"


def entity_problem(entity: QuotaEntity) -> str | None:
    """Return why the entity cannot have settings, or None: the percent-encoding leaves `.` and `..`, and an IPv6
    address may end with any text after a percent sign."""
    return next(filter(None, map(name_problem, path_of(entity).split("/")[1:])), None)


def entity_at(path: str) -> QuotaEntity | None:
    """Return the entity of a path, or None if it is not one of an entity."""
    if path.startswith(f"{IP_CONFIGS}/"):
        name = path.removeprefix(f"{IP_CONFIGS}/")
        if name == DEFAULT.value:
            return QuotaEntity(ip=DEFAULT)
        address = address_of(name)
        return None if address is None else QuotaEntity(ip=address)
    if path.startswith(f"{CLIENT_CONFIGS}/"):
        name = path.removeprefix(f"{CLIENT_CONFIGS}/")
        return None if "/" in name else QuotaEntity(None, _part(name))
    if not path.startswith(f"{USER_CONFIGS}/"):
        return None
    match path.removeprefix(f"{USER_CONFIGS}/").split("/"):
        case [user]:
            return QuotaEntity(_part(user))
        case [user, "clients", client_id]:
            return QuotaEntity(_part(user), _part(client_id))
    return None


def _node_name(part: Part) -> str:
    """Kafka's Sanitizer: percent-encoded as by Java's URLEncoder."""
    assert part is not None
    return DEFAULT.value if part is DEFAULT else quote(part, safe="").replace("~", "%7E")


def _part(name: str) -> Part:
    return DEFAULT if name == DEFAULT.value else unquote(name)


def address_of(text: str) -> str | None:
    """Return the address in its usual form, or None if it is not one."""
    try:
        return str(ip_address(text))
    except ValueError:
        return None


# --- values --------------------------------------------------------------------------------------------------------


def key_of(name: str) -> QuotaKey | None:
    return next((key for key in QuotaKey if key.value == name), None)


def unknown_key(name: str, is_of_address: bool) -> str:
    """Return the message about a name that is no quota. It offers the quotas that the entity can have."""
    name = name[:_LONGEST_SHOWN]
    known = [key.value for key in QuotaKey if (key in OF_ADDRESSES) is is_of_address]
    of = "addresses" if is_of_address else "users and client ids"
    near = get_close_matches(name, known, 1)
    remedy = (
        f"did you mean {near[0]}?" if near else f"{'give' if len(known) == 1 else 'give one of'} {', '.join(known)}"
    )
    return f"{name!r} is not a quota of {of}: {remedy}"


def entities_of(key: QuotaKey) -> str:
    """Return which entities have the quota, with the options that name them."""
    if key in OF_ADDRESSES:
        return "addresses: give --ip ADDRESS (the entity type ip)"
    return "users and client ids: give --user NAME or --client-id ID (the entity types user and client-id)"


def problem_of(key: QuotaKey, value: float) -> str | None:
    """Return why the value is not one of the key, or None."""
    if not math.isfinite(value) or value <= 0:
        return f"{key.value}={value:g} must be greater than 0"
    if key in WHOLE_NUMBERS and value != int(value):
        return f"{key.value}={value:g} must be a whole number"
    return None


def as_text(key: QuotaKey, value: float) -> str:
    return str(int(value)) if key in WHOLE_NUMBERS else repr(value)


def from_texts(texts: Mapping[str, str]) -> dict[QuotaKey, float]:
    """Return the quotas among an entity's settings, which may have others, such as credentials. Raises ValueError
    naming an invalid one."""
    return dict(_from_texts(texts))


def _from_texts(texts: Mapping[str, str]) -> Iterator[tuple[QuotaKey, float]]:
    for name, text in texts.items():
        key = key_of(name)
        if key is None:
            continue
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} must be a number") from None
        problem = problem_of(key, value)
        if problem is not None:
            raise ValueError(problem)
        yield key, value

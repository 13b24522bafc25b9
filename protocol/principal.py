"""The identity of the sender of a request (Kafka's KafkaPrincipal)."""

from typing import NamedTuple

USER = "User"
"""The type of all principals that a connection proves (Kafka's KafkaPrincipal.USER_TYPE)."""


class Principal(NamedTuple):
    """The identity that a connection has proved. TLS and SASL set `type` and `name`; the proof of a broker
    (`protocol/connections/broker_proof.py`) sets `broker_id` and leaves the others."""

    type: str = USER
    name: str = "ANONYMOUS"
    broker_id: int | None = None
    """None: a client, or a broker that has not proved itself."""

    def __str__(self) -> str:
        """Return the principal as ACLs and `super.users` write it."""
        return f"{self.type}:{self.name}"

    @property
    def shown(self) -> str:
        """The principal in messages."""
        return str(self) if self.broker_id is None else f"broker {self.broker_id}"


ANONYMOUS = Principal()


def broker_principal(broker_id: int) -> Principal:
    """Return the principal of a broker that has proved itself over a connection without other credentials."""
    return ANONYMOUS._replace(broker_id=broker_id)


def parse_principal(text: str) -> Principal:
    """Return the principal of `User:alice`. Raises ValueError without a type or a name."""
    kind, colon, name = text.partition(":")
    if not (kind and colon and name):
        raise ValueError(f"{text!r} is not a principal; write type:name, for instance User:alice")
    return Principal(kind, name)

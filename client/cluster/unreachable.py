"""The text of an error when no broker answered: why, for each address, and the remedy that fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from minibroker.client.settings import Address
from minibroker.protocol.connections.rpc import HandshakeFailed, NotServed, RequestTimedOut
from minibroker.protocol.errors import InvalidMessage

_HERE = "\0"
"""Stands for the address in a text."""


def explained(failures: Mapping[Address, Exception]) -> str:
    """Return the reasons and the remedy."""
    reasons, remedy = reasons_of(failures), _remedy(failures.values())
    return f"{reasons}. {remedy}" if remedy else reasons


def reasons_of(failures: Mapping[Address, Exception]) -> str:
    """Return why each address failed. Addresses with the same reason share its text."""
    grouped: dict[str, list[str]] = {}
    for address, error in failures.items():
        grouped.setdefault(str(error).replace(str(address), _HERE, 1), []).append(str(address))
    return "; ".join(
        text.replace(_HERE, ", ".join(addresses)) if _HERE in text else text for text, addresses in grouped.items()
    )


def _remedy(failures: Collection[Exception]) -> str:
    """Return what to do, or an empty string if the reasons say it: a handshake that fails names its remedy, and it does
    not help to start brokers."""
    if any(isinstance(error, RequestTimedOut) for error in failures):
        return "Brokers were reached, so they hang or wait for ZooKeeper: see `minibroker status`"
    if all(isinstance(error, HandshakeFailed) for error in failures):
        return ""
    if all(isinstance(error, HandshakeFailed | NotServed | InvalidMessage) for error in failures):
        return "If that is no broker, give the address of a running broker as bootstrap"
    return (
        "Start the brokers (`minibroker start all`, or `minibroker up` if ZooKeeper does not run either), or give the "
        "address of a running broker as bootstrap"
    )

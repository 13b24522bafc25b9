"""The remedy of an error fits its cause."""

from __future__ import annotations

import pytest

from minibroker.client.cluster.unreachable import explained
from minibroker.client.settings import Address
from minibroker.protocol.connections.rpc import HandshakeFailed, NotServed, RequestTimedOut
from minibroker.protocol.errors import InvalidMessage, MinibrokerError, NetworkError

START, NO_BROKER, SEE_STATUS = "Start the brokers", "If that is no broker", "see `minibroker status`"


@pytest.mark.parametrize(
    ("errors", "remedy"),
    [
        ([NetworkError], START),
        ([HandshakeFailed], None),
        ([HandshakeFailed, HandshakeFailed], None),
        ([HandshakeFailed, NetworkError], START),
        ([NotServed], NO_BROKER),
        ([NotServed, InvalidMessage, HandshakeFailed], NO_BROKER),
        ([NotServed, NetworkError], START),
        ([HandshakeFailed, RequestTimedOut], SEE_STATUS),
    ],
)
def test_brokers_are_to_be_started_only_if_one_was_not_reached(
    errors: list[type[MinibrokerError]], remedy: str | None
) -> None:
    failures = {Address("b", port): error(f"to b:{port}: it failed") for port, error in enumerate(errors, 1)}
    text = explained(failures)
    assert [each for each in (START, NO_BROKER, SEE_STATUS) if each in text] == ([remedy] if remedy else [])


def test_addresses_with_the_same_reason_share_its_text() -> None:
    failures = {Address("b", port): HandshakeFailed(f"connecting to b:{port}: untrusted") for port in (1, 2)}
    assert explained({**failures, Address("c", 3): HandshakeFailed("connecting to c:3: expired")}) == (
        "connecting to b:1, b:2: untrusted; connecting to c:3: expired"
    )

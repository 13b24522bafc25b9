"""Requests in transit, as taps of the network see them."""

from __future__ import annotations

from minibroker.protocol.apis import BROKER_AUTHENTICATE

_ENVELOPE = 0x95
"""First byte of a request after its length: a MessagePack array of five, which begins with the API key."""


def request_key(data: memoryview) -> int | None:
    """Return the API key of the request that begins here, or None if none does. A broker's proof, which precedes its
    first request, is skipped."""
    key = data[5] if len(data) > 5 and data[4] == _ENVELOPE else None
    if key == BROKER_AUTHENTICATE.key:
        return request_key(data[4 + int.from_bytes(data[:4], "big") :])
    return key

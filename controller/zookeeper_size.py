"""The size that ZooKeeper accepts."""

from minibroker.protocol.world import ZooKeeperError

_MAX_REQUEST_BYTES = 1_000_000
"""ZooKeeper drops the connection for more than 1,048,575 bytes (jute.maxbuffer), so larger requests are rejected."""


def check_size(path: str, size: int) -> None:
    """Raises ZooKeeperError if a request of this size would be too large."""
    if size > _MAX_REQUEST_BYTES:
        raise ZooKeeperError(
            f"a request for {path} has {size} bytes: ZooKeeper accepts at most {_MAX_REQUEST_BYTES}; split it"
        )

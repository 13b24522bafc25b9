"""Reads from ZooKeeper that must not return outdated data."""

from minibroker.protocol import znodes
from minibroker.protocol.world import Check, ZooKeeperSession


async def catch_up(session: ZooKeeperSession) -> None:
    """Make all later reads of the session return the current state or a newer one. Raises ZooKeeperError.

    The session's server may lag behind its ensemble, even after a reconnect. It answers a write only after
    applying it, so this sends a write that changes nothing.
    """
    await session.multi([Check(znodes.TOPICS, -1)])

"""Reads from ZooKeeper that must not return outdated data."""

from minibroker.protocol import znodes
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Check, NoNode, ZooKeeperSession


async def catch_up(session: ZooKeeperSession) -> None:
    """Make all later reads of the session return the current state or a newer one. Raises ZooKeeperError.

    The session's server may lag behind its ensemble, even after a reconnect. It answers a write only after
    applying it, so this sends a write that changes nothing.
    """
    await session.multi([Check(znodes.TOPICS, -1)])


async def partition_exists(session: ZooKeeperSession, topic_partition: TopicPartition) -> bool:
    """Return whether there is a topic of that name with that partition, which is not to be deleted. Raises
    ZooKeeperError, MalformedZnode."""
    await catch_up(session)
    try:
        data, _ = await session.get(znodes.topic_path(topic_partition.topic))
    except NoNode:
        return False
    if topic_partition.partition not in znodes.decode_topic(topic_partition.topic, data).partitions:
        return False
    try:
        await session.get(znodes.delete_topic_path(topic_partition.topic))
    except NoNode:
        return True
    return False

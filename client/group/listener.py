"""What a user may do when a rebalance takes partitions away or brings some."""

from minibroker.protocol.model import TopicPartition


class RebalanceListener:
    """Derive from it, and override what is needed; give it to Consumer or `subscribe`.

    The methods are awaited in the consumer's event loop, one at a time. Partitions are taken away while no records are
    in the user's hands: the loop over the consumer waits for the next ones, or has not begun. They may call the
    consumer: `commit`, `position`, `seek`, `pause`. Each has `max_poll_interval_ms`; after that it is cancelled, with a
    WARNING, and the group may have gone on without this member. What they raise is raised from the iteration.
    """

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """These are about to go to other members; until this returns, they get none of them. Commit what was done."""

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """These have come, in addition to what was there; their positions are where the group has committed, and none
        of their records was handed out yet. May be empty: a rebalance is over that brought nothing."""

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """These are gone: the group has gone on without this member, and others may read them already. A commit would
        be refused. Unless it is overridden, this calls `on_partitions_revoked`, as in Kafka."""
        await self.on_partitions_revoked(partitions)

"""Healing of damaged replicas: their files are deleted, and they are copied from their leaders again. Also replicas
that could not be created or deleted for lack of file descriptors: the controller, which orders that only once for each
replica, is asked to order it again.

docs/internals/storage.md describes how damage is found, and when a leader gives up its leadership because of it.

The danger: a replica is on record as having every acknowledged record (in the ISR, or eligible). If that stays so, or
becomes so again, while it has nothing, it may lead with an empty log, and the others cut off acknowledged records. So
nothing is deleted before ZooKeeper says, in a leader epoch after the last one in which this replica took part, that
another broker leads and that this one is neither in the ISR nor eligible (`may_be_deleted`). From then on it stays out
until it has fetched everything anew:
- A leader accepts into the ISR only followers that have fetched everything in its own epoch. Fetches of earlier epochs
  that come late are refused, and this replica sends none of a later one before it is made anew.
- A pending write of an earlier leader expects another version of the state.
- An order from an earlier epoch that comes late, perhaps to lead, is refused (`Healer.check`). A replica that was
  damaged when it was opened has not taken part under this registration of its broker, so the epoch does not matter: the
  broker's earlier fetches no longer count (KIP-903), and it does not vouch for its data.

If it is the last one that has everything, or if nothing can be committed without it, nothing is deleted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from minibroker.broker.storage.descriptors import Room
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH, NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.world import ConnectionLoss, SessionExpired, ZooKeeperError, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.replication")

CHECK_S = 1.0
LONGEST_PAUSE_S = 64.0
"""The longest pause between two requests for replicas that cannot be created, while no descriptors become free."""
NO_ROOM = Room(for_a_log=False, for_a_file=False)
ZOOKEEPER_RETRY_S = 0.1
LAST_WORDS_S = 1.0


def may_be_deleted(state: LeaderAndIsr, broker_id: int, last_epoch: int) -> bool:
    """Return whether nothing counts on this broker's replica. `last_epoch` is the last leader epoch in which it took
    part under this registration. Pure."""
    return (
        state.leader not in (NO_LEADER, broker_id)
        and state.leader_epoch > last_epoch
        and broker_id not in (*state.isr, *state.eligible)
    )


class Healer:
    """Belongs to the event loop."""

    def __init__(
        self,
        logs: LogDirs,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        broker_id: int,
    ) -> None:
        self._logs = logs
        self._sessions = sessions
        self._broker_id = broker_id
        self._last_epochs: dict[TopicPartition, int] = {}
        """The last epochs of replicas that were found to be damaged while they took part."""
        self._begun_in: dict[TopicPartition, tuple[str, int]] = {}
        """The topic ids and leader epochs of replicas that were deleted here to be made anew."""
        self._short: set[TopicPartition] = set()
        """Replicas that could not be created or deleted since the last request to the controller."""
        self._is_mended = False
        self._room = NO_ROOM
        """At the last look."""
        self._asked_s = -LONGEST_PAUSE_S
        self._pause_s = CHECK_S
        self.healed = 0
        """Replicas that were deleted to be copied again."""

    def replica_lost(self, topic_partition: TopicPartition, leader_epoch: int) -> None:
        """It is damaged, and took part until `leader_epoch`. It must not fetch in a later one."""
        self._last_epochs[topic_partition] = leader_epoch

    def replica_refused(self, topic_partition: TopicPartition) -> None:
        """It could not be made, or deleted, for a Shortage. The longer that lasts, the longer are the pauses between
        attempts; when there are descriptors again, it is attempted at once."""
        if not self._short:
            is_first = asyncio.get_running_loop().time() - self._asked_s > LONGEST_PAUSE_S
            self._pause_s = CHECK_S if is_first else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._short.add(topic_partition)

    def mended(self) -> None:
        """An obstacle to creating replicas is gone: ask the controller for them soon."""
        self._is_mended = True

    def check(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        """An order in this epoch may be obeyed. Raises BrokerError STALE_CONTROLLER_EPOCH where it is from before the
        replica was made anew."""
        healed_id, begun_in = self._begun_in.get(topic_partition, ("", NO_EPOCH))
        if healed_id == topic_id and leader_epoch < begun_in:
            raise BrokerError(
                ErrorCode.STALE_CONTROLLER_EPOCH,
                f"{topic_partition} was made anew here in epoch {begun_in}, not {leader_epoch}",
            )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            healed = [partition for partition in sorted(self._logs.healable) if await self._heal(partition)]
            if healed or self._is_mended or self._asks_again():
                self._is_mended = False
                # As after the failure of a directory: the controller asks for the state of the replicas here, and they
                # are made anew.
                await tell_of_lost_replicas(self._sessions, self._broker_id)

    def _asks_again(self) -> bool:
        """When others have given descriptors back, or after the pause."""
        now_s = asyncio.get_running_loop().time()
        before, self._room = self._room, self._logs.room
        if not self._short:
            return False
        is_more = any(now and not then for then, now in zip(before, self._room, strict=True))
        if not is_more and now_s - self._asked_s < self._pause_s:
            return False
        logger.info(
            "%d replicas could not be made or deleted here: the controller is asked for them again", len(self._short)
        )
        self._asked_s = now_s
        self._short.clear()  # those that still cannot be made will be refused again
        return True

    async def _heal(self, topic_partition: TopicPartition) -> bool:
        path = znodes.state_path(topic_partition)
        try:
            session = await self._sessions()
            await catch_up(session)
            # In this order: the epoch must not be of an earlier topic than the id.
            topic, _ = await session.get(znodes.topic_path(topic_partition.topic))
            data, stat = await session.get(path)
            topic_id = znodes.decode_topic(topic_partition.topic, topic).topic_id
            state = znodes.decode_state(topic_partition, data, stat.version)
        except ZooKeeperError:
            return False
        except MalformedZnode as error:
            logger.warning("%s stays as it is, damaged: %s", topic_partition, error)
            return False
        if topic_partition not in self._logs.healable:
            return False
        if not may_be_deleted(state, self._broker_id, self._last_epochs.get(topic_partition, NO_EPOCH)):
            return False
        self._begun_in[topic_partition] = topic_id, state.leader_epoch
        why = self._logs.damaged.get(topic_partition, "")
        try:
            await self._logs.delete(topic_partition)
        except BrokerError as error:
            logger.error("%s is damaged, and cannot be deleted: %s", topic_partition, error)
            return False
        self._last_epochs.pop(topic_partition, None)
        self.healed += 1
        logger.warning(
            "%s: deleted, and copied from broker %d again, which leads in epoch %d with ISR %s: %s",
            topic_partition,
            state.leader,
            state.leader_epoch,
            list(state.isr),
            why,
        )
        return True


async def tell_of_lost_replicas(
    sessions: Callable[[], Awaitable[ZooKeeperSession]], broker_id: int, reason: str = ""
) -> None:
    """The controller (Kafka's propagateLogDirEvent): it asks the broker which replicas are concerned. The timeline
    shows the reason."""
    event = znodes.encode_log_dir_event(broker_id, reason)
    while True:
        try:
            session = await sessions()
            await session.create(znodes.LOG_DIR_EVENT_PREFIX, event, sequence=True)
            return
        except (ConnectionLoss, SessionExpired):
            # Told twice at worst.
            await asyncio.sleep(ZOOKEEPER_RETRY_S)


async def tell_before_the_end(sessions: Callable[[], Awaitable[ZooKeeperSession]], broker_id: int, reason: str) -> None:
    """Tell the controller why this broker ends, if ZooKeeper answers in time."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await tell_of_lost_replicas(sessions, broker_id, reason)
    except (TimeoutError, ZooKeeperError) as error:
        logger.info("the controller is not told why this broker ends: %s", error or "ZooKeeper does not answer")

"""The follower's side: one fetcher per leader broker, all partitions that it leads in one long-polling request.

One request is outstanding at a time, since the offset of the next one is what the last one brought. When the set of
partitions changes, a request may have up to `replica.fetch.wait.max.ms` of waiting before it: the fetcher abandons it
and asks anew, so that a fresh partition (or a new leader after a crash) is not held up by the quiet of the others. The
abandoned answer is dropped when it comes; it can only bring what the new one brings too.

A partition that was refused (the leader has not heard of its leadership yet, or has heard of a newer one) is left out
for a short while that doubles up to `replica.fetch.backoff.ms`; the others go on.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from broker.replication.partition import Partition
from protocol.apis import FETCH
from protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from protocol.messages import FetchPartitionResponse, FetchRequest, FetchResponse, FetchTopic
from protocol.model import TopicPartition
from protocol.rpc import Connection, open_connection
from protocol.world import World

logger = logging.getLogger("minibroker.replication")

FIRST_BACKOFF_S = 0.01
CONNECT_TIMEOUT_S = 3.0


class FetcherSettings(msgspec.Struct, frozen=True):
    broker_id: int
    wait_max_ms: int
    min_bytes: int
    response_max_bytes: int
    partition_max_bytes: int
    backoff_s: float
    socket_timeout_s: float


class _Follow(msgspec.Struct):
    """A partition in this fetcher's care."""

    partition: Partition
    leader_epoch: int
    not_before_s: float = 0.0
    backoff_s: float = 0.0


class Fetcher:
    """Copies the partitions given to it from one leader broker until they are taken away or it is closed.

    A storage error (KAFKA_STORAGE_ERROR) ends it by raising out of its task: the log directory is failed and the
    broker with it. Everything else is retried for ever.
    """

    def __init__(
        self,
        world: World,
        leader_id: int,
        host: str,
        port: int,
        settings: FetcherSettings,
        broker_epoch: Callable[[], int],
    ) -> None:
        self.leader_id = leader_id
        self.address = (host, port)
        self._world = world
        self._settings = settings
        self._broker_epoch = broker_epoch
        self._follows: dict[TopicPartition, _Follow] = {}
        self._wake = asyncio.Event()
        self._changed = False
        self._connection: Connection | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"fetcher of broker {leader_id}")

    @property
    def task(self) -> "asyncio.Task[None]":
        """Ends only by `close` or by an error that the owner must see."""
        return self._task

    def add(self, partition: Partition) -> None:
        """Begin to follow, or follow in the partition's new leader epoch."""
        self._follows[partition.topic_partition] = _Follow(partition, partition.leader_epoch)
        self._change()

    def remove(self, topic_partition: TopicPartition) -> None:
        if self._follows.pop(topic_partition, None) is not None:
            self._change()

    def follows(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._follows

    @property
    def partitions(self) -> list[Partition]:
        return [follow.partition for follow in self._follows.values()]

    @property
    def idle(self) -> bool:
        return not self._follows

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    def _change(self) -> None:
        self._changed = True
        self._wake.set()

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            self._wake.clear()
            self._changed = False
            now_s = self._world.clock.monotonic()
            due = {tp: f for tp, f in self._follows.items() if f.not_before_s <= now_s}
            if not due:
                earliest_s = min((f.not_before_s for f in self._follows.values()), default=None)
                await self._wait(None if earliest_s is None else earliest_s - now_s)
                continue
            try:
                response = await self._fetch(due)
            except (NetworkError, BrokerError, InvalidMessage) as error:
                backoff_s = min(max(2 * backoff_s, FIRST_BACKOFF_S), self._settings.backoff_s)
                logger.debug("fetch from broker %d failed, again in %.3f s: %s", self.leader_id, backoff_s, error)
                await self._wait(backoff_s)
                continue
            backoff_s = 0.0
            if response is not None:
                self._apply(due, response)

    async def _wait(self, seconds: float | None) -> None:
        """Until the partitions change, or the time is up."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _fetch(self, due: dict[TopicPartition, _Follow]) -> FetchResponse | None:
        """One request for the partitions that are due; None where the partitions changed before it was answered."""
        settings = self._settings
        if self._connection is None or self._connection.closed:
            host, port = self.address
            self._connection = await open_connection(
                self._world.network,
                host,
                port,
                client_id=f"broker-{settings.broker_id}-fetcher",
                timeout_s=CONNECT_TIMEOUT_S,
            )
            due = {tp: f for tp, f in due.items() if self._follows.get(tp) is f}
            if not due:
                return None
        topics: dict[str, FetchTopic] = {}
        for topic_partition, follow in due.items():
            topic = topics.get(topic_partition.topic)
            if topic is None:
                topic_id = follow.partition.log.topic_id
                topic = topics[topic_partition.topic] = FetchTopic(topic_partition.topic, topic_id, [])
            topic.partitions.append(follow.partition.next_fetch(settings.partition_max_bytes))
        request = FetchRequest(
            replica_id=settings.broker_id,
            max_wait_ms=settings.wait_max_ms,
            min_bytes=settings.min_bytes,
            max_bytes=settings.response_max_bytes,
            isolation_level=0,
            topics=list(topics.values()),
            replica_epoch=self._broker_epoch(),
        )
        future = self._connection.send(FETCH, request, timeout_s=settings.socket_timeout_s)
        future.add_done_callback(lambda _: self._wake.set())
        while not future.done():
            await self._wake.wait()
            if self._changed and not future.done():
                return None
            self._wake.clear()
        return future.result()

    def _apply(self, due: dict[TopicPartition, _Follow], response: FetchResponse) -> None:
        now_s = self._world.clock.monotonic()
        for topic in response.responses:
            for answer in topic.partitions:
                topic_partition = TopicPartition(topic.topic, answer.partition_index)
                follow = due.get(topic_partition)
                if follow is None or self._follows.get(topic_partition) is not follow:
                    continue
                if follow.partition.leader_epoch != follow.leader_epoch:
                    continue
                try:
                    settled = self._apply_one(follow, answer)
                except BrokerError as error:
                    if error.code is ErrorCode.KAFKA_STORAGE_ERROR:
                        raise
                    logger.error("%s from broker %d: %s", topic_partition, self.leader_id, error)
                    settled = False
                if settled:
                    follow.backoff_s = 0.0
                else:
                    follow.backoff_s = min(max(2 * follow.backoff_s, FIRST_BACKOFF_S), self._settings.backoff_s)
                    follow.not_before_s = now_s + follow.backoff_s

    def _apply_one(self, follow: _Follow, answer: FetchPartitionResponse) -> bool:
        """True where the next fetch may follow at once."""
        partition = follow.partition
        code = error_of(answer.error_code)
        if code is ErrorCode.NONE:
            fetched = partition.apply_fetched(answer)
            if fetched.appended:
                # To the end of the next request, so that a flood here cannot starve the partitions behind it.
                self._follows[partition.topic_partition] = self._follows.pop(partition.topic_partition)
            if fetched.truncated_to is not None:
                logger.info(
                    "%s: truncated to %d, where broker %d's log parts from it",
                    partition.topic_partition,
                    fetched.truncated_to,
                    self.leader_id,
                )
            return True
        if code is ErrorCode.OFFSET_OUT_OF_RANGE and answer.log_start_offset > partition.log.log_end_offset:
            logger.warning(
                "%s: the leader's log begins at %d, beyond this one's end %d: starting afresh there",
                partition.topic_partition,
                answer.log_start_offset,
                partition.log.log_end_offset,
            )
            partition.restart_at(answer.log_start_offset)
            return True
        logger.debug("%s: broker %d answers %s", partition.topic_partition, self.leader_id, code.name)
        return False

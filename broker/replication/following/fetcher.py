"""The follower's side: one fetcher per leader broker, which copies all partitions that it leads by a few long-polling
requests.

`minibroker.protocol.fetch_schedule` distributes them over requests and says how long each may wait. Requests for quiet
partitions are sent in full only if they differ from the last: see `minibroker.protocol.fetch_slots`.

A partition whose fetch was rejected (the leader does not know its leadership yet, or knows a newer one) is left out for
a short while that doubles up to `replica.fetch.backoff.ms`, or longer with very many partitions; the others go on. A
partition with `durability=synced` is also left out until the last answer is flushed.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from minibroker.broker.replication.following import copying
from minibroker.broker.replication.following.silences import Silences
from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.io_errors import Shortage
from minibroker.broker.storage.log import LogInvariantViolated
from minibroker.protocol.apis import FETCH
from minibroker.protocol.connections.broker_connections import BrokerConnections, NotTrusted
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.fetch_schedule import (
    PARTITIONS_PER_REQUEST,
    Planned,
    cut,
    cut_by_size,
    follower_pace,
    follower_wait_ms,
    most_in_a_request,
    schedule,
    size_after,
)
from minibroker.protocol.fetch_slots import NO_SLOT, FollowerSlots
from minibroker.protocol.messages import FetchPartitionResponse, FetchRequest, FetchResponse, FetchTopic
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.replication")

FIRST_BACKOFF_S = 0.01
CONNECT_TIMEOUT_S = 3.0
_LOST_S = 1.0
"""The most seconds for which a leader counts as lost after its connection broke: a crashed one has a successor by then,
and one that only this broker cannot reach goes on."""


class FetcherSettings(msgspec.Struct, frozen=True):
    broker_id: int
    wait_max_ms: int
    lag_time_max_ms: int
    min_bytes: int
    response_max_bytes: int
    partition_max_bytes: int
    backoff_s: float
    socket_timeout_s: float


class _Follow(msgspec.Struct, eq=False):
    """A partition in this fetcher's care."""

    partition: Partition
    leader_epoch: int
    is_in_sync: bool
    """It was in the ISR when this broker received its role, or had reached the high watermark with the last answer."""
    lag: int = 0
    """Records below the high watermark that it lacked after the last answer."""
    is_busy: bool = True
    """The last answer had records or a truncation, or there was none yet."""
    size: int = PARTITIONS_PER_REQUEST
    """How many partitions a request should name that names this one while it is quiet."""
    not_before_s: float = 0.0
    backoff_s: float = 0.0
    is_suspect: bool = False
    """The last answer was corrupt, or does not fit: the leader should check its disk (`FetchPartition.suspect`)."""
    has_appended: bool = False
    """Records of this leader were appended in this epoch."""


class _Request(NamedTuple):
    """An outstanding fetch."""

    follows: dict[TopicPartition, _Follow]
    answer: asyncio.Future[FetchResponse]
    topics: list[FetchTopic]
    slot: int
    planned: Planned[tuple[TopicPartition, _Follow]]
    is_quiet: bool
    """The last answers of its partitions had no records."""


class ReplicaFetcher:
    """Copies partitions from one leader broker until they are taken away or it is closed.

    It stops following a partition whose log directory has failed, or whose log is damaged (KAFKA_STORAGE_ERROR), which
    is reported elsewhere. It also stops for a log that cannot continue with its leader's records, and calls `set_aside`
    with the partition and the reason. The others go on. Everything else is retried for ever.
    """

    def __init__(
        self,
        world: World,
        connections: BrokerConnections,
        leader_id: int,
        host: str,
        port: int,
        settings: FetcherSettings,
        silences: Silences,
        broker_epoch: Callable[[], int],
        set_aside: Callable[[Partition, str], None],
        found: Callable[[], None],
    ) -> None:
        """`found` is called when the leader is no longer lost (`lost_until_s`)."""
        self.leader_id = leader_id
        self.address = (host, port)
        self._world = world
        self._connections = connections
        self._settings = settings
        self._silences = silences
        self._broker_epoch = broker_epoch
        self._set_aside = set_aside
        self._found = found
        self._follows: dict[TopicPartition, _Follow] = {}
        self._unasked: dict[TopicPartition, _Follow] = {}
        """Partitions that are in no outstanding request, and not rejected just now."""
        self._resting: dict[TopicPartition, _Follow] = {}
        """Partitions that were rejected, until it is time to ask again. There are many while their leader creates its
        logs."""
        self._rested_s = math.inf
        """When the first of them is due."""
        self._requests: list[_Request] = []
        self._slots: FollowerSlots[_Follow] = FollowerSlots()
        self._began_s = world.clock.monotonic()
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._broke_s: float | None = None
        """When the connection to the leader broke, or could not be opened; None once one is open."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"fetcher of broker {leader_id}")

    @property
    def task(self) -> "asyncio.Task[None]":
        """Ends only by `close` or by an error that the owner must see."""
        return self._task

    def add(self, partition: Partition) -> None:
        """Begin to follow, or follow in the partition's new leader epoch."""
        topic_partition = partition.topic_partition
        is_in_sync = self._settings.broker_id in partition.isr
        follow = _Follow(partition, partition.leader_epoch, is_in_sync)
        self._follows[topic_partition] = self._unasked[topic_partition] = follow
        self._resting.pop(topic_partition, None)
        self._wake.set()

    def wake(self) -> None:
        """Look again which partitions may be asked for (`Partition.may_fetch`)."""
        self._wake.set()

    def remove(self, topic_partition: TopicPartition) -> None:
        self._follows.pop(topic_partition, None)
        self._unasked.pop(topic_partition, None)
        self._resting.pop(topic_partition, None)

    def follows(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._follows

    @property
    def partitions(self) -> list[Partition]:
        return [follow.partition for follow in self._follows.values()]

    @property
    def max_lag(self) -> int:
        """The most committed records that a partition lacks."""
        return max((follow.lag for follow in self._follows.values()), default=0)

    @property
    def idle(self) -> bool:
        return not self._follows

    @property
    def lost_until_s(self) -> float:
        """Until when the leader counts as lost: its connection has just broken, as when it crashes, and no other is
        open yet. Set in the moment in which the loop sees it: clients see it in the same millisecond, and ask."""
        return -math.inf if self._broke_s is None else self._broke_s + _LOST_S

    @property
    def _longest_wait_ms(self) -> int:
        settings = self._settings
        return follower_wait_ms(settings.wait_max_ms, len(self._follows), settings.lag_time_max_ms)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            self._wake.clear()
            failure = None
            for request in self._answered():
                failure = request.answer.exception() or failure
                if request.answer.exception() is None:
                    response = request.answer.result()
                    self._silences.heard(self.leader_id, self._longest_wait_ms)
                    if response.slot == request.slot != NO_SLOT:
                        self._slots.keep(request.slot, list(request.follows.values()), request.topics)
                    self._apply(request.follows, response)
                    self._resize(request)
                    backoff_s = 0.0
            wait_s = None
            if failure is None:
                try:
                    wait_s = await self._ask()
                except NetworkError as error:
                    failure = error
            if failure is not None:
                if not isinstance(failure, (NetworkError, BrokerError, InvalidMessage)):
                    raise failure
                if isinstance(failure, NetworkError):
                    self._broken()
                self._give_up(f"to begin anew after: {failure}")
                if _needs_mending(failure) and not backoff_s:
                    logger.warning("nothing can be fetched from broker %d: %s", self.leader_id, failure)
                wait_s = backoff_s = min(max(2 * backoff_s, FIRST_BACKOFF_S), self._settings.backoff_s)
                logger.debug("fetch from broker %d failed, again in %.3f s: %s", self.leader_id, backoff_s, failure)
            await self._wait(wait_s)

    async def _wait(self, seconds: float | None) -> None:
        """Until an answer comes or a partition is added, or the time is up."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _broken(self) -> None:
        # Where nothing is followed, the end of a connection says nothing.
        if self._broke_s is None and self._follows:
            self._broke_s = self._world.clock.monotonic()

    def _connection_lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._broken()

    def _give_up(self, reason: str) -> None:
        """Nothing is outstanding any more."""
        if self._connection is not None:
            self._connection.close(reason)
            self._connection = None
        requests, self._requests = self._requests, []
        for request in requests:
            self._take_back(request)

    def _answered(self) -> list[_Request]:
        """The requests that came to an end. Their partitions may be asked for anew."""
        answered = [request for request in self._requests if request.answer.done()]
        if answered:
            self._requests = [request for request in self._requests if not request.answer.done()]
            for request in answered:
                self._take_back(request)
        return answered

    def _take_back(self, request: _Request) -> None:
        for topic_partition, follow in request.follows.items():
            if self._follows.get(topic_partition) is follow:
                self._unasked[topic_partition] = follow

    async def _ask(self) -> float | None:
        """Ask for every partition that is due and in no request. Return the seconds until others are due."""
        if not self._unasked and not self._resting:
            return None
        if self._connection is None or self._connection.closed:
            host, port = self.address
            self._connection = await self._connections.open(
                self.leader_id,
                host,
                port,
                client_id=f"broker-{self._settings.broker_id}-fetcher",
                connect_timeout_s=CONNECT_TIMEOUT_S,
                request_timeout_s=self._settings.socket_timeout_s,
            )
            self._connection.on_lost(self._connection_lost)
            if self._broke_s is not None:
                self._broke_s = None
                self._found()
            self._slots = FollowerSlots()
        now_s = self._world.clock.monotonic()
        self._wake_rested(now_s)
        busy, quiet, later_s = [], [], [self._rested_s]
        for topic_partition, follow in self._unasked.items():
            if not follow.partition.may_fetch:
                continue
            quota = follow.partition.follower_quota
            if quota is not None and quota.is_exceeded and not follow.is_in_sync:
                later_s.append(quota.free_at_s)
            elif follow.is_busy:
                busy.append((topic_partition, follow))
            else:
                quiet.append((topic_partition, follow))
        of_busy = cut(busy, most_in_a_request(len(self._follows)))
        scheduled = schedule(
            of_busy + cut_by_size(quiet, lambda due: due[1].size),
            outstanding=len(self._requests),
            elapsed_ms=round((now_s - self._began_s) * 1_000),
            longest_wait_ms=self._longest_wait_ms,
        )
        for number, planned in enumerate(scheduled):
            self._send(planned, is_quiet=number >= len(of_busy))
        due_s = min(later_s)
        return due_s - now_s if due_s < math.inf else None

    def _wake_rested(self, now_s: float) -> None:
        if now_s < self._rested_s:
            return
        for topic_partition, follow in list(self._resting.items()):
            if follow.not_before_s <= now_s:
                self._unasked[topic_partition] = self._resting.pop(topic_partition)
        self._rested_s = min((follow.not_before_s for follow in self._resting.values()), default=math.inf)

    def _resize(self, request: _Request) -> None:
        """Let its partitions share requests with fewer others, or with more, as it ended."""
        if not request.is_quiet:
            return
        size = size_after(
            request.planned.piece.size,
            was_ended_by_records=any(follow.is_busy for follow in request.follows.values()),
            waited_longest=request.planned.is_longest,
            partitions=len(self._follows),
        )
        for follow in request.follows.values():
            follow.size = size

    def _send(self, planned: Planned[tuple[TopicPartition, _Follow]], *, is_quiet: bool) -> None:
        settings = self._settings
        follows = dict(planned.piece.partitions)
        by_topic: dict[str, FetchTopic] = {}
        for topic_partition, follow in follows.items():
            topic = by_topic.get(topic_partition.topic)
            if topic is None:
                topic_id = follow.partition.log.topic_id
                topic = by_topic[topic_partition.topic] = FetchTopic(topic_partition.topic, topic_id, [])
            topic.partitions.append(
                copying.next_fetch(follow.partition, settings.partition_max_bytes, suspect=follow.is_suspect)
            )
        topics = list(by_topic.values())
        slot, is_known = NO_SLOT, False
        if is_quiet:
            taken = {request.slot for request in self._requests}
            slot, is_known = self._slots.choose(list(follows.values()), topics, taken)
        request = FetchRequest(
            replica_id=settings.broker_id,
            max_wait_ms=planned.wait_ms,
            min_bytes=settings.min_bytes,
            max_bytes=settings.response_max_bytes,
            isolation_level=0,
            topics=[] if is_known else topics,
            replica_epoch=self._broker_epoch(),
            slot=slot,
        )
        assert self._connection is not None
        answer = self._connection.send(FETCH, request, timeout_s=settings.socket_timeout_s)
        answer.add_done_callback(lambda _: self._wake.set())
        self._requests.append(_Request(follows, answer, topics, slot, planned, is_quiet))
        for topic_partition in follows:
            del self._unasked[topic_partition]

    def _apply(self, asked: dict[TopicPartition, _Follow], response: FetchResponse) -> None:
        now_s = self._world.clock.monotonic()
        for topic in response.responses:
            for answer in topic.partitions:
                topic_partition = TopicPartition(topic.topic, answer.partition_index)
                follow = asked.get(topic_partition)
                if follow is None or self._follows.get(topic_partition) is not follow:
                    continue
                if follow.partition.leader_epoch != follow.leader_epoch:
                    continue
                try:
                    settled = self._apply_one(follow, answer)
                except LogInvariantViolated as error:
                    if not follow.is_suspect:
                        # Kafka's CRC does not cover where a batch says it is: first the leader looks at its own.
                        logger.warning("%s: asking leader %d to look again: %s", topic_partition, self.leader_id, error)
                        follow.is_suspect = True
                        self._let_rest(topic_partition, follow, now_s)
                        continue
                    self.remove(topic_partition)
                    self._set_aside(follow.partition, f"the log of its leader {self.leader_id} does not fit: {error}")
                    continue
                except BrokerError as error:
                    if error.code is ErrorCode.KAFKA_STORAGE_ERROR and not isinstance(error, Shortage):
                        self.remove(topic_partition)
                        continue
                    logger.error("%s from broker %d: %s", topic_partition, self.leader_id, error)
                    follow.is_suspect = error.code is ErrorCode.CORRUPT_MESSAGE
                    settled = False
                if settled:
                    follow.backoff_s = 0.0
                    follow.is_suspect = False
                else:
                    self._let_rest(topic_partition, follow, now_s)

    def _let_rest(self, topic_partition: TopicPartition, follow: _Follow, now_s: float) -> None:
        """Rounded up, so that those that were refused shortly after each other are asked for together."""
        longest_s = self._settings.backoff_s * follower_pace(len(self._follows))
        follow.backoff_s = min(max(2 * follow.backoff_s, FIRST_BACKOFF_S), longest_s)
        follow.not_before_s = math.ceil((now_s + follow.backoff_s) / FIRST_BACKOFF_S) * FIRST_BACKOFF_S
        self._unasked.pop(topic_partition, None)
        self._resting[topic_partition] = follow
        self._rested_s = min(self._rested_s, follow.not_before_s)

    def _apply_one(self, follow: _Follow, answer: FetchPartitionResponse) -> bool:
        """Return True if the next fetch may follow at once."""
        partition = follow.partition
        code = error_of(answer.error_code)
        if code is ErrorCode.NONE:
            end_before = partition.log.log_end_offset
            fetched = copying.apply_fetched(partition, answer)
            if partition.follower_quota is not None and not follow.is_in_sync:
                partition.follower_quota.record(len(answer.records))
            follow.lag = max(0, answer.high_watermark - partition.log.log_end_offset)
            follow.is_in_sync = not follow.lag
            follow.is_busy = fetched.appended or fetched.truncated_to is not None
            follow.has_appended |= fetched.appended
            if fetched.appended:
                # To the end of the next request, so that a flood here cannot starve the partitions behind it.
                self._unasked[partition.topic_partition] = self._unasked.pop(partition.topic_partition)
            if fetched.truncated_to is not None and fetched.truncated_to < end_before:
                logger.info(
                    "%s: truncated from %d to %d, where broker %d's log parts from it",
                    partition.topic_partition,
                    end_before,
                    fetched.truncated_to,
                    self.leader_id,
                )
                if follow.has_appended:
                    # This leader has less than it sent before. A batch may have got another offset, which no CRC covers
                    # in Kafka's format, so the leader should check.
                    follow.is_suspect = True
                    return False
            return not fetched.is_stuck
        if code is ErrorCode.OFFSET_OUT_OF_RANGE and copying.must_restart(partition, answer.log_start_offset):
            logger.warning(
                "%s: starting afresh at the leader's log start %d, since this log, %d to %d, cannot continue it",
                partition.topic_partition,
                answer.log_start_offset,
                partition.log.log_start_offset,
                partition.log.log_end_offset,
            )
            copying.restart(partition, answer)
            return True
        logger.debug("%s: broker %d answers %s", partition.topic_partition, self.leader_id, code.name)
        return False


def _needs_mending(failure: BaseException) -> bool:
    """The brokers do not accept each other as brokers of one cluster: that does not pass by itself."""
    if isinstance(failure, BrokerError):
        return failure.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return isinstance(failure, NotTrusted)

"""The client's view of the cluster, and the task that keeps it fresh: Kafka's Metadata.

Merging an answer into the view, a `Cluster`, is pure (`merged`). Answers come from brokers that learn of a change at
different times. So a partition's leader is never replaced by one of an older epoch (KIP-320), unless the topic's id
shows that it is another topic of the same name. And a topic is never replaced by an older one of its name, which a
broker that is cut off from the controller continues to describe (see `minibroker.protocol.topic_ids`).

Code that cannot proceed calls `request_refresh`, and its listener is called when something may have changed. The first
refresh is sent at once, since after a leader's crash everything waits for it. A broker that has lost the leader, too,
answers after the election, or after 150 ms. While anything is still stuck, or a lost broker is still named as a leader,
the pauses between refreshes double from 5 ms to 25 ms, and then are a tenth of the time that this has lasted: a
failover that takes 700 ms is seen 70 ms late, and a partition without a leader costs a request per second. A refresh
with news restarts that time, so that two failovers in a row do not count as one. Rejected: doubling without an end,
which had grown to half a second by the time most elections end.

Refreshes go to the broker with the fewest requests in flight among those that answered last time, and to the bootstrap
addresses when no broker answers. A broker that has not heard of a later controller does not replace that controller in
the view, since the epochs of controllers tell which one is the later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from minibroker.client.cluster.connections import Connections, Purpose
from minibroker.client.cluster.retries import exponential_backoff_s
from minibroker.client.cluster.unreachable import explained, reasons_of
from minibroker.client.log import Logger
from minibroker.client.settings import Address
from minibroker.client.stalls import Stalls
from minibroker.client.tasks import Pulse, Waker
from minibroker.protocol import messages as m
from minibroker.protocol.apis import METADATA, Api
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.model import NO_CONTROLLER, NO_EPOCH, NO_LEADER, TopicPartition
from minibroker.protocol.topic_ids import is_older
from minibroker.protocol.world import World

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)

logger = Logger("minibroker.client")

FIRST_ATTEMPT_TIMEOUT_S = 1.0
"""The timeout for one broker's answer, doubled after each round without answer. A stopped process accepts connections
and never answers, so the other brokers must be asked long before the request timeout."""

MIN_REFRESH_PAUSE_S = 0.005
SHORT_REFRESH_PAUSE_S = 0.025
"""The pauses double up to this one."""
MAX_REFRESH_PAUSE_S = 1.0
FORGIVEN_S = 10.0
"""A broker that did not answer is asked last for this long, and then like any other. The broker that answers instead
may be cut off from the others, and its metadata outdated."""
UNKNOWN_FOR_S = 1.0
"""A topic or partition that all brokers have not known for this long is not about to be created."""
FAILOVER_S = 0.3
"""After a connection broke, refreshes go on for this long while the broker at its other end is named as a leader, or
none is."""
CONTROLLER_KNOWN_FOR_S = 1.0
"""A client that prefers the controller's answers asks any broker this often whether there is a later controller: a
deposed one that is cut off does not know."""
CALM_S = 1.0
"""A refresh is considered a success if no other one is requested within this time."""


def refresh_pause_s(lasted_s: float) -> float:
    """Return the pause between two refreshes, by the time for which something has been stuck."""
    return min(max(lasted_s / 10, min(lasted_s, SHORT_REFRESH_PAUSE_S), MIN_REFRESH_PAUSE_S), MAX_REFRESH_PAUSE_S)


class Leader(NamedTuple):
    node_id: int
    epoch: int


class PartitionInfo(NamedTuple):
    leader: Leader
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]


class TopicInfo(NamedTuple):
    topic_id: str
    """Empty if brokers report none."""
    is_internal: bool
    partitions: dict[int, PartitionInfo]


class Cluster(NamedTuple):
    """The cluster as brokers described it (Kafka's Cluster). Immutable: `merged` returns a new one."""

    cluster_id: str | None = None
    controller_id: int = NO_CONTROLLER
    controller_epoch: int = NO_EPOCH
    brokers: dict[int, Address] = {}  # noqa: RUF012 (the default of an immutable NamedTuple)
    topics: dict[str, TopicInfo] = {}  # noqa: RUF012
    errors: dict[str, ErrorCode] = {}  # noqa: RUF012
    """The error of a topic in the last answer about it. Its older description stays in `topics`."""
    most_brokers: int = 1
    """The largest number of brokers so far, or of addresses from the user. If it is more than one, a broker that lists
    only itself may be cut off from the others."""

    def existing(self) -> dict[str, TopicInfo]:
        """Return the topics without those that are gone, and have only an older description."""
        gone = {name for name, code in self.errors.items() if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        return {name: info for name, info in self.topics.items() if name not in gone} if gone else self.topics

    def leader(self, topic: str, partition: int) -> Leader | None:
        """Return the leader, if it and its address are known."""
        info = self.topics.get(topic)
        found = None if info is None else info.partitions.get(partition)
        if found is None or found.leader.node_id not in self.brokers:
            return None
        return found.leader


def merged(cluster: Cluster, response: m.MetadataResponse) -> Cluster:
    """Return `cluster` updated by `response`. Topics that the response does not mention stay.

    If it is from another cluster, for instance one that was created anew at the same addresses, the old view is
    dropped.
    """
    if cluster.cluster_id and response.cluster_id and cluster.cluster_id != response.cluster_id:
        cluster = Cluster(most_brokers=cluster.most_brokers)
    topics = dict(cluster.topics)
    errors = dict(cluster.errors)
    for topic in response.topics:
        known = topics.get(topic.name)
        if known is not None and is_older(topic.topic_id, known.topic_id):
            continue
        error = error_of(topic.error_code)
        if error is not ErrorCode.NONE:
            errors[topic.name] = error
        else:
            errors.pop(topic.name, None)
        if topic.partitions:
            topics[topic.name] = _merged_topic(known, topic)
    brokers = {broker.node_id: Address(broker.host, broker.port) for broker in response.brokers}
    cluster_id = response.cluster_id or cluster.cluster_id
    most_brokers = max(cluster.most_brokers, len(brokers))
    controller = response.controller_id, response.controller_epoch
    if response.controller_epoch < cluster.controller_epoch:
        controller = cluster.controller_id, cluster.controller_epoch
    return Cluster(cluster_id, *controller, brokers or cluster.brokers, topics, errors, most_brokers)


def _merged_topic(known: TopicInfo | None, topic: m.MetadataTopic) -> TopicInfo:
    if known is None or (known.topic_id and topic.topic_id and known.topic_id != topic.topic_id):
        older: dict[int, PartitionInfo] = {}
    else:
        older = known.partitions
    partitions = dict(older)
    for partition in topic.partitions:
        before = older.get(partition.partition_index)
        leader = Leader(partition.leader_id, partition.leader_epoch)
        if before is not None and leader.epoch < before.leader.epoch:
            leader = before.leader
        partitions[partition.partition_index] = PartitionInfo(
            leader,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(partition.offline_replicas),
        )
    return TopicInfo(topic.topic_id, topic.is_internal, partitions)


def with_leader(cluster: Cluster, partition: TopicPartition, leader: Leader, topic_id: str = "") -> Cluster:
    """Return `cluster` after a broker's hint about the leader (KIP-951). It is unchanged if the hint is not new, or is
    about another topic of that name, since the leader epochs of two topics cannot be compared. An empty id is not
    checked."""
    topic = cluster.topics.get(partition.topic)
    info = None if topic is None else topic.partitions.get(partition.partition)
    if topic is None or info is None or leader.epoch <= info.leader.epoch or leader.node_id == NO_LEADER:
        return cluster
    if topic_id and topic_id != topic.topic_id:
        return cluster
    partitions = {**topic.partitions, partition.partition: info._replace(leader=leader)}
    return cluster._replace(topics={**cluster.topics, partition.topic: topic._replace(partitions=partitions)})


def is_confirmed(
    cluster: Cluster, partition: TopicPartition, leader: Leader, answers: Mapping[int, m.MetadataResponse]
) -> bool:
    """Return whether to believe `leader` if it contradicts the client's knowledge: no broker knows a later leader, and
    at least one other broker names the same one. A leader that was deposed while it was cut off does not know that, and
    a client that reaches only this leader would believe it (KIP-320). A single broker cannot be confirmed by another
    one; it is believed to be the only one unless there have been others, or the user named several.

    `answers` has the answer of each broker, by id. `cluster` has been merged with them.
    """
    if cluster.leader(*partition) != leader:
        return False
    if cluster.brokers.keys() == {leader.node_id} and cluster.most_brokers == 1:
        return True
    topic_id = cluster.topics[partition.topic].topic_id
    return any(
        Leader(entry.leader_id, entry.leader_epoch) == leader
        for node_id, answer in answers.items()
        if node_id != leader.node_id
        for topic in answer.topics
        if topic.name == partition.topic and topic.topic_id == topic_id
        for entry in topic.partitions
        if entry.partition_index == partition.partition
    )


def is_denied(cluster: Cluster, topic: str, topic_id: str | None, answers: Mapping[int, m.MetadataResponse]) -> bool:
    """Return whether to believe that a topic (with that id) does not exist: two brokers deny it, or the only broker
    does, and none knows it."""
    said = [
        _denies(entry, topic_id)
        for answer in answers.values()
        if answer.brokers
        for entry in answer.topics
        if entry.name == topic
    ]
    return False not in said and said.count(True) >= (1 if cluster.most_brokers == 1 else 2)


def _denies(entry: m.MetadataTopic, topic_id: str | None) -> bool | None:
    """Return whether a broker denies the topic. None: the broker does not say, because this client may not know; or it
    does not know itself. It has just started, and has not learned of all topics and partitions yet; or it is behind,
    and knows an earlier topic of that name."""
    if entry.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        return None
    if entry.error_code not in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE):
        return True
    if not entry.topic_id:
        return None
    if topic_id is None or entry.topic_id == topic_id:
        return False
    return None if is_older(entry.topic_id, topic_id) else True


def is_missing(
    cluster: Cluster, partition: TopicPartition, topic_id: str | None, answers: Mapping[int, m.MetadataResponse]
) -> bool:
    """As `is_denied`, for a partition: the topic does not exist, or has no such partition."""
    said = []
    for answer in answers.values():
        for entry in answer.topics if answer.brokers else ():
            if entry.name == partition.topic:
                denies = _denies(entry, topic_id)
                is_there = any(p.partition_index == partition.partition for p in entry.partitions)
                said.append(True if denies is False and not is_there else denies)
    return False not in said and said.count(True) >= (1 if cluster.most_brokers == 1 else 2)


class Metadata:
    """See the module. `listeners` are called after every refresh, successful or not, and after every hint."""

    def __init__(
        self,
        world: World,
        connections: Connections,
        bootstrap: Sequence[Address],
        *,
        request_timeout_s: float,
        retry_backoff_s: float,
        max_age_s: float,
    ) -> None:
        self._clock = world.clock
        self._random = world.random
        self._connections = connections
        self._bootstrap = tuple(bootstrap)
        self._request_timeout_s = request_timeout_s
        self._retry_backoff_s = retry_backoff_s
        self._max_age_s = max_age_s
        self._wanted: dict[str, None] = {}
        self._wants_all = False
        self._first_topics: dict[str, str] | None = None
        """Topic ids by name, in the first answer after all topics were wanted."""
        self._lookers: dict[str, int] = {}
        """The number of `wanted` blocks that are open for a topic."""
        self._waker = Waker()
        self._is_requested = False
        self._is_urgent = False
        """A topic was added that no refresh has asked for, so the next refresh needs no pause."""
        self._refreshed = Pulse()
        self._finished_at = self._clock.monotonic()
        """The time of the last refresh."""
        self._failed_rounds = 0
        """The number of rounds in a row in which no broker answered."""
        self._failed_at: dict[Address, float] = {}
        """Brokers that did not answer last time, and the time."""
        self.cluster = Cluster(most_brokers=len(self._bootstrap))
        self.last_error: NetworkError | None = None
        """The error of the last refresh; None if it succeeded."""
        self.listeners: list[Callable[[], None]] = []
        self.wrong_since: dict[str, float] = {}
        """Topics in `cluster.errors`, and since when."""

    def want(self, topic: str) -> None:
        """Ask for this topic in every refresh from now on, and at once."""
        if topic not in self._wanted:
            self._wanted[topic] = None
            self._is_urgent = True
            self.request_refresh()

    def want_all(self, is_wanted: bool) -> None:
        """Ask for all topics from now on, or stop that."""
        if is_wanted and not self._wants_all:
            self._is_urgent = True
            self.request_refresh()
        self._wants_all = is_wanted
        if not is_wanted:
            self._first_topics = None

    def unwant(self, topic: str) -> None:
        """Undo `want`, and forget the topic."""
        if self._wanted.pop(topic, ...) is None and topic not in self._lookers:
            self._forget(topic)

    @contextmanager
    def wanted(self, topics: Iterable[str]) -> Iterator[None]:
        """Ask for these topics in every refresh within this block. After the block, topics that nothing else wants are
        forgotten: otherwise a client that uses one topic after another would ask for all of them for ever."""
        names = dict.fromkeys(topics)
        for topic in names:
            self._lookers[topic] = self._lookers.get(topic, 0) + 1
            if topic not in self._wanted and self._lookers[topic] == 1:
                self._is_urgent = True
                self.request_refresh()
        try:
            yield
        finally:
            for topic in names:
                self._lookers[topic] -= 1
                if self._lookers[topic] == 0:
                    del self._lookers[topic]
                    if topic not in self._wanted:
                        self._forget(topic)

    def _forget(self, topic: str) -> None:
        topics = {name: info for name, info in self.cluster.topics.items() if name != topic}
        errors = {name: code for name, code in self.cluster.errors.items() if name != topic}
        self.cluster = self.cluster._replace(topics=topics, errors=errors)
        self.wrong_since.pop(topic, None)

    def _asked_for(self) -> list[str] | None:
        return None if self._wants_all else list(self._wanted | dict.fromkeys(self._lookers))

    def _learn_all(self, request: m.MetadataRequest, response: m.MetadataResponse) -> None:
        """Learn from the answer to `request`. If that was for all topics, the missing ones are gone, unless the broker
        has just started and knows no topics yet."""
        self._learn(response)
        if request.topics is not None or not response.brokers:
            return
        if self._wants_all and self._first_topics is None:
            self._first_topics = {topic.name: topic.topic_id for topic in response.topics}
        there = {topic.name for topic in response.topics}
        for topic in [topic for topic in self.cluster.topics if topic not in there]:
            if topic not in self._wanted and topic not in self._lookers:
                self._forget(topic)
        now = self._clock.monotonic()
        for topic in self._wanted | dict.fromkeys(self._lookers):
            if topic not in there:
                errors = {**self.cluster.errors, topic: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
                self.cluster = self.cluster._replace(errors=errors)
                self.wrong_since.setdefault(topic, now)

    def is_new(self, topic: str) -> bool:
        """Return whether the topic was created after all topics were wanted, as far as is known."""
        info, first = self.cluster.topics.get(topic), self._first_topics
        return info is not None and first is not None and first.get(topic) != info.topic_id

    def address(self, node_id: int) -> Address | None:
        return self.cluster.brokers.get(node_id)

    def request_refresh(self) -> None:
        """Refresh as soon as the pause after the last refresh allows. Frequent calls cost nothing."""
        self._is_requested = True
        self._waker.wake()

    async def from_controller(self, body: m.MetadataRequest, *, timeout_s: float) -> m.MetadataResponse:
        """Return the answer of the controller, or of another broker if the controller cannot be reached or is not
        known. Raises as `request_any` does.

        The controller knows of each change first. A broker that is cut off from it answers with an outdated state until
        one of the two is replaced."""
        deadline = self._clock.monotonic() + timeout_s
        if self._clock.monotonic() > self._finished_at + CONTROLLER_KNOWN_FOR_S:
            self.request_refresh()
        while True:
            epoch = self.cluster.controller_epoch
            response = await self.request_any(
                METADATA,
                body,
                timeout_s=max(0.0, deadline - self._clock.monotonic()),
                first=self.address(self.cluster.controller_id),
            )
            self._learn(replace(response, topics=[]))
            if self.cluster.controller_epoch <= epoch:
                return response

    async def refreshed(self) -> None:
        """Request a refresh, and wait until one has ended, successful or not."""
        self.request_refresh()
        await self._refreshed.wait()

    async def ask_everyone(self, topics: Collection[str]) -> dict[int, m.MetadataResponse]:
        """Ask all brokers about the topics at the same time, with a short timeout. Merge the answers into `cluster`,
        and return them by broker id."""

        async def ask(address: Address) -> m.MetadataResponse | None:
            try:
                async with asyncio.timeout(FIRST_ATTEMPT_TIMEOUT_S):
                    connection = await self._connections.open(address, Purpose.REQUESTS)
                    return await connection.request(METADATA, request, timeout_s=FIRST_ATTEMPT_TIMEOUT_S)
            except (TimeoutError, NetworkError, InvalidMessage, BrokerError):
                return None

        request = m.MetadataRequest(sorted(topics))
        asked = dict(self.cluster.brokers)
        answers = await asyncio.gather(*(ask(address) for address in asked.values()))
        said = {node_id: answer for node_id, answer in zip(asked, answers, strict=True) if answer is not None}
        for answer in said.values():
            self._learn(answer)
        self._tell()
        return said

    async def confirmed(self, leaders: Mapping[TopicPartition, Leader]) -> list[TopicPartition]:
        """Ask all brokers, and return the partitions whose leaders are confirmed (`is_confirmed`)."""
        answers = await self.ask_everyone({partition.topic for partition in leaders})
        return [
            partition for partition, leader in leaders.items() if is_confirmed(self.cluster, partition, leader, answers)
        ]

    async def missing(self, partitions: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """Ask all brokers, and return the partitions that certainly do not exist (`is_missing`). The values are topic
        ids; empty: any topic of that name. Wait for UNKNOWN_FOR_S first, since brokers learn of a new topic one after
        the other."""
        topics = {partition.topic for partition in partitions}
        with self.wanted(sorted(topics)):  # so that they are forgotten afterwards
            answers = await self.ask_everyone(topics)
        return [
            each for each, topic_id in partitions.items() if is_missing(self.cluster, each, topic_id or None, answers)
        ]

    def suspect(self, address: Address) -> None:
        """Ask other brokers first, since a connection to that broker broke."""
        self._failed_at[address] = self._clock.monotonic()

    def failed_at(self, address: Address) -> float:
        """Return when the broker last failed to answer; minus infinity if it did not, or has answered since."""
        return self._failed_at.get(address, float("-inf"))

    def learn_leader(self, partition: TopicPartition, leader: Leader, topic_id: str = "") -> None:
        """Learn the leader of a partition, in the topic of that id, from the answer to another request."""
        cluster = with_leader(self.cluster, partition, leader, topic_id)
        if cluster is not self.cluster:
            self.cluster = cluster
            self._tell()

    async def first_refresh(self, timeout_s: float, silence_timeout_s: float) -> None:
        """Connect to the cluster. Raises NetworkError naming every address and its error, after `silence_timeout_s` if
        an attempt got no answer, not even a refusal."""
        request = m.MetadataRequest(self._asked_for())
        response = await self.request_any(METADATA, request, timeout_s=timeout_s, silence_timeout_s=silence_timeout_s)
        self._learn_all(request, response)

    async def run(self) -> None:
        """Refresh on request, and when the view has become old. This is the task."""
        trouble_began = finished = self._finished_at = self._clock.monotonic()
        pause_s = 0.0
        while True:
            while not self._is_requested:
                age_s = self._clock.monotonic() - finished
                if age_s >= self._max_age_s:
                    break
                await self._waker.sleep(self._max_age_s - age_s)
            now = self._clock.monotonic()
            if now > finished + pause_s + CALM_S:
                trouble_began = now
            pause_s = refresh_pause_s(now - trouble_began)
            while not self._is_urgent and (now := self._clock.monotonic()) < finished + pause_s:
                await self._waker.sleep(finished + pause_s - now)
            self._is_requested = self._is_urgent = False
            before = self.cluster
            try:
                request = m.MetadataRequest(self._asked_for())
                self._learn_all(request, await self.request_any(METADATA, request))
                self.last_error = None
            except NetworkError as error:
                self.last_error = error
            except BrokerError as error:
                self.last_error = NetworkError(f"asking for metadata: {error}")
            finished = self._finished_at = self._clock.monotonic()
            if self.cluster != before:
                trouble_began = finished
            if self.last_error is None:
                self._is_requested |= self._awaits_election(finished)
            else:
                self._is_requested = True
                logger.debug("%s: %s", self._connections.client_id, self.last_error)
            self._refreshed.notify()
            self._tell()

    def _awaits_election(self, now: float) -> bool:
        """Return whether a broker was lost a moment ago, and a partition is still led by it or has no leader."""
        lost = {address for address, failed_at in self._failed_at.items() if now - failed_at < FAILOVER_S}
        leaders = {node_id for node_id, address in self.cluster.brokers.items() if address not in lost}
        return bool(lost) and any(
            partition.leader.node_id not in leaders
            for topic in self.cluster.topics.values()
            for partition in topic.partitions.values()
        )

    def _learn(self, response: m.MetadataResponse) -> None:
        self.cluster = merged(self.cluster, response)
        self._connections.advertised(
            {node_id: address for node_id, address in self.cluster.brokers.items() if address not in self._bootstrap}
        )
        now = self._clock.monotonic()
        for topic in response.topics:
            if topic.name in self.cluster.errors:
                self.wrong_since.setdefault(topic.name, now)
            else:
                self.wrong_since.pop(topic.name, None)

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

    async def request_any(
        self,
        api: Api[Request, Response],
        body: Request,
        *,
        timeout_s: float | None = None,
        silence_timeout_s: float | None = None,
        first: Address | None = None,
    ) -> Response:
        """Return the answer of the first broker that answers; `first` is asked first unless it has just failed. All are
        asked in rounds until `timeout_s` has passed; None: one round. After an attempt without any answer,
        `silence_timeout_s` applies instead. Raises NetworkError naming every address and its error, and BrokerError if
        a broker rejected the request."""
        began = self._clock.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        stalls: Stalls[str] = Stalls(self._connections.client_id)
        failures: dict[Address, Exception] = {}
        while True:
            candidates = self._candidates(first)
            timeout_of_one_s = min(
                self._request_timeout_s, FIRST_ATTEMPT_TIMEOUT_S * 2.0 ** min(self._failed_rounds, 10)
            )
            for index, address in enumerate(candidates):
                patience_s = timeout_of_one_s
                is_reached = False
                if deadline is not None:  # divide the remaining time between the brokers not asked yet
                    share_s = (deadline - self._clock.monotonic()) / (len(candidates) - index)
                    patience_s = min(patience_s, max(0.0, share_s))
                try:
                    async with asyncio.timeout(patience_s):
                        connection = await self._connections.open(address, Purpose.REQUESTS)
                        is_reached = True
                        response = await connection.request(api, body, timeout_s=timeout_of_one_s)
                except TimeoutError:
                    is_unanswered = True
                    if patience_s == timeout_of_one_s or address not in failures:  # an earlier error says more
                        text = f"{api.name} to {address}: no answer within {patience_s:.3g} s"
                        failures[address] = RequestTimedOut(text) if is_reached else NetworkError(text)
                except (NetworkError, InvalidMessage) as error:
                    is_unanswered = isinstance(error, RequestTimedOut)
                    failures[address] = error
                else:
                    self._failed_at.pop(address, None)
                    self._failed_rounds = 0
                    stalls.look(self._clock.monotonic(), (), str)
                    return response
                self.suspect(address)
                if is_unanswered and silence_timeout_s is not None:
                    deadline = began + silence_timeout_s
            self._failed_rounds += 1
            remaining_s = 0.0 if deadline is None else deadline - self._clock.monotonic()
            if remaining_s < SHORT_REFRESH_PAUSE_S:
                are_silent = any(isinstance(error, RequestTimedOut) for error in failures.values())
                error_type = RequestTimedOut if are_silent else NetworkError
                raise error_type(f"no broker answered {api.name}: {explained(failures)}")
            waiting = {api.name: f"no broker answers: {reasons_of(failures)}"}
            stalls.look(self._clock.monotonic(), waiting, waiting.__getitem__)
            pause_s = exponential_backoff_s(self._failed_rounds, self._retry_backoff_s, self._random)
            await asyncio.sleep(min(pause_s, remaining_s / 2))  # leave time for one more round

    def addresses(self) -> list[Address]:
        """Return all known addresses, the bootstrap addresses first."""
        return list(dict.fromkeys((*self._bootstrap, *self.cluster.brokers.values())))

    def _candidates(self, first: Address | None) -> list[Address]:
        """Return the brokers to ask, in order: `first` unless it did not answer last time, then those that answered
        last time and have few requests in flight; the bootstrap addresses last."""

        forgiven_s = self._clock.monotonic() - FORGIVEN_S

        def failed_at(address: Address) -> float:
            return max(self.failed_at(address), forgiven_s)

        brokers = sorted(
            dict.fromkeys(self.cluster.brokers.values()),
            key=lambda address: (failed_at(address), self._connections.in_flight(address), self._random.random()),
        )
        preferred = [first] if first in brokers and failed_at(first) == forgiven_s else []
        return list(dict.fromkeys((*preferred, *brokers, *sorted(self._bootstrap, key=failed_at))))

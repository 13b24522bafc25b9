"""Caches the brokers, topics and leaders of the controller's latest UpdateMetadata requests.

Every broker answers Metadata from this cache. It is eventually consistent: it trails the controller by a request, and
clients refresh and retry.
"""

from collections.abc import Collection, Generator, Iterable, Sequence, Set

import msgspec

from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    MetadataBroker,
    MetadataPartition,
    MetadataResponse,
    MetadataTopic,
    UpdateMetadataBroker,
    UpdateMetadataEndpoint,
    UpdateMetadataPartition,
    UpdateMetadataRequest,
)
from minibroker.protocol.model import (
    CONTROL_LISTENER,
    DEFAULT_LISTENER,
    INTERNAL_TOPICS,
    NO_CONTROLLER,
    NO_EPOCH,
    NO_LEADER,
    TopicPartition,
    topic_name_problem,
)

TOPIC_BYTES = 60
PARTITION_BYTES = 50
"""The size of a topic and of a partition in an answer to Metadata."""


class CachedTopic(msgspec.Struct):
    topic_id: str
    partitions: dict[int, UpdateMetadataPartition]
    num_partitions: int = 0
    """The number of partitions. A topic is hidden from clients until all of them are here: they arrive in several
    requests, and a client that knew only the first ones would put keys into the wrong partitions."""
    shown: int = 0
    """The number of partitions shown to clients: those that were here when the topic was last complete. Added
    partitions are shown once all of them are here."""


class MetadataCache:
    def __init__(self) -> None:
        self.controller_id = NO_CONTROLLER
        self.controller_epoch = NO_EPOCH
        self.cluster_id: str | None = None
        self._brokers: dict[int, UpdateMetadataBroker] = {}
        self.departed: dict[int, UpdateMetadataBroker] = {}
        """Brokers that have gone and are still remembered. Replaced on each change, never mutated."""
        self._topics: dict[str, CachedTopic] = {}
        self._names: dict[str, str] = {}
        """The names of the topics, by their ids."""
        self._told_in_broker_epoch = NO_EPOCH
        self._has_been_told_all = False
        """Whether all topics have arrived in this broker epoch. They come in many requests. Until the last one, an
        unknown topic may exist, and clients would believe two brokers that deny it."""
        self.told_all_epoch = NO_EPOCH
        """The epoch of the latest controller that has announced all topics in this broker epoch, as each does when it
        takes office."""

    def update(self, request: UpdateMetadataRequest) -> list[str]:
        """Apply a request of the current controller. Returns the topics in it.

        A broker that registers again receives all existing topics, but not the deletions that it has missed. The first
        request in a new broker epoch therefore clears the cache.
        """
        if request.broker_epoch != self._told_in_broker_epoch:
            self._told_in_broker_epoch = request.broker_epoch
            self._topics.clear()
            self._names.clear()
            self._has_been_told_all = False
            self.told_all_epoch = NO_EPOCH
        if request.names_the_last:
            self._has_been_told_all = True
            self.told_all_epoch = request.controller_epoch
        self.controller_id = request.controller_id
        self.controller_epoch = request.controller_epoch
        live = {broker.id: broker for broker in request.live_brokers}
        self.departed = {id: broker for id, broker in (self.departed | self._brokers).items() if id not in live}
        self._brokers = live
        for state in request.topic_states:
            topic = self._topics.get(state.topic_name)
            if topic is not None and (state.deleted or topic.topic_id != state.topic_id):
                del self._topics[state.topic_name]
                self._names.pop(topic.topic_id, None)
                topic = None
            if state.deleted:
                continue
            if topic is None:
                topic = self._topics[state.topic_name] = CachedTopic(state.topic_id, {})
                self._names[state.topic_id] = state.topic_name
            topic.num_partitions = state.num_partitions
            for partition in state.partition_states:
                topic.partitions[partition.partition_index] = partition
            if len(topic.partitions) >= topic.num_partitions:
                topic.shown = len(topic.partitions)
        return [state.topic_name for state in request.topic_states]

    def forget(self, departed: Sequence[UpdateMetadataBroker]) -> None:
        """Forget these departed brokers, except those that have returned and departed again."""
        self.departed = {
            id: broker for id, broker in self.departed.items() if not any(broker is each for each in departed)
        }

    def alive_epochs(self) -> dict[int, int]:
        """Return the broker epochs of the live brokers that are not stopping."""
        return {b.id: b.broker_epoch for b in self._brokers.values() if not b.is_shutting_down}

    def alive_epoch(self, broker_id: int) -> int | None:
        """Return the broker epoch of a live broker; None if it is not alive or is stopping."""
        broker = self._brokers.get(broker_id)
        return None if broker is None or broker.is_shutting_down else broker.broker_epoch

    def has_others_that_stay(self, broker_id: int) -> bool:
        """Return whether other live brokers exist that are not stopping."""
        return any(b.id != broker_id and not b.is_shutting_down for b in self._brokers.values())

    def endpoint(self, broker_id: int) -> UpdateMetadataEndpoint | None:
        """Return the data-plane endpoint of a broker for other brokers; None if it is not alive."""
        broker = self._brokers.get(broker_id)
        data = [] if broker is None else [e for e in broker.endpoints if e.listener != CONTROL_LISTENER]
        return data[0] if data else None  # a broker registers the listener for other brokers first

    def listener_at(self, broker_id: int, host: str, port: int) -> str | None:
        """Return the name of a broker's listener with this address; None if it is not known."""
        broker = self._brokers.get(broker_id)
        endpoints = [] if broker is None else broker.endpoints
        return next((e.listener for e in endpoints if (e.host, e.port) == (host, port)), None)

    def control_endpoint(self, broker_id: int) -> UpdateMetadataEndpoint | None:
        """Return the endpoint of a broker for control requests; None if it is not alive."""
        broker = self._brokers.get(broker_id)
        endpoints = {} if broker is None else {endpoint.listener: endpoint for endpoint in broker.endpoints}
        return endpoints.get(CONTROL_LISTENER) or endpoints.get(DEFAULT_LISTENER)

    def topic_id(self, topic: str) -> str | None:
        cached = self._topics.get(topic)
        return None if cached is None else cached.topic_id

    def denies(self, topic: str) -> bool:
        """Return whether there is no topic of that name, as far as this broker knows."""
        return topic not in self._topics and self._has_been_told_all

    def topic_with_id(self, topic_id: str) -> str | None:
        """Return the name of the topic with this id, or None."""
        return self._names.get(topic_id)

    def partition_count(self, topic: str) -> int:
        """Return the number of partitions shown to clients; 0 if the topic is unknown or incomplete."""
        cached = self._topics.get(topic)
        return 0 if cached is None else cached.shown

    def partitions_in_all(self) -> int:
        return sum(topic.num_partitions for topic in self._topics.values())

    def listeners(self, broker_id: int) -> list[str]:
        """Return the names of a broker's registered listeners; none if it is not alive."""
        broker = self._brokers.get(broker_id)
        return [] if broker is None else [endpoint.listener for endpoint in broker.endpoints]

    def listener_endpoint(self, broker_id: int, listener: str) -> UpdateMetadataEndpoint | None:
        """Return the broker's endpoint for clients of that listener; None if it is not alive or lacks that listener."""
        broker = self._brokers.get(broker_id)
        endpoints = [] if broker is None else broker.endpoints
        return next((endpoint for endpoint in endpoints if endpoint.listener == listener), None)

    def node(self, broker_id: int, listener: str) -> MetadataBroker | None:
        """Return the broker as in a Metadata answer to a client of that listener; None as for `listener_endpoint`."""
        endpoint = self.listener_endpoint(broker_id, listener)
        if endpoint is None:
            return None
        return MetadataBroker(broker_id, endpoint.host, endpoint.port, self._brokers[broker_id].rack)

    def partition(self, topic_partition: TopicPartition) -> UpdateMetadataPartition | None:
        topic = self._topics.get(topic_partition.topic)
        return None if topic is None else topic.partitions.get(topic_partition.partition)

    def has_fewer_partitions(self, topic_partition: TopicPartition) -> bool:
        """Return whether the topic is known and lacks this partition."""
        topic = self._topics.get(topic_partition.topic)
        return topic is not None and topic_partition.partition >= topic.num_partitions

    def has_leaders(self, topic: str, partitions: int) -> bool:
        """Return whether the topic has at least this many partitions, each with a live leader."""
        cached = self._topics.get(topic)
        return (
            cached is not None
            and len(cached.partitions) >= partitions
            and all(p.leader in self._brokers for p in cached.partitions.values())
        )

    def awaiting_elections(self, lost: Set[int], topics: Iterable[str]) -> list[str]:
        """Return the topics with a partition whose leader is one of the `lost` brokers, or has gone from the cluster,
        while another broker of its ISR is here to be elected."""
        here = self._brokers.keys() - lost
        return [
            name
            for name in dict.fromkeys(topics)
            if (topic := self._topics.get(name)) is not None
            and any(
                partition.leader not in here and partition.leader >= 0 and not here.isdisjoint(partition.isr)
                for partition in topic.partitions.values()
            )
        ]

    def has_an_answer(self, topics: Iterable[str] | None) -> bool:
        """Return whether this broker knows enough of the cluster to describe these topics; None: all of them. A broker
        that has just started knows nothing until the controller's first requests have arrived."""
        return bool(self._brokers) if topics is not None else self._has_been_told_all

    def missing(self, topics: Iterable[str]) -> list[str]:
        """Return the names that a topic may have and none has, as far as this broker knows."""
        if not self._has_been_told_all:
            return []
        return [name for name in dict.fromkeys(topics) if name not in self._topics and topic_name_problem(name) is None]

    def size_of_answer(self, topics: Collection[str] | None, topic_ids: Sequence[str]) -> int:
        """Return about how many bytes `describe` of these topics takes in an answer."""
        if topics is None:
            return PARTITION_BYTES * self.partitions_in_all()
        named = [self._topics.get(name) for name in (*topics, *(self._names.get(id, "") for id in topic_ids))]
        partitions = sum(topic.num_partitions for topic in named if topic is not None)
        return TOPIC_BYTES * len(named) + PARTITION_BYTES * partitions

    def describe(
        self,
        topics: Iterable[str] | None,
        listener: str = DEFAULT_LISTENER,
        topic_ids: Sequence[str] = (),
        *,
        with_departed: bool = False,
        lost_leaders: Collection[int] = (),
    ) -> Generator[None, None, MetadataResponse]:
        """Return the answer to a Metadata request of a client of that listener, with a step for each topic. Brokers are
        those of the first step, and no other is named as a leader.

        - `topics`: None for all topics. Unknown topics are listed with their error code.
        - `topic_ids`: topics requested by their ids.
        - Brokers are given with their endpoint of the same listener, because the client may be unable to reach any
          other (for example from outside of the containers' network); brokers without that listener are left out.
        - `with_departed`: also list brokers that have gone. A client that connects to one is refused; no partition is
          led by one.
        - `lost_leaders`: brokers that are alive here but must not be named as leaders.

        While `has_an_answer` is false, no brokers are named. minibroker's clients do not accept that as an answer.
        """
        brokers = []
        named = self._brokers | self.departed if with_departed else self._brokers
        for broker in named.values() if self.has_an_answer(topics) else ():
            endpoint = next((e for e in broker.endpoints if e.listener == listener), None)
            if endpoint is not None:
                brokers.append(MetadataBroker(broker.id, endpoint.host, endpoint.port, broker.rack))
        led_by = self._brokers.keys() - lost_leaders
        described = []
        for name in sorted(self._topics) if topics is None else dict.fromkeys(topics):
            described.append(self._describe_topic(name, led_by))
            yield
        for topic_id in dict.fromkeys(topic_ids):
            described.append(self._describe_by_id(topic_id, led_by))
            yield
        return MetadataResponse(
            throttle_time_ms=0,
            brokers=brokers,
            cluster_id=self.cluster_id,
            controller_id=self.controller_id,
            topics=described,
            controller_epoch=self.controller_epoch,
        )

    def _describe_by_id(self, topic_id: str, led_by: Set[int]) -> MetadataTopic:
        name = self._names.get(topic_id)
        if name is None:
            return MetadataTopic(ErrorCode.UNKNOWN_TOPIC_ID, "", topic_id, False, [])
        return self._describe_topic(name, led_by)

    def _describe_topic(self, name: str, led_by: Set[int]) -> MetadataTopic:
        cached = self._topics.get(name)
        if cached is None:
            return MetadataTopic(self._why_unknown(name), name, "", name in INTERNAL_TOPICS, [])
        if not cached.shown:
            return MetadataTopic(ErrorCode.LEADER_NOT_AVAILABLE, name, cached.topic_id, name in INTERNAL_TOPICS, [])
        partitions = []
        for index, state in sorted(cached.partitions.items())[: cached.shown]:
            alive = state.leader in led_by
            partitions.append(
                MetadataPartition(
                    error_code=ErrorCode.NONE if alive else ErrorCode.LEADER_NOT_AVAILABLE,
                    partition_index=index,
                    leader_id=state.leader if alive else NO_LEADER,
                    leader_epoch=state.leader_epoch,
                    replica_nodes=state.replicas,
                    isr_nodes=state.isr,
                    offline_replicas=[
                        b for b in state.replicas if b not in self._brokers or b in state.offline_replicas
                    ],
                )
            )
        return MetadataTopic(ErrorCode.NONE, name, cached.topic_id, name in INTERNAL_TOPICS, partitions)

    def _why_unknown(self, name: str) -> ErrorCode:
        if topic_name_problem(name) is not None:
            return ErrorCode.INVALID_TOPIC_EXCEPTION
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if self._has_been_told_all else ErrorCode.LEADER_NOT_AVAILABLE

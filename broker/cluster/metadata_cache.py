"""What the controller's UpdateMetadata requests last said: brokers, topics, leaders. Every broker answers from it.

Eventually right: it trails the controller by a request, and clients refresh and retry.
"""

from collections.abc import Collection, Iterable, Sequence, Set

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


class CachedTopic(msgspec.Struct):
    topic_id: str
    partitions: dict[int, UpdateMetadataPartition]
    num_partitions: int = 0
    """How many there are. Until all of them are here the topic is not shown to clients: its partitions come in
    several requests, and a client that took the first ones for all would put keys into the wrong partitions."""
    shown: int = 0
    """How many there were when last all of them were here. Where some are added to a topic, those are shown until all
    the new ones are here."""


class MetadataCache:
    def __init__(self) -> None:
        self.controller_id = NO_CONTROLLER
        self.controller_epoch = NO_EPOCH
        self.cluster_id: str | None = None
        self._brokers: dict[int, UpdateMetadataBroker] = {}
        self.departed: dict[int, UpdateMetadataBroker] = {}
        """No longer alive, and not forgotten yet. Replaced when one comes or goes, never changed."""
        self._topics: dict[str, CachedTopic] = {}
        self._names: dict[str, str] = {}
        """Of these topics, by their ids."""
        self._told_in_broker_epoch = NO_EPOCH
        self._has_been_told_all = False
        """In this broker epoch. Topics come in many requests: until the last of them, one that is unknown here may
        exist all the same, and two brokers that deny it would be believed."""
        self.told_all_epoch = NO_EPOCH
        """Of the latest controller that has named all topics there are, in this broker epoch. Each one does when it
        takes office."""

    def update(self, request: UpdateMetadataRequest) -> list[str]:
        """Take over a request that was found to be from the present controller. Returns the topics it spoke of.

        A broker that has registered again is told of every topic there is, but not of those that were deleted while it
        was away: so the first request in a new broker epoch begins a new picture.
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
        """But not one that has come back since, and departed again."""
        self.departed = {
            id: broker for id, broker in self.departed.items() if not any(broker is each for each in departed)
        }

    def alive_epochs(self) -> dict[int, int]:
        """The live brokers that are not about to stop, and the epochs of their present runs."""
        return {b.id: b.broker_epoch for b in self._brokers.values() if not b.is_shutting_down}

    def alive_epoch(self, broker_id: int) -> int | None:
        """The broker epoch of a live broker's present run; None where it is not alive, or is about to stop."""
        broker = self._brokers.get(broker_id)
        return None if broker is None or broker.is_shutting_down else broker.broker_epoch

    def has_others_that_stay(self, broker_id: int) -> bool:
        """Live brokers besides this one that are not about to stop."""
        return any(b.id != broker_id and not b.is_shutting_down for b in self._brokers.values())

    def endpoint(self, broker_id: int) -> UpdateMetadataEndpoint | None:
        """Where other brokers send it what is no order; None where it is not alive."""
        broker = self._brokers.get(broker_id)
        data = [] if broker is None else [e for e in broker.endpoints if e.listener != CONTROL_LISTENER]
        return next((e for e in data if e.listener == DEFAULT_LISTENER), data[0] if data else None)

    def control_endpoint(self, broker_id: int) -> UpdateMetadataEndpoint | None:
        """Where a broker takes orders, and a controller what only brokers may ask; None where it is not alive."""
        broker = self._brokers.get(broker_id)
        endpoints = {} if broker is None else {endpoint.listener: endpoint for endpoint in broker.endpoints}
        return endpoints.get(CONTROL_LISTENER) or endpoints.get(DEFAULT_LISTENER)

    def topic_id(self, topic: str) -> str | None:
        cached = self._topics.get(topic)
        return None if cached is None else cached.topic_id

    def topic_with_id(self, topic_id: str) -> str | None:
        """Its name."""
        return self._names.get(topic_id)

    def partition_count(self, topic: str) -> int:
        """As clients see it; 0 where the topic is not known, or not all of it yet."""
        cached = self._topics.get(topic)
        return 0 if cached is None else cached.shown

    def listeners(self, broker_id: int) -> list[str]:
        """Those with which a broker is registered; none where it is not alive."""
        broker = self._brokers.get(broker_id)
        return [] if broker is None else [endpoint.listener for endpoint in broker.endpoints]

    def listener_endpoint(self, broker_id: int, listener: str) -> UpdateMetadataEndpoint | None:
        """Where a client that came by that listener finds a broker; None where it is not alive, or has none of it."""
        broker = self._brokers.get(broker_id)
        endpoints = [] if broker is None else broker.endpoints
        return next((endpoint for endpoint in endpoints if endpoint.listener == listener), None)

    def node(self, broker_id: int, listener: str) -> MetadataBroker | None:
        """A broker as clients are told of it that came by that listener; None as for `listener_endpoint`."""
        endpoint = self.listener_endpoint(broker_id, listener)
        if endpoint is None:
            return None
        return MetadataBroker(broker_id, endpoint.host, endpoint.port, self._brokers[broker_id].rack)

    def partition(self, topic_partition: TopicPartition) -> UpdateMetadataPartition | None:
        topic = self._topics.get(topic_partition.topic)
        return None if topic is None else topic.partitions.get(topic_partition.partition)

    def has_fewer_partitions(self, topic_partition: TopicPartition) -> bool:
        """The topic is known, and has no partition of that number."""
        topic = self._topics.get(topic_partition.topic)
        return topic is not None and topic_partition.partition >= topic.num_partitions

    def has_leaders(self, topic: str, partitions: int) -> bool:
        """There are this many partitions, and each has a live leader."""
        cached = self._topics.get(topic)
        return (
            cached is not None
            and len(cached.partitions) >= partitions
            and all(p.leader in self._brokers for p in cached.partitions.values())
        )

    def led_by(self, brokers: Set[int], topics: Iterable[str]) -> list[str]:
        """Of the topics, those with a partition that one of the brokers leads and is alive."""
        leaders = brokers & self._brokers.keys()
        if not leaders:
            return []
        return [
            name
            for name in dict.fromkeys(topics)
            if (topic := self._topics.get(name)) is not None
            and any(partition.leader in leaders for partition in topic.partitions.values())
        ]

    def describe(
        self,
        topics: Iterable[str] | None,
        listener: str = DEFAULT_LISTENER,
        topic_ids: Sequence[str] = (),
        *,
        with_departed: bool = False,
        lost_leaders: Collection[int] = (),
    ) -> MetadataResponse:
        """The answer to a Metadata request that came in by that listener; None: all topics. `topic_ids`: of topics that
        are asked for by their ids. Unknown ones get their error code. Brokers are given with their endpoint of the same
        listener, since a client that asks there can perhaps reach no other (a host outside of the containers' network,
        say); brokers that lack it are left out. `with_departed`: those are named, too, which leads to nothing but a
        refused connection, as no partition is said to be led by one. `lost_leaders`: brokers that are alive here, and
        not named as leaders all the same.

        Until this broker has been told of all topics, a request for all of them is answered with those that it knows
        and without brokers: as from a broker that has just started, a client does not take that for an answer."""
        brokers = []
        has_an_answer = topics is not None or self._has_been_told_all
        named = self._brokers | self.departed if with_departed else self._brokers
        for broker in named.values() if has_an_answer else ():
            endpoint = next((e for e in broker.endpoints if e.listener == listener), None)
            if endpoint is not None:
                brokers.append(MetadataBroker(broker.id, endpoint.host, endpoint.port, broker.rack))
        names = sorted(self._topics) if topics is None else list(dict.fromkeys(topics))
        return MetadataResponse(
            throttle_time_ms=0,
            brokers=brokers,
            cluster_id=self.cluster_id,
            controller_id=self.controller_id,
            topics=[self._describe_topic(name, lost_leaders) for name in names]
            + self._describe_by_ids(topic_ids, lost_leaders),
            controller_epoch=self.controller_epoch,
        )

    def _describe_by_ids(self, topic_ids: Sequence[str], lost_leaders: Collection[int]) -> list[MetadataTopic]:
        return [
            self._describe_topic(self._names[topic_id], lost_leaders)
            if topic_id in self._names
            else MetadataTopic(ErrorCode.UNKNOWN_TOPIC_ID, "", topic_id, False, [])
            for topic_id in dict.fromkeys(topic_ids)
        ]

    def _describe_topic(self, name: str, lost_leaders: Collection[int]) -> MetadataTopic:
        cached = self._topics.get(name)
        if cached is None:
            return MetadataTopic(self._why_unknown(name), name, "", name in INTERNAL_TOPICS, [])
        if not cached.shown:
            return MetadataTopic(ErrorCode.LEADER_NOT_AVAILABLE, name, cached.topic_id, name in INTERNAL_TOPICS, [])
        partitions = []
        for index, state in sorted(cached.partitions.items())[: cached.shown]:
            alive = state.leader in self._brokers and state.leader not in lost_leaders
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

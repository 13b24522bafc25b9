"""A cluster for tests of the controller: simulated ZooKeeper, network and time, and brokers that only obey.

An `ObedientBroker` is a broker as the controller sees it: a registration, a control listener, and a memory of the
requests received. It refuses stale epochs as a broker must. An `Office` is one process with a `Controller` and as much
of an election around it as is needed to take office and to resign.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from minibroker.broker.replication.isr import Follower, proposal
from minibroker.controller.controller import Controller, ControllerSettings
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import ProcessSession, Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import (
    APIS,
    LEADER_AND_ISR,
    UPDATE_METADATA,
    decode_request,
    decode_request_envelope,
    encode_response,
)
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.framing import FrameReader, request_limit
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatableAssignment, CreatableConfig, CreatableTopic
from minibroker.protocol.model import (
    CONTROL_LISTENER,
    DEFAULT_LISTENER,
    NO_LEADER,
    Endpoint,
    LeaderAndIsr,
    RegisteredBroker,
    TopicPartition,
    min_insync_replicas,
)
from minibroker.protocol.world import (
    Check,
    Create,
    Delete,
    Incoming,
    NodeExists,
    NoNode,
    SetData,
    WatchEvent,
    ZooKeeperError,
)

SESSION_TIMEOUT_MS = 6_000
CONTROL_PORT = 9091
DATA_PORT = 9092
LENGTH_BYTES = 4
"""Of the length before each frame."""
PATIENCE_S = 60.0

T = TypeVar("T")


def simulate(scenario: Callable[[Cluster], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    """Run a test on virtual time."""
    kept: list[Cluster] = []  # so that no killed process is garbage before the loop has closed it

    async def main() -> None:
        kept.append(Cluster())
        await scenario(kept[0])

    run(main(), seed=seed)


class Told(NamedTuple):
    """One request received by a broker."""

    api: str
    body: Any


class ObedientBroker:
    """A broker that obeys. `answer` may be replaced: it gets a request and returns the response, or None."""

    def __init__(self, cluster: Cluster, broker_id: int) -> None:
        self.id = broker_id
        self.cluster = cluster
        self.world: VirtualWorld | None = None
        self.session: ProcessSession | None = None
        self.epoch = -1
        self.controller_epoch = 0
        self.told: list[Told] = []
        """The requests received by all its runs, in order."""
        self.roles: dict[TopicPartition, m.LeaderAndIsrPartition] = {}
        """Replicas that LeaderAndIsr gave this run and StopReplica did not take back."""
        self.topics: dict[str, dict[int, m.UpdateMetadataPartition]] = {}
        """Partition states that UpdateMetadata gave this run."""
        self._metadata_epoch = -1
        self.live_brokers: dict[int, int] = {}
        """Ids and epochs of the last UpdateMetadata."""
        self.deleted: list[TopicPartition] = []
        self.trusted_since = 0
        """The trust that it registers with."""
        self.log_ends: dict[TopicPartition, tuple[int, int]] = {}
        """Last epoch and log end offset that it reports of replicas without a leader; the default is (-1, 0)."""
        self.answer: Callable[[Told], m.Message | None] = self.obey
        self._registration = asyncio.Lock()

    async def start(self) -> None:
        """Start a new process: listen, then register."""
        self.world = self.cluster.simulation.host(f"broker-{self.id}").start_process()
        self.controller_epoch = 0
        self._registration = asyncio.Lock()  # a killed process may hold the former port
        self.roles.clear()
        self.topics.clear()
        await self.world.process.run(self._start(self.world))

    async def _start(self, world: VirtualWorld) -> None:
        listener = await world.network.listen("0.0.0.0", CONTROL_PORT)
        listener.start(lambda incoming: self._accept(world, incoming))
        self.session = await world.zookeeper.connect("zookeeper:2181", SESSION_TIMEOUT_MS, 5_000)
        await self._register()

    async def _register(self) -> None:
        """Create the registration, replace an existing one, and restore it whenever another session removes it."""
        assert self.session is not None
        host = f"broker-{self.id}"
        endpoints = [Endpoint(CONTROL_LISTENER, host, CONTROL_PORT), Endpoint(DEFAULT_LISTENER, host, DATA_PORT)]
        path = znodes.broker_path(self.id)
        async with self._registration:
            while True:
                with suppress(NoNode):
                    await self.session.delete(path)  # left behind by an earlier run
                with suppress(NodeExists):
                    data = znodes.encode_broker(endpoints, None, 0, self.trusted_since)
                    await self.session.create(path, data, ephemeral=True)
                with suppress(NoNode):
                    _, stat = await self.session.get(path, self._registration_changed)
                    self.epoch = stat.czxid
                    return

    def _registration_changed(self, _: WatchEvent) -> None:
        if not self._registration.locked():
            assert self.world is not None
            self.world.process.start(self._register(), name=f"registration of broker {self.id}")

    def _accept(self, world: VirtualWorld, incoming: Incoming) -> None:
        world.process.start(incoming.attach(lambda: _Served(self.serve)), name=f"connection of broker {self.id}")

    async def bounce(self) -> None:
        """Register again without a restart, as after a lost session."""
        assert self.world is not None
        await self.world.process.run(self._register())

    def kill(self) -> None:
        """Stop as SIGKILL does: connections break at once, the session lives on for its timeout."""
        assert self.world is not None
        self.world.process.kill()

    @property
    def led(self) -> set[TopicPartition]:
        return {partition for partition, role in self.roles.items() if role.leader == self.id}

    async def change_isr(self, partition: TopicPartition, isr: Sequence[int]) -> None:
        """Write an ISR as a leader does: a conditional write, then a notification. A broker joins in its present
        epoch."""
        assert self.world is not None
        await self.world.process.run(self._change_isr(partition, isr))

    async def _change_isr(self, partition: TopicPartition, isr: Sequence[int]) -> None:
        assert self.session is not None
        role = self.roles[partition]
        known = LeaderAndIsr(
            self.id,
            role.leader_epoch,
            tuple(role.isr),
            role.controller_epoch,
            role.partition_epoch,
            tuple(role.isr_epochs),
            tuple(role.eligible),
            tuple(role.eligible_epochs),
            role.to_commit,
        )
        followers = {b.id: Follower(broker_epoch=b.epoch) for b in self.cluster.brokers.values()}
        state = proposal(known, isr, followers, min_insync_replicas(None, len(role.replicas)))
        stat = await self.session.set(znodes.state_path(partition), znodes.encode_state(state), role.partition_epoch)
        role.partition_epoch, role.isr, role.isr_epochs = stat.version, list(isr), list(state.isr_epochs)
        role.eligible, role.eligible_epochs = list(state.eligible), list(state.eligible_epochs)
        data = znodes.encode_isr_change([partition])
        await self.session.create(znodes.ISR_CHANGE_PREFIX, data, sequence=True)

    # -- obedience --

    def serve(self, envelope: m.RequestEnvelope, frame_bytes: int) -> m.Message | None:
        api = APIS[envelope.api_key]
        told = Told(api.name, decode_request(api, envelope))
        self.told.append(told)
        return self.answer(told)

    def obey(self, told: Told) -> m.Message:
        body = told.body
        stale = ErrorCode.NONE
        if body.controller_epoch < self.controller_epoch:
            stale = ErrorCode.STALE_CONTROLLER_EPOCH
        elif body.broker_epoch < self.epoch:
            stale = ErrorCode.STALE_BROKER_EPOCH
        else:
            self.controller_epoch = body.controller_epoch
        match body:
            case m.LeaderAndIsrRequest():
                return m.LeaderAndIsrResponse(stale, [] if stale else self._take_roles(body))
            case m.StopReplicaRequest():
                return m.StopReplicaResponse(stale, [] if stale else self._delete_replicas(body))
            case m.UpdateMetadataRequest():
                if not stale:
                    self._take_metadata(body)
                return m.UpdateMetadataResponse(stale)
            case _:
                raise AssertionError(body)

    def _take_roles(self, body: m.LeaderAndIsrRequest) -> list[m.PartitionError]:
        errors = []
        for topic in body.topic_states:
            for state in topic.partition_states:
                partition = TopicPartition(topic.topic_name, state.partition_index)
                known = self.roles.get(partition)
                newer = known is None or (state.leader_epoch, state.partition_epoch) >= (
                    known.leader_epoch,
                    known.partition_epoch,
                )
                if newer:
                    self.roles[partition] = state
                answer = m.PartitionError(*partition, ErrorCode.NONE)
                if state.leader == NO_LEADER:
                    answer.leader_epoch = state.leader_epoch
                    answer.last_epoch, answer.log_end_offset = self.log_ends.get(partition, (-1, 0))
                errors.append(answer)
        return errors

    def _delete_replicas(self, body: m.StopReplicaRequest) -> list[m.PartitionError]:
        errors = []
        for topic in body.topic_states:
            for state in topic.partition_states:
                partition = TopicPartition(topic.topic_name, state.partition_index)
                self.roles.pop(partition, None)
                if state.delete_partition:
                    self.deleted.append(partition)
                errors.append(m.PartitionError(*partition, ErrorCode.NONE))
        return errors

    def _take_metadata(self, body: m.UpdateMetadataRequest) -> None:
        if body.broker_epoch != self._metadata_epoch:
            # The first request of a registration has the full state: topics that it does not name were deleted.
            self.topics.clear()
            self._metadata_epoch = body.broker_epoch
        self.live_brokers = {broker.id: broker.broker_epoch for broker in body.live_brokers}
        for topic in body.topic_states:
            if topic.deleted:
                self.topics.pop(topic.topic_name, None)
            for state in topic.partition_states:
                self.topics.setdefault(topic.topic_name, {})[state.partition_index] = state


class CountingBroker(ObedientBroker):
    """A broker that agrees to every order and only counts them, for clusters that are too large to remember all."""

    requests = 0
    received_bytes = 0

    def serve(self, envelope: m.RequestEnvelope, frame_bytes: int) -> m.Message:
        self.requests += 1
        self.received_bytes += frame_bytes + LENGTH_BYTES
        api = APIS[envelope.api_key]
        if api is UPDATE_METADATA:
            return m.UpdateMetadataResponse(ErrorCode.NONE)
        errors = [
            m.PartitionError(topic.topic_name, state.partition_index, ErrorCode.NONE)
            for topic in decode_request(api, envelope).topic_states
            for state in topic.partition_states
        ]
        return (m.LeaderAndIsrResponse if api is LEADER_AND_ISR else m.StopReplicaResponse)(ErrorCode.NONE, errors)


class _Served(asyncio.BufferedProtocol):
    """`serve` gets each request, with the bytes of its frame, and returns the response, or None."""

    def __init__(self, serve: Callable[[m.RequestEnvelope, int], m.Message | None]) -> None:
        self._serve = serve
        self._reader = FrameReader(request_limit(1 << 30, frozenset()))
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.buffer_updated(nbytes):
            envelope = decode_request_envelope(frame)
            answer = self._serve(envelope, len(frame))
            if answer is not None:
                self._transport.write(encode_response(envelope.correlation_id, answer))


class Office:
    """A process that can hold office. `resigned` has the reasons for which it resigned by itself."""

    def __init__(self, cluster: Cluster, broker_id: int, settings: ControllerSettings | None = None) -> None:
        self.cluster = cluster
        cluster.offices.append(self)
        self.broker_id = broker_id
        self.world = cluster.simulation.host(f"office-{broker_id}").start_process()
        self.entries: list[dict[str, Any]] = []
        self.resigned: list[str] = []
        self.watched: list[tuple[int, ...]] = []
        self.refused: Callable[[Sequence[RegisteredBroker]], Awaitable[Collection[int]]] = self._probe
        self.check_config: Callable[[Mapping[str, str]], str | None] = _check_config
        self.controller = Controller(
            self.world,
            settings or ControllerSettings(num_partitions=1, default_replication_factor=3),
            broker_id,
            connections=BrokerConnections(self.world, broker_id, None),
            probe=lambda brokers: self.refused(brokers),
            validate_config=lambda values: self.check_config(values),
            read_defaults=lambda session: asyncio.sleep(0),
            on_brokers_changed=lambda brokers: self.watched.append(tuple(broker.id for broker in brokers)),
            request_resign=self._give_up,
            timeline_sink=self.entries.append,
        )
        self._session: ProcessSession | None = None
        self.epoch = -1

    @property
    def session(self) -> VirtualSession:
        assert self._session is not None
        return self._session.virtual

    async def take_office(self) -> None:
        """Win the election; waits until `/controller` is free."""
        await self.world.process.run(self._take_office())

    async def _take_office(self) -> None:
        if self._session is None:
            self._session = await self.world.zookeeper.connect("zookeeper:2181", SESSION_TIMEOUT_MS, 5_000)
        await self.cluster.until(lambda: not self.cluster.zookeeper.has(znodes.CONTROLLER))
        data, stat = await self._session.get(znodes.CONTROLLER_EPOCH)
        self.epoch = znodes.decode_controller_epoch(data) + 1
        results = await self._session.multi(
            [
                Create(znodes.CONTROLLER, znodes.encode_controller(self.broker_id, 0), ephemeral=True),
                SetData(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(self.epoch), stat.version),
            ]
        )
        assert results
        await self.controller.take_office(self._session, self.epoch, stat.version + 1)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Call a function of the controller in its process."""
        return await self.world.process.run(coroutine)

    async def create(
        self, name: str, *assignments: tuple[int, ...], config: dict[str, str] | None = None
    ) -> m.CreatableTopicResult:
        """Create a topic with this assignment."""
        topic = CreatableTopic(
            name,
            assignments=[CreatableAssignment(p, list(replicas)) for p, replicas in enumerate(assignments)],
            configs=[CreatableConfig(key, value) for key, value in (config or {}).items()],
        )
        [result] = await self.run(self.controller.create_topics([topic]))
        return result

    async def delete(self, *names: str) -> list[m.DeletableTopicResult]:
        return await self.run(self.controller.delete_topics(dict.fromkeys(names, "")))

    def suspect(self, broker: ObedientBroker) -> None:
        self.controller.suspect(broker.id, broker.epoch, "its connection was refused")

    async def idle(self) -> None:
        """Wait until the controller has handled every event raised so far."""
        await self.run(self.controller.create_topics([]))

    def kill(self) -> None:
        self.world.process.kill()

    async def _probe(self, brokers: Sequence[RegisteredBroker]) -> Collection[int]:
        refused = []
        for broker in brokers:
            endpoint = broker.endpoint(CONTROL_LISTENER)
            assert endpoint is not None
            try:
                connection = await self.world.network.connect(endpoint.host, endpoint.port, asyncio.Protocol)
            except OSError:
                refused.append(broker.id)
            else:
                del connection
        return refused

    def _give_up(self, reason: str) -> None:
        self.resigned.append(reason)
        self.world.process.start(self._resign(reason))

    async def _resign(self, reason: str) -> None:
        assert self._session is not None
        stat = self.cluster.zookeeper.stat(znodes.CONTROLLER_EPOCH)
        with suppress(ZooKeeperError):
            if self.cluster.controller_epoch() == self.epoch:
                await self._session.multi([Check(znodes.CONTROLLER_EPOCH, stat.version), Delete(znodes.CONTROLLER)])
        await self.controller.resign(reason)


def _check_config(values: Mapping[str, str]) -> str | None:
    return next((f"{name} is no topic setting" for name in values if "." not in name), None)


class Cluster:
    """The simulated world of one test."""

    def __init__(self) -> None:
        self.simulation = Simulation()
        self.zookeeper = self.simulation.zookeeper
        for path in znodes.PERSISTENT_PATHS:
            self.zookeeper.make(path)
        self.zookeeper.make(znodes.CONTROLLER_EPOCH, znodes.encode_controller_epoch(0))
        self.brokers: dict[int, ObedientBroker] = {}
        self.offices: list[Office] = []

    async def start_brokers(self, broker_ids: Iterable[int]) -> None:
        for broker_id in broker_ids:
            self.brokers[broker_id] = ObedientBroker(self, broker_id)
            await self.brokers[broker_id].start()

    async def start(self, broker_ids: Iterable[int]) -> Office:
        """Brokers, and a controller with the id 100."""
        await self.start_brokers(broker_ids)
        return await self.elect(100)

    async def elect(self, broker_id: int) -> Office:
        office = Office(self, broker_id)
        await office.take_office()
        return office

    async def until(self, condition: Callable[[], object], what: str = "", every_s: float = 0.001) -> None:
        """Let virtual time pass until the condition holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not condition():
            if loop.time() > deadline:
                raise AssertionError(f"it does not come true within {PATIENCE_S} virtual seconds: {what}")
            await asyncio.sleep(every_s)

    def controller_epoch(self) -> int:
        return znodes.decode_controller_epoch(self.zookeeper.data(znodes.CONTROLLER_EPOCH))

    def state(self, partition: TopicPartition) -> LeaderAndIsr:
        """Return the state that ZooKeeper holds."""
        path = znodes.state_path(partition)
        return znodes.decode_state(partition, self.zookeeper.data(path), self.zookeeper.stat(path).version)

    def leader_and_isr(self, partition: TopicPartition) -> tuple[int, tuple[int, ...]]:
        """Return leader and ISR; (-2, ()) if there is no state yet."""
        if not self.zookeeper.has(znodes.state_path(partition)):
            return -2, ()
        state = self.state(partition)
        return state.leader, state.isr

    async def has(self, partition: TopicPartition, leader: int, isr: Sequence[int]) -> None:
        """Wait until ZooKeeper, and every live broker, has that leader and ISR."""

        def everywhere() -> bool:
            if self.leader_and_isr(partition) != (leader, tuple(isr)):
                return False
            state = self.state(partition)
            for broker in self.brokers.values():
                if broker.world is None or not broker.world.process.alive:
                    continue
                known = broker.topics.get(partition.topic, {}).get(partition.partition)
                if known is None or (known.leader, known.leader_epoch) != (leader, state.leader_epoch):
                    return False
                if known.isr != list(isr):
                    return False
            return True

        await self.until(everywhere, f"{partition} has leader {leader} and ISR {list(isr)} everywhere")

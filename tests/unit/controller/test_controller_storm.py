"""Random events at once: rules that hold at every write, and rules that hold when the storm is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random

import pytest

from minibroker.controller.handlers import steps
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.messages import CreatePartitionsTopic
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.world import Check, Create, Operation, SessionState, SetData, ZooKeeperError
from tests.simulation.seeds import every_seed
from tests.unit.controller.cluster import Cluster, ObedientBroker, Office, simulate

BROKERS = (1, 2, 3, 4)
TOPICS = ("alpha", "beta", "gamma")
STEPS = 400
MOST_PARTITIONS = 10_000
HARM = (
    *("kill",) * 3,
    *("start",) * 4,
    *("start_without_memory",) * 2,
    *("isr",) * 10,
    *("create",) * 4,
    *("enlarge",) * 4,
    *("scribble",) * 2,
    *("delete", "bounce", "slander", "suspend", "suspend", "depose", "expire", "mute", "wait"),
)


class Storm:
    """Harms a cluster, and watches every write of a state znode."""

    def __init__(self, cluster: Cluster, random: Random) -> None:
        self.cluster = cluster
        self.random = random
        self.office: Office | None = None
        self.states: dict[tuple[TopicPartition, int], LeaderAndIsr] = {}
        self.next_office = 100
        self.running: set[asyncio.Task[None]] = set()
        self.problems: list[str] = []
        self.enlarged: dict[str, int] = {}
        """The possible numbers of partitions of each enlarged topic, by topic id."""
        cluster.zookeeper.before = self._maybe_cut
        cluster.zookeeper.after = self._watch_write

    # -- rules at every write --

    def _watch_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        by_controller = session.owner.startswith("office")
        if by_controller and operations[0].path != znodes.CONTROLLER:
            guarded = isinstance(operations[0], Check) and operations[0].path == znodes.CONTROLLER_EPOCH
            recreated = isinstance(operations[0], Create) and operations[0].path in znodes.PERSISTENT_PATHS
            self._expect(guarded or recreated, f"{operations} is not guarded by the controller's epoch")
        for operation in operations:
            if operation.path.endswith("/state") and isinstance(operation, Create | SetData):
                topic, _, number, _ = operation.path.removeprefix(znodes.TOPICS + "/").split("/")
                self._watch_state(TopicPartition(topic, int(number)), by_controller)
            if by_controller and isinstance(operation, SetData) and operation.path.count("/") == 3:
                itself = any(isinstance(o, Check) and o.path.startswith(f"{operation.path}/id-") for o in operations)
                self._expect(itself or "/config/" in operation.path, f"{operations} may hit another topic of that name")
        self._maybe_cut(session, operations)

    def _watch_state(self, partition: TopicPartition, by_controller: bool) -> None:
        now = self.cluster.state(partition)
        incarnation = self.cluster.zookeeper.stat(znodes.topic_path(partition.topic)).czxid
        before = self.states.get((partition, incarnation))
        self.states[partition, incarnation] = now
        self._expect(now.isr, f"{partition}: the ISR is empty")
        self._expect(now.leader == NO_LEADER or now.leader in now.isr, f"{partition}: {now} has a foreign leader")
        self._expect(now.controller_epoch <= self.cluster.controller_epoch(), f"{partition}: {now} is from the future")
        if before is None:
            self._expect(now.leader_epoch == 0, f"{partition}: begins with {now}")
            return
        self._expect(now.controller_epoch >= before.controller_epoch, f"{partition}: {before} -> {now}: epoch fell")
        self._expect(now.leader_epoch == before.leader_epoch + by_controller, f"{partition}: {before} -> {now}: epoch")
        if now.leader not in (before.leader, NO_LEADER):
            on_record = (*before.isr, *before.eligible)
            self._expect(
                now.leader in on_record, f"{partition}: {before} -> {now} elects a broker that may lack records"
            )
        if by_controller:
            known = (before.isr, (now.leader,))  # the second: one that was eligible
            grew = not any(set(now.isr) <= set(isr) for isr in known)
            foreign = not {*now.isr, *now.eligible} <= {*before.isr, *before.eligible}
            self._expect(not (grew or foreign), f"{partition}: {before} -> {now}: a broker joined")

    def _expect(self, condition: object, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def _maybe_cut(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        """Lose the connection before or after a write is carried out: the reply is lost either way."""
        if session.owner.startswith("office") and self.random.random() < 0.03:
            session.suspend(requests_arrive=self.random.random() < 0.5)
            self._later(self.random.uniform(0.01, 2), session.resume)

    def _later(self, delay_s: float, what: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(delay_s, what)

    # -- harm --

    def _alive(self) -> list[ObedientBroker]:
        return [b for b in self.cluster.brokers.values() if b.world is not None and b.world.process.alive]

    def _dead(self) -> list[ObedientBroker]:
        return [b for b in self.cluster.brokers.values() if b.world is None or not b.world.process.alive]

    async def step(self) -> None:
        kind = self.random.choice(HARM)
        alive, dead = self._alive(), self._dead()
        match kind:
            case "kill" if len(alive) > 1:
                broker = self.random.choice(alive)
                if self.random.random() < 0.5:
                    self._spawn(self._change_an_isr(alive))
                broker.kill()
                if self.office is not None and self.random.random() < 0.7:
                    self.office.suspect(broker)
            case "start" if dead:
                await self.random.choice(dead).start()
            case "start_without_memory" if dead:
                broker = self.random.choice(dead)
                broker.trusted_since = znodes.SINCE_THIS_REGISTRATION
                await broker.start()
                broker.trusted_since = broker.epoch
            case "bounce" if alive:
                with suppress(ZooKeeperError):
                    await self.random.choice(alive).bounce()
            case "slander" if alive and self.office is not None:
                self.office.suspect(self.random.choice(alive))
            case "isr":
                self._spawn(self._change_an_isr(alive))
            case "create":
                self._spawn(self._create())
            case "delete":
                self._spawn(self._delete())
            case "enlarge":
                self._spawn(self._enlarge())
            case "scribble":
                self._scribble(self.random.choice(TOPICS))
            case "suspend" if self.office is not None:
                self.office.session.suspend()
                self._later(self.random.uniform(0.1, 9), self.office.session.resume)
            case "depose" if self.office is not None:
                self.office.kill()
                self.office = None
            case "expire" if self.office is not None:
                self.office.session.expire()
            case "mute" if alive:
                broker = self.random.choice(alive)
                broker.answer = lambda told: None
                self._later(self.random.uniform(0.1, 3), lambda: setattr(broker, "answer", broker.obey))
            case _:
                pass
        await asyncio.sleep(self.random.choice([0, 0, 0, 0.001, 0.002, 0.01, 0.1, 1]))
        await self.keep_a_controller()

    async def keep_a_controller(self) -> None:
        """Give a vacant office to a live broker, as `Leadership` does."""
        if self.office is not None and (
            self.office.session.state is SessionState.EXPIRED or not self.office.world.process.alive
        ):
            self.office.kill()
            self.office = None
        if self.office is not None and not self.office.controller.is_active:
            self.office.kill()
            self.office = None
        if self.office is None and not self.cluster.zookeeper.has(znodes.CONTROLLER):
            self.next_office += 1
            self.office = Office(self.cluster, self.next_office)
            try:
                await self.office.take_office()
            except ZooKeeperError:
                self.office.kill()
                self.office = None

    async def _change_an_isr(self, alive: list[ObedientBroker]) -> None:
        """Let a leader add a live broker to the ISR or drop one, if its version is still current."""
        leaders = [broker for broker in alive if broker.led]
        if not leaders:
            return
        leader = self.random.choice(leaders)
        partition = self.random.choice(sorted(leader.led))
        known = {broker.id for broker in alive}
        others = [b for b in leader.roles[partition].replicas if b in known and b != leader.id]
        isr = [
            b
            for b in leader.roles[partition].replicas
            if b == leader.id or (b in others and self.random.random() < 0.7)
        ]
        with suppress(ZooKeeperError, ProcessKilled):
            await leader.change_isr(partition, isr)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _create(self) -> None:
        replicas = [tuple(self.random.sample(BROKERS, self.random.choice([1, 2, 3]))) for _ in range(3)]
        count = min(len(r) for r in replicas)
        with suppress(BrokerError, ProcessKilled):
            if self.office is not None:
                await self.office.create(self.random.choice(TOPICS), *(r[:count] for r in replicas))

    async def _enlarge(self) -> None:
        """Delete a topic by id: the request may come late or repeatedly."""
        topic = self.random.choice(TOPICS)
        known = self._znode(topic)
        if known is None:
            return
        present = len(known.partitions)
        request = CreatePartitionsTopic(topic, present + self.random.choice([0, 1, 2]), None, known.topic_id, present)
        for _ in range(self.random.choice([1, 1, 3])):
            await asyncio.sleep(self.random.choice([0, 0, 0.01, 1]))
            with suppress(BrokerError, ProcessKilled):
                if self.office is not None:
                    await self.office.run(self.office.controller.create_partitions([request]))
            now = self._znode(topic)
            if now is not None and now.topic_id != known.topic_id:
                grew = self.enlarged.get(now.topic_id, 3) < len(now.partitions)
                self._expect(not grew, f"{now} was made with 3 partitions, and more were asked for another topic")
                return
            self.enlarged[known.topic_id] = MOST_PARTITIONS

    def _scribble(self, topic: str) -> None:
        """Add a partition to the topic's znode by hand."""
        known = self._znode(topic)
        if known is None:
            return
        self.enlarged[known.topic_id] = MOST_PARTITIONS
        more = {len(known.partitions): tuple(self.random.sample(BROKERS, len(known.partitions[0])))}
        partitions = known.partitions | more
        self.cluster.zookeeper.make(
            znodes.topic_path(topic), znodes.encode_topic(znodes.TopicZnode(known.topic_id, partitions))
        )

    def _znode(self, topic: str) -> znodes.TopicZnode | None:
        path = znodes.topic_path(topic)
        has = self.cluster.zookeeper.has(path)
        return znodes.decode_topic(topic, self.cluster.zookeeper.data(path)) if has else None

    async def _delete(self) -> None:
        with suppress(BrokerError, ProcessKilled):
            if self.office is not None:
                await self.office.delete(self.random.choice(TOPICS))

    # -- after the storm --

    async def heal(self) -> None:
        self.cluster.zookeeper.before = None
        self.random = Random(1)
        self.random.random = lambda: 1.0  # type: ignore[method-assign]
        await asyncio.sleep(15)
        for broker in self._dead():
            await broker.start()
        for _ in range(20):
            await self.keep_a_controller()
            await asyncio.sleep(1)

    def unhealed(self) -> str | None:
        """Return the first rule that does not hold yet, or None."""
        zookeeper = self.cluster.zookeeper
        if zookeeper.names(znodes.DELETE_TOPICS):
            return f"still to be deleted: {zookeeper.names(znodes.DELETE_TOPICS)}"
        if zookeeper.names(znodes.ISR_CHANGES):
            return "ISR changes that the controller has not read"
        topics = zookeeper.names(znodes.TOPICS)
        for topic in topics:
            assignment = znodes.decode_topic(topic, zookeeper.data(znodes.topic_path(topic))).partitions
            for number, replicas in assignment.items():
                partition = TopicPartition(topic, number)
                if not zookeeper.has(znodes.state_path(partition)):
                    return f"{partition} was never created"
                state = self.cluster.state(partition)
                if state.leader == NO_LEADER:
                    return f"{partition} has no leader: {state}"
                for broker in self.cluster.brokers.values():
                    known = broker.topics.get(topic, {}).get(number)
                    told = broker.roles.get(partition)
                    if known is None or (known.leader, known.leader_epoch) != (state.leader, state.leader_epoch):
                        return f"broker {broker.id} believes {known} of {partition}, which is {state}"
                    if broker.id in replicas and (told is None or told.leader_epoch != state.leader_epoch):
                        return f"broker {broker.id} was told {told} of {partition}, which is {state}"
        for broker in self.cluster.brokers.values():
            if sorted(broker.topics) != topics:
                return f"broker {broker.id} knows {sorted(broker.topics)}, there are {topics}"
            if sorted({partition.topic for partition in broker.roles} - set(topics)):
                return f"broker {broker.id} has replicas of deleted topics: {sorted(broker.roles)}"
        return None


@every_seed(range(20))
def test_whatever_happens_no_write_is_wrong_and_all_is_well_in_the_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # in parts as small as these topics
        monkeypatch.setattr(steps, "PARTITIONS_AT_ONCE", 2)

    async def scenario(cluster: Cluster) -> None:
        await cluster.start_brokers(BROKERS)
        storm = Storm(cluster, Random(seed))
        await storm.keep_a_controller()
        for _ in range(STEPS):
            await storm.step()
            assert not storm.problems
        await storm.heal()
        await cluster.until(lambda: storm.unhealed() is None, "healed", every_s=1)
        assert not storm.problems
        illegal = [entry for office in cluster.offices for entry in office.entries if "illegal_moves" in entry]
        assert not illegal

    simulate(scenario, seed)

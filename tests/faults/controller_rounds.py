"""Kill the controller in the middle of an administrator's operation, round after round; check how the operation ends.

    python -m tests.faults.controller_rounds --rounds 5 [--kinds creation,deletion,...] [--json FILE]

Each kind of operation first runs once without a fault, which measures how long it takes. Each round starts it again
and kills the controller's process with SIGKILL after a different part of that time. The administrator repeats a request
that is refused for now or whose outcome is unknown, and never repeats an accepted one. In every second round the broker
is restarted at once. In the others the remaining brokers first have a while on their own, in which they must do all
that they can. At the end every broker must show the requested result, and its disk must hold nothing else. Throughout,
a producer writes with acks=all to one topic per kind (3 partitions, 3 replicas). Exit code 1 unless all operations
ended as requested and no record was lost, duplicated, out of order or altered.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import (
    ConfigChange,
    ConfigErrors,
    ConfigResource,
    describe_request,
    described,
)
from minibroker.client.errors import PartitionErrors, TopicErrors
from minibroker.client.producer import Producer
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import AllBrokers, BrokerId
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import PATIENCE_S, Trial, TrialVerdict, patience
from minibroker.protocol.apis import DESCRIBE_CONFIGS, METADATA, Api
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.messages import Message, MetadataPartition, MetadataRequest
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world.real import RealNetwork

BROKERS = 3
PARTITIONS = 3
RECORDS_PER_SECOND = 1_000
_MOVED_RECORDS = 300
_MOVED_VALUE_BYTES = 10_000
"""The least number of bytes in each partition when it is reassigned."""
_RECORDS_PER_SECOND_WHILE_MOVED = 60
SETTINGS = {
    # Only the requested election may move a leader.
    "auto.leader.rebalance.enable": "false",
    # A reassignment then takes about a second, which leaves time to kill the controller.
    "follower.replication.throttled.rate": "1500000",
}

ALONE_S = 2.0
"""How long the other brokers have before the killed broker is restarted."""
STOPPED_WITHIN_S = 20.0
"""Limit for a controlled shutdown: at most 15 s to hand over its leaderships, then the flush of its files."""
ASK_TIMEOUT_S = 5.0
LONGEST_SPREAD_S = 1.0
_ACKNOWLEDGED_BETWEEN = 50
"""Records that every partition must acknowledge before each kill."""
_LOOK_EVERY_S = 0.05
_REPEAT_AFTER_S = 0.2

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Look = Callable[[], Awaitable[str | None]]
"""Returns a description of the problem, or None."""
JudgePartitions = Callable[[list[MetadataPartition]], str | None]


class NotAsAsked(Exception):
    """An operation did not end as requested."""


def trial_on(stage: Stage, topic: str, value_bytes: int = 0) -> Trial:
    values = ((b"%d of %s" % (number, topic.encode())).ljust(value_bytes, b"-") for number in itertools.count())
    return Trial(stage.cluster.bootstrap(), topic, PARTITIONS, values, records_per_second=RECORDS_PER_SECOND)


async def acknowledged(trial: Trial, more: int) -> None:
    async with patience(f"not every partition of {trial.topic} accepted writes; it did not recover"):
        await trial.wait_for_acknowledgements(more, PATIENCE_S)


async def verdict_of(trial: Trial) -> TrialVerdict:
    async with patience(f"the records of {trial.topic} could not be read back"):
        return await trial.verdict()


class Stage(NamedTuple):
    """The cluster on which operations run."""

    cluster: LocalCluster
    admin: Admin

    def brokers(self) -> dict[int, int]:
        """The port of each broker, by broker id."""
        return {entry.id: entry.port for entry in self.cluster.file().brokers}

    async def ask(self, broker_id: int, api: Api[Request, Response], request: Request) -> Response:
        """Send the request to this broker, whether or not it is the right one. Raises MinibrokerError."""
        port = self.brokers()[broker_id]
        connection = await open_connection(
            RealNetwork(), LOOPBACK, port, client_id="controller-rounds", timeout_s=ASK_TIMEOUT_S
        )
        try:
            return await connection.request(api, request, timeout_s=ASK_TIMEOUT_S)
        finally:
            connection.close()
            await connection.wait_closed()

    async def on_every_broker(self, topic: str, judge: JudgePartitions, *, except_for: int | None = None) -> str | None:
        """Judge each broker's metadata of the topic (no partitions if it does not know the topic); return the first
        problem."""
        for broker_id in self.brokers():
            if broker_id == except_for:
                continue
            answer = await self.ask(broker_id, METADATA, MetadataRequest([topic]))
            problem = judge(sorted(answer.topics[0].partitions, key=lambda state: state.partition_index))
            if problem is not None:
                return f"broker {broker_id} on {topic}: {problem}"
        return None

    def log_dirs(self, broker_id: int, topic: str) -> set[str]:
        """The names of the directories of the topic's replicas, including those about to be removed."""
        return {path.name for path in self.cluster.directory.glob(f"broker-{broker_id}/{topic}-*")}

    def logged_errors(self) -> list[str]:
        """Lines of the brokers' logs that only a bug explains."""
        return [
            f"broker {broker_id}: {line}"
            for broker_id in self.brokers()
            for line in self.cluster.log_of(broker_id).read_text(errors="replace").splitlines()
            if " ERROR " in line or line.lstrip().startswith("Traceback")
        ]

    async def whole(self, topic: str) -> ClusterView:
        """Wait until all brokers know each other and a controller, and each reports all replicas of the topic in sync;
        return the view of the cluster."""
        brokers = sorted(self.brokers())
        async with patience(f"a broker is missing, or a replica of {topic} out of its ISR; it did not recover"):
            while True:
                view = await asyncio.to_thread(self.cluster.view)
                if (
                    sorted(view.brokers) == brokers
                    and view.controller_id is not None
                    and await self._is_in_sync_everywhere(topic)
                ):
                    return view
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _is_in_sync_everywhere(self, topic: str) -> bool:
        try:
            return await self.on_every_broker(topic, lambda found: problem_of(found, PARTITIONS, BROKERS)) is None
        except MinibrokerError:
            return False


def problem_of(found: Sequence[MetadataPartition], partitions: int, replicas: int) -> str | None:
    """Return None if there are this many partitions, each with a leader and this many replicas, all in sync."""
    if len(found) != partitions:
        return f"{len(found)} partitions instead of {partitions}"
    for state in found:
        if len(state.replica_nodes) != replicas or sorted(state.isr_nodes) != sorted(state.replica_nodes):
            return f"partition {state.partition_index}: replicas {state.replica_nodes}, ISR {state.isr_nodes}"
        if state.leader_id not in state.isr_nodes:
            return f"partition {state.partition_index} is led by {state.leader_id}"
    return None


class Operation(ABC):
    """An administrator's operation on `topic`, which no other operation uses."""

    refused_for_now: frozenset[ErrorCode] = frozenset()
    """Errors for a missing broker, after which the request is repeated as after a retriable error."""
    done_before: frozenset[ErrorCode] = frozenset()
    """Errors of a repeated request which show that an earlier attempt, whose answer was lost, succeeded."""
    goes_on_when_accepted = False
    """Whether the answer only confirms that the operation has begun or is recorded."""

    def __init__(self, stage: Stage, topic: str) -> None:
        self.stage = stage
        self.topic = topic
        self.victim: int | None = None
        """The controller's id if this round kills it."""

    @abstractmethod
    async def prepare(self) -> None:
        """Create the topics and records that the operation needs, while all brokers are alive."""

    @abstractmethod
    async def ask(self) -> None:
        """Send the request. Raises MinibrokerError, and NotAsAsked if the answer is not true."""

    @abstractmethod
    async def problem(self) -> str | None:
        """Describe the first difference from the requested result, None if there is none. May raise MinibrokerError."""

    async def problem_alone(self) -> str | None:
        """Like `problem`, for the part of an accepted operation that must be done while the victim is dead."""
        return None

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        """Keep up the operation's own load around a round. Raises NotAsAsked if a record was lost."""
        yield

    async def clean_up(self) -> None:
        await self.stage.admin.delete_topic(self.topic)

    async def _write(self, partitions: int) -> None:
        """Write a record to each partition."""
        async with Producer(self.stage.cluster.bootstrap(), acks="all") as producer:
            for partition in range(partitions):
                producer.send(self.topic, b"a record", partition=partition)
            await producer.flush()


class Creation(Operation):
    refused_for_now = frozenset({ErrorCode.INVALID_REPLICATION_FACTOR})
    done_before = frozenset({ErrorCode.TOPIC_ALREADY_EXISTS})

    async def prepare(self) -> None:
        pass

    async def ask(self) -> None:
        await self.stage.admin.create_topic(self.topic, partitions=PARTITIONS, replication_factor=BROKERS)

    async def problem(self) -> str | None:
        found = await self.stage.on_every_broker(self.topic, lambda found: problem_of(found, PARTITIONS, BROKERS))
        if found is None:
            await self._write(PARTITIONS)
        return found


class Deletion(Operation):
    """A deletion, then a new topic of the same name. It has one replica, so a missing broker does not prevent it."""

    done_before = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})
    _is_gone = False

    async def prepare(self) -> None:
        await self.stage.admin.create_topic(self.topic, partitions=PARTITIONS, replication_factor=BROKERS)
        await self._write(PARTITIONS)

    async def ask(self) -> None:
        if not self._is_gone:
            await self.stage.admin.delete_topic(self.topic)
            self._is_gone = True
        try:
            await self.stage.admin.create_topic(self.topic, partitions=1, replication_factor=1)
        except BrokerError as error:
            if error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                raise NotAsAsked(f"the deletion was confirmed, but the name is still in use: {error}") from error
            raise

    async def problem(self) -> str | None:
        found: list[MetadataPartition] = []

        def judge(partitions: list[MetadataPartition]) -> str | None:
            found[:] = partitions
            return problem_of(partitions, 1, 1)

        problem = await self.stage.on_every_broker(self.topic, judge)
        if problem is not None:
            return problem
        for broker_id in self.stage.brokers():
            expected = {f"{self.topic}-0"} if broker_id in found[0].replica_nodes else set()
            there = self.stage.log_dirs(broker_id, self.topic)
            if there != expected:
                return f"broker {broker_id} has {sorted(there)} instead of {sorted(expected)}"
        ends = await self.stage.admin.list_offsets({TopicPartition(self.topic, 0): "latest"})
        end = ends[TopicPartition(self.topic, 0)]
        return None if end is not None and end.offset == 0 else f"the new topic has records: {end}"


class Reassignment(Operation):
    """Each partition has two replicas, and each replica moves to the next broker, while a producer writes to the
    partitions."""

    refused_for_now = frozenset({ErrorCode.INVALID_REPLICA_ASSIGNMENT})
    goes_on_when_accepted = True

    async def prepare(self) -> None:
        ids = sorted(self.stage.brokers())
        before = [[ids[(number + place) % BROKERS] for place in range(2)] for number in range(PARTITIONS)]
        self._targets = {
            number: [ids[(ids.index(broker) + 1) % BROKERS] for broker in replicas]
            for number, replicas in enumerate(before)
        }
        throttled = {"follower.replication.throttled.replicas": "*"}
        await self.stage.admin.create_topic(self.topic, assignments=before, configs=throttled)

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        trial = trial_on(self.stage, self.topic, _MOVED_VALUE_BYTES)
        stop = asyncio.Event()

        async def send() -> None:
            async with trial.sending():
                await stop.wait()

        sending = asyncio.create_task(send())
        try:
            await acknowledged(trial, _MOVED_RECORDS)
            trial.records_per_second = _RECORDS_PER_SECOND_WHILE_MOVED
            yield
        finally:
            stop.set()
            await sending
        verdict = await verdict_of(trial)
        if not verdict.flawless:
            raise NotAsAsked(f"the records written to the moving partitions: {verdict}")

    async def ask(self) -> None:
        await self.stage.admin.alter_partition_reassignments(
            {TopicPartition(self.topic, number): target for number, target in self._targets.items()}
        )

    async def problem(self) -> str | None:
        problem = await self.stage.on_every_broker(self.topic, self._judge)
        if problem is not None:
            return problem
        for broker_id in self.stage.brokers():
            expected = {f"{self.topic}-{number}" for number, ids in self._targets.items() if broker_id in ids}
            there = self.stage.log_dirs(broker_id, self.topic)
            if there != expected:
                return f"broker {broker_id} has {sorted(there)} instead of {sorted(expected)}"
        under_way = await self.stage.admin.list_partition_reassignments()
        return f"still under way: {under_way}" if under_way else None

    async def problem_alone(self) -> str | None:
        """One partition moves from the victim to the other two brokers."""

        def judge(found: list[MetadataPartition]) -> str | None:
            for number, target in self._targets.items():
                if self.victim not in target and (
                    found[number].replica_nodes != target or sorted(found[number].isr_nodes) != sorted(target)
                ):
                    return f"partition {number}: {found[number]} instead of {target}"
            return None

        return await self.stage.on_every_broker(self.topic, judge, except_for=self.victim)

    def _judge(self, found: list[MetadataPartition]) -> str | None:
        problem = problem_of(found, PARTITIONS, 2)
        moved = {state.partition_index: list(state.replica_nodes) for state in found}
        return problem or (f"replicas {moved} instead of {self._targets}" if moved != self._targets else None)


class PreferredElection(Operation):
    """An election for partitions whose leaders are not the preferred ones. The killed broker leads nothing when it is
    back, so the election is repeated then."""

    refused_for_now = frozenset({ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE})

    async def prepare(self) -> None:
        ids = sorted(self.stage.brokers())
        leading = [[ids[(number + place) % BROKERS] for place in range(BROKERS)] for number in range(PARTITIONS)]
        await self.stage.admin.create_topic(self.topic, assignments=leading)
        # The same replicas in another order: the leader stays, but is no longer the preferred one.
        await self.stage.admin.alter_partition_reassignments(
            {TopicPartition(self.topic, number): [*ids[1:], ids[0]] for number, ids in enumerate(leading)}
        )
        self._preferred = {number: ids[1] for number, ids in enumerate(leading)}
        async with patience("the new order of the replicas was not applied"):
            while await self.stage.on_every_broker(self.topic, self._is_reordered) is not None:
                await asyncio.sleep(_LOOK_EVERY_S)

    def _is_reordered(self, found: list[MetadataPartition]) -> str | None:
        if any(self._preferred[state.partition_index] != state.replica_nodes[0] for state in found):
            return "the old order"
        return problem_of(found, PARTITIONS, BROKERS)

    async def ask(self) -> None:
        partitions = [TopicPartition(self.topic, number) for number in self._preferred]
        refused: PartitionErrors | None = None
        try:
            elected = await self.stage.admin.elect_leaders("preferred", partitions)
        except PartitionErrors as error:
            refused = error
            elected = {partition: bool(is_new) for partition, is_new in error.results.items()}

        async def elsewhere() -> str | None:
            view = await asyncio.to_thread(self.stage.cluster.view)
            for partition in elected:
                leader, preferred = view.partitions[partition].leader_id, self._preferred[partition.partition]
                if leader != preferred != self.victim:
                    return f"{partition} is led by {leader}, but the answer reported the election of {preferred}"
            return None

        # If the controller was killed after its answer, the other brokers hear of the election from its successor.
        await until_right(elsewhere)
        if refused is not None:
            raise refused

    async def problem(self) -> str | None:
        def judge(found: list[MetadataPartition]) -> str | None:
            leaders = {state.partition_index: state.leader_id for state in found}
            problem = problem_of(found, PARTITIONS, BROKERS)
            return problem or (f"leaders {leaders}, not {self._preferred}" if leaders != self._preferred else None)

        if await self.stage.on_every_broker(self.topic, lambda found: problem_of(found, PARTITIONS, BROKERS)) is None:
            await self.ask()
        return await self.stage.on_every_broker(self.topic, judge)


class ControlledShutdown(Operation):
    """A controlled shutdown of a broker other than the controller. It is then restarted and rejoins the ISRs."""

    async def prepare(self) -> None:
        controller_id = (await asyncio.to_thread(self.stage.cluster.view)).controller_id
        self._broker_id = next(broker_id for broker_id in self.stage.brokers() if broker_id != controller_id)
        await self.stage.admin.create_topic(self.topic, partitions=PARTITIONS, replication_factor=BROKERS)

    async def ask(self) -> None:
        await asyncio.to_thread(self.stage.cluster.stop, BrokerId(self._broker_id), STOPPED_WITHIN_S)

    async def problem(self) -> str | None:
        return await self.stage.on_every_broker(self.topic, lambda found: problem_of(found, PARTITIONS, BROKERS))


class AlteredConfigs(Operation):
    """A change of one topic setting and one setting of all brokers."""

    goes_on_when_accepted = True
    _values = itertools.count(1_000_000)

    async def prepare(self) -> None:
        self._value = str(next(self._values))
        await self.stage.admin.create_topic(self.topic, partitions=1, replication_factor=1)

    async def ask(self) -> None:
        await self.stage.admin.incremental_alter_configs(
            {
                ConfigResource.of_topic(self.topic): [ConfigChange.set("retention.ms", self._value)],
                ConfigResource.of_all_brokers(): [ConfigChange.set("message.max.bytes", self._value)],
            }
        )

    async def problem(self) -> str | None:
        return await self._problem_at(self.stage.brokers())

    async def problem_alone(self) -> str | None:
        return await self._problem_at(set(self.stage.brokers()) - {self.victim})

    async def _problem_at(self, broker_ids: Iterable[int]) -> str | None:
        for broker_id in broker_ids:
            asked = [ConfigResource.of_topic(self.topic), ConfigResource.of_broker(broker_id)]
            answer = await self.stage.ask(broker_id, DESCRIBE_CONFIGS, describe_request(asked, None, False, False))
            found, errors = described(asked, answer)
            if errors:
                return f"broker {broker_id}: {errors}"
            values = [
                found[resource][name].value
                for resource, name in zip(asked, ("retention.ms", "message.max.bytes"), strict=True)
            ]
            if values != [self._value] * 2:
                return f"broker {broker_id} uses {values} instead of {self._value}"
        return None


class AddedPartitions(Operation):
    refused_for_now = frozenset({ErrorCode.INVALID_REPLICATION_FACTOR})
    done_before = frozenset({ErrorCode.INVALID_PARTITIONS})
    _COUNT = 3 * PARTITIONS

    async def prepare(self) -> None:
        await self.stage.admin.create_topic(self.topic, partitions=PARTITIONS, replication_factor=BROKERS)

    async def ask(self) -> None:
        await self.stage.admin.create_partitions(self.topic, self._COUNT)

    async def problem(self) -> str | None:
        found = await self.stage.on_every_broker(self.topic, lambda found: problem_of(found, self._COUNT, BROKERS))
        if found is None:
            await self._write(self._COUNT)
        return found


async def until_right(look: Look) -> None:
    """Wait until `look` finds no problem. Raises NotAsAsked with the last one after PATIENCE_S."""
    problem: str | None = "not looked at"
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    problem = await look()
                except MinibrokerError as error:
                    problem = str(error)
                if problem is None:
                    return
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise NotAsAsked(f"after {PATIENCE_S:g} s: {problem}") from None


class Attempts:
    """An administrator's attempts until an operation is accepted."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.errors: list[str] = []
        self.accepted_s: float | None = None
        """When the operation was accepted, in monotonic seconds."""

    async def run(self) -> None:
        """Repeat the request until it is accepted. Raises NotAsAsked for an unexpected error, LaunchError after
        PATIENCE_S."""
        async with patience(f"{self._operation.topic}: it was not accepted"):
            may_be_done = False
            while True:
                try:
                    await self._operation.ask()
                    break
                except LaunchError:
                    raise
                except MinibrokerError as error:
                    self.errors.append(str(error))
                    causes = causes_of(error)
                    if may_be_done and all(code_of(cause) in self._operation.done_before for cause in causes):
                        break
                    self._check_expected(causes)
                    may_be_done = may_be_done or any(map(is_unknown, causes))
                await asyncio.sleep(_REPEAT_AFTER_S)
        self.accepted_s = time.monotonic()

    def _check_expected(self, causes: Iterable[MinibrokerError]) -> None:
        for cause in causes:
            if not is_unknown(cause) and code_of(cause) not in self._operation.refused_for_now:
                raise NotAsAsked(f"the request failed: {cause}") from cause


def causes_of(error: MinibrokerError) -> Sequence[MinibrokerError]:
    if isinstance(error, TopicErrors | PartitionErrors | ConfigErrors):
        return list(error.errors.values())
    return [error]


def code_of(error: MinibrokerError) -> ErrorCode | None:
    return error.code if isinstance(error, BrokerError) else None


def is_unknown(error: MinibrokerError) -> bool:
    """Whether the operation may have been done in spite of the error."""
    return isinstance(error, NetworkError) or (isinstance(error, BrokerError) and error.retriable)


class Together(Operation):
    """All operations that need no broker to stop, at once, each on its own topic."""

    goes_on_when_accepted = True

    def __init__(self, stage: Stage, topic: str) -> None:
        super().__init__(stage, topic)
        kinds = (Creation, Deletion, Reassignment, PreferredElection, AlteredConfigs, AddedPartitions)
        self._parts = [kind(stage, f"{topic}-{kind.__name__}") for kind in kinds]

    async def prepare(self) -> None:
        for part in self._parts:
            await part.prepare()

    async def ask(self) -> None:
        for part in self._parts:
            part.victim = self.victim
        asked = await asyncio.gather(*(Attempts(part).run() for part in self._parts), return_exceptions=True)
        for error in asked:
            if error is not None:
                raise error

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as loads:
            for part in self._parts:
                await loads.enter_async_context(part.under_load())
            yield

    async def problem(self) -> str | None:
        return await self._first_problem(part.problem for part in self._parts)

    async def problem_alone(self) -> str | None:
        return await self._first_problem(part.problem_alone for part in self._parts)

    async def _first_problem(self, looks: Iterable[Look]) -> str | None:
        for look in looks:
            problem = await look()
            if problem is not None:
                return problem
        return None

    async def clean_up(self) -> None:
        for part in self._parts:
            await part.clean_up()


KINDS: Mapping[str, type[Operation]] = {
    "creation": Creation,
    "deletion": Deletion,
    "reassignment": Reassignment,
    "election": PreferredElection,
    "shutdown": ControlledShutdown,
    "configs": AlteredConfigs,
    "partitions": AddedPartitions,
    "together": Together,
}


class Round(NamedTuple):
    kind: str
    killed_after_ms: int | None
    """Time from the request to the kill; None in the round without a fault."""
    was_accepted: bool
    """Whether the operation was accepted before the kill; the next controller must then finish it."""
    accepted_ms: int | None
    took_ms: int
    """Time until every broker showed the result."""
    errors: list[str]
    """The errors after which the request was repeated."""
    failure: str | None


def kill_time(number: int, usual_s: float) -> float:
    """Seconds until the kill in round `number`. Multiples of the golden ratio spread any number of rounds evenly over
    the usual duration."""
    return (number + 1) * 0.618_034 % 1.0 * min(usual_s, LONGEST_SPREAD_S)


async def play_round(stage: Stage, kind: str, trial: Trial, number: int, usual_s: float | None) -> Round:
    """Play one round. `usual_s` is the operation's usual duration; None measures it, without a kill."""
    operation = KINDS[kind](stage, f"{trial.topic}-{'unharmed' if usual_s is None else number + 1}")
    attempts = Attempts(operation)
    kill_after_s = None if usual_s is None else kill_time(number, usual_s)
    was_accepted = False
    failure = None
    began_s = ended_s = time.monotonic()
    try:
        await stage.whole(trial.topic)
        await operation.prepare()
        async with operation.under_load():
            await acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
            controller_id = (await stage.whole(trial.topic)).controller_id
            assert controller_id is not None  # the cluster is whole
            began_s = time.monotonic()
            if kill_after_s is not None:
                operation.victim = controller_id
            asking = asyncio.create_task(attempts.run())
            try:
                if kill_after_s is not None:
                    await asyncio.sleep(kill_after_s)
                    was_accepted = asking.done()
                    await asyncio.to_thread(stage.cluster.kill, BrokerId(controller_id))
                    if number % 2 == 0:
                        await asyncio.wait({asking}, timeout=ALONE_S)
                        if attempts.accepted_s is not None:
                            await until_right(operation.problem_alone)
                    await asyncio.to_thread(stage.cluster.start, AllBrokers())
                await asking
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(stage.cluster.start, AllBrokers())
            await until_right(operation.problem)
            ended_s = time.monotonic()
        await stage.whole(trial.topic)
        await operation.clean_up()
    except (MinibrokerError, NotAsAsked) as error:
        ended_s = time.monotonic()
        failure = f"{type(error).__name__}: {error}"
        await asyncio.to_thread(stage.cluster.start, AllBrokers())
    return Round(
        kind,
        None if kill_after_s is None else round(kill_after_s * 1_000),
        was_accepted,
        None if attempts.accepted_s is None else round((attempts.accepted_s - began_s) * 1_000),
        round((ended_s - began_s) * 1_000),
        attempts.errors,
        failure,
    )


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def summary(played: Round) -> str:
    when = "unharmed"
    if played.killed_after_ms is not None:
        state = "accepted" if played.was_accepted else "not answered"
        when = f"controller killed after {played.killed_after_ms} ms, {state} by then"
    repeated = f", repeated {len(played.errors)} times" if played.errors else ""
    return f"{played.kind}, {when}: {played.failure or 'right'} after {played.took_ms} ms{repeated}"


async def play_kind(stage: Stage, kind: str, rounds: int) -> tuple[dict[str, object], int, int]:
    """Return the report, and how many of its checks passed and failed: one per round, one for the records written, and
    one for the brokers' logs."""
    topic = f"rounds-{kind}"
    await stage.admin.create_topic(topic, partitions=PARTITIONS, replication_factor=BROKERS)
    trial = trial_on(stage, topic)
    logged_before = Counter(stage.logged_errors())
    played: list[Round] = []
    async with trial.sending():
        usual_s: float | None = None
        for number in range(-1, rounds):
            played.append(await play_round(stage, kind, trial, number, usual_s))
            if usual_s is None:
                until_ms = played[-1].took_ms if KINDS[kind].goes_on_when_accepted else played[-1].accepted_ms
                usual_s = (until_ms or 0) / 1_000
            tell(summary(played[-1]))
    verdict = await verdict_of(trial)
    bugs = list((Counter(stage.logged_errors()) - logged_before).elements())
    failed = sum(each.failure is not None for each in played) + (not verdict.flawless) + bool(bugs)
    report = {"kind": kind, **verdict._asdict(), "logged": bugs, "rounds": [each._asdict() for each in played]}
    return report, len(played) + 2 - failed, failed


async def run(directory: Path, kinds: Sequence[str], rounds: int) -> tuple[list[dict[str, object]], int, int]:
    cluster = LocalCluster(directory)
    await asyncio.to_thread(cluster.up, BROKERS, free_ports(BROKERS)[0], settings=SETTINGS)
    reports: list[dict[str, object]] = []
    passed = failed = 0
    try:
        async with Admin(cluster.bootstrap()) as admin:
            for kind in kinds:
                report, right, wrong = await play_kind(Stage(cluster, admin), kind, rounds)
                passed += right
                failed += wrong
                reports.append(report)
                print(json.dumps(report), flush=True)
        return reports, passed, failed
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    kinds = arguments.kinds.split(",")
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}: choose from {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="minibroker-rounds-") as temporary:
        directory = arguments.keep or Path(temporary)
        reports, passed, failed = uvloop.run(run(directory, kinds, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n")
    print(f"controller_rounds: {passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

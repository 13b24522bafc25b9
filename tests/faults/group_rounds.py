"""Break a local cluster under a consumer group, round after round; judge what the group's members saw.

    python -m tests.faults.group_rounds --rounds 10 [--kinds restart,leader,coordinator,...] [--json FILE] [--keep DIR]

Three consumers, each in its own process, share a topic (6 partitions, 3 replicas) with the cooperative-sticky assignor
and commit the records they have read, while a producer writes with acks=all. In each round a broker is stopped cleanly
and restarted (restart), or the leader of a partition, the group's coordinator, the controller, ZooKeeper or a member of
the group is killed with SIGKILL and restarted. The group must read and commit in every partition again within LIMIT_S,
which for a killed member includes its session timeout.

All processes timestamp their events with the machine's monotonic clock. At the end the events are merged and judged as
in the storms (`storms.verdicts.group_history`): no committed offset goes back or was skipped, no record is delivered
again unless it was uncommitted at a hand-over, none is out of order, and no partition has two owners in a generation.
Exit code 1 unless all of this holds, the group has read all records, and no acknowledged record is lost, duplicated or
out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed
from minibroker.client.group.listener import RebalanceListener
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import AllBrokers, BrokerId, ZooKeeperServer
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import Trial, patience
from minibroker.protocol.apis import FIND_COORDINATOR
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.messages.groups import FindCoordinatorRequest
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world.real import RealNetwork
from tests.simulation.storms.verdicts.group_history import GroupHistory, Records, check_group

BROKERS = 3
MEMBERS = 3
PARTITIONS = 6
RECORDS_PER_SECOND = 300
SESSION_TIMEOUT_MS = 3_000
LIMIT_S = 5.0
QUIET_S = 1.0
"""How long the group runs without a fault before each round."""
_LOOK_EVERY_S = 0.02

SETTINGS = {"group.min.session.timeout.ms": "1000", "offsets.topic.num.partitions": "3"}


class Kind(StrEnum):
    RESTART = "restart"
    LEADER = "leader"
    COORDINATOR = "coordinator"
    CONTROLLER = "controller"
    ZOOKEEPER = "zookeeper"
    MEMBER = "member"


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- A member, in a process of its own -----------------------------------------------------------------------------


class _Teller(RebalanceListener):
    """Writes a member's events to standard output, as lines of JSON."""

    def __init__(self) -> None:
        self.positions: dict[TopicPartition, int] = {}

    def say(self, what: str, **more: object) -> None:
        print(json.dumps({"at": time.monotonic(), "what": what} | more), flush=True)

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.say("assigned", partitions=[partition.partition for partition in partitions])

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.say("taken", partitions=[partition.partition for partition in partitions])
        for partition in partitions:
            self.positions.pop(partition, None)


async def _be_a_member(bootstrap: str, group: str, topic: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    teller, ended = _Teller(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    numbers, view = itertools.count(), None
    async with Consumer(
        bootstrap, topics=[topic], group=group, listener=teller, session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=SESSION_TIMEOUT_MS / 6, request_timeout_ms=5_000,
    ) as consumer:  # fmt: skip
        while not ended.is_set():
            records = await consumer.poll(timeout_ms=100)
            got: dict[int, list[tuple[int, str]]] = {}
            for record in records:
                got.setdefault(record.partition, []).append((record.offset, (record.key or b"").decode()))
                teller.positions[TopicPartition(topic, record.partition)] = record.offset + 1
            if got:
                teller.say("delivered", records=got)
            generation = consumer.status().generation_id
            if view != (view := (generation, sorted(p.partition for p in consumer.assignment()))) and generation >= 0:
                teller.say("holds", generation=generation, partitions=view[1])
            if not records or not teller.positions:
                continue
            number, offsets = next(numbers), dict(teller.positions)
            teller.say(
                "commits",
                number=number,
                generation=generation,
                offsets={p.partition: offset for p, offset in offsets.items()},
            )
            failed: set[int] = set()
            try:
                await consumer.commit(offsets)
            except CommitFailed as error:
                failed = {partition.partition for partition in error.errors}
            except MinibrokerError:
                continue
            done = [p.partition for p in offsets if p.partition not in failed]
            teller.say("committed", number=number, partitions=done, generation=consumer.status().generation_id)


class Member:
    """Runs a member's process and collects its events."""

    def __init__(self, name: str, log: Path, bootstrap: str, group: str, topic: str) -> None:
        self.name = name
        self._log = log
        self.said: list[dict[str, Any]] = []
        self.committed_at: dict[int, float] = {}
        """When the latest commit was acknowledged, by partition."""
        self._arguments = ["--member", bootstrap, group, topic]
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.group_rounds", *self._arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 24,
            )
        self._listening = asyncio.create_task(self._listen(self._process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if not line.endswith(b"\n"):
                break  # killed while it wrote the line
            said = json.loads(line)
            self.said.append(said | {"who": f"{self.name}#{process.pid}"})
            if said["what"] == "committed":
                self.committed_at |= dict.fromkeys(said["partitions"], said["at"])
        self.said.append({"at": time.monotonic(), "what": "ended", "who": f"{self.name}#{process.pid}"})

    async def end(self, number: signal.Signals) -> int:
        """Its exit code."""
        assert self._process is not None
        assert self._listening is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        async with asyncio.timeout(60):
            await self._listening
            return await self._process.wait()


# --- The rounds -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    kind: Kind
    until_all_go_on_s: list[float]
    """For each round, the time from the fault until every partition is read and committed again."""
    problems: list[str]
    records: int
    duplicates: int

    def figures(self) -> dict[str, object]:
        return {
            "kind": self.kind.value,
            "rounds": len(self.until_all_go_on_s),
            "records": self.records,
            "delivered_again": self.duplicates,
            "longest_s": round(max(self.until_all_go_on_s), 2),
            "median_s": round(sorted(self.until_all_go_on_s)[len(self.until_all_go_on_s) // 2], 2),
            "problems": self.problems,
        }


class Stage:
    """A topic, its writer and its group."""

    def __init__(self, cluster: LocalCluster, kind: Kind) -> None:
        self.cluster = cluster
        self.kind = kind
        self.topic = f"rounds-{kind.value}"
        self.group = f"group-{kind.value}"
        values = (b"%d of %s" % (number, kind.value.encode()) for number in itertools.count())
        self.trial = Trial(cluster.bootstrap(), self.topic, PARTITIONS, values, records_per_second=RECORDS_PER_SECOND)
        self.members = [
            Member(name, cluster.directory / "logs" / f"{name}.log", cluster.bootstrap(), self.group, self.topic)
            for name in (f"{kind.value}-member-{number}" for number in range(MEMBERS))
        ]

    async def play(self, rounds: int) -> Outcome:
        async with Admin(self.cluster.bootstrap()) as admin:
            await admin.create_topic(self.topic, partitions=PARTITIONS, replication_factor=BROKERS)
        took: list[float] = []
        problems: list[str] = []
        async with self.trial.sending():
            for member in self.members:
                await member.start()
            await self._all_go_on(time.monotonic())
            for number in range(rounds):
                view = await self._whole()
                await asyncio.sleep(QUIET_S)
                began = await self._break(view, number)
                took.append(await self._all_go_on(began) - began)
                await asyncio.to_thread(self._mend)
                tell(f"{self.kind.value} {number + 1}/{rounds}: all partitions go on after {took[-1]:.2f} s")
                if took[-1] > LIMIT_S:
                    problems.append(f"round {number + 1}: all partitions went on after {took[-1]:.2f} s")
            await self._whole()
        final = await self._read_all()
        async with patience(f"the group has not read all of {self.topic}"):
            history = await self._until_all_is_committed(final)
        for member in self.members:
            code = await member.end(signal.SIGTERM)
            if code:
                problems.append(f"{member.name} ended with exit code {code}")
        async with patience("the records could not be read back"):
            verdict = await self.trial.verdict()
        if not verdict.flawless:
            problems.append(str(verdict))
        self._tell_the_story(history)
        problems += map(str, check_group(history, final))
        delivered = sum(map(len, history.deliveries.values()))
        distinct = sum(len({each.offset for each in of_one}) for of_one in history.deliveries.values())
        return Outcome(self.kind, took, problems, sum(map(len, final.values())), delivered - distinct)

    async def _break(self, view: ClusterView, number: int) -> float:
        """Inject the fault; return the time when it was done."""
        partition = TopicPartition(self.topic, number % PARTITIONS)
        match self.kind:
            case Kind.MEMBER:
                member = self.members[number % MEMBERS]
                began = time.monotonic()
                await member.end(signal.SIGKILL)
                return began
            case Kind.ZOOKEEPER:
                await asyncio.to_thread(self.cluster.kill, ZooKeeperServer())
                await asyncio.to_thread(self.cluster.start, ZooKeeperServer())
                return time.monotonic()
            case Kind.RESTART:
                broker = self.cluster.file().brokers[number % BROKERS].id
                await asyncio.to_thread(self.cluster.stop, BrokerId(broker))
                return time.monotonic()
        victim = view.partitions[partition].leader_id
        if self.kind is Kind.CONTROLLER:
            assert view.controller_id is not None  # the cluster is whole
            victim = view.controller_id
        elif self.kind is Kind.COORDINATOR:
            victim = await self._coordinator()
        began = time.monotonic()
        await asyncio.to_thread(self.cluster.kill, BrokerId(victim))
        return began

    def _mend(self) -> None:
        if self.kind not in (Kind.MEMBER, Kind.ZOOKEEPER):
            self.cluster.start(AllBrokers())

    async def _coordinator(self) -> int:
        port = self.cluster.file().brokers[0].port
        connection = await open_connection(RealNetwork(), LOOPBACK, port, client_id="group-rounds", timeout_s=5)
        try:
            async with patience(f"no coordinator of {self.group} is known"):
                while True:
                    request = FindCoordinatorRequest(0, [self.group])
                    answer = await connection.request(FIND_COORDINATOR, request, timeout_s=5)
                    if answer.coordinators[0].error_code == ErrorCode.NONE:
                        return answer.coordinators[0].node_id
                    await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            connection.close()
            await connection.wait_closed()

    async def _all_go_on(self, since: float) -> float:
        """Return the time when every partition had a commit of records read after `since`."""
        async with patience(f"not every partition of {self.topic} was read and committed"):
            while True:
                latest = {p: max(m.committed_at.get(p, 0.0) for m in self.members) for p in range(PARTITIONS)}
                if min(latest.values()) > since:
                    return self._first_commits_after(since)
                await asyncio.sleep(_LOOK_EVERY_S)

    def _first_commits_after(self, since: float) -> float:
        firsts: dict[int, float] = {}
        for member in self.members:
            for said in member.said:
                if said["what"] == "committed" and said["at"] > since:
                    for partition in said["partitions"]:
                        firsts[partition] = min(said["at"], firsts.get(partition, said["at"]))
        return max(firsts.values())

    async def _whole(self) -> ClusterView:
        for member in self.members:
            if member.said and member.said[-1]["what"] == "ended":
                await member.start()
        async with patience(f"a broker is missing, or a replica of {self.topic} out of its ISR; it did not recover"):
            while True:
                view = await asyncio.to_thread(self.cluster.view)
                states = [state for name, state in view.partitions.items() if name.topic == self.topic]
                if (
                    len(view.brokers) == BROKERS
                    and view.controller_id is not None
                    and len(states) == PARTITIONS
                    and all(len(state.isr_nodes) == BROKERS for state in states)
                    and self._is_shared()
                ):
                    return view
                await asyncio.sleep(_LOOK_EVERY_S)

    def _is_shared(self) -> bool:
        views = [
            next((said for said in reversed(member.said) if said["what"] in ("holds", "ended")), None)
            for member in self.members
        ]
        held = Counter(partition for view in views if view for partition in view.get("partitions", ()))
        generations = {view.get("generation") if view else None for view in views}
        return len(generations) == 1 and held == Counter(range(PARTITIONS))

    async def _read_all(self) -> Records:
        partitions = [TopicPartition(self.topic, number) for number in range(PARTITIONS)]
        found: dict[TopicPartition, dict[int, bytes]] = {partition: {} for partition in partitions}
        async with Consumer(self.cluster.bootstrap(), partitions=partitions) as consumer:
            ends = await consumer.end_offsets(partitions)
            async with patience("the records could not be read"):
                async for record in consumer:
                    found[TopicPartition(record.topic, record.partition)][record.offset] = record.key or b""
                    if all(ends[p] - 1 in found[p] for p in partitions):
                        return found
        return found

    async def _until_all_is_committed(self, final: Records) -> GroupHistory:
        history = GroupHistory(self.group)
        ends: Mapping[TopicPartition, int] = {partition: max(log) + 1 for partition, log in final.items()}
        async with Consumer(self.cluster.bootstrap(), group=self.group, partitions=list(final)) as consumer:
            while True:
                found = await consumer.committed(*final)
                offsets = {p: None if (known := found[p]) is None else known.offset for p in final}
                if offsets == ends:
                    self._found = offsets
                    return history
                await asyncio.sleep(0.2)

    def _tell_the_story(self, history: GroupHistory) -> None:
        """Replay the events of all members in the order of their timestamps."""
        commits: dict[tuple[str, int], list[Any]] = {}
        for said in sorted((said for member in self.members for said in member.said), key=lambda said: said["at"]):
            who = said["who"]
            places = [TopicPartition(self.topic, number) for number in said.get("partitions", ())]
            match said["what"]:
                case "assigned":
                    history.assigned(who, places)
                case "taken":
                    history.taken(who, places)
                case "ended":
                    history.ended(who)
                case "holds":
                    history.holds(who, said["generation"], places)
                case "delivered":
                    for number, records in said["records"].items():
                        for offset, key in records:
                            history.delivered(who, TopicPartition(self.topic, int(number)), offset, key.encode())
                case "commits":
                    offsets = {TopicPartition(self.topic, int(p)): offset for p, offset in said["offsets"].items()}
                    commits[who, said["number"]] = history.commit_begins(who, offsets, said["generation"])
                case "committed":
                    done = [each for each in commits[who, said["number"]] if each.partition in places]
                    history.commit_acknowledged(done, said["generation"])
        history.read("the end", self._found, history.read_begins())


async def run(directory: Path, kinds: list[Kind], rounds: int) -> list[Outcome]:
    cluster = LocalCluster(directory)
    await asyncio.to_thread(cluster.up, BROKERS, free_ports(BROKERS)[0], settings=SETTINGS)
    outcomes = []
    try:
        for kind in kinds:
            stage = Stage(cluster, kind)
            try:
                outcomes.append(await stage.play(rounds))
            finally:
                for member in stage.members:
                    if member.said:
                        await member.end(signal.SIGKILL)
            print(json.dumps(outcomes[-1].figures()), flush=True)
        return outcomes
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(Kind))
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    let_signals_interrupt()
    if arguments.member:
        uvloop.run(_be_a_member(*arguments.member))
        return
    names = arguments.kinds.split(",")
    unknown = [name for name in names if name not in list(Kind)]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}: choose from {', '.join(Kind)}")
    with tempfile.TemporaryDirectory(prefix="minibroker-rounds-") as temporary:
        directory = arguments.keep or Path(temporary)
        outcomes = uvloop.run(run(directory, [Kind(name) for name in names], arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps([outcome.figures() for outcome in outcomes], indent=2) + "\n")
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"group_rounds: {len(outcomes) - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

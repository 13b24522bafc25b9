"""What a controller with many brokers and partitions costs: processor time, ZooKeeper writes, bytes to brokers.

    python -m tests.benchmarks.bench_controller_scale [--brokers 30] [--partitions 100000] [--topics 100]

The controller is the real one, on the simulator's virtual time, ZooKeeper and network. The brokers are light endpoints:
they register, accept LeaderAndIsr, UpdateMetadata and StopReplica, and answer for every partition, but keep no logs and
no metadata. So hundreds of thousands of replicas fit one process.

The columns:

- controller s: processor time of the controller: decisions, encoding, writes to its connections, and decoding of the
  answers; not the ZooKeeper client's own work (kazoo serializes requests and answers) and not the garbage collector's;
- written s: the part of it until the last znode was written: then all partitions have leaders;
- rest s: the processor time of ZooKeeper, the endpoints and the simulator;
- elected: partitions that got their first leader, or another one;
- writes, multis: znodes that controllers wrote, and the requests to ZooKeeper that carried them;
- requests, sent MB: requests to brokers, and their bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from minibroker.client.cli.terminal.output import print_table
from minibroker.controller.controller import ControllerSettings
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.ownership import current_owner
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatableTopic
from minibroker.protocol.model import ElectionType, TopicPartition
from minibroker.protocol.world import Check, Create, Operation, SetData
from tests.unit.controller.cluster import Cluster, CountingBroker, Office

REPLICAS = 3
NEW_PARTITIONS = 100
CONTROLLER, REST = "controller", "rest"
OFFICE = "office-"
"""The beginning of the names of controllers' processes."""
_VICTIM = 1


class Row(NamedTuple):
    operation: str
    controller_s: float
    written_s: float
    rest_s: float
    elected: int
    writes: int
    multis: int
    requests: int
    sent_bytes: int


class Processor:
    """Processor time of the controller and of the rest. The owner of a callback is the process that it belongs to."""

    def __init__(self) -> None:
        self.spent_s = {CONTROLLER: 0.0, REST: 0.0}
        self._since_s = time.thread_time()

    def _passed(self, user: str) -> None:
        now_s = time.thread_time()
        self.spent_s[user] += now_s - self._since_s
        self._since_s = now_s

    def _charged(self, function: Callable[..., None]) -> Callable[..., None]:
        def charged(*arguments: object) -> None:
            self._passed(REST)
            try:
                function(*arguments)
            finally:
                self._passed(CONTROLLER)

        return charged

    @contextmanager
    def watching(self) -> Iterator[None]:
        run_handle, run_charged = asyncio.Handle._run, self._charged(asyncio.Handle._run)
        # The network delivers without an owner. Only controllers have connections of this class.
        read_charged = self._charged(Connection.buffer_updated)

        def run_any(handle: Any) -> None:
            owner = handle._context.get(current_owner)
            (run_charged if owner is not None and owner.name.startswith(OFFICE) else run_handle)(handle)

        with patch.object(asyncio.Handle, "_run", run_any), patch.object(Connection, "buffer_updated", read_charged):
            yield


class Scale:
    """The operations, in their order, each of which adds a row."""

    def __init__(self, brokers: int, partitions: int, topics: int) -> None:
        self.cluster = Cluster()
        self.cluster.zookeeper.after = self._written
        self.brokers = {broker_id: CountingBroker(self.cluster, broker_id) for broker_id in range(1, brokers + 1)}
        self.cluster.brokers |= self.brokers
        self.rows: list[Row] = []
        self.controller_mb = 0.0
        """Resident memory that a controller took when it was elected."""
        self.office: Office
        self._elected, self._writes, self._multis, self._last_write_s = 0, 0, 0, 0.0
        self._leaders: dict[str, int] = {}
        self._partitions, self._topics = partitions, topics
        self._processor = Processor()

    def _written(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        """A hook of the virtual ZooKeeper."""
        if session.owner.startswith(OFFICE):
            writes = [operation for operation in operations if not isinstance(operation, Check)]
            self._multis, self._writes = self._multis + 1, self._writes + len(writes)
            self._last_write_s = self._processor.spent_s[CONTROLLER]
            for write in writes:
                if isinstance(write, Create | SetData) and write.path.endswith("/state"):
                    leader = znodes.decode_state(TopicPartition("", 0), write.data, 0).leader
                    self._elected += self._leaders.get(write.path) != leader
                    self._leaders[write.path] = leader

    def _counts(self) -> tuple[int, ...]:
        """Return the last fields of a Row, as they are now."""
        requests = sum(broker.requests for broker in self.brokers.values())
        return self._elected, self._writes, self._multis, requests, sum(b.received_bytes for b in self.brokers.values())

    async def run(self) -> None:
        with self._processor.watching():
            await self._start_brokers()
            await self._elect(100)
            per_topic, victim = self._partitions // self._topics, self.brokers[_VICTIM]
            async with self._measured(f"{self._topics} topics of {per_topic} partitions are created"):
                for number in range(self._topics):
                    await self._create(f"topic-{number:04}", per_topic)
            for broker in self.brokers.values():
                broker.kill()
            self._kill_office()
            await self._start_brokers()
            async with self._measured("start: all brokers, and the controller, are new"):
                await self._elect(101)
            self._kill_office()
            before_mb = resident_mb()
            async with self._measured("controller failover"):
                await self._elect(102)
            self.controller_mb = resident_mb() - before_mb
            async with self._measured("a broker fails"):
                victim.kill()
                self.office.suspect(victim)
                await self.cluster.until(lambda: _VICTIM not in self._state.live_brokers)
            async with self._measured("it returns"):
                await victim.start()
                await self.cluster.until(lambda: _VICTIM in self._state.live_brokers)
            self._join_isrs()
            async with self._measured("preferred leaders are elected"):
                await self.office.run(self.office.controller.elect_leaders(ElectionType.PREFERRED, None))
            async with self._measured(f"a topic of {NEW_PARTITIONS} partitions is created"):
                await self._create("last", NEW_PARTITIONS)
            victim.kill()
            self._kill_office()
            async with self._measured("the controller fails with its broker"):
                await self._elect(103)

    async def _start_brokers(self) -> None:
        await asyncio.gather(*(broker.start() for broker in self.brokers.values()))

    async def _elect(self, office_id: int) -> None:
        # Only requested elections of preferred leaders are measured.
        self.office = Office(self.cluster, office_id, ControllerSettings(1, REPLICAS, auto_leader_rebalance=False))
        await self.office.take_office()

    def _kill_office(self) -> None:
        self.office.kill()
        self.cluster.zookeeper.expire(f"{OFFICE}{self.office.broker_id}")

    async def _create(self, name: str, partitions: int) -> None:
        topics = [CreatableTopic(name, partitions, REPLICAS)]
        [result] = await self.office.run(self.office.controller.create_topics(topics))
        assert result.error_code == ErrorCode.NONE, result.error_message

    @property
    def _state(self) -> ClusterState:
        assert self.office.controller.state is not None
        return self.office.controller.state

    def _join_isrs(self) -> None:
        """Write the returned broker into the ISRs of the partitions that it should lead, as their leaders do."""
        for partition in self._state.partitions_on(_VICTIM):
            replicas = self._state.assignments[partition]
            if replicas[0] == _VICTIM:
                epochs = tuple(self.cluster.brokers[broker_id].epoch for broker_id in replicas)
                joined = msgspec.structs.replace(self._state.leadership[partition], isr=replicas, isr_epochs=epochs)
                self.cluster.zookeeper.make(znodes.state_path(partition), znodes.encode_state(joined))

    @asynccontextmanager
    async def _measured(self, operation: str) -> AsyncIterator[None]:
        """Add a row for everything until the controller and the brokers have nothing more to do."""
        spent, counts = dict(self._processor.spent_s), self._counts()
        yield
        before: tuple[int, ...] = ()
        while before != self._counts():
            before = self._counts()
            await self.office.idle()
            assert self.office.controller._tenure is not None
            await self.office.run(self.office.controller._tenure.delivered())
        new = (now - before for now, before in zip(self._counts(), counts, strict=True))
        controller_s, rest_s = (self._processor.spent_s[user] - spent[user] for user in (CONTROLLER, REST))
        written_s = max(0.0, self._last_write_s - spent[CONTROLLER])
        self.rows.append(Row(operation, controller_s, written_s, rest_s, *new))


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measured(brokers: int, partitions: int, topics: int) -> Scale:
    await (scale := Scale(brokers, partitions, topics)).run()
    return scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brokers", type=int, default=30)
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--topics", type=int, default=100, help="the partitions are divided among them")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    scale = run(measured(arguments.brokers, arguments.partitions, arguments.topics))
    print(f"{arguments.brokers} brokers, {arguments.partitions} partitions of {REPLICAS} replicas")
    print_table(
        ("operation", "controller s", "written s", "rest s", "elected", "writes", "multis", "requests", "sent MB"),
        [(row[0], *(round(s, 2) for s in row[1:4]), *row[4:8], round(row.sent_bytes / 1e6, 1)) for row in scale.rows],
    )
    print(f"a controller's memory: {scale.controller_mb:.0f} MB; the run: {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()

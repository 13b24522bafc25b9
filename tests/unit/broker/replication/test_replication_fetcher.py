"""A ReplicaFetcher on virtual time. The test plays the leader: it sees the requests and answers when it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest

from minibroker.broker.network.request_channel import Request
from minibroker.broker.network.server import SocketServer
from minibroker.broker.network.settings import NetworkSettings
from minibroker.broker.replication.following.fetcher import (
    FIRST_BACKOFF_S,
    FetcherSettings,
    ReplicaFetcher,
)
from minibroker.broker.replication.following.silences import Silences
from minibroker.broker.replication.partition import Partition, Settings
from minibroker.broker.storage.log_config import LogConfig
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.apis import Plane
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.fetch_schedule import MANY_REQUESTS, MAX_REQUESTS, PARTITIONS_PER_REQUEST, SHORT_WAIT_MS
from minibroker.protocol.messages import (
    EpochEndOffset,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopicResponse,
)
from minibroker.protocol.model import TopicPartition
from tests.replication_support import LAG_S, ME, TOPIC, state
from tests.running import run_by
from tests.storage_support import GatedExecutor, StorageWorld, batch, open_log, stamped
from tests.waiting import until

LEADER = 2
WAIT_MS = 500


class Leader:
    """A leader that keeps every fetch it receives until the test answers it."""

    def __init__(self, world: VirtualWorld, path: Path) -> None:
        self.waiting: list[Request] = []
        self.asked: list[list[int]] = []
        """The partitions of each request so far."""
        self.set_aside: dict[int, str] = {}
        """The reason for each partition."""
        self._path = path
        self._server = SocketServer(world, NetworkSettings(), self._handle)
        self._partitions: dict[int, Partition] = {}
        self._world = world

    async def start(self) -> ReplicaFetcher:
        ports = await self._server.bind([("PLAINTEXT", "broker-1", 0, Plane.DATA)])
        self._server.start()
        settings = FetcherSettings(ME, WAIT_MS, 30_000, 1, 10_000_000, 1_000_000, 0.1, 30.0)
        connections = BrokerConnections(self._world, ME, None)
        address = "broker-1", ports["PLAINTEXT"]
        return ReplicaFetcher(
            self._world,
            connections,
            LEADER,
            *address,
            settings,
            Silences(self._world.clock),
            lambda: 1,
            self._set_aside,
            lambda: None,
        )

    def _set_aside(self, partition: Partition, reason: str) -> None:
        self.set_aside[partition.topic_partition.partition] = reason

    async def close(self) -> None:
        await self._server.close()

    async def _handle(self, request: Request) -> None:
        self.waiting.append(request)
        self.asked.append(partitions_of(request))

    def partition(self, index: int, epoch: int = 0) -> Partition:
        partition = self._partitions.get(index)
        if partition is None:
            log, _, world = open_log(str(self._path / f"{TOPIC}-{index}"))
            topic_partition = TopicPartition(TOPIC, index)
            partition = self._partitions[index] = Partition(
                topic_partition, log, Settings(ME, LAG_S, None), world.clock, lambda _: None
            )
        partition.become_follower(state(LEADER, epoch, index=index))
        return partition

    def log_end(self, index: int) -> int:
        return self._partitions[index].log.log_end_offset

    def answer(
        self,
        request: Request,
        records: dict[int, bytes],
        code: ErrorCode = ErrorCode.NONE,
        diverging: EpochEndOffset | None = None,
        high_watermark: int = 0,
    ) -> None:
        """Answer each partition of the request with its records."""
        self.waiting.remove(request)
        answers = [
            FetchPartitionResponse(
                index, code, high_watermark, diverging_epoch=diverging, records=memoryview(records.get(index, b""))
            )
            for index in partitions_of(request)
        ]
        request.respond(FetchResponse(0, ErrorCode.NONE, [FetchTopicResponse(TOPIC, answers)]))

    def has_waiting(self, count: int) -> bool:
        return len(self.waiting) == count

    def request_for(self, *indices: int) -> Request:
        """Return the waiting request for exactly these partitions."""
        [found] = [request for request in self.waiting if sorted(partitions_of(request)) == sorted(indices)]
        return found

    async def asks_for(self, *expected: list[int]) -> None:
        """Wait until there are requests for exactly these partitions, each once, and no others."""
        wanted = sorted(map(sorted, expected))
        await until(lambda: sorted(sorted(partitions_of(request)) for request in self.waiting) == wanted, 5.0)
        await asyncio.sleep(0.001)
        assert sorted(sorted(partitions_of(request)) for request in self.waiting) == wanted


def partitions_of(request: Request) -> list[int]:
    assert isinstance(request.body, FetchRequest)
    return [partition.partition for topic in request.body.topics for partition in topic.partitions]


def wait_ms_of(request: Request) -> int:
    assert isinstance(request.body, FetchRequest)
    return request.body.max_wait_ms


def one_record(offset: int = 0, epoch: int = 0) -> bytes:
    return stamped(bytes(batch()), offset, epoch)


def with_leader(tmp_path: Path, scenario: Callable[[Leader, ReplicaFetcher], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        world = Simulation().host("broker-1").start_process()

        async def inside() -> None:
            leader = Leader(world, tmp_path)
            fetcher = await leader.start()
            try:
                await scenario(leader, fetcher)
                assert not fetcher.task.done()
            finally:
                await fetcher.close()
                await leader.close()

        await world.process.run(inside())

    run(main())


@run_by(with_leader)
async def test_partitions_with_records_are_asked_for_again_without_the_quiet_ones(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    for index in range(4):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1, 2, 3])
    leader.answer(leader.waiting[0], {1: one_record(), 3: one_record()})
    await leader.asks_for([1, 3], [0, 2])
    assert [leader.log_end(index) for index in range(4)] == [0, 1, 0, 1]
    leader.answer(leader.request_for(1, 3), {1: one_record(1)})
    await leader.asks_for([1], [3], [0, 2])
    assert leader.log_end(1) == 2


@run_by(with_leader)
async def test_the_lag_is_that_of_the_partition_that_lacks_most(leader: Leader, fetcher: ReplicaFetcher, /) -> None:
    for index in range(2):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1])
    assert fetcher.max_lag == 0
    leader.answer(leader.waiting[0], {1: one_record()}, high_watermark=3)
    await leader.asks_for([0], [1])
    assert fetcher.max_lag == 3
    fetcher.remove(TopicPartition(TOPIC, 0))
    assert fetcher.max_lag == 2


@run_by(with_leader)
async def test_a_synced_partition_is_asked_for_again_once_it_is_flushed_and_the_others_at_once(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    disk = GatedExecutor()
    for index in range(2):
        partition = leader.partition(index)
        fetcher.add(partition)
    log = leader.partition(0).log
    log.configure(LogConfig(synced=True))
    log.on_flushed = fetcher.wake
    assert isinstance(log._directory.world, StorageWorld)
    log._directory.world.executor = disk
    await leader.asks_for([0, 1])
    leader.answer(leader.waiting[0], {0: one_record(), 1: one_record()})
    await leader.asks_for([1])
    assert (log.log_end_offset, disk.busy) == (1, 1)
    await disk.release()
    await leader.asks_for([0], [1])
    asked = leader.request_for(0).body
    assert isinstance(asked, FetchRequest)
    assert asked.topics[0].partitions[0].fetch_offset == 1


@run_by(with_leader)
async def test_a_log_that_cannot_go_on_with_its_leader_costs_no_other_partition(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    for index in range(3):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1, 2])
    leader.answer(leader.waiting[0], {0: one_record(), 1: one_record() + one_record(), 2: one_record()})
    await leader.asks_for([0, 2], [1])
    assert not leader.set_aside
    asked = leader.request_for(1).body
    assert isinstance(asked, FetchRequest)
    assert asked.topics[0].partitions[0].suspect, "it is the leader's log that may be damaged"
    leader.answer(leader.request_for(1), {1: one_record() + one_record()})
    await until(lambda: leader.set_aside)
    assert [leader.log_end(index) for index in range(3)] == [1, 0, 1]
    assert list(leader.set_aside) == [1]
    assert "a batch of offset 0 and epoch 0 does not continue it" in leader.set_aside[1]
    assert not fetcher.follows(TopicPartition(TOPIC, 1))


@run_by(with_leader)
async def test_what_is_answered_at_the_same_time_is_asked_for_together_again(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    for index in range(3):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1, 2])
    leader.answer(leader.waiting[0], {0: one_record()})
    await leader.asks_for([0], [1, 2])
    for request in list(leader.waiting):
        leader.answer(request, {})
    await leader.asks_for([0, 1, 2])


@run_by(with_leader)
async def test_requests_sent_at_different_times_run_out_at_the_same_time(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    loop = asyncio.get_running_loop()
    for index in range(3):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1, 2])
    await asyncio.sleep(0.15)
    sent_s = loop.time()
    leader.answer(leader.waiting[0], {0: one_record()})
    await leader.asks_for([0], [1, 2])
    first = {wait_ms_of(request) for request in leader.waiting}
    assert len(first) == 1
    await asyncio.sleep(0.2)
    again_s = loop.time()
    leader.answer(leader.request_for(0), {0: one_record(1)})
    await leader.asks_for([0], [1, 2])
    [ends_ms] = first
    assert 0 < ends_ms <= WAIT_MS - 149
    later_ms = wait_ms_of(leader.request_for(0))
    assert later_ms == pytest.approx(ends_ms - (again_s - sent_s) * 1_000, abs=2)


@run_by(with_leader)
async def test_a_fresh_partition_is_asked_for_at_once_and_a_removed_one_never_again(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    fetcher.add(leader.partition(0))
    fetcher.add(leader.partition(1))
    await leader.asks_for([0, 1])
    fetcher.add(leader.partition(2))
    await leader.asks_for([0, 1], [2])
    fetcher.remove(TopicPartition(TOPIC, 0))
    leader.answer(leader.request_for(0, 1), {0: one_record(), 1: one_record()})
    await leader.asks_for([1], [2])
    assert leader.log_end(0) == 0
    assert leader.log_end(1) == 1


@run_by(with_leader)
async def test_a_new_leader_epoch_is_asked_for_at_once_and_the_old_answer_is_dropped(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    fetcher.add(leader.partition(0))
    fetcher.add(leader.partition(1))
    await leader.asks_for([0, 1])
    old = leader.waiting[0]
    fetcher.add(leader.partition(0, epoch=1))
    await leader.asks_for([0, 1], [0])
    leader.answer(old, {0: one_record(), 1: one_record()})
    await leader.asks_for([0], [1])
    assert leader.log_end(0) == 0
    leader.answer(leader.request_for(0), {0: one_record(epoch=1)})
    await leader.asks_for([0], [1])
    assert leader.log_end(0) == 1


def test_many_partitions_are_cut_into_several_requests(tmp_path: Path) -> None:
    async def scenario(leader: Leader, fetcher: ReplicaFetcher) -> None:
        count = 2 * PARTITIONS_PER_REQUEST + 1
        for index in range(count):
            fetcher.add(leader.partition(index))
        pieces = [list(range(first, min(first + PARTITIONS_PER_REQUEST, count))) for first in range(0, count, 100)]
        await leader.asks_for(*pieces)

    assert PARTITIONS_PER_REQUEST == 100
    with_leader(tmp_path, scenario)


@run_by(with_leader)
async def test_records_halve_the_next_requests_for_quiet_partitions_and_a_wait_without_any_joins_them_again(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    everything = list(range(PARTITIONS_PER_REQUEST))
    for index in everything:
        fetcher.add(leader.partition(index))
    await leader.asks_for(everything)
    leader.answer(leader.waiting[0], {})
    await leader.asks_for(everything)
    leader.answer(leader.waiting[0], {7: one_record()})
    others = [index for index in everything if index != 7]
    await leader.asks_for([7], others[:50], others[50:])
    for request in list(leader.waiting):
        leader.answer(request, {})
    await leader.asks_for([7], others)
    for request in list(leader.waiting):
        leader.answer(request, {})
    await leader.asks_for(everything)


@run_by(with_leader)
async def test_no_more_requests_are_out_than_allowed_and_of_many_the_later_ones_wait_a_short_time(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    for index in range(MAX_REQUESTS + 3):
        fetcher.add(leader.partition(index))
        await until(partial(leader.has_waiting, min(index + 1, MAX_REQUESTS)))
    waits = [wait_ms_of(request) for request in leader.waiting]
    assert all(wait_ms <= 2 * SHORT_WAIT_MS for wait_ms in waits[MANY_REQUESTS:])
    assert max(waits[:MANY_REQUESTS]) > 2 * SHORT_WAIT_MS
    leader.answer(leader.waiting[-1], {})
    await until(lambda: len(leader.waiting) == MAX_REQUESTS and len(leader.asked) > MAX_REQUESTS)
    # The refused ones come with the next free request.
    newest = leader.asked[-1]
    assert set(range(MAX_REQUESTS, MAX_REQUESTS + 3)) <= set(newest)


@run_by(with_leader)
async def test_a_refused_partition_pauses_and_the_others_go_on(leader: Leader, fetcher: ReplicaFetcher, /) -> None:
    fetcher.add(leader.partition(0))
    await leader.asks_for([0])
    fetcher.add(leader.partition(1))
    await leader.asks_for([0], [1])
    refused_s = asyncio.get_running_loop().time()
    leader.answer(leader.request_for(0), {}, ErrorCode.UNKNOWN_LEADER_EPOCH)
    leader.answer(leader.request_for(1), {1: one_record()})
    await leader.asks_for([1], [0])
    assert leader.asked[-2:] == [[1], [0]]
    assert leader.request_for(1).received_at < refused_s + FIRST_BACKOFF_S <= leader.request_for(0).received_at


@run_by(with_leader)
async def test_a_partition_that_is_to_truncate_and_has_nothing_to_cut_pauses(
    leader: Leader, fetcher: ReplicaFetcher, /
) -> None:
    fetcher.add(leader.partition(1))
    began_s = asyncio.get_running_loop().time()
    for _ in range(20):
        await until(lambda: leader.has_waiting(1), 5.0)
        leader.answer(leader.waiting[0], {}, diverging=EpochEndOffset(0, 5))
    assert asyncio.get_running_loop().time() - began_s > 1


@run_by(with_leader)
async def test_after_an_error_everything_is_asked_for_anew(leader: Leader, fetcher: ReplicaFetcher, /) -> None:
    for index in range(3):
        fetcher.add(leader.partition(index))
    await leader.asks_for([0, 1, 2])
    leader.answer(leader.waiting[0], {0: one_record()})
    await leader.asks_for([0], [1, 2])
    lost, refused = leader.request_for(1, 2), leader.request_for(0)
    leader.waiting.clear()
    refused.respond_error(ErrorCode.UNKNOWN_SERVER_ERROR, "a bug")
    await leader.asks_for([0], [1, 2])
    assert lost.closed  # no partition is in two requests


@run_by(with_leader)
async def test_a_broken_connection_is_opened_again(leader: Leader, fetcher: ReplicaFetcher, /) -> None:
    fetcher.add(leader.partition(0))
    fetcher.add(leader.partition(1))
    await leader.asks_for([0, 1])
    broken = leader.waiting.pop()
    broken.close_connection("the test wants it")
    await leader.asks_for([0, 1])
    leader.answer(leader.waiting[0], {1: one_record()})
    await leader.asks_for([0], [1])


def test_a_leader_that_takes_this_broker_for_none_is_named_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(leader: Leader, fetcher: ReplicaFetcher) -> None:
        fetcher.add(leader.partition(0))
        for _ in range(3):
            await leader.asks_for([0])
            leader.waiting.pop().respond_error(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "anonymous")
        await leader.asks_for([0])
        leader.answer(leader.waiting[0], {})
        await leader.asks_for([0])

    with_leader(tmp_path, scenario)
    [said] = caplog.messages
    assert "nothing can be fetched from broker 2" in said
    assert "anonymous" in said

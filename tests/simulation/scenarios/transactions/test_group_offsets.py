"""Offsets that a transaction commits, on a whole cluster: through deaths of both coordinators, and late requests."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.transactions.raw_transactions import NOT_NOW, RETRY_S, RawProducer, codes_of
from tests.simulation.scenarios.transactions.test_coordinator import with_topic

E = ErrorCode
GROUP = "billing"
OFFSETS = TopicPartition(OFFSETS_TOPIC, 0)


class Mover(RawProducer):
    """Moves the committed offset of a group in its transactions."""

    async def of_group_coordinator(self, api: apis.Api, body: object) -> object:  # type: ignore[type-arg]
        """Return the answer of the group's coordinator; retry after NOT_NOW errors and lost connections."""
        async with asyncio.timeout(60):
            while True:
                try:
                    answer = await self.ask(await self._group_coordinator(), api, body)
                except (NetworkError, BrokerError):
                    await asyncio.sleep(RETRY_S)
                    continue
                if not NOT_NOW.intersection(codes_of(answer)):
                    return answer
                await asyncio.sleep(RETRY_S)

    async def _group_coordinator(self) -> int:
        """Raises NetworkError, BrokerError."""
        for broker_id in self.cluster.broker_ids:
            try:
                request = g.FindCoordinatorRequest(0, [GROUP])
                found = (await self.ask(broker_id, apis.FIND_COORDINATOR, request)).coordinators[0]
            except NetworkError:
                continue
            if not found.error_code:
                return found.node_id
        raise NetworkError("no broker knows the coordinator")

    async def move(self, offset: int) -> ErrorCode:
        """Send TxnOffsetCommit, until it is written or refused."""
        topics = [t.TxnOffsetCommitTopic("orders", [t.TxnOffsetCommitPartition(0, offset)])]
        body = t.TxnOffsetCommitRequest(
            self.transactional_id, GROUP, self.producer_id, self.epoch, topics, adds_partition=self.raises_epoch
        )
        answer = await self.of_group_coordinator(apis.TXN_OFFSET_COMMIT, body)
        return next(iter(ErrorCode(code) for code in codes_of(answer)))

    async def committed(self, *, require_stable: bool = True) -> int | ErrorCode:
        wanted = g.OffsetFetchGroup(GROUP, [g.OffsetFetchTopic("orders", [0])])
        while True:
            answer = await self.of_group_coordinator(
                apis.OFFSET_FETCH, g.OffsetFetchRequest([wanted], require_stable=require_stable)
            )
            assert isinstance(answer, g.OffsetFetchResponse)
            (group,) = answer.groups
            if group.error_code in NOT_NOW:
                await asyncio.sleep(RETRY_S)
                continue
            found = group.topics[0].partitions[0]
            return ErrorCode(found.error_code) if found.error_code else found.committed_offset

    async def stable(self) -> int:
        """Wait until the committed offset is stable."""
        async with asyncio.timeout(60):
            while isinstance(found := await self.committed(), ErrorCode):
                assert found is E.UNSTABLE_OFFSET_COMMIT
                await asyncio.sleep(RETRY_S)
        return found


@run_by(with_topic)
async def test_offsets_become_visible_with_their_transaction_or_never(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    mover = Mover(cluster, world)
    assert await mover.init() is E.NONE
    assert await mover.move(5) is E.NONE
    described = await mover.until_state("Ongoing")
    assert described.topics == [t.TransactionTopic(OFFSETS_TOPIC, [0])]
    assert await mover.committed(require_stable=False) == -1
    assert await mover.committed() == E.UNSTABLE_OFFSET_COMMIT
    assert await mover.end() is E.NONE
    assert await mover.stable() == 5
    assert await mover.move(9) is E.NONE
    assert await mover.end(committed=False) is E.NONE
    assert await mover.stable() == 5


@run_by(with_topic)
async def test_a_late_commit_of_an_ended_transaction_changes_nothing(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    mover, late = Mover(cluster, world), Mover(cluster, world)
    assert await mover.init() is E.NONE
    assert await mover.move(5) is E.NONE
    late.producer_id, late.epoch = mover.producer_id, mover.epoch
    assert await mover.end() is E.NONE
    assert await mover.stable() == 5
    assert await mover.move(6) is E.NONE
    assert await late.move(4) in (E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED)
    assert await mover.end() is E.NONE
    assert await late.move(4) in (E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED)
    assert await mover.stable() == 6


@run_by(with_topic)
async def test_a_client_from_before_kip_890_adds_the_group_first(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    mover = Mover(cluster, world, raises_epoch=False)
    assert await mover.init() is E.NONE
    assert await mover.move(5) is E.INVALID_TXN_STATE
    body = t.AddOffsetsToTxnRequest(mover.transactional_id, mover.producer_id, mover.epoch, GROUP)
    assert not (await mover.of_coordinator(apis.ADD_OFFSETS_TO_TXN, body)).error_code
    assert await mover.move(5) is E.NONE
    assert await mover.end() is E.NONE
    assert await mover.stable() == 5
    await mover.until_state("CompleteCommit")
    assert await mover.move(4) is E.INVALID_TXN_STATE  # late
    assert await mover.stable() == 5


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("dies", ["before the end", "with the end"])
def test_an_open_transaction_survives_the_groups_coordinator(committed: bool, dies: str) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        mover = Mover(cluster, world)
        assert await mover.init() is E.NONE
        assert await mover.move(3) is E.NONE
        assert await mover.end() is E.NONE
        assert await mover.stable() == 3
        assert await mover.move(5) is E.NONE
        victim = cluster.state(OFFSETS).leader
        if dies == "before the end":
            cluster.kill_broker(victim)
            assert await mover.committed(require_stable=False) == 3
            assert await mover.committed() == E.UNSTABLE_OFFSET_COMMIT
            assert await mover.end(committed=committed) is E.NONE
        else:
            ending = asyncio.ensure_future(mover.end(committed=committed))
            await asyncio.sleep(0.002)
            cluster.kill_broker(victim)
            assert await ending is E.NONE
        assert await mover.stable() == (5 if committed else 3)
        assert await mover.move(7) is E.NONE
        assert await mover.end() is E.NONE
        assert await mover.stable() == 7

    with_topic(program)

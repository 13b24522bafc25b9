"""Leadership on simulated ZooKeeper and time: races, lost answers, changes by hand, crashes, in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from minibroker.controller.governing.leadership import (
    RESIGNATION_PAUSE_S,
    Leadership,
    LeadershipVerdict,
    OfficeTerm,
    Seen,
    judge_leadership,
)
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol.world import (
    Check,
    Create,
    Delete,
    Operation,
    SessionExpired,
    SessionState,
    Stat,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import CONTROLLER, CONTROLLER_EPOCH, decode_controller, encode_controller
from tests.running import run_by
from tests.waiting import until

SESSION_TIMEOUT_MS = 6_000
PATIENCE_S = 60.0


class Candidate:
    """A process that runs for controller; it attaches a new session when the old one has expired."""

    def __init__(self, cluster: Cluster, broker_id: int) -> None:
        self.id = broker_id
        self.cluster = cluster
        self.world: VirtualWorld | None = None
        self.leadership: Leadership | None = None
        self.sessions: list[VirtualSession] = []
        self.heard: list[str] = []
        self.in_office: int | None = None
        self.refuses_office = False
        self.resignation_takes_s = 0.0

    async def start(self) -> None:
        self.world = self.cluster.simulation.host(f"broker-{self.id}").start_process()
        self.in_office = None
        await self.world.process.run(self._start(self.world))

    async def _start(self, world: VirtualWorld) -> None:
        self.leadership = Leadership(
            world,
            self.id,
            on_elected=self._elected,
            on_resign=self._resigned,
            on_controller=lambda broker, epoch: self.heard.append(f"controller {broker} of epoch {epoch}"),
            on_removed=lambda _broker, _epoch: None,
        )
        self.leadership.start()
        await self._open_session(world, self.leadership)

    async def _open_session(self, world: VirtualWorld, leadership: Leadership) -> None:
        session = await world.zookeeper.connect("zookeeper:2181", SESSION_TIMEOUT_MS, 1_000)
        self.sessions.append(self.cluster.simulation.zookeeper.sessions[-1])

        def changed(state: SessionState) -> None:
            if state is SessionState.EXPIRED and session.session_id == self.session.session_id:
                world.process.start(self._open_session(world, leadership))

        session.on_state(changed)
        leadership.attach(session)

    @property
    def session(self) -> VirtualSession:
        return self.sessions[-1]

    @property
    def lead(self) -> Leadership:
        assert self.leadership is not None
        return self.leadership

    def kill(self) -> None:
        assert self.world is not None
        self.world.process.kill()
        self.in_office = None

    async def _elected(self, session: ZooKeeperSession, epoch: int, epoch_version: int) -> None:
        assert self.in_office is None, "elected in the middle of a term"
        assert session.session_id == self.session.session_id
        self.heard.append(f"elected {epoch}")
        self.cluster.terms.append((epoch, self.id))
        if self.refuses_office:
            raise RuntimeError("cannot take office")
        self.in_office = epoch

    async def _resigned(self, reason: str) -> None:
        self.heard.append("resigned")
        self.cluster.reasons.append(reason)
        await asyncio.sleep(self.resignation_takes_s)
        self.in_office = None
        self.heard.append("out of office")


class Cluster:
    def __init__(self, size: int) -> None:
        self.simulation = Simulation()
        self.zookeeper = self.simulation.zookeeper
        self.terms: list[tuple[int, int]] = []
        self.reasons: list[str] = []
        self.candidates = [Candidate(self, broker_id) for broker_id in range(1, size + 1)]

    async def start(self) -> None:
        for candidate in self.candidates:
            await candidate.start()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def in_office(self) -> list[Candidate]:
        return [c for c in self.candidates if c.in_office is not None]

    def others(self, candidate: Candidate) -> list[Candidate]:
        return [c for c in self.candidates if c is not candidate]

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, PATIENCE_S, every_s=0.001)

    async def settled(self, epoch: int) -> Candidate:
        """Return the controller of that epoch, once all others agree that it is."""

        def agreed() -> bool:
            leaders = [c for c in self.candidates if c.in_office == epoch]
            living = [c for c in self.candidates if c.world is not None and c.world.process.alive]
            return len(leaders) == 1 and all(
                (c.lead.controller_id, c.lead.epoch) == (leaders[0].id, epoch) for c in living
            )

        await self.until(agreed)
        [leader] = [c for c in self.candidates if c.in_office == epoch]
        assert decode_controller(self.zookeeper.data(CONTROLLER)) == leader.id
        assert self.zookeeper.data(CONTROLLER_EPOCH) == str(epoch).encode()
        return leader


def simulate(size: int, scenario: Callable[[Cluster], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    async def main() -> None:
        await scenario(Cluster(size))

    run(main(), seed=seed)


# --- The decision ---


@pytest.mark.parametrize(
    ("seen", "claim", "verdict"),
    [
        (Seen(None, 0, 7, 3), None, LeadershipVerdict.VACANT),
        (Seen(None, 0, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.VACANT),
        (Seen(1, 0xA, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.ELECTED),
        (Seen(1, 0xA, 7, 3), None, LeadershipVerdict.INVALID),
        (Seen(1, 0xA, 7, 3), OfficeTerm(6, 2), LeadershipVerdict.INVALID),
        (Seen(1, 0xA, 7, 4), OfficeTerm(7, 3), LeadershipVerdict.INVALID),
        (Seen(2, 0xA, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.INVALID),
        (Seen(-1, 0xA, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.INVALID),
        (Seen(1, 0xB, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.LEFTOVER),
        (Seen(1, 0xB, 7, 3), None, LeadershipVerdict.LEFTOVER),
        (Seen(2, 0xB, 7, 3), OfficeTerm(7, 3), LeadershipVerdict.FOLLOWER),
        (Seen(2, 0, 7, 3), None, LeadershipVerdict.FOLLOWER),
        (Seen(-1, 0xB, 7, 3), None, LeadershipVerdict.FOLLOWER),
        (Seen(-1, 0, 7, 3), None, LeadershipVerdict.LEFTOVER),
    ],
)
def test_what_the_nodes_mean_for_broker_1_in_session_a(
    seen: Seen, claim: OfficeTerm | None, verdict: LeadershipVerdict
) -> None:
    assert judge_leadership(seen, 1, 0xA, claim) is verdict


# --- Races ---


@pytest.mark.parametrize("seed", range(5))
@run_by(simulate, size=3)
async def test_of_three_one_is_elected_with_epoch_1_and_all_know_it(cluster: Cluster, /, seed: int) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    assert cluster.in_office == [leader]
    assert leader.heard[-1] == "elected 1"
    assert leader.lead.is_controller
    for other in cluster.others(leader):
        assert not other.lead.is_controller
        assert other.heard[-1] == f"controller {leader.id} of epoch 1"


@run_by(simulate, size=3)
async def test_a_killed_controller_is_replaced_when_its_session_ends(cluster: Cluster, /) -> None:
    await cluster.start()
    (await cluster.settled(1)).kill()
    killed_at = cluster.now
    await cluster.settled(2)
    assert SESSION_TIMEOUT_MS / 1000 <= cluster.now - killed_at < SESSION_TIMEOUT_MS / 1000 + 0.5


@run_by(simulate, size=3)
async def test_a_crashed_controller_is_removed_at_once_by_whoever_notices(cluster: Cluster, /) -> None:
    await cluster.start()
    for epoch in (1, 2):
        leader = await cluster.settled(epoch)
        leader.kill()
        killed_at = cluster.now
        for other in cluster.others(leader):
            if other.world is not None and other.world.process.alive:
                other.lead.remove_crashed(leader.id, epoch)
        await cluster.settled(epoch + 1)
        assert cluster.now - killed_at < 0.5


@run_by(simulate, size=3)
async def test_a_controller_that_lives_and_the_one_that_removed_it_let_a_third_one_be_elected(
    cluster: Cluster, /
) -> None:
    """If two of three brokers cannot reach each other, neither of them may be the next controller."""

    await cluster.start()
    for epoch in range(1, 6):
        leader = await cluster.settled(epoch)
        remover, third = cluster.others(leader)
        remover.lead.remove_crashed(leader.id, epoch)
        assert await cluster.settled(epoch + 1) is third
        await asyncio.sleep(RESIGNATION_PAUSE_S)


@run_by(simulate, size=3)
async def test_the_removal_of_an_earlier_term_leaves_the_present_one_alone(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    cluster.zookeeper.remove(CONTROLLER)
    leader = await cluster.settled(2)
    for other in cluster.candidates:
        other.lead.remove_crashed(leader.id, 1)
        other.lead.remove_crashed(leader.id + 1, 2)
    await asyncio.sleep(1)
    assert await cluster.settled(2) is leader
    assert cluster.terms == [(1, cluster.terms[0][1]), (2, leader.id)]


@run_by(simulate, size=3)
async def test_a_removal_that_comes_late_cannot_hit_the_successor(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    remover = cluster.others(leader)[0]
    successor_id = 9
    hits = 0

    def elect_another_first(session: VirtualSession, operations: Sequence[Operation]) -> None:
        nonlocal hits
        if session is remover.session and Delete(CONTROLLER) in operations:
            hits += 1
            assert isinstance(operations[0], Check)
            cluster.zookeeper.before = None
            cluster.zookeeper.remove(CONTROLLER)
            cluster.zookeeper.make(CONTROLLER, encode_controller(successor_id, 0))
            cluster.zookeeper.make(CONTROLLER_EPOCH, b"2")

    cluster.zookeeper.before = elect_another_first
    leader.kill()
    remover.lead.remove_crashed(leader.id, 1)
    await cluster.until(lambda: hits == 1)
    await asyncio.sleep(1)
    assert decode_controller(cluster.zookeeper.data(CONTROLLER)) == successor_id
    assert remover.lead.controller_id == successor_id


@run_by(simulate, size=1)
async def test_a_candidate_whose_winning_reply_was_lost_takes_office(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates

    def lose_the_answer(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(isinstance(operation, Create) and operation.path == CONTROLLER for operation in operations):
            cluster.zookeeper.after = None
            session.suspend()
            asyncio.get_running_loop().call_later(0.3, session.resume)

    cluster.zookeeper.after = lose_the_answer
    await candidate.start()
    await cluster.settled(1)
    assert candidate.heard == ["controller None of epoch 0", "controller 1 of epoch 1", "elected 1"]


@run_by(simulate, size=1)
async def test_a_race_that_was_decided_and_vacated_meanwhile_is_run_again_with_the_next_epoch(
    cluster: Cluster, /
) -> None:
    def let_four_others_rule_first(_: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(isinstance(operation, Create) and operation.path == CONTROLLER for operation in operations):
            cluster.zookeeper.before = None
            cluster.zookeeper.make(CONTROLLER_EPOCH, b"4")

    cluster.zookeeper.before = let_four_others_rule_first
    await cluster.start()
    await cluster.settled(5)


@run_by(simulate, size=1)
async def test_the_end_of_a_former_session_does_not_end_the_present_one(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    await cluster.start()
    await cluster.settled(1)
    former = candidate.session
    world = candidate.world
    assert world is not None
    candidate.resignation_takes_s = 1.0
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.until(lambda: candidate.heard[-1] == "resigned")
    # During this time the new session is announced, and then the end of the former one.
    await world.process.run(candidate._open_session(world, candidate.lead))
    former.expire()
    await cluster.settled(2)


@run_by(simulate, size=3)
async def test_a_vacancy_during_a_lost_connection_is_noticed_afterwards(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    for other in cluster.others(leader):
        other.session.suspend()
    leader.kill()
    cluster.zookeeper.end(leader.session)
    await asyncio.sleep(1)
    for other in cluster.others(leader):
        other.session.resume()
    await cluster.settled(2)


@run_by(simulate, size=3)
async def test_a_controller_keeps_its_office_through_a_lost_connection(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    leader.session.suspend()
    await asyncio.sleep(3)
    leader.session.resume()
    await asyncio.sleep(1)
    assert await cluster.settled(1) is leader
    # The watch is set again.
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.settled(2)
    assert "resigned" in leader.heard


# --- Changes by hand ---


@run_by(simulate, size=2)
async def test_deleted_by_hand_there_is_a_new_race_and_the_old_term_ends_before_it(cluster: Cluster, /) -> None:
    for candidate in cluster.candidates:
        candidate.resignation_takes_s = 2.0
    await cluster.start()
    leader = await cluster.settled(1)
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.settled(2)
    await cluster.until(lambda: leader.heard[-2:] != ["resigned"])
    assert leader.heard.index("resigned") < leader.heard.index("out of office")
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.settled(3)


@run_by(simulate, size=1)
async def test_no_broker_runs_for_office_before_its_former_term_has_ended(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    candidate.resignation_takes_s = 5.0
    await cluster.start()
    await cluster.settled(1)
    cluster.zookeeper.remove(CONTROLLER)
    deleted_at = cluster.now
    await cluster.settled(2)
    assert cluster.now - deleted_at >= 5.0
    assert [h for h in candidate.heard if "controller" not in h] == [
        "elected 1",
        "resigned",
        "out of office",
        "elected 2",
    ]


@pytest.mark.parametrize("written", [encode_controller(9, 0), b"garbage", b""])
@run_by(simulate, size=3)
async def test_a_controller_that_a_rewritten_node_does_not_match_resigns_and_a_new_one_is_elected(
    cluster: Cluster, /, written: bytes
) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    cluster.zookeeper.make(CONTROLLER, written)
    await cluster.settled(2)
    assert "resigned" in leader.heard
    assert "no longer matches" in cluster.reasons[0]


@pytest.mark.parametrize("written", [encode_controller(-1, 0), b"garbage", b""])
@run_by(simulate, size=3)
async def test_malformed_and_of_no_session_it_is_removed_and_one_is_elected(
    cluster: Cluster, /, written: bytes
) -> None:
    cluster.zookeeper.make(CONTROLLER, written)
    await cluster.start()
    await cluster.settled(1)


@pytest.mark.parametrize("set_back", [True, False])
@run_by(simulate, size=2)
async def test_epochs_grow_even_if_the_epoch_is_deleted_or_set_back_by_hand(
    cluster: Cluster, /, set_back: bool
) -> None:
    await cluster.start()
    await cluster.settled(1)
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.settled(2)
    if set_back:
        cluster.zookeeper.make(CONTROLLER_EPOCH, b"0")
    else:
        cluster.zookeeper.remove(CONTROLLER_EPOCH)
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.settled(3)


@run_by(simulate, size=1)
async def test_a_malformed_epoch_is_complained_of_until_it_is_mended(
    cluster: Cluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.zookeeper.make(CONTROLLER_EPOCH, b"seven")
    await cluster.start()
    await asyncio.sleep(5)
    assert cluster.terms == []
    assert "holds b'seven'" in caplog.text
    cluster.zookeeper.make(CONTROLLER_EPOCH, b"7")
    await cluster.settled(8)


# --- Resigning ---


@run_by(simulate, size=1)
async def test_an_expired_session_ends_the_term_and_the_next_session_runs_again(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    await cluster.start()
    await cluster.settled(1)
    candidate.session.expire()
    await cluster.settled(2)
    assert "has expired" in cluster.reasons[0]
    assert len(candidate.sessions) == 2


@run_by(simulate, size=1)
async def test_a_term_ends_with_the_same_reason_if_a_request_finds_the_session_expired(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    await cluster.start()
    await cluster.settled(1)
    session = candidate.session

    async def expired(*_: object) -> tuple[bytes, Stat]:
        raise SessionExpired("exists /controller: the session is over; open a new one")

    session.get = expired  # type: ignore[method-assign, assignment]
    candidate.lead.attach(session)
    await until(lambda: bool(cluster.reasons))
    assert cluster.reasons[0] == f"the ZooKeeper session 0x{session.session_id:x} has expired"


@run_by(simulate, size=3)
async def test_a_controller_that_resigns_leaves_the_office_to_another(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    leader.lead.resign("the executor says so")
    asked_at = cluster.now
    successor = await cluster.settled(2)
    assert successor is not leader
    assert cluster.now - asked_at < RESIGNATION_PAUSE_S
    assert cluster.reasons == ["the executor says so"]
    await asyncio.sleep(1)
    assert await cluster.settled(2) is successor


@run_by(simulate, size=1)
async def test_a_controller_that_resigns_alone_is_elected_again_after_a_pause(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    await cluster.start()
    await cluster.settled(1)
    candidate.lead.resign("try again")
    asked_at = cluster.now
    await cluster.settled(2)
    assert RESIGNATION_PAUSE_S <= cluster.now - asked_at < RESIGNATION_PAUSE_S + 0.1


@run_by(simulate, size=2)
async def test_a_resignation_during_a_lost_connection_removes_the_node_afterwards(cluster: Cluster, /) -> None:
    await cluster.start()
    leader = await cluster.settled(1)
    leader.session.suspend()
    leader.lead.resign("no use")
    await cluster.until(lambda: not leader.lead.is_controller)
    assert decode_controller(cluster.zookeeper.data(CONTROLLER)) == leader.id
    leader.session.resume()
    assert await cluster.settled(2) is not leader


@run_by(simulate, size=2)
async def test_a_candidate_that_cannot_take_office_gives_it_up_and_another_is_elected(
    cluster: Cluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    able, unable = cluster.candidates
    unable.refuses_office = True
    await unable.start()
    await cluster.until(lambda: "elected 1" in unable.heard)
    await able.start()
    await cluster.until(lambda: able.in_office is not None)
    assert unable.in_office is None
    assert unable.heard.count("resigned") == unable.heard.count("out of office") >= 1
    assert "could not take office" in caplog.text


@run_by(simulate, size=1)
async def test_a_restarted_broker_does_not_wait_for_its_own_former_controller_node(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    await cluster.start()
    await cluster.settled(1)
    candidate.kill()
    killed_at = cluster.now
    await candidate.start()
    await cluster.settled(2)
    assert cluster.now - killed_at < 0.5


@run_by(simulate, size=1)
async def test_closing_ends_the_term_and_waits_for_it(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    candidate.resignation_takes_s = 3.0
    await cluster.start()
    await cluster.settled(1)
    assert candidate.world is not None
    await candidate.world.process.run(candidate.lead.close())
    assert candidate.heard[-2:] == ["resigned", "out of office"]


@run_by(simulate, size=1)
async def test_closing_waits_for_a_term_that_is_just_being_ended(cluster: Cluster, /) -> None:
    [candidate] = cluster.candidates
    candidate.resignation_takes_s = 3.0
    await cluster.start()
    await cluster.settled(1)
    cluster.zookeeper.remove(CONTROLLER)
    await cluster.until(lambda: candidate.heard[-1] == "resigned")
    assert candidate.world is not None
    await candidate.world.process.run(candidate.lead.close())
    assert candidate.heard.count("resigned") == 1
    assert candidate.heard[-1] == "out of office"


# --- All events at once ---


@pytest.mark.parametrize("seed", range(25))
@run_by(simulate, size=3)
async def test_whatever_happens_each_epoch_has_one_controller_and_in_the_end_there_is_one(
    cluster: Cluster, /, seed: int
) -> None:
    random = Random(seed)
    loop = asyncio.get_running_loop()
    zookeeper = cluster.zookeeper
    for candidate in cluster.candidates:
        candidate.resignation_takes_s = random.choice([0.0, 0.01, 1.0])
    await cluster.start()

    def lose_an_answer(session: VirtualSession, _: Sequence[Operation]) -> None:
        if random.random() < 0.1:
            session.suspend(requests_arrive=random.random() < 0.5)
            loop.call_later(random.uniform(0, 8), session.resume)

    zookeeper.after = lose_an_answer
    for _ in range(40):
        await asyncio.sleep(random.choice([0.0, 0.001, 0.1, 1.0, 3.0]))
        candidate = random.choice(cluster.candidates)
        living = candidate.world is not None and candidate.world.process.alive
        match random.randrange(8):
            case 0 if living:
                candidate.kill()
            case 0:
                await candidate.start()
            case 1 if living:
                candidate.session.suspend(requests_arrive=random.random() < 0.5)
                loop.call_later(random.uniform(0, 8), candidate.session.resume)
            case 2 if living:
                candidate.session.expire()
            case 3 if zookeeper.has(CONTROLLER):
                zookeeper.remove(CONTROLLER)
            case 4 if zookeeper.has(CONTROLLER):
                zookeeper.make(CONTROLLER, encode_controller(random.randrange(4), 0))
            case 5 if living:
                candidate.lead.resign("chance")
            case 6 if living and candidate.lead.controller_id is not None:
                candidate.lead.remove_crashed(candidate.lead.controller_id, candidate.lead.epoch)
            case _:
                pass
        office = [c.in_office for c in cluster.in_office]
        assert len(set(office)) == len(office)
    zookeeper.after = None
    await asyncio.sleep(10)
    for candidate in cluster.candidates:
        if candidate.world is not None and not candidate.world.process.alive:
            await candidate.start()
    if zookeeper.has(CONTROLLER) and not zookeeper.stat(CONTROLLER).ephemeral_owner:
        zookeeper.remove(CONTROLLER)
    await asyncio.sleep(10)
    leader = await cluster.settled(cluster.terms[-1][0])
    assert cluster.in_office == [leader]
    epochs = [epoch for epoch, _ in cluster.terms]
    assert epochs == sorted(set(epochs))

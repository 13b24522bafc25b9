"""Any order of joins, syncs, heartbeats, departures, silences and changes of the coordinator, against a simple model.

Each generation has one assignment; only its members receive it, each its own part; a member's generations only grow;
and once all members follow the protocol, one generation soon has them all.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minibroker.broker.groups.states import GroupState
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from tests.groups_support import CoordinatedGroups, with_groups
from tests.replication_support import ME
from tests.waiting import until

E = ErrorCode
CLIENTS = 3
ISR = (ME, 2, 3)
SETTINGS = {"group.initial.rebalance.delay.ms": "50"}
JOIN_AGAIN = (E.UNKNOWN_MEMBER_ID, E.FENCED_INSTANCE_ID)

COMMON = [("act", 0), ("act", 1), ("act", 2), ("replicate", 0), ("wait", 1), ("wait", 60), ("wait", 60)]
RARE = [(what, number) for what in ("join", "sync", "heartbeat", "leave", "forget") for number in range(CLIENTS)]
RARE += [("wait", 500), ("wait", 4_000), ("wait", 7_000), ("failover", 0)]
steps = st.lists(st.sampled_from(COMMON * 12 + RARE), min_size=60, max_size=120)


class Model:
    """The assignments received in each generation."""

    def __init__(self) -> None:
        self.brought = itertools.count()
        self.given: dict[int, int] = {}
        """Which of the leaders' assignments is that of the generation."""

    def gives(self, generation: int, member_id: str, assignment: bytes) -> None:
        if not assignment:
            return  # the leader did not know this member
        number, in_generation, owner = assignment.decode().split(":", 2)
        assert owner == member_id
        assert int(in_generation) == generation
        assert self.given.setdefault(generation, int(number)) == int(number), f"two assignments in {generation}"


class Client:
    def __init__(self, groups: CoordinatedGroups, model: Model, name: str | None) -> None:
        self.groups = groups
        self.model = model
        self.name = name
        self.member_id = ""
        self.generation = -1
        self.joined: g.JoinGroupResponse | None = None
        self.waits: asyncio.Future[g.JoinGroupResponse] | asyncio.Future[g.SyncGroupResponse] | None = None

    def forget(self) -> None:
        """Close the coordinator as a kill does: the next one starts without its memory."""
        self.member_id, self.generation, self.joined, self.waits = "", -1, None, None

    def join(self) -> None:
        future = self.groups.join(
            self.member_id, instance=self.name, session_timeout_ms=6_000, rebalance_timeout_ms=5_000
        )
        self.waits = future
        future.add_done_callback(self._join_answered)

    def _join_answered(self, future: asyncio.Future[g.JoinGroupResponse]) -> None:
        if self.waits is not future:
            return
        answer = future.result()
        self.waits = None
        if answer.error_code == E.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        elif answer.error_code in JOIN_AGAIN:
            self.forget()
        elif not answer.error_code:
            assert answer.generation_id >= self.generation, "a generation that went back"
            self.member_id, self.generation, self.joined = answer.member_id, answer.generation_id, answer
            if answer.leader == answer.member_id:
                assert answer.member_id in [member.member_id for member in answer.members]
            else:
                assert not answer.members

    def sync(self) -> None:
        if self.joined is None:
            return
        given = {}
        if self.joined.leader == self.member_id and not self.joined.skip_assignment:
            number = next(self.model.brought)
            given = {
                member.member_id: f"{number}:{self.generation}:{member.member_id}".encode()
                for member in self.joined.members
            }
        future = self.groups.sync(self.member_id, self.generation, given, instance=self.name)
        self.waits = future
        member_id, generation = self.member_id, self.generation
        future.add_done_callback(lambda done: self._sync_answered(done, member_id, generation))

    def _sync_answered(self, future: asyncio.Future[g.SyncGroupResponse], member_id: str, generation: int) -> None:
        answer = future.result()
        if not answer.error_code and self.name is None:
            # The assignment of a static member that has come back names its former id as the owner.
            self.model.gives(generation, member_id, bytes(answer.assignment))
        if self.waits is future:
            self.waits = None
            if answer.error_code in JOIN_AGAIN:
                self.forget()

    def heartbeat(self) -> ErrorCode:
        code = self.groups.heartbeat(self.member_id, self.generation, instance=self.name)
        if code in JOIN_AGAIN:
            self.forget()
        return code

    def leave(self) -> None:
        self.groups.leave(self.member_id)
        self.forget()

    def act(self) -> None:
        """Do what a client does."""
        if self.waits is None:
            code = self.heartbeat() if self.joined is not None else E.UNKNOWN_MEMBER_ID
            if code is E.NONE:
                self.sync()
            else:
                self.join()


async def carry_out(groups: CoordinatedGroups, todo: list[tuple[str, int]]) -> None:
    model = Model()
    clients = [Client(groups, model, "static" if number == 0 else None) for number in range(CLIENTS)]
    epoch = 0
    await groups.lead(epoch, ISR)
    for step, argument in todo:
        if step == "wait":
            await asyncio.sleep(argument / 1_000)
        elif step == "replicate":
            groups.replicate(2, 3)
        elif step == "failover":
            await groups.follow(epoch + 1)
            epoch += 2
            await groups.lead(epoch, ISR, wait=False)
            groups.replicate(2, 3)
            await until(groups.groups.terms.loaded)
        else:
            getattr(clients[argument], step)()
        await asyncio.sleep(0.001)  # answers arrive

    def is_settled() -> bool:
        group = groups.groups.terms.loaded()[0].groups.get("billing")
        known = {client.member_id for client in clients if client.joined is not None and client.waits is None}
        return (
            group is not None
            and group.is_in(GroupState.STABLE)
            and len(group.members) == CLIENTS
            and known == set(group.members)
            and {client.generation for client in clients} == {group.generation_id}
            and not group.pending_sync
        )

    async with asyncio.timeout(60):
        while not is_settled():
            for client in clients:
                client.act()
            groups.replicate(2, 3)
            await asyncio.sleep(0.05)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_a_generation_has_one_assignment_and_members_settle_in_any_order_of_events(
    todo: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with_groups(Path(directory), lambda groups: carry_out(groups, todo), SETTINGS, lead=False)

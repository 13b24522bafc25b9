"""A member's standing in its group: its state, its id and generation, and what it may commit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.group.group_settings import GroupSettings
from minibroker.client.group.heart import Membership
from minibroker.client.group.states import AFTER_LOSS, MOVES, MemberState, Reaction, reaction
from minibroker.client.log import Logger
from minibroker.client.tasks import Pulse, Waker
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition

logger = Logger("minibroker.client")

NO_GENERATION = -1

S = MemberState


class Setback(NamedTuple):
    at: float
    error: MinibrokerError


class _Loss(NamedTuple):
    reaction: Reaction
    error: MinibrokerError | None
    """Raised to the user."""


class Standing:
    """Written by the member's task, by the heart's news and by refused commits. It is the `Committer` of the member's
    commits. `waker` wakes the member's task."""

    def __init__(
        self,
        runtime: ClientRuntime,
        partitions: FetchedPartitions,
        in_hand: InHand,
        waker: Waker,
        settings: GroupSettings,
        *,
        is_cooperative: bool,
    ) -> None:
        self.who = f"{runtime.connections.client_id} in group {settings.group}"
        self._clock = runtime.clock
        self._partitions = partitions
        self._in_hand = in_hand
        self._waker = waker
        self._errors = partitions.errors
        self._group = settings.group
        self._instance_id = settings.group_instance_id
        self._is_cooperative = is_cooperative
        self.state = S.UNJOINED
        self.unsettled_since = self._clock.monotonic()
        """When the member was last stable, or was made."""
        self.stirred = Pulse()
        """Beats when the member may have begun to wait for something."""
        self.settled = Pulse()
        """Beats when commits may have become possible, or impossible."""
        self.member_id = ""
        self.generation_id = NO_GENERATION
        self.why_rejoin: str | None = None
        """Why the member must join again; None if nothing requires it."""
        self.trouble: str | None = None
        """Why the step under way does not succeed."""
        self.setback: Setback | None = None
        """The latest error after which a request of this rebalance was repeated."""
        self._loss = _Loss(Reaction.LOSE, None)
        """The cause of the latest LOST."""
        self.refusal: MinibrokerError | None = None
        """The latest error of a loss, for the user."""
        self.lost: list[TopicPartition] = []
        """The partitions that were lost with `refusal`."""
        self._uncommitted: dict[TopicPartition, MinibrokerError] = {}
        """Lost partitions with uncommitted records, and why they were lost. Kept until the next assignment: until then
        a commit of all positions must fail, although there is no position left to commit."""

    # -- moves --

    def move(self, state: MemberState) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        logger.debug("%s: %s -> %s", self.who, self.state.name, state.name)
        if self.state is S.STABLE:
            self.unsettled_since = self._clock.monotonic()
        self.state = state
        if state is S.STABLE:
            self.setback = None
        self.stirred.notify()
        self.settled.notify()

    def joined(self, member_id: str, generation_id: int) -> None:
        self.member_id, self.generation_id = member_id, generation_id
        if self.state is not S.LOST:
            self.move(S.SYNCING)

    def left_generation(self, keeps_id: bool) -> None:
        self.generation_id = NO_GENERATION
        if not keeps_id:
            self.member_id = ""
        self.settled.notify()

    def rejoin(self, why: str) -> None:
        if self.why_rejoin is None:
            self.why_rejoin = why
            self._waker.wake()

    def lose(self, what: Reaction, error: MinibrokerError | None = None) -> None:
        """The group goes on without the member, whose task does the rest."""
        if self.state is not S.LOST:
            self._loss = _Loss(what, error)
            self.move(S.LOST)
            self._in_hand.is_quiet = True
            self._partitions.cut()
            self._in_hand.freed.notify()
            self._waker.wake()

    def begin_loss(self) -> None:
        """The first half of a loss: the member is in no generation any more."""
        self.left_generation(keeps_id=self._loss.reaction is Reaction.LOSE)

    def end_loss(self, lost: list[TopicPartition]) -> MemberState:
        """The second half, after the partitions were dropped. Returns the state of the member."""
        what, error = self._loss
        self.move(AFTER_LOSS.get(what, S.UNJOINED))
        self.rejoin("it has lost its membership")
        if error is not None:
            self._errors.append(error)
            self.refusal, self.lost = error, lost
        return self.state

    # -- why commits fail --

    @property
    def untold(self) -> MinibrokerError | None:
        """The error of the latest loss, if the next call for records has still to raise it."""
        return self.refusal if self.refusal in self._errors else None

    @property
    def fenced(self) -> MinibrokerError | None:
        return self.refusal if self.state is S.FENCED else None

    def note_uncommitted(self, lost: Iterable[TopicPartition]) -> None:
        why = self._loss.error or MinibrokerError("the group went on without this member")
        states = self._partitions.states
        self._uncommitted |= {p: why for p in lost if p in states and states[p].has_uncommitted}

    def forget_uncommitted(self) -> None:
        self._uncommitted.clear()

    def lost_positions(self) -> dict[TopicPartition, MinibrokerError]:
        """The partitions that a commit of all positions can no longer commit, and why."""
        error = self.untold
        return self._uncommitted | ({} if error is None else dict.fromkeys(self.lost, error))

    # -- the Committer --

    def membership(self) -> Membership | None:
        if self.generation_id == NO_GENERATION or self.state is S.LOST:
            return None
        return Membership(self._group, self.generation_id, self.member_id, self._instance_id)

    def claim(self, partition: TopicPartition) -> object:
        return self._partitions.states.get(partition)

    def why_not(self, partition: TopicPartition, claim: object) -> str | None:
        if claim is not None and self._partitions.states.get(partition) is claim and self.membership() is not None:
            return None
        error = self._loss.error if self.state is S.LOST else self.untold or self._uncommitted.get(partition)
        if error is not None:
            return f"the member has lost its partitions: {error}"
        if self.generation_id == NO_GENERATION:
            return "the member is in no generation of the group now, so it may not commit"
        return f"{partition} is not assigned to this member, or no longer: another member may have it"

    def committed(self, partition: TopicPartition, claim: object, offset: int) -> None:
        if isinstance(claim, TopicPartitionState):
            claim.saved = offset

    def refused(self, membership: Membership, code: ErrorCode) -> None:
        """React to a heartbeat or a commit that the coordinator has refused."""
        if membership != self.membership():
            return  # an earlier generation
        if self.state in (S.PREPARING, S.JOINING) and self._is_cooperative:
            return  # a later generation may exist already, and the answer to JoinGroup will say so
        if self.state is S.SYNCING and code is ErrorCode.REBALANCE_IN_PROGRESS:
            return  # the present rebalance; a heartbeat reports any further one
        why = f"the coordinator says {code.name}"
        match reaction(code):
            case Reaction.REJOIN:
                self.rejoin(why)
            case Reaction.LOSE | Reaction.BEGIN_ANEW as what:
                self.lose(what)
                logger.info("%s: %s, so it has lost its partitions and joins again", self.who, why)
            case Reaction.FENCED | Reaction.RAISE as what:
                self.lose(what, BrokerError(code, f"group {self._group}"))

    def why_refused(self, code: ErrorCode) -> MinibrokerError:
        if self.state is S.LOST and self._loss.error is not None:
            return self._loss.error
        return BrokerError(code, f"committing offsets of group {self._group}")

    async def can_retry(self, membership: Membership, code: ErrorCode) -> bool:
        """Wait for the assignment, but not for the end of the rebalance: the partitions to be revoked wait for a user
        who may be waiting for this commit."""
        if self.state.is_revoking:
            return False
        # If nothing changes hands, the rebalance may be over before this wakes, with the membership of the commit.
        was_completing = self.state in (S.SYNCING, S.RECONCILING) and code is ErrorCode.REBALANCE_IN_PROGRESS
        while self.state is not S.LOST and self.generation_id != NO_GENERATION:
            if self.state.has_assignment and (was_completing or self.membership() != membership):
                return True
            await self.settled.wait()
        return False

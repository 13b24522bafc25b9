"""A consumer's side of its group: committed offsets, automatic commits, and the membership unless partitions are
assigned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import InvalidSetting
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.group.auto_commit import AutoCommit, positions
from minibroker.client.group.commits import Commits, GroupMetadata, Nobody, OffsetAndMetadata, Ticket, check_offsets
from minibroker.client.group.group_settings import GroupSettings
from minibroker.client.group.member import GroupMember
from minibroker.client.group.starting_points import begin_by_hand
from minibroker.client.group.waits import watch
from minibroker.client.log import Logger
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition

logger = Logger("minibroker.client")

Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


class GroupSession:
    """Made by a consumer that has a group. `auto_commit_interval_s` is None if nothing is committed automatically.

    A consumer that was made with `partitions` has no member. Any other consumer is a member, except while partitions
    are assigned to it by hand.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        partitions: FetchedPartitions,
        in_hand: InHand,
        settings: GroupSettings,
        *,
        has_member: bool,
        auto_commit_interval_s: float | None,
    ) -> None:
        self._runtime = runtime
        self._partitions = partitions
        self._in_hand = in_hand
        self._api_timeout_s = settings.api_timeout_s
        self._commit_tasks: dict[asyncio.Task[None], None] = {}
        coordinators = Coordinators(runtime, Purpose.COORDINATOR)
        self.commits = Commits(runtime, coordinators, settings.group)
        self._auto_commit: AutoCommit | None = None
        if auto_commit_interval_s is not None:
            who = runtime.connections.client_id
            self._auto_commit = AutoCommit(
                partitions, self.commits, in_hand, runtime.clock, who, auto_commit_interval_s
            )
        self.member: GroupMember | None = None
        if has_member:
            self.member = GroupMember(
                runtime,
                partitions,
                in_hand,
                coordinators,
                self.commits,
                settings,
                None if self._auto_commit is None else self._auto_commit.commit,
            )
            self.commits.committer = self.member.standing

    def metadata(self) -> GroupMetadata:
        """See `Consumer.group_metadata`. A member that was removed joins again only after its user has asked for
        records. So the membership is one under which the records that the user holds may be committed."""
        membership = self.commits.committer.membership()
        if membership is not None:
            return GroupMetadata(*membership)
        raise BrokerError(
            ErrorCode.ILLEGAL_GENERATION,
            f"the consumer is not a member of group {self.commits.group} now, or not any more, so it may not commit "
            "offsets: abort the transaction, and ask the consumer for records again",
            is_complete=True,
        )

    # -- its tasks --

    def go(self) -> None:
        tasks = self._runtime.tasks
        if self.member is not None:
            tasks.start(self.member.beat(), "heart")
            tasks.start(self.member.run(), "group member")
            tasks.start(watch(self.member, self._runtime, self._in_hand), "waits of the group member")
        if self._auto_commit is not None:
            tasks.start(self._auto_commit.run(), "auto-commit")

    def go_on(self) -> None:
        """The tasks were cancelled, and run again."""
        if self.member is not None:
            self.member.go_on()
        else:
            self.begin_by_hand([state for state in self._partitions.states.values() if state.awaits_committed])

    def begin_by_hand(self, states: Sequence[TopicPartitionState]) -> None:
        begin = begin_by_hand(self._partitions, self.commits, states, self._api_timeout_s)
        self._runtime.tasks.start(begin, "find committed offsets")

    # -- membership --

    @property
    def is_member(self) -> bool:
        return not self.commits.is_by_hand

    def assigns_by_hand(self, kept: Sequence[TopicPartition]) -> None:
        """The user assigns these partitions by hand. If others were assigned
        before, commit their positions. Raises InvalidSetting."""
        if self.is_member:
            assert self.member is not None
            if self.member.standing.state.is_in_group:
                rule = f"this consumer is still leaving group {self.member.group}: call unsubscribe() again first"
                raise InvalidSetting("partitions", kept, rule)
            self.commits.committer = Nobody(self.commits.group)
        elif self._auto_commit is not None:
            gone = {partition: at for partition, at in positions(self._partitions).items() if partition not in kept}
            if gone:
                self.commit_nowait(gone)

    async def leave(self) -> None:
        """Commit automatically, call the listener, and leave the group."""
        if self.is_member:
            assert self.member is not None
            self.member.subscribe(None)
            await self.member.left()
        elif self._auto_commit is not None:
            await self._auto_commit.commit(self._api_timeout_s)

    def assigns_no_more(self) -> None:
        """The user has unsubscribed."""
        if self.member is not None:
            self.commits.committer = self.member.standing

    async def say_goodbye(self) -> None:
        """Leave the group after all commits that are under way."""
        await self.commits.drained()
        await self.leave()

    def undone(self) -> str:
        """Return the steps that `say_goodbye` has not done yet, in words."""
        undone = []
        if self._auto_commit is not None and (count := len(self._auto_commit.news())):
            undone.append(f"{count} partition{'s were' if count > 1 else ' was'} not committed")
        if self.is_member and self.member is not None and self.member.standing.state.is_in_group:
            undone.append(self.member.not_left())
        return "; ".join(undone)

    def cancel_commits(self) -> None:
        for task in self._commit_tasks:
            task.cancel()

    # -- commits --

    async def commit(self, offsets: Offsets | None) -> None:
        to_commit, lost = self._to_commit(offsets)
        if to_commit or lost:
            await self.commits.commit(self._ticket(offsets, to_commit, lost), self._api_timeout_s)

    def commit_nowait(self, offsets: Offsets | None) -> asyncio.Task[None]:
        ticket = self._ticket(offsets, *self._to_commit(offsets))
        task = asyncio.get_running_loop().create_task(self.commits.commit(ticket, self._api_timeout_s), name="commit")
        self._commit_tasks[task] = None
        running, commits, who = self._commit_tasks, self.commits, self._runtime.connections.client_id

        def ended(task: asyncio.Task[None]) -> None:
            running.pop(task, None)
            commits.give_back(ticket)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("%s: commit_nowait: %s", who, error)

        task.add_done_callback(ended)
        return task

    def _to_commit(
        self, offsets: Offsets | None
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], Mapping[TopicPartition, MinibrokerError]]:
        """Return the offsets to commit, and the partitions that a commit of all positions has lost. There are either
        positions of the present assignment, or of the one that was lost."""
        to_commit = positions(self._partitions) if offsets is None else check_offsets(offsets)
        self._in_hand.vouch({partition: committed.offset for partition, committed in to_commit.items()})
        if offsets is None and not to_commit and self.member is not None:
            return {}, self.member.standing.lost_positions()
        return to_commit, {}

    def _ticket(
        self,
        offsets: Offsets | None,
        to_commit: Mapping[TopicPartition, OffsetAndMetadata],
        lost: Mapping[TopicPartition, MinibrokerError],
    ) -> Ticket:
        # The user's offsets are those of records that it holds. Their topic may have been created again since;
        # positions are always in the present topic.
        topic_id: Callable[[TopicPartition], str] = self._partitions.topic_id
        return self.commits.ticket(to_commit, topic_id if offsets is None else self._partitions.handed_out_of, lost)

    async def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        clock, metadata = self._runtime.clock, self._runtime.metadata
        with metadata.wanted(partition.topic for partition in partitions):
            deadline = clock.monotonic() + self._api_timeout_s
            if any(partition.topic not in metadata.cluster.topics for partition in partitions):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._api_timeout_s):
                        await metadata.refreshed()
            found = await self.commits.fetch(partitions, max(0.001, deadline - clock.monotonic()))
        return {
            partition: None if (at := found.get(partition)) is None or at.is_of_older_topic else at.offset
            for partition in partitions
        }

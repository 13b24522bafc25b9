"""Committed offsets of one group: writing them, in order, and reading them.

Commits are sent one at a time, in the order of the calls, so that the retry of an earlier commit cannot overtake a
later one and set the group back. Each names the membership at the moment at which it is sent. So a member cannot commit
partitions that it has lost, and the coordinator refuses commits of a member that the group has removed.

A commit that meets a rebalance is repeated after the rebalance, for the partitions that the member still has. Kafka's
client raises RebalanceInProgressException to the user, who can only do the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.cluster.metadata import UNKNOWN_FOR_S
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import ApiTimedOut, CommitFailed
from minibroker.client.fetching.fetcher import UNKNOWN_TOPIC_PATIENCE_S
from minibroker.client.group.heart import Membership
from minibroker.client.group.states import Reaction, reaction
from minibroker.client.log import Logger
from minibroker.client.settings import check_by_partition, check_integer, check_text
from minibroker.client.tasks import Pulse
from minibroker.protocol.apis import OFFSET_COMMIT, OFFSET_FETCH
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, MinibrokerError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.topic_ids import is_older

logger = Logger("minibroker.client")

_OF_THE_GROUP = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.REQUEST_TIMED_OUT,
)
"""Errors that OffsetCommit reports for each partition, although they concern the whole request."""


class OffsetAndMetadata(NamedTuple):
    """A committed offset of a partition, or one to commit."""

    offset: int
    """The offset of the next record to read."""
    leader_epoch: int | None = None
    """The leader epoch of the record before it, if it is known (KIP-320)."""
    metadata: str = ""
    """Any text that the user stores with it."""


class GroupMetadata(NamedTuple):
    """A consumer's place in its group (`Consumer.group_metadata`), for `Transaction.send_offsets`: the coordinator
    refuses offsets of a member that has left or was removed since (KIP-447)."""

    group: str
    generation_id: int = -1
    """-1: partitions were assigned by hand, and no membership is checked."""
    member_id: str = ""
    group_instance_id: str | None = None


def check_offsets(
    offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Raises InvalidSetting."""
    return {
        partition: value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        for partition, value in check_by_partition("offsets", offsets, 5, _check_offset).items()
    }


def _check_offset(value: int | OffsetAndMetadata) -> None:
    committed = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
    check_integer("offset", committed.offset, 0, 2**63 - 1)
    if committed.leader_epoch is not None:
        check_integer("leader_epoch", committed.leader_epoch, 0, 2**31 - 1)
    check_text("metadata", committed.metadata)


_NOT_THIS_TOPIC = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INCONSISTENT_TOPIC_ID)


class Ticket:
    """A commit in the queue."""

    def __init__(
        self,
        offsets: dict[TopicPartition, OffsetAndMetadata],
        claims: Mapping[TopicPartition, object],
        topic_ids: Mapping[TopicPartition, str],
        lost: Mapping[TopicPartition, MinibrokerError],
    ) -> None:
        self.offsets = offsets
        self.claims = claims
        self.topic_ids = topic_ids
        self.lost = lost
        """Partitions of the commit that were lost, and why."""
        self.is_next = asyncio.Event()
        """One event per commit: if each woke all that wait, a queue of thousands would take minutes of CPU time."""


class Committed(NamedTuple):
    """The coordinator's answer for a partition."""

    offset: OffsetAndMetadata
    is_of_older_topic: bool
    """The offset belongs to a topic of that name that was deleted since."""


class Committer(Protocol):
    """The origin of commits: a member, or a consumer with partitions assigned by hand."""

    def membership(self) -> Membership | None:
        """Return the membership under which to commit now; None if it is in no group."""
        ...

    def claim(self, partition: TopicPartition) -> object:
        """Return an object that stands for the present ownership of the partition. It is another object after the
        partition was lost, even for a moment."""
        ...

    def why_not(self, partition: TopicPartition, claim: object) -> str | None:
        """Return why it may not commit this partition under that claim; None if it may."""
        ...

    def committed(self, partition: TopicPartition, claim: object, offset: int) -> None:
        """The coordinator has stored this offset, which was committed under that claim."""
        ...

    def refused(self, membership: Membership, code: ErrorCode) -> None:
        """The coordinator has refused a commit by that membership."""
        ...

    def why_refused(self, code: ErrorCode) -> MinibrokerError:
        """Return the error for a commit that the coordinator has refused finally."""
        ...

    async def can_retry(self, membership: Membership, code: ErrorCode) -> bool:
        """Wait until the rebalance is over that a refused commit has met. Returns False if it met none, or if the
        partitions are lost."""
        ...


class Nobody:
    """The committer of partitions that were assigned by hand. The coordinator accepts such commits for groups without
    members."""

    def __init__(self, group: str) -> None:
        self._membership = Membership(group, -1, "")

    def membership(self) -> Membership | None:
        return self._membership

    def claim(self, partition: TopicPartition) -> object:
        return self

    def why_not(self, partition: TopicPartition, claim: object) -> str | None:
        return None

    def committed(self, partition: TopicPartition, claim: object, offset: int) -> None:
        pass

    def refused(self, membership: Membership, code: ErrorCode) -> None:
        pass

    def why_refused(self, code: ErrorCode) -> MinibrokerError:
        group = self._membership.group
        if reaction(code) is Reaction.RAISE:
            return BrokerError(code, f"committing offsets of group {group}")
        said = (
            f"group {group} has members, and takes commits from them alone (see `minibroker groups describe {group}`): "
            "for partitions that are assigned by hand use a group of their own, or subscribe() instead"
        )
        return BrokerError(ErrorCode.NON_EMPTY_GROUP, said, is_complete=True)

    async def can_retry(self, membership: Membership, code: ErrorCode) -> bool:
        return False


class Commits:
    """See the module."""

    def __init__(self, runtime: ClientRuntime, coordinators: Coordinators, group: str) -> None:
        self._runtime = runtime
        self._coordinators = coordinators
        self.group = group
        self.committer: Committer = Nobody(group)
        self.on_committed: Callable[[TopicPartition, str, int], None] | None = None
        """Called with each offset that the coordinator has stored, and the id of its topic, if the commit named it."""
        self._queue: OrderedDict[Ticket, None] = OrderedDict()
        """The commits under way, in the order of the calls."""
        self._drained = Pulse()
        self._unknown_since: dict[tuple[TopicPartition, str], float] = {}
        """When commits began to wait for partitions, in topics with these ids, that the coordinator does not know.
        Kept while commits are queued, so that they do not each wait anew."""

    @property
    def is_by_hand(self) -> bool:
        """Whether partitions were assigned by hand, so that no member commits."""
        return isinstance(self.committer, Nobody)

    # -- writing --

    def ticket(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        topic_id: Callable[[TopicPartition], str],
        lost: Mapping[TopicPartition, MinibrokerError] = MappingProxyType({}),
    ) -> Ticket:
        """Return a place in the queue, for `commit`. `topic_id` returns the id of the topic to which a partition's
        offset belongs; empty: the topic that has the name. `lost`: partitions that can no longer be committed, and why;
        they make the commit fail."""
        ticket = Ticket(
            dict(offsets),
            {partition: self.committer.claim(partition) for partition in offsets},
            {partition: topic_id(partition) for partition in offsets},
            lost,
        )
        self._queue[ticket] = None
        self._call_next()
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Leave the queue: the commit is over, or will not be made. May be called again."""
        self._queue.pop(ticket, None)
        self._call_next()

    def _call_next(self) -> None:
        if self._queue:
            next(iter(self._queue)).is_next.set()
        else:
            self._unknown_since.clear()
            self._drained.notify()

    async def drained(self) -> None:
        """Return once no commit is under way."""
        while self._queue:
            await self._drained.wait()

    async def commit(self, ticket: Ticket, timeout_s: float) -> None:
        """Return once the coordinator has stored all offsets. Raises CommitFailed, which names the others."""
        deadline = self._runtime.clock.monotonic() + timeout_s
        try:
            await self._turn(ticket, timeout_s)
            errors = await self._commit(ticket, deadline)
        finally:
            self.give_back(ticket)
        if errors:
            raise CommitFailed(self.group, errors)

    async def repeat(
        self,
        otherwise: Mapping[TopicPartition, OffsetAndMetadata],
        topic_id: Callable[[TopicPartition], str],
        timeout_s: float,
    ) -> None:
        """Commit the group's committed offsets of these partitions again, or the given offset if the group has none.
        The offsets are read when it is this commit's turn, so that it undoes none of this consumer's commits. Raises
        CommitFailed."""
        if not otherwise:
            return
        deadline = self._runtime.clock.monotonic() + timeout_s
        ticket = self.ticket(otherwise, topic_id)
        try:
            await self._turn(ticket, timeout_s)
            found = await self.fetch(otherwise, max(0.001, deadline - self._runtime.clock.monotonic()))
            ticket.offsets |= {partition: at.offset for partition, at in found.items() if not at.is_of_older_topic}
            await self.commit(ticket, max(0.001, deadline - self._runtime.clock.monotonic()))
        except CommitFailed:
            raise
        except MinibrokerError as error:
            raise CommitFailed(self.group, dict.fromkeys(otherwise, error)) from error
        finally:
            self.give_back(ticket)

    async def _turn(self, ticket: Ticket, timeout_s: float) -> None:
        """Wait until all earlier commits are over. Raises CommitFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                await ticket.is_next.wait()
        except TimeoutError:
            why = ApiTimedOut(f"an earlier commit of this consumer has not ended within {timeout_s:g} s")
            raise CommitFailed(self.group, {**dict.fromkeys(ticket.offsets, why), **ticket.lost}) from None

    async def _commit(self, ticket: Ticket, deadline: float) -> dict[TopicPartition, MinibrokerError]:
        """Return the partitions that were not committed, and why."""
        clock = self._runtime.clock
        pending = dict(ticket.offsets)
        errors = dict(ticket.lost)
        began = clock.monotonic()
        patience_until = min(deadline, began + UNKNOWN_TOPIC_PATIENCE_S)
        while True:
            for partition in list(pending):
                why = self.committer.why_not(partition, ticket.claims[partition])
                if why is not None:
                    errors[partition] = MinibrokerError(why)
                    del pending[partition]
            membership = self.committer.membership()
            if not pending or membership is None:  # why_not has named the reason
                return errors
            try:
                left_s = max(0.001, deadline - clock.monotonic())
                codes = await self._ask(membership, pending, ticket.topic_ids, left_s)
            except MinibrokerError as error:
                return errors | dict.fromkeys(pending, error)
            of_member = [code for code in codes.values() if reaction(code) is not Reaction.RAISE]
            if of_member:
                if await self._can_retry(membership, of_member[0], deadline):
                    continue
                return errors | dict.fromkeys(pending, self.committer.why_refused(of_member[0]))
            retry = False
            # These fail at once: the commits queued behind them may belong to the present topic.
            gone = [
                p
                for p, code in codes.items()
                if code in _NOT_THIS_TOPIC and self._is_older(p.topic, ticket.topic_ids[p])
            ]
            unknown = {
                p: ticket.topic_ids[p]
                for p, code in codes.items()
                if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and p not in gone
            }
            for partition in codes.keys() - unknown.keys():
                self._unknown_since.pop((partition, ticket.topic_ids[partition]), None)
            for_long = self._unknown_for_long(unknown, began)
            missing = await self._runtime.metadata.missing(for_long) if for_long else []
            for partition, code in codes.items():
                if code is ErrorCode.NONE:
                    offset = pending.pop(partition).offset
                    self.committer.committed(partition, ticket.claims[partition], offset)
                    if self.on_committed is not None:
                        self.on_committed(partition, ticket.topic_ids[partition], offset)
                elif partition in gone:
                    why = (
                        f"committing offset {pending[partition].offset}: the topic was deleted and created again since"
                    )
                    errors[partition] = BrokerError(code, why, is_complete=True)
                    del pending[partition]
                elif ERRORS[code].retriable and partition not in missing and clock.monotonic() < patience_until:
                    retry = True
                else:
                    errors[partition] = BrokerError(code, f"committing offset {pending[partition].offset}")
                    del pending[partition]
            if retry:
                self._runtime.metadata.request_refresh()
                await asyncio.sleep(self._runtime.retry_backoff_s)

    def _unknown_for_long(self, unknown: Mapping[TopicPartition, str], began_s: float) -> dict[TopicPartition, str]:
        """Return the partitions, with their topics' ids, for which a commit that began then, or an earlier one, has
        already waited UNKNOWN_FOR_S."""
        now_s = self._runtime.clock.monotonic()
        return {
            partition: topic_id
            for partition, topic_id in unknown.items()
            if now_s >= self._unknown_since.setdefault((partition, topic_id), began_s) + UNKNOWN_FOR_S
        }

    async def _can_retry(self, membership: Membership, code: ErrorCode, deadline: float) -> bool:
        self.committer.refused(membership, code)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._runtime.clock.monotonic())):
                return await self.committer.can_retry(membership, code)
        except TimeoutError:
            return False

    async def _ask(
        self,
        membership: Membership,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        topic_ids: Mapping[TopicPartition, str],
        timeout_s: float,
    ) -> dict[TopicPartition, ErrorCode]:
        topics: dict[tuple[str, str], list[g.OffsetCommitPartition]] = {}
        for partition, (offset, epoch, metadata) in offsets.items():
            topic, index = partition
            committed = g.OffsetCommitPartition(index, offset, NO_EPOCH if epoch is None else epoch, metadata or None)
            topics.setdefault((topic, topic_ids[partition]), []).append(committed)
        named = [g.OffsetCommitTopic(name, partitions, topic_id) for (name, topic_id), partitions in topics.items()]
        answered = await self._coordinators.change(
            self.group,
            OFFSET_COMMIT,
            lambda attempt: g.OffsetCommitRequest(
                membership.group,
                membership.generation_id,
                membership.member_id,
                membership.group_instance_id,
                named,
                attempt,
            ),
            code_of=_code_of_commit,
            timeout_s=timeout_s,
        )
        codes = {
            TopicPartition(topic.name, partition.partition_index): error_of(partition.error_code)
            for topic in answered.response.topics
            for partition in topic.partitions
        }
        return {partition: codes.get(partition, ErrorCode.UNKNOWN_SERVER_ERROR) for partition in offsets}

    # -- reading --

    async def fetch(self, partitions: Iterable[TopicPartition], timeout_s: float) -> dict[TopicPartition, Committed]:
        """Return the committed offsets of these partitions, without those that have none. Retries for `timeout_s`; then
        raises the last error: BrokerError, NetworkError."""
        clock = self._runtime.clock
        deadline = clock.monotonic() + timeout_s
        found: dict[TopicPartition, Committed] = {}
        pending = dict.fromkeys(partitions)
        while pending:
            topics: dict[str, list[int]] = {}
            for topic, index in pending:
                topics.setdefault(topic, []).append(index)
            asked = [g.OffsetFetchTopic(name, indexes) for name, indexes in topics.items()]
            request = g.OffsetFetchRequest([g.OffsetFetchGroup(self.group, asked)], require_stable=True)
            answered = await self._coordinators.request(
                self.group,
                OFFSET_FETCH,
                request,
                code_of=self._code_of_fetch,
                timeout_s=max(0.001, deadline - clock.monotonic()),
            )
            group = next((group for group in answered.response.groups if group.group_id == self.group), None)
            if group is None:
                raise InvalidMessage(f"an answer to {OFFSET_FETCH.name} does not mention group {self.group}")
            code = error_of(group.error_code)
            if code is not ErrorCode.NONE:
                raise BrokerError(code, f"{OFFSET_FETCH.name} of group {self.group}")
            last: BrokerError | None = None
            newer = [topic.name for topic in group.topics if self._is_newer(topic.name, topic.topic_id)]
            if newer and clock.monotonic() < deadline:  # metadata is outdated, or its broker is cut off
                await self._runtime.metadata.ask_everyone(newer)
                await asyncio.sleep(self._runtime.retry_backoff_s)
                continue
            for of_topic in group.topics:
                for answer in of_topic.partitions:
                    partition = TopicPartition(of_topic.name, answer.partition_index)
                    code = error_of(answer.error_code)
                    if partition not in pending:
                        continue
                    if code is not ErrorCode.NONE:
                        last = BrokerError(code, f"the committed offset of {partition}")
                        continue
                    del pending[partition]
                    if answer.committed_offset >= 0:
                        epoch = None if answer.committed_leader_epoch == NO_EPOCH else answer.committed_leader_epoch
                        offset = OffsetAndMetadata(answer.committed_offset, epoch, answer.metadata or "")
                        found[partition] = Committed(offset, self._is_older(of_topic.name, of_topic.topic_id))
            if pending:
                last = last or BrokerError(
                    ErrorCode.UNKNOWN_SERVER_ERROR, f"{OFFSET_FETCH.name} of group {self.group} leaves out partitions"
                )
                if not last.retriable or clock.monotonic() >= deadline:
                    raise last
                await asyncio.sleep(self._runtime.retry_backoff_s)
        return found

    def _is_older(self, topic: str, topic_id: str) -> bool:
        """Whether the topic with that id was deleted: this client knows a later one of that name."""
        info = self._runtime.metadata.cluster.topics.get(topic)
        return info is not None and is_older(topic_id, info.topic_id)

    def _is_newer(self, topic: str, topic_id: str) -> bool:
        """Whether the topic with that id was created after the one that this client knows."""
        info = self._runtime.metadata.cluster.topics.get(topic)
        return info is not None and is_older(info.topic_id, topic_id)

    def _code_of_fetch(self, response: g.OffsetFetchResponse) -> int:
        return next((group.error_code for group in response.groups if group.group_id == self.group), ErrorCode.NONE)


def _code_of_commit(response: g.OffsetCommitResponse) -> int:
    codes = [partition.error_code for topic in response.topics for partition in topic.partitions]
    return next((code for code in codes if code in _OF_THE_GROUP), ErrorCode.NONE)

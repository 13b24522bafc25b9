"""Removes deleted groups, unused offsets and the offsets of deleted topics.

Each removal writes a tombstone first and takes effect when that is replicated. If a group's deletion has been written
but may not be replicated, the group is neither shown nor joined until the outcome is known. The tombstones are written
again until they are replicated or another broker coordinates the group and reads the outcome in the log.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.ageing import steps_between_checks
from minibroker.broker.coordinating.terms import RETRY_S, Outcome, TermListener, Written
from minibroker.broker.groups.commits import remove_offsets
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import is_of_gone_topic
from minibroker.broker.groups.records import encode_group_key
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerm, GroupTerms
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

logger = logging.getLogger("minibroker.groups")

_S = GroupState
_E = ErrorCode


class GroupRemoval(TermListener[GroupTerm]):
    def __init__(
        self,
        config: BrokerConfig,
        metadata: MetadataCache,
        terms: GroupTerms,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._terms = terms
        self._retention_s = config.offsets_retention_minutes * 60
        self._start_task = start_task
        self.expired = 0
        """Offsets expired so far."""
        terms.add_listener(self)

    # -- DeleteGroups --

    async def delete(self, group_id: str, attempt: Attempt | None = None) -> ErrorCode:
        """Delete a group. Returns NONE once the log has its tombstone, and GROUP_ID_NOT_FOUND if it certainly does not
        exist."""
        found = self._terms.find(group_id)
        if isinstance(found, ErrorCode):
            return found
        term, group = found
        late = term.attempts.take(attempt, term.epoch)
        if late is not _E.NONE:
            return late
        if group is None:
            told = await _outcome(lambda done: self._terms.confirm(term, lambda code: done(Outcome(code))))
            return told.code or _E.GROUP_ID_NOT_FOUND
        if not group.is_in(_S.EMPTY):
            return _E.NON_EMPTY_GROUP
        group.is_being_deleted = True  # `find` no longer returns it to other requests
        # In a task of its own, because the request may time out before it ends.
        return (await _outcome(lambda done: self._delete_in_background(term, group, done))).code

    def _delete_in_background(self, term: GroupTerm, group: Group, done: Written) -> None:
        self._start_task(self._carry_out(term, group, done), f"deletion of group {group.group_id!r}")

    async def _carry_out(self, term: GroupTerm, group: Group, done: Written) -> None:
        """Carry out a deletion. `done` receives the outcome of the first attempt. An attempt in doubt is repeated until
        the outcome is certain, because its tombstones may be in the log."""
        outcome = await self._delete(term, group)
        done(outcome)
        if outcome.code is not _E.NONE and not outcome.is_in_doubt:
            group.is_being_deleted = False
            term.forget_unused(group, self._terms.now_s)
            return
        while not term.is_over and not group.is_in(_S.DEAD):
            await asyncio.sleep(RETRY_S)
            await self._delete(term, group)

    async def _delete(self, term: GroupTerm, group: Group) -> Outcome:
        """Write the tombstones of the offsets and of the group. The outcome is also in doubt if only the offsets are
        deleted."""
        offsets = group.offsets.to_delete()
        if offsets:
            outcome = await self._remove(term, group, offsets)
            if outcome.code is not _E.NONE:
                return outcome
        key = encode_group_key(group.group_id)
        outcome = await _outcome(lambda done: self._terms.write(term, [(key, None)], done))
        if outcome.code is _E.NONE and not term.is_over:
            term.forget(group, self._terms.now_s)
            logger.info("group %r is deleted", group.group_id)
        outcome.is_in_doubt |= bool(offsets)
        return outcome

    # -- unused offsets and groups --

    async def run(self) -> None:
        """Remove unused offsets and groups until cancelled."""
        ageing = self._terms.ageing
        check_s, retention_s = self._config.offsets_retention_check_interval_ms / 1_000, self._retention_s
        while True:
            for _ in range(steps_between_checks(check_s, retention_s)):
                await asyncio.sleep(ageing.step_s)
                ageing.look()
            for term in self._terms.loaded():
                await self._sweep(term)

    def loaded(self, term: GroupTerm) -> None:
        """Remove the offsets of topics that were deleted while the groups had no coordinator."""
        self.topics_gone(frozenset(), [term])

    def topics_gone(self, topic_ids: frozenset[str], terms: Sequence[GroupTerm] | None = None) -> None:
        """Remove the offsets of these deleted topics, and of any other deleted topics."""
        for term in self._terms.loaded() if terms is None else terms:
            self._start_task(self._sweep(term, topic_ids), f"offsets of deleted topics in {term.topic_partition}")

    async def _sweep(self, term: GroupTerm, gone: frozenset[str] | None = None) -> None:
        """Sweep a term's groups. `gone`: only look for offsets of deleted topics, among them these."""
        slices = Slices()
        now_s = self._terms.now_s
        for group in list(term.groups.values()):
            await slices.breathe()
            if term.is_over:
                return
            if group.is_being_deleted or group.is_in(_S.DEAD):
                continue
            doomed = dict.fromkeys(self._of_gone_topics(group, gone or frozenset()))
            if gone is None:
                doomed |= dict.fromkeys(self._unused(group, now_s))
            if doomed:
                outcome = await self._remove(term, group, list(doomed))
                if outcome.code is not _E.NONE:
                    return  # other groups would fail as well now; the next check finds them again
                self.expired += len(doomed)
                logger.info("group %r: %s no longer kept", group.group_id, counted(len(doomed), "offset"))
            if gone is None and self._is_idle(group) and not term.is_over:
                await self.delete(group.group_id)

    def _remove(self, term: GroupTerm, group: Group, doomed: Sequence[TopicPartition]) -> Awaitable[Outcome]:
        return _outcome(lambda done: remove_offsets(self._terms, term, group, doomed, done))

    def _of_gone_topics(self, group: Group, gone: frozenset[str]) -> list[TopicPartition]:
        return [
            topic_partition
            for topic_partition, value in group.offsets.settled()
            if value.topic_id in gone or is_of_gone_topic(value, self._metadata.topic_id(topic_partition.topic))
        ]

    def _unused(self, group: Group, now_s: float) -> list[TopicPartition]:
        """Return the expired offsets of a group. Without members, all offsets are unused since the group became empty
        (if it never had members: since their commits). In a stable group, the offsets of topics that no member reads
        are unused. While a group rebalances, its topics are unknown (KAFKA-13636)."""
        subscribed: frozenset[str] | None = frozenset()
        since_s = None
        if group.is_in(_S.EMPTY):
            since_s = None if group.protocol_type is None else group.state_since_s
        else:
            subscribed = group.subscribed_topics()
        if subscribed is None:
            return []
        return group.offsets.expired(
            now_s,
            self._retention_s,
            unused_since_s=since_s,
            topics_unused_since_s=group.topics_unused_since_s,
            subscribed=subscribed,
        )

    def _is_idle(self, group: Group) -> bool:
        return group.is_in(_S.EMPTY) and not group.pending_members and group.offsets.is_unused


def _outcome(write: Callable[[Callable[[Outcome], None]], object]) -> Awaitable[Outcome]:
    """Return the outcome of a write that reports it through a callback. If the broker stops, it never arrives, and no
    caller may depend on it."""
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def done(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    write(done)
    return future

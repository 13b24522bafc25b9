"""Reassignments: begun, cancelled, replaced, listed, resumed and finished (`decisions/reassignment.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from minibroker.controller.decisions import deletion, events, reassignment
from minibroker.controller.decisions.plan import Plan, PlanBuilder
from minibroker.controller.decisions.reassignment import Refusal, Wanted
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers import steps
from minibroker.controller.handlers.steps import Steps
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import ReplicaAssignment, TopicPartition, topic_name_problem
from minibroker.protocol.world import Watcher
from minibroker.protocol.znodes import Reassignment


class ReassignmentEvents:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._state = steps.state
        self._gather = steps.gather
        self._watchers: dict[TopicPartition, Watcher] = {}
        """One watcher for the state znode of each reassigned partition, so that repeated reads add no further ones."""
        self._has_resumed = False

    def handlers(self) -> Handlers:
        return {
            events.PartitionReassignment: lambda _: self._look_at_all(),
            events.ReassignedPartitionsIsrChange: lambda event: self._look_at([event.partition]),
            events.ResumeReassignments: lambda _: self._complete(self._state.reassigning),
            events.AlterPartitionReassignments: self._alter,
            events.ListPartitionReassignments: self._list,
        }

    async def _look_at_all(self) -> None:
        if not self._has_resumed:
            # The predecessor may have died between steps 1 and 2.
            self._has_resumed = True
            await self._raise_epochs(self._state.reassigning)
        await self._take_over_file()
        await self._look_at(self._state.reassigning)

    # -- requests --

    async def _take_over_file(self) -> None:
        """Begin the reassignments of `/admin/reassign_partitions`, which older Kafka tools and people write."""
        read = await self._gather.reassignments()
        if read is None:
            return
        if read.problem:
            await self._steps.execute(reassignment.leave((), read.version, read.problem))
            return
        wanted, refused = reassignment.judge_file(self._state, read.entries)
        refused |= await self._record(wanted)
        await self._steps.execute(reassignment.refused_file(refused))
        await self._begin({p: assignment for p, assignment in wanted.items() if p not in refused})
        pending = [entry for entry in read.entries if self._is_under_way(entry)]
        if len(pending) < len(read.entries) or not pending:
            await self._steps.execute(reassignment.leave(pending, read.version))

    def _is_under_way(self, entry: Reassignment) -> bool:
        known = self._state.reassigning.get(entry.partition)
        return known is not None and known.target == entry.replicas

    async def _alter(self, request: events.AlterPartitionReassignments) -> None:
        # A deposed controller must not refuse what its successor would grant.
        await self._steps.execute(deletion.confirm_office())
        asked = dict.fromkeys(topic.name for topic in request.topics if topic_name_problem(topic.name) is None)
        names = [name for name in asked if name in self._state.topic_ids]
        names += await self._gather.present([name for name in asked if name not in self._state.topic_ids])
        found = await self._gather.topics(names, watch=False, known=self._state.topic_ids)
        wanted, refused = reassignment.judge_request(self._state, request.topics)
        refused |= reassignment.unreadable([*wanted, *refused], found.malformed)
        refused |= reassignment.outdated(request.topics, found.read, found.changed_in)
        wanted = {p: assignment for p, assignment in wanted.items() if p not in refused}
        # First, because the next controller would take older entries of the znode for newer requests.
        await self._leave_out_of_file(wanted)
        refused |= await self._record(wanted)
        accepted = {p: assignment for p, assignment in wanted.items() if p not in refused}
        try:
            await self._begin(accepted)
        finally:
            # Also after a failure: the reassignments are in ZooKeeper, and the next controller will carry them out.
            request.answer(reassignment.results(request.topics, refused, found.read, found.changed_in))
        await self._look_at(accepted)

    async def _leave_out_of_file(self, partitions: Iterable[TopicPartition]) -> None:
        left_out = frozenset(partitions)
        read = await self._gather.reassignments()
        if read is not None and any(entry.partition in left_out for entry in read.entries):
            kept = [entry for entry in read.entries if entry.partition not in left_out]
            await self._steps.execute(reassignment.leave(kept, read.version))

    async def _list(self, request: events.ListPartitionReassignments) -> None:
        await self._steps.execute(deletion.confirm_office())
        request.answer(reassignment.under_way(self._state, request.topics))

    # -- phase A --

    async def _record(self, wanted: Wanted) -> dict[TopicPartition, Refusal]:
        """Step 1, in ZooKeeper, and step 9. Returns the partitions that were not written."""
        refused: dict[TopicPartition, Refusal] = {}
        pending = dict(wanted)
        while pending:
            found = await self._gather.topics(
                list(reassignment.by_topic(pending)), watch=False, known=self._state.topic_ids
            )
            refused |= reassignment.unreadable(pending, found.malformed)
            read = {topic: (znode, found.versions[topic]) for topic, znode in found.read.items()}
            for partition in pending:
                if partition in refused:
                    continue
                if partition.topic not in read or read[partition.topic][0].topic_id != self._topic_id(partition):
                    refused[partition] = Refusal(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"the topic of {partition} is gone"
                    )
            refused |= reassignment.too_large(read, pending)
            pending = {p: assignment for p, assignment in pending.items() if p not in refused}
            outcome = await self._steps.execute(reassignment.record(self._state, read, pending))
            pending = {p: assignment for p, assignment in pending.items() if p.topic in outcome.unwritten_topics}
        return refused

    def _topic_id(self, partition: TopicPartition) -> str | None:
        return self._state.topic_ids.get(partition.topic)

    async def _begin(self, wanted: Wanted) -> None:
        """Steps 1 (in the cluster state) to 3."""
        for part in _parts(wanted):
            changed = {p: wanted[p] for p in part if wanted[p] != self._state.assignment(p)}
            await self._steps.execute(reassignment.take_in(self._state, changed))
            await self._raise_epochs(changed)
            await self._steps.execute(reassignment.start_new(self._state, changed))
            await self._steps.settle(changed)
            await asyncio.sleep(steps.BREATH_S)

    async def _raise_epochs(self, partitions: Iterable[TopicPartition]) -> None:
        """Step 2."""
        for part in _parts(partitions):
            pending: Sequence[TopicPartition] = part
            while pending:
                pending = (await self._steps.execute(reassignment.raise_epochs(self._state, pending))).conflicts

    # -- phase B --

    async def _look_at(self, partitions: Iterable[TopicPartition]) -> None:
        """Read and watch the states of the partitions, and finish the ready ones."""
        for part in _parts([p for p in partitions if p in self._state.reassigning]):
            states = await self._gather.watched_states(part, self._watcher)
            builder = PlanBuilder()
            for partition, found in states.read.items():
                known = self._state.leadership.get(partition)
                if known is None or known.partition_epoch < found.partition_epoch:
                    builder.adopt(partition, found)
            plan: Plan = builder.build()
            if plan.adopted:
                await self._steps.execute(plan)
                await self._steps.settle(plan.adopted)
            await self._complete(part)

    def _watcher(self, partition: TopicPartition) -> Watcher:
        event = events.ReassignedPartitionsIsrChange(self._steps.epoch, partition)
        return self._watchers.setdefault(partition, lambda _: self._steps.post(event))

    async def _complete(self, partitions: Iterable[TopicPartition]) -> None:
        """Steps 4 to 12, for the ready partitions."""
        for part in _parts(reassignment.candidates(self._state, partitions)):
            pending: Sequence[TopicPartition] = part
            topics = sorted({partition.topic for partition in part})
            settings = await self._steps.topic_settings(topics)
            while pending:
                finish = reassignment.finish(self._state, pending, settings)
                pending = (await self._steps.execute(finish.plan)).conflicts  # steps 5 to 7
                await self._release([p for p in finish.partitions if p not in pending])

    async def _release(self, partitions: Sequence[TopicPartition]) -> None:
        if not partitions:
            return
        gone = reassignment.leaving(self._state, partitions)  # step 4
        done = [Reassignment(partition, self._state.assignment(partition).target) for partition in partitions]
        await self._steps.execute(reassignment.release(self._state, partitions, gone))  # steps 6 to 8
        await self._steps.execute(reassignment.delete(self._state, gone))  # step 8
        await self._steps.execute(reassignment.forget(self._state, gone))
        await self._record({partition: ReplicaAssignment(target) for partition, target in done})  # step 9
        for partition in partitions:
            self._watchers.pop(partition, None)
        await self._done_in_file(done)  # step 10
        await self._steps.execute(reassignment.over(self._state, partitions))  # steps 11 and 12

    async def _done_in_file(self, done: Iterable[Reassignment]) -> None:
        # Other entries stay: they may not have been handled yet.
        finished = frozenset(done)
        read = await self._gather.reassignments()
        if read is not None and any(entry in finished for entry in read.entries):
            kept = [entry for entry in read.entries if entry not in finished]
            await self._steps.execute(reassignment.leave(kept, read.version))


def _parts(partitions: Iterable[TopicPartition] | Mapping[TopicPartition, object]) -> Iterator[list[TopicPartition]]:
    """Split the partitions, as `Steps.settle` does."""
    remaining = iter(list(partitions))
    while part := list(islice(remaining, steps.PARTITIONS_AT_ONCE)):
        yield part

"""Taking office (Kafka's onControllerFailover): read everything, and send the brokers all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from minibroker.controller.decisions import brokers, events
from minibroker.controller.decisions.cluster_state import Snapshot, in_order
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers import steps
from minibroker.controller.handlers.steps import Steps
from minibroker.protocol.model import RegisteredBroker, TopicPartition

T = TypeVar("T")
U = TypeVar("U")


class Office:
    """`identify` creates missing nodes for topic ids (`TopicEvents.identify`)."""

    def __init__(self, of_tenure: Steps, identify: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        self._steps = of_tenure
        self._state = of_tenure.state
        self._gather = of_tenure.gather
        self._identify = identify

    def handlers(self) -> Handlers:
        return {
            events.Startup: lambda _: self._take_office(),
            events.SessionReconnected: lambda _: self._look_again(),
            events.UnreadableStateChange: lambda _: self._look_at_unreadable(),
        }

    async def _look_again(self) -> None:
        for watched in events.WATCHED:
            self._steps.post(watched(self._steps.epoch))

    async def _take_office(self) -> None:
        overview = await self._gather.overview()
        registered, found = await _both(
            self._gather.registered(overview.broker_ids), self._gather.topics(overview.topics)
        )
        partitions = [TopicPartition(name, number) for name, topic in found.read.items() for number in topic.partitions]
        # Probe before electing: electing another crashed broker would be useless.
        states, refused = await _both(self._gather.states(partitions), self._probe(registered))
        self._steps.timeline.describe(
            broker_up_ms=self._steps.timeline.up_ms(),
            read_at_ms=self._steps.timeline.elapsed_ms(),
            brokers=sorted(registered),
            unreachable=sorted(refused),
            topics=len(found.read),
            partitions=len(partitions),
        )
        snapshot = Snapshot(
            registered,
            found.read,
            states.read,
            tuple(overview.topics_to_delete),
            (*overview.isr_notifications, *overview.log_dir_notifications),
            frozenset(found.malformed),
            frozenset(states.malformed),
        )
        if overview.log_dir_notifications:
            failed = await self._gather.brokers_of_failures(overview.log_dir_notifications)
            self._steps.describe_failed_disks(failed)
        for broker_id in sorted(refused):
            self._steps.timeline.note(f"broker {broker_id} is registered and cannot be reached: it is removed")
        await self._steps.execute(
            brokers.load(self._state, snapshot, refused, deletes_topics=self._steps.settings.deletes_topics)
        )
        every = in_order(self._state.assignments)
        for start in range(0, len(every), steps.PARTITIONS_AT_ONCE):
            part = every[start : start + steps.PARTITIONS_AT_ONCE]
            await self._steps.execute(brokers.initialize(self._state, snapshot, part))
            await asyncio.sleep(0)
        urgent = brokers.urgent(self._state)
        for settled in ([p for p in every if p in urgent], [p for p in every if p not in urgent]):
            await self._steps.settle(settled, tell=self._state.live_broker_ids(), announce=settled)
        await self._steps.execute(brokers.all_told(self._state))
        await self._identify(self._state.topic_ids)
        self._steps.post(events.PreferredReplicaElection(self._steps.epoch))  # the predecessor may not have finished it
        self._steps.post(events.PartitionReassignment(self._steps.epoch))

    async def _look_at_unreadable(self) -> None:
        """Adopt states that can be decoded now and could not when office was taken."""
        without = [p for p in self._state.partitions_without_leader() if p not in self._state.leadership]
        states = await self._gather.states(without)
        mended = in_order(states.read)
        if mended:
            snapshot = Snapshot({}, {}, states.read)
            await self._steps.execute(brokers.initialize(self._state, snapshot, mended))
            await self._steps.settle(mended, tell=self._state.live_broker_ids(), announce=mended)

    async def _probe(self, registered: Mapping[int, RegisteredBroker]) -> Collection[int]:
        others = [broker for broker_id, broker in sorted(registered.items()) if broker_id != self._state.controller_id]
        return await self._steps.hooks.probe(others) if others else ()


async def _both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Await both at once. If one fails, cancel the other and raise the failure itself."""

    async def run_first() -> T:
        return await first

    async def run_second() -> U:
        return await second

    try:
        async with asyncio.TaskGroup() as group:
            one, other = group.create_task(run_first()), group.create_task(run_second())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return one.result(), other.result()

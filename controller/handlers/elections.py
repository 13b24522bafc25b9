"""Requested elections: by ElectLeaders, by `/admin/preferred_replica_election`, and by the timer of the rebalance.

The next controller resumes elections by znode: the node stays until all of its partitions are done, and repeating an
election does no harm. The other two kinds are not recorded: a client repeats ElectLeaders if it gets no response, and
the next controller has a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from minibroker.controller.decisions import deletion, events, isr_changes, requested_elections
from minibroker.controller.decisions.cluster_state import in_order
from minibroker.controller.decisions.events import ElectionOutcome
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers import steps
from minibroker.controller.handlers.steps import Steps
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import ElectionType, TopicPartition
from minibroker.protocol.znodes import PREFERRED_REPLICA_ELECTION

SOON_S = 5.0
"""Seconds from taking office (as in Kafka), or from a broker's join, to the rebalance: by then other brokers started
with it have joined, and most have caught up. The pauses double for brokers that take longer."""


class ElectionEvents:
    def __init__(self, of_tenure: Steps) -> None:
        self._steps = of_tenure
        self._state = of_tenure.state
        self._gather = of_tenure.gather

    def handlers(self) -> Handlers:
        return {
            events.PreferredReplicaElection: lambda _: self._preferred_by_znode(),
            events.ElectLeadersRequest: self._elect_leaders,
            events.AutoLeaderRebalance: lambda _: self._rebalance(),
        }

    async def rebalance_regularly(self) -> None:
        """The timer of the automatic rebalance. Runs for the tenure's life. Besides the regular checks there are some
        soon after taking office or the join of a broker, until every live broker has caught up: a returning broker
        leads nothing, and after a restart of all brokers the first one leads everything."""
        settings = self._steps.settings
        if not settings.auto_leader_rebalance:
            return
        interval_s, now = settings.leader_imbalance_check_interval_s, asyncio.get_running_loop().time
        soon_s = pause_s = min(SOON_S, interval_s)
        due = now() + soon_s
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._steps.forming.wait()
            except TimeoutError:
                self._steps.post(events.AutoLeaderRebalance(self._steps.epoch))
                if requested_elections.perhaps_back_in_sync(self._state, self._state.leadership):
                    due, pause_s = now() + pause_s, min(2 * pause_s, interval_s)
                else:
                    due, pause_s = now() + interval_s, soon_s
            else:
                due, pause_s = min(due, now() + soon_s), soon_s

    async def _preferred_by_znode(self) -> None:
        asked = await self._gather.preferred_election()
        if asked is None:
            return
        refused = requested_elections.refused(self._state, asked.partitions)
        await self._elect((p for p in asked.partitions if p not in refused), ElectionType.PREFERRED)
        problem = asked.problem or requested_elections.named(asked.partitions, refused)
        outcome = await self._steps.execute(requested_elections.done(asked.czxid, asked.version, problem))
        if outcome.obstacle is not None:
            self._steps.timeline.note(f"{PREFERRED_REPLICA_ELECTION} stays, because there are nodes below it")

    async def _elect_leaders(self, request: events.ElectLeadersRequest) -> None:
        if request.election_type is ElectionType.UNCLEAN:
            await self._steps.execute(deletion.confirm_office())
            if not request.is_wanted():
                # An unclean election may lose records, so it is not held for a client that has given up.
                request.fail(BrokerError(ErrorCode.REQUEST_TIMED_OUT, "the client is gone: no leader is elected"))
                return
        is_for_all = request.partitions is None
        asked = tuple(self._state.assignments) if request.partitions is None else request.partitions
        outcomes = requested_elections.refused(self._state, asked)
        if is_for_all:
            asked, outcomes = [p for p in asked if p not in outcomes], {}
        outcomes |= await self._elect((p for p in asked if p not in outcomes), request.election_type)
        if any(outcome.error is not ErrorCode.NONE for outcome in outcomes.values()):
            # Outcomes without a write may be wrong, because this controller may have been deposed.
            await self._steps.execute(deletion.confirm_office())
        if is_for_all:
            outcomes = {p: o for p, o in outcomes.items() if o.error is not ErrorCode.ELECTION_NOT_NEEDED}
        request.answer(outcomes)

    async def _rebalance(self) -> None:
        percentage = self._steps.settings.leader_imbalance_per_broker_percentage
        await self._elect(requested_elections.to_rebalance(self._state, percentage), ElectionType.PREFERRED)

    async def _elect(
        self, partitions: Iterable[TopicPartition], election_type: ElectionType
    ) -> dict[TopicPartition, ElectionOutcome]:
        """Hold elections, some partitions at a time, like `Steps.settle`. Decides again about conflicts."""
        outcomes: dict[TopicPartition, ElectionOutcome] = {}
        remaining = requested_elections.displaced_first(self._state, partitions)
        for start in range(0, len(remaining), steps.PARTITIONS_AT_ONCE):
            if start:
                await asyncio.sleep(steps.BREATH_S)
            part = remaining[start : start + steps.PARTITIONS_AT_ONCE]
            if election_type is ElectionType.PREFERRED:
                await self._look_again(requested_elections.perhaps_back_in_sync(self._state, part))
            while part:
                topics = requested_elections.topics_to_elect_in(self._state, part)
                settings = await self._steps.topic_settings(topics)
                plan, found = requested_elections.elect(self._state, part, election_type, settings)
                part = (await self._steps.execute(plan)).conflicts
                outcomes |= found
                if part:
                    await self._steps.settle(part, tell=self._state.live_broker_ids(), announce=part)
        return {partition: outcomes[partition] for partition in in_order(outcomes)}

    async def _look_again(self, partitions: Sequence[TopicPartition]) -> None:
        """Read the states again: leaders may have written ISRs for which no notification has arrived yet."""
        states = await self._gather.states(partitions)
        changed = {p: read for p, read in states.read.items() if read != self._state.leadership[p]}
        if changed:
            await self._steps.execute(isr_changes.changed(self._state, changed, ()))

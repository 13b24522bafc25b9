"""Events about brokers: joins, losses, suspicions, responses, ISR changes, log directories, unclean elections."""

from __future__ import annotations

from minibroker.controller.decisions import brokers, events, isr_changes
from minibroker.controller.decisions.cluster_state import LogEndReported, ReplicaFailed, ReplicaRecovered
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers.steps import Steps


class BrokerEvents:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._state = steps.state
        self._gather = steps.gather

    def handlers(self) -> Handlers:
        return {
            events.BrokerChange: lambda _: self._brokers_changed(),
            events.BrokerSuspected: self._broker_suspected,
            events.IsrChange: lambda _: self._isrs_changed(),
            events.LogDirFailure: lambda _: self._log_dirs_failed(),
            events.LeaderAndIsrAnswered: self._leader_and_isr_answered,
            events.UpdateMetadataAnswered: _do_nothing,
            events.UncleanLeaderElectionEnable: self._unclean_elections_enabled,
        }

    async def _brokers_changed(self) -> None:
        registered = await self._gather.brokers(self._state.live_brokers)
        difference = brokers.difference(self._state.live_brokers, registered)
        lost = sorted((*difference.lost, *(broker.id for broker in difference.bounced)))
        self._steps.timeline.describe(
            lost=lost, added=[broker.id for broker in (*difference.added, *difference.bounced)]
        )
        if lost:
            affected = brokers.affected_by(self._state, lost)
            await self._steps.execute(brokers.lost(self._state, lost))
            await self._steps.settle(affected, announce=affected, announce_brokers=True)
        added = sorted((*difference.added, *difference.bounced), key=lambda broker: broker.id)
        if added:
            ids = [broker.id for broker in added]
            affected = brokers.affected_by(self._state, ids)
            await self._steps.execute(brokers.added(self._state, added))
            await self._steps.settle(
                (*affected, *self._state.partitions_without_leader()),
                tell=ids,
                announce=affected,
                announce_brokers=True,
            )
        self._resume_reassignments()

    def _resume_reassignments(self) -> None:
        if self._state.reassigning:
            self._steps.post(events.ResumeReassignments(self._steps.epoch))

    async def _broker_suspected(self, event: events.BrokerSuspected) -> None:
        if not self._steps.is_alive(event.broker_id, event.broker_epoch):
            self._steps.timeline.note(f"broker {event.broker_id} of epoch {event.broker_epoch} is gone already")
        elif await self._gather.broker_epoch(event.broker_id) != event.broker_epoch:
            self._steps.timeline.note(
                f"broker {event.broker_id} is no longer registered with epoch {event.broker_epoch}"
            )
        else:
            await self._steps.execute(brokers.suspected(event.broker_id, event.broker_epoch))  # raises BrokerChange

    async def _leader_and_isr_answered(self, event: events.LeaderAndIsrAnswered) -> None:
        if not self._steps.is_alive(event.broker_id, event.broker_epoch):
            return
        plan = brokers.replicas_answered(self._state, event.broker_id, event.errors, event.log_ends)
        await self._steps.execute(plan)
        touched = tuple(
            change.replica.partition for change in plan.changes if isinstance(change, ReplicaFailed | ReplicaRecovered)
        )
        reported = tuple(change.replica.partition for change in plan.changes if isinstance(change, LogEndReported))
        if touched or reported:
            await self._steps.settle((*touched, *reported), announce=touched)

    async def _isrs_changed(self) -> None:
        notifications = await self._gather.isr_notifications()
        if not notifications:
            return
        named = await self._gather.changed_partitions(notifications)
        states = await self._gather.states([partition for partition in named if partition in self._state.assignments])
        await self._steps.execute(isr_changes.changed(self._state, states.read, notifications))
        await self._steps.settle(states.read)
        self._resume_reassignments()

    async def _log_dirs_failed(self) -> None:
        notifications = await self._gather.log_dir_notifications()
        if not notifications:
            return
        failed = await self._gather.brokers_of_failures(notifications)
        self._steps.describe_failed_disks(failed)
        await self._steps.execute(brokers.log_dirs_failed(self._state, notifications, failed))
        await self._steps.settle(brokers.affected_by(self._state, failed), tell=failed)

    async def _unclean_elections_enabled(self, event: events.UncleanLeaderElectionEnable) -> None:
        without = [p for p in self._state.partitions_without_leader() if event.topic in (None, p.topic)]
        if without:
            await self._steps.settle(without, announce=without)


async def _do_nothing(_event: events.UpdateMetadataAnswered) -> None:
    """The timeline records the event."""

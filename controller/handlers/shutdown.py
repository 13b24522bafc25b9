"""Controlled shutdown of brokers (Kafka's KafkaController.processControlledShutdown)."""

from __future__ import annotations

from minibroker.controller.decisions import deletion, events, isr_changes, shutdown
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers.steps import Steps


class ControlledShutdowns:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._state = steps.state

    def handlers(self) -> Handlers:
        return {events.ControlledShutdownRequest: self._shut_down}

    async def _shut_down(self, request: events.ControlledShutdownRequest) -> None:
        broker_id = request.broker_id
        refusal = shutdown.refusal(self._state, broker_id, request.broker_epoch)
        if refusal is not None:
            self._steps.timeline.note(str(refusal))
            request.fail(refusal)
            return
        # A deposed controller must not report that nothing remains, and the reads that follow must be fresh.
        await self._steps.execute(deletion.confirm_office())
        await self._steps.execute(shutdown.begin(self._state, broker_id))
        states = await self._steps.gather.states(shutdown.out_of_sync(self._state, broker_id))
        await self._steps.execute(isr_changes.changed(self._state, states.read, ()))
        await self._steps.settle(self._state.partitions_on(broker_id))
        await self._steps.execute(shutdown.stop_following(self._state, broker_id))
        request.answer(shutdown.remaining(self._state, broker_id))

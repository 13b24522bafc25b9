"""Addition of partitions to topics, by request or by a write of the topic's znode."""

from __future__ import annotations

from collections.abc import Mapping

from minibroker.controller.decisions import deletion, events, partitions
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers.steps import Steps
from minibroker.controller.handlers.topics import TopicEvents
from minibroker.protocol.messages import CreatePartitionsTopicResult
from minibroker.protocol.model import topic_name_problem
from minibroker.protocol.znodes import TopicZnode


class PartitionEvents:
    """`topics` adds topics that are not known yet."""

    def __init__(self, steps: Steps, topics: TopicEvents) -> None:
        self._steps = steps
        self._state = steps.state
        self._gather = steps.gather
        self._topics = topics

    def handlers(self) -> Handlers:
        return {
            events.PartitionModifications: self._modified,
            events.CreatePartitionsRequest: self._create_partitions,
        }

    async def _modified(self, event: events.PartitionModifications) -> None:
        # Reading sets the watches, so a write that fails because of another change raises this event again.
        names = event.topics if event.topics is not None else tuple(self._state.topic_ids)
        found = await self._gather.topics(names, known=self._state.topic_ids)
        await self._topics.take_in(found.read)  # topics whose znode could not be decoded before
        modification = partitions.modified(self._state, found.read, found.versions, found.malformed)
        await self._steps.execute(modification.repair)
        await self._take_in(modification.grown)

    async def _take_in(self, topics: Mapping[str, TopicZnode]) -> None:
        new = partitions.new_partitions(self._state, topics)
        if new:
            await self._steps.execute(partitions.added(self._state, topics))
            await self._steps.settle(new)

    async def _create_partitions(self, request: events.CreatePartitionsRequest) -> None:
        results = {result.name: result for result in partitions.repeated(request.topics)}
        pending = [topic for topic in request.topics if topic.name not in results]
        # A deposed controller might refuse because of old reads, and the client would believe it.
        await self._steps.execute(deletion.confirm_office())
        known = self._state.topic_ids
        malformed = await self._topics.read_new(
            [topic.name for topic in pending if topic.name not in known and topic_name_problem(topic.name) is None]
        )
        grown: dict[str, TopicZnode] = {}
        while pending:
            names = [topic.name for topic in pending if topic.name in known]
            await self._topics.identify({name: known[name] for name in names})
            found = await self._gather.topics(names, watch=False, known=known)
            answers = await self._steps.in_slices(
                partitions.validate(
                    pending,
                    self._state,
                    found.read,
                    found.versions,
                    self._steps.world.random,
                    {**malformed, **found.malformed},
                    self._steps.settings.max_broker_partitions,
                )
            )
            new = [answer for answer in answers if isinstance(answer, partitions.Growth)]
            results |= {a.name: a for a in answers if isinstance(a, CreatePartitionsTopicResult)}
            results |= {growth.topic: growth.result() for growth in new}
            if request.validate_only:
                break
            outcome = await self._steps.execute(partitions.write(new))
            grown |= {growth.topic: growth.znode for growth in new if growth.topic not in outcome.unwritten_topics}
            pending = [topic for topic in pending if topic.name in outcome.unwritten_topics]
        try:
            await self._take_in(grown)
        finally:
            # Also after a failure: the partitions are in ZooKeeper, and the next controller will serve them.
            request.answer(list(results.values()))

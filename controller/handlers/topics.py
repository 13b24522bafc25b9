"""Creation, appearance, disappearance and deletion of topics."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping

from minibroker.controller.decisions import deletion, events, topics
from minibroker.controller.event_loop import Handlers
from minibroker.controller.executing.gather import MOST_LOOKED_UP
from minibroker.controller.handlers.steps import Steps
from minibroker.protocol import topic_ids
from minibroker.protocol.messages import CreatableTopicResult, DeletableTopicResult
from minibroker.protocol.model import topic_name_problem
from minibroker.protocol.znodes import TopicZnode, topic_id_path, topic_path

MOST_SPENT_NONCES = 10_000
"""More than the number of delayed creation requests to one broker that a network can hold at any time."""


class TopicEvents:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._state = steps.state
        self._gather = steps.gather
        self._numbers = itertools.count(1)

    def handlers(self) -> Handlers:
        return {
            events.TopicChange: lambda _: self._topics_changed(),
            events.DeleteTopics: lambda _: self._deletions_changed(),
            events.StopReplicaAnswered: self._stop_replica_answered,
            events.TopicDeletionsHeard: self._deletions_heard,
            events.ResumeDeletions: lambda _: self._resume_deletions(),
            events.CreateTopicsRequest: self.create_topics,
            events.DeleteTopicsRequest: self._delete_topics,
        }

    async def _topics_changed(self) -> None:
        names = await self._gather.topic_names()
        present = frozenset(names)
        vanished = [topic for topic in self._state.topic_ids if topic not in present]
        if vanished:
            await self._steps.execute(topics.vanished(self._state, vanished))
        await self.read_new(names)

    async def read_new(self, names: Iterable[str]) -> Mapping[str, str]:
        """Read and add the topics that are not known yet. Returns the problems of malformed znodes."""
        new = [name for name in names if name not in self._state.topic_ids]
        found = await self._gather.topics(await self._gather.present(new) if len(new) > MOST_LOOKED_UP else new)
        await self.take_in(found.read)
        return found.malformed

    async def take_in(self, read: Mapping[str, TopicZnode]) -> None:
        """Add those of the topics that are not known yet."""
        new = {name: topic for name, topic in read.items() if name not in self._state.topic_ids}
        await self.identify({name: topic.topic_id for name, topic in new.items()})
        await self._add_topics(new)

    async def identify(self, topic_ids: Mapping[str, str]) -> None:
        """Create the nodes for the topics' ids that do not exist."""
        paths = [topic_id_path(name, topic_id) for name, topic_id in topic_ids.items() if topic_id]
        if not paths:
            return
        there = await self._gather.existing(paths)
        await self._steps.execute(topics.identified(path for path in paths if path not in there))

    async def _add_topics(self, new: Mapping[str, TopicZnode]) -> None:
        if not new:
            return
        await self._steps.execute(topics.added(self._state, new))
        await self._steps.settle(partition for topic in new for partition in self._state.partitions_of(topic))

    async def _deletions_changed(self) -> None:
        names = await self._gather.topics_to_delete()
        if not self._steps.settings.deletes_topics:
            await self._steps.execute(deletion.dropped(names))
            return
        # A topic may have been created and deleted before the event of its creation was handled.
        malformed = await self.read_new(names)
        await self._steps.execute(deletion.queue(self._state, names, leave_alone=malformed))

    # -- deletion --

    async def _stop_replica_answered(self, event: events.StopReplicaAnswered) -> None:
        if self._steps.is_alive(event.broker_id, event.broker_epoch):
            await self._steps.execute(deletion.replicas_answered(self._state, event.broker_id, event.errors))

    async def _deletions_heard(self, event: events.TopicDeletionsHeard) -> None:
        if self._steps.is_alive(event.broker_id, event.broker_epoch):
            await self._steps.execute(deletion.heard(self._state, event.broker_id, event.topics))

    async def _resume_deletions(self) -> None:
        await self._steps.execute(deletion.resume(self._state))
        for topic in deletion.finished(self._state):
            topic_id = self._state.topic_ids[topic]
            while True:
                nodes = await self._gather.tree(topic_path(topic))
                outcome = await self._steps.execute(deletion.forget(self._state, topic, nodes))
                if outcome.obstacle is None:
                    break
                self._steps.timeline.note(f"topic {topic} cannot be removed yet, it is read again: {outcome.obstacle}")
            # Another controller may have created it, perhaps without hearing of its success.
            self._spend_nonces([topic_id])

    # -- requests --

    async def create_topics(self, request: events.CreateTopicsRequest) -> None:
        names = list(dict.fromkeys(t.name for t in request.topics if topic_name_problem(t.name) is None))
        existing = await self._gather.present(names)
        configured = await self._gather.with_configs(names)
        settings = self._steps.settings
        malformed = await self.read_new(name for name in existing if name not in self._state.topic_ids)
        answers = await self._steps.in_slices(
            topics.validate(
                request.topics,
                self._state,
                {name: malformed.get(name, "") for name in existing},
                topics.TopicDefaults(settings.num_partitions, settings.default_replication_factor, settings.durability),
                self._steps.hooks.validate_config,
                self._steps.world.random,
                self._numbers,
                self._steps.hooks.spent_nonces,
                settings.max_broker_partitions,
            )
        )
        new = [answer for answer in answers if isinstance(answer, topics.NewTopic)]
        if request.validate_only:
            request.answer([_result(answer, validated_only=True) for answer in answers])
            return
        found = (await self._steps.execute(topics.create(new, configured))).existing_topics
        created = {topic.topic: topic.znode for topic in new if topic.topic not in found}
        self._spend_nonces(znode.topic_id for znode in created.values())
        try:
            await self._add_topics(created)
        finally:
            # Also after a failure: the topics are in ZooKeeper, and the next controller will serve them.
            request.answer([_result(answer, existing=found) for answer in answers])
        if created:  # reading sets watches, and these were not read
            self._steps.post(events.PartitionModifications(self._steps.epoch, tuple(created)))

    def _spend_nonces(self, created: Iterable[str]) -> None:
        spent = self._steps.hooks.spent_nonces
        for topic_id in created:
            spent[topic_ids.nonce(topic_id) or b""] = None
            if len(spent) > MOST_SPENT_NONCES:
                del spent[next(iter(spent))]

    async def _delete_topics(self, request: events.DeleteTopicsRequest) -> None:
        if not self._steps.settings.deletes_topics:
            request.answer(deletion.disabled(request.topics))
            return
        unknown = [
            name for name in request.topics if name not in self._state.topic_ids and topic_name_problem(name) is None
        ]
        malformed: Mapping[str, str] = {}
        if unknown:  # a deposed controller might deny new topics because of old reads
            await self._steps.execute(deletion.confirm_office())
            malformed = await self.read_new(unknown)
        results: list[DeletableTopicResult] = deletion.results(self._state, request.topics, malformed)
        await self._steps.execute(deletion.request(self._state, request.topics))
        request.answer(results)


def _result(
    answer: topics.NewTopic | CreatableTopicResult,
    *,
    existing: Container[str] = (),
    validated_only: bool = False,
) -> CreatableTopicResult:
    if isinstance(answer, CreatableTopicResult):
        return answer
    return (
        topics.already_exists(answer.topic) if answer.topic in existing else answer.result(created=not validated_only)
    )

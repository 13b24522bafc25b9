"""Planted bugs of topic creation, growth and deletion: requests for one topic hit the next of its name."""

from __future__ import annotations

from typing import Any

import msgspec

from minibroker.controller.decisions import brokers, deletion, partitions, topics
from minibroker.controller.executing import executor
from minibroker.protocol.topic_ids import NO_TOPIC
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KAFKA-1096", "a deletion of an earlier topic deletes the present topic of that name")
def old_deletion_hits_the_new_topic(patches: Patches) -> None:
    @patches.instead_of(deletion, "is_meant")
    def is_meant(original: Any, state: Any, topic: str, topic_id: str) -> bool:
        return bool(original(state, topic, "" if topic_id != NO_TOPIC else topic_id))


@mutant("wrong incarnation", "partitions requested for an earlier topic are added to the present topic of that name")
def old_partitions_for_the_new_topic(patches: Patches) -> None:
    @patches.instead_of(partitions, "_validated")
    def validated(original: Any, request: Any, *rest: Any) -> Any:
        if request.topic_id != NO_TOPIC:
            request = msgspec.structs.replace(request, topic_id="")
        return original(request, *rest)


@mutant("TopicDeletionManager", "a stopped replica counts as deleted: the name is free while logs exist")
def stopped_is_deleted(patches: Patches) -> None:
    @patches.instead_of(executor, "_answerable")
    def answerable(original: Any, part: Any, *, delete: bool) -> Any:
        return part


@mutant("KAFKA-1120", "a broker that asks again for failed orders is not sent deletions")
def deletions_not_asked_for_again(patches: Patches) -> None:
    @patches.instead_of(brokers, "log_dirs_failed")
    def log_dirs_failed(original: Any, state: Any, notifications: Any, failed: Any) -> Any:
        return original(state, notifications, ())


@mutant("too few brokers left", "the offsets topic is created at the first request of a client, not with the cluster")
def offsets_topic_when_asked_for(patches: Patches) -> None:
    @patches.instead_of(topics, "missing")
    def missing(original: Any, state: Any, wanted: Any) -> Any:
        return []

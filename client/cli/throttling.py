"""The throttle of reassignments, as Kafka's kafka-reassign-partitions sets it (KIP-73): a rate of the brokers, and the
replicas of each topic to which it applies.

The rate is set for all brokers at once, so a broker that starts during the reassignment has it as well. Kafka's tool
sets it for each broker that takes part. The replicas are appended to the topic's settings. A topic whose setting is `*`
throttles all its replicas already, by a rate of its owner's, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

RATES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
LEADERS, FOLLOWERS = "leader.replication.throttled.replicas", "follower.replication.throttled.replicas"
ALL_REPLICAS = "*"

Changes = dict[ConfigResource, list[ConfigChange]]
Assignments = Mapping[TopicPartition, Sequence[int]]


def throttled(current: Assignments, wanted: Assignments, settings: Mapping[str, Mapping[str, str]]) -> Changes:
    """Return the changes that throttle the copying from the current replicas to those that are added.

    `settings` are the present ones, by topic. Raises MinibrokerError for a topic that throttles all its replicas. Pure.
    """
    entries: dict[str, tuple[list[str], list[str]]] = {}
    for name, target in sorted(wanted.items()):
        present = current.get(name, ())
        added = [broker for broker in target if broker not in present]
        if added:
            leaders, followers = entries.setdefault(name.topic, ([], []))
            leaders += [f"{name.partition}:{broker}" for broker in present]
            followers += [f"{name.partition}:{broker}" for broker in added]
    changes: Changes = {}
    for topic, (leaders, followers) in entries.items():
        for setting in (LEADERS, FOLLOWERS):
            if settings.get(topic, {}).get(setting) == ALL_REPLICAS:
                raise MinibrokerError(
                    f"topic {topic!r} has {setting}={ALL_REPLICAS}, which throttles all its replicas already: leave "
                    f"out --throttle, or first `minibroker configs alter --topic {topic} --delete {setting}`"
                )
        changes[ConfigResource.of_topic(topic)] = [
            ConfigChange.append(LEADERS, ",".join(leaders)),
            ConfigChange.append(FOLLOWERS, ",".join(followers)),
        ]
    return changes


def unthrottled(settings: Mapping[str, Mapping[str, str]]) -> Changes:
    """Return the changes that remove what `throttled` has set in these topics. Pure."""
    return {
        ConfigResource.of_topic(topic): [ConfigChange.delete(name) for name in names]
        for topic, present in settings.items()
        if (names := [name for name in (LEADERS, FOLLOWERS) if present.get(name) not in (None, "", ALL_REPLICAS)])
    }


async def begin(admin: Admin, current: Assignments, wanted: Assignments, rate: int) -> bool:
    """Throttle the copying to `rate` bytes per second, of each broker as a leader and as a follower. This also changes
    the rate of reassignments in progress. Return whether there is anything to copy. Raises MinibrokerError."""
    adding = {name: one.adding_replicas for name, one in (await admin.list_partition_reassignments(wanted)).items()}
    before = {name: [b for b in replicas if b not in adding.get(name, ())] for name, replicas in current.items()}
    changes = throttled(before, wanted, await _settings(admin, {name.topic for name in wanted}))
    if changes:
        rates = [ConfigChange.set(name, rate) for name in RATES]
        await admin.incremental_alter_configs({ConfigResource.of_all_brokers(): rates, **changes})
    return bool(changes)


async def end(admin: Admin, topics: Collection[str]) -> bool:
    """Remove the throttle of these topics that have no reassignment in progress, and the rate if there is none at all.
    Return whether there was something to remove. Raises ConfigErrors."""
    moving = {name.topic for name in await admin.list_partition_reassignments()}
    existing = await admin.describe_topics()
    changes = unthrottled(await _settings(admin, {topic for topic in topics if topic in existing} - moving))
    if changes and not moving:
        present = (await admin.describe_configs([ConfigResource.of_all_brokers()]))[ConfigResource.of_all_brokers()]
        if rates := [ConfigChange.delete(name) for name in RATES if name in present]:
            changes[ConfigResource.of_all_brokers()] = rates
    if changes:
        await admin.incremental_alter_configs(changes)
    return bool(changes)


async def _settings(admin: Admin, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource.of_topic(topic) for topic in sorted(topics)]
    if not resources:
        return {}
    found = await admin.describe_configs(resources, names=[LEADERS, FOLLOWERS])
    return {
        resource.name: {name: entry.value for name, entry in entries.items() if entry.value is not None}
        for resource, entries in found.items()
    }

"""Planted bugs of dynamic configuration: changes that are missed, and settings of another topic."""

from __future__ import annotations

from typing import Any

from minibroker.broker.handlers.administering import configs
from minibroker.broker.replication import topic_configs
from minibroker.broker.replication.following.fetcher_manager import ReplicaFetcherManager
from minibroker.broker.replication.orders import ControllerOrders
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.topic_configs import TopicConfigs
from minibroker.broker.replication.upkeep.healing import Healer
from minibroker.broker.scheduling.sleeps import Sleeps
from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.controller.decisions import reassignment
from minibroker.controller.handlers.office import Office
from minibroker.controller.handlers.steps import Steps
from minibroker.protocol.messages import NO_VERSION
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KIP-226", "a broker that reconnects to ZooKeeper starts at the notifications that exist then")
def change_missed_after_reconnect(patches: Patches) -> None:
    @patches.instead_of(DynamicConfigManager, "_look")
    async def look(original: Any, self: DynamicConfigManager, session: Any) -> None:
        if self._may_have_missed and self._seen:
            self._may_have_missed = False
            self._seen |= dict.fromkeys(await session.children("/config/changes"), 0.0)
        await original(self, session)


@mutant(
    "a connection's late bytes",
    "a late change of settings or replicas is processed, although it was granted another way and changed again since",
)
def late_change_carried_out(patches: Patches) -> None:
    @patches.instead_of(configs, "_check_version")
    def check_version(original: Any, found: Any, asked: Any) -> None:
        if asked.known_version == NO_VERSION:
            original(found, asked)

    @patches.instead_of(reassignment, "outdated")
    def outdated(original: Any, topics: Any, *rest: Any) -> Any:
        return original([topic for topic in topics if topic.known_version == NO_VERSION], *rest)


@mutant("KAFKA-3719", "a broker applies the settings of the earlier topic of the same name")
def settings_of_the_topic_before(patches: Patches) -> None:
    @patches.instead_of(ControllerOrders, "_read_topic_config")
    async def read_topic_config(original: Any, self: ControllerOrders, topic: str, *arguments: Any) -> None:
        if topic not in self._settings.topics:
            await original(self, topic, *arguments)

    @patches.instead_of(TopicConfigs, "forget")
    def forget(original: Any, self: TopicConfigs, topic: str) -> None:
        """Do nothing."""


@mutant("a sleep by an old setting", "a sleeping task does not notice a changed duration")
def settings_wake_nobody(patches: Patches) -> None:
    @patches.instead_of(Sleeps, "look_again")
    def look_again(original: Any, self: Sleeps) -> None:
        """Do nothing."""

    @patches.instead_of(ReplicaFetcherManager, "wake_all")
    def wake_all(original: Any, self: ReplicaFetcherManager) -> None:
        """Do nothing."""


@mutant("outdated rule", "a cleanup policy set for an internal topic, or for all topics, applies to internal topics")
def internal_topics_have_any_policy(patches: Patches) -> None:
    patches.set(topic_configs, "INTERNAL_TOPICS", frozenset())


@mutant(
    "asked for once",
    "replicas rejected for their topic's settings are not requested again when the settings are corrected",
)
def refused_topics_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(Healer, "mended")
    def mended(original: Any, self: Healer) -> None:
        """Do nothing."""


@mutant(
    "asked for once", "a broker that rejected replicas for their settings relies on a notification of the correction"
)
def refused_topics_are_not_looked_at(patches: Patches) -> None:
    @patches.instead_of(ReplicaSettings, "look_at_refused_topics")
    async def look_at_refused_topics(original: Any, self: ReplicaSettings) -> None:
        """Do nothing."""


@mutant("asked for once", "partitions with an unreadable state at the election of the controller stay without a leader")
def unreadable_states_are_read_once(patches: Patches) -> None:
    @patches.instead_of(Office, "_look_at_unreadable")
    async def look_at_unreadable(original: Any, self: Office) -> None:
        """Do nothing."""


@mutant("KIP-966", "the controller does not know the leader's min.insync.replicas and uses its own")
def promise_not_on_record(patches: Patches) -> None:
    @patches.instead_of(Partition, "is_to_be_recorded")
    def is_to_be_recorded(original: Any, self: Partition) -> bool:
        return False

    @patches.instead_of(Partition, "promises_more_than_is_on_record")
    def promises_more_than_is_on_record(original: Any, self: Partition) -> bool:
        return False


@mutant("KIP-966", "a leader commits by a higher min.insync.replicas before brokers that shrink the ISR can know it")
def promise_before_it_is_on_record(patches: Patches) -> None:
    @patches.instead_of(Partition, "promises_more_than_is_on_record")
    def promises_more_than_is_on_record(original: Any, self: Partition) -> bool:
        return False


@mutant("KIP-226", "an unclean election uses the settings that the controller has cached, however old")
def unclean_election_by_hearsay(patches: Patches) -> None:
    @patches.instead_of(Steps, "topic_settings")
    async def topic_settings(original: Any, self: Steps, names: Any) -> Any:
        return await self.gather.topic_settings(names, self._topic_defaults)


@mutant(
    "KIP-226", "an unclean election is held although it was forbidden between the read of the settings and the write"
)
def unclean_election_by_settings_of_before(patches: Patches) -> None:
    @patches.instead_of(Steps, "topic_settings")
    async def topic_settings(original: Any, self: Steps, names: Any) -> Any:
        return {topic: read._replace(version=None) for topic, read in (await original(self, names)).items()}

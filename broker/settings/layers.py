"""The broker settings that can change while the broker runs (KIP-226), and the layers that they form."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.listeners import ADVERTISED_LISTENERS
from minibroker.broker.settings.parsing import OF_LISTENER, broker_config, is_listener_limit
from minibroker.broker.settings.schema import as_texts, known_names
from minibroker.broker.settings.topic_config import SYNONYMS
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.credential_names import is_credential, of_all_listeners

DYNAMIC = frozenset(SYNONYMS.values()) - {"log.durability", "log.message.format.version"} | {
    "advertised.listeners",
    "num.io.threads",
    "num.network.threads",
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "max.connection.creation.rate",
    "background.threads",
    "num.replica.fetchers",
    "num.recovery.threads.per.data.dir",
    "log.cleaner.threads",
    "log.cleaner.io.buffer.size",
    "log.cleaner.io.buffer.load.factor",
    "log.cleaner.backoff.ms",
    "log.cleaner.dedupe.buffer.size",
    "log.cleaner.io.max.bytes.per.second",
    "log.retention.check.interval.ms",
    "producer.id.expiration.ms",
    "transaction.partition.verification.enable",
    "leader.replication.throttled.rate",
    "follower.replication.throttled.rate",
}
"""The broker settings that can change while the broker runs, for one broker or for all (Kafka: cluster-wide). All
others are read when the broker starts."""
PER_BROKER = frozenset({ADVERTISED_LISTENERS})
"""Settings that can only be set for a single broker."""


def dynamic_problem(values: Mapping[str, str], *, is_for_all: bool = False) -> str | None:
    """Return why these settings cannot be changed while a broker runs, or None. Values are not checked. Unknown names
    are accepted and have no effect, as in Kafka: tools set them for plug-ins of brokers."""
    for name in values:
        if is_for_all and name in PER_BROKER:
            return f"broker setting {name} cannot be set for all brokers: set it for one broker, by its id"
        if name in known_names(BrokerConfig) and name not in DYNAMIC:
            return (
                f"broker setting {name} is read-only: change it on the command line or in the properties of the "
                f"broker, and start it again"
            )
    return None


def not_stored_problem(names: Iterable[str]) -> str | None:
    """Return why these settings of brokers cannot be stored in ZooKeeper, where every client reads them, or None.
    Settings of a single listener are read-only like those of all; credentials are not stored under any name. A stored
    one has no effect, and can be deleted."""
    for name in names:
        bare = of_all_listeners(name)
        is_own = bare != name and bare in known_names(BrokerConfig) and bare not in DYNAMIC
        if is_own or is_credential(name):
            why = "read-only" if is_own else "a credential, which is not stored in ZooKeeper"
            return (
                f"broker setting {name} is {why}: change it on the command line or in the properties of the "
                f"broker, and start it again"
            )
    return None


def with_dynamic(static: BrokerConfig, *layers: Mapping[str, str]) -> BrokerConfig:
    """Return the settings of a broker: those it started with, overridden by the layers. Later layers override earlier
    ones. Raises InvalidConfig."""
    values = as_texts(static) | {f"{OF_LISTENER}{name}": value for name, value in static.listener_name.items()}
    for layer in layers:
        problem = dynamic_problem(layer)
        if problem is not None:
            raise InvalidConfig(problem)
        values |= {
            name: value
            for name, value in layer.items()
            if name in known_names(BrokerConfig) or is_listener_limit(static, name)
        }
    config = broker_config(values)
    if config.advertised_listeners != static.advertised_listeners:
        config.advertised_endpoints(defaultdict(int))
    return config

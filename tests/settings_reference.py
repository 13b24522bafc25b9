"""Prints docs/settings.md from the docstrings of `BrokerConfig` and `TopicConfig`: `make settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.layers import DYNAMIC
from minibroker.broker.settings.schema import documentation, rule_of
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.protocol.model import DURABILITY

_HEAD = """\
# Settings

This page is generated from `broker/settings/broker_config.py` and `topic_config.py` by `make settings`. Names and
meanings are Kafka's unless the text says otherwise.

## While brokers run

Settings marked *dynamic* in the tables can be changed at any time with `minibroker configs alter` or
`Admin.incremental_alter_configs`. Every broker applies the change within moments; a broker that is down applies it when
it is back.

```
$ minibroker configs alter --topic orders --set retention.ms=3600000 --set min.insync.replicas=2
changed retention.ms, min.insync.replicas of topic orders
$ minibroker configs alter --broker-default --set log.retention.ms=86400000     # for all brokers
$ minibroker configs alter --broker 2 --set leader.replication.throttled.rate=10000000
$ minibroker configs describe --topic orders
setting              value    from   may be changed
min.insync.replicas  2        topic  yes
retention.ms         3600000  topic  yes
```

The first of these values applies: the topic's, this broker's, the one for all brokers, the one that the broker was
started with, the default. `--delete NAME` removes a value.

- `min.insync.replicas` can be raised and lowered at any time without losing acknowledged records. A value above the
  number of replicas in sync stops acks=all at once; one above the number of replicas counts as that number. The value
  by which a leader acknowledges is stored in ZooKeeper, so the controller knows it even if its own value differs.
- `unclean.leader.election.enable=true` elects a leader at once in every partition that has none, and the records that
  the new leader lacks are lost. Set it for all brokers, never for one: the controller uses its own value.
- `cleanup.policy` with `compact` deletes earlier records of each key, and every record without a key.
- `durability` is fixed when the topic is created, because records acknowledged before a change might not be on any
  disk.

**Changes made by hand in ZooKeeper** (`/config/topics/T`, `/config/brokers/ID`, `/config/brokers/<default>`) apply when
a node below `/config/changes` announces them, as Kafka's tools do. An invalid value is logged as an error by every
broker, and the previous value stays in force.

**Settings without effect.** Brokers accept and show some of Kafka's settings only for tools that set them. In the
tables, and in the documentation that DescribeConfigs returns, their text begins with "Without effect"; `minibroker
configs` marks them. The same holds for every unknown name that is set for a running broker or is in a topic's znode.
Its value is not shown, because it may be a secret. On the command line and in properties files, an unknown name is an
error.
"""

_AT_RUN_TIME = (
    ("the brokers' defaults for topic settings", "dynamic except for `log.message.format.version`, as in Kafka"),
    ("`log.cleaner.*`", "dynamic; `threads`, `io.buffer.size`, `io.buffer.load.factor` without effect"),
    (
        "`num.io.threads`, `num.network.threads`",
        "dynamic: tasks of the data plane; existing connections keep their processor",
    ),
    (
        "`max.connections`, `max.connections.per.ip`, `max.connections.per.ip.overrides`, "
        "`max.connection.creation.rate`, and those of a listener: `listener.name.NAME.max.connections`, "
        "`listener.name.NAME.max.connection.creation.rate`",
        "dynamic; open connections stay open",
    ),
    (
        "`background.threads`, `num.replica.fetchers`, `num.recovery.threads.per.data.dir`",
        "without effect: there are no such threads",
    ),
    ("`producer.id.expiration.ms`", "dynamic"),
    ("`transaction.partition.verification.enable`", "dynamic"),
    (
        "`advertised.listeners`",
        "dynamic, for a single broker: it registers again, and other brokers lead its partitions in the meantime",
    ),
    ("`listeners`", "read-only: a listener is bound when the broker starts"),
    (
        "`listener.security.protocol.map`, `ssl.*`",
        "read-only; a renewed certificate is used when its file changes ([Security](security.md))",
    ),
    ("other `listener.name.NAME.*`", "read-only, as the same settings without the prefix"),
    (
        "`sasl.enabled.mechanisms`, `sasl.oauthbearer.*` (those below), `plain.sasl.jaas.config`",
        "read-only; names that end in `jaas.config`, `password` or `secret` are never stored in ZooKeeper",
    ),
    (
        "other `sasl.*`, `principal.builder.class`",
        "without effect: brokers use no SASL among themselves, and there are no Kerberos and no plug-ins",
    ),
    (
        "`metric.reporters`, `remote.log.*`",
        "without effect: `metrics.listener` serves metrics, and there is no tiered storage",
    ),
)
"""The settings of Kafka's DynamicBrokerConfig, and whether they are dynamic here."""

_BROKERS = """\
## Broker settings

Set them on a broker's command line, `python -m minibroker.broker --override NAME=VALUE`, or in a file of such lines,
`--properties FILE`; the command line overrides the file. `minibroker up --override NAME=VALUE` sets them for every
broker, and for every later `up` without overrides.

Kafka's coarser units are accepted there if the finer unit is not given: `log.retention.minutes`, then
`log.retention.hours`, for `log.retention.ms`; `log.roll.hours` for `log.roll.ms`; `log.roll.jitter.hours` for
`log.roll.jitter.ms`. While a broker runs, only the settings in milliseconds can be changed, as in Kafka.
"""

_TOPICS = """
## Topic settings

Set them when the topic is created, or later. Settings that are not set have the broker's value.

```
$ minibroker topics create strict --partitions 1 --replication-factor 3 --config min.insync.replicas=3
created strict: 1 partition, replication factor 3
```
"""


def reference() -> str:
    """The whole page."""
    lines = [_HEAD, *_at_run_time(), _BROKERS, *_table(BrokerConfig), _TOPICS, *_table(TopicConfig)]
    return "\n".join(lines) + "\n"


def _at_run_time() -> Iterator[str]:
    yield "### Compared with Kafka's dynamic settings"
    yield ""
    yield "| setting of Kafka 3.9 (`DynamicBrokerConfig`) | here |"
    yield "|---|---|"
    for names, here in _AT_RUN_TIME:
        yield f"| {names} | {here} |"
    yield ""
    yield "`log.retention.check.interval.ms` is dynamic here but not in Kafka."
    yield ""


def _table(schema: type[msgspec.Struct]) -> Iterator[str]:
    said = documentation(schema)
    yield "| setting | default | values | dynamic | meaning |"
    yield "|---|---|---|---|---|"
    for field in msgspec.structs.fields(schema):
        rule = rule_of(schema, field.encode_name)
        name = field.encode_name
        is_dynamic = name in DYNAMIC if schema is BrokerConfig else name != DURABILITY
        dynamic = "yes" if is_dynamic else "read-only"
        yield f"| `{name}` | {_shown(field.default)} | {rule} | {dynamic} | {said[name]} |"


def _shown(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "required"
    if default is None or default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(reference(), end="")

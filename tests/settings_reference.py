"""Prints docs/settings.md, from what broker/settings/config.py says of each setting: `make settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from minibroker.broker.settings.config import DYNAMIC, BrokerConfig, TopicConfig, documentation, rule_of
from minibroker.protocol.model import DURABILITY

_HEAD = """\
# Settings

(Made from `broker/settings/config.py` by `make settings`.) Names and meanings are Kafka's, where nothing else is said.

## While brokers run

Settings that are *dynamic* in the tables can be changed at any time, with `minibroker configs alter`, or
`Admin.incremental_alter_configs`; they hold on every broker within moments, and on one that is down when it is back.

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

What is given for the topic wins, then what is given for this broker, then for all brokers, then what the broker was
started with, then the default; `--delete NAME` takes back what was given. Give
`unclean.leader.election.enable` to all brokers, never to one alone: the controller decides elections by its own. By
which `min.insync.replicas` a leader acknowledges is in ZooKeeper, so the controller knows it, whatever its own is.

- `min.insync.replicas` may be raised and lowered at any time; nothing that was acknowledged is lost by it. Raised above
  the number of replicas that are in sync it stops acks=all, at once.
- `unclean.leader.election.enable=true` elects at once where a partition has no leader, and what that one lacks is lost.
- `cleanup.policy` with `compact` deletes earlier records of each key, and every record without a key.
- `durability` stays as it was when the topic was created: what was acknowledged by then need not be on any disk.

What is edited by hand in ZooKeeper (`/config/topics/T`, `/config/brokers/ID`, `/config/brokers/<default>`) counts once
a node below `/config/changes` says so, as Kafka's tools do it. What makes no sense is an error in every broker's log,
and what held before goes on to hold.

Some settings of Kafka's are taken and shown, for tools that set them, and do nothing here: what the tables say of them
begins with "Without effect", and so does what DescribeConfigs returns as their documentation; `minibroker configs`
marks them. The same holds for every name that a broker does not know, if it is set for a running broker or is in the
znode of a topic's settings; its value may be a secret, and is not shown. (On the command line and in the properties an
unknown name is an error.)
"""

_AT_RUN_TIME = (
    ("the brokers' defaults of topics' settings", "dynamic, apart from `log.message.format.version`, as in Kafka"),
    ("`log.cleaner.*`", "dynamic; `threads`, `io.buffer.size`, `io.buffer.load.factor` without effect"),
    ("`num.io.threads`, `num.network.threads`", "dynamic: tasks of the data plane; connections stay with theirs"),
    (
        "`max.connections`, `max.connections.per.ip`, `max.connection.creation.rate`",
        "dynamic; connections that are open stay",
    ),
    ("`max.connections.per.ip.overrides`, `listener.name.NAME.*`", "without effect: a limit is that of a plane"),
    (
        "`background.threads`, `num.replica.fetchers`, `num.recovery.threads.per.data.dir`",
        "without effect: there are no such threads",
    ),
    ("`producer.id.expiration.ms`", "dynamic"),
    ("`transaction.partition.verification.enable`", "without effect: there are no transactions"),
    ("`advertised.listeners`", "dynamic, of one broker: it registers anew, and others lead for it meanwhile"),
    ("`listeners`", "read-only: a listener is bound when the broker starts"),
    (
        "`listener.security.protocol.map`, `ssl.*`, `sasl.*`, `principal.builder.class`",
        "without effect: there is no TLS and no SASL",
    ),
    (
        "`metric.reporters`, `remote.log.*`",
        "without effect: metrics are served by `metrics.listener`, and there is no tiered storage",
    ),
)
"""What Kafka's DynamicBrokerConfig has, and what becomes of it here."""

_BROKERS = """\
## Of a broker

A broker takes them from the command line, `python -m minibroker.broker --override NAME=VALUE`, and from a file of such
lines, `--properties FILE`; the former win. `minibroker up --override NAME=VALUE` gives them to every broker, and to
every later `up` that gives none.

Kafka's coarser units count there, too, if the finer one is not given: `log.retention.minutes` and then
`log.retention.hours` for `log.retention.ms`, `log.roll.hours` for `log.roll.ms`, `log.roll.jitter.hours` for
`log.roll.jitter.ms`. While a broker runs, only the ones in milliseconds can be changed, as in Kafka.
"""

_TOPICS = """
## Of a topic

Given when it is created, or later; what is not given is as the broker has it.

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
    yield "### What Kafka changes at run time, and here"
    yield ""
    yield "| setting of Kafka 3.9 (`DynamicBrokerConfig`) | here |"
    yield "|---|---|"
    for names, here in _AT_RUN_TIME:
        yield f"| {names} | {here} |"
    yield ""
    yield "`log.retention.check.interval.ms` is dynamic here, and not in Kafka."
    yield ""


def _table(schema: type[msgspec.Struct]) -> Iterator[str]:
    said = documentation(schema)
    yield "| setting | default | may be | dynamic | |"
    yield "|---|---|---|---|---|"
    for field in msgspec.structs.fields(schema):
        rule = rule_of(schema, field.encode_name)
        name = field.encode_name
        is_dynamic = name in DYNAMIC if schema is BrokerConfig else name != DURABILITY
        dynamic = "yes" if is_dynamic else "read-only"
        yield f"| `{name}` | {_shown(field.default)} | {rule} | {dynamic} | {said[name]} |"


def _shown(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "must be given"
    if default is None or default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(reference(), end="")

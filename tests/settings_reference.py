"""Prints docs/settings.md, from what broker/config.py says of each setting: `make settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from minibroker.broker.config import DYNAMIC, BrokerConfig, TopicConfig, documentation, rule_of
from minibroker.protocol.model import DURABILITY

_HEAD = """\
# Settings

(Made from `broker/config.py` by `make settings`.) Names and meanings are Kafka's, where nothing else is said.

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
started with, then the default; `--delete NAME` takes back what was given. Give `min.insync.replicas` and
`unclean.leader.election.enable` to all brokers, never to one alone: the controller decides elections by its own.

- `min.insync.replicas` may be raised and lowered at any time; nothing that was acknowledged is lost by it. Raised above
  the number of replicas that are in sync it stops acks=all, at once.
- `unclean.leader.election.enable=true` elects at once where a partition has no leader, and what that one lacks is lost.
- `cleanup.policy` with `compact` deletes earlier records of each key, and every record without a key.
- `durability` stays as it was when the topic was created: what was acknowledged by then need not be on any disk.

What is edited by hand in ZooKeeper (`/config/topics/T`, `/config/brokers/ID`, `/config/brokers/<default>`) counts once
a node below `/config/changes` says so, as Kafka's tools do it. What makes no sense is an error in every broker's log,
and what held before goes on to hold.
"""

_BROKERS = """\
## Of a broker

A broker takes them from the command line, `python -m minibroker.broker --override NAME=VALUE`, and from a file of such
lines, `--properties FILE`; the former win. `minibroker up --override NAME=VALUE` gives them to every broker, and to
every later `up` that gives none.
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
    lines = [_HEAD, _BROKERS, *_table(BrokerConfig), _TOPICS, *_table(TopicConfig)]
    return "\n".join(lines) + "\n"


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

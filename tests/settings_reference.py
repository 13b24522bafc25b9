"""Prints docs/settings.md, from what broker/config.py says of each setting: `make settings`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from minibroker.broker.config import BrokerConfig, TopicConfig, rule_of

_HEAD = """\
# Settings

(Made from `broker/config.py` by `make settings`.) Names and meanings are Kafka's, where nothing else is said.

## Of a broker

A broker takes them from the command line, `python -m minibroker.broker --override NAME=VALUE`, and from a file of such
lines, `--properties FILE`; the former win. `minibroker up --override NAME=VALUE` gives them to every broker, and to
every later `up` that gives none.
"""

_TOPICS = """
## Of a topic

Given when it is created; what is not given is as the broker has it.

```
$ minibroker topics create strict --partitions 1 --replication-factor 3 --config min.insync.replicas=3
created strict: 1 partitions, replication factor 3
```
"""


def reference() -> str:
    """The whole page."""
    lines = [_HEAD, *_table(BrokerConfig), _TOPICS, *_table(TopicConfig)]
    return "\n".join(lines) + "\n"


def texts(schema: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring under each field, by the name of the field."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    found[field.target.id] = " ".join(said.split())
    return found


def _table(schema: type[msgspec.Struct]) -> Iterator[str]:
    said = texts(schema)
    yield "| setting | default | may be | |"
    yield "|---|---|---|---|"
    for field in msgspec.structs.fields(schema):
        rule = rule_of(schema, field.encode_name)
        yield f"| `{field.encode_name}` | {_shown(field.default)} | {rule} | {said[field.name]} |"


def _shown(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "must be given"
    if default is None or default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(reference(), end="")

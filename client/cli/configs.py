"""`minibroker configs`: describe and alter the settings of topics and brokers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigEntry, ConfigErrors, ConfigResource
from minibroker.client.cli import quotas, users
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    LOOK_S,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    name_and_value,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import checked_topic, open_admin
from minibroker.protocol.errors import BrokerError, NetworkError
from minibroker.protocol.model import NOT_KNOWN_TO_BROKERS, AlterOperation, ConfigSource, ResourceType

TopicOption = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Settings of this topic.")]
BrokerOption = Annotated[int | None, typer.Option("--broker", metavar="ID", min=0, help="Settings of this broker.")]
LoggerOption = Annotated[
    int | None,
    typer.Option("--broker-logger", metavar="ID", min=0, help="Log levels of this broker, until it ends."),
]
DefaultOption = Annotated[
    bool, typer.Option("--broker-default", help="Defaults for all brokers. A broker's own value overrides them.")
]

app = typer.Typer(
    help="Show and change settings of topics and brokers, and quotas of users and clients.", no_args_is_help=True
)

SOURCES = {
    ConfigSource.DYNAMIC_TOPIC_CONFIG: "topic",
    ConfigSource.DYNAMIC_BROKER_CONFIG: "broker, while it runs",
    ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG: "all brokers, while they run",
    ConfigSource.STATIC_BROKER_CONFIG: "broker, when it started",
    ConfigSource.DEFAULT_CONFIG: "default",
    ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG: "broker, until it ends",
}
"""Where a value comes from."""


@app.command()
def describe(
    topic: TopicOption = None,
    broker: BrokerOption = None,
    broker_default: DefaultOption = False,
    broker_logger: LoggerOption = None,
    user: quotas.UserOption = None,
    user_default: quotas.UserDefaultOption = False,
    client_id: quotas.ClientIdOption = None,
    client_id_default: quotas.ClientIdDefaultOption = False,
    ip: quotas.IpOption = None,
    ip_default: quotas.IpDefaultOption = False,
    every: Annotated[bool, typer.Option("--all", help="Include settings that have their default.")] = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the settings of a topic or broker that differ from the default, and where each is set.

    Reports settings with invalid values in ZooKeeper on stderr; such a value does not apply. With --broker-logger: the
    loggers with a level of their own. With --user or --client-id: the quotas of that user or client."""
    entity = quotas.entity_of(user, user_default, client_id, client_id_default, ip, ip_default)
    if entity is not None:
        _only(topic, broker, broker_default, broker_logger)
        quotas.describe(bootstrap_servers(bootstrap, data), entity, format)
        return
    resource = _resource(topic, broker, broker_default, broker_logger)
    entries = run(_describe(bootstrap_servers(bootstrap, data), resource))
    shown = [e for e in entries.values() if every or e.problem or e.source is not ConfigSource.DEFAULT_CONFIG]
    if format is Format.JSON:
        print_json(
            [
                entry._asdict()
                | {
                    "source": entry.source.name,
                    "type": entry.type.name,
                    "synonyms": [one._asdict() | {"source": one.source.name} for one in entry.synonyms],
                }
                for entry in shown
            ]
        )
    else:
        print_table(
            ("setting", "value", "from", "may be changed"),
            [
                (
                    entry.name,
                    "(secret)" if entry.is_sensitive else entry.value,
                    _place(resource, entry.source),
                    "without effect" if entry.is_without_effect else not entry.is_read_only,
                )
                for entry in shown
            ],
        )
    for problem in dict.fromkeys(entry.problem for entry in shown if entry.problem):
        sys.stderr.write(pastable(f"warning: {problem}; correct it with `minibroker configs alter`") + "\n")


@app.command()
def alter(
    topic: TopicOption = None,
    broker: BrokerOption = None,
    broker_default: DefaultOption = False,
    broker_logger: LoggerOption = None,
    user: quotas.UserOption = None,
    user_default: quotas.UserDefaultOption = False,
    client_id: quotas.ClientIdOption = None,
    client_id_default: quotas.ClientIdDefaultOption = False,
    ip: quotas.IpOption = None,
    ip_default: quotas.IpDefaultOption = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a value. May be repeated.")
    ] = None,
    delete: Annotated[
        list[str] | None,
        typer.Option(
            "--delete", metavar="NAME", help="Remove the override; the inherited value applies. May be repeated."
        ),
    ] = None,
    append: Annotated[
        list[str] | None,
        typer.Option("--append", metavar="NAME=ITEM,...", help="Append items to a list. May be repeated."),
    ] = None,
    subtract: Annotated[
        list[str] | None,
        typer.Option("--subtract", metavar="NAME=ITEM,...", help="Remove items from a list. May be repeated."),
    ] = None,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check the changes without applying them.")
    ] = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Change settings of a topic or broker: all of the given changes, or none.

    They apply within moments, without a restart. Switching a topic to cleanup.policy=compact removes its records
    without a key, as in Kafka. With --user or --client-id, or both: the quotas producer_byte_rate, consumer_byte_rate
    and request_percentage, which apply at each broker, and controller_mutation_rate. With --user:
    SCRAM-SHA-256=[password-file=FILE] or SCRAM-SHA-512 sets a password; [] asks for it. With --ip: the quota
    connection_creation_rate."""
    entity = quotas.entity_of(user, user_default, client_id, client_id_default, ip, ip_default)
    if entity is not None:
        _only(topic, broker, broker_default, broker_logger)
        if append or subtract:
            raise UsageError("a quota is a number: give --set NAME=VALUE or --delete NAME")
        alter = users.alter if users.are_meant(set_ or [], delete or []) else quotas.alter
        alter(bootstrap_servers(bootstrap, data), entity, set_ or [], delete or [], validate_only, format)
        return
    resource = _resource(topic, broker, broker_default, broker_logger)
    if users.are_meant([text for text in set_ or [] if text.upper().startswith("SCRAM")], []):
        raise UsageError("a password belongs to a user: give --user NAME")
    pairs = [("--set", ConfigChange.set, set_), ("--append", ConfigChange.append, append)]
    pairs += [("--subtract", ConfigChange.subtract, subtract)]
    changes = [
        make(*name_and_value(option, text, "retention.ms=3600000"))
        for option, make, texts in pairs
        for text in texts or []
    ]
    changes += [ConfigChange.delete(name) for name in delete or []]
    if not changes:
        raise UsageError("no change given: give --set NAME=VALUE, --delete NAME, --append or --subtract")
    names = [change.name for change in changes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is changed {names.count(name)} times: give each setting once")
    before = run(_alter(bootstrap_servers(bootstrap, data), resource, changes, validate_only))
    changed = [name for name in names if name not in before.not_set]
    done = "could change" if validate_only else "changed"
    if format is Format.JSON:
        print_json(
            {
                "resource": str(resource),
                "changed": changed,
                "was_not_set": list(before.not_set),
                "validate_only": validate_only,
            }
        )
    else:
        if changed:
            sys.stdout.write(f"{done} {', '.join(changed)} of {resource}\n")
        for name in before.not_set:
            sys.stdout.write(f"{name} of {resource} was not set\n")
    for name, why in before.without_effect.items():
        sys.stderr.write(f"warning: {name}: {why[:1].lower()}{why[1:]}\n")


def _place(resource: ConfigResource, source: ConfigSource) -> str:
    """Return where a value comes from. A logger without a level of its own has that of its parent."""
    is_inherited = resource.type is ResourceType.BROKER_LOGGER and source is ConfigSource.DEFAULT_CONFIG
    return "inherited" if is_inherited else SOURCES[source]


def _only(topic: str | None, broker: int | None, broker_default: bool, logger: int | None) -> None:
    if topic is not None or broker is not None or broker_default or logger is not None:
        raise UsageError("give a topic or broker, or a user or client, but not both")


def _resource(topic: str | None, broker: int | None, broker_default: bool, logger: int | None) -> ConfigResource:
    if (topic is not None) + (broker is not None) + broker_default + (logger is not None) != 1:
        raise UsageError(
            "give one of --topic TOPIC, --broker ID, --broker-default, --broker-logger ID, --user NAME, --client-id ID "
            "and --ip ADDRESS"
        )
    if topic is not None:
        return ConfigResource.of_topic(checked_topic(topic))
    if logger is not None:
        return ConfigResource.of_broker_logger(logger)
    return ConfigResource.of_all_brokers() if broker is None else ConfigResource.of_broker(broker)


def _topics(resource: ConfigResource) -> list[str]:
    return [resource.name] if resource.type is ResourceType.TOPIC else []


async def _describe(bootstrap: str, resource: ConfigResource) -> dict[str, ConfigEntry]:
    async with open_admin(bootstrap, topics=_topics(resource)) as admin:
        try:
            return (await admin.describe_configs([resource], synonyms=True, documentation=True))[resource]
        except ConfigErrors as failed:
            raise failed.errors[resource] from None


class Expected(NamedTuple):
    """The facts about changes that are known before they are made."""

    without_effect: Mapping[str, str]
    """The settings without effect, with the reason."""
    not_set: Collection[str] = ()
    """Settings to be deleted that are not set."""


async def expected(admin: Admin, resource: ConfigResource, changes: Sequence[ConfigChange]) -> Expected:
    """Look the settings up before the change, so that --validate-only prints the same. Raises ConfigErrors,
    NetworkError, BrokerError."""
    asked = [resource]
    if resource == ConfigResource.of_all_brokers():
        # This resource has only the settings that are set; any broker has their documentation.
        asked += [ConfigResource.of_broker(one.id) for one in (await admin.describe_cluster()).brokers[:1]]
    names = [change.name for change in changes]
    found = await admin.describe_configs(asked, names=names, synonyms=True, documentation=True)
    known = {name: entry for described in found.values() for name, entry in described.items()}
    without_effect: dict[str, str] = {}
    not_set = []
    for change in changes:
        entry, own = known.get(change.name), found[resource].get(change.name)
        if change.operation is AlterOperation.DELETE:
            if own is None or not _is_set_for(resource, own):
                not_set.append(change.name)
        elif entry is None:
            if resource.type is ResourceType.BROKER:  # unknown names are rejected for a topic
                without_effect[change.name] = NOT_KNOWN_TO_BROKERS
        elif entry.is_without_effect:
            without_effect[change.name] = entry.documentation or ""
    return Expected(without_effect, not_set)


def _is_set_for(resource: ConfigResource, entry: ConfigEntry) -> bool:
    """Whether the setting is set for this resource, not inherited. An invalid value is set, although it does not
    apply."""
    if resource.type is ResourceType.TOPIC:
        place = ConfigSource.DYNAMIC_TOPIC_CONFIG
    elif resource.type is ResourceType.BROKER_LOGGER:
        return entry.source is not ConfigSource.DEFAULT_CONFIG
    elif resource.broker_id is None:
        place = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
    else:
        place = ConfigSource.DYNAMIC_BROKER_CONFIG
    return bool(entry.problem) or place in (entry.source, *(one.source for one in entry.synonyms))


async def _alter(
    bootstrap: str, resource: ConfigResource, changes: list[ConfigChange], validate_only: bool
) -> Expected:
    async with open_admin(bootstrap, topics=_topics(resource)) as admin:
        before = Expected({})
        # A failure here does not matter: the change itself reports errors, and may be what makes a broker reachable.
        with suppress(TimeoutError, ConfigErrors, NetworkError, BrokerError):
            async with asyncio.timeout(LOOK_S):
                before = await expected(admin, resource, changes)
        try:
            await admin.incremental_alter_configs({resource: changes}, validate_only=validate_only)
        except ConfigErrors as failed:
            raise failed.errors[resource] from None
        return before

"""Settings of topics and brokers: DescribeConfigs and IncrementalAlterConfigs at each broker that a setting concerns,
or at any broker (KIP-226, KIP-339, KIP-412)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from minibroker.client.administering.requests import FORWARDER_PATIENCE_S, AdminRequests
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import Address, check_text
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.model import WITHOUT_EFFECT, AlterOperation, ConfigSource, ConfigType, ResourceType


class ConfigResource(NamedTuple):
    """A topic, a broker, or all brokers, as the owner of settings. Use `of_topic`, `of_broker`, `of_all_brokers` or
    `of_broker_logger`."""

    type: ResourceType
    name: str

    @classmethod
    def of_topic(cls, name: str) -> ConfigResource:
        return cls(ResourceType.TOPIC, name)

    @classmethod
    def of_broker(cls, broker_id: int) -> ConfigResource:
        return cls(ResourceType.BROKER, str(broker_id))

    @classmethod
    def of_all_brokers(cls) -> ConfigResource:
        """Return the default of all brokers; a broker's own setting overrides it."""
        return cls(ResourceType.BROKER, "")

    @classmethod
    def of_broker_logger(cls, broker_id: int) -> ConfigResource:
        """Return the loggers of a broker. The value of each is its level: TRACE, DEBUG, INFO, WARN, ERROR or FATAL. A
        change lasts until the broker ends."""
        return cls(ResourceType.BROKER_LOGGER, str(broker_id))

    @property
    def broker_id(self) -> int | None:
        """The broker to ask; None: any broker."""
        return int(self.name) if self.type is not ResourceType.TOPIC and self.name else None

    def __str__(self) -> str:
        if self.type is ResourceType.TOPIC:
            return f"topic {self.name}"
        if self.type is ResourceType.BROKER_LOGGER:
            return f"the loggers of broker {self.name}"
        return f"broker {self.name}" if self.name else "all brokers"


class ConfigSynonym(NamedTuple):
    """A place that sets a value."""

    name: str
    value: str | None
    source: ConfigSource


class ConfigEntry(NamedTuple):
    """A setting and its effective value."""

    name: str
    value: str | None
    """None: it is not set, or secret."""
    source: ConfigSource
    is_read_only: bool
    """A broker's setting that cannot change while brokers run, or a topic's setting that cannot change at all."""
    is_sensitive: bool
    type: ConfigType
    synonyms: tuple[ConfigSynonym, ...]
    """All places that set it, the effective one first. Empty unless the call asked for synonyms."""
    documentation: str | None
    problem: str | None = None
    """Why the setting in ZooKeeper is invalid and has no effect; None if it is valid."""

    @property
    def is_without_effect(self) -> bool:
        """Whether the setting is accepted for the sake of Kafka's tools, but ignored. Known only with documentation."""
        return (self.documentation or "").startswith(WITHOUT_EFFECT)


class ConfigErrors(PartialFailure[ConfigResource, Mapping[str, ConfigEntry]]):
    """Some resources of a request failed; the others succeeded. `errors` and `results` are by resource."""


class ConfigChange(NamedTuple):
    """A change of one setting. Use `set`, `delete`, `append` or `subtract`."""

    name: str
    operation: AlterOperation
    value: str | None = None

    @classmethod
    def set(cls, name: str, value: object) -> ConfigChange:
        """Raises InvalidSetting for None; use `delete` to remove a setting."""
        if value is None:
            raise InvalidSetting(name, value, "give a value, or remove the setting with ConfigChange.delete(NAME)")
        return cls(name, AlterOperation.SET, str(value).lower() if isinstance(value, bool) else str(value))

    @classmethod
    def delete(cls, name: str) -> ConfigChange:
        """Remove the setting; the inherited value applies, or the default."""
        return cls(name, AlterOperation.DELETE)

    @classmethod
    def append(cls, name: str, items: str) -> ConfigChange:
        """Append items to a list, separated by commas. Items that are in it already are not repeated."""
        return cls(name, AlterOperation.APPEND, items)

    @classmethod
    def subtract(cls, name: str, items: str) -> ConfigChange:
        """Remove items from a list, separated by commas. Items that are not in it are ignored."""
        return cls(name, AlterOperation.SUBTRACT, items)


def check_resources(resources: Iterable[ConfigResource]) -> list[ConfigResource]:
    """Return each resource once. Raises InvalidSetting."""
    if isinstance(resources, ConfigResource):
        raise InvalidSetting("resources", resources, "give a list of ConfigResource")
    checked = list(dict.fromkeys(resources))
    for resource in checked:
        if not isinstance(resource, ConfigResource):
            raise InvalidSetting("resources", resource, "give a ConfigResource, such as ConfigResource.of_topic(NAME)")
        if resource.type is ResourceType.BROKER and resource.name and not resource.name.isdecimal():
            raise InvalidSetting("resources", resource.name, "a broker's name is its id, and empty for all brokers")
        if resource.type is ResourceType.BROKER_LOGGER and not resource.name.isdecimal():
            raise InvalidSetting("resources", resource.name, "loggers belong to a broker: give its id")
        check_text("resources", resource.name)
    return checked


def check_changes(changes: Mapping[ConfigResource, Sequence[ConfigChange]]) -> list[ConfigResource]:
    """Return the resources that change. Raises InvalidSetting."""
    checked = check_resources(changes)
    for resource, some in changes.items():
        if isinstance(some, ConfigChange) or not all(isinstance(change, ConfigChange) for change in some):
            raise InvalidSetting(
                f"changes of {resource}", some, "give a list of ConfigChange, such as [ConfigChange.set(NAME, VALUE)]"
            )
        for change in some:
            check_text("name", change.name)
            if change.value is not None:
                check_text(change.name, change.value)
    return checked


Ask = Callable[[Address | None, list[ConfigResource]], Awaitable[dict[ConfigResource, MinibrokerError]]]
"""Asks one broker, or any (None), about some resources. Returns the errors."""


async def describe(
    requests: AdminRequests,
    resources: Iterable[ConfigResource],
    *,
    names: Collection[str] | None,
    synonyms: bool,
    documentation: bool,
) -> dict[ConfigResource, dict[str, ConfigEntry]]:
    """See `Admin.describe_configs`."""
    asked = check_resources(resources)
    results: dict[ConfigResource, dict[str, ConfigEntry]] = {}

    async def ask(address: Address | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
        body = describe_request(some, names, synonyms, documentation)
        found, errors = described(some, await requests.ask(address, DESCRIBE_CONFIGS, body))
        results.update(found)
        return errors

    errors = await _of_each(requests, asked, ask)
    if errors:
        raise ConfigErrors(errors, results)
    return {resource: results[resource] for resource in asked}


async def alter(
    requests: AdminRequests, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool
) -> None:
    """See `Admin.incremental_alter_configs`."""
    asked = check_changes(changes)

    async def ask(address: Address | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
        retries = requests.retries()
        known: dict[ConfigResource, tuple[str, int]] = {}
        errors: dict[ConfigResource, MinibrokerError] = {}
        while True:
            body = alter_request({resource: changes[resource] for resource in some}, validate_only, known)
            try:
                response = await requests.ask(address, INCREMENTAL_ALTER_CONFIGS, body, retries)
            except RequestTimedOut as error:
                if validate_only:
                    raise
                raise RequestTimedOut(f"{error}. They may yet be changed") from error
            refused, versions = altered(some, response)
            some = [resource for resource in some if resource in versions]
            errors |= {resource: error for resource, error in refused.items() if resource not in versions}
            if not some:
                return errors
            was_lookup = not known
            known |= versions
            if not was_lookup and not await retries.pause("other changes came first"):
                return errors | {resource: refused[resource] for resource in some}

    errors = await _of_each(requests, asked, ask)
    if errors:
        raise ConfigErrors(errors)


async def _of_each(
    requests: AdminRequests, resources: Sequence[ConfigResource], ask: Ask
) -> dict[ConfigResource, MinibrokerError]:
    """Ask each broker about its own settings, and any broker about all other resources. Return the errors.

    If a broker cannot be reached at the address in the metadata, try all other known addresses: the broker may be
    behind one of them, and any broker can correct the `advertised.listeners` of another."""
    places: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        places.setdefault(resource.broker_id, []).append(resource)
    brokers: dict[int, Address] = {}
    if any(broker_id is not None for broker_id in places):
        brokers = {broker.id: Address(broker.host, broker.port) for broker in (await requests.cluster()).brokers}

    async def ask_at(broker_id: int | None, some: list[ConfigResource]) -> dict[ConfigResource, MinibrokerError]:
        try:
            if broker_id is None:
                return await ask(None, some)
            if broker_id not in brokers:
                raise NetworkError(
                    f"broker {broker_id} is not alive (those that are: {', '.join(map(str, brokers))}): start it, "
                    f"or see `minibroker status`"
                )
            if not await requests.is_reachable(brokers[broker_id]):
                for other in requests.runtime.metadata.addresses():
                    if other == brokers[broker_id] or not await requests.is_reachable(other):
                        continue
                    with suppress(TimeoutError, NetworkError):
                        async with asyncio.timeout(FORWARDER_PATIENCE_S):
                            errors = await ask(other, some)
                        if not any(_is_refusal_of_another(error) for error in errors.values()):
                            return errors
            return await ask(brokers[broker_id], some)
        except (NetworkError, BrokerError, InvalidMessage) as error:
            return dict.fromkeys(some, error)

    # At the same time, so that a broker that does not answer takes no time from the others.
    answers = await asyncio.gather(*(ask_at(broker_id, some) for broker_id, some in places.items()))
    return {resource: error for errors in answers for resource, error in errors.items()}


def _is_refusal_of_another(error: MinibrokerError) -> bool:
    """Return whether the broker may have said that another broker was meant."""
    return isinstance(error, BrokerError) and error.code is ErrorCode.INVALID_REQUEST


def describe_request(
    resources: Sequence[ConfigResource], names: Collection[str] | None, synonyms: bool, documentation: bool
) -> m.DescribeConfigsRequest:
    keys = None if names is None else [check_text("names", name) for name in names]
    asked = [m.DescribeConfigsResource(resource.type, resource.name, keys) for resource in resources]
    return m.DescribeConfigsRequest(asked, synonyms, documentation)


def described(
    asked: Sequence[ConfigResource], response: m.DescribeConfigsResponse
) -> tuple[dict[ConfigResource, dict[str, ConfigEntry]], dict[ConfigResource, MinibrokerError]]:
    """Return the settings, and the errors of the other resources. Raises InvalidMessage."""
    answers = {(result.resource_type, result.resource_name): result for result in response.results}
    found: dict[ConfigResource, dict[str, ConfigEntry]] = {}
    errors: dict[ConfigResource, MinibrokerError] = {}
    for resource in asked:
        result = answers.get((resource.type, resource.name))
        if result is None:
            errors[resource] = BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out")
        elif result.error_code != ErrorCode.NONE:
            errors[resource] = _refusal(resource, result.error_code, result.error_message)
        else:
            found[resource] = {entry.name: _entry(entry) for entry in result.configs}
    return found, errors


def _refusal(resource: ConfigResource, code: int, message: str | None) -> BrokerError:
    """The table's remedy points to the settings of topics and brokers, and loggers are none of them."""
    is_complete = resource.type is ResourceType.BROKER_LOGGER and bool(message)
    return BrokerError(error_of(code), message or "", is_complete)


def _entry(entry: m.DescribeConfigsEntry) -> ConfigEntry:
    try:
        return ConfigEntry(
            entry.name,
            entry.value,
            ConfigSource(entry.config_source),
            entry.read_only,
            entry.is_sensitive,
            ConfigType(entry.config_type),
            tuple(ConfigSynonym(one.name, one.value, ConfigSource(one.source)) for one in entry.synonyms),
            entry.documentation,
            entry.problem,
        )
    except ValueError as error:
        raise InvalidMessage(f"not a description of {entry.name}: {error}") from error


KnownVersions = Mapping[ConfigResource, tuple[str, int]]
"""The topic's id and the version of the settings, for the resources that were looked up."""


def alter_request(
    changes: Mapping[ConfigResource, Sequence[ConfigChange]], validate_only: bool, known: KnownVersions
) -> m.IncrementalAlterConfigsRequest:
    """Resources without a known version carry a version that nothing has, and are rejected with the current one. All
    later requests carry that one, so a request that arrives late changes nothing if another attempt or another client
    has changed the settings before."""
    unknown = ("", m.ANY_VERSION if validate_only else m.NO_VERSION)
    return m.IncrementalAlterConfigsRequest(
        [
            m.AlterConfigsResource(
                resource.type,
                resource.name,
                [m.AlterableConfig(change.name, change.operation, change.value) for change in some],
                *known.get(resource, unknown),
            )
            for resource, some in changes.items()
        ],
        validate_only,
    )


def altered(
    asked: Sequence[ConfigResource], response: m.IncrementalAlterConfigsResponse
) -> tuple[dict[ConfigResource, MinibrokerError], dict[ConfigResource, tuple[str, int]]]:
    """Return the errors, and the current topic id and version of each resource whose version was not current."""
    answers = {(r.resource_type, r.resource_name): r for r in response.responses}
    errors: dict[ConfigResource, MinibrokerError] = {}
    versions: dict[ConfigResource, tuple[str, int]] = {}
    for resource in asked:
        answer = answers.get((resource.type, resource.name))
        if answer is None:
            errors[resource] = BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out")
        elif answer.error_code != ErrorCode.NONE:
            errors[resource] = _refusal(resource, answer.error_code, answer.error_message)
            if answer.error_code == ErrorCode.INVALID_UPDATE_VERSION:
                versions[resource] = answer.topic_id, answer.version
    return errors, versions

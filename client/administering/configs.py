"""Settings of topics and brokers, as the admin client describes and changes them (KIP-226, KIP-339)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import check_text
from minibroker.protocol import messages as m
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, error_of
from minibroker.protocol.model import WITHOUT_EFFECT, AlterOperation, ConfigSource, ConfigType, ResourceType


class ConfigResource(NamedTuple):
    """What has settings. Best made by `of_topic`, `of_broker` and `of_all_brokers`."""

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
        """What holds for every broker where that one has nothing of its own."""
        return cls(ResourceType.BROKER, "")

    @property
    def broker_id(self) -> int | None:
        """Whom to ask; None: any broker."""
        return int(self.name) if self.type is ResourceType.BROKER and self.name else None

    def __str__(self) -> str:
        if self.type is ResourceType.TOPIC:
            return f"topic {self.name}"
        return f"broker {self.name}" if self.name else "all brokers"


class ConfigSynonym(NamedTuple):
    """One place where a value is given."""

    name: str
    value: str | None
    source: ConfigSource


class ConfigEntry(NamedTuple):
    """A setting as it holds."""

    name: str
    value: str | None
    """None: it is not set, or a secret."""
    source: ConfigSource
    is_read_only: bool
    """It cannot be changed while brokers run, or (of a topic) at all."""
    is_sensitive: bool
    type: ConfigType
    synonyms: tuple[ConfigSynonym, ...]
    """All places where it is given, if these were asked for: the first one holds."""
    documentation: str | None
    problem: str | None = None
    """What ZooKeeper has for this resource does not hold, as it makes no sense: why."""

    @property
    def is_without_effect(self) -> bool:
        """It is taken and shown, for tools that set it, and does nothing. Known where documentation was asked for."""
        return (self.documentation or "").startswith(WITHOUT_EFFECT)


class ConfigErrors(PartialFailure[ConfigResource, Mapping[str, ConfigEntry]]):
    """Some resources of a request failed; the others succeeded. `errors` and `results` are by resource."""


class ConfigChange(NamedTuple):
    """What is to become of a setting. Best made by the methods."""

    name: str
    operation: AlterOperation
    value: str | None = None

    @classmethod
    def set(cls, name: str, value: object) -> ConfigChange:
        """Raises InvalidSetting for None, which is no value."""
        if value is None:
            raise InvalidSetting(name, value, "give a value, or end what is set with ConfigChange.delete(NAME)")
        return cls(name, AlterOperation.SET, str(value).lower() if isinstance(value, bool) else str(value))

    @classmethod
    def delete(cls, name: str) -> ConfigChange:
        """What holds then is what is given elsewhere, or the default."""
        return cls(name, AlterOperation.DELETE)

    @classmethod
    def append(cls, name: str, items: str) -> ConfigChange:
        """To a list, separated by commas. What is in it already stays there once."""
        return cls(name, AlterOperation.APPEND, items)

    @classmethod
    def subtract(cls, name: str, items: str) -> ConfigChange:
        """From a list, separated by commas. What is not in it is no error."""
        return cls(name, AlterOperation.SUBTRACT, items)


def check_resources(resources: Iterable[ConfigResource]) -> list[ConfigResource]:
    """Each once. Raises InvalidSetting."""
    if isinstance(resources, ConfigResource):
        raise InvalidSetting("resources", resources, "give a list of ConfigResource")
    checked = list(dict.fromkeys(resources))
    for resource in checked:
        if not isinstance(resource, ConfigResource):
            raise InvalidSetting("resources", resource, "give a ConfigResource, such as ConfigResource.of_topic(NAME)")
        if resource.type is ResourceType.BROKER and resource.name and not resource.name.isdecimal():
            raise InvalidSetting("resources", resource.name, "a broker's name is its id, and empty for all brokers")
        check_text("resources", resource.name)
    return checked


def check_changes(changes: Mapping[ConfigResource, Sequence[ConfigChange]]) -> list[ConfigResource]:
    """Whose settings are to change. Raises InvalidSetting."""
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


def describe_request(
    resources: Sequence[ConfigResource], names: Collection[str] | None, synonyms: bool, documentation: bool
) -> m.DescribeConfigsRequest:
    keys = None if names is None else [check_text("names", name) for name in names]
    asked = [m.DescribeConfigsResource(resource.type, resource.name, keys) for resource in resources]
    return m.DescribeConfigsRequest(asked, synonyms, documentation)


def described(
    asked: Sequence[ConfigResource], response: m.DescribeConfigsResponse
) -> tuple[dict[ConfigResource, dict[str, ConfigEntry]], dict[ConfigResource, MinibrokerError]]:
    """What was found, and what went wrong. Raises InvalidMessage."""
    answers = {(result.resource_type, result.resource_name): result for result in response.results}
    found: dict[ConfigResource, dict[str, ConfigEntry]] = {}
    errors: dict[ConfigResource, MinibrokerError] = {}
    for resource in asked:
        result = answers.get((resource.type, resource.name))
        if result is None:
            errors[resource] = BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out")
        elif result.error_code != ErrorCode.NONE:
            errors[resource] = BrokerError(error_of(result.error_code), result.error_message or "")
        else:
            found[resource] = {entry.name: _entry(entry) for entry in result.configs}
    return found, errors


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
"""Of settings that have been looked up: the topic's id, and the version."""


def alter_request(
    changes: Mapping[ConfigResource, Sequence[ConfigChange]], validate_only: bool, known: KnownVersions
) -> m.IncrementalAlterConfigsRequest:
    """Those that are not known have a version that nothing has, and are refused with the current one. With that in
    every request, one that is on its way for long does nothing once the settings have been changed, be it by another
    attempt or by what somebody has asked for since."""
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
    """What went wrong; and the topic ids and versions of those that had others than were known."""
    answers = {(r.resource_type, r.resource_name): r for r in response.responses}
    errors: dict[ConfigResource, MinibrokerError] = {}
    versions: dict[ConfigResource, tuple[str, int]] = {}
    for resource in asked:
        answer = answers.get((resource.type, resource.name))
        if answer is None:
            errors[resource] = BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out")
        elif answer.error_code != ErrorCode.NONE:
            errors[resource] = BrokerError(error_of(answer.error_code), answer.error_message or "")
            if answer.error_code == ErrorCode.INVALID_UPDATE_VERSION:
                versions[resource] = answer.topic_id, answer.version
    return errors, versions

"""DescribeConfigs, IncrementalAlterConfigs and AlterConfigs (KIP-226, KIP-339, KIP-412).

Any broker serves the settings of topics and of all brokers (the empty name); a broker's settings are served by itself.
Only `advertised.listeners` of a broker can be changed at any broker, because no client reaches a broker whose addresses
are wrong.

The broker writes three things in one multi: the settings, if they are still those that it has read (their version); a
check that the topic is still the one that it has read (the node of its id); and the notification. If two requests
change the same settings, one of them starts again. A topic that was created again does not receive settings that were
meant for its predecessor. A broker that is killed has either changed the settings and notified all brokers, or neither.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from minibroker.broker.handlers.services import Services, answer_later, check_count, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.config_changes import (
    altered_broker,
    altered_other_broker,
    altered_topic,
    check_changed_once,
    not_that_broker,
)
from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.broker.settings.layers import DYNAMIC, with_dynamic
from minibroker.broker.settings.log_levels import change_log_levels, log_levels
from minibroker.broker.settings.parsing import (
    OF_LISTENER,
    from_earlier_release,
    is_listener_limit,
    topic_config_in_zookeeper,
)
from minibroker.broker.settings.schema import (
    as_texts,
    config_type,
    default_texts,
    documentation,
    known_names,
)
from minibroker.broker.settings.topic_config import SYNONYMS, TopicConfig
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol import znodes
from minibroker.protocol.credential_names import SENSITIVE, of_all_listeners
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    ANY_VERSION,
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    DescribeConfigsEntry,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ReplacedConfigs,
)
from minibroker.protocol.model import (
    CLEANUP_POLICY,
    DURABILITY,
    INTERNAL_CLEANUP_POLICY,
    INTERNAL_TOPICS,
    NOT_KNOWN_TO_BROKERS,
    REPLICATED,
    AlterOperation,
    ConfigSource,
    ConfigType,
    ResourceType,
    min_insync_replicas,
    topic_name_problem,
)
from minibroker.protocol.world import (
    BadVersion,
    Check,
    ConnectionLoss,
    Create,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    SessionExpired,
    SetData,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode, TopicZnode
from minibroker.protocol.zookeeper_reads import catch_up

MIN_INSYNC_REPLICAS = "min.insync.replicas"
TIMEOUT_MS = 20_000
"""The limit for each request, which has no timeout of its own. It is below the clients' default."""
RETRY_S = 0.05
LONGEST_MESSAGE = 2_000
"""The maximum length of an error message, which may quote a long value."""

Layer = tuple[ConfigSource, Mapping[str, str]]
"""The values that are set at one source, by their names there."""


async def handle_describe_configs(services: Services, request: Request, body: DescribeConfigsRequest) -> None:
    check_count(services, len(body.resources))
    check_named_once("a resource", [(resource.resource_type, resource.resource_name) for resource in body.resources])

    async def answer() -> None:
        results = []
        slices = Slices()
        reader = _SessionReader(services)
        for resource in body.resources:
            await slices.breathe()
            try:
                if resource.resource_type == ResourceType.BROKER_LOGGER:
                    _check_is_own_logger(services, resource.resource_name)
                    results.append(_description(ErrorCode.NONE, None, resource, _described_loggers(resource)))
                    continue
                if _is_of_another(services, resource.resource_type, resource.resource_name):
                    raise not_that_broker(resource.resource_name, services.configs.static.broker_id)
                found = await reader.find(resource.resource_type, resource.resource_name)
                held = (
                    services.replicas.settings.topics.texts_of(resource.resource_name)
                    if found.topic is not None
                    else None
                )
                entries = _described(services.configs, found, resource, body, held or {})
                results.append(_description(ErrorCode.NONE, None, resource, entries))
            except BrokerError as error:
                results.append(_description(error.code, error.detail[:LONGEST_MESSAGE], resource, []))
        request.respond(DescribeConfigsResponse(0, results))

    answer_later(services, request, TIMEOUT_MS, answer)


def _description(
    code: ErrorCode, message: str | None, resource: DescribeConfigsResource, entries: list[DescribeConfigsEntry]
) -> DescribeConfigsResult:
    return DescribeConfigsResult(code, message, resource.resource_type, resource.resource_name, entries)


async def handle_incremental_alter_configs(
    services: Services, request: Request, body: IncrementalAlterConfigsRequest
) -> None:
    """Answer when the new settings are in ZooKeeper; the brokers apply them soon after."""
    check_count(services, len(body.resources))

    async def answer() -> None:
        responses = await _alter_all(services, body.resources, body.validate_only)
        request.respond(IncrementalAlterConfigsResponse(0, responses))

    answer_later(services, request, TIMEOUT_MS, answer)


async def handle_alter_configs(services: Services, request: Request, body: AlterConfigsRequest) -> None:
    """Like `handle_incremental_alter_configs`, but the given settings replace all present ones."""
    check_count(services, len(body.resources))

    async def answer() -> None:
        request.respond(AlterConfigsResponse(0, await _alter_all(services, body.resources, body.validate_only)))

    answer_later(services, request, TIMEOUT_MS, answer)


async def _alter_all(
    services: Services, resources: Sequence[AlterConfigsResource | ReplacedConfigs], validate_only: bool
) -> list[AlterConfigsResourceResponse]:
    named = Counter((resource.resource_type, resource.resource_name) for resource in resources)
    responses = []
    for resource in resources:
        response = AlterConfigsResourceResponse(ErrorCode.NONE, None, resource.resource_type, resource.resource_name)
        try:
            if named[resource.resource_type, resource.resource_name] > 1:
                raise BrokerError(ErrorCode.INVALID_REQUEST, "it is in the request twice: give all changes at once")
            await _alter(services, resource, validate_only)
        except BrokerError as error:
            response.error_code, response.error_message = error.code, error.detail[:LONGEST_MESSAGE]
            if isinstance(error, _Outdated):
                response.topic_id, response.version = error.topic_id, error.version
        responses.append(response)
    return responses


# --- Reading ---------------------------------------------------------------------------------------------------


class _StoredConfigs(msgspec.Struct):
    """A resource's settings in ZooKeeper."""

    path: str
    values: Mapping[str, str]
    version: int | None
    """None: nothing is set."""
    changed_in: int = 0
    """The transaction of the last change (the mzxid). 0: nothing is set."""
    topic: TopicZnode | None = None

    @property
    def replication_factor(self) -> int:
        return 0 if self.topic is None else min((len(r) for r in self.topic.partitions.values()), default=0)


_BROKER_ID = re.compile("0|[1-9][0-9]{0,9}")


def _is_of_another(services: Services, kind: int, name: str) -> bool:
    """Return whether these are the settings of another broker."""
    return kind == ResourceType.BROKER and name not in ("", str(services.configs.static.broker_id))


def _check_is_own_logger(services: Services, name: str) -> None:
    """Raises BrokerError INVALID_REQUEST unless these are the loggers of this broker."""
    if not name:
        raise BrokerError(ErrorCode.INVALID_REQUEST, "each broker has its own loggers: give a broker's id as the name")
    if name != str(services.configs.static.broker_id):
        raise not_that_broker(name, services.configs.static.broker_id)


def _described_loggers(asked: DescribeConfigsResource) -> list[DescribeConfigsEntry]:
    return [
        DescribeConfigsEntry(name, level.name, False, level.source, False, [], ConfigType.STRING)
        for name, level in log_levels().items()
        if not asked.configuration_keys or name in asked.configuration_keys
    ]


def _no_topic(name: str) -> BrokerError:
    return BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")


async def _find(session: ZooKeeperSession, kind: int, name: str) -> _StoredConfigs:
    """Read a resource's settings. Raises BrokerError, ConnectionLoss, SessionExpired."""
    topic = None
    if kind == ResourceType.TOPIC:
        try:
            # The id is read first: settings read after it belong to this topic, or to one with another id.
            data, _ = await session.get(znodes.topic_path(name))
            topic = znodes.decode_topic(name, data)
        except NoNode:
            raise _no_topic(name) from None
        except MalformedZnode as error:
            raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error
        path = znodes.topic_config_path(name)
    elif kind == ResourceType.BROKER:
        if name and not _BROKER_ID.fullmatch(name):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{name!r} is not a broker's id: give a whole number, or leave the name empty for the settings of all "
                f"brokers",
            )
        path = znodes.broker_config_path(int(name) if name else None)
    else:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"resource type {kind} has no settings: give 2 (topic), 4 (broker) or 8 (broker logger)",
        )
    try:
        data, stat = await session.get(path)
        return _StoredConfigs(
            path, from_earlier_release(znodes.decode_config(path, data)), stat.version, stat.mzxid, topic
        )
    except NoNode:
        return _StoredConfigs(path, {}, None, topic=topic)
    except MalformedZnode as error:
        raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error


class _SessionReader:
    """Reads several resources from a session that has caught up once.

    All requests take turns, and a topic that this broker does not know is looked for at a low rate. Otherwise a client
    that names many topics would take ZooKeeper from the controller. (Kafka never looks, so it denies a topic of which
    the broker has not heard yet.)"""

    def __init__(self, services: Services) -> None:
        self._configs = services.configs
        self._metadata = services.metadata
        self._sessions = services.sessions
        self._turns = services.configs.turns
        self._session: ZooKeeperSession | None = None

    async def find(self, kind: int, name: str, *, is_known: bool = False) -> _StoredConfigs:
        """Read a resource's settings, waiting for ZooKeeper if necessary. `is_known`: the topic was found before.
        Raises BrokerError."""
        if kind == ResourceType.TOPIC:
            problem = topic_name_problem(name)
            if problem is not None:
                raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
            if not is_known and self._metadata.denies(name) and not self._configs.may_look_for_topic():
                raise _no_topic(name)
        while True:
            try:
                async with self._turns:
                    if self._session is None:
                        session = await self._sessions()
                        await catch_up(session)
                        await self._configs.read_broker_configs(session)
                        self._session = session
                    return await _find(self._session, kind, name)
            except (ConnectionLoss, SessionExpired):
                self._session = None
                await asyncio.sleep(RETRY_S)


def _refusal(configs: DynamicConfigManager, found: _StoredConfigs, name: str) -> str | None:
    """Return why the settings in ZooKeeper are not in force, or None."""
    try:
        if found.topic is not None:
            topic_config_in_zookeeper(found.values)
        elif name:
            with_dynamic(configs.static, configs.default, found.values)
        else:
            with_dynamic(configs.static, found.values, configs.own)
    except InvalidConfig as error:
        return f"the settings in {found.path} are invalid; the previous ones stay in force: {error}"[:LONGEST_MESSAGE]
    return None


def _described(
    configs: DynamicConfigManager,
    found: _StoredConfigs,
    asked: DescribeConfigsResource,
    request: DescribeConfigsRequest,
    held: Mapping[str, str],
) -> list[DescribeConfigsEntry]:
    """Describe a resource. `held` has the topic's settings that are in force here if those in ZooKeeper are invalid."""
    problem = _refusal(configs, found, asked.resource_name)
    given = found.values
    if problem is not None:
        found = msgspec.structs.replace(found, values=configs.default if found.topic is None else held)
    of_brokers: list[Layer] = [
        (ConfigSource.DYNAMIC_BROKER_CONFIG, configs.own),
        (ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, configs.default),
        (ConfigSource.STATIC_BROKER_CONFIG, static_texts(configs.static)),
        (ConfigSource.DEFAULT_CONFIG, default_texts(BrokerConfig)),
    ]
    if asked.resource_type == ResourceType.TOPIC:
        is_internal = asked.resource_name in INTERNAL_TOPICS
        if is_internal:
            found = msgspec.structs.replace(found, values={**found.values, CLEANUP_POLICY: INTERNAL_CLEANUP_POLICY})
        entries = _entries_of_topic(found, of_brokers)
        for entry in entries:
            entry.read_only = entry.read_only or (is_internal and entry.name == CLEANUP_POLICY)
        entries += _unknown(TopicConfig, given, ConfigSource.DYNAMIC_TOPIC_CONFIG)
    elif asked.resource_name:
        named = (asked.configuration_keys or [], *(values for _, values in of_brokers))
        limits = {name for names in named for name in names if is_listener_limit(configs.static, name)}
        names = sorted(known_names(BrokerConfig) | limits)
        entries = [_entry(BrokerConfig, name, _synonyms(name, of_brokers)) for name in names]
        entries += _unknown_of_brokers([(ConfigSource.DYNAMIC_BROKER_CONFIG, given), *of_brokers], limits)
    else:
        layer = (ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, found.values)
        limits = {name for name in (*given, *found.values) if is_listener_limit(configs.static, name)}
        known = [n for n in sorted(known_names(BrokerConfig) | limits) if n in given or n in found.values]
        entries = [_entry(BrokerConfig, name, _synonyms(name, [layer])) for name in known]
        entries += _unknown_of_brokers([(ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, given), layer], limits)
    if asked.configuration_keys:  # no keys mean all settings, as in Kafka
        entries = [entry for entry in entries if entry.name in asked.configuration_keys]
    for entry in entries:
        if entry.name in given:
            entry.problem = problem
        if not request.include_synonyms:
            entry.synonyms = []
        if request.include_documentation and entry.documentation is None:
            schema = TopicConfig if asked.resource_type == ResourceType.TOPIC else BrokerConfig
            entry.documentation = documentation(schema).get(of_all_listeners(entry.name))
    return entries


def static_texts(config: BrokerConfig) -> dict[str, str]:
    """Return the settings that the broker was started with, as far as known: those that differ from their defaults."""
    defaults = default_texts(BrokerConfig)
    of_listeners = {f"{OF_LISTENER}{name}": value for name, value in config.listener_name.items()}
    limits = {name: value for name, value in of_listeners.items() if is_listener_limit(config, name)}
    return limits | {name: value for name, value in as_texts(config).items() if defaults.get(name) != value}


def _entries_of_topic(found: _StoredConfigs, of_brokers: Sequence[Layer]) -> list[DescribeConfigsEntry]:
    own: Layer = (ConfigSource.DYNAMIC_TOPIC_CONFIG, found.values)
    entries = []
    for name in sorted(known_names(TopicConfig)):
        synonyms = _synonyms(name, [own])
        if name in SYNONYMS:
            synonyms += _synonyms(SYNONYMS[name], of_brokers)
        if name == MIN_INSYNC_REPLICAS and not synonyms and found.replication_factor:
            by_rule = str(min_insync_replicas(None, found.replication_factor))
            synonyms = [DescribeConfigsSynonym(name, by_rule, ConfigSource.DEFAULT_CONFIG)]
        entries.append(_entry(TopicConfig, name, synonyms))
    return entries


def _synonyms(name: str, layers: Sequence[Layer]) -> list[DescribeConfigsSynonym]:
    """Return the sources of a setting, the effective one first."""
    return [
        DescribeConfigsSynonym(name, None if name in SENSITIVE else values[name], source)
        for source, values in layers
        if name in values
    ]


def _entry(schema: type[msgspec.Struct], name: str, synonyms: list[DescribeConfigsSynonym]) -> DescribeConfigsEntry:
    bare = of_all_listeners(name)
    is_dynamic = bare in DYNAMIC if schema is BrokerConfig else name != DURABILITY
    return DescribeConfigsEntry(
        name,
        synonyms[0].value if synonyms else default_texts(schema).get(name),
        not is_dynamic,
        synonyms[0].source if synonyms else ConfigSource.DEFAULT_CONFIG,
        name in SENSITIVE,
        synonyms,
        config_type(schema, bare),
    )


def _unknown(
    schema: type[msgspec.Struct], given: Mapping[str, str], source: ConfigSource
) -> list[DescribeConfigsEntry]:
    """Describe unknown names. Those of a topic were added to ZooKeeper by hand. Their values are not shown, as in
    Kafka, because they may be secrets."""
    names = sorted(given.keys() - known_names(schema))
    return [DescribeConfigsEntry(name, None, False, source, True, [], ConfigType.UNKNOWN) for name in names]


def _unknown_of_brokers(layers: Sequence[Layer], limits: Collection[str]) -> list[DescribeConfigsEntry]:
    """Describe the unknown names that tools may set, each at its first source. `limits` are known ones of listeners."""
    found: dict[str, DescribeConfigsEntry] = {}
    for source, values in layers:
        for entry in _unknown(BrokerConfig, values, source):
            entry.documentation = NOT_KNOWN_TO_BROKERS
            if entry.name not in limits:
                found.setdefault(entry.name, entry)
    return [found[name] for name in sorted(found)]


# --- Writing ---------------------------------------------------------------------------------------------------


class _Outdated(BrokerError):
    """The settings have changed since the client read them, or belong to another topic. The request may have been
    delayed while newer ones were granted."""

    def __init__(self, code: ErrorCode, message: str, topic_id: str, version: int) -> None:
        super().__init__(code, message)
        self.topic_id = topic_id
        self.version = version


def _check_version(found: _StoredConfigs, asked: AlterConfigsResource) -> None:
    topic_id = found.topic.topic_id if found.topic is not None else ""
    if asked.topic_id not in ("", topic_id):
        message = f"topic {asked.resource_name!r} was deleted and created again meanwhile: describe the new one first"
        raise _Outdated(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message, topic_id, found.changed_in)
    if asked.known_version not in (ANY_VERSION, found.changed_in):
        message = f"the settings in {found.path} have been changed meanwhile"
        raise _Outdated(ErrorCode.INVALID_UPDATE_VERSION, message, topic_id, found.changed_in)


async def _alter(services: Services, given: AlterConfigsResource | ReplacedConfigs, validate_only: bool) -> None:
    """Change the settings of a resource. Raises BrokerError, and then nothing was changed, unless an earlier write
    whose answer was lost has made this very change."""
    if given.resource_type == ResourceType.BROKER_LOGGER:
        _check_is_own_logger(services, given.resource_name)
        if isinstance(given, ReplacedConfigs):
            raise BrokerError(ErrorCode.INVALID_REQUEST, "levels of loggers change by IncrementalAlterConfigs alone")
        change_log_levels(given.configs, validate_only=validate_only)
        return
    configs, sessions = services.configs, services.sessions
    topic_id = ""
    while True:
        try:
            found = await _SessionReader(services).find(
                given.resource_type, given.resource_name, is_known=bool(topic_id)
            )
            session = await sessions()
            asked = given if isinstance(given, AlterConfigsResource) else _changes(found, given)
            if topic_id:
                asked = msgspec.structs.replace(asked, topic_id=topic_id)
            _check_version(found, asked)
            if found.topic is not None:
                topic_id = found.topic.topic_id
            values = _altered(services, found, asked)
            if not validate_only:
                async with configs.turns:
                    await session.multi(_write(found, asked.resource_name, values))
            return
        except (ConnectionLoss, SessionExpired):
            await asyncio.sleep(RETRY_S)
        except MultiFailed as refused:
            # Another request has changed the settings, or the topic is gone: start again.
            if not isinstance(refused.cause, BadVersion | NodeExists | NoNode):
                raise
            await asyncio.sleep(RETRY_S)


def _changes(found: _StoredConfigs, given: ReplacedConfigs) -> AlterConfigsResource:
    """Return the changes that lead to the given settings. Equal values are left out, because some settings may be
    repeated but not changed. `durability` stays even if it is missing, because Kafka's tools do not know it. Raises
    BrokerError."""
    check_changed_once([config.name for config in given.configs])
    names = {config.name for config in given.configs}
    holds = {DURABILITY: REPLICATED, **found.values}
    changes = [
        AlterableConfig(config.name, AlterOperation.SET, config.value)
        for config in given.configs
        if config.value is None or holds.get(config.name) != config.value
    ]
    left_out = sorted(found.values.keys() - names - {DURABILITY})
    changes += [AlterableConfig(name, AlterOperation.DELETE) for name in left_out]
    return AlterConfigsResource(given.resource_type, given.resource_name, changes)


def _altered(services: Services, found: _StoredConfigs, asked: AlterConfigsResource) -> dict[str, str]:
    configs, name, changes = services.configs, asked.resource_name, asked.configs
    if _is_of_another(services, asked.resource_type, name):
        listeners = services.metadata.listeners(int(name))
        return altered_other_broker(found.values, changes, name, configs.static.broker_id, listeners)
    if found.topic is not None:
        return altered_topic(found.values, changes, configs.config, name)
    below = configs.default if name else {}
    return altered_broker(found.values, changes, configs.static, below, is_for_all=not name)


def _write(found: _StoredConfigs, name: str, values: Mapping[str, str]) -> list[Operation]:
    data = znodes.encode_config(values)
    operations: list[Operation] = []
    if found.topic is not None:
        topic_id = found.topic.topic_id
        there = znodes.topic_id_path(name, topic_id) if topic_id else znodes.topic_path(name)
        operations.append(Check(there, -1))
    if found.version is None:
        operations.append(Create(found.path, data))
    else:
        operations.append(SetData(found.path, data, found.version))
    notification = znodes.encode_config_change(found.path)
    return [
        *operations,
        Create(znodes.CONFIG_CHANGE_PREFIX, notification, sequence=True),
        SetData(znodes.CONFIG_CHANGES, b""),  # its version counts all changes of settings
    ]

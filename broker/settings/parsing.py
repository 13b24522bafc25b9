"""Settings from text (a properties file, `--override`, a znode) into typed values.

An unknown, malformed or out-of-bounds setting raises InvalidConfig, which names it.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.schema import (
    accepts,
    as_texts,
    documentation,
    integer_names,
    known_names,
    rule_of,
    trimmed_names,
)
from minibroker.broker.settings.topic_config import SYNONYMS, TopicConfig
from minibroker.broker.settings.types import SHORT_NUMBER, InvalidConfig, compaction_lags_problem
from minibroker.broker.settings.units import converted, unit_of
from minibroker.protocol.credential_names import of_all_listeners
from minibroker.protocol.model import WITHOUT_EFFECT
from minibroker.protocol.records import MAX_BATCH_BYTES

Config = TypeVar("Config", bound=msgspec.Struct)
_LONGEST_SHOWN = 80


def _convert(values: Mapping[str, str], schema: type[Config], what: str) -> Config:
    trimmed = trimmed_names(schema)
    values = {name: value.strip() if name in trimmed else value for name, value in values.items()}
    for name in integer_names(schema):
        # msgspec also accepts 1e6 and 1.0.
        value = values.get(name)
        if value is not None and not _INTEGER.fullmatch(value):
            numbers = [
                f"{text} is {number}" for text, number in converted(name, value) if accepts(schema, name, number)
            ]
            rule = "; ".join([rule_of(schema, name), *numbers])
            raise InvalidConfig(f"{what} setting {name}={_shown(value)}: give {rule}")
    try:
        return msgspec.convert(values, schema, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        _, at, name = text.rpartition(" - at `$.")
        if at:
            name = name.rstrip("`")
            given = _shown(values.get(name, ""))
            raise InvalidConfig(f"{what} setting {name}={given}: give {rule_of(schema, name)}") from error
        if "missing required field" in text:
            missing = text.rpartition("required field `")[2].rstrip("`")
            raise InvalidConfig(f"{what} setting {missing} is missing: give {rule_of(schema, missing)}") from error
        if "unknown field" in text:
            unknown = text.rpartition("unknown field `")[2].rstrip("`")
            raise InvalidConfig(_unknown(what, unknown, schema)) from error
        raise InvalidConfig(f"{what} settings: {text}") from error


def _shown(value: str) -> str:
    """Return the value for a message, shortened so that the rule after it stays visible."""
    return repr(value) if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]!r}... ({len(value)} characters)"


def _unknown(what: str, name: str, schema: type[msgspec.Struct]) -> str:
    near = _near(name, schema)
    if near is not None:
        hint = f"did you mean {near}?"
    elif schema is TopicConfig:  # clients append a reference to docs/settings.md
        hint = "`minibroker configs describe --topic TOPIC --all` lists the known settings"
    else:
        hint = "docs/settings.md lists the known settings"
    return f"{what} setting {name[:200]!r} is not known; {hint}"


def _near(name: str, schema: type[msgspec.Struct]) -> str | None:
    """Return the setting that was probably meant, or None. The candidates are the broker's or topic's setting of the
    same meaning and the closest name. Settings without effect are never suggested."""
    useful = [known for known, said in documentation(schema).items() if not said.startswith(WITHOUT_EFFECT)]
    if schema is TopicConfig:
        twins = {broker: topic for topic, broker in SYNONYMS.items()}
        twins |= {unit: twins[one.setting] for unit, one in _COARSER_UNITS.items()}
        twin = twins.get(name) or twins.get(f"log.{name}")
    else:
        twin = SYNONYMS.get(name)
        useful += _COARSER_UNITS
    if twin in useful:
        return twin
    return next(iter(difflib.get_close_matches(name, useful, n=1)), None)


class _CoarserUnit(NamedTuple):
    setting: str
    """The setting in milliseconds."""
    ms: int
    least: int


_HOUR_MS = 3_600_000
_COARSER_UNITS = {
    "log.retention.minutes": _CoarserUnit("log.retention.ms", 60_000, -1),
    "log.retention.hours": _CoarserUnit("log.retention.ms", _HOUR_MS, -1),
    "log.roll.hours": _CoarserUnit("log.roll.ms", _HOUR_MS, 1),
    "log.roll.jitter.hours": _CoarserUnit("log.roll.jitter.ms", _HOUR_MS, 0),
}
"""Broker settings in coarser units, finer units first. The first one given applies, as in Kafka."""


def _in_milliseconds(values: Mapping[str, str]) -> dict[str, str]:
    """Return a broker's settings with coarser units converted to milliseconds. Raises InvalidConfig."""
    fine = {name: value for name, value in values.items() if name not in _COARSER_UNITS}
    for name, unit in _COARSER_UNITS.items():
        if name in values:
            fine.setdefault(unit.setting, str(_milliseconds(name, values[name].strip())))
    return fine


def _milliseconds(name: str, value: str) -> int:
    """Raises InvalidConfig."""
    unit = _COARSER_UNITS[name]
    number = int(value) if _INTEGER.fullmatch(value) and len(value) <= 11 else None
    if number is None or not unit.least <= number < 2**31:
        numbers = [f"{text} is {number}" for text, number in converted(name, value) if unit.least <= number < 2**31]
        rule = "; ".join([f"a whole number from {unit.least} to {2**31 - 1}, in {unit_of(name)}", *numbers])
        raise InvalidConfig(f"broker setting {name}={_shown(value)}: give {rule}")
    return number * unit.ms if number > 0 else number


def coarser_unit_problem(name: str, value: str) -> str | None:
    """Return why a setting in minutes or hours cannot be changed while a broker runs; None for any other setting.
    Raises InvalidConfig."""
    if name not in _COARSER_UNITS:
        return None
    setting = _COARSER_UNITS[name].setting
    return (
        f"broker setting {name} is read only when a broker starts, and only if {setting} is unset: set "
        f"{setting}={_milliseconds(name, value.strip())} instead"
    )


_INTEGER = re.compile("-?[0-9]+")


def broker_config(values: Mapping[str, str]) -> BrokerConfig:
    """Raises InvalidConfig."""
    of_listeners = {name: value for name, value in values.items() if name.startswith(OF_LISTENER)}
    values = {name: value for name, value in values.items() if name not in of_listeners}
    config = _convert(_in_milliseconds(values), BrokerConfig, "broker")
    if config.max_connections_per_ip == 0 and not config.max_connections_per_ip_overrides:
        raise InvalidConfig(
            "broker setting max.connections.per.ip=0: give 1 or more, or list the addresses that may connect in "
            "max.connections.per.ip.overrides"
        )
    if not of_listeners:
        return config
    config = msgspec.structs.replace(
        config, listener_name={name.removeprefix(OF_LISTENER): value for name, value in of_listeners.items()}
    )
    return _with_listener_settings_checked(config, of_listeners)


OF_LISTENER = "listener.name."
_PER_LISTENER = ("ssl.", "sasl.enabled.mechanisms", "sasl.oauthbearer.", "plain.sasl.", "connections.max.reauth.ms")
"""The beginnings of the settings that a single listener may have."""
MAX_CONNECTIONS = "max.connections"
CREATION_RATE = "max.connection.creation.rate"
LISTENER_LIMITS = (MAX_CONNECTIONS, CREATION_RATE)
"""The settings that a single listener may have in addition to the same ones of the broker."""
METRICS = "metrics"
"""Stands for the listener of metrics in the names of settings."""


def _with_listener_settings_checked(config: BrokerConfig, of_listeners: Mapping[str, str]) -> BrokerConfig:
    """Return the settings if those of single listeners are legal. Raises InvalidConfig."""
    listeners = [*config.security_protocols(), METRICS]
    known = 0
    for listener in listeners:
        own = config.of_listener(listener)
        known += len(own)
        listener_config(config, listener)
        without_effect = {METRICS: LISTENER_LIMITS, config.control_plane_listener_name: (CREATION_RATE,)}.get(
            listener, ()
        )
        for limit in without_effect:
            if limit in own:
                raise InvalidConfig(
                    f"broker setting {OF_LISTENER}{listener.lower()}.{limit}: this listener has no such limit, because "
                    f"it is not for clients; remove the setting"
                )
    if known < len(of_listeners):
        prefixes = tuple(f"{OF_LISTENER}{listener.lower()}." for listener in listeners)
        name = next(name for name in of_listeners if not name.startswith(prefixes))
        raise InvalidConfig(f"broker setting {name} is for no listener: begin its name with {' or '.join(prefixes)}")
    return config


def listener_config(config: BrokerConfig, listener: str) -> BrokerConfig:
    """Return the settings as they are for one listener. Raises InvalidConfig."""
    own = config.of_listener(listener)
    if not own:
        return config
    for name in own:
        if not name.startswith(_PER_LISTENER) and name not in LISTENER_LIMITS:
            raise InvalidConfig(
                f"broker setting {OF_LISTENER}{listener.lower()}.{name} is not known: only "
                f"{', '.join((*_PER_LISTENER, *LISTENER_LIMITS))} can be set for one listener"
            )
    return _convert({**as_texts(config), **own}, BrokerConfig, f"the listener {listener}'s")


def listener_limits(config: BrokerConfig, limit: str) -> dict[str, int]:
    """Return this limit by listener, of those that have it."""
    owns = ((listener, config.of_listener(listener)) for listener in config.security_protocols())
    return {listener: int(own[limit]) for listener, own in owns if limit in own}


def is_listener_limit(config: BrokerConfig, name: str) -> bool:
    """Return whether a name is that of a limit of one of the broker's listeners."""
    bare = of_all_listeners(name)
    return bare in LISTENER_LIMITS and any(
        name == f"{OF_LISTENER}{listener.lower()}.{bare}" for listener in config.security_protocols()
    )


def host_limits(config: BrokerConfig) -> dict[str, int]:
    """Return `max.connections.per.ip.overrides` by host."""
    entries = (entry.strip().rpartition(":") for entry in config.max_connections_per_ip_overrides.split(",") if entry)
    return {host.strip("[]"): int(limit) for host, _, limit in entries}


_LOWERED = {"message.max.bytes": MAX_BATCH_BYTES, "max.message.bytes": MAX_BATCH_BYTES}


def from_earlier_release(values: Mapping[str, str]) -> dict[str, str]:
    """Lower values that an earlier release accepted and this one rejects. Otherwise a stored value would leave its
    topic without a leader, or a broker without all the settings of the same znode."""
    return {
        name: str(min(int(value), _LOWERED[name])) if name in _LOWERED and SHORT_NUMBER.fullmatch(value) else value
        for name, value in values.items()
    }


def topic_config(values: Mapping[str, str]) -> TopicConfig:
    """Raises InvalidConfig."""
    return _convert(values, TopicConfig, "topic")


def topic_config_in_zookeeper(values: Mapping[str, str]) -> TopicConfig:
    """Return the settings in a topic's znode. Unknown names have no effect, as in Kafka; they come from another version
    or from manual edits. Raises InvalidConfig."""
    known = known_names(TopicConfig)
    return topic_config({name: value for name, value in from_earlier_release(values).items() if name in known})


def topic_config_problem(values: Mapping[str, str], broker: BrokerConfig) -> str | None:
    """Return why a topic cannot have these settings, given the brokers' settings, or None."""
    try:
        topic = topic_config(values)
    except InvalidConfig as error:
        return str(error)
    least, most = topic.min_compaction_lag_ms, topic.max_compaction_lag_ms
    if least is None and most is None:
        return None
    return compaction_lags_problem(
        "min.compaction.lag.ms" if least is not None else "the brokers' log.cleaner.min.compaction.lag.ms",
        broker.log_cleaner_min_compaction_lag_ms if least is None else least,
        "max.compaction.lag.ms" if most is not None else "the brokers' log.cleaner.max.compaction.lag.ms",
        broker.log_cleaner_max_compaction_lag_ms if most is None else most,
    )


def read_properties(path: str) -> dict[str, str]:
    """Read a file of `name=value` lines. `#` begins a comment line. Raises InvalidConfig."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidConfig(f"the properties file {path} cannot be read: {error.strerror}") from error
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.partition("=")
        if not separator or len(name.split()) != 1:  # a part of such a line may be a password
            raise InvalidConfig(f"{path}, line {number} is not NAME=VALUE")
        values[name.strip()] = value.strip()
    return values

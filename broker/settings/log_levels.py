"""The log levels of this process, as settings of Kafka's resource BROKER_LOGGER (KIP-412). They last until it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from minibroker.broker.settings.config_changes import check_changed_once
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import AlterableConfig
from minibroker.protocol.model import AlterOperation, ConfigSource

ROOT = "root"
logging.getLogger("minibroker")  # the parent of all that brokers have, which otherwise only inherit from the root
LEVELS = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
"""By Kafka's names. Nothing logs at TRACE."""
_SYNONYMS = {"WARNING": "WARN", "CRITICAL": "FATAL"}
"""Python's names of Kafka's levels."""
_LISTING = "`minibroker configs describe --broker-logger ID --all` lists them"
_changed: set[str] = set()
"""The loggers whose level a request has set."""


class LogLevel(NamedTuple):
    name: str
    source: ConfigSource
    """DEFAULT_CONFIG: it is inherited. STATIC_BROKER_CONFIG: the logger has had it since the start.
    DYNAMIC_BROKER_LOGGER_CONFIG: a request has set it. Kafka reports the last for every logger; its tools do not
    filter loggers by it."""


def log_levels() -> dict[str, LogLevel]:
    """Return the level at which each logger logs, its own or an inherited one."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    found = {logger.name: LogLevel(_name(logger.getEffectiveLevel()), _source(logger)) for logger in loggers}
    return {ROOT: LogLevel(_name(logging.root.level), _source(logging.root)), **dict(sorted(found.items()))}


def _source(logger: logging.Logger) -> ConfigSource:
    if logger.level == logging.NOTSET and logger is not logging.root:
        return ConfigSource.DEFAULT_CONFIG
    is_changed = logger.name in _changed
    return ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG if is_changed else ConfigSource.STATIC_BROKER_CONFIG


def change_log_levels(changes: Sequence[AlterableConfig], *, validate_only: bool) -> None:
    """Change the levels of loggers. A deleted level is inherited again. Raises BrokerError, and then none has changed:
    INVALID_CONFIG, INVALID_REQUEST."""
    check_changed_once([change.name for change in changes])
    known = log_levels()
    new = [(change.name, _checked(change, known)) for change in changes]
    if validate_only:
        return
    for name, level in new:
        (logging.root if name == ROOT else logging.getLogger(name)).setLevel(level)
        if level == logging.NOTSET:
            _changed.discard(name)
        else:
            _changed.add(name)


def _checked(change: AlterableConfig, known: Collection[str]) -> int:
    name = change.name
    if name not in known:
        raise BrokerError(ErrorCode.INVALID_CONFIG, f"there is no logger {name!r}: {_LISTING}")
    if change.config_operation == AlterOperation.SET:
        text = (change.value or "").upper()
        level = LEVELS.get(_SYNONYMS.get(text, text))
        if level is None:
            rule = f"{name}={change.value}: give a level, one of {', '.join(LEVELS)}"
            raise BrokerError(ErrorCode.INVALID_CONFIG, rule)
        return level
    if change.config_operation != AlterOperation.DELETE:
        possible = "set it" if name == ROOT else "set it or delete it"
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name}: a level is no list, so {possible}")
    if name == ROOT:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name}: this level is inherited by others, so set it")
    return logging.NOTSET


def _name(level: int) -> str:
    """Return the name of the lowest level that is logged."""
    return next((name for name, number in LEVELS.items() if number >= level), "FATAL")

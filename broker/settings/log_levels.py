"""The log levels of this process, as settings of Kafka's resource BROKER_LOGGER (KIP-412). They last until it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minibroker.broker.settings.config_changes import check_changed_once
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import AlterableConfig
from minibroker.protocol.model import AlterOperation

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


def log_levels() -> dict[str, str]:
    """Return the level at which each logger logs, its own or an inherited one."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    found = {logger.name: _name(logger.getEffectiveLevel()) for logger in loggers}
    return {ROOT: _name(logging.root.level), **dict(sorted(found.items()))}


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


def _checked(change: AlterableConfig, known: dict[str, str]) -> int:
    name = change.name
    if name not in known:
        raise BrokerError(ErrorCode.INVALID_CONFIG, f"there is no logger {name!r}: describe them for their names")
    if change.config_operation == AlterOperation.SET:
        level = LEVELS.get((change.value or "").upper())
        if level is None:
            text = f"{name}={change.value}: give a level, one of {', '.join(LEVELS)}"
            raise BrokerError(ErrorCode.INVALID_CONFIG, text)
        return level
    if change.config_operation != AlterOperation.DELETE:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name}: a level is no list, so set it or delete it")
    if name == ROOT:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name}: this level is inherited by others, so set it")
    return logging.NOTSET


def _name(level: int) -> str:
    """Return the name of the lowest level that is logged."""
    return next((name for name, number in LEVELS.items() if number >= level), "FATAL")

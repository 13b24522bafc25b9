"""Kafka's resource BROKER_LOGGER: the log levels of a broker's process (KIP-412)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from minibroker.broker.settings import log_levels
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.cli.configs import expected
from minibroker.client.errors import InvalidSetting
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import ConfigSource, ResourceType
from tests.running import run_by
from tests.simulation.scenarios.control.test_dynamic_configs import play, refused, set_to

LOGGERS = ConfigResource.of_broker_logger(1)
ONE = "minibroker.transactions"


INHERITED, SINCE_START = ConfigSource.DEFAULT_CONFIG, ConfigSource.STATIC_BROKER_CONFIG
SET = ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG


@pytest.fixture(autouse=True)
def _levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the loggers, which the simulated brokers share with this process."""
    monkeypatch.setattr(log_levels, "_changed", set())
    with pytest.MonkeyPatch.context() as patch:
        for logger in (logging.getLogger(ONE), logging.getLogger()):
            patch.setattr(logger, "level", logger.level)
        yield
    logging.getLogger(ONE).setLevel(logging.getLogger(ONE).level)  # clears what `isEnabledFor` remembers


async def level(admin: Admin, name: str = ONE) -> tuple[str | None, ConfigSource]:
    [entry] = (await admin.describe_configs([LOGGERS], names=[name]))[LOGGERS].values()
    assert not entry.is_read_only
    return entry.value, entry.source


@run_by(play)
async def test_a_level_is_changed_and_inherited_again(cluster: VirtualCluster, admin: Admin, /) -> None:
    before, of_root = await level(admin), await level(admin, "root")
    assert (before[1], of_root[1]) == (INHERITED, SINCE_START)
    await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, "debug")]}, validate_only=True)
    assert await level(admin) == before
    await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, "debug"), set_to("root", "ERROR")]})
    assert (await level(admin), await level(admin, "root")) == (("DEBUG", SET), ("ERROR", SET))
    assert logging.getLogger(ONE).isEnabledFor(logging.DEBUG)
    await admin.incremental_alter_configs({LOGGERS: [ConfigChange.delete(ONE)]})
    assert await level(admin) == ("ERROR", INHERITED)


@run_by(play)
async def test_pythons_names_of_levels_are_accepted(cluster: VirtualCluster, admin: Admin, /) -> None:
    for given, shown in (("warning", "WARN"), ("CRITICAL", "FATAL")):
        await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, given)]})
        assert await level(admin) == (shown, SET)


@run_by(play)
async def test_only_levels_that_are_set_can_be_deleted(cluster: VirtualCluster, admin: Admin, /) -> None:
    await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, "DEBUG")]})
    changes = [ConfigChange.delete(ONE), ConfigChange.delete("minibroker.groups")]
    assert (await expected(admin, LOGGERS, changes)).not_set == ["minibroker.groups"]


@run_by(play)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(cluster: VirtualCluster, admin: Admin, /) -> None:
    before = (await admin.describe_configs([LOGGERS]))[LOGGERS]
    for change, code, words in (
        (set_to(ONE, "LOUD"), ErrorCode.INVALID_CONFIG, "give a level, one of TRACE, DEBUG, INFO, WARN, ERROR, FATAL"),
        (set_to("nope", "INFO"), ErrorCode.INVALID_CONFIG, "there is no logger 'nope'"),
        (ConfigChange.delete("root"), ErrorCode.INVALID_REQUEST, "inherited by others"),
        (ConfigChange.append(ONE, "INFO"), ErrorCode.INVALID_REQUEST, "no list, so set it or delete it"),
        (ConfigChange.append("root", "INFO"), ErrorCode.INVALID_REQUEST, "no list, so set it"),
    ):
        error = await refused(admin, LOGGERS, set_to("minibroker", "FATAL"), change)
        assert (error.code, words in error.detail) == (code, True), error
        assert str(error) == f"{code.name}: {error.detail}"  # without the remedy for settings
    assert (await admin.describe_configs([LOGGERS]))[LOGGERS] == before
    with pytest.raises(InvalidSetting, match="loggers belong to a broker"):
        await admin.describe_configs([ConfigResource(ResourceType.BROKER_LOGGER, "")])

"""Kafka's resource BROKER_LOGGER: the log levels of a broker's process (KIP-412)."""

from __future__ import annotations

import logging

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.errors import InvalidSetting
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import ConfigSource, ResourceType
from tests.running import run_by
from tests.simulation.scenarios.control.test_dynamic_configs import play, refused, set_to

LOGGERS = ConfigResource.of_broker_logger(1)
ONE = "minibroker.transactions"


async def level(admin: Admin, name: str = ONE) -> str | None:
    [entry] = (await admin.describe_configs([LOGGERS], names=[name]))[LOGGERS].values()
    assert (entry.source, entry.is_read_only) == (ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG, False)
    return entry.value


@run_by(play)
async def test_a_level_is_changed_and_inherited_again(cluster: VirtualCluster, admin: Admin, /) -> None:
    logger, root = logging.getLogger(ONE), logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:  # the simulated brokers share the loggers of this process
        for each in (logger, root):
            patch.setattr(each, "level", each.level)
        inherited = await level(admin)
        await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, "debug")]}, validate_only=True)
        assert await level(admin) == inherited
        await admin.incremental_alter_configs({LOGGERS: [set_to(ONE, "debug"), set_to("root", "ERROR")]})
        assert (await level(admin), await level(admin, "root")) == ("DEBUG", "ERROR")
        assert logger.isEnabledFor(logging.DEBUG)
        await admin.incremental_alter_configs({LOGGERS: [ConfigChange.delete(ONE)]})
        assert await level(admin) == "ERROR"
    logger.setLevel(logger.level)  # clears what `isEnabledFor` remembers


@run_by(play)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(cluster: VirtualCluster, admin: Admin, /) -> None:
    before = (await admin.describe_configs([LOGGERS]))[LOGGERS]
    for change, code, words in (
        (set_to(ONE, "LOUD"), ErrorCode.INVALID_CONFIG, "give a level, one of TRACE, DEBUG, INFO, WARN, ERROR, FATAL"),
        (set_to("nope", "INFO"), ErrorCode.INVALID_CONFIG, "there is no logger 'nope'"),
        (ConfigChange.delete("root"), ErrorCode.INVALID_REQUEST, "inherited by others"),
        (ConfigChange.append(ONE, "INFO"), ErrorCode.INVALID_REQUEST, "no list"),
    ):
        error = await refused(admin, LOGGERS, set_to("minibroker", "FATAL"), change)
        assert (error.code, words in error.detail) == (code, True), error
    assert (await admin.describe_configs([LOGGERS]))[LOGGERS] == before
    with pytest.raises(InvalidSetting, match="loggers belong to a broker"):
        await admin.describe_configs([ConfigResource(ResourceType.BROKER_LOGGER, "")])

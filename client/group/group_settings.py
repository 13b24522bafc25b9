"""The settings of a member, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minibroker.client.errors import InvalidSetting
from minibroker.client.group.assignors import Assignor, Strategy, assignors_of
from minibroker.client.settings import check_ms, check_text, check_whole_ms


class GroupSettings(NamedTuple):
    group: str
    """Empty without a group. The other settings are checked even then, so that mistakes surface early."""
    group_instance_id: str | None
    assignors: Sequence[Assignor]
    session_timeout_s: float
    heartbeat_interval_s: float
    max_poll_interval_s: float
    api_timeout_s: float


def checked_group_settings(
    group: str | None,
    group_instance_id: str | None,
    strategy: Strategy | list[Strategy] | tuple[Strategy, ...],
    session_timeout_ms: float,
    heartbeat_interval_ms: float,
    max_poll_interval_ms: float,
    api_timeout_s: float,
) -> GroupSettings:
    """Raises InvalidSetting."""
    session_timeout_s = check_whole_ms("session_timeout_ms", session_timeout_ms, lowest=1)
    heartbeat_interval_s = check_ms("heartbeat_interval_ms", heartbeat_interval_ms, lowest=1)
    if heartbeat_interval_s >= session_timeout_s:
        rule = f"must be less than session_timeout_ms={session_timeout_ms}, better a third of it"
        raise InvalidSetting("heartbeat_interval_ms", heartbeat_interval_ms, rule)
    max_poll_interval_s = check_whole_ms("max_poll_interval_ms", max_poll_interval_ms, lowest=1)
    assignors = assignors_of(strategy)
    if group_instance_id is not None:
        if not isinstance(group_instance_id, str) or not 1 <= len(group_instance_id) <= 1_000:
            rule = "use 1 to 1,000 characters, another for each member of the group"
            raise InvalidSetting("group_instance_id", group_instance_id, rule)
        check_text("group_instance_id", group_instance_id)
    if group is not None:
        if not isinstance(group, str) or not group:
            raise InvalidSetting("group", group, "give a name: a str that is not empty")
        check_text("group", group)
    return GroupSettings(
        group or "",
        group_instance_id,
        assignors,
        session_timeout_s,
        heartbeat_interval_s,
        max_poll_interval_s,
        api_timeout_s,
    )

"""The verdict on a bookkeeper, which manages a group's offsets by one call after the other. Pure.

A group has one offset, or none, for each partition. The promises:

- A lookup finds the offset of the last acknowledged call, or of a call with an unknown outcome. Such a call may take
  effect later, but not once a later call of the same client was acknowledged.
- A deleted or unknown group has no offsets.
- An offset is kept for `offsets.retention.minutes` after the commit, and after the group last had a member that read
  the topic. The current coordinator removes it soon after that.

Times are virtual seconds, independent of the brokers' wall clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Anomaly


class Retention(NamedTuple):
    kept_s: float
    late_s: float
    """Seconds by which a coordinator may be late to remove an expired offset."""


@dataclass
class Call:
    """A call that sets offsets, or deletes those that are None."""

    client: str
    """A name that is unique among the clients of all processes."""
    offsets: Mapping[TopicPartition, int | None]
    began_s: float
    ended_s: float = inf
    """The time of the acknowledgement; `inf` without one."""


@dataclass
class Look:
    found: Mapping[TopicPartition, int | None]
    began_s: float
    ended_s: float
    is_punctual: bool
    """Whether expired offsets must be gone, since there was no fault for a while."""


class _Setting(NamedTuple):
    """A possible offset of a partition, which was set between `began_s` and `ended_s`."""

    offset: int | None
    began_s: float
    ended_s: float
    client: str


_NOTHING = _Setting(None, -inf, -inf, "")


class Ledger:
    """The calls and lookups of one group, recorded when they begin and end."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.events: list[Call | Look] = []
        self.used_s: dict[str, list[float]] = defaultdict(list)
        """Times at which the group certainly had a member that read this topic."""
        self.may_be_used_until_s = -inf
        self.coordinated_since_s = -inf
        """The time since which the group has its current coordinator."""

    def begin(self, client: str, offsets: Mapping[TopicPartition, int | None], now_s: float) -> Call:
        call = Call(client, dict(offsets), now_s)
        self.events.append(call)
        return call

    def acknowledge(self, call: Call, now_s: float, *, but_for: Mapping[TopicPartition, object] | None = None) -> None:
        """Record an acknowledgement, except for the partitions in `but_for`, whose outcome is unknown."""
        failed = {partition: offset for partition, offset in call.offsets.items() if partition in (but_for or {})}
        if failed:
            self.begin(call.client, failed, call.began_s)
        call.offsets = {partition: offset for partition, offset in call.offsets.items() if partition not in failed}
        call.ended_s = now_s

    def look(
        self, found: Mapping[TopicPartition, int | None], began_s: float, now_s: float, *, is_punctual: bool = False
    ) -> None:
        self.events.append(Look(found, began_s, now_s, is_punctual))


def check_ledger(ledger: Ledger, retention: Retention) -> Iterator[Anomaly]:
    partitions = {
        partition
        for event in ledger.events
        for partition in (event.offsets if isinstance(event, Call) else event.found)
    }
    for partition in sorted(partitions):
        yield from _check(ledger, partition, retention)


def _check(ledger: Ledger, partition: TopicPartition, retention: Retention) -> Iterator[Anomaly]:
    known = _NOTHING
    in_doubt: list[_Setting] = []
    for event in ledger.events:
        if isinstance(event, Call):
            if partition not in event.offsets:
                continue
            setting = _Setting(event.offsets[partition], event.began_s, event.ended_s, event.client)
            if setting.ended_s == inf:
                in_doubt.append(setting)
            else:
                known = setting
                in_doubt = [other for other in in_doubt if other.client != event.client]
        elif partition in event.found:
            found = event.found[partition]
            possible = [known, *in_doubt]
            match = next((setting for setting in possible if setting.offset == found), None)
            if match is None and found is None:
                match = next((s for s in possible if _may_be_expired(ledger, partition, s, event, retention)), None)
                if match is not None:
                    match = _NOTHING
            if match is None:
                told = ", ".join(_told(setting) for setting in possible)
                text = f"group {ledger.group}: {partition} is at {found} at {event.ended_s:.3f} s; it was {told}"
                yield Anomaly("a committed offset is gone" if found is None else "another offset is committed", text)
                return
            if event.is_punctual and found is not None and _is_overdue(ledger, match, event, retention):
                text = f"group {ledger.group}: {partition} is at {found} at {event.began_s:.3f} s, {_told(match)}"
                yield Anomaly("an offset is kept for too long", text)
            known = match


def _may_be_expired(
    ledger: Ledger, partition: TopicPartition, setting: _Setting, look: Look, retention: Retention
) -> bool:
    """Return whether it may have been unused for the retention at some time up to the lookup."""
    signs = [sign for sign in ledger.used_s[partition.topic] if setting.began_s < sign < look.ended_s]
    return any(
        later - earlier >= retention.kept_s for earlier, later in pairwise([setting.began_s, *signs, look.ended_s])
    )


def _is_overdue(ledger: Ledger, setting: _Setting, look: Look, retention: Retention) -> bool:
    used_until_s = max(setting.ended_s, ledger.may_be_used_until_s, ledger.coordinated_since_s)
    return used_until_s + retention.kept_s + retention.late_s < look.began_s


def _told(setting: _Setting) -> str:
    if setting is _NOTHING:
        return "never set"
    end = "in doubt" if setting.ended_s == inf else f"acknowledged at {setting.ended_s:.3f} s"
    return f"set to {setting.offset} by {setting.client} at {setting.began_s:.3f} s ({end})"

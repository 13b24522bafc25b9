"""What somebody does and sees who keeps a group's offsets by hand, one call after the other; and what is wrong with it.
Pure.

Of each partition a group has one offset, or none. Promised is:

- What is found is what was set last: by the last call that was acknowledged, or by one of which nobody knows how it
  ended. What is in doubt may come about later still, but not once the same client had a later call acknowledged.
- A group that was deleted has nothing, and neither has one of which it is told that there is none.
- What was committed is kept for as long as `offsets.retention.minutes` says: since it was committed, and since the
  group had a member that read the topic. It is not kept for much longer by the coordinator that the group has then.

Times are seconds, whatever the brokers' wall clocks say.
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
    """By so much a coordinator may be late to find what is too old."""


@dataclass
class Call:
    """It sets offsets, or (None) deletes them."""

    client: str
    """Unique among all clients of all processes."""
    offsets: Mapping[TopicPartition, int | None]
    began_s: float
    ended_s: float = inf
    """Without an acknowledgement: never."""


@dataclass
class Look:
    found: Mapping[TopicPartition, int | None]
    began_s: float
    ended_s: float
    is_punctual: bool
    """All has been well for a while, so what is too old must be gone."""


class _Setting(NamedTuple):
    """An offset that a partition may have, and when it was set: from `began_s` to `ended_s`."""

    offset: int | None
    began_s: float
    ended_s: float
    client: str


_NOTHING = _Setting(None, -inf, -inf, "")


class Ledger:
    """Of one group. To be told of everything when it begins, and when it ends."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.events: list[Call | Look] = []
        self.used_s: dict[str, list[float]] = defaultdict(list)
        """When the group had, for certain, a member that read this topic."""
        self.may_be_used_until_s = -inf
        self.coordinated_since_s = -inf
        """When the group got the coordinator that it has."""

    def begin(self, client: str, offsets: Mapping[TopicPartition, int | None], now_s: float) -> Call:
        call = Call(client, dict(offsets), now_s)
        self.events.append(call)
        return call

    def acknowledge(self, call: Call, now_s: float, *, but_for: Mapping[TopicPartition, object] | None = None) -> None:
        """Of the partitions of `but_for` it is not known."""
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
    """Whether nobody may have used it for so long, at some time up to the look."""
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

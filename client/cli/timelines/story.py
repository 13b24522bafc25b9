"""The story of a failover: its steps, and how long partitions had no leader. Data, and its words. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from minibroker.client.cli.timelines.words import INDENT, cut, date_and_time, milliseconds
from minibroker.protocol.words import all_of, counted


class Step(NamedTuple):
    at_ms: float
    """Milliseconds since the beginning."""
    broker: int
    """The broker that recorded the step."""
    epoch: int
    event: str
    text: str
    details: tuple[str, ...] = ()


class Story(NamedTuple):
    title: str
    """For instance "broker 1 was lost and broker 2 became the controller"."""
    began_ms: int
    """Milliseconds since 1970, by the clock of the first broker that recorded something."""
    steps: tuple[Step, ...]
    elected: int
    """Partitions with a new leader, or with the same leader in a new term."""
    leaderless: tuple[str, ...]
    """Partitions that have no leader yet."""
    written_ms: float | None
    """Time until the last leader of a partition that had lost its own was in ZooKeeper. None: no partition had."""
    led_ms: float | None
    """Time until the last of them confirmed that it leads. None: not recorded."""
    short: tuple[str, ...] = ()
    """Partitions that were led with fewer replicas in sync than min.insync.replicas."""
    enough_ms: float | None = None
    """Time until all of these had enough replicas in sync. None: not recorded, or none was short."""
    noticed_late: bool = False
    """No broker recorded the beginning: a broker hung until its session ended and shared no partitions with others,
    ZooKeeper was away, or no broker ran. The story begins when it was noticed."""
    late: tuple[str, ...] = ()
    """Partitions that had no leader at first, and were led when a replica was back."""
    late_ms: float | None = None
    """Longest time of one of these from the loss of its leader until it had one in ZooKeeper."""
    left_ms: float | None = None
    """Longest time from the loss of a replica until it had left the ISR of a partition that kept its leader, whose
    writes with acks=all had waited for it. None: there was no such partition."""
    may_have_run: tuple[int, ...] = ()
    """Former leaders that had only lost their registrations, and may have taken writes until they were replaced."""
    replaced: int = 0
    """Partitions of these, which may never have been without a leader. They count for `elected`."""
    replaced_ms: float | None = None
    """Time until the last leader of these partitions confirmed that it leads. None: not recorded."""
    leaderless_unlisted: int = 0
    """Partitions that had no leader at first and are not listed, because there are more than 200 states. Whether they
    have one since is not known."""
    longest_ms: float | None = None
    """Longest time of one partition from the loss of its own leader until the next one confirmed that it leads, or was
    in ZooKeeper if `led_ms` is None. It is less than `led_ms` if the first of several losses began the story."""

    @property
    def outage_ms(self) -> float | None:
        """Longest time of one partition without a leader that has confirmed it. None: not recorded."""
        return self.led_ms if self.led_ms is None or self.longest_ms is None else self.longest_ms

    def ending(self) -> str:
        parts = []
        lost = self.elected - self.replaced
        total_ms = self.written_ms if self.led_ms is None else self.led_ms
        own = None  # the time from the loss of each partition's own leader, where that is not the beginning
        if total_ms is not None and self.longest_ms is not None:
            own = milliseconds(self.longest_ms) if milliseconds(self.longest_ms) != milliseconds(total_ms) else None
        each = "the partition" if lost == 1 else f"each of {lost:,} partitions"
        if self.led_ms is not None:
            parts.append(
                f"{each} was led again within {own} of the loss of its leader"
                if own is not None
                else f"{milliseconds(self.led_ms)} until "
                + ("the partition" if lost == 1 else f"the last of {lost:,} partitions")
                + " was led again"
            )
        elif self.written_ms is not None and lost:
            parts.append(
                (
                    f"{each} had a new leader in ZooKeeper within {own} of the loss of its former one"
                    if own is not None
                    else f"{milliseconds(self.written_ms)} until {counted(lost, 'partition')} had a new leader in "
                    "ZooKeeper"
                )
                + "; not every leader is recorded as having confirmed it"
            )
        elif not self.replaced:
            if not (self.leaderless or self.late or self.leaderless_unlisted):
                parts.append("no partition had to change its leader")
            if self.left_ms is not None:
                parts.append(
                    f"writes with acks=all waited for the lost replicas for up to {milliseconds(self.left_ms)}"
                )
        if self.late_ms is not None:
            up_to = "" if len(self.late) == 1 else "up to "
            parts.append(f"without a leader for {up_to}{milliseconds(self.late_ms)}: {', '.join(cut(self.late))}")
        if self.leaderless:
            parts.append(f"without a leader: {', '.join(cut(self.leaderless))}")
        if self.leaderless_unlisted:
            parts.append(f"{self.leaderless_unlisted:,} more had no leader at first and are not listed")
        if self.may_have_run:
            ran = all_of("broker", self.may_have_run)
            after = "" if self.replaced_ms is None else f", after {milliseconds(self.replaced_ms)}"
            parts.append(
                f"{ran} may have run on, and have taken writes in {counted(self.replaced, 'partition')} until "
                f"replaced{after}"
            )
        since = ", from when that was noticed" if self.noticed_late else ""
        ending = f"In all{since}: {'; '.join(parts)}."
        if self.short:
            until = "until enough replicas are in sync"
            if self.enough_ms is not None:
                until = f"until {milliseconds(self.enough_ms)}, when enough replicas were in sync"
            ending += (
                f" Writes with acks=all {'are' if self.enough_ms is None else 'were'} rejected {until} "
                f"(min.insync.replicas): {', '.join(cut(self.short))}."
            )
        return ending

    def lines(self, short: bool = False, name: str = "The last failover") -> list[str]:
        """Return the lines of the story; with `short`, without the details."""
        told = [f"{name}: {self.title}, at {date_and_time(self.began_ms)}"]
        for step in self.steps:
            told.append(f"{'+' + milliseconds(step.at_ms):>10}  {step.text}")
            if not short:
                told.extend(f"{'':>10}  {INDENT}{detail}" for detail in step.details)
        return [*told, self.ending()]

    def objects(self) -> list[dict[str, Any]]:
        """Return an object for each step, and one for the whole."""
        whole = {
            "event": "Failover",
            "text": self.title[:1].upper() + self.title[1:],
            "began_ms": self.began_ms,
            "elected": self.elected,
            "leaderless": list(self.leaderless),
            "late": list(self.late),
            "late_ms": self.late_ms,
            "left_ms": self.left_ms,
            "noticed_late": self.noticed_late,
            "written_ms": self.written_ms,
            "led_ms": self.led_ms,
            "longest_ms": self.longest_ms,
            "below_min_isr": list(self.short),
            "enough_ms": self.enough_ms,
            "may_have_run": list(self.may_have_run),
            "replaced": self.replaced,
            "replaced_ms": self.replaced_ms,
            "leaderless_unlisted": self.leaderless_unlisted,
        }
        return [*(step._asdict() for step in self.steps), whole]

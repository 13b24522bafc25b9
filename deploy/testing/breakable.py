"""The faults of a test cluster that its brokers inject into themselves: they need no root."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from minibroker.client.context_managers import Blocking
from minibroker.deploy.errors import hidden_from_pytest
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.who import Member, parse_who

__tracebackhide__ = hidden_from_pytest


class Breakable(Blocking):
    """Faults of disks, networks and clocks. They hold until `heal` or `restore`, also over a restart of the broker, and
    from the moment at which the method returns; at brokers that are gone or paused, from their start or resumption. A
    coordinator that was moved stays where it is."""

    _failed_disks: set[Member]
    """The brokers whose disks were full or broken since the last `restore`."""
    _unseen_faults: int

    @abstractmethod
    def _fault(self, name: str, who: int | str, act: Callable[[FaultyCluster], list[Member]]) -> list[Member]:
        """Do it, and record it as evidence."""

    def _injected(self, name: str, who: int | str, act: Callable[[FaultyCluster], list[Member]]) -> list[Member]:
        self._unseen_faults += 1
        return self._fault(name, who, act)

    def fill_disk(self, who: int | str) -> list[Member]:
        """Let no file of the broker grow, as on a full disk. A broker whose only disk fails a write ends."""
        members = self._injected("fill_disk", who, lambda launcher: launcher.fill_disk(parse_who(str(who))))
        self._failed_disks.update(members)
        return members

    def break_disk(self, who: int | str) -> list[Member]:
        """Let each call of the broker's disk fail with EIO. A broker whose only disk fails ends."""
        members = self._injected("break_disk", who, lambda launcher: launcher.break_disk(parse_who(str(who))))
        self._failed_disks.update(members)
        return members

    def slow_disk(self, who: int | str, sync_delay_s: float, write_delay_s: float = 0.0) -> list[Member]:
        """Let each fsync of the broker take `sync_delay_s` longer, and each write `write_delay_s`."""
        return self._injected(
            "slow_disk",
            who,
            lambda launcher: launcher.slow_disk(parse_who(str(who)), sync_delay_s, write_delay_s),
        )

    def cut(self, who: int | str, other: int | str, *, one_way: bool = False) -> list[Member]:
        """Lose all packets between two brokers, or between a broker and `"zookeeper"`; `one_way`: those that the first
        sends to the other. Connections stay open, and what was lost arrives after `heal`, as TCP sends it again."""
        return self._injected(
            "cut",
            f"{who} {other}",
            lambda launcher: launcher.cut(parse_who(str(who)), parse_who(str(other)), one_way=one_way),
        )

    def slow_network(self, who: int | str, delay_s: float, between: int | str | None = None) -> list[Member]:
        """Let each packet that the broker sends take this much longer; or, with `between`, each packet between it and
        that other broker, in either direction. Zero ends it."""
        end = None if between is None else parse_who(str(between))
        return self._injected(
            "slow_network", who, lambda launcher: launcher.slow_network(parse_who(str(who)), delay_s, end)
        )

    def drop_connections(self, who: int | str) -> list[Member]:
        """Break all connections of the broker, with brokers and clients, once."""
        return self._injected("drop_connections", who, lambda launcher: launcher.drop_connections(parse_who(str(who))))

    def move_clock(self, who: int | str, by_s: float) -> list[Member]:
        """Let the broker's wall clock jump forward, or backward if negative, in addition to earlier jumps. Its timers
        go by another clock, as on any machine. `heal` sets it right, which is a jump as well."""
        return self._injected("move_clock", who, lambda launcher: launcher.move_clock(parse_who(str(who)), by_s))

    def move_coordinator(self, who: int | str) -> list[Member]:
        """Let another broker coordinate a group or a transactional id, while all brokers run on. WHO is
        `"coordinator:GROUP"` or `"transactions:ID"`. Returns the former coordinator and the new one."""
        return self._injected("move_coordinator", who, lambda launcher: launcher.move_coordinator(parse_who(str(who))))

    def mend_disk(self, who: int | str) -> list[Member]:
        """End the faults of the broker's disk, and start the broker if it has ended for them."""
        return self._injected("mend_disk", who, lambda launcher: launcher.mend_disk(parse_who(str(who))))

"""The treatment that a connection of this broker gets under the present faults. Pure.

The broker that has opened a connection treats both of its directions, since it alone knows the other end. So the fault
between two brokers is written into the files of both, and a connection is treated once. Connections that were accepted
are treated only for the faults that concern all packets of the broker.
"""

from __future__ import annotations

from typing import NamedTuple

from minibroker.protocol.faults import Faults, Link


class Way(NamedTuple):
    """What happens to the data of one direction."""

    is_held: bool = False
    """Nothing passes."""
    delay_s: float = 0.0


class Treatment(NamedTuple):
    sent: Way = Way()
    received: Way = Way()

    @property
    def is_cut(self) -> bool:
        """Whether a connection cannot be opened: packets have to pass in both directions."""
        return self.sent.is_held or self.received.is_held


NONE = Treatment()


def opened(faults: Faults, peer: int | None) -> Treatment:
    """Return the treatment of a connection that this broker opens or has opened; `peer` is the broker at the other end,
    if it is one."""
    link = Link() if peer is None else faults.links.get(peer, Link())
    return Treatment(
        Way(faults.is_isolated or link.loses_sent, (faults.delay_ms + link.delay_ms) / 1_000),
        Way(faults.is_isolated or link.loses_received, link.delay_ms / 1_000),
    )


def accepted(faults: Faults) -> Treatment:
    return Treatment(Way(faults.is_isolated, faults.delay_ms / 1_000), Way(faults.is_isolated))

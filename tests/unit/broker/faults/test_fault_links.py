"""Who treats which connection, and how."""

from __future__ import annotations

from minibroker.broker.faults.links import NONE, Treatment, Way, accepted, opened
from minibroker.protocol import faults
from minibroker.protocol.faults import Faults

HELD = Way(is_held=True)


def test_only_connections_to_the_peer_are_treated() -> None:
    found = faults.link_cut(Faults(), 2, sent=True, received=True)
    assert opened(found, 2) == Treatment(HELD, HELD)
    assert opened(found, 3) == NONE
    assert opened(found, None) == NONE
    assert accepted(found) == NONE


def test_a_one_way_cut_holds_one_direction_and_no_connection_can_be_opened() -> None:
    sent = opened(faults.link_cut(Faults(), 2, sent=True, received=False), 2)
    received = opened(faults.link_cut(Faults(), 2, sent=False, received=True), 2)
    assert (sent, received) == (Treatment(sent=HELD), Treatment(received=HELD))
    assert sent.is_cut
    assert received.is_cut
    assert not opened(faults.link_slowed(Faults(), 2, 100), 2).is_cut


def test_an_isolated_broker_holds_everything() -> None:
    found = faults.isolated(Faults())
    assert opened(found, 2) == opened(found, None) == accepted(found) == Treatment(HELD, HELD)


def test_delays_add_up_in_the_direction_that_they_concern() -> None:
    found = faults.network_slowed(faults.link_slowed(Faults(), 2, 100), 30)
    assert opened(found, 2) == Treatment(Way(delay_s=0.13), Way(delay_s=0.1))
    assert opened(found, 3) == Treatment(Way(delay_s=0.03))
    assert accepted(found) == Treatment(Way(delay_s=0.03))

"""Which peer may call which API: the table."""

from __future__ import annotations

import msgspec
import pytest

from minibroker.broker.handlers.authorization import why_refused
from minibroker.broker.handlers.dispatch import HANDLERS
from minibroker.protocol import messages as m
from minibroker.protocol.apis import APIS, FETCH, LEADER_AND_ISR, PRODUCE, WRITE_TXN_MARKERS, Caller, Plane
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.principal import ANONYMOUS, Principal, broker_principal


def fetch(replica_id: int) -> m.FetchRequest:
    return m.FetchRequest(replica_id, 0, 0, 1, 0, [])


def order(controller_id: int) -> m.LeaderAndIsrRequest:
    return m.LeaderAndIsrRequest(controller_id, 1, 1, [], [])


def test_every_api_of_the_control_plane_is_for_brokers_alone() -> None:
    control = [api for api in APIS.values() if api.plane is Plane.CONTROL]
    assert control
    assert [api.name for api in control if api.caller is not Caller.BROKER] == []


def test_a_caller_that_names_itself_a_replica_has_to_be_that_broker_whatever_it_asks() -> None:
    named = [api for api in APIS.values() if "replica_id" in [f.name for f in msgspec.structs.fields(api.request)]]
    assert FETCH in named
    assert [api.name for api in named if api.caller is not Caller.READER] == []


@pytest.mark.parametrize("principal", [ANONYMOUS, broker_principal(2)], ids=lambda each: each.shown)
def test_every_client_may_produce_and_read_as_a_consumer(principal: Principal) -> None:
    assert why_refused(PRODUCE, m.ProduceRequest(None, 1, 1, []), principal) is None
    assert why_refused(FETCH, fetch(-1), principal) is None


def test_a_broker_may_call_broker_apis_in_its_own_name() -> None:
    for broker_id in (0, 2):
        assert why_refused(FETCH, fetch(broker_id), broker_principal(broker_id)) is None
        assert why_refused(LEADER_AND_ISR, order(broker_id), broker_principal(broker_id)) is None
        for other in (ANONYMOUS, broker_principal(1)):
            said = f"in the name of broker {broker_id}, over a connection that is {other.shown}"
            assert why_refused(FETCH, fetch(broker_id), other) == f"Fetch {said}"
            assert why_refused(LEADER_AND_ISR, order(broker_id), other) == f"LeaderAndIsr {said}"


def test_an_order_in_the_name_of_no_broker_is_refused() -> None:
    assert why_refused(LEADER_AND_ISR, order(-1), ANONYMOUS) is not None


def test_a_client_may_abort_a_hanging_transaction_and_only_a_broker_may_commit_one() -> None:
    def markers(*committed: bool) -> t.WriteTxnMarkersRequest:
        return t.WriteTxnMarkersRequest([t.TransactionMarker(5, 0, each, 3, []) for each in committed])

    assert why_refused(WRITE_TXN_MARKERS, markers(False, False), ANONYMOUS) is None
    assert why_refused(WRITE_TXN_MARKERS, markers(False, True), broker_principal(0)) is None
    refused = why_refused(WRITE_TXN_MARKERS, markers(False, True), ANONYMOUS)
    assert refused == "WriteTxnMarkers that commits, over a connection that is User:ANONYMOUS"


def test_every_api_in_the_table_has_a_handler_and_the_other_way_round() -> None:
    assert HANDLERS.keys() == APIS.keys()

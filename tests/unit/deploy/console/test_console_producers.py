"""What the console shows of producers, from the brokers' metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest

from minibroker.deploy.console.producers import (
    Counters,
    Rates,
    counters_of,
    look,
    mean_ms,
    producer_sections,
    refused_per_s,
    topic_rates,
)
from minibroker.protocol.model import TopicPartition

ORDERS, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1)
METRICS = """\
# HELP kafka_network_requestmetrics_totaltimems x
kafka_network_requestmetrics_totaltimems_count{request="Fetch"} 9.0
kafka_network_requestmetrics_totaltimems_sum{request="Fetch"} 900.0
kafka_network_requestmetrics_totaltimems_count{request="Produce"} 4.0
kafka_network_requestmetrics_totaltimems_sum{request="Produce"} 7.5
kafka_network_requestmetrics_remotetimems_sum{request="Produce"} 3.5
kafka_network_requestmetrics_errors_total{error="UNKNOWN_SERVER_ERROR",request="Fetch"} 9.0
kafka_network_requestmetrics_errors_total{error="NOT_ENOUGH_REPLICAS",request="Produce"} 6.0
kafka_network_requestmetrics_errors_total{request="Produce",error="INVALID_RECORD"} 1.0
kafka_server_delayedproducemetrics_expires_total 2.0
kafka_server_delayedoperationpurgatory_numdelayedoperations{delayedoperation="Fetch"} 8.0
kafka_server_delayedoperationpurgatory_numdelayedoperations{delayedoperation="Produce"} 3.0
kafka_server_brokertopicmetrics_bytesin_total{topic="a"} 1000.0
kafka_server_brokertopicmetrics_bytesin_total{topic="b"} 24.0
# HELP kafka_server_brokertopicmetrics_messagesin x
kafka_server_brokertopicmetrics_messagesin_total{topic="a"} 10.0
kafka_server_brokertopicmetrics_messagesin_total{topic="b"} 1.5e+01
kafka_server_brokertopicmetrics_bytesout_total{topic="a"} 77.0
"""
REFUSED = {"NOT_ENOUGH_REPLICAS": 6.0, "INVALID_RECORD": 1.0}
FOUND = Counters(4.0, 7.5, 3.5, 25.0, 1_024.0, 3.0, 2.0, REFUSED)


def test_the_counters_of_producers_are_found_among_a_brokers_metrics() -> None:
    assert counters_of(METRICS) == FOUND
    assert counters_of(METRICS.replace("Produce", "Join")) is None
    alone = METRICS.partition("kafka_server_delayedproduce")[0]
    assert counters_of(alone) == Counters(4.0, 7.5, 3.5, 0.0, 0.0, 0.0, 0.0, REFUSED)
    assert counters_of(METRICS.partition("kafka_server_brokertopicmetrics_bytesout")[0].rstrip()) == FOUND


def test_rates_lie_between_two_looks_and_leave_out_brokers_that_started_anew() -> None:
    before, none = look({}, {1: FOUND, 2: FOUND}, 100.0)
    assert none == []
    now = Counters(14.0, 57.5, 23.5, 1_025.0, 101_024.0, 0.0, 2.0, REFUSED)
    seen, rates = look(before, {1: now, 2: FOUND._replace(requests=1.0), 3: FOUND}, 105.0)
    assert rates == [Rates(1, 200.0, 20_000.0, 2.0, 5.0, 2.0, 0, 2, 0.0)]
    assert set(seen) == {1, 2, 3}
    assert mean_ms(rates) == 5.0
    assert mean_ms([]) is None
    idle = rates[0]._replace(requests_per_s=0.0, mean_ms=None)
    assert mean_ms([idle]) is None
    assert mean_ms([*rates, rates[0]._replace(requests_per_s=6.0, mean_ms=1.0), idle]) == 2.0


def test_a_broker_is_stalled_while_requests_wait_and_none_is_answered() -> None:
    seen, _ = look({}, {1: FOUND}, 100.0)
    stalls = []
    changes: list[tuple[float, dict[str, Any]]] = [
        (105.0, {}),
        (110.0, {}),
        (115.0, {"requests": 5.0}),
        (120.0, {"requests": 5.0}),
        (125.0, {"requests": 5.0, "waiting": 0.0}),
    ]
    for at_s, change in changes:
        seen, rates = look(seen, {1: FOUND._replace(**change)}, at_s)
        stalls.append(rates[0].stalled_s)
    assert stalls == [5.0, 10.0, 0.0, 5.0, 0.0]


def test_refused_batches_have_rates_by_error_and_no_other_row_looks_like_them() -> None:
    seen, _ = look({}, {1: FOUND}, 100.0)
    now = FOUND._replace(requests=14.0, refused={"NOT_ENOUGH_REPLICAS": 16.0, "INVALID_RECORD": 1.0, "OTHER": 50.0})
    _, [rates] = look(seen, {1: now}, 105.0)
    assert list(rates.refused_per_s.items()) == [("OTHER", 10.0), ("NOT_ENOUGH_REPLICAS", 2.0)]
    assert refused_per_s([rates, rates]) == 24.0
    assert refused_per_s([]) is None
    html = producer_sections([rates], {})["producers"]
    assert "✗ refuses: OTHER 10.0/s, NOT_ENOUGH_REPLICAS 2.0/s" in html
    assert "✓ answers" not in html


def test_a_topics_rate_counts_what_both_looks_have_seen() -> None:
    before = {ORDERS: 100, OTHER: 50}
    now = {ORDERS: 150, OTHER: 70, TopicPartition("new", 0): 1_000}
    assert topic_rates(before, now, 10.0) == {"orders": 7.0}
    assert topic_rates(before, {ORDERS: 20}, 10.0) == {"orders": 0.0}


@pytest.mark.parametrize(("stalled_s", "said"), [(0.0, "✓ answers"), (15.0, "✗ stalled for 15 s")])
def test_producers_are_shown_by_broker_and_by_topic(stalled_s: float, said: str) -> None:
    rates = [Rates(1, 200.0, 20_000.0, 2.0, 5.25, 2.0, 3, 2, stalled_s)]
    topics = {f"topic-{number}": float(number) for number in range(12)} | {"<b>": 99.0}
    html = producer_sections(rates, topics)["producers"]
    rows = [re.sub(r"<.*?>", "|", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", html)]
    shown = [[cell for cell in row.split("|") if cell] for row in rows]
    assert shown[1] == ["1", "200.0", "20.0 kB", "2.0", "0.0", "5 ms", "2 ms", "3", "2", said]
    assert shown[3:5] == [["&lt;b&gt;", "99.0"], ["topic-11", "11.0"]]
    assert "and 3 more topics" in html


def test_without_metrics_ports_only_topics_have_rates() -> None:
    html = producer_sections([], {"orders": 5.0})["producers"]
    assert "(--data)" in html
    assert "orders" in html

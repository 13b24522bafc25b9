"""The console's samples and plots."""

from __future__ import annotations

import pytest

from minibroker.client.cli.timelines.story import Story
from minibroker.deploy.console.plots import BOTTOM, GAP_S, HEIGHT, LEFT, RIGHT, TOP, WIDTH, metric_sections, plot_of
from minibroker.deploy.console.sampling import (
    KEPT_S,
    ProduceTimes,
    Sample,
    Sampler,
    Sight,
    mean_ms,
    produce_times,
    records_per_s,
)
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.model import TopicPartition

ORDERS = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 1)


def _sight(ends: dict[TopicPartition, int]) -> Sight:
    return Sight(ends, 1, 2, 3, 4)


def test_a_rate_counts_what_both_looks_have_seen() -> None:
    before = _sight({ORDERS: 100, OTHER: 50})
    assert records_per_s(before, _sight({ORDERS: 150, OTHER: 70, TopicPartition("new", 0): 1_000}), 10.0) == 7.0
    assert records_per_s(before, _sight({ORDERS: 20}), 10.0) == 0.0


def test_a_mean_time_leaves_out_brokers_that_started_anew_or_served_nothing() -> None:
    before = {1: ProduceTimes(10, 100.0), 2: ProduceTimes(500, 9_000.0), 3: ProduceTimes(5, 5.0)}
    assert mean_ms(before, {1: ProduceTimes(14, 120.0), 2: ProduceTimes(3, 3.0), 4: ProduceTimes(9, 900.0)}) == 5.0
    assert mean_ms(before, before) is None


def test_the_times_of_produce_are_found_among_a_brokers_metrics() -> None:
    metrics = (
        '# HELP x\nkafka_network_requestmetrics_totaltimems_count{request="Fetch"} 9.0\n'
        'kafka_network_requestmetrics_totaltimems_count{request="Produce"} 4.0\n'
        'kafka_network_requestmetrics_totaltimems_sum{request="Produce"} 7.5\n'
    )
    assert produce_times(metrics) == ProduceTimes(4.0, 7.5)
    assert produce_times("kafka_log_logmanager_remaininglogstorecover 9.0\n") is None


async def test_a_cluster_that_does_not_answer_leaves_a_gap() -> None:
    end, error = 0, False

    async def look() -> Sight:
        if error:
            raise NetworkError("no broker")
        return _sight({ORDERS: end})

    sampler = Sampler(look, None)
    await sampler.sample()
    end = 10
    await sampler.sample()
    error = True
    await sampler.sample()
    error = False
    end = 1_000_000
    await sampler.sample()
    rates = [sample.records_per_s for sample in sampler.samples]
    assert (rates[0], rates[2]) == (None, None)
    assert (rates[1] or 0) > 0
    assert sampler.version == 3
    assert sampler.samples[0][3:] == (1, 2, 3, 4)


@pytest.mark.parametrize("greatest", [0.0, 0.4, 3.0, 7.0, 1_234.0, 9e12])
def test_points_lie_within_the_axes(greatest: float) -> None:
    plot = plot_of([(KEPT_S, greatest), (KEPT_S / 2, 0.0), (0.0, greatest)], [(1.0, greatest)])
    for x, y in (*(point for line in plot.lines for point in line), *plot.bars):
        assert LEFT <= x <= WIDTH - RIGHT
        assert TOP - 0.001 <= y <= HEIGHT - BOTTOM
    assert [text for _, text in plot.ticks] == ["−10 min", "−8 min", "−6 min", "−4 min", "−2 min", "now"]
    assert len(plot.levels) == 4


def test_points_that_are_far_apart_are_not_joined() -> None:
    plot = plot_of([(300.0, 1.0), (295.0, 1.0), (295.0 - GAP_S - 1, 1.0)])
    assert [len(line) for line in plot.lines] == [2, 1]


def test_plots_say_their_values_in_words() -> None:
    now_s = 1_000_000.0
    samples = [
        Sample(now_s - 700, 9_999.0, None, 0, 0, 0, 0),
        Sample(now_s - 10, 1_500.0, 2.25, 0, 1, 3, 12_000),
        Sample(now_s - 5, 500.0, None, 0, 0, 0, 0),
    ]
    story = Story("broker 1 was lost", int((now_s - 60) * 1_000), (), 1, (), 90.0, 624.0)
    old = story._replace(began_ms=0, led_ms=99_999.0)
    html = metric_sections(samples, [old, story], now_s)["plots"]
    assert "500/s now; 500 to 1,500" in html
    assert "1 in ten minutes, the longest 624 ms" in html
    assert "2.2 ms now" in html
    assert "9,999" not in html
    assert "no value yet" in metric_sections([], None, now_s)["plots"]

"""The console's samples and plots."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minibroker.client.administering.topics import PartitionDescription
from minibroker.client.cli.timelines.story import Story
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.deploy.console.plots import BOTTOM, GAP_S, HEIGHT, LEFT, RIGHT, TOP, WIDTH, metric_sections, plot_of
from minibroker.deploy.console.reading import follower_lag, sampled_lags
from minibroker.deploy.console.sampling import (
    KEPT_S,
    MAX_GROUPS_KEPT,
    Lags,
    Sample,
    Sampler,
    Sight,
)
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.model import TopicPartition

ORDERS = TopicPartition("orders", 0)


def _sight(ends: dict[TopicPartition, int]) -> Sight:
    return Sight(ends, 1, 2, 3, {"billing": 3, "audit": 1})


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
    assert sampler.version == 4
    assert sampler.samples[0][3:] == (None, 1, 2, 3, 4, None, False)
    assert [lag for _, lag in sampler.lags.of("billing")] == [3, None, 3]
    assert [sample.is_gap for sample in sampler.samples] == [False, False, True, False]


async def test_what_is_known_of_some_topics_alone_is_no_number_of_all() -> None:
    async def look() -> Sight:
        return Sight({ORDERS: 7}, 0, 0, 0, {}).of_some_topics()

    sampler = Sampler(look, None)
    await sampler.sample()
    (sample,) = sampler.samples
    assert (sample.leaderless, sample.under_replicated, sample.follower_lag, sample.group_lag) == (None,) * 4
    assert not sample.is_gap, "brokers answered"


def test_lags_are_kept_for_ten_minutes_whether_sampled_or_seen_on_a_page() -> None:
    lags = Lags()
    lags.add(1_000.0, {"billing": 5, "audit": 1})
    lags.add(1_001.0, {"billing": 6})  # a page that is watched reads more often than is kept
    lags.add(1_005.0, {"billing": 7})
    assert lags.of("billing") == ((1_000.0, 5), (1_005.0, 7))
    assert lags.version == 3
    lags.add(1_006.0, {"billing": None, "nobody": None})
    lags.add(1_006.5, {"billing": None})
    lags.add(1_007.0, {"billing": 7})
    assert lags.of("billing")[2:] == ((1_006.0, None), (1_007.0, 7))
    assert lags.of("nobody") == ()
    lags.add(1_004.0 + KEPT_S, {"billing": 8})
    assert lags.of("billing")[0] == (1_005.0, 7)
    assert lags.of("billing")[-1] == (1_004.0 + KEPT_S, 8)
    assert lags.of("audit") == ()
    lags.add(5_000.0, {f"group-{number}": 0 for number in range(MAX_GROUPS_KEPT + 3)})
    assert (lags.of("group-2"), lags.of("group-3")) == ((), ((5_000.0, 0),))


@pytest.mark.parametrize("greatest", [0.0, 0.4, 3.0, 7.0, 1_234.0, 9e12])
def test_points_lie_within_the_axes(greatest: float) -> None:
    plot = plot_of([(KEPT_S, greatest), (KEPT_S / 2, 0.0), (0.0, greatest)], [(1.0, greatest)])
    for x, y in (*(point for line in plot.lines for point in line), *plot.bars):
        assert LEFT <= x <= WIDTH - RIGHT
        assert TOP - 0.001 <= y <= HEIGHT - BOTTOM
    assert [text for _, text in plot.ticks] == ["−10 min", "−8 min", "−6 min", "−4 min", "−2 min", "now"]
    assert len(plot.levels) == 4


def test_what_is_unknown_is_a_gap_and_not_zero() -> None:
    assert [len(line) for line in plot_of([(20.0, 1.0), (15.0, None), (10.0, 1.0), (5.0, 1.0)]).lines] == [1, 2]
    samples = [Sample(990.0, None, None, None, 0, 0, 7, 3), Sample(995.0, None, None, None, 0, 1, None, None)]
    html = metric_sections(samples, [], 1_000.0)["plots"]
    assert "unknown now; 7 to 7" in html
    assert "unknown now; 3 to 3" in html
    assert "lack: unknown" in metric_sections(samples[1:], [], 1_000.0)["plots"]
    lost = Sample(995.0, None, None, None, None, None, None, None)
    html = metric_sections([samples[0], lost, samples[0]._replace(at_s=999.0)], [], 1_000.0)["plots"]
    assert "polyline" not in html


def test_the_lag_of_a_dead_or_cut_off_follower_and_of_a_group_without_a_commit_is_unknown() -> None:
    partition = PartitionDescription(0, 1, 3, (1, 2), (1,), ())
    assert follower_lag([partition], {1: {ORDERS: 0}, 2: {ORDERS: 5}}) == 5
    assert follower_lag([partition], {1: {ORDERS: 0}}) is None
    assert follower_lag([partition], {1: {ORDERS: 0}, 2: {ORDERS: 0}}) is None, "it is cut off from its leader"
    deleted = TopicPartition("deleted", 0)
    committed = {ORDERS: OffsetAndMetadata(3, None, ""), deleted: OffsetAndMetadata(1, None, "")}
    groups = {"billing": committed, "unread": None, "none": {}}
    assert sampled_lags(groups, {ORDERS}, {ORDERS: 10}) == {"billing": 7, "unread": None}
    assert sampled_lags(groups, {ORDERS}, {}) == {"billing": None, "unread": None}


async def test_a_lag_that_is_not_known_makes_the_sum_unknown_and_no_zero() -> None:
    sights = [
        Sight({}, 0, 0, None, {"billing": 3}, 1),
        Sight({}, 0, 0, None, {"billing": None, "audit": 0}),
        Sight({}, 0, 0, None, None),
        Sight({}, 0, 0, None, {}, 1),
        Sight({}, 0, 0, None, {}),
    ]
    left = iter(sights)

    async def look() -> Sight:
        return next(left)

    sampler = Sampler(look, None)
    for _ in sights:
        await sampler.sample()
    assert [sample.group_lag for sample in sampler.samples] == [3, None, None, None, 0]
    assert [lag for _, lag in sampler.lags.of("billing")] == [3, None]


def test_many_milliseconds_are_seconds_and_the_times_are_evenly_spaced() -> None:
    few, many = (plot_of([], [(1.0, value)], "ms") for value in (900.0, 162_993.0))
    assert (few.unit, [text for _, text in few.levels]) == ("ms", ["0", "500", "1k", "1.5k"])
    assert (many.unit, [text for _, text in many.levels]) == ("s", ["0", "100", "200", "300"])
    places = [x for x, _ in few.ticks]
    assert {round(after - before, 3) for before, after in pairwise(places)} == {round(places[1] - places[0], 3)}
    html = metric_sections([], None, 0.0)["plots"]
    assert html.count('class="tick-label"') == 9 * 6  # all of them centred


def test_points_that_are_far_apart_are_not_joined() -> None:
    plot = plot_of([(300.0, 1.0), (295.0, 1.0), (295.0 - GAP_S - 1, 1.0)])
    assert [len(line) for line in plot.lines] == [2, 1]


def test_plots_say_their_values_in_words() -> None:
    now_s = 1_000_000.0
    samples = [
        Sample(now_s - 700, 9_999.0, None, None, 0, 0, 0, 0),
        Sample(now_s - 10, 1_500.0, 2.25, 7, 0, 1, 3, 12_000),
        Sample(now_s - 5, 500.0, None, 0, 0, 0, 0, 0, 33.5),
    ]
    story = Story("broker 1 was lost", int((now_s - 60) * 1_000), (), 1, (), 90.0, 624.0)
    old = story._replace(began_ms=0, led_ms=99_999.0)
    html = metric_sections(samples, [old, story], now_s)["plots"]
    assert "500 per second now; 500 to 1,500" in html
    assert "1 in ten minutes, the longest 624 ms" in html
    own = metric_sections(samples, [story._replace(longest_ms=66.0)], now_s)["plots"]
    assert "1 in ten minutes, the longest 66 ms" in own, "of the partition, though two losses lay apart"
    assert "2.2 ms now" in html
    assert "0 requests now; 0 to 7" in html
    assert "34 per second now; 34 to 34" in html
    assert "9,999" not in html
    assert [
        html.count(f'<text class="unit" x="4" y="12">{unit}</text>') for unit in ("per second", "ms", "records")
    ] == [
        2,
        2,
        2,
    ]
    assert "no value yet" in metric_sections([], None, now_s)["plots"]


def test_failovers_in_entries_that_are_missing_are_unknown_and_not_none() -> None:
    title, now_s = "Failovers: time until led again: ", 1_000_000.0
    story = Story("broker 1 was lost", int((now_s - 60) * 1_000), (), 1, (), 90.0, 624.0)
    for stories, missing, said in (
        ([], (), "none"),
        (None, (), "unknown"),
        ([], (1, 2), "unknown; the entries of brokers 1 and 2 are missing"),
        ([story], (2,), "1 in ten minutes, the longest 624 ms; the entries of broker 2 are missing"),
    ):
        assert f'{title}{said}"' in metric_sections([], stories, now_s, missing)["plots"]

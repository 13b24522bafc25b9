"""Plots of the last ten minutes as SVG. Pure.

Positions are attributes and not styles, as in `chart`. A plot says its latest, least and greatest value in words, for
readers who do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.words import milliseconds
from minibroker.deploy.console.markup import Markup, element
from minibroker.deploy.console.parts import Sections, section
from minibroker.deploy.console.sampling import EVERY_S, KEPT_S, MAX_EVERY_S, Sample
from minibroker.protocol.words import listed, plural

PATH = "/metrics"
WIDTH, HEIGHT = 600, 164
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 24, 24
GAP_S = 2 * MAX_EVERY_S
"""Points that are further apart are not joined."""
TICK_S = 120
MILLISECONDS, PER_SECOND = "ms", "per second"
_STALLS = "stalls", "Failovers: time until led again"
MANY_MS = 10_000
"""An axis with so many milliseconds has seconds."""

Point = tuple[float, float]
"""Seconds before now, and a value."""
Known = tuple[float, float | None]
"""As Point, but the value may be unknown."""


class Plot(NamedTuple):
    lines: tuple[tuple[tuple[float, float], ...], ...]
    """Joined positions."""
    bars: tuple[tuple[float, float], ...]
    """Positions of their upper ends."""
    ticks: tuple[tuple[float, str], ...]
    """Of time."""
    levels: tuple[tuple[float, str], ...]
    """Of values."""
    unit: str
    """Of the levels."""


def plot_of(points: Sequence[Known], bars: Sequence[Point] = (), unit: str = "") -> Plot:
    """Lay out points in the order of time, and bars. Many milliseconds are shown as seconds."""
    step = _step(max([0.0, *(value for _, value in (*points, *bars) if value is not None)]))
    top = step * 3

    def place(point: Point) -> tuple[float, float]:
        ago_s, value = point
        x = LEFT + (1 - ago_s / KEPT_S) * (WIDTH - LEFT - RIGHT)
        return x, TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM)

    divisor, shown_unit = (1_000, "s") if unit == MILLISECONDS and top >= MANY_MS else (1, unit)
    lines: list[list[tuple[float, float]]] = []
    last_s: float | None = None
    for ago_s, value in points:
        if value is None:
            last_s = None
            continue
        if last_s is None or last_s - ago_s > GAP_S:
            lines.append([])
        lines[-1].append(place((ago_s, value)))
        last_s = ago_s
    return Plot(
        tuple(map(tuple, lines)),
        tuple(map(place, bars)),
        tuple(
            (place((ago_s, 0))[0], f"−{ago_s // 60} min" if ago_s else "now")
            for ago_s in range(int(KEPT_S), -1, -TICK_S)
        ),
        tuple((place((0, step * each))[1], _short(step * each / divisor)) for each in range(4)),
        shown_unit,
    )


def _step(greatest: float) -> int:
    """Return a third of the axis: 1, 2 or 5 times a power of ten."""
    steps = (factor * int(10**power) for power in count() for factor in (1, 2, 5))
    return next(step for step in steps if step * 3 >= greatest)


def _short(value: float) -> str:
    for limit, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def metric_sections(
    samples: Sequence[Sample], stories: Sequence[Story] | None, now_s: float, missing: Collection[int] = ()
) -> Sections:
    """`stories` are the recorded failovers; None: the timeline could not be read. `missing`: the brokers whose entries
    it lacks."""

    def with_gaps(value: Callable[[Sample], float | None]) -> list[Known]:
        return within(((sample.at_s, value(sample)) for sample in samples), now_s)

    def points(value: Callable[[Sample], float | None]) -> list[Known]:
        """Join points over samples that have no value, unless no broker answered."""
        found = [(sample.at_s, value(sample)) for sample in samples if sample.is_gap or value(sample) is not None]
        return within(found, now_s)

    stalls = [
        (ago_s, story.outage_ms)
        for story in stories or ()
        if story.outage_ms is not None and 0 <= (ago_s := now_s - story.began_ms / 1_000) <= KEPT_S
    ]
    parts = [
        figure("records", "Records produced per second", PER_SECOND, points(lambda each: each.records_per_s)),
        _figure(_STALLS, _said_of(stalls, stories, missing), plot_of((), stalls, MILLISECONDS)),
        figure("produce", "Mean time of producers' requests", MILLISECONDS, points(lambda each: each.produce_ms)),
        figure("refused", "Producers' batches refused per second", PER_SECOND, points(lambda each: each.refused_per_s)),
        figure("waiting", "Producers' requests that wait for followers", "requests", points(lambda each: each.waiting)),
        figure("groups", "Lag of consumer groups", "records", with_gaps(lambda each: each.group_lag)),
        figure(
            "followers", "Committed records that followers lack", "records", with_gaps(lambda each: each.follower_lag)
        ),
        figure("under", "Under-replicated partitions", "partitions", points(lambda each: each.under_replicated)),
        figure("leaderless", "Partitions without a leader", "partitions", points(lambda each: each.leaderless)),
    ]
    text = (
        f"The last ten minutes, sampled every {EVERY_S:g} seconds while the console runs. The length of a failover is "
        "the longest time of one partition until it was led again. It is counted from the first sign that its leader "
        "was lost: a lost connection, or the last that another broker heard of one that hangs. If no "
        "broker recorded a sign, it is counted from when the loss was noticed."
    )
    return {"plots": section("plots", element("p", text, class_="legend"), element("div", parts, class_="plots"))}


def within(values: Iterable[tuple[float, float | None]], now_s: float) -> list[Known]:
    """Return the points of values with their times, by the wall clock, that lie on the axis."""
    found = ((now_s - at_s, value) for at_s, value in values)
    return [(ago_s, value) for ago_s, value in found if 0 <= ago_s <= KEPT_S]


def figure(name: str, title: str, unit: str, points: Sequence[Known]) -> Markup:
    """A gap at the end says that the value is unknown now."""
    values = [value for _, value in points if value is not None]
    if values:
        now = "unknown" if points[-1][1] is None else _with_unit(_exact(values[-1]), unit)
        said = f"{now} now; {_exact(min(values))} to {_exact(max(values))}"
    else:
        said = "unknown" if points else "no value yet"
    return _figure((name, title), said, plot_of(points, unit=unit))


def _figure(named: tuple[str, str], said: str, plot: Plot) -> Markup:
    name, title = named
    return element(
        "figure",
        element("figcaption", element("strong", title), element("span", f" {said}", class_="said")),
        _drawing(plot, f"{title}: {said}"),
        id=f"plot-{name}",
    )


def _said_of(stalls: Sequence[Point], stories: Sequence[Story] | None, missing: Collection[int]) -> str:
    """Failovers may be recorded in the entries that are missing."""
    if stories is None:
        return "unknown"
    said = "none"
    if stalls:
        said = f"{len(stalls)} in ten minutes, the longest {milliseconds(max(value for _, value in stalls))}"
    elif missing:
        said = "unknown"
    if missing:
        said += f"; the entries of {plural(len(missing), 'broker')} {listed(sorted(missing))} are missing"
    return said


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit.removesuffix('s') if number == '1' and unit != MILLISECONDS else unit}"


def _exact(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _drawing(plot: Plot, label: str) -> Markup:
    floor = HEIGHT - BOTTOM
    shapes: list[Markup] = []
    for y, text in plot.levels:
        shapes.append(element("line", class_="tick", x1=LEFT, x2=WIDTH - RIGHT, y1=_px(y), y2=_px(y)))
        shapes.append(element("text", text, class_="level", x=LEFT - 8, y=_px(y + 4)))
    shapes.append(element("text", plot.unit, class_="unit", x=4, y=12))
    for x, text in plot.ticks:
        shapes.append(element("text", text, class_="tick-label", x=_px(x), y=HEIGHT - 6))
    for line in plot.lines:
        shape = " ".join(f"{_px(x)},{_px(y)}" for x, y in line)
        if len(line) == 1:
            shapes.append(element("circle", class_="point", cx=_px(line[0][0]), cy=_px(line[0][1]), r=2))
            continue
        shapes.append(
            element("polygon", class_="area", points=f"{_px(line[0][0])},{floor} {shape} {_px(line[-1][0])},{floor}")
        )
        shapes.append(element("polyline", class_="line", points=shape))
    for x, y in plot.bars:
        shapes.append(element("line", class_="bar", x1=_px(x), x2=_px(x), y1=floor, y2=_px(y)))
    return element("svg", shapes, class_="plot", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _px(value: float) -> str:
    return f"{value:.1f}"

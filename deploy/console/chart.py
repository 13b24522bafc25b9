"""The time axis of a failover: who recorded which step, and when. Pure; drawn as SVG.

Positions are attributes and not styles, since the pages' content security policy allows no inline styles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from minibroker.client.cli.timelines.story import Step, Story
from minibroker.client.cli.timelines.words import milliseconds
from minibroker.deploy.console.markup import Markup, element

WIDTH = 960
LEFT, RIGHT = 84, 24
TOP, ROW, GAP = 24, 24, 8
"""Heights: above the lanes, of a row of marks, between lanes."""
RADIUS = 10
TICKS = 8
"""At most this many intervals."""

KINDS = {
    "ControllerSuspected": "sign",
    "ControllerRemoved": "sign",
    "BrokerSuspected": "sign",
    "BrokerSilent": "sign",
    "SessionExpired": "sign",
    "Resignation": "sign",
    "LeaderAndIsrAnswered": "answer",
    "StopReplicaAnswered": "answer",
    "UpdateMetadataAnswered": "answer",
}
"""Signs of the failure, and answers of brokers to orders. Everything else is the controller's work."""


class Mark(NamedTuple):
    number: int
    """Of the step, from 1."""
    x: float
    y: float
    kind: str


class Lane(NamedTuple):
    broker: int
    y: float
    height: float


class Chart(NamedTuple):
    height: float
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    led_x: float | None
    """Where all partitions are led again."""


def chart_of(story: Story) -> Chart:
    """Lay out the steps in a lane for each broker, further rows below where marks would overlap."""
    until_ms = max([1.0, story.led_ms or 0.0, *(step.at_ms for step in story.steps)])
    scale = (WIDTH - LEFT - RIGHT) / until_ms
    lanes, marks, y = [], [], float(TOP)
    for broker in sorted({step.broker for step in story.steps}):
        placed, rows = _in_rows(story.steps, broker, scale)
        height = rows * ROW + GAP
        lanes.append(Lane(broker, y, height))
        marks += [mark._replace(y=y + GAP / 2 + mark.y) for mark in placed]
        y += height
    return Chart(
        y + GAP,
        tuple(lanes),
        tuple(sorted(marks)),
        tuple((LEFT + at_ms * scale, milliseconds(at_ms) if at_ms else "0") for at_ms in _ticks(until_ms)),
        None if story.led_ms is None else LEFT + story.led_ms * scale,
    )


def _in_rows(steps: Sequence[Step], broker: int, scale: float) -> tuple[list[Mark], int]:
    marks: list[Mark] = []
    ends: list[float] = []
    for number, step in enumerate(steps, 1):
        if step.broker != broker:
            continue
        x = LEFT + step.at_ms * scale
        row = next((row for row, end in enumerate(ends) if x - RADIUS >= end), len(ends))
        ends[row:] = [x + RADIUS + 2, *ends[row + 1 :]]
        marks.append(Mark(number, x, row * ROW + ROW / 2, KINDS.get(step.event, "work")))
    return marks, len(ends)


def _ticks(until_ms: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    step = next(
        step for power in count() for step in (10**power, 2 * 10**power, 5 * 10**power) if step * TICKS >= until_ms
    )
    return [float(at_ms) for at_ms in range(0, int(until_ms) + 1, step)]


def drawing(story: Story) -> Markup:
    """Return the chart as SVG."""
    chart = chart_of(story)
    shapes: list[Markup] = []
    if chart.led_x is not None:
        shapes.append(
            element(
                "rect",
                class_="outage",
                x=LEFT,
                y=TOP,
                width=_px(chart.led_x - LEFT),
                height=_px(chart.height - TOP - GAP),
            )
        )
    for x, text in chart.ticks:
        shapes.append(element("line", class_="tick", x1=_px(x), x2=_px(x), y1=TOP - 6, y2=_px(chart.height - GAP)))
        shapes.append(element("text", text, class_="tick-label", x=_px(x), y=TOP - 10))
    for lane in chart.lanes:
        shapes.append(element("line", class_="lane", x1=0, x2=WIDTH, y1=_px(lane.y), y2=_px(lane.y)))
        shapes.append(
            element("text", f"broker {lane.broker}", class_="lane-label", x=0, y=_px(lane.y + GAP / 2 + ROW / 2 + 4))
        )
    if chart.led_x is not None:
        shapes.append(
            element("line", class_="led", x1=_px(chart.led_x), x2=_px(chart.led_x), y1=TOP, y2=_px(chart.height - GAP))
        )
    for mark in chart.marks:
        step = story.steps[mark.number - 1]
        shapes.append(
            element(
                "g",
                element("title", f"+{milliseconds(step.at_ms)}, broker {step.broker}: {step.text}"),
                element("circle", cx=_px(mark.x), cy=_px(mark.y), r=RADIUS),
                element("text", mark.number, x=_px(mark.x), y=_px(mark.y + 4)),
                class_=f"mark {mark.kind}",
            )
        )
    label = f"Time axis of {len(story.steps)} steps; the list below has the same steps in words"
    return element(
        "svg", shapes, class_="axis", viewBox=f"0 0 {WIDTH} {_px(chart.height)}", role="img", aria_label=label
    )


def _px(value: float) -> str:
    return f"{value:.1f}"

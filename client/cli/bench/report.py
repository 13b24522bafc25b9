"""Output of benchmarks: percentiles, and figures as one row or one JSON object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from minibroker.client.cli.terminal.output import Format, print_json, print_table


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the sorted values does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def print_figures(figures: Mapping[str, object], format: Format) -> None:
    if format is Format.JSON:
        print_json(figures)
    else:
        print_table([name.replace("_", " ") for name in figures], [list(figures.values())])

"""The report of a storm, and the floors below which a storm was too mild to prove anything."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.storms.verdicts.history import Anomaly

LEAST_FAULTS = 15
LEAST_ACKNOWLEDGED = 1_000
LEAST_LEADER_CHANGES = 3
LEAST_UNCLEAN_RESTARTS = 1


@dataclass
class Report:
    """The outcome of one seed."""

    seed: int
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    """Other events by class, such as ambushes that struck."""
    acknowledged: int = 0
    leader_changes: int = 0
    """Leader changes of partitions that had an unanswered produce request."""
    unclean_restarts: int = 0
    lost_with_acks_1: int = 0
    """Lost records that were acknowledged with acks=1, which is legal."""
    lost_with_power: int = 0
    """Records acknowledged with acks=all whose every holder lost its power, which is legal."""
    recovery_s: float = 0.0
    """Seconds from the last fault until the cluster was whole again."""
    anomalies: list[Anomaly] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    trace: str = ""

    def below_floors(self) -> list[str]:
        """Return a line for each floor that this storm did not reach."""
        floors = (
            ("faults", self.faults.total(), LEAST_FAULTS),
            ("acknowledged records", self.acknowledged, LEAST_ACKNOWLEDGED),
            ("leader changes with produce in flight", self.leader_changes, LEAST_LEADER_CHANGES),
            ("unclean restarts", self.unclean_restarts, LEAST_UNCLEAN_RESTARTS),
        )
        return [f"{value} {name}, at least {least} are due" for name, value, least in floors if value < least]


def innermost_errors(error: BaseException) -> list[str]:
    """Return the innermost errors of exception groups, each with its cause, notes and innermost frames."""
    if isinstance(error, BaseExceptionGroup):
        return [text for inner in error.exceptions for text in innermost_errors(inner)]
    cause = f" (from {error.__cause__!r})" if error.__cause__ is not None else ""
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return [f"{error!r}{cause}{notes} in {place}"]

"""`minibroker status` as text, once or, with `--watch`, every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import msgspec

from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.live import text_in_place
from minibroker.client.cli.terminal.output import Format, print_json, table_lines
from minibroker.deploy.observing.status import BrokerStatus, Status, some_of
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of, counted

INTERVAL_S = 1.0
MANY_LOSSES = 3
"""From so many losses of the connection to ZooKeeper in a minute on, `status` mentions them."""


class Glance(NamedTuple):
    """The status and the end offsets at one moment."""

    status: Status
    end_offsets: dict[TopicPartition, int]
    """The ends up to which consumers can read, for the partitions whose leader told its end."""
    at_s: float
    unknown_ends: int = 0
    """The number of the other partitions."""


def status_lines(found: Status) -> list[str]:
    rows = [
        (
            broker.id,
            broker.port,
            broker.pid,
            _state(broker),
            "unknown" if broker.leaders is None else broker.leaders,
            "unknown"
            if found.is_unknown
            else f"epoch {found.controller.epoch}"
            if broker.id == found.controller.id
            else "",
        )
        for broker in found.brokers
    ]
    lines = table_lines(("broker", "port", "pid", "state", "leaders", "controller"), rows)
    if found.zookeeper is not None:
        state = "paused" if found.zookeeper.paused else "running" if found.zookeeper.alive else "not running"
        away = all_of("broker", found.cut_from_zookeeper)
        unreached = f", not reached by {away}" if found.cut_from_zookeeper and state == "running" else ""
        lines.append(f"ZooKeeper at {found.zookeeper.connect}: {state}{unreached}")
    lines.append(f"offline partitions: {_partitions(found.offline_partitions)}")
    lines.append(f"under-replicated partitions: {_partitions(found.under_replicated_partitions)}")
    lines += [
        f"broker {broker.id} lost touch with ZooKeeper {broker.zookeeper_losses} times in the last minute: "
        "check ZooKeeper and the network between the two"
        for broker in found.brokers
        if broker.zookeeper_losses >= MANY_LOSSES
    ]
    lines += map(pastable, found.slow_commit_lines())
    lines += fault_lines(found)
    if found.reassigning_partitions:
        lines.append(f"moving, {found.reassignments}: {some_of(found.reassigning_partitions)}")
    if found.not_preferred_partitions:
        remedy = (
            "`minibroker elect --preferred --all` moves their leaders back at once; the controller does so at its next "
            "check, if too many are away (leader.imbalance.check.interval.seconds)"
            if found.can_elect
            else "no leader can move until the controller reaches ZooKeeper again"
        )
        away = some_of(found.not_preferred_partitions)
        lines.append(f"not led by their preferred broker: {away}: {pastable(remedy)}")
    return lines


def fault_lines(found: Status) -> list[str]:
    """Return the faults that were ordered, with the remedy."""
    return [
        f"faults of broker {broker_id}: {'; '.join(faults)}: " + pastable(f"`minibroker heal {broker_id}`")
        for broker_id, faults in found.faults.items()
    ]


def _state(broker: BrokerStatus) -> str:
    if broker.recovery is not None:
        return f"recovering: {broker.recovery}"
    if broker.is_missing:
        return "missing"
    state = "paused" if broker.paused else "running" if broker.alive else "not running"
    answer = ", no answer" if broker.silent else ", slow to answer" if broker.slow_answer_s is not None else ""
    zookeeper = ", without ZooKeeper" if broker.has_lost_zookeeper else ""
    return state + (", leaving" if broker.leaving else "") + answer + zookeeper


def problem_lines(found: Status) -> list[str]:
    return [pastable(problem) for problem in found.problems()]


def status_object(found: Status) -> dict[str, Any]:
    return {**msgspec.to_builtins(found), "problems": problem_lines(found)}


def _partitions(names: list[str] | None) -> str:
    return "unknown" if names is None else some_of(names) or "none"


def watch(look: Callable[[], Glance], format: Format) -> None:
    """Show the result of `look` until Ctrl-C: in place on a terminal, else as a block or a line of JSON each time.

    An error of the first look is raised; later errors are shown.
    """
    with suppress(KeyboardInterrupt):
        before: Glance | None = None
        now, problem = look(), ""
        on_terminal = sys.stdout.isatty() and format is Format.TABLE
        with text_in_place() if on_terminal else nullcontext() as show:
            while True:
                lines = [*status_lines(now.status), _records_line(before, now), *problem_lines(now.status)]
                text = "\n".join([pastable(problem)] if problem else lines)
                if show is not None:
                    show(text)
                elif format is Format.TABLE:
                    sys.stdout.write(text + "\n\n")
                elif not problem:
                    records, rate = _records(before, now)
                    known = None if now.unknown_ends else records
                    print_json(status_object(now.status) | {"records": known, "records_per_second": rate})
                sys.stdout.flush()
                time.sleep(INTERVAL_S)
                try:
                    before, now, problem = now, look(), ""
                except MinibrokerError as error:
                    problem = str(error)


def _records_line(before: Glance | None, now: Glance) -> str:
    records, rate = _records(before, now)
    if records is None:
        return "records: unknown"
    unknown = f" without {counted(now.unknown_ends, 'partition')} of unknown end" if now.unknown_ends else ""
    return f"records: {records:,}{unknown}, {rate:,.0f}/s"


def _records(before: Glance | None, now: Glance) -> tuple[int | None, float | None]:
    """Return the number of records in the partitions with known ends, and the number written per second. None:
    unknown."""
    if now.status.is_unknown or now.status.hides_topics or (now.unknown_ends and not now.end_offsets):
        return None, None
    return sum(now.end_offsets.values()), 0.0 if before is None else records_per_second(before, now)


def records_per_second(before: Glance, now: Glance) -> float:
    """Return the rate between two glances over the partitions seen both times. It is never negative, even if a new
    leader lets consumers read less than the old one."""
    written = sum(
        max(0, offset - before.end_offsets[partition])
        for partition, offset in now.end_offsets.items()
        if partition in before.end_offsets
    )
    return written / (now.at_s - before.at_s)

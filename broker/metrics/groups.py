"""Exports what a coordinator knows of its groups.

The problem: operators watch the lag of groups, and no broker knows it. The coordinator has the committed offsets, and
the leaders of other partitions have their ends.

The choice: the coordinator exports the committed offsets, each leader the high watermarks of its partitions, and a
recording rule of Prometheus subtracts them (`deploy/monitoring/rules.yml`). This costs brokers no request, and if a
leader or a coordinator does not answer, the lag has a gap instead of a value that stands still. As the two are not of
the same moment, a lag may be too large or too small by what is written between two scrapes.

The names and the number of groups are the clients' choice, so the page is bounded: groups without members, and names
longer than any topic's, are left out first, and counted.

Rejected: a coordinator that asks the leaders (requests for each group and partition, at every scrape or on a schedule,
and an old answer looks like a new one). A process that asks for both and exports the lag, as kafka_exporter does: one
more process to run, and the console, which could do it, runs only while somebody watches. The ends of followers' logs,
which coordinators often have: they include records that are not committed, and lag behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerm
from minibroker.protocol.model import MAX_TOPIC_NAME_LENGTH

MAX_OFFSETS = 10_000
"""Committed offsets on one page. It takes 50 ms of the loop's time, in slices."""
PART_OFFSETS = 100
COMMITTED_OFFSET = "minibroker_group_committed_offset"


def group_metrics(groups: GroupCoordination) -> Iterator[Metric]:
    """Return the counts of groups and of what the coordinator did."""
    terms, members, commits = groups.terms, groups.members, groups.commits
    counts = dict.fromkeys(GroupState, 0)
    offsets = 0
    for term in terms.loaded():
        for group in term.groups.values():
            counts[group.state] += 1
            offsets += len(group.offsets)
    prefix = "kafka_server_groupmetadatamanager_"
    yield GaugeMetricFamily(f"{prefix}numgroups", "Groups coordinated here", sum(counts.values()))
    for state, count in counts.items():
        if state is not GroupState.DEAD:
            name = f"{prefix}numgroups{state.value.lower()}"
            yield GaugeMetricFamily(name, f"Groups coordinated here in the state {state.value}", count)
    yield GaugeMetricFamily(f"{prefix}numoffsets", "Committed offsets of groups coordinated here", offsets)
    for name, documentation, count in (
        ("completed_rebalance", "Generations begun", members.rebalances),
        ("offset_commit", "Offsets committed", commits.committed),
        ("offset_deletion", "Committed offsets deleted on request", commits.deleted),
        ("offset_expiration", "Committed offsets deleted because they were unused", groups.removal.expired),
    ):
        yield CounterMetricFamily(f"kafka_server_group_coordinator_metrics_{name}", documentation, count)
    load = SummaryMetricFamily(
        "kafka_server_group_coordinator_metrics_partition_load_time_ms",
        "Milliseconds until this broker had loaded the groups of a partition that it began to lead",
    )
    load.add_metric([], terms.loads, terms.load_s * 1_000)
    yield load


def committed_offsets(terms: Iterable[GroupTerm]) -> Iterator[Metric]:
    """Return the committed offsets in parts, those of groups with members first, and the number of those left out."""
    groups = [group for term in terms for group in term.groups.values() if not group.is_being_deleted]
    groups.sort(key=lambda group: not group.members)
    given = left_out = 0
    family = _offsets_family()
    for group in groups:
        is_left_out = given == MAX_OFFSETS or len(group.group_id) > MAX_TOPIC_NAME_LENGTH
        shown = [] if is_left_out else group.offsets.items()[: MAX_OFFSETS - given]
        given += len(shown)
        left_out += len(group.offsets) - len(shown)
        for partition, value in shown:
            family.add_metric([group.group_id, partition.topic, str(partition.partition)], value.offset)
            if len(family.samples) == PART_OFFSETS:
                yield family
                family = _offsets_family()
    yield family
    yield GaugeMetricFamily(
        "minibroker_group_committed_offsets_left_out",
        f"Committed offsets that are not on this page, which shows {MAX_OFFSETS:,} at most",
        left_out,
    )


def _offsets_family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        COMMITTED_OFFSET,
        "The offset that a group coordinated here continues from",
        labels=["group", "topic", "partition"],
    )

"""The overview, the failovers and the groups as HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from minibroker.client.administering.groups import MemberDescription
from minibroker.client.cli.group_details import GroupDetails, PartitionLag
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.words import clock_time, date_and_time, milliseconds
from minibroker.deploy.console.chart import drawing
from minibroker.deploy.console.faults import Applied, causes_of, consequences_of
from minibroker.deploy.console.markup import Content, Markup, element
from minibroker.deploy.console.parts import Sections, address, capitalized, number, pager, section, table
from minibroker.deploy.console.state import ClusterState, Groups, Timeline
from minibroker.deploy.console.views import (
    GROUPS_A_PAGE,
    NO_LEADER,
    OUT_OF_SYNC,
    SILENT_LEADER,
    UNDER_MIN_ISR,
    BrokerView,
    Cell,
    PartitionView,
    Query,
    overview,
    page_of,
)
from minibroker.protocol.words import counted

ROWS_KEPT = 2_000
"""Rows of partitions that have not changed are rendered once."""

STORIES_A_PAGE = 10
FAULTS_SHOWN = 10
LAGS_A_PAGE = 100

SYMBOLS = {"leader": "★", "in sync": "✓", "out of sync": "✗", "alive": "✓", "silent": "?", "dead": "✗"}
"""No state is shown by colour alone."""
STATES = {"alive": "alive", "silent": "does not answer", "dead": "dead"}
NOTES = {"alive": "", "silent": " (does not answer)", "dead": " (dead)"}
ROWS = {NO_LEADER: "bad", SILENT_LEADER: "bad", UNDER_MIN_ISR: "bad", OUT_OF_SYNC: "warn"}


# --- Overview --------------------------------------------------------------------------------------------------------


def overview_sections(state: ClusterState | None, query: Query) -> Sections:
    if state is None:
        return {name: section(name) for name in ("summary", "brokers", "troubles", "partitions")}
    view = overview(state, query)
    epoch = state.description.controller_epoch
    facts = [
        ("Controller", view.controller + ("" if epoch is None else f", epoch {epoch}")),
        ("Brokers", f"{len(state.description.brokers)} of {len(view.brokers)} alive"),
        ("Partitions", f"{sum(len(topic.partitions) for topic in state.topics.values()):,}"),
        ("Cluster", view.cluster_id),
    ]
    if view.troubles:
        said = ", ".join(f"{count:,} {trouble}" for trouble, count in view.trouble_counts)
        rest = sum(count for _, count in view.trouble_counts) - len(view.troubles)
        troubles = [
            element("h2", f"Partitions in trouble: {said}"),
            _partition_table(view.troubles, view.brokers, "Partitions in trouble"),
            element("p", f"and {rest:,} more") if rest else None,
        ]
    else:
        troubles = [element("p", "✓ Every partition has a leader, and all replicas are in sync.", class_="good")]
    if query.topic:
        heading = f"Partitions of {query.topic}"
        empty = f"There is no topic {query.topic!r}."
    else:
        heading, empty = "All partitions", "There is no topic yet: `minibroker topics create NAME` creates one."
    partitions = [
        element("h2", heading),
        _internal_link(query, view.internal) if not query.topic else None,
        pager("/", query, view.page, view.pages, f"{view.selected:,} partitions"),
        _partition_table(view.partitions, view.brokers, heading) if view.partitions else element("p", empty),
    ]
    return {
        "summary": section(
            "summary", element("dl", [element("div", element("dt", name), element("dd", text)) for name, text in facts])
        ),
        "brokers": section("brokers", element("h2", "Brokers"), _broker_table(view.brokers)),
        "troubles": section("troubles", *troubles),
        "partitions": section("partitions", *partitions),
    }


def _broker_table(brokers: Sequence[BrokerView]) -> Markup:
    rows = [
        element(
            "tr",
            element("th", broker.id, scope="row"),
            element("td", f"{SYMBOLS[broker.state]} {STATES[broker.state]}", class_=broker.state),
            element("td", broker.address or "–"),
            element("td", "controller" if broker.is_controller else ""),
            number(broker.leads),
            number(broker.in_sync),
            element("td", f"{broker.out_of_sync:,}", class_="number out-of-sync" if broker.out_of_sync else "number"),
        )
        for broker in brokers
    ]
    return table("Brokers", ("Broker", "State", "Address", "Office", "Leads", "In sync", "Out of sync"), rows)


def _partition_table(partitions: Sequence[PartitionView], brokers: Sequence[BrokerView], label: str) -> Markup:
    header = (
        "Partition",
        *(f"Broker {broker.id}{NOTES[broker.state]}" for broker in brokers),
        "High watermark",
        "Leader epoch",
        "Trouble",
    )
    return table(label, header, [_partition_row(each) for each in partitions])


@lru_cache(maxsize=ROWS_KEPT)
def _partition_row(partition: PartitionView) -> Markup:
    return element(
        "tr",
        element("th", str(partition.name), scope="row"),
        [_cell(cell) for cell in partition.cells],
        number(partition.end),
        number(partition.leader_epoch),
        element(
            "td",
            element("strong", partition.trouble) if partition.trouble else None,
            f" ({partition.detail})" if partition.detail else None,
        ),
        class_=ROWS.get(partition.trouble),
    )


def _cell(cell: Cell) -> Markup:
    if not cell.role:
        return element("td", class_="none")
    behind = f", {cell.behind:,} behind" if cell.behind else ""
    return element("td", f"{SYMBOLS[cell.role]} {cell.role}{behind}", class_=cell.role.replace(" ", "-"))


def _internal_link(query: Query, count: int) -> Markup | None:
    if not count:
        return None
    text = f"{'Hide' if query.internal else 'Show'} the {count:,} partitions of internal topics"
    return element("p", element("a", text, href=address("/", query._replace(internal=not query.internal, page=1))))


# --- Failovers -------------------------------------------------------------------------------------------------------


def failover_sections(
    timeline: Timeline | None, stories: Sequence[Story], query: Query, faults: Sequence[Applied] = ()
) -> Sections:
    """`stories` are those of the query's topic, and `faults` those that this console has applied, the oldest first."""
    if timeline is None:
        return {"missing": section("missing"), "faults": section("faults"), "failovers": section("failovers")}
    missing = [
        element("li", f"The entries of broker {broker_id} are missing: {reason}")
        for broker_id, reason in timeline.missing.items()
    ]
    at, pages, shown = page_of(stories[::-1], query.page, STORIES_A_PAGE)
    told = [_story(story, story is stories[-1], causes_of(story, faults)) for story in shown]
    return {
        "missing": section("missing", element("ul", missing) if missing else None),
        "faults": section("faults", _fault_table(faults, stories)),
        "failovers": section(
            "failovers",
            pager("/failovers", query, at, pages, counted(len(stories), "failover")),
            _LEGEND if told else None,
            told or element("p", "No failover is recorded: no broker was lost, and the controller never changed."),
        ),
    }


_LEGEND = element(
    "p",
    "Each mark is a step, in the lane of the broker that recorded it: ",
    element("span", "● sign of the failure", class_="sign"),
    ", ",
    element("span", "● work of the controller", class_="work"),
    ", ",
    element("span", "● answer of a broker", class_="answer"),
    ". The dashed line is the time when all partitions were led again.",
    class_="legend",
)


def _fault_table(faults: Sequence[Applied], stories: Sequence[Story]) -> Content:
    if not faults:
        return None
    rows = []
    for fault in faults[: -FAULTS_SHOWN - 1 : -1]:
        links = [
            element("li", element("a", capitalized(story.title), href=f"#failover-{story.began_ms}"))
            for story in consequences_of(fault, stories)
        ]
        rows.append(
            element(
                "tr",
                element("td", clock_time(fault.at_ms), class_="time"),
                element("th", fault.command, scope="row"),
                element(
                    "td", "under way" if fault.said is None else fault.said, class_="dead" if fault.failed else None
                ),
                element("td", element("ul", links) if links else "–"),
            )
        )
    return [
        element("h2", "Faults from this console"),
        table("Faults from this console", ("When", "Command", "Outcome", "Followed by"), rows),
    ]


def _story(story: Story, is_open: bool, causes: Sequence[tuple[Applied, float]]) -> Markup:
    identity = f"failover-{story.began_ms}"
    steps = [
        element(
            "tr",
            number(index),
            element("td", f"+{milliseconds(step.at_ms)}", class_="number"),
            number(step.broker),
            element(
                "td",
                step.text,
                element("ul", [element("li", detail) for detail in step.details]) if step.details else None,
            ),
        )
        for index, step in enumerate(story.steps, 1)
    ]
    return element(
        "article",
        element("h2", capitalized(story.title), id=identity),
        element("p", f"{date_and_time(story.began_ms)}", class_="when"),
        [
            element(
                "p",
                "Applied from this console: ",
                element("code", fault.command),
                f", {milliseconds(abs(at_ms))} {'before the first step' if at_ms <= 0 else 'after it began'}",
                class_="cause",
            )
            for fault, at_ms in causes
        ],
        element("p", story.ending(), class_="bad" if story.leaderless else None),
        element("div", drawing(story), class_="scroll", tabindex=0, role="region", aria_label="Time axis"),
        element(
            "details",
            element("summary", f"{counted(len(story.steps), 'step')} in words"),
            table("Steps", ("Step", "Time", "By broker", "What happened"), steps),
            id=f"steps-{story.began_ms}",
            open=is_open,
        ),
        aria_labelledby=identity,
    )


# --- Groups ----------------------------------------------------------------------------------------------------------


def group_sections(groups: Groups | None, query: Query) -> Sections:
    if groups is None:
        return {"failed": section("failed"), "groups": section("groups")}
    problems = [f"Group {group} could not be read: {error}" for group, error in groups.failed.items()]
    problems += [f"Broker {broker} did not list its groups." for broker in groups.silent]
    at, pages, _ = page_of(range(groups.selected), query.page, GROUPS_A_PAGE)
    return {
        "failed": section("failed", element("ul", [element("li", text) for text in problems]) if problems else None),
        "groups": section(
            "groups",
            pager("/groups", query, at, pages, counted(groups.selected, "group")),
            [_group(each) for each in groups.details]
            or element("p", "There is no consumer group." if groups.selected == 0 else None),
        ),
    }


def _group(details: GroupDetails) -> Markup:
    group = details.group
    facts = [
        group.state,
        counted(len(group.members), "member"),
        "lag unknown" if details.lag is None else f"lag {details.lag:,}",
        f"coordinator broker {group.coordinator.node_id}",
    ]
    if details.without_commit:
        facts.append(f"{counted(details.without_commit, 'partition')} without a commit")
    owned: dict[str | None, list[PartitionLag]] = {}
    for each in details.partitions:
        owned.setdefault(each.member_id, []).append(each)
    members = [_member(member, owned.get(member.member_id, ())) for member in group.members]
    names = {member.member_id: member.client_id for member in group.members}
    lags = [
        element(
            "tr",
            element("th", str(each.partition), scope="row"),
            element("td", names.get(each.member_id, "–") if each.member_id else "–"),
            number(None if each.committed is None else each.committed.offset),
            number(each.end_offset),
            number(each.lag),
        )
        for each in details.partitions[:LAGS_A_PAGE]
    ]
    rest = len(details.partitions) - len(lags)
    header = ("Partition", "Member", "Committed", "High watermark", "Lag")
    return element(
        "article",
        element("h2", group.group),
        element("p", " · ".join(facts)),
        table("Members", ("Client", "Member", "Host", "Partitions", "Lag"), members) if members else None,
        table("Partitions", header, lags) if lags else None,
        element("p", f"and {rest:,} more partitions: `minibroker groups describe` shows all") if rest else None,
    )


def _member(member: MemberDescription, partitions: Sequence[PartitionLag]) -> Markup:
    lags = [each.lag for each in partitions if each.lag is not None]
    static = f" (static member {member.group_instance_id})" if member.group_instance_id else ""
    return element(
        "tr",
        element("th", member.client_id, scope="row"),
        element("td", f"{member.member_id}{static}"),
        element("td", member.client_host),
        number(None if member.partitions is None else len(member.partitions)),
        number(sum(max(0, lag) for lag in lags) if lags else None),
    )

"""The pages as HTML. Pure.

A page is a frame and sections. The plain page has all sections; the event stream sends those that have changed, by
their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import urlencode

from minibroker.client.administering.groups import MemberDescription
from minibroker.client.cli.group_details import GroupDetails, PartitionLag
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.words import date_and_time, milliseconds
from minibroker.deploy.console.chart import drawing
from minibroker.deploy.console.markup import Content, Markup, element, markup
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

NUMBERS = {
    "Leads",
    "Partitions",
    "In sync",
    "Out of sync",
    "High watermark",
    "Leader epoch",
    "Step",
    "Time",
    "Committed",
    "Lag",
}
"""Columns with numbers."""

Sections = dict[str, Markup]

ROWS_KEPT = 2_000
"""Rows of partitions that have not changed are rendered once."""

STORIES_A_PAGE = 10
LAGS_A_PAGE = 100

PAGES = {"/": "Overview", "/failovers": "Failovers", "/groups": "Groups"}
SYMBOLS = {"leader": "★", "in sync": "✓", "out of sync": "✗", "alive": "✓", "silent": "?", "dead": "✗"}
"""No state is shown by colour alone."""
STATES = {"alive": "alive", "silent": "does not answer", "dead": "dead"}
NOTES = {"alive": "", "silent": " (does not answer)", "dead": " (dead)"}
ROWS = {NO_LEADER: "bad", SILENT_LEADER: "bad", UNDER_MIN_ISR: "bad", OUT_OF_SYNC: "warn"}


def page(path: str, sections: Sections, events: str, form: Markup | None = None) -> str:
    """Return the whole page. `events` is the address of its event stream."""
    before, after = frame(path, events)
    return before + content(sections, form) + after


def content(sections: Sections, form: Markup | None = None) -> str:
    return markup(form, *sections.values())


def frame(path: str, events: str) -> tuple[str, str]:
    """Return what stands before the content of a page, and after it."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{PAGES[path]} · minibroker"),
        element("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        element("link", rel="stylesheet", href="/static/console.css"),
        element("script", src="/static/console.js", defer=True),
    )
    links = (
        element("a", title, href=there, aria_current="page" if there == path else None)
        for there, title in PAGES.items()
    )
    here = Markup("\0")
    body = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        element(
            "header",
            element("strong", "minibroker"),
            element("nav", links, aria_label="Pages"),
            element("span", "not live: reload for news", id="connection", role="status"),
        ),
        element("main", element("h1", PAGES[path]), here, id="content"),
        data_events=events,
    )
    before, _, after = ("<!doctype html>\n" + element("html", head, body, lang="en")).partition(here)
    return before, after


def notice(error: str | None, has_state: bool) -> Markup:
    """Return the section that says that the cluster cannot be read."""
    if error is None:
        return _section("notice")
    then = "The page shows the last known state." if has_state else "There is nothing to show yet."
    return _section(
        "notice", element("p", element("strong", "No broker answers. "), then), element("p", error), role="alert"
    )


# --- Overview --------------------------------------------------------------------------------------------------------


def overview_sections(state: ClusterState | None, query: Query) -> Sections:
    if state is None:
        return {name: _section(name) for name in ("summary", "brokers", "troubles", "partitions")}
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
        _pager("/", query, view.page, view.pages, f"{view.selected:,} partitions"),
        _partition_table(view.partitions, view.brokers, heading) if view.partitions else element("p", empty),
    ]
    return {
        "summary": _section(
            "summary", element("dl", [element("div", element("dt", name), element("dd", text)) for name, text in facts])
        ),
        "brokers": _section("brokers", element("h2", "Brokers"), _broker_table(view.brokers)),
        "troubles": _section("troubles", *troubles),
        "partitions": _section("partitions", *partitions),
    }


def _broker_table(brokers: Sequence[BrokerView]) -> Markup:
    rows = [
        element(
            "tr",
            element("th", broker.id, scope="row"),
            element("td", f"{SYMBOLS[broker.state]} {STATES[broker.state]}", class_=broker.state),
            element("td", broker.address or "–"),
            element("td", "controller" if broker.is_controller else ""),
            _number(broker.leads),
            _number(broker.in_sync),
            element("td", f"{broker.out_of_sync:,}", class_="number out-of-sync" if broker.out_of_sync else "number"),
        )
        for broker in brokers
    ]
    return _table("Brokers", ("Broker", "State", "Address", "Office", "Leads", "In sync", "Out of sync"), rows)


def _partition_table(partitions: Sequence[PartitionView], brokers: Sequence[BrokerView], label: str) -> Markup:
    header = (
        "Partition",
        *(f"Broker {broker.id}{NOTES[broker.state]}" for broker in brokers),
        "High watermark",
        "Leader epoch",
        "Trouble",
    )
    return _table(label, header, [_partition_row(each) for each in partitions])


@lru_cache(maxsize=ROWS_KEPT)
def _partition_row(partition: PartitionView) -> Markup:
    return element(
        "tr",
        element("th", str(partition.name), scope="row"),
        [_cell(cell) for cell in partition.cells],
        _number(partition.end),
        _number(partition.leader_epoch),
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


def failover_sections(timeline: Timeline | None, stories: Sequence[Story], query: Query) -> Sections:
    """`stories` are those of the query's topic, oldest first."""
    if timeline is None:
        return {"missing": _section("missing"), "failovers": _section("failovers")}
    missing = [
        element("li", f"The entries of broker {broker_id} are missing: {reason}")
        for broker_id, reason in timeline.missing.items()
    ]
    number, pages, shown = page_of(stories[::-1], query.page, STORIES_A_PAGE)
    told = [_story(story, is_open=story is stories[-1]) for story in shown]
    return {
        "missing": _section("missing", element("ul", missing) if missing else None),
        "failovers": _section(
            "failovers",
            _pager("/failovers", query, number, pages, counted(len(stories), "failover")),
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


def _story(story: Story, is_open: bool) -> Markup:
    identity = f"failover-{story.began_ms}"
    steps = [
        element(
            "tr",
            _number(index),
            element("td", f"+{milliseconds(step.at_ms)}", class_="number"),
            _number(step.broker),
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
        element("h2", story.title[:1].upper() + story.title[1:], id=identity),
        element("p", f"{date_and_time(story.began_ms)}", class_="when"),
        element("p", story.ending(), class_="bad" if story.leaderless else None),
        element("div", drawing(story), class_="scroll", tabindex=0, role="region", aria_label="Time axis"),
        element(
            "details",
            element("summary", f"{counted(len(story.steps), 'step')} in words"),
            _table("Steps", ("Step", "Time", "By broker", "What happened"), steps),
            id=f"steps-{story.began_ms}",
            open=is_open,
        ),
        aria_labelledby=identity,
    )


# --- Groups ----------------------------------------------------------------------------------------------------------


def group_sections(groups: Groups | None, query: Query) -> Sections:
    if groups is None:
        return {"failed": _section("failed"), "groups": _section("groups")}
    problems = [f"Group {group} could not be read: {error}" for group, error in groups.failed.items()]
    problems += [f"Broker {broker} did not list its groups." for broker in groups.silent]
    number, pages, _ = page_of(range(groups.selected), query.page, GROUPS_A_PAGE)
    return {
        "failed": _section("failed", element("ul", [element("li", text) for text in problems]) if problems else None),
        "groups": _section(
            "groups",
            _pager("/groups", query, number, pages, counted(groups.selected, "group")),
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
            _number(None if each.committed is None else each.committed.offset),
            _number(each.end_offset),
            _number(each.lag),
        )
        for each in details.partitions[:LAGS_A_PAGE]
    ]
    rest = len(details.partitions) - len(lags)
    header = ("Partition", "Member", "Committed", "High watermark", "Lag")
    return element(
        "article",
        element("h2", group.group),
        element("p", " · ".join(facts)),
        _table("Members", ("Client", "Member", "Host", "Partitions", "Lag"), members) if members else None,
        _table("Partitions", header, lags) if lags else None,
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
        _number(None if member.partitions is None else len(member.partitions)),
        _number(sum(max(0, lag) for lag in lags) if lags else None),
    )


# --- Parts -----------------------------------------------------------------------------------------------------------


def _section(name: str, *contents: Content, **attributes: str) -> Markup:
    return element("section", *contents, id=f"section-{name}", **attributes)


def _table(label: str, header: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """Return a table that scrolls by itself, also by keyboard, if the window is narrow."""
    table = element(
        "table",
        element(
            "thead",
            element(
                "tr",
                [element("th", name, scope="col", class_="number" if name in NUMBERS else None) for name in header],
            ),
        ),
        element("tbody", rows),
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _number(value: int | None) -> Markup:
    return element("td", "–" if value is None else f"{value:,}", class_="number")


def topic_form(path: str, query: Query, topics: Iterable[str]) -> Markup:
    """Return the filter, which stands outside the sections, so that news do not disturb typing."""
    return element(
        "form",
        element(
            "label", "Topic ", element("input", name="topic", value=query.topic, list="topics", autocomplete="off")
        ),
        element("datalist", [element("option", value=name) for name in topics], id="topics"),
        element("button", "Show"),
        element("a", "all topics", href=path) if query.topic else None,
        action=path,
        role="search",
    )


def _pager(path: str, query: Query, number: int, pages: int, count: str) -> Markup:
    if pages == 1:
        return element("p", count)
    links: list[Content] = [f"{count}, page {number} of {pages}"]
    if number > 1:
        links.append(element("a", "previous page", href=address(path, query._replace(page=number - 1)), rel="prev"))
    if number < pages:
        links.append(element("a", "next page", href=address(path, query._replace(page=number + 1)), rel="next"))
    return element("p", [markup(link, " ") for link in links], class_="pager")


def address(path: str, query: Query) -> str:
    """Return the address of a page with this query."""
    chosen = {"topic": query.topic, "group": query.group}
    chosen |= {"page": str(query.page) if query.page > 1 else "", "internal": "1" if query.internal else ""}
    text = urlencode({name: value for name, value in chosen.items() if value})
    return f"{path}?{text}" if text else path

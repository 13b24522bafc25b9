"""The overview, the failovers and the groups as HTML. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from minibroker.client.administering.groups import GroupRebalance, MemberDescription
from minibroker.client.administering.movements import Movement, progress
from minibroker.client.cli.group_details import GroupDetails, PartitionLag
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.unfinished import interruptions
from minibroker.client.cli.timelines.words import clock_time, date_and_time, milliseconds, time_of_day
from minibroker.deploy.console.chart import drawing
from minibroker.deploy.console.faults import Applied, causes_of, consequences_of, may_cause
from minibroker.deploy.console.markup import Content, Markup, element, in_words
from minibroker.deploy.console.parts import Sections, address, capitalized, number, pager, section, table
from minibroker.deploy.console.plots import figure, within
from minibroker.deploy.console.state import ClusterState, Groups, Timeline, lag_of
from minibroker.deploy.console.views import (
    CUT_APART,
    GROUPS_A_PAGE,
    NO_LEADER,
    NOT_COPYING,
    OUT_OF_SYNC,
    SILENT_LEADER,
    SLOW_IN_SYNC,
    SLOW_LEADER,
    UNDER_MIN_ISR,
    BrokerView,
    Cell,
    PartitionView,
    Query,
    overview,
    page_of,
)
from minibroker.deploy.observing.cluster_view import SLOW_AFTER_S
from minibroker.deploy.observing.status import Status
from minibroker.deploy.observing.status_screen import MANY_LOSSES, fault_lines, problem_lines
from minibroker.protocol.words import counted, in_bytes, listed

ROWS_KEPT = 2_000
"""Rows of partitions that have not changed are rendered once."""

STORIES_A_PAGE = 10
FAULTS_SHOWN = 10
INTERRUPTIONS_SHOWN = 10
MOVES_SHOWN = 20
LAGS_A_PAGE = 100

SYMBOLS = {
    "leader": "★",
    "in sync": "✓",
    "out of sync": "✗",
    "alive": "✓",
    "silent": "?",
    "slow": "?",
    "paused": "?",
    "out": "✗",
    "dead": "✗",
}
"""No state is shown by colour alone."""
STATES = {
    "alive": "alive",
    "silent": "does not answer",
    "slow": "slow to answer",
    "paused": "paused",
    "out": "runs, out of the cluster",
    "dead": "dead",
}
NOTES = {state: "" if state == "alive" else f" ({words.removeprefix('runs, ')})" for state, words in STATES.items()}
UNCERTAIN = ("silent", "slow", "paused")
UNWELL = {"paused": "paused", "silent": "without an answer", "slow": "slow to answer"}
"""Of living brokers, in the summary."""
CLASSES = dict.fromkeys(UNCERTAIN, "silent") | {"alive": "alive", "out": "dead", "dead": "dead"}
OVERDUE_S = 5.0
"""A session that has not ended so long after its timeout is kept alive by the heartbeats of its broker."""
ROWS = {
    **dict.fromkeys((NO_LEADER, SILENT_LEADER, UNDER_MIN_ISR), "bad"),
    **dict.fromkeys((NOT_COPYING, CUT_APART, SLOW_LEADER, SLOW_IN_SYNC, OUT_OF_SYNC), "warn"),
}


# --- Overview --------------------------------------------------------------------------------------------------------


def problem_section(
    health: Status | None, error: str | None, is_checking: bool = False, as_of_ms: int | None = None
) -> Sections:
    """Return what `minibroker status` says of problems, of acks=all that took long, which is none of them, and of the
    faults that were ordered. `error`: why that is not known. `is_checking`: it is being found out. `as_of_ms`: it is of
    that time, and older than the rest of the page."""
    if is_checking:
        return {"problems": section("problems", element("p", "Checking for problems …", class_="legend"))}
    problems = [] if health is None else problem_lines(health)
    as_of = "" if as_of_ms is None else f", as of {time_of_day(as_of_ms)}"
    slow_commits = [] if health is None else [pastable(line) for line in health.slow_commit_lines()]
    faults = [] if health is None else fault_lines(health)
    if error is not None:
        problems.append(f"what `minibroker status` knows cannot be shown: {error}")
    return {
        "problems": section(
            "problems",
            [element("h2", counted(len(problems), "problem") + as_of), _lines(problems)] if problems else None,
            [element("h2", "Slow acks=all"), _lines(slow_commits)] if slow_commits else None,
            [element("h2", "Injected faults"), _lines(faults)] if faults else None,
        )
    }


def _lines(texts: Sequence[str]) -> Markup:
    """Show sentences as `minibroker status` prints them, not capitalized: some begin with the name of a topic."""
    return element("ul", [element("li", in_words(text)) for text in texts])


def overview_sections(
    state: ClusterState | None,
    query: Query,
    health: Status | None = None,
    is_checking: bool = False,
    as_of_ms: int | None = None,
) -> Sections:
    """`health`: see `views.overview`. `is_checking`: it is being found out. `as_of_ms`: no broker answers any more, and
    the state is of that time."""
    if state is None:
        return {name: section(name) for name in ("summary", "brokers", "moves", "troubles", "partitions")}
    view = overview(state, query, health if as_of_ms is None else None)
    as_of = "" if as_of_ms is None else f", as of {time_of_day(as_of_ms)}"
    epoch = state.description.controller_epoch
    living = [broker.state for broker in view.brokers if broker.address and broker.state != "dead"]
    unwell = "".join(
        f", {living.count(state)} {words}" for state, words in UNWELL.items() if state in living and not as_of
    )
    partitions_seen = sum(len(topic.partitions) for topic in state.topics.values())
    facts = [
        ("Controller", view.controller + ("" if epoch is None else f", epoch {epoch}")),
        (
            "Brokers",
            f"{len(living)} of {len(view.brokers)} {'alive' if not as_of else 'were alive'}{unwell}",
        ),
        ("Partitions", f"{partitions_seen:,}{' seen, and maybe others' if state.hides_topics else ''}"),
        ("Cluster", view.cluster_id),
    ]
    if view.troubles:
        said = ", ".join(f"{count:,} {trouble}" for trouble, count in view.trouble_counts)
        rest = sum(count for _, count in view.trouble_counts) - len(view.troubles)
        troubles = [
            element("h2", f"Partitions in trouble{as_of}: {said}"),
            _partition_table(view.troubles, view.brokers, "Partitions in trouble"),
            element("p", f"and {rest:,} more") if rest else None,
        ]
    elif as_of or is_checking or state.hides_topics or (health is not None and health.is_any_partition_in_trouble):
        troubles = []  # the two looks are seconds apart, and the problems above say what is known
    else:
        troubles = [element("p", "✓ Every partition has a leader, and all replicas are in sync.", class_="good")]
    if query.topic:
        heading = f"Partitions of {query.topic}{as_of}"
        empty = f"There is no topic {query.topic!r}."
    else:
        heading, empty = f"All partitions{as_of}", "There is no topic yet: `minibroker topics create NAME` creates one."
    if state.hides_topics:
        empty = f"This console sees no topic{f' {query.topic!r}' if query.topic else ''}: it may not see all of them."
    elif is_checking and not query.topic:
        empty = "No topic is seen."
    partitions = [
        element("h2", heading),
        _internal_link(query, view.internal) if not query.topic else None,
        pager("/", query, view.page, view.pages, f"{view.selected:,} partitions"),
        _partition_table(view.partitions, view.brokers, heading) if view.partitions else element("p", in_words(empty)),
    ]
    return {
        "summary": section(
            "summary", element("dl", [element("div", element("dt", name), element("dd", text)) for name, text in facts])
        ),
        "brokers": section(
            "brokers",
            element("h2", f"Brokers{as_of}"),
            _broker_table(view.brokers, as_of_ms is None, state.hides_topics),
            None if as_of else _legend_of(view.brokers),
        ),
        "moves": section("moves", _move_table(view.moves)),
        "troubles": section("troubles", *troubles),
        "partitions": section("partitions", *partitions),
    }


def _broker_table(brokers: Sequence[BrokerView], is_live: bool, hides_topics: bool) -> Markup:
    """With `hides_topics`, what is counted is not known."""
    are_ill = is_live and any(broker.faults for broker in brokers)
    rows = [
        element(
            "tr",
            element("th", broker.id, scope="row"),
            element("td", _state_words(broker, is_live), class_=CLASSES[broker.state] if is_live else "silent"),
            element("td", "; ".join(broker.faults) or "–", class_="reason") if are_ill else None,
            element("td", broker.address or "–"),
            element(
                "td",
                session_words(broker) if is_live else "–",
                class_="reason silent" if is_live and broker.state in UNCERTAIN else "reason",
            ),
            element("td", "controller" if broker.is_controller else ""),
            number(None if hides_topics else broker.leads),
            number(None if hides_topics else broker.in_sync),
            element("td", f"{broker.out_of_sync:,}", class_="number out-of-sync")
            if broker.out_of_sync
            else number(None if hides_topics else 0),
        )
        for broker in brokers
    ]
    ill = ("Injected faults",) if are_ill else ()
    header = ("Broker", "State", *ill, "Address", "ZooKeeper session", "Office", "Leads", "In sync", "Out of sync")
    return table("Brokers", header, rows)


def _state_words(broker: BrokerView, is_live: bool) -> str:
    if not is_live:
        return f"? was {STATES[broker.state]}" if broker.state == "alive" else f"? was: {STATES[broker.state]}"
    is_out = broker.state == "paused" and not broker.address
    return f"{SYMBOLS[broker.state]} {STATES[broker.state]}{' (out of the cluster)' if is_out else ''}"


def session_words(broker: BrokerView) -> Content:
    session = broker.session
    if not broker.address:
        if session.answered_at_ms is None:
            return "none"
        return f"over; last answer at {time_of_day(session.answered_at_ms)}"
    if broker.state in ("alive", "slow") or session.unanswered_for_s is None:
        late = f"; it answers, but not within {SLOW_AFTER_S:g} s" if broker.state == "slow" else ""
        if broker.is_without_zookeeper:
            late = "; no connection to ZooKeeper"
        elif broker.zookeeper_losses >= MANY_LOSSES:
            late = f"; lost touch with ZooKeeper {broker.zookeeper_losses} times in the last minute"
        return ("registered" if session.timeout_s is None else f"registered, timeout {session.timeout_s:g} s") + late
    if session.answered_ago_s is None:
        words = ["no answer for at least ", _passing(session.unanswered_for_s, 1)]
    else:
        words = ["last heard ", _passing(session.answered_ago_s, 1), " ago"]
    if broker.zookeeper_trouble:
        return [*words, f"; no session ends while ZooKeeper {broker.zookeeper_trouble}"]
    if session.ends_in_s is None:
        return [*words, "; its timeout is not known"]
    if session.ends_in_s < -OVERDUE_S:
        slow = "it is slow, or " if broker.state == "silent" else ""
        return [*words, f"; still registered: {slow}ZooKeeper ends no sessions"]
    if session.ends_in_s < 0:
        return [*words, "; session should have ended ", _passing(-session.ends_in_s, 1), " ago"]
    return [*words, "; session ends in ", _passing(session.ends_in_s, -1)]


def _passing(seconds: float, per_second: int) -> Content:
    """Return seconds that the page's script counts up or down between two readings."""
    return [element("span", f"{seconds:.1f}", data_per_second=per_second), " s"]


def _legend_of(brokers: Sequence[BrokerView]) -> Markup | None:
    are_ending = any(broker.address and broker.state in ("silent", "paused", "dead") for broker in brokers)
    return _SESSION_LEGEND if are_ending else None


_SESSION_LEGEND = element(
    "p",
    "Measured: when a broker last answered this console. Derived: when ZooKeeper ends its session, from its "
    "zookeeper.session.timeout.ms (if unknown, from that of the other brokers) and the first question without an "
    "answer. The session can end a third of the timeout earlier or one tick of ZooKeeper later. It does not end while "
    "the broker sends heartbeats to ZooKeeper.",
    class_="legend",
)


def _move_table(moves: Sequence[Movement]) -> Content:
    if not moves:
        return None
    known = [(move.moved, move.left) for move in moves]
    moved, left = sum(each or 0 for each, _ in known), sum(each or 0 for _, each in known)
    unknown = sum(each is None for each, _ in known)
    heading = f"Reassignments: {counted(len(moves), 'partition')}, {in_bytes(moved)} moved, {in_bytes(left)} left" + (
        f", {unknown:,} unknown" if unknown else ""
    )
    rows = [
        element(
            "tr",
            element("th", str(move.name), scope="row"),
            element(
                "td",
                listed(
                    f"broker {copy.broker}" + ("" if copy.moved is None else f" ({in_bytes(copy.moved)})")
                    for copy in move.copies
                ),
            ),
            element("td", listed(f"broker {broker}" for broker in move.removing) or "–"),
            element("td", "–" if move.moved is None else in_bytes(move.moved), class_="number"),
            element("td", "–" if move.left is None else in_bytes(move.left), class_="number"),
            element("td", _share(move), class_="number"),
        )
        for move in moves[:MOVES_SHOWN]
    ]
    rest = len(moves) - len(rows)
    return [
        element("h2", heading),
        table("Reassignments", ("Partition", "To", "From", "Moved", "Left", "Done"), rows),
        element("p", f"and {rest:,} more") if rest else None,
        element("p", "By the sizes of the logs: those of the new replicas against the leader's.", class_="legend"),
    ]


def _share(move: Movement) -> str:
    return "–" if move.moved is None else f"{progress([move]).percent} %"


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
            class_="reason",
        ),
        class_=ROWS.get(partition.trouble),
    )


def _cell(cell: Cell) -> Markup:
    if not cell.role:
        return element("td", class_="none")
    behind = f", {cell.behind:,} behind" if cell.behind else ""
    if cell.doubt:
        return element("td", f"? {cell.role}, {cell.doubt}{behind}", class_="silent")
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
        return {name: section(name) for name in ("missing", "faults", "interruptions", "failovers")}
    missing = [
        element("li", in_words(f"The entries of broker {broker_id} are missing: {reason}"))
        for broker_id, reason in timeline.missing.items()
    ]
    at, pages, shown = page_of(stories[::-1], query.page, STORIES_A_PAGE)
    told = [_story(story, story is stories[-1], causes_of(story, faults)) for story in shown]
    return {
        "missing": section("missing", element("ul", missing) if missing else None),
        "faults": section("faults", _fault_table(faults, stories)),
        "interruptions": section("interruptions", _interruption_list(timeline)),
        "failovers": section(
            "failovers",
            pager("/failovers", query, at, pages, counted(len(stories), "failover"))
            if stories or not missing
            else None,
            _LEGEND if told else None,
            told
            or element("p", _NO_FAILOVER if not missing else _NO_ENTRIES if not timeline.entries else _SOME_ENTRIES),
        ),
    }


_NO_FAILOVER = "No failover is recorded: no broker was lost, and the controller never changed."
_NO_ENTRIES = "No failover is known: no broker's entries could be read."
_SOME_ENTRIES = "No failover is known: the entries that are missing may have some."
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
    faults = [fault for fault in faults if may_cause(fault)]
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
                element("td", "under way" if fault.said is None else in_words(fault.said), class_="reason"),
                element("td", element("ul", links) if links else "–"),
            )
        )
    return [
        element("h2", "Faults from this console"),
        table("Faults from this console", ("When (UTC)", "Command", "Outcome", "Followed by"), rows),
    ]


def _interruption_list(timeline: Timeline) -> Content:
    told = interruptions(timeline.entries, INTERRUPTIONS_SHOWN)
    if not told:
        return None
    return [
        element("h2", "Brokers that stood still or had no ZooKeeper"),
        element("ul", [element("li", capitalized(text)) for text in told]),
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


_NO_GROUP = "There is no consumer group."
_NO_GROUP_SEEN = "This console sees no consumer group: it may not Describe the cluster, and so not all groups."
LagsOf = Callable[[str], Sequence[tuple[float, int | None]]]
"""Returns the lags of a group with their times, by the wall clock. None: it was not known."""


def group_sections(groups: Groups | None, query: Query, lags_of: LagsOf, now_s: float) -> Sections:
    """`now_s` is of the wall clock."""
    if groups is None:
        return {"failed": section("failed"), "groups": section("groups")}
    problems = [f"Group {group} could not be read: {error}" for group, error in groups.failed.items()]
    problems += [f"Broker {broker} did not list its groups." for broker in groups.silent]
    problems += groups.missing_rights
    at, pages, _ = page_of(range(groups.selected), query.page, GROUPS_A_PAGE)
    return {
        "failed": section(
            "failed", element("ul", [element("li", in_words(text)) for text in problems]) if problems else None
        ),
        "groups": section(
            "groups",
            pager("/groups", query, at, pages, counted(groups.selected, "group")),
            [_group(each, lags_of(each.group.group), now_s) for each in groups.details]
            or element("p", (_NO_GROUP_SEEN if groups.hides_groups else _NO_GROUP) if groups.selected == 0 else None),
        ),
    }


def _group(details: GroupDetails, sampled: Sequence[tuple[float, int | None]], now_s: float) -> Markup:
    group, lag = details.group, lag_of(details)
    facts = [
        group.state,
        counted(len(group.members), "member"),
        "lag unknown" if lag is None else f"lag {lag:,}",
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
    lags_known = within(sampled, now_s)
    if lag is None:
        lags_known.append((0.0, None))
    rest = len(details.partitions) - len(lags)
    header = ("Partition", "Member", "Committed", "High watermark", "Lag")
    return element(
        "article",
        element("h2", group.group),
        element("p", " · ".join(facts)),
        figure(f"lag-{group.group}", "Lag in the last ten minutes", "records", lags_known),
        table("Members", ("Client", "Member", "Host", "Partitions", "Lag"), members) if members else None,
        table("Partitions", header, lags) if lags else None,
        element("p", in_words(f"and {rest:,} more partitions: `minibroker groups describe` shows all"))
        if rest
        else None,
        _rebalances(group.rebalances, group.coordinator.node_id),
    )


def _rebalances(rebalances: Sequence[GroupRebalance], coordinator: int) -> Content:
    remembered = f"as broker {coordinator} remembers them since it became the coordinator"
    if not rebalances:
        return element("p", f"No rebalance, {remembered}.", class_="legend")
    rows = [
        element(
            "tr",
            element("td", f"{clock_time(each.time_ms)} UTC", class_="time"),
            number(each.generation),
            element("td", "–" if each.took_ms is None else milliseconds(each.took_ms), class_="number"),
            element("td", each.reason, class_="reason"),
        )
        for each in reversed(rebalances)
    ]
    return [
        element("p", f"The last rebalances, {remembered}:", class_="legend"),
        table("Rebalances", ("When", "Generation", "Took", "Reason"), rows),
    ]


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

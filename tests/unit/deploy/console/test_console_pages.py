"""The console's pages as text, from values."""

from __future__ import annotations

import html as entities
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from minibroker import application
from minibroker.client.administering.groups import GroupDescription, GroupRebalance, MemberDescription
from minibroker.client.administering.requests import BrokerDescription, ClusterDescription
from minibroker.client.administering.timeline import Entry
from minibroker.client.administering.topics import PartitionDescription, TopicDescription
from minibroker.client.cli.group_details import GroupDetails, PartitionLag
from minibroker.client.cli.terminal.output import run_app
from minibroker.client.cli.timelines.story import Step, Story
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.settings import Address
from minibroker.deploy.console import command, pages
from minibroker.deploy.console.chart import LEFT, RADIUS, RIGHT, WIDTH, chart_of
from minibroker.deploy.console.markup import Markup, element, in_words, markup
from minibroker.deploy.console.parts import Sections, content, frame, notice, topic_form
from minibroker.deploy.console.sessions import Contacts, Session
from minibroker.deploy.console.state import ClusterState, Groups, Move, Timeline
from minibroker.deploy.console.views import (
    CUT,
    Cell,
    Query,
    overview,
    shown_partitions,
    signs_of,
    still_true,
    without_dead,
)
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.observing.followers import SlowCommits, SlowFollower
from minibroker.deploy.observing.status import BrokerStatus, ControllerStatus, Status, ZooKeeperStatus
from minibroker.protocol.faults import Faults, Link
from minibroker.protocol.model import TopicPartition

EVIL = "<script>alert('1')</script>\"&\x1b"


def _partition(number: int, leader: int | None, replicas: Sequence[int], isr: Sequence[int]) -> PartitionDescription:
    return PartitionDescription(number, leader, 3, tuple(replicas), tuple(isr), ())


def _topic(name: str, *partitions: PartitionDescription) -> TopicDescription:
    return TopicDescription(name, f"id of {name}", name.startswith("__"), partitions)


def _state(*topics: TopicDescription, alive: Sequence[int] = (1, 2, 3), silent: Sequence[int] = ()) -> ClusterState:
    names = [TopicPartition(topic.name, each.partition) for topic in topics for each in topic.partitions]
    return ClusterState(
        ClusterDescription("cluster", 1, tuple(BrokerDescription(b, "127.0.0.1", 9090 + b, None) for b in alive), 7),
        {topic.name: topic for topic in topics},
        {broker: dict.fromkeys(names, 0) for broker in alive if broker not in silent},
        dict.fromkeys(names, 12_345),
        {topic.name: 2 for topic in topics},
    )


def _story(*steps: tuple[float, int, str], led_ms: float | None = 100.0, title: str = "broker 1 was lost") -> Story:
    told = tuple(Step(at_ms, broker, 2, event, f"step of {event}") for at_ms, broker, event in steps)
    return Story(title, 1_795_343_400_000, told, 1, (), led_ms, led_ms)


def _page(path: str, sections: Sections, events: str, form: Markup | None = None) -> str:
    before, after = frame(path, events, {path: EVIL})
    return before + content(sections, form) + after


def _is_well_formed(html: str) -> bool:
    """Whether each element is closed, apart from those that HTML never closes."""
    closed = re.sub(r"<((?:input|link|meta)\b[^>]*)>", r"<\1/>", html)
    for attribute in ("open", "defer"):
        closed = closed.replace(f" {attribute}>", f' {attribute}="">')
    ElementTree.fromstring(closed.removeprefix("<!doctype html>\n"))
    return True


# -- text of strangers --


def test_text_is_escaped_in_elements_and_attributes_and_markup_is_not() -> None:
    assert element("p", EVIL, title=EVIL) == (
        '<p title="&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;\\x1b">'
        "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;\\x1b</p>"
    )
    assert element("p", element("b", "x"), None, [1, "<"]) == "<p><b>x</b>1&lt;</p>"
    assert isinstance(markup("<"), Markup)


def test_attributes_without_a_value_are_left_out() -> None:
    assert element("details", open=True, id=None, hidden=False, data_x="1", class_="y") == (
        '<details open data-x="1" class="y"></details>'
    )


def test_no_page_runs_what_strangers_have_named() -> None:
    partition = TopicPartition(EVIL, 0)
    member = MemberDescription(EVIL, EVIL, EVIL, EVIL, (EVIL,), (partition,))
    coordinator = Coordinator(1, Address("127.0.0.1", 9092))
    rebalance = GroupRebalance(0, 1, EVIL, None)
    group = GroupDescription(EVIL, EVIL, "consumer", EVIL, coordinator, (member,), (rebalance,))
    lag = PartitionLag(partition, OffsetAndMetadata(1, None, EVIL), 2, EVIL)
    groups = Groups((GroupDetails(group, (lag,)),), {EVIL: EVIL}, 1, ())
    state = _state(_topic(EVIL, _partition(0, None, [1, 2], [])))
    story = _story((0.0, 1, EVIL), title=EVIL)
    shown = {
        "/": pages.overview_sections(state, Query(topic=EVIL)),
        "/failovers": pages.failover_sections(Timeline(1, [], {1: EVIL}), [story], Query(topic=EVIL)),
        "/groups": pages.group_sections(groups, Query(), lambda _: [(9.0, 5)], 10.0),
    }
    for path, sections in shown.items():
        form = topic_form(path, Query(topic=EVIL), [EVIL])
        html = _page(path, {"notice": notice(EVIL, True), **sections}, f"/events?{EVIL}", form)
        assert "<script>" not in html
        assert "alert(&#x27;1" in html
        assert _is_well_formed(html)


def test_pages_have_no_inline_style_or_script_and_load_nothing_from_elsewhere() -> None:
    sections = pages.failover_sections(Timeline(1, [], {}), [_story((0.0, 1, "BrokerSuspected"))], Query())
    html = _page("/failovers", sections, "/events/failovers")
    assert re.findall(r"\bstyle=|<style|\bon\w+=|javascript:", html) == []
    assert all(address.startswith(("/", "#")) for address in re.findall(r'(?:href|src|action)="([^"]*)"', html))
    assert re.findall(r"<script[^>]*>", html) == ['<script src="/static/console.js" defer>']


# -- the overview --


def test_the_worst_trouble_of_a_partition_is_named_and_counted() -> None:
    state = _state(
        _topic(
            "orders",
            _partition(0, 1, [1, 2, 3], [1, 2, 3]),
            _partition(1, None, [2, 3], []),
            _partition(2, 1, [1, 2, 3], [1]),
            _partition(3, 1, [1, 2, 3], [1, 2]),
            _partition(4, 3, [3, 1], [3, 1]),
            _partition(5, 1, [1], [1]),
        ),
        alive=(1, 3),
        silent=(3,),
    )
    view = overview(state, Query())
    assert [each.trouble for each in view.partitions] == [
        "",
        "no leader",
        "under min.insync.replicas",
        "out of sync",
        "leader does not answer",
        "",
    ]
    assert view.partitions[2].detail == "1 in sync, 2 required; out of sync: brokers 2 and 3"
    assert view.partitions[3].detail == "broker 3"
    assert [each.name.partition for each in view.troubles] == [1, 4, 2, 3]
    assert dict(view.trouble_counts) == dict.fromkeys(
        ("no leader", "leader does not answer", "under min.insync.replicas", "out of sync"), 1
    )
    assert [(each.id, each.state) for each in view.brokers] == [(1, "alive"), (2, "dead"), (3, "silent")]


def test_a_cell_says_the_role_of_the_replica_and_how_far_it_is_behind() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1, 2])), alive=(1, 2, 3, 4))
    name = TopicPartition("orders", 0)
    state = state._replace(behind={1: {name: 5}, 2: {name: 0}, 3: {name: 1_234}, 4: {}})
    (partition,) = overview(state, Query()).partitions
    assert partition.cells == (Cell("leader", None), Cell("in sync", 0), Cell("out of sync", 1_234), Cell("", None))
    html = pages.overview_sections(state, Query())["partitions"]
    assert "✗ out of sync, 1,234 behind" in html
    assert "12,345" in html


def test_a_broker_that_does_not_answer_counts_down_to_the_end_of_its_session() -> None:
    contacts = Contacts()
    contacts.asked({1: True, 2: True, 3: False}, 99.0, 99.1, 1_795_343_400_000)
    contacts.learn(1, 6.0)
    contacts.learn(2, None)
    contacts.asked({1: True, 2: False, 3: False}, 100.0, 101.0, 1_795_343_402_000)
    contacts.asked({1: True, 2: False, 3: False}, 101.5, 102.5, 1_795_343_403_500)
    sessions = {broker: contacts.session(broker, 102.6) for broker in (1, 2, 3, 4)}
    assert sessions[2].answered_ago_s == pytest.approx(3.5)
    assert sessions[2].ends_in_s == pytest.approx(3.4)  # from the first question without an answer

    def shown(state: ClusterState) -> list[str]:
        html = pages.overview_sections(state, Query())["brokers"]
        rows = re.findall(r"<tr>(<th scope=\"row\">.*?)</tr>", html)
        return [re.sub(r"<.*?>", "", row.split("</td>")[2]) for row in rows]

    topic = _topic("orders", _partition(0, 1, [1, 2, 3, 4], [1]))
    state = _state(topic, silent=(2, 3))._replace(sessions=sessions)
    assert shown(state) == [
        "registered, timeout 6 s",
        "last heard 3.5 s ago; session ends in 3.4 s",
        "no answer for at least 3.6 s; session ends in 2.4 s",
        "none",
    ]
    html = pages.overview_sections(state, Query())["brokers"]
    assert '<span data-per-second="-1">3.4</span>' in html
    assert "Measured: " in html
    assert "Measured: " not in pages.overview_sections(_state(topic), Query())["brokers"]

    late = {broker: contacts.session(broker, 108.0) for broker in (1, 2, 3)}
    assert shown(state._replace(sessions=late))[1].endswith("; session should have ended 2.0 s ago")
    dead = _state(topic, alive=(1, 3))._replace(sessions=sessions)
    assert shown(dead)[1] == "over; last answer at 10:30:00 UTC"


def test_a_broker_that_answers_without_zookeeper_has_no_connection_to_it() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1])))
    health = Status([], ControllerStatus(1, 1), None, [], [], cut_from_zookeeper=[2])
    html = pages.overview_sections(state, Query(), health=health)["brokers"]
    assert html.count("; no connection to ZooKeeper") == 1
    often = replace(health, brokers=_status(zookeeper_losses=4).brokers, cut_from_zookeeper=[])
    html = pages.overview_sections(state, Query(), health=often)["brokers"]
    assert html.count("; lost touch with ZooKeeper 4 times in the last minute") == 1


def test_a_session_that_outlives_its_timeout_is_of_a_slow_broker_or_zookeeper_is_away() -> None:
    session = Session(26.0, 26.0, 6.0, 0)
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1])), silent=(2,))._replace(sessions={2: session})
    assert "it is slow, or ZooKeeper ends no sessions" in pages.overview_sections(state, Query())["brokers"]
    soon = state._replace(sessions={2: session._replace(unanswered_for_s=8.0)})
    assert "session should have ended" in pages.overview_sections(soon, Query())["brokers"]


def test_a_broker_whose_process_has_ended_is_dead_before_its_session_ends() -> None:
    """Which ZooKeeper does not end while it is paused, as is known before the next look at the cluster's health."""
    description, topics = without_dead(
        ClusterDescription("cluster", 2, _state().description.brokers, 7),
        {"orders": _topic("orders", _partition(0, 2, [1, 2, 3], [1, 2, 3]), _partition(1, 1, [1, 2], [1, 2]))},
        {2},
    )
    state = _state(*topics.values(), silent=(2,))._replace(
        description=description, gone=frozenset({2}), sessions={2: Session(2.0, 1.0, 6.0, 0)}
    )
    health = replace(_status(), zookeeper=ZooKeeperStatus("127.0.0.1:2181", 1, True, False, False))
    assert [each.state for each in overview(state, Query(), health).brokers] == ["alive", "dead", "alive"]
    sections = pages.overview_sections(state, Query(), still_true(health, state))
    assert "; session ends in " in sections["brokers"]
    assert "2 of 3 alive" in sections["summary"]
    assert "<dd>none, epoch 7</dd>" in sections["summary"]
    assert "1 no leader" in sections["troubles"]
    for process, trouble in ((ProcessState.PAUSED, "is paused"), (ProcessState.GONE, "is not running")):
        later = still_true(health, state._replace(zookeeper=process))
        brokers = pages.overview_sections(state, Query(), later)["brokers"]
        assert f"; no session ends while ZooKeeper {trouble}" in brokers
        assert later.problems()[0].startswith(f"ZooKeeper {trouble}, so no leader and no controller can be elected: ")
    assert still_true(later, state._replace(zookeeper=ProcessState.RUNNING)).problems()[0].startswith("broker 2 ")


@pytest.mark.parametrize(
    ("alive", "paused", "words"), [((1, 3), (2,), "? paused (out of the cluster)"), ((1, 2, 3), (2,), "? paused<")]
)
def test_a_paused_broker_is_neither_dead_nor_silent(
    alive: tuple[int, ...], paused: tuple[int, ...], words: str
) -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1])), alive=alive, silent=(2,))
    html = pages.overview_sections(state._replace(paused=frozenset(paused)), Query())["brokers"]
    assert words in html
    assert "✗ dead" not in html
    assert (
        "does not answer" not in pages.overview_sections(state._replace(paused=frozenset(paused)), Query())["brokers"]
    )


def test_the_summary_counts_the_living_that_do_not_work_as_well() -> None:
    topic = _topic("orders", _partition(0, 1, [1, 2, 3, 4, 5], [1]))
    state = _state(topic, alive=(1, 2, 3, 4), silent=(2, 3, 4))._replace(paused=frozenset({2, 5}))
    summary = pages.overview_sections(state, Query(), _status(slow_answer_s=1.5))["summary"]
    assert "<dd>4 of 5 alive, 1 paused, 2 without an answer</dd>" in summary
    slow = pages.overview_sections(state._replace(paused=frozenset()), Query(), _status(slow_answer_s=1.5))["summary"]
    assert "<dd>4 of 5 alive, 2 without an answer, 1 slow to answer</dd>" in slow


def _status(**of_2: Any) -> Status:
    brokers = [BrokerStatus(id, 100 + id, True, 9090 + id, False, True, 1) for id in (1, 2, 3)]
    brokers[1] = replace(brokers[1], **of_2)
    return Status(brokers, ControllerStatus(1, 7), None, [], [])


def test_a_broker_is_slow_if_status_has_waited_for_its_answer_and_else_silent() -> None:
    """One that has answered status at once, some seconds ago, may have hung since."""
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1])), silent=(2,))
    slow = _status(slow_answer_s=1.5)
    for health, said in ((slow, "slow"), (_status(), "silent"), (_status(silent=True), "silent"), (None, "silent")):
        assert overview(state, Query(), health).brokers[1].state == said


def test_of_a_slow_leader_nothing_worse_is_said_than_that_it_is_slow() -> None:
    state = _state(
        _topic("orders", _partition(0, 2, [1, 2, 3], [1, 2, 3]), _partition(1, 2, [1, 2, 3], [2])), silent=(2,)
    )
    for health, said in (
        (_status(slow_answer_s=1.5), ["leader is slow to answer", "under min.insync.replicas"]),
        (_status(silent=True), ["leader does not answer"] * 2),
    ):
        assert [each.trouble for each in overview(state, Query(), health).partitions] == said
    follower = _state(_topic("orders", _partition(0, 1, [1, 2], [1, 2])), silent=(2,))
    for state_of_2, slow_s, words in (
        (follower, 1.5, "slow to answer"),
        (follower, None, "does not answer"),
        (follower._replace(paused=frozenset({2})), None, "paused"),
        (follower._replace(gone=frozenset({2})), None, "dead"),
    ):
        sections = pages.overview_sections(state_of_2, Query(), _status(slow_answer_s=slow_s))
        assert f"? in sync, {words}<" in sections["partitions"]
        assert f" {words}<" in sections["brokers"], "the same words for the broker"
    slow = overview(state, Query(), _status(slow_answer_s=1.5)).brokers[1]
    session = Session(3.0, 2.0, 6.0, None)
    counting = markup(pages.session_words(slow._replace(state="silent", session=session)))
    assert "session ends in" in counting
    shown = markup(pages.session_words(slow._replace(session=session)))
    assert shown == "registered, timeout 6 s; it answers, but not within 1 s"


def test_the_overview_names_the_problems_of_status_and_the_injected_faults() -> None:
    health = _status(alive=False, last_error="log directory /x: [Errno 28] No space left on device")
    health = replace(health, faults={2: ["the disk of /x is full <&>"]})
    html = pages.problem_section(health, None)["problems"]
    assert "1 problem" in html
    assert "<code>minibroker heal 2</code>, then <code>minibroker start 2</code>" in html
    assert "is full &lt;&amp;&gt;: <code>minibroker heal 2</code>" in html
    assert pages.problem_section(_status(), None)["problems"] == '<section id="section-problems"></section>'
    assert "no cluster" in pages.problem_section(None, "there is no cluster")["problems"]


def test_a_process_that_runs_without_being_registered_is_not_called_dead() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1])), alive=(1,))._replace(
        running=frozenset({1, 2}), faults={2: Faults(is_isolated=True)}
    )
    assert [each.state for each in overview(state, Query()).brokers] == ["alive", "out", "dead"]
    html = pages.overview_sections(state, Query())["brokers"]
    assert "✗ runs, out of the cluster</td>" in html
    assert "it is isolated</td>" in html


def test_problems_that_a_newer_state_contradicts_are_not_shown() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1, 3]), _partition(1, None, [2], [2])), alive=(1, 3))
    health = replace(
        _status(silent=True, unanswered_partitions=["orders-0"]),
        offline_partitions=["orders-0", "orders-1", "gone-0"],
        stalled_partitions={"orders-0": [2, 3], "orders-1": [1]},
    )
    told = still_true(health, state)
    assert told.problems()[0].startswith("broker 2 runs but does not answer and is not in the cluster: ")
    assert told.offline_partitions == ["orders-1"]
    assert told.stalled_partitions == {"orders-0": [3]}
    unknown = still_true(replace(health, offline_partitions=None, stalled_partitions=None), state)
    assert (unknown.offline_partitions, unknown.stalled_partitions) == (None, None)


def test_replicas_that_are_in_sync_since_are_not_said_to_be_missing() -> None:
    names = [f"orders-{number}" for number in range(3)]
    health = replace(
        _status(), under_replicated_partitions=names, at_min_isr_partitions=names, under_min_isr_partitions=names
    )
    isrs = ([1, 2, 3], [1, 2], [1])
    state = _state(_topic("orders", *(_partition(n, 1, [1, 2, 3], isr) for n, isr in enumerate(isrs))))
    told = still_true(health, state)
    assert (told.under_replicated_partitions, told.at_min_isr_partitions) == (names[1:], names[1:])
    assert told.under_min_isr_partitions == names[2:]
    assert still_true(health, state._replace(min_isr={})).under_min_isr_partitions == names[1:], "it is not known"
    dead = still_true(health, state._replace(gone=frozenset({2})))
    assert dead.under_min_isr_partitions == names[1:]
    moving = state._replace(moves={TopicPartition("orders", 1): Move((3,), (), {})})
    assert still_true(health, moving).under_replicated_partitions == names[2:]


def test_a_process_that_has_ended_or_paused_since_is_not_said_to_run() -> None:
    """`minibroker status` takes seconds, most with a broker that hangs; the pid is known at once."""
    topic = _topic("orders", _partition(0, 2, [1, 2, 3], [1, 2, 3]))
    for alive in ((1, 3), (1, 2, 3)):  # its session ends later
        state = _state(topic, alive=alive, silent=(2,))._replace(running=frozenset({1, 3}))
        killed = still_true(_status(), state._replace(gone=frozenset({2})))
        assert killed.problems() == [
            "broker 2 is not running: `minibroker start 2`",
            "orders-0 with replicas missing from the ISR: `minibroker start 2`, then wait",
        ]
        paused = still_true(_status(), state._replace(paused=frozenset({2})))
        led = ", and leads orders-0, whose writes wait" if 2 in alive else " and not in the cluster"
        assert paused.problems() == [f"broker 2 is paused{led}: `minibroker resume 2`"]
        if 2 in alive:
            assert paused.is_any_partition_in_trouble
            led_by_another = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1, 2, 3])), silent=(2,))
            assert still_true(paused, led_by_another._replace(paused=frozenset({2}))).problems() == [
                "broker 2 is paused, and is in the ISR of orders-0, where acks=all waits: `minibroker resume 2`"
            ]


def test_a_process_that_has_ended_since_is_named_with_its_error_its_faults_and_those_that_ended_before() -> None:
    """Otherwise the first remedy would be one that fails, or does too little."""
    topic = _topic("orders", _partition(0, 1, [1, 2, 3], [1, 2]), _partition(1, None, [2, 3], [2]))
    state = _state(topic, alive=(1,))._replace(running=frozenset({1}), gone=frozenset({2, 3}))
    health = replace(
        _status(),
        under_replicated_partitions=["orders-0", "orders-1"],
        at_min_isr_partitions=["orders-0", "orders-1"],
        missing_replicas=[3],
        under_min_isr_partitions=["orders-0"],
        missing_from_min_isr=[3],
    )
    health = replace(health, brokers=[*health.brokers[:2], replace(health.brokers[2], alive=False)])
    full = "log directory /x: [Errno 28] No space left on device"
    told = still_true(health, state._replace(last_errors={2: full})).problems()
    assert told[0] == f"broker 2 is not running ({full}): free space there, then `minibroker start 2`"
    assert told[2] == "orders-1 without a leader: `minibroker start 2`"
    assert told[3].endswith(": `minibroker start 2` and `minibroker start 3`, then wait")
    assert told[4].startswith("orders-0, orders-1 with replicas missing from the ISR: ")
    assert told[4].endswith(told[3].rpartition(": ")[2])
    ill = still_true(health, state._replace(faults={2: Faults(is_isolated=True)}))
    assert ill.problems()[0].endswith("`minibroker heal 2`, then `minibroker start 2`")
    assert signs_of(state) != signs_of(state._replace(faults={2: Faults(is_isolated=True)}))


def test_a_process_that_was_started_or_resumed_since_is_not_said_to_be_down() -> None:
    topic = _topic("orders", _partition(0, 1, [1, 2, 3], [1, 3]))
    for health in (_status(alive=False, registered=False), _status(paused=True, unanswered_partitions=["orders-0"])):
        for alive in ((1, 3), (1, 2, 3)):
            state = _state(topic, alive=alive)._replace(running=frozenset({1, 2, 3}))
            assert still_true(health, state).problems() == []
        elsewhere = _state(topic, alive=(1, 3))
        assert [each.split(":")[0] for each in still_true(health, elsewhere).problems()] == [
            f"broker 2 is {'paused and not in the cluster' if health.brokers[1].paused else 'not running'}"
        ]


def test_a_missing_broker_elsewhere_that_has_registered_since_is_not_missing() -> None:
    topic = _topic("orders", _partition(0, 1, [1, 2, 3], [1, 3]))
    health = _status(alive=False, registered=False, is_elsewhere=True)
    assert [each.split(",")[0] for each in still_true(health, _state(topic, alive=(1, 3))).problems()] == [
        "broker 2 has replicas"
    ]
    assert still_true(health, _state(topic)).problems() == []


def test_a_broker_that_has_answered_since_is_neither_silent_nor_slow() -> None:
    state = _state(
        _topic("orders", *(_partition(number, leader, [1, 2, 3], [1, 2, 3]) for number, leader in ((0, 2), (1, 1))))
    )
    for health in (
        _status(silent=True, unanswered_partitions=["orders-0"]),
        _status(silent=True, awaited_partitions=["orders-1"]),
        _status(slow_answer_s=1.5),
    ):
        assert len(health.problems()) == 1
        assert still_true(health, state).problems() == []
        assert still_true(health, _state(*state.topics.values(), silent=(2,))).problems() == health.problems()


def test_a_cut_within_the_isr_is_marked_at_once_and_names_no_culprit() -> None:
    """Of a one-way cut, both brokers have the counterpart, and either may be called cut off."""
    state = _state(*(_topic("orders", *(_partition(n, n + 1, [1, 2, 3], [1, 2, 3]) for n in range(2))),))
    links = {2: Faults(links={1: Link(loses_sent=True)}), 1: Faults(links={2: Link(loses_received=True)})}
    cut = state._replace(faults={**links, 3: Faults(delay_ms=9)})
    for partition, doubts in zip(overview(cut, Query()).partitions, (["", CUT, ""], [CUT, "", ""]), strict=True):
        assert [cell.doubt for cell in partition.cells] == doubts
        assert (partition.trouble, partition.detail) == ("cut within the ISR", "the way between brokers 1 and 2 is cut")
    assert "? in sync, cut from the leader" in pages.overview_sections(cut, Query())["partitions"]
    waits = replace(_status(), stalled_partitions={"orders-0": [2]})
    troubles = [each.trouble for each in overview(cut, Query(), waits).partitions]
    assert troubles == ["not copied by the whole ISR", "cut within the ISR"], "of the second, no record waits"


def test_a_follower_in_sync_is_said_not_to_copy_only_if_records_wait_for_it() -> None:
    state = _state(*(_topic("orders", *(_partition(n, n + 1, [1, 2, 3], [1, 2, 3]) for n in range(3))),))
    known = replace(_status(), stalled_partitions={"orders-1": [3], "orders-2": [1, 2]})
    assert overview(state, Query(), known).partitions[2].detail == "broker 1 does not copy; broker 2 does not copy"
    health = replace(known, doubted_stalls=["orders-2"])
    first, second, third = overview(state, Query(), health).partitions
    assert (first.trouble, [cell.doubt for cell in second.cells]) == ("", ["", "", "does not copy"])
    assert (second.trouble, second.detail) == ("not copied by the whole ISR", "broker 3 does not copy")
    assert third.detail == "broker 1 may not copy; broker 2 may not copy", "it is one of them"
    silent = overview(_state(*state.topics.values(), silent=(3,)), Query()).partitions[0]
    assert (silent.trouble, silent.cells[2].doubt) == ("", "does not answer")


def test_a_follower_in_sync_that_lags_is_marked_until_it_has_left_the_isr() -> None:
    state = _state(_topic("orders", *(_partition(n, 1, [1, 2, 3], [1, 2, 3]) for n in range(2))))
    late = SlowFollower(3, ["orders-1"], [1], True, False, 40, 1.5, 0.2)
    health = replace(_status(), slow_followers=[late])
    first, second = overview(state, Query(), health).partitions
    assert (first.trouble, [cell.doubt for cell in second.cells]) == ("", ["", "", "copies slowly"])
    assert (second.trouble, second.detail) == ("copied slowly within the ISR", "broker 3 copies slowly")
    assert still_true(health, state).slow_followers == [late]
    left = _state(_topic("orders", *(_partition(n, 1, [1, 2, 3], [1, 2]) for n in range(2))))
    assert still_true(health, left).slow_followers == []
    assert overview(left, Query(), health).partitions[1].trouble == "out of sync"


def test_the_ends_of_partitions_that_are_unhealthy_are_read_wherever_they_are() -> None:
    """The first page is full of healthy ones."""
    state = _state(_topic("orders", *(_partition(n, 1, [1, 2], [1, 2]) for n in range(200))))
    health = replace(_status(), stalled_partitions={"orders-150": [2]})
    assert TopicPartition("orders", 150) not in shown_partitions(state, Query())
    assert TopicPartition("orders", 150) in shown_partitions(state, Query(), health)
    assert [each.end for each in overview(state, Query(), health).troubles] == [12_345]


def test_a_leader_that_is_slow_by_a_fault_is_named_with_it() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2], [1, 2])), silent=(1,))
    (partition,) = overview(state._replace(faults={1: Faults(delay_ms=2_000)}), Query()).partitions
    assert partition.trouble == "leader does not answer"
    assert partition.detail == "injected faults of broker 1: each packet that it sends takes 2000 ms longer"


def test_nothing_is_said_to_be_in_order_while_a_problem_of_partitions_is_listed() -> None:
    state = _state(_topic("orders", _partition(0, 1, [1, 2], [1, 2])))
    assert "✓ Every partition" in pages.overview_sections(state, Query(), _status())["troubles"]
    for health in (
        replace(_status(), offline_partitions=["orders-0"]),
        replace(_status(), under_replicated_partitions=["orders-0"]),
        replace(_status(), under_min_isr_partitions=["orders-0"]),
        replace(_status(), slow_followers=[SlowFollower(2, ["orders-0"], [1], True, False, 40, 1.5, 0.2)]),
        _status(paused=True, unanswered_partitions=["orders-0"]),
        replace(_status(), offline_partitions=None),
    ):
        assert health.problems()
        assert "✓" not in pages.overview_sections(state, Query(), health)["troubles"]


def test_a_console_that_may_not_see_all_topics_does_not_say_that_there_is_none_or_that_all_is_well() -> None:
    hidden = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1, 2, 3])))._replace(hides_topics=True)
    sections = pages.overview_sections(hidden, Query(), _status())
    assert "✓" not in sections["troubles"]
    assert "1 seen, and maybe others" in sections["summary"]
    assert '<td class="number">0</td>' not in sections["brokers"]
    sections = pages.overview_sections(hidden._replace(topics={}), Query(), _status())
    assert "This console sees no topic: it may not see all of them." in sections["partitions"]
    assert "There is no topic yet" in pages.overview_sections(_state(), Query(), _status())["partitions"]
    for hides_groups, said in ((True, "may not Describe the cluster"), (False, "There is no consumer group.")):
        groups = Groups((), {}, 0, (), hides_groups)
        assert said in pages.group_sections(groups, Query(), lambda _: [], 10.0)["groups"]
    refused = pages.failover_sections(Timeline(1, [], {1: "refused"}), [], Query())["failovers"]
    assert "No failover is known: no broker's entries could be read." in entities.unescape(refused)
    assert "0 failovers" not in refused
    some: Entry = {"number": 1, "time_ms": 0, "epoch": 1, "controller": 1, "event": "Startup", "cause": "start"}
    partly = pages.failover_sections(Timeline(1, [some], {2: "refused"}), [], Query())["failovers"]
    assert "No failover is known: the entries that are missing may have some." in partly
    assert "No failover is recorded" in pages.failover_sections(Timeline(1, [], {}), [], Query())["failovers"]


def test_what_is_being_found_out_is_neither_a_problem_nor_in_order() -> None:
    assert "Checking for problems" in pages.problem_section(None, None, True)["problems"]
    assert "✓" not in pages.overview_sections(_state(), Query(), None, True)["troubles"]


def test_words_show_commands_as_such_and_of_links_to_documents_only_the_words() -> None:
    assert in_words("see `minibroker logs 2` and [Access <control>](access-control.md#users).") == (
        "see <code>minibroker logs 2</code> and Access &lt;control&gt;."
    )
    assert in_words("one ` alone, and [a] (b)") == "one ` alone, and [a] (b)"
    assert in_words("`a` and one ` alone") == "<code>a</code> and one ` alone"
    html = pages.overview_sections(_state(), Query())["partitions"]
    assert "<code>minibroker topics create NAME</code>" in html


def test_a_problem_that_begins_with_the_name_of_a_topic_keeps_it() -> None:
    health = replace(_status(), offline_partitions=["orders-0"])
    html = pages.problem_section(health, None)["problems"]
    assert "<li>orders-0 without a leader" in html
    assert "Orders" not in html


def test_a_slow_acks_all_is_no_problem_as_for_minibroker_status() -> None:
    health = replace(_status(), slow_commits=[SlowCommits(2, ["orders-0"], [1], 2.3)])
    assert health.problems() == []
    html = pages.problem_section(health, None)["problems"]
    assert html.startswith('<section id="section-problems"><h2>Slow acks=all</h2><ul><li>acks=all took up to 2.3 s in ')
    html = pages.problem_section(replace(health, offline_partitions=["orders-1"]), None)["problems"]
    assert re.findall("<h2>(.*?)</h2>", html) == ["1 problem", "Slow acks=all"]


def test_an_answer_to_a_later_question_outweighs_a_question_that_is_still_open() -> None:
    contacts = Contacts()
    contacts.asked({1: True}, 10.5, 10.6, 0)
    contacts.asked({1: False}, 10.0, 11.0, 0)
    assert contacts.session(1, 12.0).unanswered_for_s is None
    contacts.asked({1: False}, 11.0, 12.0, 0)
    assert contacts.session(1, 12.0).unanswered_for_s == 1.0
    contacts.asked({1: True}, 12.0, 12.1, 0)
    assert contacts.session(1, 13.0).answered_ago_s == pytest.approx(0.9)
    assert contacts.session(1, 13.0).unanswered_for_s is None


def test_a_broker_that_nobody_asked_was_not_heard_either() -> None:
    contacts = Contacts()
    contacts.asked({1: True, 2: True, 3: False}, 0.0, 0.1, 1_795_343_400_000)
    contacts.asked({1: True}, 5.0, 5.1, 1_795_343_405_000)
    contacts.asked({1: True, 2: False}, 10.0, 11.0, 1_795_343_410_000)  # it was started again
    assert contacts.session(2, 11.0) == Session(None, 1.0, None, 1_795_343_400_000)
    contacts.asked({1: False, 2: False}, 20.1, 21.0, 1_795_343_420_000)  # after a rest
    for broker in (1, 2):
        session = contacts.session(broker, 21.1)
        assert session.answered_ago_s is None
        assert session.unanswered_for_s == pytest.approx(1.0)


def test_brokers_are_silent_only_while_others_answer() -> None:
    contacts = Contacts()
    found = []
    for at_s, answers in enumerate(
        ({1: True, 2: False, 3: True}, {}, {1: True, 2: True, 3: False}, {1: True, 2: True}, {1: False, 2: False})
    ):
        if answers:
            contacts.asked(answers, float(at_s), at_s + 0.5, 0)
        else:
            contacts.lost()
        found.append(contacts.silent)
    assert found == [(2,), (), (3,), (), ()]


def test_a_timeout_is_asked_for_again_when_the_broker_comes_back() -> None:
    contacts = Contacts()
    contacts.learn(1, 6.0)
    contacts.learn(2, None)
    assert contacts.unknown([1, 2, 3]) == [3]
    contacts.asked({2: True}, 0.0, 0.1, 0)
    assert contacts.unknown([1, 2]) == [1]


def test_a_reassignment_shows_the_bytes_that_are_moved_and_left() -> None:
    topic = _topic("orders", *(_partition(number, 1, [1, 2, 3], [1]) for number in range(3)))
    names = [TopicPartition("orders", number) for number in range(3)]
    state = _state(topic, alive=(1, 2, 3), silent=(3,))._replace(
        moves={
            names[0]: Move((2,), (1,), {1: 2_000_000, 2: 500_000}),
            names[1]: Move((2, 3), (), {1: 1_000, 2: 1_000}),
            names[2]: Move((2,), (), {1: 0}),
            TopicPartition("deleted", 0): Move((2,), (), {}),
        }
    )
    view = overview(state, Query())
    assert [(each.moved, each.left) for each in view.moves] == [(500_000, 1_500_000), (None, None), (0, 0)]
    assert view.troubles[0].detail == "1 in sync, 2 required; out of sync: brokers 2 and 3"
    html = pages.overview_sections(state, Query())["moves"]
    assert "Reassignments: 3 partitions, 500.0 kB moved, 1.5 MB left, 1 unknown" in html
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", html)
    assert [[cell for cell in re.sub(r"<.*?>", "|", row).split("|") if cell] for row in rows] == [
        ["orders-0", "broker 2 (500.0 kB)", "broker 1", "500.0 kB", "1.5 MB", "25 %"],
        ["orders-1", "broker 2 (1.0 kB) and broker 3", "–", "–", "–", "–"],
        ["orders-2", "broker 2 (0 bytes)", "–", "0 bytes", "0 bytes", "100 %"],
    ]
    assert pages.overview_sections(_state(topic), Query())["moves"] == '<section id="section-moves"></section>'


def test_a_replica_that_is_being_copied_is_not_said_to_have_fallen_behind() -> None:
    name = TopicPartition("orders", 0)
    state = _state(_topic("orders", _partition(0, 1, [1, 2, 3], [1, 2])))
    assert overview(state, Query()).troubles[0].detail == "broker 3"
    for adding, detail in (((3,), "broker 3, being reassigned"), ((2,), "broker 3")):
        moving = state._replace(moves={name: Move(adding, (), {})})
        assert overview(moving, Query()).troubles[0].detail == detail


def test_internal_topics_are_folded_away_but_their_troubles_come_last_in_the_list() -> None:
    state = _state(
        _topic("__consumer_offsets", _partition(0, 1, [1, 2], [1])), _topic("orders", _partition(0, 1, [1, 2], [1]))
    )
    view = overview(state, Query())
    assert [str(each.name) for each in view.partitions] == ["orders-0"]
    assert [str(each.name) for each in view.troubles] == ["orders-0", "__consumer_offsets-0"]
    assert len(overview(state, Query(internal=True)).partitions) == 2
    assert [str(each.name) for each in overview(state, Query(topic="__consumer_offsets")).partitions] == [
        "__consumer_offsets-0"
    ]
    assert 'href="/?internal=1"' in pages.overview_sections(state, Query())["partitions"]


def test_a_thousand_partitions_come_in_pages() -> None:
    state = _state(_topic("orders", *(_partition(number, 1, [1, 2, 3], [1]) for number in range(1_000))))
    view = overview(state, Query(page=10))
    assert (view.page, view.pages, view.selected) == (10, 10, 1_000)
    assert [each.name.partition for each in view.partitions] == list(range(900, 1_000))
    assert overview(state, Query(page=99)).page == 10
    html = markup(pages.overview_sections(state, Query(page=2)).values())
    assert len(html) < 60_000
    assert 'href="/"' in html
    assert 'href="/?page=3"' in html
    assert "and 990 more" in html


def test_ends_are_read_of_the_partitions_on_the_page_and_of_those_in_trouble() -> None:
    healthy = (_partition(number, 1, [1, 2], [1, 2]) for number in range(250))
    state = _state(_topic("orders", *healthy), _topic("other", _partition(0, 1, [1, 2], [1])))
    shown = shown_partitions(state, Query(page=2))
    assert shown == {TopicPartition("orders", n) for n in range(100, 200)} | {TopicPartition("other", 0)}


def test_a_cluster_that_does_not_answer_keeps_its_last_state_on_the_page() -> None:
    assert "last known state" in notice("no answer", True)
    assert "nothing to show yet" in notice("no answer", False)
    assert notice(None, True) == '<section id="section-notice"></section>'
    assert "the last known state, of 10:30:00 UTC." in notice("no answer", True, read_at="10:30:00 UTC")
    at_ms = 1_795_343_400_000
    known = pages.overview_sections(_state(_topic("orders", _partition(0, 1, [1, 2], [1, 2]))), Query(), as_of_ms=at_ms)
    assert "<h2>Brokers, as of 10:30:00 UTC</h2>" in known["brokers"]
    assert "? was alive" in known["brokers"]
    assert "✓ alive" not in known["brokers"]
    assert "registered" not in known["brokers"]
    assert "✓" not in known["troubles"]
    assert "All partitions, as of 10:30:00 UTC" in known["partitions"]
    none_yet = pages.overview_sections(None, Query())
    assert none_yet.keys() == pages.overview_sections(_state(), Query()).keys()


# -- failovers --


def test_marks_lie_on_a_true_time_axis_in_the_lane_of_their_broker() -> None:
    chart = chart_of(
        _story((0.0, 3, "BrokerSuspected"), (50.0, 1, "Startup"), (200.0, 1, "LeaderAndIsrAnswered"), led_ms=100.0)
    )
    assert [lane.broker for lane in chart.lanes] == [1, 3]
    xs = [mark.x for mark in chart.marks]
    width = WIDTH - LEFT - RIGHT
    assert xs == [LEFT, LEFT + width / 4, LEFT + width]
    assert chart.led_x == LEFT + width / 2
    assert [mark.kind for mark in chart.marks] == ["sign", "work", "answer"]
    assert [text for _, text in chart.ticks] == ["0", "50 ms", "100 ms", "150 ms", "200 ms"]


def test_marks_never_overlap() -> None:
    chart = chart_of(_story(*((float(number // 3), 1, "BrokerChange") for number in range(30)), led_ms=500.0))
    assert len({(mark.x, mark.y) for mark in chart.marks}) == 30
    for one in chart.marks:
        for other in chart.marks:
            assert one is other or abs(one.x - other.x) >= 2 * RADIUS or abs(one.y - other.y) >= 2 * RADIUS
    assert max(mark.y for mark in chart.marks) + RADIUS <= chart.height


def test_a_story_without_any_duration_can_be_drawn() -> None:
    chart = chart_of(_story((0.0, 1, "BrokerChange"), led_ms=None))
    assert chart.led_x is None
    assert len(chart.ticks) == 2


def test_the_newest_failover_comes_first_and_is_open() -> None:
    stories = [_story((0.0, 1, "Startup"), title=f"number {number}")._replace(began_ms=number) for number in range(25)]
    shown = [pages.failover_sections(Timeline(1, [], {}), stories, Query(page=page))["failovers"] for page in (1, 2, 3)]
    assert re.findall(r"Number (\d+)", shown[0]) == [str(number) for number in range(24, 14, -1)]
    assert re.findall(r'<details id="steps-(\d+)" open>', "".join(shown)) == ["24"]
    assert re.findall(r"Number (\d+)", shown[2]) == ["4", "3", "2", "1", "0"]


def test_brokers_that_stood_still_or_had_no_zookeeper_are_listed_above_the_failovers() -> None:
    def entry(at_s: float, broker: int, event: str, **details: Any) -> Entry:
        time_ms = 1_795_343_400_000 + int(1_000 * at_s)
        return {"number": 1, "time_ms": time_ms, "epoch": 1, "controller": broker, "event": event, **details}

    stall = entry(0.5, 2, "BrokerStalled", lasted_ms=2_762.0, unrecorded=3)
    away = entry(9.0, 3, "ZooKeeperAway", lasted_ms=3_012.0)
    recorded = [entry(8.0, 1, "Startup"), away, stall]  # of other controllers' epochs
    shown = pages.failover_sections(Timeline(1, recorded, {}), [], Query())
    assert [*shown] == [*pages.failover_sections(None, [], Query())]
    assert re.findall("<li>(.*?)</li>", shown["interruptions"]) == [
        "Broker 3 had no answer from ZooKeeper for 3,012 ms until 2026-11-22 10:30:09.000 UTC: its session went on, so "
        "it was not replaced.",
        "Broker 2 answered nothing for 2,762 ms until 2026-11-22 10:30:00.500 UTC: its process was stopped or got no "
        "processor. 3 more in the minutes before are not recorded.",
    ]
    many = pages.failover_sections(Timeline(1, [away, *[stall] * 20], {}), [], Query())["interruptions"]
    assert (many.count("<li>"), many.count("answer from ZooKeeper")) == (10, 1)
    none = pages.failover_sections(Timeline(1, [], {}), [], Query())["interruptions"]
    assert none == '<section id="section-interruptions"></section>'


# -- groups --


def test_a_group_shows_members_partitions_and_lag() -> None:
    partitions = tuple(TopicPartition("orders", number) for number in range(2))
    member = MemberDescription("m-1", None, "billing-app", "/10.0.0.1", ("orders",), partitions[:1])
    group = GroupDescription(
        "billing", "Stable", "consumer", "range", Coordinator(2, Address("127.0.0.1", 9093)), (member,)
    )
    lags = (
        PartitionLag(partitions[0], OffsetAndMetadata(1_000), 3_500, "m-1"),
        PartitionLag(partitions[1], None, 7, None),
    )
    groups = Groups((GroupDetails(group, lags),), {}, 25, (4,))
    html = pages.group_sections(groups, Query(page=2), lambda _: (), 0.0)
    assert "No rebalance, as broker 2 remembers them since it became the coordinator." in html["groups"]
    assert groups.lags == {"billing": 2_500}
    assert "Stable · 1 member · lag 2,500 · coordinator broker 2 · 1 partition without a commit" in html["groups"]
    assert html["groups"].count("billing-app") == 2
    assert "25 groups, page 2 of 3" in html["groups"]
    assert "Broker 4 did not list its groups." in html["failed"]
    refused = GroupDetails(group, lags, refused=("orders",))
    assert refused.without_commit == 0
    hidden = groups._replace(details=(refused,), missing_rights=(refused.missing_right("User:bob") or "",))
    html = pages.group_sections(hidden, Query(), lambda _: (), 0.0)
    assert "User:bob may not Describe topic orders" in html["failed"]


def test_a_group_shows_its_lag_over_time_and_its_last_rebalances_with_their_reasons() -> None:
    rebalances = (
        GroupRebalance(1_795_343_400_000, 3, "member a joins", 3_021),
        GroupRebalance(1_795_343_460_000, 4, "member a is gone: no heartbeat for 10000 ms", None),
    )
    coordinator = Coordinator(2, Address("127.0.0.1", 9093))
    group = GroupDescription("billing", "Stable", "consumer", "range", coordinator, (), rebalances)
    lags: dict[str, list[tuple[float, int | None]]] = {"billing": [(0.0, 99_999), (900.0, 40), (995.0, 1_234)]}
    lag = PartitionLag(TopicPartition("orders", 0), OffsetAndMetadata(0, None, ""), 1_234, None)
    groups = Groups((GroupDetails(group, (lag,)),), {}, 1, ())
    unknown = Groups((GroupDetails(group, ()),), {}, 1, ())
    html = pages.group_sections(unknown, Query(), lambda name: lags[name], 1_000.0)["groups"]
    assert "unknown now; 40 to 1,234" in html
    behind = Groups((GroupDetails(group, (lag, lag._replace(end_offset=None))),), {"failed": "no answer"}, 1, ())
    assert behind.lags == {"billing": None, "failed": None}
    html = pages.group_sections(behind, Query(), lambda name: lags[name], 1_000.0)["groups"]
    assert "lag unknown" in html
    assert "unknown now; 40 to 1,234" in html
    html = pages.group_sections(groups, Query(), lambda name: lags[name], 1_000.0)["groups"]
    assert "1,234 records now; 40 to 1,234" in html
    rows = [re.sub(r"<.*?>", "|", row) for row in re.findall(r"<tr>(.*?)</tr>", html.partition("Rebalances")[2])][1:]
    assert [[cell for cell in row.split("|") if cell] for row in rows] == [
        ["10:31:00.000 UTC", "4", "–", "member a is gone: no heartbeat for 10000 ms"],
        ["10:30:00.000 UTC", "3", "3,021 ms", "member a joins"],
    ]


def test_a_command_in_a_message_repeats_the_options_of_the_console(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rights = "acls add --allow-principal User:bob --operation Describe --cluster"
    timeline = Timeline(1, [], {1: f"refused: allow it with `minibroker {rights}`"})
    shown: list[str] = []

    def serve(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        shown.append(entities.unescape(pages.failover_sections(timeline, [], Query())["missing"]))
        shown.append(in_words("`minibroker --command-config mine status --bootstrap host:1`"))

    monkeypatch.setattr(command, "run", serve)
    file = tmp_path / "bob.properties"
    file.write_text("security.protocol=PLAINTEXT\n")
    assert run_app(application(), ["--command-config", str(file), "console", "--bootstrap", "host:1"]) == 0
    assert f"<code>minibroker --command-config ADMIN_FILE {rights} --bootstrap host:1</code>" in shown[0]
    assert shown[1] == "<code>minibroker --command-config mine status --bootstrap host:1</code>"

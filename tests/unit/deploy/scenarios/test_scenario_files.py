"""Scenario files: what is read, and what each mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minibroker.deploy.local.who import FollowerOf
from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.document import ScenarioError, lines_of
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.words import (
    ACTIONS,
    EVENTS,
    FAULTS,
    parse_action,
    parse_event,
    parse_target,
)
from minibroker.deploy.times import parse_time
from minibroker.protocol.model import TopicPartition

GOOD = """\
name = "A test"
about = '''
[not a header]
at = "1 s"
'''

[[topics]]
name = "orders"

[[clients]]
name = "shop"
produces = "orders"

[[steps]]
at = "1 s"
do = "kill leader:orders-0"
as = "victim"

[[steps]]
when = "orders-0 has 2 in its ISR"
do = ["start victim", "elect preferred"]

[expect]
longest_stall = "500 ms"
"""


def read(text: str) -> Scenario:
    return read_scenario(text, "x.toml")


def test_a_file_becomes_values_with_defaults() -> None:
    scenario = read(GOOD)
    assert (scenario.brokers, scenario.topics[0].partitions, scenario.topics[0].replicas) == (3, 3, 3)
    assert [step.line for step in scenario.steps] == [14, 19]
    assert scenario.steps[0].at_s == 1.0
    when = scenario.steps[1].when
    assert when is not None
    assert (when.partition, when.words["count"]) == (TopicPartition("orders", 0), "2")
    assert scenario.expect.longest_stall_s == 0.5
    assert scenario.expect.nothing_lost


def test_lines_are_found_beside_texts_of_several_lines() -> None:
    lines = lines_of(GOOD)
    assert lines["steps", 1, "when"] == 20
    assert ("not a header",) not in lines
    assert lines["expect", "longest_stall"] == 24


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('at = "1 s"\ndo', 'at = "1 sec"\ndo', 15, 'at = "1 sec": a time is a number with ms, s, min or h'),
        ("leader:orders-0", "leader:orders", 16, "leader:TOPIC-PARTITION is expected"),
        ("kill leader", "shoot leader", 16, "this is not an action; write kill WHO | stop WHO"),
        ("kill leader:orders-0", "kill -9 1", 16, "this is not an action; write kill WHO"),
        ("has 2 in its ISR", "has two in its ISR", 20, "this is not an event; write"),
        ("has 2 in its ISR", "hsa 2", 20, "this is not an event; write"),
        ("longest_stall", "longest_stal", 24, "expect has no longest_stal; did you mean longest_stall?"),
        ('"500 ms"', "500", 24, 'longest_stall = 500: give a text in quotes, as in longest_stall = "..."'),
        ("start victim", "start culprit", 21, "culprit is no broker"),
        ('produces = "orders"', 'produces = "order"', 12, 'produces = "order": there is no such topic; give one'),
        ("kill leader:orders-0", "kill leader:orders-3", 16, "no partition orders-3; the partitions are orders-0 to"),
        ("kill leader:orders-0", "kill 4", 16, "there is no broker 4; the brokers are 1 to 3"),
        ('produces = "orders"', "", 11, "this client does nothing"),
        ('name = "orders"', 'name = "or ders"', 8, "name = "),
        ('as = "victim"', 'after = "1 s"\nas = "victim"', 17, "a step has one of at"),
        ('as = "victim"', 'within = "1 s"\nas = "victim"', 17, "it limits the wait for an event"),
        ('s]]\nname = "orders"', 's]]\nname = "orders"\nreplicas = 4', 9, "replicas = 4: give a whole number from 1"),
        ('[[topics]]\nname', '[[topic]]\nname', 7, "the scenario has no topic; did you mean topics?"),
        ('name = "shop"', 'name = "shop"\nacks = "most"', 12, 'acks = "most": give one of "all", "1", "0"'),
        ('name = "shop"', 'name = "shop"\nacks = 1', 12, 'acks = 1: give one of "all", "1", "0"; did you mean "1"?'),
        ('name = "shop"', 'name = "shop"\ntransaction_records = 2', 12, "it means nothing without transactional_id"),
        ('name = "shop"', 'name = "shop"\ngroup = "g"', 12, "it means nothing without consumes: give consumes"),
        ('name = "orders"', 'name = "orders"\nconfigs = { "min.isr" = 2 }', 9, "topic setting 'min.isr' is not known"),
        ("[[topics]]", '[cluster]\nsettings = { "replica.lag.max" = 1 }\n[[topics]]', 8, "did you mean replica.lag"),
        ("[[topics]]", '[cluster.settings]\n"num.io.threads" = "few"\n[[topics]]', 8, "num.io.threads='few': give"),
        ("[[topics]]", '[cluster.settings]\n"log.dirs" = "/a"\n[[topics]]', 8, "log.dirs is set by the runner"),
        ("kill leader:orders-0", "kill coordinator:nope", 16, "no client has the group nope; give a client group"),
        ("kill leader:orders-0", "pause transactions:nope", 16, "no client has the transactional id nope"),
        ("kill leader:orders-0", "kill leader:__nope-0", 16, "there is no partition __nope-0"),
        ("kill leader:orders-0", "kill leader:__consumer_offsets-1", 16, "no partition __consumer_offsets-1"),
        ("kill leader:orders-0", "cut 1 from 1", 16, "1 cannot be cut from itself"),
        ("kill leader:orders-0", "cut all from 1", 16, "all cannot be cut at once"),
        ("kill leader:orders-0", "cut packets from 1 to 1", 16, "1 cannot be cut from itself"),
        ("kill leader:orders-0", "cut packets from all to 1", 16, "all cannot be cut at once"),
        ("kill leader:orders-0", "cut packets from 1 to zookeeper", 16, "ZooKeeper knows only kill"),
        ("kill leader:orders-0", "isolate zookeeper", 16, "ZooKeeper knows only kill, stop, start, pause, resume"),
        ("kill leader:orders-0", "start controller", 16, "is running already: give a broker id"),
        ("kill leader:orders-0", "set order retention.ms=1", 16, "no topic order; did you mean orders?: the topics"),
        ("kill leader:orders-0", "set orders retention.m=1", 16, "not known; did you mean retention.ms?"),
        ("kill leader:orders-0", "set orders retention.ms=x", 16, "retention.ms='x': give"),
        ("kill leader:orders-0", "reassign orders-0 to 1,9", 16, "there is no broker 9; the brokers are 1 to 3"),
        ("kill leader:orders-0", "reassign orders-0 to 1,1", 16, "broker 1 has one replica of a partition at most"),
        ("kill leader:orders-0", "kill client shp", 16, "there is no client shp; did you mean shop?"),
        ("kill leader:orders-0", "start client shop", 16, "shop is running already"),
        ("kill leader:orders-0", "move leader:orders-0 to another broker", 16, "only coordinators move: give"),
        ('produces = "orders"', 'produces = "orders"\ndialect = "kafka"\nacks = "0"', 14, 'give acks = "all" or "1"'),
        ('produces = "orders"', 'dialect = "kafka"\nconsumes = "orders"\ngroup = "g"', 14, 'leave group out, or give'),
        ("kill leader:orders-0", "elect preferred", 17, 'as = "victim": this step hits no member'),
        ('as = "victim"', 'as = "all"', 17, 'as = "all": a name begins with a letter'),
        ('as = "victim"', 'as = "2"', 17, 'as = "2": a name begins with a letter'),
        ("has 2 in its ISR", "has 4 in its ISR", 20, "has 3 replicas, so that its ISR has at most 3"),
        ("[expect]", "[expect]\nexactly_once = true", 24, "no client processes records"),
        ("[expect]", '[expect]\nlongest_rebalance = "1 s"', 24, "no client is in a group"),
        ("[expect]", '[expect]\nerrors = ["NOT_ENOUGH_REPLICA"]', 24, "; did you mean NOT_ENOUGH_REPLICAS?"),
        ("[expect]", "[expect]\nlost = true\nnothing_lost = true", 24, "nothing_lost = true contradicts it"),
        ("[expect]", "[expect]\neverything_consumed = true", 24, "no client reads records: give one of [[clients]]"),
        ('produces = "orders"', 'consumes = "orders"', 10, "no client sends records, so that no promise could be"),
        ('[[clients]]\nname = "shop"\nproduces = "orders"', "", 1, "there are no clients, so that no promise could"),
        ('name = "shop"', 'name = "shop"\nstarts = "later"', 12, 'no step starts shop: give do = "start client shop"'),
        ("when = ", 'at = "500 ms" #', 20, 'at = "500 ms": steps run in their order, and those before it take 1 s'),
        ("[expect]", '[[steps]]\nafter = "1 s"\ndo = "heal"\n[[steps]]\nat = "1.5 s"\ndo = "heal"\n[expect]', 27,
         'at = "1.5 s": steps run in their order, and those before it take 2 s'),
        ("has 2 in its ISR\"", "has 2 in its ISR\"\nwithin = \"0 s\"", 21, "give a time longer than 0, as in"),
        ('"500 ms"', '"0 ms"', 24, 'longest_stall = "0 ms": give a time longer than 0'),
        ("orders-0 has 2", "orders has 2", 20, "orders is no partition: write TOPIC-NUMBER, as in orders-0"),
        ("kill leader:orders-0", "elect orders unclean", 16, "orders is no partition: write TOPIC-NUMBER, as in"),
        ("[[steps]]\nwhen", "[steps]\nwhen", 19, "may be several steps: write each as [[steps]] with two brackets"),
        ("[[steps]]\nat", "[steps]\nat", 19, "may be several steps: write each as [[steps]] with two brackets"),
        ('name = "A test"', 'name = A test', 1, "not TOML: Invalid value, in column 8;"),
        ("[expect]", "[expect", 23, "not TOML: "),
        ('name = "A test"', "", 1, "the scenario has no name"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line_value_rule_and_remedy(old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as raised:
        read(GOOD.replace(old, new, 1))
    assert str(raised.value).startswith(f"x.toml:{line}: "), raised.value
    assert says in str(raised.value)


def test_a_sentence_that_a_runner_does_not_know_is_told_before_anything_runs() -> None:
    scenario = read(GOOD.replace("kill leader", "power-cut leader"))
    scenario.check_runner("virtual")
    with pytest.raises(ScenarioError, match="x.toml:14: .power-cut leader:orders-0. cannot be done on live processes"):
        scenario.check_runner("live")
    with pytest.raises(ScenarioError, match="isolated: run it with --virtual or --live$"):
        read(GOOD.replace("kill leader", "fill disk of leader")).check_runner("containers")
    with pytest.raises(ScenarioError, match="x.toml:8: brokers = 4: docker-compose.yml has 3 brokers: give 3 or fewer"):
        read(GOOD.replace("[[topics]]", "[cluster]\nbrokers = 4\n\n[[topics]]")).check_runner("containers")


def test_a_scenario_in_which_no_step_does_anything_is_known() -> None:
    assert not read(GOOD).is_undisturbed
    steps = GOOD[GOOD.index("[[steps]]") : GOOD.index("[expect]")]
    assert read(GOOD.replace(steps, "")).is_undisturbed
    assert read(GOOD.replace(steps, '[[steps]]\nwhen = "there is a new controller"\n')).is_undisturbed


def test_times_have_units() -> None:
    assert [parse_time(text) for text in ("500 ms", "2s", "1.5 s", "3 min", "5m", "1h")] == [
        0.5,
        2.0,
        1.5,
        180.0,
        300.0,
        3_600.0,
    ]
    with pytest.raises(ValueError, match="a time is a number"):
        parse_time("2")


def test_each_form_is_read_as_itself() -> None:
    """No earlier form takes what is meant for a later one."""
    places = {
        "WHO": "1", "OTHER": "zookeeper", "TIME": "5 ms", "TOPIC": "orders", "SETTING": "retention.ms=1",
        "PARTITION": "orders-0", "BROKERS": "2,1", "CLIENT": "shop", "COUNT": "2", "REQUEST": "LeaderAndIsr",
    }  # fmt: skip
    for form in ACTIONS:
        assert parse_action(" ".join(places.get(word, word) for word in form.sentence.split())).verb == form.verb
    for form in EVENTS:
        assert parse_event(" ".join(places.get(word, word) for word in form.sentence.split())).kind == form.verb
    assert parse_target("follower:orders-1") == FollowerOf(TopicPartition("orders", 1))


def test_every_fault_is_an_action() -> None:
    assert {form.verb for form in ACTIONS} >= FAULTS


def test_an_unknown_request_and_an_unknown_file_are_told() -> None:
    with pytest.raises(ValueError, match="there is no request LeaderAndISR: give one of"):
        parse_event("LeaderAndISR is about to arrive")
    with pytest.raises(ScenarioError, match="`minibroker scenario list` prints"):
        shelf.load("no-such-file")


@pytest.mark.parametrize("name", shelf.names())
def test_each_scenario_of_the_library_says_what_it_teaches(name: str) -> None:
    scenario = shelf.load(name)
    assert len(scenario.about.split()) > 30
    assert scenario.clients


def test_the_file_of_the_documentation_can_be_read_and_its_mistakes_are_told_as_shown() -> None:
    page = (Path(__file__).parents[4] / "docs/scenarios.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert [step.name for step in read_scenario(text, "leader.toml").steps] == ["victim", None, None]
    for old, new in (('at = "1 s"', 'at = "2 sec"'), ('consumes = "orders"', 'consumes = "orders"\ndialect = "kafka"')):
        with pytest.raises(ScenarioError) as raised:
            read_scenario(text.replace(old, new), "leader.toml")
        assert f"    {raised.value}\n" in page
    with pytest.raises(ScenarioError) as raised:
        shelf.load("full-disk").check_runner("containers")
    assert f"    {raised.value}\n" in page

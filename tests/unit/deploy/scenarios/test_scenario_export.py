"""Scenarios as modules of tests, and recorded scenarios."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from minibroker.deploy import journal
from minibroker.deploy.journal import Said
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import Member
from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.export import exported
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.record import Recorded, TopicShape, merged, shapes, verb_of, written
from minibroker.protocol.model import TopicPartition


@pytest.mark.parametrize("name", ["leader-killed", "power-loss-of-all"])
def test_an_exported_module_contains_the_scenario_and_only_tests_that_can_run(name: str) -> None:
    scenario = shelf.load(name)
    module = ast.parse(exported(scenario))
    [assigned] = [node.value for node in module.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(assigned) == scenario.source
    tests = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert [test.endswith("_on_processes") for test in tests] == ([False, True] if name == "leader-killed" else [False])


def test_a_text_with_quotes_and_backslashes_is_exported_unchanged() -> None:
    source = shelf.load("leader-killed").source.replace("die", "d\\\\ie").replace("A leader is", "A 'leader' is")
    module = ast.parse(exported(read_scenario(source, "x.toml")))
    [assigned] = [node.value for node in module.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(assigned) == source


def test_what_was_done_is_written_as_a_scenario_that_finds_the_brokers_by_their_office() -> None:
    recorded = [
        Recorded(100.0, "kill", 2, "leader:orders-0"),
        Recorded(103.5, "start", 2, None),
        Recorded(104.0, "pause", 3, None),
        Recorded(105.0, "kill", "zookeeper", None),
    ]
    scenario = read_scenario(written(3, [TopicShape("orders", 2, 3)], merged(recorded, [])), "recorded.toml")
    scenario.check_runner("live")
    assert [action.text for step in scenario.steps for action in step.actions] == [
        "kill leader:orders-0",
        "start broker-2",
        "pause 3",
        "kill zookeeper",
    ]
    assert [step.at_s for step in scenario.steps] == [1.0, 4.5, 5.0, 6.0]


def said(command: str, at_s: float, members: list[Member], sentence: str | None, **ends: str) -> Said:
    return Said(command, sentence, ends.get("who", ""), ends.get("other"), members, at_s, at_s + 0.1)


def sentences(recorded: list[Recorded], heard: list[Said]) -> list[str]:
    text = written(3, [TopicShape("orders", 2, 3)], merged(recorded, heard))
    scenario = read_scenario(text, "recorded.toml")
    scenario.check_runner("live")
    steps = [action.text for step in scenario.steps for action in step.actions]
    return [*steps, *(line for line in text.splitlines() if line.startswith("#"))]


def test_a_command_is_recorded_in_its_own_words_and_not_again_by_its_effect() -> None:
    recorded = [
        Recorded(100.05, "kill", 2, "controller"),
        Recorded(103.0, "start", 2, None),
        Recorded(104.06, "stop", 1, "controller"),
        Recorded(104.08, "kill", 3, None),
        Recorded(109.0, "kill", 3, "controller"),
    ]
    heard = [
        said("kill leader:orders-0", 100.0, [2], "kill {who}", who="leader:orders-0"),
        said("start 2", 102.95, [2], "start {who}", who="2"),
        said("stop all", 104.0, [1, 2, 3], "stop {who}", who="all"),
        said("kill coordinator:bill\ning", 106.0, [1], "kill {who}", who="coordinator:bill\ning"),
    ]
    assert sentences(recorded, heard) == [
        "kill leader:orders-0",
        "start broker-2",
        "stop all",
        "kill 1",
        "kill controller",  # by no command
        "# minibroker kill coordinator:bill?ing",
    ]


def test_faults_are_recorded_as_sentences_or_else_as_comments() -> None:
    recorded = [Recorded(101.5, "kill", 1, None)]  # the full disk ended it
    heard = [
        said("fault fill-disk 1", 101.0, [1], "fill disk of {who}", who="1"),
        said(
            "fault slow-disk follower:orders-1 200ms",
            102.0,
            [2],
            "slow disk of {who} by 200ms",
            who="follower:orders-1",
        ),
        said("fault cut 2 zookeeper", 103.0, [2, "zookeeper"], "cut {who} from {other}", who="2", other="zookeeper"),
        said(
            "fault cut 1 coordinator:billing",
            104.0,
            [1, 2],
            "cut {who} from {other}",
            who="1",
            other="coordinator:billing",
        ),
        said("fault move-clock 1 5s", 105.0, [1], None, who="1"),
        said("heal all", 106.0, [1], "heal", who="all"),
    ]
    assert sentences(recorded, heard) == [
        "fill disk of 1",
        "slow disk of follower:orders-1 by 200ms",
        "cut broker-2 from zookeeper",
        "heal",
        "# Not recorded, as no sentence does it: minibroker fault cut 1 coordinator:billing",
        "# Not recorded, as no sentence does it: minibroker fault move-clock 1 5s",
    ]


def test_commands_are_noted_only_while_a_recorder_listens(tmp_path: Path) -> None:
    def kill(members: list[Member]) -> list[Member]:
        return journal.done(tmp_path, "kill 2", "kill {who}", lambda: members, "2")

    assert kill([2]) == [2]
    assert journal.read(tmp_path) == []
    journal.begin(tmp_path)
    kill([2])
    kill([])  # it hit nothing
    with (tmp_path / journal.FILE_NAME).open("ab") as file:
        file.write(b'{"command": "ki')
    assert [(each.command, each.who, each.members) for each in journal.read(tmp_path)] == [("kill 2", "2", [2])]
    journal.end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_without_topics_can_be_run_too() -> None:
    assert read_scenario(written(1, [], []), "empty.toml").topics[0].replicas == 1


def test_changes_of_processes_have_the_words_of_the_command_line() -> None:
    running, paused, gone = ProcessState.RUNNING, ProcessState.PAUSED, ProcessState.GONE
    changes = [(running, gone), (paused, gone), (gone, running), (running, paused), (paused, running)]
    assert [verb_of(before, after, False) for before, after in changes] == ["kill", "kill", "start", "pause", "resume"]
    assert verb_of(running, gone, True) == "stop"
    assert verb_of(running, running, True) is None


def test_internal_topics_are_not_recorded() -> None:
    partitions = {TopicPartition("orders", 0): [1, 2], TopicPartition("__consumer_offsets", 0): [1]}
    assert shapes(partitions) == [TopicShape("orders", 1, 2)]

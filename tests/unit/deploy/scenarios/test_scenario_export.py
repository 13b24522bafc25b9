"""Scenarios as modules of tests, and recorded scenarios."""

from __future__ import annotations

import ast

import pytest

from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.export import exported
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.record import Recorded, TopicShape, shapes, verb_of, written
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
    scenario = read_scenario(written(3, [TopicShape("orders", 2, 3)], recorded), "recorded.toml")
    scenario.check_runner("live")
    assert [action.text for step in scenario.steps for action in step.actions] == [
        "kill leader:orders-0",
        "start broker-2",
        "pause 3",
        "kill zookeeper",
    ]
    assert [step.at_s for step in scenario.steps] == [1.0, 4.5, 5.0, 6.0]


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

from __future__ import annotations

from minibroker.deploy.local.processes import Process, ProcessState
from minibroker.deploy.local.supervision import States, changes

OLD, NEW = Process(10, "b"), Process(11, "b")


def lines(before: tuple[Process, ProcessState], now: tuple[Process, ProcessState]) -> list[str]:
    return changes({2: before}, {2: now})


def test_every_change_of_a_process_is_one_line() -> None:
    running, paused, gone = ProcessState.RUNNING, ProcessState.PAUSED, ProcessState.GONE
    assert lines((OLD, running), (OLD, running)) == []
    assert lines((OLD, running), (OLD, gone)) == ["broker 2 is gone: `minibroker start 2` starts it again"]
    assert lines((OLD, running), (OLD, paused)) == ["broker 2 is paused: `minibroker resume 2` resumes it"]
    assert lines((OLD, paused), (OLD, running)) == ["broker 2 continues"]
    assert lines((OLD, gone), (NEW, running)) == ["broker 2 runs again"]
    assert lines((OLD, running), (NEW, running)) == ["broker 2 runs again"]


def test_the_first_look_tells_nothing() -> None:
    first: States = {"zookeeper": (OLD, ProcessState.RUNNING), 1: (None, ProcessState.GONE)}
    assert changes({}, first) == []


def test_zookeeper_is_called_by_its_name() -> None:
    before: States = {"zookeeper": (OLD, ProcessState.RUNNING)}
    now: States = {"zookeeper": (OLD, ProcessState.GONE)}
    assert changes(before, now) == ["ZooKeeper is gone: `minibroker start zookeeper` starts it again"]


def test_members_that_come_and_go_are_named() -> None:
    one: States = {1: (OLD, ProcessState.RUNNING)}
    two: States = {1: (OLD, ProcessState.RUNNING), 4: (NEW, ProcessState.RUNNING)}
    assert changes(one, two) == ["broker 4 was added"]
    assert changes(two, one) == ["broker 4 was removed"]
    stopped: States = {**two, 4: (NEW, ProcessState.GONE)}
    assert changes(two, stopped, [4]) == ["broker 4 is gone and leaves the cluster"]

"""A controller's timeline in words, and the timelines of several brokers merged into one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minibroker import application
from minibroker.client.administering.timeline import Entry, TimelineRead, merged
from minibroker.client.cli.terminal.output import Format, run_app
from minibroker.client.cli.timelines import timeline
from minibroker.client.cli.timelines.failovers import failovers, last_failover
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.timeline import FILE, Known, with_files
from minibroker.client.cli.timelines.unfinished import unfinished
from minibroker.client.cli.timelines.words import SHOWN, entry_lines, sentence, state_lines, tell
from minibroker.controller.decisions.events import WATCHED, BrokerChange, Event, PartitionReassignment
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError

NOON_MS = 1_795_348_800_000


class Recorder:
    """Makes entries as controllers record them. Time is milliseconds after `NOON_MS`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, at_ms: int, controller: int, epoch: int, event: str, **details: Any) -> None:
        entry = {
            "time_ms": NOON_MS + at_ms,
            "controller": controller,
            "epoch": epoch,
            "event": event,
            "cause": f"the cause of {event}",
            "number": len(self.entries) + 1,
            "total_ms": 0.0,
        }
        self.entries.append(entry | details)

    def answer(self, at_ms: int, controller: int, epoch: int, request: str, broker: int, took_ms: float) -> None:
        self.add(
            at_ms,
            controller,
            epoch,
            f"{request}Answered",
            request=request,
            broker=broker,
            took_ms=took_ms,
            partitions=2,
        )


def state(partition: str, leader: tuple[int, int], isr: tuple[list[int], list[int]], at_ms: float = 20.0) -> Any:
    return {
        "at_ms": at_ms,
        "partition": partition,
        "leader": leader[1],
        "leader_before": leader[0],
        "isr": isr[1],
        "isr_before": isr[0],
        "leader_epoch": 4,
        "version": 8,
        "version_before": 7,
    }


def order(request: str, broker: int, partitions: int = 2) -> Any:
    return {"at_ms": 21.0, "request": request, "broker": broker, "partitions": partitions}


def controller_failover() -> Recorder:
    """Broker 1, controller of epoch 5, is killed at 0 ms; it led a-0, and was in sync in a-1."""
    recorder = Recorder()
    recorder.add(-90_000, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    recorder.add(0, 2, 5, "ControllerSuspected", broker=1, reason="host:1: it refuses connections", lasted_ms=40.0)
    recorder.add(3, 2, 5, "ControllerRemoved", broker=1, writes=["remove /controller (of epoch 5)"])
    recorder.add(
        10,
        3,
        6,
        "Startup",
        epoch_version=9,
        total_ms=22.0,
        read_at_ms=12.0,
        brokers=[1, 2, 3],
        unreachable=[1],
        topics=1,
        partitions=2,
        writes=["remove /brokers/ids/1 (epoch 77)"],
        states=[state("a-0", (1, 2), ([1, 2, 3], [2, 3])), state("a-1", (2, 2), ([1, 2, 3], [2, 3]))],
        sent=[order("UpdateMetadata", 2, 0), order("LeaderAndIsr", 2), order("LeaderAndIsr", 3)],
    )
    recorder.answer(38, 3, 6, "LeaderAndIsr", 3, took_ms=6.5)
    recorder.answer(40, 3, 6, "LeaderAndIsr", 2, took_ms=8.5)
    return recorder


def test_a_timeline_that_all_brokers_refuse_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    refused = BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "User:bob may not Describe the cluster")
    gone = NetworkError("it is not alive")
    with pytest.raises(BrokerError, match="User:bob may not Describe"):
        with_files(TimelineRead((), {1: gone, 2: refused}), None, 0)
    assert with_files(TimelineRead((), {1: gone}), None, 0) == ([], False)


@pytest.mark.parametrize("words", [[], ["--last-failover"], ["--failovers"]], ids=" ".join)
def test_a_timeline_that_some_brokers_refuse_names_them_and_the_right_and_ends_with_code_4(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = "`minibroker acls add --allow-principal User:bob --operation Describe --cluster`"
    refused = BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, f"User:bob may not Describe Cluster: {right}")
    errors = {1: NetworkError("it is not alive"), 2: refused, 3: refused}
    found = TimelineRead(tuple(controller_failover().entries), errors)

    async def read(*_: object) -> Known:
        return Known(*with_files(found, None, 0))

    monkeypatch.setattr(timeline, "_read", read)
    assert run_app(application(), ["timeline", *words, "--bootstrap", "host:1"]) == 4
    printed = capsys.readouterr()
    assert "LeaderAndIsr" in printed.out or "broker 1 was lost" in printed.out
    missing = printed.err.splitlines()
    assert missing[0] == "the entries of broker 1 are missing: it is not alive"
    assert missing[1].startswith("the entries of brokers 2 and 3 are missing: CLUSTER_AUTHORIZATION_FAILED: User:bob")
    assert "acls add --allow-principal User:bob --operation Describe --cluster --bootstrap host:1`" in missing[1]
    recorder = Recorder()
    recorder.add(0, 1, 1, "ControllerElected")
    found = TimelineRead(tuple(recorder.entries), {2: refused})
    assert run_app(application(), ["timeline", "--last-failover", "--bootstrap", "host:1"]) == 1
    assert "no failover is known: some entries are missing" in capsys.readouterr().err


def test_a_lost_broker_whose_loss_is_not_recorded_yet_is_told_with_the_last_failover(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = controller_failover()
    recorder.add(60_000, 3, 6, "BrokerChange", added=[1])
    silent = {2: NetworkError("no answer within 1 s"), 3: BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)}
    told = [*unfinished(recorder.entries, silent, [1, 2, 3], {})]
    assert told == [
        "broker 2 does not answer (no answer within 1 s): if its session with ZooKeeper ends, it is replaced; see "
        "`minibroker status`"
    ]
    gone = {1: NetworkError("it is not alive")}
    assert [sentence.partition(",")[0] for sentence in unfinished(recorder.entries, gone, [2, 3], {})] == [
        "broker 1 has left the cluster"
    ]
    recorder.add(70_000, 3, 6, "BrokerChange", lost=[1], states=[])
    assert [*unfinished(recorder.entries, gone, [2, 3], {})] == []

    async def read(*_: object) -> Known:
        return Known(recorder.entries, False, told)

    monkeypatch.setattr(timeline, "_read", read)
    for words, is_told in (
        (["--last-failover"], True),
        (["--failovers"], True),
        (["--failover", "2"], False),
        ([], False),
    ):
        assert run_app(application(), ["timeline", *words, "--bootstrap", "host:1"]) == 0
        hint = "no later failover is recorded, but broker 2 does not answer"
        assert capsys.readouterr().err.startswith(hint) is is_told
    recorder.entries = []
    assert run_app(application(), ["timeline", "--last-failover", "--bootstrap", "host:1"]) == 1
    assert "; broker 2 does not answer" in capsys.readouterr().err


def test_brokers_without_zookeeper_are_named_with_the_last_failover_as_nothing_is_recorded_then() -> None:
    entries = controller_failover().entries
    assert [*unfinished(entries, {}, [2, 3], {2: 11.6, 3: 11.2})] == [
        "brokers 2 and 3 have had no ZooKeeper for 12 s: nothing can be elected or recorded without it; see "
        "`minibroker status`"
    ]
    silent = {1: NetworkError("no answer within 1 s")}
    assert [sentence.partition(":")[0] for sentence in unfinished(entries, silent, [1, 2], {2: 3.0})] == [
        "broker 2 has had no ZooKeeper for 3 s",
        "broker 1 does not answer (no answer within 1 s)",
    ]
    assert [*unfinished(entries, {}, [2, 3], {3: 4.0})] == [
        "broker 3 has had no ZooKeeper for 4 s: if its session with ZooKeeper ends, it is replaced; see "
        "`minibroker status`"
    ]


def test_the_story_of_a_killed_controller_goes_from_the_first_suspicion_to_the_last_leader() -> None:
    story = last_failover(controller_failover().entries)
    assert story is not None
    assert story.lines() == [
        "The last failover: broker 1 was lost and broker 3 became the controller, at 2026-11-22 11:59:59.960 UTC",
        "   +0.0 ms  The connection of broker 2 to broker 1 is lost.",
        "    +40 ms  Broker 2 cannot reach broker 1, the controller (host:1: it refuses connections, for 40 ms).",
        "    +43 ms  Broker 2 has removed broker 1 from office, so that another can be elected.",
        "                remove /controller (of epoch 5)",
        "    +50 ms  Broker 3 is elected controller: it was the first to create /controller in ZooKeeper. "
        "Its epoch is 6; brokers now reject lower epochs.",
        "                every write checks that /controller_epoch is at version 9",
        "    +62 ms  It has read the cluster from ZooKeeper: 3 brokers, 1 topic and 2 partitions.",
        "    +62 ms  Broker 1 is still registered but unreachable: its registration is removed.",
        "                remove /brokers/ids/1 (epoch 77)",
        "    +70 ms  New leaders are elected for 1 partition, each from the in-sync replicas (the ISR).",
        "                a-0: leader 1 -> 2, in sync 1 2 3 -> 2 3 (leader epoch 4, znode version 7 -> 8)",
        "    +70 ms  In 1 partition the leader stays, and the in-sync replicas change.",
        "                a-1: leader 2, in sync 1 2 3 -> 2 3 (leader epoch 4, znode version 7 -> 8)",
        "    +71 ms  The controller sends the brokers their new roles and the metadata for clients.",
        "                brokers 2 and 3: LeaderAndIsr, 2 partitions",
        "    +78 ms  Broker 3 has assumed its role in 2 partitions, 6 ms after the order was queued.",
        "    +80 ms  Broker 2 has assumed its role in 2 partitions, 8 ms after the order was queued.",
        "In all: 80 ms until the partition was led again.",
    ]
    assert story.lines(short=True) == [line for line in story.lines() if not line.startswith(" " * 12)]
    assert (story.written_ms, story.led_ms, story.elected, story.leaderless) == (70.0, 80.0, 1, ())


def test_a_story_begins_with_the_lost_connection_if_zookeeper_was_away_since() -> None:
    recorder = controller_failover()
    recorder.entries[1]["waited_ms"] = 14_000.0
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.lines(short=True)[:4] == [
        "The last failover: broker 1 was lost and broker 3 became the controller, at 2026-11-22 11:59:45.960 UTC",
        "   +0.0 ms  The connection of broker 2 to broker 1 is lost.",
        "+14,000 ms  ZooKeeper answers broker 2 again. While it was away or slow, nothing could be elected, for up to "
        "14,000 ms.",
        "+14,040 ms  Broker 2 cannot reach broker 1, the controller (host:1: it refuses connections, for 40 ms).",
    ]
    assert story.ending() == "In all: 14,080 ms until the partition was led again."


def test_a_story_ends_with_the_partitions_that_reject_acks_all() -> None:
    recorder = controller_failover()
    short = state("a-0", (1, 2), ([1, 2, 3], [2])) | {"min_isr": 2}
    recorder.entries[-3]["states"] = [short]
    story = last_failover(recorder.entries)
    recorder.add(7_000, 3, 6, "IsrChange", adopted=[short | {"isr": [2, 3], "leader_before": 2, "at_ms": 0.0}])
    recovered = last_failover(recorder.entries)
    assert story is not None
    assert recovered is not None
    assert story.ending() == (
        "In all: 80 ms until the partition was led again. Writes with acks=all are rejected until enough replicas are "
        "in sync (min.insync.replicas): a-0."
    )
    assert recovered.ending() == (
        "In all: 80 ms until the partition was led again. Writes with acks=all were rejected until 7,040 ms, when "
        "enough replicas were in sync (min.insync.replicas): a-0."
    )


def test_an_answer_that_a_busy_controller_hears_late_confirms_its_order() -> None:
    recorder = controller_failover()
    for entry in recorder.entries:
        if entry["event"] == "LeaderAndIsrAnswered":
            entry["time_ms"] += 50  # in no recorded time
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.led_ms is not None


def test_a_leader_that_was_not_in_sync_is_not_said_to_have_been() -> None:
    recorder = controller_failover()
    recorder.entries[-3]["states"] = [state("a-0", (1, 2), ([1], [2]))]
    story = last_failover(recorder.entries)
    assert story is not None
    [elections] = [step for step in story.steps if "elected for" in step.text]
    assert elections.text.endswith(
        "from the in-sync replicas (the ISR) or, if none of these is alive, from the others."
    )


def test_each_step_of_a_story_is_an_object_and_the_whole_is_the_last() -> None:
    story = last_failover(controller_failover().entries)
    assert story is not None
    *steps, whole = story.objects()
    assert [step["event"] for step in steps].count("Startup") == 6
    assert steps[0] == {
        "at_ms": 0.0,
        "broker": 2,
        "epoch": 5,
        "event": "ControllerSuspected",
        "text": "The connection of broker 2 to broker 1 is lost.",
        "details": (),
    }
    assert (whole["event"], whole["led_ms"], whole["began_ms"]) == ("Failover", 80.0, NOON_MS - 40)


def test_the_loss_of_a_broker_that_is_not_the_controller_is_a_failover_too() -> None:
    recorder = controller_failover()
    recorder.add(
        300_000, 3, 6, "BrokerSuspected", broker=2, reason="host:2: it refuses connections", writes=["remove /b"]
    )
    recorder.add(
        300_004,
        3,
        6,
        "BrokerChange",
        lost=[2],
        added=[],
        states=[state("a-0", (2, -1), ([2], []), 2.0), state("a-1", (2, 3), ([2, 3], [3]), 2.0)],
        sent=[order("LeaderAndIsr", 3)],
    )
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 was lost"
    assert [step.event for step in story.steps] == ["BrokerSuspected", "BrokerChange", "BrokerChange", "BrokerChange"]
    assert story.leaderless == ("a-0",)
    assert story.led_ms is None
    assert story.ending() == (
        "In all: 6 ms until 1 partition had a new leader in ZooKeeper; not every leader is recorded as having "
        "confirmed it; without a leader: a-0."
    )


def test_a_controller_that_stops_in_good_order_and_is_gone_later_is_one_story() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 5, "Resignation", cause="the broker stops")
    recorder.add(9, 2, 6, "Startup", brokers=[1, 2], unreachable=[], topics=0, partitions=0, read_at_ms=1.0)
    recorder.add(3_000, 2, 6, "BrokerChange", lost=[1], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    assert [step.event for step in story.steps] == ["Resignation", "Startup", "Startup", "BrokerChange"]
    assert story.ending() == "In all: no partition had to change its leader."


def test_of_brokers_that_hung_a_story_says_by_what_they_were_noticed() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_000, 2, 6, "Startup", brokers=[2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_001, 2, 6, "BrokerChange", lost=[1], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    silent, _, gone = (step.text for step in story.steps)
    assert silent == (
        "Broker 1, the controller until now, has not resigned and was not found unreachable: ZooKeeper ended its "
        "session, `zookeeper.session.timeout.ms` (6 s by default) after its last heartbeat, because it hung, "
        "or was cut off from ZooKeeper, or ZooKeeper was away."
    )
    assert gone == (
        "Broker 1 is gone from the cluster. Its entry in /brokers/ids is no longer there. It is not recorded that "
        "it could not be reached before: ZooKeeper ended its session, `zookeeper.session.timeout.ms` (6 s by default) "
        "after the last heartbeat, because of a hang, because it was cut off from ZooKeeper, or because ZooKeeper was "
        "away."
    )
    recorder.add(90_002, 2, 6, "BrokerSilent", broker=1, lasted_ms=6_100.0)
    heard = last_failover(recorder.entries)
    assert heard is not None
    assert heard.steps[-1].text == (
        "Broker 1 is gone from the cluster. Its entry in /brokers/ids is no longer there. Nothing came from it any "
        "more: ZooKeeper ended its session, `zookeeper.session.timeout.ms` (6 s by default) after the last heartbeat, "
        "because of a hang or a cut network."
    )


def test_a_former_controller_whose_entries_are_missing_is_not_taken_for_an_earlier_one() -> None:
    recorder = Recorder()
    recorder.add(0, 2, 4, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_000, 3, 6, "Startup", brokers=[2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_001, 3, 6, "BrokerChange", lost=[1], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 1 was lost and broker 3 became the controller"
    assert not any("Broker 2" in step.text for step in story.steps)
    recorder.add(89_000, 2, 5, "ControllerSuspected", broker=1, lasted_ms=2.0, cause="refused")
    story = last_failover(sorted(recorder.entries, key=lambda entry: entry["epoch"]))
    assert story is not None
    assert any("of broker 2 to broker 1 is lost" in step.text for step in story.steps)


def test_of_a_controller_that_resigns_after_its_successor_took_office_a_story_says_how_long_it_had_no_zookeeper() -> (
    None
):
    recorder = Recorder()
    recorder.add(0, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    expired = "the ZooKeeper session 0x1 has expired"
    recorder.add(93_000, 1, 5, "Resignation", cause=expired, away_ms=9_100.0)
    recorder.add(90_000, 2, 6, "Startup", brokers=[2, 3], unreachable=[], topics=0, partitions=0)
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 became the controller in the place of broker 1 (no ZooKeeper for 9,100 ms)"
    assert (story.began_ms, story.noticed_late) == (NOON_MS + 83_900, False)
    assert [(step.at_ms, step.text) for step in story.steps[:2]] == [
        (
            0.0,
            "Broker 1 hears from ZooKeeper for the last time. It had no ZooKeeper for 9,100 ms, and its session ended.",
        ),
        (
            6_100.0,
            "Broker 1, the controller until now, had lost its connection to ZooKeeper 6,100 ms before, and was without "
            "it for 9,100 ms.",
        ),
    ]
    recorder.entries[1]["away_ms"] = 20.0  # it hung, and woke up
    hung = last_failover(recorder.entries)
    assert hung is not None
    assert "ZooKeeper ended its session" in hung.steps[0].text


def test_the_story_of_a_broker_that_had_no_zookeeper_says_so_and_begins_then() -> None:
    recorder = Recorder()
    recorder.add(0, 3, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    states = [state("a-0", (2, 3), ([2, 3], [3]), 2.0)]
    recorder.add(90_000, 3, 5, "BrokerChange", lost=[2], added=[], states=states)
    before = last_failover(recorder.entries)
    assert before is not None
    assert (before.title, before.noticed_late) == ("broker 2 was lost", True)
    cause = "the ZooKeeper session of broker 2 has expired"
    recorder.add(190_000, 2, 5, "SessionExpired", cause=cause, away_ms=106_000.0)
    recorder.add(190_010, 3, 5, "BrokerChange", lost=[], added=[2])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 lost the registration and registered again (no ZooKeeper for 106,000 ms)"
    assert [(step.at_ms, step.broker) for step in story.steps[:2]] == [(0.0, 2), (6_000.0, 3)]
    assert story.steps[0].text == (
        "Broker 2 hears from ZooKeeper for the last time. It had no ZooKeeper for 106,000 ms, and its session ended."
    )
    assert "because of a hang" not in " ".join(step.text for step in story.steps)
    assert sentence(recorder.entries[2]) == (
        "Broker 2 learns that its ZooKeeper session has ended. It had lost its connection to ZooKeeper 106,000 ms "
        "before."
    )
    assert story.ending() == (
        "In all: broker 2 may have run on, and have taken writes in 1 partition until replaced."
    ), "it is no loss, although it was away for longer than a minute"
    recorder.entries[2]["away_ms"] = 20.0  # it hung, and woke up
    hung = last_failover(recorder.entries)
    assert hung is not None
    assert (hung.title, len(hung.steps)) == (before.title, len(before.steps))


def test_a_leader_that_registers_after_the_new_controller_may_have_taken_writes() -> None:
    recorder = Recorder()
    recorder.add(0, 3, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_000, 3, 5, "Resignation", cause="the ZooKeeper session 0x1 has expired", away_ms=16_000.0)
    states = [state("a-0", (1, 3), ([1, 2, 3], [3]), 2.0), state("a-1", (2, 3), ([1, 2, 3], [3]), 2.0)]
    recorder.add(90_050, 3, 6, "Startup", brokers=[3], unreachable=[], topics=1, partitions=2, states=states)
    recorder.add(90_051, 3, 6, "BrokerSilent", broker=2, lasted_ms=9_000.0)
    recorder.add(90_150, 3, 6, "BrokerChange", lost=[], added=[1])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == ("broker 2 was lost and broker 3 was elected controller again (no ZooKeeper for 16,000 ms)")
    assert story.ending().endswith("; broker 1 may have run on, and have taken writes in 1 partition until replaced.")
    assert "It had lost its connection to ZooKeeper 16,000 ms before." in "".join(step.text for step in story.steps)


@pytest.mark.parametrize("after_ms", [0, 400, 30_000])
def test_a_broker_that_registers_again_after_zookeeper_was_away_was_not_lost(after_ms: int) -> None:
    is_at_once = not after_ms
    recorder = Recorder()
    recorder.add(0, 3, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    states = [state("a-0", (1, 3), ([1, 2, 3], [3]), 2.0), state("a-1", (2, 3), ([1, 2, 3], [3]), 2.0)]
    sent = [order("LeaderAndIsr", 3)]
    recorder.add(
        90_000, 3, 5, "BrokerChange", lost=[1, 2], added=[1] if is_at_once else [], states=states, sent=sent, total_ms=9
    )
    recorder.add(90_001, 3, 5, "BrokerSilent", broker=2, lasted_ms=10_000.0)
    recorder.add(90_000 + after_ms, 3, 5, "BrokerChange", lost=[], added=[] if is_at_once else [1])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 was lost and broker 1 lost the registration and registered again"
    assert story.may_have_run == (1,)
    assert story.ending() == (
        "In all: 10,001 ms until 1 partition had a new leader in ZooKeeper; not every leader is recorded as having "
        "confirmed it; broker 1 may have run on, and have taken writes in 1 partition until replaced."
    )
    recorder.answer(90_020, 3, 5, "LeaderAndIsr", 3, took_ms=15.0)
    led = last_failover(recorder.entries)
    assert led is not None
    assert led.ending() == (
        "In all: 10,019 ms until the partition was led again; broker 1 may have run on, and have taken writes in 1 "
        "partition until replaced, after 10,019 ms."
    )
    recorder.entries[1]["states"] = states[:1]
    recorder.entries[1]["lost"] = [1]
    replaced = last_failover([*recorder.entries[:2], *recorder.entries[3:]])
    assert replaced is not None
    assert (replaced.elected, replaced.led_ms, replaced.replaced) == (1, None, 1)
    assert replaced.ending() == (
        "In all, from when that was noticed: broker 1 may have run on, and have taken writes in 1 partition until "
        "replaced, after 20 ms."
    )
    recorder.entries[1] |= {"states": states, "lost": [1, 2]}
    recorder.entries[2]["broker"] = 1  # a broker that hung is lost, though it is back
    recorder.entries[2]["time_ms"] += 1
    hung = last_failover(recorder.entries)
    assert hung is not None
    assert (hung.title, hung.may_have_run) == ("brokers 1 and 2 were lost", ())


@pytest.mark.parametrize(
    "cause",
    [
        "the ZooKeeper session 0x1 has expired",
        "exists /controller: the ZooKeeper session 0x1 is over; open a new one",
        "broker 3 is the controller, says /controller",
    ],
)
def test_a_controller_that_wakes_up_after_a_hang_does_not_change_the_story(cause: str) -> None:
    recorder = Recorder()
    recorder.add(0, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_000, 2, 6, "Startup", brokers=[2, 3], unreachable=[], topics=0, partitions=0)
    asleep = last_failover(recorder.entries)
    recorder.add(92_000, 1, 5, "Resignation", cause=cause)
    assert asleep is not None
    by_broker = {1: [recorder.entries[0], recorder.entries[2]], 2: [recorder.entries[1]]}
    assert last_failover(merged(by_broker)) == asleep
    assert asleep.title == "broker 2 became the controller in the place of broker 1"
    assert asleep.ending() == "In all, from when that was noticed: no partition had to change its leader."


def test_a_broker_that_is_lost_came_back_and_is_lost_again_is_two_stories() -> None:
    recorder = controller_failover()
    for at_ms in (300_000, 309_000):
        recorder.add(at_ms, 3, 6, "BrokerSuspected", broker=2, reason="host:2: it refuses connections")
        recorder.add(at_ms + 4, 3, 6, "BrokerChange", lost=[2], added=[])
        recorder.add(at_ms + 4_000, 3, 6, "BrokerChange", lost=[], added=[2])
    story = last_failover(recorder.entries)
    assert story is not None
    assert [step.at_ms for step in story.steps] == [0.0, 4.0]
    assert story.began_ms == NOON_MS + 309_000


def test_signs_that_are_recorded_after_a_loss_do_not_belong_to_the_next_one() -> None:
    recorder = controller_failover()
    full = [{"broker": 2, "reason": "/data/2: [Errno 28] No space left on device"}]
    recorder.add(300_000, 3, 6, "BrokerChange", lost=[2], added=[])
    recorder.add(300_003, 3, 6, "BrokerSuspected", broker=2, reason="host:2: it refuses connections", lasted_ms=12.0)
    recorder.add(300_100, 3, 6, "LogDirFailure", failed_disks=full)
    recorder.add(301_000, 3, 6, "BrokerChange", lost=[], added=[2])
    first = last_failover(recorder.entries)
    recorder.add(314_000, 3, 6, "BrokerChange", lost=[2], added=[])
    told = failovers(recorder.entries)
    assert told[-2] == first
    assert (told[-2].title, told[-1].title) == ("broker 2 was lost (full disk)", "broker 2 was lost")
    assert told[-1].began_ms == NOON_MS + 314_000


@pytest.mark.parametrize("in_sync", [[2, 3], [1, 2, 3]])
def test_a_cluster_that_was_whole_between_two_losses_had_two_failovers(in_sync: list[int]) -> None:
    recorder = controller_failover()
    recorder.add(500, 3, 6, "BrokerChange", lost=[], added=[1])
    back = [state(f"a-{number}", (2, 2), ([2, 3], in_sync)) for number in range(2)]
    recorder.add(600, 3, 6, "IsrChange", adopted=back)
    recorder.add(1_200, 3, 6, "BrokerChange", lost=[2], added=[], states=[state("a-0", (2, 3), (in_sync, [3]))])
    story = last_failover(recorder.entries)
    assert story is not None
    both = "brokers 1 and 2 were lost and broker 3 became the controller"
    assert story.title == ("broker 2 was lost" if len(in_sync) == 3 else both)


def test_a_broker_that_stops_in_good_order_makes_others_lead_first() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(
        90_000,
        1,
        5,
        "ControlledShutdownRequest",
        cause="broker 2 asks for a controlled shutdown",
        broker=2,
        states=[state("a-0", (2, 1), ([1, 2, 3], [1, 3]), 3.0)],
        sent=[order("LeaderAndIsr", 1)],
    )
    recorder.add(90_400, 1, 5, "BrokerChange", lost=[2], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 stopped cleanly"
    assert [step.text for step in story.steps] == [
        "Broker 2 asks for a controlled shutdown.",
        "New leaders are elected for 1 partition, each from the in-sync replicas (the ISR).",
        "The controller sends the brokers their new roles and the metadata for clients.",
        "Broker 2 is gone from the cluster. Its entry in /brokers/ids is no longer there.",
    ]
    assert (story.elected, story.written_ms) == (1, 3.0)
    del recorder.entries[1]["broker"]  # entries of that time did not name the replica
    before = last_failover(recorder.entries)
    assert before is not None
    assert before.title == "broker 2 was lost"


def test_partitions_led_again_by_a_returned_broker_are_not_reported_leaderless() -> None:
    recorder = controller_failover()
    recorder.add(300_004, 3, 6, "BrokerChange", lost=[2], added=[], states=[state("a-0", (2, -1), ([2], []), 2.0)])
    lost = last_failover(recorder.entries)
    recorder.add(310_000, 3, 6, "BrokerChange", lost=[], added=[2], states=[state("a-0", (-1, 2), ([], [2]), 2.0)])
    found = last_failover(recorder.entries)
    assert lost is not None
    assert found is not None
    assert (lost.leaderless, found.leaderless) == (("a-0",), ())
    assert (lost.late_ms, found.late_ms) == (None, 9_998.0)
    assert "without a leader for 9,998 ms: a-0." in found.ending()


def test_a_story_does_not_say_that_a_stopped_or_restarted_broker_may_have_hung() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(90_000, 1, 5, "ControlledShutdownRequest", broker=2)
    recorder.add(90_400, 1, 5, "BrokerChange", lost=[2, 3], added=[3])
    story = last_failover(recorder.entries)
    assert story is not None
    assert [step.text for step in story.steps] == [
        "Broker 2 is gone from the cluster. Broker 3 has registered again. Its entry in /brokers/ids is no longer "
        "there."
    ]


def whole_stop(first: Recorder, at_ms: int, epoch: int) -> None:
    """Brokers 1, 2 and 3 stop cleanly, as recorded by a cluster of `minibroker down`."""
    asked, stops = "ControlledShutdownRequest", "the broker stops"
    first.add(at_ms, 1, epoch, asked, broker=1, states=[state("a-0", (1, 2), ([1, 2], [2]))])
    first.add(at_ms + 58, 1, epoch, asked, broker=2, failure="CancelledError()")
    first.add(at_ms + 77, 1, epoch, "Resignation", cause=stops)
    first.add(at_ms + 94, 2, epoch, "ControllerSuspected", broker=1, reason="it refuses connections", lasted_ms=9.0)
    first.add(at_ms + 144, 2, epoch + 1, "Startup", brokers=[2, 3], unreachable=[], broker_up_ms=5_479.0)
    first.add(at_ms + 1_086, 2, epoch + 1, asked, broker=2, states=[state("a-0", (2, 3), ([2], [3]))])
    first.add(at_ms + 1_107, 2, epoch + 1, asked, broker=3)
    first.add(at_ms + 1_134, 2, epoch + 1, "BrokerChange", lost=[3], states=[state("a-0", (3, -1), ([3], [3]))])
    first.add(at_ms + 1_165, 2, epoch + 1, asked, broker=2)
    first.add(at_ms + 1_176, 2, epoch + 1, "Resignation", cause=stops)


def test_a_clean_stop_of_the_whole_cluster_is_not_a_failover() -> None:
    recorder = controller_failover()
    before = failovers(recorder.entries)
    assert len(before) == 2
    whole_stop(recorder, 600_000, 6)
    assert failovers(recorder.entries) == before
    recorder.add(700_000, 3, 8, "Startup", brokers=[3], unreachable=[], broker_up_ms=120.0)
    assert failovers(recorder.entries) == before, "also after the next start"
    whole_stop(recorder, 800_000, 8)
    assert failovers(recorder.entries) == before


def test_a_stop_of_the_whole_cluster_is_a_failover_if_a_broker_was_killed_or_one_remained() -> None:
    stopped = Recorder()
    whole_stop(stopped, 0, 6)
    killed = [entry for entry in stopped.entries if entry.get("broker") != 3]
    assert len(failovers(killed)) == 1, "broker 3 did not ask"
    assert len(failovers(stopped.entries[:-1])) == 1, "broker 2 has not stopped"
    late = stopped.entries[-1]
    late["time_ms"] += 60_000
    assert len(failovers([*stopped.entries[:-1], late])) == 1, "the last broker stopped much later"


def test_the_start_of_a_cluster_that_was_stopped_is_not_a_failover() -> None:
    recorder = controller_failover()
    recorder.add(10_000, 3, 6, "BrokerChange", lost=[2], added=[])
    recorder.add(10_500, 3, 6, "Resignation", cause="the broker stops")
    recorder.add(
        40_000,
        2,
        7,
        "Startup",
        brokers=[2],
        unreachable=[],
        topics=1,
        partitions=1,
        read_at_ms=1.0,
        broker_up_ms=900.0,
        states=[state("a-0", (3, 2), ([3], [2]))],
    )
    assert [story.title for story in failovers(recorder.entries)][1:] == [
        "broker 1 was lost and broker 3 became the controller",
        "broker 2 was lost",
    ]
    recorder.add(41_000, 2, 7, "BrokerChange", lost=[3], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    assert (story.title, {step.epoch for step in story.steps}) == ("broker 3 was lost", {7})


def test_each_term_counts_its_own_requests_if_the_controller_dies_after_a_broker() -> None:
    recorder = Recorder()
    recorder.add(-90_000, 2, 4, "Startup", brokers=[1, 2, 3], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    recorder.add(0, 2, 4, "BrokerSuspected", broker=3, reason="host:3: it refuses connections", lasted_ms=40.0)
    recorder.add(
        3,
        2,
        4,
        "BrokerChange",
        lost=[3],
        added=[],
        total_ms=22.0,
        states=[state("a-0", (3, 1), ([1, 2, 3], [1, 2]))],
        sent=[order("LeaderAndIsr", 1)],
    )
    recorder.answer(35, 2, 4, "LeaderAndIsr", 1, took_ms=12.0)
    recorder.add(800, 1, 4, "ControllerSuspected", broker=2, reason="host:2: it refuses connections", lasted_ms=42.0)
    recorder.add(803, 1, 4, "ControllerRemoved", broker=2)
    recorder.add(
        810,
        1,
        5,
        "Startup",
        total_ms=22.0,
        read_at_ms=12.0,
        brokers=[1, 2],
        unreachable=[2],
        topics=1,
        partitions=2,
        states=[state("a-1", (2, 1), ([1, 2], [1]))],
        sent=[order("LeaderAndIsr", 1)],
    )
    unconfirmed = last_failover(recorder.entries)
    recorder.answer(845, 1, 5, "LeaderAndIsr", 1, took_ms=13.0)
    story = last_failover(recorder.entries)
    assert unconfirmed is not None
    assert story is not None
    told = [step.text for step in story.steps]
    assert "Broker 1 cannot reach broker 2, the controller (host:2: it refuses connections, for 42 ms)." in told
    assert "Broker 1 has removed broker 2 from office, so that another can be elected." in told
    assert not story.noticed_late
    assert [text.partition(",")[0] for text in told if "assumed its role" in text] == [
        "Broker 1 has assumed its role in 2 partitions"
    ] * 2
    assert (unconfirmed.led_ms, story.led_ms) == (None, 885.0)


def two_losses(later_ms: int) -> Recorder:
    """Broker 1, the controller, finds that broker 2 is gone, and after that time broker 3. They led a-0 and a-1."""
    recorder = Recorder()
    recorder.add(-90_000, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    for at_ms, lost, partition in ((0, 2, "a-0"), (later_ms, 3, "a-1")):
        recorder.add(at_ms, 1, 5, "BrokerSuspected", broker=lost, reason="host:1: it is gone", lasted_ms=30.0)
        states, sent = [state(partition, (lost, 1), ([lost, 1], [1]), 10.0)], [order("LeaderAndIsr", 1)]
        recorder.add(at_ms + 2, 1, 5, "BrokerChange", lost=[lost], added=[], states=states, sent=sent, total_ms=22.0)
        recorder.answer(at_ms + 36, 1, 5, "LeaderAndIsr", 1, took_ms=13.0)
    return recorder


def test_the_time_of_a_partition_begins_with_the_loss_of_its_own_leader(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = two_losses(1_500)
    story = failovers(recorder.entries)[-1]
    assert story.title == "brokers 2 and 3 were lost"
    assert (story.led_ms, story.longest_ms, story.outage_ms) == (1_566.0, 66.0, 66.0)
    assert story.ending() == "In all: each of 2 partitions was led again within 66 ms of the loss of its leader."
    timeline._print_stories([story], Format.TABLE)
    assert "  66 ms  " in capsys.readouterr().out
    del recorder.entries[-1]
    unconfirmed = failovers(recorder.entries)[-1]
    assert unconfirmed.ending() == (
        "In all: each of 2 partitions had a new leader in ZooKeeper within 42 ms of the loss of its former one; not "
        "every leader is recorded as having confirmed it."
    )
    followers = two_losses(1_500)
    for entry, lost in ((followers.entries[2], 2), (followers.entries[5], 3)):
        entry["states"] = [state("a-0", (1, 1), ([1, lost], [1]), 10.0)]
    story = failovers(followers.entries)[-1]
    assert story.ending().endswith("waited for the lost replicas for up to 42 ms.")
    together = two_losses(1)
    story = failovers(together.entries)[-1]
    assert story.ending() == "In all: each of 2 partitions was led again within 66 ms of the loss of its leader."


def test_the_times_of_partitions_that_are_not_listed_begin_with_the_loss_that_concerns_them() -> None:
    recorder = two_losses(1_500)
    recorder.entries[5] |= {"states_omitted": 800, "elected": 801, "written_at_ms": 12.0}
    story = failovers(recorder.entries)[-1]
    assert story.ending() == "In all: each of 802 partitions was led again within 66 ms of the loss of its leader."


def test_a_partition_that_loses_its_next_leader_before_that_one_has_confirmed_was_never_led_in_between() -> None:
    recorder = two_losses(1_500)
    recorder.entries[2] |= {"states": [state("a-0", (2, 3), ([2, 3, 1], [3, 1]))], "sent": [order("LeaderAndIsr", 3)]}
    recorder.entries[3]["broker"] = 3
    recorder.entries[5]["states"] = [state("a-0", (3, 1), ([3, 1], [1]))]
    story = failovers(recorder.entries)[-1]
    assert story.ending() == "In all: the partition was led again within 66 ms of the loss of its leader."
    del recorder.entries[3]
    story = failovers(recorder.entries)[-1]
    assert story.ending() == "In all: 1,566 ms until the partition was led again."


def test_a_partition_that_waits_for_its_replica_does_so_since_the_loss_of_its_own_leader() -> None:
    recorder = two_losses(1_500)
    recorder.entries[5]["states"] = [state("a-1", (3, -1), ([3], [3]), 10.0)]
    recorder.add(9_000, 1, 5, "BrokerChange", lost=[], added=[3], states=[state("a-1", (-1, 3), ([3], [3]), 0.0)])
    story = failovers(recorder.entries)[-1]
    assert story.ending() == ("In all: 66 ms until the partition was led again; without a leader for 7,530 ms: a-1.")


def without_zookeeper(*, is_killed: bool) -> Recorder:
    """ZooKeeper is away from 0 to 20,000 ms. Broker 3 is in office, or is killed meanwhile while broker 1 is."""
    first = 1 if is_killed else 3
    recorder = Recorder()
    recorder.add(-90_000, first, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    expired = "the ZooKeeper session 0x1 has expired"
    recorder.add(20_010, 2, 5, "SessionExpired", cause=expired, away_ms=20_010.0)
    if is_killed:
        details = {"broker": 3, "lasted_ms": 40.0, "waited_ms": 5_000.0}
        recorder.add(20_015, 1, 5, "BrokerSuspected", reason="it refuses connections", **details)
        recorder.add(20_020, 1, 5, "Resignation", cause=expired, away_ms=20_030.0)
        recorder.add(20_060, 1, 6, "Startup", brokers=[1, 2, 3], unreachable=[3], topics=0, partitions=0)
    else:
        recorder.add(20_020, 1, 5, "SessionExpired", cause=expired, away_ms=20_000.0)
        recorder.add(21_000, 3, 5, "Resignation", cause=expired, away_ms=21_100.0)
        recorder.add(20_060, 2, 6, "Startup", brokers=[2], unreachable=[], topics=0, partitions=0)
    return recorder


def test_a_story_says_that_zookeeper_was_away_if_several_brokers_had_none_and_begins_then() -> None:
    recorder = without_zookeeper(is_killed=False)
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.title == "broker 2 became the controller in the place of broker 3 (ZooKeeper was away for 21,100 ms)"
    assert (story.began_ms, story.noticed_late) == (NOON_MS - 100, False)
    assert [(step.at_ms, step.text.partition(":")[0]) for step in story.steps[:2]] == [
        (
            0.0,
            "Brokers 1, 2 and 3 hear from ZooKeeper for the last time. ZooKeeper was away for all of them, for up to "
            "21,100 ms, so that nothing could be elected, and their sessions ended.",
        ),
        (
            20_160.0,
            "Broker 3, the controller until now, had lost its connection to ZooKeeper 20,160 ms before, and was "
            "without it for 21,100 ms.",
        ),
    ]
    hung = [entry for entry in recorder.entries if entry["event"] != "SessionExpired" or entry["controller"] != 1]
    hung[1]["away_ms"] = 20.0  # broker 2 hung as well, and woke up
    alone = last_failover(hung)
    assert alone is not None
    assert alone.title == "broker 2 became the controller in the place of broker 3 (no ZooKeeper for 21,100 ms)"


def test_a_controller_that_follows_itself_after_zookeeper_was_away_was_elected_again() -> None:
    story = last_failover(without_zookeeper(is_killed=True).entries)
    assert story is not None
    assert story.title == (
        "broker 3 was lost and broker 1 was elected controller again (ZooKeeper was away for 20,030 ms)"
    )
    told = [(step.at_ms, step.text.partition(".")[0]) for step in story.steps]
    assert told[:3] == [
        (0.0, "Brokers 1 and 2 hear from ZooKeeper for the last time"),
        (14_985.0, "The connection of broker 1 to broker 3 is lost"),
        (19_985.0, "ZooKeeper answers broker 1 again"),
    ]
    assert all(step.at_ms >= 20_025 for step in story.steps[3:])


def test_a_controller_that_left_office_because_its_disk_is_full_is_said_to_have() -> None:
    recorder = Recorder()
    recorder.add(-90_000, 1, 5, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(0, 3, 6, "Startup", brokers=[1, 2, 3], unreachable=[], topics=0, partitions=0)
    recorder.add(60, 3, 6, "BrokerSuspected", broker=1, reason="it refuses connections", lasted_ms=40.0)
    recorder.add(62, 3, 6, "BrokerChange", lost=[1], added=[])
    without = last_failover(recorder.entries)
    full = [{"broker": 1, "reason": "/data/1: [Errno 28] No space left on device"}]
    recorder.add(300, 3, 6, "LogDirFailure", failed_disks=full)
    story = last_failover(recorder.entries)
    assert without is not None
    assert story is not None
    assert story.title == "broker 1 was lost (full disk) and broker 3 became the controller"
    assert story.steps[0].text == (
        "Broker 1, the controller until now, has left office and ends: its log directory has no space left."
    )
    assert (story.steps[-1].at_ms, story.steps[-1].event) == (300.0, "LogDirFailure")
    recorder.entries[-1]["time_ms"] += 20_000
    recorder.entries.insert(-1, recorder.entries[-1] | {"event": "BrokerChange", "added": [1], "failed_disks": []})
    assert failovers(recorder.entries)[-1] == without, "it was back before it reported that"


def test_the_story_of_a_broker_that_hung_begins_when_others_heard_from_it_for_the_last_time() -> None:
    recorder = Recorder()
    recorder.add(-90_000, 1, 1, "Startup", brokers=[1, 2, 3], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    # An earlier silence of the same broker, in another failover.
    recorder.add(-60_000, 1, 1, "BrokerChange", lost=[3], added=[3], states=[state("a-0", (3, 1), ([3, 1], [1]))])
    recorder.add(-59_990, 2, 1, "BrokerSilent", broker=3, lasted_ms=7_000.0)
    elected = [state("a-0", (3, 2), ([3, 2, 1], [2, 1]))]
    # The controller's own broker has recorded it before the event was done, and broker 3 has woken up meanwhile.
    recorder.add(6_025, 1, 1, "BrokerSilent", broker=3, lasted_ms=6_020.0)
    sent = [order("LeaderAndIsr", 2)]
    recorder.add(6_000, 1, 1, "BrokerChange", lost=[3], added=[3], states=elected, sent=sent, total_ms=25.0)
    recorder.add(6_026, 2, 1, "BrokerSilent", broker=3, lasted_ms=6_026.0)
    recorder.add(6_027, 2, 1, "BrokerSilent", broker=1, lasted_ms=9_000.0)
    recorder.answer(6_030, 1, 1, "LeaderAndIsr", 2, took_ms=8.0)
    before, story = failovers(recorder.entries)
    assert before.began_ms == NOON_MS - 66_990
    assert story.began_ms == NOON_MS
    assert [(step.at_ms, step.event) for step in story.steps[:3]] == [
        (0.0, "BrokerSilent"),
        (5.0, "BrokerSilent"),
        (6_000.0, "BrokerChange"),
    ]
    assert story.steps[0].text == (
        "Broker 2 hears from broker 3 for the last time. After that, fetches between the two go unanswered, for "
        "6,026 ms."
    )
    assert story.ending() == "In all: 6,030 ms until the partition was led again."
    assert not story.noticed_late


@pytest.mark.parametrize("is_controller", [True, False])
def test_of_a_broker_that_did_not_run_the_story_says_so_and_begins_then(is_controller: bool) -> None:
    recorder = Recorder()
    recorder.add(-90_000, 3 if is_controller else 1, 1, "Startup", brokers=[1, 2, 3], unreachable=[])
    moved = [state("a-0", (3, 2), ([3, 2, 1], [2, 1]))]
    if is_controller:
        details = {"brokers": [1, 2], "unreachable": [], "topics": 1, "partitions": 1, "read_at_ms": 4.0}
        recorder.add(6_000, 1, 2, "Startup", states=moved, **details)
    else:
        recorder.add(6_000, 1, 1, "BrokerChange", lost=[3], added=[], states=moved)
    epoch = recorder.entries[-1]["epoch"]

    def told(*, ended_ms: int, lasted_ms: float) -> Story:
        other = Recorder()
        other.add(ended_ms, 3, 1, "BrokerStalled", lasted_ms=lasted_ms)
        other.add(ended_ms + 5_000, 1, epoch, "BrokerChange", lost=[], added=[3])
        story = last_failover([*recorder.entries, *other.entries])
        assert story is not None
        return story

    story = told(ended_ms=13_000, lasted_ms=13_012.0)
    after = " and broker 1 became the controller" if is_controller else ""
    assert story.title == f"broker 3 was lost (it did not run for 13,012 ms){after}"
    assert (story.began_ms, story.noticed_late, story.may_have_run) == (NOON_MS - 12, False, ())
    texts = [step.text for step in story.steps]
    why = "its process was stopped or got no processor for 13,012 ms"
    assert texts[0] == f"Broker 3 stops answering: {why}."
    assert f"(6 s by default) after {'its' if is_controller else 'the'} last heartbeat, because {why}." in texts[1]
    assert "hung" not in " ".join(texts)
    assert "hang" not in " ".join(texts)
    for another in (told(ended_ms=4_000, lasted_ms=3_000.0), told(ended_ms=30_000, lasted_ms=5_000.0)):
        assert "did not run" not in another.title
        assert another.noticed_late


def test_a_stall_before_a_broker_is_found_unreachable_is_not_the_reason_of_its_loss() -> None:
    recorder = two_losses(300)
    told = last_failover(recorder.entries)
    recorder.add(-100, 2, 5, "BrokerStalled", lasted_ms=1_500.0)
    assert last_failover(recorder.entries) == told


def test_a_broker_that_was_back_before_its_loss_was_seen_is_noticed_late_if_no_silence_is_recorded() -> None:
    recorder = Recorder()
    recorder.add(-90_000, 1, 1, "Startup", brokers=[1, 2], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    recorder.add(0, 1, 1, "BrokerChange", lost=[2], added=[2], states=[state("a-0", (2, 1), ([2, 1], [1]))])
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.noticed_late


def test_writes_that_waited_for_a_lost_follower_are_part_of_the_story() -> None:
    recorder = Recorder()
    recorder.add(-90_000, 1, 1, "Startup", brokers=[1, 2], unreachable=[], topics=1, partitions=2, read_at_ms=4.0)
    recorder.add(6_000, 1, 1, "BrokerChange", lost=[2], added=[], states=[state("a-0", (1, 1), ([1, 2], [1]))])
    recorder.add(6_001, 1, 1, "BrokerSilent", broker=2, lasted_ms=6_001.0)
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.ending() == (
        "In all: no partition had to change its leader; writes with acks=all waited for the lost replicas for up to "
        "6,020 ms."
    )


def test_losses_far_apart_are_different_stories() -> None:
    recorder = controller_failover()
    recorder.add(20_000, 3, 6, "BrokerChange", lost=[2], added=[])
    story = last_failover(recorder.entries)
    assert story is not None
    assert [step.broker for step in story.steps] == [3]
    assert story.title == "broker 2 was lost"


def test_an_earlier_failover_is_told_as_it_was_before_the_later_ones() -> None:
    recorder = controller_failover()
    told = [last_failover(recorder.entries)]
    recorder.add(500, 3, 6, "BrokerChange", lost=[], added=[1])
    recorder.add(600, 3, 6, "IsrChange", adopted=[state(f"a-{i}", (2, 2), ([2, 3], [1, 2, 3])) for i in range(2)])
    recorder.add(900, 3, 6, "BrokerSuspected", broker=1, reason="host:1: it refuses connections", lasted_ms=40.0)
    recorder.add(901, 3, 6, "BrokerChange", lost=[1], added=[], states=[state("a-0", (2, 2), ([1, 2, 3], [2, 3]))])
    told.append(last_failover(recorder.entries))
    recorder.add(60_000, 3, 6, "BrokerChange", lost=[2], added=[], states=[state("a-0", (2, 3), ([2, 3], [3]))])
    told.append(last_failover(recorder.entries))
    stories = failovers(recorder.entries[1:])
    assert stories == told
    assert [story.title for story in stories] == [
        "broker 1 was lost and broker 3 became the controller",
        "broker 1 was lost",
        "broker 2 was lost",
    ]


def test_a_story_that_begins_with_an_expired_session_says_that_time_before_is_not_counted() -> None:
    recorder = controller_failover()
    recorder.entries[1] |= {"event": "Resignation", "controller": 1, "cause": "the ZooKeeper session 0x1 has expired"}
    del recorder.entries[2]
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.ending().startswith("In all, from when that was noticed: ")


def test_the_failovers_are_the_same_for_each_topic() -> None:
    recorder = controller_failover()
    recorder.add(300, 3, 6, "ControlledShutdownRequest", broker=2, states=[state("a-0", (2, 3), ([2, 3], [3]))])
    recorder.add(900, 3, 6, "BrokerChange", lost=[2], added=[])
    stories, of_other = failovers(recorder.entries), failovers(recorder.entries, "other")
    assert [(s.title, s.began_ms) for s in of_other] == [(s.title, s.began_ms) for s in stories]
    assert {s.elected for s in of_other} == {0}


def test_a_controller_that_is_started_when_no_broker_ran_is_no_sign_of_a_hang() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 1, "Startup", brokers=[1], unreachable=[], topics=1, partitions=1, read_at_ms=1.0)
    restarted = {"brokers": [1], "unreachable": [], "topics": 1, "partitions": 1, "read_at_ms": 1.0}
    recorder.add(60_000, 1, 2, "Startup", broker_up_ms=900.0, **restarted)
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.steps[0].text == (
        "Broker 1, the controller until now, is gone, and no other broker ran to replace it: broker 1 was started "
        "900 ms before."
    )
    assert story.title == "all brokers had ended, and broker 1 was started and became the controller"


@pytest.mark.parametrize("is_fetching", [True, False])
def test_a_broker_that_may_have_run_on_or_recorded_a_silence_is_not_said_not_to_have_run(is_fetching: bool) -> None:
    recorder = Recorder()
    details = {"unreachable": [], "topics": 1, "partitions": 1, "read_at_ms": 1.0}
    recorder.add(0, 1, 1, "Startup", brokers=[1, 2], **details)
    isr = [2, 1] if is_fetching else [2]
    states = [state("a-0", (2, 2), (isr, [2]))] if is_fetching else []
    recorder.add(60_000, 3, 2, "Startup", brokers=[2, 3], broker_up_ms=900.0, states=states, **details)
    if is_fetching:
        recorder.add(60_005, 2, 2, "BrokerSilent", broker=1, lasted_ms=6_000.0)
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.elected == 0
    assert "all brokers" not in story.title
    assert not any("no other broker ran" in step.text for step in story.steps)


def test_the_story_of_one_topic_leaves_the_others_out() -> None:
    recorder = controller_failover()
    recorder.entries[-3]["states"].append(state("a-b-0", (1, 3), ([1, 2, 3], [2, 3]), 15.0))
    recorder.entries[-3] |= {"states_omitted": 7, "elected": 9, "written_at_ms": 16.0}
    [*_, whole], [*_, story] = failovers(recorder.entries), failovers(recorder.entries, "a-b")
    assert story.title == whole.title
    assert (story.elected, story.written_ms) == (1, 65.0)
    details = [detail.partition(":")[0] for step in story.steps for detail in step.details]
    assert "a-b-0" in details
    assert "a-0" not in details


def test_there_is_no_story_if_no_broker_was_lost() -> None:
    recorder = Recorder()
    recorder.add(0, 1, 1, "Startup", brokers=[1], unreachable=[], topics=0, partitions=0, read_at_ms=1.0)
    recorder.add(5, 1, 1, "BrokerChange", lost=[], added=[2])
    assert last_failover(recorder.entries) is None
    assert last_failover([]) is None


def test_of_thousands_of_partitions_all_are_counted_though_only_some_are_named() -> None:
    recorder = controller_failover()
    startup = recorder.entries[-3]
    startup |= {"states_omitted": 998, "elected": 400, "written_at_ms": 26.0, "sent_omitted": 9, "total_ms": 27.0}
    recorder.answer(55, 3, 6, "LeaderAndIsr", 2, took_ms=20.0)  # one of the requests that are not named
    story = last_failover(recorder.entries)
    assert story is not None
    assert (story.elected, story.written_ms, story.led_ms) == (400, 76.0, 95.0)
    [elections] = [step for step in story.steps if "elected for" in step.text]
    assert elections.text.startswith("New leaders are elected for 400 partitions")
    assert elections.details[-1] == "and 399 more"
    [kept] = [step for step in story.steps if "the leader stays" in step.text]
    assert (kept.text.partition(" the ")[0], kept.details[-1]) == ("In 600 partitions", "and 599 more")
    assert "Broker 2 has assumed its role in 4 partitions" in story.steps[-1].text


def test_partitions_without_a_leader_that_are_not_listed_do_not_count_as_led_again() -> None:
    recorder = controller_failover()
    startup = recorder.entries[-3]
    startup["states"] = [state(f"a-{n}", (1, -1), ([1], [1])) for n in range(200)]
    startup |= {"states_omitted": 300, "elected": 500, "leaderless": 500, "written_at_ms": 26.0}
    story = last_failover(recorder.entries)
    assert story is not None
    assert (story.elected, story.led_ms, len(story.leaderless), story.leaderless_unlisted) == (0, None, 200, 300)
    assert "; 300 more had no leader at first and are not listed" in story.lines()[-1]
    assert story.lines()[-1].startswith("In all: without a leader: a-0,")
    startup["leaderless"] = 450
    story = last_failover(recorder.entries)
    assert story is not None
    assert (story.elected, story.leaderless_unlisted) == (50, 250)


def test_answers_to_other_orders_are_left_out_of_a_story() -> None:
    recorder = controller_failover()
    recorder.answer(90, 3, 6, "LeaderAndIsr", 2, took_ms=1.0)  # to a later request
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.led_ms == 80.0


def test_an_order_that_was_refused_counts_as_no_leader_that_has_confirmed() -> None:
    recorder = controller_failover()
    recorder.entries[-1]["errors"] = ["a-0: KAFKA_STORAGE_ERROR"]
    story = last_failover(recorder.entries)
    assert story is not None
    assert story.led_ms is None
    assert "could not assume its role" in story.steps[-1].text
    assert story.steps[-1].details == ("a-0: KAFKA_STORAGE_ERROR",)


def test_an_entry_says_what_happened_and_below_it_what_that_did() -> None:
    recorder = Recorder()
    recorder.add(
        1_500,
        2,
        7,
        "BrokerChange",
        lost=[1, 3],
        added=[3],
        notes=["something odd"],
        moves=["replica a-0 on 1: OnlineReplica -> OfflineReplica"] * 3,
        writes=["write a-0: ...", "remove /x"],
        states=[state("a-0", (1, 2), ([1, 2], [2]))],
        sent=[order("LeaderAndIsr", 2), order("LeaderAndIsr", 3)],
        reading_ms=4.2,
        total_ms=31.0,
    )
    assert entry_lines(recorder.entries[0]) == [
        "12:00:01.500  broker 2, epoch 7: Broker 1 is gone from the cluster. Broker 3 has registered again.",
        "    note: something odd",
        "    3 replicas: OnlineReplica -> OfflineReplica",
        "    a-0: leader 1 -> 2, in sync 1 2 -> 2 (leader epoch 4, znode version 7 -> 8)",
        "    remove /x",
        "    order to brokers 2 and 3: LeaderAndIsr, 2 partitions",
        "    took 31 ms (read ZooKeeper 4 ms)",
    ]


@pytest.mark.parametrize("event", WATCHED)
def test_an_event_of_a_watch_that_found_nothing_is_not_said_to_be_a_change(event: type[Event]) -> None:
    recorder = Recorder()
    details: dict[str, list[int]] = {"lost": [], "added": []} if event is BrokerChange else {}
    for writes in ([], ["remove /a"]):
        recorder.add(0, 1, 1, event.__name__, cause=event(1).cause, writes=writes, **details)
    found_nothing, changed = map(sentence, recorder.entries)
    assert re.search(r"; (there was none|nothing .*was new|all were known|it asked for no)|may ask", found_nothing)
    assert not re.search(r"\b(have|has)\b.*\b(lost|changed)\b", found_nothing)
    assert changed != found_nothing or event in (BrokerChange, PartitionReassignment)


def test_long_lists_are_cut_and_an_event_without_words_is_told_by_its_cause() -> None:
    recorder = Recorder()
    recorder.add(
        0, 1, 1, "SomethingNew", cause="partitions are moved", writes=[f"remove /{n}" for n in range(SHOWN + 3)]
    )
    told = tell(recorder.entries[0])
    assert told.text == "Partitions are moved."
    assert told.details[-2:] == (f"remove /{SHOWN - 1}", "and 3 more")


def test_lists_that_the_broker_has_cut_are_cut_further_with_the_number_of_all_others() -> None:
    recorder = Recorder()
    recorder.add(
        0,
        1,
        1,
        "BrokerChange",
        lost=[2],
        writes=[*(f"remove /{n}" for n in range(200)), "and 50 more"],
        sent=[order("LeaderAndIsr", 3)],
        sent_omitted=7,
    )
    *_, writes, sent, more = tell(recorder.entries[0]).details
    assert (writes, sent, more) == (
        f"and {250 - SHOWN} more",
        "order to broker 3: LeaderAndIsr, 2 partitions",
        "and 7 more",
    )


def test_timelines_are_merged_by_epoch_first_as_clocks_differ() -> None:
    old, new = Recorder(), Recorder()
    old.add(50_000, 1, 5, "Startup")  # its clock is fast
    old.add(60_000, 1, 5, "Resignation")
    new.add(-10, 2, 5, "ControllerSuspected")
    new.add(0, 2, 6, "Startup")
    together = merged({1: old.entries, 2: new.entries})
    assert [(entry["controller"], entry["event"]) for entry in together] == [
        (2, "ControllerSuspected"),
        (1, "Startup"),
        (1, "Resignation"),
        (2, "Startup"),
    ]


def test_what_one_broker_recorded_stays_in_its_order_when_its_clock_jumps_back() -> None:
    recorder = Recorder()
    for number, at_ms in enumerate((100, 20, 110)):
        recorder.add(at_ms, 1, 5, f"Event{number}")
    other = Recorder()
    other.add(105, 2, 5, "Other")
    together = merged({1: recorder.entries, 2: other.entries})
    assert [entry["event"] for entry in together] == ["Event0", "Event1", "Other", "Event2"]


def test_a_dead_broker_that_was_never_in_office_has_an_empty_file_and_nothing_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for broker_id in (2, 3):
        (tmp_path / f"broker-{broker_id}").mkdir()
    (tmp_path / "broker-2" / FILE).touch()
    found = TimelineRead((), {2: NetworkError("it is not alive"), 3: NetworkError("it is not alive")})
    assert with_files(found, tmp_path, since_ms=0) == ([], False)
    assert capsys.readouterr().err == "the entries of broker 3 are missing: it is not alive\n"


def test_partitions_of_users_are_named_before_those_of_internal_topics() -> None:
    state = {"leader": 2, "leader_before": 1, "isr": [2], "isr_before": [1, 2], "leader_epoch": 1, "version": 1}
    state |= {"version_before": 0}
    topics = ("__consumer_offsets", "__transaction_state")
    names = [f"{topic}-{number}" for topic in topics for number in range(20)] + ["orders-0"]
    assert state_lines(state | {"partition": name} for name in names)[0].startswith("orders-0: leader 1 -> 2")


def test_a_stall_is_told_with_its_reason_and_beside_the_failover_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = two_losses(300)
    told = last_failover(recorder.entries)
    recorder.add(90_000, 3, 6, "BrokerStalled", lasted_ms=4_012.0)
    recorder.add(95_000, 1, 6, "BrokerStalled", lasted_ms=2_000.0, unrecorded=3)
    assert last_failover(recorder.entries) == told
    assert [sentence(entry) for entry in recorder.entries[-2:]] == [
        "Broker 3 runs again. It answered nothing for 4,012 ms, because its process was stopped or got no processor.",
        "Broker 1 runs again. It answered nothing for 2,000 ms, because its process was stopped or got no processor. 3 "
        "more in the minutes before are not recorded.",
    ]

    async def read(*_: object) -> Known:
        return Known(recorder.entries, is_refused=False)

    monkeypatch.setattr(timeline, "_read", read)
    assert run_app(application(), ["timeline", "--last-failover", "--bootstrap", "host:1"]) == 0
    later = [
        "no later failover is recorded, but broker 1 answered nothing for 2,000 ms until 2026-11-22 12:01:35.000 UTC: "
        "see `minibroker timeline --bootstrap host:1`",
        "no later failover is recorded, but broker 3 answered nothing for 4,012 ms until 2026-11-22 12:01:30.000 UTC: "
        "see `minibroker timeline --bootstrap host:1`",
    ]
    assert capsys.readouterr().err.splitlines() == later
    recorder.entries = recorder.entries[-1:]
    assert run_app(application(), ["timeline", "--last-failover", "--bootstrap", "host:1"]) == 1
    assert "while others ran; broker 1 answered nothing for 2,000 ms until 2026" in capsys.readouterr().err


def test_a_controller_that_had_no_zookeeper_before_its_election_was_still_started_when_no_broker_ran() -> None:
    recorder = Recorder()
    recorder.add(-600_000, 1, 5, "Startup", brokers=[1], unreachable=[], topics=0, partitions=0)
    recorder.add(-1_000, 2, -1, "BrokerStalled", lasted_ms=1_500.0)
    recorder.add(-500, 2, -1, "ZooKeeperAway", lasted_ms=1_200.0)
    recorder.add(0, 2, 6, "Startup", brokers=[2], unreachable=[], topics=0, partitions=0, broker_up_ms=5_000.0)
    told = last_failover(recorder.entries)
    assert told is not None
    assert "no other broker ran to replace it" in told.steps[0].text
    assert (
        sentence(recorder.entries[2])
        == "ZooKeeper answers broker 2 again, after 1,200 ms without an answer. The broker's session goes on."
    )

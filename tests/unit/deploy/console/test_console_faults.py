"""The console's buttons: who may press them, and what they do."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import pytest

from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.cli.timelines.story import Step, Story
from minibroker.deploy import journal
from minibroker.deploy.console import command, pages
from minibroker.deploy.console.fault_page import fault_sections, who_forms
from minibroker.deploy.console.faults import MAX_AT_ONCE, Applied, Faults, MemberState, causes_of, consequences_of
from minibroker.deploy.console.state import Timeline
from minibroker.deploy.console.views import Query
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.who import AllBrokers, BrokerId, Controller, CoordinatorOf, LeaderOf, Member, Who
from minibroker.deploy.named_faults import Words
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from tests.unit.deploy.console.test_console_edge import Cluster, Request, _console
from tests.waiting import until

OWN = {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"}


class Local:
    """Records the commands of a LocalCluster."""

    def __init__(self, directory: Path = Path("/nonexistent")) -> None:
        self.directory = directory
        self.commands: list[tuple[str, Who]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def kill(self, who: Who) -> list[Member]:
        self.commands.append(("kill", who))
        self.may_end.wait()
        return [2]

    def stop(self, who: Who) -> list[Member]:
        self.commands.append(("stop", who))
        return [3]

    def pause(self, who: Who) -> list[Member]:
        raise LaunchError("broker 9 does not exist: the cluster has brokers 1 to 3")

    def resume(self, who: Who) -> list[Member]:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def start(self, who: Who) -> list[Member]:
        raise ZeroDivisionError("a fault of ours")

    def fill_disk(self, who: Who, log_dir: int | None) -> list[Member]:
        self.commands.append((f"fill-disk {log_dir}", who))
        return [1]

    def move_clock(self, who: Who, by_s: float) -> list[Member]:
        self.commands.append((f"move-clock {by_s}", who))
        return [1]

    def slow_network(self, who: Who, delay_s: float, other: Who | None) -> list[Member]:
        self.commands.append((f"slow-network {delay_s} to {other}", who))
        return [1, 2]

    def slow_disk(self, who: Who, sync_delay_s: float, write_delay_s: float | None, _: int | None) -> list[Member]:
        self.commands.append((f"slow-disk {sync_delay_s} {write_delay_s}", who))
        return [1]

    def cut(self, who: Who, other: Who, *, one_way: bool) -> list[Member]:
        self.commands.append((f"cut from {other}{' one way' if one_way else ''}", who))
        return [1, 2]

    def heal(self, who: Who) -> list[Member]:
        self.commands.append(("heal", who))
        return [1, 2, 3]

    def handed_over(self, broker_id: int) -> str:
        return "handed over 4 leaders"


def _faults(local: Local) -> Faults:
    cluster: Any = local
    return Faults(cluster)


class Buttons:
    def __init__(self) -> None:
        self.local = Local()
        self.faults = _faults(self.local)
        self.application = _console(Cluster(), self.faults).application("127.0.0.1")

    async def press(
        self,
        action: str,
        who: str,
        headers: Mapping[str, str] = OWN,
        token: str | None = None,
        host: str = "127.0.0.1:8080",
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Request:
        form = {"action": action, "who": who, "token": self.faults.token if token is None else token, **more}
        body = urlencode(form).encode()
        return await Request(self.application, "/faults", host, "POST", headers, body).ended()


async def test_a_command_says_what_it_did_and_its_page_shows_that() -> None:
    buttons = Buttons()
    buttons.local.may_end.clear()
    answer = await buttons.press("kill", "controller")
    assert (answer.status, answer.headers["location"]) == (303, "/faults")
    assert [each.said for each in buttons.faults.applied] == [None]
    buttons.local.may_end.set()
    await until(lambda: buttons.faults.applied[0].said is not None)
    assert buttons.faults.applied[0].said == "kill: broker 2"
    assert buttons.local.commands == [("kill", Controller())]
    await buttons.press("stop", "coordinator:billing")
    await until(lambda: buttons.faults.applied[1].said is not None)
    assert buttons.faults.applied[1].said == "stop: broker 3; broker 3: handed over 4 leaders"
    assert buttons.local.commands[1] == ("stop", CoordinatorOf("billing"))


async def test_a_recorder_hears_the_words_of_a_command(tmp_path: Path) -> None:
    journal.begin(tmp_path)
    faults = _faults(Local(tmp_path))
    faults.apply("kill", "leader:orders-0")
    await until(lambda: faults.applied[0].said is not None)
    [said] = journal.read(tmp_path)
    assert (said.command, said.sentence, said.members) == ("kill leader:orders-0", "kill {who}", [2])


@pytest.mark.parametrize(
    ("words", "command", "sentence", "done"),
    [
        (
            ("slow-disk", "leader:orders-0", Words("200ms", "2", writes=True)),
            "fault slow-disk leader:orders-0 200ms --writes",
            None,
            ("slow-disk 0.2 0.2", LeaderOf(TopicPartition("orders", 0))),
        ),
        (
            ("cut", "1", Words(other="2")),
            "fault cut 1 2",
            "cut {who} from {other}",
            (f"cut from {BrokerId(2)}", BrokerId(1)),
        ),
        (
            ("cut", "1", Words("9s", "2", one_way=True, back=True)),
            "fault cut 1 2 --one-way",
            "cut packets from {who} to {other}",
            (f"cut from {BrokerId(2)} one way", BrokerId(1)),
        ),
        (
            ("slow-network", "1", Words("5ms", "2")),
            "fault slow-network 1 5ms --between 2",
            None,
            (f"slow-network 0.005 to {BrokerId(2)}", BrokerId(1)),
        ),
        (
            ("move-clock", "1", Words("5s", back=True)),
            "fault move-clock 1 5s --back",
            None,
            ("move-clock -5.0", BrokerId(1)),
        ),
        (
            ("fill-disk", "1", Words(log_dir=2)),
            "fault fill-disk 1 --log-dir 2",
            None,
            ("fill-disk 2", BrokerId(1)),
        ),
        (("heal", "all", Words()), "heal all", "heal", ("heal", AllBrokers())),
    ],
)
async def test_faults_of_brokers_have_the_words_of_the_command_line(
    tmp_path: Path, words: tuple[str, str, Words], command: str, sentence: str | None, done: tuple[str, Who]
) -> None:
    journal.begin(tmp_path)
    local = Local(tmp_path)
    faults = _faults(local)
    faults.apply(*words)
    await until(lambda: faults.applied[0].said is not None)
    assert faults.applied[0].command == command
    assert local.commands == [done]
    [said] = journal.read(tmp_path)
    assert (said.command, said.sentence) == (command, sentence)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("slow-disk", "1", Words()), "TIME is ''"),
        (("slow-network", "1", Words("soon")), "TIME is 'soon'"),
        (("move-clock", "1", Words("0s")), "TIME is '0s', so no clock would move"),
        (("cut", "1", Words()), "give OTHER as well"),
        (("cut", "1", Words(other="somebody")), "somebody"),
    ],
)
async def test_a_fault_that_lacks_a_word_is_refused(words: tuple[str, str, Words], why: str) -> None:
    local = Local()
    with pytest.raises(MinibrokerError, match=why):
        _faults(local).apply(*words)
    assert local.commands == []


async def test_a_command_that_fails_says_why() -> None:
    buttons = Buttons()
    await buttons.press("pause", "9")
    await until(lambda: buttons.faults.applied[0].failed)
    assert "does not exist" in (buttons.faults.applied[0].said or "")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8080"},
        {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-site"},
    ],
)
async def test_pages_of_other_origins_break_nothing(headers: dict[str, str]) -> None:
    buttons = Buttons()
    assert (await buttons.press("kill", "all", headers)).status == 403
    assert buttons.faults.applied == []


@pytest.mark.parametrize("token", ["", "guessed", "\u20ac"])
async def test_a_command_needs_the_token_of_the_page(token: str) -> None:
    buttons = Buttons()
    assert (await buttons.press("kill", "all", token=token)).status == 403
    assert buttons.faults.applied == []


async def test_a_rebound_name_and_a_huge_form_break_nothing() -> None:
    buttons = Buttons()
    rebound = {"origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}
    assert (await buttons.press("kill", "all", rebound, host="evil.example:8080")).status == 421
    huge = await buttons.press("kill", "x" * 5_000)
    assert (huge.status, huge.body) == (413, b"The form has more than 4,096 bytes: shorten its words.\n")
    assert buttons.faults.applied == []


@pytest.mark.parametrize(("action", "who"), [("explode", "1"), ("kill", "somebody"), ("kill", ""), ("__init__", "1")])
async def test_a_command_of_other_words_is_refused_with_the_words_that_exist(action: str, who: str) -> None:
    answer = await Buttons().press(action, who)
    assert answer.status == 400
    assert b"give " in answer.body


async def test_a_browser_without_javascript_gets_a_refusal_on_a_page() -> None:
    answer = await Buttons().press("kill", "<b>", {**OWN, "accept": "text/html,*/*;q=0.8"})
    assert answer.status == 400
    assert b"&lt;b&gt;" in answer.body
    assert b'<a href="/faults">Back to the faults</a>' in answer.body
    assert b"<nav" in answer.body


@pytest.mark.parametrize("log_dir", ["0", "-1", "x", "12345"])
async def test_a_log_directory_that_cannot_be_is_refused(log_dir: str) -> None:
    answer = await Buttons().press("fill-disk", "1", more={"log_dir": log_dir})
    assert answer.status == 400
    assert b"give the number of a log directory" in answer.body


async def test_commands_under_way_have_a_limit() -> None:
    local = Local()
    local.may_end.clear()
    faults = _faults(local)
    for _ in range(MAX_AT_ONCE):
        faults.apply("kill", "1")
    with pytest.raises(LaunchError, match="under way already"):
        faults.apply("kill", "1")
    local.may_end.set()
    await until(lambda: all(each.said for each in faults.applied))
    assert local.commands == [("kill", BrokerId(1))] * MAX_AT_ONCE


def test_a_command_that_hangs_does_not_keep_the_console_from_ending() -> None:
    local = Local()
    local.may_end.clear()

    async def console() -> None:
        _faults(local).apply("kill", "1")
        await until(lambda: local.commands)

    asyncio.run(console())  # returns, although the command goes on
    local.may_end.set()


async def test_a_process_of_another_user_is_said_to_be_one() -> None:
    buttons = Buttons()
    await buttons.press("resume", "1")
    await until(lambda: buttons.faults.applied[0].failed)
    assert "Operation not permitted" in (buttons.faults.applied[0].said or "")


async def test_without_the_option_there_are_neither_buttons_nor_commands() -> None:
    application = _console(Cluster()).application("127.0.0.1")
    for method in ("GET", "POST"):
        assert (await Request(application, "/faults", method=method, headers=OWN).ended()).status == 404
    assert b"Faults" not in (await Request(application, "/").ended()).body


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "broker.example"])
def test_faults_are_allowed_at_a_loopback_address_only(host: str) -> None:
    with pytest.raises(UsageError, match="no password"):
        command.console(port=0, host=host, bootstrap=None, data=Path("none"), allow_faults=True)


def test_faults_are_allowed_for_a_cluster_of_this_machine_only() -> None:
    with pytest.raises(UsageError, match="not by --bootstrap"):
        command.console(port=0, host="127.0.0.1", bootstrap="127.0.0.1:9092", data=Path("none"), allow_faults=True)


def _story(began_ms: int, *at_ms: float) -> Story:
    return Story(
        "broker 2 was lost", began_ms, tuple(Step(at, 1, 2, "Startup", "s") for at in at_ms), 1, (), 90.0, 90.0
    )


def test_a_failover_names_the_faults_before_and_during_it() -> None:
    story = _story(100_000, 0.0, 500.0)
    faults = [
        Applied(1, 69_000, "kill", "3", "kill: broker 3"),
        Applied(2, 99_960, "kill", "2", "kill: broker 2"),
        Applied(3, 99_970, "kill", "9", "there is no broker 9", failed=True),
        Applied(4, 99_980, "start", "3", "start: broker 3"),
        Applied(5, 100_200, "pause", "1", None),
        Applied(6, 100_600, "kill", "1", "kill: broker 1"),
        Applied(7, 99_970, "kill", "33", "there is no broker 33", failed=True),
        Applied(8, 99_980, "move-coordinator", "coordinator:billing", "moved"),
    ]
    assert [(fault.number, at_ms) for fault, at_ms in causes_of(story, faults)] == [(2, -40), (5, 200)]
    assert consequences_of(faults[1], [_story(50_000, 0.0), story]) == [story]
    shown = pages.failover_sections(Timeline(1, [], {}), [story], Query(), faults)
    assert "Applied from this console: <code>kill 2</code>, 40 ms before the first step" in shown["failovers"]
    assert "<code>pause 1</code>, 200 ms after it began" in shown["failovers"]
    assert '<a href="#failover-100000">Broker 2 was lost</a>' in shown["faults"]
    assert "When (UTC)" in shown["faults"]
    for unrelated in ("kill 33", "move-coordinator", "start"):  # which failed, or did no harm
        assert unrelated not in shown["faults"] + shown["failovers"]


def test_buttons_and_states_have_names_and_what_was_said_is_escaped() -> None:
    members = (
        MemberState("1", "broker 1", "paused", ("the disk of <x> is full",)),
        MemberState("zookeeper", "ZooKeeper", "running"),
    )
    sections = fault_sections(members, [Applied(1, 0, "kill", "<b>", "<i>", failed=True)], "secret")
    assert "? paused" in sections["members"]
    assert "the disk of &lt;x&gt; is full" in sections["members"]
    assert sections["members"].count('value="heal"') == 1
    assert 'aria-label="resume broker 1"' in sections["members"]
    assert 'value="secret"' in sections["members"]
    assert "&lt;i&gt;" in sections["applied"]
    assert "<b>" not in sections["applied"]
    assert 'value="secret"' in who_forms("secret")
    assert "kill the controller" in fault_sections(None, [], "secret")["members"]


async def test_a_command_that_fails_by_a_fault_of_ours_is_not_shown_as_under_way() -> None:
    faults = _faults(Local())
    faults.apply("start", "1")
    await until(lambda: faults.applied[0].said)
    [applied] = faults.applied
    assert applied.failed
    assert applied.said is not None
    assert "a fault of ours" in applied.said

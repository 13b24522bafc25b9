"""`minibroker groups`: its output, its questions and its refusals."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from minibroker import application
from minibroker.client.cli import group_details, groups
from minibroker.client.cli.terminal.output import explain, run_app, table_lines
from minibroker.client.producer import Producer
from minibroker.protocol.apis import LIST_GROUPS, LIST_OFFSETS, OFFSET_COMMIT
from minibroker.protocol.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    encode_assignment,
    encode_subscription,
)
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import printable
from tests.running import run_by
from tests.unit.client.administering.administered_groups import GroupCluster
from tests.unit.client.scripted_broker import DROP, HANG

P0, P1, P2 = (TopicPartition("orders", number) for number in range(3))


def member(name: str, *partitions: TopicPartition, instance: str | None = None) -> g.DescribedGroupMember:
    subscription = encode_subscription(ConsumerProtocolSubscription(["orders"]))
    assignment = encode_assignment(ConsumerProtocolAssignment(partitions))
    return g.DescribedGroupMember(f"{name}-1", instance, name, "10.0.0.7", subscription, assignment)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """A user at a terminal who answers."""

    def isatty(self) -> bool:
        return True


def typed(cluster: GroupCluster, *arguments: str, answer: str | None = None) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        patched.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer + "\n"))
        code = run_app(application(), ["groups", *arguments, "--bootstrap", cluster.bootstrap])
    return Ended(code, out.getvalue(), err.getvalue())


def run(
    scenario: Callable[[GroupCluster, Callable[..., Coroutine[Any, Any, Ended]]], Coroutine[Any, Any, None]],
) -> None:
    """A cluster where orders-0 has the times 0 to 9, orders-1 the times 100 to 103, and orders-2 no record. `billing`
    has committed 4 in orders-0 and 4 in orders-1."""

    async def main() -> None:
        cluster = GroupCluster(3)
        async with asyncio.timeout(60), cluster:
            cluster.add_topic("orders", 3)
            async with Producer(cluster.bootstrap) as producer:
                for partition, times in ((0, range(10)), (1, range(100, 104))):
                    for time_ms in times:
                        producer.send("orders", b"v", partition=partition, timestamp_ms=time_ms)
            cluster.coordinator = 1
            cluster.committed["billing"] = {P0: 4, P1: 4}

            async def command(*arguments: str, answer: str | None = None) -> Ended:
                return await asyncio.to_thread(typed, cluster, *arguments, answer=answer)

            await scenario(cluster, command)

    asyncio.run(main())


Command = Callable[..., Coroutine[Any, Any, Ended]]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@run_by(run)
async def test_groups_are_listed_by_name_and_state(cluster: GroupCluster, command: Command, /) -> None:
    cluster.committed["audit"] = {}
    cluster.members["audit"] = [member("a")]
    assert table((await command("list")).out) == [
        ["group", "state", "protocol"],
        ["audit", "Stable", "consumer"],
        ["billing", "Empty", "consumer"],
    ]
    assert json.loads((await command("list", "--state", "Stable", "--format", "json")).out) == [
        {"group": "audit", "protocol_type": "consumer", "state": "Stable"}
    ]
    ended = await command("list", "--state", "stable")
    assert ended.code == 2
    assert "give one of PreparingRebalance, CompletingRebalance, Stable, Empty, Dead" in ended.err


def test_a_broker_that_does_not_answer_is_named_after_the_groups_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minibroker.client.cli.command_admin.API_TIMEOUT_MS", 300)

    async def scenario(cluster: GroupCluster, command: Command) -> None:
        cluster.rules.append(lambda r: DROP if r.api is LIST_GROUPS and r.node_id == 0 else None)
        ended = await command("list")
        assert ended.code == 1
        assert table(ended.out)[1:] == [["billing", "Empty", "consumer"]]
        assert ended.err.startswith("error: broker 0: ")

    run(scenario)


@run_by(run)
async def test_a_group_without_members_is_described_with_what_it_has_committed_and_its_lag(
    cluster: GroupCluster, command: Command, /
) -> None:
    lines = table((await command("describe", "billing")).out)
    port = cluster.nodes[1].port
    assert " ".join(lines[0]) == (f"group billing: Empty, coordinator broker 1 (127.0.0.1:{port}), 0 members, lag 6")
    assert lines[2:] == [
        ["topic", "partition", "committed", "end", "lag", "member"],
        ["orders", "0", "4", "10", "6", "-"],
        ["orders", "1", "4", "4", "0", "-"],
        ["orders", "2", "-", "0", "-", "-"],
    ]


@run_by(run)
async def test_the_last_rebalances_are_described_with_their_reasons(cluster: GroupCluster, command: Command, /) -> None:
    cluster.rebalances["billing"] = [
        g.DescribedRebalance(1_795_343_400_000, 3, "member a-1 joins", 3_021),
        g.DescribedRebalance(1_795_343_460_500, 4, "member a-1 is gone: \x1b", -1),
    ]
    lines = (await command("describe", "billing")).out.splitlines()
    assert [line.rstrip() for line in lines[2:6]] == [
        "rebalance                    generation  took      reason",
        "2026-11-22 10:30:00.000 UTC  3           3,021 ms  member a-1 joins",
        "2026-11-22 10:31:00.500 UTC  4           -         member a-1 is gone: \\x1b",
        "",
    ]
    found = json.loads((await command("describe", "billing", "--format", "json")).out)
    assert found["rebalances"] == [
        {"time_ms": 1_795_343_400_000, "generation": 3, "reason": "member a-1 joins", "took_ms": 3_021},
        {"time_ms": 1_795_343_460_500, "generation": 4, "reason": "member a-1 is gone: \x1b", "took_ms": None},
    ]


@run_by(run)
async def test_members_are_described_with_what_they_read_and_partitions_without_a_commit_have_no_lag(
    cluster: GroupCluster, command: Command, /
) -> None:
    cluster.members["billing"] = [member("b", P2, P0), member("a", P1, instance="till-4"), member("c")]
    first, _, *rest = table((await command("describe", "billing")).out)
    assert " ".join(first).endswith("assignor range, 3 members, lag 6")
    assert rest == [
        ["member", "instance", "client", "host", "partitions"],
        ["a-1", "till-4", "a", "10.0.0.7", "orders", "1"],
        ["b-1", "-", "b", "10.0.0.7", "orders", "0,2"],
        ["c-1", "-", "c", "10.0.0.7", "-"],
        [],
        ["topic", "partition", "committed", "end", "lag", "member"],
        ["orders", "0", "4", "10", "6", "b-1"],
        ["orders", "1", "4", "4", "0", "a-1"],
        ["orders", "2", "-", "0", "-", "b-1"],
    ]
    found = json.loads((await command("describe", "billing", "--format", "json")).out)
    assert (found["state"], found["assignor"], found["lag"], found["coordinator"]["id"]) == (
        "Stable",
        "range",
        6,
        1,
    )
    assert found["members"][1]["partitions"] == [P0._asdict(), P2._asdict()]
    assert found["members"][0]["topics"] == ["orders"]
    assert [each["lag"] for each in found["partitions"]] == [6, 0, None]


@run_by(run)
async def test_a_commit_beyond_the_end_is_a_negative_lag_which_no_sum_hides(
    cluster: GroupCluster, command: Command, /
) -> None:
    cluster.committed["billing"][P1] = 9
    lines = table((await command("describe", "billing")).out)
    assert " ".join(lines[0]).endswith("lag 6 (1 partition committed beyond the end)")
    assert ["orders", "1", "9", "4", "-5", "-"] in lines


@run_by(run)
async def test_each_part_of_a_member_that_can_be_read_is_shown(cluster: GroupCluster, command: Command, /) -> None:
    """Faust writes version 4 of a subscription with the fields of version 0."""
    faust = b"\x00\x04" + encode_subscription(ConsumerProtocolSubscription(["orders"]), 0)[2:]
    assignment = encode_assignment(ConsumerProtocolAssignment([P0]), 0)

    one, other, third = member("a", P0), member("b"), member("c")
    one.member_metadata, one.member_assignment = faust, assignment + b"more"
    other.member_metadata, other.member_assignment = b"?", encode_assignment(ConsumerProtocolAssignment([P1]))
    third.member_assignment = b"?"
    cluster.members["billing"] = [one, other, third]
    found = json.loads((await command("describe", "billing", "--format", "json")).out)
    assert [each["topics"] for each in found["members"]] == [["orders"], None, ["orders"]]
    assert [each["partitions"] for each in found["members"]] == [[P0._asdict()], [P1._asdict()], None]
    assert [each["member_id"] for each in found["partitions"]] == ["a-1", "b-1", None]


def test_names_are_printed_without_what_a_terminal_would_obey() -> None:
    assert table_lines(("group",), [("a\x1b[2Jb\n\udc80",)])[1] == "a\\x1b[2Jb\\n\\udc80"
    assert explain(MinibrokerError("no group \x1b[31mred"))[1] == "error: no group \\x1b[31mred"
    assert printable("naïve 日本") == "naïve 日本"


@run_by(run)
async def test_partitions_with_records_and_without_a_commit_are_counted_and_no_lag_of_0_hides_them(
    cluster: GroupCluster, command: Command, /
) -> None:
    del cluster.committed["billing"][P0]
    lines = table((await command("describe", "billing")).out)
    assert " ".join(lines[0]).endswith("0 members, lag 0 (1 partition without a commit)")
    assert lines[3:] == [
        ["orders", "0", "-", "10", "-", "-"],
        ["orders", "1", "4", "4", "0", "-"],
        ["orders", "2", "-", "0", "-", "-"],
    ]
    cluster.committed["billing"] = {}
    cluster.members["billing"] = [member("a", P0, P1, P2)]
    lines = table((await command("describe", "billing")).out)
    assert " ".join(lines[0]).endswith("1 member, lag - (2 partitions without a commit)")
    found = json.loads((await command("describe", "billing", "--format", "json")).out)
    assert found["lag"] is None
    assert [each["lag"] for each in found["partitions"]] == [None, None, None]


def test_a_leader_that_does_not_answer_and_a_topic_that_is_gone_do_not_hide_the_rest() -> None:
    async def scenario(cluster: GroupCluster, command: Command) -> None:
        cluster.committed["billing"][TopicPartition("gone", 0)] = 7
        cluster.rules.append(lambda r: HANG if r.api is LIST_OFFSETS and r.node_id == 0 else None)
        lines = table((await command("describe", "billing")).out)
        assert lines[3:] == [
            ["gone", "0", "7", "-", "-", "-"],
            ["orders", "0", "4", "-", "-", "-"],
            ["orders", "1", "4", "4", "0", "-"],
            ["orders", "2", "-", "0", "-", "-"],
        ]

    run(scenario)


def test_watching_prints_a_line_each_time_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "INTERVAL_S", 0.0)
    looks = 0
    look = group_details.details_of

    async def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt
        return await look(*arguments)

    monkeypatch.setattr(groups, "details_of", counted)

    async def scenario(cluster: GroupCluster, command: Command) -> None:
        nonlocal looks
        line = "Empty, 0 members, lag 6 (orders-0 6)\n"
        assert await command("describe", "billing", "--watch") == (0, line + line, "")
        looks = 0
        watched = await command("describe", "billing", "--watch", "--format", "json")
        assert [json.loads(line)["lag"] for line in watched.out.splitlines()] == [6, 6]

    run(scenario)


@run_by(run)
async def test_where_one_of_several_groups_is_not_there_none_is_deleted_and_that_is_said(
    cluster: GroupCluster, command: Command, /
) -> None:
    ended = await command("delete", "billing", "no", "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: GROUP_ID_NOT_FOUND: there is no group no. Nothing was deleted. ")
    assert "billing" in cluster.committed


@run_by(run)
async def test_a_group_that_is_not_there_is_one_line_whatever_is_asked(
    cluster: GroupCluster, command: Command, /
) -> None:
    for arguments in (["describe", "no"], ["describe", "no", "--watch"], ["delete", "no", "--yes"]):
        ended = await command(*arguments)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err == (
            "error: GROUP_ID_NOT_FOUND: there is no group no. "
            f"`minibroker groups list --bootstrap {cluster.bootstrap}` has the names of the groups.\n"
        )


@pytest.mark.parametrize(
    ("target", "new"),
    [
        (["--to", "earliest"], [(0, 10), (0, 4)]),
        (["--to", "latest"], [(10, 0), (4, 0)]),
        (["--to", "7"], [(7, 3), (4, 0)]),
        (["--to", "-2"], [(8, 2), (2, 2)]),
        (["--to", "@5"], [(5, 5), (0, 4)]),
        (["--to", "@1970-01-01T00:00:00.102"], [(10, 0), (2, 2)]),
        (["--shift-by", "-3"], [(1, 9), (1, 3)]),
        (["--shift-by", "5"], [(9, 1), (4, 0)]),
        (["--shift-by", "-100"], [(0, 10), (0, 4)]),
    ],
)
@run_by(run)
async def test_offsets_are_reset_within_the_logs(
    cluster: GroupCluster, command: Command, /, target: list[str], new: list[tuple[int, int]]
) -> None:
    rows = [["orders", "0", "4", *map(str, new[0])], ["orders", "1", "4", *map(str, new[1])]]
    dry = await command("reset-offsets", "billing", "--all", *target, "--dry-run")
    assert (dry.code, table(dry.out)[1:]) == (0, rows)
    assert cluster.committed["billing"] == {P0: 4, P1: 4}
    assert cluster.requests(OFFSET_COMMIT) == []
    done = await command("reset-offsets", "billing", "--all", *target, "--yes", "--format", "json")
    assert [(each["old"], each["new"], each["lag"]) for each in json.loads(done.out)] == [
        (4, *new[0]),
        (4, *new[1]),
    ]
    assert cluster.committed["billing"] == {P0: new[0][0], P1: new[1][0]}


@run_by(run)
async def test_a_reset_shows_what_it_would_do_and_asks(cluster: GroupCluster, command: Command, /) -> None:
    arguments = ("reset-offsets", "billing", "--topic", "orders", "-p", "2", "-p", "0", "--to", "earliest")
    plan = [
        ["topic", "partition", "old", "new", "lag"],
        ["orders", "0", "4", "0", "10"],
        ["orders", "2", "-", "0", "0"],
    ]
    refused = await command(*arguments, answer="n")
    assert (refused.code, table(refused.out)) == (1, plan)
    assert "Reset these offsets of group billing? [y/N]" in refused.err
    assert "nothing was done" in refused.err
    nobody = await command(*arguments)
    assert "repeat with --yes" in nobody.err
    assert cluster.committed["billing"] == {P0: 4, P1: 4}
    agreed = await command(*arguments, answer="y")
    assert (agreed.code, agreed.out.splitlines()[-1]) == (0, "reset 2 offsets of billing")
    assert cluster.committed["billing"] == {P0: 0, P1: 4, P2: 0}


@run_by(run)
async def test_a_new_group_begins_at_the_configured_position(cluster: GroupCluster, command: Command, /) -> None:
    ended = await command("reset-offsets", "new", "--topic", "orders", "--to", "latest", "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert cluster.committed["new"] == {P0: 10, P1: 4, P2: 0}


@run_by(run)
async def test_a_group_with_members_is_left_alone(cluster: GroupCluster, command: Command, /) -> None:
    cluster.members["billing"] = [member("a", P0)]
    for arguments in (
        ["reset-offsets", "billing", "--all", "--to", "earliest", "--yes"],
        ["reset-offsets", "billing", "--all", "--to", "earliest", "--dry-run"],
        ["delete", "billing", "--yes"],
    ):
        assert await command(*arguments) == (
            1,
            "",
            "error: NON_EMPTY_GROUP: group billing has members: a-1 (a at 10.0.0.7). Stop them first\n",
        )
    assert cluster.committed["billing"] == {P0: 4, P1: 4}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--all"], 2, "either --to (such as --to earliest) or --shift-by N"),
        (["--all", "--to", "latest", "--shift-by", "1"], 2, "either --to (such as --to earliest) or --shift-by N"),
        (["--all", "--to", "yesterday"], 2, "--to 'yesterday': give earliest, latest, an offset such as 42"),
        (["--to", "latest"], 2, "choose partitions: give either --all, or --topic TOPIC"),
        (["--to", "latest", "--all", "-t", "orders"], 2, "choose partitions: give either --all, or --topic TOPIC"),
        (["--to", "latest", "--all", "-p", "1"], 2, "--partition 1 needs exactly one topic"),
        (["--to", "latest", "-t", "orders", "-t", "stock", "-p", "1"], 2, "--partition 1 needs exactly one topic"),
        (["--to", "latest", "-t", "or ders"], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["--to", "latest", "-t", "orders", "-p", "7"], 1, "orders has no partition 7: its partitions are 0 to 2"),
        (["--to", "latest", "-t", "stock"], 1, "UNKNOWN_TOPIC_OR_PARTITION: topic 'stock'"),
        (["--shift-by", "1", "-t", "orders"], 1, "has committed nothing in orders-2, so there is no offset to shift"),
    ],
)
@run_by(run)
async def test_what_cannot_be_reset_is_said_before_anything_is_done(
    cluster: GroupCluster, command: Command, /, arguments: list[str], code: int, said: str
) -> None:
    ended = await command("reset-offsets", "billing", *arguments, "--yes")
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert cluster.requests(OFFSET_COMMIT) == []


@run_by(run)
async def test_a_group_that_has_committed_nothing_has_nothing_to_reset(
    cluster: GroupCluster, command: Command, /
) -> None:
    ended = await command("reset-offsets", "no", "--all", "--to", "latest", "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert "group no has committed nothing: see `minibroker groups list" in ended.err


@run_by(run)
async def test_groups_are_deleted_after_a_question(cluster: GroupCluster, command: Command, /) -> None:
    cluster.committed["audit"] = {}
    cluster.committed["stock"] = {}
    assert (
        "nothing was done: stdin is no terminal on which to ask 'Delete the group billing with all committed offsets?'"
        in (await command("delete", "billing")).err
    )
    assert (await command("delete", "billing", answer="yes")).out == "deleted billing\n"
    gone = await command("delete", "audit", "stock", "--yes", "--format", "json")
    assert json.loads(gone.out) == {"deleted": ["audit", "stock"]}
    assert cluster.committed == {}

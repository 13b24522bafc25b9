"""The verdicts on peers' test suites."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.kafka_clients import peers, verdicts
from tests.kafka_clients.verdicts import (
    Declared,
    Found,
    Known,
    Verdict,
    declared_tests,
    judge,
    judge_list,
    read_go,
    read_junit,
    read_part,
    read_runner,
)

KNOWN = Known(not_applicable={"test_tls": "no TLS"}, fails={"test_admin::test_b": "not done yet"})


def test_only_what_the_list_explains_may_fail() -> None:
    assert [
        judge(Found("test_tls::test_a[x]", "failed", "refused"), KNOWN),
        judge(Found("test_admin::test_b", "failed", "assert 1", 0.5), KNOWN),
        judge(Found("test_admin::test_bb", "failed", "assert 2"), KNOWN),
        judge(Found("test_tls::test_c", "skipped", "needs 4.0"), KNOWN),
        judge(Found("test_admin::test_d", "passed", "", 0.5), KNOWN),
    ] == [
        Verdict("test_tls::test_a[x]", "not applicable", "no TLS", 0.0, is_known=True),
        Verdict("test_admin::test_b", "failed", "not done yet: assert 1", 0.5, is_known=True),
        Verdict("test_admin::test_bb", "failed", "assert 2", 0.0, is_known=False),
        Verdict("test_tls::test_c", "not applicable", "no TLS", 0.0, is_known=True),
        Verdict("test_admin::test_d", "passed", "", 0.5, is_known=True),
    ]


@pytest.mark.parametrize("name", ["test_tls::test_z", "test_admin::test_b[1]"])
def test_a_test_that_passes_though_it_is_listed_has_failed(name: str) -> None:
    verdict = judge(Found(name, "passed"), KNOWN)

    assert verdict.state == "failed"
    assert not verdict.is_known


def test_a_test_that_the_suite_skips_by_itself_has_failed_unless_it_is_listed() -> None:
    verdict = judge(Found("0053_stats", "skipped", "RapidJSON not available"), KNOWN)

    assert (verdict.state, verdict.is_known) == ("failed", False)
    assert "RapidJSON not available" in verdict.reason


def test_the_list_may_not_name_a_test_that_is_gone() -> None:
    assert judge_list(KNOWN, ["test_tls::test_a", "test_admin::test_b"]) == []
    assert [(verdict.test, verdict.is_known) for verdict in judge_list(KNOWN, ["test_tls", "test_admin::test_bb"])] == [
        ("test_admin::test_b", False)
    ]


def test_the_list_can_be_read() -> None:
    path = Path(verdicts.__file__).with_name("peers.toml")

    assert msgspec.toml.decode(path.read_bytes(), type=dict[str, Known]).keys() == peers.SUITES.keys()


def test_pytest_s_report_has_each_test_once_with_its_worst_outcome() -> None:
    xml = """<testsuites><testsuite>
        <testcase classname="test.integration.test_a.TestC" name="test_x[1]" time="0.5"/>
        <testcase classname="test.integration.test_a" name="test_y" time="1"><failure message="a &#10;more"/></testcase>
        <testcase classname="test.integration.test_a" name="test_z" time="1"/>
        <testcase classname="test.integration.test_a" name="test_z" time="1"><error message="at teardown"/></testcase>
        <testcase classname="test.integration.test_a" name="test_s" time="0"><skipped message="needs 4.0"/></testcase>
        </testsuite></testsuites>"""

    assert read_junit(xml, "test.integration") == [
        Found("test_a.TestC::test_x[1]", "passed", "", 0.5),
        Found("test_a::test_y", "failed", "a", 1.0),
        Found("test_a::test_z", "failed", "at teardown", 1.0),
        Found("test_a::test_s", "skipped", "needs 4.0", 0.0),
    ]


def go_events(*events: tuple[str, ...]) -> str:
    names = ("Action", "Test", "Output")
    return "\n".join(json.dumps({**dict(zip(names, event, strict=False)), "Package": "p"}) for event in events)


def test_go_s_events_have_each_test_without_subtests_once_with_its_last_reason() -> None:
    events = go_events(
        *(("run", name) for name in ("TestA", "TestA/x", "TestA/y", "TestB", "TestC", "TestD", "TestD/z")),
        ("output", "TestA/x", "    a_test.go:7: created a topic\n"),
        ("output", "TestA/x", "    a_test.go:9: want 1 but got 2\n"),
        ("fail", "TestA/x"),
        ("pass", "TestA/y"),
        ("fail", "TestA"),
        ("pass", "TestB"),
        ("output", "TestC", "    a_test.go:3: needs 4.0\n"),
        ("skip", "TestC"),
        ("pass", "TestD/z"),
        ("output", "TestD", "    a_test.go:5: leaks\n"),
        ("fail", "TestD"),
        ("fail",),
    )

    assert read_go(events, "it ended with 1") == [
        Found("TestA/x", "failed", "want 1 but got 2"),
        Found("TestA/y", "passed"),
        Found("TestB", "passed"),
        Found("TestC", "skipped", "needs 4.0"),
        Found("TestD", "failed", "leaks"),
        Found("TestD/z", "passed"),
    ]


def test_a_panic_of_go_fails_what_has_begun_and_a_bad_end_alone_is_a_failure() -> None:
    panicked = go_events(("run", "TestA"), ("run", "TestB"), ("output", "TestA", "panic: nil\n"), ("fail", "TestA"))
    unbuilt = go_events(("run", "TestA"), ("pass", "TestA"), ("fail",))

    assert read_go(panicked, "it ended with 1") == [
        Found("TestA", "failed", "nil"),
        Found("TestB", "failed", "it ended with 1"),
    ]
    assert read_go(unbuilt, "it ended with 1") == [
        Found("TestA", "passed"),
        Found("its end", "failed", "it ended with 1"),
    ]


def test_the_table_of_test_c_is_read_with_flags_and_scenarios() -> None:
    source = """struct test tests[] = {
    /* Special MAIN test to hold over-all timings, etc. */
    {.name = "<MAIN>", .flags = TEST_F_LOCAL},
    _TEST(0000_unittests,
          TEST_F_LOCAL,
          _THRES(.ucpu = 100.0, .scpu = 20.0, .rss = 900.0)),
    _TEST(0045_subscribe_update, 0, TEST_BRKVER(0, 9, 0, 0)),
    _TEST(0045_topic_remove,
          0,
          TEST_BRKVER(0, 9, 0, 0),
          .scenario = "noautocreate"),
#if WITH_SOCKEM
    _TEST(0049_consume_conn_close, TEST_F_SOCKEM, TEST_BRKVER(0, 9, 0, 0)),
#endif
    _TEST(0103_transactions,
          0,
          .scenario = "default,ak23"),

    /* Manual tests */
    _TEST(8000_idle, TEST_F_MANUAL),

    {NULL}};
"""

    assert declared_tests(source) == [
        Declared("0000_unittests", is_local=True, is_manual=False, scenarios=("default",)),
        Declared("0045_subscribe_update", is_local=False, is_manual=False, scenarios=("default",)),
        Declared("0045_topic_remove", is_local=False, is_manual=False, scenarios=("noautocreate",)),
        Declared("0049_consume_conn_close", is_local=False, is_manual=False, scenarios=("default",)),
        Declared("0103_transactions", is_local=False, is_manual=False, scenarios=("default", "ak23")),
        Declared("8000_idle", is_local=False, is_manual=True, scenarios=("default",)),
    ]


def report(**states: str) -> bytes:
    return json.dumps({"tests": {name: {"state": state, "duration": 1.5} for name, state in states.items()}}).encode()


FAILURE = """
\x1b[31m### Test "0011_batch (sub:629)" failed at 0011-produce_batch.c:718:sub() at Mon Nov 23 12:52:46 2026: ###
Test assertion failed: "count == 10":
### Test "<MAIN>" failed at test.c:1798:test_wait_exit() at Mon Nov 23 12:52:48 2026: ###
5 thread(s) still active in librdkafka
"""


def test_the_runner_s_reasons_are_those_of_the_test_that_failed() -> None:
    skipped = "\x1b[33m| 0053_stats                   |    SKIPPED |   0.000s | RapidJSON not available\n"
    states = report(**{"0011_batch": "FAILED", "0011_other": "PASSED", "0053_stats": "SKIPPED"})

    assert read_runner(["0011_batch", "0011_other", "0053_stats"], states, FAILURE + skipped, "it ended with -6") == [
        Found("0011_batch", "failed", '0011-produce_batch.c:718: Test assertion failed: "count == 10":', 1.5),
        Found("0011_other", "passed", "", 1.5),
        Found("0053_stats", "skipped", "RapidJSON not available"),
    ]


def test_a_runner_that_ends_badly_or_without_a_report_has_failed() -> None:
    assert read_runner(["0011_a"], report(**{"0011_a": "PASSED"}), "", "it ended with -6") == [
        Found("0011_a", "failed", "it ended with -6", 1.5)
    ]
    assert read_runner(["0011_a"], None, "", "not within 240 s") == [Found("0011_a", "failed", "not within 240 s", 0.0)]


def test_a_part_that_no_subtest_is_has_failed() -> None:
    log, passed = (
        "\x1b[35m[0081_admin / 0.1s] \x1b[35m[ do_test_DeleteTopics:318: it ]\n",
        report(**{"0081_a": "PASSED"}),
    )

    assert read_part("0081_a", "DeleteTopics", passed, log, "") == Found("0081_a::DeleteTopics", "passed", "", 1.5)
    assert read_part("0081_a", "DeleteTopic ", passed, log, "").state == "failed"

"""Parsers and verdicts for the results of other clients' test suites: pure functions, for `peers`.

`peers.toml` lists for each suite the tests that are not applicable here (some are not even run, to save time), and
those that fail for a known reason. The list must stay true: a listed test that passes counts as failed. So does a test
that the suite skips without being listed, because a skip can hide a missing tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree

import msgspec

PASSED, FAILED, SKIPPED, NOT_APPLICABLE = "passed", "failed", "skipped", "not applicable"


class Known(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A suite's entries in `peers.toml`. A name stands for a test, or for all tests of a module, class or parametrized
    test."""

    not_applicable: dict[str, str] = {}
    fails: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    """Tests that run part by part, because some of their parts are listed above, as `TEST::PART`."""


class Found(NamedTuple):
    test: str
    state: str
    """`PASSED`, `FAILED`, or `SKIPPED`, by the suite itself or because `peers.toml` lists the test."""
    reason: str = ""
    seconds: float = 0.0


class Verdict(NamedTuple):
    test: str
    state: str
    reason: str
    seconds: float
    is_known: bool
    """Whether `peers.toml` explains the state; a pass needs no explanation."""


def reason_of(test: str, reasons: Mapping[str, str]) -> str | None:
    return next((reason for name, reason in reasons.items() if re.match(rf"{re.escape(name)}(\W|$)", test)), None)


def judge(found: Found, known: Known) -> Verdict:
    test, state, reason, seconds = found
    inapplicable, failure = reason_of(test, known.not_applicable), reason_of(test, known.fails)
    listed = inapplicable or failure
    if state == PASSED and listed:
        stale = f"it passes, but peers.toml lists it ({listed}): remove it from the list"
        return Verdict(test, FAILED, stale, seconds, is_known=False)
    if state == PASSED:
        return Verdict(test, PASSED, "", seconds, is_known=True)
    if inapplicable:
        return Verdict(test, NOT_APPLICABLE, inapplicable, seconds, is_known=True)
    if state == SKIPPED:
        hidden = f"the suite skips it ({reason}): fix the cause, or list it in peers.toml as not applicable"
        return Verdict(test, FAILED, hidden, seconds, is_known=False)
    told = f"{failure}: {reason}" if failure else reason
    return Verdict(test, FAILED, told, seconds, is_known=failure is not None)


def judge_list(known: Known, tests: Iterable[str]) -> list[Verdict]:
    """Return a failure for each listed name that matches none of `tests`, the names of all tests of the suite."""
    tests = list(tests)
    stale = "peers.toml lists it, but the suite has no such test: remove it from the list"
    return [
        Verdict(name, FAILED, stale, 0.0, is_known=False)
        for name in [*known.not_applicable, *known.fails]
        if not any(reason_of(test, {name: "it"}) for test in tests)
    ]


def first_line(text: str) -> str:
    """The first line of a failure, cut to the width that fits beside a test's name."""
    return " ".join(text.strip().partition("\n")[0].split())[:300]


# -- pytest --


def read_junit(xml: str, package: str) -> list[Found]:
    """Parse a report of pytest: each test once, by its name without the package."""
    found: dict[str, Found] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        test = f"{case.attrib['classname'].removeprefix(package + '.')}::{case.attrib['name']}"
        seconds = float(case.attrib["time"])
        failure = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if failure is not None:
            found[test] = Found(test, FAILED, first_line(failure.attrib["message"]), seconds)
        elif skipped is not None:
            found[test] = Found(test, SKIPPED, first_line(skipped.attrib["message"]), seconds)
        elif test not in found:  # an error at its teardown is a testcase of its own
            found[test] = Found(test, PASSED, "", seconds)
    return list(found.values())


# -- go test --


def read_go(events: str, ended: str) -> list[Found]:
    """Parse the report of `go test -json`: tests without subtests, and tests that fail although no subtest does. A test
    that begins but does not end has failed, because a panic ends the process. `ended` is empty for exit code 0, else
    how the run ended."""
    states: dict[str, tuple[str, float]] = {}
    output: dict[str, str] = {}
    for line in events.splitlines():
        event = msgspec.json.decode(line, type=_GoEvent)
        if event.test and event.action in _GO_STATES:
            states[event.test] = (_GO_STATES[event.action], event.elapsed)
        elif event.action == "output":
            output[event.test] = output.get(event.test, "") + event.output
    failed = [name for name, (state, _) in states.items() if state == FAILED]
    parents, explained = _parents(states), _parents(failed)
    found = []
    for name, (state, seconds) in states.items():
        if name in explained or (state == PASSED and name in parents):
            continue
        told = _GO_REASON.findall(output.get(name, "")) or ["no reason given" if state == SKIPPED else ended]
        found.append(Found(name, state, "" if state == PASSED else first_line(told[-1]), seconds))
    if ended and not failed:
        found.append(Found("its end", FAILED, ended))
    return found


def _parents(names: Iterable[str]) -> set[str]:
    return {name[: slash.start()] for name in names for slash in re.finditer("/", name)}


class _GoEvent(msgspec.Struct, frozen=True, rename="pascal"):
    action: str
    test: str = ""
    """Empty for an event of the whole package."""
    elapsed: float = 0.0
    output: str = ""


_GO_STATES = {"run": FAILED, "pass": PASSED, "fail": FAILED, "skip": SKIPPED}
"""The state of a test by its last action. A test that has only begun has failed."""
_GO_REASON = re.compile(r"^(?:panic: | +\w+_test\.go:\d+: )(.+)", re.MULTILINE)


# -- librdkafka's test-runner --


class Declared(NamedTuple):
    """A test in the table of librdkafka's test.c."""

    name: str
    is_local: bool
    """Whether it uses no broker, or librdkafka's own mock."""
    is_manual: bool
    scenarios: tuple[str, ...]

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]


_DECLARED = re.compile(r"^ {4}_TEST\((?P<name>\w+),\s*(?P<rest>.*?)\),\n(?= {4}[_/]|#|\n)", re.MULTILINE | re.DOTALL)
_SCENARIO = re.compile(r'\.scenario = "([^"]+)"')
_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\x1b\(B")
_FAILURE = re.compile(
    r'^### Test "(?P<test>\w+|<MAIN>).*?" failed at (?P<at>\S+:\d+):.*? ###\n(?P<why>.*)', re.MULTILINE
)
_SKIPPED = re.compile(r"^\|\s*(\w+)\s*\|\s*SKIPPED \|[^|]*\|\s*(\S.*?)\s*$", re.MULTILINE)


def declared_tests(source: str) -> list[Declared]:
    table = source[source.index("struct test tests[] = {") : source.index("{NULL}};")]
    found: list[Declared] = []
    for match in _DECLARED.finditer(table):
        scenario = _SCENARIO.search(match["rest"])
        scenarios = tuple(scenario[1].split(",")) if scenario else ("default",)
        flags = match["rest"].partition(",")[0]
        found.append(Declared(match["name"], "TEST_F_LOCAL" in flags, "TEST_F_MANUAL" in flags, scenarios))
    return found


def read_part(test: str, part: str, report: bytes | None, log: str, ended: str) -> Found:
    """The result of this test's subtests with `part` in their names; without such a subtest it is a failure."""
    [found] = read_runner([test], report, log, ended)
    if found.state == PASSED and not re.search(rf"\[ .*{re.escape(part)}.* \]$", _COLOUR.sub("", log), re.MULTILINE):
        found = found._replace(state=FAILED, reason="it has no such part: correct peers.toml")
    return found._replace(test=f"{test}::{part}")


def read_runner(tests: Iterable[str], report: bytes | None, log: str, ended: str) -> list[Found]:
    """The results of these tests. `ended` is empty for exit code 0, else how the runner ended; `report` is None if the
    runner wrote none. If the runner fails although no test has failed, all of them fail."""
    log = _COLOUR.sub("", log)
    failures = {match["test"]: f"{match['at']}: {match['why']}" for match in reversed(list(_FAILURE.finditer(log)))}
    skipped = dict(_SKIPPED.findall(log))
    states = msgspec.json.decode(report)["tests"] if report is not None else {}
    if any(state["state"] == "FAILED" for state in states.values()):
        ended = ""
    found = []
    for test in tests:
        state = states.get(test, {"state": "not run", "duration": 0.0})
        why = failures.get(test) or failures.get("<MAIN>")
        if state["state"] == "SKIPPED":
            one = Found(test, SKIPPED, skipped.get(test, "no reason given"))
        elif state["state"] == "PASSED" and not ended:
            one = Found(test, PASSED, "", state["duration"])
        else:
            one = Found(test, FAILED, first_line(why or "") or ended or "no reason", state["duration"])
        found.append(one)
    return found

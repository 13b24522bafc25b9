"""Options of every command: help, version, completion, short options."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import typer

import minibroker
from minibroker import application
from minibroker.client.cli.terminal.output import run_app

VERSION = importlib.metadata.version("minibroker")


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(application(), [option]) == 0
    assert capsys.readouterr().out == f"minibroker {VERSION}\n"


def test_the_package_knows_its_version_and_looks_it_up_only_when_asked() -> None:
    assert minibroker.__version__ == VERSION
    assert "__version__" in dir(minibroker)
    code = "import sys, minibroker; print('importlib.metadata' in sys.modules, minibroker.__version__)"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code_with_path(code)], capture_output=True, text=True)
    assert ended.stdout == f"False {VERSION}\n", ended


def code_with_path(code: str) -> str:
    # -I and -S leave out modules that this environment's own start files import.
    return f"import sys; sys.path[:] = {sys.path!r}; {code}"


@pytest.mark.parametrize("command", [[], ["status"], ["topics"], ["topics", "create"], ["spark", "ingest"]])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_a_short_option_everywhere(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), [*command, option]) == 0
    printed = capsys.readouterr()
    assert " ".join(["Usage: minibroker", *command]) in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["topics", "list", "--command-config", "x"], "--command-config FILE topics list"),
        (["topics", "--command-config=x", "list"], "--command-config FILE topics"),
        (["topics", "list", "-V"], "-V topics list"),
        (["status", "--version"], "--version status"),
        (["status", "--show-completion"], "--show-completion status"),
    ],
)
def test_an_option_of_all_commands_goes_before_the_command(
    typed: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), typed) == 2
    option = remedy.split()[0]
    said = f"error: {option} is for all commands and goes before the command: `minibroker {remedy}`\n"
    assert capsys.readouterr().err == said


def commands_below(command: Any, path: list[str]) -> list[list[str]]:
    found = [path]
    for name, subcommand in getattr(command, "commands", {}).items():
        found += commands_below(subcommand, [*path, name])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_below(typer.main.get_command(application()), []), ids=" ".join)
def test_help_needs_no_knowledge_of_python(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run_app(application(), [*command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert not re.findall(r"<[^>]*>|<=|>=|\b(?:int|float|bool|str|None|True|False)\b", printed)


def test_help_says_which_packages_spark_jobs_need(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["spark"]):
        run_app(application(), [*command, "--help"])
        assert "pip install pyspark pyarrow" in capsys.readouterr().out


def test_help_says_what_a_value_looks_like(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run_app(application(), ["up", "--help"])
    lines = {line.split()[1]: line.split()[2] for line in capsys.readouterr().out.splitlines() if "│ --" in line}
    assert lines["--brokers"] == "N"
    assert lines["--format"] == "table|json"
    assert lines["--zookeeper"] == "HOST:PORT"
    assert lines["--detach"] == "Leave"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--brokers", "x"], "'--brokers': a whole number is expected, not 'x'"),
        (["up", "--brokers", "0"], "'--brokers': it must be greater than or equal to 1, not '0'"),
        (["bench", "latency", "--rate", "x"], "'--rate': a number is expected, not 'x'"),
        (["status", "--format", "xml"], "'--format': 'xml' is not one of 'table', 'json'"),
    ],
)
def test_an_error_names_no_type_of_python(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(application(), arguments) == 2
    assert capsys.readouterr().err == (
        f"error: Invalid value for {said}: see `minibroker {' '.join(arguments[:-2])} --help`\n"
    )


@pytest.mark.usefixtures("short_patience")
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        # -b is kcat's; the options of a new topic are rpk's.
        ["topics", "list", "-b", "127.0.0.1:1"],
        ["topics", "create", "t", "-p", "3", "-r", "1", "-c", "min.insync.replicas=1", "-b", "127.0.0.1:1"],
        ["consume", "t", "-b", "127.0.0.1:1"],
    ],
)
def test_short_options_are_those_of_the_tools_that_people_know(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), arguments) == 1
    assert "127.0.0.1:1: Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("minibroker topics d", "describe\ndelete\ndelete-records"),
        ("minibroker status --format j", "json"),
        ("minibroker upp", ""),
    ],
)
def test_a_shell_is_told_how_the_word_may_go_on(words: str, completed: str) -> None:
    environment = {"_MINIBROKER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "minibroker"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, completed, "")


def in_a_shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `minibroker ARGUMENTS` with this redirection in a shell."""
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-P", "-m", "minibroker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-", "<&- >&-"))],
)
def test_closed_standard_streams_are_no_trouble(closed: str) -> None:
    printed = in_a_shell(closed, "--version")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == ("" if " >&-" in f" {closed}" else f"minibroker {VERSION}\n")
    refused = in_a_shell(closed, "topics", "list", "-b", "127.0.0.1:1")  # also opens connections
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == (0 if "2>&-" in closed else 1), refused


def test_no_error_is_printed_if_the_reader_has_gone() -> None:
    # The exit code is the reader's; a traceback must not appear.
    ended = in_a_shell("| true", "bench", "--help")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

"""What every command takes beside what it is about: help, version, completion, short options."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

import minibroker
from minibroker import application
from minibroker.client.cli.output import run_app

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
    # -I and -S leave out whatever this environment's own start files import.
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
    "arguments",
    [
        # -b is kcat's, those of a new topic are rpk's.
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
    [("minibroker topics d", "describe\ndelete"), ("minibroker status --format j", "json"), ("minibroker upp", "")],
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

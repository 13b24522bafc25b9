"""Commands in messages can be pasted into a shell unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from minibroker import application
from minibroker.client.cli.commands import options
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    bootstrap_servers,
    note,
    run_app,
)
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.protocol.errors import MinibrokerError

ROOT = Path(__file__).parents[4]
SAID = "see `minibroker topics list`, `minibroker up`, `minibroker up --data DIR` or `minibroker fail --help`"


def app_that_hints() -> typer.Typer:
    app, topics = typer.Typer(add_completion=False), typer.Typer()

    def both(bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA) -> None:
        raise MinibrokerError(SAID)

    def local(data: DataOption = DEFAULT_DATA) -> None:
        raise MinibrokerError(SAID)

    topics.command("list")(both)
    topics.command("again")(both)
    app.add_typer(topics, name="topics")
    app.command("fail")(both)
    app.command("up")(local)
    return app


@pytest.mark.parametrize(
    ("typed", "repeated_by_both", "repeated_by_local"),
    [
        ([], "", ""),
        (["--data", "my cluster"], " --data 'my cluster'", " --data 'my cluster'"),
        (["--data", str(DEFAULT_DATA)], " --data .minibroker", " --data .minibroker"),
        (["--bootstrap", "b1:9092,b2:9092"], " --bootstrap b1:9092,b2:9092", ""),
        (["--bootstrap", "b1:9092", "--data", "d"], " --bootstrap b1:9092", " --data d"),
    ],
)
def test_a_hint_repeats_which_cluster_was_meant_and_only_as_its_command_takes_it(
    typed: list[str], repeated_by_both: str, repeated_by_local: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app_that_hints(), ["fail", *typed]) == 1
    assert capsys.readouterr().err == (
        f"error: see `minibroker topics list{repeated_by_both}`, `minibroker up{repeated_by_local}`, "
        "`minibroker up --data DIR` or `minibroker fail --help`\n"
    )


@pytest.mark.parametrize(
    ("typed", "is_secured", "expected"),
    [
        (
            ["--bootstrap", "b1:9092"],
            False,
            ("--command-config c.properties topics list --bootstrap b1:9092", "ADMIN_FILE", " --bootstrap b1:9092"),
        ),
        (["--bootstrap", "localhost:9092"], True, ("topics list --data {}", "", " --data {}")),
        ([], True, ("topics list --data {}", "", " --data {}")),
    ],
)
def test_a_hint_repeats_the_settings_that_reach_the_cluster_but_not_those_of_a_refused_user(
    typed: list[str],
    is_secured: bool,
    expected: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.properties").write_text("")
    data = tmp_path / "data"
    data.mkdir()
    if is_secured:
        (data / "client.properties").write_text("")
        (data / "cluster.json").write_text('{"bootstrap": "127.0.0.1:9092,127.0.0.1:9093"}')
    app, topics, acls = typer.Typer(add_completion=False), typer.Typer(), typer.Typer()
    app.callback()(options)

    def refused(bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA) -> None:
        bootstrap_servers(bootstrap, data)
        raise MinibrokerError("see `minibroker topics list`, `minibroker acls add --topic a`")

    topics.command("list")(refused)
    topics.command("again")(refused)
    acls.command("add")(refused)
    acls.command("again")(refused)
    app.add_typer(topics, name="topics")
    app.add_typer(acls, name="acls")
    assert run_app(app, ["--command-config", "c.properties", "topics", "list", *typed, "--data", str(data)]) == 1
    shown, administrator, cluster = (text.format(data) for text in expected)
    config = f"--command-config {administrator} " if administrator else ""
    assert (
        capsys.readouterr().err
        == f"error: see `minibroker {shown}`, `minibroker {config}acls add --topic a{cluster}`\n"
    )


def test_what_was_typed_is_forgotten_with_the_next_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_app(app_that_hints(), ["fail", "--data", "first"])
    capsys.readouterr()
    run_app(app_that_hints(), ["fail"])
    assert capsys.readouterr().err == f"error: {SAID}\n"
    assert pastable(SAID) == SAID


def test_notes_repeat_it_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    app = typer.Typer(add_completion=False)

    @app.command("watch")
    def watch(data: DataOption = DEFAULT_DATA) -> None:
        note("broker 2 is gone: `minibroker start 2` starts it again")

    app.command("start")(watch)
    assert run_app(app, ["watch", "--data", "here"]) == 0
    assert capsys.readouterr().err == "broker 2 is gone: `minibroker start 2 --data here` starts it again\n"


@pytest.mark.parametrize("command", [["status"], ["kill", "1"], ["topics", "list"], ["bench", "failover"]])
def test_the_way_to_a_cluster_leads_to_the_directory_that_was_asked_for(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), [*command, "--data", str(tmp_path)]) == 1
    assert f"`minibroker up --data {tmp_path}`" in capsys.readouterr().err


def test_the_demo_repeats_its_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalCluster, "up", lambda *_, **__: LocalCluster(tmp_path).file())
    assert run_app(application(), ["demo", "--data", str(tmp_path)]) == 1
    assert f"`minibroker up --data {tmp_path}`" in capsys.readouterr().err


def hints_in_the_sources() -> list[str]:
    packages = ("protocol", "client", "deploy", "spark_jobs")
    sources = (path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    return sorted({hint for source in sources for hint in re.findall(r"`minibroker ([a-z][^`]*)`", source)})


@pytest.fixture(scope="module")
def every_command() -> Any:
    return typer.main.get_command(application())


@pytest.mark.parametrize("hint", hints_in_the_sources())
def test_every_command_that_a_message_names_is_there_with_its_options(hint: str, every_command: Any) -> None:
    command = every_command
    for word in hint.replace("...", "").split("|")[0].split():
        if hasattr(command, "commands"):
            assert word in command.commands, hint
            command = command.commands[word]
        elif word.startswith("--"):
            assert any(word in parameter.opts for parameter in command.params), hint

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from minibroker.client.cli.command_admin import suggest
from minibroker.client.cli.terminal import output
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    UsageError,
    bootstrap_servers,
    confirm,
    explain,
    print_json,
    print_table,
    run_app,
)
from minibroker.client.errors import DeliveryFailed, DeliveryTimedOut, FailedRecord
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError


def failed_with(error: MinibrokerError) -> DeliveryFailed:
    return DeliveryFailed([FailedRecord("orders", 0, None, b"v", 0, (), error)])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (typer.BadParameter("x"), 2),
        (MinibrokerError("x"), 1),
        (NetworkError("x"), 1),
        (BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS), 1),
        (FileNotFoundError(2, "No such file or directory", "input.txt"), 1),
        (BrokerError(ErrorCode.REQUEST_TIMED_OUT), 3),
        (RequestTimedOut("x"), 3),
        (DeliveryTimedOut("x"), 3),
        (TimeoutError("x"), 3),
        (failed_with(DeliveryTimedOut("x")), 3),
        (failed_with(NetworkError("x")), 1),
    ],
)
def test_every_error_has_its_exit_code_and_one_line(error: Exception, code: int) -> None:
    found, line = explain(error)
    assert found == code
    assert line.startswith("error: ")
    assert "\n" not in line


def test_an_error_of_several_lines_becomes_one() -> None:
    assert explain(MinibrokerError("first\n   second"))[1] == "error: first second"


def test_an_error_of_the_operating_system_names_the_file() -> None:
    assert explain(FileNotFoundError(2, "No such file or directory", "in.txt"))[1] == (
        "error: in.txt: No such file or directory; check the path"
    )


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.callback()
    def group() -> None: ...

    @app.command()
    def fail(count: int = 0) -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code"), [(MinibrokerError("x"), 1), (typer.Exit(4), 4), (KeyboardInterrupt(), 130), (UsageError("x"), 2)]
)
def test_an_application_returns_the_exit_code(error: BaseException, code: int) -> None:
    assert run_app(app_that_raises(error), ["fail"]) == code


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["fail", "--cuont", "1"], ["fail", "--count", "x"], ["fail", "more"]]
)
def test_a_command_line_that_makes_no_sense_is_one_line_that_names_the_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app_that_raises(MinibrokerError("never reached")), arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert "--help`" in printed.err


def test_bootstrap_comes_from_the_option_or_else_from_the_local_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"bootstrap": "127.0.0.1:9092", "brokers": []}')
    assert bootstrap_servers("elsewhere:1", tmp_path) == "elsewhere:1"
    assert bootstrap_servers(None, tmp_path) == "127.0.0.1:9092"


def test_without_either_the_error_names_both_remedies(tmp_path: Path) -> None:
    with pytest.raises(MinibrokerError, match=r"minibroker up.*--bootstrap"):
        bootstrap_servers(None, tmp_path)


@pytest.mark.parametrize(
    ("environment", "typed", "chosen"),
    [
        ({"MINIBROKER_BOOTSTRAP": "env:1"}, [], "env:1"),
        ({"MINIBROKER_BOOTSTRAP": "env:1"}, ["--bootstrap", "typed:1"], "typed:1"),
        ({"MINIBROKER_DATA": "env"}, [], "of-env:1"),
        ({"MINIBROKER_DATA": "env"}, ["--data", "typed"], "of-typed:1"),
        ({"MINIBROKER_DATA": "env"}, ["--bootstrap", "typed:1"], "typed:1"),
        ({"MINIBROKER_BOOTSTRAP": "env:1", "MINIBROKER_DATA": "env"}, [], "env:1"),
        ({"MINIBROKER_BOOTSTRAP": "env:1"}, ["--data", "typed"], "of-typed:1"),
        ({"MINIBROKER_BOOTSTRAP": "env:1"}, ["--data", "typed", "--bootstrap", "typed:1"], "typed:1"),
        ({"MINIBROKER_BOOTSTRAP": "", "MINIBROKER_DATA": ""}, ["--data", "typed"], "of-typed:1"),
    ],
)
def test_the_environment_says_which_cluster_is_meant_where_nothing_was_typed(
    environment: dict[str, str],
    typed: list[str],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("env", "typed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cluster.json").write_text(f'{{"bootstrap": "of-{name}:1"}}')
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app = typer.Typer(add_completion=False)

    @app.command()
    def show(bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA) -> None:
        print_json(bootstrap_servers(bootstrap, data))

    assert run_app(app, typed) == 0
    assert json.loads(capsys.readouterr().out) == chosen


def test_nothing_is_destroyed_without_a_terminal_to_confirm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "input").open("w+") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        confirm("Delete?", yes=True)
        with pytest.raises(MinibrokerError, match="repeat with --yes"):
            confirm("Delete?", yes=False)


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "a\nb", "ids": [1, 2]})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert json.loads(printed) == {"name": "a\nb", "ids": [1, 2]}


def test_a_table_is_aligned_and_never_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("topic", "isr"), [("x" * 200, [1, 2]), ("y", []), ("z", None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "topic".ljust(200) + "  isr"
    assert lines[1] == "x" * 200 + "  1,2"
    assert lines[2].split() == ["y", "-"]
    assert lines[3].split() == ["z", "-"]


def test_notes_are_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    output.note("working ...")
    assert capsys.readouterr().err == ""


def test_a_setting_that_is_given_twice_is_refused_with_both_values() -> None:
    assert output.settings_of("--config", ["a=1", "b=x=y"], "a=1") == {"a": "1", "b": "x=y"}
    with pytest.raises(UsageError, match="--config gives a as '1' and as '2': give it once"):
        output.settings_of("--config", ["a=1", "a=2"], "a=1")


@pytest.mark.parametrize(
    ("typed", "known", "expected"),
    [
        (["ordes"], ["orders", "stock"], "error: unknown. Did you mean 'orders'?"),
        (["ordes", "stokc"], ["orders", "stock"], "error: unknown. Did you mean 'orders' or 'stock'?"),
        (["orders"], ["orders", "orders-2"], "error: unknown"),
        (["ordes"], ["stock"], "error: unknown"),
        (["a\x1b[1mb"], ["a\x1b[1mbc"], r"error: unknown. Did you mean 'a\x1b[1mbc'?"),
        (["x" * 30_000], ["x" * 29_999], "error: unknown"),
    ],
)
def test_an_error_about_an_unknown_name_ends_with_the_similar_ones(
    typed: list[str], known: list[str], expected: str
) -> None:
    error = MinibrokerError("unknown")
    suggest(error, typed, known)
    assert explain(error) == (1, expected)

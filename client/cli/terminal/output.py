"""Shared by all commands: options, output, errors, exit codes.

Data goes to stdout, everything else to stderr; progress only if stderr is a terminal. An error is one line that begins
with `error:`. Exit codes: 0 ok, 1 failure, 2 usage, 3 timeout, 4 unhealthy.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import uvloop
from typer.models import CommandInfo

from minibroker.client.cli.terminal import hints, security
from minibroker.client.cli.terminal.hints import comes_from, pastable
from minibroker.client.cli.terminal.plain_help import HELP_OPTIONS, make_plain, plain_error
from minibroker.client.errors import AuthenticationFailed, DeliveryFailed, InvalidSetting, PartialFailure
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError, as_sentence
from minibroker.protocol.words import printable

T = TypeVar("T")

FAILURE = 1
USAGE = 2
TIMED_OUT = 3
UNHEALTHY = 4
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143
LONGEST_NAME = 100
"""The most characters of a name that `shortened` leaves."""

# Typer contains Click since about 0.20 and depended on it before; this finds the class in both cases.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_ClickException: type[Exception] = _UsageError.__bases__[0]


class UsageError(MinibrokerError, ValueError):
    """The command line is wrong, whatever the state of the cluster. The text says what is expected."""


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


def _bootstrap_given(context: typer.Context, value: str | None) -> str | None:
    """`--bootstrap` overrides `--data`, but an environment variable does not override the command line."""
    hints.remember(context, "bootstrap", value)
    if comes_from(context, "bootstrap", "ENVIRONMENT") and comes_from(context, "data", "COMMANDLINE"):
        return None
    return value


def data_given(context: typer.Context, value: Path | None) -> Path | None:
    """The callback of a `--data` option: hints repeat it."""
    hints.remember(context, "data", value)
    return value


BootstrapOption = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT,...",
        envvar="MINIBROKER_BOOTSTRAP",
        callback=_bootstrap_given,
        help="Initial brokers. Default: the brokers of --data.",
    ),
]
DataOption = Annotated[
    Path,
    typer.Option(
        "--data",
        metavar="DIR",
        envvar="MINIBROKER_DATA",
        callback=data_given,
        help="Directory of the local cluster.",
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format of data.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

DEFAULT_DATA = Path(".minibroker")
_CLUSTER_FILE = "cluster.json"

API_TIMEOUT_MS = 20_000
"""Time that a command waits for a cluster that answers but cannot serve yet, for instance between controllers. The
library's default of a minute would look like a hang at a terminal."""
DETAILS_WITHIN_MS = 1_000
"""Details that leaders have not told by then, such as the ends of partitions, are unknown: an operator looks at a topic
while its leader hangs, and must see the rest. A reading of the console waits as long for a broker."""
LOOK_S = 3.0
"""Time allowed for the look-up before a change, which only serves warnings and notes."""


class _ClusterFile(msgspec.Struct):
    bootstrap: str
    running: bool = True
    """False after `down`."""


def bootstrap_servers(bootstrap: str | None, data: Path, *, even_if_down: bool = False) -> str:
    """Return `--bootstrap`, or the brokers of the local cluster, whose `client.properties` then applies unless there is
    `--command-config`. Raises MinibrokerError with the remedy, also if the local cluster is down, unless
    `even_if_down`."""
    if bootstrap is not None:
        note_overlooked(bootstrap, data)
        return bootstrap
    security.choose_of(data)
    path = data / _CLUSTER_FILE
    try:
        cluster = msgspec.json.decode(path.read_bytes(), type=_ClusterFile)
    except (FileNotFoundError, NotADirectoryError):
        raise MinibrokerError(
            f"no cluster given, and {path} does not exist: run `minibroker up`, or name brokers with "
            "--bootstrap HOST:PORT"
        ) from None
    except msgspec.MsgspecError as error:
        raise MinibrokerError(f"{path} is damaged ({error}): remove it, or use --bootstrap HOST:PORT") from error
    if not (cluster.running or even_if_down):
        raise MinibrokerError(f"the cluster in {data} is down: run `minibroker up`, or name brokers with --bootstrap")
    return cluster.bootstrap


def note_overlooked(bootstrap: str, data: Path) -> None:
    """If `--bootstrap` names a broker of the local cluster by its port, an error mentions that cluster's settings. If
    it names nothing else, commands in messages name the secured cluster by its directory, so that they use its file."""
    try:
        cluster = msgspec.json.decode((data / _CLUSTER_FILE).read_bytes(), type=_ClusterFile)
    except (OSError, msgspec.MsgspecError):
        return
    if not cluster.running:
        return
    given, known = _addresses(bootstrap), _addresses(cluster.bootstrap)
    hosts, ports = {host for host, _ in known} | _LOOPBACK, {port for _, port in known}
    if any(port in ports for _, port in given):
        security.overlook(data)
    if security.is_secured(data) and all(host in hosts and port in ports for host, port in given):
        hints.prefer_directory(data, is_default=data == DEFAULT_DATA)


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def _addresses(bootstrap: str) -> set[tuple[str, str]]:
    """Return the hosts and ports, as they are written."""
    parts = (address.strip().rpartition(":") for address in bootstrap.split(","))
    return {(host, port) for host, _, port in parts}


def name_and_value(option: str, text: str, example: str) -> tuple[str, str]:
    """Split an option `NAME=VALUE`. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise UsageError(f"{option} {text!r}: give NAME=VALUE, for instance {example}")
    return name, value


def settings_of(option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """Return the settings of a repeated option, each name once. Raises UsageError."""
    settings: dict[str, str] = {}
    for text in texts:
        name, value = name_and_value(option, text, example)
        if name in settings:
            raise UsageError(f"{option} gives {name} as {settings[name]!r} and as {value!r}: give it once")
        settings[name] = value
    return settings


def run(command: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous command to its end."""
    return uvloop.run(command)


def run_until_terminated(command: Coroutine[Any, Any, T]) -> T:
    """As `run`, but SIGTERM cancels the command like Ctrl-C, so that it can finish its work. A second SIGTERM does not
    wait for that. The exit code is then 143. If SIGTERM is ignored, it stays ignored."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return run(command)
    is_terminated = False

    async def cancellable() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        # A Python signal handler, as asyncio's own for SIGINT: a handler of the loop would not interrupt a blocked
        # write.
        def terminate(number: int, frame: FrameType | None) -> None:
            nonlocal is_terminated
            if is_terminated:
                raise KeyboardInterrupt
            is_terminated = True
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)

        signal.signal(signal.SIGTERM, terminate)
        return await command

    try:
        return run(cancellable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        if not is_terminated:
            raise
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def print_json(value: object) -> None:
    """Write one line of JSON to stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write aligned columns to stdout, never truncated, because a program may read them."""
    print_lines(table_lines(header, rows))


def print_lines(lines: Sequence[str]) -> None:
    """Write lines to stdout; the first one, a header, is bold on a terminal."""
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number, line in enumerate(lines):
        sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if bold and number == 0 else f"{line}\n")


def table_lines(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return aligned columns under a header."""
    texts = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return printable(",".join(str(item) for item in value)) or "-"
    return printable(str(value))


def shortened(name: str) -> str:
    """Return a name for a column of a table: one of 30,000 characters would pad every row. JSON has it in full."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}... ({len(name):,} characters)"


def note(text: str) -> None:
    """Write a note for a person to stderr, if that is a terminal."""
    if sys.stderr.isatty():
        inform(text)


def inform(text: str) -> None:
    """Write to stderr what also the reader of a log must know, such as work that goes on or a setting that stays."""
    sys.stderr.write(pastable(text) + "\n")


def confirm(question: str, yes: bool) -> None:
    """Ask, unless `yes`. Raises MinibrokerError if the answer is no, or if stdin is not a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise MinibrokerError(
            f"nothing was done: stdin is no terminal on which to ask {question!r}; to confirm, repeat with --yes"
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise MinibrokerError("nothing was done, because the answer was no")


def run_app(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code. User errors are one line on stderr."""
    _open_what_is_closed()
    _escape_what_cannot_be_printed()
    if "_MINIBROKER_COMPLETE" in os.environ:  # a shell asks for completions
        _plain(typer.main.get_command(app)).main(prog_name="minibroker")
    typed = sys.argv[1:] if arguments is None else list(arguments)
    with hints.repeating(functools.cache(lambda: typer.main.get_command(app))):
        return _run_command(_plain(_command_for(app, typed)), typed)


def _command_for(app: typer.Typer, arguments: list[str]) -> Any:
    """Return the application's command, with only those subcommands that the first argument names, or all if it names
    none. Building all fifty takes as long as many a command runs."""
    named = copy.copy(app)
    named.registered_commands = [info for info in app.registered_commands if _name_of(info) in arguments[:1]]
    named.registered_groups = [info for info in app.registered_groups if info.name in arguments[:1]]
    if named.registered_commands or named.registered_groups:
        return typer.main.get_group(named)
    return typer.main.get_command(app)


def _name_of(info: CommandInfo) -> str | None:
    return info.name or (info.callback and typer.main.get_command_name(info.callback.__name__))


def _plain(command: Any) -> Any:
    make_plain(command)
    return command


def _run_command(command: Any, arguments: list[str]) -> int:
    # Not `command.main(...)`, which has its own exit codes for a broken pipe and for Ctrl-C.
    code = 0
    try:
        with command.make_context("minibroker", arguments, help_option_names=HELP_OPTIONS) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        code = end.exit_code
    except BrokenPipeError:
        # The reader of our output has closed it (`minibroker consume ... | head`). Buffered output must go to
        # /dev/null, or the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return FAILURE
    except (MinibrokerError, OSError, _ClickException) as error:
        code, text = explain(error)
        if text:
            sys.stderr.write(pastable(text) + "\n")
    return code


def _open_what_is_closed() -> None:
    """Make a shell's `<&-` and `>&-` mean the same as `/dev/null`.

    Otherwise the first files and connections opened would get the numbers of standard input and output, and output
    would end up in a connection."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _escape_what_cannot_be_printed() -> None:
    """Names may contain any characters and paths any bytes; a locale may know few of them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


_REMEDIES = {
    FileNotFoundError: "; check the path",
    NotADirectoryError: "; check the path",
    IsADirectoryError: "; name a file",
    PermissionError: "; check the permissions",
}


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the line to print for an error; an empty line if the help was printed instead."""
    if isinstance(error, _ClickException):
        return USAGE, _one_line(_click_text(error))
    if isinstance(error, OSError) and not isinstance(error, MinibrokerError | TimeoutError):
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = next((text for kind, text in _REMEDIES.items() if isinstance(error, kind)), "")
        return FAILURE, f"error: {_one_line(f'{where}{error.strerror or error}{remedy}')}"
    given = security.remedy() if isinstance(error, NetworkError) else None
    text = str(error) if given is None else f"{given}: without it, {error}"
    if isinstance(error, AuthenticationFailed):
        text += security.after_refusal()
    if notes := getattr(error, "__notes__", ()):
        text = " ".join([as_sentence(text), *notes])
    return _exit_code(error), f"error: {_one_line(text)}"


def _exit_code(error: Exception) -> int:
    match error:
        case UsageError() | InvalidSetting():
            return USAGE
        case TimeoutError() | RequestTimedOut() | BrokerError(code=ErrorCode.REQUEST_TIMED_OUT):
            return TIMED_OUT
        case DeliveryFailed(failures=failures):
            parts = {_exit_code(failure.error) for failure in failures}
        case PartialFailure(results=results) if results:
            return FAILURE
        case PartialFailure(errors=errors):
            parts = {_exit_code(one) for one in errors.values()}
        case _:
            return FAILURE
    return TIMED_OUT if parts == {TIMED_OUT} else FAILURE


def _click_text(error: Any) -> str:
    text = plain_error(error.format_message(), error.__cause__)
    if not text:
        return ""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "minibroker"
    option = getattr(error, "option_name", "")
    if context is not None and context.parent is not None and (shown := hints.global_option(option)):
        command = path.removeprefix("minibroker ")
        return f"error: {option} is for all commands and goes before the command: `minibroker {shown} {command}`"
    is_number = option[1:2].isdecimal()
    negative = ", and no argument may be negative" if is_number else ""
    return f"error: {text.rstrip('.')}{negative}: see `{path} --help`"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))

"""What every command shares: options, how data and errors are printed, exit codes.

Data goes to stdout, all else to stderr; progress only where stderr is a terminal. An error is one line that begins
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

from minibroker.client.administering.groups import GroupErrors
from minibroker.client.cli.terminal import hints
from minibroker.client.cli.terminal.hints import comes_from, pastable
from minibroker.client.cli.terminal.plain_help import HELP_OPTIONS, make_plain, plain_error
from minibroker.client.errors import BrokersFailed, DeliveryFailed, InvalidSetting, PartitionErrors, TopicErrors
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError

T = TypeVar("T")

FAILURE = 1
USAGE = 2
TIMED_OUT = 3
UNHEALTHY = 4
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

# Typer has contained Click since 0.20 or so, and depended on it before; this finds the class in both cases.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_ClickException: type[Exception] = _UsageError.__bases__[0]


class UsageError(MinibrokerError, ValueError):
    """What was typed is wrong, whatever the state of the cluster. The text says what is expected."""


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


def _bootstrap_given(context: typer.Context, value: str | None) -> str | None:
    """`--bootstrap` wins over `--data`, but an environment variable does not win over what was typed."""
    hints.remember(context, "bootstrap", value)
    if comes_from(context, "bootstrap", "ENVIRONMENT") and comes_from(context, "data", "COMMANDLINE"):
        return None
    return value


def data_given(context: typer.Context, value: Path | None) -> Path | None:
    """The callback of an option `--data`: hints repeat it."""
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
        help="Brokers to ask first. Default: those of --data.",
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
FormatOption = Annotated[Format, typer.Option("--format", help="How data is printed.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before destroying.")]

DEFAULT_DATA = Path(".minibroker")

API_TIMEOUT_MS = 20_000
"""How long a command waits for a cluster that answers but cannot do what it should, such as one between controllers.
The library's minute would look like a hang to someone at a terminal."""


class _ClusterFile(msgspec.Struct):
    bootstrap: str
    running: bool = True
    """False once it has been taken down."""


def bootstrap_servers(bootstrap: str | None, data: Path) -> str:
    """`--bootstrap`, else the brokers of the local cluster. Raises MinibrokerError with the remedy."""
    if bootstrap is not None:
        return bootstrap
    path = data / "cluster.json"
    try:
        cluster = msgspec.json.decode(path.read_bytes(), type=_ClusterFile)
    except (FileNotFoundError, NotADirectoryError):
        raise MinibrokerError(
            f"no cluster given, and there is no {path}: run `minibroker up`, or name brokers with --bootstrap HOST:PORT"
        ) from None
    except msgspec.MsgspecError as error:
        raise MinibrokerError(f"{path} is damaged ({error}): remove it, or use --bootstrap HOST:PORT") from error
    if not cluster.running:
        raise MinibrokerError(f"the cluster in {data} is down: run `minibroker up`, or name brokers with --bootstrap")
    return cluster.bootstrap


def name_and_value(option: str, text: str, example: str) -> tuple[str, str]:
    """The parts of an option `NAME=VALUE`. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise UsageError(f"{option} {text!r}: NAME=VALUE is expected, for instance {example}")
    return name, value


def settings_of(option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """The settings of an option that may be repeated, each name once. Raises UsageError."""
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
    """As `run`, but SIGTERM ends the command as Ctrl-C does: it is cancelled, and so can finish what it has begun. A
    second SIGTERM does not wait for that. Then the exit code is 143. Where SIGTERM is ignored, it stays so."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return run(command)
    is_terminated = False

    async def cancellable() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        # A handler of Python's, as asyncio's own for SIGINT: one of the loop's would not end a write that waits.
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
    """One line of JSON on stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns on stdout, never truncated: a program may read them after all."""
    print_lines(table_lines(header, rows))


def print_lines(lines: Sequence[str]) -> None:
    """Lines on stdout; the first is a header, which is bold on a terminal."""
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number, line in enumerate(lines):
        sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if bold and number == 0 else f"{line}\n")


def table_lines(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Aligned columns under a header."""
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


def printable(text: str) -> str:
    """The text with what a terminal would obey, or could not show, as escapes such as \\x1b. Names of groups, members
    and clients are any characters that a client has sent."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def note(text: str) -> None:
    """A note for a person who watches: on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(pastable(text) + "\n")


def confirm(question: str, yes: bool) -> None:
    """Ask, unless `yes`. Raises MinibrokerError if the answer is no, or if there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise MinibrokerError(f"{question} Nobody can be asked here, so nothing was done: repeat with --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise MinibrokerError("nothing was done, as you answered no")


def run_app(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code. Any error of a user's is one line on stderr."""
    _open_what_is_closed()
    _escape_what_cannot_be_printed()
    if "_MINIBROKER_COMPLETE" in os.environ:  # a shell asks for completions
        _plain(typer.main.get_command(app)).main(prog_name="minibroker")
    typed = sys.argv[1:] if arguments is None else list(arguments)
    with hints.repeating(functools.cache(lambda: typer.main.get_command(app))):
        return _run_command(_plain(_command_for(app, typed)), typed)


def _command_for(app: typer.Typer, arguments: list[str]) -> Any:
    """The application's command, without those of its subcommands that the first argument does not name: to build all
    fifty takes as long as many a command. All of them where it names none."""
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
    # Not `command.main(...)`, which has exit codes of its own for a broken pipe and for Ctrl-C.
    code = 0
    try:
        with command.make_context("minibroker", arguments, help_option_names=HELP_OPTIONS) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        code = end.exit_code
    except BrokenPipeError:
        # The reader of our output has closed it (`minibroker consume ... | head`). What is still buffered must go to
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

    Otherwise the first files and connections that are opened would get the numbers of standard input and output, and
    what is printed would end up in a connection.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _escape_what_cannot_be_printed() -> None:
    """Names are any characters that a client has sent, paths any bytes, and a locale may know few of them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def explain(error: Exception) -> tuple[int, str]:
    """The exit code of an error, and the line to print; an empty one if the help was printed instead."""
    if isinstance(error, _ClickException):
        return USAGE, _one_line(_click_text(error))
    if isinstance(error, OSError) and not isinstance(error, MinibrokerError | TimeoutError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return FAILURE, f"error: {_one_line(f'{where}{error.strerror or error}')}"
    return _exit_code(error), f"error: {_one_line(str(error))}"


def _exit_code(error: Exception) -> int:
    match error:
        case UsageError() | InvalidSetting():
            return USAGE
        case TimeoutError() | RequestTimedOut() | BrokerError(code=ErrorCode.REQUEST_TIMED_OUT):
            return TIMED_OUT
        case DeliveryFailed(failures=failures):
            parts = {_exit_code(failure.error) for failure in failures}
        case PartitionErrors(results=results) | BrokersFailed(results=results) | GroupErrors(results=results) if (
            results
        ):
            return FAILURE
        case (
            TopicErrors(errors=errors)
            | PartitionErrors(errors=errors)
            | BrokersFailed(errors=errors)
            | GroupErrors(errors=errors)
        ):
            parts = {_exit_code(one) for one in errors.values()}
        case _:
            return FAILURE
    return TIMED_OUT if parts == {TIMED_OUT} else FAILURE


def _click_text(error: Any) -> str:
    text = plain_error(error.format_message())
    if not text:
        return ""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "minibroker"
    return f"error: {text.rstrip('.')}: see `{path} --help`"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))

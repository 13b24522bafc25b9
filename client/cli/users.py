"""`minibroker users`, and passwords for SCRAM in `minibroker configs alter --user`, in the syntax of kafka-configs.

A password on the command line is in the shell's history, and other users of the machine see it. So it may be in a file,
or be asked for.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from minibroker.client.administering.client_quotas import DEFAULT_ENTITY, QuotaEntity
from minibroker.client.administering.scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserErrors,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.sasl.scram import LEAST_ITERATIONS, password_problem

_MECHANISMS: dict[str, ScramMechanism] = {"SCRAM-SHA-256": "SCRAM-SHA-256", "SCRAM-SHA-512": "SCRAM-SHA-512"}
_LIKE_MECHANISMS = ("SCRAM", "PLAIN", "OAUTHBEARER", "GSSAPI")
_FORM = "NAME=[iterations=8192,password-file=FILE]"


app = typer.Typer(
    help="Show the users that have passwords. `minibroker configs alter --user NAME` adds, changes and deletes them.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Without it, typer would make the only command the group itself."""


@app.command(name="list")
def list_users(
    bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """List the users that have passwords for SCRAM, and for which mechanisms.

    `minibroker configs alter --user NAME` sets and deletes passwords."""

    async def read() -> dict[str, tuple[ScramCredentialInfo, ...]]:
        async with open_admin(bootstrap_servers(bootstrap, data)) as admin:
            return await admin.describe_user_scram_credentials()

    found = sorted(run(read()).items())
    if format is Format.JSON:
        print_json([{"user": user, "scram_iterations": dict(infos)} for user, infos in found])
    else:
        print_table(("user", "mechanism", "iterations"), [(user, *info) for user, infos in found for info in infos])


class _Given(NamedTuple):
    mechanism: ScramMechanism
    iterations: int = LEAST_ITERATIONS
    password: str | None = None
    file: str | None = None


def are_meant(to_set: Sequence[str], to_delete: Sequence[str]) -> bool:
    """Return whether the changes are of passwords. Raises UsageError if only some are, or a mechanism is unknown."""
    for option, text in [("--set", text) for text in to_set] + [("--delete", text) for text in to_delete]:
        name = text.partition("=")[0]
        if name not in _MECHANISMS and ("[" in text or name.upper().startswith(_LIKE_MECHANISMS)):
            known = " and ".join(_MECHANISMS)
            raise UsageError(f"{option} {name.partition('[')[0]}: only {known}, spelled so, have passwords to change")
    meant = [text.partition("=")[0] in _MECHANISMS for text in (*to_set, *to_delete)]
    if any(meant) and not all(meant):
        raise UsageError("passwords and quotas are changed by two commands: give one of them at a time")
    return any(meant)


def alter(
    bootstrap: str,
    entity: QuotaEntity,
    to_set: Sequence[str],
    to_delete: Sequence[str],
    validate_only: bool,
    format: Format,
) -> None:
    """Change passwords, and print what has changed. Raises UsageError."""
    user = entity.user
    if user is None or user == DEFAULT_ENTITY or entity.client_id is not None:
        raise UsageError("a password belongs to one user: give --user NAME alone")
    if validate_only:
        raise UsageError("--validate-only: a password cannot be checked without setting it")
    given = [_parsed(text) for text in to_set]
    names = [one.mechanism for one in given] + [_MECHANISMS[name] for name in to_delete]
    if len({*names}) < len(names):
        raise UsageError("a mechanism is changed twice: give each once")
    changes: list[UserScramCredentialUpsertion | UserScramCredentialDeletion] = [
        UserScramCredentialUpsertion(user, one.mechanism, _password(one, user), one.iterations) for one in given
    ]
    changes += [UserScramCredentialDeletion(user, _MECHANISMS[name]) for name in to_delete]

    async def write() -> None:
        async with open_admin(bootstrap, users=[user]) as admin:
            try:
                await admin.alter_user_scram_credentials(changes)
            except UserErrors as failed:
                raise failed.errors[user] from None

    run(write())
    if format is Format.JSON:
        print_json({"entity": entity._asdict(), "changed": names, "validate_only": False})
    else:
        sys.stdout.write(f"changed {', '.join(names)} of {entity}\n")


def _parsed(text: str) -> _Given:
    """Errors do not show the text, which may have a password."""
    name, _, value = text.partition("=")
    given = _Given(_MECHANISMS[name])
    if not (value.startswith("[") and value.endswith("]")):
        raise UsageError(f"--set {name}: give {_FORM}, or {name}=[] to be asked for the password")
    rest = value[1:-1]
    while rest:
        key, equals, rest = rest.partition("=")
        if equals and key == "password":  # it may have commas, so it is the last one
            given, rest = given._replace(password=rest), ""
            continue
        part, _, rest = rest.partition(",")
        if equals and key == "password-file":
            given = given._replace(file=part)
        elif equals and key == "iterations" and part.isdecimal():
            given = given._replace(iterations=int(part))
        else:
            raise UsageError(f"--set {name}: give {_FORM}, and password=... instead of password-file as the last one")
    if given.password is not None and given.file is not None:
        raise UsageError(f"--set {name}: give password or password-file, but not both")
    return given


def _password(given: _Given, user: str) -> str:
    """Return a password that can be set. Raises UsageError, which says where the password is and never shows it."""
    if given.password is not None:
        place, password = "the password", given.password
    elif given.file is not None:
        place, password = f"the password in {given.file}", _content(given.mechanism, given.file)
    else:
        place, password = "the password", _typed(given.mechanism, user)
    problem = password_problem(password)
    if problem is not None:
        raise UsageError(f"--set {given.mechanism}: {place} {problem}. Nothing was changed")
    return password


def _content(mechanism: ScramMechanism, file: str) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--set {mechanism}: {file} cannot be read: {reason}") from error
    lines = len(text.splitlines())
    if lines > 1:
        raise UsageError(
            f"--set {mechanism}: {file} has {lines} lines: give a file with one, the password. Nothing was changed"
        )
    return text


def _typed(mechanism: ScramMechanism, user: str) -> str:
    if not sys.stdin.isatty():
        raise UsageError(f"--set {mechanism}: nobody can be asked for the password here: give password-file=FILE")
    try:
        password = getpass.getpass(f"Password of {user} for {mechanism}: ")
        again = getpass.getpass("Again: ")
    except EOFError:
        raise UsageError("no password was entered: nothing was changed") from None
    if again != password:
        raise UsageError("the passwords differ: nothing was changed")
    return password

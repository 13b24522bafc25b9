"""The quotas of users and clients, for `minibroker configs`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.client_quotas import DEFAULT_ENTITY, QuotaEntity, QuotaErrors
from minibroker.client.administering.scram import UserErrors
from minibroker.client.cli.missing_names import warnings_of_users
from minibroker.client.cli.terminal.output import (
    LOOK_S,
    Format,
    UsageError,
    inform,
    name_and_value,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError

UserOption = Annotated[str | None, typer.Option("--user", metavar="NAME", help="Quotas and passwords of this user.")]
UserDefaultOption = Annotated[bool, typer.Option("--user-default", help="Quotas of users without their own.")]
ClientIdOption = Annotated[str | None, typer.Option("--client-id", metavar="ID", help="Quotas of this client id.")]
ClientIdDefaultOption = Annotated[
    bool, typer.Option("--client-id-default", help="Quotas of client ids without their own.")
]
IpOption = Annotated[str | None, typer.Option("--ip", metavar="ADDRESS", help="Quotas of this IP address.")]
IpDefaultOption = Annotated[bool, typer.Option("--ip-default", help="Quotas of addresses without their own.")]


def entity_of(
    user: str | None,
    user_default: bool,
    client_id: str | None,
    client_id_default: bool,
    ip: str | None,
    ip_default: bool,
) -> QuotaEntity | None:
    """Return the entity that the options name; None: none. Raises UsageError."""
    for name, is_default, option in (
        (user, user_default, "--user"),
        (client_id, client_id_default, "--client-id"),
        (ip, ip_default, "--ip"),
    ):
        if name is not None and is_default:
            raise UsageError(f"give {option} NAME or {option}-default, but not both")
        if name == "":
            raise UsageError(f"{option} is empty")
    entity = QuotaEntity(
        DEFAULT_ENTITY if user_default else user,
        DEFAULT_ENTITY if client_id_default else client_id,
        DEFAULT_ENTITY if ip_default else ip,
    )
    if entity.ip is not None and entity != QuotaEntity(ip=entity.ip):
        raise UsageError("give --ip without --user and --client-id")
    return None if entity == QuotaEntity() else entity


def describe(bootstrap: str, entity: QuotaEntity, format: Format) -> None:
    """Print the quotas of all entities that have these parts, and for which mechanisms a user has a password."""

    async def read() -> tuple[dict[QuotaEntity, dict[str, float]], Mapping[str, int]]:
        needs = ["--operation DescribeConfigs --operation Describe --cluster"] if entity.user is not None else []
        async with open_admin(bootstrap, needs=needs) as admin:
            quotas = await admin.describe_client_quotas(user=entity.user, client_id=entity.client_id, ip=entity.ip)
            if entity.user in (None, DEFAULT_ENTITY) or entity.client_id is not None:
                return quotas, {}
            try:
                described = await admin.describe_user_scram_credentials([entity.user])
            except UserErrors as failed:
                error = failed.errors[entity.user]
                if isinstance(error, BrokerError) and error.code is ErrorCode.RESOURCE_NOT_FOUND:
                    return quotas, {}
                raise error from None
            return quotas, {found.mechanism: found.iterations for found in described[entity.user]}

    found, passwords = run(read())
    if format is Format.JSON:
        objects = [each._asdict() | {"quotas": quotas} for each, quotas in found.items()]
        if passwords:
            objects.append(entity._asdict() | {"scram_iterations": dict(passwords)})
        print_json(objects)
        return
    rows = [(str(each), name, f"{value:.15g}") for each, quotas in found.items() for name, value in quotas.items()]
    rows += [(str(entity), name, f"iterations={iterations}") for name, iterations in passwords.items()]
    if not rows:
        sys.stdout.write(f"nothing is set for {entity}\n")
        return
    print_table(("of", "quota", "value"), rows)


def alter(
    bootstrap: str,
    entity: QuotaEntity,
    to_set: Sequence[str],
    to_delete: Sequence[str],
    validate_only: bool,
    format: Format,
) -> None:
    """Change quotas, and print what has changed. Raises UsageError."""
    changes: dict[str, float | None] = {}
    for text in to_set:
        name, value = name_and_value("--set", text, "producer_byte_rate=1000000")
        try:
            changes[name] = float(value)
        except ValueError:
            raise UsageError(f"--set {name}: a quota is a number, for instance {name}=1000000") from None
    changes |= dict.fromkeys(to_delete)
    if len(changes) < len(to_set) + len(to_delete):
        raise UsageError("a quota is changed twice: give each once")
    if not changes:
        raise UsageError("no change given: give --set NAME=VALUE or --delete NAME")

    async def write() -> tuple[list[str], list[str]]:
        """Return the quotas that were to be removed and are not set, and the users that may be misspelled."""
        async with open_admin(bootstrap) as admin:
            not_set = await _not_set(admin, entity, to_delete)
            try:
                await admin.alter_client_quotas({entity: changes}, validate_only=validate_only)
            except QuotaErrors as failed:
                raise failed.errors[entity] from None
            users = [entity.user] if to_set and entity.user not in (None, DEFAULT_ENTITY) else []
            return not_set, await warnings_of_users(admin, users, "the quota applies")

    not_set, warnings = run(write())
    changed = [name for name in changes if name not in not_set]
    if format is Format.JSON:
        print_json(
            {
                "entity": entity._asdict(),
                "changed": changed,
                "was_not_set": not_set,
                "validate_only": validate_only,
            }
        )
    else:
        done = "could change" if validate_only else "changed"
        if changed:
            sys.stdout.write(f"{done} {', '.join(changed)} of {entity}\n")
        for name in not_set:
            sys.stdout.write(f"{name} of {entity} was not set\n")
    for text in warnings:
        inform(text)


async def _not_set(admin: Admin, entity: QuotaEntity, names: Sequence[str]) -> list[str]:
    """Return the names of quotas that this entity does not have itself; none if the caller may not see quotas. The
    change reports errors."""
    if not names:
        return []
    with suppress(TimeoutError, BrokerError, NetworkError):
        async with asyncio.timeout(LOOK_S):
            found = await admin.describe_client_quotas(user=entity.user, client_id=entity.client_id, ip=entity.ip)
            return [name for name in names if name not in found.get(entity, {})]
    return []

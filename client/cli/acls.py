"""`minibroker acls`: list, add and remove access control lists, with the options of Kafka's kafka-acls."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from minibroker.client.administering.acls import shown
from minibroker.client.cli.missing_names import warnings_of_topics, warnings_of_users
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    YesOption,
    bootstrap_servers,
    confirm,
    inform,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.acls import (
    ANYBODY,
    CLUSTER_NAME,
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    problem_of,
    word_of,
)
from minibroker.protocol.words import counted

Names = list[str] | None

TopicOption = Annotated[Names, typer.Option("--topic", metavar="NAME", help="This topic. May be repeated.")]
GroupOption = Annotated[Names, typer.Option("--group", metavar="NAME", help="This group. May be repeated.")]
TransactionalIdOption = Annotated[
    Names, typer.Option("--transactional-id", metavar="ID", help="This transactional id. May be repeated.")
]
ClusterOption = Annotated[bool, typer.Option("--cluster", help="The cluster itself.")]
PatternOption = Annotated[
    str, typer.Option("--resource-pattern-type", metavar="TYPE", help="literal, prefixed, or in searches any or match.")
]
OperationOption = Annotated[
    Names, typer.Option("--operation", metavar="NAME", help="This operation, or All, the default. May be repeated.")
]
AllowedOption = Annotated[
    Names, typer.Option("--allow-principal", metavar="User:NAME", help="Allow this principal. May be repeated.")
]
DeniedOption = Annotated[
    Names, typer.Option("--deny-principal", metavar="User:NAME", help="Deny this principal. May be repeated.")
]
AllowedHostOption = Annotated[
    Names, typer.Option("--allow-host", metavar="IP", help="Allow at this address only. May be repeated.")
]
DeniedHostOption = Annotated[
    Names, typer.Option("--deny-host", metavar="IP", help="Deny at this address only. May be repeated.")
]
ProducerOption = Annotated[
    bool,
    typer.Option("--producer", help="What producers need: Write, Describe, Create on topics, Write on the given ids."),
]
ConsumerOption = Annotated[
    bool, typer.Option("--consumer", help="What consumers need: Read and Describe on topics, Read on groups.")
]
IdempotentOption = Annotated[
    bool, typer.Option("--idempotent", help="With --producer: IdempotentWrite on the cluster.")
]

app = typer.Typer(help="Show and change who may do what.", no_args_is_help=True)

_O = AclOperation
_NOT_IN_TOPICS = re.compile("[^A-Za-z0-9._-]")
_OPTIONS = {
    AclResourceType.TOPIC: "--topic",
    AclResourceType.GROUP: "--group",
    AclResourceType.CLUSTER: "--cluster",
    AclResourceType.TRANSACTIONAL_ID: "--transactional-id",
}


@app.command("list")
def list_(
    topic: TopicOption = None,
    group: GroupOption = None,
    transactional_id: TransactionalIdOption = None,
    cluster: ClusterOption = False,
    principal: Annotated[
        Names, typer.Option("--principal", metavar="User:NAME", help="Only those of this principal. May be repeated.")
    ] = None,
    resource_pattern_type: PatternOption = "any",
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """List access control lists, of these resources or of all."""
    for who in principal or []:
        if not all(who.partition(":")):
            raise UsageError(f"--principal {who!r} is not of the form type:name: give User:{who.strip(':') or 'NAME'}")
    pattern_type = _pattern_type(resource_pattern_type)
    named = [AclFilter(*each, pattern_type) for each in _resources(topic, group, transactional_id, cluster)]
    filters = named or [AclFilter(pattern_type=pattern_type)]
    if principal:
        filters = [each._replace(principal=who) for each in filters for who in principal]
    found = run(_list(bootstrap_servers(bootstrap, data), filters))
    if format is Format.JSON:
        print_json([_fields(binding) for binding in found])
    else:
        print_table(
            ("resource", "pattern", "name", "permission", "principal", "operation", "host"),
            [
                (
                    pattern.resource_type.shown,
                    pattern.pattern_type.shown.lower(),
                    pattern.name,
                    entry.permission.shown,
                    entry.principal,
                    entry.operation.shown,
                    entry.host,
                )
                for pattern, entry in found
            ],
        )


@app.command()
def add(
    topic: TopicOption = None,
    group: GroupOption = None,
    transactional_id: TransactionalIdOption = None,
    cluster: ClusterOption = False,
    allow_principal: AllowedOption = None,
    deny_principal: DeniedOption = None,
    allow_host: AllowedHostOption = None,
    deny_host: DeniedHostOption = None,
    operation: OperationOption = None,
    producer: ProducerOption = False,
    consumer: ConsumerOption = False,
    idempotent: IdempotentOption = False,
    resource_pattern_type: PatternOption = "literal",
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Allow or deny principals operations on resources.

    Without a host, at all hosts. `--resource-pattern-type prefixed` means all names that begin with the given one, and
    the name `*` means all. A user or topic that does not exist yet is no error, but a warning on stderr names it."""
    for principals, hosts, word in ((allow_principal, allow_host, "allow"), (deny_principal, deny_host, "deny")):
        if hosts and not principals:
            raise UsageError(f"--{word}-host needs a principal: give --{word}-principal User:NAME, or 'User:*' for all")
        for host in hosts or []:
            _check_host(f"--{word}-host", host)
    entries = _entries(allow_principal, allow_host, AclPermissionType.ALLOW)
    entries += _entries(deny_principal, deny_host, AclPermissionType.DENY)
    if not entries:
        raise UsageError("no principal given: give --allow-principal User:NAME or --deny-principal User:NAME")
    if deny_principal and (producer or consumer):
        raise UsageError("--producer and --consumer only allow: give --deny-principal with --operation")
    resources = _resources(topic, group, transactional_id, cluster)
    needed = _needed(resources, operation, producer, consumer, idempotent)
    for kind, name, each in needed:
        _check_operation(kind, each)
        if kind is AclResourceType.TOPIC and name != WILDCARD and _NOT_IN_TOPICS.search(name):
            raise UsageError(
                f"--topic {name!r}: no topic can have such a name. Give a name, * for all, or the beginning of names "
                "with --resource-pattern-type prefixed"
            )
    pattern_type = _pattern_type(resource_pattern_type)
    bindings = [
        AclBinding(
            ResourcePattern(kind, name, PatternType.LITERAL if kind is AclResourceType.CLUSTER else pattern_type),
            AccessControlEntry(principal, host, each, permission),
        )
        for kind, name, each in needed
        for principal, host, permission in entries
    ]
    for binding in bindings:
        problem = problem_of(binding)
        if problem is not None:
            raise UsageError(problem)
    warnings = run(_add(bootstrap_servers(bootstrap, data), bindings))
    for binding in bindings:
        sys.stdout.write(f"added: {shown(binding)}\n")
    sys.stdout.flush()
    for text in warnings:
        inform(text)


@app.command()
def remove(
    topic: TopicOption = None,
    group: GroupOption = None,
    transactional_id: TransactionalIdOption = None,
    cluster: ClusterOption = False,
    allow_principal: AllowedOption = None,
    deny_principal: DeniedOption = None,
    allow_host: AllowedHostOption = None,
    deny_host: DeniedHostOption = None,
    operation: OperationOption = None,
    producer: ProducerOption = False,
    consumer: ConsumerOption = False,
    idempotent: IdempotentOption = False,
    resource_pattern_type: PatternOption = "literal",
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Remove access control lists of resources: those that `add` with the same options would add, or all of a resource
    if only the resource is given.

    Prints those that match and asks for confirmation."""
    resources = _resources(topic, group, transactional_id, cluster)
    pattern_type = _pattern_type(resource_pattern_type)
    entries: list[tuple[str | None, str | None, AclPermissionType]] = []
    entries += _entries(allow_principal, allow_host, AclPermissionType.ALLOW)
    entries += _entries(deny_principal, deny_host, AclPermissionType.DENY)
    whole = not entries and not operation and not producer and not consumer
    if whole and not resources:
        raise UsageError("no resource given: give --topic, --group, --transactional-id or --cluster")
    if whole:
        needed: Sequence[tuple[AclResourceType, str, AclOperation]] = [(*each, AclOperation.ANY) for each in resources]
    else:
        needed = _needed(resources, operation, producer, consumer, idempotent)
    filters = [
        AclFilter(
            kind,
            name,
            PatternType.LITERAL if kind is AclResourceType.CLUSTER else pattern_type,
            principal,
            host,
            each,
            permission,
        )
        for kind, name, each in needed
        for principal, host, permission in entries or [(None, None, AclPermissionType.ANY)]
    ]
    servers = bootstrap_servers(bootstrap, data)
    removed: list[AclBinding] = []
    if yes or _is_confirmed(run(_list(servers, filters))):
        removed = run(_remove(servers, filters))
    for binding in removed:
        sys.stdout.write(f"removed: {shown(binding)}\n")
    if not removed:
        sys.stdout.write("nothing removed: no access control list matches (`minibroker acls list` shows all)\n")


def _is_confirmed(found: Sequence[AclBinding]) -> bool:
    """Show the access control lists that match, and ask whether to remove them. False: there are none. Raises
    MinibrokerError if the answer is no."""
    if not found:
        return False
    for binding in found:
        sys.stderr.write(f"matches: {shown(binding)}\n")
    confirm(f"Remove {counted(len(found), 'access control list')}?", yes=False)
    return True


def _pattern_type(text: str) -> PatternType:
    try:
        return word_of(PatternType, text)
    except ValueError as error:
        raise UsageError(f"--resource-pattern-type: {error}") from None


def _resources(
    topics: Names, groups: Names, transactional_ids: Names, cluster: bool
) -> list[tuple[AclResourceType, str]]:
    named = [(AclResourceType.TOPIC, topics), (AclResourceType.GROUP, groups)]
    named.append((AclResourceType.TRANSACTIONAL_ID, transactional_ids))
    resources = [(kind, name) for kind, names in named for name in names or []]
    return resources + ([(AclResourceType.CLUSTER, CLUSTER_NAME)] if cluster else [])


def _entries(
    principals: Names, hosts: Names, permission: AclPermissionType
) -> list[tuple[str, str, AclPermissionType]]:
    if hosts and not principals:
        principals = [ANYBODY]
    return [(principal, host, permission) for principal in principals or [] for host in hosts or [WILDCARD]]


def _check_host(option: str, host: str) -> None:
    """Raises UsageError for a host that brokers never see: they compare IP addresses as text."""
    if host == WILDCARD:
        return
    try:
        written = str(ipaddress.ip_address(host))
    except ValueError:
        raise UsageError(f"{option} {host!r}: give an IP address, as brokers look up no names, or * for all") from None
    if written != host:
        raise UsageError(f"{option} {host!r}: write the address as brokers do, {written}")


def _check_operation(kind: AclResourceType, operation: AclOperation) -> None:
    """Raises UsageError for an operation that no request needs on the resource, as kafka-acls does."""
    meant = SUPPORTED_OPERATIONS[kind]
    if operation is not _O.ALL and operation not in meant:
        names = ", ".join(each.shown for each in meant)
        raise UsageError(
            f"--operation {operation.shown} means nothing for {_OPTIONS[kind]}: no request needs it. Use {names} or All"
        )


def _check_roles(
    resources: Iterable[tuple[AclResourceType, str]], producer: bool, consumer: bool, idempotent: bool
) -> None:
    """Raises UsageError for resources that the roles do not have, or that they lack, as kafka-acls does."""
    given = {kind for kind, _ in resources}
    role = "--consumer" if not producer else "--producer with --consumer" if consumer else "--producer"
    required, allowed = {AclResourceType.TOPIC}, {AclResourceType.TOPIC}
    if producer:
        allowed.add(AclResourceType.TRANSACTIONAL_ID)
    if consumer:
        required.add(AclResourceType.GROUP)
        allowed.add(AclResourceType.GROUP)
    missing = [_OPTIONS[kind] for kind in sorted(required - given)]
    if missing:
        why = ": a consumer reads topics as a member of a group" if consumer else ""
        raise UsageError(f"{role} needs {' and '.join(f'{option} NAME' for option in missing)}{why}")
    unused = [_OPTIONS[kind] for kind in sorted(given - allowed)]
    if unused:
        raise UsageError(f"{role} gives no rights on {' and '.join(unused)}: use --operation in a command of its own")
    if idempotent and not producer:
        raise UsageError("--idempotent belongs to --producer: give both")


def _needed(
    resources: Iterable[tuple[AclResourceType, str]],
    operations: Names,
    producer: bool,
    consumer: bool,
    idempotent: bool,
) -> list[tuple[AclResourceType, str, AclOperation]]:
    """Return what is to be allowed or denied: of the roles, or the given operations."""
    needed: dict[tuple[AclResourceType, str, AclOperation], None] = {}
    resources = list(resources)
    of_roles: dict[AclResourceType, list[AclOperation]] = {}
    if producer:
        of_roles = {
            AclResourceType.TOPIC: [_O.WRITE, _O.DESCRIBE, _O.CREATE],
            AclResourceType.TRANSACTIONAL_ID: [_O.WRITE, _O.DESCRIBE],
        }
    if consumer:
        of_roles.setdefault(AclResourceType.TOPIC, []).extend([_O.READ, _O.DESCRIBE])
        of_roles[AclResourceType.GROUP] = [_O.READ]
    if of_roles:
        if operations:
            raise UsageError("--producer and --consumer name their operations themselves: leave --operation out")
        _check_roles(resources, producer, consumer, idempotent)
        for kind, name in resources:
            needed.update(((kind, name, operation), None) for operation in of_roles.get(kind, []))
        if idempotent:
            needed[AclResourceType.CLUSTER, CLUSTER_NAME, _O.IDEMPOTENT_WRITE] = None
    else:
        if idempotent:
            raise UsageError("--idempotent belongs to --producer: or give --cluster --operation IdempotentWrite")
        if not resources:
            raise UsageError("no resource given: give --topic, --group, --transactional-id or --cluster")
        try:
            given = [word_of(AclOperation, text) for text in operations or ["All"]]
        except ValueError as error:
            raise UsageError(f"--operation: {error}") from None
        needed.update(((kind, name, operation), None) for kind, name in resources for operation in given)
    return list(needed)


def _fields(binding: AclBinding) -> dict[str, str]:
    pattern, entry = binding
    return {
        "resource_type": pattern.resource_type.name,
        "name": pattern.name,
        "pattern_type": pattern.pattern_type.name,
        "principal": entry.principal,
        "host": entry.host,
        "operation": entry.operation.name,
        "permission": entry.permission.name,
    }


async def _list(bootstrap: str, filters: Sequence[AclFilter]) -> list[AclBinding]:
    async with open_admin(bootstrap) as admin:
        found = [binding for wanted in filters for binding in await admin.describe_acls(wanted)]
        return list(dict.fromkeys(found))


async def _add(bootstrap: str, bindings: Sequence[AclBinding]) -> list[str]:
    """Return warnings about names that do not exist. A topic that the user may create need not exist."""
    named = {
        pattern.name: None
        for pattern, entry in bindings
        if pattern.resource_type is AclResourceType.TOPIC
        and pattern.pattern_type is PatternType.LITERAL
        and pattern.name != WILDCARD
        and entry.operation is not _O.CREATE
    }
    parts = (entry.principal.partition(":") for _, entry in bindings)
    users = [name for kind, _, name in parts if kind == "User" and name != WILDCARD]
    applies = "what was added applies"
    async with open_admin(bootstrap) as admin:
        await admin.create_acls(bindings)
        return [
            *await warnings_of_users(admin, users, applies),
            *await warnings_of_topics(admin, list(named), applies),
        ]


async def _remove(bootstrap: str, filters: Sequence[AclFilter]) -> list[AclBinding]:
    async with open_admin(bootstrap) as admin:
        return await admin.delete_acls(filters)

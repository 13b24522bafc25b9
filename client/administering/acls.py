"""Access control lists: CreateAcls, DescribeAcls and DeleteAcls at any broker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Never

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import PartialFailure
from minibroker.protocol import messages as m
from minibroker.protocol.acls import (
    WILDCARD,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.apis import CREATE_ACLS, DELETE_ACLS, DESCRIBE_ACLS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, error_of


class AclErrors(PartialFailure[AclBinding, Never]):
    """Some ACLs of a request were not created or deleted; the others were. `errors` is by binding."""

    @staticmethod
    def _name(key: AclBinding) -> str:
        return shown(key)


def shown(binding: AclBinding) -> str:
    """Return an ACL in words."""
    pattern, entry = binding
    permission = "may" if entry.permission is AclPermissionType.ALLOW else "may not"
    host = "" if entry.host == WILDCARD else f" at {entry.host}"
    return f"{entry.principal}{host} {permission} {entry.operation.shown} {pattern}"


async def create(requests: AdminRequests, bindings: Iterable[AclBinding]) -> None:
    """See `Admin.create_acls`."""
    asked = list(dict.fromkeys(bindings))
    if not asked:
        return
    creations = [
        m.AclCreation(
            pattern.resource_type,
            pattern.name,
            entry.principal,
            entry.host,
            entry.operation,
            entry.permission,
            pattern.pattern_type,
        )
        for pattern, entry in asked
    ]
    answer = await requests.ask(None, CREATE_ACLS, m.CreateAclsRequest(creations))
    errors: dict[AclBinding, MinibrokerError] = {
        binding: _problem(result.error_code, result.error_message)
        for binding, result in zip(asked, answer.results, strict=True)
        if result.error_code
    }
    if errors:
        raise AclErrors(errors)


async def describe(requests: AdminRequests, wanted: AclFilter) -> list[AclBinding]:
    """See `Admin.describe_acls`."""
    answer = await requests.ask(None, DESCRIBE_ACLS, request_of(wanted))
    if answer.error_code:
        raise _problem(answer.error_code, answer.error_message)
    return bindings_of(answer)


def request_of(wanted: AclFilter) -> m.DescribeAclsRequest:
    return m.DescribeAclsRequest(*_fields(wanted))


def bindings_of(answer: m.DescribeAclsResponse) -> list[AclBinding]:
    """Return what the answer lists; nothing if it is an error."""
    return [
        _binding(resource.resource_type, resource.resource_name, resource.pattern_type, each)
        for resource in answer.resources
        for each in resource.acls
    ]


async def delete(requests: AdminRequests, filters: Sequence[AclFilter]) -> list[AclBinding]:
    """See `Admin.delete_acls`."""
    if not filters:
        return []
    request = m.DeleteAclsRequest([m.AclFilterFields(*_fields(each)) for each in filters])
    answer = await requests.ask(None, DELETE_ACLS, request)
    deleted: list[AclBinding] = []
    errors: dict[AclBinding, MinibrokerError] = {}
    for result in answer.filter_results:
        if result.error_code:
            raise _problem(result.error_code, result.error_message)
        for each in result.matching_acls:
            binding = _binding(each.resource_type, each.resource_name, each.pattern_type, each)
            if each.error_code:
                errors[binding] = _problem(each.error_code, each.error_message)
            else:
                deleted.append(binding)
    if errors:
        raise AclErrors(errors)
    return deleted


def _problem(code: int, message: str) -> BrokerError:
    return BrokerError(error_of(code), message, is_complete=bool(message) and code != ErrorCode.SECURITY_DISABLED)


def _fields(wanted: AclFilter) -> tuple[int, str | None, str | None, str | None, int, int, int]:
    return (
        wanted.resource_type,
        wanted.name,
        wanted.principal,
        wanted.host,
        wanted.operation,
        wanted.permission,
        wanted.pattern_type,
    )


def _binding(
    resource_type: int, name: str, pattern_type: int, entry: m.AclDescription | m.DeleteAclsMatchingAcl
) -> AclBinding:
    return AclBinding(
        ResourcePattern(AclResourceType(resource_type), name, PatternType(pattern_type)),
        AccessControlEntry(
            entry.principal, entry.host, AclOperation(entry.operation), AclPermissionType(entry.permission_type)
        ),
    )

"""CreateAcls, DescribeAcls and DeleteAcls: any broker serves them. The others learn of changes through ZooKeeper."""

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.broker.security.acl_store import AclStore
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    problem_of,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    AclCreation,
    AclCreationResult,
    AclDescription,
    AclFilterFields,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)

TIMEOUT_MS = 20_000
"""The limit for each request, which has no timeout of its own. It is below the clients' default."""


def _store(services: Services) -> AclStore:
    if services.acls is None:
        raise BrokerError(ErrorCode.SECURITY_DISABLED, "authorizer.class.name is not set on this broker")
    return services.acls.store


def _binding(asked: AclCreation) -> AclBinding:
    """Raises ValueError."""
    binding = AclBinding(
        ResourcePattern(
            AclResourceType(asked.resource_type), asked.resource_name, PatternType(asked.resource_pattern_type)
        ),
        AccessControlEntry(
            asked.principal, asked.host, AclOperation(asked.operation), AclPermissionType(asked.permission_type)
        ),
    )
    problem = problem_of(binding)
    if problem is not None:
        raise ValueError(problem)
    return binding


def _filter(asked: AclFilterFields) -> AclFilter:
    """Raises BrokerError(INVALID_REQUEST)."""
    try:
        return AclFilter(
            AclResourceType(asked.resource_type_filter),
            asked.resource_name_filter,
            PatternType(asked.pattern_type_filter),
            asked.principal_filter,
            asked.host_filter,
            AclOperation(asked.operation),
            AclPermissionType(asked.permission_type),
        )
    except ValueError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"in a filter of ACLs: {error}") from error


async def handle_describe_acls(services: Services, request: Request, body: DescribeAclsRequest) -> None:
    """Raise BrokerError: SECURITY_DISABLED, INVALID_REQUEST."""
    resources: dict[ResourcePattern, DescribeAclsResource] = {}
    for pattern, entry in _store(services).bindings.matching(_filter(body)):
        resource = resources.get(pattern)
        if resource is None:
            resource = resources[pattern] = DescribeAclsResource(
                pattern.resource_type, pattern.name, [], pattern.pattern_type
            )
        resource.acls.append(AclDescription(entry.principal, entry.host, entry.operation, entry.permission))
    request.respond(DescribeAclsResponse(0, ErrorCode.NONE, resources=list(resources.values())))


async def handle_create_acls(services: Services, request: Request, body: CreateAclsRequest) -> None:
    """Answer when the ACLs are in ZooKeeper and hold on this broker. Raises BrokerError(SECURITY_DISABLED)."""
    store = _store(services)

    async def create() -> None:
        asked: list[AclBinding | str] = []
        for creation in body.creations:
            try:
                asked.append(_binding(creation))
            except ValueError as error:
                asked.append(f"the ACL is not created: {error}")
        failed = await store.add(each for each in asked if isinstance(each, AclBinding))
        results = []
        for each in asked:
            if isinstance(each, str):
                results.append(AclCreationResult(ErrorCode.INVALID_REQUEST, each))
            elif each.pattern in failed:
                results.append(AclCreationResult(failed[each.pattern].code, failed[each.pattern].detail))
            else:
                results.append(AclCreationResult(ErrorCode.NONE))
        request.respond(CreateAclsResponse(0, results))

    answer_later(services, request, TIMEOUT_MS, create)


async def handle_delete_acls(services: Services, request: Request, body: DeleteAclsRequest) -> None:
    """Answer when the ACLs are gone from ZooKeeper and from this broker. Raises BrokerError: SECURITY_DISABLED,
    INVALID_REQUEST."""
    store = _store(services)
    filters = [_filter(each) for each in body.filters]

    async def delete() -> None:
        removed, failed = await store.remove(filters)
        request.respond(
            DeleteAclsResponse(
                0,
                [
                    DeleteAclsFilterResult(ErrorCode.NONE, matching_acls=[_removed(each, failed) for each in some])
                    for some in removed
                ],
            )
        )

    answer_later(services, request, TIMEOUT_MS, delete)


def _removed(binding: AclBinding, failed: dict[ResourcePattern, BrokerError]) -> DeleteAclsMatchingAcl:
    pattern, entry = binding
    error = failed.get(pattern)
    return DeleteAclsMatchingAcl(
        ErrorCode.NONE if error is None else error.code,
        pattern.resource_type,
        pattern.name,
        entry.principal,
        entry.host,
        entry.operation,
        entry.permission,
        pattern.pattern_type,
        "" if error is None else error.detail,
    )

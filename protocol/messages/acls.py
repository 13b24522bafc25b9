"""Requests that create, describe and delete access control lists. `protocol.acls` has the meaning of the numbers."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import Int8, Int16, Int32, Message, String

MAX_ACLS = 100_000
MAX_ACL_CHANGES = 10_000
"""Bindings or filters of one request. Each pattern takes a write to ZooKeeper."""
LITERAL = 3

# --- CreateAcls (30), DescribeAcls (29), DeleteAcls (31) ---------------------------------------------------------


class AclCreation(Message):
    resource_type: Int8
    resource_name: String
    principal: String
    host: String
    operation: Int8
    permission_type: Int8
    resource_pattern_type: Int8 = LITERAL


class CreateAclsRequest(Message):
    creations: Annotated[list[AclCreation], Meta(max_length=MAX_ACL_CHANGES)]


class AclCreationResult(Message):
    error_code: Int16
    error_message: String = ""


class CreateAclsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[AclCreationResult], Meta(max_length=MAX_ACL_CHANGES)]
    """One for each creation, in their order."""


class AclFilterFields(Message):
    """None matches everything."""

    resource_type_filter: Int8
    resource_name_filter: String | None
    principal_filter: String | None
    host_filter: String | None
    operation: Int8
    permission_type: Int8
    pattern_type_filter: Int8 = LITERAL


class DescribeAclsRequest(AclFilterFields):
    pass


class AclDescription(Message):
    principal: String
    host: String
    operation: Int8
    permission_type: Int8


class DescribeAclsResource(Message):
    resource_type: Int8
    resource_name: String
    acls: Annotated[list[AclDescription], Meta(max_length=MAX_ACLS)]
    pattern_type: Int8 = LITERAL


class DescribeAclsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String = ""
    resources: Annotated[list[DescribeAclsResource], Meta(max_length=MAX_ACLS)] = []


class DeleteAclsRequest(Message):
    filters: Annotated[list[AclFilterFields], Meta(max_length=MAX_ACL_CHANGES)]


class DeleteAclsMatchingAcl(Message):
    error_code: Int16
    resource_type: Int8
    resource_name: String
    principal: String
    host: String
    operation: Int8
    permission_type: Int8
    pattern_type: Int8 = LITERAL
    error_message: String = ""


class DeleteAclsFilterResult(Message):
    error_code: Int16
    error_message: String = ""
    matching_acls: Annotated[list[DeleteAclsMatchingAcl], Meta(max_length=MAX_ACLS)] = []


class DeleteAclsResponse(Message):
    throttle_time_ms: Int32
    filter_results: Annotated[list[DeleteAclsFilterResult], Meta(max_length=MAX_ACL_CHANGES)]
    """One for each filter, in their order."""

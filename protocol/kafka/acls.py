"""Kafka's schemas of access control lists."""

from __future__ import annotations

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, error_message, structs
from minibroker.protocol.kafka.types import INT8, INT16, INT32, STRING

# --- DescribeAcls (29), CreateAcls (30), DeleteAcls (31) -----------------------------------------------------

_FILTER = (
    Field("resource_type_filter", INT8),
    Field("resource_name_filter", STRING, nullable="0+"),
    Field("pattern_type_filter", INT8, "1+", default=m.LITERAL),
    Field("principal_filter", STRING, nullable="0+"),
    Field("host_filter", STRING, nullable="0+"),
    Field("operation", INT8),
    Field("permission_type", INT8),
)
_ENTRY = (
    Field("principal", STRING),
    Field("host", STRING),
    Field("operation", INT8),
    Field("permission_type", INT8),
)

DESCRIBE_ACLS = KafkaApi(
    apis.DESCRIBE_ACLS,
    1,
    3,
    first_flexible=2,
    request=Schema(m.DescribeAclsRequest, *_FILTER),
    response=Schema(
        m.DescribeAclsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        error_message("0+"),
        Field(
            "resources",
            structs(
                m.DescribeAclsResource,
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field("pattern_type", INT8, "1+", default=m.LITERAL),
                Field("acls", structs(m.AclDescription, *_ENTRY)),
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeAclsResponse(0, code, message),
)

CREATE_ACLS = KafkaApi(
    apis.CREATE_ACLS,
    1,
    3,
    first_flexible=2,
    request=Schema(
        m.CreateAclsRequest,
        Field(
            "creations",
            structs(
                m.AclCreation,
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field("resource_pattern_type", INT8, "1+", default=m.LITERAL),
                *_ENTRY,
            ),
        ),
    ),
    response=Schema(
        m.CreateAclsResponse,
        Field("throttle_time_ms", INT32),
        Field("results", structs(m.AclCreationResult, Field("error_code", INT16), error_message("0+"))),
    ),
    failed=lambda request, code, message: m.CreateAclsResponse(
        0, [m.AclCreationResult(code, message) for _ in request.creations]
    ),
)


def _delete_failed(request: m.DeleteAclsRequest, code: ErrorCode, message: str) -> m.DeleteAclsResponse:
    return m.DeleteAclsResponse(0, [m.DeleteAclsFilterResult(code, message) for _ in request.filters])


DELETE_ACLS = KafkaApi(
    apis.DELETE_ACLS,
    1,
    3,
    first_flexible=2,
    request=Schema(m.DeleteAclsRequest, Field("filters", structs(m.AclFilterFields, *_FILTER))),
    response=Schema(
        m.DeleteAclsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "filter_results",
            structs(
                m.DeleteAclsFilterResult,
                Field("error_code", INT16),
                error_message("0+"),
                Field(
                    "matching_acls",
                    structs(
                        m.DeleteAclsMatchingAcl,
                        Field("error_code", INT16),
                        error_message("0+"),
                        Field("resource_type", INT8),
                        Field("resource_name", STRING),
                        Field("pattern_type", INT8, "1+", default=m.LITERAL),
                        *_ENTRY,
                    ),
                ),
            ),
        ),
    ),
    failed=_delete_failed,
)

APIS = (DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS)

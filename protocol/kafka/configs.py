"""Kafka's schemas of the settings of topics and brokers: described and altered."""

from __future__ import annotations

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, structs
from minibroker.protocol.kafka.types import BOOL, FLOAT64, INT8, INT16, INT32, STRING, Array

# --- DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44) -----------------------------------

DESCRIBE_CONFIGS = KafkaApi(
    apis.DESCRIBE_CONFIGS,
    1,
    4,
    first_flexible=4,
    request=Schema(
        m.DescribeConfigsRequest,
        Field(
            "resources",
            structs(
                m.DescribeConfigsResource,
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field("configuration_keys", Array(STRING), nullable="0+"),
            ),
        ),
        Field("include_synonyms", BOOL),
        Field("include_documentation", BOOL, "3+", default=False),
    ),
    response=Schema(
        m.DescribeConfigsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            structs(
                m.DescribeConfigsResult,
                Field("error_code", INT16),
                Field("error_message", STRING, nullable="0+"),
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field(
                    "configs",
                    structs(
                        m.DescribeConfigsEntry,
                        Field("name", STRING),
                        Field("value", STRING, nullable="0+"),
                        Field("read_only", BOOL),
                        Field("config_source", INT8),
                        Field("is_sensitive", BOOL),
                        Field(
                            "synonyms",
                            structs(
                                m.DescribeConfigsSynonym,
                                Field("name", STRING),
                                Field("value", STRING, nullable="0+"),
                                Field("source", INT8),
                            ),
                        ),
                        Field("config_type", INT8, "3+", default=0),
                        Field("documentation", STRING, "3+", nullable="3+", default=None),
                    ),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeConfigsResponse(
        0,
        [
            m.DescribeConfigsResult(code, message, resource.resource_type, resource.resource_name, [])
            for resource in request.resources
        ],
    ),
)

_ALTERED_RESOURCE = Schema(
    m.AlterConfigsResourceResponse,
    Field("error_code", INT16),
    Field("error_message", STRING, nullable="0+"),
    Field("resource_type", INT8),
    Field("resource_name", STRING),
)


def _not_altered(
    request: m.AlterConfigsRequest | m.IncrementalAlterConfigsRequest, code: ErrorCode, message: str
) -> list[m.AlterConfigsResourceResponse]:
    return [
        m.AlterConfigsResourceResponse(code, message, resource.resource_type, resource.resource_name)
        for resource in request.resources
    ]


ALTER_CONFIGS = KafkaApi(
    apis.ALTER_CONFIGS,
    0,
    2,
    first_flexible=2,
    request=Schema(
        m.AlterConfigsRequest,
        Field(
            "resources",
            structs(
                m.ReplacedConfigs,
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field(
                    "configs", structs(m.CreatableConfig, Field("name", STRING), Field("value", STRING, nullable="0+"))
                ),
            ),
        ),
        Field("validate_only", BOOL),
    ),
    response=Schema(
        m.AlterConfigsResponse, Field("throttle_time_ms", INT32), Field("responses", Array(_ALTERED_RESOURCE))
    ),
    failed=lambda request, code, message: m.AlterConfigsResponse(0, _not_altered(request, code, message)),
)

INCREMENTAL_ALTER_CONFIGS = KafkaApi(
    apis.INCREMENTAL_ALTER_CONFIGS,
    0,
    1,
    first_flexible=1,
    request=Schema(
        m.IncrementalAlterConfigsRequest,
        Field(
            "resources",
            structs(
                m.AlterConfigsResource,
                Field("resource_type", INT8),
                Field("resource_name", STRING),
                Field(
                    "configs",
                    structs(
                        m.AlterableConfig,
                        Field("name", STRING),
                        Field("config_operation", INT8),
                        Field("value", STRING, nullable="0+"),
                    ),
                ),
            ),
        ),
        Field("validate_only", BOOL),
    ),
    response=Schema(
        m.IncrementalAlterConfigsResponse,
        Field("throttle_time_ms", INT32),
        Field("responses", Array(_ALTERED_RESOURCE)),
    ),
    failed=lambda request, code, message: m.IncrementalAlterConfigsResponse(0, _not_altered(request, code, message)),
)

# --- DescribeClientQuotas (48), AlterClientQuotas (49) -------------------------------------------------------

_ENTITY = structs(m.QuotaEntityPart, Field("entity_type", STRING), Field("entity_name", STRING, nullable="0+"))

DESCRIBE_CLIENT_QUOTAS = KafkaApi(
    apis.DESCRIBE_CLIENT_QUOTAS,
    0,
    1,
    first_flexible=1,
    request=Schema(
        m.DescribeClientQuotasRequest,
        Field(
            "components",
            structs(
                m.QuotaFilterComponent,
                Field("entity_type", STRING),
                Field("match_type", INT8),
                Field("match", STRING, nullable="0+"),
            ),
        ),
        Field("strict", BOOL),
    ),
    response=Schema(
        m.DescribeClientQuotasResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("error_message", STRING, nullable="0+"),
        Field(
            "entries",
            structs(
                m.DescribedQuotas,
                Field("entity", _ENTITY),
                Field("values", structs(m.QuotaValue, Field("key", STRING), Field("value", FLOAT64))),
            ),
            nullable="0+",
        ),
    ),
    failed=lambda request, code, message: m.DescribeClientQuotasResponse(0, code, message, None),
)

ALTER_CLIENT_QUOTAS = KafkaApi(
    apis.ALTER_CLIENT_QUOTAS,
    0,
    1,
    first_flexible=1,
    request=Schema(
        m.AlterClientQuotasRequest,
        Field(
            "entries",
            structs(
                m.AlteredQuotas,
                Field("entity", _ENTITY),
                Field(
                    "ops",
                    structs(m.QuotaChange, Field("key", STRING), Field("value", FLOAT64), Field("remove", BOOL)),
                ),
            ),
        ),
        Field("validate_only", BOOL),
    ),
    response=Schema(
        m.AlterClientQuotasResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "entries",
            structs(
                m.AlteredQuotasResponse,
                Field("error_code", INT16),
                Field("error_message", STRING, nullable="0+"),
                Field("entity", _ENTITY),
            ),
        ),
    ),
    failed=lambda request, code, message: m.AlterClientQuotasResponse(
        0, [m.AlteredQuotasResponse(code, message, entry.entity) for entry in request.entries]
    ),
)

APIS = (DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, DESCRIBE_CLIENT_QUOTAS, ALTER_CLIENT_QUOTAS)

"""Requests that describe and alter the settings of topics and brokers."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    ANY_VERSION,
    MAX_TOPICS,
    NO_VERSION,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Name,
    String,
    TopicId,
    TopicName,
)
from minibroker.protocol.messages.topics import CreatableConfig

# --- DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44) ----------------------------------------


MAX_CONFIGS = 1_000
"""Settings of one resource."""


class DescribeConfigsResource(Message):
    resource_type: Int8
    resource_name: TopicName
    configuration_keys: Annotated[list[Name], Meta(max_length=MAX_CONFIGS)] | None = None
    """None: all."""


class DescribeConfigsRequest(Message):
    resources: Annotated[list[DescribeConfigsResource], Meta(max_length=MAX_TOPICS)]
    include_synonyms: bool = False
    include_documentation: bool = False


class DescribeConfigsSynonym(Message):
    name: Name
    value: String | None
    source: Int8


class DescribeConfigsEntry(Message):
    name: Name
    value: String | None
    """None: the setting is unset or secret."""
    read_only: bool
    config_source: Int8
    is_sensitive: bool
    synonyms: Annotated[list[DescribeConfigsSynonym], Meta(max_length=MAX_CONFIGS)]
    config_type: Int8
    documentation: String | None = None
    problem: String | None = None
    """Why the value in ZooKeeper is invalid and does not apply; None: it is valid (not in Kafka)."""


class DescribeConfigsResult(Message):
    error_code: Int16
    error_message: String | None
    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[DescribeConfigsEntry], Meta(max_length=MAX_CONFIGS)]


class DescribeConfigsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[DescribeConfigsResult], Meta(max_length=MAX_TOPICS)]


class AlterableConfig(Message):
    name: Name
    config_operation: Int8
    """0: set, 1: delete, 2: append to a list, 3: subtract from it."""
    value: String | None = None


class AlterConfigsResource(Message):
    """`topic_id`, `known_version`: as in ReassignableTopic, but of the znode of the settings (0: there is none).
    Another topic is answered with UNKNOWN_TOPIC_OR_PARTITION."""

    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[AlterableConfig], Meta(max_length=MAX_CONFIGS)]
    topic_id: TopicId = ""
    known_version: Int64 = ANY_VERSION


class IncrementalAlterConfigsRequest(Message):
    resources: Annotated[list[AlterConfigsResource], Meta(max_length=MAX_TOPICS)]
    validate_only: bool = False


class AlterConfigsResourceResponse(Message):
    """`topic_id` and `version`: the current ones, if the request named others."""

    error_code: Int16
    error_message: String | None
    resource_type: Int8
    resource_name: TopicName
    topic_id: TopicId = ""
    version: Int64 = NO_VERSION


class IncrementalAlterConfigsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[AlterConfigsResourceResponse], Meta(max_length=MAX_TOPICS)]


class ReplacedConfigs(Message):
    """All settings of a resource; a setting that is not named returns to its default."""

    resource_type: Int8
    resource_name: TopicName
    configs: Annotated[list[CreatableConfig], Meta(max_length=MAX_CONFIGS)]


class AlterConfigsRequest(Message):
    """The predecessor of IncrementalAlterConfigs. The last writer wins."""

    resources: Annotated[list[ReplacedConfigs], Meta(max_length=MAX_TOPICS)]
    validate_only: bool = False


class AlterConfigsResponse(Message):
    throttle_time_ms: Int32
    responses: Annotated[list[AlterConfigsResourceResponse], Meta(max_length=MAX_TOPICS)]


# --- DescribeClientQuotas (48), AlterClientQuotas (49) ------------------------------------------------------------

MAX_QUOTA_ENTITIES = 100_000
MAX_ENTITY_PARTS = 16
MAX_QUOTA_KEYS = 100


class QuotaFilterComponent(Message):
    entity_type: Name
    match_type: Int8
    """0: this name, 1: the default, 2: any name and the default."""
    match: String | None


class DescribeClientQuotasRequest(Message):
    components: Annotated[list[QuotaFilterComponent], Meta(max_length=MAX_ENTITY_PARTS)]
    strict: bool
    """Leave out entities that have further parts."""


class QuotaEntityPart(Message):
    entity_type: Name
    entity_name: String | None
    """None: the default."""


class QuotaValue(Message):
    key: Name
    value: float


class DescribedQuotas(Message):
    entity: Annotated[list[QuotaEntityPart], Meta(max_length=MAX_ENTITY_PARTS)]
    values: Annotated[list[QuotaValue], Meta(max_length=MAX_QUOTA_KEYS)]


class DescribeClientQuotasResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String | None
    entries: Annotated[list[DescribedQuotas], Meta(max_length=MAX_QUOTA_ENTITIES)] | None
    """None after an error."""


class QuotaChange(Message):
    key: Name
    value: float
    remove: bool


class AlteredQuotas(Message):
    entity: Annotated[list[QuotaEntityPart], Meta(max_length=MAX_ENTITY_PARTS)]
    ops: Annotated[list[QuotaChange], Meta(max_length=MAX_QUOTA_KEYS)]


class AlterClientQuotasRequest(Message):
    entries: Annotated[list[AlteredQuotas], Meta(max_length=MAX_CONFIGS)]
    validate_only: bool


class AlteredQuotasResponse(Message):
    error_code: Int16
    error_message: String | None
    entity: Annotated[list[QuotaEntityPart], Meta(max_length=MAX_ENTITY_PARTS)]


class AlterClientQuotasResponse(Message):
    throttle_time_ms: Int32
    entries: Annotated[list[AlteredQuotasResponse], Meta(max_length=MAX_CONFIGS)]

"""Types of settings: bounds, choices and patterns, and the rules that several settings share."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import MAX_BATCH_BYTES


class InvalidConfig(MinibrokerError, ValueError):
    """A setting is unknown, malformed or out of bounds. Names the setting, the value and the rule."""


def kafka_name(field: str) -> str:
    return field.replace("_", ".")


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BatchBytes = Annotated[int, Meta(ge=1, le=MAX_BATCH_BYTES)]
UNBOUNDED = 2**63 - 1
"""The limit of the type. Messages show such a setting as unbounded."""
Rate = Annotated[int, Meta(ge=1, le=UNBOUNDED)]
Limit = Annotated[int, Meta(ge=-1, le=UNBOUNDED)]
"""-1: none."""
Durability = Literal["replicated", "synced"]
RecordFormat = Literal["columns", "kafka"]
Age = Annotated[int, Meta(ge=1, le=UNBOUNDED)]
"""In milliseconds."""
Duration = Annotated[int, Meta(ge=0, le=UNBOUNDED)]
"""In milliseconds."""
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
CompressionType = Literal["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"]
GzipLevel = Annotated[int, Meta(ge=-1, le=9)]
LZ4_DEFAULT_LEVEL = 9
Lz4Level = Annotated[int, Meta(ge=1, le=17)]
ZstdLevel = Annotated[int, Meta(ge=-131_072, le=22)]
FormatVersion = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+){0,2}(-IV[0-9]+)?$",
        description="a version of Kafka, such as 3.0 or 3.0-IV1",
    ),
]
TimestampType = Literal["CreateTime", "LogAppendTime"]
CleanupPolicy = Annotated[
    str,
    Meta(
        pattern="^((delete|compact)( *, *(delete|compact))*)?$",
        description="delete, compact, compact,delete, or nothing",
    ),
]
ThrottledReplicas = Annotated[
    str, Meta(pattern=r"^(\*|([0-9]+:[0-9]+(,[0-9]+:[0-9]+)*)?)$", description="*, or PARTITION:BROKER,..., or nothing")
]
HostLimits = Annotated[
    str,
    Meta(
        pattern=r"^([\w.:%-]+|\[[\w.:%-]+\]):[0-9]{1,9}( *, *([\w.:%-]+|\[[\w.:%-]+\]):[0-9]{1,9})*$|^$",
        description="HOST:NUMBER,..., or nothing",
    ),
]
SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
MetricsProtocol = Literal["PLAINTEXT", "SSL"]
StoreType = Literal["PEM"]
ClientAuth = Literal["none", "requested", "required"]
HostCheck = Literal["https", ""]
TlsVersions = Annotated[
    str,
    Meta(pattern=r"^TLSv1\.[23]( *, *TLSv1\.[23])?$", description="TLSv1.2, TLSv1.3, or TLSv1.2,TLSv1.3"),
]
SHORT_NUMBER = re.compile("[0-9]{1,10}")


def compaction_lags_problem(min_name: str, min_ms: int, max_name: str, max_ms: int) -> str | None:
    """Return why the lags contradict each other, or None (Kafka's LogConfig.validateValues)."""
    if min_ms <= max_ms:
        return None
    return (
        f"{min_name}={min_ms} exceeds {max_name}={max_ms}: a record would be protected from compaction after it must "
        f"be compacted; give the first at most the second"
    )

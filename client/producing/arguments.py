"""Checks of the arguments of a producer, of `send` and of `send_batch`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minibroker.client.errors import InvalidSetting
from minibroker.client.producing.columns import (
    Column,
    checked_column,
    checked_list,
    from_arrow,
    is_arrow,
)
from minibroker.client.producing.partitioners import Partitioner, WithoutKey, crc32, murmur2
from minibroker.client.serializers import Serializer, serialize
from minibroker.client.settings import check_text
from minibroker.client.shown import shown
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import MAX_TIMESTAMP_MS

Headers = Sequence[tuple[str, bytes | None]]
MAX_HEADER = 2**31 - 1
"""The most characters of a header's name. What a record may have in all is less."""


def check_partition(partition: object) -> None:
    if type(partition) is not int:
        raise InvalidSetting("partition", partition, "give a whole number from 0 on, or None")
    if partition < 0:
        raise BrokerError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition={shown(partition)}: give a whole number from 0 on",
            is_complete=True,
        )


def column_of(name: str, what: str, topic: str, data: Any, serializer: Serializer | None) -> Column:
    """Return an argument of `send_batch` as a column of bytes."""
    if is_arrow(data):
        return from_arrow(name, data)
    if serializer is None:
        return checked_column(name, data)
    elements = checked_list(name, data)
    return [serialize(serializer, each, topic, f"{what} {index}") for index, each in enumerate(elements)]


def check_timestamp_ms(timestamp_ms: object) -> None:
    if type(timestamp_ms) is not int:
        rule = "give whole milliseconds since 1970, as int(time.time() * 1000), or None for now"
        raise InvalidSetting("timestamp_ms", timestamp_ms, rule)
    if not 0 <= timestamp_ms <= MAX_TIMESTAMP_MS:
        raise BrokerError(
            ErrorCode.INVALID_TIMESTAMP, f"timestamp_ms={shown(timestamp_ms)}, allowed are 0 to {MAX_TIMESTAMP_MS}"
        )


def check_partitioner(partitioner: object) -> None:
    if partitioner in (crc32, murmur2):
        name = getattr(partitioner, "__name__", "")
        raise InvalidSetting("partitioner", partitioner, f"give Partitioner(by_key={name})")
    is_ours = isinstance(partitioner, Partitioner) and isinstance(partitioner.without_key, WithoutKey)
    if not (is_ours or callable(partitioner)) or isinstance(partitioner, type):
        raise InvalidSetting(
            "partitioner",
            partitioner,
            "give a minibroker.Partitioner, or a function of topic, key, value and partitions",
        )


def checked_headers(headers: Headers) -> Headers:
    if isinstance(headers, dict):
        raise TypeError("headers must be a list of (str, bytes or None), not a dict: list(headers.items())")
    if not isinstance(headers, (list, tuple)):
        raise TypeError(f"headers must be a list of (str, bytes or None), not {shown(headers)}")
    for header in headers:
        if (
            type(header) is not tuple
            or len(header) != 2
            or type(header[0]) is not str
            or not (header[1] is None or type(header[1]) is bytes)
        ):
            raise TypeError(f"headers must be a list of (str, bytes or None), not {shown(header)}")
        check_text("header", header[0], MAX_HEADER)
    return list(headers)

"""The settings of a consumer's fetches."""

from typing import NamedTuple

from minibroker.client.settings import IsolationLevel, check_integer, check_isolation_level, check_ms
from minibroker.protocol.records import READ_COMMITTED


class FetchSettings(NamedTuple):
    min_bytes: int
    max_wait_s: float
    max_bytes: int
    max_partition_bytes: int
    max_buffer_bytes: int
    isolation_level: int
    """READ_UNCOMMITTED or READ_COMMITTED."""

    @property
    def is_read_committed(self) -> bool:
        return self.isolation_level == READ_COMMITTED


def checked_fetch_settings(
    fetch_min_bytes: int,
    fetch_max_wait_ms: float,
    fetch_max_bytes: int,
    max_partition_fetch_bytes: int,
    fetch_max_buffer_bytes: int,
    isolation_level: IsolationLevel,
) -> FetchSettings:
    """Raises InvalidSetting."""
    return FetchSettings(
        check_integer("fetch_min_bytes", fetch_min_bytes, 0, 1 << 30),
        check_ms("fetch_max_wait_ms", fetch_max_wait_ms),
        check_integer("fetch_max_bytes", fetch_max_bytes, 1, 128 * 1024 * 1024),
        check_integer("max_partition_fetch_bytes", max_partition_fetch_bytes, 1, 128 * 1024 * 1024),
        check_integer("fetch_max_buffer_bytes", fetch_max_buffer_bytes, 1, 1 << 40),
        check_isolation_level(isolation_level),
    )

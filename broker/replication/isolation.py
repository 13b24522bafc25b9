"""The end up to which a reader sees a log (Kafka's FetchIsolation)."""

from __future__ import annotations

from enum import Enum
from struct import Struct

from minibroker.broker.storage.log import Log
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import AbortedTransaction, Buffer
from minibroker.protocol.records import HEADER_SIZE, LIMIT, READ_COMMITTED, READ_UNCOMMITTED
from minibroker.protocol.records.header import LENGTH_END

_PLACE = Struct(">qi11xi").unpack_from
"""The base offset, length and last offset delta of a batch (`records.header`)."""

CONSUMER = -1
"""The replica id in the fetch of a consumer."""


class FetchIsolation(Enum):
    LOG_END = "followers"
    HIGH_WATERMARK = "consumers with isolation.level=read_uncommitted"
    TXN_COMMITTED = "consumers with isolation.level=read_committed: up to the last stable offset"

    @classmethod
    def of(cls, replica_id: int, isolation_level: int) -> FetchIsolation:
        """Raises BrokerError INVALID_REQUEST for an unknown level."""
        if isolation_level not in (READ_UNCOMMITTED, READ_COMMITTED):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"isolation_level is {isolation_level}; it must be {READ_UNCOMMITTED} (read_uncommitted) or "
                f"{READ_COMMITTED} (read_committed)",
            )
        if replica_id != CONSUMER:
            return cls.LOG_END
        return cls.TXN_COMMITTED if isolation_level == READ_COMMITTED else cls.HIGH_WATERMARK


def aborted_in(log: Log, offset: int, records: Buffer, up_to_offset: int) -> list[AbortedTransaction]:
    """Return the aborted transactions with records in `records`, which were read from `offset` on and end at
    `up_to_offset` at the latest, in the order of their first offsets. A few may be among them that have none there."""
    if not records or not log.has_aborted_since(offset):
        return []
    found = log.aborted_transactions(offset, min(_end_of(records), up_to_offset))
    ordered = sorted((aborted.first_offset, aborted.producer_id) for aborted in found)
    return [AbortedTransaction(producer_id, first_offset) for first_offset, producer_id in ordered]


def _end_of(records: Buffer) -> int:
    """Return the offset after the last batch; LIMIT if it cannot be found, since a batch is damaged."""
    position, last, end = 0, len(records) - HEADER_SIZE, LIMIT
    while position <= last:
        base_offset, length, last_offset_delta = _PLACE(records, position)
        if length < HEADER_SIZE - LENGTH_END:
            return LIMIT
        end = base_offset + last_offset_delta + 1
        position += LENGTH_END + length
    return end

"""Which batches a consumer does not get: control batches, and for read_committed those of aborted transactions.

An answer to a fetch lists the aborted transactions that overlap it: a producer, and the offset at which its transaction
began. It does not say where they end. The end is the producer's next control batch, since a producer has at most one
open transaction in a partition (Kafka's CompletedFetch).
"""

from collections.abc import Iterable
from typing import Protocol

from minibroker.protocol.records.header import CONTROL, TRANSACTIONAL, BatchHeader

READ_UNCOMMITTED = 0
"""Read up to the high watermark."""
READ_COMMITTED = 1
"""Read up to the last stable offset, without the batches of aborted transactions."""

ISOLATION_LEVELS = {"read_uncommitted": READ_UNCOMMITTED, "read_committed": READ_COMMITTED}

_SPECIAL = CONTROL | TRANSACTIONAL


class Aborted(Protocol):
    """An aborted transaction as a broker lists it."""

    @property
    def producer_id(self) -> int: ...

    @property
    def first_offset(self) -> int: ...


class BatchFilter:
    """Decides from headers alone. Batches come in the order of the log, none left out."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        """`aborted` are those that a broker lists with the batches; read_uncommitted has none."""
        self._coming = sorted(((each.first_offset, each.producer_id) for each in aborted), reverse=True)
        """Transactions that begin further on, the next one last."""
        self._open: set[int] = set()
        """The producers whose aborted transaction has begun and has not ended."""

    def hides(self, header: BatchHeader) -> bool:
        """Whether the consumer gets nothing of this batch."""
        if not header.attributes & _SPECIAL:
            return False
        while self._coming and self._coming[-1][0] <= header.last_offset:
            self._open.add(self._coming.pop()[1])
        if header.is_control:
            self._open.discard(header.producer_id)
            return True
        return header.producer_id in self._open

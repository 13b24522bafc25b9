"""Which leader epoch wrote which offsets of a log (Kafka's LeaderEpochFileCache, KIP-101 and KIP-279).

A list of (epoch, start offset), both increasing. Two logs that agree on an epoch's entry agree on every record up to
the lower of that epoch's two ends, which is how a follower finds where to truncate. Pure: the file is the log's
business, and is written when `version` has changed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import itemgetter

from minibroker.broker.storage.checkpoints import EpochEntry
from minibroker.protocol.model import NO_EPOCH

UNKNOWN = (NO_EPOCH, -1)
"""The answer of `end_offset_for` if the epoch is not known (UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET)."""

_epoch_of = itemgetter(0)
_start_of = itemgetter(1)


class LeaderEpochCache:
    def __init__(self, entries: Iterable[EpochEntry] = ()) -> None:
        self._entries = list(entries)
        self.version = 0
        """Changes with every change of the entries."""

    @property
    def entries(self) -> list[EpochEntry]:
        return list(self._entries)

    @property
    def latest(self) -> int:
        """The newest epoch, or NO_EPOCH."""
        return self._entries[-1].epoch if self._entries else NO_EPOCH

    @property
    def latest_start(self) -> int:
        """The offset at which the newest epoch begins; -1 where there is none."""
        return self._entries[-1].start_offset if self._entries else -1

    def assign(self, epoch: int, start_offset: int) -> None:
        """`epoch` begins at `start_offset`. Entries that contradict it (as new or newer, or begun at or after that
        offset) are dropped: they are of epochs that wrote nothing, or of records that were truncated."""
        if self._entries:
            latest = self._entries[-1]
            if epoch == latest.epoch and start_offset >= latest.start_offset:
                return
        while self._entries and (self._entries[-1].epoch >= epoch or self._entries[-1].start_offset >= start_offset):
            self._entries.pop()
        self._entries.append(EpochEntry(epoch, start_offset))
        self.version += 1

    def end_offset_for(self, requested_epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The largest epoch not above the requested one, and the offset after its last record.

        The requested epoch with the start of the next one where it is older than all that is known; UNKNOWN where
        it is newer than all, or NO_EPOCH. (`LeaderEpochFileCache.endOffsetFor`.)
        """
        if requested_epoch == NO_EPOCH or requested_epoch > self.latest:
            return UNKNOWN
        if requested_epoch == self.latest:
            return requested_epoch, log_end_offset
        above = bisect_right(self._entries, requested_epoch, key=_epoch_of)
        epoch = self._entries[above - 1].epoch if above else requested_epoch
        return epoch, self._entries[above].start_offset

    def epoch_at(self, offset: int) -> int:
        """The epoch that wrote `offset`, or NO_EPOCH."""
        above = bisect_right(self._entries, offset, key=_start_of)
        return self._entries[above - 1].epoch if above else NO_EPOCH

    def truncate_from_end(self, end_offset: int) -> None:
        """Forget the epochs that begin at `end_offset` or later."""
        kept = bisect_left(self._entries, end_offset, key=_start_of)
        if kept < len(self._entries):
            del self._entries[kept:]
            self.version += 1

    def truncate_from_start(self, start_offset: int) -> None:
        """Forget what lies before `start_offset`, but for the epoch of the record right before it, which begins with
        that record from now on: by it an empty log knows which history it goes on with. (In Kafka the epoch begins at
        `start_offset`, so that an empty log forgets it with its next `truncate_from_end`.)"""
        last_gone = start_offset - 1
        above = bisect_right(self._entries, last_gone, key=_start_of)
        if above > 1 or (above == 1 and self._entries[0].start_offset < last_gone):
            self._entries[:above] = [EpochEntry(self._entries[above - 1].epoch, last_gone)]
            self.version += 1

    def clear(self) -> None:
        if self._entries:
            self._entries.clear()
            self.version += 1

"""The aborted transactions of a partition by its batches, compared with the index that each segment has of them.

If an index lacks a transaction, read_committed readers get its records. If it lists one too many, they miss committed
records, up to that producer's next marker.

A log need not show where a transaction began: compaction removes batches, retention whole segments, and bytes may be
damaged. An index may then name an earlier offset than the batches do. The same holds for the last stable offset of an
entry, which is where the oldest transaction that was open had begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from minibroker.broker.storage.indexes.aborted_index import AbortedTransaction
from minibroker.protocol.records import BatchHeader, ControlType
from minibroker.protocol.words import counted

REMEDY = "stop the broker and overwrite the file with any text: it is built again from the batches"


@dataclass
class Transactions:
    """Of one partition. Batches come in order."""

    begins_at: int
    """The offset at which the first segment begins."""
    is_whole: bool
    """No batch is missing since that offset: the log was never compacted, and nothing in it is damaged."""
    open: dict[int, int] = field(default_factory=dict)
    """The first offsets of open transactions by producer, as far as they are known."""

    def batch(self, header: BatchHeader, marker: ControlType | None) -> AbortedTransaction | None:
        """Return the transaction that the batch aborts, if it aborts one. `marker`: the type of a control batch."""
        if marker is None:
            if header.is_transactional:
                self.open.setdefault(header.producer_id, header.base_offset)
            return None
        first_offset = self.open.pop(header.producer_id, None)
        if first_offset is None or marker is not ControlType.ABORT:
            return None
        stable = min(self.open.values(), default=header.next_offset)
        return AbortedTransaction(header.producer_id, first_offset, header.last_offset, stable)

    def bad_bytes(self) -> None:
        """Batches are missing here: transactions may have begun or ended."""
        self.is_whole = False
        self.open.clear()

    def agrees(self, said: AbortedTransaction, found: AbortedTransaction) -> bool:
        """Whether an entry of an index may be right about the transaction."""
        if said.producer_id != found.producer_id:
            return False
        offsets = (said.first_offset, found.first_offset), (said.last_stable_offset, found.last_stable_offset)
        return all(
            by_index == by_batches or (by_index < by_batches and (not self.is_whole or by_index < self.begins_at))
            for by_index, by_batches in offsets
        )


class AbortedComparison:
    """The index of one segment, compared with its batches as they come."""

    def __init__(self, transactions: Transactions, said: list[AbortedTransaction] | None) -> None:
        """`said`: the entries of the index; None if it cannot be read."""
        self._transactions = transactions
        self._is_readable = said is not None
        self._said = {one.last_offset: one for one in said or ()}
        """The entries that fit no batch yet, by the offset of the marker."""
        self._lacks: list[AbortedTransaction] = []
        self._wrong: list[tuple[AbortedTransaction, AbortedTransaction]] = []

    def batch(self, header: BatchHeader, marker: ControlType | None) -> None:
        found = self._transactions.batch(header, marker)
        said = self._said.get(header.last_offset)
        if found is not None and said is None:
            self._lacks.append(found)
        elif found is not None and said is not None:
            del self._said[header.last_offset]
            if not self._transactions.agrees(said, found):
                self._wrong.append((said, found))
        elif said is not None and marker is ControlType.ABORT and said.producer_id == header.producer_id:
            del self._said[header.last_offset]  # its batches were compacted, or are damaged

    def bad_bytes(self, first_missing: int, goes_on_at: int | None) -> None:
        """Entries of markers that cannot be read are not wrong."""
        self._transactions.bad_bytes()
        self._said = {
            offset: one
            for offset, one in self._said.items()
            if offset < first_missing or (goes_on_at is not None and offset >= goes_on_at)
        }

    def problems(self, below: int) -> Iterator[str]:
        """Yield what is wrong with entries of markers below that offset, up to which the index must be complete."""
        if not self._is_readable:
            return
        lacks = [one for one in self._lacks if one.last_offset < below]
        if lacks:
            yield f"it lacks {counted(len(lacks), 'aborted transaction')}, the first is {_shown(lacks[0])}; {REMEDY}"
        unfit = [one for offset, one in self._said.items() if offset < below]
        if unfit:
            entries = counted(len(unfit), "entry", "entries")
            yield f"{entries} without an abort marker, the first says {_shown(unfit[0])}; {REMEDY}"
        wrong = [pair for pair in self._wrong if pair[0].last_offset < below]
        if wrong:
            said, found = wrong[0]
            entries = counted(len(wrong), "entry", "entries")
            yield (
                f"{entries} at odds with the batches, the first says {_shown(said)}, and the batches say "
                f"{_shown(found)}; {REMEDY}"
            )


def _shown(one: AbortedTransaction) -> str:
    return (
        f"producer {one.producer_id}, offsets {one.first_offset} to {one.last_offset}, last stable offset "
        f"{one.last_stable_offset}"
    )

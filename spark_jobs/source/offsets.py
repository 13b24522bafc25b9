"""Offsets of a stream, and the ranges between two of them: JSON, data loss, rate limits, splits. Pure.

A stream's offset in Spark's checkpoint is one JSON object:

    {"orders": {"id": "fVxDVCNMRc6ROdvFGQ0Y0A", "offsets": {"0": 17, "1": 4}, "epochs": {"0": 3, "1": 2}}}

The number is the offset of the next record. Spark considers two offsets equal if their texts are, so topics and
partitions are always sorted. The topic's id makes a stream fail if the topic was deleted and created again: the new
topic has the same name but other records at the same offsets.

The epochs are those of the leaders that returned the offsets (offsets that users wrote have none): a leader of an older
epoch was deposed, and is not asked, since it may lack records (KIP-320). An offset that has not moved keeps its epoch,
even if another broker leads now: otherwise each failover would look like new records.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_EPOCH, TopicPartition


class DataLost(MinibrokerError):
    """Records to read are gone. `failOnDataLoss=false` continues without them."""


class TopicOffsets(NamedTuple):
    topic_id: str
    offsets: Mapping[int, int]
    epochs: Mapping[int, int] = {}
    """The epoch of the leader whose log reached that offset, by partition, if known."""


Offsets = Mapping[str, TopicOffsets]
"""By topic."""

JsonOffsets = dict[str, dict[str, Any]]


class OffsetRange(NamedTuple):
    """Records `start` to `end` (exclusive) of one partition, which one task reads. Compaction and transactions leave
    offsets without records."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    leader_epoch: int = NO_EPOCH
    """The oldest epoch of a leader that has all records."""

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def to_json(offsets: Offsets) -> JsonOffsets:
    """Return the JSON object, sorted so that equal offsets have equal texts."""
    content: JsonOffsets = {}
    for topic, entry in sorted(offsets.items()):
        content[topic] = {"id": entry.topic_id, "offsets": _by_text(entry.offsets)}
        if entry.epochs:
            content[topic]["epochs"] = _by_text(entry.epochs)
    return content


def _by_text(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(index): numbers[index] for index in sorted(numbers)}


def from_json(content: Any) -> dict[str, TopicOffsets]:
    """Invert `to_json`. Raises MinibrokerError for other content."""
    try:
        return {
            topic: TopicOffsets(
                str(entry["id"]),
                {int(index): int(offset) for index, offset in entry["offsets"].items()},
                {int(index): int(epoch) for index, epoch in entry.get("epochs", {}).items()},
            )
            for topic, entry in content.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MinibrokerError(
            f"{content!r} is not an offset of this source: the checkpoint belongs to another source, or is damaged. "
            "Use a new one"
        ) from error


def by_partition(offsets: Offsets) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, index): offset
        for topic, entry in offsets.items()
        for index, offset in entry.offsets.items()
    }


def epochs_of(offsets: Offsets) -> dict[TopicPartition, int]:
    """Return the known leader epochs."""
    return {
        TopicPartition(topic, index): epoch for topic, entry in offsets.items() for index, epoch in entry.epochs.items()
    }


def grouped(
    topic_ids: Mapping[str, str],
    offsets: Mapping[TopicPartition, int],
    epochs: Mapping[TopicPartition, int] | None = None,
) -> dict[str, TopicOffsets]:
    """Invert `by_partition` and `epochs_of`."""
    by_topic: dict[str, dict[int, int]] = {}
    epochs_by_topic: dict[str, dict[int, int]] = {}
    for partition in sorted(offsets):
        by_topic.setdefault(partition.topic, {})[partition.partition] = offsets[partition]
        if epochs is not None and partition in epochs:
            epochs_by_topic.setdefault(partition.topic, {})[partition.partition] = epochs[partition]
    return {
        topic: TopicOffsets(topic_ids[topic], partitions, epochs_by_topic.get(topic, {}))
        for topic, partitions in by_topic.items()
    }


def with_kept_epochs(start: Offsets, end: Offsets) -> dict[str, TopicOffsets]:
    """Return `end` with the epochs of `start` for offsets that are equal in both, so that their texts are equal."""
    found = {}
    for topic, entry in end.items():
        known = start.get(topic)
        if known is not None and known.topic_id == entry.topic_id:
            kept = [index for index, offset in entry.offsets.items() if known.offsets.get(index) == offset]
            epochs = {index: epoch for index, epoch in entry.epochs.items() if index not in kept}
            entry = entry._replace(epochs=epochs | {i: known.epochs[i] for i in kept if i in known.epochs})
        found[topic] = entry
    return found


def ranges(start: Offsets, end: Offsets, earliest: Mapping[TopicPartition, int]) -> list[OffsetRange]:
    """Return the ranges between two offsets, without empty ones. A partition that `start` does not have, or has of
    another topic with the same name, is read from `earliest`."""
    found = []
    for topic, entry in end.items():
        known = start.get(topic)
        begins = known.offsets if known is not None and known.topic_id == entry.topic_id else {}
        for index, stop in entry.offsets.items():
            begin = begins.get(index)
            if begin is None:
                begin = earliest[TopicPartition(topic, index)]
            if begin < stop:
                epoch = entry.epochs.get(index, NO_EPOCH)
                found.append(OffsetRange(topic, entry.topic_id, index, begin, stop, epoch))
    return sorted(found)


def unknown_partitions(start: Offsets, end: Offsets) -> list[TopicPartition]:
    """Return the partitions of `end` that `start` lacks: `ranges` needs their earliest offsets."""
    return [
        TopicPartition(topic, index)
        for topic, entry in sorted(end.items())
        for index in sorted(entry.offsets)
        if topic not in start or start[topic].topic_id != entry.topic_id or index not in start[topic].offsets
    ]


def up_to(target: Offsets, now: Offsets, start: Offsets) -> dict[str, TopicOffsets]:
    """Return the ends of the logs, limited to the target, or to `start` if that is after the target because it was
    looked up later. Partitions that neither of the two has are left out."""
    found = {}
    for topic, entry in now.items():
        known: dict[int, int] = {}
        for offsets in (target, start):
            if topic in offsets and offsets[topic].topic_id == entry.topic_id:
                for index, offset in offsets[topic].offsets.items():
                    known[index] = max(offset, known.get(index, 0))
        ends = {index: min(end, known[index]) for index, end in entry.offsets.items() if index in known}
        if ends:
            found[topic] = TopicOffsets(entry.topic_id, ends, {i: e for i, e in entry.epochs.items() if i in ends})
    return found


def losses(start: Offsets, now: Offsets) -> list[str]:
    """Return the losses of a stream at `start`: topics and partitions that are gone or were replaced, and logs that end
    before `start`. `now` are the ends of the logs."""
    found = []
    for topic, entry in sorted(start.items()):
        there = now.get(topic)
        if there is None:
            found.append(f"topic {topic} is gone (or no longer subscribed to)")
        elif there.topic_id != entry.topic_id:
            found.append(
                f"topic {topic} was deleted and created again: its id was {entry.topic_id}, and is {there.topic_id}"
            )
        else:
            for index, offset in sorted(entry.offsets.items()):
                if index not in there.offsets:
                    found.append(f"partition {topic}-{index} is gone (or no longer assigned)")
                elif there.offsets[index] < offset:
                    found.append(f"{topic}-{index} ends at offset {there.offsets[index]}, but was read up to {offset}")
    return found


def loss_error(problems: Iterable[str]) -> DataLost:
    return DataLost(
        f"{'; '.join(problems)}. Begin anew with another checkpoint, or accept the loss with failOnDataLoss=false"
    )


def backlog(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the number of offsets still to be read, for partitions that have any."""
    sizes = {partition: offset - start[partition] for partition, offset in end.items()}
    return {partition: size for partition, size in sorted(sizes.items()) if size > 0}


def prorated(sizes: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """Return shares of `limit` in proportion to `sizes`, which are positive. Their sum is the limit, or all offsets.

    Every partition gets at least one offset if the limit allows, so that a small one next to a large one does not
    starve. Otherwise the largest get one each; the others will be among the largest later.
    """
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    if limit <= len(sizes):
        largest = sorted(sizes, key=lambda partition: (-sizes[partition], partition))[:limit]
        return dict.fromkeys(sorted(largest), 1)
    spare, wanted = limit - len(sizes), total - len(sizes)
    exact = {partition: divmod((size - 1) * spare, wanted) for partition, size in sizes.items()}
    shares = {partition: 1 + whole for partition, (whole, _) in exact.items()}
    by_remainder = sorted(sizes, key=lambda partition: (-exact[partition][1], partition))
    for partition in by_remainder[: limit - sum(shares.values())]:
        shares[partition] += 1
    return shares


def split(whole: Iterable[OffsetRange], min_partitions: int, max_records: int | None) -> list[OffsetRange]:
    """Split into at least `min_partitions` ranges (if there are enough offsets) of at most `max_records` offsets.

    The largest range is divided first; the parts of a range differ by at most one offset.
    """
    originals = [item for item in whole if item.size > 0]
    parts = [1 if max_records is None else -(-item.size // max_records) for item in originals]
    heap = [(-item.size / count, index) for index, (item, count) in enumerate(zip(originals, parts, strict=True))]
    heapq.heapify(heap)
    missing = min_partitions - sum(parts)
    while missing > 0 and heap:
        _, index = heapq.heappop(heap)
        if parts[index] < originals[index].size:
            parts[index] += 1
            missing -= 1
            heapq.heappush(heap, (-originals[index].size / parts[index], index))
    return [
        item._replace(start=item.start + item.size * part // count, end=item.start + item.size * (part + 1) // count)
        for item, count in zip(originals, parts, strict=True)
        for part in range(count)
    ]

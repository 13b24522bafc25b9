"""How a follower's log becomes a copy of its leader's: the next fetch, and what is done with its answer."""

import msgspec

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.producer_state import InvalidSnapshot, decode_snapshot
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Buffer, EpochEndOffset, FetchPartition, FetchPartitionResponse
from minibroker.protocol.model import NO_EPOCH
from minibroker.protocol.records import HEADER_SIZE, parse_header


class Fetched(msgspec.Struct, frozen=True):
    """A follower's outcome of applying the answer to its fetch."""

    truncated_to: int | None = None
    appended: bool = False
    is_stuck: bool = False
    """The answer asked for a truncation, but there was nothing to cut: the next answer will be the same."""


def next_fetch(partition: Partition, partition_max_bytes: int, *, suspect: bool = False) -> FetchPartition:
    """Return the fetch at the log's end, with the log's start. `suspect`: the last answer was corrupt."""
    log = partition.log
    stored_start = log.stored_start_offset
    if stored_start != log.log_start_offset:
        partition.store_start_soon(partition.topic_partition)
    return FetchPartition(
        partition=partition.topic_partition.partition,
        current_leader_epoch=partition.leader_epoch,
        fetch_offset=log.log_end_offset,
        last_fetched_epoch=log.latest_epoch,
        log_start_offset=stored_start,
        partition_max_bytes=partition_max_bytes,
        suspect=suspect,
    )


def apply_fetched(partition: Partition, response: FetchPartitionResponse) -> Fetched:
    """Apply the leader's answer to a fetch at the log's end: truncate if the logs diverge, otherwise append.

    The high watermark is raised only after that, and never past the log's end: raised first, it could cover records
    that are about to be cut (KAFKA-14704).
    """
    log = partition.log
    if response.diverging_epoch is not None:
        before = log.log_end_offset, log.latest_epoch
        truncated_to = _truncate_to_divergence(partition, response.diverging_epoch)
        return Fetched(truncated_to, is_stuck=(truncated_to, log.latest_epoch) == before)
    appended = len(response.records) > 0
    if appended:
        _begin_with(partition, response.records)
        log.append_as_follower(response.records, partition.leader_epoch)
        partition.traffic.replication_bytes_in += len(response.records)
    partition.high_watermark = max(partition.high_watermark, min(response.high_watermark, log.log_end_offset))
    log.forget_replicated(partition.high_watermark)
    log.move_log_start_offset(min(response.log_start_offset, partition.high_watermark))
    return Fetched(appended=appended)


def _begin_with(partition: Partition, records: Buffer) -> None:
    """The leader's log may begin within a batch, which arrives whole: an empty log then begins where the batch does, as
    in Kafka after its UnexpectedAppendOffsetException."""
    log = partition.log
    end = log.log_end_offset
    if log.log_start_offset == end and len(records) >= HEADER_SIZE:
        header = parse_header(records)
        if header.base_offset < end <= header.last_offset:
            producers = log.producers_below(header.base_offset)
            log.truncate_fully_and_start_at(header.base_offset, producers=producers)


def must_restart(partition: Partition, leader_start_offset: int) -> bool:
    """Whether a log that was out of the leader's range cannot go on: the leader's log begins after its end, or the log
    is empty and knows nothing of earlier records."""
    return leader_start_offset > partition.log.log_end_offset or partition.log.latest_epoch == NO_EPOCH


def restart(partition: Partition, refusal: FetchPartitionResponse) -> None:
    """Drop everything and follow from the leader's log start (KAFKA-9491), with the leader's knowledge of earlier
    producers. Raises BrokerError CORRUPT_MESSAGE."""
    try:
        producers = decode_snapshot(bytes(refusal.producers)) if refusal.producers else []
    except InvalidSnapshot as error:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"what the leader knows of producers: {error}") from error
    start, previous = refusal.log_start_offset, refusal.diverging_epoch
    partition.log.truncate_fully_and_start_at(start, NO_EPOCH if previous is None else previous.epoch, producers)
    partition.high_watermark = start


def _truncate_to_divergence(partition: Partition, leader: EpochEndOffset) -> int:
    """Cut back to the end of the last epoch that both logs may share. One round is enough if this log has the leader's
    epoch; otherwise the next fetch, with an earlier epoch, finds the next point (KIP-279)."""
    log = partition.log
    _, own_end = log.end_offset_for(leader.epoch)
    if leader.epoch == NO_EPOCH or own_end == -1:
        offset = min(log.log_start_offset, log.log_end_offset)
    else:
        offset = min(leader.end_offset, own_end, log.log_end_offset)
    try:
        log.truncate_to(offset)
    except BrokerError as error:
        if error.code is not ErrorCode.CORRUPT_MESSAGE:
            raise
        partition.give_up(partition, error.detail)  # the log is cut halfway
        raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, error.detail) from error
    # A batch that reaches over the offset goes as a whole, so the log may end before it.
    partition.high_watermark = min(partition.high_watermark, log.log_end_offset)
    return log.log_end_offset

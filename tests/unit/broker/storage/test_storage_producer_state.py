from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from minibroker.broker.storage import producer_state
from minibroker.broker.storage.producer_state import (
    InvalidSnapshot,
    Producer,
    ProducerBatch,
    ProducerState,
    decode_snapshot,
    encode_snapshot,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS, NO_DECISION, BatchHeader
from tests.storage_support import NOW, batch, headers

LAST = 2**31 - 1


def header(
    sequence: int, count: int = 1, *, epoch: int = 0, producer_id: int = 7, magic: int = MAGIC_COLUMNS
) -> BatchHeader:
    return headers(batch(count, producer_id=producer_id, producer_epoch=epoch, sequence=sequence, magic=magic))[0]


class Log:
    """Appends the batches that the state accepts, as a leader does."""

    def __init__(self, magic: int = MAGIC_COLUMNS) -> None:
        self.state = ProducerState()
        self.end = 0
        self.magic = magic

    def append(self, sequence: int, count: int = 1, *, epoch: int = 0, producer_id: int = 7) -> ProducerBatch | None:
        found = header(sequence, count, epoch=epoch, producer_id=producer_id, magic=self.magic)
        known = self.state.check(found)
        if known is None:
            self.state.update(found, self.end, NOW)
            self.end += count
        return known

    def refusal(self, sequence: int, count: int = 1, *, epoch: int = 0) -> ErrorCode:
        with pytest.raises(BrokerError) as raised:
            self.append(sequence, count, epoch=epoch)
        return raised.value.code


def test_batches_in_sequence_are_taken_and_a_gap_is_refused() -> None:
    log = Log()
    log.append(0, 3)
    log.append(3, 2)
    assert log.refusal(6) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert log.refusal(4) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    log.append(5)
    assert log.end == 6


def test_each_of_the_last_five_batches_is_known_when_it_is_sent_again() -> None:
    log = Log()
    for sequence in range(0, 12, 2):
        log.append(sequence, 2)
    for sequence in range(2, 12, 2):
        known = log.append(sequence, 2)
        assert known == ProducerBatch(sequence, sequence + 1, sequence, sequence + 1)
    assert log.end == 12
    assert log.refusal(0, 2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_batch_with_the_start_of_a_known_one_but_another_length_is_out_of_order() -> None:
    log = Log()
    log.append(0, 2)
    assert log.refusal(0, 3) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_sequences_go_on_with_zero_after_the_largest() -> None:
    log = Log()
    log.state = ProducerState.restore([(7, Producer(0, (ProducerBatch(LAST - 9, LAST - 2, 0, 7),), NOW))])
    log.append(LAST - 1, 4)
    known = log.append(LAST - 1, 4)
    assert known is not None
    assert (known.first_sequence, known.last_sequence) == (LAST - 1, 1)
    log.append(2)
    assert decode_snapshot(encode_snapshot(log.state.capture())) == log.state.capture()

    exactly = Log()
    exactly.state = ProducerState.restore([(7, Producer(0, (ProducerBatch(LAST, LAST, 0, 0),), NOW))])
    exactly.append(0)


def test_an_unknown_native_producer_must_begin_with_sequence_zero() -> None:
    log = Log()
    assert log.refusal(5) is ErrorCode.UNKNOWN_PRODUCER_ID
    log.append(0)


def test_an_unknown_producer_of_kafkas_begins_anywhere_and_goes_on_from_there() -> None:
    log = Log(MAGIC_RECORDS)
    log.append(5, 2)
    assert log.append(5, 2) == ProducerBatch(5, 6, 0, 1)
    assert log.refusal(8) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert log.refusal(4) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert log.refusal(7, epoch=1) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    log.append(7)
    assert log.end == 3


def test_a_newer_epoch_begins_with_sequence_zero_and_ends_the_older_one() -> None:
    log = Log()
    log.append(0, 5, epoch=1)
    assert log.refusal(5, epoch=2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    log.append(0, 2, epoch=2)
    assert log.refusal(5, epoch=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert log.refusal(0, 5, epoch=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    log.append(2, epoch=2)


def test_producers_do_not_disturb_each_other() -> None:
    log = Log()
    log.append(0, 2, producer_id=1)
    log.append(0, 3, producer_id=2)
    log.append(2, producer_id=1)
    log.append(3, producer_id=2)
    assert len(log.state) == 2


def test_a_marker_of_a_transaction_moves_the_epoch_alone() -> None:
    log = Log()
    log.append(0, 2, epoch=3)
    marker = header(0, epoch=4)
    fields = {field: getattr(marker, field) for field in BatchHeader.__struct_fields__}
    log.state.update(BatchHeader(**{**fields, "base_sequence": -1, "attributes": 0x30}), log.end, NOW)
    assert log.state.get(7) == Producer(4, (), NOW)
    assert decode_snapshot(encode_snapshot(log.state.capture())) == log.state.capture()
    assert log.refusal(2, epoch=3) is ErrorCode.INVALID_PRODUCER_EPOCH
    log.append(0, epoch=4)


def test_producers_that_were_not_seen_for_long_are_forgotten() -> None:
    state = ProducerState()
    state.update(header(0, producer_id=1), 0, NOW)
    for _ in range(11):
        state.time_passed(60)
    state.update(header(0, producer_id=2), 1, NOW)
    state.forget_unseen_for(600)
    assert state.get(1) is not None, "it may have been seen at the end of the first minute"
    state.time_passed(1)
    state.forget_unseen_for(600)
    assert state.get(1) is None
    assert state.get(2) is not None


def test_of_more_producers_than_a_log_remembers_those_that_wrote_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "MOST_PRODUCERS", 100)
    log, again = Log(MAGIC_RECORDS), ProducerState()
    transactional = headers(batch(1, producer_id=7, sequence=0, transactional=True, magic=MAGIC_RECORDS))[0]
    log.state.update(transactional, 0, NOW)
    log.append(0, producer_id=8)
    log.append(0, producer_id=9)
    for producer_id in range(1_000, 1_400):
        log.append(0, producer_id=producer_id)
        log.append(producer_id - 999, producer_id=9)
        assert len(log.state) <= 101
        if producer_id == 1_200:  # as a broker that starts
            log.state = again = ProducerState.restore(decode_snapshot(encode_snapshot(log.state.capture())))
    assert log.state is again
    assert log.state.get(7) is not None, "its transaction is open"
    assert log.state.last_stable_offset(1_000) == 0
    assert log.state.get(8) is None
    assert log.state.get(9) is not None, "it has just written"
    assert log.state.get(1_399) is not None
    log.append(5, producer_id=8)  # as Kafka: unknown, so any sequence may follow
    assert log.state.get(8) is not None


def test_open_transactions_are_not_looked_through_for_each_new_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "MOST_PRODUCERS", 100)
    state, looks = ProducerState(), 0
    forget = ProducerState.forget_oldest

    def counted(self: ProducerState, most: int) -> None:
        nonlocal looks
        looks += 1
        forget(self, most)

    monkeypatch.setattr(ProducerState, "forget_oldest", counted)
    for producer_id in range(300):
        opening = headers(batch(1, producer_id=producer_id, sequence=0, transactional=True, magic=MAGIC_RECORDS))[0]
        state.update(opening, producer_id, NOW)
    assert len(state) == 300
    assert looks <= 20


def test_a_jump_of_the_clock_between_two_looks_counts_as_a_minute() -> None:
    state = ProducerState()
    state.update(header(0), 0, NOW)
    for _ in range(10):
        state.time_passed(1_000_000)
    state.forget_unseen_for(600)
    assert state.get(7) is not None


def test_the_time_of_producers_begins_anew_where_their_state_is_restored() -> None:
    state = ProducerState()
    for _ in range(100):
        state.time_passed(60)
    state.update(header(0), 0, NOW)
    again = ProducerState.restore(state.capture())
    for _ in range(12):
        again.time_passed(60)
    again.forget_unseen_for(600)
    assert again.get(7) is None


def test_a_snapshot_is_kafkas_with_one_entry_for_each_batch_the_newest_last() -> None:
    log = Log()
    log.append(0, 2, epoch=3)
    log.append(2, 1, epoch=3)
    data = encode_snapshot(log.state.capture())
    version, crc, count = struct.unpack_from(">hIi", data)
    assert (version, count) == (1, 2)
    assert crc == crc32c(data[6:])
    entries = [struct.unpack_from(">qhiqiqiq", data, 10 + 46 * number) for number in range(2)]
    # producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, open transaction
    assert entries == [(7, 3, 1, 1, 1, NOW, -1, -1), (7, 3, 2, 2, 0, NOW, -1, -1)]


def test_a_snapshot_brings_back_the_whole_state() -> None:
    log = Log()
    for producer_id in range(3):
        for sequence in range(producer_id * 3):
            log.append(sequence, producer_id=producer_id)
    captured = [(i, producer._replace(decision=i if i > 1 else NO_DECISION)) for i, producer in log.state.capture()]
    assert decode_snapshot(encode_snapshot(captured)) == captured
    assert decode_snapshot(encode_snapshot([])) == []


def test_a_damaged_snapshot_is_noticed_whichever_byte_it_is() -> None:
    log = Log()
    log.append(0)
    data = encode_snapshot(log.state.capture())
    for position in range(len(data)):
        with pytest.raises(InvalidSnapshot):
            decode_snapshot(data[:position])
        with pytest.raises(InvalidSnapshot):
            decode_snapshot(data[:position] + bytes((data[position] ^ 1,)) + data[position + 1 :])


def test_of_very_many_producers_a_replica_is_told_of_those_that_wrote_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "MOST_TOLD", 2)
    known = ProducerState()
    for offset, producer_id in enumerate((5, 6, 7, 8, 5)):
        known.update(header(offset, producer_id=producer_id), offset, NOW)
    assert sorted(i for i, _ in known.below(4)) == [7, 8]
    assert sorted(i for i, _ in known.below(5)) == [5, 8]
    assert sorted(i for i, _ in known.below(2)) == [5, 6]
    assert known.below(0) == []

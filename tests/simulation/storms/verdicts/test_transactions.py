"""The verdict on transactions finds each anomaly, and none in correct histories."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Polled
from tests.simulation.storms.verdicts.transactions import (
    Append,
    OffsetFetched,
    Outcome,
    StableEnd,
    Transaction,
    TransactionHistory,
    check_transactions,
)

P, Q = TopicPartition("orders", 0), TopicPartition("orders", 1)
GROUP = "billing"


# --- A correct cluster, as small as possible -------------------------------------------------------------------


class Model:
    """Logs with transactions whose decisions are atomic, and clients that record their history."""

    def __init__(self, random: Random, partitions: int = 3, producers: int = 4) -> None:
        self.random = random
        self.partitions = [TopicPartition("orders", number) for number in range(partitions)]
        self.logs: dict[TopicPartition, list[tuple[bytes | None, Transaction | None]]] = {
            partition: [] for partition in self.partitions
        }
        self.history = TransactionHistory()
        self.open: dict[str, Transaction] = {}
        self.producers = [f"p{number}" for number in range(producers)]
        self.counts = dict.fromkeys([*self.producers, "plain", "value"], 0)
        self.now_s = 0.0
        self.decided: dict[Transaction, bool] = {}
        self.positions: dict[tuple[str, TopicPartition], int] = {}
        self.sessions: dict[str, int] = {}
        self.group_offsets: dict[TopicPartition, int] = dict.fromkeys(self.partitions, 0)

    def step(self) -> None:
        self.now_s += 1.0
        producer = self.random.choice(self.producers)
        transaction = self.open.get(producer)
        if transaction is None:
            self.counts[producer] += 1
            transaction = Transaction(f"{producer}#{self.counts[producer]}", self.now_s)
            self.open[producer] = transaction
            self.history.transactions.append(transaction)
            return
        kind = self.random.random()
        if kind < 0.5:
            self.append(transaction)
        elif kind < 0.7:
            self.poll(producer, transaction)
        elif kind < 0.75:
            self.poll("plain", None)
        else:
            self.end(producer, transaction, commits=self.random.random() < 0.7)

    def append(self, transaction: Transaction) -> None:
        self.counts["value"] += 1
        value = b"%d|" % self.counts["value"]
        partition = self.random.choice(self.partitions)
        log = self.logs[partition]
        transaction.appends.append(Append(partition, value, len(log) if self.random.random() < 0.9 else -1))
        log.append((value, transaction))

    def poll(self, consumer: str, transaction: Transaction | None) -> None:
        """The first producer is the only member of the group, so that each input has one owner."""
        session = f"{consumer}.{self.sessions.get(consumer, 0)}"
        for partition in self.partitions:
            start = self.positions.get((consumer, partition), 0)
            limit = start + self.random.randint(1, 20)
            for offset, value in self.visible(partition, start, limit):
                polled = Polled(session, partition, offset, value, self.now_s)
                (self.history.polled if transaction is None else transaction.polled).append(polled)
            position = max(start, min(limit, self.last_stable_offset(partition)))
            self.positions[consumer, partition] = position
            if transaction is not None and consumer == self.producers[0]:
                transaction.group = GROUP
                transaction.offsets[partition] = position

    def last_stable_offset(self, partition: TopicPartition) -> int:
        log = self.logs[partition]
        return next((o for o, (_, t) in enumerate(log) if t is not None and t not in self.decided), len(log))

    def visible(self, partition: TopicPartition, start: int, end: int) -> list[tuple[int, bytes]]:
        end = min(end, self.last_stable_offset(partition))
        entries = enumerate(self.logs[partition][start:end], start)
        return [(o, value) for o, (value, t) in entries if value is not None and t is not None and self.decided[t]]

    def end(self, producer: str, transaction: Transaction, *, commits: bool) -> None:
        is_told = self.random.random() < 0.9
        if commits:
            transaction.commit_asked_s = self.now_s
        self.now_s += 0.5
        took_effect = commits and (is_told or self.random.random() < 0.5)
        self.decided[transaction] = took_effect
        for partition in {append.partition for append in transaction.appends}:
            self.logs[partition].append((None, None))
        if took_effect:
            self.group_offsets |= transaction.offsets
        elif producer == self.producers[0]:
            self.sessions[producer] = self.sessions.get(producer, 0) + 1
            for partition in self.partitions:
                self.positions[producer, partition] = self.group_offsets[partition]
        if is_told:
            transaction.outcome = Outcome.COMMITTED if commits else Outcome.ABORTED
            transaction.ended_s = self.now_s
        self.look_up()
        del self.open[producer]

    def look_up(self) -> None:
        for partition, offset in self.group_offsets.items():
            self.history.fetched.append(OffsetFetched(GROUP, partition, offset, self.now_s, self.now_s))

    def finish(self) -> TransactionHistory:
        for producer, transaction in list(self.open.items()):
            self.end(producer, transaction, commits=False)
        for partition, log in self.logs.items():
            self.history.log[partition] = {o: value for o, (value, _) in enumerate(log) if value is not None}
            self.history.committed[partition] = dict(self.visible(partition, 0, len(log)))
            self.history.stable[partition] = StableEnd(self.last_stable_offset(partition), len(log))
        return self.history


@given(st.randoms(use_true_random=False), st.integers(0, 300))
def test_a_correct_history_of_concurrent_transactions_has_no_anomaly(random: Random, steps: int) -> None:
    model = Model(random)
    for _ in range(steps):
        model.step()
    assert check_transactions(model.finish()) == []


def test_ten_thousand_transactions_are_judged_in_seconds() -> None:
    model = Model(Random(1), partitions=8, producers=20)
    model.last_stable_offset = _counted(model)  # type: ignore[method-assign]
    while len(model.history.transactions) < 10_000:
        model.step()
    history = model.finish()
    began = time.process_time()
    assert check_transactions(history) == []
    assert time.process_time() - began < 5


def _counted(model: Model):  # type: ignore[no-untyped-def]
    """The last stable offset, found from where it was before."""
    known = dict.fromkeys(model.partitions, 0)

    def last_stable_offset(partition: TopicPartition) -> int:
        log, offset = model.logs[partition], known[partition]
        while offset < len(log) and not ((t := log[offset][1]) is not None and t not in model.decided):
            offset += 1
        known[partition] = offset
        return offset

    return last_stable_offset


# --- One planted history for each anomaly ----------------------------------------------------------------------


def a_history() -> TransactionHistory:
    """Two committed transactions: `first` writes a to P and b to Q; `second` reads them, writes c to P and commits the
    group's offsets. Then an aborted one, which wrote d to P."""
    first = Transaction("first", 1.0, [Append(P, b"a", 0), Append(Q, b"b", 0)])
    second = Transaction("second", 4.0, [Append(P, b"c", 2)], group=GROUP, offsets={P: 2, Q: 2})
    second.polled = [Polled("x", P, 0, b"a", 4.0), Polled("x", Q, 0, b"b", 4.5)]
    third = Transaction("third", 7.0, [Append(P, b"d", 4)], outcome=Outcome.ABORTED, ended_s=9.0)
    for transaction in (first, second):
        transaction.commit_asked_s = transaction.began_s + 1
        transaction.outcome = Outcome.COMMITTED
        transaction.ended_s = transaction.began_s + 2
    return TransactionHistory(
        transactions=[first, second, third],
        polled=[Polled("y", P, 0, b"a", 8.0), Polled("y", P, 2, b"c", 8.0), Polled("y", Q, 0, b"b", 8.0)],
        fetched=[OffsetFetched(GROUP, P, 2, 8.0, 8.5), OffsetFetched(GROUP, Q, 2, 8.0, 8.5)],
        committed={P: {0: b"a", 2: b"c"}, Q: {0: b"b"}},
        log={P: {0: b"a", 2: b"c", 4: b"d"}, Q: {0: b"b"}},
        stable={P: StableEnd(6, 6), Q: StableEnd(2, 2)},
    )


def kinds(history: TransactionHistory) -> set[str]:
    return {anomaly.kind for anomaly in check_transactions(history)}


def test_a_correct_history_of_three_transactions_has_no_anomaly() -> None:
    assert check_transactions(a_history()) == []


def test_a_value_of_an_aborted_transaction_must_be_visible_to_nobody() -> None:
    history = a_history()
    history.polled.append(Polled("y", P, 4, b"d", 9.0))
    assert kinds(history) == {"G1a (aborted read)"}
    history = a_history()
    history.committed[P][4] = b"d"
    assert kinds(history) == {"G1a (aborted read)"}


def test_a_transaction_that_never_asked_for_its_commit_is_not_visible() -> None:
    history = a_history()
    history.transactions[2].outcome, history.transactions[2].ended_s = Outcome.UNKNOWN, float("inf")
    assert check_transactions(history) == []
    history.committed[P][4] = b"d"
    assert kinds(history) == {"G1a (aborted read)"}


def test_a_group_offset_that_only_an_aborted_transaction_committed_is_an_aborted_read() -> None:
    history = a_history()
    history.transactions[2].group, history.transactions[2].offsets = GROUP, {P: 3}
    history.fetched[0] = history.fetched[0]._replace(offset=3)
    history.transactions[1].polled.append(Polled("x", P, 2, b"c", 4.0))
    assert "G1a (aborted read)" in kinds(history)


def test_a_poll_before_the_commit_was_asked_for_is_an_intermediate_read() -> None:
    history = a_history()
    history.polled[0] = history.polled[0]._replace(at_s=1.5)
    assert kinds(history) == {"G1b (intermediate read)"}


def test_a_transaction_that_polls_its_own_value_is_an_intermediate_read() -> None:
    history = a_history()
    second = history.transactions[1]
    second.group, history.fetched = None, []
    second.polled.append(Polled("x", P, 2, b"c", 4.9))
    assert kinds(history) == {"G1b (intermediate read)", "G1c (circular information flow)"}


def test_two_transactions_that_polled_each_other_are_a_circular_flow() -> None:
    history = a_history()
    first, second = history.transactions[:2]
    for transaction in (first, second):
        transaction.began_s, transaction.commit_asked_s, transaction.ended_s = 1.0, 2.0, 5.0
        transaction.group = None
    second.polled = [Polled("x", Q, 0, b"b", 2.5)]
    first.polled = [Polled("z", P, 2, b"c", 2.5)]
    history.fetched = []
    assert kinds(history) == {"G1c (circular information flow)"}
    first.polled = []
    assert check_transactions(history) == []


def test_a_flow_against_the_order_of_time_is_circular() -> None:
    """`first` polls what `second` wrote into R, although it had ended before `second` asked for its commit."""
    history = a_history()
    first, second = history.transactions[:2]
    r = TopicPartition("orders", 2)
    second.appends.append(Append(r, b"e", 0))
    history.committed[r] = history.log[r] = {0: b"e"}
    first.polled = [Polled("z", r, 0, b"e", 2.0)]
    assert "G1c (circular information flow)" in kinds(history)


def test_a_poll_beyond_an_open_transaction_is_a_circular_flow_without_any_common_value() -> None:
    """`second` polled e behind `first`'s a while `first` was open: `first` then polled what `second` wrote."""
    history = a_history()
    first, second = history.transactions[:2]
    other = Transaction("other", 0.0, [Append(P, b"e", 1)], commit_asked_s=0.5, outcome=Outcome.COMMITTED, ended_s=6.0)
    history.transactions.append(other)
    history.committed[P][1] = history.log[P][1] = b"e"
    history.polled, history.fetched = [], []
    for transaction in (first, second):
        transaction.began_s, transaction.commit_asked_s, transaction.ended_s = 1.0, 2.0, 5.0
        transaction.group = None
    first.appends[1:] = []
    history.committed[Q] = history.log[Q] = {0: b"c"}
    second.appends = [Append(Q, b"c", 0)]
    del history.committed[P][2], history.log[P][2]
    second.polled = [Polled("x", P, 1, b"e", 2.5)]
    first.polled = [Polled("z", Q, 0, b"c", 2.5)]
    assert kinds(history) == {"G1c (circular information flow)"}


def test_a_record_behind_one_of_a_transaction_that_began_after_its_own_ended_is_a_write_cycle() -> None:
    history = a_history()
    first, second = history.transactions[:2]
    second.group, second.polled, history.fetched, history.polled = None, [], [], []
    history.committed[P] = {0: b"c", 2: b"a"}
    history.log[P] = {0: b"c", 2: b"a", 4: b"d"}
    first.appends[0], second.appends[0] = Append(P, b"a", 2), Append(P, b"c", 0)
    assert kinds(history) == {"G0 (write cycle)"}
    first.ended_s = second.ended_s  # concurrent transactions interleave
    assert check_transactions(history) == []


def test_an_unanswered_write_of_an_aborted_transaction_may_come_late() -> None:
    history = a_history()
    first, _, third = history.transactions
    third.began_s, third.ended_s, third.appends = 0.1, 0.5, [Append(P, b"d", None)]
    assert check_transactions(history) == []
    assert first.began_s > third.ended_s
    third.appends = [Append(P, b"d", 4)]
    assert kinds(history) == {"G0 (write cycle)"}


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.UNKNOWN])
def test_a_transaction_of_which_a_part_is_visible_is_torn(outcome: Outcome) -> None:
    history = a_history()
    history.transactions[0].outcome = outcome
    history.transactions[1].polled.pop(1)
    history.polled.pop(2)
    del history.committed[Q][0]
    lost = {"lost write"} if outcome is Outcome.COMMITTED else set()
    assert kinds(history) == {"torn transaction", *lost}


def test_a_transaction_whose_group_offsets_are_missing_is_torn() -> None:
    history = a_history()
    history.transactions[1].outcome = Outcome.UNKNOWN
    history.fetched = [OffsetFetched(GROUP, P, 0, 8.0, 8.5), OffsetFetched(GROUP, Q, 2, 8.0, 8.5)]
    assert kinds(history) == {"torn transaction"}


def test_a_committed_or_polled_value_that_is_not_there_is_lost() -> None:
    history = a_history()
    history.polled.pop(1)
    del history.committed[P][2]
    assert kinds(history) == {"lost write"}
    history = a_history()
    history.transactions[1].outcome, history.fetched = Outcome.UNKNOWN, []
    del history.committed[P][2]
    assert kinds(history) == {"lost write"}


def test_a_transaction_of_unknown_outcome_may_be_visible_or_not() -> None:
    history = a_history()
    second = history.transactions[1]
    second.outcome = Outcome.UNKNOWN
    assert check_transactions(history) == []
    history.polled.pop(1)
    del history.committed[P][2]
    history.fetched = [fetch._replace(offset=0) for fetch in history.fetched]
    assert check_transactions(history) == []


def test_a_value_twice_in_the_log_is_a_duplicate_even_if_it_was_aborted() -> None:
    history = a_history()
    history.log[P][5] = b"d"
    assert kinds(history) == {"duplicate"}


def test_an_offset_with_two_values_and_a_value_at_two_offsets_are_inconsistent() -> None:
    history = a_history()
    history.polled[1] = history.polled[1]._replace(value=b"a")
    assert "inconsistent offset" in kinds(history)
    history = a_history()
    history.transactions[0].appends[1] = Append(Q, b"b", 1)
    assert kinds(history) == {"inconsistent offset"}


def test_a_value_that_was_not_sent_there_is_a_phantom() -> None:
    history = a_history()
    history.log[Q][5] = b"never"
    assert kinds(history) == {"phantom"}


def test_a_consumer_that_skips_a_committed_value_or_goes_back_is_seen() -> None:
    history = a_history()
    history.committed[P][1] = history.log[P][1] = b"e"
    history.transactions.append(replace(history.transactions[0], name="other", appends=[Append(P, b"e", 1)]))
    history.transactions[1].polled.append(Polled("x", P, 1, b"e", 4.0))
    assert kinds(history) == {"poll skip"}
    history = a_history()
    history.polled[:2] = [history.polled[1], history.polled[0]]
    assert kinds(history) == {"nonmonotonic poll"}
    history.polled[1] = history.polled[1]._replace(consumer="a new assignment")
    assert check_transactions(history) == []


def test_jumps_within_one_transaction_are_named_internal() -> None:
    history = a_history()
    second = history.transactions[1]
    history.transactions.append(replace(history.transactions[0], name="other", appends=[Append(P, b"e", 1)]))
    history.committed[P][1] = history.log[P][1] = b"e"
    history.polled = []
    last = Transaction("last", 10.0, commit_asked_s=11.0, outcome=Outcome.COMMITTED, ended_s=12.0)
    last.polled = [Polled("z", P, 0, b"a", 10.0), Polled("z", P, 2, b"c", 10.0)]
    history.transactions.append(last)
    second.polled.append(Polled("x", P, 1, b"e", 4.0))
    assert kinds(history) == {"internal poll skip"}
    last.polled = [Polled("z", P, 2, b"c", 10.0), Polled("z", P, 1, b"e", 10.0)]
    assert kinds(history) == {"internal nonmonotonic poll"}


def test_an_input_that_two_committed_transactions_of_a_group_processed_is_seen() -> None:
    history = a_history()
    twin = replace(history.transactions[1], name="twin", began_s=7.0, commit_asked_s=8.0, ended_s=9.0)
    twin.appends, twin.polled = [], [Polled("w", P, 0, b"a", 7.5)]
    history.transactions.append(twin)
    assert kinds(history) == {"processed twice"}
    twin.outcome, twin.commit_asked_s = Outcome.ABORTED, float("inf")
    assert check_transactions(history) == []


def test_an_input_below_the_group_offset_that_nobody_processed_is_lost() -> None:
    history = a_history()
    history.transactions[1].polled.pop(1)
    assert kinds(history) == {"lost input"}


def test_a_committed_offset_that_goes_back_is_seen() -> None:
    history = a_history()
    history.fetched.append(OffsetFetched(GROUP, P, 0, 8.6, 8.7))
    assert kinds(history) == {"committed offset went back", "torn transaction"}
    history = a_history()
    history.fetched.insert(0, OffsetFetched(GROUP, P, 0, 5.9, 8.6))  # it began before the commit was acknowledged
    assert check_transactions(history) == []
    history.fetched[0] = OffsetFetched(GROUP, P, 0, 6.1, 8.6)
    assert kinds(history) == {"committed offset went back"}


def test_a_last_stable_offset_below_the_high_watermark_stands_still() -> None:
    history = a_history()
    history.stable[P] = StableEnd(4, 6)
    assert kinds(history) == {"last stable offset stands still"}

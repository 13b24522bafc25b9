"""The rules of a transactional id, request by request."""

import msgspec
import pytest

from minibroker.broker.transactions.states import IllegalTransition, TransactionState, check_transition
from minibroker.broker.transactions.transaction import (
    LAST_EPOCH,
    NO_EPOCH,
    Decision,
    ProducerIdAndEpoch,
    Transaction,
    add_partitions,
    complete,
    end,
    forget,
    initialize,
    may_be_forgotten,
    needs_fresh_id,
    time_out,
    verify,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition

S = TransactionState
E = ErrorCode
ORDERS, BILLS = TopicPartition("orders", 0), TopicPartition("bills", 3)
FRESH, FRESHER = 7, 8


def begun(known: Transaction | None = None, expected: ProducerIdAndEpoch | None = None) -> Decision:
    return initialize(known, "t", 60_000, expected, FRESH if known is None else FRESHER, 1)


def first() -> Transaction:
    decided = begun()
    assert isinstance(decided, Transaction)
    return decided


def opened(known: Transaction | None = None, *partitions: TopicPartition) -> Transaction:
    known = known or first()
    decided = add_partitions(known, known.granted, partitions or (ORDERS,), 2)
    assert isinstance(decided, Transaction)
    return decided


def ended(known: Transaction, *, committed: bool = True, raises_epoch: bool = True) -> Transaction:
    decided = end(known, known.granted, committed=committed, raises_epoch=raises_epoch, fresh_id=FRESHER, now_ms=3)
    assert isinstance(decided, Transaction)
    return decided


def ask_end(
    known: Transaction | None, producer: ProducerIdAndEpoch, *, committed: bool, raises: bool = True
) -> Decision:
    return end(known, producer, committed=committed, raises_epoch=raises, fresh_id=FRESHER, now_ms=4)


def test_a_new_id_gets_a_fresh_producer_id_with_epoch_0() -> None:
    assert needs_fresh_id(None)
    assert first().granted == (FRESH, 0)
    assert first().state is S.EMPTY


def test_a_new_instance_fences_the_earlier_one() -> None:
    before = first()
    after = begun(before)
    assert isinstance(after, Transaction)
    assert after.granted == (FRESH, 1)
    assert add_partitions(after, before.granted, [ORDERS], 2) is E.PRODUCER_FENCED
    assert ask_end(after, before.granted, committed=True) is E.PRODUCER_FENCED
    assert verify(after, before.granted, [ORDERS]) == {ORDERS: E.PRODUCER_FENCED}
    assert begun(after, expected=before.granted) is E.PRODUCER_FENCED


def test_a_new_instance_aborts_the_open_transaction_first() -> None:
    known = opened()
    aborting = begun(known)
    assert isinstance(aborting, Transaction)
    assert aborting.state is S.PREPARE_ABORT
    assert aborting.partitions == {ORDERS}
    assert begun(aborting) is E.CONCURRENT_TRANSACTIONS
    after = begun(complete(aborting, 5))
    assert isinstance(after, Transaction)
    assert after.producer_epoch == known.producer_epoch + 2
    assert ask_end(complete(aborting, 5), known.granted, committed=False) is E.PRODUCER_FENCED


def test_a_transaction_collects_its_partitions() -> None:
    known = opened(opened(), BILLS)
    assert known.partitions == {ORDERS, BILLS}
    assert add_partitions(known, known.granted, [ORDERS], 9) is known
    assert verify(known, known.granted, [ORDERS]) == {ORDERS: E.NONE}
    other = TopicPartition("others", 0)
    assert verify(known, known.granted, [ORDERS, other]) == {ORDERS: E.NONE, other: E.INVALID_TXN_STATE}


@pytest.mark.parametrize("committed", [True, False])
def test_every_end_raises_the_epoch_and_late_requests_are_refused(committed: bool) -> None:
    known = opened()
    late = known.granted
    done = complete(ended(known, committed=committed), 4)
    assert done.state is (S.COMPLETE_COMMIT if committed else S.COMPLETE_ABORT)
    assert done.granted == (FRESH, 1)
    following = opened(done, BILLS)
    assert ask_end(following, late, committed=True) is E.PRODUCER_FENCED  # KAFKA-17754
    assert ask_end(following, late, committed=False) is E.PRODUCER_FENCED
    assert add_partitions(following, late, [ORDERS], 5) is E.PRODUCER_FENCED
    assert begun(following, expected=late) is E.PRODUCER_FENCED


@pytest.mark.parametrize("committed", [True, False])
def test_a_repeated_end_gets_the_same_answer_until_the_next_transaction(committed: bool) -> None:
    known = opened()
    for state in (ended(known, committed=committed), complete(ended(known, committed=committed), 4)):
        assert ask_end(state, known.granted, committed=committed) is state
        assert state.granted == (FRESH, 1)
    done = complete(ended(known, committed=committed), 4)
    other = ask_end(done, known.granted, committed=not committed)
    assert other is (E.INVALID_TXN_STATE if committed else E.TRANSACTION_ABORTABLE)


def test_nothing_is_committed_that_was_not_begun() -> None:
    assert ask_end(None, ProducerIdAndEpoch(1, 0), committed=True) is E.INVALID_PRODUCER_ID_MAPPING
    assert ask_end(first(), first().granted, committed=True) is E.INVALID_TXN_STATE
    assert ask_end(first(), first().granted, committed=True, raises=False) is E.INVALID_TXN_STATE
    assert ask_end(first(), ProducerIdAndEpoch(99, 0), committed=True) is E.INVALID_PRODUCER_ID_MAPPING


def test_an_abort_without_a_transaction_raises_the_epoch_against_late_batches() -> None:
    known = first()
    aborting = ask_end(known, known.granted, committed=False)
    assert isinstance(aborting, Transaction)
    assert aborting.state is S.PREPARE_ABORT
    assert not aborting.partitions
    assert add_partitions(complete(aborting, 5), known.granted, [ORDERS], 6) is E.PRODUCER_FENCED


def test_the_producer_goes_on_after_a_time_out() -> None:
    known = opened()
    late = complete(time_out(known, FRESHER, 4), 5)
    assert ask_end(late, known.granted, committed=True) is E.TRANSACTION_ABORTABLE
    assert ask_end(late, known.granted, committed=False) is late
    assert begun(late, expected=known.granted) is late
    assert ask_end(late, known.granted, committed=True, raises=False) is E.PRODUCER_FENCED


def test_nobody_goes_on_with_an_epoch_that_a_new_instance_has_raised() -> None:
    known = begun(complete(ended(opened()), 4))
    assert isinstance(known, Transaction)
    assert known.successor_of == NO_EPOCH
    for epoch in (0, 1):
        assert begun(known, expected=ProducerIdAndEpoch(FRESH, epoch)) is E.PRODUCER_FENCED
        assert ask_end(known, ProducerIdAndEpoch(FRESH, epoch), committed=True) is E.PRODUCER_FENCED


def test_clients_that_keep_their_epoch() -> None:
    known = opened()
    committing = ended(known, raises_epoch=False)
    assert committing.granted == known.granted
    assert ask_end(committing, known.granted, committed=True, raises=False) is E.CONCURRENT_TRANSACTIONS
    assert ask_end(committing, known.granted, committed=False, raises=False) is E.INVALID_TXN_STATE
    done = complete(committing, 4)
    assert ask_end(done, known.granted, committed=True, raises=False) is done
    assert ask_end(done, known.granted, committed=False, raises=False) is E.INVALID_TXN_STATE
    assert verify(done, known.granted, [ORDERS]) == {ORDERS: E.INVALID_TXN_STATE}


@pytest.mark.parametrize("committed", [True, False])
def test_a_producer_gets_a_new_id_when_its_epochs_are_used_up(committed: bool) -> None:
    old = ProducerIdAndEpoch(FRESH, LAST_EPOCH - 1)
    known = Transaction(
        transactional_id="t",
        producer_id=old.producer_id,
        producer_epoch=old.epoch,
        timeout_ms=60_000,
        state=S.ONGOING,
        updated_ms=0,
        partitions=frozenset([ORDERS]),
    )
    assert needs_fresh_id(known)
    ending = ended(known, committed=committed)
    assert (ending.producer_id, ending.producer_epoch) == (FRESH, LAST_EPOCH)  # the markers fence the old id
    assert ending.granted == (FRESHER, 0)
    assert add_partitions(ending, ending.granted, [BILLS], 4) is E.CONCURRENT_TRANSACTIONS
    assert verify(ending, ending.granted, [BILLS]) == {BILLS: E.CONCURRENT_TRANSACTIONS}
    done = complete(ending, 4)
    assert (done.producer_id, done.producer_epoch) == (FRESHER, 0)
    for state in (ending, done):
        assert ask_end(state, old, committed=committed) is state
    assert add_partitions(done, old, [ORDERS], 5) is E.INVALID_PRODUCER_ID_MAPPING
    following = opened(done)
    assert ask_end(following, old, committed=committed) is E.INVALID_PRODUCER_ID_MAPPING


def test_a_zombie_of_the_id_before_owns_nothing_once_its_successor_goes_on() -> None:
    """Its epoch may be the one that the live producer had under the new id."""
    zombie = ProducerIdAndEpoch(FRESH, 0)
    used_up = msgspec.structs.replace(opened(), producer_epoch=LAST_EPOCH - 1)
    done = complete(ended(used_up), 4)
    assert done.granted == (FRESHER, 0)
    live = begun(done, done.granted)
    assert isinstance(live, Transaction)
    assert live.granted == (FRESHER, 1)
    assert begun(live, done.granted) is live  # the live one, whose answer was lost
    assert begun(live, zombie) is E.PRODUCER_FENCED
    assert add_partitions(live, zombie, [ORDERS], 5) is E.INVALID_PRODUCER_ID_MAPPING


def test_a_new_instance_gets_a_new_id_when_the_epochs_are_used_up() -> None:
    known = Transaction(
        transactional_id="t",
        producer_id=FRESH,
        producer_epoch=LAST_EPOCH - 1,
        timeout_ms=60_000,
        state=S.EMPTY,
        updated_ms=0,
    )
    after = begun(known)
    assert isinstance(after, Transaction)
    assert after.granted == (FRESHER, 0)


def test_requests_wait_while_the_outcome_is_told() -> None:
    committing = ended(opened())
    assert add_partitions(committing, committing.granted, [BILLS], 5) is E.CONCURRENT_TRANSACTIONS
    assert verify(committing, committing.granted, [ORDERS]) == {ORDERS: E.CONCURRENT_TRANSACTIONS}
    assert not may_be_forgotten(committing)
    assert may_be_forgotten(complete(committing, 5))
    assert forget(complete(committing, 5), 6).state is S.DEAD


def test_illegal_transitions_raise() -> None:
    for state in (S.EMPTY, S.COMPLETE_COMMIT, S.PREPARE_COMMIT):
        with pytest.raises(IllegalTransition):
            check_transition("t", state, S.PREPARE_COMMIT)
    with pytest.raises(IllegalTransition):
        forget(opened(), 5)

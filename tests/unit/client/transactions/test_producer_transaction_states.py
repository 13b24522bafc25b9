"""The states of a transactional producer: what each event and each answer of the coordinator leads to."""

from __future__ import annotations

import pickle

import pytest

from minibroker.client.errors import CommitOutcomeUnknown, DeliveryTimedOut, ProducerFenced, TransactionAborted
from minibroker.client.producing.batch import Identity
from minibroker.client.transactions.states import (
    MOVES,
    Outcome,
    Reaction,
    Step,
    TransactionState,
    TransactionStates,
    reaction,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError

E = ErrorCode
S = TransactionState
FIRST, NEXT = Identity(7, 0), Identity(7, 1)
NOTHING = Identity(-1, -1)
FENCING = [E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED, E.INVALID_PRODUCER_ID_MAPPING]


def in_transaction() -> TransactionStates:
    states = TransactionStates("t")
    states.initialized(FIRST)
    states.begins()
    return states


def committing() -> TransactionStates:
    states = in_transaction()
    states.commits()
    assert states.next_step() is Step.COMMIT
    return states


def test_every_state_can_be_reached_and_left_unless_it_is_fatal() -> None:
    assert set(MOVES) == set(S)
    assert set().union(*MOVES.values()) == set(S) - {S.UNINITIALIZED}
    assert [state for state, following in MOVES.items() if not following] == [S.PREPARED, S.FATAL_ERROR]


def test_an_illegal_move_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        TransactionStates("t").begins()


def test_a_commit_grants_the_identity_of_the_next_transaction() -> None:
    states = committing()
    assert states.result.outcome is Outcome.UNKNOWN
    states.answered(Step.COMMIT, E.NONE, NEXT, in_doubt=False)
    assert (states.state, states.identity, states.result.outcome) == (S.READY, NEXT, Outcome.COMMITTED)


def test_the_result_of_a_transaction_outlives_the_next_one() -> None:
    states = committing()
    result = states.result
    states.answered(Step.COMMIT, E.NONE, NEXT, in_doubt=False)
    states.begins()
    assert result.outcome is Outcome.COMMITTED
    assert states.result.outcome is Outcome.OPEN


def test_an_empty_transaction_keeps_the_identity() -> None:
    states = in_transaction()
    states.commits()
    states.ended(Outcome.COMMITTED, None)
    assert states.identity == FIRST


@pytest.mark.parametrize("code", FENCING)
def test_a_batch_refused_by_its_epoch_makes_the_producer_ask_whether_it_may_go_on(code: ErrorCode) -> None:
    states = in_transaction()
    states.failed(BrokerError(code), "orders-0")
    assert states.state is S.ABORTABLE_ERROR
    assert states.next_step() is Step.RECOVER
    states.answered(Step.RECOVER, E.NONE, NEXT, in_doubt=False)
    assert (states.state, states.identity, states.result.outcome) == (S.READY, NEXT, Outcome.ABORTED)


@pytest.mark.parametrize("error", [DeliveryTimedOut("late"), BrokerError(E.MESSAGE_TOO_LARGE)])
def test_any_other_failure_only_aborts(error: MinibrokerError) -> None:
    states = in_transaction()
    states.failed(error, "orders-0")
    states.failed(BrokerError(E.PRODUCER_FENCED), "orders-1")  # the first failure counts
    assert states.cause is error
    assert states.next_step() is Step.ABORT


def test_a_failure_without_authorization_is_fatal() -> None:
    states = in_transaction()
    states.failed(BrokerError(E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), "orders-0")
    assert states.state is S.FATAL_ERROR
    assert states.fatal is not None
    assert not states.fatal.is_commit_unknown


def test_a_commit_that_is_refused_as_abortable_is_aborted() -> None:
    states = committing()
    states.answered(Step.COMMIT, E.TRANSACTION_ABORTABLE, NOTHING, in_doubt=False)
    assert states.has_to_end
    assert states.next_step() is Step.ABORT
    assert states.result.outcome is Outcome.ABORTED


@pytest.mark.parametrize("code", FENCING)
def test_a_refused_commit_recovers_only_if_no_earlier_attempt_may_have_committed(code: ErrorCode) -> None:
    states = committing()
    states.answered(Step.COMMIT, code, NOTHING, in_doubt=False)
    assert states.next_step() is Step.RECOVER
    states = committing()
    states.answered(Step.COMMIT, code, NOTHING, in_doubt=True)
    assert states.state is S.FATAL_ERROR
    assert states.fatal is not None
    assert states.fatal.is_commit_unknown
    assert states.result.outcome is Outcome.UNKNOWN


def test_a_commit_without_an_answer_is_asked_for_again_and_never_aborted() -> None:
    states = committing()
    states.unanswered()
    assert (states.state, states.result.outcome) == (S.COMMIT_UNKNOWN, Outcome.UNKNOWN)
    assert states.next_step() is Step.COMMIT
    states.answered(Step.COMMIT, E.PRODUCER_FENCED, NOTHING, in_doubt=False)
    assert states.fatal is not None
    assert states.fatal.is_commit_unknown


def test_an_abort_that_is_refused_asks_whether_the_producer_may_go_on() -> None:
    states = in_transaction()
    states.aborts("its block was left")
    assert states.next_step() is Step.ABORT
    states.answered(Step.ABORT, E.INVALID_PRODUCER_ID_MAPPING, NOTHING, in_doubt=False)
    assert states.next_step() is Step.RECOVER
    states.answered(Step.RECOVER, E.PRODUCER_FENCED, NOTHING, in_doubt=False)
    assert states.state is S.FATAL_ERROR


def test_reactions_to_errors() -> None:
    assert reaction(BrokerError(E.PRODUCER_FENCED)) is Reaction.RECOVER
    assert reaction(BrokerError(E.TRANSACTION_ABORTABLE)) is Reaction.ABORT
    assert reaction(DeliveryTimedOut("late")) is Reaction.ABORT


@pytest.mark.parametrize(
    "error",
    [
        TransactionAborted("t", "a record of orders-0 has failed", BrokerError(E.MESSAGE_TOO_LARGE)),
        CommitOutcomeUnknown("t", 60.0, "no answer"),
        ProducerFenced("t", E.PRODUCER_FENCED, is_commit_unknown=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_transactions_say_whether_they_are_fatal_and_can_be_pickled(error: MinibrokerError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.is_fatal is isinstance(error, ProducerFenced)
    assert getattr(copy, "is_commit_unknown", None) == getattr(error, "is_commit_unknown", None)

"""The states of a transactional id and their valid transitions (Kafka's TransactionState)."""

from enum import Enum


class TransactionState(Enum):
    """States of a transactional id, named as in DescribeTransactions and ListTransactions."""

    EMPTY = "Empty"
    """A producer has the id, and no transaction of it was ever begun."""
    ONGOING = "Ongoing"
    """Partitions have joined the transaction."""
    PREPARE_COMMIT = "PrepareCommit"
    """The transaction is committed. Its markers are being written."""
    PREPARE_ABORT = "PrepareAbort"
    """The transaction is aborted. Its markers are being written."""
    COMPLETE_COMMIT = "CompleteCommit"
    """All markers of the committed transaction are written."""
    COMPLETE_ABORT = "CompleteAbort"
    """All markers of the aborted transaction are written."""
    DEAD = "Dead"
    """The id was unused for too long, and its tombstone is being written."""


_S = TransactionState

VALID_PREVIOUS_STATES: dict[TransactionState, frozenset[TransactionState]] = {
    _S.EMPTY: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.ONGOING: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.PREPARE_COMMIT: frozenset({_S.ONGOING}),
    _S.PREPARE_ABORT: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.COMPLETE_COMMIT: frozenset({_S.PREPARE_COMMIT}),
    _S.COMPLETE_ABORT: frozenset({_S.PREPARE_ABORT}),
    _S.DEAD: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
}
"""The states from which an id may enter each state.

Kafka has PrepareEpochFence besides, between the decision to fence a producer and the decision to abort its transaction.
Here both are one decision and one record. An abort from a state without a transaction raises the epoch, so that a late
batch of the producer cannot begin one (KIP-890)."""

ENDING = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
"""The outcome is decided, and cannot change, but not all partitions know it."""
COMMITTED = frozenset({_S.PREPARE_COMMIT, _S.COMPLETE_COMMIT})
ABORTED = frozenset({_S.PREPARE_ABORT, _S.COMPLETE_ABORT})


class IllegalTransition(RuntimeError):
    """A transition that the table does not allow: a broken invariant."""


def check_transition(transactional_id: str, old: TransactionState, new: TransactionState) -> None:
    """Raises IllegalTransition."""
    if old not in VALID_PREVIOUS_STATES[new]:
        raise IllegalTransition(f"transactional id {transactional_id!r} cannot go from {old.value} to {new.value}")

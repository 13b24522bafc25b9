"""The states of a transactional producer, their legal moves, and its reactions to errors (Kafka's TransactionManager).
Pure.

A transaction is committed or aborted by its coordinator alone. So this side never concludes an outcome from silence:
a commit without an answer is COMMIT_UNKNOWN until the coordinator has answered the same request again. That is safe,
since each end raises the producer's epoch (KIP-890): a request of an ended transaction is answered as before, or
refused, but never carried out on the next one.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeGuard

from minibroker.client.errors import (
    DeserializationFailed,
    InvalidSetting,
    ProducerFenced,
    SerializationFailed,
    TransactionError,
    WrongEventLoop,
)
from minibroker.client.producing.batch import Identity
from minibroker.client.shown import shown
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError


class TransactionState(Enum):
    UNINITIALIZED = "not initialized"
    """The coordinator has not granted a producer id and epoch yet."""
    READY = "ready"
    """No transaction is open. The identity is that of the next one."""
    IN_TRANSACTION = "in a transaction"
    COMMITTING = "committing"
    """The block has ended: its records are flushed, then the coordinator is asked to commit."""
    PREPARED = "prepared"
    """All records are replicated. Another process ends the transaction, and this producer does nothing more."""
    COMMIT_UNKNOWN = "waiting to learn the outcome of a commit"
    """The coordinator did not answer in time. It may have committed or not."""
    ABORTABLE_ERROR = "failed, to be aborted"
    """A part of the transaction has failed. Nothing more is added to it."""
    ABORTING = "aborting"
    FATAL_ERROR = "fenced"
    """The producer cannot go on."""

    @property
    def is_ending(self) -> bool:
        """The end of a transaction is not confirmed yet."""
        return self in (S.COMMITTING, S.COMMIT_UNKNOWN, S.ABORTING)


S = TransactionState
MOVES: dict[TransactionState, frozenset[TransactionState]] = {
    S.UNINITIALIZED: frozenset({S.READY}),
    S.READY: frozenset({S.IN_TRANSACTION}),
    S.IN_TRANSACTION: frozenset({S.COMMITTING, S.ABORTING, S.ABORTABLE_ERROR, S.FATAL_ERROR}),
    S.COMMITTING: frozenset({S.READY, S.PREPARED, S.COMMIT_UNKNOWN, S.ABORTABLE_ERROR, S.ABORTING, S.FATAL_ERROR}),
    S.PREPARED: frozenset(),
    S.COMMIT_UNKNOWN: frozenset({S.COMMITTING}),
    S.ABORTABLE_ERROR: frozenset({S.ABORTING}),
    S.ABORTING: frozenset({S.READY, S.FATAL_ERROR}),
    S.FATAL_ERROR: frozenset(),
}
"""The states that may follow each state."""


class Outcome(Enum):
    """The outcome of a transaction, as far as the producer knows."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """The coordinator was asked to commit, and has not answered."""


class Result:
    """The result of one transaction. It outlives the state, which is about the next transaction then."""

    def __init__(self, transactional_id: str) -> None:
        self._transactional_id = transactional_id
        self.outcome = Outcome.OPEN

    def note(self) -> str | None:
        """Return a note for the exception that interrupts the end of the block; None: nothing is committed."""
        if self.outcome in (Outcome.OPEN, Outcome.ABORTED):
            return None
        is_it = "is" if self.outcome is Outcome.COMMITTED else "may be"
        return (
            f"leaving a transaction of {shown(self._transactional_id)} was interrupted while its commit was under way: "
            f"it {is_it} committed. Call was_committed() of the transaction before you repeat its work"
        )


class Reaction(Enum):
    """The consequence of an error for the transaction."""

    ABORT = "the transaction is aborted, and may be repeated"
    RECOVER = "as ABORT, but only the coordinator knows whether the producer may go on (KIP-588)"
    FATAL = "the producer cannot go on"


E = ErrorCode
REACTIONS: dict[ErrorCode, Reaction] = {
    E.INVALID_PRODUCER_EPOCH: Reaction.RECOVER,
    E.PRODUCER_FENCED: Reaction.RECOVER,
    E.INVALID_PRODUCER_ID_MAPPING: Reaction.RECOVER,
    E.UNKNOWN_PRODUCER_ID: Reaction.RECOVER,
    E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Reaction.FATAL,
}
"""Reactions to errors of batches, offsets and EndTxn; ABORT for all other errors."""


NOT_OF_THE_TRANSACTION = (TransactionError, WrongEventLoop)
"""The rule for calls within a block: a transaction that lacks a record or an offset is never committed. So every error
of `send`, `send_batch` and `send_offsets` makes it abort-only, whether it is handled or not. It may be raised by the
call, also for an illegal argument, or be the failure of a record later. Only these errors do not count: the call
belonged to no open transaction, or came from another event loop, so it did nothing."""

OF_THE_PROGRAM = (TransactionError, InvalidSetting, SerializationFailed, DeserializationFailed, RuntimeError)
"""Errors of minibroker that leave a block as they are: repeating the transaction does not help. (Closed, ClientCrashed
and WrongEventLoop are RuntimeErrors.)"""


def is_repeatable(error: BaseException) -> TypeGuard[MinibrokerError]:
    """Return whether a block that is left by this error raises TransactionAborted from it: a call of minibroker has
    failed, such as `consumer.group_metadata()`, and the transaction may be repeated."""
    return isinstance(error, MinibrokerError) and not isinstance(error, OF_THE_PROGRAM)


def reaction(error: Exception) -> Reaction:
    return REACTIONS.get(error.code, Reaction.ABORT) if isinstance(error, BrokerError) else Reaction.ABORT


def may_have_timed_out(error: Exception) -> bool:
    """Whether this is the error of a transaction that the coordinator has aborted."""
    is_told = isinstance(error, BrokerError) and error.code is E.TRANSACTION_ABORTABLE
    return is_told or reaction(error) is Reaction.RECOVER


class Step(Enum):
    """The next request that ends a transaction."""

    COMMIT = "EndTxn that commits"
    ABORT = "EndTxn that aborts"
    RECOVER = "InitProducerId with the present producer id and epoch"


class TransactionStates:
    """The state of one producer's transactions. Methods are named for events."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.state = S.UNINITIALIZED
        self.identity: Identity | None = None
        self.cause: Exception | None = None
        """Why the present transaction must be aborted; None: its user ends it."""
        self.cause_at = ""
        """The record or offset that has failed with `cause`."""
        self.fatal: ProducerFenced | None = None
        self.result = Result(transactional_id)
        """The result of the latest transaction."""
        self._must_recover = False
        self._may_be_committed = False
        """An earlier request to commit may have been carried out."""

    def move(self, state: TransactionState) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state

    def initialized(self, identity: Identity) -> None:
        self.move(S.READY)
        self.identity = identity

    def begins(self) -> None:
        self.move(S.IN_TRANSACTION)
        self.cause, self.cause_at = None, ""
        self._must_recover = self._may_be_committed = False
        self.result = Result(self.transactional_id)

    def failed(self, error: Exception, where: str) -> bool:
        """A record or an offset of the transaction has failed. Return whether it counts: only the first failure does,
        only before the coordinator is asked to commit, and not if it is NOT_OF_THE_TRANSACTION."""
        is_open = self.state in (S.IN_TRANSACTION, S.COMMITTING) and self.result.outcome is Outcome.OPEN
        if not is_open or isinstance(error, NOT_OF_THE_TRANSACTION):
            return False
        self.cause, self.cause_at = error, where
        what = reaction(error)
        if what is Reaction.FATAL:
            assert isinstance(error, BrokerError)
            self.fenced(error.code)
        else:
            self._must_recover = what is Reaction.RECOVER
            self.move(S.ABORTABLE_ERROR)
        return True

    def commits(self) -> None:
        """The block has ended. Its records are flushed next."""
        self.move(S.COMMITTING)

    def prepares(self) -> Identity:
        """The records are flushed, and another process ends the transaction under the identity that is returned."""
        self.move(S.PREPARED)
        assert self.identity is not None
        return self.identity

    def aborts(self, why: str = "", cause: Exception | None = None) -> None:
        """`why` and `cause` are for a transaction that has not failed."""
        if self.cause is None:
            self.cause, self.cause_at = cause, why
        self.result.outcome = Outcome.ABORTED
        self.move(S.ABORTING)

    @property
    def has_to_end(self) -> bool:
        """There is a request to send to end the transaction."""
        return self.state.is_ending or self.state is S.ABORTABLE_ERROR

    def next_step(self) -> Step:
        """Return the request to send next, if the transaction `has_to_end`."""
        if self.state is S.ABORTABLE_ERROR:  # the commit was refused
            self.aborts()
        if self.state is S.COMMIT_UNKNOWN:
            self.move(S.COMMITTING)
        if self.state is S.COMMITTING:
            self.result.outcome = Outcome.UNKNOWN
            return Step.COMMIT
        return Step.RECOVER if self._must_recover else Step.ABORT

    def answered(self, step: Step, code: ErrorCode, granted: Identity, in_doubt: bool) -> None:
        """The coordinator has answered the request. `in_doubt`: an earlier attempt may have been carried out."""
        if code is E.NONE:
            self.ended(Outcome.COMMITTED if step is Step.COMMIT else Outcome.ABORTED, granted)
            return
        is_told = code is E.TRANSACTION_ABORTABLE
        ending = f"ending the transaction of {shown(self.transactional_id)}"
        what = "its coordinator has aborted it" if is_told else ending
        error = BrokerError(code, what, is_complete=is_told)
        consequence = reaction(error)
        match step:
            case Step.COMMIT:
                self._may_be_committed = self._may_be_committed or in_doubt
                if consequence is Reaction.FATAL or (consequence is Reaction.RECOVER and self._may_be_committed):
                    self.fenced(code)
                else:
                    self.cause, self.cause_at = error, "its commit"
                    self._must_recover = consequence is Reaction.RECOVER or code is E.INVALID_TXN_STATE
                    self.move(S.ABORTABLE_ERROR)
            case Step.ABORT if consequence is not Reaction.FATAL:
                self._must_recover = True
            case _:
                self.fenced(code)

    def unanswered(self) -> None:
        """There was no answer in time. The same request is sent again later."""
        if self.state is S.COMMITTING:
            self._may_be_committed = True
            self.move(S.COMMIT_UNKNOWN)

    def ended(self, outcome: Outcome, granted: Identity | None) -> None:
        """The transaction has ended. `granted` is None if nothing was written, so that nothing changes."""
        self.move(S.READY)
        self.result.outcome = outcome
        self.identity = granted or self.identity

    def fenced(self, code: ErrorCode) -> None:
        self.result.outcome = Outcome.UNKNOWN if self._may_be_committed else Outcome.ABORTED
        self.fatal = ProducerFenced(self.transactional_id, code, is_commit_unknown=self._may_be_committed)
        self.move(S.FATAL_ERROR)

"""One transactional id and the rules for each request that concerns it (Kafka's TransactionMetadata). Pure.

A rule takes the transaction as the log has it and returns the one to write next, the same one if there is nothing to
write, or the error for the client. The coordinator writes it and answers once it is replicated.

The problem. A request of a transaction may arrive when that transaction has ended and the producer's next one is under
way (KAFKA-17754): an EndTxn would commit half of it, a batch would be counted in the wrong one. Sequence numbers and
time do not help, since a connection may hold a request back for as long as it lives.

The choice. Every end raises the producer's epoch, and the markers carry the raised one (KIP-890). Whatever was sent
before has a lower epoch than the coordinator and each partition of the transaction know, and is refused. `successor_of`
is the epoch whose owner may take over the raised one: a producer that lost the answer asks again with its old epoch and
gets the same answer, until the next transaction begins. It is NO_EPOCH after another producer has taken the id.

Kafka's clients before version 5 of EndTxn keep their epoch. For them, a transaction ends without raising it, and a
request that arrives one transaction late cannot be told from a timely one.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from minibroker.broker.transactions.states import (
    ABORTED,
    COMMITTED,
    ENDING,
    VALID_PREVIOUS_STATES,
    TransactionState,
    check_transition,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition

NO_EPOCH = -1
NO_PRODUCER_ID = -1
NO_TIME = -1

LAST_EPOCH = 32_767
"""Only markers carry it. A producer that would get it gets a new producer id with epoch 0."""

_S = TransactionState
_E = ErrorCode


class ProducerIdAndEpoch(NamedTuple):
    producer_id: int
    epoch: int


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transactional id, its producer, and the latest transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    updated_ms: int
    """The wall time of the last change, for people."""
    started_ms: int = NO_TIME
    """The wall time at which the transaction began."""
    partitions: frozenset[TopicPartition] = frozenset()
    successor_of: int = NO_EPOCH
    """The epoch whose owner owns the present one; NO_EPOCH: nobody does but who was told the present one."""
    previous_producer_id: int = NO_PRODUCER_ID
    """The producer id before this one, if this one was granted because the epochs of that one were used up."""
    next_producer_id: int = NO_PRODUCER_ID
    """The producer id to go on with after the markers, for the same reason."""
    raises_epoch: bool = True
    """Whether the producer takes over the epoch that the end of its transaction raises."""

    @property
    def granted(self) -> ProducerIdAndEpoch:
        """What the producer goes on with."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return ProducerIdAndEpoch(self.next_producer_id, 0)
        return ProducerIdAndEpoch(self.producer_id, self.producer_epoch)

    @property
    def is_ending(self) -> bool:
        return self.state in ENDING

    @property
    def is_used_up(self) -> bool:
        """Whether a raised epoch would be the last one, so that a fresh producer id is needed."""
        return self.producer_epoch + 1 >= LAST_EPOCH

    def owned_before_by(self, producer: ProducerIdAndEpoch) -> bool:
        """Whether this is the producer that owns what is granted now, under its epoch before the last raise."""
        ids = (self.producer_id, self.previous_producer_id)
        return self.successor_of != NO_EPOCH and producer.producer_id in ids and producer.epoch == self.successor_of

    def _to(self, state: TransactionState, now_ms: int, **changes: object) -> "Transaction":
        check_transition(self.transactional_id, self.state, state)
        return msgspec.structs.replace(self, state=state, updated_ms=now_ms, **changes)


Decision = ErrorCode | Transaction
"""An error, or the transaction to write. The transaction that was given: there is nothing to write."""


def initialize(
    known: Transaction | None,
    transactional_id: str,
    timeout_ms: int,
    expected: ProducerIdAndEpoch | None,
    fresh_id: int | None,
    now_ms: int,
) -> Decision:
    """InitProducerId. `expected`: what the producer owns if it goes on with its id (KIP-360); None: a new instance,
    which fences all earlier ones. `fresh_id` is needed if `needs_fresh_id`.

    A transaction that is still open is aborted: the answer is a transaction in PrepareAbort, after whose end the
    request is decided again. CONCURRENT_TRANSACTIONS: one is ending. PRODUCER_FENCED: another producer has the id."""
    if known is None:
        assert fresh_id is not None
        return Transaction(
            transactional_id=transactional_id,
            producer_id=fresh_id,
            producer_epoch=0,
            timeout_ms=timeout_ms,
            state=_S.EMPTY,
            updated_ms=now_ms,
        )
    present = ProducerIdAndEpoch(known.producer_id, known.producer_epoch)
    if known.is_ending:
        return _E.CONCURRENT_TRANSACTIONS
    if expected is not None and expected != present:
        if known.state is not _S.ONGOING and known.owned_before_by(expected):
            return known  # asked again, or its transaction was aborted by the coordinator
        return _E.PRODUCER_FENCED
    owner = NO_EPOCH if expected is None else expected.epoch
    if known.state is _S.ONGOING:
        return _end(known, _S.PREPARE_ABORT, owner, fresh_id, now_ms)
    changes: dict[str, object] = {"timeout_ms": timeout_ms, "successor_of": owner, "started_ms": NO_TIME}
    if known.is_used_up:
        assert fresh_id is not None
        changes |= {"producer_id": fresh_id, "producer_epoch": 0, "previous_producer_id": known.producer_id}
    else:
        # `successor_of` is an epoch of the present id from now on, so a zombie of the one before owns nothing.
        changes |= {"producer_epoch": known.producer_epoch + 1, "previous_producer_id": NO_PRODUCER_ID}
    return known._to(_S.EMPTY, now_ms, **changes)


def needs_fresh_id(known: Transaction | None) -> bool:
    """Whether the next decision may need a producer id that was never used."""
    return known is None or known.is_used_up


def _refusal(known: Transaction | None, producer: ProducerIdAndEpoch) -> ErrorCode:
    """Why this producer may not do anything with the transactional id; NONE if it may."""
    if known is not None and producer == known.granted:
        return _E.NONE
    if known is None or known.producer_id != producer.producer_id:
        return _E.INVALID_PRODUCER_ID_MAPPING
    return _E.PRODUCER_FENCED


def add_partitions(
    known: Transaction | None, producer: ProducerIdAndEpoch, partitions: Iterable[TopicPartition], now_ms: int
) -> Decision:
    """AddPartitionsToTxn and AddOffsetsToTxn: the partitions join the transaction, which begins with the first ones.

    INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED: another producer has the id, or the transaction has ended.
    CONCURRENT_TRANSACTIONS: the previous one is ending."""
    refused = _refusal(known, producer)
    if refused is not _E.NONE:
        return refused
    assert known is not None
    if known.is_ending:
        return _E.CONCURRENT_TRANSACTIONS
    if known.state is _S.ONGOING:
        if known.partitions.issuperset(partitions):
            return known
        return known._to(_S.ONGOING, now_ms, partitions=known.partitions.union(partitions))
    return known._to(
        _S.ONGOING,
        now_ms,
        partitions=frozenset(partitions),
        started_ms=now_ms,
        successor_of=NO_EPOCH,
        previous_producer_id=NO_PRODUCER_ID,
    )


def verify(
    known: Transaction | None, producer: ProducerIdAndEpoch, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, ErrorCode]:
    """Whether each partition belongs to the ongoing transaction of this producer (KIP-890). INVALID_TXN_STATE: it does
    not, so nothing may be appended to it, as nothing would ever end it."""
    code = _refusal(known, producer)
    if code is not _E.NONE:
        return dict.fromkeys(partitions, code)
    assert known is not None
    if known.is_ending:
        return dict.fromkeys(partitions, _E.CONCURRENT_TRANSACTIONS)
    joined = known.partitions if known.state is _S.ONGOING else frozenset()
    return {partition: _E.NONE if partition in joined else _E.INVALID_TXN_STATE for partition in partitions}


def end(
    known: Transaction | None,
    producer: ProducerIdAndEpoch,
    *,
    committed: bool,
    raises_epoch: bool,
    fresh_id: int | None,
    now_ms: int,
) -> Decision:
    """EndTxn. The answer is a transaction whose outcome is the wanted one; its `granted` is for the producer.

    INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED: another producer has the id. INVALID_TXN_STATE: there is nothing to
    commit, or the outcome is decided and another one. TRANSACTION_ABORTABLE: the coordinator has aborted the
    transaction, for instance because it took too long, and the producer may go on after an abort."""
    if raises_epoch and known is not None and known.owned_before_by(producer) and known.state is not _S.ONGOING:
        return _repeated_end(known, committed)
    refused = _refusal(known, producer)
    if refused is not _E.NONE:
        return refused
    assert known is not None
    target = _S.PREPARE_COMMIT if committed else _S.PREPARE_ABORT
    if known.state is _S.ONGOING:
        if raises_epoch:
            return _end(known, target, producer.epoch, fresh_id, now_ms)
        return known._to(target, now_ms, raises_epoch=False)
    if raises_epoch:
        if committed:
            return _E.INVALID_TXN_STATE
        if known.is_ending:
            return _E.CONCURRENT_TRANSACTIONS
        return _end(known, target, producer.epoch, fresh_id, now_ms)
    if known.state not in (COMMITTED if committed else ABORTED):
        return _E.INVALID_TXN_STATE
    return _E.CONCURRENT_TRANSACTIONS if known.is_ending else known


def _repeated_end(known: Transaction, committed: bool) -> Decision:
    if known.state in (COMMITTED if committed else ABORTED):
        return known
    if committed and known.state in ABORTED:
        return _E.TRANSACTION_ABORTABLE
    return _E.INVALID_TXN_STATE


def time_out(known: Transaction, fresh_id: int | None, now_ms: int) -> Transaction:
    """Abort a transaction that is open for longer than its producer allowed. The producer may go on after that
    (KIP-588)."""
    return _end(known, _S.PREPARE_ABORT, known.producer_epoch, fresh_id, now_ms)


def _end(
    known: Transaction, target: TransactionState, successor_of: int, fresh_id: int | None, now_ms: int
) -> Transaction:
    """Decide the outcome and raise the epoch. `successor_of`: the epoch whose owner goes on."""
    next_producer_id = NO_PRODUCER_ID
    if known.is_used_up:
        assert fresh_id is not None
        next_producer_id = fresh_id
    return known._to(
        target,
        now_ms,
        producer_epoch=known.producer_epoch + 1,
        successor_of=successor_of,
        next_producer_id=next_producer_id,
        previous_producer_id=NO_PRODUCER_ID,
        raises_epoch=True,
    )


def complete(known: Transaction, now_ms: int) -> Transaction:
    """All markers are written."""
    changes: dict[str, object] = {"partitions": frozenset()}
    if known.next_producer_id != NO_PRODUCER_ID:
        changes |= {
            "producer_id": known.next_producer_id,
            "producer_epoch": 0,
            "previous_producer_id": known.producer_id,
            "next_producer_id": NO_PRODUCER_ID,
        }
    target = _S.COMPLETE_COMMIT if known.state is _S.PREPARE_COMMIT else _S.COMPLETE_ABORT
    return known._to(target, now_ms, **changes)


def may_be_forgotten(known: Transaction) -> bool:
    """Whether nothing is under way, so that an unused id may be removed."""
    return known.state in VALID_PREVIOUS_STATES[_S.DEAD]


def forget(known: Transaction, now_ms: int) -> Transaction:
    """Remove the id. A producer that still has it is told that it has no producer id."""
    return known._to(_S.DEAD, now_ms)

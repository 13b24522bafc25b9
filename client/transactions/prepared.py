"""Transactions that another process ends than the one that wrote them.

A producer that has prepared its transaction leaves it open with all records replicated. Its identity is enough to end
it. Each end raises the epoch, so a repeated request is answered as before until the next transaction of the id begins,
and never ends that one. The coordinator aborts a prepared transaction that is open for too long, like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_TRANSACTIONS, END_TXN, INIT_PRODUCER_ID
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, error_of
from minibroker.protocol.messages import transactions as t

EMPTY = "Empty"
ONGOING = "Ongoing"
_ENDING = ("PrepareCommit", "PrepareAbort")
FENCING_TIMEOUT_MS = 60_000
"""InitProducerId wants a time-out, although this producer begins no transaction."""


class PreparedTransaction(NamedTuple):
    transactional_id: str
    producer_id: int
    producer_epoch: int


async def prepare(transaction: Transaction) -> PreparedTransaction | None:
    """Wait for all records, and leave the transaction open. The last call in its block. None: nothing was sent. Raises
    as leaving the block."""
    transactions = transaction._transactions
    identity = await transactions.prepare()
    return None if identity is None else PreparedTransaction(transactions.transactional_id, *identity)


async def is_open(coordinators: Coordinators, prepared: PreparedTransaction, timeout_s: float) -> bool:
    """Return whether the transaction can still be committed. Raises BrokerError, NetworkError, InvalidMessage."""
    found = await _describe(coordinators, prepared.transactional_id, lambda found: found.error_code, timeout_s)
    return found.transaction_state == ONGOING and prepared[1:] == (found.producer_id, found.producer_epoch)


async def end_prepared(
    coordinators: Coordinators, prepared: PreparedTransaction, *, committed: bool, timeout_s: float
) -> ErrorCode:
    """Commit or abort, and return the coordinator's answer once it is final.

    NONE: the transaction has ended so, by this request or by an earlier one. TRANSACTION_ABORTABLE: the coordinator had
    aborted it, because it took too long. PRODUCER_FENCED, INVALID_PRODUCER_ID_MAPPING and others: another producer has
    taken the id since. Raises the last error if there is no answer in time: BrokerError, NetworkError, InvalidMessage.
    """
    answered = await coordinators.request(
        prepared.transactional_id,
        END_TXN,
        t.EndTxnRequest(*prepared, committed),
        code_of=lambda response: response.error_code,
        timeout_s=timeout_s,
    )
    return error_of(answered.response.error_code)


async def is_known(coordinators: Coordinators, transactional_id: str, timeout_s: float) -> bool:
    """Return whether a producer has taken the id. Raises BrokerError, NetworkError, InvalidMessage."""
    found = await _describe(coordinators, transactional_id, lambda found: found.error_code, timeout_s)
    return error_of(found.error_code) is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


async def wait_for_markers(coordinators: Coordinators, transactional_id: str, timeout_s: float) -> None:
    """Wait until every partition has the outcome of a transaction that has ended, so that `read_committed` readers see
    it. Raises BrokerError (CONCURRENT_TRANSACTIONS: a partition does not have it yet), NetworkError, InvalidMessage."""

    def code_of(found: t.DescribedTransaction) -> int:
        return ErrorCode.CONCURRENT_TRANSACTIONS if found.transaction_state in _ENDING else found.error_code

    await _describe(coordinators, transactional_id, code_of, timeout_s)


async def fence(coordinators: Coordinators, transactional_id: str, timeout_s: float) -> None:
    """Fence the producer that has the id, and abort its transaction if one is open. Raises BrokerError, NetworkError,
    InvalidMessage."""
    answered = await coordinators.request(
        transactional_id,
        INIT_PRODUCER_ID,
        m.InitProducerIdRequest(transactional_id, FENCING_TIMEOUT_MS, t.NO_PRODUCER_ID, t.NO_PRODUCER_EPOCH),
        code_of=lambda response: response.error_code,
        timeout_s=timeout_s,
    )
    code = error_of(answered.response.error_code)
    if code is not ErrorCode.NONE:
        raise BrokerError(code, f"fencing the producer of {transactional_id!r}")


async def _describe(
    coordinators: Coordinators,
    transactional_id: str,
    code_of: Callable[[t.DescribedTransaction], int],
    timeout_s: float,
) -> t.DescribedTransaction:
    answered = await coordinators.request(
        transactional_id,
        DESCRIBE_TRANSACTIONS,
        t.DescribeTransactionsRequest([transactional_id]),
        code_of=lambda response: code_of(_described(response, transactional_id)),
        timeout_s=timeout_s,
    )
    return _described(answered.response, transactional_id)


def _described(response: t.DescribeTransactionsResponse, transactional_id: str) -> t.DescribedTransaction:
    for found in response.transaction_states:
        if found.transactional_id == transactional_id:
            return found
    raise InvalidMessage(f"an answer to {DESCRIBE_TRANSACTIONS.name} does not mention {transactional_id}")

"""Whether a Processor repeats a batch after an error. Pure."""

from __future__ import annotations

from minibroker.client.errors import (
    ApiTimedOut,
    BufferFull,
    CommitFailed,
    CommitOutcomeUnknown,
    DeliveryTimedOut,
    MaxPollIntervalExceeded,
    TransactionAborted,
)
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, NetworkError

E = ErrorCode
PASSING = (
    ApiTimedOut,
    BufferFull,
    CommitOutcomeUnknown,
    DeliveryTimedOut,
    InvalidMessage,
    MaxPollIntervalExceeded,
    NetworkError,
)
"""Errors of brokers that are away, or of a member that was too slow."""
REPEATED = frozenset(
    {
        # The member has lost its partitions, or a rebalance has raised the generation.
        E.ILLEGAL_GENERATION,
        E.UNKNOWN_MEMBER_ID,
        E.REBALANCE_IN_PROGRESS,
        # The transaction has failed or was aborted by its coordinator. If a twin has caused that, the producer learns
        # of it when it ends the transaction, and raises ProducerFenced.
        E.INVALID_PRODUCER_EPOCH,
        E.INVALID_PRODUCER_ID_MAPPING,
        E.INVALID_TXN_STATE,
        E.OUT_OF_ORDER_SEQUENCE_NUMBER,
        E.PRODUCER_FENCED,
        E.TRANSACTION_ABORTABLE,
        E.UNKNOWN_PRODUCER_ID,
    }
)
"""Errors that are not retriable for a request, but pass if the whole batch is repeated."""
RAISED = frozenset({E.UNKNOWN_TOPIC_OR_PARTITION})
"""Retriable errors that clients raise only after they have lasted."""


def is_repeated(error: Exception) -> bool:
    """Return whether the batch is repeated. Otherwise `run` raises the error: repeating would not help."""
    match error:
        case TransactionAborted(reason=reason):
            return reason is None or is_repeated(reason)
        case CommitFailed(errors=errors):
            return all(is_repeated(each) for each in errors.values())
        case BrokerError(code=code):
            return code not in RAISED and (code in REPEATED or ERRORS[code].retriable)
        case _:
            return isinstance(error, PASSING)

"""Errors of transactions say the truth about their cause, and whether it helps to repeat the transaction."""

from __future__ import annotations

import pickle

import pytest

from minibroker.client.errors import (
    ApiTimedOut,
    CommitFailed,
    DeliveryFailed,
    FailedRecord,
    Interrupted,
    ProducerFenced,
    SerializationFailed,
    TopicErrors,
    TransactionAborted,
    may_pass,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition

E = ErrorCode
P0 = TopicPartition("orders", 0)
PASSING = [
    BrokerError(E.NOT_ENOUGH_REPLICAS),
    BrokerError(E.ILLEGAL_GENERATION),
    BrokerError(E.TRANSACTION_ABORTABLE),
    NetworkError("no broker"),
    ApiTimedOut("too late"),
    Interrupted("by CancelledError"),
]
LASTING = [
    BrokerError(E.MESSAGE_TOO_LARGE),
    BrokerError(E.UNKNOWN_TOPIC_OR_PARTITION),
    BrokerError(E.INVALID_TOPIC_EXCEPTION),
    BrokerError(E.TOPIC_AUTHORIZATION_FAILED),
    BrokerError(E.GROUP_AUTHORIZATION_FAILED),
    BrokerError(E.INVALID_TIMESTAMP),
    SerializationFailed("orders", "value", str, "no"),
    TypeError("value must be bytes"),
]


def held_by(error: MinibrokerError) -> list[MinibrokerError]:
    """Return errors that report this one."""
    failed = FailedRecord("orders", 0, None, None, 0, (), error)
    return [
        TransactionAborted("t", "a record has failed", error),
        CommitFailed("billing", {P0: error}),
        TopicErrors({"orders": error}),
        DeliveryFailed([failed]),
    ]


@pytest.mark.parametrize("reason", [None, *PASSING], ids=repr)
def test_a_transaction_may_be_repeated_after_an_error_that_passes(reason: Exception | None) -> None:
    text = str(TransactionAborted("t", "a record has failed", reason))
    assert text.endswith("read_committed consumers, so it may be repeated")
    if isinstance(reason, MinibrokerError):
        assert all(may_pass(each) for each in held_by(reason))


@pytest.mark.parametrize("reason", LASTING, ids=repr)
def test_an_error_that_lasts_is_to_be_corrected_first(reason: Exception) -> None:
    aborted = TransactionAborted("t", "a record has failed", reason)
    assert str(aborted).endswith("but it would fail again: correct this before you repeat it")
    assert str(pickle.loads(pickle.dumps(aborted))) == str(aborted)
    if isinstance(reason, MinibrokerError):
        assert not any(may_pass(each) for each in held_by(reason))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (E.PRODUCER_FENCED, "another producer has started with the id since, or an operator has aborted"),
        (E.INVALID_PRODUCER_ID_MAPPING, r"forgotten the id, .* transactional\.id\.expiration\.ms, or another producer"),
        (E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "may not use the id.*Ask for the right to WRITE"),
    ],
)
def test_a_fenced_producer_names_each_possible_cause(code: ErrorCode, told: str) -> None:
    with pytest.raises(ProducerFenced, match=told):
        raise ProducerFenced("t", code)


@pytest.mark.parametrize("code", [E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED, E.INVALID_PRODUCER_ID_MAPPING])
def test_no_error_of_a_broker_blames_another_producer_alone(code: ErrorCode) -> None:
    assert " or " in str(BrokerError(code, "a record of orders-0"))

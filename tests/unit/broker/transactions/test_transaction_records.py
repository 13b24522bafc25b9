"""The records of `__transaction_state`."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.coordinating.record_fields import MalformedRecord
from minibroker.broker.transactions.records import (
    UnknownKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import Transaction
from minibroker.protocol.model import TopicPartition

EPOCHS = st.integers(-1, 32_767)
LONGS = st.integers(-1, 2**63 - 1)
PARTITIONS = st.builds(TopicPartition, st.text("ab.", min_size=1, max_size=4), st.integers(0, 2**31 - 1))


@given(
    st.builds(
        Transaction,
        transactional_id=st.just("t"),
        producer_id=LONGS,
        producer_epoch=EPOCHS,
        timeout_ms=st.integers(1, 2**31 - 1),
        state=st.sampled_from(TransactionState),
        updated_ms=LONGS,
        started_ms=LONGS,
        partitions=st.frozensets(PARTITIONS, max_size=5),
        successor_of=EPOCHS,
        previous_producer_id=LONGS,
        next_producer_id=LONGS,
        raises_epoch=st.booleans(),
    )
)
def test_values_survive(transaction: Transaction) -> None:
    assert decode_value("t", encode_value(transaction)) == transaction


def test_version_0_of_kafka() -> None:
    data = struct.pack(">hqhib", 0, 5, 3, 60_000, 1)
    data += struct.pack(">i", 1) + struct.pack(">h6s", 6, b"orders") + struct.pack(">iii", 2, 4, 1)
    data += struct.pack(">qq", 1_000, 900)
    assert decode_value("t", data) == Transaction(
        transactional_id="t",
        producer_id=5,
        producer_epoch=3,
        timeout_ms=60_000,
        state=TransactionState.ONGOING,
        updated_ms=1_000,
        started_ms=900,
        partitions=frozenset([TopicPartition("orders", 4), TopicPartition("orders", 1)]),
        raises_epoch=False,
    )


def test_version_1_of_kafka() -> None:
    """Null partitions, and the tagged fields of KIP-890."""
    data = struct.pack(">hqhib", 1, 5, 3, 60_000, 4) + b"\x00" + struct.pack(">qq", 1_000, -1)
    data += b"\x03" + b"\x00\x08" + struct.pack(">q", 4) + b"\x01\x08" + struct.pack(">q", 6)
    data += b"\x02\x02" + struct.pack(">h", 2)
    decoded = decode_value("t", data)
    assert encode_value(decoded) == data
    assert (decoded.state, decoded.previous_producer_id, decoded.next_producer_id) == (
        TransactionState.COMPLETE_COMMIT,
        4,
        6,
    )
    assert decoded.raises_epoch
    assert not decoded.partitions


def test_keys() -> None:
    assert encode_key("order-1") == b"\x00\x00\x00\x07order-1"
    assert decode_key(encode_key("order-1")) == "order-1"
    assert decode_key(b"\x00\x05") == UnknownKey(5)


@pytest.mark.parametrize("data", [b"", b"\x00\x09", b"\x00\x01\x00", struct.pack(">hqhib", 1, 5, 3, 1, 9) + bytes(20)])
def test_malformed_values_are_reported(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode_value("t", data)

"""How the admin client interprets the responses to a reassignment."""

from __future__ import annotations

import pytest

from minibroker.client.administering.reassignment import Alteration, may_have_begun
from minibroker.client.errors import PartitionErrors, TopicErrors
from minibroker.protocol import messages as m
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition

P = TopicPartition("orders", 0)


def answered(alteration: Alteration, code: ErrorCode, version: int = m.NO_VERSION) -> ErrorCode:
    one = m.ReassignablePartitionResponse(0, code)
    topics = [m.ReassignableTopicResponse("orders", [one], "id", version)]
    response = m.AlterPartitionReassignmentsResponse(0, ErrorCode.NONE, "", topics)
    return ErrorCode(alteration.results(response)["orders-0"][0])


def test_it_looks_up_the_version_first_and_names_it_from_then_on() -> None:
    alteration = Alteration({P: [1]})
    [topic] = alteration.request(["orders-0"], 1_000, 1).topics
    assert (topic.topic_id, topic.known_version, alteration.is_prepared) == ("", m.NO_VERSION, False)
    assert answered(alteration, ErrorCode.INVALID_UPDATE_VERSION, 17) is ErrorCode.INVALID_UPDATE_VERSION
    [topic] = alteration.request(["orders-0"], 1_000, 1).topics
    assert (topic.topic_id, topic.known_version, alteration.is_prepared) == ("id", 17, True)


def test_nothing_to_cancel_is_no_error_if_an_earlier_attempt_may_have_cancelled() -> None:
    alteration = Alteration({P: None})
    alteration.request(["orders-0"], 1_000, 1)
    answered(alteration, ErrorCode.INVALID_UPDATE_VERSION, 17)
    alteration.request(["orders-0"], 1_000, 1)
    assert answered(alteration, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS) is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    alteration.request(["orders-0"], 1_000, 1)
    alteration.request(["orders-0"], 1_000, 1)
    assert answered(alteration, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS) is ErrorCode.NONE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NetworkError("no answer"), True),
        (BrokerError(ErrorCode.REQUEST_TIMED_OUT), True),
        (BrokerError(ErrorCode.NOT_CONTROLLER), True),
        (BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT), False),
        (BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), False),
    ],
)
def test_one_whose_outcome_is_not_known_may_have_begun(error: MinibrokerError, expected: bool) -> None:
    assert may_have_begun(error) is expected


def test_an_error_that_names_its_partition_or_topic_does_not_name_it_twice() -> None:
    refused = BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "orders-0 is to have [9]", is_complete=True)
    assert str(PartitionErrors({P: refused})) == "INVALID_REPLICA_ASSIGNMENT: orders-0 is to have [9]"
    of_topic = BrokerError(ErrorCode.INVALID_REQUEST, "it is not 'it'", is_complete=True)
    assert str(TopicErrors({"it": of_topic})) == "INVALID_REQUEST: it is not 'it'"
    assert str(TopicErrors({"is": of_topic})) == "is: INVALID_REQUEST: it is not 'it'"
    unnamed = BrokerError(ErrorCode.REQUEST_TIMED_OUT, "no answer", is_complete=True)
    assert str(TopicErrors({"a": unnamed, "b": unnamed})) == "a, b: REQUEST_TIMED_OUT: no answer"


def test_errors_of_several_partitions_are_joined_without_a_full_stop_before_the_semicolon() -> None:
    errors: dict[TopicPartition, MinibrokerError] = {
        TopicPartition("orders", number): BrokerError(code)
        for number, code in enumerate((ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.POLICY_VIOLATION))
    }
    first, second = (str(error) for error in errors.values())
    assert first.endswith(".")
    assert str(PartitionErrors(errors)) == f"orders-0: {first[:-1]}; orders-1: {second}"

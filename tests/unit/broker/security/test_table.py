"""Every API names the access that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from minibroker.broker.handlers.dispatch import HANDLERS
from minibroker.broker.security.access import Amendment, Inquiry, check
from minibroker.broker.security.decisions import Bindings
from minibroker.broker.security.table import ACCESS
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.acls import CLUSTER_NAME, AclBinding, AclOperation, AclResourceType
from minibroker.protocol.apis import APIS, Api
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.kafka.apis import KAFKA_APIS
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.principal import Principal
from minibroker.protocol.records import encode_batch
from tests.unit.broker.security.test_decisions import ALICE, HOST, acl, bindings

Op, T = AclOperation, AclResourceType
REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
IDS = {"id-of-orders": "orders", "id-of-secrets": "secrets"}

PLAIN = memoryview(encode_batch([b"value"], base_timestamp=1_000))
TRANSACTIONAL = memoryview(
    encode_batch([b"value"], base_timestamp=1_000, transactional=True, producer_id=1, producer_epoch=0, base_sequence=0)
)
OPEN = {
    apis.SASL_HANDSHAKE.key,
    apis.SASL_AUTHENTICATE.key,
    apis.API_VERSIONS.key,
    apis.BROKER_HANDSHAKE.key,
    apis.BROKER_AUTHENTICATE.key,
}
"""What a client sends before anybody can know who it is."""


class Known:
    def topic_with_id(self, topic_id: str) -> str | None:
        return IDS.get(topic_id)

    def partition_count(self, topic: str) -> int:
        return int(topic in IDS.values())


def inquiry(api: Api[Any, Any], *acls: AclBinding, **more: Any) -> Inquiry:
    return Inquiry(bindings(*acls), Principal("User", "alice"), HOST, api, Known(), **more)


def outcome(api: Api[Any, Any], body: Any, *acls: AclBinding, **more: Any) -> Any:
    return check(ACCESS[api.key], inquiry(api, *acls, **more), body)


def answered(api: Api[Any, Any], body: Any, answer: Any, *acls: AclBinding, **more: Any) -> Any:
    """Return the answer as the client sees it, if the handler answers so to what is left of the request."""
    found = outcome(api, body, *acls, **more)
    if isinstance(found, Amendment):
        found.finish(answer)
        return answer
    return answer if found is None else found


def test_every_api_of_both_dialects_is_in_the_table_and_nothing_else() -> None:
    assert ACCESS.keys() == APIS.keys() == HANDLERS.keys()
    assert KAFKA_APIS.keys() <= ACCESS.keys()
    assert {key for key, steps in ACCESS.items() if not steps} == OPEN
    for key, steps in ACCESS.items():
        assert key in OPEN or any(step.needs for step in steps), APIS[key]


def produce(*topics: str, transactional_id: str | None = None) -> m.ProduceRequest:
    return m.ProduceRequest(
        transactional_id,
        -1,
        1_000,
        [
            m.ProduceTopic(name, [m.ProducePartition(0, TRANSACTIONAL if transactional_id else PLAIN)])
            for name in topics
        ],
    )


def test_topics_that_may_not_be_written_are_taken_out_and_answered_beside_the_others() -> None:
    body = produce("secrets", "orders")
    answer = answered(
        apis.PRODUCE,
        body,
        m.ProduceResponse([m.ProduceTopicResponse("orders", [m.ProducePartitionResponse(0, 0)])]),
        acl(Op.WRITE),
    )
    assert [topic.name for topic in body.topic_data] == ["orders"]
    codes = {topic.name: topic.partition_responses[0].error_code for topic in answer.responses}
    assert codes == {"orders": ErrorCode.NONE, "secrets": REFUSED}
    assert (
        "User:alice at 10.0.0.1 may not Write Topic 'secrets'"
        in answer.responses[1].partition_responses[0].error_message
    )


def test_a_request_without_anything_allowed_is_answered_at_once() -> None:
    answer = outcome(apis.PRODUCE, produce("secrets"))
    assert isinstance(answer, m.ProduceResponse)
    assert answer.responses[0].partition_responses[0].error_code == REFUSED


def test_what_was_taken_out_is_put_back_for_an_error_of_the_whole_request() -> None:
    body = produce("secrets", "orders")
    found = outcome(apis.PRODUCE, body, acl(Op.WRITE))
    assert isinstance(found, Amendment)
    found.undo()
    assert [topic.name for topic in body.topic_data] == ["secrets", "orders"]


def test_a_request_that_is_allowed_is_left_alone() -> None:
    assert outcome(apis.PRODUCE, produce("orders"), acl(Op.WRITE)) is None


def test_a_transaction_needs_its_transactional_id_first() -> None:
    with pytest.raises(BrokerError) as raised:
        outcome(apis.PRODUCE, produce("orders", transactional_id="t"), acl(Op.WRITE))
    assert raised.value.code is ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    allowed = acl(Op.WRITE, "t", kind=T.TRANSACTIONAL_ID)
    assert outcome(apis.PRODUCE, produce("orders", transactional_id="t"), acl(Op.WRITE), allowed) is None


def fetch(*topics: m.FetchTopic, replica_id: int = -1) -> m.FetchRequest:
    return m.FetchRequest(replica_id, 500, 1, 1_000, 0, list(topics))


def fetched(name: str, topic_id: str = "") -> m.FetchTopic:
    return m.FetchTopic(name, topic_id, [m.FetchPartition(0, -1, 0, -1, -1, 1_000)])


def test_topics_that_are_fetched_by_their_ids_are_checked_by_their_names() -> None:
    body = fetch(fetched("", "id-of-orders"), fetched("", "id-of-secrets"), fetched("", "unknown"))
    answer = answered(apis.FETCH, body, m.FetchResponse(0, 0, []), acl(Op.READ))
    assert [topic.topic_id for topic in body.topics] == ["id-of-orders", "unknown"]
    assert answer.error_code == ErrorCode.NONE
    assert [(topic.topic_id, topic.partitions[0].error_code) for topic in answer.responses] == [
        ("id-of-secrets", REFUSED)
    ]


def test_the_answer_to_a_fetch_of_refused_topics_has_errors_of_its_partitions_alone() -> None:
    answer = outcome(apis.FETCH, fetch(fetched("secrets")))
    assert answer.error_code == ErrorCode.NONE
    assert answer.responses[0].partitions[0].error_code == REFUSED


def test_a_replicas_fetch_needs_cluster_action() -> None:
    with pytest.raises(BrokerError):
        outcome(apis.FETCH, fetch(fetched("orders"), replica_id=1), acl(Op.ALL))
    action = acl(Op.CLUSTER_ACTION, CLUSTER_NAME, kind=T.CLUSTER)
    assert outcome(apis.FETCH, fetch(fetched("orders"), replica_id=1), action) is None


def described(*names: str) -> m.MetadataResponse:
    return m.MetadataResponse(0, [], None, -1, [m.MetadataTopic(0, name, "", False, []) for name in names])


def test_metadata_of_all_topics_leaves_out_those_that_may_not_be_described() -> None:
    answer = answered(apis.METADATA, m.MetadataRequest(None), described("orders", "secrets"), acl(Op.READ))
    assert [topic.name for topic in answer.topics] == ["orders"]


def test_metadata_of_a_hidden_topic_is_the_same_whether_or_not_it_exists() -> None:
    for name in ("secrets", "missing"):
        body = m.MetadataRequest([name, "orders"], allow_auto_topic_creation=True)
        answer = answered(apis.METADATA, body, described("orders"), acl(Op.READ), auto_creates_topics=True)
        assert body.topics == ["orders"]
        refused = answer.topics[-1]
        assert refused == m.MetadataTopic(REFUSED, name, "", False, [])


def test_metadata_of_a_hidden_topics_id_does_not_name_it() -> None:
    body = m.MetadataRequest([], topic_ids=["id-of-secrets"])
    answer = answered(apis.METADATA, body, described())
    assert body.topic_ids == []
    assert answer.topics == [m.MetadataTopic(REFUSED, "", "id-of-secrets", False, [])]


@pytest.mark.parametrize(
    "create",
    [acl(Op.CREATE, "missing"), acl(Op.CREATE, CLUSTER_NAME, kind=T.CLUSTER), None],
    ids=["topic", "cluster", ""],
)
def test_a_missing_topic_is_created_only_for_those_who_may_create_it(create: AclBinding | None) -> None:
    body = m.MetadataRequest(["missing", "orders"], allow_auto_topic_creation=True)
    acls = [acl(Op.READ), acl(Op.DESCRIBE, "missing"), *([] if create is None else [create])]
    answer = answered(apis.METADATA, body, described(), *acls, auto_creates_topics=True)
    assert body.topics == (["orders"] if create is None else ["missing", "orders"])
    assert [topic.error_code for topic in answer.topics] == ([REFUSED] if create is None else [])


def test_authorized_operations_are_shown_with_describe_alone() -> None:
    body = m.MetadataRequest(
        ["orders"], include_topic_authorized_operations=True, include_cluster_authorized_operations=True
    )
    answer = answered(apis.METADATA, body, described("orders"), acl(Op.READ))
    assert answer.topics[0].topic_authorized_operations == 1 << Op.READ | 1 << Op.DESCRIBE
    assert answer.cluster_authorized_operations == 0
    alter = acl(Op.ALTER, CLUSTER_NAME, kind=T.CLUSTER)
    request = m.DescribeClusterRequest(include_cluster_authorized_operations=True)
    shown = answered(apis.DESCRIBE_CLUSTER, request, m.DescribeClusterResponse(0, 0), alter)
    assert shown.cluster_authorized_operations == 1 << Op.ALTER | 1 << Op.DESCRIBE


def test_groups_are_listed_for_those_who_may_describe_them_or_the_cluster() -> None:
    def listed(*acls: AclBinding) -> list[str]:
        answer = g.ListGroupsResponse(0, 0, [g.ListedGroup("a", "", ""), g.ListedGroup("b", "", "")])
        found = answered(apis.LIST_GROUPS, g.ListGroupsRequest(), answer, *acls)
        return [group.group_id for group in found.groups]

    assert listed() == []
    assert listed(acl(Op.READ, "b", kind=T.GROUP)) == ["b"]
    assert listed(acl(Op.DESCRIBE, CLUSTER_NAME, kind=T.CLUSTER)) == ["a", "b"]


def test_offsets_are_shown_of_groups_and_topics_that_may_be_described() -> None:
    asked = [g.OffsetFetchTopic("orders", [0]), g.OffsetFetchTopic("secrets", [0, 1])]
    body = g.OffsetFetchRequest([g.OffsetFetchGroup("a", asked), g.OffsetFetchGroup("b", asked)])
    of_a = [g.OffsetFetchTopicResponse("orders", [g.OffsetFetchPartition(0, 7, -1, "", 0)])]
    answer = answered(
        apis.OFFSET_FETCH,
        body,
        g.OffsetFetchResponse(0, [g.OffsetFetchGroupResponse("a", of_a, 0)]),
        acl(Op.DESCRIBE, "a", kind=T.GROUP),
        acl(Op.DESCRIBE),
    )
    assert [(group.group_id, group.error_code) for group in answer.groups] == [
        ("a", 0),
        ("b", ErrorCode.GROUP_AUTHORIZATION_FAILED),
    ]
    shown = {
        (topic.name, part.partition_index): (part.committed_offset, part.error_code)
        for topic in answer.groups[0].topics
        for part in topic.partitions
    }
    assert shown == {("orders", 0): (7, 0), ("secrets", 0): (-1, REFUSED), ("secrets", 1): (-1, REFUSED)}


def test_all_offsets_of_a_group_leave_out_hidden_topics() -> None:
    found = [g.OffsetFetchTopicResponse(name, []) for name in ("orders", "secrets")]
    answer = answered(
        apis.OFFSET_FETCH,
        g.OffsetFetchRequest([g.OffsetFetchGroup("a", None)]),
        g.OffsetFetchResponse(0, [g.OffsetFetchGroupResponse("a", found, 0)]),
        acl(Op.DESCRIBE, "a", kind=T.GROUP),
        acl(Op.DESCRIBE),
    )
    assert [topic.name for topic in answer.groups[0].topics] == ["orders"]


def test_a_producer_id_needs_idempotent_write_or_write_on_any_topic() -> None:
    request = m.InitProducerIdRequest(None)
    with pytest.raises(BrokerError) as raised:
        outcome(apis.INIT_PRODUCER_ID, request, acl(Op.READ))
    assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert "broker.secret.file" not in str(raised.value)  # the remedy of a broker, not of a client
    assert outcome(apis.INIT_PRODUCER_ID, request, acl(Op.WRITE)) is None
    assert outcome(apis.INIT_PRODUCER_ID, request, acl(Op.IDEMPOTENT_WRITE, CLUSTER_NAME, kind=T.CLUSTER)) is None


def test_partitions_join_a_transaction_all_or_not_at_all() -> None:
    topics = [t.TransactionTopic("orders", [0]), t.TransactionTopic("secrets", [0])]
    body = t.AddPartitionsToTxnRequest([t.TransactionToExtend("t", 1, 0, topics)])
    writer = acl(Op.WRITE, "t", kind=T.TRANSACTIONAL_ID)
    answer = outcome(apis.ADD_PARTITIONS_TO_TXN, body, writer, acl(Op.WRITE))
    results = {
        topic.name: topic.results_by_partition[0].error_code for topic in answer.results_by_transaction[0].topic_results
    }
    assert results == {"orders": ErrorCode.OPERATION_NOT_ATTEMPTED, "secrets": REFUSED}
    with pytest.raises(BrokerError):
        outcome(apis.ADD_PARTITIONS_TO_TXN, body, writer, acl(Op.ALL, "*"), is_from_user=False)


def test_topics_are_created_by_those_who_may_create_them_or_any_and_sizes_are_hidden() -> None:
    def results(*acls: AclBinding) -> dict[str, tuple[int, int, int]]:
        body = m.CreateTopicsRequest([m.CreatableTopic("orders"), m.CreatableTopic("secrets")], 1_000)
        found = outcome(apis.CREATE_TOPICS, body, *acls)
        answer = found
        if found is None or isinstance(found, Amendment):
            made = [m.CreatableTopicResult(topic.name, "", 0, "", 3, 1) for topic in body.topics]
            answer = m.CreateTopicsResponse(0, made)
            if found is not None:
                found.finish(answer)
        return {r.name: (r.error_code, r.num_partitions, r.topic_config_error_code) for r in answer.topics}

    assert results() == {"orders": (REFUSED, -1, REFUSED), "secrets": (REFUSED, -1, REFUSED)}
    assert results(acl(Op.CREATE)) == {"orders": (0, -1, REFUSED), "secrets": (REFUSED, -1, REFUSED)}
    everywhere = acl(Op.CREATE, CLUSTER_NAME, kind=T.CLUSTER)
    shown = results(everywhere, acl(Op.DESCRIBE_CONFIGS))
    assert shown == {"orders": (0, 3, 0), "secrets": (0, -1, REFUSED)}


def test_a_topic_is_deleted_by_its_id_without_learning_its_name() -> None:
    body = m.DeleteTopicsRequest(["", "orders"], 1_000, ["id-of-secrets", ""])
    answer = answered(apis.DELETE_TOPICS, body, m.DeleteTopicsResponse(0, []), acl(Op.DELETE))
    assert (body.topics, body.topic_ids) == (["orders"], [""])
    assert [(r.name, r.topic_id, r.error_code) for r in answer.responses] == [("", "id-of-secrets", REFUSED)]
    assert "secrets" not in answer.responses[0].error_message


def test_settings_of_topics_and_brokers_need_rights_of_their_own() -> None:
    body = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "orders"), m.DescribeConfigsResource(4, "1")])
    answer = answered(apis.DESCRIBE_CONFIGS, body, m.DescribeConfigsResponse(0, []), acl(Op.ALTER_CONFIGS))
    assert [resource.resource_name for resource in body.resources] == ["orders"]
    assert [r.error_code for r in answer.results] == [ErrorCode.CLUSTER_AUTHORIZATION_FAILED]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (apis.JOIN_GROUP, g.JoinGroupRequest("a", 1, 1, "", None, "consumer", [])),
        (apis.HEARTBEAT, g.HeartbeatRequest("a", 1, "", None)),
        (apis.SYNC_GROUP, g.SyncGroupRequest("a", 1, "", None, None, None, [])),
        (apis.LEAVE_GROUP, g.LeaveGroupRequest("a", [])),
        (apis.OFFSET_COMMIT, g.OffsetCommitRequest("a", -1, "", None, [])),
    ],
    ids=lambda value: value.name if isinstance(value, Api) else "",
)
def test_a_member_needs_read_on_its_group(api: Api[Any, Any], body: Any) -> None:
    with pytest.raises(BrokerError) as raised:
        outcome(api, body, acl(Op.DESCRIBE, "a", kind=T.GROUP))
    assert raised.value.code is ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert "minibroker acls add --allow-principal User:alice --operation Read --group a" in raised.value.detail
    assert outcome(api, body, acl(Op.READ, "a", kind=T.GROUP)) is None


@pytest.mark.parametrize(
    ("key_type", "advice"), [(0, "--operation Read --group a`"), (1, "--operation Write --transactional-id a`")]
)
def test_who_may_not_find_a_coordinator_is_told_of_the_right_that_it_needs_next(key_type: int, advice: str) -> None:
    answer = outcome(apis.FIND_COORDINATOR, g.FindCoordinatorRequest(key_type, ["a"]))
    assert isinstance(answer, g.FindCoordinatorResponse)
    [coordinator] = answer.coordinators
    assert "may not Describe" in (coordinator.error_message or "")
    role = "--consumer" if key_type == 0 else "--producer"
    told = coordinator.error_message or ""
    assert f"{advice} (to look at it, Describe is enough; " in told
    assert f"on its topics, and `{role}` gives it both)" in told


def test_an_empty_snapshot_refuses_every_request_that_is_not_open_or_filtered() -> None:
    assert not Bindings().allows(ALICE, HOST, Op.DESCRIBE, T.CLUSTER, CLUSTER_NAME)
    for api in (apis.ENVELOPE, apis.LEADER_AND_ISR, apis.CREATE_ACLS, apis.ELECT_LEADERS, apis.DESCRIBE_TIMELINE):
        with pytest.raises(BrokerError) as raised:
            outcome(api, None)
        assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED

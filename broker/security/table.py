"""The access that each API needs: the one table (Kafka's KafkaApis).

`ACCESS` has a row of steps for each API. An empty row is open to everybody. docs/security.md shows the table.
"""

from typing import Any

from minibroker.broker.security.access import (
    EACH_REFUSED,
    LEFT_OUT,
    NOT_SHOWN,
    REFUSED,
    Amendment,
    Cluster,
    Each,
    Inquiry,
    Need,
    Outcome,
    Special,
    Step,
    Whole,
    without,
)
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.acls import CLUSTER_NAME, AclOperation, AclResourceType
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import INTERNAL_TOPICS
from minibroker.protocol.model import ResourceType as ConfigResource
from minibroker.protocol.records.header import is_transactional

_O = AclOperation
_TOPIC, _GROUP, _CLUSTER, _TRANSACTIONAL_ID = (
    AclResourceType.TOPIC,
    AclResourceType.GROUP,
    AclResourceType.CLUSTER,
    AclResourceType.TRANSACTIONAL_ID,
)
_TOPIC_REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


def _topic_of(inquiry: Inquiry, part: Any) -> str | None:
    """Return the topic of an element that may name it by its id alone; None: the id is unknown."""
    return part.topic or inquiry.known.topic_with_id(part.topic_id)


def _itself(inquiry: Inquiry, part: str) -> str:
    return part


# -- records --

_FETCHED = Each("topics", _O.READ, _TOPIC, _topic_of, answers="responses")


def _fetch(inquiry: Inquiry, body: m.FetchRequest) -> Outcome:
    if body.replica_id >= 0:
        inquiry.require(_O.CLUSTER_ACTION, _CLUSTER, CLUSTER_NAME, _TOPIC_REFUSED)
        return None
    return _FETCHED.apply(inquiry, body)


_EPOCHS = Each("topics", _O.DESCRIBE, _TOPIC, lambda inquiry, part: part.topic, answers="topics")


def _offset_for_leader_epoch(inquiry: Inquiry, body: m.OffsetForLeaderEpochRequest) -> Outcome:
    return None if inquiry.may(_O.CLUSTER_ACTION, _CLUSTER, CLUSTER_NAME) else _EPOCHS.apply(inquiry, body)


def _transaction_of(body: m.ProduceRequest) -> str | None:
    """Return the transactional id, if the request has a batch of a transaction."""
    if body.transactional_id is None:
        return None
    records = (part.records for topic in body.topic_data for part in topic.partition_data)
    return body.transactional_id if any(map(is_transactional, records)) else None


# -- the cluster --


def _metadata(inquiry: Inquiry, body: m.MetadataRequest) -> Outcome:
    """Leave topics without Describe out of an answer about all topics. If they are named, neither they nor their
    existence are shown."""
    is_about_all = body.topics is None
    refused: list[m.MetadataTopic] = []
    if body.topics is not None:
        named, ids = body.topics, body.topic_ids
        hidden = {name for name in named if not inquiry.may(_O.DESCRIBE, _TOPIC, name)}
        not_created: set[str] = set()
        if body.allow_auto_topic_creation and inquiry.auto_creates_topics:
            missing = {name for name in named if name not in hidden and not inquiry.known.partition_count(name)}
            if missing and not inquiry.may(_O.CREATE, _CLUSTER, CLUSTER_NAME):
                not_created = {name for name in missing if not inquiry.may(_O.CREATE, _TOPIC, name)}
        hidden_ids = {
            topic_id
            for topic_id in ids
            if (name := inquiry.known.topic_with_id(topic_id)) is not None
            and not inquiry.may(_O.DESCRIBE, _TOPIC, name)
        }
        for names, operation in ((hidden, _O.DESCRIBE), (not_created, _O.CREATE)):
            if names:
                inquiry.why_not(operation, _TOPIC, min(names), len(names) - 1)
        refused += [m.MetadataTopic(_TOPIC_REFUSED, name, "", False, []) for name in sorted(hidden | not_created)]
        refused += [m.MetadataTopic(_TOPIC_REFUSED, "", topic_id, False, []) for topic_id in sorted(hidden_ids)]
        if refused:
            body.topics = [name for name in named if name not in hidden and name not in not_created]
            body.topic_ids = [topic_id for topic_id in ids if topic_id not in hidden_ids]

    def finish(answer: m.MetadataResponse) -> None:
        if is_about_all:
            answer.topics = [topic for topic in answer.topics if inquiry.may(_O.DESCRIBE, _TOPIC, topic.name)]
        if body.include_topic_authorized_operations:
            for topic in answer.topics:
                topic.topic_authorized_operations = inquiry.operations(_TOPIC, topic.name)
        if body.include_cluster_authorized_operations:
            answer.cluster_authorized_operations = _cluster_operations(inquiry)
        answer.topics += refused

    return Amendment(finish)


def _cluster_operations(inquiry: Inquiry) -> int:
    is_shown = inquiry.may(_O.DESCRIBE, _CLUSTER, CLUSTER_NAME)
    return inquiry.operations(_CLUSTER, CLUSTER_NAME) if is_shown else 0


def _describe_cluster(inquiry: Inquiry, body: m.DescribeClusterRequest) -> Outcome:
    def finish(answer: m.DescribeClusterResponse) -> None:
        answer.cluster_authorized_operations = _cluster_operations(inquiry)

    return Amendment(finish) if body.include_cluster_authorized_operations else None


# -- groups --

_COORDINATED = {0: (_GROUP, _O.READ), 1: (_TRANSACTIONAL_ID, _O.WRITE)}
"""Clients ask for the coordinator in order to use the group or the id."""


def _find_coordinator(inquiry: Inquiry, body: g.FindCoordinatorRequest) -> Outcome:
    if body.key_type not in _COORDINATED:
        return None  # the handler rejects it
    kind, advised = _COORDINATED[body.key_type]
    each = Each("coordinator_keys", _O.DESCRIBE, kind, _itself, answers="coordinators", advised=advised)
    return each.apply(inquiry, body)


_DESCRIBED_GROUPS = Each("groups", _O.DESCRIBE, _GROUP, _itself, answers="groups")


def _described_groups(inquiry: Inquiry, body: g.DescribeGroupsRequest) -> Outcome:
    def finish(answer: g.DescribeGroupsResponse) -> None:
        for group in answer.groups:
            if group.error_code == ErrorCode.NONE:
                group.authorized_operations = inquiry.operations(_GROUP, group.group_id)

    return Amendment(finish) if body.include_authorized_operations else None


def _list_groups(inquiry: Inquiry, body: g.ListGroupsRequest) -> Outcome:
    if inquiry.may(_O.DESCRIBE, _CLUSTER, CLUSTER_NAME):
        return None

    def finish(answer: g.ListGroupsResponse) -> None:
        answer.groups = [group for group in answer.groups if inquiry.may(_O.DESCRIBE, _GROUP, group.group_id)]

    return Amendment(finish)


def _offset_fetch(inquiry: Inquiry, body: g.OffsetFetchRequest) -> Outcome:
    """Each of the groups that may be described shows its offsets of topics that may be described."""
    asked_for_all = {group.group_id for group in body.groups if group.topics is None}
    refused: dict[str, list[g.OffsetFetchTopicResponse]] = {}
    kept = [(group, group.topics) for group in body.groups]
    for group in body.groups:
        denied = [topic for topic in group.topics or () if not inquiry.may(_O.DESCRIBE, _TOPIC, topic.name)]
        if denied:
            inquiry.why_not(_O.DESCRIBE, _TOPIC, denied[0].name, len(denied) - 1)
            names = {topic.name for topic in denied}
            group.topics = [topic for topic in group.topics or () if topic.name not in names]
            refused[group.group_id] = g.refused_offset_fetch(
                g.OffsetFetchGroup(group.group_id, denied), _TOPIC_REFUSED
            ).topics
    if not refused and not asked_for_all:
        return None

    def finish(answer: g.OffsetFetchResponse) -> None:
        for group in answer.groups:
            if group.error_code == ErrorCode.NONE:
                if group.group_id in asked_for_all:
                    group.topics = [each for each in group.topics if inquiry.may(_O.DESCRIBE, _TOPIC, each.name)]
                group.topics = [*group.topics, *refused.get(group.group_id, ())]

    def undo() -> None:
        for group, topics in kept:
            group.topics = topics

    return Amendment(finish, undo)


def _offset_delete(inquiry: Inquiry, body: g.OffsetDeleteRequest) -> Outcome:
    denied = [topic for topic in body.topics if not inquiry.may(_O.READ, _TOPIC, topic.name)]
    if not denied:
        return None
    inquiry.why_not(_O.READ, _TOPIC, denied[0].name, len(denied) - 1)
    names = {topic.name for topic in denied}
    errors = [
        g.OffsetCommitTopicResponse(
            topic.name, [g.OffsetCommitPartitionResponse(index, _TOPIC_REFUSED) for index in topic.partitions]
        )
        for topic in denied
    ]
    body.topics = [topic for topic in body.topics if topic.name not in names]

    def finish(answer: g.OffsetDeleteResponse) -> None:
        if answer.error_code == ErrorCode.NONE:  # otherwise it concerns all of them
            answer.topics = [*answer.topics, *errors]

    return Amendment(finish)


# -- transactions --


def _init_producer_id(inquiry: Inquiry, body: m.InitProducerIdRequest) -> Outcome:
    """An idempotent producer needs IdempotentWrite, or Write on any topic (KIP-679)."""
    if body.transactional_id is not None:
        inquiry.require(_O.WRITE, _TRANSACTIONAL_ID, body.transactional_id)
    elif not inquiry.may_on_any(_O.WRITE, _TOPIC):
        inquiry.require(_O.IDEMPOTENT_WRITE, _CLUSTER, CLUSTER_NAME)
    return None


def _add_partitions_to_txn(inquiry: Inquiry, body: t.AddPartitionsToTxnRequest) -> Outcome:
    """Brokers need ClusterAction. A producer's partitions are added all or not at all."""
    if not inquiry.is_from_user:
        inquiry.require(_O.CLUSTER_ACTION, _CLUSTER, CLUSTER_NAME)
        return None
    for transaction in body.transactions:
        inquiry.require(_O.WRITE, _TRANSACTIONAL_ID, transaction.transactional_id)
    names = {topic.name for transaction in body.transactions for topic in transaction.topics}
    # As in Kafka, where no producer may name an internal topic.
    denied = {name for name in names if name in INTERNAL_TOPICS or not inquiry.may(_O.WRITE, _TOPIC, name)}
    if not denied:
        return None
    inquiry.why_not(_O.WRITE, _TOPIC, min(denied), len(denied) - 1)
    results = []
    for transaction in body.transactions:
        topics = [
            t.TransactionTopicResult(
                topic.name,
                [
                    t.TransactionPartitionResult(
                        index, _TOPIC_REFUSED if topic.name in denied else ErrorCode.OPERATION_NOT_ATTEMPTED
                    )
                    for index in topic.partitions
                ],
            )
            for topic in transaction.topics
        ]
        results.append(t.ExtendedTransaction(transaction.transactional_id, topics))
    return t.AddPartitionsToTxnResponse(0, ErrorCode.NONE, results)


def _described_transactions(inquiry: Inquiry, body: t.DescribeTransactionsRequest) -> Outcome:
    def finish(answer: t.DescribeTransactionsResponse) -> None:
        for transaction in answer.transaction_states:
            transaction.topics = [topic for topic in transaction.topics if inquiry.may(_O.DESCRIBE, _TOPIC, topic.name)]

    return Amendment(finish)


def _list_transactions(inquiry: Inquiry, body: t.ListTransactionsRequest) -> Outcome:
    def finish(answer: t.ListTransactionsResponse) -> None:
        answer.transaction_states = [
            each
            for each in answer.transaction_states
            if inquiry.may(_O.DESCRIBE, _TRANSACTIONAL_ID, each.transactional_id)
        ]

    return Amendment(finish)


# -- topics and settings --


def _create_topics(inquiry: Inquiry, body: m.CreateTopicsRequest) -> Outcome:
    """Create on the cluster allows every topic. Without DescribeConfigs, the answer does not show a topic's size."""
    asked = {topic.name for topic in body.topics}

    def hide(answer: m.CreateTopicsResponse) -> None:
        for result in answer.topics:
            is_hidden = result.error_code in (ErrorCode.NONE, _TOPIC_REFUSED)
            if is_hidden and not inquiry.may(_O.DESCRIBE_CONFIGS, _TOPIC, result.name):
                result.num_partitions = result.replication_factor = -1
                result.topic_config_error_code = _TOPIC_REFUSED

    shows_all = all(inquiry.may(_O.DESCRIBE_CONFIGS, _TOPIC, name) for name in asked)
    hidden = None if shows_all else Amendment(hide)
    if inquiry.may(_O.CREATE, _CLUSTER, CLUSTER_NAME):
        return hidden
    denied = [topic for topic in body.topics if not inquiry.may(_O.CREATE, _TOPIC, topic.name)]
    if not denied:
        return hidden
    text = inquiry.why_not(_O.CREATE, _TOPIC, denied[0].name, len(denied) - 1)
    outcome = without(inquiry, body, "topics", denied, _TOPIC, text, "topics")
    if isinstance(outcome, m.CreateTopicsResponse):
        hide(outcome)
    if not isinstance(outcome, Amendment):
        return outcome
    refused = outcome

    def finish(answer: m.CreateTopicsResponse) -> None:
        refused.finish(answer)
        hide(answer)

    return Amendment(finish, refused.undo)


def _delete_topics(inquiry: Inquiry, body: m.DeleteTopicsRequest) -> Outcome:
    """The answer about a topic that was named by its id has the topic's name only with Describe."""
    ids = [*body.topic_ids, *[""] * (len(body.topics) - len(body.topic_ids))]
    kept: list[tuple[str, str]] = []
    refused: list[m.DeletableTopicResult] = []
    for named, topic_id in zip(body.topics, ids, strict=False):
        name = named or inquiry.known.topic_with_id(topic_id)
        if name is None or inquiry.may(_O.DELETE, _TOPIC, name):
            kept.append((named, topic_id))
            continue
        text = inquiry.why_not(_O.DELETE, _TOPIC, name)
        shown = name if named or inquiry.may(_O.DESCRIBE, _TOPIC, name) else ""
        refused.append(m.DeletableTopicResult(shown, "" if named else topic_id, _TOPIC_REFUSED, text if shown else ""))
    if not refused:
        return None
    if not kept:
        return m.DeleteTopicsResponse(0, refused)
    before = body.topics, body.topic_ids
    body.topics, body.topic_ids = [name for name, _ in kept], [topic_id for _, topic_id in kept]

    def undo() -> None:
        body.topics, body.topic_ids = before

    return Amendment(lambda answer: answer.responses.extend(refused), undo)


def _configs(operation: AclOperation, answers: str) -> tuple[Step, ...]:
    """Settings of topics need the operation on the topic, all others on the cluster."""
    topics = Each(
        "resources",
        operation,
        _TOPIC,
        lambda inquiry, part: part.resource_name if part.resource_type == ConfigResource.TOPIC else None,
        answers=answers,
    )
    others = Each(
        "resources",
        operation,
        _CLUSTER,
        lambda inquiry, part: (
            CLUSTER_NAME if part.resource_type in (ConfigResource.BROKER, ConfigResource.BROKER_LOGGER) else None
        ),
        answers=answers,
    )

    return topics, others


_OF_A_BROKER: tuple[Step, ...] = (Cluster(_O.CLUSTER_ACTION),)
_OF_A_MEMBER: tuple[Step, ...] = (Whole(_O.READ, _GROUP, lambda body: body.group_id),)
_TRANSACTION = Whole(_O.WRITE, _TRANSACTIONAL_ID, lambda body: body.transactional_id)

ACCESS: dict[int, tuple[Step, ...]] = {
    apis.PRODUCE.key: (
        Whole(_O.WRITE, _TRANSACTIONAL_ID, _transaction_of),
        Each("topic_data", _O.WRITE, _TOPIC, answers="responses"),
    ),
    apis.FETCH.key: (Special(_fetch, Need(_O.READ, _TOPIC, EACH_REFUSED), Need(_O.CLUSTER_ACTION, _CLUSTER, REFUSED)),),
    apis.LIST_OFFSETS.key: (Each("topics", _O.DESCRIBE, _TOPIC, answers="topics"),),
    apis.METADATA.key: (
        Special(
            _metadata,
            Need(_O.DESCRIBE, _TOPIC, LEFT_OUT),
            Need(_O.CREATE, _TOPIC, EACH_REFUSED),
            Need(_O.CREATE, _CLUSTER, EACH_REFUSED),
            Need(_O.DESCRIBE, _CLUSTER, NOT_SHOWN),
        ),
    ),
    apis.LEADER_AND_ISR.key: _OF_A_BROKER,
    apis.STOP_REPLICA.key: _OF_A_BROKER,
    apis.UPDATE_METADATA.key: _OF_A_BROKER,
    apis.CONTROLLED_SHUTDOWN.key: _OF_A_BROKER,
    apis.OFFSET_COMMIT.key: (*_OF_A_MEMBER, Each("topics", _O.READ, _TOPIC, answers="topics")),
    apis.OFFSET_FETCH.key: (
        Each("groups", _O.DESCRIBE, _GROUP, lambda inquiry, group: group.group_id, answers="groups"),
        Special(_offset_fetch, Need(_O.DESCRIBE, _TOPIC, EACH_REFUSED)),
    ),
    apis.FIND_COORDINATOR.key: (
        Special(
            _find_coordinator,
            Need(_O.DESCRIBE, _GROUP, EACH_REFUSED),
            Need(_O.DESCRIBE, _TRANSACTIONAL_ID, EACH_REFUSED),
        ),
    ),
    apis.JOIN_GROUP.key: _OF_A_MEMBER,
    apis.HEARTBEAT.key: _OF_A_MEMBER,
    apis.LEAVE_GROUP.key: _OF_A_MEMBER,
    apis.SYNC_GROUP.key: _OF_A_MEMBER,
    apis.DESCRIBE_GROUPS.key: (_DESCRIBED_GROUPS, Special(_described_groups)),
    apis.LIST_GROUPS.key: (
        Special(_list_groups, Need(_O.DESCRIBE, _CLUSTER, LEFT_OUT), Need(_O.DESCRIBE, _GROUP, LEFT_OUT)),
    ),
    apis.API_VERSIONS.key: (),
    apis.SASL_HANDSHAKE.key: (),
    apis.SASL_AUTHENTICATE.key: (),
    apis.CREATE_TOPICS.key: (
        Special(
            _create_topics,
            Need(_O.CREATE, _CLUSTER, EACH_REFUSED),
            Need(_O.CREATE, _TOPIC, EACH_REFUSED),
            Need(_O.DESCRIBE_CONFIGS, _TOPIC, LEFT_OUT),
        ),
    ),
    apis.DELETE_TOPICS.key: (
        Special(_delete_topics, Need(_O.DELETE, _TOPIC, EACH_REFUSED), Need(_O.DESCRIBE, _TOPIC, LEFT_OUT)),
    ),
    apis.DELETE_RECORDS.key: (Each("topics", _O.DELETE, _TOPIC, answers="topics"),),
    apis.INIT_PRODUCER_ID.key: (
        Special(
            _init_producer_id,
            Need(_O.WRITE, _TRANSACTIONAL_ID, REFUSED),
            Need(_O.IDEMPOTENT_WRITE, _CLUSTER, REFUSED),
            Need(_O.WRITE, _TOPIC, REFUSED),
        ),
    ),
    apis.OFFSET_FOR_LEADER_EPOCH.key: (
        Special(
            _offset_for_leader_epoch,
            Need(_O.CLUSTER_ACTION, _CLUSTER, EACH_REFUSED),
            Need(_O.DESCRIBE, _TOPIC, EACH_REFUSED),
        ),
    ),
    apis.ADD_PARTITIONS_TO_TXN.key: (
        Special(
            _add_partitions_to_txn,
            Need(_O.WRITE, _TRANSACTIONAL_ID, REFUSED),
            Need(_O.WRITE, _TOPIC, EACH_REFUSED),
            Need(_O.CLUSTER_ACTION, _CLUSTER, REFUSED),
        ),
    ),
    apis.ADD_OFFSETS_TO_TXN.key: (_TRANSACTION, *_OF_A_MEMBER),
    apis.END_TXN.key: (_TRANSACTION,),
    apis.WRITE_TXN_MARKERS.key: (Cluster(_O.ALTER, _O.CLUSTER_ACTION),),
    apis.TXN_OFFSET_COMMIT.key: (
        _TRANSACTION,
        *_OF_A_MEMBER,
        Each("topics", _O.READ, _TOPIC, answers="topics"),
    ),
    apis.DESCRIBE_ACLS.key: (Cluster(_O.DESCRIBE),),
    apis.CREATE_ACLS.key: (Cluster(_O.ALTER),),
    apis.DELETE_ACLS.key: (Cluster(_O.ALTER),),
    apis.DESCRIBE_CONFIGS.key: _configs(_O.DESCRIBE_CONFIGS, "results"),
    apis.ALTER_CONFIGS.key: _configs(_O.ALTER_CONFIGS, "responses"),
    apis.INCREMENTAL_ALTER_CONFIGS.key: _configs(_O.ALTER_CONFIGS, "responses"),
    apis.DESCRIBE_CLIENT_QUOTAS.key: (Cluster(_O.DESCRIBE_CONFIGS),),
    apis.ALTER_CLIENT_QUOTAS.key: (Cluster(_O.ALTER_CONFIGS),),
    apis.DESCRIBE_USER_SCRAM_CREDENTIALS.key: (Cluster(_O.DESCRIBE),),
    apis.ALTER_USER_SCRAM_CREDENTIALS.key: (Cluster(_O.ALTER),),
    apis.ALTER_REPLICA_LOG_DIRS.key: (Cluster(_O.ALTER),),
    apis.DESCRIBE_LOG_DIRS.key: (Cluster(_O.DESCRIBE),),
    apis.CREATE_PARTITIONS.key: (Each("topics", _O.ALTER, _TOPIC, answers="results"),),
    apis.DELETE_GROUPS.key: (Each("groups_names", _O.DELETE, _GROUP, _itself, answers="results"),),
    apis.ELECT_LEADERS.key: (Cluster(_O.ALTER),),
    apis.ALTER_PARTITION_REASSIGNMENTS.key: (Cluster(_O.ALTER),),
    apis.LIST_PARTITION_REASSIGNMENTS.key: (Cluster(_O.DESCRIBE),),
    apis.OFFSET_DELETE.key: (
        Whole(_O.DELETE, _GROUP, lambda body: body.group_id),
        Special(_offset_delete, Need(_O.READ, _TOPIC, EACH_REFUSED)),
    ),
    apis.ENVELOPE.key: _OF_A_BROKER,
    apis.DESCRIBE_CLUSTER.key: (Special(_describe_cluster, Need(_O.DESCRIBE, _CLUSTER, NOT_SHOWN)),),
    apis.DESCRIBE_PRODUCERS.key: (Each("topics", _O.READ, _TOPIC, answers="topics"),),
    apis.DESCRIBE_TRANSACTIONS.key: (
        Each("transactional_ids", _O.DESCRIBE, _TRANSACTIONAL_ID, _itself, answers="transaction_states"),
        Special(_described_transactions, Need(_O.DESCRIBE, _TOPIC, LEFT_OUT)),
    ),
    apis.LIST_TRANSACTIONS.key: (Special(_list_transactions, Need(_O.DESCRIBE, _TRANSACTIONAL_ID, LEFT_OUT)),),
    apis.DESCRIBE_HEALTH.key: (Cluster(_O.DESCRIBE),),
    apis.DESCRIBE_TIMELINE.key: (Cluster(_O.DESCRIBE),),
    apis.BROKER_HANDSHAKE.key: (),
    apis.BROKER_AUTHENTICATE.key: (),
}
"""The steps of each API, by its key, in their order."""

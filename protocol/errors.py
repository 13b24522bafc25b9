"""Kafka's error codes: each with its name, the reaction of a client, and a remedy for the user.

Only this table says whether an error is retriable or means stale metadata. Brokers send the code; clients raise
`BrokerError` for a code if a retry cannot cure it, or has not cured it in time.
"""

from enum import IntEnum
from typing import NamedTuple


class ErrorCode(IntEnum):
    """Kafka 3.9's codes (org.apache.kafka.common.protocol.Errors)."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    THROTTLING_QUOTA_EXCEEDED = 89
    UNKNOWN_TOPIC_ID = 100
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120


class ErrorInfo(NamedTuple):
    retriable: bool
    """The same request may succeed later without intervention."""
    refresh_metadata: bool
    """The sender's metadata is stale: it must refresh it before a retry."""
    remedy: str
    """A sentence for the user."""


_E = ErrorCode
ERRORS: dict[ErrorCode, ErrorInfo] = {
    _E.UNKNOWN_SERVER_ERROR: ErrorInfo(False, False, "The broker met a bug: read its log (`minibroker logs ID`)."),
    _E.NONE: ErrorInfo(False, False, ""),
    _E.OFFSET_OUT_OF_RANGE: ErrorInfo(
        False, False, "Ask for an offset between the log's start and end, or begin at one of them."
    ),
    _E.CORRUPT_MESSAGE: ErrorInfo(
        True, False, "The batch failed its checksum or has an impossible header; check the producer."
    ),
    _E.UNKNOWN_TOPIC_OR_PARTITION: ErrorInfo(
        True,
        True,
        "Check the name with `minibroker topics list`, or create it with `minibroker topics create NAME`.",
    ),
    _E.INVALID_FETCH_SIZE: ErrorInfo(False, False, "Ask for at least one byte."),
    _E.LEADER_NOT_AVAILABLE: ErrorInfo(
        True,
        True,
        "The partition has no leader now: see `minibroker status`, restart the brokers of its ISR.",
    ),
    _E.NOT_LEADER_OR_FOLLOWER: ErrorInfo(True, True, "Leadership moved: the client retries at the new leader."),
    _E.REQUEST_TIMED_OUT: ErrorInfo(
        True,
        False,
        "`minibroker status` shows under-replicated partitions, and whether ZooKeeper and the brokers run.",
    ),
    _E.BROKER_NOT_AVAILABLE: ErrorInfo(False, False, "Start the broker, or name one that is running."),
    _E.REPLICA_NOT_AVAILABLE: ErrorInfo(True, True, "The replica is starting; the client retries."),
    _E.MESSAGE_TOO_LARGE: ErrorInfo(
        False, False, "Send smaller records, fewer in a batch, or raise the topic's max.message.bytes."
    ),
    _E.STALE_CONTROLLER_EPOCH: ErrorInfo(False, False, "A newer controller was elected; the sender must resign."),
    _E.OFFSET_METADATA_TOO_LARGE: ErrorInfo(
        False, False, "Commit less metadata with the offset, or raise offset.metadata.max.bytes."
    ),
    _E.NETWORK_EXCEPTION: ErrorInfo(True, True, "The connection broke; the client reconnects."),
    _E.COORDINATOR_LOAD_IN_PROGRESS: ErrorInfo(
        True, False, "The coordinator is loading its groups; the client retries."
    ),
    _E.COORDINATOR_NOT_AVAILABLE: ErrorInfo(
        True,
        False,
        "The group's partition of __consumer_offsets has no leader, or fewer replicas in sync than its "
        "min.insync.replicas: see `minibroker status`.",
    ),
    _E.NOT_COORDINATOR: ErrorInfo(True, False, "Another broker coordinates the group now; the client looks for it."),
    _E.INVALID_TOPIC_EXCEPTION: ErrorInfo(
        False, False, "Use a name of 1 to 249 of the characters a-z A-Z 0-9 . _ and -."
    ),
    _E.RECORD_LIST_TOO_LARGE: ErrorInfo(False, False, "Send fewer records in one batch."),
    _E.NOT_ENOUGH_REPLICAS: ErrorInfo(
        True,
        False,
        "Start the brokers of the other replicas: `minibroker status` names what keeps them out of sync.",
    ),
    _E.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorInfo(
        True,
        False,
        "The ISR shrank below min.insync.replicas while this was replicated: start brokers.",
    ),
    _E.INVALID_REQUIRED_ACKS: ErrorInfo(False, False, "Use acks 0, 1 or all (-1)."),
    _E.ILLEGAL_GENERATION: ErrorInfo(False, False, "The group has rebalanced since: join it again."),
    _E.INCONSISTENT_GROUP_PROTOCOL: ErrorInfo(
        False, False, "Give all members of the group an assignor in common, or use another group."
    ),
    _E.INVALID_GROUP_ID: ErrorInfo(False, False, "Give the group a name that is not empty."),
    _E.UNKNOWN_MEMBER_ID: ErrorInfo(False, False, "The group has removed the member: join it again."),
    _E.INVALID_SESSION_TIMEOUT: ErrorInfo(
        False, False, "Choose a session timeout within group.min and group.max.session.timeout.ms of the brokers."
    ),
    _E.REBALANCE_IN_PROGRESS: ErrorInfo(False, False, "The group rebalances: join it again."),
    _E.INVALID_COMMIT_OFFSET_SIZE: ErrorInfo(False, False, "Commit less metadata with the offset."),
    _E.TOPIC_AUTHORIZATION_FAILED: ErrorInfo(
        False, False, "`minibroker acls list --topic TOPIC` shows the ACLs of the topic."
    ),
    _E.GROUP_AUTHORIZATION_FAILED: ErrorInfo(
        False, False, "`minibroker acls list --group GROUP` shows the ACLs of the group."
    ),
    _E.CLUSTER_AUTHORIZATION_FAILED: ErrorInfo(
        False, False, "`minibroker acls list --cluster` shows the ACLs of the cluster."
    ),
    _E.INVALID_TIMESTAMP: ErrorInfo(False, False, "Give a time in milliseconds since 1970 that is not negative."),
    _E.UNSUPPORTED_SASL_MECHANISM: ErrorInfo(
        False, False, "Use a mechanism that sasl.enabled.mechanisms of the broker's listener has."
    ),
    _E.ILLEGAL_SASL_STATE: ErrorInfo(
        False,
        False,
        "Use security_protocol PLAINTEXT or SSL, or the port of a listener with SASL, where a client authenticates "
        "itself once.",
    ),
    _E.UNSUPPORTED_VERSION: ErrorInfo(False, False, "Client and broker are too far apart: upgrade the older one."),
    _E.TOPIC_ALREADY_EXISTS: ErrorInfo(False, False, "Choose another name, or delete the topic first."),
    _E.INVALID_PARTITIONS: ErrorInfo(False, False, "Give a number of partitions between 1 and 10000."),
    _E.INVALID_REPLICATION_FACTOR: ErrorInfo(
        False,
        False,
        "Use a replication factor between 1 and the number of live brokers, or start more brokers.",
    ),
    _E.INVALID_REPLICA_ASSIGNMENT: ErrorInfo(
        False, False, "Assign every partition from 0 on to distinct live brokers, all with the same count."
    ),
    _E.INVALID_CONFIG: ErrorInfo(False, False, "docs/settings.md has the names and ranges of settings."),
    _E.NOT_CONTROLLER: ErrorInfo(True, True, "The controller moved: the client retries at the new one."),
    _E.INVALID_REQUEST: ErrorInfo(False, False, "The request breaks a rule: the broker's log may name it."),
    _E.UNSUPPORTED_FOR_MESSAGE_FORMAT: ErrorInfo(False, False, "The batch's format does not allow this."),
    _E.POLICY_VIOLATION: ErrorInfo(
        False, False, "The settings of the topic forbid this: `minibroker configs describe` shows them."
    ),
    _E.OUT_OF_ORDER_SEQUENCE_NUMBER: ErrorInfo(
        False,
        False,
        "A batch before this one is missing from the log; close the producer and begin with a new one.",
    ),
    _E.DUPLICATE_SEQUENCE_NUMBER: ErrorInfo(False, False, "The batch is in the log already; there is nothing to do."),
    _E.INVALID_PRODUCER_EPOCH: ErrorInfo(
        False,
        False,
        "A newer producer with the same id is active, or the coordinator has aborted the transaction, which was open "
        "for longer than its time-out.",
    ),
    _E.INVALID_TXN_STATE: ErrorInfo(
        False,
        False,
        "The transaction cannot do that in its present state; close the producer and begin with a new one.",
    ),
    _E.INVALID_PRODUCER_ID_MAPPING: ErrorInfo(
        False,
        False,
        "The brokers have forgotten the transactional id, which was unused for transactional.id.expiration.ms, or a "
        "newer producer has it.",
    ),
    _E.INVALID_TRANSACTION_TIMEOUT: ErrorInfo(
        False, False, "Give a transaction timeout above 0 and up to the brokers' transaction.max.timeout.ms."
    ),
    _E.CONCURRENT_TRANSACTIONS: ErrorInfo(
        True, False, "The end of the previous transaction is being written to its partitions; the client retries."
    ),
    _E.TRANSACTION_COORDINATOR_FENCED: ErrorInfo(
        False, False, "Another broker has become the transaction's coordinator; the client asks for it."
    ),
    _E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ErrorInfo(
        False, False, "The principal may not use this transactional id: ask for the right, or use another id."
    ),
    _E.SECURITY_DISABLED: ErrorInfo(
        False, False, "The brokers have no ACLs: set authorizer.class.name on all of them (docs/security.md)."
    ),
    _E.TRANSACTIONAL_ID_NOT_FOUND: ErrorInfo(
        False, False, "`minibroker transactions list` has the transactional ids that the cluster knows."
    ),
    _E.TRANSACTION_ABORTABLE: ErrorInfo(False, False, "Abort the transaction and begin it again."),
    _E.OPERATION_NOT_ATTEMPTED: ErrorInfo(
        False, False, "Another part of the request failed, and its error says what to do; then send all of it again."
    ),
    _E.KAFKA_STORAGE_ERROR: ErrorInfo(
        True, True, "The broker's disk failed: see its log, and whether the directory is full or unreadable."
    ),
    _E.LOG_DIR_NOT_FOUND: ErrorInfo(False, False, "Name a log directory that the broker has."),
    _E.SASL_AUTHENTICATION_FAILED: ErrorInfo(
        False, False, "Check the user, the password or token, and the mechanism; the broker's log has the reason."
    ),
    _E.UNKNOWN_PRODUCER_ID: ErrorInfo(
        False, False, "The log no longer knows the producer; close it and begin with a new one."
    ),
    _E.NON_EMPTY_GROUP: ErrorInfo(
        False, False, "Stop its members first: `minibroker groups describe GROUP` names them."
    ),
    _E.GROUP_ID_NOT_FOUND: ErrorInfo(False, False, "`minibroker groups list` has the names of the groups."),
    _E.TOPIC_DELETION_DISABLED: ErrorInfo(
        False, False, "Set delete.topic.enable=true on all brokers and restart them, or keep the topic."
    ),
    _E.FENCED_LEADER_EPOCH: ErrorInfo(True, True, "The leader has changed since; the client asks for metadata."),
    _E.UNKNOWN_LEADER_EPOCH: ErrorInfo(True, False, "The broker does not know the new leader yet; retry."),
    _E.UNSUPPORTED_COMPRESSION_TYPE: ErrorInfo(False, False, "Use none, gzip, snappy, lz4 or zstd."),
    _E.STALE_BROKER_EPOCH: ErrorInfo(False, False, "The request was meant for an earlier run of the broker."),
    _E.OFFSET_NOT_AVAILABLE: ErrorInfo(
        True,
        False,
        "The new leader does not know its high watermark yet; retry. If that lasts, too few of its replicas are in "
        "sync: `minibroker status` says what to start.",
    ),
    _E.MEMBER_ID_REQUIRED: ErrorInfo(False, False, "Join with the member id that came with this answer (KIP-394)."),
    _E.GROUP_MAX_SIZE_REACHED: ErrorInfo(
        False, False, "The group has as many members as group.max.size allows: stop some, or raise it."
    ),
    _E.FENCED_INSTANCE_ID: ErrorInfo(
        False,
        False,
        "Another member has joined with the same group_instance_id: give each member one of its own.",
    ),
    _E.PREFERRED_LEADER_NOT_AVAILABLE: ErrorInfo(
        False, False, "Start the preferred leader, and wait until it is in sync: `minibroker status` shows that."
    ),
    _E.ELIGIBLE_LEADERS_NOT_AVAILABLE: ErrorInfo(
        False, False, "Start a broker that has a replica: `minibroker topics describe TOPIC` names them."
    ),
    _E.ELECTION_NOT_NEEDED: ErrorInfo(
        False, False, "The partition already has the right leader; there is nothing to do."
    ),
    _E.REASSIGNMENT_IN_PROGRESS: ErrorInfo(
        False, False, "Wait until the reassignment is over (`minibroker reassign verify`), or cancel it."
    ),
    _E.NO_REASSIGNMENT_IN_PROGRESS: ErrorInfo(
        False, False, "There is nothing to cancel: the reassignment is over, or there was none."
    ),
    _E.GROUP_SUBSCRIBED_TO_TOPIC: ErrorInfo(
        False, False, "Stop the members of the group that read the topic before its offsets are deleted."
    ),
    _E.UNSTABLE_OFFSET_COMMIT: ErrorInfo(True, False, "A transaction is about to commit the offset; retry."),
    _E.INVALID_RECORD: ErrorInfo(
        False, False, "A record breaks a rule of its topic: `minibroker configs describe` shows its settings."
    ),
    _E.PRODUCER_FENCED: ErrorInfo(
        False,
        False,
        "A newer producer with the same transactional id is active, or an operator has aborted the transaction.",
    ),
    _E.RESOURCE_NOT_FOUND: ErrorInfo(
        False, False, "There is no such user with credentials: `minibroker users list` shows those that there are."
    ),
    _E.DUPLICATE_RESOURCE: ErrorInfo(False, False, "Name each user and mechanism once in a request."),
    _E.UNACCEPTABLE_CREDENTIAL: ErrorInfo(False, False, "Give a user, a salt, and from 4096 to 16384 iterations."),
    _E.THROTTLING_QUOTA_EXCEEDED: ErrorInfo(True, False, "Slow down; the limit is in the broker's settings."),
    _E.INVALID_UPDATE_VERSION: ErrorInfo(
        True, False, "It has changed since the client read it; the client reads it again."
    ),
    _E.UNKNOWN_TOPIC_ID: ErrorInfo(True, True, "The topic was deleted, or created again under the same name."),
    _E.BROKER_ID_NOT_REGISTERED: ErrorInfo(
        True, False, "The broker has not seen its registration yet: check that it reaches ZooKeeper."
    ),
    _E.INCONSISTENT_TOPIC_ID: ErrorInfo(
        True,
        True,
        "The broker has another incarnation of the topic, which it deletes when the controller orders that.",
    ),
}


_NAMED_BY_DETAIL = (_E.INVALID_REQUEST, _E.POLICY_VIOLATION, _E.INVALID_RECORD)
"""The codes of broken rules: a detail names the rule."""
_ALLOWED_BY = "minibroker acls add "
"""In a detail that says how to allow what was refused."""


def error_of(code: int) -> ErrorCode:
    """Return the error of a code from the wire; an unknown code becomes UNKNOWN_SERVER_ERROR."""
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR


class MinibrokerError(Exception):
    """The base of all errors for users. The text names the value, the rule and the remedy."""


def as_sentence(text: str) -> str:
    """Return the text with a full stop at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


class BrokerError(MinibrokerError):
    """A broker returned an error code. `code` is Kafka's. The text ends with the table's remedy, unless `detail` has
    its own (`is_complete`), names the broken rule, or says how to allow what was refused."""

    def __init__(self, code: ErrorCode, detail: str = "", is_complete: bool = False) -> None:
        self.code = code
        self.detail = detail
        self._is_complete = is_complete
        text = f"{code.name}: {detail}" if detail else code.name
        says_all = is_complete or (detail and code in _NAMED_BY_DETAIL) or _ALLOWED_BY in detail
        remedy = "" if says_all else ERRORS[code].remedy
        super().__init__(f"{as_sentence(text)} {remedy}" if remedy else text)

    @property
    def retriable(self) -> bool:
        return ERRORS[self.code].retriable

    def __reduce__(self) -> tuple[type["BrokerError"], tuple[ErrorCode, str, bool]]:
        return type(self), (self.code, self.detail, self._is_complete)


class NetworkError(MinibrokerError, OSError):
    """A broker could not be reached or its connection broke. The text names the address and the stage."""


class InvalidMessage(MinibrokerError, ValueError):
    """Bytes that are not a message of the protocol. The text names the expected and the found value."""

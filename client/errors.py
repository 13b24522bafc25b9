"""The errors that the client library raises itself. Brokers and the network cause those of `minibroker.protocol.errors`
(BrokerError, NetworkError).

All derive from MinibrokerError, so `except MinibrokerError` catches everything. Every message names the value, the rule
and the remedy. An error that carries results of one room's own types is defined beside these types: ConfigErrors,
GroupErrors and BatchDeliveryFailed.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Never, TypeVar

from minibroker.client.shown import shown, shows_only
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted, listed

K = TypeVar("K")
R = TypeVar("R")


def no_such_partition(partition: TopicPartition, count: int, doing: str = "") -> BrokerError:
    """Return UNKNOWN_TOPIC_OR_PARTITION for an existing topic with `count` partitions. `doing` prefixes the message."""
    topic, index = partition
    return BrokerError(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        f"{doing}{topic} has no partition {index}: its partitions are 0 to {count - 1}. Name one of them, or add "
        f"partitions with `minibroker topics alter {topic} --partitions {index + 1}`",
        is_complete=True,
    )


def acl_commands(principal: str | None, rights: Iterable[str]) -> str:
    """Return the commands that give a principal these rights, which are options of `minibroker acls add`. `principal`
    is None if the client does not know its own."""
    who = "PRINCIPAL" if principal is None else shlex.quote(principal)
    return listed(f"`minibroker acls add --allow-principal {who} {options}`" for options in rights)


def topic_error(
    code: ErrorCode,
    detail: str,
    topic: str,
    principal: str | None,
    operation: AclOperation = AclOperation.DESCRIBE,
    group: str | None = None,
) -> BrokerError:
    """Return the error of a topic in an answer of Metadata, which has no text. `operation`: what the client wants to do
    in the end, which includes Describe. `principal` is None if the client does not know its own. `group`: the one in
    which it reads the topic, so that the advice has all that the client needs."""
    if code is not ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        return BrokerError(code, detail)
    who = principal or "this client's principal, which the broker's log names,"
    needed = f"--operation {operation.shown} --topic {shlex.quote(topic)}"
    if group is not None:
        needed = f"--consumer --topic {shlex.quote(topic)} --group {shlex.quote(group)}"
    return BrokerError(
        code,
        f"{who} may not Describe Topic {topic!r}: an administrator can allow it with "
        f"{acl_commands(principal, [needed])}",
        is_complete=True,
    )


class ApiTimedOut(MinibrokerError, TimeoutError):
    """A call was not answered within `default_api_timeout_ms`."""


class InvalidSetting(MinibrokerError, ValueError):
    """A setting or an argument has an illegal value. Nothing was started or sent."""

    def __init__(self, name: str, value: object, rule: str) -> None:
        super().__init__(f"{name}={shown(value)}: {rule}")
        self.name = name
        self.value = value
        self.rule = rule


class InvalidAssignment(MinibrokerError, ValueError):
    """The application's own assignor returned an assignment that is not possible."""

    def __init__(self, assignor: str, what: str) -> None:
        super().__init__(f"assignor {assignor}: {what}")


class Closed(MinibrokerError, RuntimeError):
    """The producer, consumer or admin client is closed, or not started yet."""


class WrongEventLoop(MinibrokerError, RuntimeError):
    """A client was used outside the event loop in which it was started. Nothing was done."""


class ListenerTimedOut(MinibrokerError, TimeoutError):
    """A rebalance listener took longer than `max_poll_interval_ms` and was cancelled."""

    def __init__(self, method: str, max_poll_interval_ms: int) -> None:
        self._arguments = method, max_poll_interval_ms
        super().__init__(
            f"{method} did not return within max_poll_interval_ms={max_poll_interval_ms}, and was cancelled: let it do "
            "less, limit how long it waits, or raise max_poll_interval_ms"
        )

    def __reduce__(self) -> tuple[type[ListenerTimedOut], tuple[str, int]]:
        return type(self), self._arguments


class WithinListener(MinibrokerError, RuntimeError):
    """A rebalance listener called a method that waits for the listener itself: `unsubscribe`, `close`, or one that
    returns records. Nothing was done."""

    def __init__(self, call: str) -> None:
        self._call = call
        super().__init__(
            f"{call}() was called by a rebalance listener, and would wait until that listener returns: return from the "
            f"listener first, and call {call}() from the loop that reads"
        )

    def __reduce__(self) -> tuple[type[WithinListener], tuple[str]]:
        return type(self), (self._call,)


class ForkedClient(MinibrokerError, RuntimeError):
    """A client of `minibroker.sync` was used in a forked child process. Nothing was done; create a new client there."""


class ClientCrashed(MinibrokerError, RuntimeError):
    """A background task of the client failed because of a bug. The client sends and fetches nothing more. The bug is
    the cause of this error."""


class AuthenticationFailed(MinibrokerError, RuntimeError):
    """The client cannot authenticate itself: a broker does not accept the user, the password, the token or the
    mechanism, or the token provider returned no token. They are not tried again: the client sends and fetches nothing
    more. `reason` begins with the broker's. `user` is empty for a token."""

    def __init__(self, address: str, mechanism: str, reason: str, user: str = "") -> None:
        self.reason = reason
        self.user = user
        self._arguments = address, mechanism, reason, user
        who = f" as user {shown(user)}" if user else ""
        super().__init__(
            f"this client cannot authenticate itself{who} to the broker at {address} by {mechanism}: {reason}"
        )

    def __reduce__(self) -> tuple[type[AuthenticationFailed], tuple[str, str, str, str]]:
        return type(self), self._arguments

    def copy(self) -> AuthenticationFailed:
        """Return an equal error for another caller, with a traceback of its own."""
        return type(self)(*self._arguments)


class BufferFull(MinibrokerError):
    """The buffer has no room: `send` was called faster than brokers acknowledge records."""


class PartitionerFailed(MinibrokerError):
    """The application's partitioner raised (its error is the cause), or did not return a partition of the topic."""


class SerializationFailed(MinibrokerError, ValueError):
    """A key or value could not be serialized, so nothing was sent. The serializer's error is the cause.

    `what` is "key" or "value", followed by the index of the record in a `send_batch`. `type` is the type of the key or
    value that was passed.
    """

    def __init__(self, topic: str, what: str, type: type, problem: str) -> None:
        self.topic = topic
        self.what = what
        self.type = type
        self._problem = problem
        super().__init__(f"the {what} for {topic}, of type {type.__name__}, cannot be serialized: {problem}")

    def __reduce__(self) -> tuple[type[SerializationFailed], tuple[str, str, type, str]]:
        return SerializationFailed, (self.topic, self.what, self.type, self._problem)


class DeserializationFailed(MinibrokerError, ValueError):
    """A record's key or value could not be deserialized. The deserializer's error is the cause.

    `partition` and `offset` locate the record; `what` is "key" or "value"; `data` is its bytes in the log.
    """

    def __init__(self, topic: str, partition: int, offset: int, what: str, problem: str, data: bytes) -> None:
        self.partition = TopicPartition(topic, partition)
        self.offset = offset
        self.what = what
        self.data = data
        self._problem = problem
        super().__init__(
            f"{self.partition} at offset {offset}: the {what} of {counted(len(data), 'byte')} cannot be "
            f"deserialized: {problem}"
        )

    def __reduce__(self) -> tuple[type[DeserializationFailed], tuple[str, int, int, str, str, bytes]]:
        return type(self), (*self.partition, self.offset, self.what, self._problem, self.data)


class DeliveryTimedOut(MinibrokerError, TimeoutError):
    """A record was not acknowledged within `delivery_timeout_ms`. It may nevertheless be in the log."""


@shows_only("topic", "partition", "timestamp_ms", "error")
class FailedRecord(NamedTuple):
    """A record that was not acknowledged, and the reason."""

    topic: str
    partition: int | None
    """None if no partition had been chosen yet."""
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Sequence[tuple[str, bytes | None]]
    error: MinibrokerError


def records_were(count: int) -> str:
    return "1 record was" if count == 1 else f"{count} records were"


class DeliveryFailed(MinibrokerError):
    """Records failed whose Delivery was not awaited. `failures` holds them; those of one partition are in the order of
    their `send`."""

    def __init__(self, failures: Sequence[FailedRecord]) -> None:
        self.failures = tuple(failures)
        reasons = Counter((failure.topic, failure.partition, str(failure.error)) for failure in failures)
        lines = [
            f"{count} of {topic if partition is None else f'{topic}-{partition}'}: {reason}"
            for (topic, partition, reason), count in reasons.most_common(5)
        ]
        if len(reasons) > len(lines):
            lines.append(f"and {len(reasons) - len(lines)} other reasons")
        super().__init__(f"{records_were(len(failures))} not delivered (see .failures). " + "; ".join(lines))

    def __reduce__(self) -> tuple[type[DeliveryFailed], tuple[Any, ...]]:
        return type(self), (self.failures,)


class PartialFailure(MinibrokerError, Generic[K, R]):
    """Some parts of a request failed, and the others succeeded.

    `errors` has the error of each part that failed. `results` has the result of each part that succeeded, if the call
    returns any.
    """

    def __init__(self, errors: Mapping[K, MinibrokerError], results: Mapping[K, R] = MappingProxyType({})) -> None:
        self.errors = dict(errors)
        self.results = dict(results)
        super().__init__(_grouped((self._name(key), error) for key, error in self.errors.items()))

    @staticmethod
    def _name(key: K) -> str:
        return str(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.results)


class TopicErrors(PartialFailure[str, Never]):
    """Some topics of a request failed; `errors` is by name. The other topics succeeded."""


class PartitionErrors(PartialFailure[TopicPartition, int]):
    """Some partitions of a request failed; the others succeeded. `errors` and `results` are by partition."""

    def __init__(
        self,
        errors: Mapping[TopicPartition, MinibrokerError],
        results: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(dict(sorted(errors.items())), results)


class BrokersFailed(PartialFailure[int, Any]):
    """Some brokers failed a request; the others answered it. `errors` and `results` are by broker id."""

    @staticmethod
    def _name(key: int) -> str:
        return f"broker {key}"


class CommitFailed(MinibrokerError):
    """Offsets of some partitions were not committed, or it is unknown whether they were. `errors` has the error of
    each such partition. The other partitions of the same call are committed."""

    def __init__(self, group: str, errors: dict[TopicPartition, MinibrokerError]) -> None:
        self.group = group
        self.errors = errors
        named = _grouped((str(partition), error) for partition, error in sorted(errors.items()))
        super().__init__(f"offsets of group {group} were not committed: {named}")

    def __reduce__(self) -> tuple[type[CommitFailed], tuple[str, dict[TopicPartition, MinibrokerError]]]:
        return type(self), (self.group, self.errors)


class TransactionError(MinibrokerError):
    """An error of a transaction.

    `is_fatal`: the producer cannot go on and must be closed. Otherwise its next transaction may begin.
    """

    is_fatal: ClassVar[bool] = False


class InvalidTransactionState(TransactionError, RuntimeError):
    """A call does not fit the state of the producer's transaction: a record outside of a transaction, or a second
    transaction while one is open. Nothing was done."""


class TransactionAborted(TransactionError):
    """A transaction was aborted: none of its records and offsets is visible to read_committed consumers. `reason` is
    the error that aborted it, if there was one, and also its cause. It is usually a MinibrokerError; a TypeError or
    ValueError if a call had an illegal argument. The transaction may be repeated in a new one, which helps unless the
    reason lasts, such as a record that is too large: the text says which of the two holds."""

    def __init__(self, transactional_id: str, what: str, reason: Exception | None = None) -> None:
        self.transactional_id = transactional_id
        self.reason = reason
        self._what = what
        again = (
            "so it may be repeated"
            if reason is None or may_pass(reason)
            else "but it would fail again: correct this before you repeat it"
        )
        super().__init__(
            f"a transaction of {shown(transactional_id)} was aborted: {what.rstrip('.')}. "
            f"Nothing of it is visible to read_committed consumers, {again}"
        )
        self.__cause__ = reason

    def __reduce__(self) -> tuple[type[TransactionAborted], tuple[str, str, Exception | None]]:
        return type(self), (self.transactional_id, self._what, self.reason)


class CommitOutcomeUnknown(TransactionError):
    """The coordinator did not answer in time whether a transaction is committed. Do not repeat its work before its
    outcome is known.

    `await transaction.was_committed()` asks the coordinator again and returns the outcome. The next transaction of the
    producer also asks, before it begins; after that `was_committed` returns at once. Asking is safe at any time: the
    coordinator commits a transaction once, and answers a repeated request as the first one.
    """

    def __init__(self, transactional_id: str, waited_s: float, reason: str) -> None:
        self.transactional_id = transactional_id
        self._waited_s = waited_s
        self._reason = reason
        super().__init__(
            f"whether a transaction of {shown(transactional_id)} is committed is not known after {waited_s:g} s: "
            f"{reason}. Call was_committed() of the transaction before you repeat its work"
        )

    def __reduce__(self) -> tuple[type[CommitOutcomeUnknown], tuple[str, float, str]]:
        return type(self), (self.transactional_id, self._waited_s, self._reason)


_FENCED_BY_ANOTHER = (
    "another producer has started with the id since, or an operator has aborted its transaction (`minibroker "
    "transactions abort`)",
    "Give each running producer an id of its own, and start a new producer to go on",
)
_FENCED = {
    ErrorCode.INVALID_PRODUCER_ID_MAPPING: (
        "the brokers have forgotten the id, which was unused for their transactional.id.expiration.ms, or another "
        "producer has started with it since",
        "Start a new producer to go on, and give each running producer an id of its own",
    ),
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "this client may not use the id",
        "Ask for the right to WRITE with the id (`minibroker acls add`), or use another id",
    ),
}
"""Why a producer is fenced by these errors, and the remedy."""


class ProducerFenced(TransactionError):
    """A producer may not go on with its transactional id: every later call raises this. `code` is the broker's error.

    Usually a producer that started later uses the same id, and has aborted what was open. `minibroker transactions
    abort` and `Admin.fence_producers` also fence the producer, and so does a commit whose outcome was not known before
    the brokers forgot the id (INVALID_PRODUCER_ID_MAPPING, after `transactional.id.expiration.ms`).

    If `is_commit_unknown`, a commit was under way whose outcome this producer cannot learn any more: the committed
    offsets of the group, or the records, show it.
    """

    is_fatal = True

    def __init__(self, transactional_id: str, code: ErrorCode, *, is_commit_unknown: bool = False) -> None:
        self.transactional_id = transactional_id
        self.code = code
        self.is_commit_unknown = is_commit_unknown
        why, remedy = _FENCED.get(code, _FENCED_BY_ANOTHER)
        text = f"the producer with transactional id {shown(transactional_id)} is fenced ({code.name}): {why}. "
        text += "Close it. "
        if is_commit_unknown:
            text += "Its last transaction may be committed or aborted: look for its offsets or records. "
        super().__init__(text + remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), is_commit_unknown=self.is_commit_unknown), (self.transactional_id, self.code)


class Interrupted(MinibrokerError):
    """A call within a transaction was cancelled, or interrupted by Ctrl-C."""


class MaxPollIntervalExceeded(MinibrokerError):
    """The application did not ask the consumer for records within `max_poll_interval_ms`, so the consumer left its
    group. Other members may have continued from the committed offsets. The next iteration joins as a new member.

    `silent_s` is the time in seconds in which the application asked for no records.
    """

    def __init__(self, silent_s: float, max_poll_interval_s: float) -> None:
        self.silent_s = silent_s
        self.max_poll_interval_s = max_poll_interval_s
        super().__init__(
            f"no records were asked for during {silent_s:.1f} s, which is more than max_poll_interval_ms="
            f"{max_poll_interval_s * 1_000:.0f}, so this consumer has left its group: process fewer records at a time "
            "(max_poll_records), or raise max_poll_interval_ms. Iterating on joins again"
        )

    def __reduce__(self) -> tuple[type[MaxPollIntervalExceeded], tuple[float, float]]:
        return type(self), (self.silent_s, self.max_poll_interval_s)


class CorruptBatch(MinibrokerError):
    """A batch arrived damaged. Iterate again to fetch it again, or `seek` past it to skip it.

    `next_offset` is the offset after the batch; None if its end is unknown.
    """

    def __init__(self, partition: TopicPartition, problem: str, remedy: str, next_offset: int | None = None) -> None:
        self.partition = partition
        self.problem = problem
        self.next_offset = next_offset
        self._remedy = remedy
        super().__init__(f"{partition} {problem}. {remedy}")

    def __reduce__(self) -> tuple[type[CorruptBatch], tuple[TopicPartition, str, str, int | None]]:
        return type(self), (self.partition, self.problem, self._remedy, self.next_offset)


class LogTruncated(MinibrokerError):
    """An unclean election removed records from the log that this consumer had read. With `auto_offset_reset="none"` the
    application must `seek` (Kafka's LogTruncationException, KIP-320).

    `offset` is the consumer's position. The log differs from the records that were read from `diverging_offset` on.
    """

    def __init__(self, partition: TopicPartition, offset: int, diverging_offset: int) -> None:
        self.partition = partition
        self.offset = offset
        self.diverging_offset = diverging_offset
        super().__init__(
            f"{partition}: records from offset {diverging_offset} on, up to {offset}, were lost in an unclean "
            f'election, and auto_offset_reset="none": call seek(), for instance to {diverging_offset}'
        )

    def __reduce__(self) -> tuple[type[LogTruncated], tuple[TopicPartition, int, int]]:
        return type(self), (self.partition, self.offset, self.diverging_offset)


_PASSING = (
    ApiTimedOut,
    BufferFull,
    CommitOutcomeUnknown,
    DeliveryTimedOut,
    Interrupted,
    InvalidMessage,
    MaxPollIntervalExceeded,
    NetworkError,
)
"""Errors of brokers that are away, of a full buffer, and of programs that were too slow or interrupted."""
_PASSING_CODES = frozenset(
    {
        # The member has lost its partitions, or a rebalance has raised the generation.
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.REBALANCE_IN_PROGRESS,
        # The transaction has failed or was aborted by its coordinator. If a twin has caused that, the producer learns
        # of it when it ends the transaction, and raises ProducerFenced.
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.UNKNOWN_PRODUCER_ID,
    }
)
"""Errors that are not retriable for a request, but pass if the whole transaction is repeated."""
_LASTING_CODES = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})
"""Retriable errors that clients raise only after they have lasted."""


def may_pass(error: Exception) -> bool:
    """Return whether a transaction that has failed by this error may succeed if it is repeated unchanged. A Processor
    repeats its batch then."""
    match error:
        case TransactionAborted(reason=reason):
            return reason is None or may_pass(reason)
        case CommitFailed(errors=errors) | PartialFailure(errors=errors):
            return all(may_pass(each) for each in errors.values())
        case DeliveryFailed(failures=failures):
            return all(may_pass(failure.error) for failure in failures)
        case BrokerError(code=code):
            return code not in _LASTING_CODES and (code in _PASSING_CODES or ERRORS[code].retriable)
        case _:
            return isinstance(error, _PASSING)


def _grouped(errors: Iterable[tuple[str, MinibrokerError]]) -> str:
    """Join the distinct texts, each after the names that it applies to. A text that has its single name is not
    prefixed."""
    alike: dict[str, list[str]] = {}
    for name, error in errors:
        alike.setdefault(str(error), []).append(name)
    parts = [
        text if len(names) == 1 and _names(text, names[0]) else f"{', '.join(names)}: {text}"
        for text, names in alike.items()
    ]
    return "; ".join([part.removesuffix(".") for part in parts[:-1]] + parts[-1:])


def _names(text: str, name: str) -> bool:
    """Return whether the text contains the name, quoted or as a partition's. An unquoted name may be a common word."""
    return repr(name) in text or bool(re.search(r"-\d+$", name) and re.search(rf"(?<![\w.-]){re.escape(name)}\b", text))

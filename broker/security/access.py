"""How the access of one request is checked: by steps that refuse it, take parts of it away, or filter its answer.

A step never changes what a handler does. It removes the parts that the principal may not touch before the handler sees
the request, and adds their errors to the answer, so that handlers know nothing of ACLs.
"""

import copy
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from minibroker.broker.security.decisions import Bindings
from minibroker.protocol.acls import CLUSTER_NAME, AclOperation, AclResourceType
from minibroker.protocol.apis import Api
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.kafka.apis import KAFKA_APIS
from minibroker.protocol.messages import Message
from minibroker.protocol.principal import Principal

AUTHORIZATION_FAILED = {
    AclResourceType.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    AclResourceType.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    AclResourceType.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    AclResourceType.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
LONGEST_NAME = 100
"""Characters of a name in an error message."""

_OPTIONS = {
    AclResourceType.TOPIC: "--topic",
    AclResourceType.GROUP: "--group",
    AclResourceType.TRANSACTIONAL_ID: "--transactional-id",
}


_ON_TOPICS = {
    AclResourceType.GROUP: "; a consumer also needs Read on its topics, and `--consumer` gives it both",
    AclResourceType.TRANSACTIONAL_ID: "; a producer also needs Write on its topics, and `--producer` gives it both",
}
"""The rights beside those on a coordinated resource that are refused next. The coordinator does not know the topics."""


class Known(Protocol):
    """What the broker knows of the cluster's topics."""

    def topic_with_id(self, topic_id: str) -> str | None: ...
    def partition_count(self, topic: str) -> int: ...


class Inquiry:
    """The questions of a principal's requests of one API."""

    __slots__ = (
        "_allows",
        "_note_refusal",
        "api",
        "auto_creates_topics",
        "bindings",
        "host",
        "is_from_user",
        "known",
        "principal",
        "sender",
    )

    def __init__(
        self,
        bindings: Bindings,
        sender: Principal,
        host: str,
        api: Api[Any, Any],
        known: Known,
        *,
        is_from_user: bool = True,
        auto_creates_topics: bool = False,
        note_refusal: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.bindings = bindings
        self.sender = sender
        self.principal = str(sender)
        self.host = host
        self.api = api
        self.known = known
        self.is_from_user = is_from_user
        """AddPartitionsToTxn, which leaders send as well: it comes from a producer."""
        self.auto_creates_topics = auto_creates_topics
        self._allows = bindings.allows
        self._note_refusal = note_refusal

    def may(self, operation: AclOperation, kind: AclResourceType, name: str) -> bool:
        return self._allows(self.principal, self.host, operation, kind, name)

    def may_on_any(self, operation: AclOperation, kind: AclResourceType) -> bool:
        return self.bindings.allows_on_any(self.principal, self.host, operation, kind)

    def operations(self, kind: AclResourceType, name: str) -> int:
        return self.bindings.operations(self.principal, self.host, kind, name)

    def why_not(
        self,
        operation: AclOperation,
        kind: AclResourceType,
        name: str,
        others: int = 0,
        advised: AclOperation | None = None,
    ) -> str:
        """Return the message of a refusal, and note it. `advised`: the operation, which includes this one, that most
        clients need next; a right to this one alone would lead to the next refusal."""
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        resource = "--cluster" if kind is AclResourceType.CLUSTER else f"{_OPTIONS.get(kind, '')} {shlex.quote(shown)}"
        more = f" and {others} more" if others else ""
        note = ""
        if advised is not None:
            topics = _ON_TOPICS.get(kind, "")
            note = f" (to look at it, {operation.shown} is enough{topics})"
        elif operation is AclOperation.DESCRIBE and kind is AclResourceType.TOPIC:
            note = " (Read and Write include it)"
        text = (
            f"{self.principal} at {self.host} may not {operation.shown} {kind.shown} {shown!r}{more}: an "
            f"administrator can allow it with `minibroker acls add --allow-principal {shlex.quote(self.principal)} "
            f"--operation {(advised or operation).shown} {resource}`{note}"
        )
        self._note_refusal(f"{self.api.name}: {text}")
        return text

    def require(self, operation: AclOperation, kind: AclResourceType, name: str, code: ErrorCode | None = None) -> None:
        """Raise BrokerError with the code of the type of resource unless the operation is allowed."""
        if not self.may(operation, kind, name):
            raise BrokerError(code or AUTHORIZATION_FAILED[kind], self.why_not(operation, kind, name))


class Amendment(NamedTuple):
    """A request is handled without some of its parts, or its answer is changed."""

    finish: Callable[[Any], None]
    """Changes the answer."""
    undo: Callable[[], None] = lambda: None
    """Puts the parts back: the whole request fails for another reason, which its answer names for each part."""


Outcome = Amendment | Message | None
"""A Message is the answer, and there is nothing left to handle. None: everything is allowed."""

Effect = str
"""What happens to what is not allowed."""
REFUSED, EACH_REFUSED, LEFT_OUT, NOT_SHOWN = "refused", "an error for each", "left out", "no operations shown"


class Need(NamedTuple):
    """An operation on a type of resource, as the table shows it."""

    operation: AclOperation
    kind: AclResourceType
    effect: Effect


class Step(Protocol):
    @property
    def needs(self) -> Sequence[Need]: ...

    def apply(self, inquiry: Inquiry, body: Any) -> Outcome:
        """Raises BrokerError if the request is refused as a whole."""


class Whole:
    """The whole request needs an operation. `name` returns the resource; None: the request does not need it."""

    def __init__(self, operation: AclOperation, kind: AclResourceType, name: Callable[[Any], str | None]) -> None:
        self.needs = (Need(operation, kind, REFUSED),)
        self._operation, self._kind, self._name = operation, kind, name

    def apply(self, inquiry: Inquiry, body: Any) -> Outcome:
        name = self._name(body)
        if name is not None:
            inquiry.require(self._operation, self._kind, name)
        return None


class Cluster:
    """The whole request needs one of these operations on the cluster."""

    def __init__(self, *operations: AclOperation) -> None:
        self.needs = tuple(Need(operation, AclResourceType.CLUSTER, REFUSED) for operation in operations)
        self._operations = operations

    def apply(self, inquiry: Inquiry, body: Any) -> Outcome:
        if not any(inquiry.may(each, AclResourceType.CLUSTER, CLUSTER_NAME) for each in self._operations[:-1]):
            inquiry.require(self._operations[-1], AclResourceType.CLUSTER, CLUSTER_NAME)
        return None


class Each:
    """Each element of a list in the request needs an operation. `name` returns the resource of an element; None: it
    needs nothing, because the handler rejects it. `answers` is the list of the results. `advised`: see `why_not`."""

    def __init__(
        self,
        listed: str,
        operation: AclOperation,
        kind: AclResourceType,
        name: Callable[[Inquiry, Any], str | None] = lambda inquiry, part: part.name,
        *,
        answers: str,
        advised: AclOperation | None = None,
    ) -> None:
        self.needs = (Need(operation, kind, EACH_REFUSED),)
        self._advised = advised
        self._listed, self._operation, self._kind, self._name, self._answers = listed, operation, kind, name, answers

    def apply(self, inquiry: Inquiry, body: Any) -> Outcome:
        operation, kind, name = self._operation, self._kind, self._name
        parts = getattr(body, self._listed)
        denied = []
        for part in parts or ():
            resource = name(inquiry, part)
            if resource is not None and not inquiry.may(operation, kind, resource):
                denied.append((part, resource))
        if not denied:
            return None
        text = inquiry.why_not(operation, kind, denied[0][1], len(denied) - 1, self._advised)
        return without(inquiry, body, self._listed, [part for part, _ in denied], kind, text, self._answers)


def without(
    inquiry: Inquiry, body: Any, listed: str, denied: list[Any], kind: AclResourceType, text: str, answers: str
) -> Outcome:
    """Remove these elements of a list from the request, and let its answer have errors for them."""
    failed = KAFKA_APIS[inquiry.api.key].failed
    parts = getattr(body, listed)
    refused = copy.copy(body)
    setattr(refused, listed, denied)
    errors: Message = failed(refused, AUTHORIZATION_FAILED[kind], text)
    if len(denied) == len(parts):
        if hasattr(errors, "error_code"):
            errors.error_code = ErrorCode.NONE  # only the parts have failed
        return errors
    places = {id(part) for part in denied}
    setattr(body, listed, [part for part in parts if id(part) not in places])
    return Amendment(
        lambda answer: getattr(answer, answers).extend(getattr(errors, answers)),
        lambda: setattr(body, listed, parts),
    )


class Special:
    """A rule of one API alone."""

    def __init__(self, function: Callable[[Inquiry, Any], Outcome], *needs: Need) -> None:
        self.needs = needs
        self.apply = function


def check(steps: Sequence[Step], inquiry: Inquiry, body: Any) -> Amendment | Message | None:
    """Apply the steps. Return None if the request is allowed as it is."""
    amendments: list[Amendment] = []
    for step in steps:
        outcome = step.apply(inquiry, body)
        if isinstance(outcome, Amendment):
            amendments.append(outcome)
        elif outcome is not None:
            for amendment in amendments:
                amendment.finish(outcome)
            return outcome
    return combined(amendments)


def combined(amendments: Sequence[Amendment]) -> Amendment | None:
    if len(amendments) < 2:
        return amendments[0] if amendments else None

    def finish(answer: Any) -> None:
        for each in amendments:
            each.finish(answer)

    def undo() -> None:
        for each in reversed(amendments):
            each.undo()

    return Amendment(finish, undo)

"""The controller's events: one class for each, with its source and its data.

Every event carries `epoch`, the controller epoch of the tenure in which it was raised; the event loop drops events of
other tenures. `cause` is the sentence that the timeline shows.

Events of watches (`WATCHED`) carry no data: a watch reports that something changed, not what, and it may have changed
again before the event is handled. The handler reads, which also sets the next watch, and acts on the difference
between what it read and the cluster state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from minibroker.controller.decisions.cluster_state import LogEndReported
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableTopic,
    CreatableTopicResult,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    DeletableTopicResult,
    ListPartitionReassignmentsTopic,
    OngoingTopicReassignment,
    ReassignableTopic,
    ReassignableTopicResponse,
)
from minibroker.protocol.model import NO_EPOCH, ElectionType, TopicPartition
from minibroker.protocol.words import counted

Result = TypeVar("Result", contravariant=True)


class ElectionOutcome(NamedTuple):
    """The result of a requested election."""

    error: ErrorCode
    message: str = ""
    leader_epoch: int = NO_EPOCH
    """The epoch of the elected leader, or of the present one if no election was needed. Clients may not know it yet,
    for instance if the previous controller elected the leader."""


_SHOWN_ERRORS = 20
"""Errors of one response that the timeline shows."""


@dataclass(frozen=True)
class Event:
    epoch: int
    is_question: ClassVar[bool] = False
    """The event changes nothing, so the timeline omits it unless it fails."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def cause(self) -> str:
        return self.name

    @property
    def details(self) -> dict[str, object]:
        """Further fields of the timeline's entry."""
        return {}


# --- From the election, and from the session -------------------------------------------------------------------


@dataclass(frozen=True)
class Startup(Event):
    """Raised once, as the first event of a tenure (Kafka's onControllerFailover)."""

    epoch_version: int = 0
    """The data version of `/controller_epoch` after the election. Every write of the tenure checks it."""

    @property
    def cause(self) -> str:
        return f"elected controller with epoch {self.epoch}"

    @property
    def details(self) -> dict[str, object]:
        return {"epoch_version": self.epoch_version}


@dataclass(frozen=True)
class SessionReconnected(Event):
    """Raised when the session has reconnected: all watches are gone, so everything is read again."""

    cause = "connected to ZooKeeper again; all watches are set anew"


# --- From watches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokerChange(Event):
    """Raised by the watch on the children of `/brokers/ids`."""

    cause = "/brokers/ids changed"


@dataclass(frozen=True)
class TopicChange(Event):
    """Raised by the watch on the children of `/brokers/topics`."""

    cause = "/brokers/topics changed"


@dataclass(frozen=True)
class DeleteTopics(Event):
    """Raised by the watch on the children of `/admin/delete_topics`."""

    cause = "/admin/delete_topics changed"


@dataclass(frozen=True)
class IsrChange(Event):
    """Raised by the watch on the children of `/isr_change_notification`: leaders have changed their ISRs."""

    cause = "/isr_change_notification changed"


@dataclass(frozen=True)
class LogDirFailure(Event):
    """Raised by the watch on the children of `/log_dir_event_notification`: brokers have lost log directories."""

    cause = "/log_dir_event_notification changed"


@dataclass(frozen=True)
class PartitionModifications(Event):
    """Raised by the watches on the data of `/brokers/topics/T`, one per topic."""

    topics: tuple[str, ...] | None = None
    """The topics that may have changed; None: any of them."""

    @property
    def cause(self) -> str:
        if self.topics is None:
            return "topics may have changed"
        return f"/brokers/topics/{', '.join(self.topics[:10])} changed, or needs a watch"


@dataclass(frozen=True)
class PreferredReplicaElection(Event):
    """Raised by the watch on `/admin/preferred_replica_election`, and after taking office."""

    cause = "/admin/preferred_replica_election may ask for an election"


@dataclass(frozen=True)
class PartitionReassignment(Event):
    """Raised by the watch on `/admin/reassign_partitions` (Kafka's ZkPartitionReassignment), and after taking office,
    to resume the reassignments under way."""

    cause = "/admin/reassign_partitions may ask for a reassignment, or one is under way"


@dataclass(frozen=True)
class UnreadableStateChange(Event):
    """Raised by the watch on the state znode of a partition that could not be decoded."""

    cause = "the state of a partition that made no sense has changed"


WATCHED: tuple[type[Event], ...] = (
    BrokerChange,
    TopicChange,
    DeleteTopics,
    IsrChange,
    LogDirFailure,
    PartitionModifications,
    PreferredReplicaElection,
    PartitionReassignment,
    UnreadableStateChange,
)
"""Every event of a watch. All of them are raised after all watches were lost."""


@dataclass(frozen=True)
class ReassignedPartitionsIsrChange(Event):
    """Raised by the watch on the state znode of a partition that is being reassigned: the target may be in sync."""

    partition: TopicPartition

    @property
    def cause(self) -> str:
        return f"the state of {self.partition} changed, which is being reassigned"


# --- From brokers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeaderAndIsrAnswered(Event):
    """Raised by the outbox: a broker's response. `errors` has every partition of the request, those with NONE
    included; `log_ends` covers partitions without a leader; `took_s` counts from the moment the request was queued."""

    broker_id: int
    broker_epoch: int
    errors: Mapping[TopicPartition, ErrorCode]
    log_ends: tuple[LogEndReported, ...] = ()
    took_s: float = 0.0

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} answered LeaderAndIsr for {counted(len(self.errors), 'partition')}"

    @property
    def details(self) -> dict[str, object]:
        return _answer("LeaderAndIsr", self.broker_id, self.took_s, self.errors) | {"partitions": len(self.errors)}


@dataclass(frozen=True)
class StopReplicaAnswered(Event):
    """Raised by the outbox: a broker's response to a StopReplica that deletes. `errors`: see above."""

    broker_id: int
    broker_epoch: int
    errors: Mapping[TopicPartition, ErrorCode]
    took_s: float = 0.0

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} answered StopReplica for {counted(len(self.errors), 'partition')}"

    @property
    def details(self) -> dict[str, object]:
        return _answer("StopReplica", self.broker_id, self.took_s, self.errors) | {"partitions": len(self.errors)}


@dataclass(frozen=True)
class UpdateMetadataAnswered(Event):
    """Raised by the outbox: a broker's response (Kafka's UpdateMetadataResponseReceived). It changes nothing, but the
    timeline then shows when each broker had the metadata."""

    broker_id: int
    error: ErrorCode
    took_s: float = 0.0

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} answered UpdateMetadata"

    @property
    def details(self) -> dict[str, object]:
        errors = {} if self.error is ErrorCode.NONE else {"all": self.error}
        return _answer("UpdateMetadata", self.broker_id, self.took_s, errors)


@dataclass(frozen=True)
class TopicDeletionsHeard(Event):
    """Raised by the outbox: a broker has answered an UpdateMetadata that reports deleted topics."""

    broker_id: int
    broker_epoch: int
    topics: tuple[str, ...]

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} knows of the deletion of {', '.join(self.topics[:10])}"


@dataclass(frozen=True)
class Deposed(Event):
    """Raised by the outbox: a broker knows of a controller with a higher epoch."""

    broker_id: int

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} knows of a newer controller (STALE_CONTROLLER_EPOCH)"


@dataclass(frozen=True)
class SenderBroke(Event):
    """Raised by the outbox if one of its tasks failed, which is a bug. It ends the tenure."""

    failure: BaseException


@dataclass(frozen=True)
class BrokerSuspected(Event):
    """Raised by crash detection: the connection to the broker in that epoch closed and cannot be reopened."""

    broker_id: int
    broker_epoch: int
    reason: str
    facts: Mapping[str, object] = field(default_factory=dict)
    """For the timeline: since when it has been unreachable."""

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} (epoch {self.broker_epoch}) is suspected: {self.reason}"

    @property
    def details(self) -> dict[str, object]:
        return {"broker": self.broker_id, "reason": self.reason, **self.facts}


def _answer(request: str, broker_id: int, took_s: float, errors: Mapping[Any, ErrorCode]) -> dict[str, object]:
    details: dict[str, object] = {"request": request, "broker": broker_id, "took_ms": round(took_s * 1_000, 3)}
    failed = [f"{what}: {error.name}" for what, error in errors.items() if error is not ErrorCode.NONE]
    return details | ({"errors": failed[:_SHOWN_ERRORS]} if failed else {})


# --- From the broker that the controller runs in ------------------------------------------------------------------


@dataclass(frozen=True)
class UncleanLeaderElectionEnable(Event):
    """Raised when unclean elections may have become allowed."""

    topic: str | None
    """None: in all topics that use the brokers' default."""

    @property
    def cause(self) -> str:
        where = "topics that do not set it" if self.topic is None else f"topic {self.topic}"
        return f"unclean.leader.election.enable may have changed for {where}"


# --- From administrators, through the broker that the controller runs in -----------------------------------------


class Reply(Protocol[Result]):
    """The part of asyncio.Future that a request needs; this module must not import asyncio."""

    def done(self) -> bool: ...

    def set_result(self, result: Result, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


@dataclass(frozen=True)
class AdminRequest(Event, Generic[Result]):
    """An event whose sender awaits `reply`. The handler must call `answer` or `fail`; only the first call counts."""

    reply: Reply[Result]

    def answer(self, result: Result) -> None:
        if not self.reply.done():
            self.reply.set_result(result)

    def fail(self, failure: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(failure)


@dataclass(frozen=True)
class CreateTopicsRequest(AdminRequest[list[CreatableTopicResult]]):
    """Raised by the handler of the CreateTopics API."""

    topics: Sequence[CreatableTopic]
    validate_only: bool

    @property
    def cause(self) -> str:
        verb = "validate" if self.validate_only else "create"
        return f"a request came to {verb} the topics {', '.join(topic.name for topic in self.topics[:10])}"


@dataclass(frozen=True)
class CreatePartitionsRequest(AdminRequest[list[CreatePartitionsTopicResult]]):
    """Raised by the handler of the CreatePartitions API."""

    topics: Sequence[CreatePartitionsTopic]
    validate_only: bool

    @property
    def cause(self) -> str:
        verb = "validate" if self.validate_only else "add"
        return f"a request came to {verb} partitions of {', '.join(f'{t.name} ({t.count})' for t in self.topics[:10])}"


@dataclass(frozen=True)
class DeleteTopicsRequest(AdminRequest[list[DeletableTopicResult]]):
    """Raised by the handler of the DeleteTopics API."""

    topics: Mapping[str, str]
    """The id of the topic by name; an empty id is not checked."""

    @property
    def cause(self) -> str:
        return f"a request came to delete the topics {', '.join(list(self.topics)[:10])}"


@dataclass(frozen=True)
class ElectLeadersRequest(AdminRequest[dict[TopicPartition, ElectionOutcome]]):
    """Raised by the handler of the ElectLeaders API."""

    election_type: ElectionType
    partitions: Sequence[TopicPartition] | None
    """None: all."""
    is_wanted: Callable[[], bool]
    """The client still waits for the response."""

    @property
    def cause(self) -> str:
        which = "all partitions" if self.partitions is None else counted(len(self.partitions), "partition")
        return f"a request came for {self.election_type.name.lower()} elections in {which}"


@dataclass(frozen=True)
class AutoLeaderRebalance(Event):
    """Raised every `leader.imbalance.check.interval.seconds` (Kafka's AutoPreferredReplicaLeaderElection)."""

    cause = "it is time to see whether leaders are balanced"


@dataclass(frozen=True)
class ClusterFormed(Event):
    """Raised when no further broker has joined for a while, and after a topic was removed."""

    cause = "brokers have come or a topic is gone, so the brokers' own topics may have to be created"


@dataclass(frozen=True)
class AlterPartitionReassignments(AdminRequest[list[ReassignableTopicResponse]]):
    """Raised by the handler of the AlterPartitionReassignments API."""

    topics: Sequence[ReassignableTopic]

    @property
    def cause(self) -> str:
        return f"a request came to reassign partitions of {', '.join(topic.name for topic in self.topics[:10])}"


@dataclass(frozen=True)
class ListPartitionReassignments(AdminRequest[list[OngoingTopicReassignment]]):
    """Raised by the handler of the ListPartitionReassignments API."""

    is_question: ClassVar[bool] = True
    topics: Sequence[ListPartitionReassignmentsTopic] | None

    cause = "a request came for the reassignments that are under way"


@dataclass(frozen=True)
class ControlledShutdownRequest(AdminRequest[list[TopicPartition]]):
    """Raised by the handler of the ControlledShutdown API. The reply has the partitions that the broker still leads or
    is needed for."""

    broker_id: int
    broker_epoch: int

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} (epoch {self.broker_epoch}) asks for a controlled shutdown"

    @property
    def details(self) -> dict[str, object]:
        return {"broker": self.broker_id}


# --- From the controller itself, as follow-ups of a plan ---------------------------------------------------------


@dataclass(frozen=True)
class ResumeDeletions(Event):
    """Raised by plans after which topic deletions may be able to continue (Kafka's resumeDeletions)."""

    cause = "topic deletions may be able to go on"


@dataclass(frozen=True)
class ResumeReassignments(Event):
    """Raised after changes of the cluster state that may let a reassignment continue."""

    cause = "reassignments may be able to go on"

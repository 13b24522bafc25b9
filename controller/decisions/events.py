"""What can happen to a controller: one class per event, what raises it, and what it carries.

Every event carries `epoch`, the controller epoch of the tenure it was raised in; the event loop drops what
belongs to another. `cause` is the sentence that the timeline shows.

Events that announce a change in ZooKeeper (`WATCHED`) carry no data on purpose: a watch says that something changed,
never what, and by the time the event is taken it may have changed again. The handler reads, which also sets the next
watch, and acts on the difference to its picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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


class ElectionOutcome(NamedTuple):
    """What came of an election that was asked for."""

    error: ErrorCode
    message: str = ""
    leader_epoch: int = NO_EPOCH
    """That of the leader who was elected, or needs not be: clients may not have been told of it yet, where the last
    controller elected it."""


_SHOWN_ERRORS = 20
"""Of an answer, in the timeline."""


@dataclass(frozen=True)
class Event:
    epoch: int
    is_question: ClassVar[bool] = False
    """It changes nothing: the timeline leaves it out, unless it fails."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def cause(self) -> str:
        return self.name

    @property
    def details(self) -> dict[str, object]:
        """Numbers for the timeline, by name."""
        return {}


# --- From the election, and from the session -------------------------------------------------------------------


@dataclass(frozen=True)
class Startup(Event):
    """Raised by taking office, once, as the first event of a tenure (Kafka's onControllerFailover)."""

    epoch_version: int = 0
    """The data version of `/controller_epoch` as the election left it: every write of the tenure checks it."""

    @property
    def cause(self) -> str:
        return f"elected controller with epoch {self.epoch}"

    @property
    def details(self) -> dict[str, object]:
        return {"epoch_version": self.epoch_version}


@dataclass(frozen=True)
class SessionReconnected(Event):
    """Raised by the session when it is connected again: every watch is gone, so everything is read anew."""

    @property
    def cause(self) -> str:
        return "connected to ZooKeeper again; all watches are set anew"


# --- From watches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokerChange(Event):
    """Raised by the watch on the children of `/brokers/ids`."""

    @property
    def cause(self) -> str:
        return "/brokers/ids changed"


@dataclass(frozen=True)
class TopicChange(Event):
    """Raised by the watch on the children of `/brokers/topics`."""

    @property
    def cause(self) -> str:
        return "/brokers/topics changed"


@dataclass(frozen=True)
class DeleteTopics(Event):
    """Raised by the watch on the children of `/admin/delete_topics`."""

    @property
    def cause(self) -> str:
        return "/admin/delete_topics changed"


@dataclass(frozen=True)
class IsrChange(Event):
    """Raised by the watch on the children of `/isr_change_notification`: leaders have changed ISRs."""

    @property
    def cause(self) -> str:
        return "/isr_change_notification changed"


@dataclass(frozen=True)
class LogDirFailure(Event):
    """Raised by the watch on the children of `/log_dir_event_notification`: brokers have lost log directories."""

    @property
    def cause(self) -> str:
        return "/log_dir_event_notification changed"


@dataclass(frozen=True)
class PartitionModifications(Event):
    """Raised by the watches on the data of `/brokers/topics/T`, one for each topic."""

    topics: tuple[str, ...] | None = None
    """None: any topic may have changed."""

    @property
    def cause(self) -> str:
        if self.topics is None:
            return "topics may have changed"
        return f"/brokers/topics/{', '.join(self.topics[:10])} changed, or is to be watched"


@dataclass(frozen=True)
class PreferredReplicaElection(Event):
    """Raised by the watch on `/admin/preferred_replica_election`, and once office is taken."""

    @property
    def cause(self) -> str:
        return "/admin/preferred_replica_election may ask for an election"


@dataclass(frozen=True)
class PartitionReassignment(Event):
    """Raised by the watch on `/admin/reassign_partitions` (Kafka's ZkPartitionReassignment), and when office is taken:
    reassignments that are under way are resumed."""

    @property
    def cause(self) -> str:
        return "/admin/reassign_partitions may ask for a reassignment, or one is under way"


@dataclass(frozen=True)
class UnreadableStateChange(Event):
    """Raised by the watch on the state znode of a partition that made no sense when it was read."""

    @property
    def cause(self) -> str:
        return "the state of a partition that made no sense has changed"


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
"""Every event of a watch. Whatever ends all watches raises all of them."""


@dataclass(frozen=True)
class ReassignedPartitionsIsrChange(Event):
    """Raised by the watch on the state znode of a partition that is being reassigned: its ISR may have what it waits
    for."""

    partition: TopicPartition

    @property
    def cause(self) -> str:
        return f"the state of {self.partition} changed, which is being reassigned"


# --- From brokers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeaderAndIsrAnswered(Event):
    """Raised by the outbox: a broker's answer. `errors` has every partition that was sent, including those with
    NONE; `log_ends` is for those without a leader; `took_s` counts from when the request was queued."""

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
    """Raised by the outbox: a broker's answer to a StopReplica that deletes. `errors` as above."""

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
    """Raised by the outbox: a broker's answer, which changes nothing (Kafka's UpdateMetadataResponseReceived). It is an
    event so that the timeline says when each broker knew."""

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
    """Raised by the outbox: a broker's answer to an UpdateMetadata that says that topics are gone."""

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
    """Raised by the outbox: one of its own tasks failed, which is a bug. Ends the tenure."""

    failure: BaseException


@dataclass(frozen=True)
class BrokerSuspected(Event):
    """Raised by crash detection: the connection to that run of the broker closed, and cannot be made again."""

    broker_id: int
    broker_epoch: int
    reason: str
    lasted_ms: float = 0.0
    """How long it could not be."""

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} (epoch {self.broker_epoch}) is suspected: {self.reason}"

    @property
    def details(self) -> dict[str, object]:
        return {"broker": self.broker_id, "reason": self.reason, "lasted_ms": round(self.lasted_ms, 3)}


def _answer(request: str, broker_id: int, took_s: float, errors: Mapping[Any, ErrorCode]) -> dict[str, object]:
    details: dict[str, object] = {"request": request, "broker": broker_id, "took_ms": round(took_s * 1_000, 3)}
    failed = [f"{what}: {error.name}" for what, error in errors.items() if error is not ErrorCode.NONE]
    return details | ({"errors": failed[:_SHOWN_ERRORS]} if failed else {})


# --- From the broker that the controller runs in ------------------------------------------------------------------


@dataclass(frozen=True)
class UncleanLeaderElectionEnable(Event):
    """Raised where any replica may lead from now on, if no other can: in one topic, or by the brokers' default."""

    topic: str | None

    @property
    def cause(self) -> str:
        where = "topics that do not set it" if self.topic is None else f"topic {self.topic}"
        return f"unclean.leader.election.enable may have changed for {where}"


# --- From administrators, through the broker that the controller runs in -----------------------------------------


@dataclass(frozen=True)
class AdminRequest(Event):
    """An event that somebody waits for. A handler that does not call `answer` must call `fail`; after either, both do
    nothing."""

    fail: Callable[[Exception], None]


@dataclass(frozen=True)
class CreateTopicsRequest(AdminRequest):
    """Raised by the handler of the CreateTopics API."""

    answer: Callable[[list[CreatableTopicResult]], None]
    topics: Sequence[CreatableTopic]
    validate_only: bool

    @property
    def cause(self) -> str:
        verb = "validate" if self.validate_only else "create"
        return f"a request came to {verb} the topics {', '.join(topic.name for topic in self.topics[:10])}"


@dataclass(frozen=True)
class CreatePartitionsRequest(AdminRequest):
    """Raised by the handler of the CreatePartitions API."""

    answer: Callable[[list[CreatePartitionsTopicResult]], None]
    topics: Sequence[CreatePartitionsTopic]
    validate_only: bool

    @property
    def cause(self) -> str:
        verb = "validate" if self.validate_only else "add"
        return f"a request came to {verb} partitions of {', '.join(f'{t.name} ({t.count})' for t in self.topics[:10])}"


@dataclass(frozen=True)
class DeleteTopicsRequest(AdminRequest):
    """Raised by the handler of the DeleteTopics API."""

    answer: Callable[[list[DeletableTopicResult]], None]
    topics: Mapping[str, str]
    """Names, and the id of the topic that is meant; empty: whichever has the name."""

    @property
    def cause(self) -> str:
        return f"a request came to delete the topics {', '.join(list(self.topics)[:10])}"


@dataclass(frozen=True)
class ElectLeadersRequest(AdminRequest):
    """Raised by the handler of the ElectLeaders API."""

    answer: Callable[[dict[TopicPartition, ElectionOutcome]], None]
    election_type: ElectionType
    partitions: Sequence[TopicPartition] | None
    """None: all."""
    is_wanted: Callable[[], bool]
    """Whoever asks is still there."""

    @property
    def cause(self) -> str:
        which = "all partitions" if self.partitions is None else counted(len(self.partitions), "partition")
        return f"a request came for {self.election_type.name.lower()} elections in {which}"


# --- From the controller itself: by its timer, and as follow-ups of a plan ---------------------------------------


@dataclass(frozen=True)
class AutoLeaderRebalance(Event):
    """Raised every `leader.imbalance.check.interval.seconds` (Kafka's AutoPreferredReplicaLeaderElection)."""

    @property
    def cause(self) -> str:
        return "it is time to see whether leaders are balanced"


@dataclass(frozen=True)
class ClusterFormed(Event):
    """Raised once no further broker has come for a while, and when a topic is gone."""

    @property
    def cause(self) -> str:
        return "brokers have come or a topic is gone, so the brokers' own topics may have to be created"


@dataclass(frozen=True)
class AlterPartitionReassignments(AdminRequest):
    """Raised by the handler of the AlterPartitionReassignments API."""

    answer: Callable[[list[ReassignableTopicResponse]], None]
    topics: Sequence[ReassignableTopic]

    @property
    def cause(self) -> str:
        return f"a request came to reassign partitions of {', '.join(topic.name for topic in self.topics[:10])}"


@dataclass(frozen=True)
class ListPartitionReassignments(AdminRequest):
    """Raised by the handler of the ListPartitionReassignments API."""

    is_question: ClassVar[bool] = True
    answer: Callable[[list[OngoingTopicReassignment]], None]
    topics: Sequence[ListPartitionReassignmentsTopic] | None

    @property
    def cause(self) -> str:
        return "a request came for the reassignments that are under way"


@dataclass(frozen=True)
class ControlledShutdownRequest(AdminRequest):
    """Raised by the handler of the ControlledShutdown API: that run of the broker is about to stop."""

    answer: Callable[[list[TopicPartition]], None]
    """Takes the partitions that remain with the broker."""
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
    """Raised by plans after which a topic deletion may be able to go on (Kafka's resumeDeletions)."""

    @property
    def cause(self) -> str:
        return "topic deletions may be able to go on"


@dataclass(frozen=True)
class ResumeReassignments(Event):
    """Raised where the picture has changed so that a reassignment may be able to go on."""

    @property
    def cause(self) -> str:
        return "reassignments may be able to go on"

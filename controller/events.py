"""What can happen to a controller: one class per event, what raises it, and what it carries.

Every event carries `epoch`, the controller epoch of the tenure it was raised in; the event loop drops what
belongs to another. `cause` is the sentence that the timeline shows.

Events that announce a change in ZooKeeper (`BrokerChange`, `TopicChange`, `DeleteTopics`, `IsrChange`,
`LogDirFailure`) carry no data on purpose: a watch says that something changed, never what, and by the time the event is
taken it may have changed again. The handler reads, which also sets the next watch, and acts on the difference to its
picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minibroker.controller.cluster_state import LogEndReported
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatableTopic, CreatableTopicResult, DeletableTopicResult
from minibroker.protocol.model import TopicPartition


@dataclass(frozen=True)
class Event:
    epoch: int

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def cause(self) -> str:
        return self.name


# --- From the election, and from the session -------------------------------------------------------------------


@dataclass(frozen=True)
class Startup(Event):
    """Raised by taking office, once, as the first event of a tenure (Kafka's onControllerFailover)."""

    @property
    def cause(self) -> str:
        return f"elected controller with epoch {self.epoch}"


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


# --- From brokers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeaderAndIsrAnswered(Event):
    """Raised by the outbox: a broker's answer. `errors` has every partition that was sent, including those with
    NONE; `log_ends` is for those without a leader."""

    broker_id: int
    broker_epoch: int
    errors: Mapping[TopicPartition, ErrorCode]
    log_ends: tuple[LogEndReported, ...] = ()

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} answered LeaderAndIsr for {len(self.errors)} partitions"


@dataclass(frozen=True)
class StopReplicaAnswered(Event):
    """Raised by the outbox: a broker's answer to a StopReplica that deletes. `errors` as above."""

    broker_id: int
    broker_epoch: int
    errors: Mapping[TopicPartition, ErrorCode]

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} answered StopReplica for {len(self.errors)} partitions"


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
    """Raised by crash detection: the connection to that run of the broker closed and cannot be made again."""

    broker_id: int
    broker_epoch: int
    reason: str

    @property
    def cause(self) -> str:
        return f"broker {self.broker_id} (epoch {self.broker_epoch}) is suspected: {self.reason}"


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
        return f"a request to {verb} the topics {', '.join(topic.name for topic in self.topics[:10])}"


@dataclass(frozen=True)
class DeleteTopicsRequest(AdminRequest):
    """Raised by the handler of the DeleteTopics API."""

    answer: Callable[[list[DeletableTopicResult]], None]
    topics: Mapping[str, str]
    """Names, and the id of the topic that is meant; empty: whichever has the name."""

    @property
    def cause(self) -> str:
        return f"a request to delete the topics {', '.join(list(self.topics)[:10])}"


# --- From the controller itself, as follow-ups of a plan ---------------------------------------------------------


@dataclass(frozen=True)
class ResumeDeletions(Event):
    """Raised by plans after which a topic deletion may be able to go on (Kafka's resumeDeletions)."""

    @property
    def cause(self) -> str:
        return "topic deletions may be able to go on"

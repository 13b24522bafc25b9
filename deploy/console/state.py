"""What the console has read of a cluster. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from minibroker.client.administering.requests import ClusterDescription
from minibroker.client.administering.timeline import Entry
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.group_details import GroupDetails
from minibroker.deploy.console.sessions import Session
from minibroker.deploy.local.processes import ProcessState
from minibroker.protocol.faults import Faults
from minibroker.protocol.model import TopicPartition


class Move(NamedTuple):
    """A partition whose replicas are being moved."""

    adding: tuple[int, ...]
    removing: tuple[int, ...]
    sizes: Mapping[int, int]
    """Bytes of the replicas on brokers that answered."""


class ClusterState(NamedTuple):
    description: ClusterDescription
    topics: Mapping[str, TopicDescription]
    behind: Mapping[int, Mapping[TopicPartition, int]]
    """For each broker that answered: how many committed records each of its replicas lacks, as far as it knows."""
    ends: Mapping[TopicPartition, int]
    """High watermarks of the partitions that the page shows."""
    min_isr: Mapping[str, int]
    """`min.insync.replicas` of topics with replicas out of sync."""
    sessions: Mapping[int, Session] = MappingProxyType({})
    """Of registered brokers, and of others with replicas."""
    moves: Mapping[TopicPartition, Move] = MappingProxyType({})
    """Reassignments in progress, as the controller listed them a few seconds ago at most."""
    paused: frozenset[int] = frozenset()
    """Brokers of this machine whose processes are paused."""
    running: frozenset[int] = frozenset()
    """Brokers of this machine whose processes run."""
    gone: frozenset[int] = frozenset()
    """Brokers of this machine whose processes do not exist."""
    zookeeper: ProcessState | None = None
    """Of ZooKeeper's process, if it is one of this machine."""
    last_errors: Mapping[int, str] = MappingProxyType({})
    """The errors with which those of `gone` ended that printed one."""
    faults: Mapping[int, Faults] = MappingProxyType({})
    """The faults that brokers of this machine were ordered to have."""
    hides_topics: bool = False
    """Whether the console's user may not see all topics."""


class Timeline(NamedTuple):
    version: int
    """Increases with each change."""
    entries: Sequence[Entry]
    """Of all brokers, in order."""
    missing: Mapping[int, str]
    """Brokers whose entries are missing, and why."""


class Groups(NamedTuple):
    details: tuple[GroupDetails, ...]
    """Of the groups that the page shows."""
    failed: Mapping[str, str]
    """Groups of the page that could not be read, and why."""
    selected: int
    """Groups that the query selects, on all pages."""
    silent: tuple[int, ...]
    """Brokers that did not list their groups."""
    hides_groups: bool = False
    """Whether there may be groups that the console's user may not see, if it sees none."""
    missing_rights: tuple[str, ...] = ()
    """Sentences: which right this user lacks to see the offsets of a group, and the remedy."""

    @property
    def lags(self) -> dict[str, int | None]:
        """Those of the groups that the page shows. None: it is not known."""
        return {**dict.fromkeys(self.failed), **{each.group.group: lag_of(each) for each in self.details}}


def lag_of(details: GroupDetails) -> int | None:
    """Return the lag of a group; None if it has committed nothing, or the end of a partition is not known."""
    if any(each.committed is not None and each.end_offset is None for each in details.partitions):
        return None
    return details.lag

"""`minibroker scenario record`: what is done to the processes of a local cluster, written as a scenario file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import ZOOKEEPER, Member
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.model import TopicPartition

_LOOK_EVERY_S = 0.02
_ASK_EVERY_S = 1.0


class Recorded(NamedTuple):
    """Something that was done to a process."""

    at_s: float
    verb: str
    member: Member
    role: str | None
    """The elected office that it had before, as `controller` or `leader:orders-0`."""


class TopicShape(NamedTuple):
    name: str
    partitions: int
    replicas: int


def verb_of(before: ProcessState, after: ProcessState, was_stopped: bool) -> str | None:
    """Return what was done to a process whose state has changed. Pure."""
    if before is after:
        return None
    if after is ProcessState.GONE:
        return "stop" if was_stopped else "kill"
    if before is ProcessState.GONE:
        return "start"
    return "pause" if after is ProcessState.PAUSED else "resume"


def role_of(member: Member, view: ClusterView) -> str | None:
    """Return the office of a broker, by which a scenario finds it again. Pure."""
    if member == view.controller_id:
        return "controller"
    for partition, state in view.partitions.items():
        if state.leader_id == member and not partition.topic.startswith("__"):
            return f"leader:{partition}"
    return None


def shapes(partitions: Mapping[TopicPartition, Sequence[int]]) -> list[TopicShape]:
    """Return the topics, except internal ones, from the replicas of all partitions. Pure."""
    found: dict[str, TopicShape] = {}
    for partition, replicas in partitions.items():
        if not partition.topic.startswith("__"):
            count = found[partition.topic].partitions if partition.topic in found else 0
            found[partition.topic] = TopicShape(partition.topic, count + 1, len(replicas))
    return list(found.values())


def written(brokers: int, topics: Sequence[TopicShape], recorded: Sequence[Recorded]) -> str:
    """Return the text of a scenario file. Pure.

    A broker that had an office when it was first hit is found by that office and named, since elections may have other
    winners in the next run."""
    lines = ['name = "Recorded"', 'about = "Written by minibroker scenario record."', "", "[cluster]"]
    lines += [f"brokers = {brokers}"]
    for topic in topics or [TopicShape("orders", 3, min(3, brokers))]:
        lines += ["", "[[topics]]", f'name = "{topic.name}"', f"partitions = {topic.partitions}"]
        lines += [f"replicas = {topic.replicas}"]
    for topic in topics or [TopicShape("orders", 3, min(3, brokers))]:
        lines += ["", "[[clients]]", f'name = "to-{topic.name}"', f'produces = "{topic.name}"']
    names: dict[Member, str] = {}
    began_s = recorded[0].at_s if recorded else 0.0
    for done in recorded:
        who = names.get(done.member, done.role or str(done.member))
        at_ms = 1_000 + (done.at_s - began_s) * 1_000
        lines += ["", "[[steps]]", f'at = "{at_ms:.0f} ms"', f'do = "{done.verb} {who}"']
        if done.role is not None and done.member not in names:
            names[done.member] = f"broker-{done.member}"
            lines += [f'as = "broker-{done.member}"']
    return "\n".join([*lines, "", "[expect]", "nothing_lost = true"]) + "\n"


def record(cluster: LocalCluster, goes_on: Callable[[], bool], tell: Callable[[str], None]) -> str:
    """Watch the processes of a running cluster while `goes_on` returns true, and return the scenario. Raises
    LaunchError."""
    known = cluster.file()
    members: list[Member] = [entry.id for entry in known.brokers]
    if known.zookeeper.port is not None:
        members.append(ZOOKEEPER)
    states = {member: cluster.state_of(member) for member in members}
    view = cluster.view()
    topics = shapes({partition: state.replica_nodes for partition, state in view.partitions.items()})
    asked_s = time.monotonic()
    recorded: list[Recorded] = []
    while goes_on():
        time.sleep(_LOOK_EVERY_S)
        changed = False
        for member in members:
            after = cluster.state_of(member)
            gone = isinstance(member, int) and after is ProcessState.GONE
            was_stopped = gone and isinstance(member, int) and cluster.handed_over(member) is not None
            verb = verb_of(states[member], after, was_stopped)
            states[member] = after
            if verb is not None:
                role = role_of(member, view) if verb in ("kill", "stop", "pause") else None
                recorded.append(Recorded(time.monotonic(), verb, member, role))
                tell(f"{verb} {member}" + (f" ({role})" if role else ""))
                changed = True
        if changed or time.monotonic() > asked_s + _ASK_EVERY_S:
            newer = cluster.view()
            view, asked_s = newer if newer.brokers else view, time.monotonic()
    return written(len(known.brokers), topics, recorded)

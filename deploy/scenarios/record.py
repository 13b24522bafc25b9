"""`minibroker scenario record`: what is done to a local cluster, written as a scenario file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from minibroker.deploy import journal
from minibroker.deploy.journal import OTHER, WHO, Said
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import (
    ZOOKEEPER,
    BrokerId,
    CoordinatorOf,
    Elected,
    FollowerOf,
    LeaderOf,
    MalformedWho,
    Member,
    TransactionsOf,
    Who,
    parse_who,
)
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

_LOOK_EVERY_S = 0.02
_ASK_EVERY_S = 1.0
_VERBS = ("kill", "stop", "start", "pause", "resume")
"""Commands whose effect on a process is seen."""


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


_SAME = {"kill": "end", "stop": "end"}
"""Verbs that cannot always be told apart by a look at the process."""
_SLACK_S = 10.0
"""A change is seen at most this long after its command has ended: meanwhile the recorder may ask brokers that hang."""


class Done(NamedTuple):
    """A step of the file."""

    at_s: float
    sentence: str | None
    """With the places of `journal`; None: no action of scenario files does it."""
    who: str
    other: str | None
    members: Sequence[Member]
    command: str | None
    """The words of the command; None: something else has hit the process."""


def merged(changes: Sequence[Recorded], said: Sequence[Said]) -> list[Done]:
    """Return the steps in the order of their times: each command in its own words, and the changes of processes that no
    command has made. Pure.

    A broker that ends on its own, because its disk is full or broken, is left out: it does so again."""
    found: list[Done] = []
    rest = list(changes)
    for each in said:
        verb = each.command.partition(" ")[0]
        of_each = (next((c for c in rest if c.member == m and _is_of(c, verb, each)), None) for m in each.members)
        own = [change for change in of_each if change is not None]
        rest = [change for change in rest if change not in own]
        at_s = min((change.at_s for change in own), default=each.began_s)
        found.append(Done(at_s, each.sentence, each.who, each.other, each.members, each.command))
    for change in rest:
        if change.verb != "kill" or not _has_failed_disk(change, said):
            who = change.role or str(change.member)
            found.append(Done(change.at_s, f"{change.verb} {WHO}", who, None, [change.member], None))
    return sorted(found, key=lambda done: done.at_s)


def _is_of(change: Recorded, verb: str, said: Said) -> bool:
    is_same = _SAME.get(change.verb, change.verb) == _SAME.get(verb, verb)
    return is_same and said.began_s <= change.at_s <= said.ended_s + _SLACK_S


def _has_failed_disk(change: Recorded, said: Sequence[Said]) -> bool:
    of_member = [each for each in said if change.member in each.members and each.began_s <= change.at_s]
    last = [each.command for each in of_member if each.command.startswith(("heal", "fault fill-disk", "fault break"))]
    return bool(last) and last[-1].startswith("fault")


def written(brokers: int, topics: Sequence[TopicShape], steps: Sequence[Done]) -> str:
    """Return the text of a scenario file. Pure.

    A broker that was found by an office is named, since elections may have other winners in the next run."""
    shaped = topics or [TopicShape("orders", 3, min(3, brokers))]
    lines = ['name = "Recorded"', 'about = "Written by minibroker scenario record."', "", "[cluster]"]
    lines += [f"brokers = {brokers}"]
    for topic in shaped:
        lines += ["", "[[topics]]", f'name = "{topic.name}"', f"partitions = {topic.partitions}"]
        lines += [f"replicas = {topic.replicas}"]
    for topic in shaped:
        lines += ["", "[[clients]]", f'name = "to-{topic.name}"', f'produces = "{topic.name}"']
    names: dict[Member, str] = {}
    began_s = steps[0].at_s if steps else 0.0
    for done in steps:
        who = _words(done.who, names, shaped)
        other = None if done.other is None else _words(done.other, names, shaped)
        if done.sentence is None or (OTHER in done.sentence and None in (who, other)):
            lines += ["", f"# Not recorded, as no sentence does it: {_comment(done)}"]
            continue
        if who is None:
            lines += ["", f"# {_comment(done)}"]
            who = _of_members(done.members, names)
        at_ms = 1_000 + (done.at_s - began_s) * 1_000
        sentence = done.sentence.replace(WHO, who).replace(OTHER, other or "")
        lines += ["", "[[steps]]", f'at = "{at_ms:.0f} ms"', f'do = "{sentence}"']
        is_found = WHO in done.sentence and isinstance(_parsed(who), Elected)
        if is_found and done.members and done.members[0] not in names:
            names[done.members[0]] = f"broker-{done.members[0]}"
            lines += [f'as = "broker-{done.members[0]}"']
    return "\n".join([*lines, "", "[expect]", "nothing_lost = true"]) + "\n"


def _words(who: str, names: Mapping[Member, str], topics: Sequence[TopicShape]) -> str | None:
    """Return how a scenario with these topics says it, or None if it cannot: it has no groups and transactions."""
    match _parsed(who):
        case BrokerId(broker_id):
            return names.get(broker_id, who)
        case LeaderOf(partition) | FollowerOf(partition):
            is_there = any(t.name == partition.topic and partition.partition < t.partitions for t in topics)
            return who if is_there else None
        case CoordinatorOf() | TransactionsOf():
            return None
    return who


def _comment(done: Done) -> str:
    """Return the command on one line; names of groups may have any characters."""
    return "minibroker " + "".join(char if char.isprintable() else "?" for char in done.command or "")


def _of_members(members: Sequence[Member], names: Mapping[Member, str]) -> str:
    return names.get(members[0], str(members[0]))


def _parsed(who: str) -> Who | None:
    """Return None for a sentence without WHO, and for the name of an earlier step."""
    try:
        return parse_who(who)
    except MalformedWho:
        return None


def record(cluster: LocalCluster, goes_on: Callable[[], bool], tell: Callable[[str], None]) -> str:
    """Watch the processes of a running cluster, and the commands of other terminals, while `goes_on` returns true, and
    return the scenario. Raises LaunchError."""
    known = cluster.file()
    members: list[Member] = [entry.id for entry in known.brokers]
    if known.zookeeper.port is not None:
        members.append(ZOOKEEPER)
    states = {member: cluster.state_of(member) for member in members}
    view = cluster.view()
    found = _shapes_by_name(view)
    asked_s = time.monotonic()
    recorded: list[Recorded] = []
    said: list[Said] = []
    journal.begin(cluster.directory)
    try:
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
                    tell(f"{verb} {member}")
                    changed = True
            heard = journal.read(cluster.directory)
            for each in heard[len(said) :]:
                if each.sentence is None:
                    tell(f"warning: no sentence of scenario files does this, so it becomes a comment: {each.command}")
                elif each.command.partition(" ")[0] not in _VERBS:
                    tell(each.command)
            said = heard
            if changed or time.monotonic() > asked_s + _ASK_EVERY_S:
                newer = cluster.view()
                view, asked_s = newer if newer.brokers else view, time.monotonic()
                found |= _shapes_by_name(view)
    finally:
        journal.end(cluster.directory)
    steps = merged(recorded, said)
    tell(f"recorded {counted(len(steps), 'command')}" + ("" if steps else ": the file has no steps"))
    return written(len(known.brokers), list(found.values()), steps)


def _shapes_by_name(view: ClusterView) -> dict[str, TopicShape]:
    replicas = {partition: state.replica_nodes for partition, state in view.partitions.items()}
    return {shape.name: shape for shape in shapes(replicas)}

"""A controller's timeline in words, for readers who are new to controllers. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from minibroker.client.administering.timeline import Entry
from minibroker.protocol.model import INTERNAL_TOPICS, NO_LEADER
from minibroker.protocol.words import all_of, counted, says_full_disk

SHOWN = 8
"""Lines of one kind; `--format json` has more."""
INDENT = " " * 4
_MORE = re.compile(r"and (\d+) more")


class Told(NamedTuple):
    text: str
    """One or two sentences."""
    details: tuple[str, ...] = ()


def entry_lines(entry: Entry) -> list[str]:
    """Return a line with the event, and indented lines with its effects."""
    told = tell(entry)
    where = f"{clock_time(entry['time_ms'])}  broker {entry['controller']}, epoch {entry['epoch']}:"
    return [f"{where} {told.text}", *(INDENT + detail for detail in told.details)]


def tell(entry: Entry) -> Told:
    """Return the event and its effects, in order."""
    return Told(sentence(entry), tuple(_details(entry)))


def clock_time(time_ms: int) -> str:
    """Return the time of day, UTC."""
    return _moment(time_ms).strftime("%H:%M:%S.") + f"{time_ms % 1_000:03}"


def time_of_day(time_ms: int) -> str:
    """Return the time of day to the second, with its zone."""
    return f"{_moment(time_ms):%H:%M:%S} UTC"


def date_and_time(time_ms: int) -> str:
    return f"{_moment(time_ms):%Y-%m-%d} {clock_time(time_ms)} UTC"


def _moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(min(max(time_ms, 0), 253_402_300_799_999) // 1_000, UTC)


_FOUND_NOTHING = {
    "IsrChange": "The notifications of changed in-sync replicas (the ISR) were read; there was none.",
    "TopicChange": "The list of topics in ZooKeeper was read; nothing in it was new.",
    "DeleteTopics": "The list of topics to delete was read; nothing in it was new.",
    "LogDirFailure": "The notifications of lost log directories were read; there was none.",
    "PartitionModifications": "The partitions of topics in ZooKeeper were read; nothing was new.",
    "UnreadableStateChange": "The controller looked for states that made no sense and do now; there was none.",
    "PreferredReplicaElection": "/admin/preferred_replica_election was read; it asked for no election.",
}
"""Sentences for events of watches that had no effect. After a new connection to ZooKeeper, everything is read again, so
that such an event does not mean that something happened."""
_EFFECTS = (
    *("notes", "changes", "moves", "illegal_moves", "writes", "conflicts", "requests"),
    *("states", "adopted", "sent", "errors", "failed_disks", "failure"),
)

# --- Events --------------------------------------------------------------------------------------------------------


def sentence(entry: Entry) -> str:
    """Return a sentence with the event."""
    me, broker = f"broker {entry['controller']}", f"broker {entry.get('broker', '?')}"
    if entry["event"] in _FOUND_NOTHING and not any(entry.get(kind) for kind in _EFFECTS):
        return _FOUND_NOTHING[entry["event"]]
    match entry["event"]:
        case "Startup":
            return f"Broker {entry['controller']} is the new controller, with epoch {entry['epoch']}." + _what_it_read(
                entry
            )
        case "Resignation":
            away_ms = entry.get("away_ms")
            away = f" It had lost its connection to ZooKeeper {milliseconds(away_ms)} before." if away_ms else ""
            return f"Broker {entry['controller']} is no longer the controller: {entry['cause']}.{away}"
        case "ControllerSuspected":
            return f"Broker {entry['controller']} cannot reach {broker}, the controller ({_reason(entry)})."
        case "ControllerRemoved":
            return f"Broker {entry['controller']} has removed {broker} from office, so that another can be elected."
        case "BrokerSilent":
            return (
                f"Broker {entry['controller']} hears from {broker} for the last time. After that, fetches between the "
                f"two go unanswered, for {milliseconds(entry['lasted_ms'] - entry.get('heard_again_ms', 0.0))}."
            )
        case "SessionExpired":
            return (
                f"Broker {entry['controller']} learns that its ZooKeeper session has ended. It had lost its connection "
                f"to ZooKeeper {milliseconds(entry['away_ms'])} before."
            )
        case "BrokerStalled":
            return (
                f"Broker {entry['controller']} runs again. It answered nothing for {milliseconds(entry['lasted_ms'])}, "
                "because its process was stopped or got no processor." + unrecorded(entry)
            )
        case "ZooKeeperAway":
            return (
                f"ZooKeeper answers broker {entry['controller']} again, after {milliseconds(entry['lasted_ms'])} "
                f"without an answer. The broker's session goes on.{unrecorded(entry)}"
            )
        case "BrokerSuspected":
            return f"The controller, {me}, cannot reach {broker} ({_reason(entry)}), and removes its registration."
        case "BrokerChange":
            return _who_came_and_went(entry)
        case "LeaderAndIsrAnswered":
            what = counted(entry.get("partitions", 0), "partition")
            if entry.get("errors"):
                return f"Broker {entry.get('broker')} could not assume its role in all of {what}{_took(entry)}."
            return f"Broker {entry.get('broker')} has assumed its role in {what}{_took(entry)}."
        case "StopReplicaAnswered":
            what = counted(entry.get("partitions", 0), "copy", "copies")
            return f"Broker {entry.get('broker')} has answered the order to delete {what}{_took(entry)}."
        case "UpdateMetadataAnswered":
            return f"Broker {entry.get('broker')} has the new metadata for clients{_took(entry)}."
        case "IsrChange":
            return "Leaders have changed their in-sync replicas (the ISR)."
        case "TopicChange":
            return "The list of topics in ZooKeeper has changed."
        case "DeleteTopics":
            return "The list of topics to delete has changed."
        case "LogDirFailure":
            return " ".join(failed_disks(entry)) or "A broker has lost a log directory."
        case "ResumeDeletions":
            return "Pending deletions of topics are checked: one may be able to continue."
        case "SessionReconnected":
            return "The controller is connected to ZooKeeper again, and reads the whole state anew."
        case _:
            cause = str(entry["cause"])
            return f"{cause[:1].upper()}{cause[1:]}."


def not_running(stall: Entry) -> str:
    return f"its process was stopped or got no processor for {milliseconds(stall['lasted_ms'])}"


def unrecorded(entry: Entry) -> str:
    count = entry.get("unrecorded", 0)
    return f" {count} more in the minutes before {'is' if count == 1 else 'are'} not recorded." if count else ""


def failed_disks(entry: Entry) -> list[str]:
    """Return a sentence for each broker that has reported why it lost a log directory."""
    told = []
    for failed in entry.get("failed_disks", []):
        what = "has no space left" if says_full_disk(failed["reason"]) else "has failed"
        told.append(f"Broker {failed['broker']} reports that its log directory {what} ({failed['reason']}).")
    return told


def has_full_disk(entry: Entry, broker_id: int) -> bool:
    """Whether the broker reports in this entry that it lost a log directory because the disk is full."""
    failures = entry.get("failed_disks", [])
    return any(failed["broker"] == broker_id and says_full_disk(failed["reason"]) for failed in failures)


def _what_it_read(entry: Entry) -> str:
    if "read_at_ms" not in entry:
        return ""
    what = (
        f"{counted(len(entry['brokers']), 'broker')}, {counted(entry['topics'], 'topic')}, "
        f"{counted(entry['partitions'], 'partition')}"
    )
    return f" It has read the cluster from ZooKeeper: {what}."


def _who_came_and_went(entry: Entry) -> str:
    sentences = []
    lost, added = entry.get("lost", []), entry.get("added", [])
    again = [broker for broker in added if broker in lost]
    gone, new = ([b for b in brokers if b not in again] for brokers in (lost, added))
    if gone:
        sentences.append(f"{_brokers(gone)} {'is' if len(gone) == 1 else 'are'} gone from the cluster.")
    if again:
        sentences.append(f"{_brokers(again)} {'has' if len(again) == 1 else 'have'} registered again.")
    if new:
        sentences.append(f"{_brokers(new)} {'has' if len(new) == 1 else 'have'} joined the cluster.")
    return " ".join(sentences) or "The list of live brokers was read; all were known."


def _brokers(ids: Sequence[int]) -> str:
    return all_of("Broker", ids)


def _reason(entry: Entry) -> str:
    reason = str(entry.get("reason", entry["cause"]))
    return f"{reason}, for {milliseconds(entry['lasted_ms'])}" if entry.get("lasted_ms") else reason


def _took(entry: Entry) -> str:
    return f", {milliseconds(entry['took_ms'])} after the order was queued" if "took_ms" in entry else ""


# --- Effects -------------------------------------------------------------------------------------------------------


def _details(entry: Entry) -> Iterator[str]:
    for kind, title in (
        ("notes", "note"),
        ("illegal_moves", "refused"),
        ("conflicts", "conflict"),
        ("errors", "error"),
    ):
        yield from (f"{title}: {line}" for line in cut(entry.get(kind, [])))
    if "failure" in entry:
        yield f"failed: {entry['failure']}"
    yield from cut(_moves(entry.get("moves", [])))
    yield from cut(state_lines(entry.get("adopted", [])), entry.get("adopted_omitted", 0))
    states = entry.get("states", [])
    yield from cut(state_lines(states), entry.get("states_omitted", 0))
    yield from cut([write for write in entry.get("writes", []) if not (states and write.startswith("write "))])
    yield from cut([f"order to {order}" for order in orders(entry.get("sent", []))], entry.get("sent_omitted", 0))
    if entry["event"] == "Startup":
        yield f"every write checks that /controller_epoch is at version {entry.get('epoch_version', '?')}"
    yield from _times(entry)


def state_lines(states: Iterable[dict[str, Any]]) -> list[str]:
    """Return the states of users' partitions first, because internal topics may have many."""
    ordered = sorted(states, key=lambda state: is_internal(state["partition"]))
    return [_state_line(state) for state in ordered]


def is_internal(partition: str) -> bool:
    return partition.rpartition("-")[0] in INTERNAL_TOPICS


def _state_line(state: dict[str, Any]) -> str:
    """Return the new content of a partition's state znode, and the previous one."""
    versions = f"znode version {state['version']}"
    if "leader_before" not in state:
        return (
            f"{state['partition']}: leader {leader(state['leader'])}, in sync {numbers(state['isr'])} ({versions}, new)"
        )
    return (
        f"{state['partition']}: leader {_change(leader(state['leader_before']), leader(state['leader']))}, "
        f"in sync {_change(numbers(state['isr_before']), numbers(state['isr']))} "
        f"(leader epoch {state['leader_epoch']}, znode version {state['version_before']} -> {state['version']})"
    )


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} -> {after}"


def leader(broker_id: int) -> str:
    return "none" if broker_id == NO_LEADER else str(broker_id)


def orders(sent: Iterable[dict[str, Any]]) -> list[str]:
    """Return the orders to brokers, with equal orders on one line."""
    brokers: dict[tuple[str, int], dict[int, None]] = {}
    for order in sent:
        brokers.setdefault((order["request"], order["partitions"]), {})[order["broker"]] = None
    return [
        f"{all_of('broker', ids)}: {request}, {counted(partitions, 'partition')}"
        for (request, partitions), ids in brokers.items()
    ]


def _moves(moves: Sequence[str]) -> list[str]:
    """Such as `replica orders-0 on 1: OnlineReplica -> OfflineReplica`; more than two of a kind are counted."""
    kinds = Counter((move.split(" ", 1)[0], move.rpartition(": ")[2]) for move in moves if ": " in move)
    told: dict[str, None] = {}
    for move in moves:
        what, change = move.split(" ", 1)[0], move.rpartition(": ")[2]
        count = kinds[what, change]
        told[move if count <= 2 else f"{count} {what}s: {change}"] = None
    return list(told)


def _times(entry: Entry) -> Iterator[str]:
    parts = [
        f"{what} {milliseconds(entry[name])}"
        for name, what in (("queued_ms", "waited"), ("reading_ms", "read ZooKeeper"), ("writing_ms", "wrote ZooKeeper"))
        if entry.get(name, 0) >= 1
    ]
    if entry.get("total_ms", 0) >= 1:
        yield f"took {milliseconds(entry['total_ms'])}" + (f" ({', '.join(parts)})" if parts else "")


# --- Words ---------------------------------------------------------------------------------------------------------


def cut(lines: Sequence[str], omitted: int = 0) -> list[str]:
    """Return the first lines, and the number of the others. The last line may be the broker's own `and N more`."""
    if lines and (told := _MORE.fullmatch(lines[-1])) is not None:
        lines, omitted = lines[:-1], omitted + int(told[1])
    more = max(0, len(lines) - SHOWN) + omitted
    return [*lines[:SHOWN], f"and {more} more"] if more > 0 else list(lines)


def numbers(values: Iterable[int]) -> str:
    return " ".join(str(value) for value in values) or "none"


def milliseconds(value: float) -> str:
    if value < 0.95:
        return f"{value:.1f} ms"
    return f"{value:,.0f} ms"

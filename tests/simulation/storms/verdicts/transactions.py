"""The verdict on a history of transactions (after Jepsen's Kafka workload and its analysis of Bufstream 0.1.0). Pure.

Each value is unique and was sent once. Transactions append to several partitions, poll, and commit offsets of a group.
A history is complete when all clients have ended and `committed` and `log` hold the final reads of every partition, by
a read_committed and a read_uncommitted consumer, after healing. Each anomaly names its witnesses:

- G1a (aborted read): a value or a group offset of an aborted transaction is visible.
- G1b (intermediate read): a poll returned a value before its transaction had asked for its commit.
- G1c (circular information flow): no order of the decisions explains what the transactions polled.
- G0 (write cycle): a record lies behind one of a transaction that began after the record's own had ended.
- torn transaction: some of its appends, or its group offsets, are visible and others are not.
- lost write, duplicate, inconsistent offset, phantom.
- poll skip and nonmonotonic poll, with "internal" for polls of one transaction.
- processed twice, lost input: the transactions of a group did not process each committed input exactly once.
- committed offset went back.
- last stable offset stands still: it is below the high watermark although all faults are over.

Kafka does not isolate writes: records of concurrent transactions interleave, in another order in each partition. A
cycle of such writes is therefore no anomaly (Jepsen allows it, too), and it is neither one of information flow.

The graph of G1c orders the *decisions* of transactions, by edges that hold in every correct history:

- A read_committed poll at an offset shows that all transactions whose first record in this partition lies at or below
  it were decided (the last stable offset), and its own transaction is decided later. This covers wr edges, and ww edges
  that lead to a wr edge.
- A transaction whose end was acknowledged was decided before another one that asked for its commit later.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.history import Anomaly, Polled


class Outcome(enum.Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Append(NamedTuple):
    partition: TopicPartition
    value: bytes
    offset: int | None = None
    """As acknowledged: None without an acknowledgement, -1 if it named no offset."""


@dataclass(eq=False)
class Transaction:
    name: str
    """Unique, and tells the producer's instance."""
    began_s: float
    appends: list[Append] = field(default_factory=list)
    polled: list[Polled] = field(default_factory=list)
    """Records polled since the producer's last transaction ended, by a read_committed consumer."""
    group: str | None = None
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The group's offsets that are committed with the transaction."""
    commit_asked_s: float = inf
    """When its commit was first asked for; `inf` if never."""
    outcome: Outcome = Outcome.UNKNOWN
    ended_s: float = inf
    """When its client learned the outcome."""

    @property
    def may_be_visible(self) -> bool:
        return self.outcome is not Outcome.ABORTED and self.commit_asked_s < inf


class OffsetFetched(NamedTuple):
    """A stable answer about a group's offset; -1: it has none."""

    group: str
    partition: TopicPartition
    offset: int
    began_s: float
    ended_s: float


class StableEnd(NamedTuple):
    last_stable_offset: int
    high_watermark: int


@dataclass
class TransactionHistory:
    transactions: list[Transaction] = field(default_factory=list)
    """All of them, each producer's in order. A record sent outside of a transaction counts as one of its own."""
    polled: list[Polled] = field(default_factory=list)
    """Polls outside of transactions, by read_committed consumers. A consumer that seeks gets a new name."""
    fetched: list[OffsetFetched] = field(default_factory=list)
    """Lookups of group offsets, the last one of each partition after healing."""
    committed: dict[TopicPartition, dict[int, bytes]] = field(default_factory=dict)
    """The final records by offset, as a read_committed consumer sees them."""
    log: dict[TopicPartition, dict[int, bytes]] = field(default_factory=dict)
    """The same of a read_uncommitted consumer."""
    stable: dict[TopicPartition, StableEnd] = field(default_factory=dict)
    """The ends of each partition some time after healing, without open transactions."""


class _Place(NamedTuple):
    partition: TopicPartition
    offset: int


class _Facts:
    """The history, indexed."""

    def __init__(self, history: TransactionHistory) -> None:
        self.history = history
        self.writer = {append.value: t for t in history.transactions for append in t.appends}
        self.visible: dict[bytes, _Place] = {}
        for partition, values in history.committed.items():
            for offset, value in sorted(values.items()):
                self.visible.setdefault(value, _Place(partition, offset))
        self.took_effect = {t for t in history.transactions if t.outcome is Outcome.COMMITTED}
        """Transactions that are known to be committed."""
        self.took_effect |= {t for t in map(self.writer.get, self.visible) if t is not None and t.may_be_visible}

    def polls(self) -> Iterator[tuple[Polled, Transaction | None]]:
        """Yield all polls, each consumer's in order, with the transaction that they belong to."""
        for poll in self.history.polled:
            yield poll, None
        for transaction in self.history.transactions:
            for poll in transaction.polled:
                yield poll, transaction


def check_transactions(history: TransactionHistory) -> list[Anomaly]:
    """Return every anomaly of a complete history, kind by kind."""
    facts = _Facts(history)
    return [
        *_aborted_reads(facts),
        *_intermediate_reads(facts),
        *_circular_flows(facts),
        *_write_cycles(facts),
        *_torn(facts),
        *_lost_writes(facts),
        *_duplicates(facts),
        *_inconsistent_offsets(facts),
        *_phantoms(facts),
        *_poll_jumps(facts),
        *_inputs(facts),
        *_group_offsets(facts),
        *unstable_ends(history),
    ]


# --- Reads -----------------------------------------------------------------------------------------------------


def _aborted_reads(facts: _Facts) -> Iterator[Anomaly]:
    def told(value: bytes, where: str) -> Iterator[Anomaly]:
        writer = facts.writer.get(value)
        if writer is not None and not writer.may_be_visible:
            how = "aborted" if writer.outcome is Outcome.ABORTED else "never to be committed"
            yield Anomaly("G1a (aborted read)", f"{where} is {_show(value)} of {writer.name}, which was {how}")

    for poll, _ in facts.polls():
        yield from told(poll.value, f"{poll.consumer} at {poll.at_s:.3f} s: {poll.partition} offset {poll.offset}")
    for value, place in facts.visible.items():
        yield from told(value, f"the final read: {place.partition} offset {place.offset}")


def _intermediate_reads(facts: _Facts) -> Iterator[Anomaly]:
    for poll, reader in facts.polls():
        writer = facts.writer.get(poll.value)
        if writer is None or not writer.may_be_visible:
            continue
        if writer is reader or poll.at_s < writer.commit_asked_s:
            yield Anomaly(
                "G1b (intermediate read)",
                f"{poll.consumer} polled {_show(poll.value)} of {writer.name} at {poll.at_s:.3f} s, "
                f"{poll.partition} offset {poll.offset}; its commit was asked for at {writer.commit_asked_s:.3f} s",
            )


# --- The order of decisions --------------------------------------------------------------------------------------


def _circular_flows(facts: _Facts) -> Iterator[Anomaly]:
    names: list[str] = []
    edges: list[list[int]] = []

    def node(name: str) -> int:
        names.append(name)
        edges.append([])
        return len(edges) - 1

    transactions = [t for t in facts.history.transactions if t in facts.took_effect]
    of = {transaction: node(transaction.name) for transaction in transactions}
    for partition in sorted(facts.history.committed):
        first: dict[Transaction, int] = {}
        for offset, value in sorted(facts.history.committed[partition].items()):
            writer = facts.writer.get(value)
            if writer in of:
                first.setdefault(writer, offset)
        offsets = list(first.values())
        chain = [node(f"{partition} from {offset} on") for offset in offsets]
        for index, writer in enumerate(first):
            edges[of[writer]].append(chain[index])
            if index:
                edges[chain[index - 1]].append(chain[index])
        for transaction in transactions:
            seen = max((poll.offset for poll in transaction.polled if poll.partition == partition), default=-1)
            if (before := bisect_right(offsets, seen)) > 0:
                edges[chain[before - 1]].append(of[transaction])
    ends = sorted((t for t in transactions if t.ended_s < inf), key=lambda t: t.ended_s)
    times = [t.ended_s for t in ends]
    chain = [node(f"{at_s:.3f} s") for at_s in times]
    for index, transaction in enumerate(ends):
        edges[of[transaction]].append(chain[index])
        if index:
            edges[chain[index - 1]].append(chain[index])
    for transaction in transactions:
        if (before := bisect_left(times, transaction.commit_asked_s)) > 0:
            edges[chain[before - 1]].append(of[transaction])
    for component in strong_components(edges):
        cycle = _cycle(edges, component)
        yield Anomaly("G1c (circular information flow)", " -> ".join(names[index] for index in cycle))


def strong_components(edges: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components with more than one node (Tarjan's algorithm, without recursion)."""
    index = [-1] * len(edges)
    low = [0] * len(edges)
    on_stack = [False] * len(edges)
    stack: list[int] = []
    count = 0
    for root in range(len(edges)):
        if index[root] >= 0:
            continue
        path = [(root, iter(edges[root]))]
        index[root] = low[root] = count
        count += 1
        stack.append(root)
        on_stack[root] = True
        while path:
            at, targets = path[-1]
            for target in targets:
                if index[target] < 0:
                    index[target] = low[target] = count
                    count += 1
                    stack.append(target)
                    on_stack[target] = True
                    path.append((target, iter(edges[target])))
                    break
                if on_stack[target]:
                    low[at] = min(low[at], index[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[at])
                if low[at] == index[at]:
                    component: list[int] = []
                    while not component or component[-1] != at:
                        component.append(stack.pop())
                        on_stack[component[-1]] = False
                    if len(component) > 1:
                        yield component


def _cycle(edges: Sequence[Sequence[int]], component: Iterable[int]) -> list[int]:
    """Return a shortest cycle through the first node of the component."""
    inside = set(component)
    start = min(inside)
    came_from = {start: -1}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for target in edges[at]:
            if target == start:
                path = [start]
                while at >= 0:
                    path.append(at)
                    at = came_from[at]
                return path[::-1]
            if target in inside and target not in came_from:
                came_from[target] = at
                queue.append(target)
    raise AssertionError(f"no cycle through {start}")


def _write_cycles(facts: _Facts) -> Iterator[Anomaly]:
    acknowledged = {a.value for t in facts.history.transactions for a in t.appends if a.offset is not None}
    for partition in sorted(facts.history.log):
        latest: tuple[Transaction, int] | None = None
        for offset, value in sorted(facts.history.log[partition].items()):
            writer = facts.writer.get(value)
            if writer is None:
                continue
            # A request of an aborted transaction without an answer may be carried out until the marker is written.
            if latest is not None and value in acknowledged and writer.ended_s < latest[0].began_s:
                yield Anomaly(
                    "G0 (write cycle)",
                    f"{partition}: {_show(value)} of {writer.name} is at {offset}, behind {latest[1]} of "
                    f"{latest[0].name}; the one ended at {writer.ended_s:.3f} s, the other began at "
                    f"{latest[0].began_s:.3f} s",
                )
            if latest is None or writer.began_s > latest[0].began_s:
                latest = (writer, offset)


# --- Writes ----------------------------------------------------------------------------------------------------


def _torn(facts: _Facts) -> Iterator[Anomaly]:
    last = {(fetch.group, fetch.partition): fetch.offset for fetch in facts.history.fetched}
    for transaction in facts.history.transactions:
        if not transaction.may_be_visible:
            continue
        acknowledged = [append.value for append in transaction.appends if append.offset is not None]
        there = [append.value for append in transaction.appends if append.value in facts.visible]
        missing = [value for value in acknowledged if value not in facts.visible]
        if there and missing:
            yield Anomaly(
                "torn transaction",
                f"{transaction.name} ({transaction.outcome.value}): {_listed(there)} are visible, "
                f"{_listed(missing)} are not",
            )
        if transaction.group is None or not there:
            continue
        for partition, offset in transaction.offsets.items():
            found = last.get((transaction.group, partition))
            if found is not None and found < offset:
                yield Anomaly(
                    "torn transaction",
                    f"{transaction.name} ({transaction.outcome.value}): {_listed(there)} are visible, but group "
                    f"{transaction.group} is at {found} of {partition} and not at {offset}",
                )


def _lost_writes(facts: _Facts) -> Iterator[Anomaly]:
    for transaction in facts.history.transactions:
        if transaction.outcome is Outcome.COMMITTED:
            for append in transaction.appends:
                if append.offset is not None and append.value not in facts.visible:
                    yield Anomaly(
                        "lost write",
                        f"{_show(append.value)} of {transaction.name}, committed at {transaction.ended_s:.3f} s, "
                        f"acknowledged at offset {append.offset} of {append.partition}",
                    )
    for poll, _ in facts.polls():
        writer = facts.writer.get(poll.value)
        if poll.value not in facts.visible and (writer is None or writer.may_be_visible):
            yield Anomaly(
                "lost write",
                f"{_show(poll.value)}, which {poll.consumer} polled at {poll.at_s:.3f} s at offset {poll.offset} of "
                f"{poll.partition}",
            )


def _duplicates(facts: _Facts) -> Iterator[Anomaly]:
    for partition, values in facts.history.log.items():
        first: dict[bytes, int] = {}
        for offset, value in sorted(values.items()):
            if first.setdefault(value, offset) != offset:
                yield Anomaly("duplicate", f"{_show(value)} at offsets {first[value]} and {offset} of {partition}")


def _inconsistent_offsets(facts: _Facts) -> Iterator[Anomaly]:
    """Yield offsets with two values, and values at two offsets to different clients."""
    values: dict[_Place, tuple[bytes, str]] = {}
    offsets: dict[bytes, tuple[int, str]] = {}
    times = Counter(value for of_partition in facts.history.log.values() for value in of_partition.values())

    def see(place: _Place, value: bytes, who: str) -> Iterator[Anomaly]:
        before = values.setdefault(place, (value, who))
        if before[0] != value:
            yield Anomaly(
                "inconsistent offset",
                f"{place.partition} offset {place.offset} is {_show(before[0])} to {before[1]} and {_show(value)} "
                f"to {who}",
            )
        known = offsets.setdefault(value, (place.offset, who))
        if known[0] != place.offset and times[value] <= 1:
            yield Anomaly(
                "inconsistent offset",
                f"{_show(value)} is at {known[0]} of {place.partition} to {known[1]} and at {place.offset} to {who}",
            )

    for poll, _ in facts.polls():
        yield from see(_Place(poll.partition, poll.offset), poll.value, poll.consumer)
    for transaction in facts.history.transactions:
        for append in transaction.appends:
            if append.offset is not None and append.offset >= 0:
                yield from see(_Place(append.partition, append.offset), append.value, transaction.name)
    for who, final in (("the final read", facts.history.committed), ("the final log", facts.history.log)):
        for partition, of_partition in final.items():
            for offset, value in of_partition.items():
                yield from see(_Place(partition, offset), value, who)


def _phantoms(facts: _Facts) -> Iterator[Anomaly]:
    sent_to = {append.value: append.partition for t in facts.history.transactions for append in t.appends}
    for partition, values in facts.history.log.items():
        for offset, value in values.items():
            if sent_to.get(value) != partition:
                yield Anomaly("phantom", f"{_show(value)} at offset {offset} of {partition} was never sent there")


# --- Consumers and groups ----------------------------------------------------------------------------------------


def _poll_jumps(facts: _Facts) -> Iterator[Anomaly]:
    offsets = {partition: sorted(values) for partition, values in facts.history.committed.items()}
    last: dict[tuple[str, TopicPartition], tuple[int, Transaction | None]] = {}
    for poll, reader in facts.polls():
        before = last.get((poll.consumer, poll.partition))
        last[poll.consumer, poll.partition] = (poll.offset, reader)
        if before is None:
            continue
        offset, former = before
        internal = "internal " if reader is not None and reader is former else ""
        told = f"{poll.consumer} polled {poll.offset} of {poll.partition} at {poll.at_s:.3f} s, after {offset}"
        if poll.offset <= offset:
            yield Anomaly(f"{internal}nonmonotonic poll", told)
            continue
        of_partition = offsets.get(poll.partition, [])
        skipped = of_partition[bisect_right(of_partition, offset) : bisect_left(of_partition, poll.offset)]
        if skipped:
            value = facts.history.committed[poll.partition][skipped[0]]
            yield Anomaly(
                f"{internal}poll skip", f"{told}; {len(skipped)} are between, first {_show(value)} at {skipped[0]}"
            )


def _inputs(facts: _Facts) -> Iterator[Anomaly]:
    """Yield inputs that the transactions of a group did not process exactly once. A group begins at the log start."""
    processed: dict[str, dict[_Place, Transaction]] = defaultdict(dict)
    may_be_processed: dict[str, set[_Place]] = defaultdict(set)
    for transaction in facts.history.transactions:
        if transaction.group is None or not transaction.may_be_visible:
            continue
        places = {_Place(poll.partition, poll.offset) for poll in transaction.polled}
        may_be_processed[transaction.group] |= places if not transaction.appends else set()
        if transaction not in facts.took_effect:
            continue
        of_group = processed[transaction.group]
        for place in sorted(places):
            if (other := of_group.setdefault(place, transaction)) is not transaction:
                yield Anomaly(
                    "processed twice",
                    f"{place.partition} offset {place.offset} by {other.name} and {transaction.name} of group "
                    f"{transaction.group}",
                )
    last = {(fetch.group, fetch.partition): fetch.offset for fetch in facts.history.fetched}
    for (group, partition), end in last.items():
        for offset, value in sorted(facts.history.committed.get(partition, {}).items()):
            place = _Place(partition, offset)
            if offset < end and place not in processed[group] and place not in may_be_processed[group]:
                yield Anomaly(
                    "lost input",
                    f"group {group} is at {end} of {partition}, and no committed transaction processed {_show(value)} "
                    f"at {offset}",
                )


def _group_offsets(facts: _Facts) -> Iterator[Anomaly]:
    """Yield lookups below what was committed or found before they began, and those of no transaction's offsets."""
    known: dict[tuple[str, TopicPartition], list[tuple[float, int, str]]] = defaultdict(list)
    possible: dict[tuple[str, TopicPartition], set[int]] = defaultdict(lambda: {-1, 0})
    for transaction in facts.history.transactions:
        if transaction.group is not None and transaction.may_be_visible:
            for partition, offset in transaction.offsets.items():
                possible[transaction.group, partition].add(offset)
                if transaction.outcome is Outcome.COMMITTED:
                    told = f"{transaction.name}, committed at {transaction.ended_s:.3f} s"
                    known[transaction.group, partition].append((transaction.ended_s, offset, told))
    for fetch in facts.history.fetched:
        told = f"a lookup at {fetch.ended_s:.3f} s"
        known[fetch.group, fetch.partition].append((fetch.ended_s, fetch.offset, told))
    highest = {key: _rising(sorted(entries)) for key, entries in known.items()}
    for fetch in facts.history.fetched:
        key = (fetch.group, fetch.partition)
        entries = highest[key]
        before = bisect_left(entries, fetch.began_s, key=lambda entry: entry[0])
        if before and entries[before - 1][1] > fetch.offset:
            _, offset, told = entries[before - 1]
            yield Anomaly(
                "committed offset went back",
                f"group {fetch.group} is at {fetch.offset} of {fetch.partition} at {fetch.ended_s:.3f} s; it was at "
                f"{offset} by {told}",
            )
        if fetch.offset not in possible[key]:
            yield Anomaly(
                "G1a (aborted read)",
                f"group {fetch.group} is at {fetch.offset} of {fetch.partition} at {fetch.ended_s:.3f} s, which no "
                f"transaction committed",
            )


def _rising(entries: Sequence[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Return the entries with offsets replaced by the highest one up to each."""
    rising: list[tuple[float, int, str]] = []
    for at_s, offset, told in entries:
        if rising and rising[-1][1] >= offset:
            _, offset, told = rising[-1]
        rising.append((at_s, offset, told))
    return rising


def unstable_ends(history: TransactionHistory) -> Iterator[Anomaly]:
    for partition, end in history.stable.items():
        if end.last_stable_offset < end.high_watermark:
            yield Anomaly(
                "last stable offset stands still",
                f"{partition}: it is {end.last_stable_offset}, the high watermark is {end.high_watermark}",
            )


def _listed(values: Sequence[bytes]) -> str:
    return ", ".join(map(_show, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def _show(value: bytes) -> str:
    return value.partition(b"|")[0].decode("ascii", "replace")

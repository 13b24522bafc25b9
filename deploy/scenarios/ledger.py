"""Everything that the clients of a run have seen, and the judgement. It is pure; clients fill the Ledger."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minibroker.deploy.scenarios.model import Client, Scenario
from minibroker.deploy.trials.trial import Acknowledged, ReadBack, judge_trial
from minibroker.protocol.model import TopicPartition


class Promise(NamedTuple):
    """A promise of the file, and whether it was kept."""

    text: str
    kept: bool
    measured: str


class Stall(NamedTuple):
    seconds: float
    partition: TopicPartition | None
    began_s: float


class Measured(NamedTuple):
    """The figures of a run."""

    sent: int
    acknowledged: int
    refused: int
    read_back: int
    lost: int
    doubled: int
    not_consumed: int
    stall: Stall
    rebalance: Stall
    errors: Mapping[str, int]
    """How often each error ended a send or a transaction, by its name."""


class Ledger:
    """What clients sent, what was acknowledged when, what groups received, and who owned which partition."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Records, by client."""
        self.acknowledged: dict[str, dict[TopicPartition, list[Acknowledged]]] = defaultdict(lambda: defaultdict(list))
        self.errors: Counter[str] = Counter()
        self.refused = 0
        self.received: dict[str, set[bytes]] = defaultdict(set)
        """Values, by the group or the name of the consumer."""
        self.crashed: list[str] = []
        """Clients that ended by an error that they should not have."""
        self.producing = True
        """False: producers finish what they have begun, and end."""
        self.writers: set[str] = set()
        """Producers that have not ended. An acknowledgement after the final reading has begun may miss in it."""
        self.running = True
        """False: consumers end, too."""
        self._owners: dict[tuple[str, TopicPartition], str] = {}
        self._unowned_since_s: dict[tuple[str, TopicPartition], float] = {}
        self.rebalance = Stall(0.0, None, 0.0)
        self.began_s = math.inf
        """When the clients were at work. Stalls and rebalances that ended earlier do not count."""

    @property
    def acknowledged_count(self) -> int:
        return sum(len(acks) for of_client in self.acknowledged.values() for acks in of_client.values())

    def acks(self, partition: TopicPartition) -> int:
        return sum(len(of_client.get(partition, ())) for of_client in self.acknowledged.values())

    def failed(self, error: str, records: int) -> None:
        self.errors[error] += 1
        self.refused += records

    # -- groups --

    def took(self, group: str, member: str, partitions: Sequence[TopicPartition], now_s: float) -> None:
        for partition in partitions:
            self._owners[group, partition] = member
            since_s = self._unowned_since_s.pop((group, partition), now_s)
            if now_s >= self.began_s and now_s - since_s > self.rebalance.seconds:
                self.rebalance = Stall(now_s - since_s, partition, since_s)

    def gave_up(self, group: str, member: str, partitions: Sequence[TopicPartition], now_s: float) -> None:
        for partition in partitions:
            if self._owners.get((group, partition)) == member:
                del self._owners[group, partition]
                self._unowned_since_s[group, partition] = now_s

    def died(self, member: str, now_s: float) -> None:
        self.writers.discard(member)
        for (group, partition), owner in list(self._owners.items()):
            if owner == member:
                self.gave_up(group, member, [partition], now_s)

    def owners(self, group: str) -> dict[TopicPartition, str]:
        """Return the member that owns each partition."""
        return {partition: owner for (of_group, partition), owner in self._owners.items() if of_group == group}


class Read(NamedTuple):
    """A record of the final reading."""

    offset: int
    value: bytes


def value_of(client: str, number: int) -> bytes:
    return f"{client}|{number}".encode()


def number_of(value: bytes) -> tuple[str, int] | None:
    client, bar, number = value.rpartition(b"|")
    return (client.decode(errors="replace"), int(number)) if bar and number.isdigit() else None


def longest_stall(ledger: Ledger) -> Stall:
    """Return the longest time between two acknowledgements of a client on one partition."""
    worst = Stall(0.0, None, 0.0)
    for of_client in ledger.acknowledged.values():
        for partition, acks in of_client.items():
            for before, after in itertools.pairwise(sorted(ack.at_s for ack in acks)):
                if after >= ledger.began_s and after - before > worst.seconds:
                    worst = Stall(after - before, partition, before)
    return worst


def not_consumed(ledger: Ledger, clients: Sequence[Client], read: Mapping[TopicPartition, Sequence[Read]]) -> int:
    """Return how many records of the final reading a group or consumer has not received."""
    missing = 0
    readers = {(client.group or client.name, client.consumes) for client in clients if client.consumes is not None}
    for reader, topic in readers:
        received = ledger.received[reader]
        missing += sum(
            record.value not in received
            for partition, records in read.items()
            if partition.topic == topic
            for record in records
        )
    return missing


def measure(scenario: Scenario, ledger: Ledger, read: Mapping[TopicPartition, Sequence[Read]]) -> Measured:
    lost = doubled = 0
    for client in scenario.clients:
        if client.produces is None or client.consumes is not None:
            continue
        found = {
            partition.partition: [
                ReadBack(record.offset, named[1])
                for record in records
                if (named := number_of(record.value)) is not None and named[0] == client.name
            ]
            for partition, records in read.items()
            if partition.topic == client.produces
        }
        acknowledged = {
            partition.partition: acks for partition, acks in ledger.acknowledged.get(client.name, {}).items()
        }
        verdict = judge_trial(ledger.sent[client.name], 0, acknowledged, found)
        lost += verdict.lost
        doubled += verdict.duplicated
    return Measured(
        sent=ledger.sent.total(),
        acknowledged=ledger.acknowledged_count,
        refused=ledger.refused,
        read_back=sum(map(len, read.values())),
        lost=lost,
        doubled=doubled,
        not_consumed=not_consumed(ledger, scenario.clients, read),
        stall=longest_stall(ledger),
        rebalance=ledger.rebalance,
        errors=dict(sorted(ledger.errors.items())),
    )


def exactly_once_faults(scenario: Scenario, read: Mapping[TopicPartition, Sequence[Read]]) -> int:
    """Return how many inputs of the processors have no result, or several."""
    faults = 0
    for client in scenario.clients:
        if client.produces is None or client.consumes is None:
            continue
        inputs = [
            record.value
            for partition, records in read.items()
            if partition.topic == client.consumes
            for record in records
        ]
        results = Counter(
            record.value.partition(b">")[2]
            for partition, records in read.items()
            if partition.topic == client.produces
            for record in records
            if record.value.startswith(client.name.encode() + b">")
        )
        faults += sum(results[value] != 1 for value in inputs)
    return faults


def judge(
    scenario: Scenario,
    ledger: Ledger,
    measured: Measured,
    read: Mapping[TopicPartition, Sequence[Read]],
    whole_after_s: float | None,
    unbalanced: Sequence[TopicPartition],
) -> list[Promise]:
    """Return each promise of the file, in the order of docs/scenarios.md."""
    expect = scenario.expect
    promises = [
        Promise(
            f"whole within {seconds(expect.whole_within_s)} after the last step",
            whole_after_s is not None,
            "not in time" if whole_after_s is None else f"after {seconds(whole_after_s)}",
        )
    ]
    if ledger.crashed:
        promises.append(Promise("no client crashes", False, "; ".join(ledger.crashed)))
    if expect.nothing_lost:
        promises.append(Promise("nothing lost", measured.lost == 0, f"{measured.lost} of {measured.acknowledged} lost"))
    if expect.lost:
        promises.append(Promise("records are lost", measured.lost > 0, f"{measured.lost} lost"))
    if expect.nothing_doubled:
        promises.append(Promise("nothing doubled", measured.doubled == 0, f"{measured.doubled} doubled"))
    if expect.everything_consumed and any(client.consumes for client in scenario.clients):
        text = f"{measured.not_consumed} not received"
        promises.append(Promise("everything consumed", measured.not_consumed == 0, text))
    if expect.exactly_once:
        faults = exactly_once_faults(scenario, read)
        promises.append(Promise("each input has one result", faults == 0, f"{faults} without, or with several"))
    for text, limit_s, worst in (
        ("stall", expect.longest_stall_s, measured.stall),
        ("rebalance", expect.longest_rebalance_s, measured.rebalance),
    ):
        if limit_s is not None:
            where = f" on {worst.partition}" if worst.partition else ""
            kept = worst.seconds <= limit_s
            promises.append(Promise(f"no {text} above {seconds(limit_s)}", kept, f"{seconds(worst.seconds)}{where}"))
    if expect.leaders_balanced:
        names = ", ".join(map(str, unbalanced[:5]))
        text = f"another broker leads {names}" if unbalanced else "each is preferred"
        promises.append(Promise("leaders balanced", not unbalanced, text))
    for name in expect.errors:
        seen = measured.errors.get(name, 0)
        promises.append(Promise(f"clients see {name}", seen > 0, f"{seen} times"))
    return promises


def seconds(value: float) -> str:
    return f"{value * 1_000:.0f} ms" if value < 1 else f"{value:.1f} s"

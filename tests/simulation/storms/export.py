"""A storm as a scenario file: `make simulate SEED=17 SCENARIO=storm-17.toml`.

The problem: a storm decides while it runs, by what it sees, so its faults are known only afterwards. And most of its
faults are finer than the words of scenario files, which say what an operator could do.

The choice: the storm runs, and every call that breaks or mends a broker, a link, a disk or ZooKeeper is recorded as
a sentence with its time. That also has the kills of ambushes, at the times at which they struck. The file says what was
left out. It is a scenario of the same kind, not the same run: other clients send, so that other packets are in flight.

Rejected: sentences from the texts of the timeline, which are for readers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from minibroker.deploy.scenarios.coherence import check_broker_settings
from minibroker.deploy.simulator.disk_faults import DiskFaults
from minibroker.deploy.simulator.network import MAX_LATENCY_S
from tests.simulation.storms.clients.workload import SYNCED
from tests.simulation.storms.faults.faults import POWER_OF_SEVERAL
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm, simulate

_IN_WORDS = frozenset(
    {"kill", "kill leader", "kill controller", "kill several", "collapse", "power cut", POWER_OF_SEVERAL, "pause"}
    | {"clean stop", "partition", "isolation", "full disk", "slow disk", "slow network", "ZooKeeper down"}
    | {"ZooKeeper cut", "ZooKeeper expiry", "kill coordinator", "kill transaction coordinator", "broken link"}
)
"""The kinds of faults that the sentences express, apart from the moments at which they strike."""
_LOSE_POWER = frozenset({"power cut", POWER_OF_SEVERAL, "collapse"})
_AT_WORK_S = 1.0
_FAST = "fast"
"""The storms' topic for acks=1, of which records may be lost."""


class Step(NamedTuple):
    at_s: float
    sentences: tuple[str, ...]


class Recorder:
    """The sentences for what happens to the cluster."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.steps: list[Step] = []
        self._now_s = now_s
        self._began_s: float | None = None
        self._lasting: dict[tuple[str, ...], str] = {}
        """Faults that `heal` ends, by what they break. As it ends all of them, the others are repeated."""
        self._zookeeper_is_down = False
        self._late: dict[int, None] = {}
        """Brokers whose start would wait for a fault to end. The steps of a scenario wait for each start."""

    def begin(self) -> None:
        self._began_s = self._now_s()

    def end(self) -> None:
        self._began_s = None

    def add(self, *sentences: str) -> None:
        if self._began_s is not None and sentences:
            self.steps.append(Step(_AT_WORK_S + self._now_s() - self._began_s, sentences))

    def start(self, broker: int) -> None:
        self._late[broker] = None
        self._start_those_that_can()

    def gone(self, broker: int) -> None:
        """Forget a start that is still to come: the broker is down again."""
        self._late.pop(broker, None)

    def zookeeper(self, is_down: bool) -> None:
        self._zookeeper_is_down = is_down
        self.add("stop zookeeper" if is_down else "start zookeeper")
        self._start_those_that_can()

    def lasts(self, key: tuple[str, ...], sentence: str) -> None:
        if self._lasting.get(key) != sentence:
            self._lasting[key] = sentence
            self.add(sentence)

    def ends(self, key: tuple[str, ...]) -> None:
        if self._lasting.pop(key, None) is not None:
            self.add("heal", *self._lasting.values())
            self._start_those_that_can()

    def mended(self, broker: int) -> None:
        if self._lasting.pop(("disk", str(broker)), None) is not None:
            self.gone(broker)
            self.add(f"mend disk of {broker}")

    def _start_those_that_can(self) -> None:
        broken = {name for key in self._lasting for name in key[1:]}
        if not self._zookeeper_is_down:
            for broker in [broker for broker in self._late if str(broker) not in broken]:
                del self._late[broker]
                self.add(f"start {broker}")


def _number(host: str) -> int | None:
    """Return the scenario's id of a broker's host: they count from 1 on, and storms from 0."""
    matched = re.fullmatch(r"broker-(\d+)", host)
    return int(matched[1]) + 1 if matched else None


class RecordedStorm(Storm):
    """A storm whose calls are recorded. It draws the same as one that is not."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.recorder = Recorder(lambda: self.now_s)
        made.append(self)
        self._watch_brokers()
        self._watch_network()
        self._watch_zookeeper()

    def _watch_brokers(self) -> None:
        recorder, cluster = self.recorder, self.cluster

        def ends(verb: str) -> Callable[[int], None]:
            def record(broker_id: int) -> None:
                recorder.gone(broker_id + 1)
                if cluster.process(broker_id).alive:
                    recorder.add(f"{verb} {broker_id + 1}")

            return record

        _before(cluster, "kill_broker", ends("kill"))
        _before(cluster, "power_cut", ends("power-cut"))
        _before(cluster, "stop_broker", ends("stop"))
        _before(cluster, "start_broker", lambda broker_id: recorder.start(broker_id + 1))
        _before(cluster, "pause_broker", lambda broker_id: recorder.add(f"pause {broker_id + 1}"))
        _before(cluster, "resume_broker", lambda broker_id: recorder.add(f"resume {broker_id + 1}"))

    def _watch_network(self) -> None:
        recorder, network = self.recorder, self.simulation.network

        def link(source: str, target: str) -> tuple[int, int] | None:
            ends = _number(source), _number(target)
            return None if None in ends else ends  # type: ignore[return-value]

        def block(source: str, target: str) -> None:
            if ends := link(source, target):
                one, other = ends
                recorder.lasts(("link", str(one), str(other)), f"cut packets from {one} to {other}")

        def unblock(source: str, target: str) -> None:
            if ends := link(source, target):
                recorder.ends(("link", *map(str, ends)))

        def unreachable(host: str, flag: bool) -> None:
            if (broker := _number(host)) is not None:
                key = ("isolated", str(broker))
                recorder.lasts(key, f"isolate {broker}") if flag else recorder.ends(key)

        def set_latency(low_s: float, high_s: float) -> None:
            is_slow = high_s > MAX_LATENCY_S
            mean_ms = (low_s + high_s) * 500
            recorder.lasts(("latency",), f"slow network by {mean_ms:.0f} ms") if is_slow else recorder.ends(
                ("latency",)
            )

        _before(network, "block", block)
        _before(network, "unblock", unblock)
        _before(network, "unreachable", unreachable)
        _before(network, "set_latency", set_latency)

    def _watch_zookeeper(self) -> None:
        recorder, zookeeper = self.recorder, self.simulation.zookeeper

        def cut(host: str) -> None:
            if (broker := _number(host)) is not None:
                recorder.lasts(("zookeeper", str(broker)), f"cut {broker} from zookeeper")

        def uncut(host: str) -> None:
            if (broker := _number(host)) is not None:
                recorder.ends(("zookeeper", str(broker)))

        _before(zookeeper, "cut", cut)
        _before(zookeeper, "uncut", uncut)
        _before(zookeeper, "stop", lambda: recorder.zookeeper(True))
        _before(zookeeper, "start", lambda: recorder.zookeeper(False))
        _before(zookeeper, "expire", lambda host: recorder.add(*([f"expire {_number(host)}"] if _number(host) else [])))

    def count(self, kind: str, text: str) -> None:
        super().count(kind, text)
        if kind in ("full disk", "slow disk") and (matched := re.match(r"broker (\d+)(?:, ([\d.]+) s a sync)?", text)):
            broker = int(matched[1]) + 1
            what = f"slow disk of {broker} by {float(matched[2]) * 1_000:.0f} ms" if matched[2] else None
            self.recorder.lasts(("disk", str(broker)), what or f"fill disk of {broker}")

    @contextmanager
    def bad_disk(self, broker_id: int) -> Iterator[DiskFaults]:
        try:
            with super().bad_disk(broker_id) as faults:
                yield faults
        finally:
            self.recorder.mended(broker_id + 1)

    def _start_clients(self) -> None:
        super()._start_clients()
        self.recorder.begin()

    async def _recover(self) -> None:
        self.recorder.end()
        await super()._recover()


made: list[RecordedStorm] = []
"""The storms of this process, since `simulate` returns only their reports."""


def _before(target: object, name: str, record: Callable[..., None]) -> None:
    """Let `record` have the arguments of each call of a method, before the call."""
    method = getattr(target, name)

    def recorded(*arguments: Any) -> Any:
        record(*arguments)
        return method(*arguments)

    setattr(target, name, recorded)


def exported(seed: int, minutes: float) -> tuple[str, Report]:
    """Return the text of the scenario for a storm, and the storm's report. The storm runs meanwhile."""
    report = simulate(seed, minutes, kind=RecordedStorm)
    return _written(made.pop(), report, minutes), report


def _written(storm: RecordedStorm, report: Report, minutes: float) -> str:
    brokers = len(storm.cluster.broker_ids)
    settings = {name: value for name, value in storm.settings.items() if name not in storm.security.settings}
    check_broker_settings(settings)
    loses = report.faults[POWER_OF_SEVERAL] > 0 or (brokers == 2 and not _LOSE_POWER.isdisjoint(report.faults))
    lines = [
        f"# Exported from the storm of seed {report.seed} ({minutes:g} virtual minutes). Left out:",
        *(f"#   {text}" for text in _left_out(storm, report.faults)),
        f'name = "The storm of seed {report.seed}"',
        'about = "The faults of a storm at their times, on a cluster of its size with its settings."',
        "",
        "[cluster]",
        f"brokers = {brokers}",
        "",
        "[cluster.settings]",
        *(f'"{name}" = "{value}"' for name, value in sorted(settings.items())),
    ]
    partitions = Counter(partition.topic for partition in storm.partitions if partition.topic != _FAST)
    for topic, count in partitions.items():
        lines += ["", "[[topics]]", f'name = "{topic}"', f"partitions = {count}", f"replicas = {brokers}"]
        lines += ['configs = { durability = "synced" }'] if topic == SYNCED else []
    for topic in partitions:
        lines += ["", "[[clients]]", f'name = "to-{topic}"', f'produces = "{topic}"']
        lines += ["", "[[clients]]", f'name = "of-{topic}"', f'consumes = "{topic}"', f'group = "of-{topic}"']
        lines += ["members = 2"]
    for step in storm.recorder.steps:
        sentences = ", ".join(f'"{sentence}"' for sentence in step.sentences)
        lines += ["", "[[steps]]", f'at = "{step.at_s * 1_000:.0f} ms"', f"do = [{sentences}]"]
    lines += ["", "[expect]", f"nothing_lost = {'false' if loses else 'true'}", 'whole_within = "120 s"']
    return "\n".join(lines) + "\n"


def _left_out(storm: RecordedStorm, faults: Counter[str]) -> list[str]:
    kinds = [f"{count} x {kind}" for kind, count in sorted(faults.items()) if kind not in _IN_WORDS]
    texts = (
        [f"faults without a sentence, except the kills and cuts that they made: {', '.join(kinds)}"] if kinds else []
    )
    texts += ["the storm's own clients, and its topics that shrink, grow, are compacted or deleted"]
    texts += ["its access control and users"] if storm.security.settings else []
    texts += ["the second log directory of each broker"] if storm.log_dirs > 1 else []
    return texts

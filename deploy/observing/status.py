"""`minibroker status`: the living processes, the state that brokers report, and the problems of both.

Fields that only brokers can report are None if no broker answers: zeros and empty lists would look like health. A
broker that was just started counts as registered only once it has itself heard from the controller, since its
registration may be that of the run before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypedDict

import msgspec
from msgspec.structs import replace

from minibroker.client.administering.movements import Progress, progress
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.observing import rights
from minibroker.deploy.observing.cluster_view import SLOW_AFTER_S, ClusterView
from minibroker.deploy.observing.commits import PATIENCE_S
from minibroker.deploy.observing.followers import SlowCommits, SlowFollower, slow_commits, slow_followers
from minibroker.protocol.model import INTERNAL_TOPICS, TopicPartition
from minibroker.protocol.recovery_progress import RecoveryProgress
from minibroker.protocol.words import all_of, counted, listed, says_full_disk

_HEAL = "`minibroker heal`"
_WAY_TO_ZOOKEEPER = "check ZooKeeper and the network between the two"
_AWAY_AFTER_S = 1.0
"""A connection to ZooKeeper that is back earlier, as that to another of its servers, is nothing to tell."""
_NAMED = 5
"""The number of partitions that a line names, and of topics for which it counts the rest."""


class SlowDisk(msgspec.Struct, frozen=True):
    """A log directory in which writes or flushes took a second or longer within the last 20 s."""

    log_dir: str
    calls: int
    longest_s: float
    longest_call: str
    """"write" or "flush"."""


class BrokerStatus(msgspec.Struct, frozen=True):
    id: int
    pid: int | None
    """None if it does not run, or was not started here."""
    alive: bool
    port: int | None
    """None if it is missing."""
    paused: bool
    registered: bool | None
    """Whether the controller knows this run of it as a live broker. None: unknown."""
    leaders: int | None
    """The number of partitions that it leads. None: unknown."""
    metrics_port: int | None = None
    """The port of Prometheus's `/metrics`, if known."""
    last_error: str | None = None
    """The error with which it ended, if it is gone and printed one."""
    offline_log_dirs: dict[str, str] = {}
    """The log directories whose disks have failed, and the errors, if it answers."""
    recovery: RecoveryProgress | None = None
    """The progress of opening its logs, before it serves. None: it does not open logs, or does not report it."""
    silent: bool = False
    """Whether it runs and did not answer just now."""
    is_elsewhere: bool = False
    """Whether it was not started here: only its registration is known, and of one that is missing its replicas."""
    unanswered_partitions: list[str] = []
    """`TOPIC-PARTITION` of those that it leads, if it is paused or silent: clients wait until another broker leads."""
    awaited_partitions: list[str] = []
    """Those that others lead with it in the ISR, if it is paused or silent: acks=all waits for it."""
    leaving: bool = False
    """Whether `minibroker brokers remove` moves its replicas away."""
    slow_answer_s: float | None = None
    """Seconds that its answer took, if it was slow. None: it was not, or did not answer."""
    slow_disks: list[SlowDisk] = []
    """The log directories in which calls took long just now."""
    zookeeper_away_s: float | None = None
    """Seconds since it lost its connection to ZooKeeper, as it says. None: it has one, or does not say."""
    zookeeper_session_timeout_s: float | None = None
    """After so long without a connection, its session with ZooKeeper ends; the longest of the others' if it does not
    say. None: unknown."""
    zookeeper_losses: int = 0
    """How many times it lost its connection to ZooKeeper in the last minute, or did not hear from ZooKeeper in time."""

    def problem(
        self,
        is_unknown: bool,
        faults: Sequence[str] = (),
        zookeeper_remedy: str = "",
        *,
        is_controller: bool = False,
    ) -> str | None:
        """Return the problem of its process with the remedy, or None. `is_unknown`: no broker answers. `faults`: those
        that it was ordered to have, which are then the likely cause. `zookeeper_remedy`: if no broker reaches
        ZooKeeper, without which none can start."""
        heal = f"it has injected faults ({'; '.join(faults)}): `minibroker heal {self.id}`" if faults else ""
        broker = f"broker {self.id}, the controller," if is_controller else f"broker {self.id}"
        waits = self._what_waits()
        wait = "wait for the end of its ZooKeeper session" if waits else "wait if it was just started"
        if self.is_missing:
            return (
                f"broker {self.id} has replicas, but is not in the cluster: it has stopped, hangs or does not reach "
                "ZooKeeper; look where it runs"
            )
        if not self.alive:
            return self._problem_of_its_end(faults, zookeeper_remedy)
        if self.paused:
            out = " and not in the cluster" if self.registered is False else ""
            ends = ""
            if self.registered and self.zookeeper_session_timeout_s is not None and not zookeeper_remedy:
                ends = f" (its ZooKeeper session ends {self.zookeeper_session_timeout_s:g} s after its last heartbeat)"
            return f"{broker} is paused{ends}{out}{waits}: `minibroker resume {self.id}`"
        if self.recovery is not None:
            return f"broker {self.id} is recovering ({self.recovery}): wait"
        if self.silent and self.is_elsewhere:
            return f"broker {self.id} is registered but does not answer on port {self.port}{waits}: look where it runs"
        if self.silent and (heal or not is_unknown):
            out = " and is not in the cluster" if self.registered is False else ""
            remedy = f"; {heal}" if heal else f": {wait}, else see `minibroker logs {self.id}`"
            return f"{broker} runs but does not answer{waits}{out}{remedy}"
        if self.registered is False:
            lost = self._lost_zookeeper()
            look = "look where it runs" if self.is_elsewhere else f"see `minibroker logs {self.id}`"
            remedy = f"; {heal}" if heal else f": {_WAY_TO_ZOOKEEPER if lost else look}"
            return f"broker {self.id} runs but is not in the cluster{lost and f', since it {lost}'}{remedy}"
        if lost := self._lost_zookeeper():
            timeout_s = self.zookeeper_session_timeout_s or 0.0
            is_over = (self.zookeeper_away_s or 0.0) >= timeout_s
            ends = "its session is over" if is_over else f"its session ends after {timeout_s:g} s without one"
            return f"{broker} {lost} ({ends}){f'; {heal}' if heal else f': {_WAY_TO_ZOOKEEPER}'}"
        if self.slow_answer_s is not None:
            look = "look where it runs" if self.is_elsewhere else f"see `minibroker logs {self.id}`"
            remedy = f"; {heal}" if heal else f": {look}"
            return (
                f"{broker} is slow to answer (it took {self.slow_answer_s:.1f} s, and should take at most "
                f"{SLOW_AFTER_S:g} s){remedy}"
            )
        return None

    def _problem_of_its_end(self, faults: Sequence[str], zookeeper_remedy: str) -> str:
        first = f"{zookeeper_remedy}, then " if zookeeper_remedy else ""
        if self.leaving:
            remedy = f"{first}`minibroker brokers remove {self.id}`"
            return f"broker {self.id} is not running and leaves the cluster: {remedy}"
        why = "" if self.last_error is None else f" ({self.last_error})"
        if faults:
            why += f"; it has injected faults ({'; '.join(faults)})"
            first += "" if zookeeper_remedy == _HEAL else f"`minibroker heal {self.id}`, then "
        elif self.last_error and says_full_disk(self.last_error):
            first += "free space there, then "
        return f"broker {self.id} is not running{why}: {first}`minibroker start {self.id}`"

    def _what_waits(self) -> str:
        """Return which partitions wait for it, in words. One elsewhere may only be cut off from here."""
        found = ""
        if self.unanswered_partitions:
            found += f", and leads {some_of(self.unanswered_partitions)}"
            found += "" if self.is_elsewhere else ", whose writes wait"
        if self.awaited_partitions:
            found += f", and is in the ISR of {some_of(self.awaited_partitions)}"
            found += "" if self.is_elsewhere else ", where acks=all waits"
        return found

    @property
    def is_missing(self) -> bool:
        """Whether only its replicas are known: it is not registered, and was not started here."""
        return self.is_elsewhere and not self.alive

    def _lost_zookeeper(self) -> str:
        """Return for how long it has had no connection to ZooKeeper, in words; empty if that is nothing to tell."""
        if not self.has_lost_zookeeper:
            return ""
        return f"has had no connection to ZooKeeper for {self.zookeeper_away_s or 0:,.0f} s"

    @property
    def has_lost_zookeeper(self) -> bool:
        return self.zookeeper_away_s is not None and self.zookeeper_away_s >= _AWAY_AFTER_S

    def disk_problems(self, faults: Sequence[str]) -> list[str]:
        """Return what disks that are slow delay, each with the remedy. `faults`: see `problem`."""
        remedy = f"`minibroker heal {self.id}` ends the injected faults" if faults else "check the disk"
        return [
            f"the disk of broker {self.id} at {slow.log_dir} is slow: {counted(slow.calls, 'call')} took 1 s or longer "
            f"within 20 s, a {slow.longest_call} {slow.longest_s:,.1f} s. Meanwhile clients wait: all of them for a "
            f"write, those of topics with durability=synced for a flush; {remedy}"
            for slow in self.slow_disks
        ]


class ControllerStatus(msgspec.Struct, frozen=True):
    id: int | None
    epoch: int | None


class ZooKeeperStatus(msgspec.Struct, frozen=True):
    connect: str
    pid: int | None
    """None if it does not run, or was not started here."""
    alive: bool
    paused: bool
    is_elsewhere: bool
    """Whether it was not started here."""

    @property
    def trouble(self) -> str:
        """Why it serves no broker, as a predicate; empty if it runs."""
        if self.paused:
            return "is paused"
        if self.alive:
            return ""
        return "does not answer" if self.is_elsewhere else "is not running"


class Status(msgspec.Struct, frozen=True):
    brokers: list[BrokerStatus]
    controller: ControllerStatus
    zookeeper: ZooKeeperStatus | None
    """None if only the brokers are known."""
    offline_partitions: list[str] | None
    """`TOPIC-PARTITION` of those without a leader. None: unknown."""
    under_replicated_partitions: list[str] | None
    """`TOPIC-PARTITION` of those with fewer replicas in sync than assigned, without those that a reassignment adds.
    None: unknown."""
    under_min_isr_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those with fewer replicas in sync than `min.insync.replicas`. None: unknown."""
    at_min_isr_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those of `under_replicated_partitions` with just `min.insync.replicas` in sync. None:
    unknown."""
    not_preferred_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those led by another broker although the preferred one is in sync. None: unknown."""
    reassigning_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those whose replicas are being moved, if some of them are not in sync. None: unknown."""
    reassignments: Progress | None = None
    """The progress of `reassigning_partitions` together. None: there are none, or they are unknown."""
    full_disk: str | None = None
    """The directory of the cluster, if its disk has no room left."""
    offline_isr: list[int] = []
    """The brokers that are in the ISR of `offline_partitions`."""
    missing_replicas: list[int] = []
    """The brokers whose replicas are missing from the ISR of `under_replicated_partitions`."""
    missing_from_min_isr: list[int] = []
    """As `missing_replicas`, of `under_min_isr_partitions`."""
    stalled_partitions: dict[str, list[int]] | None = None
    """`TOPIC-PARTITION` of those whose records have waited for seconds to be committed, and the members of the ISR for
    which they wait. None: unknown."""
    doubted_stalls: list[str] = []
    """Those of `stalled_partitions` that wait for one of several members at least, and no leader says for which."""
    slow_followers: list[SlowFollower] = []
    """The live brokers that lag behind leaders, as these say."""
    slow_commits: list[SlowCommits] = []
    """The brokers for which acks=all waited just now. They are no problems, since that may be over."""
    faults: dict[int, list[str]] = {}
    """The faults that brokers were ordered to have, in words, by broker. They are no problems: somebody wanted them."""
    cut_from_zookeeper: list[int] = []
    """The brokers that do not reach ZooKeeper: they say so, or injected faults cut or isolate them."""
    missing_rights: list[str] = []
    """The rights without which the brokers do not show everything, as options of `minibroker acls add`. Without one to
    all topics, lists that would be empty are None."""
    hidden_topics: list[str] = []
    """Names of topics, and prefixes with a star, that DENY entries hide. Lists are None as without a right."""
    principal: str | None = None
    """Who lacks rights. None: only the brokers know."""
    hanging: list[str] = []
    """`HOST:PORT` at which connections are accepted and not answered, and no broker is registered."""

    @property
    def is_unknown(self) -> bool:
        return self.offline_partitions is None and not self.hides_topics

    @property
    def hides_topics(self) -> bool:
        """Whether there may be topics that are not seen."""
        return rights.TOPICS in self.missing_rights or bool(self.hidden_topics)

    @property
    def can_elect(self) -> bool:
        """Whether there is a controller that reaches ZooKeeper, as far as is known here."""
        if self.zookeeper is not None and (self.zookeeper.paused or not self.zookeeper.alive):
            return False
        if self.controller.id is None:
            return False
        return self.controller.id not in self.cut_from_zookeeper

    @property
    def is_any_partition_in_trouble(self) -> bool:
        return bool(
            self.is_unknown
            or self.hides_topics
            or self.offline_partitions
            or self.under_replicated_partitions
            or self.under_min_isr_partitions
            or self.stalled_partitions
            or self.slow_followers
            or self.slow_commits
            or any(broker.unanswered_partitions or broker.awaited_partitions for broker in self.brokers)
        )

    def problems(self) -> list[str]:
        """Return the problems, each a sentence with the remedy; none if the cluster is healthy."""
        found: list[str] = []
        if self.full_disk is not None:
            found.append(
                f"the disk of {self.full_disk} is full: make room there, then start the processes that have ended"
            )
        if self.zookeeper and not self.zookeeper.alive and not any(broker.alive for broker in self.brokers):
            return [*found, "the cluster is down: `minibroker up`"]
        zookeeper = self._zookeeper_problem()
        if zookeeper is not None:
            found.append(f"{zookeeper[0]}, so no leader and no controller can be elected: {zookeeper[1]}")
        for broker in self.brokers:
            told = replace(broker, zookeeper_away_s=None) if zookeeper is not None else broker
            faults = self.faults.get(broker.id, ())
            problem = told.problem(
                self.is_unknown,
                faults,
                "" if zookeeper is None else zookeeper[1],
                is_controller=broker.id == self.controller.id,
            )
            if problem is not None:
                found.append(problem)
            found += broker.disk_problems(faults)
            for path, reason in broker.offline_log_dirs.items():
                repair = (
                    f"`minibroker heal {broker.id}`"
                    if broker.id in self.faults
                    else f"free space in {path}, or move replicas away (`minibroker reassign`)"
                    if says_full_disk(reason)
                    else "repair the disk"
                )
                found.append(
                    f"broker {broker.id} has taken its log directory {path} offline ({reason}): {repair}, then restart "
                    "the broker"
                )
        found += [
            f"the broker at {address} accepts connections but does not answer: it hangs; look where it runs"
            for address in self.hanging
        ]
        if self.missing_rights:
            found.append(rights.told(self.missing_rights, self.principal))
        if self.hidden_topics:
            found.append(rights.hidden(self.hidden_topics, self.principal))
        if self.is_unknown:
            runs = not self.brokers or any(broker.alive and not broker.paused for broker in self.brokers)
            remedy = self._logs() if runs else self._remedy([broker.id for broker in self.brokers])
            found.append(f"no broker that knows the controller and the partitions answers: {remedy}")
        elif self.controller.id is None:
            remedy = self._logs() if zookeeper is None else zookeeper[1]
            found.append(f"no broker that answers knows a controller: {remedy}")
        if self.offline_partitions:
            found.append(f"{some_of(self.offline_partitions)} without a leader: {self._remedy(self.offline_isr)}")
        if self.under_min_isr_partitions:
            found.append(
                f"{some_of(self.under_min_isr_partitions)} with fewer replicas in sync than "
                "min.insync.replicas: acks=all is rejected and consumers see no new records until more are "
                f"in sync: {self._remedy(self.missing_from_min_isr, 'then wait')}"
            )
        if self.under_replicated_partitions:
            remedy = self._remedy(self.missing_replicas, "then wait")
            risk = ""
            if at_risk := self.at_min_isr_partitions:
                where = "" if len(at_risk) == len(self.under_replicated_partitions) else f" in {some_of(at_risk)}"
                risk = f" (one more loss stops acks=all{where})"
            found.append(
                f"{some_of(self.under_replicated_partitions)} with replicas missing from the ISR{risk}: {remedy}"
            )
        by_awaited: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
        for name, brokers in (self.stalled_partitions or {}).items():
            by_awaited.setdefault((name in self.doubted_stalls, tuple(brokers)), []).append(name)
        for (is_doubted, awaited), names in by_awaited.items():
            them, have, until = f"broker {' or '.join(map(str, awaited))}", "has", "it does or leaves"
            if len(awaited) > 1 and is_doubted:
                them += " (no leader said which)"
            elif len(awaited) > 1:
                them, have, until = all_of("broker", awaited), "have", "they do or leave"
            see = self._logs(awaited)
            down = [each.id for each in self.brokers if each.id in awaited and (each.paused or not each.alive)]
            if down or zookeeper is not None:  # no broker leaves the ISR without ZooKeeper
                see = self._remedy(down)
            elif self.faults:  # those of a leader delay its followers
                see = "`minibroker heal` ends the injected faults"
            found.append(
                f"{some_of(names)} with records that {them}, in the ISR, {have} not copied for {PATIENCE_S:g} s or "
                f"longer: acks=all waits until {until} the ISR (replica.lag.time.max.ms); {see}"
            )
        for slow in self.slow_followers:
            involved = [broker for broker in (slow.broker, *slow.leaders) if broker in self.faults]
            heal = "`minibroker heal` ends the injected faults" if involved else None
            found.append(slow.sentence(some_of(slow.partitions), heal))
        return found

    def slow_commit_lines(self) -> list[str]:
        """Return the brokers that delayed acks=all just now, each a sentence with the remedy."""
        heal = "`minibroker heal` ends the injected faults"
        return [
            slow.sentence(some_of(slow.partitions), heal if self.faults.keys() & {slow.broker, *slow.leaders} else None)
            for slow in self.slow_commits
        ]

    def _logs(self, brokers: Sequence[int] = ()) -> str:
        """Return where to look for the cause of a problem of these brokers, or of all."""
        if any(not broker.is_elsewhere for broker in self.brokers if not brokers or broker.id in brokers):
            return "see " + listed(f"`minibroker logs {broker}`" for broker in brokers or ("all",))
        if len(brokers) == 1:
            return f"look where broker {brokers[0]} runs"
        return f"look where {all_of('broker', brokers) if brokers else 'the brokers'} run"

    def _zookeeper_problem(self) -> tuple[str, str] | None:
        """Return why no broker reaches ZooKeeper, and the remedy. None: some may reach it."""
        if self.zookeeper is not None and not self.zookeeper.alive and self.zookeeper.is_elsewhere:
            return f"no ZooKeeper answers at {self.zookeeper.connect}", "start it where it runs"
        if self.zookeeper is not None and not self.zookeeper.alive:
            return "ZooKeeper is not running", "`minibroker start zookeeper`"
        if self.zookeeper is not None and self.zookeeper.paused:
            return "ZooKeeper is paused", "`minibroker resume zookeeper`"
        # Of a silent broker nothing is known, unless a fault cuts it.
        running = [
            broker.id
            for broker in self.brokers
            if broker.alive and not broker.paused and (not broker.silent or broker.id in self.cut_from_zookeeper)
        ]
        if not running or not set(running) <= set(self.cut_from_zookeeper):
            return None
        names, many = all_of("broker", running), len(running) > 1
        if set(running) <= self.faults.keys():
            return f"{names} {'are' if many else 'is'} cut from ZooKeeper by injected faults", _HEAL
        lasting = max(broker.zookeeper_away_s or 0.0 for broker in self.brokers if broker.id in running)
        them = "between it and the brokers" if many else "between the two"
        return (
            f"{names} {'have' if many else 'has'} had no connection to ZooKeeper for {lasting:,.0f} s",
            f"check ZooKeeper and the network {them}",
        )

    def _remedy(self, needed: Collection[int], after: str = "") -> str:
        """Return what brings the replicas of these brokers back, and `after` that; "wait" if they run. If no broker
        reaches ZooKeeper, the remedy of that comes first."""
        zookeeper = self._zookeeper_problem()
        if zookeeper is not None:
            faults = {} if zookeeper[1] == _HEAL else self.faults
            rest = replace(self, zookeeper=None, cut_from_zookeeper=[], faults=faults)._remedy(needed, after)
            return f"{zookeeper[1]}, then {rest}"
        known = {broker.id: broker for broker in self.brokers}
        here = [known[broker] for broker in sorted(needed) if broker in known]
        missing = [broker for broker in sorted(needed) if broker not in known or known[broker].is_missing]
        # Faults of any broker may keep a running one out; one that is down or paused is out for that.
        may_be_faults = any(broker.id in self.faults or (broker.alive and not broker.paused) for broker in here)
        may_be_faults = bool(self.faults) and (may_be_faults or not needed)
        remedies = ["`minibroker heal` (faults are injected)"] if may_be_faults else []
        failed = [each for broker in here if broker.id not in self.faults for each in broker.offline_log_dirs.items()]
        full = [path for path, reason in failed if says_full_disk(reason)]
        if len(full) < len(failed):
            remedies.append("repair the disks of the log directories")
        if full:
            remedies.append(f"free space in {listed(full)}")
        remedies += [
            f"let broker {broker.id} reach ZooKeeper"
            for broker in here
            if broker.registered is False and broker.has_lost_zookeeper and broker.id not in self.faults
        ]
        remedies += [f"`minibroker resume {broker.id}`" for broker in here if broker.paused]
        remedies += [
            f"`minibroker brokers remove {broker.id}`" if broker.leaving else f"`minibroker start {broker.id}`"
            for broker in here
            if not broker.alive and not broker.is_missing
        ]
        if missing:
            remedies.append(f"bring {all_of('broker', missing)} back")
        if not remedies:
            return "wait"
        return listed(remedies) + (f", {after}" if after and not failed else "")


def status_of_processes(
    cluster: ClusterFile,
    states: Mapping[int, ProcessState],
    zookeeper: ProcessState,
    view: ClusterView,
    last_errors: Mapping[int, str] = MappingProxyType({}),
    full_disk: str | None = None,
    offline_log_dirs: Mapping[int, dict[str, str]] = MappingProxyType({}),
    recoveries: Mapping[int, RecoveryProgress] = MappingProxyType({}),
    silent: Collection[int] = (),
    faults: Mapping[int, list[str]] = MappingProxyType({}),
    cut_from_zookeeper: Collection[int] = (),
) -> Status:
    """Return the status of a cluster that was started here.

    By broker id: `states` of the processes, `last_errors` of those that ended, `silent` the running brokers that did
    not answer, `recoveries` the progress of silent brokers that start, `faults` those that were ordered, and
    `cut_from_zookeeper` the brokers that these cut from it. A ZooKeeper elsewhere is RUNNING if it answers, else GONE.
    """
    asked, slow = view, view.slow()
    view = view.without([broker for broker, state in states.items() if state is ProcessState.GONE])
    brokers = [
        BrokerStatus(
            id=entry.id,
            pid=entry.process.pid if entry.process and states[entry.id] is not ProcessState.GONE else None,
            alive=states[entry.id] is not ProcessState.GONE,
            port=entry.port,
            paused=states[entry.id] is ProcessState.PAUSED,
            registered=(None if view.is_unknown else entry.id in view.brokers and entry.address not in view.uninformed),
            leaders=None if view.is_unknown else len(view.led_by(entry.id)),
            last_error=last_errors.get(entry.id),
            offline_log_dirs=offline_log_dirs.get(entry.id, {}),
            metrics_port=entry.metrics_port,
            recovery=recoveries.get(entry.id),
            silent=entry.id in silent,
            leaving=entry.leaving is not None,
            **_waits(view, entry.id, entry.id in silent or states[entry.id] is ProcessState.PAUSED),
            slow_answer_s=slow.get(entry.id),
            **_told(view, entry.id),
        )
        for entry in cluster.brokers
    ]
    brokers += [broker for broker in _elsewhere(view, offline_log_dirs) if broker.id not in states]
    server = cluster.zookeeper
    found = _status(
        brokers,
        ZooKeeperStatus(
            connect=server.connect,
            pid=server.process.pid if server.process and zookeeper is not ProcessState.GONE else None,
            alive=zookeeper is not ProcessState.GONE,
            paused=zookeeper is ProcessState.PAUSED,
            is_elsewhere=server.port is None,
        ),
        view,
        asked,
        full_disk,
        faults,
    )
    return replace(found, cut_from_zookeeper=sorted({*found.cut_from_zookeeper, *cut_from_zookeeper}))


def status_of_view(
    view: ClusterView,
    offline_log_dirs: Mapping[int, dict[str, str]] = MappingProxyType({}),
    principal: str | None = None,
) -> Status:
    """Return the status of a cluster elsewhere, whose processes are unknown: brokers that are registered
    or answer count as alive.
    `principal`: who has asked, if known."""
    unregistered = {*view.hanging()}.difference(view.brokers.values())
    hanging = [f"{host}:{port}" for host, port in sorted(unregistered)]
    return replace(_status(_elsewhere(view, offline_log_dirs), None, view, view), principal=principal, hanging=hanging)


def _elsewhere(view: ClusterView, offline_log_dirs: Mapping[int, dict[str, str]]) -> list[BrokerStatus]:
    silent, slow = view.silent(), view.slow()
    present = [
        BrokerStatus(
            id=broker,
            pid=None,
            alive=True,
            port=address[1],
            paused=False,
            registered=broker in view.brokers,
            leaders=None if rights.hides_topics(view) else len(view.led_by(broker)),
            offline_log_dirs=offline_log_dirs.get(broker, {}),
            silent=broker in silent,
            is_elsewhere=True,
            **_waits(view, broker, broker in silent),
            slow_answer_s=slow.get(broker),
            **_told(view, broker),
        )
        for broker, address in {**view.unregistered, **view.brokers}.items()
    ]
    missing = [
        BrokerStatus(broker, None, alive=False, port=None, paused=False, registered=False, leaders=0, is_elsewhere=True)
        for broker in view.missing()
    ]
    return sorted((*present, *missing), key=lambda broker: broker.id)


class _Waits(TypedDict, total=False):
    """Fields of `BrokerStatus`."""

    unanswered_partitions: list[str]
    awaited_partitions: list[str]


def _waits(view: ClusterView, broker_id: int, is_silent: bool) -> _Waits:
    if not is_silent:
        return {}
    return {
        "unanswered_partitions": _names(view.led_by(broker_id)),
        "awaited_partitions": _names(view.waiting_for(broker_id)),
    }


class _Told(TypedDict, total=False):
    """Fields of `BrokerStatus`."""

    zookeeper_away_s: float | None
    zookeeper_session_timeout_s: float | None
    slow_disks: list[SlowDisk]
    zookeeper_losses: int


def _told(view: ClusterView, broker_id: int) -> _Told:
    """Return what a broker has told of itself."""
    health = view.health.get(broker_id)
    if health is None:
        return {}
    away_ms = health.zookeeper_away_ms
    return {
        "zookeeper_away_s": None if away_ms < 0 else away_ms / 1_000,
        "zookeeper_session_timeout_s": health.zookeeper_session_timeout_ms / 1_000,
        "slow_disks": [
            SlowDisk(one.log_dir, one.calls, one.longest_ms / 1_000, one.longest_call) for one in health.slow_disks
        ],
        "zookeeper_losses": health.zookeeper_losses,
    }


def _status(
    brokers: list[BrokerStatus],
    zookeeper: ZooKeeperStatus | None,
    view: ClusterView,
    asked: ClusterView,
    full_disk: str | None = None,
    faults: Mapping[int, list[str]] = MappingProxyType({}),
) -> Status:
    """`asked` is the view that still has dead brokers in the ISR."""

    def unless_unknown(partitions: Iterable[TopicPartition]) -> list[str] | None:
        return None if view.is_unknown else _names(partitions) or nothing

    nothing: list[str] | None = None if rights.hides_topics(view) else []
    offline = {broker.id for broker in brokers if broker.offline_log_dirs}
    told_s = (broker.zookeeper_session_timeout_s for broker in brokers)
    longest_s = max((timeout_s for timeout_s in told_s if timeout_s is not None), default=None)
    return Status(
        brokers=[
            replace(broker, zookeeper_session_timeout_s=broker.zookeeper_session_timeout_s or longest_s)
            for broker in brokers
        ],
        zookeeper=zookeeper,
        controller=ControllerStatus(view.controller_id, view.controller_epoch),
        offline_partitions=unless_unknown(view.offline_partitions()),
        under_replicated_partitions=unless_unknown(view.under_replicated_partitions()),
        under_min_isr_partitions=unless_unknown(view.under_min_isr_partitions()),
        at_min_isr_partitions=unless_unknown(view.at_min_isr_partitions()),
        not_preferred_partitions=unless_unknown(view.not_preferred_partitions()),
        reassigning_partitions=unless_unknown(one.name for one in view.movements),
        reassignments=progress(view.movements) if view.movements else None,
        full_disk=full_disk,
        stalled_partitions=None
        if view.is_unknown or (nothing is None and not view.stalls)
        else {str(name): [*to] for name, to in view.stalls.items()},
        doubted_stalls=sorted(map(str, view.doubted_stalls)),
        faults=dict(faults),
        offline_isr=sorted({b for name in view.offline_partitions() for b in asked.partitions[name].isr_nodes}),
        missing_replicas=sorted(view.missing_from_isr(view.under_replicated_partitions())),
        missing_from_min_isr=sorted(view.missing_from_isr(view.under_min_isr_partitions())),
        # One with a log directory offline does not ask for the replicas there, and the directory is a problem already.
        slow_followers=[
            late for late in slow_followers(view) if late.is_in_sync or not late.is_silent or late.broker not in offline
        ],
        slow_commits=slow_commits(view),
        cut_from_zookeeper=sorted(broker.id for broker in brokers if broker.has_lost_zookeeper),
        missing_rights=list(view.missing_rights),
        hidden_topics=list(view.hidden_topics),
    )


def _names(partitions: Iterable[TopicPartition]) -> list[str]:
    return [str(partition) for partition in partitions]


def some_of(partitions: Sequence[str]) -> str:
    """Return a readable line: the first partitions by name, internal topics last, and a count of the rest by topic."""
    ordered = sorted(partitions, key=lambda name: name.rpartition("-")[0] in INTERNAL_TOPICS)
    named = len(ordered) if len(ordered) == _NAMED + 1 else _NAMED  # its name is shorter than "1 more"
    shown = ", ".join(ordered[:named])
    rest = Counter(name.rpartition("-")[0] for name in ordered[named:])
    if not rest:
        return shown
    counts = [f"{topic} {count:,}" for topic, count in rest.most_common(_NAMED)]
    if len(rest) > _NAMED:
        counts.append(f"{len(rest) - _NAMED:,} more topics")
    return f"{shown} and {rest.total():,} more partitions ({', '.join(counts)})"

"""What the pages show of the cluster, as values. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, permutations
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from minibroker.client.administering.movements import Copy, Movement
from minibroker.client.administering.requests import ClusterDescription
from minibroker.client.administering.topics import PartitionDescription, TopicDescription
from minibroker.deploy.console.sessions import Session
from minibroker.deploy.console.state import ClusterState
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.observing.followers import SlowFollower
from minibroker.deploy.observing.status import BrokerStatus, Status
from minibroker.protocol import faults
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of

T = TypeVar("T")

PARTITIONS_A_PAGE = 100
GROUPS_A_PAGE = 10
TROUBLES_SHOWN = 10
NO_SESSION = Session(None, None, None, None)


class Query(NamedTuple):
    """What the reader of a page chose, in its address, by the names of the parameters."""

    topic: str = ""
    group: str = ""
    page: int = 1
    internal: bool = False
    partition: str = ""
    start: str = ""
    """Of records, as `minibroker consume --from` takes it. Empty: follow the end."""
    form: str = "auto"
    """Of keys and values."""
    broker: str = ""
    """The owner of the settings that are shown."""


class BrokerView(NamedTuple):
    id: int
    address: str
    """Empty: it is not alive, so nobody knows."""
    state: str
    """"alive", "silent" (registered, but it does not answer), "slow" (as silent, but `minibroker status`, which waits
    longer, had its answer), "paused" (its process is), "out" (its process runs on this machine, but it is not
    registered) or "dead" (its process on this machine has ended, or it is not registered)."""
    is_controller: bool
    leads: int
    in_sync: int
    """Replicas of which it is an in-sync one."""
    out_of_sync: int
    session: Session
    faults: tuple[str, ...] = ()
    """Those that it was ordered to have, in words."""
    is_without_zookeeper: bool = False
    zookeeper_losses: int = 0
    """See `BrokerStatus.zookeeper_losses`."""
    zookeeper_trouble: str = ""
    """See `ZooKeeperStatus.trouble`: then no session ends."""


class Cell(NamedTuple):
    """A partition's replica on a broker."""

    role: str
    """"leader", "in sync", "out of sync", or empty if the broker has no replica."""
    behind: int | None
    """Committed records that the replica lacks. None: unknown."""
    doubt: str = ""
    """Why a replica in sync may not copy what the leader has; empty if nothing is known."""


class PartitionView(NamedTuple):
    name: TopicPartition
    cells: tuple[Cell, ...]
    """By broker, in the order of the brokers."""
    end: int | None
    leader_epoch: int
    trouble: str
    """The first of TROUBLES that holds; empty if none does."""
    detail: str


class Overview(NamedTuple):
    cluster_id: str
    controller: str
    brokers: tuple[BrokerView, ...]
    partitions: tuple[PartitionView, ...]
    """Those of this page."""
    page: int
    pages: int
    selected: int
    """Partitions that the query selects, on all pages."""
    internal: int
    """Partitions of internal topics."""
    troubles: tuple[PartitionView, ...]
    """Some of those in trouble, in the order of TROUBLES, and those of internal topics last."""
    trouble_counts: tuple[tuple[str, int], ...]
    """Of all partitions."""
    moves: tuple[Movement, ...]
    """The reassignments in progress."""


NO_LEADER, SILENT_LEADER, SLOW_LEADER = "no leader", "leader does not answer", "leader is slow to answer"
UNDER_MIN_ISR, NOT_COPYING, OUT_OF_SYNC = "under min.insync.replicas", "not copied by the whole ISR", "out of sync"
CUT_APART, SLOW_IN_SYNC = "cut within the ISR", "copied slowly within the ISR"
TROUBLES = (NO_LEADER, SILENT_LEADER, UNDER_MIN_ISR, NOT_COPYING, CUT_APART, SLOW_LEADER, SLOW_IN_SYNC, OUT_OF_SYNC)
"""The worst first."""
CUT, STALLED, MAY_STALL, SLOW = "cut from the leader", "does not copy", "may not copy", "copies slowly"
"""Doubts about a replica in sync: a fault cuts it and the leader apart; records have waited for it, or for another one,
for seconds; it lags or delays acks=all."""
UNANSWERED = {
    "silent": "does not answer",
    "slow": "slow to answer",
    "paused": "paused",
    "out": "out of the cluster",
    "dead": "dead",
}
"""Doubts about a replica in sync whose broker has not answered this time, by the state of the broker."""


class _Seen(NamedTuple):
    """The state, and what follows from it and from the health for each broker."""

    state: ClusterState
    states: Mapping[int, str]
    """See `BrokerView.state`."""
    stalled: Mapping[str, Sequence[int]]
    """See `Status.stalled_partitions`."""
    doubted: Collection[str]
    """See `Status.doubted_stalls`."""
    slow: Set[tuple[str, int]]
    """Replicas in sync that lag or delay acks=all, by the names of their partitions and their brokers."""
    cuts: Set[tuple[int, int]]
    """Pairs of brokers of which the first cannot copy from the second by their faults, which do not say on whose side
    the cut is."""
    without_zookeeper: Set[int]
    """See `Status.cut_from_zookeeper`."""
    zookeeper_losses: Mapping[int, int]
    """By broker."""
    zookeeper_trouble: str


def _seen(state: ClusterState, health: Status | None = None) -> _Seen:
    registered = {broker.id for broker in state.description.brokers}
    slow = {each.id for each in (() if health is None else health.brokers) if each.slow_answer_s is not None}
    ids = broker_ids(state)
    lagging = () if health is None else health.slow_followers
    delaying = () if health is None else health.slow_commits
    return _Seen(
        state,
        {id: _state_of(state, id, id in registered, id in slow) for id in ids},
        {} if health is None else health.stalled_partitions or {},
        () if health is None else health.doubted_stalls,
        {(name, late.broker) for late in lagging if late.is_in_sync for name in late.partitions}
        | {(name, slow.broker) for slow in delaying for name in slow.partitions},
        {pair for pair in permutations(ids if state.faults else (), 2) if faults.are_cut_apart(state.faults, *pair)},
        set() if health is None else set(health.cut_from_zookeeper),
        {} if health is None else {each.id: each.zookeeper_losses for each in health.brokers},
        "" if health is None or health.zookeeper is None else health.zookeeper.trouble,
    )


def overview(state: ClusterState, query: Query, health: Status | None = None) -> Overview:
    """`health` is what `minibroker status` has found a few seconds ago, if it is known."""
    seen = _seen(state, health)
    ids = tuple(seen.states)
    page, pages, selected, shown = _page_of_partitions(state, query)
    troubled = _troubled(seen)
    counts = Counter(trouble for trouble, _, _ in troubled)
    described = state.description
    return Overview(
        described.cluster_id or "",
        "none" if described.controller_id is None else f"broker {described.controller_id}",
        tuple(_brokers(seen)),
        tuple(_partition(seen, ids, *pair) for pair in shown),
        page,
        pages,
        selected,
        sum(len(topic.partitions) for topic in state.topics.values() if topic.is_internal),
        tuple(_partition(seen, ids, topic, each) for _, topic, each in troubled[:TROUBLES_SHOWN]),
        tuple((trouble, counts[trouble]) for trouble in TROUBLES if counts[trouble]),
        tuple(_moves(state)),
    )


def signs_of(state: ClusterState) -> object:
    """Return a value that differs if brokers, the controller or ZooKeeper have come, gone, or stopped to answer, or
    brokers of this machine have other faults."""
    registered = frozenset(broker.id for broker in state.description.brokers)
    processes = state.paused, state.gone, state.zookeeper, state.faults
    return registered, state.description.controller_id, frozenset(state.behind), processes


def still_true(health: Status, state: ClusterState) -> Status:
    """Return `health` without what a newer state contradicts: it may be some seconds older."""
    registered = {broker.id for broker in state.description.brokers}
    brokers = [_broker_still(each, state, each.id in registered) for each in health.brokers]
    stalled = {
        name: [broker for broker in awaited if broker in _isr_of(state, name)]
        for name, awaited in (health.stalled_partitions or {}).items()
    }
    zookeeper = health.zookeeper
    if zookeeper is not None and state.zookeeper is not None:
        is_alive, is_paused = state.zookeeper is not ProcessState.GONE, state.zookeeper is ProcessState.PAUSED
        zookeeper = replace(zookeeper, pid=zookeeper.pid if is_alive else None, alive=is_alive, paused=is_paused)
    known = _with_losses(health, state)
    is_local = bool(state.paused | state.running | state.gone)
    return replace(
        known,
        brokers=brokers,
        zookeeper=zookeeper,
        faults={broker: faults.described(each) for broker, each in state.faults.items()} if is_local else health.faults,
        offline_partitions=_still(known.offline_partitions, state, _is_offline),
        under_min_isr_partitions=_still(known.under_min_isr_partitions, state, _may_be_under_min_isr),
        at_min_isr_partitions=_still(known.at_min_isr_partitions, state, _lacks_replicas),
        under_replicated_partitions=_still(known.under_replicated_partitions, state, _lacks_replicas),
        stalled_partitions=None
        if health.stalled_partitions is None
        else {name: awaited for name, awaited in stalled.items() if awaited},
        slow_commits=[each for each in health.slow_commits if each.broker in state.behind],
        slow_followers=[late for each in health.slow_followers if (late := _slow_still(each, state)) is not None],
    )


def _with_losses(health: Status, state: ClusterState) -> Status:
    """Add the partitions that lack replicas or leaders since processes have ended that lived when `health` was found:
    otherwise it would name only those that were dead before in its remedies."""
    lost = {each.id for each in health.brokers if each.alive and each.id in state.gone}
    offline, missing = health.offline_partitions, health.under_replicated_partitions
    if not lost or offline is None or missing is None:
        return health
    lacking: dict[str, set[int]] = {}
    leaderless: dict[str, tuple[int, ...]] = {}
    for topic in state.topics.values():
        for each in topic.partitions:
            name = TopicPartition(topic.name, each.partition)
            move = state.moves.get(name)
            if of_it := lost.intersection(each.replicas).difference(() if move is None else move.adding):
                lacking[str(name)] = of_it
                if each.leader is None and of_it & {*each.isr}:
                    leaderless[str(name)] = each.isr
    under_min, at_min = health.under_min_isr_partitions or (), health.at_min_isr_partitions
    return replace(
        health,
        offline_partitions=[*dict.fromkeys([*offline, *leaderless])],
        offline_isr=sorted({*health.offline_isr}.union(*leaderless.values())),
        under_replicated_partitions=[*dict.fromkeys([*missing, *lacking])],
        missing_replicas=sorted({*health.missing_replicas}.union(*lacking.values())),
        missing_from_min_isr=sorted(
            {*health.missing_from_min_isr}.union(*(lacking.get(each, ()) for each in under_min))
        ),
        at_min_isr_partitions=None if at_min is None else [name for name in at_min if name not in lacking],
    )


def without_dead(
    description: ClusterDescription, topics: Mapping[str, TopicDescription], gone: Collection[int]
) -> tuple[ClusterDescription, Mapping[str, TopicDescription]]:
    """Return them without dead brokers as controller and leaders, as `minibroker status` shows them. The living brokers
    learn of the deaths later, or never if there is no ZooKeeper; until then acks=all waits for the dead in the ISR."""
    if not gone:
        return description, topics
    return description._replace(
        controller_id=None if description.controller_id in gone else description.controller_id
    ), {
        name: topic._replace(
            partitions=tuple(each._replace(leader=None) if each.leader in gone else each for each in topic.partitions)
        )
        for name, topic in topics.items()
    }


def _slow_still(late: SlowFollower, state: ClusterState) -> SlowFollower | None:
    """A replica that has left the ISR, or joined it, is in another state since."""
    if late.broker not in state.behind:
        return None
    names = [name for name in late.partitions if (late.broker in _isr_of(state, name)) == late.is_in_sync]
    return replace(late, partitions=names) if names else None


def _broker_still(health: BrokerStatus, state: ClusterState, is_registered: bool) -> BrokerStatus:
    """Processes are known at once, `health` some seconds later, and the end of a registration between the two."""
    broker_id, answers = health.id, health.id in state.behind
    is_alive = health.alive or (health.is_missing and is_registered)
    is_gone = broker_id in state.gone or (not is_alive and broker_id not in state.paused | state.running)
    is_paused = broker_id in state.paused or (health.paused and broker_id not in state.gone | state.running)
    # Of one that was started or resumed since, nothing is known yet but its registration.
    is_back = not is_gone and not is_paused and (not health.alive or health.paused)
    if is_paused:
        names = _names_of(state) if is_registered else []
    elif is_registered and not answers and not is_gone and not is_back:
        names = [*health.unanswered_partitions, *health.awaited_partitions]
    else:
        names = []
    return replace(
        health,
        pid=None if is_gone else health.pid,
        last_error=state.last_errors.get(broker_id) if broker_id in state.gone else health.last_error,
        alive=not is_gone,
        paused=is_paused,
        registered=None if health.registered is None or (is_back and not is_registered) else is_registered,
        silent=health.silent and not answers,
        slow_disks=[] if is_gone else health.slow_disks,
        slow_answer_s=None if answers else health.slow_answer_s,
        unanswered_partitions=[name for name in names if _led_by(state, name) == broker_id],
        awaited_partitions=[
            name
            for name in names
            if broker_id in _isr_of(state, name) and _led_by(state, name) not in (broker_id, None)
        ],
    )


def _names_of(state: ClusterState) -> list[str]:
    return [f"{topic.name}-{each.partition}" for topic in state.topics.values() for each in topic.partitions]


def _described(state: ClusterState, name: str) -> PartitionDescription | None:
    topic_name, _, number = name.rpartition("-")
    topic = state.topics.get(topic_name)
    return None if topic is None or int(number) >= len(topic.partitions) else topic.partitions[int(number)]


def _led_by(state: ClusterState, name: str) -> int | None:
    described = _described(state, name)
    return None if described is None else described.leader


def _still(
    names: list[str] | None, state: ClusterState, is_true: Callable[[ClusterState, str], bool]
) -> list[str] | None:
    return None if names is None else [name for name in names if is_true(state, name)]


def _is_offline(state: ClusterState, name: str) -> bool:
    described = _described(state, name)
    return described is not None and described.leader is None


def _lacks_replicas(state: ClusterState, name: str) -> bool:
    """Return whether replicas are missing from the ISR, besides those that a reassignment adds."""
    topic, _, number = name.rpartition("-")
    described, move = _described(state, name), state.moves.get(TopicPartition(topic, int(number)))
    return described is not None and not {*described.isr}.difference(state.gone).issuperset(
        {*described.replicas}.difference(() if move is None else move.adding)
    )


def _may_be_under_min_isr(state: ClusterState, name: str) -> bool:
    """Return whether too few replicas are in sync; true if it is not known how many must be."""
    described, required = _described(state, name), state.min_isr.get(name.rpartition("-")[0])
    if described is None:
        return False
    in_sync = {*described.isr}.difference(state.gone)
    if in_sync.issuperset(described.replicas):
        return False
    return required is None or len(in_sync) < min(required, len(described.replicas))


def _isr_of(state: ClusterState, name: str) -> tuple[int, ...]:
    described = _described(state, name)
    return () if described is None else described.isr


def _moves(state: ClusterState) -> Iterator[Movement]:
    """Yield the reassignments in progress of partitions that there are."""
    for name, move in sorted(state.moves.items()):
        topic = state.topics.get(name.topic)
        described = (
            None if topic is None else next((p for p in topic.partitions if p.partition == name.partition), None)
        )
        if described is not None:
            size = None if described.leader is None else move.sizes.get(described.leader)
            # A broker that answers and has no log of it has not begun.
            copies = (Copy(b, move.sizes.get(b, 0 if b in state.behind else None)) for b in move.adding)
            yield Movement(name, tuple(copies), move.removing, size)


def shown_partitions(state: ClusterState, query: Query, health: Status | None = None) -> set[TopicPartition]:
    """Return the partitions that the overview shows, which does not depend on their ends."""
    _, _, _, shown = _page_of_partitions(state, query)
    pairs = [*shown, *((topic, each) for _, topic, each in _troubled(_seen(state, health))[:TROUBLES_SHOWN])]
    return {TopicPartition(topic.name, each.partition) for topic, each in pairs}


Pair = tuple[TopicDescription, PartitionDescription]


def _page_of_partitions(state: ClusterState, query: Query) -> tuple[int, int, int, Sequence[Pair]]:
    """Return the number of the page, that of pages, that of selected partitions, and the partitions of the page."""
    selected = [
        (topic, each)
        for topic in state.topics.values()
        if (topic.name == query.topic if query.topic else query.internal or not topic.is_internal)
        for each in topic.partitions
    ]
    page, pages, shown = page_of(selected, query.page, PARTITIONS_A_PAGE)
    return page, pages, len(selected), shown


def _troubled(seen: _Seen) -> list[tuple[str, TopicDescription, PartitionDescription]]:
    """Return the partitions in trouble, the worst first and those of internal topics last."""
    found = [
        (trouble, topic, each)
        for topic in seen.state.topics.values()
        for each in topic.partitions
        if (trouble := _trouble(seen, topic, each))
    ]
    return sorted(found, key=lambda one: (TROUBLES.index(one[0]), one[1].is_internal))


def broker_ids(state: ClusterState) -> list[int]:
    """Return the live brokers, and dead ones that have replicas."""
    with_replicas = {b for topic in state.topics.values() for each in topic.partitions for b in each.replicas}
    return sorted(with_replicas.union(broker.id for broker in state.description.brokers))


def page_of(items: Sequence[T], page: int, size: int) -> tuple[int, int, Sequence[T]]:
    """Return the page that there is, from 1, the number of pages, and the page's items."""
    pages = max(1, -(-len(items) // size))
    page = min(max(1, page), pages)
    return page, pages, items[(page - 1) * size : page * size]


def _state_of(state: ClusterState, broker_id: int, is_registered: bool, is_slow: bool) -> str:
    if broker_id in state.gone:
        return "dead"
    if broker_id in state.paused:
        return "paused"
    if not is_registered:
        return "out" if broker_id in state.running else "dead"
    if broker_id in state.behind:
        return "alive"
    return "slow" if is_slow else "silent"


def _brokers(seen: _Seen) -> Iterator[BrokerView]:
    state = seen.state
    alive = {broker.id: broker for broker in state.description.brokers}
    everything = [each for topic in state.topics.values() for each in topic.partitions]
    leads = Counter(each.leader for each in everything)
    replicas = Counter(chain.from_iterable(each.replicas for each in everything))
    in_sync = Counter(chain.from_iterable(each.isr for each in everything))
    for broker_id, broker_state in seen.states.items():
        broker = alive.get(broker_id)
        yield BrokerView(
            broker_id,
            "" if broker is None else f"{broker.host}:{broker.port}",
            broker_state,
            state.description.controller_id == broker_id,
            leads[broker_id],
            in_sync[broker_id],
            replicas[broker_id] - in_sync[broker_id],
            state.sessions.get(broker_id, NO_SESSION),
            tuple(faults.described(state.faults[broker_id])) if broker_id in state.faults else (),
            broker_id in seen.without_zookeeper,
            seen.zookeeper_losses.get(broker_id, 0),
            seen.zookeeper_trouble,
        )


def _partition(
    seen: _Seen, ids: Iterable[int], topic: TopicDescription, described: PartitionDescription
) -> PartitionView:
    state = seen.state
    name = TopicPartition(topic.name, described.partition)
    trouble = _trouble(seen, topic, described)
    missing = sorted(set(described.replicas) - set(described.isr))
    details = [all_of("broker", missing)] if missing else []
    move = state.moves.get(name)
    if move is not None and set(missing) <= set(move.adding):
        details = [f"{text}, being reassigned" for text in details]
    if trouble != OUT_OF_SYNC:
        details = [f"{OUT_OF_SYNC}: {text}" for text in details]
    doubts = {broker_id: _doubt(seen, name, described, broker_id) for broker_id in sorted(described.isr)}
    details[:0] = [
        f"the way between brokers {min(id, described.leader or 0)} and {max(id, described.leader or 0)} is cut"
        if doubt == CUT
        else f"broker {id} {doubt}"
        for id, doubt in doubts.items()
        if doubt in (CUT, STALLED, MAY_STALL, SLOW)  # a broker that does not answer is a trouble of all its partitions
    ]
    if trouble == UNDER_MIN_ISR:
        details.insert(0, f"{len(described.isr)} in sync, {_min_isr(state, topic, described)} required")
    if trouble in (SILENT_LEADER, SLOW_LEADER) and (of_leader := state.faults.get(described.leader or 0)) is not None:
        words = "; ".join(faults.described(of_leader))
        details.insert(0, f"injected faults of broker {described.leader}: {words}")
    return PartitionView(
        name,
        tuple(_cell(seen, name, described, broker_id) for broker_id in ids),
        state.ends.get(name),
        described.leader_epoch,
        trouble,
        "; ".join(details),
    )


def _cell(seen: _Seen, name: TopicPartition, described: PartitionDescription, broker_id: int) -> Cell:
    if broker_id not in described.replicas:
        return Cell("", None)
    behind = seen.state.behind.get(broker_id, {}).get(name)
    if broker_id == described.leader:
        return Cell("leader", None)
    lag = None if behind == -1 else behind
    if broker_id not in described.isr:
        return Cell(OUT_OF_SYNC, lag)
    return Cell("in sync", lag, _doubt(seen, name, described, broker_id))


def _doubt(seen: _Seen, name: TopicPartition, described: PartitionDescription, broker_id: int) -> str:
    """Return the doubt about a replica in sync. Faults are known at once, before records wait."""
    if broker_id == described.leader:
        return ""
    if (broker_id, described.leader) in seen.cuts:
        return CUT
    if broker_id not in seen.state.behind:
        return UNANSWERED[seen.states[broker_id]]
    awaited = seen.stalled.get(str(name), ()) if seen.stalled else ()
    if broker_id in awaited:
        return MAY_STALL if str(name) in seen.doubted and len(awaited) > 1 else STALLED
    return SLOW if seen.slow and (str(name), broker_id) in seen.slow else ""


def _trouble(seen: _Seen, topic: TopicDescription, described: PartitionDescription) -> str:
    leader = described.leader
    if leader is None:
        return NO_LEADER
    is_slow = seen.states.get(leader) == "slow"
    if leader not in seen.state.behind and not is_slow:
        return SILENT_LEADER
    if len(described.isr) < _min_isr(seen.state, topic, described):
        return UNDER_MIN_ISR
    awaited = seen.stalled.get(f"{topic.name}-{described.partition}", ()) if seen.stalled else ()
    if any(each != leader and each in described.isr for each in awaited):
        return NOT_COPYING
    if seen.cuts and any((each, leader) in seen.cuts for each in described.isr):
        return CUT_APART
    if is_slow:
        return SLOW_LEADER
    if seen.slow and any((f"{topic.name}-{described.partition}", each) in seen.slow for each in described.isr):
        return SLOW_IN_SYNC
    return OUT_OF_SYNC if len(described.isr) < len(described.replicas) else ""


def _min_isr(state: ClusterState, topic: TopicDescription, described: PartitionDescription) -> int:
    return min(state.min_isr.get(topic.name, 0), len(described.replicas))

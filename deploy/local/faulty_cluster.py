"""A local cluster whose brokers can have faults of their own, without root: of their disks, networks and clocks.

The brokers inject them into themselves (`injected.py`); a process is killed or paused by `LocalCluster`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from minibroker.client.admin import Admin
from minibroker.client.security import Security
from minibroker.deploy.errors import LaunchError, hidden_from_pytest
from minibroker.deploy.local import cluster_file, data_directory, injected, resolution, secured
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import KILL_TIMEOUT_S, ProcessState, wait_until
from minibroker.deploy.local.who import ZOOKEEPER, BrokerId, Coordinated, Member, Who, ZooKeeperServer, name_of
from minibroker.deploy.moving import lead_by_first, order_after_move
from minibroker.deploy.observing.cluster_view import ask_offline_log_dirs
from minibroker.protocol import faults
from minibroker.protocol.faults import Faults
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import listed

__tracebackhide__ = hidden_from_pytest


class FaultyCluster(LocalCluster):
    """As `LocalCluster`. The additional methods take effect before they return, at brokers that run; at others when
    these start or resume. They raise LaunchError for a cluster that was started without `allow_faults`."""

    def faults(self) -> Mapping[int, Faults]:
        """Return the faults of each broker that has any."""
        return injected.all_faults(self.directory, self.file())

    def fill_disk(self, who: Who, log_dir: int | None = None) -> list[Member]:
        """Let no file of the broker grow, as on a full disk; only in its log directory of this number, if given."""
        return self._inject(who, lambda id, found: faults.disks_filled(found, self._disks(id, log_dir)))

    def break_disk(self, who: Who, log_dir: int | None = None) -> list[Member]:
        """Let each call of the broker's disk fail with EIO; only in its log directory of this number, if given."""
        return self._inject(who, lambda id, found: faults.disks_broken(found, self._disks(id, log_dir)))

    def slow_disk(
        self, who: Who, sync_delay_s: float, write_delay_s: float | None = 0.0, log_dir: int | None = None
    ) -> list[Member]:
        """Let each fsync, and each write, take this much longer; zeros end it, and None keeps the delay of writes."""
        sync_ms = injected.milliseconds(sync_delay_s)
        write_ms = None if write_delay_s is None else injected.milliseconds(write_delay_s)
        return self._inject(
            who, lambda id, found: faults.disks_slowed(found, self._disks(id, log_dir), sync_ms, write_ms)
        )

    def cut(self, who: Who, other: Who, *, one_way: bool = False) -> list[Member]:
        """Lose all packets between members, or, `one_way`, those that the first sends to the other. Returns all of
        them. One of them may be ZooKeeper."""
        pairs = self._pairs(who, other)
        if one_way and any(ZOOKEEPER in pair for pair in pairs):
            raise LaunchError("a broker and ZooKeeper are cut apart in both ways: leave one-way out")
        changes = _Changes()
        for first, second in pairs:
            if isinstance(first, int) and isinstance(second, int):
                changes.add(first, partial(faults.link_cut, peer=second, sent=True, received=not one_way))
                changes.add(second, partial(faults.link_cut, peer=first, sent=not one_way, received=True))
            else:
                changes.add(first if isinstance(first, int) else second, faults.zookeeper_cut)
        return self._order(_members(pairs), changes.of)

    def isolate(self, who: Who) -> list[Member]:
        """Let no packet of the broker pass, from or to other brokers, ZooKeeper and clients."""
        injected.check_allowed(self.file())
        members = self.resolve(who)
        if ZOOKEEPER in members:
            raise LaunchError("ZooKeeper is isolated by a cut: `minibroker fault cut zookeeper all`")
        changes = _Changes()
        for member in members:
            changes.add(member, faults.isolated)
            for entry in self.file().brokers:  # their kernels would accept connections for it
                if entry.id != member and isinstance(member, int):
                    changes.add(entry.id, partial(faults.link_cut, peer=member, sent=True, received=True))
        self._order(list(changes.by_broker), changes.of)
        return members

    def slow_network(self, who: Who, delay_s: float, other: Who | None = None) -> list[Member]:
        """Let each packet that the broker sends take this much longer; or, with `other`, each packet between the two,
        in either direction. Zero ends it."""
        delay_ms = injected.milliseconds(delay_s)
        if other is None:
            return self._inject(who, lambda _, found: faults.network_slowed(found, delay_ms))
        pairs = self._pairs(who, other)
        if any(ZOOKEEPER in pair for pair in pairs):
            raise LaunchError("the way to ZooKeeper cannot be slow: give two brokers; `fault cut` cuts it")
        changes = _Changes()
        for first, second in pairs:
            for end, peer in ((first, second), (second, first)):
                changes.add(end, partial(faults.link_slowed, peer=int(peer), delay_ms=delay_ms))
        return self._order(_members(pairs), changes.of)

    def drop_connections(self, who: Who) -> list[Member]:
        """Break all connections of the broker except those to ZooKeeper, once."""
        return self._inject(who, lambda _, found: faults.connections_dropped(found))

    def move_clock(self, who: Who, by_s: float) -> list[Member]:
        """Let the broker's wall clock jump forward, or backward if negative, in addition to earlier jumps."""
        by_ms = round(by_s * 1_000) if math.isfinite(by_s) else faults.MAX_CLOCK_OFFSET_MS + 1
        if abs(by_ms) > faults.MAX_CLOCK_OFFSET_MS:
            raise LaunchError(f"a clock that jumps by {by_s:g} s: give at most ten years, forward or backward")
        return self._inject(who, lambda _, found: faults.clock_moved(found, by_ms))

    def move_coordinator(self, who: Who) -> list[Member]:
        """Let another broker lead the partition of the internal topic, and so coordinate the group or the transactional
        id. All brokers run on, and need not have been started with `allow_faults`. Returns the former coordinator and
        the new one."""
        if not isinstance(who, Coordinated):
            raise LaunchError(
                "only coordinators move: give coordinator:GROUP or transactions:ID; `minibroker elect` and `minibroker "
                "reassign` move other leaders"
            )
        [former] = self.resolve(who, must_exist=True)
        view = self.view()
        partition = resolution.coordinated_in(who, view)
        state = view.partitions[partition]
        order = order_after_move(partition, state.replica_nodes, state.isr_nodes, int(former))
        asyncio.run(self._lead_by_first(partition, order))
        return [former, order[0]]

    async def _lead_by_first(self, partition: TopicPartition, order: list[int]) -> None:
        security: Security = secured.credentials(self.directory) if self.file().secure else {}
        async with Admin(self.bootstrap(), **security) as admin:
            await lead_by_first(admin, partition, order)

    def _pairs(self, who: Who, other: Who) -> list[tuple[Member, Member]]:
        """Raises LaunchError if there are none."""
        injected.check_allowed(self.file())
        pairs = [
            (first, second)
            for first in self.resolve(who, must_exist=True)
            for second in self.resolve(other, must_exist=True)
            if first != second
        ]
        if not pairs:
            same = listed(name_of(member) for member in self.resolve(who, must_exist=True))
            raise LaunchError(f"both ends are {same}: give two different processes")
        return pairs

    def heal(self, who: Who) -> list[Member]:
        """End all faults of these brokers, those between them and others included, and return the brokers that had
        any, or had not obeyed an earlier healing yet. A broker that has ended stays so."""
        ill = self.faults()
        resolved = self.resolve(who)
        late = self._late()
        members: list[Member] = [member for member in resolved if member in ill]
        changes = _Changes()
        if isinstance(who, ZooKeeperServer):
            members = [broker_id for broker_id, found in ill.items() if found.zookeeper_is_cut]
            self._order(members, lambda _, found: faults.zookeeper_healed(found))
            self._wait_until_obeyed(late)
            return members
        for member in members:
            changes.add(member, faults.healed)
            for peer, found in ill.items():
                if peer not in members and isinstance(member, int) and member in found.links:
                    changes.add(peer, partial(faults.healed_towards, peer=member))
        self._order(list(changes.by_broker), changes.of)
        self._wait_until_obeyed(late)
        return [member for member in resolved if member in members or member in late]

    def mend_disk(self, who: Who) -> list[Member]:
        """End the faults of their disks, and restart the brokers that had taken a log directory offline for them."""
        ill = [id for id, found in self.faults().items() if faults.has_failed_disk(found)]
        members = self._inject(who, lambda _, found: faults.disks_mended(found))
        self.restart_after_a_lost_disk([member for member in ill if member in members])
        return members

    def restart_after_a_lost_disk(self, brokers: Iterable[Member]) -> None:
        """Restart those that have ended, or have taken a log directory offline, which only a restart repairs."""
        for broker_id in brokers:
            if isinstance(broker_id, int) and self._has_lost_a_disk(broker_id):
                if self.state_of(broker_id) is not ProcessState.GONE:
                    self.kill(BrokerId(broker_id))
                self.start(BrokerId(broker_id))

    def _has_lost_a_disk(self, broker_id: int) -> bool:
        """Return whether the broker has ended, or taken a log directory offline. Waits until either is known."""
        found: list[bool] = []

        def is_known() -> bool:
            if self.state_of(broker_id) is ProcessState.GONE:
                found.append(True)
            elif (offline := asyncio.run(ask_offline_log_dirs(self.view())).get(broker_id)) is not None:
                found.append(bool(offline))
            return bool(found)

        wait_until(is_known, KILL_TIMEOUT_S)
        return found[-1] if found else True

    def _disks(self, broker_id: int, number: int | None) -> list[str]:
        """Return the broker's log directories, or the one of this number. Raises LaunchError."""
        found = data_directory.log_dirs(self.directory, broker_id, self.file().log_dirs)
        if number is not None and not 1 <= number <= len(found):
            raise LaunchError(f"there is no log directory {number}: each broker has {len(found)}, numbered from 1 on")
        return [str(path) for path in (found if number is None else [found[number - 1]])]

    def _inject(self, who: Who, change: Callable[[int, Faults], Faults]) -> list[Member]:
        injected.check_allowed(self.file())
        members = self.resolve(who, must_exist=True)
        if ZOOKEEPER in members:
            raise LaunchError(
                "ZooKeeper has no such faults: give a broker; `minibroker pause zookeeper` stops its answers"
            )
        return self._order(members, change)

    def _order(self, members: list[Member], change: Callable[[int, Faults], Faults]) -> list[Member]:
        """Change the faults of these brokers, and return once those that run obey."""
        with cluster_file.locked(self.directory):
            brokers = [member for member in members if isinstance(member, int)]
            ordered = {id: injected.order(self.directory, id, partial(change, id)) for id in brokers}
        self._wait_until_obeyed({id: after.revision for id, after in ordered.items()})
        return members

    def _late(self) -> dict[int, int]:
        """Return the revision of each broker that runs and does not obey it yet."""
        if not self.file().allow_faults:
            return {}
        found = {entry.id: injected.faults_of(self.directory, entry.id).revision for entry in self.file().brokers}
        return {
            id: revision
            for id, revision in found.items()
            if revision and not injected.is_obeyed(self.directory, id, revision) and self._is_running(id)
        }

    def _wait_until_obeyed(self, revisions: Mapping[int, int]) -> None:
        for id, revision in revisions.items():
            injected.wait_until_obeyed(self.directory, id, revision, partial(self._is_running, id))

    def _is_running(self, broker_id: int) -> bool:
        return self.state_of(broker_id) is ProcessState.RUNNING


class _Changes:
    """What is to change in the faults of each broker."""

    def __init__(self) -> None:
        self.by_broker: dict[Member, list[Callable[[Faults], Faults]]] = {}

    def add(self, broker_id: Member, change: Callable[[Faults], Faults]) -> None:
        self.by_broker.setdefault(broker_id, []).append(change)

    def of(self, broker_id: int, found: Faults) -> Faults:
        for change in self.by_broker.get(broker_id, ()):
            found = change(found)
        return found


def _members(pairs: Iterable[tuple[Member, Member]]) -> list[Member]:
    """Return each member once."""
    return list(dict.fromkeys(member for pair in pairs for member in pair))

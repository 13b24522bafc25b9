"""A local cluster whose brokers can have faults of their own, without root: of their disks, networks and clocks.

The brokers inject them into themselves (`injected.py`); a process is killed or paused by `LocalCluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from minibroker.deploy.errors import LaunchError, hidden_from_pytest
from minibroker.deploy.local import cluster_file, data_directory, injected
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import KILL_TIMEOUT_S, ProcessState, wait_until
from minibroker.deploy.local.who import ZOOKEEPER, BrokerId, Member, Who
from minibroker.deploy.observing.cluster_view import ask_offline_log_dirs
from minibroker.protocol import faults
from minibroker.protocol.faults import Faults

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
        self, who: Who, sync_delay_s: float, write_delay_s: float = 0.0, log_dir: int | None = None
    ) -> list[Member]:
        """Let each fsync, and each write, take this much longer; zeros end it."""
        delays_ms = injected.milliseconds(sync_delay_s), injected.milliseconds(write_delay_s)
        return self._inject(who, lambda id, found: faults.disks_slowed(found, self._disks(id, log_dir), *delays_ms))

    def heal(self, who: Who) -> list[Member]:
        """End all faults of these brokers, and return those that had any. A broker that has ended stays so."""
        ill = self.faults()
        members = [member for member in self.resolve(who) if member in ill]
        return self._order(members, lambda _, found: faults.healed(found))

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
        for id, after in ordered.items():
            injected.wait_until_obeyed(self.directory, id, after.revision, partial(self._is_running, id))
        return members

    def _is_running(self, broker_id: int) -> bool:
        return self.state_of(broker_id) is ProcessState.RUNNING

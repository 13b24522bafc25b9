"""Brokers cut off from the cluster and from clients, by rules of the kernel's packet filter.

All brokers of a test cluster share the loopback interface, and a connection's source port does not say which process
opened it. The choice: each broker runs under a group id of its own; packets from the sockets of that group (iptables'
module `owner`) and packets to its listeners are dropped. That takes root, as do network namespaces and veth pairs.
Rejected: a proxy in front of every broker, which needs no root but costs every test time, and would still have to tell
apart the brokers' connections to each other.

The rules carry the cluster's directory as their comment, by which this module and the guardian find them again.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.cluster_file import BrokerEntry
from minibroker.deploy.testing import guardian

_FIRST_GROUP_ID = 1_000_000_000
"""Far from the ids of users and services. The broker's leased port is added."""
_CAP_SETGID = 6
_CAP_NET_ADMIN = 12


class Isolation:
    """Isolates brokers of the cluster in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._missing = _what_is_missing()
        self._isolated: set[int] = set()

    @property
    def is_possible(self) -> bool:
        return not self._missing

    def group_id(self, port: int) -> int | None:
        """Return the group id for the broker on `port`; None if brokers cannot be isolated here."""
        return None if self._missing else _FIRST_GROUP_ID + port

    def isolate(self, broker: BrokerEntry) -> None:
        """Raises LaunchError if brokers cannot be isolated here."""
        if self._missing:
            raise LaunchError(
                f"a broker cannot be isolated by the kernel here: {self._missing}. Run the tests as root, with "
                "iptables (in a container: --cap-add NET_ADMIN)"
            )
        if broker.id in self._isolated:
            return
        self._isolated.add(broker.id)
        ports = [listener.rpartition(":")[2] for listener in broker.settings["listeners"].split(",")]
        matches = (
            ["-m", "owner", "--gid-owner", str(broker.group_id)],
            *(["--dport", port] for port in ports),
        )
        for match in matches:
            rule = ["-o", "lo", "-p", "tcp", *match, "-m", "comment", "--comment", guardian.mark(self._directory)]
            added = subprocess.run(
                ["iptables", "-w", "-I", "OUTPUT", *rule, "-j", "DROP"], capture_output=True, text=True, check=False
            )
            if added.returncode != 0:
                self.heal_all()
                raise LaunchError(f"broker {broker.id} cannot be isolated: {added.stderr.strip()}")

    def heal_all(self) -> bool:
        """Return whether a broker was isolated."""
        if not self._isolated:
            return False
        guardian.remove_rules(self._directory)
        self._isolated.clear()
        return True


def _what_is_missing() -> str:
    """Return the missing privilege or program; empty if brokers can be isolated."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    for bit, name in ((_CAP_SETGID, "CAP_SETGID"), (_CAP_NET_ADMIN, "CAP_NET_ADMIN")):
        if not capabilities & 1 << bit:
            return f"this process lacks the capability {name}"
    for program in ("iptables", "setpriv"):
        if shutil.which(program) is None:
            return f"there is no program {program} on the PATH"
    mapped = [line.split() for line in Path("/proc/self/gid_map").read_text(encoding="ascii").splitlines()]
    if not any(
        int(first) <= _FIRST_GROUP_ID and int(first) + int(count) > 2 * _FIRST_GROUP_ID for first, _, count in mapped
    ):
        return "this user namespace has too few group ids"
    return ""

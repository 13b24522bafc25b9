"""The plan of `minibroker up`: brokers, ports and settings, decided from its options and the last cluster there.

Nothing is read or started here: the caller says which brokers have replicas and how to choose a port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.who import name_of

DEFAULT_BROKERS = 3
DEFAULT_BASE_PORT = 9092
METRICS_PORT_DISTANCE = 1_000
OFFSETS_REPLICATION_FACTOR: Final = "offsets.topic.replication.factor"
TRANSACTIONS_REPLICATION_FACTOR: Final = "transaction.state.log.replication.factor"

ZOOKEEPER_PROTECTION: Final = {
    "zookeeper.digest.file": "",
    "zookeeper.set.acl": "true",
    "zookeeper.set.root.acl": "true",
}
"""The settings that keep strangers from changing nodes, without the file's name."""

ChoosePort = Callable[[int | None, Collection[int]], int]
"""`ports.choose_port`: the preferred port if it is free, else another one that is not in the collection."""


class Options(NamedTuple):
    """The options of `up`. None means the value of the last time in this directory, or the default."""

    brokers: int | None = None
    base_port: int | None = None
    zookeeper_connect: str | None = None
    settings: Mapping[str, str] | None = None
    log_dirs: int | None = None
    secure: bool | None = None
    allow_faults: bool | None = None


def planned(
    directory: Path,
    before: ClusterFile | None,
    options: Options,
    with_replicas: Sequence[int],
    choose_port: ChoosePort,
) -> ClusterFile:
    """Return the cluster to run, without processes.

    `with_replicas` are the ids of the brokers that have replicas in `directory`: none of them is left out, not even one
    of an earlier, larger cluster. Raises LaunchError if the options would leave out replicas or need too many ports.
    """
    count, base_port, zookeeper_connect, settings, log_dirs, secure, allow_faults = options
    if count is None:
        count = max(DEFAULT_BROKERS if before is None else len(before.brokers), *with_replicas, 1)
    if left_out := [broker_id for broker_id in with_replicas if broker_id > count]:
        raise LaunchError(
            f"--brokers {count} would leave out {', '.join(map(name_of, left_out))}, with replicas in {directory}: "
            f"leave out --brokers, give {left_out[-1]} or more, or use another --data; to have fewer, first move the "
            "replicas to other brokers: `minibroker reassign generate`"
        )
    if before is not None:
        base_port = before.brokers[0].port if base_port is None else base_port
        settings = before.settings if settings is None else settings
        log_dirs = before.log_dirs if log_dirs is None else log_dirs
        secure = before.secure if secure is None else secure
        allow_faults = before.allow_faults if allow_faults is None else allow_faults
        if log_dirs < before.log_dirs:
            raise LaunchError(
                f"--log-dirs {log_dirs}: each broker has replicas in {before.log_dirs} log directories, and would miss "
                f"them: give {before.log_dirs} or more, or use another --data"
            )
    first_port = DEFAULT_BASE_PORT if base_port is None else base_port
    if first_port + count > 65_536:
        raise LaunchError(f"{count} brokers from port {first_port} on go past port 65535: use a lower --base-port")
    if zookeeper_connect is not None:
        zookeeper = ZooKeeperEntry(zookeeper_connect)
    elif before is not None and before.zookeeper.port is None:
        zookeeper = before.zookeeper
    else:
        port = choose_port(before.zookeeper.port if before else None, range(first_port, first_port + count))
        zookeeper = ZooKeeperEntry(f"{LOOPBACK}:{port}", port)
    same = before.brokers if before is not None and before.brokers[0].port == first_port else ()
    return ClusterFile(
        zookeeper=zookeeper,
        brokers=tuple(
            BrokerEntry(number + 1, first_port + number, metrics_port=metrics_port)
            for number, metrics_port in enumerate(metrics_ports(first_port, count, same, choose_port))
        ),
        settings=dict(settings or {}),
        log_dirs=log_dirs or 1,
        secure=bool(secure),
        allow_faults=bool(allow_faults),
    )


def metrics_ports(first_port: int, count: int, before: Sequence[BrokerEntry], choose_port: ChoosePort) -> list[int]:
    """Return each broker's metrics port: the last time's, which Prometheus's configuration names, else 1000 above the
    broker's own. A broker whose port is taken gets another one; the ports of the other brokers stay."""
    known = {number: entry.metrics_port for number, entry in enumerate(before) if entry.metrics_port is not None}
    taken = {*range(first_port, first_port + count), *known.values()}
    ports: list[int] = []
    for number in range(count):
        usual = first_port + METRICS_PORT_DISTANCE + number
        port = choose_port(known.get(number, None if usual in taken else usual), taken)
        taken.add(port)
        ports.append(port)
    return ports


def differences(running: ClusterFile, options: Options) -> list[str]:
    """Return the options that the running cluster does not have, as the user would write them."""
    asked_and_found: tuple[tuple[str, object, object], ...] = (
        ("--brokers", options.brokers, len(running.brokers)),
        ("--base-port", options.base_port, running.brokers[0].port),
        ("--zookeeper", options.zookeeper_connect, running.zookeeper.connect),
        ("--log-dirs", options.log_dirs, running.log_dirs),
    )
    found = [f"{option} {asked}" for option, asked, found in asked_and_found if asked not in (None, found)]
    if options.secure not in (None, running.secure):
        found.append("--secure" if options.secure else "--no-secure")
    if options.allow_faults not in (None, running.allow_faults):
        found.append("--allow-faults" if options.allow_faults else "--no-allow-faults")
    if options.settings not in (None, running.settings):
        asked = (options.settings or {}).items()
        missing = [f"--override {name}={value}" for name, value in asked if running.settings.get(name) != value]
        found += missing or ["fewer --override"]
    return found


def summary(cluster: ClusterFile) -> str:
    """Return the cluster's options on one line, for messages."""
    settings = "".join(f", {name}={value}" for name, value in cluster.settings.items())
    log_dirs = f", log directories: {cluster.log_dirs} each" if cluster.log_dirs > 1 else ""
    faults = ", faults allowed" if cluster.allow_faults else ""
    return (
        f"brokers: {len(cluster.brokers)}, base port {cluster.brokers[0].port}, ZooKeeper {cluster.zookeeper.connect}"
        f"{log_dirs}{', secured' if cluster.secure else ''}{faults}{settings}"
    )


def settings_of(
    cluster: ClusterFile,
    entry: BrokerEntry,
    secret_file: str | None,
    digest_file: str | None = None,
    secured: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the settings of one broker. Three replicas are the default, or fewer on a smaller cluster.

    `digest_file`: the credential for a ZooKeeper that was started here. It is not used beside one of the user's own.
    `secured`: the settings of a secured cluster.
    """
    replicas = str(usual_replicas(cluster))
    secret = {} if secret_file is None else {"broker.secret.file": secret_file}
    topics = ("default.replication.factor", OFFSETS_REPLICATION_FACTOR, TRANSACTIONS_REPLICATION_FACTOR)
    own = {**cluster.settings, **entry.settings}
    protection: dict[str, str] = {}
    if digest_file is not None and not own.keys() & ZOOKEEPER_PROTECTION.keys():
        protection = {**ZOOKEEPER_PROTECTION, "zookeeper.digest.file": digest_file}
    return {**dict.fromkeys(topics, replicas), **secret, **protection, **secured, **own}


def protocol_of(cluster: ClusterFile, entry: BrokerEntry) -> str:
    """Return the protocol of the listener at the broker's port: of its settings if they have it, or the launcher's."""
    settings = {**cluster.settings, **entry.settings}
    names = [
        listener.partition("://")[0].strip().upper()
        for listener in settings.get("listeners", "").split(",")
        if listener.strip().endswith(f":{entry.port}")
    ]
    if not names:
        return "SASL_SSL" if cluster.secure else "PLAINTEXT"
    pairs = (pair.partition(":") for pair in settings.get("listener.security.protocol.map", "").split(","))
    protocols = {name.strip().upper(): protocol.strip().upper() for name, _, protocol in pairs}
    return protocols.get(names[0], names[0])


def usual_replicas(cluster: ClusterFile) -> int:
    return min(3, len(cluster.brokers))


def offsets_replicas(cluster: ClusterFile) -> int:
    """Return the number of brokers that must run before groups have a coordinator."""
    return int(cluster.settings.get(OFFSETS_REPLICATION_FACTOR, usual_replicas(cluster)))


def check_ports(brokers: Sequence[BrokerEntry], is_free: Callable[[int], bool]) -> None:
    """Raises LaunchError if the port of a broker is taken."""
    taken = [entry for entry in brokers if not is_free(entry.port)]
    if taken:
        ports = ", ".join(f"{entry.port} (broker {entry.id})" for entry in taken)
        are_in_use = f"port {ports} is in use" if len(taken) == 1 else f"ports {ports} are in use"
        raise LaunchError(
            f"{are_in_use}: stop what listens there, or use other ports with `minibroker up --base-port PORT`"
        )

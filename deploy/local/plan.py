"""The plan of `minibroker up`: brokers, ports and settings, decided from its options and the last cluster there.

Nothing is read or started here: the caller says which brokers have replicas and how to choose a port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.who import name_of

DEFAULT_BROKERS = 3
USUAL_REPLICAS = 3
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
"""`PortLeases.choose`: the preferred port if it is free, else another one that is not in the collection."""


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

    Brokers keep their ids; others get the lowest free ones. `with_replicas` are the ids of the brokers that have
    replicas in `directory`: none of them is left out, not even one of an earlier, larger cluster. Raises LaunchError if
    the options would leave out replicas or need too many ports.
    """
    count, base_port, zookeeper_connect, settings, log_dirs, secure, allow_faults = options
    known = [] if before is None else [entry.id for entry in before.brokers]
    usual = list(islice(_ids(known), len(known) or DEFAULT_BROKERS))
    ids = sorted({*usual, *with_replicas}) if count is None else sorted(islice(_ids(known), count))
    if left_out := [broker_id for broker_id in with_replicas if broker_id not in ids]:
        enough = next(number for number, id in enumerate(_ids(known), 1) if id == left_out[-1])
        raise LaunchError(
            f"--brokers {count} would leave out {', '.join(map(name_of, left_out))}, with replicas in {directory}: "
            f"leave out --brokers, give {enough} or more, or use another --data; to have fewer, start them all and use "
            "`minibroker brokers remove`, which moves the replicas to other brokers"
        )
    if before is not None:
        base_port = before.base_port if base_port is None else base_port
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
    _check_last_port(first_port, ids[-1])
    if zookeeper_connect is not None:
        zookeeper = ZooKeeperEntry(zookeeper_connect)
    elif before is not None and before.zookeeper.port is None:
        zookeeper = before.zookeeper
    else:
        port = choose_port(before.zookeeper.port if before else None, range(first_port, first_port + ids[-1]))
        zookeeper = ZooKeeperEntry(f"{LOOPBACK}:{port}", port)
    same = before.brokers if before is not None and before.base_port == first_port else ()
    leaving = {} if before is None else {entry.id: entry.leaving for entry in before.brokers}
    return ClusterFile(
        zookeeper=zookeeper,
        brokers=tuple(
            BrokerEntry(id, _port(first_port, id), metrics_port=metrics_port, leaving=leaving.get(id))
            for id, metrics_port in metrics_ports(first_port, ids, same, choose_port).items()
        ),
        settings=dict(settings or {}),
        log_dirs=log_dirs or 1,
        secure=bool(secure),
        allow_faults=bool(allow_faults),
        replicas=min(USUAL_REPLICAS, len(ids)),
    )


def grown(running: ClusterFile, count: int, choose_port: ChoosePort) -> ClusterFile:
    """Return the cluster with as many more brokers that it has `count`. Raises LaunchError if that is not possible."""
    if any(entry.settings for entry in running.brokers):
        raise LaunchError(
            "the brokers of this cluster have settings of their own, as those of `minibroker.testing` have: give the "
            "number of brokers there"
        )
    known = [entry.id for entry in running.brokers]
    ids = list(islice(_ids(known), count))
    _check_last_port(running.base_port, max(ids))
    metrics = metrics_ports(running.base_port, ids, running.brokers, choose_port)
    added = [BrokerEntry(id, _port(running.base_port, id), metrics_port=metrics[id]) for id in ids[len(known) :]]
    return msgspec.structs.replace(running, brokers=tuple(sorted((*running.brokers, *added), key=lambda one: one.id)))


def _ids(known: Sequence[int]) -> Iterator[int]:
    """Return the ids of brokers in the order in which a growing cluster takes them, without an end."""
    yield from known
    yield from (number for number in numbers(1) if number not in known)


def _port(first_port: int, broker_id: int) -> int:
    return first_port + broker_id - 1


def _check_last_port(first_port: int, broker_id: int) -> None:
    if _port(first_port, broker_id) > 65_535:
        raise LaunchError(f"{broker_id} brokers from port {first_port} on go past port 65535: use a lower --base-port")


def metrics_ports(
    first_port: int, ids: Sequence[int], before: Sequence[BrokerEntry], choose_port: ChoosePort
) -> dict[int, int]:
    """Return each broker's metrics port: the last time's, which Prometheus's configuration names, else 1000 above the
    broker's own. A broker whose port is taken gets another one; the ports of the other brokers stay."""
    known = {entry.id: entry.metrics_port for entry in before if entry.metrics_port is not None}
    taken = {*(_port(first_port, id) for id in ids), *known.values()}
    ports: dict[int, int] = {}
    for id in ids:
        usual = _port(first_port, id) + METRICS_PORT_DISTANCE
        ports[id] = choose_port(known.get(id, None if usual in taken else usual), taken)
        taken.add(ports[id])
    return ports


def differences(running: ClusterFile, options: Options) -> list[str]:
    """Return the options that the running cluster does not have, as the user would write them. It can grow; that it has
    fewer brokers than asked for is no difference."""
    asked_and_found: tuple[tuple[str, object, object], ...] = (
        ("--base-port", options.base_port, running.base_port),
        ("--zookeeper", options.zookeeper_connect, running.zookeeper.connect),
        ("--log-dirs", options.log_dirs, running.log_dirs),
    )
    found = [f"{option} {asked}" for option, asked, found in asked_and_found if asked not in (None, found)]
    if options.brokers is not None and options.brokers < len(running.brokers):
        found.insert(0, f"--brokers {options.brokers}")
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
        f"brokers: {len(cluster.brokers)}, base port {cluster.base_port}, ZooKeeper {cluster.zookeeper.connect}"
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
    return cluster.replicas or min(USUAL_REPLICAS, len(cluster.brokers))


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
